"""Static check of a kernel's source for what Numba does not compile for a GPU, before it starts.

Python runs a kernel that builds a dict; Numba refuses it. This finds the constructs below, values and methods that
Numba does not know, shapes of arrays that are not constant, values that a kernel returns and loops without an end, in
the kernel and in the device functions that it names. Types are not inferred, and the parameters of a device function
may be constants, so Numba refuses more. A kernel without source (made by `exec`) is not checked.
"""

import ast
import builtins
import dis
import linecache
import types
import weakref

import numpy as np

from moe_numba.simulator.asynchronous.uses_async import names_in, values_of
from moe_numba.simulator.core import compilable_values
from moe_numba.simulator.core.errors import CompileError, Deadlock, file_name

_DICT = "a dict", "use a tuple, an array or `if`"
_SET = "a set", "use a tuple, an array or `if`"
_LIST = "a list", "use a tuple or cuda.local.array"
_UNSUPPORTED = {  # what Numba does not compile -> its name, and what to write
    ast.Dict: _DICT,
    ast.DictComp: _DICT,
    ast.Set: _SET,
    ast.SetComp: _SET,
    ast.JoinedStr: ("an f-string", "pass the values to print, which separates them by spaces"),
    ast.ListComp: _LIST,
    ast.List: _LIST,
    ast.GeneratorExp: ("a generator", "write a loop"),
    ast.Yield: ("yield", "store the values in an array"),
    ast.YieldFrom: ("yield", "store the values in an array"),
    ast.Try: ("try", "test for the error with `if`"),
    ast.With: ("with", "call functions before and after"),
    ast.Import: ("an import", "import the module outside the kernel"),
    ast.ImportFrom: ("an import", "import the name outside the kernel"),
    ast.Delete: ("del", "leave it out"),
    ast.ClassDef: ("a class", "use a tuple"),
}
_UNSUPPORTED_CALLS = {dict: _DICT, set: _SET, frozenset: _SET, list: _LIST}
_METHODS = dict.fromkeys(  # of arrays, numbers and strings; Numba compiles none of them for a GPU
    (
        "argpartition argsort as_integer_ratio byteswap choose compress cumprod cumsum diagonal dot dump dumps flatten "
        "getfield nonzero partition put ravel repeat resize searchsorted setfield setflags sort squeeze swapaxes take "
        "to_bytes to_device tobytes tofile tolist trace"
    ).split(),
    "write a loop over the elements, or compute it before the launch",
) | {
    "astype": "convert each element, as float64(x[i])",
    "copy": "copy the elements into a cuda.local.array or another array",
    "max": "write a loop over the elements",
    "min": "write a loop over the elements",
    "round": "use round(x)",
    "bit_length": "write 32 - cuda.clz(x) of an int32 x",
    "is_integer": "compare with math.floor(x)",
    "hex": "print the number itself",
    "format": "pass the values to print, which separates them by spaces",
}
_INT64, _UINT64 = -(1 << 63), (1 << 64) - 1
_TESTS = (
    ast.Name,
    ast.Constant,
    ast.Compare,
    ast.BoolOp,
    ast.UnaryOp,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
    ast.expr_context,
)
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


def _root(node):
    """Return the expression whose attributes, elements and results make up another one."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_range(node):
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _is_slice(node):
    return isinstance(node, ast.Subscript) and any(isinstance(part, ast.Slice) for part in ast.walk(node.slice))


class _Syntax:
    """What the checks look at in a function's definition. Functions that a factory makes have it in common."""

    def __init__(self, definition):
        self.nodes = [node for statement in definition.body for node in ast.walk(statement)]
        self.globals = {name for node in self.nodes if isinstance(node, ast.Global) for name in node.names}
        self.parameters = {a.arg for a in ast.walk(definition.args) if isinstance(a, ast.arg)}
        self.assigned = self._assignments()
        # Python makes a tuple of a list that is only iterated over or searched.
        constant = {id(node.iter) for node in self.nodes if isinstance(node, ast.For)}
        constant |= {id(item) for node in self.nodes if isinstance(node, ast.Compare) for item in node.comparators}
        inner = [n for n in self.nodes if isinstance(n, (ast.FunctionDef, ast.Lambda))]
        returned_by_others = {id(n) for function in inner for n in ast.walk(function) if n is not function}
        self.unsupported, self.named_calls, self.arrays, self.endless_loops, self.returns = [], [], [], [], []
        self.dtypes, self.loops = [], []
        for node in self.nodes:
            if isinstance(node, ast.Call):
                self._add_call(node)
            elif isinstance(node, ast.For):
                self.loops.append(node)
            elif isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value:
                self.endless_loops.append(node)
            elif isinstance(node, ast.Return) and id(node) not in returned_by_others:
                self.returns.append(node)
            is_constant = isinstance(node, ast.List) and (id(node) in constant or not isinstance(node.ctx, ast.Load))
            if type(node) in _UNSUPPORTED and not is_constant:
                self.unsupported.append((node, *_UNSUPPORTED[type(node)]))
            self._add_unsupported(node)
        self.locals = self._local_names()
        self._add_outer_names(definition)

    def _add_unsupported(self, node):
        """Record what Numba does not support in a node whose type alone does not say so."""
        if isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Store):
            found = "a starred target", "slice the tuple"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_text(node.left):
            found = "% on a string", "pass the values to print, which separates them by spaces"
        elif isinstance(node, ast.Attribute) and node.attr == "format" and _is_text(node.value):
            found = "format on a string", _METHODS["format"]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith(".dtype.itemsize"):
            found = "the itemsize of a dtype", "use the itemsize of the array"
        elif isinstance(node, ast.Assign) and _is_slice(node.value) and any(map(_is_slice, node.targets)):
            found = "a copy from slice to slice", "copy the elements in a loop"
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print" and node.keywords
        ):
            found = f"print with {node.keywords[0].arg}", "leave it out"
        elif isinstance(node, (ast.Assign, ast.AugAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
            if not self.globals.intersection(names):
                return
            found = "an assignment to a global variable", "store the value in an array that is an argument"
        else:
            return
        self.unsupported.append((node, *found))

    def _local_names(self):
        """Return the names that the function, and those defined inside it, assign or take as parameters."""
        found = {n.id for n in self.nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)} - self.globals
        found |= {n.arg for n in self.nodes if isinstance(n, ast.arg)} | self.parameters
        return found | {n.name for n in self.nodes if isinstance(n, ast.FunctionDef)}

    def _add_outer_names(self, definition):
        """Record what depends on names that the function does not assign, whose values are known at a launch only."""
        parents = {id(child): node for node in self.nodes for child in ast.iter_child_nodes(node)}
        self.outer, self.stores, self.indexed, self.methods, self.branches = [], [], [], [], []
        for node in self.nodes:
            parent = parents.get(id(node))
            if isinstance(node, ast.Name) and node.id not in self.locals and isinstance(node.ctx, ast.Load):
                names = [node.id]
                while isinstance(parent, ast.Attribute):
                    names.append(parent.attr)
                    node, parent = parent, parents.get(id(parent))
                self.outer.append((node, names, parent if isinstance(parent, ast.Call) else None))
            elif isinstance(node, ast.Subscript):
                (self.indexed if isinstance(node.ctx, ast.Load) else self.stores).append(node)
            elif isinstance(node, (ast.If, ast.IfExp)):
                self.branches.append(node)
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _METHODS:
                self.methods.append(node)

    def _add_call(self, call):
        if isinstance(call.func, ast.Name):
            self.named_calls.append(call)
        declares = ast.unparse(call.func).removeprefix("cuda.")
        if declares in ("shared.array", "local.array"):
            dtypes = call.args[1:2] or [k.value for k in call.keywords if k.arg == "dtype"]
            self.dtypes += [(call, declares, dtype) for dtype in dtypes if isinstance(dtype, ast.Name)]
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
        for node, what, instead in self.syntax.unsupported:
            self._refuse(node, f"uses {what}, which Numba does not support on a GPU: {instead}")
        for call in self.syntax.named_calls:
            value = self._outer_value(call.func.id, getattr(builtins, call.func.id, None))
            if isinstance(value, type) and value in _UNSUPPORTED_CALLS:
                what, instead = _UNSUPPORTED_CALLS[value]
                self._refuse(call, f"uses {what}, which Numba does not support on a GPU: {instead}")
        self._check_integers(self.function.__code__)
        dead = self._dead_nodes()
        for node, names, call in self.syntax.outer:
            if id(node) not in dead:
                self._check_outer(node, names, call)
        for node in self.syntax.methods:
            self._check_method(node)
        for node in self.syntax.stores:
            root = _root(node)
            if isinstance(root, ast.Name) and root.id not in self.syntax.locals:
                if type(self._outer_value(root.id, None)) is np.ndarray:
                    what = f"stores to {root.id}, a global array, which Numba compiles as a constant"
                    self._refuse(node, f"{what}: pass the array to the kernel")
        for node in self.syntax.indexed:
            self._check_tuple(node)
        for loop in self.syntax.loops:
            if self._is_mixed_tuple(loop.iter):
                what = f"loops over {ast.unparse(loop.iter)}, a tuple of several types, which Numba does not compile"
                self._refuse(loop, f"{what}: give all elements one type, or write literal_unroll(...) around it")
        for call, declares, shape in self.syntax.arrays:
            if self._is_runtime(shape):
                self._refuse(
                    call,
                    f"declares {declares} of shape {ast.unparse(shape)}, which must be a compile-time constant: "
                    "an integer or a tuple of integers, written out or named (Numba folds no arithmetic on variables)",
                )
        for call, declares, dtype in self.syntax.dtypes:
            if dtype.id not in self.syntax.locals and self._outer_value(dtype.id, None) is None:
                if dtype.id in ("bool", "float", "int"):
                    what = f"declares {declares} of dtype {dtype.id}, Python's type, which Numba does not take"
                    self._refuse(call, f"{what}: use a type of Numba or NumPy, as float64")
        for loop in self.syntax.endless_loops:
            self._check_ends(loop)
        for node in self.syntax.returns if self.function is self.kernel else ():
            self._check_return(node)

    def _check_integers(self, code):
        """Raise for a constant that is no 64-bit integer."""
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._check_integers(constant)
            elif type(constant) is int and not _INT64 <= constant <= _UINT64:
                lines = [i.positions.lineno for i in dis.get_instructions(code) if i.argval is constant]
                node = ast.Constant(constant, lineno=next(filter(None, lines), code.co_firstlineno))
                self._refuse(node, f"uses the integer {constant}, but integers have at most 64 bits: use a float")

    def _dead_nodes(self):
        """Return the ids of the nodes that Numba may leave out, because an outer constant or None decides a branch."""
        dead = set()
        for branch in self.syntax.branches:
            parts = list(ast.walk(branch.test))
            names = [part.id for part in parts if isinstance(part, ast.Name)]
            if not all(isinstance(part, _TESTS) for part in parts):
                continue
            if self.syntax.locals.isdisjoint(names):
                values = {name: self._outer_value(name, None) for name in names}
                try:
                    holds = eval(compile(ast.Expression(branch.test), "", "eval"), values)
                    dead_parts = [branch.orelse if holds else branch.body]
                except Exception:  # the comparison of any two values may fail
                    dead_parts = []
            else:
                compares = any(isinstance(part, ast.Constant) and part.value is None for part in parts)
                dead_parts = [branch.body, branch.orelse] if compares else []
            for part in dead_parts:
                dead |= {id(n) for s in (part if isinstance(part, list) else [part]) for n in ast.walk(s)}
        return dead

    def _check_outer(self, node, names, call):
        """Raise if Numba does not compile the value that a name, or the attribute of a module, has outside."""
        missing = object()
        value, text = self._outer_value(names[0], getattr(builtins, names[0], missing)), names[0]
        for name in names[1:]:
            if not isinstance(value, types.ModuleType):
                break
            text += f".{name}"
            why = compilable_values.refusal_of_attribute(text, value, name)
            if why:
                self._refuse(node, why)
            value = value.__dict__.get(name, missing)  # getattr would run the simulator's properties
        if value is missing:
            return
        if value is self.function:
            self._refuse(node, f"calls {text}, itself, which Numba does not compile for a GPU: write a loop")
        why = compilable_values.refusal(text, value)
        if why is None and call is not None and call.func is node:
            why = compilable_values.refusal_of_arguments(text, value, len(call.args))
        if why:
            self._refuse(node, why)

    def _check_method(self, call):
        """Raise for a method of an array or a number that Numba does not compile."""
        root, name = _root(call.func), call.func.attr
        if isinstance(root, ast.Name) and root.id not in self.syntax.locals:
            if not isinstance(self._outer_value(root.id, None), np.ndarray):
                return
        if compilable_values.extends_attributes():  # a type of the program's own may have the method
            return
        text = ast.unparse(call.func)
        self._refuse(call, f"calls {text}, but Numba compiles no method {name} for a GPU: {_METHODS[name]}")

    def _check_tuple(self, node):
        """Raise if a variable indexes a tuple whose elements differ in type."""
        if isinstance(node.slice, ast.Slice) or not self._is_mixed_tuple(node.value):
            return
        parts = list(ast.walk(node.slice))
        variable = any(isinstance(part, (ast.Call, ast.Attribute, ast.Subscript)) for part in parts)
        for name in (part.id for part in parts if isinstance(part, ast.Name)):
            values = self.syntax.assigned.get(name, ())
            variable |= any(isinstance(value, (ast.Attribute, ast.Call)) for value in values)
            variable |= self.function is self.kernel and name in self.syntax.parameters
            variable |= any(
                _is_range(loop.iter) and getattr(loop.target, "id", "") == name for loop in self.syntax.loops
            )
        if variable:
            what = f"indexes {ast.unparse(node.value)}, a tuple of several types, by {ast.unparse(node.slice)}"
            self._refuse(node, f"{what}, but Numba takes a constant there: give all elements one type")

    def _is_mixed_tuple(self, node):
        """Return whether an expression is known to be a tuple whose elements differ in type."""
        if isinstance(node, ast.Name) and node.id not in self.syntax.locals:
            return compilable_values.is_mixed_tuple(self._outer_value(node.id, None))
        if isinstance(node, ast.Name):
            values = self.syntax.assigned.get(node.id, ())
            node = values[0] if len(values) == 1 else None
        items = node.elts if isinstance(node, ast.Tuple) else ()
        return len({type(item.value) for item in items if isinstance(item, ast.Constant)}) > 1

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
