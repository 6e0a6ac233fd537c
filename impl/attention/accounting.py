"""Attention in closed form: FLOPs, bytes moved and bytes at the peak, of the three passes that are measured.

Bytes at the peak count what the caller holds too: q, k, v, and the output's gradient once there is a backward pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from shardmark.grid import Work

if TYPE_CHECKING:
    from impl.attention.cases import AttentionCase


# Products of queries x keys x head_dim: q kᵀ and p v forward; their four gradients, and q kᵀ again, backward.
_PRODUCTS = {"forward": 2, "backward": 5, "both": 7}


def work(case: AttentionCase) -> Work:
    """FLOPs of the matrix products, half of them when causal, and the least bytes: each input and output once."""
    batch, seq, head_dim, size = _sizes(case)
    flops = 2 * _PRODUCTS[case.mode] * batch * seq * seq * head_dim // (2 if case.is_causal else 1)
    tensors = {"forward": 4, "backward": 8, "both": 12}[case.mode]  # q k v o; q k v o do dq dk dv; one after the other
    return Work(flops, tensors * batch * seq * head_dim * size)


def eager_peak(case: AttentionCase) -> int:
    """Peak of eager attention, in bytes: two matrices of scores at once forward, three backward."""
    batch, seq, head_dim, size = _sizes(case)
    tensor = batch * seq * head_dim * size  # as large as q
    scores = batch * seq * seq * size
    mask = seq * seq if case.is_causal else 0  # one byte an entry
    root = 8  # sqrt(head_dim): the division saves it as a float64
    if case.mode == "forward":
        return 4 * tensor + 2 * scores + mask + root  # q k v o; masked scores and their softmax
    return 6 * tensor + 3 * scores + mask + root  # q k v o do dv; the softmax, its gradient and that of the scores


def flash_peak(case: AttentionCase) -> int:
    """Peak of attention with nothing quadratic, in bytes: inputs, output, log-sum-exp and gradients."""
    batch, seq, head_dim, size = _sizes(case)
    tensors = 4 if case.mode == "forward" else 8  # q k v o; and do dq dk dv
    return tensors * batch * seq * head_dim * size + batch * seq * max(size, 4)


def flash_pytorch_peak(case: AttentionCase, tile_rows: int = 256) -> int:
    """Peak of `flash_pytorch`, in bytes: `flash_peak` and the intermediates of one tile of so many queries and keys,
    which do not grow with seq."""
    batch, seq, head_dim, size = _sizes(case)
    compute = max(size, 4)  # half precision is computed in float32
    rows = min(tile_rows, seq)
    tile = batch * rows * rows * compute
    column = batch * rows * compute  # one value a row
    slab = column * head_dim  # a tile of q, k, v or of the accumulator
    mask = 2 * rows * rows if case.is_causal else 0  # made as ones, then its upper triangle
    if case.mode == "forward":
        upcast = 2 * slab if size < compute else 0  # k, v
        return flash_peak(case) + 2 * slab + 2 * column + tile + max(mask, 2 * column) + upcast
    if size == compute:
        return flash_peak(case) + slab + column + 2 * tile + mask
    rounded = (
        3 * batch * seq * head_dim * size
    )  # dq dk dv in the inputs' dtype, made from accumulators when all is done
    accumulators = 3 * batch * seq * head_dim * compute
    upcast = 4 * slab + column  # q, do, k, v, delta
    return flash_peak(case) - rounded + accumulators + upcast + max(2 * tile + mask, rounded)


def flash_triton_peak(case: AttentionCase) -> int:
    """Peak of `flash_triton`, in bytes: `flash_peak`, and backward one more float32 a row, `delta`."""
    batch, seq, _, _ = _sizes(case)
    return flash_peak(case) + (0 if case.mode == "forward" else batch * seq * 4)


def compiled_peak(case: AttentionCase) -> int:
    """Peak of compiled eager attention, in bytes: what the compiler plans is its own; eager's is its limit."""
    return eager_peak(case)


def sdpa_math_peak(case: AttentionCase) -> int:
    """Peak of SDPA's math backend, in bytes: q and k scaled beforehand, half precision computed in float32."""
    batch, seq, head_dim, size = _sizes(case)
    compute = max(size, 4)
    elements, entries = batch * seq * head_dim, batch * seq * seq
    mask = seq * seq * compute if case.is_causal else 0
    tensors = 3 * size + (2 if size == compute else 5) * compute  # q k v; q k scaled, and q k v upcast
    forward = tensors * elements + 2 * compute * entries + mask  # scores and their softmax
    if case.mode == "forward":
        return forward
    tensors = 8 if size == compute else 11  # q k v o do dv, and both scaled; or their upcasts
    backward = tensors * elements * size + 3 * entries * compute
    return max(backward, forward + elements * size) if case.mode == "both" else backward  # do is there beforehand


def sdpa_peak(case: AttentionCase) -> int:
    """Peak of SDPA's fused kernels, in bytes: `flash_peak`, and with several heads the copy of a gradient.

    They lay out gradients as (batch, seq, heads, head_dim), so autograd copies each; by then log-sum-exp is gone. What
    they take inside their operators is workspace: each thread's tiles on CPU; on CUDA dq in float32, and what comes of
    keys split among blocks.
    """
    batch, seq, head_dim, size = _sizes(case)
    if case.mode == "forward" or case.heads in (None, 1):
        return flash_peak(case)
    return flash_peak(case) + batch * seq * head_dim * size - batch * seq * max(size, 4)


def flex_peak(case: AttentionCase) -> int:
    """Peak of FlexAttention, in bytes: two values a row forward; backward, one more, and what the block mask takes."""
    batch, seq, _, _ = _sizes(case)
    return flash_peak(case) + 8 * batch * seq


def _sizes(case: AttentionCase) -> tuple[int, int, int, int]:
    """Batch (all leading dims), seq, head_dim, bytes an element."""
    return math.prod(case.shape[:-2]), case.seq, case.head_dim, case.torch_dtype.itemsize
