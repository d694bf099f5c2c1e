"""The memory that kernels can reach: what their arguments and registered buffers point to."""

import ctypes

import numpy as np

from moe_numba.simulator.core.memory import Array, Pointer

buffers: dict[int, Pointer] = {}  # address of a buffer that `ranks.register` registered -> Pointer to its bytes
ranks: dict[int, int] = {}  # address of a registered buffer -> the rank whose memory it is, if known


def rank_at(address: int) -> int | None:
    """Return the rank whose memory an address is in; None if no rank's registered buffer contains it."""
    for start, rank in ranks.items():
        if start <= address < start + buffers[start].size:
            return rank
    return None


def bytes_at(address, size):
    """Return ``size`` bytes of this process's memory as an array, which does not keep them alive."""
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def intervals(grids):
    """Yield the intervals of addresses that the arguments of grids and registered buffers can reach."""
    for grid in grids:
        yield from _intervals_of(grid.args)
    yield from _intervals_of(list(buffers.values()))


def _intervals_of(values):
    for value in values:
        if type(value) is Pointer:
            yield value.address, value.address + value.array.nbytes
        elif type(value) is Array:
            yield np.lib.array_utils.byte_bounds(value.array)
        elif type(value) is tuple:
            yield from _intervals_of(value)
