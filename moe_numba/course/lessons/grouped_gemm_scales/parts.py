"""Parts of the steps of the block-scaled grouped GEMM that replace those of the package's kernel.

They are factories with the signatures of those in ``kernel.py``; see ``steps.py``.
Where a step has no factors, their memory of a stage holds scales: those of x from [0], of weight from [BLOCK_M] on.
"""

import re
from functools import cache, reduce

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from moe_numba.course.lessons.grouped_gemm_scales import kernel as kernel_in_parts
from moe_numba.course.lessons.grouped_gemm_scales.kernel import make_release_stage
from moe_numba.grouped_gemm.block_scaled.config import (
    BLOCK_M,
    BUFFER_BYTES,
    BUFFER_COLUMNS,
    ROW_BYTES,
    BlockScaledConfig,
    BlockScaledLayout,
)
from moe_numba.grouped_gemm.block_scaled.pairs import make_look_up_tile
from moe_numba.grouped_gemm.common.constants import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, MAX_SHARED_BYTES
from moe_numba.grouped_gemm.common.scheduler import make_tile_loop
from moe_numba.ptx.accumulators import make_fma_blocks, make_for_each_chunk
from moe_numba.ptx.arithmetic import float_as_int, int_as_float
from moe_numba.ptx.matrix import stmatrix_rows
from moe_numba.ptx.mbarrier import mbarrier_arrive, mbarrier_wait_parity
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4, st_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import tma_load_3d_hint
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.changed_source import changed_source, define, source_of

# Consumers


@cache
def make_load_scales(layout):
    """Make ``a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)``: of rows ``row`` and ``row + 8``, and of weight."""
    factor_offset, stage_factors = layout.factor_offset, layout.stage_factors

    @cuda.jit(device=True)
    def load_scales(smem, stage, row):
        offset = int32(factor_offset + stage * stage_factors)
        w_0, w_1, w_2, _ = ld_shared_s32x4(smem.i32, int32(offset + BLOCK_M))
        a, b = smem.f32[uint32(offset + row)], smem.f32[uint32(offset + row + 8)]
        return a, b, int_as_float(w_0), int_as_float(w_1), int_as_float(w_2)

    return load_scales


@cache
def make_multiply_by_scales(config, layout):
    """Make ``acc, stage, phase = multiply(smem, lane, stage, phase, k_blocks, x_offset, row)``.

    A thread loads the scales of a stage and multiplies those of x by those of weight.
    """
    stage_bytes, full, advance = layout.stage_bytes, layout.full, make_advance(config.stages)
    n, load_scales, release_stage = config.block_n, make_load_scales(layout), make_release_stage(layout)
    wgmma, wait, fma = make_wgmma_tile(n, "e4m3"), make_wgmma_wait(n, 0), make_fma_blocks(n, config.scaled_columns)
    zeros, three = (np.float32(0),) * (n // 2), config.weight_scales == 3

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        acc = zeros
        for _ in range(k_blocks):
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)
            a, b = (a * w_0, a * w_1, a * w_2), (b * w_0, b * w_1, b * w_2)
            offset = int32(stage * stage_bytes)
            x, weight = wgmma_descriptor(smem.u8, int32(offset + x_offset)), wgmma_descriptor(smem.u8, offset)
            product = wait(wgmma(x, weight))
            release_stage(smem, stage, lane)
            stage, phase = advance(stage, phase)
            acc = fma(acc, product, (a[0], b[0], a[1], b[1], a[2], b[2]) if three else (a[0], b[0]))
        return acc, stage, phase

    return multiply


def _define(name, source, namespace, **names):
    """Define a factory ``name`` from source text; a module of this name finds it in this one."""
    return define(source, {**namespace, "__name__": __name__, **names}, f"{name}.py")[name]


_BY_FACTORS = (
    ("A thread loads the scales of a stage and multiplies those of x by those of weight.", "A thread loads factors."),
    ("n, load_scales, release_stage", "n, load_factors, release_stage"),
    ("make_load_scales(layout)", "make_load_factors(layout)"),
    ("a, b, w_0, w_1, w_2 = load_scales(", "a, b = load_factors("),
    ("            a, b = (a * w_0, a * w_1, a * w_2), (b * w_0, b * w_1, b * w_2)\n", ""),
    ("def make_multiply_by_scales(", "def make_multiply_by_factors("),
)
make_multiply_by_factors = _define(
    "make_multiply_by_factors",
    reduce(lambda source, pair: changed_source(source, *pair), _BY_FACTORS, source_of(make_multiply_by_scales)),
    vars(kernel_in_parts),
)


# Epilogue


class OneBufferLayout(BlockScaledLayout):
    """Shared memory of a kernel whose warps have one buffer of 64 columns, which they use several times per tile."""

    @property
    def epilogue_warp_bytes(self) -> int:
        return BUFFER_BYTES


def check_one_buffer_config(config: BlockScaledConfig) -> None:
    """Raise for a configuration for which :class:`OneBufferLayout` is too large."""
    if (num_bytes := OneBufferLayout(config).bytes) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {num_bytes} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}")


@cache
def make_store_by_lanes(n, layout, first_buffer=0):
    """Make ``store(smem, output, warp, lane, acc, row, rows, column)``: store ``n`` columns of a warp.

    Lanes load rows from the warp's only buffer and store them, 64 columns at a time; ``first_buffer`` is not used.
    """
    epilogue_offset = layout.epilogue_offset

    @cuda.jit(device=True)
    def store_columns(first_value, values, smem, output, warp, lane, row, rows, column):
        column = int32(column + 2 * first_value)  # a thread has half of the accumulators of one
        if column < output.n:
            buffer, t = int32(epilogue_offset + warp * BUFFER_BYTES), int32(lane & 15)
            stmatrix_rows(smem.u8, int32(buffer + t * ROW_BYTES + (((t & 7) ^ (lane >> 4)) << 4)), values)
            cuda.syncwarp()
            vector, pitch = int32(lane & 7), int32(output.n >> 1)
            y_index = int64(row) * pitch + (column >> 1)
            # A lane whose 8 columns lie beyond y stores nothing.
            valid = rows if column + 8 * vector < output.n else int32(0)
            for i in range(4):
                t = int32(4 * i + (lane >> 3))
                a, b, c, d = ld_shared_s32x4(smem.i32, int32(buffer + t * ROW_BYTES + ((vector ^ (t & 7)) << 4)) >> 2)
                if t < valid:
                    st_global_s32x4(output.y, y_index + int64(t) * pitch + vector * 4, a, b, c, d)
            cuda.syncwarp()  # the next columns overwrite the buffer

    store_chunks = make_for_each_chunk(n // 2, BUFFER_COLUMNS // 2, store_columns)

    @cuda.jit(device=True)
    def store(smem, output, warp, lane, acc, row, rows, column):
        store_chunks(acc, smem, output, warp, lane, row, rows, column)

    return store


# Producers


def three_aux_warps(config):
    """Return the number of auxiliary warps, and of those that arrive at a stage's full barrier: one of three."""
    return AUX_PRODUCER_WARPS, 1


@cache
def make_scales_by_one(config, layout):
    """Make ``aux_producer(smem, aux_warp, lane, scales, strides, problem, tiles, k_blocks, n_blocks)``.

    Each of three warps copies the scales of every third stage, 4 bytes per row of x. It has neither gather nor masks.
    """
    empty, full, factor_offset, stage_factors = layout.empty, layout.full, layout.factor_offset, layout.stage_factors
    columns, width, weight_scales = config.columns, config.scaled_columns, config.weight_scales
    advance, get_tile = make_advance(config.stages), make_look_up_tile(config, layout)
    (first_tile, next_tile), rows_per_lane = make_tile_loop(config.cluster_size), BLOCK_M // 32

    @cuda.jit(device=True)
    def aux_producer(smem, aux_warp, lane, scales, strides, problem, tiles, k_blocks, n_blocks):
        stage, phase, skip = int32(0), uint32(1), int32(aux_warp)  # skip: stages before this warp's next one
        x_scales, row_step = cuda.local.array(rows_per_lane, float32), int64(32) * k_blocks
        tile = first_tile()
        while tile < tiles:
            info, _ = get_tile(smem, problem, tile)
            n_block = int32(min(int32(info.n_tile * columns + lane * width) >> 7, n_blocks - 1))
            weight_index = (int64(info.group) * n_blocks + n_block) * k_blocks
            x_index = int64(info.row + lane) * k_blocks
            for k_block in range(k_blocks):
                if skip == 0:
                    # Load before waiting for the stage, so that the latency is hidden.
                    weight_scale = scales.weight[weight_index + k_block] if lane < weight_scales else float32(0)
                    index = x_index + k_block
                    for i in range(rows_per_lane):
                        x_scales[i] = scales.x[index] if lane + 32 * i < info.rows else float32(0)
                        index += row_step
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    offset = int32(factor_offset + stage * stage_factors + lane)
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
def make_load_weight_of_one_cta(config):
    """Make ``load_weight(smem, offset, map_weight, k, column, second, group, full, policy, shares)``.

    It loads the tile of weight of a stage in two halves, from rows ``column`` and ``second`` of weight.
    """
    half_bytes = config.half_rows * BLOCK_K_BYTES

    @cuda.jit(device=True)
    def load_weight(smem, offset, map_weight, k, column, second, group, full, policy, shares):
        barriers = smem.barriers
        to = int32(offset + half_bytes)
        tma_load_3d_hint(smem.u8, offset, map_weight, 0, k, column, group, barriers, full, policy)
        tma_load_3d_hint(smem.u8, to, map_weight, 0, k, second, group, barriers, full, policy)

    return load_weight


@cache
def make_write_scales(layout):
    """Make ``write(smem, stage, row, scale, a, b, c)``: write a row's scale, and with the first row those of weight."""
    factor_offset, stage_factors = layout.factor_offset, layout.stage_factors

    @cuda.jit(device=True)
    def write(smem, stage, row, scale, a, b, c):
        to = int32(factor_offset + stage * stage_factors)
        smem.f32[uint32(to + row)] = scale
        if row == 0:
            a, b, c = float_as_int(a), float_as_int(b), float_as_int(c)
            st_shared_s32x4(smem.i32, int32(to + BLOCK_M), a, b, c, int32(0))

    return write


def _without_look_ahead(factory, name, look_up, **names):
    """Define a producer's factory that looks up a tile when it begins with it."""
    loop = "        while tile < tiles:\n"
    source = changed_source(factory, f"        {look_up}{loop}", f"{loop}            {look_up}")
    source = changed_source(source, f"                if k_block == look_up_at:\n                    {look_up}", "")
    source = re.sub(r" +look_up_at = .*\n", "", source)
    source = changed_source(source, f"def {factory.__name__}(", f"def {name}(")
    return _define(name, source, vars(kernel_in_parts), **names)


_LOOK_UP_SHARED = "info, shares_weight = get_tile(smem, problem, tile)\n"
make_tma_producer_without_look_ahead = _without_look_ahead(
    kernel_in_parts.make_tma_producer, "make_tma_producer_without_look_ahead", _LOOK_UP_SHARED
)
make_tma_producer_of_one_cta = _without_look_ahead(
    kernel_in_parts.make_tma_producer,
    "make_tma_producer_of_one_cta",
    _LOOK_UP_SHARED,
    make_load_weight=make_load_weight_of_one_cta,
)
_LOOK_UP = "info, _ = get_tile(smem, problem, tile)\n"
make_factors_without_look_ahead = _without_look_ahead(
    kernel_in_parts.make_factor_producer, "make_factors_without_look_ahead", _LOOK_UP
)
# Where the configuration allows it, the scales of four stages are one load of 16 bytes for each row of x.
make_scales_by_four = _without_look_ahead(
    kernel_in_parts.make_factor_producer, "make_scales_by_four", _LOOK_UP, make_write_factors=make_write_scales
)


@cache
def _make_load_ones(packed, vector):
    @cuda.jit(device=True)
    def load_ones(scales, index, step, count):
        return float32(1), float32(1), float32(1), float32(1)

    return load_ones


# To explain the time of the one above: with ones instead of its loads.
make_ones_by_four = _without_look_ahead(
    kernel_in_parts.make_factor_producer,
    "make_ones_by_four",
    _LOOK_UP,
    make_write_factors=make_write_scales,
    make_load_four=_make_load_ones,
)
