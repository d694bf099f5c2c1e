"""Limits of the chip: peak rates of this GPU, and what a copy and an empty kernel reach on it."""

from dataclasses import dataclass, replace
from functools import cache

import torch
from numba import cuda

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.timing import kernel_times
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import launch


@dataclass(frozen=True)
class ChipLimits:
    """Peak rates of a GPU, in bytes, operations and clocks per second."""

    source: str  # where the figures come from, to be printed beside them
    sm_count: int
    boost_clock: float
    tensor_clock: float
    hbm_bandwidth: float
    copy_bandwidth: float
    l2_bandwidth: float
    tensor_flops: dict[str, float]

    def __str__(self):
        return (
            f"{self.sm_count} SMs, {self.boost_clock / 1e9:.2f} GHz, a copy {self.copy_bandwidth / 1e12:.2f} TB/s "
            f"({self.source})"
        )


H200 = ChipLimits(
    source="data sheet of an H200, and a copy recorded on one",
    sm_count=devices.H200.sm_count,
    boost_clock=1.98e9,  # highest SM clock; kernels without tensor core work run at it
    # The clock of the data sheet's tensor peak: 1979e12 / (132 SMs x 8192 FP8 operations per clock). It stands for the
    # clock under tensor load, which a power limit can lower further.
    tensor_clock=1.83e9,
    hbm_bandwidth=4.8e12,  # data sheet
    copy_bandwidth=4.3e12,  # reached by a large copy, reads plus writes; see `copy_bandwidth` below
    l2_bandwidth=5.5e12,  # no official figure; measured by others on an H100 PCIe with 114 SMs, so rather low
    tensor_flops={"bfloat16": 989e12, "float8_e4m3fn": 1979e12},  # data sheet, dense
)

# Dense operations per clock and SM with float32 accumulation, by compute capability: bfloat16, then FP8. A type that
# the tensor cores lack has the rate of the type that it is converted to. GeForce GPUs may have half of it.
_TENSOR_FLOPS_PER_CLOCK = {
    (7, 5): (128, 128),
    (8, 0): (2048, 2048),
    (8, 6): (1024, 1024),
    (8, 9): (1024, 2048),
    (9, 0): (4096, 8192),
    (10, 0): (8192, 16384),
    (12, 0): (1024, 2048),
}


@cache
def chip_limits() -> ChipLimits:
    """Return the limits of the current GPU; its copy bandwidth is measured, once per process.

    An H200 has the figures of its data sheet. The limits of other GPUs are computed from their properties; tensor cores
    are taken to run at the highest clock, and the L2 cache to have an H200's bytes per clock and SM. The simulator has
    no limits: it returns an H200's.
    """
    if simulator.ENABLED:
        return H200
    gpu = devices.gpu_of(torch.cuda.current_device())
    if gpu.name == devices.H200.name:
        source = "data sheet of an H200, and a copy measured on this one"
        return replace(H200, source=source, copy_bandwidth=copy_bandwidth())
    return _from_properties(gpu, *_clocks(torch.cuda.current_device()), copy_bandwidth())


def _from_properties(gpu, clock, memory_clock, bus_bits, copied):
    """Compute the limits of a GPU from its clocks in Hz, the width of its memory bus, and what a copy reaches."""
    known = [capability for capability in _TENSOR_FLOPS_PER_CLOCK if capability <= gpu.hardware_capability]
    bf16, fp8 = _TENSOR_FLOPS_PER_CLOCK[max(known, default=(7, 5))]
    sm_clocks = gpu.sm_count * clock
    return ChipLimits(
        source=f"properties of this {gpu.name}, and a copy measured on it",
        sm_count=gpu.sm_count,
        boost_clock=clock,
        tensor_clock=clock,
        hbm_bandwidth=2 * memory_clock * bus_bits / 8,  # two transfers per clock
        copy_bandwidth=copied,
        l2_bandwidth=H200.l2_bandwidth / (H200.sm_count * H200.tensor_clock) * sm_clocks,
        tensor_flops={"bfloat16": bf16 * sm_clocks, "float8_e4m3fn": fp8 * sm_clocks},
    )


def _clocks(device):
    """Return the highest clocks of the SMs and of the memory in Hz, and the width of the memory bus in bits."""
    from cuda.bindings import driver

    def attribute(name):
        error, value = driver.cuDeviceGetAttribute(
            getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), driver.CUdevice(device)
        )
        if error:
            raise RuntimeError(f"{error.name}: attribute {name} of GPU {device}")
        return value

    return attribute("CLOCK_RATE") * 1e3, attribute("MEMORY_CLOCK_RATE") * 1e3, attribute("GLOBAL_MEMORY_BUS_WIDTH")


@cache
def copy_bandwidth() -> float:
    """Measure the bytes per second that a large copy reads plus writes on the current GPU, once per process."""
    a = torch.rand(1 << 28, device="cuda")
    b = torch.empty_like(a)
    # An addition: in a graph, a plain copy would run on the copy engine, which is slower.
    us = kernel_times({"": lambda: torch.add(a, 1, out=b)}, launches=5, replays=20)[""].median
    return 2 * a.numel() * a.element_size() / (us * 1e-6)


@cuda.jit
def _empty(x):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()


def empty_kernel():
    """Measure an empty kernel, serialised and with programmatic dependent launch; return rows for a record."""
    x = torch.zeros(1, device="cuda")
    calls = {False: lambda: launch(_empty, 1, 32, x), True: lambda: launch(_empty, 1, 32, x, dependent=True)}
    kernel = kernel_times(calls)
    return [records.row("empty kernel", config={"dependent": d}, kernel=kernel[d]) for d in calls]
