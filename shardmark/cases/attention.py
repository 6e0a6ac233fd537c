"""Attention's cases."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardmark.cases.grid import Grid

MODES = ("forward", "backward", "both")


@dataclass(frozen=True)
class AttentionCase:
    """q, k, v: (batch, heads, seq, head_dim), or (batch, seq, head_dim) when heads is None.

    `mode` is the pass that is measured: "forward", "backward" (from a finished forward) or "both".
    """

    batch: int
    seq: int
    head_dim: int
    heads: int | None = None
    is_causal: bool = True
    mode: str = "both"
    dtype: str = "float32"

    def __str__(self) -> str:
        heads = "" if self.heads is None else f"h{self.heads}-"
        mask = "causal" if self.is_causal else "full"
        return f"b{self.batch}-{heads}s{self.seq}-d{self.head_dim}-{mask}-{self.dtype}-{self.mode}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each of q, k and v."""
        heads = () if self.heads is None else (self.heads,)
        return (self.batch, *heads, self.seq, self.head_dim)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype as torch has it."""
        return getattr(torch, self.dtype)


ATTENTION_MEMORY = Grid(
    smoke=[AttentionCase(batch=2, seq=seq, head_dim=32, is_causal=False) for seq in (128, 256, 512)],
    laptop=[AttentionCase(batch=2, seq=seq, head_dim=64, is_causal=False) for seq in (256, 512, 1024, 2048)],
    paper=[
        AttentionCase(batch=8, seq=seq, head_dim=head_dim, is_causal=False)
        for head_dim in (16, 32, 64, 128)
        for seq in (256, 1024, 4096, 8192, 16384)
    ],
    paper_rounds=100,
)

ATTENTION_LENGTHS = Grid(
    smoke=[AttentionCase(batch=1, seq=256, head_dim=32, mode=mode) for mode in MODES],
    laptop=[
        *(AttentionCase(batch=1, seq=1024, head_dim=64, mode=mode) for mode in MODES),
        AttentionCase(batch=1, seq=4096, head_dim=64),
    ],
    paper=[
        AttentionCase(batch=1, seq=2**power, head_dim=head_dim, mode=mode, dtype=dtype)
        for dtype in ("bfloat16", "float32")
        for head_dim in (16, 32, 64, 128)
        for power in range(7, 17)
        for mode in MODES
    ],
)

ATTENTION_HEADS = Grid(
    smoke=[AttentionCase(batch=1, heads=2, seq=256, head_dim=32, mode=mode) for mode in MODES[:2]],
    laptop=[AttentionCase(batch=1, heads=8, seq=1024, head_dim=64, mode=mode) for mode in MODES[:2]],
    paper=[
        AttentionCase(batch=4, heads=8, seq=seq, head_dim=head_dim, mode=mode, dtype="bfloat16")
        for head_dim in (64, 128)
        for seq in (1024, 2048, 4096, 8192, 16384)
        for mode in MODES[:2]
    ],
)
