"""Scopes of a function's variables: where an assignment must keep the values of lanes that are not active.

A *scope* is a block of statements with a mask of its own: the function's body, a branch, a loop's body. A variable's
*home* is the innermost scope that contains all its uses, if each run of that scope assigns it before it is read. Lanes
that are not in the home's mask never read the variable. An assignment directly in the home needs no merging.
"""

import ast

from moe_numba.simulator.vector.errors import Unsupported

_EVERYTHING = None  # in place of a set of names: what is defined after a statement that does not continue


class Scope:
    def __init__(self, number, parent, body, loop, target=()):
        self.number, self.parent, self.body, self.loop, self.target = number, parent, body, loop, target
        self.breaks = self.returns = self.escapes = False  # whether lanes may leave the body, by `continue` too
        self.depth = 0 if parent is None else parent.depth + 1


def analyse(tree):
    """Return the `Variables` of a function definition."""
    return Variables(tree)


class Variables:
    """The scopes and the local variables of a function."""

    def __init__(self, tree):
        args = tree.args
        names = [a.arg for a in (*args.args, *args.kwonlyargs)] + ([args.vararg.arg] if args.vararg else [])
        self.parameters = set(names)
        self.scopes = 0
        self._of, self._escapes, self._uses, self._stores = {}, {}, {}, {}
        self.root = self._scope(None, tree.body, None)
        self.locals = set(names)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)) and node is not tree:
                raise Unsupported(f"a nested function, line {node.lineno}")
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                raise Unsupported(f"{type(node).__name__}, line {node.lineno}")
            if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                self.locals.add(node.id)
        comprehended = {
            name for node in ast.walk(tree) if isinstance(node, ast.comprehension) for name in _stored(node.target)
        }
        if comprehended & set(names) or any(
            n.id in comprehended for s in _statement_targets(tree) for n in ast.walk(s) if isinstance(n, ast.Name)
        ):
            raise Unsupported("a comprehension that reuses the name of a variable")
        self.locals -= comprehended
        self.comprehended = comprehended
        self.lists = {
            n.targets[0].id
            for n in ast.walk(tree)
            if isinstance(n, ast.Assign) and isinstance(n.value, ast.List) and isinstance(n.targets[0], ast.Name)
        }
        for name in names:
            self._use(name, self.root)
        self._visit(tree.body, self.root)
        returns = [n for n in ast.walk(tree) if isinstance(n, ast.Return)]
        self.simple_return = not returns or (len(returns) == 1 and returns[0] is tree.body[-1])
        if self.simple_return:
            for key in list(self._escapes):
                self._escapes[key] -= {"return"}
        unbound = set()
        _definitely_assigned(tree.body, set(names), self.locals, unbound)
        self._unbound = unbound
        self._homes = {name: self._find_home(name) for name in self.locals}

    def _scope(self, parent, body, loop, target=()):
        scope = Scope(self.scopes, parent, body, loop, target)
        self.scopes += 1
        if loop == "self":
            scope.loop = scope
        return scope

    def _use(self, name, scope):
        self._uses.setdefault(name, []).append(scope)

    def _expression(self, node, scope):
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and child.id in self.locals:
                self._use(child.id, scope)
                if not isinstance(child.ctx, ast.Load):
                    self._stores.setdefault(child.id, []).append(scope)

    def _visit(self, body, scope):
        """Record scopes and uses; return the ways in which lanes leave the block."""
        ways = set()
        for statement in body:
            if isinstance(statement, ast.If):
                self._expression(statement.test, scope)
                then = self._scope(scope, statement.body, scope.loop)
                other = self._scope(scope, statement.orelse, scope.loop)
                self._of[statement] = then, other
                found = self._visit(statement.body, then) | self._visit(statement.orelse, other)
            elif isinstance(statement, (ast.While, ast.For)):
                target = [statement.target] if isinstance(statement, ast.For) else []
                inner = self._scope(scope, statement.body, "self", target)
                self._of[statement] = inner
                self._expression(statement.iter if target else statement.test, scope if target else inner)
                for node in target:
                    self._expression(node, inner)
                found = self._visit(statement.body, inner)
                inner.breaks, inner.returns, inner.escapes = "break" in found, "return" in found, bool(found)
                if isinstance(statement, ast.While):
                    # The condition is evaluated in every iteration, also before the first assignment of the body.
                    for node in ast.walk(statement.test):
                        if isinstance(node, ast.Name) and node.id in self.locals:
                            self._use(node.id, scope)
                found = found & {"return"}
            else:
                self._expression(statement, scope)
                kinds = {ast.Return: "return", ast.Break: "break", ast.Continue: "continue"}
                found = {kinds[type(statement)]} if type(statement) in kinds else set()
            self._escapes[statement] = found
            ways |= found
        return ways

    def _find_home(self, name):
        scopes = self._uses.get(name, [self.root])
        home = scopes[0]
        for scope in scopes[1:]:
            while home is not scope:
                if home.depth >= scope.depth:
                    home = home.parent
                else:
                    scope = scope.parent
        if home is self.root:
            return home
        unbound, defined = set(), set()
        for node in home.target:
            defined |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        _definitely_assigned(home.body, defined, {name}, unbound)
        return self.root if unbound else home

    def home(self, name):
        return self._homes[name]

    def needs_initial(self, name):
        """Return whether an assignment may merge with a value that the variable does not have yet."""
        return name in self._unbound or any(s is not self._homes[name] for s in self._stores.get(name, ()))

    def may_be_unbound(self, name):
        return name in self._unbound

    def escapes(self, statement):
        return bool(self._escapes.get(statement))

    def branches(self, statement):
        return self._of[statement]

    def loop(self, statement):
        return self._of[statement]


def _statement_targets(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            yield from node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.For)):
            yield node.target


def _reads(node, defined, names, unbound):
    if defined is _EVERYTHING:
        return
    for child in ast.walk(node):
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Load) and child.id in names:
            if child.id not in defined:
                unbound.add(child.id)


def _stored(node):
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}


def _definitely_assigned(body, defined, names, unbound):
    """Return the names that are assigned after `body`; add names that may be read before to `unbound`."""
    for statement in body:
        if defined is _EVERYTHING:
            return defined
        if isinstance(statement, ast.If):
            _reads(statement.test, defined, names, unbound)
            a = _definitely_assigned(statement.body, set(defined), names, unbound)
            b = _definitely_assigned(statement.orelse, set(defined), names, unbound)
            defined = b if a is _EVERYTHING else a if b is _EVERYTHING else a & b
        elif isinstance(statement, ast.While):
            _reads(statement.test, defined, names, unbound)
            _definitely_assigned(statement.body, set(defined), names, unbound)
        elif isinstance(statement, ast.For):
            _reads(statement.iter, defined, names, unbound)
            _definitely_assigned(statement.body, defined | _stored(statement.target), names, unbound)
        elif isinstance(statement, (ast.Return, ast.Break, ast.Continue)):
            _reads(statement, defined, names, unbound)
            return _EVERYTHING
        elif isinstance(statement, ast.AugAssign):
            _reads(statement.value, defined, names, unbound)
            _reads(statement.target, defined, names, unbound)
            if isinstance(statement.target, ast.Name) and statement.target.id in names:
                if statement.target.id not in defined:
                    unbound.add(statement.target.id)
            defined |= _stored(statement.target)
        else:
            _reads(statement, defined, names, unbound)
            defined |= _stored(statement)
    return defined
