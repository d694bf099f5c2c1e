"""Checks of the grouped GEMM's arguments. Every error names the argument, its value and what is allowed."""

import torch

from moe_numba import simulator
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import UnsupportedDeviceError, as_tensor, check_device, check_tensor, is_fake

_MAX_GROUPS = 512
_MAX_AVERAGE = 1 << 20


def check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype):
    """Check x, weight and the group sizes.

    Returns
    -------
    row_layout : str
        "lengths", "offsets" or "masked"; see ``GemmConfig``.
    lengths : torch.Tensor
    starts : torch.Tensor or None
    """
    for name, tensor, dims in (("x", x, "2 or 3"), ("weight", weight, "3")):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if str(tensor.dim()) not in dims:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions")
    check_device(x.device, (9, 0), "x")
    check_hopper(x.device)
    groups, n, k = weight.shape
    if not 1 <= groups <= _MAX_GROUPS:
        raise ValueError(f"weight has {groups} groups; 1 to {_MAX_GROUPS} are allowed")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns; it must have weight's k, {k}")
    for name, size in (("n", n), ("k", k)):
        if size % 64 or not size:
            raise ValueError(f"weight's {name} is {size}; it must be a multiple of 64")
    masked = x.dim() == 3
    if masked:
        check_tensor("x", x, shape=(groups, "capacity", k), contiguous=True)
    if offs is not None:
        if seqlens is not None or cu_seqlens is not None or masked:
            raise ValueError("offs is given: seqlens and cu_seqlens must be None, and x must have 2 dimensions")
        row_layout, sizes = "offsets", [("offs", offs, groups)]
    elif masked:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given: x must have 2 dimensions; for a masked x it must be None")
        row_layout, sizes = "masked", [("seqlens", seqlens, groups)]
    else:
        row_layout, sizes = "lengths", [("seqlens", seqlens, groups), ("cu_seqlens", cu_seqlens, groups + 1)]
    tensors = [_check_array(name, array, (size,), torch.int32, x.device) for name, array, size in sizes]
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}; it must be where x is, on {x.device}")
    return row_layout, tensors[0], tensors[1] if len(tensors) > 1 else None


def check_hopper(device):
    """Refuse GPUs other than Hopper: only compute capability 9.0 has wgmma."""
    if not simulator.ENABLED and not is_fake(device) and devices.gpu_of(device).capability != (9, 0):
        name, (major, minor), *_ = devices.gpu_of(device)
        raise UnsupportedDeviceError(f"{name} has compute capability {major}.{minor}; 9.0 (Hopper) is needed")


def check_scales(scaling, x, weight, x_scale, weight_scale):
    """Return the scales of x and of the weight (or of the product) as tensors, or None."""
    groups, n, k = weight.shape
    if scaling == "tensor":
        weight_scale = _check_array("y_scale", weight_scale, (groups,), torch.float32, x.device)
    elif scaling == "block":
        k_blocks = -(-k // 128)
        x_scale = _check_array("x_scale", x_scale, (*x.shape[:-1], k_blocks), torch.float32, x.device)
        shape = groups, -(-n // 128), k_blocks
        weight_scale = _check_array("w_scale", weight_scale, shape, torch.float32, x.device)
    return x_scale, weight_scale


def describe_outputs(shape, n, silu_and_mul):
    """Return name, shape and dtype of each output; ``shape`` is that of the rows."""
    if not silu_and_mul:
        return [("y", (*shape, n), torch.bfloat16)]
    if n % 256:
        raise ValueError(f"weight's n is {n}; with gate and up it must be a multiple of 256")
    return [("y", (*shape, n // 2), torch.float8_e4m3fn), ("scale", (*shape, n // 256), torch.float32)]


def check_indices(array, x):
    """Return ``gather_indices`` as a tensor."""
    indices = as_tensor(array, "gather_indices")
    _check_array("gather_indices", indices, (indices.numel(),), torch.int32, x.device)
    if x.dim() == 3:
        raise ValueError("gather_indices is given: x must be [tokens, k], not masked")
    return indices


def check_average(average, total_rows, groups):
    """Return the average number of rows per group, computed if the caller does not give it."""
    if average is None:
        return -(-total_rows // groups)
    if type(average) is not int or average < 0:
        raise ValueError(f"num_seq_per_group_avg is {average!r}; it must be an int, 0 or more")
    return min(average, _MAX_AVERAGE)


def _check_array(name, array, shape, dtype, device):
    tensor = as_tensor(array, name)
    # Compare first, because check_tensor adds several microseconds to every call.
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device or not tensor.is_contiguous():
        check_tensor(name, tensor, dtype=dtype, shape=shape, contiguous=True, device=(device, "x"))
    return tensor
