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
def six_shuffles(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(6):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid >= 1 << k:
            value += below
    starts[tid] = value - counts[tid]


@cuda.jit
def sixth_shuffle_for_warp_1(counts, starts):
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(6):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if (tid if k == 5 else tid % 32) >= 1 << k:
            value += below
    starts[tid] = value - counts[tid]


@cuda.jit
def exclusive_sums(counts, starts):
    sums = cuda.shared.array(2, int32)
    tid = cuda.threadIdx.x
    value = counts[tid]
    for k in range(5):
        below = cuda.shfl_up_sync(FULL, value, 1 << k)
        if tid % 32 >= 1 << k:
            value += below
    value -= counts[tid]
    if tid % 32 == 31:
        sums[tid // 32] = value
    cuda.syncthreads()
    starts[tid] = value + (sums[0] if tid >= 32 else 0)


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
def first_place_for_all(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    lowest, first = cuda.ffs(same) - 1, int32(0)
    if cuda.threadIdx.x % 32 == lowest:
        first = cuda.atomic.add(next_place, ids[i], cuda.popc(same))
    places[i] = cuda.shfl_sync(FULL, first, lowest)


@cuda.jit
def rank_without_base(ids, next_place, places):
    i = cuda.grid(1)
    same = uint32(cuda.match_any_sync(FULL, ids[i]))
    places[i] = cuda.popc(same & uint32((uint32(1) << uint32(cuda.threadIdx.x % 32)) - uint32(1)))


def sglangs_length(numel, num_experts, block_size):
    return numel * block_size if numel < num_experts else numel + num_experts * (block_size - 1)


WRONG = [
    ("align-1", scan_of_each_warp, "warp 1 begins at 0; it must begin at 174, the sum of the counts of warp 0"),
    ("align-1", inclusive_scan, "that is the inclusive scan"),
    ("align-1", scan_without_barrier, "two threads race: .* it needs cuda.syncthreads"),
    ("align-1", shuffle_in_a_branch, "a lane is missing from a warp's operation"),
    ("align-1", six_shuffles, "a shuffle only reaches the lanes of its own warp"),
    ("align-1", sixth_shuffle_for_warp_1, "a shuffle only reaches the lanes of its own warp"),
    ("align-1", exclusive_sums, "warp 1 begins at 166, the exclusive sum .* own count 8; it must begin at 174"),
    ("align-1", copies, r"starts\[0\] is 1, not 0"),
    ("align-2", lambda n, e, b: n, "too few: 1 slot, 1 expert, blocks of 2 need 2 positions for some routing, not 1"),
    ("align-2", lambda n, e, b: n + e * (b - 1), "not tight: 0 slots, 1 expert, blocks of 2 need 0, not 1"),
    ("align-2", sglangs_length, "sufficient, but not tight: 2 slots, 1 expert, blocks of 2 need 2, not 3"),
    ("align-2", lambda n, e, b: -(-n // b) * b, "too few: 2 slots, 2 experts, blocks of 2 need 4 positions"),
    ("align-2", lambda n, e, b: n / 1, "the length is 0.0, which is no integer"),
    ("align-2", lambda n, e, b: ..., "not answered yet"),
    ("align-3", lambda experts: experts, "with 64 experts .* need 32 wavefronts .* without bank conflicts they need 1"),
    ("align-3", lambda experts: experts + 1, "with 7 experts and rows of 8 words, the 32 lanes need 8 wavefronts"),
    ("align-3", lambda experts: 33, "the pitch for 64 experts is 33, but a row holds 64 counters"),
    ("align-3", lambda experts: experts + 0.5, "the pitch for 64 experts is 64.5, which is no integer"),
    ("align-3", lambda experts: 1025, "the pitch for 64 experts is 1025; rows of at most 130 words fit"),
    ("align-3", 65, "the answer is 65; a function of the number of experts is needed"),
    ("align-3", lambda experts: ..., "not answered yet"),
    (
        "align-4",
        lambda t, threads, n: range(t, n, threads),
        "32 threads, 100 slots: slot 96 comes before slot 1 if both",
    ),
    ("align-4", lambda t, threads, n: range(n), "slot 0 is taken 32 times"),
    ("align-4", lambda t, threads, n: range(n) if t == 0 else (), "one thread takes 100 slots; shared evenly, 4"),
    ("align-4", lambda t, threads, n: range(t * n // threads, t * n // threads + 1), "slot 1 is taken 0 times"),
    ("align-4", lambda t, threads, n: range(4 * t, 4 * t + 4), "100 slots: there is no slot 100; the last is 99"),
    ("align-4", lambda t, threads, n: t * 4, "the slots of a thread are 0; return a range or a list"),
    ("align-4", lambda t, threads, n: ..., "not answered yet"),
    ("align-5", an_atomic_per_slot, "^the places are right, but with 128 atomic operations; .* would be 41"),
    ("align-5", same_place_for_all, "two threads race"),
    ("align-5", first_place_for_all, r"place \d+ occurs twice: each lane needs its rank in the group"),
    ("align-5", rank_without_base, r"the slots of expert 0 get the places \[.*, not 0 to 48, each once"),
    ("start-3", 9, "two numbers are needed"),
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
    assert exercise("align-3").check(lambda experts: np.int64(experts | 1)).wrong is None


@pytest.mark.parametrize("name", NAMES)
def test_each_exercise_is_shown_wrong_answers(name):
    assert any(wrong == name for wrong, *_ in WRONG)


@pytest.mark.parametrize("name", ["start-9", "start", "start-x", "nothing-1", "-1"])
def test_unknown_exercises_are_named(name):
    with pytest.raises(ValueError, match="there is no exercise"):
        exercise(name)
