"""Loads and stores of all lanes of a gang, and local arrays.

An index that is too large raises at once. A negative one reads or writes another element of the same array, and raises
when the log of accesses is checked (`check_indices`), at the latest before the kernel's results are used.
"""

import contextlib

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.memory import Array, Pointer, as_dtype
from moe_numba.simulator.vector import state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.indices import take
from moe_numba.simulator.vector.lanes import Pointers, select, split
from moe_numba.simulator.vector.local import Local, as_index, as_type, as_uniform_index, refuse
from moe_numba.simulator.vector.numbers import Weak
from moe_numba.simulator.vector.races import check_known

ndarray = np.ndarray
_INT64 = np.dtype(np.int64)


def load(mask, x, index):
    """Return `x[index]`."""
    kind = type(x)
    if kind is Local:
        return x.load(mask, index)
    if kind is not Array and kind is not Pointer:
        return _load_other(mask, x, index)
    array, region = x.array, x.region or region_of(x)
    how = type(index)
    if how is tuple or array.ndim != 1 or how is slice:
        return _load_nd(mask, x, index)
    if how is Weak:
        index = index.values
    elif how is not ndarray:
        if not 0 <= index < len(array):
            raise Unsupported("an index out of bounds")
        index = as_uniform_index(index)
        value = array[index]
        note_read(x, (region, x.address, array.strides[0], array.itemsize, index, mask, None))
        return value
    if mask is not None:
        index = index * mask
    if index.dtype is not _INT64:
        index = as_index(index)
    value = take(array, index)
    note_read(x, (region, x.address, array.strides[0], array.itemsize, index, mask, None))
    return value


def note_read(x, entry):
    """Put a read into the log; one of shared memory is checked, too. A profile counts that of `x`, not of None."""
    gang = state.gang
    gang.log.reads.append(entry)
    if gang.notes is not None and x is not None:
        gang.notes.access("load", x, *entry[:6])
    if entry[0].shared is not None:
        if entry[0].shared.detector is not None:
            gang.watch(*entry[:6], False)
        if gang.engine.strict:
            check_known(entry, gang.all_lanes)


def store(mask, x, index, value):
    """Execute `x[index] = value`."""
    kind = type(x)
    if kind is Local:
        x.store(mask, index, value)
        return
    if kind is not Array and kind is not Pointer:
        _store_other(mask, x, index, value)
        return
    region, engine = x.region or region_of(x), state.gang.engine
    if not region.written:
        region.save()
    array, may_be_silent = x.array, engine.by_warp and not engine.strict
    address, step, width = x.address, array.strides[0] if array.ndim else 0, array.itemsize
    if type(index) is tuple or array.ndim != 1:
        if array.dtype.names:
            raise Unsupported("records")
        address, step, array, index = flatten(x, index, mask)
    elif type(index) is slice:
        raise Unsupported("a store to a slice")
    if type(value) is Weak:
        value = value.values
    if type(value) in (int, float, bool):
        value = memory.convert(value, array.dtype)
    elif not isinstance(value, (ndarray, np.generic)):
        raise Unsupported(f"a store of {type(value).__name__}")
    if array.dtype.names:
        raise Unsupported("records")
    if value.dtype != array.dtype:
        value = as_type(value, array.dtype)
    if type(index) is Weak:
        index = index.values
    if type(index) is not ndarray:
        if not 0 <= index < len(array):
            raise Unsupported("an index out of bounds")
        index = as_uniform_index(index)
        silent = may_be_silent and bool(np.all(array[index] == value))
        if type(value) is ndarray:
            lane = -1 if mask is None else mask.nonzero()[0][-1]
            array[index] = value[lane]
        else:
            array[index] = value
    elif mask is None:
        if index.dtype is not _INT64:
            index = as_index(index)
        silent = may_be_silent and bool((array[index] == value).all())
        array[index] = value
    else:
        if index.dtype is not _INT64:
            index = as_index(index)
        part, own = index[mask], value[mask] if type(value) is ndarray else value
        silent = may_be_silent and bool((array[part] == own).all())
        array[part] = own
        index = index * mask
    # A store that changes nothing is in conflict with what a load is in conflict with. Where warps have different work,
    # lanes without work of their own may load what another lane stores again.
    log = state.gang.log.reads if silent else state.gang.log.writes
    log.append((region, address, step, width, index, mask, value))
    if region.shared is not None and region.shared.detector is not None:
        state.gang.watch(region, address, step, width, index, mask, True)
    if state.gang.notes is not None:
        state.gang.notes.access("store", x, region, address, step, width, index, mask)


def _load_other(mask, x, index):
    if type(x) is Pointers:
        result = None
        with one_access():
            for pointer, part in x.parts(mask):
                value = load(part, pointer, index)
                result = value if result is None or part is None else select(part, value, result)
        return result
    if type(x) is Rows:
        return load(mask, x.array, (*x.index, *(index if type(index) is tuple else (index,))))
    if type(x) is Weak:
        raise Unsupported("indexing of a number")
    if type(index) is Weak or type(index) is ndarray:
        if isinstance(x, tuple):
            return _load_from_tuple(mask, x, index)
        if type(x) is ndarray:  # a constant array
            index = index.values if type(index) is Weak else index
            index = index if mask is None else index * mask
            if x.ndim != 1 or index.min() < 0:
                raise Unsupported("an index of a constant array")
            return take(x, as_index(index))
        raise Unsupported(f"an index that differs between lanes, of {type(x).__name__}")
    if hasattr(x, "fragment_item"):
        return x.fragment_item(index)
    return x[index]


def _load_from_tuple(mask, x, index):
    index = index.values if type(index) is Weak else index
    result = None
    for k, item in enumerate(x):
        part, _ = split(mask, index == k)
        if part is not False:
            result = item if result is None else select(part, item, result)
    return result


def _store_other(mask, x, index, value):
    if type(x) is Pointers:
        with one_access():
            for pointer, part in x.parts(mask):
                store(part, pointer, index, value)
    elif type(x) is Rows:
        store(mask, x.array, (*x.index, *(index if type(index) is tuple else (index,))), value)
    else:
        raise Unsupported(f"a store to {type(x).__name__}")


@contextlib.contextmanager
def one_access():
    """Let the accesses within this context count as one: those through a pointer that differs between lanes."""
    before = state.gang.notes and state.gang.notes.mark()
    yield
    if before is not None:
        state.gang.notes.join(before)


class Rows:
    """A partly indexed array whose index differs between lanes: a row per lane."""

    __slots__ = ("array", "index")

    def __init__(self, array, index):
        self.array, self.index = array, index


def _load_nd(mask, x, index):
    """Load from an array of several dimensions, or with a slice."""
    array = x.array
    items = index if type(index) is tuple else (index,)
    varying = [type(i) is Weak or type(i) is ndarray for i in items]
    if any(type(i) is slice for i in items) or array.dtype.names:
        if any(varying) or array.dtype.names:
            raise Unsupported("a slice or a record that differs between lanes")
        return x._wrap(array[items]) if _in_bounds(array, items) else refuse()
    if len(items) < array.ndim:
        if any(varying):
            return Rows(x, items)
        return x._wrap(array[items]) if _in_bounds(array, items) else refuse()
    address, step, flat, index = flatten(x, items, mask)
    region = x.region or region_of(x)
    value = take(flat, index) if type(index) is ndarray else flat[index]
    note_read(x, (region, address, step, array.itemsize, index, mask, None))
    return value


def _in_bounds(array, items):
    for item, size in zip(items, array.shape):
        if type(item) is not slice and not 0 <= item < size:
            return False
        if type(item) is slice and any(part is not None and part < 0 for part in (item.start, item.stop, item.step)):
            return False
    return True


def flatten(x, index, mask):
    """Return (address, step, flat view, index) of a full index of an array of several dimensions."""
    array = x.array
    items = index if type(index) is tuple else (index,)
    if len(items) != array.ndim or not array.flags.c_contiguous:
        raise Unsupported("an access to a part of an array, or to an array that is not contiguous")
    total, scale = 0, 1
    for item, size in zip(items[::-1], array.shape[::-1]):
        item = item.values if type(item) is Weak else item
        if type(item) is ndarray:
            item = as_index(item) if mask is None else as_index(item) * mask
            if item.size and (item.min() < 0 or item.max() >= size):
                raise Unsupported("an index out of bounds")
        elif not 0 <= item < size:
            raise Unsupported("an index out of bounds")
        else:
            item = as_uniform_index(item)
        total = total + (item if scale == 1 else item * scale)
        scale *= size
    return x.address, array.itemsize, array.reshape(-1), total


def region_of(x):
    """Find the region that an array or a pointer lies in, and keep it."""
    x.region = state.gang.engine.memory.find(x)
    return x.region


def load_vector(mask, pointer, index, dtype, count):
    """Load `count` elements of `dtype` in one access, from element `index` of a pointer."""
    if type(pointer) is Pointers:
        result = None
        with one_access():
            for one, part in pointer.parts(mask):
                value = load_vector(part, one, index, dtype, count)
                result = value if result is None else select(part, value, result) if part is not None else value
        return result
    dtype = as_dtype(dtype)
    elements, index, step = vector_elements(mask, pointer, index, dtype, count)
    region = pointer.region or region_of(pointer)
    note_read(pointer, vector_entry(region, pointer, index, step, dtype.itemsize * count, mask))
    if type(index) is ndarray:
        first = index * (step // dtype.itemsize) if step >= dtype.itemsize else index // (dtype.itemsize // step)
        return tuple([take(elements, first + k if k else first) for k in range(count)])
    first = index * step // dtype.itemsize
    if first + count > len(elements):
        refuse()
    return tuple(elements[first : first + count])


def store_vector(mask, pointer, index, values, dtype=None):
    """Store values in one access to element `index` of a pointer."""
    if type(pointer) is Pointers:
        with one_access():
            for one, part in pointer.parts(mask):
                store_vector(part, one, index, values, dtype)
        return
    dtype = as_dtype(dtype or values[0].dtype)
    region = pointer.region or region_of(pointer)
    if not region.written:
        region.save()
    elements, index, step = vector_elements(mask, pointer, index, dtype, len(values))
    entry = vector_entry(region, pointer, index, step, dtype.itemsize * len(values), mask)
    many = type(index) is ndarray
    if many:
        first = index * (step // dtype.itemsize) if step >= dtype.itemsize else index // (dtype.itemsize // step)
        if mask is not None:
            first = first[mask]
    else:
        first = index * step // dtype.itemsize
        if first + len(values) > len(elements):
            refuse()
    for k, value in enumerate(values):
        value = value.values if type(value) is Weak else value
        if type(value) is not ndarray or value.dtype != dtype:
            value = as_type(value, dtype)
        if type(value) is ndarray:
            value = value if mask is None else value[mask]
            value = value if many else value[-1]
        elements[first + k if k else first] = value
    if not many and len(values) == 1 and not state.gang.engine.strict:
        entry = (*entry[:6], values[0].values if type(values[0]) is Weak else values[0])
    state.gang.log.writes.append(entry)
    if region.shared is not None and region.shared.detector is not None:
        state.gang.watch(*entry[:6], True)
    if state.gang.notes is not None:
        state.gang.notes.access("store", pointer, *entry[:6])


def vector_elements(mask, pointer, index, dtype, count):
    """Return the memory as elements of a type, and the checked index, for an access to `count` elements."""
    size, width = pointer.array.itemsize, dtype.itemsize * count
    index = index.values if type(index) is Weak else index
    if type(index) is ndarray:
        if mask is not None:
            index = index * mask
        if index.dtype is not _INT64:
            index = as_index(index)
    else:
        index = int(index)
        if index < 0:
            refuse()
    if pointer.address % dtype.itemsize:
        raise Unsupported("a pointer that is not aligned to the elements")
    aligned = pointer.address % width == 0 and size % width == 0
    if not aligned:
        misaligned = (index * size + pointer.address % width) % width
        if np.any(misaligned if mask is None or type(index) is not ndarray else misaligned * mask):
            raise Unsupported("a vector access that is not aligned")
    if dtype is pointer.array.dtype:
        elements = pointer.array
    else:
        usable = pointer.array.nbytes // dtype.itemsize * dtype.itemsize
        elements = pointer.bytes[:usable].view(dtype)
    return elements, index, size


def vector_entry(region, pointer, index, step, width, mask):
    """Return the record of a vector access; it counts aligned vectors, so that cells need not be smaller than those."""
    address = pointer.address
    if step < width:
        past = address % width
        index, address, step = (index * step + past) // width, address - past, width
    return region, address, step, width, index, mask, None


def check_indices(kinds):
    """Raise if an index of these accesses is negative."""
    found = [e[4] for kind in kinds for e in kind if type(e[4]) is ndarray]
    if found and np.concatenate(found).min() < 0:
        raise Unsupported("a negative index")
