"""Epilogue of the grouped GEMM with ``mma.sync``: accumulators become rows of y, without a detour by shared memory.

A lane has 8 neighbouring columns of each of its rows, 16 bytes in bf16, and four lanes have 32.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.outputs import FP8_MAX, LOG2_E, EpilogueOperands
from moe_numba.grouped_gemm.mma_sync.config import COLUMN_GROUP
from moe_numba.ptx.arithmetic import ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, load_nc_u16, load_nc_u32x1, st_global_s32x2, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK

__all__ = ["EpilogueOperands", "OutputTile", "make_epilogue"]


class OutputTile(NamedTuple):
    """A CTA's tile of y."""

    row: Any
    rows: Any
    column: Any
    scale: Any  # float32
    group: Any


def _indices(config, chunk, columns_of_chunk):
    """Return row offset and column group of a chunk of a warp's tile, and the indices of its 8 accumulators."""
    parts, groups = config.warp_n // 8, config.warp_n // columns_of_chunk
    row, group = divmod(chunk, groups)
    first = 4 * (row // 2 * parts + columns_of_chunk // 8 * group) + 2 * (row % 2)
    return 8 * row, group, tuple(first + 4 * j + i for j in range(4) for i in range(2))


@cache
def make_store_rows(config, chunk=0):
    """Make ``store_rows(y, index, pitch, rows, columns, d, scale)``: store accumulators as bf16 from a chunk on.

    A chunk is 8 columns of one row. ``index`` is that of the lane's first 16 bytes in y, ``rows`` and ``columns`` how
    many are left in y from there on.
    """
    row, group, (c0, c1, c2, c3, c4, c5, c6, c7) = _indices(config, chunk, COLUMN_GROUP)
    more = chunk + 1 < config.warp_m // 8 * (config.warp_n // COLUMN_GROUP)
    store_next = make_store_rows(config, chunk + 1) if more else None

    @cuda.jit(device=True)
    def store_rows(y, index, pitch, rows, columns, d, scale):
        if row < rows and COLUMN_GROUP * group < columns:
            st_global_s32x4(
                y,
                index + int64(row) * pitch + COLUMN_GROUP // 2 * group,
                int32(cvt_rn_bf16x2_f32(d[c1] * scale, d[c0] * scale)),
                int32(cvt_rn_bf16x2_f32(d[c3] * scale, d[c2] * scale)),
                int32(cvt_rn_bf16x2_f32(d[c5] * scale, d[c4] * scale)),
                int32(cvt_rn_bf16x2_f32(d[c7] * scale, d[c6] * scale)),
            )
        if more:
            store_next(y, index, pitch, rows, columns, d, scale)

    return store_rows


# Rows with scales, bias and weights, in bf16 or float32


@cache
def make_load_terms(config, i=0):
    """Make ``terms = load_terms(inputs, index)``: scale and bias of 8 neighbouring rows of weight from ``index`` on."""
    by_row, has_bias, is_f32 = config.scaling == "row", bool(config.bias), config.bias == "f32"
    load_next = make_load_terms(config, i + 1) if i < 7 else None
    last = i == 7

    @cuda.jit(device=True)
    def load_terms(inputs, index):
        scale = inputs.weight_scale[index + i] if by_row else float32(1)
        bias = float32(0)
        if has_bias:
            if is_f32:
                bias = uint_as_float(load_nc_u32x1(inputs.bias, 2 * (index + i)))
            else:
                bias = uint_as_float(uint32(load_nc_u16(inputs.bias, index + i) << uint32(16)))
        if last:
            return ((scale, bias),)
        return ((scale, bias),) + load_next(inputs, index)

    return load_terms


@cache
def make_store_values(config):
    """Make ``store_values(y, index, v0, ..., v7)``: store 8 neighbouring columns at element ``index`` of y."""
    is_f32, accumulate = config.out_dtype == "f32", config.accumulate

    @cuda.jit(device=True)
    def store_four(y, index, v0, v1, v2, v3):
        if accumulate:
            a, b, c, d = ld_global_s32x4(y, index)
            v0, v1, v2, v3 = v0 + int_as_float(a), v1 + int_as_float(b), v2 + int_as_float(c), v3 + int_as_float(d)
        st_global_s32x4(y, index, float_as_int(v0), float_as_int(v1), float_as_int(v2), float_as_int(v3))

    @cuda.jit(device=True)
    def store_values(y, index, v0, v1, v2, v3, v4, v5, v6, v7):
        if is_f32:
            store_four(y, index, v0, v1, v2, v3)
            store_four(y, index + 4, v4, v5, v6, v7)
        else:
            st_global_s32x4(
                y,
                index >> 1,
                int32(cvt_rn_bf16x2_f32(v1, v0)),
                int32(cvt_rn_bf16x2_f32(v3, v2)),
                int32(cvt_rn_bf16x2_f32(v5, v4)),
                int32(cvt_rn_bf16x2_f32(v7, v6)),
            )

    return store_values


@cache
def make_finish_rows(config, group, i=0):
    """Make ``finish_rows(output, row, rows, column, d, scale, terms)``: finish and store 8 columns of each row.

    ``row`` is the lane's first row of the product, and ``rows`` how many there are from it on. The columns, ``column``
    in y, are those of column group ``group``, the function's first row is the lane's i-th, 8 i behind ``row``.
    """
    groups = config.warp_n // COLUMN_GROUP
    below, _, (c0, c1, c2, c3, c4, c5, c6, c7) = _indices(config, i * groups + group, COLUMN_GROUP)
    more = i + 1 < config.warp_m // 8
    finish_next, store_values = make_finish_rows(config, group, i + 1) if more else None, make_store_values(config)
    by_row, gather, row_weights, scatter = config.scaling == "row", config.gather, config.row_weights, config.scatter

    @cuda.jit(device=True)
    def load_x_scale(inputs, row):
        if gather:
            row = inputs.row_indices[row]
            return inputs.x_scale[row] if row >= 0 and row < inputs.x_rows else float32(0)
        return inputs.x_scale[row]

    @cuda.jit(device=True)
    def finish(value, scale, term, weight):
        return (value * scale * term[0] + term[1]) * weight

    @cuda.jit(device=True)
    def finish_rows(output, row, rows, column, d, scale, terms):
        if below < rows:
            inputs, y_row, weight, row_scale = output.inputs, int32(row + below), float32(1), scale
            if by_row:
                row_scale = scale * load_x_scale(inputs, int32(row + below))
            if row_weights:
                weight = inputs.row_weights[row + below]
            if scatter:
                y_row = inputs.scatter_indices[row + below]
                y_row = y_row if y_row < inputs.y_rows else int32(-1)
            if y_row >= 0:
                store_values(
                    output.y,
                    int64(y_row) * output.n + column,
                    finish(d[c0], row_scale, terms[0], weight),
                    finish(d[c1], row_scale, terms[1], weight),
                    finish(d[c2], row_scale, terms[2], weight),
                    finish(d[c3], row_scale, terms[3], weight),
                    finish(d[c4], row_scale, terms[4], weight),
                    finish(d[c5], row_scale, terms[5], weight),
                    finish(d[c6], row_scale, terms[6], weight),
                    finish(d[c7], row_scale, terms[7], weight),
                )
        if more:
            finish_next(output, row, rows, column, d, scale, terms)

    return finish_rows


@cache
def make_finish_columns(config, group=0):
    """Make ``finish_columns(output, tile, row, rows, column, d)``, for column groups from ``group`` on."""
    load_terms, finish_rows = make_load_terms(config), make_finish_rows(config, group)
    more = group + 1 < config.warp_n // COLUMN_GROUP
    finish_next = make_finish_columns(config, group + 1) if more else None

    @cuda.jit(device=True)
    def finish_columns(output, tile, row, rows, column, d):
        first = int32(column + COLUMN_GROUP * group)
        if first < output.n:
            terms = load_terms(output.inputs, int64(tile.group) * output.n + first)
            finish_rows(output, row, rows, first, d, tile.scale, terms)
        if more:
            finish_next(output, tile, row, rows, column, d)

    return finish_columns


# Rows with activation, in FP8


@cuda.jit(device=True)
def activate(gate, up, scale):
    """Return ``silu(gate) * up``, of numbers that are first scaled and rounded to bf16."""
    bits = cvt_rn_bf16x2_f32(gate * scale, up * scale)
    gate = uint_as_float(uint32(bits & uint32(0xFFFF0000)))
    up = uint_as_float(uint32(bits << uint32(16)))
    return gate * rcp_approx(float32(1) + ex2_approx(gate * float32(-LOG2_E))) * up


@cache
def make_activate_chunk(config, chunk):
    """Make ``values = activate_chunk(d, scale)``: the 8 results of a lane in a row, of 32 columns of gate and of up."""
    _, _, (c0, c1, c2, c3, c4, c5, c6, c7) = _indices(config, chunk, 2 * COLUMN_GROUP)
    up = COLUMN_GROUP // 8 * 4  # accumulators from gate to up
    u0, u1, u2, u3, u4, u5, u6, u7 = (c + up for c in (c0, c1, c2, c3, c4, c5, c6, c7))

    @cuda.jit(device=True)
    def activate_chunk(d, scale):
        return (
            activate(d[c0], d[u0], scale),
            activate(d[c1], d[u1], scale),
            activate(d[c2], d[u2], scale),
            activate(d[c3], d[u3], scale),
            activate(d[c4], d[u4], scale),
            activate(d[c5], d[u5], scale),
            activate(d[c6], d[u6], scale),
            activate(d[c7], d[u7], scale),
        )

    return activate_chunk


@cache
def make_find_maxima(config, chunk=0):
    """Make ``find_maxima(smem, offset, lane, d, scale)``: write the largest magnitude of each row in the warp's tile.

    ``smem.f32[offset]`` is the place of the warp's first row.
    """
    if config.warp_n != 2 * COLUMN_GROUP:
        raise ValueError(
            f"a warp has {config.warp_n} rows of weight; with silu_and_mul it must have {2 * COLUMN_GROUP}"
        )
    activate_chunk, row = make_activate_chunk(config, chunk), 8 * chunk
    more = chunk + 1 < config.warp_m // 8
    find_next = make_find_maxima(config, chunk + 1) if more else None

    @cuda.jit(device=True)
    def find_maxima(smem, offset, lane, d, scale):
        v0, v1, v2, v3, v4, v5, v6, v7 = activate_chunk(d, scale)
        largest = max(
            max(max(abs(v0), abs(v1)), max(abs(v2), abs(v3))), max(max(abs(v4), abs(v5)), max(abs(v6), abs(v7)))
        )
        largest = max(largest, cuda.shfl_xor_sync(FULL_MASK, largest, 1))
        largest = max(largest, cuda.shfl_xor_sync(FULL_MASK, largest, 2))
        if lane & 3 == 0:
            smem.f32[uint32(offset + row + (lane >> 2))] = largest
        if more:
            find_next(smem, offset, lane, d, scale)

    return find_maxima


@cache
def make_store_activated(config, layout, chunk=0):
    """Make ``store_activated(smem, output, offset, lane, warp_column, row, rows, column, d, scale)``.

    It quantises the activated rows to FP8, with a scale per row and 128 columns, which all warps of a row share.
    """
    activate_chunk, more = make_activate_chunk(config, chunk), chunk + 1 < config.warp_m // 8
    store_next = make_store_activated(config, layout, chunk + 1) if more else None
    warps_n, block_m, below = config.warps_n, config.block_m, 8 * chunk

    @cuda.jit(device=True)
    def store_activated(smem, output, offset, lane, warp_column, row, rows, column, d, scale):
        v0, v1, v2, v3, v4, v5, v6, v7 = activate_chunk(d, scale)
        largest = float32(1e-10)
        for w in range(warps_n):
            largest = max(largest, smem.f32[uint32(offset + w * block_m + below)])
        y_scale = largest * float32(1 / FP8_MAX)
        inverse = rcp_approx(y_scale)
        if below < rows:
            low = cvt_rn_satfinite_e4m3x2_f32(v1 * inverse, v0 * inverse)
            low |= uint32(cvt_rn_satfinite_e4m3x2_f32(v3 * inverse, v2 * inverse) << uint32(16))
            high = cvt_rn_satfinite_e4m3x2_f32(v5 * inverse, v4 * inverse)
            high |= uint32(cvt_rn_satfinite_e4m3x2_f32(v7 * inverse, v6 * inverse) << uint32(16))
            index = (int64(row + below) * output.n + column) >> 2
            st_global_s32x2(output.y, index, int32(low), int32(high))
            if lane & 3 == 0 and warp_column == 0:
                output.y_scale[int64(row + below) * (output.n >> 7) + (column >> 7)] = y_scale
        if more:
            store_next(smem, output, offset, lane, warp_column, row, rows, column, d, scale)

    return store_activated


@cache
def make_epilogue(config, layout):
    """Make ``epilogue(smem, output, warp, lane, d, tile)``; all warps of the CTA must call it."""
    warp_m, warp_n, warps_n, block_m = config.warp_m, config.warp_n, config.warps_n, config.block_m
    if config.finishes:
        finish_columns = make_finish_columns(config)

        @cuda.jit(device=True)
        def epilogue(smem, output, warp, lane, d, tile):
            first = int32(warp // warps_n * warp_m + (lane >> 2))
            column = int32(tile.column + warp % warps_n * warp_n + (lane & 3) * 8)
            finish_columns(output, tile, int32(tile.row + first), int32(tile.rows - first), column, d)

        return epilogue

    if not config.silu_and_mul:
        store_rows = make_store_rows(config)

        @cuda.jit(device=True)
        def epilogue(smem, output, warp, lane, d, tile):
            first = int32(warp // warps_n * warp_m + (lane >> 2))
            column, pitch = int32(tile.column + warp % warps_n * warp_n), int32(output.n >> 1)
            index = int64(tile.row + first) * pitch + ((column >> 1) + (lane & 3) * 4)
            columns = int32(output.n - column - (lane & 3) * 8)
            store_rows(output.y, index, pitch, int32(tile.rows - first), columns, d, tile.scale)

        return epilogue

    row_max, find_maxima, store_activated = (
        layout.row_max_offset,
        make_find_maxima(config),
        make_store_activated(config, layout),
    )

    @cuda.jit(device=True)
    def epilogue(smem, output, warp, lane, d, tile):
        warp_row, warp_column = int32(warp // warps_n * warp_m), int32(warp % warps_n)
        cuda.syncthreads()  # all warps have read the maxima of the previous tile
        find_maxima(smem, int32(row_max + warp_column * block_m + warp_row), lane, d, tile.scale)
        cuda.syncthreads()
        first = int32(warp_row + (lane >> 2))
        row, rows = int32(tile.row + first), int32(tile.rows - first)
        column = int32(tile.column + warp_column * COLUMN_GROUP + (lane & 3) * 8)
        offset = int32(row_max + first)
        store_activated(smem, output, offset, lane, warp_column, row, rows, column, d, tile.scale)

    return epilogue
