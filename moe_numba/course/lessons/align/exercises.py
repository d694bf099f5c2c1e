"""Exercises of the lesson "Alignment as published"; the page checks answers with `exercises.<name>`."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda

from moe_numba.course.grader import Wrong, expect_equal, fault
from moe_numba.course.lessons.align import answers
from moe_numba.course.lessons.align.published import ORDER, inputs, lesson, published_phases, timed_buffers
from moe_numba.course.lessons.align.sizes import EXPERTS, LINE, TOKENS
from moe_numba.course.steps.exercises import Break, Build, Prediction, is_stub
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG, Verdict
from moe_numba.runtime.launch import launch

# Predict: the phases to attack


class Attack:
    """Choose the two phases to work on first, from the bars of all versions."""

    def check(self, first=..., second=...) -> Verdict:
        """Compare the choice with what the authors gained, and with what remained."""
        phases = published_phases()[0]
        if not phases:
            return Verdict("attack", OPEN, "not timed with these sizes, so there is nothing to compare")
        if ... in (first, second):
            return Verdict("attack", OPEN, "no choice yet: name two of " + ", ".join(ORDER))
        if unknown := {first, second} - set(ORDER):
            return Verdict("attack", WRONG, f"{sorted(unknown)} is no phase; phases are {', '.join(ORDER)}")
        if first == second:
            return Verdict("attack", WRONG, f"you chose {first} twice; name two phases")
        old, new = phases["0x1"], phases["0x5"]
        largest = sorted(old, key=old.get, reverse=True)
        found = ", ".join(_rank(phase, largest, old, new) for phase in (first, second))
        shares = ", ".join(f"{phase} {old[phase]:.1f} -> {new.get(phase, 0):.1f} us" for phase in largest)
        judged = "right" if [first, second] == largest[:2] else "the two largest the other way round"
        if {first, second} != set(largest[:2]):
            judged = f"the two largest are {largest[0]} and {largest[1]}"
        state = RIGHT if judged == "right" else WRONG
        return Verdict(
            "attack", state, f"you chose {first}, {second}: {judged}. Of 0x1, {found}. From 0x1 to 0x5: {shares}"
        )


def _rank(phase, largest, old, new):
    place = ("the largest", "the second", "the third", "the fourth", "the smallest")[largest.index(phase)]
    untouched = abs(new.get(phase, 0) - old[phase]) < 0.02 * old[phase]
    return f"{phase} is {place} phase ({old[phase]:.1f} us{', and no version touched it' if untouched else ''})"


attack = Attack()


# Predict: the barriers and bank conflicts of Blelloch's scan


def judge_blelloch(guess: Prediction) -> Verdict:
    """Compare a prediction with the step's score; beside a guess of the bank conflicts stands how to count them."""
    verdict = guess.judge(lesson.steps["0x3 Blelloch"].score)
    if guess.guesses["bank_conflicts"] is ...:
        return verdict
    extra = []
    stride = 1
    while stride < EXPERTS:
        lanes = min(32, EXPERTS // (2 * stride))  # of warp 0, which access words 2 * stride apart
        extra.append(-(-lanes // (32 // math.gcd(2 * stride, 32))) - 1)
        stride *= 2
    note = (
        "How to count the bank conflicts: at stride s, the lanes of warp 0 access words that are 2 s apart. For s = 1, "
        f"2, 4, ... that takes {' + '.join(map(str, extra))} = {sum(extra)} wavefronts more than one. The up-sweep "
        "loads twice and stores once at each level, the down-sweep loads three times and stores twice: "
        f"{sum(extra)} x 8 = {8 * sum(extra)}."
    )
    return replace(verdict, notes=(*verdict.notes, note))


# Build: the scan of a warp


def _around_scan(answer):
    @cuda.jit
    def checked_answer(x, out):
        out[cuda.threadIdx.x] = answer(x[cuda.threadIdx.x])

    return checked_answer


def _scan(kernel):
    x = np.arange(64, dtype=np.int32) * 7 % 10 + 1
    out = np.full(64, -7, np.int32)
    kernel[1, 64](x, out)
    return x, out


def _test_scan(answer):
    x, out = _scan(_around_scan(answer))
    right = x.reshape(-1, 32).cumsum(1).ravel()
    if (out == right - x).all():
        raise Wrong("that is the exclusive scan: the value of the lane itself is missing")
    if (out[:32] == right[:32]).all() and (out != right).any():
        raise Wrong("warp 0 is right, and warp 1 is not: threadIdx.x is not the lane")
    expect_equal("the scan", out, right)


warp_scan = Build(
    "warp scan",
    "the sum of x over lanes 0 to this one",
    own=answers.warp_scan,
    test=_test_scan,
    profile=lambda answer: count(_around_scan(answer), _scan, answer),
    counter="shuffles",
    par=5,
    par_is_bound=True,
    forbidden={
        "shared_load_requests": "it exchanges values through shared memory",
        "votes": "it uses votes; the exercise is about shuffles",
    },
    over_par="What could a lane learn from lane - 16 in one step?",
    hint="Add the value of the lane 1 below, then of the lane 2 below, then 4, 8 and 16: only if there is such a lane.",
    home=f"{__name__}:warp_scan",
)


# Break: one barrier less. Build: with one barrier

_WARPS = 8


def _around_sum_below(answer, threads=32 * _WARPS):
    @cuda.jit
    def checked_answer(x, out):
        tid = cuda.threadIdx.x
        below = answer(answers.warp_scan(x[tid]))
        if tid < threads:
            out[tid] = below

    return checked_answer


def _sum_below(kernel, threads=32 * _WARPS):
    x, out = np.arange(32 * _WARPS, dtype=np.int32) % 11 + 1, np.full(threads, -7, np.int32)
    kernel[1, len(x)](x, out)
    sums = x.reshape(_WARPS, 32).sum(1)
    return out, np.repeat(sums.cumsum() - sums, 32)[:threads]


def _test_sum_below(answer):
    expect_equal("the sum of the warps below thread", *_sum_below(_around_sum_below(answer)))


def _passes(answer, seed):
    """Return whether the first 64 threads, of two warps, receive the right sums."""
    with simulator.seed(seed):
        found, right = _sum_below(_around_sum_below(answer, 64), 64)
        return bool((found == right).all())


def _race(answer):
    try:
        with simulator.races():
            _sum_below(_around_sum_below(answer, 64), 64)
    except simulator.DataRace as error:
        return str(error)
    return None


one_barrier_less = Break("one barrier less", answers.warp_0_scans, _passes, _race, home=f"{__name__}:one_barrier_less")

sum_below = Build(
    "sum below",
    "the sum of what all warps below this one have added up, with one barrier",
    own=answers.sum_below,
    test=_test_sum_below,
    profile=lambda answer: count(_around_sum_below(answer), _sum_below, answer),
    counter="barriers",
    par=1,
    par_is_bound=True,
    limits={"shared_load_requests": (2, "it loads the sums one after another")},
    over_par="Who else could scan the sums, if they lie in shared memory for all warps?",
    hint="After the barrier, lane i of every warp loads the sum of warp i. A warp scan later, the lane of the warp "
    "below knows the answer: shfl_sync returns it to all lanes.",
    home=f"{__name__}:sum_below",
)


# Build: the length of sorted_token_ids

_SIZES = [(n, e, b) for n in (0, 1, 2, 3, 5, 8, 13) for e in (1, 2, 3, 8) for b in (1, 2, 4, 16)]


class Length:
    """Write the length that `sorted_token_ids` needs."""

    def check(self, answer=...) -> Verdict:
        """Compare an answer with the fewest places that suffice for any routing."""
        verdict = partial(Verdict, "length", hint=_LENGTH_HINT, solution=answers.buffer_length)
        if answer is ... or is_stub(answer):
            return verdict(OPEN, "not answered yet: write a function of the three numbers")
        if (wrong := fault(_test_length, answer)) is not None:
            return verdict(OPEN if wrong.startswith("not answered") else WRONG, wrong)
        return verdict(RIGHT, f"right for {len(_SIZES)} sizes", answer=answer)


def _test_length(answer):
    for sizes in _SIZES:
        if (found := answer(*sizes)) != (right := answers.buffer_length(*sizes)):
            what = "sufficient, but not tight" if found > right else "too short for some routing"
            raise Wrong(
                "{} assignments, {} experts, blocks of {}: ".format(*sizes) + f"{found} is {what}; {right} suffice"
            )


_LENGTH_HINT = (
    "The worst routing gives as many experts as possible a last block with a single assignment. How many can that be?"
)
length = Length()


# Diagnose: the sort kernel


class Culprit:
    """Choose the variants of the sort kernel that are much faster, then see their times."""

    def check(self, variants: dict, choice=...) -> Verdict:
        """Time the variants, or look their times up, and compare."""
        ids = inputs(TOKENS)["random experts"]
        outputs, cumsum = timed_buffers()
        counts = torch.bincount(ids.flatten(), minlength=EXPERTS)
        starts = (counts.cumsum(0) - counts).int()
        cumsum[: LINE * EXPERTS : LINE] = cumsum[:EXPERTS] = starts  # as they are when the sort kernel starts
        length = ids.numel() // (64 if simulator.ENABLED else 1)
        mask = (1 << (len(outputs[0]).bit_length() - 1)) - 1
        calls = {
            name: partial(launch, kernel, -(-length // 256), 256, ids, outputs[0], cumsum, length, mask)
            for name, kernel in variants.items()
        }
        us, source = lesson.times("sort kernel", calls), "measured" if not simulator.ENABLED else "recorded"
        if choice is ... or not us:
            return Verdict(
                "culprit",
                OPEN,
                "no choice yet: one or more of A, B and C" if us else "not timed with these kernels and sizes",
            )
        whole = us["as it is"]
        fast = "".join(name[0] for name in variants if name != "as it is" and us[name] < _MUCH * whole)
        times = ", ".join(f"{name} {us[name]:.2f} us" for name in variants)
        found = f"{' and '.join(fast) or 'none'} took less than three quarters of the time"
        text = f"you chose {choice}; {found} ({source}): {times}." + (f" {_CULPRIT}" if "C" in fast else "")
        return Verdict("culprit", RIGHT if set(choice) == set(fast) else WRONG, text)


_MUCH = 0.75  # of the time: a variant that takes longer is not much faster
_CULPRIT = (
    "C has as many atomic operations and scattered stores as the kernel as it is. So neither takes the time, but that "
    "all counters lie in a few cache lines: the L2 serves the operations on a line one after another."
)
culprit = Culprit()


# Build: aggregated atomics


def _around_places(answer):
    @cuda.jit
    def checked_answer(ids, next_place, places):
        i = cuda.grid(1)
        places[i] = answer(next_place, ids[i])

    return checked_answer


_IDS = np.concatenate([np.arange(64) % 4, np.zeros(32), np.arange(32)]).astype(np.int32)
_FIRST = np.bincount(_IDS, minlength=32).cumsum() - np.bincount(_IDS, minlength=32)


def _take(kernel):
    places, next_place = np.full(len(_IDS), -1, np.int32), _FIRST.astype(np.int32)
    kernel[2, 64](_IDS, next_place, places)
    return places, next_place


def _test_places(answer):
    places, next_place = _take(_around_places(answer))
    if sorted(places) != list(range(len(_IDS))):
        place = next(p for p in range(len(_IDS)) if (places == p).sum() != 1)
        raise Wrong(f"place {place} is taken {(places == place).sum()} times, not once")
    expect_equal("the expert of each place", _IDS[np.argsort(places)], np.sort(_IDS))
    expect_equal("next_place at the end", next_place, _FIRST + np.bincount(_IDS, minlength=32))


take_places = Build(
    "places",
    "a place of its own for each lane, with one atomic operation per distinct expert of the warp",
    own=answers.take_places,
    test=_test_places,
    profile=lambda answer: count(_around_places(answer), _take, answer),
    counter="contention",
    unit="lanes of a warp adding to one address at once",
    par=1,
    par_is_bound=True,
    forbidden={"shared_load_requests": "it uses shared memory; a warp needs none"},
    over_par="Which one lane of those with the same expert should add, and how much?",
    hint="match_any gives the lanes with my expert; the lowest of them adds popc of that mask, and shfl shares what "
    "came back. The bits below my lane are my rank.",
    home=f"{__name__}:take_places",
)
