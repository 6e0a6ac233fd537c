"""The backward kernels of `flash_gluon`, for Hopper: five products for each tile of scores, where `triton_kernels` has
seven.

Each program owns a tile of keys and goes through the queries. It keeps the gradients of k and v in registers, and adds
its part of the gradient of q to a float32 buffer, in an order that differs from run to run (Dao, "FlashAttention-2",
2023, section 3.1). Products run while the program computes what the next ones need (Shah et al., "FlashAttention-3",
2024).

Tensors are described as (batch, heads, seq, HEAD_DIM), k and v with `heads // group` heads; `scale` is
log2(e) / sqrt(HEAD_DIM), because exponentials have base 2. A head has `padded` rows, a multiple of BLOCK_M.
`statistics` is float32 (2, batch * heads, padded): log-sum-exp of base 2, infinite in padding, and delta; `half` is its
first stride. `buffer` has a tile of BLOCK_M rows after the other, each in the order in which threads hold it.
"""

# ruff: noqa: RUF005  (Gluon has no starred elements)
from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = tl.constexpr(1.4426950408889634)
STAGES = gl.constexpr(2)


@triton.jit(do_not_specialize=["q_len", "padded"])
def prepare(
    out, grad_out, lse, statistics, buffer, q_len, padded, half,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """One program fills the statistics of BLOCK_M rows, and their part of the buffer with zeros. `out` and `grad_out`
    are tuples (pointer, batch stride, head stride, row stride, heads)."""
    blocks = padded // BLOCK_M
    batch_head, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK_M
    rows = first + tl.arange(0, BLOCK_M)
    delta = tl.sum(
        _rows(out, batch_head, rows, q_len, HEAD_DIM) * _rows(grad_out, batch_head, rows, q_len, HEAD_DIM), 1
    )
    of_head = tl.cast(batch_head, tl.int64)
    row_lse = tl.load(lse + of_head * q_len + rows, mask=rows < q_len, other=float("inf")) * LOG2_E
    tl.store(statistics + of_head * padded + rows, row_lse)
    tl.store(statistics + half + of_head * padded + rows, delta)
    elements = tl.arange(0, BLOCK_M * HEAD_DIM)
    tl.store(buffer + (of_head * padded + first) * HEAD_DIM + elements, tl.zeros([BLOCK_M * HEAD_DIM], tl.float32))


@triton.jit
def _rows(x, batch_head, rows, q_len, HEAD_DIM: tl.constexpr):
    """x's rows in float32, zero past `q_len`."""
    batch, head = tl.cast(batch_head // x[4], tl.int64), tl.cast(batch_head % x[4], tl.int64)
    pointers = x[0] + batch * x[1] + head * x[2] + tl.cast(rows, tl.int64)[:, None] * x[3] + tl.arange(0, HEAD_DIM)
    return tl.load(pointers, mask=(rows < q_len)[:, None], other=0.0).to(tl.float32)


@gluon.jit
def _fetch(
    q, grad_out, batch, head, tile, q_tiles, grad_tiles, loaded, stage, wanted,
    BLOCK_M: gl.constexpr, HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Load a tile of queries, and of the gradients of their outputs, where that is `wanted`."""
    bar = loaded.index(stage)
    mbarrier.expect(bar, 2 * BLOCK_M * HEAD_DIM * 2, pred=wanted)
    tma.async_copy_global_to_shared(q, [batch, head, tile * BLOCK_M, 0], bar, q_tiles.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(
        grad_out, [batch, head, tile * BLOCK_M, 0], bar, grad_tiles.index(stage), pred=wanted
    )


@gluon.jit(do_not_specialize=["q_len", "k_len", "heads", "group"])
def gluon_backward(
    q, k, v, grad_out, grad_k, grad_v, statistics, buffer, heads, group, q_len, k_len, padded, half, scale,
    IS_CAUSAL: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """One program computes the gradients of BLOCK_N keys and values, over every query head of their group."""
    OF_SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BLOCK_M, 16])
    OF_KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, HEAD_DIM, 16])
    ALONG: gl.constexpr = min(num_warps, HEAD_DIM // 16)
    ACROSS: gl.constexpr = num_warps // ALONG
    OF_QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [ALONG, ACROSS], [16, BLOCK_M // ACROSS, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OF_KEYS, 2)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    dtype: gl.constexpr = q.dtype

    blocks = (k_len + BLOCK_N - 1) // BLOCK_N
    block, batch_head = gl.program_id(0) % blocks, gl.program_id(0) // blocks
    start = block * BLOCK_N  # causal: most queries attend to the first keys
    kv_heads = heads // group
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    tiles, whole = padded // BLOCK_M, q_len // BLOCK_M
    first_tile, unmasked = 0, 0
    if IS_CAUSAL:
        first_tile = gl.minimum(start // BLOCK_M, tiles)
        unmasked = (start + BLOCK_N - 1 + BLOCK_M - 1) // BLOCK_M
    if start + BLOCK_N > k_len:
        unmasked = tiles
    count = tiles - first_tile
    begin = first_tile
    if not IS_CAUSAL:  # programs that run at once add to different tiles
        begin = (block * (BLOCK_N // BLOCK_M)) % tiles

    k_tiles = gl.allocate_shared_memory(dtype, [1] + k.block_type.shape, k.layout)
    v_tiles = gl.allocate_shared_memory(dtype, [1] + v.block_type.shape, v.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [STAGES] + q.block_type.shape, q.layout)
    grad_tiles = gl.allocate_shared_memory(dtype, [STAGES] + q.block_type.shape, q.layout)
    scores_tiles = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_M], gl.NVMMASharedLayout(128, 16, 2))
    own = gl.allocate_shared_memory(gl.float32, [2 * BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    loaded = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(keys_loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(loaded.index(i), count=1)
    fence_async_shared()

    sum_k = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, OF_KEYS)
    sum_v = gl.zeros([BLOCK_N, HEAD_DIM], gl.float32, OF_KEYS)
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, OF_SCORES)
    no_queries = gl.zeros([HEAD_DIM, BLOCK_M], gl.float32, OF_QUERIES)
    if count > 0:
        mbarrier.expect(keys_loaded, 2 * BLOCK_N * HEAD_DIM * 2)
        tma.async_copy_global_to_shared(k, [batch, kv_head, start, 0], keys_loaded, k_tiles.index(0))
        tma.async_copy_global_to_shared(v, [batch, kv_head, start, 0], keys_loaded, v_tiles.index(0))
        lane = gl.arange(0, 2 * BLOCK_M, FLAT)
        of_lane = statistics + ((lane // BLOCK_M) * half + lane % BLOCK_M)
        columns = start + gl.arange(0, BLOCK_N, gl.SliceLayout(1, OF_SCORES))
        lanes = gl.arange(0, BLOCK_M, gl.SliceLayout(0, OF_SCORES))
        mbarrier.wait(keys_loaded, 0)
        step = 0  # over all heads: it says which stage and phase
        for head in range(kv_head * group, (kv_head + 1) * group):
            of_head = gl.cast(batch * heads + head, gl.int64) * tiles
            tile = begin
            _fetch(q, grad_out, batch, head, tile, q_tiles, grad_tiles, loaded, step % STAGES, True, BLOCK_M, HEAD_DIM)
            own.store(gl.load(of_lane + (of_head + tile) * BLOCK_M))
            acc_k = warpgroup_mma_init(sum_k)
            acc_v = warpgroup_mma_init(sum_v)
            for t in range(count):
                # 0, which the compiler does not know: it would keep descriptors of all operands in registers.
                zero = gl.inline_asm_elementwise(
                    "mov.b32 $0, 0; // $1", "=r,r", [t], dtype=gl.int32, is_pure=True, pack=1
                )
                k_tile = k_tiles.index(zero).reshape([BLOCK_N, HEAD_DIM])
                v_tile = v_tiles.index(zero).reshape([BLOCK_N, HEAD_DIM])
                stage = step % STAGES
                q_tile = q_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                grad_tile = grad_tiles.index(stage).reshape([BLOCK_M, HEAD_DIM])
                mbarrier.wait(loaded.index(stage), (step // STAGES) & 1)
                step += 1
                of_scores = warpgroup_mma(k_tile, q_tile.permute((1, 0)), no_scores, is_async=True)
                of_probs = warpgroup_mma(v_tile, grad_tile.permute((1, 0)), no_scores, is_async=True)
                next_tile = tile + 1
                if not IS_CAUSAL:
                    next_tile = gl.where(next_tile == tiles, 0, next_tile)
                following = gl.load(of_lane + (of_head + gl.minimum(next_tile, tiles - 1)) * BLOCK_M)
                row_lse = own.slice(0, BLOCK_M).load(gl.SliceLayout(0, OF_SCORES))
                scores = warpgroup_mma_wait(1, deps=[of_scores])
                probs = gl.exp2(scores * scale - gl.expand_dims(row_lse, 0))  # (BLOCK_N, BLOCK_M)
                masked = (tile < unmasked) | (tile >= whole)
                rows = tile * BLOCK_M + lanes
                if masked:
                    probs = gl.where(_seen(rows, columns, q_len, k_len, IS_CAUSAL), probs, 0.0)
                acc_v = warpgroup_mma(gl.convert_layout(probs.to(dtype), OPERAND), grad_tile, acc_v, is_async=True)
                row_delta = own.slice(BLOCK_M, BLOCK_M).load(gl.SliceLayout(0, OF_SCORES))
                grad_probs = warpgroup_mma_wait(1, deps=[of_probs])
                of_rows = probs * (grad_probs - gl.expand_dims(row_delta, 0))
                if masked:  # again, as zero times what is not finite is NaN
                    of_rows = gl.where(_seen(rows, columns, q_len, k_len, IS_CAUSAL), of_rows, 0.0)
                grad_scores = of_rows.to(dtype)
                scores_tiles.index(0).store(grad_scores)
                fence_async_shared()
                # The other stage is free: this warp has waited above for the products that read it.
                _fetch(
                    q, grad_out, batch, head, next_tile, q_tiles, grad_tiles, loaded, step % STAGES, t + 1 < count,
                    BLOCK_M, HEAD_DIM,
                )  # fmt: skip
                operand = gl.convert_layout(grad_scores, OPERAND)
                of_queries = warpgroup_mma(k_tile.permute((1, 0)), scores_tiles.index(zero), no_queries, is_async=True)
                acc_k = warpgroup_mma(operand, q_tile, acc_k, is_async=True)
                grad_q = warpgroup_mma_wait(1, deps=[of_queries])  # (HEAD_DIM, BLOCK_M)
                own.store(following)
                _add(buffer + (of_head + tile) * (HEAD_DIM * BLOCK_M), grad_q, HEAD_DIM, BLOCK_M)
                tile = next_tile
            sum_k, sum_v = warpgroup_mma_wait(0, deps=[acc_k, acc_v])
    k_tiles.index(0).reshape([BLOCK_N, HEAD_DIM]).store((sum_k * (scale * LN_2)).to(dtype))
    v_tiles.index(0).reshape([BLOCK_N, HEAD_DIM]).store(sum_v.to(dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(grad_k, [batch, kv_head, start, 0], k_tiles.index(0))
    tma.async_copy_shared_to_global(grad_v, [batch, kv_head, start, 0], v_tiles.index(0))
    tma.store_wait(0)


@gluon.jit
def _seen(rows, columns, q_len, k_len, IS_CAUSAL: gl.constexpr):
    """(BLOCK_N, BLOCK_M): whether the query attends to the key."""
    seen = gl.expand_dims(columns < k_len, 1) & gl.expand_dims(rows < q_len, 0)
    if IS_CAUSAL:
        seen = seen & (gl.expand_dims(columns, 1) <= gl.expand_dims(rows, 0))
    return seen


@gluon.jit
def _add(buffer, grad_q, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr):
    """Add a tile to the buffer, in pieces of the 4 numbers that a thread has of two neighbouring 8 x 8 matrices."""
    pieces = grad_q.reshape([HEAD_DIM // 16, 2, 8, BLOCK_M // 8, 4, 2]).permute((0, 3, 2, 4, 1, 5))
    pieces = pieces.reshape([HEAD_DIM * BLOCK_M // 4, 4])
    LAYOUT: gl.constexpr = pieces.type.layout
    piece = gl.arange(0, HEAD_DIM * BLOCK_M // 4, gl.SliceLayout(1, LAYOUT))
    number = gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))
    gl.atomic_add(buffer + (gl.expand_dims(piece, 1) * 4 + gl.expand_dims(number, 0)), pieces, sem="relaxed")


@triton.jit(do_not_specialize=["q_len", "padded"])
def finish(buffer, grad_q, q_len, padded, scale, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr):
    """One program writes BLOCK_M rows of the gradient of q, (batch, heads, q_len, HEAD_DIM) without gaps, from the
    buffer."""
    blocks = padded // BLOCK_M
    batch_head, first = tl.cast(tl.program_id(0) // blocks, tl.int64), tl.program_id(0) % blocks * BLOCK_M
    tile = tl.load(buffer + (batch_head * padded + first) * HEAD_DIM + tl.arange(0, HEAD_DIM * BLOCK_M))
    tile = tile.reshape(HEAD_DIM // 16, BLOCK_M // 8, 8, 4, 2, 2).permute(1, 3, 5, 0, 4, 2).reshape(BLOCK_M, HEAD_DIM)
    rows = first + tl.arange(0, BLOCK_M)
    pointers = grad_q + (batch_head * q_len + rows)[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)
    tl.store(pointers, (tile * (scale * LN_2)).to(grad_q.dtype.element_ty), mask=(rows < q_len)[:, None])
