"""Exercises of the lesson "The gate, for a prompt", with the lesson's own answers."""

import contextlib

import numpy as np

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.grader import Wrong
from moe_numba.course.lessons.gate.sizes import FULL, GROUPS, HELD, KEPT, NEVER, SHARE, TOPK
from moe_numba.course.steps.exercises import Build
from moe_numba.course.steps.score import count
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
_NAMES = "random values", "few values, so that some are equal", "equal values", "descending values"


def _few_and_many(shape, dtype=np.float32):
    """Return values for each warp: random, of few values, all equal, and descending."""
    values = _RANDOM.normal(size=(_CASES, *shape))
    values[1] = _RANDOM.integers(0, 3, shape)
    values[2] = 1
    values[3] = -np.sort(-values[3], axis=0)
    return (values * (1000 if dtype == np.int32 else 1)).astype(dtype)


# Messages in the reader's terms


def _expect_lanes(name, found, expected):
    """Raise `Wrong` if a lane of a warp has not what is expected; both are [case, lane]."""
    for number, values in enumerate(_NAMES):
        if len(wrong := np.flatnonzero(found[number] != expected[number])):
            lane = int(wrong[0])
            text = f"{name} is {found[number, lane]:g} in lane {lane}, not {expected[number, lane]:g}"
            raise Wrong(f"{values}: {text}; {len(wrong)} of 32 lanes are wrong")


@contextlib.contextmanager
def returns_two(what):
    """Say what a function must return, if its result is no pair."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if "unpack" in str(error):
            raise Wrong(f"the function must return two values: {what}") from None
        raise


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
    with returns_two("the largest and the second largest"):
        found = _pairs(_pairs_kernel(answer))
    _expect_lanes("the largest value", found[:, :, 0], _LARGEST[:, :, 0])
    _expect_lanes("the second largest value", found[:, :, 1], _LARGEST[:, :, 1])


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
    _expect_lanes("the number of better groups", _rank(_rank_kernel(answer)), _RANKS)


# Keys


def _key_kernel(answer, twice=True):
    @cuda.jit
    def around(bits, keys, back):
        i = 32 * cuda.threadIdx.y + cuda.threadIdx.x
        keys[i] = answer(bits[i])
        if twice:
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


def _pop_kernel(answer, pops=TOPK):
    @cuda.jit
    def around(keys, found, masks, fronts):
        warp, lane = cuda.threadIdx.y, cuda.threadIdx.x
        queue = cuda.local.array(HELD, int32)
        for i in range(HELD):
            queue[i] = keys[warp, lane, i]
        for k in range(pops):
            highest, holders = answer(queue)
            if lane == 0:
                found[warp, k], masks[warp, k] = highest, holders
        fronts[warp, lane] = queue[0]

    return around


_QUEUES = -np.sort(-_few_and_many((32, HELD), np.int32), axis=2)
_QUEUES[:, 5] = NEVER  # a lane of a group that was dropped


def _popped(queues):
    """Return the keys, the masks of the lanes that held them, and the lanes' next keys, of eight pops."""
    queues = [list(map(int, queue)) + [int(NEVER)] for queue in queues]
    found, masks = [], []
    for _ in range(TOPK):
        found.append(max(queue[0] for queue in queues))
        holders = [lane for lane in range(32) if queues[lane][0] == found[-1]]
        masks.append(sum(1 << lane for lane in holders))
        queues[holders[0]].pop(0)
    return found, masks, [queue[0] for queue in queues]


_TYPES = np.int32, np.uint32, np.int32
_POPPED = [np.array(each, kind) for each, kind in zip(zip(*map(_popped, _QUEUES), strict=True), _TYPES, strict=True)]


def _pop(kernel):
    out = [np.full_like(each, 7) for each in _POPPED]
    kernel[1, (32, _CASES)](_QUEUES, *out)
    return out


def _test_pop(answer):
    with returns_two("the highest key and the mask of the lanes that hold it"):
        found, masks, fronts = _pop(_pop_kernel(answer))
    for number, name in enumerate(_NAMES):
        for k in range(TOPK):
            before, wanted = f"{name}: pop {k}", _POPPED[0][number, k]
            if found[number, k] != wanted:
                raise Wrong(f"{before} returns the key {found[number, k]}; the highest one is {wanted}")
            mask, wanted = masks[number, k], _POPPED[1][number, k]
            if mask != wanted:
                raise Wrong(f"{before} returns the mask {mask:#x}; the lanes that hold the highest key are {wanted:#x}")
    _expect_lanes(f"queue[0], after {TOPK} pops,", fronts, _POPPED[2])


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
    _expect_lanes("the place", _place(_place_kernel(answer)), _PLACES)


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
    profile=lambda answer: count(_key_kernel(answer, twice=False), _keys, answer),
    counter="executions",
    unit="executed lines",
    par=1,
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
    profile=lambda answer: count(_pop_kernel(answer, pops=1), _pop, answer),
    counter="shuffles",
    par=0,
    forbidden=_SHARED,
    most_alone=0,  # all lanes select
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
