"""Kernels that take tensor maps by value, started once from a notebook or a test: on a GPU and in the simulator.

``moe_numba.runtime.launch.launch`` is the same for kernels without such maps. On a GPU a map's 128 bytes travel with
the other arguments (see ``moe_numba.runtime.compile``); in the simulator the kernel gets a pointer to them.
"""

import torch

from moe_numba.runtime.compile import MAP, program
from moe_numba.runtime.launch import _argument, current_stream
from moe_numba.runtime.tensor_map import tensor_map_value

__all__ = ["MapByValue", "start"]


class MapByValue:
    """A tensor map as :func:`start` takes it, with the arguments of ``tensor_map``."""

    def __init__(self, tensor, box, *, swizzle=0):
        self.value = tensor_map_value(tensor, box, swizzle=swizzle)


def start(kernel, grid, threads, *args, shared_bytes=0, cluster=None, dependent=False):
    """Start a kernel once, with the types taken from the arguments.

    Parameters
    ----------
    kernel : a ``@cuda.jit`` function over flat pointers and numbers; a map reaches it as a pointer to bytes
    grid : int or tuple of int
        Blocks of the grid.
    threads : int
        Of a block.
    *args
        As for :func:`moe_numba.runtime.launch.launch`, and :class:`MapByValue`.
    shared_bytes, cluster, dependent
        As for :func:`moe_numba.runtime.launch.launcher`.
    """
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
    if device is None:
        raise ValueError(f"start of {kernel.__name__}: no argument is a tensor, so no device is named")
    given = [(MAP, a.value) if isinstance(a, MapByValue) else _argument(a) for a in args]
    signature, values = zip(*given, strict=True)
    index = device.index or 0
    made = program(
        kernel, signature, index, threads=threads, shared_bytes=shared_bytes, cluster=cluster, dependent=dependent
    )
    made(grid, threads, current_stream(index), *values)
