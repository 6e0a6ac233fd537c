"""How the losses that never have all logits cut them into chunks."""

from __future__ import annotations


def chunk_tokens(tokens: int, dim: int, itemsize: int) -> int:
    """Tokens in one chunk of logits, of `itemsize` bytes an element.

    In half precision as many as weight has columns: the chunk is then as large as weight's gradient, and gone before
    that is made of its sum in float32, so that it costs nothing at the peak. In float32, where that sum is the gradient
    itself, a quarter of that. Each chunk reads and writes the whole sum, so 512 are the least that keep the products
    busy.
    """
    return max(1, min(tokens, max(512, dim if itemsize == 2 else dim // 4)))


def row_stride(vocab: int, itemsize: int) -> int:
    """Elements from one row of a chunk's logits to the next: in half precision products want rows of 128 bytes."""
    return -(-vocab // 64) * 64 if itemsize == 2 else vocab
