"""Grouped GEMM kernel for MXFP4 weights: persistent, warp-specialised CTAs that decode weights into registers.

The kernel computes the transposed product, as that of ``kernel.py``: rows of weight are wgmma's M, rows of x its N.
Weights are A, in registers: with 4.25 bits per weight the time of few rows is that of reading the weights, so they
should pass through shared memory once and as codes. Rows of x are B, in shared memory.

Producer warps: one thread issues the copies of a stage: for each consumer warpgroup a ``cp.async.bulk`` of one or two
packed units (see ``packing_mxfp4.py``), and TMA loads of x. With gathered rows, three auxiliary warps copy x instead.
Consumers: each warpgroup multiplies 64 rows of weight. A thread loads its codes of a unit with one 16-byte load,
decodes them to 16 registers of A, and issues four wgmmas, which run while it decodes the next unit.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.config import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, SharedMemory
from moe_numba.grouped_gemm.config_mxfp4 import Mxfp4Layout, check_mxfp4_config
from moe_numba.grouped_gemm.epilogue import EpilogueOperands, OutputTile
from moe_numba.grouped_gemm.epilogue_mxfp4 import make_terms_and_epilogue
from moe_numba.grouped_gemm.epilogue_terms import EpilogueInputs
from moe_numba.grouped_gemm.gather import GatherSource, make_copy_rows, make_load_row_indices, wait_rows
from moe_numba.grouped_gemm.packing_mxfp4 import CODE_BYTES, EXPONENTS, FIELDS, RESULT_EXPONENT, UNIT_BYTES
from moe_numba.grouped_gemm.scheduler import Problem, divide, make_count_tiles, make_get_tile, make_tile_loop
from moe_numba.ptx.arithmetic import mul_rn_bf16x2_high, mul_rn_bf16x2_low
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
from moe_numba.ptx.wgmma import make_wgmma_tile_rs, make_wgmma_wait, make_wgmma_wait_registers, wgmma_descriptor

STEPS = 4  # wgmmas of a unit, 16 elements of k each
REGISTERS = 4 * STEPS  # registers of A of a unit


# Producer warpgroup


@cache
def make_tma_producer(config, layout):
    """Make ``tma_producer(smem, map_x, weight, problem, tiles, n_units, k_units)``, which one thread executes.

    It looks up each tile and publishes it to the consumers with the tile's first stage.
    """
    stage_bytes, subtile_bytes, full, empty = layout.stage_bytes, layout.subtile_bytes, layout.full, layout.empty
    weight_offset, weight_bytes, tile_info_offset = layout.weight_offset, layout.weight_bytes, layout.tile_info_offset
    warpgroups, box_rows, gather, columns = config.warpgroups, config.box_rows, config.gather, config.columns
    stage_units = config.stage_units
    get_tile, advance = make_get_tile(config, layout), make_advance(config.stages)
    first_tile, next_tile = make_tile_loop(1)

    @cuda.jit(device=True)
    def tma_producer(smem, map_x, weight, problem, tiles, n_units, k_units):
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
            smem.i32[info + uint32(2)] = int32(n_tile * columns)
            smem.i32[info + uint32(3)] = g
            boxes = int32(0) if gather else divide(int32(subtile_rows + box_rows - 1), box_rows)
            unit_bytes = int32(boxes * (box_rows * BLOCK_K_BYTES) + warpgroups * UNIT_BYTES)
            first_unit = int64(g) * n_units
            for k_unit in range(0, k_units, stage_units):
                units = int32(min(stage_units, k_units - k_unit))
                mbarrier_wait_parity(barriers, empty + stage, phase)
                mbarrier_arrive_expect_tx(barriers, full + stage, int32(units * unit_bytes))
                for w in range(warpgroups):  # the last tile may lie partly beyond the weight: clamp it
                    unit = (first_unit + min(int32(n_tile * warpgroups + w), int32(n_units - 1))) * k_units + k_unit
                    to = int32(weight_offset + stage * weight_bytes + w * (stage_units * UNIT_BYTES))
                    size = int32(units * UNIT_BYTES)
                    bulk_load_hint(smem.u8, to, weight, unit * UNIT_BYTES, size, barriers, full + stage, evict_first)
                for u in range(units):
                    k, to = int32((k_unit + u) * 64), int32(stage * stage_bytes + u * subtile_bytes)
                    for b in range(boxes):
                        box_row = int32(row + b * box_rows)
                        tma_load_2d_hint(smem.u8, to, map_x, 0, k, box_row, barriers, full + stage, evict_last)
                        to = int32(to + box_rows * BLOCK_K_BYTES)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return tma_producer


@cache
def make_aux_producer(config, layout):
    """Make ``aux_producer(smem, aux_warp, lane, source, problem, tiles, k_units)``.

    Auxiliary warp ``aux_warp`` (0 to 2) copies the gathered rows of every third stage.
    """
    full, empty, advance = layout.full, layout.empty, make_advance(config.stages)
    row_index_offset, row_indices, stage_units = layout.row_index_offset, layout.row_indices, config.stage_units
    load_row_indices, copy_rows = make_load_row_indices(config, layout.units), make_copy_rows(config, layout.units)
    get_tile, (first_tile, next_tile) = make_get_tile(config, layout), make_tile_loop(1)

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, source, problem, tiles, k_units):
        stage, phase, skip = int32(0), uint32(1), int32(aux_warp)  # skip: stages before this warp's next one
        indices = int32(row_index_offset + aux_warp * row_indices)
        x_rows, row_bytes = source.x_rows, uniform(source.row_bytes)
        source = GatherSource(source.x, source.row_indices, x_rows, row_bytes, source.valid_bytes)
        tile = first_tile()
        while tile < tiles:
            info = get_tile(smem, problem, tile)
            load_row_indices(smem, indices, lane, source, info)
            for k_unit in range(0, k_units, stage_units):
                if skip == 0:
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    for u in range(min(stage_units, k_units - k_unit)):
                        copy_rows(smem, indices, lane, int32(stage_units * stage + u), int32(k_unit + u), source, info)
                    wait_rows()
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(smem.barriers, full + stage)
                skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return aux_producer


# Consumer warpgroups


@cuda.jit(device=True)
def shl(word, count):
    return uint32(word << uint32(count))


@cuda.jit(device=True)
def shr(word, count):
    return uint32(word >> uint32(count))


@cuda.jit(device=True)
def rotr(word, count):
    return uint32(shr(word, count) | shl(word, 32 - count))


@cuda.jit(device=True)
def fields(word):
    """Keep the bits of two e2m1 numbers that are at their places in a bf16."""
    return uint32(word & uint32(FIELDS))


@cuda.jit(device=True)
def decode_block(a, b, scales):
    """Decode the eight registers of a 32-column block from two words of codes.

    The low half of ``scales`` is the bf16 scale of the thread's row ``l // 4``, the high half that of eight rows below.
    """
    return (
        mul_rn_bf16x2_low(fields(a), scales),
        mul_rn_bf16x2_high(fields(shl(a, 6)), scales),
        mul_rn_bf16x2_low(fields(rotr(a, 4)), scales),
        mul_rn_bf16x2_high(fields(shl(a, 1) ^ shr(b, 6)), scales),
        mul_rn_bf16x2_low(fields(b), scales),
        mul_rn_bf16x2_high(fields(shl(b, 6)), scales),
        mul_rn_bf16x2_low(fields(rotr(b, 4)), scales),
        mul_rn_bf16x2_high(fields(shl(a, 2) ^ shl(b, 3)), scales),
    )


@cuda.jit(device=True)
def decode_unit(codes, scales):
    """Decode a unit: four words of codes and one of scales become a thread's 16 registers of A."""
    a_0, b_0, a_1, b_1 = codes
    word = uint32(scales)
    block_0 = decode_block(uint32(a_0), uint32(b_0), uint32(word & uint32(EXPONENTS)))
    block_1 = decode_block(uint32(a_1), uint32(b_1), uint32(rotr(word, 8) & uint32(EXPONENTS)))
    return block_0 + block_1


def make_consumer(sizes, config, layout):
    """Make ``stage, phase = consumer(smem, output, warp, lane, stage, phase, k_units, tile)``, which computes a tile.

    It uses the smallest wgmma N in ``sizes`` that holds the tile's rows.
    """
    largest = make_consumer_of_size(sizes[0], config, layout)
    if len(sizes) == 1:
        return largest
    smaller, next_size = make_consumer(sizes[1:], config, layout), sizes[1]

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_units, tile):
        if tile.subtile_rows > next_size:
            stage, phase = largest(smem, output, warp, lane, stage, phase, k_units, tile)
        else:
            stage, phase = smaller(smem, output, warp, lane, stage, phase, k_units, tile)
        return stage, phase

    return consumer


def make_consumer_of_size(n, config, layout):
    """Make the main loop over k and the epilogue of a tile, for a wgmma of N = ``n``."""
    make_main_loop = make_overlapped_loop if config.overlap else make_simple_loop
    main_loop, (load_terms, epilogue) = make_main_loop(n, config, layout), make_terms_and_epilogue(n, config, layout)

    @cuda.jit(device=True)
    def consumer(smem, output, warp, lane, stage, phase, k_units, tile):
        terms = load_terms(output.inputs, tile, warp, lane, output.n)
        stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_units)
        epilogue(smem, output, warp, lane, acc, acc, tile, terms)
        return stage, phase

    return consumer


@cache
def make_load_unit(config, layout):
    """Make ``codes, scales = load_unit(smem, warp, lane, stage, unit)``, which loads the thread's part of a unit."""
    weight_offset, stage_words, stage_units = layout.weight_offset, layout.weight_bytes // 4, config.stage_units
    unit_words, code_words = UNIT_BYTES // 4, CODE_BYTES // 4

    @cuda.jit(device=True)
    def load_unit(smem, warp, lane, stage, unit):
        first = int32(weight_offset // 4 + (warp >> 2) * (stage_units * unit_words))
        first = int32(first + stage * stage_words + unit * unit_words)
        codes = ld_shared_s32x4(smem.i32, int32(first + 4 * (32 * (warp & 3) + lane)))
        return codes, smem.i32[uint32(first + code_words + 8 * (warp & 3) + (lane >> 2))]

    return load_unit


@cache
def make_simple_loop(n, config, layout):
    """Make ``stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_units)`` with one set of registers of A.

    A warpgroup decodes a unit, multiplies, and waits. With large wgmmas the other warpgroup keeps the tensor cores busy
    while this one decodes, and the accumulators leave no registers for a second set.
    """
    wgmma, wait = make_wgmma_tile_rs(n, "bf16", STEPS), make_wgmma_wait(n, 0)
    wait_registers, load_unit = make_wgmma_wait_registers(REGISTERS, 0), make_load_unit(config, layout)
    stage_bytes, subtile_bytes, stage_units = layout.stage_bytes, layout.subtile_bytes, config.stage_units
    full, empty, advance, zeros = layout.full, layout.empty, make_advance(config.stages), (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_units):
        acc, left = zeros, int32(k_units)
        while left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            for unit in range(min(left, stage_units)):
                codes, scales = load_unit(smem, warp, lane, stage, int32(unit))
                a = decode_unit(codes, scales)
                acc = wgmma(acc, a, wgmma_descriptor(smem.u8, int32(stage * stage_bytes + unit * subtile_bytes)))
                wait_registers(a)
                acc = wait(acc)
            if lane == 0:
                mbarrier_arrive(smem.barriers, empty + stage)
            stage, phase = advance(stage, phase)
            left = int32(left - stage_units)
        return stage, phase, acc

    return main_loop


@cache
def make_overlapped_loop(n, config, layout):
    """Make ``stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_units)`` with two sets of registers of A.

    Units alternate between ``a_0`` and ``a_1``. Before a set is decoded anew, the thread waits for the wgmmas that read
    it, and releases the stage that they read; those of the other set may still run.
    """
    wgmma, wait = make_wgmma_tile_rs(n, "bf16", STEPS), make_wgmma_wait(n, 0)
    wait_unit, wait_both = make_wgmma_wait_registers(REGISTERS, 1), make_wgmma_wait_registers(2 * REGISTERS, 0)
    load_unit, advance, single = make_load_unit(config, layout), make_advance(config.stages), config.stage_units == 1
    stage_bytes, subtile_bytes, full, empty = layout.stage_bytes, layout.subtile_bytes, layout.full, layout.empty
    zeros, no_registers = (np.float32(0),) * (n // 2), (np.uint32(0),) * REGISTERS

    @cuda.jit(device=True)
    def release(smem, lane, stage):
        if lane == 0 and stage >= 0:
            mbarrier_arrive(smem.barriers, empty + stage)

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_units):
        acc, a_0, a_1 = zeros, no_registers, no_registers
        stage_0, stage_1 = int32(-1), int32(-1)  # to be released when the wgmmas of a_0 and of a_1 have completed
        left = int32(k_units)
        while left > 1:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, scales_0 = load_unit(smem, warp, lane, stage, int32(0))
            b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            if not single:  # load the second unit before the first is decoded, so that the latency is hidden
                codes_1, scales_1 = load_unit(smem, warp, lane, stage, int32(1))
            wait_unit(a_0)
            if single:
                release(smem, lane, stage_0)
            a_0 = decode_unit(codes_0, scales_0)
            acc = wgmma(acc, a_0, b)
            if single:
                stage_0 = stage
                stage, phase = advance(stage, phase)
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                codes_1, scales_1 = load_unit(smem, warp, lane, stage, int32(0))
                b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            else:
                b = uint64(b + uint64(subtile_bytes >> 4))
            wait_unit(a_1)
            release(smem, lane, stage_1)
            a_1 = decode_unit(codes_1, scales_1)
            acc = wgmma(acc, a_1, b)
            stage_1 = stage
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        if left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, scales_0 = load_unit(smem, warp, lane, stage, int32(0))
            wait_unit(a_0)
            if single:
                release(smem, lane, stage_0)
            a_0 = decode_unit(codes_0, scales_0)
            acc = wgmma(acc, a_0, wgmma_descriptor(smem.u8, int32(stage * stage_bytes)))
            stage_0 = stage
            stage, phase = advance(stage, phase)
        wait_both(a_0 + a_1)
        acc = wait(acc)
        release(smem, lane, stage_0)
        release(smem, lane, stage_1)
        return stage, phase, acc

    return main_loop


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs; return it and its dynamic shared memory in bytes.

    A CTA has 128 threads for each consumer warpgroup and 128 for the producers.
    """
    check_mxfp4_config(config)
    layout, gather = Mxfp4Layout(config), config.gather
    stages, full, empty, tile_info_offset = config.stages, layout.full, layout.empty, layout.tile_info_offset
    consumer_warps, warpgroups, full_arrivals = layout.consumer_warps, config.warpgroups, 2 if gather else 1
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(layout.registers[0]), make_setmaxnreg_inc(layout.registers[1])
    count_tiles, tma_producer = make_count_tiles(config, layout), make_tma_producer(config, layout)
    consumer, aux_producer = make_consumer(config.mma_n, config, layout), make_aux_producer(config, layout)
    first_tile, next_tile = make_tile_loop(1)

    @cuda.jit
    def grouped_gemm_mxfp4(
        map_x,
        weight,
        y,
        lengths,
        starts,
        groups,
        total_rows,
        capacity,
        n,
        n_units,
        k_units,
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
                mbarrier_init(smem.barriers, full + stage, full_arrivals)
                mbarrier_init(smem.barriers, empty + stage, consumer_warps)
            fence_mbarrier_init()
        griddepcontrol_wait()
        problem = Problem(lengths, starts, groups, total_rows, capacity)
        tiles = count_tiles(smem, problem, divide(int32(n_units + warpgroups - 1), warpgroups))
        if warp >= consumer_warps:
            setmaxnreg_dec()
            if warp == consumer_warps and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                tma_producer(smem, map_x, weight, problem, tiles, n_units, k_units)
                griddepcontrol_launch_dependents()
            if gather and warp > consumer_warps:
                source = GatherSource(x, row_indices, x_rows, row_bytes, valid_bytes)
                aux_producer(smem, warp - consumer_warps - 1, lane, source, problem, tiles, k_units)
        else:
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            u8, barriers = uniform_array(smem.u8), uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, smem.f32, barriers)
            warp = uniform(warp)
            inputs = EpilogueInputs(bias, bias, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows)
            output = EpilogueOperands(y, y, n, inputs)
            tile = first_tile()
            while tile < tiles:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, group = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # lane 0 releases the stage for all lanes
                scale = float32(2.0**RESULT_EXPONENT)
                row_count, subtile_rows = uniform(int32(rows & 0xFFFF)), uniform(int32(rows >> 16))
                output_tile = OutputTile(uniform(row), row_count, subtile_rows, column, scale, group)
                stage, phase = consumer(smem, output, warp, lane, stage, phase, k_units, output_tile)
                tile = next_tile(tile)

    return grouped_gemm_mxfp4, layout.bytes
