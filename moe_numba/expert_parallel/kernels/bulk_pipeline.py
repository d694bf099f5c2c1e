"""Per-warp staging buffers in shared memory: initialisation, TMA bulk loads of rows, and waits for bulk copies.

Each warp owns one staging buffer for a row and one mbarrier, on which bulk loads into that buffer complete.
"""

from functools import cache

from numba import cuda, int32, uint32, uint64

from moe_numba.ptx.cp_async import bulk_load, make_bulk_wait_group, make_bulk_wait_group_read
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity

bulk_wait_all = make_bulk_wait_group(0)  # until this thread's bulk stores are complete
bulk_wait_all_but_one = make_bulk_wait_group(1)  # until all but the last one are complete
bulk_wait_read = make_bulk_wait_group_read(0)  # until this thread's bulk stores have read shared memory


@cuda.jit(device=True)
def init_smem(smem_i32, smem_u64, barrier_offset, progress_offset, published_offset, done_offset, warps, ranks):
    """Initialise a CTA's mbarriers, and clear its progress, published and done slots."""
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for w in range(warps):
            mbarrier_init(smem_u64, barrier_offset + w, 1)
        fence_mbarrier_init()
    for i in range(thread, warps * ranks, int32(cuda.blockDim.x)):
        smem_u64[int32(progress_offset + i)] = smem_u64[int32(published_offset + i)] = uint64(0)
    if thread <= warps:
        smem_i32[int32(done_offset + thread)] = int32(0)
    cuda.syncthreads()


@cache
def make_row_loader(barrier_offset):
    """Make ``load_row``, which starts a bulk load into a warp's staging buffer, and ``wait_row``, which awaits it."""

    @cuda.jit(device=True)
    def load_row(smem_i32, smem_u64, warp, lane, staging, source, offset, size_bytes):
        bulk_wait_read()  # the lane that stored the previous row has read it
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
