"""Kernel launcher: compiles once per signature and calls the driver directly.

``kernel[grid, block](...)`` types and unpacks every argument in Python. Here a kernel is compiled once for a signature
of pointers, numbers and tensor maps. A call packs its arguments into one buffer for the driver, in a tenth of the time.
"""

import contextlib
import ctypes
import math
import struct
import sys
import threading
from functools import cache

import numpy as np
import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.context import bind_context
from moe_numba.runtime.cubin_cache import machine_code
from moe_numba.runtime.device import UnsupportedDeviceError
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

# The driver's CUlaunchConfig: grid, block, shared bytes and stream, packed behind the arguments for each launch; then
# the attributes, which never change. A CUlaunchAttribute is an id and a union of 64 bytes.
_CONFIG_FORMAT = "7I4xQ"
_CONFIG_STREAM_OFFSET, _CONFIG_PACKED_BYTES, _CONFIG_BYTES = 32, 40, 56
_CONFIG_ATTRIBUTES_FORMAT = "=QI4x"
_ATTRIBUTE_FORMAT, _ATTRIBUTE_BYTES = "=I4x3I52x", 72

# Looked up once, because every launch calls them; None without CUDA.
_current_device = getattr(torch._C, "_cuda_getDevice", None)
_current_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_LAUNCHERS_LOCK = threading.RLock()
_recordings: dict = {}  # thread -> _Recording
# In the simulator the ranks of a group are greenlets of one thread.
if simulator.ENABLED:
    from greenlet import getcurrent as _current_thread
else:
    _current_thread = threading.get_ident


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
    ):
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        gpu = devices.gpu_of(device)
        options = dict(arch=gpu.arch, link_arch=gpu.hardware_arch, launch_bounds=launch_bounds, cpp_entry=cpp_entry)
        cubin, entry = machine_code(kernel, signature, **options)
        self.name = kernel.py_func.__name__
        self._kernel = ObjectCode.from_cubin(cubin).get_kernel(entry)  # keeps the code loaded
        self._function = int(self._kernel.handle)
        if shared_bytes > _SHARED_BYTES_WITHOUT_OPT_IN:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            handle = driver.CUkernel(self._function)
            (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, handle, driver.CUdevice(device))
            if error:
                raise ValueError(
                    f"shared_bytes is {shared_bytes}, more than a block of this GPU can have: {error.name}"
                )
        self.device, self._shared_bytes = device, shared_bytes
        self._formats = formats = [_format(type_name) for type_name in signature]
        self._offsets = [struct.calcsize("=" + "".join(formats[:i])) for i in range(len(formats))]
        self._config_offset = struct.calcsize("=" + "".join(formats))
        self._pack = struct.Struct("=" + "".join(formats) + _CONFIG_FORMAT).pack_into
        self._attributes = _attributes(cluster, cooperative, dependent)
        self._launch = _driver_launch()
        self._thread = threading.local()

    def _buffer(self):
        """Return a buffer for the arguments and the launch configuration, and the addresses that the driver needs."""
        buffer = ctypes.create_string_buffer(self._config_offset + _CONFIG_BYTES)
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * len(self._offsets))(*(start + offset for offset in self._offsets))
        attributes = ctypes.addressof(self._attributes), len(self._attributes) // _ATTRIBUTE_BYTES
        struct.pack_into(_CONFIG_ATTRIBUTES_FORMAT, buffer, self._config_offset + _CONFIG_PACKED_BYTES, *attributes)
        return buffer, start + self._config_offset, ctypes.addressof(pointers), pointers

    def _prepare_thread(self):
        """Give this thread a buffer of its own (the driver releases the GIL), and make the GPU's context current."""
        bind_context(self.device)
        self._thread.state = state = self._buffer()
        return state

    def __call__(self, grid, block, stream, *values):
        """Launch ``grid`` blocks of ``block`` threads (each an int or a tuple).

        ``stream`` is a raw stream handle, or None for the caller's current stream.
        """
        if _current_device() != self.device:
            with torch.cuda.device(self.device):
                return self(grid, block, stream, *values)
        if stream is None:
            stream = _current_raw_stream(self.device)
        try:
            state = self._thread.state
        except AttributeError:
            state = self._prepare_thread()
        buffer, config, pointers, _ = state
        gx, gy, gz = (grid, 1, 1) if type(grid) is int else _three(grid)
        bx, by, bz = (block, 1, 1) if type(block) is int else _three(block)
        self._pack(buffer, 0, *values, gx, gy, gz, bx, by, bz, self._shared_bytes, stream)
        error = self._launch(config, self._function, pointers, None)
        if error:
            self._raise(error, grid, block)
        if _recordings:
            _record(self, grid, block, stream, values)

    def prepare(self, grid, block, *values):
        """Return a function that launches with these arguments on the stream that it is called with."""
        buffer, config, pointers, kept = self._buffer()
        self._pack(buffer, 0, *values, *_three(grid), *_three(block), self._shared_bytes, 0)
        stream_field = ctypes.c_uint64.from_buffer(buffer, self._config_offset + _CONFIG_STREAM_OFFSET)
        device, function, start, bound_threads = self.device, self._function, self._launch, set()

        def launch_prepared(stream, kept=kept):
            if _current_device() != device:
                with torch.cuda.device(device):
                    return launch_prepared(stream)
            if threading.get_ident() not in bound_threads:
                bind_context(device)
                bound_threads.add(threading.get_ident())
            stream_field.value = stream
            error = start(config, function, pointers, None)
            if error:
                self._raise(error, grid, block)

        return launch_prepared

    def bind(self, grid, block, values, first, last):
        """Return ``launch(stream, *changed)``: launches with ``values[first:last]`` replaced, on a raw stream.

        Only these are packed again, so a call takes half of the time. It is not thread-safe.
        """
        buffer, config, pointers, kept = self._buffer()
        self._pack(buffer, 0, *values, *_three(grid), *_three(block), self._shared_bytes, 0)
        pack, offset = struct.Struct("=" + "".join(self._formats[first:last])).pack_into, self._offsets[first]
        stream_field = ctypes.c_uint64.from_buffer(buffer, self._config_offset + _CONFIG_STREAM_OFFSET)
        device, function, start, bound_threads = self.device, self._function, self._launch, set()

        def launch(stream, *changed, kept=kept):
            if _current_device() != device:
                with torch.cuda.device(device):
                    return launch(stream, *changed)
            if (thread := threading.get_ident()) not in bound_threads:
                bind_context(device)
                bound_threads.add(thread)
            stream_field.value = stream
            pack(buffer, offset, *changed)
            error = start(config, function, pointers, None)
            if error:
                self._raise(error, grid, block)
            if _recordings:
                _record(self, grid, block, stream, (*values[:first], *changed, *values[last:]))

        return launch

    def _raise(self, error, grid, block):
        from cuda.bindings import driver

        result = driver.CUresult(error)
        text = driver.cuGetErrorString(result)[1].decode()
        raise RuntimeError(
            f"{result.name} ({text}): launch of {self.name} with grid {grid}, block {block} and {self._shared_bytes} "
            "bytes of dynamic shared memory"
        )


class _Recording(list):
    """The launches of a call, as functions that launch them again on the current stream."""

    stream_bound = False  # whether the call uses memory that belongs to its stream


@contextlib.contextmanager
def recording():
    """Collect the launches of this thread, which are also executed."""
    thread = _current_thread()
    _recordings[thread] = launches = _Recording()
    try:
        yield launches
    finally:
        del _recordings[thread]


def current_recording():
    """Return the recording of this thread, or None."""
    return _recordings.get(_current_thread())


def wrap_recorded(wrap):
    """Replace the launch that was recorded last, ``launch``, by ``wrap(launch)``."""
    if _recordings and (launches := current_recording()):
        launches[-1] = wrap(launches[-1])


def refuse_recording(reason):
    """Raise ValueError if the call is being recorded."""
    if _recordings and current_recording() is not None:
        raise ValueError(reason)


def bind_recording_to_stream():
    """Note that the call which is being recorded uses memory that belongs to its stream."""
    if _recordings and (launches := current_recording()) is not None:
        launches.stream_bound = True


def _record(launcher, grid, block, stream, values):
    launches = current_recording()
    if launches is None:
        return
    start, device = launcher.prepare(grid, block, *values), launcher.device

    def launch_again():
        now = current_stream(device)
        # Stream 0, which is also the simulator's, cannot be captured.
        if launches.stream_bound and (now != stream or (now and torch.cuda.is_current_stream_capturing())):
            raise RuntimeError(
                f"this call was prepared on stream {stream:#x} and uses that stream's workspace; it cannot run on "
                f"stream {now:#x} or in a capture"
            )
        start(now)

    launches.append(launch_again)


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
        self._kernel = kernel
        names = "launch_bounds", "shared_bytes", "cluster", "cooperative", "dependent"
        self._options = {name: options[name] for name in names}
        plain = ["uint8*" if s == TENSOR_MAP else s for s in signature]
        self._types = [np.dtype(s.removesuffix("*")) for s in plain]
        self._is_pointer = [s[-1] == "*" for s in plain]

    def __call__(self, grid, block, stream, *values):
        arguments = [
            (v.view(t) if v else v) if p else t.type(v)
            for v, t, p in zip(values, self._types, self._is_pointer, strict=True)
        ]
        with simulator.errors.ShortTraceback():
            simulator.run(self._kernel, grid, block, arguments, **self._options)
        _record(self, grid, block, 0, values)

    def prepare(self, grid, block, *values):
        """As `Launcher.prepare`."""
        return lambda stream: self(grid, block, stream, *values)


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
        return _make_launcher(kernel, signature, device, options, cpp_entry)


@cache
def _make_launcher(kernel, signature, device, options, cpp_entry):
    options = dict(zip(("launch_bounds", "shared_bytes", "cluster", "cooperative", "dependent"), options, strict=True))
    gpu = devices.gpu_of(device)
    if not gpu.has_clusters:
        if options["cluster"]:
            raise UnsupportedDeviceError(
                f"{kernel.__name__} needs thread block clusters, which start at compute capability 9.0; {gpu.name} has "
                "{}.{}".format(*gpu.capability)
            )
        options["dependent"] = False
    if simulator.ENABLED:
        return _SimulatedLauncher(kernel, signature, options)
    if devices.target():
        return _CompileOnlyLauncher(kernel, signature, options)
    return Launcher(kernel, signature, device, **options, cpp_entry=cpp_entry)


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
        options = {"launch_bounds": math.prod(_three(block))} | options
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
    return 0 if simulator.ENABLED or devices.target() else _current_raw_stream(device)


@cache
def _pointer_name(dtype):
    return _POINTER_NAMES.get(dtype) or str(dtype).removeprefix("torch.") + "*"


def _three(size):
    return (size, 1, 1) if isinstance(size, int) else (tuple(size) + (1, 1))[:3]


def _attributes(cluster, cooperative, dependent):
    """Return the driver's launch attributes, one after another."""
    from cuda.bindings.driver import CUlaunchAttributeID as ids

    values = []
    if cluster:
        values.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, *_three(cluster)))
    if cooperative:
        values.append((ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, 1, 0, 0))
    if dependent:
        values.append((ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, 1, 0, 0))
    data = b"".join(struct.pack(_ATTRIBUTE_FORMAT, *map(int, value)) for value in values)
    return (ctypes.c_char * len(data)).from_buffer_copy(data)


@cache
def _driver_launch():
    """Return the driver's ``cuLaunchKernelEx(config, function, argument pointers, extra)``.

    It is called through ctypes with packed structures: cuda.bindings converts each field from a Python object, which
    takes several times as long.
    """
    start = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1").cuLaunchKernelEx
    start.argtypes, start.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return start
