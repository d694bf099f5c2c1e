"""Limits of the chip: an H200's published figures, and what a copy and an empty kernel reach on this GPU."""

from dataclasses import dataclass

import torch
from numba import cuda

from moe_numba.course.bench import records
from moe_numba.course.bench.timing import kernel_times
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.runtime import device as devices
from moe_numba.runtime.launch import launch


@dataclass(frozen=True)
class ChipLimits:
    """Peak rates of a GPU, in bytes, operations and clocks per second."""

    sm_count: int
    boost_clock: float
    tensor_clock: float
    hbm_bandwidth: float
    copy_bandwidth: float
    l2_bandwidth: float
    tensor_flops: dict[str, float]


H200 = ChipLimits(
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


def copy_bandwidth():
    """Measure the bytes per second that a large copy reads plus writes on this GPU."""
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
