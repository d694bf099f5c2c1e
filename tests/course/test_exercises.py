"""Exercises: stubs and typical wrong answers get the right message, solutions pass."""

import importlib
import os
import pkgutil
import re

import numpy as np
import pytest

from moe_numba import simulator
from moe_numba.course import exercises
from moe_numba.course.exercises import exercise

# isort: split
from numba import cuda, float32, int32, uint32

from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32, st_relaxed_gpu_s32

TOPICS = [module.name for module in pkgutil.iter_modules(exercises.__path__)]
NAMES = [
    f"{topic}-{number}"
    for topic in TOPICS
    for number in importlib.import_module(f"moe_numba.course.exercises.{topic}").EXERCISES
]


@cuda.jit
def no_barrier(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    out[i] = tile[63 - i]


@cuda.jit
def half_a_barrier(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    if i < 32:
        cuda.syncthreads()
    out[i] = tile[63 - i]


@cuda.jit
def one_too_far(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    out[i] = tile[64 - i]


@cuda.jit
def copies(x, out):
    out[cuda.threadIdx.x] = x[cuda.threadIdx.x]


@cuda.jit
def misspelt(x, out):
    out[cuda.threadIdx.x] = y[cuda.threadIdx.x]  # noqa: F821


@cuda.jit
def plain_count(x, count):
    i = cuda.grid(1)
    if i < len(x) and x[i] > 0:
        count[0] = count[0] + 1


@cuda.jit
def no_guard(x, count):
    if x[cuda.grid(1)] > 0:
        cuda.atomic.add(count, 0, 1)


@cuda.jit
def first_block_only(x, count):
    i = cuda.threadIdx.x
    if i < len(x) and x[i] > 0 and cuda.blockIdx.x == 0:
        cuda.atomic.add(count, 0, 1)


@cuda.jit
def ranks_by_arrival(ids, ranks):
    counts = cuda.shared.array(8, int32)
    i = cuda.threadIdx.x
    if i < 8:
        counts[i] = 0
    cuda.syncthreads()
    ranks[i] = cuda.atomic.add(counts, ids[i], 1)


@cuda.jit
def ranks_within_the_warp(ids, ranks):
    same = uint32(cuda.match_any_sync(0xFFFFFFFF, ids[cuda.threadIdx.x]))
    ranks[cuda.threadIdx.x] = cuda.popc(same & uint32((uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1)))


@cuda.jit
def goal_wraps(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    goal = int32((atom_add_relaxed_gpu_s32(counter, 0, 1) // 3 + 1) * 3)
    while ld_relaxed_gpu_s32(counter, 0) < goal:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


@cuda.jit
def goal_wraps_at_32_bits(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    goal = int32((uint32(atom_add_relaxed_gpu_s32(counter, 0, 1)) // uint32(3) + uint32(1)) * uint32(3))
    while int32(ld_relaxed_gpu_s32(counter, 0) - goal) < 0:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


@cuda.jit
def does_not_wait(values, rows, sums, counter):
    rows[cuda.blockIdx.x] = values[cuda.blockIdx.x]
    sums[cuda.blockIdx.x] = rows[0] + rows[1] + rows[2]


@cuda.jit
def works_once(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    atom_add_relaxed_gpu_s32(counter, 0, 1)
    while ld_relaxed_gpu_s32(counter, 0) != 3:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


@cuda.jit
def flag_before_value(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    st_relaxed_gpu_s32(flags, cta, 1)
    prefix[cta] = before + values[cta]


@cuda.jit
def one_fence(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    prefix[cta] = before + values[cta]
    cuda.threadfence()
    st_relaxed_gpu_s32(flags, cta, 1)


@cuda.jit
def own_value_only(values, prefix, flags):
    prefix[cuda.blockIdx.x] = values[cuda.blockIdx.x]


FULL = 0xFFFFFFFF


@cuda.jit
def scan_of_each_warp(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid % 32 >= 1 << k:
            value += below
    starts[tid] = value - counts[tid]


@cuda.jit
def inclusive_scan(counts, starts):
    total = int32(0)
    for i in range(cuda.threadIdx.x + 1):
        total += counts[i]
    starts[cuda.threadIdx.x] = total


@cuda.jit
def scan_without_barrier(counts, starts):
    sums = cuda.shared.array(2, int32)
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid % 32 >= 1 << k:
            value += below
    if tid % 32 == 31:
        sums[tid // 32] = value
    starts[tid] = value - counts[tid] + (sums[0] if tid >= 32 else 0)


@cuda.jit
def shuffle_in_a_branch(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    if tid % 32 >= 1:
        value += cuda.shfl_up_sync(FULL, value, 1)
    starts[tid] = value


@cuda.jit
def an_atomic_per_slot(ids, next_place, places):
    i = cuda.grid(1)
    places[i] = cuda.atomic.add(next_place, ids[i], 1)


@cuda.jit
def same_place_for_all(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    if cuda.threadIdx.x % 32 == cuda.ffs(same) - 1:
        cuda.atomic.add(next_place, ids[i], cuda.popc(same))
    places[i] = next_place[ids[i]]


@cuda.jit
def rank_without_base(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    places[i] = cuda.popc(same & uint32((uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1)))


WRONG = [
    ("align-2", scan_of_each_warp, "warp 1 begins at 0; it must begin at 174, the sum of the counts of warp 0"),
    ("align-2", inclusive_scan, "that is the inclusive scan"),
    ("align-2", scan_without_barrier, "two threads race: .* it needs cuda.syncthreads"),
    ("align-2", shuffle_in_a_branch, "a lane is missing from a warp's operation"),
    ("align-2", copies, r"starts\[0\] is 1, not 0"),
    ("align-3", lambda n, e, b: n, "1 slots, 1 experts, blocks of 2: 1 positions are too few; .* take 2"),
    ("align-3", lambda n, e, b: n + e * (b - 1), "0 slots, 1 experts, blocks of 2: 1 positions, but 0 suffice"),
    ("align-3", lambda n, e, b: -(-n // b) * b, "2 slots, 2 experts, blocks of 2: 2 positions are too few"),
    ("align-3", lambda n, e, b: n / 1, "the length is 0.0, which is no integer"),
    ("align-3", lambda n, e, b: ..., "not answered yet"),
    ("align-4", an_atomic_per_slot, "correct, with 128 atomic operations; one per warp and expert would be 41"),
    ("align-4", same_place_for_all, "two threads race"),
    ("align-4", rank_without_base, r"the slots of expert 0 get the places \[.*, not 0 to 48, each once"),
    (
        "align-5",
        lambda t, threads, n: range(t, n, threads),
        "32 threads, 100 slots: slot 96 comes before slot 1 if both",
    ),
    ("align-5", lambda t, threads, n: range(n), "slot 0 is taken 32 times"),
    ("align-5", lambda t, threads, n: range(n) if t == 0 else (), "one thread takes 100 slots; shared evenly, 4"),
    ("align-5", lambda t, threads, n: range(t * n // threads, t * n // threads + 1), "slot 1 is taken 0 times"),
    ("align-5", lambda t, threads, n: ..., "not answered yet"),
    ("align-1", lambda experts: experts, "with 64 experts .* need 32 wavefronts .* without bank conflicts they need 1"),
    ("align-1", lambda experts: experts + 1, "with 7 experts and rows of 8 words, the 32 lanes need 8 wavefronts"),
    ("align-1", lambda experts: 33, r"a row holds 64 counters, but ROW_PITCH\(64\) is 33"),
    ("align-1", lambda experts: experts + 0.5, r"ROW_PITCH\(64\) is 64.5, which is no integer"),
    ("align-1", 65, "TypeError: 'int' object is not callable"),
    ("start-3", 9, "two numbers are needed"),
    ("align-1", lambda experts: 1025, r"ROW_PITCH\(64\) is 1025; rows of at most 130 words fit"),
    ("align-1", lambda experts: ..., "not answered yet"),
    ("align_one_launch-1", ranks_by_arrival, "seed 0, element .* gets rank .* earlier elements have this expert"),
    ("align_one_launch-1", ranks_within_the_warp, "seed 0, element 3. of expert . gets rank 0"),
    ("align_one_launch-2", goal_wraps, "after 715,827,882 launches, when the counter is 2,147,483,646: "),
    ("align_one_launch-2", goal_wraps_at_32_bits, "after 1,431,655,765 launches, when the counter is -1: "),
    ("align_one_launch-2", does_not_wait, "the first launches: DataRace"),
    ("align_one_launch-2", works_once, "the first launches: Deadlock"),
    ("align_one_launch-3", flag_before_value, "two threads race: .*prefix"),
    ("align_one_launch-3", one_fence, "two threads race: .*prefix"),
    ("align_one_launch-3", own_value_only, r"prefix is \[5, 3, 8, 1\], not \[5, 8, 16, 17\]"),
    ("align_one_launch-4", (65536, 1, 5), "a count of 65536, which needs 17 bits"),
    ("align_one_launch-4", (32767, 1, 5), "32767 slots per CTA: the largest count of 16 bits is another number"),
    ("align_one_launch-4", (65535, 65537, 4), "= 0x50001; its halves are not 65537 and 4"),
    ("align_one_launch-4", (65535, ..., 5), "not answered yet"),
    ("start-1", no_barrier, "two threads race: .* it needs cuda.syncthreads"),
    ("start-1", half_a_barrier, "not all threads reach the barrier|two threads race"),
    ("start-1", one_too_far, "an index is out of bounds: .* index 64 is outside the shared array"),
    ("start-1", copies, r"out\[0\] is 0, not 63; 64 of 64 elements are wrong"),
    ("start-1", misspelt, "NameError: name 'y' is not defined"),
    ("start-2", plain_count, "two threads race: .* it needs an atomic operation"),
    ("start-2", no_guard, r"an index is out of bounds: .* index 25\d "),
    ("start-2", first_block_only, "of 256 numbers 85 are positive; the kernel counts 21"),
    ("start-3", (9, 4.5), "the second number is wrong"),
    ("start-3", (4.5, 6), "the first number is wrong"),
    ("start-3", (9.75, 7.125), "the first and the second number is wrong"),
    ("start-4", lambda a, b: not ((a - b).abs() > 1e-3).any(), "never written: it is still NaN"),
    ("start-4", lambda a, b: bool((a == b).all()), "rejects a result whose largest error is 0.0001"),
    ("start-4", lambda a, b: bool((a - b <= 1e-3).all()), "accepts a result that is too small"),
    ("start-4", lambda a, b: bool((a - b).abs().mean() <= 1e-3), "wrong by 0.002: each error counts"),
    ("start-4", lambda a, b: not ((a.nan_to_num() - b).abs() > 1e-3).any(), "never written"),
    ("start-4", lambda a, b: True, "accepts a result of which one element is wrong by 1"),
    ("start-3", (9, ...), "not answered yet: the answer is two numbers, in microseconds"),
]


@pytest.mark.parametrize("name, answer, message", WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_wrong_answers_are_told_what_is_wrong(name, answer, message):
    result = exercise(name).check(answer)
    assert result.wrong is not None
    assert re.search(message, result.wrong, re.DOTALL), result.wrong


def test_on_a_gpu_kernels_run_in_a_process_with_the_simulator(monkeypatch):
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    assert exercise("start-1").check(no_barrier).wrong.startswith("two threads race")
    assert exercise("start-2").check(exercise("start-2").solution).wrong is None


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_answered(name):
    found = exercise(name)
    result = found.check(...)
    assert result.wrong == f"not answered yet: the answer is {found.task}" and str(result).startswith(f"{name}: not")


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_right(name):
    found = exercise(name)
    solution = eval(found.solution) if isinstance(found.solution, str) else found.solution
    result = found.check(solution)
    assert result.wrong is None and str(result) == f"{name}: right"
    assert "<summary>Hint" in result._repr_html_() and "<summary>Solution" in result._repr_html_()


def test_numpy_integers_are_integers():
    assert exercise("align-1").check(lambda experts: np.int64(experts | 1)).wrong is None


@pytest.mark.parametrize("name", NAMES)
def test_each_exercise_is_shown_wrong_answers(name):
    assert any(wrong == name for wrong, *_ in WRONG)


@pytest.mark.parametrize("name", ["start-9", "start", "start-x", "nothing-1", "-1"])
def test_unknown_exercises_are_named(name):
    with pytest.raises(ValueError, match="there is no exercise"):
        exercise(name)
