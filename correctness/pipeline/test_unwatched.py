"""Pipelines unwatched, on two ranks: batches drawn anew, over some steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation

COUNT, STEPS = 6, 5


def draw(generator: torch.Generator) -> dict[str, Any]:
    rows, context = (1 + torch.randint(4, (2,), generator=generator)).tolist()
    shape = STEPS, COUNT, rows, context
    return {name: torch.randint(11, shape, generator=generator) for name in ("tokens", "targets")}


def perform(target: Any, given: Any, rank: int | None) -> dict[str, Tensor]:
    """Losses of steps by SGD, of twelve layers that stages share out: the same for any number of these."""
    from torch import nn

    from impl.pipeline.contract import adapted

    def build(stage: int, stages: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Embedding(11, 8)] if stage == 0 else []
        for layer in range(12 * stage // stages, 12 * (stage + 1) // stages):
            torch.manual_seed(layer)
            layers += [nn.Linear(8, 8), nn.Tanh()]
        if stage == 0:
            torch.manual_seed(100)
            layers[0].reset_parameters()
        torch.manual_seed(101)
        return nn.Sequential(*layers, *([nn.Linear(8, 11)] if stage == stages - 1 else [])).double()

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")

    count = given["tokens"].shape[1]
    if rank is None:
        modules = {0: build(0, 1)}
    else:
        pipeline = adapted(target)(build, torch.distributed.group.WORLD, count, loss=loss)
        modules = pipeline.modules
    optimizer = torch.optim.SGD([p for module in modules.values() for p in module.parameters()], lr=0.01)
    found = {}
    for step in range(len(given["tokens"])):
        optimizer.zero_grad()
        inputs, targets = [(x,) for x in given["tokens"][step]], list(given["targets"][step])
        if rank is None:
            total = sum(loss(modules[0](*x), y) for x, y in zip(inputs, targets, strict=True))
            total.backward()
        else:
            total = pipeline.step(inputs, targets)
        optimizer.step()
        found[f"loss of step {step}"] = torch.as_tensor(total, dtype=torch.float64).detach().clone()
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    return perform(None, given, None)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("pipeline")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)
