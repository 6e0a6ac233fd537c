"""Attention in closed form: FLOPs, bytes moved and bytes at the peak, of the three passes that are measured.

Bytes at the peak count what the caller holds too: q, k, v, and the output's gradient once there is a backward pass.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from shardmark.api import Work

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


def eager_peak(case: AttentionCase) -> Bytes:
    """Peak of eager attention, in bytes: two matrices of scores at once forward, three backward."""
    batch, seq, head_dim, size = _sizes(case)
    tensor = batch * seq * head_dim * size  # bytes of a tensor as large as q
    scores = batch * seq * seq * size
    fixed = {
        "q, k, v": 3 * tensor,
        "attention output": tensor,
        "causal mask": seq * seq if case.is_causal else 0,  # one byte an entry
        "sqrt(head_dim)": 8,  # the division saves it as a float64
    }
    if case.mode == "forward":
        return Bytes({**fixed, "masked scores": scores, "attention probabilities": scores})
    gradients = {
        "gradient of the output": tensor,
        "gradient of v": tensor,
        "gradient of the probabilities": scores,
        "gradient of the scores": scores,
    }
    return Bytes({**fixed, "attention probabilities": scores, **gradients})


def flash_peak(case: AttentionCase) -> Bytes:
    """Peak of attention with nothing quadratic, in bytes: inputs, output, log-sum-exp and gradients."""
    batch, seq, head_dim, size = _sizes(case)
    tensor = batch * seq * head_dim * size
    held = {"q, k, v": 3 * tensor, "attention output": tensor, "log-sum-exp": batch * seq * max(size, 4)}
    if case.mode != "forward":
        held |= {"gradient of the output": tensor, _GRADIENTS: 3 * tensor}
    return Bytes(held)


_GRADIENTS = "gradients of q, k, v"


def flash_pytorch_peak(case: AttentionCase, tile_rows: int = 256) -> Bytes:
    """Peak of `flash_pytorch`, in bytes: `flash_peak` and the intermediates of one tile of so many queries and keys,
    which do not grow with seq."""
    batch, seq, head_dim, size = _sizes(case)
    compute = max(size, 4)  # half precision is computed in float32
    rows = min(tile_rows, seq)
    tile = batch * rows * rows * compute
    column = batch * rows * compute  # one value a row
    slab = column * head_dim  # a tile of q, k, v or of the accumulator
    mask = 2 * rows * rows if case.is_causal else 0  # made as ones, then reduced to its upper triangle
    if case.mode == "forward":
        of_tile = {
            "tiles of q and of the accumulator": 2 * slab,
            "running maximum and sum": 2 * column,
            "tile of scores": tile,
            "mask, or the tile's maximum and sum": max(mask, 2 * column),
            "tiles of k and v in float32": 2 * slab if size < compute else 0,
        }
        return flash_peak(case).add(of_tile)
    if size == compute:
        of_tile = {"tile of a product": slab, "delta": column, "tiles of scores": 2 * tile, "mask": mask}
        return flash_peak(case).add(of_tile)
    rounded = 3 * batch * seq * head_dim * size  # rounded from the accumulators at the end
    tiles_or_rounded = (
        {"tiles of scores": 2 * tile, "mask": mask} if 2 * tile + mask > rounded else {_GRADIENTS: rounded}
    )
    accumulators = {
        "accumulators of gradients in float32": 3 * batch * seq * head_dim * compute,
        "tiles of q, k, v and the output's gradient in float32": 4 * slab,
        "delta": column,
    }
    return flash_peak(case).without(_GRADIENTS).add({**accumulators, **tiles_or_rounded})


def flash_triton_peak(case: AttentionCase) -> Bytes:
    """Peak of `flash_triton`, in bytes: `flash_peak`, and backward one more float32 a row, `delta`."""
    batch, seq, _, _ = _sizes(case)
    return flash_peak(case).add({"delta": 0 if case.mode == "forward" else batch * seq * 4})


def flash_gluon_peak(case: AttentionCase) -> Bytes:
    """Peak of `flash_gluon`, in bytes: `flash_peak`, and backward the float32 buffer of q's gradient and two float32 a
    row, of rows that are padded to a multiple of 64."""
    if case.mode == "forward":
        return flash_peak(case)
    batch, seq, head_dim, _ = _sizes(case)
    rows = batch * (seq + -seq % 64)
    return flash_peak(case).add({"gradient of q in float32": 4 * rows * head_dim, "statistics of rows": 8 * rows})


def sdpa_math_peak(case: AttentionCase) -> Bytes:
    """Peak of SDPA's math backend, in bytes: q and k scaled beforehand, half precision computed in float32."""
    batch, seq, head_dim, size = _sizes(case)
    compute = max(size, 4)
    elements, entries = batch * seq * head_dim, batch * seq * seq
    held = {
        "q, k, v": 3 * size * elements,
        "q and k, scaled": 2 * compute * elements,
        "q, k, v in float32": 3 * compute * elements if size < compute else 0,
        "attention scores": compute * entries,
        "attention probabilities": compute * entries,
        "causal mask": seq * seq * compute if case.is_causal else 0,
    }
    forward = Bytes(held)
    if case.mode == "forward":
        return forward
    tensors = 5 if size == compute else 8  # o do dv, and q and k scaled; or upcasts
    backward = Bytes(
        {
            "q, k, v": 3 * size * elements,
            "output, gradients, and copies of q, k, v": tensors * size * elements,
            "attention probabilities": compute * entries,
            "gradients of probabilities and scores": 2 * compute * entries,
        }
    )
    if case.mode == "backward":
        return backward
    return max(backward, forward.add({"gradient of the output": elements * size}))  # it exists before backward


def sdpa_peak(case: AttentionCase, device: str = "cpu") -> Bytes:
    """Peak of SDPA's fused kernels, in bytes: of the kernel that SDPA chooses for the dtype.

    Memory inside their operators is workspace (`impl.attention.workspace`).
    """
    if device == "cuda" and case.dtype == "float32":
        return sdpa_efficient_peak(case)
    return sdpa_flash_peak(case, device)


def sdpa_flash_peak(case: AttentionCase, device: str = "cpu") -> Bytes:
    """Peak of SDPA's flash kernel, in bytes, and on CUDA of cuDNN's: `flash_peak`; on CPU with several heads more.

    On CUDA each gradient has its input's strides, so autograd takes it as it is: flash_api.cpp, mha_bwd, and
    attention_backward.cu, _cudnn_attention_backward. On CPU it is laid out as (batch, seq, heads, head_dim), and
    autograd copies it: FlashAttentionKernel.cpp, flash_attention_backward_kernel_impl.
    """
    return flash_peak(case) if device == "cuda" else _with_copy_of_a_gradient(case, flash_peak(case))


def sdpa_efficient_peak(case: AttentionCase) -> Bytes:
    """Peak of SDPA's memory-efficient kernel, in bytes, which CUDA alone has.

    Gradients are laid out as (batch, seq, heads, head_dim), so with several heads autograd copies each; log-sum-exp has
    a multiple of 32 rows. attention.cu, _efficient_attention_forward, and attention_backward.cu,
    _efficient_attention_backward.
    """
    batch, seq, _, _ = _sizes(case)
    more = {"log-sum-exp": 4 * batch * (-seq % 32)}
    return _with_copy_of_a_gradient(case, flash_peak(case).add(more))


def _with_copy_of_a_gradient(case: AttentionCase, peak: Bytes) -> Bytes:
    """Add a copy of a gradient if there are several heads, as its layout differs; by then log-sum-exp is freed."""
    batch, seq, head_dim, size = _sizes(case)
    if case.mode == "forward" or case.heads in (None, 1):
        return peak
    return peak.without("log-sum-exp").add({"copy of a gradient": batch * seq * head_dim * size})


def flex_peak(case: AttentionCase) -> Bytes:
    """Peak of FlexAttention, in bytes: two values a row forward; backward, one more, and what the block mask takes."""
    batch, seq, _, _ = _sizes(case)
    return flash_peak(case).add({"values of rows, and block mask": 8 * batch * seq})


def _sizes(case: AttentionCase) -> tuple[int, int, int, int]:
    """Batch (all leading dims), seq, head_dim, bytes an element."""
    return math.prod(case.shape[:-2]), case.seq, case.head_dim, case.torch_dtype.itemsize
