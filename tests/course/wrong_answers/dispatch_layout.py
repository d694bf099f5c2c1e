"""Wrong answers to the exercises of notebook 07: (exercise, answer, what the message must match)."""

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.dispatch_layout.exercises import add_flags, sum_counts
from moe_numba.course.lessons.dispatch_layout.exercises import count_for_ranks as counts_once
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from wrong_answers import changed

FULL = 0xFFFFFFFF


@cuda.jit
def compares_with_the_previous(topk_idx, per_rank, experts_per_rank):
    token = cuda.grid(1)
    previous = int32(-1)
    for k in range(topk_idx.shape[1]):
        expert = int32(topk_idx[token, k])
        if expert >= 0:
            rank = expert // experts_per_rank
            if rank != previous:
                cuda.atomic.add(per_rank, rank, int32(1))
            previous = rank


@cuda.jit
def counts_every_expert(topk_idx, per_rank, experts_per_rank):
    for k in range(topk_idx.shape[1]):
        expert = int32(topk_idx[cuda.grid(1), k])
        if expert >= 0:
            cuda.atomic.add(per_rank, expert // experts_per_rank, int32(1))


@cuda.jit
def counts_padding(topk_idx, per_rank, experts_per_rank):
    seen = int32(0)
    for k in range(topk_idx.shape[1]):
        seen = int32(seen | (int32(1) << int32((topk_idx[cuda.grid(1), k] + 16) % 16 // experts_per_rank)))
    for rank in range(4):
        if (seen >> rank) & 1:
            cuda.atomic.add(per_rank, rank, int32(1))


@cuda.jit
def adds_without_atomics(topk_idx, per_rank, experts_per_rank):
    seen = int32(0)
    for k in range(topk_idx.shape[1]):
        expert = int32(topk_idx[cuda.grid(1), k])
        if expert >= 0:
            seen = int32(seen | (int32(1) << int32(expert // experts_per_rank)))
    for rank in range(4):
        if (seen >> rank) & 1:
            per_rank[rank] += 1


@cuda.jit
def one_addition_per_flag(flags, per_rank):
    token = cuda.grid(1)
    if token < flags.shape[0]:
        for rank in range(8):
            if flags[token, rank] != 0:
                cuda.atomic.add(per_rank, rank, int32(1))


@cuda.jit
def ballot_in_a_branch(flags, per_rank):
    token = cuda.grid(1)
    if token < flags.shape[0]:
        for rank in range(8):
            count = cuda.popc(uint32(cuda.ballot_sync(FULL, flags[token, rank] != 0)))
            if cuda.threadIdx.x % 32 == 0:
                cuda.atomic.add(per_rank, rank, count)


@cuda.jit
def every_lane_adds(flags, per_rank):
    token = cuda.grid(1)
    for rank in range(8):
        flag = token < flags.shape[0] and flags[token, rank] != 0
        cuda.atomic.add(per_rank, rank, cuda.popc(uint32(cuda.ballot_sync(FULL, flag))))


@cuda.jit
def one_warp_adds(flags, per_rank):
    token = cuda.grid(1)
    for rank in range(8):
        flag = token < flags.shape[0] and flags[token, rank] != 0
        count = cuda.popc(uint32(cuda.ballot_sync(FULL, flag)))
        if cuda.threadIdx.x == 0:
            cuda.atomic.add(per_rank, rank, count)


@cuda.jit
def clears_columns(ids, per_expert):
    rows = cuda.shared.array((64, 32), int32)
    t = cuda.threadIdx.x
    for j in range(32):
        rows[t, j] = int32(0)
    rows[t, ids[t]] += int32(1)
    cuda.syncthreads()
    if t < 32:
        total = int32(0)
        for i in range(64):
            total = int32(total + rows[i, t])
        per_expert[t] = total


@cuda.jit
def clears_padded_rows(ids, per_expert):
    rows = cuda.shared.array((64, 33), int32)
    t = cuda.threadIdx.x
    for j in range(32):
        rows[t, j] = int32(0)
    rows[t, ids[t]] += int32(1)
    cuda.syncthreads()
    if t < 32:
        total = int32(0)
        for i in range(64):
            total = int32(total + rows[i, t])
        per_expert[t] = total


@cuda.jit
def clears_rows_without_a_barrier(ids, per_expert):
    rows = cuda.shared.array((64, 32), int32)
    t = cuda.threadIdx.x
    for i in range(32):
        rows[2 * i + t // 32, t % 32] = int32(0)
    rows[t, ids[t]] += int32(1)
    cuda.syncthreads()
    if t < 32:
        total = int32(0)
        for i in range(64):
            total = int32(total + rows[i, t])
        per_expert[t] = total


@cuda.jit
def clears_half_of_the_rows(ids, per_expert):
    rows = cuda.shared.array((64, 32), int32)
    t = cuda.threadIdx.x
    for i in range(32):
        rows[i, t % 32] = int32(0)
    cuda.syncthreads()
    rows[t, ids[t]] += int32(1)
    cuda.syncthreads()
    if t < 32:
        total = int32(0)
        for i in range(64):
            total = int32(total + rows[i, t])
        per_expert[t] = total


@cuda.jit
def sums_one_warp(ids, per_expert):
    rows = cuda.shared.array((64, 32), int32)
    t = cuda.threadIdx.x
    for i in range(32):
        rows[2 * i + t // 32, t % 32] = int32(0)
    cuda.syncthreads()
    rows[t, ids[t]] += int32(1)
    cuda.syncthreads()
    if t < 32:
        total = int32(0)
        for i in range(32):
            total = int32(total + rows[i, t])
        per_expert[t] = total


@cuda.jit
def counts_without_a_table(ids, per_expert):
    t = cuda.threadIdx.x
    if t < 32:
        total = int32(0)
        for i in range(64):
            total = int32(total + (ids[i] == t))
        per_expert[t] = total


@cuda.jit
def counts_in_one_row(ids, per_expert):
    row = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    if t < 32:
        row[t] = int32(0)
    cuda.syncthreads()
    cuda.atomic.add(row, ids[t], int32(1))
    cuda.syncthreads()
    if t < 32:
        per_expert[t] = row[t]


@cuda.jit
def no_cluster_barrier(counts, sums):
    parts = cuda.shared.array(8, int32)
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    if t < 8:
        st_cluster_s32(parts, cta, t, counts[8 * cta + t])
    cuda.syncthreads()
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + parts[other])
        sums[cta] = total


@cuda.jit
def barrier_after_only(counts, sums):
    parts = cuda.shared.array(8, int32)
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    barrier_cluster_arrive()
    if t < 8:
        st_cluster_s32(parts, cta, t, counts[8 * cta + t])
    cuda.syncwarp()
    barrier_cluster_wait()
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + parts[other])
        sums[cta] = total


@cuda.jit
def barrier_before_only(counts, sums):
    parts = cuda.shared.array(8, int32)
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    barrier_cluster_arrive()
    barrier_cluster_wait()
    if t < 8:
        st_cluster_s32(parts, cta, t, counts[8 * cta + t])
    cuda.syncthreads()
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + parts[other])
        sums[cta] = total


@cuda.jit
def barrier_of_some_lanes(counts, sums):
    parts = cuda.shared.array(8, int32)
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    barrier_cluster_arrive()
    if t < 8:
        barrier_cluster_wait()
        st_cluster_s32(parts, cta, t, counts[8 * cta + t])
        barrier_cluster_arrive()
    barrier_cluster_wait()
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + parts[other])
        sums[cta] = total


@cuda.jit
def sums_a_row(counts, sums):
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + counts[8 * cta + other])
        sums[cta] = total


@cuda.jit
def sums_from_global_memory(counts, sums):
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + counts[8 * other + cta])
        sums[cta] = total


WRONG = [
    (
        "dispatch_layout-1",
        compares_with_the_previous,
        r"experts \[2, 5, 1, 12\], on ranks \[0, 1, 0, 3\], adds 2 to rank 0, not 1",
    ),
    (
        "dispatch_layout-1",
        counts_every_expert,
        r"experts \[0, 1, 2, 3\], on ranks \[0, 0, 0, 0\], adds 4 to rank 0, not 1",
    ),
    (
        "dispatch_layout-1",
        counts_padding,
        r"experts \[-1, -1, -1, -1\], on ranks \[none, .*\], adds 1 to rank 3, not 0",
    ),
    ("dispatch_layout-1", adds_without_atomics, "two threads race: .*per_rank"),
    (
        "dispatch_layout-1",
        changed(counts_once, ("int32(expert // experts_per_rank)", "expert")),
        r"experts \[0, 1, 2, 3\], on ranks \[0, 0, 0, 0\], adds 4 to rank 0, not 1",
    ),
    ("dispatch_layout-1", changed(counts_once, ("expert >= 0", "expert > 0")), "adds 0 to rank 0, not 1"),
    ("dispatch_layout-2", one_addition_per_flag, r"right after \d+ atomic additions; 4 warps and 8 ranks need 32"),
    ("dispatch_layout-2", ballot_in_a_branch, "104 tokens: not all lanes of a warp execute the ballot"),
    ("dispatch_layout-2", every_lane_adds, r"per_rank\[0\] is 4096, not 128; the warps' tokens have 32, 32, 32, 32"),
    ("dispatch_layout-2", one_warp_adds, r"per_rank\[0\] is 64, not 128"),
    ("dispatch_layout-2", changed(add_flags, ("token < flags.shape[0] and ", "")), "out of bounds: .* outside flags"),
    (
        "dispatch_layout-2",
        changed(add_flags, ("cuda.atomic.add(per_rank, rank, count)", "per_rank[rank] += count")),
        "race",
    ),
    ("dispatch_layout-3", clears_columns, "right, but bank conflicts cost 1984 additional wavefronts"),
    ("dispatch_layout-3", clears_padded_rows, "the table takes 8448 bytes instead of 8192: keep a row of 32 words"),
    ("dispatch_layout-3", clears_rows_without_a_barrier, "two threads race: .* a barrier must separate clearing"),
    ("dispatch_layout-3", clears_half_of_the_rows, r"per_expert\[0\] is -.*, of 64 tokens: not all rows are cleared"),
    ("dispatch_layout-3", sums_one_warp, r"per_expert\[0\] is 7, not 13"),
    ("dispatch_layout-3", counts_without_a_table, "the table takes 0 bytes instead of 8192: keep a row of 32 words"),
    ("dispatch_layout-3", counts_in_one_row, "the table takes 128 bytes instead of 8192: keep a row of 32 words"),
    ("dispatch_layout-4", no_cluster_barrier, "before a cluster barrier has shown that this CTA has started"),
    ("dispatch_layout-4", barrier_after_only, "before a cluster barrier has shown that this CTA has started"),
    ("dispatch_layout-4", barrier_before_only, "before all other CTAs have stored: cuda.syncthreads"),
    ("dispatch_layout-4", barrier_of_some_lanes, "not all threads reach the barrier"),
    ("dispatch_layout-4", sums_a_row, r"seed 0, sums is .*, not \["),
    ("dispatch_layout-4", sums_from_global_memory, "the CTAs do not exchange their counts through shared memory"),
    (
        "dispatch_layout-4",
        changed(sum_counts, ("arrive()\n    barrier_cluster_wait()  # all CTAs have started", "wait()")),
        r"each barrier_cluster_wait\(\) needs one barrier_cluster_arrive\(\)",
    ),
    ("dispatch_layout-4", changed(sum_counts, ("parts, cta, t, counts", "parts, t, cta, counts")), "seed 0, sums is"),
]
