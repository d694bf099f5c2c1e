"""Wrap kernel arguments (NumPy arrays, torch tensors, Numba's fake device arrays) as checked pointers and arrays."""

import importlib
import sys

import numpy as np

from moe_numba.simulator.core import operators
from moe_numba.simulator.core.memory import Array, Pointer, reachable_view


def _is_tensor(value):
    torch = sys.modules.get("torch")  # never import torch here: the simulator works without it
    return torch is not None and isinstance(value, torch.Tensor)


def _from_torch(tensor, whole_storage):
    """Return a NumPy view of a CPU tensor, or of its storage from the tensor's first element on."""
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise TypeError(f"the simulator reads tensors on the CPU, but this one is on {tensor.device}")
    tensor = tensor.detach()
    if whole_storage:
        size = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
        tensor = torch.as_strided(tensor, (size,), (1,), tensor.storage_offset())
    try:
        return tensor.numpy()
    except TypeError:  # NumPy lacks this type; ml_dtypes defines it under the same name
        dtype = np.dtype(getattr(importlib.import_module("ml_dtypes"), str(tensor.dtype).removeprefix("torch.")))
        bits = {1: torch.uint8, 2: torch.int16}[tensor.element_size()]
        return tensor.view(bits).numpy().view(dtype)


def pointer(value: "torch.Tensor | np.ndarray | Pointer", name: str = "") -> Pointer:  # noqa: F821
    """Return a Pointer to the first element of a torch CPU tensor or an array; it shares the caller's memory.

    `name` identifies the memory in error messages. Raises a TypeError for anything else.
    """
    if isinstance(value, Pointer):
        return Pointer(value.array, name or value.name)
    if _is_tensor(value):
        return Pointer(_from_torch(value, whole_storage=True), name)
    value = getattr(value, "_ary", getattr(value, "array", value))
    if not isinstance(value, np.ndarray):
        raise TypeError(f"a pointer needs a torch CPU tensor or a NumPy array, but got {type(value).__name__}")
    return Pointer(reachable_view(value), name)


def wrap_argument(value, name):
    """Wrap one kernel argument; tuples are wrapped item by item. Python numbers become what Numba takes them for."""
    if type(value) is float:
        return np.float64(value)
    if type(value) is int:
        return operators.wrap(value) if value < 2**63 else np.uint64(value & (2**64 - 1))
    if isinstance(value, Pointer):
        return Pointer(value.array, name)
    if type(value) is tuple:
        return tuple(wrap_argument(item, f"{name}[{i}]") for i, item in enumerate(value))
    if _is_tensor(value):
        return Array(_from_torch(value, whole_storage=False), name)
    value = getattr(value, "_ary", value)  # Numba's fake device arrays
    if isinstance(value, np.ndarray):
        return Array(value.view(np.recarray) if value.dtype.names else value, name)
    if isinstance(value, np.void):
        return value.view(np.dtype((np.record, value.dtype))) if value.dtype.names else value
    return value
