"""Grouped GEMM kernel for MXFP4 weights: persistent, warp-specialised CTAs that decode weights into registers.

The kernel computes the transposed product, as that of ``kernel.py``: rows of weight are wgmma's M, rows of x its N.
Weights are A, in registers: with 4.25 bits per weight the time of few rows is that of reading the weights, so they
should pass through shared memory once and as codes. Rows of x are B, in shared memory.

Producer warps: one thread issues the copies of a stage: for each consumer warpgroup a ``cp.async.bulk`` of one or two
packed tiles (see ``weight_tiles.py``), and TMA loads of x. With gathered rows of x, three auxiliary warps copy them
instead.
Consumers: each warpgroup multiplies 64 rows of weight. A thread loads its codes of a tile with one 16-byte load,
decodes them to registers of A (``decode_w4.py``), and issues wgmmas, which run while it decodes the next codes, or with
few rows of x mma.sync (``mainloop_w4.py``).
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.common.constants import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, SharedMemory
from moe_numba.grouped_gemm.common.epilogue_terms import EpilogueInputs
from moe_numba.grouped_gemm.common.gather import GatherSource, make_copy_rows, make_load_row_indices, wait_rows
from moe_numba.grouped_gemm.common.outputs import EpilogueOperands, OutputTile
from moe_numba.grouped_gemm.common.pipeline import allow_dependents
from moe_numba.grouped_gemm.common.scheduler import Problem, divide, make_count_tiles, make_get_tile, make_tile_loop
from moe_numba.grouped_gemm.w4.epilogue import make_terms_and_epilogue
from moe_numba.grouped_gemm.w4.layout import W4Layout, check_w4_config
from moe_numba.grouped_gemm.w4.main_loop import make_main_loop
from moe_numba.grouped_gemm.w4.packing import RESULT_EXPONENT, TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.ptx.cp_async import bulk_load_hint
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import createpolicy_evict_first, createpolicy_evict_last, tma_load_2d_hint
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc


class Weight(NamedTuple):
    """The packed weight in global memory."""

    tiles: Any  # uint8 pointer: [groups, n_tiles, k_tiles] weight tiles
    n_tiles: Any
    k_tiles: Any


# Producer warpgroup


@cuda.jit(device=True)
def x_tiles_of(k_tiles):
    """Return the number of tiles of x that belong to ``k_tiles`` tiles of weight: as many.

    Returning ``k_tiles`` itself changes the machine code of the producer, and records were measured with this one.
    """
    return divide(int32(k_tiles * TILE + (TILE - 1)), TILE)


@cache
def make_load_weight(config, layout):
    """Make ``load_weight(smem, weight, group, n_tile, k_tile, tiles, stage, policy)``: load a stage's weight tiles.

    ``n_tile`` is that of the output, 64 rows of weight per warpgroup; ``tiles`` tiles along k from ``k_tile`` on.
    """
    weight_offset, weight_bytes, full = layout.weight_offset, layout.weight_bytes, layout.full
    stage_tiles, warpgroups = config.stage_tiles, config.warpgroups

    @cuda.jit(device=True)
    def load_weight(smem, weight, group, n_tile, k_tile, tiles, stage, policy):
        barriers = smem.barriers
        for w in range(warpgroups):
            # The last tile may lie partly beyond the weight: clamp it.
            row = int64(group) * weight.n_tiles + min(int32(n_tile * warpgroups + w), int32(weight.n_tiles - 1))
            to = int32(weight_offset + stage * weight_bytes + w * (stage_tiles * TILE_BYTES))
            index, size = (row * weight.k_tiles + k_tile) * TILE_BYTES, int32(tiles * TILE_BYTES)
            bulk_load_hint(smem.u8, to, weight.tiles, index, size, barriers, full + stage, policy)

    return load_weight


@cache
def make_publish_tile(config, layout):
    """Make ``publish_tile(smem, tile_info, stage)`` and ``boxes_of(tile_info)``.

    The former stores a tile for the consumers; ``stage`` is the tile's first one, and empty. The latter returns the
    number of TMA loads of x for one of its tiles in a stage.
    """
    tile_info_offset, columns = layout.tile_info_offset, config.columns
    box_rows, gather = config.box_rows, config.gather

    @cuda.jit(device=True)
    def publish_tile(smem, tile_info, stage):
        g, row, rows, subtile_rows, n_tile = tile_info
        info = uint32(tile_info_offset + 4 * stage)
        smem.i32[info] = row
        smem.i32[info + uint32(1)] = int32(rows | (subtile_rows << 16))
        smem.i32[info + uint32(2)] = int32(n_tile * columns)
        smem.i32[info + uint32(3)] = g

    @cuda.jit(device=True)
    def boxes_of(tile_info):
        return int32(0) if gather else divide(int32(tile_info.subtile_rows + box_rows - 1), box_rows)

    return publish_tile, boxes_of


@cache
def make_begin_stage(config, layout):
    """Make ``begin_stage(smem, weight, info, k_tile, boxes, stage, policy)``.

    It loads the weights of a stage and announces their bytes and those of x.
    """
    full, stage_tiles, warpgroups = layout.full, config.stage_tiles, config.warpgroups
    box_bytes, load_weight = config.box_rows * BLOCK_K_BYTES, make_load_weight(config, layout)

    @cuda.jit(device=True)
    def begin_stage(smem, weight, info, k_tile, boxes, stage, policy):
        k_tiles = int32(min(stage_tiles, weight.k_tiles - k_tile))
        x_bytes = int32(x_tiles_of(k_tiles) * boxes * box_bytes)
        mbarrier_arrive_expect_tx(smem.barriers, full + stage, int32(x_bytes + warpgroups * k_tiles * TILE_BYTES))
        load_weight(smem, weight, info.group, info.n_tile, k_tile, k_tiles, stage, policy)

    return begin_stage


@cache
def make_load_early_weight(config, layout):
    """Make ``stages = load_early_weight(smem, weight, problem, tiles, policy)``.

    It loads the weights of the first stages, at most all, publishes their tiles, and returns their number.
    """
    stages, stage_tiles, (first_tile, next_tile) = config.stages, config.stage_tiles, make_tile_loop(1)
    get_tile, begin_stage = make_get_tile(config, layout), make_begin_stage(config, layout)
    publish_tile, boxes_of = make_publish_tile(config, layout)

    @cuda.jit(device=True)
    def load_early_weight(smem, weight, problem, tiles, policy):
        stage, tile = int32(0), first_tile()
        while tile < tiles and stage < stages:
            info = get_tile(smem, problem, tile)
            boxes = boxes_of(info)
            publish_tile(smem, info, stage)
            for k_tile in range(0, min(weight.k_tiles, int32((stages - stage) * stage_tiles)), stage_tiles):
                begin_stage(smem, weight, info, int32(k_tile), boxes, stage, policy)
                stage = int32(stage + 1)
            tile = next_tile(tile)
        return stage

    return load_early_weight


@cache
def make_tma_producer(config, layout):
    """Make ``tma_producer(smem, map_x, weight, problem, tiles)``, which one thread executes.

    It looks up each tile and publishes it to the consumers with the tile's first stage. For ``early_weight`` see
    ``producer.make_tma_producer``.
    """
    stage_bytes, subtile_bytes, full, empty = layout.stage_bytes, layout.subtile_bytes, layout.full, layout.empty
    box_rows, stage_tiles, early_weight = config.box_rows, config.stage_tiles, config.early_weight
    advance, load_early_weight = make_advance(config.stages), make_load_early_weight(config, layout)
    get_tile, begin_stage = make_get_tile(config, layout), make_begin_stage(config, layout)
    publish_tile, boxes_of = make_publish_tile(config, layout)
    first_tile, next_tile = make_tile_loop(1)

    @cuda.jit(device=True)
    def tma_producer(smem, map_x, weight, problem, tiles):
        barriers = smem.barriers
        stage, phase, early = int32(0), uint32(1), int32(0)  # early: stages whose weights have been loaded
        evict_first, evict_last = createpolicy_evict_first(), createpolicy_evict_last()
        if early_weight:
            early = load_early_weight(smem, weight, problem, tiles, evict_first)
            griddepcontrol_wait()
        tile = first_tile()
        while tile < tiles:
            info = get_tile(smem, problem, tile)  # before the wait, which hides its latency
            if early == 0:  # as in `producer.make_tma_producer`
                mbarrier_wait_parity(barriers, empty + stage, phase)
                publish_tile(smem, info, stage)
            boxes = boxes_of(info)
            for k_tile in range(0, weight.k_tiles, stage_tiles):
                if early > 0:
                    early = int32(early - 1)
                else:
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    allow_dependents(stage, phase)
                    begin_stage(smem, weight, info, int32(k_tile), boxes, stage, evict_first)
                for i in range(x_tiles_of(int32(min(stage_tiles, weight.k_tiles - k_tile)))):
                    k, to = int32(k_tile * TILE + i * TILE), int32(stage * stage_bytes + i * subtile_bytes)
                    for b in range(boxes):
                        box_row = int32(info.row + b * box_rows)
                        tma_load_2d_hint(smem.u8, to, map_x, 0, k, box_row, barriers, full + stage, evict_last)
                        to = int32(to + box_rows * BLOCK_K_BYTES)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)
        griddepcontrol_launch_dependents()

    return tma_producer


@cache
def make_aux_producer(config, layout):
    """Make ``aux_producer(smem, aux_warp, lane, source, problem, tiles, k_tiles)``.

    Auxiliary warp ``aux_warp`` (0 to 2) copies gathered rows of x for every third stage.
    """
    full, empty, advance, stage_tiles = layout.full, layout.empty, make_advance(config.stages), config.stage_tiles
    row_index_offset, row_indices = layout.row_index_offset, layout.row_indices
    load_row_indices, copy_rows = make_load_row_indices(config, layout.x_tiles), make_copy_rows(config, layout.x_tiles)
    get_tile, (first_tile, next_tile) = make_get_tile(config, layout), make_tile_loop(1)

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, source, problem, tiles, k_tiles):
        stage, phase, skip = int32(0), uint32(1), int32(aux_warp)  # skip: stages before this warp's next one
        indices = int32(row_index_offset + aux_warp * row_indices)
        x_rows, row_bytes = source.x_rows, uniform(source.row_bytes)
        source = GatherSource(source.x, source.row_indices, x_rows, row_bytes, source.valid_bytes)
        tile = first_tile()
        while tile < tiles:
            info = get_tile(smem, problem, tile)
            load_row_indices(smem, indices, lane, source, info)
            for k_tile in range(0, k_tiles, stage_tiles):
                if skip == 0:
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    for i in range(x_tiles_of(int32(min(stage_tiles, k_tiles - k_tile)))):
                        to = int32(stage_tiles * stage + i)
                        x_tile = int32(k_tile // stage_tiles * stage_tiles + i)  # k_tile + i, as in `x_tiles_of`
                        copy_rows(smem, indices, lane, to, x_tile, source, info)
                    wait_rows()
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(smem.barriers, full + stage)
                skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return aux_producer


# Consumer warpgroups


def make_consumer(sizes, config, layout):
    """Make ``stage, phase = consumer(smem, output, warp, lane, stage, phase, k_tiles, tile)``, which computes a tile.

    It uses the smallest wgmma N in ``sizes`` that holds the tile's rows.
    """
    largest = make_consumer_of_size(sizes[0], config, layout)
    if len(sizes) == 1:
        return largest
    smaller, next_size = make_consumer(sizes[1:], config, layout), sizes[1]

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_tiles, tile):
        if tile.subtile_rows > next_size:
            stage, phase = largest(smem, output, warp, lane, stage, phase, k_tiles, tile)
        else:
            stage, phase = smaller(smem, output, warp, lane, stage, phase, k_tiles, tile)
        return stage, phase

    return consumer


def make_consumer_of_size(n, config, layout):
    """Make the main loop over k and the epilogue of a tile, for a wgmma of N = ``n``."""
    main_loop, (load_terms, epilogue) = make_main_loop(n, config, layout), make_terms_and_epilogue(n, config, layout)

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_tiles, tile):
        terms = load_terms(output.inputs, tile, warp, lane, output.n)
        stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_tiles)
        epilogue(smem, output, warp, lane, acc, acc, tile, terms)
        return stage, phase

    return consumer


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs; return it and its dynamic shared memory in bytes.

    A CTA has 128 threads for each consumer warpgroup and 128 for the producers.
    """
    check_w4_config(config)
    layout, gather = W4Layout(config), config.gather
    stages, full, empty, tile_info_offset = config.stages, layout.full, layout.empty, layout.tile_info_offset
    consumer_warps, warpgroups = layout.consumer_warps, config.warpgroups
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(layout.registers[0]), make_setmaxnreg_inc(layout.registers[1])
    count_tiles, tma_producer = make_count_tiles(config, layout), make_tma_producer(config, layout)
    consumer, aux_producer = make_consumer(config.mma_n, config, layout), make_aux_producer(config, layout)
    (first_tile, next_tile), early_weight = make_tile_loop(1), config.early_weight
    result_scale = float32(2.0**RESULT_EXPONENT)

    @cuda.jit
    def grouped_gemm_w4(
        map_x,
        weight,
        y,
        lengths,
        starts,
        groups,
        total_rows,
        capacity,
        n,
        n_tiles,
        k_tiles,
        x,
        row_indices,
        x_rows,
        row_bytes,
        valid_bytes,
        bias,
        row_weights,
        scatter_indices,
        y_rows,
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
                mbarrier_init(smem.barriers, full + stage, 1 + gather)
                mbarrier_init(smem.barriers, empty + stage, consumer_warps)
            fence_mbarrier_init()
        if not early_weight:
            griddepcontrol_wait()
        problem = Problem(lengths, starts, groups, total_rows, capacity)
        tiles = count_tiles(smem, problem, divide(int32(n_tiles + warpgroups - 1), warpgroups))
        if early_weight and warp != consumer_warps:  # that warp's TMA producer waits later
            griddepcontrol_wait()
        if warp >= consumer_warps:
            setmaxnreg_dec()
            if warp == consumer_warps and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                tma_producer(smem, map_x, Weight(weight, n_tiles, k_tiles), problem, tiles)
            if gather and warp > consumer_warps:
                source = GatherSource(x, row_indices, x_rows, row_bytes, valid_bytes)
                aux_producer(smem, warp - consumer_warps - 1, lane, source, problem, tiles, k_tiles)
        else:
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            u8, barriers = uniform_array(smem.u8), uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, smem.f32, barriers)
            warp = uniform(warp)
            scales = row_weights, row_weights  # of rows of x and of weight: not used
            inputs = EpilogueInputs(*scales, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows)
            output = EpilogueOperands(y, y, n, inputs)
            tile = first_tile()
            while tile < tiles:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, group = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # lane 0 releases the stage for all lanes
                row_count, subtile_rows = uniform(int32(rows & 0xFFFF)), uniform(int32(rows >> 16))
                output_tile = OutputTile(uniform(row), row_count, subtile_rows, column, result_scale, group)
                stage, phase = consumer(smem, output, warp, lane, stage, phase, k_tiles, output_tile)
                tile = next_tile(tile)

    return grouped_gemm_w4, layout.bytes
