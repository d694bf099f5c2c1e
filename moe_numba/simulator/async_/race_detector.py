"""Who touches shared memory, while copies and matrix instructions that were started go on in it.

They *claim* the bytes that they will read or write, and nobody else may touch what they write, or write what they read,
until somebody has waited for them. And threads' own stores go another way (the generic proxy) than copies and matrix
instructions do (the async proxy): what a thread wrote is dirty until that thread has fenced.
"""

import sys

import numpy as np

from moe_numba.simulator.core.errors import AsyncRace, MissingFence, place
from moe_numba.simulator.memory_model import weak

_GRAIN = 16  # bytes for each of the flags that say whether it is worth while to look closer


class Claim:
    """Bytes of a room in which something goes on: `by`.

    That says so in words, and in `remedy` how to wait for it; `may_stay` when the block ends; goes the `generic` way.
    """

    __slots__ = ("watch", "start", "end", "writes", "by")

    def __init__(self, watch, start, end, writes, by):
        self.watch, self.start, self.end, self.writes, self.by = watch, start, end, writes, by

    def release(self):
        if self in self.watch.claims:
            self.watch.claims.remove(self)
            self.watch.flag(self.start, self.end, 0)
            for other in self.watch.claims:
                self.watch.flag(other.start, other.end, 1)


class Watch:
    """The claims on one room of shared memory, and which of its bytes are dirty."""

    def __init__(self, room):
        self.room, self.claims = room, []
        self.flags = bytearray(-(-room.bytes.size // _GRAIN) + 1)
        self.dirty, self.writers = None, {}  # a number for each byte, 0 if clean; and the threads by these numbers

    def flag(self, start, end, value):
        first, last = (start - self.room.start) // _GRAIN, -(-(end - self.room.start) // _GRAIN)
        self.flags[first:last] = bytes((value,)) * (last - first)

    def touch(self, thread, target, index, writes, size=None):
        """A thread's own access to an array or a pointer that lies here."""
        address, size = _span(target, index, writes, size)
        start = address + self.room.shift
        if self.room.start <= start and start + size <= self.room.end:  # else the access itself will say so
            self._touch(thread, start, start + size, writes, index, target)

    def touch_bytes(self, thread, region, writes):
        """The same for an instruction that a thread does by itself, through the generic proxy."""
        self._touch(thread, region.start, region.end, writes, region.start - self.room.start, self.room)

    def _touch(self, thread, start, end, writes, index, target):
        first, last = (start - self.room.start) // _GRAIN, -(-(end - self.room.start) // _GRAIN)
        if self.flags[first] or last - first > 1 and any(self.flags[first:last]):
            for claim in self.claims:
                if claim.start < end and start < claim.end and (writes or claim.writes):
                    raise AsyncRace(
                        f"{thread} {'writes' if writes else 'reads'} index {index} of {target}, "
                        f"at {place(sys._getframe())}, where {claim.by}: {claim.by.remedy}"
                    )
        if writes:
            self.soil(thread, start, end)

    def soil(self, thread, start, end):
        """Take note that a thread's own store wrote these bytes."""
        if self.dirty is None:
            self.dirty = np.zeros(self.room.bytes.size, np.uint16)
        number = self.writers.get(thread)
        if number is None:
            number = self.writers[thread] = len(self.writers) + 1
        self.dirty[start - self.room.start : end - self.room.start] = number
        if thread.unfenced is None:
            thread.unfenced = {}
        first, last = thread.unfenced.get(self, (start, end))
        thread.unfenced[self] = min(first, start), max(last, end)

    def claim(self, start, end, writes, by):
        """Claim bytes for something that starts now; an error if something else goes on there, or if they are dirty."""
        for claim in self.claims:
            if claim.start < end and start < claim.end and (writes or claim.writes):
                raise AsyncRace(
                    f"{by.thread} starts {by.what} at {by.site}, which {'writes' if writes else 'reads'} bytes "
                    f"{max(start, claim.start) - self.room.start} and on of {self.room}, "
                    f"where {claim.by}: {claim.by.remedy}"
                )
        if self.dirty is not None and not by.generic:
            self._refuse_dirty(start, end, writes, by)
        claim = Claim(self, start, end, writes, by)
        self.claims.append(claim)
        self.flag(start, end, 1)
        return claim

    def _refuse_dirty(self, start, end, writes, by):
        part = self.dirty[start - self.room.start : end - self.room.start]
        if not part.any():
            return
        at = int(part.nonzero()[0][0])
        writer = next(t for t, number in self.writers.items() if number == part[at])
        raise MissingFence(
            f"{by.thread} starts {by.what} at {by.site}, which {'writes' if writes else 'reads'} byte "
            f"{start + at - self.room.start} of {self.room}; {writer} wrote it with a store of its own and has not "
            f"called fence_proxy_async_shared since"
        )

    def close(self):
        for claim in self.claims:
            if not claim.by.may_stay:
                raise AsyncRace(f"{self.room.shared.block} ends, while in {self.room} {claim.by}: {claim.by.remedy}")


def fence(thread):
    """What this thread wrote to shared memory may now be read the other way."""
    for watch, (start, end) in (thread.unfenced or {}).items():
        part = watch.dirty[start - watch.room.start : end - watch.room.start]
        part[part == watch.writers[thread]] = 0
    thread.unfenced = None
    for barrier in thread.new_barriers or ():
        barrier.fenced = True
    thread.new_barriers = None
    weak.release(thread)


def _span(target, index, writes, size):
    """The address of what an index means, and its size in bytes; 0, 0 if it means no access, or one that will fail."""
    array = target.array
    if array.ndim == 1 and type(index) is not tuple and not isinstance(index, slice):
        return target.address + int(index) * array.strides[0], size or array.itemsize
    if isinstance(index, tuple) and len(index) == array.ndim and not any(isinstance(i, slice) for i in index):
        return target.address + sum(int(i) * s for i, s in zip(index, array.strides)), array.itemsize
    if not writes:  # a view, which reads nothing
        return 0, 0
    first, last = np.lib.array_utils.byte_bounds(array[index])
    return first, last - first
