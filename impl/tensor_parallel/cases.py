"""Cases of tensor parallelism: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from impl.mesh.decoder import DecoderSize
from shardmark.api import Grid

SIZES = {
    "tiny": DecoderSize(dim=96, layers=2, heads=24, kv_heads=12, hidden=192, vocabulary=768),
    "mini": DecoderSize(dim=384, layers=4, heads=12, kv_heads=12, hidden=1536, vocabulary=3072),
    "wide": DecoderSize(dim=768, layers=2, heads=12, kv_heads=12, hidden=3072, vocabulary=3072),
    "medium": DecoderSize(dim=1536, layers=24, heads=24, kv_heads=12, hidden=6144, vocabulary=49_152),
    "large": DecoderSize(dim=4096, layers=8, heads=32, kv_heads=8, hidden=14_336, vocabulary=128_256),
}
"""Sizes that degrees of 1, 2, 3 and 4 divide, but `large`, whose layers are those of Llama 3 8B, by 2 and 4."""
DEGREES = ("tp=1", "tp=2", "tp=4")


@dataclass(frozen=True)
class TensorParallelCase:
    """A step of AdamW of the decoder of that size (`SIZES`) on `batch` sequences of `context` tokens, which every rank
    sees. The test sets `mesh`, whose one axis is `tp`."""

    model: str
    batch: int
    context: int
    mesh: str = ""
    dtype: str = "float32"

    def __str__(self) -> str:
        mesh = f"-{self.mesh}" if self.mesh else ""
        return f"{self.model}-b{self.batch}-s{self.context}-{self.dtype}{mesh}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return f"with the {self.model} decoder at {self.context:,} tokens on {self.mesh}"


CASES = Grid(
    smoke=[TensorParallelCase("tiny", batch=2, context=32)],
    laptop=[TensorParallelCase("mini", batch=2, context=128)],
    paper=[TensorParallelCase("medium", batch=4, context=1024)],
    full=[TensorParallelCase("medium", batch=4, context=1024), TensorParallelCase("large", batch=1, context=4096)],
)
