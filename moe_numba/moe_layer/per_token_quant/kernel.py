"""Kernels of ``per_token_quant_fp8`` and ``silu_and_mul_quant_fp8``: a CTA per row, which has one scale.

A thread computes 16 adjacent columns of a row, or twice 16 of a wide one, and keeps them in registers while the
CTA finds the largest magnitude of the row. A given scale needs no largest magnitude.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.moe_layer.permute.kernel import make_load_rows
from moe_numba.moe_layer.silu_and_mul.kernel import high_half, low_half, make_load_activated
from moe_numba.ptx.arithmetic import float_as_int, int_as_float, rcp_rn
from moe_numba.ptx.conversions import FP8_MAX, cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK, redux_sync_max_s32
from moe_numba.quantise.fp8_cast_kernels import AMAX_MIN_BITS

VECTOR = 16  # columns that a thread computes at once
MAX_THREADS, MAX_VECTORS = 1024, 2
MAX_COLUMNS = MAX_THREADS * MAX_VECTORS * VECTOR
_MAX_BATCH = 8  # row numbers that a thread loads at once


def threads_of(columns):
    """Return the threads of a CTA: one for each vector of a row, or for two of a wide row, in whole warps.

    Up to 512 threads two CTAs fit on an SM, so that one reads a row while the other waits at its barrier.
    """
    vectors = 1 if columns <= 512 * VECTOR else 2
    return -(-columns // (32 * VECTOR * vectors)) * 32


def launch_bounds_of(columns):
    """Return the threads of a CTA and the least number of CTAs per SM."""
    threads = threads_of(columns)
    return threads, 2 if threads <= 512 else 1


def _check_columns(columns):
    if columns < 1 or columns % VECTOR or columns > MAX_COLUMNS:
        raise ValueError(f"columns is {columns}; it must be a multiple of {VECTOR}, up to {MAX_COLUMNS}")


@cache
def make_row_scale(threads, count, is_static):
    """Make ``row_scale(values, given, warp_max)``: the scale of a row and its reciprocal.

    A thread has ``count`` values. ``given`` is a pointer to the scale, if ``is_static``; ``warp_max`` is shared memory.
    All threads of the CTA must call it.
    """
    warps = threads // 32

    @cuda.jit(device=True)
    def static_row_scale(values, given, warp_max):
        return float32(given[0]), rcp_rn(float32(given[0]))

    @cuda.jit(device=True)
    def dynamic_row_scale(values, given, warp_max):
        largest = int32(AMAX_MIN_BITS)
        for i in range(count):  # compared as integers, magnitudes order NaN above all numbers
            largest = max(largest, int32(float_as_int(values[i]) & int32(0x7FFFFFFF)))
        largest = redux_sync_max_s32(uint32(FULL_MASK), largest)
        if warps > 1:
            if cuda.threadIdx.x % 32 == 0:
                warp_max[cuda.threadIdx.x // 32] = largest
            cuda.syncthreads()
            for warp in range(warps):
                largest = max(largest, warp_max[warp])
        amax = int_as_float(largest)
        return amax * float32(1 / FP8_MAX), rcp_rn(amax) * float32(FP8_MAX)

    return static_row_scale if is_static else dynamic_row_scale


@cuda.jit(device=True)
def cast_4(values, first, factor):
    """Return four values in FP8."""
    low = uint32(cvt_rn_satfinite_e4m3x2_f32(values[first + 1] * factor, values[first] * factor))
    high = uint32(cvt_rn_satfinite_e4m3x2_f32(values[first + 3] * factor, values[first + 2] * factor))
    return int32(uint32(low | uint32(high << uint32(16))))


@cache
def make_store_row(columns, threads, vectors):
    """Make ``store_row(out, row, words)``: store the FP8 values of a thread, four in a word."""

    @cuda.jit(device=True)
    def store_row(out, row, words):
        for v in range(vectors):
            column = (int32(cuda.threadIdx.x) + v * threads) * VECTOR
            if column < columns:
                index = (int64(row) * columns + column) >> 2
                st_global_s32x4(out, index, words[4 * v], words[4 * v + 1], words[4 * v + 2], words[4 * v + 3])

    return store_row


@cuda.jit(device=True)
def load_16(x, row, columns, column, values, first):
    """Load 16 bfloat16 of a row."""
    offset = int64(row) * columns + column
    halves = load_nc_u32x4(x, offset), load_nc_u32x4(x, offset + 8)
    for i in range(4):
        a, b = uint32(halves[0][i]), uint32(halves[1][i])
        values[first + 2 * i], values[first + 2 * i + 1] = low_half(a), high_half(a)
        values[first + 8 + 2 * i], values[first + 8 + 2 * i + 1] = low_half(b), high_half(b)


@cache
def make_activation_quant_kernel(columns, has_valid_rows, is_static, activation, alpha, limit):
    """Make the kernel that computes an activation and quantises it, for one number of result columns.

    ``has_valid_rows``: skip the rows from ``num_valid_rows`` on. ``is_static``: all rows have a given scale.
    """
    _check_columns(columns)
    threads = threads_of(columns)
    vectors = -(-columns // (VECTOR * threads))
    load_activated = make_load_activated(columns, activation, alpha, limit)
    count, num_words = VECTOR * vectors, 4 * vectors
    row_scale, store_row = make_row_scale(threads, count, is_static), make_store_row(columns, threads, vectors)

    @cuda.jit
    def activate_and_quantise(x, num_valid_rows, given, out, scales):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        row, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        computed = True
        if has_valid_rows:
            computed = row < num_valid_rows[0]
        warp_max = cuda.shared.array(32, int32)
        values, words = cuda.local.array(count, float32), cuda.local.array(num_words, int32)
        for v in range(vectors):
            column = (thread + v * threads) * VECTOR
            if computed and column < columns:
                load_activated(x, row, column, values, v * VECTOR)
                load_activated(x, row, column + 8, values, v * VECTOR + 8)
            else:
                for i in range(VECTOR):
                    values[v * VECTOR + i] = float32(0)
        scale, factor = row_scale(values, given, warp_max)
        for i in range(num_words):
            words[i] = cast_4(values, 4 * i, factor)
        if computed:
            store_row(out, row, words)
            if thread == 0:
                scales[row] = scale

    return activate_and_quantise


@cache
def make_token_quant_kernel(columns, topk, permutes, is_static):
    """Make the kernel that quantises tokens, for one number of columns.

    A token's scale is stored in its ``topk`` rows of the grouped GEMM; its values too if it ``permutes``, else once.
    With ``topk`` 0 there are no rows.
    """
    _check_columns(columns)
    threads = threads_of(columns)
    vectors, batch = -(-columns // (VECTOR * threads)), -(-topk // -(-topk // _MAX_BATCH)) if topk else 1
    count, num_words, load_rows = VECTOR * vectors, 4 * vectors, make_load_rows(topk, batch)
    row_scale, store_row = make_row_scale(threads, count, is_static), make_store_row(columns, threads, vectors)

    @cuda.jit
    def quantise_tokens(x, inverse_indices, given, out, scales, num_rows):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        token, thread = int32(cuda.blockIdx.x), int32(cuda.threadIdx.x)
        warp_max = cuda.shared.array(32, int32)
        values, words = cuda.local.array(count, float32), cuda.local.array(num_words, int32)
        row = cuda.local.array(batch, int32)
        for v in range(vectors):
            column = (thread + v * threads) * VECTOR
            if column < columns:
                load_16(x, token, columns, column, values, v * VECTOR)
            else:
                for i in range(VECTOR):
                    values[v * VECTOR + i] = float32(0)
        scale, factor = row_scale(values, given, warp_max)
        for i in range(num_words):
            words[i] = cast_4(values, 4 * i, factor)
        if not permutes:
            store_row(out, token, words)
        if topk == 0 and thread == 0:
            scales[token] = scale
        for first in range(0, topk, batch):
            load_rows(inverse_indices, token, first, row)
            for k in range(batch):
                if row[k] >= 0 and row[k] < num_rows:
                    if permutes:
                        store_row(out, row[k], words)
                    if thread == 0:
                        scales[row[k]] = scale

    return quantise_tokens
