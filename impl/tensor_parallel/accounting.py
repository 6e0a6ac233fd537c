"""Tensor parallelism in closed form: bytes of a rank's state and activations, bytes that it sends, and FLOPs.

The sizes of a case divide by its degree, and so do its tokens by the number of chunks.
"""

from __future__ import annotations

from math import prod

from impl.accounting.ledger import Bytes
from impl.mesh.accounting import work_of
from impl.mesh.decoder import DecoderSize
from impl.tensor_parallel.cases import SIZES, TensorParallelCase
from shardmark.api import Mesh, Work

_FLOAT, _INDEX, _BOOL = 4, 8, 1
"""Bytes of an element."""


def degree(case: TensorParallelCase) -> int:
    """Number of ranks along `tp`."""
    return Mesh.parse(case.mesh).sizes.get("tp", 1)


def tokens(case: TensorParallelCase) -> int:
    return case.batch * case.context


def matrices(size: DecoderSize) -> list[tuple[int, int]]:
    """Shapes of every matrix: these are cut."""
    kv = size.dim // size.heads * size.kv_heads
    layer = [(size.dim, size.dim)] * 2 + [(kv, size.dim)] * 2 + [(size.hidden, size.dim)] * 3
    return layer * size.layers + [(size.vocabulary, size.dim)] * 2


def state(case: TensorParallelCase) -> Bytes:
    """Bytes of a rank's parameters, gradients and AdamW's moments in float32: 16 P / t, and of norms, which every rank
    has whole, 16 each."""
    size = SIZES[case.model]
    norms, cut = 2 * size.layers + 1, sum(map(prod, matrices(size))) // degree(case)
    own = _FLOAT * (cut + norms * size.dim)
    return Bytes(
        {
            "parameters": own,
            "gradients": own,
            "first moments": own,
            "second moments": own,
            "counts of steps": _FLOAT * (len(matrices(size)) + norms),
        }
    )


def activations(case: TensorParallelCase, *, sliced: bool) -> Bytes:
    """Bytes that a forward pass with targets leaves for backward on a CPU. With `sliced`, norms and the inputs of
    column-parallel products are a slice of the tokens: Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022, equations 2 and 4, for SwiGLU, RoPE and an attention that keeps no scores."""
    size, ranks, every = SIZES[case.model], degree(case), tokens(case)
    own = every // ranks if sliced else every
    head_dim = size.dim // size.heads
    norms, layers = 2 * size.layers + 1, size.layers
    heads, kv = size.dim // ranks, head_dim * size.kv_heads // ranks
    return Bytes(
        {
            "inputs of norms": norms * own * size.dim * _FLOAT,
            "inputs of norms, scaled": norms * own * (size.dim + 1) * _FLOAT,
            "inputs of column-parallel products": norms * own * size.dim * _FLOAT,
            "queries": layers * every * heads * _FLOAT,
            "keys and values": layers * every * 2 * kv * _FLOAT,
            "outputs of attention, by heads and by tokens": 2 * layers * every * heads * _FLOAT,
            "log-sum-exp of attention": layers * every * size.heads // ranks * _FLOAT,
            "angles of rotary positions": layers * every * 2 * head_dim * _FLOAT,
            "SwiGLU": layers * every * 4 * (size.hidden // ranks) * _FLOAT,
            "shares of the vocabulary": every * (size.vocabulary // ranks) * _FLOAT,
            "rows of the vocabulary": 2 * every * (_INDEX + _BOOL),
        }
    )


def sent(case: TensorParallelCase, *, sliced: bool) -> Bytes:
    """Bytes that a rank must send for a forward and a backward pass with targets: 2 (t - 1) / t of a tensor for its
    all-reduce, half as much to gather or to reduce-scatter it.

    Each layer has two column-parallel and two row-parallel products. `sliced`, a column-parallel one gathers its input
    in forward, and again in backward for its weights, and scatters its gradient.
    """
    size, ranks, every = SIZES[case.model], degree(case), tokens(case)
    share = (ranks - 1) * every * size.dim * _FLOAT // ranks
    columns, rows = 2 * size.layers + 1, 2 * size.layers + 1  # with the output, and with the embedding
    of_numbers = 2 * (ranks - 1) * _FLOAT
    loss = {"largest logits": of_numbers * every // ranks, "sums of exponentials": of_numbers * 2 * every // ranks}
    if not sliced:
        return Bytes({"sums of row-parallel products": 2 * share * rows, "input gradients": 2 * share * columns} | loss)
    return Bytes(
        {
            "inputs, gathered": share * columns,
            "inputs, gathered again": share * columns,
            "input gradients, scattered": share * columns,
            "row-parallel products, scattered": share * rows,
            "gradients of these, gathered": share * rows,
            "norms' gradients": (2 * size.layers + 1) * (of_numbers * size.dim // ranks),
        }
        | loss
    )


def work(case: TensorParallelCase) -> Work:
    """The work of all ranks together: that of one decoder."""
    return work_of(SIZES[case.model], tokens(case), case.context)
