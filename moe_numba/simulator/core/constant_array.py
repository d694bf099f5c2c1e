"""Global arrays in kernels: Numba compiles them as constants, to which nothing can store.

`compilable` refuses the stores that it sees in the source before a launch. A `ConstantArray` refuses the others: those
through a variable, a tuple or an argument of a device function, and atomic operations.
"""

import sys
from typing import Any

import greenlet
import numpy as np

from moe_numba.simulator.core.errors import CompileError, file_name, kernel_frame


class ConstantArray(np.ndarray):
    """A view of a global array that refuses stores and atomic operations; views of it do, too."""

    name = ""

    def __array_finalize__(self, base):
        self.name = getattr(base, "name", "")

    def __setitem__(self, index, value):
        frame, kernel = kernel_frame(sys._getframe(1)), greenlet.getcurrent().grid.name
        raise CompileError(
            f"kernel {kernel} does not compile: {file_name(frame.f_code.co_filename)}:{frame.f_lineno} "
            f"stores to {self.name}, a global array, which Numba compiles as a constant: pass the array to the kernel"
        )


def holds_array(value: Any) -> bool:
    """Return whether a value is an array, or a tuple that contains one."""
    return type(value) is np.ndarray or isinstance(value, tuple) and any(map(holds_array, value))


def constant_array(value: Any, name: str) -> Any:
    """Return an array that a kernel names as a `ConstantArray`; also those in a tuple."""
    if type(value) is np.ndarray:
        value = value.view(ConstantArray)
        value.name = name
    elif isinstance(value, tuple) and holds_array(value):
        items = [constant_array(item, name) for item in value]
        value = tuple(items) if type(value) is tuple else type(value)._make(items)
    return value
