"""Detection of conflicting accesses: a log of all accesses to memory that is checked in bulk where threads synchronise.

An access is a tuple (region, address, step, width, index, mask, value): each lane of the mask accesses `width` bytes
at `address + index * step`. Lanes of a warp are ordered by the warp's collectives, the warps of a block by its
barriers. Gangs (see `engine`) are ordered by the clocks of `clocks`.
"""

import math

import numpy as np

from moe_numba.simulator.vector.errors import Conflict, Unsupported
from moe_numba.simulator.vector.indices import take

count_nonzero = np.count_nonzero  # faster than the method `any`
MANY = -2  # in place of a gang's number
MOST_KEPT = 1 << 24  # elements whose reads are kept while nothing writes to their region
_MAX_CELLS = 1 << 22  # tags of larger memory would take too much memory themselves
REGION, ADDRESS, STEP, WIDTH, INDEX, MASK, VALUE = range(7)


class Region:
    """A contiguous piece of memory: a shared allocation, or kernel arguments that overlap."""

    def __init__(self, start, end, memory=None, shared=None):
        self.start, self.end, self.memory, self.shared = start, end, memory, shared
        self.saved = None  # the bytes before the first write
        self.poisoned = None  # see `races.check_initialized`
        self.known = False  # whether all of a shared allocation has been written; see `races.check_known`
        self.grain, self.tags, self.history = 4, None, None
        self.written, self.pending = False, []
        self.kept = 0  # elements in `pending`; the accesses are forgotten if they are too many

    def save(self):
        """Keep a copy of the bytes; call it before the first write."""
        if self.kept > MOST_KEPT:
            raise Unsupported("a write to memory that was read too often to keep a record")
        self.written = True
        self.keep()

    def keep(self):
        """Keep a copy of the bytes of global memory."""
        if self.memory is not None and self.saved is None:
            if self.memory.size > 1 << 28:
                raise Unsupported("more than 256 MiB of memory to keep a copy of")
            self.saved = self.memory.copy()

    def restore(self):
        if self.saved is not None:
            self.memory[:] = self.saved

    def refine(self, entries):
        """Make cells small enough that each access covers whole cells."""
        grain = self.grain
        for e in entries:
            grain = math.gcd(grain, e[ADDRESS] - self.start, e[WIDTH], e[STEP] if e[STEP] else grain)
        if grain != self.grain:
            if self.history is not None:
                self.history.repeat(self.grain // grain)
            self.grain, self.tags = grain, None
        if self.tags is None:
            count = (self.end - self.start) // grain + 1
            if count > _MAX_CELLS:
                raise Unsupported("memory too large to check its accesses")
            self.tags = np.full(count, -1, np.int32)


def elements(kinds):
    """Return the number of elements of accesses."""
    return sum(e[INDEX].size if isinstance(e[INDEX], np.ndarray) else 1 for kind in kinds for e in kind)


def lanes_of(entry, all_lanes):
    """Return the lanes of an access, and each one's index."""
    index, mask = entry[INDEX], entry[MASK]
    if mask is None:
        return all_lanes, index if isinstance(index, np.ndarray) else np.full(len(all_lanes), index, np.int64)
    lanes = mask.nonzero()[0]
    return lanes, index[lanes] if isinstance(index, np.ndarray) else np.full(len(lanes), index, np.int64)


def cells(region, entries, all_lanes):
    """Return the cells that accesses touch, and the lane that touches each."""
    if not entries:
        return _NONE, _NONE
    if sum(e[WIDTH] for e in entries) // region.grain > _MAX_CELLS:
        raise Unsupported("accesses too large to check")
    if len(entries) == 1 and entries[0][WIDTH] == region.grain:
        lane, index = lanes_of(entries[0], all_lanes)
        return (index * entries[0][STEP] + (entries[0][ADDRESS] - region.start)) // region.grain, lane
    groups = {}
    for e in entries:
        groups.setdefault((e[ADDRESS], e[STEP], e[WIDTH]), []).append(lanes_of(e, all_lanes))
    found, lanes = [], []
    for (address, step, width), parts in groups.items():
        index = parts[0][1] if len(parts) == 1 else np.concatenate([p[1] for p in parts])
        lane = parts[0][0] if len(parts) == 1 else np.concatenate([p[0] for p in parts])
        cell = (index.astype(np.int64) * step + (address - region.start)) // region.grain
        if width > region.grain:
            count = width // region.grain
            cell, lane = (cell[:, None] + np.arange(count)).reshape(-1), np.repeat(lane, count)
        found.append(cell)
        lanes.append(lane)
    if len(found) == 1:
        return found[0], lanes[0]
    return np.concatenate(found), np.concatenate(lanes)


_NONE = np.zeros(0, np.int64)


def touched_cells(region, entries, all_lanes):
    """Return the cells that accesses touch, whichever lanes touch them."""
    if len(entries) == 1 and not isinstance(entries[0][INDEX], np.ndarray):
        e = entries[0]
        first = (e[INDEX] * e[STEP] + e[ADDRESS] - region.start) // region.grain
        return np.arange(first, first + e[WIDTH] // region.grain)
    return cells(region, entries, all_lanes)[0]


def check(region, writes, reads, atomics, loads, all_lanes, shift):
    """Raise a Conflict if two units access the same cell and one of them writes; a unit is `lane >> shift`.

    Units may write the same value, if no other access touches the cell. `loads` are those with a memory order: only
    plain writes conflict with them.
    """
    region.refine(writes + reads + atomics + loads)
    tags, stored = region.tags, []
    try:
        if writes:
            cell, unit = cells(region, writes, all_lanes)
            unit = unit >> shift
            tags[cell] = unit
            stored.append(cell)
            others = take(tags, cell) != unit
            if count_nonzero(others):
                if not _same_values(region, writes, all_lanes):
                    raise Conflict("two threads write to the same memory")
                tags[cell[others]] = MANY
            for entries in (reads, atomics, loads):
                _compare(region, entries, all_lanes, shift)
        if atomics and reads:
            cell, unit = cells(region, atomics, all_lanes)
            unit = unit >> shift
            tags[cell] = unit
            stored.append(cell)
            tags[cell[tags[cell] != unit]] = MANY
            _compare(region, reads, all_lanes, shift)
    finally:
        for cell in stored:
            tags[cell] = -1


def _compare(region, entries, all_lanes, shift):
    """Raise a Conflict if one of these accesses touches a cell that is tagged with another unit."""
    cell, unit = cells(region, entries, all_lanes)
    tag = take(region.tags, cell)
    if count_nonzero((tag != -1) & (tag != unit >> shift)):
        raise Conflict("a thread reads what another one writes")


def _same_values(region, writes, all_lanes):
    """Return whether all writes to a cell store the same value."""
    values, found = [], []
    for e in writes:
        lanes, index = lanes_of(e, all_lanes)
        value = e[VALUE]
        if value is None or e[WIDTH] != region.grain:
            return False
        values.append(value[lanes] if isinstance(value, np.ndarray) else np.full(len(lanes), value))
        found.append((index.astype(np.int64) * e[STEP] + e[ADDRESS] - region.start) // region.grain)
    if len({v.dtype for v in values}) > 1:
        return False
    values, found = np.concatenate(values), np.concatenate(found)
    last = np.zeros(len(region.tags), values.dtype)
    last[found] = values
    return bool((last[found] == values).all())


def by_region(entries):
    """Return a dict of the accesses by region."""
    groups = {}
    for e in entries:
        groups.setdefault(e[REGION], []).append(e)
    return groups


class Log:
    """The accesses of one gang since its last block-wide barrier, with marks where a warp-wide collective was."""

    def __init__(self, all_lanes):
        self.all_lanes, self.warps = all_lanes, (len(all_lanes) + 31) // 32
        self.kinds = self.writes, self.reads, self.atomics, self.loads = [], [], [], []
        self.open, self.marks, self.forgotten = ([], [], [], []), (0, 0, 0, 0), 0

    def count(self):
        """Return the number of accesses that were ever in the log."""
        return self.forgotten + sum(map(len, self.kinds))

    def collective(self, mask):
        """Check the accesses of the lanes in a mask since their last collective: their lanes are ordered now."""
        w, _, a, _ = self.marks
        if len(self.writes) == w and len(self.atomics) == a and not (self.open[0] or self.open[2]) and mask is None:
            self.marks, self.open = tuple(map(len, self.kinds)), ([], [], [], [])
        else:
            self._close(mask)

    def _close(self, mask):
        kinds = [opened + kind[mark:] for opened, kind, mark in zip(self.open, self.kinds, self.marks)]
        self.marks, self.open = tuple(map(len, self.kinds)), ([], [], [], [])
        if mask is not None:  # lanes of other warps are not ordered yet
            outside = ~mask
            self.open = tuple(_restrict(kind, outside) for kind in kinds)
            kinds = [_restrict(kind, mask) for kind in kinds]
        self.check(kinds, 0)

    def check(self, kinds, shift):
        writes, reads, atomics, loads = kinds
        if not writes and not (atomics and reads):
            return
        kinds = [by_region(kind) for kind in kinds]
        for region in {**kinds[0], **kinds[2]}:
            own = [kind.get(region, []) for kind in kinds]
            if own[0] or own[1]:
                check(region, *own, self.all_lanes, shift)

    def barrier(self):
        """Check all accesses since the last barrier of all lanes, and forget them."""
        self._close(None)
        if self.warps > 1:
            self.check(self.kinds, 5)
        self.forgotten = self.count()
        for kind in self.kinds:
            kind.clear()
        self.marks = 0, 0, 0, 0


def _restrict(entries, mask):
    made = []
    for e in entries:
        part = mask if e[MASK] is None else e[MASK] & mask
        if part.any():
            made.append((*e[:MASK], part, e[VALUE]))
    return made
