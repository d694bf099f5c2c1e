"""`numba.cuda.libdevice`: its floating-point functions, computed by NumPy or by `math` in the declared types.

Numba's own simulator leaves these functions empty. Results may differ from a GPU's in the last bits, most of all for
the `fast_` functions. Directed rounding, and functions that return several values through pointers, raise an error.
"""

import math
import types

import numpy as np

from moe_numba.simulator.core import arithmetic, memory
from moe_numba.simulator.core.host import unsupported

_NUMPY = {name: getattr(np, name) for name in ("cbrt", "ceil", "copysign", "cos", "cosh", "exp", "exp2", "expm1")}
_NUMPY |= {name: getattr(np, name) for name in ("fabs", "floor", "fmax", "fmin", "fmod", "hypot", "ldexp", "log")}
_NUMPY |= {name: getattr(np, name) for name in ("log10", "log1p", "log2", "nextafter", "rint", "sin", "sinh", "sqrt")}
_NUMPY |= {name: getattr(np, name) for name in ("tan", "tanh", "trunc")}
_NUMPY |= {"a" + name: getattr(np, "arc" + name) for name in ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")}
_MATH = {name: getattr(math, name) for name in ("erf", "erfc", "lgamma", "remainder")} | {"tgamma": math.gamma}
_OTHERS = {
    "exp10": lambda x: np.power(type(x)(10), x),
    "fdim": lambda x, y: np.fmax(x - y, type(x)(0)),
    "fdivide": lambda x, y: x / y,
    "fma": arithmetic.fma,
    "nearbyint": np.rint,
    "pow": np.power,
    "powi": np.power,
    "rcbrt": lambda x: type(x)(1) / np.cbrt(x),
    "round": lambda x: np.copysign(np.floor(np.fabs(x) + type(x)(0.5)), x),
    "rsqrt": lambda x: type(x)(1) / np.sqrt(x),
    "saturate": lambda x: np.fmin(np.fmax(x, type(x)(0)), type(x)(1)),
    "scalbn": np.ldexp,
}
_FUNCTIONS = _NUMPY | _MATH | _OTHERS
_FUNCTIONS |= {name + "f": function for name, function in _FUNCTIONS.items()}
_FUNCTIONS |= {"fast_" + name: _FUNCTIONS[name] for name in ("cosf", "exp10f", "expf", "fdividef", "log10f", "log2f")}
_FUNCTIONS |= {"fast_" + name: _FUNCTIONS[name] for name in ("logf", "powf", "sinf", "tanf")}
# Rounding to nearest, as NumPy does.
for _prefix in ("d", "f"):
    _FUNCTIONS |= {f"{_prefix}add_rn": np.add, f"{_prefix}mul_rn": np.multiply, f"{_prefix}div_rn": np.divide}
    _FUNCTIONS |= {f"{_prefix}sqrt_rn": np.sqrt, f"{_prefix}rcp_rn": np.reciprocal}
_FUNCTIONS |= {
    "fsub_rn": np.subtract,
    "frsqrt_rn": _OTHERS["rsqrt"],
    "fma_rn": arithmetic.fma,
    "fmaf_rn": arithmetic.fma,
}


def install():
    """Replace the empty functions of `numba.cuda.libdevice`."""
    from numba.cuda import libdevice

    for name, function in vars(libdevice).copy().items():
        if isinstance(function, types.FunctionType):
            known = _FUNCTIONS.get(name)
            reason = "which runs no machine code"
            setattr(libdevice, name, _typed(name, known) if known else unsupported(f"libdevice.{name}", reason))


def _typed(name, function):
    """Return a function that converts arguments and result to the types that libdevice declares."""
    from numba.cuda.libdevicefuncs import functions

    result, arguments = functions[f"__nv_{name}"]
    accepted, returned = [memory.as_dtype(a.ty).type for a in arguments], memory.as_dtype(result).type

    def call(*values):
        if len(values) != len(accepted):
            raise TypeError(f"libdevice.{name} takes {len(accepted)} arguments, but {len(values)} were given")
        return returned(function(*(dtype(value) for dtype, value in zip(accepted, values))))

    call.__name__ = call.__qualname__ = name
    return call
