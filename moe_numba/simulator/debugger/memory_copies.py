"""Copies of a launch's global memory, from which the launch can start again."""

from moe_numba.simulator.asynchronous import tensor_map
from moe_numba.simulator.core.reachable import bytes_at, intervals


class MemoryCopies:
    """The bytes that the grids of a launch can reach, as they were when each grid started."""

    def __init__(self, max_bytes):
        self.max_bytes, self.bytes = max_bytes, 0
        self._copies = []  # (bytes in memory, copy, weak reference of a storage or None), in the order of copying

    @property
    def complete(self) -> bool:
        """Whether the copies fit into `max_bytes`, so that the launch can be repeated."""
        return self.bytes <= self.max_bytes

    def add(self, grid):
        """Copy what the arguments of a grid that is about to start, and registered buffers, can reach."""
        storages = {(first, first + size): alive for first, size, alive in tensor_map.storages if not alive.expired()}
        reached = [*intervals([grid]), *storages]
        known = [(memory.ctypes.data, memory.ctypes.data + memory.size) for memory, *_ in self._copies]
        for start, end in sorted({interval for interval in reached if interval[0] < interval[1]}):
            if not self.complete or any(first <= start and end <= last for first, last in known):
                continue
            self.bytes += end - start
            if not self.complete:
                self._copies.clear()
                break
            memory = bytes_at(start, end - start)
            self._copies.append((memory, memory.copy(), storages.get((start, end))))

    def restore(self):
        """Write the copies back, the earliest last: it has what was there before any grid started."""
        for memory, copy, storage in reversed(self._copies):
            if storage is not None and storage.expired():
                continue  # a tensor that the kernel does not use was freed since then
            if (memory != copy).any():  # memory that is read only is left alone
                memory[:] = copy
