"""Grouped GEMM kernel for block scales: persistent, warp-specialised CTAs, with rows of x as the rows of wgmma.

Each element of the FP8 product of 128 elements of k must be multiplied by a scale of x, one for each row, and one of
weight, one for 128 rows of weight. With rows of x as wgmma's rows (A), a thread has two rows, so it needs two scales of
x and one of weight for each block of columns; in the transposed product of ``kernel.py`` it needs a scale per column.

Producer warps: one thread issues the TMA loads of a stage, weight and x; three auxiliary warps copy the scales, and
gathered rows of x.
In a cluster of two CTAs, pairs of tiles share the weights; see ``scheduler_pairs.py``.
Consumers: two warpgroups, each with 64 rows of the tile, multiply them by the tile's weights and add the scaled product
to their accumulators. A warpgroup without rows, in the last tile of a group, only releases the stages.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.block_scales import make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.config import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, CONSUMER_WARPS, SharedMemory
from moe_numba.grouped_gemm.config_block_scaled import (
    BLOCK_M,
    BOX_ROWS,
    SCALE_BLOCK,
    SCALED_COLUMNS,
    BlockScaledLayout,
    check_block_scaled_config,
)
from moe_numba.grouped_gemm.epilogue import Output
from moe_numba.grouped_gemm.epilogue_block_scaled import make_store, make_store_silu_and_mul
from moe_numba.grouped_gemm.gather import GatherSource, index_slot, make_copy_rows, make_load_row_indices, wait_rows
from moe_numba.grouped_gemm.kernel import Scales, ScaleStrides
from moe_numba.grouped_gemm.kernel import make_release_stage as make_release
from moe_numba.grouped_gemm.producer import CLUSTER_MASK
from moe_numba.grouped_gemm.scheduler import Problem, divide, make_count_tiles, make_tile_loop
from moe_numba.grouped_gemm.scheduler_pairs import make_schedule, pairs_of_group
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.arithmetic import int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_3d_hint,
    tma_load_3d_multicast_hint,
)
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

BOX_BYTES = BOX_ROWS * BLOCK_K_BYTES
HALF_OFFSET = SCALE_BLOCK * BLOCK_K_BYTES  # in a tile of 256 rows of weight: of the second half, or of up


# Producer warpgroup


@cache
def make_load_weight(config):
    """Make ``load_weight(smem, offset, map_weight, k, column, second, group, full, policy, shares)``.

    It loads the tile of weight of a stage in two halves, from rows ``column`` and ``second`` of weight, or, if the CTAs
    of the cluster share it, one of them for both.
    """
    half_bytes, clusters = config.half_rows * BLOCK_K_BYTES, config.cluster_size == 2

    @cuda.jit(device=True)
    def load_weight(smem, offset, map_weight, k, column, second, group, full, policy, shares):
        barriers = smem.barriers
        if clusters and shares:
            rank = int32(cluster_ctarank())
            row, to = second if rank else column, int32(offset + rank * half_bytes)
            tma_load_3d_multicast_hint(smem.u8, to, map_weight, 0, k, row, group, barriers, full, CLUSTER_MASK, policy)
        else:
            to = int32(offset + half_bytes)
            tma_load_3d_hint(smem.u8, offset, map_weight, 0, k, column, group, barriers, full, policy)
            tma_load_3d_hint(smem.u8, to, map_weight, 0, k, second, group, barriers, full, policy)

    return load_weight


@cache
def make_tma_producer(config, layout):
    """Make ``tma_producer(smem, map_x, map_weight, problem, tiles, k_blocks, n)``, which one thread executes.

    It looks up each tile and publishes it to the consumers with the tile's first stage.
    """
    stage_bytes, x_offset, full, empty = layout.stage_bytes, layout.x_offset, layout.full, layout.empty
    tile_info_offset, columns, gather = layout.tile_info_offset, config.columns, config.gather
    keep_weight, silu_and_mul, half_rows = config.keep_weight, config.silu_and_mul, config.half_rows
    get_tile, load_weight, advance = (
        make_schedule(config, layout),
        make_load_weight(config),
        make_advance(config.stages),
    )
    first_tile, next_tile = make_tile_loop(config.cluster_size)

    @cuda.jit(device=True)
    def tma_producer(smem, map_x, map_weight, problem, tiles, k_blocks, n):
        barriers = smem.barriers
        stage, phase = int32(0), uint32(1)
        evict_last = createpolicy_evict_last()
        weight_policy = evict_last if keep_weight else createpolicy_evict_first()
        tile = first_tile()
        while tile < tiles:
            (g, row, rows, _, n_tile), shares_weight = get_tile(smem, problem, tile)
            column = int32(n_tile * columns)
            rows = rows if column < n else int32(0)  # a pair's second tile may lie beyond the weight
            two_boxes = rows > BOX_ROWS
            second = int32(n + column) if silu_and_mul else int32(column + half_rows)
            tma_bytes = int32(x_offset)
            if not gather:
                tma_bytes = int32(x_offset + 2 * BOX_BYTES) if two_boxes else int32(x_offset + BOX_BYTES)
            mbarrier_wait_parity(barriers, empty + stage, phase)
            info = uint32(tile_info_offset + 4 * stage)
            smem.i32[info] = row
            smem.i32[info + uint32(1)] = rows
            smem.i32[info + uint32(2)] = column
            for k_block in range(k_blocks):
                k, offset = int32(k_block * BLOCK_K_BYTES), int32(stage * stage_bytes)
                mbarrier_wait_parity(barriers, empty + stage, phase)
                mbarrier_arrive_expect_tx(barriers, full + stage, tma_bytes)
                load_weight(smem, offset, map_weight, k, column, second, g, full + stage, weight_policy, shares_weight)
                to = int32(offset + x_offset)
                if not gather:
                    tma_load_2d_hint(smem.u8, to, map_x, 0, k, row, barriers, full + stage, evict_last)
                if two_boxes and not gather:
                    to = int32(to + BOX_BYTES)
                    tma_load_2d_hint(smem.u8, to, map_x, 0, k, row + BOX_ROWS, barriers, full + stage, evict_last)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return tma_producer


@cache
def make_aux_producer(config, layout):
    """Make ``aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks)``.

    Auxiliary warp ``aux_warp`` (0 to 2) copies the scales of every third stage to shared memory: those of the tile's
    rows of x, and that of weight for each 64 of its columns, or those of gate and up. With ``gather`` it also copies
    the rows of x, while it loads scales.
    """
    empty, full, scale_offset, stage_scales = layout.empty, layout.full, layout.scale_offset, layout.stage_scales
    columns, silu_and_mul, weight_scales = config.columns, config.silu_and_mul, config.weight_scales
    gather, row_index_offset, row_indices = config.gather, layout.row_index_offset, layout.row_indices
    load_row_indices, copy_rows = make_load_row_indices(config, layout), make_copy_rows(config, layout)
    advance = make_advance(config.stages)
    get_tile, (first_tile, next_tile) = make_schedule(config, layout), make_tile_loop(config.cluster_size)
    rows_per_lane, masked = BLOCK_M // 32, config.row_layout == "masked"
    k_offset, load_x = make_x_scales(config.packed_x_scale)
    find_weight, _, load_weight = make_weight_scales(config.packed_weight_scale)

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks):
        stage, phase, skip = int32(0), uint32(1), int32(aux_warp)  # skip: stages before this warp's next one
        if gather:
            indices = int32(row_index_offset + aux_warp * row_indices)
            x_rows, row_bytes = source.x_rows, uniform(source.row_bytes)
            source = GatherSource(source.x, source.row_indices, x_rows, row_bytes, source.valid_bytes)
        x_scales, row_step = cuda.local.array(rows_per_lane, float32), int64(32) * strides.row
        tile = first_tile()
        while tile < tiles:
            info, _ = get_tile(smem, problem, tile)
            # The last columns of the last tile, and a pair's second tile, may lie beyond the weight: clamp.
            if silu_and_mul:  # up lies half the blocks behind gate
                n_block = int32(min(info.n_tile, (n_blocks >> 1) - 1) + (n_blocks >> 1) * lane)
            else:
                n_block = int32(min(int32(info.n_tile * columns + lane * SCALED_COLUMNS) >> 7, n_blocks - 1))
            rows = strides.weight_rows
            weight_index = find_weight(info.group, n_block, n_blocks, k_blocks, rows)
            x_index = int64(info.row + lane) * strides.row
            if masked:
                x_index += info.group * strides.group
            if gather:
                load_row_indices(smem, indices, lane, source, info)
            for k_block in range(k_blocks):
                if skip == 0:
                    # Issue all global loads before waiting for the stage, so that their latency is hidden.
                    valid = lane < weight_scales
                    weight_scale = load_weight(scales.weight, weight_index, k_block, rows) if valid else float32(0)
                    index = x_index + k_offset(k_block, strides.k_block)
                    for i in range(rows_per_lane):
                        valid = lane + 32 * i < info.rows
                        if gather:
                            x_row = smem.i32[uint32(indices + index_slot(int32(lane + 32 * i)))]
                            valid, index = x_row >= 0, int64(x_row) * strides.row + k_offset(k_block, strides.k_block)
                        x_scales[i] = load_x(scales.x, index, k_block) if valid else float32(0)
                        index += row_step
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    if gather:
                        copy_rows(smem, indices, lane, stage, k_block, source, info)
                    offset = int32(scale_offset + stage * stage_scales + lane)
                    for i in range(rows_per_lane):
                        smem.f32[uint32(offset + 32 * i)] = x_scales[i]
                    if lane < weight_scales:
                        smem.f32[uint32(offset + BLOCK_M)] = weight_scale
                    if gather:
                        wait_rows()
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(smem.barriers, full + stage)
                skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return aux_producer


# Consumer warpgroups


@cache
def make_load_scales(layout):
    """Make ``a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)``: of rows ``row`` and ``row + 8``, and of weight."""
    scale_offset, stage_scales = layout.scale_offset, layout.stage_scales

    @cuda.jit(device=True)
    def load_scales(smem, stage, row):
        offset = int32(scale_offset + stage * stage_scales)
        w_0, w_1, w_2, _ = ld_shared_s32x4(smem.i32, int32(offset + BLOCK_M))
        a, b = smem.f32[uint32(offset + row)], smem.f32[uint32(offset + row + 8)]
        return a, b, int_as_float(w_0), int_as_float(w_1), int_as_float(w_2)

    return load_scales


@cache
def make_release_stage(layout):
    """Make ``release_stage(smem, stage, lane)``, once all lanes have read their scales, which are part of the stage.

    In a cluster a stage is released in both CTAs: either may write the other's.
    """
    cluster_size = layout.config.cluster_size
    empty, release = layout.empty, make_release(cluster_size)

    @cuda.jit(device=True)
    def release_stage(smem, stage, lane):
        cuda.syncwarp()
        if lane == 0:
            release(smem.barriers, empty + stage)

    return release_stage


@cache
def make_multiply(config, layout):
    """Make ``acc, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, row)``.

    It computes 64 rows, at ``x_offset`` in a stage, times the tile's weights. ``row`` is the first of the thread's two
    rows of the tile.
    """
    stage_bytes, full, advance = layout.stage_bytes, layout.full, make_advance(config.stages)
    n, load_scales, release_stage = config.block_n, make_load_scales(layout), make_release_stage(layout)
    wgmma, wait, fma = make_wgmma_tile(n, "e4m3"), make_wgmma_wait(n, 0), make_fma_blocks(n, SCALED_COLUMNS)
    zeros, three = (np.float32(0),) * (n // 2), config.weight_scales == 3

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        acc = zeros
        mbarrier_wait_parity(smem.barriers, full + stage, phase)
        a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)
        for k_block in range(k_blocks):
            offset = int32(stage * stage_bytes)
            x, weight = wgmma_descriptor(smem.u8, int32(offset + x_offset)), wgmma_descriptor(smem.u8, offset)
            product = wait(wgmma(x, weight))
            release_stage(smem, stage, lane)
            a_0, b_0, a_1, b_1, a_2, b_2 = a * w_0, b * w_0, a * w_1, b * w_1, a * w_2, b * w_2
            stage, phase = advance(stage, phase)
            # While wgmma reads shared memory, loads from it are slow: load the next scales before its next wgmma.
            if k_block + 1 < k_blocks:
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)
            acc = fma(acc, product, (a_0, b_0, a_1, b_1, a_2, b_2) if three else (a_0, b_0, a_1, b_1))
        return acc, stage, phase

    return multiply


@cache
def make_multiply_halves(config, layout):
    """Make ``first, second, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, row)``.

    As :func:`make_multiply`, for a tile of 256 rows of weight, which are gate and up or two neighbouring blocks. Two
    accumulators leave registers for one wgmma result only, so the halves are computed one after the other.
    """
    stage_bytes, full, advance = layout.stage_bytes, layout.full, make_advance(config.stages)
    n, load_scales, release_stage = SCALE_BLOCK, make_load_scales(layout), make_release_stage(layout)
    wgmma, wait, fma = make_wgmma_tile(n, "e4m3"), make_wgmma_wait(n, 0), make_fma_blocks(n, n)
    zeros, silu_and_mul = (np.float32(0),) * (n // 2), config.silu_and_mul

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        first, second = zeros, zeros
        for _ in range(k_blocks):
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            offset = int32(stage * stage_bytes)
            x, weight = wgmma_descriptor(smem.u8, int32(offset + x_offset)), wgmma_descriptor(smem.u8, offset)
            product = wgmma(x, weight)
            a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)  # of 64 columns each, or of gate and up
            w_second = w_1 if silu_and_mul else w_2
            product = wait(product)
            first = fma(first, product, (a * w_0, b * w_0))
            product = wait(wgmma(x, uint64(weight + uint64(HALF_OFFSET >> 4))))
            release_stage(smem, stage, lane)
            second = fma(second, product, (a * w_second, b * w_second))
            stage, phase = advance(stage, phase)
        return first, second, stage, phase

    return multiply


@cache
def make_skip_stages(config, layout):
    """Make ``stage, phase = skip_stages(smem, lane, stage, phase, k_blocks)``, for a warpgroup that has no rows.

    It waits for each stage, because the stage's empty barrier counts a warp once per phase.
    """
    full, release_stage, advance = layout.full, make_release_stage(layout), make_advance(config.stages)

    @cuda.jit(device=True)
    def skip_stages(smem, lane, stage, phase, k_blocks):
        for _ in range(k_blocks):
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            release_stage(smem, stage, lane)
            stage, phase = advance(stage, phase)
        return stage, phase

    return skip_stages


@cache
def make_consumer(config, layout):
    """Make ``stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column)``."""
    silu_and_mul, skip_stages, tile_offset = config.silu_and_mul, make_skip_stages(config, layout), layout.x_offset
    halves = config.block_n == 2 * SCALE_BLOCK
    multiply = (make_multiply_halves if halves else make_multiply)(config, layout)
    columns = config.block_n // 2 if halves else config.block_n
    store = make_store_silu_and_mul(layout) if silu_and_mul else make_store(columns, layout)

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column):
        warpgroup, own_row = int32(warp >> 2), int32(warp * 16)
        if rows > warpgroup * BOX_ROWS:
            x_offset, thread_row = int32(tile_offset + warpgroup * BOX_BYTES), int32(own_row + (lane >> 2))
            if halves:
                first, second, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, thread_row)
                if silu_and_mul:
                    store(smem, output, warp, lane, first, second, int32(row + own_row), int32(rows - own_row), column)
                else:
                    store(smem, output, warp, lane, first, int32(row + own_row), int32(rows - own_row), column)
                    column = int32(column + columns)
                    store(smem, output, warp, lane, second, int32(row + own_row), int32(rows - own_row), column)
            else:
                acc, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, thread_row)
                store(smem, output, warp, lane, acc, int32(row + own_row), int32(rows - own_row), column)
        else:
            stage, phase = skip_stages(smem, lane, stage, phase, k_blocks)
        return stage, phase

    return consumer


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs of 384 threads; return it and its dynamic shared memory in bytes."""
    check_block_scaled_config(config)
    layout = BlockScaledLayout(config)
    stages, full, empty, tile_info_offset = config.stages, layout.full, layout.empty, layout.tile_info_offset
    columns, silu_and_mul, cluster_size = config.columns, config.silu_and_mul, config.cluster_size
    weight_parts = 2 if silu_and_mul else 1
    (first_tile, next_tile), tiles_offset = make_tile_loop(cluster_size), layout.tiles_offset
    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168. Two accumulators and
    # the addresses of another CTA's barriers need more than 224; a producer that gathers needs more than 40.
    producer_registers, consumer_registers = (40, 232) if config.needs_registers else (56, 224)
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(producer_registers), make_setmaxnreg_inc(consumer_registers)
    count_tiles = make_count_tiles(config, layout, pairs_of_group if cluster_size == 2 else None)
    tma_producer = make_tma_producer(config, layout)
    aux_producer, consumer = make_aux_producer(config, layout), make_consumer(config, layout)

    @cuda.jit
    def block_scaled_gemm(
        map_x,
        map_weight,
        y,
        y_scale,
        lengths,
        starts,
        x_scale,
        weight_scale,
        groups,
        total_rows,
        capacity,
        n,
        k,
        scale_row_stride,
        scale_k_stride,
        scale_group_stride,
        x,
        row_indices,
        x_rows,
        row_bytes,
    ):
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
                mbarrier_init(smem.barriers, full + stage, 2)  # the TMA producer and an auxiliary warp
                mbarrier_init(smem.barriers, empty + stage, CONSUMER_WARPS * cluster_size)
            fence_mbarrier_init()
        if cluster_size == 2:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        griddepcontrol_wait()
        problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
        k_blocks = int32((k + BLOCK_K_BYTES - 1) >> 7)
        tiles = count_tiles(smem, problem, divide(int32(n + columns - 1), int32(columns)))
        if thread == 0:  # consumer warps have no register left for it
            smem.i32[uint32(tiles_offset)] = tiles
        cuda.syncthreads()
        if warp >= CONSUMER_WARPS:
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                tma_producer(smem, map_x, map_weight, problem, tiles, k_blocks, n)
                griddepcontrol_launch_dependents()
            if warp > CONSUMER_WARPS:
                aux_warp = int32(warp - CONSUMER_WARPS - 1)
                n_blocks = int32(((n + 127) >> 7) << 1) if silu_and_mul else int32((n + 127) >> 7)
                source = GatherSource(x, row_indices, x_rows, row_bytes, k)
                strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride, int32(n * weight_parts))
                aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks)
        else:
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            u8, barriers = uniform_array(smem.u8), uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, uniform_array(smem.f32), barriers)
            warp = uniform(warp)
            output = Output(y, y_scale, n)
            tile = first_tile()
            while tile < smem.i32[uint32(tiles_offset)]:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, _ = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                row, rows, column = uniform(row), uniform(rows), uniform(column)
                stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column)
                tile = next_tile(tile)
        if cluster_size == 2:  # the other CTA may still write this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return block_scaled_gemm, layout.bytes
