"""FlashAttention-2 in PyTorch operators, forward and backward: one tile of the scores at a time, never all of them.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and 2. The
loops run in Python and each tile is a batched matrix product, so tiles are large. Tiles above the diagonal are skipped.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from impl.attention.accounting import flash_pytorch_peak
from impl.attention.contract import Facts, check_inputs, kv_group, per_query_head
from impl.autograd import FirstDerivative
from shardmark.api import Race, register

TILE = 256
"""Queries, and keys, of one tile: 256 is the fastest on CPU from 1,024 tokens on."""


class FlashAttentionPyTorch(torch.autograd.Function):
    """`FlashAttentionPyTorch.apply(q, k, v, is_causal)`; shapes, dtypes and errors: `impl.attention.Attention`.

    Saves q, k, v, the output and one log-sum-exp (..., q_len), natural log, in float32 (float64 for float64 inputs).
    Half-precision inputs are computed in float32, tile by tile.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check_inputs(q, k, v)
        with torch.autocast(q.device.type, enabled=False):  # the dtypes below are explicit
            out, lse = _forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of q, k and v; the tiles of probabilities are recomputed from the log-sum-exp."""
        with torch.autocast(grad_out.device.type, enabled=False):
            compute = functools.partial(_backward, ctx.is_causal)
            return *FirstDerivative.apply("FlashAttention", compute, *ctx.saved_tensors, grad_out), None


def _forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp: algorithm 1."""
    if q.numel() == 0:
        return torch.empty_like(q), torch.empty(q.shape[:-1], dtype=_compute_dtype(q), device=q.device)
    k, v = (per_query_head(x, kv_group(q, k)) for x in (k, v))
    flat_q, flat_k, flat_v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))  # (batch, len, head_dim)
    out = torch.empty_like(flat_q, memory_format=torch.contiguous_format)
    compute = _compute_dtype(q)
    lse = torch.empty(out.shape[:-1], dtype=compute, device=q.device)  # (batch, q_len)
    scale = 1 / math.sqrt(q.shape[-1])
    for i in range(0, out.shape[1], TILE):
        q_tile = flat_q[:, i : i + TILE].to(compute) * scale  # (batch, rows, head_dim)
        rows = q_tile.shape[1]
        acc = q_tile.new_zeros(q_tile.shape)
        # The lowest finite number: with -inf, a row of scores that are all -inf would compute -inf - -inf, NaN.
        row_max = q_tile.new_full((*q_tile.shape[:2], 1), torch.finfo(compute).min)
        row_sum = torch.zeros_like(row_max)
        for j in _key_tiles(i, rows, flat_k.shape[1], is_causal):
            k_tile, v_tile = (x[:, j : j + TILE].to(compute) for x in (flat_k, flat_v))
            scores = torch.bmm(q_tile, k_tile.mT)  # (batch, rows, columns)
            if is_causal:
                _mask_future(scores, i, j, -math.inf)
            new_max = torch.maximum(row_max, scores.amax(-1, keepdim=True))
            scores.sub_(new_max).exp_()
            row_max.sub_(new_max).exp_()  # the factor that rescales the sums so far
            row_sum.mul_(row_max).add_(scores.sum(-1, keepdim=True))
            acc.mul_(row_max).baddbmm_(scores, v_tile)
            row_max = new_max
            del scores  # freed before the next tile's product is allocated
        out[:, i : i + TILE] = acc.div_(row_sum)
        lse[:, i : i + TILE] = row_max.add_(row_sum.log_()).squeeze(-1)
    return out.view(q.shape), lse.view(q.shape[:-1])


def _backward(
    is_causal: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v: algorithm 2."""
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    group = kv_group(q, k)
    k, v = (per_query_head(x, group) for x in (k, v))
    compute = _compute_dtype(q)
    flat_q, flat_k, flat_v, flat_out, flat_grad = (
        x.reshape(-1, *x.shape[-2:]) for x in (q, k, v, out, grad_out)
    )  # (batch, len, head_dim)
    flat_lse = lse.view(-1, lse.shape[-1], 1)  # (batch, q_len, 1)
    scale = 1 / math.sqrt(q.shape[-1])
    grad_q = torch.zeros(flat_q.shape, dtype=compute, device=q.device)
    grad_k, grad_v = (torch.zeros(flat_k.shape, dtype=compute, device=q.device) for _ in range(2))
    for i in range(0, flat_q.shape[1], TILE):
        queries = slice(i, i + TILE)
        q_tile = flat_q[:, queries].to(compute) * scale
        grad_tile = flat_grad[:, queries].to(compute)
        delta = (grad_tile * flat_out[:, queries]).sum(-1, keepdim=True)  # (batch, rows, 1)
        for j in _key_tiles(i, q_tile.shape[1], flat_k.shape[1], is_causal):
            keys = slice(j, j + TILE)
            k_tile, v_tile = (x[:, keys].to(compute) for x in (flat_k, flat_v))
            probs = torch.bmm(q_tile, k_tile.mT).sub_(flat_lse[:, queries]).exp_()  # (batch, rows, columns)
            if is_causal:
                _mask_future(probs, i, j, 0.0)
            grad_v[:, keys].baddbmm_(probs.mT, grad_tile)
            grad_scores = torch.bmm(grad_tile, v_tile.mT).sub_(delta).mul_(probs)
            if is_causal:
                _mask_future(grad_scores, i, j, 0.0)  # masked again: zero times a delta that is NaN is NaN
            grad_k[:, keys].baddbmm_(grad_scores.mT, q_tile)
            grad_q[:, queries].baddbmm_(grad_scores, k_tile, alpha=scale)
            del probs, grad_scores  # freed before the next tile's products are allocated
    grad_k, grad_v = (_per_kv_head(x.view(k.shape), group) for x in (grad_k, grad_v))
    return grad_q.view(q.shape).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _per_kv_head(grad: Tensor, group: int) -> Tensor:
    """Gradient of `per_query_head`: the sum over each group of heads."""
    return grad if group == 1 else grad.unflatten(-3, (-1, group)).sum(-3)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _key_tiles(first_query: int, rows: int, k_len: int, is_causal: bool) -> range:
    """Yield the first key of each tile that some of these queries attend to."""
    return range(0, min(k_len, first_query + rows) if is_causal else k_len, TILE)


def _mask_future(tile: Tensor, first_query: int, first_key: int, value: float) -> None:
    """Set to `value`, in place, the entries whose key comes after their query; most tiles have none."""
    rows, columns = tile.shape[-2:]
    if first_key + columns - 1 > first_query:
        future = torch.ones(rows, columns, dtype=torch.bool, device=tile.device).triu(first_query - first_key + 1)
        tile.masked_fill_(future, value)


def _is_long_on_cpu(case: Any, device: str) -> bool:
    """True if tiles save more time than the Python loops over them cost."""
    return device == "cpu" and case.seq >= 4096 and case.is_causal and case.mode == "both"


register(
    "attention",
    "flash_pytorch",
    FlashAttentionPyTorch,
    memory=functools.partial(flash_pytorch_peak, tile_rows=TILE),
    time=Race("eager", goal=1.0, applies=_is_long_on_cpu),
    facts=Facts(longest=8192),  # at 65,536 tokens its loops launch 0.8 million kernels
    called="FlashAttention in PyTorch",
)
