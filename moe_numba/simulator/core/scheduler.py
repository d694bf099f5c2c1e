"""Scheduler: chooses which simulated thread runs next, and detects when none can make progress.

A seed determines which warp runs next and in which order its lanes run. Each warp has a random priority that is redrawn
now and then, so that one warp runs far ahead of another and a missing barrier produces a wrong result under some seeds.
The same seed repeats the same run. A World runs several grids at once, and anything else that has a `step` method.
"""

import contextlib
import contextvars
import heapq
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from moe_numba.simulator.core import memory, typed_code, uninitialized
from moe_numba.simulator.core.errors import AsyncRace, DataRace, Deadlock, wait_report
from moe_numba.simulator.core.polling import LOADS, snapshot
from moe_numba.simulator.core.settings import override_settings, settings
from moe_numba.simulator.core.stall import Stall
from moe_numba.simulator.memory_model.happens_before import HappensBefore
from moe_numba.simulator.memory_model.store_buffer import StoreBuffers

_IDLE_ROUNDS = 16  # fruitless polling rounds before a deadlock is suspected
_IDLE_LIMIT = 8192  # fruitless polling rounds that count as a deadlock even if some local variable still changes
_LONGEST_CYCLE = 8  # rounds within which a polling loop is expected to return to the same state
_STEP_NS = 1000  # of the clock that threads read, for each step
_FIRST_SKIP = 4096  # steps without a change of memory before the clock is set forward: short timeouts expire in order
_LATEST_NS = 10**18  # no timeout is longer: threads that still wait then wait for ever
_STEPS_AFTER_ERROR = 1000  # steps in which other threads may still show a data race, besides as many as before
_REDRAW = 0.125  # probability that a warp's priority is redrawn after a step
SLOWEST = 3.0  # priority after all others


class Event(NamedTuple):
    """One entry of a trace. `step` counts the scheduler's decisions; `rank` is None if only one rank runs."""

    step: int
    block: tuple[int, int, int]
    warp: int
    lane: int
    what: str
    details: dict | None
    rank: int | None = None


def record_access(t, target, index, writes, nbytes, scope, value, operation):
    """Record an access that thread `t` is about to make; the arguments are those of `memory.before_access`."""
    _, size = memory.byte_span(target, index, writes, nbytes)
    if not size or type(target) is memory.LocalArray:
        return
    space = "global" if target.allocation is None else "shared"
    details = {"buffer": target.name, "index": index, "bytes": size}
    if value is not None:
        details["value"] = value
    elif not writes and nbytes is None and t.grid.world.memory_model is None:
        details["value"] = target.array[index]
    t.record_event(f"{space} {operation or ('store' if writes else 'load')}", details)


def seed(n: int, preempt: float = 0.0, slow_warp: int | None = None) -> contextlib.AbstractContextManager:
    """Return a context in which a seed determines the order of simulated threads.

    It affects the OS thread that enters it; elsewhere ``MOE_NUMBA_SEED``, ``MOE_NUMBA_PREEMPT`` and
    ``MOE_NUMBA_SLOW_WARP`` do.

    Parameters
    ----------
    n : int
        The seed.
    preempt : float
        Probability, 0 to 1, that an indexed memory access yields to another thread first.
    slow_warp : int, optional
        This warp of each block runs only while all others wait; with ``preempt`` they overtake it at its accesses, too.
        That finds errors that need one warp to be late, as it rarely is in random orders.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def reverse(x):
    ...     tile = cuda.shared.array(64, np.float32)
    ...     i = cuda.threadIdx.x
    ...     tile[i] = x[i]
    ...     x[i] = tile[63 - i]
    >>> with moe_numba.simulator.races(False), moe_numba.simulator.seed(3):
    ...     reverse[1, 64](np.arange(64, dtype=np.float32))  # the threads run in the order of seed 3
    """
    return override_settings(seed=n, preempt=preempt, slow_warp=slow_warp)


def trace(accesses: bool = False) -> contextlib.AbstractContextManager[list[Event]]:
    """Return a context that records every collective, barrier and copy: `with trace() as events`.

    Parameters
    ----------
    accesses : bool
        Record loads, stores and atomics as well, as "global load", "shared store" and so on, each before it happens.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def wait():
    ...     cuda.syncthreads()
    >>> with moe_numba.simulator.trace() as events:
    ...     wait[1, 64]()
    >>> sorted({event.what for event in events})
    ['syncthreads']
    """
    return override_settings(events=[], accesses=accesses)


@contextlib.contextmanager
def races(enabled: bool = True) -> Iterator[None]:
    """Detect data races and reads of uninitialised memory within this context, or, with ``False``, do not.

    Global memory is known to be uninitialised if it was allocated within this context, by `torch.empty` or its
    relatives, or at any time by `cuda.device_array`.

    Parameters
    ----------
    enabled : bool
        False: detect neither, which is faster.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def reverse(x):
    ...     tile = cuda.shared.array(64, np.float32)
    ...     i = cuda.threadIdx.x
    ...     tile[i] = x[i]
    ...     x[i] = tile[63 - i]
    >>> with moe_numba.simulator.races():
    ...     reverse[1, 64](np.arange(64, dtype=np.float32))
    Traceback (most recent call last):
        ...
    moe_numba.simulator.core.errors.DataRace: block (0, 0, 0) warp ...
    """
    with override_settings(races=enabled), uninitialized.registered_tensors() if enabled else contextlib.nullcontext():
        yield


def run_world(run: Callable[[], None]) -> None:
    """Call `run()`, which makes a World and runs it, or let the debugger in force call it as often as it needs."""
    debugger = settings["debugger"]
    run() if debugger is None else debugger.run(run)


_previous = threading.local()  # `history`: of this OS thread's last kernel, which a dependent launch may overlap


def history():
    """Return the History of this OS thread's last kernel, or None."""
    found = last_kernel()
    return found() if callable(found) else found


def last_kernel():
    """Return what `set_history` was given last."""
    return getattr(_previous, "history", None)


def set_history(found):
    """Set what a dependent launch may overlap: a History, a function that returns one, or None."""
    _previous.history = found


def shuffle(items, rng):
    """Do what `rng.shuffle(items)` does, with the same random numbers, in half the time."""
    getrandbits = rng.getrandbits
    for last in range(len(items) - 1, 0, -1):
        bits = (last + 1).bit_length()
        while (other := getrandbits(bits)) > last:
            pass
        items[last], items[other] = items[other], items[last]


class World:
    """The scheduler, and the grids that run under it at the same time."""

    makes_warps_late = False  # only those that run

    def __init__(self, seed: int | None = None):
        self.rng = random.Random(settings["seed"] if seed is None else seed)
        self.preempt, self.events, self.profile = settings["preempt"], settings["events"], settings["profile"]
        self.debugger, self.slow_warp = settings["debugger"], settings["slow_warp"]
        self.observers = []  # called by `memory.before_access`
        self.grids, self.queue, self.pollers = [], [], []
        self.steps = self.tickets = self.changes = 0  # `changes` counts changes of memory that may end a poll
        self.snapshots, self.stall = None, Stall(self)
        self.clock_reads, self._skipped_ns = 0, 0
        self.clock_readers = set()  # threads that have read the clock since memory last changed, or time was skipped
        self._failed, self._last_step = None, sys.maxsize  # see `_go_on_after`
        self._changed = 0  # the last step before which memory had changed
        self.queued_grids = {}  # rank -> grids that start when the one that runs on that rank has ended
        self.memory_model = StoreBuffers(self) if settings["weak_memory"] else None
        self.detects_races, self.races = settings["races"], None  # `races`: a HappensBefore, from the first grid on
        if self.detects_races and not settings.is_changed("races"):
            uninitialized.register_tensors()  # with MOE_NUMBA_RACES=1 there is no context that does it
        self.acquired_tensor_maps = {}  # (thread, address of a tensor map) -> the publication that it acquired
        self.threads = 0  # of all grids; 0: of the first one
        self.elected_lanes = {}  # mask -> the lane that elect.sync chooses
        self.unknown_use = None  # the first error that depends on uninitialised memory; see `core.unknown`
        self.watching = 0  # how often this world is counted in `memory.watching`
        # Greenlets do not inherit NumPy's error state; on a GPU integers wrap around, and floats overflow, silently.
        self.context = contextvars.copy_context()
        self.context.run(np.seterr, all="ignore")

    @property
    def nanoseconds(self):
        """The time on the clock that threads read."""
        return _STEP_NS * self.steps + self._skipped_ns

    def read_clock(self, thread):
        """Return the time in nanoseconds; `thread` may wait for it to pass."""
        self.clock_reads += 1
        self.clock_readers.add(thread)
        return self.nanoseconds

    def _skip_time(self):
        """Set the clock forward, if it is time to; return whether it was.

        All threads poll in vain, until a timeout of one of them expires. The scheduler does not know how long timeouts
        are: it calls this until one has expired. Each call adds half of the time that has passed, so that of two
        threads that began to wait together, that with half of the other's timeout still times out first.
        """
        if not self._skipped_ns and self.steps - self._changed < _FIRST_SKIP:
            return False
        self._skipped_ns += self.nanoseconds // 2
        self.clock_readers.clear()
        return True

    def watch_accesses(self):
        """Make every later memory access call `memory.before_access`."""
        self.watching += 1
        memory.watch(1)

    def observe_accesses(self, observer):
        """Make every later memory access call `observer` too, with the arguments of `record_access`."""
        if observer not in self.observers:
            self.observers.append(observer)
            self.watch_accesses()

    def add(self, grid) -> None:
        """Start a grid: the threads of its resident blocks may run."""
        typed_code.install(grid.kernel)
        self.grids.append(grid)
        if grid.uses_async or self.preempt or self.detects_races or self.profile is not None:
            self.watch_accesses()
        if settings["accesses"]:
            self.observe_accesses(record_access)
        if self.debugger is not None:
            self.debugger.start(grid)
        if self.detects_races:
            if self.races is None:
                previous = history() if grid.dependent and not self.threads else None
                set_history(None)  # this world changes it, and may fail
                self.races = HappensBefore(self.threads or grid.size, previous)
            self.races.start(grid)
        if self.profile is not None:
            self.profile.start(grid)
        if self.memory_model is not None:
            self.memory_model.start(grid)
        self.start(grid.start())

    def start(self, blocks):
        """Let the threads of blocks run."""
        self.wake([t for block in blocks for t in block.threads()])

    def retire(self, grid):
        """Record that a block or a copy of a grid has ended; after the last one the rank's next grid starts."""
        grid.active -= 1
        if not grid.active and self.queued_grids.get(grid.rank):
            if self.memory_model is not None:
                self.memory_model.end(grid)
            if self.races is not None:
                self.races.end(grid)
            self.add(self.queued_grids[grid.rank].pop(0))

    def schedule(self, unit):
        """Queue a warp, or any unit with `priority`, `queued` and `step`, to run."""
        self.tickets += 1
        heapq.heappush(self.queue, (unit.priority + getattr(unit, "lag", 0), self.tickets, unit))

    def completion_priority(self):
        """Draw the priority of an asynchronous operation: before all threads, after all of them, or in between."""
        return self.rng.choice((-1.0, 2.0, 2.0, self.rng.random()))

    def wake(self, threads):
        """Make threads ready to run."""
        if self.profile is not None:
            self.profile.wake(self, threads)
        for t in threads:
            t.waits = None
            warp = t.unit
            warp.ready.append(t)
            if not warp.queued:
                warp.queued = True
                self.schedule(warp)

    def step(self) -> None:
        """Run the unit with the least priority until it waits."""
        _, _, unit = heapq.heappop(self.queue)
        unit.queued = False
        self.steps += 1
        if self.rng.random() < _REDRAW and unit.priority != SLOWEST:
            unit.priority = self.rng.random()
        unit.step(self.rng)

    def run(self) -> None:
        """Run until every thread has ended; unwind the remaining threads on an error."""
        seen = idle = 0
        polled = -1  # the changes with which threads have last polled before a warp of a late rank
        memory.loads_left = LOADS
        if self.profile is not None:
            self.profile.begin()
        try:
            while self.queue or self.pollers:
                only_late = bool(self.queue) and getattr(self.queue[0][2], "lag", 0) > 0
                if only_late and self.pollers and polled != self.changes == seen:
                    polled = self.changes  # a poll may succeed at once, without a step of the late rank
                    pollers, self.pollers = self.pollers, []
                    self.wake(pollers)
                    continue
                if self.pollers and (self.changes != seen or not self.queue):
                    if self.memory_model is not None and self.changes == seen:
                        self.memory_model.make_half_visible()
                    idle = idle + 1 if self.changes == seen else 0
                    seen = self.changes
                    if not idle:
                        self._changed = self.steps
                        self.clock_readers.clear()
                    if self._is_deadlocked(idle):
                        may_time_out = self.clock_readers and self.nanoseconds <= _LATEST_NS
                        if idle > _IDLE_LIMIT or not may_time_out:
                            raise Deadlock(self._report("every thread that still runs polls in vain"))
                        idle = 0 if self._skip_time() else idle
                    pollers, self.pollers = self.pollers, []
                    self.wake(pollers)
                try:
                    self.step()
                except Exception as error:
                    self._go_on_after(error)
                if self.steps > self._last_step:
                    break
                if self.memory_model is not None:
                    self.memory_model.step()
                if self.steps >= self.stall.next_step and self.stall.is_certain():
                    raise Deadlock(self._report("every thread repeats what it did, and no memory changes"))
            if any(not t.dead for t in self._threads()) and self._failed is None:
                raise Deadlock(self._report("no thread can run"))
            if self.unknown_use is not None:
                raise self.unknown_use
            if self._failed is not None:
                raise self._failed
            if self.memory_model is not None:
                self.memory_model.end(*self.grids)
            overlapped_by = self.grids[0].name if self.grids[0].next_may_overlap_kernel_before else ""
            finished = self.races.finish(overlapped_by) if self.races is not None else None
            # With its threads it keeps the kernel's arguments alive, so that no new memory has their addresses.
            set_history(finished if len(self.grids) == 1 else None)
        except Exception as error:
            # Uninitialised memory may be the cause of other errors, but is often a consequence of a race.
            is_cause = self.unknown_use is not None and not isinstance(error, (AsyncRace, DataRace))
            if self.debugger is not None:
                self.debugger.failed(self.unknown_use if is_cause else error)  # while the threads still exist
            cause = self.unknown_use if is_cause else self._failed
            if isinstance(error, DataRace) and self._failed is not None:
                error.add_note(f"another thread failed, perhaps because of it: {self._failed}")
            elif (
                cause is not None and error is not cause
            ):  # such as a barrier at which the thread that failed is missing
                raise cause from None
            raise
        finally:
            self.races = None
            memory.watch(-self.watching)
            for t in self._threads():
                if not t.dead:
                    t.throw()
            for grid in self.grids:
                grid.free(shared_memory=not self.detects_races)  # a history has its addresses
            self.acquired_tensor_maps.clear()
            self.clock_readers.clear()
            if self.profile is not None:
                self.profile.stop()

    def _go_on_after(self, error):
        """Let the other threads go on after a thread's first error if data races are detected, and else raise it.

        A race comes before another error: a thread that reads an index before another one writes it may leave the
        bounds, and the detector sees the race only when that thread writes.
        """
        may_be_consequence = self.detects_races and not isinstance(error, DataRace) and self.debugger is None
        if not may_be_consequence or self._failed is not None:
            raise error
        self._failed, self._last_step = error, 2 * self.steps + _STEPS_AFTER_ERROR

    def _threads(self):
        return [t for grid in self.grids for t in grid.threads()]

    def _report(self, what):
        lines = [wait_report([t for t in grid.started_threads() if not t.dead]) for grid in self.grids]
        for grid in self.grids:
            lines += grid.unstarted_report()
            if grid.active and self.queued_grids.get(grid.rank):
                lines += [
                    f"  {queued} waits for the end of kernel {grid.name}" for queued in self.queued_grids[grid.rank]
                ]
        return f"deadlock: {what}\n" + "\n".join(filter(None, lines))

    def _is_deadlocked(self, idle):
        """Return whether all pollers are back in an earlier state although no memory has changed since.

        The states of those that read the clock are not compared: they may count their polls.
        Comparing states is slow, so a snapshot of the pollers is taken after 16 idle rounds, after 32, after 64 and so
        on, and compared with the state after each of the next rounds.
        """
        since = idle - (1 << idle.bit_length() >> 1)
        if idle < _IDLE_ROUNDS or since > _LONGEST_CYCLE:
            return idle > _IDLE_LIMIT
        snapshots = {t: snapshot(t.gr_frame) for t in self.pollers if t not in self.clock_readers}
        if since == 0:
            self.snapshots = snapshots
        return since > 0 and snapshots == self.snapshots
