"""The stage that others are variants of."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

CONTEXT, VOCABULARY, HIDDEN = 4, 11, 8


def width(boundary: int) -> int:
    """Width of the values between two stages; that of the embedding at boundary 0."""
    return 6 + 2 * (boundary % 3)


class Plain(nn.Module):
    """A stage of two linear layers, with a norm and a bias, from one width to another; the first one embeds tokens, and
    the last one returns logits."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        first, last = stage == 0, stage == stages - 1
        into, out = width(stage), VOCABULARY if last else width(stage + 1)
        self.embedding = nn.Embedding(VOCABULARY, into) if first else None
        self.norm = nn.RMSNorm(into)
        self.inner, self.outer = nn.Linear(into, HIDDEN), nn.Linear(HIDDEN, out, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.passed(x if self.embedding is None else self.embedding(x))

    def passed(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(self.norm(x))))
