"""Conversions of floats to integers, as the instruction `cvt.rzi` does them: truncated and saturated.

Numba converts to integers of 8 bits through 16 bits. A NaN becomes 0; where the float or the integer has 64 bits, it
becomes the integer whose highest bit alone is set.
"""

import functools

import numpy as np


@functools.cache
def _limits(bits, signed):
    """Return the least and the largest integer of a conversion's result, and its number of bits."""
    bits = max(bits, 16)
    return (-1 << bits - 1, (1 << bits - 1) - 1, bits) if signed else (0, (1 << bits) - 1, bits)


def float_to_int(value, bits, signed):
    """Convert one float; return an int, of which integers of 8 bits keep the low bits."""
    least, largest, bits = _limits(bits, signed)
    is_double = isinstance(value, float)  # np.float64 is one, too
    value = float(value)
    if value != value:
        return (least or 1 << bits - 1) if is_double or bits == 64 else 0
    return least if value <= least else int(value) if value < largest + 1 else largest


def floats_to_integers(values, dtype):
    """Convert an array of floats to an integer dtype."""
    least, largest, bits = _limits(8 * dtype.itemsize, dtype.kind == "i")
    kind = np.dtype(f"{dtype.kind}{bits // 8}")
    exact = values.astype(np.float64)
    inside = (exact > least) & (exact < float(largest + 1))
    if inside.all():
        return exact.astype(kind).astype(dtype)
    nan = (least or 1 << bits - 1) if values.dtype == np.float64 or bits == 64 else 0
    made = np.where(inside, exact, 0).astype(kind)
    made[exact <= least], made[exact >= float(largest + 1)], made[exact != exact] = least, largest, nan
    return made.astype(dtype)
