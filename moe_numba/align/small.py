"""Alignment kernel for at most 32 slots: one warp per slot; in each warp, one lane per slot.

Every warp compares all slots with one another, so that no warp waits for another: there is neither shared memory nor a
barrier. The warp of an expert's first slot writes all rows of that expert.
"""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.align.device_functions import block_reciprocal, blocks_for, make_bucket_of, make_expert_of
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt, redux_sync_add_s32

MAX_SLOTS = 32
WARPS_PER_CTA = 4  # one for each scheduler of an SM
DROP_BUCKET = 1 << 30  # bucket of slots that are ignored or out of range; greater than all others
_SHUFFLES = 8  # in flight at once


@cache
def make_small_kernel(ignore_invalid_experts, has_map):
    """Make the kernel; launch CTAs of ``WARPS_PER_CTA`` warps, at least one warp per slot."""
    bucket_of = make_bucket_of(DROP_BUCKET + 1, ignore_invalid_experts, has_map)
    expert_of = make_expert_of(has_map)

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
        griddepcontrol_launch_dependents()  # so early is faster here (measured): the kernel has few and small CTAs
        lane, lower_lanes = int32(cuda.threadIdx.x & 31), lanemask_lt()
        warp = int32(cuda.blockIdx.x * WARPS_PER_CTA + (cuda.threadIdx.x >> 5))
        lower_warps = uint32((uint32(1) << uint32(warp)) - uint32(1))
        reciprocal = block_reciprocal(block_size)
        griddepcontrol_wait()
        lane_bucket = uint32(DROP_BUCKET)
        if lane < numel:
            lane_bucket = bucket_of(topk_ids[lane], expert_map, num_experts)
        bucket = uint32(cuda.shfl_sync(FULL_MASK, int32(lane_bucket), warp))
        same_bucket, first_slot = uint32(0), int32(0)  # the slots in this lane's bucket
        while first_slot < numel:
            here = uint32(0)
            for k in range(_SHUFFLES):
                other = uint32(cuda.shfl_sync(FULL_MASK, int32(lane_bucket), int32(first_slot + k)))
                here = uint32(here | (uint32(1 << k) if other == lane_bucket else uint32(0)))
            same_bucket = uint32(same_bucket | (here << uint32(first_slot)))
            first_slot = int32(first_slot + _SHUFFLES)
        is_first = uint32(same_bucket & lower_lanes) == uint32(0) and lane_bucket < uint32(DROP_BUCKET)
        warp_slots = uint32(cuda.shfl_sync(FULL_MASK, int32(same_bucket), warp))
        count = int32(cuda.popc(warp_slots))
        blocks = blocks_for(count, reciprocal)
        lane_blocks = blocks_for(int32(cuda.popc(same_bucket)), reciprocal) if is_first else int32(0)
        total_blocks = redux_sync_add_s32(uint32(FULL_MASK), lane_blocks)
        first_block = redux_sync_add_s32(uint32(FULL_MASK), lane_blocks if lane_bucket < bucket else int32(0))
        first_row = int32(first_block * block_size)
        if bucket < uint32(DROP_BUCKET) and uint32(warp_slots & lower_warps) == uint32(0):
            if lane_bucket == bucket:
                sorted_token_ids[int32(first_row + cuda.popc(uint32(same_bucket & lower_lanes)))] = lane
            row = int32(first_row + count + lane)
            while row < int32(first_row + blocks * block_size):
                sorted_token_ids[row] = numel
                row = int32(row + 32)
            if lane < blocks:
                expert_ids[int32(first_block + lane)] = expert_of(bucket, expert_map)
        stride, first = int32(cuda.gridDim.x * (32 * WARPS_PER_CTA)), int32(32 * warp + lane)
        row = int32(total_blocks * block_size + first)
        while row < length:
            sorted_token_ids[row] = numel
            row = int32(row + stride)
        row = int32(total_blocks + first)
        while row < num_blocks:
            expert_ids[row] = int32(-1)
            row = int32(row + stride)
        if first == 0:
            num_tokens_post_pad[0] = int32(total_blocks * block_size)

    return moe_align_block_size_small
