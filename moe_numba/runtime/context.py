"""The CUDA context of a thread, which the driver's functions need, and torch's current stream."""

from functools import cache

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices

# Looked up once, because every launch calls it; None without CUDA.
current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def bind_context(device):
    """Make a GPU's primary context current in this thread if it has none; a new thread has none."""
    from cuda.bindings import driver

    error, context = driver.cuCtxGetCurrent()
    if not error and not int(context):
        (error,) = driver.cuCtxSetCurrent(_primary_context(device))
    if error:
        raise RuntimeError(f"GPU {device}: its context cannot be made current: {error.name}")


@cache
def _primary_context(device):
    from cuda.bindings import driver

    error, context = driver.cuDevicePrimaryCtxRetain(driver.CUdevice(device))
    if error:
        raise RuntimeError(f"GPU {device} has no context: {error.name}")
    return context


def current_stream(device):
    """The raw handle of torch's current stream on a device. It changes under graph capture: ask at every call."""
    return 0 if simulator.ENABLED or devices.target() else current_raw_stream(device)
