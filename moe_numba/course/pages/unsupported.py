"""Which errors mean that the GPU cannot run a kernel: notebooks print them and go on."""

import re

import torch

from moe_numba.runtime.device import UnsupportedDeviceError
from moe_numba.simulator.capability import UnsupportedInstruction

# Errors of ptxas and of the driver, known by their texts: kernels that Numba launches raise them as they come.
_CANNOT_RUN = re.compile(
    r"'[^']*' (requires \.target|not supported on \.target|cannot be compiled for architecture)"
    r"|CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE"  # more blocks than fit at once
    r"|CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"  # more registers or shared memory than a block can have
    r"|more than a block of this GPU can have"
)


def why_not_run(error: Exception) -> str | None:
    """Return the reason if an error means that the GPU lacks what a kernel needs, otherwise None.

    Returns
    -------
    str or None
        The line of the error's own text that says it.
    """
    text = str(error)
    if isinstance(error, UnsupportedDeviceError | UnsupportedInstruction | torch.OutOfMemoryError):
        return text.splitlines()[0]
    if line := next(filter(_CANNOT_RUN.search, text.splitlines()), None):
        return re.sub(r"^.*\berror\s*: ", "", line)
    return None
