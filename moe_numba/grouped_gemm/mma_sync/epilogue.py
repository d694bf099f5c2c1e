"""Epilogue of the grouped GEMM with ``mma.sync``: accumulators become rows of y, without a detour by shared memory.

A lane has 8 neighbouring columns of each of its rows, 16 bytes in bf16, and four lanes have 32. The accumulators are a
tuple, whose indices must be constants: so the code is repeated for each chunk of 8, by functions that call one another.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.mma_sync.config import COLUMN_GROUP
from moe_numba.ptx.arithmetic import LOG2_E, ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import FP8_MAX, cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.memory import ld_global_s32x4, load_nc_u16, load_nc_u32x1, st_global_s32x2, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK


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
def make_finish_rows(config, part, i=0):
    """Make ``finish_rows(y, n, inputs, scale, terms, row, rows, column, d)``: finish and store 8 columns of each row.

    ``row`` is the lane's first row of the product, and ``rows`` how many there are from it on. The columns, ``column``
    in y, are those of part ``part`` of the warp's columns; ``terms`` are their scales and biases. The function's first
    row is the lane's i-th, 8 i behind ``row``.
    """
    below, _, (c0, c1, c2, c3, c4, c5, c6, c7) = _indices(
        config, i * (config.warp_n // COLUMN_GROUP) + part, COLUMN_GROUP
    )
    by_row, gather, row_weights, scatter = config.scaling == "row", config.gather, config.row_weights, config.scatter
    is_f32, accumulate, more = config.out_dtype == "f32", config.accumulate, i + 1 < config.warp_m // 8
    finish_next = make_finish_rows(config, part, i + 1) if more else None

    @cuda.jit(device=True)
    def finish(value, scale, term, weight):
        return (value * scale * term[0] + term[1]) * weight

    @cuda.jit(device=True)
    def store_four(y, index, v0, v1, v2, v3):
        if accumulate:
            a, b, c, d = ld_global_s32x4(y, index)
            v0, v1, v2, v3 = v0 + int_as_float(a), v1 + int_as_float(b), v2 + int_as_float(c), v3 + int_as_float(d)
        st_global_s32x4(y, index, float_as_int(v0), float_as_int(v1), float_as_int(v2), float_as_int(v3))

    @cuda.jit(device=True)
    def finish_rows(y, n, inputs, scale, terms, row, rows, column, d):
        if below < rows:
            y_row, weight, row_scale = int32(row + below), float32(1), scale
            if by_row:
                x_row, x_scale = int32(row + below), float32(0)
                if gather:
                    x_row = inputs.row_indices[x_row]
                    if x_row >= 0 and x_row < inputs.x_rows:
                        x_scale = inputs.x_scale[x_row]
                else:
                    x_scale = inputs.x_scale[x_row]
                row_scale = scale * x_scale
            if row_weights:
                weight = inputs.row_weights[row + below]
            if scatter:
                y_row = inputs.scatter_indices[row + below]
                y_row = y_row if y_row < inputs.y_rows else int32(-1)
            if y_row >= 0:
                index = int64(y_row) * n + column
                v0, v1 = finish(d[c0], row_scale, terms[0], weight), finish(d[c1], row_scale, terms[1], weight)
                v2, v3 = finish(d[c2], row_scale, terms[2], weight), finish(d[c3], row_scale, terms[3], weight)
                v4, v5 = finish(d[c4], row_scale, terms[4], weight), finish(d[c5], row_scale, terms[5], weight)
                v6, v7 = finish(d[c6], row_scale, terms[6], weight), finish(d[c7], row_scale, terms[7], weight)
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
        if more:
            finish_next(y, n, inputs, scale, terms, row, rows, column, d)

    return finish_rows


@cache
def make_finish_columns(config, part=0):
    """Make ``finish_columns(y, n, inputs, group, scale, row, rows, column, d)``: finish and store a lane's results.

    It does so for the parts of 32 of the warp's columns from ``part`` on; ``column`` is the lane's first of part 0.
    """
    by_row, has_bias, bias_is_f32 = config.scaling == "row", bool(config.bias), config.bias == "f32"
    finish_rows, more = make_finish_rows(config, part), part + 1 < config.warp_n // COLUMN_GROUP
    finish_next = make_finish_columns(config, part + 1) if more else None

    @cuda.jit(device=True)
    def load_term(inputs, index):
        """Return scale and bias of a row of weight."""
        scale, bias = inputs.weight_scale[index] if by_row else float32(1), float32(0)
        if has_bias:
            if bias_is_f32:
                bias = uint_as_float(load_nc_u32x1(inputs.bias, 2 * index))
            else:
                bias = uint_as_float(uint32(load_nc_u16(inputs.bias, index) << uint32(16)))
        return scale, bias

    @cuda.jit(device=True)
    def finish_columns(y, n, inputs, group, scale, row, rows, column, d):
        first = int32(column + COLUMN_GROUP * part)
        if first < n:
            index = int64(group) * n + first
            terms = (
                load_term(inputs, index),
                load_term(inputs, index + 1),
                load_term(inputs, index + 2),
                load_term(inputs, index + 3),
                load_term(inputs, index + 4),
                load_term(inputs, index + 5),
                load_term(inputs, index + 6),
                load_term(inputs, index + 7),
            )
            finish_rows(y, n, inputs, scale, terms, row, rows, first, d)
        if more:
            finish_next(y, n, inputs, group, scale, row, rows, column, d)

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
def make_store_activated(config, chunk=0):
    """Make ``store_activated(smem, y, y_scale, n, offset, lane, warp_column, row, rows, column, d, scale)``.

    It quantises the activated rows to FP8, with a scale per row and 128 columns, which all warps of a row share.
    """
    activate_chunk, more = make_activate_chunk(config, chunk), chunk + 1 < config.warp_m // 8
    store_next = make_store_activated(config, chunk + 1) if more else None
    warps_n, block_m, below = config.warps_n, config.block_m, 8 * chunk

    @cuda.jit(device=True)
    def store_activated(smem, y, y_scale, n, offset, lane, warp_column, row, rows, column, d, scale):
        v0, v1, v2, v3, v4, v5, v6, v7 = activate_chunk(d, scale)
        largest = float32(1e-10)
        for w in range(warps_n):
            largest = max(largest, smem.f32[uint32(offset + w * block_m + below)])
        row_scale = largest * float32(1 / FP8_MAX)
        inverse = rcp_approx(row_scale)
        if below < rows:
            low = cvt_rn_satfinite_e4m3x2_f32(v1 * inverse, v0 * inverse)
            low |= uint32(cvt_rn_satfinite_e4m3x2_f32(v3 * inverse, v2 * inverse) << uint32(16))
            high = cvt_rn_satfinite_e4m3x2_f32(v5 * inverse, v4 * inverse)
            high |= uint32(cvt_rn_satfinite_e4m3x2_f32(v7 * inverse, v6 * inverse) << uint32(16))
            index = (int64(row + below) * n + column) >> 2
            st_global_s32x2(y, index, int32(low), int32(high))
            if lane & 3 == 0 and warp_column == 0:
                y_scale[int64(row + below) * (n >> 7) + (column >> 7)] = row_scale
        if more:
            store_next(smem, y, y_scale, n, offset, lane, warp_column, row, rows, column, d, scale)

    return store_activated
