"""Packed conversions between float32 and the short floats bf16 and e4m3.

As in the PTX ISA, the first operand becomes the high half of the register and the second the low half, which comes
first in memory. Integer instructions replace the bf16 conversions below compute capability 8.0, and those of e4m3 below
8.9.
"""

import numpy as np
from numba import cuda, float32, int32, uint32

from moe_numba import simulator
from moe_numba.ptx.arithmetic import float_as_int, half_bits_as_float, int_as_float
from moe_numba.ptx.intrinsic import instruction

FP8_MAX = 448.0  # the largest e4m3 number


def cvt_rn_bf16x2_f32(high, low):
    """``cvt.rn.bf16x2.f32``: round two float32 to the nearest bf16, ties to even, and pack them in one register."""
    return np.uint32(simulator.floats.bf16_bits(high) << 16 | simulator.floats.bf16_bits(low))


def cvt_rn_satfinite_e4m3x2_f32(high, low):
    """``cvt.rn.satfinite.e4m3x2.f32``: round two float32 to the nearest e4m3, packed in the low 16 bits of a register.

    Magnitudes above 448, including infinity, become 448; a NaN stays a NaN.
    """
    return np.uint32(simulator.floats.e4m3_bits(high) << 8 | simulator.floats.e4m3_bits(low))


def e4m3x2_as_floats(pair):
    """``cvt.rn.f16x2.e4m3x2``, ``cvt.f32.f16``: convert two e4m3 in the low 16 bits to float32, low first; exact."""
    return simulator.floats.E4M3[int(pair) & 0xFF], simulator.floats.E4M3[int(pair) >> 8 & 0xFF]


@cuda.jit(device=True)
def _bf16_bits(value):
    """Return a float32's nearest bf16: rounding up carries from the dropped half of the bits into the kept half."""
    bits = uint32(float_as_int(value))
    rounded = uint32(uint32(bits + uint32(0x7FFF) + uint32(uint32(bits >> uint32(16)) & uint32(1))) >> uint32(16))
    return rounded if value == value else uint32(0x7FFF)


@cuda.jit(device=True)
def _e4m3_bits(value):
    """Return a float32's nearest e4m3, saturated.

    Numbers from 2**-6 keep three bits of their mantissa. Below, e4m3 has multiples of 2**-9, which is the unit in the
    last place of 16384.
    """
    bits = uint32(float_as_int(value))
    magnitude = int_as_float(int32(uint32(bits & uint32(0x7FFFFFFF))))
    magnitude = magnitude if magnitude < float32(448.0) else float32(448.0)
    kept = uint32(float_as_int(magnitude))
    rounded = uint32(uint32(kept + uint32(0x7FFFF) + uint32(uint32(kept >> uint32(20)) & uint32(1))) >> uint32(20))
    normal = int32(int32(rounded) - ((127 - 7) << 3))  # the exponents' biases are 127 and 7
    subnormal = int32(float_as_int(float32(magnitude + float32(16384.0))) - 0x46800000)  # the bits of 16384
    code = uint32(normal if magnitude >= float32(2.0**-6) else subnormal)
    sign = uint32(uint32(bits >> uint32(24)) & uint32(0x80))
    return uint32(code | sign) if value == value else uint32(0x7F)


@cuda.jit(device=True)
def _e4m3_as_float(code):
    """Return an e4m3 as float32: its bits, as a float16, are the number times 2**-8."""
    magnitude = uint32(code & uint32(0x7F))
    half = uint32(uint32(magnitude << uint32(7)) | uint32(uint32(code & uint32(0x80)) << uint32(8)))
    value = float32(half_bits_as_float(half) * float32(256.0))
    return value if magnitude != uint32(0x7F) else int_as_float(int32(0x7FFFFFFF))


def _bf16x2_by_integers(high, low):
    return uint32(uint32(_bf16_bits(high) << uint32(16)) | _bf16_bits(low))


def _e4m3x2_by_integers(high, low):
    return uint32(uint32(_e4m3_bits(high) << uint32(8)) | _e4m3_bits(low))


def _floats_by_integers(pair):
    return _e4m3_as_float(pair), _e4m3_as_float(uint32(pair >> uint32(8)))


cvt_rn_bf16x2_f32 = instruction(
    "cvt.rn.bf16x2.f32 $0, $1, $2;",
    *("u32", "f32", "f32"),
    simulate=cvt_rn_bf16x2_f32,
    side_effect=False,
    fallback=_bf16x2_by_integers,
)
cvt_rn_satfinite_e4m3x2_f32 = instruction(
    "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }",
    *("u32", "f32", "f32"),
    simulate=cvt_rn_satfinite_e4m3x2_f32,
    side_effect=False,
    fallback=_e4m3x2_by_integers,
)
e4m3x2_as_floats = instruction(
    "{ .reg .b16 h, lo, hi; .reg .b32 t; cvt.u16.u32 h, $2; cvt.rn.f16x2.e4m3x2 t, h; mov.b32 {lo, hi}, t; "
    "cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
    *("f32 x 2", "u32"),
    simulate=e4m3x2_as_floats,
    side_effect=False,
    fallback=_floats_by_integers,
)
