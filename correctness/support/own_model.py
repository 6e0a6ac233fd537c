"""Train the model of `--model` in float64 on ranks and in one process with all ranks' batches, for five families."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardmark.api import Grid, Made, OwnModelCase, make

OWN = Grid(smoke=[], laptop=[], paper=[], own=OwnModelCase.of)
"""Limits a test to the case of `--model`."""
STEPS = 3
LEARNING_RATE = 1e-3
CLOSE = 1e-9
"""Tolerance, absolute or as a share of the largest value: rounding is below it; a wrong gradient moves parameters
under Adam by about the learning rate."""

Parameters = dict[str, Tensor]


@dataclass
class Trained:
    """Result of STEPS steps on one rank: its losses, and the parameters on the CPU."""

    losses: list[float]
    parameters: Parameters


def own_model(case: OwnModelCase, device: str, rank: int, step: int = 0) -> Made:
    """Model and batch that the user's function makes, in float64, seeded by rank and step."""
    torch.manual_seed(1000 * step + rank)
    own = make(case.model, device)
    own.module.double()
    own.batch = tree_map_only(Tensor, lambda x: x.double() if x.is_floating_point() else x, own.batch)
    return own


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam, since a wrong gradient stays visible in its state."""
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)


def own_loss(model: Any, case: OwnModelCase, device: str, rank: int, step: int) -> Tensor:
    """Loss () of that rank's batch for the step; dropout is seeded by rank and step."""
    own = own_model(case, device, rank, step)
    torch.manual_seed(1000 * step + rank)
    return own.loss(model, *own.batch)


def train(
    model: Any,
    case: OwnModelCase,
    device: str,
    parameters: Callable[[], Any],
    synchronize: Callable[[], object] = lambda: None,
    optimizer: torch.optim.Optimizer | None = None,
) -> Trained:
    """Take STEPS steps on this rank's batches, by Adam unless an optimizer is given; `parameters` returns them by
    name."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    optimizer = optimizer or adam(model)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = own_loss(model, case, device, rank, step)
        loss.backward()
        synchronize()
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, on_cpu(parameters()))


def on_cpu(parameters: Any) -> Parameters:
    return {name: parameter.detach().cpu() for name, parameter in dict(parameters).items()}


@cache
def in_one_process(case: OwnModelCase, ranks: int, device: str) -> tuple[list[list[float]], Parameters]:
    """Train in one process from the first rank's weights; return the losses by step and rank, and the final
    parameters."""
    own = own_model(case, device, 0)
    _check_what_it_draws(own, own_model(case, device, 0), own_model(case, device, 1))
    try:
        return _in_one_process(own.module, case, ranks, device)
    except RuntimeError as error:
        pytest.skip(f"{case.name} does not run in float64: {str(error).partition(chr(10))[0]}")


def _in_one_process(
    model: nn.Module, case: OwnModelCase, ranks: int, device: str
) -> tuple[list[list[float]], Parameters]:
    optimizer = adam(model)
    losses: list[list[float]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([])
        for rank in range(ranks):
            loss = own_loss(model, case, device, rank, step)
            (loss / ranks).backward()
            losses[-1].append(loss.item())
        optimizer.step()
    return losses, on_cpu(model.named_parameters())


def _check_what_it_draws(own: Made, again: Made, other: Made) -> None:
    """Fail unless the model is reproducible and batches differ between ranks: comparisons need both."""
    first, second = own.module.state_dict(), again.module.state_dict()
    if not all(torch.equal(first[name], second[name]) for name in first) or not _same(own.batch, again.batch):
        pytest.fail("it makes another model or batch each time: have PyTorch's generator draw them", pytrace=False)
    if _same(own.batch, other.batch):
        pytest.fail(
            "its batch is the same on every rank, so that nothing tells whether gradients are averaged: have "
            "PyTorch's generator draw it",
            pytrace=False,
        )


def _same(batch: Any, other: Any) -> bool:
    tensors: tuple[list[Tensor], list[Tensor]] = ([], [])
    for found, each in zip(tensors, (batch, other), strict=True):
        tree_map_only(Tensor, found.append, each)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(*tensors, strict=True))


def assert_as_in_one_process(found: list[Trained], case: OwnModelCase, device: str, close: float = CLOSE) -> None:
    """Assert each rank's losses and parameters equal those of one process that trains on the mean loss."""
    losses, parameters = in_one_process(case, len(found), device)
    for step, of_ranks in enumerate(losses):
        for rank, expected in enumerate(of_ranks):
            loss = found[rank].losses[step]
            assert abs(loss - expected) <= close * max(1.0, abs(expected)), (
                f"in step {step} the loss on rank {rank} is {loss:.9g}, and of the same batch in one process "
                f"{expected:.9g}"
            )
    for rank, trained in enumerate(found):
        for name, expected_value in parameters.items():
            assert name in trained.parameters, f"{name!r} is not among the parameters on rank {rank}"
            value = trained.parameters[name]
            error, largest = (x.abs().max().item() if x.numel() else 0.0 for x in (value - expected_value, value))
            assert error <= close * max(1.0, largest), (
                f"after {STEPS} steps {name!r} on rank {rank} differs from that in one process by up to {error:.3g}"
            )
