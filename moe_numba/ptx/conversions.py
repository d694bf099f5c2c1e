"""Packed conversions between float32 and the short floats bf16 and e4m3.

As in the PTX ISA, the first operand becomes the high half of the register and the second the low half, which comes
first in memory.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


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


cvt_rn_bf16x2_f32 = instruction(
    "cvt.rn.bf16x2.f32 $0, $1, $2;", "u32", "f32", "f32", simulate=cvt_rn_bf16x2_f32, side_effect=False
)
cvt_rn_satfinite_e4m3x2_f32 = instruction(
    "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, $1, $2; cvt.u32.u16 $0, h; }",
    *("u32", "f32", "f32"),
    simulate=cvt_rn_satfinite_e4m3x2_f32,
    side_effect=False,
)
e4m3x2_as_floats = instruction(
    "{ .reg .b16 h, lo, hi; .reg .b32 t; cvt.u16.u32 h, $2; cvt.rn.f16x2.e4m3x2 t, h; mov.b32 {lo, hi}, t; "
    "cvt.f32.f16 $0, lo; cvt.f32.f16 $1, hi; }",
    *("f32 x 2", "u32"),
    simulate=e4m3x2_as_floats,
    side_effect=False,
)
