"""Exercises of the notebooks on the alignment (`moe_align_block_size`)."""

from itertools import product
from numbers import Integral

import numpy as np

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, Wrong, case, expect_between, expect_equal, function_test, kernel_test
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


_COUNTS = np.arange(64, dtype=np.int32) * 7 % 10 + 1
_STARTS = _COUNTS.cumsum() - _COUNTS

# 2: the length of sorted_token_ids


def buffer_length(numel, num_experts, block_size):
    used = min(numel, num_experts)  # experts with at least one slot: each may have one slot in its last block
    return (used + (numel - used) // block_size) * block_size


_SIZES = list(product((0, 1, 2, 3, 5, 8, 13), (1, 2, 3, 8), (1, 2, 4, 16)))


# 3: a row pitch


def _has_no_bank_conflicts(row_pitch):
    for num_experts in (64, 32, 16, 7):
        words = row_pitch(num_experts)
        with case(f"{num_experts} experts"):
            least, most = num_experts, 2 * num_experts + 2
            if not isinstance(words, Integral) or not least <= words <= most:
                raise Wrong(f"a row has {words!r} words; an integer from {least} to {most} is needed")
            for expert in (0, num_experts - 1):
                addresses = {lane: 4 * (lane * words + expert) for lane in range(32)}
                expect_between(
                    f"wavefronts to read a column of rows of {words} words",
                    count_wavefronts(addresses, 4, True)[0],
                    most=1,
                )


# 4: slots in ascending order


def slots_in_order(thread, threads, numel):
    share = -(-numel // threads)
    return range(thread * share, min((thread + 1) * share, numel))


def _keeps_the_order(slots):
    for threads, numel in ((32, 100), (64, 512), (32, 7)):
        with case(f"{threads} threads, {numel} slots, one thread after the other"):
            taken = [list(slots(thread, threads, numel)) for thread in range(threads)]
            expect_equal("slots", sum(taken, []), range(numel))
            expect_between("slots of one thread", max(map(len, taken)), most=-(-numel // threads))


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


_IDS = np.concatenate([np.arange(64) % 4, np.zeros(32), np.arange(32)]).astype(np.int32)
_PER_EXPERT = np.bincount(_IDS, minlength=32)
_FIRST_PLACES = (_PER_EXPERT.cumsum() - _PER_EXPERT).astype(np.int32)


def _sort(kernel, ids, next_place):
    """Sort, and return the expert of each place: within an expert any order is right."""
    places = np.full(128, -1, np.int32)
    kernel[2, 64](ids, next_place, places)
    experts = np.full(129, -1, np.int32)  # the last for places that do not exist
    experts[np.where((places >= 0) & (places < 128), places, 128)] = ids
    return {"the expert of place": experts[:128]}


EXERCISES = {
    1: Exercise(
        "a kernel that computes the exclusive scan of 64 numbers with 64 threads",
        kernel_test(Run((1, 64), {"counts": _COUNTS, "starts": np.full(64, -7, np.int32)}, {"starts": _STARTS})),
        "Warp 1 needs the sum of warp 0. What orders the write before the read?",
        scan_64,
    ),
    2: Exercise(
        "a function from slots, experts and block size to the fewest places that suffice for any routing; each slot "
        "may choose any expert",
        function_test(buffer_length, _SIZES),
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
        kernel_test(
            Run(_sort, {"ids": _IDS, "next_place": _FIRST_PLACES}, {"the expert of place": np.sort(_IDS)}),
            at_most={"global atomics": 4 + 4 + 1 + 32},  # the distinct experts of each warp
        ),
        "The mask of cuda.match_any_sync has a bit per lane with the same expert: cuda.popc counts them, cuda.ffs "
        "finds the lowest. The bits below a lane are its rank among them.",
        sort_aggregated,
    ),
}
