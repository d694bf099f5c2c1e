"""Exercises of the lesson "The gate, for decode"."""

import functools
import types
from dataclasses import dataclass

import numpy as np
import torch

from moe_numba import simulator  # noqa: F401  before Numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.bench.latencies import latencies
from moe_numba.course.grader import Wrong, expect_equal
from moe_numba.course.lessons.gate.exercises import returns_two
from moe_numba.course.lessons.gate_decode import runs
from moe_numba.course.lessons.gate_decode.runs import EXPERTS, FULL, GROUPS, LANES, LOADED, START, STORED
from moe_numba.course.steps.estimate import estimate_of
from moe_numba.course.steps.exercises import Build
from moe_numba.course.steps.score import count
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, RIGHT, WRONG, Verdict
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import redux_sync_max_s32
from moe_numba.runtime.launch import launch

_ROUNDS = LANES.bit_length() - 1


# The lesson's own answers


@cuda.jit(device=True)
def two_largest(first, second):
    """Return the two largest keys of the lanes of a group, from the two largest of each lane."""
    for s in range(_ROUNDS):
        other_first = cuda.shfl_xor_sync(FULL, first, 1 << s)
        other_second = cuda.shfl_xor_sync(FULL, second, 1 << s)
        second = max(min(first, other_first), max(second, other_second))
        first = max(first, other_first)
    return first, second


@cuda.jit(device=True)
def better_groups(key, lane):
    """Count the groups with a larger key than this lane's group; of equal ones the lower group is better."""
    better = int32(0)
    for d in range(1, GROUPS):
        rival = cuda.shfl_xor_sync(FULL, key, d * LANES)
        is_lower = (lane ^ (d * LANES)) < lane
        better = int32(better + int32((rival > key) | ((rival == key) & is_lower)))
    return better


@cuda.jit(device=True)
def best_of_warp(value, expert):
    """Return the warp's largest value and its expert, the lower one of equal values; values have 16 bits."""
    key = int32(uint32(uint32(value) << uint32(16)) | uint32(0xFFFF - expert))
    key = redux_sync_max_s32(uint32(FULL), key)
    return int32(key >> 16), int32(0xFFFF - (key & 0xFFFF))


@cuda.jit(device=True)
def wait_then_release(place):
    """Wait for the kernel before, and then let the next one start."""
    if place == START:
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()


# Build


def _expect_lanes(name, found, wanted):
    """Raise `Wrong` if a lane has not what is wanted; both are of whole warps, one after another."""
    if len(wrong := np.flatnonzero(np.asarray(found) != wanted)):
        i = int(wrong[0])
        text = f"in lane {i % 32} {name} is {found[i]}, not {wanted[i]}"
        raise Wrong(f"{text}; {len(wrong)} lanes of {len(wanted)} are wrong")


def _two_kernel(answer):
    @cuda.jit
    def around(first, second, out):
        i = cuda.grid(1)
        a, b = answer(first[i], second[i])
        out[2 * i], out[2 * i + 1] = a, b

    return around


def _pairs():
    random = np.random.default_rng(0).integers(-1000, 1000, (64, 2))
    few = np.random.default_rng(1).integers(0, 3, (64, 2))
    return np.sort(np.concatenate([random, few]), axis=1)[:, ::-1].astype(np.int32)


def _two(kernel):
    pairs = _pairs()
    out = np.full(2 * len(pairs), -7, np.int32)
    kernel[2, 64](np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]), out)
    return pairs, out.reshape(-1, 2)


def _test_two(answer):
    with returns_two("the largest and the second largest key"):
        pairs, found = _two(_two_kernel(answer))
    wanted = np.sort(pairs.reshape(-1, 2 * LANES), axis=1)[:, :-3:-1].repeat(LANES, axis=0)
    _expect_lanes("the largest key of its group", found[:, 0], wanted[:, 0])
    _expect_lanes("the second largest key of its group", found[:, 1], wanted[:, 1])


def _groups_kernel(answer):
    @cuda.jit
    def around(keys, out):
        i = cuda.grid(1)
        out[i] = answer(keys[i], int32(cuda.threadIdx.x & 31))

    return around


def _group_keys():
    random = np.random.default_rng(2)
    rows = [random.integers(-9, 9, GROUPS), random.integers(0, 2, GROUPS), np.zeros(GROUPS), -np.arange(GROUPS)]
    return np.stack(rows).astype(np.int32)


def _rank(kernel):
    keys = _group_keys()
    out = np.full(keys.size * LANES, -7, np.int32)
    kernel[keys.size * LANES // 64, 64](keys.repeat(LANES, axis=1).ravel(), out)
    return keys, out


def _test_groups(answer):
    keys, found = _rank(_groups_kernel(answer))
    order = np.argsort(-keys, axis=1, kind="stable")
    _expect_lanes("the number of better groups", found, np.argsort(order, axis=1).repeat(LANES, axis=1).ravel())


def _best_kernel(answer):
    @cuda.jit
    def around(values, experts, best_values, best_experts):
        i = cuda.grid(1)
        best_values[i], best_experts[i] = answer(values[i], experts[i])

    return around


def _best(kernel):
    random = np.random.default_rng(3)
    values = random.integers(-(1 << 15), 1 << 15, (4, 32))
    values[1] = -np.abs(values[1]) - 1
    values[2] = random.integers(-2, 1, 32)
    experts = np.stack([random.permutation(128)[:32] for _ in values])
    found = np.full((2, values.size), -7, np.int32)
    kernel[2, 64](values.astype(np.int32).ravel(), experts.astype(np.int32).ravel(), found[0], found[1])
    return values, experts, found


def _test_best(answer):
    with returns_two("the largest value and its expert"):
        values, experts, found = _best(_best_kernel(answer))
    wanted = [
        min(e for v, e in zip(*row, strict=True) if v == row[0].max()) for row in zip(values, experts, strict=True)
    ]
    _expect_lanes("the largest value", found[0], values.max(axis=1).repeat(32))
    _expect_lanes("its expert", found[1], np.repeat(wanted, 32))


_NO_SHARED = {"shared_load_requests": "it exchanges values through shared memory; a warp needs none"}
TWO = Build(
    "two largest",
    "a function that returns the two largest keys of a group to all of its lanes",
    own=two_largest,
    test=_test_two,
    profile=lambda answer: count(_two_kernel(answer), _two, answer),
    counter="shuffles",
    par=2 * _ROUNDS,
    par_is_bound=True,
    forbidden=_NO_SHARED | {"votes": "it uses votes", "reductions": "it uses redux; the exercise is about shuffles"},
    over_par="After one exchange with lane ^ 1, which two keys must go to lane ^ 2?",
    hint="Two sorted pairs (a, b) and (c, d): the largest key is max(a, c). The second is the larger of min(a, c) and "
    "max(b, d). Exchange pairs with lane ^ 1, merge, then with lane ^ 2.",
    home=f"{__name__}:TWO",
)


@dataclass(frozen=True)
class ShortChain(Build):
    """Exchange keys so that no exchange waits for another: the dependent chain counts, too."""

    def judge(self, answer):
        """Return the state, a sentence and the score of an answer, in the simulator."""
        state, text, score = super().judge(answer)
        if state not in (RIGHT, OVER_PAR):
            return state, text, score
        chain, own = _chain_ns(answer), _chain_ns(self.own)
        if chain <= own + _SLACK * latencies(_GPU).ns["shuffles"]:
            return state, text, score
        return (
            OVER_PAR,
            f"{text.split('. ')[0]}. But the dependent chain takes {chain:.0f} ns on an {_GPU}, estimated, where "
            f"{own:.0f} are enough: an exchange waits for the result of the one before, or for a branch on it. Which "
            "keys can a lane ask for at once?",
            score,
        )


_GPU, _SLACK = "H200", 2  # shuffles by which the chain of another answer may be longer


@functools.cache
def _chain_ns(answer):
    """Return the estimated dependent chain of the kernel around an answer."""
    kernel = count(_groups_kernel(answer), _rank, gpu=_GPU)
    return 1000 * estimate_of([kernel], _GPU).bounds["dependent chain"]


GROUP_RANK = ShortChain(
    "better groups",
    "a function that counts the groups that are better than this lane's",
    own=better_groups,
    test=_test_groups,
    profile=lambda answer: count(_groups_kernel(answer), _rank, answer),
    counter="shuffles",
    par=GROUPS - 1,
    forbidden=_NO_SHARED,
    over_par="Each lane needs one key of each other group. Which lane has it, and which lanes ask for their own?",
    hint="cuda.shfl_xor_sync(FULL, key, d * LANES) is the key of another group for each d from 1 to GROUPS - 1. "
    "None of these shuffles waits for another. Of equal keys, the one of the lower lane counts as better.",
    home=f"{__name__}:GROUP_RANK",
)
BEST = Build(
    "best of the warp",
    "a function that returns the warp's largest value and its expert",
    own=best_of_warp,
    test=_test_best,
    profile=lambda answer: count(_best_kernel(answer), _best, answer),
    counter="reductions",
    par=1,
    par_is_bound=True,
    forbidden=_NO_SHARED
    | {
        "shuffles": "it uses shuffles; one reduction can tell the expert, too",
        "votes": "it uses votes; one reduction can tell the expert, too",
        "matches": "it uses match; one reduction can tell the expert, too",
    },
    over_par="What if one integer held the value and the expert?",
    hint="A value of 16 bits is the upper half of the key, so it decides. Of equal values the lower expert must have "
    "the larger key: put 0xFFFF - expert into the lower half.",
    home=f"{__name__}:BEST",
)


# Where to wait, and where to let the next kernel start: a router, the gate and the next kernel, all dependent launches


@cuda.jit
def _router(logits, counters, total):
    i = cuda.threadIdx.x
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    logits[i] = int32(i * 7 % 32)
    total[i] = counters[i]  # of the layer before


def _gate_kernel(order):
    @cuda.jit
    def gate(logits, ids):
        order(START)
        key = logits[cuda.threadIdx.x]
        order(LOADED)
        best = redux_sync_max_s32(uint32(FULL), key)
        if key == best:
            ids[0] = cuda.threadIdx.x
        order(STORED)

    return gate


@cuda.jit
def _next(ids, counters, out):
    counters[cuda.threadIdx.x] = 0  # before it waits: the gate does not use them
    griddepcontrol_wait()
    out[cuda.threadIdx.x] = ids[0]


def _test_order(order):
    gate = _gate_kernel(order)
    int32s = lambda: torch.zeros(32, dtype=torch.int32)
    logits, counters, total, ids, out = (int32s() for _ in range(5))
    launch(_router, 1, 32, logits, counters, total)
    launch(gate, 1, 32, logits, ids, dependent=True)
    launch(_next, 1, 32, ids, counters, out, dependent=True)
    expect_equal("what the next kernel reads", out.numpy(), np.full(32, int((logits == 31).nonzero()[0])))


def _calls(order):
    """Return the places at which a function calls each of the two instructions, in the order of its calls."""
    function, found = getattr(order, "py_func", order), []
    for place in (START, LOADED, STORED):
        names = {name: lambda name=name, place=place: found.append((name, place)) for name in _INSTRUCTIONS}
        copy = types.FunctionType(function.__code__, function.__globals__ | names, closure=function.__closure__)
        copy(place)
    return found


_INSTRUCTIONS = "griddepcontrol_wait", "griddepcontrol_launch_dependents"


@dataclass(frozen=True)
class Order(Build):
    """Call two instructions at the right places: no race, and the next kernel may start as early as it can."""

    def judge(self, answer):
        """Return the state, a sentence and no score of an answer, in the simulator."""
        if (wrong := self._wrong(answer)) is not None:
            return WRONG, wrong, None
        released = [place for name, place in _calls(answer) if name == _INSTRUCTIONS[1]]
        if not released or released[0] != START:
            late = "ends" if not released else "has stored" if released[0] == STORED else "has issued its loads"
            return OVER_PAR, f"right, but the next kernel starts only when this one {late}. {self.over_par}", None
        return RIGHT, "right: the next kernel may start as soon as this one has waited, and no access races", None


ORDER = Order(
    "dependent launch",
    "a function that waits at one place, and lets the next kernel start at another",
    own=wait_then_release,
    test=_test_order,
    profile=lambda answer: None,
    counter="",
    par=0,
    over_par="What does the next kernel need of this one before it executes its own griddepcontrol_wait?",
    hint="Nothing may be loaded before the wait. The next kernel may start before the results are stored, because it "
    "waits for them itself; but not before this kernel has waited for the one before.",
    home=f"{__name__}:ORDER",
)


# Break


class LostPick:
    """Find a row of distinct logits that a kernel routes wrongly which never looks for equal keys."""

    def check(self, unchecked, logits=...) -> Verdict:
        """Route a row with zero bias by such a version; right if it is wrong."""
        name = "lost pick"
        if logits is ... or logits is None:
            return Verdict(name, OPEN, f"no row yet: {EXPERTS} different logits", hint=_LOST_HINT)
        row = torch.as_tensor(logits, dtype=torch.float32).flatten()
        if len(row) != EXPERTS or not row.isfinite().all():
            return Verdict(name, WRONG, f"the row must have {EXPERTS} finite numbers", hint=_LOST_HINT)
        if len(row.unique()) < EXPERTS:
            text = f"only {len(row.unique())} of the {EXPERTS} logits are different; ties among logits are too easy"
            return Verdict(name, WRONG, text, hint=_LOST_HINT)
        row = row[None].to(runs.DEVICE)
        weights, ids = runs.run(unchecked, row, torch.zeros(EXPERTS, device=row.device))
        error = runs.mismatch(weights, ids, row, torch.zeros(EXPERTS, device=row.device), runs.TOPK, **runs.OPTIONS)
        if error is None:
            text = f"it chose {ids[0].tolist()}, which is right: no two lanes held the same largest key"
            return Verdict(name, WRONG, text, hint=_LOST_HINT)
        text = (
            f"done: {error}. The logits are different, but not all of their sigmoids are: between them float32 has no "
            "number. If two lanes hold the same key, both go on to their next one, and an expert is lost. If one lane "
            "holds it twice, an expert is chosen twice."
        )
        return Verdict(name, RIGHT, text)


_LOST_HINT = (
    "Keys are those of sigmoid(logit), in float32, whose largest number below 1 is 1 - 2**-24. Which logits have the "
    "same sigmoid? Place two of them in different lanes, and small logits in between."
)


# Diagnose


class LargestPart:
    """Name the part of the first kernel that takes most, before the table shows it."""

    def check(self, parts: runs.Parts, choice=...) -> Verdict:
        """Compare a choice with the part that adds most."""
        names, times = list(parts.us), list(parts.us.values())
        added = dict(zip(names, np.diff([0.0, *times]), strict=True))
        known = ", ".join(map(repr, names))
        if choice is ...:
            return Verdict("largest part", OPEN, f"no choice yet: one of {known}")
        fitting = [name for name in names if str(choice).strip().lower() in name.lower()]
        if len(fitting) == 1:  # "picks" and "Picks", "launch" of "launch, loads, ..."
            (choice,) = fitting
        if choice not in added:
            return Verdict("largest part", WRONG, f"you chose {choice!r}; the choices are {known}")
        largest = max(added, key=lambda name: added[name])
        state = RIGHT if choice == largest else WRONG
        return Verdict(
            "largest part", state, f"you chose {choice!r}; {largest!r} adds most", table=runs.show_parts(parts)
        )


two_largest_keys, group_rank, packed, dependent = TWO, GROUP_RANK, BEST, ORDER
lost_pick, largest_part = LostPick(), LargestPart()
