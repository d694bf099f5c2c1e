"""A driver that executes nothing and notes its launches: for tests of the host's part of a launch without a GPU.

Importing it, in a process with MOE_NUMBA_SIMULATE=0, replaces the driver for the rest of the process. Plans are those
of an H200. Tensors are on the CPU, and keep their values.
"""

import ctypes
import itertools
import struct
from typing import Any, NamedTuple

import cuda.bindings.driver
import cuda.core

from moe_numba.runtime import context, device, driver_launch, launch, replay, tensor_map

STREAM_OF = {0: 7}  # device -> torch's current stream
launches: list["Launched"] = []
_handles, _launchers = itertools.count(1000), {}
_Driver = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Launched(NamedTuple):
    """What the driver was told to launch."""

    kernel: str
    config: tuple  # grid, block, shared bytes, stream
    attributes: bytes
    arguments: tuple  # the bytes of each


class _Kernel:
    """A kernel without code."""

    from_cubin = classmethod(lambda cls, cubin: cls())

    def get_kernel(self, entry):
        self.handle = next(_handles)
        return self


def _make_launcher(kernel, signature, options):
    made = driver_launch.Launcher(kernel, signature, 0, **options)
    _launchers[made._function] = made
    return made


def _start(config, function, pointers, _):
    made = _launchers[function]
    *sizes, stream = struct.unpack("=" + driver_launch._CONFIG_FORMAT, ctypes.string_at(config, 40))
    first, count = struct.unpack("=QI", ctypes.string_at(config + 40, 12))
    addresses = (ctypes.c_void_p * len(made._formats)).from_address(pointers)
    sizes_of = (struct.calcsize(f"={text.rstrip('4x')}") for text in made._formats)
    arguments = tuple(map(ctypes.string_at, addresses, sizes_of))
    attributes = ctypes.string_at(first, count * driver_launch._ATTRIBUTE_BYTES) if count else b""
    launches.append(Launched(made.name, (*sizes, stream), attributes, arguments))
    return 0


def _encode(tensor, boxes, name, offset=0):
    """Return a map that begins with the address, as the driver's, and has a number for everything else."""
    checked = tensor_map._checked(name, tensor, boxes)
    described = f"{tensor.dtype} {checked}".encode()[-120:]
    return (tensor.data_ptr() + offset).to_bytes(8, "little") + described.rjust(120)


_driver: Any = _Driver(_start)
cuda.core.ObjectCode = _Kernel
cuda.bindings.driver.cuKernelSetAttribute = lambda *_: (0,)
cuda.bindings.driver.cuGetErrorString = lambda error: (0, b"text")
device.compile_only(device.H200, None)
driver_launch.machine_code = lambda *_, **__: (b"", "entry")
driver_launch._driver_launch = lambda: _driver
driver_launch._current_device = lambda: 0
for module in (context, driver_launch):
    module.bind_context, module.current_raw_stream = lambda _: None, STREAM_OF.get
launch._CompileOnlyLauncher = _make_launcher
tensor_map._encode = _encode
replay._is_replayed = lambda: True


def launched_by(call) -> list[Launched]:
    """Return the launches of a call."""
    launches.clear()
    call()
    return launches.copy()
