"""Device functions shared by the alignment kernels.

Each slot is counted in a bucket. Bucket 0 is for invalid ids, bucket 1 + e for expert e. The last of the ``capacity``
buckets, the drop bucket, is for slots that are ignored or out of range, so that no slot is a special case. Indices are
unsigned, because the compiler emits extra instructions for signed indices that may be negative.
"""

from functools import cache

from numba import cuda, int32, int64, uint32

from moe_numba.ptx.memory import st_shared_s32x4
from moe_numba.ptx.warp import FULL_MASK, redux_sync_add_s32

SLOT_BITS = 13  # low bits of a sorted entry: the slot's index among those that a CTA sorts; the high bits: its bucket
SLOT_MASK = (1 << SLOT_BITS) - 1
# Workspace of the kernels whose CTAs exchange counts, which share it: number of launches so far, offset of the rest
LAUNCH_COUNT, HEADER_WORDS = 0, 4
_CAPACITIES = (96, 288, 544, 1056, 8224)
_CAPACITIES_BEFORE_HOPPER = (96, 288, 544, 1056, 2080, 4128, 8224)  # less shared memory


def capacity_for(num_experts, capability=(9, 0)):
    """Return the smallest capacity for invalid ids, the experts, the end of the last expert, and dropped slots."""
    capacities = _CAPACITIES if capability >= (9, 0) else _CAPACITIES_BEFORE_HOPPER
    return next(c for c in capacities if num_experts + 3 <= c)


def check_launch_shape(threads, capacity):
    """Raise for what the kernels that count slots cannot be compiled for: partial warps, partial 16-byte vectors."""
    if threads % 32 or not 32 <= threads <= 1024:
        raise ValueError(f"threads is {threads}; it must be a multiple of 32 from 32 to 1024")
    if capacity % 4 or capacity < 4:
        raise ValueError(f"capacity is {capacity}; it must be a multiple of 4")


def check_sorted_shape(threads, slots_per_thread, capacity, sorted_at_once):
    """Raise for more slots or buckets than an entry of a sort in shared memory can name."""
    if not 1 <= slots_per_thread <= (1 << SLOT_BITS) // threads or capacity > 1 << (32 - SLOT_BITS):
        raise ValueError(
            f"threads is {threads}, slots_per_thread {slots_per_thread} and capacity {capacity}; a {sorted_at_once} "
            f"has at most {1 << SLOT_BITS} slots of {1 << (32 - SLOT_BITS)} buckets"
        )


@cuda.jit(device=True)
def local_id(value):
    """Convert an element of an expert map to int32; one of int64 that does not fit is -1, and no wrapped valid id."""
    return int32(value) if int64(int32(value)) == value else int32(-1)


@cache
def make_bucket_of(capacity, ignore_invalid_experts, has_map):
    """Make ``bucket_of(expert, expert_map, num_experts)``, the bucket of a slot."""
    invalid = capacity - 1 if ignore_invalid_experts else 0

    if ignore_invalid_experts and has_map:

        @cuda.jit(device=True)
        def bucket_of(expert, expert_map, num_experts):
            bucket = uint32(invalid)
            if expert >= 0 and expert < num_experts:
                bucket = uint32(uint32(expert) + uint32(1)) if local_id(expert_map[expert]) >= 0 else bucket
            return bucket

    else:

        @cuda.jit(device=True)
        def bucket_of(expert, expert_map, num_experts):
            return uint32(uint32(expert) + uint32(1)) if expert >= 0 and expert < num_experts else uint32(invalid)

    return bucket_of


@cache
def make_expert_of(has_map):
    """Make ``expert_of(bucket, expert_map)``, the value of ``expert_ids`` for a bucket's blocks."""
    if not has_map:

        @cuda.jit(device=True)
        def expert_of(bucket, expert_map):
            return int32(int32(bucket) - int32(1))

    else:

        @cuda.jit(device=True)
        def expert_of(bucket, expert_map):
            expert = int32(-1)
            if bucket > 0:
                expert = local_id(expert_map[bucket - 1])
            return expert

    return expert_of


_RECIPROCAL_BITS = 20


@cuda.jit(device=True)
def block_reciprocal(block_size):
    """Return 2**20 / block_size, rounded up, the factor with which :func:`blocks_for` divides."""
    return int32(uint32(uint32(block_size) + uint32((1 << _RECIPROCAL_BITS) - 1)) // uint32(block_size))


@cuda.jit(device=True)
def blocks_for(count, reciprocal):
    """Return the expert blocks of up to 1024 slots. A division would take ten times as many instructions."""
    return int32(int32(count * reciprocal + ((1 << _RECIPROCAL_BITS) - reciprocal)) >> _RECIPROCAL_BITS)


@cache
def make_clear(threads, num_words):
    """Make ``clear(array)``, which zeroes ``num_words`` int32 of shared memory. The caller must synchronise afterwards.

    ``num_words`` must be a multiple of 4 and the array 16-byte aligned. Dynamic shared memory is, if the sizes of all
    static shared arrays are multiples of 16 bytes.
    """
    num_vectors = num_words // 4

    @cuda.jit(device=True)
    def clear(array):
        for v in range(-(-num_vectors // threads)):
            i = uint32(cuda.threadIdx.x + v * threads)
            if i < uint32(num_vectors):
                st_shared_s32x4(array, int32(i * uint32(4)), int32(0), int32(0), int32(0), int32(0))

    return clear


@cache
def make_scan(threads):
    """Make ``scan(value, warp_sums)``, a block-wide exclusive sum: returns (sum over lower threads, total).

    All threads must call it. ``warp_sums`` are 32 int32 in shared memory; synchronise before reusing them.
    """
    num_warps = uint32(threads // 32)

    @cuda.jit(device=True)
    def scan(value, warp_sums):
        lane, warp = uint32(cuda.threadIdx.x & 31), uint32(cuda.threadIdx.x >> 5)
        cuda.syncwarp()
        inclusive = value
        for s in range(5):
            lower = cuda.shfl_up_sync(FULL_MASK, inclusive, 1 << s)
            inclusive = int32(inclusive + (lower if lane >= uint32(1 << s) else int32(0)))
        if lane == 31:
            warp_sums[warp] = inclusive
        cuda.syncthreads()
        sums = warp_sums[lane] if lane < num_warps else int32(0)
        total = redux_sync_add_s32(uint32(FULL_MASK), sums)
        lower_warps = redux_sync_add_s32(uint32(FULL_MASK), sums if lane < warp else int32(0))
        return int32(lower_warps + inclusive - value), total

    return scan


@cache
def make_assign_blocks(threads, capacity):
    """Make ``assign_blocks(counts, first_block, num_experts, block_size, warp_sums)``.

    It writes the first expert block of each bucket to ``first_block`` and returns the total number of expert blocks.
    A bucket's count is the sum of two elements of ``counts``, ``capacity`` apart. The caller must synchronise
    afterwards.
    """
    buckets_per_thread = -(-capacity // threads)
    scan = make_scan(threads)

    @cuda.jit(device=True)
    def assign_blocks(counts, first_block, num_experts, block_size, warp_sums):
        first_bucket = uint32(cuda.threadIdx.x * buckets_per_thread)
        blocks = cuda.local.array(buckets_per_thread, int32)
        thread_blocks = int32(0)
        for v in range(buckets_per_thread):
            bucket = uint32(first_bucket + uint32(v))
            blocks[v] = int32(0)
            if bucket <= uint32(num_experts):
                count = int32(counts[bucket] + counts[uint32(bucket + uint32(capacity))])
                blocks[v] = int32(uint32(count + block_size - 1) // uint32(block_size))
            thread_blocks = int32(thread_blocks + blocks[v])
        block, total = scan(thread_blocks, warp_sums)
        for v in range(buckets_per_thread):
            bucket = uint32(first_bucket + uint32(v))
            if bucket < uint32(capacity):
                first_block[bucket] = block
            block = int32(block + blocks[v])
        return total

    return assign_blocks


@cache
def make_write_padding(threads, capacity, has_map, index=int32):
    """Make ``write_padding(...)``, which writes everything but the slots: padding, expert ids, both tails, the total.

    Buckets are distributed round-robin over the warps of the grid. Each element has exactly one writer. ``index`` is
    the type of row numbers, which exceed the outputs' lengths by up to the number of threads in the grid.
    """
    warps_per_block = threads // 32
    expert_of = make_expert_of(has_map)

    @cuda.jit(device=True)
    def write_padding(
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
        thread, block = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        lane = int32(thread & 31)
        bucket = uint32(block * warps_per_block + (thread >> 5))
        while bucket <= uint32(num_experts):
            start_block, end_block = first_block[bucket], first_block[uint32(bucket + uint32(1))]
            if start_block < end_block:
                row = index(
                    start_block * block_size + counts[bucket] + counts[uint32(bucket + uint32(capacity))] + lane
                )
                while row < index(end_block * block_size):
                    sorted_token_ids[row] = numel
                    row = index(row + 32)
                expert = expert_of(bucket, expert_map)
                row = index(start_block + lane)
                while row < end_block:
                    expert_ids[row] = expert
                    row = index(row + 32)
            bucket = uint32(bucket + uint32(cuda.gridDim.x * warps_per_block))
        stride = int32(cuda.gridDim.x * threads)
        row = index(total_blocks * block_size + block * threads + thread)
        while row < length:
            sorted_token_ids[row] = numel
            row = index(row + stride)
        row = index(total_blocks + block * threads + thread)
        while row < num_blocks:
            expert_ids[row] = int32(-1)
            row = index(row + stride)
        if block == 0 and thread == 0:
            num_tokens_post_pad[0] = int32(total_blocks * block_size)

    return write_padding
