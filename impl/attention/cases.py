"""A case of attention: what varies, and its id."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MODES = ("forward", "backward", "both")


@dataclass(frozen=True)
class AttentionCase:
    """q, k, v: (batch, heads, seq, head_dim), or (batch, seq, head_dim) when heads is None.

    `mode` is the pass that is measured: "forward", "backward" (forward runs before the measurement) or "both".
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
    def words(self) -> str:
        """The case as sentences have it."""
        heads = "" if self.heads is None else f" with {self.heads} heads"
        mask = " under a causal mask" if self.is_causal else ""
        dtype = "" if self.dtype == "float32" else f" in {self.dtype}"
        mode = "" if self.mode == "both" else f" in the {self.mode} pass"
        return f"at {self.seq:,} tokens{heads} of {self.head_dim} dimensions{mask}{dtype}{mode}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each of q, k and v."""
        heads = () if self.heads is None else (self.heads,)
        return (self.batch, *heads, self.seq, self.head_dim)

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)
