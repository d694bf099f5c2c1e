"""The kernels of the casts to FP8 and back. A warp has several groups of 128 elements, all on their way at once.

A lane moves as many neighbours at a time as make 16 bytes of the wider type, so that a warp's loads and stores are
whole lines. What a group has but once lies in one lane for each: one reciprocal serves all groups of a warp.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.ptx.arithmetic import int_as_float, rcp_rn, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32, e4m3x2_as_floats
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_nc_u32x2,
    load_nc_u32x4,
    st_global_s32x4,
)
from moe_numba.ptx.warp import redux_sync_max_s32

THREADS = 128
GROUP = 128  # elements that share a scale
FULL = 0xFFFFFFFF
FP8_MOST = 448.0
AMAX_LEAST_BITS = int(np.float32(1e-4).view(np.int32))

_WARPS = THREADS // 32
_LOADS, _WORDS = 4, 16  # of 16 bytes a lane
_BACK_LOADS, _BACK_WORDS = 8, 16  # of 8 bytes a lane
BACK_GROUPS = 2 * _BACK_LOADS  # of a warp


def to_fp8_groups(dtype):
    """The groups of a warp in the cast to FP8."""
    return _LOADS * {"bfloat16": 2, "float32": 1}[dtype]


@cache
def make_place(hidden, wide):
    """``place(group, lane, groups)``: where a lane's elements of a group, or of it and the next, begin; or -1."""
    per_row, lanes = -(-hidden // GROUP), GROUP // wide

    @cuda.jit(device=True)
    def place(group, lane, groups):
        group, within = int64(group + lane // lanes), int32(lane % lanes * wide)
        inside = group < groups
        if hidden % GROUP == 0:
            at = group * GROUP + within
        else:  # a token's last group is not whole
            token = int64(uint64(group) // uint64(per_row))
            column = (group - token * per_row) * GROUP + within
            inside = inside and column < hidden
            at = token * hidden + column
        return at if inside else int64(-1)

    return place


@cache
def make_cast_to_fp8(dtype, hidden):
    """The kernel for one type of x and one hidden."""
    halves = {"bfloat16": 2, "float32": 1}[dtype]  # elements in a word
    wide, groups_at_once = 4 * halves, halves
    lanes, count = GROUP // wide, _LOADS * groups_at_once
    place, stored = make_place(hidden, wide), uint64 if wide == 8 else uint32

    @cuda.jit(device=True)
    def bits(words, e):
        """The e-th element as the bits of a float32."""
        word = uint32(words[e // halves])
        if halves == 1:
            return word
        return uint32(word & uint32(0xFFFF0000)) if e % 2 else uint32(word << uint32(16))

    @cuda.jit
    def cast_to_fp8(x, values, scales, groups):
        griddepcontrol_wait()
        lane = int32(cuda.threadIdx.x & 31)
        first = (int64(cuda.blockIdx.x) * _WARPS + (cuda.threadIdx.x >> 5)) * count
        words = cuda.local.array(_WORDS, uint32)
        for i in range(_LOADS):
            at = place(first + i * groups_at_once, lane, groups)
            a = b = c = d = uint32(0)
            if at >= 0:
                a, b, c, d = load_nc_u32x4(x, at)
            words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3] = a, b, c, d

        # Sizes are compared as integers, which puts NaN above all numbers. Lane g keeps the largest of group g.
        kept = int32(AMAX_LEAST_BITS)
        for i in range(_LOADS):
            mine = int32(0)
            for e in range(wide):
                mine = max(mine, int32(bits(words, i * wide + e) & uint32(0x7FFFFFFF)))
            for g in range(groups_at_once):
                largest = redux_sync_max_s32(uint32(FULL), mine if lane // lanes == g else int32(0))
                if lane == i * groups_at_once + g:
                    kept = max(kept, largest)
        amax = int_as_float(kept)
        inverse = rcp_rn(amax) * float32(FP8_MOST)
        if lane < count and first + lane < groups:
            scales[first + lane] = amax * float32(1 / FP8_MOST)

        for i in range(_LOADS):
            at = place(first + i * groups_at_once, lane, groups)
            factor = cuda.shfl_sync(FULL, inverse, i * groups_at_once + lane // lanes)
            result = stored(0)
            for e in range(0, wide, 2):
                low = uint_as_float(bits(words, i * wide + e)) * factor
                high = uint_as_float(bits(words, i * wide + e + 1)) * factor
                result = stored(result | stored(stored(cvt_rn_satfinite_e4m3x2_f32(high, low)) << stored(8 * e)))
            if at >= 0:
                values[at // wide] = result
        griddepcontrol_launch_dependents()

    return cast_to_fp8


@cache
def make_cast_back(hidden, packed):
    """The kernel for one hidden; ``packed`` scales are exponents, four in a word."""
    wide, per_row = 8, -(-hidden // GROUP)
    lanes, place = GROUP // wide, make_place(hidden, wide)

    @cuda.jit
    def cast_back(x, scales, y, groups, token_stride, column_stride):
        griddepcontrol_wait()
        lane = int32(cuda.threadIdx.x & 31)
        first = (int64(cuda.blockIdx.x) * _WARPS + (cuda.threadIdx.x >> 5)) * BACK_GROUPS
        words = cuda.local.array(_BACK_WORDS, uint32)
        for i in range(_BACK_LOADS):
            at = place(first + 2 * i, lane, groups)
            a = b = uint32(0)
            if at >= 0:
                a, b = load_nc_u32x2(x, at)
            words[2 * i], words[2 * i + 1] = a, b

        scale_bits, group = int32(0), int64(first + lane)  # lane g has the scale of group g
        if lane < BACK_GROUPS and group < groups:
            token = int64(uint64(group) // uint64(per_row))
            column = int32(group - token * per_row)
            if packed:
                word = uint32(scales[token * token_stride + (column >> 2) * column_stride])
                scale_bits = int32(uint32(word >> uint32(8 * (column & 3)) & uint32(0xFF)) << uint32(23))
            else:
                scale_bits = scales[token * token_stride + column * column_stride]
        scale = int_as_float(scale_bits)

        for i in range(_BACK_LOADS):
            at = place(first + 2 * i, lane, groups)
            factor = cuda.shfl_sync(FULL, scale, 2 * i + lane // lanes)
            results = cuda.local.array(4, int32)
            for j in range(4):
                low, high = e4m3x2_as_floats(uint32(words[2 * i + j // 2] >> uint32(16 * (j % 2))))
                results[j] = int32(cvt_rn_bf16x2_f32(high * factor, low * factor))
            if at >= 0:
                st_global_s32x4(y, at, results[0], results[1], results[2], results[3])
        griddepcontrol_launch_dependents()

    return cast_back
