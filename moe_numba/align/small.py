"""Alignment kernel for at most 32 slots: one CTA with one warp per slot; in each warp, one lane per slot.

One ballot and two warp reductions give a warp the position of its slot, so experts need no counters.
"""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.align.device_functions import make_bucket_of, make_expert_of
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK, redux_sync_add_s32

MAX_SLOTS = 32
DROP_BUCKET = 1 << 30  # bucket of slots that are ignored or out of range; greater than all others


@cache
def make_fill_outputs(aligned):
    """Make ``fill_outputs(...)``, which fills both outputs with padding while the loads of the ids are in flight.

    ``aligned``: ``sorted_token_ids`` is 16-byte aligned.
    """

    @cuda.jit(device=True)
    def fill_outputs(sorted_token_ids, expert_ids, numel, length, num_blocks):
        thread, num_threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        row = thread
        if aligned:
            row = int32(4 * thread)
            while row < length - 3:
                st_global_s32x4(sorted_token_ids, row, numel, numel, numel, numel)
                row = int32(row + 4 * num_threads)
            row = int32((length & ~3) + thread)
        while row < length:
            sorted_token_ids[row] = numel
            row = int32(row + num_threads)
        row = thread
        while row < num_blocks:
            expert_ids[row] = int32(-1)
            row = int32(row + num_threads)

    return fill_outputs


@cache
def make_align_small(ignore_invalid_experts, has_map):
    """Make ``align_small(...)``, which writes the slots and expert ids over the padding of ``fill_outputs``.

    ``blocks_of_slot`` are 32 int32 in shared memory. A barrier inside separates the two kinds of writes.
    """
    bucket_of = make_bucket_of(DROP_BUCKET + 1, ignore_invalid_experts, has_map)
    expert_of = make_expert_of(has_map)

    @cuda.jit(device=True)
    def align_small(
        topk_ids,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        numel,
        num_experts,
        block_size,
        blocks_of_slot,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        lane_bucket = uint32(DROP_BUCKET)
        if lane < numel:
            lane_bucket = bucket_of(topk_ids[lane], expert_map, num_experts)
        bucket = uint32(cuda.shfl_sync(FULL_MASK, int32(lane_bucket), warp))
        same_bucket = uint32(cuda.ballot_sync(FULL_MASK, lane_bucket == bucket))
        rank = int32(cuda.popc(uint32(same_bucket & uint32((uint32(1) << uint32(warp)) - uint32(1)))))
        blocks = int32(0)
        if rank == 0 and bucket < uint32(DROP_BUCKET):  # a bucket's first slot computes its number of blocks
            count = int32(cuda.popc(same_bucket))
            blocks = int32(1) if count <= block_size else int32(uint32(count + block_size - 1) // uint32(block_size))
        if lane == 0:
            blocks_of_slot[warp] = blocks
        cuda.syncthreads()
        lane_blocks = blocks_of_slot[lane] if lane < numel else int32(0)
        total = redux_sync_add_s32(uint32(FULL_MASK), lane_blocks)
        first_block = redux_sync_add_s32(uint32(FULL_MASK), lane_blocks if lane_bucket < bucket else int32(0))
        if lane < blocks:
            expert_ids[int32(first_block + lane)] = expert_of(bucket, expert_map)
        if lane == 0:
            if bucket < uint32(DROP_BUCKET):
                sorted_token_ids[int32(first_block * block_size + rank)] = warp
            if warp == 0:
                num_tokens_post_pad[0] = int32(total * block_size)

    return align_small


@cache
def make_small_kernel(aligned, ignore_invalid_experts, has_map):
    """Make the kernel; launch one CTA with at least one warp per slot."""
    fill_outputs = make_fill_outputs(aligned)
    align_small = make_align_small(ignore_invalid_experts, has_map)

    @cuda.jit
    def moe_align_block_size_small(
        topk_ids,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        numel,
        num_experts,
        block_size,
        slots_per_cta,
        length,
        num_blocks,
    ):
        blocks_of_slot = cuda.shared.array(32, int32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        fill_outputs(sorted_token_ids, expert_ids, numel, length, num_blocks)
        align_small(
            topk_ids,
            expert_map,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_pad,
            numel,
            num_experts,
            block_size,
            blocks_of_slot,
        )

    return moe_align_block_size_small
