"""Simulated threads: every CUDA thread is a greenlet, and all threads of all blocks of a grid exist at once.

A thread runs until it must wait for others (`Thread.rendezvous`), polls memory (`Thread.spin`) or ends. All
synchronisation is built on `rendezvous`, or on the pair `Thread.park` and `World.wake` below it.
"""

import sys
from typing import NamedTuple

import greenlet

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.errors import (
    ALL_LANES,
    ALL_OF_THE_GRID,
    DivergentBarrier,
    MissingLane,
    SimulatorError,
    format_lanes,
    format_ranges,
    source_location,
    wait_report,
)
from moe_numba.simulator.core.polling import LOADS
from moe_numba.simulator.core.scheduler import Event
from moe_numba.simulator.core.unknown import ThreadEnds

_getcurrent = greenlet.getcurrent
CONVERGING = "the lanes that execute this call together"  # what a lane waits for


class Dim3(NamedTuple):
    x: int
    y: int
    z: int


def thread() -> "Thread":
    """Return the simulated thread that runs now; raise a SimulatorError outside a kernel."""
    current = _getcurrent()
    if type(current) is Thread:
        return current
    found = getattr(current, "current_thread", None)  # of a gang of the vector engine that calls lane by lane
    if found is not None:
        return found
    raise SimulatorError("only a running kernel has a current thread; this was called outside one")


class Rendezvous:
    """Threads of one scope (a warp, a warpgroup, a block or a grid) that wait for one another at one operation.

    `expected` is the number of threads that must arrive. `mask` names the lanes that must arrive; it is None where any
    threads of the scope may. At a barrier `of_running` threads, a thread that exits counts as arrived.
    """

    __slots__ = ("scope", "what", "expected", "mask", "values", "waiting", "site", "departed", "arrivals")
    __slots__ += ("of_running", "finish")

    def __init__(self, scope, what, expected, mask, site, of_running):
        self.scope, self.what, self.expected, self.mask, self.site = scope, what, expected, mask, site
        self.values, self.waiting, self.of_running, self.finish = {}, [], of_running, None
        self.departed = {}  # thread that did not wait -> what it published (see `happens_before`)
        self.arrivals = {}  # thread -> the step of the scheduler in which it arrived, if a trace is recorded

    def needs(self, thread):
        """Return whether the rendezvous cannot complete without this thread."""
        if self.mask is None:
            return self.of_running or self.expected == self.scope.size
        return bool(self.mask >> thread.lane & 1)

    def ordered_threads(self):
        """Return the threads that arrived, and those that a barrier does not wait for since they have exited."""
        exited = self.scope.threads() if self.of_running and self.scope.exited else ()
        return [*self.values, *(t for t in exited if t.unit.exited >> t.lane & 1)]

    def __str__(self):
        mask = "" if self.mask is None else f" with mask {self.mask:#010x}"
        return f"{self.what}{mask} ({len(self.values)} of {self.expected} arrived)"


class Thread(greenlet.greenlet):
    """One CUDA thread."""

    __slots__ = ("grid", "block", "threadIdx", "thread_id", "warp", "lane", "waits", "result")
    __slots__ += ("unit",)  # its Warp, which the scheduler runs
    # Shared memory that it wrote and mbarriers that it initialised since its last fence, and its groups of async
    # copies.
    __slots__ += ("unfenced_writes", "unfenced_barriers", "copy_groups")
    __slots__ += ("race_state",)  # see `happens_before`

    def __init__(self, block, thread_id):
        self.grid, self.block, self.thread_id = block.grid, block, thread_id
        size = block.grid.block_dim
        self.threadIdx = Dim3(thread_id % size.x, thread_id // size.x % size.y, thread_id // (size.x * size.y))
        self.warp, self.lane = divmod(thread_id, 32)
        self.unit = block.warps[self.warp]
        self.waits = self.result = self.unfenced_writes = self.unfenced_barriers = self.copy_groups = None
        self.gr_context = block.grid.context

    def run(self):
        try:
            self.grid.kernel(*self.grid.args)
        except ThreadEnds:
            pass
        except Exception as error:
            if not isinstance(error, SimulatorError):
                error.add_note(f"in {self}, threadIdx {tuple(self.threadIdx)}, of kernel {self.grid.name}")
            raise
        self._exit()

    def rendezvous(
        self,
        scope,
        what,
        expected,
        value=None,
        finish=None,
        mask=None,
        wait=True,
        site=None,
        by_lane=False,
        of_running=False,
    ):
        """Contribute `value` to the operation `what` of `scope`, and wait until `expected` threads have arrived.

        The last thread to arrive calls `finish`, which maps {thread: value} to {thread: result} or None; `by_lane`,
        {lane: value} to {lane: result}. Rendezvous of a scope are distinguished by `what` and `mask`, the lanes that
        must arrive (None: any threads of the scope).
        With `wait=False` the thread arrives and continues. `site` is kept for callers that compare source lines.
        `of_running`: `expected` counts the threads that have not exited; one that exits is no longer expected.
        """
        current = scope.open_rendezvous.get((what, mask))
        if current is None:
            current = scope.open_rendezvous[what, mask] = Rendezvous(scope, what, expected, mask, site, of_running)
        return self.arrive(current, value, finish, wait, by_lane)

    def arrive(self, current, value, finish, wait, by_lane):
        """Contribute `value` to an open Rendezvous; see `rendezvous`."""
        values, world = current.values, self.grid.world
        if self in values:
            raise SimulatorError(f"{self} arrived twice at {current}, at {source_location(sys._getframe())}")
        values[self] = value
        if world.events is not None:
            current.arrivals[self] = world.steps
        if wait:
            current.waiting.append(self)
            self.waits = current
        elif world.races is not None:
            current.departed[self] = world.races.depart(self)
        current.finish = finish
        if len(values) == current.expected:
            self._complete(current, by_lane)
        if wait:
            # The last thread to arrive waits as well: if it continued at once, lanes would resume in a fixed order.
            memory.loads_left = LOADS
            self.parent.switch()
            return self.result

    def _complete(self, rendezvous, by_lane=False):
        world, results, finish = self.grid.world, None, rendezvous.finish
        del rendezvous.scope.open_rendezvous[rendezvous.what, rendezvous.mask]
        if finish and by_lane:
            results = finish({t.lane: value for t, value in rendezvous.values.items()})
        elif finish:
            results = finish(rendezvous.values)
        for t in rendezvous.waiting:
            t.result = results[t.lane if by_lane else t] if results else None
        if world.memory_model is not None:
            world.memory_model.synchronize(rendezvous)
        if world.races is not None:
            world.races.synchronize(rendezvous)
        world.wake(rendezvous.waiting)
        if world.events is not None:
            for t, value in rendezvous.values.items():
                result = results[t.lane if by_lane else t] if results else None
                details = {"value": value, "result": result, "mask": rendezvous.mask}
                t.record_event(rendezvous.what, details | {"since": rendezvous.arrivals[t]})

    def park(self, where):
        """Wait until `World.wake` names this thread; `str(where)` describes what it waits for."""
        self.waits, memory.loads_left = where, LOADS
        self.parent.switch()
        return self.result

    def spin(self, what="polling"):
        """Yield before a poll: other threads run until memory changes (`Grid.memory_changed`) or none can run."""
        self.waits, memory.loads_left = what, LOADS
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
        self.grid.exited += 1
        self.grid.memory_changed()
        for scope in (warp, warp.warpgroup, self.block, self.grid):
            for current in list(scope.open_rendezvous.values()):
                if current.needs(self) and self not in current.values:
                    if not current.of_running or scope is self.grid and not self.thread_id:
                        raise self._missing_from(current)
                    current.expected -= 1
                    if len(current.values) == current.expected:
                        self._complete(current)
        if warp.exited == warp.lanes:
            self.block.cluster.mark_arrived(warp)
        if self.block.exited == self.block.size:
            self.block.shared.check_end_of_block()
            self.grid.world.start(self.grid.start_next(self.block.cluster))
            self.grid.world.retire(self.grid)

    def _missing_from(self, rendezvous):
        """Return the error for a thread that exits while `rendezvous` needs it."""
        arrived = f"  warps {format_ranges({t.warp for t in rendezvous.values})} arrived without waiting"
        waiting = wait_report(rendezvous.waiting, limit=2) or arrived
        if rendezvous.mask is None:
            remedy = f", and arrives for its block; {ALL_OF_THE_GRID}" if rendezvous.scope is self.grid else ""
            return DivergentBarrier(
                f"{self} has exited, while others wait for it at {rendezvous.what}{remedy}:\n{waiting}"
            )
        exited = format_lanes(rendezvous.scope.exited & rendezvous.mask)
        return MissingLane(
            f"{rendezvous.scope}: lanes {exited} are named in mask {rendezvous.mask:#010x} of {rendezvous.what} "
            f"but have exited; {ALL_LANES}:\n{waiting}"
        )

    def __str__(self):
        return f"{self.block} warp {self.warp} lane {self.lane}"
