"""wgmma: a warpgroup starts to multiply matrices in shared memory, and waits for the results later.

It is done when the scheduler's seed will have it, and claims its operands' memory until some warp has waited for its
group. A thread's results are `Pending` until they have been passed through that wait; until then nobody may read them.
"""

import sys

import numpy as np

from moe_numba.simulator.async_ import fragments
from moe_numba.simulator.async_.fragments import Fragment
from moe_numba.simulator.async_.tensor_map import swizzled_address
from moe_numba.simulator.core import floats, memory
from moe_numba.simulator.core.barrier import warpgroup
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import (
    AsyncRace,
    DivergentBarrier,
    Misaligned,
    MissingFence,
    SimulatorError,
    kernel_frame,
    place,
)
from moe_numba.simulator.core.shared import region
from moe_numba.simulator.core.warp import FULL, collective

_SWIZZLES = {1: 128, 2: 64, 3: 32}  # by the two highest bits of a descriptor
_STEP_BYTES = 32  # of k, for one instruction


class Wgmma:
    """One or more wgmmas along k that were started as one: something for the scheduler to run."""

    remedy = "wait for its group first, with make_wgmma_wait"
    may_stay = generic = False

    def __init__(self, what, first_thread):
        self.thread, self.what, self.site = first_thread, what, place(sys._getframe())
        self.claims, self.committed, self.done, self.waiting = [], False, False, []
        self.world = first_thread.grid.world

    def start(self):
        self.priority, self.queued = self.world.some_time(), True
        self.world.schedule(self)
        self.thread.note("wgmma", {"what": self.what, "event": "starts"})

    def step(self, rng):
        self.done = True
        self.thread.note("wgmma", {"what": self.what, "event": "is done"})
        waiting, self.waiting = self.waiting, []
        self.world.wake(waiting)

    def wait(self):
        while not self.done:
            self.waiting.append(thread())
            thread().park(self)
        for claim in self.claims:
            claim.release()
        self.claims = []

    def __str__(self):
        return f"{self.what}, which {self.thread} and its warpgroup started at {self.site}, may be under way"


class Pending:
    """The accumulators of a thread that a wgmma is working on: they may go to another one, or to the wait for it."""

    def __init__(self, by, values):
        self.by, self.values = by, values

    def _refuse(self, *_):
        by = self.by
        why = "" if by.committed else ", which was not committed to a group,"
        raise AsyncRace(
            f"{thread()} reads accumulators at {place(sys._getframe())}, but {by.what}{why} started at {by.site} may "
            f"not be done with them: pass them through make_wgmma_wait first"
        )

    __getitem__ = __iter__ = __len__ = __add__ = __array__ = _refuse


class Queue:
    """What a warp has started: wgmmas not yet in a group, and groups, oldest first; and whether it has fenced."""

    def __init__(self):
        self.open, self.groups, self.fenced = [], [], False

    def left(self):
        """What nobody has waited for."""
        return [by for group in (*self.groups, self.open) for by in group]


def _queue(warp):
    if warp.wgmma is None:
        warp.wgmma = Queue()
    return warp.wgmma


def _mine():
    t = thread()
    return _queue(t.block.warps[t.warp])


def address(array, at):
    """The bits of a descriptor that say where a tile starts."""
    here = region(array, at, 16, 16, "a wgmma descriptor")
    return (here.start & 0x3FFFF) >> 4


def fence():
    """What a warp did to its accumulators comes before its next wgmma."""
    queue = _mine()

    def finish(lanes):
        queue.fenced = True
        return dict.fromkeys(lanes)

    collective("wgmma.fence", FULL, None, finish)


def commit():
    """What a warp has started since the last group is a group."""
    queue = _mine()

    def finish(lanes):
        _commit(queue)
        return dict.fromkeys(lanes)

    collective("wgmma.commit_group", FULL, None, finish)


def _commit(queue):
    for by in queue.open:
        by.committed = True
    queue.groups.append(queue.open)
    queue.open = []


def wait(pending, accumulators=None):
    """Wait until at most `pending` of a warp's newest groups are under way; gives the accumulators, to be read."""
    queue = _mine()

    def finish(lanes):
        done = queue.groups[: len(queue.groups) - pending]
        queue.groups, queue.fenced = queue.groups[len(done) :], False
        return dict.fromkeys(lanes, [by for group in done for by in group])

    for by in collective(f"wgmma.wait_group {pending}", FULL, None, finish):
        by.wait()
    if not isinstance(accumulators, Pending):
        return accumulators
    by = accumulators.by
    return accumulators if by in queue.left() else Fragment(accumulators.values, waited=True)


def multiply(n, dtype, a, b, accumulators, steps=1, fence=False, commit=False):
    """Start a wgmma of the whole warpgroup; gives each thread its accumulators, pending."""
    t = thread()
    if memory.attentive:
        memory.before(memory.NOWHERE, 0, writes=False)
    what = f"wgmma m64n{n} {dtype}"
    group = warpgroup(what)
    if isinstance(accumulators, tuple):
        accumulators = Fragment(np.array(accumulators, np.float32))
    if accumulators is not None and len(accumulators.values) != n // 2:
        raise SimulatorError(f"{t}: {what} takes {n // 2} accumulators, not {len(accumulators.values)}")
    frame = kernel_frame(sys._getframe())
    value = (frame.f_code, frame.f_lineno, a, b), accumulators
    finish = lambda values: _start(what, n, dtype, values, steps, fence, commit)
    return t.meet(group, what, group.size, value, finish)


def _start(what, n, dtype, values, steps, fence, commit):
    threads = sorted(values, key=lambda t: t.thread_id)
    (code, line, a, b), first = values[threads[0]]
    for t in threads:
        (its_code, its_line, *its), given = values[t]
        if (its_code, its_line) != (code, line):
            raise DivergentBarrier(f"{t} and {threads[0]} come to {what} at different lines: {its_line} and {line}")
        if its != [a, b]:
            raise SimulatorError(
                f"{t} and {threads[0]} bring different descriptors to {what}, at {code.co_name}:{line}"
            )
        if (given is None) != (first is None):
            raise SimulatorError(f"{t} and {threads[0]} bring different scale_d to {what}, at {code.co_name}:{line}")
    warps = [threads[i].block.warps[threads[i].warp] for i in range(0, 128, 32)]
    by = Wgmma(what, threads[0])
    untouched = isinstance(first, Pending) or isinstance(first, Fragment) and first.waited
    for warp in warps:
        if not (fence or untouched or _queue(warp).fenced):
            raise MissingFence(
                f"{by.thread} starts {what} at {by.site}, but {warp} has not called wgmma_fence since its registers "
                f"last were its own"
            )
    left = _operand(by, a, 64, dtype, steps, "A")
    right = _operand(by, b, n, dtype, steps, "B")
    # Eight rows at a time: BLAS would share larger products among threads, and wait for the ones that do not run.
    total = (left.reshape(8, 8, -1) @ right.T).reshape(64, n)
    if first is not None:
        total += fragments.gather([values[t][1].values for t in threads], n)
    results = fragments.scatter(total.astype(np.float32), n)
    by.start()
    for warp in warps:
        queue = _queue(warp)
        queue.open.append(by)
        if commit:
            _commit(queue)
    return {t: Pending(by, row) for t, row in zip(threads, results)}


def _operand(by, descriptor, rows, dtype, steps, name):
    """The matrix that a descriptor means: its numbers, and a claim on its memory."""
    swizzle = _SWIZZLES.get(descriptor >> 62)
    start, apart = (descriptor & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    what = f"operand {name} of {by.what} at {by.site}"
    if swizzle is None:
        raise SimulatorError(f"{by.thread}: {what} has a descriptor without a swizzle, which is not simulated")
    first, size = start % swizzle, steps * _STEP_BYTES
    if first + size > swizzle:
        raise SimulatorError(f"{by.thread}: {what} takes bytes {first} to {first + size} of rows of {swizzle} bytes")
    base = start - first
    shared = by.thread.block.shared
    here = shared.find(base, base + 1, what)
    if base % (8 * swizzle) or here.room.alignment < 8 * swizzle:
        raise Misaligned(
            f"{by.thread}: {what} starts at byte {base - here.room.start} of {here.room}, which is aligned to "
            f"{here.room.alignment}; it must be at a multiple of {8 * swizzle} bytes of what is aligned to as many"
        )
    here = shared.find(base, base + (rows // 8 - 1) * apart + 8 * swizzle, what)
    by.claims.append(here.room.watched().claim(here.start, here.end, False, by))
    row, byte = np.arange(rows)[:, None], first + np.arange(size)[None, :]
    at = swizzled_address(base + row // 8 * apart + row % 8 * swizzle + byte, swizzle) - base
    return floats.decode(here.bytes[at], dtype)
