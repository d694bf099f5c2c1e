"""Single-instruction arithmetic: approximate, IEEE-rounded and packed; reinterpretation of bits; a hash."""

import numpy as np
from numba import cuda, uint32

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction

LOG2_E = 1.4426950408889634  # for e to the power x by ``ex2.approx``
_CANONICAL_NAN = np.int32(0x7FFFFFFF)
_LEAST_NORMAL = np.float32(1.1754944e-38)


def _flush_subnormal(x):
    return np.float32(0) if abs(x) < _LEAST_NORMAL else x


def ex2_approx(x):
    """``ex2.approx.ftz.f32``: 2 to the power x, within 2 ulp; subnormal results are flushed to zero."""
    return _flush_subnormal(np.exp2(np.float32(x)))


def rcp_approx(x):
    """``rcp.approx.ftz.f32``: 1/x within 1 ulp; subnormal results are flushed to zero."""
    return _flush_subnormal(np.float32(1) / np.float32(x))


def rcp_rn(x):
    """``rcp.rn.f32``: 1/x, rounded to the nearest float32; subnormal results are kept."""
    return np.float32(1) / np.float32(x)


def float_as_int(x):
    """``mov.b32``: return a float32's bits as int32.

    A NaN becomes 0x7FFFFFFF, the only NaN that GPU arithmetic produces.
    """
    x = np.float32(x)
    return x.view(np.int32) if x == x else _CANONICAL_NAN


def int_as_float(bits):
    """``mov.b32``: return the float32 with these bits, an int32."""
    return np.int32(bits).view(np.float32)


def uint_as_float(bits):
    """``mov.b32``: return the float32 with these bits, a uint32."""
    return np.uint32(bits).view(np.float32)


def half_bits_as_float(bits):
    """``cvt.f32.f16``: convert the float16 in the low 16 bits to float32; exact."""
    return np.float32(np.uint16(np.uint32(bits) & np.uint32(0xFFFF)).view(np.float16))


def add_rn_bf16x2(a, b):
    """``add.rn.bf16x2``: add the low halves and the high halves of two registers, each sum rounded to nearest bf16.

    Adding in float32 and rounding the sum to bf16 yields the same bits: rounding twice is harmless if the wider format
    has at least 2 p + 2 significant bits (Figueroa, 1995), and 24 >= 2 * 8 + 2.
    """
    halves = [np.array([x], np.uint32) << np.array([16, 0], np.uint32) & np.uint32(0xFFFF0000) for x in (a, b)]
    low, high = halves[0].view(np.float32) + halves[1].view(np.float32)
    return np.uint32(simulator.floats.bf16_bits(high) << 16 | simulator.floats.bf16_bits(low))


def add_rn_f16x2(a, b):
    """``add.rn.f16x2``: add the low halves and the high halves of two registers, each sum rounded to nearest float16.

    Subnormal operands and results are kept. A NaN becomes 0x7FFF.
    """
    halves = [np.array([x], np.uint32) >> np.array([0, 16], np.uint32) & np.uint32(0xFFFF) for x in (a, b)]
    with np.errstate(invalid="ignore", over="ignore"):
        sums = halves[0].astype(np.uint16).view(np.float16) + halves[1].astype(np.uint16).view(np.float16)
    low, high = np.where(np.isnan(sums), np.uint16(0x7FFF), sums.view(np.uint16)).astype(np.uint32)
    return np.uint32(high << np.uint32(16) | low)


def mul_rn_bf16x2(a, b):
    """``mul.rn.bf16x2``: multiply the low halves and the high halves of two registers, rounded to nearest bf16.

    Subnormal operands and results are kept. A float32 holds the product of two bf16 exactly, unless it is subnormal.
    """
    halves = [np.array([x], np.uint32) << np.array([16, 0], np.uint32) & np.uint32(0xFFFF0000) for x in (a, b)]
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = halves[0].view(np.float32) * halves[1].view(np.float32)
    return np.uint32(simulator.floats.bf16_bits(high) << 16 | simulator.floats.bf16_bits(low))


def mul_rn_bf16x2_low(a, b):
    """``mul.rn.bf16x2`` of both halves of ``a`` by the low half of ``b``, which needs no instruction of its own."""
    b = np.uint32(b)
    return mul_rn_bf16x2_bits(a, b << np.uint32(16) | b & np.uint32(0xFFFF))


def mul_rn_bf16x2_high(a, b):
    """``mul.rn.bf16x2`` of both halves of ``a`` by the high half of ``b``, which needs no instruction of its own."""
    b = np.uint32(b)
    return mul_rn_bf16x2_bits(a, b >> np.uint32(16) | b & np.uint32(0xFFFF0000))


def sign_halves(a):
    """``prmt.b32`` that replicates signs: 0xFFFF in each half of a register that is negative, 0 in the others."""
    return np.uint32((np.uint32(a) >> np.uint32(15) & np.uint32(0x00010001)) * np.uint32(0xFFFF))


def _pure(template, *types, simulate):
    return instruction(template, *types, simulate=simulate, side_effect=False)


ex2_approx = _pure("ex2.approx.ftz.f32 $0, $1;", "f32", "f32", simulate=ex2_approx)
rcp_approx = _pure("rcp.approx.ftz.f32 $0, $1;", "f32", "f32", simulate=rcp_approx)
rcp_rn = _pure("rcp.rn.f32 $0, $1;", "f32", "f32", simulate=rcp_rn)
float_as_int = _pure("mov.b32 $0, $1;", "s32", "f32", simulate=float_as_int)
int_as_float = _pure("mov.b32 $0, $1;", "f32", "s32", simulate=int_as_float)
uint_as_float = _pure("mov.b32 $0, $1;", "f32", "u32", simulate=uint_as_float)
half_bits_as_float = _pure(
    "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo; }", "f32", "u32", simulate=half_bits_as_float
)
add_rn_bf16x2 = _pure("add.rn.bf16x2 $0, $1, $2;", "u32", "u32", "u32", simulate=add_rn_bf16x2)
add_rn_f16x2 = _pure("add.rn.f16x2 $0, $1, $2;", "u32", "u32", "u32", simulate=add_rn_f16x2)
sign_halves = _pure("prmt.b32 $0, $1, 0, 0xBB99;", "u32", "u32", simulate=sign_halves)
mul_rn_bf16x2_bits = mul_rn_bf16x2
_BROADCAST = (
    "{ .reg .b16 low, high; .reg .b32 both; mov.b32 {low, high}, $2; mov.b32 both, {%s}; mul.rn.bf16x2 $0, $1, both; }"
)
mul_rn_bf16x2 = _pure("mul.rn.bf16x2 $0, $1, $2;", "u32", "u32", "u32", simulate=mul_rn_bf16x2)
mul_rn_bf16x2_low = _pure(_BROADCAST % "low, low", "u32", "u32", "u32", simulate=mul_rn_bf16x2_low)
mul_rn_bf16x2_high = _pure(_BROADCAST % "high, high", "u32", "u32", "u32", simulate=mul_rn_bf16x2_high)


@cuda.jit(device=True)
def murmur3_finalizer(word):
    """Apply the 32-bit finalizer of MurmurHash3."""
    word = uint32(word ^ (word >> uint32(16)))
    word = uint32(word * uint32(0x85EBCA6B))
    word = uint32(word ^ (word >> uint32(13)))
    word = uint32(word * uint32(0xC2B2AE35))
    return uint32(word ^ (word >> uint32(16)))
