"""SGLang's versions 0x1 to 0x5 of the alignment in Numba: one main kernel whose parts a version chooses.

They follow `moe_align_kernel.cu` of sgl-project/sglang at each of the pull requests that the lesson links. Comment
lines such as `# scan` begin the phases after which `steps.kernel_phases` cuts the kernel off.
"""

from typing import Any, NamedTuple

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.align.sizes import EXPERTS, FULL
from moe_numba.course.steps.simulate import factory
from moe_numba.ptx.memory import atom_add_s32, st_global_s32x4

ENDS = EXPERTS + 1
SCAN_WARPS = -(-EXPERTS // 32)


@cuda.jit(device=True)
def round_up(count, block_size):
    return int32(uint32(count + block_size - 1) // uint32(block_size) * uint32(block_size))


# Counting


@cuda.jit(device=True)
def count_in_rows(counts, topk_ids, numel):
    """0x1: the row of a warp has the counters of 32 experts."""
    row = cuda.threadIdx.x // 32 * 32
    for i in range(32):
        if row + i < EXPERTS:
            counts[row + i] = 0
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        warp, offset = topk_ids[i] // 32, topk_ids[i] % 32
        cuda.atomic.add(counts, warp * 32 + offset, 1)
    cuda.syncthreads()


@cuda.jit(device=True)
def count_slots(counts, topk_ids, numel):
    """0x3: an index without rows."""
    tid = cuda.threadIdx.x
    if tid < EXPERTS:
        counts[tid] = 0
    cuda.syncthreads()
    for i in range(tid, numel, cuda.blockDim.x):
        cuda.atomic.add(counts, topk_ids[i], 1)
    cuda.syncthreads()


# Variants of 0x1's counting, which tell what it waits for


@cuda.jit(device=True)
def count_without_atomics(counts, topk_ids, numel):
    row = cuda.threadIdx.x // 32 * 32
    for i in range(32):
        if row + i < EXPERTS:
            counts[row + i] = 0
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        warp, offset = topk_ids[i] // 32, topk_ids[i] % 32
        if warp + offset == -1:  # never, but the compiler must load the ids to know
            counts[0] = 1
    cuda.syncthreads()


@cuda.jit(device=True)
def count_without_rows(counts, topk_ids, numel):
    row = cuda.threadIdx.x // 32 * 32
    for i in range(32):
        if row + i < EXPERTS:
            counts[row + i] = 0
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        cuda.atomic.add(counts, topk_ids[i], 1)
    cuda.syncthreads()


# Scans: from 0x3 on, `starts` in shared memory has a copy of `cumsum`, which the sort kernel counts on


@cuda.jit(device=True)
def one_thread_in_rows(counts, starts, cumsum, total_tokens_post_pad, block_size):
    """0x1: one thread, with the index of the rows."""
    if cuda.threadIdx.x == 0:
        start = int32(0)
        cumsum[0] = start
        for i in range(EXPERTS):
            warp, offset = i // 32, i % 32
            start = int32(start + round_up(counts[warp * 32 + offset], block_size))
            cumsum[i + 1] = start
        total_tokens_post_pad[0] = start
    cuda.syncthreads()


@cuda.jit(device=True)
def blelloch(counts, starts, cumsum, total_tokens_post_pad, block_size):
    """0x3: a tree in shared memory, up and down, with a barrier for each level."""
    tree = cuda.shared.array(EXPERTS, int32)
    tid, offset = cuda.threadIdx.x, 1
    if tid < EXPERTS:
        tree[tid] = round_up(counts[tid], block_size)
    cuda.syncthreads()
    while offset < EXPERTS:
        if tid < EXPERTS // (2 * offset):
            ai, bi = offset * (2 * tid + 1) - 1, offset * (2 * tid + 2) - 1
            tree[bi] += tree[ai]
        offset *= 2
        cuda.syncthreads()
    if tid == 0:
        starts[EXPERTS] = total_tokens_post_pad[0] = tree[EXPERTS - 1]
        tree[EXPERTS - 1] = 0
    cuda.syncthreads()
    while offset > 1:
        offset //= 2
        if tid < EXPERTS // (2 * offset):
            ai, bi = offset * (2 * tid + 1) - 1, offset * (2 * tid + 2) - 1
            left = tree[ai]
            tree[ai] = tree[bi]
            tree[bi] += left
        cuda.syncthreads()
    if tid < EXPERTS:
        starts[tid] = tree[tid]
    cuda.syncthreads()
    if tid <= EXPERTS:
        cumsum[tid] = starts[tid]


@cuda.jit(device=True)
def warp_exclusive_scan(v):
    """Return the sum of the values of all lanes below this one."""
    original, lane = v, cuda.threadIdx.x & 31
    for s in range(5):
        n = cuda.shfl_up_sync(FULL, v, 1 << s)
        if lane >= 1 << s:
            v = int32(v + n)
    return int32(v - original)


@cuda.jit(device=True)
def total_of_block(v, warp_sums):
    """Return the sum of the values of all threads: the first of the two passes of 0x4."""
    tid = cuda.threadIdx.x
    warp_sum = int32(warp_exclusive_scan(v) + v)
    if tid & 31 == 31:
        warp_sums[tid // 32] = warp_sum
    cuda.syncthreads()
    if tid < 32:
        sums = warp_sums[tid] if tid < SCAN_WARPS else int32(0)
        warp_sums[tid] = int32(warp_exclusive_scan(sums) + sums)
    cuda.syncthreads()
    return warp_sums[SCAN_WARPS - 1]


@cuda.jit(device=True)
def scan_of_block(v, warp_sums):
    """Return the sum of the values of all threads below this one."""
    warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x & 31
    before = warp_exclusive_scan(v)
    if lane == 31:
        warp_sums[warp] = int32(before + v)
    cuda.syncthreads()
    if warp == 0:
        sums = warp_sums[lane] if lane < SCAN_WARPS else int32(0)
        warp_sums[lane] = warp_exclusive_scan(sums)
    cuda.syncthreads()
    return int32(before + warp_sums[warp])


@cuda.jit(device=True)
def two_passes(counts, starts, cumsum, total_tokens_post_pad, block_size):
    """0x4 in SGLang: one scan for the total, then one for the starts, through shared memory."""
    scanned, warp_sums = cuda.shared.array(EXPERTS, int32), cuda.shared.array(32, int32)
    tid, padded = cuda.threadIdx.x, int32(0)
    if tid < EXPERTS:
        padded = round_up(counts[tid], block_size)
        scanned[tid] = padded
    total = total_of_block(padded, warp_sums)
    if tid == 0:
        starts[EXPERTS] = total_tokens_post_pad[0] = total
    cuda.syncthreads()
    start = scan_of_block(scanned[tid] if tid < EXPERTS else int32(0), warp_sums)
    if tid < EXPERTS:
        scanned[tid] = start
    cuda.syncthreads()
    if tid < EXPERTS:
        starts[tid] = scanned[tid]
    if tid <= EXPERTS:
        cumsum[tid] = starts[tid]
    cuda.syncthreads()  # PR 37663 added this one


@cuda.jit(device=True)
def one_pass(counts, starts, cumsum, total_tokens_post_pad, block_size):
    """0x4 as the article draws it: the end of the last expert is the total."""
    warp_sums = cuda.shared.array(32, int32)
    tid = cuda.threadIdx.x
    padded = round_up(counts[tid], block_size) if tid < EXPERTS else int32(0)
    start = scan_of_block(padded, warp_sums)
    if tid < EXPERTS:
        starts[tid] = start
        cumsum[tid] = start
    if tid == EXPERTS - 1:
        starts[EXPERTS] = cumsum[EXPERTS] = total_tokens_post_pad[0] = int32(start + padded)
    cuda.syncthreads()


# expert_ids


@cuda.jit(device=True)
def thread_per_expert(starts, cumsum, expert_ids, block_size):
    """0x1: the thread of an expert writes all blocks of the expert."""
    tid = cuda.threadIdx.x
    if tid < EXPERTS:
        for i in range(cumsum[tid], cumsum[tid + 1], block_size):
            expert_ids[uint32(i) // uint32(block_size)] = tid


@cuda.jit(device=True)
def thread_per_expert_shared(starts, cumsum, expert_ids, block_size):
    tid = cuda.threadIdx.x
    if tid < EXPERTS:
        for i in range(starts[tid], starts[tid + 1], block_size):
            expert_ids[uint32(i) // uint32(block_size)] = tid


@cuda.jit(device=True)
def thread_per_block(starts, cumsum, expert_ids, block_size):
    """0x3: the thread of a block searches for the last expert that starts at or before it."""
    blocks = int32(uint32(starts[EXPERTS]) // uint32(block_size))
    for i in range(cuda.threadIdx.x, blocks, cuda.blockDim.x):
        left, right = int32(0), int32(EXPERTS)
        while left < right:
            middle = int32((left + right) >> 1)
            if starts[middle] <= i * block_size:
                left = int32(middle + 1)
            else:
                right = middle
        expert_ids[i] = left - 1


# The kernels


@factory
def make_port(count, scan, write_expert_ids, fills_first, fills_last, second_cta_fills):
    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        counts = cuda.shared.array(EXPERTS, int32)
        starts = cuda.shared.array(ENDS, int32)
        if second_cta_fills:
            if cuda.blockIdx.x == 1:
                for i in range(cuda.threadIdx.x, length, cuda.blockDim.x):
                    sorted_token_ids[i] = numel
                return
        # fill first
        if fills_first:
            for i in range(cuda.threadIdx.x, length, cuda.blockDim.x):
                sorted_token_ids[i] = numel
        # count
        count(counts, topk_ids, numel)
        # scan
        scan(counts, starts, cumsum, total_tokens_post_pad, block_size)
        # expert_ids
        write_expert_ids(starts, cumsum, expert_ids, block_size)
        # fill
        if fills_last:
            for i in range(cuda.threadIdx.x, (total_tokens_post_pad[0] + 3) // 4, cuda.blockDim.x):
                st_global_s32x4(sorted_token_ids, 4 * i, numel, numel, numel, numel)

    return kernel


@cuda.jit
def sort_slots(topk_ids, sorted_token_ids, cumsum, numel):
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        place = atom_add_s32(cumsum, topk_ids[i], 1)
        sorted_token_ids[place] = i


@cuda.jit
def sort_replayed(topk_ids, sorted_token_ids, cumsum, numel, mask):
    """The sort kernel without the main kernel before it: counters go on, so places wrap around."""
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        place = atom_add_s32(cumsum, topk_ids[i], 1)
        sorted_token_ids[place & mask] = i


class Port(NamedTuple):
    """A version: what `make_port` takes, and where the fill is ("apart" is a launch of its own)."""

    parts: tuple[Any, ...]
    fill: str  # "apart", "last", "first" or "second CTA"

    @property
    def arguments(self) -> tuple:
        """What `make_port` takes."""
        return *self.parts, *(self.fill == place for place in ("first", "last", "second CTA"))


PORTS = {
    "0x1": Port((count_in_rows, one_thread_in_rows, thread_per_expert), "apart"),
    "0x2": Port((count_in_rows, one_thread_in_rows, thread_per_expert), "last"),
    "0x3 without search": Port((count_slots, blelloch, thread_per_expert_shared), "last"),
    "0x3": Port((count_slots, blelloch, thread_per_block), "last"),
    "0x4": Port((count_slots, two_passes, thread_per_block), "last"),
    "0x4, one pass": Port((count_slots, one_pass, thread_per_block), "last"),
    "0x4, filling first": Port((count_slots, one_pass, thread_per_block), "first"),
    "0x5": Port((count_slots, one_pass, thread_per_block), "second CTA"),
}
