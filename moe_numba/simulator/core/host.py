"""The host side of `cuda`: device arrays, streams, events and the device, as programs use them around their launches.

Numba's own simulator provides most of it. This module replaces what is missing there or differs from a GPU: device
arrays start as poison, not as the zeros that a fresh process often finds; the device has the properties that programs
ask for; what needs a compiler or a driver raises an error that says so.
"""

import contextlib
import functools
import linecache
import os
from typing import NamedTuple

import numpy as np

from moe_numba.simulator import capability
from moe_numba.simulator.core import memory, uninitialized
from moe_numba.simulator.core.errors import SimulatorError


class Unsupported(SimulatorError, NotImplementedError):
    """A program asks for something that needs a GPU, its driver or a compiler."""


def unsupported(name, reason):
    """Return a function that raises: `name` does not work in the simulator, for this reason."""

    def refuse(*_, **__):
        raise Unsupported(f"{name} does not work in the simulator, {reason} (see cuda.config.ENABLE_CUDASIM)")

    refuse.__name__ = refuse.__qualname__ = name.rpartition(".")[2]
    return refuse


# --- arrays ---------------------------------------------------------------------------------------------------------


def _poisoned(shape, dtype=np.float64, strides=None, order="C"):
    """Return a NumPy array as `numpy.ndarray` would, but filled with poison and aligned like memory of a GPU."""
    shape, dtype = tuple(np.atleast_1d(shape).tolist()), np.dtype(dtype)
    if strides is None:
        size = int(np.prod(shape, dtype=np.int64))
    else:
        strides = tuple(np.atleast_1d(strides).tolist())
        size = 1 + sum((n - 1) * s for n, s in zip(shape, strides)) // dtype.itemsize
    raw = memory.poison(max(0, size), dtype, 256)
    # Views of the memory keep the array alive that has no further base, not those between.
    owner = raw
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    uninitialized.register(owner, raw.__array_interface__["data"][0], raw.nbytes, memory.is_float(dtype))
    return np.ndarray(shape, dtype, raw, 0, strides, order)


def _array_functions(devicearray):
    """Return the functions that allocate arrays; `devicearray` is Numba's module of fake arrays."""
    fake = devicearray.FakeCUDAArray

    def device_array(shape, dtype=np.float64, strides=None, order="C", stream=0):
        """Return an uninitialised device array: poison."""
        return fake(_poisoned(shape, dtype, strides, order), stream)

    def mapped_array(shape, dtype=np.float64, strides=None, order="C", stream=0, portable=False, wc=False):
        """Return an uninitialised array that host and device share: poison."""
        return device_array(shape, dtype, strides, order, stream)

    def mapped_array_like(ary, stream=0, portable=False, wc=False):
        """Return `mapped_array` of another array's shape, type and strides."""
        return devicearray.device_array_like(ary, stream)

    def pinned_array(shape, dtype=np.float64, strides=None, order="C"):
        """Return an uninitialised host array: poison."""
        return _poisoned(shape, dtype, strides, order)

    def managed_array(shape, dtype=np.float64, strides=None, order="C", stream=0, attach_global=True):
        """Return an uninitialised array that host and device share: poison."""
        return _poisoned(shape, dtype, strides, order)

    numba_to_device = devicearray.to_device

    def to_device(obj, stream=0, copy=True, to=None):
        """Return a copy of a host array on the device, or copy it to the device array `to` and return that."""
        if isinstance(obj, fake):
            return obj
        if to is None:
            to = numba_to_device(obj, stream)
            if not copy:
                to._ary[...] = _poisoned(1, to.dtype)[0]
        elif copy:
            to.copy_to_device(np.asarray(obj), stream)
        return to

    @contextlib.contextmanager
    def pinned(*arrays):
        """Do nothing; on a GPU the arrays are page-locked within this context."""
        yield

    @contextlib.contextmanager
    def mapped(*arrays, stream=0):
        """Yield device arrays that share the memory of host arrays: one, or a list of several."""
        on_device = [fake(array, stream) for array in arrays]
        yield on_device[0] if len(on_device) == 1 else on_device

    def is_cuda_array(obj):
        """Return whether an object is a device array, of Numba or of another library."""
        return isinstance(obj, fake) or hasattr(obj, "__cuda_array_interface__")

    def as_cuda_array(obj, sync=True):
        """Return a device array as it is; another library's would lie on a GPU."""
        if isinstance(obj, fake):
            return obj
        if hasattr(obj, "__cuda_array_interface__"):
            raise Unsupported(f"the simulator cannot read {type(obj).__module__} arrays on a GPU; pass a NumPy array")
        raise TypeError("*obj* doesn't implement the cuda array interface.")

    functions = (device_array, mapped_array, mapped_array_like, pinned_array, managed_array, to_device, pinned, mapped)
    return (*functions, is_cuda_array, as_cuda_array)


class Reduce:
    """`cuda.reduce`: applies a function of two values to all elements of an array."""

    def __init__(self, function):
        self.function = function

    def __call__(self, arr, size=None, res=None, init=0, stream=0):
        if arr.ndim != 1:
            raise TypeError("only support 1D array")
        values = np.asarray(getattr(arr, "_ary", arr))[:size]
        result = functools.reduce(self.function, values, values.dtype.type(init))
        if res is None:
            return result
        res[0] = result


# --- ufuncs ---------------------------------------------------------------------------------------------------------


def _install_ufuncs(cuda, vectorizers, fake):
    """Let Numba's ufuncs launch simulated kernels, on arrays of the class `fake`."""
    from numba.core.typing import signature

    def compile_core(self, sig):
        if sig.return_type is None:
            function = f"the function {self.pyfunc.__name__} of vectorize(target='cuda')"
            raise Unsupported(f"{function} needs signatures with a return type, such as 'float32(float32)': {sig.args}")
        return cuda.jit(device=True)(self.pyfunc), sig.return_type

    def compile_kernel(self, fnobj, sig):
        # Numba makes the kernel from a string; the vector engine needs to read it.
        source = self._get_kernel_source(self._kernel_template, signature(None, *sig.args[:-1]), self.pyfunc.__name__)
        file = f"<ufunc {self.pyfunc.__module__}.{self.pyfunc.__qualname__}>"
        linecache.cache[file] = len(source), None, source.splitlines(True), file
        fnobj.__code__ = fnobj.__code__.replace(co_filename=file)
        return cuda.jit(fnobj)

    def broadcast(self, ary, shape):
        """Return a view of a device array in which axes that it lacks, or where it has one element, repeat."""
        shape = (shape,) if isinstance(shape, int) else shape
        missing = len(shape) - ary.ndim
        kept = [stride if n > 1 else 0 for n, stride in zip(ary.shape, ary.strides)]
        return fake(np.lib.stride_tricks.as_strided(ary._ary, shape, [0] * missing + kept))

    vectorizers.CUDAVectorize._compile_core = compile_core
    vectorizers.CUDAVectorize._compile_kernel = compile_kernel
    vectorizers.CUDAUFuncMechanism.broadcast_device = broadcast
    vectorizers.CUDAGeneralizedUFunc._broadcast_scalar_input = broadcast
    vectorizers.CUDAGeneralizedUFunc._broadcast_add_axis = broadcast


# --- streams and events ---------------------------------------------------------------------------------------------


def _stream_class(numba_stream):
    class Stream(numba_stream):
        """A stream; launches and copies have completed when the call returns, so there is nothing to wait for."""

        handle = 0

        def add_callback(self, callback, arg=None):
            callback(self, 0, arg)

        @contextlib.contextmanager
        def auto_synchronize(self):
            yield self

    return Stream


class Event:
    """An event. The simulator measures no times: `elapsed_time` is NaN."""

    def __init__(self, timing=True):
        self.timing = timing

    def record(self, stream=0):
        pass

    def wait(self, stream=0):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, event):
        return float("nan")


class MemoryInfo(NamedTuple):
    """Free and total memory in bytes."""

    free: int
    total: int


_ASSUMED_MEMORY = 8 << 30


# --- the device -----------------------------------------------------------------------------------------------------


class Device:
    """The simulated GPU. It has few SMs, since programs launch a multiple of that many blocks."""

    id = 0
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    WARP_SIZE = 32
    MULTIPROCESSOR_COUNT = 4
    MAX_THREADS_PER_BLOCK = MAX_BLOCK_DIM_X = MAX_BLOCK_DIM_Y = 1024
    MAX_BLOCK_DIM_Z = 64
    MAX_GRID_DIM_X = 2**31 - 1
    MAX_GRID_DIM_Y = MAX_GRID_DIM_Z = 65535
    MAX_SHARED_MEMORY_PER_BLOCK = 48 * 1024
    MAX_REGISTERS_PER_BLOCK = 65536
    TOTAL_CONSTANT_MEMORY = 65536
    CLOCK_RATE = 10**6  # kHz
    ASYNC_ENGINE_COUNT = CAN_MAP_HOST_MEMORY = UNIFIED_ADDRESSING = MANAGED_MEMORY = 1
    CONCURRENT_KERNELS = COOPERATIVE_LAUNCH = 1
    ECC_ENABLED = INTEGRATED = KERNEL_EXEC_TIMEOUT = PCI_BUS_ID = PCI_DEVICE_ID = PCI_DOMAIN_ID = 0

    @property
    def compute_capability(self):
        return capability.SIMULATED

    COMPUTE_CAPABILITY_MAJOR = property(lambda self: self.compute_capability[0])
    COMPUTE_CAPABILITY_MINOR = property(lambda self: self.compute_capability[1])

    @property
    def name(self):
        return "simulated GPU of compute capability {}.{}".format(*self.compute_capability)

    def __getattr__(self, name):
        raise AttributeError(f"the simulated device has no attribute {name}")

    def reset(self):
        pass


class Context:
    """The context of the simulated GPU, which is also what `cuda.gpus[0]` returns."""

    device = _device = Device()  # programs read `cuda.gpus[0]._device.name`
    id = 0
    deallocations: list = []  # memory to free later: none, so that `deallocations.clear()` has nothing to do

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def __getattr__(self, name):
        return getattr(self.device, name)

    def reset(self):
        pass

    def synchronize(self):
        pass

    def get_memory_info(self):
        """Return the host's free and total memory in bytes, or 8 GiB for both where the host does not say."""
        try:
            page = os.sysconf("SC_PAGE_SIZE")
            return MemoryInfo(page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES"))
        except (AttributeError, ValueError, OSError):  # Windows has no sysconf, macOS does not know what is free
            return MemoryInfo(_ASSUMED_MEMORY, _ASSUMED_MEMORY)

    def memalloc(self, size):
        return _poisoned(size, np.uint8)

    def memhostalloc(self, size, mapped=False, portable=False, wc=False):
        return _poisoned(size, np.uint8)


_CONTEXT = Context()


def current_context(devnum=0):
    """Return the context of the simulated GPU."""
    return _CONTEXT


def get_current_device():
    """Return the simulated GPU."""
    return _CONTEXT.device


def select_device(device_id=0):
    """Return the context of the simulated GPU; there is only number 0."""
    if device_id != 0:
        raise ValueError(f"device_id is {device_id}, but the simulator has one device, number 0")
    return _CONTEXT


def detect():
    """Print the simulated GPU."""
    print(f"Found 1 CUDA devices\nid 0    {_CONTEXT.name}")
    return True


@contextlib.contextmanager
def profiling():
    """Do nothing; on a GPU the profiler collects data within this context."""
    yield


_COMPILES = ("compile", "compile_all", "compile_for_current_device", "compile_ptx", "compile_ptx_for_current_device")
_DRIVES = ("external_stream", "open_ipc_array", "from_cuda_array_interface", "set_memory_manager")


def install(cuda):
    """Replace the host functions of Numba's simulated `cuda` module, and add those it lacks."""
    from numba.cuda import vectorizers
    from numba.cuda.simulator import api
    from numba.cuda.simulator.cudadrv import devicearray, devices

    nothing = lambda *_, **__: None
    names = {function.__name__: function for function in _array_functions(devicearray)}
    names |= {f.__name__: f for f in (current_context, get_current_device, select_device, detect, profiling)}
    names |= dict.fromkeys(("profile_start", "profile_stop"), nothing)
    names |= {
        "reduce": Reduce,
        "Reduce": Reduce,
        "devices": devices,
        "event": Event,
        "Event": Event,
        "event_elapsed_time": Event.elapsed_time,
    }
    stream = _stream_class(api.stream)
    names |= dict.fromkeys(("stream", "default_stream", "legacy_default_stream", "per_thread_default_stream"), stream)
    names |= {name: unsupported(f"cuda.{name}", "which compiles nothing") for name in _COMPILES}
    names |= {name: unsupported(f"cuda.{name}", "which drives no GPU") for name in _DRIVES}
    names["declare_device"] = lambda name, *_, **__: unsupported(f"{name}", "which runs no CUDA C++ or PTX")
    _install_ufuncs(cuda, vectorizers, devicearray.FakeCUDAArray)
    devices.gpus.lst = (_CONTEXT,)
    for module in (cuda, api, devicearray):
        for name, value in names.items():
            if module is cuda or hasattr(module, name):
                setattr(module, name, value)
    devices.get_context = current_context
