"""The forward kernel of `flash_gluon`, for Hopper.

Shah et al., "FlashAttention-3: Fast and Accurate Attention with Asynchrony and Low-precision", 2024: one warp loads
tiles by TMA, and several groups of warps compute, each for queries of its own. While one group takes the softmax of its
scores, the matrix units work for the others; they work, too, for the group's own product with v.

Tensors are described as (batch, heads, seq, HEAD_DIM), k and v with `heads // group` heads; `scale` is
log2(e) / sqrt(HEAD_DIM), because exponentials have base 2; `lse` is float32 (batch, heads, q_len), natural log.
"""

# ruff: noqa: RUF005  (Gluon has no starred elements)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LN_2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-3.4028234663852886e38)
REGISTERS_TO_LOAD = gl.constexpr(24)
WARPS = gl.constexpr(4)  # of a group; the matrix unit works for four at a time
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # its name until Triton 3.6, and since


@gluon.jit
def _place(index, blocks, batch_heads, section, heads, BLOCK_M: gl.constexpr):
    """Batch, head and first query of a program. Programs go through `section` heads, whose keys and values stay in the
    cache, before the next; causal, the last queries attend to the most keys, and come first."""
    part = index // (section * blocks)
    local = index - part * (section * blocks)
    here = gl.minimum(section, batch_heads - part * section)
    batch_head = part * section + local % here
    return batch_head // heads, batch_head % heads, (blocks - 1 - local // here) * BLOCK_M


@gluon.jit
def _tiles(start, k_len, IS_CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Number of tiles of keys that the queries from `start` on attend to."""
    end = k_len
    if IS_CAUSAL:
        end = gl.minimum(k_len, start + BLOCK_M)
    return (end + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _load(
    q, k, v, shared, sizes,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """The warp that loads: queries once, then keys and values from the last tile to the first, STAGES at a time."""
    q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty = shared
    heads, group, batch_heads, section, q_len, k_len = sizes
    blocks = (q_len + BLOCK_M - 1) // BLOCK_M
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    batch, head, start = _place(gl.program_id(0), blocks, batch_heads, section, heads, BLOCK_M)
    tiles = _tiles(start, k_len, IS_CAUSAL, BLOCK_M, BLOCK_N)
    mbarrier.expect(q_full, BLOCK_M * HEAD_DIM * 2)
    for index in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(q, [batch, head, start + index * ROWS, 0], q_full, q_tiles.index(index))
    for i in range(tiles):
        place = [batch, head // group, (tiles - 1 - i) * BLOCK_N, 0]
        stage, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(k_empty.index(stage), phase ^ 1)
        mbarrier.expect(k_full.index(stage), BLOCK_N * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(k, place, k_full.index(stage), k_tiles.index(stage))
        mbarrier.wait(v_empty.index(stage), phase ^ 1)
        mbarrier.expect(v_full.index(stage), BLOCK_N * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(v, place, v_full.index(stage), v_tiles.index(stage))


@gluon.jit
def _softmax(
    scores, row_max, row_sum, scale, tile, unmasked, rows, k_len,
    IS_CAUSAL: gl.constexpr, LAYOUT: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Probabilities of a tile, the new running maximum and sum, and the factor of what was summed before."""
    if tile >= unmasked:
        columns = tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
        seen = gl.expand_dims(columns < k_len, 0)
        if IS_CAUSAL:
            seen = seen & (gl.expand_dims(columns, 0) <= gl.expand_dims(rows, 1))
        scores = gl.where(seen, scores, float("-inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale)
    probs = gl.exp2(scores * scale - gl.expand_dims(new_max, 1))
    rescale = gl.exp2(row_max - new_max)
    return probs, new_max, row_sum * rescale + gl.sum(probs, 1), rescale


@gluon.jit
def _attend(
    GROUP: gl.constexpr, out, lse, shared, sizes, scale,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr,
):  # fmt: skip
    """A group of warps that computes the output of its part of the program's queries."""
    q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty = shared
    heads, _, batch_heads, section, q_len, k_len = sizes
    ROWS: gl.constexpr = BLOCK_M // GROUPS
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    OF_OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HEAD_DIM, 16])
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, OF_SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_OUT, 2)
    dtype: gl.constexpr = out.dtype
    blocks = (q_len + BLOCK_M - 1) // BLOCK_M
    batch, head, start = _place(gl.program_id(0), blocks, batch_heads, section, heads, BLOCK_M)
    tiles = _tiles(start, k_len, IS_CAUSAL, BLOCK_M, BLOCK_N)
    first = start + GROUP * ROWS
    rows = first + gl.arange(0, ROWS, OF_ROWS)
    unmasked = k_len // BLOCK_N
    if IS_CAUSAL:
        unmasked = gl.minimum(unmasked, (first + 1) // BLOCK_N)
    q_tile = q_tiles.index(GROUP).reshape([ROWS, HEAD_DIM])
    row_max = gl.full([ROWS], LOWEST, gl.float32, OF_ROWS)  # finite: in a row of -inf, -inf - -inf would be NaN
    row_sum = gl.full([ROWS], 0.0, gl.float32, OF_ROWS)
    zeros = gl.zeros([ROWS, BLOCK_N], gl.float32, OF_SCORES)
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OF_OUT)
    mbarrier.wait(q_full, 0)
    mbarrier.wait(k_full.index(0), 0)
    k_tile = k_tiles.index(0).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
    product = warpgroup_mma(q_tile, k_tile, zeros, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[product])
    thread_barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    probs, row_max, row_sum, rescale = _softmax(
        scores, row_max, row_sum, scale, tiles - 1, unmasked, rows, k_len, IS_CAUSAL, OF_SCORES, BLOCK_N
    )
    operand = gl.convert_layout(probs.to(dtype), OPERAND)
    for i in range(1, tiles):
        last, last_phase = (i - 1) % STAGES, ((i - 1) // STAGES) & 1
        stage = i % STAGES
        mbarrier.wait(k_full.index(stage), (i // STAGES) & 1)
        k_tile = k_tiles.index(stage).reshape([BLOCK_N, HEAD_DIM]).permute((1, 0))
        product = warpgroup_mma(q_tile, k_tile, zeros, is_async=True)
        mbarrier.wait(v_full.index(last), last_phase)
        added = warpgroup_mma(operand, v_tiles.index(last).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[product])
        thread_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        probs, row_max, row_sum, rescale = _softmax(
            scores, row_max, row_sum, scale, tiles - 1 - i, unmasked, rows, k_len, IS_CAUSAL, OF_SCORES, BLOCK_N
        )
        # As operands of the wait, the exponentials are computed before it, while the product with v runs.
        following = gl.convert_layout(probs.to(dtype), OPERAND)
        acc, operand = warpgroup_mma_wait(0, deps=[added, following])
        thread_barrier()
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OF_OUT)), 1)
    last = (tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((tiles - 1) // STAGES) & 1)
    added = warpgroup_mma(operand, v_tiles.index(last).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[added])
    acc = acc / gl.expand_dims(gl.convert_layout(row_sum, gl.SliceLayout(1, OF_OUT)), 1)
    q_tile.store(acc.to(dtype))  # no other group reads these queries
    fence_async_shared()
    tma.async_copy_shared_to_global(out, [batch, head, first, 0], q_tiles.index(GROUP))
    at = gl.cast(batch * heads + head, gl.int64) * q_len
    gl.store(lse + at + rows, (row_max + gl.log2(row_sum)) * LN_2, mask=rows < q_len)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_len", "k_len", "heads", "group", "batch_heads", "section"])
def gluon_forward(
    q, k, v, out, lse, heads, group, batch_heads, section, q_len, k_len, scale,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr, GROUPS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program computes the output and the log-sum-exp of BLOCK_M queries, by two or three groups of WARPS
    warps with REGISTERS registers a thread (those of the first group are what is left), and a warp that loads."""
    dtype: gl.constexpr = q.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS] + q.block_type.shape, q.layout)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES] + k.block_type.shape, k.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES] + v.block_type.shape, v.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    fence_async_shared()
    thread_barrier()
    shared = q_tiles, k_tiles, v_tiles, q_full, k_full, k_empty, v_full, v_empty
    sizes = heads, group, batch_heads, section, q_len, k_len
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, out, lse, shared, sizes, scale, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, 2)),
                (_attend, (1, out, lse, shared, sizes, scale, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, 2)),
                (_load, (q, k, v, shared, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, 2)),
            ],
            [WARPS, 1],
            [REGISTERS, REGISTERS_TO_LOAD],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (0, out, lse, shared, sizes, scale, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, 3)),
                (_attend, (1, out, lse, shared, sizes, scale, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, 3)),
                (_attend, (2, out, lse, shared, sizes, scale, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, 3)),
                (_load, (q, k, v, shared, sizes, IS_CAUSAL, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, 3)),
            ],
            [WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS_TO_LOAD],
        )  # fmt: skip
