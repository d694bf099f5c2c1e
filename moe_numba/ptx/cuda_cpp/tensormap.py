"""Tensor maps modified on the device, in CUDA C++; see ``moe_numba.ptx.tensormap`` for the sequence of steps.

Shared arrays, maps in global memory and tensors are passed as pointers to bytes (``ffi.from_buffer(array)``); offsets
and indices count bytes.
"""

from functools import cache

from moe_numba import simulator
from moe_numba.ptx import tensormap as intrinsics
from moe_numba.ptx.cuda_cpp import declared


def tensormap_replace_global_address(array, offset, pointer, index):
    """``tensormap.replace.tile.global_address``: set the tensor's start to byte ``index`` of ``pointer``."""
    simulator.tensor_map.replace(array, offset, "address", pointer.offset(int(index)).address)


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
    """Make ``replace(array, offset, extent)``, ``tensormap.replace.tile.global_dim``; dimension 0 is the innermost."""
    simulate = intrinsics.make_tensormap_replace_global_dim(dimension)
    name = f"cu_tensormap_replace_global_dim_{dimension}"
    return declared(name, "tensormap", "uint8*", "int32", "uint32", simulate=simulate)


@cache
def make_tensormap_replace_global_stride(dimension):
    """Make ``replace(array, offset, stride_bytes)``, ``tensormap.replace.tile.global_stride``; 0 is of dimension 1."""
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
