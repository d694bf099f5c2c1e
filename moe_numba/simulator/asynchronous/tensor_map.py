"""Tensor maps: 128 bytes that describe a tensor's address, extents and strides, and the box that a copy transfers.

A GPU's layout of the 128 bytes is undocumented; the simulator uses its own. A map holds its tensor's address, which
must lie in a registered tensor: one that a map was encoded for and that still exists.
"""

import functools
import itertools
import math
import struct
import sys

import numpy as np

from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import Misaligned, MissingFence, OutOfBounds, SimulatorError, source_location
from moe_numba.simulator.core.memory import thread_prefix
from moe_numba.simulator.core.reachable import bytes_at
from moe_numba.simulator.core.shared import shared_region
from moe_numba.simulator.core.warp import aligned

SIZE = 128  # bytes of a map
_MAGIC = 0x70614D74  # "tMap"
_FORMAT = struct.Struct("<IBBHQ5Q4Q5HxxQ")  # padded to 128 bytes
storages = []  # registered storages: (address, bytes, weak reference of torch)
_publications = itertools.count(1)


class TensorMap:
    """Fields of a tensor map. Dimensions are listed innermost first; `strides` start at dimension 1, in bytes.

    `publication` numbers the publications of maps that were changed on the device; 0 for maps from the host.
    """

    def __init__(self, address, itemsize, dims, strides, box, swizzle, publication=0):
        self.address, self.itemsize, self.swizzle, self.publication = address, itemsize, swizzle, publication
        self.dims, self.strides, self.box, self.rank = list(dims), list(strides), list(box), len(dims)

    @property
    def box_bytes(self):
        return math.prod(self.box) * self.itemsize

    def pack(self):
        """Encode the map as 128 bytes."""
        pad = lambda values, count: [*values, *[0] * (count - len(values))]
        numbers = [*pad(self.dims, 5), *pad(self.strides, 4), *pad(self.box, 5)]
        head = _MAGIC, self.rank, self.itemsize, self.swizzle, self.address
        return _FORMAT.pack(*head, *numbers, self.publication).ljust(SIZE, b"\0")

    @classmethod
    def unpack(cls, data, where):
        magic, rank, itemsize, swizzle, address, *numbers, publication = _FORMAT.unpack_from(bytes(data))
        if magic != _MAGIC:
            raise SimulatorError(f"{thread()}: {where} holds no tensor map, at {source_location(sys._getframe())}")
        dims, strides, box = numbers[:rank], numbers[5 : 4 + rank], numbers[9 : 9 + rank]
        return cls(address, itemsize, dims, strides, box, swizzle, publication)

    def _views(self, coordinates, stores=False):
        """Return slices of the part of the box that lies in the tensor, outermost first, and that part as a byte view.

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
        memory, offset = _storage(self.address)
        if offset + last > memory.size:
            why = " (a store writes whole chunks of 16 bytes)" if dims != self.dims else ""
            raise OutOfBounds(
                f"{thread_prefix()}a tensor map of extents {self.dims[::-1]} and strides {self.strides[::-1]} extends "
                f"{offset + last - memory.size} bytes past the end of the memory that its tensor is a part of{why}"
            )
        shape = [h - l for l, h in zip(low, high)]
        inside = tuple(slice(l, h) for l, h in zip(low[:0:-1], high[:0:-1]))
        inside += (slice(low[0] * self.itemsize, high[0] * self.itemsize),)
        shape[0] *= self.itemsize
        view = np.lib.stride_tricks.as_strided(memory[offset + first :], shape[::-1], [*self.strides[::-1], 1])
        return inside, view

    def _shape(self):
        return [*self.box[:0:-1], self.box[0] * self.itemsize]

    def check(self, coordinates, stores):
        """Check, when a copy is issued, that the box lies in allocated memory."""
        self._views(coordinates, stores)

    def spans(self, coordinates, stores=False):
        """Return the (address, size) of each row of a box, without what lies outside the tensor."""
        _, view = self._views(coordinates, stores)
        if view is None:
            return []
        first = view.__array_interface__["data"][0]
        return [
            (first + sum(i * s for i, s in zip(index, view.strides)), view.shape[-1])
            for index in np.ndindex(view.shape[:-1])
        ]

    def read(self, coordinates):
        """Return the bytes of the box, zeros outside the tensor."""
        out = np.zeros(self._shape(), np.uint8)
        inside, view = self._views(coordinates)
        if inside is not None:
            out[inside] = view
        return out.reshape(-1)

    def write(self, coordinates, data, add=False):
        """Write the bytes of the box that lie in the tensor or in the last 16-byte chunk of its rows.

        With `add` they are float32 numbers, which are added to those of the tensor.
        """
        inside, view = self._views(coordinates, stores=True)
        if inside is not None:
            new = data.reshape(self._shape())[inside]
            if add:
                old = np.ascontiguousarray(view).view(np.float32)
                new = (old + np.ascontiguousarray(new).view(np.float32)).view(np.uint8)
            view[...] = new


@functools.lru_cache(maxsize=1024)
def swizzled_chunks(start, size, swizzle):
    """Return the order of the 16-byte chunks of a box that starts at address `start`; None without a swizzle.

    A chunk's index in its line of `swizzle` bytes is XORed with the index of its 128-byte line among eight.
    """
    if not swizzle:
        return None
    address = start + 16 * np.arange(size // 16)
    chunks = (swizzled_address(address, swizzle) - start) // 16
    if chunks.min() < 0 or chunks.max() >= len(chunks):
        raise SimulatorError(f"a box of {size} bytes does not fill the lines of {swizzle} bytes that it is swizzled in")
    return chunks


def swizzled_address(address, swizzle):
    """Apply a swizzle of 32, 64 or 128 bytes (0: none) to a byte address."""
    return address ^ ((address >> 7 & (swizzle >> 4) - 1) << 4) if swizzle else address


def register(tensor):
    """Register the memory of a torch tensor while it exists, so that maps can refer to it by address."""
    from torch.multiprocessing.reductions import StorageWeakRef

    storage = tensor.untyped_storage()
    reference = StorageWeakRef(storage)
    storages[:] = [s for s in storages if s[2] != reference and not s[2].expired()]  # others may share its memory
    storages.append((storage.data_ptr(), storage.nbytes(), reference))


def _storage(address):
    """Return the registered memory around an address as bytes, and the offset of the address in it."""
    for first, size, reference in storages:
        if first <= address < first + size and not reference.expired():
            return bytes_at(first, size), address - first
    raise SimulatorError(
        f"{thread_prefix()}a tensor map has address {address:#x}, which is in no tensor that a map was encoded for"
    )


def read_map(pointer, index):
    """Return the map in global memory at element `index` of a pointer, and its address."""
    start = int(index) * pointer.array.itemsize
    if not 0 <= start <= pointer.bytes.size - SIZE:
        raise OutOfBounds(f"{thread()}: a tensor map at index {index} is outside {pointer}")
    address = pointer.address + start
    if address % 64:
        raise Misaligned(f"{thread()}: a tensor map must be aligned to 64 bytes; index {index} of {pointer} is not")
    return TensorMap.unpack(pointer.bytes[start : start + SIZE], f"index {index} of {pointer}"), address


def map_for_copy(pointer, index):
    """Return the map that a copy uses; this thread must have acquired it if it was changed on the device."""
    tensor, address = read_map(pointer, index)
    t = thread()
    if tensor.publication and t.grid.world.acquired_tensor_maps.get((t, address)) != tensor.publication:
        raise MissingFence(
            f"{t} uses the tensor map at index {index} of {pointer}, at {source_location(sys._getframe())}, "
            f"which was changed on the device; it must call fence_proxy_tensormap_acquire_gpu after the publication"
        )
    _storage(tensor.address)
    return tensor


def acquire(pointer, index):
    """Acquire the current contents of a map for this thread."""
    tensor, address = read_map(pointer, index)
    t = thread()
    t.grid.world.acquired_tensor_maps[t, address] = tensor.publication


def _map_in_shared(array, offset, what):
    region = shared_region(array, offset, SIZE, 128, what)
    return region, TensorMap.unpack(region.bytes, str(region))


def replace(array, offset, field, value, dimension=None):
    """Replace a field of a map in shared memory."""
    what = "tensormap.replace"
    region, tensor = _map_in_shared(array, offset, what)
    if field == "dims" and not 1 <= value <= 1 << 32:
        raise SimulatorError(f"{thread()}: {what} sets dimension {dimension} to {value}; it must be 1 to 2^32")
    if field != "dims" and value % 16:
        raise Misaligned(f"{thread()}: {what} sets {field} to {value:#x}, which is not a multiple of 16 bytes")
    if dimension is None:
        setattr(tensor, field, value)
    elif dimension < len(getattr(tensor, field)):
        getattr(tensor, field)[dimension] = value
    else:
        raise SimulatorError(f"{thread()}: {what} has no {field}[{dimension}] in a tensor of {tensor.rank} dimensions")
    region.allocation.race_detector().check_region_access(thread(), region, writes=True)
    region.bytes[:] = np.frombuffer(tensor.pack(), np.uint8)


def publish(pointer, index, array, offset):
    """Write a map from shared to global memory, once per warp; every thread that uses it must acquire it."""
    region, tensor = _map_in_shared(array, offset, "tensormap.cp_fenceproxy")
    start = int(index) * pointer.array.itemsize
    if not 0 <= start <= pointer.bytes.size - SIZE:
        raise OutOfBounds(f"{thread()}: a tensor map at index {index} is outside {pointer}")

    def finish(values):
        if len(set(values.values())) > 1:
            raise SimulatorError(
                f"{thread()}: the lanes of its warp publish different tensor maps, or to different addresses"
            )
        tensor = TensorMap.unpack(region.bytes, str(region))
        tensor.publication = next(_publications)
        pointer.bytes[start : start + SIZE] = np.frombuffer(tensor.pack(), np.uint8)
        thread().grid.memory_changed()
        return dict.fromkeys(values)

    aligned("tensormap.cp_fenceproxy", (pointer.address + start, region.start), finish)
