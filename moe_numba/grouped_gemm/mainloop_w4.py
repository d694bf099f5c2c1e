"""Main loops over k of the grouped GEMM with 4-bit weights: decode weights into registers, and multiply.

All are ``stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_tiles)``. MXFP4 weights for bf16 are scaled as
they are decoded, so wgmma adds up all of k. Other weights are not: wgmma multiplies a block of 32 columns into partial
accumulators, and the thread adds them, times the scale of the block, to its accumulators ("promotion").
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, uint64

from moe_numba.grouped_gemm.decode_w4 import (
    decode_e4m3_block,
    decode_int4_block,
    decode_scaled_tile,
    make_load_tile,
    make_load_unscaled_tile,
)
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.matrix import make_fma_shared
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.wgmma import make_wgmma_tile_rs, make_wgmma_wait, make_wgmma_wait_registers, wgmma_descriptor

STEPS = 4  # wgmmas of a tile in bf16, 16 elements of k each
REGISTERS = 4 * STEPS  # registers of A of a tile in bf16


def make_main_loop(n, config, layout):
    """Make the main loop of a configuration, for a wgmma of N = ``n``."""
    if config.scales_in_registers:
        return (make_overlapped_loop if config.overlap else make_simple_loop)(n, config, layout)
    make_loop = make_overlapped_promoting_loop if config.overlap else make_promoting_loop
    return make_loop(n, config, layout)


@cache
def make_simple_loop(n, config, layout):
    """Make a main loop for scaled weights with one set of registers of A.

    A warpgroup decodes a tile, multiplies, and waits. With large wgmmas the other warpgroup keeps the tensor cores busy
    while this one decodes, and the accumulators leave no registers for a second set.
    """
    wgmma, wait = make_wgmma_tile_rs(n, "bf16", STEPS), make_wgmma_wait(n, 0)
    wait_registers, load_tile = make_wgmma_wait_registers(REGISTERS, 0), make_load_tile(config, layout)
    stage_bytes, subtile_bytes, stage_tiles = layout.stage_bytes, layout.subtile_bytes, config.stage_tiles
    full, empty, advance, zeros = layout.full, layout.empty, make_advance(config.stages), (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, left = zeros, int32(k_tiles)
        while left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            for tile in range(min(left, stage_tiles)):
                codes, scales = load_tile(smem, warp, lane, stage, int32(tile))
                a = decode_scaled_tile(codes, scales)
                acc = wgmma(acc, a, wgmma_descriptor(smem.u8, int32(stage * stage_bytes + tile * subtile_bytes)))
                wait_registers(a)
                acc = wait(acc)
            if lane == 0:
                mbarrier_arrive(smem.barriers, empty + stage)
            stage, phase = advance(stage, phase)
            left = int32(left - stage_tiles)
        return stage, phase, acc

    return main_loop


@cache
def make_overlapped_loop(n, config, layout):
    """Make a main loop for scaled weights with two sets of registers of A.

    Tiles alternate between ``a_0`` and ``a_1``. Before a set is decoded anew, the thread waits for the wgmmas that read
    it, and releases the stage that they read; those of the other set may still run.
    """
    wgmma, wait = make_wgmma_tile_rs(n, "bf16", STEPS), make_wgmma_wait(n, 0)
    wait_tile, wait_both = make_wgmma_wait_registers(REGISTERS, 1), make_wgmma_wait_registers(2 * REGISTERS, 0)
    load_tile, advance, single = make_load_tile(config, layout), make_advance(config.stages), config.stage_tiles == 1
    stage_bytes, subtile_bytes, full, empty = layout.stage_bytes, layout.subtile_bytes, layout.full, layout.empty
    zeros, no_registers = (np.float32(0),) * (n // 2), (np.uint32(0),) * REGISTERS

    @cuda.jit(device=True)
    def release(smem, lane, stage):
        if lane == 0 and stage >= 0:
            mbarrier_arrive(smem.barriers, empty + stage)

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, a_0, a_1 = zeros, no_registers, no_registers
        stage_0, stage_1 = int32(-1), int32(-1)  # to be released when the wgmmas of a_0 and of a_1 have completed
        left = int32(k_tiles)
        while left > 1:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, scales_0 = load_tile(smem, warp, lane, stage, int32(0))
            b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            if not single:  # load the second tile before the first is decoded, so that the latency is hidden
                codes_1, scales_1 = load_tile(smem, warp, lane, stage, int32(1))
            wait_tile(a_0)
            if single:
                release(smem, lane, stage_0)
            a_0 = decode_scaled_tile(codes_0, scales_0)
            acc = wgmma(acc, a_0, b)
            if single:
                stage_0 = stage
                stage, phase = advance(stage, phase)
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                codes_1, scales_1 = load_tile(smem, warp, lane, stage, int32(0))
                b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            else:
                b = uint64(b + uint64(subtile_bytes >> 4))
            wait_tile(a_1)
            release(smem, lane, stage_1)
            a_1 = decode_scaled_tile(codes_1, scales_1)
            acc = wgmma(acc, a_1, b)
            stage_1 = stage
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        if left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, scales_0 = load_tile(smem, warp, lane, stage, int32(0))
            wait_tile(a_0)
            if single:
                release(smem, lane, stage_0)
            a_0 = decode_scaled_tile(codes_0, scales_0)
            acc = wgmma(acc, a_0, wgmma_descriptor(smem.u8, int32(stage * stage_bytes)))
            stage_0 = stage
            stage, phase = advance(stage, phase)
        wait_both(a_0 + a_1)
        acc = wait(acc)
        release(smem, lane, stage_0)
        release(smem, lane, stage_1)
        return stage, phase, acc

    return main_loop


# Promotion


class Promotion(NamedTuple):
    """What both promoting loops use.

    ``decode(a, b)`` returns the registers of A of a block of 32 columns, and ``multiply(a, b)`` its partial
    accumulators; ``waits[i](partial, a)`` waits for all wgmmas but the last i.
    ``finish_stage(smem, lane, stage, acc, total)`` releases a stage. With scales of x per block, 128 elements of k as a
    stage has them, it first adds the stage's sums ``acc``, times the scales of the columns, to ``total``.
    """

    load_tile: Any
    decode: Any
    multiply: Any
    waits: tuple
    promote: Any
    finish_stage: Any
    zeros: tuple
    block_step: int  # from a block of 32 columns to the next, in a descriptor, which counts 16 bytes
    tile_step: int  # from a tile of 64 columns to the next


@cache
def make_promotion(n, config, layout):
    """Make the :class:`Promotion` of a configuration, for a wgmma of N = ``n``."""
    is_e4m3, by_block = config.dtype == "e4m3", config.x_scaling == "block"
    steps = 1 if is_e4m3 else 2  # wgmmas of a block of 32 columns
    scale_columns, zeros, empty = make_fma_shared(n), (np.float32(0),) * (n // 2), layout.empty
    offset, stage_scales, pitch = layout.x_scale_offset, layout.row_values, layout.scale_pitch

    @cuda.jit(device=True)
    def finish_stage(smem, lane, stage, acc, total):
        if by_block:
            total = scale_columns(total, acc, smem.f32, int32(offset + stage * stage_scales + (lane & 3) * pitch))
            acc = zeros
            cuda.syncwarp()  # lane 0 releases the stage for all lanes
        if lane == 0:
            mbarrier_arrive(smem.barriers, empty + stage)
        return acc, total

    return Promotion(
        load_tile=make_load_unscaled_tile(config, layout),
        decode=decode_e4m3_block if is_e4m3 else decode_int4_block,
        multiply=make_wgmma_tile_rs(n, config.dtype, steps, accumulate=False),
        waits=tuple(make_wgmma_wait(n, pending, 4 * steps) for pending in range(4)),
        promote=make_fma_blocks(n, n),
        finish_stage=finish_stage,
        zeros=zeros,
        block_step=2 if is_e4m3 else 4,
        tile_step=4 if is_e4m3 else layout.subtile_bytes >> 4,
    )


@cache
def make_promoting_loop(n, config, layout):
    """Make a main loop with one set of partial accumulators: decode a block, multiply, wait, and promote.

    With large wgmmas the other warpgroup keeps the tensor cores busy meanwhile.
    """
    load_tile, decode, multiply, (wait, *_), promote, finish_stage, zeros, step, tile_step = make_promotion(
        n, config, layout
    )
    stage_bytes, full, advance, by_block = (
        layout.stage_bytes,
        layout.full,
        make_advance(config.stages),
        _by_block(config),
    )

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, total, left = zeros, zeros, int32(k_tiles)
        while left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            for tile in range(min(left, 2)):
                codes, factors = load_tile(smem, warp, lane, stage, int32(tile))
                a = decode(codes[0], codes[1])
                acc = promote(acc, wait(multiply(a, b), a), (factors[0], factors[1]))
                a = decode(codes[2], codes[3])
                partial = wait(multiply(a, uint64(b + uint64(step))), a)
                acc = promote(acc, partial, (factors[2], factors[3]))
                b = uint64(b + uint64(tile_step))
            acc, total = finish_stage(smem, lane, stage, acc, total)
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        return stage, phase, total if by_block else acc

    return main_loop


@cache
def make_overlapped_promoting_loop(n, config, layout):
    """Make a main loop with a set of partial accumulators and of registers of A for each of a stage's four blocks.

    While wgmma multiplies a block, the thread decodes the next one, or adds up those before. No wgmma is in flight from
    one iteration to the next: its accumulators would be copied, which serialises all.
    """
    load_tile, decode, multiply, waits, promote, finish_stage, zeros, step, tile_step = make_promotion(
        n, config, layout
    )
    wait_0, wait_1, wait_2, wait_3 = waits
    stage_bytes, full, advance, by_block = (
        layout.stage_bytes,
        layout.full,
        make_advance(config.stages),
        _by_block(config),
    )

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, total, left = zeros, zeros, int32(k_tiles)
        while left > 1:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, factors_0 = load_tile(smem, warp, lane, stage, int32(0))
            codes_1, factors_1 = load_tile(smem, warp, lane, stage, int32(1))
            b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            a_0 = decode(codes_0[0], codes_0[1])
            partial_0 = multiply(a_0, b)
            a_1 = decode(codes_0[2], codes_0[3])
            partial_1 = multiply(a_1, uint64(b + uint64(step)))
            a_2 = decode(codes_1[0], codes_1[1])
            partial_2 = multiply(a_2, uint64(b + uint64(tile_step)))
            a_3 = decode(codes_1[2], codes_1[3])
            partial_3 = multiply(a_3, uint64(b + uint64(tile_step + step)))
            acc = promote(acc, wait_3(partial_0, a_0), (factors_0[0], factors_0[1]))
            acc = promote(acc, wait_2(partial_1, a_1), (factors_0[2], factors_0[3]))
            acc = promote(acc, wait_1(partial_2, a_2), (factors_1[0], factors_1[1]))
            acc = promote(acc, wait_0(partial_3, a_3), (factors_1[2], factors_1[3]))
            acc, total = finish_stage(smem, lane, stage, acc, total)
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        if left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, factors_0 = load_tile(smem, warp, lane, stage, int32(0))
            b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            a_0 = decode(codes_0[0], codes_0[1])
            partial_0 = multiply(a_0, b)
            a_1 = decode(codes_0[2], codes_0[3])
            partial_1 = multiply(a_1, uint64(b + uint64(step)))
            acc = promote(acc, wait_1(partial_0, a_0), (factors_0[0], factors_0[1]))
            acc = promote(acc, wait_0(partial_1, a_1), (factors_0[2], factors_0[3]))
            acc, total = finish_stage(smem, lane, stage, acc, total)
            stage, phase = advance(stage, phase)
        return stage, phase, total if by_block else acc

    return main_loop


def _by_block(config):
    return config.x_scaling == "block"
