"""A sharded optimizer unwatched, on two ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> dict[str, Any]:
    shapes = [torch.randint(1, 40, (n,), generator=generator).tolist() for n in (1, 2, 2, 1, 2)]
    return {
        "values": [torch.randn(shape, generator=generator) for shape in shapes],
        "gradients": [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(10)],
    }


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    values = [torch.nn.Parameter(value.clone()) for value in given["values"]]
    optimizer, found = target(values, torch.optim.AdamW, lr=1e-2, weight_decay=0.1), {}
    for step in range(60):
        for p, gradient in zip(values, given["gradients"][step % 10], strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        if step in (0, 59):
            found |= {f"parameter {i} after step {step + 1}": p.detach().clone() for i, p in enumerate(values)}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    return perform(lambda params, optimizer_cls, **options: optimizer_cls(params, **options), given, 0)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("sharded_optimizer")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)
