"""Block scales in global memory: float32, or exponents as DeepGEMM packs them, four to an int32.

UE8M0 (OCP Microscaling Formats 1.0) is an exponent byte e of the value 2**(e - 127); 255 is NaN. DeepGEMM's
``get_mn_major_tma_aligned_packed_ue8m0_tensor`` packs the exponents of four neighbouring blocks of k, the first in the
lowest byte, and stores them with contiguous rows: [rows, ceil(k / 512)]. Of a weight it packs a scale for each row, so
that the 128 rows of a block have equal ones, of which a kernel reads the first.
"""

from functools import cache

from numba import cuda, float32, int32, int64

from moe_numba.ptx.arithmetic import int_as_float
from moe_numba.ptx.memory import ld_global_s32x4
from moe_numba.quantise import FP8_SCALE_BLOCK


@cuda.jit(device=True)
def unpack_ue8m0(packed, k_block):
    """Return the scale of block ``k_block`` of k from the int32 with its exponent."""
    exponent = int32((packed >> int32((k_block & 3) << 3)) & 255)
    # float32 has 2**-127 as a subnormal number, and NaN as 255 with a mantissa: either has the first mantissa bit.
    mantissa = int32(1 << 22) if ((exponent + 1) & 255) < 2 else int32(0)
    return int_as_float(int32((exponent << 23) | mantissa))


@cache
def make_x_scales(packed):
    """Make ``offset = k_offset(k_block, stride)`` and ``scale = load(x_scale, index, k_block)`` for the scales of x.

    ``index`` is that of a row's first scale plus ``offset``.
    """
    if packed:

        @cuda.jit(device=True)
        def k_offset(k_block, stride):
            return int64(k_block >> 2) * stride

        @cuda.jit(device=True)
        def load(x_scale, index, k_block):
            return unpack_ue8m0(x_scale[index], k_block)

    else:

        @cuda.jit(device=True)
        def k_offset(k_block, stride):
            return int64(k_block) * stride

        @cuda.jit(device=True)
        def load(x_scale, index, k_block):
            return x_scale[index]

    return k_offset, load


@cache
def make_weight_scales(packed):
    """Make ``find``, ``step`` and ``load`` for the scales of weight.

    ``index = find(group, n_block, n_blocks, k_blocks, rows)`` is the first scale of block ``n_block`` of a group, which
    has ``n_blocks`` blocks of ``rows`` rows in all. The next block's is ``step(k_blocks)`` elements behind it.
    ``scale = load(weight_scale, index, k_block, rows)`` is the one for block ``k_block`` of k.
    """
    if packed:

        @cuda.jit(device=True)
        def find(group, n_block, n_blocks, k_blocks, rows):
            return int64(group) * ((k_blocks + 3) >> 2) * rows + int64(n_block) * FP8_SCALE_BLOCK

        @cuda.jit(device=True)
        def step(k_blocks):
            return FP8_SCALE_BLOCK

        @cuda.jit(device=True)
        def load(weight_scale, index, k_block, rows):
            return unpack_ue8m0(weight_scale[index + int64(k_block >> 2) * rows], k_block)

    else:

        @cuda.jit(device=True)
        def find(group, n_block, n_blocks, k_blocks, rows):
            return (int64(group) * n_blocks + n_block) * k_blocks

        @cuda.jit(device=True)
        def step(k_blocks):
            return k_blocks

        @cuda.jit(device=True)
        def load(weight_scale, index, k_block, rows):
            return weight_scale[index + k_block]

    return find, step, load


@cache
def make_load_four(packed, vector):
    """Make ``a, b, c, d = load(scales, index, step, count)``: the scales of four blocks of k, of which ``count`` exist.

    ``index`` is that of the first of them, or of the int32 that has all four; the next ones are ``step`` elements
    apart. With ``vector`` they are 16 contiguous and aligned bytes.
    """

    @cuda.jit(device=True)
    def load_packed(scales, index, step, count):
        word = scales[index]
        a, b = unpack_ue8m0(word, int32(0)), unpack_ue8m0(word, int32(1))
        return a, b, unpack_ue8m0(word, int32(2)), unpack_ue8m0(word, int32(3))

    @cuda.jit(device=True)
    def load_vector(scales, index, step, count):
        a, b, c, d = ld_global_s32x4(scales, index)
        return int_as_float(a), int_as_float(b), int_as_float(c), int_as_float(d)

    @cuda.jit(device=True)
    def load_each(scales, index, step, count):
        b, c, d = float32(0), float32(0), float32(0)
        if count > 1:
            b = scales[index + step]
        if count > 2:
            c = scales[index + 2 * step]
        if count > 3:
            d = scales[index + 3 * step]
        return scales[index], b, c, d

    return load_packed if packed else load_vector if vector else load_each
