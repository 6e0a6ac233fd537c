"""The grids of cases at each scale: smoke (seconds), laptop (minutes on two cores), paper (sizes people publish)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

SCALES = ("smoke", "laptop", "paper")

MODES = ("forward", "backward", "both")

MB = 2**20
"""One megabyte as PyTorch's `bucket_cap_mb` and the published all-reduce tables count it."""


@dataclass(frozen=True)
class Work:
    """What one step does on all ranks together: floating-point operations, and bytes it must read and write.

    `bytes_communicated` is what each rank must send, by theory.
    """

    flops: int = 0
    bytes_moved: int = 0
    bytes_communicated: int = 0


@dataclass(frozen=True)
class Grid:
    """The cases of one question, scale by scale; at paper scale, at least `paper_rounds` of each."""

    smoke: Sequence[Any]
    laptop: Sequence[Any]
    paper: Sequence[Any]
    paper_rounds: int = 0

    def at(self, scale: str) -> Sequence[Any]:
        """The cases at "smoke", "laptop" or "paper"."""
        return getattr(self, scale)


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


@dataclass(frozen=True)
class AllReduceCase:
    """One float32 tensor of `megabytes` on each rank."""

    megabytes: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.megabytes}MB"

    @property
    def bytes(self) -> int:
        """Bytes of the tensor on one rank."""
        return self.megabytes * MB


@dataclass(frozen=True)
class TrainingStepCase:
    """One AdamW step of the language model of that size; `batch` sequences of `context` tokens on each rank.

    `bucket_mb`, where given, is the size of the buckets that gradients are communicated in.
    """

    model: str
    batch: int
    context: int
    dtype: str = "float32"
    bucket_mb: int | None = None

    def __str__(self) -> str:
        bucket = "" if self.bucket_mb is None else f"-bucket{self.bucket_mb}MB"
        return f"{self.model}-b{self.batch}-s{self.context}{bucket}"


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

ALL_REDUCE = Grid(
    smoke=[AllReduceCase(megabytes) for megabytes in (1, 10)],
    laptop=[AllReduceCase(megabytes) for megabytes in (1, 10, 100, 1024)],
    paper=[AllReduceCase(megabytes) for megabytes in (1, 10, 100, 1024)],
)

TRAINING_STEP = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mini", batch=2, context=64)],
    paper=[TrainingStepCase(model, batch=4, context=512) for model in ("small", "medium", "large", "xl")],
)

BUCKETS = Grid(
    smoke=[replace(TRAINING_STEP.smoke[0], bucket_mb=bucket_mb) for bucket_mb in (1, 1000)],
    laptop=[replace(TRAINING_STEP.laptop[0], bucket_mb=bucket_mb) for bucket_mb in (1, 10, 100, 1000)],
    paper=[replace(TRAINING_STEP.paper[-1], bucket_mb=bucket_mb) for bucket_mb in (1, 10, 100, 1000)],
)
