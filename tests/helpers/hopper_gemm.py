"""A small warp-specialised GEMM with TMA, wgmma and stmatrix, for tests to compile and to run.

D (bf16) = 0.5 A B^T (e4m3). One producer thread loads a pipeline of stages by TMA, and two consumer warpgroups multiply
by wgmma. The epilogue writes the results to shared memory by stmatrix, swizzled, and TMA stores them.

Tile indices are 32-bit unsigned: a 64-bit division is a call, and next to a call the compiler drops both ``setmaxnreg``
and the overlap of wgmmas.
"""

from functools import cache

import numpy as np
from numba import cuda, int32, uint8, uint32, uint64

from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.matrix import stmatrix_x4
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_sys
from moe_numba.ptx.tma import tma_load_2d, tma_store_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_sync, elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

M, N, K = 128, 64, 128  # of a tile and of a stage
THREADS = 384
SIGNATURE = ("uint8*", "uint8*", "uint8*", "int32", "int32", "int32")


def shared_bytes(stages):
    return stages * (M + N) * K + M * N * 2


@cache
def make_gemm(stages):
    """Make ``gemm(map_a, map_b, map_d, tiles_m, tiles_n, k_blocks)``.

    The maps have a 128-byte swizzle and boxes (128, 128), (64, 128) and (64, 64).
    """
    stage_bytes, out_offset, accumulators = (M + N) * K, stages * (M + N) * K, N // 2
    zeros = (np.float32(0),) * accumulators
    reduce_registers, raise_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)
    tile, wait, fma = make_wgmma_tile(N, "e4m3"), make_wgmma_wait(N, 0), make_fma(N)
    wait_read = make_bulk_wait_group_read(0)

    @cuda.jit(device=True)
    def produce(smem, full, empty, map_a, map_b, tiles_m, tiles_n, k_blocks):
        fence_proxy_tensormap_acquire_sys(map_a, 0)  # the host copied these maps
        fence_proxy_tensormap_acquire_sys(map_b, 0)
        stage, phase = int32(0), uint32(1)
        tile_index = uint32(cuda.blockIdx.x)
        while tile_index < uint32(tiles_m * tiles_n):
            m = int32(uint32(tile_index % uint32(tiles_m)) * uint32(M))
            n = int32(uint32(tile_index // uint32(tiles_m)) * uint32(N))
            for k in range(k_blocks):
                mbarrier_wait_parity(empty, stage, phase)
                mbarrier_arrive_expect_tx(full, stage, stage_bytes)
                offset = int32(stage * stage_bytes)
                tma_load_2d(smem, offset, map_a, 0, k * K, m, full, stage)
                tma_load_2d(smem, offset + M * K, map_b, 0, k * K, n, full, stage)
                stage = int32(stage + int32(1))
                if stage == stages:
                    stage, phase = int32(0), uint32(phase ^ uint32(1))
            tile_index = uint32(tile_index + uint32(cuda.gridDim.x))

    @cuda.jit(device=True)
    def consume(smem, full, empty, map_d, tiles_m, tiles_n, k_blocks):
        group, thread = int32(cuda.threadIdx.x // 128 - 1), int32(cuda.threadIdx.x % 128)
        warp, lane = thread // 32, thread % 32
        stage, phase = int32(0), uint32(0)
        # Row and 16-byte chunk that this lane addresses for stmatrix: four matrices, two rows of two.
        row = int32(16 * warp + 8 * (lane // 8 % 2) + lane % 8)
        out = int32(out_offset + group * 64 * N * 2)
        if thread == 0:
            fence_proxy_tensormap_acquire_sys(map_d, 0)
        tile_index = uint32(cuda.blockIdx.x)
        while tile_index < uint32(tiles_m * tiles_n):
            m = int32(uint32(tile_index % uint32(tiles_m)) * uint32(M))
            n = int32(uint32(tile_index // uint32(tiles_m)) * uint32(N))
            total = zeros
            for _ in range(k_blocks):
                mbarrier_wait_parity(full, stage, phase)
                a = wgmma_descriptor(smem, stage * stage_bytes + group * 64 * K)
                b = wgmma_descriptor(smem, stage * stage_bytes + M * K)
                acc = wait(tile(a, b))
                if lane == 0:
                    mbarrier_arrive(empty, stage)
                total = fma(total, acc, np.float32(0.5))
                stage = int32(stage + int32(1))
                if stage == stages:
                    stage, phase = int32(0), uint32(phase ^ uint32(1))
            if thread == 0:
                wait_read()
            bar_sync(1 + group, 128)
            for j in range(0, N // 8, 2):
                chunk = int32((j + lane // 16) ^ (row % 8))
                stmatrix_x4(
                    smem,
                    out + row * (N * 2) + chunk * 16,
                    cvt_rn_bf16x2_f32(total[4 * j + 1], total[4 * j]),
                    cvt_rn_bf16x2_f32(total[4 * j + 3], total[4 * j + 2]),
                    cvt_rn_bf16x2_f32(total[4 * j + 5], total[4 * j + 4]),
                    cvt_rn_bf16x2_f32(total[4 * j + 7], total[4 * j + 6]),
                )
            fence_proxy_async_shared()
            bar_sync(1 + group, 128)
            if thread == 0:
                tma_store_2d(map_d, 0, n, m + group * 64, smem, out)
                bulk_commit_group()
            tile_index = uint32(tile_index + uint32(cuda.gridDim.x))
        if thread == 0:
            wait_read()

    @cuda.jit(launch_bounds=(THREADS, 1))
    def gemm(map_a, map_b, map_d, tiles_m, tiles_n, k_blocks):
        smem = cuda.shared.array(0, uint8, 1024)
        full = cuda.shared.array(stages, uint64)
        empty = cuda.shared.array(stages, uint64)
        if cuda.threadIdx.x == 0:
            for s in range(stages):
                mbarrier_init(full, s, 1)
                mbarrier_init(empty, s, 8)  # one arrival per consumer warp
            fence_mbarrier_init()
        cuda.syncthreads()
        if cuda.threadIdx.x < 128:
            reduce_registers()
            if cuda.threadIdx.x < 32 and elect_sync(FULL_MASK):  # tells the compiler that one thread issues the loads
                produce(smem, full, empty, map_a, map_b, tiles_m, tiles_n, k_blocks)
        else:
            raise_registers()
            consume(smem, full, empty, map_d, tiles_m, tiles_n, k_blocks)

    return gemm
