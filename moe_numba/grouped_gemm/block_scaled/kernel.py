"""Grouped GEMM kernel for block scales: persistent, warp-specialised CTAs, with rows of x as the rows of wgmma.

Each element of the FP8 product of 128 elements of k must be multiplied by a scale of x, one for each row, and one of
weight, one for 128 rows of weight. With rows of x as wgmma's rows (A), a thread has two rows, so it needs two factors
for each block of columns; in the transposed product of ``kernel.py`` it needs one per column.

Producer warps: one thread issues the TMA loads of a stage, weight and x; auxiliary warps copy the scales, and gathered
rows of x; see ``producer_block_scaled.py``. In a cluster of two CTAs, pairs of tiles share the weights; see
``scheduler_pairs.py``.
Consumers: two warpgroups, each with 64 rows of the tile, multiply them by the tile's weights and add the scaled product
to their accumulators. A warpgroup without rows, in the last tile of a group, only releases the stages.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.grouped_gemm.block_scaled.config import (
    BOX_ROWS,
    SCALE_BLOCK,
    BlockScaledLayout,
    check_block_scaled_config,
)
from moe_numba.grouped_gemm.block_scaled.epilogue import (
    BUFFER_COLUMNS,
    BlockScaledOutput,
    make_store,
    make_store_silu_and_mul,
)
from moe_numba.grouped_gemm.block_scaled.pairs import pairs_of_group
from moe_numba.grouped_gemm.block_scaled.producer import BOX_BYTES, aux_warps, make_aux_producer, make_tma_producer
from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, CONSUMER_WARPS, SharedMemory
from moe_numba.grouped_gemm.common.gather import GatherSource
from moe_numba.grouped_gemm.common.pipeline import Scales, ScaleStrides
from moe_numba.grouped_gemm.common.pipeline import make_release_stage as make_release
from moe_numba.grouped_gemm.common.scheduler import Problem, divide, make_count_tiles, make_tile_loop
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.arithmetic import int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait
from moe_numba.ptx.cp_async import make_bulk_wait_group
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_init, mbarrier_test_wait_parity, mbarrier_wait_parity
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

bulk_wait = make_bulk_wait_group(0)
HALF_OFFSET = SCALE_BLOCK * BLOCK_K_BYTES  # in a tile of 256 rows of weight: of the second half, or of up


# Consumer warpgroups


@cache
def make_load_factors(layout):
    """Make ``a, b = load_factors(smem, stage, row)``: three factors each of rows ``row`` and ``row + 8``."""
    factor_offset, stage_factors = layout.factor_offset, layout.stage_factors

    @cuda.jit(device=True)
    def load_factors(smem, stage, row):
        offset = int32(factor_offset + stage * stage_factors + 4 * row)
        a_0, a_1, a_2, _ = ld_shared_s32x4(smem.i32, offset)
        b_0, b_1, b_2, _ = ld_shared_s32x4(smem.i32, int32(offset + 4 * 8))
        a = int_as_float(a_0), int_as_float(a_1), int_as_float(a_2)
        return a, (int_as_float(b_0), int_as_float(b_1), int_as_float(b_2))

    return load_factors


@cache
def make_release_stage(layout):
    """Make ``release_stage(smem, stage, lane)``, once all lanes have read their factors, which are part of the stage.

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
    stage_vectors, full, advance = layout.stage_bytes >> 4, layout.full, make_advance(config.stages)
    n, load_factors, release_stage = config.block_n, make_load_factors(layout), make_release_stage(layout)
    wgmma, wait, fma = make_wgmma_tile(n, "e4m3"), make_wgmma_wait(n, 0), make_fma_blocks(n, config.scaled_columns)
    zeros, three = (np.float32(0),) * (n // 2), config.weight_scales == 3

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        acc, ready = zeros, uint32(0)
        x_0, weight_0 = wgmma_descriptor(smem.u8, x_offset), wgmma_descriptor(smem.u8, int32(0))
        for _ in range(k_blocks):
            if ready == 0:
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
            # While wgmma reads shared memory, loads from it are slow: load the factors before.
            a, b = load_factors(smem, stage, row)
            step = uint64(uint32(stage) * uint32(stage_vectors))
            product = wgmma(uint64(x_0 + step), uint64(weight_0 + step))
            product = wait(product)
            release_stage(smem, stage, lane)
            stage, phase = advance(stage, phase)
            # The result arrives during the FFMAs. Behind the last block of k it belongs to another tile: unused.
            ready = mbarrier_test_wait_parity(smem.barriers, full + stage, phase)
            acc = fma(acc, product, (a[0], b[0], a[1], b[1], a[2], b[2]) if three else (a[0], b[0]))
        return acc, stage, phase

    return multiply


@cache
def make_multiply_halves(config, layout):
    """Make ``first, second, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, row)``.

    As :func:`make_multiply`, for a tile of 256 rows of weight, which are gate and up or two neighbouring blocks. Two
    accumulators leave registers for one wgmma result only, so the halves are computed one after the other.
    """
    stage_vectors, full, advance = layout.stage_bytes >> 4, layout.full, make_advance(config.stages)
    n, load_factors, release_stage = SCALE_BLOCK, make_load_factors(layout), make_release_stage(layout)
    wgmma, wait, fma = make_wgmma_tile(n, "e4m3", overwrite=True), make_wgmma_wait(n, 0), make_fma_blocks(n, n)
    zeros, early_test = (np.float32(0),) * (n // 2), config.early_test

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        first, second, product, ready = zeros, zeros, zeros, uint32(0)
        x_0, weight_0 = wgmma_descriptor(smem.u8, x_offset), wgmma_descriptor(smem.u8, int32(0))
        for _ in range(k_blocks):
            if ready == 0:
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
            a, b = load_factors(smem, stage, row)
            step = uint64(uint32(stage) * uint32(stage_vectors))
            x, weight = uint64(x_0 + step), uint64(weight_0 + step)
            product = wait(wgmma(product, x, weight))
            first = fma(first, product, (a[0], b[0]))
            product = wait(wgmma(product, x, uint64(weight + uint64(HALF_OFFSET >> 4))))
            release_stage(smem, stage, lane)
            stage, phase = advance(stage, phase)
            if early_test:
                ready = mbarrier_test_wait_parity(smem.barriers, full + stage, phase)
            second = fma(second, product, (a[1], b[1]))
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
    store_second = make_store(columns, layout, columns // BUFFER_COLUMNS) if halves else None

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
                    store_second(smem, output, warp, lane, second, int32(row + own_row), int32(rows - own_row), column)
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
    num_aux_warps, stage_warps = aux_warps(config)

    @cuda.jit
    def block_scaled_gemm(
        map_x,
        map_weight,
        map_y,
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
                mbarrier_init(smem.barriers, full + stage, 1 + stage_warps)  # the TMA producer and auxiliary warps
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
            aux_warp = int32(warp - CONSUMER_WARPS - 1)
            if (aux_warp >= 0) & (aux_warp < num_aux_warps):
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
            output = BlockScaledOutput(map_y, y, y_scale, n)
            tile = first_tile()
            while tile < smem.i32[uint32(tiles_offset)]:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, _ = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                row, rows, column = uniform(row), uniform(rows), uniform(column)
                stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column)
                tile = next_tile(tile)
            if lane == 0:  # TMA still reads the buffers
                bulk_wait()
        if cluster_size == 2:  # the other CTA may still write this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return block_scaled_gemm, layout.bytes
