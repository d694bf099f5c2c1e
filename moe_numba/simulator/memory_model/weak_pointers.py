"""Pointers and arrays in global memory whose stores are weak; kernel arguments are wrapped in them in `weak_memory`."""

import greenlet
import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.memory import Array, Pointer, convert


def wrap_weak(value):
    """Wrap a kernel argument so that its stores are weak."""
    if type(value) is tuple:
        return tuple(wrap_weak(item) for item in value)
    if type(value) is Pointer:
        return WeakPointer(value.array, value.name)
    return WeakArray(value.array, value.name) if type(value) is Array and not value.dtype.names else value


def _store_buffers(thread):
    return thread.grid.world.memory_model


class WeakAccess:
    """Loads and stores of weak pointers and arrays. `cell(index)` returns an element's bytes and their address."""

    __slots__ = ()

    def load(self, cell, start):
        t = greenlet.getcurrent()
        return _store_buffers(t).read(t.block, cell, start).view(self.array.dtype)[0]

    def store(self, cell, start, value):
        scalar = np.empty(1, self.array.dtype)
        try:
            scalar[0] = value
        except OverflowError:
            scalar[0] = convert(value, scalar.dtype)
        t = greenlet.getcurrent()
        return _store_buffers(t).write(t, cell, start, scalar.view(np.uint8))

    def make_coherent(self, index):
        """Make memory equal to the block's view of an element, before an atomic operation on it."""
        t, (cell, start) = greenlet.getcurrent(), self.cell(index)
        _store_buffers(t).make_coherent(t.block, start, start + len(cell))

    def store_and_commit(self, index, value):
        """Store an element and commit it at once."""
        _store_buffers(greenlet.getcurrent()).commit((self.store(*self.cell(index), value),))


class WeakPointer(WeakAccess, Pointer):
    """A pointer to global memory with weak stores."""

    __slots__ = ()

    def cell(self, i):
        if not 0 <= i < self.size:
            raise self._out_of_bounds(i)
        size = self.array.itemsize
        start = int(i) * size
        return self.bytes[start : start + size], self.address + start

    def __getitem__(self, i):
        if memory.watching:
            memory.before_access(self, i, writes=False)
        memory.count_load(self, i)
        return self.load(*self.cell(i))

    def __setitem__(self, i, value):
        if memory.watching:
            memory.before_access(self, i, writes=True)
        self.store(*self.cell(i), value)

    def _load_bytes(self, index, nbytes):
        t, cell = greenlet.getcurrent(), self._vector_bytes(index, nbytes)
        return _store_buffers(t).read(t.block, cell, self.address + int(index) * self.array.itemsize)

    def _store_bytes(self, index, data):
        t, cell = greenlet.getcurrent(), self._vector_bytes(index, len(data))
        _store_buffers(t).write(t, cell, self.address + int(index) * self.array.itemsize, data)


class WeakArray(WeakAccess, Array):
    """An array in global memory with weak stores; slices of it are read and stored in committed memory."""

    __slots__ = ()

    def cell(self, i):
        i = self._from_the_start(i)
        try:
            element = self.array[(*i, ...) if type(i) is tuple else (i, ...)]
        except IndexError:
            raise self._out_of_bounds(i) from None
        if element.ndim:
            return None
        return element.reshape(1).view(np.uint8), element.__array_interface__["data"][0]

    def __getitem__(self, i):
        if (cell := self.cell(i)) is None:
            return super().__getitem__(i)
        if memory.watching:
            memory.before_access(self, i, writes=False)
        memory.count_load(self, i)
        return self.load(*cell)

    def __setitem__(self, i, value):
        if (cell := self.cell(i)) is not None:
            if memory.watching:
                memory.before_access(self, i, writes=True)
            self.store(*cell, value)
            return
        t = greenlet.getcurrent()
        _store_buffers(t).make_coherent(t.block, *np.lib.array_utils.byte_bounds(self.array[i]))
        super().__setitem__(i, value)

    def pointer(self):
        return WeakPointer(memory.reachable_view(self.array), self.name)
