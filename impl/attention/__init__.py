"""Attention: softmax(q kᵀ / sqrt(head_dim)) v (Vaswani et al., "Attention Is All You Need", 2017, section 3.2.1).

from impl.attention import eager_attention, FlashAttentionPyTorch

out = eager_attention(q, k, v, is_causal=True)
out = FlashAttentionPyTorch.apply(q, k, v, True)
"""

from __future__ import annotations

from impl.attention.contract import Attention, as_attention, check_inputs, kv_group, per_query_head
from impl.interpreting import NO_TRITON, requires_triton
from shardmark.api import register

# Implementations register in this order, the reference first, which is the order in every list and table.
# isort: off
from impl.attention.eager import eager_attention
from impl.attention.compiled import compiled_attention
from impl.attention.flash_pytorch import FlashAttentionPyTorch
# isort: on

if NO_TRITON is None:
    from impl.attention.flash_triton import FlashAttentionTriton  # isort: skip
    from impl.attention.flash_gluon import FlashAttentionGluon  # isort: skip
else:
    register("attention", "flash_triton", None, requires=(requires_triton,), called="FlashAttention in Triton")
    register("attention", "flash_gluon", None, requires=(requires_triton,), called="FlashAttention in Gluon")

from impl.attention.library import sdpa, sdpa_backend

__all__ = [
    "Attention",
    "FlashAttentionGluon",
    "FlashAttentionPyTorch",
    "FlashAttentionTriton",
    "as_attention",
    "check_inputs",
    "compiled_attention",
    "eager_attention",
    "kv_group",
    "per_query_head",
    "sdpa",
    "sdpa_backend",
]
