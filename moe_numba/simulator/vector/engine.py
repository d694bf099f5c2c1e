"""Gangs, which run whole warps of a block as vectors, and their scheduler.

A gang is a greenlet that runs a kernel's vector version for all threads of a block, or of one warp. Gangs run in a
random order that follows from the seed, and give way where they wait or poll.
"""

import bisect
import functools
import heapq
import sys

import greenlet
import numpy as np

from moe_numba.simulator.async_ import tensor_map
from moe_numba.simulator.async_.mbarrier import MBarrier
from moe_numba.simulator.core import memory
from moe_numba.simulator.core.engine import Thread
from moe_numba.simulator.core.errors import kernel_frame
from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.core.scheduler import REDRAW, World
from moe_numba.simulator.memory_model import ranks
from moe_numba.simulator.vector import access, state
from moe_numba.simulator.vector.clocks import Clocks, fold
from moe_numba.simulator.vector.errors import Conflict, Unsupported
from moe_numba.simulator.vector.numbers import Weak
from moe_numba.simulator.vector.shadow import Log, Region

_EAGER_POLL = 1 / 32  # probability that pollers look again, after a change of memory, although other gangs can run
_IDLE_LIMIT, _IDLE_LIMIT_WITH_CLOCK = 64, 4096  # rounds in which all gangs poll in vain


@functools.lru_cache(maxsize=64)
def _thread_indices(block_dim, first, size):
    """Return threadIdx.x, y and z of consecutive threads, and their lanes."""
    number = np.arange(first, first + size)
    x, y, _ = block_dim
    made = [Weak(number % x), Weak(number // x % y), Weak(number // (x * y)), Weak(number & 31)]
    return [m if m.values.min() != m.values.max() else int(m.values[0]) for m in made[:3]] + made[3:]


class Gang(greenlet.greenlet):
    """The threads `first` to `first + size - 1` of a block: all of them, or a warp."""

    def __init__(self, engine, block, warps, number):
        self.engine, self.grid, self.block, self.warps, self.number = engine, block.grid, block, warps, number
        self.first, self.num_warps = 32 * warps[0].index, len(warps)
        self.size = min(32 * len(warps), block.size - self.first)
        self.all_lanes, self.everyone = _constants(self.size)
        self.world, self.is_block = engine.world, len(warps) == len(block.warps)
        self.whole = None  # a mask that is known to consist of whole warps
        self.log, self.known, self.time, self.flushed = Log(self.all_lanes), None, 0, (0, 0, 0, 0)
        self.lane, self.waits, self.result, self.quiet = 0, None, None, False
        self.barriers = 0  # barriers of the block and of the grid that it has reached
        self.acquired = {}  # point -> what the gang last acquired there
        self.unfenced = {}  # race detector -> (first, last byte, number of lane 0) of unfenced writes
        self.priority, self.queued = warps[0].priority, False
        self.gr_context, self.parent = block.grid.context, engine.parent

    def step(self, rng):
        state.gang = self
        self.switch()

    def run(self):
        self.engine.started(self)
        self.engine.function_of(self.grid)(None, *self.grid.args)
        self.flush()
        self.end_of_epoch()
        self.engine.ended(self)

    @property
    def current_thread(self):
        """The simulated thread of the lane for which a scalar function runs."""
        warp, lane = divmod(self.lane, 32)
        return self.warps[warp].threads[lane]

    def index(self, name, axis=None):
        """Return an index of the threads, such as threadIdx.x, or their lanes."""
        if name == "threadIdx" or name == "lane":
            found = _thread_indices(self.grid.block_dim, self.first, self.size)
            return found[3] if name == "lane" else found["xyz".index(axis)]
        values = {"blockIdx": self.block.index, "blockDim": self.grid.block_dim, "gridDim": self.grid.grid_dim}
        return getattr(values[name], axis)

    def pad(self, values, filler):
        """Return the values of all lanes of the gang's warps, also of those that the block does not have."""
        missing = -len(values) % 32
        if not missing:
            return values
        return np.concatenate([values, np.full(missing, filler, values.dtype)])

    def existing_threads(self, mask):
        """Return the active lanes' threads, if scalar functions have needed any."""
        threads = [t for warp in self.warps for t in warp.__dict__.get("threads", ())]
        return threads if mask is None else [t for t in threads if mask[t.thread_id - self.first]]

    def watch(self, region, address, step, width, index, mask, writes):
        """Check accesses to a shared allocation against asynchronous operations; mark what was written as unfenced."""
        detector = region.shared.detector
        many = type(index) is np.ndarray
        offset = index * step + (address - region.start)
        if many and mask is not None:
            offset = offset[mask]
        flags = np.frombuffer(detector.flags, np.uint8)
        if many:
            found = flags[offset >> 4].any() or width > 1 and flags[(offset + (width - 1)) >> 4].any()
            if width > 32:
                found = found or flags[(offset[:, None] + np.arange(16, width, 16)) >> 4].any()
        else:
            found = flags[offset >> 4 : (offset + width - 1 >> 4) + 1].any()
        if found:
            start = region.shared.start
            for o in offset if many else (offset,):
                for other in detector.reservations_at(start + int(o), start + int(o) + width):
                    if other.conflicts(start + int(o), start + int(o) + width, writes):
                        raise Conflict("an access to memory that an asynchronous operation uses")
        if writes:
            self._mark_unfenced(detector, offset, width, mask, many)

    def _mark_unfenced(self, detector, offset, width, mask, many):
        if detector.unfenced is None:
            detector.unfenced = np.zeros(detector.allocation.bytes.size, np.uint16)
        threads = [t for warp in self.warps for t in warp.threads]
        base = detector.writers.get(threads[0])
        if base is None:
            for t in threads:
                detector.writers[t] = len(detector.writers) + 1
            base = detector.writers[threads[0]]
        numbers = base + (self.all_lanes if mask is None else mask.nonzero()[0])
        if not many:
            detector.unfenced[offset : offset + width] = numbers[-1]
            low, high = offset, offset + width
        else:
            if width == 1:
                detector.unfenced[offset] = numbers
            else:
                detector.unfenced[offset[:, None] + np.arange(width)] = numbers[:, None]
            low, high = int(offset.min()), int(offset.max()) + width
        first, last, _ = self.unfenced.get(detector, (low, high, base))
        self.unfenced[detector] = min(first, low), max(last, high), base

    # Waiting

    def spin(self, what="polling"):
        """Give way before a poll."""
        if not self.quiet:
            self.waits = what
            self.world.pollers.append(self)
            self.parent.switch()

    def park(self, where):
        """Wait until `World.wake` names this gang."""
        self.waits = where
        self.parent.switch()
        return self.result

    def record_event(self, what, details=None):
        pass

    # Order of accesses

    def flush(self):
        """Check the accesses since the last flush against those of other gangs."""
        kinds = self.log.kinds
        new = [kind[start:] for kind, start in zip(kinds, self.flushed)]
        self.flushed = tuple(map(len, kinds))
        if any(new):
            access.check_indices(new)
            new = [[e for e in kind if self.engine.shares(e[0])] for kind in new]
            fold(self, self.time, self.known, new)

    def end_of_epoch(self):
        self.flush()
        self.log.barrier()
        self.flushed = 0, 0, 0, 0

    def block_barrier(self, active, what, value=None, finish=None):
        """Wait for all threads of the block."""
        if active is not None:
            raise Unsupported(f"{what} that not all threads reach together")
        if self.is_block:
            self.end_of_epoch()
            return finish([value]) if finish else None
        frame = kernel_frame(sys._getframe(2))
        barrier = self.block.__dict__.setdefault("vector_barrier", {})
        site = what, frame.f_code, frame.f_lineno
        if barrier and site not in barrier:
            raise Unsupported(f"{what}: warps of a block wait at different barriers")
        arrived = barrier.setdefault(site, {})
        arrived[self] = value
        self.barriers += 1
        point = self.block, self.barriers  # not the barrier alone: another gang may arrive at the next one first
        self.engine.clocks.release(self, point)
        self.end_of_epoch()
        if len(arrived) == len(self.block.warps):
            barrier.clear()
            result = finish(arrived.values()) if finish else None
            for gang in arrived:
                gang.result = result
            self.world.wake(arrived)
        result = self.park(what)
        self.engine.clocks.acquire(self, point)
        return result

    def grid_barrier(self, active):
        """Wait for all threads of the grid."""
        if active is not None:
            raise Unsupported("grid sync that not all threads reach together")
        arrived = self.grid.__dict__.setdefault("vector_barrier", [])
        arrived.append(self)
        self.barriers += 1
        point = self.grid, self.barriers
        self.engine.clocks.release(self, point)
        self.end_of_epoch()
        if len(arrived) == self.engine.gangs_of(self.grid):
            self.grid.vector_barrier = []
            self.world.wake(arrived)
        self.park("grid sync")
        self.engine.clocks.acquire(self, point)


@functools.lru_cache(maxsize=64)
def _constants(size):
    return np.arange(size), np.ones(size, bool)


class _Order:
    """Stands in for weak memory where threads publish to mbarriers and flags; memory itself is not weak."""

    def __init__(self, clocks):
        self.clocks = clocks

    def publish_to(self, point, thread):
        # Arrivals at the next phase do not order what follows a wait for this one.
        point = (point, point.phases) if type(point) is MBarrier else point
        self.clocks.release(state.gang, point)

    def receive_from(self, point, thread):
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

    def __init__(self, engine, seed):
        super().__init__(seed)
        self.engine, self.reads_clock, self.memory_model = engine, False, _Order(engine.clocks)

    def add(self, grid):
        self.grids.append(grid)
        gangs = self.engine.start(grid)
        if grid.uses_async:
            self.watch_accesses()
        self.wake(gangs)

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
                    if idle > (_IDLE_LIMIT_WITH_CLOCK if self.reads_clock else _IDLE_LIMIT):
                        raise Unsupported("all threads poll in vain")
                    pollers, self.pollers = self.pollers, []
                    self.wake(pollers)
                _, _, unit = heapq.heappop(self.queue)
                unit.queued = False
                self.steps += 1
                if self.rng.random() < REDRAW:
                    unit.priority = self.rng.random()
                unit.step(self.rng)
            if any(not gang.dead for gang in self.engine.gangs):
                raise Unsupported("no thread can run")
        finally:
            memory.watching -= self.watching
            for gang in self.engine.gangs:
                if not gang.dead:
                    gang.throw()
            state.gang = None


class Memory:
    """The regions of memory that the kernels of a world may access."""

    def __init__(self):
        self.starts, self.regions, self.shared = [], [], {}

    def add(self, intervals):
        """Make regions of the given intervals of addresses; overlapping ones are one region."""
        merged = []
        for start, end in sorted(i for i in intervals if i[0] < i[1]):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        self.starts = [start for start, _ in merged]
        self.regions = [Region(start, end, tensor_map.bytes_at(start, end - start)) for start, end in merged]

    def find(self, x):
        allocation = x.allocation
        if allocation is not None:
            region = self.shared.get(allocation)
            if region is None:
                start = allocation.start - allocation.to_window
                region = self.shared[allocation] = Region(start, start + allocation.bytes.size, shared=allocation)
                region.block = allocation.shared.block
            return region
        return self.at(x.address)

    def at(self, address):
        """Return the region of global memory at an address."""
        k = bisect.bisect_right(self.starts, address) - 1
        if k < 0 or address > self.regions[k].end:
            raise Unsupported("memory that is no argument of the kernel")
        return self.regions[k]

    def restore(self):
        for region in self.regions:
            region.restore()


def intervals_of(values):
    """Yield the intervals of addresses that kernel arguments and registered buffers can reach."""
    for value in values:
        if type(value) is Pointer:
            yield value.address, value.address + value.array.nbytes
        elif type(value) is Array:
            yield np.lib.array_utils.byte_bounds(value.array)
        elif type(value) is tuple:
            yield from intervals_of(value)


class Engine:
    """One attempt to run grids with gangs of whole blocks, or of single warps (`by_warp`)."""

    def __init__(self, by_warp, function_of):
        self.by_warp, self.function_of = by_warp, function_of
        self.memory, self.clocks, self.gangs = Memory(), Clocks(), []
        self.first_gang, self.world = {}, None
        self.parent = greenlet.getcurrent()

    def prepare(self, grids):
        """Prepare for these grids, of which some may start after others have ended."""
        values = [value for grid in grids for value in grid.args] + list(ranks.buffers.values())
        storages = [(first, first + size) for first, size, alive in tensor_map.storages if not alive.expired()]
        self.memory.add([*intervals_of(values), *storages])
        for grid in grids:
            self.first_gang[grid] = self.clocks.size
            self.clocks.size += self.gangs_of(grid)

    def gangs_of(self, grid):
        return sum(len(block.warps) for block in grid.blocks) if self.by_warp else len(grid.blocks)

    def start(self, grid):
        """Return the gangs of a grid that starts now."""
        made, number = [], self.first_gang[grid]
        for block in grid.blocks:
            for warps in [[warp] for warp in block.warps] if self.by_warp else [block.warps]:
                made.append(Gang(self, block, warps, number))
                for warp in warps:
                    warp.gang = made[-1]
                number += 1
        self.gangs += made
        return made

    def gang_of(self, thread):
        return thread.block.warps[thread.warp].gang

    def started(self, gang):
        self.clocks.acquire(gang, ("stream", gang.grid.rank))

    def ended(self, gang):
        grid, block = gang.grid, gang.block
        if self.world.queued_grids.get(grid.rank):
            self.clocks.release(gang, ("stream", grid.rank))
        self.world.changes += 1
        for warp in gang.warps:
            warp.exited = warp.lanes
            block.cluster.mark_arrived(warp)
        block.exited += gang.size
        if block.exited == block.size:
            for scope in (block, *block.warpgroups):
                if scope.open_rendezvous:
                    raise Unsupported("a barrier at which threads are missing")
            block.shared.check_end_of_block()
            self.world.retire(grid)

    def close(self):
        """Free what the attempt has recorded; the garbage collector would take its time."""
        for region in (*self.memory.regions, *self.memory.shared.values()):
            region.saved = region.tags = region.history = None
            region.pending = []
        for gang in self.gangs:
            gang.log = None
        self.gangs, self.clocks.points = [], {}
        for grid in self.world.grids:
            grid.args = ()

    def shares(self, region):
        """Return whether several gangs may access a region."""
        return region.shared is None or self.by_warp
