"""What notebooks do where the GPU cannot run a kernel: they print why, and go on."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def attempt(what: str) -> Iterator[None]:
    """Run the statements of a ``with`` block; if the GPU cannot, print ``what`` and the reason. Raise other errors."""
    try:
        yield
    except Exception as error:
        if (reason := why_not_run(error)) is None:
            raise
        print(f"{what}: not run: {reason}")
