"""The layers by their formulas, operator by operator: the reference."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from impl.layers.accounting import eager_peak
from impl.layers.contract import check_gated, check_norm, check_rotary, statistics_dtype
from shardmark.api import register


class EagerLayers:
    """Contract and errors: `impl.layers.Layers`."""

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """See `impl.layers.Layers.rms_norm`."""
        check_norm(x, weight)
        return normed(x, weight, eps)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """See `impl.layers.Layers.add_rms_norm`."""
        check_norm(x, weight, residual)
        return added_and_normed(x, residual, weight, eps)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        """See `impl.layers.Layers.swiglu`."""
        check_gated(gate, up)
        return gated(gate, up)

    @staticmethod
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `impl.layers.Layers.rotary`."""
        check_rotary(q, k, cos, sin)
        return both_rotated(q, k, cos, sin)


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


register("layers", "eager", EagerLayers, memory=eager_peak, called="eager layers")
