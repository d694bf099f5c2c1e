"""Launches through the driver: the arguments of a compiled kernel in one buffer, for ``cuLaunchKernelEx``."""

import ctypes
import struct
import sys
import threading
from functools import cache

import torch

from moe_numba.runtime import device as devices
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.context import bind_context, current_raw_stream
from moe_numba.runtime.cubin_cache import machine_code
from moe_numba.runtime.recording import Launched, note, record, recordings

# An argument's bytes in the buffer that the driver reads; each is padded to a multiple of 8.
_FORMATS = {"int32": "i4x", "uint32": "I4x", "int64": "q", "uint64": "Q", "float32": "f4x", "float64": "d"}
_MAP_FORMAT = "128s"
_SHARED_BYTES_WITHOUT_OPT_IN = 48 * 1024

# The driver's CUlaunchConfig: grid, block, shared bytes and stream, packed behind the arguments for each launch; then
# the attributes, which never change. A CUlaunchAttribute is an id and a union of 64 bytes.
_CONFIG_FORMAT = "7I4xQ"
_CONFIG_STREAM_OFFSET, _CONFIG_PACKED_BYTES, _CONFIG_BYTES = 32, 40, 56
_CONFIG_ATTRIBUTES_FORMAT = "=QI4x"
_ATTRIBUTE_FORMAT, _ATTRIBUTE_BYTES = "=I4x3I52x", 72

# Looked up once, because every launch calls it; None without CUDA.
_current_device = getattr(torch._C, "_cuda_getDevice", None)


def _format(type_name):
    return _MAP_FORMAT if type_name == TENSOR_MAP else "Q" if type_name[-1] == "*" else _FORMATS[type_name]


class Launcher:
    """A kernel compiled for one signature and loaded on one device; calling it launches it.

    Make it with :func:`moe_numba.runtime.launch.launcher`, which caches them.
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
        carveout=None,
        cpp_entry=False,
    ):
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        gpu = devices.gpu_of(device)
        options = dict(arch=gpu.arch, link_arch=gpu.hardware_arch, launch_bounds=launch_bounds, cpp_entry=cpp_entry)
        cubin, entry = machine_code(kernel, signature, **options)
        options = dict(launch_bounds=launch_bounds, shared_bytes=shared_bytes, cluster=cluster)
        self.launched = Launched(kernel, cubin, options | dict(cooperative=cooperative, dependent=dependent))
        self.name = kernel.py_func.__name__
        self._kernel = ObjectCode.from_cubin(cubin).get_kernel(entry)  # keeps the code loaded
        self._function = int(self._kernel.handle)
        attributes, handle = driver.CUfunction_attribute, driver.CUkernel(self._function)
        if carveout is not None:  # a hint, which the driver may not take
            preferred = attributes.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            driver.cuKernelSetAttribute(preferred, carveout, handle, driver.CUdevice(device))
        if shared_bytes > _SHARED_BYTES_WITHOUT_OPT_IN:
            limit = attributes.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, handle, driver.CUdevice(device))
            if error:
                raise ValueError(
                    f"shared_bytes is {shared_bytes}, more than a block of this GPU can have: {error.name}"
                )
        self.device, self._shared_bytes = device, shared_bytes
        self._is_pointer = [type_name[-1] == "*" for type_name in signature]
        self._formats = formats = [_format(type_name) for type_name in signature]
        self._offsets = [struct.calcsize("=" + "".join(formats[:i])) for i in range(len(formats))]
        self._config_offset = struct.calcsize("=" + "".join(formats))
        self._pack = struct.Struct("=" + "".join(formats) + _CONFIG_FORMAT).pack_into
        self._attributes = _attributes(cluster, cooperative, dependent)
        self._launch = _driver_launch()
        self._thread = threading.local()

    def addresses_in(self, values):
        """Yield the index and the address of each pointer, and of each tensor map, as if it began with its address."""
        for i, value in enumerate(values):
            if self._formats[i] == _MAP_FORMAT:
                yield i, int.from_bytes(value[:8], "little")
            elif self._is_pointer[i]:
                yield i, value

    def stream_field(self, buffer):
        """Return the field of the launch configuration in a buffer that has the raw handle of the stream."""
        return ctypes.c_uint64.from_buffer(buffer, self._config_offset + _CONFIG_STREAM_OFFSET)

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
            stream = current_raw_stream(self.device)
        if recordings and record(self, grid, block, stream, values):
            return
        try:
            state = self._thread.state
        except AttributeError:
            state = self._prepare_thread()
        buffer, config, pointers, _ = state
        gx, gy, gz = (grid, 1, 1) if type(grid) is int else three(grid)
        bx, by, bz = (block, 1, 1) if type(block) is int else three(block)
        self._pack(buffer, 0, *values, gx, gy, gz, bx, by, bz, self._shared_bytes, stream)
        error = self._launch(config, self._function, pointers, None)
        if error:
            self._raise(error, grid, block)

    def bind(self, grid, block, values, first, last):
        """Return ``launch(stream, *changed)``: launches with ``values[first:last]`` replaced, on a raw stream.

        Only these are packed again, so a call takes half of the time. It is not thread-safe.
        """
        buffer, config, pointers, kept = self._buffer()
        self._pack(buffer, 0, *values, *three(grid), *three(block), self._shared_bytes, 0)
        pack, offset = struct.Struct("=" + "".join(self._formats[first:last])).pack_into, self._offsets[first]
        stream_field = self.stream_field(buffer)
        device, function, start, bound_threads = self.device, self._function, self._launch, set()

        def launch(stream, *changed, kept=kept):
            if _current_device() != device:
                with torch.cuda.device(device):
                    return launch(stream, *changed)
            if (thread := threading.get_ident()) not in bound_threads:
                bind_context(device)
                bound_threads.add(thread)
            if recordings and record(self, grid, block, stream, (*values[:first], *changed, *values[last:])):
                return
            stream_field.value = stream
            pack(buffer, offset, *changed)
            error = start(config, function, pointers, None)
            if error:
                self._raise(error, grid, block)

        return launch

    def _raise(self, error, grid, block):
        from cuda.bindings import driver

        result = driver.CUresult(error)
        text = driver.cuGetErrorString(result)[1].decode()
        raise RuntimeError(
            f"{result.name} ({text}): launch of {self.name} with grid {grid}, block {block} and {self._shared_bytes} "
            "bytes of dynamic shared memory"
        )


class LaunchSequence:
    """Launches on one device whose arguments are packed in advance; calling it repeats them on the current stream.

    It is thread-safe: each thread packs the arguments once, into buffers of its own.

    Parameters
    ----------
    launches : sequence of RecordedLaunch
        At least one, of a :class:`Launcher` each.
    changing : sequence of (int, int, int)
        (index of a launch, index of an argument, index of an address): an argument that each call replaces. It is a
        pointer, or a tensor map, which begins with the address.
    num_addresses : int
        How many addresses a call passes.
    """

    def __init__(self, launches, changing=(), num_addresses=0):
        self._recorded, self._changing, self._num_addresses = tuple(launches), tuple(changing), num_addresses
        self.device, self._start, self._thread = launches[0].launcher.device, _driver_launch(), threading.local()
        self._pack = struct.Struct(f"={num_addresses}Q").pack_into

    def __call__(self, addresses=()):
        """Launch the kernels with these addresses."""
        device = self.device
        if _current_device() != device:
            with torch.cuda.device(device):
                return self(addresses)
        try:
            state = self._thread.state
        except AttributeError:
            state = self._prepare_thread()
        table, maps, streams, launches, last_stream = state
        self._pack(table, 0, *addresses)
        for field, i in maps:
            field.value = addresses[i]
        stream = current_raw_stream(device)
        if stream != last_stream:
            for field in streams:
                field.value = stream
            state[-1] = stream
        start = self._start
        for config, function, pointers, recorded, _ in launches:
            error = start(config, function, pointers, None)
            if error:
                recorded.launcher._raise(error, recorded.grid, recorded.block)
        if recordings:
            for recorded in self._recorded:
                note(recorded.launcher)

    def _prepare_thread(self):
        """Pack the arguments for this thread, and make the GPU's context current."""
        bind_context(self.device)
        table, maps, streams, launches = ctypes.create_string_buffer(8 * self._num_addresses), [], [], []
        for recorded in self._recorded:
            launcher = recorded.launcher
            buffer, config, pointers, kept = launcher._buffer()
            grid, block = three(recorded.grid), three(recorded.block)
            launcher._pack(buffer, 0, *recorded.values, *grid, *block, launcher._shared_bytes, 0)
            streams.append(launcher.stream_field(buffer))  # it keeps the buffer alive
            launches.append((config, launcher._function, pointers, recorded, kept))
        for i, argument, address in self._changing:
            launcher, kept = self._recorded[i].launcher, launches[i][-1]
            if launcher._formats[argument] == _MAP_FORMAT:
                maps.append((ctypes.c_uint64.from_address(kept[argument]), address))
            else:
                kept[argument] = ctypes.addressof(table) + 8 * address
        self._thread.state = state = [table, maps, streams, launches, 0]
        return state


def three(size):
    return (size, 1, 1) if isinstance(size, int) else (tuple(size) + (1, 1))[:3]


def _attributes(cluster, cooperative, dependent):
    """Return the driver's launch attributes, one after another."""
    from cuda.bindings.driver import CUlaunchAttributeID as ids

    values = []
    if cluster:
        values.append((ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, *three(cluster)))
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
