"""Cases of training on a mesh: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from impl.mesh.decoder import DecoderSize
from shardmark.api import Grid, OwnModelCase

SIZES = {
    "tiny": DecoderSize(dim=48, layers=2, heads=12, kv_heads=6, hidden=192, vocabulary=768),
    "mini": DecoderSize(dim=384, layers=4, heads=12, kv_heads=6, hidden=1536, vocabulary=3072),
    "tiny-deep": DecoderSize(dim=48, layers=8, heads=12, kv_heads=6, hidden=192, vocabulary=768),
    "mini-deep": DecoderSize(dim=192, layers=8, heads=12, kv_heads=6, hidden=768, vocabulary=3072),
    "mixture": DecoderSize(dim=192, layers=4, heads=12, kv_heads=6, hidden=384, vocabulary=3072, experts=4),
    "medium": DecoderSize(dim=1536, layers=24, heads=24, kv_heads=12, hidden=6144, vocabulary=49_152),
    "8b": DecoderSize(dim=4096, layers=34, heads=32, kv_heads=32, hidden=11008, vocabulary=151_936),
}
"""Sizes that 2, 3, 4 and 6 divide, but for "8b", the model of the leaderboard of CS336 in 2026."""
MESHES = ("dp=2", "shard=2", "tp=2", "dp=2,tp=2", "shard=2,tp=2")


@dataclass(frozen=True)
class MeshCase:
    """A step of AdamW of the decoder of that size (`SIZES`); `batch` sequences of `context` tokens for each group of
    ranks that has rows of its own. The test sets `mesh`."""

    model: str
    batch: int
    context: int
    mesh: str = ""
    dtype: str = "float32"

    def __str__(self) -> str:
        mesh = f"-{self.mesh}" if self.mesh else ""
        return f"{self.model}-b{self.batch}-s{self.context}-{self.dtype}{mesh}"

    @property
    def ranks_alike(self) -> bool:
        """Whether all ranks hold the same number of bytes; the stages of a pipeline differ."""
        return "pp" not in self.mesh

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return f"with the {self.model} decoder at {self.context:,} tokens on {self.mesh}"


CASES = Grid(
    smoke=[MeshCase("tiny", batch=2, context=32)],
    laptop=[MeshCase("mini", batch=2, context=64), MeshCase("mixture", batch=2, context=64)],
    paper=[MeshCase("medium", batch=4, context=1024)],
    own=OwnModelCase.of,
)
