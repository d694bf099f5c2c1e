"""Copies of rows by TMA, for GPUs of compute capability 9.0 or newer; `register_pipeline.py` is for older ones.

Each warp owns one staging buffer for a row in shared memory, and one mbarrier, on which bulk loads into that buffer
complete. One thread issues a copy, which needs no registers, and the warp continues meanwhile.

Both modules define the same names. Kernels use the module `RingShape.pipeline`.
"""

from functools import cache

from numba import cuda, int64, uint32

from moe_numba.expert_parallel.rings.progress import clear_progress
from moe_numba.ptx.cp_async import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    make_bulk_wait_group,
    make_bulk_wait_group_read,
)
from moe_numba.ptx.fence import fence_proxy_async, fence_proxy_async_shared
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity

wait_all = make_bulk_wait_group(0)  # until this thread's stores of rows are complete
wait_all_but_one = make_bulk_wait_group(1)  # until all but the last one are complete
wait_read = make_bulk_wait_group_read(0)  # until this thread's stores of rows have read the staging buffer
fence_acquired = fence_proxy_async  # orders this thread's copies after its acquire
fence_staging = fence_proxy_async_shared  # makes what this thread wrote to the staging buffer visible to copies


@cuda.jit(device=True)
def init_smem(smem_i32, smem_u64, barrier_offset, progress_offset, published_offset, done_offset, warps, ranks):
    """Initialise a CTA's mbarriers, and clear its progress, published and done slots."""
    if cuda.threadIdx.x == 0:
        for w in range(warps):
            mbarrier_init(smem_u64, barrier_offset + w, 1)
        fence_mbarrier_init()
    clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks)


@cache
def make_row_loader(barrier_offset):
    """Make ``load_row``, which starts to load a row into a warp's staging buffer, and ``wait_row``, which awaits it."""

    @cuda.jit(device=True)
    def load_row(smem_i32, smem_u64, warp, lane, staging, source, offset, size_bytes):
        wait_read()  # the lane that stored the previous row has read it
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive_expect_tx(smem_u64, barrier_offset + warp, size_bytes)
            bulk_load(smem_i32, staging, source, offset, size_bytes, smem_u64, barrier_offset + warp)

    @cuda.jit(device=True)
    def wait_row(smem_u64, warp, phase):
        mbarrier_wait_parity(smem_u64, barrier_offset + warp, phase)
        cuda.syncwarp()
        return uint32(phase ^ uint32(1))

    return load_row, wait_row


@cuda.jit(device=True)
def store_row(lane, store_lane, pointer, offset, smem_i32, staging, size_bytes):
    """Store the staging buffer to an offset, the same for all lanes; lane ``store_lane`` issues the copy."""
    if lane == store_lane:
        bulk_store(pointer, offset, smem_i32, staging, size_bytes)
        bulk_commit_group()


@cache
def make_store_slot(shape):
    """Make ``store_slot``: store the staging buffer, for each lane with ``selected``, to a slot of the lane's ring.

    ``remote`` points to the buffer of the lane's peer. Returns the lane's ``capacity`` of its ring: all slots, after
    the first row.
    """
    ranks, slots, slot_stride, slot_bytes = shape.num_ranks, shape.slots, shape.slot.stride, 4 * shape.slot.words

    @cuda.jit(device=True)
    def store_slot(selected, capacity, remote, ctx, rings, channel, position, smem_i32, staging):
        if selected:
            slot_offset = int64(position % uint32(slots)) * slot_stride
            ring = rings.offset + int64(channel * ranks + ctx.rank) * rings.stride
            bulk_store(remote, ring + slot_offset, smem_i32, staging, slot_bytes)
            bulk_commit_group()
            capacity = uint32(slots)
        return capacity

    return store_slot
