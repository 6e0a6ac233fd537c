"""Attention by the formula, with all scores in memory: the reference."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from impl.attention.accounting import eager_peak
from impl.attention.contract import check_inputs, kv_group, per_query_head
from shardmark.api import register


def eager_attention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v. Shapes, dtypes and errors: `impl.attention.Attention`."""
    check_inputs(q, k, v)
    k, v = (per_query_head(x, kv_group(q, k)) for x in (k, v))
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (..., q_len, k_len)
    if is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(-1) @ v


register("attention", "eager", eager_attention, memory=eager_peak, called="eager attention")
