"""Atomic operations on arrays and pointers, as `cuda.atomic` names them. Each returns the old value.

No other thread runs in the middle of one. An atomic that leaves memory as it was is taken for a poll, and gives way to
others: that is how a loop on `cas` waits for a lock. One that changes memory may end such a wait.
"""

import greenlet
import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.errors import OutOfBounds
from moe_numba.simulator.memory_model.weak_cells import WeakCells


def update(target, index, change):
    """Replace `target[index]` by `change(old)`, converted as C converts it, and return the old value."""
    if memory.attentive:
        memory.before(target, index, writes=True)
    array = getattr(target, "array", target)
    if any(k < 0 for k in (index if isinstance(index, tuple) else (index,))):
        raise OutOfBounds(f"{memory.who()}index {index} is outside {target}")
    weak = isinstance(target, WeakCells)
    if weak:
        target.settle(index)
    try:
        old = array[index]
    except IndexError as error:
        raise OutOfBounds(f"{memory.who()}index {index} is outside {target}") from error
    new = memory.convert(change(old), array.dtype)
    if weak:
        target.replace(index, new)
    else:
        array[index] = new
    t = greenlet.getcurrent()
    if hasattr(t, "grid"):
        if new == old:
            t.spin("an atomic that changes nothing")
        else:
            t.grid.progress()
    return old


def _by(combine):
    """The operation that combines the old value with one of the same type."""

    def operation(array, index, value):
        return update(array, index, lambda old: combine(old, memory.convert(value, old.dtype)))

    return operation


class Atomic:
    """What a kernel knows as `cuda.atomic`."""

    add = staticmethod(_by(lambda old, value: old + value))
    sub = staticmethod(_by(lambda old, value: old - value))
    and_ = staticmethod(_by(lambda old, value: old & value))
    or_ = staticmethod(_by(lambda old, value: old | value))
    xor = staticmethod(_by(lambda old, value: old ^ value))
    exch = staticmethod(_by(lambda old, value: value))
    inc = staticmethod(_by(lambda old, value: 0 if old >= value else old + old.dtype.type(1)))
    dec = staticmethod(_by(lambda old, value: value if old == 0 or old > value else old - old.dtype.type(1)))
    max = staticmethod(_by(lambda old, value: max(old, value)))
    min = staticmethod(_by(lambda old, value: min(old, value)))
    nanmax = staticmethod(_by(np.fmax))
    nanmin = staticmethod(_by(np.fmin))

    @staticmethod
    def cas(array, index, old, value):
        """Store `value` if the element equals `old`."""
        return update(array, index, lambda now: value if now == old else now)

    @staticmethod
    def compare_and_swap(array, old, value):
        """`cas` on the first element."""
        return Atomic.cas(array, (0,) * array.ndim if hasattr(array, "ndim") else 0, old, value)
