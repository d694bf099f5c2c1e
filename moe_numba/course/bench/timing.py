"""Two times for every kernel, in microseconds.

**Kernel time** is what the GPU spends: many launches inside one CUDA graph, so that the host is out of the picture.
It contains the gap between two graph nodes (about half a microsecond), as it would in a serving stack's graph.
**Call time** is what the host spends in the Python call: what a user pays who calls the function eagerly.

In the simulator there is no time to take: every function here runs its calls once and gives None.
"""

import gc
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from moe_numba import simulator

REPLAY_US = 1500  # long enough to drown the cost of starting a graph, short enough to repeat
CALL_BUDGET_S = 1.0  # for one function's call time


@dataclass(frozen=True)
class Stats:
    """Median, 10th and 90th percentile, in microseconds."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples):
        """The statistics of ``samples``, microseconds each."""
        median, p10, p90 = np.percentile(samples, [50, 10, 90])
        return cls(float(median), float(p10), float(p90))


def kernel_time(calls, *, launches=None, replays=30):
    """Time on the GPU for one launch.

    Parameters
    ----------
    calls : callable or list of callables
        Each launches once on torch's current stream. A list takes turns: give one callable for each set of inputs
        (see ``rotating``) when the bandwidth of the memory, not of the L2, is to be measured.
    launches : int, optional
        Launches in one graph; by default as many as take about 1.5 ms, between 20 and 500.
    replays : int
        How often the graph is timed.

    Returns
    -------
    Stats, or None in the simulator.
    """
    return kernel_times({"": calls}, launches=launches, replays=replays)[""]


def kernel_times(named, *, launches=None, replays=30):
    """``kernel_time`` of several kernels, ``{name: calls}``, replayed by turns so that clock drift hits all alike.

    Every round goes through the names in a new order: none always runs behind the same neighbour.
    """
    named = {name: [calls] if callable(calls) else list(calls) for name, calls in named.items()}
    if simulator.ENABLED:
        return _run_once([call for calls in named.values() for call in calls], named)
    import torch

    counts, graphs = {}, {}
    for name, calls in named.items():
        _warm_up(calls)
        counts[name] = launches or _choose_launches(_estimate_us(calls), len(calls))
        graphs[name] = _capture(calls, counts[name])
        graphs[name].replay()  # the first replay uploads the graph
    events = {name: [] for name in graphs}
    # Nothing here waits for the GPU: each replay is queued while the one before it runs, and the host is not timed.
    for name in shuffled_rounds(graphs, replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graphs[name].replay()
        end.record()
        events[name].append((start, end))
    torch.cuda.synchronize()
    return {
        name: Stats.of([start.elapsed_time(end) * 1000 / counts[name] for start, end in pairs])
        for name, pairs in events.items()
    }


def call_time(call, *, repeats=40, batch=50):
    """Time on the host for one Python call, as an eager user pays it.

    ``batch`` calls follow each other without waiting for the GPU, which is idle when the batch begins; the time of
    one is the batch's by ``batch``. A function that takes long gets smaller batches, to stay near a second in all.

    Returns
    -------
    Stats over ``repeats`` batches, or None in the simulator.
    """
    return call_times({"": call}, repeats=repeats, batch=batch)[""]


def call_times(named, *, repeats=40, batch=50):
    """``call_time`` of several functions, ``{name: call}``, batches by turns."""
    if simulator.ENABLED:
        return _run_once(named.values(), named)
    import torch

    return _call_times(named, repeats, batch, torch.cuda.synchronize, time.perf_counter_ns)


def rotating(make, bytes_per_set, total=None):
    """Enough sets of inputs that none is still in the L2 when its turn comes again.

    Parameters
    ----------
    make : callable
        Makes one set.
    bytes_per_set : int
        What a kernel reads of one set, in bytes.
    total : int, optional
        Bytes of all sets together; by default more than twice the L2 (H200: 60 MB, so 128 MB).

    Returns
    -------
    list of 1 to 64 sets; one in the simulator, which has no L2.
    """
    if simulator.ENABLED:
        return [make()]
    if total is None:
        import torch

        # A little over twice: the L2 keeps no exact order of who came last.
        total = int(2.14 * torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size)
    return [make() for _ in range(_sets(bytes_per_set, total))]


def _sets(bytes_per_set, total):
    return max(1, min(64, -(-total // max(1, bytes_per_set))))


def _run_once(calls, names):
    for call in calls:
        call()
    return dict.fromkeys(names)


def shuffled_rounds(names, count):
    """Every name ``count`` times, in rounds, each in an order of its own (the same on every run)."""
    shuffle, order = random.Random(0).shuffle, list(names)
    for _ in range(count):
        shuffle(order)
        yield from order


@contextmanager
def _no_gc():
    """A garbage collection takes longer than a launch; one during a capture may free what the capture forbids."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _warm_up(calls):
    """Compile, load and allocate outside the capture, on a side stream as torch's graphs ask for."""
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
    # thread_local: other threads (NCCL's watchdog) may go on calling CUDA meanwhile.
    with _no_gc(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(launches):
            calls[i % len(calls)]()
    return graph


def _estimate_us(calls):
    """A first guess at one launch's time, from one short graph: an eager loop would measure the host."""
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
    """About REPLAY_US worth of launches, 20 to 500, and whole turns so that every set counts the same."""
    launches = max(20, min(500, round(REPLAY_US / max(estimate_us, 1e-3))))
    turns = max(1, min(-(-launches // sets), 500 // sets))
    return turns * sets


def _call_times(named, repeats, batch, synchronize, clock):
    """The host's part, with the clock (nanoseconds) as an argument so that a test can turn its hands."""

    def batch_us(call, count):
        synchronize()
        start = clock()
        for _ in range(count):
            call()
        return (clock() - start) / 1000 / count

    def whole_call_us(call):  # the GPU's work included: it is what fills the time between two batches
        start = clock()
        call()
        synchronize()
        return max(clock() - start, 1) / 1000

    counts, samples = {}, {name: [] for name in named}
    for name, call in named.items():
        batch_us(call, 2)
        counts[name] = max(1, min(batch, int(CALL_BUDGET_S * 1e6 / repeats / whole_call_us(call))))
    with _no_gc():
        for name in shuffled_rounds(named, repeats):
            samples[name].append(batch_us(named[name], counts[name]))
    synchronize()
    return {name: Stats.of(values) for name, values in samples.items()}
