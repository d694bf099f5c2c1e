"""Source transformation: from a kernel's Python source to a function that runs all lanes of a gang at once.

Conditions that differ between lanes become masks. Each block of statements (a branch, a loop's body) has a mask
variable of its own, `_m<n>`. `return`, `break` and `continue` remove their lanes from it, and the statements after a
branch that contains one run with what is left. Names of helpers are in `HELPERS`; all generated names begin with an
underscore and a letter that sources do not use.
"""

import ast
import types

from moe_numba.simulator.core.operators import as_float64
from moe_numba.simulator.core.source import Static, arguments, code_in, definition, make_function, original, written
from moe_numba.simulator.core.typed_code import with_constants
from moe_numba.simulator.vector import lanes, loops, state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.expressions import Expressions
from moe_numba.simulator.vector.operators import VECTOR


class Site:
    """A statement of a function."""

    __slots__ = ("code", "line")

    def __init__(self, code, line):
        self.code, self.line = code, line


def _note(site, mask):
    state.gang.notes.statements.append((site, mask))


HELPERS = {  # `functions` adds _Vload, _Vstore, _Vmethod, _Vattribute, _Vindex, _Vunpack, _Vassert
    "_Vcall": None,  # `calls` of `vector_function`
    "_Veffect": None,
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
    "_Vrange": loops.vrange,
    "_Viter": loops.iterate,
    "_Vendless": loops.endless,
    "_Vnote": _note,
    "_Vas_float64": as_float64,
} | {f"_V{name}": function for name, function in VECTOR.items()}
_OWN = "moe_numba.simulator.", "moe_numba.ptx."
# (code, kinds of the static values that it names, whether operators are Numba's) -> what `_generate` returns: configs
# share it
_generated = {}


def vector_function(function, special, calls):
    """Return the vector version of a function; its first parameter is the mask.

    `calls` has the versions of what it calls, and says in `notes_statements` whether it notes what it executes.

    `special(value)` says whether a static value is special: "index" (threadIdx and so on), "module", "type" (of Numba),
    "cast" (another function that is safe to call for lanes that are not active) or None.
    """
    static, defined = Static(function), original(function)
    # The simulator's own functions are Python, also where threads call them.
    is_typed = hasattr(function, "py_func") or not (function.__module__ or "").startswith(_OWN)
    notes_statements = calls.notes_statements and is_typed
    key = defined, static.kinds(special), is_typed, notes_statements
    if key not in _generated:
        _generated[key] = _generate(defined, static, special, is_typed, notes_statements)
    code, numeric_types = _generated[key]
    helpers = HELPERS | {"_Vcall": calls, "_Veffect": calls.effects}
    helpers |= {name: calls[value] for value, name in numeric_types.items()}
    cells = dict(zip(defined.co_freevars, function.__closure__ or ()))
    cells = tuple(cells.get(name) or types.CellType(helpers[name]) for name in code.co_freevars)
    made = types.FunctionType(code, function.__globals__, function.__name__, None, cells)
    if function.__defaults__:
        made.__defaults__ = function.__defaults__
    made.__kwdefaults__ = function.__kwdefaults__
    return made


def _generate(code, static, special, is_typed, notes_statements):
    """Return the vector version's code, and the Numba types that it calls with the names of their versions."""
    generator = _Function(definition(code), static, special, is_typed)
    generator.noted = code if notes_statements else None
    body = generator.generate()
    names = *HELPERS, *generator.types.values(), *code.co_freevars
    factory = make_function("_Vfactory", arguments(names), [body])
    made = compile(ast.fix_missing_locations(ast.Module([factory], [])), code.co_filename, "exec")
    made = with_constants(code_in(code_in(made, "_Vfactory"), body.name), generator.constants)
    for part in (made, *(c for c in made.co_consts if isinstance(c, types.CodeType))):
        written[part] = code
    return made, generator.types


class _Function(Expressions):
    """Generator of one function's vector version."""

    noted_line = None  # of the last statement that was noted
    noted = None  # the function's code, if the version notes the statements that it executes

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
        return ast.copy_location(make_function(tree.name, arguments, statements or [ast.Pass()]), tree)

    # Statements

    def block(self, body, scope):
        """Return the statements of a block; what follows a statement that lanes may leave is nested in an `if`."""
        made = []
        for i, statement in enumerate(body):
            new = self.note(statement, self.load(self.mask(scope)))
            new += getattr(self, "_" + type(statement).__name__, self._unsupported)(statement, scope)
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

    def note(self, statement, mask):
        """Return the statements that note the execution of a line by a mask; `_While` notes each test of its own."""
        is_test = isinstance(statement, ast.While) and not _is_endless(statement)
        is_docstring = statement is self.tree.body[0] and ast.get_docstring(self.tree, clean=False) is not None
        if self.noted is None or is_test or is_docstring or statement.lineno == self.noted_line:
            return []
        self.noted_line = statement.lineno
        return self.note_line(statement.lineno, mask)

    def note_line(self, line, mask):
        if self.noted is None:
            return []
        placeholder = f"\0line {line}"
        self.constants[placeholder] = Site(self.noted, line)
        return [ast.Expr(self.call("_Vnote", ast.Constant(placeholder), mask))]

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
            return self.bind(target.id, self.binary(old, statement.op, value), scope)
        if not isinstance(target, ast.Subscript):
            self._unsupported(statement, scope)
        base, index = self.temporary(), self.temporary()
        old = self.call("_Vload", self.load(mask), self.load(base), self.load(index))
        return [
            self.assign(self.name(base), self.expression(target.value, mask)),
            self.assign(self.name(index), self.index(target.slice, mask)),
            ast.Expr(
                self.call(
                    "_Vstore", self.load(mask), self.load(base), self.load(index), self.binary(old, statement.op, value)
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
        if not _is_endless(statement):
            body += self.note_line(statement.lineno, self.load(mask))
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
        again = self.load(mask)  # the lanes that come back to the loop's header
        if self.noted and inner.escapes:
            body.append(self.assign(self.name(f"_I{inner.number}"), self.load(mask)))
            again = self.load(f"_I{inner.number}")
            for lost in [f"_B{inner.number}"] * inner.breaks + ["_Rlanes"] * inner.returns:
                again = self.call("_Vminus", again, self.load(lost))
        body += self.block(statement.body, inner)
        body += self.note_line(statement.lineno, again)
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


def _is_endless(statement):
    """Return whether a `while` loop has no condition."""
    return isinstance(statement.test, ast.Constant) and bool(statement.test.value)
