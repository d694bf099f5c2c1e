"""Values that a thread has read from shared or local memory which nothing has written.

Kernels load such values on purpose, as a part of a vector or of a tile, and do not use them. So the read is no error,
but what depends on the value is: a branch, an index, a store to global memory, an atomic operation. Operators and casts
of an unknown value give an unknown value; stored to shared or local memory, it is poison again. Other functions forget
that a value is unknown.

The read is often a consequence of a data race, with a store that comes too late. So such an error is only noted, a
thread that would need the value ends, and the world raises the error if the other threads show no race.
"""

import operator
import sys
import types

import greenlet
import numpy as np

from moe_numba.simulator.core import uninitialized
from moe_numba.simulator.core.errors import UninitializedRead, kernel_frame, source_location


class ThreadEnds(Exception):
    """A thread cannot go on, and its world knows why."""


def note(text):
    """Note the error of the current thread that depends on uninitialised memory."""
    world, frame = greenlet.getcurrent().grid.world, kernel_frame(sys._getframe(1))
    if world.unknown_use is None:
        traceback = types.TracebackType(None, frame, frame.f_lasti, frame.f_lineno)
        world.unknown_use = UninitializedRead(text).with_traceback(traceback)


class Unknown:
    """A value that is not known; `origin` is the sentence that says which thread has read it, and where.

    It is no subclass of NumPy's scalars, which NumPy does not support. `value` stands for it in functions that do not
    know this class.
    """

    __slots__ = ("value", "origin")

    def __init__(self, value, origin):
        self.value, self.origin = value, origin

    @property
    def dtype(self):
        return self.value.dtype

    def is_stored(self, where):
        """Note that the value is stored to global memory."""
        note(f"{self.origin}; the value is stored to {where}, at {_place()}")

    def is_needed(self, how):
        """Note what depends on the value, and end the thread."""
        note(f"{self.origin}; the value {how}, at {_place()}")
        raise ThreadEnds

    def __bool__(self):
        self.is_needed("decides a branch")

    def __index__(self):
        self.is_needed("is an index, or the length of a loop")

    def _compared(self, _):
        return unknown(np.dtype(np.bool_), self.origin)

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __hash__ = object.__hash__

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.value, dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if ufunc in _COMPARISONS:
            return self._compared(None)
        known = [v.value if isinstance(v, Unknown) else v for v in inputs]
        return getattr(ufunc, method)(*known, **options)

    def __int__(self):
        return int(self.value)

    def __float__(self):
        return float(self.value)

    def __getattr__(self, name):
        return getattr(self.value, name)


def _forward(name):
    """Make an operator for functions that are not typed as kernels are."""
    operate = getattr(operator, name)
    setattr(Unknown, f"__{name.strip('_')}__", lambda self, other: operate(self.value, other))
    setattr(Unknown, f"__r{name.strip('_')}__", lambda self, other: operate(other, self.value))


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lshift", "rshift", "and_", "or_", "xor"):
    _forward(_name)
_COMPARISONS = {np.less, np.less_equal, np.greater, np.greater_equal, np.equal, np.not_equal}


def _place():
    return source_location(kernel_frame(sys._getframe(2)))


def poison_of(dtype):
    """Return the number of a type that memory holds which nothing has written."""
    raw = np.empty(dtype.itemsize + dtype.itemsize % 2, np.uint8)
    uninitialized.poison(raw, dtype.kind in "fcV")
    return raw[: dtype.itemsize].view(dtype)[0]


def unknown(dtype, origin, value=None):
    """Return an unknown value of a type, which is poison or `value`."""
    return Unknown(poison_of(dtype) if value is None else value, origin)
