"""Local arrays of all lanes of a gang."""

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.conversions import floats_to_integers
from moe_numba.simulator.core.memory import as_dtype, is_float
from moe_numba.simulator.vector import state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray
_INT64 = np.dtype(np.int64)


def as_type(value, dtype):
    """Convert a NumPy number, or an array of one per lane, to another type."""
    if type(value) is not ndarray:
        return memory.convert(value, dtype)
    if dtype.kind in "iu" and is_float(value.dtype):
        return floats_to_integers(value, dtype)
    return value.astype(dtype)


def as_index(index):
    if index.dtype.kind not in "iu":
        raise Unsupported(f"an index of type {index.dtype}")
    return index.astype(_INT64)


def as_uniform_index(index):
    if isinstance(index, (float, np.floating)):
        raise Unsupported(f"an index of type {type(index).__name__}")
    return int(index)


def refuse():
    raise Unsupported("an index out of bounds")


class _Items(list):
    """The elements of a local array. `unwritten`: those that some lanes have not written -> the others, or None.

    It is kept if data races are detected, as reads of uninitialised memory are then.
    """

    __slots__ = ("unwritten",)

    def write(self, position, mask):
        """Record that the lanes of a mask write an element."""
        if position in self.unwritten:
            written = self.unwritten[position]
            if mask is not None and not (written := mask if written is None else written | mask).all():
                self.unwritten[position] = written
            else:
                del self.unwritten[position]

    def check(self, position, mask):
        """Raise if a lane of a mask reads an element that it has not written: threads know whether that matters."""
        if position in self.unwritten:
            written = self.unwritten[position]
            if mask is None or written is None or np.any(mask > written):
                raise Unsupported("a read of a local array that nothing has written")


class Local:
    """A local array: a list of its elements, each of which is uniform or varies between lanes."""

    __slots__ = ("items", "first", "shape", "dtype", "home")

    def __init__(self, items, first, shape, dtype):
        self.items, self.first, self.shape, self.dtype = items, first, shape, dtype

    @classmethod
    def new(cls, shape, dtype):
        shape = shape if isinstance(shape, tuple) else (shape,)
        shape = tuple(int(n) for n in shape)
        dtype = as_dtype(dtype)
        if dtype.names:
            raise Unsupported("records")
        items = _Items(memory.poison(shape, dtype).reshape(-1))
        items.unwritten = dict.fromkeys(range(len(items))) if state.gang.engine.strict else {}
        return cls(items, 0, shape, dtype)

    def __len__(self):
        return self.shape[0]

    @property
    def size(self):
        return int(np.prod(self.shape))

    @property
    def ndim(self):
        return len(self.shape)

    def _position(self, index, mask):
        """Return (position, shape of what lies there); the position may differ between lanes."""
        items = index if type(index) is tuple else (index,)
        if len(items) > len(self.shape):
            raise Unsupported("too many indices of a local array")
        position, inner = 0, self.shape[len(items) :]
        for item, size in zip(items, self.shape):
            item = item.values if type(item) is Weak else item
            if type(item) is ndarray:
                item = as_index(item) if mask is None else as_index(item) * mask
                if item.min() < 0 or item.max() >= size:
                    refuse()
            elif type(item) is slice or not 0 <= item < size:
                raise Unsupported("an index of a local array")
            else:
                item = int(item)
            position = position * size + item
        for size in inner:
            position = position * size
        return self.first + position, inner

    def load(self, mask, index):
        if type(index) is int and len(self.shape) == 1 and 0 <= index < self.shape[0]:
            if self.items.unwritten:
                self.items.check(self.first + index, mask)
            return self.items[self.first + index]
        if type(index) is slice and len(self.shape) == 1:
            start, stop, step = index.indices(self.shape[0])
            if step != 1 or any(type(p) is not int or p < 0 for p in (index.start or 0, index.stop or 0)):
                raise Unsupported("a slice of a local array")
            return Local(self.items, self.first + start, (max(0, stop - start),), self.dtype)
        position, inner = self._position(index, mask)
        if inner:
            if type(position) is ndarray:
                raise Unsupported("a row of a local array that differs between lanes")
            return Local(self.items, position, inner, self.dtype)
        if type(position) is not ndarray:
            if self.items.unwritten:
                self.items.check(position, mask)
            return self.items[position]
        for k in list(self.items.unwritten):
            if (at := position == k if mask is None else (position == k) & mask).any():
                self.items.check(k, at)
        return self._matrix()[position - self.first, np.arange(len(position))]

    def _matrix(self):
        made = np.empty((self.size, state.gang.size), self.dtype)
        for k, item in enumerate(self.items[self.first : self.first + self.size]):
            made[k] = item
        return made

    def store(self, mask, index, value):
        value = self._convert(value)
        if type(index) is int and len(self.shape) == 1 and 0 <= index < self.shape[0]:
            position, inner = self.first + index, ()
        else:
            position, inner = self._position(index, mask)
        if inner:
            raise Unsupported("a store to a row of a local array")
        if type(position) is not ndarray:
            if self.items.unwritten:
                self.items.write(position, mask)
            # Lanes that are not active may be active later, in a function that called this one.
            if mask is None:
                self.items[position] = value
            else:
                self.items[position] = np.where(mask, value, self.items[position])
            return
        for k in list(self.items.unwritten):
            if (at := position == k if mask is None else (position == k) & mask).any():
                self.items.write(k, at)
        matrix, lanes = self._matrix(), np.arange(len(position))
        if mask is None:
            matrix[position - self.first, lanes] = value
        else:
            value = value[mask] if type(value) is ndarray else value
            matrix[position[mask] - self.first, lanes[mask]] = value
        self.items[self.first : self.first + self.size] = list(matrix)

    def _convert(self, value):
        if type(value) is Weak:
            value = value.values
        if isinstance(value, (ndarray, np.generic)):
            if value.dtype == self.dtype:
                return value
            return as_type(value, self.dtype)
        if not isinstance(value, (int, float)):
            raise Unsupported(f"a store of {type(value).__name__}")
        return memory.convert(value, self.dtype)
