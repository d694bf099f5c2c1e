"""Producer warpgroup of the grouped GEMM kernel: it fills the stages of the pipeline, by TMA and by auxiliary warps.

One thread issues the TMA loads of weight and x. With block scaling or gathered rows, three auxiliary warps add scales
or rows of x.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.block_scales import make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.common.constants import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, BLOCK_N
from moe_numba.grouped_gemm.common.gather import (
    GatherSource,
    index_slot,
    make_copy_rows,
    make_load_row_indices,
    wait_rows,
)
from moe_numba.grouped_gemm.common.pipeline import CLUSTER_MASK, allow_dependents
from moe_numba.grouped_gemm.common.scheduler import make_get_banded_tile, make_get_tile, make_tile_loop
from moe_numba.ptx.arithmetic import float_as_int
from moe_numba.ptx.cluster import cluster_ctarank
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_arrive_expect_tx, mbarrier_wait_parity
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_2d_multicast_hint,
    tma_load_3d_hint,
    tma_load_4d_hint,
)
from moe_numba.ptx.warp import uniform


@cache
def make_look_up_tile(config, layout):
    """Make ``tile_info = look_up_tile(smem, problem, n_tiles, tile)``, with bands if the configuration has them."""
    if config.band_rows:
        return make_get_banded_tile(config, layout)
    get_tile = make_get_tile(config, layout)

    @cuda.jit(device=True)
    def look_up_tile(smem, problem, n_tiles, tile):
        return get_tile(smem, problem, tile)

    return look_up_tile


@cache
def make_load_weight(config):
    """Make ``load_weight(smem, offset, map_weight, k, column, n, group, full, policy)``: load a stage's rows of weight.

    With ``silu_and_mul`` they are a tile of gate and behind it one of up. Their rows are rows ``column`` and
    ``n + column`` of weight, or interleaved. In a map of 4 dimensions, [k, column, part, group] or
    [k, part, column, group], part 0 is gate and part 1 up; rows beyond either are zeros. An MN-major tile has one box
    of 64 rows of weight for each consumer warpgroup.
    """
    silu_and_mul, splits_weight, interleaved = config.silu_and_mul, config.splits_weight, config.interleaved
    mn_major, half_rows = config.weight_major == "mn", BLOCK_N // 2

    @cuda.jit(device=True)
    def load_weight(smem, offset, map_weight, k, column, n, group, full, policy):
        barriers = smem.barriers
        if splits_weight:
            for part in range(2):
                to = int32(offset + part * (BLOCK_N * BLOCK_K_BYTES))
                y, z = (int32(part), column) if interleaved else (column, int32(part))
                tma_load_4d_hint(smem.u8, to, map_weight, 0, k, y, z, group, barriers, full, policy)
        elif mn_major:
            to, second = int32(offset + half_rows * BLOCK_K_BYTES), int32(column + half_rows)
            tma_load_3d_hint(smem.u8, offset, map_weight, 0, column, k, group, barriers, full, policy)
            tma_load_3d_hint(smem.u8, to, map_weight, 0, second, k, group, barriers, full, policy)
        else:
            tma_load_3d_hint(smem.u8, offset, map_weight, 0, k, column, group, barriers, full, policy)
            if silu_and_mul:
                column, to = int32(n + column), int32(offset + BLOCK_N * BLOCK_K_BYTES)
                tma_load_3d_hint(smem.u8, to, map_weight, 0, k, column, group, barriers, full, policy)

    return load_weight


@cache
def make_publish_tile(config, layout):
    """Make ``publish_tile(smem, scales, tile_info, stage)``, which stores a tile for the consumers.

    ``stage`` is the tile's first one, and empty.
    """
    tile_info_offset, scale_in_tile, has_row_terms = layout.tile_info_offset, config.scale_in_tile, config.has_row_terms
    scaled_x = config.scaled_x

    @cuda.jit(device=True)
    def publish_tile(smem, scales, tile_info, stage):
        g, row, rows, subtile_rows, n_tile = tile_info
        info = uint32(tile_info_offset + 4 * stage)
        smem.i32[info] = row
        smem.i32[info + uint32(1)] = int32(rows | (subtile_rows << 16))
        smem.i32[info + uint32(2)] = int32(n_tile * BLOCK_N)
        if has_row_terms:
            smem.i32[info + uint32(3)] = g
        elif scale_in_tile:
            scale = scales.weight[g] * scales.x[0] if scaled_x else scales.weight[g]
            smem.i32[info + uint32(3)] = float_as_int(scale)
        else:
            smem.i32[info + uint32(3)] = int32(0)

    return publish_tile


@cache
def make_bytes_of_stage(config, layout):
    """Make ``is_single, num_bytes = bytes_of_stage(tile_info)``: what TMA writes to a stage.

    ``is_single``: the second subtile is empty, and not loaded.
    """
    tma_bytes, subtile_bytes = layout.tma_bytes, layout.subtile_bytes
    skips_empty = config.m_subtiles == 2 and config.cluster_size == 1 and not config.gather

    @cuda.jit(device=True)
    def bytes_of_stage(tile_info):
        is_single = skips_empty and tile_info.rows <= tile_info.subtile_rows
        return is_single, int32(tma_bytes - subtile_bytes) if is_single else int32(tma_bytes)

    return bytes_of_stage


@cache
def make_load_early_weight(config, layout):
    """Make ``stages = load_early_weight(smem, map_weight, scales, problem, tiles, k_blocks, n, policy)``.

    It loads the weights of the first stages, at most all, publishes their tiles, and returns their number.
    """
    full, stage_bytes, stages = layout.full, layout.stage_bytes, config.stages
    load_weight, block_k = make_load_weight(config), block_k_of(config)
    bytes_of_stage = make_bytes_of_stage(config, layout)
    look_up_tile, publish_tile = make_look_up_tile(config, layout), make_publish_tile(config, layout)
    (first_tile, next_tile), columns = make_tile_loop(config.cluster_size), BLOCK_N * config.cluster_size

    @cuda.jit(device=True)
    def load_early_weight(smem, map_weight, scales, problem, tiles, k_blocks, n, policy):
        stage, tile, n_tiles = int32(0), first_tile(), int32((n + columns - 1) // columns)
        while tile < tiles and stage < stages:
            info = look_up_tile(smem, problem, n_tiles, tile)
            _, num_bytes = bytes_of_stage(info)
            publish_tile(smem, scales, info, stage)
            for k_block in range(min(k_blocks, int32(stages - stage))):
                barrier, k, offset = full + stage, int32(k_block * block_k), int32(stage * stage_bytes)
                mbarrier_arrive_expect_tx(smem.barriers, barrier, num_bytes)
                load_weight(smem, offset, map_weight, k, int32(info.n_tile * BLOCK_N), n, info.group, barrier, policy)
                stage = int32(stage + 1)
            tile = next_tile(tile)
        return stage

    return load_early_weight


def block_k_of(config):
    """Return the elements of k in a stage."""
    return BLOCK_K_BYTES // 2 if config.dtype == "bf16" else BLOCK_K_BYTES


@cache
def make_tma_producer(config, layout):
    """Make ``tma_producer(smem, map_x, map_weight, scales, problem, tiles, k_blocks, n)``, which one thread executes.

    It looks up each tile and publishes it to the consumers with the tile's first stage: this thread runs ahead of the
    consumers, which would otherwise wait for the group sizes to arrive from global memory.

    With ``early_weight`` it fills the pipeline with weights before ``griddepcontrol.wait``, while the kernel before
    still runs. That kernel may compute x, but the group sizes must be older: written by kernels that had completed
    when it allowed its dependents to start.
    """
    stage_bytes, x_offset, subtile_bytes = layout.stage_bytes, layout.x_offset, layout.subtile_bytes
    full, empty, two_subtiles, gather = layout.full, layout.empty, config.m_subtiles == 2, config.gather
    multicast, box_rows, load_weight = config.cluster_size == 2, layout.x_box_rows, make_load_weight(config)
    keep_weight, early_weight = config.keep_weight, config.early_weight
    allows_early = config.block_m < 128  # see `allow_dependents`
    look_up_tile, publish_tile = make_look_up_tile(config, layout), make_publish_tile(config, layout)
    bytes_of_stage, load_early_weight = make_bytes_of_stage(config, layout), make_load_early_weight(config, layout)
    advance, block_k = make_advance(config.stages), block_k_of(config)
    (first_tile, next_tile), columns = make_tile_loop(config.cluster_size), BLOCK_N * config.cluster_size

    @cuda.jit(device=True)
    def tma_producer(smem, map_x, map_weight, scales, problem, tiles, k_blocks, n):
        barriers = smem.barriers
        stage, phase, early = int32(0), uint32(1), int32(0)  # early: stages whose weights have been loaded
        evict_last = createpolicy_evict_last()
        weight_policy = evict_last if keep_weight else createpolicy_evict_first()
        if early_weight:
            early = load_early_weight(smem, map_weight, scales, problem, tiles, k_blocks, n, weight_policy)
            griddepcontrol_wait()
        tile, n_tiles = first_tile(), int32((n + columns - 1) // columns)
        while tile < tiles:
            info = look_up_tile(smem, problem, n_tiles, tile)  # before the wait, which hides its latency
            g, row, _, subtile_rows, n_tile = info
            if early == 0:  # an early stage with gathered rows may have been released already: no later phase ends
                mbarrier_wait_parity(barriers, empty + stage, phase)
                publish_tile(smem, scales, info, stage)
            is_single, num_bytes = bytes_of_stage(info)
            if multicast:  # each CTA loads half of the rows of x and multicasts them to both
                rank = int32(cluster_ctarank())
                row = int32(row + rank * (subtile_rows if two_subtiles else box_rows))
                multicast_offset = int32(x_offset + rank * (box_rows * BLOCK_K_BYTES))
            for k_block in range(k_blocks):
                k, offset = int32(k_block * block_k), int32(stage * stage_bytes)
                if early > 0:
                    early = int32(early - 1)
                else:
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    if allows_early:
                        allow_dependents(stage, phase)
                    mbarrier_arrive_expect_tx(barriers, full + stage, num_bytes)
                    load_weight(smem, offset, map_weight, k, int32(n_tile * BLOCK_N), n, g, full + stage, weight_policy)
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
        griddepcontrol_launch_dependents()

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
    look_up_tile, (first_tile, next_tile) = make_look_up_tile(config, layout), make_tile_loop(config.cluster_size)
    clusters, (k_offset, load_x_scale) = config.cluster_size, make_x_scales(config.packed_x_scale)
    find_weight_scale, step, load_weight_scale = make_weight_scales(config.packed_weight_scale)

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
            info = look_up_tile(smem, problem, int32((n_tiles + clusters - 1) // clusters), tile)
            # The last tile of a cluster's second CTA may lie beyond the weight: clamp it.
            n_tile, rows = min(info.n_tile, n_tiles - 1), strides.weight_rows
            weight_index = find_weight_scale(info.group, n_tile, weight_tiles * n_tiles, k_blocks, rows)
            x_index = int64(info.row + lane) * strides.row + info.group * strides.group
            if gather:
                load_row_indices(smem, indices, lane, source, info)
            for k_block in range(k_blocks):
                if skip == 0:
                    # Issue all global loads before waiting for the stage, so that their latency is hidden.
                    for p in range(weight_tiles if by_block else 0):  # up lies n_tiles tiles behind gate
                        index = weight_index + p * n_tiles * step(k_blocks)
                        weight_scales[p] = load_weight_scale(scales.weight, index, k_block, rows)
                    for p in range(m_subtiles if by_block else 0):
                        for i in range(rows_per_lane):
                            t = int32(lane + 32 * i)
                            row = int32(p * info.subtile_rows + t)
                            valid = t < info.subtile_rows and row < info.rows
                            index = x_index + int64(p * info.subtile_rows + 32 * i) * strides.row
                            if gather:
                                x_row = smem.i32[uint32(indices + p * row_index_pitch + index_slot(t))]
                                valid, index = valid and x_row >= 0, int64(x_row) * strides.row
                            index += k_offset(k_block, strides.k_block)
                            x_scale = load_x_scale(scales.x, index, k_block) if valid else float32(0)
                            x_scales[rows_per_lane * p + i] = x_scale
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
