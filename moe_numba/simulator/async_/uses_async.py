"""Finds out, before a kernel starts, whether it will have copies or matrix instructions going on in shared memory.

Those are watched from the start, accesses of other kernels are not, and cost nothing.
"""

import types
import weakref

_PTX = "moe_numba.ptx."
_ASYNCHRONOUS = {_PTX + name for name in ("mbarrier", "bulk", "cp_async", "tma", "wgmma")}
_known = weakref.WeakKeyDictionary()


def asynchronous(function):
    """Whether a function names an asynchronous instruction, itself or through the functions that it names."""
    if function not in _known:
        _known[function] = _reaches(function, set())
    return _known[function]


def _reaches(function, seen):
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    seen.add(function)
    if function.__module__ in _ASYNCHRONOUS:
        return True
    return any(
        _leads_to(value, seen, names) for names in _names(function.__code__) for value in _values(function, names)
    )


def _names(code):
    """All the names that a function's code uses, and that of the functions in it."""
    yield set(code.co_names) | set(code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _values(function, names):
    """What these names stand for in the function's globals and in its closure."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or ())
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    for _, cell in cells:
        try:
            yield cell.cell_contents
        except ValueError:
            pass  # a name that has no value yet


def _leads_to(value, seen, names):
    if isinstance(value, types.ModuleType):
        if value.__name__ in _ASYNCHRONOUS:
            return True
        if value.__name__.startswith("moe_numba."):
            return any(_reaches(getattr(value, name, None), seen) for name in names)
        return False
    return _reaches(getattr(value, "py_func", value), seen)
