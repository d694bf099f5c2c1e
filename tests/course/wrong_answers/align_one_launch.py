"""Wrong answers to the exercises of notebook 03: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32, st_relaxed_gpu_s32


@cuda.jit
def ranks_by_arrival(ids, ranks):
    counts = cuda.shared.array(8, int32)
    i = cuda.threadIdx.x
    if i < 8:
        counts[i] = 0
    cuda.syncthreads()
    ranks[i] = cuda.atomic.add(counts, ids[i], 1)


@cuda.jit
def ranks_within_the_warp(ids, ranks):
    same = uint32(cuda.match_any_sync(0xFFFFFFFF, ids[cuda.threadIdx.x]))
    ranks[cuda.threadIdx.x] = cuda.popc(same & uint32((uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1)))


@cuda.jit
def signed_mask(ids, ranks):
    below = uint32((uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1))
    ranks[cuda.threadIdx.x] = cuda.popc(cuda.match_any_sync(0xFFFFFFFF, ids[cuda.threadIdx.x]) & below)


@cuda.jit
def goal_is_one_too_high(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    goal = int32((atom_add_relaxed_gpu_s32(counter, 0, 1) // 3 + 1) * 3 + 1)
    while ld_relaxed_gpu_s32(counter, 0) < goal:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


@cuda.jit
def goal_wraps(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    goal = int32((atom_add_relaxed_gpu_s32(counter, 0, 1) // 3 + 1) * 3)
    while ld_relaxed_gpu_s32(counter, 0) < goal:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


@cuda.jit
def goal_wraps_at_32_bits(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    goal = int32((uint32(atom_add_relaxed_gpu_s32(counter, 0, 1)) // uint32(3) + uint32(1)) * uint32(3))
    while int32(ld_relaxed_gpu_s32(counter, 0) - goal) < 0:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


@cuda.jit
def does_not_wait(values, rows, sums, counter):
    rows[cuda.blockIdx.x] = values[cuda.blockIdx.x]
    sums[cuda.blockIdx.x] = rows[0] + rows[1] + rows[2]


@cuda.jit
def works_once(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    atom_add_relaxed_gpu_s32(counter, 0, 1)
    while ld_relaxed_gpu_s32(counter, 0) != 3:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


@cuda.jit
def flag_before_value(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    st_relaxed_gpu_s32(flags, cta, 1)
    prefix[cta] = before + values[cta]


@cuda.jit
def one_fence(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    prefix[cta] = before + values[cta]
    cuda.threadfence()
    st_relaxed_gpu_s32(flags, cta, 1)


@cuda.jit
def fence_of_the_reader_only(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        cuda.threadfence()
        before = prefix[cta - 1]
    prefix[cta] = before + values[cta]
    st_relaxed_gpu_s32(flags, cta, 1)


@cuda.jit
def no_fence(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    prefix[cta] = before + values[cta]
    st_relaxed_gpu_s32(flags, cta, 1)


@cuda.jit
def own_value_only(values, prefix, flags):
    prefix[cuda.blockIdx.x] = values[cuda.blockIdx.x]


WRONG = [
    (
        "align_one_launch-1",
        ranks_by_arrival,
        r"seed 0, ids\[.*\] is expert .* gets rank .* earlier elements have this expert",
    ),
    ("align_one_launch-1", ranks_within_the_warp, r"seed 0, ids\[3.\] is expert . and gets rank 0"),
    ("align_one_launch-1", signed_mask, r"are int32 and may be negative: convert them with uint32\(...\)"),
    ("align_one_launch-2", goal_wraps, "after 715,827,882 launches, when the counter is 2,147,483,646: "),
    ("align_one_launch-2", goal_wraps_at_32_bits, "after 1,431,655,765 launches, when the counter is -1: "),
    ("align_one_launch-2", does_not_wait, "the first launches: a CTA passed the barrier before .*DataRace"),
    ("align_one_launch-2", works_once, "the first launches: a CTA waits for a value .*Deadlock"),
    ("align_one_launch-2", goal_is_one_too_high, "the first launches: a CTA waits for a value .*Deadlock"),
    ("align_one_launch-3", flag_before_value, "two threads race: .*must store the value before the flag .*prefix"),
    ("align_one_launch-3", one_fence, "two threads race: the reader has no fence between .*prefix"),
    ("align_one_launch-3", fence_of_the_reader_only, "two threads race: the writer has no fence between .*prefix"),
    ("align_one_launch-3", no_fence, "two threads race: both the reader and the writer need a fence .*prefix"),
    ("align_one_launch-3", own_value_only, r"prefix is \[5, 3, 8, 1\], not \[5, 8, 16, 17\]"),
    ("align_one_launch-4", 65535, "three numbers are needed"),
    ("align_one_launch-4", (65536, 1, 5), "a count of 65536, which needs 17 bits"),
    ("align_one_launch-4", (32767, 1, 5), "32767 slots per CTA: the largest count of 16 bits is another number"),
    ("align_one_launch-4", (65535, 65537, 4), "= 0x50001; its halves are not 65537 and 4"),
    ("align_one_launch-4", (65535, ..., 5), "not answered yet"),
]
