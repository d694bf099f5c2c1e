"""The regions of memory that kernels may access."""

import bisect

from moe_numba.simulator.core.reachable import bytes_at
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.shadow import Region


class Memory:
    """The regions of memory that the kernels of a world may access."""

    def __init__(self, keeps_all=False):
        """`keeps_all`: keep a copy of all regions that are accessed, not only of those that are written."""
        self.starts, self.regions, self.shared, self.keeps_all = [], [], {}, keeps_all

    def add(self, intervals):
        """Make regions of the given intervals of addresses; overlapping ones are one region."""
        merged = []
        for start, end in sorted(i for i in intervals if i[0] < i[1]):
            if merged and start < merged[-1][1]:
                merged[-1][1] = max(end, merged[-1][1])
            else:
                merged.append([start, end])
        self.starts = [start for start, _ in merged]
        self.regions = [Region(start, end, bytes_at(start, end - start)) for start, end in merged]

    def find(self, x):
        allocation = x.allocation
        if allocation is not None:
            region = self.shared.get(allocation)
            if region is None:
                start = allocation.start - allocation.to_window
                region = self.shared[allocation] = Region(start, start + allocation.bytes.size, shared=allocation)
                region.block = allocation.shared.block
            return region
        return self.at(x.address)

    def at(self, address):
        """Return the region of global memory at an address."""
        k = bisect.bisect_right(self.starts, address) - 1
        if k < 0 or address > self.regions[k].end:
            raise Unsupported("memory that is no argument of the kernel")
        if self.keeps_all:
            self.regions[k].keep()
        return self.regions[k]

    def restore(self):
        for region in self.regions:
            region.restore()
