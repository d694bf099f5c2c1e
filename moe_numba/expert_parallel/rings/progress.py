"""Progress of rings: copy warps post it in shared memory, and the CTA's publisher warp stores it to the peers.

A release at system scope stalls a thread for more than a microsecond, because it waits until all writes of the SM are
visible to every GPU. If copy warps did that, they would lose more time than the copies take. Copy warps therefore post
their progress in shared memory, and one publisher warp per CTA issues a single system-scope fence on their behalf.

A progress value has 8 bytes: a channel and the number of rows of one ring. It is stored with one instruction, so that
the channel and the count always match. Before a warp starts another channel, it waits until its progress on the
previous one has been published.
"""

from functools import cache

from numba import cuda, int32, uint32, uint64

from moe_numba.ptx.atomics import (
    ld_acquire_cta_shared_u64,
    poll_acquire_cta_shared_s32,
    poll_acquire_cta_shared_u64,
    st_relaxed_sys_s32,
    st_release_cta_shared_u64,
)
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.warp import FULL_MASK


@cuda.jit(device=True)
def clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks):
    """Clear a CTA's progress, published and done slots, and synchronise the CTA."""
    thread = int32(cuda.threadIdx.x)
    for i in range(thread, warps * ranks, int32(cuda.blockDim.x)):
        smem_u64[int32(progress_offset + i)] = smem_u64[int32(published_offset + i)] = uint64(0)
    if thread <= warps:
        smem_i32[int32(done_offset + thread)] = int32(0)
    cuda.syncthreads()


@cuda.jit(device=True)
def post_progress(smem_u64, slot, channel, count):
    """Post the number of rows written to, or consumed from, a ring of a channel."""
    st_release_cta_shared_u64(smem_u64, slot, uint64(uint64(channel + 1) << uint64(32) | uint64(uint32(count))))


@cuda.jit(device=True)
def wait_published(smem_u64, slot, published_slot):
    """Wait until the publisher warp has published the progress in ``slot``."""
    while poll_acquire_cta_shared_u64(smem_u64, published_slot) != smem_u64[slot]:
        pass


@cache
def make_publish(shape):
    """Make ``publish``: store new progress to the peers' flags until all copy warps of the CTA are done."""
    ranks, items, warps = shape.num_ranks, shape.warps * shape.num_ranks, shape.warps
    progress_offset, published_offset, done_offset = shape.progress_offset, shape.published_offset, shape.done_offset
    items_per_lane = -(-items // 32)

    @cuda.jit(device=True)
    def publish(smem_i32, smem_u64, lane, rank, flags_offset, local, peers):
        progress = cuda.local.array(items_per_lane, uint64)
        running = int32(1)
        while running != 0:
            done = lane >= warps or poll_acquire_cta_shared_s32(smem_i32, done_offset + lane) != 0
            running = int32(0 if cuda.all_sync(FULL_MASK, done) else 1)
            changed = False
            for j in range(items_per_lane):
                item = int32(32 * j + lane)
                if item < items:
                    progress[j] = ld_acquire_cta_shared_u64(smem_u64, progress_offset + item)
                    changed = changed or progress[j] != smem_u64[int32(published_offset + item)]
            if cuda.any_sync(FULL_MASK, changed):
                fence_acq_rel_sys()
                for j in range(items_per_lane):
                    item = int32(32 * j + lane)
                    if item < items and progress[j] != smem_u64[int32(published_offset + item)]:
                        channel, peer = int32(int32(progress[j] >> uint64(32)) - 1), int32(item % ranks)
                        remote = pointer_from_address(peers[peer], local)
                        st_relaxed_sys_s32(remote, flags_offset + channel * ranks + rank, int32(uint32(progress[j])))
                        st_release_cta_shared_u64(smem_u64, published_offset + item, progress[j])

    return publish
