"""The energy of a launch, which NVML counts."""

import ctypes
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from moe_numba import simulator


class Energy(NamedTuple):
    """What a launch costs while nothing else runs."""

    launch_us: float
    launch_mj: float
    sm_mhz: float  # mean clock of the SMs
    watts: float
    limit_watts: float


_LAUNCHES = 48  # in a graph


def energy_of(launch: Callable, seconds: float = 0.6, device: int = 0) -> Energy | None:
    """Launch a kernel for some time and return what NVML measures; None in the simulator or without NVML's counters.

    The launches are replayed as a CUDA graph, two of which are queued, so that the GPU never waits for the host. The
    energy counter is updated at intervals of several launches, so it is read when it changes.
    """
    nvml = None if simulator.ENABLED else _nvml()
    gpu = nvml and _nvml_device(nvml, device)
    if not gpu:
        return None
    read, clocks, launches, updates = _reader(nvml, gpu), [], 0, []
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin, before, previous = time.perf_counter(), read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong), None
    if before is None:
        return None
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            launch()
    start.record()
    while len(updates) < 2 or updates[-1][0] - updates[0][0] < seconds:
        graph.replay()
        launches += _LAUNCHES
        done = torch.cuda.Event()
        done.record()
        if previous is not None:
            previous.synchronize()
        previous, now = done, time.perf_counter()
        energy = read("nvmlDeviceGetTotalEnergyConsumption", ctypes.c_ulonglong)
        if energy != before and now - begin > seconds / 2:  # the first half reaches the power limit
            updates.append((now, energy))
            clocks.append(read("nvmlDeviceGetClockInfo", ctypes.c_uint, 1))  # NVML_CLOCK_SM
        before = energy
        if now - begin > 20 * seconds:  # the counter does not change
            return None
    stop.record()
    stop.synchronize()
    (t_0, e_0), (t_1, e_1) = updates[0], updates[-1]
    launch_us, watts = start.elapsed_time(stop) * 1e3 / launches, (e_1 - e_0) / 1e3 / (t_1 - t_0)
    limit = read("nvmlDeviceGetEnforcedPowerLimit", ctypes.c_uint)
    return Energy(launch_us, watts * launch_us / 1e3, sum(clocks) / len(clocks), watts, (limit or 0) / 1e3)


def _nvml():
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return None if nvml.nvmlInit_v2() else nvml
    except (OSError, AttributeError):
        return None


def _nvml_device(nvml, device):
    gpu, uuid = ctypes.c_void_p(), str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    return None if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(gpu)) else gpu


def _reader(nvml, gpu):
    """Return ``read(function, ctype, *arguments)``: a value that NVML returns through a pointer, or None."""

    def read(function, ctype, *arguments):
        value = ctype()
        return None if getattr(nvml, function)(gpu, *arguments, ctypes.byref(value)) else value.value

    return read
