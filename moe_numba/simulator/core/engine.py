"""The engine: every simulated thread is a greenlet, and all threads of all blocks of a grid are alive at once.

A thread runs until it must wait for others (`Thread.meet`), polls memory in vain (`Thread.spin`) or ends. Everything
that makes threads wait for one another stands on `meet`, or on the pair `Thread.park` and `World.wake` below it.
"""

import sys
from typing import NamedTuple

import greenlet
import numpy as np

from moe_numba.simulator.async_.uses_async import asynchronous
from moe_numba.simulator.core.errors import (
    ClusterError,
    DivergentBarrier,
    MissingLane,
    SimulatorError,
    lanes_of,
    place,
    ranges,
    standing,
)
from moe_numba.simulator.core.scheduler import Event
from moe_numba.simulator.core.shared import Layout, Shared


class Dim3(NamedTuple):
    x: int
    y: int
    z: int


def thread():
    """The simulated thread that runs now."""
    current = greenlet.getcurrent()
    if type(current) is Thread:
        return current
    raise SimulatorError("only a running kernel has a current thread; this was called outside one")


class Meeting:
    """Threads that wait for one another at one operation of one scope (a warp, a block, a grid)."""

    __slots__ = ("scope", "what", "partners", "members", "values", "waiting", "site")

    def __init__(self, scope, what, partners, members, site):
        self.scope, self.what, self.partners, self.members, self.site = scope, what, partners, members, site
        self.values, self.waiting = {}, []

    def needs(self, thread):
        """Whether the meeting can never end without this thread."""
        if self.members is None:
            return self.partners == self.scope.size
        return bool(self.members >> thread.lane & 1)

    def __str__(self):
        mask = "" if self.members is None else f" with mask {self.members:#010x}"
        return f"{self.what}{mask} ({len(self.values)} of {self.partners} came)"


class Thread(greenlet.greenlet):
    """One CUDA thread."""

    __slots__ = ("grid", "block", "threadIdx", "thread_id", "warp", "lane", "waits", "result")
    __slots__ += ("unfenced", "new_barriers", "groups")  # what it wrote, what it made and what it started: see `watch`

    def __init__(self, block, thread_id):
        self.grid, self.block, self.thread_id = block.grid, block, thread_id
        size = block.grid.block_dim
        self.threadIdx = Dim3(thread_id % size.x, thread_id // size.x % size.y, thread_id // (size.x * size.y))
        self.warp, self.lane = divmod(thread_id, 32)
        self.waits = self.result = self.unfenced = self.new_barriers = self.groups = None
        self.gr_context = block.grid.context

    def run(self):
        try:
            self.grid.kernel(*self.grid.args)
        except Exception as error:
            if not isinstance(error, SimulatorError):
                error.add_note(f"in {self}, threadIdx {tuple(self.threadIdx)}, of kernel {self.grid.name}")
            raise
        self._exit()

    def meet(self, scope, what, partners, value=None, finish=None, members=None, wait=True, site=None):
        """Bring `value` to the meeting `what` of `scope`, and wait until `partners` threads have come.

        The last to come calls `finish`, which takes a dict from thread to value and returns one from thread to result,
        or None. Meetings are told apart by `what` and `members`, the mask of the lanes that must come (None: any
        threads of the scope will do). With `wait=False` the thread only arrives, and goes on. `site` is kept for those
        who compare source lines.
        """
        meeting = scope.meetings.get((what, members))
        if meeting is None:
            meeting = scope.meetings[what, members] = Meeting(scope, what, partners, members, site)
        elif self in meeting.values:
            raise SimulatorError(f"{self} came twice to {meeting}, at {place(sys._getframe())}")
        meeting.values[self] = value
        if wait:
            meeting.waiting.append(self)
            self.waits = meeting
        if len(meeting.values) == partners:
            del scope.meetings[what, members]
            self._conclude(meeting, finish)
        if wait:
            # The last to come waits too: were it to run on at once, lanes would leave in the same order in every run.
            self.parent.switch()
            return self.result

    def _conclude(self, meeting, finish):
        results = finish(meeting.values) if finish else None
        for t in meeting.waiting:
            t.result = results[t] if results else None
        if self.grid.world.weak is not None:
            self.grid.world.weak.meet(meeting)
        self.grid.world.wake(meeting.waiting)
        if self.grid.world.events is not None:
            for t, value in meeting.values.items():
                result = results[t] if results else None
                t.note(meeting.what, {"value": value, "result": result, "mask": meeting.members})

    def park(self, where):
        """Wait until `World.wake` names this thread; `where` says in words what it waits for."""
        self.waits = where
        self.parent.switch()
        return self.result

    def spin(self, what="polling"):
        """Give way before a poll: others run first, until memory changes (`Grid.progress`) or none of them can."""
        self.waits = what
        self.grid.world.spinners.append(self)
        self.parent.switch()

    def pause(self):
        """Give way to another warp, or to another lane of this warp."""
        self.grid.world.wake((self,))
        self.parent.switch()

    def note(self, what, details=None):
        """Add an event to the trace, if one is recorded."""
        world = self.grid.world
        if world.events is not None:
            where = self.block.index, self.warp, self.lane
            world.events.append(Event(world.steps, *where, what, details, self.grid.rank))

    def _exit(self):
        warp = self.block.warps[self.warp]
        warp.exited |= 1 << self.lane
        warp.group.exited += 1
        self.block.exited += 1
        self.grid.progress()
        for scope in (warp, warp.group, self.block, self.grid):
            for meeting in scope.meetings.values():
                if meeting.needs(self) and self not in meeting.values:
                    raise self._missed(meeting)
        if warp.exited == warp.lanes:
            self.block.cluster.come(warp)
        if self.block.exited == self.block.size:
            self.block.shared.close()
            self.grid.world.leave(self.grid)

    def _missed(self, meeting):
        came = f"  warps {ranges({t.warp for t in meeting.values})} came and went on"
        waiting = standing(meeting.waiting, limit=2) or came
        if meeting.members is None:
            return DivergentBarrier(f"{self} has exited, while others wait for it at {meeting.what}:\n{waiting}")
        exited = lanes_of(meeting.scope.exited & meeting.members)
        return MissingLane(
            f"{meeting.scope}: lanes {exited} are named in mask {meeting.members:#010x} of {meeting.what} "
            f"but have exited:\n{waiting}"
        )

    def __str__(self):
        return f"{self.block} warp {self.warp} lane {self.lane}"


class WarpGroup:
    """Four warps, from a multiple of four on, that multiply matrices together; the last of a block may be short."""

    def __init__(self, block, index):
        self.block, self.index, self.meetings, self.exited = block, index, {}, 0
        self.size = min(128, block.size - 128 * index)

    def __str__(self):
        return f"{self.block} warps {4 * self.index}-{4 * self.index + 3}"


class Warp:
    """Up to 32 threads, which the scheduler runs together: each step runs every lane that can run, in random order."""

    def __init__(self, block, index):
        self.block, self.index, self.group, self.threads = block, index, block.groups[index // 4], []
        self.meetings, self.exited, self.lanes, self.wgmma = {}, 0, 0, None
        self.ready, self.queued, self.priority = [], False, block.grid.world.rng.random()

    def step(self, rng):
        lanes, self.ready = self.ready, []
        rng.shuffle(lanes)
        for t in lanes:
            t.switch()

    def __str__(self):
        return f"{self.block} warp {self.index}"


class Block:
    """The threads of one block and the shared memory they have in common."""

    def __init__(self, grid, index):
        self.grid, self.index, self.size = grid, Dim3(*index), grid.block_size
        self.meetings, self.exited = {}, 0
        self.shared = Shared(self, grid.layout)
        self.groups = [WarpGroup(self, g) for g in range((self.size + 127) // 128)]
        self.warps = [Warp(self, w) for w in range((self.size + 31) // 32)]
        for i in range(self.size):
            t = Thread(self, i)
            self.warps[t.warp].threads.append(t)
            self.warps[t.warp].lanes |= 1 << t.lane

    def __str__(self):
        return f"{self.grid.label}block {tuple(self.index)}"


class Cluster:
    """Blocks that can reach one another's shared memory, in the order of their ranks, and the barrier they share.

    The barrier counts whole warps, since its aligned instructions take all lanes of a warp at once. As the PTX ISA has
    it, a warp that has exited is not waited for.
    """

    def __init__(self, blocks):
        self.blocks, self.world = blocks, blocks[0].grid.world
        for rank, block in enumerate(blocks):
            block.cluster, block.rank = self, rank
        self.phase, self.missing, self.waiting = 0, self._alive(), []
        self.arrived = {}  # the phase in which a warp arrived for which it has not waited yet
        self.met = set()  # the warps that have been through the barrier, and so know that all blocks have started

    def _alive(self):
        return {warp for block in self.blocks for warp in block.warps if warp.exited != warp.lanes}

    def arrive(self, warp):
        if warp in self.arrived:
            raise ClusterError(f"{warp} arrives at the cluster barrier twice, without a wait between")
        self.arrived[warp] = self.phase
        self.come(warp)

    def come(self, warp):
        """Wait for this warp no longer, and end the phase if it was the last."""
        self.missing.discard(warp)
        if not self.missing:
            self.phase, self.missing = self.phase + 1, self._alive()
            waiting, self.waiting = self.waiting, []
            self.world.wake(waiting)

    def depart(self, warp):
        """The phase whose end a warp must wait for."""
        if warp not in self.arrived:
            raise ClusterError(f"{warp} waits at the cluster barrier, at which it has not arrived")
        return self.arrived.pop(warp)

    def __str__(self):
        alive = self._alive()
        return f"barrier.cluster.wait ({len(alive - self.missing)} of {len(alive)} warps came)"


class Grid:
    """One launch: a kernel, its arguments and all its blocks."""

    def __init__(self, world, kernel, grid_dim, block_dim, args, shared_bytes=0, cluster=None, cooperative=False):
        self.world, self.kernel, self.name = world, kernel, kernel.__name__
        self.grid_dim, self.block_dim, self.cluster_dim = Dim3(*grid_dim), Dim3(*block_dim), Dim3(*cluster or (1, 1, 1))
        self.args, self.cooperative = args, cooperative
        self.layout, self.asynchronous = Layout(shared_bytes), asynchronous(kernel)
        self.block_size = self.block_dim.x * self.block_dim.y * self.block_dim.z
        self.size = self.block_size * self.grid_dim.x * self.grid_dim.y * self.grid_dim.z
        self.context, self.meetings, self.blocks = world.context, {}, []
        for z, y, x in np.ndindex(self.grid_dim.z, self.grid_dim.y, self.grid_dim.x):
            self.blocks.append(Block(self, (x, y, z)))
        clusters = {}
        for block in self.blocks:
            index = tuple(i // n for i, n in zip(block.index, self.cluster_dim))
            clusters.setdefault(index, []).append(block)
        self.clusters = [Cluster(blocks) for blocks in clusters.values()]
        self.rank, self.label = None, ""  # where several run together, and how the rank is named then
        self.going = len(self.blocks)  # its blocks that have not ended, and its copies that are under way

    def progress(self):
        """Say that memory changed in a way for which some thread may be polling."""
        self.world.progress += 1

    def threads(self):
        return [t for block in self.blocks for warp in block.warps for t in warp.threads]

    def __str__(self):
        return f"{self.label}grid of kernel {self.name}"
