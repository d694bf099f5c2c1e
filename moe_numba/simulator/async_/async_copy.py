"""Copies that go on by themselves: they land when the scheduler's seed will have it, at once or as late as can be.

A load claims its destination until some thread has waited for its barrier, a store its source until the thread that
started it has waited for its group: before, nobody can know that they are done, even where they are. A store writes to
global memory some time after it has read its source. A load that is no bulk copy belongs to a group as stores do, and
writes as its thread's own stores do.
"""

import itertools
import sys

import numpy as np

from moe_numba.simulator.async_ import mbarrier, tensor_map
from moe_numba.simulator.core import cluster
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import Misaligned, OutOfBounds, SimulatorError, place
from moe_numba.simulator.core.shared import region
from moe_numba.simulator.memory_model import weak

EVICT_FIRST, EVICT_LAST = np.uint64(0x12F0000000000000), np.uint64(0x14F0000000000000)
_serial = itertools.count()


class _Copy:
    """Something for the scheduler to run: a load, or a store."""

    may_stay = generic = False  # when its block ends; the way it goes, see `watch`

    def __init__(self, what, size):
        self.thread, self.what, self.size, self.site = thread(), what, size, place(sys._getframe())
        self.world, self.queued = self.thread.grid.world, True
        self.number = next(_serial)
        self.thread.grid.going += 1

    def start(self):
        self.priority = self.world.some_time()
        self.world.schedule(self)

    def settle(self):
        """It was waited for."""
        self.claim.release()

    def note(self, event):
        details = {"copy": self.number, "what": self.what, "bytes": self.size, "event": event}
        self.thread.note("async copy", details)

    def __str__(self):
        return f"{self.what}, which {self.thread} started at {self.site}, may be under way"


def _swizzle(data, chunks):
    """The bytes with their chunks of 16 in another order, which leads back where it is applied twice."""
    return data if chunks is None else data.reshape(-1, 16)[chunks].reshape(-1)


class Load(_Copy):
    """From global memory to a region of shared memory, and then to a barrier."""

    remedy = "wait for its mbarrier first"

    def __init__(self, what, read, to, barrier, swizzle=None):
        super().__init__(what, to.end - to.start)
        self._read, self._to, self._barrier, self._swizzle = read, to, barrier, swizzle
        self.claim = to.room.watched().claim(to.start, to.end, True, self)
        barrier.await_copy(self)
        self.note("starts")
        self.start()

    def step(self, rng):
        self._to.bytes[:] = _swizzle(self._read(), self._swizzle)
        self.note("lands")
        self._barrier.complete(self, self.size)
        self.world.leave(self.thread.grid)


class Store(_Copy):
    """From a region of shared memory to global memory, as part of a group."""

    remedy = "wait for its group with make_bulk_wait_group_read first"

    def __init__(self, what, write, source, swizzle=None):
        super().__init__(what, source.end - source.start)
        self._write, self._source, self._swizzle = write, source, swizzle
        self.claim = source.room.watched().claim(source.start, source.end, False, self)
        self.has_read = self.has_written = False
        self._data = None
        self.groups = _groups("cp.async.bulk")
        self.groups.open.append(self)
        self.note("starts")
        self.start()

    def step(self, rng):
        if not self.has_read:
            self._data, self.has_read = _swizzle(self._source.bytes.copy(), self._swizzle), True
            self.note("has read")
            self.start()
        else:
            self._write(self._data)
            self._data, self.has_written = None, True
            self.thread.grid.progress()
            self.note("has written")
            self.world.leave(self.thread.grid)
        self.groups.look()


class Load16(_Copy):
    """A thread's own 16 bytes from global to shared memory, the last of them zeros perhaps, as part of a group."""

    remedy = "wait for its group with make_cp_async_wait_group first"
    generic = True

    def __init__(self, what, read, to):
        super().__init__(what, 16)
        self._read, self._to, self.has_written = read, to, False
        self.claim = to.room.watched().claim(to.start, to.end, True, self)
        self.groups = _groups("cp.async")
        self.groups.open.append(self)
        self.note("starts")
        self.start()

    def step(self, rng):
        data = self._read()
        self._to.bytes[: len(data)], self._to.bytes[len(data) :] = data, 0
        self.has_written = True
        self.note("lands")
        self.world.leave(self.thread.grid)
        self.groups.look()

    def settle(self):
        super().settle()
        self._to.room.watch.soil(self.thread, self._to.start, self._to.end)  # a fence that came earlier was too early


class Groups:
    """The groups of copies of one kind that one thread committed, oldest first, and those that are in none yet."""

    def __init__(self, thread, kind):
        self.thread, self.kind, self.open, self.committed, self.waits = thread, kind, [], [], False

    def wait(self, pending, read_only):
        """Wait for all groups but the `pending` newest, which then are done with their sources."""
        older = [copy for group in self.committed[: len(self.committed) - pending] for copy in group]
        while any(not (copy.has_read if read_only else copy.has_written) for copy in older):
            self.waits = True
            self.thread.park(self)
        for copy in older:
            copy.settle()
        if not read_only:
            self.committed = self.committed[max(0, len(self.committed) - pending) :]

    def look(self):
        if self.waits:
            self.waits = False
            self.thread.grid.world.wake((self.thread,))

    def __str__(self):
        return f"{self.kind}.wait_group ({sum(map(len, self.committed))} copies in {len(self.committed)} groups)"


def _groups(kind):
    """This thread's groups of copies, "cp.async" or "cp.async.bulk"."""
    t = thread()
    t.groups = t.groups or {}
    return t.groups.setdefault(kind, Groups(t, kind))


def commit(kind="cp.async.bulk"):
    """What this thread started since the last group is a group."""
    groups = _groups(kind)
    groups.committed.append(groups.open)
    groups.open = []


def wait(pending, read_only, kind="cp.async.bulk"):
    """Wait until all but the `pending` newest groups of this thread have been written, or only read."""
    _groups(kind).wait(pending, read_only)


def _check_size(what, size):
    if size % 16 or size <= 0:
        raise Misaligned(f"{thread()}: {what} takes a multiple of 16 bytes, not {size}")


def _global_bytes(pointer, index, size, what):
    """A view of global memory, for a copy."""
    start = int(index) * pointer.array.itemsize
    if start < 0 or start + size > pointer.bytes.size:
        raise OutOfBounds(f"{thread()}: {what} takes {size} bytes at index {index} of {pointer}, which are outside it")
    if (pointer.address + start) % 16:
        raise Misaligned(f"{thread()}: {what} takes what is aligned to 16 bytes; index {index} of {pointer} is not")
    return pointer.bytes[start : start + size]


def _reader(source, pointer, index):
    """What reads these bytes, some time, as the thread's block sees them then."""
    t = thread()
    if (views := weak.of(t)) is None:
        return source.copy
    return lambda: views.read(t.block, source, pointer.address + int(index) * pointer.array.itemsize)


def _writer(to, pointer, index):
    """What writes these bytes, some time."""
    t = thread()
    if (views := weak.of(t)) is None:
        return lambda data: to.__setitem__(slice(None), data)
    return lambda data: views.copy(t.block, to, pointer.address + int(index) * pointer.array.itemsize, data)


def load(array, at, pointer, index, size, barriers, barrier):
    """A bulk copy into shared memory."""
    what = "cp.async.bulk to shared memory"
    _check_size(what, size)
    source, to = _global_bytes(pointer, index, size, what), region(array, at, size, 16, what)
    Load(what, _reader(source, pointer, index), to, mbarrier.find(barriers, barrier, for_copy=True))


def load_16(array, at, pointer, index, valid):
    """A thread's own copy of 16 bytes into shared memory, of which `valid` are read and the others are zeros."""
    what = "cp.async of 16 bytes"
    if not 0 <= valid <= 16:
        raise SimulatorError(f"{thread()}: {what} has {valid} valid bytes; it must be 0 to 16")
    source = _global_bytes(pointer, index, valid, what) if valid else pointer.bytes[:0]
    Load16(what, _reader(source, pointer, index), region(array, at, 16, 16, what))


def store(pointer, index, array, at, size):
    """A bulk copy to global memory."""
    what = "cp.async.bulk to global memory"
    _check_size(what, size)
    to = _global_bytes(pointer, index, size, what)
    Store(what, _writer(to, pointer, index), region(array, at, size, 16, what))


def _box(tensor, coordinates, array, at, what, stores=False):
    """The box's coordinates as integers, and its region of shared memory."""
    if len(coordinates) != tensor.rank:
        raise SimulatorError(
            f"{thread()}: {what} takes a tensor map of {len(coordinates)} dimensions, not {tensor.rank}"
        )
    here = region(array, at, tensor.box_bytes, 128, what)
    if here.room.alignment < 8 * tensor.swizzle:
        raise Misaligned(
            f"{thread()}: {what} swizzles {tensor.swizzle} bytes by their address, and {here.room} is aligned to "
            f"{here.room.alignment}, not to {8 * tensor.swizzle}: ask for it with cuda.shared.array(..., 1024)"
        )
    coordinates = [int(c) for c in coordinates]
    first = coordinates[0] * tensor.itemsize
    if first % 16:  # an illegal instruction on a GPU
        raise Misaligned(
            f"{thread()}: {what} takes a box that starts at a multiple of 16 bytes of a row, but at "
            f"{place(sys._getframe())} its innermost coordinate is {coordinates[0]}, which is byte {first}"
        )
    if stores and min(coordinates) < 0:  # as well
        raise OutOfBounds(
            f"{thread()}: {what} takes a box that does not start before the tensor, but at "
            f"{place(sys._getframe())} its coordinates are {coordinates}"
        )
    tensor.check(coordinates, stores)
    return coordinates, here


def load_box(array, at, map_pointer, map_index, coordinates, barriers, barrier, mask=None):
    """A box of a tensor into shared memory, of this block or of those blocks of the cluster that `mask` names."""
    what = f"cp.async.bulk.tensor.{len(coordinates)}d to shared memory"
    tensor = tensor_map.used(map_pointer, map_index)
    coordinates, here = _box(tensor, coordinates, array, at, what)
    read = lambda: tensor.read(coordinates)
    swizzle = tensor_map.swizzled(here.start % 1024, tensor.box_bytes, tensor.swizzle)
    if mask is None:
        Load(what, read, here, mbarrier.find(barriers, barrier, for_copy=True), swizzle)
        return
    blocks = thread().block.cluster.blocks
    if not 0 < mask < 1 << len(blocks):
        raise OutOfBounds(f"{thread()}: {what} goes to mask {mask:#x}, but its cluster has {len(blocks)} blocks")
    for rank, block in enumerate(blocks):
        if mask >> rank & 1:
            cluster.remote(array, rank)  # looks whether that block can be reached at all
            there = mbarrier.find(barriers, barrier, rank, for_copy=True)
            Load(f"{what} of {block}", read, here.twin(block), there, swizzle)


def store_box(map_pointer, map_index, coordinates, array, at):
    """A box of shared memory into a tensor."""
    what = f"cp.async.bulk.tensor.{len(coordinates)}d to global memory"
    tensor = tensor_map.used(map_pointer, map_index)
    coordinates, here = _box(tensor, coordinates, array, at, what, stores=True)
    swizzle = tensor_map.swizzled(here.start % 1024, tensor.box_bytes, tensor.swizzle)
    Store(what, lambda data: tensor.write(coordinates, data), here, swizzle)
