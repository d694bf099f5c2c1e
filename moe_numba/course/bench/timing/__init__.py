"""Measures kernel time and call time, in microseconds.

**Kernel time** is the GPU's time per launch, from many launches in one CUDA graph, so that the CPU does not matter. It
includes the gap between two graph nodes (about half a microsecond), as in a serving stack's graph. **Call time** is the
CPU's time per Python call, the cost of calling the function eagerly.

The simulator measures no times: each function runs its calls once and returns None.
"""

import gc
import random
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moe_numba import simulator
from moe_numba.runtime.recording import Launched, noted_launches

REPLAY_US = 1500  # long enough to drown the cost of starting a graph, short enough to repeat
CALL_BUDGET_S = 1.0  # per function, for call time


@dataclass(frozen=True)
class Stats:
    """Median, 10th and 90th percentile, in microseconds, and the package's kernels that were timed."""

    median: float
    p10: float
    p90: float
    kernels: tuple[Launched, ...] = field(default=(), compare=False, repr=False)

    @classmethod
    def of(cls, samples: Iterable[float], kernels: Iterable[Launched] = ()) -> "Stats":
        """Compute the statistics of samples in microseconds."""
        median, p10, p90 = np.percentile(samples, [50, 10, 90])
        return cls(float(median), float(p10), float(p90), tuple(kernels))


def kernel_time(calls: Callable | list[Callable], *, launches: int | None = None, replays: int = 30) -> Stats | None:
    """Measure the GPU time of one launch.

    Parameters
    ----------
    calls : callable or list of callables
        Each launches once on torch's current stream. A list is called round-robin: pass one callable per set of
        inputs (see ``rotating``) to measure DRAM bandwidth instead of L2 bandwidth.
    launches : int, optional
        Launches in one graph; by default as many as take about 1.5 ms, from 20 to 500.
    replays : int
        Number of timed replays of the graph.

    Returns
    -------
    Stats, or None in the simulator.
    """
    return kernel_times({"": calls}, launches=launches, replays=replays)[""]


def kernel_times(
    named: dict[str, Callable | list[Callable]], *, launches: int | None = None, replays: int = 30
) -> dict[str, Stats | None]:
    """Measure ``kernel_time`` of several kernels, interleaved so that clock drift affects all alike.

    Each round replays the names in a new random order, so that no kernel always follows the same one.
    """
    named = {name: [calls] if callable(calls) else list(calls) for name, calls in named.items()}
    if simulator.ENABLED:
        return _run_once([call for calls in named.values() for call in calls], named)
    import torch

    counts, graphs, kernels = {}, {}, {}
    for name, calls in named.items():
        with noted_launches() as noted:
            _warm_up(calls)
        kernels[name] = noted.values()
        counts[name] = launches or _choose_launches(_estimate_us(calls), len(calls))
        graphs[name] = _capture(calls, counts[name])
        graphs[name].replay()  # the first replay uploads the graph
    events = {name: [] for name in graphs}
    # No synchronisation in this loop: each replay is queued while the previous one runs, so CPU time does not count.
    for name in shuffled_rounds(graphs, replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[name].replay()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: Stats.of([start.elapsed_time(end) * 1000 / counts[name] for start, end in pairs], kernels[name])
        for name, pairs in events.items()
    }


def call_time(call: Callable, *, repeats: int = 40, batch: int = 50) -> Stats | None:
    """Measure the CPU time of one eager Python call.

    Each sample is the mean of ``batch`` calls without synchronisation, beginning with an idle GPU. Slow functions get
    smaller batches, so that the whole measurement takes about a second.

    Returns
    -------
    Stats over ``repeats`` batches, or None in the simulator.
    """
    return call_times({"": call}, repeats=repeats, batch=batch)[""]


def call_times(named: dict[str, Callable], *, repeats: int = 40, batch: int = 50) -> dict[str, Stats | None]:
    """Measure ``call_time`` of several functions with interleaved batches."""
    if simulator.ENABLED:
        return _run_once(named.values(), named)
    import torch

    return _call_times(named, repeats, batch, torch.cuda.synchronize, time.perf_counter_ns)


def rotating(make: Callable[[], Any], bytes_per_set: int, total: int | None = None) -> list:
    """Make enough sets of inputs that none is still in the L2 when it is used again.

    Parameters
    ----------
    make : callable
        Makes one set.
    bytes_per_set : int
        Bytes that a kernel reads of one set.
    total : int, optional
        Bytes of all sets; by default more than twice the L2 (H200: 60 MB, so 128 MB).

    Returns
    -------
    list of 1 to 64 sets; one in the simulator, which has no L2.
    """
    if simulator.ENABLED:
        return [make()]
    if total is None:
        import torch

        # A little more than twice, because the L2 does not evict in exact LRU order.
        total = int(2.14 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return [make() for _ in range(_sets(bytes_per_set, total))]


def _sets(bytes_per_set, total):
    return max(1, min(64, -(-total // max(1, bytes_per_set))))


def _run_once(calls, names):
    for call in calls:
        call()
    return dict.fromkeys(names)


def shuffled_rounds(names: Iterable[str], count: int) -> Iterator[str]:
    """Yield every name ``count`` times, in rounds of random order (the same order on every run)."""
    shuffle, order = random.Random(0).shuffle, list(names)
    for _ in range(count):
        shuffle(order)
        yield from order


def launched_by(call: Callable) -> tuple[Launched, ...]:
    """Call once, and return the kernels of this package that it launched; ``call.kernels`` if it replays a graph."""
    with noted_launches() as noted:
        call()
    return (*noted.values(), *getattr(call, "kernels", ()))


@contextmanager
def no_garbage_collection():
    """Disable garbage collection: it takes longer than a launch, and may free memory during a capture, which fails."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _warm_up(calls):
    """Compile, load and allocate before the capture, on a side stream as torch's graphs require."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls:
            call()
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()


def _capture(calls, launches):
    import torch

    graph = torch.cuda.CUDAGraph()
    # thread_local: other threads (NCCL's watchdog) may call CUDA during the capture.
    with no_garbage_collection(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(launches):
            calls[i % len(calls)]()
    return graph


def _estimate_us(calls):
    """Estimate the time of one launch from one short graph; an eager loop would measure the CPU."""
    import torch

    launches = max(20, len(calls))
    graph = _capture(calls, launches)
    graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / launches


def _choose_launches(estimate_us, sets):
    """Return the launches that take about REPLAY_US: 20 to 500, a multiple of the number of sets if possible."""
    launches = max(20, min(500, round(REPLAY_US / max(estimate_us, 1e-3))))
    rounds = max(1, min(-(-launches // sets), 500 // sets))
    return rounds * sets


def _call_times(named, repeats, batch, synchronize, clock):
    """Measure call times; tests pass their own ``synchronize`` and ``clock``, which returns nanoseconds."""

    def batch_us(call, count):
        synchronize()
        start = clock()
        for _ in range(count):
            call()
        return (clock() - start) / 1000 / count

    def whole_call_us(call):  # including the GPU's work, which fills the time between two batches
        start = clock()
        call()
        synchronize()
        return max(clock() - start, 1) / 1000

    counts, kernels, samples = {}, {}, {name: [] for name in named}
    for name, call in named.items():
        with noted_launches() as noted:
            batch_us(call, 2)
        kernels[name] = noted.values()
        counts[name] = max(1, min(batch, int(CALL_BUDGET_S * 1e6 / repeats / whole_call_us(call))))
    with no_garbage_collection():
        for name in shuffled_rounds(named, repeats):
            samples[name].append(batch_us(named[name], counts[name]))
    synchronize()
    return {name: Stats.of(values, kernels[name]) for name, values in samples.items()}
