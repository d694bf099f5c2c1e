"""What callers give to the grouped GEMM: checked, with an error that names the argument and what is allowed."""

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import UnsupportedDeviceError, as_tensor, check_device

_MOST_GROUPS = 512


def check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype):
    """How rows are given, and the tensors that tell."""
    for name, tensor, dims in (("x", x, "2 or 3"), ("weight", weight, "3")):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if str(tensor.dim()) not in dims:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions")
    check_device(x.device, (9, 0), "x")
    require_hopper(x.device)
    groups, n, k = weight.shape
    if not 1 <= groups <= _MOST_GROUPS:
        raise ValueError(f"weight has {groups} groups; 1 to {_MOST_GROUPS} are allowed")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns; it must have weight's k, {k}")
    for name, size in (("n", n), ("k", k)):
        if size % 64 or not size:
            raise ValueError(f"weight's {name} is {size}; it must be a multiple of 64")
    if x.dim() == 3 and (len(x) != groups or not x.is_contiguous()):
        raise ValueError(f"x is {tuple(x.shape)}, strides {x.stride()}; masked, it must be [{groups}, ...], contiguous")
    if offs is not None:
        if seqlens is not None or cu_seqlens is not None or x.dim() == 3:
            raise ValueError("offs is given: seqlens and cu_seqlens must be None, and x not masked")
        rows, wanted = "offsets", {"offs": (offs, groups)}
    elif x.dim() == 3:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given; x is masked, so it must be None")
        rows, wanted = "masked", {"seqlens": (seqlens, groups)}
    else:
        rows, wanted = "lengths", {"seqlens": (seqlens, groups), "cu_seqlens": (cu_seqlens, groups + 1)}
    tensors = []
    for name, (array, size) in wanted.items():
        tensor = as_tensor(array, name)
        _check(name, tensor, (size,), torch.int32, x.device)
        tensors.append(tensor)
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}; it must be where x is, on {x.device}")
    return rows, tensors[0], tensors[1] if len(tensors) > 1 else None


def require_hopper(device):
    """These tensor core instructions came with compute capability 9.0, and went with it."""
    if not simulator.ENABLED and devices.gpu_of(device).capability != (9, 0):
        name, (major, minor), *_ = devices.gpu_of(device)
        raise UnsupportedDeviceError(f"{name} has compute capability {major}.{minor}; 9.0 is needed, Hopper's")


def check_scale(name, array, shape, device):
    """A tensor of scales."""
    tensor = as_tensor(array, name)
    _check(name, tensor, shape, torch.float32, device)
    return tensor


def check_indices(array, x):
    """The rows of x that the product's rows are."""
    tensor = as_tensor(array, "gather_indices")
    _check("gather_indices", tensor, (tensor.numel(),), torch.int32, x.device)
    if x.dim() == 3:
        raise ValueError("gather_indices is given: x must be [tokens, k], not masked")
    return tensor


def check_average(average, total, groups):
    """Rows of a group, as the caller says or as they are on average."""
    if average is None:
        return -(-total // groups)
    if type(average) is not int or average < 0:
        raise ValueError(f"num_seq_per_group_avg is {average!r}; it must be an int, 0 or more")
    return min(average, 1 << 20)


def _check(name, tensor, shape, dtype, device):
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
    if tuple(tensor.shape) != tuple(shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; "
            f"it must be contiguous and {tuple(shape)}"
        )
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; it must be where x is, on {device}")
