"""The three Triton kernels of FlashAttention-2: forward, dq, and dk with dv.

Dao, "FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", 2023, algorithms 1 and 2.

Every tensor is (batch, heads, seq, HEAD_DIM), k and v with `heads // group` heads. With TMA it comes as a tensor
descriptor, else as a tuple (pointer, batch stride, head stride, row stride); the innermost stride is 1. Tiles are
(BLOCK_M or BLOCK_N) x COLUMNS, where COLUMNS is HEAD_DIM or the next power of two; elements outside of the tensor are
loaded as zero and not stored. `scale` is log2(e) / sqrt(HEAD_DIM), because exponentials have base 2. `lse` and `delta`
are float32 (batch, heads, q_len). Kernels do not read `q_bucket` and `rows_bucket`: they are the autotuner's key for
the size.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)
CHUNK = tl.constexpr(32)


@triton.jit(do_not_specialize=["q_len", "k_len", "q_bucket", "rows_bucket"])
def attention_forward(
    q, k, v, out, lse, heads, group, q_len, k_len, scale, q_bucket, rows_bucket,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes the output and the log-sum-exp of BLOCK_M queries."""
    batch, head, start = _longest_first(q_len, heads, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    q_tile = _load(q, batch, head, start, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)
    acc = tl.full([BLOCK_M, COLUMNS], 0.0, tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)  # finite: in a row of -inf, -inf - -inf would be NaN
    row_sum = tl.full([BLOCK_M], 0.0, tl.float32)
    first_masked, end = _keys_seen(start, k_len, IS_CAUSAL, BLOCK_M, BLOCK_N)
    for MASKED in tl.static_range(2):
        for first in tl.range(first_masked if MASKED else 0, end if MASKED else first_masked, BLOCK_N):
            k_tile = _load(k, batch, head // group, first, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)
            scores = _dot_of_rows(
                q_tile, k_tile, q, k, batch, head, head // group, start, first, q_len, k_len,
                PRECISION, BLOCK_M, BLOCK_N, HEAD_DIM, COLUMNS,
            )  # (BLOCK_M, BLOCK_N)  # fmt: skip
            if MASKED:
                columns = first + tl.arange(0, BLOCK_N)
                scores = tl.where(_seen(rows[:, None], columns[None, :], k_len, IS_CAUSAL), scores, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
            probs = tl.exp2(scores * scale - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(probs, 1)
            row_max = new_max
            v_tile = _load(v, batch, head // group, first, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)
            acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
    _store(out, acc / row_sum[:, None], batch, head, start, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)
    row_lse = (row_max + tl.log2(row_sum)) * LN_2
    tl.store(lse + _row_offsets(batch, head, heads, q_len, rows), row_lse, mask=rows < q_len)


@triton.jit(do_not_specialize=["q_len", "k_len", "q_bucket", "rows_bucket"])
def attention_backward_q(
    q, k, v, out, grad_out, grad_q, lse, delta, heads, group, q_len, k_len, scale, q_bucket, rows_bucket,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes the gradient of BLOCK_M queries, and their `delta`, which the next kernel reads."""
    batch, head, start = _longest_first(q_len, heads, BLOCK_M)
    rows = start + tl.arange(0, BLOCK_M)
    q_tile = _load(q, batch, head, start, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)
    grad_tile = _load(grad_out, batch, head, start, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)
    out_tile = _load(out, batch, head, start, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)
    row_delta = tl.sum(grad_tile.to(tl.float32) * out_tile.to(tl.float32), 1)
    offsets = _row_offsets(batch, head, heads, q_len, rows)
    tl.store(delta + offsets, row_delta, mask=rows < q_len)
    row_lse = tl.load(lse + offsets, mask=rows < q_len, other=0.0) * LOG2_E
    acc = tl.full([BLOCK_M, COLUMNS], 0.0, tl.float32)
    first_masked, end = _keys_seen(start, k_len, IS_CAUSAL, BLOCK_M, BLOCK_N)
    for MASKED in tl.static_range(2):
        for first in tl.range(first_masked if MASKED else 0, end if MASKED else first_masked, BLOCK_N):
            k_tile = _load(k, batch, head // group, first, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)
            v_tile = _load(v, batch, head // group, first, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)
            scores = _dot_of_rows(
                q_tile, k_tile, q, k, batch, head, head // group, start, first, q_len, k_len,
                PRECISION, BLOCK_M, BLOCK_N, HEAD_DIM, COLUMNS,
            )  # (BLOCK_M, BLOCK_N)  # fmt: skip
            probs = tl.exp2(scores * scale - row_lse[:, None])
            grad_probs = _dot_of_rows(
                grad_tile, v_tile, grad_out, v, batch, head, head // group, start, first, q_len, k_len,
                PRECISION, BLOCK_M, BLOCK_N, HEAD_DIM, COLUMNS,
            )  # fmt: skip
            grad_scores = probs * (grad_probs - row_delta[:, None])
            if MASKED:
                columns = first + tl.arange(0, BLOCK_N)
                grad_scores = tl.where(_seen(rows[:, None], columns[None, :], k_len, IS_CAUSAL), grad_scores, 0.0)
            acc = tl.dot(grad_scores.to(k_tile.dtype), k_tile, acc, input_precision=PRECISION)
    _store(grad_q, acc * (scale * LN_2), batch, head, start, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)


@triton.jit(do_not_specialize=["q_len", "k_len", "q_bucket", "rows_bucket"])
def attention_backward_kv(
    q, k, v, grad_out, grad_k, grad_v, lse, delta, heads, group, q_len, k_len, scale, q_bucket, rows_bucket,
    IS_CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program computes the gradients of BLOCK_N keys and values, over every query head of their group.

    The tiles of scores are computed transposed, k qᵀ: `tl.dot(tl.trans(grad_scores), q)` is miscompiled on Hopper by
    Triton 3.4 to 3.7.0 when grad_scores comes straight from an accumulator.
    """
    blocks = (k_len + BLOCK_N - 1) // BLOCK_N
    start = (tl.program_id(0) % blocks) * BLOCK_N  # causal: most queries attend to the first keys
    batch_head = tl.program_id(0) // blocks
    batch, kv_head = batch_head // (heads // group), batch_head % (heads // group)
    columns = start + tl.arange(0, BLOCK_N)
    k_tile = _load(k, batch, kv_head, start, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)
    v_tile = _load(v, batch, kv_head, start, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)
    acc_k = tl.full([BLOCK_N, COLUMNS], 0.0, tl.float32)
    acc_v = tl.full([BLOCK_N, COLUMNS], 0.0, tl.float32)
    # Tiles of queries that need a mask: those on the diagonal, and the last one if it is incomplete. There k may be
    # infinite, and infinity times the zeros past the last query is NaN.
    whole, tiles = q_len // BLOCK_M, (q_len + BLOCK_M - 1) // BLOCK_M
    first_tile, first_unmasked = 0, 0
    if IS_CAUSAL:
        first_tile = start // BLOCK_M
        whole = tl.maximum(whole, first_tile)
        first_unmasked = tl.minimum((start + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M, whole)
    on_diagonal = first_unmasked - first_tile
    masked = on_diagonal + tl.maximum(tiles - whole, 0)
    for head in tl.range(kv_head * group, (kv_head + 1) * group):
        for MASKED in tl.static_range(1, -1, -1):
            for i in tl.range(0 if MASKED else first_unmasked, masked if MASKED else whole):
                first = i * BLOCK_M
                if MASKED:
                    first = tl.where(i < on_diagonal, first_tile + i, whole) * BLOCK_M
                rows = first + tl.arange(0, BLOCK_M)
                offsets = _row_offsets(batch, head, heads, q_len, rows)
                row_lse = tl.load(lse + offsets, mask=rows < q_len, other=0.0) * LOG2_E
                row_delta = tl.load(delta + offsets, mask=rows < q_len, other=0.0)
                q_tile = _load(q, batch, head, first, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)
                grad_tile = _load(grad_out, batch, head, first, q_len, TMA, BLOCK_M, HEAD_DIM, COLUMNS)
                scores = _dot_of_rows(
                    k_tile, q_tile, k, q, batch, kv_head, head, start, first, k_len, q_len,
                    PRECISION, BLOCK_N, BLOCK_M, HEAD_DIM, COLUMNS,
                )  # (BLOCK_N, BLOCK_M)  # fmt: skip
                probs = tl.exp2(scores * scale - row_lse[None, :])
                if MASKED:
                    seen = rows[None, :] < q_len
                    if IS_CAUSAL:
                        seen = seen & (columns[:, None] <= rows[None, :])
                    probs = tl.where(seen, probs, 0.0)
                acc_v = tl.dot(probs.to(grad_tile.dtype), grad_tile, acc_v, input_precision=PRECISION)
                grad_probs = _dot_of_rows(
                    v_tile, grad_tile, v, grad_out, batch, kv_head, head, start, first, k_len, q_len,
                    PRECISION, BLOCK_N, BLOCK_M, HEAD_DIM, COLUMNS,
                )  # fmt: skip
                grad_scores = probs * (grad_probs - row_delta[None, :])
                if MASKED:  # masked again: zero times a delta that is NaN is NaN
                    grad_scores = tl.where(seen, grad_scores, 0.0)
                acc_k = tl.dot(grad_scores.to(q_tile.dtype), q_tile, acc_k, input_precision=PRECISION)
    _store(grad_k, acc_k * (scale * LN_2), batch, kv_head, start, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)
    _store(grad_v, acc_v, batch, kv_head, start, k_len, TMA, BLOCK_N, HEAD_DIM, COLUMNS)


@triton.jit
def _longest_first(q_len, heads, BLOCK_M: tl.constexpr):
    """This program's batch, head and first query. The last queries come first: causal, they attend to the most keys."""
    blocks = (q_len + BLOCK_M - 1) // BLOCK_M
    block = blocks - 1 - tl.program_id(0) % blocks
    batch_head = tl.program_id(0) // blocks
    return batch_head // heads, batch_head % heads, block * BLOCK_M


@triton.jit
def _keys_seen(start, k_len, IS_CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """For queries from `start` on: first key of the tiles that need a mask, and the end of the keys."""
    first_masked, end = k_len // BLOCK_N * BLOCK_N, k_len
    if IS_CAUSAL:
        first_masked = tl.minimum(first_masked, (start + 1) // BLOCK_N * BLOCK_N)
        end = tl.minimum(end, start + BLOCK_M)
    return first_masked, end


@triton.jit
def _seen(rows, columns, k_len, IS_CAUSAL: tl.constexpr):
    """True where the query attends to the key."""
    seen = columns < k_len
    if IS_CAUSAL:
        seen = seen & (columns <= rows)
    return seen


@triton.jit
def _dot_of_rows(
    a_tile, b_tile, a, b, batch, a_head, b_head, a_start, b_start, a_len, b_len,
    PRECISION: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """a_tile b_tileᵀ, (A_ROWS, B_ROWS).

    No matrix unit computes in true float32, and without one each thread holds full rows of both operands in registers;
    for tf32x3 it holds them three times. So in these precisions rows are loaded again, CHUNK columns at a time.
    """
    if PRECISION != "tf32" and COLUMNS > CHUNK:
        acc = tl.full([A_ROWS, B_ROWS], 0.0, tl.float32)
        columns = tl.arange(0, CHUNK)[None, :]
        a_pointers, a_inside = _place(a, batch, a_head, a_start, a_len, A_ROWS, CHUNK, CHUNK)
        b_pointers, b_inside = _place(b, batch, b_head, b_start, b_len, B_ROWS, CHUNK, CHUNK)
        for first in tl.static_range(0, COLUMNS, CHUNK):
            inside = first + columns < HEAD_DIM
            a_chunk = tl.load(a_pointers + first, mask=a_inside & inside, other=0.0)
            b_chunk = tl.load(b_pointers + first, mask=b_inside & inside, other=0.0)
            acc = tl.dot(a_chunk, b_chunk.T, acc, input_precision=PRECISION)
    else:
        acc = tl.dot(a_tile, b_tile.T, input_precision=PRECISION)
    return acc


@triton.jit
def _row_offsets(batch, head, heads, q_len, rows):
    """Offsets of the rows in a (batch, heads, q_len) tensor."""
    return tl.cast(batch * heads + head, tl.int64) * q_len + rows


@triton.jit
def _load(
    x, batch, head, start, length, TMA: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr
):
    """x[batch, head, start : start + ROWS] as (ROWS, COLUMNS), zero past `length` and HEAD_DIM."""
    if TMA:
        tile = x.load([batch, head, start, 0]).reshape(ROWS, COLUMNS)
    else:
        pointers, inside = _place(x, batch, head, start, length, ROWS, HEAD_DIM, COLUMNS)
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def _store(
    x, tile, batch, head, start, length,
    TMA: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x[batch, head, start : start + ROWS] = tile, rounded to x's dtype."""
    if TMA:
        x.store([batch, head, start, 0], tile.to(x.dtype).reshape(1, 1, ROWS, COLUMNS))
    else:
        pointers, inside = _place(x, batch, head, start, length, ROWS, HEAD_DIM, COLUMNS)
        tl.store(pointers, tile.to(x[0].dtype.element_ty), mask=inside)


@triton.jit
def _place(x, batch, head, start, length, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """Pointers to a tile's elements, and a mask of those inside the tensor."""
    base = x[0] + tl.cast(batch, tl.int64) * x[1] + tl.cast(head, tl.int64) * x[2] + tl.cast(start, tl.int64) * x[3]
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = (start + rows < length)[:, None]
    if HEAD_DIM != COLUMNS:
        inside = inside & (columns < HEAD_DIM)[None, :]
    return base + rows[:, None] * x[3] + columns[None, :], inside
