"""Weak memory: a store may reach other blocks late, and in any order, until the thread that made it releases it.

The model, in force within `weak_memory()`, for global memory:
- Memory holds what has been *published*. A thread's store waits in the view of its block: that block reads it at once,
  the other blocks and ranks do not. Atomics and copies that go on by themselves write to memory as they happen.
- A release (st.release, a fence, an atomic with release, a barrier of the cluster) publishes the thread's own stores
  and those it has learned of. Threads learn of one another's stores where they meet: at syncthreads, bar.sync,
  syncwarp, an mbarrier. So after a barrier one thread may release what all of them stored.
- When a store is published, another block may go on reading what was there before, until a thread of it acquires
  (ld.acquire, a fence, a barrier of the cluster). Relaxed and volatile loads, and atomics, read what is published.
- At any time the seed may publish a store, or end a block's reading of old bytes. Where all threads poll in vain it
  does, since on a GPU every store arrives in the end. The sync of a grid publishes everything; so does the end of a
  kernel, for the next one of its rank and for the host.

Loads are not reordered; that a load may come too early shows as old bytes. It is one view for all threads of a block,
so that an acquire of one of them serves all, with or without a barrier: that this barrier is missing is not found here.
Every scope is taken for the widest. Copies of boxes (`ptx.tma`) read what is published, and nothing older. Of the
fences in `ptx.fence` the proxy fences release; fence_acq_rel_* mean something only where they come from `ptx.atomics`.
"""

import numpy as np

from moe_numba.simulator.core.scheduler import _setting
from moe_numba.simulator.memory_model.weak_cells import argument

_STALE = 0.5  # the chance that a block goes on reading what a store has replaced
_REVEAL = 1 / 16  # the chance that a step of the scheduler publishes a store, or ends a reading of old bytes


def weak_memory():
    """Within this context stores to global memory are weak: see this module."""
    return _setting(weak=Weak)


class _Patch:
    """Bytes that a block sees otherwise than memory has them: what it stored itself, or what was there before."""

    __slots__ = ("view", "cell", "start", "end", "data", "own")

    def __init__(self, view, cell, start, data, own):
        self.view, self.cell, self.data, self.own = view, cell, data, own
        self.start, self.end = start, start + len(data)


class _View:
    """How a block sees global memory: patches, no two of which overlap."""

    def __init__(self):
        self.chunks, self.patches = {}, {}  # of 16 bytes each: number -> patches there; and all patches, in order

    def over(self, start, end):
        """The patches on some of these bytes."""
        if not self.patches:
            return ()
        near = (p for n in range(start >> 4, (end - 1 >> 4) + 1) for p in self.chunks.get(n, ()))
        return [p for p in dict.fromkeys(near) if p.start < end and start < p.end]

    def put(self, patch):
        self.patches[patch] = None
        for n in range(patch.start >> 4, (patch.end - 1 >> 4) + 1):
            self.chunks.setdefault(n, []).append(patch)

    def drop(self, patch):
        del self.patches[patch]
        for n in range(patch.start >> 4, (patch.end - 1 >> 4) + 1):
            self.chunks[n].remove(patch)


class Weak:
    """The views of all blocks of a world, and which stores each thread may publish."""

    def __init__(self, world):
        self.world, self.views = world, {}
        self.own, self.learned = {}, {}  # thread -> its stores since it last met others, and what it knew then
        self.handed = {}  # mbarrier -> what those who arrived there knew

    def start(self, grid):
        self.views |= {block: _View() for block in grid.blocks}
        grid.args = [argument(value) for value in grid.args]

    def end(self, *grids):
        """All that a kernel stored is there for those who wait for its end, on its stream or on the host."""
        blocks = [block for grid in grids for block in grid.blocks if block in self.views]
        self._publish_all(blocks)
        for block in blocks:
            del self.views[block]

    def read(self, block, cell, start):
        """The bytes that lie at address `start`, a view of which is `cell`, as a block sees them."""
        data = cell.copy()
        for p in self.views[block].over(start, start + len(data)):
            low, high = max(start, p.start), min(start + len(data), p.end)
            data[low - start : high - start] = p.data[low - p.start : high - p.start]
        return data

    def write(self, thread, cell, start, data):
        """Let a thread's block see new bytes, and nobody else."""
        self.settle(thread.block, start, start + len(data))
        view = self.views[thread.block]
        patch = _Patch(view, cell, start, data, own=True)
        view.put(patch)
        self.own.setdefault(thread, []).append(patch)
        return patch

    def settle(self, block, start, end):
        """A block sees these bytes as memory has them from now on, with what it stored there itself."""
        view = self.views[block]
        for p in view.over(start, end):
            self.publish((p,)) if p.own else view.drop(p)

    def refresh(self, block, start, end):
        """A block sees the newest of these bytes."""
        for p in self.views[block].over(start, end):
            if not p.own:
                p.view.drop(p)

    def copy(self, block, cell, start, data):
        """A copy that a block started writes to memory."""
        self.settle(block, start, start + len(data))
        self.replace(self.views[block], cell, start, data)

    def publish(self, patches):
        for p in patches:
            if p in p.view.patches:
                p.view.drop(p)
                self.replace(p.view, p.cell, p.start, p.data)

    def replace(self, writer, cell, start, data):
        """Change memory; blocks other than the writer's may keep the old bytes for a while."""
        if not np.array_equal(cell, data):
            for view in self.views.values():
                if view is not writer and self.world.rng.random() < _STALE and not view.over(start, start + len(data)):
                    view.put(_Patch(view, cell, start, cell.copy(), own=False))
            cell[:] = data
            self.world.progress += 1

    def release(self, thread):
        """Publish what a thread stored and what it knows of."""
        self.publish([*self.learned.pop(thread, ()), *self.own.pop(thread, ())])

    def acquire(self, block):
        """A block sees all that has been published."""
        for p in list(self.views[block].patches):
            if not p.own:
                p.view.drop(p)

    def meet(self, meeting):
        """Threads have met: those that waited know now what all who came knew."""
        if meeting.what == "grid sync":
            self._meet_all(meeting.scope)
        elif meeting.what.startswith(("syncthreads", "barrier ", "syncwarp")):
            known = self._known(meeting.values)
            for t in meeting.waiting:
                self.learned[t] = known
                self.own.pop(t, None)

    def _meet_all(self, grid):
        self._publish_all(grid.blocks)
        for block in grid.blocks:
            self.acquire(block)

    def _publish_all(self, blocks):
        """In any order: where two blocks stored to one place, it is open whose store is the last."""
        patches = [p for block in blocks for p in self.views[block].patches if p.own]
        self.world.rng.shuffle(patches)
        self.publish(patches)

    def _known(self, threads):
        """The stores that these threads know of and that are yet to be published, as one dict for all, in order."""
        heaps = {id(heap): heap for t in threads for heap in (self.learned.get(t), self.own.get(t)) if heap}
        return {p: None for heap in heaps.values() for p in heap if p in p.view.patches}

    def arrive(self, barrier, thread):
        """A thread hands what it knows to an mbarrier."""
        self.handed[barrier] = {p: None for p in self.handed.get(barrier, ()) if p in p.view.patches}
        self.handed[barrier] |= self._known((thread,))

    def learn(self, barrier, thread):
        """A thread has waited for an mbarrier."""
        if barrier in self.handed:
            self.learned[thread] = self._known((thread,)) | self.handed[barrier]
            self.own.pop(thread, None)

    def leak(self):
        """Now and then something comes to light by itself."""
        if self.world.rng.random() < _REVEAL:
            patches = [p for view in self.views.values() for p in view.patches]
            if patches:
                self._reveal((self.world.rng.choice(patches),))

    def reveal(self):
        """Half of what is hidden comes to light, in any order: all threads poll in vain, and some may wait for it."""
        patches = [p for view in self.views.values() for p in view.patches]
        self.world.rng.shuffle(patches)
        self._reveal(patches[: (len(patches) + 1) // 2])

    def _reveal(self, patches):
        for p in patches:
            if p.own:
                self.publish((p,))
            elif p in p.view.patches:
                p.view.drop(p)
                self.world.progress += 1


def of(thread):
    """The weak memory of a thread's world, or None."""
    return thread.grid.world.weak


def release(thread):
    if (weak := of(thread)) is not None:
        weak.release(thread)


def acquire(thread):
    if (weak := of(thread)) is not None:
        weak.acquire(thread.block)
