"""K-grouped GEMM kernel: the gradient of the weights, out[g] = a[rows of g].T @ b[rows of g].

Persistent, warp-specialised CTAs compute the tiles of all groups' outputs. Both operands are MN-major: a stage holds 64
rows, which are wgmma's K, of 128 columns of a and ``block_k`` columns of b, in TMA boxes of 64 columns. One producer
thread issues the loads; each of two consumer warpgroups multiplies 64 columns of a by all columns of b. Each stage has
a full and an empty mbarrier.

The last stage of a group may contain rows of the next group, or rows of no group. Consumer warpgroup 0 overwrites them
with zeros in both operands, because zeros in one would not cancel infinities and NaN in the other. Warpgroup 1 waits
for it, and warpgroup 0 for nothing, so that it may run ahead: then its epilogue overlaps the main loop of warpgroup 1.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.grouped_gemm.common.constants import CONSUMER_WARPS, SharedMemory
from moe_numba.grouped_gemm.common.pipeline import CLUSTER_MASK, make_release_stage
from moe_numba.grouped_gemm.common.scheduler import Problem, divide, make_group_rows, make_tile_loop
from moe_numba.grouped_gemm.k_grouped.config import (
    BLOCK_N,
    BLOCK_ROWS,
    BOX_BYTES,
    BOX_COLUMNS,
    STORE_BYTES,
    STORE_ROWS,
    KGroupedLayout,
    check_k_grouped_config,
)
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.matrix import make_st_shared_rows_f32, make_stmatrix_rows
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4, st_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_2d_multicast_hint,
    tma_reduce_add_3d,
    tma_store_3d,
)
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_descriptor_mn, make_wgmma_tile, make_wgmma_wait

VECTORS_PER_ROW = 8  # 16-byte vectors in a row of a box
MASKING_WARPS = 4  # consumer warpgroup 0


class Tiles(NamedTuple):
    """How the outputs are split into tiles; see :func:`make_get_tile`."""

    of_n: Any  # tiles of n of all CTAs of a cluster together
    of_k: Any
    per_group: Any
    count: Any  # of all groups


class KGroupedTile(NamedTuple):
    """A tile of a group's output, and the number of rows that it sums over."""

    rows: Any
    n: Any  # first row of the output, a column of a
    k: Any  # first column of the output, a column of b
    group: Any


@cache
def make_count_tiles(config):
    """Make ``tiles = count_tiles(groups, n, k)``."""
    columns, block_k = BLOCK_N * config.cluster_size, config.block_k

    @cuda.jit(device=True)
    def count_tiles(groups, n, k):
        of_n = divide(int32(n + columns - 1), int32(columns))
        of_k = divide(int32(k + block_k - 1), int32(block_k))
        return Tiles(of_n, of_k, int32(of_n * of_k), int32(int32(of_n * of_k) * groups))

    return count_tiles


@cache
def make_get_tile(config):
    """Make ``group, n_tile, k_tile = get_tile(tiles, tile)``.

    Tiles are numbered group by group, within a group by bands of ``band_tiles`` tiles of n, within a band by tiles of
    k, and tiles of n innermost. So the CTAs that run at the same time compute an area of a group's output that is about
    as wide as it is high.
    """
    band_tiles, cluster_size = config.band_tiles, config.cluster_size

    @cuda.jit(device=True)
    def get_tile(tiles, tile):
        group = divide(tile, tiles.per_group)
        tile = int32(tile - group * tiles.per_group)
        band = divide(tile, int32(band_tiles * tiles.of_k))
        tile = int32(tile - band * int32(band_tiles * tiles.of_k))
        width = int32(min(int32(band_tiles), int32(tiles.of_n - band * band_tiles)))
        k_tile = divide(tile, width)
        n_tile = int32(band * band_tiles + tile - k_tile * width)
        if cluster_size == 2:
            n_tile = int32(2 * n_tile + int32(cluster_ctarank()))
        return group, n_tile, k_tile

    return get_tile


@cache
def make_tma_producer(config, layout):
    """Make ``tma_producer(smem, map_a, map_b, problem, tiles)``, which one thread executes.

    It publishes each tile to the consumers with the tile's first stage. A group without rows has one stage, which holds
    no data.
    """
    full, empty, stage_bytes, tile_info_offset = layout.full, layout.empty, layout.stage_bytes, layout.tile_info_offset
    b_offset, multicast = layout.b_offset, config.cluster_size == 2
    own_boxes, block_k = layout.b_boxes // config.cluster_size, config.block_k
    get_tile, group_rows = make_get_tile(config), make_group_rows(config.row_layout)
    advance, (first_tile, next_tile) = make_advance(config.stages), make_tile_loop(config.cluster_size)

    @cuda.jit(device=True)
    def tma_producer(smem, map_a, map_b, problem, tiles):
        barriers, policy = smem.barriers, createpolicy_evict_last()
        stage, phase = int32(0), uint32(1)
        rank = int32(cluster_ctarank()) if multicast else int32(0)
        tile = first_tile()
        while tile < tiles.count:
            group, n_tile, k_tile = get_tile(tiles, tile)
            row, rows = group_rows(problem, group)
            n, k = int32(n_tile * BLOCK_N), int32(k_tile * block_k)
            mbarrier_wait_parity(barriers, empty + stage, phase)
            st_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage), rows, n, k, group)
            if rows == 0:
                mbarrier_arrive(barriers, full + stage)
                stage, phase = advance(stage, phase)
            for first in range(0, rows, BLOCK_ROWS):
                mbarrier_wait_parity(barriers, empty + stage, phase)
                mbarrier_arrive_expect_tx(barriers, full + stage, stage_bytes)
                offset, at = int32(stage * stage_bytes), int32(row + first)
                for box in range(2):
                    to, column = int32(offset + box * BOX_BYTES), int32(n + box * BOX_COLUMNS)
                    tma_load_2d_hint(smem.u8, to, map_a, 0, column, at, barriers, full + stage, policy)
                for box in range(own_boxes):  # the other CTA of a cluster loads the others, for both
                    index = int32(rank * own_boxes + box)
                    to, column = int32(offset + b_offset + index * BOX_BYTES), int32(k + index * BOX_COLUMNS)
                    if multicast:
                        tma_load_2d_multicast_hint(
                            smem.u8, to, map_b, 0, column, at, barriers, full + stage, CLUSTER_MASK, policy
                        )
                    else:
                        tma_load_2d_hint(smem.u8, to, map_b, 0, column, at, barriers, full + stage, policy)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return tma_producer


@cache
def make_mask_rows(layout):
    """Make ``mask_rows(smem, thread, offset, rows)``: write zeros to all rows of a stage from ``rows`` on.

    ``thread`` is 0 to 127. A row is 128 contiguous bytes of each box, whatever the swizzle.
    """
    boxes, vectors = layout.stage_bytes // BOX_BYTES, BLOCK_ROWS * VECTORS_PER_ROW

    @cuda.jit(device=True)
    def mask_rows(smem, thread, offset, rows):
        zero = int32(0)
        for i in range(rows * VECTORS_PER_ROW + thread, vectors, 32 * MASKING_WARPS):
            for box in range(boxes):
                index = int32(((offset + box * BOX_BYTES) >> 2) + 4 * i)
                st_shared_s32x4(smem.i32, index, zero, zero, zero, zero)
        fence_proxy_async_shared()  # wgmma reads the zeros, and then TMA overwrites them

    return mask_rows


@cache
def make_multiply(config, layout):
    """Make ``acc, stage, phase, slot, slot_phase = multiply(smem, warp, lane, rows, stage, phase, slot, slot_phase)``.

    ``slot`` and ``slot_phase`` are the state of the ring of ``masked`` barriers, of which a group with a partial last
    stage uses one.
    """
    full, empty, masked, stage_bytes, b_offset = (
        layout.full,
        layout.empty,
        layout.masked,
        layout.stage_bytes,
        layout.b_offset,
    )
    a_descriptor = b_descriptor = make_wgmma_descriptor_mn(BOX_BYTES)
    wgmma = make_wgmma_tile(config.block_k, "bf16", accumulate=True, a_major="mn", b_major="mn")
    wait, mask_rows, release_stage = (
        make_wgmma_wait(config.block_k, 0),
        make_mask_rows(layout),
        make_release_stage(config.cluster_size),
    )
    advance, zeros = make_advance(config.stages), (np.float32(0),) * (config.block_k // 2)

    @cuda.jit(device=True)
    def multiply(smem, warp, lane, rows, stage, phase, slot, slot_phase):
        a_offset, acc = int32((warp >> 2) * BOX_BYTES), zeros
        for _ in range(rows >> 6):
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            offset = int32(stage * stage_bytes)
            a, b = a_descriptor(smem.u8, offset + a_offset), b_descriptor(smem.u8, offset + b_offset)
            acc = wait(wgmma(acc, a, b))
            if lane == 0:
                release_stage(smem.barriers, empty + stage)
            stage, phase = advance(stage, phase)
        if (rows & (BLOCK_ROWS - 1)) != 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            offset = int32(stage * stage_bytes)
            if warp < MASKING_WARPS:
                mask_rows(smem, int32(32 * warp + lane), offset, int32(rows & (BLOCK_ROWS - 1)))
                cuda.syncwarp()
                if lane == 0:
                    mbarrier_arrive(smem.barriers, masked + slot)
            mbarrier_wait_parity(smem.barriers, masked + slot, slot_phase)
            a, b = a_descriptor(smem.u8, offset + a_offset), b_descriptor(smem.u8, offset + b_offset)
            acc = wait(wgmma(acc, a, b))
            if lane == 0:
                release_stage(smem.barriers, empty + stage)
            stage, phase = advance(stage, phase)
            slot, slot_phase = advance(slot, slot_phase)
        return acc, stage, phase, slot, slot_phase

    return multiply


@cache
def make_store(config, i=0):
    """Make ``store(smem, map_out, buffers, lane, acc, tile, n, sizes)``: store a warp's 16 rows, from chunk ``i`` on.

    A chunk is 128 bytes of each row. A warp writes it to one of its two buffers, which a TMA store reads while the warp
    writes the next chunk to the other one. The tensor map clips rows and columns beyond the group's output.
    """
    columns, block_k = config.store_columns, config.block_k
    first, more, buffer = i * columns, (i + 1) * columns < block_k, i % 2 * STORE_BYTES
    to_float32, tma_store = config.out_dtype == "float32", tma_reduce_add_3d if config.accumulate else tma_store_3d
    write_rows = make_st_shared_rows_f32(block_k, first) if to_float32 else make_stmatrix_rows(block_k, first)
    # Chunks alternate between the buffers across tiles too if a tile has an even number of them.
    wait_read = make_bulk_wait_group_read(1 if block_k // columns % 2 == 0 else 0)
    store_next = make_store(config, i + 1) if more else None

    @cuda.jit(device=True)
    def store(smem, map_out, buffers, lane, acc, tile, n, sizes):
        if elect_sync(FULL_MASK):
            wait_read()  # an earlier store has read this buffer
        cuda.syncwarp()
        if to_float32:
            row, vector, rest = int32(lane >> 2), int32((lane & 3) >> 1), int32((lane & 1) << 3)
        else:
            row, vector, rest = int32(lane & 15), int32(lane >> 4), int32(0)
        offset = int32(buffers + buffer + row * 128 + ((vector ^ (row & 7)) << 4) + rest)
        write_rows(smem.u8, offset, acc)
        fence_proxy_async_shared()
        cuda.syncwarp()
        if elect_sync(FULL_MASK):
            k = int32(tile.k + first)
            if (n < sizes[0]) & (k < sizes[1]):
                tma_store(map_out, 0, k, n, tile.group, smem.u8, int32(buffers + buffer))
            bulk_commit_group()
        if more:
            store_next(smem, map_out, buffers, lane, acc, tile, n, sizes)

    return store


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs of 384 threads; return it and its dynamic shared memory in bytes."""
    check_k_grouped_config(config)
    layout = KGroupedLayout(config)
    stages, full, empty, masked = config.stages, layout.full, layout.empty, layout.masked
    cluster_size, accumulate = config.cluster_size, config.accumulate
    tile_info_offset, epilogue_offset = layout.tile_info_offset, layout.epilogue_offset
    count_tiles, (first_tile, next_tile) = make_count_tiles(config), make_tile_loop(cluster_size)
    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168.
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)
    tma_producer, multiply, store = (
        make_tma_producer(config, layout),
        make_multiply(config, layout),
        make_store(config),
    )
    advance, release_stage = make_advance(stages), make_release_stage(cluster_size)
    wait_read = make_bulk_wait_group_read(0)

    @cuda.jit
    def k_grouped_gemm(map_a, map_b, map_out, lengths, starts, groups, total_rows, n, k):
        smem = SharedMemory(
            cuda.shared.array(0, uint8, 1024),
            cuda.shared.array(0, int32, 1024),
            cuda.shared.array(0, float32, 1024),
            cuda.shared.array(0, uint64, 1024),
        )
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(smem.barriers, full + stage, 1)
                mbarrier_init(smem.barriers, empty + stage, CONSUMER_WARPS * cluster_size)
                mbarrier_init(smem.barriers, masked + stage, MASKING_WARPS)
            fence_mbarrier_init()
        if cluster_size == 2:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        else:
            cuda.syncthreads()
        griddepcontrol_wait()
        problem = Problem(lengths, starts, groups, total_rows, int32(0))
        if warp >= CONSUMER_WARPS:
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                tma_producer(smem, map_a, map_b, problem, count_tiles(groups, n, k))
                griddepcontrol_launch_dependents()
        else:
            setmaxnreg_inc()
            stage, phase, slot, slot_phase = int32(0), uint32(0), int32(0), uint32(0)
            smem = SharedMemory(uniform_array(smem.u8), smem.i32, smem.f32, uniform_array(smem.barriers))
            warp = uniform(warp)
            buffers = int32(epilogue_offset + warp * (2 * STORE_BYTES))
            tile, tiles = first_tile(), count_tiles(groups, n, k)
            while tile < tiles.count:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                slot, slot_phase = uniform(slot), uint32(uniform(int32(slot_phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                rows, n_first, k_first, group = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # lane 0 releases the stage for all lanes
                info = KGroupedTile(uniform(rows), uniform(n_first), uniform(k_first), uniform(group))
                if info.rows == 0:
                    if lane == 0:
                        release_stage(smem.barriers, empty + stage)
                    stage, phase = advance(stage, phase)
                acc, stage, phase, slot, slot_phase = multiply(
                    smem, warp, lane, info.rows, stage, phase, slot, slot_phase
                )
                if not accumulate or info.rows > 0:
                    store(smem, map_out, buffers, lane, acc, info, int32(info.n + warp * STORE_ROWS), (n, k))
                tile = next_tile(tile)
            if elect_sync(FULL_MASK):
                wait_read()
        if cluster_size == 2:  # the other CTA may still multicast into this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return k_grouped_gemm, layout.bytes
