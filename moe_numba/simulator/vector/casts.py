"""Casts, extremes and bit operations of all lanes."""

import numpy as np

from moe_numba.simulator.core import arithmetic, floats
from moe_numba.simulator.core.conversions import floats_to_integers
from moe_numba.simulator.core.operators import CASTS
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lane_calls import per_lane, varies
from moe_numba.simulator.vector.lanes import choose
from moe_numba.simulator.vector.local import as_type
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray


def integers(mask, value):
    """Return the numbers of all lanes as integers; floats become int64."""
    values = value.values if type(value) is Weak else value
    if values.dtype.kind == "f":
        return floats_to_integers(values, np.dtype(np.int64))
    return values.astype(np.int64) if values.dtype.kind == "b" else values


def number_cast(scalar):
    """Make the vector version of a Numba type that is called."""
    dtype = np.dtype(getattr(np, "bool_" if scalar.name == "bool" else scalar.name))

    def cast(mask, value, *more):
        kind = type(value)
        if kind is ndarray:
            if value.dtype is dtype or value.dtype == dtype:
                return value
            return as_type(value, dtype)
        if kind is Weak:
            return as_type(value.values, dtype)
        return scalar(value, *more)

    return cast


def scalar_cast(scalar):
    """Make the vector version of a NumPy scalar type."""
    dtype, one = np.dtype(scalar), CASTS.get(scalar, scalar)

    def cast(mask, value=0):
        return as_type(value.values if type(value) is Weak else value, dtype) if varies(value) else one(value)

    return cast


def pairwise(function, ufunc, better):
    def extreme(mask, *values, **keywords):
        if keywords or len(values) == 1:
            if varies(values) or keywords:
                raise Unsupported("max or min of an iterable")
            return function(*values)
        result = values[0]
        for value in values[1:]:
            a, b = type(result), type(value)
            if (
                a is ndarray
                and result.dtype.kind in "iu"
                and (value.dtype == result.dtype if b is ndarray else b is int)
            ):
                result = ufunc(result, value)
            elif a is not ndarray and b is not ndarray and a is not Weak and b is not Weak:
                result = function(result, value)
            else:
                result = choose(mask, better(value, result), value, result)
        return result

    return extreme


def per_lane_math(function):
    def call(mask, *values):
        if not varies(values):
            return function(*values)
        return per_lane(function)(mask, *values)

    return call


def _words(value):
    """Return an integer's bits as uint64, and their count, as `arithmetic._unsigned_bits` does."""
    if type(value) is ndarray:
        if value.dtype.kind not in "iub":
            raise Unsupported("bits of a float")
        width = 8 * value.itemsize
        return value.view(f"u{value.itemsize}").astype(np.uint64), width
    values = value.values.astype(np.int64)
    small = (values >= -(2**31)) & (values < 2**32)
    return np.where(small, values & 0xFFFFFFFF, values).view(np.uint64), np.where(small, 32, 64)


def bitwise(scalar, compute):
    def call(mask, value):
        if not varies(value):
            return scalar(value)
        return Weak(compute(*_words(value)).astype(np.int64))

    return call


def bit_length(bits):
    high, low = (bits >> np.uint64(32)).astype(np.float64), (bits & np.uint64(0xFFFFFFFF)).astype(np.float64)
    return np.where(high > 0, 32 + np.frexp(high)[1], np.frexp(low)[1])


def ffs(bits, width):
    return bit_length(bits & (~bits + np.uint64(1)))


def brev(bits, width):
    reverse = [int(f"{int(b):0{w}b}"[::-1], 2) for b, w in zip(bits, np.broadcast_to(width, bits.shape))]
    return np.array(reverse, np.uint64)


def fma(mask, a, b, c):
    if not varies((a, b, c)):
        return arithmetic.fma(a, b, c)
    if not all(isinstance(v, (ndarray, np.generic)) and v.dtype == np.float32 for v in (a, b, c)):
        return per_lane(arithmetic.fma)(mask, a, b, c)
    a, b, c = np.broadcast_arrays(a, b, c)
    with np.errstate(invalid="ignore", over="ignore"):
        exact = a.astype(np.float64) * b + c
        out = exact.astype(np.float32)
    # Rounding to float64 and then to float32 can differ from rounding once only halfway between two floats.
    halfway = (exact.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    halfway |= (np.abs(exact) < 1.2e-38) & (exact != 0) | ~np.isfinite(exact)
    for i in (halfway if mask is None else halfway & mask).nonzero()[0]:
        out[i] = arithmetic.fma(a[i], b[i], c[i])
    return out


def bf16_bits(mask, value):
    if not varies(value):
        return floats.bf16_bits(value)
    value = np.asarray(value.values if type(value) is Weak else value).astype(np.float32)
    bits = value.view(np.uint32).astype(np.int64)
    return Weak(np.where(value == value, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0x7FFF))


def e4m3_bits(mask, value):
    if not varies(value):
        return floats.e4m3_bits(value)
    value = np.asarray(value.values if type(value) is Weak else value).astype(np.float32)
    magnitude = np.abs(value.astype(np.float64))
    code = np.searchsorted(floats.MIDPOINTS, magnitude)
    tie = (code < 126) & (magnitude == floats.MIDPOINTS[np.minimum(code, 125)]) & (code & 1 == 1)
    code = (code + tie) | np.where(np.signbit(value), 0x80, 0)
    return Weak(np.where(value == value, code, 0x7F))
