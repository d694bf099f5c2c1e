"""Compilation of kernels by several processes, before the processes that launch them start.

Machine code is cached on disk, so that other processes can compile in advance.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from moe_numba.runtime import cubin_cache, device
from moe_numba.runtime.compile_calls import compile_calls


class KernelDefinition(NamedTuple):
    """A kernel and what it is compiled for."""

    make: Callable  # of a module: ``make(*constants)`` is the kernel
    constants: tuple
    signature: tuple
    block: int  # threads of a CTA
    shared_bytes: int = 0
    ctas_per_sm: int = 1  # which must fit

    @property
    def launch_bounds(self) -> int | tuple[int, int]:
        """The limits within which the compiler uses registers."""
        return self.block if self.ctas_per_sm == 1 else (self.block, self.ctas_per_sm)

    @property
    def configuration(self) -> tuple:
        """What is the same on all ranks that use the kernel together."""
        return self.make.__name__, self.constants[0]


def compile_ahead(definitions: Iterable[KernelDefinition], index: int = 0, processes: int | None = None) -> int:
    """Compile kernels for a GPU into the cubin cache.

    Parameters
    ----------
    definitions : iterable of KernelDefinition
        Equal ones are compiled once.
    index : int
        Index of the GPU.
    processes : int, optional
        By default one per core, at most 32.

    Returns
    -------
    int
        The number of different kernels; 0 if the cache is off, and nothing was compiled.
    """
    found = list(dict.fromkeys(definitions))
    if not found or cubin_cache.folder() is None:
        return 0
    for _ in compile_calls([partial(_report, definition) for definition in found], device.gpu_of(index), processes):
        pass
    return len(found)


def _report(definition):
    options = dict(launch_bounds=definition.launch_bounds)
    device.on_launch(definition.make(*definition.constants), definition.signature, options)
