"""The kernel for at most 32 slots: one block, a warp for each slot, and in every warp a lane for each slot.

Two votes tell a warp how its slot stands to all others. With so few slots the experts need no counters.
"""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.align.device_functions import FULL, make_bucket_of, make_expert_of
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, st_global_s32x4
from moe_numba.ptx.warp import redux_sync_add_s32

MOST_SLOTS = 32
_NOWHERE = 1 << 30  # the bucket of a slot that is dropped or not there: past all others


@cache
def make_fill_all(aligned):
    """``fill_all(...)``: fill both outputs as if there were no slot; one block can afford it while the ids are on their
    way. ``aligned``: ``sorted_token_ids`` starts at a multiple of 16 bytes.
    """

    @cuda.jit(device=True)
    def fill_all(sorted_token_ids, expert_ids, numel, length, num_blocks):
        t, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        row = t
        if aligned:
            row = int32(4 * t)
            while row < length - 3:
                st_global_s32x4(sorted_token_ids, row, numel, numel, numel, numel)
                row = int32(row + 4 * threads)
            row = int32((length & ~3) + t)
        while row < length:
            sorted_token_ids[row] = numel
            row = int32(row + threads)
        row = t
        while row < num_blocks:
            expert_ids[row] = int32(-1)
            row = int32(row + threads)

    return fill_all


@cache
def make_align_tiny(ignore_invalid_experts, has_map):
    """``align_tiny(...)``: what the block does once ``topk_ids`` can be read, and the outputs are filled.

    ``blocks_of`` is shared, 32 integers. A barrier stands between the fill and what is written over it here.
    """
    bucket_of = make_bucket_of(_NOWHERE + 1, ignore_invalid_experts, has_map)
    expert_of = make_expert_of(has_map)

    @cuda.jit(device=True)
    def align_tiny(
        topk_ids,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        numel,
        num_experts,
        block_size,
        blocks_of,
    ):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        theirs = uint32(_NOWHERE)
        if lane < numel:
            theirs = bucket_of(topk_ids[lane], expert_map, num_experts)
        mine = uint32(cuda.shfl_sync(FULL, int32(theirs), warp))
        equals = uint32(cuda.ballot_sync(FULL, theirs == mine))
        before = int32(cuda.popc(uint32(equals & uint32((uint32(1) << uint32(warp)) - uint32(1)))))
        blocks = int32(0)
        if before == 0 and mine < uint32(_NOWHERE):  # the first slot of a bucket speaks for it
            count = int32(cuda.popc(equals))
            blocks = int32(1) if count <= block_size else int32(uint32(count + block_size - 1) // uint32(block_size))
        if lane == 0:
            blocks_of[warp] = blocks
        cuda.syncthreads()
        others = blocks_of[lane] if lane < numel else int32(0)
        total = redux_sync_add_s32(uint32(FULL), others)
        start = redux_sync_add_s32(uint32(FULL), others if theirs < mine else int32(0))
        if lane < blocks:
            expert_ids[int32(start + lane)] = expert_of(mine, expert_map)
        if lane == 0:
            if mine < uint32(_NOWHERE):
                sorted_token_ids[int32(start * block_size + before)] = warp
            if warp == 0:
                num_tokens_post_pad[0] = int32(total * block_size)

    return align_tiny


@cache
def make_tiny_kernel(aligned, ignore_invalid_experts, has_map):
    """The kernel, for one block of as many warps as there are slots, or more."""
    fill_all = make_fill_all(aligned)
    align_tiny = make_align_tiny(ignore_invalid_experts, has_map)

    @cuda.jit
    def moe_align_block_size_tiny(
        topk_ids,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        numel,
        num_experts,
        block_size,
        chunk,
        length,
        num_blocks,
    ):
        blocks_of = cuda.shared.array(32, int32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        fill_all(sorted_token_ids, expert_ids, numel, length, num_blocks)
        align_tiny(
            topk_ids,
            expert_map,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_pad,
            numel,
            num_experts,
            block_size,
            blocks_of,
        )

    return moe_align_block_size_tiny
