"""Kernels of the casts to FP8 and back. A warp has several groups of 128 elements, whose loads are all in flight.

A lane accesses 16 bytes of consecutive elements of the wider type at a time, so that a warp's loads and stores are
coalesced. Lane g holds the values that group g has once (amax, scale): one reciprocal per lane serves all groups.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.ptx.arithmetic import int_as_float, rcp_rn, uint_as_float
from moe_numba.ptx.conversions import FP8_MAX, cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32, e4m3x2_as_floats
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_nc_u32x2,
    load_nc_u32x4,
    st_global_s32x4,
)
from moe_numba.ptx.warp import FULL_MASK, redux_sync_max_s32
from moe_numba.quantise import FP8_SCALE_BLOCK

THREADS = 128
AMAX_MIN_BITS = int(np.float32(1e-4).view(np.int32))

_WARPS = THREADS // 32
_LOADS, _WORDS = 4, 16  # loads of 16 bytes per lane, and the words they return
_BACK_LOADS, _BACK_WORDS = 8, 16  # loads of 8 bytes per lane
GROUPS_PER_WARP_BACK = 2 * _BACK_LOADS


def groups_per_warp(dtype):
    """Return the groups of a warp in the cast to FP8."""
    return _LOADS * {"bfloat16": 2, "float32": 1}[dtype]


@cache
def make_element_offset(hidden, vector):
    """Make ``element_offset``: the offset of a lane's ``vector`` elements in a group or in a later one, or -1.

    ``FP8_SCALE_BLOCK // vector`` lanes share a group; the next lanes have the next group.
    """
    if hidden < 1 or hidden % vector:
        raise ValueError(f"hidden is {hidden}; it must be a multiple of the {vector} elements of a load")
    per_row, lanes = -(-hidden // FP8_SCALE_BLOCK), FP8_SCALE_BLOCK // vector

    @cuda.jit(device=True)
    def element_offset(group, lane, groups):
        group, within = int64(group + lane // lanes), int32(lane % lanes * vector)
        inside = group < groups
        if hidden % FP8_SCALE_BLOCK == 0:
            offset = group * FP8_SCALE_BLOCK + within
        else:  # a token's last group is partial
            token = int64(uint64(group) // uint64(per_row))
            column = (group - token * per_row) * FP8_SCALE_BLOCK + within
            inside = inside and column < hidden
            offset = token * hidden + column
        return offset if inside else int64(-1)

    return element_offset


@cache
def make_cast_to_fp8(dtype, hidden):
    """Make the kernel for one dtype of x and one ``hidden``."""
    per_word = {"bfloat16": 2, "float32": 1}[dtype]  # elements
    vector, groups_per_load = 4 * per_word, per_word
    lanes, count = FP8_SCALE_BLOCK // vector, _LOADS * groups_per_load
    element_offset, store_type = make_element_offset(hidden, vector), uint64 if vector == 8 else uint32

    @cuda.jit(device=True)
    def bits(words, e):
        """Return the e-th element as the bits of a float32."""
        word = uint32(words[e // per_word])
        if per_word == 1:
            return word
        return uint32(word & uint32(0xFFFF0000)) if e % 2 else uint32(word << uint32(16))

    @cuda.jit
    def cast_to_fp8(x, values, scales, groups):
        griddepcontrol_wait()
        lane = int32(cuda.threadIdx.x & 31)
        first = (int64(cuda.blockIdx.x) * _WARPS + (cuda.threadIdx.x >> 5)) * count
        words = cuda.local.array(_WORDS, uint32)
        for i in range(_LOADS):
            offset = element_offset(first + i * groups_per_load, lane, groups)
            a = b = c = d = uint32(0)
            if offset >= 0:
                a, b, c, d = load_nc_u32x4(x, offset)
            words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = a, b, c, d

        # Comparing magnitudes as integers orders NaN above all numbers. Lane g keeps the maximum of group g.
        amax_bits = int32(AMAX_MIN_BITS)
        for i in range(_LOADS):
            lane_max = int32(0)
            for e in range(vector):
                lane_max = max(lane_max, int32(bits(words, i * vector + e) & uint32(0x7FFFFFFF)))
            for g in range(groups_per_load):
                group_max = redux_sync_max_s32(uint32(FULL_MASK), lane_max if lane // lanes == g else int32(0))
                if lane == i * groups_per_load + g:
                    amax_bits = max(amax_bits, group_max)
        amax = int_as_float(amax_bits)
        inverse = rcp_rn(amax) * float32(FP8_MAX)
        if lane < count and first + lane < groups:
            scales[first + lane] = amax * float32(1 / FP8_MAX)

        for i in range(_LOADS):
            offset = element_offset(first + i * groups_per_load, lane, groups)
            factor = cuda.shfl_sync(FULL_MASK, inverse, i * groups_per_load + lane // lanes)
            result = store_type(0)
            for e in range(0, vector, 2):
                low = uint_as_float(bits(words, i * vector + e)) * factor
                high = uint_as_float(bits(words, i * vector + e + 1)) * factor
                result = store_type(
                    result | store_type(store_type(cvt_rn_satfinite_e4m3x2_f32(high, low)) << store_type(8 * e))
                )
            if offset >= 0:
                values[offset // vector] = result
        griddepcontrol_launch_dependents()

    return cast_to_fp8


@cache
def make_cast_back(hidden, packed):
    """Make the kernel for one ``hidden``; ``packed`` scales are exponents, four in a word."""
    vector, per_row = 8, -(-hidden // FP8_SCALE_BLOCK)
    lanes, element_offset = FP8_SCALE_BLOCK // vector, make_element_offset(hidden, vector)

    @cuda.jit
    def cast_back(x, scales, y, groups, token_stride, column_stride):
        griddepcontrol_wait()
        lane = int32(cuda.threadIdx.x & 31)
        first = (int64(cuda.blockIdx.x) * _WARPS + (cuda.threadIdx.x >> 5)) * GROUPS_PER_WARP_BACK
        words = cuda.local.array(_BACK_WORDS, uint32)
        for i in range(_BACK_LOADS):
            offset = element_offset(first + 2 * i, lane, groups)
            a = b = uint32(0)
            if offset >= 0:
                a, b = load_nc_u32x2(x, offset)
            words[2 * i], words[2 * i + 1] = a, b

        scale_bits, group = int32(0), int64(first + lane)  # lane g has the scale of group g
        if lane < GROUPS_PER_WARP_BACK and group < groups:
            token = int64(uint64(group) // uint64(per_row))
            column = int32(group - token * per_row)
            if packed:
                word = uint32(scales[token * token_stride + (column >> 2) * column_stride])
                scale_bits = int32(uint32(word >> uint32(8 * (column & 3)) & uint32(0xFF)) << uint32(23))
            else:
                scale_bits = scales[token * token_stride + column * column_stride]
        scale = int_as_float(scale_bits)

        for i in range(_BACK_LOADS):
            offset = element_offset(first + 2 * i, lane, groups)
            factor = cuda.shfl_sync(FULL_MASK, scale, 2 * i + lane // lanes)
            results = cuda.local.array(4, int32)
            for j in range(4):
                low, high = e4m3x2_as_floats(uint32(words[2 * i + j // 2] >> uint32(16 * (j % 2))))
                results[j] = int32(cvt_rn_bf16x2_f32(high * factor, low * factor))
            if offset >= 0:
                st_global_s32x4(y, offset, results[0], results[1], results[2], results[3])
        griddepcontrol_launch_dependents()

    return cast_back
