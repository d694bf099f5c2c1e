"""Our Numba port of hpc-ops' FP8 grouped GEMM, with which the package's own kernel is compared.

Every group has its own tensor maps of x and y, which ``update_grouped_tma`` writes. Persistent CTAs of one producer
and two consumer warpgroups compute the tiles.

The port corrects hpc-ops in four places: a CTA acquires the maps that were made on the device before it uses them, the
mbarrier initialisation is fenced, an input without rows causes no division by zero, and each warp rather than each
warpgroup arrives at the empty barrier.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, int32, int64, uint8, uint32, uint64

from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.scheduler import device
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.update_grouped_tma import MAP_BYTES
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
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_gpu
from moe_numba.ptx.tma import tma_load_2d, tma_load_3d, tma_store_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_sync, elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

TILE_N = TILE_K = 128  # kTileN, rows of weight; kTileK, bytes of a row
WARPGROUP_N = TILE_N // 2  # rows of weight of a consumer warpgroup
THREADS = 384  # 256 consumers, 128 producers
CONSUMER_WARPS = 8


class HpcOpsConfig(NamedTuple):
    """Compile-time configuration of the main kernel."""

    tile_m: int = 64  # kTileM, rows of x in a tile: a multiple of 8
    stages: int = 8  # kStage
    schedule: str = "vertical"  # or "horizontal"
    max_groups: int = 256
    whole_x: bool = False  # not in hpc-ops: one tensor map of all rows of x instead of one per group


class SharedMemory(NamedTuple):
    """Typed views of the dynamic shared memory of a CTA; all begin at the same address."""

    u8: Any
    i32: Any
    barriers: Any  # uint64


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Offsets in the dynamic shared memory of a CTA, in elements of the view that is named."""

    config: HpcOpsConfig

    @property
    def x_bytes(self) -> int:
        return self.config.tile_m * TILE_K

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: the tile of weight, then that of x."""
        return TILE_N * TILE_K + self.x_bytes

    @property
    def output_offset(self) -> int:
        """u8: an output tile for each consumer warpgroup, with 64 bf16 elements per row."""
        return self.config.stages * self.stage_bytes

    @property
    def output_bytes(self) -> int:
        """Bytes of a warpgroup's output tile."""
        return self.config.tile_m * WARPGROUP_N * 2

    @property
    def full(self) -> int:
        """barriers: index of the first stage's full barrier ("readable" in hpc-ops)."""
        return (self.output_offset + 2 * self.output_bytes) // 8

    @property
    def empty(self) -> int:
        """barriers: index of the first stage's empty barrier ("writable" in hpc-ops)."""
        return self.full + self.config.stages

    @property
    def tiles_offset(self) -> int:
        """i32: the scheduler's table of tiles per group."""
        return 2 * (self.empty + self.config.stages)

    @property
    def bytes(self) -> int:
        return 4 * (self.tiles_offset + self.config.max_groups + 1)


@cache
def make_producer(config, layout):
    """Make ``producer(smem, map_x, map_weight, maps, cu_seqlens, groups, n_tiles, k_blocks)``, for one thread."""
    stage_bytes, tile_m = layout.stage_bytes, config.tile_m
    full, empty, tiles_offset = layout.full, layout.empty, layout.tiles_offset
    get_next_tile, whole_x, advance = getattr(device, config.schedule), config.whole_x, make_advance(config.stages)

    @cuda.jit(device=True)
    def producer(smem, map_x, map_weight, maps, cu_seqlens, groups, n_tiles, k_blocks):
        barriers = smem.barriers
        stage, phase = int32(0), uint32(1)
        g, tiles_before, acquired = int32(0), int32(0), int32(-1)
        tile = int32(cuda.blockIdx.x)
        while g < groups:
            g, tiles_before, m, n = get_next_tile(smem.i32, tiles_offset, groups, n_tiles, tile, g, tiles_before)
            if g < groups:
                td_x, row = int64(2 * MAP_BYTES) * g, int32(m * tile_m)
                if whole_x:
                    row = int32(row + cu_seqlens[g])
                elif g != acquired:
                    fence_proxy_tensormap_acquire_gpu(maps, td_x)
                    acquired = g
                for k_block in range(k_blocks):
                    offset = int32(stage * stage_bytes)
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    mbarrier_arrive_expect_tx(barriers, full + stage, stage_bytes)
                    k = int32(k_block * TILE_K)
                    tma_load_3d(smem.u8, offset, map_weight, 0, k, int32(n * TILE_N), g, barriers, full + stage)
                    offset = int32(offset + TILE_N * TILE_K)
                    if whole_x:
                        tma_load_2d(smem.u8, offset, map_x, 0, k, row, barriers, full + stage)
                    else:
                        tma_load_2d(smem.u8, offset, maps, td_x, k, row, barriers, full + stage)
                    stage, phase = advance(stage, phase)
                tile = int32(tile + cuda.gridDim.x)

    return producer


@cache
def make_store_smem(config):
    """Make ``store_smem(smem, offset, warp, lane, acc)``.

    A warp writes its accumulators to its warpgroup's output tile as bf16, transposed and in TMA's 128-byte swizzle.
    """
    pairs, odd = config.tile_m // 16, config.tile_m % 16 == 8
    last = 8 * pairs

    @cuda.jit(device=True)
    def store_smem(smem, offset, warp, lane, acc):
        row, vector = int32(8 * (lane >> 4) + (lane & 7)), int32(2 * (warp & 3) + ((lane >> 3) & 1))
        vector_offset = int32(offset + row * (2 * WARPGROUP_N) + ((vector ^ (row & 7)) << 4))
        for j in range(pairs):
            stmatrix_x4_trans(
                smem,
                vector_offset + j * (32 * WARPGROUP_N),
                cvt_rn_bf16x2_f32(acc[8 * j + 1], acc[8 * j]),
                cvt_rn_bf16x2_f32(acc[8 * j + 3], acc[8 * j + 2]),
                cvt_rn_bf16x2_f32(acc[8 * j + 5], acc[8 * j + 4]),
                cvt_rn_bf16x2_f32(acc[8 * j + 7], acc[8 * j + 6]),
            )
        if odd:
            stmatrix_x2_trans(
                smem,
                vector_offset + pairs * (32 * WARPGROUP_N),
                cvt_rn_bf16x2_f32(acc[last + 1], acc[last]),
                cvt_rn_bf16x2_f32(acc[last + 3], acc[last + 2]),
            )

    return store_smem


@cache
def make_consumer(config, layout):
    """Make ``consumer(smem, maps, y_scale, warp, lane, groups, n_tiles, k_blocks)``, for the consumer warpgroups."""
    stage_bytes, tile_m = layout.stage_bytes, config.tile_m
    full, empty, tiles_offset = layout.full, layout.empty, layout.tiles_offset
    output_offset, output_bytes = layout.output_offset, layout.output_bytes
    get_next_tile, store_smem = getattr(device, config.schedule), make_store_smem(config)
    wgmma, wait, fma = make_wgmma_tile(tile_m, "e4m3"), make_wgmma_wait(tile_m, 0), make_fma(tile_m)
    zeros, wait_read, advance = (
        (np.float32(0),) * (tile_m // 2),
        make_bulk_wait_group_read(0),
        make_advance(config.stages),
    )

    @cuda.jit(device=True)
    def consumer(smem, maps, y_scale, warp, lane, groups, n_tiles, k_blocks):
        warpgroup, leader = int32(warp >> 2), int32((warp & 3) == 0 and elect_sync(FULL_MASK) != 0)
        output, stage, phase = int32(output_offset + warpgroup * output_bytes), int32(0), uint32(0)
        g, tiles_before, acquired = int32(0), int32(0), int32(-1)
        tile = int32(cuda.blockIdx.x)
        while g < groups:
            g, tiles_before, m, n = get_next_tile(smem.i32, tiles_offset, groups, n_tiles, tile, g, tiles_before)
            if g < groups:
                acc, scale = zeros, y_scale[g]
                for _ in range(k_blocks):
                    mbarrier_wait_parity(smem.barriers, full + stage, phase)
                    a = wgmma_descriptor(smem.u8, stage * stage_bytes + warpgroup * (WARPGROUP_N * TILE_K))
                    b = wgmma_descriptor(smem.u8, stage * stage_bytes + TILE_N * TILE_K)
                    product = wait(wgmma(a, b))
                    if lane == 0:
                        mbarrier_arrive(smem.barriers, empty + stage)
                    acc = fma(acc, product, scale)
                    stage, phase = advance(stage, phase)
                if leader:
                    wait_read()  # the TMA store of the previous tile has read the output tile
                bar_sync(1 + warpgroup, 128)
                store_smem(smem.u8, output, warp, lane, acc)
                fence_proxy_async_shared()
                bar_sync(1 + warpgroup, 128)
                if leader:
                    td_y = int64(2 * MAP_BYTES) * g + MAP_BYTES
                    if g != acquired:
                        fence_proxy_tensormap_acquire_gpu(maps, td_y)
                        acquired = g
                    column = int32(n * TILE_N + warpgroup * WARPGROUP_N)
                    tma_store_2d(maps, td_y, column, int32(m * tile_m), smem.u8, output)
                    bulk_commit_group()
                tile = int32(tile + cuda.gridDim.x)
        if leader:
            wait_read()

    return consumer


@cache
def make_kernel(config):
    """Make the main kernel, for any number of CTAs of 384 threads; return it and its shared memory in bytes.

    ``map_weight`` has three dimensions and a two-dimensional box. ``maps``, ``tiles`` and ``cu_tiles`` are written by
    ``update_grouped_tma``. ``map_x`` and ``cu_seqlens`` are used with ``whole_x`` only.
    """
    layout = SharedMemoryLayout(config)
    if config.tile_m % 8 or not 8 <= config.tile_m <= 256 or layout.bytes > 227 * 1024:
        raise ValueError(
            f"{config}: tile_m must be a multiple of 8 up to 256, and {layout.bytes} bytes of shared memory fit 232448"
        )
    stages, full, empty, tiles_offset = config.stages, layout.full, layout.empty, layout.tiles_offset
    vertical = config.schedule == "vertical"
    producer, consumer = make_producer(config, layout), make_consumer(config, layout)
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)

    @cuda.jit
    def group_gemm_pertensor_fp8(map_x, map_weight, maps, cu_seqlens, tiles, cu_tiles, y_scale, groups, n, k):
        smem = SharedMemory(
            cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, int32, 1024), cuda.shared.array(0, uint64, 1024)
        )
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(smem.barriers, full + stage, 1)
                mbarrier_init(smem.barriers, empty + stage, CONSUMER_WARPS)
            fence_mbarrier_init()
        griddepcontrol_wait()
        for i in range(thread, groups + 1, THREADS):
            if vertical:
                smem.i32[uint32(tiles_offset + i)] = cu_tiles[i]
            elif i < groups:
                smem.i32[uint32(tiles_offset + i)] = tiles[i]
        cuda.syncthreads()
        n_tiles, k_blocks = int32((n + TILE_N - 1) >> 7), int32((k + TILE_K - 1) >> 7)
        if warp >= CONSUMER_WARPS:
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):
                producer(smem, map_x, map_weight, maps, cu_seqlens, groups, n_tiles, k_blocks)
        else:
            setmaxnreg_inc()
            consumer(smem, maps, y_scale, warp, lane, groups, n_tiles, k_blocks)

    return group_gemm_pertensor_fp8, layout.bytes
