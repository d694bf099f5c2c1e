"""From what a caller passes (NumPy arrays, torch tensors, Numba's fake device arrays) to what a kernel sees of it."""

import importlib
import sys

import numpy as np

from moe_numba.simulator.core.memory import Array, Pointer, reachable


def _is_tensor(value):
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _from_torch(tensor, whole_storage):
    """A NumPy view of a CPU tensor, or of all that its storage holds from its first element on."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise TypeError(f"the simulator reads tensors on the CPU, but this one is on {tensor.device}")
    tensor = tensor.detach()
    if whole_storage:
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        tensor = torch.as_strided(tensor, (size,), (1,), tensor.storage_offset())
    try:
        return tensor.numpy()
    except TypeError:  # NumPy itself lacks this type; ml_dtypes has it under the same name
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), str(tensor.dtype).removeprefix("torch.")))
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.view(bits).numpy().view(dtype)


def pointer(value, name=""):
    """A Pointer to the first element of a torch CPU tensor or of an array; it shares the caller's memory."""
    if isinstance(value, Pointer):
        return Pointer(value.array, name or value.name)
    if _is_tensor(value):
        return Pointer(_from_torch(value, whole_storage=True), name)
    value = getattr(value, "_ary", getattr(value, "array", value))
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a pointer needs a torch CPU tensor or a NumPy array, but got {type(value).__name__}")
    return Pointer(reachable(value), name)


def argument(value, name):
    """A kernel's argument as the kernel sees it."""
    if isinstance(value, Pointer):
        return Pointer(value.array, name)
    if type(value) is tuple:
        return tuple(argument(item, f"{name}[{i}]") for i, item in enumerate(value))
    if _is_tensor(value):
        return Array(_from_torch(value, whole_storage=False), name)
    value = getattr(value, "_ary", value)  # Numba's fake device arrays
    if isinstance(value, np.ndarray):
        return Array(value.view(np.recarray) if value.dtype.names else value, name)
    if isinstance(value, np.void):
        return value.view(np.dtype((np.record, value.dtype))) if value.dtype.names else value
    return value
