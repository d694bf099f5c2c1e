"""The lesson "Alignment as published": its exercises, ports and kernels, and the page with other sizes."""

import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32

from moe_numba.course.lessons.align import answers, exercises, ports, published
from moe_numba.course.lessons.align.answers import sum_below, take_places, warp_0_scans, warp_scan
from moe_numba.course.steps.exercises import predict
from moe_numba.course.steps.judge_estimates import cells_of
from moe_numba.course.steps.kernel_phases import phases_of
from moe_numba.course.steps.lesson import Lesson
from moe_numba.ptx.memory import atom_add_s32
from moe_numba.runtime.changed_source import SourceLoader
from moe_numba.simulator.compiler import process

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the simulator judges: set MOE_NUMBA_SIMULATE=1")

FULL = 0xFFFFFFFF
ROOT = Path(__file__).parents[2]
PAGE = ROOT / "notebooks" / "03_align_published.py"


# --- exercises: right answers at par, wrong ones, and cheats ------------------------------------------------------


@cuda.jit(device=True)
def stub(x):
    return ...


@cuda.jit(device=True)
def one_by_one(x):
    total = x
    for distance in range(1, 32):
        below = cuda.shfl_up_sync(FULL, x, distance)
        if (cuda.threadIdx.x & 31) >= distance:
            total = int32(total + below)
    return total


@cuda.jit(device=True)
def exclusive(x):
    return warp_scan(x) - x


@cuda.jit(device=True)
def thread_as_lane(x):
    distance = 1
    while distance < 32:
        below = cuda.shfl_up_sync(FULL, x, distance)
        if cuda.threadIdx.x >= distance:
            x = int32(x + below)
        distance *= 2
    return x


@cuda.jit(device=True)
def knows_the_input(x):
    total = int32(0)
    for i in range(cuda.threadIdx.x & ~31, cuda.threadIdx.x + 1):
        total = int32(total + i * 7 % 10 + 1)
    return total


@cuda.jit(device=True)
def lane_0_adds(x):
    total, mine = int32(0), int32(0)
    for source in range(32):
        value = cuda.shfl_sync(FULL, x, source)
        if cuda.threadIdx.x & 31 == 0:
            total = int32(total + value)
        value = cuda.shfl_sync(FULL, total, 0)
        mine = value if source == cuda.threadIdx.x & 31 else mine
    return mine


@cuda.jit(device=True)
def without_first_barrier(inclusive):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    if warp == 0:
        sums[lane] = warp_scan(sums[lane] if lane < warps else int32(0))
    cuda.syncthreads()
    return sums[warp - 1] if warp > 0 else int32(0)


@cuda.jit(device=True)
def without_second_barrier(inclusive):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    if warp == 0:
        sums[lane] = warp_scan(sums[lane] if lane < warps else int32(0))
    return sums[warp - 1] if warp > 0 else int32(0)


@cuda.jit(device=True)
def loads_all_sums(inclusive):
    lane, warp = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    before = int32(0)
    for w in range(warp):
        before = int32(before + sums[w])
    return before


BOARD = np.zeros(4, np.int32)


@cuda.jit(device=True)
def blackboard(inclusive):
    BOARD[cuda.threadIdx.x >> 5] = inclusive
    cuda.syncthreads()
    return BOARD[0]


@cuda.jit(device=True)
def add_per_lane(next_place, expert):
    return atom_add_s32(next_place, expert, 1)


@cuda.jit(device=True)
def without_rank(next_place, expert):
    same = cuda.match_any_sync(FULL, expert)
    lowest, first = cuda.ffs(same) - 1, int32(0)
    if cuda.threadIdx.x & 31 == lowest:
        first = atom_add_s32(next_place, expert, int32(cuda.popc(same)))
    return cuda.shfl_sync(FULL, first, lowest)


@cuda.jit(device=True)
def through_shared_memory(next_place, expert):
    experts = cuda.shared.array(64, int32)
    experts[cuda.threadIdx.x] = expert
    cuda.syncthreads()
    rank, first = int32(0), cuda.threadIdx.x & ~31
    for i in range(first, cuda.threadIdx.x):
        rank += experts[i] == expert
    return take_places(next_place, expert) + 0 * rank


@cuda.jit(device=True)
def without_atomics(next_place, expert):
    """One thread after the other, as if the CTAs did not run at once."""
    place = int32(0)
    for i in range(64):
        if cuda.threadIdx.x == i:
            place = next_place[expert]
            next_place[expert] = place + 1
        cuda.syncthreads()
    return place


@pytest.mark.parametrize(
    "exercise, answer, state, text",
    [
        ("warp_scan", stub, "open", "write the sum of x over lanes 0 to this one"),
        ("warp_scan", warp_scan, "right", "right, with 5 shuffles; par is 5"),
        ("warp_scan", one_by_one, "over par", "31 shuffles; par is 5. What could a lane learn from lane - 16"),
        ("warp_scan", exclusive, "wrong", "that is the exclusive scan"),
        ("warp_scan", thread_as_lane, "wrong", "threadIdx.x is not the lane"),
        ("warp_scan", knows_the_input, "refused", "it has 0 shuffles, and"),
        ("warp_scan", lane_0_adds, "refused", "one lane executes a line 32 times alone"),
        ("one_barrier_less", warp_0_scans, "open", "nothing is removed yet"),
        ("one_barrier_less", without_second_barrier, "right", "right under all 8 thread orders, and still"),
        ("one_barrier_less", without_first_barrier, "wrong", "thread orders: a test may find this one"),
        ("one_barrier_less", sum_below, "refused", "only one `cuda.syncthreads()` of the original may be missing"),
        ("sum_below", stub, "open", "with one barrier"),
        ("sum_below", sum_below, "right", "right, with 1 barrier; par is 1"),
        ("sum_below", warp_0_scans, "over par", "Who else could scan the sums"),
        ("sum_below", without_first_barrier, "wrong", "two threads race"),
        ("sum_below", loads_all_sums, "refused", "it loads the sums one after another (7 shared loads; 2 suffice"),
        ("sum_below", blackboard, "wrong", "BOARD"),
        ("take_places", stub, "open", "a place of its own"),
        ("take_places", take_places, "right", "par is 1"),
        ("take_places", add_per_lane, "over par", "with 32 lanes of a warp adding"),
        ("take_places", without_rank, "wrong", "times, not once"),
        ("take_places", through_shared_memory, "refused", "it uses shared memory"),
        ("take_places", without_atomics, "wrong", "race"),
    ],
)
def test_answers(exercise, answer, state, text):
    verdict = getattr(exercises, exercise).check(answer)
    assert verdict.state == state and text in str(verdict), verdict


@pytest.mark.parametrize(
    "answer, state, text",
    [
        (..., "open", "write a function"),
        (lambda n, experts, block: ..., "open", "not answered yet"),
        (answers.buffer_length, "right", "right for 112 sizes"),
        (
            lambda n, e, b: n * b if n < e else n + e * (b - 1),
            "wrong",
            "2 assignments, 1 experts, blocks of 2: 3 is suffic",
        ),
        (lambda n, e, b: n * b, "wrong", "sufficient, but not tight"),
        (lambda n, e, b: n + min(n, e) * (b - 1), "wrong", "sufficient, but not tight"),
        (lambda n, e, b: -(-n // b) * b, "wrong", "too short for some routing"),
    ],
)
def test_lengths(answer, state, text):
    verdict = exercises.length.check(answer)
    assert text in verdict.text and verdict.state == state


@pytest.mark.parametrize(
    "choice, state, text",
    [
        ((..., ...), "open", "name two of fill, count, scan, expert_ids, sort"),
        (("scan", ...), "open", "name two of"),
        (("scan", "sort"), "right", "you chose scan, sort: right. Of 0x1, scan is the largest phase ("),
        (("scan", "sort"), "right", "From 0x1 to 0x5: scan "),
        (("sort", "scan"), "wrong", "you chose sort, scan: the two largest the other way round"),
        (("sort", "count"), "wrong", "us, and no version touched it), count is"),
        (("fill", "fill"), "wrong", "you chose fill twice"),
        (("launch", "scan"), "wrong", "['launch'] is no phase"),
    ],
)
def test_attacks(choice, state, text):
    verdict = exercises.attack.check(*choice)
    assert verdict.state == state and text in verdict.text


# --- the ports ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ports.PORTS)
def test_the_ports_are_right(name):
    for seed in range(2):
        with simulator.seed(seed), simulator.races():
            assert published.check(name, published.run_port) is None


def test_a_port_is_cut_off_after_each_phase_that_it_has(monkeypatch):
    """The simulator runs the cut kernels; their times, and which phases they are, come from here."""
    assert phases_of(ports.make_port) == ["fill first", "count", "scan", "expert_ids", "fill"]
    monkeypatch.setattr(published, "TOKENS", 64)
    timed = {}

    def times(name, calls, kernels):
        assert calls.keys() <= kernels.keys()
        for call in calls.values():
            call()
        timed[name] = list(calls)
        return {label: float(number) for number, label in enumerate(calls, 1)}

    monkeypatch.setattr(published, "_times", times)
    monkeypatch.setattr(published, "_counting", published._counting.__wrapped__)
    found, source = published.published_phases.__wrapped__()
    assert timed["phases of 0x1"] == ["apart", "count", "scan", "expert_ids", "sort"]
    assert timed["phases of 0x4"] == ["count", "scan", "expert_ids", "fill", "sort"]
    assert timed["phases of 0x5"] == ["count", "scan", "expert_ids", "sort"]
    assert found["0x1"] == {"fill": 1, "count": 2, "scan": 1, "expert_ids": 1, "sort": 5} and source == "recorded"
    assert found["0x4"] == {"count": 1, "scan": 1, "expert_ids": 1, "fill": 1, "sort": 5}
    assert published._phases("0x4, filling first") == {"fill": 1, "count": 1, "scan": 1, "expert_ids": 1, "sort": 5}
    assert str(published.show_counting()).splitlines()[-1].split() == "and a thread clears each counter 5.00".split()
    times_of_all, _ = published.published_times.__wrapped__()
    assert list(times_of_all) == list(ports.PORTS)


def test_times_are_shown_only_for_their_sizes(monkeypatch):
    version = (ports.sort_slots,) * 2
    moved = published.show_allocations({"0x5": version})
    assert moved.lines == [["0x5", "not timed", ""]]  # another kernel than that of the record
    assert published.moved_us()["counters_low"] > published.moved_us()["outputs_high"]
    assert "our ports of 0x1 and 0x5 take" in published.result()
    assert len(published.show_what_did_not_pay().lines) == 4
    monkeypatch.setitem(published.ABOUT, "size", {"tokens": 51})
    monkeypatch.setattr(published.lesson, "size", {"tokens": 51})
    assert set(published.moved_us().values()) == {None}
    assert published.show_peers().lines == [["not timed with these sizes"]]
    assert published.published_phases.__wrapped__()[0] == published.published_times.__wrapped__()[0] == {}
    monkeypatch.setattr(published, "published_times", lambda: ({}, ""))
    assert "No times are recorded for these sizes" in published.result()
    assert (
        exercises.culprit.check({"as it is": ports.sort_replayed}, "A").text == "not timed with these kernels and sizes"
    )


def test_what_a_step_saved_is_said_in_words(monkeypatch):
    steps = {name: types.SimpleNamespace(us=us) for name, us in (("a", 18.41), ("b", 18.39), ("c", 15.6), ("d", None))}
    monkeypatch.setattr(published.lesson, "steps", steps)
    assert published.saved("b", "a") == "takes as long as before, 18.4 and 18.4 us: no gain here"
    assert published.saved("c", "b") == "takes 15.6 us instead of 18.4 us"
    assert published.saved("d", "c") == published.saved("e", "c") == "has not been timed"
    monkeypatch.setattr(published.records, "recorded", lambda _: {"rows": [_row("d", 3.0), _row("c", 4.0)]})
    assert published.saved("d", "c") == "takes 3.00 us instead of 4.00 us (with the lesson's own answers)"


def _row(step, us):
    return dict(step=step, kernel_us=dict(median=us), **published.ABOUT)


def test_beside_a_guess_of_the_bank_conflicts_stands_how_to_count_them(monkeypatch):
    score = {"barriers": 21, "bank conflicts": 232}
    monkeypatch.setattr(published.lesson, "steps", {"0x3 Blelloch": types.SimpleNamespace(score=score)})
    judge = lambda **guesses: str(exercises.judge_blelloch(predict("Blelloch", **guesses)))
    found = judge(barriers=..., bank_conflicts=100)
    assert "it is 232" in found and "1 + 3 + 7 + 7 + 7 + 3 + 1 + 0" in found and "29 x 8 = 232" in found
    for guess in ({"barriers": ...}, {"barriers": 20}):
        assert "232" not in judge(**guess, bank_conflicts=...)


def test_the_diagnosis_of_the_sort_kernel_names_the_variants_that_are_much_faster(monkeypatch):
    names = "as it is", "A: x", "B: y", "C: z"
    variants = dict.fromkeys(names, ports.sort_replayed)
    for us, right, wrong in (((10, 9, 3, 3.3), "BC", "B"), ((10, 7.6, 9, 10), "", "A")):
        monkeypatch.setattr(Lesson, "times", lambda self, name, calls, us=us: dict(zip(names, us, strict=True)))
        assert exercises.culprit.check(variants, right).state == "right"
        assert exercises.culprit.check(variants, wrong).state == "wrong"
        assert ("L2 serves" in exercises.culprit.check(variants, wrong).text) == bool(right)
        assert "BC" not in exercises.culprit.check(variants).text


# --- the page -----------------------------------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch):
    """The page as `__main__`, without what its steps do; `versions` has the version of each step."""
    main = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    main.versions = {}
    monkeypatch.setattr(Lesson, "step", lambda self, name, version, **_: main.versions.setdefault(name, version))
    monkeypatch.setattr(Lesson, "orders", lambda self, version: main.versions.setdefault("as in SGLang", version))
    for number, cell in enumerate(cells_of(PAGE.read_text())):
        if not cell.lstrip().startswith(
            ("page.", "draw.", "exercises.", "my_guess.", "lesson.", "print(", "example", "ids", "say(")
        ):
            SourceLoader(cell, f"03_align_published/cell_{number}.py").exec_module(main)
    return main


MAIN, SORT = ("int32*",) * 5 + ("int32",) * 3, ("int32*", "int32*", "int32*", "int32")


@pytest.mark.parametrize("arch", [(7, 5), (9, 0, "a")], ids=str)
def test_the_kernels_do_not_spill(page, arch):
    kernels = {name: (version[0], MAIN, 1024) for name, version in page.versions.items()}
    kernels |= {f"sort of {name}": (version[1], SORT, 256) for name, version in page.versions.items()}
    kernels |= {name: (kernel, (*SORT, "int32"), 256) for name, kernel in page.variants.items()}
    kernels |= {name: (ports.make_port(*port.arguments), MAIN, 1024) for name, port in ports.PORTS.items()}
    assert len(page.versions) == 9 and len(page.variants) == 4
    requests = [
        process.request(kernel.py_func, {}, types, resources=True, arch=arch, launch_bounds=threads)
        for kernel, types, threads in kernels.values()
    ]
    found = dict(zip(kernels, process.compile_apart(requests), strict=True))
    bad = {name: r for name, r in found.items() if r.get("spilled_bytes") != 0 or r["stack_bytes"] != 0}
    assert not bad, {name: report.get("reason", report) for name, report in bad.items()}
    assert all(report["registers"] * kernels[name][2] <= 65536 for name, report in found.items())


def test_on_a_gpu_another_process_counts_a_version(page, monkeypatch):
    version = page.versions["one barrier"]
    expected = published.lesson.count(version, "one barrier")
    monkeypatch.setattr(simulator, "ENABLED", False)
    counted = published.lesson._score("one barrier", version).rows
    assert {key for key in expected.rows if expected.rows[key] != counted[key]} <= {("all warps", "instructions")}


RUN_WITH = """
import sys, types
import moe_numba
from moe_numba.course.lessons.align import sizes
sizes.EXPERTS, sizes.TOPK, sizes.BLOCK, sizes.TOKENS, sizes.THREADS = 64, 3, 8, 51, 128
from moe_numba.course.steps.judge_estimates import cells_of
from moe_numba.runtime.changed_source import SourceLoader
sys.modules["__main__"] = page = types.ModuleType("__main__")
for number, cell in enumerate(cells_of(open(sys.argv[1]).read())):
    SourceLoader(cell, f"page/cell_{number}.py").exec_module(page)
print(page.lesson.summary())
print(page.page.show_allocations({"0x5": page.v0x5}), page.page.show_peers())
print(page.page.show_phases(), page.page.show_counting())
print(page.exercises.culprit.check(page.variants, "BC"))
"""


def test_the_page_runs_with_other_sizes():
    environment = os.environ | {"MOE_NUMBA_SIMULATE": "1"}
    done = subprocess.run([sys.executable, "-c", RUN_WITH, PAGE], env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    assert "aggregated atomics" in done.stdout and "No times are recorded for these sizes" in done.stdout
    assert done.stdout.count("not timed with these sizes") >= 2
