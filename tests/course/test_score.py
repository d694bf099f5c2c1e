"""The score of a step, and the kinds of exercises, on a lesson in the form of the second edition.

The lesson, a scan within an alignment, is `helpers.scan_lesson`. Nothing of the package is patched.
"""

import inspect
import os
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from cuda import pathfinder

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
import scan_lesson as lesson
from numba import cuda, int32

from moe_numba.course.bench.latencies import latencies
from moe_numba.course.bench.records.kernel_hash import ast_hash
from moe_numba.course.grader import Wrong
from moe_numba.course.lessons.align.answers import warp_0_scans
from moe_numba.course.steps import estimate, recorded
from moe_numba.course.steps.exercises import Break, Diagnose, predict
from moe_numba.course.steps.score import TOTAL, compare, score, score_of_kernels
from moe_numba.runtime import sass
from moe_numba.runtime.changed_source import define
from moe_numba.runtime.sass import disassembler
from moe_numba.simulator.vector import launch as launches

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the simulator counts: set MOE_NUMBA_SIMULATE=1")

FULL = 0xFFFFFFFF
SCANS = {
    "one thread": lesson.serial_scan,
    "Blelloch": lesson.blelloch_scan,
    "warp 0 scans": lesson.make_two_level(warp_0_scans),
    "every warp scans": lesson.make_two_level(lesson.every_warp_scans),
}


@pytest.fixture(scope="module")
def scores():
    launches.fallbacks.clear()
    found = {name: score(lesson.make_align(scan), lesson.run, scan, name) for name, scan in SCANS.items()}
    assert not launches.fallbacks
    return found


# --- the score ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, loads, shuffles, barriers",
    [("one thread", 256, 0, 1), ("Blelloch", 43, 0, 19), ("warp 0 scans", 3, 10, 3), ("every warp scans", 2, 11, 2)],
)
def test_the_critical_path_of_a_scan(scores, name, loads, shuffles, barriers):
    found = scores[name]
    assert (found["shared loads"], found["shuffles"], found["barriers"]) == (loads, shuffles, barriers)


def test_the_table_has_the_critical_path_first_and_says_the_model_s_error(scores):
    text = str(compare(scores["one thread"], scores["Blelloch"]))
    assert text.index("critical path") < text.index("model") < text.index("all warps")
    assert "shuffles" not in text and "only a GPU decides" in text  # it executes more lines in all
    assert estimate.describe_error("H200") in str(scores["one thread"])
    page = compare(scores["Blelloch"], scores["warp 0 scans"])._repr_html_()
    assert 'class="down"' in page and "agree: faster, by more than the model" in page


def test_a_gain_below_the_model_s_error_is_left_to_a_gpu(scores):
    fewer = scores["warp 0 scans"], scores["warp 0 scans"]
    assert compare(*fewer).notes[-1] == "The estimates differ by less than the model's error: only a GPU decides."
    assert "only a GPU decides" not in str(compare(*fewer, timed=True))


@pytest.mark.skipif(not disassembler(), reason="without nvdisasm the lines of instructions are not known")
def test_instructions_of_a_hole(scores):
    """The hole is inlined: its instructions belong to it, not to the line of the call."""
    scan = SCANS["warp 0 scans"]
    found = score(lesson.make_align(scan), lesson.run, scan)
    assert (
        found.rows[TOTAL, "source lines"] < found.rows[TOTAL, "instructions"] < 20 * found.rows[TOTAL, "source lines"]
    )
    assert "instructions" in str(found)


def test_the_model_orders_the_scans(scores):
    times = [scores[name].us for name in ("one thread", "Blelloch", "warp 0 scans")]
    assert times == sorted(times, reverse=True) and times[-1] > 0


def test_without_a_compiler_a_score_has_no_estimate(monkeypatch):
    with simulator.profile() as profile:
        lesson.run(lesson.make_align(lesson.serial_scan))
    with pytest.raises(RuntimeError, match="machine code of kernel align is unknown") as error:
        score_of_kernels(profile.kernels, "a kernel that was not compiled, though it could be")
    assert not isinstance(error.value, estimate.NoCompiler)
    monkeypatch.setattr(sass, "missing", lambda: "install it")
    found = score_of_kernels(profile.kernels, "align")
    assert found.us is None and found["shared loads"] == 256 and "model" not in str(compare(found, found))
    with pytest.raises(estimate.NoCompiler, match="this looks at machine code: install it"):
        estimate.require_compiler()


def test_what_is_missing_for_machine_code(monkeypatch):
    missing = sass.missing.__wrapped__
    assert missing() is None, "the tests' environment has the compiler and nvdisasm"
    with monkeypatch.context() as patch:
        patch.setattr(sass, "disassembler", lambda: None)
        assert missing() == "nvdisasm is not installed: pip install nvidia-cuda-nvdisasm"
    no_compiler = "CUDA's compiler is not installed: pip install 'moe_numba[cu13]'"
    with monkeypatch.context() as patch:
        patch.setattr(pathfinder, "load_nvidia_dynamic_lib", not_found)
        assert missing() == no_compiler
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cuda.pathfinder", None)  # its import fails
        assert missing() == no_compiler
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert missing() == "there is no CUDA compiler for macOS"


def not_found(library):
    raise pathfinder.DynamicLibNotFoundError(library)


def test_what_cannot_be_counted_is_refused():
    kernel = lesson.make_align(lesson.serial_scan)
    with pytest.raises(ValueError, match="run did not launch kernel align"):
        score(kernel, lambda kernel: None)
    with pytest.raises(ValueError, match="kernel align did not call blelloch_scan"):
        score(kernel, lesson.run, lesson.blelloch_scan)
    with pytest.raises(ValueError, match="gpu is 'T4', of which docs/results has no chains"):
        latencies("T4")
    with pytest.raises(KeyError, match="has no row 'loads'"):
        score(kernel, lesson.run)["loads"]


# --- build --------------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def stub(x):
    """Yours."""
    return ...


@cuda.jit(device=True)
def butterfly(x):
    lane, own = cuda.threadIdx.x & 31, x
    for level in range(5):
        other = cuda.shfl_xor_sync(FULL, x, 1 << level)
        x = int32(x + other)
        if lane >> level & 1:
            own = int32(own + other)
    return own


@cuda.jit(device=True)
def one_by_one(x):
    total = x
    for distance in range(1, 32):
        below = cuda.shfl_up_sync(FULL, x, distance)
        if (cuda.threadIdx.x & 31) >= distance:
            total = int32(total + below)
    return total


@cuda.jit(device=True)
def without_guard(x):
    for level in range(5):
        x = int32(x + cuda.shfl_up_sync(FULL, x, 1 << level))
    return x


@cuda.jit(device=True)
def divergent(x):
    for level in range(5):
        if (cuda.threadIdx.x & 31) >= 1 << level:
            x = int32(x + cuda.shfl_up_sync(FULL, x, 1 << level))
    return x


@cuda.jit(device=True)
def through_shared_memory(x):
    values = cuda.shared.array(64, int32)
    values[cuda.threadIdx.x] = x
    cuda.syncwarp()
    total, first = int32(0), cuda.threadIdx.x & ~31
    for i in range(first, cuda.threadIdx.x + 1):
        total = int32(total + values[i])
    for _ in range(5):
        cuda.shfl_up_sync(FULL, x, 1)
    return total


@cuda.jit(device=True)
def in_one_lane(x):
    total, mine = int32(0), x
    for source in range(32):
        value = cuda.shfl_sync(FULL, x, source)
        if (cuda.threadIdx.x & 31) == 31:
            total = int32(total + value)
        if (cuda.threadIdx.x & 31) != 31:
            total = int32(total + (value if source <= (cuda.threadIdx.x & 31) else 0))
        mine = total
    return mine


BOARD = np.zeros(64, np.int32)


@cuda.jit(device=True)
def blackboard(x):
    BOARD[cuda.threadIdx.x] = x
    total = int32(0)
    for i in range(cuda.threadIdx.x & ~31, cuda.threadIdx.x + 1):
        total = int32(total + BOARD[i])
    return cuda.shfl_sync(FULL, total, cuda.threadIdx.x & 31)


@pytest.mark.parametrize(
    "answer, state, text, number",
    [
        (..., "open", "not answered yet: write the sum of x", None),
        (stub, "open", "not answered yet", None),
        (lesson.warp_scan, "right", "right, with 5 shuffles; par is 5", 5),
        (butterfly, "right", "right, with 5 shuffles", 5),
        (one_by_one, "over par", "right, with 31 shuffles; par is 5. What could a lane learn", 31),
        (without_guard, "wrong", "the scan[1] is 16, not 1", None),
        (divergent, "wrong", "a lane is missing", None),
        (through_shared_memory, "refused", "it exchanges values through shared memory", None),
        (in_one_lane, "refused", "one lane executes a line 32 times alone", None),
        (blackboard, "wrong", "BOARD", None),
    ],
)
def test_answers_to_a_build_exercise(answer, state, text, number):
    verdict = lesson.SCAN.check(answer)
    assert (verdict.state, verdict.score) == (state, number), verdict
    assert text in str(verdict)
    assert (verdict.answer is answer) == (state in ("right", "over par"))
    assert verdict.answer in (answer, lesson.warp_scan)  # what the next cell uses
    assert f'class="exercise {state.split()[0]}"' in verdict._repr_html_()


def test_an_answer_below_a_par_that_is_a_bound_is_refused():
    @cuda.jit(device=True)
    def recomputes(x):  # knows the input of the test
        total = int32(0)
        for i in range(cuda.threadIdx.x & ~31, cuda.threadIdx.x + 1):
            total = int32(total + i % 7)
        return total

    verdict = lesson.SCAN.check(recomputes)
    assert verdict.state == "refused" and "it has 0 shuffles, and" in verdict.text


def test_an_answer_flows_into_the_next_step(scores, capsys):
    answer = lesson.SCAN.use(one_by_one)
    assert answer is one_by_one
    assert "right, with 31 shuffles; par is 5" in capsys.readouterr().out


def test_on_a_gpu_another_process_judges(monkeypatch):
    notebook = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", notebook)
    source = "from numba import cuda\n\n\n" + inspect.getsource(without_guard).replace("FULL", "0xFFFFFFFF")
    vars(notebook).update(define(source.replace("int32(", "("), {"__name__": "__main__"}, "cell_of_a_notebook.py"))
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    verdict = lesson.SCAN.check(notebook.without_guard)
    assert (verdict.state, verdict.answer) == ("wrong", lesson.warp_scan) and "the scan[1] is 16" in verdict.text


# --- predict, diagnose, break -------------------------------------------------------------------------------------


def test_predictions_are_judged_by_the_score(scores):
    verdict = predict("Blelloch", barriers=16, bank_conflicts=...).judge(scores["Blelloch"])
    assert (verdict.state, verdict.text) == (
        "wrong",
        "you predicted 16 barriers; it is 19; you made no prediction of bank conflicts",
    )
    assert predict("Blelloch", barriers=19).judge(scores["Blelloch"]).state == "right"
    assert predict("Blelloch", barriers=...).judge(scores["Blelloch"]).text == "no prediction yet"
    text = predict("Blelloch", barriers="19").judge(scores["Blelloch"])
    assert text.state == "wrong" and text.text == "'19' is no number of barriers: write one without quotes"


def test_a_diagnosis_shows_scores_and_reasons_only_after_a_choice(scores):
    ways = {"A": lesson.add_in_a_loop, "B": lesson.every_warp_scans}

    def measure(way):
        scan = lesson.make_two_level(way)
        if wrong := lesson.run(lesson.make_align(scan)):
            raise Wrong(wrong)
        return score(lesson.make_align(scan), lesson.run, scan, way.__name__)

    exercise = Diagnose("scan-3", scores["warp 0 scans"], ways, measure, {"A": "31 loads.", "B": "One shuffle more."})
    still_open, wrong, right = exercise.check(), exercise.check("A"), exercise.check("B")
    assert (still_open.state, still_open.table, still_open.notes) == ("open", None, ())
    assert (wrong.state, right.state) == ("wrong", "right")
    assert "you chose A. B has the shortest critical path." in str(wrong) and "B: One shuffle more." in str(wrong)
    assert right.answer is lesson.every_warp_scans
    assert exercise.check("C").text == "you chose 'C'; the choices are A, B"


def test_a_barrier_too_few():
    def kernel(below):
        return lesson.make_align(lesson.make_two_level(below), 64)

    def passes(below, seed):
        with simulator.seed(seed):
            return lesson.run(kernel(below), 64, 128) is None

    exercise = Break("scan-2", warp_0_scans, passes, lambda below: lesson.race(kernel(below), 64, 128), seeds=4)
    assert exercise.check(warp_0_scans).state == "open"
    assert exercise.check(lesson.add_in_a_loop).state == "refused"
    found = exercise.check(lesson.one_barrier_less)
    assert found.state in ("right", "wrong") and "scan_lesson.py" in found.text


# --- recorded times -----------------------------------------------------------------------------------------------


@pytest.fixture
def record(tmp_path, monkeypatch):
    """A record that has timed `align` with one thread."""
    row = {"step": "one thread", "size": {"tokens": 4096}, "config": {"topk": 8}, "kernel_us": {"median": 24.7}}
    row["kernels"] = [{"name": "align", "ast": ast_hash(lesson.make_align(lesson.serial_scan))}]
    monkeypatch.setattr(recorded.records, "recorded", lambda topic, gpu: {"rows": [row]} if topic == "scan" else None)


@pytest.mark.parametrize(
    "topic, scan, tokens, topk, text",
    [
        ("scan", lesson.serial_scan, 4096, 8, "recorded on an H200: 24.70 us"),
        ("scan", lesson.blelloch_scan, 4096, 8, "your version: not timed (the lesson's took 24.70 us on an H200)"),
        ("scan", lesson.serial_scan, 64, 8, "not recorded on an H200 with tokens = 64, topk = 8"),
        ("scan", lesson.serial_scan, 4096, 6, "not recorded on an H200 with tokens = 4096, topk = 6"),
        ("other", lesson.serial_scan, 4096, 8, "not recorded on an H200 with tokens = 4096, topk = 8"),
    ],
)
def test_a_recorded_time_belongs_to_the_code_and_the_size(record, topic, scan, tokens, topk, text):
    kernels = [lesson.make_align(scan)]
    assert recorded.describe(topic, "one thread", kernels, {"tokens": tokens}, {"topk": topk}) == text
