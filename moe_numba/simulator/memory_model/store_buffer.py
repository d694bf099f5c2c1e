"""Weak memory: a store may become visible to other blocks late, in any order, until its thread releases it.

The model of global memory within `weak_memory()`:
- Memory holds the *committed* stores. A thread's store is pending in its block's view: that block reads it at once,
  other blocks and ranks do not. Atomics and asynchronous copies write memory when they execute.
- A release (st.release, a fence, a proxy fence, an atomic with release, a cluster barrier) commits the thread's own
  stores and the stores it has observed. Threads observe one another's stores where they synchronise: syncthreads,
  bar.sync, syncwarp, an mbarrier. So one thread may release the stores of all threads after a barrier.
- When a store is committed, another block may still read the previous bytes, until one of its threads acquires
  (ld.acquire, a fence, a cluster barrier). Relaxed and volatile loads, and atomics, read committed memory.
- At any time the seeded scheduler may commit a store, or end a block's view of stale bytes. It does so when all threads
  poll in vain, since on a GPU every store becomes visible eventually. A grid-wide barrier commits everything, and so
  does the end of a kernel, for the next kernel of its rank and for the host.

Limits of the model: loads are not reordered; a load that executes too early shows as stale bytes. All threads of a
block share one view, so an acquire by one thread serves all of them with or without a barrier: that such a barrier is
missing is not detected. Every scope counts as the widest. TMA loads (`ptx.tma`) read committed memory, never stale
bytes.
"""

import contextlib

from moe_numba.simulator.core.settings import override_settings
from moe_numba.simulator.memory_model.weak_pointers import wrap_weak

_STALE = 0.5  # probability that another block keeps reading the bytes that a store has replaced
_VISIBLE = 1 / 16  # probability that a scheduler step commits a store or ends a view of stale bytes


def weak_memory() -> contextlib.AbstractContextManager:
    """Return a context in which stores to global memory are weak; see this module.

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def double(x):
    ...     i = cuda.grid(1)
    ...     x[i] *= 2
    >>> x = np.arange(64, dtype=np.float32)
    >>> with moe_numba.simulator.weak_memory():
    ...     double[2, 32](x)
    >>> x[:4].tolist()  # when a kernel ends, all of its stores are visible
    [0.0, 2.0, 4.0, 6.0]
    """
    return override_settings(weak_memory=True)


class _Overlay:
    """Bytes that a block sees differently from memory."""

    __slots__ = ("view", "cell", "start", "end", "data")

    def __init__(self, view, cell, start, data):
        self.view, self.cell, self.data = view, cell, data
        self.start, self.end = start, start + len(data)
        view.add(self)


class PendingStore(_Overlay):
    """A store of the block itself that is not committed yet."""

    __slots__ = ()


class StaleBytes(_Overlay):
    """Previous bytes that the block may still read after another block's store was committed."""

    __slots__ = ()


class _BlockView:
    """How a block sees global memory: overlays, no two of which overlap."""

    def __init__(self):
        self.by_chunk, self.overlays = {}, {}  # overlays by 16-byte chunk; and all of them, in insertion order

    def find(self, start, end):
        """Return the overlays that intersect these addresses."""
        if not self.overlays:
            return ()
        first, last = start >> 4, end - 1 >> 4
        if first == last:
            return [p for p in self.by_chunk.get(first, ()) if p.start < end and start < p.end]
        candidates = (p for chunk in range(first, last + 1) for p in self.by_chunk.get(chunk, ()))
        return [p for p in dict.fromkeys(candidates) if p.start < end and start < p.end]

    def add(self, overlay):
        self.overlays[overlay] = None
        for chunk in range(overlay.start >> 4, (overlay.end - 1 >> 4) + 1):
            self.by_chunk.setdefault(chunk, []).append(overlay)

    def remove(self, overlay):
        del self.overlays[overlay]
        for chunk in range(overlay.start >> 4, (overlay.end - 1 >> 4) + 1):
            self.by_chunk[chunk].remove(overlay)


class StoreBuffers:
    """The views of all blocks of a world, and the pending stores that each thread may release."""

    def __init__(self, world):
        self.world, self.views = world, {}
        self.own, self.observed = {}, {}  # thread -> its stores since it last synchronised; stores it had observed then
        self.published = {}  # mbarrier or flag -> stores observed by the threads that arrived there

    def start(self, grid):
        self.views |= {block: _BlockView() for block in grid.blocks}
        grid.args = [wrap_weak(value) for value in grid.args]

    def end(self, *grids):
        """Commit all stores of kernels that have ended."""
        blocks = [block for grid in grids for block in grid.blocks if block in self.views]
        self._commit_all(blocks)
        for block in blocks:
            del self.views[block]

    def read(self, block, cell, start):
        """Return the bytes at address `start`, whose memory `cell` is a view of, as a block sees them."""
        data = cell.copy()
        for p in self.views[block].find(start, start + len(data)):
            low, high = max(start, p.start), min(start + len(data), p.end)
            data[low - start : high - start] = p.data[low - p.start : high - p.start]
        return data

    def write(self, thread, cell, start, data):
        """Add a pending store to the view of the thread's block."""
        self.make_coherent(thread.block, start, start + len(data))
        store = PendingStore(self.views[thread.block], cell, start, data)
        self.own.setdefault(thread, []).append(store)
        return store

    def make_coherent(self, block, start, end):
        """Make a block's view of these bytes equal to memory, committing the block's own stores."""
        view = self.views[block]
        for p in view.find(start, end):
            self.commit((p,)) if isinstance(p, PendingStore) else view.remove(p)

    def drop_stale(self, block, start, end):
        """Drop a block's stale views of these bytes."""
        for p in self.views[block].find(start, end):
            if isinstance(p, StaleBytes):
                p.view.remove(p)

    def write_through(self, block, cell, start, data):
        """Write memory for an asynchronous copy that a block issued."""
        self.make_coherent(block, start, start + len(data))
        self._write_memory(self.views[block], cell, start, data)

    def commit(self, stores):
        """Write pending stores to memory."""
        for p in stores:
            if p in p.view.overlays:
                p.view.remove(p)
                self._write_memory(p.view, p.cell, p.start, p.data)

    def _write_memory(self, writer, cell, start, data):
        """Change memory; views other than the writer's may keep the previous bytes."""
        if cell.tobytes() != data.tobytes():
            for view in self.views.values():
                if view is not writer and self.world.rng.random() < _STALE and not view.find(start, start + len(data)):
                    StaleBytes(view, cell, start, cell.copy())
            cell[:] = data
            self.world.changes += 1

    def release(self, thread):
        """Commit a thread's own stores and those it has observed."""
        self.commit([*self.observed.pop(thread, ()), *self.own.pop(thread, ())])

    def acquire(self, block):
        """Drop all stale bytes from a block's view."""
        for p in list(self.views[block].overlays):
            if isinstance(p, StaleBytes):
                p.view.remove(p)

    def synchronize(self, rendezvous):
        """Let the threads that waited at a barrier observe the stores of all threads that arrived."""
        if rendezvous.what == "grid sync":
            self._commit_all(rendezvous.scope.blocks)
            for block in rendezvous.scope.blocks:
                self.acquire(block)
        elif rendezvous.what.startswith(("syncthreads", "barrier ", "syncwarp")):
            observed = self._observed_by(rendezvous.ordered_threads())
            for t in rendezvous.waiting:
                self.observed[t] = observed
                self.own.pop(t, None)

    def _commit_all(self, blocks):
        """Commit in random order: where two blocks store to one address, either store may be the last."""
        stores = [p for block in blocks for p in self.views[block].overlays if isinstance(p, PendingStore)]
        self.world.rng.shuffle(stores)
        self.commit(stores)

    def _observed_by(self, threads):
        """Return the pending stores that these threads made or observed, as one dict in order."""
        groups = {id(group): group for t in threads for group in (self.observed.get(t), self.own.get(t)) if group}
        return {p: None for group in groups.values() for p in group if p in p.view.overlays}

    def publish_to(self, barrier, thread):
        """Attach the stores that a thread made or observed to a barrier at which it arrives."""
        self.published[barrier] = {p: None for p in self.published.get(barrier, ()) if p in p.view.overlays}
        self.published[barrier] |= self._observed_by((thread,))

    def receive_from(self, barrier, thread):
        """Let a thread that has waited for a barrier observe the stores published to it."""
        if barrier in self.published:
            self.observed[thread] = self._observed_by((thread,)) | self.published[barrier]
            self.own.pop(thread, None)

    def step(self):
        """Make one overlay visible with a small probability; called after each scheduler step."""
        if self.world.rng.random() < _VISIBLE:
            overlays = [p for view in self.views.values() for p in view.overlays]
            if overlays:
                self._make_visible((self.world.rng.choice(overlays),))

    def make_half_visible(self):
        """Make half of all overlays visible in random order: all threads poll in vain and may wait for one of them."""
        overlays = [p for view in self.views.values() for p in view.overlays]
        self.world.rng.shuffle(overlays)
        self._make_visible(overlays[: (len(overlays) + 1) // 2])

    def _make_visible(self, overlays):
        for p in overlays:
            if isinstance(p, PendingStore):
                self.commit((p,))
            elif p in p.view.overlays:
                p.view.remove(p)
                self.world.changes += 1


def of(thread):
    """Return the StoreBuffers of a thread's world, or None outside `weak_memory`."""
    return thread.grid.world.memory_model


def release(thread):
    """Release, if memory is weak."""
    if (model := of(thread)) is not None:
        model.release(thread)


def acquire(thread):
    """Acquire, if memory is weak."""
    if (model := of(thread)) is not None:
        model.acquire(thread.block)


def publish_to(barrier, thread):
    """Publish a thread's stores to a barrier or flag, if memory is weak."""
    if (model := of(thread)) is not None:
        model.publish_to(barrier, thread)


def receive_from(barrier, thread):
    """Observe the stores published to a barrier or flag, if memory is weak."""
    if (model := of(thread)) is not None:
        model.receive_from(barrier, thread)
