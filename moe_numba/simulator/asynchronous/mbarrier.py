"""mbarriers: barriers in shared memory that count the arrivals and the bytes of a phase.

An mbarrier is opaque: ordinary loads and stores must not touch its memory.
"""

import sys

import greenlet

from moe_numba.simulator.asynchronous import race_detector
from moe_numba.simulator.core import cluster, memory
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import BarrierMisuse, source_location
from moe_numba.simulator.core.shared import shared_region
from moe_numba.simulator.memory_model import store_buffer

_MAX_COUNT = (1 << 20) - 1  # of a phase's arrivals, and of its pending bytes
_EXPECT = "each phase must expect the bytes of all its copies, by mbarrier_arrive_expect_tx or mbarrier_expect_tx"


class MBarrier:
    """One mbarrier. `phases` counts the completed phases: the current phase has that number and bit `phases & 1`.

    It owns a race detector's Reservation of its 8 bytes (see `race_detector.Reservation` for its class attributes).
    """

    remedy = "mbarrier_inval ends it"
    may_outlive_block = generic_proxy = True

    def __init__(self, region, count, initialiser):
        self.region, self.count, self.thread, self.fenced = region, count, initialiser, False
        self.phases, self.pending_arrivals, self.pending_bytes = 0, count, 0
        self.expected_bytes = self.expected_before = 0  # in the current phase, and in the one before
        self.waiting = []
        self.pending_copies, self.completed_copies = {}, []  # copy -> phase in which it was issued; (phase, copy)
        self.last_copies = []  # those of the phase that completed last
        # One object per phase bit, so that a polling thread's state compares equal in the deadlock detection.
        self._wait_conditions = _WaitCondition(self, 0), _WaitCondition(self, 1)
        self.what, self.site = "an mbarrier", source_location(sys._getframe())
        self.reservation = None

    @property
    def name(self):
        allocation = self.region.allocation
        return f"mbarrier {(self.region.start - allocation.start) // 8} of {allocation}"

    def state(self):
        return (
            f"its phase {self.phases} (phase bit {self.phases & 1}) waits for {self.pending_arrivals} of {self.count} "
            f"arrivals and {self.pending_bytes} bytes"
        )

    def arrive(self, expected_bytes=0):
        """Count one arrival, after adding `expected_bytes` to the pending bytes of the phase."""
        if expected_bytes:
            self.expect(expected_bytes)
        if self.pending_arrivals == 0:
            raise BarrierMisuse(
                f"{thread()} arrives at {self.name}, at {source_location(sys._getframe())}, but its phase "
                f"{self.phases} already has all {self.count} arrivals; it waits for {self.pending_bytes} bytes"
            )
        store_buffer.publish_to(self, thread())
        if (races := thread().grid.world.races) is not None:
            races.arrive(self, self.phases, thread(), "cluster")
        self.pending_arrivals -= 1
        self._record_event("mbarrier.arrive", bytes=expected_bytes)
        self._complete_phase_if_done()

    def expect(self, tx_bytes):
        """Add to the bytes that the phase waits for."""
        self.pending_bytes += tx_bytes
        self.expected_bytes += tx_bytes
        if not 0 <= tx_bytes <= _MAX_COUNT or self.pending_bytes > _MAX_COUNT:
            raise BarrierMisuse(
                f"{thread()} makes {self.name} expect {tx_bytes} bytes, at {source_location(sys._getframe())}; "
                f"with {self.pending_bytes} in all, that is not between 0 and {_MAX_COUNT}"
            )

    def attach_copy(self, copy):
        """Register a copy that was issued and will report its bytes to this barrier."""
        self.pending_copies[copy] = self.phases

    def remedy_of_copy(self):
        """Return what a thread must do that uses the memory of a copy in flight, which reports to this barrier."""
        if self.phases and not self.expected_before and not self.expected_bytes:
            return (
                f"phase {self.phases - 1} of its mbarrier completed with 0 expected bytes, so waiting for it does not "
                f"wait for the copy; {_EXPECT}"
            )
        return "wait for its mbarrier first"

    def complete_copy(self, copy, size):
        """Subtract the bytes of a copy that has completed."""
        self.completed_copies.append((self.pending_copies.pop(copy), copy))
        self.pending_bytes -= size
        self._complete_phase_if_done()

    def _complete_phase_if_done(self):
        if self.pending_arrivals:
            return
        if self.pending_bytes < 0:
            raise BarrierMisuse(
                f"{-self.pending_bytes} bytes more have been copied than {self.name} was told to expect: "
                f"its phase {self.phases} has all {self.count} arrivals; {_EXPECT}"
            )
        if self.pending_bytes:
            return
        early = next((copy for copy, phase in self.pending_copies.items() if phase == self.phases), None)
        if early is not None:
            raise BarrierMisuse(
                f"phase {self.phases} of {self.name} completes, but {early}; its {early.size} bytes were not expected; "
                f"{_EXPECT}"
            )
        self.last_copies = [copy for phase, copy in self.completed_copies if phase == self.phases]
        self.phases, self.pending_arrivals = self.phases + 1, self.count
        self.expected_before, self.expected_bytes = self.expected_bytes, 0
        grid = self.region.allocation.shared.block.grid
        grid.memory_changed()
        waiting, self.waiting = self.waiting, []
        grid.world.wake(waiting)

    def test(self, phase):
        """Return whether the phase with this phase bit has completed: the one before the current phase."""
        if phase not in (0, 1):
            raise BarrierMisuse(f"{thread()} waits at {self.name} for phase bit {phase}, which is neither 0 nor 1")
        if (self.phases & 1) == phase:
            return False
        if (
            self.completed_copies and self.completed_copies[0][0] < self.phases
        ):  # now a thread knows of their completion
            for issued_in, copy in self.completed_copies:
                if issued_in < self.phases:
                    copy.reservation.release()
            self.completed_copies = [entry for entry in self.completed_copies if entry[0] >= self.phases]
        store_buffer.receive_from(self, thread())
        if (races := thread().grid.world.races) is not None:
            races.wait(self, self.phases - 1, thread(), "cluster")
            for copy in self.last_copies:
                copy.know(races, thread())
        return True

    def poll(self, phase):
        greenlet.getcurrent().spin(self._wait_conditions[phase])

    def wait(self, phase):
        waiter = greenlet.getcurrent()  # a thread, or a gang of the vector engine
        since = thread().grid.world.steps
        while not self.test(phase):
            self.waiting.append(waiter)
            waiter.park(self._wait_conditions[phase])
        self._record_event("mbarrier.wait", phase_bit=int(phase), since=since)

    def _record_event(self, what, **details):
        t = thread()
        if t.grid.world.events is not None:
            t.record_event(what, {"barrier": self.name, "phase": self.phases, **details})

    def __str__(self):
        return f"{self.name} lies, which {self.thread} initialised at {self.site}"


class _WaitCondition:
    """What a thread waits for; formatted only when an error message needs it."""

    def __init__(self, barrier, phase):
        self.barrier, self.phase = barrier, phase

    def __str__(self):
        barrier = self.barrier
        copies = ", ".join(str(copy.what) for copy in barrier.pending_copies)
        late = f"; in flight: {copies}" if copies else ""
        return f"mbarrier.try_wait for phase bit {self.phase} of {barrier.name}: {barrier.state()}{late}"


def _region(barriers, index, what):
    if memory.watching:
        memory.maybe_preempt()
    return shared_region(barriers, index, 8, 8, what)


def init(barriers, index, count):
    """Initialise an mbarrier whose phases take `count` arrivals."""
    t, region = thread(), _region(barriers, index, "mbarrier.init")
    known = region.allocation.shared.barriers
    if not 1 <= count <= _MAX_COUNT:
        raise BarrierMisuse(f"{t} initialises an mbarrier with {count} arrivals; it must be 1 to {_MAX_COUNT}")
    if region.start in known:
        raise BarrierMisuse(
            f"{t} calls mbarrier_init, at {source_location(sys._getframe())}, where {known[region.start]}"
        )
    barrier = known[region.start] = MBarrier(region, count, t)
    barrier.reservation = region.allocation.race_detector().reserve(region.start, region.end, True, barrier)
    t.unfenced_barriers = [*(t.unfenced_barriers or ()), barrier]


def invalidate(barriers, index):
    """Invalidate an mbarrier, so that its memory may be reused."""
    barrier = find(barriers, index, what="mbarrier.inval")
    if barrier.waiting or barrier.pending_copies:
        raise BarrierMisuse(
            f"{thread()} invalidates {barrier.name}, at {source_location(sys._getframe())}, but {barrier.state()}"
        )
    barrier.reservation.release()
    del barrier.region.allocation.shared.barriers[barrier.region.start]


def fence_init():
    """Execute `fence.mbarrier_init` for the mbarriers that this thread initialised."""
    race_detector.fence_barriers(thread())


def find(barriers, index, rank=None, what="an mbarrier instruction", for_copy=False):
    """Return the mbarrier at an element of a shared array, or at its counterpart in block `rank` of the cluster.

    A barrier needs a fence before other threads, or the bytes of a copy (`for_copy`), may arrive at it.
    """
    region = _region(barriers, index, what)
    t = thread()
    if rank is not None:
        cluster.remote(barriers, rank)  # checks that the block may be accessed
        region = region.in_block(t.block.cluster.blocks[rank])
    barrier = region.allocation.shared.barriers.get(region.start)
    site = source_location(sys._getframe())
    if barrier is None:
        raise BarrierMisuse(
            f"{t} uses {region}, at {site}, as an mbarrier, but no thread has initialised one there: "
            f"it needs mbarrier_init and a barrier of threads before it"
        )
    if not barrier.fenced and (barrier.thread is not t or for_copy):
        raise BarrierMisuse(
            f"{t} uses {barrier.name}, at {site}; {barrier.thread} initialised it at {barrier.site} "
            f"and has not called fence_mbarrier_init since"
        )
    return barrier
