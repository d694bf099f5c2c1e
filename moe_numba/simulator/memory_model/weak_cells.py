"""Pointers and arrays in global memory under weak memory: what a kernel's arguments become there."""

import greenlet
import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.memory import Array, Pointer, convert


def argument(value):
    """An argument whose stores are weak."""
    if type(value) is tuple:
        return tuple(argument(item) for item in value)
    if type(value) is Pointer:
        return WeakPointer(value.array, value.name)
    return WeakArray(value.array, value.name) if type(value) is Array and not value.dtype.names else value


def _views(thread):
    return thread.grid.world.weak


class WeakCells:
    """What weak pointers and arrays have in common: `cell` finds an element's bytes and their address."""

    __slots__ = ()

    def load(self, cell, start):
        t = greenlet.getcurrent()
        return _views(t).read(t.block, cell, start).view(self.array.dtype)[0]

    def store(self, cell, start, value):
        scalar = np.empty(1, self.array.dtype)
        try:
            scalar[0] = value
        except OverflowError:
            scalar[0] = convert(value, scalar.dtype)
        t = greenlet.getcurrent()
        return _views(t).write(t, cell, start, scalar.view(np.uint8))

    def settle(self, index):
        """See to it that an atomic finds in memory what its block sees there."""
        t, (cell, start) = greenlet.getcurrent(), self.cell(index)
        _views(t).settle(t.block, start, start + len(cell))

    def replace(self, index, value):
        """Store and publish."""
        _views(greenlet.getcurrent()).publish((self.store(*self.cell(index), value),))


class WeakPointer(WeakCells, Pointer):
    """A pointer to global memory under weak memory."""

    __slots__ = ()

    def cell(self, i):
        if not 0 <= i < self.size:
            raise self._out_of_bounds(i)
        size = self.array.itemsize
        start = int(i) * size
        return self.bytes[start : start + size], self.address + start

    def __getitem__(self, i):
        if memory.attentive:
            memory.before(self, i, writes=False)
        return self.load(*self.cell(i))

    def __setitem__(self, i, value):
        if memory.attentive:
            memory.before(self, i, writes=True)
        self.store(*self.cell(i), value)

    def _load_bytes(self, index, nbytes):
        t, cell = greenlet.getcurrent(), self._vector(index, nbytes)
        return _views(t).read(t.block, cell, self.address + int(index) * self.array.itemsize)

    def _store_bytes(self, index, data):
        t, cell = greenlet.getcurrent(), self._vector(index, len(data))
        _views(t).write(t, cell, self.address + int(index) * self.array.itemsize, data)


class WeakArray(WeakCells, Array):
    """An array in global memory under weak memory; whole parts of it are read and stored at once."""

    __slots__ = ()

    def cell(self, i):
        self._refuse_negative(i)
        try:
            element = self.array[(*i, ...) if type(i) is tuple else (i, ...)]
        except IndexError as error:
            raise self._out_of_bounds(i) from error
        if element.ndim:
            return None
        return element.reshape(1).view(np.uint8), element.__array_interface__["data"][0]

    def __getitem__(self, i):
        if (cell := self.cell(i)) is None:
            return super().__getitem__(i)
        if memory.attentive:
            memory.before(self, i, writes=False)
        return self.load(*cell)

    def __setitem__(self, i, value):
        if (cell := self.cell(i)) is not None:
            if memory.attentive:
                memory.before(self, i, writes=True)
            self.store(*cell, value)
            return
        t = greenlet.getcurrent()
        _views(t).settle(t.block, *np.lib.array_utils.byte_bounds(self.array[i]))
        super().__setitem__(i, value)

    def pointer(self):
        return WeakPointer(memory.reachable(self.array), self.name)
