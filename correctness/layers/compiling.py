"""Compile the fused layers' Triton kernels for a chip, in the process of the fixture `compiling`."""

from typing import Any

import torch

from correctness.support.compiling import compiled


def compile_layer(operation: str, dtype: str, chip: int, dim: int, per_thread: int = 0) -> Any:
    """Return (`KernelReport`, `accesses`) of each kernel of the operation's forward and backward on rows of `dim`.
    `rotary` has heads of 128 in a projection's strides. `per_thread` is another number of elements of a thread."""
    from impl.layers import fused_triton

    usual = fused_triton.PER_THREAD
    fused_triton.PER_THREAD = per_thread or usual
    try:
        return _compiled(operation, dtype, chip, dim)
    finally:
        fused_triton.PER_THREAD = usual


def _compiled(operation: str, dtype: str, chip: int, dim: int) -> Any:
    from impl.layers import fused_triton

    rows = torch.empty(4, dim, dtype=getattr(torch, dtype))
    weight, scales = rows[0], torch.empty(4)
    heads, table = rows.view(1, 4, dim // 128, 128).transpose(1, 2) if dim % 128 == 0 else rows, torch.empty(4, 64)
    # Not the Functions: autograd calls backward for the sake of gradients, which are not computed here.
    residual = rows if operation == "add_rms_norm" else None

    def norm() -> None:
        fused_triton._norm_forward(rows, residual, weight, 1e-5)
        beside = (rows,) if residual is not None else ()
        fused_triton._norm_backward(residual is not None, True, rows, weight, scales, rows, *beside)

    def gated() -> None:
        fused_triton._gated(rows, rows)
        fused_triton._gated_backward(rows, rows, rows)

    def turned() -> None:
        fused_triton._turned(1, table, table, heads)
        fused_triton._turned(-1, table, table, heads)

    return compiled(chip, {"swiglu": gated, "rotary": turned}.get(operation, norm))
