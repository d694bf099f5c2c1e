"""Checks of the grouped GEMM's arguments. Every error names the argument, its value and what is allowed."""

import torch

from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import UnsupportedDeviceError, check_device, check_tensor, is_fake

MAX_GROUPS = 512


def check_inputs(x, weight, seqlens, cu_seqlens, offs, dtype, m_indices=None):
    """Check x, weight and the group sizes; see :func:`check_m_indices` for the length of ``m_indices``.

    Returns
    -------
    str
        The row layout: "lengths", "offsets" or "masked"; see ``GemmConfig``.
    """
    for name, tensor, dims in (("x", x, "2 or 3"), ("weight", weight, "3")):
        if tensor.dtype != dtype:
            raise TypeError(f"{name} is {tensor.dtype}; it must be {dtype}")
        if str(tensor.dim()) not in dims:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must have {dims} dimensions")
    check_device(x.device, "x")
    check_gpu(x.device)
    groups, n, k = weight.shape
    if not 1 <= groups <= MAX_GROUPS:
        raise ValueError(f"weight has {groups} groups; 1 to {MAX_GROUPS} are allowed")
    if x.shape[-1] != k:
        raise ValueError(f"x has {x.shape[-1]} columns; it must have weight's k, {k}")
    for name, size in (("n", n), ("k", k)):
        if size % 16 or not size:
            raise ValueError(f"weight's {name} is {size}; it must be a multiple of 16")
    masked = x.dim() == 3
    if masked:
        check_tensor("x", x, shape=(groups, "capacity", k), contiguous=True)
    if m_indices is not None:
        if seqlens is not None or cu_seqlens is not None or offs is not None or masked:
            raise ValueError(
                "m_indices is given: seqlens, cu_seqlens and offs must be None, and x must have 2 dimensions"
            )
        row_layout, sizes = "lengths", []  # which a kernel computes from m_indices
    elif offs is not None:
        if seqlens is not None or cu_seqlens is not None or masked:
            raise ValueError("offs is given: seqlens and cu_seqlens must be None, and x must have 2 dimensions")
        row_layout, sizes = "offsets", [("offs", offs, groups)]
    elif masked:
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens is given: x must have 2 dimensions; for a masked x it must be None")
        row_layout, sizes = "masked", [("seqlens", seqlens, groups)]
    else:
        row_layout, sizes = "lengths", [("seqlens", seqlens, groups), ("cu_seqlens", cu_seqlens, groups + 1)]
    for name, tensor, size in sizes:
        _check_array(name, tensor, (size,), torch.int32, x.device)
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device}; it must be where x is, on {x.device}")
    return row_layout


def check_gpu(device):
    """Refuse GPUs that have neither ``cp.async`` nor ``mma.sync`` of bfloat16."""
    if is_fake(device):
        return
    gpu = devices.gpu_of(device)
    if gpu.capability < (8, 0):
        raise UnsupportedDeviceError(
            "{} has compute capability {}.{}; the grouped GEMM needs 8.0 or newer (cp.async, mma.sync of bfloat16): on "
            "this GPU, multiply the rows of each group by torch.mm in float16".format(gpu.name, *gpu.capability)
        )


def check_scales(scaling, x, weight, x_scale, weight_scale):
    """Check the scales of x and of the weight (or of the product)."""
    groups, n, k = weight.shape
    if scaling == "tensor":
        _check_array("y_scale", weight_scale, (groups,), torch.float32, x.device)
    elif scaling == "block":
        k_blocks = -(-k // 128)
        _check_array("x_scale", x_scale, (*x.shape[:-1], k_blocks), torch.float32, x.device, contiguous=False)
        _check_array("w_scale", weight_scale, (groups, -(-n // 128), k_blocks), torch.float32, x.device)


def describe_outputs(shape, n, silu_and_mul):
    """Return name, shape and dtype of each output; ``shape`` is that of the rows."""
    if not silu_and_mul:
        return [("y", (*shape, n), torch.bfloat16)]
    if n % 256:
        raise ValueError(f"weight's n is {n}; with gate and up it must be a multiple of 256")
    return [("y", (*shape, n // 2), torch.float8_e4m3fn), ("scale", (*shape, n // 256), torch.float32)]


def check_indices(indices, x):
    """Check ``gather_indices``."""
    _check_array("gather_indices", indices, (indices.numel(),), torch.int32, x.device)
    if x.dim() == 3:
        raise ValueError("gather_indices is given: x must be [tokens, k], not masked")


def check_m_indices(m_indices, rows, device):
    """Check ``m_indices``, which name the group of each of ``rows`` rows."""
    _check_array("m_indices", m_indices, (rows,), torch.int32, device)


def scale_strides(x_scale):
    """Return the strides of ``x_scale``: rows, blocks of k, and groups beyond the rows of one (0 without groups)."""
    *group, row, k_block = x_scale.stride()
    if max(row, k_block) >= 1 << 31:
        raise ValueError(f"x_scale has strides {x_scale.stride()}; those of rows and blocks must be below 2^31")
    return row, k_block, group[0] - x_scale.shape[1] * row if group else 0


def _check_array(name, tensor, shape, dtype, device, contiguous=True):
    if tensor is None:
        raise TypeError(f"{name} is None; it must be a tensor {shape} of {dtype}")
    check_tensor(name, tensor, dtype=dtype, shape=shape, contiguous=contiguous, device=(device, "x"))
