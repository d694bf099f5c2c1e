"""Copies of kernels that refer to numba-cuda-mlir's names instead of Numba's.

A kernel's code is not touched. Its copy gets other globals and other closure values: ``cuda`` is numba-cuda-mlir's
module, a type is the corresponding one, a device function is translated in turn, and an intrinsic is wrapped so that
its code generator emits MLIR.
"""

import types as python_types
from functools import cache

from moe_numba.runtime.mlir.types import converted

_OWN = "moe_numba"


@cache
def translation(arch):
    """Return the `Translation` of one architecture: numba-cuda-mlir compiles a device function once, for one."""
    return Translation()


class Translation:
    """Translates functions; a device function that several kernels call is translated, and compiled, once."""

    def __init__(self):
        self._done = {}  # id of a value -> (the value, so that the id stays its own, and its translation)

    def kernel(self, function):
        """Return the copy of a kernel's Python function, with the values that its names have now."""
        from numba_cuda_mlir.descriptor import mlir_target

        copy = self._function(function)
        mlir_target.typing_context.refresh()  # it knows only the intrinsics that there were at the last time
        return copy

    def device_function(self, value):
        """Return numba-cuda-mlir's dispatcher of a device function or of a Python function."""
        from numba_cuda_mlir import cuda

        from moe_numba.runtime.mlir.corrections import inline

        jit, function = cuda.jit(device=True, inline=inline), getattr(value, "py_func", value)
        return self._once(value, lambda: jit(self._function(function)))

    def value(self, value):
        """Return what a name of a kernel stands for."""
        from numba import types
        from numba_cuda_mlir.numba_cuda import types as mlir_types

        if isinstance(value, types.Type):
            return converted(value, mlir_types)
        if isinstance(value, python_types.ModuleType):
            return self._module(value)
        if hasattr(value, "py_func"):
            return self.device_function(value)
        if hasattr(value, "_defn"):
            return self._once(value, lambda: self._intrinsic(value))
        if type(value).__name__ == "ExternFunction":
            return self._once(value, lambda: _declared(value))
        if isinstance(value, tuple):
            items = [self.value(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if (getattr(value, "__module__", None) or "").startswith("numba.cuda."):
            return _counterpart(value)
        return value

    def _once(self, value, make):
        if id(value) not in self._done:
            self._done[id(value)] = value, make()
        return self._done[id(value)][1]

    def _module(self, module):
        if module.__name__ in ("numba", "numba.cuda") or module.__name__.startswith(("numba.cuda.", "numba.types")):
            return _counterpart(module)
        if module.__name__.partition(".")[0] == _OWN:
            return self._once(module, lambda: python_types.ModuleType(module.__name__))
        return module

    def _function(self, function):
        code, read = function.__code__, set(_names(function.__code__))

        def translated(value):
            copy = self.value(value)
            if isinstance(value, python_types.ModuleType) and copy is not value:  # of the package: with what is read
                for attribute in read & vars(value).keys() - vars(copy).keys():
                    setattr(copy, attribute, self.value(getattr(value, attribute)))
            return copy

        names = {name: translated(function.__globals__[name]) for name in read & function.__globals__.keys()}
        names |= {"__builtins__": __builtins__, "__name__": function.__module__}
        cells = _changed_cells(function, translated)
        copy = python_types.FunctionType(code, names, function.__name__, function.__defaults__, cells)
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        return copy

    def _intrinsic(self, intrinsic):
        from moe_numba.runtime.mlir.builder import adapted

        return adapted(self._with_callees(intrinsic._defn), self)

    def _with_callees(self, function):
        """Return a copy of an intrinsic's definition in which device functions to call are `Callee`."""
        from moe_numba.runtime.mlir.builder import Callee

        def replaced(value):
            if hasattr(value, "py_func"):
                return Callee(self.device_function(value), value.py_func)
            if isinstance(value, python_types.FunctionType) and value.__closure__:
                return self._with_callees(value)
            return value

        cells = _changed_cells(function, replaced)
        copy = python_types.FunctionType(
            function.__code__, function.__globals__, function.__name__, function.__defaults__, cells
        )
        copy.__dict__.update(function.__dict__)
        copy.__module__, copy.__doc__ = function.__module__, function.__doc__
        return copy


def _changed_cells(function, change):
    """Return the closure of a function with every value replaced by ``change`` of it."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(python_types.CellType(change(cell.cell_contents)))
        except ValueError:  # empty
            cells.append(cell)
    return tuple(cells)


def _names(code):
    """Yield the names that code and the functions within it may read."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, python_types.CodeType):
            yield from _names(constant)


def _counterpart(value):
    """Return numba-cuda-mlir's module, function or class of the same name."""
    from numba import cuda as numba_cuda
    from numba_cuda_mlir import cuda
    from numba_cuda_mlir.numba_cuda import types

    if isinstance(value, python_types.ModuleType):
        if value.__name__ == "numba":
            module = python_types.ModuleType("numba")
            module.__dict__.update(vars(types), cuda=cuda, types=types)
            return module
        name = value.__name__.removeprefix("numba.").removeprefix("cuda").lstrip(".")
        if value.__name__.startswith("numba.types") or name.startswith("types"):
            return types
    else:
        # A stub such as `cuda.shfl_sync`, which a kernel may have under another name.
        name = next((n for n, found in vars(numba_cuda).items() if found is value), None)
        if name is None:
            raise NotImplementedError(f"{value!r} has no counterpart in numba-cuda-mlir that is known here")
    for part in name.split(".") if name else ():
        cuda = getattr(cuda, part)
    return cuda


def _declared(function):
    """Return numba-cuda-mlir's declaration of a function in CUDA C++ that `ptx.cuda_cpp.declared` declares."""
    from numba_cuda_mlir import cuda
    from numba_cuda_mlir.numba_cuda import types

    arguments = [converted(argument, types) for argument in function.sig.args]
    signature = converted(function.sig.return_type, types)(*arguments)
    return cuda.declare_device(function.name, signature, link=function.link, abi="c")
