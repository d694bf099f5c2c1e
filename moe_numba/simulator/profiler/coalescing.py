"""Coalescing: the 32-byte sectors of global memory that one warp-level request touches.

Nsight Compute counts the same: one request for each executed load or store instruction of a warp, of any vector width
(`l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum`, `..._op_st.sum`), and the sectors of each request
(`l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum`, `..._op_st.sum`).
"""

import itertools
import sys

import numpy as np

SECTOR_BYTES, LINE_BYTES = 32, 128


def sectors_of(addresses, active, size):
    """Return the sectors of requests: byte addresses [request, lane], and which lanes are active.

    The results are the sectors of each row in ascending order, which of them to take, so that each counts once, and
    how many lines of 128 bytes they are.
    """
    first = addresses // SECTOR_BYTES
    more = int(((addresses + (size - 1)) // SECTOR_BYTES - first).max(initial=0))
    if more:
        last = (addresses + (size - 1)) // SECTOR_BYTES
        first = np.concatenate([np.minimum(first + k, last) for k in range(more + 1)], 1)
        active = np.tile(active, (1, more + 1))
    sectors, new = _first_of_equal(first, active)
    lines = sectors // (LINE_BYTES // SECTOR_BYTES)
    new_lines = new.copy()
    new_lines[:, 1:] &= lines[:, 1:] != lines[:, :-1]
    return sectors, new, np.count_nonzero(new_lines, axis=1)


def contention_of(addresses, active):
    """Return the most lanes that access one address, of each request, and the distinct addresses of each.

    The latter are the addresses in each row's order, [request, lane], and which of them to take.
    """
    addresses, new = _first_of_equal(addresses, active)
    lane = np.arange(addresses.shape[1])
    since = lane - np.maximum.accumulate(np.where(new, lane, 0), axis=1) + 1  # the first of equals
    return np.where(addresses >= 0, since, 0).max(1), addresses, new


def _first_of_equal(values, active):
    """Return sorted rows of values that are not negative, -1 for inactive lanes, and where a new value begins."""
    values = np.sort(np.where(active, values, -1), axis=1)
    new = values >= 0
    new[:, 1:] &= values[:, 1:] != values[:, :-1]
    return values, new


class DeviceAddresses:
    """Converts host addresses to those that the memory would have on a GPU, as far as alignment is concerned.

    NumPy aligns an array to 16 bytes, cudaMalloc to 256. An array that owns its memory therefore starts at a multiple
    of 256 here, and a view keeps its offset. Torch aligns CPU storages to 64 bytes, so their addresses do not change.
    """

    def __init__(self):
        self._shifts = {}  # id of the array that owns the memory -> (that array, what to add to addresses in it)
        self._next = itertools.count(1)

    def shift(self, array):
        """Return what to add to host addresses in this array."""
        owner = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        known = self._shifts.get(id(owner))
        if known is None:
            known = self._shifts[id(owner)] = owner, self._shift(owner)  # the reference keeps the id from being reused
        return known[1]

    def _shift(self, owner):
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(owner.base, torch.Tensor):
            return 0
        # Addresses beyond those of the process, so that no two arrays share a sector.
        return (next(self._next) << 48) - owner.__array_interface__["data"][0]
