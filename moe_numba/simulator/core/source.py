"""A function's source: its syntax tree, checked against what was compiled, and the static values that it names."""

import ast
import copy
import dis
import functools
import inspect
import textwrap
import types

from moe_numba.simulator.asynchronous.uses_async import names_in

written = {}  # code that the simulator has made from a function's source -> the code that the function was defined with


class NoSource(Exception):
    """A function's source is not known."""


def original(function):
    """Return the code that a function was defined with."""
    return getattr(function, "defined_code", function.__code__)


@functools.lru_cache(maxsize=4096)
def definition(code):
    """Return the syntax tree of a function's definition, with the positions that it has in its file."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndentationError) as error:
        raise NoSource(f"{code.co_name} has no source: {error}") from None
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name]
    if not found or found[0] is not tree.body[0]:
        raise NoSource(f"{code.co_name} is not defined by a def statement")
    ast.increment_lineno(tree, first - 1)
    found[0].decorator_list = []
    _check_same(code, found[0])
    return found[0]


@functools.lru_cache(maxsize=4096)
def instruction_starts(code):
    """Return, for each bytecode offset, where the instruction begins to which it belongs.

    Python's specialised instructions leave `f_lasti` at a cache entry behind the instruction.
    """
    starts = [instruction.offset for instruction in dis.get_instructions(code)]
    ends = [*starts[1:], len(code.co_code)]
    return {offset: start for start, end in zip(starts, ends) for offset in range(start, end, 2)}


_INCIDENTAL = {"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL", "RESUME"}


def _check_same(code, definition):
    """Raise for a source that the function was not compiled from, such as that of a changed copy of a module."""
    definition = copy.deepcopy(definition)
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    factory = make_function("_Vfactory", arguments(code.co_freevars), [definition])
    module = compile(ast.fix_missing_locations(ast.Module([factory], [])), code.co_filename, "exec")
    again = code_in(code_in(module, "_Vfactory"), code.co_name)
    if _instructions(again) != _instructions(code):
        raise NoSource(f"the source of {code.co_name} has changed")


def _instructions(code):
    """Return a function's instructions, without what depends on the code around the function."""
    found = []
    for i in dis.get_instructions(code):
        if i.opname not in _INCIDENTAL:
            value = None if "JUMP" in i.opname or "FOR_ITER" in i.opname or "SEND" in i.opname else i.argval
            value = "code" if isinstance(value, types.CodeType) else value
            found.append((i.opname.replace("LOAD_METHOD", "LOAD_ATTR"), type(value), value))
    return found


def code_in(code, name):
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def make_function(name, arguments, body):
    made = ast.FunctionDef(name=name, args=arguments, body=body, decorator_list=[])
    made.type_params = []
    return made


def arguments(names):
    return ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[])


class Static:
    """Values of names that do not belong to the function itself: closures, globals and builtins."""

    missing = object()

    def __init__(self, function):
        self.code, self.globals = original(function), function.__globals__
        self.cells = dict(zip(self.code.co_freevars, function.__closure__ or ()))

    def kinds(self, special):
        """Return what the transformation asks of the values that the function names; `special` as there."""
        values = {name: self.name(name) for names in names_in(self.code) for name in names}
        return tuple((name, self._kind(values[name], special)) for name in sorted(values))

    def _kind(self, value, special):
        from numba.core.types.abstract import Type  # not at the top: without simulation, Numba must not be loaded

        if value is self.missing or isinstance(value, (types.ModuleType, type, Type)):
            return value
        return special(value)

    def name(self, name):
        if name in self.cells:
            try:
                return self.cells[name].cell_contents
            except ValueError:
                return self.missing
        builtins = self.globals.get("__builtins__", {})
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)
        return self.globals.get(name, builtins.get(name, self.missing))
