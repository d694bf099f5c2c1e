"""mbarriers: they count the arrivals and the bytes of a phase, and let those go who wait for its end.

A barrier is opaque: where one lies, nobody else may read or write.
"""

import sys

from moe_numba.simulator.core import cluster, memory
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import BarrierMisuse, place
from moe_numba.simulator.core.shared import region
from moe_numba.simulator.memory_model import weak

_MOST = (1 << 20) - 1  # arrivals of a phase, or bytes that it waits for


class Barrier:
    """One mbarrier. `phase` counts the phases that have ended; the one that goes on now has that number."""

    remedy = "mbarrier_inval ends it"
    may_stay = generic = True

    def __init__(self, place_of, count, maker):
        self.region, self.count, self.thread, self.fenced = place_of, count, maker, False
        self.phase, self.pending, self.tx_bytes = 0, count, 0
        self.waiting = []
        self.copies, self.landed = {}, []  # the phase in which each copy was started that is to report here, or has
        # One object for each parity, so that who polls is seen to be where he was.
        self._waits = _Wait(self, 0), _Wait(self, 1)
        self.what, self.site = "an mbarrier", place(sys._getframe())
        self.claim = None

    @property
    def name(self):
        room = self.region.room
        return f"mbarrier {(self.region.start - room.start) // 8} of {room}"

    def state(self):
        return (
            f"its phase {self.phase} (parity {self.phase & 1}) waits for {self.pending} of {self.count} arrivals "
            f"and {self.tx_bytes} bytes"
        )

    def arrive(self, expected=0):
        """One arrival; before it, the phase is told of bytes to wait for."""
        if expected:
            self.expect(expected)
        if self.pending == 0:
            raise BarrierMisuse(
                f"{thread()} arrives at {self.name}, at {place(sys._getframe())}, but all {self.count} arrivals of its "
                f"phase {self.phase} have come; it waits for {self.tx_bytes} bytes"
            )
        if (views := weak.of(thread())) is not None:
            views.arrive(self, thread())
        self.pending -= 1
        self._note("mbarrier.arrive", bytes=expected)
        self._end_if_complete()

    def expect(self, tx_bytes):
        self.tx_bytes += tx_bytes
        if not 0 <= tx_bytes <= _MOST or self.tx_bytes > _MOST:
            raise BarrierMisuse(
                f"{thread()} lets {self.name} expect {tx_bytes} bytes, at {place(sys._getframe())}; "
                f"with {self.tx_bytes} in all, that is not between 0 and {_MOST}"
            )

    def await_copy(self, copy):
        """A copy that was started will report here."""
        self.copies[copy] = self.phase

    def complete(self, copy, size):
        """A copy has landed."""
        self.landed.append((self.copies.pop(copy), copy))
        self.tx_bytes -= size
        self._end_if_complete()

    def _end_if_complete(self):
        if self.pending:
            return
        if self.tx_bytes < 0:
            raise BarrierMisuse(
                f"{-self.tx_bytes} bytes more have landed than {self.name} was told to expect: "
                f"all {self.count} arrivals of its phase {self.phase} have come"
            )
        if self.tx_bytes:
            return
        early = next((copy for copy, phase in self.copies.items() if phase == self.phase), None)
        if early is not None:
            raise BarrierMisuse(
                f"phase {self.phase} of {self.name} ends, but {early}; its {early.size} bytes were not expected"
            )
        self.phase, self.pending = self.phase + 1, self.count
        grid = self.region.room.shared.block.grid
        grid.progress()
        waiting, self.waiting = self.waiting, []
        grid.world.wake(waiting)

    def ended(self, parity):
        """Whether the phase of this parity has ended: it is the one before the phase that goes on now."""
        if parity not in (0, 1):
            raise BarrierMisuse(f"{thread()} asks {self.name} for parity {parity}, which is neither 0 nor 1")
        if (self.phase & 1) == parity:
            return False
        if self.landed and self.landed[0][0] < self.phase:  # now somebody knows that they have
            for phase, copy in self.landed:
                if phase < self.phase:
                    copy.claim.release()
            self.landed = [(phase, copy) for phase, copy in self.landed if phase >= self.phase]
        if (views := weak.of(thread())) is not None:
            views.learn(self, thread())
        return True

    def poll(self, parity):
        thread().spin(self._waits[parity])

    def wait(self, parity):
        t = thread()
        while not self.ended(parity):
            self.waiting.append(t)
            t.park(self._waits[parity])
        self._note("mbarrier.wait", parity=int(parity))

    def _note(self, what, **details):
        t = thread()
        if t.grid.world.events is not None:
            t.note(what, {"barrier": self.name, "phase": self.phase, **details})

    def __str__(self):
        return f"{self.name} lies, which {self.thread} made at {self.site}"


class _Wait:
    """What a thread waits for, in words, as things stand when somebody asks."""

    def __init__(self, barrier, parity):
        self.barrier, self.parity = barrier, int(parity)

    def __str__(self):
        barrier = self.barrier
        late = "" if not barrier.copies else "; under way: " + ", ".join(str(c.what) for c in barrier.copies)
        return f"mbarrier.try_wait for parity {self.parity} of {barrier.name}: {barrier.state()}{late}"


def _region(barriers, index, what):
    if memory.attentive:
        memory.before(memory.NOWHERE, 0, writes=False)
    return region(barriers, index, 8, 8, what)


def init(barriers, index, count):
    """A new barrier."""
    t, here = thread(), _region(barriers, index, "mbarrier.init")
    known = here.room.shared.barriers
    if not 1 <= count <= _MOST:
        raise BarrierMisuse(f"{t} makes an mbarrier that takes {count} arrivals; it must be 1 to {_MOST}")
    if here.start in known:
        raise BarrierMisuse(f"{t} calls mbarrier_init, at {place(sys._getframe())}, where {known[here.start]}")
    barrier = known[here.start] = Barrier(here, count, t)
    barrier.claim = here.room.watched().claim(here.start, here.end, True, barrier)
    t.new_barriers = [*(t.new_barriers or ()), barrier]


def invalidate(barriers, index):
    """The end of a barrier."""
    barrier = find(barriers, index, what="mbarrier.inval")
    if barrier.waiting or barrier.copies:
        raise BarrierMisuse(f"{thread()} ends {barrier.name}, at {place(sys._getframe())}, but {barrier.state()}")
    barrier.claim.release()
    del barrier.region.room.shared.barriers[barrier.region.start]


def fence_init():
    """Let others see the barriers that this thread made."""
    t = thread()
    for barrier in t.new_barriers or ():
        barrier.fenced = True
    t.new_barriers = None


def find(barriers, index, rank=None, what="an mbarrier instruction", for_copy=False):
    """The barrier at an element of a shared array, or at the same place in the cluster's block `rank`."""
    here = _region(barriers, index, what)
    if rank is not None:
        cluster.remote(barriers, rank)  # looks whether that block can be reached at all
        here = here.twin(thread().block.cluster.blocks[rank])
    return at(here, for_copy)


def at(here, for_copy=False):
    """The barrier in a region of shared memory; a copy's bytes reach it as another thread's arrivals do."""
    t = thread()
    barrier = here.room.shared.barriers.get(here.start)
    if barrier is None:
        raise BarrierMisuse(
            f"{t} uses {here}, at {place(sys._getframe())}, as an mbarrier, which nobody has made there: "
            f"it needs mbarrier_init and a barrier of threads before it"
        )
    if not barrier.fenced and (barrier.thread is not t or for_copy):
        raise BarrierMisuse(
            f"{t} uses {barrier.name}, at {place(sys._getframe())}; {barrier.thread} made it at {barrier.site} "
            f"and has not called fence_mbarrier_init since"
        )
    return barrier
