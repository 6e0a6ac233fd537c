"""One softmax on random numbers."""

from __future__ import annotations

import torch

from impl.softmax.cases import SoftmaxCase
from shardmark.api import Implementation, Mark


class SoftmaxStep:
    """Forward alone."""

    backend = "torch"

    def __init__(self, implementation: Implementation, case: SoftmaxCase, device: str) -> None:
        self.softmax = implementation.target
        self.x = torch.randn(case.elements, device=device)  # (elements,)

    def prepare(self) -> None:
        """Nothing is to be freed before a step."""

    def step(self, mark: Mark) -> None:
        self.softmax(self.x)
        mark("forward")
