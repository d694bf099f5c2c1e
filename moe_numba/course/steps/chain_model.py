"""A model of a kernel's time that knows latencies and nothing else, and how far it is off.

The model multiplies what the busiest warp does between two barriers by the recorded latencies (`bench.latencies`).
Loads that overlap, instructions between the operations and the work of the other warps are not in it. Its error is that
for three scans whose phases were recorded: one thread, a tree of sums, and warps with a second level.
"""

import functools

import numpy as np
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.latencies import latencies
from moe_numba.simulator.profiler.report import Counted

_FULL, _EXPERTS, _THREADS = 0xFFFFFFFF, 256, 1024


def chain_us(counted: Counted, gpu: str = "H200") -> float:
    """Return the modelled time of the critical path of a kernel, or of a part of it, in microseconds."""
    return counted.longest_chain(latencies(gpu).ns) / 1000


@functools.cache
def compared_us(gpu: str = "H200") -> dict[str, tuple[float, float]]:
    """Return, for each scan with a recorded phase, the modelled and the recorded time in microseconds.

    It runs the scans in the simulator, once per process.
    """
    ladder, found = records.recorded("align_ladder", gpu.lower()), {}
    for step, scan in _SCANS.items():
        row = ladder and records.select(ladder, step=step)
        recorded_us = row[0].get("phases_us", {}).get("scan") if row else None
        if recorded_us:
            with simulator.profile() as profile:
                _scan_kernel(scan)[1, _THREADS](np.ones(_EXPERTS, np.int32), np.zeros(_EXPERTS, np.int32))
            found[step] = chain_us(profile.kernels[0].part(scan.__name__), gpu), recorded_us
    return found


def describe_error(gpu: str = "H200") -> str:
    """Return a sentence on the model's error."""
    times = list(compared_us(gpu).values())
    if not times:
        return "How far this model is off was not measured."
    factors = ", ".join(f"{modelled / recorded:.2f}" for modelled, recorded in times)
    in_order = sorted(times) == sorted(times, key=lambda both: both[1])
    return (
        f"The model knows latencies alone: for {len(times)} scans it gives {factors} times the time recorded on an "
        f"{gpu}, {'in the right order' if in_order else 'not in the right order'}."
    )


def error_factor(gpu: str = "H200") -> float:
    """Return the largest factor between modelled and recorded times; infinite if none was recorded."""
    ratios = [modelled / recorded for modelled, recorded in compared_us(gpu).values()]
    return max((max(ratio, 1 / ratio) for ratio in ratios), default=float("inf"))


@functools.cache
def _scan_kernel(scan):
    @cuda.jit
    def kernel(x, y):
        counts = cuda.shared.array(_EXPERTS, int32)
        i = cuda.threadIdx.x
        if i < _EXPERTS:
            counts[i] = x[i]
        cuda.syncthreads()
        scan(counts, y)
        cuda.syncthreads()

    return kernel


@cuda.jit(device=True)
def _one_thread(counts, ends):
    if cuda.threadIdx.x == 0:
        total = int32(0)
        for e in range(_EXPERTS):
            total = int32(total + counts[e])
            ends[e] = total
    cuda.syncthreads()


@cuda.jit(device=True)
def _tree(counts, ends):
    i, stride = cuda.threadIdx.x, 1
    while stride < _EXPERTS:
        right = 2 * stride * (i + 1) - 1
        if right < _EXPERTS:
            counts[right] += counts[right - stride]
        stride *= 2
        cuda.syncthreads()
    if i == 0:
        counts[_EXPERTS - 1] = 0
    cuda.syncthreads()
    while stride > 1:
        stride //= 2
        right = 2 * stride * (i + 1) - 1
        if right < _EXPERTS:
            left = counts[right - stride]
            counts[right - stride] = counts[right]
            counts[right] += left
        cuda.syncthreads()
    if i < _EXPERTS:
        ends[i] = counts[i]
    cuda.syncthreads()


@cuda.jit(device=True)
def _two_levels(counts, ends):
    i, lane, warp = cuda.threadIdx.x, cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    sums = cuda.shared.array(32, int32)
    value = counts[i] if i < _EXPERTS else int32(0)
    for level in range(5):
        below = cuda.shfl_up_sync(_FULL, value, 1 << level)
        value += below if lane >= 1 << level else int32(0)
    if lane == 31:
        sums[warp] = value
    cuda.syncthreads()
    total = sums[lane]
    for level in range(5):
        below = cuda.shfl_up_sync(_FULL, total, 1 << level)
        total += below if lane >= 1 << level else int32(0)
    before = cuda.shfl_sync(_FULL, total, (warp - 1) & 31)
    if i < _EXPERTS:
        ends[i] = value + (before if warp > 0 else int32(0))
    cuda.syncthreads()


# Step of the recorded ladder whose phase is such a scan -> the scan.
_SCANS = {"0x3 plain counters": _one_thread, "0x3 Blelloch scan": _tree, "0x4, one pass": _two_levels}
