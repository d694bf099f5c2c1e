"""Stable counting sort of slots by all CTAs of the grid, in one launch, and the alignment kernel that uses it.

Each CTA counts its own slots by bucket and publishes the counts. A warp per bucket adds up the counts of all CTAs and
publishes the sums over the lower CTAs. A published number and the number of the launch form one 64-bit word, so that a
reader sees from the word itself whether it is up to date, without flags or fences. While the numbers are in flight, a
CTA sorts its slots by bucket in shared memory, so that its final stores are runs of consecutive elements.

:func:`moe_numba.group_by_expert` uses the sort as well. With up to about 64 CTAs the exchange of the large kernel, in
which each CTA adds up all counts itself, takes less time.
"""

import math
from functools import cache
from typing import NamedTuple

from numba import cuda, int32, int64, uint32, uint64

from moe_numba import simulator
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
    ld_relaxed_gpu_s32,
    ld_relaxed_gpu_u64,
    ld_relaxed_gpu_u64x2,
    st_relaxed_gpu_s32,
    st_relaxed_gpu_u64,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt, uniform, warp_inclusive_scan

MAX_CTAS, CTAS_PER_LANE = 128, 4  # a warp adds up the counts of all CTAs


class SortConfig(NamedTuple):
    """Launch configuration of the sort."""

    threads: int
    slots_per_thread: int  # per sorted tile
    max_ctas: int

    def grid(self, numel, capacity):
        """Return the number of CTAs, and the slots per CTA."""
        # More CTAs have fewer slots each, but more counts to add up.
        ctas = max(min(math.isqrt(numel * 288 // (4 * capacity)), self.max_ctas), 1)
        slots_per_cta = max(-(-numel // (ctas * self.threads)), 1) * self.threads
        return max(-(-numel // slots_per_cta), 1), slots_per_cta

    def shared_bytes(self, capacity):
        """Return the bytes of dynamic shared memory: five int32 per bucket, counters and a sorted tile."""
        rows = 5 + self.threads // 32 // rounds_for(self.threads, capacity)
        return 4 * (rows * capacity + self.threads * self.slots_per_thread)

    def launch_options(self, capacity):
        """Return the options of the launcher. CTAs wait for one another, so the launch of several is cooperative."""
        shared_bytes = self.shared_bytes(capacity)
        return dict(launch_bounds=self.threads, shared_bytes=shared_bytes, cooperative=self.max_ctas > 1)

    def workspace_words(self, capacity):
        """Return the size of the workspace in int32; zero it once, and do not use it in concurrent launches."""
        return HEADER_WORDS + 2 * capacity * (2 * self.max_ctas + CTAS_PER_LANE)


# The first one whose shared memory the GPU has; all have fewer threads than the one before.
_CONFIGS = tuple(SortConfig(threads, 8, MAX_CTAS) for threads in (512, 256, 128))
if simulator.ENABLED:  # fewer threads, since the simulator runs them one after another
    _CONFIGS = (SortConfig(64, 2, 8),)


def config_for(capacity, gpu):
    """Return the configuration for a GPU: all CTAs must be resident."""
    config = next((c for c in _CONFIGS if c.shared_bytes(capacity) <= gpu.shared_bytes), _CONFIGS[-1])
    return config._replace(max_ctas=min(config.max_ctas, gpu.sm_count))


def rounds_for(threads, capacity):
    """Return 1 if each warp has its own counters; otherwise the warps use shared counters in this many rounds."""
    return 1 if capacity <= 1056 else threads // 32


@cache
def make_sort(threads, capacity, slots_per_thread, bucket_of_slot, write_slot, has_inverse, wide=False):
    """Make ``sort(...)``, which writes all slots to their rows; returns (counts, first blocks, number of blocks).

    A CTA sorts its ``slots_per_cta`` slots in tiles of up to ``threads * slots_per_thread``. ``slots_per_cta`` must be
    a multiple of ``threads``, and the grid has at most 128 CTAs. Numbers of slots and rows have 32 bits, so there may
    be at most 2**30 elements per output; with ``wide`` 64 bits, for any sizes.

    The sort calls ``bucket_of_slot(inputs, slot, num_experts)`` for each slot and ``write_slot(outputs, row, slot)``
    for each that is not dropped. With ``has_inverse``, ``outputs[1][slot]`` becomes the row of each slot, or -1.
    """
    check_launch_shape(threads, capacity)
    check_sorted_shape(threads, slots_per_thread, capacity, "tile")
    tile_slots = threads * slots_per_thread
    num_rounds = rounds_for(threads, capacity)
    counter_rows = threads // 32 // num_rounds
    # Offsets in shared memory, in int32
    counters_offset = capacity
    counts_offset = (1 + counter_rows) * capacity
    first_block_offset, tile_start_offset, sorted_tile_offset = (counts_offset + i * capacity for i in (2, 3, 4))
    index = int64 if wide else int32
    buckets_per_thread = -(-capacity // threads)
    drop_bucket = capacity - 1
    clear, clear_counters = (make_clear(threads, n * capacity) for n in (1 + counter_rows, counter_rows))
    scan = make_scan(threads)
    assign_blocks = make_assign_blocks(threads, capacity)

    @cuda.jit(device=True)
    def load_tile(inputs, first, last, num_experts, num_steps, buckets):
        """Load the buckets of a tile: each warp has ``num_steps * 32`` adjacent slots, each lane every 32nd of them."""
        slot = index(first + (int32(cuda.threadIdx.x) >> 5) * (32 * num_steps) + int32(cuda.threadIdx.x & 31))
        slot_index = int64(slot)
        for k in range(slots_per_thread):
            buckets[k] = uint32(drop_bucket)
            if k < num_steps and index(slot + k * 32) < last:
                buckets[k] = bucket_of_slot(inputs, slot_index + k * 32, num_experts)

    @cuda.jit(device=True)
    def publish(workspace, position, launch_number, value):
        """Store a number and the launch's number as one 64-bit word."""
        word = (uint64(launch_number) << uint64(32)) | uint64(uint32(value))
        st_relaxed_gpu_u64(workspace, int64(HEADER_WORDS) + 2 * int64(position), word)

    @cuda.jit(device=True)
    def scan_counters(counters, others, counts, tile_start, num_experts, workspace, launch_number, warp_sums, is_first):
        """Turn each warp's counts of a tile into the places of its first slots in the sorted tile.

        For the first tile, also publish this CTA's counts: those of the tile and of the ``others``.
        """
        ctas = int32(cuda.gridDim.x)
        row_stride = int32(uint32(ctas + CTAS_PER_LANE - 1) // uint32(CTAS_PER_LANE) * CTAS_PER_LANE)
        first_bucket = uint32(cuda.threadIdx.x * buckets_per_thread)
        count = cuda.local.array((buckets_per_thread, counter_rows), int32)
        thread_slots = int32(0)
        for v in range(buckets_per_thread):
            bucket = uint32(first_bucket + uint32(v))
            bucket_slots = int32(0)
            for w in range(counter_rows):
                count[v, w] = int32(0)
                if bucket < uint32(capacity):
                    count[v, w] = counters[uint32(bucket + uint32(w * capacity))]
            for w in range(counter_rows):
                bucket_slots = int32(bucket_slots + count[v, w])
            if is_first and bucket <= uint32(num_experts):
                in_all_tiles = int32(bucket_slots + others[bucket])
                if ctas > 1:
                    publish(workspace, int32(bucket) * row_stride + cuda.blockIdx.x, launch_number, in_all_tiles)
                else:
                    counts[bucket] = int32(0)
                    counts[uint32(bucket + uint32(capacity))] = in_all_tiles
            thread_slots = int32(thread_slots + bucket_slots)
        place, total = scan(thread_slots, warp_sums)
        for v in range(buckets_per_thread):
            bucket = uint32(first_bucket + uint32(v))
            if bucket < uint32(capacity):
                tile_start[bucket] = place
                for w in range(counter_rows):
                    counters[uint32(bucket + uint32(w * capacity))] = place
                    place = int32(place + count[v, w])

    @cuda.jit(device=True)
    def add_up_counts(num_experts, workspace, launch_number):
        """Wait for the counts of all CTAs, and publish for each CTA the sum of the lower ones, then that of all.

        The buckets are distributed over the CTAs. A warp adds up one bucket: each lane has four adjacent CTAs.
        """
        lane, ctas = int32(cuda.threadIdx.x & 31), int32(cuda.gridDim.x)
        row_stride = int32(uint32(ctas + CTAS_PER_LANE - 1) // uint32(CTAS_PER_LANE) * CTAS_PER_LANE)
        first_sum = int32(capacity * row_stride)
        tag = uint64(uint64(launch_number) << uint64(32))
        word = cuda.local.array(CTAS_PER_LANE, uint64)
        cta = int32(lane * CTAS_PER_LANE)
        bucket = int32(uniform(int32(cuda.threadIdx.x >> 5)) * ctas + cuda.blockIdx.x)
        while bucket <= num_experts:
            position = int64(HEADER_WORDS) + 2 * int64(bucket * row_stride + cta)
            stale = True
            while stale:
                for k in range(0, CTAS_PER_LANE, 2):
                    word[k] = word[k + 1] = tag
                    if cta + k < ctas:
                        word[k], second = ld_relaxed_gpu_u64x2(workspace, position + 2 * k)
                        word[k + 1] = second if cta + k + 1 < ctas else tag
                differ = uint64(0)
                for k in range(CTAS_PER_LANE):
                    differ |= word[k] ^ tag
                stale = cuda.any_sync(FULL_MASK, (differ >> uint64(32)) != uint64(0)) != 0
            of_lane = int32(0)
            for k in range(CTAS_PER_LANE):
                of_lane = int32(of_lane + int32(uint32(word[k] & uint64(0xFFFFFFFF))))
            up_to_lane = warp_inclusive_scan(of_lane, lane)
            lower = int32(up_to_lane - of_lane)
            for k in range(CTAS_PER_LANE):
                if cta + k < ctas:
                    publish(workspace, first_sum + (cta + k) * capacity + bucket, launch_number, lower)
                lower = int32(lower + int32(uint32(word[k] & uint64(0xFFFFFFFF))))
            if lane == 31:
                publish(workspace, first_sum + ctas * capacity + bucket, launch_number, up_to_lane)
            bucket = int32(bucket + (threads // 32) * ctas)

    @cuda.jit(device=True)
    def place_slots(buckets, num_steps, counters, sorted_tile, place):
        """Move a tile's slots to their places in the sorted tile, in ascending order within a bucket."""
        thread = uint32(cuda.threadIdx.x)
        lane, warp = uint32(thread & uint32(31)), uint32(uniform(int32(thread >> uint32(5))))
        counter_row = uint32(warp * uint32(capacity)) if num_rounds == 1 else uint32(0)
        slot = uint32(uint32(warp * uint32(32 * num_steps)) + lane)
        next_place = cuda.local.array(slots_per_thread, int32)
        for counting_round in range(num_rounds):
            if num_rounds == 1 or warp == uint32(counting_round):
                for k in range(slots_per_thread):
                    place[k] = next_place[k] = int32(0)
                    if k < num_steps:
                        counter = uint32(counter_row + buckets[k])
                        place[k] = cuda.atomic.add(counters, counter, int32(1))
                        cuda.syncwarp()
                        next_place[k] = counters[counter]
                        cuda.syncwarp()
                # Lanes with the same bucket received their places in any order. All of them but one find that theirs
                # is not the last one; sort the places of each such bucket by lane.
                for k in range(slots_per_thread):
                    if k < num_steps:
                        unsorted = uint32(cuda.ballot_sync(FULL_MASK, int32(place[k] + 1) != next_place[k]))
                        while unsorted != uint32(0):
                            bucket = cuda.shfl_sync(FULL_MASK, int32(buckets[k]), int32(cuda.ffs(int32(unsorted)) - 1))
                            is_same = int32(buckets[k]) == bucket
                            same_bucket = uint32(cuda.ballot_sync(FULL_MASK, is_same))
                            higher_lanes = int32(cuda.popc(uint32(same_bucket & ~lanemask_lt())))
                            place[k] = int32(next_place[k] - higher_lanes) if is_same else place[k]
                            unsorted = uint32(unsorted & ~same_bucket)
                        entry = uint32((buckets[k] << uint32(SLOT_BITS)) | uint32(slot + uint32(k * 32)))
                        sorted_tile[uint32(place[k])] = int32(entry)
            if num_rounds > 1:
                cuda.syncthreads()

    @cuda.jit(device=True)
    def receive_sums(num_experts, workspace, launch_number, counts):
        """Wait for the sums of all buckets: those of lower CTAs in ``counts``, the others ``capacity`` further on."""
        ctas = int32(cuda.gridDim.x)
        row_stride = int32(uint32(ctas + CTAS_PER_LANE - 1) // uint32(CTAS_PER_LANE) * CTAS_PER_LANE)
        first_sum = int32(capacity * row_stride)
        bucket = int32(cuda.threadIdx.x)
        while bucket <= num_experts:
            lower_at = int64(HEADER_WORDS) + 2 * int64(first_sum + cuda.blockIdx.x * capacity + bucket)
            all_at = int64(HEADER_WORDS) + 2 * int64(first_sum + ctas * capacity + bucket)
            lower, total = uint64(0), uint64(0)
            while uint32(lower >> uint64(32)) != launch_number or uint32(total >> uint64(32)) != launch_number:
                lower, total = ld_relaxed_gpu_u64(workspace, lower_at), ld_relaxed_gpu_u64(workspace, all_at)
            counts[bucket] = int32(uint32(lower & uint64(0xFFFFFFFF)))
            counts[bucket + capacity] = int32(uint32((total - lower) & uint64(0xFFFFFFFF)))
            bucket = int32(bucket + threads)

    @cuda.jit(device=True)
    def sort(inputs, outputs, workspace, numel, num_experts, block_size, slots_per_cta, dynamic, warp_sums):
        others, counters = dynamic[:counters_offset], dynamic[counters_offset:counts_offset]
        counts, first_block = dynamic[counts_offset:first_block_offset], dynamic[first_block_offset:tile_start_offset]
        tile_start, sorted_tile = dynamic[tile_start_offset:sorted_tile_offset], dynamic[sorted_tile_offset:]
        buckets = cuda.local.array(slots_per_thread, uint32)
        place = cuda.local.array(slots_per_thread, int32)
        thread = uint32(cuda.threadIdx.x)
        counter_row = uint32(uint32(thread >> uint32(5)) * uint32(capacity)) if num_rounds == 1 else uint32(0)
        clear(dynamic)
        cuda.syncthreads()
        griddepcontrol_wait()
        launch_number = ld_relaxed_gpu_s32(workspace, LAUNCH_COUNT)
        first = index(cuda.blockIdx.x * slots_per_cta)
        last = index(min(first + slots_per_cta, numel))
        num_steps = int32(min(uint32(last - first + threads - 1) // uint32(threads), uint32(slots_per_thread)))

        # Count the slots of all tiles but the first.
        tile_first = index(first + tile_slots)
        while tile_first < last:
            load_tile(inputs, tile_first, last, num_experts, num_steps, buckets)
            for k in range(slots_per_thread):
                cuda.atomic.add(others, buckets[k], int32(1))
            tile_first = index(tile_first + tile_slots)

        launch_number = uint32(launch_number + 1)
        total_blocks = int32(0)
        tile_first = first
        while True:
            load_tile(inputs, tile_first, last, num_experts, num_steps, buckets)
            for k in range(slots_per_thread):
                if k < num_steps:
                    cuda.atomic.add(counters, uint32(counter_row + buckets[k]), int32(1))
            cuda.syncthreads()
            is_first = tile_first == first
            scan_counters(
                counters, others, counts, tile_start, num_experts, workspace, launch_number, warp_sums, is_first
            )
            cuda.syncthreads()
            if is_first and cuda.gridDim.x > 1:
                add_up_counts(num_experts, workspace, launch_number)
            cuda.syncwarp()
            place_slots(buckets, num_steps, counters, sorted_tile, place)
            # From here on `others` holds, per bucket, the output row minus the place in the sorted tile.
            if is_first:
                if cuda.gridDim.x > 1:
                    receive_sums(num_experts, workspace, launch_number, counts)
                cuda.syncthreads()
                if cuda.blockIdx.x == 0 and thread == 0:  # all CTAs have published, so they have read the old number
                    st_relaxed_gpu_s32(workspace, LAUNCH_COUNT, int32(launch_number))
                griddepcontrol_launch_dependents()
                total_blocks = assign_blocks(counts, first_block, num_experts, block_size, warp_sums)
                cuda.syncthreads()
                for v in range(-(-capacity // threads)):
                    i = uint32(thread + uint32(v * threads))
                    if i <= uint32(num_experts):
                        others[i] = int32(first_block[i] * block_size + counts[i] - tile_start[i])
            else:
                for v in range(-(-capacity // threads)):
                    i = uint32(thread + uint32(v * threads))
                    if i <= uint32(num_experts):
                        others[i] = int32(others[i] - tile_start[i])
            cuda.syncthreads()

            for k in range(slots_per_thread):
                j = uint32(thread + uint32(k * threads))
                if j < uint32(tile_start[uint32(drop_bucket)]):
                    entry = uint32(sorted_tile[j])
                    row = int32(others[uint32(entry >> uint32(SLOT_BITS))] + int32(j))
                    write_slot(outputs, row, int32(tile_first + int32(entry & uint32(SLOT_MASK))))
            if has_inverse:
                slot = int32(tile_first + (thread >> uint32(5)) * (32 * num_steps) + (thread & uint32(31)))
                for k in range(slots_per_thread):
                    if k < num_steps and int32(slot + k * 32) < last:
                        row = int32(others[buckets[k]] + place[k])
                        outputs[1][int32(slot + k * 32)] = int32(-1) if buckets[k] == uint32(drop_bucket) else row
            tile_first = index(tile_first + tile_slots)
            if tile_first >= last:
                break
            cuda.syncthreads()
            for v in range(-(-capacity // threads)):
                i = uint32(thread + uint32(v * threads))
                if i <= uint32(num_experts):
                    others[i] = int32(others[i] + tile_start[uint32(i + uint32(1))])
            clear_counters(counters)
            cuda.syncthreads()
        return counts, first_block, total_blocks

    return sort


@cache
def make_counting_sort_kernel(threads, capacity, slots_per_thread, ignore_invalid_experts, has_map, wide=False):
    """Make the kernel; for the arguments see ``make_sort``."""
    index = int64 if wide else int32
    bucket_of = make_bucket_of(capacity, ignore_invalid_experts, has_map)

    @cuda.jit(device=True)
    def bucket_of_slot(inputs, slot, num_experts):
        return bucket_of(inputs[0][slot], inputs[1], num_experts)

    @cuda.jit(device=True)
    def write_slot(outputs, row, slot):
        outputs[0][row] = slot

    sort = make_sort(threads, capacity, slots_per_thread, bucket_of_slot, write_slot, False, wide)
    write_padding = make_write_padding(threads, capacity, has_map, index)

    @cuda.jit
    def moe_align_block_size_counting_sort(
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
        inputs, outputs = (topk_ids, expert_map), (sorted_token_ids,)
        counts, first_block, total_blocks = sort(
            inputs, outputs, workspace, numel, num_experts, block_size, slots_per_cta, dynamic, warp_sums
        )
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

    return moe_align_block_size_counting_sort
