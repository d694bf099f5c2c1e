"""Producer warps of the block-scaled grouped GEMM.

One thread issues the TMA loads of a stage, weight and x. Auxiliary warps write the factors of the stage's result to
shared memory: for each row of x and each block of columns the product of their two scales, so that a consumer reads
all factors of a row with one load and multiplies none. They also copy gathered rows of x.

wgmma reads its operands from the same memory that serves as L1 cache, and the kernel needs almost all of its bandwidth.
A warp's load from global memory occupies it once for each cache line. Where the scales of a row are contiguous, the
lanes of a load touch 32 lines, so that the scales of four stages are loaded at once.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.block_scaled.config import BLOCK_M, BOX_ROWS
from moe_numba.grouped_gemm.block_scaled.pairs import make_schedule
from moe_numba.grouped_gemm.common.block_scales import make_load_four, make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.common.constants import AUX_PRODUCER_WARPS, BLOCK_K_BYTES
from moe_numba.grouped_gemm.common.gather import (
    GatherSource,
    index_slot,
    make_copy_rows,
    make_load_row_indices,
    wait_rows,
)
from moe_numba.grouped_gemm.common.pipeline import CLUSTER_MASK
from moe_numba.grouped_gemm.common.scheduler import make_tile_loop
from moe_numba.ptx.arithmetic import float_as_int
from moe_numba.ptx.cluster import cluster_ctarank
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity
from moe_numba.ptx.memory import st_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_3d_hint,
    tma_load_3d_multicast_hint,
)
from moe_numba.ptx.warp import uniform

BOX_BYTES = BOX_ROWS * BLOCK_K_BYTES
FACTOR_WARPS = 2  # each writes the factors of BLOCK_M / 2 rows


# TMA loads


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
    tile_info_offset, columns, gather = layout.tile_info_offset, config.columns, config.gather
    keep_weight, silu_and_mul, half_rows = config.keep_weight, config.silu_and_mul, config.half_rows
    stages, load_weight, advance = config.stages, make_load_weight(config), make_advance(config.stages)
    get_tile, (first_tile, next_tile) = make_schedule(config, layout), make_tile_loop(config.cluster_size)

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
            second = int32(n + column) if silu_and_mul else int32(column + half_rows)
            tma_bytes = int32(x_offset)
            if not gather:
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
                if not gather:
                    tma_load_2d_hint(smem.u8, to, map_x, 0, k, row, barriers, full + stage, evict_last)
                if two_boxes and not gather:
                    to = int32(to + BOX_BYTES)
                    tma_load_2d_hint(smem.u8, to, map_x, 0, k, row + BOX_ROWS, barriers, full + stage, evict_last)
                stage, phase = advance(stage, phase)
                if k_block == look_up_at:
                    info, shares_weight = get_tile(smem, problem, tile)

    return tma_producer


# Factors


@cache
def make_tile_scales(config):
    """Make ``w_0, w_1, w_2, x = tile_scales(info, strides, n_blocks, k_blocks)``: indices of a tile's first scales.

    The first three are those of weight, of the tile's blocks of columns or of gate and up; ``x`` is that of the tile's
    first row.
    """
    columns, width, silu_and_mul = config.columns, config.scaled_columns, config.silu_and_mul
    masked, (find_weight, _, _) = config.row_layout == "masked", make_weight_scales(config.packed_weight_scale)

    @cuda.jit(device=True)
    def find_block(info, strides, n_blocks, k_blocks, i):
        # The last columns of the last tile, and a pair's second tile, may lie beyond the weight: clamp.
        if silu_and_mul:  # up lies half the blocks behind gate
            n_block = int32(min(info.n_tile, (n_blocks >> 1) - 1) + (n_blocks >> 1) * i)
        else:
            n_block = int32(min(int32(info.n_tile * columns + i * width) >> 7, n_blocks - 1))
        return find_weight(info.group, n_block, n_blocks, k_blocks, strides.weight_rows)

    @cuda.jit(device=True)
    def tile_scales(info, strides, n_blocks, k_blocks):
        x = int64(info.row) * strides.row
        if masked:
            x += info.group * strides.group
        w_0 = find_block(info, strides, n_blocks, k_blocks, int32(0))
        w_1 = find_block(info, strides, n_blocks, k_blocks, int32(1))
        return w_0, w_1, find_block(info, strides, n_blocks, k_blocks, int32(2)), x

    return tile_scales


@cache
def make_load_weight_scales(config):
    """Make ``a, b, c = load(weight_scale, w_0, w_1, w_2, k_block, rows)``, for the indices of ``tile_scales``.

    All lanes load the same, as many as the tile has blocks of columns; the others are 0.
    """
    blocks, (_, _, load_weight) = config.weight_scales, make_weight_scales(config.packed_weight_scale)

    @cuda.jit(device=True)
    def load(weight_scale, w_0, w_1, w_2, k_block, rows):
        b, c = float32(0), float32(0)
        if blocks > 1:
            b = load_weight(weight_scale, w_1, k_block, rows)
        if blocks > 2:
            c = load_weight(weight_scale, w_2, k_block, rows)
        return load_weight(weight_scale, w_0, k_block, rows), b, c

    return load


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
    """Make ``aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks)``.

    Auxiliary warp ``aux_warp`` (0 or 1) writes the factors of 64 rows of x for each stage, two rows per lane. It loads
    the scales of four stages at once, while consumers still work on the stages before them.
    """
    empty, tile_scales, advance = layout.empty, make_tile_scales(config), make_advance(config.stages)
    get_tile, (first_tile, next_tile) = make_schedule(config, layout), make_tile_loop(config.cluster_size)
    write, arrive, blocks = make_write_factors(layout), make_arrive(layout), config.weight_scales
    packed_x, packed_w = config.packed_x_scale, config.packed_weight_scale
    load_x, load_w = (
        make_load_four(packed_x, config.vector_x_scale),
        make_load_four(packed_w, config.vector_weight_scale),
    )
    k_offset, _ = make_x_scales(packed_x)

    @cuda.jit(device=True)
    def publish(smem, lane, row, stage, phase, x_0, x_1, a, b, c):
        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
        write(smem, stage, row, x_0, a, b, c)
        write(smem, stage, int32(row + 32), x_1, a, b, c)
        arrive(smem, stage, lane)
        return advance(stage, phase)

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks):
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
                at = int64(k_block >> 2) * strides.weight_rows if packed_w else int64(k_block)
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
def make_gather_producer(config, layout):
    """As :func:`make_factor_producer`, for rows of x that are gathered.

    Each of three warps writes the factors of every third stage and copies its rows of x. It loads scales, waits for the
    stage, and copies the rows while the loads are in flight.
    """
    empty, tile_scales, advance = layout.empty, make_tile_scales(config), make_advance(config.stages)
    row_index_offset, row_indices, rows_per_lane = layout.row_index_offset, layout.row_indices, BLOCK_M // 32
    load_row_indices, copy_rows = make_load_row_indices(config, layout), make_copy_rows(config, layout)
    get_tile, (first_tile, next_tile) = make_schedule(config, layout), make_tile_loop(config.cluster_size)
    write, arrive, load_weight = make_write_factors(layout), make_arrive(layout), make_load_weight_scales(config)
    k_offset, load_x = make_x_scales(config.packed_x_scale)

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks):
        stage, phase, skip = int32(0), uint32(1), int32(aux_warp)  # skip: stages before this warp's next one
        indices = int32(row_index_offset + aux_warp * row_indices)
        x_rows, row_bytes = source.x_rows, uniform(source.row_bytes)
        source = GatherSource(source.x, source.row_indices, x_rows, row_bytes, source.valid_bytes)
        x_scales, rows = cuda.local.array(rows_per_lane, float32), strides.weight_rows
        tile = first_tile()
        while tile < tiles:
            info, _ = get_tile(smem, problem, tile)
            w_0, w_1, w_2, _ = tile_scales(info, strides, n_blocks, k_blocks)
            load_row_indices(smem, indices, lane, source, info)
            for k_block in range(k_blocks):
                if skip == 0:
                    # Issue all global loads before waiting for the stage, so that their latency is hidden.
                    a, b, c = load_weight(scales.weight, w_0, w_1, w_2, k_block, rows)
                    offset = k_offset(k_block, strides.k_block)
                    for i in range(rows_per_lane):
                        row = smem.i32[uint32(indices + index_slot(int32(lane + 32 * i)))]
                        index = int64(row) * strides.row + offset
                        x_scales[i] = load_x(scales.x, index, k_block) if row >= 0 else float32(0)
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    copy_rows(smem, indices, lane, stage, k_block, source, info)
                    for i in range(rows_per_lane):
                        write(smem, stage, int32(lane + 32 * i), x_scales[i], a, b, c)
                    wait_rows()
                    arrive(smem, stage, lane)
                skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return aux_producer


@cache
def make_aux_producer(config, layout):
    """Make the function of the auxiliary warps for a configuration; see :func:`make_factor_producer`."""
    return (make_gather_producer if config.gather else make_factor_producer)(config, layout)


def aux_warps(config):
    """Return the number of auxiliary warps, and of those that arrive at a stage's full barrier."""
    return (AUX_PRODUCER_WARPS, 1) if config.gather else (FACTOR_WARPS, FACTOR_WARPS)
