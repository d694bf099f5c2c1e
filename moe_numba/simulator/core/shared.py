"""The shared memory of a block: its arrays, and where each lies in the window through which instructions reach them.

Copies and matrix instructions name shared memory by its address in that window, a number of 18 bits. An array is at the
same place in every block, so that one block of a cluster finds its way in another.
"""

import os

import numpy as np

from moe_numba.simulator.async_.race_detector import Watch
from moe_numba.simulator.core.errors import AsyncRace, Misaligned, OutOfBounds, SimulatorError
from moe_numba.simulator.core.memory import Array, Pointer, as_dtype, poison, who

MOST_BYTES = 227 * 1024  # that a block can have
_FIRST = 1024  # the first bytes of the window are the system's
_ALIGNMENT = 16  # of an array that asks for none: what most of them have on a GPU, and what vectors of 16 bytes need


class Layout:
    """Where the arrays of a kernel lie in the window: the dynamic one first, and the others as they turn up."""

    def __init__(self, dynamic_bytes):
        self.dynamic_bytes, self.places = dynamic_bytes, {}
        self.end, self.used = _FIRST + dynamic_bytes, dynamic_bytes
        self._check()

    def place(self, key, size, alignment):
        """The first byte of the array that `key` stands for."""
        if key not in self.places:
            start = -(-self.end // alignment) * alignment
            self.places[key], self.end, self.used = start, start + size, self.used + size
            self._check()
        return self.places[key]

    def _check(self):
        if self.used > MOST_BYTES:
            raise SimulatorError(f"{who()}the kernel's shared memory has {self.used} bytes; {MOST_BYTES} is the most")


class Room:
    """The memory of one array: the bytes `start` to `end` of its block's window."""

    __slots__ = ("shared", "array", "bytes", "name", "start", "end", "shift", "alignment", "watch")

    def __init__(self, shared, array, name, start, alignment):
        self.shared, self.array, self.name, self.start, self.alignment = shared, array, name, start, alignment
        self.bytes = array.reshape(-1).view(np.uint8)
        self.end = start + self.bytes.size
        self.shift = start - self.bytes.__array_interface__["data"][0]  # from a real address to one in the window
        self.watch = Watch(self) if shared.block.grid.asynchronous else None

    def watched(self):
        """The watch over who touches it; it starts now if nobody foresaw that it would be needed."""
        if self.watch is None:
            self.shared.block.grid.world.attend()
            self.watch = Watch(self)
        return self.watch

    def __str__(self):
        return f"{self.name} in {self.shared.block}"


class Region:
    """Some bytes of a room, by their addresses in the window."""

    __slots__ = ("room", "start", "end")

    def __init__(self, room, start, end):
        self.room, self.start, self.end = room, start, end

    @property
    def bytes(self):
        return self.room.bytes[self.start - self.room.start : self.end - self.room.start]

    def twin(self, block):
        """The same bytes in another block of the cluster."""
        room = block.shared.twin_of(self.room)
        return Region(room, self.start, self.end)

    def __str__(self):
        return f"bytes {self.start - self.room.start} to {self.end - self.room.start - 1} of {self.room}"


class Shared:
    """The shared memory of one block."""

    def __init__(self, block, layout):
        self.block, self.layout = block, layout
        self.rooms, self.barriers = {}, {}
        self.arrays = {}  # as calls asked for them: see `array`

    def array(self, shape, dtype, alignment, frame):
        """The array that the call in `frame` stands for, the same for all threads; shape 0 is dynamic shared memory."""
        # By the code's id, for its hash is slow. The room keeps the code; dynamic shared memory is the same for all.
        key = id(frame.f_code), frame.f_lasti, shape, dtype, alignment
        if key not in self.arrays:
            self.arrays[key] = self._array(shape, dtype, alignment, frame)
        return self.arrays[key]

    def _array(self, shape, dtype, alignment, frame):
        if shape == 0 or shape == (0,):
            dtype, size = as_dtype(dtype), self.layout.dynamic_bytes
            room = self._room((None, 0, size, np.uint8, None), "dynamic shared memory")
            room.alignment = max(room.alignment, alignment or dtype.itemsize)
            usable = size // dtype.itemsize * dtype.itemsize
            return Array(room.array[:usable].view(dtype), room.name, room)
        # The instruction, not the line: one line may declare two. The shape too: closures share their code.
        key = frame.f_code, frame.f_lasti, shape, dtype, alignment
        room = self._room(key, f"the shared array of {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}")
        return Array(room.array, room.name, room)

    def _room(self, key, name):
        if key not in self.rooms:
            code, _, shape, dtype, alignment = key
            dtype = as_dtype(dtype)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            start = self.layout.place(key, size, max(alignment or 0, _ALIGNMENT)) if code else _FIRST
            array = poison(shape, dtype, 1024, past=start % 1024)
            self.rooms[key] = Room(self, array, name, start, alignment or dtype.itemsize)
        return self.rooms[key]

    def twin_of(self, room):
        """The room in this block that `room` is in another; it need not have been declared here yet.

        On a GPU shared memory is laid out before a kernel starts.
        """
        key = next(k for k, mine in room.shared.rooms.items() if mine is room)
        twin = self._room(key, room.name)
        twin.alignment = max(twin.alignment, room.alignment)
        return twin

    def twin(self, array, other):
        """A pointer to where `array`, which lies in this memory, lies in `other`; None if it does not lie here."""
        address = array.__array_interface__["data"][0]
        for room in self.rooms.values():
            if room.start <= address + room.shift < room.end:
                theirs = other.twin_of(room)
                return Pointer(theirs.bytes[address + room.shift - room.start :], room.name, theirs).view(array.dtype)
        return None

    def find(self, start, end, what):
        """The region that an address in the window means."""
        for room in self.rooms.values():
            if room.start <= start < room.end:
                if end > room.end:
                    raise OutOfBounds(f"{who()}{what} reaches {end - room.end} bytes past the end of {room}")
                return Region(room, start, end)
        raise OutOfBounds(f"{who()}{what} means byte {start:#x} of shared memory, where there is no array")

    def close(self):
        """Look, at the end of the block, for what is still going on in its memory."""
        for warp in self.block.warps:
            for by in warp.wgmma.left() if warp.wgmma else ():
                raise AsyncRace(f"{warp} ends, but has not waited for {by.what}, which it started at {by.site}")
        for room in self.rooms.values():
            if room.watch is not None:
                room.watch.close()


def region(array, index, size, alignment, what):
    """The bytes from element `index` of a shared array on, for an instruction that needs them so aligned."""
    room = getattr(array, "room", None)
    if room is None:
        raise SimulatorError(f"{who()}{what} takes an array in shared memory, which {array} is not")
    start = array.address + int(index) * array.dtype.itemsize + room.shift
    if not room.start <= start <= start + size <= room.end:
        raise OutOfBounds(f"{who()}{what} takes {size} bytes at index {index} of {array}, which are outside {room}")
    if (start - room.start) % alignment:
        raise Misaligned(
            f"{who()}{what} takes what is aligned to {alignment} bytes, "
            f"but index {index} of {array} lies {(start - room.start) % alignment} past them"
        )
    if room.alignment < alignment:
        raise Misaligned(
            f"{who()}{what} takes what is aligned to {alignment} bytes, but {room} is aligned to {room.alignment}: "
            f"ask for it with cuda.shared.array(..., {alignment})"
        )
    return Region(room, start, start + size)
