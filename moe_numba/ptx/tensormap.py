"""Tensor maps modified on the device: changed in shared memory, published to global memory, and acquired there.

1. A warp copies the 128 bytes of a map that the host encoded (``moe_numba.runtime.tensor_map``) to shared memory.
2. One thread replaces fields of the copy; then ``cuda.syncwarp()``.
3. All lanes of the warp call ``tensormap_cp_fenceproxy``, which writes it to global memory.
4. Each thread that uses the new map synchronizes with step 3, then calls ``fence_proxy_tensormap_acquire_gpu``.

Maps are aligned to 128 bytes in shared and in global memory. A map that the host copied to global memory is acquired
with ``fence_proxy_tensormap_acquire_sys``: the TMA unit may still cache an older map at the same address.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import POINTER, SHARED, factory, instruction


def tensormap_replace_global_address(array, offset, pointer, index):
    """``tensormap.replace.tile.global_address``: set the tensor's start to element ``index`` of ``pointer``.

    The map is at element ``offset`` of the shared array ``array``. One thread executes it.
    """
    simulator.tensor_map.replace(array, offset, "address", pointer.offset(int(index)).address)


tensormap_replace_global_address = instruction(
    "tensormap.replace.tile.global_address.shared::cta.b1024.b64 [$0], $1;",
    "void",
    SHARED,
    POINTER,
    simulate=tensormap_replace_global_address,
)


@factory
def make_tensormap_replace_global_dim(dimension):
    """Make ``replace(array, offset, extent)``, ``tensormap.replace.tile.global_dim``; dimension 0 is the innermost."""

    def tensormap_replace_global_dim(array, offset, extent):
        simulator.tensor_map.replace(array, offset, "dims", int(extent), dimension)

    return instruction(
        f"tensormap.replace.tile.global_dim.shared::cta.b1024.b32 [$0], {dimension}, $1;",
        "void",
        SHARED,
        "u32",
        simulate=tensormap_replace_global_dim,
    )


@factory
def make_tensormap_replace_global_stride(dimension):
    """Make ``replace(array, offset, stride_bytes)``, ``tensormap.replace.tile.global_stride``.

    Stride 0 is that of dimension 1: dimension 0 is contiguous.
    """

    def tensormap_replace_global_stride(array, offset, stride_bytes):
        simulator.tensor_map.replace(array, offset, "strides", int(stride_bytes), dimension)

    return instruction(
        f"tensormap.replace.tile.global_stride.shared::cta.b1024.b64 [$0], {dimension}, $1;",
        "void",
        SHARED,
        "u64",
        simulate=tensormap_replace_global_stride,
    )


def tensormap_cp_fenceproxy(pointer, index, array, offset):
    """``tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu``: publish a map to global memory.

    All lanes of the warp must execute it with the same arguments.
    """
    simulator.tensor_map.publish(pointer, index, array, offset)


def fence_proxy_tensormap_acquire_gpu(pointer, index):
    """``fence.proxy.tensormap::generic.acquire.gpu``: acquire a map that this GPU published."""
    simulator.tensor_map.acquire(pointer, index)


def fence_proxy_tensormap_acquire_sys(pointer, index):
    """``fence.proxy.tensormap::generic.acquire.sys``: acquire a map that the host or another GPU wrote."""
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
