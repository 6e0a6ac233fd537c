"""The layers in closed form: bytes moved, and bytes at the peak of forward and backward of one operation.

Bytes at the peak count what the caller holds too: arguments, results, and the gradients of both. A "row" is (tokens,
dim) in the case's dtype, and wide where it is in float32 or more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from shardmark.api import Work

if TYPE_CHECKING:
    from impl.layers.cases import LayersCase

PROGRAMS = 256
"""Programs of the fused norm's backward, each with a sum of weight's gradient: about two for each of a large chip's
multiprocessors. Their number does not depend on the chip, so neither do the bits of the sum."""

PASSES = {"rms_norm": 5, "add_rms_norm": 8, "swiglu": 8, "rotary": 8}
"""Tensors of (tokens, dim) that forward and backward must read and write, each once.

Forward reads its arguments and writes its results. Backward reads the gradients of the results and, of a norm and of
SwiGLU, what forward had read or summed; it writes the gradients, of a sum's two terms one.
"""


def work(case: LayersCase) -> Work:
    """Bytes of each tensor as often as it must be read or written; weight and tables count, a row's scale does not."""
    beside = {"swiglu": 0, "rotary": 2 * _tables(case)}.get(case.operation, 3 * _weight(case))
    return Work(bytes_moved=PASSES[case.operation] * _row(case) + beside)


def eager_peak(case: LayersCase) -> Bytes:
    """Peak of the eager layers, in bytes. A norm's is in the backward pass of the squares, SwiGLU's in that of the
    product, and that of a rotary embedding where q, the second of the two, gets its gradient."""
    row, wide = _row(case), _wide(case)
    copied = wide > row
    if case.operation == "swiglu":
        return _held(case).add({"silu of gate": row, "gradients of gate and up": 2 * row})
    if case.operation == "rotary":
        held = _held(case).add({"gradient of k": row})
        of_pairs = {"gradient of the pairs, wide": wide * copied, "gradients of even and odd elements": row}
        half = {"half of it, negated": wide // 2, "its product": wide // 2, "rounded": row // 2 * copied}
        padded = {"gradients of even elements, then of odd ones, in zeros": 2 * row, "that of odd ones": row // 2}
        return max(held.add({**of_pairs, **half}), held.add(padded))
    return _held(case).add(
        {
            "x, wide": wide * copied,
            "gradient of x by the product": wide,
            "gradient of the squares": wide,
            "x, 2 x and gradient of x by the squares": 3 * wide,
            "gradient of weight": _weight(case),
        }
    )


def fused_triton_peak(case: LayersCase) -> Bytes:
    """Peak of `fused_triton`, in bytes: nothing of (tokens, dim) but arguments, results and gradients."""
    row, held = _row(case), _held(case)
    if "norm" not in case.operation:
        return held.add({"gradients of the arguments": 2 * row})
    summed, rounded = 4 * case.dim, _weight(case) if case.torch_dtype.itemsize < 4 else 0
    of_weight = {"sums of weight's gradient": min(PROGRAMS, case.tokens) * summed, "gradient of weight": summed}
    held = held.add({"scale of each row": 4 * case.tokens, "gradient of x": row})
    summing = held.add({**of_weight, "gradient of weight, rounded": rounded})
    if case.operation == "rms_norm":
        return summing
    return max(summing, held.add({"gradient of the residual": row, "gradient of weight": _weight(case)}))


def _row(case: LayersCase) -> int:
    return case.tokens * case.dim * case.torch_dtype.itemsize


def _wide(case: LayersCase) -> int:
    return case.tokens * case.dim * max(4, case.torch_dtype.itemsize)


def _weight(case: LayersCase) -> int:
    return case.dim * case.torch_dtype.itemsize


def _tables(case: LayersCase) -> int:
    """Bytes of cosines and sines."""
    return case.tokens * case.head_dim * max(4, case.torch_dtype.itemsize)


def _held(case: LayersCase) -> Bytes:
    """Bytes of the arguments, the results and the results' gradients."""
    row = _row(case)
    return Bytes(
        {
            "rms_norm": {"x": row, "its norm, and the gradient of that": 2 * row, "weight": _weight(case)},
            "add_rms_norm": {
                "x and residual": 2 * row,
                "their sum, its norm, and the gradients of both": 4 * row,
                "weight": _weight(case),
            },
            "swiglu": {"gate and up": 2 * row, "the result and its gradient": 2 * row},
            "rotary": {"q and k": 2 * row, "rotated ones and their gradients": 4 * row, "cos and sin": _tables(case)},
        }[case.operation]
    )
