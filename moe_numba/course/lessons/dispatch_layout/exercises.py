"""Exercises of the notebook on the dispatch layout."""

import numpy as np
import torch

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.exercises import Exercise
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.runtime.launch import launch

_ALL_LANES = 0xFFFFFFFF
_SEEDS, _RANKS = 4, 4


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


def _counts_tokens_once(kernel):
    for token in _TOKENS:
        found, wanted = (how([token]) for how in (lambda ids: _run_counts(kernel, ids), _tokens_per_rank))
        if found != wanted:
            rank = next(r for r in range(_RANKS) if found[r] != wanted[r])
            named = [r if r >= 0 else "none" for r in (expert // 4 for expert in token)]
            return (
                f"a single token with experts {token}, on ranks [{', '.join(map(str, named))}], adds {found[rank]} to "
                f"rank {rank}, not {wanted[rank]}"
            )
    ids = np.random.default_rng(0).integers(-1, 16, (64, 4)).tolist()
    found, wanted = _run_counts(kernel, ids), _tokens_per_rank(ids)
    return None if found == wanted else f"64 tokens: per_rank is {found}, not {wanted}; each thread has another token"


def _run_counts(kernel, ids):
    per_rank = np.zeros(_RANKS, np.int32)
    kernel[-(-len(ids) // 32), min(len(ids), 32)](np.array(ids), per_rank, 4)
    return per_rank.tolist()


def _tokens_per_rank(ids):
    ranks = [{expert // 4 for expert in token if expert >= 0} for token in ids]
    return [sum(rank in of_token for of_token in ranks) for rank in range(_RANKS)]


# 2: one atomic addition per warp


@cuda.jit
def add_flags(flags, per_rank):
    token, lane = cuda.grid(1), cuda.threadIdx.x % 32
    for rank in range(8):
        flag = token < flags.shape[0] and flags[token, rank] != 0
        count = cuda.popc(uint32(cuda.ballot_sync(_ALL_LANES, flag)))
        if lane == 0:
            cuda.atomic.add(per_rank, rank, count)


def _adds_once_per_warp(kernel):
    warps, most = 4, 4 * 8
    for tokens in (128, 104):  # 104: the last warp has 8 tokens
        flags = np.random.default_rng(tokens).integers(0, 2, (tokens, 8)).astype(np.uint8)
        flags[:, 0] = 1
        per_rank, wanted = np.zeros(8, np.int32), flags.sum(axis=0, dtype=np.int32)
        try:
            with simulator.trace(accesses=True) as events:
                kernel[2, 64](flags, per_rank)
        except simulator.MissingLane as error:
            return (
                f"{tokens} tokens: not all lanes of a warp execute the ballot. Lanes without a token, or with a flag "
                f"of 0, must execute it too ({error})"
            )
        if (wrong := np.flatnonzero(per_rank != wanted)).size:
            rank, warp_counts = wrong[0], flags[:, wrong[0]].reshape(-1, 8).sum(axis=1, dtype=int)
            by_warp = [int(warp_counts[first : first + 4].sum()) for first in range(0, len(warp_counts), 4)]
            return (
                f"{tokens} tokens: per_rank[{rank}] is {per_rank[rank]}, not {wanted[rank]}; the warps' tokens have "
                f"{', '.join(map(str, by_warp))} flags of this rank"
            )
        atomics = sum("atomic" in event.what for event in events)
        if atomics > most:
            return (
                f"{tokens} tokens: the counts are right after {atomics} atomic additions; {warps} warps and 8 ranks "
                f"need {most} at most"
            )
    return None


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


_TABLE_BYTES = 64 * 32 * 4


def _clears_without_conflicts(kernel):
    distinct = np.concatenate([np.arange(32), np.arange(32)[::-1]]).astype(np.int32)  # a warp's lanes use all banks
    for ids in (np.arange(64, dtype=np.int32) % 5, distinct):
        per_expert = np.full(32, -7, np.int32)
        try:
            with simulator.profile() as profile:
                kernel[1, 64](ids, per_expert)
        except simulator.DataRace as error:
            return (
                "two threads race: if a thread clears counters of other threads' rows, a barrier must separate "
                f"clearing and counting; another one separates counting and summing ({error})"
            )
        if (wrong := np.flatnonzero((per_expert < 0) | (per_expert > 64))).size:
            return f"per_expert[{wrong[0]}] is {per_expert[wrong[0]]}, of 64 tokens: not all rows are cleared"
        wanted = np.bincount(ids, minlength=32)
        if (wrong := np.flatnonzero(per_expert != wanted)).size:
            return f"per_expert[{wrong[0]}] is {per_expert[wrong[0]]}, not {wanted[wrong[0]]}"
    (counted,) = profile.kernels
    if (size := counted.launches[0]["shared_bytes"]) != _TABLE_BYTES:
        return (
            f"the counts are right, but the table takes {size} bytes instead of {_TABLE_BYTES}: keep a row of 32 words "
            "for each thread, and change which words the lanes of a warp clear together"
        )
    if conflicts := counted.total.bank_conflicts:
        return (
            f"the counts are right, but bank conflicts cost {conflicts} additional wavefronts. Counting has none here, "
            "because the tokens of a warp have 32 different experts"
        )
    return None


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


_TOO_EARLY = (
    "a CTA stores into another CTA's shared memory before a cluster barrier has shown that this CTA has started"
)
_TOO_LATE = (
    "a CTA sums, or exits, before all other CTAs have stored: cuda.syncthreads() waits for the threads of its own CTA "
    "only"
)
_UNPAIRED = "each barrier_cluster_wait() needs one barrier_cluster_arrive() before it"


def _waits_for_the_cluster(kernel):
    counts = torch.arange(64, dtype=torch.int32) * 5 % 64
    wanted = counts.view(8, 8).sum(dim=0).tolist()
    for seed in range(_SEEDS):
        sums = torch.full((8,), -7, dtype=torch.int32)
        try:
            with simulator.seed(seed), simulator.profile() as profile:
                launch(kernel, 8, 32, counts, sums, cluster=8)
        except (simulator.ClusterError, simulator.DataRace, simulator.UninitializedRead) as error:
            early, unpaired = "may not have started" in str(error), "arrived" in str(error)
            return f"{_TOO_EARLY if early else _UNPAIRED if unpaired else _TOO_LATE} ({error})"
        if sums.tolist() != wanted:
            return f"with the thread order of seed {seed}, sums is {sums.tolist()}, not {wanted}"
    if not profile.kernels[0].launches[0]["shared_bytes"]:
        return "the sums are right, but the CTAs do not exchange their counts through shared memory"
    return None


EXERCISES = {
    1: Exercise(
        "a kernel that adds 1 to each rank that holds at least one of the token's experts",
        _counts_tokens_once,
        "The ids are not sorted by rank, so the previous id is not enough. Keep a bit mask of the ranks that the token "
        "has been counted for.",
        count_for_ranks,
    ),
    2: Exercise(
        "a kernel in which a warp adds at most once to each rank's counter",
        _adds_once_per_warp,
        "cuda.ballot_sync(0xFFFFFFFF, flag) returns a mask with a bit per lane, and cuda.popc counts its bits. All 32 "
        "lanes must execute it; a lane without a token has the flag False.",
        add_flags,
    ),
    3: Exercise(
        "a kernel that counts in rows of 32 words and has no bank conflicts if the experts of a warp are distinct",
        _clears_without_conflicts,
        "Which 32 words lie in 32 different banks? Let a warp clear them together. Then a thread clears counters that "
        "other threads add to.",
        count_experts,
    ),
    4: Exercise(
        "a kernel in which CTA c of a cluster sums element c of all CTAs' counts",
        _waits_for_the_cluster,
        "barrier_cluster_arrive() followed by barrier_cluster_wait() is a barrier of all CTAs. Other CTAs must have "
        "started before a thread stores into their memory, and all stores must precede the sum.",
        sum_counts,
    ),
}
