"""Simulation engine: every CUDA thread is a greenlet, and all threads of all blocks of a grid exist at once.

A thread runs until it must wait for others (`Thread.rendezvous`), polls memory (`Thread.spin`) or ends. All
synchronisation is built on `rendezvous`, or on the pair `Thread.park` and `World.wake` below it.
"""

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import greenlet
import numpy as np

from moe_numba.simulator.async_.uses_async import uses_async_instructions
from moe_numba.simulator.core.errors import (
    ClusterError,
    DivergentBarrier,
    MissingLane,
    SimulatorError,
    format_lanes,
    format_ranges,
    source_location,
    wait_report,
)
from moe_numba.simulator.core.scheduler import Event, World
from moe_numba.simulator.core.shared import SharedLayout, SharedMemory


class Dim3(NamedTuple):
    x: int
    y: int
    z: int


def thread() -> "Thread":
    """Return the simulated thread that runs now; raise a SimulatorError outside a kernel."""
    current = greenlet.getcurrent()
    if type(current) is Thread:
        return current
    raise SimulatorError("only a running kernel has a current thread; this was called outside one")


class Rendezvous:
    """Threads of one scope (a warp, a warpgroup, a block or a grid) that wait for one another at one operation.

    `expected` is the number of threads that must arrive. `mask` names the lanes that must arrive; it is None where any
    threads of the scope may.
    """

    __slots__ = ("scope", "what", "expected", "mask", "values", "waiting", "site")

    def __init__(self, scope, what, expected, mask, site):
        self.scope, self.what, self.expected, self.mask, self.site = scope, what, expected, mask, site
        self.values, self.waiting = {}, []

    def needs(self, thread):
        """Return whether the rendezvous cannot complete without this thread."""
        if self.mask is None:
            return self.expected == self.scope.size
        return bool(self.mask >> thread.lane & 1)

    def __str__(self):
        mask = "" if self.mask is None else f" with mask {self.mask:#010x}"
        return f"{self.what}{mask} ({len(self.values)} of {self.expected} arrived)"


class Thread(greenlet.greenlet):
    """One CUDA thread."""

    __slots__ = ("grid", "block", "threadIdx", "thread_id", "warp", "lane", "waits", "result")
    # Shared memory that it wrote and mbarriers that it initialised since its last fence, and its groups of async
    # copies.
    __slots__ += ("unfenced_writes", "unfenced_barriers", "copy_groups")

    def __init__(self, block, thread_id):
        self.grid, self.block, self.thread_id = block.grid, block, thread_id
        size = block.grid.block_dim
        self.threadIdx = Dim3(thread_id % size.x, thread_id // size.x % size.y, thread_id // (size.x * size.y))
        self.warp, self.lane = divmod(thread_id, 32)
        self.waits = self.result = self.unfenced_writes = self.unfenced_barriers = self.copy_groups = None
        self.gr_context = block.grid.context

    def run(self):
        try:
            self.grid.kernel(*self.grid.args)
        except Exception as error:
            if not isinstance(error, SimulatorError):
                error.add_note(f"in {self}, threadIdx {tuple(self.threadIdx)}, of kernel {self.grid.name}")
            raise
        self._exit()

    def rendezvous(self, scope, what, expected, value=None, finish=None, mask=None, wait=True, site=None):
        """Contribute `value` to the operation `what` of `scope`, and wait until `expected` threads have arrived.

        The last thread to arrive calls `finish`, which maps {thread: value} to {thread: result} or None. Rendezvous of
        a scope are distinguished by `what` and `mask`, the lanes that must arrive (None: any threads of the scope).
        With `wait=False` the thread arrives and continues. `site` is kept for callers that compare source lines.
        """
        current = scope.open_rendezvous.get((what, mask))
        if current is None:
            current = scope.open_rendezvous[what, mask] = Rendezvous(scope, what, expected, mask, site)
        elif self in current.values:
            raise SimulatorError(f"{self} arrived twice at {current}, at {source_location(sys._getframe())}")
        current.values[self] = value
        if wait:
            current.waiting.append(self)
            self.waits = current
        if len(current.values) == expected:
            del scope.open_rendezvous[what, mask]
            self._complete(current, finish)
        if wait:
            # The last thread to arrive waits as well: if it continued at once, lanes would resume in a fixed order.
            self.parent.switch()
            return self.result

    def _complete(self, rendezvous, finish):
        world = self.grid.world
        results = finish(rendezvous.values) if finish else None
        for t in rendezvous.waiting:
            t.result = results[t] if results else None
        if world.memory_model is not None:
            world.memory_model.synchronize(rendezvous)
        world.wake(rendezvous.waiting)
        if world.events is not None:
            for t, value in rendezvous.values.items():
                result = results[t] if results else None
                t.record_event(rendezvous.what, {"value": value, "result": result, "mask": rendezvous.mask})

    def park(self, where):
        """Wait until `World.wake` names this thread; `str(where)` describes what it waits for."""
        self.waits = where
        self.parent.switch()
        return self.result

    def spin(self, what="polling"):
        """Yield before a poll: other threads run until memory changes (`Grid.memory_changed`) or none can run."""
        self.waits = what
        self.grid.world.pollers.append(self)
        self.parent.switch()

    def preempt(self):
        """Yield to another warp, or to another lane of this warp."""
        self.grid.world.wake((self,))
        self.parent.switch()

    def record_event(self, what, details=None):
        """Append an event to the trace, if one is recorded."""
        world = self.grid.world
        if world.events is not None:
            where = self.block.index, self.warp, self.lane
            world.events.append(Event(world.steps, *where, what, details, self.grid.rank))

    def _exit(self):
        warp = self.block.warps[self.warp]
        warp.exited |= 1 << self.lane
        warp.warpgroup.exited += 1
        self.block.exited += 1
        self.grid.memory_changed()
        for scope in (warp, warp.warpgroup, self.block, self.grid):
            for current in scope.open_rendezvous.values():
                if current.needs(self) and self not in current.values:
                    raise self._missing_from(current)
        if warp.exited == warp.lanes:
            self.block.cluster.mark_arrived(warp)
        if self.block.exited == self.block.size:
            self.block.shared.check_end_of_block()
            self.grid.world.retire(self.grid)

    def _missing_from(self, rendezvous):
        """Return the error for a thread that exits while `rendezvous` needs it."""
        arrived = f"  warps {format_ranges({t.warp for t in rendezvous.values})} arrived without waiting"
        waiting = wait_report(rendezvous.waiting, limit=2) or arrived
        if rendezvous.mask is None:
            return DivergentBarrier(f"{self} has exited, while others wait for it at {rendezvous.what}:\n{waiting}")
        exited = format_lanes(rendezvous.scope.exited & rendezvous.mask)
        return MissingLane(
            f"{rendezvous.scope}: lanes {exited} are named in mask {rendezvous.mask:#010x} of {rendezvous.what} "
            f"but have exited:\n{waiting}"
        )

    def __str__(self):
        return f"{self.block} warp {self.warp} lane {self.lane}"


class Warpgroup:
    """Four consecutive warps, the first a multiple of four; the last warpgroup of a block may be partial."""

    def __init__(self, block, index):
        self.block, self.index, self.open_rendezvous, self.exited = block, index, {}, 0
        self.size = min(128, block.size - 128 * index)

    def __str__(self):
        return f"{self.block} warps {4 * self.index}-{4 * self.index + 3}"


class Warp:
    """Up to 32 threads that are scheduled together: each step runs every lane that can run, in random order."""

    def __init__(self, block, index):
        self.block, self.index, self.warpgroup, self.threads = block, index, block.warpgroups[index // 4], []
        self.open_rendezvous, self.exited, self.lanes, self.wgmma_groups = {}, 0, 0, []
        self.ready, self.queued, self.priority = [], False, block.grid.world.rng.random()

    def step(self, rng):
        lanes, self.ready = self.ready, []
        rng.shuffle(lanes)
        for t in lanes:
            t.switch()

    def __str__(self):
        return f"{self.block} warp {self.index}"


class Block:
    """The threads of one block and their shared memory."""

    def __init__(self, grid, index):
        self.grid, self.index, self.size = grid, Dim3(*index), grid.block_size
        self.open_rendezvous, self.exited = {}, 0
        self.shared = SharedMemory(self, grid.shared_layout)
        self.warpgroups = [Warpgroup(self, g) for g in range((self.size + 127) // 128)]
        self.warps = [Warp(self, w) for w in range((self.size + 31) // 32)]
        for i in range(self.size):
            t = Thread(self, i)
            self.warps[t.warp].threads.append(t)
            self.warps[t.warp].lanes |= 1 << t.lane

    def __str__(self):
        return f"{self.grid.label}block {tuple(self.index)}"


class Cluster:
    """The blocks of a cluster, in the order of their ranks, and the cluster barrier.

    The barrier counts whole warps, since its aligned instructions are executed by all lanes of a warp together. As in
    the PTX ISA, the barrier does not wait for warps that have exited.
    """

    def __init__(self, blocks):
        self.blocks, self.world = blocks, blocks[0].grid.world
        for rank, block in enumerate(blocks):
            block.cluster, block.rank = self, rank
        self.phase, self.missing, self.waiting = 0, self._running_warps(), []
        self.arrived = {}  # warp -> phase in which it arrived, until it waits
        self.synchronized = set()  # warps that have passed the barrier: they know that all blocks have started

    def _running_warps(self):
        return {warp for block in self.blocks for warp in block.warps if warp.exited != warp.lanes}

    def arrive(self, warp):
        if warp in self.arrived:
            raise ClusterError(f"{warp} arrives at the cluster barrier twice without a wait in between")
        self.arrived[warp] = self.phase
        self.mark_arrived(warp)

    def mark_arrived(self, warp):
        """Stop waiting for this warp, which arrived or exited; the last one completes the phase."""
        self.missing.discard(warp)
        if not self.missing:
            self.phase, self.missing = self.phase + 1, self._running_warps()
            waiting, self.waiting = self.waiting, []
            self.world.wake(waiting)

    def begin_wait(self, warp):
        """Return the phase that a warp must wait for."""
        if warp not in self.arrived:
            raise ClusterError(f"{warp} waits at the cluster barrier, at which it has not arrived")
        return self.arrived.pop(warp)

    def __str__(self):
        running = self._running_warps()
        return f"barrier.cluster.wait ({len(running - self.missing)} of {len(running)} warps arrived)"


class Grid:
    """One launch: a kernel, its arguments and all its blocks."""

    def __init__(
        self,
        world: World,
        kernel: Callable,
        grid_dim: tuple[int, int, int],
        block_dim: tuple[int, int, int],
        args: Sequence,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] | None = None,
        cooperative: bool = False,
    ):
        self.world, self.kernel, self.name = world, kernel, kernel.__name__
        self.grid_dim, self.block_dim, self.cluster_dim = Dim3(*grid_dim), Dim3(*block_dim), Dim3(*cluster or (1, 1, 1))
        self.args, self.cooperative = args, cooperative
        self.shared_layout, self.uses_async = SharedLayout(shared_bytes), uses_async_instructions(kernel)
        self.block_size = self.block_dim.x * self.block_dim.y * self.block_dim.z
        self.size = self.block_size * self.grid_dim.x * self.grid_dim.y * self.grid_dim.z
        self.context, self.open_rendezvous, self.blocks = world.context, {}, []
        for z, y, x in np.ndindex(self.grid_dim.z, self.grid_dim.y, self.grid_dim.x):
            self.blocks.append(Block(self, (x, y, z)))
        clusters = {}
        for block in self.blocks:
            index = tuple(i // n for i, n in zip(block.index, self.cluster_dim))
            clusters.setdefault(index, []).append(block)
        self.clusters = [Cluster(blocks) for blocks in clusters.values()]
        self.rank, self.label = None, ""  # set where several ranks run together; the label precedes blocks in messages
        self.active = len(self.blocks)  # blocks that have not ended, plus async copies that have not completed

    def memory_changed(self) -> None:
        """Record a change of memory that some thread may be polling for."""
        self.world.changes += 1

    def threads(self) -> list[Thread]:
        """Return all threads, in the order of blocks, warps and lanes."""
        return [t for block in self.blocks for warp in block.warps for t in warp.threads]

    def __str__(self):
        return f"{self.label}grid of kernel {self.name}"
