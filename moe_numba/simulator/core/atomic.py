"""Atomic operations on arrays and pointers, as `cuda.atomic` names them. Each returns the old value.

No other thread runs in the middle of one. An atomic that leaves memory unchanged is treated as a poll and yields to
other threads: that is how a loop on `cas` waits for a lock. An atomic that changes memory may end such a wait.
"""

import greenlet
import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.errors import OutOfBounds, plain_index
from moe_numba.simulator.core.polling import Poll
from moe_numba.simulator.core.settings import settings
from moe_numba.simulator.core.unknown import Unknown, note, unknown
from moe_numba.simulator.memory_model.weak_pointers import WeakAccess


def update(target, index, change, scope="gpu", release=False):
    """Replace `target[index]` by `change(old)`, converted as in C, and return the old value."""
    if memory.watching:
        origin = memory.before_access(target, index, writes=True, scope=scope, operation="atomic")
        if origin is not None:
            note(origin)
            return unknown(target.array.dtype, origin)
    array = getattr(target, "array", target)
    if any(k < 0 for k in (index if isinstance(index, tuple) else (index,))) and not _may_wrap_around(target):
        more = memory.FROM_THE_END if isinstance(target, memory.Array) else ""
        raise OutOfBounds(f"{memory.thread_prefix()}index {index} is outside {target}{more}")
    weak = isinstance(target, WeakAccess)
    if weak:
        target.make_coherent(index)
    try:
        old = array[index]
    except IndexError:
        raise OutOfBounds(f"{memory.thread_prefix()}index {index} is outside {target}") from None
    new = memory.convert(change(old), array.dtype)
    if weak:
        target.store_and_commit(index, new)
    else:
        array[index] = new
    t = greenlet.getcurrent()
    if hasattr(t, "grid"):
        if (races := t.grid.world.races) is not None:
            address, _ = memory.byte_span(target, index, writes=True)
            races.loaded(t, address, scope)
            races.stored(t, address, scope, release, updates=True)
        if new == old:
            t.spin(Poll("an atomic that changes nothing", target, index))
        else:
            t.grid.memory_changed()
    return old


def _check_known(value, target, index):
    if isinstance(value, Unknown):
        value.is_needed(f"is an operand of an atomic operation on index {plain_index(index)} of {target}")


def _may_wrap_around(target):
    """Return whether negative indices count from the end: in Numba's arrays, with the setting `wraparound`."""
    return isinstance(target, memory.Array) and settings["wraparound"]


def _operation(combine):
    """Make the atomic that stores `combine(old, value)`, with `value` converted to the type of the old value."""

    def operation(array, index, value, scope="gpu", release=False):
        _check_known(value, array, index)
        return update(array, index, lambda old: combine(old, memory.convert(value, old.dtype)), scope, release)

    return operation


class Atomic:
    """The `cuda.atomic` namespace of a kernel."""

    add = staticmethod(_operation(lambda old, value: old + value))
    sub = staticmethod(_operation(lambda old, value: old - value))
    and_ = staticmethod(_operation(lambda old, value: old & value))
    or_ = staticmethod(_operation(lambda old, value: old | value))
    xor = staticmethod(_operation(lambda old, value: old ^ value))
    exch = staticmethod(_operation(lambda old, value: value))
    inc = staticmethod(_operation(lambda old, value: 0 if old >= value else old + old.dtype.type(1)))
    dec = staticmethod(_operation(lambda old, value: value if old == 0 or old > value else old - old.dtype.type(1)))
    max = staticmethod(_operation(lambda old, value: max(old, value)))
    min = staticmethod(_operation(lambda old, value: min(old, value)))
    nanmax = staticmethod(_operation(np.fmax))
    nanmin = staticmethod(_operation(np.fmin))

    @staticmethod
    def cas(array, index, old, value):
        """Store `value` if the element equals `old`."""
        _check_known(old, array, index), _check_known(value, array, index)
        return update(array, index, lambda current: value if current == old else current)

    @staticmethod
    def compare_and_swap(array, old, value):
        """Apply `cas` to the first element."""
        return Atomic.cas(array, (0,) * array.ndim if hasattr(array, "ndim") else 0, old, value)
