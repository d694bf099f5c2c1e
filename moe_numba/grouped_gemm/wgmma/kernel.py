"""Grouped GEMM kernel: persistent, warp-specialised CTAs that compute the tiles of all groups.

The producer warpgroup fills a ring of shared-memory stages, and two consumer warpgroups issue wgmma. Each stage has a
full and an empty mbarrier. One tensor map covers the weights of all groups and another all rows of x: a tile may
load rows of the next group, whose results the epilogue does not store. No kernel has to run before this one.

The tile scheduler is in ``scheduler.py``, the producer in ``producer.py``, the epilogue in ``epilogue.py``.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, BLOCK_N, CONSUMER_WARPS, SharedMemory
from moe_numba.grouped_gemm.common.epilogue_terms import EpilogueInputs, make_load_terms
from moe_numba.grouped_gemm.common.gather import GatherSource
from moe_numba.grouped_gemm.common.outputs import EpilogueOperands, OutputTile
from moe_numba.grouped_gemm.common.pipeline import Scales, ScaleStrides, make_release_stage
from moe_numba.grouped_gemm.common.scheduler import Problem, make_count_tiles, make_tile_loop
from moe_numba.grouped_gemm.wgmma.config import SharedMemoryLayout, check_config
from moe_numba.grouped_gemm.wgmma.epilogue import make_epilogue
from moe_numba.grouped_gemm.wgmma.producer import make_aux_producer, make_tma_producer
from moe_numba.ptx.accumulators import make_fma, make_fma_columns
from moe_numba.ptx.arithmetic import int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait
from moe_numba.ptx.matrix import make_fma_shared, make_load_shared
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_descriptor_mn, make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

ACCUMULATOR_REGISTERS = 190  # registers of a consumer thread for accumulators, the wgmma result and scales


# Consumer warpgroups


@cache
def make_mma_stage(n, config, layout):
    """Make ``acc = mma_stage(smem, a, b, acc, scales, stage, release)``: add a stage's scaled product to ``acc``.

    FP8 tensor cores accumulate with fewer bits than float32, so the sum over a stage is added ("promoted") to ``acc``
    in CUDA cores. ``scales`` is the f32 offset of the thread's scales. A thread with ``release`` set arrives at the
    empty barrier once its warp has read the stage.
    """
    empty, scaling = layout.empty, config.scaling
    wait, release_stage = make_wgmma_wait(n, 0), make_release_stage(config.cluster_size)

    if config.dtype == "bf16" or config.fast_accumulation:  # no promotion
        wgmma = make_wgmma_tile(n, config.dtype, accumulate=True, a_major=config.weight_major)

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
    zeros, load_terms = (np.float32(0),) * (n // 2), make_load_terms(config)
    # A warpgroup's 64 rows of weight are a tile of one swizzle atom by 64 k if they are MN-major.
    a_descriptor = make_wgmma_descriptor_mn(64 * BLOCK_K_BYTES) if config.weight_major == "mn" else wgmma_descriptor

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_blocks, tile):
        terms = load_terms(output.inputs, tile, warp, lane, output.n)
        warpgroup_offset = int32((warp >> 2) * (64 * BLOCK_K_BYTES))
        acc_0, acc_1 = zeros, zeros
        for _ in range(k_blocks):
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            offset = int32(stage * stage_bytes)
            a = a_descriptor(smem.u8, offset + warpgroup_offset)
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
        epilogue(smem, output, warp, lane, acc_0, acc_1, tile, terms)
        return stage, phase

    return consumer


@cuda.jit(device=True)
def identity(value):
    """Stand-in for ``uniform`` and ``uniform_array``."""
    return value


@cache
def make_compute_tiles(config, layout):
    """Make ``compute_tiles(map_x, map_weight, output, problem, scales, strides, source, k)``.

    All threads must call it.
    """
    uses_aux = config.scaling == "block" or config.gather
    stages, full, empty, tile_info_offset = config.stages, layout.full, layout.empty, layout.tile_info_offset
    scale_in_tile, full_arrivals, cluster_size = config.scale_in_tile, 2 if uses_aux else 1, config.cluster_size
    (first_tile, next_tile), early_weight = make_tile_loop(cluster_size), config.early_weight
    block_k_shift = 6 if config.dtype == "bf16" else 7
    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168.
    producer_registers, consumer_registers = (56, 224) if uses_aux else (40, 232) if cluster_size == 2 else (24, 240)
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(producer_registers), make_setmaxnreg_inc(consumer_registers)
    count_tiles, tma_producer = make_count_tiles(config, layout), make_tma_producer(config, layout)
    consumer, aux_producer = make_consumer(config, layout), make_aux_producer(config, layout)
    to_uniform, to_uniform_array = (uniform, uniform_array) if config.warp_uniform else (identity, identity)

    @cuda.jit(device=True)
    def compute_tiles(map_x, map_weight, output, problem, scales, strides, source, k):
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
        if not early_weight:
            griddepcontrol_wait()
        n = output.n
        n_tiles = int32((n + BLOCK_N - 1) >> 7)
        k_blocks = int32((k + (1 << block_k_shift) - 1) >> block_k_shift)
        tiles = count_tiles(smem, problem, int32((n_tiles + cluster_size - 1) // cluster_size))
        if early_weight and warp != CONSUMER_WARPS:  # that warp's TMA producer waits later
            griddepcontrol_wait()
        if warp >= CONSUMER_WARPS:
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                tma_producer(smem, map_x, map_weight, scales, problem, tiles, k_blocks, n)
            if uses_aux and warp > CONSUMER_WARPS:
                aux_warp = warp - CONSUMER_WARPS - 1
                aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_tiles)
        else:
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            u8, barriers = to_uniform_array(smem.u8), to_uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, to_uniform_array(smem.f32), barriers)
            warp = to_uniform(warp)
            tile = first_tile()
            while tile < tiles:
                stage, phase = to_uniform(stage), uint32(to_uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, info = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # lane 0 releases the stage for all lanes
                output_tile = OutputTile(
                    to_uniform(row),
                    to_uniform(int32(rows & 0xFFFF)),
                    to_uniform(int32(rows >> 16)),
                    column,
                    int_as_float(info) if scale_in_tile else float32(1),
                    info,
                )
                stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, output_tile)
                tile = next_tile(tile)
        if cluster_size == 2:  # the other CTA may still multicast into this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return compute_tiles


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs of 384 threads; return it and its dynamic shared memory in bytes.

    A kernel whose epilogue reads more than the group's scale has four parameters more.
    """
    check_config(config)
    layout = SharedMemoryLayout(config)
    compute_tiles, valid_shift = make_compute_tiles(config, layout), 1 if config.dtype == "bf16" else 0
    weight_parts = layout.weight_tiles

    if config.epilogue_loads:

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
            bias,
            row_weights,
            scatter_indices,
            y_rows,
        ):
            inputs = EpilogueInputs(
                x_scale, weight_scale, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows
            )
            output = EpilogueOperands(y, y_scale, n, inputs)
            problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
            source = GatherSource(x, row_indices, x_rows, row_bytes, int32(k << valid_shift))
            strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride, int32(n * weight_parts))
            compute_tiles(map_x, map_weight, output, problem, scales, strides, source, k)

        return grouped_gemm, layout.bytes

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
        output = EpilogueOperands(y, y_scale, n, None)
        problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
        source = GatherSource(x, row_indices, x_rows, row_bytes, int32(k << valid_shift))
        strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride, int32(n * weight_parts))
        compute_tiles(map_x, map_weight, output, problem, scales, strides, source, k)

    return grouped_gemm, layout.bytes
