"""Epilogue of the kernel for 4-bit weights with an activation; without one it is that of ``store_tile.py``.

Of 16 rows of weight that a warp multiplies the first eight are of gate, and the others the rows of
up that belong to them (see ``weight_tiles.py``). So a thread's first row of accumulators is of gate and its second of
up, and the activation needs no exchange. A warpgroup has 32 columns of y.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import EPILOGUE_BYTES
from moe_numba.grouped_gemm.common.epilogue_terms import (
    RowTerms,
    make_apply_row_terms,
    make_load_row_values,
    make_load_terms,
)
from moe_numba.grouped_gemm.common.store_tile import make_epilogue
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.fragments import make_select_rows, make_silu_and_mul, make_swigluoai
from moe_numba.ptx.matrix import make_fma_shared, make_stmatrix_fragment
from moe_numba.ptx.memory import ld_shared_s32x4, load_nc_u16, load_nc_u32x1, st_global_s32x4
from moe_numba.ptx.warpgroup import bar_sync

TILE_COLUMNS = 32  # columns of y of a warpgroup
ROW_BYTES = 2 * TILE_COLUMNS
BUFFER_ROWS = EPILOGUE_BYTES // ROW_BYTES  # rows of y that a warpgroup stores at once


@cache
def make_load_activation_terms(config):
    """Make ``terms = load_terms(inputs, tile, warp, lane, n)``: the thread's scales, and biases of gate and up.

    The biases of a group are in the order of the rows of weight before packing: with "swigluoai" alternately of gate
    and up, and otherwise first all of gate.
    """
    has_bias, is_f32, interleaved = bool(config.bias), config.bias == "f32", config.activation == "swigluoai"

    @cuda.jit(device=True)
    def load_bias(inputs, index):
        if is_f32:
            return uint_as_float(load_nc_u32x1(inputs.bias, 2 * index))
        return uint_as_float(uint32(load_nc_u16(inputs.bias, index) << uint32(16)))

    @cuda.jit(device=True)
    def load_terms(inputs, tile, warp, lane, n):
        bias_0, bias_1 = float32(0), float32(0)
        if has_bias:
            column = int32(tile.column + 8 * warp + (lane >> 2))
            if column < n:
                first = int64(tile.group) * (2 * n)
                bias_0 = load_bias(inputs, first + (2 * column if interleaved else column))
                bias_1 = load_bias(inputs, first + (2 * column + 1 if interleaved else n + column))
        return RowTerms(tile.scale, tile.scale, bias_0, bias_1)

    return load_terms


@cache
def make_store_chunk(n, first, layout):
    """Make ``store_chunk(smem, output, warp, lane, values, tile)``: store the rows of y from ``first`` on.

    ``n`` is a multiple of 16, and the thread has n / 4 values, two for each eight rows.
    The warpgroup transposes up to 64 rows through its shared-memory buffer, so that four lanes store the 64 bytes of a
    row. The 16-byte vectors of a row are XORed with half of the row number, so that the eight rows of a ``stmatrix``
    fall into different banks.
    """
    count, epilogue_offset, more = min(BUFFER_ROWS, n - first), layout.epilogue_offset, first + BUFFER_ROWS < n
    # As stmatrix_fragment sees it, a thread's values of eight rows of x are those of one row, and the values of the
    # next eight are of a second one: it stores twice as many rows.
    stmatrix = make_stmatrix_fragment(n // 2, first // 2, count // 2, 2 * ROW_BYTES)
    store_next = make_store_chunk(n, first + BUFFER_ROWS, layout) if more else None

    @cuda.jit(device=True)
    def store_chunk(smem, output, warp, lane, values, tile):
        warpgroup = int32(warp >> 2)
        buffer = int32(epilogue_offset + warpgroup * EPILOGUE_BYTES)
        bar_sync(int32(2 + warpgroup), 128)  # all warps have read the previous rows
        to = int32(buffer + (lane & 15) * ROW_BYTES + (((warp & 3) ^ (lane >> 1 & 3)) << 4))
        stmatrix(smem.u8, to, values, float32(1))
        bar_sync(int32(2 + warpgroup), 128)
        vector, column = int32(lane & 3), int32(tile.column + warpgroup * TILE_COLUMNS)
        for j in range(0, count, 32):
            t = int32(j + 8 * (warp & 3) + (lane >> 2))
            source = int32(buffer + t * ROW_BYTES + ((vector ^ (t >> 1 & 3)) << 4))
            a, b, c, d = ld_shared_s32x4(smem.i32, source >> 2)
            if first + t < tile.rows and column < output.n:
                y_index = (int64(tile.row) + (first + t)) * (output.n >> 1) + ((column >> 1) + vector * 4)
                st_global_s32x4(output.y, y_index, a, b, c, d)
        if more:
            store_next(smem, output, warp, lane, values, tile)

    return store_chunk


@cache
def make_activating_epilogue(n, config, layout):
    """Make ``epilogue(smem, output, warp, lane, acc, _, tile, terms)``; ``n`` is wgmma's N."""
    padded, zeros, by_row = -(-n // 16) * 16, (np.float32(0),) * (n // 2), config.x_scaling == "row"
    load_row_values, scale_columns = make_load_row_values(config, layout), make_fma_shared(n)
    x_scale, pitch = layout.row_value_offsets[0], layout.scale_pitch
    apply_row_terms, store_chunk = make_apply_row_terms(n), make_store_chunk(padded, 0, layout)
    padding = (np.float32(0),) * ((padded - n) // 4)
    select_gate, select_up = make_select_rows(n, 0), make_select_rows(n, 1)
    if config.activation == "silu":
        activate = make_silu_and_mul(n // 2)
    else:
        activate = make_swigluoai(n // 2, config.alpha, config.limit)

    @cuda.jit(device=True)
    def epilogue(smem, output, warp, lane, acc, _, tile, terms):
        if by_row:
            load_row_values(smem, output.inputs, warp, lane, tile)
            acc = scale_columns(zeros, acc, smem.f32, int32(x_scale + (lane & 3) * pitch))
        acc = apply_row_terms(acc, terms)
        values = activate(select_gate(acc), select_up(acc))
        store_chunk(smem, output, warp, lane, values + padding if padded > n else values, tile)

    return epilogue


def make_terms_and_epilogue(n, config, layout):
    """Make ``terms = load_terms(inputs, tile, warp, lane, n)``, called before the main loop, and the epilogue."""
    if config.activation:
        return make_load_activation_terms(config), make_activating_epilogue(n, config, layout)
    # The weight has no scales per row, which a configuration with scales per row of x would load here.
    return make_load_terms(config._replace(x_scaling="none")), make_epilogue(n, config, layout)
