"""Tensor maps made on the device: a copy in shared memory is changed, published to global memory, and acquired there.

1. A warp copies the 128 bytes of a map, which the host made (``moe_numba.runtime.tensor_map``), to shared memory.
2. One thread replaces fields of the copy; then ``cuda.syncwarp()``.
3. All lanes of the warp call ``tensormap_cp_fenceproxy``, which writes it to global memory.
4. Whoever uses the new map first calls ``fence_proxy_tensormap_acquire_gpu``, after it has learnt that 3. is done.

Maps are aligned to 128 bytes in shared memory, and in global memory. A map that the host copied there is acquired with
``fence_proxy_tensormap_acquire_sys``: its address may be that of an older map, which the copy engine still remembers.
"""

from functools import cache

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, instruction


def tensormap_replace_global_address(array, at, pointer, index):
    """``tensormap.replace.tile.global_address``: the tensor starts at element ``index`` of ``pointer``."""
    simulator.tensor_map.replace(array, at, "address", pointer.offset(int(index)).address)


tensormap_replace_global_address = instruction(
    "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [$0], $1;",
    "void",
    SHARED,
    POINTER,
    simulate=tensormap_replace_global_address,
)


@cache
def make_tensormap_replace_global_dim(dimension):
    """``replace(array, at, extent)``, ``tensormap.replace.tile.global_dim``: a dimension's length; 0 is innermost."""

    def tensormap_replace_global_dim(array, at, extent):
        simulator.tensor_map.replace(array, at, "dims", int(extent), dimension)

    return instruction(
        f"tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [$0], {dimension}, $1;",
        "void",
        SHARED,
        "u32",
        simulate=tensormap_replace_global_dim,
    )


@cache
def make_tensormap_replace_global_stride(dimension):
    """``replace(array, at, stride_bytes)``, ``tensormap.replace.tile.global_stride``: bytes between neighbours.

    Stride 0 is that of dimension 1: neighbours in dimension 0 lie side by side.
    """

    def tensormap_replace_global_stride(array, at, stride_bytes):
        simulator.tensor_map.replace(array, at, "strides", int(stride_bytes), dimension)

    return instruction(
        f"tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [$0], {dimension}, $1;",
        "void",
        SHARED,
        "u64",
        simulate=tensormap_replace_global_stride,
    )


def tensormap_cp_fenceproxy(pointer, index, array, at):
    """``tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu``: publish a map to global memory.

    All lanes of a warp call it, with the same arguments.
    """
    simulator.tensor_map.publish(pointer, index, array, at)


def fence_proxy_tensormap_acquire_gpu(pointer, index):
    """``fence.proxy.tensormap::generic.acquire.gpu``: this thread's copies use the map as this GPU published it."""
    simulator.tensor_map.acquire(pointer, index)


def fence_proxy_tensormap_acquire_sys(pointer, index):
    """``fence.proxy.tensormap::generic.acquire.sys``: the same for a map that the host, or another GPU, wrote."""
    simulator.tensor_map.acquire(pointer, index)


tensormap_cp_fenceproxy = instruction(
    "tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned [$0], [$1], 128;",
    "void",
    POINTER,
    SHARED,
    simulate=tensormap_cp_fenceproxy,
)
fence_proxy_tensormap_acquire_gpu = instruction(
    "fence.proxy.tensormap::generic.acquire.gpu [$0], 128;", "void", POINTER, simulate=fence_proxy_tensormap_acquire_gpu
)
fence_proxy_tensormap_acquire_sys = instruction(
    "fence.proxy.tensormap::generic.acquire.sys [$0], 128;", "void", POINTER, simulate=fence_proxy_tensormap_acquire_sys
)
