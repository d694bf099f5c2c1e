"""The device functions that the kernels of this room are put together from.

Buckets are counted from 0: one for invalid ids, one for each expert, and the last of a kernel's ``capacity``, the bin,
for slots that are dropped or not there. With the bin a slot is never a special case. Indices are unsigned: of a signed
one the compiler first asks whether it is negative.
"""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.ptx.memory import st_shared_s32x4
from moe_numba.ptx.warp import redux_sync_add_s32

FULL = 0xFFFFFFFF
CAPACITIES = (96, 288, 544, 1056, 8224)


def capacity_for(num_experts):
    """The smallest capacity for so many experts: invalid ids, experts, the end of the last expert, and the bin."""
    return next(c for c in CAPACITIES if num_experts + 3 <= c)


@cache
def make_bucket_of(capacity, ignore_invalid_experts, has_map):
    """``bucket_of(expert, expert_map, num_experts)``: the bucket of a slot."""
    invalid = capacity - 1 if ignore_invalid_experts else 0

    if ignore_invalid_experts and has_map:

        @cuda.jit(device=True)
        def bucket_of(expert, expert_map, num_experts):
            bucket = uint32(invalid)
            if expert >= 0 and expert < num_experts:
                bucket = uint32(uint32(expert) + uint32(1)) if expert_map[expert] >= 0 else bucket
            return bucket

    else:

        @cuda.jit(device=True)
        def bucket_of(expert, expert_map, num_experts):
            return uint32(uint32(expert) + uint32(1)) if expert >= 0 and expert < num_experts else uint32(invalid)

    return bucket_of


@cache
def make_expert_of(has_map):
    """``expert_of(bucket, expert_map)``: what ``expert_ids`` say of a bucket's blocks."""
    if not has_map:

        @cuda.jit(device=True)
        def expert_of(bucket, expert_map):
            return int32(int32(bucket) - int32(1))

    else:

        @cuda.jit(device=True)
        def expert_of(bucket, expert_map):
            expert = int32(-1)
            if bucket > 0:
                expert = int32(expert_map[bucket - 1])
            return expert

    return expert_of


@cache
def make_clear(threads, numbers):
    """``clear(array)``: zero so many numbers of shared memory, a multiple of 4; the caller's barrier must follow.

    The array starts at a multiple of 16 bytes: dynamic shared memory does if all other arrays are such multiples long.
    """
    quads = numbers // 4

    @cuda.jit(device=True)
    def clear(array):
        for v in range(-(-quads // threads)):
            i = uint32(cuda.threadIdx.x + v * threads)
            if i < uint32(quads):
                st_shared_s32x4(array, int32(i * uint32(4)), int32(0), int32(0), int32(0), int32(0))

    return clear


@cache
def make_scan(threads):
    """``scan(value, warp_sums)``: the sum over the block's threads below this one, and over all; all must call it.

    ``warp_sums`` is shared, 32 integers; a barrier must stand between two scans that use the same.
    """
    warps = uint32(threads // 32)

    @cuda.jit(device=True)
    def scan(value, warp_sums):
        lane, warp = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
        cuda.syncwarp()
        inclusive = value
        for s in range(5):
            below = cuda.shfl_up_sync(FULL, inclusive, 1 << s)
            inclusive = int32(inclusive + (below if lane >= uint32(1 << s) else int32(0)))
        if lane == 31:
            warp_sums[warp] = inclusive
        cuda.syncthreads()
        sums = warp_sums[lane] if lane < warps else int32(0)
        total = redux_sync_add_s32(uint32(FULL), sums)
        before = redux_sync_add_s32(uint32(FULL), sums if lane < warp else int32(0))
        return int32(before + inclusive - value), total

    return scan


@cache
def make_place_buckets(threads, capacity):
    """``place_buckets(counts, first_block, num_experts, block_size, warp_sums)``: the block at which a bucket starts.

    ``counts`` has a bucket's slots in two parts, ``capacity`` apart. Gives the number of blocks. The caller's barrier
    must follow.
    """
    share = -(-capacity // threads)
    scan = make_scan(threads)

    @cuda.jit(device=True)
    def place_buckets(counts, first_block, num_experts, block_size, warp_sums):
        first = uint32(cuda.threadIdx.x * share)
        blocks = cuda.local.array(share, int32)
        mine = int32(0)
        for v in range(share):
            bucket = uint32(first + uint32(v))
            blocks[v] = int32(0)
            if bucket <= uint32(num_experts):
                count = int32(counts[bucket] + counts[uint32(bucket + uint32(capacity))])
                blocks[v] = int32(uint32(count + block_size - 1) // uint32(block_size))
            mine = int32(mine + blocks[v])
        at, total = scan(mine, warp_sums)
        for v in range(share):
            bucket = uint32(first + uint32(v))
            if bucket < uint32(capacity):
                first_block[bucket] = at
            at = int32(at + blocks[v])
        return total

    return place_buckets


@cache
def make_fill(threads, capacity, has_map):
    """``fill(...)`` writes all that is no slot: padding, expert ids, both tails and the total.

    A warp takes a bucket, the warps of the whole grid take turns; each element has one writer.
    """
    warps = threads // 32
    expert_of = make_expert_of(has_map)

    @cuda.jit(device=True)
    def fill(
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
    ):
        t, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane = int32(t & 31)
        bucket = uint32(block * warps + (t >> 5))
        while bucket <= uint32(num_experts):
            start, end = first_block[bucket], first_block[uint32(bucket + uint32(1))]
            if start < end:
                row = int32(start * block_size + counts[bucket] + counts[uint32(bucket + uint32(capacity))] + lane)
                while row < int32(end * block_size):
                    sorted_token_ids[row] = numel
                    row = int32(row + 32)
                expert = expert_of(bucket, expert_map)
                row = int32(start + lane)
                while row < end:
                    expert_ids[row] = expert
                    row = int32(row + 32)
            bucket = uint32(bucket + uint32(cuda.gridDim.x * warps))
        stride = int32(cuda.gridDim.x * threads)
        row = int32(total_blocks * block_size + block * threads + t)
        while row < length:
            sorted_token_ids[row] = numel
            row = int32(row + stride)
        row = int32(total_blocks + block * threads + t)
        while row < num_blocks:
            expert_ids[row] = int32(-1)
            row = int32(row + stride)
        if block == 0 and t == 0:
            num_tokens_post_pad[0] = int32(total_blocks * block_size)

    return fill
