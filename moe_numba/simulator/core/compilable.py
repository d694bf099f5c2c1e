"""Static check of a kernel's source for what Numba does not compile for a GPU, before it starts.

Python runs a kernel that builds a dict; Numba refuses it. This finds the constructs below, shapes of arrays that are
not constant, values that a kernel returns and loops without an end, in the kernel and in the device functions that it
names. Types are not inferred: dtypes, attributes and calls are not checked, and the parameters of a device function may
be constants. A kernel without source (made by `exec`) is not checked.
"""

import ast
import builtins
import linecache
import types
import weakref

from moe_numba.simulator.asynchronous.uses_async import names_in, values_of
from moe_numba.simulator.core.errors import CompileError, Deadlock, file_name

_UNSUPPORTED = {
    ast.Dict: "a dict",
    ast.DictComp: "a dict",
    ast.Set: "a set",
    ast.SetComp: "a set",
    ast.JoinedStr: "an f-string",
    ast.ListComp: "a list",
    ast.List: "a list",
    ast.GeneratorExp: "a generator",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
    ast.Try: "try",
    ast.With: "with",
}
_UNSUPPORTED_CALLS = {dict: "a dict", set: "a set", frozenset: "a set", list: "a list"}
_CONSTANT_ARITHMETIC = ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop
_checked = weakref.WeakSet()
_definitions = {}  # file -> (its lines, {(name, first line): definition, or its _Syntax})


def check_compilable(kernel):
    """Raise a CompileError if Numba would not compile this function as a kernel."""
    if kernel in _checked:
        return
    for function in with_device_functions(kernel):
        syntax = _syntax_of(function)
        if syntax is not None:
            _Checker(kernel, function, syntax).check()
    _checked.add(kernel)


def with_device_functions(kernel):
    """Return a kernel and the jitted functions that it names, and those that they name."""
    found, todo = {kernel}, [kernel]
    while todo:
        function = todo.pop()
        for names in names_in(function.__code__):
            values = list(values_of(function, names))
            for module in [value for value in values if isinstance(value, types.ModuleType)]:
                values += [vars(module).get(name) for name in names]
            for value in values:
                if isinstance(value, types.FunctionType) and hasattr(value, "py_func") and value not in found:
                    found.add(value)
                    todo.append(value)
    return found


def _syntax_of(function):
    """Return the :class:`_Syntax` of a function, or None without its source."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    if _definitions.get(code.co_filename, (None,))[0] != lines:
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:  # a cell of a notebook with magics
            tree = ast.Module([], [])
        found = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                found[node.name, min(d.lineno for d in (node, *node.decorator_list))] = node
        _definitions[code.co_filename] = lines, found
    syntaxes, key = _definitions[code.co_filename][1], (code.co_name, code.co_firstlineno)
    found = syntaxes.get(key)
    if isinstance(found, ast.FunctionDef):
        found = syntaxes[key] = _Syntax(found)
    return found


class _Syntax:
    """What the checks look at in a function's definition. Functions that a factory makes have it in common."""

    def __init__(self, definition):
        self.nodes = [node for statement in definition.body for node in ast.walk(statement)]
        self.parameters = {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}
        self.assigned = self._assignments()
        # Python makes a tuple of a list that is only iterated over or searched.
        constant = {id(node.iter) for node in self.nodes if isinstance(node, ast.For)}
        constant |= {id(item) for node in self.nodes if isinstance(node, ast.Compare) for item in node.comparators}
        inner = [n for n in self.nodes if isinstance(n, (ast.FunctionDef, ast.Lambda))]
        returned_by_others = {id(n) for function in inner for n in ast.walk(function) if n is not function}
        self.unsupported, self.named_calls, self.arrays, self.endless_loops, self.returns = [], [], [], [], []
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self._add_call(node)
            elif isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
                self.endless_loops.append(node)
            elif isinstance(node, ast.Return) and id(node) not in returned_by_others:
                self.returns.append(node)
            is_constant = isinstance(node, ast.List) and (id(node) in constant or not isinstance(node.ctx, ast.Load))
            if type(node) in _UNSUPPORTED and not is_constant:
                self.unsupported.append(node)

    def _add_call(self, call):
        if isinstance(call.func, ast.Name):
            self.named_calls.append(call)
        declares = ast.unparse(call.func).removeprefix("cuda.")
        if declares in ("shared.array", "local.array"):
            shapes = call.args[:1] or [k.value for k in call.keywords if k.arg == "shape"]
            self.arrays += [(call, declares, shape) for shape in shapes]

    def _assignments(self):
        """Return the expressions that each local variable is assigned; None for one that is no expression."""
        found = {}
        for node in self.nodes:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._assign(found, target, node.value)
            elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
                self._assign(found, node.target, node.value)
            elif isinstance(node, (ast.AugAssign, ast.For)):
                self._assign(found, node.target, None)
        return found

    def _assign(self, found, target, value):
        if isinstance(target, ast.Name):
            found.setdefault(target.id, []).append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = value.elts if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts) else None
            for i, item in enumerate(target.elts):
                self._assign(found, item, values[i] if values else None)


class _Checker:
    """Checks one function of a kernel."""

    def __init__(self, kernel, function, syntax):
        self.kernel, self.function, self.syntax = kernel, function, syntax

    def check(self):
        for node in self.syntax.unsupported:
            self._refuse(node, f"uses {_UNSUPPORTED[type(node)]}, which Numba does not support on a GPU")
        for call in self.syntax.named_calls:
            value = self._outer_value(call.func.id, getattr(builtins, call.func.id, None))
            if isinstance(value, type) and value in _UNSUPPORTED_CALLS:
                self._refuse(call, f"uses {_UNSUPPORTED_CALLS[value]}, which Numba does not support on a GPU")
        for call, declares, shape in self.syntax.arrays:
            if self._is_runtime(shape):
                self._refuse(
                    call,
                    f"declares {declares} of shape {ast.unparse(shape)}, which must be a compile-time constant: "
                    "an integer or a tuple of integers, written out or named (Numba folds no arithmetic on variables)",
                )
        for loop in self.syntax.endless_loops:
            self._check_ends(loop)
        for node in self.syntax.returns if self.function is self.kernel else ():
            self._check_return(node)

    def _check_ends(self, loop):
        """Raise for a loop without a condition that nothing leaves."""
        todo = list(loop.body)
        for node in todo:
            if isinstance(node, (ast.Break, ast.Return, ast.Raise)):
                return
            if isinstance(node, (ast.For, ast.While)):  # a `break` in there leaves only the inner loop
                inner = [n for child in node.body for n in ast.walk(child)]
                todo += [n for n in inner if isinstance(n, (ast.Return, ast.Raise))] + node.orelse
            elif not isinstance(node, (ast.FunctionDef, ast.Lambda)):
                todo += ast.iter_child_nodes(node)
        raise Deadlock(
            f"deadlock: kernel {self.kernel.__name__} has a loop that never ends, at {self._place(loop)}: "
            f"`while {ast.unparse(loop.test)}` without break or return"
        )

    def _check_return(self, node):
        value = node.value
        if isinstance(value, (ast.Call, ast.IfExp)) or value is None:  # a call may return nothing
            return
        if not (isinstance(value, ast.Constant) and value.value is None):
            self._refuse(node, f"returns {ast.unparse(value)}, but a kernel returns nothing")

    def _is_runtime(self, node, seen=frozenset()):
        """Return whether Numba takes an expression for no constant. It folds no arithmetic on variables."""
        if isinstance(node, ast.Tuple):
            return any(self._is_runtime(item, seen) for item in node.elts)
        if isinstance(node, ast.Name):
            return self._is_runtime_name(node.id, seen)
        if isinstance(node, (ast.BinOp, ast.UnaryOp)):  # Python folds the arithmetic of constants
            return any(not isinstance(part, _CONSTANT_ARITHMETIC) for part in ast.walk(node))
        return isinstance(node, (ast.Attribute, ast.Call, ast.List))

    def _is_runtime_name(self, name, seen):
        if name in self.syntax.assigned:
            values = self.syntax.assigned[name]
            return name not in seen and all(v is None or self._is_runtime(v, seen | {name}) for v in values)
        if name in self.syntax.parameters:
            return self.function is self.kernel
        value = self._outer_value(name, 0)
        return not all(type(item) is int for item in (value if isinstance(value, tuple) else (value,)))

    def _outer_value(self, name, default):
        """Return the value of a name in the function's closure or globals."""
        code = self.function.__code__
        if name in code.co_freevars:
            try:
                return self.function.__closure__[code.co_freevars.index(name)].cell_contents
            except ValueError:
                return default
        return self.function.__globals__.get(name, default)

    def _refuse(self, node, what):
        raise CompileError(f"kernel {self.kernel.__name__} does not compile: {self._place(node)} {what}")

    def _place(self, node):
        code = self.function.__code__
        where = "" if self.function is self.kernel else f" (device function {code.co_name})"
        return f"{file_name(code.co_filename)}:{node.lineno}{where}"
