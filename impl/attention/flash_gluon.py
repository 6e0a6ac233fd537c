"""FlashAttention for Hopper in Gluon kernels: asynchronous products, loads by a warp of their own.

This file launches the kernels, which are in `gluon_forward` and `gluon_backward`. Programs add to the gradient of q in
an order that differs from run to run: in its last bits it differs, too.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from impl.attention import gluon_backward, gluon_forward
from impl.attention.accounting import flash_gluon_peak
from impl.attention.contract import check_inputs, kv_group
from impl.attention.flash_triton import described
from impl.autograd import FirstDerivative
from impl.interpreting import requires_no_interpreter, requires_triton
from shardmark.api import Race, Unsupported, register, requires_cuda

HOPPER = 90
"""Compute capability that the kernels are for."""

FORWARD = {64: (3, 160), 128: (2, 240)}
"""By head dim, the groups of warps of a program, 64 queries each, and registers of a thread in all but the first."""
BACKWARD = {64: (64, 4), 128: (128, 8)}
"""By head dim, the keys of a program, and warps."""
HEAD_DIMS = tuple(FORWARD)
ROWS = 64
"""Queries of a group of warps; in the backward pass, queries of a tile."""
KEYS = 128
"""Keys of a tile in the forward pass."""
CACHE_BYTES = 2**25
"""Keys and values of the heads that programs go through at once: half of the L2 cache holds them."""


class FlashAttentionGluon(torch.autograd.Function):
    """`FlashAttentionGluon.apply(q, k, v, is_causal)`; shapes, dtypes and errors: `impl.attention.Attention`.

    Takes float16 and bfloat16 and head dims of 64 and 128, on GPUs of compute capability 9; Unsupported for others.
    Saves q, k, v, the output and one log-sum-exp (..., q_len), natural log, in float32.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
        check_inputs(q, k, v)
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise Unsupported(f"flash_gluon takes float16 and bfloat16, got {q.dtype}")
        if q.shape[-1] not in HEAD_DIMS:
            raise Unsupported(f"flash_gluon takes head dims of {' and '.join(map(str, HEAD_DIMS))}, got {q.shape[-1]}")
        if reason := requires_hopper(q.device.type):
            raise Unsupported(f"flash_gluon: {reason}")
        out, lse = forward(q, k, v, is_causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.is_causal = is_causal
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        """Gradients of q, k and v; the probabilities are recomputed tile by tile from the log-sum-exp."""

        def compute(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return backward(ctx.is_causal, *tensors)

        return *FirstDerivative.apply("FlashAttention", compute, *ctx.saved_tensors, grad_out), None


def requires_hopper(device: str) -> str | None:
    """Why the kernels do not run on that device, or None."""
    if device != "cuda" or not torch.cuda.is_available():
        return "needs a GPU of compute capability 9 (Hopper)"
    major, minor = torch.cuda.get_device_capability()
    return None if major == 9 else f"needs a GPU of compute capability 9 (Hopper), and this one has {major}.{minor}"


def forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    out, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), _rows_of(q)
    if q.numel() == 0:
        return out, lse
    batch, heads, group, q_len, k_len, head_dim = _sizes(q, k)
    groups, registers = FORWARD[head_dim]
    programs = triton.cdiv(q_len, groups * ROWS) * batch * heads
    with torch.cuda.device_of(q):
        gluon_forward.gluon_forward[(programs,)](
            _descriptor(q, heads, ROWS),
            _descriptor(k, heads // group, KEYS),
            _descriptor(v, heads // group, KEYS),
            _descriptor(out, heads, ROWS),
            lse,
            heads,
            group,
            batch * heads,
            max(1, min(batch * heads, CACHE_BYTES // (4 * k_len * head_dim))),
            q_len,
            k_len,
            math.log2(math.e) / math.sqrt(head_dim),
            IS_CAUSAL=is_causal,
            HEAD_DIM=head_dim,
            BLOCK_M=groups * ROWS,
            BLOCK_N=KEYS,
            STAGES=2,
            GROUPS=groups,
            REGISTERS=registers,
            num_warps=gluon_forward.WARPS.value,
        )
    return out, lse


def backward(
    is_causal: bool, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    if q.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    batch, heads, group, q_len, k_len, head_dim = _sizes(q, k)
    keys, warps = BACKWARD[head_dim]
    grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    padded = triton.cdiv(q_len, ROWS) * ROWS
    buffer = torch.empty(batch * heads * padded * head_dim, dtype=torch.float32, device=q.device)
    statistics = torch.empty(2, batch * heads, padded, dtype=torch.float32, device=q.device)
    half, scale = statistics.stride(0), math.log2(math.e) / math.sqrt(head_dim)
    tiles = padded // ROWS * batch * heads
    sizes = {"HEAD_DIM": head_dim, "BLOCK_M": ROWS}
    with torch.cuda.device_of(q):
        of_rows = _by_pointer(out, heads), _by_pointer(grad_out, heads)
        gluon_backward.prepare[(tiles,)](*of_rows, lse, statistics, buffer, q_len, padded, half, **sizes, num_warps=8)
        gluon_backward.gluon_backward[(triton.cdiv(k_len, keys) * batch * heads // group,)](
            _descriptor(q, heads, ROWS),
            _descriptor(k, heads // group, keys),
            _descriptor(v, heads // group, keys),
            _descriptor(grad_out, heads, ROWS),
            _descriptor(grad_k, heads // group, keys),
            _descriptor(grad_v, heads // group, keys),
            statistics,
            buffer,
            heads,
            group,
            q_len,
            k_len,
            padded,
            half,
            scale,
            IS_CAUSAL=is_causal,
            BLOCK_N=keys,
            **sizes,
            num_warps=warps,
        )
        gluon_backward.finish[(tiles,)](buffer, grad_q, q_len, padded, scale, **sizes, num_warps=8)
    return grad_q, grad_k, grad_v


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int, int, int, int]:
    """Batch, heads, query heads of each head of k, lengths of q and of k, head dim."""
    heads = q.shape[-3] if q.ndim > 2 else 1
    return math.prod(q.shape[:-3]), heads, kv_group(q, k), q.shape[-2], k.shape[-2], q.shape[-1]


def _rows_of(q: Tensor) -> Tensor:
    return torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)


def _descriptor(x: Tensor, heads: int, rows: int) -> TensorDescriptor:
    """`x` as (batch, heads, seq, head_dim), in tiles of so many rows; copied where no descriptor can describe it."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)
    x, shape, strides = described(x.reshape(-1, heads, *x.shape[-2:]))
    return TensorDescriptor(x, shape, strides, [1, 1, rows, x.shape[-1]], layout)


def _by_pointer(x: Tensor, heads: int) -> tuple[Tensor, int, int, int, int]:
    """`x` as `prepare` reads it."""
    x = x.reshape(-1, heads, *x.shape[-2:])
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, head, row, _ = x.stride()
    return x, batch, head, row, heads


register(
    "attention",
    "flash_gluon",
    FlashAttentionGluon,
    memory=flash_gluon_peak,
    time=Race("sdpa"),
    requires=(requires_triton, requires_cuda, requires_hopper),
    requires_to_measure=(requires_no_interpreter,),
    slack=1.01,
    called="FlashAttention in Gluon",
)
