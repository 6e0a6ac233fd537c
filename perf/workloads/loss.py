"""Forward and backward of one loss."""

from __future__ import annotations

import torch

from impl.loss.cases import LossCase
from shardmark.memory import meter, release
from shardmark.plan import Mark
from shardmark.registry import Implementation
from shardmark.rows import Row


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


def assert_within_eagers_peak(memory: Row, eager: int, share: float) -> None:
    """Assert that a row's tensors at the peak are within 5% of its formula, and at most `share` times eager's."""
    tensors, formula = memory["tensors"], memory["formula"]
    assert abs(tensors - formula) <= 0.05 * formula, f"{tensors:,} bytes of tensors, the formula's are {formula:,}"
    assert tensors <= share * eager, f"{tensors:,} bytes of tensors, eager's are {eager:,}"


def metered_peak(implementation: Implementation, case: LossCase, device: str) -> int:
    """Bytes of tensors at the peak of one step; on CUDA the smaller of two: libraries take workspaces in the first."""
    peaks = []
    for _ in range(2 if device == "cuda" else 1):
        release(device)
        with meter(device) as memory:
            step = LossStep(implementation, case, device)
            step.prepare()
            memory.reset_peak()
            step.step(lambda part: None)
        peaks.append(memory.tensors)
        del step
    release(device)
    return min(peaks)
