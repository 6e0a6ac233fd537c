"""What does attention cost, in time and in memory: forward, backward and both?"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from impl.accounting.attention import work
from impl.attention import sdpa
from shardmark import cases
from shardmark.cases import AttentionCase
from shardmark.measure import Measure
from shardmark.passes import Mark
from shardmark.registry import Implementation

pytestmark = [pytest.mark.family("attention"), pytest.mark.question("What does attention cost?")]


class AttentionPass:
    """Attention over fresh random q, k, v: the pass that the case names."""

    def __init__(self, implementation: Implementation, case: AttentionCase, device: str) -> None:
        self.attention = implementation.adapted
        self.case = case
        self.q, self.k, self.v = (
            torch.randn(case.shape, device=device, dtype=case.torch_dtype).requires_grad_() for _ in range(3)
        )
        self.backend = _sdpa_backend(self.q, self.k, self.v, case.is_causal) if implementation.target is sdpa else None
        self.grad_out = None if case.mode == "forward" else torch.randn_like(self.q, requires_grad=False)
        self.out: torch.Tensor | None = None

    def prepare(self) -> None:
        """Let go of the last step's results; run forward where only backward is measured."""
        self.out = None
        for x in (self.q, self.k, self.v):
            x.grad = None
        if self.case.mode == "backward":
            self.out = self.attention(self.q, self.k, self.v, is_causal=self.case.is_causal)

    def step(self, mark: Mark) -> None:
        """The pass."""
        if self.case.mode != "backward":
            self.out = self.attention(self.q, self.k, self.v, is_causal=self.case.is_causal)
            mark("forward")
        if self.case.mode != "forward":
            assert self.out is not None
            self.out.backward(self.grad_out)
            mark("backward")


def _sdpa_backend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> str:
    """The kernel that SDPA chooses for these inputs, such as "flash_attention"."""
    q4, k4, v4 = (x if x.ndim == 4 else x.unsqueeze(1) for x in (q, k, v))
    choice: Any = torch._fused_sdp_choice(q4, k4, v4, None, 0.0, is_causal)
    return torch.nn.attention.SDPBackend(choice).name.lower()


@pytest.mark.cases(cases.ATTENTION)
def test_attention(implementation: Implementation, case: AttentionCase, measure: Measure) -> None:
    measure(AttentionPass, implementation, case, work=work(case))
