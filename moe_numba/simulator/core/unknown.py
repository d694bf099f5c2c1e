"""Values that a thread has read from shared or local memory which nothing has written.

Kernels load such values on purpose, as a part of a vector or of a tile, and do not use them. So the read is no error,
but what depends on the value is: a branch, an index, a store to global memory, an atomic operation. Operators and casts
of an unknown value give an unknown value; stored to shared or local memory, it is poison again. Other functions forget
that a value is unknown.

The read is often a consequence of a data race, with a store that comes too late. So such an error is only noted, a
thread that would need the value ends, and the world raises the error if the other threads show no race.
"""

import functools
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
    """A value that is not known; `origin` is the sentence that says who has read it, and where."""

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


def _place():
    return source_location(kernel_frame(sys._getframe(2)))


class UnknownBool(Unknown):
    """NumPy's bool has no subclasses."""

    dtype = np.dtype(np.bool_)


@functools.cache
def _class(kind):
    if kind is np.bool_:
        return UnknownBool
    try:
        return type(f"Unknown_{kind.__name__}", (Unknown, kind), {"__hash__": kind.__hash__, "dtype": np.dtype(kind)})
    except TypeError:  # a type of ml_dtypes
        return None


def poison_of(dtype):
    """Return the number of a type that memory holds which nothing has written."""
    raw = np.empty(dtype.itemsize + dtype.itemsize % 2, np.uint8)
    uninitialized.poison(raw, dtype.kind in "fc")
    return raw[: dtype.itemsize].view(dtype)[0]


def unknown(dtype, origin, value=None):
    """Return an unknown value of a type, which is poison or `value`; that itself if the type cannot be unknown."""
    made = _class(dtype.type)
    if made is UnknownBool:
        result = UnknownBool()
    else:
        value = poison_of(dtype) if value is None else value
        if made is None:
            return value
        result = made(value)
    result.origin = origin
    return result
