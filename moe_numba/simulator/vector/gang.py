"""Gangs, which run whole warps as vectors.

A gang is a greenlet that runs a kernel's vector version for all threads of a block, of one warp, or of several blocks
that have nothing to do with one another. It gives way where it waits or polls.
"""

import functools
import sys

import greenlet
import numpy as np

from moe_numba.simulator.core.errors import kernel_frame
from moe_numba.simulator.vector import access, state
from moe_numba.simulator.vector.clocks import READ, fold
from moe_numba.simulator.vector.cp_async import Groups
from moe_numba.simulator.vector.errors import Conflict, Unsupported
from moe_numba.simulator.vector.indices import take
from moe_numba.simulator.vector.numbers import Weak
from moe_numba.simulator.vector.races import check_before_wait, check_initialized
from moe_numba.simulator.vector.shadow import Log, count_nonzero


@functools.lru_cache(maxsize=64)
def _thread_indices(block_dim, first, size):
    """Return threadIdx.x, y and z of consecutive threads, and their lanes."""
    number = np.arange(first, first + size, dtype=np.int64)
    x, y, _ = block_dim
    made = [Weak(number % x), Weak(number // x % y), Weak(number // (x * y)), Weak(number & 31)]
    return [m if m.values.min() != m.values.max() else int(m.values[0]) for m in made[:3]] + made[3:]


class Gang(greenlet.greenlet):
    """The threads `first` to `first + size - 1` of a block: all of them, or a warp."""

    def __init__(self, engine, block, warps, number):
        self.block, self.warps, self.first = block, warps, 32 * warps[0].index
        self.is_block, self.priority, self.lag = len(warps) == len(block.warps), warps[0].priority, warps[0].lag
        self._set_up(engine, block.grid, [block], min(32 * len(warps), block.size - self.first), number)

    def _set_up(self, engine, grid, blocks, size, number):
        self.engine, self.world, self.grid, self.blocks, self.number = engine, engine.world, grid, blocks, number
        self.size, self.num_warps = size, (size + 31) // 32
        self.all_lanes, self.everyone = _constants(size)
        self.whole = None  # a mask that is known to consist of whole warps
        self.log, self.known, self.time, self.flushed = Log(self.all_lanes), None, 0, (0, 0, 0, 0)
        self.lane, self.waits, self.result, self.quiet = 0, None, None, False
        self.overlaps = engine.strict and grid.dependent  # it has not waited for the kernel before
        self.barriers = 0  # barriers of the block and of the grid that it has reached
        self.acquired = {}  # point -> what the gang last acquired there
        self.copy_groups = Groups()  # of cp.async
        self.unfenced = {}  # race detector -> (first, last byte, number of lane 0) of unfenced writes
        self.queued = False
        self.notes = engine.profile and engine.profile.of(self)  # see `profiler.collect_vectors`
        self.gr_context, self.parent = grid.context, engine.parent

    def step(self, rng):
        state.gang = self
        self.switch()

    def run(self):
        self.engine.started(self)
        self.engine.calls[self.grid.kernel](None, *self.grid.args)
        if self.notes is not None:
            self.notes.end_phase()
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
            found = _thread_indices(self.grid.block_dim, self.first, min(self.size, self.grid.block_size))
            return found[3] if name == "lane" else found["xyz".index(axis)]
        if name == "blockIdx":
            return self.block_index(axis)
        return getattr(self.grid.block_dim if name == "blockDim" else self.grid.grid_dim, axis)

    def block_index(self, axis):
        """Return blockIdx.x, y or z."""
        return getattr(self.block.index, axis)

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
            found = count_nonzero(take(flags, offset >> 4))
            if width > 1 and not found:
                found = count_nonzero(take(flags, (offset + (width - 1)) >> 4))
            if width > 32 and not found:
                found = count_nonzero(take(flags, (offset[:, None] + np.arange(16, width, 16)) >> 4))
        else:
            found = count_nonzero(flags[offset >> 4 : (offset + width - 1 >> 4) + 1])
        if found:
            start = region.shared.start
            for o in offset if many else (offset,):
                for other in detector.reservations_at(start + int(o), start + int(o) + width):
                    if other.conflicts(start + int(o), start + int(o) + width, writes):
                        raise Conflict("an access to memory that an asynchronous operation uses")
        if writes:
            lanes = self.all_lanes if mask is None else mask.nonzero()[0]
            self.mark_unfenced(detector, offset if many else np.array([offset]), width, lanes if many else lanes[-1:])

    def mark_unfenced(self, detector, offset, width, lanes):
        """Record that lanes wrote `width` bytes each at `offset` through the generic proxy."""
        if detector.unfenced is None:
            detector.unfenced = np.zeros(detector.allocation.bytes.size, np.uint16)
        threads = [t for warp in self.warps for t in warp.threads]
        base = detector.writers.get(threads[0])
        if base is None:
            for t in threads:
                detector.writers[t] = len(detector.writers) + 1
            base = detector.writers[threads[0]]
        if width == 1:
            detector.unfenced[offset] = base + lanes
        else:
            detector.unfenced[offset[:, None] + np.arange(width)] = (base + lanes)[:, None]
        low, high = int(offset.min()), int(offset.max()) + width
        first, last, _ = self.unfenced.get(detector, (low, high, base))
        self.unfenced[detector] = min(first, low), max(last, high), base

    # Waiting

    def spin(self, what="polling"):
        """Give way before a poll."""
        if not self.quiet:
            if self.notes is not None:
                self.notes.wait(what)
            self.waits = what
            self.world.pollers.append(self)
            self.parent.switch()

    def park(self, where):
        """Wait until `World.wake` names this gang."""
        if self.notes is not None:
            self.notes.wait(where)
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
            if self.engine.strict:
                check_initialized([e for kind in new[READ:] for e in kind], self.all_lanes)
            if self.overlaps:
                check_before_wait(self.engine.last_kernel, new, self.all_lanes)
            new = [[e for e in kind if self.engine.shares(e[0])] for kind in new]
            fold(self, self.time, self.known, new)

    def wait_for_kernel_before(self, active):
        """Execute `griddepcontrol.wait`."""
        self.grid.waited.update(self.blocks)
        if self.overlaps and active is None:
            self.flush()
            self.overlaps = False

    def allow_next_kernel(self):
        """Execute `griddepcontrol.launch_dependents`."""
        for block in self.blocks:
            self.grid.allow_next(block)

    def end_of_epoch(self):
        self.flush()
        self.log.barrier()
        self.flushed = 0, 0, 0, 0

    def block_barrier(self, active, what, value=None, finish=None):
        """Wait for all threads of the block."""
        if active is not None:
            raise Unsupported(f"{what} that not all threads reach together")
        if self.notes is not None:
            self.notes.barrier(what)
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
        self.grid.check_cooperative(self.block)
        if self.notes is not None:
            self.notes.barrier("grid sync")
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


class BlocksGang(Gang):
    """The threads of several blocks, each of whole warps.

    The kernel may do nothing for which threads of a block need one another: whatever asks for `block` or `warps`, or
    waits, ends the attempt.
    """

    def __init__(self, engine, blocks, number):
        grid = blocks[0].grid
        self.first, self.priority, self._indices = 0, engine.world.rng.random(), {}
        self._set_up(engine, grid, blocks, len(blocks) * grid.block_size, number)

    def _refuse(self):
        raise Unsupported("threads of a block that need one another, in a vector of several blocks")

    block = warps = is_block = property(_refuse)

    def spin(self, what=None):
        self._refuse()

    def park(self, where):
        self._refuse()

    block_barrier = grid_barrier = lambda self, *_, **__: self._refuse()

    def index(self, name, axis=None):
        found = super().index(name, axis)
        if name not in ("threadIdx", "lane") or type(found) is not Weak:
            return found
        key = name, axis
        if key not in self._indices:
            self._indices[key] = Weak(np.tile(found.values, len(self.blocks)))
        return self._indices[key]

    def block_index(self, axis):
        if axis not in self._indices:
            of_blocks = np.array([getattr(block.index, axis) for block in self.blocks], np.int64)
            differs = of_blocks.min() != of_blocks.max()
            self._indices[axis] = Weak(np.repeat(of_blocks, self.grid.block_size)) if differs else int(of_blocks[0])
        return self._indices[axis]


@functools.lru_cache(maxsize=64)
def _constants(size):
    return np.arange(size), np.ones(size, bool)
