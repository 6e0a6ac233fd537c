"""AdamW unwatched: parameters drawn anew, over hundreds of steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> dict[str, Any]:
    shapes = [torch.randint(1, 40, (n,), generator=generator).tolist() for n in (1, 2, 2, 1, 2)]
    return {
        "options": {"lr": 2e-3, "betas": (0.85, 0.97), "eps": 1e-7, "weight_decay": 0.05},
        "values": [torch.randn(shape, generator=generator) for shape in shapes],
        "gradients": [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(20)],
    }


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    values = [value.requires_grad_() for value in given["values"]]
    optimizer, found = target(values, **given["options"]), {}
    for step in range(400):
        for p, gradient in zip(values, given["gradients"][step % 20], strict=True):
            p.grad = gradient.clone()
        optimizer.step()
        if step in (0, 9, 399):
            found |= {f"parameter {i} after step {step + 1}": p.detach().clone() for i, p in enumerate(values)}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    wide = {name: [x.double() for x in given[name]] for name in ("values",)}
    wide["gradients"] = [[x.double() for x in each] for each in given["gradients"]]  # type: ignore[misc]
    return perform(torch.optim.AdamW, given | wide, 0)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("optimizer")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected)
