"""Arithmetic functions of `cuda` that Python has no operator for: bit counting, select, fused multiply-add.

An integer is 32 bits wide unless its NumPy type is wider or its value does not fit.
"""

import math
from fractions import Fraction

import numpy as np

_SMALL = 1024  # non-negative integers below this are made once for each type


def _unsigned_bits(value):
    """Return an integer's bits as an unsigned integer, and their count."""
    if isinstance(value, np.generic):
        width = 8 * value.dtype.itemsize
    else:
        width = 32 if -(2**31) <= value < 2**32 else 64
    return int(value) & ((1 << width) - 1), width


def wrap_integer_casts():
    """Make `numba.int32(x)` and the other integer types keep the low bits, as a cast in a compiled kernel does.

    In plain Python, Numba's types raise an OverflowError instead. Kernels cast more often than they do anything else,
    so the replacement caches each type's mask, and its small values, because NumPy makes scalars slowly.
    """
    from numba.core.types.abstract import Type
    from numba.core.types.scalars import Integer

    limits, make_signature = {}, Integer.__call__
    numbers = {bool, int, np.bool_, np.int32, np.uint32, np.int64, np.uint64}

    def cast(self, value=make_signature, *more):
        kind, found = type(value), limits.get(self.name)
        if more or kind not in numbers and (value is make_signature or isinstance(value, Type)):
            return make_signature(self, *(() if value is make_signature else (value, *more)))  # of a CPU function
        if found is None:
            scalar_type, mask = getattr(np, self.name), (1 << self.bitwidth) - 1
            largest = mask >> 1 if self.signed else mask
            small = [scalar_type(n) for n in range(min(_SMALL, largest + 1))]
            found = limits[self.name] = scalar_type, mask, largest, small, len(small)
        scalar_type, mask, largest, small, count = found
        if kind is scalar_type:
            return value
        bits = int(value) & mask
        if bits < count:
            return small[bits]
        return scalar_type(bits if bits <= largest else bits - mask - 1)

    Integer.cast_python_value = Integer.__call__ = cast


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
    dtype = np.result_type(a, b, c) if any(isinstance(v, np.generic) for v in (a, b, c)) else np.dtype(np.float64)
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
    bits = np.float64(total).view(np.int64)
    if error and not bits & 1:
        bits += 1 if (error > 0) == (total > 0) else -1
        total = bits.view(np.float64)
    return dtype.type(total)
