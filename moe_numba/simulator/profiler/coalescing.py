"""Coalescing: the 32-byte sectors of global memory that one warp-level request touches.

Nsight Compute counts the same: one request for each executed load or store instruction of a warp, of any vector width
(`l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum`, `..._op_st.sum`), and the sectors of each request
(`l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum`, `..._op_st.sum`).
"""

import itertools
import sys
from collections import Counter

import numpy as np

SECTOR_BYTES = 32


def count_sectors(addresses, size):
    """Count the distinct sectors that accesses of `size` bytes at these addresses touch."""
    first = {a // SECTOR_BYTES for a in addresses}
    return len(
        first.union(s for a in addresses for s in range(a // SECTOR_BYTES + 1, (a + size - 1) // SECTOR_BYTES + 1))
    )


def most_on_one_address(addresses):
    """Return the largest number of lanes that access one address."""
    return max(Counter(addresses).values())


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
