"""Loops: iterators of ranges that differ between lanes, and of loops without a limit."""

import itertools

import numpy as np

from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lanes import keep
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray
_MOST_ITERATIONS = 1 << 16


def vrange(mask, *bounds):
    """Yield the values of `range(*bounds)` with the lanes that take part in the iteration."""
    if not any(type(b) is Weak or type(b) is ndarray for b in bounds):
        for i in range(*bounds):
            yield i, mask
        return
    start, stop, step = (0, *bounds, 1) if len(bounds) == 1 else (*bounds, 1)[:3]
    if type(step) is Weak or type(step) is ndarray or step == 0:
        raise Unsupported("range with a step that differs between lanes")
    start, stop = (_integers(b) for b in (start, stop))
    step = int(step)
    value = start + 0 * stop if type(start) is not ndarray else start
    lanes = keep(mask, value < stop if step > 0 else value > stop)
    while lanes is not False:
        yield Weak(value), lanes
        value = value + step
        lanes = keep(lanes, value < stop if step > 0 else value > stop)


def _integers(value):
    values = value.values if type(value) is Weak else value
    if isinstance(values, ndarray):
        if values.dtype.kind not in "iub":
            raise Unsupported("range of numbers that are not integers")
        return values.astype(np.int64)
    return int(values)


def _too_long():
    raise Unsupported("a loop that does not end")
    yield


def endless():
    """Return an iterator for a loop without a limit, which a race could otherwise make endless."""
    return itertools.chain(range(_MOST_ITERATIONS), _too_long())


def iterate(iterable):
    """Raise an error: lanes have no order to iterate in."""
    if type(iterable) is ndarray or type(iterable) is Weak:
        raise Unsupported("iteration over a value that differs between lanes")
    return iterable
