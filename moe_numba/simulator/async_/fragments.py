"""A thread's share of a wgmma's results, and arithmetic on it: one NumPy operation for all of a thread's floats."""

import functools

import numpy as np

from moe_numba.simulator.core.arithmetic import fma as fma_of_scalars
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.shared import region


class Fragment:
    """What a kernel sees as a tuple of floats; `waited` if it came from a wgmma and nobody has touched it since."""

    __slots__ = ("values", "waited")

    def __init__(self, values, waited=False):
        self.values, self.waited = values, waited

    def __getitem__(self, i):
        return self.values[i] if not isinstance(i, slice) else tuple(self.values[i])

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        return iter(self.values)

    def __add__(self, other):
        return (*self, *other)

    def __radd__(self, other):
        return (*other, *self)


@functools.cache
def _places(n):
    """For each of 128 threads and each of its n / 2 results: its row and its column of the 64 x n tile."""
    thread, result = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (result >> 1 & 1)
    column = 8 * (result >> 2) + 2 * (lane % 4) + (result & 1)
    return row, column


def scatter(tile, n):
    """The threads' fragments of a tile, a row each."""
    return tile[_places(n)]


def gather(rows, n):
    """The tile whose fragments the threads have, in float64."""
    tile = np.empty((64, n))
    tile[_places(n)] = np.stack(rows)
    return tile


def _floats(values):
    """A fragment, a tuple of floats or one float as an array; an array stays one, and pending results refuse."""
    if isinstance(values, (Fragment, np.ndarray)):
        return getattr(values, "values", values)
    return np.asarray(tuple(values) if hasattr(values, "__iter__") else values, np.float32)


def fma(total, acc, factor):
    """total + acc * factor, rounded once each."""
    total, acc, factor = _floats(total), _floats(acc), _floats(factor)
    exact = acc.astype(np.float64) * factor + total
    out = exact.astype(np.float32)
    # Rounded twice, to float64 and then to float32, only what lies in the middle between two floats can come out wrong.
    odd = (exact.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    odd |= (np.abs(exact) < 1.2e-38) & (exact != 0)
    for i in odd.nonzero()[0]:
        out[i] = fma_of_scalars(acc[i], factor if factor.ndim == 0 else factor[i], total[i])
    return Fragment(out)


def fma_columns(total, acc, factors):
    """The same with a factor for each column in which the results lie: d[4 j + 2 h + i] is in column 2 j + i."""
    return fma(total, acc, _floats(factors).reshape(-1, 1, 2).repeat(2, axis=1).reshape(-1))


def fma_rows(total, acc, low, high):
    """The same with a factor for each of the two rows: d[4 j + 2 h + i] is in row h."""
    return fma(total, acc, np.array([low, low, high, high] * (len(total) // 4), np.float32))


def scale(values, factor):
    """Each of the values times the factor."""
    return Fragment(_floats(values) * np.float32(factor))


def load_columns(array, index, n):
    """Of n floats in shared memory, pairs that are 8 apart, from element `index` on."""
    here = region(array, index, 4 * (n - 6), 8, "ld.shared.v2.f32")
    if here.room.watch is not None:
        here.room.watch.touch_bytes(thread(), here, writes=False)
    floats = here.bytes.view(np.float32)
    return Fragment(np.concatenate([floats[8 * j : 8 * j + 2] for j in range(n // 8)]))
