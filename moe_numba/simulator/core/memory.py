"""Memory as a kernel sees it: checked pointers, arrays, shared and local arrays, all views of the caller's bytes.

What a GPU would silently do wrong is an error here: an index outside the memory, a misaligned vector. Shared and local
memory starts as poison (NaN, or an odd pattern), so that a value read before it was written cannot look right.
"""

import functools
import importlib

import greenlet
import numpy as np

from moe_numba.simulator.core.errors import Misaligned, OutOfBounds

attentive = 0  # how many worlds are running that preempt at memory accesses, or watch who touches shared memory

_PATTERN = np.array([0xCD, 0xFF], np.uint8)  # a NaN as float32, float16 and bfloat16, and an odd number as an integer


def before(target, index, writes, nbytes=None):
    """What comes before an access: another thread perhaps, for two accesses of one thread are not one; and checks."""
    t = greenlet.getcurrent()
    if grid := getattr(t, "grid", None):
        if grid.world.preempt and grid.world.rng.random() < grid.world.preempt:
            t.pause()
        if target.room is not None and target.room.watch is not None:
            target.room.watch.touch(t, target, index, writes, nbytes)


def who():
    t = greenlet.getcurrent()
    return f"{t}: " if hasattr(t, "grid") else ""


@functools.cache
def as_dtype(dtype):
    """The NumPy dtype of a NumPy, ml_dtypes or Numba type."""
    if hasattr(dtype, "cast_python_value") or type(dtype).__module__.startswith("numba"):
        name = str(dtype)
        if "bfloat16" in name:
            return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return importlib.import_module("numba.cuda.np.numpy_support").as_dtype(dtype)
    return np.dtype(dtype)


def is_float(dtype):
    """Whether a dtype is a float; those of ml_dtypes call themselves void."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.fields is None and "float" in dtype.name)


def convert(value, dtype):
    """A value as a scalar of `dtype`, as C converts it: integers wrap around, floats are rounded."""
    if dtype.kind in "iu" and isinstance(value, (int, float)):
        return np.uint64(int(value) & 0xFFFFFFFFFFFFFFFF).astype(dtype)
    return np.asarray(value).astype(dtype)[()]


def poison(shape, dtype, alignment=16, past=0):
    """An array of which no element looks like a result; its address is `past` bytes past a multiple of `alignment`."""
    count = int(np.prod(shape, dtype=np.int64))
    whole = np.empty(count * dtype.itemsize + alignment, np.uint8)
    start = (past - whole.__array_interface__["data"][0]) % alignment
    # Through a buffer, so that `reachable` takes the array, without what aligned it, for the whole of its memory.
    raw = np.frombuffer(whole[start : start + count * dtype.itemsize].data, np.uint8)
    if is_float(dtype) or dtype.kind == "c":
        raw.fill(0xFF)  # a NaN in every float format that has one
    else:
        raw[0::2], raw[1::2] = _PATTERN
    return raw.view(dtype).reshape(shape)


class Pointer:
    """A checked flat view of the memory that a device pointer can reach: what C calls `T *`."""

    __slots__ = ("array", "size", "name", "room", "_bytes", "_address")

    def __init__(self, array, name="", room=None):
        self.array, self.size, self.name, self.room = (
            array,
            len(array),
            name,
            room,
        )  # its room in shared memory, or None
        self._bytes = self._address = None

    def __getitem__(self, i):
        if attentive:
            before(self, i, writes=False)
        if 0 <= i < self.size:
            return self.array[i]
        raise self._out_of_bounds(i)

    def __setitem__(self, i, value):
        if attentive:
            before(self, i, writes=True)
        if not 0 <= i < self.size:
            raise self._out_of_bounds(i)
        try:
            self.array[i] = value
        except OverflowError:
            self.array[i] = convert(value, self.array.dtype)

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def address(self):
        """The address of the first element, in bytes."""
        if self._address is None:
            self._address = self.array.__array_interface__["data"][0]
        return self._address

    @property
    def bytes(self):
        """The same memory as bytes."""
        if self._bytes is None:
            self._bytes = self.array.view(np.uint8)
        return self._bytes

    def __len__(self):
        return self.size

    def offset(self, n):
        """The pointer `n` elements further on."""
        if not 0 <= n <= self.size:
            raise self._out_of_bounds(n)
        return type(self)(self.array[n:], f"{self.name} + {n}", self.room)

    __add__ = __radd__ = offset

    def view(self, dtype):
        """The same bytes as elements of another type."""
        dtype = as_dtype(dtype)
        if self.address % dtype.itemsize:
            raise Misaligned(f"{who()}{self} starts at byte {self.address:#x}, which is not aligned for {dtype}")
        usable = self.array.nbytes // dtype.itemsize * dtype.itemsize
        return type(self)(self.bytes[:usable].view(dtype), self.name, self.room)

    def load_vector(self, index, dtype, count):
        """Load `count` elements of `dtype`, as one access, from element `index` of this pointer."""
        if type(dtype) is not np.dtype:
            dtype = as_dtype(dtype)
        if attentive:
            before(self, index, False, dtype.itemsize * count)
        return tuple(self._load_bytes(index, dtype.itemsize * count).view(dtype))

    def store_vector(self, index, values, dtype=None):
        """Store values, as one access, to element `index` of this pointer; they are of `dtype`, or of their own."""
        dtype = as_dtype(dtype or values[0].dtype)
        values = np.array([convert(v, dtype) for v in values], dtype)
        if attentive:
            before(self, index, True, values.nbytes)
        self._store_bytes(index, values.view(np.uint8))

    def _store_bytes(self, index, data):
        self._vector(index, len(data))[:] = data

    def _vector(self, index, nbytes):
        start = int(index) * self.array.itemsize
        if index < 0 or start + nbytes > self.array.nbytes:
            raise self._out_of_bounds(index, f" ({nbytes} bytes)")
        if (self.address + start) % nbytes:
            raise Misaligned(
                f"{who()}a vector of {nbytes} bytes at index {index} of {self} "
                f"is not aligned to {nbytes} bytes, but lies {(self.address + start) % nbytes} past them"
            )
        return self.bytes[start : start + nbytes]

    _load_bytes = _vector

    def _out_of_bounds(self, index, more=""):
        return OutOfBounds(f"{who()}index {index}{more} is outside {self}")

    def __str__(self):
        return f"{self.name or 'a pointer'} ({self.size} x {self.array.dtype})"

    def __repr__(self):
        return f"Pointer({self})"


class _Nowhere:
    """Stands for memory where there is none to look after, in `before`."""

    room = None


NOWHERE = _Nowhere()


class Array:
    """A checked n-dimensional array: what Numba's arrays are in a kernel. Negative indices are errors."""

    __slots__ = ("array", "name", "room", "_address")

    def __init__(self, array, name="", room=None):
        self.array, self.name, self.room = array, name, room
        self._address = None

    def __getitem__(self, i):
        if attentive:
            before(self, i, writes=False)
        self._refuse_negative(i)
        try:
            value = self.array[i]
        except IndexError as error:
            raise self._out_of_bounds(i) from error
        return type(self)(value, self.name, self.room) if isinstance(value, np.ndarray) else value

    def __setitem__(self, i, value):
        if attentive:
            before(self, i, writes=True)
        self._refuse_negative(i)
        try:
            self.array[i] = value.array if isinstance(value, Array) else value
        except OverflowError:
            self.array[i] = convert(value, self.array.dtype)
        except IndexError as error:
            raise self._out_of_bounds(i) from error

    @property
    def dtype(self):
        return self.array.dtype

    def _refuse_negative(self, i):
        """NumPy would count from the end."""
        for k in i if type(i) is tuple else (i,):
            if isinstance(k, (int, np.integer)) and k < 0:
                raise self._out_of_bounds(i)

    def _out_of_bounds(self, index):
        return OutOfBounds(f"{who()}index {index} is outside {self}")

    @property
    def address(self):
        """The address of the first element, in bytes."""
        if self._address is None:
            self._address = self.array.__array_interface__["data"][0]
        return self._address

    def pointer(self):
        """The same memory as a flat pointer."""
        return Pointer(reachable(self.array), self.name, self.room)

    def __getattr__(self, name):
        value = getattr(self.array, name)
        if callable(value):
            return lambda *args, **kwargs: self._wrap(value(*args, **kwargs))
        return self._wrap(value)

    def _wrap(self, value):
        return type(self)(value, self.name, self.room) if isinstance(value, np.ndarray) else value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def __len__(self):
        return len(self.array)

    def __iter__(self):
        return (self._wrap(item) for item in self.array)

    def __str__(self):
        return f"{self.name or 'an array'} ({' x '.join(map(str, self.array.shape))} x {self.array.dtype})"

    def __repr__(self):
        return f"Array({self})"


def reachable(array):
    """A flat view from an array's first element to the end of the memory that it is a part of."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if not array.size:
        return array.reshape(-1)
    end = np.lib.array_utils.byte_bounds(whole)[1]
    size = (end - array.__array_interface__["data"][0]) // array.itemsize
    return np.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,))


def local(shape, dtype, alignment):
    """A thread's own array."""
    return Array(poison(shape, as_dtype(dtype), alignment or 16), "a local array")
