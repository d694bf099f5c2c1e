"""Alignment kernel for any number of experts: one CTA with one thread per slot, which compares it with all other slots.

The other kernels count slots per expert in shared memory. This one needs no memory per expert.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.align.device_functions import make_bucket_of, make_expert_of
from moe_numba.align.small import DROP_BUCKET
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait

MAX_SLOTS = 1024  # threads per CTA


@cache
def make_pairwise_kernel(ignore_invalid_experts, has_map):
    """Make the kernel; launch one CTA with at least one thread per slot."""
    bucket_of = make_bucket_of(DROP_BUCKET + 1, ignore_invalid_experts, has_map)
    expert_of = make_expert_of(has_map)

    @cuda.jit
    def moe_align_block_size_pairwise(
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
        bucket_of_slot = cuda.shared.array(MAX_SLOTS, uint32)
        blocks_of_slot = cuda.shared.array(MAX_SLOTS, int32)
        thread = int32(cuda.threadIdx.x)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        row = int64(thread)
        while row < length:
            sorted_token_ids[row] = numel
            row += cuda.blockDim.x
        row = int64(thread)
        while row < num_blocks:
            expert_ids[row] = int32(-1)
            row += cuda.blockDim.x

        bucket = uint32(DROP_BUCKET)
        if thread < numel:
            bucket = bucket_of(topk_ids[thread], expert_map, num_experts)
        bucket_of_slot[thread] = bucket
        cuda.syncthreads()
        count, rank = int32(0), int32(0)
        for slot in range(numel):
            if bucket_of_slot[slot] == bucket:
                count = int32(count + 1)
                rank = int32(rank + int32(slot < thread))
        blocks = int32(0)
        if rank == 0 and bucket < uint32(DROP_BUCKET):  # a bucket's first slot computes its number of blocks
            blocks = int32(uint32(count + block_size - 1) // uint32(block_size))
        blocks_of_slot[thread] = blocks
        cuda.syncthreads()
        total, first_block = int32(0), int32(0)
        for slot in range(numel):
            total = int32(total + blocks_of_slot[slot])
            if bucket_of_slot[slot] < bucket:
                first_block = int32(first_block + blocks_of_slot[slot])
        for block in range(blocks):
            expert_ids[int32(first_block + block)] = expert_of(bucket, expert_map)
        if bucket < uint32(DROP_BUCKET):
            sorted_token_ids[int32(first_block * block_size + rank)] = thread
        if thread == 0:
            num_tokens_post_pad[0] = int32(total * block_size)

    return moe_align_block_size_pairwise
