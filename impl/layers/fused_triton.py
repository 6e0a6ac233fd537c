"""The layers in Triton kernels, forward and backward: each result and each gradient in one pass over memory.

This file launches the kernels, which are in `triton_kernels`. Forward keeps its inputs and, of a norm, one number a
row. On CPU the kernels run in Triton's interpreter (TRITON_INTERPRET=1), for correctness only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from impl.autograd import FirstDerivative
from impl.interpreting import requires_no_interpreter, requires_triton
from impl.layers import triton_kernels as kernels
from impl.layers.accounting import PROGRAMS, fused_triton_peak
from impl.layers.contract import check_gated, check_norm, check_rotary
from shardmark.api import Race, Unsupported, register

LARGEST = 8192
"""Most columns of a block of a norm. A longer row takes several, and backward reads it twice. Half as many where a row
does not divide into 16 columns: single accesses take more registers than those of 16 bytes."""
PER_THREAD = 8
"""Elements of a block that one thread holds: 16 bytes of half precision, and no register is spilled on any chip."""
GATED = 1024
"""Columns of a block of SwiGLU."""
TILE = 4096
"""Elements of a block of heads."""


class FusedLayersTriton:
    """Contract and errors: `impl.layers.Layers`. No double backward.

    Takes float32, float16 and bfloat16; Unsupported for float64. A tensor whose rows are not contiguous is copied.
    """

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """See `impl.layers.Layers.rms_norm`."""
        check_norm(x, weight)
        _check_supported(x)
        return _Norm.apply(x, None, weight, eps)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """See `impl.layers.Layers.add_rms_norm`."""
        check_norm(x, weight, residual)
        _check_supported(x)
        return _Norm.apply(x, residual, weight, eps)

    @staticmethod
    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        """See `impl.layers.Layers.swiglu`."""
        check_gated(gate, up)
        _check_supported(gate)
        return _Gated.apply(gate, up)

    @staticmethod
    def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """See `impl.layers.Layers.rotary`."""
        check_rotary(q, k, cos, sin)
        _check_supported(q)
        return _Rotated.apply(q, k, cos, sin)


def _check_supported(x: Tensor) -> None:
    if x.dtype == torch.float64:
        raise Unsupported(f"fused_triton takes float32, float16 and bfloat16, got {x.dtype}")
    if x.device.type != "cuda" and not (x.device.type == "cpu" and knobs.runtime.interpret):
        raise Unsupported(f"fused_triton takes tensors on CUDA, or on CPU with TRITON_INTERPRET=1, got {x.device}")


class _Norm(torch.autograd.Function):
    """Keeps the sum of x and the residual, which is a result, or x; weight; and the scale of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Any:
        normed, total, scales = _norm_forward(x, residual, weight, eps)
        ctx.save_for_backward(x if total is None else total, weight, scales)
        ctx.adds = total is not None
        return normed if total is None else (normed, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        compute = partial(_norm_backward, ctx.adds, ctx.needs_input_grad[2])
        grad, grad_weight = FirstDerivative.apply("the fused norm", compute, *ctx.saved_tensors, *grads)
        return grad, grad if ctx.adds else None, grad_weight, None


def _norm_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The norm, the sum where there is a residual, and (rows) scales."""
    rows, dim = _rows(x), x.shape[-1]
    others = rows if residual is None else _rows(residual)
    normed = _result(x)
    total = normed if residual is None else _result(x)
    scales = torch.empty(len(rows), dtype=torch.float32, device=x.device)
    block = _norm_block(dim)
    arguments = rows, others, weight.contiguous(), total, normed, scales, rows.stride(0), others.stride(0), dim, eps
    _launch(kernels.norm_forward, (len(rows),), block, *arguments, ADDS=residual is not None, BLOCK=block)
    return normed.to(x.dtype), None if residual is None else total.to(x.dtype), scales


def _norm_backward(
    adds: bool, weighs: bool, x: Tensor, weight: Tensor, scales: Tensor, grad: Tensor, grad_total: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x, which are those of the residual, and of weight. `x` is the sum where there is a residual."""
    rows, given, factor = _rows(x), _rows(grad), weight.contiguous()
    beside = given if grad_total is None else _rows(grad_total)
    count, dim = rows.shape
    block = _norm_block(dim)
    blocks, programs = triton.cdiv(dim, block), min(PROGRAMS, count)
    grad_x = _result(x)
    parts = torch.empty(programs if weighs else 0, dim, dtype=torch.float32, device=x.device)
    means = scales
    if blocks > 1:
        means = torch.empty_like(scales)
        strides = rows.stride(0), given.stride(0)
        _launch(kernels.norm_means, (count,), block, rows, factor, scales, given, means, *strides, dim, BLOCK=block)
    tensors = rows, factor, scales, means, given, beside, grad_x, parts
    sizes = rows.stride(0), given.stride(0), beside.stride(0), count, dim
    options = {"ADDS": adds, "WEIGHS": weighs, "WHOLE": blocks == 1, "BLOCK": block}
    _launch(kernels.norm_backward, (programs, blocks), block, *tensors, *sizes, **options)
    return grad_x.to(x.dtype), parts.sum(0).to(weight.dtype) if weighs else None


class _Gated(torch.autograd.Function):
    """Keeps gate and up alone."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _gated(gate, up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return FirstDerivative.apply("the fused SwiGLU", _gated_backward, *ctx.saved_tensors, grad)


def _gated(gate: Tensor, up: Tensor) -> Tensor:
    gates, ups, out = _rows(gate), _rows(up), _result(gate)
    (rows, dim), block = gates.shape, min(GATED, triton.next_power_of_2(gate.shape[-1]))
    grid = rows, triton.cdiv(dim, block)
    _launch(kernels.swiglu_forward, grid, block, gates, ups, out, gates.stride(0), ups.stride(0), dim, BLOCK=block)
    return out.to(gate.dtype)


def _gated_backward(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    gates, ups, given = map(_rows, (gate, up, grad))
    of_gate, of_up = _result(gate), _result(up)
    (rows, dim), block = gates.shape, min(GATED, triton.next_power_of_2(gate.shape[-1]))
    tensors = gates, ups, given, of_gate, of_up
    strides = (x.stride(0) for x in (gates, ups, given))
    _launch(kernels.swiglu_backward, (rows, triton.cdiv(dim, block)), block, *tensors, *strides, dim, BLOCK=block)
    return of_gate.to(gate.dtype), of_up.to(up.dtype)


class _Rotated(torch.autograd.Function):
    """Keeps the tables alone: the gradient is rotated back."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _turned(1, cos, sin, q), _turned(1, cos, sin, k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [grad for grad, needed in zip(grads, ctx.needs_input_grad[:2], strict=True) if needed]
        compute = partial(_all_turned_back, *ctx.saved_tensors)
        found = iter(FirstDerivative.apply("the fused rotary embedding", compute, *wanted))
        return *(next(found) if needed else None for needed in ctx.needs_input_grad[:2]), None, None


def _all_turned_back(cos: Tensor, sin: Tensor, *grads: Tensor) -> tuple[Tensor, ...]:
    return tuple(_turned(-1, cos, sin, grad) for grad in grads)


def _turned(sign: int, cos: Tensor, sin: Tensor, x: Tensor) -> Tensor:
    """x (batch, heads, seq, head_dim) rotated, in x's memory format."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = _result(x, torch.preserve_format)
    out = out if out.stride(-1) == 1 else _result(x)  # as rows overlap
    batch, heads, seq, head_dim = x.shape
    columns = triton.next_power_of_2(head_dim)
    together = min(triton.next_power_of_2(max(1, heads)), max(1, TILE // columns))
    grid = batch * seq, triton.cdiv(heads, together)
    arguments = cos.contiguous(), sin.contiguous(), out, sign, heads, seq, head_dim, *x.stride()[:3], *out.stride()[:3]
    options = {"HEADS": together, "COLUMNS": columns}
    _launch(kernels.rotary, grid, together * columns, x, *arguments, **options)
    return out.to(x.dtype)


def _norm_block(dim: int) -> int:
    """Columns of a block of a norm: a power of two that holds a row, or the largest."""
    return min(LARGEST if dim % 16 == 0 else LARGEST // 2, triton.next_power_of_2(dim))


def _rows(x: Tensor) -> Tensor:
    """x as (rows, dim) whose elements of a row are neighbours; a copy where its strides do not allow a view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _result(like: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    """An uninitialized tensor for a kernel to fill. The interpreter truncates to bfloat16 where the hardware rounds, so
    the interpreter gets float32."""
    dtype = torch.float32 if like.dtype == torch.bfloat16 and knobs.runtime.interpret else like.dtype
    return torch.empty_like(like, dtype=dtype, memory_format=memory_format)


def _launch(kernel: Any, grid: tuple[int, ...], block: int, *arguments: Any, **options: Any) -> None:
    """Launch the kernel, with a thread for every PER_THREAD elements of a block or for fewer; not on an empty grid."""
    if 0 not in grid:
        warps = min(32, max(4, block // (32 * PER_THREAD)))
        with torch.cuda.device_of(arguments[0]):  # Triton launches on the current device
            kernel[grid](*arguments, **options, num_warps=warps)


register(
    "layers",
    "fused_triton",
    FusedLayersTriton,
    memory=fused_triton_peak,
    time=Race("eager", goal=1.0),
    requires=(requires_triton,),
    requires_to_measure=(requires_no_interpreter,),
    called="the fused layers in Triton",
)
