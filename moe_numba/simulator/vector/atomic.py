"""Atomic operations of all lanes of a gang. Lanes take their turns in a random order where their results tell."""

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.atomic import Atomic
from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.vector import access, state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lanes import Pointers
from moe_numba.simulator.vector.numbers import Weak
from moe_numba.simulator.vector.races import check_known

ndarray = np.ndarray
_UFUNCS = {"add": np.add, "sub": np.subtract, "and_": np.bitwise_and, "or_": np.bitwise_or, "xor": np.bitwise_xor}
_UFUNCS |= {"max": np.maximum, "min": np.minimum}


def _target(mask, x, index, acquires=True):
    """Return (flat array, lanes, their indices) of an atomic operation, and record the access."""
    gang = state.gang
    gang.engine.refuse_if_many("an atomic operation")
    if type(x) is not Array and type(x) is not Pointer:
        raise Unsupported(f"an atomic operation on {type(x).__name__}")
    region = x.region or access.region_of(x)
    if not region.written:
        region.save()
    array, address, step = x.array, x.address, x.array.strides[0] if x.array.ndim else 0
    if type(index) is tuple or array.ndim != 1:
        address, step, array, index = access.flatten(x, index, mask)
    index = index.values if type(index) is Weak else index
    if type(index) is ndarray:
        index = access.as_index(index) if mask is None else access.as_index(index) * mask
    else:
        index = int(index)
    lanes = gang.all_lanes if mask is None else mask.nonzero()[0]
    where = index[lanes] if type(index) is ndarray else np.full(len(lanes), index)
    if len(where) and (where.min() < 0 or where.max() >= len(array)):
        raise Unsupported("an index out of bounds")
    points = set()
    if gang.engine.shares(region) and len(where) <= 32 and not gang.engine.strict:
        points = {(region, address + int(k) * step) for k in where}
    if acquires:
        for point in points:
            gang.engine.clocks.acquire(gang, point)
    entry = region, address, step, array.itemsize, index, mask, None
    gang.log.atomics.append(entry)
    if region.shared is not None and gang.engine.strict:
        check_known(entry, gang.all_lanes)
    for point in points:
        gang.engine.clocks.release(gang, point)
    if region.shared is not None and region.shared.detector is not None:
        gang.watch(region, address, step, array.itemsize, index, mask, True)
    if gang.notes is not None:
        gang.notes.access("atomic", x, region, address, step, array.itemsize, index, mask)
    return array, lanes, where


def operand(value, lanes, dtype):
    value = value.values if type(value) is Weak else value
    if type(value) is ndarray:
        return access.as_type(value[lanes], dtype)
    return np.full(len(lanes), memory.convert(value, dtype))


def _effect(name):
    """Make the version of an atomic whose result is not used."""
    ufunc, fallback = _UFUNCS[name], _operation(name)

    def operation(mask, x, index, value):
        if type(x) is Pointers or x.dtype.kind not in "iu":
            fallback(mask, x, index, value)
            return
        array, lanes, where = _target(mask, x, index, acquires=False)
        ufunc.at(array, where, operand(value, lanes, array.dtype))
        state.gang.grid.memory_changed()

    return operation


def _operation(name):
    scalar = getattr(Atomic, name)

    def operation(mask, x, index, *values):
        if type(x) is Pointers:
            raise Unsupported("an atomic operation on pointers that differ between lanes")
        (array, lanes, where), gang = _target(mask, x, index), state.gang
        if name == "add" and len(lanes) > 8 and array.dtype.kind in "iu":
            added = operand(values[0], lanes, array.dtype)
            old, spins = _fetch_add(array, where, added), not added.any()
        else:
            old, order = np.empty(len(lanes), array.dtype), list(range(len(lanes)))
            gang.world.rng.shuffle(order)
            values = [v.values if type(v) is Weak else v for v in values]
            spins = True
            for k in order:
                lane = lanes[k]
                own = [v[lane] if type(v) is ndarray else v for v in values]
                own = [v.item() if type(w) is Weak else v for v, w in zip(own, values)]
                old[k], changed = _update(scalar, array, where[k], own)
                spins = spins and not changed
        if spins:
            gang.spin("an atomic that changes nothing")
        else:
            gang.grid.memory_changed()
        if len(lanes) == 1:
            return old[0]
        result = np.zeros(gang.size, array.dtype)
        result[lanes] = old
        return result

    return operation


def _update(scalar, array, index, values):
    """Apply the simulator's own operation to one element of plain memory."""
    state.gang.quiet = True
    old = scalar(_Element(array), int(index), *values)
    state.gang.quiet = False
    return old, array[int(index)] != old


class _Element:
    """What `core.atomic.update` needs of an array, with no checks."""

    allocation = None

    def __init__(self, array):
        self.array = array


def _fetch_add(array, where, values):
    """Add to elements in a random order, and return what each addition found."""
    order = np.random.default_rng(state.gang.world.rng.getrandbits(32)).permutation(len(where))
    order = order[np.argsort(where[order], kind="stable")]
    index, added = where[order], values[order]
    total = np.cumsum(added, dtype=array.dtype)
    before = total - added
    new = np.ones(len(index), bool)
    new[1:] = index[1:] != index[:-1]
    first = np.maximum.accumulate(np.where(new, np.arange(len(index)), 0))
    found = array[index] + (before - before[first])
    old = np.empty_like(found)
    old[order] = found
    np.add.at(array, where, values)
    return old


OPERATIONS = {getattr(Atomic, name): _operation(name) for name in ("exch", "inc", "dec", "cas", "nanmax", "nanmin")}
OPERATIONS |= {getattr(Atomic, name): _operation(name) for name in _UFUNCS}
EFFECTS = {getattr(Atomic, name): _effect(name) for name in _UFUNCS}
