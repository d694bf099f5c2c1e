"""Compiles ``@cuda.jit`` functions to machine code, with or without a GPU.

Everything in the package that depends on Numba's compiler internals is here and in ``moe_numba.ptx.intrinsic``;
what depends on those of the other compiler, numba-cuda-mlir, is in ``moe_numba.runtime.mlir``.
"""

import contextlib
import gc
import inspect
import re
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from numba import cuda, types

from moe_numba.extras import missing_extra
from moe_numba.ptx.capability import compiling_for
from moe_numba.runtime import compilers

__all__ = ["SM_90A", "TENSOR_MAP", "Compiled", "compile_kernel"]

SM_90A = (9, 0, "a")  # the suffix admits instructions that only Hopper has
ENTRY = "entry"  # the name of every entry in C++
TENSOR_MAP = "tensormap"  # in a signature: 128 bytes by value; the kernel gets a pointer to them
_COMPILER_LOCK = threading.RLock()  # Numba's compiler is not thread-safe
_C_TYPES = {
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float32": "float",
}


@dataclass(frozen=True)
class Compiled:
    """Machine code of a kernel for one signature."""

    code: object  # cuda.core.ObjectCode
    log: str  # what ptxas printed: registers, spills
    name: str | None = None  # of the entry; None with ``lto``
    ptx: str | None = None  # None with link-time optimisation


def compile_kernel(
    kernel,
    signature,
    *,
    arch=SM_90A,
    link_arch=None,
    launch_bounds=None,
    lto=False,
    cpp_entry=False,
    lineinfo=False,
    compiler=None,
):
    """Compile a ``@cuda.jit`` function; no GPU is needed.

    A kernel with a tensor map in its signature gets an entry in C++, because Numba cannot declare the
    ``__grid_constant__`` parameter that TMA needs. Both are linked with link-time optimisation, which inlines the call.

    Parameters
    ----------
    kernel : Numba dispatcher
    signature : tuple of str
        A type for each argument: ``"int32"``, ``"float32*"`` for a pointer, ``"float32[]"`` for a Numba array
        (``"float32[,]"`` for one of two dimensions, ``"float32[,]F"`` and ``"float32[,]A"`` for other layouts), or
        ``TENSOR_MAP``. A tuple of types is that of a tuple; Numba's own types are taken as they are.
    arch : tuple
        Compute capability that PTX is generated for, such as ``(9, 0, "a")``.
    link_arch : tuple, optional
        Compute capability that the PTX is assembled for, not older than ``arch``; ``arch`` by default.
    launch_bounds : int or tuple, optional
        Maximum threads per block (and minimum blocks per SM), as in CUDA C++. Required with a tensor map.
    lto : bool
        Link with link-time optimisation, so that linked device functions are inlined.
    cpp_entry : bool
        Make the entry in C++ also without a tensor map. ``setmaxnreg`` needs it (the linker ignores it in the
        relocatable code that it makes of PTX), and dynamic shared memory is then aligned behind static.
    lineinfo : bool
        Keep the source lines of instructions, for profilers and ``nvdisasm``. Without an entry in C++ only.
    compiler : str, optional
        ``"numba-cuda"`` or ``"mlir"`` (numba-cuda-mlir); the one that ``MOE_NUMBA_COMPILER`` names by default.

    Returns
    -------
    Compiled
    """
    launch_bounds = launch_bounds or kernel.targetoptions.get("launch_bounds")
    generate = _GENERATORS[compiler or compilers.chosen()]
    with _COMPILER_LOCK, _without_garbage_collection(), compiling_for(arch):
        if cpp_entry or TENSOR_MAP in signature:
            return _compile_with_entry(generate, kernel, signature, arch, link_arch or arch, launch_bounds)
        codes = generate(kernel, signature, arch, lto=lto, launch_bounds=launch_bounds, lineinfo=lineinfo)
        code, log = _link(codes, link_arch or arch, lto, lineinfo)
    if lto:
        return Compiled(code, log)
    return Compiled(code, log, re.search(r"\.entry\s+(\w+)", codes[0])[1], codes[0])


def assemble(compiled, arch):
    """Assemble the PTX of a kernel that was compiled without ``lto`` for another architecture."""
    code, log = _link([compiled.ptx], arch, False)
    return replace(compiled, code=code, log=log)


def _compile_with_entry(generate, kernel, signature, arch, link_arch, launch_bounds):
    """Compile the kernel as a C function, and the entry that calls it."""
    from cuda.core import Program, ProgramOptions

    codes = generate(kernel, signature, arch, lto=True, called=True)
    options = ProgramOptions(arch=_arch_name(arch), link_time_optimization=True)
    entry = Program(entry_source(signature, launch_bounds), "c++", options).compile("ltoir")
    code, log = _link([entry.code, *codes], link_arch, lto=True)
    return Compiled(code, log, ENTRY)


def _generate_with_numba_cuda(kernel, signature, arch, *, lto, launch_bounds=None, lineinfo=False, called=False):
    """Return the PTX or LTO-IR of a kernel, and that of what it links.

    With ``called`` the first is not an entry but the C function ``body``, which a C++ entry calls.
    """
    options = {"cc": arch, "output": "ltoir" if lto else "ptx"}
    with _compiling_for(arch, lineinfo):
        if not called:
            arguments = types.void(*_argument_types(kernel.py_func, signature))
            options |= {"launch_bounds": launch_bounds, "lineinfo": lineinfo}
            return cuda.compile_all(kernel.py_func, arguments, device=False, abi="numba", **options)[0]
        function = cuda.jit(device=True)(kernel.py_func)

        # The C ABI has no way to return Python's errors (an index beyond a tuple). So only the call has it.
        def body(*arguments):
            function(*arguments)

        arguments = types.void(types.StarArgTuple([_numba_type(s) for s in signature]))
        return cuda.compile_all(body, arguments, device=True, abi="c", abi_info={"abi_name": "body"}, **options)[0]


def _generate_with_mlir(kernel, signature, arch, *, lto, launch_bounds=None, lineinfo=False, called=False):
    """As `_generate_with_numba_cuda`, with numba-cuda-mlir."""
    try:
        from numba_cuda_mlir.numba_cuda import types as mlir_types
    except ImportError as error:
        raise missing_extra(error, f"{compilers.VARIABLE}={compilers.MLIR}") or error from None
    from moe_numba.runtime.mlir.code import generate

    arguments = _argument_types(kernel.py_func, signature, mlir_types)
    options = {"launch_bounds": launch_bounds, "lineinfo": lineinfo, "name": "body" if called else None}
    code, links = generate(kernel.py_func, arguments, arch, lto=lto, **options)
    linked = (Path(path) for path in links)
    return [code, *(_compile_cpp(path.read_text(), path.name, arch, lto) for path in linked)]


_GENERATORS = {compilers.DEFAULT: _generate_with_numba_cuda, compilers.MLIR: _generate_with_mlir}


def entry_source(signature, launch_bounds):
    """The C++ of a kernel entry that passes its arguments on to ``body``, tensor maps by address."""
    threads, blocks = launch_bounds if isinstance(launch_bounds, tuple) else (launch_bounds, 1)
    inside = ["const void*" if s == TENSOR_MAP or s[-1] == "*" else _C_TYPES[s] for s in signature]
    outside = ["const __grid_constant__ Map" if s == TENSOR_MAP else t for s, t in zip(signature, inside, strict=True)]
    parameters = ", ".join(f"{t} a{i}" for i, t in enumerate(outside))
    values = ", ".join(f"&a{i}" if s == TENSOR_MAP else f"a{i}" for i, s in enumerate(signature))
    bounds = f"__launch_bounds__({threads}, {blocks})"
    return (
        "struct alignas(64) Map { char bytes[128]; };\n"
        f'extern "C" __device__ void body({", ".join(inside)});\n'
        f'extern "C" __global__ void {bounds} {ENTRY}({parameters}) {{ body({values}); }}\n'
    )


def _argument_types(function, signature, types=types):
    """Return the types of a function's arguments, of either compiler; those of ``*args`` are one tuple."""
    found, code = [_numba_type(s, types) for s in signature], function.__code__
    if code.co_flags & inspect.CO_VARARGS:
        found[code.co_argcount :] = [types.StarArgTuple(found[code.co_argcount :])]
    return found


def _numba_type(name, types=types):
    if not isinstance(name, str | tuple):
        return name
    if isinstance(name, tuple):
        return types.Tuple([_numba_type(item, types) for item in name])
    if name == TENSOR_MAP:
        return types.CPointer(types.uint8)
    if name.endswith("*"):
        return types.CPointer(getattr(types, name[:-1]))
    if "[" in name:
        element, commas, layout = re.fullmatch(r"(\w+)\[(,*)\]([FA]?)", name).groups()
        return types.Array(getattr(types, element), len(commas) + 1, layout or "C")
    return getattr(types, name)


def _arch_name(arch):
    return "sm_" + "".join(map(str, arch))


def _link(codes, arch, lto, lineinfo=False):
    """Link PTX or LTO-IR; what a kernel's device functions were declared to link may already be an object."""
    from cuda.core import Linker, LinkerOptions, ObjectCode

    make = ObjectCode.from_ltoir if lto else ObjectCode.from_ptx
    objects = [c if isinstance(c, ObjectCode) else make(c.encode() if isinstance(c, str) else c) for c in codes]
    # nvJitLink prints no log for code that it finds in its own cache; `cubin_cache` is ours.
    options = LinkerOptions(
        arch=_arch_name(arch),
        link_time_optimization=lto or None,
        ptxas_options=["-v"],
        no_cache=True,
        lineinfo=lineinfo or None,
    )
    linker = Linker(*objects, options=options)
    return linker.link("cubin"), linker.get_info_log().replace("\0", "")


@contextlib.contextmanager
def _without_garbage_collection():
    """Numba makes so many objects that looking for unreachable cycles among them takes a quarter of a compilation."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _compiling_for(arch, lineinfo=False):
    """Let Numba compile for ``arch``; it would ask the current device, and the driver which PTX it takes."""
    from numba.cuda import dispatcher
    from numba.cuda.cudadrv import nvrtc

    kind = dispatcher.CUDADispatcher
    saved = dispatcher.get_current_device, nvrtc.compile, kind.compile_device

    def compile_device(function, args, return_type=None):
        # Numba compiles a device function once for all architectures; our intrinsics differ between them.
        # It also keeps the source lines of a device function only if that was declared with them.
        if getattr(function, "_compiled_for", None) != (arch, lineinfo):
            function.overloads.clear()
            function.targetoptions["lineinfo"] = lineinfo
            function._compiled_for = arch, lineinfo
        return saved[2](function, args, return_type)

    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=arch)
    nvrtc.compile = lambda text, name, cc, ltoir=False, **_: (_compile_cpp(text, name, cc, ltoir), "")
    kind.compile_device = compile_device
    try:
        yield
    finally:
        dispatcher.get_current_device, nvrtc.compile, kind.compile_device = saved


def _compile_cpp(text, name, arch, lto):
    """Compile CUDA C++ to PTX or LTO-IR by NVRTC itself: cuda.core's Program asks the driver about PTX."""
    from cuda.bindings import nvrtc

    def check(answer):
        if answer[0]:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = b" " * size
            nvrtc.nvrtcGetProgramLog(program, log)
            raise RuntimeError(f"NVRTC: {answer[0].name}\n{log.decode()}")
        return answer[1:]

    _, program = nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], [])
    options = [f"-arch={_arch_name(arch)}".encode(), b"-rdc=true", *[b"-dlto"] * lto]
    check(nvrtc.nvrtcCompileProgram(program, len(options), options))
    get_size, get = (
        (nvrtc.nvrtcGetLTOIRSize, nvrtc.nvrtcGetLTOIR) if lto else (nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX)
    )
    code = b" " * check(get_size(program))[0]
    check(get(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code if lto else code.rstrip(b"\0")
