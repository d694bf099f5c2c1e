"""Times steps that several ranks run together; the slowest rank's time counts.

A step is given as ``make(transport)``, a context manager. On entering, a rank of a ``LocalGroup`` allocates what it
needs; the context yields ``step()``, which launches on the rank's current stream and returns outputs.

    @contextmanager
    def make(transport):
        shared = transport.allocate(1 << 20)
        yield lambda: ...
        shared.close()

In the simulator, and where ranks share a GPU, nothing is timed.
"""

import time
from contextlib import ExitStack

import numpy as np
import torch

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from numba import cuda, uint64

from moe_numba.course.bench.timing import Stats, launched_by, no_garbage_collection, shuffled_rounds
from moe_numba.ptx.atomics import ld_acquire_sys_s32
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.runtime.launch import address

_TIMEOUT_NS = 5_000_000_000


def can_time(group):
    """Return whether each rank has a GPU of its own."""
    return not simulator.ENABLED and not group.is_shared


def settle(transport):
    """Wait until all kernels of all ranks have finished; in the simulator this runs them."""
    if simulator.ENABLED:
        transport.wait(lambda: True, 0)
    else:
        torch.cuda.current_stream().synchronize()
    transport.gather(None)


def outputs_of(group, make):
    """Call each rank's step once, and return the outputs."""

    def work(transport):
        with ExitStack() as stack:
            step = stack.enter_context(make(transport))
            stack.callback(settle, transport)
            outputs = step()
            settle(transport)
        return outputs

    return group.run(work)


def rank_times(group, named, *, launches=10, samples=20):
    """Measure the GPU time of one call of a step, between events on each rank's stream, of the slowest rank.

    Parameters
    ----------
    group : LocalGroup
    named : dict
        ``{name: make}``; the steps are timed interleaved.
    launches : int
        Calls between two events. A gate holds all streams until all ranks have queued them: the host is not timed.
    samples : int
        Repetitions.

    Returns
    -------
    dict
        ``{name: Stats}``, or ``{name: None}`` where nothing can be timed; then each step runs once.
    """
    if not can_time(group):
        for make in named.values():
            outputs_of(group, make)
        return dict.fromkeys(named)
    gate = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
    return _slowest_of(
        group, named, lambda transport, steps: measure(transport, steps, launches, samples, _Clock(transport, gate))
    )


def host_times(group, named, *, repeats=30):
    """Measure the host time from a step's call until its GPU has finished, of the slowest rank; as `rank_times`."""
    if not can_time(group):
        return rank_times(group, named)

    def measure_host(transport, steps):
        times = {name: [] for name in steps}
        for name in shuffled_rounds(steps, repeats):
            transport.gather(None)
            begin = time.perf_counter_ns()
            steps[name]()
            torch.cuda.current_stream().synchronize()
            times[name].append((time.perf_counter_ns() - begin) / 1000)
            transport.gather(None)
        return times

    return _slowest_of(group, named, measure_host)


def measure(transport, steps, launches, samples, clock):
    """Measure on one rank the microseconds per call of each step: ``{name: [samples]}``."""
    times = {name: [] for name in steps}
    for number, name in enumerate(shuffled_rounds(steps, samples), start=1):
        clock.hold(number)
        begin = clock.mark()
        for _ in range(launches):
            steps[name]()
        end = clock.mark()
        transport.gather(None)  # all ranks have queued their calls
        clock.open(number)
        times[name].append(clock.elapsed_us(begin, end) / launches)
        transport.gather(None)
    return times


def slowest(rank_samples, kernels=None):
    """Return ``{name: Stats}`` of the maximum over ranks per sample, from each rank's ``{name: [samples]}``.

    ``kernels`` has the kernels that each step launches, if they are known: ``{name: kernels}``.
    """
    return {
        name: Stats.of(np.max([times[name] for times in rank_samples], axis=0), (kernels or {}).get(name, ()))
        for name in rank_samples[0]
    }


def _slowest_of(group, named, measure):
    with no_garbage_collection():
        found = group.run(lambda transport: _work(transport, named, lambda steps: measure(transport, steps)))
    return slowest([samples for samples, _ in found], found[0][1])


def _work(transport, named, measure):
    """Make the steps of one rank, warm them up, and measure; return the samples, and on rank 0 the steps' kernels."""
    with ExitStack() as stack:
        steps = {name: stack.enter_context(make(transport)) for name, make in named.items()}
        stack.callback(settle, transport)
        kernels = {}
        for _ in range(3):  # compile, load, and allocate all memory
            for name, step in steps.items():
                # Launches of all threads are noted, so one rank does it, while all ranks launch the same.
                if transport.rank == 0:
                    kernels[name] = launched_by(lambda step=step: [step(), settle(transport)])
                else:
                    step()
                    settle(transport)
                transport.gather(None)
        return measure(steps), kernels


@cuda.jit
def _wait_at_gate(gate, number, timeout_ns):
    start = globaltimer()
    while ld_acquire_sys_s32(gate, 0) < number:
        if uint64(globaltimer() - start) > timeout_ns:
            break


class _Clock:
    """Events on a rank's stream, and a gate in host memory at which all streams wait."""

    def __init__(self, transport, gate):
        self.gate = gate
        self.wait = transport.prepare_kernel(_wait_at_gate, ("int32*", "int32", "uint64"))

    def hold(self, number):
        self.wait(1, 1, address(self.gate), number, _TIMEOUT_NS)

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def open(self, number):
        self.gate[0] = number

    def elapsed_us(self, begin, end):
        end.synchronize()
        return begin.elapsed_time(end) * 1000
