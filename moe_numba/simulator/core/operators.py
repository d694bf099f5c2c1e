"""Operators of numbers, typed as Numba types them, and computed as compiled code computes them.

An operator of two integers computes in 64 bits: signed if one of them is, or is a bool. Results wrap around. A division
of integers by zero gives 0, one of floats what IEEE 754 says. Python numbers stand for int64, float64 and bool.
"""

import operator

import numpy as np

from moe_numba.simulator.core.conversions import float_to_int
from moe_numba.simulator.core.unknown import Unknown, unknown

_LEAST, _LARGEST, _BITS = -(1 << 63), (1 << 63) - 1, (1 << 64) - 1
_SMALL = {np.dtype(t) for t in (np.bool_, np.int8, np.int16, np.uint8, np.float32)}
NUMBERS = [np.dtype(t) for t in "?bhilBHILfd"]
PYTHON = {bool: np.dtype(np.bool_), int: np.dtype(np.int64), float: np.dtype(np.float64)}
FLOAT64, INT64, UINT64 = np.dtype(np.float64), np.dtype(np.int64), np.dtype(np.uint64)


def dtype_of(value):
    """Return the dtype of a number, or None for anything else."""
    found = PYTHON.get(type(value))
    return found or getattr(value, "dtype", None)


def wrap(value):
    """Return the low 64 bits of a Python integer, signed."""
    return value if _LEAST <= value <= _LARGEST else (value - _LEAST & _BITS) + _LEAST


def result_type(name, a, b):
    """Return the dtype of an operator's result, or None if Numba has no such operator."""
    kinds = a.kind + b.kind
    if name in ("lshift", "rshift", "and_", "or_", "xor"):
        if "f" in kinds:
            return None
        if "shift" in name:
            return UINT64 if a.kind == "u" else INT64
        if kinds == "bb":
            return a
    if "f" in kinds:
        if name == "pow" and a == np.float32 and b.kind != "f":
            return a
        return np.dtype(np.float32) if a in _SMALL and b in _SMALL else FLOAT64
    if name == "truediv":
        return FLOAT64
    return UINT64 if kinds == "uu" else INT64


def _floordiv(a, b):
    return a // b if b else 0


def _mod(a, b):
    return a % b if b else 0


def _shift_left(a, b):
    return a << count if (count := b & 0xFFFFFFFF) < 64 else 0


def _shift_right(a, b):
    return a >> min(b & 0xFFFFFFFF, 64)


def _integer_power(a, b):
    """Return a power; one of an exponent below zero is that of 1 / a, truncated."""
    if b < 0:
        return a ** (b & 1) if a in (1, -1) else 0
    return pow(a, b, 1 << 64) if b > 64 else a**b


_INTEGERS = {name: getattr(operator, name) for name in ("add", "sub", "mul", "and_", "or_", "xor")}
_INTEGERS |= {"floordiv": _floordiv, "mod": _mod, "lshift": _shift_left, "rshift": _shift_right, "pow": _integer_power}
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor")


def _typed(name, result, a):
    """Make the operator of numbers of other types than the result's."""
    if result.kind == "f":
        compute, make = getattr(operator, name), result.type
        return lambda a, b: compute(make(a), make(b))
    compute, is_signed = _INTEGERS[name], result.kind == "i"
    if result.kind == "b":
        return lambda a, b: np.bool_(compute(bool(a), bool(b)))
    make = np.int64 if is_signed else np.uint64
    if is_signed and a == UINT64:  # its bits, as a signed integer
        return lambda a, b: make(wrap(compute(wrap(int(a)), wrap(int(b)))))
    if is_signed:
        return lambda a, b: make(wrap(compute(int(a), wrap(int(b)))))
    return lambda a, b: make(compute(int(a), int(b)) & _BITS)


def _binary(name):
    native, on_integers = getattr(operator, name), _INTEGERS.get(name)
    is_native = name in ("add", "sub", "mul", "and_", "or_", "xor")
    types = {dtype.type: dtype for dtype in NUMBERS} | PYTHON
    how = {}
    for ta, a in types.items():
        for tb, b in types.items():
            result = result_type(name, a, b)
            if result is None:
                continue
            if is_native and (a == b == result) and {ta, tb} - {bool, int}:
                how[ta, tb] = native  # which wraps around, as np.int64
            elif ta in (bool, int) and tb in (bool, int) and on_integers:
                how[ta, tb] = native if result.kind == "b" else (lambda a, b: wrap(on_integers(a, b)))
            else:
                how[ta, tb] = _typed(name, result, a)
    find = how.get

    def otherwise(a, b):
        return of_unknown(a, b) if isinstance(a, Unknown) or isinstance(b, Unknown) else native(a, b)

    def of_unknown(a, b):
        known = b if isinstance(a, Unknown) else a
        if name == "and_" and not isinstance(known, Unknown) and not known:
            return known  # whatever the other operand is
        result = result_type(name, dtype_of(a), dtype_of(b))
        return unknown(result, (a if isinstance(a, Unknown) else b).origin)

    def operate(a, b):
        return find((type(a), type(b)), otherwise)(a, b)

    def operate_quickly(a, b):
        if type(a) is int and type(b) is int:
            value = native(a, b)
            return value if _LEAST <= value <= _LARGEST else wrap(value)
        return find((type(a), type(b)), otherwise)(a, b)

    return operate_quickly if is_native else operate


def _unary(name):
    native = getattr(operator, name)

    def operate(a):
        kind = type(a)
        if kind is int:
            return wrap(native(a))
        if kind is bool or kind is np.bool_:
            return not a if name == "invert" else native(int(a))
        if isinstance(a, Unknown):
            is_64 = a.dtype.kind in "iu"
            return unknown(np.dtype(f"{a.dtype.kind}8") if is_64 else a.dtype, a.origin)
        if isinstance(a, np.integer):
            # Numba negates in the number's own type.
            return native(a).astype(np.int64 if a.dtype.kind == "i" else np.uint64)
        return native(a)

    return operate


SCALAR = {name: _binary(name) for name in BINARY} | {name: _unary(name) for name in ("neg", "pos", "invert")}
OF_NODE = {"Add": "add", "Sub": "sub", "Mult": "mul", "Div": "truediv", "FloorDiv": "floordiv", "Mod": "mod"}
OF_NODE |= {"Pow": "pow", "LShift": "lshift", "RShift": "rshift", "BitAnd": "and_", "BitOr": "or_", "BitXor": "xor"}
OF_NODE |= {"USub": "neg", "UAdd": "pos", "Invert": "invert"}


def as_float64(value):
    """Return a Python float as float64: beside a float32, NumPy would round it to that type."""
    return np.float64(value) if type(value) is float else value


def to_int(value=0):
    """Return `int(value)`, an int64."""
    if isinstance(value, Unknown):
        return unknown(INT64, value.origin)
    if isinstance(value, np.integer):
        return wrap(int(value))
    return wrap(int(value)) if isinstance(value, (int, np.bool_)) else float_to_int(value, 64, True)


def to_float(value=0.0):
    """Return `float(value)`, a float64."""
    if isinstance(value, Unknown):
        return unknown(FLOAT64, value.origin)
    return np.float64(value)


def scalar_type(kind):
    """Return the version of a NumPy scalar type that is called."""
    dtype = np.dtype(kind)
    mask = (1 << 8 * dtype.itemsize) - 1
    largest = mask >> 1 if dtype.kind == "i" else mask

    def cast(value=0):
        if type(value) is kind:
            return value
        if isinstance(value, Unknown):
            return unknown(dtype, value.origin)
        if dtype.kind not in "iu":
            return kind(value)
        is_integer = isinstance(value, (int, np.integer, np.bool_))
        value = int(value) if is_integer else float_to_int(value, 8 * dtype.itemsize, dtype.kind == "i")
        value &= mask
        return kind(value if value <= largest else value - mask - 1)

    return cast


CASTS = {dtype.type: scalar_type(dtype.type) for dtype in NUMBERS} | {int: to_int, float: to_float}
CASTS[np.longlong], CASTS[np.ulonglong] = scalar_type(np.longlong), scalar_type(np.ulonglong)
CASTS[np.float16] = np.float16
