"""A case of the layers: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

import torch

WIDTHS = {"rms_norm": 4096, "add_rms_norm": 4096, "swiglu": 14336, "rotary": 4096}
"""Elements a token of each operation in a block of Llama 3 8B, by the operation's name."""


@dataclass(frozen=True)
class LayersCase:
    """Forward and backward of one operation on `tokens` rows of `dim` elements.

    q and k of `rotary` have dim elements a token each, in heads of `head_dim`, and their tables are in float32.
    """

    operation: str
    tokens: int
    dim: int
    dtype: str = "float32"
    head_dim: int = 64

    def __post_init__(self) -> None:
        if self.operation == "rotary" and (self.dim % self.head_dim or self.head_dim % 2):
            raise ValueError(f"dim {self.dim} does not divide into heads of an even {self.head_dim}")

    def __str__(self) -> str:
        heads = f"-h{self.head_dim}" if self.operation == "rotary" else ""
        return f"{self.operation}-t{self.tokens}-d{self.dim}{heads}-{self.dtype}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        dtype = "" if self.dtype == "float32" else f" in {self.dtype}"
        return f"for {self.operation} of {self.tokens:,} tokens and {self.dim:,} dimensions{dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)
