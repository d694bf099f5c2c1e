"""Copies of rows through registers, for GPUs without TMA; the interface is that of `bulk_pipeline.py`.

All lanes of a warp load 16-byte vectors into the warp's staging buffer, and store them from there. Many loads of a lane
are in flight, which hides the latency of memory. No wait follows a store: when `store_row` or `store_slot` returns, all
lanes have issued theirs, and the publisher's fence orders them before the tail.
"""

from numba import cuda, int32, uint32

from moe_numba.ptx.memory import (
    ld_global_s32x4,
    ld_shared_s32x4,
    pointer_from_address,
    st_global_s32x4,
    st_shared_s32x4,
)
from moe_numba.ptx.warp import FULL_MASK, uniform

_LOADS_IN_FLIGHT, _WORDS = 16, 64  # of a lane: loads of 16 bytes, and the words they return


@cuda.jit(device=True)
def _nothing():
    """Return at once: loads and stores of a thread are in the generic proxy, in program order."""


wait_all = wait_all_but_one = wait_read = fence_acquired = fence_staging = _nothing


@cuda.jit(device=True)
def init_barriers(smem_u64, barrier_offset, warps):
    """Do nothing: no copy completes on an mbarrier."""


@cuda.jit(device=True)
def _num_vectors(size_bytes):
    """Return the number of 16-byte vectors, not as a constant, for which the compiler would unroll loops and spill."""
    return uniform(int32(size_bytes // 16))


@cuda.jit(device=True)
def load_row(smem_i32, smem_u64, barrier, lane, staging, source, offset, size_bytes):
    """Load a row into the warp's staging buffer."""
    words = cuda.local.array(_WORDS, int32)
    vectors = _num_vectors(size_bytes)
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
def wait_row(smem_u64, barrier, phase):
    """Wait until all lanes have loaded their part of the row; return the phase, which is not used."""
    cuda.syncwarp()
    return phase


@cuda.jit(device=True)
def _copy(lane, pointer, offset, smem_i32, staging, size_bytes):
    for i in range(lane, _num_vectors(size_bytes), 32):
        a, b, c, d = ld_shared_s32x4(smem_i32, int32(staging + 4 * i))
        st_global_s32x4(pointer, offset + 4 * i, a, b, c, d)


@cuda.jit(device=True)
def store_row(lane, store_lane, pointer, offset, smem_i32, staging, size_bytes):
    """Store the staging buffer to an offset, the same for all lanes, with all of them."""
    _copy(lane, pointer, offset, smem_i32, staging, size_bytes)
    cuda.syncwarp()


@cuda.jit(device=True)
def store_slot(selected, capacity, slots, remote, ctx, offset, smem_i32, staging, size_bytes):
    """Store the staging buffer, with all lanes, to the peer of each lane with ``selected``, at that lane's offset."""
    lane, remaining = int32(cuda.threadIdx.x & 31), uint32(cuda.ballot_sync(FULL_MASK, selected))
    while remaining != uint32(0):
        peer = int32(cuda.ffs(remaining) - 1)
        remaining = uint32(remaining & (remaining - uint32(1)))
        to_peer = pointer_from_address(ctx.peers[peer], ctx.local)
        _copy(lane, to_peer, cuda.shfl_sync(FULL_MASK, offset, peer), smem_i32, staging, size_bytes)
    cuda.syncwarp()  # the lane that posts the row does so after the stores of all lanes
    return uint32(slots) if selected else capacity
