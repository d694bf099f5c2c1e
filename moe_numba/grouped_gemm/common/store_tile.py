"""Stores of a tile: a thread's accumulators become rows of y, in bf16 or float32, at their place or scattered.

Scales, biases and activations in registers are in ``epilogue_terms.py``.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, EPILOGUE_BYTES, EPILOGUE_ROWS
from moe_numba.grouped_gemm.common.epilogue_terms import make_finish, make_load_row_values
from moe_numba.ptx.fragments import make_scatter_columns, make_store_columns
from moe_numba.ptx.matrix import make_stmatrix_fragment
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.warpgroup import bar_sync


class RowStore(NamedTuple):
    """A thread's part in storing a tile; see :func:`make_store_rows`."""

    warpgroup: Any
    write_offset: Any  # where stmatrix writes, u8
    read_offset: Any  # where the thread reads 16 bytes, i32
    t: Any  # the thread's row within EPILOGUE_ROWS
    rows_0: Any  # valid rows of the first subtile
    rows_1: Any  # valid rows of the second subtile
    y_index: Any  # of the thread's first 16 bytes in y
    pitch: Any  # int32 elements from one row of y to the next
    subtile_pitch: Any  # int32 elements of y from one subtile to the next
    destinations: Any  # with ``scatter``: where the rows of y for the thread's rows begin, i32


@cache
def make_store_rows(n, m_subtiles, i=0, scatter_pitch=0):
    """Make ``store_rows(smem, y, store, acc_0, acc_1, scale)``, storing accumulators as bf16 from chunk ``i`` on.

    A consumer warpgroup computes 64 columns, 128 bytes, of each row of y. It transposes 16 rows at a time through its
    shared-memory buffers, so that eight lanes store a whole 128-byte line. The two buffers alternate: a warp writes the
    next chunk before it stores the present one, so that it never waits for its own writes. With ``scatter_pitch``, that
    of rows of y in shared memory, it stores to these rows.
    """
    chunks = [(subtile, first) for subtile in range(m_subtiles) for first in range(0, n, EPILOGUE_ROWS)]
    scatter, destination = scatter_pitch > 0, 4 * scatter_pitch * chunks[i][0] + chunks[i][1] // 4
    (subtile, first), buffer, more = chunks[i], i % 2 * EPILOGUE_ROWS * BLOCK_K_BYTES, i + 1 < len(chunks)
    if more:
        next_subtile, next_first = chunks[i + 1]
        stmatrix_next = make_stmatrix_fragment(n, next_first, min(EPILOGUE_ROWS, n - next_first), BLOCK_K_BYTES)
        store_next = make_store_rows(n, m_subtiles, i + 1, scatter_pitch)
        other_buffer = EPILOGUE_ROWS * BLOCK_K_BYTES - buffer

    @cuda.jit(device=True)
    def store_rows(smem, y, store, acc_0, acc_1, scale):
        if more:
            stmatrix_next(smem.u8, int32(store.write_offset + other_buffer), acc_1 if next_subtile else acc_0, scale)
        a, b, c, d = ld_shared_s32x4(smem.i32, int32(store.read_offset + buffer // 4))
        if more or buffer == 0:  # the next tile starts with buffer 0, which other warps may still read
            bar_sync(int32(2 + store.warpgroup), 128)
        if int32(store.t + first) < (store.rows_1 if subtile else store.rows_0):
            if scatter:
                row = smem.i32[uint32(store.destinations + destination)]
                if row >= 0:
                    st_global_s32x4(y, store.y_index + int64(row) * store.pitch, a, b, c, d)
            else:
                y_index = store.y_index + int64(first) * store.pitch + (store.subtile_pitch if subtile else int64(0))
                st_global_s32x4(y, y_index, a, b, c, d)
        if more:
            store_next(smem, y, store, acc_0, acc_1, scale)

    return store_rows


@cache
def make_store_tile(n, config, layout):
    """Make ``store_tile(smem, output, warp, lane, acc_0, acc_1, tile, scale)``, which stores a tile in bf16."""
    scatter, pitch_of_values = config.scatter, layout.scale_pitch
    store_rows = make_store_rows(n, config.m_subtiles, scatter_pitch=pitch_of_values if scatter else 0)
    epilogue_offset, row_values = layout.epilogue_offset, layout.row_value_offsets[2]
    stmatrix_first = make_stmatrix_fragment(n, 0, min(EPILOGUE_ROWS, n), BLOCK_K_BYTES)

    @cuda.jit(device=True)
    def store_tile(smem, output, warp, lane, acc_0, acc_1, tile, scale):
        # A buffer row holds 128 bytes of a row of y. Its 16-byte vectors are XORed with the row number, so that the
        # eight rows of a stmatrix fall into different banks.
        warpgroup = int32(warp >> 2)
        buffers = int32(epilogue_offset + warpgroup * EPILOGUE_BYTES)
        vector = int32(2 * (warp & 3) + (lane >> 3 & 1))
        write_offset = int32(buffers + (lane & 7) * BLOCK_K_BYTES + ((vector ^ (lane & 7)) << 4))
        t, vector = int32(4 * (warp & 3) + (lane >> 3)), int32(lane & 7)
        read_offset = int32(buffers + t * BLOCK_K_BYTES + ((vector ^ (t & 7)) << 4)) >> 2
        column, pitch = int32(tile.column + warpgroup * 64), int32(output.n >> 1)
        if column < output.n:
            stmatrix_first(smem.u8, write_offset, acc_0, scale)
            bar_sync(int32(2 + warpgroup), 128)
            y_index = (int64(tile.row) + t) * pitch + ((column >> 1) + vector * 4)
            subtile_pitch = int64(tile.subtile_rows) * pitch
            rows_0, rows_1 = int32(min(tile.rows, tile.subtile_rows)), int32(tile.rows - tile.subtile_rows)
            if column + 8 * vector >= output.n:  # this thread's columns lie beyond y
                rows_0, rows_1 = int32(0), int32(0)
            if scatter:
                place = int32((t >> 1 & 3) * pitch_of_values + (t >> 3) * 2 + (t & 1))
                destinations = int32(row_values + place)
                y_index = int64((column >> 1) + vector * 4)
            else:
                destinations = int32(0)
            store = RowStore(
                warpgroup, write_offset, read_offset, t, rows_0, rows_1, y_index, pitch, subtile_pitch, destinations
            )
            store_rows(smem, output.y, store, acc_0, acc_1, scale)

    return store_tile


@cache
def make_store_floats(n, config, layout):
    """Make ``store_floats(smem, output, values, quarter, column, acc, first, rows)``: store a subtile as float32.

    A warp's store covers eight neighbouring columns of y, a sector of 32 bytes, of four rows. ``first`` is the
    subtile's first row in the product, and ``rows`` of them exist. ``values`` is as for ``finish``.
    """
    scatter, destinations = config.scatter, layout.row_value_offsets[2]
    store_columns, scatter_columns = (
        make_store_columns(n, config.accumulate),
        make_scatter_columns(n, config.accumulate),
    )

    @cuda.jit(device=True)
    def store_floats(smem, output, values, quarter, column, acc, first, rows):
        if scatter:
            scatter_columns(output.y, smem.i32, int32(destinations + values), output.n, column, acc)
        else:
            store_columns(output.y, first, rows, quarter, output.n, column, acc)

    return store_floats


@cache
def make_epilogue(n, config, layout):
    """Make ``epilogue(smem, output, warp, lane, acc_0, acc_1, tile, terms)``; ``n`` is wgmma's N.

    ``acc_0`` and ``acc_1`` are the accumulators of two subtiles, or of gate and up. ``terms`` are the thread's
    :class:`RowTerms`.
    """
    two, store_f32, has_row_values = config.m_subtiles == 2, config.out_dtype == "f32", config.has_row_values
    has_epilogue_math = config.has_row_terms or has_row_values or store_f32
    finish, store_floats = make_finish(n, config, layout), make_store_floats(n, config, layout)
    load_row_values, store_tile = make_load_row_values(config, layout), make_store_tile(n, config, layout)
    pitch = layout.scale_pitch

    @cuda.jit(device=True)
    def epilogue(smem, output, warp, lane, acc_0, acc_1, tile, terms):
        values_0, values_1 = int32(0), int32(0)
        if has_row_values:
            load_row_values(smem, output.inputs, warp, lane, tile)
            values_0 = int32((lane & 3) * pitch)
            values_1 = int32(values_0 + 4 * pitch)
        if has_epilogue_math:
            acc_0 = finish(acc_0, smem, values_0, tile, terms)
            if two:
                acc_1 = finish(acc_1, smem, values_1, tile, terms)
        if store_f32:
            quarter, column = int32(lane & 3), int32(tile.column + 16 * warp + (lane >> 2))
            if column < output.n:
                rows_0, second = int32(min(tile.rows, tile.subtile_rows)), int32(tile.row + tile.subtile_rows)
                store_floats(smem, output, values_0, quarter, column, acc_0, tile.row, rows_0)
                if two:
                    rows_1 = int32(tile.rows - tile.subtile_rows)
                    store_floats(smem, output, values_1, quarter, column, acc_1, second, rows_1)
        else:
            store_tile(smem, output, warp, lane, acc_0, acc_1, tile, float32(1) if has_epilogue_math else tile.scale)

    return epilogue
