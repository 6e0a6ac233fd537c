"""Forward and backward of one loss."""

from __future__ import annotations

import torch

from impl.loss.cases import LossCase
from shardmark.api import Implementation, Mark


class LossStep:
    """Forward and backward of one loss, on random hidden states and targets."""

    def __init__(self, implementation: Implementation, case: LossCase, device: str) -> None:
        self.loss_of = implementation.adapted
        self.backend = implementation.name
        self.hidden, self.weight = (
            torch.randn(n, case.dim, device=device, dtype=case.torch_dtype).mul_(std).requires_grad_()
            for n, std in ((case.tokens, 1.0), (case.vocab, case.dim**-0.5))  # logits of unit variance
        )
        self.targets = torch.randint(case.vocab, (case.tokens,), device=device)
        self.loss: torch.Tensor | None = None

    def prepare(self) -> None:
        """Free the last step's results."""
        self.loss = self.hidden.grad = self.weight.grad = None

    def step(self, mark: Mark) -> None:
        self.loss = self.loss_of(self.hidden, self.weight, self.targets)
        mark("forward")
        self.loss.backward()
        mark("backward")
