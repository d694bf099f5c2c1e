"""Reads of memory that nothing has written since its allocation.

New memory of `cuda.device_array` and, where data races are detected, of `torch.empty` and its relatives is filled with
poison. A load that still finds poison there has read uninitialised memory. Writers are not recorded, so any way to
fill the memory is recognised: a kernel, a torch operation, a NumPy view. The price is that a value that happens to be
poison (-1 in memory of floats, stored as an integer) counts as uninitialised.

Accesses narrower than 4 bytes are reported if the whole 4-byte word around them is poison. Asynchronous copies are not
checked: a kernel may copy a whole tile and use a part of it. Shared and local memory starts as poison, too; kernels may
read it if they do not use the value (see `unknown`), while a read of global memory is an error at once.
"""

import bisect
import contextlib
import ctypes
import functools
import sys
import weakref

import numpy as np

from moe_numba.simulator.core.errors import UninitializedRead, plain_index, source_location

_PATTERN = np.array([0xCD, 0xFF], np.uint8)  # of integers: an odd number, and a NaN as float32, float16 and bfloat16
_BYTES = {b"\xff", b"\xcd"}  # of poison
_allocations = {}  # address -> (address behind it, the poison of a word)
_addresses = []  # sorted


def poison(raw, is_float):
    """Fill bytes with implausible values: NaN of every float format that has one, or an odd bit pattern."""
    if is_float:
        raw.fill(0xFF)
    else:
        raw[0::2], raw[1::2] = _PATTERN


def register(owner, address, size, is_float):
    """Report reads of these bytes while they are poison, as long as `owner` lives."""
    if address not in _allocations:
        bisect.insort(_addresses, address)
    word = np.zeros(4, np.uint8)
    poison(word, is_float)
    _allocations[address] = entry = address + size, word.tobytes()
    weakref.finalize(owner, _forget, address, entry).atexit = False


def _forget(address, entry):
    if _allocations.get(address) is entry:
        del _allocations[address]
        del _addresses[bisect.bisect_left(_addresses, address)]


def overlapping(start, end):
    """Return (first byte, end, poison of a word) of each registered part of some memory."""
    first = max(bisect.bisect_right(_addresses, start) - 1, 0)
    found = ((address, *_allocations[address]) for address in _addresses[first : bisect.bisect_left(_addresses, end)])
    return [(max(low, start), min(high, end), word) for low, high, word in found if high > start]


def check(thread, target, index, address, size):
    """Raise an error if every 4-byte word that a thread's read of global memory touches is uninitialised.

    So a vector load of memory that is written in part is not reported.
    """
    if ctypes.string_at(address, 1) in _BYTES and is_poison(address, size, *_poison_at(address)):
        raise UninitializedRead(read(thread, target, index))


def origin(thread, target, index, address, size, owner):
    """Return the sentence about a read of shared or local memory, of `owner`, that may touch what nothing has written.

    It does if a 4-byte word there is poison; otherwise the result is None.
    """
    words = [word for word in range(address & -4, address + size, 4) if ctypes.string_at(word, 1) in _BYTES]
    if not words:
        return None
    end, poison = owner.poison
    return read(thread, target, index) if any(is_poison(word, 4, end, poison) for word in words) else None


def read(thread, target, index):
    """Return the sentence about a read of uninitialised memory."""
    where = source_location(sys._getframe())
    return f"{thread}, at {where}, reads index {plain_index(index)} of {target}, which nothing has written"


def is_poison(address, size, end, word):
    """Return whether all 4-byte words that some bytes touch, of memory that ends at `end`, are this poison."""
    first, last = address & -4, min(address + size + 3 & -4, end)
    return address < end and ctypes.string_at(first, last - first) == (word * (last - first))[: last - first]


def _poison_at(address):
    """Return the end of the registered memory at an address, and the poison of a word there; 0 and "" without any."""
    position = bisect.bisect_right(_addresses, address) - 1
    return _allocations[_addresses[position]] if position >= 0 else (0, b"")


def register_tensor(tensor):
    """Fill the memory of a new torch tensor with poison, and report reads of it."""
    storage = tensor.untyped_storage()
    if size := storage.nbytes():
        is_float = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        poison(np.frombuffer((ctypes.c_uint8 * size).from_address(storage.data_ptr()), np.uint8), is_float)
        register(storage, storage.data_ptr(), size, is_float)


@contextlib.contextmanager
def registered_tensors():
    """Register the tensors that `torch.empty` and its relatives return to this OS thread within this context."""
    with contextlib.nullcontext() if "torch" not in sys.modules or _modes() else _tensor_mode()():
        yield


def register_tensors():
    """Register from now on the tensors that `torch.empty` and its relatives return to this OS thread.

    Within a context of torch, whose end would end this mode instead, nothing happens.
    """
    if "torch" in sys.modules and not sys.modules["torch"].overrides._get_current_function_mode_stack():
        _tensor_mode()().__enter__()


def _modes():
    stack = sys.modules["torch"].overrides._get_current_function_mode_stack()
    return [mode for mode in stack if type(mode) is _tensor_mode()]


@functools.cache
def _tensor_mode():
    torch = sys.modules["torch"]
    functions = {torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty}

    class RegisterEmptyTensors(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            result = function(*args, **kwargs or {})
            if function in functions and result.device.type == "cpu":
                register_tensor(result)
            return result

    return RegisterEmptyTensors
