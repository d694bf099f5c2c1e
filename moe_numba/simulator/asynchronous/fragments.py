"""Accumulator fragments of wgmma: one NumPy operation applies to all of a thread's floats."""

import functools

import numpy as np

from moe_numba.simulator.core.arithmetic import fma as scalar_fma


class Fragment:
    """A thread's accumulators; a kernel sees a tuple of floats."""

    __slots__ = ("values",)

    def __init__(self, values):
        self.values = values

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
def accumulator_coordinates(n):
    """Return the rows and the columns in a 64 x n tile of the accumulators d[0] to d[n / 2 - 1] of 128 threads."""
    thread, i = np.arange(128)[:, None], np.arange(n // 2)[None, :]
    warp, lane = thread // 32, thread % 32
    row = 16 * warp + lane // 4 + 8 * (i >> 1 & 1)
    column = 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)
    return row, column


def scatter(tile, n):
    """Split a 64 x n tile into the fragments of 128 threads, one row of the result each."""
    return tile[accumulator_coordinates(n)]


def gather(fragments, n):
    """Assemble a 64 x n tile in float64 from the fragments of 128 threads."""
    tile = np.empty((64, n))
    tile[accumulator_coordinates(n)] = np.stack(fragments)
    return tile


def as_array(values):
    """Return a fragment, a tuple of floats or one float as an array; accumulators of a running wgmma raise."""
    if isinstance(values, (Fragment, np.ndarray)):
        return getattr(values, "values", values)
    return np.asarray(tuple(values) if hasattr(values, "__iter__") else values, np.float32)


def fma(total, acc, factor):
    """Return the fragment total + acc * factor, each element rounded once; `factor` is a float or one per element."""
    total, acc, factor = as_array(total), as_array(acc), as_array(factor)
    exact = acc.astype(np.float64) * factor + total
    out = exact.astype(np.float32)
    # Rounding to float64 and then to float32 can differ from rounding once only halfway between two floats.
    halfway = (exact.view(np.int64) & 0x1FFFFFFF) == 0x10000000
    halfway |= (np.abs(exact) < 1.2e-38) & (exact != 0)
    for i in halfway.nonzero()[0]:
        out[i] = scalar_fma(acc[i], factor if factor.ndim == 0 else factor[i], total[i])
    return Fragment(out)


def fma_columns(total, acc, factors):
    """Apply `fma` with one factor per column of the fragment: d[4 j + 2 h + i] is in column 2 j + i."""
    return fma(total, acc, as_array(factors).reshape(-1, 1, 2).repeat(2, axis=1).reshape(-1))


def fma_blocks(total, acc, factors, width):
    """Apply `fma` with one factor per row and ``width`` columns: d[4 j + 2 h + i] is in row h and block 8 j / width."""
    factors = as_array(factors).reshape(-1, 1, 2, 1)
    return fma(total, acc, np.broadcast_to(factors, (len(factors), width // 8, 2, 2)).reshape(-1))
