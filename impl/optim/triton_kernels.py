"""The kernels of `fused_adamw`: one launch for all parameters, in which each program works on one chunk of one tensor.

A table in device memory has one row of addresses and sizes for each tensor (the columns are below), and a map says
which tensor and chunk each program has. Three kernels: `squared_norms` sums the squares of each chunk of gradients;
`prepare`, one program, decides whether there is a step and computes each tensor's scalars in float64; `update` reads
each element once and writes it once.
"""

from __future__ import annotations

import triton
import triton.language as tl

PARAM, GRAD, FIRST, SECOND, MASTER, STEP, COUNT, GROUP = (tl.constexpr(i) for i in range(8))
COLUMNS: tl.constexpr = tl.constexpr(8)
"""A tensor's row of the table, in int64: addresses of the parameter, its gradient, both moments, its master weight and
its step count; its number of elements, and the index of its param group."""

DECAY, WEIGHT1, BETA2, WEIGHT2, EPS, STEP_SIZE, CORRECTION, IS_FIRST = (tl.constexpr(i) for i in range(8))
SCALARS: tl.constexpr = tl.constexpr(8)
"""A tensor's scalars, in float64: 1 - lr weight_decay, 1 - beta1, beta2, 1 - beta2, eps, lr / (1 - beta1^t),
1 / sqrt(1 - beta2^t), and 1 in the tensor's first step."""

HYPERPARAMETERS: tl.constexpr = tl.constexpr(5)
"""A param group's row of hyperparameters: lr, beta1, beta2, eps, weight_decay. Before the first row: max_grad_norm."""


@triton.jit
def _pointer(row, COLUMN: tl.constexpr, DTYPE: tl.constexpr, WIDTH: tl.constexpr):
    """A pointer from the table, which the compiler may assume to be aligned to `WIDTH` elements, the widest access."""
    ALIGNMENT: tl.constexpr = WIDTH * DTYPE.primitive_bitwidth // 8
    return tl.multiple_of(tl.load(row + COLUMN).to(tl.pointer_type(DTYPE)), ALIGNMENT)


@triton.jit
def _span(table, tensor_of, chunk_of, program, CHUNK: tl.constexpr):
    """This program's row of the table, and its chunk: first element, and end (exclusive)."""
    row = table + tl.load(tensor_of + program) * COLUMNS
    begin = tl.load(chunk_of + program).to(tl.int64) * CHUNK
    return row, begin, tl.minimum(begin + CHUNK, tl.load(row + COUNT))


@triton.jit
def _to_bfloat16(x):
    """Round to nearest, ties to even, by integer arithmetic: the interpreter's own conversion truncates."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    rounded = tl.where(x == x, rounded, 0x7FC0)  # the sum may carry the bits of a NaN beyond the highest
    return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _store(pointer, x, mask, BY_HAND: tl.constexpr):
    if BY_HAND and pointer.dtype.element_ty == tl.bfloat16:
        tl.store(pointer, _to_bfloat16(x), mask=mask)
    else:
        tl.store(pointer, x.to(pointer.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first"])
def squared_norms(
    table,
    tensor_of,
    chunk_of,
    partials,  # (programs,), float64
    first,  # program of the map that program 0 is
    GRAD_DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Sum of the squares of each chunk of gradients."""
    program = first + tl.program_id(0)
    row, begin, end = _span(table, tensor_of, chunk_of, program, CHUNK)
    grad = _pointer(row, GRAD, GRAD_DTYPE, WIDTH)
    total = tl.zeros((BLOCK,), COMPUTE)
    for start in range(begin, end, BLOCK):
        offsets = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        # Only the last block has a mask: with one whose end is not known to be aligned there are no 16-byte accesses.
        if start + BLOCK <= end:
            g = tl.load(grad + offsets).to(COMPUTE)
        else:
            g = tl.load(grad + offsets, mask=offsets < end, other=0).to(COMPUTE)
        total += g * g
    tl.store(partials + program, tl.sum(total).to(tl.float64))


@triton.jit(do_not_specialize=["tensors", "programs"])
def prepare(
    table,
    hyperparameters,
    scalars,  # (tensors, SCALARS), float64
    decision,  # (2,), float64: the factor for gradients; then 1 for a step, 0 for a skipped one
    partials,  # None without clipping
    grad_norm,  # (), float32, or float64 for float64 parameters; None without clipping
    grad_scale,  # the factor by which GradScaler multiplied the loss, or None
    found_inf,  # 0 if GradScaler found only finite gradients, or None
    tensors,
    programs,
    TENSORS: tl.constexpr,  # tensors in one iteration
    PARTIALS: tl.constexpr,  # partial sums in one iteration
):
    """Decide whether there is a step and how gradients are scaled; count it, and compute each tensor's scalars."""
    factor = tl.full((), 1.0, tl.float64)
    proceed = factor == factor
    if grad_scale is not None:
        factor = factor / tl.load(grad_scale).to(tl.float64)
    if found_inf is not None:
        proceed = tl.load(found_inf) == 0
    if partials is not None:
        sums = tl.zeros((PARTIALS,), tl.float64)
        for start in range(0, programs, PARTIALS):
            offsets = start + tl.arange(0, PARTIALS)
            sums += tl.load(partials + offsets, mask=offsets < programs, other=0)
        norm = tl.sqrt(tl.sum(sums)) * factor
        tl.store(grad_norm, norm.to(grad_norm.dtype.element_ty))
        proceed = proceed & (norm < float("inf"))  # false for NaN too
        factor *= tl.minimum(tl.load(hyperparameters) / (norm + 1e-6), 1.0)
    tl.store(decision, factor)
    tl.store(decision + 1, tl.where(proceed, 1.0, 0.0).to(tl.float64))

    for start in range(0, tensors, TENSORS):
        tensor = start + tl.arange(0, TENSORS)
        inside = tensor < tensors
        row = table + tensor * COLUMNS
        group = hyperparameters + 1 + tl.load(row + GROUP, mask=inside, other=0) * HYPERPARAMETERS
        lr, beta1, beta2 = tl.load(group), tl.load(group + 1), tl.load(group + 2)
        step_count = tl.load(row + STEP, mask=inside, other=0).to(tl.pointer_type(tl.float32))
        step = tl.load(step_count, mask=inside, other=0) + tl.where(proceed, 1.0, 0.0)
        tl.store(step_count, step, mask=inside)
        step = step.to(tl.float64)
        out = scalars + tensor * SCALARS
        tl.store(out + DECAY, 1 - lr * tl.load(group + 4), mask=inside)
        tl.store(out + WEIGHT1, 1 - beta1, mask=inside)
        tl.store(out + BETA2, beta2, mask=inside)
        tl.store(out + WEIGHT2, 1 - beta2, mask=inside)
        tl.store(out + EPS, tl.load(group + 3), mask=inside)
        tl.store(out + STEP_SIZE, lr / (1 - tl.exp(step * tl.log(beta1))), mask=inside)
        tl.store(out + CORRECTION, 1 / tl.sqrt(1 - tl.exp(step * tl.log(beta2))), mask=inside)
        tl.store(out + IS_FIRST, tl.where(step == 1, 1.0, 0.0).to(tl.float64), mask=inside)


@triton.jit(do_not_specialize=["first"])
def update(
    table,
    tensor_of,
    chunk_of,
    scalars,
    decision,
    first,  # program of the map that program 0 is
    PARAM_DTYPE: tl.constexpr,
    GRAD_DTYPE: tl.constexpr,
    STATE_DTYPE: tl.constexpr,
    HAS_MASTER: tl.constexpr,
    COMPUTE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    BY_HAND: tl.constexpr,
):
    """AdamW's update of one chunk of one tensor: each element is read once and written once."""
    row, begin, end = _span(table, tensor_of, chunk_of, first + tl.program_id(0), CHUNK)
    param = _pointer(row, PARAM, PARAM_DTYPE, WIDTH)
    grad = _pointer(row, GRAD, GRAD_DTYPE, WIDTH)
    first_moment = _pointer(row, FIRST, STATE_DTYPE, WIDTH)
    second_moment = _pointer(row, SECOND, STATE_DTYPE, WIDTH)
    weight = param
    if HAS_MASTER:
        weight = _pointer(row, MASTER, STATE_DTYPE, WIDTH)
    own = scalars + tl.load(tensor_of + first + tl.program_id(0)) * SCALARS
    decay, eps = tl.load(own + DECAY).to(COMPUTE), tl.load(own + EPS).to(COMPUTE)
    weight1 = tl.load(own + WEIGHT1).to(COMPUTE)
    beta2, weight2 = tl.load(own + BETA2).to(COMPUTE), tl.load(own + WEIGHT2).to(COMPUTE)
    step_size, correction = tl.load(own + STEP_SIZE).to(COMPUTE), tl.load(own + CORRECTION).to(COMPUTE)
    is_first = tl.load(own + IS_FIRST) == 1
    factor = tl.load(decision).to(COMPUTE)
    if tl.load(decision + 1) == 0:
        end = begin
    for start in range(begin, end, BLOCK):
        offsets = tl.multiple_of(start, BLOCK) + tl.arange(0, BLOCK)
        if start + BLOCK <= end:  # masked accesses are narrow: see `squared_norms`
            _update_block(
                param + offsets, grad + offsets, first_moment + offsets, second_moment + offsets, weight + offsets,
                None, factor, decay, weight1, beta2, weight2, eps, step_size, correction,
                is_first, HAS_MASTER, COMPUTE, BY_HAND,
            )  # fmt: skip
        else:
            _update_block(
                param + offsets, grad + offsets, first_moment + offsets, second_moment + offsets, weight + offsets,
                offsets < end, factor, decay, weight1, beta2, weight2, eps, step_size, correction,
                is_first, HAS_MASTER, COMPUTE, BY_HAND,
            )  # fmt: skip


@triton.jit
def _update_block(
    param, grad, first_moment, second_moment, weight, mask,
    factor, decay, weight1, beta2, weight2, eps, step_size, correction,
    is_first, HAS_MASTER: tl.constexpr, COMPUTE: tl.constexpr, BY_HAND: tl.constexpr,
):  # fmt: skip
    """Update one block of elements; the operations are in the order of `AdamW`."""
    g = tl.load(grad, mask=mask).to(COMPUTE) * factor
    m = tl.load(first_moment, mask=mask).to(COMPUTE)
    v = tl.load(second_moment, mask=mask).to(COMPUTE)
    w = tl.load(weight, mask=mask).to(COMPUTE)
    # Before the first step a master weight may be older than the parameter: from a step that was skipped.
    if HAS_MASTER:  # noqa: SIM102  (constexpr)
        if is_first:
            w = tl.load(param, mask=mask).to(COMPUTE)
    w *= decay
    # Interpolate from the nearer end, as torch's lerp does: with beta1 = 0 the first moment is exactly the gradient.
    m = tl.where(weight1 < 0.5, m + weight1 * (g - m), g - (g - m) * (1 - weight1))
    v = v * beta2 + weight2 * g * g
    if tl.float64 == COMPUTE:  # in float64, sqrt and division round to nearest without the _rn variants
        w -= step_size * m / (tl.sqrt(v) * correction + eps)
    else:
        w -= tl.div_rn(step_size * m, tl.sqrt_rn(v) * correction + eps)
    _store(first_moment, m, mask, BY_HAND)
    _store(second_moment, v, mask, BY_HAND)
    _store(weight, w, mask, BY_HAND)
    if HAS_MASTER:
        _store(param, w, mask, BY_HAND)
