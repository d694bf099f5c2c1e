"""Checks of the arguments of the grouped GEMM with MXFP4 weights."""

import torch

from moe_numba.grouped_gemm.call.checks import check_arguments, describe_outputs
from moe_numba.grouped_gemm.w4.packing import GATE_UP_TILE, MX_BLOCK, PLAIN_TILE
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.runtime import device as devices
from moe_numba.runtime.validate import UnsupportedDeviceError, check_tensor, is_fake


def check_packed(name, weight, sizes, gate_up, because=(), device=None):
    """Check a packed weight; its last dimensions say whether it was packed with ``gate_up``, as it must be or not.

    ``sizes`` are its other dimensions; ``because`` and ``device`` are as for `check_tensor`.
    """
    check_tensor(name, weight, dtype=torch.uint8)
    tile, other = (GATE_UP_TILE, PLAIN_TILE) if gate_up else (PLAIN_TILE, GATE_UP_TILE)
    if weight.shape[3:] == other:
        is_, must_be = "without gate_up", "with gate_up='interleaved' or 'stacked', the order of its rows"
        if not gate_up:
            is_, must_be = "with gate_up, for a GEMM with the activation", "without gate_up"
        raise ValueError(
            f"{name} has shape {tuple(weight.shape)}: pack_mxfp4 packed it {is_}; it must be packed {must_be}: "
            f"[..., {', '.join(map(str, tile))}]"
        )
    check_tensor(name, weight, shape=(*sizes, *tile), because=because, contiguous=True, device=device)


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
    check_packed("weight", weight, ("groups", "n / 64", "k / 64"), options.silu_and_mul)
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
