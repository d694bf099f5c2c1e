"""Thread hierarchy of a launch: warps, warpgroups, blocks with their shared memory, clusters, and the grid.

As many blocks start as the simulated GPU can hold (threads, blocks and dynamic shared memory per SM; registers are not
known), in the order of their indices. Each of the others starts when a block ends, so blocks that wait for blocks which
cannot be resident are a deadlock. Ranks have a GPU each; nothing else is taken to run on it.
"""

import functools
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from moe_numba.simulator.asynchronous.uses_async import uses_async_instructions
from moe_numba.simulator.capability import SIMULATED, SM_COUNT, SM_LIMITS
from moe_numba.simulator.core.engine import CONVERGING, Dim3, Thread
from moe_numba.simulator.core.errors import ClusterError, SimulatorError
from moe_numba.simulator.core.scheduler import SLOWEST, World, settings, shuffle
from moe_numba.simulator.core.shared import SharedLayout, SharedMemory

_MAX_LOCAL_BYTES = 512 * 1024  # per thread


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
        world = block.grid.world
        self.ready, self.queued, self.lag = [], False, 0  # `lag` is added to the priority
        self.converging = {}  # position in the kernel -> the lanes that wait there for others to execute it with them
        self.aligned = {}  # `.aligned` instruction -> where its first lane is, and the mask of the lanes that have come
        self.priority = SLOWEST if index == world.slow_warp else world.rng.random()

    @functools.cached_property
    def threads(self):
        """The warp's threads, made on first use: the vector engine needs few of them."""
        return [Thread(self.block, 32 * self.index + lane) for lane in range(self.lanes.bit_length())]

    def step(self, rng):
        lanes, self.ready = self.ready, []
        shuffle(lanes, rng)
        for number, t in enumerate(lanes):
            try:
                t.switch()
            except Exception:
                self.ready[:0] = lanes[number + 1 :]  # the world may go on to look for a data race
                if self.ready and not self.queued:
                    self.queued = True
                    self.block.grid.world.schedule(self)
                raise
        if self.converging and not self.ready:  # no lane can still reach the first of these positions
            lanes = self.converging.pop(min(self.converging))
            for t in lanes:
                t.result = sum(1 << t.lane for t in lanes)
            self.block.grid.world.wake(lanes)

    def converge(self, t, position):
        """Wait until the lanes that execute a position together have reached it; return their mask."""
        self.converging.setdefault(position, []).append(t)
        return t.park(CONVERGING)

    def __str__(self):
        return f"{self.block} warp {self.index}"


class Block:
    """The threads of one block and their shared memory."""

    def __init__(self, grid, index):
        self.grid, self.index, self.size = grid, Dim3(*index), grid.block_size
        self.open_rendezvous, self.exited, self.registers = {}, 0, None
        self.shared = SharedMemory(self, grid.shared_layout)

    @functools.cached_property
    def warpgroups(self):
        return [Warpgroup(self, g) for g in range((self.size + 127) // 128)]

    @functools.cached_property
    def warps(self):
        return [Warp(self, w) for w in range((self.size + 31) // 32)]

    def threads(self):
        return [t for warp in self.warps for t in warp.threads]

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
        self.phase, self.waiting = 0, []
        self.arrived = {}  # warp -> phase in which it arrived, until it waits
        self.synchronized = set()  # warps that have passed the barrier: they know that all blocks have started

    @functools.cached_property
    def missing(self):
        """The warps that have to arrive in this phase; made when the first one arrives."""
        return self._running_warps()

    def _running_warps(self):
        return {warp for block in self.blocks for warp in block.warps if warp.exited != warp.lanes}

    def arrive(self, warp):
        if warp in self.arrived:
            raise ClusterError(f"{warp} arrives at the cluster barrier twice without a wait in between")
        self.arrived[warp] = self.phase
        self.mark_arrived(warp)

    def mark_arrived(self, warp):
        """Stop waiting for this warp, which arrived or exited; the last one completes the phase."""
        if "missing" not in self.__dict__ and warp.exited == warp.lanes:
            return
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
        cooperative: bool | None = False,
        dependent: bool = False,
        launch_bounds: tuple[int, int] | None = None,
    ):
        self.world, self.kernel, self.name = world, kernel, kernel.__name__
        self.grid_dim, self.block_dim, self.cluster_dim = Dim3(*grid_dim), Dim3(*block_dim), Dim3(*cluster or (1, 1, 1))
        self.args, self.cooperative, self.dependent = args, cooperative, dependent
        self.launch_bounds = launch_bounds
        self.options = {}  # those of `cuda.jit`
        self.shared_layout, self.uses_async = SharedLayout(shared_bytes), uses_async_instructions(kernel)
        self.block_size = self.block_dim.x * self.block_dim.y * self.block_dim.z
        self.context, self.open_rendezvous, self.blocks = world.context, {}, []
        for z, y, x in self._sampled(settings["sampled_blocks"]):
            self.blocks.append(Block(self, (x, y, z)))
        self.size = self.block_size * len(self.blocks)
        if not world.makes_warps_late:
            for block in self.blocks:
                block.warps  # noqa: B018  their priorities follow from the seed, in this order
        clusters = {}
        for block in self.blocks:
            index = tuple(i // n for i, n in zip(block.index, self.cluster_dim))
            clusters.setdefault(index, []).append(block)
        self.clusters = [Cluster(blocks) for blocks in clusters.values()]
        self.waiting_clusters, self.local_bytes = deque(self.clusters), {}
        # Programmatic dependent launch: the blocks that have waited for the kernel before, and for each block that
        # has allowed the next kernel to start whether it had waited then.
        self.waited, self._allowed_after_wait = set(), {}
        self.overlapped_by = ""  # name of a kernel after this one, which let the next one overlap this one, too
        if cooperative:
            self._check_all_resident()
        self.rank, self.label = None, ""  # set where several ranks run together; the label precedes blocks in messages
        self.exited = 0  # threads
        self.active = len(self.blocks)  # blocks that have not ended, plus async copies that have not completed

    def _sampled(self, most):
        """Return the indices (z, y, x) of the blocks that run: all, or those of evenly spaced clusters."""
        indices = list(np.ndindex(self.grid_dim.z, self.grid_dim.y, self.grid_dim.x))
        if most is None or self.cooperative or len(indices) <= most:
            return indices
        clusters = {}
        for index in indices:
            clusters.setdefault(tuple(i // n for i, n in zip(index[::-1], self.cluster_dim)), []).append(index)
        count = max(most * len(clusters) // len(indices), 1)
        kept = {round((i + 0.5) * len(clusters) / count - 0.5) for i in range(count)}
        return [index for number, each in enumerate(clusters.values()) if number in kept for index in each]

    @property
    def resident_blocks(self) -> int:
        """How many blocks the simulated GPU runs at the same time, with the shared memory that is known so far."""
        per_sm = SM_LIMITS[SIMULATED].resident_blocks(self.block_size, self.shared_layout.used)
        return SM_COUNT * per_sm

    def allow_next(self, block: Block) -> None:
        """Execute `griddepcontrol.launch_dependents` in a block."""
        self._allowed_after_wait.setdefault(block, block in self.waited)

    @property
    def next_may_overlap_kernel_before(self) -> bool:
        """Whether all blocks allowed the next kernel to start, at the latest as they ended, without having waited."""
        return self.dependent and not any(self._allowed_after_wait.get(b, b in self.waited) for b in self.blocks)

    def start(self) -> list[Block]:
        """Return the blocks that start at once: as many as can be resident."""
        clusters = max(self.resident_blocks // len(self.clusters[0].blocks), 1)
        return [b for _ in range(min(clusters, len(self.clusters))) for b in self.waiting_clusters.popleft().blocks]

    def start_next(self, cluster: Cluster) -> list[Block]:
        """Return the blocks that start after a block of `cluster` has ended."""
        if not self.waiting_clusters or any(block.exited < block.size for block in cluster.blocks):
            return []
        return self.waiting_clusters.popleft().blocks

    def check_cooperative(self, thread: Thread | Block) -> None:
        """Raise a SimulatorError if the blocks cannot wait for one another; `thread` or a block of them calls."""
        if self.cooperative is False:
            raise SimulatorError(
                f"{thread} calls grid.sync(), but kernel {self.name} was not launched with cooperative=True"
            )
        self._check_all_resident()

    def _check_all_resident(self):
        if len(self.blocks) > self.resident_blocks:
            raise SimulatorError(
                f"the cooperative launch of kernel {self.name} has {len(self.blocks)} blocks of {self.block_size} "
                f"threads and {self.shared_layout.used} bytes of shared memory; {self._describe_residency()}"
            )

    def _describe_residency(self):
        return f"at most {self.resident_blocks} of them are resident on the simulated GPU, which has {SM_COUNT} SMs"

    def add_local_array(self, key: tuple, nbytes: int) -> None:
        """Count the local array that is declared at `key`; raise a SimulatorError if a thread has too many bytes."""
        if self.local_bytes.get(key, 0) < nbytes:
            self.local_bytes[key] = nbytes
            if (total := sum(self.local_bytes.values())) > _MAX_LOCAL_BYTES:
                raise SimulatorError(
                    f"the local arrays of kernel {self.name} have {total} bytes per thread; the maximum is "
                    f"{_MAX_LOCAL_BYTES}"
                )

    def free(self, shared_memory: bool = True) -> None:
        """Free what the simulator keeps of the threads, and the blocks' shared memory, after the kernel's end.

        The garbage collector cannot: a greenlet that runs is invisible to it, and so is, for good, a dict that the
        greenlet was put into as a key meanwhile. Without `shared_memory` the collector frees that with the grid.
        """
        for block in self.blocks:
            block.shared.forget_threads()
            if shared_memory:
                block.shared.free()
            block.registers = None
            made = vars(block)  # without those that were never made
            for scope in (block, *made.get("warpgroups", ()), *made.get("warps", ())):
                scope.open_rendezvous.clear()
        self.open_rendezvous.clear()

    def unstarted_report(self) -> list[str]:
        """Describe, for a deadlock, the blocks that have not started."""
        waiting = sum(len(cluster.blocks) for cluster in self.waiting_clusters)
        return [f"  {waiting} blocks of {self} have not started: {self._describe_residency()}"] if waiting else []

    def memory_changed(self) -> None:
        """Record a change of memory that some thread may be polling for."""
        self.world.changes += 1

    def threads(self) -> list[Thread]:
        """Return all threads, in the order of blocks, warps and lanes."""
        return [t for block in self.blocks for t in block.threads()]

    def started_threads(self) -> list[Thread]:
        """Return the threads of the blocks that have started."""
        started = self.clusters[: len(self.clusters) - len(self.waiting_clusters)]
        return [t for cluster in started for block in cluster.blocks for t in block.threads()]

    def __str__(self):
        return f"{self.label}grid of kernel {self.name}"
