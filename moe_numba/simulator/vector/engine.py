"""The scheduler of gangs, and one attempt to run grids with them.

Gangs run in a random order that follows from the seed.
"""

import greenlet

from moe_numba.simulator.asynchronous import tensor_map
from moe_numba.simulator.asynchronous.mbarrier import MBarrier
from moe_numba.simulator.core import memory, scheduler
from moe_numba.simulator.core.engine import Thread
from moe_numba.simulator.core.reachable import intervals
from moe_numba.simulator.core.scheduler import World
from moe_numba.simulator.vector import state
from moe_numba.simulator.vector.clocks import Clocks
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.gang import BlocksGang, Gang
from moe_numba.simulator.vector.regions import Memory

_LANES = 1 << 14  # of a gang of several blocks, at most: with more, vectors leave the processor's caches
_EAGER_POLL = 1 / 32  # probability that pollers look again, after a change of memory, although other gangs can run
_IDLE_LIMIT, _IDLE_LIMIT_WITH_CLOCK = 64, 4096  # rounds in which all gangs poll in vain


class _Order:
    """Stands in for weak memory where threads publish to mbarriers and flags; memory itself is not weak."""

    def __init__(self, clocks):
        self.clocks = clocks

    def publish_to(self, point, thread):
        state.gang.engine.refuse_if_strict("an mbarrier")
        # Arrivals at the next phase do not order what follows a wait for this one.
        point = (point, point.phases) if type(point) is MBarrier else point
        self.clocks.release(state.gang, point)

    def receive_from(self, point, thread):
        state.gang.engine.refuse_if_strict("an mbarrier")
        point = (point, point.phases - 1) if type(point) is MBarrier else point
        self.clocks.acquire(state.gang, point)

    def read(self, block, cell, start):
        return cell.copy()

    def write_through(self, block, cell, start, data):
        cell[:] = data

    def release(self, *_):
        pass

    acquire = drop_stale = make_coherent = end = start = synchronize = release


class VectorWorld(World):
    """Scheduler of gangs."""

    makes_warps_late = True

    def __init__(self, engine, seed):
        super().__init__(seed)
        self.engine, self.memory_model, self.profile = engine, _Order(engine.clocks), engine.profile

    def add(self, grid):
        self.grids.append(grid)
        if grid.uses_async:
            self.watch_accesses()
        self.start(grid.start())

    def start(self, blocks):
        self.wake(self.engine.gangs_for(blocks))

    def wake(self, gangs):
        for gang in gangs:
            if type(gang) is Thread:
                gang = self.engine.gang_of(gang)
            gang.waits = None
            if not gang.queued:
                gang.queued = True
                self.schedule(gang)

    def run(self):
        seen = idle = 0
        try:
            while self.queue or self.pollers:
                # A poll is expensive: mostly, all other gangs go as far as they can before pollers look again.
                if self.pollers and (not self.queue or self.changes != seen and self.rng.random() < _EAGER_POLL):
                    idle = idle + 1 if self.changes == seen else 0
                    seen = self.changes
                    if idle > (_IDLE_LIMIT_WITH_CLOCK if self.clock_reads else _IDLE_LIMIT):
                        raise Unsupported("all threads poll in vain")
                    pollers, self.pollers = self.pollers, []
                    self.wake(pollers)
                self.step()
            if any(not gang.dead for gang in self.engine.gangs):
                raise Unsupported("no thread can run")
        finally:
            memory.watch(-self.watching)
            for gang in self.engine.gangs:
                if not gang.dead:
                    gang.throw()
            state.gang = None


class Engine:
    """One attempt to run grids with gangs of several blocks, of one block, or of a warp: `span`.

    A `strict` one orders accesses by barriers and the ends of kernels alone: whatever the detector of data races
    (`happens_before`) may report under some order of the threads is a conflict, or unsupported.
    """

    span = None  # set before `prepare`

    def __init__(self, strict, calls, profile=None):
        """`calls` has the vector versions of functions; `profile` counts what they do."""
        self.strict, self.calls, self.profile = strict, calls, profile
        self.memory, self.clocks, self.gangs = Memory(keeps_all=strict), Clocks(), []
        self.first_gang, self.world, self.last_kernel = {}, None, scheduler.last_kernel() if strict else None
        self.parent = greenlet.getcurrent()

    @property
    def by_warp(self):
        return self.span == "warp"

    def prepare(self, grids):
        """Prepare for these grids, of which some may start after others have ended."""
        storages = [(first, first + size) for first, size, alive in tensor_map.storages if not alive.expired()]
        self.memory.add([*intervals(grids), *storages])
        for grid in grids:
            for block in grid.blocks:
                self.first_gang[block] = self.clocks.size
                self.clocks.size += -(-block.size // 32) if self.by_warp else 1

    def refuse_if_strict(self, what):
        """Raise if the detector of data races knows more of an operation than this engine does."""
        if self.strict:
            raise Unsupported(f"{what}, while data races are detected")

    def refuse_if_many(self, what):
        """Raise if a gang has several blocks, among which an operation would always happen in the same order."""
        if self.span == "blocks":
            raise Unsupported(f"{what}, in a vector of several blocks")

    def gangs_of(self, grid):
        return len(grid.blocks) * (-(-grid.block_size // 32) if self.by_warp else 1)

    def gangs_for(self, blocks):
        """Return the gangs of blocks that start now."""
        made = []
        if self.span == "blocks" and blocks:
            count = max(_LANES // blocks[0].size, 1)
            for first in range(0, len(blocks), count):
                part = blocks[first : first + count]
                made.append(BlocksGang(self, part, self.first_gang[part[0]]))
            self.gangs += made
            return made
        for block in blocks:
            for number, warps in enumerate([[warp] for warp in block.warps] if self.by_warp else [block.warps]):
                made.append(Gang(self, block, warps, self.first_gang[block] + number))
                for warp in warps:
                    warp.gang = made[-1]
        self.gangs += made
        return made

    def gang_of(self, thread):
        return thread.block.warps[thread.warp].gang

    def started(self, gang):
        self.clocks.acquire(gang, ("stream", gang.grid.rank))

    def ended(self, gang):
        grid = gang.grid
        if self.world.queued_grids.get(grid.rank):
            self.clocks.release(gang, ("stream", grid.rank))
        self.world.changes += 1
        if self.span != "blocks":
            for warp in gang.warps:
                warp.exited = warp.lanes
                gang.block.cluster.mark_arrived(warp)
        started = []
        for block in gang.blocks:
            block.exited += gang.size if len(gang.blocks) == 1 else block.size
            if block.exited == block.size:
                self.check_end_of(block)
                started += grid.start_next(block.cluster)
        self.world.start(started)
        for block in gang.blocks:
            if block.exited == block.size:
                self.world.retire(grid)

    def check_end_of(self, block):
        """Raise if a block has ended while some of its threads, or asynchronous operations, have not."""
        if self.span == "blocks":
            return
        for scope in (block, *block.warpgroups):
            if scope.open_rendezvous:
                raise Unsupported("a barrier at which threads are missing")
        block.shared.check_end_of_block()

    def close(self):
        """Free what the attempt has recorded; the garbage collector would take its time, or could not (`Grid.free`)."""
        for region in (*self.memory.regions, *self.memory.shared.values()):
            region.saved = region.tags = region.history = None
            region.pending = []
        for gang in self.gangs:
            gang.__dict__.clear()
        self.gangs, self.clocks.points, self.last_kernel = [], {}, None
        self.memory.regions, self.memory.shared = [], {}
        for grid in self.world.grids:
            grid.args = ()
            grid.free()
            for block in grid.blocks:
                block.__dict__.pop("vector_barrier", None)

    def shares(self, region):
        """Return whether several gangs may access a region."""
        return region.shared is None or self.by_warp
