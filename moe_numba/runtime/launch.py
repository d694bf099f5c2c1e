"""The one door through which a kernel starts, on a GPU or in the simulator.

Numba's own launch types and unpacks every argument in Python. Here a kernel is compiled once for a signature of
pointers and numbers, and a call packs them into one buffer and asks the driver, which takes a tenth of the time.
What leans on Numba's insides is in this file (and in ``ptx`` and ``simulator``) alone.
"""

import ctypes
import re
import struct
import threading
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace

import numpy as np
import torch
from numba import cuda, types

from moe_numba import simulator
from moe_numba.runtime import device as devices

__all__ = ["Compiled", "Launcher", "address", "compile_kernel", "current_stream", "launch", "launcher"]

# Torch's 16- and 8-bit floats reach a kernel as their bits: Numba's own types for them pull in C++ headers.
_POINTER_NAMES = {
    torch.bfloat16: "uint16*",
    torch.float16: "uint16*",
    torch.float8_e4m3fn: "uint8*",
    torch.float8_e5m2: "uint8*",
    torch.bool: "uint8*",
}
_FORMATS = {"int32": "i4x", "uint32": "I4x", "int64": "q", "uint64": "Q", "float32": "f4x", "float64": "d"}
_SHARED_BYTES_WITHOUT_ASKING = 48 * 1024


# ``address(tensor)`` stands for a device pointer to its first element: an integer, or in the simulator a checked view.
address = simulator.pointer if simulator.ENABLED else torch.Tensor.data_ptr


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for one signature: its PTX, its machine code, its entry's name and what ptxas said of it."""

    ptx: str
    code: object
    name: str
    log: str


def compile_kernel(kernel, signature, *, arch=(9, 0, "a"), launch_bounds=None):
    """Compile a ``@cuda.jit`` function to machine code; no GPU is needed.

    Parameters
    ----------
    kernel : Numba dispatcher
    signature : tuple of str
        A type name an argument: ``"float32*"`` for a pointer, ``"int32"`` for a number.
    arch : tuple
        Compute capability, with the suffix ``"a"`` for Hopper's own instructions.
    launch_bounds : int or tuple, optional
        Most threads a block (and fewest blocks a multiprocessor), as in CUDA C++.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba.cuda import dispatcher

    arguments = [types.CPointer(getattr(types, s[:-1])) if s[-1] == "*" else getattr(types, s) for s in signature]
    # Numba asks the current device what to compile device functions for, even where a target was named.
    asked, dispatcher.get_current_device = (
        dispatcher.get_current_device,
        lambda: SimpleNamespace(compute_capability=arch),
    )
    try:
        codes, _ = cuda.compile_all(
            kernel.py_func,
            types.void(*arguments),
            device=False,
            abi="numba",
            cc=arch,
            output="ptx",
            launch_bounds=launch_bounds or kernel.targetoptions.get("launch_bounds"),
        )
    finally:
        dispatcher.get_current_device = asked
    objects = [ObjectCode.from_ptx(c.encode() if isinstance(c, str) else c) for c in codes]
    linker = Linker(*objects, options=LinkerOptions(arch="sm_" + "".join(map(str, arch)), ptxas_options=["-v"]))
    code = linker.link("cubin")
    return Compiled(codes[0], code, re.search(r"\.entry\s+(\w+)", codes[0])[1], linker.get_info_log())


def _arch(device):
    major, minor = devices.gpu_of(device).capability
    return (major, minor, "a") if major >= 9 else (major, minor)


class Launcher:
    """A kernel made ready for one signature on one device: calling it starts it.

    Make it with :func:`launcher`, which keeps the ones it made.
    """

    def __init__(self, kernel, signature, device, *, launch_bounds, shared_bytes, cluster, cooperative, dependent):
        from cuda.bindings import driver

        self.compiled = compile_kernel(kernel, signature, arch=_arch(device), launch_bounds=launch_bounds)
        self._kernel = self.compiled.code.get_kernel(self.compiled.name)  # keeps the code loaded
        handle = driver.CUkernel(int(self._kernel.handle))
        if shared_bytes > _SHARED_BYTES_WITHOUT_ASKING:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, handle, driver.CUdevice(device))
            if error:
                raise ValueError(f"shared_bytes is {shared_bytes}, more than this GPU gives a block: {error.name}")
        self._function = driver.CUfunction(int(handle))
        self._device = device
        self._shared_bytes = shared_bytes
        self._format = struct.Struct("=" + "".join("Q" if s[-1] == "*" else _FORMATS[s] for s in signature))
        self._attributes = _attributes(driver, cluster, cooperative, dependent)
        self._driver = driver
        self._thread = threading.local()

    def _prepare(self):
        """A buffer for the arguments and the driver's pointers into it; the driver reads them with the GIL released."""
        buffer = ctypes.create_string_buffer(self._format.size)
        start, count = ctypes.addressof(buffer), self._format.size // 8
        pointers = (ctypes.c_void_p * count)(*range(start, start + 8 * count, 8))
        config = None
        if self._attributes:
            config = self._driver.CUlaunchConfig()
            config.attrs, config.numAttrs = self._attributes, len(self._attributes)
            config.sharedMemBytes = self._shared_bytes
        self._thread.state = state = buffer, pointers, ctypes.addressof(pointers), config
        return state

    def __call__(self, grid, block, stream, *values):
        """Start ``grid`` blocks of ``block`` threads (each an int or a tuple) on ``stream``, a raw stream handle."""
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
            raise RuntimeError(
                f"the launch of {self.compiled.name} with grid {grid} and block {block} failed: {error.name}"
            )


def _attributes(driver, cluster, cooperative, dependent):
    """The launch attributes that were asked for, as the driver wants them."""
    ids, out = driver.CUlaunchAttributeID, []
    if cluster:
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = _three(cluster)
        out.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value))
    if cooperative:
        value = driver.CUlaunchAttributeValue()
        value.cooperative = 1
        out.append((ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    if dependent:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        out.append((ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value))
    attributes = []
    for name, value in out:
        attribute = driver.CUlaunchAttribute()
        attribute.id, attribute.value = name, value
        attributes.append(attribute)
    return attributes


class _CompileOnlyLauncher:
    """The same call in compile-only mode: reports what would be launched."""

    def __init__(self, kernel, signature, options):
        self._launch = kernel, signature, options

    def __call__(self, grid, block, stream, *values):
        devices.on_launch(*self._launch)


class _SimulatedLauncher:
    """The same call in the simulator."""

    def __init__(self, kernel, signature, shared_bytes, cluster, cooperative):
        self._kernel, self._shared_bytes, self._cluster, self._cooperative = kernel, shared_bytes, cluster, cooperative
        self._types = [np.dtype(s[:-1] if s[-1] == "*" else s) for s in signature]
        self._pointer = [s[-1] == "*" for s in signature]

    def __call__(self, grid, block, stream, *values):
        arguments = [
            (v.view(t) if v else v) if p else t.type(v)
            for v, t, p in zip(values, self._types, self._pointer, strict=True)
        ]
        simulator.run(
            self._kernel,
            grid,
            block,
            arguments,
            shared_bytes=self._shared_bytes,
            cluster=self._cluster,
            cooperative=self._cooperative,
        )


@cache
def launcher(
    kernel, signature, device, *, launch_bounds=None, shared_bytes=0, cluster=None, cooperative=False, dependent=False
):
    """Make a kernel ready to be started again and again, and keep it: the fast way in for a public function.

    Parameters
    ----------
    kernel : a ``@cuda.jit`` function
    signature : tuple of str
        A type name an argument: ``"float32*"`` for a pointer, ``"int32"`` for a number.
    device : int
        The index of the GPU; ignored in the simulator.
    launch_bounds : int or tuple, optional
    shared_bytes : int
        Dynamic shared memory of a block; the driver's 48 KB limit is raised where it must be.
    cluster : int or tuple, optional
        Blocks of a thread block cluster.
    cooperative : bool
        All blocks are resident at once, so that they may wait for one another.
    dependent : bool
        Programmatic dependent launch: the grid may start before the one ahead of it in the stream is done, and
        must call ``griddepcontrol_wait`` before it touches what that one writes.
    """
    if simulator.ENABLED:
        return _SimulatedLauncher(kernel, signature, shared_bytes, cluster, cooperative)
    if devices.target():
        options = dict(launch_bounds=launch_bounds, shared_bytes=shared_bytes, cluster=cluster)
        return _CompileOnlyLauncher(kernel, signature, dict(options, cooperative=cooperative, dependent=dependent))
    return Launcher(
        kernel,
        signature,
        device,
        launch_bounds=launch_bounds,
        shared_bytes=shared_bytes,
        cluster=cluster,
        cooperative=cooperative,
        dependent=dependent,
    )


def launch(kernel, grid, block, *args, stream=None, **options):
    """Start a kernel once, with the types taken from the arguments: the easy way in for a notebook.

    Parameters
    ----------
    kernel : a ``@cuda.jit`` function over flat pointers and numbers
    grid, block : int or tuple of int
        Blocks of the grid, threads of a block.
    *args
        Torch tensors (passed as pointers to their first element; 16- and 8-bit floats as their bits), Python numbers
        (int32 and float32) and NumPy scalars (as they are).
    stream : int or torch.cuda.Stream, optional
        The caller's current stream if not given.
    **options
        As for :func:`launcher`.
    """
    device = next((a.device for a in args if isinstance(a, torch.Tensor)), None)
    if device is None:
        raise ValueError(f"launch of {kernel.__name__}: no argument is a tensor, so no device is named")
    signature, values = zip(*map(_argument, args), strict=True)
    index = device.index or 0
    if stream is None:
        stream = current_stream(index)
    launcher(kernel, signature, index, **options)(grid, block, getattr(stream, "cuda_stream", stream), *values)


def _argument(value):
    """An argument's type name and what the launcher takes for it."""
    if isinstance(value, torch.Tensor):
        return _pointer_name(value.dtype), address(value)
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
    raise TypeError(f"a kernel takes tensors and numbers, not {type(value).__name__}")


@cache
def _pointer_name(dtype):
    return _POINTER_NAMES.get(dtype) or str(dtype).removeprefix("torch.") + "*"


def current_stream(device):
    """The raw handle of torch's current stream on a device; asked for at every call, since it changes under graphs."""
    return 0 if simulator.ENABLED or devices.target() else torch._C._cuda_getCurrentRawStream(device)


def _three(size):
    return (size, 1, 1) if isinstance(size, int) else (tuple(size) + (1, 1))[:3]
