"""Grouped GEMM kernel: persistent, warp-specialised CTAs that compute the tiles of all groups.

The producer warpgroup fills a ring of shared-memory stages. One thread issues the TMA loads of weight and x; with block
scaling or gathered rows, three auxiliary warps add scales or rows of x. Two consumer warpgroups issue wgmma. Each stage
has a full and an empty mbarrier. One tensor map covers the weights of all groups and another all rows of x: a tile may
load rows of the next group, whose results the epilogue does not store. No kernel has to run before this one.

The tile scheduler is in ``scheduler.py``, the epilogue in ``epilogue.py``, the gathered rows in ``gather.py``.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.config import (
    AUX_PRODUCER_WARPS,
    BLOCK_K_BYTES,
    BLOCK_N,
    CONSUMER_WARPS,
    SharedMemory,
    SharedMemoryLayout,
    check_config,
)
from moe_numba.grouped_gemm.epilogue import Output, OutputTile, make_epilogue
from moe_numba.grouped_gemm.gather import GatherSource, index_slot, make_copy_rows, make_load_row_indices, wait_rows
from moe_numba.grouped_gemm.scheduler import Problem, make_count_tiles, make_get_tile, make_tile_loop
from moe_numba.ptx.accumulators import make_fma, make_fma_columns
from moe_numba.ptx.arithmetic import float_as_int, int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.matrix import make_fma_shared, make_load_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_arrive_release_cta_cluster,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_2d_multicast_hint,
    tma_load_3d_hint,
)
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

CLUSTER_MASK = 0b11  # multicast to both CTAs of a cluster
ACCUMULATOR_REGISTERS = 190  # registers of a consumer thread for accumulators, the wgmma result and scales


class Scales(NamedTuple):
    """Scales in global memory: block scales of x and weight, or one scale per group in ``weight``."""

    x: Any  # float32 pointer
    weight: Any  # float32 pointer


class ScaleStrides(NamedTuple):
    """Strides of the scales of x, in elements; a masked x has ``capacity`` rows per group."""

    row: Any
    k_block: Any
    group: Any  # int64: from one group to the next, beyond ``capacity`` rows; else 0


# Producer warpgroup


@cache
def make_tma_producer(config, layout):
    """Make ``tma_producer(smem, map_x, map_weight, scales, problem, tiles, k_blocks, n)``, which one thread executes.

    It looks up each tile and publishes it to the consumers with the tile's first stage: this thread runs ahead of the
    consumers, which would otherwise wait for the group sizes to arrive from global memory.
    """
    stage_bytes, x_offset, subtile_bytes = layout.stage_bytes, layout.x_offset, layout.subtile_bytes
    full, empty, two_subtiles = layout.full, layout.empty, config.m_subtiles == 2
    multicast, box_rows, silu_and_mul = config.cluster_size == 2, layout.x_box_rows, config.silu_and_mul
    tile_info_offset, by_tensor = layout.tile_info_offset, config.scaling == "tensor"
    tma_bytes, gather = layout.tma_bytes, config.gather
    skips_empty = two_subtiles and not multicast and not gather  # an empty second subtile is not loaded
    block_k = BLOCK_K_BYTES // 2 if config.dtype == "bf16" else BLOCK_K_BYTES
    get_tile, advance = make_get_tile(config, layout), make_advance(config.stages)
    first_tile, next_tile = make_tile_loop(config.cluster_size)

    @cuda.jit(device=True)
    def tma_producer(smem, map_x, map_weight, scales, problem, tiles, k_blocks, n):
        barriers = smem.barriers
        stage, phase = int32(0), uint32(1)
        evict_first, evict_last = createpolicy_evict_first(), createpolicy_evict_last()
        tile = first_tile()
        while tile < tiles:
            g, row, rows, subtile_rows, n_tile = get_tile(smem, problem, tile)
            mbarrier_wait_parity(barriers, empty + stage, phase)
            info = uint32(tile_info_offset + 4 * stage)
            smem.i32[info] = row
            smem.i32[info + uint32(1)] = int32(rows | (subtile_rows << 16))
            smem.i32[info + uint32(2)] = int32(n_tile * BLOCK_N)
            smem.i32[info + uint32(3)] = float_as_int(scales.weight[g]) if by_tensor else int32(0)
            is_single = skips_empty and rows <= subtile_rows
            bytes_of_stage = int32(tma_bytes - subtile_bytes) if is_single else int32(tma_bytes)
            if multicast:  # each CTA loads half of the rows of x and multicasts them to both
                rank = int32(cluster_ctarank())
                row = int32(row + rank * (subtile_rows if two_subtiles else box_rows))
                multicast_offset = int32(x_offset + rank * (box_rows * BLOCK_K_BYTES))
            for k_block in range(k_blocks):
                k, offset = int32(k_block * block_k), int32(stage * stage_bytes)
                mbarrier_wait_parity(barriers, empty + stage, phase)
                mbarrier_arrive_expect_tx(barriers, full + stage, bytes_of_stage)
                column = int32(n_tile * BLOCK_N)
                tma_load_3d_hint(smem.u8, offset, map_weight, 0, k, column, g, barriers, full + stage, evict_first)
                if silu_and_mul:
                    column, to = int32(n + n_tile * BLOCK_N), int32(offset + BLOCK_N * BLOCK_K_BYTES)
                    tma_load_3d_hint(smem.u8, to, map_weight, 0, k, column, g, barriers, full + stage, evict_first)
                if multicast:
                    to = int32(offset + multicast_offset)
                    tma_load_2d_multicast_hint(
                        smem.u8, to, map_x, 0, k, row, barriers, full + stage, CLUSTER_MASK, evict_last
                    )
                elif not gather:
                    tma_load_2d_hint(smem.u8, offset + x_offset, map_x, 0, k, row, barriers, full + stage, evict_last)
                    if two_subtiles and not is_single:
                        to, second = int32(offset + x_offset + subtile_bytes), int32(row + subtile_rows)
                        tma_load_2d_hint(smem.u8, to, map_x, 0, k, second, barriers, full + stage, evict_last)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return tma_producer


@cache
def make_aux_producer(config, layout):
    """Make ``aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_tiles)``.

    Auxiliary warp ``aux_warp`` (0 to 2) handles every third stage. With block scaling it writes a scale for each row of
    x, the product of the row's and the weight block's. With ``gather`` it also copies the rows of x, while it loads
    scales. The scales are ordered as a consumer thread needs them; see ``SharedMemoryLayout.scale_pitch``.
    """
    full, empty, advance = layout.full, layout.empty, make_advance(config.stages)
    scale_offset, stage_scales, pitch = layout.scale_offset, layout.stage_scales, layout.scale_pitch
    subtile_m, m_subtiles, weight_tiles = config.subtile_m, config.m_subtiles, layout.weight_tiles
    by_block, gather = config.scaling == "block", config.gather
    accumulators = layout.accumulators if by_block else 0
    row_index_offset, row_indices, row_index_pitch = layout.row_index_offset, layout.row_indices, layout.row_index_pitch
    load_row_indices, copy_rows = make_load_row_indices(config, layout), make_copy_rows(config, layout)
    rows_per_lane = -(-subtile_m // 32)  # of a subtile
    count = rows_per_lane * m_subtiles
    get_tile, (first_tile, next_tile) = make_get_tile(config, layout), make_tile_loop(config.cluster_size)

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_tiles):
        stage, phase, skip = int32(0), uint32(1), int32(aux_warp)  # skip: stages before this warp's next one
        if gather:
            indices = int32(row_index_offset + aux_warp * row_indices)
            x_rows, row_bytes = source.x_rows, uniform(source.row_bytes)
            source = GatherSource(source.x, source.row_indices, x_rows, row_bytes, source.valid_bytes)
        x_scales = cuda.local.array(count, float32)
        weight_scales = cuda.local.array(weight_tiles, float32)
        tile = first_tile()
        while tile < tiles:
            info = get_tile(smem, problem, tile)
            # The last tile of a cluster's second CTA may lie beyond the weight: clamp it.
            weight_index = int64(info.group) * weight_tiles * n_tiles + min(info.n_tile, n_tiles - 1)
            weight_index *= k_blocks
            x_index = int64(info.row + lane) * strides.row + info.group * strides.group
            if gather:
                load_row_indices(smem, indices, lane, source, info)
            for k_block in range(k_blocks):
                if skip == 0:
                    # Issue all global loads before waiting for the stage, so that their latency is hidden.
                    for p in range(weight_tiles if by_block else 0):  # up lies n_tiles tiles behind gate
                        weight_scales[p] = scales.weight[weight_index + p * n_tiles * k_blocks + k_block]
                    for p in range(m_subtiles if by_block else 0):
                        for i in range(rows_per_lane):
                            t = int32(lane + 32 * i)
                            row = int32(p * info.subtile_rows + t)
                            valid = t < info.subtile_rows and row < info.rows
                            index = x_index + int64(p * info.subtile_rows + 32 * i) * strides.row
                            if gather:
                                x_row = smem.i32[uint32(indices + p * row_index_pitch + index_slot(t))]
                                valid, index = valid and x_row >= 0, int64(x_row) * strides.row
                            index += int64(k_block) * strides.k_block
                            x_scales[rows_per_lane * p + i] = scales.x[index] if valid else float32(0)
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    if gather:
                        copy_rows(smem, indices, lane, stage, k_block, source, info)
                    for p in range(accumulators):
                        for i in range(rows_per_lane):
                            t = int32(lane + 32 * i)
                            quarter = int32(4 * p + ((t >> 1) & 3))
                            offset = int32(scale_offset + stage * stage_scales + quarter * pitch)
                            if t < subtile_m:
                                scale = x_scales[rows_per_lane * (p % m_subtiles) + i] * weight_scales[p % weight_tiles]
                                smem.f32[uint32(offset + (t >> 3) * 2 + (t & 1))] = scale
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
def make_release_stage(cluster_size):
    """Make ``release_stage(barriers, empty)``: arrive at a stage's empty barrier, in all CTAs of the cluster."""
    if cluster_size == 1:
        return mbarrier_arrive

    @cuda.jit(device=True)
    def release_stage(barriers, empty):
        mbarrier_arrive(barriers, empty)
        # Relaxed, because this warp only read: a release at cluster scope compiles to a GPU-wide MEMBAR.
        mbarrier_arrive_release_cta_cluster(barriers, empty, uint32(cluster_ctarank() ^ uint32(1)))

    return release_stage


@cache
def make_mma_stage(n, config, layout):
    """Make ``acc = mma_stage(smem, a, b, acc, scales, stage, release)``: add a stage's scaled product to ``acc``.

    FP8 tensor cores accumulate with fewer bits than float32, so the sum over a stage is added ("promoted") to ``acc``
    in CUDA cores. ``scales`` is the f32 offset of the thread's scales. A thread with ``release`` set arrives at the
    empty barrier once its warp has read the stage.
    """
    empty, scaling = layout.empty, config.scaling
    wait, release_stage = make_wgmma_wait(n, 0), make_release_stage(config.cluster_size)

    if config.dtype == "bf16":  # the tensor cores accumulate in float32: no promotion
        wgmma = make_wgmma_tile(n, "bf16", accumulate=True)

        @cuda.jit(device=True)
        def mma_stage(smem, a, b, acc, scales, stage, release):
            acc = wait(wgmma(acc, a, b))
            if release:
                release_stage(smem.barriers, empty + stage)
            return acc

        return mma_stage

    wgmma = make_wgmma_tile(n, "e4m3")
    if scaling == "block" and n // 2 * (layout.accumulators + 1) + n // 4 <= ACCUMULATOR_REGISTERS:
        load_scales, fma = make_load_shared(n), make_fma_columns(n)

        @cuda.jit(device=True)
        def mma_stage(smem, a, b, acc, scales, stage, release):
            product = wgmma(a, b)
            values = load_scales(smem.f32, scales)
            product = wait(product)
            cuda.syncwarp()
            if release:  # all lanes have read their scales, which are part of the stage
                release_stage(smem.barriers, empty + stage)
            return fma(acc, product, values)

    elif scaling == "block":
        fma = make_fma_shared(n)

        @cuda.jit(device=True)
        def mma_stage(smem, a, b, acc, scales, stage, release):
            product = wait(wgmma(a, b))
            acc = fma(acc, product, smem.f32, scales)
            cuda.syncwarp()
            if release:
                release_stage(smem.barriers, empty + stage)
            return acc

    else:
        fma = make_fma(n)

        @cuda.jit(device=True)
        def mma_stage(smem, a, b, acc, scales, stage, release):
            product = wait(wgmma(a, b))
            if release:
                release_stage(smem.barriers, empty + stage)
            return fma(acc, product, float32(1))

    return mma_stage


@cache
def make_consumer(config, layout):
    """Make ``stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, tile)``, which computes a tile.

    It uses the smallest wgmma N in ``config.mma_n`` that holds the tile's subtiles, and one accumulator if the second
    of two subtiles is empty.
    """
    if config.m_subtiles == 1:
        return make_consumer_of_sizes(config.mma_n, config, layout, layout.accumulators)
    one = make_consumer_of_sizes(config.mma_n, config._replace(m_subtiles=1), layout, 1)
    # Rows that need two subtiles need more than half of each.
    sizes = tuple(n for n in config.mma_n if 2 * n > config.subtile_m)
    two = make_consumer_of_sizes(sizes, config, layout, 2)

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_blocks, tile):
        if tile.rows > tile.subtile_rows:
            stage, phase = two(smem, output, warp, lane, stage, phase, k_blocks, tile)
        else:
            stage, phase = one(smem, output, warp, lane, stage, phase, k_blocks, tile)
        return stage, phase

    return consumer


def make_consumer_of_sizes(sizes, config, layout, accumulators):
    """Make a consumer that uses the smallest wgmma N in ``sizes`` that holds the tile's subtiles."""
    largest = make_consumer_of_size(sizes[0], config, layout, accumulators)
    if len(sizes) == 1:
        return largest
    smaller, next_size = make_consumer_of_sizes(sizes[1:], config, layout, accumulators), sizes[1]

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_blocks, tile):
        if tile.subtile_rows > next_size:
            stage, phase = largest(smem, output, warp, lane, stage, phase, k_blocks, tile)
        else:
            stage, phase = smaller(smem, output, warp, lane, stage, phase, k_blocks, tile)
        return stage, phase

    return consumer


def make_consumer_of_size(n, config, layout, accumulators):
    """Make the main loop over k and the epilogue of a tile, for a wgmma of N = ``n``."""
    mma_stage, epilogue = make_mma_stage(n, config, layout), make_epilogue(n, config, layout)
    stage_bytes, x_offset, subtile_bytes = layout.stage_bytes, layout.x_offset, layout.subtile_bytes
    full, scale_offset, stage_scales, scale_pitch = (
        layout.full,
        layout.scale_offset,
        layout.stage_scales,
        layout.scale_pitch,
    )
    two, silu_and_mul, advance = accumulators == 2, config.silu_and_mul, make_advance(config.stages)
    zeros = (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_blocks, tile):
        warpgroup_offset = int32((warp >> 2) * (64 * BLOCK_K_BYTES))
        acc_0, acc_1 = zeros, zeros
        for _ in range(k_blocks):
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            offset = int32(stage * stage_bytes)
            a = wgmma_descriptor(smem.u8, offset + warpgroup_offset)
            b = wgmma_descriptor(smem.u8, offset + x_offset)
            scales = int32(scale_offset + stage * stage_scales + (lane & 3) * scale_pitch)
            acc_0 = mma_stage(smem, a, b, acc_0, scales, stage, lane == 0 and not two)
            if two:
                if silu_and_mul:
                    a = uint64(a + uint64(BLOCK_N * BLOCK_K_BYTES >> 4))
                else:
                    b = uint64(b + uint64(subtile_bytes >> 4))
                scales = int32(scales + 4 * scale_pitch)
                acc_1 = mma_stage(smem, a, b, acc_1, scales, stage, lane == 0)
            stage, phase = advance(stage, phase)
        epilogue(smem, output, warp, lane, acc_0, acc_1, tile)
        return stage, phase

    return consumer


@cuda.jit(device=True)
def identity(value):
    """Stand-in for ``uniform`` and ``uniform_array``."""
    return value


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs of 384 threads; return it and its dynamic shared memory in bytes."""
    uses_aux = config.scaling == "block" or config.gather
    check_config(config)
    layout = SharedMemoryLayout(config)
    stages, full, empty, tile_info_offset = config.stages, layout.full, layout.empty, layout.tile_info_offset
    by_tensor, full_arrivals, cluster_size = config.scaling == "tensor", 2 if uses_aux else 1, config.cluster_size
    first_tile, next_tile = make_tile_loop(cluster_size)
    block_k_shift = 6 if config.dtype == "bf16" else 7
    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168.
    producer_registers, consumer_registers = (56, 224) if uses_aux else (40, 232) if cluster_size == 2 else (24, 240)
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(producer_registers), make_setmaxnreg_inc(consumer_registers)
    count_tiles, tma_producer = make_count_tiles(config, layout), make_tma_producer(config, layout)
    consumer, aux_producer = make_consumer(config, layout), make_aux_producer(config, layout)
    to_uniform, to_uniform_array = (uniform, uniform_array) if config.warp_uniform else (identity, identity)

    @cuda.jit
    def grouped_gemm(
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
                mbarrier_init(smem.barriers, full + stage, full_arrivals)
                mbarrier_init(smem.barriers, empty + stage, CONSUMER_WARPS * cluster_size)
            fence_mbarrier_init()
        if cluster_size == 2:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        griddepcontrol_wait()
        problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
        n_tiles = int32((n + BLOCK_N - 1) >> 7)
        k_blocks = int32((k + (1 << block_k_shift) - 1) >> block_k_shift)
        tiles = count_tiles(smem, problem, int32((n_tiles + cluster_size - 1) // cluster_size))
        if warp >= CONSUMER_WARPS:
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                tma_producer(smem, map_x, map_weight, scales, problem, tiles, k_blocks, n)
                griddepcontrol_launch_dependents()
            if uses_aux and warp > CONSUMER_WARPS:
                source = GatherSource(x, row_indices, x_rows, row_bytes, int32(k << (7 - block_k_shift)))
                strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride)
                aux_warp = warp - CONSUMER_WARPS - 1
                aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_tiles)
        else:
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            u8, barriers = to_uniform_array(smem.u8), to_uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, to_uniform_array(smem.f32), barriers)
            warp = to_uniform(warp)
            output = Output(y, y_scale, n)
            tile = first_tile()
            while tile < tiles:
                stage, phase = to_uniform(stage), uint32(to_uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, scale = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # lane 0 releases the stage for all lanes
                output_tile = OutputTile(
                    to_uniform(row),
                    to_uniform(int32(rows & 0xFFFF)),
                    to_uniform(int32(rows >> 16)),
                    column,
                    int_as_float(scale) if by_tensor else float32(1),
                )
                stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, output_tile)
                tile = next_tile(tile)
        if cluster_size == 2:  # the other CTA may still multicast into this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return grouped_gemm, layout.bytes
