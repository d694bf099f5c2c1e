"""The kernel for few slots: every block counts all of them, and then writes its own share of the output.

Counting what another block counts as well is cheaper than waiting for it. Nothing is filled first and then written
over: slots, padding and tails each have one writer, so that no block waits for another.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.align.device_functions import make_bucket_of, make_clear, make_fill, make_place_buckets
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import lanemask_lt


def words_for(capacity):
    """Words of a bucket's mask: a block places up to 32 times as many slots of its own."""
    return 8 if capacity <= 288 else 2 if capacity <= 1056 else 1


def shared_bytes(capacity):
    """Dynamic shared memory: counts in two parts, masks, the block at which a bucket starts, and the warps' sums."""
    return 4 * (capacity * (3 + words_for(capacity)) + 32)


@cache
def make_carve(capacity):
    """``carve(dynamic)``: the parts of shared memory, for ``align``: counts, masks, first_block, warp_sums."""
    counts, masks, first_block = 2 * capacity, words_for(capacity) * capacity, capacity

    @cuda.jit(device=True)
    def carve(dynamic):
        return (
            dynamic[:counts],
            dynamic[counts : counts + masks],
            dynamic[counts + masks : counts + masks + first_block],
            dynamic[counts + masks + first_block :],
        )

    return carve


@cache
def make_align(threads, batch, capacity, ignore_invalid_experts, has_map):
    """``align(...)``: what a block does once its shared memory is clear and ``topk_ids`` can be read.

    A thread has ``batch`` ids on their way at once.
    """
    words = words_for(capacity)
    starts_next_early = threads > 512  # found by measuring
    bucket_of = make_bucket_of(capacity, ignore_invalid_experts, has_map)
    place_buckets = make_place_buckets(threads, capacity)
    fill = make_fill(threads, capacity, has_map)
    the_bin = capacity - 1

    @cuda.jit(device=True)
    def align(
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
        counts,
        masks,
        first_block,
        warp_sums,
    ):
        if starts_next_early:
            griddepcontrol_launch_dependents()
        t = int32(cuda.threadIdx.x)
        first = int32(cuda.blockIdx.x * chunk)
        slot = int32(first + t)
        mine = uint32(the_bin)
        if t < chunk and slot < numel:
            mine = bucket_of(topk_ids[slot], expert_map, num_experts)

        # The slots before this block's own are counted apart: they decide where its own go.
        bucket = cuda.local.array(batch, uint32)
        start = int32(0)
        while start < numel:
            here = int64(start + t)
            for k in range(batch):
                bucket[k] = uint32(the_bin)
                if int32(start + k * threads + t) < numel:
                    bucket[k] = bucket_of(topk_ids[here + k * threads], expert_map, num_experts)
            for k in range(batch):
                if int32(start + k * threads) < numel:  # the same for all: threads without a slot count into the bin
                    part = uint32(0) if int32(start + k * threads + t) < first else uint32(capacity)
                    cuda.atomic.add(counts, uint32(bucket[k] + part), int32(1))
            start = int32(start + batch * threads)
        word = uint32(t >> 5)
        if t < chunk:
            bit = int32(uint32(1) << uint32(t & 31))
            cuda.atomic.or_(masks, uint32(mine * uint32(words) + word), bit)
        cuda.syncthreads()
        total_blocks = place_buckets(counts, first_block, num_experts, block_size, warp_sums)
        cuda.syncthreads()
        if not starts_next_early:
            griddepcontrol_launch_dependents()

        if mine != uint32(the_bin):  # a slot's rank is the number of lower bits in its bucket's mask
            row = uint32(mine * uint32(words))
            rank = int32(cuda.popc(uint32(uint32(masks[uint32(row + word)]) & lanemask_lt())))
            if chunk > 32:
                for w in range(words - 1):
                    mask = uint32(masks[uint32(row + uint32(w))])
                    rank = int32(rank + int32(cuda.popc(mask if word > uint32(w) else uint32(0))))
            sorted_token_ids[int32(first_block[mine] * block_size + counts[mine] + rank)] = slot
        fill(
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

    return align


@cache
def make_few_kernel(threads, batch, capacity, ignore_invalid_experts, has_map):
    """The kernel; a block's ``chunk`` of slots has up to 32 ``words_for(capacity)`` of them, and up to ``threads``."""
    carve = make_carve(capacity)
    clear = make_clear(threads, capacity * (2 + words_for(capacity)))  # counts and masks
    align = make_align(threads, batch, capacity, ignore_invalid_experts, has_map)

    @cuda.jit
    def moe_align_block_size_few(
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
        dynamic = cuda.shared.array(0, int32)
        counts, masks, first_block, warp_sums = carve(dynamic)
        clear(dynamic)
        cuda.syncthreads()
        griddepcontrol_wait()
        align(
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
            counts,
            masks,
            first_block,
            warp_sums,
        )

    return moe_align_block_size_few
