"""Copies of rows through registers, for GPUs without TMA (older than compute capability 9.0).

The interface is that of `bulk_pipeline.py`. All lanes of a warp load 16-byte vectors into the warp's staging buffer, and
store them from there. Many loads of a lane are in flight, which hides the latency of memory. Stores need no wait: when
`store_row` and `store_to_peers` return, all lanes have issued them, and the publisher's fence orders them before a flag.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.expert_parallel.kernels.progress import clear_progress
from moe_numba.ptx.memory import (
    ld_global_s32x4,
    ld_shared_s32x4,
    pointer_from_address,
    st_global_s32x4,
    st_shared_s32x4,
)
from moe_numba.ptx.warp import FULL_MASK

_LOADS_IN_FLIGHT = 16  # per lane


@cuda.jit(device=True)
def _nothing():
    """Return at once: loads and stores of a thread are in the generic proxy, in program order."""


wait_all = wait_all_but_one = wait_read = fence_acquired = fence_staging = _nothing


@cuda.jit(device=True)
def init_smem(smem_i32, smem_u64, barrier_offset, progress_offset, published_offset, done_offset, warps, ranks):
    """Clear a CTA's progress, published and done slots."""
    clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks)


@cuda.jit(device=True)
def _load_row(smem_i32, smem_u64, warp, lane, staging, source, offset, size_bytes):
    words = cuda.local.array(4 * _LOADS_IN_FLIGHT, int32)
    vectors = int32(size_bytes // 16)
    cuda.syncwarp()  # all lanes have read the previous row, and one of them has acquired this one
    for base in range(0, vectors, 32 * _LOADS_IN_FLIGHT):
        first = int32(base + lane)
        for u in range(_LOADS_IN_FLIGHT):
            if first + 32 * u < vectors:
                # Not ld.global.nc: peers write rings during the kernel.
                a, b, c, d = ld_global_s32x4(source, offset + 4 * (first + 32 * u))
                words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3] = a, b, c, d
        for u in range(_LOADS_IN_FLIGHT):
            if first + 32 * u < vectors:
                a, b, c, d = words[4 * u], words[4 * u + 1], words[4 * u + 2], words[4 * u + 3]
                st_shared_s32x4(smem_i32, int32(staging + 4 * (first + 32 * u)), a, b, c, d)


@cuda.jit(device=True)
def _wait_row(smem_u64, warp, phase):
    cuda.syncwarp()
    return phase


@cache
def make_row_loader(barrier_offset):
    """Return ``load_row``, which loads a row into a warp's staging buffer, and ``wait_row``, which synchronises it."""
    return _load_row, _wait_row


@cuda.jit(device=True)
def _copy(lane, pointer, offset, smem_i32, staging, size_bytes):
    for i in range(lane, int32(size_bytes // 16), 32):
        a, b, c, d = ld_shared_s32x4(smem_i32, int32(staging + 4 * i))
        st_global_s32x4(pointer, offset + 4 * i, a, b, c, d)


@cuda.jit(device=True)
def store_row(lane, store_lane, pointer, offset, smem_i32, staging, size_bytes):
    """Store the staging buffer to an offset, the same for all lanes, with all of them."""
    _copy(lane, pointer, offset, smem_i32, staging, size_bytes)
    cuda.syncwarp()


@cuda.jit(device=True)
def store_to_peers(selected, address, local, offset, smem_i32, staging, size_bytes):
    """Store the staging buffer for each lane with ``selected`` to its own address and offset, with all lanes."""
    lane, remaining = int32(cuda.threadIdx.x & 31), uint32(cuda.ballot_sync(FULL_MASK, selected))
    while remaining != uint32(0):
        peer = int32(cuda.ffs(remaining) - 1)
        remaining = uint32(remaining & (remaining - uint32(1)))
        pointer = pointer_from_address(cuda.shfl_sync(FULL_MASK, int64(address), peer), local)
        to_offset = cuda.shfl_sync(FULL_MASK, int64(offset), peer)
        _copy(lane, pointer, to_offset, smem_i32, staging, size_bytes)
    cuda.syncwarp()  # the lane that publishes the row does so after the stores of all lanes
