"""The CUDA context of a thread: the driver's functions need one that is current."""

from functools import cache


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
