"""The lesson "Alignment in one launch": its exercises judge answers and cheats; its kernels, and the page's sizes."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, uint32

from moe_numba.course.lessons.align_one_launch import answers, exercises, one_launch
from moe_numba.course.lessons.align_one_launch.sizes import BINS, FULL
from moe_numba.course.steps.judge_estimates import cells_of
from moe_numba.course.steps.lesson import Lesson
from moe_numba.course.steps.verdict import OPEN, OVER_PAR, REFUSED, RIGHT, WRONG
from moe_numba.ptx.atomics import atom_add_relaxed_gpu_s32, ld_relaxed_gpu_s32, st_relaxed_gpu_s32
from moe_numba.ptx.fence import fence_acq_rel_gpu
from moe_numba.ptx.warp import lanemask_lt, redux_sync_add_s32
from moe_numba.runtime.changed_source import SourceLoader

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the simulator judges: set MOE_NUMBA_SIMULATE=1")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "notebooks" / "04_align_one_launch.py"


# --- answers ------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def rank_of_lanes_above(expert):
    same = uint32(cuda.match_any_sync(FULL, expert))
    above = cuda.popc(same) - cuda.popc(same & lanemask_lt()) - 1
    return int32(above), int32(cuda.popc(same))


@cuda.jit(device=True)
def rank_counts_itself(expert):
    same = uint32(cuda.match_any_sync(FULL, expert))
    return int32(cuda.popc(same & lanemask_lt()) + 1), int32(cuda.popc(same))


@cuda.jit(device=True)
def rank_of_64_bits(expert):
    same = uint32(cuda.match_any_sync(FULL, expert))
    return cuda.popc(same & lanemask_lt()), cuda.popc(same)


@cuda.jit(device=True)
def rank_by_shuffles(expert):
    rank, count, lane = int32(0), int32(0), cuda.threadIdx.x & 31
    for other in range(32):
        same = int32(cuda.shfl_sync(FULL, expert, other) == expert)
        count = int32(count + same)
        rank = int32(rank + (same if other < lane else int32(0)))
    return rank, count


@cuda.jit(device=True)
def rank_by_votes(expert):
    rank, count = int32(0), int32(0)
    for each in range(257):
        lanes = uint32(cuda.ballot_sync(FULL, expert == each))
        if expert == each:
            rank, count = int32(cuda.popc(lanes & lanemask_lt())), int32(cuda.popc(lanes))
    return rank, count


@cuda.jit(device=True)
def rank_by_reductions(expert):
    rank, count = int32(0), int32(0)
    for each in range(257):
        lanes = redux_sync_add_s32(FULL, int32(1 << (cuda.threadIdx.x & 31)) if expert == each else int32(0))
        if expert == each:
            rank, count = int32(cuda.popc(uint32(lanes) & lanemask_lt())), int32(cuda.popc(uint32(lanes)))
    return rank, count


@cuda.jit(device=True)
def rank_by_a_match_for_each_half(expert):
    low, high = cuda.match_any_sync(FULL, expert & 15), cuda.match_any_sync(FULL, expert >> 4)
    same = uint32(low) & uint32(high)
    return int32(cuda.popc(same & lanemask_lt())), int32(cuda.popc(same))


@cuda.jit(device=True)
def rank_in_shared_memory(expert):
    experts, tid = cuda.shared.array(64, int32), cuda.threadIdx.x
    experts[tid] = expert
    cuda.syncthreads()
    rank, count = int32(0), int32(0)
    for other in range(tid & ~31, (tid & ~31) + 32):
        same = int32(experts[other] == expert)
        count = int32(count + same)
        rank = int32(rank + (same if other < tid else int32(0)))
    return rank, count


@cuda.jit(device=True)
def count_one_by_one(topk_ids, counts, first, numel):
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        cuda.atomic.add(counts, topk_ids[i] + (0 if i < first else BINS), 1)


@cuda.jit(device=True)
def count_all_as_before(topk_ids, counts, first, numel):
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        cuda.atomic.add(counts, topk_ids[i], 1)


@cuda.jit(device=True)
def count_without_atomics(topk_ids, counts, first, numel):
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        counts[topk_ids[i] + (0 if i < first else BINS)] += 1


def barrier(sync_before=True, fence_before=True, fence_after=True, sync_after=True):
    """Return the lesson's barrier, perhaps without some of its links."""

    @cuda.jit(device=True)
    def linked(counter):
        if sync_before:
            cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            if fence_before:
                cuda.threadfence()
            others = int32(cuda.gridDim.x - 1)
            add = int32(uint32(1 << 31) - uint32(others)) if cuda.blockIdx.x == 0 else int32(1)
            old = atom_add_relaxed_gpu_s32(counter, 0, add)
            while int32(old ^ ld_relaxed_gpu_s32(counter, 0)) >= 0:
                pass
            if fence_after:
                cuda.threadfence()
        if sync_after:
            cuda.syncthreads()

    return linked


@cuda.jit(device=True)
def barrier_with_lighter_fences(counter):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        fence_acq_rel_gpu()
        others = int32(cuda.gridDim.x - 1)
        add = int32(uint32(1 << 31) - uint32(others)) if cuda.blockIdx.x == 0 else int32(1)
        old = atom_add_relaxed_gpu_s32(counter, 0, add)
        while int32(old ^ ld_relaxed_gpu_s32(counter, 0)) >= 0:
            pass
        fence_acq_rel_gpu()
    cuda.syncthreads()


@cuda.jit(device=True)
def every_thread_arrives(counter):
    cuda.threadfence()
    others = int32(cuda.gridDim.x * cuda.blockDim.x - 1)
    first = cuda.grid(1) == 0
    add = int32(uint32(1 << 31) - uint32(others)) if first else int32(1)
    old = atom_add_relaxed_gpu_s32(counter, 0, add)
    while int32(old ^ ld_relaxed_gpu_s32(counter, 0)) >= 0:
        pass
    cuda.threadfence()
    cuda.syncthreads()


@cuda.jit(device=True)
def barrier_that_resets(counter):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        if atom_add_relaxed_gpu_s32(counter, 0, 1) == cuda.gridDim.x - 1:
            st_relaxed_gpu_s32(counter, 0, 0)
        while ld_relaxed_gpu_s32(counter, 0) != 0:
            pass
        cuda.threadfence()
    cuda.syncthreads()


@cuda.jit(device=True)
def barrier_that_counts_up(counter):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        old = atom_add_relaxed_gpu_s32(counter, 0, 1)
        goal = (old // cuda.gridDim.x + 1) * cuda.gridDim.x
        while ld_relaxed_gpu_s32(counter, 0) < goal:
            pass
        cuda.threadfence()
    cuda.syncthreads()


@cuda.jit(device=True)
def barrier_of_the_cta(counter):
    cuda.syncthreads()


@cuda.jit(device=True)
def as_on_the_page(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    st_relaxed_gpu_s32(flags, cta, 1)
    prefix[cta] = before + value
    return before


@cuda.jit(device=True)
def only_the_order_of_the_stores(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    prefix[cta] = before + value
    st_relaxed_gpu_s32(flags, cta, 1)
    return before


@cuda.jit(device=True)
def no_fence_of_the_reader(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    prefix[cta] = before + value
    cuda.threadfence()
    st_relaxed_gpu_s32(flags, cta, 1)
    return before


@cuda.jit(device=True)
def no_fence_of_the_writer(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        cuda.threadfence()
        before = prefix[cta - 1]
    prefix[cta] = before + value
    st_relaxed_gpu_s32(flags, cta, 1)
    return before


@cuda.jit(device=True)
def fence_after_the_flag(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        cuda.threadfence()
        before = prefix[cta - 1]
    prefix[cta] = before + value
    st_relaxed_gpu_s32(flags, cta, 1)
    cuda.threadfence()
    return before


@cuda.jit(device=True)
def relaxed_prefix(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = ld_relaxed_gpu_s32(prefix, cta - 1)
    st_relaxed_gpu_s32(prefix, cta, before + value)
    st_relaxed_gpu_s32(flags, cta, 1)
    return before


@cuda.jit(device=True)
def relaxed_prefix_after_the_flag(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = ld_relaxed_gpu_s32(prefix, cta - 1)
    st_relaxed_gpu_s32(flags, cta, 1)
    st_relaxed_gpu_s32(prefix, cta, before + value)
    return before


@cuda.jit(device=True)
def prefix_by_another_name(prefix, flags, value):
    cta, before, sums = cuda.blockIdx.x, int32(0), prefix
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = ld_relaxed_gpu_s32(sums, cta - 1)
    st_relaxed_gpu_s32(sums, cta, before + value)
    st_relaxed_gpu_s32(flags, cta, 1)
    return before


@cuda.jit(device=True)
def flag_carries_the_value(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        word = int32(0)
        while word == 0:
            word = ld_relaxed_gpu_s32(flags, cta - 1)
        before = int32(word - 1)
    prefix[cta] = before + value
    st_relaxed_gpu_s32(flags, cta, before + value + 1)
    return before


@cuda.jit(device=True)
def lighter_fences(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        fence_acq_rel_gpu()
        before = prefix[cta - 1]
    prefix[cta] = before + value
    fence_acq_rel_gpu()
    st_relaxed_gpu_s32(flags, cta, 1)
    return before


@cuda.jit(device=True)
def hand_on_by_atomics(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while cuda.atomic.add(flags, cta - 1, 0) == 0:
            pass
        cuda.threadfence()
        before = prefix[cta - 1]
    prefix[cta] = before + value
    cuda.threadfence()
    st_relaxed_gpu_s32(flags, cta, 1)
    return before


RANK, COUNT, BARRIER, HAND_ON = exercises.rank_in_warp, exercises.count_ids, exercises.grid_barrier, exercises.hand_on
SYNC_BEFORE, FENCE_BEFORE = r"lacks a cuda.syncthreads\(\) before the arrival", "lacks a fence between the stores"
FENCE_AFTER, SYNC_AFTER = "lacks a fence after the last poll", r"lacks a cuda.syncthreads\(\) after the last poll"


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        (RANK, ..., OPEN, "not answered yet"),
        (RANK, answers.rank_in_warp, RIGHT, "0 shuffles, votes and reductions; par is 0"),
        (RANK, rank_of_lanes_above, WRONG, "earlier assignments are in lanes below"),
        (RANK, rank_counts_itself, WRONG, "rank"),
        (RANK, rank_of_64_bits, WRONG, r"cannot shuffle these numbers: return int32"),
        (RANK, rank_by_shuffles, OVER_PAR, "32 shuffles, votes and reductions; par is 0. Which instruction"),
        (RANK, rank_by_votes, OVER_PAR, "257 shuffles, votes and reductions; par is 0. Which instruction"),
        (RANK, rank_by_reductions, OVER_PAR, "257 shuffles, votes and reductions; par is 0. Which instruction"),
        (RANK, rank_by_a_match_for_each_half, REFUSED, "it compares the lanes more than once"),
        (RANK, rank_in_shared_memory, REFUSED, r"shared memory \(\d+ shared loads\)"),
        (COUNT, answers.count_ids, RIGHT, "2 loads of a warp; par is 2"),
        (COUNT, count_one_by_one, OVER_PAR, "8 loads of a warp; par is 2. How many ids"),
        (COUNT, count_all_as_before, WRONG, "counts"),
        (COUNT, count_without_atomics, WRONG, "race"),
        (BARRIER, answers.grid_barrier, RIGHT, "1 atomic operation of a CTA in a barrier; par is 1"),
        (BARRIER, barrier_with_lighter_fences, RIGHT, "par is 1"),
        (BARRIER, every_thread_arrives, OVER_PAR, "33 atomic operations of a CTA in a barrier.*One thread can"),
        (BARRIER, barrier_that_resets, WRONG, "polls in vain"),
        (BARRIER, barrier_that_counts_up, WRONG, "launches, when the counter is"),
        (BARRIER, barrier(sync_before=False), WRONG, SYNC_BEFORE),
        (BARRIER, barrier(fence_before=False), WRONG, FENCE_BEFORE),
        (BARRIER, barrier(fence_after=False), WRONG, FENCE_AFTER),
        (BARRIER, barrier(sync_after=False), WRONG, SYNC_AFTER),
        (BARRIER, barrier(fence_before=False, fence_after=False), WRONG, f"{FENCE_BEFORE}.*; and a fence after the"),
        (BARRIER, barrier_of_the_cta, WRONG, "a thread returns from the barrier before all"),
        (HAND_ON, answers.hand_on, RIGHT, "2 stores of a CTA; par is 2"),
        (HAND_ON, lighter_fences, RIGHT, "par is 2"),
        (HAND_ON, as_on_the_page, WRONG, "two threads race"),
        (HAND_ON, only_the_order_of_the_stores, WRONG, "two threads race"),
        (HAND_ON, no_fence_of_the_reader, WRONG, "two threads race"),
        (HAND_ON, no_fence_of_the_writer, WRONG, "two threads race"),
        (HAND_ON, fence_after_the_flag, WRONG, "two threads race"),
        (HAND_ON, relaxed_prefix, WRONG, "Load and store it as prefix"),
        (HAND_ON, relaxed_prefix_after_the_flag, WRONG, "Load and store it as prefix"),
        (HAND_ON, prefix_by_another_name, WRONG, "Load and store it as prefix"),
        (HAND_ON, flag_carries_the_value, WRONG, "flags.0. is 6, not 1"),
        (HAND_ON, hand_on_by_atomics, REFUSED, "it uses atomic operations"),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "name", None)),
)
def test_answers(exercise, answer, state, text):
    verdict = exercise.check(answer)
    assert verdict.state == state and re.search(text, verdict.text, re.S), verdict
    assert verdict.answer is (answer if state in (RIGHT, OVER_PAR) else exercise.own)


def test_a_barrier_that_resets_is_shown_without_the_solution():
    shown = exercises.show_two_in_a_row(barrier_that_resets)
    assert "polls in vain" in shown.text and shown.name != BARRIER.name
    assert shown.solution is None and not shown.hint and not shown.notes


# --- the page -----------------------------------------------------------------------------------------------------

RUN_WITH = """
import sys, types
import moe_numba
from moe_numba.course.lessons.align_one_launch import sizes
SIZES
from moe_numba.course.steps.judge_estimates import cells_of
from moe_numba.runtime.changed_source import SourceLoader
sys.modules["__main__"] = page = types.ModuleType("__main__")
for number, cell in enumerate(cells_of(open(sys.argv[1]).read())):
    SourceLoader(cell, f"page/cell_{number}.py").exec_module(page)
print(page.lesson.summary())
for lesson in (page.four, page.lesson, page.decode):
    for step in lesson.steps.values():
        print("step", step.name, step.us)
"""
OTHER_SIZES = """
text = open(sizes.__file__).read()
for old, new in (("EXPERTS, TOPK, BLOCK = 256, 8, 16", "EXPERTS, TOPK, BLOCK = 40, 3, 8"),
                 ("FOUR, DECODE, TOKENS = 4, 64, 4096", "FOUR, DECODE, TOKENS = 5, 21, 131"),
                 ("CTAS = 64", "CTAS = 3"), ("WARPS = 16", "WARPS = 16")):
    assert old in text
    text = text.replace(old, new)
exec(text, vars(sizes))
"""


def _run_page(change):
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    command = [sys.executable, "-c", RUN_WITH.replace("SIZES", change), PAGE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    return done.stdout


def test_the_page_runs_with_other_sizes():
    shown = _run_page(OTHER_SIZES)
    assert "no times are recorded for these sizes" in shown and "dependent launch" in shown
    assert "The phases have not been timed with these kernels and sizes." in shown


@pytest.fixture(scope="module")
def versions():
    """The versions of the page's steps, by name; the cells that only show something do not run."""
    main, found = types.ModuleType("__main__"), {}
    patch = pytest.MonkeyPatch()
    patch.setitem(sys.modules, "__main__", main)
    patch.setattr(Lesson, "step", lambda self, name, version, **_: found.setdefault((self, name), version))
    skipped = (
        "page.",
        "draw.",
        "exercises.",
        "my_guess",
        "predict(",
        "lesson.save",
        "print(",
        "decode_ctas",
        "torch.",
        "say(",
    )
    for number, cell in enumerate(cells_of(PAGE.read_text())):
        if not cell.lstrip().startswith(skipped):
            SourceLoader(cell, f"04_align_one_launch/cell_{number}.py").exec_module(main)
    yield found
    patch.undo()


def test_the_steps_are_right_under_several_orders(versions):
    assert len(versions) == 11
    for (lesson, name), version in versions.items():
        for seed in (3, 4):
            with simulator.seed(seed):
                assert lesson.run.check(version) is None, name


def test_a_step_is_cut_off_after_each_phase(versions, monkeypatch):
    """The simulator runs the cut kernels, which do not hang; their times come from here."""
    page = sys.modules["__main__"]
    steps = {name: types.SimpleNamespace(version=version) for (_, name), version in versions.items()}
    monkeypatch.setattr(one_launch.lesson, "steps", steps)
    monkeypatch.setattr(one_launch, "_divided", {})
    phases = ["start", "publish", "rank", "collect", "scan", "write"]
    cut = []

    def recorded(label, kernels):
        cut.append((label, *kernels))
        return float(len(cut))

    monkeypatch.setattr(one_launch.lesson, "recorded_us", recorded)
    ranked = page.make_rank_per_warp(page.lanes_by_mask)
    for name, holes in (
        ("counting loop", (page.publish_nothing, page.rank_by_bits, page.count_in_vectors)),
        ("grid barrier", (page.publish_counts, page.rank_by_bits, page.collect_after_barrier)),
        ("ranks per warp", (page.publish_numbered, ranked, page.collect_numbered)),
    ):
        assert one_launch.show_phases(page.make_align, {name: holes}) is not None
        _, ctas, threads, *attributes = steps[name].version
        for _, kernel in cut[-len(phases) :]:
            for call in one_launch.timed((kernel, ctas, threads, *attributes), 4):
                call()
    assert [label for label, _ in cut[: len(phases)]] == [f"phases of counting loop: {phase}" for phase in phases]
    assert one_launch.phase_us("grid barrier", "scan", "write") == 2 and one_launch.phase_us("0x5", "scan") is None
    assert one_launch.exchange_us() is None or one_launch.start_us() is not None
    monkeypatch.setattr(one_launch, "_divided", {name: dict.fromkeys(phases, 1.0) for name in steps})
    assert one_launch.exchanged()["so"].startswith("So the estimate is right about the exchange")
    assert "gains" not in one_launch.exchanged()["so"]
    one_launch._divided["grid barrier"]["collect"] = 0.5
    assert one_launch.exchanged()["so"].startswith("So the exchange takes less")


def test_nothing_is_predicted_from_what_was_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(one_launch, "_divided", {})
    assert one_launch.exchange_us() is None and one_launch.start_us() is None
    assert one_launch.less("0x5", None) is None and "has not been timed" in capsys.readouterr().out
    assert one_launch.exchanged()["so"] is None
    assert one_launch.ranks_us()["first"] > one_launch.ranks_us()["overlapped"]


def test_the_names_of_the_page_have_a_meaning():
    table = one_launch.constants()
    assert ["COLUMNS", "256"] in [line[:2] for line in table.lines]
    known = {name for line in table.lines for name in line[0].split(", ")}
    imported = re.search(r"sizes import \((.*?)\)", PAGE.read_text(), re.S).group(1).replace(",", " ").split()
    assert set(imported) <= known


@pytest.mark.parametrize("page", [PAGE, PAGE.with_name("03_align_published.py")], ids=lambda page: page.stem)
def test_all_that_a_page_times_is_in_its_record(page):
    """A record has what was timed before ``save``."""
    _, saved, after = page.read_text().partition("lesson.save(")
    assert saved and not re.findall(
        r"\.step\(|show_(?:variants|allocations|phases|fences|counting)|concentrated", after
    )
