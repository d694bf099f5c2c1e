"""Bit counting and single rounding: the arithmetic of `cuda` that Python's operators do not have.

An integer counts as 32 bits wide unless its NumPy type says otherwise or it does not fit.
"""

import math
from fractions import Fraction

import numpy as np


def _unsigned(value):
    """The bits of an integer and their number."""
    if isinstance(value, np.generic):
        width = 8 * value.dtype.itemsize
        return int(value) & ((1 << width) - 1), width
    width = 32 if -(2**31) <= value < 2**32 else 64
    return int(value) & ((1 << width) - 1), width


def wrap_integer_casts():
    """Let `int32(x)` and its kin keep the low bits, as a cast in a kernel does; in Python, Numba's refuse overflow.

    Kernels call them more often than anything else, so they are made to be fast.
    """
    from numba.core.types.abstract import Type
    from numba.core.types.scalars import Integer

    known, signature, numbers = {}, Integer.__call__, {bool, int, np.bool_, np.int32, np.uint32, np.int64, np.uint64}

    def call(self, value, *more):
        if more or type(value) not in numbers and isinstance(value, Type):
            return signature(self, value, *more)
        name = self.name
        if name not in known:
            mask = (1 << self.bitwidth) - 1
            known[name] = getattr(np, name), mask, mask >> 1 if self.signed else mask
        kind, mask, largest = known[name]
        if type(value) is kind:
            return value
        bits = int(value) & mask
        return kind(bits if bits <= largest else bits - mask - 1)

    Integer.cast_python_value = Integer.__call__ = call


def popc(value):
    """The number of bits set."""
    return _unsigned(value)[0].bit_count()


def brev(value):
    """The bits in reverse order."""
    bits, width = _unsigned(value)
    return int(f"{bits:0{width}b}"[::-1], 2)


def clz(value):
    """The number of zeros before the highest bit set."""
    bits, width = _unsigned(value)
    return width - bits.bit_length()


def ffs(value):
    """The position of the lowest bit set, counted from 1; 0 if there is none."""
    bits, _ = _unsigned(value)
    return (bits & -bits).bit_length()


def selp(condition, a, b):
    """`a` if the condition holds, else `b`."""
    return a if condition else b


def cbrt(value):
    """The cube root."""
    return np.cbrt(value)


def fma(a, b, c):
    """a * b + c, rounded once."""
    dtype = np.result_type(a, b, c) if any(isinstance(v, np.generic) for v in (a, b, c)) else np.dtype(np.float64)
    if not all(math.isfinite(v) for v in (a, b, c)):
        return dtype.type(a) * dtype.type(b) + dtype.type(c)
    if dtype.itemsize == 8:
        try:
            return dtype.type(
                float(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))) or float(a) * float(b) + float(c)
            )  # an exact zero keeps the sign that the sum gives it
        except OverflowError:
            return dtype.type(a) * dtype.type(b) + dtype.type(c)
    # The product of two short floats is exact in float64. The sum need not be: rounded to odd, it can be rounded again.
    product, c = float(a) * float(b), float(c)
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    bits = np.float64(total).view(np.int64)
    if error and not bits & 1:
        bits += 1 if (error > 0) == (total > 0) else -1
        total = bits.view(np.float64)
    return dtype.type(total)
