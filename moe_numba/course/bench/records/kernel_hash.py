"""Hashes of kernels: of their source, which needs neither a compiler nor a GPU, and of their machine code.

A row of a record keeps both hashes of the kernels that it timed. Names of modules, line numbers, comments, docstrings
and type hints change neither. The functions of the package that a kernel consists of are also hashed one by one, so
that ``changed_functions`` can compare them with the package as it is now.
"""

import ast
import functools
import hashlib
import importlib
import linecache
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

import moe_numba
from moe_numba.course.bench.records.code_hash import dump
from moe_numba.runtime import elf
from moe_numba.runtime.kernel_key import enclosed_by

CELLS = "cells."  # in front of the names of functions that are not the package's
_OWN, _PTX, _SIMULATOR = "moe_numba", "moe_numba.ptx.", "moe_numba.simulator"
_HALF = 8  # digits of a hash of one function, and of each half of `ast_hash`
_MACHINE_CODE = (".text.", ".nv.constant", ".rodata", ".nv.global.init")  # sections
_DEFINITION = re.compile(r"^(?: {4})?(?:def (\w+)|class (\w+)|(\w[\w, ]*) = )", re.MULTILINE)


def ast_hash(kernel: Any) -> str:
    """Return 16 hexadecimal digits that identify the source of a kernel and of everything that it calls.

    The first eight are the code: the syntax trees of its functions, the constants of their modules and the PTX of their
    instructions. The last eight are the values that factories passed to them, such as tile sizes. They are the same
    in the simulator and on a GPU. Raises ``OSError`` if the source is not available.
    """
    return _hashes(kernel)[0]


def functions(kernel: Any) -> list[str]:
    """Return ``"name hash"`` of each function and instruction that a kernel consists of, sorted.

    A function that a factory made counts as the factory, with the constants of its module that it names. The names of
    functions outside the package, such as those in a notebook's cells, begin with ``CELLS``.
    """
    return _hashes(kernel)[1]


def describe(launched: Iterable) -> list[dict]:
    """Return ``{"name", "code", "ast", "functions"}`` of kernels that were launched, each once, sorted by name.

    ``launched`` has the items of ``runtime.recording.noted_launches``. A kernel without machine code (simulated) or
    without source (typed into an interpreter) lacks the hash.
    """
    found = {}
    for kernel, cubin, options in launched:
        about = {"name": _function_of(kernel).__name__}
        if cubin is not None:
            about["code"] = machine_code_hash(cubin, options)
        try:
            about |= {"ast": ast_hash(kernel), "functions": functions(kernel)}
        except OSError:
            pass
        found[about["name"], about.get("code"), about.get("ast")] = about
    return [found[key] for key in sorted(found, key=str)]


def machine_code_hash(cubin: bytes, options: dict) -> str:
    """Return 16 hexadecimal digits that identify machine code, without the names in it, and its launch options."""
    sections, parts = elf.sections(cubin), [f"{name}={value}" for name, value in sorted(options.items())]
    for number, section in enumerate(sections):
        if section.name.startswith(".nv.shared."):
            parts.append(f"shared {section.size}")
        elif section.name.startswith(_MACHINE_CODE):
            filled = sorted(_target(relocation, sections) for relocation in elf.relocations(sections, number))
            parts.append(f"{_kind(section)} {_bytes_hash(section)} {filled}")
    return _digest(sorted(parts), 2 * _HALF)


def _target(relocation, sections):
    """Return what the loader fills in: a place in a section that is identified by its content."""
    target = relocation.symbol  # of another file: its name is part of the interface
    if relocation.section is not None:
        section = sections[relocation.section]
        target = _kind(section), _bytes_hash(section), relocation.value
    return f"{relocation.offset} {relocation.type} {relocation.addend} {target}"


def _kind(section):
    """Return the name of a section without that of the kernel: "text", "nv.constant3"."""
    return re.match(r"\.(text|nv\.\w+(\.init\b)?|\w+)", section.name)[1]


def _bytes_hash(section):
    return hashlib.sha256(section.data).hexdigest()


def _digest(lines, digits=_HALF):
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:digits]


# The package as it is now


def changed_functions(recorded: Iterable[str]) -> list[str]:
    """Return the names in what ``functions`` returned earlier that the package no longer defines in this way."""
    found = (function.split() for function in recorded if not function.startswith(CELLS))
    return [name for name, was in found if was not in _defined_now(name)]


@functools.cache
def _defined_now(name):
    """Return the hashes of all functions, classes and instructions of this name that the package defines."""
    found = set()
    for module in _homes()[name]:
        try:
            namespace = vars(importlib.import_module(module))
        except ImportError:  # of something that is not installed, so no kernel of a record is in it
            continue
        statements = _definitions(namespace["__file__"]).get(name, ())
        found |= {_statement_hash(statement, namespace) for statement in statements}
        if module.startswith(_PTX):
            found.add(_instruction_hash(module, name))
    return found


@functools.cache
def _homes():
    """Return the modules of the package that define each name."""
    homes = defaultdict(list)
    files = ((folder, file) for folder in moe_numba.__path__ for file in sorted(Path(folder).rglob("*.py")))
    for folder, path in files:
        parts = path.relative_to(folder).with_suffix("").parts
        module = ".".join([_OWN, *(parts[:-1] if parts[-1] == "__init__" else parts)])
        for name in {
            n for names in _DEFINITION.findall(path.read_text(encoding="utf-8")) for n in "".join(names).split(", ")
        }:
            homes[name].append(module)
    return homes


# A kernel's functions, and the values that they use


@functools.lru_cache(maxsize=4096)  # a kernel keeps the values that it was compiled with
def _hashes(kernel):
    walk = _Walk(kernel)
    return _digest(walk.code) + _digest(walk.values), sorted(set(walk.functions.values()))


class _Walk:
    """Follows a kernel from function to function; a function that it meets again becomes a number."""

    def __init__(self, kernel):
        self.code, self.values, self.functions, self._numbers = [], [], {}, {}
        self._add("kernel", kernel, passed=False)

    def _add(self, name, value, passed):
        """Describe what a function calls ``name``; ``passed`` if a factory passed it, False for a module's global."""
        lines = self.values if passed else self.code
        if _is_instruction(value):
            self._add_instruction(name, value)
        elif isinstance(function := _function_of(value), FunctionType):
            if not _is_library(function):
                self._add_function(name, function)
        elif isinstance(value, type) and _is_own(value):
            self.code.append(f"{name} class")
            namespace = vars(importlib.import_module(value.__module__))
            self._note(value, _definitions(namespace["__file__"])[value.__qualname__][-1], namespace)
        elif (text := _constant(value)) is not None:
            lines.append(f"{name} {text}")
        elif isinstance(value, tuple | list):  # with functions among the items
            for number, item in enumerate(value):
                self._add(f"{name}[{number}]", item, passed)
        elif passed:  # a type of Numba's; a global one has its name in the syntax tree
            lines.append(f"{name} {getattr(value, 'name', None) or getattr(value, '__name__', type(value).__name__)}")

    def _add_instruction(self, name, value):
        module, made, args, kwargs = _instruction_of(value)
        digest = _instruction_hash(module, made)
        self.code.append(f"{name} instruction {made} {digest}")
        self.functions[module, made] = f"{made} {digest}"
        for which, argument in [*enumerate(args), *sorted(kwargs.items())]:
            self._add(f"{name}({which})", argument, passed=True)

    def _add_function(self, name, function):
        is_new = function not in self._numbers
        self.code.append(f"{name} function {self._numbers.setdefault(function, len(self._numbers))}")
        if not is_new:
            return
        text, names, statement = _source(function.__code__, function.__code__.co_filename)
        self.code.append(text)
        self._note(function, statement, function.__globals__)
        enclosed = enclosed_by(function)
        for used, attributes in names:
            if used in enclosed:
                self._add_used(used, enclosed[used], attributes, passed=True)
            elif used in function.__globals__:
                definition = _definition_by_mode(used, function.__globals__)
                if definition is not None:
                    self.code.append(f"{used} {definition}")
                self._add_used(used, function.__globals__[used], attributes, passed=definition is not None)

    def _add_used(self, name, value, attributes, passed):
        if not isinstance(value, ModuleType):
            self._add(name, value, passed)
        elif value.__name__.startswith(_OWN) and not value.__name__.startswith(_SIMULATOR):
            for attribute in attributes:
                self._add(f"{name}.{attribute}", vars(value).get(attribute), passed=False)

    def _note(self, value, statement, namespace):
        """Note the statement that defines a function or class."""
        if statement not in self.functions:
            where = "" if _is_own(value) else CELLS
            name = (_names_of(statement) or [value.__name__])[0]
            self.functions[statement] = f"{where}{name} {_statement_hash(statement, namespace)}"


def _function_of(value):
    """Return the Python function of a kernel or device function."""
    return getattr(value, "py_func", value)


def _is_own(value):
    """Return whether the package defines a function or class, and not in its simulator.

    A notebook also makes modules from the package's source with some passages replaced; ``sys.modules`` has none of
    them.
    """
    module = value.__module__ or ""
    return module.startswith(f"{_OWN}.") and not module.startswith(_SIMULATOR) and module in sys.modules


def _is_library(function):
    """Return whether a function is part of an installed package or of the simulator, so that its name identifies it."""
    if (function.__module__ or "").startswith(_OWN):
        return function.__module__.startswith(_SIMULATOR)
    return bool({"site-packages", "dist-packages"} & set(Path(function.__code__.co_filename).parts))


def _is_instruction(value):
    """Return whether a value is one that `ptx` makes from PTX: an intrinsic, or what simulates it."""
    if made_by := getattr(value, "made_by", None):
        return made_by[0].startswith(_PTX)
    module = getattr(value, "__module__", None) or ""
    is_kernel_or_class = isinstance(value, type) or hasattr(value, "py_func")
    return module.startswith(_PTX) and not is_kernel_or_class and _name_of(value) is not None


def _instruction_of(value):
    """Return the module and the name that define an instruction, and the arguments of its factory."""
    return getattr(value, "made_by", None) or (value.__module__, _name_of(value), (), {})


def _name_of(value):
    return getattr(value, "__name__", None) or getattr(value, "name", None)


def _constant(value):
    """Return a text for a number, a string or a tuple of these; None for anything else."""
    if value is None or isinstance(value, int | str | bytes) or type(value) in (float, complex):
        return repr(value)
    if isinstance(value, np.generic):
        return f"{type(value).__name__} {value.item()!r}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {value.tolist()}"
    if isinstance(value, tuple):
        items = [_constant(item) for item in value]
        return None if None in items else f"({', '.join(items)})"
    return None


# Source


@functools.cache
def _source(code, filename):
    """Return a function's syntax tree as text, the names that it uses, and the statement of its module with it."""
    found = _defined_at(tuple(linecache.getlines(filename))).get((code.co_firstlineno, code.co_name), [])
    arguments = code.co_varnames[: code.co_argcount]
    nodes = [(node, statement) for node, statement in found if _arguments(node) == arguments]
    if not nodes:
        raise OSError(f"the source of {code.co_name} is not available: {filename} does not contain it")
    node, statement = nodes[0]
    local = {inside.arg for inside in ast.walk(node) if isinstance(inside, ast.arg)}
    local |= {i.id for i in ast.walk(node) if isinstance(i, ast.Name) and isinstance(i.ctx, ast.Store)}
    used = [(name, attributes) for name, attributes in _names(node) if name not in local]
    return "\n".join(dump(node) for node, _ in nodes), used, statement


@functools.cache
def _defined_at(lines):
    """Return {(first line, name): [(function, statement of the module)]} of a file's functions."""
    found = defaultdict(list)
    for statement in _statements(ast.parse("".join(lines)).body):
        for node in ast.walk(statement):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                line = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                found[line, node.name].append((node, statement))
            elif isinstance(node, ast.Lambda):
                found[node.lineno, "<lambda>"].append((node, statement))
    return found


def _statements(body) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those in its conditions."""
    for statement in body:
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(statement, part, []))
        else:
            yield statement


@functools.cache
def _definitions(file):
    """Return {name: [statement]} of what a file of the package defines, but not of what it imports."""
    found = {}
    for statement in _statements(ast.parse("".join(linecache.getlines(file))).body):
        for name in _names_of(statement):
            found.setdefault(name, []).append(statement)
    return found


def _names_of(statement):
    """Return the names that a statement of a module defines."""
    if isinstance(statement, ast.Assign):
        inside = (node for target in statement.targets for node in ast.walk(target))
        return [node.id for node in inside if isinstance(node, ast.Name)]
    return [statement.name] if hasattr(statement, "name") else []


def _arguments(node):
    arguments = node.args
    return tuple(argument.arg for argument in [*arguments.posonlyargs, *arguments.args])


@functools.cache
def _names(node):
    """Return the names that a node reads, sorted, each with the attributes that are read of it; without decorators."""
    found = defaultdict(set)
    decorators = {id(inside) for top in getattr(node, "decorator_list", ()) for inside in ast.walk(top)}
    for inside in ast.walk(node):
        if isinstance(inside, ast.Name) and id(inside) not in decorators:
            found[inside.id]  # noqa: B018  makes the entry
        elif isinstance(inside, ast.Attribute) and isinstance(inside.value, ast.Name):
            found[inside.value.id].add(inside.attr)
    return [(name, sorted(found[name])) for name in sorted(found)]


def _statement_hash(statement, namespace):
    """Hash a statement of a module with the constants of the module that it names."""
    texts = [_text(statement)]
    for name, _ in _names(statement):
        if name in namespace and (constant := _constant(namespace[name])) is not None:
            texts.append(f"{name} {_definition_by_mode(name, namespace) or constant}")
    return _digest(texts)


def _definition_by_mode(name, namespace):
    """Return how the package defines a constant that has another value in the simulator; None for all others."""
    if not namespace.get("__name__", "").startswith(f"{_OWN}.") or "__file__" not in namespace:
        return None
    texts = [_text(statement) for statement in _definitions(namespace["__file__"]).get(name, ())]
    return " ".join(texts) if len(texts) > 1 or any("attr='ENABLED'" in text for text in texts) else None


_text = functools.cache(dump)


@functools.cache
def _instruction_hash(module, name):
    """Hash the statement that defines an instruction or its factory, and what it names in the same module.

    What the simulator executes for an instruction, ``simulate=``, has no influence on machine code. An instruction in
    CUDA C++ is defined in a file beside the module.
    """
    file = Path(importlib.import_module(module).__file__)
    definitions, todo, texts = _definitions(str(file)), [name], {}
    while todo:
        current = todo.pop()
        if current in definitions and current not in texts:
            statement = definitions[current][-1]
            texts[current] = _text(statement)
            nodes = list(ast.walk(statement))
            simulated = {node.value for node in nodes if isinstance(node, ast.keyword) and node.arg == "simulate"}
            todo += [node.id for node in nodes if isinstance(node, ast.Name) and node not in simulated]
    if file.with_suffix(".cu").is_file():
        texts["CUDA C++"] = file.with_suffix(".cu").read_text(encoding="utf-8")
    return _digest(texts[key] for key in sorted(texts))
