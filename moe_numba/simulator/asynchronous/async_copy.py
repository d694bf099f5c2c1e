"""Asynchronous copies: cp.async, bulk copies and TMA. They complete when the seeded scheduler chooses, early or late.

A load reserves its destination until a thread has waited for its mbarrier. A store reserves its source until the
issuing thread has waited for its bulk group. Until then the kernel cannot know that the copy is complete, even if it
is. A store writes global memory some time after it has read its source. A 16-byte `cp.async` belongs to a group as
stores do, and writes through the generic proxy as its thread's own stores do.
"""

import itertools
import sys

import greenlet
import numpy as np

from moe_numba.simulator.asynchronous import mbarrier, tensor_map
from moe_numba.simulator.core import cluster
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import (
    Misaligned,
    OutOfBounds,
    SimulatorError,
    kernel_frame,
    location_of,
    source_location,
)
from moe_numba.simulator.core.shared import shared_region
from moe_numba.simulator.memory_model import store_buffer
from moe_numba.simulator.memory_model.happens_before import AsyncOperation

EVICT_FIRST, EVICT_LAST = np.uint64(0x12F0000000000000), np.uint64(0x14F0000000000000)
_serial_numbers = itertools.count()


class _AsyncCopy:
    """A copy, as a unit that the scheduler runs and as the owner of a Reservation of shared memory."""

    may_outlive_block = generic_proxy = False

    def __init__(self, what, region, writes, spans, store=False, box=None):
        """`spans` lists the (address, size) of the bytes of global memory that it accesses."""
        self.thread, self.what, self.size = thread(), what, region.end - region.start
        frame = kernel_frame(sys._getframe())
        self._place = frame and (frame.f_code, frame.f_lasti)
        self.region, self.world, self.queued = region, self.thread.grid.world, True
        self.number = next(_serial_numbers)
        self.thread.grid.active += 1
        if self.world.profile is not None:
            self.world.profile.operation(what, self.size, box, spans=spans)
        self.reservation = region.allocation.race_detector().reserve(region.start, region.end, writes, self)
        self.reading = self.writing = None  # see `happens_before.AsyncOperation`
        if (races := self.world.races) is not None:
            self.reading, self.writing = AsyncOperation(what, self.remedy), AsyncOperation(what, self.remedy)
            shared, outside = (self.reading, self.writing) if store else (self.writing, self.reading)
            address = region.start - region.allocation.to_window
            races.issue(self.thread, shared, address, self.size, not store, region, is_global=False)
            for address, size in spans:
                where = f"{size} bytes of global memory at {address:#x}"
                races.issue(self.thread, outside, address, size, store, where, is_global=not self.generic_proxy)

    @property
    def site(self):
        """Where the kernel issued the copy, for messages."""
        return location_of(*self._place) if self._place else source_location(None)

    def know(self, races, t, only_reading=False):
        """Record that a thread has waited for the copy, or only for its reads."""
        races.know(t, self.reading)
        if not only_reading:
            races.know(t, self.writing)

    def start(self):
        self.record_event("starts")
        self._schedule()

    def _schedule(self):
        self.priority = self.world.completion_priority()
        self.world.schedule(self)

    def release(self):
        """End the reservation, because a thread has waited for the copy."""
        self.reservation.release()

    def record_event(self, event):
        if self.world.events is not None:
            details = {"copy": self.number, "what": self.what, "bytes": self.size, "event": event}
            self.thread.record_event("async copy", details)

    def __str__(self):
        return f"{self.what}, which {self.thread} issued at {self.site}, may be in flight"


def _reorder(data, chunks):
    """Permute the 16-byte chunks of `data`; applying a swizzle twice restores the order."""
    return data if chunks is None else data.reshape(-1, 16)[chunks].reshape(-1)


class _Load(_AsyncCopy):
    """Copy from global memory to a region of shared memory; reports to an mbarrier."""

    def __init__(self, what, read, region, barrier, spans, chunks=None, box=None):
        self._read, self._barrier, self._chunks = read, barrier, chunks
        super().__init__(what, region, True, spans, box=box)
        barrier.attach_copy(self)
        self.start()

    @property
    def remedy(self):
        return self._barrier.remedy_of_copy()

    def step(self, rng):
        self.region.bytes[:] = _reorder(self._read(), self._chunks)
        self.record_event("lands")
        self._barrier.complete_copy(self, self.size)
        self.world.retire(self.thread.grid)


class _Store(_AsyncCopy):
    """Copy from a region of shared memory to global memory, as a part of a bulk group."""

    remedy = "wait for its group with make_bulk_wait_group_read first"

    def __init__(self, what, write, region, spans, chunks=None, box=None):
        super().__init__(what, region, False, spans, store=True, box=box)
        self._write, self._chunks = write, chunks
        self.has_read = self.has_written = False
        self._data = None
        self.groups = _groups("cp.async.bulk")
        self.groups.uncommitted.append(self)
        self.start()

    def step(self, rng):
        if not self.has_read:
            self._data, self.has_read = _reorder(self.region.bytes.copy(), self._chunks), True
            self.record_event("has read")
            self._schedule()
        else:
            self._write(self._data)
            self._data, self.has_written = None, True
            self.thread.grid.memory_changed()
            self.record_event("has written")
            self.world.retire(self.thread.grid)
        self.groups.wake_waiter()


class _Load16(_AsyncCopy):
    """Copy of 16 bytes from global to shared memory, zero-filled after the valid ones; part of a cp.async group."""

    remedy = "wait for its group with make_cp_async_wait_group first"
    generic_proxy = True

    def __init__(self, what, read, region, spans):
        super().__init__(what, region, True, spans)
        self._read, self.has_written = read, False
        self.groups = _groups("cp.async")
        self.groups.uncommitted.append(self)
        self.start()

    def step(self, rng):
        data = self._read()
        destination = self.region.bytes
        destination[: len(data)], destination[len(data) :] = data, 0
        self.has_written = True
        self.record_event("lands")
        self.world.retire(self.thread.grid)
        self.groups.wake_waiter()

    def release(self):
        super().release()
        # A proxy fence before this wait does not cover the copy.
        self.region.allocation.detector.mark_unfenced(self.thread, self.region.start, self.region.end)


class _CopyGroups:
    """One thread's copies of one kind: committed groups, oldest first, and copies that are not in a group yet."""

    def __init__(self, thread, kind):
        self.thread, self.kind, self.uncommitted, self.committed, self.waits = thread, kind, [], [], False

    def wait(self, pending, read_only):
        """Wait for all but the `pending` newest groups; with `read_only`, until they have read their sources."""
        older = [copy for group in self.committed[: len(self.committed) - pending] for copy in group]
        while any(not (copy.has_read if read_only else copy.has_written) for copy in older):
            self.waits = True
            greenlet.getcurrent().park(self)  # this thread, or its gang of the vector engine
        races = self.thread.grid.world.races
        for copy in older:
            copy.release()
            if races is not None:
                copy.know(races, self.thread, only_reading=read_only)
        if not read_only:
            self.committed = self.committed[max(0, len(self.committed) - pending) :]

    def wake_waiter(self):
        if self.waits:
            self.waits = False
            self.thread.grid.world.wake((self.thread,))

    def __str__(self):
        return f"{self.kind}.wait_group ({sum(map(len, self.committed))} copies in {len(self.committed)} groups)"


def _groups(kind):
    """Return this thread's groups of copies of kind "cp.async" or "cp.async.bulk"."""
    t = thread()
    if t.copy_groups is None:
        t.copy_groups = {}
    found = t.copy_groups.get(kind)
    if found is None:
        found = t.copy_groups[kind] = _CopyGroups(t, kind)
    return found


def commit(kind="cp.async.bulk"):
    """Commit the copies that this thread issued since its last commit as one group."""
    groups = _groups(kind)
    groups.committed.append(groups.uncommitted)
    groups.uncommitted = []


def wait(pending, read_only, kind="cp.async.bulk"):
    """Wait until at most the `pending` newest groups of this thread have not been written (or read)."""
    _groups(kind).wait(pending, read_only)


def _check_size(what, size):
    if size % 16 or size <= 0:
        raise Misaligned(f"{thread()}: {what} takes a multiple of 16 bytes, not {size}")


def _global_bytes(pointer, index, size, what):
    """Return a view of `size` bytes of global memory from element `index` on; check bounds and alignment."""
    start = int(index) * pointer.array.itemsize
    if start < 0 or start + size > pointer.bytes.size:
        raise OutOfBounds(f"{thread()}: {what} takes {size} bytes at index {index} of {pointer}, which are outside it")
    if (pointer.address + start) % 16:
        raise Misaligned(
            f"{thread()}: {what} needs an address aligned to 16 bytes; index {index} of {pointer} is not aligned"
        )
    return pointer.bytes[start : start + size]


def _spans(pointer, index, size):
    """Return the address and size of the bytes that a copy accesses, as a list; empty if there are none."""
    return [(pointer.address + int(index) * pointer.array.itemsize, size)] if size else []


def _reader(source, pointer, index):
    """Return a function that reads these bytes as the thread's block sees them when it is called."""
    t = thread()
    if (model := store_buffer.of(t)) is None:
        return source.copy
    return lambda: model.read(t.block, source, pointer.address + int(index) * pointer.array.itemsize)


def _writer(destination, pointer, index):
    """Return a function that writes these bytes."""
    t = thread()
    if (model := store_buffer.of(t)) is None:
        return lambda data: destination.__setitem__(slice(None), data)
    return lambda data: model.write_through(
        t.block, destination, pointer.address + int(index) * pointer.array.itemsize, data
    )


def load(array, offset, pointer, index, size, barriers, barrier_index):
    """Issue a bulk copy into shared memory."""
    what = "cp.async.bulk to shared memory"
    _check_size(what, size)
    source, destination = _global_bytes(pointer, index, size, what), shared_region(array, offset, size, 16, what)
    barrier = mbarrier.find(barriers, barrier_index, for_copy=True)
    _Load(what, _reader(source, pointer, index), destination, barrier, _spans(pointer, index, size))


def load_16(array, offset, pointer, index, valid):
    """Issue a copy of 16 bytes into shared memory, of which `valid` are read and the others are zeros."""
    what = "cp.async of 16 bytes"
    if not 0 <= valid <= 16:
        raise SimulatorError(f"{thread()}: {what} has {valid} valid bytes; it must be 0 to 16")
    source = _global_bytes(pointer, index, valid, what) if valid else pointer.bytes[:0]
    if valid and (profile := thread().grid.world.profile) is not None:
        profile.access(thread(), pointer, index, False, valid, "cp.async")
    region = shared_region(array, offset, 16, 16, what)
    _Load16(what, _reader(source, pointer, index), region, _spans(pointer, index, valid))


def store(pointer, index, array, offset, size):
    """Issue a bulk copy to global memory."""
    what = "cp.async.bulk to global memory"
    _check_size(what, size)
    destination = _global_bytes(pointer, index, size, what)
    region = shared_region(array, offset, size, 16, what)
    _Store(what, _writer(destination, pointer, index), region, _spans(pointer, index, size))


def _check_box(tensor, coordinates, array, offset, what, stores=False):
    """Check a box of a tensor; return its coordinates as integers, and its region of shared memory."""
    if len(coordinates) != tensor.rank:
        raise SimulatorError(
            f"{thread()}: {what} takes a tensor map of {len(coordinates)} dimensions, not {tensor.rank}"
        )
    region = shared_region(array, offset, tensor.box_bytes, 128, what)
    if region.allocation.alignment < 8 * tensor.swizzle:
        raise Misaligned(
            f"{thread()}: {what} swizzles {tensor.swizzle} bytes by their address, and {region.allocation} is aligned "
            f"to {region.allocation.alignment}, not to {8 * tensor.swizzle}: "
            f"declare it with cuda.shared.array(..., 1024)"
        )
    coordinates = [int(c) for c in coordinates]
    first = coordinates[0] * tensor.itemsize
    if first % 16:  # an illegal instruction on a GPU
        raise Misaligned(
            f"{thread()}: {what} takes a box that starts at a multiple of 16 bytes of a row, but at "
            f"{source_location(sys._getframe())} its innermost coordinate is {coordinates[0]}, which is byte {first}"
        )
    if stores and min(coordinates) < 0:  # also an illegal instruction
        raise OutOfBounds(
            f"{thread()}: {what} takes a box that does not start before the tensor, but at "
            f"{source_location(sys._getframe())} its coordinates are {coordinates}"
        )
    tensor.check(coordinates, stores)
    return coordinates, region


def load_box(array, offset, map_pointer, map_index, coordinates, barriers, barrier_index, mask=None):
    """Issue a TMA load of a box into this block's shared memory, or into that of the cluster's blocks in `mask`."""
    what = f"cp.async.bulk.tensor.{len(coordinates)}d to shared memory"
    tensor = tensor_map.map_for_copy(map_pointer, map_index)
    coordinates, region = _check_box(tensor, coordinates, array, offset, what)
    read, spans = lambda: tensor.read(coordinates), tensor.spans(coordinates)
    chunks = tensor_map.swizzled_chunks(region.start % 1024, tensor.box_bytes, tensor.swizzle)
    if mask is None:
        barrier = mbarrier.find(barriers, barrier_index, for_copy=True)
        _Load(what, read, region, barrier, spans, chunks, tensor.box)
        return
    blocks = thread().block.cluster.blocks
    if not 0 < mask < 1 << len(blocks):
        raise OutOfBounds(f"{thread()}: {what} has multicast mask {mask:#x}, but its cluster has {len(blocks)} blocks")
    for rank, block in enumerate(blocks):
        if mask >> rank & 1:
            cluster.remote(array, rank)  # checks that the block may be accessed
            barrier = mbarrier.find(barriers, barrier_index, rank, for_copy=True)
            _Load(f"{what} of {block}", read, region.in_block(block), barrier, spans, chunks, tensor.box)


def store_box(map_pointer, map_index, coordinates, array, offset, add=False):
    """Issue a TMA store of a box, or with `add` its addition to a tensor of float32."""
    what = f"cp{'.reduce' * add}.async.bulk.tensor.{len(coordinates)}d to global memory"
    tensor = tensor_map.map_for_copy(map_pointer, map_index)
    if add and tensor.itemsize != 4:
        raise SimulatorError(f"{thread()}: {what} adds elements of {tensor.itemsize} bytes; only float32 is simulated")
    coordinates, region = _check_box(tensor, coordinates, array, offset, what, stores=True)
    chunks = tensor_map.swizzled_chunks(region.start % 1024, tensor.box_bytes, tensor.swizzle)
    spans = tensor.spans(coordinates, True)
    _Store(what, lambda data: tensor.write(coordinates, data, add), region, spans, chunks, tensor.box)
