"""Exercises of the notebooks on the alignment (`moe_align_block_size`)."""

from collections.abc import Iterable
from itertools import product
from numbers import Integral

import numpy as np

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.draw.canvas import plural
from moe_numba.course.exercises import Exercise
from moe_numba.simulator.profiler.bank_conflicts import count_wavefronts

_ALL_LANES = 0xFFFFFFFF

# 1: a scan of two warps


@cuda.jit
def scan_64(counts, starts):
    sums = cuda.shared.array(2, int32)
    tid = cuda.threadIdx.x
    warp, lane = tid // 32, tid % 32
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(_ALL_LANES, value, 1 << k)
        if lane >= 1 << k:
            value += below
    if lane == 31:
        sums[warp] = value
    cuda.syncthreads()
    starts[tid] = value - counts[tid] + (sums[0] if warp == 1 else 0)


def _scanned_by_shuffles(counts, guards):
    """Scan as one shuffle per guard does: it adds in the lanes that the guard ("lane" or "tid") lets through.

    A lane whose source would lie below its warp receives its own value.
    """
    sums, lanes = counts.reshape(2, 32), np.arange(32)
    for k, guard in enumerate(guards):
        received = np.where(lanes >= 1 << k, np.roll(sums, 1 << k, axis=1), sums)
        numbers = lanes + np.array([[0], [32]]) if guard == "tid" else lanes
        sums = sums + np.where(numbers >= 1 << k, received, 0)
    return sums.ravel() - counts


_ACROSS_WARPS = ["lane"] * 5 + ["tid"], ["tid"] * 6, ["tid"] * 5  # mistakes: a sixth shuffle, tid instead of lane


def _scans_64(kernel):
    counts, starts = (np.arange(64, dtype=np.int32) * 7 % 10 + 1), np.full(64, -7, np.int32)
    kernel[1, 64](counts, starts)
    wanted = counts.cumsum() - counts
    if (starts == wanted).all():
        return None
    if (starts == wanted + counts).all():
        return "that is the inclusive scan: a start must not contain the thread's own count"
    if any((starts == _scanned_by_shuffles(counts, guards)).all() for guards in _ACROSS_WARPS):
        return (
            "a shuffle only reaches the lanes of its own warp; here lanes without a source receive their own value and "
            "add it. The sum of warp 0 must reach warp 1 through shared memory"
        )
    if (starts[:32] == wanted[:32]).all() and len(set(starts[32:] - wanted[32:])) == 1:
        if starts[32] == wanted[31]:
            return (
                f"warp 1 begins at {wanted[31]}, the exclusive sum of warp 0's last lane, which lacks its own count "
                f"{counts[31]}; it must begin at {wanted[32]}, the inclusive sum"
            )
        return f"warp 1 begins at {starts[32]}; it must begin at {wanted[32]}, the sum of the counts of warp 0"
    wrong = np.flatnonzero(starts != wanted)
    return f"starts[{wrong[0]}] is {starts[wrong[0]]}, not {wanted[wrong[0]]}; {wrong.size} of 64 are wrong"


# 2: the length of sorted_token_ids


def buffer_length(numel, num_experts, block_size):
    used = min(numel, num_experts)  # experts with at least one slot: each may have one slot in its last block
    return (used + (numel - used) // block_size) * block_size


def _is_least_length(length):
    loose = None
    for sizes in product((0, 1, 2, 3, 5, 8, 13), (1, 2, 3, 8), (1, 2, 4, 16)):
        got, needed = length(*sizes), buffer_length(*sizes)
        numel, num_experts, block_size = sizes
        case = f"{plural(numel, 'slot')}, {plural(num_experts, 'expert')}, blocks of {block_size}"
        if got is ...:
            return "not answered yet: return a number of places"
        if not isinstance(got, Integral):
            return f"{case}: the length is {got}, which is no integer"
        if got < needed:
            return f"too few: {case} need {needed} places for some routing, not {got}"
        if got > needed and loose is None:
            loose = f"sufficient, but not tight: {case} need {needed}, not {got}"
    return loose


# 3: a row pitch


def _has_no_bank_conflicts(row_pitch):
    """Test a function from the number of experts to the words per row of the threads' counters."""
    if not callable(row_pitch):
        return f"the answer is {row_pitch!r}; a function of the number of experts is needed"
    for num_experts in (64, 32, 16, 7):
        words, named = row_pitch(num_experts), f"the pitch for {num_experts} experts"
        if words is ...:
            return "not answered yet: return a number of words"
        if not isinstance(words, Integral):
            return f"{named} is {words}, which is no integer"
        if words < num_experts:
            return f"{named} is {words}, but a row holds {num_experts} counters"
        if words > 2 * num_experts + 2:
            return f"{named} is {words}; rows of at most {2 * num_experts + 2} words fit"
        for expert in (0, num_experts - 1):
            addresses = {lane: 4 * (lane * words + expert) for lane in range(32)}
            wavefronts, _ = count_wavefronts(addresses, 4, True)
            if wavefronts > 1:
                return (
                    f"with {num_experts} experts and rows of {words} words, the 32 lanes need {wavefronts} wavefronts "
                    f"to read their counters of expert {expert}; without bank conflicts they need 1"
                )
    return None


# 4: slots in ascending order


def slots_in_order(thread, threads, numel):
    share = -(-numel // threads)
    return range(thread * share, min((thread + 1) * share, numel))


def _keeps_the_order(slots):
    for threads, numel in ((32, 100), (64, 512), (32, 7)):
        taken, case = [slots(thread, threads, numel) for thread in range(threads)], f"{threads} threads, {numel} slots"
        if taken[0] is ...:
            return "not answered yet: return the slots of a thread, such as a range"
        if numbers := [of_thread for of_thread in taken if not isinstance(of_thread, Iterable)]:
            return f"{case}: the slots of a thread are {numbers[0]}; return a range or a list, even of one slot"
        taken = list(map(list, taken))
        flat = [slot for of_thread in taken for slot in of_thread]
        if outside := next((slot for slot in flat if not 0 <= slot < numel), None):
            return f"{case}: there is no slot {outside}; the last is {numel - 1}"
        if wrong := [slot for slot in range(numel) if flat.count(slot) != 1]:
            return f"{case}: slot {wrong[0]} is taken {flat.count(wrong[0])} times"
        if (most := max(map(len, taken))) > -(-numel // threads):
            return f"{case}: one thread takes {most} slots; shared evenly, {-(-numel // threads)} are enough"
        if late := next((n for n in range(1, numel) if flat[n] < flat[n - 1]), None):
            return f"{case}: slot {flat[late - 1]} comes before slot {flat[late]} if both go to the same expert"
    return None


# 5: one atomic operation for all lanes with the same expert


@cuda.jit
def sort_aggregated(ids, next_place, places):
    i = cuda.grid(1)
    expert, lane = ids[i], cuda.threadIdx.x % 32
    same = uint32(cuda.match_any_sync(_ALL_LANES, expert))
    lowest = cuda.ffs(same) - 1
    first = int32(0)
    if lane == lowest:
        first = cuda.atomic.add(next_place, expert, cuda.popc(same))
    first = cuda.shfl_sync(_ALL_LANES, first, lowest)
    places[i] = first + cuda.popc(same & uint32((uint32(1) << uint32(lane)) - uint32(1)))


def _sorts_with_few_atomics(kernel):
    ids = np.concatenate([np.arange(64) % 4, np.zeros(32), np.arange(32)]).astype(np.int32)
    counts = np.bincount(ids, minlength=32)
    starts = (counts.cumsum() - counts).astype(np.int32)
    next_place, places = starts.copy(), np.full(128, -7, np.int32)
    with simulator.trace(accesses=True) as events:
        kernel[2, 64](ids, next_place, places)
    for expert in range(32):
        got = sorted(places[ids == expert].tolist())
        wanted = list(range(starts[expert], starts[expert] + counts[expert]))
        for warp in range(4):
            of_warp = places[32 * warp :][:32][ids[32 * warp :][:32] == expert].tolist()
            if twice := [place for place in of_warp if of_warp.count(place) > 1]:
                return f"place {twice[0]} occurs twice: each lane needs its rank in the group of lanes with its expert"
        if got != wanted:
            return f"the slots of expert {expert} get the places {got}, not {wanted[0]} to {wanted[-1]}, each once"
    atomics = sum(event.what.startswith("global atomic") for event in events)
    least = 4 + 4 + 1 + 32  # experts of each warp
    if atomics > least:
        return f"the places are right, but with {atomics} atomic operations; one per warp and expert would be {least}"
    return None


EXERCISES = {
    1: Exercise(
        "a kernel that computes the exclusive scan of 64 numbers with 64 threads",
        _scans_64,
        "Warp 1 needs the sum of warp 0. What orders the write before the read?",
        scan_64,
    ),
    2: Exercise(
        "a function from slots, experts and block size to the fewest places that suffice for any routing; each slot "
        "may choose any expert",
        _is_least_length,
        "The worst routing gives as many experts as possible a last block with a single slot. How many can that be?",
        buffer_length,
    ),
    3: Exercise(
        "a function from the number of experts to a row pitch in words (at least num_experts, at most "
        "2 * num_experts + 2) without bank conflicts when 32 threads read the same column",
        _has_no_bank_conflicts,
        "Word w lies in bank w % 32. Lanes l and m conflict if l * pitch and m * pitch leave the same remainder.",
        "lambda num_experts: num_experts | 1  # an odd pitch visits all 32 banks",
    ),
    4: Exercise(
        "a function that returns the slots of a thread, at most ceil(numel / threads)",
        _keeps_the_order,
        "The counters order an expert's slots by thread, so the slots of thread 0 must be below those of thread 1.",
        slots_in_order,
    ),
    5: Exercise(
        "a kernel in which a warp adds once per distinct expert; cuda.match_any_sync finds the lanes with the same one",
        _sorts_with_few_atomics,
        "The mask of cuda.match_any_sync has a bit per lane with the same expert: cuda.popc counts them, cuda.ffs "
        "finds the lowest. The bits below a lane are its rank among them.",
        sort_aggregated,
    ),
}
