"""Wrong answers to the exercises of notebook 02: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint32

FULL = 0xFFFFFFFF


@cuda.jit
def copies(x, out):
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@cuda.jit
def scan_of_each_warp(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid % 32 >= 1 << k:
            value += below
    starts[tid] = value - counts[tid]


@cuda.jit
def inclusive_scan(counts, starts):
    total = int32(0)
    for i in range(cuda.threadIdx.x + 1):
        total += counts[i]
    starts[cuda.threadIdx.x] = total


@cuda.jit
def scan_without_barrier(counts, starts):
    sums = cuda.shared.array(2, int32)
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid % 32 >= 1 << k:
            value += below
    if tid % 32 == 31:
        sums[tid // 32] = value
    starts[tid] = value - counts[tid] + (sums[0] if tid >= 32 else 0)


@cuda.jit
def six_shuffles(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(6):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid >= 1 << k:
            value += below
    starts[tid] = value - counts[tid]


@cuda.jit
def sixth_shuffle_for_warp_1(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(6):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if (tid if k == 5 else tid % 32) >= 1 << k:
            value += below
    starts[tid] = value - counts[tid]


@cuda.jit
def exclusive_sums(counts, starts):
    sums = cuda.shared.array(2, int32)
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid % 32 >= 1 << k:
            value += below
    value -= counts[tid]
    if tid % 32 == 31:
        sums[tid // 32] = value
    cuda.syncthreads()
    starts[tid] = value + (sums[0] if tid >= 32 else 0)


@cuda.jit
def shuffle_in_a_branch(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    if tid % 32 >= 1:
        value += cuda.shfl_up_sync(FULL, value, 1)
    starts[tid] = value


@cuda.jit
def an_atomic_per_slot(ids, next_place, places):
    i = cuda.grid(1)
    places[i] = cuda.atomic.add(next_place, ids[i], 1)


@cuda.jit
def same_place_for_all(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    if cuda.threadIdx.x % 32 == cuda.ffs(same) - 1:
        cuda.atomic.add(next_place, ids[i], cuda.popc(same))
    places[i] = next_place[ids[i]]


@cuda.jit
def first_place_for_all(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    lowest, first = cuda.ffs(same) - 1, int32(0)
    if cuda.threadIdx.x % 32 == lowest:
        first = cuda.atomic.add(next_place, ids[i], cuda.popc(same))
    places[i] = cuda.shfl_sync(FULL, first, lowest)


@cuda.jit
def rank_without_base(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    places[i] = cuda.popc(same & uint32((uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1)))


def sglangs_length(numel, num_experts, block_size):
    return numel * block_size if numel < num_experts else numel + num_experts * (block_size - 1)


WRONG = [
    ("align-1", scan_of_each_warp, "warp 1 begins at 0; it must begin at 174, the sum of the counts of warp 0"),
    ("align-1", inclusive_scan, "that is the inclusive scan"),
    ("align-1", scan_without_barrier, "two threads race: .* it needs cuda.syncthreads"),
    ("align-1", shuffle_in_a_branch, "a lane is missing from a warp's operation"),
    ("align-1", six_shuffles, "a shuffle only reaches the lanes of its own warp"),
    ("align-1", sixth_shuffle_for_warp_1, "a shuffle only reaches the lanes of its own warp"),
    ("align-1", exclusive_sums, "warp 1 begins at 166, the exclusive sum .* own count 8; it must begin at 174"),
    ("align-1", copies, r"starts\[0\] is 1, not 0"),
    ("align-2", lambda n, e, b: n, "too few: 1 slot, 1 expert, blocks of 2 need 2 places for some routing, not 1"),
    ("align-2", lambda n, e, b: n + e * (b - 1), "not tight: 0 slots, 1 expert, blocks of 2 need 0, not 1"),
    ("align-2", sglangs_length, "sufficient, but not tight: 2 slots, 1 expert, blocks of 2 need 2, not 3"),
    ("align-2", lambda n, e, b: -(-n // b) * b, "too few: 2 slots, 2 experts, blocks of 2 need 4 places"),
    ("align-2", lambda n, e, b: n / 1, "the length is 0.0, which is no integer"),
    ("align-2", lambda n, e, b: ..., "not answered yet"),
    ("align-3", lambda experts: experts, "with 64 experts .* need 32 wavefronts .* without bank conflicts they need 1"),
    ("align-3", lambda experts: experts + 1, "with 7 experts and rows of 8 words, the 32 lanes need 8 wavefronts"),
    ("align-3", lambda experts: 33, "the pitch for 64 experts is 33, but a row holds 64 counters"),
    ("align-3", lambda experts: experts + 0.5, "the pitch for 64 experts is 64.5, which is no integer"),
    ("align-3", lambda experts: 1025, "the pitch for 64 experts is 1025; rows of at most 130 words fit"),
    ("align-3", 65, "the answer is 65; a function of the number of experts is needed"),
    ("align-3", lambda experts: ..., "not answered yet"),
    (
        "align-4",
        lambda t, threads, n: range(t, n, threads),
        "32 threads, 100 slots: slot 96 comes before slot 1 if both",
    ),
    ("align-4", lambda t, threads, n: range(n), "slot 0 is taken 32 times"),
    ("align-4", lambda t, threads, n: range(n) if t == 0 else (), "one thread takes 100 slots; shared evenly, 4"),
    ("align-4", lambda t, threads, n: range(t * n // threads, t * n // threads + 1), "slot 1 is taken 0 times"),
    ("align-4", lambda t, threads, n: range(4 * t, 4 * t + 4), "100 slots: there is no slot 100; the last is 99"),
    ("align-4", lambda t, threads, n: t * 4, "the slots of a thread are 0; return a range or a list"),
    ("align-4", lambda t, threads, n: ..., "not answered yet"),
    ("align-5", an_atomic_per_slot, "^the places are right, but with 128 atomic operations; .* would be 41"),
    ("align-5", same_place_for_all, "two threads race"),
    ("align-5", first_place_for_all, r"place \d+ occurs twice: each lane needs its rank in the group"),
    ("align-5", rank_without_base, r"the slots of expert 0 get the places \[.*, not 0 to 48, each once"),
]
