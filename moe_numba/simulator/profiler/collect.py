"""Collects counters while kernels run: which lanes of a warp execute a line or an access together.

Every lane runs on its own here. Lanes execute an instruction together if they reach it by the same calls and in the
same iterations of the loops around it, as on a GPU whose warps reconverge where branches and loops end. So an execution
of a line is identified by its call site, its line and the iteration numbers of the enclosing loops, and an access by
the bytecode offset in addition. An operation that all running lanes of a warp wait for separates what is before it from
what is after it.

Python's line events (`sys.settrace`) report executions, `memory.before_access` accesses, and `World.wake` waits.
"""

import contextlib
import gc
import itertools
import re
import sys

import greenlet
import numpy as np

from moe_numba.simulator.core.engine import CONVERGING, Rendezvous
from moe_numba.simulator.core.errors import SimulatorError
from moe_numba.simulator.core.kernel import Kernel
from moe_numba.simulator.core.memory import LocalArray
from moe_numba.simulator.core.scheduler import override_settings, settings
from moe_numba.simulator.profiler.bank_conflicts import count_wavefronts
from moe_numba.simulator.profiler.coalescing import DeviceAddresses, count_sectors, most_on_one_address
from moe_numba.simulator.profiler.control_flow import FunctionCode, belongs_to_kernel
from moe_numba.simulator.profiler.counters import Accesses, Operations, Waits
from moe_numba.simulator.profiler.report import Profile

_contexts = itertools.count(1)


@contextlib.contextmanager
def profile(gpu=None):
    """Return a context that profiles every kernel launched inside: `with simulator.profile() as p: ...; print(p)`.

    Parameters
    ----------
    gpu : str or object, optional
        GPU whose occupancy is reported: a name ("H200", "H100", "A100", "B200", "L4", "T4", "RTX 4090") or an object
        with `capability` and `sm_count`. The kernels are then compiled for it, if Numba's compiler is installed, which
        takes some seconds each.

    Yields
    ------
    Profile
    """
    if settings["ranks"] is not None:
        raise SimulatorError("simulator.profile() is used within simulator.together(): enter it outside")
    result = Profile(gpu)
    collector = Collector(result)
    with override_settings(profile=collector):
        yield result
    result.complete()


def _called_by(caller, frame):
    """Return whether `frame` is that of a kernel's function, or of `Kernel.__call__` called by it."""
    if caller is None:
        return True
    if frame is None:  # called from outside Python
        return False
    return frame is caller.frame or frame.f_code is Kernel.__call__.__code__ and frame.f_back is caller.frame


class _Warp:
    """What the lanes of a warp executed since they last waited for one another."""

    def __init__(self, warp):
        self.warp, self.running = warp, len(warp.threads)
        self.executions = {}  # (context, line counters, iteration) -> mask of lanes
        # (context, offset, iteration, number, space, operation, size) -> (line counters, {lane: address})
        self.accesses = {}
        self.contexts = {}  # (caller's context, offset, iteration, function) -> context

    def flush(self):
        """Add up the executions and accesses; later ones belong to new groups."""
        for (_, counters, _), mask in self.executions.items():
            counters.executions += 1
            counters.active_lanes += mask.bit_count()
        for (*_, space, operation, size), (counters, addresses) in self.accesses.items():
            kind = counters.accesses.setdefault((space, operation, size), Accesses())
            _count(kind, space, operation, size, addresses)
        self.executions.clear()
        self.accesses.clear()
        self.contexts.clear()


def _count(kind, space, operation, size, addresses):
    """Count one request of the lanes in `addresses`."""
    kind.requests += 1
    kind.lanes += len(addresses)
    kind.bytes += size * len(addresses)
    if operation == "atomic":
        kind.contention = max(kind.contention, most_on_one_address(addresses.values()))
    elif space == "shared":
        wavefronts, ideal = count_wavefronts(addresses, size, operation == "load")
        kind.wavefronts += wavefronts
        kind.ideal_wavefronts += ideal
    if space == "global":
        kind.sectors += count_sectors(addresses.values(), size)


class _Lane:
    """The frames of one lane that belong to its kernel, and where its last line began."""

    __slots__ = ("warp", "index", "world", "kernel", "frame", "step")

    def __init__(self, warp, thread, kernel):
        self.warp, self.index, self.world, self.kernel = warp, thread.lane, thread.grid.world, kernel
        self.frame, self.step = None, 0


class _Frame:
    """One call in one lane; its line events count executions."""

    __slots__ = ("lane", "caller", "frame", "code", "context", "offset", "iteration", "counters")
    __slots__ += ("access_offset", "access_number")

    def __init__(self, lane, frame, code):
        self.lane, self.caller, self.frame, self.code = lane, lane.frame, frame, code
        caller = self.caller
        site = (caller.context, caller.code.instruction(caller.frame), caller.iteration) if caller else (0, 0, ())
        contexts, key = lane.warp.contexts, (*site, id(code))
        if key not in contexts:
            contexts[key] = next(_contexts)
        self.context, self.offset, self.iteration = contexts[key], -1, ()
        self.counters = code.counters(frame.f_code.co_firstlineno)
        self.access_offset = self.access_number = -1

    def trace(self, frame, event, _):
        lane = self.lane
        if event == "line":
            self.counters, self.iteration = self.code.move(frame, self.offset, self.iteration)
            self.offset, self.access_offset = frame.f_lasti, -1
            key = self.context, self.counters, self.iteration
            executions = lane.warp.executions
            executions[key] = executions.get(key, 0) | 1 << lane.index
            lane.step = lane.world.steps
        elif event == "return":
            lane.frame = self.caller
        return self.trace

    def access(self, operation, space, address, size):
        """Record an access of the instruction that this frame executes; one call may make several."""
        offset = self.code.instruction(self.frame)
        self.access_number = self.access_number + 1 if offset == self.access_offset else 0
        self.access_offset = offset
        key = self.context, offset, self.iteration, self.access_number, space, operation, size
        group = self.lane.warp.accesses.get(key)
        if group is None:
            group = self.lane.warp.accesses[key] = self.counters, {}
        group[1][self.lane.index] = address


class Collector:
    """Receives the events of all launches of a profile; a World calls it if it has one."""

    def __init__(self, result):
        self.profile, self._addresses = result, DeviceAddresses()
        self._codes, self._untracked = {}, {}  # (id of a code object, kernel) -> FunctionCode; id -> code object
        self._warps, self._previous = [], None

    def start(self, grid):
        """Prepare a grid that is about to start."""
        kernel = self.profile.kernel(grid)
        for block in grid.blocks:
            for warp in block.warps:
                group = _Warp(warp)
                self._warps.append(group)
                for t in warp.threads:
                    t.profile = _Lane(group, t, kernel)
        function = grid.kernel

        def traced(*args):
            # Python keeps the trace function per greenlet, from Python 3.12 on per system thread.
            sys.settrace(self._trace_call)
            function(*args)
            self._exit(greenlet.getcurrent().profile)

        grid.kernel = traced

    def stop(self):
        """End the tracing of a World's threads, and count what they have executed."""
        sys.settrace(self._previous)
        if self._collects_garbage:
            gc.enable()
        for group in self._warps:
            group.flush()
        self._warps = []

    def begin(self):
        """Note the trace function in force before the World runs.

        Callbacks of the garbage collector would be traced as functions that the kernel calls.
        """
        self._previous, self._collects_garbage = sys.gettrace(), gc.isenabled()
        gc.disable()

    def _exit(self, lane):
        lane.warp.running -= 1
        if not lane.warp.running:
            lane.warp.flush()

    def _trace_call(self, frame, event, _):
        code = frame.f_code
        if id(code) in self._untracked:  # most calls: those within the simulator
            return None
        lane = getattr(greenlet.getcurrent(), "profile", None)
        if lane is None:
            return None
        known = self._codes.get((id(code), lane.kernel))
        if known is None:
            if not belongs_to_kernel(code, lane.kernel):
                self._untracked[id(code)] = code  # kept, so that its id is not reused
                return None
            known = self._codes[id(code), lane.kernel] = FunctionCode(code, lane.kernel)
        if not _called_by(lane.frame, frame.f_back):
            return None
        lane.frame = _Frame(lane, frame, known)
        return lane.frame.trace

    def access(self, t, target, index, writes, nbytes, operation):
        """Record an access to an array or a pointer; see `memory.before_access`."""
        frame = t.profile.frame
        if frame is None or isinstance(target, LocalArray):
            return
        operation = operation or ("store" if writes else "load")
        if target.allocation is None:
            space, shift = "global", self._addresses.shift(target.array)
        else:
            space = "shared" if target.allocation.shared.block is t.block else "distributed shared"
            shift = target.allocation.to_window
        array = target.array
        if type(index) is int and array.ndim == 1:  # most accesses
            frame.access(operation, space, target.address + index * array.strides[0] + shift, nbytes or array.itemsize)
            return
        for address, size in _elements(target, index, writes, nbytes):
            frame.access(operation, space, address + shift, size)

    def matrix(self, operation, starts, matrices):
        """Record an ldmatrix or stmatrix of this warp, whose lanes address rows at `starts`, in lane order."""
        counters = greenlet.getcurrent().profile.frame.counters
        kind = counters.accesses.setdefault(("shared", operation, 16), Accesses())
        kind.requests += 1
        kind.lanes += 32
        kind.bytes += 128 * matrices
        kind.ideal_wavefronts += matrices
        for i in range(matrices):
            rows = dict(enumerate(starts[8 * i : 8 * i + 8]))
            kind.wavefronts += count_wavefronts(rows, 16, load=False)[0]

    def operation(self, name, nbytes, shape=None, count=1):
        """Record an asynchronous copy of `nbytes`, or `count` wgmmas of a warpgroup that read as many."""
        name = re.sub(r" of (rank \d+ )?block .*", "", name)  # a multicast names each destination
        if shape is not None:
            name += f" [{' x '.join(map(str, shape))}]"
        counters = greenlet.getcurrent().profile.frame.counters
        kind = counters.operations.setdefault(name, Operations())
        kind.count, kind.bytes = kind.count + count, kind.bytes + nbytes

    def warpgroup_instruction(self, group, what):
        """Record the registers per thread that a setmaxnreg gives to a warpgroup."""
        if what.startswith("setmaxnreg"):
            greenlet.getcurrent().profile.kernel.setmaxnreg[group.index] = int(what.split()[-1])

    def wake(self, world, threads):
        """Record the waits of threads that may go on now."""
        groups = {}
        for t in threads:
            if t.waits is not None:
                lane = t.profile
                groups.setdefault((lane.warp, lane.frame and lane.frame.counters, _name(t.waits)), []).append(t)
        for (_, counters, name), lanes in groups.items():
            if name is not None and counters is not None:
                steps = min(world.steps - t.profile.step for t in lanes)
                waits = counters.waits.setdefault(name, Waits())
                waits.add(Waits(1, steps, steps))
                for t in lanes:
                    t.profile.step = world.steps
        for warp in dict.fromkeys(t.profile.warp for t in threads if isinstance(t.waits, Rendezvous)):
            arrived = sum(1 << t.lane for t in threads if t.profile.warp is warp and isinstance(t.waits, Rendezvous))
            if arrived == warp.warp.lanes & ~warp.warp.exited:
                warp.flush()


def _name(waits):
    """Name what a thread waits for; None for an operation of its warp, at which lanes converge but do not wait."""
    if waits is CONVERGING:
        return None
    if isinstance(waits, Rendezvous):
        return waits.what if waits.mask is None else None
    if barrier := getattr(waits, "barrier", None):
        allocation = barrier.region.allocation
        return f"mbarrier {(barrier.region.start - allocation.start) // 8} of {allocation.name}"
    return re.split(r" \(|, which", str(waits))[0]  # the rest is the state of one wait


def _elements(target, index, writes, nbytes):
    """Yield the host address and the size of each element that an access touches."""
    array = target.array
    if array.ndim == 1 and isinstance(index, (int, np.integer)):
        yield target.address + int(index) * array.strides[0], nbytes or array.itemsize
    elif isinstance(index, tuple) and len(index) == array.ndim and not any(isinstance(i, slice) for i in index):
        yield target.address + sum(int(i) * s for i, s in zip(index, array.strides)), array.itemsize
    elif writes:  # a store to a slice; a load of one is a view, which reads nothing yet
        part = array[index]
        start = part.__array_interface__["data"][0]
        for position in np.ndindex(part.shape):
            yield start + sum(i * s for i, s in zip(position, part.strides)), part.itemsize
