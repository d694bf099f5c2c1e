"""Order between gangs: vector clocks, and per region who accessed each cell last.

Each gang counts its releases. A gang knows, of every other gang, up to which release it has synchronised with it.
Whatever orders threads in the simulator (a barrier, an mbarrier, an atomic, a flag) releases to an object, a *point*,
and acquires from it.
"""

import numpy as np

from moe_numba.simulator.vector.errors import Conflict
from moe_numba.simulator.vector.indices import take
from moe_numba.simulator.vector.shadow import MANY, MOST_KEPT, by_region, elements, touched_cells

WRITE, READ, ATOMIC, LOAD = range(4)  # LOAD: one with a memory order, which conflicts with plain writes only
count_nonzero = np.count_nonzero  # faster than the method `any`
_MOST_EXACT = 1 << 22  # cells times gangs
_CONFLICTS = ((WRITE, (WRITE, READ, ATOMIC, LOAD)), (READ, (WRITE, ATOMIC)), (ATOMIC, (WRITE, READ)), (LOAD, (WRITE,)))


class Clocks:
    """The clocks of all gangs of a launch."""

    def __init__(self):
        self.points, self.size = {}, 0

    def release(self, gang, point):
        """Publish what a gang has done and knows at a point."""
        known = gang.known.copy() if gang.known is not None else np.zeros(self.size, np.int32)
        known[gang.number] = gang.time + 1
        before = self.points.get(point)
        self.points[point] = known if before is None else np.maximum(before, known)
        gang.flush()
        gang.time += 1

    def acquire(self, gang, point):
        """Let a gang know what was published at a point."""
        published = self.points.get(point)
        if published is not None and gang.acquired.get(point) is not published:
            gang.acquired[point] = published
            gang.flush()
            gang.known = published.copy() if gang.known is None else np.maximum(gang.known, published)


class History:
    """Of each cell of a region: the gangs, and their times, that wrote, read and changed it atomically last.

    Of shared memory, and of small regions, the last accesses of every gang are kept (`exact`); else those of one gang,
    or `MANY`.
    """

    def __init__(self, count, exact):
        self.count, self.exact, self.every = count, exact, {READ: {}, ATOMIC: {}, LOAD: {}}
        self.tables = [(np.full(count, -1, np.int32), np.zeros(count, np.int32)) for _ in range(4)]

    def repeat(self, times):
        self.count *= times
        self.tables = [(gang.repeat(times), time.repeat(times)) for gang, time in self.tables]
        for tables in self.every.values():
            for gang in tables:
                tables[gang] = tables[gang].repeat(times)

    def check(self, kind, cell, gang, time, known):
        """Raise a Conflict if the last accesses of a kind are not ordered before this gang's."""
        if self.exact and kind != WRITE:
            for other, times in self.every[kind].items():
                if other != gang and count_nonzero(take(times, cell) > (0 if known is None else known[other])):
                    raise Conflict("two warps access the same memory")
            return
        gangs, times = self.tables[kind]
        other = take(gangs, cell)
        foreign = (other != -1) & (other != gang)
        if not count_nonzero(foreign):
            return
        if known is None:
            raise Conflict("two blocks or warps access the same memory")
        cell, other = cell[foreign], other[foreign]
        if (other == MANY).any() or (known[other] <= times[cell]).any():
            raise Conflict("two blocks or warps access the same memory")

    def record(self, kind, cell, gang, time, known):
        if self.exact and kind != WRITE:
            if gang not in self.every[kind]:
                self.every[kind][gang] = np.zeros(self.count, np.int32)
            self.every[kind][gang][cell] = time + 1
            return
        gangs, times = self.tables[kind]
        if kind != WRITE:  # keep the latest if the earlier ones are ordered before it
            other = gangs[cell]
            foreign = (other != -1) & (other != gang)
            if count_nonzero(foreign):
                ordered = np.zeros(len(cell), bool)
                if known is not None:
                    ordered = (other >= 0) & (known[other] > times[cell])
                gangs[cell] = np.where(foreign & ~ordered, MANY, gang)
                times[cell] = time
                return
        gangs[cell], times[cell] = gang, time


def fold(gang, time, known, kinds):
    """Check accesses of a gang against those of other gangs, and record them."""
    kinds = [by_region(kind) for kind in kinds]
    for region in {region: None for kind in kinds for region in kind}:
        own = [kind.get(region, []) for kind in kinds]
        if not region.written:
            region.kept += elements(own)
            if region.kept > MOST_KEPT:
                region.pending = []
                continue
        region.pending.append((gang, time, known, own))
        if region.written:  # reads alone are in no conflict
            pending, region.pending = region.pending, []
            for accesses in pending:
                _fold(region, *accesses)


def _fold(region, gang, time, known, kinds):
    region.refine([e for kind in kinds for e in kind])
    if region.history is None:
        exact = region.shared is not None or len(region.tags) * gang.engine.clocks.size <= _MOST_EXACT
        region.history = History(len(region.tags), exact)
    history = region.history
    found = [touched_cells(region, kind, gang.log.all_lanes) if kind else None for kind in kinds]
    for kind, conflicting in _CONFLICTS:
        if found[kind] is not None:
            for other in conflicting:
                history.check(other, found[kind], gang.number, time, known)
    for kind in range(4):
        if found[kind] is not None:
            history.record(kind, found[kind], gang.number, time, known)
    if found[WRITE] is not None:  # it is ordered after the earlier accesses
        for kind in (READ, ATOMIC, LOAD):
            history.tables[kind][0][found[WRITE]] = -1
