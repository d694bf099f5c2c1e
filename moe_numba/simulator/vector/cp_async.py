"""16-byte ``cp.async`` of a warp: the copies of all its lanes are one unit for the scheduler.

What `async_.async_copy` checks lane by lane is checked for all lanes at once. Lanes of one instruction land together.
Only an access to reserved memory could tell that apart from copies that land one by one, and such an access raises.
"""

import numpy as np

from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.vector import access, state
from moe_numba.simulator.vector.errors import Conflict, Unsupported
from moe_numba.simulator.vector.lanes import Pointers
from moe_numba.simulator.vector.numbers import Weak

KIND = "cp.async"
_BYTES = np.arange(16)


class _Copies:
    """The copies that the lanes of one instruction issue; the owner of their reservations."""

    may_outlive_block, generic_proxy = False, True
    what, remedy = "cp.async of 16 bytes", "wait for its group with make_cp_async_wait_group first"

    def __init__(self, gang, region, addresses, valid, allocation, offsets, lanes):
        """Copy `valid` bytes each from `addresses` in a region of global memory to `offsets` in an allocation."""
        self.gang, self.region, self.addresses, self.valid = gang, region, addresses, valid
        self.allocation, self.offsets, self.lanes = allocation, offsets, lanes
        self.group, self.landed = gang.copy_groups.committed, False
        starts = np.sort(offsets)
        gaps = np.diff(starts)
        if (gaps < 16).any():
            raise Conflict("two lanes copy to the same memory")
        detector, first = allocation.race_detector(), allocation.start
        ends = (gaps > 16).nonzero()[0]
        spans = zip(starts[np.append(0, ends + 1)].tolist(), starts[np.append(ends, -1)].tolist())
        self.reservations = [detector.reserve(first + a, first + b + 16, True, self) for a, b in spans]
        gang.grid.active += 1
        self.priority, self.queued = gang.world.completion_priority(), True
        gang.world.schedule(self)

    def step(self, rng):
        """Read global memory as it is now, and write shared memory."""
        inside = _BYTES < self.valid[:, None]
        position = np.where(inside, self.addresses[:, None] - self.region.start + _BYTES, 0)
        data = np.where(inside, self.region.memory.take(position.astype(np.intp), mode="clip"), 0)
        self.allocation.bytes[self.offsets[:, None] + _BYTES] = data
        self.landed = True
        self.gang.world.retire(self.gang.grid)
        if self.gang.copy_groups.waits:
            self.gang.copy_groups.waits = False
            self.gang.world.wake([self.gang])

    def release(self):
        """End the reservations, because the warp has waited; a proxy fence before does not cover the copies."""
        for reservation in self.reservations:
            reservation.release()
        self.gang.mark_unfenced(self.allocation.detector, self.offsets, 16, self.lanes)

    def __str__(self):
        return f"{self.what}, which a warp of {self.gang.block} issued, may be in flight"


class Groups:
    """The copies of a warp that it has not waited for, oldest first, and how many groups it has committed."""

    def __init__(self):
        self.copies, self.committed, self.waits = [], 0, False

    def commit(self):
        self.committed += 1

    def wait(self, gang, pending):
        """Wait for all but the `pending` newest groups."""
        older = [copies for copies in self.copies if copies.group < self.committed - pending]
        while not all(copies.landed for copies in older):
            self.waits = True
            gang.park(f"{KIND}.wait_group")
        for copies in older:
            copies.release()
        del self.copies[: len(older)]


def groups(mask):
    """Return the groups of the warp that runs; all its lanes must commit and wait together."""
    if mask is not None:
        raise Unsupported("cp.async groups of some lanes of a warp")
    return state.gang.copy_groups


def load_16(mask, array, offset, pointer, index, valid):
    """Issue the copies of all active lanes; see `async_copy.load_16`."""
    gang = state.gang
    gang.engine.refuse_if_strict("an asynchronous copy")
    if type(array) not in (Array, Pointer) or array.allocation is None or array.allocation.alignment < 16:
        raise Unsupported("cp.async to other memory than a shared array that is aligned to 16 bytes")
    lanes = gang.all_lanes if mask is None else mask.nonzero()[0]
    allocation, valid = array.allocation, _integers(valid, lanes)
    first = array.address + allocation.to_window - allocation.start
    offsets = _integers(offset, lanes) * array.array.itemsize + first
    if offsets.min() < 0 or offsets.max() + 16 > allocation.bytes.size or (offsets & 15).any():
        raise Unsupported("cp.async to a wrong address")
    if valid.min() < 0 or valid.max() > 16:
        raise Unsupported("cp.async of a wrong number of bytes")
    region, addresses = _sources(pointer, _integers(index, lanes), valid, lanes)
    _record(gang, pointer.pointers[0] if type(pointer) is Pointers else pointer, region, addresses, valid, lanes)
    if gang.notes is not None:
        gang.notes.operation(_Copies.what, 16 * len(lanes), count=len(lanes))
    gang.copy_groups.copies.append(_Copies(gang, region, addresses, valid, allocation, offsets, lanes))


def _integers(value, lanes):
    """Return an integer per lane."""
    value = value.values if type(value) is Weak else value
    return value[lanes].astype(np.int64) if type(value) is np.ndarray else np.full(len(lanes), int(value))


def _sources(pointer, index, valid, lanes):
    """Return the region of global memory that lanes read, and each lane's address in it."""
    pointers = pointer.pointers if type(pointer) is Pointers else [pointer]
    which = pointer.which[lanes] if type(pointer) is Pointers else np.zeros(len(lanes), np.int64)
    used = set(which.tolist())
    regions = {pointers[k].region or access.region_of(pointers[k]) for k in used}
    if len(regions) > 1 or any(pointers[k].allocation is not None for k in used):
        raise Unsupported("cp.async from several buffers, or from shared memory")
    addresses = np.zeros(len(lanes), np.int64)
    for k in used:
        p, own = pointers[k], (which == k) & (valid > 0)  # with 0 valid bytes nothing is read
        start = index[own] * p.array.itemsize
        if start.size and (start.min() < 0 or (start + valid[own]).max() > p.bytes.size):
            raise Unsupported("an index out of bounds")
        addresses[own] = start + p.address
    if (addresses & 15).any():
        raise Unsupported("cp.async from an address that is not aligned")
    return regions.pop(), addresses


def _record(gang, pointer, region, addresses, valid, lanes):
    """Record the reads when the copies are issued."""
    base = region.start & -16
    index = np.zeros(gang.size, np.int64)
    index[lanes] = np.maximum(addresses - base >> 4, 0)
    for size in set(valid.tolist()) - {0}:
        active = np.zeros(gang.size, bool)
        active[lanes[valid == size]] = True
        gang.log.reads.append((region, base, 16, size, index, active, None))
        if gang.notes is not None:
            gang.notes.access("cp.async", pointer, region, base, 16, size, index, active)
