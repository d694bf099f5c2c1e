"""Compiles kernels in a second process: a process has either Numba's compiler or the simulator. It needs no GPU.

The second process starts with the first kernel, or by `start`, and serves until the program ends.

A kernel travels there by value: its code, its closures, the globals that it names, and its device functions. So kernels
of a `__main__` script and closures can be compiled, but not a kernel that names an object that cannot be pickled.
Other functions and classes travel by name, so the second process imports their modules.
"""

import atexit
import contextlib
import importlib
import io
import json
import os
import pickle
import re
import signal
import struct
import subprocess
import sys
import sysconfig
import tempfile
import threading
from types import FunctionType, ModuleType

import numpy as np

from moe_numba.simulator import compiler
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
    """Compile requests in the second process; return a dict for each.

    That holds the resources that were asked for, or "reason" with the compiler's reason, and "file" and "line" if the
    compiler names one. "unpacked" is False if the second process could not import what the kernel names. Requests that
    were answered before are not compiled again.
    """
    if compiler.MODULE is None:
        return [{"reason": "simulator.compiler.MODULE names no compiler"}] * len(requests)
    with _lock:
        return _current().compile(requests)


def start() -> None:
    """Start the second process if there is none, so that it imports the compiler while the program goes on."""
    if compiler.MODULE is not None:
        with _lock:
            _current()


class _Compiler:
    """The second process, what it was started with, and its answers."""

    def __init__(self, started_with: tuple):
        self.started_with = started_with
        self.answers: dict[tuple, dict] = {}  # (folder, sys.path, request) -> answer
        self.imported: dict[str, list] = {}  # module -> its file, and when that changed
        self.errors = tempfile.TemporaryFile()
        paths = {"PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, sys.path)])}
        self.process = subprocess.Popen(
            [sys.executable, "-m", __spec__.name, compiler.MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=_environment() | paths,
        )

    def serves(self, started_with: tuple) -> bool:
        """Whether it runs, was started with the same, and its modules are those of this process."""
        if self.process.poll() is not None or self.started_with != started_with:
            return False
        own = lambda name: getattr(sys.modules.get(name), "__file__", None)
        return all(
            os.path.abspath(own(name) or file) == file and _changed(file) == changed
            for name, (file, changed) in self.imported.items()
        )

    def compile(self, requests: list[bytes]) -> list[dict]:
        where = os.getcwd(), (_ROOT, *map(os.path.abspath, sys.path))
        unknown = [request for request in dict.fromkeys(requests) if (*where, request) not in self.answers]
        if unknown:
            begin = os.fstat(self.errors.fileno()).st_size
            try:
                reply = self._ask(pickle.dumps((*where, unknown)))
            except BaseException:  # an interrupted program does not wait for the answer, which must not be the next one
                self.end()
                raise
            if reply is None:
                return [{"reason": self._last_words(begin)}] * len(requests)
            self.answers |= {(*where, request): answer for request, answer in zip(unknown, reply["answers"])}
            self.imported |= reply["imported"]
        return [dict(self.answers[*where, request]) for request in requests]

    def _ask(self, message):
        """Send a message and return the reply; None if the process ends instead."""
        with contextlib.suppress(OSError):
            _write(self.process.stdin, message)
        reply = _read(self.process.stdout)
        return None if reply is None else json.loads(reply)

    def _last_words(self, begin):
        """Return the last line that the process has written since its standard error had so many bytes, or its code."""
        code = self.process.wait()
        self.errors.seek(begin)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"the compiler ended with {code}"

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for file in (self.process.stdin, self.process.stdout, self.errors):
            with contextlib.suppress(OSError):  # what is left to write has no reader
                file.close()


_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
_OWN = "PYTHONPATH", "PYTEST_CURRENT_TEST"  # variables that change, and mean nothing to the compiler
_SWITCHES = {"MOE_NUMBA_SIMULATE": "0", "NUMBA_ENABLE_CUDASIM": "0", "MOE_NUMBA_COMPILE": "0"}
_lock = threading.Lock()
_running: _Compiler | None = None


def _environment():
    kept = {name: value for name, value in os.environ.items() if name not in _OWN}
    return {**kept, **_SWITCHES, "NUMBA_COLOR_SCHEME": "no_color"}


def _current():
    """Return the compiler of this process (a fork has its own), and start it if it has to start."""
    global _running
    started_with = os.getpid(), sys.executable, compiler.MODULE, _environment()
    if _running is None or not _running.serves(started_with):
        _end()
        _running = _Compiler(started_with)
    return _running


@atexit.register  # before that of `launched`, whose last kernels are compiled first
def _end():
    global _running
    if _running is not None and _running.started_with[0] == os.getpid():
        _running.end()
    _running = None


def _write(stream, message):
    stream.write(struct.pack("<Q", len(message)) + message)
    stream.flush()


def _read(stream):
    """Return the next message, or None at the end."""
    if len(head := stream.read(8)) < 8:
        return None
    (length,) = struct.unpack("<Q", head)
    return message if len(message := stream.read(length)) == length else None


def _changed(file):
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None


def _dumps(value):
    """Pickle kernels and device functions by value, and instructions by the factories that made them."""
    from numba import cloudpickle  # Numba's own copy
    from numba.core.types.scalars import Integer

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, item):
            if type(item).__name__ == "Kernel" and isinstance(getattr(item, "py_func", None), FunctionType):
                return _make_device_function, (_undecorated(item.py_func),)
            if type(item) is Integer:  # without the numbers that the simulator's casts have kept in it
                return _attribute, ("numba.core.types", item.name)
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
    """Compile the requests of each message of standard input, until it ends.

    Python has imported `moe_numba`, which chooses the compiler, to find this module.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C interrupts the program, which then ends this process
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the compiler prints is no reply
    with contextlib.suppress(Exception):  # a request fails with the same error, and tells it
        importlib.import_module(sys.argv[1])
    reported = {"__main__", "__mp_main__"}  # multiprocessing's name of the same
    while (message := _read(sys.stdin.buffer)) is not None:
        folder, paths, requests = pickle.loads(message)
        os.chdir(folder)
        sys.path[:] = paths
        importlib.invalidate_caches()
        answers = [_answer(request) for request in requests]
        imported = _imported(reported)
        reported |= imported.keys()
        _write(replies, json.dumps({"answers": answers, "imported": imported}).encode())


def _answer(packed):
    try:
        function, jit_options, signature, options, resources = pickle.loads(packed)
    except Exception as error:  # an import of the program's modules may fail
        return _refusal(error) | {"unpacked": False}
    try:
        return _compile(function, jit_options, signature, options, resources)
    except Exception as error:  # Numba's errors have many types
        return {} if _links_at_launch(error) and not resources else _refusal(error)


def _imported(reported):
    """Return the files, and when they changed, of modules that are not reported, nor Python's or installed ones."""
    installed = tuple({path + os.sep for name, path in sysconfig.get_paths().items() if name.endswith("lib")})
    files = {
        name: os.path.abspath(module.__file__)
        for name, module in list(sys.modules.items())
        if name not in reported and getattr(module, "__file__", None)
    }
    return {name: (file, _changed(file)) for name, file in files.items() if not file.startswith(installed)}


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

    kernel = cuda.jit(**jit_options)(function)
    return importlib.import_module(sys.argv[1]).report(kernel, signature, resources, **options)


if __name__ == "__main__":
    _serve()
