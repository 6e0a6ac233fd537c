"""Forward and backward of one operation of the layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from impl.layers.cases import LayersCase
from shardmark.api import Implementation, Mark

EPS = 1e-5


class LayersStep:
    """Forward and backward of one operation, on random inputs, for random gradients of its results."""

    def __init__(self, implementation: Implementation, case: LayersCase, device: str) -> None:
        self.call = getattr(implementation.adapted, case.operation)
        self.backend = implementation.name
        self.options: dict[str, Any] = {"eps": EPS} if "norm" in case.operation else {}

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=case.torch_dtype)

        rows = (case.tokens, case.dim)
        heads = (1, case.dim // case.head_dim, case.tokens, case.head_dim)
        one = heads if case.operation == "rotary" else rows
        like = [one] if case.operation == "rms_norm" else [one, one]
        self.leaves = [random(*shape) for shape in like]
        self.grads = [random(*shape) for shape in (like[:1] if case.operation == "swiglu" else like)]
        if "norm" in case.operation:
            self.leaves.append(random(case.dim))
        for leaf in self.leaves:
            leaf.requires_grad_()
        self.constants = _tables(case, device) if case.operation == "rotary" else []
        self.results: list[Tensor] = []

    def prepare(self) -> None:
        """Free the last step's results."""
        self.results = []
        for leaf in self.leaves:
            leaf.grad = None

    def step(self, mark: Mark) -> None:
        found = self.call(*self.leaves, *self.constants, **self.options)
        self.results = [found] if isinstance(found, Tensor) else [*found]
        del found
        mark("forward")
        torch.autograd.backward(self.results, self.grads)
        mark("backward")


def _tables(case: LayersCase, device: str) -> list[Tensor]:
    """Cosines and sines of a decoder's angles, (tokens, head_dim / 2) in float32 (Su et al., 2021)."""
    wide = torch.promote_types(case.torch_dtype, torch.float32)
    frequencies = 10_000.0 ** (-torch.arange(0, case.head_dim, 2, dtype=torch.float64) / case.head_dim)
    angles = torch.outer(torch.arange(case.tokens, dtype=torch.float64), frequencies)
    return [table.to(device, wide) for table in (angles.cos(), angles.sin())]
