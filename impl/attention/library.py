"""Attention as PyTorch ships it."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from impl.accounting.attention import sdpa_peak
from impl.attention import check_inputs
from shardmark.registry import TimeBudget, register


def sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` with the backend that it chooses.

    Its fused kernels take (batch, heads, seq, head_dim) only, and anything else falls back to a quadratic one; so the
    leading dims become those two.
    """
    check_inputs(q, k, v)
    if q.ndim == 4:
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    q4, k4, v4 = (x.reshape(-1, 1, *x.shape[-2:]) for x in (q, k, v))
    return scaled_dot_product_attention(q4, k4, v4, is_causal=is_causal).reshape(q.shape)


register("attention", "sdpa", sdpa, memory=sdpa_peak, time=TimeBudget("eager"))
