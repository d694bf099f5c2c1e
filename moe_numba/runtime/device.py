"""Properties of GPUs that launches are planned with, and the compile-only mode, which needs no GPU."""

from functools import cache
from typing import NamedTuple

import torch

from moe_numba import simulator


class GPU(NamedTuple):
    """Properties of one GPU."""

    name: str
    capability: tuple  # compute capability, (major, minor)
    sm_count: int
    shared_bytes: int  # most shared memory of a block, after opting in


H200 = GPU("NVIDIA H200", (9, 0), 132, 227 * 1024)

_target, _on_launch = None, None


def compile_only(gpu, on_launch):
    """From now on, plan launches for ``gpu`` and call ``on_launch`` instead of compiling and launching.

    It lasts for the rest of the process, because plans are cached. Tensors are on the CPU.

    Parameters
    ----------
    gpu : GPU
    on_launch : callable
        ``on_launch(kernel, signature, options)``, called for each launch.
    """
    global _target, _on_launch
    if simulator.ENABLED:
        raise RuntimeError("compile_only needs Numba's compiler: set MOE_NUMBA_SIMULATE=0")
    _target, _on_launch = gpu, on_launch
    gpu_of.cache_clear()


def target():
    """The GPU of the compile-only mode, or None."""
    return _target


def on_launch(kernel, signature, options):
    """Report a launch in compile-only mode."""
    _on_launch(kernel, signature, options)


@cache
def gpu_of(device):
    """The properties of a ``torch.device`` or device index."""
    if _target is not None:
        return _target
    properties = torch.cuda.get_device_properties(device)
    return GPU(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )
