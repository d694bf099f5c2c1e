"""Exercises of the lesson "Dispatch layout"; the page checks answers with ``exercises.<name>``."""

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.bench import records
from moe_numba.course.grader import Wrong, case, expect_equal
from moe_numba.course.lessons.dispatch_layout import answers
from moe_numba.course.lessons.dispatch_layout.runs import POISON, SLOW_CTA, lesson, timed, wrong
from moe_numba.course.lessons.dispatch_layout.sizes import (
    CLUSTER,
    COUNTERS,
    EXPERTS,
    LANE_BITS,
    LANES,
    PER_WARP,
    RANKS,
    SHARE,
    TOPK,
)
from moe_numba.course.steps.exercises import Build, Formula, Predict, as_one_of
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG, Verdict
from moe_numba.ptx.cluster import barrier_cluster_arrive
from moe_numba.runtime.launch import launch

# Formula: the ranks of a token


def _test_ranks_of_a_token(answer):
    for experts, topk, ranks in ((256, 8, 8), (8, 1, 4), (4, 2, 2), (64, 6, 4), (16, 16, 8)):
        with case(f"{experts} experts, topk = {topk}, {ranks} ranks"):
            expect_equal(
                "the result", answer(experts, topk, ranks), answers.ranks_of_a_token(experts, topk, ranks), 1e-9
            )


ranks_of_a_token = Formula(
    "ranks of a token",
    "how many ranks a token visits on average, if it has `topk` different experts, all equally likely",
    own=answers.ranks_of_a_token,
    test=_test_ranks_of_a_token,
    praise="it is right for all five sizes",
    hint="Count the tokens that miss a certain rank: all their experts are among the others. math.comb(n, k) is the "
    "number of ways to choose k of n.",
)


# Build: the tokens of a rank in a warp


def _around_tokens(answer):
    @cuda.jit
    def checked_answer(ranks, found):
        i = cuda.grid(1)
        found[i] = answer(ranks[i])

    return checked_answer


_MASKS = np.random.default_rng(3).integers(0, 1 << RANKS, 64).astype(np.uint32)
_MASKS[5:9] = 0
_MASKS[40:64] = 1  # a warp of which most tokens go to rank 0 only


def _tokens(kernel):
    found = np.full(64, POISON, np.int32)
    kernel[2, 32](_MASKS, found)
    return found


def _test_tokens(answer):
    found = _tokens(_around_tokens(answer)).reshape(2, 32)[:, :RANKS]
    bits = _MASKS.reshape(2, 32, 1) >> np.arange(RANKS, dtype=np.uint32) & 1
    for warp in range(2):
        with case(f"warp {warp}"):
            expect_equal("the result by lane", found[warp], bits[warp].sum(0))


def _exchanges(counted):
    """Return the warp-wide operations of the critical path."""
    path = counted.critical_path
    return path.shuffles + path.votes + path.reductions + path.matches


tokens_of_rank = Build(
    "tokens of a rank",
    "the number of the warp's tokens that go to rank r, in lane r",
    own=answers.tokens_of_rank,
    test=_test_tokens,
    profile=lambda answer: count(_around_tokens(answer), _tokens, answer),
    counter="votes",
    unit="votes, shuffles and reductions",
    score=_exchanges,
    par=RANKS,
    needs=(("votes", "shuffles", "reductions", "matches"), "no lane learns of another lane's token"),
    forbidden={
        "shared_load_requests": "it exchanges masks through shared memory",
        "shared_atomic_requests": "it counts in shared memory",
        "global_load_requests": "it loads what the other lanes already have in registers",
    },
    over_par="Which instruction shows one bit of all lanes to all lanes at once?",
    hint="cuda.ballot_sync(FULL, condition) is a mask of the lanes whose condition holds; cuda.popc counts its bits. "
    "All lanes must take part in each of the RANKS ballots. Lane r keeps the count of ballot r.",
    home=f"{__name__}:tokens_of_rank",
)


# Predict: sectors


sectors = Predict(
    "sectors of a load",
    dict(two_experts_for_each_token=32 * 2 * 8 // 32, neighbouring_lanes=32 * 8 // 32),
    f"With two experts, two lanes share a sector. With {TOPK}, a lane's id lies {8 * TOPK} bytes from that of the next "
    "lane. The lane needs its neighbours in the sector for its next loads, so the bytes are not wasted if the L1 "
    "still has them by then; but the load/store unit must look up that many sectors for each load.",
)


# Diagnose: what the CTA that counts ranks does for so long


class SlowCTA:
    """Choose the change that shortens the CTA that counts ranks most, then see the times."""

    name = "the slow CTA"

    def check(self, versions: dict[str, tuple], choice=...) -> Verdict:
        """Time the variants, or look their times up, and compare; the first version is the CTA as it is."""
        letters = {label[0]: label for label in versions if label[1:2] == ":"}
        choice = as_one_of(choice, letters)
        if choice is ...:
            return Verdict(self.name, OPEN, f"no choice yet. {'; '.join(letters.values())}")
        if choice not in letters:
            return Verdict(self.name, WRONG, f"you chose {choice!r}; {'; '.join(letters.values())}")
        us = lesson.times(SLOW_CTA, {name: timed(version) for name, version in versions.items()})
        if not us:
            text = f"you chose {choice}. Nothing is timed for these kernels, so only a GPU can tell"
            return Verdict(self.name, OPEN, text)
        whole, *_ = us.values()
        best = min(letters, key=lambda letter: us[letters[letter]])
        saved = ", ".join(f"{letter} {whole - us[label]:.1f} us" for letter, label in letters.items())
        text = f"you chose {choice}; of {records.format_us(whole)} us, {best} saves most: {saved}"
        return Verdict(self.name, RIGHT if choice == best else WRONG, text)


slow_cta = SlowCTA()


# Build: the sum of a cluster

_CLUSTER_THREADS = 64


def _around_sum(answer):
    @cuda.jit
    def checked_answer(values, counts):
        own = cuda.shared.array(COUNTERS, int32)
        barrier_cluster_arrive()
        i = cuda.threadIdx.x
        while i < COUNTERS:
            own[i] = values[cuda.blockIdx.x * COUNTERS + i]
            i += cuda.blockDim.x
        cuda.syncthreads()
        answer(own, counts)

    return checked_answer


_VALUES = torch.from_numpy(np.random.default_rng(5).integers(0, 1000, CLUSTER * COUNTERS).astype(np.int32))


def _sum(kernel):
    counts = torch.full((COUNTERS,), POISON, dtype=torch.int32)
    launch(kernel, CLUSTER, _CLUSTER_THREADS, _VALUES, counts, cluster=CLUSTER)
    return counts


def _test_sum(answer):
    expect_equal("counts", _sum(_around_sum(answer)), _VALUES.view(CLUSTER, COUNTERS).sum(0))


sum_in_cluster = Build(
    "sum of a cluster",
    "the sum of each counter over the CTAs of the cluster",
    own=answers.sum_in_cluster,
    test=_test_sum,
    profile=lambda answer: count(_around_sum(answer), _sum, answer),
    counter="distributed_shared_bytes",
    unit="bytes to or from other CTAs",
    par=4 * (CLUSTER - 1) * COUNTERS,
    par_is_bound=True,
    forbidden={
        "global_load_requests": "it reads from global memory",
        "global_atomic_requests": "it adds in global memory, which somebody must have zeroed before",
    },
    limits={"global_store_requests": (-(-SHARE // _CLUSTER_THREADS), "one CTA stores what all of them could share")},
    over_par="Does each count travel more than once?",
    hint="Let CTA c add up the counters c * SHARE to (c + 1) * SHARE - 1. st_cluster_s32(shares, index, to, value) "
    "stores in another CTA's `shares`. Before: all CTAs must have started. After: all must have stored, which takes "
    "an arrival and a wait; cuda.syncwarp() brings the lanes of a warp together for it.",
    home=f"{__name__}:sum_in_cluster",
)


# Build: an or over the lanes of a group


def _around_or(answer):
    @cuda.jit
    def checked_answer(bits, found):
        i = cuda.grid(1)
        found[i] = answer(bits[i])

    return checked_answer


_BITS = (np.uint32(1) << np.random.default_rng(7).integers(0, 32, 64).astype(np.uint32)).astype(np.uint32)
_BITS[::3] = 0


def _or(kernel):
    found = np.zeros(64, np.uint32)
    kernel[1, 64](_BITS, found)
    return found


def _test_or(answer):
    groups = np.bitwise_or.reduce(_BITS.reshape(-1, LANES), axis=1)
    expect_equal("the result by lane", _or(_around_or(answer)), np.repeat(groups, LANES))


or_in_group = Build(
    "or of a group",
    "the bitwise or of the values of this lane's group",
    own=answers.or_in_group,
    test=_test_or,
    profile=lambda answer: count(_around_or(answer), _or, answer),
    counter="shuffles",
    unit="votes, shuffles and reductions",
    score=_exchanges,
    par=LANE_BITS,
    par_is_bound=True,
    needs=(("votes", "shuffles", "reductions", "matches"), "no lane learns what another one has"),
    forbidden={
        "shared_load_requests": "it exchanges values through shared memory",
        "global_load_requests": "it loads what the other lanes already have in registers",
    },
    over_par="After a shuffle, each lane knows the or of two lanes. How many do the next ones add?",
    hint="cuda.shfl_xor_sync(FULL, value, n) returns the value of the lane whose number differs in the bit n. "
    "Exchange with the neighbour first, then with the lane two further on, and so on. All lanes of the warp take part.",
    home=f"{__name__}:or_in_group",
)


# Build: the walk of groups of lanes

_WALK_CTAS, _WALK_THREADS, _WALK_TOKENS = 2, 64, 37


def _around_walk(answer):
    @cuda.jit
    def checked_answer(topk_idx, is_in_rank, found, tokens):
        counts = cuda.shared.array(COUNTERS, int32)
        i = cuda.threadIdx.x
        while i < COUNTERS:
            counts[i] = 0
            i += cuda.blockDim.x
        cuda.syncthreads()
        answer(topk_idx, is_in_rank, counts, tokens)
        cuda.syncthreads()
        i = cuda.threadIdx.x
        while i < COUNTERS:
            found[cuda.blockIdx.x * COUNTERS + i] = counts[i]
            i += cuda.blockDim.x

    return checked_answer


def _walk_ids(tokens):
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOPK, dim=1).indices.contiguous()
    ids.view(-1)[::7] = -1
    return ids


def _walk(kernel, tokens=_WALK_TOKENS):
    ids = _walk_ids(tokens)
    found = torch.full((_WALK_CTAS, COUNTERS), POISON, dtype=torch.int32)
    flags = torch.full((tokens, RANKS), 0xCD, dtype=torch.uint8)
    launch(kernel, _WALK_CTAS, _WALK_THREADS, ids, flags, found, tokens)
    return (found.sum(0), flags), ids


def _test_walk(answer):
    for tokens in (_WALK_TOKENS, 1, 2 * PER_WARP):
        with case(f"{tokens} tokens"):
            if fault := wrong(*_walk(_around_walk(answer), tokens)):
                raise Wrong(fault)


def _rounds():
    return -(-_WALK_TOKENS // (PER_WARP * _WALK_CTAS * _WALK_THREADS // 32))


def _sectors_of_ids():
    """Return the sectors that loads touch if each warp loads the ids of its tokens at once."""
    tokens = [min(PER_WARP, _WALK_TOKENS - first) for first in range(0, _WALK_TOKENS, PER_WARP)]
    first = [8 * TOPK * PER_WARP * i for i in range(len(tokens))]
    return sum((at + 8 * TOPK * n - 1) // 32 - at // 32 + 1 for at, n in zip(first, tokens, strict=True))


count_in_groups = Build(
    "walk of groups",
    "a walk over the tokens in which a group of lanes takes a token",
    own=answers.count_in_groups,
    test=_test_walk,
    profile=lambda answer: count(_around_walk(answer), _walk),
    counter="global_load_sectors",
    unit="sectors loaded",
    par=_sectors_of_ids(),
    limits={
        "global_load_requests": (
            _rounds(),
            "a warp loads more often than once for each of its groups of tokens, or has more than its share of them",
        ),
        "shared_atomic_requests": (_rounds() + 1, "a warp adds to the counters of ranks more often than once"),
        "global_store_requests": (
            _rounds() + -(-COUNTERS // _WALK_THREADS),
            "a warp stores more often than once for its tokens",
        ),
    },
    forbidden={"global_atomic_requests": "it counts in global memory"},
    over_par="Which lanes should load neighbouring ids?",
    hint="Lane `lane` belongs to token `first + lane // LANES`, and is member `lane % LANES` of its group. All lanes "
    "call or_in_group, so the loop must run equally often for all lanes of a warp: let it count with the warp's "
    "first token. A member adds up its flags in a register, and adds the sum to a counter once, behind the loop.",
    home=f"{__name__}:count_in_groups",
)
