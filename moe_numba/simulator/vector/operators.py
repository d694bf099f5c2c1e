"""Operators of kernels on the numbers of all lanes; `core.operators` has those of one lane, and the rules."""

import operator

import numpy as np

from moe_numba.simulator.core.operators import BINARY, INT64, NUMBERS, PYTHON, SCALAR, result_type
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray
_UFUNCS = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "pow": np.power}
_UFUNCS |= {"floordiv": np.floor_divide, "mod": np.remainder, "and_": np.bitwise_and, "or_": np.bitwise_or}
_UFUNCS |= {"xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift}
_NUMBERS = {dtype.num: dtype for dtype in NUMBERS}


def _converted(name, first, second, result):
    """Make the operation that converts no more operands than it must; return None if NumPy's is the same."""
    native, ufunc = getattr(operator, name), _UFUNCS[name]

    def gives(a, b):
        try:
            return ufunc(np.ones(1, a), np.ones(1, b)).dtype == result
        except TypeError:  # NumPy has no such operation, such as that of int64 and uint64
            return False

    if gives(first, second):
        return None
    if gives(result, second):
        return lambda a, b: native(a.astype(result), b)
    if gives(first, result):
        return lambda a, b: native(a, b.astype(result))
    return lambda a, b: ufunc(a, b, dtype=result)


def _integer_power(result):
    def compute(a, b):
        a, b = a.astype(result), b.astype(result)
        if not np.any(b < 0):
            return np.power(a, b)
        # That of 1 / a, truncated
        return np.where(b >= 0, np.power(a, np.maximum(b, 0)), np.where(np.abs(a) == 1, np.power(a, b & 1), 0))

    return compute


def _shift(ufunc, result):
    def compute(a, b):
        return ufunc(a.astype(result), (b.astype(INT64) & 0xFFFFFFFF).astype(result))

    return compute


def _binary(name):
    is_shift = "shift" in name
    is_strict = is_shift or name == "pow"  # a Python number must become a NumPy number
    native, scalar, how, before, after = getattr(operator, name), SCALAR[name], {}, {}, {}
    for a, first in _NUMBERS.items():
        for b, second in _NUMBERS.items():
            result = result_type(name, first, second)
            if result is None:
                continue
            if name == "pow" and result.kind != "f":
                compute = _integer_power(result)
            elif is_shift:
                compute = _shift(_UFUNCS[name], result)
            else:
                compute = _converted(name, first, second, result)
            if compute is not None:
                how[a << 8 | b] = compute
        for kind, dtype in PYTHON.items():  # a Python number takes the type of the array beside it
            if is_strict or kind is bool:
                continue
            for found, result in (after, result_type(name, first, dtype)), (before, result_type(name, dtype, first)):
                if result is not None and result != first:
                    found[kind, a] = result
    find, convert_first, convert_second = how.get, after.get, before.get

    def operate(a, b):
        ta, tb = type(a), type(b)
        if (
            ta is ndarray
            and (tb is ndarray or isinstance(b, np.generic))
            or tb is ndarray
            and isinstance(a, np.generic)
        ):
            compute = find(a.dtype.num << 8 | b.dtype.num)
            return native(a, b) if compute is None else compute(a, b)
        if ta is Weak or tb is Weak:
            made = operate(a.values if ta is Weak else a, b.values if tb is Weak else b)
            is_python = (ta is Weak or ta in PYTHON) and (tb is Weak or tb in PYTHON)
            return Weak(made) if is_python else made
        if is_strict or ta is bool or tb is bool:
            if ta is ndarray and tb in PYTHON:
                return operate(a, PYTHON[tb].type(b))
            if tb is ndarray and ta in PYTHON:
                return operate(PYTHON[ta].type(a), b)
        if ta is ndarray and tb in PYTHON:
            result = convert_first((tb, a.dtype.num))
            return native(a if result is None else a.astype(result), b)
        if tb is ndarray and ta in PYTHON:
            result = convert_second((ta, b.dtype.num))
            return native(a, b if result is None else b.astype(result))
        return scalar(a, b)

    return operate


def _unary(name):
    native, scalar = getattr(operator, name), SCALAR[name]

    def operate(a):
        if type(a) is not ndarray and type(a) is not Weak:
            return scalar(a)
        values = a.values if type(a) is Weak else a
        kind = values.dtype.kind
        made = native(values.astype(INT64) if kind == "b" and name != "invert" else values)
        if kind in "iu":  # only now: Numba negates in the number's own type
            made = made.astype(np.uint64 if kind == "u" else INT64)
        return Weak(made) if type(a) is Weak else made

    return operate


VECTOR = {name: _binary(name) for name in BINARY} | {name: _unary(name) for name in ("neg", "pos", "invert")}
