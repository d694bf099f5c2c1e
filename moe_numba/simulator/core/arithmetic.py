"""Arithmetic functions of `cuda` that Python has no operator for: bit counting, select, fused multiply-add.

An integer is 32 bits wide unless its NumPy type is wider or its value does not fit.
"""

import math
from fractions import Fraction

import numpy as np

from moe_numba.simulator.core.conversions import float_to_int
from moe_numba.simulator.core.unknown import Unknown, unknown

_FLOAT32 = np.dtype(np.float32)
_MOST_KEPT = 1 << 15  # integers of each type that are made only once


class _Scalars(dict):
    """Maps the bits of an integer to a NumPy scalar of one type, and keeps the scalars that it has made."""

    def __init__(self, scalar_type, bitwidth, signed):
        self.scalar_type, self.mask = scalar_type, (1 << bitwidth) - 1
        self.largest = self.mask >> 1 if signed else self.mask

    def __missing__(self, bits):
        made = self.scalar_type(bits if bits <= self.largest else bits - self.mask - 1)
        if len(self) < _MOST_KEPT:
            self[bits] = made
        return made


def _unsigned_bits(value):
    """Return an integer's bits as an unsigned integer, and their count."""
    if isinstance(value, np.generic):
        width = 8 * value.dtype.itemsize
    else:
        width = 32 if -(2**31) <= value < 2**32 else 64
    return int(value) & ((1 << width) - 1), width


def wrap_casts():
    """Make `numba.int32(x)` and the other types of numbers convert as a cast in a compiled kernel does.

    Integers keep the low bits of an integer, and saturate a float (see `conversions`). What is unknown remains so.

    In plain Python, Numba's types raise an OverflowError instead. Kernels cast more often than they do anything else,
    so each type keeps its mask, and values, because NumPy makes scalars slowly.
    """
    from numba.core.types.abstract import Type
    from numba.core.types.scalars import Float, Integer

    make_signature = Integer.__call__
    numbers = {bool, int, np.bool_, np.int32, np.uint32, np.int64, np.uint64}

    def cast(self, value=make_signature, *more):
        kind = type(value)
        if kind is self.scalar_type and not more:
            return value
        if more or kind not in numbers and (value is make_signature or isinstance(value, Type)):
            return make_signature(self, *(() if value is make_signature else (value, *more)))  # of a CPU function
        scalars = self.scalars
        if scalars is None:
            self.scalars = scalars = _Scalars(getattr(np, self.name), self.bitwidth, self.signed)
            self.scalar_type, self.mask = scalars.scalar_type, scalars.mask
        if kind is not int:
            if isinstance(value, Unknown):
                return unknown(np.dtype(self.scalar_type), value.origin)
            is_float = kind not in numbers and not isinstance(value, np.integer)
            value = float_to_int(value, self.bitwidth, self.signed) if is_float else int(value)
        return scalars[value & self.mask]

    make_float = Float.cast_python_value

    def cast_to_float(self, value):
        return unknown(np.dtype(self.name), value.origin) if isinstance(value, Unknown) else make_float(self, value)

    Integer.scalar_type = Integer.mask = Integer.scalars = None  # until a type's first cast
    Integer.cast_python_value = Integer.__call__ = cast
    Float.cast_python_value = cast_to_float


def popc(value):
    """Count the bits set."""
    return _unsigned_bits(value)[0].bit_count()


def brev(value):
    """Reverse the order of the bits."""
    bits, width = _unsigned_bits(value)
    return int(f"{bits:0{width}b}"[::-1], 2)


def clz(value):
    """Count the leading zero bits."""
    bits, width = _unsigned_bits(value)
    return width - bits.bit_length()


def ffs(value):
    """Return the 1-based position of the lowest bit set, or 0 if there is none."""
    bits, _ = _unsigned_bits(value)
    return (bits & -bits).bit_length()


def selp(condition, a, b):
    """Return `a` if the condition holds, else `b`."""
    return a if condition else b


def cbrt(value):
    """Return the cube root."""
    return np.cbrt(value)


def fma(a, b, c):
    """Return a * b + c, rounded once."""
    if type(a) is type(b) is type(c) is np.float32:  # nearly always
        dtype = _FLOAT32
    else:
        is_typed = any(isinstance(v, np.generic) for v in (a, b, c))
        dtype = np.result_type(a, b, c) if is_typed else np.dtype(np.float64)
    if not all(math.isfinite(v) for v in (a, b, c)):
        return dtype.type(a) * dtype.type(b) + dtype.type(c)
    if dtype.itemsize == 8:
        try:
            exact = float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
        except OverflowError:
            return dtype.type(a) * dtype.type(b) + dtype.type(c)
        return dtype.type(exact or float(a) * float(b) + float(c))  # the sum keeps the sign of an exact zero
    # The product of two floats of at most 32 bits is exact in float64, the sum need not be. Rounding the sum to odd
    # makes the second rounding, to the short type, correct.
    product, c = float(a) * float(b), float(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    if error and not (bits := np.float64(total).view(np.int64)) & 1:
        bits += 1 if (error > 0) == (total > 0) else -1
        total = bits.view(np.float64)
    return dtype.type(total)
