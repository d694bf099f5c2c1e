"""Alignment kernel for medium numbers of slots: every CTA counts all slots, then writes its own share of the output.

Redundant counting costs less than a grid-wide barrier. Slots, padding and tails each have exactly one writer, so no CTA
waits for another.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.align.device_functions import (
    check_launch_shape,
    make_assign_blocks,
    make_bucket_of,
    make_clear,
    make_write_padding,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import lanemask_lt


def mask_words_for(capacity):
    """Return the 32-bit words of a bucket's mask; a CTA writes at most one slot per mask bit."""
    return 8 if capacity <= 288 else 2 if capacity <= 1056 else 1


def shared_bytes(capacity):
    """Return the bytes of dynamic shared memory: two counts per bucket, masks, first blocks and warp sums."""
    return 4 * (capacity * (3 + mask_words_for(capacity)) + 32)


@cache
def make_medium_kernel(threads, batch, capacity, ignore_invalid_experts, has_map):
    """Make the kernel, in which each thread keeps ``batch`` loads of ids in flight.

    ``slots_per_cta`` is at most ``32 * mask_words_for(capacity)`` and ``threads``.
    """
    check_launch_shape(threads, capacity)
    mask_words = mask_words_for(capacity)
    masks_offset, first_block_offset = 2 * capacity, (2 + mask_words) * capacity  # in shared memory, in int32
    warp_sums_offset = (3 + mask_words) * capacity
    launch_dependents_early = threads > 512  # faster only with large CTAs (measured)
    clear = make_clear(threads, first_block_offset)  # counts and masks
    bucket_of = make_bucket_of(capacity, ignore_invalid_experts, has_map)
    assign_blocks = make_assign_blocks(threads, capacity)
    write_padding = make_write_padding(threads, capacity, has_map)
    drop_bucket = capacity - 1

    @cuda.jit
    def moe_align_block_size_medium(
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
        dynamic = cuda.shared.array(0, int32)
        counts, masks = dynamic[:masks_offset], dynamic[masks_offset:first_block_offset]
        first_block, warp_sums = dynamic[first_block_offset:warp_sums_offset], dynamic[warp_sums_offset:]
        clear(dynamic)
        cuda.syncthreads()
        griddepcontrol_wait()
        if launch_dependents_early:
            griddepcontrol_launch_dependents()
        thread = int32(cuda.threadIdx.x)
        first_slot = int32(cuda.blockIdx.x * slots_per_cta)
        slot = int32(first_slot + thread)
        slot_bucket = uint32(drop_bucket)
        if thread < slots_per_cta and slot < numel:
            slot_bucket = bucket_of(topk_ids[slot], expert_map, num_experts)

        # Count the slots before this CTA's own in the first half of `counts`: they determine where its own slots go.
        buckets = cuda.local.array(batch, uint32)
        batch_start = int32(0)
        while batch_start < numel:
            thread_slot = int64(batch_start + thread)
            for k in range(batch):
                buckets[k] = uint32(drop_bucket)
                if int32(batch_start + k * threads + thread) < numel:
                    buckets[k] = bucket_of(topk_ids[thread_slot + k * threads], expert_map, num_experts)
            for k in range(batch):
                if int32(batch_start + k * threads) < numel:  # CTA-uniform; threads without a slot use the drop bucket
                    half = uint32(0) if int32(batch_start + k * threads + thread) < first_slot else uint32(capacity)
                    cuda.atomic.add(counts, uint32(buckets[k] + half), int32(1))
            batch_start = int32(batch_start + batch * threads)
        mask_word = uint32(thread >> 5)
        if thread < slots_per_cta:
            bit = int32(uint32(1) << uint32(thread & 31))
            cuda.atomic.or_(masks, uint32(slot_bucket * uint32(mask_words) + mask_word), bit)
        cuda.syncthreads()
        total_blocks = assign_blocks(counts, first_block, num_experts, block_size, warp_sums)
        cuda.syncthreads()
        if not launch_dependents_early:
            griddepcontrol_launch_dependents()

        if slot_bucket != uint32(drop_bucket):  # the slot's rank in its bucket is the number of lower bits in the mask
            mask_row = uint32(slot_bucket * uint32(mask_words))
            rank = int32(cuda.popc(uint32(uint32(masks[uint32(mask_row + mask_word)]) & lanemask_lt())))
            if slots_per_cta > 32:
                for w in range(mask_words - 1):
                    mask = uint32(masks[uint32(mask_row + uint32(w))])
                    rank = int32(rank + int32(cuda.popc(mask if mask_word > uint32(w) else uint32(0))))
            sorted_token_ids[int32(first_block[slot_bucket] * block_size + counts[slot_bucket] + rank)] = slot
        write_padding(
            counts,
            first_block,
            total_blocks,
            expert_map,
            sorted_token_ids,
            expert_ids,
            num_tokens_post_pad,
            numel,
            num_experts,
            block_size,
            length,
            num_blocks,
        )

    return moe_align_block_size_medium
