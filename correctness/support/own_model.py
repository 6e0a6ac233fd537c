"""Train the model of `--model` in float64 on ranks and in one process with all ranks' batches, for five families."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from impl.training_step.micro_batches import accumulate
from shardmark.api import Grid, Made, MakesOptimizer, OwnModelCase, Unsupported, make, named_optimizer

OWN = Grid(smoke=[], laptop=[], paper=[], own=OwnModelCase.of)
"""Limits a test to the case of `--model`."""
STEPS = 3
CLOSE = 1e-9
"""Tolerance, absolute or as a share of the largest value: rounding is below it; a wrong gradient moves parameters
under Adam by about the learning rate, 1e-4."""

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


def optimizer_of(case: OwnModelCase, made: Made) -> MakesOptimizer:
    """The optimizer of the run, by `--optimizer` or the user's function, or the default, AdamW: a wrong gradient stays
    visible in its state."""
    named = case.recipe.optimizer
    return made.optimizer if named is None else named_optimizer(named)


def clipping(shards: Any) -> Callable[[float], object]:
    """The method of a wrapper or optimizer that clips gradients of which each rank has a part; Unsupported if it has
    none, as its contract allows."""
    if not hasattr(shards, "clip_grad_norm_"):
        return _not_clipping
    clip: Callable[[float], object] = shards.clip_grad_norm_
    return clip


def _not_clipping(norm: float) -> None:
    raise Unsupported("it has no method clip_grad_norm_")


def own_loss(model: Any, case: OwnModelCase, device: str, rank: int, batch: int) -> Tensor:
    """Loss () of that rank's batch of that number, as its share of the step's mean loss; dropout is seeded by rank and
    batch."""
    own = own_model(case, device, rank, batch)
    torch.manual_seed(1000 * batch + rank)
    return own.loss(model, *own.batch) / case.recipe.micro_batches


def train(
    model: Any,
    case: OwnModelCase,
    device: str,
    parameters: Callable[[], Any],
    optimizer: torch.optim.Optimizer,
    synchronizes: Any = None,
    clip: Callable[[float], object] | None = None,
) -> Trained:
    """Take STEPS steps on this rank's batches; `parameters` returns them by name. `synchronizes` is the wrapper or
    optimizer that averages gradients; `clip` clips them, by default as PyTorch does those of the model."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    recipe = case.recipe
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        of_step: list[float] = []

        def forward_and_backward(step: int = step, of_step: list[float] = of_step) -> None:
            batch = step * recipe.micro_batches + len(of_step)
            loss = own_loss(model, case, device, rank, batch)
            loss.backward()
            of_step.append(loss.item())

        accumulate(forward_and_backward, recipe.micro_batches, synchronizes or _Alone())
        if synchronizes is not None:
            synchronizes.finish_gradient_synchronization()
        if recipe.clip is not None:
            (clip or partial(nn.utils.clip_grad_norm_, list(model.parameters())))(recipe.clip)
        optimizer.step()
        losses.append(sum(of_step))
    return Trained(losses, on_cpu(parameters()))


class _Alone:
    """Averages nothing: there is one process."""

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do."""


def on_cpu(parameters: Any) -> Parameters:
    return {name: parameter.detach().cpu() for name, parameter in dict(parameters).items()}


@cache
def in_one_process(case: OwnModelCase, ranks: int, device: str) -> tuple[list[list[float]], Parameters]:
    """Train in one process from the first rank's weights; return the losses by step and rank, and the final
    parameters."""
    own = own_model(case, device, 0)
    check_what_it_draws(own, own_model(case, device, 0), own_model(case, device, 1))
    with skipping_what_lacks_float64(case):
        return _in_one_process(own, case, ranks, device)


@contextmanager
def skipping_what_lacks_float64(case: OwnModelCase) -> Iterator[None]:
    """Skip where one process cannot train the model in float64."""
    try:
        yield
    except RuntimeError as error:
        pytest.skip(f"{case.name} does not run in float64: {str(error).partition(chr(10))[0]}")


def _in_one_process(made: Made, case: OwnModelCase, ranks: int, device: str) -> tuple[list[list[float]], Parameters]:
    model, recipe = made.module, case.recipe
    optimizer = optimizer_of(case, made)(list(model.parameters()))
    losses: list[list[float]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([0.0] * ranks)
        for rank in range(ranks):
            for i in range(recipe.micro_batches):
                loss = own_loss(model, case, device, rank, step * recipe.micro_batches + i)
                (loss / ranks).backward()
                losses[-1][rank] += loss.item()
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
    return losses, on_cpu(model.named_parameters())


def check_what_it_draws(own: Made, again: Made, other: Made) -> None:
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
