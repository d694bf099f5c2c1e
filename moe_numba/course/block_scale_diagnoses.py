"""Variants of the block-scaled steps that explain their times: without a part of the kernel, or with a trace of tiles.

Their results are wrong, or not used; see ``block_scale_steps.py``.
"""

from functools import cache

import numpy as np
from numba import cuda, int32, int64, uint32

from moe_numba.course import block_scale_steps
from moe_numba.course.block_scale_steps import TRACE_FIELDS, make_multiply_in_order, make_scales_by_one
from moe_numba.course.simulate import changed_source, define
from moe_numba.grouped_gemm import kernel_block_scaled
from moe_numba.grouped_gemm.kernel_block_scaled import make_skip_stages
from moe_numba.ptx.special_registers import globaltimer

# Consumers


@cache
def make_multiply_nothing(config, layout):
    """As `make_multiply_in_order`, but only wait for the stages and release them: loads alone."""
    skip_stages, zeros = make_skip_stages(config, layout), (np.float32(0),) * (config.block_n // 2)

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        stage, phase = skip_stages(smem, lane, stage, phase, k_blocks)
        return zeros, stage, phase

    return multiply


@cache
def make_multiply_halves_nothing(config, layout):
    """As :func:`make_multiply_nothing`, for a tile that is computed in two halves."""
    skip_stages, zeros = make_skip_stages(config, layout), (np.float32(0),) * (config.block_n // 4)

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        stage, phase = skip_stages(smem, lane, stage, phase, k_blocks)
        return zeros, zeros, stage, phase

    return multiply


_WAIT = "mbarrier_wait_parity(smem.barriers, full + stage, phase)\n"
_LOAD = "a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)\n"


@cache
def make_multiply_loading_once(config, layout):
    """As `make_multiply_in_order`, but use the scales of a tile's first stage for all of its stages."""
    source = changed_source(make_multiply_in_order, f"            {_LOAD}", "")
    source = changed_source(source, "        acc = zeros\n", f"        acc = zeros\n        {_WAIT}        {_LOAD}")
    return _define(source, make_multiply_in_order)(config, layout)


@cache
def make_multiply_exchanging_rows(config, layout):
    """As `make_multiply_in_order`, but wrong: each of a thread's two rows has the scale of the other."""
    source = changed_source(make_multiply_in_order, "a, b, w_0, w_1, w_2 = load", "b, a, w_0, w_1, w_2 = load")
    return _define(source, make_multiply_in_order)(config, layout)


def _define(source, factory, module=block_scale_steps):
    return define(source, vars(module), f"changed {factory.__name__}")[factory.__name__]


@cache
def make_traced_consumer(config, layout):
    """As the package's ``make_consumer``, but record when a tile is computed; see `block_scale_steps.StepLaunch`."""
    consumer = kernel_block_scaled.make_consumer(config, layout)
    columns = config.columns

    @cuda.jit(device=True)
    def traced(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column):
        start = globaltimer()
        stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column)
        if warp == 0 and lane == 0 and rows > 0 and column < output.n:
            tiles = int32((output.n + columns - 1) // columns)
            at = int64(int64(row) * tiles + column // columns) * TRACE_FIELDS
            output.y_scale[at] = int32(uint32(start) & uint32(0x7FFFFFFF))
            output.y_scale[at + 1] = int32(uint32(globaltimer()) & uint32(0x7FFFFFFF))
            output.y_scale[at + 2] = int32(cuda.blockIdx.x + 1)
        return stage, phase

    return traced


# Producers


@cache
def make_scales_without_loads(config, layout):
    """As `make_scales_by_one`, with ones instead of the loads from global memory."""
    source = changed_source(make_scales_by_one, "scales.weight[weight_index + k_block]", "float32(1)")
    source = changed_source(source, "scales.x[index]", "float32(1)")
    return _define(source, make_scales_by_one)(config, layout)


@cache
def make_tma_producer_without_loads(config, layout):
    """As the package's ``make_tma_producer`` without its loads: a kernel with it computes alone."""
    factory = kernel_block_scaled.make_tma_producer
    expect = "mbarrier_arrive_expect_tx(barriers, full + stage, tma_bytes)"
    source = changed_source(factory, expect, "mbarrier_arrive(barriers, full + stage)")
    load = "load_weight(smem, offset, map_weight, k, column, second, g, full + stage, weight_policy, shares_weight)\n"
    source = changed_source(source, f"                {load}", "")
    offsets = "layout.tile_info_offset, config.columns, "
    source = changed_source(source, f"{offsets}config.gather", f"{offsets}True")  # no loads of x
    return _define(source, factory, kernel_block_scaled)(config, layout)
