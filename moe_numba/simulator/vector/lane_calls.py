"""Calls of scalar functions, lane by lane."""

import itertools
import types

import numpy as np

from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.vector import access, state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lanes import Pointers
from moe_numba.simulator.vector.local import Local
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray


def varies(value):
    """Return whether a value, or an item of a tuple, differs between lanes."""
    kind = type(value)
    if kind is ndarray or kind is Weak or kind is Pointers:
        return True
    return isinstance(value, (tuple, list)) and any(varies(item) for item in value)


def item(value, lane):
    """Return what one lane sees of a value."""
    kind = type(value)
    if kind is ndarray:
        return value[lane]
    if kind is Weak:
        return value.values[lane].item()
    if kind is Pointers:
        return value.pointers[value.which[lane]]
    if kind is Local or kind is access.Rows:
        raise Unsupported("a local array in a function that is called lane by lane")
    if isinstance(value, (tuple, list)) and varies(value):
        items = [item(v, lane) for v in value]
        return kind(items) if kind in (tuple, list) else kind._make(items)
    return value


def _items(value, lanes):
    """Return an iterable of what each of these lanes sees of a value."""
    if type(value) is Weak:
        return value.values[lanes].tolist()
    if type(value) is ndarray:
        return list(value[lanes])
    if type(value) in (int, Array, Pointer, str, types.NoneType):
        return itertools.repeat(value)
    return [item(value, lane) for lane in lanes]


def collect(values, lanes):
    """Return the results of some lanes as one value."""
    first = values[0]
    if len(values) == 1 or all(v is first for v in values):
        return first
    if isinstance(first, tuple):
        items = [collect([v[k] for v in values], lanes) for k in range(len(first))]
        return tuple(items) if type(first) is tuple else type(first)._make(items)
    if isinstance(first, Pointer):
        which, known = np.zeros(state.gang.size, np.int64), {}
        for lane, pointer in zip(lanes, values):
            which[lane] = known.setdefault((pointer.address, pointer.dtype, pointer.size), (len(known), pointer))[0]
        pointers = [p for _, p in known.values()]
        return pointers[0] if len(pointers) == 1 else Pointers(pointers, which)
    strong = isinstance(first, np.generic)
    if any(type(v) is not type(first) for v in values) or not strong and type(first) not in (int, bool, float):
        raise Unsupported(f"a result of type {type(first).__name__} that differs between lanes")
    result = np.zeros(state.gang.size, first.dtype if strong else np.asarray(first).dtype)
    try:
        result[lanes] = values
    except OverflowError:
        raise Unsupported("Python integers of more than 63 bits") from None
    return result if strong else Weak(result)


def per_lane(function):
    """Make the version of a function that calls it once for each active lane."""

    def call(mask, *arguments, **keywords):
        gang = state.gang
        if keywords:
            raise Unsupported("keyword arguments of a function that is called lane by lane")
        lanes = gang.all_lanes if mask is None else mask.nonzero()[0]
        columns, results = [_items(a, lanes) for a in arguments], []
        for lane, *own in zip(lanes.tolist(), *columns):
            gang.lane = lane
            results.append(function(*own))
        return collect(results, lanes)

    return call
