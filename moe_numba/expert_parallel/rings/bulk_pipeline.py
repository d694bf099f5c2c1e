"""Copies of rows by TMA, for GPUs of compute capability 9.0 or newer; `register_pipeline.py` is for older ones.

Each warp owns one staging buffer for a row in shared memory, and one mbarrier, on which bulk loads into that buffer
complete. One thread issues a copy, which needs no registers, and the warp continues meanwhile.

Both modules define the same functions. Kernels use the module `RingShape.pipeline`.
"""

from numba import cuda, uint32

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
def init_barriers(smem_u64, barrier_offset, warps):
    """Initialise the mbarriers of a CTA's warps; the caller then synchronises the CTA."""
    if cuda.threadIdx.x == 0:
        for w in range(warps):
            mbarrier_init(smem_u64, barrier_offset + w, 1)
        fence_mbarrier_init()


@cuda.jit(device=True)
def load_row(smem_i32, smem_u64, barrier, lane, staging, source, offset, size_bytes):
    """Start to load a row into the warp's staging buffer."""
    wait_read()  # the lane that stored the previous row has read it
    cuda.syncwarp()
    if lane == 0:
        mbarrier_arrive_expect_tx(smem_u64, barrier, size_bytes)
        bulk_load(smem_i32, staging, source, offset, size_bytes, smem_u64, barrier)


@cuda.jit(device=True)
def wait_row(smem_u64, barrier, phase):
    """Wait until the row is in the staging buffer; return the phase of the next wait."""
    mbarrier_wait_parity(smem_u64, barrier, phase)
    cuda.syncwarp()
    return uint32(phase ^ uint32(1))


@cuda.jit(device=True)
def store_row(lane, store_lane, pointer, offset, smem_i32, staging, size_bytes):
    """Store the staging buffer to an offset, the same for all lanes; lane ``store_lane`` issues the copy."""
    if lane == store_lane:
        bulk_store(pointer, offset, smem_i32, staging, size_bytes)
        bulk_commit_group()


@cuda.jit(device=True)
def store_slot(selected, capacity, slots, remote, ctx, offset, smem_i32, staging, size_bytes):
    """Store the staging buffer to the peer of each lane with ``selected``.

    ``remote`` points to the buffer of the lane's peer, and the token slot begins at ``offset`` in it. Return the lane's
    ``capacity`` of its ring: all slots, after the first row.
    """
    if selected:
        bulk_store(remote, offset, smem_i32, staging, size_bytes)
        bulk_commit_group()
        capacity = uint32(slots)
    return capacity
