"""Stores of a tile: a thread's accumulators become rows of y, in bf16 or float32, at their place or scattered.

Scales, biases and activations in registers are in ``epilogue_terms.py``.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, EPILOGUE_BYTES, EPILOGUE_ROWS
from moe_numba.grouped_gemm.common.epilogue_terms import make_finish, make_load_row_values
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.ptx.fragments import make_scatter_columns, make_store_columns
from moe_numba.ptx.matrix import make_stmatrix_columns
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.warpgroup import bar_sync

BUFFER_BYTES = EPILOGUE_ROWS * BLOCK_K_BYTES  # of the two that a warpgroup has
CHUNK_VALUES = EPILOGUE_ROWS // 2  # of a thread's accumulators

stmatrix = make_stmatrix_columns(BLOCK_K_BYTES)


class RowStore(NamedTuple):
    """A thread's part in storing a tile; see :func:`make_store_tile`."""

    y: Any
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
def make_store_chunk(scatter_pitch):
    """Make ``store_chunk(smem, store, chunk, chunks, synchronises)``: store a chunk, which a buffer has in bf16.

    ``chunks`` is the number of those in a subtile. ``scatter_pitch`` is that of rows of y in shared memory, and 0
    without ``scatter``. If the function synchronises, all warps of the warpgroup have then read the buffer, and have
    written the other one.
    """

    @cuda.jit(device=True)
    def store_chunk(smem, store, chunk, chunks, synchronises):
        a, b, c, d = ld_shared_s32x4(smem.i32, int32(store.read_offset + (chunk & 1) * (BUFFER_BYTES // 4)))
        if synchronises:
            bar_sync(int32(2 + store.warpgroup), 128)
        second = chunk >= chunks
        first = int32((chunk - chunks if second else chunk) * EPILOGUE_ROWS)  # row of the subtile
        if int32(store.t + first) < (store.rows_1 if second else store.rows_0):
            if scatter_pitch:
                offset = int32((4 * scatter_pitch if second else 0) + (first >> 2))
                row = smem.i32[uint32(store.destinations + offset)]
                if row >= 0:
                    st_global_s32x4(store.y, store.y_index + int64(row) * store.pitch, a, b, c, d)
            else:
                y_index = store.y_index + int64(first) * store.pitch + (store.subtile_pitch if second else int64(0))
                st_global_s32x4(store.y, y_index, a, b, c, d)

    return store_chunk


@cache
def make_write_chunk(scatter_pitch):
    """Make ``write_chunk(first, values, smem, store, before, chunks, scale)``: write a chunk, store the one before.

    ``values`` are the accumulators of the chunk, which begin with the subtile's ``first``-th. There are ``before``
    chunks in earlier subtiles. A warp writes before it stores, so that it never waits for its own writes.
    """
    store_chunk = make_store_chunk(scatter_pitch)

    @cuda.jit(device=True)
    def write_chunk(first, values, smem, store, before, chunks, scale):
        chunk = int32(before + first // CHUNK_VALUES)
        stmatrix(smem.u8, int32(store.write_offset + (chunk & 1) * BUFFER_BYTES), values, scale)
        if chunk > 0:
            store_chunk(smem, store, int32(chunk - 1), chunks, True)
        else:
            bar_sync(int32(2 + store.warpgroup), 128)

    return write_chunk


@cache
def make_row_store(scatter, layout):
    """Make ``store = row_store(output, warp, lane, tile)``: what a thread stores of a tile."""
    epilogue_offset, row_values, pitch_of_values = (
        layout.epilogue_offset,
        layout.row_value_offsets[2],
        layout.scale_pitch,
    )

    @cuda.jit(device=True)
    def row_store(output, warp, lane, tile):
        # A buffer row holds 128 bytes of a row of y. Its 16-byte vectors are XORed with the row number, so that the
        # eight rows of a stmatrix fall into different banks.
        warpgroup = int32(warp >> 2)
        buffers = int32(epilogue_offset + warpgroup * EPILOGUE_BYTES)
        vector = int32(2 * (warp & 3) + (lane >> 3 & 1))
        write_offset = int32(buffers + (lane & 7) * BLOCK_K_BYTES + ((vector ^ (lane & 7)) << 4))
        t, vector = int32(4 * (warp & 3) + (lane >> 3)), int32(lane & 7)
        read_offset = int32(buffers + t * BLOCK_K_BYTES + ((vector ^ (t & 7)) << 4)) >> 2
        column, pitch = int32(tile.column + warpgroup * 64), int32(output.n >> 1)
        rows_0, rows_1 = int32(min(tile.rows, tile.subtile_rows)), int32(tile.rows - tile.subtile_rows)
        if column + 8 * vector >= output.n:  # this thread's columns lie beyond y
            rows_0, rows_1 = int32(0), int32(0)
        if scatter:
            place = int32((t >> 1 & 3) * pitch_of_values + (t >> 3) * 2 + (t & 1))
            destinations, y_index = int32(row_values + place), int64((column >> 1) + vector * 4)
        else:
            destinations, y_index = int32(0), (int64(tile.row) + t) * pitch + ((column >> 1) + vector * 4)
        subtile_pitch = int64(tile.subtile_rows) * pitch
        rows = t, rows_0, rows_1
        return RowStore(
            output.y, warpgroup, write_offset, read_offset, *rows, y_index, pitch, subtile_pitch, destinations
        )

    return row_store


@cache
def make_store_tile(n, config, layout):
    """Make ``store_tile(smem, output, warp, lane, acc_0, acc_1, tile, scale)``, which stores a tile in bf16.

    A consumer warpgroup computes 64 columns, 128 bytes, of each row of y. It transposes chunks of 16 rows through two
    buffers in shared memory, which alternate, so that eight lanes store a whole 128-byte line.
    """
    two, chunks, scatter_pitch = config.m_subtiles == 2, -(-n // EPILOGUE_ROWS), layout.scale_pitch * config.scatter
    row_store, store_chunk = make_row_store(config.scatter, layout), make_store_chunk(scatter_pitch)
    write_chunks = make_for_each_chunk(n // 2, CHUNK_VALUES, make_write_chunk(scatter_pitch))
    last = config.m_subtiles * chunks - 1

    @cuda.jit(device=True)
    def store_tile(smem, output, warp, lane, acc_0, acc_1, tile, scale):
        store = row_store(output, warp, lane, tile)
        if tile.column + store.warpgroup * 64 < output.n:
            write_chunks(acc_0, smem, store, int32(0), int32(chunks), scale)
            if two:
                write_chunks(acc_1, smem, store, int32(chunks), int32(chunks), scale)
            # The next tile starts with buffer 0, which other warps may still read.
            store_chunk(smem, store, int32(last), int32(chunks), last % 2 == 0)

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
