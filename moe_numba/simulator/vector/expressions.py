"""Vector versions of expressions; see `transform`."""

import ast
import types

import numpy as np

from moe_numba.simulator.core.operators import OF_NODE
from moe_numba.simulator.core.source import Static, arguments
from moe_numba.simulator.core.typed_code import constant
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.variables import analyse

_EAGER_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.BitAnd, ast.BitOr, ast.BitXor, ast.LShift, ast.RShift)
_SHAPE_NAMES = {"shape", "size", "ndim", "T", "x", "y", "z", "strides", "nbytes", "base", "real", "imag", "flat"}


class Expressions:
    """Generator of the expressions of one function."""

    def __init__(self, tree, static, special, is_typed):
        self.tree, self.static, self.special, self.is_typed = tree, static, special, is_typed
        self.constants = {}  # placeholder -> the NumPy number that a literal stands for
        self.variables = analyse(tree)
        self.temporaries, self.types = 0, {}  # types that are called: Numba type -> name of its vector version

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

    def expression(self, node, mask):
        """Return the vector version of an expression that the lanes of the variable `mask` evaluate."""
        made = getattr(self, "_e" + type(node).__name__, self._unsupported_expression)(node, mask)
        return ast.copy_location(made, node)

    def _unsupported_expression(self, node, mask):
        raise Unsupported(f"{type(node).__name__} expression, line {getattr(node, 'lineno', '?')}")

    def _eConstant(self, node, mask):
        return self.literal(node) or ast.Constant(node.value)

    def literal(self, node):
        """Return an expression of literals as it is, or as the placeholder of a NumPy number; None for others."""
        value = constant(node) if self.is_typed else None
        if isinstance(value, np.generic):
            self.constants[f"\0{value!r}"] = value
            return ast.Constant(f"\0{value!r}")
        return value if value is None else node

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
        if (literal := self.literal(node)) is not None:
            return literal
        return self.binary(self.expression(node.left, mask), node.op, self.expression(node.right, mask))

    def binary(self, left, op, right):
        """Return the operation of two vector expressions."""
        name = OF_NODE.get(type(op).__name__)
        if not self.is_typed or name is None:
            return ast.BinOp(left, op, right)
        return self.call(f"_V{name}", left, right)

    def _eUnaryOp(self, node, mask):
        if not isinstance(node.op, ast.Not) and (literal := self.literal(node)) is not None:
            return literal
        operand = self.expression(node.operand, mask)
        if isinstance(node.op, ast.Not):
            return self.call("_Vnot", operand)
        return (
            self.call(f"_V{OF_NODE[type(node.op).__name__]}", operand)
            if self.is_typed
            else ast.UnaryOp(node.op, operand)
        )

    def _eBoolOp(self, node, mask):
        conjunction = isinstance(node.op, ast.And)
        made = self.expression(node.values[0], mask)
        for value in node.values[1:]:
            if self.is_eager(value):
                made = self.call("_Veand" if conjunction else "_Veor", made, self.expression(value, mask))
            else:
                made = self.call("_Vand" if conjunction else "_Vor", self.load(mask), made, self.lazy(value))
        return made

    def compared(self, node, mask):
        """Return an operand of a comparison, which may be a float of an outer scope."""
        made = self.expression(node, mask)
        is_outer = isinstance(node, ast.Name) and self.static_value(node) is not Static.missing
        return self.call("_Vas_float64", made) if is_outer and self.is_typed else made

    def lazy(self, node):
        """Return a lambda that evaluates an expression in the lanes that it is given."""
        mask = self.temporary()
        return ast.Lambda(arguments([mask]), self.expression(node, mask))

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
            ast.Compare(self.compared(a, mask), [op], [self.compared(b, mask)])
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
        if base is not Static.missing:
            kind = self.special(base)
            if kind == "index" or (kind == "module" and node.attr == "laneid"):
                return self.call("_Vindex", self.expression(node.value, mask), ast.Constant(node.attr))
            return ast.Attribute(self.expression(node.value, mask), node.attr, ast.Load())
        value = self.expression(node.value, mask)
        if node.attr in _SHAPE_NAMES:
            return self.call("_Vattribute", value, ast.Constant(node.attr))
        return ast.Attribute(value, node.attr, ast.Load())

    def static_value(self, node):
        """Return the value of a name or an attribute that is not the function's own, or `Static.missing`."""
        if isinstance(node, ast.Name):
            own = self.variables.locals | self.variables.comprehended
            return Static.missing if node.id in own else self.static.name(node.id)
        if isinstance(node, ast.Attribute):
            base = self.static_value(node.value)
            if base is not Static.missing and isinstance(base, (types.ModuleType, type)):
                return base if node.attr == "laneid" else getattr(base, node.attr, Static.missing)
        return Static.missing

    def _eCall(self, node, mask):
        arguments = [self.expression(a, mask) for a in node.args]
        keywords = []
        for keyword in node.keywords:
            if keyword.arg is None:
                raise Unsupported(f"** in a call, line {node.lineno}")
            keywords.append(ast.keyword(keyword.arg, self.expression(keyword.value, mask)))
        function = node.func
        if isinstance(function, ast.Attribute) and self.static_value(function.value) is Static.missing:
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
            return self.static_value(node.value) is not Static.missing
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
            known = function is not Static.missing and self.special(function) in ("cast", "type")
            return known and all(self.is_eager(a) for a in node.args)
        return False
