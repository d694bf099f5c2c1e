"""Variants of the block-scaled steps that explain their times: without a part of the kernel, or with a trace of tiles.

Their results are wrong, or not used; see ``block_scale_steps.py``. Also the energy of a launch.
"""

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numba import cuda, int32, int64, uint32

from moe_numba import simulator
from moe_numba.course.lessons.grouped_gemm_scales import kernel as kernel_in_parts
from moe_numba.course.lessons.grouped_gemm_scales import parts as block_scale_parts
from moe_numba.course.lessons.grouped_gemm_scales.kernel import make_skip_stages
from moe_numba.course.lessons.grouped_gemm_scales.parts import (
    OneBufferLayout,
    make_multiply_by_scales,
    make_scales_by_one,
    make_store_by_lanes,
    make_tma_producer_without_look_ahead,
)
from moe_numba.course.lessons.grouped_gemm_scales.steps import SIGNATURE, TRACE_FIELDS
from moe_numba.course.lessons.grouped_gemm_scales.tile_traces import Tile
from moe_numba.course.steps.simulate import changed_source, define, source_of
from moe_numba.grouped_gemm.block_scaled.config import BLOCK_M
from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.runtime.sass import MachineCode, compile_apart


def _define(source, factory, module=block_scale_parts, **names):
    return define(source, vars(module) | names, f"changed {factory.__name__}")[factory.__name__]


# Consumers


@cache
def make_multiply_nothing(config, layout):
    """As `make_multiply_by_scales`, but only wait for the stages and release them: loads alone."""
    skip_stages, zeros = make_skip_stages(config, layout), (np.float32(0),) * (config.block_n // 2)

    @cuda.jit(device=True)
    def multiply(smem, lane, stage, phase, k_blocks, x_offset, row):
        stage, phase = skip_stages(smem, lane, stage, phase, k_blocks)
        return zeros, stage, phase

    return multiply


_WAIT = "mbarrier_wait_parity(smem.barriers, full + stage, phase)\n"
_LOAD = "a, b, w_0, w_1, w_2 = load_scales(smem, stage, row)\n"
_FACTORS = "a, b = (a * w_0, a * w_1, a * w_2), (b * w_0, b * w_1, b * w_2)\n"
_ZEROS = "        acc = zeros\n"


@cache
def make_multiply_loading_once(config, layout):
    """As `make_multiply_by_scales`, but use the factors of a tile's first stage for all of its stages."""
    source = changed_source(make_multiply_by_scales, f"            {_LOAD}            {_FACTORS}", "")
    source = changed_source(source, _ZEROS, f"{_ZEROS}        {_WAIT}        {_LOAD}        {_FACTORS}")
    return _define(source, make_multiply_by_scales)(config, layout)


@cache
def make_multiply_exchanging_rows(config, layout):
    """As `make_multiply_by_scales`, but wrong: each of a thread's two rows has the scale of the other."""
    source = changed_source(make_multiply_by_scales, "a, b, w_0, w_1, w_2 = load", "b, a, w_0, w_1, w_2 = load")
    return _define(source, make_multiply_by_scales)(config, layout)


@cache
def make_halves_in_new_registers(config, layout):
    """As ``make_multiply_halves`` of ``kernel.py``, with registers that the compiler chooses for each wgmma result."""
    factory = kernel_in_parts.make_multiply_halves
    source = changed_source(factory, ', "e4m3", overwrite=True)', ', "e4m3")')
    source = changed_source(source, "wgmma(product, x, weight)", "wgmma(x, weight)")
    source = changed_source(source, "wgmma(product, x, uint64", "wgmma(x, uint64")
    source = changed_source(source, "second, product, ready = zeros, zeros, zeros,", "second, ready = zeros, zeros,")
    return _define(source, factory, kernel_in_parts)(config, layout)


@cache
def make_traced_consumer(config, layout):
    """As ``make_consumer`` of ``kernel.py``, but record when a tile is computed; see `block_scale_steps.StepLaunch`.

    With a :class:`OneBufferLayout` it stores as the steps with that layout do.
    """
    factory = kernel_in_parts.make_consumer
    if isinstance(layout, OneBufferLayout):
        factory = _define(source_of(factory), factory, kernel_in_parts, make_store=make_store_by_lanes)
    consumer, columns = factory(config, layout), config.columns

    @cuda.jit(device=True)
    def traced(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column):
        start = globaltimer()
        stage, phase = consumer(smem, output, warp, lane, stage, phase, k_blocks, row, rows, column)
        if warp == 0 and lane == 0 and rows > 0 and column < output.n:
            tiles = int32((output.n + columns - 1) // columns)
            at = int64(int64(row) * tiles + column // columns) * TRACE_FIELDS
            output.y_scale[at] = int32(uint32(start) & uint32(0x7FFFFFFF))
            output.y_scale[at + 1] = int32(uint32(globaltimer()) & uint32(0x7FFFFFFF))
            output.y_scale[at + 2] = int32(cuda.blockIdx.x + 1)
        return stage, phase

    return traced


def waiting_share(tiles: Iterable[Tile]) -> float:
    """Return the share of the CTAs' time in which they wait for the first stage of a tile, apart from their first one.

    A traced tile begins when its first stage has arrived.
    """
    waited = total = 0.0
    of_cta: dict[int, list[Tile]] = {}
    for tile in tiles:
        of_cta.setdefault(tile.cta, []).append(tile)
    for own in of_cta.values():
        own.sort(key=lambda tile: tile.start_us)
        waited += sum(max(0.0, after.start_us - tile.end_us) for tile, after in zip(own, own[1:]))
        total += own[-1].end_us - own[0].start_us
    return waited / total if total else 0.0


# Epilogue


@cache
def make_store_nothing(n, layout, first_buffer=0):
    """As `make_store_by_lanes` behind a condition that is never true, so that the compiler keeps the accumulators."""
    store_by_lanes = make_store_by_lanes(n, layout, first_buffer)

    @cuda.jit(device=True)
    def store(smem, output, warp, lane, acc, row, rows, column):
        if rows > BLOCK_M:
            store_by_lanes(smem, output, warp, lane, acc, row, rows, column)

    return store


# Producers


@cache
def make_scales_without_loads(config, layout):
    """As `make_scales_by_one`, with ones instead of the loads from global memory."""
    source = changed_source(make_scales_by_one, "scales.weight[weight_index + k_block]", "float32(1)")
    source = changed_source(source, "scales.x[index]", "float32(1)")
    return _define(source, make_scales_by_one)(config, layout)


@cache
def make_tma_producer_without_loads(config, layout):
    """As `make_tma_producer_without_look_ahead` without its loads: a kernel with it computes alone."""
    factory = make_tma_producer_without_look_ahead
    expect = "mbarrier_arrive_expect_tx(barriers, full + stage, tma_bytes)"
    source = changed_source(factory, expect, "mbarrier_arrive(barriers, full + stage)")
    load = "load_weight(smem, offset, map_weight, k, column, second, g, full + stage, weight_policy, shares)\n"
    source = changed_source(source, f"                {load}", "")
    loads_of_x = (
        source.index("                to = int32(offset + x_offset)"),
        source.index("                stage, phase = adv"),
    )
    source = source[: loads_of_x[0]] + source[loads_of_x[1] :]
    return _define(source, factory, kernel_in_parts)(config, layout)


# Machine code


_SOURCE = "from moe_numba.course.lessons.grouped_gemm_scales import diagnoses, steps\n"


def machine_code(variants: Mapping[str, tuple[str, str]]) -> dict[str, MachineCode]:
    """Compile variants of steps for a Hopper GPU, in a process of its own.

    ``variants`` has for each label a key of ``block_scale_steps.KERNELS`` and the source of further parts, such as
    ``"make_multiply_halves=diagnoses.make_halves_in_new_registers"``.
    """
    request = "steps.make_step_kernel(steps.KERNELS[{0!r}][0], **steps.KERNELS[{0!r}][1] | dict({1}))[0]"
    return compile_apart(
        _SOURCE, {label: (request.format(*variant), SIGNATURE, THREADS, True) for label, variant in variants.items()}
    )


def main_loop(code: MachineCode) -> list[str] | None:
    """Return the instructions of the shortest loop with a wgmma; None without nvdisasm."""
    if code.opcodes is None or not code.loops:
        return None
    loops = [code.opcodes[first : last + 1] for first, last in code.loops]
    return min((loop for loop in loops if any(op.startswith("QGMMA") for op in loop)), key=len, default=None)


# Energy


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
