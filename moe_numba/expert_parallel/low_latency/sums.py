"""Sums of rows in low-latency combine: how they are added, and the format in which they travel: bfloat16 or FP8.

In FP8 each 128 elements share a float32 scale, as in dispatch. A thread has eight elements, so 16 lanes share a scale,
which the first of them stores, polls and resets. Data and scales are their own flags, like rows of bfloat16.
"""

from functools import cache

from numba import cuda, float32, int32, uint32, uint64

from moe_numba.expert_parallel.low_latency.layout import SENTINEL
from moe_numba.expert_parallel.low_latency.protocol import clean, copied
from moe_numba.ptx.arithmetic import float_as_int, int_as_float, rcp_rn, uint_as_float
from moe_numba.ptx.atomics import ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32, e4m3x2_as_floats
from moe_numba.ptx.memory import ld_global_s32x4
from moe_numba.ptx.system_vectors import (
    ld_relaxed_sys_s32x4,
    ld_relaxed_sys_u64,
    st_relaxed_sys_s32x4,
    st_relaxed_sys_u64,
)
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.quantise.fp8_cast_kernels import AMAX_MIN_BITS, FP8_MAX

_LANES_PER_SCALE = 16


@cuda.jit(device=True)
def add_row(sums, words, first, weight):
    """Add a vector of eight bfloat16 times a weight; its four words begin at ``words[first]``."""
    for j in range(4):
        word = uint32(words[first + j])
        sums[2 * j] = cuda.fma(weight, uint_as_float(uint32(word << uint32(16))), sums[2 * j])
        sums[2 * j + 1] = cuda.fma(weight, uint_as_float(uint32(word & uint32(0xFFFF0000))), sums[2 * j + 1])


@cuda.jit(device=True)
def round_sums(sums, words):
    """Round eight float32 to bfloat16."""
    for j in range(4):
        words[j] = int32(cvt_rn_bf16x2_f32(sums[2 * j + 1], sums[2 * j]))


@cache
def make_sum_format(shape):
    """Make ``encode``, ``store``, ``load``, ``reset`` and ``add``, for vectors of eight elements of a rank's sum.

    An encoded vector has four words, in FP8 two and the bits of the scale. ``encode`` and ``add`` are for all lanes of
    a warp. ``load`` loads each word once, plainly if flags have been waited for.
    """
    return _make_fp8_format(shape) if shape.combines_fp8 else _make_bf16_format(shape)


@cache
def _make_bf16_format(shape):
    data_is_flag = shape.data_is_flag

    @cuda.jit(device=True)
    def encode(sums, words):
        round_sums(sums, words)

    @cuda.jit(device=True)
    def store(remote, row, i, words):
        st_relaxed_sys_s32x4(remote, row + 4 * i, words[0], words[1], words[2], words[3])

    @cuda.jit(device=True)
    def load(local, row, i, words, first):
        if data_is_flag:
            a, b, c, d = copied(ld_relaxed_sys_s32x4(local, row + 4 * i))
        else:
            a, b, c, d = ld_global_s32x4(local, row + 4 * i)
        words[first], words[first + 1], words[first + 2], words[first + 3] = a, b, c, d

    @cuda.jit(device=True)
    def reset(local, row, i):
        empty = int32(SENTINEL)
        st_relaxed_sys_s32x4(local, row + 4 * i, empty, empty, empty, empty)

    @cuda.jit(device=True)
    def add(sums, words, first):
        add_row(sums, words, first, float32(1))

    return encode, store, load, reset, add


@cache
def _make_fp8_format(shape):
    data_is_flag, scales_offset = shape.data_is_flag, shape.combined_words // 2

    @cuda.jit(device=True)
    def encode(sums, words):
        """Quantise; a NaN makes the whole group NaN, because the comparison of magnitudes orders it above all."""
        amax_bits = int32(AMAX_MIN_BITS)
        for j in range(8):
            amax_bits = max(amax_bits, int32(uint32(float_as_int(sums[j])) & uint32(0x7FFFFFFF)))
        for step in (1, 2, 4, 8):
            amax_bits = max(amax_bits, cuda.shfl_xor_sync(FULL_MASK, amax_bits, step))
        amax = int_as_float(amax_bits)
        inverse = float32(rcp_rn(amax) * float32(FP8_MAX))
        for j in range(2):
            word = uint32(0)
            for half in range(2):
                k = 4 * j + 2 * half
                pair = cvt_rn_satfinite_e4m3x2_f32(float32(sums[k + 1] * inverse), float32(sums[k] * inverse))
                word = uint32(word | uint32(pair << uint32(16 * half)))
            words[j] = int32(word)
        words[2], words[3] = int32(float_as_int(float32(amax * float32(1 / FP8_MAX)))), int32(0)

    @cuda.jit(device=True)
    def store(remote, row, i, words):
        pair = uint64(uint64(uint32(words[1])) << uint64(32)) | uint64(uint32(words[0]))
        st_relaxed_sys_u64(remote, row + 2 * i, uint64(pair))
        if i % _LANES_PER_SCALE == 0:
            st_relaxed_sys_s32(remote, row + scales_offset + i // _LANES_PER_SCALE, words[2])

    @cuda.jit(device=True)
    def load(local, row, i, words, first):
        scale = row + scales_offset + i // _LANES_PER_SCALE
        words[first + 2] = words[first + 3] = int32(0)
        if data_is_flag:
            pair = ld_relaxed_sys_u64(local, row + 2 * i)
            words[first], words[first + 1] = int32(uint32(pair)), int32(uint32(pair >> uint64(32)))
            if i % _LANES_PER_SCALE == 0:
                words[first + 2] = ld_relaxed_sys_s32(local, scale)
        else:
            words[first], words[first + 1] = local[int32(row + 2 * i)], local[int32(row + 2 * i + 1)]
            if i % _LANES_PER_SCALE == 0:
                words[first + 2] = local[int32(scale)]

    @cuda.jit(device=True)
    def reset(local, row, i):
        st_relaxed_sys_u64(local, row + 2 * i, uint64(0xFFFFFFFFFFFFFFFF))
        if i % _LANES_PER_SCALE == 0:
            st_relaxed_sys_s32(local, row + scales_offset + i // _LANES_PER_SCALE, int32(SENTINEL))

    @cuda.jit(device=True)
    def add(sums, words, first):
        first_lane = int32(cuda.threadIdx.x & 31 & ~(_LANES_PER_SCALE - 1))
        scale = int_as_float(int32(cuda.shfl_sync(FULL_MASK, words[first + 2], first_lane)))
        for j in range(2):
            for half in range(2):
                k = 4 * j + 2 * half
                low, high = e4m3x2_as_floats(uint32(uint32(words[first + j]) >> uint32(16 * half) & uint32(0xFFFF)))
                sums[k], sums[k + 1] = cuda.fma(low, scale, sums[k]), cuda.fma(high, scale, sums[k + 1])

    return encode, store, load, reset, add


@cache
def make_hide_sentinel(data_is_flag):
    """Make ``hide_sentinel``: what is sent of an encoded sum; a sum that was lost is NaN."""

    @cuda.jit(device=True)
    def hide_sentinel(words, is_lost):
        for j in range(4):
            if is_lost:
                words[j] = int32(SENTINEL)
            if data_is_flag:
                words[j] = clean(words[j])

    return hide_sentinel
