"""Vector clocks: what a thread knows of the other threads' execution.

A thread's execution is divided into *epochs*, numbered from 1. An epoch ends where the thread publishes what it did,
for example at a barrier. An access happened before a point of another thread's execution if that thread knows of its
epoch.
"""

import numpy as np


class VectorClock:
    """The last epoch of each thread that is known: `known[i]` of thread `i`, but `epoch` of thread `owner`.

    It never changes. Clocks share the array behind `known`, so that thousands of threads that leave a barrier with the
    same knowledge need one array.
    """

    __slots__ = ("known", "owner", "epoch")

    def __init__(self, known: memoryview, owner: int, epoch: int):
        self.known, self.owner, self.epoch = known, owner, epoch

    def covers(self, thread: int, epoch: int) -> bool:
        """Return whether this epoch of a thread is known."""
        return epoch <= self.known[thread] or (thread == self.owner and epoch <= self.epoch)


NOBODY = -1  # the owner of a clock that is no thread's own


def initial(size: int) -> memoryview:
    """Return the `known` of threads that know of no others, in a world of `size` threads."""
    return memoryview(np.zeros(size, np.int32))


def join(clocks) -> VectorClock:
    """Return the clock that knows everything that one of these clocks knows."""
    clocks = list(clocks)
    arrays = list({id(c.known): c.known for c in clocks}.values())
    known = np.array(arrays[0]) if len(arrays) == 1 else np.maximum.reduce([np.asarray(a) for a in arrays])
    owners = [c.owner for c in clocks if c.owner != NOBODY]
    np.maximum.at(known, owners, [c.epoch for c in clocks if c.owner != NOBODY])
    return VectorClock(memoryview(known), NOBODY, 0)


class Merger:
    """Adds the knowledge of one clock to those of many threads; threads with the same `known` share the result."""

    __slots__ = ("clock", "merged")

    def __init__(self, clock: VectorClock):
        self.clock, self.merged = clock, {}

    def add_to(self, clock: VectorClock) -> VectorClock:
        """Return a clock that also knows what this one knows, with the same owner and epoch."""
        entry = self.merged.get(id(clock.known))
        if entry is None:
            both = join((self.clock, VectorClock(clock.known, NOBODY, 0)))
            entry = self.merged[id(clock.known)] = clock.known, both.known  # the first keeps the id in use
        return VectorClock(entry[1], clock.owner, clock.epoch)
