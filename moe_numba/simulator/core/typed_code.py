"""Kernels' and device functions' code with the operators, casts and `math` functions of compiled code.

Threads run kernels as Python, whose operators would type NumPy numbers by NumPy's rules and Python numbers by Python's.
Before threads run a kernel, `install` replaces the code of its jitted functions. Code without source stays as it is.

The replaced code also counts the iterations of its loops, in variables of its own, so that `position` can compare how
far lanes are: it matters where lanes must execute an instruction together.
"""

import ast
import builtins
import copy
import sys
import types
import warnings
import weakref

import numpy as np

from moe_numba.simulator.asynchronous.uses_async import names_in, values_of
from moe_numba.simulator.core import math_functions, operators
from moe_numba.simulator.core.constant_array import constant_array, holds_array
from moe_numba.simulator.core.errors import kernel_frame
from moe_numba.simulator.core.source import (
    NoSource,
    Static,
    arguments,
    code_in,
    definition,
    instruction_starts,
    make_function,
    original,
    written,
)

FUNCTIONS = operators.CASTS | math_functions.VERSIONS | {builtins.pow: operators.SCALAR["pow"]}
_HELPERS = {f"\0{name}": function for name, function in operators.SCALAR.items()}
_HELPERS["\0as_float64"] = operators.as_float64
_HELPERS["\0constant_array"] = constant_array
_installed, _kernels = weakref.WeakSet(), weakref.WeakSet()
_COUNTER, _BEHIND = ".loop", 1 << 62  # the variables that count iterations, and their value behind the loop
_codes = {}  # id of a code -> itself, the variables that count iterations, and where its instructions begin
_made = {}  # (code, functions that are replaced) -> code
_DEPTH = 3  # of tuples and objects that hold device functions


def install(kernel):
    """Replace the code of a kernel, and of the jitted functions that it reaches by name."""
    if kernel in _kernels:
        return
    _kernels.add(kernel)
    tracer = sys.gettrace()
    sys.settrace(None)  # a thread whose lines the debugger counts may start the next kernel
    try:
        for function in reachable(kernel) - set(_installed):
            _installed.add(function)
            code = typed(function)
            if code is not None:
                function.defined_code, function.__code__ = original(function), code
    finally:
        sys.settrace(tracer)


def position(frame):
    """Return where a thread is in a kernel, as a tuple that is less for what comes before."""
    found = []
    while frame is not None:
        code = frame.f_code
        if id(code) not in _codes:
            counters = sorted(name for name in code.co_varnames if name.startswith(_COUNTER))
            _codes[id(code)] = code, counters, instruction_starts(code)
        _, counters, starts = _codes[id(code)]
        values = frame.f_locals if counters else None
        found.append((tuple([values[name] for name in counters]), starts[frame.f_lasti], id(code)))
        frame = kernel_frame(frame.f_back)
    return tuple(reversed(found))


def reachable(kernel):
    """Return a kernel and the jitted functions that it reaches by name."""
    found, todo = {kernel}, [kernel]
    while todo:
        function = todo.pop()
        for names in names_in(original(function)):
            for value in list(values_of(function, names)):
                for other in _functions_in(value, names, _DEPTH):
                    if other not in found:
                        found.add(other)
                        todo.append(other)
    return found


def _functions_in(value, names, depth):
    """Yield the jitted functions that a value is, or holds."""
    if isinstance(value, types.FunctionType):
        jitted = getattr(value, "py_func", None)  # itself, or what `functools.wraps` has wrapped
        if isinstance(jitted, types.FunctionType):
            yield jitted
    elif isinstance(getattr(value, "py_func", None), types.FunctionType) and hasattr(value, "targetoptions"):
        if type(value).__name__ == "Kernel":  # not one of the CPU: see `typed_copy`
            yield value.py_func
    elif not depth or isinstance(value, (type, str, int, float, np.ndarray)):
        return
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _functions_in(item, names, depth - 1)
    else:
        inner = getattr(value, "__dict__", None) or {}
        for name in names & inner.keys():
            yield from _functions_in(inner[name], names, depth - 1)


def typed_copy(function):
    """Return a function with the replaced code of another one, which also runs on the CPU."""
    code = typed(function) or function.__code__
    made = types.FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def typed(function):
    """Return the code that replaces a function's, or None if its source is not known."""
    code = original(function)
    try:
        tree = definition(code)
    except NoSource:
        return None
    static = Static(function)
    # Closures of one factory share code, and mostly what it names.
    values = {name: static.name(name) for names in names_in(code) for name in names}
    found = [(n, id(v)) for n, v in sorted(values.items()) if isinstance(v, types.ModuleType) or _replaced(v)]
    key = code, tuple(found), tuple(n for n, v in sorted(values.items()) if holds_array(v))
    if key not in _made:
        _made[key] = _generate(code, copy.deepcopy(tree), static)
        written[_made[key]] = code
    return _made[key]


def _replaced(value):
    """Return whether calls of a value are replaced."""
    try:
        return value in FUNCTIONS
    except TypeError:  # not hashable
        return False


def _generate(code, tree, static):
    writer = Typed(static, set(code.co_varnames) | set(code.co_cellvars))
    tree.body = [
        new for old in tree.body for made in [writer.visit(old)] for new in (made if type(made) is list else [made])
    ]
    _count_loops(tree)
    # The names of the closure remain, also where all uses of one are replaced: in a branch for which there is no code.
    # It ends the function, so the return counts for its line, which is that of the last statement.
    names = ast.Tuple([ast.Name(name, ast.Load()) for name in code.co_freevars], ast.Load())
    if names.elts:
        tree.body.append(ast.copy_location(ast.If(ast.Constant(False), [ast.Expr(names)], []), tree.body[-1]))
    decorator = ast.Name("decorator", ast.Load())  # the code begins there
    decorator.lineno = decorator.end_lineno = code.co_firstlineno
    decorator.col_offset = decorator.end_col_offset = 0
    if code.co_firstlineno != tree.lineno:
        tree.decorator_list = [decorator]
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    factory = make_function("_Vfactory", arguments(code.co_freevars), [tree])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # the names of helpers are called
        module = compile(ast.fix_missing_locations(ast.Module([factory], [])), code.co_filename, "exec")
    made = with_constants(code_in(code_in(module, "_Vfactory"), code.co_name), writer.constants)
    return made.replace(co_qualname=code.co_qualname)


def _count_loops(tree):
    """Let each loop of a function count its iterations.

    The names of the counters sort as the loops begin in the source. Before a loop its counter is 0, behind it a large
    number.
    """
    counters = []

    def at(node, name, value):
        made = ast.Assign([ast.Name(name, ast.Store())], value)
        return ast.fix_missing_locations(ast.copy_location(made, node))

    def count(statements):
        """Change the loops among some statements, and in them; return the names of their counters."""
        names = []
        for statement in list(statements):
            inner = []
            own = f"{_COUNTER}{len(counters):04}" if isinstance(statement, (ast.For, ast.While)) else None
            counters.extend([own] if own else [])
            for field in ("body", "orelse") if not isinstance(statement, ast.FunctionDef) else ():
                inner += count(getattr(statement, field, []))
            if own:
                next_one = ast.BinOp(ast.Name(own, ast.Load()), ast.Add(), ast.Constant(1))
                body = statement.body[0]
                before = [at(body, own, next_one), *(at(body, name, ast.Constant(0)) for name in inner)]
                statement.body[:0] = before
                inner.append(own)
            # Also for threads that took another branch, or broke off. On the line of the statement that follows, so
            # that a profile counts no further line; if none follows, they are set behind the enclosing statement.
            behind = statements.index(statement) + 1
            for following in statements[behind : behind + 1]:
                statements[behind:behind] = [at(following, name, ast.Constant(_BEHIND)) for name in inner]
            names += inner
        return names

    count(tree.body)
    first = int(ast.get_docstring(tree) is not None)  # a docstring behind another statement would be executed
    for statement in tree.body[first : first + 1]:
        tree.body[first:first] = [at(statement, name, ast.Constant(0)) for name in counters]


def with_constants(code, constants):
    """Return code with the objects that its placeholders, strings, stand for."""
    made = []
    for value in code.co_consts:
        if isinstance(value, types.CodeType):
            value = with_constants(value, constants)
        made.append(constants.get(value, value) if type(value) is str else value)
    return code.replace(co_consts=tuple(made))


def constant(node):
    """Return the value of an expression of literals, or None."""
    if not all(
        isinstance(n, (ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop)) for n in ast.walk(node)
    ):
        return None
    if any(isinstance(n, ast.Constant) and type(n.value) not in (int, float) for n in ast.walk(node)):
        return None
    try:
        value = eval(compile(ast.Expression(node), "", "eval"))
    except (ArithmeticError, TypeError, ValueError):
        return None
    if type(value) is float:
        with np.errstate(over="ignore"):
            return value if float(np.float32(value)) == value else np.float64(value)
    return np.uint64(value) if type(value) is int and 2**63 <= value < 2**64 else value


class Typed(ast.NodeTransformer):
    """Writer of one function."""

    def __init__(self, static, own):
        self.static, self.own, self.constants, self.temporaries = static, own, dict(_HELPERS), 0

    def helper(self, placeholder, node, *arguments):
        called = ast.copy_location(ast.Constant(placeholder), node)
        return ast.copy_location(ast.Call(called, list(arguments), []), node)

    def literal(self, node):
        """Return the constant that an expression of literals is, or None."""
        value = constant(node)
        if isinstance(value, np.generic):
            placeholder = f"\0{value!r}"
            self.constants[placeholder] = value
            return ast.copy_location(ast.Constant(placeholder), node)
        return None if value is None else node

    def visit_Name(self, node):
        """Return a global array as the constant that Numba makes of it; also one of several in a tuple."""
        is_outer = isinstance(node.ctx, ast.Load) and node.id not in self.own
        if is_outer and holds_array(self.static.name(node.id)):
            return self.helper("\0constant_array", node, node, ast.copy_location(ast.Constant(node.id), node))
        return node

    def visit_Constant(self, node):
        return self.literal(node) or node

    def visit_BinOp(self, node):
        if (literal := self.literal(node)) is not None:
            return literal
        name = operators.OF_NODE.get(type(node.op).__name__)
        if name is None:  # @
            return self.generic_visit(node)
        return self.helper(f"\0{name}", node, self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            return self.generic_visit(node)
        if (literal := self.literal(node)) is not None:
            return literal
        return self.helper(f"\0{operators.OF_NODE[type(node.op).__name__]}", node, self.visit(node.operand))

    def visit_AugAssign(self, node):
        name = operators.OF_NODE.get(type(node.op).__name__)
        if name is None:
            return self.generic_visit(node)
        target, before = node.target, []
        if isinstance(target, ast.Subscript):
            base, index = self.visit(target.value), self.visit(target.slice)
            base, index = self.once(base, before), self.once(index, before)
            old = ast.Subscript(base, index, ast.Load())
            new = ast.Subscript(copy.deepcopy(base), copy.deepcopy(index), ast.Store())
        elif isinstance(target, ast.Name):
            old, new = ast.Name(target.id, ast.Load()), target
        else:
            return self.generic_visit(node)
        ast.copy_location(old, target), ast.copy_location(new, target)
        made = ast.Assign([new], self.helper(f"\0{name}", node, old, self.visit(node.value)))
        return [*before, ast.copy_location(made, node)]

    def once(self, node, before):
        """Return an expression to be used twice: a variable that holds its value, unless it has no effect."""
        if isinstance(node, (ast.Name, ast.Constant)):
            return node
        if isinstance(node, ast.Tuple) and all(isinstance(n, (ast.Name, ast.Constant)) for n in node.elts):
            return node
        self.temporaries += 1
        name = f".{self.temporaries}"
        before.append(ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], node), node))
        return ast.copy_location(ast.Name(name, ast.Load()), node)

    def visit_Compare(self, node):
        self.generic_visit(node)
        node.left, *node.comparators = [self.outer_float(n) for n in (node.left, *node.comparators)]
        return node

    def outer_float(self, node):
        """Return an operand of a comparison, which may be a float of an outer scope."""
        if isinstance(node, ast.Name) and node.id not in self.own:
            return self.helper("\0as_float64", node, node)
        return node

    def visit_Call(self, node):
        self.generic_visit(node)
        function = self.function(node.func)
        if function is not None:
            placeholder = f"\0call {len(self.constants)}"
            self.constants[placeholder] = function
            node.func = ast.copy_location(ast.Constant(placeholder), node.func)
        return node

    def function(self, node):
        """Return what replaces a function that is called, or None."""
        value = self.static.missing
        if isinstance(node, ast.Name) and node.id not in self.own:
            value = self.static.name(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id not in self.own:
            base = self.static.name(node.value.id)
            if isinstance(base, types.ModuleType):
                value = getattr(base, node.attr, self.static.missing)
        return FUNCTIONS[value] if _replaced(value) else None

    def visit_FunctionDef(self, node):
        return node  # an inner function has code of its own

    visit_Lambda = visit_FunctionDef
