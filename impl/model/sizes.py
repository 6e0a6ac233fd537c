"""The sizes of the transformer in one table: published ones, and small ones for CPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformerSize:
    """Widths and depth. head_dim is d_model / heads and must be even, because RoPE rotates pairs."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    vocab: int = 10_000

    def __post_init__(self) -> None:
        if self.d_model % self.heads or (self.d_model // self.heads) % 2:
            raise ValueError(f"d_model {self.d_model} does not divide into {self.heads} heads of an even size")

    @property
    def head_dim(self) -> int:
        return self.d_model // self.heads

    @property
    def parameters(self) -> int:
        """The number of parameters: embedding, layers, final norm, output projection."""
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocab * self.d_model + self.layers * layer + self.d_model


SIZES = {
    #                        d_model  d_ff  layers heads
    "tiny": TransformerSize(64, 256, 2, 2, vocab=1_000),
    "mini": TransformerSize(256, 1024, 4, 4),
    "deep": TransformerSize(64, 256, 16, 2, vocab=1_000),
    "wide": TransformerSize(320, 1280, 4, 5, vocab=1_000),
    "small": TransformerSize(768, 3072, 12, 12),
    "medium": TransformerSize(1024, 4096, 24, 16),
    "large": TransformerSize(1280, 5120, 36, 20),
    "xl": TransformerSize(1600, 6400, 48, 25),
    "2.7b": TransformerSize(2560, 10240, 32, 32),
    "8b": TransformerSize(4096, 11008, 34, 32, vocab=151_936),
    "10b": TransformerSize(4608, 12288, 50, 36),
}
"""In CS336's assignments of 2025 "xl" and "2.7b" have these names; in that of 2026 "2.7b" is called xl, "10b" is its
10B, and "8b" the model of its leaderboard."""
