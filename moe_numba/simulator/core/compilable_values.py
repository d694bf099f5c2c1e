"""What Numba makes of the values that a kernel names outside itself: globals, built-ins, attributes of modules.

The lists are those of numba-cuda 0.30; tests/simulator/test_compilable.py compares them with the compiler.
"""

import builtins
import contextlib
import enum
import importlib
import math
import sys
import types

import numpy as np

# NumPy's functions that Numba compiles for a GPU, for scalars or for arrays, and the types that kernels may name.
_NUMPY = (
    "acos acosh all angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin array_equal "
    "asarray asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d average bitwise_and bitwise_invert "
    "bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor broadcast_shapes conj conjugate cos "
    "cosh count_nonzero deg2rad degrees divide dsplit equal fmax fmin greater greater_equal hypot imag invert "
    "iscomplexobj isnan isrealobj isscalar left_shift less less_equal log log10 log2 logical_and logical_not "
    "logical_or logical_xor maximum mean minimum nan_to_num nanmean nanprod nanstd nansum nanvar not_equal prod "
    "rad2deg radians real right_shift searchsorted shape sin sinc sinh size std sum tan tanh true_divide "
    "var vsplit "
)
_NUMPY_TYPES = np.generic, np.dtype, np.iinfo, np.finfo, np.ndindex, np.ndenumerate, np.nditer
_ALLOCATING = (
    "arange array ascontiguousarray copy empty empty_like eye full full_like identity linspace ones ones_like zeros "
    "zeros_like"
)
_NO_MATH = "cbrt comb dist factorial fsum gcd isclose isqrt lcm perm prod ulp"
_NO_BUILTINS = (
    "aiter all anext any ascii bin bytearray bytes callable chr compile delattr dir eval exec filter format getattr "
    "globals hash hex id input issubclass locals map memoryview oct open repr reversed setattr sorted super vars"
)
_MOST_ARGUMENTS = {math.hypot: 2, math.log: 1, pow: 2}
_HOST_CUDA = frozenset(  # what only the host may call
    "close current_context defer_cleanup detect device_array device_array_like event get_current_device gpus "
    "is_available list_devices managed_array mapped_array pinned pinned_array profile_start profile_stop "
    "select_device stream synchronize to_device".split()
)
_INSTEAD = {
    np.abs: "use abs",
    np.clip: "use min(max(x, low), high)",
    np.where: "write `a if condition else b`",
    math.gcd: "write Euclid's algorithm as a loop",
    math.isclose: "write abs(a - b) <= tolerance",
    reversed: "use range(n - 1, -1, -1)",
    any: "use `or`, or a loop",
    all: "use `and`, or a loop",
}
_OWN = "numba", "moe_numba.simulator", "moe_numba.ptx"  # modules whose functions and classes stand for Numba's


def _named(module, names):
    return {getattr(module, name) for name in names.split() if hasattr(module, name)}


_COMPILED_NUMPY, _ALLOCATING = _named(np, _NUMPY), _named(np, _ALLOCATING)
_NOT_COMPILED = _named(math, _NO_MATH) | _named(builtins, _NO_BUILTINS)


def refusal(text, value):
    """Return why Numba does not compile a kernel that names `value` as `text`, and what to write; None if it does."""
    if isinstance(value, (dict, set, frozenset, list)):
        return (
            f"uses {text}, a {type(value).__name__} outside the kernel, which Numba does not compile for a GPU: "
            "use a tuple, or pass an array"
        )
    if isinstance(value, tuple):
        return next(filter(None, (refusal(text, item) for item in value)), None)
    if _is_own(value) or isinstance(value, types.ModuleType):
        return None
    if callable(value) and not isinstance(value, type) and (_is_python(value) or _is_c(value)):
        why = _refusal_of_function(value)
    elif isinstance(value, type):
        why = _refusal_of_class(value)
    elif hasattr(type(value), "__cuda_array_interface__") or _has_type(value):
        return None
    else:
        why = (
            f"an instance of {type(value).__name__}, of which Numba knows no type: "
            "name the attributes that the kernel needs outside it, or pass them as arguments"
        )
    return why and f"uses {text}, {why}"


def refusal_of_arguments(text, value, count):
    """Return why Numba does not compile a call of `value` with `count` arguments, or None if it does."""
    most = _MOST_ARGUMENTS.get(value, count) if _is_c(value) else count
    return (
        f"calls {text} with {count} arguments, but Numba compiles at most {most}: write it out" * (count > most) or None
    )


def refusal_of_attribute(text, module, name):
    """Return why a kernel may not use this attribute of a module at all; None if its value decides."""
    if module.__name__ == "numba.cuda" and name in _HOST_CUDA:
        return f"uses {text}, which only the host can call: call it before the launch"
    return None


def is_mixed_tuple(value):
    """Return whether a value is a tuple with elements of several types, which Numba indexes by constants alone."""
    return isinstance(value, tuple) and len({_type_of(item) for item in value}) > 1


def extends_attributes():
    """Return whether the program has declared attributes or methods of types of its own to Numba."""
    keys = [getattr(template, "key", None) for registry in _registries() for template in registry.attributes]
    return any(not _begins(getattr(key, "__module__", None) or type(key).__module__, ("numba",)) for key in keys)


def _begins(module, names):
    return isinstance(module, str) and any(module == name or module.startswith(name + ".") for name in names)


def _is_own(value):
    attributes = getattr(value, "__dict__", {})  # not those that an object's own __getattr__ would make up
    if any(name in attributes for name in ("is_instruction", "made_by", "py_func")):
        return True
    return _begins(getattr(value, "__module__", None), _OWN) or _begins(type(value).__module__, _OWN)


def _is_python(value):
    return isinstance(value, (types.FunctionType, types.MethodType))


def _is_c(value):
    return isinstance(value, (types.BuiltinFunctionType, np.ufunc, type(np.dot)))


def _refusal_of_function(value):
    owner, module = getattr(value, "__self__", None), getattr(value, "__module__", None)
    if isinstance(value, np.ufunc) or _begins(module, ["numpy"]) or _begins(type(owner).__module__, ["numpy"]):
        if value in _COMPILED_NUMPY:
            return None
        return f"which Numba does not compile for a GPU: {_instead_of_numpy(value, owner)}"
    if _is_python(value) and module != "random":
        if _is_registered(value):
            return None
        return (
            "a plain Python function, which Numba does not compile: did you forget @cuda.jit(device=True) before its "
            "definition?"
        )
    if value in _NOT_COMPILED or module in ("random", "time") or type(owner).__module__ == "random":
        return f"which Numba does not compile for a GPU: {_INSTEAD.get(value, _instead_of(module, owner))}"
    return None


def _instead_of(module, owner):
    if "random" in (module, type(owner).__module__):
        return "use numba.cuda.random"
    return "compute it before the launch" if module == "time" else "write a loop, or compute it before the launch"


def _instead_of_numpy(value, owner):
    if value in _ALLOCATING:
        return "use cuda.local.array or cuda.shared.array, or pass an array"
    if _begins(type(owner).__module__, ["numpy.random"]):
        return "use numba.cuda.random"
    of_math = getattr(math, value.__name__, None)
    if isinstance(value, np.ufunc) and of_math and of_math not in _NOT_COMPILED:
        return f"use math.{value.__name__}"
    return _INSTEAD.get(value, "write it with Python's operators, or as a loop over the elements")


def _refusal_of_class(value):
    if value in _NOT_COMPILED:
        return f"which Numba does not compile for a GPU: {_INSTEAD.get(value, _instead_of(None, None))}"
    if value.__module__ == "builtins" or issubclass(value, (BaseException, enum.Enum, *_NUMPY_TYPES)):
        return None
    if issubclass(value, tuple) and hasattr(value, "_fields") or _has_type(value):
        return None
    return "a class, which Numba does not compile: use a tuple or a namedtuple"


def _has_type(value):
    return _type_of(value) is not None or _is_registered(value)


def _type_of(value):
    """Return the type that Numba gives a constant, by its own rules and those that a program has added; or None."""
    for module in _modules_of_numba("typeof"):
        with contextlib.suppress(Exception):  # ValueError, or whatever a value's own protocol raises
            return module.typeof(value, module.Purpose.constant)
    return None


def _is_registered(value):
    """Return whether the program has declared a function or a class to Numba (`overload`, `register_jitable`)."""
    return any(known is value for registry in _registries() for known, _ in registry.globals)


def _registries():
    return [module.builtin_registry for module in _modules_of_numba("templates")]


def _modules_of_numba(name):
    """Yield the module of Numba, and that of numba-cuda if the program uses it: it needs more than the simulator."""
    yield importlib.import_module(f"numba.core.typing.{name}")
    if (module := sys.modules.get(f"numba.cuda.typing.{name}")) is not None:
        yield module
