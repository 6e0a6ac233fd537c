"""The loss's cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardmark.cases.grid import Grid


@dataclass(frozen=True)
class LossCase:
    """hidden (tokens, dim) and weight (vocab, dim), both of `dtype`; forward and backward of one loss."""

    tokens: int
    dim: int
    vocab: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"t{self.tokens}-d{self.dim}-v{self.vocab}-{self.dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return getattr(torch, self.dtype)


LOSS = Grid(
    smoke=[LossCase(tokens=256, dim=64, vocab=1000)],
    laptop=[LossCase(tokens=1024, dim=128, vocab=8192)],
    paper=[
        LossCase(tokens=8192, dim=dim, vocab=vocab, dtype="bfloat16")
        for dim in (2048, 4096)
        for vocab in (32768, 50257, 128256)
    ],
)
