"""Watchpoints: elements of memory whose changes, or whose loads, stop a launch.

Values are compared at each line and at each switch to another thread, so that a change is attributed to the thread
that ran in between, or to the scheduler, which completes asynchronous operations and delayed stores.
"""

import greenlet
import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.engine import Thread
from moe_numba.simulator.core.errors import format_place
from moe_numba.simulator.core.reachable import bytes_at
from moe_numba.simulator.debugger.frames import CommandError, Hit, block_at


class Watchpoint:
    """Some bytes of memory. `loads`: their loads are of interest, not their changes.

    Global memory has an address. Shared memory is made anew by each repetition of a launch, and is looked up there.
    """

    def __init__(self, text, target, index, grid_number, loads=False):
        if type(target) is memory.LocalArray:
            raise CommandError(f"{text} is in local memory; only global and shared memory can be watched")
        address, self.size = memory.byte_span(target, index, writes=False)
        if not self.size:
            raise CommandError(f"{text} is no element of {target:}")
        self.text, self.loads, self.dtype, self._last = text, loads, target.dtype, None
        allocation = target.allocation
        self.is_shared = allocation is not None
        if self.is_shared:
            key = next(k for k, known in allocation.shared.allocations.items() if known is allocation)
            block = tuple(allocation.shared.block.index)
            self._where = grid_number, block, key, address + allocation.to_window - allocation.start
            self.text += f" of block {block}"
        else:
            self._bytes, self._owner = bytes_at(address, self.size), target.array  # which keeps it alive

    def bytes(self, grids):
        """Return a view of the watched bytes; None if a repeated launch has not declared their shared array yet."""
        if not self.is_shared:
            return self._bytes
        number, block, key, start = self._where
        if number >= len(grids):
            return None
        allocation = block_at(grids[number], block).shared.allocations.get(key)
        return None if allocation is None else allocation.bytes[start : start + self.size]

    def reset(self):
        """Forget the value, because the launch starts again."""
        self._last = None

    def change(self, grids):
        """Return the old and the new value if it has changed since the last call, else None."""
        view = self.bytes(grids)
        if view is None:
            return None
        before, self._last = self._last, view.tobytes()
        return None if before is None or before == self._last else (self._format(before), self._format(self._last))

    def value(self, grids):
        return self._format(self.bytes(grids).tobytes())

    def _format(self, data):
        return str(np.frombuffer(data, self.dtype)[0])

    def overlaps(self, grids, address, size):
        """Return whether an access touches the watched bytes."""
        view = self.bytes(grids)
        if view is None:
            return False
        start = view.__array_interface__["data"][0]
        return start < address + size and address < start + self.size

    def __str__(self):
        return f"{'read watchpoint' if self.loads else 'watchpoint'} on {self.text}"


class Watcher:
    """Compares the watched values of a session while a launch runs, and collects the hits."""

    def __init__(self, session):
        self.session, self.hits = session, []

    def points(self):
        return {n: p for n, p in self.session.points.items() if isinstance(p, Watchpoint)}

    def reset(self):
        """Forget everything, because the launch starts again."""
        self.hits = []
        for point in self.points().values():
            point.reset()

    def observe(self):
        """Notice what the watchpoints need; call it when they change and when a grid starts."""
        points = self.points().values()
        if points:
            greenlet.settrace(self._on_switch)
        for world in {grid.world for grid in self.session.grids if any(point.loads for point in points)}:
            world.observe_accesses(self._on_access)

    def compare(self, thread):
        """Note the values that have changed since the last call; `thread` has run since then, or None."""
        for number, point in self.points().items():
            if not point.loads and (change := point.change(self.session.grids)):
                self._add(number, point, f"  old value {change[0]}\n  new value {change[1]}", "stored", thread)

    def take_hits(self):
        hits, self.hits = self.hits, []
        return hits

    def _on_switch(self, event, switch):
        if self.session.is_running:
            self.compare(switch[0] if type(switch[0]) is Thread else None)

    def _on_access(self, t, target, index, writes, nbytes, scope, value, operation):
        if writes and operation != "atomic" or not self.session.is_running:
            return
        address, size = memory.byte_span(target, index, writes, nbytes)
        for number, point in self.points().items():
            if size and point.loads and point.overlaps(self.session.grids, address, size):
                self._add(number, point, f"  value {point.value(self.session.grids)}", "loaded", t)

    def _add(self, number, point, values, verb, thread):
        line = self.session.lines.get(thread)
        actor = "the scheduler, which completes asynchronous operations and delayed stores"
        if line:
            actor = f"{thread}, at {format_place(*line[1:])}"
        kind = "Read watchpoint" if point.loads else "Watchpoint"
        self.hits.append(Hit(thread if line else None, f"{kind} {number}: {point.text}\n{values}\n  {verb} by {actor}"))
