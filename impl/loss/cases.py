"""A case of the loss: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

import torch


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
    def words(self) -> str:
        """The case as sentences have it."""
        dtype = "" if self.dtype == "float32" else f" in {self.dtype}"
        return f"with {self.vocab:,} words in the vocabulary and {self.dim:,} dimensions{dtype}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)
