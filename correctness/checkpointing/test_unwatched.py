"""A checkpointing policy unwatched."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> dict[str, Any]:
    dim, layers, rows = (3 + torch.randint(9, (3,), generator=generator)).tolist()
    return {"dim": dim, "layers": layers, "x": torch.randn(rows, dim, generator=generator)}


def perform(target: Any, given: Any, rank: int) -> dict[str, Tensor]:
    from torch import nn

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            dim = given["dim"]
            parts = [nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * dim, dim))]
            parts += [nn.Sequential(nn.Linear(dim, dim), nn.Tanh()) for _ in range(given["layers"])]
            self.blocks = nn.ModuleList(parts)

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(5)
    model, found = target(Model()), {}
    for step in range(40):
        x = given["x"].clone().requires_grad_()
        model.zero_grad()
        out = model(x)
        out.square().sum().backward()
        if step in (0, 39):
            found |= {f"out in step {step}": out.detach(), f"the input's gradient in step {step}": x.grad}
            found |= {f"the gradient of {name} in step {step}": p.grad.clone() for name, p in model.named_parameters()}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    return perform(lambda model: model, given, 0)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("checkpointing")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected)
