"""Epilogue of the block-scaled kernel: a warp's 16 accumulator rows become rows of y, in bf16 or activated in FP8.

A warp writes its rows to its own buffers in shared memory, 128 bytes of 16 rows each, and TMA stores them while the
warp computes its next tile. The 16-byte vectors of a buffer row are XORed with the row number, which is TMA's 128-byte
swizzle and spreads rows over the banks. TMA stores whole boxes; the last rows of a group are stored by the lanes.

The activation of a tuple's elements is a function for eight columns, which calls that for the next eight.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.block_scaled.config import BUFFER_BYTES, BUFFER_COLUMNS, BUFFER_ROWS, ROW_BYTES
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.ptx.arithmetic import LOG2_E, ex2_approx, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import FP8_MAX, cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.matrix import stmatrix_rows
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.tma import tma_store_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.quantise import FP8_SCALE_BLOCK

bulk_wait_read = make_bulk_wait_group_read(0)


@cuda.jit(device=True)
def wait_for_buffers(lane):
    """Wait until the stores of the previous tile have read the warp's buffers."""
    if lane == 0:
        bulk_wait_read()
    cuda.syncwarp()


@cuda.jit(device=True)
def publish_buffers():
    """Make the warp's writes to its buffers visible to TMA and to all of its lanes."""
    fence_proxy_async_shared()
    cuda.syncwarp()


@cuda.jit(device=True)
def write_buffer(first_value, values, smem, offset):
    """Write a buffer's columns in bf16; ``offset`` is the lane's in the first buffer, see `stmatrix_rows`."""
    stmatrix_rows(smem.u8, int32(offset + first_value * (2 * BUFFER_BYTES // BUFFER_COLUMNS)), values)


@cuda.jit(device=True)
def silu_and_mul(gate, up):
    """Return silu(gate) * up of two numbers that are rounded to bf16 first, as two kernels would exchange them."""
    pair = cvt_rn_bf16x2_f32(gate, up)
    g, u = uint_as_float(uint32(pair & uint32(0xFFFF0000))), uint_as_float(uint32(pair << uint32(16)))
    return g * rcp_approx(float32(1) + ex2_approx(g * float32(-LOG2_E))) * u


@cache
def make_activate(j=0):
    """Make ``values, largest_0, largest_1 = activate(gate, up)`` for the accumulators from column ``8 j`` on.

    The two maxima are those of the magnitudes in the thread's two rows.
    """
    i, more = 4 * j, 8 * j + 8 < FP8_SCALE_BLOCK
    activate_next = make_activate(j + 1) if more else None

    @cuda.jit(device=True)
    def activate(gate, up):
        a, b = silu_and_mul(gate[i], up[i]), silu_and_mul(gate[i + 1], up[i + 1])
        c, d = silu_and_mul(gate[i + 2], up[i + 2]), silu_and_mul(gate[i + 3], up[i + 3])
        largest_0, largest_1 = max(abs(a), abs(b)), max(abs(c), abs(d))
        if more:
            values, next_0, next_1 = activate_next(gate, up)
            return (a, b, c, d) + values, max(largest_0, next_0), max(largest_1, next_1)
        return (a, b, c, d), largest_0, largest_1

    return activate


@cuda.jit(device=True)
def write_columns_fp8(first_value, values, smem, address, xor, inverse_0, inverse_1, lane):
    """Write 8 columns in FP8, of which the thread has four values.

    Two neighbouring lanes exchange a pair, so that the even one has four columns of the first row and the odd one those
    of the second. ``address`` is the byte offset of the lane's row in the buffer, and ``xor`` is ``(row & 7) << 4``.
    """
    first = uint32(cvt_rn_satfinite_e4m3x2_f32(values[1] * inverse_0, values[0] * inverse_0))
    second = uint32(cvt_rn_satfinite_e4m3x2_f32(values[3] * inverse_1, values[2] * inverse_1))
    odd = (lane & 1) != 0
    received = uint32(cuda.shfl_xor_sync(FULL_MASK, int32(first if odd else second), 1))
    word = uint32(received | uint32(second << uint32(16))) if odd else uint32(first | uint32(received << uint32(16)))
    smem.i32[uint32(int32(address + ((2 * first_value + ((lane & 2) << 1)) ^ xor)) >> 2)] = int32(word)


write_fp8 = make_for_each_chunk(FP8_SCALE_BLOCK // 2, 4, write_columns_fp8)


@cuda.jit(device=True)
def largest_of_quad(value):
    """Return the maximum over the four lanes that share a row."""
    value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, 1))
    return max(value, cuda.shfl_xor_sync(FULL_MASK, value, 2))


@cache
def make_store_tile(config, layout):
    """Make ``store_tile(smem, map_y, y, y_scale, n, warp, lane, acc, acc_1, row, rows, column)``: store a warp's rows.

    They begin at ``row`` of y, and ``rows`` of them exist; ``column`` is the tile's first column of ``n``. ``acc_1`` is
    the accumulator of the second half of a tile of 256 columns, or of up.

    It is a function because the compiler moves more out of the kernel's loop over tiles, and spills, without it.
    """
    epilogue_offset, warp_bytes, silu_and_mul = layout.epilogue_offset, layout.epilogue_warp_bytes, config.silu_and_mul
    halves = config.block_n == 2 * FP8_SCALE_BLOCK
    columns = config.half_rows if halves else config.block_n  # of an accumulator
    offset_1 = epilogue_offset + columns // BUFFER_COLUMNS * BUFFER_BYTES
    activate, write_bf16 = make_activate(), make_for_each_chunk(columns // 2, BUFFER_COLUMNS // 2, write_buffer)
    elements = 4 if silu_and_mul else 2  # in an int32 of y
    vector_elements = 4 * elements

    @cuda.jit(device=True)
    def store_buffer(smem, map_y, y, n, buffer, lane, row, rows, column):
        """Store the first ``rows`` rows of a buffer, whose first element lies at ``row`` and ``column`` of y."""
        if rows >= BUFFER_ROWS:
            if lane == 0:
                tma_store_2d(map_y, 0, column, row, smem.u8, buffer)
                bulk_commit_group()
        else:
            vector, pitch = int32(lane & 7), int32(n // elements)
            y_index = int64(row) * pitch + column // elements
            # A lane whose columns lie beyond y stores nothing.
            rows = rows if column + vector_elements * vector < n else int32(0)
            for i in range(4):
                t = int32(4 * i + (lane >> 3))
                a, b, c, d = ld_shared_s32x4(smem.i32, int32(buffer + t * ROW_BYTES + ((vector ^ (t & 7)) << 4)) >> 2)
                if t < rows:
                    st_global_s32x4(y, y_index + int64(t) * pitch + vector * 4, a, b, c, d)

    @cuda.jit(device=True)
    def store_buffers(smem, map_y, y, n, buffer, lane, row, rows, column):
        """Store an accumulator's columns, which the warp has written to its buffers in bf16."""
        publish_buffers()
        for first in range(0, columns, BUFFER_COLUMNS):
            if column + first < n:
                store_buffer(smem, map_y, y, n, buffer, lane, row, rows, int32(column + first))
            buffer = int32(buffer + BUFFER_BYTES)

    @cuda.jit(device=True)
    def store_tile(smem, map_y, y, y_scale, n, warp, lane, acc, acc_1, row, rows, column):
        buffer = int32(epilogue_offset + warp * warp_bytes)
        if silu_and_mul:
            # The 128 columns of a row have one scale, their largest magnitude over 448.
            values, largest_0, largest_1 = activate(acc, acc_1)
            scale_0 = max(largest_of_quad(largest_0), float32(1e-10)) * float32(1 / FP8_MAX)
            scale_1 = max(largest_of_quad(largest_1), float32(1e-10)) * float32(1 / FP8_MAX)
            wait_for_buffers(lane)
            own = int32(lane >> 2)
            t = int32(own + 8 * (lane & 1))
            address, xor = int32(buffer + t * ROW_BYTES), int32((t & 7) << 4)
            write_fp8(values, smem, address, xor, rcp_approx(scale_0), rcp_approx(scale_1), lane)
            publish_buffers()
            store_buffer(smem, map_y, y, n, buffer, lane, row, rows, column)
            scale_pitch = int32(n >> 7)
            scale_index = int64(row + own) * scale_pitch + (column >> 7)
            if (lane & 3) == 0 and own < rows:
                y_scale[scale_index] = scale_0
            if (lane & 3) == 0 and own + 8 < rows:
                y_scale[scale_index + 8 * scale_pitch] = scale_1
        else:
            wait_for_buffers(lane)
            t = int32(lane & 15)
            offset = int32(t * ROW_BYTES + (((t & 7) ^ (lane >> 4)) << 4))
            write_bf16(acc, smem, int32(buffer + offset))
            store_buffers(smem, map_y, y, n, buffer, lane, row, rows, column)
            if halves:
                buffer, column = int32(offset_1 + warp * warp_bytes), int32(column + columns)
                write_bf16(acc_1, smem, int32(buffer + offset))
                store_buffers(smem, map_y, y, n, buffer, lane, row, rows, column)

    return store_tile
