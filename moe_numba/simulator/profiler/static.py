"""Static properties of a profiled kernel: registers, spills and shared memory from the compiler, and occupancy.

A process has either Numba's compiler or the simulator, so the kernel is compiled in a process of its own, without a
GPU. The kernel travels there by value: its code, its closures and its device functions.
"""

import importlib
import io
import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from types import FunctionType, ModuleType

import numpy as np

from moe_numba.simulator.core.kernel import Kernel
from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.core.source import original
from moe_numba.simulator.profiler.occupancy import Occupancy, occupancy

_REGISTERS_PER_BLOCK = 65536


@dataclass
class StaticProfile:
    """What the compiler makes of a kernel for one GPU.

    `registers` and the numbers after it are None where the kernel could not be compiled; `reason` then says why.
    `sass_lines` maps "file:line" to the number of SASS instructions of that line.
    """

    gpu: str
    launch_bounds: object = None
    registers: int | None = None
    stack_bytes: int | None = None
    spilled_bytes: int | None = None
    static_shared_bytes: int | None = None
    sass_lines: dict | None = None
    reason: str | None = None
    setmaxnreg_registers: int | None = None  # that a block's warpgroups have after setmaxnreg, of 65,536
    occupancy: list[Occupancy] = field(default_factory=list)  # of each launch

    def estimated_instructions(self, kernel):
        """Estimate the warp-level instructions of all launches: SASS instructions of a line times its executions.

        Lines before the first one that runs (the `def`) count once per warp. Too low or too high where the compiler
        unrolls a loop, replaces a branch by predicates or moves code out of a loop. None without line information.
        """
        if not self.sass_lines:
            return None
        executions = {f"{line.file}:{line.line}": line.executions for line in kernel.lines}
        warps = sum(launch["warps"] for launch in kernel.launches)
        first = min(line.line for line in kernel.lines if line.file == kernel.file and line.function == kernel.name)
        before = {f"{kernel.file}:{number}" for number in range(first)}
        return sum(
            count * executions.get(site, warps if site in before else 0) for site, count in self.sass_lines.items()
        )

    def as_dict(self):
        """Return the values as built-in types."""
        return asdict(self) | {"occupancy": [o._asdict() for o in self.occupancy]}

    def __str__(self):
        if self.registers is None:
            compiled = f"not compiled ({self.reason})"
        else:
            compiled = (
                f"{self.registers} registers, {self.spilled_bytes} bytes spilled, {self.static_shared_bytes} bytes of "
                f"static shared memory, launch bounds {self.launch_bounds}"
            )
        texts = [f"{self.gpu}: {compiled}"]
        if self.setmaxnreg_registers is not None:
            texts.append(f"setmaxnreg: {self.setmaxnreg_registers} of {_REGISTERS_PER_BLOCK} registers")
        for o in dict.fromkeys((*o[:1], ", ".join(o.limited_by), *o[3:]) for o in self.occupancy):
            blocks, limits, share, resident, fits = o
            texts.append(
                f"occupancy {share:.0%} ({blocks} blocks per SM, limited by {limits}), {resident} blocks at once: "
                f"{'all blocks are co-resident' if fits else 'not all blocks are co-resident'}"
            )
        return "; ".join(texts)


def compile_for(kernels, gpu):
    """Compile the kernels of a list of `KernelProfile` for a GPU, and set their `static`."""
    requests = []
    for kernel in kernels:
        bounds = kernel.options.get("launch_bounds")
        if bounds is None and kernel.setmaxnreg:
            bounds = math.prod(kernel.launches[0]["block"])
        kernel.static = StaticProfile(gpu.name, bounds)
        if kernel.setmaxnreg:
            kernel.static.setmaxnreg_registers = 128 * sum(kernel.setmaxnreg.values())
        requests.append(_request(kernel, gpu))
    for kernel, report in zip(kernels, _compile_apart(requests), strict=True):
        for name, value in report.items():
            setattr(kernel.static, name, value)
        for launch in kernel.launches:
            threads, blocks = math.prod(launch["block"]), math.prod(launch["grid"])
            found = occupancy(gpu, threads, blocks, kernel.static.registers, launch["shared_bytes"])
            kernel.static.occupancy.append(found)


def _request(kernel, gpu):
    """Return a kernel with its signature and compiler options as bytes, or the reason why it cannot be sent."""
    options = {"arch": _architecture(gpu.capability), "launch_bounds": kernel.static.launch_bounds}
    # The linker takes setmaxnreg only from kernels with an entry in C++, which have no line information.
    options |= {"cpp_entry": True} if kernel.setmaxnreg else {"lineinfo": True}
    try:
        signature = tuple(type_name(value) for value in kernel.arguments)
        return _dumps((Kernel(kernel.function, **kernel.options), signature, options))
    except Exception as error:  # whatever a closure holds may refuse to be pickled
        return _reason(error)


def _reason(error):
    return f"{type(error).__name__}: {error}".strip().splitlines()[0]


def _architecture(capability):
    return (*capability, "a") if capability >= (9, 0) else capability


def type_name(value):
    """Return the name of an argument's type as `runtime.compile` takes it."""
    if isinstance(value, Pointer):
        return f"{_scalar_name(value.dtype)}*"
    if isinstance(value, Array):
        return f"{_scalar_name(value.dtype)}[{',' * (value.array.ndim - 1)}]"
    if isinstance(value, (bool, np.bool_)):
        return "boolean"
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        return "int64" if isinstance(value, int) else "float64"
    if isinstance(value, np.generic):
        return _scalar_name(value.dtype)
    raise TypeError(f"an argument of type {type(value).__name__} has no type name")


def _scalar_name(dtype):
    if dtype.kind == "V" or dtype.names:
        return {1: "uint8", 2: "uint16"}[dtype.itemsize]  # bfloat16 and 8-bit floats travel as their bits
    return "boolean" if dtype.kind == "b" else dtype.name


def _compile_apart(requests):
    """Compile requests in a process of its own; return a dict of each kernel's properties, or of the reason."""
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    paths = os.pathsep.join([root, *filter(None, sys.path)])
    environment = {**os.environ, "MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": paths}
    command = [sys.executable, "-m", __spec__.name]
    done = subprocess.run(command, input=pickle.dumps(requests), capture_output=True, env=environment)
    if done.returncode:
        lines = done.stderr.decode().strip().splitlines()
        return [{"reason": lines[-1] if lines else f"the compiler ended with {done.returncode}"}] * len(requests)
    return json.loads(done.stdout.decode().splitlines()[-1])


def _dumps(value):
    """Pickle kernels and device functions by value, and instructions by the factories that made them."""
    from numba import cloudpickle  # Numba's own copy

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, item):
            if isinstance(item, Kernel):
                return _make_kernel, (_undecorated(item.py_func), _plain_options(item.targetoptions))
            if isinstance(item, ModuleType):
                return importlib.import_module, (item.__name__,)
            if isinstance(item, FunctionType):
                if made_by := item.__dict__.get("made_by"):  # see `ptx.intrinsic.factory`
                    return _call_factory, made_by
                if getattr(item, "py_func", None) is item:
                    return _make_device_function, (_undecorated(item),)
                if item.__dict__.get(_BY_VALUE):
                    return self._dynamic_function_reduce(item)
            return super().reducer_override(item)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


_BY_VALUE = "_profiled_by_value"


def _undecorated(function):
    """Return a copy of a function without the simulator's attributes."""
    copy = FunctionType(
        original(function), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__kwdefaults__ = function.__kwdefaults__
    setattr(copy, _BY_VALUE, True)
    return copy


def _plain_options(options):
    return {name: value for name, value in options.items() if name in ("launch_bounds", "max_registers", "fastmath")}


def _call_factory(module, factory, args, kwargs):
    return getattr(importlib.import_module(module), factory)(*args, **kwargs)


def _make_device_function(function):
    from numba import cuda

    return cuda.jit(device=True)(function)


def _make_kernel(function, options):
    from numba import cuda

    return cuda.jit(**options)(function)


def _serve():
    """Compile the kernels that standard input holds, and print a report of each."""
    import moe_numba  # noqa: F401  chooses the compiler before Numba is loaded

    reports = []
    for request in pickle.load(sys.stdin.buffer):
        try:
            reports.append({"reason": request} if isinstance(request, str) else _compile(*pickle.loads(request)))
        except Exception as error:  # Numba's errors have many types
            reports.append({"reason": _reason(error)})
    print(json.dumps(reports))


def _compile(kernel, signature, options):
    from moe_numba.runtime.compile import compile_kernel
    from moe_numba.runtime.sass import disassemble, resources, sass_per_line, static_shared_bytes

    compiled = compile_kernel(kernel, signature, **options)
    shared = static_shared_bytes(compiled.code.code, options["arch"])
    text = disassemble(compiled.code.code, "-c", "-g")
    lines = text and {f"{file}:{line}": count for (file, line), count in sass_per_line(text).items()}
    return {**resources(compiled.log), "static_shared_bytes": shared, "sass_lines": lines}


if __name__ == "__main__":
    _serve()
