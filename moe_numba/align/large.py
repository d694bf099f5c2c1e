"""Alignment kernel for large numbers of slots: each CTA counts its own slots and publishes the counts to all CTAs.

Two counts are published together with the launch number in one 64-bit word. A reader therefore sees from the word
itself whether it is up to date, without flags or fences. While the counts are in flight, a CTA sorts its slots by
expert in shared memory, so that its final stores are runs of consecutive elements.
"""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.align.device_functions import (
    HEADER_WORDS,
    LAUNCH_COUNT,
    SLOT_BITS,
    SLOT_MASK,
    check_launch_shape,
    check_sorted_shape,
    make_assign_blocks,
    make_bucket_of,
    make_clear,
    make_scan,
    make_write_padding,
)
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_gpu_u64x2,
    st_relaxed_gpu_s32,
    st_relaxed_gpu_u64,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import lanemask_lt

CTAS_DONE = 1  # in the workspace's header: number of CTAs done with this launch
LOADS_IN_FLIGHT = 8  # rows of counts that a thread loads at once


def shared_bytes(threads, capacity, slots_per_thread):
    """Return the bytes of dynamic shared memory: five int32 per bucket, counters and masks of warps, slots."""
    return 4 * (_sorted_slots_offset(threads, capacity) + threads * slots_per_thread)


def _sorted_slots_offset(threads, capacity):
    return (5 + 2 * threads // 32) * capacity


def workspace_words(blocks, capacity):
    """Return the size of the workspace in int32; zero it once, and do not use it in concurrent launches.

    A CTA publishes a 64-bit word for two counts of 16 bits.
    """
    return HEADER_WORDS + blocks * capacity


@cache
def make_large_kernel(threads, capacity, slots_per_thread, ignore_invalid_experts, has_map):
    """Make the kernel for at most ``threads * slots_per_thread`` slots per CTA and 2**30 elements per output.

    ``slots_per_cta`` must be a multiple of ``threads``.
    """
    check_launch_shape(threads, capacity)
    check_sorted_shape(threads, slots_per_thread, capacity, "CTA")
    num_warps = threads // 32
    # Offsets in shared memory, in int32
    counts_offset, first_block_offset, places_offset, counters_offset = (i * capacity for i in (1, 3, 4, 5))
    masks_offset, sorted_slots_offset = (5 + num_warps) * capacity, _sorted_slots_offset(threads, capacity)
    words_per_row, vectors_per_row = capacity // 2, capacity // 4
    rows_in_parallel = max(threads // vectors_per_row, 1)
    buckets_per_thread = -(-capacity // threads)
    drop_bucket = capacity - 1
    bucket_of = make_bucket_of(capacity, ignore_invalid_experts, has_map)
    clear_all = make_clear(threads, sorted_slots_offset)
    scan = make_scan(threads)
    assign_blocks = make_assign_blocks(threads, capacity)
    write_padding = make_write_padding(threads, capacity, has_map)

    @cuda.jit(device=True)
    def load_slots(topk_ids, expert_map, first, last, num_experts, num_steps, buckets):
        """Load the CTA's buckets: each warp has ``num_steps * 32`` adjacent slots, each lane every 32nd of them."""
        slot = int32(first + (int32(cuda.threadIdx.x) >> 5) * (32 * num_steps) + int32(cuda.threadIdx.x & 31))
        slot_index = int64(slot)
        for k in range(slots_per_thread):
            buckets[k] = uint32(drop_bucket)
            if k < num_steps and int32(slot + k * 32) < last:
                buckets[k] = bucket_of(topk_ids[slot_index + k * 32], expert_map, num_experts)

    @cuda.jit(device=True)
    def publish_counts(block_counts, workspace, launch_number):
        """Publish this CTA's counts; two of them and the launch number form one 64-bit word."""
        row = int64(HEADER_WORDS + cuda.blockIdx.x * capacity)
        for v in range(-(-words_per_row // threads)):
            i = uint32(cuda.threadIdx.x + v * threads)
            if i < uint32(words_per_row):
                word = uint32(block_counts[uint32(2 * i)] | (block_counts[uint32(2 * i + 1)] << 16))
                st_relaxed_gpu_u64(workspace, row + 2 * i, (uint64(launch_number) << uint64(32)) | uint64(word))

    @cuda.jit(device=True)
    def sum_counts(workspace, launch_number, counts):
        """Wait for all CTAs' counts and sum them: lower CTAs in ``counts``, the others ``capacity`` further on."""
        thread, block, blocks = uint32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        row_in_batch = uint32(thread // uint32(vectors_per_row))
        vector = uint32(thread - uint32(row_in_batch * uint32(vectors_per_row)))
        low = cuda.local.array(LOADS_IN_FLIGHT, uint64)
        high = cuda.local.array(LOADS_IN_FLIGHT, uint64)
        total = cuda.local.array((2, 4), int32)
        tag = uint64(uint64(launch_number) << uint64(32))
        while vector < uint32(vectors_per_row) and row_in_batch < uint32(rows_in_parallel):
            for c in range(4):
                total[0, c] = total[1, c] = int32(0)
            first_row = int32(row_in_batch)
            while first_row < blocks:
                offset = int64(HEADER_WORDS + first_row * capacity + int32(vector) * 4)
                stale = True
                while stale:
                    for k in range(LOADS_IN_FLIGHT):
                        low[k] = high[k] = tag
                        if int32(first_row + k * rows_in_parallel) < blocks:
                            low[k], high[k] = ld_relaxed_gpu_u64x2(workspace, offset + k * rows_in_parallel * capacity)
                    differ = uint64(0)
                    for k in range(LOADS_IN_FLIGHT):
                        differ |= (low[k] ^ tag) | (high[k] ^ tag)
                    stale = (differ >> uint64(32)) != uint64(0)
                for k in range(LOADS_IN_FLIGHT):
                    a, b = uint32(low[k] & uint64(0xFFFFFFFF)), uint32(high[k] & uint64(0xFFFFFFFF))
                    is_lower_block = int32(first_row + k * rows_in_parallel) < block
                    for c in range(4):
                        word = a if c < 2 else b
                        count = int32(word >> uint32(16)) if c % 2 else int32(word & uint32(0xFFFF))
                        total[0, c] = int32(total[0, c] + (count if is_lower_block else int32(0)))
                        total[1, c] = int32(total[1, c] + count)
                first_row = int32(first_row + LOADS_IN_FLIGHT * rows_in_parallel)
            for c in range(4):
                bucket = uint32(uint32(4) * vector + uint32(c))
                cuda.atomic.add(counts, bucket, total[0, c])
                cuda.atomic.add(counts, uint32(bucket + uint32(capacity)), int32(total[1, c] - total[0, c]))
            vector = uint32(vector + uint32(threads))

    @cuda.jit(device=True)
    def sort_slots(buckets, num_steps, counters, masks, places, sorted_slots, warp_sums):
        """Sort the CTA's slots by bucket, stably. ``counters`` and ``masks`` must be zero. Synchronise afterwards."""
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(thread >> uint32(5))
        bit = int32(uint32(1) << lane)
        rank = cuda.local.array(slots_per_thread, int32)
        counter_row = uint32(warp * uint32(capacity))
        for k in range(slots_per_thread):
            if k < num_steps:
                # Find the lanes with the same bucket: each lane sets its bit in the bucket's mask.
                # match.any.sync takes five times as long, but needs no memory.
                counter = uint32(counter_row + buckets[k])
                cuda.atomic.or_(masks, counter, bit)
                cuda.syncwarp()
                same_bucket = uint32(masks[counter])
                earlier = counters[counter]
                cuda.syncwarp()
                lower_lanes = uint32(same_bucket & lanemask_lt())
                rank[k] = int32(earlier + int32(cuda.popc(lower_lanes)))
                if lower_lanes == uint32(0):
                    masks[counter] = int32(0)
                    counters[counter] = int32(earlier + int32(cuda.popc(same_bucket)))
                cuda.syncwarp()
        cuda.syncthreads()

        # Count each bucket's slots in lower warps, and find where the bucket starts among the sorted slots.
        count = cuda.local.array(buckets_per_thread, int32)
        thread_slots = int32(0)
        for v in range(buckets_per_thread):
            bucket = uint32(uint32(thread * uint32(buckets_per_thread)) + uint32(v))
            count[v] = int32(0)
            if bucket < uint32(capacity):
                for w in range(num_warps):
                    row_count = counters[uint32(bucket + uint32(w * capacity))]
                    counters[uint32(bucket + uint32(w * capacity))] = count[v]
                    count[v] = int32(count[v] + row_count)
            thread_slots = int32(thread_slots + count[v])
        bucket_start, total = scan(thread_slots, warp_sums)
        for v in range(buckets_per_thread):
            bucket = uint32(uint32(thread * uint32(buckets_per_thread)) + uint32(v))
            if bucket < uint32(capacity):
                places[bucket] = bucket_start
            bucket_start = int32(bucket_start + count[v])
        cuda.syncthreads()
        slot = uint32(uint32(warp * uint32(32 * num_steps)) + lane)
        for k in range(slots_per_thread):
            if k < num_steps:
                position = uint32(places[buckets[k]] + counters[uint32(counter_row + buckets[k])] + rank[k])
                sorted_slots[position] = int32((buckets[k] << uint32(SLOT_BITS)) | uint32(slot + uint32(k * 32)))

    @cuda.jit
    def moe_align_block_size_large(
        topk_ids,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        workspace,
        numel,
        num_experts,
        block_size,
        slots_per_cta,
        length,
        num_blocks,
    ):
        dynamic = cuda.shared.array(0, int32)
        warp_sums = cuda.shared.array(32, int32)
        block_counts, counts = dynamic[:counts_offset], dynamic[counts_offset:first_block_offset]
        first_block = dynamic[first_block_offset:places_offset]
        places = dynamic[places_offset:counters_offset]
        counters, masks = dynamic[counters_offset:masks_offset], dynamic[masks_offset:sorted_slots_offset]
        sorted_slots = dynamic[sorted_slots_offset:]
        buckets = cuda.local.array(slots_per_thread, uint32)
        thread = uint32(cuda.threadIdx.x)
        clear_all(dynamic)
        cuda.syncthreads()
        griddepcontrol_wait()
        launch_number = ld_relaxed_gpu_s32(workspace, LAUNCH_COUNT)
        first = int32(cuda.blockIdx.x * slots_per_cta)
        last = int32(min(first + slots_per_cta, numel))
        num_steps = int32(uint32(last - first + threads - 1) // uint32(threads))

        # Count this CTA's slots. They stay in registers and are sorted while the other CTAs' counts are in flight.
        load_slots(topk_ids, expert_map, first, last, num_experts, num_steps, buckets)
        for k in range(slots_per_thread):
            cuda.atomic.add(block_counts, buckets[k], int32(1))
        launch_number = uint32(launch_number + 1)
        cuda.syncthreads()
        publish_counts(block_counts, workspace, launch_number)
        sort_slots(buckets, num_steps, counters, masks, places, sorted_slots, warp_sums)
        sum_counts(workspace, launch_number, counts)
        cuda.syncthreads()
        if thread == 0 and atom_add_relaxed_gpu_s32(workspace, CTAS_DONE, 1) == cuda.gridDim.x - 1:
            st_relaxed_gpu_s32(workspace, CTAS_DONE, 0)  # the last CTA: all counts have been read
            st_relaxed_gpu_s32(workspace, LAUNCH_COUNT, int32(launch_number))
        griddepcontrol_launch_dependents()
        total_blocks = assign_blocks(counts, first_block, num_experts, block_size, warp_sums)
        cuda.syncthreads()
        # From here on `block_counts` holds, per bucket, the output row minus the position among the sorted slots.
        for v in range(-(-capacity // threads)):
            i = uint32(thread + uint32(v * threads))
            if i < uint32(capacity):
                block_counts[i] = int32(first_block[i] * block_size + counts[i] - places[i])
        cuda.syncthreads()

        j = thread
        while j < uint32(places[uint32(drop_bucket)]):
            entry = uint32(sorted_slots[j])
            row = int32(block_counts[uint32(entry >> uint32(SLOT_BITS))] + int32(j))
            sorted_token_ids[row] = int32(first + int32(entry & uint32(SLOT_MASK)))
            j = uint32(j + uint32(threads))
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

    return moe_align_block_size_large
