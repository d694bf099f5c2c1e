"""Exercises of the notebook on the dispatch layout."""

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, kernel_test
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.runtime.launch import launch

_ALL_LANES = 0xFFFFFFFF


# 1: a token counts once for a rank


@cuda.jit
def count_for_ranks(topk_idx, per_rank, experts_per_rank):
    token = cuda.grid(1)
    seen = int32(0)  # a bit per rank
    for k in range(topk_idx.shape[1]):
        expert = int32(topk_idx[token, k])
        if expert >= 0:
            bit = int32(int32(1) << int32(expert // experts_per_rank))
            if not seen & bit:
                cuda.atomic.add(per_rank, expert // experts_per_rank, int32(1))
            seen = int32(seen | bit)


_TOKENS = [[0, 1, 2, 3], [0, 5, 9, 15], [-1, -1, -1, -1], [7, -1, 6, 8], [2, 5, 1, 12], [13, -1, 3, 14]]  # 16 experts


def _count_run(ids, case):
    per_rank = [sum(any(expert // 4 == rank for expert in token if expert >= 0) for token in ids) for rank in range(4)]
    arguments = {"topk_idx": np.array(ids), "per_rank": np.zeros(4, np.int32), "experts_per_rank": 4}
    return Run((-(-len(ids) // 32), min(len(ids), 32)), arguments, {"per_rank": per_rank}, case)


_COUNT_RUNS = [
    *(_count_run([token], f"a token with the experts {token}") for token in _TOKENS),
    _count_run(np.random.default_rng(0).integers(-1, 16, (64, 4)).tolist(), "64 tokens"),
]


# 2: one atomic addition per warp


@cuda.jit
def add_flags(flags, per_rank):
    token, lane = cuda.grid(1), cuda.threadIdx.x % 32
    for rank in range(8):
        flag = token < flags.shape[0] and flags[token, rank] != 0
        count = cuda.popc(uint32(cuda.ballot_sync(_ALL_LANES, flag)))
        if lane == 0:
            cuda.atomic.add(per_rank, rank, count)


def _flags(tokens):
    flags = np.random.default_rng(tokens).integers(0, 2, (tokens, 8)).astype(np.uint8)
    flags[:, 0] = 1
    per_rank = np.zeros(8, np.int32)
    return Run((2, 64), {"flags": flags, "per_rank": per_rank}, {"per_rank": flags.sum(axis=0)}, f"{tokens} tokens")


# 3: clearing without bank conflicts


@cuda.jit
def count_experts(ids, per_expert):
    rows = cuda.shared.array((64, 32), int32)
    t = cuda.threadIdx.x
    for i in range(32):
        rows[2 * i + t // 32, t % 32] = int32(0)
    cuda.syncthreads()
    rows[t, ids[t]] += int32(1)
    cuda.syncthreads()
    if t < 32:
        total = int32(0)
        for i in range(64):
            total = int32(total + rows[i, t])
        per_expert[t] = total


def _ids(ids):
    per_expert = np.bincount(ids, minlength=32)
    return Run((1, 64), {"ids": ids, "per_expert": np.full(32, -7, np.int32)}, {"per_expert": per_expert})


_TABLE_BYTES = 64 * 32 * 4
_EQUAL_IDS = np.arange(64, dtype=np.int32) % 5
_DISTINCT_IDS = np.concatenate([np.arange(32), np.arange(32)[::-1]]).astype(np.int32)  # a warp's lanes use all banks


# 4: the barriers of a cluster


@cuda.jit
def sum_counts(counts, sums):
    parts = cuda.shared.array(8, int32)
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    barrier_cluster_arrive()
    barrier_cluster_wait()  # all CTAs have started
    if t < 8:
        st_cluster_s32(parts, cta, t, counts[8 * cta + t])
    cuda.syncwarp()
    barrier_cluster_arrive()
    barrier_cluster_wait()  # all CTAs have stored
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + parts[other])
        sums[cta] = total


_CLUSTER_COUNTS = torch.arange(64, dtype=torch.int32) * 5 % 64
_CLUSTER = Run(
    lambda kernel, *arguments: launch(kernel, 8, 32, *arguments, cluster=8),
    {"counts": _CLUSTER_COUNTS, "sums": torch.full((8,), -7, dtype=torch.int32)},
    {"sums": _CLUSTER_COUNTS.view(8, 8).sum(dim=0)},
)


EXERCISES = {
    1: Exercise(
        "a kernel that adds 1 to each rank that holds at least one of the token's experts",
        kernel_test(*_COUNT_RUNS),
        "The ids are not sorted by rank, so the previous id is not enough. Keep a bit mask of the ranks that the token "
        "has been counted for.",
        count_for_ranks,
    ),
    2: Exercise(
        "a kernel in which a warp adds at most once to each rank's counter",
        kernel_test(_flags(128), _flags(104), at_most={"global atomics": 4 * 8}),  # 104: the last warp has 8 tokens
        "cuda.ballot_sync(0xFFFFFFFF, flag) returns a mask with a bit per lane, and cuda.popc counts its bits. All 32 "
        "lanes must execute it; a lane without a token has the flag False.",
        add_flags,
    ),
    3: Exercise(
        "a kernel that counts in rows of 32 words and has no bank conflicts if the experts of a warp are distinct",
        kernel_test(
            _ids(_EQUAL_IDS),
            _ids(_DISTINCT_IDS),
            at_most={"bytes of shared memory": _TABLE_BYTES, "bank conflicts": 0},
            at_least={"bytes of shared memory": _TABLE_BYTES},
        ),
        "Which 32 words lie in 32 different banks? Let a warp clear them together. Then a thread clears counters that "
        "other threads add to.",
        count_experts,
    ),
    4: Exercise(
        "a kernel in which CTA c of a cluster sums element c of all CTAs' counts",
        kernel_test(_CLUSTER, seeds=4, at_least={"bytes stored to other CTAs": 7 * 8 * 4}),
        "barrier_cluster_arrive() followed by barrier_cluster_wait() is a barrier of all CTAs. Other CTAs must have "
        "started before a thread stores into their memory, and all stores must precede the sum.",
        sum_counts,
    ),
}
