"""Checks of what callers pass to public functions. Every error names the argument, its value and what is allowed."""

import math
import numbers

import numpy as np
import torch

from moe_numba import simulator
from moe_numba.ptx.capability import OLDEST
from moe_numba.runtime import device as devices
from moe_numba.runtime.device import UnsupportedDeviceError
from moe_numba.runtime.dlpack import as_tensor, check_kind, is_fake_mode
from moe_numba.runtime.dlpack import check_has_memory as check_has_memory


def check_device(device, name, capability=OLDEST):
    """Raise for a device that kernels cannot run on: a CPU beside a GPU, a GPU beside the simulator, a GPU too old.

    Parameters
    ----------
    device : torch.device
        Of the argument ``name``.
    capability : (int, int)
        Least compute capability.
    """
    if is_fake(device):
        return
    if simulator.ENABLED and device.type != "cpu":
        raise ValueError(f"{name} is on {device}; in the simulator ({simulator.REASON}) it must be on the cpu")
    if not simulator.ENABLED and device.type != "cuda" and not devices.target():
        raise ValueError(f"{name} is on {device}; it must be on a CUDA GPU")
    gpu = devices.gpu_of(device)
    found = gpu.capability
    if found < capability:
        raise UnsupportedDeviceError(
            f"{gpu.name} has compute capability {found[0]}.{found[1]}; "
            f"{capability[0]}.{capability[1]} or newer is needed"
        )


def is_fake(device):
    """Whether tensors on a device have no data: it is the meta device, or FakeTensorMode is active."""
    return is_fake_mode() or device.type == "meta"


def reasons(found, wanted, because):
    """Return why sizes of a shape must be what they are, for the end of a message: ", as x has 3 rows".

    Parameters
    ----------
    found, wanted : tuple
        Shapes. Sizes of ``wanted`` that ``found`` has too need no reason.
    because : tuple of str
        For each dimension of ``wanted`` the other argument that determines its size, as in ``"x has {} rows"``, where
        ``{}`` stands for that size; "" if none does. There may be fewer than dimensions.
    """
    same_rank = len(found) == len(wanted)
    given = [
        reason.format(size)
        for i, (size, reason) in enumerate(zip(wanted, because))  # noqa: B905
        if reason and not (same_rank and found[i] == size)
    ]
    return f", as {' and '.join(given)}" if given else ""


def check_tensor(name, tensor, *, dtype=None, shape=None, because=(), contiguous=False, aligned=False, device=None):
    """Raise if the argument is not a tensor with this dtype, shape, layout and device, or is a negated view.

    Parameters
    ----------
    name : str
        The argument's.
    tensor : torch.Tensor
    dtype : torch.dtype or tuple of torch.dtype, optional
    shape : tuple, optional
        A number for each dimension that is fixed, a name for each that is not: ``("tokens", 256)``.
    because : tuple of str
        For dimensions whose size another argument determines, the reason: see :func:`reasons`.
    contiguous : bool
    aligned : bool
        The first element must be at a multiple of 16 bytes.
    device : (torch.device, str), optional
        Where the tensor must be, and the name of the argument that is there.

    Raises
    ------
    TypeError
        For what is no tensor, and for the dtype.
    ValueError
        For everything else.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {type(tensor).__name__}; it must be a tensor")
    check_kind(name, tensor)
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    if dtype is not None and tensor.dtype not in dtypes:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {' or '.join(map(str, dtypes))}")
    if shape is not None:
        fits = len(shape) == tensor.dim() and all(
            isinstance(wanted, str) or wanted == found for wanted, found in zip(shape, tensor.shape, strict=True)
        )
        if not fits or (contiguous and not tensor.is_contiguous()):
            wanted = f"[{', '.join(map(str, shape))}]" + (" and contiguous" if contiguous else "")
            wanted += reasons(tensor.shape, shape, because)
            strides = f" and strides {tensor.stride()}" if contiguous else ""
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}{strides}; it must be {wanted}")
    elif contiguous and not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")
    if aligned:
        check_aligned(name, tensor)
    if device is not None and tensor.device != device[0]:
        raise ValueError(f"{name} is on {tensor.device}; it must be where {device[1]} is, on {device[0]}")


def check_aligned(name, tensor):
    """Raise for a tensor that does not start at a multiple of 16 bytes."""
    if tensor.data_ptr() % 16:
        raise ValueError(f"{name} starts at address {tensor.data_ptr():#x}; it must be a multiple of 16")


def vector_strides(name, tensor):
    """Return the strides of a tensor in bytes; refuse those with which its rows are not read in 16-byte vectors.

    The last dimension must be contiguous, and the others have positive multiples of 16 bytes. That of a dimension of
    one element, which has no effect, is replaced by such a multiple.
    """
    size, strides = tensor.element_size(), [stride * tensor.element_size() for stride in tensor.stride()]
    if tensor.shape[-1] > 1 and strides[-1] != size:
        raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
    strides[-1] = size
    for i in reversed(range(tensor.dim() - 1)):
        if tensor.shape[i] == 1:
            strides[i] = -(-tensor.shape[i + 1] * strides[i + 1] // 16) * 16
        if strides[i] % 16 or not 0 < strides[i] < 1 << 40:
            raise ValueError(
                f"{name} has strides {tensor.stride()} of {size} bytes: that of dimension {i} is {strides[i]} bytes, "
                "but must be a multiple of 16, positive and below 2^40"
            )
    return strides


def check_int(name, value, least=None, most=None):
    """Return an integer (also NumPy's) as an int; refuse a bool, a float, and what is not in the bounds."""
    if type(value) is not int and not isinstance(value, torch.SymInt):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} is {value!r}; it must be an int")
        value = int(value)
    if most is None and least is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be {least} or more")
    if most is not None and not least <= value <= most:
        raise ValueError(f"{name} is {value}; {least} to {most} are allowed")
    return value


def check_flag(name, value):
    """Return a bool, NumPy's too, or 0 or 1, as a bool; refuse everything else."""
    if type(value) is bool:
        return value
    if not isinstance(value, np.bool_) and not (type(value) is int and value in (0, 1)):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def check_choice(name, value, choices):
    """Raise for what is not one of ``choices``, which are strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(str, choices))}")


def check_dtype(name, dtype, allowed):
    """Raise for what is not one of the ``allowed`` dtypes."""
    if not isinstance(dtype, torch.dtype) or dtype not in allowed:
        raise TypeError(f"{name} is {dtype!r}; it must be {' or '.join(map(str, allowed))}")


_FLOAT32_MAX = torch.finfo(torch.float32).max


def check_factor(name, value):
    """Return a number as a float, 1.0 for None; refuse what kernels cannot multiply and divide by in float32."""
    if value is None:
        return 1.0
    is_number = hasattr(type(value), "__float__") and math.prod(getattr(value, "shape", ())) == 1
    if isinstance(value, bool) or not is_number:
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not 1 / _FLOAT32_MAX <= abs(float(value)) <= _FLOAT32_MAX:
        raise ValueError(f"{name} is {value}; it must be finite and not zero, as must its reciprocal, in float32")
    return float(value)


def check_out_tuple(out, count):
    """The tensors of an ``out`` argument, which must be a tuple of ``count``."""
    if not isinstance(out, (tuple, list)) or len(out) != count:
        what = f"{len(out)} of them" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ValueError(f"out is {what}; it must be a tuple of {count} tensors")
    return [as_tensor(array, f"out[{i}]") for i, array in enumerate(out)]


def check_out(name, tensor, shape, dtype, because, device):
    """Raise for an output that is not contiguous, or not of this shape and dtype on this device."""
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}, strides {tensor.stride()}; "
            f"it must be contiguous {dtype} {shape} on {device}{reasons(tensor.shape, shape, because)}"
        )


def make_outputs(out, wanted, device, aligned=()):
    """Allocate the outputs of a call, or check those of its ``out`` argument.

    Parameters
    ----------
    out : None, a tensor, or a tuple of tensors
        None to allocate. A function with one output takes it without a tuple.
    wanted : sequence of (name, shape, dtype, because)
        ``because`` has the other arguments that determine the shape: see :func:`reasons`.
    device : torch.device
    aligned : collection of str
        Names of those that must start at a multiple of 16 bytes, as new ones do.

    Returns
    -------
    list of torch.Tensor
    """
    if out is None:
        return [torch.empty(*shape, dtype=dtype, device=device) for _, shape, dtype, _ in wanted]
    results = [as_tensor(out, "out")] if len(wanted) == 1 else check_out_tuple(out, len(wanted))
    for tensor, (name, shape, dtype, because) in zip(results, wanted, strict=True):
        described = "out" if len(wanted) == 1 else f"out's {name}"
        check_out(described, tensor, shape, dtype, because, device)
        if name in aligned:
            check_aligned(described, tensor)
    return results


def check_no_grad(name, tensor, function):
    """Raise for a tensor that requires grad while grad mode is on; ``function`` names what has no backward."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad; {function} has no backward: use torch.no_grad() or detach()")
