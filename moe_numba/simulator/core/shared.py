"""Shared memory of a block: its arrays and their addresses in the shared window.

Copies and matrix instructions name shared memory by its 18-bit address in that window. An array has the same address in
every block, so that one block of a cluster can address another's memory.
"""

import numpy as np

from moe_numba.simulator.asynchronous.race_detector import RaceDetector
from moe_numba.simulator.capability import SIMULATED, SM_LIMITS
from moe_numba.simulator.core.errors import AsyncRace, Misaligned, OutOfBounds, SimulatorError, file_name
from moe_numba.simulator.core.memory import Array, Pointer, as_dtype, poison, poison_word, thread_prefix

MAX_SHARED_BYTES = 1024 * SM_LIMITS[SIMULATED].shared_kib_of_a_block
MAX_STATIC_BYTES = 48 * 1024  # more must be dynamic
_FIRST = 1024  # the first bytes of the window are reserved by the system
_ALIGNMENT = 16  # least alignment of an array, so that 16-byte vectors work as they mostly do on a GPU


class SharedLayout:
    """Addresses of a kernel's shared arrays: dynamic shared memory first, then static arrays in order of first use."""

    def __init__(self, dynamic_bytes):
        self.dynamic_bytes, self.addresses = dynamic_bytes, {}
        self.end, self.used = _FIRST + dynamic_bytes, dynamic_bytes
        self._check_size()

    def address_of(self, key, size, alignment):
        """Return the address of the array identified by `key`, allocating it on first use."""
        if key not in self.addresses:
            start = -(-self.end // alignment) * alignment
            self.addresses[key], self.end, self.used = start, start + size, self.used + size
            self._check_size()
        return self.addresses[key]

    def _check_size(self):
        if self.used > MAX_SHARED_BYTES:
            raise SimulatorError(
                f"{thread_prefix()}the kernel's shared memory has {self.used} bytes; the maximum is {MAX_SHARED_BYTES}"
            )
        if (static_bytes := self.used - self.dynamic_bytes) > MAX_STATIC_BYTES:
            raise SimulatorError(
                f"{thread_prefix()}the kernel's static shared memory has {static_bytes} bytes; the maximum is "
                f"{MAX_STATIC_BYTES}, and more must be dynamic shared memory"
            )


class SharedAllocation:
    """The memory of one shared array: bytes `start` to `end` of its block's window."""

    __slots__ = ("shared", "array", "bytes", "name", "start", "end", "to_window", "alignment", "detector", "poison")

    def __init__(self, shared, array, name, start, alignment):
        self.shared, self.array, self.name, self.start, self.alignment = shared, array, name, start, alignment
        self.bytes = array.reshape(-1).view(np.uint8)
        self.end = start + self.bytes.size
        first = self.bytes.__array_interface__["data"][0]
        self.poison = first + self.bytes.size, poison_word(array.dtype)  # as that of `LocalArray`
        self.to_window = start - first  # add to a host address
        self.detector = RaceDetector(self) if shared.block.grid.uses_async else None

    def race_detector(self):
        """Return the race detector, and start it now if the kernel was not expected to need one."""
        if self.detector is None:
            self.shared.block.grid.world.watch_accesses()
            self.detector = RaceDetector(self)
        return self.detector

    def __str__(self):
        return f"{self.name} in {self.shared.block}"


class SharedRegion:
    """A byte range of a SharedAllocation, by its addresses in the window."""

    __slots__ = ("allocation", "start", "end")

    def __init__(self, allocation, start, end):
        self.allocation, self.start, self.end = allocation, start, end

    @property
    def bytes(self):
        return self.allocation.bytes[self.start - self.allocation.start : self.end - self.allocation.start]

    def in_block(self, block):
        """Return the same region in another block of the cluster."""
        return SharedRegion(block.shared.counterpart_of(self.allocation), self.start, self.end)

    def check_access(self, thread, writes):
        """Check a thread's own access to these bytes for races, if the kernel needs it."""
        if self.allocation.detector is not None:
            self.allocation.detector.check_region_access(thread, self, writes)

    def __str__(self):
        first = self.start - self.allocation.start
        return f"bytes {first} to {self.end - self.allocation.start - 1} of {self.allocation}"


class SharedMemory:
    """The shared memory of one block."""

    def __init__(self, block, layout):
        self.block, self.layout = block, layout
        self.allocations, self.barriers = {}, {}
        self.arrays = {}  # cache of `array`

    def array(self, shape, dtype, alignment, frame):
        """Return the shared array that the call in `frame` declares, the same for all threads of the block.

        Shape 0 is dynamic shared memory.
        """
        # Keyed by the code's id, since hashing code is slow. The allocation's key keeps the code object alive.
        key = id(frame.f_code), frame.f_lasti, shape, dtype, alignment
        if key not in self.arrays:
            self.arrays[key] = self._array(shape, dtype, alignment, frame)
        return self.arrays[key]

    def _array(self, shape, dtype, alignment, frame):
        if shape == 0 or shape == (0,):
            dtype, size = as_dtype(dtype), self.layout.dynamic_bytes
            allocation = self._allocation((None, 0, size, np.uint8, None), "dynamic shared memory")
            allocation.alignment = max(allocation.alignment, alignment or dtype.itemsize)
            usable = size // dtype.itemsize * dtype.itemsize
            return Array(allocation.array[:usable].view(dtype), allocation.name, allocation)
        # The instruction, not the line: one line may declare two arrays. The shape too: closures share their code.
        key = frame.f_code, frame.f_lasti, shape, dtype, alignment
        name = f"the shared array of {file_name(frame.f_code.co_filename)}:{frame.f_lineno}"
        allocation = self._allocation(key, name)
        return Array(allocation.array, allocation.name, allocation)

    def _allocation(self, key, name):
        if key not in self.allocations:
            code, _, shape, dtype, alignment = key
            dtype = as_dtype(dtype)
            size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            start = self.layout.address_of(key, size, max(alignment or 0, _ALIGNMENT)) if code else _FIRST
            array = poison(shape, dtype, 1024, past=start % 1024)
            self.allocations[key] = SharedAllocation(self, array, name, start, alignment or dtype.itemsize)
        return self.allocations[key]

    def counterpart_of(self, allocation):
        """Return this block's allocation that corresponds to another block's.

        This block need not have declared it yet: on a GPU shared memory is laid out before the kernel starts.
        """
        key = next(k for k, known in allocation.shared.allocations.items() if known is allocation)
        counterpart = self._allocation(key, allocation.name)
        counterpart.alignment = max(counterpart.alignment, allocation.alignment)
        return counterpart

    def counterpart(self, array, other):
        """Return a pointer to the counterpart in `other` of an array in this memory; None if it does not lie here."""
        address = array.__array_interface__["data"][0]
        for allocation in self.allocations.values():
            start = address + allocation.to_window
            if allocation.start <= start < allocation.end:
                remote = other.counterpart_of(allocation)
                return Pointer(remote.bytes[start - remote.start :], allocation.name, remote).view(array.dtype)
        return None

    def find(self, start, end, what):
        """Return the region at an address in the window; `what` describes the access in error messages."""
        for allocation in self.allocations.values():
            if allocation.start <= start < allocation.end:
                if end > allocation.end:
                    raise OutOfBounds(
                        f"{thread_prefix()}{what} reaches {end - allocation.end} bytes past the end of {allocation}"
                    )
                return SharedRegion(allocation, start, end)
        raise OutOfBounds(f"{thread_prefix()}{what} addresses byte {start:#x} of shared memory, which holds no array")

    def forget_threads(self):
        """Forget which threads wrote to the arrays."""
        for allocation in self.allocations.values():
            if allocation.detector is not None:
                allocation.detector.writers.clear()

    def free(self):
        """Forget all arrays and mbarriers."""
        for known in (self.allocations, self.arrays, self.barriers):
            known.clear()

    def check_end_of_block(self):
        """Raise an AsyncRace if asynchronous operations still use this memory when the block ends."""
        for warp in self.block.warps:
            for wgmma in warp.wgmma_groups:
                raise AsyncRace(f"{warp} ends, but has not waited for {wgmma.what}, which it issued at {wgmma.site}")
        for allocation in self.allocations.values():
            if allocation.detector is not None:
                allocation.detector.check_end_of_block()


def shared_region(array, index, size, alignment, what):
    """Return the `size` bytes from element `index` of a shared array on; check their bounds and alignment."""
    allocation = getattr(array, "allocation", None)
    if allocation is None:
        raise SimulatorError(f"{thread_prefix()}{what} takes an array in shared memory, which {array} is not")
    start = array.address + int(index) * array.dtype.itemsize + allocation.to_window
    if not allocation.start <= start <= start + size <= allocation.end:
        raise OutOfBounds(
            f"{thread_prefix()}{what} takes {size} bytes at index {index} of {array}, which are outside {allocation}"
        )
    if (start - allocation.start) % alignment:
        raise Misaligned(
            f"{thread_prefix()}{what} needs an address aligned to {alignment} bytes, "
            f"but index {index} of {array} lies {(start - allocation.start) % alignment} bytes past one"
        )
    if allocation.alignment < alignment:
        raise Misaligned(
            f"{thread_prefix()}{what} needs an address aligned to {alignment} bytes, but {allocation} is aligned to "
            f"{allocation.alignment}: declare it with cuda.shared.array(..., {alignment})"
        )
    return SharedRegion(allocation, start, start + size)
