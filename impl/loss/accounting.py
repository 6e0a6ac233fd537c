"""The loss in closed form: FLOPs, bytes moved and bytes at the peak of forward and backward.

Bytes at the peak count what the caller holds too: hidden, weight, targets, and their gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from shardmark.api import Work

if TYPE_CHECKING:
    from impl.loss.cases import LossCase


def work(case: LossCase) -> Work:
    """FLOPs of the three products (recomputation does not count); bytes of each input and each gradient once."""
    tensors = (case.tokens + case.vocab) * case.dim
    return Work(
        flops=3 * 2 * case.tokens * case.dim * case.vocab,
        bytes_moved=2 * tensors * case.torch_dtype.itemsize + 8 * case.tokens,
    )


def chunk_tokens(tokens: int, dim: int, itemsize: int) -> int:
    """Tokens in one chunk of logits, of `itemsize` bytes an element.

    In half precision `dim` tokens: a chunk of logits (dim, vocab) is then as large as weight's gradient. It is freed
    before that gradient is made of its float32 sum, so it adds nothing to the peak. In float32 the sum is the gradient
    itself, so a chunk has a quarter of that. At least 512 tokens, because each chunk reads and writes the full sum.
    """
    return max(1, min(tokens, max(512, dim if itemsize == 2 else dim // 4)))


def row_stride(vocab: int, itemsize: int) -> int:
    """Elements from one row of a chunk's logits to the next; in half precision rows are padded to 128 bytes.

    Matrix products are faster with aligned rows.
    """
    return -(-vocab // 64) * 64 if itemsize == 2 else vocab


def eager_peak(case: LossCase) -> Bytes:
    """Peak of the eager loss, in bytes: three matrices of logits in float32 (log-softmax, its gradient, the logits').

    Where dim is large beside vocab it is the gradients of hidden and weight beside that of the logits instead.
    """
    size, summed = _sizes(case)
    logits = case.tokens * case.vocab
    held = _inputs(case).add({"loss and number of targets": 2 * summed})
    at_loss = {
        "log-probabilities": logits * summed,
        "gradient of the log-probabilities": logits * summed,
        "gradient of the logits": logits * summed,
    }
    at_products = {"gradient of the logits": logits * size, "gradients of hidden and weight": _gradients(case)}
    return max(held.add(at_loss), held.add(at_products))


def chunked_peak(case: LossCase) -> Bytes:
    """Peak of `chunked`, in bytes: eager's matrices for one chunk, and the gradients so far.

    The peak is at the last chunk, when its logits are computed or when its gradient of weight is added to the sum; or
    at the end, when the chunks' gradients of hidden are concatenated.
    """
    size, summed = _sizes(case)
    rows = chunk_tokens(case.tokens, case.dim, size)
    if rows == case.tokens:
        return eager_peak(case)
    weight = case.vocab * case.dim * size
    hidden, before = case.tokens * case.dim * size, (case.tokens - rows) * case.dim * size
    held = _inputs(case).add({"loss and number of targets": 2 * summed, "gradient of weight": weight})
    return max(
        held.add({"three matrices of one chunk's logits": 3 * rows * case.vocab * summed, _OF_HIDDEN: before}),
        held.add(
            {
                "gradient of one chunk's logits": rows * case.vocab * size,
                "one chunk's gradient of weight": weight,
                _OF_HIDDEN: hidden,
            }
        ),
        held.add({_OF_HIDDEN: hidden, "gradients of hidden, chunk by chunk": hidden}),
    )


_OF_HIDDEN = "gradient of hidden"


def fused_peak(case: LossCase) -> Bytes:
    """Peak of a fused loss, in bytes, without its values per row of a chunk. Forward: one chunk of logits, and the
    gradients, weight's in float32. Backward, in half precision: weight's gradient beside its sum in float32."""
    size, summed = _sizes(case)
    rounded = case.vocab * case.dim * size if size < summed else 0
    held = _held(case)
    return max(held.add({_CHUNK: _chunk(case)}), held.add({"gradient of weight, rounded": rounded}))


_CHUNK = "one chunk of logits"


def fused_pytorch_peak(case: LossCase) -> Bytes:
    """Peak of `fused_pytorch`, in bytes, on the device where it takes more: CPU in half precision.

    There is no product of half precision in float32 there, so both its operands are upcast. On either device the
    softmax of half precision is that of an upcast copy of the chunk.
    """
    size, summed = _sizes(case)
    rows = chunk_tokens(case.tokens, case.dim, size)
    per_row = 2 + 8 + 2 * summed  # flag "kept", target, and two values
    if size < summed:
        per_row = case.vocab * summed + max(per_row, case.dim * summed)
    forward = _held(case).add({_CHUNK: _chunk(case), "values of the chunk's rows, and upcast copies": rows * per_row})
    return max(forward, fused_peak(case))


def fused_triton_peak(case: LossCase) -> Bytes:
    """Peak of `fused_triton`, in bytes: a fused loss and one float32 a row."""
    rows = chunk_tokens(case.tokens, case.dim, case.torch_dtype.itemsize)
    return max(_held(case).add({_CHUNK: _chunk(case), "losses of the chunk's rows": 4 * rows + 4}), fused_peak(case))


def linear_cross_entropy_peak(case: LossCase) -> Bytes:
    """Peak of torch's linear_cross_entropy where vocab is larger than dim, in bytes.

    Its chunks are small; the gradients that it made in forward are copied when they become .grad.
    """
    _, summed = _sizes(case)
    gradients = {"gradients of hidden and weight": _gradients(case), "their copies": _gradients(case)}
    return _inputs(case).add({**gradients, "scalars": 3 * summed})


def _sizes(case: LossCase) -> tuple[int, int]:
    """Bytes of an element, and of an element of a sum (float32 or wider)."""
    size = case.torch_dtype.itemsize
    return size, max(size, 4)


def _inputs(case: LossCase) -> Bytes:
    return Bytes({"hidden and weight": _gradients(case), "targets": 8 * case.tokens})


def _gradients(case: LossCase) -> int:
    """Bytes of the gradients of hidden and weight."""
    return (case.tokens + case.vocab) * case.dim * case.torch_dtype.itemsize


def _held(case: LossCase) -> Bytes:
    """Bytes live from a fused loss's first chunk on: inputs, both gradients, loss and count."""
    size, summed = _sizes(case)
    gradients = {
        _OF_HIDDEN: case.tokens * case.dim * size,
        "gradient of weight, summed in float32": case.vocab * case.dim * summed,
    }
    return _inputs(case).add({**gradients, "loss and number of targets": summed + 8})


def _chunk(case: LossCase) -> int:
    """Bytes of one chunk of logits."""
    size, _ = _sizes(case)
    return chunk_tokens(case.tokens, case.dim, size) * row_stride(case.vocab, size) * size
