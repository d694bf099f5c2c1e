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
def rank_without_base(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    places[i] = cuda.popc(same & uint32((uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1)))


WRONG = [
    ("align-2", scan_of_each_warp, "warp 1 begins at 0; it must begin at 174, the sum of the counts of warp 0"),
    ("align-2", inclusive_scan, "that is the inclusive scan"),
    ("align-2", scan_without_barrier, "two threads race: .* it needs cuda.syncthreads"),
    ("align-2", shuffle_in_a_branch, "a lane is missing from a warp's operation"),
    ("align-2", copies, r"starts\[0\] is 1, not 0"),
    ("align-3", lambda n, e, b: n, "1 slots, 1 experts, blocks of 2: 1 positions are too few; .* take 2"),
    ("align-3", lambda n, e, b: n + e * (b - 1), "0 slots, 1 experts, blocks of 2: 1 positions, but 0 suffice"),
    ("align-3", lambda n, e, b: -(-n // b) * b, "2 slots, 2 experts, blocks of 2: 2 positions are too few"),
    ("align-3", lambda n, e, b: n / 1, "the length is 0.0, which is no integer"),
    ("align-3", lambda n, e, b: ..., "not answered yet"),
    ("align-4", an_atomic_per_slot, "correct, with 128 atomic operations; one per warp and expert would be 41"),
    ("align-4", same_place_for_all, "two threads race"),
    ("align-4", rank_without_base, r"the slots of expert 0 get the places \[.*, not 0 to 48, each once"),
    (
        "align-5",
        lambda t, threads, n: range(t, n, threads),
        "32 threads, 100 slots: slot 96 comes before slot 1 if both",
    ),
    ("align-5", lambda t, threads, n: range(n), "slot 0 is taken 32 times"),
    ("align-5", lambda t, threads, n: range(n) if t == 0 else (), "one thread takes 100 slots; shared evenly, 4"),
    ("align-5", lambda t, threads, n: range(t * n // threads, t * n // threads + 1), "slot 1 is taken 0 times"),
    ("align-5", lambda t, threads, n: ..., "not answered yet"),
    ("align-1", lambda experts: experts, "with 64 experts .* need 32 wavefronts .* without bank conflicts they need 1"),
    ("align-1", lambda experts: experts + 1, "with 7 experts and rows of 8 words, the 32 lanes need 8 wavefronts"),
    ("align-1", lambda experts: 33, r"a row holds 64 counters, but ROW_PITCH\(64\) is 33"),
    ("align-1", lambda experts: experts + 0.5, r"ROW_PITCH\(64\) is 64.5, which is no integer"),
    ("align-1", 65, "TypeError: 'int' object is not callable"),
    ("align-1", lambda experts: 1025, r"ROW_PITCH\(64\) is 1025; rows of at most 130 words fit"),
    ("align-1", lambda experts: ..., "not answered yet"),
]
