"""Calls with arrays of other libraries: converted without a copy (DLPack), ordered with the caller's CuPy stream."""

import contextlib
import importlib

import torch

from moe_numba import simulator

_FP8 = torch.float8_e4m3fn, torch.float8_e5m2
_MISSING_DTYPES = {"cupy": _FP8, "numpy": (*_FP8, torch.bfloat16)}  # of libraries that results are converted to
_FAKE_MODE = torch._C._TorchDispatchModeKey.FAKE
PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})


def is_fake_mode():
    """Whether FakeTensorMode is active."""
    return torch._C._get_dispatch_mode(_FAKE_MODE) is not None


def check_kind(name, tensor):
    """Raise for a tensor that is sparse, nested, masked or a negated view, and for one whose storage has no memory."""
    if tensor.is_nested or isinstance(tensor, torch.masked.MaskedTensor) or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else "masked" if tensor.layout is torch.strided else str(tensor.layout)
        raise ValueError(f"{name} is a {kind.removeprefix('torch.').lstrip('_')} tensor; it must be a strided tensor")
    if tensor.is_neg():
        raise ValueError(f"{name} is a negated view, whose memory has the opposite sign; use {name}.resolve_neg()")
    if tensor._is_zerotensor():
        raise ValueError(f"{name} is a tensor of zeros without memory; use {name}.clone()")
    if type(tensor) in PLAIN_TYPES and not tensor.is_meta and tensor.numel():
        with contextlib.suppress(RuntimeError):  # a tensor that torch.func wraps has no address
            if not tensor.data_ptr():
                raise ValueError(f"{name} has no memory: its storage has {tensor.untyped_storage().nbytes()} bytes")


def check_has_memory(name, tensor):
    """Raise for a tensor without data: a FakeTensor, as under torch.compile, one on the meta device or one of vmap.

    So are subclasses that wrap other tensors, such as DTensor.
    """
    try:
        has_memory = tensor.untyped_storage().device.type != "meta" and (tensor.data_ptr() or not tensor.numel())
    except NotImplementedError:
        has_memory = False
    if not has_memory:
        raise TypeError(f"{name} is a {type(tensor).__name__} without memory; it must be a tensor with data")


def as_tensor(array, name):
    """Return a torch tensor that shares the memory of an array of any library that supports DLPack.

    The array named ``out``, and those of an ``out`` tuple, ``out[0]`` and so on, must be writable. A tensor of a
    subclass must have memory, except in FakeTensorMode.
    """
    if type(array) in PLAIN_TYPES:
        return array
    if isinstance(array, torch.Tensor):
        if not is_fake_mode():
            check_has_memory(name, array)
        return array
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} is {type(array).__name__}; it must be a tensor, or an array that supports DLPack")
    if any(stride < 0 for stride in getattr(array, "strides", None) or ()):
        raise ValueError(f"{name} has strides {array.strides}; none may be negative")
    if name.startswith("out") and not getattr(getattr(array, "flags", None), "writeable", True):  # torch ignores it
        raise ValueError(f"{name} is read-only; it must be writable")
    try:
        return torch.from_dlpack(array)
    except BufferError as error:
        described = f"{type(array).__name__} of {getattr(array, 'dtype', 'unknown dtype')}"
        raise TypeError(f"{name} is {described}; it must be an array that DLPack can describe: {error}") from error


def call_with_tensors(function, name, arguments):
    """Call a public function whose first argument is not a torch tensor.

    All arrays among the arguments become tensors. If the first one is from CuPy, the call runs on CuPy's current
    stream, so that it is ordered with the caller's work on inputs and outputs. Results are from the library of the
    first argument, or torch tensors if it lacks their dtype (FP8; NumPy also bfloat16). ``out`` is returned as it was
    passed.

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
        if library not in _MISSING_DTYPES:
            return result
        from_dlpack = importlib.import_module(library).from_dlpack

        def convert(tensor):
            return tensor if tensor.dtype in _MISSING_DTYPES[library] else from_dlpack(tensor)

        if isinstance(result, dict):
            return {key: convert(tensor) for key, tensor in result.items()}
        return tuple(map(convert, result)) if isinstance(result, tuple) else convert(result)


def _converted(name, value):
    if isinstance(value, (tuple, list)):
        make = getattr(value, "_make", tuple)  # of a named tuple
        return make(_converted(f"{name}[{i}]", item) for i, item in enumerate(value))
    return as_tensor(value, name) if hasattr(value, "__dlpack__") else value


def _callers_stream(array, library):
    """Make CuPy's current stream torch's current stream."""
    if library != "cupy" or simulator.ENABLED:
        return contextlib.nullcontext()
    import cupy

    stream = cupy.cuda.get_current_stream(array.device.id).ptr
    default = torch.cuda.default_stream(array.device.id)
    return torch.cuda.stream(torch.cuda.ExternalStream(stream, array.device.id) if stream else default)
