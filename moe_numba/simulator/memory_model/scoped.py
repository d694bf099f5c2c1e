"""Accesses that threads of other blocks and ranks meet halfway, and fences: what `ptx.atomics` means in the simulator.

Each load gives way to others before it looks, for it may be a poll. Without weak memory that is all there is to them.
"""

import numpy as np

from moe_numba.simulator.core.atomic import Atomic
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.memory_model import weak


def load(what, pointer, index, acquire=False):
    """A relaxed or volatile load of an int32, or one that acquires."""
    t = thread()
    t.spin(what)
    if (views := weak.of(t)) is not None and 0 <= index < pointer.size:
        start = pointer.address + int(index) * pointer.array.itemsize
        views.refresh(t.block, start, start + 4)
    value = pointer.load_vector(index, np.int32, 1)[0]
    if acquire:
        weak.acquire(t)
    return value


def store(pointer, index, value, release=False):
    """A relaxed store of an int32, or one that releases: then all that the thread knows of comes before it."""
    t = thread()
    if release:
        weak.release(t)
    pointer.store_vector(index, (value,), np.int32)
    if release:
        weak.release(t)
    if t.grid.world.events is not None:
        t.note("store", {"buffer": pointer.name, "index": int(index), "value": int(value), "release": release})
    t.grid.progress()


def add(pointer, index, value, release=False):
    """A relaxed addition, or one that releases."""
    if release:
        weak.release(thread())
    return Atomic.add(pointer, index, value)


def fence():
    """What came before is published, what comes after sees what is."""
    t = thread()
    weak.release(t)
    weak.acquire(t)
