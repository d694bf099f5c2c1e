"""Masks and the merging of values.

A mask is None (all lanes of the gang), False (no lane) or an array of one bool per lane. A value is uniform (a Python
or NumPy scalar, a tuple, an array) or varies between lanes (an ndarray or a `Weak`).
"""

import numpy as np

from moe_numba.simulator.core.memory import Pointer
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.numbers import Weak

ndarray, count_nonzero, where = np.ndarray, np.count_nonzero, np.where


class _Unbound:
    def __repr__(self):
        return "unbound"


UNBOUND = _Unbound()


class Partial:
    """A variable that only the lanes in `mask` have assigned."""

    __slots__ = ("value", "mask")

    def __init__(self, value, mask):
        self.value, self.mask = value, mask


def truth(condition):
    """Return a condition as a bool, or as an array of bools."""
    kind = type(condition)
    if kind is ndarray:
        return condition if condition.dtype == np.bool_ else condition != 0
    if kind is Weak:
        return truth(condition.values)
    return bool(condition)


def split(mask, condition):
    """Return the lanes of a mask for which a condition holds, and the others."""
    condition = truth(condition)
    if condition is True:
        return mask, False
    if condition is False:
        return False, mask
    if mask is None:
        count = count_nonzero(condition)
        if count == 0:
            return False, None
        return (None, False) if count == condition.size else (condition, ~condition)
    taken = condition & mask
    count = count_nonzero(taken)
    if count == 0:
        return False, mask
    if count == count_nonzero(mask):
        return mask, False
    return taken, mask > condition


def keep(mask, condition):
    """Return the lanes of a mask for which a condition holds."""
    condition = truth(condition)
    if condition is True:
        return mask
    if condition is False:
        return False
    if mask is None:
        count = count_nonzero(condition)
        return False if count == 0 else None if count == condition.size else condition
    taken = condition & mask
    count = count_nonzero(taken)
    return False if count == 0 else mask if count == count_nonzero(mask) else taken


def union(a, b):
    """Return the lanes in either mask."""
    if a is None or b is None:
        return None
    if a is False:
        return b
    return a if b is False else a | b


def rejoin(before, a, b):
    """Return the union of what is left of the two parts of the mask `before`; `before` itself if it is all of it."""
    if a is False or b is False:
        left = b if a is False else a
        if left is before or left is False:
            return left
    else:
        left = a | b
    if left is None:
        return None
    count = count_nonzero(left)
    if count == (left.size if before is None else count_nonzero(before)):
        return before
    return left


def minus(a, b):
    """Return the lanes in mask `a` that are not in `b`."""
    if a is False or b is False:
        return a
    if b is None:
        return False
    left = ~b if a is None else a > b
    count = count_nonzero(left)
    if count == 0:
        return False
    return a if a is not None and count == count_nonzero(a) else left


def covers(mask, needed):
    """Return whether a mask includes all lanes of another."""
    if mask is None or needed is False or mask is needed:
        return True
    if mask is False:
        return False
    return bool(mask.all()) if needed is None else not np.any(needed > mask)


def read(value, mask):
    """Return the value of a variable that some lanes may not have assigned."""
    if type(value) is not Partial:
        if value is UNBOUND:
            raise Unsupported("a variable is read before it is assigned")
        return value
    if not covers(value.mask, mask):
        raise Unsupported("a variable is read that some lanes have not assigned")
    return value.value


def merge(mask, new, old, home):
    """Return `new` in the lanes of `mask`, `old` in the others; `home` is the mask of all lanes that may read it."""
    if old is UNBOUND:
        return new if covers(mask, home) else Partial(new, mask)
    if type(old) is Partial:
        value, assigned = select(mask, new, old.value), union(mask, old.mask)
        return value if covers(assigned, home) else Partial(value, assigned)
    return select(mask, new, old)


def merge_assigned(mask, new, old):
    """Return `new` in the lanes of `mask`, `old` in the others, which assign the variable before they read it."""
    return new if old is UNBOUND else select(mask, new, old)


def select(mask, a, b):
    """Return `a` in the lanes of a mask (an array) and `b` in the others."""
    if a is b or mask is None:
        return a
    if type(a) is ndarray and type(b) is ndarray and a.dtype == b.dtype:
        return where(mask, a, b)
    if isinstance(a, tuple):
        if type(a) is not type(b) or len(a) != len(b):
            raise Unsupported("a variable holds tuples of different kinds")
        items = [select(mask, x, y) for x, y in zip(a, b)]
        return tuple(items) if type(a) is tuple else type(a)._make(items)
    if isinstance(a, Pointer):
        return select_pointers(mask, a, b)
    weak_a, weak_b = _weak(a), _weak(b)
    if weak_a and weak_b:
        return _select_weak(mask, a, b)
    if weak_a or weak_b:
        strong, weak = (b, a) if weak_a else (a, b)
        if not isinstance(strong, (ndarray, np.generic)):
            raise Unsupported(f"a variable holds {type(a).__name__} or {type(b).__name__}")
        weak = weak.values if type(weak) is Weak else np.dtype(type(weak)).type(weak)
        signed = weak.dtype.kind == "i" and strong.dtype.kind == "u" and strong.itemsize < 8  # Numba's type is int64
        if weak.dtype.kind != strong.dtype.kind and not signed:
            raise Unsupported("a variable holds numbers of different types")
        return where(mask, weak, strong) if weak_a else where(mask, strong, weak)
    if isinstance(a, (ndarray, np.generic)) and isinstance(b, (ndarray, np.generic)):
        if a.dtype != b.dtype and a.dtype.kind != b.dtype.kind:
            raise Unsupported(f"a variable holds {a.dtype} or {b.dtype}")
        return where(mask, a, b)  # in the wider type, which Numba gives the variable as well
    if type(a) is type(b) and not isinstance(a, (ndarray, np.generic)) and a == b:
        return a
    raise Unsupported(f"a variable holds {type(a).__name__} or {type(b).__name__}, by lane")


def _weak(value):
    return type(value) is Weak or type(value) is int or type(value) is bool or type(value) is float


def _select_weak(mask, a, b):
    if type(a) is not Weak and type(b) is not Weak and type(a) is type(b) and a == b:
        return a
    values = where(mask, a.values if type(a) is Weak else a, b.values if type(b) is Weak else b)
    if values.dtype.kind == "O":
        raise Unsupported("Python integers of more than 63 bits")
    return Weak(values)


class Pointers:
    """A pointer per lane: a list of pointers, and each lane's index in it."""

    __slots__ = ("pointers", "which")

    def __init__(self, pointers, which):
        self.pointers, self.which = pointers, which

    def parts(self, mask):
        """Yield each pointer, and the lanes of a mask that have it."""
        for k, pointer in enumerate(self.pointers):
            part = keep(mask, self.which == k)
            if part is not False:
                yield pointer, part


def select_pointers(mask, a, b):
    """Return a pointer per lane; the same pointer if both have one address."""
    if isinstance(b, Pointer) and (a.address, a.dtype, a.size) == (b.address, b.dtype, b.size):
        return a
    if not isinstance(b, Pointer):
        raise Unsupported(f"a variable holds {type(a).__name__} or {type(b).__name__}, by lane")
    return Pointers([a, b], np.where(mask, 0, 1))


def choose(mask, condition, a, b):
    """Return `a if condition else b` for operands that are safe to evaluate in all lanes."""
    condition = truth(condition)
    if condition is True:
        return a
    return b if condition is False else select(condition, a, b)


def if_expression(mask, condition, a, b):
    """Return `a(lanes) if condition else b(lanes)`."""
    taken, other = split(mask, condition)
    if other is False:
        return a(taken)
    if taken is False:
        return b(other)
    return select(taken, a(taken), b(other))


def logical_and(mask, a, b):
    """Return `a and b(lanes)`."""
    taken, other = split(mask, a)
    if taken is False:
        return a
    if other is False:
        return b(taken)
    return _logical(truth(a) & _in(taken, truth(b(taken))), a)


def logical_or(mask, a, b):
    """Return `a or b(lanes)`."""
    taken, other = split(mask, a)
    if other is False:
        return a
    if taken is False:
        return b(other)
    return _logical(truth(a) | _in(other, truth(b(other))), a)


def _in(mask, values):
    return mask if values is True else values if mask is None else mask & values


def _logical(values, a):
    """Return a condition; operands other than bools would be the result themselves, which is not supported."""
    kind = a.values.dtype.kind if type(a) is Weak else a.dtype.kind if type(a) is ndarray else "b"
    if kind != "b":
        raise Unsupported("and, or of numbers")
    return values


def eager_and(a, b):
    """Return `a and b` for an operand `b` that is safe to evaluate in all lanes."""
    if type(a) is ndarray and type(b) is ndarray and a.dtype == b.dtype == np.bool_:
        return a & b
    return logical_and(None, a, lambda mask: b)


def eager_or(a, b):
    """Return `a or b` for an operand `b` that is safe to evaluate in all lanes."""
    if type(a) is ndarray and type(b) is ndarray and a.dtype == b.dtype == np.bool_:
        return a | b
    return logical_or(None, a, lambda mask: b)


def negate(condition):
    """Return `not condition`."""
    condition = truth(condition)
    return (not condition) if type(condition) is bool else Weak(~condition)
