"""The size of the chunks of `chunked` and of the fused losses."""

from __future__ import annotations


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
