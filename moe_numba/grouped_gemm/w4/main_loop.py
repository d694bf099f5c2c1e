"""Main loops over k of the grouped GEMM with MXFP4 weights: decode weights into registers, and multiply.

All are ``stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_tiles)``. Weights are scaled
as they are decoded, so wgmma adds up all of k.

Up to 16 rows of x are multiplied by ``mma.sync`` instead. On an H200 a wgmma of 64 rows takes 7.5 ns for 8 columns and
9.6 ns for 32, with A in registers and four warpgroups; as many ``mma.sync`` for 8 columns take 3.7 ns (notebook 06b).
"""

from functools import cache

import numpy as np
from numba import cuda, int32, uint64

from moe_numba.grouped_gemm.w4.dequantize import decode_scaled_tile, make_load_tile
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from moe_numba.ptx.mma import make_ldmatrix_x4, make_mma
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.wgmma import make_wgmma_tile_rs, make_wgmma_wait, make_wgmma_wait_registers, wgmma_descriptor

STEPS = 4  # wgmmas of a tile, 16 elements of k each
REGISTERS = 4 * STEPS  # registers of A of a tile
MMA_SYNC_ROWS = 16  # rows of x up to which mma.sync multiplies


def make_main_loop(n, config, layout):
    """Make the main loop of a configuration, for a wgmma of N = ``n``."""
    if n <= MMA_SYNC_ROWS and config.stage_tiles == 2:
        return make_mma_sync_loop(n, config, layout)
    return (make_overlapped_loop if config.overlap else make_simple_loop)(n, config, layout)


@cache
def make_mma_sync_loop(n, config, layout):
    """Make a main loop for up to 16 rows of x, by ``mma.sync``.

    Its registers of A and of the accumulators are those of wgmma. Each warp loads the rows of x as B by ``ldmatrix``:
    lane ``8 i + r`` addresses vector i, and then vector ``i + 4``, of 16 bytes of row r, which the swizzle of TMA has
    put to place ``i ^ r``.
    """
    mma, load_rows = make_mma("bf16", 16, n), make_ldmatrix_x4(tuple(range(0, 128 * n, 1024)))
    load_tile, advance, zeros = make_load_tile(config, layout), make_advance(config.stages), (np.float32(0),) * (n // 2)
    stage_bytes, subtile_bytes, full, empty = layout.stage_bytes, layout.subtile_bytes, layout.full, layout.empty
    has_two = n > 8

    @cuda.jit(device=True)
    def multiply(acc, a, b, c):
        """Add the products of a tile: ``b`` has the rows of x for its first 32 elements of k, ``c`` for the others."""
        acc = mma(acc, a[0:4], b[0:2] + b[4:6] if has_two else b[0:2])
        acc = mma(acc, a[4:8], b[2:4] + b[6:8] if has_two else b[2:4])
        acc = mma(acc, a[8:12], c[0:2] + c[4:6] if has_two else c[0:2])
        return mma(acc, a[12:16], c[2:4] + c[6:8] if has_two else c[2:4])

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, left, row = zeros, int32(k_tiles), int32(lane & 7)
        vector = int32(128 * row + ((lane >> 3 ^ row) << 4))
        while left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            first = int32(stage * stage_bytes + vector)
            codes, scales = load_tile(smem, warp, lane, stage, int32(0))
            b, c = load_rows(smem.u8, first), load_rows(smem.u8, int32(first ^ 64))
            if left > 1:  # load the second tile before the first is decoded, so that the latency is hidden
                second = int32(first + subtile_bytes)
                codes_1, scales_1 = load_tile(smem, warp, lane, stage, int32(1))
                b_1, c_1 = load_rows(smem.u8, second), load_rows(smem.u8, int32(second ^ 64))
                acc = multiply(acc, decode_scaled_tile(codes, scales), b, c)
                acc = multiply(acc, decode_scaled_tile(codes_1, scales_1), b_1, c_1)
            else:
                acc = multiply(acc, decode_scaled_tile(codes, scales), b, c)
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(smem.barriers, empty + stage)
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        return stage, phase, acc

    return main_loop


@cache
def make_simple_loop(n, config, layout):
    """Make a main loop with one set of registers of A.

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
    """Make a main loop with two sets of registers of A.

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
