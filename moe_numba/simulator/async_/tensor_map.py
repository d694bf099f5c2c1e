"""Tensor maps: 128 bytes that say where a tensor lies, how it is strided, and which box of it a copy takes.

Their layout on a GPU is nobody's business; here it is our own. A map names its tensor by its address, which must lie in
a tensor that a map was made from, and that still exists: those are registered.
"""

import functools
import itertools
import math
import struct
import sys

import numpy as np

from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import Misaligned, MissingFence, OutOfBounds, SimulatorError, place
from moe_numba.simulator.core.memory import who
from moe_numba.simulator.core.shared import region
from moe_numba.simulator.core.warp import FULL, collective

SIZE = 128  # bytes of a map
_MAGIC = 0x70614D74  # "tMap"
_FORMAT = struct.Struct("<IBBHQ5Q4Q5HxxQ")  # 128 bytes with what is left over
_storages = []  # (first address, bytes, torch's weak reference to the storage), of the tensors that maps were made from
_publications = itertools.count(1)


class TensorMap:
    """A map's fields. Dimensions stand innermost first; `strides` are those of dimension 1 and on, in bytes."""

    def __init__(self, address, itemsize, dims, strides, box, swizzle, publication=0):
        self.address, self.itemsize, self.swizzle, self.publication = address, itemsize, swizzle, publication
        self.dims, self.strides, self.box, self.rank = list(dims), list(strides), list(box), len(dims)

    @property
    def box_bytes(self):
        return math.prod(self.box) * self.itemsize

    def pack(self):
        """The 128 bytes."""
        fill = lambda values, count: [*values, *[0] * (count - len(values))]
        numbers = [*fill(self.dims, 5), *fill(self.strides, 4), *fill(self.box, 5)]
        head = _MAGIC, self.rank, self.itemsize, self.swizzle, self.address
        return _FORMAT.pack(*head, *numbers, self.publication).ljust(SIZE, b"\0")

    @classmethod
    def unpack(cls, data, where):
        magic, rank, itemsize, swizzle, address, *numbers, publication = _FORMAT.unpack_from(bytes(data))
        if magic != _MAGIC:
            raise SimulatorError(f"{thread()}: {where} holds no tensor map, at {place(sys._getframe())}")
        dims, strides, box = numbers[:rank], numbers[5 : 4 + rank], numbers[9 : 9 + rank]
        return cls(address, itemsize, dims, strides, box, swizzle, publication)

    def _views(self, coordinates, stores=False):
        """Which part of the box lies in the tensor, and that part of the tensor, as bytes; slices outermost first.

        A store clips rows only to whole chunks of 16 bytes, as a GPU does, and so may write past their ends.
        """
        dims = list(self.dims)
        if stores:
            dims[0] = -(-dims[0] * self.itemsize // 16) * 16 // self.itemsize
        low = [max(0, -c) for c in coordinates]
        high = [min(b, d - c) for b, d, c in zip(self.box, dims, coordinates)]
        if any(l >= h for l, h in zip(low, high)):
            return None, None
        steps = [self.itemsize, *self.strides]
        first = sum((c + l) * s for c, l, s in zip(coordinates, low, steps))
        last = sum((c + h - 1) * s for c, h, s in zip(coordinates, high, steps)) + self.itemsize
        memory, at = _storage(self.address)
        if at + last > memory.size:
            why = " (a store writes whole chunks of 16 bytes)" if dims != self.dims else ""
            raise OutOfBounds(
                f"{who()}a tensor map of extents {self.dims[::-1]} and strides {self.strides[::-1]} leads "
                f"{at + last - memory.size} bytes past the end of the memory that its tensor is a part of{why}"
            )
        shape = [h - l for l, h in zip(low, high)]
        inside = tuple(slice(l, h) for l, h in zip(low[:0:-1], high[:0:-1]))
        inside += (slice(low[0] * self.itemsize, high[0] * self.itemsize),)
        shape[0] *= self.itemsize
        view = np.lib.stride_tricks.as_strided(memory[at + first :], shape[::-1], [*self.strides[::-1], 1])
        return inside, view

    def _shape(self):
        return [*self.box[:0:-1], self.box[0] * self.itemsize]

    def check(self, coordinates, stores):
        """See, before a copy starts, that the box lies in memory that there is."""
        self._views(coordinates, stores)

    def read(self, coordinates):
        """The bytes of the box, zeros where it lies outside the tensor."""
        out = np.zeros(self._shape(), np.uint8)
        inside, view = self._views(coordinates)
        if inside is not None:
            out[inside] = view
        return out.reshape(-1)

    def write(self, coordinates, data):
        """Write the bytes of the box that lie in the tensor, or in its rows' last chunks of 16 bytes."""
        inside, view = self._views(coordinates, stores=True)
        if inside is not None:
            view[...] = data.reshape(self._shape())[inside]


@functools.lru_cache(maxsize=1024)
def swizzled(start, size, swizzle):
    """The order in which the chunks of 16 bytes of a box lie that starts at this address; None if in their own.

    A chunk's number within its line of `swizzle` bytes is changed by the number of its 128 bytes within 8 of them.
    """
    if not swizzle:
        return None
    address = start + 16 * np.arange(size // 16)
    chunks = (swizzled_address(address, swizzle) - start) // 16
    if chunks.min() < 0 or chunks.max() >= len(chunks):
        raise SimulatorError(f"a box of {size} bytes does not fill the lines of {swizzle} bytes that it is swizzled in")
    return chunks


def swizzled_address(address, swizzle):
    """Where the byte of an address lies with a swizzle of 32, 64 or 128 bytes; 0 is none."""
    return address ^ ((address >> 7 & (swizzle >> 4) - 1) << 4) if swizzle else address


def register(tensor):
    """Remember the memory of a torch tensor, so that maps find it by its address, and as long as it exists."""
    from torch.multiprocessing.reductions import StorageWeakRef

    storage = tensor.untyped_storage()
    _storages[:] = [s for s in _storages if s[0] != storage.data_ptr() and not s[2].expired()]
    _storages.append((storage.data_ptr(), storage.nbytes(), StorageWeakRef(storage)))


def _storage(address):
    """The memory around an address, as bytes, and where in it the address is."""
    for first, size, reference in _storages:
        if first <= address < first + size and not reference.expired():
            return _bytes_at(first, size), address - first
    raise SimulatorError(
        f"{who()}a tensor map leads to address {address:#x}, where no tensor is that a map was made from"
    )


def _bytes_at(address, size):
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), np.uint8)


def at(pointer, index):
    """The map in global memory at element `index` of a pointer, and its address."""
    start = int(index) * pointer.array.itemsize
    if not 0 <= start <= pointer.bytes.size - SIZE:
        raise OutOfBounds(f"{thread()}: a tensor map at index {index} is outside {pointer}")
    address = pointer.address + start
    if address % 64:
        raise Misaligned(f"{thread()}: a tensor map is aligned to 64 bytes; index {index} of {pointer} is not")
    return TensorMap.unpack(pointer.bytes[start : start + SIZE], f"index {index} of {pointer}"), address


def used(pointer, index):
    """The map that a copy goes by, which this thread must have acquired if it was made on the device."""
    tensor, address = at(pointer, index)
    t = thread()
    if tensor.publication and t.grid.world.acquired.get((t, address)) != tensor.publication:
        raise MissingFence(
            f"{t} uses the tensor map at index {index} of {pointer}, at {place(sys._getframe())}, which was changed on "
            f"the device; it must call fence_proxy_tensormap_acquire_gpu first, after it was published"
        )
    _storage(tensor.address)
    return tensor


def acquire(pointer, index):
    """This thread goes by the map as it is now."""
    tensor, address = at(pointer, index)
    t = thread()
    t.grid.world.acquired[t, address] = tensor.publication


def _in_shared(array, at_element, what):
    here = region(array, at_element, SIZE, 128, what)
    return here, TensorMap.unpack(here.bytes, str(here))


def replace(array, at_element, field, value, dimension=None):
    """Change a field of a map in shared memory."""
    what = "tensormap.replace"
    here, tensor = _in_shared(array, at_element, what)
    if field == "dims" and not 1 <= value <= 1 << 32:
        raise SimulatorError(f"{thread()}: {what} makes dimension {dimension} {value}; it must be 1 to 2^32")
    if field != "dims" and value % 16:
        raise Misaligned(f"{thread()}: {what} sets {field} to {value:#x}, which is no multiple of 16 bytes")
    if dimension is None:
        setattr(tensor, field, value)
    elif dimension < len(getattr(tensor, field)):
        getattr(tensor, field)[dimension] = value
    else:
        raise SimulatorError(f"{thread()}: {what} has no {field}[{dimension}] in a tensor of {tensor.rank} dimensions")
    here.room.watched().touch_bytes(thread(), here, writes=True)
    here.bytes[:] = np.frombuffer(tensor.pack(), np.uint8)


def publish(pointer, index, array, at_element):
    """A warp writes a map from shared to global memory; whoever uses it must acquire it."""
    here, tensor = _in_shared(array, at_element, "tensormap.cp_fenceproxy")
    start = int(index) * pointer.array.itemsize
    if not 0 <= start <= pointer.bytes.size - SIZE:
        raise OutOfBounds(f"{thread()}: a tensor map at index {index} is outside {pointer}")

    def finish(values):
        if len(set(values.values())) > 1:
            raise SimulatorError(f"{thread()}: the lanes of its warp publish different tensor maps, or to other places")
        tensor = TensorMap.unpack(here.bytes, str(here))
        tensor.publication = next(_publications)
        pointer.bytes[start : start + SIZE] = np.frombuffer(tensor.pack(), np.uint8)
        thread().grid.progress()
        return dict.fromkeys(values)

    collective("tensormap.cp_fenceproxy", FULL, (pointer.address + start, here.start), finish)
