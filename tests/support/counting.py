"""Small steps whose work is known, and their counters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardmark.api.workload import Mark
from shardmark.meter.counters import Counters, count


class Step:
    """Forward is the sum of `forward(model, x)`; backward follows."""

    backend = "none"

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor], model: nn.Module | None = None) -> None:
        self.forward, self.model = forward, model or two_linears()
        self.x = torch.randn(2, 8)
        self.loss: Tensor | None = None

    def prepare(self) -> None:
        self.loss = None
        self.model.zero_grad()

    def step(self, mark: Mark) -> None:
        self.loss = self.forward(self.model, self.x).sum()
        mark("forward")
        self.loss.backward()
        mark("backward")


class Loops(Step):
    """A loop in Python alone, of so many iterations."""

    def __init__(self, iterations: int = 100) -> None:
        super().__init__(plain)
        self.iterations = iterations

    def step(self, mark: Mark) -> None:
        super().step(mark)
        loop(self.iterations)


def loop(iterations: int) -> int:
    found = 0
    for i in range(iterations):
        found += i
    return found


def two_linears() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 4, bias=False))


def counted(workload: Any) -> Counters:
    """The counters of its second step."""
    workload.prepare()
    workload.step(lambda part: None)
    found = count(workload, "cpu")
    assert found is not None
    return found


def plain(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)  # type: ignore[no-any-return]
