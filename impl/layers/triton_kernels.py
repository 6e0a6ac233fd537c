"""The Triton kernels of the fused layers: each reads its tensors once, and computes in float32.

Rows are `stride_*` elements apart, their elements are neighbours. A pointer and a stride for what an operation does not
have (a residual, weight's gradient) stand for nothing: the constant that leaves it out is False.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def norm_forward(
    x, residual, weight, total, normed, scales, stride_x, stride_residual, dim, eps,
    ADDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row a program: `scales` is 1 / sqrt(mean(x²) + eps), which backward reads. A second pass finds it cached."""
    row = tl.program_id(0).to(tl.int64)
    x += row * stride_x
    residual += row * stride_residual
    columns = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, dim, BLOCK):
        at = first + columns
        value = _row(x, residual, at, at < dim, ADDS)
        if ADDS:
            rounded = value.to(total.dtype.element_ty)
            tl.store(total + row * dim + at, rounded, mask=at < dim)
            value = rounded.to(tl.float32)
        squares += value * value
    scale = 1 / tl.sqrt(tl.sum(squares, 0) / dim + eps)
    tl.store(scales + row, scale)
    for first in tl.range(0, dim, BLOCK):
        at = first + columns
        value = _row(x, residual, at, at < dim, ADDS)
        if ADDS:
            value = value.to(total.dtype.element_ty).to(tl.float32)
        factor = tl.load(weight + at, mask=at < dim, other=0.0).to(tl.float32)
        tl.store(normed + row * dim + at, (value * scale * factor).to(normed.dtype.element_ty), mask=at < dim)


@triton.jit
def _row(x, residual, at, inside, ADDS: tl.constexpr):
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def norm_means(x, weight, scales, grad, means, stride_x, stride_grad, dim, BLOCK: tl.constexpr):
    """One row a program: the mean of grad * weight * x * scale, for rows that are longer than a block of backward."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    scale = tl.load(scales + row)
    products = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, dim, BLOCK):
        at = first + columns
        value = tl.load(x + row * stride_x + at, mask=at < dim, other=0.0).to(tl.float32)
        given = tl.load(grad + row * stride_grad + at, mask=at < dim, other=0.0).to(tl.float32)
        products += value * scale * given * tl.load(weight + at, mask=at < dim, other=0.0).to(tl.float32)
    tl.store(means + row, tl.sum(products, 0) / dim)


@triton.jit
def norm_backward(
    x, weight, scales, means, grad, grad_total, grad_x, grad_weight,
    stride_x, stride_grad, stride_total, rows, dim,
    ADDS: tl.constexpr, WEIGHS: tl.constexpr, WHOLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes every n-th row of a block of columns, and sums its part of weight's gradient in registers.

    grad_weight (programs, dim) float32 has a sum for each program, and someone adds them up. With WHOLE a block has all
    columns, and the row's mean is computed here; otherwise it is read from `means`.
    """
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    factor = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    summed = tl.zeros([BLOCK], tl.float32)
    for each in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        row = tl.cast(each, tl.int64)
        scale = tl.load(scales + row)
        value = tl.load(x + row * stride_x + at, mask=inside, other=0.0).to(tl.float32) * scale
        given = tl.load(grad + row * stride_grad + at, mask=inside, other=0.0).to(tl.float32)
        if WEIGHS:
            summed += given * value
        given *= factor
        mean = tl.sum(given * value, 0) / dim if WHOLE else tl.load(means + row)
        result = scale * (given - value * mean)
        if ADDS:
            result += tl.load(grad_total + row * stride_total + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x + row * dim + at, result.to(grad_x.dtype.element_ty), mask=inside)
    if WEIGHS:
        tl.store(grad_weight + tl.program_id(0).to(tl.int64) * dim + at, summed, mask=inside)


@triton.jit
def swiglu_forward(gate, up, out, stride_gate, stride_up, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    g = tl.load(gate + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * dim + at, (g * tl.sigmoid(g) * u).to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    gate, up, grad, grad_gate, grad_up, stride_gate, stride_up, stride_grad, dim, BLOCK: tl.constexpr
):  # fmt: skip
    """The sigmoid is computed again: nothing but gate and up is kept for backward."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < dim
    g = tl.load(gate + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + at, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(grad + row * stride_grad + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(g)
    of_gate = given * u * sigmoid * (1 + g * (1 - sigmoid))
    tl.store(grad_gate + row * dim + at, of_gate.to(grad_gate.dtype.element_ty), mask=inside)
    tl.store(grad_up + row * dim + at, (given * g * sigmoid).to(grad_up.dtype.element_ty), mask=inside)


@triton.jit
def rotary(
    x, cos, sin, out, sign, heads, seq, head_dim,
    x_batch, x_head, x_position, out_batch, out_head, out_position,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of heads of one position a program, which share its angles; with sign -1 the rotation is undone.

    x and out (batch, heads, seq, head_dim) have strides x_* and out_*. A thread loads whole pairs, and splits them.
    """
    batch, position = (tl.program_id(0) // seq).to(tl.int64), (tl.program_id(0) % seq).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = (head < heads) & (column < head_dim)
    pair = tl.arange(0, COLUMNS // 2)
    angle = position * (head_dim // 2) + pair
    c = tl.load(cos + angle, mask=pair < head_dim // 2, other=0.0).to(tl.float32)[None, :]
    s = sign * tl.load(sin + angle, mask=pair < head_dim // 2, other=0.0).to(tl.float32)[None, :]
    start = x + batch * x_batch + position * x_position
    values = tl.load(start + head * x_head + column, mask=inside, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(values, (HEADS, COLUMNS // 2, 2)))
    turned = tl.reshape(tl.join(even * c - odd * s, even * s + odd * c), (HEADS, COLUMNS))
    start = out + batch * out_batch + position * out_position
    tl.store(start + head * out_head + column, turned.to(out.dtype.element_ty), mask=inside)
