"""Vector clocks: what a thread knows of the other threads' execution.

A thread's execution is divided into *epochs*, numbered from 1. An epoch ends where the thread publishes what it did,
for example at a barrier. An access happened before a point of another thread's execution if that thread knows of its
epoch.
"""

import functools

import numpy as np

_CHUNK_BITS = 9
_CHUNK = 1 << _CHUNK_BITS  # threads
NOBODY = -1  # the owner of a clock that is no thread's own


class VectorClock:
    """The last epoch of each thread that is known: `known` of all threads, but `epoch` of thread `owner`.

    It never changes. `known` is a tuple of arrays, each for 512 threads, which clocks share: thousands of threads that
    leave a barrier with the same knowledge need one tuple, and a barrier of a warp makes one new array.
    """

    __slots__ = ("known", "owner", "epoch")

    def __init__(self, known: tuple, owner: int, epoch: int):
        self.known, self.owner, self.epoch = known, owner, epoch

    def covers(self, thread: int, epoch: int) -> bool:
        """Return whether this epoch of a thread is known."""
        return epoch <= self.known[thread >> _CHUNK_BITS][thread & _CHUNK - 1] or (
            thread == self.owner and epoch <= self.epoch
        )


def initial(size: int) -> tuple:
    """Return the `known` of threads that know of no others, in a world of `size` threads."""
    return (memoryview(np.zeros(_CHUNK, np.int32)),) * (-(-size // _CHUNK))


def join(clocks) -> VectorClock:
    """Return the clock that knows everything that one of these clocks knows."""
    clocks = list(clocks)
    knowns = list({id(c.known): c.known for c in clocks}.values())
    chunks = list(knowns[0]) if len(knowns) == 1 else [_maximum(parts) for parts in zip(*knowns)]
    new = set()
    for c in clocks:
        if c.owner != NOBODY:
            chunk, i = c.owner >> _CHUNK_BITS, c.owner & _CHUNK - 1
            if chunks[chunk][i] < c.epoch:
                if chunk not in new:
                    chunks[chunk] = memoryview(np.array(chunks[chunk]))
                    new.add(chunk)
                chunks[chunk][i] = c.epoch
    return VectorClock(tuple(chunks), NOBODY, 0)


def _maximum(parts):
    """Return the maximum of chunks: one of them, if it is the maximum."""
    parts = list({id(part): part for part in parts}.values())
    if len(parts) == 1:
        return parts[0]
    result = memoryview(functools.reduce(np.maximum, parts))
    content = bytes(result)
    return next((part for part in parts if bytes(part) == content), result)


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
