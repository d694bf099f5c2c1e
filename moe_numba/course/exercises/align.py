"""Exercises of the notebooks on the alignment (`moe_align_block_size`)."""

from itertools import product
from numbers import Integral

import numpy as np

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.exercises import Exercise
from moe_numba.simulator.profiler.bank_conflicts import count_wavefronts

_ALL_LANES = 0xFFFFFFFF

# 1: a row pitch


def _has_no_bank_conflicts(row_pitch):
    """Test a function from the number of experts to the words per row of the threads' counters."""
    for num_experts in (64, 32, 16, 7):
        words = row_pitch(num_experts)
        if words is ...:
            return "not answered yet: return a number of words"
        if not isinstance(words, Integral):
            return f"ROW_PITCH({num_experts}) is {words}, which is no integer"
        if words < num_experts:
            return f"a row holds {num_experts} counters, but ROW_PITCH({num_experts}) is {words}"
        if words > 2 * num_experts + 2:
            return f"ROW_PITCH({num_experts}) is {words}; rows of at most {2 * num_experts + 2} words fit"
        for expert in (0, num_experts - 1):
            addresses = {lane: 4 * (lane * words + expert) for lane in range(32)}
            wavefronts, _ = count_wavefronts(addresses, 4, True)
            if wavefronts > 1:
                return (
                    f"with {num_experts} experts and rows of {words} words, the 32 lanes need {wavefronts} wavefronts "
                    f"to read their counters of expert {expert}; without bank conflicts they need 1"
                )
    return None


# 2: a scan of two warps


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


def _scans_64(kernel):
    counts, starts = (np.arange(64, dtype=np.int32) * 7 % 10 + 1), np.full(64, -7, np.int32)
    kernel[1, 64](counts, starts)
    wanted = counts.cumsum() - counts
    if (starts == wanted).all():
        return None
    if (starts == wanted + counts).all():
        return "that is the inclusive scan: a start must not contain the thread's own count"
    if (starts[:32] == wanted[:32]).all() and (starts[32:] == wanted[32:] - wanted[32]).all():
        return f"warp 1 begins at 0; it must begin at {wanted[32]}, the sum of the counts of warp 0"
    wrong = np.flatnonzero(starts != wanted)
    return f"starts[{wrong[0]}] is {starts[wrong[0]]}, not {wanted[wrong[0]]}; {wrong.size} of 64 are wrong"


# 3: the length of sorted_token_ids


def buffer_length(numel, num_experts, block_size):
    used = min(numel, num_experts)  # experts with at least one slot: each may have one slot in its last block
    return (used + (numel - used) // block_size) * block_size


def _is_long_enough(length):
    for numel, num_experts, block_size in product((0, 1, 2, 3, 5, 8, 13), (1, 2, 3, 8), (1, 2, 4, 16)):
        got = length(numel, num_experts, block_size)
        case = f"{numel} slots, {num_experts} experts, blocks of {block_size}"
        if got is ...:
            return "not answered yet: return a number of positions"
        if not isinstance(got, Integral):
            return f"{case}: the length is {got}, which is no integer"
        if got < (needed := buffer_length(numel, num_experts, block_size)):
            return f"{case}: {got} positions are too few; a routing exists whose padded slots take {needed}"
        most = min(numel * block_size, numel + num_experts * (block_size - 1))
        if got > most:
            return f"{case}: {got} positions, but {most} suffice for any routing"
    return None


# 4: one atomic operation for all lanes with the same expert


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
        if got != wanted:
            return f"the slots of expert {expert} get the places {got}, not {wanted[0]} to {wanted[-1]}, each once"
    atomics = sum(event.what.startswith("global atomic") for event in events)
    least = 4 + 4 + 1 + 32  # experts of each warp
    if atomics > least:
        return f"correct, with {atomics} atomic operations; one per warp and expert would be {least}"
    return None


# 5: slots in ascending order


def slots_in_order(thread, threads, numel):
    share = -(-numel // threads)
    return range(thread * share, min((thread + 1) * share, numel))


def _keeps_the_order(slots):
    for threads, numel in ((32, 100), (64, 512), (32, 7)):
        taken = [slots(thread, threads, numel) for thread in range(threads)]
        if taken[0] is ...:
            return "not answered yet: return the slots of a thread, such as a range"
        flat, case = [slot for of_thread in taken for slot in of_thread], f"{threads} threads, {numel} slots"
        if sorted(flat) != list(range(numel)):
            wrong = next((s for s in range(numel) if flat.count(s) != 1), max(flat, default=0))
            return f"{case}: slot {wrong} is taken {flat.count(wrong)} times"
        if (most := max(map(len, taken))) > -(-numel // threads):
            return f"{case}: one thread takes {most} slots; shared evenly, {-(-numel // threads)} are enough"
        if late := next((n for n in range(1, numel) if flat[n] < flat[n - 1]), None):
            return f"{case}: slot {flat[late - 1]} comes before slot {flat[late]} if both go to the same expert"
    return None


EXERCISES = {
    1: Exercise(
        "a function from the number of experts to the words per row, without bank conflicts",
        _has_no_bank_conflicts,
        "Word w lies in bank w % 32. Lanes l and m conflict if l * pitch and m * pitch leave the same remainder.",
        "lambda num_experts: num_experts | 1  # an odd pitch visits all 32 banks",
    ),
    2: Exercise(
        "a kernel that computes the exclusive scan of 64 numbers with 64 threads",
        _scans_64,
        "The last lane of each warp knows the sum of its warp. Who needs it, and when may they read it?",
        scan_64,
    ),
    3: Exercise(
        "a function from slots, experts and block size to the positions that suffice for any routing",
        _is_long_enough,
        "The worst routing gives as many experts as possible a last block with a single slot. How many can that be?",
        buffer_length,
    ),
    4: Exercise(
        "a kernel that adds to a counter once for all lanes of a warp with the same expert",
        _sorts_with_few_atomics,
        "The mask of cuda.match_any_sync has a bit per lane with the same expert: cuda.popc counts them, cuda.ffs "
        "finds the lowest. The bits below a lane are its rank among them.",
        sort_aggregated,
    ),
    5: Exercise(
        "a function that returns the slots of a thread",
        _keeps_the_order,
        "The table orders an expert's slots by thread first, so the slots of thread 0 must be below those of thread 1.",
        slots_in_order,
    ),
}
