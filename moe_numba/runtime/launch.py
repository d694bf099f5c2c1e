"""Kernel launcher: compiles once per signature and calls the driver directly.

``kernel[grid, block](...)`` types and unpacks every argument in Python. Here a kernel is compiled once for a signature
of pointers, numbers and tensor maps. A call packs its arguments into one buffer for the driver, in a tenth of the time.
"""

import ctypes
import struct
import threading
from functools import cache

import numpy as np
import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.compile import ENTRY, SM_90A, TENSOR_MAP, compile_kernel
from moe_numba.runtime.cubin_cache import load_or_make
from moe_numba.runtime.tensor_map import TensorMap, address

__all__ = ["Launcher", "address", "current_stream", "launch", "launcher", "signature_of"]

# Torch's 16- and 8-bit floats reach a kernel as their bits: Numba's own types for them pull in C++ headers.
_POINTER_NAMES = {
    torch.bfloat16: "uint16*",
    torch.float16: "uint16*",
    torch.float8_e4m3fn: "uint8*",
    torch.float8_e5m2: "uint8*",
    torch.bool: "uint8*",
}
# An argument's bytes in the buffer that the driver reads; each is padded to a multiple of 8.
_FORMATS = {"int32": "i4x", "uint32": "I4x", "int64": "q", "uint64": "Q", "float32": "f4x", "float64": "d"}
_SHARED_BYTES_WITHOUT_OPT_IN = 48 * 1024


def _format(type_name):
    return "128s" if type_name == TENSOR_MAP else "Q" if type_name[-1] == "*" else _FORMATS[type_name]


class Launcher:
    """A kernel compiled for one signature and loaded on one device; calling it launches it.

    Make it with :func:`launcher`, which caches them.
    """

    def __init__(
        self,
        kernel,
        signature,
        device,
        *,
        launch_bounds,
        shared_bytes,
        cluster,
        cooperative,
        dependent,
        cpp_entry=False,
        cache_key=None,
    ):
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        arch = _arch(device)
        if cache_key is None:
            compiled = compile_kernel(kernel, signature, arch=arch, launch_bounds=launch_bounds, cpp_entry=cpp_entry)
            code, self.name = compiled.code, compiled.name
        else:
            code = ObjectCode.from_cubin(
                cached_cubin(kernel, signature, arch=arch, launch_bounds=launch_bounds, cache_key=cache_key)
            )
            self.name = ENTRY
        self._kernel = code.get_kernel(self.name)  # keeps the code loaded
        handle = driver.CUkernel(int(self._kernel.handle))
        if shared_bytes > _SHARED_BYTES_WITHOUT_OPT_IN:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, handle, driver.CUdevice(device))
            if error:
                raise ValueError(
                    f"shared_bytes is {shared_bytes}, more than a block of this GPU can have: {error.name}"
                )
        self._function = driver.CUfunction(int(handle))
        self._device = device
        self._shared_bytes = shared_bytes
        formats = [_format(type_name) for type_name in signature]
        self._format = struct.Struct("=" + "".join(formats))
        self._offsets = [struct.calcsize("=" + "".join(formats[:i])) for i in range(len(formats))]
        self._attributes = _attributes(driver, cluster, cooperative, dependent)
        self._driver = driver
        self._thread = threading.local()

    def _prepare(self):
        """Make this thread's argument buffer and the driver's pointers into it (the driver releases the GIL)."""
        buffer = ctypes.create_string_buffer(self._format.size)
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(self._offsets))(*(start + offset for offset in self._offsets))
        config = None
        if self._attributes:
            config = self._driver.CUlaunchConfig()
            config.attrs, config.numAttrs = self._attributes, len(self._attributes)
            config.sharedMemBytes = self._shared_bytes
        self._thread.state = state = buffer, pointers, ctypes.addressof(pointers), config
        return state

    def __call__(self, grid, block, stream, *values):
        """Launch ``grid`` blocks of ``block`` threads (each an int or a tuple) on ``stream``, a raw stream handle."""
        if torch._C._cuda_getDevice() != self._device:
            with torch.cuda.device(self._device):
                return self(grid, block, stream, *values)
        try:
            state = self._thread.state
        except AttributeError:
            state = self._prepare()
        buffer, _, pointers, config = state
        self._format.pack_into(buffer, 0, *values)
        gx, gy, gz = (grid, 1, 1) if type(grid) is int else _three(grid)
        bx, by, bz = (block, 1, 1) if type(block) is int else _three(block)
        if config is None:
            (error,) = self._driver.cuLaunchKernel(
                self._function, gx, gy, gz, bx, by, bz, self._shared_bytes, stream, pointers, 0
            )
        else:
            config.gridDimX, config.gridDimY, config.gridDimZ = gx, gy, gz
            config.blockDimX, config.blockDimY, config.blockDimZ = bx, by, bz
            config.hStream = stream
            (error,) = self._driver.cuLaunchKernelEx(config, self._function, pointers, 0)
        if error:
            raise RuntimeError(f"the launch of {self.name} with grid {grid} and block {block} failed: {error.name}")


class _CompileOnlyLauncher:
    """The same call in compile-only mode: reports the launch."""

    def __init__(self, kernel, signature, options):
        self._launch = kernel, signature, options

    def __call__(self, grid, block, stream, *values):
        devices.on_launch(*self._launch)


class _SimulatedLauncher:
    """The same call in the simulator."""

    def __init__(self, kernel, signature, options):
        self._kernel, self._options = kernel, options
        plain = ["uint8*" if s == TENSOR_MAP else s for s in signature]
        self._types = [np.dtype(s.removesuffix("*")) for s in plain]
        self._is_pointer = [s[-1] == "*" for s in plain]

    def __call__(self, grid, block, stream, *values):
        arguments = [
            (v.view(t) if v else v) if p else t.type(v)
            for v, t, p in zip(values, self._types, self._is_pointer, strict=True)
        ]
        simulator.run(self._kernel, grid, block, arguments, **self._options)


@cache
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
    cpp_entry=False,
    cache_key=None,
):
    """Compile and load a kernel, once; the way in for public functions.

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
        call ``griddepcontrol_wait`` before it touches what that one writes.
    cpp_entry : bool
        As for :func:`moe_numba.runtime.compile.compile_kernel`; implied by a tensor map.
    cache_key : tuple, optional
        Identifies a kernel with a tensor map among all that the package makes: its machine code is cached on disk.

    Returns
    -------
    callable
        ``launch(grid, block, stream, *values)``; a pointer's value is its address, a tensor map's its 128 bytes.
    """
    if simulator.ENABLED:
        options = dict(shared_bytes=shared_bytes, cluster=cluster, cooperative=cooperative)
        return _SimulatedLauncher(kernel, signature, options)
    options = dict(
        launch_bounds=launch_bounds,
        shared_bytes=shared_bytes,
        cluster=cluster,
        cooperative=cooperative,
        dependent=dependent,
    )
    if devices.target():
        return _CompileOnlyLauncher(kernel, signature, options)
    return Launcher(kernel, signature, device, **options, cpp_entry=cpp_entry, cache_key=cache_key)


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
        options = {"launch_bounds": block} | options
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


def current_stream(device):
    """The raw handle of torch's current stream on a device. It changes under graph capture: ask at every call."""
    return 0 if simulator.ENABLED or devices.target() else torch._C._cuda_getCurrentRawStream(device)


def cached_cubin(kernel, signature, *, arch=SM_90A, launch_bounds, cache_key):
    """The machine code of a kernel with a tensor map, from the cache on disk or compiled; no GPU is needed."""

    def make():
        return compile_kernel(kernel, signature, arch=arch, launch_bounds=launch_bounds).code.code

    return load_or_make((cache_key, signature, launch_bounds, arch), make)


def _arch(device):
    major, minor = devices.gpu_of(device).capability
    return (major, minor, "a") if major >= 9 else (major, minor)


@cache
def _pointer_name(dtype):
    return _POINTER_NAMES.get(dtype) or str(dtype).removeprefix("torch.") + "*"


def _three(size):
    return (size, 1, 1) if isinstance(size, int) else (tuple(size) + (1, 1))[:3]


def _attributes(driver, cluster, cooperative, dependent):
    """The driver's launch attributes."""
    ids, values = driver.CUlaunchAttributeID, []
    if cluster:
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = _three(cluster)
        values.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if cooperative:
        value = driver.CUlaunchAttributeValue()
        value.cooperative = 1
        values.append((ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    if dependent:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        values.append((ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
    attributes = []
    for name, value in values:
        attribute = driver.CUlaunchAttribute()
        attribute.id, attribute.value = name, value
        attributes.append(attribute)
    return attributes
