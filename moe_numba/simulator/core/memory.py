"""Memory as a kernel sees it: checked pointers and arrays, all of them views of the caller's bytes.

An index outside the memory and a misaligned vector access are errors. Shared and local memory starts as poison (NaN, or
an odd bit pattern), so that a value that is read before it is written cannot look plausible.
"""

import ast
import functools
import importlib
import itertools
import linecache
import sys
import threading

import greenlet
import numpy as np

from moe_numba.simulator.core import numba_modules, uninitialized
from moe_numba.simulator.core.conversions import float_to_int
from moe_numba.simulator.core.errors import Misaligned, OutOfBounds, kernel_frame, plain_index
from moe_numba.simulator.core.polling import LOADS, sample
from moe_numba.simulator.core.settings import settings
from moe_numba.simulator.core.unknown import Unknown, poison_of, unknown

# Number of running worlds that preempt at memory accesses, detect races, are profiled or observed
watching = 0
loads_left = LOADS  # before `polling` samples one; starts again whenever a thread waits
_WATCHING_LOCK = threading.Lock()  # worlds may run in several OS threads

_MALLOC_ALIGNMENT = 2 * np.intp(0).itemsize  # of every new NumPy array
_FLOATS = {float, np.float32, np.float64, np.float16}
_INTEGERS = {int, np.int32, np.uint32, np.int64}  # the types of most indices


def watch(worlds):
    """Add to `watching`, or subtract."""
    global watching
    with _WATCHING_LOCK:
        watching += worlds


def maybe_preempt():
    """Yield to another thread with the world's preemption probability; call it if `watching`, before an access.

    Two accesses of one thread are not atomic: other threads may run between them.
    """
    t = greenlet.getcurrent()
    if grid := getattr(t, "grid", None):
        if grid.world.preempt and grid.world.rng.random() < grid.world.preempt:
            t.preempt()
        return getattr(t, "current_thread", t)


def before_access(target, index, writes, nbytes=None, scope=None, value=None, operation=None):
    """Maybe preempt, check an access for races, and count it; call it if `watching`.

    `scope` is that of a strong access. `value` is what a store of one element stores. `operation` names an access that
    is neither a load nor a store: "atomic" or "cp.async". Returns what `uninitialized.origin` does
    for a load or an atomic operation.
    """
    t, allocation = maybe_preempt(), target.allocation
    if t is None:
        return
    world = t.grid.world
    if allocation is not None and allocation.detector is not None:
        allocation.detector.check_access(t, target, index, writes, nbytes)
    origin = None
    if world.races is not None:
        address, size = byte_span(target, index, writes, nbytes)
        if size:
            owner = target if type(target) is LocalArray else allocation
            reads = not writes or operation == "atomic"
            if reads and owner is not None:
                origin = uninitialized.origin(t, target, index, address, size, owner)
            elif reads and world.memory_model is None:  # weak memory may hold back what has been written
                uninitialized.check(t, target, index, address, size)
            if owner is not target:
                world.races.access(t, address, size, writes, scope, target, index, value)
    if world.profile is not None:
        world.profile.access(t, target, index, writes, nbytes, operation)
    for observe in world.observers:
        observe(t, target, index, writes, nbytes, scope, value, operation)
    return origin


def _owner(target):
    """Return the end of the shared or local memory of an array or a pointer, and its poison; None of global memory."""
    owner = target if type(target) is LocalArray else target.allocation
    return None if owner is None else owner.poison


def _stored(target, index, value, dtype=None, past=0):
    """Return what a store of a value stores: poison for a value that is unknown.

    That is noted if it is stored to global memory. `past`: of a vector at the index, the offset of an element.
    """
    if not isinstance(value, Unknown):
        return value
    dtype, owner = dtype or target.array.dtype, _owner(target)
    if owner is None:
        value.is_stored(f"index {plain_index(index)} of {target}")
        return poison_of(dtype)
    address = byte_span(target, index, True)[0] + past
    return np.frombuffer((owner[1] * 5)[address & 3 :][: dtype.itemsize], dtype)[0]


def byte_span(target, index, writes, size=None):
    """Return the address and size in bytes that an index refers to; (0, 0) if it accesses nothing or is invalid."""
    array = target.array
    if type(index) is not tuple and array.ndim == 1 and type(index) is not slice:
        if not 0 <= index < len(array):
            return 0, 0
        return target.address + int(index) * array.strides[0], size or array.itemsize
    if isinstance(index, tuple) and len(index) == array.ndim and not any(isinstance(i, slice) for i in index):
        if any(not 0 <= i < n for i, n in zip(index, array.shape)):
            return 0, 0
        return target.address + sum(int(i) * s for i, s in zip(index, array.strides)), array.itemsize
    if not writes:  # indexing returns a view, which reads nothing yet
        return 0, 0
    try:
        first, last = np.lib.array_utils.byte_bounds(array[index])
    except IndexError:
        return 0, 0
    return first, last - first


def count_load(target, index):
    """Count a load, which may belong to a loop that polls with plain loads."""
    global loads_left
    if not (loads_left := loads_left - 1):
        loads_left = sample(target, index)


def thread_prefix():
    """Return "<thread>: " for error messages, or "" outside a kernel."""
    t = greenlet.getcurrent()
    return f"{t}: " if hasattr(t, "grid") else ""


@functools.cache
def as_dtype(dtype):
    """Return the NumPy dtype of a NumPy, ml_dtypes or Numba type."""
    if hasattr(dtype, "cast_python_value") or type(dtype).__module__.startswith("numba"):
        name = str(dtype)
        if "bfloat16" in name:
            return np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return numba_modules.numpy_support().as_dtype(dtype)
    return np.dtype(dtype)


def is_float(dtype):
    """Return whether a dtype is a float; the dtypes of ml_dtypes have kind "V"."""
    return dtype.kind == "f" or (dtype.kind == "V" and dtype.fields is None and "float" in dtype.name)


def convert(value, dtype):
    """Convert a value to a scalar of `dtype`: integers wrap around, floats are rounded, or saturate as integers."""
    if dtype.kind in "iu":
        if isinstance(value, np.generic) and is_float(value.dtype) or type(value) is float:
            value = float_to_int(value, 8 * dtype.itemsize, dtype.kind == "i")
        if isinstance(value, int):
            return np.uint64(value & 0xFFFFFFFFFFFFFFFF).astype(dtype)
    return np.asarray(value).astype(dtype)[()]


def poison(shape, dtype, alignment=16, past=0):
    """Return an array of implausible values whose address is `past` bytes after a multiple of `alignment`."""
    count = int(np.prod(shape, dtype=np.int64))
    padded = np.empty(count * dtype.itemsize + alignment, np.uint8)
    start = (past - padded.__array_interface__["data"][0]) % alignment
    # Through a buffer, so that `reachable_view` does not count the padding as a part of the array's memory.
    raw = np.frombuffer(padded[start : start + count * dtype.itemsize].data, np.uint8)
    uninitialized.poison(raw, is_float(dtype) or dtype.kind == "c")
    return raw.view(dtype).reshape(shape)


@functools.cache
def poison_word(dtype):
    """Return the four bytes that fill memory of a type which nothing has written."""
    return poison(4, dtype).tobytes()[:4]


def _contents(self):
    """Return the elements, which is what `print` shows in a kernel. Error messages format the name and the type."""
    return str(self.array)


def _describe(self):
    return f"{type(self).__name__}({self:}, {self.array})"


class Pointer:
    """A checked flat view of the memory that a device pointer can reach; corresponds to `T *` in C.

    `allocation` is the SharedAllocation that it points into, or None. `region` belongs to the vector engine.
    """

    __slots__ = ("array", "size", "name", "allocation", "region", "_bytes", "_address")

    def __init__(self, array: np.ndarray, name: str = "", allocation=None):
        self.array, self.size, self.name, self.allocation = array, len(array), name, allocation
        self._bytes = self._address = self.region = None

    def __getitem__(self, i):
        global loads_left
        origin = before_access(self, i, writes=False) if watching else None
        if not (loads_left := loads_left - 1):
            loads_left = sample(self, i)
        if 0 <= i < self.size:
            return self.array[i] if origin is None else unknown(self.array.dtype, origin, self.array[i])
        raise self._out_of_bounds(i)

    def __setitem__(self, i, value):
        if watching:
            before_access(self, i, writes=True, value=value)
            value = _stored(self, i, value)
        if not 0 <= i < self.size:
            raise self._out_of_bounds(i)
        if type(value) in _FLOATS and self.array.dtype.kind in "iu":
            value = convert(value, self.array.dtype)
        try:
            self.array[i] = value
        except OverflowError:
            self.array[i] = convert(value, self.array.dtype)

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    @property
    def address(self) -> int:
        """Byte address of the first element."""
        if self._address is None:
            self._address = self.array.__array_interface__["data"][0]
        return self._address

    @property
    def bytes(self) -> np.ndarray:
        """View of the same memory as bytes."""
        if self._bytes is None:
            self._bytes = self.array.view(np.uint8)
        return self._bytes

    def __len__(self):
        return self.size

    def offset(self, n: int) -> "Pointer":
        """Return the pointer `n` elements further on."""
        if not 0 <= n <= self.size:
            raise self._out_of_bounds(n)
        return type(self)(self.array[n:], f"{self.name} + {n}", self.allocation)

    __add__ = __radd__ = offset

    def view(self, dtype) -> "Pointer":
        """Return a pointer to the same bytes as elements of another type."""
        dtype = as_dtype(dtype)
        if self.address % dtype.itemsize:
            raise Misaligned(
                f"{thread_prefix()}{self} starts at byte {self.address:#x}, which is not aligned for {dtype}"
            )
        usable = self.array.nbytes // dtype.itemsize * dtype.itemsize
        return type(self)(self.bytes[:usable].view(dtype), self.name, self.allocation)

    def load_vector(self, index: int, dtype, count: int, scope: str | None = None) -> tuple:
        """Load `count` elements of `dtype` in one access, from element `index` of this pointer.

        `scope` is "cta", "cluster", "gpu" or "sys" if the access is strong: relaxed, volatile or acquire.
        """
        if type(dtype) is not np.dtype:
            dtype = as_dtype(dtype)
        origin = before_access(self, index, False, dtype.itemsize * count, scope) if watching else None
        count_load(self, index)
        values = tuple(self._load_bytes(index, dtype.itemsize * count).view(dtype))
        if origin is None:
            return values
        first, owner = self.address + int(index) * self.array.itemsize, _owner(self)
        is_unknown = [uninitialized.is_poison(first + k * dtype.itemsize, dtype.itemsize, *owner) for k in range(count)]
        return tuple(unknown(dtype, origin, v) if is_so else v for v, is_so in zip(values, is_unknown))

    def store_vector(self, index: int, values: tuple, dtype=None, scope: str | None = None) -> None:
        """Store values in one access to element `index` of this pointer; `dtype` defaults to the type of the values.

        `scope` as in `load_vector`.
        """
        dtype = as_dtype(dtype or values[0].dtype)
        if watching and any(isinstance(v, Unknown) for v in values):
            if self.allocation is None and not all(isinstance(v, Unknown) for v in values):
                values = [
                    poison_of(v.dtype) if isinstance(v, Unknown) else v for v in values
                ]  # padding, as in a vector load
            values = [_stored(self, index, v, dtype, k * dtype.itemsize) for k, v in enumerate(values)]
        values = np.array([convert(v, dtype) for v in values], dtype)
        if watching:
            before_access(self, index, True, values.nbytes, scope)
        self._store_bytes(index, values.view(np.uint8))

    def _store_bytes(self, index, data):
        self._vector_bytes(index, len(data))[:] = data

    def _vector_bytes(self, index, nbytes):
        start = int(index) * self.array.itemsize
        if index < 0 or start + nbytes > self.array.nbytes:
            raise self._out_of_bounds(index, f" ({nbytes} bytes)")
        if (self.address + start) % nbytes:
            raise Misaligned(
                f"{thread_prefix()}a vector of {nbytes} bytes at index {index} of {self} "
                f"is not aligned to {nbytes} bytes, but lies {(self.address + start) % nbytes} past them"
            )
        return self.bytes[start : start + nbytes]

    _load_bytes = _vector_bytes

    def _out_of_bounds(self, index, more=""):
        return OutOfBounds(f"{thread_prefix()}index {index}{more} is outside {self}")

    def __format__(self, _):
        return f"{self.name or 'a pointer'} ({self.size} x {self.array.dtype})"

    __str__, __repr__ = _contents, _describe


# The end of the message for a computed negative index, which compiled code does not report.
FROM_THE_END = (
    "; check for the boundary before this access. Compiled Numba counts a negative index from the end; the option "
    "--wraparound does the same"
)


class Array:
    """A checked n-dimensional array: the kernel's view of a Numba array. Negative indices are errors."""

    __slots__ = ("array", "name", "allocation", "region", "_address", "_pointer")

    def __init__(self, array: np.ndarray, name: str = "", allocation=None):
        self.array, self.name, self.allocation = array, name, allocation
        self._address = self._pointer = self.region = None

    def __getitem__(self, i):
        global loads_left
        i = self._from_the_start(i)
        origin = before_access(self, i, writes=False) if watching else None
        if not (loads_left := loads_left - 1):
            loads_left = sample(self, i)
        try:
            value = self.array[i]
        except IndexError:
            raise self._out_of_bounds(i) from None
        if origin is not None:
            return unknown(self.array.dtype, origin, value)
        return type(self)(value, self.name, self.allocation) if isinstance(value, np.ndarray) else value

    def load(self, i, scope):
        """Load an element with a strong access."""
        i = self._from_the_start(i)
        if watching:
            before_access(self, i, False, None, scope)
        return self.array[i]

    def store(self, i, value, scope):
        """Store an element with a strong access; return whether its value changes."""
        i = self._from_the_start(i)
        if watching:
            before_access(self, i, True, None, scope)
        value = convert(value, self.array.dtype)
        changes = self.array[i] != value
        self.array[i] = value
        return changes

    def __setitem__(self, i, value):
        i = self._from_the_start(i)
        if watching:
            before_access(self, i, writes=True, value=value)
            value = _stored(self, i, value)
        if type(value) in _FLOATS and self.array.dtype.kind in "iu":
            value = convert(value, self.array.dtype)
        try:
            self.array[i] = value.array if isinstance(value, Array) else value
        except OverflowError:
            self.array[i] = convert(value, self.array.dtype)
        except IndexError:
            raise self._out_of_bounds(i) from None

    @property
    def dtype(self) -> np.dtype:
        return self.array.dtype

    def _from_the_start(self, i):
        """Return an index without negative numbers, which Numba counts from the end if the source names them.

        A computed one is hardly meant so, but comes from a missing check of a boundary; `wraparound` allows it.
        """
        if type(i) in _INTEGERS and i >= 0:
            return i
        parts = i if type(i) is tuple else (i,)
        for part in parts:
            if isinstance(part, Unknown):
                part.is_needed(f"is an index of {self}")
        negative = [n for n, k in enumerate(parts) if isinstance(k, (int, np.integer)) and k < 0]
        if not negative:
            return i
        frame = kernel_frame(sys._getframe())
        parts = tuple(k + self.array.shape[n] if n in negative else k for n, k in enumerate(parts))
        if any(parts[n] < 0 for n in negative):
            raise self._out_of_bounds(i)
        if not settings["wraparound"] and not _negative_literals(frame.f_code, frame.f_lasti).issuperset(negative):
            raise self._out_of_bounds(i, FROM_THE_END)
        return parts if type(i) is tuple else parts[0]

    def _out_of_bounds(self, index, more=""):
        parts = index if type(index) is tuple else (index,)
        if any(isinstance(part, (float, np.floating)) for part in parts):
            return OutOfBounds(f"{thread_prefix()}index {plain_index(index)} of {self} is no integer")
        return OutOfBounds(f"{thread_prefix()}index {plain_index(index)} is outside {self}{more}")

    @property
    def address(self) -> int:
        """Byte address of the first element."""
        if self._address is None:
            self._address = self.array.__array_interface__["data"][0]
        return self._address

    def pointer(self) -> Pointer:
        """Return a flat pointer to the same memory."""
        if self._pointer is None:
            self._pointer = Pointer(reachable_view(self.array), self.name, self.allocation)
        return self._pointer

    def __getattr__(self, name):
        value = getattr(self.array, name)
        if callable(value):
            return lambda *args, **kwargs: self._wrap(value(*args, **kwargs))
        return self._wrap(value)

    def _wrap(self, value):
        return type(self)(value, self.name, self.allocation) if isinstance(value, np.ndarray) else value

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.array, dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, out=(), **options):
        """Apply a NumPy function such as ``np.sin(x, out)`` to whole arrays."""
        inputs, out = ([v.array if isinstance(v, Array) else v for v in values] for values in (inputs, out))
        return getattr(ufunc, method)(*inputs, **options, **({"out": tuple(out)} if out else {}))

    def __len__(self):
        return len(self.array)

    def __iter__(self):
        return (self._wrap(item) for item in self.array)

    def __format__(self, _):
        return f"{self.name or 'an array'} ({' x '.join(map(str, self.array.shape))} x {self.array.dtype})"

    __str__, __repr__ = _contents, _describe


@functools.cache
def _negative_literals(code, instruction):
    """Return the positions in an indexing expression, such as ``x[i, -1]``, with a negative number in its source."""
    line, end_line, start, end = next(itertools.islice(code.co_positions(), instruction // 2, None))
    if line is None or line != end_line:
        return frozenset()
    source = linecache.getline(code.co_filename, line).encode()[start:end].decode(errors="replace")
    try:
        expression = ast.parse(source, mode="eval").body
    except SyntaxError:
        return frozenset()
    index = getattr(expression, "slice", None)
    parts = index.elts if isinstance(index, ast.Tuple) else (index,)
    return frozenset(
        position
        for position, part in enumerate(parts)
        if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.USub) and isinstance(part.operand, ast.Constant)
    )


def reachable_view(array):
    """Return a flat view from an array's first element to the end of the memory that it is a part of."""
    whole = array
    while isinstance(whole.base, np.ndarray):
        whole = whole.base
    if not array.size:
        return array.reshape(-1)
    end = np.lib.array_utils.byte_bounds(whole)[1]
    size = (end - array.__array_interface__["data"][0]) // array.itemsize
    return np.lib.stride_tricks.as_strided(array, (size,), (array.itemsize,))


class LocalArray(Array):
    """An array in a thread's local memory, or a part or view of one."""

    __slots__ = ()

    @property
    def poison(self):
        """The end of its memory, and the poison of a word that nothing has written."""
        whole = self.array
        while isinstance(whole.base, np.ndarray):
            whole = whole.base
        return np.lib.array_utils.byte_bounds(whole)[1], poison_word(whole.dtype)


def local(shape, dtype, alignment, name="a local array"):
    """Return a new local array."""
    array = _poisoned(shape, as_dtype(dtype)).copy()  # faster than `poison`; each call of a device function makes some
    if (alignment or 0) > _MALLOC_ALIGNMENT and array.__array_interface__["data"][0] % alignment:
        array = poison(shape, array.dtype, alignment)
    return LocalArray(array, name)


_poisoned = functools.cache(poison)
