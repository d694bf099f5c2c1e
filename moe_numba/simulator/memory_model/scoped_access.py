"""Simulator semantics of scoped accesses (`ptx.atomics`), which communicate with other blocks and ranks, and of fences.

Every load yields to other threads first, since it may be a poll. Outside `weak_memory` nothing else distinguishes these
accesses from ordinary ones.
"""

import numpy as np

from moe_numba.simulator.core.atomic import Atomic
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.polling import Poll
from moe_numba.simulator.memory_model import store_buffer


def loaded(t, pointer, index, scope, acquire=False):
    """Record a strong load for the detection of data races."""
    if (races := t.grid.world.races) is not None:
        races.loaded(t, pointer.address + int(index) * pointer.array.itemsize, scope, acquire)


def stored(t, pointer, index, scope, release=False):
    """Record a strong store for the detection of data races."""
    if (races := t.grid.world.races) is not None:
        races.stored(t, pointer.address + int(index) * pointer.array.itemsize, scope, release)


def load(what, pointer, index, acquire=False, scope="sys"):
    """Load an int32: relaxed or volatile, or with acquire semantics. `what` names the instruction in error messages."""
    t = thread()
    t.spin(Poll(what, pointer, index))
    if (model := store_buffer.of(t)) is not None and 0 <= index < pointer.size:
        start = pointer.address + int(index) * pointer.array.itemsize
        model.drop_stale(t.block, start, start + 4)
    value = pointer.load_vector(index, np.int32, 1, scope)[0]
    loaded(t, pointer, index, scope, acquire)
    if acquire:
        store_buffer.acquire(t)
    return value


def store(pointer, index, value, release=False, scope="sys"):
    """Store an int32: relaxed, or with release semantics, after everything that the thread stored or observed."""
    t = thread()
    if release:
        store_buffer.release(t)
    pointer.store_vector(index, (value,), np.int32, scope)
    stored(t, pointer, index, scope, release)
    if release:
        store_buffer.release(t)
    if t.grid.world.events is not None:
        details = {"buffer": pointer.name, "index": int(index), "value": int(value), "release": release}
        t.record_event("store", details)
    t.grid.memory_changed()


def add(pointer, index, value, release=False):
    """Add atomically, relaxed or with release semantics, and return the old value."""
    if release:
        store_buffer.release(thread())
    return Atomic.add(pointer, index, value, "sys", release)


def fence(scope="sys"):
    """Release this thread's stores, then acquire."""
    t = thread()
    if t.grid.world.races is not None:
        t.grid.world.races.fence(t, scope)
    store_buffer.release(t)
    store_buffer.acquire(t)
