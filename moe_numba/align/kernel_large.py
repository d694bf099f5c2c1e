"""The kernel for many slots: each block counts its own, and the blocks hand their counts over to one another.

A count travels with the number of the launch in one word, so that whoever reads it sees at once whether it is new: no
flag, no fence. While the counts are on their way, a block sorts its slots by expert in shared memory; what it writes in
the end are runs, not single elements.
"""

from functools import cache

from numba import cuda, int32, int64, uint32, uint64

from moe_numba.align.device_functions import FULL, make_bucket_of, make_clear, make_fill, make_place_buckets, make_scan
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32, ld_relaxed_gpu_u64x2, st_relaxed_gpu_u64
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import lanemask_lt

SLOT_BITS = 13  # of a slot's place in its tile; its bucket stands above it
SLOT_MASK = (1 << SLOT_BITS) - 1
LAUNCHES, DONE, HEAD = 0, 1, 4  # of the workspace: launches so far, blocks done with this one; where rows start
BATCH = 8  # rows that a thread has on their way at once


def turns_for(threads, capacity):
    """1 where each warp has counters of its own, else all warps share theirs and take turns."""
    return 1 if capacity <= 1056 else threads // 32


def shared_bytes(threads, capacity, per_thread):
    """Dynamic shared memory: five numbers a bucket, its counters and masks, and a tile of sorted slots."""
    return 4 * (_in_order_at(threads, capacity) + threads * per_thread)


def _in_order_at(threads, capacity):
    return (5 + 2 * threads // 32 if turns_for(threads, capacity) == 1 else 6) * capacity


def workspace_numbers(blocks, capacity):
    """How many int32 the workspace has; zero before its first launch, and used by one launch at a time."""
    return HEAD + blocks * capacity


@cache
def make_many_kernel(threads, capacity, per_thread, ignore_invalid_experts, has_map):
    """The kernel; a tile is up to ``threads * per_thread`` slots. A block's chunk is a multiple of ``threads``, at most
    65535; what is more than a tile is sorted tile after tile.
    """
    warps, tile = threads // 32, threads * per_thread
    turns = turns_for(threads, capacity)
    rows = warps // turns  # of counters
    # The parts of shared memory, by their first number.
    counts_at, first_block_at, local_start_at, counters_at = (i * capacity for i in (1, 3, 4, 5))
    masks_at, in_order_at = (5 + rows) * capacity, _in_order_at(threads, capacity)
    words, quads = capacity // 2, capacity // 4  # of a row
    teams = max(threads // quads, 1)
    share = -(-capacity // threads)
    the_bin = capacity - 1
    bucket_of = make_bucket_of(capacity, ignore_invalid_experts, has_map)
    clear_all, clear_counters = make_clear(threads, in_order_at), make_clear(threads, rows * capacity)
    scan = make_scan(threads)
    place_buckets = make_place_buckets(threads, capacity)
    fill = make_fill(threads, capacity, has_map)

    @cuda.jit(device=True)
    def load_tile(topk_ids, expert_map, first, last, num_experts, steps, bucket):
        """A warp's slots of a tile are ``steps`` times 32 neighbours, a lane's every 32nd of them."""
        here = int32(first + (int32(cuda.threadIdx.x) >> 5) * (32 * steps) + int32(cuda.threadIdx.x & 31))
        base = int64(here)
        for k in range(per_thread):
            bucket[k] = uint32(the_bin)
            if k < steps and int32(here + k * 32) < last:
                bucket[k] = bucket_of(topk_ids[base + k * 32], expert_map, num_experts)

    @cuda.jit(device=True)
    def publish(own, workspace, launch):
        """Two counts and the number of the launch are one word."""
        row = int64(HEAD + cuda.blockIdx.x * capacity)
        for v in range(-(-words // threads)):
            i = uint32(cuda.threadIdx.x + v * threads)
            if i < uint32(words):
                pair = uint32(own[uint32(2 * i)] | (own[uint32(2 * i + 1)] << 16))
                st_relaxed_gpu_u64(workspace, row + 2 * i, (uint64(launch) << uint64(32)) | uint64(pair))

    @cuda.jit(device=True)
    def sum_rows(workspace, launch, counts):
        """Add up all blocks' counts: those of the blocks before this one, and the rest, ``capacity`` apart."""
        t, block, blocks = uint32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
        team = uint32(t // uint32(quads))
        quad = uint32(t - uint32(team * uint32(quads)))
        low = cuda.local.array(BATCH, uint64)
        high = cuda.local.array(BATCH, uint64)
        total = cuda.local.array((2, 4), int32)
        new = uint64(uint64(launch) << uint64(32))
        while quad < uint32(quads) and team < uint32(teams):
            for c in range(4):
                total[0, c] = total[1, c] = int32(0)
            start = int32(team)
            while start < blocks:
                base = int64(HEAD + start * capacity + int32(quad) * 4)
                old = True
                while old:
                    for k in range(BATCH):
                        low[k] = high[k] = new
                        if int32(start + k * teams) < blocks:
                            low[k], high[k] = ld_relaxed_gpu_u64x2(workspace, base + k * teams * capacity)
                    differ = uint64(0)
                    for k in range(BATCH):
                        differ |= (low[k] ^ new) | (high[k] ^ new)
                    old = (differ >> uint64(32)) != uint64(0)
                for k in range(BATCH):
                    a, b = uint32(low[k] & uint64(0xFFFFFFFF)), uint32(high[k] & uint64(0xFFFFFFFF))
                    mine = int32(start + k * teams) < block
                    for c in range(4):
                        pair = a if c < 2 else b
                        count = int32(pair >> uint32(16)) if c % 2 else int32(pair & uint32(0xFFFF))
                        total[0, c] = int32(total[0, c] + (count if mine else int32(0)))
                        total[1, c] = int32(total[1, c] + count)
                start = int32(start + BATCH * teams)
            for c in range(4):
                to = uint32(uint32(4) * quad + uint32(c))
                cuda.atomic.add(counts, to, total[0, c])
                cuda.atomic.add(counts, uint32(to + uint32(capacity)), int32(total[1, c] - total[0, c]))
            quad = uint32(quad + uint32(threads))

    @cuda.jit(device=True)
    def sort_tile(bucket, steps, counters, masks, local_start, in_order, warp_sums):
        """Sort a tile's slots by bucket, stable. ``counters`` and ``masks`` come as zeros; a barrier must follow."""
        t = uint32(cuda.threadIdx.x)
        lane, warp = uint32(t & uint32(31)), uint32(t >> uint32(5))
        bit = int32(uint32(1) << lane)
        rank = cuda.local.array(per_thread, int32)
        row = uint32(warp * uint32(capacity)) if turns == 1 else uint32(0)
        for turn in range(turns):
            if turns == 1 or warp == uint32(turn):
                for k in range(per_thread):
                    if k < steps:
                        # Who else of the warp has this bucket? Each lane sets its bit in the bucket's mask. The
                        # instruction that is made for it takes five times as long, but no memory.
                        at = uint32(row + bucket[k])
                        if turns == 1:
                            cuda.atomic.or_(masks, at, bit)
                            cuda.syncwarp()
                            equals = uint32(masks[at])
                        else:
                            equals = uint32(cuda.match_any_sync(FULL, bucket[k]))
                        before = counters[at]
                        cuda.syncwarp()
                        lower = uint32(equals & lanemask_lt())
                        rank[k] = int32(before + int32(cuda.popc(lower)))
                        if lower == uint32(0):
                            if turns == 1:
                                masks[at] = int32(0)
                            counters[at] = int32(before + int32(cuda.popc(equals)))
                        cuda.syncwarp()
            if turns > 1:
                cuda.syncthreads()
        cuda.syncthreads()

        # What the warps before a warp have of a bucket, and where the bucket starts in the tile.
        count = cuda.local.array(share, int32)
        mine = int32(0)
        for v in range(share):
            b = uint32(uint32(t * uint32(share)) + uint32(v))
            count[v] = int32(0)
            if b < uint32(capacity):
                for w in range(rows):
                    here = counters[uint32(b + uint32(w * capacity))]
                    counters[uint32(b + uint32(w * capacity))] = count[v] if turns == 1 else int32(0)
                    count[v] = int32(count[v] + here)
            mine = int32(mine + count[v])
        at, total = scan(mine, warp_sums)
        for v in range(share):
            b = uint32(uint32(t * uint32(share)) + uint32(v))
            if b < uint32(capacity):
                local_start[b] = at
            at = int32(at + count[v])
        cuda.syncthreads()
        slot = uint32(uint32(warp * uint32(32 * steps)) + lane)
        for k in range(per_thread):
            if k < steps:
                place = uint32(local_start[bucket[k]] + counters[uint32(row + bucket[k])] + rank[k])
                in_order[place] = int32((bucket[k] << uint32(SLOT_BITS)) | uint32(slot + uint32(k * 32)))

    @cuda.jit
    def moe_align_block_size_many(
        topk_ids,
        expert_map,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_pad,
        workspace,
        numel,
        num_experts,
        block_size,
        chunk,
        length,
        num_blocks,
    ):
        dynamic = cuda.shared.array(0, int32)
        warp_sums = cuda.shared.array(32, int32)
        own, counts = dynamic[:counts_at], dynamic[counts_at:first_block_at]
        first_block, local_start = dynamic[first_block_at:local_start_at], dynamic[local_start_at:counters_at]
        counters, masks = dynamic[counters_at:masks_at], dynamic[masks_at:in_order_at]
        in_order = dynamic[in_order_at:]
        bucket = cuda.local.array(per_thread, uint32)
        t = uint32(cuda.threadIdx.x)
        clear_all(dynamic)
        cuda.syncthreads()
        griddepcontrol_wait()
        launch = ld_relaxed_gpu_s32(workspace, LAUNCHES)
        first = int32(cuda.blockIdx.x * chunk)
        last = int32(min(first + chunk, numel))
        steps = int32(min(uint32(last - first + threads - 1) // uint32(threads), uint32(per_thread)))

        # Count the chunk, the last tile first: the first one stays in registers, and is sorted while the other blocks'
        # counts are on their way.
        tile_first = int32(first + (last - first - 1) // tile * tile)
        while tile_first >= first:
            load_tile(topk_ids, expert_map, tile_first, last, num_experts, steps, bucket)
            for k in range(per_thread):
                cuda.atomic.add(own, bucket[k], int32(1))
            tile_first = int32(tile_first - tile)
        launch = uint32(launch + 1)
        cuda.syncthreads()
        publish(own, workspace, launch)
        sort_tile(bucket, steps, counters, masks, local_start, in_order, warp_sums)
        sum_rows(workspace, launch, counts)
        cuda.syncthreads()
        if t == 0 and atom_add_relaxed_gpu_s32(workspace, DONE, 1) == cuda.gridDim.x - 1:
            workspace[DONE] = int32(0)  # all blocks have read all rows
            workspace[LAUNCHES] = int32(launch)
        griddepcontrol_launch_dependents()
        total_blocks = place_buckets(counts, first_block, num_experts, block_size, warp_sums)
        cuda.syncthreads()
        for v in range(-(-capacity // threads)):
            i = uint32(t + uint32(v * threads))
            if i < uint32(capacity):
                own[i] = int32(first_block[i] * block_size + counts[i] - local_start[i])
        cuda.syncthreads()

        tile_first = first
        while True:
            j = t
            while j < uint32(local_start[uint32(the_bin)]):
                entry = uint32(in_order[j])
                row = int32(own[uint32(entry >> uint32(SLOT_BITS))] + int32(j))
                sorted_token_ids[row] = int32(tile_first + int32(entry & uint32(SLOT_MASK)))
                j = uint32(j + uint32(threads))
            tile_first = int32(tile_first + tile)
            if tile_first >= last:
                break
            cuda.syncthreads()
            for v in range(-(-capacity // threads)):
                i = uint32(t + uint32(v * threads))
                if i < uint32(the_bin):
                    own[i] = int32(own[i] + local_start[uint32(i + uint32(1))])
            clear_counters(counters)
            cuda.syncthreads()
            load_tile(topk_ids, expert_map, tile_first, last, num_experts, steps, bucket)
            sort_tile(bucket, steps, counters, masks, local_start, in_order, warp_sums)
            for v in range(-(-capacity // threads)):
                i = uint32(t + uint32(v * threads))
                if i < uint32(capacity):
                    own[i] = int32(own[i] - local_start[i])
            cuda.syncthreads()
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

    return moe_align_block_size_many
