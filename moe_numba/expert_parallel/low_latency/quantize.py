"""FP8 in the low-latency kernels, with one scale per 128 elements: rows of dispatch, and sums of combine.

A lane of dispatch has 16 elements of a group, a lane of combine has eight.
"""

from numba import cuda, float32, int32, uint32

from moe_numba.ptx.arithmetic import float_as_int, int_as_float, rcp_rn, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_satfinite_e4m3x2_f32, e4m3x2_as_floats
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.quantise.fp8_cast_kernels import AMAX_MIN_BITS, FP8_MAX

SUM_LANES_PER_SCALE = 16
_INFINITY_BITS = 0x7F800000


@cuda.jit(device=True)
def cast_to_e4m3(words, rounds_scale):
    """Return four words of e4m3 and the bits of their scale; eight lanes share one. All lanes must call it.

    ``rounds_scale`` makes scales powers of two. Without it the results equal those of ``per_token_cast_to_fp8`` bit for
    bit.
    """
    packed = cuda.local.array(4, int32)
    # Comparing magnitudes as integers orders NaN above all numbers.
    amax_bits = int32(AMAX_MIN_BITS)
    for i in range(8):
        amax_bits = max(amax_bits, int32(uint32(uint32(words[i]) << uint32(16)) & uint32(0x7FFFFFFF)))
        amax_bits = max(amax_bits, int32(uint32(words[i]) & uint32(0x7FFF0000)))
    for step in (1, 2, 4):
        amax_bits = max(amax_bits, cuda.shfl_xor_sync(FULL_MASK, amax_bits, step))
    amax = int_as_float(amax_bits)
    scale, inverse = float32(amax * float32(1 / FP8_MAX)), float32(rcp_rn(amax) * float32(FP8_MAX))
    if rounds_scale:
        bits = int32(float_as_int(scale))
        if bits < _INFINITY_BITS:  # the next power of two; its reciprocal is exact
            exponent = int32((bits + 0x7FFFFF) >> 23)
            scale, inverse = int_as_float(int32(exponent << 23)), int_as_float(int32((254 - exponent) << 23))
    for i in range(4):
        word = uint32(0)
        for half in range(2):
            pair = uint32(words[2 * i + half])
            low = float32(uint_as_float(uint32(pair << uint32(16))) * inverse)
            high = float32(uint_as_float(uint32(pair & uint32(0xFFFF0000))) * inverse)
            word = uint32(word | uint32(cvt_rn_satfinite_e4m3x2_f32(high, low) << uint32(16 * half)))
        packed[i] = int32(word)
    return packed[0], packed[1], packed[2], packed[3], int32(float_as_int(scale))


@cuda.jit(device=True)
def cast_sums_to_e4m3(sums, words):
    """Cast eight float32 to two words of e4m3, followed by the bits of their scale; 16 lanes share one.

    A NaN makes the whole group NaN, because the comparison of magnitudes orders it above all. All lanes must call it.
    """
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
def add_e4m3(sums, words, first):
    """Add what `cast_sums_to_e4m3` has cast, at ``words[first]``; of the scale the group's first lane has it."""
    first_lane = int32(cuda.threadIdx.x & 31 & ~(SUM_LANES_PER_SCALE - 1))
    scale = int_as_float(int32(cuda.shfl_sync(FULL_MASK, words[first + 2], first_lane)))
    for j in range(2):
        for half in range(2):
            k = 4 * j + 2 * half
            low, high = e4m3x2_as_floats(uint32(uint32(words[first + j]) >> uint32(16 * half) & uint32(0xFFFF)))
            sums[k], sums[k + 1] = cuda.fma(low, scale, sums[k]), cuda.fma(high, scale, sums[k + 1])
