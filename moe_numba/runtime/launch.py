"""Kernel launcher: compiles once per signature and calls the driver directly.

``kernel[grid, block](...)`` types and unpacks every argument in Python. Here a kernel is compiled once for a signature
of pointers, numbers and tensor maps. A call packs its arguments into one buffer for the driver, in a tenth of the time.
"""

import math
import threading
from functools import cache

import numpy as np
import torch

from moe_numba import simulator
from moe_numba.runtime import compilers
from moe_numba.runtime import device as devices
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.context import current_stream
from moe_numba.runtime.device import UnsupportedDeviceError
from moe_numba.runtime.driver_launch import Launcher, three
from moe_numba.runtime.recording import Launched, note_loaded, record, recordings
from moe_numba.runtime.tensor_map import TensorMap, address

__all__ = ["address", "launch", "launcher", "signature_of"]

# Torch's 16- and 8-bit floats reach a kernel as their bits: Numba's own types for them pull in C++ headers.
_POINTER_NAMES = {
    torch.bfloat16: "uint16*",
    torch.float16: "uint16*",
    torch.float8_e4m3fn: "uint8*",
    torch.float8_e5m2: "uint8*",
    torch.bool: "uint8*",
}
_LAUNCHERS_LOCK = threading.RLock()


class _CompileOnlyLauncher:
    """The same call in compile-only mode: reports the launch."""

    def __init__(self, kernel, signature, options):
        self._launch = kernel, signature, options

    def __call__(self, grid, block, stream, *values):
        devices.on_launch(*self._launch)


class _SimulatedLauncher:
    """The same call in the simulator."""

    device = 0

    def __init__(self, kernel, signature, options):
        self.launched = Launched(kernel, None, options)
        plain = ["uint8*" if s == TENSOR_MAP else s for s in signature]
        self._types = [np.dtype(s.removesuffix("*")) for s in plain]
        self._is_pointer = [s[-1] == "*" for s in plain]

    def __call__(self, grid, block, stream, *values):
        if recordings and record(self, grid, block, 0, values):
            return
        arguments = [
            (v.view(t) if v else v) if p else t.type(v)
            for v, t, p in zip(values, self._types, self._is_pointer, strict=True)
        ]
        with simulator.errors.ShortTraceback():
            simulator.run(self.launched.kernel, grid, block, arguments, **self.launched.options)


def launcher(
    kernel,
    signature,
    device,
    *,
    launch_bounds=None,
    shared_bytes=0,
    cluster=None,
    cooperative=False,
    dependent=False,
    carveout=None,
    cpp_entry=False,
):
    """Compile and load a kernel, once; the way in for public functions. Machine code is cached on disk.

    Parameters
    ----------
    kernel : a ``@cuda.jit`` function
    signature : tuple of str
        As for :func:`moe_numba.runtime.compile.compile_kernel`.
    device : int
        The index of the GPU; ignored in the simulator.
    launch_bounds : int or tuple, optional
        Maximum threads per block (and minimum blocks per SM). Required with a tensor map.
    shared_bytes : int
        Dynamic shared memory of a block, in bytes; the driver's limit of 48 KiB is raised where necessary.
    cluster : int or tuple, optional
        Blocks per thread block cluster.
    cooperative : bool
        Launch all blocks at once or fail, so that they may wait for one another.
    dependent : bool
        Programmatic dependent launch: the grid may start before the previous one in the stream has finished, and must
        call ``griddepcontrol_wait`` before it touches what that one writes. Ignored below compute capability 9.0.
    carveout : int, optional
        Percentage of an SM's L1 cache that should be shared memory. An SM changes it only while it runs nothing, so a
        dependent launch that needs more than the kernel before has left cannot start early; by default the driver
        leaves what the kernel itself needs. Ignored in the simulator.
    cpp_entry : bool
        As for :func:`moe_numba.runtime.compile.compile_kernel`; implied by a tensor map.

    Returns
    -------
    callable
        ``launch(grid, block, stream, *values)``, where ``stream`` is a raw handle or None for the current stream, a
        pointer's value is its address and a tensor map's its 128 bytes.
    """
    options = launch_bounds, shared_bytes, cluster, cooperative, dependent
    with _LAUNCHERS_LOCK:
        return _make_launcher(kernel, signature, device, options, carveout, cpp_entry, compilers.chosen())


@cache
def _make_launcher(kernel, signature, device, options, carveout, cpp_entry, compiler):
    options = dict(zip(("launch_bounds", "shared_bytes", "cluster", "cooperative", "dependent"), options, strict=True))
    gpu = devices.gpu_of(device)
    if not gpu.has_clusters:
        if options["cluster"]:
            raise UnsupportedDeviceError(
                f"{kernel.__name__} needs thread block clusters, which start at compute capability 9.0; {gpu.name} has "
                "{}.{}".format(*gpu.capability)
            )
        options["dependent"] = False
    if devices.target():
        return _CompileOnlyLauncher(kernel, signature, options)
    if simulator.ENABLED:
        made = _SimulatedLauncher(kernel, signature, options)
    else:
        made = Launcher(kernel, signature, device, **options, carveout=carveout, cpp_entry=cpp_entry)
    note_loaded(made)
    return made


def launch(kernel, grid, block, *args, stream=None, **options):
    """Launch a kernel once, with types taken from the arguments; the way in for notebooks.

    Parameters
    ----------
    kernel : a ``@cuda.jit`` function over flat pointers and numbers
    grid, block : int or tuple of int
        Blocks of the grid, threads of a block.
    *args
        Torch tensors (passed as pointers to their first element; 16- and 8-bit floats as their bits), Python numbers
        (as int32 and float32), NumPy scalars (as they are) and :class:`TensorMap` (by value).
    stream : int or torch.cuda.Stream, optional
        The caller's current stream if not given.
    **options
        As for :func:`launcher`.
    """
    device = next((a.device for a in args if isinstance(a, torch.Tensor | TensorMap)), None)
    if device is None:
        raise ValueError(f"launch of {kernel.__name__}: no argument is a tensor, so the device is unknown")
    signature, values = signature_of(args)
    if TENSOR_MAP in signature or options.get("cpp_entry"):
        options = {"launch_bounds": math.prod(three(block))} | options
    index = device.index or 0
    if stream is None:
        stream = current_stream(index)
    launcher(kernel, signature, index, **options)(grid, block, getattr(stream, "cuda_stream", stream), *values)


def signature_of(args):
    """The signature of arguments as :func:`launch` takes them, and the values that a launcher takes for them."""
    return tuple(zip(*map(_type_and_value, args), strict=True))


def _type_and_value(value):
    if isinstance(value, torch.Tensor):
        return _pointer_name(value.dtype), address(value)
    if isinstance(value, TensorMap):
        return TENSOR_MAP, value.value
    if isinstance(value, np.generic):
        return value.dtype.name, value.item()
    if isinstance(value, bool):
        return "int32", int(value)
    if isinstance(value, int):
        if not -(1 << 31) <= value < 1 << 31:
            raise ValueError(f"the number {value} does not fit int32: pass numpy.int64({value})")
        return "int32", value
    if isinstance(value, float):
        return "float32", value
    raise TypeError(f"a kernel takes tensors, tensor maps and numbers, not {type(value).__name__}")


@cache
def _pointer_name(dtype):
    return _POINTER_NAMES.get(dtype) or str(dtype).removeprefix("torch.") + "*"
