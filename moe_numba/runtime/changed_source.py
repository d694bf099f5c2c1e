"""Modules and functions made from changed source text: variants of kernels for lessons, and wrong ones for tests."""

import importlib.abc
import importlib.util
import inspect
import linecache
import re
import types
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from typing import Any


def changed_module(module: types.ModuleType, *replacements: tuple[str, str]) -> types.ModuleType:
    """Return a new module made from the source of ``module`` with passages replaced.

    Parameters
    ----------
    module : module
        Not modified.
    *replacements : (old, new)
        Applied in order; each replaces every occurrence of ``old``.

    Raises
    ------
    ValueError
        A passage does not occur in the source.
    """
    source = inspect.getsource(module)
    for old, new in replacements:
        if old not in source:
            raise ValueError(f"{module.__name__} has no passage {old!r}")
        source = source.replace(old, new)
    name = f"{module.__name__}_changed"
    loader = SourceLoader(source, f"{name}_{abs(hash(source))}.py")
    made = importlib.util.module_from_spec(ModuleSpec(name, loader))
    loader.exec_module(made)
    return made


def changed_source(function: Callable | str, old: str, new: str, name: str | None = None) -> str:
    """Return a function's source with one passage replaced, which must occur once; ``name`` renames the function."""
    source = source_of(function)
    if source.count(old) != 1:
        raise ValueError(f"the passage {old!r} occurs {source.count(old)} times, not once")
    source = source.replace(old, new)
    return source if name is None else re.sub(r"\bdef \w+\(", f"def {name}(", source, count=1)


def source_of(function: Callable | str) -> str:
    """Return the source of a function, of a cached function or of a kernel; a string is returned as it is."""
    return function if isinstance(function, str) else inspect.getsource(plain_function(function))


def define(source: str, namespace: Mapping[str, Any], filename: str = "cell") -> dict[str, Any]:
    """Run source text in a copy of ``namespace`` and return the copy with the names that the text defines."""
    module = types.ModuleType("moe_numba_defined")
    vars(module).update(namespace)
    SourceLoader(source, filename).exec_module(module)
    return vars(module)


class SourceLoader(importlib.abc.InspectLoader):
    """Loads a module from a string. Tracebacks and `inspect` find the source under ``filename``."""

    def __init__(self, source, filename):
        self.source, self.filename = source, filename
        linecache.cache[filename] = len(source), None, source.splitlines(keepends=True), filename

    def get_source(self, fullname):
        return self.source

    def get_code(self, fullname):
        return self.source_to_code(self.source, self.filename)


def plain_function(thing):
    """Return the Python function of a kernel, a cached function or a function."""
    return inspect.unwrap(getattr(thing, "py_func", thing))
