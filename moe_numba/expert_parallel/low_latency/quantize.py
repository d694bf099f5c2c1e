"""FP8 quantisation inside low-latency dispatch: one scale per 128 elements, 16 elements per lane."""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.ptx.arithmetic import float_as_int, int_as_float, rcp_rn, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.memory import ld_global_s32x4
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.quantise.fp8_cast_kernels import AMAX_MIN_BITS, FP8_MAX

_INFINITY_BITS = 0x7F800000


@cache
def make_load_vector(is_fp8, words_of_row):
    """Make ``load_vector``: load what vector ``i`` of a row that is sent is made of, ``raw_words(is_fp8)`` words.

    The loads are in flight when it returns.
    """

    @cuda.jit(device=True)
    def load_vector(x, row, i, is_inside, loaded):
        for j in range(8 if is_fp8 else 4):
            loaded[j] = int32(0)
        if is_inside:
            if is_fp8:
                offset = int64(row) * words_of_row + 8 * i
                loaded[0], loaded[1], loaded[2], loaded[3] = ld_global_s32x4(x, offset)
                loaded[4], loaded[5], loaded[6], loaded[7] = ld_global_s32x4(x, offset + 4)
            else:
                loaded[0], loaded[1], loaded[2], loaded[3] = ld_global_s32x4(x, int64(row) * words_of_row + 4 * i)

    return load_vector


def raw_words(is_fp8):
    """Return how many words of bfloat16 a 16-byte vector that is sent is made of."""
    return 8 if is_fp8 else 4


@cache
def make_cast_vector(is_fp8, rounds_scale):
    """Make ``cast_vector``, which casts 16 bfloat16 to e4m3; ``rounds_scale`` makes scales powers of two.

    Without it the results equal those of ``per_token_cast_to_fp8`` bit for bit. Rows of bfloat16 stay as they are.
    """

    @cuda.jit(device=True)
    def keep_vector(words):
        return words[0], words[1], words[2], words[3], int32(0)

    @cuda.jit(device=True)
    def cast_vector(words):
        """Return four words of e4m3 and the bits of their scale; eight lanes share one. All lanes must call it."""
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

    return cast_vector if is_fp8 else keep_vector
