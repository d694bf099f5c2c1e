"""Checks of the arguments of the grouped GEMM with MXFP4 weights."""

import torch

from moe_numba.grouped_gemm.call.checks import check_arguments, describe_outputs
from moe_numba.grouped_gemm.w4.packing import MX_BLOCK, TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import UnsupportedDeviceError, check_tensor, is_fake


def check_w4_arguments(tensors, options, n, has_out):
    """Check the arguments of a call except outputs.

    Returns
    -------
    row_layout : str
    wanted : list of (name, shape, dtype, because)
        The outputs.
    """
    x, weight = tensors.x, tensors.weight
    check_tensor("x", x, dtype=torch.bfloat16)
    shape = "groups", "n / 64", "k / 64", TILE_BYTES
    check_tensor("weight", weight, dtype=torch.uint8, shape=shape, contiguous=True)
    n_tiles, k_tiles = weight.shape[1:3]
    k = x.shape[-1] if x.dim() else 0
    if k % MX_BLOCK or -(-k // TILE) != k_tiles:
        raise ValueError(
            f"x has {k} columns; weight is packed for {TILE * k_tiles - MX_BLOCK} or {TILE * k_tiles} of them"
        )
    n = TILE * n_tiles if n is None else n
    if n % MX_BLOCK or -(-n // TILE) != n_tiles:
        raise ValueError(f"n is {n}; weight is packed for {TILE * n_tiles - MX_BLOCK} or {TILE * n_tiles} rows")
    # One row of weight, expanded to the shape before packing, has what the other checks ask for.
    unpacked = weight.new_empty(k, dtype=x.dtype).expand(len(weight), n, k)
    tensors = tensors._replace(weight=unpacked)
    row_layout = check_arguments("mxfp4", tensors, options, has_out)
    if not is_fake(x.device) and not (gpu := devices.gpu_of(x.device)).has_wgmma:
        raise UnsupportedDeviceError(
            "{} has compute capability {}.{}; grouped GEMMs with 4-bit weights need 9.0 (H100, H200: wgmma): on this "
            "GPU, dequantise the weights and call group_gemm_bf16".format(gpu.name, *gpu.capability)
        )
    return row_layout, describe_outputs(tensors, n, "mxfp4", options)
