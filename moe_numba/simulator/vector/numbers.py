"""Vectors of Python numbers. A lane-varying NumPy number is a plain ndarray; a lane-varying Python number is a `Weak`.

The difference matters because a Python number takes the type of the NumPy number that it is combined with.
"""

import operator

import numpy as np

from moe_numba.simulator.vector.errors import Unsupported

_SAFE_FACTOR = 3037000499  # the product of two such factors fits in int64
_SAFE_TERM = 1 << 40  # no kernel adds such a term so often that int64 overflows


def _numbers(value):
    """Return a Python number or a Weak as something that NumPy combines without another conversion."""
    if type(value) is Weak:
        return value.values
    if type(value) is bool or type(value) is int or type(value) is float:
        return value
    raise Unsupported(f"arithmetic of a Python number with {type(value).__name__}")


def _as_integers(values):
    return values.astype(np.int64) if getattr(values, "dtype", None) == np.bool_ else values


def _check_size(values, limit):
    if isinstance(values, (int, float)):
        small = -limit <= values <= limit
    else:
        small = limit == _SAFE_TERM or values.dtype.kind != "i" or -limit <= values.min() and values.max() <= limit
    if not small:
        raise Unsupported("Python integers of more than 63 bits")


def _operation(function, limit=None, zero_divisor=False):
    def combine(a, b):
        a, b = _as_integers(_numbers(a)), _as_integers(_numbers(b))
        if limit:
            _check_size(a, limit)
            _check_size(b, limit)
        if zero_divisor and np.any(np.equal(b, 0)):
            raise Unsupported("a Python division by zero, perhaps in an inactive lane")
        return Weak(function(a, b))

    def strong(a, b):
        """Combine where one operand is a NumPy number: the Python numbers take its type."""
        if isinstance(a, Weak):
            return function(a.like(b), b)
        return function(a, b.like(a))

    def forward(self, other):
        if isinstance(other, (np.ndarray, np.generic)):
            return strong(self, other)
        return combine(self, other)

    def backward(self, other):
        if isinstance(other, (np.ndarray, np.generic)):
            return strong(other, self)
        return combine(other, self)

    return forward, backward


def _shift(function):
    def checked(a, b):
        if np.any(np.less(b, 0)) or np.any(np.greater(b, 62)):
            raise Unsupported("a Python shift by a negative number or by more than 62")
        result = function(a, b)
        if function is operator.lshift and np.any(np.not_equal(np.right_shift(result, b), a)):
            raise Unsupported("Python integers of more than 63 bits")
        return result

    forward, backward = _operation(checked)

    def typed(a, b):
        return function(a.like(b), b) if isinstance(a, Weak) else function(a, b.like(a))

    def shift(self, other):
        return typed(self, other) if isinstance(other, (np.ndarray, np.generic)) else forward(self, other)

    def rshift(self, other):
        return typed(other, self) if isinstance(other, (np.ndarray, np.generic)) else backward(self, other)

    return shift, rshift


def _bitwise(function):
    def combine(a, b):
        return Weak(function(_numbers(a), _numbers(b)))

    def forward(self, other):
        if isinstance(other, (np.ndarray, np.generic)):
            return function(self.like(other), other)
        return combine(self, other)

    def backward(self, other):
        if isinstance(other, (np.ndarray, np.generic)):
            return function(other, self.like(other))
        return combine(other, self)

    return forward, backward


def _comparison(function):
    def compare(self, other):
        if isinstance(other, (np.ndarray, np.generic)):
            return function(self.values, other)
        return Weak(function(self.values, _numbers(other)))

    return compare


class Weak:
    """One Python int, bool or float per lane; `values` is an array of int64, bool or float64."""

    __slots__ = ("values",)
    __array_ufunc__ = None  # NumPy leaves operations to this class
    __hash__ = None

    def __init__(self, values):
        self.values = values

    def like(self, other):
        """Return the values in the type that Python numbers take next to the NumPy value `other`."""
        values, kind, dtype = self.values, self.values.dtype.kind, other.dtype
        if kind == "f":
            return values.astype(dtype) if dtype.kind == "f" else values
        if kind == "b":
            return values if dtype.kind == "b" else values.astype(dtype)
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            if values.size and (values.min() < info.min or values.max() > info.max):
                # Perhaps only in inactive lanes; with active ones NumPy raises an OverflowError.
                raise Unsupported(f"a Python integer that {dtype} cannot hold")
            return values.astype(dtype)
        return values.astype(dtype) if dtype.kind == "f" else values

    __add__, __radd__ = _operation(operator.add, _SAFE_TERM)
    __sub__, __rsub__ = _operation(operator.sub, _SAFE_TERM)
    __mul__, __rmul__ = _operation(operator.mul, _SAFE_FACTOR)
    __truediv__, __rtruediv__ = _operation(operator.truediv, None, True)
    __floordiv__, __rfloordiv__ = _operation(operator.floordiv, None, True)
    __mod__, __rmod__ = _operation(operator.mod, None, True)
    __lshift__, __rlshift__ = _shift(operator.lshift)
    __rshift__, __rrshift__ = _shift(operator.rshift)
    __and__, __rand__ = _bitwise(operator.and_)
    __or__, __ror__ = _bitwise(operator.or_)
    __xor__, __rxor__ = _bitwise(operator.xor)
    __eq__, __ne__ = _comparison(operator.eq), _comparison(operator.ne)
    __lt__, __le__ = _comparison(operator.lt), _comparison(operator.le)
    __gt__, __ge__ = _comparison(operator.gt), _comparison(operator.ge)

    def __neg__(self):
        return Weak(-_as_integers(self.values))

    def __pos__(self):
        return Weak(_as_integers(self.values))

    def __invert__(self):
        return Weak(~_as_integers(self.values))

    def __abs__(self):
        return Weak(np.abs(_as_integers(self.values)))

    def _refuse(self, *_):
        raise Unsupported("a value that differs between lanes where one value is needed")

    __bool__ = __index__ = __int__ = __float__ = __iter__ = __len__ = __getitem__ = __array__ = __pow__ = __rpow__ = (
        __divmod__
    ) = __matmul__ = _refuse

    def __repr__(self):
        return f"Weak({self.values})"
