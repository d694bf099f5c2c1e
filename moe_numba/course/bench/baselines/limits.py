"""What a GPU does at best: the yardsticks that topics measure beside their kernels."""

import torch
from numba import cuda

from moe_numba.course.bench import records
from moe_numba.course.bench.timing import kernel_times
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.runtime.launch import launch


def copy_bandwidth():
    """Bytes a second that a large copy reads and writes on this GPU: the memory's ceiling as it is."""
    a = torch.rand(1 << 28, device="cuda")
    b = torch.empty_like(a)
    # A kernel, since a plain copy inside a graph goes to the copy engine, which is slower.
    us = kernel_times({"": lambda: torch.add(a, 1, out=b)}, launches=5, replays=20)[""].median
    return 2 * a.numel() * a.element_size() / (us * 1e-6)


@cuda.jit
def _empty(x):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()


def empty_kernel():
    """Rows of what a kernel that does nothing takes, one after the other and with programmatic dependent launch."""
    x = torch.zeros(1, device="cuda")
    calls = {False: lambda: launch(_empty, 1, 32, x), True: lambda: launch(_empty, 1, 32, x, dependent=True)}
    kernel = kernel_times(calls)
    return [records.row("empty kernel", config={"dependent": d}, kernel=kernel[d]) for d in calls]
