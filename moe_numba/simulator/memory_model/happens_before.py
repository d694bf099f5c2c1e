"""Data races of threads, found by happens-before, in every memory space.

Two accesses to the same byte race if one of them writes, neither happened before the other, and they are not both
strong (atomic, volatile, acquire or release, in a scope that includes both threads). One run under one seed shows the
race, whichever access came first and whatever values they saw. Accesses are ordered only by what the PTX ISA orders:

- program order of a thread, and the start and end of kernels of one rank,
- `syncthreads`, named barriers, `syncwarp`, the cluster barrier and the barrier of a grid,
- a release that a thread acquires: `st.release` or a fence and a relaxed store, then `ld.acquire` or a relaxed load and
  a fence, or an mbarrier; the scopes of both must include both threads,
- the completion of an asynchronous operation, for the threads that waited for its mbarrier or its group.

Shuffles, votes, other collectives and polls order nothing. An asynchronous copy of global memory also needs a proxy
fence between what other threads did to these bytes and the copy: ``fenced`` is what a thread knew at its last one.

Arrivals at an mbarrier and waits for it count as of cluster scope, whatever their scope: with a narrower one, which
kernels use for stages of a pipeline, only writes to global memory would not be ordered.

Plain stores of one and the same value, by several threads to one element, do not race with one another: whichever comes
last, memory holds that value. They do race with loads, also where the value was there before. So the verdict is the
same in every order of the threads.
"""

import sys
from typing import NamedTuple

import numpy as np

from moe_numba.simulator.core.errors import kernel_frame, plain_index
from moe_numba.simulator.core.memory import convert
from moe_numba.simulator.memory_model import race_report
from moe_numba.simulator.memory_model.shadow_memory import ShadowMemory
from moe_numba.simulator.memory_model.vector_clock import NOBODY, Merger, VectorClock, initial, join

_ORDERING = ("syncthreads", "barrier ", "syncwarp", "grid sync")  # rendezvous that order memory


class Access(NamedTuple):
    """What shadow memory refers to: accesses of one thread, in one epoch, by one instruction."""

    thread: object
    number: int  # of the thread
    epoch: int
    writes: bool
    scope: str | None  # of a strong access
    operation: "AsyncOperation | None"
    code: object
    instruction: int
    plain: bool = False  # a store of one element that is known to have stored what memory holds since


class AsyncOperation:
    """A part of an asynchronous copy, or a wgmma: it reads, or it writes, until a thread knows that it is complete."""

    __slots__ = ("what", "remedy", "known_from")

    def __init__(self, what, remedy):
        self.what, self.remedy = what, remedy
        self.known_from = {}  # number of a thread that has waited for it -> its epoch then

    def known_to(self, clock):
        """Return whether a thread with this clock knows that the operation is complete."""
        if clock.owner in self.known_from:
            return True
        return any(clock.covers(thread, epoch) for thread, epoch in self.known_from.items())


class Release(NamedTuple):
    """What a thread published: everything that it did or knew before."""

    thread: object
    scope: str
    clock: VectorClock
    fenced: VectorClock


class ThreadState:
    """A thread's clocks, and what its fences and relaxed accesses have prepared."""

    __slots__ = ("thread", "number", "clock", "fenced", "accesses", "fence", "observed", "acquired", "prerequisite")

    def __init__(self, thread, number, known, prerequisite=None):
        self.thread, self.number = thread, number
        self.clock, self.fenced = VectorClock(known, number, 1), VectorClock(known, number, 0)
        self.accesses = {}  # of this epoch: (code, instruction, writes, scope) -> number
        self.fence = None  # the Release of the last fence, which later relaxed stores publish
        self.observed = []  # releases that relaxed loads have read, which the next fence acquires
        self.acquired = None  # the last Release that was acquired: acquiring it again adds nothing
        self.prerequisite = prerequisite  # what `griddepcontrol.wait` lets this thread know

    def next_epoch(self):
        self.clock = VectorClock(self.clock.known, self.number, self.clock.epoch + 1)
        self.accesses = {}

    def learn(self, clock_merger, fenced_merger):
        """Add what others knew when they published it."""
        self.clock, self.fenced = clock_merger.add_to(self.clock), fenced_merger.add_to(self.fenced)


class _Phase:
    """What was published to one phase of a barrier."""

    __slots__ = ("releases", "mergers")

    def __init__(self):
        self.releases, self.mergers = [], {}  # mergers: (block, scope) -> for the clocks and for `fenced`, or None


def includes(scope, a, b):
    """Return whether a scope, seen from thread `a`, includes thread `b`."""
    if scope == "sys" or a.block is b.block:
        return True
    return a.grid.rank == b.grid.rank if scope == "gpu" else scope == "cluster" and a.block.cluster is b.block.cluster


def _mergers(releases):
    """Return what adds the clocks of these releases to others, and what adds their `fenced`."""
    return Merger(join(r.clock for r in releases)), Merger(join(r.fenced for r in releases))


def _changes_nothing(target, index, value):
    """Return whether a store of a value to an element stores what memory holds."""
    there = np.asarray(target.array[index])
    if isinstance(value, (bool, int, float, np.generic)):
        value = convert(value, there.dtype)
    return there.tobytes() == np.asarray(getattr(value, "array", value)).astype(there.dtype, copy=False).tobytes()


class History(NamedTuple):
    """The last accesses of a kernel that has completed, and of those before that the next one may overlap, too."""

    shadow: ShadowMemory
    accesses: list


class HappensBefore:
    """The clocks of a world's threads, and the shadow of all memory that they access."""

    def __init__(self, size, previous=None):
        """`previous`: the History of the kernel before, if the first grid may overlap it (a dependent launch)."""
        self.states, self.shadow, self.accesses = {}, ShadowMemory(), [None]
        self.thread_of = [NOBODY]  # of each access that is a thread's own, its thread's number
        # Of cells that several threads read, or stored one value to: {(number of the thread, scope): access}
        self.sets = [None]
        self.cell_of_set = {}  # number of a set of stores -> the one cell that has it
        self.released = {}  # address -> releases that a load of the value there acquires
        self.phases = {}  # (barrier, phase) -> _Phase
        self.nothing = initial(size + 1)  # thread 0 stands for all threads of the kernel before
        self.completed = {}  # rank -> what is known when its last kernel has completed, and was when it started
        if previous is not None:
            self._follow(previous)

    # Kernels

    def _follow(self, previous):
        """Start with the last accesses of the kernel before, as those of one thread."""
        self.shadow, self.accesses = previous.shadow, previous.accesses
        self.thread_of = [NOBODY] + [0] * (len(self.accesses) - 1)
        self.completed[None] = join([VectorClock(self.nothing, 0, 1)]).known, self.nothing

    def finish(self, overlapped_by=""):
        """Return what a kernel that overlaps the end of this one may race with, and free the rest.

        That is a shadow of the accesses of this kernel alone; or also of those before it if that may overlap them, as
        this kernel, whose name is then ``overlapped_by``, did.
        """
        is_kept = lambda n: overlapped_by or self.thread_of[n] != 0
        of_sets = [next((n for n in s.values() if is_kept(n)), 0) if s else 0 for s in self.sets]
        of_sets = np.array(of_sets, np.int32)
        used = [n for n in self.shadow.numbers(of_sets) if n and is_kept(n)]
        renumbered = np.zeros(len(self.accesses), np.int32)
        renumbered[used] = np.arange(1, len(used) + 1)
        accesses = [None, *(self.accesses[n]._replace(number=0, epoch=1, operation=None) for n in used)]
        for n in used:
            if self.thread_of[n] == 0:
                self.accesses[n].thread.grid.overlapped_by = overlapped_by
        history = History(self.shadow.renumbered(renumbered, of_sets), accesses)
        for t in self.states:  # which refer to one another in cycles
            t.race_state = None
        self.__dict__.clear()
        return history

    def start(self, grid):
        """Number the threads of a grid, which starts now."""
        known, before = self.completed.get(grid.rank, (self.nothing, self.nothing))
        prerequisite = None
        if grid.dependent:
            known, prerequisite = before, known
        for t in grid.threads():
            t.race_state = self.states[t] = ThreadState(t, len(self.states) + 1, known, prerequisite)

    def end(self, grid):
        """Let the next kernel of this rank know what this grid did."""
        before = self.completed.get(grid.rank, (self.nothing, None))[0]
        self.completed[grid.rank] = join(self.states[t].clock for t in grid.threads()).known, before

    def wait_for_prerequisite(self, thread):
        """Execute `griddepcontrol.wait`: the kernel before has completed."""
        state = thread.race_state
        if state.prerequisite is not None:
            merger = Merger(VectorClock(state.prerequisite, NOBODY, 0))
            state.learn(merger, merger)
            state.prerequisite = None

    # Accesses

    def access(self, thread, address, size, writes, scope, target, index, value=None):
        """Check a thread's access to an element of an array or a pointer; `value` is what a plain store stores."""
        state, element = thread.race_state, (target, index, value)
        frame = kernel_frame(sys._getframe(2))
        plain = writes and scope is None and value is not None
        number = state.accesses.get((id(frame.f_code), frame.f_lasti, writes, scope, plain))
        if number is None:
            number = self._number(state, writes, scope, None, frame, plain)
        clock, thread_of, this = state.clock, self.thread_of, state.number
        for page, first, stop in self.shadow.cells(address, size):
            for cell in range(first, stop):
                earlier, reads = page.writes[cell], page.reads[cell]
                if writes:
                    if reads:
                        if reads < 0 or thread_of[reads] != this:
                            for read in self._members(reads):
                                self._check(read, number, clock, element)
                        page.reads[cell] = 0
                    page.writes[cell] = number
                    if earlier:
                        page.writes[cell] = self._add_store(earlier, number, state, element, frame, (page, cell))
                    continue
                if earlier and (earlier < 0 or thread_of[earlier] != this):
                    for write in self._members(earlier):
                        self._check(write, number, clock, element)
                if reads != number:
                    page.reads[cell] = self._add_read(reads, number, clock)

    def issue(self, thread, operation, address, size, writes, where, is_global):
        """Check the accesses of an asynchronous operation that a thread issues."""
        state = thread.race_state
        number = self._number(state, writes, None, operation, kernel_frame(sys._getframe(1)))
        for page, cells in self.shadow.distinct(address, size):
            for cell in cells:
                earlier = [*self._members(page.writes[cell]), *(self._members(page.reads[cell]) if writes else ())]
                for each in filter(None, earlier):
                    self._check(each, number, state.clock, where)
                    if is_global:
                        self._check_proxy(each, number, state, where)
        for page, first, stop in self.shadow.cells(address, size):
            for cell in range(first, stop):
                if writes:
                    page.writes[cell], page.reads[cell] = number, 0
                else:
                    page.reads[cell] = self._add_read(page.reads[cell], number, state.clock)

    def know(self, thread, operation):
        """Record that a thread has waited for an asynchronous operation."""
        state = thread.race_state
        operation.known_from.setdefault(state.number, state.clock.epoch)

    def _number(self, state, writes, scope, operation, frame, plain=False):
        """Return the number of the access that a frame of the kernel makes."""
        code, instruction = frame.f_code, frame.f_lasti
        key = id(code), instruction, writes, scope if operation is None else operation, plain
        number = state.accesses.get(key)
        if number is None:
            number = state.accesses[key] = len(self.accesses)
            epoch = state.clock.epoch
            access = Access(state.thread, state.number, epoch, writes, scope, operation, code, instruction, plain)
            self.accesses.append(access)
            self.thread_of.append(state.number if operation is None else NOBODY)
        return number

    def _members(self, entry):
        """Return the accesses of an entry of a cell: one, or those of a set."""
        return (entry,) if entry >= 0 else self.sets[-entry].values()

    def _add_store(self, earlier, number, state, element, frame, cell):
        """Return the entry of a cell that was written by `earlier`, and now by access `number`, too."""
        clock = state.clock
        if earlier > 0 and self.thread_of[earlier] == state.number and self.accesses[earlier].epoch != clock.epoch:
            return number
        members = self._members(earlier)
        accesses = [self.accesses[n] for n in members]
        own = any(a.number == state.number and a.operation is None and a.epoch == clock.epoch for a in accesses)
        others = [a for a in accesses if a.number != state.number or a.operation is not None]
        if not own and not others:
            return number
        plain = self.accesses[number].plain and all(a.plain for a in accesses) and _changes_nothing(*element)
        if not plain:
            for n in members:
                if self.accesses[n] in others:
                    self._check(n, number, clock, element)
            # Of a thread that has stored several values since it last waited, another thread stores a different one.
            access = self.accesses[number]
            return self._number(state, True, access.scope, None, frame) if own and access.plain else number
        if all(clock.covers(a.number, a.epoch) for a in others):
            return number
        if self.cell_of_set.get(-earlier) != cell:
            self.sets.append({self._accessor(n): n for n in members})
            earlier = 1 - len(self.sets)
            self.cell_of_set[-earlier] = cell
        self.sets[-earlier][self._accessor(number)] = number
        return earlier

    def _add_read(self, reads, number, clock):
        """Return the entry of a cell that is now also read by access `number`."""
        if reads >= 0:
            if not reads or self.thread_of[reads] == self.thread_of[number] != NOBODY:
                return number if not reads or self.accesses[reads].scope == self.accesses[number].scope else reads
            if self._implies(reads, number, clock):
                return number
            self.sets.append({self._accessor(reads): reads})
            reads = 1 - len(self.sets)
        self.sets[-reads][self._accessor(number)] = number
        return reads

    def _accessor(self, number):
        access = self.accesses[number]
        return access.operation or access.number, access.scope

    def _implies(self, earlier, later, clock):
        """Return whether a write that does not race with the later of two reads does not race with the earlier."""
        a, b = self.accesses[earlier], self.accesses[later]
        return a.scope == b.scope and a.operation is b.operation is None and clock.covers(a.number, a.epoch)

    def _check(self, earlier, later, clock, where):
        """Raise if the later access, by a thread with this clock, races with the earlier one.

        `where` is the memory's name, or (array, index, value that is stored or None).
        """
        a = self.accesses[earlier]
        if a.operation is None:
            if clock.covers(a.number, a.epoch):
                return
        elif a.operation.known_to(clock):
            return
        b = self.accesses[later]
        if a.scope and b.scope and includes(a.scope, a.thread, b.thread) and includes(b.scope, b.thread, a.thread):
            return
        if a.operation is not None and a.operation is b.operation:
            return
        if type(where) is tuple:
            target, index, _ = where
            where = f"index {plain_index(index)} of {target}"
        raise race_report.data_race(a, b, where)

    def _check_proxy(self, earlier, later, state, where):
        """Raise if no proxy fence lies between an access of global memory and a later asynchronous copy."""
        a = self.accesses[earlier]
        if a.thread.block is state.thread.block and (a.operation is not None or not a.writes):
            return
        known = a.operation.known_to(state.fenced) if a.operation else state.fenced.covers(a.number, a.epoch)
        if not known:
            raise race_report.missing_proxy_fence(a, self.accesses[later], where)

    # Barriers of threads

    def depart(self, thread):
        """Publish what a thread knows at a barrier at which it does not wait."""
        return self._release(thread.race_state, "cta")

    def synchronize(self, rendezvous):
        """Order the accesses of the threads that met at a rendezvous, if it orders memory."""
        if rendezvous.what.startswith(_ORDERING):
            states = [t.race_state for t in rendezvous.ordered_threads() if t not in rendezvous.departed]
            releases = list(rendezvous.departed.values())
            clock = join([*(s.clock for s in states), *(r.clock for r in releases)])
            fenced = join([*(s.fenced for s in states), *(r.fenced for r in releases)])
            for s in states:
                s.clock, s.fenced = (
                    VectorClock(clock.known, s.number, s.clock.epoch),
                    VectorClock(fenced.known, s.number, s.fenced.epoch),
                )
                s.next_epoch()

    def arrive(self, barrier, phase, thread, scope):
        """Publish what a thread knows to a phase of an mbarrier or of a cluster's barrier."""
        key = barrier, phase
        if key not in self.phases:
            self.phases[key] = _Phase()
            self.phases.pop((barrier, phase - 2), None)  # no thread may still wait for it
        self.phases[key].releases.append(self._release(thread.race_state, scope))

    def wait(self, barrier, phase, thread, scope):
        """Acquire what was published to a completed phase. Threads whom the same releases reach share the result."""
        state, found = thread.race_state, self.phases.get((barrier, phase))
        if found is None:
            return
        key = thread.block, scope
        if key not in found.mergers:
            reaching = [r for r in found.releases if self._reaches(r, thread, scope)]
            found.mergers[key] = reaching and _mergers(reaching)
        if mergers := found.mergers[key]:
            state.learn(*mergers)

    # Releases, acquires and fences

    def _release(self, state, scope):
        released = Release(state.thread, scope, state.clock, state.fenced)
        state.next_epoch()
        return released

    @staticmethod
    def _reaches(release, thread, scope):
        return includes(release.scope, release.thread, thread) and includes(scope, thread, release.thread)

    def _acquire(self, state, releases, scope):
        reaching = [r for r in releases if r is not state.acquired and self._reaches(r, state.thread, scope)]
        if reaching:
            state.learn(*_mergers(reaching))
            state.acquired = reaching[-1]

    def stored(self, thread, address, scope, release=False, updates=False):
        """Record a strong store: with release semantics, or what the thread's last fence published.

        An atomic that `updates` a value continues the release sequence of the stores before it.
        """
        state = thread.race_state
        releases = list(self.released.get(address, ())) if updates else []
        if release:
            releases.append(self._release(state, scope))
        elif state.fence is not None:
            releases.append(state.fence)
        self.released[address] = releases

    def loaded(self, thread, address, scope, acquire=False):
        """Record a strong load of what was stored last: it acquires, or leaves that to the thread's next fence."""
        releases = self.released.get(address)
        if releases:
            state = thread.race_state
            if acquire:
                self._acquire(state, releases, scope)
            else:
                state.observed += [r for r in releases if r not in state.observed]

    def fence(self, thread, scope):
        """Acquire what relaxed loads observed, and publish what the thread knows through later relaxed stores."""
        state = thread.race_state
        self._acquire(state, state.observed, scope)
        state.observed = []
        state.fence = self._release(state, scope)

    def proxy_fence(self, thread):
        """Order what the thread knows before later asynchronous copies of global memory."""
        state = thread.race_state
        state.fenced = state.clock
        state.next_epoch()
