"""Alignment kernel for few slots: every CTA counts all slots, then each expert's rows are written by two warps.

So few slots keep no memory busy: a warp mostly waits for its own instructions. Hence the work is spread over many
warps, and nothing but one barrier stands between the loads of the ids and the stores. Each warp itself adds up the
blocks of the lower experts, and takes its slots from a mask with one bit per slot.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.align.device_functions import (
    block_reciprocal,
    blocks_for,
    check_launch_shape,
    make_bucket_of,
    make_clear,
    make_expert_of,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt, redux_sync_add_s32, uniform_array

MAX_SLOTS = 1024  # a mask has a 32-bit word per lane
MAX_CAPACITY = 544  # with more buckets, adding up their blocks in every warp takes longer than the medium kernel
WARPS_PER_EXPERT = 2  # one writes the slots, the other one the padding and the expert ids


def mask_words_for(max_slots):
    """Return the 32-bit words of an expert's mask."""
    return -(-max_slots // 32)


def counts_for(capacity):
    """Return the length of the array of counts, which a warp reads 128 at a time."""
    return -(-capacity // 128) * 128


def ctas_for(num_experts, threads):
    """Return the CTAs whose warps have one expert each, with the bucket of invalid ids as another expert."""
    return -(-(num_experts + 1) // (threads // 32 // WARPS_PER_EXPERT))


def shared_bytes(max_slots, capacity):
    """Return the bytes of dynamic shared memory: a count and a mask per bucket."""
    return 4 * (counts_for(capacity) + capacity * mask_words_for(max_slots))


@cache
def make_write_experts(threads, max_slots, capacity, has_map):
    """Make ``write_experts(...)``, which writes all outputs once ``counts`` and ``masks`` are complete.

    The experts are distributed over the warps of the grid. Each element has exactly one writer.
    """
    check_launch_shape(threads, capacity)
    mask_words, num_vectors = mask_words_for(max_slots), counts_for(capacity) // 128
    experts_per_cta, drop_bucket = threads // 32 // WARPS_PER_EXPERT, capacity - 1
    expert_of = make_expert_of(has_map)

    @cuda.jit(device=True)
    def write_experts(
        counts,
        masks,
        reciprocal,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        numel,
        num_experts,
        block_size,
        length,
        num_blocks,
    ):
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        lower_lanes = lanemask_lt()
        writes_slots = warp < experts_per_cta
        bucket = uint32(cuda.blockIdx.x * experts_per_cta + (warp if writes_slots else int32(warp - experts_per_cta)))
        total_blocks, is_last = int32(0), False
        while not is_last:  # once, unless the grid has fewer warps than experts
            bucket = min(bucket, uint32(drop_bucket))  # which has no slots
            vector, in_vector = int32(bucket >> uint32(2)), int32(bucket & uint32(3))
            count0, count1, count2, count3 = ld_shared_s32x4(counts, int32(4 * vector))
            mask = uint32(0)
            if writes_slots & (lane < mask_words):
                mask = uint32(masks[uint32(bucket * uint32(mask_words) + uint32(lane))])
            first_block, total_blocks = int32(0), int32(0)
            for v in range(num_vectors):
                a, b, c, d = ld_shared_s32x4(counts, int32(4 * (32 * v + lane)))
                ab = int32(blocks_for(a, reciprocal) + blocks_for(b, reciprocal))
                blocks = int32(ab + int32(blocks_for(c, reciprocal) + blocks_for(d, reciprocal)))
                total_blocks = int32(total_blocks + blocks)
                first_block = int32(first_block + (blocks if int32(32 * v + lane) < vector else int32(0)))
            total_blocks = redux_sync_add_s32(uint32(FULL_MASK), total_blocks)
            first_block = redux_sync_add_s32(uint32(FULL_MASK), first_block)
            first_block = int32(first_block + (blocks_for(count0, reciprocal) if in_vector > 0 else int32(0)))
            first_block = int32(first_block + (blocks_for(count1, reciprocal) if in_vector > 1 else int32(0)))
            first_block = int32(first_block + (blocks_for(count2, reciprocal) if in_vector > 2 else int32(0)))
            first_row = int32(first_block * block_size)
            if writes_slots:
                # A lane's first row is the number of slots in lower lanes: ballots add up their 6-bit numbers.
                lane_slots, row = int32(cuda.popc(mask)), first_row
                for j in range(6):
                    lanes = uint32(uint32(cuda.ballot_sync(FULL_MASK, ((lane_slots >> j) & 1) != 0)) & lower_lanes)
                    row = int32(row + (int32(cuda.popc(lanes)) << j))
                while mask != uint32(0):
                    sorted_token_ids[row] = int32(32 * lane + cuda.ffs(mask) - 1)
                    row = int32(row + 1)
                    mask = uint32(mask & uint32(mask - uint32(1)))
            else:
                count = count0 if in_vector == 0 else (count1 if in_vector == 1 else count2)
                count = count3 if in_vector == 3 else count
                blocks = blocks_for(count, reciprocal)
                row = int32(first_row + count + lane)
                while row < int32(first_row + blocks * block_size):
                    sorted_token_ids[row] = numel
                    row = int32(row + 32)
                if blocks > 0:
                    expert, block = expert_of(bucket, expert_map), lane
                    while block < blocks:
                        expert_ids[int32(first_block + block)] = expert
                        block = int32(block + 32)
            bucket = uint32(bucket + uint32(cuda.gridDim.x * experts_per_cta))
            is_last = bucket > uint32(num_experts)

        stride, first = int32(cuda.gridDim.x * threads), int32(cuda.blockIdx.x * threads + thread)
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

    return write_experts


@cache
def make_kernel(threads, max_slots, capacity, ignore_invalid_experts, has_map):
    """Make the kernel for up to ``max_slots`` slots, at most ``MAX_SLOTS``."""
    slots_per_thread, num_warps = -(-max_slots // threads), threads // 32
    num_counts, mask_words, drop_bucket = counts_for(capacity), mask_words_for(max_slots), capacity - 1
    clear = make_clear(threads, num_counts + capacity * mask_words)
    bucket_of = make_bucket_of(capacity, ignore_invalid_experts, has_map)
    write_experts = make_write_experts(threads, max_slots, capacity, has_map)

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
        slots_per_cta,
        length,
        num_blocks,
    ):
        dynamic = cuda.shared.array(0, int32)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        clear(dynamic)
        dynamic = uniform_array(dynamic)
        counts, masks = dynamic[:num_counts], dynamic[num_counts:]
        reciprocal = block_reciprocal(block_size)
        bit = int32(uint32(1) << uint32(lane))
        cuda.syncthreads()
        griddepcontrol_wait()
        buckets = cuda.local.array(slots_per_thread, uint32)
        for k in range(slots_per_thread):
            buckets[k] = uint32(drop_bucket)
            if int32(thread + k * threads) < numel:
                buckets[k] = bucket_of(topk_ids[int64(thread + k * threads)], expert_map, num_experts)
        for k in range(slots_per_thread):
            if buckets[k] != uint32(drop_bucket):
                cuda.atomic.add(counts, buckets[k], int32(1))
                word = uint32(buckets[k] * uint32(mask_words) + uint32(warp + k * num_warps))
                cuda.atomic.or_(masks, word, bit)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        write_experts(
            counts,
            masks,
            reciprocal,
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

    return moe_align_block_size_few
