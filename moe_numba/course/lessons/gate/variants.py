"""Changes of the gate that did not pay, as kernels that a GPU times beside what they would replace."""

from functools import cache
from typing import NamedTuple

from moe_numba import simulator  # noqa: F401  before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.course.lessons.gate.exercises import better_groups, pop, sortable, two_largest_of_group
from moe_numba.course.lessons.gate.sizes import EXPERTS, FULL, HELD, KEPT, LOG2_E, NEVER, PAIRS, TOPK, WARPS, sort_held
from moe_numba.ptx.arithmetic import ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.memory import load_nc_u32x4
from moe_numba.ptx.warp import redux_sync_max_s32

_COMPARE_EXCHANGES = len(PAIRS)
_WAVE = 132 * 8  # CTAs, with eight on each SM


class Pair(NamedTuple):
    """What a change replaces, and what replaces it: versions, and options of their launches."""

    versions: tuple
    options: tuple
    why: str


@cuda.jit(device=True)
def sigmoid(x):
    return rcp_approx(float32(1) + ex2_approx(-LOG2_E * x))


@cuda.jit(device=True)
def load_wide(pointer, at, into):
    for i in range(0, HELD, 4):
        a, b, c, d = load_nc_u32x4(pointer, at + i)
        into[i], into[i + 1] = uint_as_float(a), uint_as_float(b)
        into[i + 2], into[i + 3] = uint_as_float(c), uint_as_float(d)


@cache
def make_sort_and_pop(short_circuits, selects):
    """Make the page's `sort_and_pop`, with `or` and `and`, or with a pop in which all lanes select."""

    @cuda.jit(device=True)
    def sort_and_pop(choice, score):
        lane = int32(cuda.threadIdx.x)
        key, slot = cuda.local.array(HELD, int32), cuda.local.array(HELD, int32)
        for i in range(HELD):
            key[i], slot[i] = sortable(float_as_int(choice[i])), int32(i)
        for n in range(_COMPARE_EXCHANGES):
            i, j = PAIRS[n]
            if short_circuits:
                swap = key[j] > key[i] or (key[j] == key[i] and slot[j] < slot[i])
            else:
                swap = (key[j] > key[i]) | ((key[j] == key[i]) & (slot[j] < slot[i]))
            key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
            slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
        first, second = two_largest_of_group(int_as_float(sortable(key[0])), int_as_float(sortable(key[1])))
        if better_groups(first + second) >= KEPT:
            key[0] = NEVER
        weight, expert = float32(0), int32(0)
        for k in range(TOPK):
            highest = redux_sync_max_s32(uint32(FULL), key[0])
            winner = int32(cuda.ffs(cuda.ballot_sync(FULL, key[0] == highest)) - 1)
            front, won = slot[0], float32(0)
            for i in range(HELD):
                won = score[i] if i == front else won
            if selects:
                wins = lane == winner
                for i in range(HELD - 1):
                    key[i], slot[i] = key[i + 1] if wins else key[i], slot[i + 1] if wins else slot[i]
                key[HELD - 1] = NEVER if wins else key[HELD - 1]
            elif lane == winner:
                for i in range(HELD - 1):
                    key[i], slot[i] = key[i + 1], slot[i + 1]
                key[HELD - 1] = NEVER
            won = cuda.shfl_sync(FULL, won, winner)
            front = cuda.shfl_sync(FULL, front, winner)
            if lane == k:
                weight, expert = won, int32(winner * HELD + front)
        return weight, expert

    return sort_and_pop


@cuda.jit(device=True)
def keys_alone(choice, score):
    """Choose experts as the page's function of this name, without its rule for equal keys of one lane."""
    lane = int32(cuda.threadIdx.x)
    key, queue, held = cuda.local.array(HELD, int32), cuda.local.array(HELD, int32), cuda.local.array(HELD, float32)
    for i in range(HELD):
        key[i] = queue[i] = sortable(float_as_int(choice[i]))
    sort_held(queue)
    first, second = two_largest_of_group(int_as_float(sortable(queue[0])), int_as_float(sortable(queue[1])))
    if better_groups(first + second) >= KEPT:
        queue[0] = NEVER
    picked, holders = int32(0), uint32(0)
    for k in range(TOPK):
        highest, holding = pop(queue)
        if lane == k:
            picked, holders = highest, holding
    holder, matches = int32((cuda.ffs(holders) - 1) & 31), uint32(0)
    for i in range(HELD):
        held[i] = cuda.shfl_sync(FULL, score[i], holder)
        same = cuda.shfl_sync(FULL, key[i], holder) == picked
        matches = uint32(matches | uint32(1 << i)) if same else matches
    slot, weight = int32(cuda.ffs(matches) - 1), float32(0)
    for i in range(HELD):
        weight = held[i] if (i == slot) & (lane < TOPK) else weight
    return weight, int32(holder * HELD + slot)


@cache
def make_loop(route, ahead):
    """Make a kernel whose warps route several tokens, with the loads of a token during the one before it, or not."""

    @cuda.jit
    def gate(logits, bias, weights, ids, tokens):
        lane, stride = int32(cuda.threadIdx.x), int32(cuda.gridDim.x * WARPS)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        loaded, lane_bias = cuda.local.array(HELD, float32), cuda.local.array(HELD, float32)
        score, choice = cuda.local.array(HELD, float32), cuda.local.array(HELD, float32)
        load_wide(bias, lane * HELD, lane_bias)
        if ahead:
            load_wide(logits, min(token, tokens - 1) * EXPERTS + lane * HELD, loaded)
        while token < tokens:
            cuda.syncwarp()  # redux needs all lanes, and the stores below diverge
            if not ahead:
                load_wide(logits, token * EXPERTS + lane * HELD, loaded)
            for i in range(HELD):
                score[i] = sigmoid(loaded[i])
                choice[i] = score[i] + lane_bias[i]
            following = int32(token + stride)
            if ahead:
                load_wide(logits, min(following, tokens - 1) * EXPERTS + lane * HELD, loaded)
            weight, expert = route(choice, score)
            total = weight
            for step in (1, 2, 4, 8, 16):
                total += cuda.shfl_xor_sync(FULL, total, step)
            if lane < TOPK:
                weights[token * TOPK + lane] = weight / total
                ids[token * TOPK + lane] = expert
            token = following

    return gate


def versions(gate) -> dict[str, Pair]:
    """Return the pairs by the name of the change; ``gate`` makes a version of a kernel."""
    once, plain = {"most_ctas": 1 << 30}, make_sort_and_pop(False, False)
    branching, selecting = make_sort_and_pop(True, False), make_sort_and_pop(False, True)
    before = gate(make_loop(plain, False))
    return {
        "`|` and `&` in the network instead of `or` and `and`": Pair(
            (gate(make_loop(branching, False)), before),
            (once, once),
            "`or` and `and` leave branches in the machine code, which cost little here. We keep the form without them.",
        ),
        "a pop in which all lanes select, with slots": Pair(
            (before, gate(make_loop(selecting, False))),
            (once, once),
            "It selects 15 values per pick, where the branch moves them in one lane. It pays once only keys move.",
        ),
        "load the next token during this one": Pair(
            (gate(make_loop(keys_alone, False)), gate(make_loop(keys_alone, True), 1, 8)),
            (once, {"most_ctas": _WAVE}),
            "The loop and the loaded values need registers, so fewer warps fit on an SM, and they hide less.",
        ),
        "a loop over tokens alone": Pair(
            (gate(make_loop(keys_alone, False)), gate(make_loop(keys_alone, False), 1, 8)),
            (once, {"most_ctas": _WAVE}),
            "The grid has as many CTAs as fit. The tokens are no whole number of rounds, so the last is partly empty.",
        ),
    }


EARLIER = {  # step of the record of earlier versions of the kernels -> change, why
    "in registers": (
        "SGLang's design without local memory: select among 32 registers instead of indexing",
        "Each pick compares 32 indices. Local memory was touched only a few times per pick, and is cached.",
    ),
    "package kernel": (
        "fewer instructions for ranks and picks in the last kernel",
        "With logits in L2 they save a microsecond. From DRAM the warps then wait longer for their logits.",
    ),
}
