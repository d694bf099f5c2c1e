"""Exercises of the lesson "Alignment in one launch"; the page checks answers with ``exercises.<name>``."""

import ast
import inspect
import itertools
import textwrap
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32

from moe_numba.course.grader import Wrong, case, expect_equal
from moe_numba.course.lessons.align_one_launch import answers
from moe_numba.course.lessons.align_one_launch.one_launch import DEVICE, inputs, lesson
from moe_numba.course.lessons.align_one_launch.sizes import BINS, BOTH, CTAS, DECODE, EXPERTS, FULL, TOKENS
from moe_numba.course.steps.exercises import Build
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, RIGHT, WRONG, Verdict
from moe_numba.runtime import sass
from moe_numba.runtime.launch import launch

# Build: the rank in a warp


def _around_rank(answer):
    @cuda.jit
    def checked_answer(experts, ranks, counts):
        i = cuda.grid(1)
        ranks[i], counts[i] = answer(experts[i])

    return checked_answer


_EXPERTS = np.concatenate([np.arange(32) * 7 % 5, np.full(32, 255), np.arange(32) % 32, [9, 256] * 16]).astype(np.int32)


def _rank(kernel):
    ranks, counts = np.full(len(_EXPERTS), -7, np.int32), np.full(len(_EXPERTS), -7, np.int32)
    kernel[2, 64](_EXPERTS, ranks, counts)
    return ranks, counts


def _test_rank(answer):
    ranks, counts = _rank(_around_rank(answer))
    same = _EXPERTS.reshape(-1, 32)[:, :, None] == _EXPERTS.reshape(-1, 32)[:, None, :]
    below = np.tril(np.ones((32, 32), bool), -1)
    if (ranks == (same & below.T).sum(2).ravel()).all():
        raise Wrong("the rank counts the lanes above; earlier assignments are in lanes below")
    expect_equal("rank", ranks, (same & below).sum(2).ravel())
    expect_equal("count", counts, same.sum(2).ravel())


def _around_rank_shuffled(answer):
    @cuda.jit
    def align(experts, ranks, counts):  # shuffles both, as the lesson's kernel does
        i, lane = cuda.grid(1), cuda.threadIdx.x & 31
        rank, count = answer(experts[i])
        ranks[i], counts[i] = cuda.shfl_sync(FULL, rank, lane), cuda.shfl_sync(FULL, count, lane)

    return align


@dataclass(frozen=True)
class _Rank(Build):
    """A `Build` whose answer must also compile in a kernel that shuffles its results: the simulator has no types."""

    def judge(self, answer):
        """Return the state, a sentence and the score of an answer, in the simulator."""
        state, text, score = super().judge(answer)
        if state not in (RIGHT, OVER_PAR) or sass.missing():
            return state, text, score
        with simulator.profile("H200") as profile:
            _rank(_around_rank_shuffled(answer))
        static = profile.kernels[0].static
        if static is None or static.sass:
            return state, text, score
        return WRONG, f"a kernel cannot shuffle these numbers: return int32(...) of both. {static.reason}", None


def _exchanges(counted):
    """Return the warp-wide operations of the critical path but match_any."""
    path = counted.critical_path
    return path.shuffles + path.votes + path.reductions


rank_in_warp = _Rank(
    "rank in a warp",
    "the number of lanes below this one with the same expert, and the number of all lanes with it",
    own=answers.rank_in_warp,
    test=_test_rank,
    profile=lambda answer: count(_around_rank(answer), _rank, answer),
    counter="shuffles",
    unit="shuffles, votes and reductions",
    score=_exchanges,
    par=0,
    limits={"matches": (1, "it compares the lanes more than once")},
    needs=(("matches", "votes", "shuffles", "reductions"), "no lane learns what another one has"),
    forbidden={"shared_load_requests": "it exchanges experts through shared memory"},
    over_par="Which instruction compares a value with those of all lanes at once?",
    hint="cuda.match_any_sync(FULL, expert) is a mask of the lanes with the same expert. cuda.popc counts its bits, "
    "and lanemask_lt() has those of the lanes below. Return int32(...) of both: Numba would make 64 bits of them.",
    home=f"{__name__}:rank_in_warp",
)


# Diagnose: the counting loop


class Counting:
    """Choose the variant of the counting loop that is much faster, or neither, then see the times."""

    def check(self, variants: dict, choice=...) -> Verdict:
        """Time the variants, or look their times up, and compare."""
        ids, tokens = inputs(TOKENS)["random experts"], DECODE if simulator.ENABLED else TOKENS
        ids, out = ids[:tokens].contiguous(), torch.zeros(CTAS, dtype=torch.int32, device=DEVICE)
        ctas = 2 if simulator.ENABLED else CTAS
        calls = {
            name: partial(launch, kernel, ctas, 1024, ids, out, ids.numel(), ids.numel() // ctas)
            for name, kernel in variants.items()
        }
        us, source = lesson.times("counting loop", calls), "measured" if not simulator.ENABLED else "recorded"
        if choice is ... or not us:
            return Verdict(
                "counting, diagnosis",
                OPEN,
                "no choice yet: A, B or neither" if us else "not timed with these kernels and sizes",
            )
        whole, *others = us
        best = min(others, key=us.get)
        times = ", ".join(f"{name} {us[name]:.2f} us" for name in us)
        if us[best] > _MUCH * us[whole]:
            right, found = "neither", f"neither is much faster ({source}): {times}. {_NEITHER}"
        else:
            right, found = best[0], f"{best[0]} is much faster ({source}): {times}. {_WHY[best[0]]}"
        return Verdict("counting, diagnosis", RIGHT if choice == right else WRONG, f"you chose {choice}; {found}")


_MUCH = 0.75  # of the time: a variant that takes longer is not much faster
_WHY = {
    "A": "So the atomic additions take the time: lanes that add to the same counter take turns.",
    "B": "A plain store instead of the atomic addition touches the same banks, and gains little. So the threads wait "
    "for the ids: they lie in the L2, whose latency each load waits for.",
}
_NEITHER = (
    "So neither the latency of the loads nor the atomic additions alone take the time. What is left in both variants: "
    "32 trips of each thread, with a branch and an address in each. The next step has 8 trips and no branch."
)
counting = Counting()


# Build: the counting loop

_THREADS, _IDS = 64, 512


def _around_count(answer):
    @cuda.jit
    def checked_answer(topk_ids, found, first, numel):
        counts = cuda.shared.array(BOTH, int32)
        i = cuda.threadIdx.x
        while i < BOTH:
            counts[i] = 0
            i += cuda.blockDim.x
        cuda.syncthreads()
        answer(topk_ids, counts, first, numel)
        cuda.syncthreads()
        i = cuda.threadIdx.x
        while i < BOTH:
            found[i] = counts[i]
            i += cuda.blockDim.x

    return checked_answer


def _count(kernel, numel=_IDS, first=301):
    ids = np.random.default_rng(numel).integers(0, EXPERTS, numel).astype(np.int32)
    ids[::3] = 5  # one expert has many assignments
    found = torch.full((BOTH,), -7, dtype=torch.int32)
    launch(kernel, 1, _THREADS, torch.from_numpy(ids), found, first, numel)
    return found, [np.bincount(part, minlength=BINS) for part in (ids[:first], ids[first:])]


def _test_count(answer):
    for numel, first in ((_IDS, 301), (333, 0), (4, 2)):
        found, (before, others) = _count(_around_count(answer), numel, first)
        with case(f"{numel} ids, first = {first}"):
            expect_equal("counts", found[:BINS], before)
            expect_equal("counts[BINS:]", found[BINS:], others)


count_ids = Build(
    "counting loop",
    "a loop that counts the ids below first in counts[id], and the others in counts[BINS + id]",
    own=answers.count_ids,
    test=_test_count,
    profile=lambda answer: count(_around_count(answer), _count, answer),
    counter="global_load_requests",
    unit="loads of a warp",
    par=_IDS // 4 // _THREADS,
    par_is_bound=True,
    limits={"shared_atomic_requests": (_IDS // _THREADS, "it adds more than once for an id")},
    over_par="How many ids does a load bring? ld_global_s32x4 brings four.",
    hint="Let thread t take the ids 4 t to 4 t + 3, then those 4 * blockDim.x further on. Add BINS to the index, or 0, "
    "instead of branching. If numel is no multiple of four, up to three threads take one more id each.",
    home=f"{__name__}:count_ids",
)


# Build: a barrier of the grid

_CTAS, _SEEDS, _TURNS = 3, 3, 2  # turns: barriers in a row


def _around_barrier(answer, turns=_TURNS, links=()):
    """Return a kernel whose CTAs exchange numbers at a barrier; ``links`` are what it adds to the answer."""
    fence_before, fence_after = "fence before" in links, "fence after" in links
    # A fence orders what its own thread has accessed, so the others of the CTA must synchronise with it.
    sync_before, sync_after = fence_before or "sync before" in links, fence_after or "sync after" in links

    @cuda.jit
    def checked_answer(values, rows, found, counter):
        cta, tid, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        for turn in range(turns):
            at = turn * cuda.gridDim.x
            rows[(at + cta) * threads + tid] = values[cta * threads + tid] + turn
            if sync_before:
                cuda.syncthreads()
            if fence_before:
                cuda.threadfence()
            answer(counter)
            if fence_after:
                cuda.threadfence()
            if sync_after:
                cuda.syncthreads()
            total = int32(0)
            for other in range(cuda.gridDim.x):  # what another thread of each CTA has stored
                total = int32(total + rows[(at + other) * threads + threads - 1 - tid])
            found[(at + cta) * threads + tid] = total

    return checked_answer


# Link between the stores before the barrier and the loads after it -> what the message says if it is missing. Those
# that `_around_barrier` adds with a fence come before the fence.
_LINKS = {
    "sync before": "a cuda.syncthreads() before the arrival: without it, a thread arrives for its CTA while other "
    "threads of the CTA still store",
    "sync after": "a cuda.syncthreads() after the last poll: without it, the threads that do not poll go on before all "
    "CTAs have arrived",
    "fence before": "a fence between the stores and the arrival: without it, another CTA may see the arrival, and not "
    "what this CTA has stored before",
    "fence after": "a fence after the last poll: without it, what the others have stored may be loaded before the poll "
    "that sees the last arrival",
}


def _wait(kernel, counter, threads=1, turns=_TURNS):
    values = torch.arange(_CTAS * threads, dtype=torch.int32) + 1
    rows, found = (torch.full((turns * _CTAS * threads,), -7, dtype=torch.int32) for _ in range(2))
    launch(kernel, _CTAS, threads, values, rows, found, counter, cooperative=True)
    sums = values.reshape(_CTAS, threads).sum(0).flip(0)
    right = torch.stack([sums + _CTAS * turn for turn in range(turns)]).int()
    expect_equal("the sums after the barrier", found, right[:, None].expand(-1, _CTAS, -1).flatten())


def _signed(value):
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def _two_in_a_row(kernel):
    _wait(kernel, torch.zeros(4, dtype=torch.int32), threads=33)


def _missing_links(answer):
    """Return the fewest links that make a barrier right which is wrong, or None: the kernel around it adds them."""
    for links in (links for most in range(1, 5) for links in itertools.combinations(_LINKS, most)):
        kernel = _around_barrier(answer, links=links)
        try:
            for seed in range(_SEEDS):
                with simulator.seed(seed), simulator.races():
                    _two_in_a_row(kernel)
        except (simulator.SimulatorError, Wrong):
            continue
        return links
    return None


def _test_barrier(answer):
    """Two barriers in a row, of several warps; then one after as many launches as make an element overflow."""
    with case("two barriers in a row"):
        try:
            _two_in_a_row(_around_barrier(answer))
        except (simulator.DataRace, Wrong) as error:
            if missing := _missing_links(answer):
                raise Wrong(f"the barrier lacks {'; and '.join(map(_LINKS.get, missing))}") from error
            if str(error).count(" at checked_answer") != 1:  # not a race of the answer alone
                raise Wrong(
                    "a thread returns from the barrier before all threads of the grid have called it"
                ) from error
            raise
    once, counter = _around_barrier(answer, turns=1), torch.zeros(4, dtype=torch.int32)
    with case("the first launches"):
        _wait(once, counter, turns=1)
        steps = [int(n) % (1 << 32) for n in counter]  # what a launch adds to each element
        _wait(once, counter, turns=1)
    for launches in sorted({(1 << bits) // step for step in steps if step for bits in (31, 32)}):
        counter = torch.tensor([_signed(launches * step) for step in steps], dtype=torch.int32)
        with case(f"after {launches:,} launches, when the counter is {int(counter[0]):,}"):
            for _ in range(2):
                _wait(once, counter, turns=1)


def _profile_barrier(answer):
    return count(_around_barrier(answer), _two_in_a_row, answer)


def _arrivals(counted):
    """Return the atomic operations of all lanes, for each CTA and barrier."""
    accesses = counted.total.accesses.items()
    return sum(found.lanes for (space, kind, _), found in accesses if (space, kind) == ("global", "atomic")) // (
        _CTAS * _TURNS
    )


grid_barrier = Build(
    "grid barrier",
    "a function that returns in no thread before all threads of the grid have called it",
    own=answers.grid_barrier,
    test=_test_barrier,
    profile=_profile_barrier,
    counter="global_atomic_requests",
    unit="atomic operations of a CTA in a barrier",
    score=_arrivals,
    par=1,
    needs=(("global_atomic_requests", "global_store_requests"), "no CTA tells the others that it has arrived"),
    most_alone=None,
    over_par="One thread can arrive for its CTA, after a cuda.syncthreads().",
    hint="Let the CTAs together add exactly 2^31: CTA 0 adds 2^31 minus the number of others, these add 1 each. Then "
    "the top bit flips when the last one arrives, and the other bits are 0 again. Wait until (old ^ now) is negative.",
    seeds=_SEEDS,
    home=f"{__name__}:grid_barrier",
)


def show_two_in_a_row(barrier) -> Verdict:
    """Return what two barriers in a row make of a barrier, without the exercise's solution."""
    return replace(grid_barrier.check(barrier), name="barrier that resets", notes=(), hint="", solution=None)


# Build: fences


def _around_hand_on(answer):
    @cuda.jit
    def checked_answer(values, prefix, flags, found):
        cta = cuda.blockIdx.x
        found[cta] = answer(prefix, flags, values[cta])

    return checked_answer


def _hand_on(kernel):
    values = torch.tensor([5, 3, 8, 1], dtype=torch.int32)
    prefix, found, flags = torch.full((4,), -7, dtype=torch.int32), torch.full((4,), -7), torch.zeros(4)
    found, flags = found.int(), flags.int()
    launch(kernel, 4, 1, values, prefix, flags, found, cooperative=True)
    expect_equal("prefix", prefix, values.cumsum(0))
    expect_equal("the sum before", found, values.cumsum(0) - values)
    expect_equal("flags", flags, [1, 1, 1, 1])


def _test_hand_on(answer):
    _refuse_atomic_prefix(answer)
    _hand_on(_around_hand_on(answer))


def _refuse_atomic_prefix(answer):
    """Raise `Wrong` if ``prefix`` is accessed otherwise than by an index: atomic accesses race with none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(answer.py_func))).body[0]
    name = tree.args.args[0].arg
    indexed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Subscript)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == name and id(node) not in indexed:
            raise Wrong(
                f"`{name}` is handed to a function or gets another name. Load and store it as {name}[...]: atomic "
                "accesses never race, so that the detector could not see a missing fence, and the fences are the task"
            )


hand_on = Build(
    "fences",
    "a function that adds its CTA's value to the sum of the CTAs before",
    own=answers.hand_on,
    test=_test_hand_on,
    profile=lambda answer: count(_around_hand_on(answer), _hand_on, answer),
    counter="global_store_requests",
    unit="stores of a CTA",
    par=2,
    forbidden={
        "barriers": "it synchronises threads; a flag and two fences do",
        "global_atomic_requests": "it uses atomic operations; a flag and two fences do",
    },
    most_alone=None,
    hint="Store the prefix first, then cuda.threadfence(), then the flag. The reader needs a fence, too: between the "
    "load of the flag and that of the prefix.",
    home=f"{__name__}:hand_on",
)
