"""Static scan of a kernel for asynchronous instructions, before it starts.

Shared memory of kernels that use them is checked for races from the start. Accesses of other kernels skip the checks.
"""

import types
import weakref

_PTX = "moe_numba.ptx."
_ASYNC_MODULES = {_PTX + name for name in ("mbarrier", "cp_async", "tma", "wgmma")}
_results = weakref.WeakKeyDictionary()


def uses_async_instructions(function):
    """Return whether a function uses an asynchronous instruction, itself or through the functions that it names."""
    if function not in _results:
        _results[function] = _function_uses(function, set())
    return _results[function]


def _function_uses(function, seen):
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    seen.add(function)
    if function.__module__ in _ASYNC_MODULES:
        return True
    return any(
        _value_uses(value, seen, names) for names in names_in(function.__code__) for value in values_of(function, names)
    )


def names_in(code):
    """Yield the set of names that a code object uses, and those of the code objects nested in it."""
    yield set(code.co_names) | set(code.co_freevars)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def values_of(function, names):
    """Yield the values of these names in the function's globals and in its closure."""
    yield from (function.__globals__[name] for name in names if name in function.__globals__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:
            pass  # a name without a value yet


def _value_uses(value, seen, names):
    if isinstance(value, types.ModuleType):
        if value.__name__ in _ASYNC_MODULES:
            return True
        if value.__name__.startswith("moe_numba."):
            return any(_function_uses(getattr(value, name, None), seen) for name in names)
        return False
    return _function_uses(getattr(value, "py_func", value), seen)
