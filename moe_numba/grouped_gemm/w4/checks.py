"""Checks of the arguments of the grouped GEMM with 4-bit weights."""

import torch

from moe_numba.grouped_gemm.call.checks import check_arguments, describe_outputs, rows_of
from moe_numba.grouped_gemm.packing_int4 import GROUP_SIZES, SCALE_DTYPES
from moe_numba.grouped_gemm.w4.packing import E4M3_SHAPE, SCALE_BLOCK, TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES, TILE
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import UnsupportedDeviceError, check_tensor, is_fake

E4M3 = torch.float8_e4m3fn


def check_w4_arguments(weight_format, tensors, options, n, has_out):
    """Check the arguments of a call except outputs.

    Returns
    -------
    row_layout : str
    wanted : list of (name, shape, dtype)
        The outputs.
    formats : dict
        Fields of the configuration: dtypes and scales.
    """
    x, weight = tensors.x, tensors.weight
    formats = _check_x(x, tensors.x_scale, weight_format)
    n_tiles, k_tiles = _check_weight(weight, x, weight_format)
    k = x.shape[-1] if x.dim() else 0
    if k % SCALE_BLOCK or -(-k // TILE) != k_tiles:
        raise ValueError(
            f"x has {k} columns; weight is packed for {TILE * k_tiles - SCALE_BLOCK} or {TILE * k_tiles} of them"
        )
    n = TILE * n_tiles if n is None else n
    if n % SCALE_BLOCK or -(-n // TILE) != n_tiles:
        raise ValueError(f"n is {n}; weight is packed for {TILE * n_tiles - SCALE_BLOCK} or {TILE * n_tiles} rows")
    if weight_format == "int4":
        formats |= _check_w_scale(tensors.w_scale, weight)
    # One row of weight, expanded to the shape before packing, has what the other checks ask for.
    unpacked = weight.new_empty(k, dtype=x.dtype).expand(len(weight), n, k)
    tensors = tensors._replace(weight=unpacked)
    row_layout = check_arguments("none", tensors, options, has_out, x.dtype)
    if not is_fake(x.device) and not (gpu := devices.gpu_of(x.device)).has_wgmma:
        raise UnsupportedDeviceError(
            "{} has compute capability {}.{}; grouped GEMMs with 4-bit weights need 9.0 (H100, H200: wgmma): on this "
            "GPU, dequantise the weights and call group_gemm_bf16".format(gpu.name, *gpu.capability)
        )
    return row_layout, describe_outputs(rows_of(tensors), n, "none", options, tensors.out), formats


def _check_x(x, x_scale, weight_format):
    """Check the dtype of x and its scales; return the fields of the configuration that they determine."""
    dtypes = (torch.bfloat16, E4M3) if weight_format == "mxfp4" else (torch.bfloat16,)
    check_tensor("x", x, dtype=dtypes)
    if x.dtype == torch.bfloat16:
        if x_scale is not None:
            raise ValueError("x_scale is given, but x is torch.bfloat16; it must be None")
        return dict(weight=weight_format)
    *rows, k = x.shape or (0,)
    k_blocks = -(-k // 128)
    if x_scale is None:
        raise TypeError(f"x_scale is None; for an x of {E4M3} it must be a tensor of torch.float32")
    check_tensor("x_scale", x_scale, dtype=torch.float32, device=(x.device, "x"))
    shape, scaling = list(x_scale.shape), "block"
    if x_scale.numel() == 1:
        scaling = "tensor"
    elif shape == rows or (shape == [*rows, 1] and (k_blocks > 1 or x_scale.is_contiguous())):
        scaling = "row"
    elif shape != [*rows, k_blocks]:
        raise ValueError(f"x_scale has shape {tuple(shape)}; it must be [1], {rows} or {[*rows, k_blocks]}")
    if scaling != "block":
        check_tensor("x_scale", x_scale, contiguous=True)
    return dict(weight=weight_format, dtype="e4m3", x_scaling=scaling)


def _check_weight(weight, x, weight_format):
    """Check the shape of a packed weight; return its number of tiles along n and k."""
    bf16, e4m3, int4 = (TILE_BYTES,), E4M3_SHAPE, (CODE_BYTES,)
    tile = int4 if weight_format == "int4" else bf16 if x.dtype == torch.bfloat16 else e4m3
    check_tensor("weight", weight, dtype=torch.uint8)
    found = tuple(weight.shape[3:])
    if found != tile and {found, tile} == {bf16, e4m3}:
        packed_for = torch.bfloat16 if found == bf16 else E4M3
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: it is packed for {packed_for}, but x is {x.dtype}: use "
            f"pack_mxfp4(..., activation_dtype={x.dtype})"
        )
    check_tensor("weight", weight, shape=("groups", "n / 64", "k / 64", *tile), contiguous=True)
    return weight.shape[1:3]


def _check_w_scale(w_scale, weight):
    """Check the packed scales of int4; return the fields of the configuration that they determine."""
    if w_scale is None:
        raise TypeError("w_scale is None; it must be the tensor of scales that pack_int4 returns")
    groups, n_tiles, k_tiles = weight.shape[:3]
    shape = (groups, n_tiles, "k / group size", TILE)
    dtypes, device = tuple(SCALE_DTYPES), (weight.device, "weight")
    check_tensor("w_scale", w_scale, dtype=dtypes, shape=shape, contiguous=True, device=device)
    for size in GROUP_SIZES:
        if size * w_scale.shape[2] == TILE * k_tiles:
            return dict(group_size=size, scale_dtype=SCALE_DTYPES[w_scale.dtype])
    raise ValueError(
        f"w_scale has {w_scale.shape[2]} groups along k; weight's {k_tiles} tiles of {TILE} columns must have groups "
        f"of {' or '.join(map(str, GROUP_SIZES))} columns"
    )
