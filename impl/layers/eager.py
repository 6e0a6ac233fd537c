"""The layers by their formulas, operator by operator: the reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from impl.layers.accounting import eager_peak
from impl.layers.contract import check_gated, check_norm, check_rotary, statistics_dtype
from shardmark.api import register


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(statistics_dtype(x))
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # (..., dim)
    return (scaled * weight).to(x.dtype)


def added_and_normed(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return normed(total, weight, eps), total


def gated(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def both_rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _rotated(q, cos, sin), _rotated(k, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]  # (batch, heads, seq, head_dim / 2)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


class EagerLayers:
    """Contract and errors: `impl.layers.Layers`. The arguments are checked outside of the formulas, which may be
    compiled."""

    normed, added_and_normed = staticmethod(normed), staticmethod(added_and_normed)
    gated, both_rotated = staticmethod(gated), staticmethod(both_rotated)

    @classmethod
    def rms_norm(cls, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """See `impl.layers.Layers.rms_norm`."""
        check_norm(x, weight)
        return cls.normed(x, weight, eps)

    @classmethod
    def add_rms_norm(cls, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """See `impl.layers.Layers.add_rms_norm`."""
        check_norm(x, weight, residual)
        return cls.added_and_normed(x, residual, weight, eps)

    @classmethod
    def swiglu(cls, gate: Tensor, up: Tensor) -> Tensor:
        """See `impl.layers.Layers.swiglu`."""
        check_gated(gate, up)
        return cls.gated(gate, up)

    @classmethod
    def rotary(cls, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `impl.layers.Layers.rotary`."""
        check_rotary(q, k, cos, sin)
        return cls.both_rotated(q, k, cos, sin)


register("layers", "eager", EagerLayers, memory=eager_peak, called="eager layers")
