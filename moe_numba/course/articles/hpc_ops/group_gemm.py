"""hpc-ops' grouped GEMM as the document describes it, in Numba: what this package's own kernel is measured against.

Every group has tensor maps of its own for its tokens and for its results, which ``update_grouped_tma`` makes (see
``document_update``). Then persistent blocks of one loading and two multiplying warpgroups walk over the tiles.

Where this differs from hpc-ops, it mends: maps made on the device are acquired before use, barriers are fenced, no
group at all is no division by zero, and every warp, not every warpgroup, says that it is done with a stage.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint8, uint32, uint64

from moe_numba.course.articles.hpc_ops.scheduler import device
from moe_numba.course.articles.hpc_ops.update_grouped_tma import MAP
from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.matrix import stmatrix_x2_trans, stmatrix_x4_trans
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_wait
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_gpu
from moe_numba.ptx.tma import tma_load_2d, tma_load_3d, tma_store_2d
from moe_numba.ptx.warpgroup import bar_sync, elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

TILE_N = TILE_K = 128  # kTileN, in rows of the weights; kTileK, in bytes of a row
HALF = TILE_N // 2  # of the weights' rows: a warpgroup's
THREADS = 384  # 256 multiply, 128 load
WARPS = 8  # that multiply
FULL = 0xFFFFFFFF


class Constants(NamedTuple):
    """What the main kernel is compiled for."""

    tokens: int = 64  # of a tile: kTileM, a multiple of 8
    stages: int = 8  # kStage
    schedule: str = "vertical"  # or "horizontal"
    groups: int = 256  # most
    whole_x: bool = False  # beyond the document: one map of all tokens, in place of one for each group


@dataclass(frozen=True)
class Layout:
    """Where things lie in the main kernel's shared memory, which is all dynamic."""

    constants: Constants

    @property
    def x_bytes(self):
        return self.constants.tokens * TILE_K

    @property
    def stage_bytes(self):
        """The weights' tile, then the tokens'."""
        return TILE_N * TILE_K + self.x_bytes

    @property
    def out_at(self):
        """Two tiles of results, a token's 64 elements of bf16 a row."""
        return self.constants.stages * self.stage_bytes

    @property
    def half_bytes(self):
        return self.constants.tokens * HALF * 2

    @property
    def readable(self):
        """In barriers."""
        return (self.out_at + 2 * self.half_bytes) // 8

    @property
    def writable(self):
        return self.readable + self.constants.stages

    @property
    def tiles_at(self):
        """In integers: the scheduler's table."""
        return 2 * (self.writable + self.constants.stages)

    @property
    def bytes(self):
        return 4 * (self.tiles_at + self.constants.groups + 1)


@cache
def make_load(constants, layout):
    """``load(...)``: the producer, one thread."""
    stages, stage_bytes, tokens = constants.stages, layout.stage_bytes, constants.tokens
    readable, writable, tiles_at = layout.readable, layout.writable, layout.tiles_at
    get_next_tile, whole_x = getattr(device, constants.schedule), constants.whole_x

    @cuda.jit(device=True)
    def load(smem, table, bars, map_x, map_weight, maps, cu_seqlens, groups, across, k_blocks):
        stage, phase = int32(0), uint32(1)
        g, before, acquired = int32(0), int32(0), int32(-1)
        block = int32(cuda.blockIdx.x)
        while g < groups:
            g, before, m, n = get_next_tile(table, tiles_at, groups, across, block, g, before)
            if g < groups:
                td_x, first = int64(2 * MAP) * g, int32(m * tokens)
                if whole_x:
                    first = int32(first + cu_seqlens[g])
                elif g != acquired:
                    fence_proxy_tensormap_acquire_gpu(maps, td_x)
                    acquired = g
                for k in range(k_blocks):
                    to = int32(stage * stage_bytes)
                    mbarrier_wait_parity(bars, writable + stage, phase)
                    mbarrier_arrive_expect_tx(bars, readable + stage, stage_bytes)
                    at = int32(k * TILE_K)
                    tma_load_3d(smem, to, map_weight, 0, at, int32(n * TILE_N), g, bars, readable + stage)
                    to = int32(to + TILE_N * TILE_K)
                    if whole_x:
                        tma_load_2d(smem, to, map_x, 0, at, first, bars, readable + stage)
                    else:
                        tma_load_2d(smem, to, maps, td_x, at, first, bars, readable + stage)
                    stage = int32(stage + 1)
                    if stage == stages:
                        stage, phase = int32(0), uint32(phase ^ uint32(1))
                block = int32(block + cuda.gridDim.x)

    return load


@cache
def make_put(constants):
    """``put(smem, out, warp, lane, total)``: a warp's results into its warpgroup's tile, swizzled as TMA expects it."""
    pairs, odd = constants.tokens // 16, constants.tokens % 16 == 8
    last = 8 * pairs

    @cuda.jit(device=True)
    def put(smem, out, warp, lane, total):
        token, chunk = int32(8 * (lane >> 4) + (lane & 7)), int32(2 * (warp & 3) + ((lane >> 3) & 1))
        at = int32(out + token * (2 * HALF) + ((chunk ^ (token & 7)) << 4))
        for j in range(pairs):
            stmatrix_x4_trans(
                smem,
                at + j * (32 * HALF),
                cvt_rn_bf16x2_f32(total[8 * j + 1], total[8 * j]),
                cvt_rn_bf16x2_f32(total[8 * j + 3], total[8 * j + 2]),
                cvt_rn_bf16x2_f32(total[8 * j + 5], total[8 * j + 4]),
                cvt_rn_bf16x2_f32(total[8 * j + 7], total[8 * j + 6]),
            )
        if odd:
            stmatrix_x2_trans(
                smem,
                at + pairs * (32 * HALF),
                cvt_rn_bf16x2_f32(total[last + 1], total[last]),
                cvt_rn_bf16x2_f32(total[last + 3], total[last + 2]),
            )

    return put


@cache
def make_multiply(constants, layout):
    """``multiply(...)``: the consumers, two warpgroups; each has 64 of the weights' rows."""
    stages, stage_bytes, tokens = constants.stages, layout.stage_bytes, constants.tokens
    readable, writable, tiles_at = layout.readable, layout.writable, layout.tiles_at
    out_at, half_bytes = layout.out_at, layout.half_bytes
    get_next_tile, put = getattr(device, constants.schedule), make_put(constants)
    tile, wait, fma = make_wgmma_tile(tokens, "e4m3"), make_wgmma_wait(tokens, 0), make_fma(tokens)
    zeros, wait_read = (np.float32(0),) * (tokens // 2), make_bulk_wait_group_read(0)

    @cuda.jit(device=True)
    def multiply(smem, table, bars, maps, y_scale, warp, lane, groups, across, k_blocks):
        half, leads = int32(warp >> 2), int32((warp & 3) == 0 and elect_sync(FULL) != 0)
        out, stage, phase = int32(out_at + half * half_bytes), int32(0), uint32(0)
        g, before, acquired = int32(0), int32(0), int32(-1)
        block = int32(cuda.blockIdx.x)
        while g < groups:
            g, before, m, n = get_next_tile(table, tiles_at, groups, across, block, g, before)
            if g < groups:
                total, scale = zeros, y_scale[g]
                for _ in range(k_blocks):
                    mbarrier_wait_parity(bars, readable + stage, phase)
                    a = wgmma_descriptor(smem, stage * stage_bytes + half * (HALF * TILE_K))
                    b = wgmma_descriptor(smem, stage * stage_bytes + TILE_N * TILE_K)
                    product = wait(tile(a, b))
                    if lane == 0:
                        mbarrier_arrive(bars, writable + stage)
                    total = fma(total, product, scale)
                    stage = int32(stage + 1)
                    if stage == stages:
                        stage, phase = int32(0), uint32(phase ^ uint32(1))
                if leads:
                    wait_read()  # of the tile before
                bar_sync(1 + half, 128)
                put(smem, out, warp, lane, total)
                fence_proxy_async_shared()
                bar_sync(1 + half, 128)
                if leads:
                    td_y = int64(2 * MAP) * g + MAP
                    if g != acquired:
                        fence_proxy_tensormap_acquire_gpu(maps, td_y)
                        acquired = g
                    tma_store_2d(maps, td_y, int32(n * TILE_N + half * HALF), int32(m * tokens), smem, out)
                    bulk_commit_group()
                block = int32(block + cuda.gridDim.x)
        if leads:
            wait_read()

    return multiply


@cache
def make_kernel(constants):
    """The main kernel, for a grid of any number of blocks of 384 threads, and its shared memory in bytes.

    ``map_weight`` is a map of three dimensions with a box of two, ``maps``, ``tiles`` and ``cu_tiles`` are what
    ``update_grouped_tma`` wrote. ``map_x`` and ``cu_seqlens`` are used if ``whole_x``.
    """
    layout = Layout(constants)
    stages, readable, writable, tiles_at = constants.stages, layout.readable, layout.writable, layout.tiles_at
    vertical = constants.schedule == "vertical"
    load, multiply = make_load(constants, layout), make_multiply(constants, layout)
    release_registers, request_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)

    @cuda.jit
    def group_gemm_pertensor_fp8(map_x, map_weight, maps, cu_seqlens, tiles, cu_tiles, y_scale, groups, n_out, k):
        smem = cuda.shared.array(0, uint8, 1024)
        table = cuda.shared.array(0, int32, 1024)
        bars = cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(bars, readable + stage, 1)
                mbarrier_init(bars, writable + stage, WARPS)
            fence_mbarrier_init()
        griddepcontrol_wait()
        for i in range(thread, groups + 1, THREADS):
            if vertical:
                table[uint32(tiles_at + i)] = cu_tiles[i]
            elif i < groups:
                table[uint32(tiles_at + i)] = tiles[i]
        cuda.syncthreads()
        across, k_blocks = int32((n_out + TILE_N - 1) >> 7), int32((k + TILE_K - 1) >> 7)
        if warp >= WARPS:
            release_registers()
            if warp == WARPS and elect_sync(FULL):
                load(smem, table, bars, map_x, map_weight, maps, cu_seqlens, groups, across, k_blocks)
        else:
            request_registers()
            multiply(smem, table, bars, maps, y_scale, warp, lane, groups, across, k_blocks)

    return group_gemm_pertensor_fp8, layout.bytes
