"""Main loops over k for weights that are decoded without their scales: MXFP4 for FP8, and int4.

wgmma multiplies the columns of k that share scales into partial accumulators, and the thread adds these, times the
scales of its two rows of weight, to its accumulators ("promotion"). Columns that share a scale are a block of 32, which
is half of a weight tile, or with int4 also one tile or the two of a stage.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, uint64

from moe_numba.grouped_gemm.w4.dequantize import decode_e4m3_block, decode_int4_block, make_load_unscaled_tile
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.matrix import make_fma_shared
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.wgmma import make_wgmma_tile_rs, make_wgmma_wait, wgmma_descriptor


def make_promoting_main_loop(n, config, layout):
    """Make the main loop of a configuration, for a wgmma of N = ``n``."""
    # With groups of a tile and four warpgroups, registers do not suffice for two tiles of A and 64 rows of x.
    if config.group_size > TILE or (config.group_size == TILE and (config.warpgroups == 2 or n <= 48)):
        return make_group_promoting_loop(n, config, layout)
    return (make_overlapped_promoting_loop if config.overlap else make_promoting_loop)(n, config, layout)


class Promotion(NamedTuple):
    """What all promoting loops use.

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


@cache
def make_group_promoting_loop(n, config, layout):
    """Make a main loop for int4 whose scales are those of a tile, or of both tiles of a stage.

    While wgmma multiplies a tile, the thread decodes the next one of the stage. wgmma adds up the tiles of a group of
    128, so that a stage takes one wait and one promotion.
    """
    load_tile, decode, *_, promote, finish_stage, zeros, _, tile_step = make_promotion(n, config, layout)
    multiply, add = (make_wgmma_tile_rs(n, "bf16", 4, accumulate=accumulate) for accumulate in (False, True))
    wait, wait_both = make_wgmma_wait(n, 0, 16), make_wgmma_wait(n, 0, 32)  # 16 registers of A a tile
    stage_bytes, full, advance = layout.stage_bytes, layout.full, make_advance(config.stages)
    is_stage = config.group_size == 2 * TILE

    @cuda.jit(device=True)
    def decode_tile(codes):
        return decode(codes[0], codes[1]) + decode(codes[2], codes[3])

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, left = zeros, int32(k_tiles)
        while left > 1:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, factors_0 = load_tile(smem, warp, lane, stage, int32(0))
            codes_1, factors_1 = load_tile(smem, warp, lane, stage, int32(1))
            b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            a_0 = decode_tile(codes_0)
            partial = multiply(a_0, b)
            a_1 = decode_tile(codes_1)
            b = uint64(b + uint64(tile_step))
            if is_stage:
                partial = wait_both(add(partial, a_1, b), a_0 + a_1)
            else:
                acc = promote(acc, wait(partial, a_0), (factors_0[0], factors_0[1]))
                partial = wait(multiply(a_1, b), a_1)
            acc = promote(acc, partial, (factors_1[0], factors_1[1]))
            finish_stage(smem, lane, stage, acc, acc)
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        if left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, factors_0 = load_tile(smem, warp, lane, stage, int32(0))
            a_0 = decode_tile(codes_0)
            partial = multiply(a_0, wgmma_descriptor(smem.u8, int32(stage * stage_bytes)))
            acc = promote(acc, wait(partial, a_0), (factors_0[0], factors_0[1]))
            finish_stage(smem, lane, stage, acc, acc)
            stage, phase = advance(stage, phase)
        return stage, phase, acc

    return main_loop


def _by_block(config):
    return config.x_scaling == "block"
