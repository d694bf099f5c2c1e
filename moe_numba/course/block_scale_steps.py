"""Steps of the block-scaled grouped GEMM: parts that replace those of the package's kernel, and launches of the result.

A step is the kernel of ``grouped_gemm/kernel_block_scaled.py`` with some of its factories exchanged; see
``block_scale_diagnoses.py`` for variants that are no steps.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numba import cuda, float32, int32, int64, uint32

from moe_numba.course.simulate import changed_module
from moe_numba.expert_parallel.compile_ahead import KernelDefinition
from moe_numba.grouped_gemm import kernel_block_scaled
from moe_numba.grouped_gemm.config import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, THREADS
from moe_numba.grouped_gemm.config_block_scaled import BLOCK_M, BOX_ROWS, SCALED_COLUMNS, BlockScaledConfig
from moe_numba.grouped_gemm.kernel_block_scaled import (
    make_load_scales,
    make_release_stage,
    make_schedule,
    make_tile_loop,
)
from moe_numba.grouped_gemm.launch_tma import SIGNATURE as TMA_SIGNATURE
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from moe_numba.ptx.memory import load_nc_u32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.device import persistent_ctas
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.tensor_map import tensor_map_template

# The fourth argument, the scales of y, is used by silu_and_mul only; here it is the memory of a trace.
SIGNATURE = *TMA_SIGNATURE[:3], "int32*", *TMA_SIGNATURE[4:]
TRACE_FIELDS = 3  # start and end of a tile in nanoseconds, and its CTA plus 1


# Consumers


@cache
def make_multiply_in_order(config, layout):
    """Make ``acc, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, row)``.

    It loads the scales of a stage after it has issued the stage's wgmma.
    """
    stage_bytes, full, advance = layout.stage_bytes, layout.full, make_advance(config.stages)
    n, load_scales, release_stage = config.block_n, make_load_scales(layout), make_release_stage(layout)
    wgmma, wait, fma = make_wgmma_tile(n, "e4m3"), make_wgmma_wait(n, 0), make_fma_blocks(n, SCALED_COLUMNS)
    zeros, three = (np.float32(0),) * (n // 2), config.weight_scales == 3

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        acc = zeros
        for _ in range(k_blocks):
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            offset = int32(stage * stage_bytes)
            x, weight = wgmma_descriptor(smem.u8, int32(offset + x_offset)), wgmma_descriptor(smem.u8, offset)
            product = wgmma(x, weight)
            a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)
            product = wait(product)
            release_stage(smem, stage, lane)
            a_0, b_0, a_1, b_1, a_2, b_2 = a * w_0, b * w_0, a * w_1, b * w_1, a * w_2, b * w_2
            stage, phase = advance(stage, phase)
            acc = fma(acc, product, (a_0, b_0, a_1, b_1, a_2, b_2) if three else (a_0, b_0, a_1, b_1))
        return acc, stage, phase

    return multiply


# Producers


@cache
def make_scales_by_one(config, layout):
    """Make ``aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks)``.

    Each of three warps copies the scales of every third stage, 4 bytes per row of x. It has neither gather nor masks.
    """
    empty, full, scale_offset, stage_scales = layout.empty, layout.full, layout.scale_offset, layout.stage_scales
    columns, weight_scales, advance = config.columns, config.weight_scales, make_advance(config.stages)
    get_tile, (first_tile, next_tile) = make_schedule(config, layout), make_tile_loop(config.cluster_size)
    rows_per_lane = BLOCK_M // 32

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks):
        stage, phase, skip = int32(0), uint32(1), int32(aux_warp)
        x_scales, row_step = cuda.local.array(rows_per_lane, float32), int64(32) * k_blocks
        tile = first_tile()
        while tile < tiles:
            info, _ = get_tile(smem, problem, tile)
            n_block = int32(min(int32(info.n_tile * columns + lane * SCALED_COLUMNS) >> 7, n_blocks - 1))
            weight_index = (int64(info.group) * n_blocks + n_block) * k_blocks
            x_index = int64(info.row + lane) * k_blocks
            for k_block in range(k_blocks):
                if skip == 0:
                    weight_scale = scales.weight[weight_index + k_block] if lane < weight_scales else float32(0)
                    index = x_index + k_block
                    for i in range(rows_per_lane):
                        x_scales[i] = scales.x[index] if lane + 32 * i < info.rows else float32(0)
                        index += row_step
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    offset = int32(scale_offset + stage * stage_scales + lane)
                    for i in range(rows_per_lane):
                        smem.f32[uint32(offset + 32 * i)] = x_scales[i]
                    if lane < weight_scales:
                        smem.f32[uint32(offset + BLOCK_M)] = weight_scale
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(smem.barriers, full + stage)
                skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return aux_producer


@cache
def make_scales_by_four(config, layout):
    """As :func:`make_scales_by_one`, with one load of 16 bytes per row of x for four stages, by one warp.

    k is a multiple of 512, so that the loads are aligned.
    """
    empty, full, scale_offset, stage_scales = layout.empty, layout.full, layout.scale_offset, layout.stage_scales
    columns, weight_scales, advance = config.columns, config.weight_scales, make_advance(config.stages)
    get_tile, (first_tile, next_tile) = make_schedule(config, layout), make_tile_loop(config.cluster_size)
    rows_per_lane, count = BLOCK_M // 32, BLOCK_M // 8

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, source, problem, tiles, k_blocks, n_blocks):
        stage, phase = int32(0), uint32(1)
        x_scales, row_step = cuda.local.array(count, float32), int64(32) * k_blocks
        weight = cuda.local.array(4, float32)
        tile = first_tile() if aux_warp == 0 else tiles
        while tile < tiles:
            info, _ = get_tile(smem, problem, tile)
            n_block = int32(min(int32(info.n_tile * columns + lane * SCALED_COLUMNS) >> 7, n_blocks - 1))
            weight_index = (int64(info.group) * n_blocks + n_block) * k_blocks
            x_index = int64(info.row + lane) * k_blocks
            for k_block in range(0, k_blocks, 4):
                p, q, r, s = load_nc_u32x4(scales.weight, weight_index + k_block)
                weight[0], weight[1] = uint_as_float(p), uint_as_float(q)
                weight[2], weight[3] = uint_as_float(r), uint_as_float(s)
                index = x_index + k_block
                for i in range(rows_per_lane):
                    p, q, r, s = uint32(0), uint32(0), uint32(0), uint32(0)
                    if lane + 32 * i < info.rows:
                        p, q, r, s = load_nc_u32x4(scales.x, index)
                    index += row_step
                    x_scales[4 * i], x_scales[4 * i + 1] = uint_as_float(p), uint_as_float(q)
                    x_scales[4 * i + 2], x_scales[4 * i + 3] = uint_as_float(r), uint_as_float(s)
                for part in range(4):
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    offset = int32(scale_offset + stage * stage_scales + lane)
                    for i in range(rows_per_lane):
                        smem.f32[uint32(offset + 32 * i)] = x_scales[4 * i + part]
                    if lane < weight_scales:
                        smem.f32[uint32(offset + BLOCK_M)] = weight[part]
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(smem.barriers, full + stage)
                    stage, phase = advance(stage, phase)
            tile = next_tile(tile)

    return aux_producer


# Kernels and launches


def make_step_kernel(config: BlockScaledConfig, **parts: Callable) -> tuple[Any, int]:
    """Return the package's kernel with other factories of these names, and its shared memory in bytes."""
    if not parts:
        return kernel_block_scaled.make_kernel(config)
    module = changed_module(kernel_block_scaled)
    for name, part in parts.items():
        if not hasattr(module, name):
            raise ValueError(f"{name!r} is not the name of a factory of {kernel_block_scaled.__name__}")
        setattr(module, name, part)
    return module.make_kernel(config)


def make_kernel_of(config: BlockScaledConfig, parts: tuple) -> Any:
    """Return the kernel of :func:`make_step_kernel`; ``parts`` are pairs of a name and a factory."""
    return make_step_kernel(config, **dict(parts))[0]


def definition(config: BlockScaledConfig, parts: dict[str, Callable]) -> KernelDefinition:
    """Return what :func:`compile_ahead` needs to compile a step."""
    return KernelDefinition(make_kernel_of, (config, tuple(parts.items())), SIGNATURE, THREADS)


class StepLaunch:
    """Launches a variant of the block-scaled kernel for problems of one shape.

    Parameters
    ----------
    config : BlockScaledConfig
    problem : object
        With ``x``, ``weight``, ``x_scale``, ``w_scale`` (contiguous), ``seqlens``, ``cu_seqlens`` and ``out``.
    **parts : factory
        As for :func:`make_step_kernel`.

    Calling it with a problem returns ``problem.out``. A kernel with a traced consumer records its tiles in
    ``trace``, int32 [rows, tiles of columns, 3]: start and end in nanoseconds and the CTA plus 1, at the first row of
    each tile.
    """

    def __init__(self, config: BlockScaledConfig, problem: Any, **parts: Callable):
        self.config, self.parts = config, parts
        kernel, shared_bytes = make_step_kernel(config, **parts)
        groups, n, k = problem.weight.shape
        device, pair = problem.x.device, config.cluster_size
        options = dict(launch_bounds=THREADS, shared_bytes=shared_bytes, cluster=pair if pair > 1 else None)
        self.start = launcher(kernel, SIGNATURE, device.index or 0, dependent=True, **options)
        self.x_map = tensor_map_template(problem.x, (BOX_ROWS, BLOCK_K_BYTES), swizzle=128, name="x")
        box = 1, config.half_rows, BLOCK_K_BYTES
        self.weight_map = tensor_map_template(problem.weight, box, swizzle=128, name="weight")
        self.sizes = groups, len(problem.x), 0, n, k, -(-k // BLOCK_K_BYTES), 1, 0
        self.grid = persistent_ctas(device, 2)
        self.trace = torch.zeros(
            len(problem.x), -(-n // config.columns), TRACE_FIELDS, dtype=torch.int32, device=device
        )

    def __call__(self, problem: Any) -> torch.Tensor:
        """Launch the kernel on the current stream."""
        p, lengths = problem, address(problem.seqlens)
        pointers = p.out, self.trace, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale
        maps = self.x_map(p.x), self.weight_map(p.weight)
        unused = address(p.x), lengths, len(p.x), 0  # of gather
        self.start(self.grid, THREADS, None, *maps, *map(address, pointers), *self.sizes, *unused)
        return p.out

    def __repr__(self):
        config, parts = self.config, ", ".join(part.__name__ for part in self.parts.values()) or "the package's parts"
        cluster = ", clusters of 2" * (config.cluster_size == 2)
        return f"tiles of {BLOCK_M} x {config.block_n}, {config.stages} stages{cluster}; {parts}"
