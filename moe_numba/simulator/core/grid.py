"""Thread hierarchy of a launch: warps, warpgroups, blocks with their shared memory, clusters, and the grid."""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from moe_numba.simulator.async_.uses_async import uses_async_instructions
from moe_numba.simulator.core.engine import Dim3, Thread
from moe_numba.simulator.core.errors import ClusterError
from moe_numba.simulator.core.scheduler import World
from moe_numba.simulator.core.shared import SharedLayout, SharedMemory


class Warpgroup:
    """Four consecutive warps, the first a multiple of four; the last warpgroup of a block may be partial."""

    def __init__(self, block, index):
        self.block, self.index, self.open_rendezvous, self.exited = block, index, {}, 0
        self.size = min(128, block.size - 128 * index)

    def __str__(self):
        return f"{self.block} warps {4 * self.index}-{4 * self.index + 3}"


class Warp:
    """Up to 32 threads that are scheduled together: each step runs every lane that can run, in random order."""

    def __init__(self, block, index):
        self.block, self.index, self.warpgroup = block, index, block.warpgroups[index // 4]
        self.lanes = (1 << min(32, block.size - 32 * index)) - 1
        self.open_rendezvous, self.exited, self.wgmma_groups = {}, 0, []
        self.ready, self.queued, self.priority = [], False, block.grid.world.rng.random()

    @functools.cached_property
    def threads(self):
        """The warp's threads, made on first use: the vector engine needs few of them."""
        return [Thread(self.block, 32 * self.index + lane) for lane in range(self.lanes.bit_length())]

    def step(self, rng):
        lanes, self.ready = self.ready, []
        rng.shuffle(lanes)
        for t in lanes:
            t.switch()

    def __str__(self):
        return f"{self.block} warp {self.index}"


class Block:
    """The threads of one block and their shared memory."""

    def __init__(self, grid, index):
        self.grid, self.index, self.size = grid, Dim3(*index), grid.block_size
        self.open_rendezvous, self.exited = {}, 0
        self.shared = SharedMemory(self, grid.shared_layout)
        self.warpgroups = [Warpgroup(self, g) for g in range((self.size + 127) // 128)]
        self.warps = [Warp(self, w) for w in range((self.size + 31) // 32)]

    def __str__(self):
        return f"{self.grid.label}block {tuple(self.index)}"


class Cluster:
    """The blocks of a cluster, in the order of their ranks, and the cluster barrier.

    The barrier counts whole warps, since its aligned instructions are executed by all lanes of a warp together. As in
    the PTX ISA, the barrier does not wait for warps that have exited.
    """

    def __init__(self, blocks):
        self.blocks, self.world = blocks, blocks[0].grid.world
        for rank, block in enumerate(blocks):
            block.cluster, block.rank = self, rank
        self.phase, self.missing, self.waiting = 0, self._running_warps(), []
        self.arrived = {}  # warp -> phase in which it arrived, until it waits
        self.synchronized = set()  # warps that have passed the barrier: they know that all blocks have started

    def _running_warps(self):
        return {warp for block in self.blocks for warp in block.warps if warp.exited != warp.lanes}

    def arrive(self, warp):
        if warp in self.arrived:
            raise ClusterError(f"{warp} arrives at the cluster barrier twice without a wait in between")
        self.arrived[warp] = self.phase
        self.mark_arrived(warp)

    def mark_arrived(self, warp):
        """Stop waiting for this warp, which arrived or exited; the last one completes the phase."""
        self.missing.discard(warp)
        if not self.missing:
            self.phase, self.missing = self.phase + 1, self._running_warps()
            waiting, self.waiting = self.waiting, []
            self.world.wake(waiting)

    def begin_wait(self, warp):
        """Return the phase that a warp must wait for."""
        if warp not in self.arrived:
            raise ClusterError(f"{warp} waits at the cluster barrier, at which it has not arrived")
        return self.arrived.pop(warp)

    def __str__(self):
        running = self._running_warps()
        return f"barrier.cluster.wait ({len(running - self.missing)} of {len(running)} warps arrived)"


class Grid:
    """One launch: a kernel, its arguments and all its blocks."""

    def __init__(
        self,
        world: World,
        kernel: Callable,
        grid_dim: tuple[int, int, int],
        block_dim: tuple[int, int, int],
        args: Sequence,
        shared_bytes: int = 0,
        cluster: tuple[int, int, int] | None = None,
        cooperative: bool = False,
    ):
        self.world, self.kernel, self.name = world, kernel, kernel.__name__
        self.grid_dim, self.block_dim, self.cluster_dim = Dim3(*grid_dim), Dim3(*block_dim), Dim3(*cluster or (1, 1, 1))
        self.args, self.cooperative = args, cooperative
        self.shared_layout, self.uses_async = SharedLayout(shared_bytes), uses_async_instructions(kernel)
        self.block_size = self.block_dim.x * self.block_dim.y * self.block_dim.z
        self.size = self.block_size * self.grid_dim.x * self.grid_dim.y * self.grid_dim.z
        self.context, self.open_rendezvous, self.blocks = world.context, {}, []
        for z, y, x in np.ndindex(self.grid_dim.z, self.grid_dim.y, self.grid_dim.x):
            self.blocks.append(Block(self, (x, y, z)))
        clusters = {}
        for block in self.blocks:
            index = tuple(i // n for i, n in zip(block.index, self.cluster_dim))
            clusters.setdefault(index, []).append(block)
        self.clusters = [Cluster(blocks) for blocks in clusters.values()]
        self.rank, self.label = None, ""  # set where several ranks run together; the label precedes blocks in messages
        self.active = len(self.blocks)  # blocks that have not ended, plus async copies that have not completed

    def memory_changed(self) -> None:
        """Record a change of memory that some thread may be polling for."""
        self.world.changes += 1

    def threads(self) -> list[Thread]:
        """Return all threads, in the order of blocks, warps and lanes."""
        return [t for block in self.blocks for warp in block.warps for t in warp.threads]

    def __str__(self):
        return f"{self.label}grid of kernel {self.name}"
