"""Clock, power and energy under sustained load, which NVML measures, beside times in short bursts.

A GPU lowers its clock until it stays within its power limit, but not at once. So a kernel near the limit has two times.
"""

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.steps.lesson import Lesson, Table


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


def power_table(lesson: Lesson, calls: Mapping[str, Callable], flops: float | None = None) -> Table:
    """Time calls in short bursts and under sustained load, or look both up in the lesson's record.

    With ``flops``, the floating-point operations in FP8 of each call, the table also has the share of what the tensor
    cores can do at the measured clock.
    """
    bursts, lines = lesson.times("power", {name: [call] for name, call in calls.items()}), []
    for name, call in calls.items():
        energy, step = energy_of(call), f"power: {name}"
        if energy is not None:
            lesson.diagnosed[step]["energy"] = {key: round(value, 3) for key, value in energy._asdict().items()}
        if not bursts:
            lines.append([name, "not timed"])
            continue
        row = lesson.diagnosed.get(step) or records.find(records.recorded(lesson.topic), step=step, size=lesson.size)
        lines.append([name, records.format_us(bursts[name]), *_texts(row.get("energy"), flops)])
    headings = ["kernel", "us, short bursts", "us, sustained load", "SM clock, MHz", "power, W", "mJ per launch"]
    headings += ["of the FP8 peak at this clock"] if flops else []
    return Table(headings, [line + [""] * (len(headings) - len(line)) for line in lines])


def _texts(found, flops):
    if not found:
        return ["not measured"]
    power = f"{found['watts']:.0f} of {found['limit_watts']:.0f}"
    texts = [records.format_us(found["launch_us"]), f"{found['sm_mhz']:.0f}", power, f"{found['launch_mj']:.0f}"]
    if flops:
        limits = chip_limits()
        peak_us = flops / (limits.tensor_flops["float8_e4m3fn"] / limits.tensor_clock * found["sm_mhz"])
        texts.append(f"{peak_us / found['launch_us']:.0%}")
    return texts


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
