"""Source transformation: from a kernel's Python source to a function that runs all lanes of a gang at once.

Conditions that differ between lanes become masks. Each block of statements (a branch, a loop's body) has a mask
variable of its own, `_m<n>`. `return`, `break` and `continue` remove their lanes from it, and the statements after a
branch that contains one run with what is left. Names of helpers are in `HELPERS`; all generated names begin with an
underscore and a letter that sources do not use.
"""

import ast
import copy
import dis
import functools
import inspect
import textwrap
import types

from moe_numba.simulator.vector import lanes
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.variables import analyse

HELPERS = {
    "_Vsplit": lanes.split,
    "_Vkeep": lanes.keep,
    "_Vrejoin": lanes.rejoin,
    "_Vunion": lanes.union,
    "_Vminus": lanes.minus,
    "_Vmerge": lanes.merge,
    "_Vmerge_assigned": lanes.merge_assigned,
    "_Vread": lanes.read,
    "_Vunbound": lanes.UNBOUND,
    "_Vchoose": lanes.choose,
    "_Vif": lanes.if_expression,
    "_Vand": lanes.logical_and,
    "_Vor": lanes.logical_or,
    "_Veand": lanes.eager_and,
    "_Veor": lanes.eager_or,
    "_Vnot": lanes.negate,
    "_Vrange": lanes.vrange,
    "_Viter": lanes.iterate,
    "_Vendless": lanes.endless,
}  # completed by `functions`: _Vload, _Vstore, _Vcall, _Veffect, _Vmethod, _Vattribute, _Vindex, _Vunpack, _Vassert

_EAGER_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift)
_SHAPE_NAMES = {"shape", "size", "ndim", "T", "x", "y", "z", "strides", "nbytes", "base", "real", "imag", "flat"}


def vector_function(function, special):
    """Return the vector version of a function; its first parameter is the mask.

    `special(value)` says whether a static value is special: "index" (threadIdx and so on), "module", "type" (of Numba),
    "cast" (another function that is safe to call for lanes that are not active) or None.
    """
    tree = _definition(function.__code__)
    static = _Static(function)
    generator = _Function(tree, static, special)
    body = generator.generate()
    helpers = HELPERS | {name: HELPERS["_Vcall"][value] for value, name in generator.types.items()}
    factory = _function("_Vfactory", _arguments([*helpers, *function.__code__.co_freevars]), [body])
    module = ast.fix_missing_locations(ast.Module([factory], []))
    code = compile(module, function.__code__.co_filename, "exec")
    code = _code_in(_code_in(code, "_Vfactory"), body.name)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
    cells = tuple(cells.get(name) or types.CellType(helpers[name]) for name in code.co_freevars)
    made = types.FunctionType(code, function.__globals__, function.__name__, None, cells)
    if function.__defaults__:
        made.__defaults__ = function.__defaults__
    made.__kwdefaults__ = function.__kwdefaults__
    return made


@functools.lru_cache(maxsize=4096)
def _definition(code):
    """Return the syntax tree of a function's definition, with the positions that it has in its file."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError, IndentationError) as error:
        raise Unsupported(f"{code.co_name} has no source: {error}") from None
    found = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name]
    if not found or found[0] is not tree.body[0]:
        raise Unsupported(f"{code.co_name} is not defined by a def statement")
    ast.increment_lineno(tree, first - 1)
    found[0].decorator_list = []
    _check_same(code, found[0])
    return found[0]


_INCIDENTAL = {"CACHE", "EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL", "RESUME"}


def _check_same(code, definition):
    """Refuse a source that is not what the function was compiled from, such as that of a changed copy of a module."""
    definition = copy.deepcopy(definition)
    definition.args.defaults = [ast.Constant(None) for _ in definition.args.defaults]
    factory = _function("_Vfactory", _arguments(code.co_freevars), [definition])
    module = compile(ast.fix_missing_locations(ast.Module([factory], [])), code.co_filename, "exec")
    again = _code_in(_code_in(module, "_Vfactory"), code.co_name)
    if _instructions(again) != _instructions(code):
        raise Unsupported(f"the source of {code.co_name} has changed")


def _instructions(code):
    """Return a function's instructions, without what depends on the code around the function."""
    found = []
    for i in dis.get_instructions(code):
        if i.opname not in _INCIDENTAL:
            value = None if "JUMP" in i.opname or "FOR_ITER" in i.opname or "SEND" in i.opname else i.argval
            value = "code" if isinstance(value, types.CodeType) else value
            found.append((i.opname.replace("LOAD_METHOD", "LOAD_ATTR"), type(value), value))
    return found


def _code_in(code, name):
    return next(c for c in code.co_consts if isinstance(c, types.CodeType) and c.co_name == name)


def _function(name, arguments, body):
    made = ast.FunctionDef(name=name, args=arguments, body=body, decorator_list=[])
    made.type_params = []
    return made


def _arguments(names):
    return ast.arguments(posonlyargs=[], args=[ast.arg(n) for n in names], kwonlyargs=[], kw_defaults=[], defaults=[])


class _Static:
    """Values of names that do not belong to the function itself: closures, globals and builtins."""

    missing = object()

    def __init__(self, function):
        self.cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        self.globals = function.__globals__

    def name(self, name):
        if name in self.cells:
            try:
                return self.cells[name].cell_contents
            except ValueError:
                return self.missing
        builtins = self.globals.get("__builtins__", {})
        builtins = builtins if isinstance(builtins, dict) else vars(builtins)
        return self.globals.get(name, builtins.get(name, self.missing))


class _Function:
    """Generator of one function's vector version."""

    def __init__(self, tree, static, special):
        self.tree, self.static, self.special = tree, static, special
        self.variables = analyse(tree)
        self.temporaries, self.types = 0, {}  # types that are called: Numba type -> name of its vector version

    def generate(self):
        tree, args = self.tree, self.tree.args
        if args.kwarg or args.posonlyargs:
            raise Unsupported("keyword arguments in a device function")
        root = self.variables.root
        statements = [
            self.assign(self.name(name), self.load("_Vunbound"))
            for name in sorted(self.variables.locals - self.variables.parameters)
            if self.variables.needs_initial(name)
        ]
        self.simple_return = self.variables.simple_return
        if not self.simple_return:
            statements += [
                self.assign(self.name("_Rvalue"), self.load("_Vunbound")),
                self.assign(self.name("_Rlanes"), ast.Constant(False)),
                self.assign(self.name("_Mentry"), self.load("_M0")),
            ]
        statements += self.block(tree.body, root)
        if not self.simple_return:
            statements.append(ast.parse("return None if _Rvalue is _Vunbound else _Vread(_Rvalue, _Rlanes)").body[0])
        arguments = ast.arguments(
            posonlyargs=[],
            args=[ast.arg("_M0"), *(ast.arg(a.arg) for a in args.args)],
            vararg=args.vararg and ast.arg(args.vararg.arg),
            kwonlyargs=[ast.arg(a.arg) for a in args.kwonlyargs],
            kw_defaults=[d and ast.Constant(None) for d in args.kw_defaults],
            defaults=[ast.Constant(None) for _ in args.defaults],
        )
        return ast.copy_location(_function(tree.name, arguments, statements or [ast.Pass()]), tree)

    # Syntax trees

    def name(self, name):
        return ast.Name(name, ast.Store())

    def load(self, name):
        return ast.Name(name, ast.Load())

    def assign(self, target, value):
        return ast.Assign([target], value)

    def call(self, function, *arguments):
        return ast.Call(self.load(function), list(arguments), [])

    def temporary(self):
        self.temporaries += 1
        return f"_T{self.temporaries}"

    def mask(self, scope):
        return f"_M{scope.number}"

    def is_false(self, name, negated=False):
        operator = ast.IsNot() if negated else ast.Is()
        return ast.Compare(self.load(name), [operator], [ast.Constant(False)])

    # Statements

    def block(self, body, scope):
        """Return the statements of a block; what follows a statement that lanes may leave is nested in an `if`."""
        made = []
        for i, statement in enumerate(body):
            new = getattr(self, "_" + type(statement).__name__, self._unsupported)(statement, scope)
            for n in new:
                ast.copy_location(n, statement)
                for child in ast.walk(n):
                    if not hasattr(child, "lineno") and "lineno" in child._attributes:
                        ast.copy_location(child, statement)
            made += new
            if isinstance(statement, (ast.Return, ast.Break, ast.Continue)):
                break
            if self.variables.escapes(statement) and i + 1 < len(body):
                rest = self.block(body[i + 1 :], scope)
                made.append(ast.If(self.is_false(self.mask(scope), True), rest or [ast.Pass()], []))
                ast.copy_location(made[-1], body[i + 1])
                break
        return made

    def _unsupported(self, statement, scope):
        raise Unsupported(f"{type(statement).__name__} statement, line {statement.lineno}")

    def _Pass(self, statement, scope):
        return []

    def _Expr(self, statement, scope):
        if isinstance(statement.value, ast.Constant):
            return []
        value = self.expression(statement.value, self.mask(scope))
        if isinstance(value, ast.Call) and isinstance(value.func, ast.Subscript):
            value.func.value = self.load("_Veffect")
        return [ast.Expr(value)]

    def _Assign(self, statement, scope):
        value = self.expression(statement.value, self.mask(scope))
        if len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
            return self.bind(statement.targets[0].id, value, scope)
        name = self.temporary()
        made = [self.assign(self.name(name), value)]
        for target in statement.targets:
            made += self.store(target, name, scope, checked=isinstance(statement.value, ast.Tuple))
        return made

    def _AnnAssign(self, statement, scope):
        if statement.value is None:
            return []
        return self._Assign(ast.Assign([statement.target], statement.value), scope)

    def _AugAssign(self, statement, scope):
        mask, target = self.mask(scope), statement.target
        value = self.expression(statement.value, mask)
        if isinstance(target, ast.Name):
            old = self.expression(ast.Name(target.id, ast.Load()), mask)
            if isinstance(statement.op, ast.Add) and target.id in self.variables.lists:
                return self.bind(
                    target.id, ast.List([ast.Starred(v, ast.Load()) for v in (old, value)], ast.Load()), scope
                )
            return self.bind(target.id, ast.BinOp(old, statement.op, value), scope)
        if not isinstance(target, ast.Subscript):
            self._unsupported(statement, scope)
        base, index = self.temporary(), self.temporary()
        old = self.call("_Vload", self.load(mask), self.load(base), self.load(index))
        return [
            self.assign(self.name(base), self.expression(target.value, mask)),
            self.assign(self.name(index), self.index(target.slice, mask)),
            ast.Expr(
                self.call(
                    "_Vstore", self.load(mask), self.load(base), self.load(index), ast.BinOp(old, statement.op, value)
                )
            ),
        ]

    def store(self, target, value, scope, checked=False):
        """Return the statements that assign the variable `value` to a target."""
        if isinstance(target, ast.Name):
            return self.bind(target.id, self.load(value), scope)
        if isinstance(target, ast.Subscript):
            mask = self.mask(scope)
            base, index = self.expression(target.value, mask), self.index(target.slice, mask)
            return [ast.Expr(self.call("_Vstore", self.load(mask), base, index, self.load(value)))]
        if isinstance(target, (ast.Tuple, ast.List)):
            names = [self.temporary() for _ in target.elts]
            source = self.load(value) if checked else self.call("_Vunpack", self.load(value))
            made = [self.assign(ast.Tuple([self.name(n) for n in names], ast.Store()), source)]
            for item, name in zip(target.elts, names):
                made += self.store(item, name, scope)
            return made
        raise Unsupported(f"assignment to {type(target).__name__}, line {target.lineno}")

    def bind(self, variable, value, scope):
        """Return the statements that assign an expression to a variable in the active lanes."""
        home = self.variables.home(variable)
        if home is scope:
            return [self.assign(self.name(variable), value)]
        made, mask, home_mask = [], self.mask(scope), self.mask(home)
        if not isinstance(value, ast.Name):
            name = self.temporary()
            made.append(self.assign(self.name(name), value))
            value = self.load(name)
        if self.variables.may_be_unbound(variable):
            merged = self.call("_Vmerge", self.load(mask), value, self.load(variable), self.load(home_mask))
        else:
            merged = self.call("_Vmerge_assigned", self.load(mask), value, self.load(variable))
        same = ast.Compare(self.load(mask), [ast.Is()], [self.load(home_mask)])
        made.append(self.assign(self.name(variable), ast.IfExp(same, value, merged)))
        return made

    def _Return(self, statement, scope):
        value = self.expression(statement.value, self.mask(scope)) if statement.value else ast.Constant(None)
        if self.simple_return:
            return [ast.Return(value)]
        mask, name = self.mask(scope), self.temporary()
        code = f"if {mask} is _Mentry:\n    return {name}\n"
        code += f"_Rvalue = _Vmerge({mask}, {name}, _Rvalue, _Mentry)\n_Rlanes = _Vunion(_Rlanes, {mask})\n"
        code += f"{mask} = False"
        return [self.assign(self.name(name), value), *ast.parse(code).body]

    def _Break(self, statement, scope):
        mask, loop = self.mask(scope), scope.loop.number
        return ast.parse(f"_B{loop} = _Vunion(_B{loop}, {mask})\n{mask} = False").body

    def _Continue(self, statement, scope):
        return ast.parse(f"{self.mask(scope)} = False").body

    def _If(self, statement, scope):
        mask = self.mask(scope)
        then, other = self.variables.branches(statement)
        condition = self.expression(statement.test, mask)
        targets = ast.Tuple([self.name(self.mask(then)), self.name(self.mask(other))], ast.Store())
        made = [self.assign(targets, self.call("_Vsplit", self.load(mask), condition))]
        body = self.block(statement.body, then) or [ast.Pass()]
        made.append(ast.If(self.is_false(self.mask(then), True), body, []))
        if statement.orelse:
            body = self.block(statement.orelse, other) or [ast.Pass()]
            made.append(ast.If(self.is_false(self.mask(other), True), body, []))
        if self.variables.escapes(statement):
            left = self.call("_Vrejoin", self.load(mask), self.load(self.mask(then)), self.load(self.mask(other)))
            made.append(self.assign(self.name(mask), left))
        return made

    def _While(self, statement, scope):
        if statement.orelse:
            self._unsupported(statement, scope)
        inner = self.variables.loop(statement)
        outer, mask, left = self.mask(scope), self.mask(inner), f"_L{inner.number}"
        body = [self.assign(self.name(mask), self.load(left))]
        if not (isinstance(statement.test, ast.Constant) and statement.test.value):
            condition = self.expression(statement.test, mask)
            body.append(self.assign(self.name(mask), self.call("_Vkeep", self.load(mask), condition)))
            body += ast.parse(f"if {mask} is False:\n    break\n{left} = {mask}").body
        body += self.block(statement.body, inner)
        body += self.leave_loop(inner, left)
        made = ast.parse(f"{left} = {outer}").body
        if inner.breaks:
            made += ast.parse(f"_B{inner.number} = False").body
        made.append(ast.For(self.name(self.temporary()), self.call("_Vendless"), body, []))
        return made + self.after_loop(inner, outer)

    def leave_loop(self, inner, left):
        """Return the statements that remove lanes that have left a loop from `left`."""
        code = f"{left} = _Vminus({left}, _B{inner.number})\n" if inner.breaks else ""
        code += f"{left} = _Vminus({left}, _Rlanes)\n" if inner.returns else ""
        return ast.parse(code + f"if {left} is False:\n    break").body if code else []

    def after_loop(self, inner, outer):
        return ast.parse(f"{outer} = _Vminus({outer}, _Rlanes)").body if inner.returns else []

    def _For(self, statement, scope):
        if statement.orelse:
            self._unsupported(statement, scope)
        inner = self.variables.loop(statement)
        outer, mask, item = self.mask(scope), self.mask(inner), self.temporary()
        iterable, is_range = statement.iter, False
        if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and not iterable.keywords:
            local = iterable.func.id in self.variables.locals
            is_range = not local and self.static.name(iterable.func.id) is range
        body = self.leave_loop(inner, mask)
        body += self.store(statement.target, item, inner)
        body += self.block(statement.body, inner)
        if is_range:
            bounds = [self.expression(a, outer) for a in iterable.args]
            source = self.call("_Vrange", self.load(outer), *bounds)
            target = ast.Tuple([self.name(item), self.name(mask)], ast.Store())
        else:
            source, target = self.call("_Viter", self.expression(iterable, outer)), self.name(item)
            body.insert(0, self.assign(self.name(mask), self.load(outer)))
        made = ast.parse(f"_B{inner.number} = False").body if inner.breaks else []
        made.append(ast.For(target, source, body, []))
        return made + self.after_loop(inner, outer)

    def _Assert(self, statement, scope):
        mask = self.mask(scope)
        return [ast.Expr(self.call("_Vassert", self.load(mask), self.expression(statement.test, mask)))]

    # Expressions

    def expression(self, node, mask):
        """Return the vector version of an expression that the lanes of the variable `mask` evaluate."""
        made = getattr(self, "_e" + type(node).__name__, self._unsupported_expression)(node, mask)
        return ast.copy_location(made, node)

    def _unsupported_expression(self, node, mask):
        raise Unsupported(f"{type(node).__name__} expression, line {getattr(node, 'lineno', '?')}")

    def _eConstant(self, node, mask):
        return ast.Constant(node.value)

    def _eName(self, node, mask):
        if self.variables.may_be_unbound(node.id):
            return self.call("_Vread", self.load(node.id), self.load(mask))
        return self.load(node.id)

    def _eJoinedStr(self, node, mask):
        return ast.JoinedStr([self.expression(v, mask) for v in node.values])

    def _eFormattedValue(self, node, mask):
        value = self.call("_Viter", self.expression(node.value, mask))
        return ast.FormattedValue(value, node.conversion, node.format_spec)

    def _eTuple(self, node, mask):
        return ast.Tuple([self.expression(e, mask) for e in node.elts], ast.Load())

    def _eList(self, node, mask):
        return ast.List([self.expression(e, mask) for e in node.elts], ast.Load())

    def _eStarred(self, node, mask):
        return ast.Starred(self.call("_Viter", self.expression(node.value, mask)), ast.Load())

    def _eBinOp(self, node, mask):
        return ast.BinOp(self.expression(node.left, mask), node.op, self.expression(node.right, mask))

    def _eUnaryOp(self, node, mask):
        operand = self.expression(node.operand, mask)
        return self.call("_Vnot", operand) if isinstance(node.op, ast.Not) else ast.UnaryOp(node.op, operand)

    def _eBoolOp(self, node, mask):
        conjunction = isinstance(node.op, ast.And)
        made = self.expression(node.values[0], mask)
        for value in node.values[1:]:
            if self.is_eager(value):
                made = self.call("_Veand" if conjunction else "_Veor", made, self.expression(value, mask))
            else:
                made = self.call("_Vand" if conjunction else "_Vor", self.load(mask), made, self.lazy(value))
        return made

    def lazy(self, node):
        """Return a lambda that evaluates an expression in the lanes that it is given."""
        mask = self.temporary()
        return ast.Lambda(_arguments([mask]), self.expression(node, mask))

    def _eIfExp(self, node, mask):
        condition = self.expression(node.test, mask)
        if self.is_eager(node.body) and self.is_eager(node.orelse):
            a, b = self.expression(node.body, mask), self.expression(node.orelse, mask)
            return self.call("_Vchoose", self.load(mask), condition, a, b)
        return self.call("_Vif", self.load(mask), condition, self.lazy(node.body), self.lazy(node.orelse))

    def _eCompare(self, node, mask):
        operands = [node.left, *node.comparators]
        if any(isinstance(op, (ast.In, ast.NotIn)) for op in node.ops):
            raise Unsupported(f"in, line {node.lineno}")
        if not all(self.is_eager(o) for o in operands[1:]) and len(node.ops) > 1:
            raise Unsupported(f"a chained comparison of calls, line {node.lineno}")
        parts = [
            ast.Compare(self.expression(a, mask), [op], [self.expression(b, mask)])
            for a, op, b in zip(operands, node.ops, operands[1:])
        ]
        made = parts[0]
        for part in parts[1:]:
            made = self.call("_Veand", made, part)
        return made

    def _eSubscript(self, node, mask):
        return self.call("_Vload", self.load(mask), self.expression(node.value, mask), self.index(node.slice, mask))

    def index(self, node, mask):
        if isinstance(node, ast.Slice):
            parts = (node.lower, node.upper, node.step)
            parts = [ast.Constant(None) if p is None else self.expression(p, mask) for p in parts]
            return ast.copy_location(ast.Call(self.load("_Vslice"), parts, []), node)
        if isinstance(node, ast.Tuple):
            return ast.copy_location(ast.Tuple([self.index(e, mask) for e in node.elts], ast.Load()), node)
        return self.expression(node, mask)

    def _eAttribute(self, node, mask):
        base = self.static_value(node.value)
        if base is not _Static.missing:
            kind = self.special(base)
            if kind == "index" or (kind == "module" and node.attr == "laneid"):
                return self.call("_Vindex", self.expression(node.value, mask), ast.Constant(node.attr))
            return ast.Attribute(self.expression(node.value, mask), node.attr, ast.Load())
        value = self.expression(node.value, mask)
        if node.attr in _SHAPE_NAMES:
            return self.call("_Vattribute", value, ast.Constant(node.attr))
        return ast.Attribute(value, node.attr, ast.Load())

    def static_value(self, node):
        """Return the value of a name or an attribute that is not the function's own, or `_Static.missing`."""
        if isinstance(node, ast.Name):
            own = self.variables.locals | self.variables.comprehended
            return _Static.missing if node.id in own else self.static.name(node.id)
        if isinstance(node, ast.Attribute):
            base = self.static_value(node.value)
            if base is not _Static.missing and isinstance(base, (types.ModuleType, type)):
                return base if node.attr == "laneid" else getattr(base, node.attr, _Static.missing)
        return _Static.missing

    def _eCall(self, node, mask):
        arguments = [self.expression(a, mask) for a in node.args]
        keywords = []
        for keyword in node.keywords:
            if keyword.arg is None:
                raise Unsupported(f"** in a call, line {node.lineno}")
            keywords.append(ast.keyword(keyword.arg, self.expression(keyword.value, mask)))
        function = node.func
        if isinstance(function, ast.Attribute) and self.static_value(function.value) is _Static.missing:
            head = [self.load(mask), self.expression(function.value, mask), ast.Constant(function.attr)]
            return ast.Call(self.load("_Vmethod"), head + arguments, keywords)
        value = self.static_value(function)
        if self.special(value) == "type":
            name = self.types.setdefault(value, f"_C{len(self.types)}")
            return ast.Call(self.load(name), [self.load(mask), *arguments], keywords)
        made = ast.Subscript(self.load("_Vcall"), self.expression(function, mask), ast.Load())
        return ast.Call(ast.copy_location(made, node), [self.load(mask), *arguments], keywords)

    def _eGeneratorExp(self, node, mask):
        generators = []
        for g in node.generators:
            if g.ifs or g.is_async:
                raise Unsupported(f"a condition in a comprehension, line {node.lineno}")
            generators.append(ast.comprehension(g.target, self.call("_Viter", self.expression(g.iter, mask)), [], 0))
        return type(node)(self.expression(node.elt, mask), generators)

    _eListComp = _eGeneratorExp

    def is_eager(self, node):
        """Return whether all lanes may evaluate an expression, although some of them do not in the source."""
        if isinstance(node, ast.Constant):
            return True
        if isinstance(node, ast.Name):
            return not self.variables.may_be_unbound(node.id)
        if isinstance(node, ast.Attribute):
            return self.static_value(node.value) is not _Static.missing
        if isinstance(node, ast.BinOp):
            return isinstance(node.op, _EAGER_OPERATORS) and self.is_eager(node.left) and self.is_eager(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.is_eager(node.operand)
        if isinstance(node, ast.Compare):
            return all(self.is_eager(o) for o in (node.left, *node.comparators))
        if isinstance(node, ast.BoolOp):
            return all(self.is_eager(v) for v in node.values)
        if isinstance(node, ast.IfExp):
            return all(self.is_eager(v) for v in (node.test, node.body, node.orelse))
        if isinstance(node, ast.Call) and not node.keywords:
            function = self.static_value(node.func)
            known = function is not _Static.missing and self.special(function) in ("cast", "type")
            return known and all(self.is_eager(a) for a in node.args)
        return False
