"""The kernels that one call launches on a GPU, as torch's profiler sees them."""

import re
from collections.abc import Callable, Iterable

from moe_numba import simulator


def launch_profile(call: Callable) -> list[list] | None:
    """Return the kernels of one call as [name, start, duration], in microseconds from the start of the first.

    Copies and fills of memory are no kernels. None in the simulator.
    """
    if simulator.ENABLED:
        return None
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):  # the first calls make plans
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(2):  # the first one also starts the profiler
            call()
            torch.cuda.synchronize()
    return kernels_of((e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA), calls=2)


def kernels_of(events: Iterable, calls: int = 1) -> list[list]:
    """Return the kernels among a profiler's GPU events, in order of their starts, with short names.

    Of several calls, which launch as many kernels each, those of the last one.
    """
    kernels = (event for event in events if not re.match("Mem(cpy|set)", event.name))
    found = sorted((event.time_range.start, event.time_range.end, event.name) for event in kernels)
    found = found[len(found) - len(found) // calls :]
    first = found[0][0] if found else 0
    return [[short_name(name), round(start - first, 2), round(end - start, 2)] for start, end, name in found]


def short_name(kernel: str) -> str:
    """Return the name of a C++ kernel without its namespace, template arguments and parameters.

    >>> short_name("void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>(at::cuda::TensorInfo<...>)")
    'gatherTopK'
    """
    name = re.sub(r"^void |\(anonymous namespace\)::", "", kernel)
    return re.split(r"[<(]", name, maxsplit=1)[0].rpartition("::")[2].strip() or kernel
