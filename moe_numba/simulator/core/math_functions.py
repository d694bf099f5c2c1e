"""Functions of `math`, in the type of their arguments, with the results that IEEE 754 gives in place of exceptions."""

import math

import numpy as np

from moe_numba.simulator.core.conversions import float_to_int
from moe_numba.simulator.core.operators import FLOAT64, dtype_of, result_type

# What computes a result where `math` raises an error; others are NaN.
_IEEE = {name: getattr(np, name) for name in ("log", "log2", "log10", "log1p", "sqrt", "exp", "exp2", "expm1")}
_IEEE |= {name: getattr(np, name) for name in ("sinh", "cosh", "fmod", "ldexp", "hypot") if hasattr(math, name)}
_IEEE |= {"atanh": np.arctanh, "pow": np.power}
_IEEE |= {"gamma": lambda x: math.copysign(math.inf, x) if x == 0 or x > 0 else math.nan}
_IEEE |= {"lgamma": lambda x: math.inf}
_TO_INTEGER = {"floor": math.floor, "ceil": math.ceil, "trunc": math.trunc}
_OF_FLOATS = ("acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "copysign", "cos", "cosh", "degrees")
_OF_FLOATS += ("erf", "erfc", "exp", "exp2", "expm1", "fabs", "fmod", "gamma", "hypot", "lgamma", "log", "log10")
_OF_FLOATS += ("log1p", "log2", "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh")


def _result_type(values):
    dtypes = [dtype_of(value) for value in values]
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = result and dtype and result_type("add", result, dtype)
    return result if result is not None and result.kind == "f" else FLOAT64


def _typed(name):
    function = getattr(math, name)
    otherwise = _IEEE.get(name)

    def call(*values):
        numbers = [float(value) for value in values]
        try:
            result = function(*numbers)
        except (ValueError, OverflowError):
            result = otherwise(*numbers) if otherwise else math.nan
        return _result_type(values).type(result)

    call.__name__ = name
    return call


def _to_integer(name):
    function = _TO_INTEGER[name]

    def call(value):
        exact = math.isfinite(value) and function(value)
        return exact if -(2**63) <= exact < 2**63 and math.isfinite(value) else float_to_int(value, 64, True)

    call.__name__ = name
    return call


def _ldexp(value, exponent):
    return _result_type([value]).type(np.ldexp(float(value), int(exponent)))


VERSIONS = {getattr(math, name): _typed(name) for name in _OF_FLOATS if hasattr(math, name)}
VERSIONS |= {getattr(math, name): _to_integer(name) for name in _TO_INTEGER} | {math.ldexp: _ldexp}
