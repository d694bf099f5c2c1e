"""Collects counters while threads run a kernel: which lanes of a warp execute a line or an access together.

`collect_vectors` counts the same where vectors run it.

Every lane runs on its own here. Lanes execute an instruction together if they reach it by the same calls and in the
same iterations of the loops around it, as on a GPU whose warps reconverge where branches and loops end. So an execution
of a line is identified by its call site, its line and the iteration numbers of the enclosing loops, and an access by
the bytecode offset in addition. An operation that all running lanes of a warp wait for separates what is before it from
what is after it.

Python's line events (`sys.settrace`) report executions, `memory.before_access` accesses, and `World.wake` waits.
"""

import collections
import contextlib
import gc
import itertools
import sys

import greenlet
import numpy as np

from moe_numba.simulator.core import reachable
from moe_numba.simulator.core.engine import CONVERGING, Rendezvous
from moe_numba.simulator.core.errors import SimulatorError
from moe_numba.simulator.core.memory import LocalArray
from moe_numba.simulator.core.scheduler import override_settings, settings
from moe_numba.simulator.profiler.bank_conflicts import count_matrices, count_wavefronts
from moe_numba.simulator.profiler.coalescing import DeviceAddresses, sectors_of
from moe_numba.simulator.profiler.collect_vectors import VectorCollector
from moe_numba.simulator.profiler.control_flow import FunctionCode, belongs_to_kernel, passes_calls_on
from moe_numba.simulator.profiler.counters import (
    Accesses,
    collective_counter,
    count_operation,
    count_peers,
    is_barrier,
    is_block_wide,
    name_of_wait,
)
from moe_numba.simulator.profiler.phases import Phases, access_counter
from moe_numba.simulator.profiler.report import Profile

_contexts = itertools.count(1)


@contextlib.contextmanager
def profile(gpu=None, blocks=None):
    """Return a context that profiles every kernel launched inside: `with simulator.profile() as p: ...; print(p)`.

    Parameters
    ----------
    gpu : str or object, optional
        GPU whose occupancy is reported: a name ("H200", "H100", "A100", "B200", "L4", "T4", "RTX 4090") or an object
        with `capability` and `sm_count`. The kernels are then compiled for it, if Numba's compiler is installed, which
        takes some seconds each.
    blocks : int, optional
        Run only about so many blocks of larger grids, in whole and evenly spaced clusters. The counters are those of
        the blocks that run; the kernel's output is incomplete, and blocks that wait for others end in an error. A
        cooperative launch always runs whole.

    Yields
    ------
    Profile

    Examples
    --------
    >>> import numpy as np
    >>> from numba import cuda
    >>> @cuda.jit
    ... def double(x):
    ...     i = cuda.grid(1)
    ...     x[i] *= 2
    >>> x = np.arange(64, dtype=np.float32)
    >>> with moe_numba.simulator.profile() as p:
    ...     double[2, 32](x)
    >>> total = p["double"].total
    >>> total.global_load_requests, total.global_store_requests
    (2, 2)
    """
    if settings["ranks"] is not None:
        raise SimulatorError("simulator.profile() is used within simulator.together(): enter it outside")
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks is {blocks}; it must be at least 1, or None for all")
    result = Profile(gpu)
    collector = Collector(result)
    with override_settings(profile=collector, sampled_blocks=blocks):
        yield result
    result.complete()


def _called_by(caller, frame):
    """Return whether `frame` is that of a kernel's function, or of a call by it that passes on to device functions."""
    if caller is None:
        return True
    while frame is not None and frame is not caller.frame and passes_calls_on(frame.f_code):
        frame = frame.f_back
    return frame is caller.frame


class _Warp:
    """What the lanes of a warp executed since they last waited for one another."""

    def __init__(self, warp, kernel, contending, updated, loaded):
        self.warp, self.kernel, self.running = warp, kernel, len(warp.threads)
        self.executions = {}  # (context, counters of the statement, iteration) -> mask of lanes
        # (context, offset, iteration, number, space, operation, size) -> (line counters, {lane: address})
        self.accesses = {}
        self.contexts = {}  # (caller's context, offset, iteration, function) -> context
        self.phase, self.counts = 0, {}  # block-wide barriers that it has passed; see `phases`
        self.contending, self.updated, self.loaded = contending, updated, loaded  # see `Collector`

    def count(self, counters, counter, more=1):
        """Count in the current phase of the block."""
        if more:
            key = Phases.key(self.phase, self.kernel.phases.column(counters, counter), self.warp.index)
            self.counts[key] = self.counts.get(key, 0) + more

    def flush(self):
        """Add up the executions and accesses; later ones belong to new groups."""
        for (_, counters, _), mask in self.executions.items():
            counters.executions += 1
            counters.active_lanes += mask.bit_count()
            self.count(counters, "executions")
        for (*_, space, operation, size), (counters, addresses) in self.accesses.items():
            kind = counters.accesses.setdefault((space, operation, size), Accesses())
            conflicts = self._count(kind, space, operation, size, addresses)
            self.count(counters, "bank_conflicts", conflicts)
            if counter := access_counter(space, operation):
                self.count(counters, counter)
            if operation == "atomic":
                where = self.warp.block if space == "shared" else self.warp.block.grid
                self.contending[kind].update((where, address) for address in set(addresses.values()))
        self.executions.clear()
        self.accesses.clear()
        self.contexts.clear()

    def _count(self, kind, space, operation, size, addresses):
        """Count one request of the lanes in `addresses`; return its bank conflicts."""
        kind.requests += 1
        kind.lanes += len(addresses)
        kind.bytes += size * len(addresses)
        conflicts = 0
        if operation == "atomic":
            kind.contention = max(kind.contention, *collections.Counter(addresses.values()).values())
        elif space == "shared":
            wavefronts, ideal = count_wavefronts(addresses, size, operation == "load")
            kind.wavefronts += wavefronts
            kind.ideal_wavefronts += ideal
            conflicts = wavefronts - ideal
        if space == "global":
            row = np.array([*addresses.values()], np.int64)[None, :]
            sectors, new, lines = sectors_of(row, np.ones(row.shape, bool), size)
            touched = sectors[new].tolist()
            kind.sectors += len(touched)
            kind.wavefronts += int(lines[0])
            if operation == "load":
                loaded = self.loaded[self.warp.block]
                kind.first_sectors += len(set(touched) - loaded)
                loaded.update(touched)
            if operation == "atomic":
                self.updated[kind].update((self.warp.block.grid, sector) for sector in touched)
        return conflicts


class _Lane:
    """The frames of one lane that belong to its kernel."""

    __slots__ = ("warp", "index", "kernel", "frame")

    def __init__(self, warp, thread, kernel):
        self.warp, self.index, self.kernel, self.frame = warp, thread.lane, kernel, None


class _Frame:
    """One call in one lane; its line events count executions."""

    __slots__ = ("lane", "caller", "frame", "code", "context", "offset", "iteration", "counters")
    __slots__ += ("statement", "access_offset", "access_number")

    def __init__(self, lane, frame, code):
        self.lane, self.caller, self.frame, self.code = lane, lane.frame, frame, code
        caller = self.caller
        site = (caller.context, caller.code.instruction(caller.frame), caller.iteration) if caller else (0, 0, ())
        contexts, key = lane.warp.contexts, (*site, id(code))
        if key not in contexts:
            contexts[key] = next(_contexts)
        self.context, self.offset, self.iteration = contexts[key], -1, ()
        self.counters, self.statement = code.counters(frame.f_code.co_firstlineno), None
        self.access_offset = self.access_number = -1

    def trace(self, frame, event, _):
        lane = self.lane
        if event == "line":
            self.counters, statement, iteration = self.code.move(frame, self.offset, self.iteration)
            self.offset, self.access_offset = frame.f_lasti, -1
            if statement is self.statement and iteration == self.iteration:
                return self.trace  # another line of the same statement
            self.statement, self.iteration = statement, iteration
            key = self.context, statement, iteration
            executions = lane.warp.executions
            executions[key] = executions.get(key, 0) | 1 << lane.index
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
        self.profile, self.addresses = result, DeviceAddresses()
        self._codes, self._untracked = {}, {}  # (id of a code object, kernel) -> FunctionCode; id -> code object
        self._warps, self._previous = [], None
        # Of the running launches: Accesses of atomics -> (grid or block, address) -> requests that update it.
        self._contending = collections.defaultdict(collections.Counter)
        self._updated = collections.defaultdict(collections.Counter)  # the same for sectors of global memory
        self._loaded = collections.defaultdict(set)  # block -> sectors that its loads have touched

    def for_vectors(self):
        """Return what counts one attempt of the vector engine."""
        return VectorCollector(self.profile, self.addresses)

    def start(self, grid):
        """Prepare a grid that is about to start."""
        kernel = self.profile.kernel(grid)
        for block in grid.blocks:
            for warp in block.warps:
                group = _Warp(warp, kernel, self._contending, self._updated, self._loaded)
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
        blocks = collections.defaultdict(dict)
        for group in self._warps:
            group.flush()
            blocks[group.warp.block, group.kernel] |= group.counts
        for (_, kernel), counts in blocks.items():
            keys = sorted(counts)
            kernel.phases.add_block(np.array(keys, np.int64), np.array([counts[key] for key in keys], np.int64))
        for kind, requests in self._contending.items():
            kind.warp_contention = max(kind.warp_contention, *requests.values())
        for kind, requests in self._updated.items():
            kind.sector_contention = max(kind.sector_contention, *requests.values())
        self._warps = []
        for kept in (self._contending, self._updated, self._loaded):
            kept.clear()

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
            space, shift = "global", self.addresses.shift(target.array)
        else:
            space = "shared" if target.allocation.shared.block is t.block else "distributed shared"
            shift = target.allocation.to_window
        array = target.array
        if type(index) is int and array.ndim == 1:  # most accesses
            elements = ((target.address + index * array.strides[0], nbytes or array.itemsize),)
        else:
            elements = _elements(target, index, writes, nbytes)
        for address, size in elements:
            frame.access(operation, space, address + shift, size)
            if reachable.ranks and space == "global":
                count_peers(frame.counters, t.grid.rank, address, size)

    def matrix(self, operation, starts, matrices):
        """Record an ldmatrix or stmatrix of this warp, whose lanes address rows at `starts`, in lane order."""
        lane = greenlet.getcurrent().profile
        counters = lane.frame.counters
        kind = counters.accesses.setdefault(("shared", operation, 16), Accesses())
        conflicts = count_matrices(kind, starts, matrices)
        lane.warp.count(counters, access_counter("shared", operation))
        lane.warp.count(counters, "bank_conflicts", conflicts)

    def operation(self, name, nbytes, shape=None, count=1, spans=()):
        """Record an asynchronous copy of `nbytes`, or `count` wgmmas of a warpgroup that read as many.

        `spans` lists the (address, size) of the bytes of global memory that a copy accesses.
        """
        t = greenlet.getcurrent()
        count_operation(t.profile.frame.counters, t.grid.rank, name, nbytes, shape, count, spans)

    def warpgroup_instruction(self, group, what):
        """Record the registers per thread that a setmaxnreg gives to a warpgroup."""
        greenlet.getcurrent().profile.kernel.note_warpgroup_instruction(group, what)

    def wake(self, world, threads):
        """Record the waits of threads that may go on now."""
        waits, collectives, passed = {}, {}, set()
        for t in threads:
            lane, where = t.profile, t.waits
            if where is None or where is CONVERGING:
                continue
            counters = lane.frame and lane.frame.counters
            if isinstance(where, Rendezvous):
                passed.add(lane.warp)
                if where.mask is not None:
                    collectives[where] = lane.warp, counters
                    continue
            waits[lane.warp, counters, name_of_wait(where)] = where
        for where, (warp, counters) in collectives.items():
            counter = collective_counter(where.what)
            if counters is not None and counter is not None:
                counters.collectives[where.what] = counters.collectives.get(where.what, 0) + 1
                warp.count(counters, counter)
        for warp, counters, name in waits:
            if counters is not None:
                counters.waits[name] = counters.waits.get(name, 0) + 1
                if is_barrier(name):
                    warp.count(counters, "barriers")
        for warp in passed:
            own = [t for t in threads if t.profile.warp is warp and isinstance(t.waits, Rendezvous)]
            if sum(1 << t.lane for t in own) == warp.warp.lanes & ~warp.warp.exited:
                warp.flush()
                if own[0].waits.mask is None and is_block_wide(own[0].waits.what):
                    warp.phase += 1


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
