"""The Triton kernel of the fused loss: a row's logits become its loss and, in place, its gradients.

logits: (rows, vocab), rows `stride` elements apart; targets: (rows) int64; losses: (rows) float32. One program
processes one row, BLOCK columns at a time, in two passes: the first sums the exponentials, and rescales the sum as the
maximum grows (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018); the second writes gradients.

With a mask whose end is not known to be aligned the compiler would not emit 16-byte accesses. So blocks end at the last
multiple of ALIGNED columns, and the rest of a row is processed separately.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)
ALIGNED: tl.constexpr = tl.constexpr(16)


@triton.jit(do_not_specialize=["ignore_index"])
def loss_and_gradients(
    logits, targets, losses, stride, vocab, ignore_index, smoothing, z_loss,
    SMOOTHED: tl.constexpr, WANTED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of an ignored row are zeros. Columns past the vocabulary are neither read nor written."""
    row = tl.program_id(0)
    start = logits + tl.cast(row, tl.int64) * stride
    target = tl.load(targets + row)
    end = vocab // ALIGNED * ALIGNED
    columns = tl.arange(0, BLOCK)
    rest = end + tl.arange(0, ALIGNED)
    if target == ignore_index:
        tl.store(losses + row, 0.0)
        if WANTED:
            for first in tl.range(0, end, BLOCK):
                _store_zeros(start, first + columns, end)
            _store_zeros(start, rest, vocab)
    else:
        its_logit = tl.load(start + target).to(tl.float32)
        # Differences from it are summed, and from the largest: an offset that all logits share costs no digits.
        origin = tl.where(its_logit == float("-inf"), 0.0, its_logit)
        largest = LOWEST + 0.0  # finite: -inf - -inf would be NaN
        exponentials = 0.0
        total = 0.0
        for first in tl.range(0, end, BLOCK):
            largest, exponentials, total = _add(
                start, first + columns, end, largest, exponentials, total, origin, SMOOTHED
            )
        largest, exponentials, total = _add(start, rest, vocab, largest, exponentials, total, origin, SMOOTHED)
        log_sum = tl.log(exponentials)
        lse = largest + log_sum
        loss = log_sum + (1 - smoothing) * (largest - its_logit) + z_loss * lse * lse
        if SMOOTHED:
            loss += smoothing * (largest - origin - total / vocab)
        tl.store(losses + row, loss)
        if WANTED:
            factor = (1 + 2 * z_loss * lse) / exponentials
            # The rest of the row comes first: otherwise ptxas holds its values through the loop, and spills registers.
            _to_gradients(start, rest, vocab, target, largest, factor, smoothing, vocab, SMOOTHED)
            for first in tl.range(0, end, BLOCK):
                _to_gradients(start, first + columns, end, target, largest, factor, smoothing, vocab, SMOOTHED)


@triton.jit
def _store_zeros(start, columns, end):
    tl.store(start + columns, tl.zeros(columns.shape, start.dtype.element_ty), mask=columns < end)


@triton.jit
def _add(start, columns, end, largest, exponentials, total, origin, SMOOTHED: tl.constexpr):
    """Add the columns' logits to the statistics of the row."""
    inside = columns < end
    x = tl.load(start + columns, mask=inside, other=float("-inf")).to(tl.float32)
    new_largest = tl.maximum(largest, tl.max(x, 0))
    exponentials = exponentials * tl.exp(largest - new_largest) + tl.sum(tl.exp(x - new_largest), 0)
    if SMOOTHED:
        total += tl.sum(tl.where(inside, x - origin, 0.0), 0)
    return new_largest, exponentials, total


@triton.jit
def _to_gradients(start, columns, end, target, largest, factor, smoothing, vocab, SMOOTHED: tl.constexpr):
    """Replace the columns' logits by their gradients."""
    inside = columns < end
    x = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    gradient = factor * tl.exp(x - largest)
    if SMOOTHED:
        gradient -= smoothing / vocab
    gradient -= tl.where(columns == target, 1 - smoothing, 0.0)
    tl.store(start + columns, gradient.to(start.dtype.element_ty), mask=inside)
