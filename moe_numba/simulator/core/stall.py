"""Detection of threads that wait again and again for ever, as in `while flag[0] == 0: cuda.syncthreads()`.

The scheduler never runs out of work, but neither the threads' variables nor any memory change. So a World asks now and
then whether it has stalled, and the states of its threads are compared at several moments. A loop that makes progress
counts, in a variable or in memory; threads that read the clock may time out.

A loop that never waits, loads or stores, such as `while x > 0: pass`, gives no occasion to look. `compilable` finds
those on `while True`; the debugger stops at the others on Ctrl-C.
"""

import zlib

import numpy as np

from moe_numba.simulator.core.errors import kernel_frame
from moe_numba.simulator.core.memory import LocalArray
from moe_numba.simulator.core.polling import snapshot
from moe_numba.simulator.core.reachable import bytes_at, intervals

FIRST_CHECK = 1 << 12  # steps of the scheduler without an atomic, a strong store or a thread's end
_SAMPLES = 8  # states of a thread; as many again must repeat them. Twice as many at each further attempt
_PROBES = 2  # threads that are compared first, since states are expensive


class Stall:
    """The states of a World's threads at some moments."""

    def __init__(self, world):
        self.world, self.next_step, self._interval, self._count = world, FIRST_CHECK, FIRST_CHECK, _SAMPLES
        self._changes = self._samples = self._clock_reads = None

    def is_certain(self) -> bool:
        """Sample the threads; return whether they make no progress. Call it from step `next_step` on."""
        world = self.world
        self.next_step = world.steps + self._interval
        has_read_clock = self._samples is not None and world.clock_reads != self._clock_reads
        if world.changes != self._changes or has_read_clock:
            self._changes, self._samples = world.changes, None
            return False
        if self._samples is None:
            self._start(_PROBES)
        self._samples.append([_state(t) for t in self._threads])
        if len(self._samples) == 2 * self._count:
            if not self._repeats():
                self._interval, self._count = 2 * self._interval, 2 * self._count
                self._changes = self._samples = None
                return False
            if self._memory is not None:
                return True
            self._start(None)
        warps = len({t.block.warps[t.warp] for grid in world.grids for t in grid.started_threads() if not t.dead})
        self.next_step = world.steps + 4 * warps + 1
        return False

    def _start(self, most):
        """Start to sample the first threads; None: all of them, and memory."""
        living = [t for grid in self.world.grids for t in grid.started_threads() if t.gr_frame is not None]
        self._threads, self._memory = living[:most], self._checksums() if most is None else None
        self._samples, self._clock_reads = [], self.world.clock_reads

    def _repeats(self):
        """Return whether no thread has come to a new state, and memory is what it was."""
        first, more = zip(*self._samples[: self._count]), zip(*self._samples[self._count :])
        repeats = all(state in earlier for earlier, later in zip(first, more) for state in later)
        return repeats and (self._memory is None or self._memory == self._checksums())

    def _checksums(self):
        """Return checksums of the memory that the threads can reach; delayed stores count as changes anyway."""
        grids = self.world.grids
        arrays = [bytes_at(start, end - start) for start, end in sorted(set(intervals(grids))) if start < end]
        arrays += [a.bytes for grid in grids for block in grid.blocks for a in block.shared.allocations.values()]
        return [zlib.crc32(np.ascontiguousarray(array)) for array in arrays]


def _state(t):
    """Return where a thread is and its variables, with the elements of its local arrays."""
    if t.gr_frame is None:
        return None
    frame, arrays = kernel_frame(t.gr_frame), []
    frames = snapshot(frame)
    while frame is not None:
        arrays += [array.tobytes() for array in _local_arrays(frame.f_locals.values())]
        frame = frame.f_back
    return frames, arrays


def _local_arrays(values):
    """Yield the local arrays among variables, also those in tuples."""
    for value in values:
        if type(value) is LocalArray:
            yield value.array
        elif isinstance(value, tuple):
            yield from _local_arrays(value)
