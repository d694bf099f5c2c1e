"""Copies of rows through registers, for GPUs without TMA; the interface is that of `bulk_pipeline.py`.

All lanes of a warp load 16-byte vectors into the warp's staging buffer, and store them from there. Many loads of a lane
are in flight, which hides the latency of memory. No wait follows a store: when `store_row` or `store_slot` returns, all
lanes have issued theirs, and the publisher's fence orders them before the tail.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.expert_parallel.rings.progress import clear_progress
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
def init_smem(smem_i32, smem_u64, barrier_offset, progress_offset, published_offset, done_offset, warps, ranks):
    """Clear a CTA's progress, published and done slots."""
    clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks)


@cuda.jit(device=True)
def _num_vectors(size_bytes):
    """Return the number of 16-byte vectors, not as a constant, for which the compiler would unroll loops and spill."""
    return uniform(int32(size_bytes // 16))


@cuda.jit(device=True)
def _load_row(smem_i32, smem_u64, warp, lane, staging, source, offset, size_bytes):
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
def _wait_row(smem_u64, warp, phase):
    cuda.syncwarp()
    return phase


@cache
def make_row_loader(barrier_offset):
    """Return ``load_row``, which loads a row into a warp's staging buffer, and ``wait_row``, which synchronises it."""
    return _load_row, _wait_row


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


@cache
def make_store_slot(shape):
    """Make ``store_slot``: store the staging buffer, for each lane with ``selected``, to a slot of the lane's ring.

    Parameters and result as in `bulk_pipeline.py`; all lanes store each row.
    """
    ranks, slots, slot_stride, slot_bytes = shape.num_ranks, shape.slots, shape.slot.stride, 4 * shape.slot.words

    @cuda.jit(device=True)
    def store_slot(selected, capacity, remote, ctx, rings, channel, position, smem_i32, staging):
        lane, remaining = int32(cuda.threadIdx.x & 31), uint32(cuda.ballot_sync(FULL_MASK, selected))
        slot, ring = int32(position % uint32(slots)), rings.offset + int64(channel * ranks + ctx.rank) * rings.stride
        while remaining != uint32(0):
            peer = int32(cuda.ffs(remaining) - 1)
            remaining = uint32(remaining & (remaining - uint32(1)))
            to_peer = pointer_from_address(ctx.peers[peer], ctx.local)
            slot_offset = int64(cuda.shfl_sync(FULL_MASK, slot, peer)) * slot_stride
            _copy(lane, to_peer, ring + slot_offset, smem_i32, staging, slot_bytes)
        cuda.syncwarp()  # the lane that posts the row does so after the stores of all lanes
        return uint32(slots) if selected else capacity

    return store_slot
