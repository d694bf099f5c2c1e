"""Properties of GPUs that launches are planned with, and the compile-only mode, which needs no GPU.

``MOE_NUMBA_ARCH=80`` makes every plan see a GPU of compute capability 8.0, with that architecture's shared memory.
"""

from functools import cache
from typing import NamedTuple

import torch

from moe_numba import simulator
from moe_numba.simulator import capability as requested_capability


class UnsupportedDeviceError(RuntimeError):
    """The GPU lacks what a kernel needs.

    Examples
    --------
    >>> issubclass(moe_numba.UnsupportedDeviceError, RuntimeError)
    True
    """


class GPU(NamedTuple):
    """Properties of one GPU."""

    name: str
    capability: tuple  # compute capability that code is generated for, (major, minor)
    sm_count: int
    shared_bytes: int  # most shared memory of a block, after opting in
    hardware_capability: tuple  # compute capability of the GPU itself

    @property
    def has_clusters(self):
        """Whether the GPU has thread block clusters and programmatic dependent launch."""
        return self.capability >= (9, 0)

    @property
    def has_wgmma(self):
        """Whether the GPU has wgmma, which only code for sm_90a may contain: not PTX that a newer GPU compiles."""
        return self.capability == self.hardware_capability == (9, 0)

    @property
    def arch(self):
        """The architecture that PTX is generated for. The suffix admits instructions that only this one has."""
        suffix = ("a",) if self.capability == self.hardware_capability and self.capability >= (9, 0) else ()
        return self.capability + suffix

    @property
    def hardware_arch(self):
        """The architecture that PTX is assembled for."""
        return self.arch if self.capability == self.hardware_capability else self.hardware_capability


def shared_bytes_of(capability):
    """Return the most shared memory that a block of a GPU can have, after opting in, in bytes."""
    limits = requested_capability.SM_LIMITS.get(capability)
    return 1024 * (limits.shared_kib_of_a_block if limits else 99)


def gpu_like(capability, name=None, sm_count=requested_capability.SM_COUNT):
    """Return a :class:`GPU` of a compute capability, for compiling without one."""
    name = name or "a GPU of compute capability {}.{}".format(*capability)
    return GPU(name, capability, sm_count, shared_bytes_of(capability), capability)


H200 = gpu_like((9, 0), "NVIDIA H200")

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


def persistent_ctas(device, multiple=1):
    """Number of CTAs of a persistent kernel: one per SM, rounded down to a multiple; two in the simulator."""
    return 2 if simulator.ENABLED else gpu_of(device).sm_count // multiple * multiple


@cache
def gpu_of(device):
    """The properties of a ``torch.device`` or device index."""
    if _target is not None:
        return _target
    if simulator.ENABLED:
        return gpu_like(requested_capability.SIMULATED, "the simulated GPU")
    properties = torch.cuda.get_device_properties(device)
    own = properties.major, properties.minor
    chosen, shared_bytes = requested_capability.requested() or own, properties.shared_memory_per_block_optin
    if chosen > own:
        raise UnsupportedDeviceError(
            f"{requested_capability.VARIABLE} asks for compute capability {chosen[0]}.{chosen[1]}; {properties.name} "
            f"has {own[0]}.{own[1]}"
        )
    if chosen != own:
        shared_bytes = min(shared_bytes, shared_bytes_of(chosen))
    return GPU(properties.name, chosen, properties.multi_processor_count, shared_bytes, own)
