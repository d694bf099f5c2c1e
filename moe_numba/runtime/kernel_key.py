"""Identity of a kernel: a digest of all source that its machine code depends on.

The digest covers the kernel's bytecode, the values that it takes from closures and globals, and, recursively, every
device function and intrinsic that it calls. Two configurations of a factory therefore differ, and so does a kernel of
which a test has replaced a device function.
"""

import hashlib
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType

_OWN = "moe_numba"
_SIMULATOR = f"{_OWN}.simulator."
# What these packages define is identified by its text; the keys of the cubin cache hold the packages' versions.
_LIBRARIES = ("builtins", "math", "operator", "numpy", "numba", "llvmlite", "torch", "cuda")


class UnknownValueError(Exception):
    """A kernel uses a value whose content cannot be identified."""


def kernel_key(kernel):
    """Return a digest of a kernel of this package, or None for a kernel from elsewhere (a notebook, a test)."""
    try:
        return hashlib.sha256("\n".join(description(kernel)).encode()).hexdigest()
    except UnknownValueError:
        return None


def description(value):
    """Return lines of text that determine a kernel.

    Raises
    ------
    UnknownValueError
        The kernel reaches a value that has no such text.
    """
    walk = _Walk()
    walk.add(value)
    return walk.lines


class _Walk:
    """Describes values line by line; a function that it meets again becomes a reference."""

    def __init__(self):
        self.lines, self._functions = [], {}

    def add(self, value):
        if isinstance(value, (str, bytes, int, float, complex, type(None), type(...))):
            self.lines.append(f"{type(value).__name__} {value!r}")
        elif isinstance(value, FunctionType):
            self._add_function(value)
        elif isinstance(value, CodeType):
            self._add_code(value)
        elif isinstance(value, (tuple, list)):
            self._add_items(value, value)
        elif isinstance(value, dict):
            self._add_items(value, [part for item in value.items() for part in item])
        elif isinstance(value, (set, frozenset)):
            self._add_items(value, sorted(value, key=repr))
        elif hasattr(value, "py_func"):  # Numba's dispatcher
            self._add_items(value, [value.targetoptions, value.py_func])
        elif hasattr(value, "_defn"):  # Numba's intrinsic
            self._add_items(value, [value._defn])
        elif isinstance(value, ModuleType):
            # Numba renames some of its modules when it first compiles.
            package, _, name = value.__name__.partition(".")
            self.lines.append(f"module {package} {name if package == _OWN else name.rpartition('.')[2]}")
        elif isinstance(value, (type, BuiltinFunctionType)):
            self.lines.append(f"{value.__module__}.{value.__qualname__}")
        elif _package(type(value).__module__) in _LIBRARIES and " at 0x" not in str(value):
            self.lines.append(f"{type(value).__qualname__} {value}")
        else:
            raise UnknownValueError(f"{type(value)}: {value!r}")

    def _add_items(self, container, items):
        self.lines.append(f"{type(container).__qualname__} of {len(items)}")
        for item in items:
            self.add(item)

    def _add_function(self, function):
        if function in self._functions:
            self.lines.append(f"function {self._functions[function]}")
            return
        self._functions[function] = len(self._functions)
        self.lines.append(f"function {function.__module__}.{function.__qualname__}")
        package = _package(function.__module__)
        if package in _LIBRARIES or function.__module__.startswith(_SIMULATOR):  # never a part of machine code
            return
        if package != _OWN:
            raise UnknownValueError(f"{function.__qualname__} is from {function.__module__}")
        self._add_code(function.__code__)
        self.add(function.__defaults__)
        enclosed = enclosed_by(function)
        for value in enclosed.values():
            self.add(value)
        used = *_globals_of(function.__code__, function.__globals__), *_attributes_of(function.__code__, enclosed)
        for name, value in used:
            self.lines.append(f"global {name}")
            self.add(value)

    def _add_code(self, code):
        self.lines.append(f"code {code.co_flags} {code.co_code.hex()} {code.co_names} {code.co_varnames}")
        self.add(code.co_consts)


def enclosed_by(function):
    """Return the values of a function's closure by name."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values[name] = cell.cell_contents
        except ValueError:  # defined only in a branch that was not taken
            values[name] = "empty cell"
    return values


def _globals_of(code, namespace):
    """Yield the names and values of globals that a function may read, also as attributes of the package's modules."""
    found = {name: namespace[name] for name in code.co_names if name in namespace}
    yield from found.items()
    yield from _attributes_of(code, found)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant, namespace)


def _attributes_of(code, values):
    """Yield what a function may read of the package's modules among ``values``."""
    for name, value in values.items():
        if isinstance(value, ModuleType) and _package(value.__name__) == _OWN:
            inside = vars(value)
            yield from ((f"{name}.{other}", inside[other]) for other in code.co_names if other in inside)


def _package(module):
    return (module or "").partition(".")[0]
