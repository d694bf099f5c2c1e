"""Calls with arrays of other libraries: converted without a copy (DLPack), ordered with the caller's CuPy stream."""

import contextlib
import importlib

import torch

from moe_numba import simulator


def as_tensor(array, name):
    """Return a torch tensor that shares the memory of an array of any library that supports DLPack."""
    if isinstance(array, torch.Tensor):
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} is {type(array).__name__}; it must be a tensor, or an array that supports DLPack")
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        raise ValueError(f"{name} has strides {array.strides}; none may be negative")
    return torch.from_dlpack(array)


def call_with_tensors(function, name, arguments):
    """Call a public function whose first argument is not a torch tensor.

    All arrays among the arguments become tensors. If the first one is from CuPy, the call runs on CuPy's current
    stream, so that it is ordered with the caller's work on inputs and outputs. Results are from the library of the
    first argument; ``out`` is returned as it was passed.

    Parameters
    ----------
    function : callable
    name : str
        The first argument's.
    arguments : dict
        All arguments of the function, by name.
    """
    first, out = arguments[name], arguments.get("out")
    if not hasattr(first, "__dlpack__"):
        as_tensor(first, name)  # raises
    library = type(first).__module__.partition(".")[0]
    with _callers_stream(first, library):
        result = function(**{key: _converted(key, value) for key, value in arguments.items()})
        if out is not None:
            return out
        if library not in ("cupy", "numpy"):
            return result
        convert = importlib.import_module(library).from_dlpack
        return tuple(map(convert, result)) if isinstance(result, tuple) else convert(result)


def _converted(name, value):
    if isinstance(value, (tuple, list)):
        return tuple(_converted(f"{name}[{i}]", item) for i, item in enumerate(value))
    return as_tensor(value, name) if hasattr(value, "__dlpack__") else value


def _callers_stream(array, library):
    """Make CuPy's current stream torch's current stream."""
    if library != "cupy" or simulator.ENABLED:
        return contextlib.nullcontext()
    import cupy

    stream = cupy.cuda.get_current_stream(array.device.id).ptr
    default = torch.cuda.default_stream(array.device.id)
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, array.device.id) if stream else default)
