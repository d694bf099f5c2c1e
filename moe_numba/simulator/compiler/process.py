"""Compiles kernels in a second process: a process has either Numba's compiler or the simulator. It needs no GPU.

A kernel travels there by value: its code, its closures, the globals that it names, and its device functions. So kernels
of a `__main__` script and closures can be compiled, but not a kernel that names an object that cannot be pickled.
Other functions and classes travel by name, so the second process imports their modules.
"""

import importlib
import io
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from types import FunctionType, ModuleType

import numpy as np

from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.core.source import original

_MOST_CHARACTERS = 300  # of a compiler's reason


class NotSent(Exception):
    """A kernel cannot travel to another process; the message says why."""


def architecture(capability):
    """Return the compute capability as `runtime.compile` takes it."""
    return (*capability, "a") if capability >= (9, 0) else capability


def request(function, jit_options, signature, resources=False, **options) -> bytes:
    """Return what `compile_apart` takes: a kernel, the types of its arguments and options of `compile_kernel`.

    `resources` asks for registers, spills, shared memory and SASS instructions, too. Raises `NotSent`.
    """
    jit_options = {k: v for k, v in jit_options.items() if k in ("launch_bounds", "max_registers", "fastmath")}
    try:
        return _dumps((_undecorated(function), jit_options, signature, options, resources))
    except Exception as error:  # whatever a closure holds may refuse to be pickled
        raise NotSent(f"{type(error).__name__}: {error}".strip().splitlines()[0]) from None


def signature_of(arguments):
    """Return the types of wrapped arguments as `runtime.compile` takes them. Raises `NotSent`."""
    return tuple(_type_of(value) for value in arguments)


def _type_of(value):
    if isinstance(value, Pointer):
        return f"{_scalar_name(value.dtype)}*"
    if isinstance(value, Array):
        flags, ndim = value.array.flags, value.array.ndim
        layout = "" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
        if value.array.dtype.names:
            from numba import types
            from numba.np.numpy_support import from_dtype

            return types.Array(from_dtype(value.array.dtype), ndim, layout or "C")
        return f"{_scalar_name(value.dtype)}[{',' * (ndim - 1)}]{layout}"
    if type(value) is tuple:
        return signature_of(value)
    if isinstance(value, (bool, np.bool_)):
        return "boolean"
    if value is None:
        return "none"
    if isinstance(value, (int, float, complex)) and not isinstance(value, np.generic):
        return "int64" if isinstance(value, int) else "float64" if isinstance(value, float) else "complex128"
    if isinstance(value, np.generic) and not value.dtype.names:
        return _scalar_name(value.dtype)
    raise NotSent(f"an argument is of type {type(value).__name__}")


def _scalar_name(dtype):
    if dtype.kind == "V" or dtype.names:
        return {1: "uint8", 2: "uint16"}[dtype.itemsize]  # bfloat16 and 8-bit floats travel as their bits
    return "boolean" if dtype.kind == "b" else dtype.name


def compile_apart(requests: list[bytes]) -> list[dict]:
    """Compile requests in a second process; return a dict for each.

    That holds the resources that were asked for, or "reason" with the compiler's reason, and "file" and "line" if the
    compiler names one. "unpacked" is False if the second process could not import what the kernel names.
    """
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    paths = os.pathsep.join([root, *filter(None, sys.path)])
    switches = {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "MOE_NUMBA_COMPILE": "0"}
    environment = {**os.environ, **switches, "PYTHONPATH": paths, "NUMBA_COLOR_SCHEME": "no_color"}
    # Files, not pipes: reading several pipes takes threads on Windows, which cannot start while Python exits.
    with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        source.write(pickle.dumps(requests))
        source.seek(0)
        command = [sys.executable, "-m", __spec__.name]
        done = subprocess.run(command, stdin=source, stdout=out, stderr=errors, env=environment)
        out.seek(0), errors.seek(0)
        if done.returncode:
            lines = errors.read().decode(errors="replace").strip().splitlines()
            reason = lines[-1] if lines else f"the compiler ended with {done.returncode}"
            return [{"reason": reason}] * len(requests)
        return json.loads(out.read().decode().splitlines()[-1])


def _dumps(value):
    """Pickle kernels and device functions by value, and instructions by the factories that made them."""
    from numba import cloudpickle  # Numba's own copy

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, item):
            if type(item).__name__ == "Kernel" and isinstance(getattr(item, "py_func", None), FunctionType):
                return _make_device_function, (_undecorated(item.py_func),)
            if isinstance(item, ModuleType):
                return importlib.import_module, (item.__name__,)
            if isinstance(item, FunctionType):
                if made_by := item.__dict__.get("made_by"):  # see `ptx.intrinsic.factory`
                    return _call_factory, made_by
                if getattr(item, "py_func", None) is item:
                    return _make_device_function, (_undecorated(item),)
                if item.__dict__.get(_BY_VALUE):
                    return self._dynamic_function_reduce(item)
                if "<locals>" in item.__qualname__ and (name := _global_name(item)):
                    return _attribute, (item.__module__, name)
            return super().reducer_override(item)

    buffer = io.BytesIO()
    Pickler(buffer).dump(value)
    return buffer.getvalue()


_BY_VALUE = "_compiled_by_value"


def _undecorated(function):
    """Return a copy of a function without the simulator's attributes."""
    copy = FunctionType(
        original(function), function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__qualname__, copy.__module__ = function.__qualname__, function.__module__
    copy.__kwdefaults__ = function.__kwdefaults__
    setattr(copy, _BY_VALUE, True)
    return copy


def _global_name(function):
    """Return the name of a global of a function's module that holds it, as of `name = make()`; None without one."""
    module = sys.modules.get(function.__module__)
    if module is None or module.__name__ == "__main__":
        return None
    return next((name for name, value in vars(module).items() if value is function), None)


def _attribute(module, name):
    return getattr(importlib.import_module(module), name)


def _call_factory(module, factory, args, kwargs):
    return _attribute(module, factory)(*args, **kwargs)


def _make_device_function(function):
    from numba import cuda

    return cuda.jit(device=True)(function)


def _serve():
    """Compile the requests that standard input holds, and print a report of each.

    Python has imported `moe_numba`, which chooses the compiler, to find this module.
    """
    reports = []
    for packed in pickle.load(sys.stdin.buffer):
        try:
            function, jit_options, signature, options, resources = pickle.loads(packed)
        except Exception as error:  # an import of the program's modules may fail
            reports.append(_refusal(error) | {"unpacked": False})
            continue
        try:
            reports.append(_compile(function, jit_options, signature, options, resources))
        except Exception as error:  # Numba's errors have many types
            reports.append({} if _links_at_launch(error) and not resources else _refusal(error))
    print(json.dumps(reports))


def _links_at_launch(error):
    """Return whether only functions are missing that a launch links, such as those of `grid.sync()`."""
    lines = [line for line in str(error).splitlines() if re.match(r".*error +:", line)]
    return bool(lines) and all("Undefined reference" in line for line in lines)


def _refusal(error):
    """Return the compiler's reason, shortened, and the innermost line of the source that it names."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
    kept = []
    for line in text.splitlines():
        if line.startswith(("Failed in ", "Invalid use of")) and not kept or not line.strip():
            continue
        if line.lstrip().startswith(('File "', "There are ", "There is ", "During: ")):
            break
        kept.append(line.strip())
    reason = " ".join(kept) or type(error).__name__
    if not type(error).__module__.startswith("numba"):
        reason = f"{type(error).__name__}: {reason}"
    found = {"reason": reason if len(reason) <= _MOST_CHARACTERS else reason[:_MOST_CHARACTERS] + "..."}
    return found | (_place(error) or _place_in(text))


def _place(error):
    """Return the line whose types Numba was inferring, from the traceback: not all of its errors name it."""
    places, tb = [], error.__traceback__
    while tb is not None:
        loc = getattr(tb.tb_frame.f_locals.get("self"), "loc", None)
        places += [loc] if type(loc).__name__ == "Loc" and loc.line else []
        tb = tb.tb_next
    return {"file": places[-1].filename, "line": places[-1].line} if places else {}


def _place_in(text):
    """Return the first line that a message of Numba names."""
    found = re.search(r'^ *File "(.*)", line (\d+):', text, re.MULTILINE)
    return {"file": found[1], "line": int(found[2])} if found else {}


def _compile(function, jit_options, signature, options, resources):
    from numba import cuda

    from moe_numba.runtime.compile import compile_kernel
    from moe_numba.runtime.sass import disassemble, sass_per_line, static_shared_bytes
    from moe_numba.runtime.sass import resources as resources_of

    compiled = compile_kernel(cuda.jit(**jit_options)(function), signature, **options)
    if not resources:
        return {}
    shared = static_shared_bytes(compiled.code.code, options["arch"])
    text = disassemble(compiled.code.code, "-c", "-gi")
    lines = text and {f"{os.path.abspath(file)}:{line}": count for (file, line), count in sass_per_line(text).items()}
    return {**resources_of(compiled.log), "static_shared_bytes": shared, "sass_lines": lines}


if __name__ == "__main__":
    _serve()
