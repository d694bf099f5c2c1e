"""Arithmetic in single instructions: approximate, IEEE-rounded and packed; reinterpretation of bits."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction

_CANONICAL_NAN = np.int32(0x7FFFFFFF)


def ex2_approx(x):
    """``ex2.approx.ftz.f32``: 2 to the power x, within 2 ulp; subnormal results are flushed to zero."""
    y = np.exp2(np.float32(x))
    return np.float32(0) if y < np.float32(1.1754944e-38) else y


def lg2_approx(x):
    """``lg2.approx.ftz.f32``: the logarithm of x to base 2, absolute error up to 2^-22."""
    return np.log2(np.float32(x))


def rcp_approx(x):
    """``rcp.approx.ftz.f32``: 1/x within 1 ulp; subnormals are zero."""
    y = np.float32(1) / np.float32(x)
    return np.float32(0) if abs(y) < np.float32(1.1754944e-38) else y


def sqrt_approx(x):
    """``sqrt.approx.ftz.f32``: the square root within 3 ulp."""
    return np.sqrt(np.float32(x))


def float_as_int(x):
    """The 32 bits of a float. A NaN reads as 0x7FFFFFFF, the only one that the GPU's arithmetic makes."""
    x = np.float32(x)
    return x.view(np.int32) if x == x else _CANONICAL_NAN


def int_as_float(bits):
    """The float that has these 32 bits."""
    return np.int32(bits).view(np.float32)


def uint_as_float(bits):
    """The float that has these 32 bits."""
    return np.uint32(bits).view(np.float32)


def half_bits_as_float(bits):
    """``cvt.f32.f16``: the float32 equal to the float16 in the low 16 bits; exact."""
    return np.float32(np.uint16(np.uint32(bits) & np.uint32(0xFFFF)).view(np.float16))


ex2_approx = instruction("ex2.approx.ftz.f32 $0, $1;", "f32", "f32", simulate=ex2_approx, side_effect=False)
lg2_approx = instruction("lg2.approx.ftz.f32 $0, $1;", "f32", "f32", simulate=lg2_approx, side_effect=False)
rcp_approx = instruction("rcp.approx.ftz.f32 $0, $1;", "f32", "f32", simulate=rcp_approx, side_effect=False)
sqrt_approx = instruction("sqrt.approx.ftz.f32 $0, $1;", "f32", "f32", simulate=sqrt_approx, side_effect=False)
float_as_int = instruction("mov.b32 $0, $1;", "s32", "f32", simulate=float_as_int, side_effect=False)
int_as_float = instruction("mov.b32 $0, $1;", "f32", "s32", simulate=int_as_float, side_effect=False)
uint_as_float = instruction("mov.b32 $0, $1;", "f32", "u32", simulate=uint_as_float, side_effect=False)
half_bits_as_float = instruction(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo; }",
    "f32",
    "u32",
    simulate=half_bits_as_float,
    side_effect=False,
)


def rcp_rn(x):
    """``rcp.rn.f32``: 1/x, rounded to the nearest float32; subnormals are kept."""
    return np.float32(1) / np.float32(x)


rcp_rn = instruction("rcp.rn.f32 $0, $1;", "f32", "f32", simulate=rcp_rn, side_effect=False)


def add_rn_bf16x2(a, b):
    """``add.rn.bf16x2``: the sums of the high halves and of the low ones, each rounded once, to the nearest bf16.

    The same bits as when both are added in float32 and the sum is rounded to bf16: float32 has so many more bits that
    rounding twice changes nothing (Figueroa, 1995: 2 p + 2 are enough, and 24 >= 2 * 8 + 2).
    """
    halves = [np.array([x], np.uint32) << np.array([16, 0], np.uint32) & np.uint32(0xFFFF0000) for x in (a, b)]
    low, high = halves[0].view(np.float32) + halves[1].view(np.float32)
    return np.uint32(simulator.floats.bf16_bits(high) << 16 | simulator.floats.bf16_bits(low))


add_rn_bf16x2 = instruction("add.rn.bf16x2 $0, $1, $2;", "u32", "u32", "u32", simulate=add_rn_bf16x2, side_effect=False)
