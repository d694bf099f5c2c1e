"""Tensor maps made on the device, through the linked door: see ``moe_numba.ptx.tensormap`` for what each step is for.

An array in shared memory comes as ``ffi.from_buffer(array)``, a pointer to bytes, and ``at`` counts bytes. So do a map
in global memory and a tensor's start, and their indices.
"""

from functools import cache

from moe_numba import simulator
from moe_numba.ptx import tensormap as intrinsics
from moe_numba.ptx.cuda_cpp import declared


def tensormap_replace_global_address(array, at, pointer, index):
    """``tensormap.replace.tile.global_address``: the tensor starts at byte ``index`` of ``pointer``."""
    simulator.tensor_map.replace(array, at, "address", pointer.offset(int(index)).address)


tensormap_replace_global_address = declared(
    "cu_tensormap_replace_global_address",
    "tensormap",
    "uint8*",
    "int32",
    "uint8*",
    "int64",
    simulate=tensormap_replace_global_address,
)


@cache
def make_tensormap_replace_global_dim(dimension):
    """``replace(array, at, extent)``, ``tensormap.replace.tile.global_dim``: a dimension's length; 0 is innermost."""
    simulate = intrinsics.make_tensormap_replace_global_dim(dimension)
    name = f"cu_tensormap_replace_global_dim_{dimension}"
    return declared(name, "tensormap", "uint8*", "int32", "uint32", simulate=simulate)


@cache
def make_tensormap_replace_global_stride(dimension):
    """``replace(array, at, stride_bytes)``, ``tensormap.replace.tile.global_stride``: bytes between neighbours.

    Stride 0 is that of dimension 1: neighbours in dimension 0 lie side by side.
    """
    simulate = intrinsics.make_tensormap_replace_global_stride(dimension)
    name = f"cu_tensormap_replace_global_stride_{dimension}"
    return declared(name, "tensormap", "uint8*", "int32", "uint64", simulate=simulate)


tensormap_cp_fenceproxy = declared(
    "cu_tensormap_cp_fenceproxy",
    "tensormap",
    "uint8*",
    "int64",
    "uint8*",
    "int32",
    simulate=intrinsics.tensormap_cp_fenceproxy,
)
fence_proxy_tensormap_acquire_gpu = declared(
    "cu_fence_proxy_tensormap_acquire_gpu",
    "tensormap",
    "uint8*",
    "int64",
    simulate=intrinsics.fence_proxy_tensormap_acquire_gpu,
)
