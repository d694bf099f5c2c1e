"""Exercises of the lesson "The gate, for a prompt", with the lesson's own answers."""

import sys

import numpy as np

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.grader import Wrong, case, expect_equal
from moe_numba.course.lessons.gate.sizes import FULL, GROUPS, HELD, KEPT, NEVER, SHARE, TOPK
from moe_numba.course.steps.exercises import Build
from moe_numba.course.steps.lesson import Table
from moe_numba.course.steps.score import count
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG, Verdict
from moe_numba.ptx.warp import redux_sync_max_s32

_SHARED = {"shared_load_requests": "it exchanges values through shared memory; a warp needs none"}


# The lesson's own answers


@cuda.jit(device=True)
def two_largest_of_group(first, second):
    """Return the two largest values of the four lanes of a group, from the two largest of each lane."""
    for step in (1, 2):
        other_first = cuda.shfl_xor_sync(FULL, first, step)
        other_second = cuda.shfl_xor_sync(FULL, second, step)
        second = max(max(second, other_second), min(first, other_first))
        first = max(first, other_first)
    return first, second


@cuda.jit(device=True)
def better_groups(score):
    """Return how many groups are better than this lane's; each of its four lanes compares two."""
    lane = int32(cuda.threadIdx.x)
    group, part = int32(lane // SHARE), int32(lane % SHARE)
    own_lanes = uint32(uint32((1 << SHARE) - 1) << uint32(group * SHARE))
    better = int32(0)
    for i in range(GROUPS // SHARE):
        rival = int32(part + i * SHARE)
        rival_score = cuda.shfl_sync(FULL, score, rival * SHARE)
        is_better = (rival_score > score) | ((rival_score == score) & (rival < group))
        better = int32(better + cuda.popc(uint32(cuda.ballot_sync(FULL, is_better)) & own_lanes))
    return better


@cuda.jit(device=True)
def sortable(bits):
    """Return the bits of a float32 so that they sort as an int32; its own inverse."""
    return int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@cuda.jit(device=True)
def pop(queue):
    """Return the warp's highest key and the lanes whose queue begins with it; drop it from the lowest such lane."""
    highest = redux_sync_max_s32(uint32(FULL), queue[0])
    holders = uint32(cuda.ballot_sync(FULL, queue[0] == highest))
    wins = int32(cuda.threadIdx.x) == int32(cuda.ffs(holders) - 1)
    for i in range(HELD - 1):
        queue[i] = queue[i + 1] if wins else queue[i]
    queue[HELD - 1] = NEVER if wins else queue[HELD - 1]
    return highest, holders


@cuda.jit(device=True)
def place_among_kept(is_kept):
    """Return how many lower groups are kept for the token of this lane: lanes 4 g + t belong to token t."""
    lane = int32(cuda.threadIdx.x)
    lower = uint32((uint32(1) << uint32(lane)) - uint32(1))
    same_token = uint32(uint32(0x11111111) << uint32(lane % 4))
    return int32(cuda.popc(uint32(cuda.ballot_sync(FULL, is_kept)) & lower & same_token))


# Inputs: one case per warp

_CASES, _RANDOM = 4, np.random.default_rng(0)


def _few_and_many(shape, dtype=np.float32):
    """Return values for each warp: random, of few values, all equal, and descending."""
    values = _RANDOM.normal(size=(_CASES, *shape))
    values[1] = _RANDOM.integers(0, 3, shape)
    values[2] = 1
    values[3] = -np.sort(-values[3], axis=0)
    return (values * (1000 if dtype == np.int32 else 1)).astype(dtype)


# The two largest of a group


def _pairs_kernel(answer):
    @cuda.jit
    def around(values, out):
        warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
        out[warp, lane, 0], out[warp, lane, 1] = answer(values[warp, lane, 0], values[warp, lane, 1])

    return around


_PAIRS = -np.sort(-_few_and_many((32, 2)), axis=2)
_LARGEST = -np.sort(-_PAIRS.reshape(_CASES, GROUPS, 2 * SHARE), axis=2)[:, :, :2].repeat(SHARE, axis=1)


def _pairs(kernel):
    out = np.full(_PAIRS.shape, np.nan, np.float32)
    kernel[1, (32, _CASES)](_PAIRS, out)
    return out


def _test_pairs(answer):
    expect_equal("first and second", _pairs(_pairs_kernel(answer)), _LARGEST)


# The rank of a group


def _rank_kernel(answer):
    @cuda.jit
    def around(scores, out):
        warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
        out[warp, lane] = answer(scores[warp, lane // SHARE])

    return around


_SCORES = _few_and_many((GROUPS,))


def ranks(scores):
    """Return how many groups are better than each: those with a higher score, and of equal ones the lower."""
    better = lambda g, h: scores[h] > scores[g] or (scores[h] == scores[g] and h < g)
    return [sum(better(g, h) for h in range(len(scores))) for g in range(len(scores))]


_RANKS = np.array([ranks(scores) for scores in _SCORES], np.int32).repeat(SHARE, axis=1)


def _rank(kernel):
    out = np.full((_CASES, 32), -7, np.int32)
    kernel[1, (32, _CASES)](_SCORES, out)
    return out


def _test_ranks(answer):
    out = _rank(_rank_kernel(answer))
    for warp, name in enumerate(("random scores", "few scores, so that some are equal", "equal scores", "descending")):
        with case(name):
            expect_equal("better", out[warp], _RANKS[warp])


# Keys


def _key_kernel(answer):
    @cuda.jit
    def around(bits, keys, back):
        i = 32 * cuda.threadIdx.y + cuda.threadIdx.x
        keys[i] = answer(bits[i])
        back[i] = answer(keys[i])

    return around


_HUGE = np.finfo(np.float32).max
_FLOATS = np.sort(np.array([-np.inf, -_HUGE, -2, -1.5, -0.5, -1e-30, 0, 1e-30, 0.25, 0.5, 1, 2, _HUGE, np.inf] * 2))
_FLOATS = np.sort(np.concatenate([_FLOATS[::2], _few_and_many((18,))[0]])).astype(np.float32)
_BITS = _FLOATS.view(np.int32)


def _keys(kernel):
    keys, back = np.zeros(32, np.int32), np.zeros(32, np.int32)
    kernel[1, (32, 1)](_BITS, keys, back)
    return keys, back


def _test_keys(answer):
    keys, back = _keys(_key_kernel(answer))
    for i in range(31):
        if keys[i + 1] <= keys[i]:
            a, b = _FLOATS[i], _FLOATS[i + 1]
            raise Wrong(f"{a:g} is below {b:g}, but its key {keys[i]} is not below {keys[i + 1]}")
    if (back != _BITS).any():
        i = int(np.argmax(back != _BITS))
        raise Wrong(f"{_FLOATS[i]:g} has the bits {_BITS[i]}; the function maps its key {keys[i]} to {back[i]}")


# Pops


def _pop_kernel(answer):
    @cuda.jit
    def around(keys, found, lanes, fronts):
        warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
        queue = cuda.local.array(HELD, int32)
        for i in range(HELD):
            queue[i] = keys[warp, lane, i]
        for k in range(TOPK):
            highest, holders = answer(queue)
            if lane == 0:
                found[warp, k] = highest
                lanes[warp, k] = cuda.ffs(holders) - 1
        fronts[warp, lane] = queue[0]

    return around


_QUEUES = -np.sort(-_few_and_many((32, HELD), np.int32), axis=2)
_QUEUES[:, 5] = NEVER  # a lane of a group that was dropped


def _popped(queues):
    """Return the keys, the lanes that held them, and the lanes' next keys, of eight pops."""
    queues = [list(map(int, queue)) + [int(NEVER)] for queue in queues]
    found, lanes = [], []
    for _ in range(TOPK):
        lanes.append(max(range(32), key=lambda lane: (queues[lane][0], -lane)))
        found.append(queues[lanes[-1]].pop(0))
    return found, lanes, [queue[0] for queue in queues]


_POPPED = [np.array(each, np.int32) for each in zip(*map(_popped, _QUEUES), strict=True)]


def _pop(kernel):
    out = [np.full_like(each, -7) for each in _POPPED]
    kernel[1, (32, _CASES)](_QUEUES, *out)
    return out


def _test_pop(answer):
    out = _pop(_pop_kernel(answer))
    for name, found, expected in zip(("key", "lane", "front"), out, _POPPED, strict=True):
        expect_equal(name, found, expected)


# Places of kept groups


def _place_kernel(answer):
    @cuda.jit
    def around(is_kept, out):
        warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
        out[warp, lane] = answer(is_kept[warp, lane] != 0)

    return around


def _kept_of(scores):
    return [[rank < KEPT for rank in ranks(scores[:, token])] for token in range(4)]


_IS_KEPT = np.array([_kept_of(scores) for scores in _few_and_many((GROUPS, 4))], np.int32)  # warp, token, group
_PLACES = (_IS_KEPT.cumsum(2) - _IS_KEPT).transpose(0, 2, 1).reshape(_CASES, 32).astype(np.int32)
_IS_KEPT = np.ascontiguousarray(_IS_KEPT.transpose(0, 2, 1).reshape(_CASES, 32))


def _place(kernel):
    out = np.full((_CASES, 32), -7, np.int32)
    kernel[1, (32, _CASES)](_IS_KEPT, out)
    return out


def _test_place(answer):
    expect_equal("place", _place(_place_kernel(answer)), _PLACES)


LARGEST = Build(
    "two largest",
    "the two largest values of the four lanes of a group, from the two largest of each lane",
    own=two_largest_of_group,
    test=_test_pairs,
    profile=lambda answer: count(_pairs_kernel(answer), _pairs, answer),
    counter="shuffles",
    par=2 * (SHARE.bit_length() - 1),
    par_is_bound=True,
    forbidden=_SHARED | {"votes": "it uses votes; the exercise is about shuffles"},
    over_par="After one exchange with lane ^ 1, what does a lane still have to learn?",
    hint="Exchange both values with lane ^ 1, then with lane ^ 2. Of two sorted pairs the largest is the larger first; "
    "the second largest is the largest of what remains: the smaller first and the two seconds.",
    home=f"{__name__}:LARGEST",
)
RANK = Build(
    "rank by counting",
    "the number of groups that are better than this lane's",
    own=better_groups,
    test=_test_ranks,
    profile=lambda answer: count(_rank_kernel(answer), _rank, answer),
    counter="shuffles",
    par=GROUPS // SHARE,
    par_is_bound=True,
    forbidden=_SHARED,
    over_par="A group has four lanes, and all of them compare with the same rivals. Could they share the work, and "
    "add up by a vote?",
    hint="Lane part of a group compares with groups part and part + 4. ballot_sync returns the comparisons of all "
    "lanes as bits; popc counts those of the group's own four lanes.",
    home=f"{__name__}:RANK",
)
KEY = Build(
    "sortable bits",
    "an int32 that sorts as the float does, so that the same function also turns it back",
    own=sortable,
    test=_test_keys,
    profile=lambda answer: count(_key_kernel(answer), _keys, answer),
    counter="executions",
    unit="lines",
    par=2,  # the kernel calls it twice
    forbidden={"shuffles": "it uses shuffles; a key needs its own bits alone"},
    over_par="bits >> 31 is 0 or -1, all bits set. Can it decide without a branch which bits flip?",
    hint="The bits of positive floats already sort. Of negative floats the magnitude sorts the wrong way round: flip "
    "all bits except the sign.",
    home=f"{__name__}:KEY",
)
POP = Build(
    "pop",
    "the warp's highest key and the mask of the lanes whose queue begins with it, and drop it from the lowest of them",
    own=pop,
    test=_test_pop,
    profile=lambda answer: count(_pop_kernel(answer), _pop, answer),
    counter="shuffles",
    par=0,
    forbidden=_SHARED,
    over_par="Which instruction returns the maximum of 32 integers to all lanes?",
    hint="redux_sync_max_s32(uint32(FULL), queue[0]), a ballot of queue[0] == highest, and ffs. Then every lane "
    "selects: the next key if it wins, its own if not.",
    seeds=2,
    home=f"{__name__}:POP",
)
PLACE = Build(
    "place among kept",
    "the number of lower groups that are kept for the same token",
    own=place_among_kept,
    test=_test_place,
    profile=lambda answer: count(_place_kernel(answer), _place, answer),
    counter="votes",
    par=1,
    par_is_bound=True,
    forbidden=_SHARED | {"shuffles": "it uses shuffles; a vote tells all lanes at once"},
    hint="ballot_sync(FULL, is_kept) has a bit per lane. Keep those of lanes below this one, in steps of four lanes.",
    home=f"{__name__}:PLACE",
)


# The race


def _share_kernel(store_and_add):
    """Store and add what each of eight lanes holds in turn, for the four tokens of a warp."""

    @cuda.jit
    def share(weights, ids, totals):
        lane = cuda.threadIdx.x
        token, group = int32(lane // GROUPS), int32(lane % GROUPS)
        total = float32(0)
        for k in range(TOPK):
            holds = group == (5 * k + 3) % GROUPS
            weight, expert = float32(k + 1), int32(10 * k + token)
            total = store_and_add(weights, ids, token * TOPK + k, holds, weight, expert, group == 0, total)
        if group == 0:
            totals[token] = total

    return share


def _shared(store_and_add):
    """Return whether the weights, ids and totals are right."""
    weights, ids = np.full(SHARE * TOPK, np.nan, np.float32), np.full(SHARE * TOPK, -7, np.int32)
    totals = np.zeros(SHARE, np.float32)
    _share_kernel(store_and_add)[1, (32, 1)](weights, ids, totals)
    expected = np.arange(1, TOPK + 1, dtype=np.float32)
    stored = (weights.reshape(SHARE, -1) == expected).all()
    return bool(stored and (ids.reshape(SHARE, -1)[:, -1] == 10 * (TOPK - 1) + np.arange(SHARE)).all()) and bool(
        (totals == expected.sum()).all()
    )


def _orders(store_and_add, seeds=8):
    """Return (orders in which the result is wrong, whether there is a race)."""

    def under(seed):
        with simulator.seed(seed):
            return _shared(store_and_add)

    wrong = sum(not under(seed) for seed in range(seeds))
    try:
        with simulator.races():
            _shared(store_and_add)
    except simulator.DataRace:
        return wrong, True
    return wrong, False


def _orders_of(names):
    page = vars(sys.modules["__main__"])
    return [_orders(page[name]) for name in names]


class Repair:
    """Choose the repairs of the race before they are run under eight thread orders."""

    def check(self, repairs: dict, choice: object = ...) -> Verdict:
        """Run all repairs in the simulator; compare those that are right and free of races with the choice."""
        if choice is ...:
            return Verdict("race", OPEN, f"no choice yet: {', '.join(repairs)}, or several, such as 'AB'")
        functions = list(repairs.values())
        if simulator.ENABLED:
            found = [_orders(function) for function in functions]
        else:
            found = in_simulator(_orders_of, [function.__name__ for function in functions], functions=functions)
        good = "".join(name for name, (wrong, race) in zip(repairs, found, strict=True) if not wrong and not race)
        lines = [
            [name, f"wrong under {wrong} of 8", "race" if race else "no race"]
            for name, (wrong, race) in zip(repairs, found, strict=True)
        ]
        state = RIGHT if set(str(choice)) == set(good) else WRONG
        repair = "repairs" if len(good) == 1 else "repair"
        text = f"you chose {choice}; {', '.join(good) or 'none'} {repair} the kernel. {_WHY}"
        return Verdict("race", state, text, table=Table(["repair", "thread orders", "race detector"], lines))


_WHY = (
    "An order is needed between the store and the load. A barrier behind both comes too late, and a fence orders the "
    "memory accesses of one thread, not two threads: the lane that loads does not wait for the lane that stores."
)
