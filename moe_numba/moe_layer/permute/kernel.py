"""Kernels of ``permute_tokens``, ``permute_cast_to_fp8`` and ``permute_fp8``.

A thread reads 8 or 16 elements of a token once, casts them or not, and stores 16 bytes in each of the token's rows.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.ptx.arithmetic import int_as_float, rcp_rn, uint_as_float
from moe_numba.ptx.conversions import FP8_MAX, cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.quantise.fp8_cast_kernels import AMAX_MIN_BITS

THREADS = 128
VECTOR = 8  # elements of a thread: 16 bytes of bfloat16
CAST_VECTOR = 16  # with the cast: 16 bytes of FP8
_WORDS = CAST_VECTOR // 2  # of two bfloat16 each
_LANES = FP8_SCALE_BLOCK // CAST_VECTOR  # that share a scale
_MAX_BATCH = 8  # row numbers that a thread loads at once


def threads_per_token(hidden):
    """Return the number of threads of a token that is cast: whole groups, the last of which may be partial."""
    return -(-hidden // FP8_SCALE_BLOCK) * _LANES


def _batch(hidden, vector, topk):
    """Check the sizes; return how many row numbers a thread loads at once."""
    if hidden < 1 or hidden % vector:
        raise ValueError(f"hidden is {hidden}; it must be a multiple of {vector}")
    if topk < 1:
        raise ValueError(f"topk is {topk}; it must be 1 or more")
    return -(-topk // -(-topk // _MAX_BATCH))


@cache
def make_load_rows(topk, batch):
    """Make ``load_rows(inverse_indices, token, first, row)``: row numbers ``first`` to ``first + batch``, or -1."""

    @cuda.jit(device=True)
    def load_rows(inverse_indices, token, first, row):
        for k in range(batch):
            row[k] = int32(-1)
            if first + k < topk:
                row[k] = inverse_indices[int64(token) * topk + (first + k)]

    return load_rows


@cache
def make_permute_kernel(hidden, topk):
    """Make the kernel that copies tokens, for one ``hidden`` and number of rows per token."""
    batch = _batch(hidden, VECTOR, topk)
    per_token, load_rows = hidden // VECTOR, make_load_rows(topk, batch)

    @cuda.jit
    def permute_tokens(x, inverse_indices, rows, num_rows, num_threads):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        thread = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row = cuda.local.array(batch, int32)
        if thread < uint32(num_threads):
            token = int32(thread // uint32(per_token))
            column = int32(thread - uint32(token) * uint32(per_token)) * VECTOR
            a, b, c, d = load_nc_u32x4(x, int64(thread) * VECTOR)
            for first in range(0, topk, batch):
                load_rows(inverse_indices, token, first, row)
                for k in range(batch):
                    if row[k] >= 0 and row[k] < num_rows:
                        index = int64(row[k]) * hidden + column
                        st_global_s32x4(rows, index, int32(a), int32(b), int32(c), int32(d))

    return permute_tokens


@cache
def make_permute_cast_kernel(hidden, topk):
    """Make the kernel that casts tokens to FP8, for one ``hidden`` and number of rows per token."""
    batch, per_token = _batch(hidden, CAST_VECTOR, topk), threads_per_token(hidden)
    scales_per_row, load_rows = -(-hidden // FP8_SCALE_BLOCK), make_load_rows(topk, batch)

    @cuda.jit(device=True)
    def largest_magnitude(words):
        """Return the largest magnitude of the group; as integers, magnitudes order NaN above all numbers."""
        largest = int32(AMAX_MIN_BITS)
        for i in range(_WORDS):
            low, high = int32(words[i] & uint32(0x7FFF)), int32(words[i] & uint32(0x7FFF0000))
            largest = max(largest, max(int32(low << 16), high))
        for distance in (1, 2, 4):
            largest = max(largest, cuda.shfl_xor_sync(FULL_MASK, largest, distance))
        return int_as_float(largest)

    @cuda.jit(device=True)
    def cast(words, i, factor):
        """Return elements 4 i to 4 i + 3 in FP8."""
        first, second = uint32(words[2 * i]), uint32(words[2 * i + 1])
        a, b = uint_as_float(uint32(first << uint32(16))), uint_as_float(uint32(first & uint32(0xFFFF0000)))
        c, d = uint_as_float(uint32(second << uint32(16))), uint_as_float(uint32(second & uint32(0xFFFF0000)))
        low = uint32(cvt_rn_satfinite_e4m3x2_f32(b * factor, a * factor))
        high = uint32(cvt_rn_satfinite_e4m3x2_f32(d * factor, c * factor))
        return int32(uint32(low | uint32(high << uint32(16))))

    @cuda.jit
    def permute_cast_to_fp8(x, inverse_indices, values, scales, num_rows, num_threads):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        thread = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        token = int32(thread // uint32(per_token))
        column = int32(thread - uint32(token) * uint32(per_token)) * CAST_VECTOR
        inside = thread < uint32(num_threads) and column < hidden
        words, row = cuda.local.array(_WORDS, uint32), cuda.local.array(batch, int32)
        for i in range(_WORDS):
            words[i] = uint32(0)
        if inside:
            for i in range(0, _WORDS, 4):
                a, b, c, d = load_nc_u32x4(x, int64(token) * hidden + (column + 2 * i))
                words[i], words[i + 1], words[i + 2], words[i + 3] = a, b, c, d
        amax = largest_magnitude(words)
        factor, scale = rcp_rn(amax) * float32(FP8_MAX), amax * float32(1 / FP8_MAX)
        a, b, c, d = cast(words, 0, factor), cast(words, 1, factor), cast(words, 2, factor), cast(words, 3, factor)
        if inside:
            for first in range(0, topk, batch):
                load_rows(inverse_indices, token, first, row)
                for k in range(batch):
                    if row[k] >= 0 and row[k] < num_rows:
                        st_global_s32x4(values, (int64(row[k]) * hidden + column) >> 2, a, b, c, d)
                        if column % FP8_SCALE_BLOCK == 0:
                            scales[int64(row[k]) * scales_per_row + column // FP8_SCALE_BLOCK] = scale

    return permute_cast_to_fp8


@cache
def make_permute_fp8_kernel(hidden, topk):
    """Make the kernel that copies tokens in FP8 and their scales, for one ``hidden`` and number of rows per token.

    ``token_stride`` and ``group_stride`` are those of the scales that it reads.
    """
    batch, per_token = _batch(hidden, CAST_VECTOR, topk), hidden // CAST_VECTOR
    scales_per_row, load_rows = -(-hidden // FP8_SCALE_BLOCK), make_load_rows(topk, batch)

    @cuda.jit
    def permute_fp8(x, x_scale, inverse_indices, values, scales, num_rows, num_threads, token_stride, group_stride):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        thread = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row, scale = cuda.local.array(batch, int32), float32(0)
        if thread < uint32(num_threads):
            token = int32(thread // uint32(per_token))
            column = int32(thread - uint32(token) * uint32(per_token)) * CAST_VECTOR
            group = column // FP8_SCALE_BLOCK
            a, b, c, d = load_nc_u32x4(x, int64(thread) * VECTOR)
            if column % FP8_SCALE_BLOCK == 0:
                scale = x_scale[int64(token) * token_stride + int64(group) * group_stride]
            for first in range(0, topk, batch):
                load_rows(inverse_indices, token, first, row)
                for k in range(batch):
                    if row[k] >= 0 and row[k] < num_rows:
                        index = (int64(row[k]) * hidden + column) >> 2
                        st_global_s32x4(values, index, int32(a), int32(b), int32(c), int32(d))
                        if column % FP8_SCALE_BLOCK == 0:
                            scales[int64(row[k]) * scales_per_row + group] = scale

    return permute_fp8
