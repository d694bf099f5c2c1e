"""Race detector for shared memory that asynchronous copies and matrix instructions use.

An asynchronous operation *reserves* the bytes that it will read or write. Until a thread has waited for the operation,
no other access may touch what it writes, or write what it reads. Threads' own stores go through the generic proxy, TMA
copies and wgmma through the async proxy: bytes that a thread wrote stay *unfenced*, and are refused to the async proxy,
until that thread has executed a proxy fence.
"""

import sys

import numpy as np

from moe_numba.simulator.core.errors import AsyncRace, MissingFence, source_location
from moe_numba.simulator.core.memory import byte_span
from moe_numba.simulator.memory_model import store_buffer

_GRAIN = 16  # bytes per flag of the filter that tells whether reservations must be searched
_PAGE = 1024  # bytes whose reservations are listed together


class Reservation:
    """Bytes of an allocation that an asynchronous operation, `owner`, reads or writes.

    `str(owner)` describes the operation, and `owner.remedy` how to wait for it. `owner.may_outlive_block`: it may be
    active when the block ends. `owner.generic_proxy`: it accesses memory through the generic proxy.
    """

    __slots__ = ("detector", "start", "end", "writes", "owner")

    def __init__(self, detector, start, end, writes, owner):
        self.detector, self.start, self.end, self.writes, self.owner = detector, start, end, writes, owner

    def conflicts(self, start, end, writes):
        return self.start < end and start < self.end and (writes or self.writes)

    def release(self):
        detector = self.detector
        if self in detector.reservations:
            del detector.reservations[self]
            for page in detector.pages_of(self.start, self.end):
                page.remove(self)
            detector.set_flags(self.start, self.end, 0)
            for other in detector.reservations_at(self.start, self.end):
                detector.set_flags(max(other.start, self.start), min(other.end, self.end), 1)


class RaceDetector:
    """Reservations on one shared allocation, and its bytes that are unfenced."""

    def __init__(self, allocation):
        self.allocation, self.reservations = allocation, {}  # a dict as an ordered set
        self.pages = [[] for _ in range(allocation.bytes.size // _PAGE + 1)]
        self.flags = bytearray(-(-allocation.bytes.size // _GRAIN) + 1)
        self.unfenced, self.writers = (
            None,
            {},
        )  # per byte: 0, or the number of the thread that wrote it; thread -> number

    def _grains(self, start, end):
        return (start - self.allocation.start) // _GRAIN, -(-(end - self.allocation.start) // _GRAIN)

    def pages_of(self, start, end):
        """Return the lists of reservations of the pages that these bytes touch."""
        return self.pages[(start - self.allocation.start) // _PAGE : (end - 1 - self.allocation.start) // _PAGE + 1]

    def reservations_at(self, start, end):
        """Return the reservations of these bytes, oldest first."""
        pages = self.pages_of(start, end)
        found = pages[0] if len(pages) == 1 else dict.fromkeys(r for page in pages for r in page)
        return [r for r in found if r.start < end and start < r.end]

    def set_flags(self, start, end, value):
        first, last = self._grains(start, end)
        if last - first == 1:
            self.flags[first] = value
        else:
            self.flags[first:last] = bytes((value,)) * (last - first)

    def check_access(self, thread, target, index, writes, size=None):
        """Check a thread's own access to an array or a pointer in this allocation."""
        address, size = byte_span(target, index, writes, size)
        start = address + self.allocation.to_window
        if (
            size and self.allocation.start <= start and start + size <= self.allocation.end
        ):  # else the access itself raises
            self._check(thread, start, start + size, writes, index, target)

    def check_region_access(self, thread, region, writes):
        """Check the access of a synchronous instruction, which goes through the generic proxy."""
        index = region.start - self.allocation.start
        self._check(thread, region.start, region.end, writes, index, self.allocation)

    def _check(self, thread, start, end, writes, index, target):
        first, last = self._grains(start, end)
        if self.flags[first] or last - first > 1 and any(self.flags[first:last]):
            for other in self.reservations_at(start, end):
                if other.conflicts(start, end, writes):
                    raise AsyncRace(
                        f"{thread} {'writes' if writes else 'reads'} index {index} of {target}, "
                        f"at {source_location(sys._getframe())}, where {other.owner}: {other.owner.remedy}"
                    )
        if writes:
            self.mark_unfenced(thread, start, end)

    def mark_unfenced(self, thread, start, end):
        """Record that a thread wrote these bytes through the generic proxy."""
        if self.unfenced is None:
            self.unfenced = np.zeros(self.allocation.bytes.size, np.uint16)
        number = self.writers.get(thread)
        if number is None:
            number = self.writers[thread] = len(self.writers) + 1
        self.unfenced[start - self.allocation.start : end - self.allocation.start] = number
        if thread.unfenced_writes is None:
            thread.unfenced_writes = {}
        first, last = thread.unfenced_writes.get(self, (start, end))
        thread.unfenced_writes[self] = min(first, start), max(last, end)

    def reserve(self, start, end, writes, owner):
        """Reserve bytes for an operation that is issued now; refuse conflicting reservations and unfenced bytes."""
        for other in self.reservations_at(start, end):
            if other.conflicts(start, end, writes):
                raise AsyncRace(
                    f"{_describe(owner, writes)} bytes from {max(start, other.start) - self.allocation.start} on "
                    f"of {self.allocation}, "
                    f"where {other.owner}: {other.owner.remedy}"
                )
        if self.unfenced is not None and not owner.generic_proxy:
            self._check_fenced(start, end, writes, owner)
        reservation = Reservation(self, start, end, writes, owner)
        self.reservations[reservation] = None
        for page in self.pages_of(start, end):
            page.append(reservation)
        self.set_flags(start, end, 1)
        return reservation

    def _check_fenced(self, start, end, writes, owner):
        writers = self.unfenced[start - self.allocation.start : end - self.allocation.start]
        if not writers.any():
            return
        offset = int(writers.nonzero()[0][0])
        writer = next(t for t, number in self.writers.items() if number == writers[offset])
        raise MissingFence(
            f"{_describe(owner, writes)} byte {start + offset - self.allocation.start} of {self.allocation}; "
            f"{writer} wrote it with a "
            f"store of its own and has not called fence_proxy_async_shared since"
        )

    def check_end_of_block(self):
        for reservation in self.reservations:
            owner = reservation.owner
            if not owner.may_outlive_block:
                block = self.allocation.shared.block
                raise AsyncRace(f"{block} ends, while in {self.allocation} {owner}: {owner.remedy}")


def _describe(owner, writes):
    return f"{owner.thread} issues {owner.what} at {owner.site}, which {'writes' if writes else 'reads'}"


def fence(thread, shared_only=False):
    """Execute a proxy fence: the async proxy may now access what this thread wrote, in all or in shared memory only."""
    for detector, (start, end) in (thread.unfenced_writes or {}).items():
        first = detector.allocation.start
        writers = detector.unfenced[start - first : end - first]
        writers[writers == detector.writers[thread]] = 0
    thread.unfenced_writes = None
    fence_barriers(thread)
    if not shared_only and (races := thread.grid.world.races) is not None:
        races.proxy_fence(thread)
    store_buffer.release(thread)


def fence_barriers(thread):
    """Make the mbarriers that this thread initialised visible to other threads and to the async proxy."""
    for barrier in thread.unfenced_barriers or ():
        barrier.fenced = True
    thread.unfenced_barriers = None
