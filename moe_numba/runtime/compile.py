"""A kernel compiled as a whole program, with an entry in C++: for kernels that take tensor maps.

A tensor map must reach a kernel by value, as a ``__grid_constant__``, which Numba cannot say. So the entry is C++, made
here, and calls the Numba function; both are linked while they are still intermediate code (LTO), and the call is gone.
It is also the way to ``setmaxnreg``: from PTX the linker makes relocatable code, in which it ignores that instruction.
"""

import contextlib
import ctypes
import re
import struct
import threading
from functools import cache
from types import SimpleNamespace

from numba import cuda, types

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.cubin_cache import load_or_make
from moe_numba.runtime.launch import _FORMATS as FORMATS
from moe_numba.runtime.launch import Compiled, Launcher, _CompileOnlyLauncher, launcher
from moe_numba.runtime.launch import _attributes as attributes

MAP = "tensormap"  # in a signature: 128 bytes by value; the function gets a pointer to bytes
_C = {"int32": "int", "uint32": "unsigned", "int64": "long long", "uint64": "unsigned long long", "float32": "float"}


def entry_source(signature, threads):
    """The entry's C++, for ``body``, the function that does the work."""
    inside = ["const void*" if s == MAP or s[-1] == "*" else _C[s] for s in signature]
    outside = ["const __grid_constant__ Map" if s == MAP else t for s, t in zip(signature, inside, strict=True)]
    parameters = ", ".join(f"{t} a{i}" for i, t in enumerate(outside))
    values = ", ".join(f"&a{i}" if s == MAP else f"a{i}" for i, s in enumerate(signature))
    return (
        "struct alignas(64) Map { char bytes[128]; };\n"
        f'extern "C" __device__ void body({", ".join(inside)});\n'
        f'extern "C" __global__ void __launch_bounds__({threads}, 1) entry({parameters}) {{ body({values}); }}\n'
    )


def compile_program(kernel, signature, threads, *, arch=(9, 0, "a")):
    """Compile a ``@cuda.jit`` function; no GPU is needed.

    Parameters
    ----------
    kernel : Numba dispatcher
    signature : tuple of str
        As for :func:`moe_numba.runtime.launch.compile_kernel`, or ``"tensormap"``.
    threads : int
        Of a block, at most.
    arch : tuple
        Compute capability, with the suffix ``"a"`` for Hopper's own instructions.

    Returns
    -------
    code, log
        An ``ObjectCode`` whose kernel is called "entry", and what ptxas said.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode, Program, ProgramOptions

    name = "sm_" + "".join(map(str, arch))
    plain = ["uint8*" if s == MAP else s for s in signature]
    arguments = [types.CPointer(getattr(types, s[:-1])) if s[-1] == "*" else getattr(types, s) for s in plain]
    with compiling_for(arch):
        codes, _ = cuda.compile_all(
            _body(kernel, len(signature)),
            types.void(*arguments),
            device=True,
            abi="c",
            abi_info={"abi_name": "body"},
            cc=arch,
            output="ltoir",
        )
    options = ProgramOptions(arch=name, link_time_optimization=True)
    entry = Program(entry_source(signature, threads), "c++", options).compile("ltoir")
    options = LinkerOptions(arch=name, link_time_optimization=True, ptxas_options=["-v"])
    objects = (c if isinstance(c, ObjectCode) else ObjectCode.from_ltoir(c) for c in (entry.code, *codes))
    linker = Linker(*objects, options=options)  # what a kernel's device functions were declared to link is an object
    code = linker.link("cubin")
    return code, re.sub("\0", "", linker.get_info_log())


@contextlib.contextmanager
def compiling_for(arch):
    """Numba asks the current device what to compile device functions for, even where a target was named."""
    from numba.cuda import dispatcher

    asked, dispatcher.get_current_device = (
        dispatcher.get_current_device,
        lambda: SimpleNamespace(compute_capability=arch),
    )
    try:
        yield
    finally:
        dispatcher.get_current_device = asked


def _body(kernel, count):
    """A function that only calls the kernel's: one with Python's errors in it (a tuple's index) has no C interface."""
    names = ", ".join(f"a{i}" for i in range(count))
    space = {"kernel": cuda.jit(device=True)(kernel.py_func)}
    exec(f"def body({names}):\n    kernel({names})", space)
    return space["body"]


def compile_once(kernel, signature, threads, *, arch=(9, 0, "a"), key=None):
    """The machine code of :func:`compile_program`, from disk if it was kept there under this ``key``."""

    def make():
        return compile_program(kernel, signature, threads, arch=arch)[0].code

    return load_or_make(key and (key, signature, threads, arch), make)


class ProgramLauncher(Launcher):
    """A program made ready for one device: calling it starts it; a tensor map's value is its 128 bytes.

    Make it with :func:`program`, which keeps the ones it made.
    """

    def __init__(self, kernel, signature, device, *, threads, shared_bytes, cluster, dependent, key):
        from cuda.bindings import driver
        from cuda.core import ObjectCode

        arch = (*devices.gpu_of(device).capability, "a")
        code = ObjectCode.from_cubin(compile_once(kernel, signature, threads, arch=arch, key=key))
        self.compiled = Compiled(None, code, "entry", None)
        self._kernel = code.get_kernel("entry")  # keeps the code loaded
        handle = driver.CUkernel(int(self._kernel.handle))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, handle, driver.CUdevice(device))
        if error:
            raise ValueError(f"shared_bytes is {shared_bytes}, more than this GPU gives a block: {error.name}")
        self._function = driver.CUfunction(int(handle))
        self._device, self._shared_bytes, self._driver = device, shared_bytes, driver
        pieces = ["128s" if s == MAP else "Q" if s[-1] == "*" else FORMATS[s] for s in signature]
        self._format = struct.Struct("=" + "".join(pieces))
        sizes = [struct.calcsize("=" + piece) for piece in pieces]
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        self._attributes = attributes(driver, cluster, False, dependent)
        self._thread = threading.local()

    def _prepare(self):
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


@cache
def program(kernel, signature, device, *, threads, shared_bytes=0, cluster=None, dependent=False, key=None):
    """Make a program ready to be started again and again, and keep it; see :func:`moe_numba.runtime.launch.launcher`.

    ``key`` tells the kernel from all others that the package makes; with one its machine code is kept on disk.
    """
    if simulator.ENABLED:
        plain = tuple("uint8*" if s == MAP else s for s in signature)
        return launcher(kernel, plain, device, shared_bytes=shared_bytes, cluster=cluster)
    if devices.target():
        options = dict(threads=threads, shared_bytes=shared_bytes, cluster=cluster, dependent=dependent)
        return _CompileOnlyLauncher(kernel, signature, options)
    return ProgramLauncher(
        kernel,
        signature,
        device,
        threads=threads,
        shared_bytes=shared_bytes,
        cluster=cluster,
        dependent=dependent,
        key=key,
    )
