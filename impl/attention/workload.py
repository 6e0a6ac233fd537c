"""Attention on random q, k, v: forward, backward, or both."""

from __future__ import annotations

import torch

from impl.attention import sdpa, sdpa_backend
from impl.attention.cases import AttentionCase
from shardmark.api import Implementation, Mark


class AttentionPass:
    """The pass that the case names, on random q, k, v."""

    def __init__(self, implementation: Implementation, case: AttentionCase, device: str) -> None:
        self.attention = implementation.adapted
        self.case = case
        self.q, self.k, self.v = (
            torch.randn(case.shape, device=device, dtype=case.torch_dtype).requires_grad_() for _ in range(3)
        )
        self.backend = self._backend(implementation)
        self.grad_out = None if case.mode == "forward" else torch.randn_like(self.q, requires_grad=False)
        self.out: torch.Tensor | None = None

    def prepare(self) -> None:
        """Free the last step's results; run forward where only backward is measured."""
        self.out = None
        for x in (self.q, self.k, self.v):
            x.grad = None
        if self.case.mode == "backward":
            self.out = self.attention(self.q, self.k, self.v, is_causal=self.case.is_causal)

    def step(self, mark: Mark) -> None:
        if self.case.mode != "backward":
            self.out = self.attention(self.q, self.k, self.v, is_causal=self.case.is_causal)
            mark("forward")
        if self.case.mode != "forward":
            assert self.out is not None
            self.out.backward(self.grad_out)
            mark("backward")

    def _backend(self, implementation: Implementation) -> str:
        """Name of the kernel that SDPA chooses, or of the implementation."""
        if implementation.target is sdpa:
            return sdpa_backend(self.q, self.k, self.v, self.case.is_causal)
        return implementation.name
