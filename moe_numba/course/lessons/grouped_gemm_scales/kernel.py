"""The block-scaled grouped GEMM in parts: each step of the lesson exchanges some of these factories.

It is the package's kernel (``grouped_gemm/block_scaled/kernel.py``, one function) without activation, gathered rows,
masked groups and packed scales. The steps are in ``steps.py``, what they exchange in ``parts.py``.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.block_scaled.config import (
    BOX_ROWS,
    BUFFER_BYTES,
    BUFFER_COLUMNS,
    BUFFER_ROWS,
    FACTOR_WARPS,
    ROW_BYTES,
    BlockScaledLayout,
    check_block_scaled_config,
)
from moe_numba.grouped_gemm.block_scaled.epilogue import publish_buffers, wait_for_buffers, write_buffer
from moe_numba.grouped_gemm.block_scaled.pairs import make_look_up_tile, pairs_of_group
from moe_numba.grouped_gemm.common.block_scales import make_load_four, make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, CONSUMER_WARPS, SharedMemory
from moe_numba.grouped_gemm.common.pipeline import CLUSTER_MASK, Scales, ScaleStrides
from moe_numba.grouped_gemm.common.pipeline import make_release_stage as make_release
from moe_numba.grouped_gemm.common.scheduler import Problem, divide, make_count_tiles, make_tile_loop
from moe_numba.ptx.accumulators import make_fma_blocks, make_for_each_chunk
from moe_numba.ptx.arithmetic import float_as_int, int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_test_wait_parity,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_shared_s32x4,
    st_global_s32x4,
    st_shared_s32x4,
)
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_3d_hint,
    tma_load_3d_multicast_hint,
    tma_store_2d,
)
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.quantise import FP8_SCALE_BLOCK

BOX_BYTES = BOX_ROWS * BLOCK_K_BYTES
HALF_OFFSET = FP8_SCALE_BLOCK * BLOCK_K_BYTES  # in a tile of 256 rows of weight: of the second half
bulk_wait = make_bulk_wait_group(0)


class BlockScaledOutput(NamedTuple):
    """The outputs in global memory."""

    map_y: Any  # tensor map of y, with boxes of a buffer
    y: Any  # int32 pointer: two bf16 per integer
    y_scale: Any  # the memory of a trace
    n: Any  # columns of y


# Producers


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

    It looks up each tile and publishes it to the consumers with the tile's first stage. The next tile is looked up when
    all stages are in use: the group's size takes a microsecond to arrive.
    """
    stage_bytes, x_offset, full, empty = layout.stage_bytes, layout.x_offset, layout.full, layout.empty
    tile_info_offset, columns = layout.tile_info_offset, config.columns
    keep_weight, half_rows = config.keep_weight, config.half_rows
    stages, load_weight, advance = config.stages, make_load_weight(config), make_advance(config.stages)
    get_tile, (first_tile, next_tile) = make_look_up_tile(config, layout), make_tile_loop(config.cluster_size)

    @cuda.jit(device=True)
    def tma_producer(smem, map_x, map_weight, problem, tiles, k_blocks, n):
        barriers = smem.barriers
        stage, phase = int32(0), uint32(1)
        evict_last = createpolicy_evict_last()
        weight_policy = evict_last if keep_weight else createpolicy_evict_first()
        tile = first_tile()
        info, shares_weight = get_tile(smem, problem, tile)
        while tile < tiles:
            g, row, rows, _, n_tile = info
            shares, look_up_at, tile = shares_weight, int32(min(stages, k_blocks - 1)), next_tile(tile)
            column = int32(n_tile * columns)
            rows = rows if column < n else int32(0)  # a pair's second tile may lie beyond the weight
            two_boxes = rows > BOX_ROWS
            second = int32(column + half_rows)
            tma_bytes = int32(x_offset + 2 * BOX_BYTES) if two_boxes else int32(x_offset + BOX_BYTES)
            mbarrier_wait_parity(barriers, empty + stage, phase)
            published = uint32(tile_info_offset + 4 * stage)
            smem.i32[published] = row
            smem.i32[published + uint32(1)] = rows
            smem.i32[published + uint32(2)] = column
            for k_block in range(k_blocks):
                k, offset = int32(k_block * BLOCK_K_BYTES), int32(stage * stage_bytes)
                mbarrier_wait_parity(barriers, empty + stage, phase)
                mbarrier_arrive_expect_tx(barriers, full + stage, tma_bytes)
                load_weight(smem, offset, map_weight, k, column, second, g, full + stage, weight_policy, shares)
                to = int32(offset + x_offset)
                tma_load_2d_hint(smem.u8, to, map_x, 0, k, row, barriers, full + stage, evict_last)
                if two_boxes:
                    to = int32(to + BOX_BYTES)
                    tma_load_2d_hint(smem.u8, to, map_x, 0, k, row + BOX_ROWS, barriers, full + stage, evict_last)
                stage, phase = advance(stage, phase)
                if k_block == look_up_at:
                    info, shares_weight = get_tile(smem, problem, tile)

    return tma_producer


@cache
def make_tile_scales(config):
    """Make ``w_0, w_1, w_2, x = tile_scales(info, strides, n_blocks, k_blocks)``: indices of a tile's first scales.

    The first three are those of weight, of the tile's blocks of columns; ``x`` is that of the tile's
    first row.
    """
    columns, width, (find_weight, _, _) = config.columns, config.scaled_columns, make_weight_scales(packed=False)

    @cuda.jit(device=True)
    def find_block(info, strides, n_blocks, k_blocks, i):
        # The last columns of the last tile, and a pair's second tile, may lie beyond the weight: clamp.
        n_block = int32(min(int32(info.n_tile * columns + i * width) >> 7, n_blocks - 1))
        return find_weight(info.group, n_block, n_blocks, k_blocks, strides.weight_rows)

    @cuda.jit(device=True)
    def tile_scales(info, strides, n_blocks, k_blocks):
        x = int64(info.row) * strides.row
        w_0 = find_block(info, strides, n_blocks, k_blocks, int32(0))
        w_1 = find_block(info, strides, n_blocks, k_blocks, int32(1))
        return w_0, w_1, find_block(info, strides, n_blocks, k_blocks, int32(2)), x

    return tile_scales


@cache
def make_write_factors(layout):
    """Make ``write(smem, stage, row, scale, a, b, c)``: write a row's scale times those of weight."""
    factor_offset, stage_factors = layout.factor_offset, layout.stage_factors

    @cuda.jit(device=True)
    def write(smem, stage, row, scale, a, b, c):
        to = int32(factor_offset + stage * stage_factors + 4 * row)
        a, b, c = float_as_int(scale * a), float_as_int(scale * b), float_as_int(scale * c)
        st_shared_s32x4(smem.i32, to, a, b, c, int32(0))

    return write


@cache
def make_arrive(layout):
    """Make ``arrive(smem, stage, lane)``: arrive at a stage's full barrier, once for the warp."""
    full = layout.full

    @cuda.jit(device=True)
    def arrive(smem, stage, lane):
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(smem.barriers, full + stage)

    return arrive


@cache
def make_factor_producer(config, layout):
    """Make ``aux_producer(smem, aux_warp, lane, scales, strides, problem, tiles, k_blocks, n_blocks)``.

    Auxiliary warp ``aux_warp`` (0 or 1) writes the factors of 64 rows of x for each stage, two rows per lane. It loads
    the scales of four stages at once, while consumers still work on the stages before them.
    """
    empty, tile_scales, advance = layout.empty, make_tile_scales(config), make_advance(config.stages)
    get_tile, (first_tile, next_tile) = make_look_up_tile(config, layout), make_tile_loop(config.cluster_size)
    write, arrive, blocks = make_write_factors(layout), make_arrive(layout), config.weight_scales
    load_x, load_w = make_load_four(False, config.vector_x_scale), make_load_four(False, config.vector_weight_scale)
    k_offset, _ = make_x_scales(packed=False)

    @cuda.jit(device=True)
    def publish(smem, lane, row, stage, phase, x_0, x_1, a, b, c):
        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
        write(smem, stage, row, x_0, a, b, c)
        write(smem, stage, int32(row + 32), x_1, a, b, c)
        arrive(smem, stage, lane)
        return advance(stage, phase)

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, problem, tiles, k_blocks, n_blocks):
        stage, phase, row = int32(0), uint32(1), int32(aux_warp * BOX_ROWS + lane)
        zero = float32(0), float32(0), float32(0), float32(0)
        one, x_step = int64(1), strides.k_block
        tile = first_tile()
        info, _ = get_tile(smem, problem, tile)
        while tile < tiles:
            w_0, w_1, w_2, first = tile_scales(info, strides, n_blocks, k_blocks)
            first += int64(row) * strides.row
            second = first + int64(32) * strides.row
            tile, valid, next_valid = next_tile(tile), row < info.rows, row + 32 < info.rows
            look_up_at = int32(min(4, (k_blocks - 1) & -4))
            for k_block in range(0, k_blocks, 4):
                count, at = int32(k_blocks - k_block), k_offset(k_block, x_step)
                x, y, b, c = zero, zero, zero, zero
                if valid:
                    x = load_x(scales.x, first + at, x_step, count)
                if next_valid:
                    y = load_x(scales.x, second + at, x_step, count)
                at = int64(k_block)
                a = load_w(scales.weight, w_0 + at, one, count)
                if blocks > 1:
                    b = load_w(scales.weight, w_1 + at, one, count)
                if blocks > 2:
                    c = load_w(scales.weight, w_2 + at, one, count)
                stage, phase = publish(smem, lane, row, stage, phase, x[0], y[0], a[0], b[0], c[0])
                if count > 1:
                    stage, phase = publish(smem, lane, row, stage, phase, x[1], y[1], a[1], b[1], c[1])
                if count > 2:
                    stage, phase = publish(smem, lane, row, stage, phase, x[2], y[2], a[2], b[2], c[2])
                if count > 3:
                    stage, phase = publish(smem, lane, row, stage, phase, x[3], y[3], a[3], b[3], c[3])
                if k_block == look_up_at:
                    info, _ = get_tile(smem, problem, tile)

    return aux_producer


@cache
def make_aux_producer(config, layout):
    """Make the function of the auxiliary warps for a configuration."""
    return make_factor_producer(config, layout)


def aux_warps(config):
    """Return the number of auxiliary warps, and of those that arrive at a stage's full barrier."""
    return FACTOR_WARPS, FACTOR_WARPS


# Epilogue


@cache
def make_store_buffer(elements):
    """Make ``store_buffer(smem, output, buffer, lane, row, rows, column)``: store the first ``rows`` rows of a buffer.

    An int32 of y has ``elements`` elements. ``row`` and ``column`` are where the buffer's first element lies in y.
    """
    vector_elements = 4 * elements

    @cuda.jit(device=True)
    def store_buffer(smem, output, buffer, lane, row, rows, column):
        if rows >= BUFFER_ROWS:
            if lane == 0:
                tma_store_2d(output.map_y, 0, column, row, smem.u8, buffer)
                bulk_commit_group()
        else:
            vector, pitch = int32(lane & 7), int32(output.n // elements)
            y_index = int64(row) * pitch + column // elements
            # A lane whose columns lie beyond y stores nothing.
            rows = rows if column + vector_elements * vector < output.n else int32(0)
            for i in range(4):
                t = int32(4 * i + (lane >> 3))
                a, b, c, d = ld_shared_s32x4(smem.i32, int32(buffer + t * ROW_BYTES + ((vector ^ (t & 7)) << 4)) >> 2)
                if t < rows:
                    st_global_s32x4(output.y, y_index + int64(t) * pitch + vector * 4, a, b, c, d)

    return store_buffer


@cache
def make_store(n, layout, first_buffer=0):
    """Make ``store(smem, output, warp, lane, acc, row, rows, column)``: store a warp's rows by ``n`` columns in bf16.

    The warp's rows begin at ``row`` of y, and ``rows`` of them exist; ``column`` is the first column. A tile that is
    stored in two parts uses the buffers from ``first_buffer`` on for the second one.
    """
    epilogue_offset, warp_bytes = layout.epilogue_offset + first_buffer * BUFFER_BYTES, layout.epilogue_warp_bytes
    write = make_for_each_chunk(n // 2, BUFFER_COLUMNS // 2, write_buffer)
    store_buffer, waits = make_store_buffer(2), first_buffer == 0

    @cuda.jit(device=True)
    def store(smem, output, warp, lane, acc, row, rows, column):
        buffer, t = int32(epilogue_offset + warp * warp_bytes), int32(lane & 15)
        if waits:
            wait_for_buffers(lane)
        write(acc, smem, int32(buffer + t * ROW_BYTES + (((t & 7) ^ (lane >> 4)) << 4)))
        publish_buffers()
        for first in range(0, n, BUFFER_COLUMNS):
            if column + first < output.n:
                store_buffer(smem, output, buffer, lane, row, rows, int32(column + first))
            buffer = int32(buffer + BUFFER_BYTES)

    return store


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

    As :func:`make_multiply`, for a tile of 256 rows of weight, two neighbouring blocks. Two accumulators leave
    registers for one wgmma result only, so the halves are computed one after the other.
    """
    stage_vectors, full, advance = layout.stage_bytes >> 4, layout.full, make_advance(config.stages)
    n, load_factors, release_stage = FP8_SCALE_BLOCK, make_load_factors(layout), make_release_stage(layout)
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
    skip_stages, tile_offset = make_skip_stages(config, layout), layout.x_offset
    halves = config.block_n == 2 * FP8_SCALE_BLOCK
    multiply = (make_multiply_halves if halves else make_multiply)(config, layout)
    columns = config.block_n // 2 if halves else config.block_n
    store = make_store(columns, layout)
    store_second = make_store(columns, layout, columns // BUFFER_COLUMNS) if halves else None

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column):
        warpgroup, own_row = int32(warp >> 2), int32(warp * 16)
        if rows > warpgroup * BOX_ROWS:
            x_offset, thread_row = int32(tile_offset + warpgroup * BOX_BYTES), int32(own_row + (lane >> 2))
            if halves:
                first, second, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, thread_row)
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
    columns, cluster_size = config.columns, config.cluster_size
    (first_tile, next_tile), tiles_offset = make_tile_loop(cluster_size), layout.tiles_offset
    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168. Two accumulators and
    # the addresses of another CTA's barriers need more than 224.
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
                n_blocks = int32((n + 127) >> 7)
                strides = ScaleStrides(scale_row_stride, scale_k_stride, scale_group_stride, n)
                aux_producer(smem, aux_warp, lane, scales, strides, problem, tiles, k_blocks, n_blocks)
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
