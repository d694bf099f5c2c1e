"""The steps of a lesson: checked, counted, timed or looked up, compared, judged and saved."""

import json

import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32

from moe_numba.course.bench import Stats, records
from moe_numba.course.bench.records.kernel_hash import ast_hash
from moe_numba.course.steps import lesson as steps
from moe_numba.course.steps.ladder import WrongResult, judgement_of
from moe_numba.course.steps.lesson import Lesson, Run, Step, factory
from moe_numba.course.steps.simulate import expression_of
from moe_numba.ptx.memory import atom_add_s32
from moe_numba.runtime.changed_source import plain_function
from moe_numba.runtime.launch import launch

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the simulator counts: set MOE_NUMBA_SIMULATE=1")

THREADS = 64
X = torch.arange(THREADS, dtype=torch.int32)


@factory
def make_sum(add_up, scale):
    @cuda.jit
    def total(x, out):
        add_up(x, out, scale)

    return total


@cuda.jit(device=True)
def one_thread(x, out, scale):
    if cuda.threadIdx.x == 0:
        total = int32(0)
        for i in range(THREADS):
            total = int32(total + scale * x[i])
        out[0] = total


@cuda.jit(device=True)
def all_threads(x, out, scale):
    atom_add_s32(out, 0, scale * x[cuda.threadIdx.x])


@cuda.jit(device=True)
def without_barrier(x, out, scale):
    board = cuda.shared.array(THREADS, int32)
    board[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    atom_add_s32(out, 0, scale * board[cuda.threadIdx.x ^ 32])


@cuda.jit(device=True)
def one_too_few(x, out, scale):
    if cuda.threadIdx.x > 0:
        atom_add_s32(out, 0, scale * x[cuda.threadIdx.x] - (cuda.threadIdx.x == 1))


@cuda.jit(device=True)
def right_but_racing(x, out, scale):
    board = cuda.shared.array(THREADS, int32)
    board[cuda.threadIdx.x] = x[cuda.threadIdx.x]
    atom_add_s32(out, 0, scale * x[cuda.threadIdx.x] + 0 * board[cuda.threadIdx.x ^ 32])


def run(kernel):
    out = torch.zeros(1, dtype=torch.int32)
    launch(kernel, 1, THREADS, X, out)
    return int(out[0])


def check(kernel):
    return None if (found := run(kernel)) == int(X.sum()) else f"the sum is {found}, not {int(X.sum())}"


@pytest.fixture
def lesson():
    page = Run(check, once=run, timed=lambda kernel: [lambda: run(kernel)])
    return Lesson("sums", page, "nowhere:lesson", config={"scale": 1}, size={"n": THREADS}, dtype="int32", seeds=2)


SERIAL, PARALLEL = make_sum(one_thread, 1), make_sum(all_threads, 1)


def test_a_version_is_made_again_from_its_expression():
    text, functions = expression_of((SERIAL, one_thread, 3, "a", None))
    assert text == "(make_sum(one_thread, 1), one_thread, 3, 'a', None,)"
    assert eval(text, globals()) == (SERIAL, one_thread, 3, "a", None)
    assert [plain_function(f).__name__ for f in functions] == ["make_sum", "one_thread", "one_thread"]
    nested, _ = expression_of(factory(lambda kernel: (kernel, 2))(SERIAL))
    assert nested == "<lambda>(make_sum(one_thread, 1))"
    without_factory = make_sum.__wrapped__(one_thread, 2)
    for thing in (without_factory, X):
        with pytest.raises(TypeError, match="mark what makes it with @factory"):
            expression_of(thing)


def test_a_step_is_compared_with_the_one_before_or_with_the_one_that_it_changes(lesson):
    first, second = lesson.step("serial", SERIAL), lesson.step("parallel", PARALLEL)
    third = lesson.step("serial again", SERIAL, after="serial")
    assert (first.before, second.before, third.before) == (None, first, first)
    assert "serial" in str(second) and "global atomics" in str(second) and second._repr_html_().count("<table>") == 1
    again = lesson.step("parallel", PARALLEL)  # its cell runs again
    assert again.before is first and again.edited_from is None and list(lesson.steps)[1] == "parallel"
    for after in ("parallel", "serial again", "no step"):
        with pytest.raises(ValueError, match="the steps that are right, before 'parallel', are 'serial'"):
            lesson.step("parallel", PARALLEL, after=after)


@pytest.mark.parametrize(
    "add_up, message",
    [
        (one_too_few, "^sum: the sum is 2015, not 2016$"),
        (without_barrier, "(?s)^sum: DataRace: .*without_barrier, test_lesson_steps.py:.*\nthe sum is "),
        (right_but_racing, "^sum: DataRace: .*right_but_racing, test_lesson_steps.py:.*cuda.syncthreads"),
    ],
)
def test_a_wrong_version_is_refused_with_the_lines_that_race(lesson, add_up, message):
    with pytest.raises(WrongResult, match=message):
        lesson.step("sum", make_sum(add_up, 1))
    assert not lesson.steps


def test_orders(lesson):
    right, wrong = lesson.orders(PARALLEL, seeds=2), lesson.orders(make_sum(right_but_racing, 1), seeds=2)
    assert str(right) == "wrong under 0 of 2 thread orders\nno race found"
    assert str(wrong).startswith("wrong under 0 of 2 thread orders\nDataRace: ")
    assert str(lesson.orders(make_sum(one_too_few, 1), 2)).startswith("wrong under 2 of 2 thread orders: the sum is")


# --- times --------------------------------------------------------------------------------------------------------


@pytest.fixture
def record(monkeypatch):
    """A record of the steps "serial" and "parallel", and of what diagnoses one."""
    about = {"config": {"scale": 1}, "size": {"n": THREADS}}
    rows = [
        {"step": step, "kernel_us": {"median": us}, "kernels": [{"ast": ast_hash(kernel)}], **about}
        for step, us, kernel in [
            ("serial", 8, SERIAL),
            ("parallel", 4, PARALLEL),
            ("parts: adds", 3, PARALLEL),
            ("parts: loads", 1, SERIAL),
        ]
    ]
    others = records.recorded
    monkeypatch.setattr(
        records, "recorded", lambda topic, *gpu: {"rows": rows} if topic == "sums" else others(topic, *gpu)
    )
    return rows


def test_a_recorded_time_is_shown_for_the_recorded_code_only(lesson, record):
    lesson.step("serial", SERIAL)
    step = lesson.step("parallel", PARALLEL, predicted_us=3.9)
    assert step.sentences() == [
        "recorded on an H200: 4.00 us, 8.00 us before; predicted 3.9 us (-51 %), measured 4 us (-50 %): within a third"
    ]
    edited = lesson.step("parallel", SERIAL, predicted_us=3.9)
    assert edited.us is None and edited.edited_from is step.score and edited.before.name == "serial"
    assert edited.sentences() == ["your version: not timed (the lesson's took 4.00 us on an H200); predicted 3.90 us"]
    assert "before your edit" in str(edited)
    later = lesson.step("third", SERIAL)
    assert later.before is edited and later.sentences() == ["not recorded on an H200 with n = 64, scale = 1"]
    assert str(lesson.summary()).splitlines()[2].startswith("parallel  not timed (the lesson's: 4.00)  ")


def test_a_step_is_compared_with_the_one_before_as_timed_in_the_same_run(lesson, record):
    record[1].update(after="serial", compared_us=[10, 4], predicted_us=5)
    lesson.step("serial", SERIAL)
    step = lesson.step("parallel", PARALLEL, predicted_us=5)
    judged = "predicted 7 us (-30 %), measured 4 us (-60 %): underestimated"  # 3 of 8 us were predicted to go
    assert step.sentences() == [f"recorded on an H200: 4.00 us, 10.0 us before; {judged}"]
    assert str(lesson.summary()).splitlines()[2].split()[1:3] == ["4.00", "2.50"]
    edited = lesson.step("parallel", SERIAL, predicted_us=5)
    assert edited.sentences() == [f"your version: not timed (the lesson's took 4.00 us on an H200; {judged})"]


def test_a_step_that_is_not_there_is_named(lesson):
    with pytest.raises(LookupError, match="step 'serial' is not there yet: its cell has not run, or"):
        lesson.steps["serial"]


def test_times_of_other_sizes_are_not_shown(lesson, record):
    lesson.config = {"scale": 2}
    assert lesson.step("serial", SERIAL).us is None


def test_the_summary_says_how_much_faster_and_judges(lesson, record):
    lesson.step("serial", SERIAL), lesson.step("parallel", PARALLEL, predicted_us=4.5)
    head, *lines = str(lesson.summary()).splitlines()
    assert head.split("  ")[0] == "step" and lines[0].split()[:2] == ["serial", "8.00"]
    assert lines[1].split()[:3] == ["parallel", "4.00", "2.00"] and lines[1].endswith(": within a third")
    assert "<th>times as fast</th>" in lesson.summary()._repr_html_()


def test_diagnosing_times_are_those_of_the_code_that_runs(lesson, record):
    calls = {"adds": lambda: run(PARALLEL), "loads": [lambda: run(SERIAL)]}
    assert lesson.times("parts", calls) == {"adds": 3, "loads": 1}
    assert lesson.times("parts", calls | {"loads": lambda: run(PARALLEL)}) == {}, "it is edited"
    assert lesson.times("other parts", calls) == {}


def test_nothing_timed_is_nothing_saved(lesson, capsys, tmp_path):
    lesson.step("serial", SERIAL)
    lesson.save(results=tmp_path)
    assert capsys.readouterr().out == "not timed: no record is written\n" and not list(tmp_path.iterdir())


def judged(before_us, us, predicted_us):
    step = lambda us, before, predicted: Step("s", None, None, before, us, None, predicted, f"measured: {us} us")
    return step(us, step(before_us, None, None), predicted_us)


@pytest.mark.parametrize(
    "times, verdict",
    [
        ((10, 9.9, 5), "predicted 5 us (-50 %), measured 9.9 us (-1 %): not there"),
        ((10, 4, 5), "measured 4 us (-60 %): within a third"),
        ((100, 10, 2), "overestimated"),  # nearly the same saving, but five times what was to remain
        ((None, 4, 5), "measured: 4 us; predicted 5.00 us"),
    ],
)
def test_a_prediction_is_judged_by_what_it_saves_and_what_remains(times, verdict):
    assert judged(*times).sentences()[0].endswith(verdict)


def test_on_a_gpu_steps_are_timed_beside_the_one_before_and_saved(lesson, monkeypatch, tmp_path):
    """The GPU is a fake: what `timed` returns takes 2 us, anything else 1 us."""
    stats = {list: Stats(2.0, 2.0, 2.0), type(check): Stats(1.0, 1.0, 1.0)}
    monkeypatch.setattr(steps, "kernel_times", lambda calls: {name: stats[type(call)] for name, call in calls.items()})
    lesson.run = lesson.run._replace(check=lambda kernel: None)
    monkeypatch.setattr(steps, "in_simulator", lambda function, *arguments, functions: [("model", "time", 3.0)])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(
        records,
        "environment",
        lambda: {
            "gpu": "NVIDIA H200",
            "driver": "580",
            "versions": {},
            "commit": "1a2b3c4d",
            "date": "2026-11-23T10:00:00Z",
        },
    )
    with monkeypatch.context() as patched:
        patched.setattr(simulator, "ENABLED", False)
        lesson.step("serial", SERIAL)
        step = lesson.step("parallel", PARALLEL, predicted_us=1.5)
        assert lesson.times("parts", {"adds": lambda: None}) == {"adds": 1.0}
        lesson.save(results=tmp_path)
    assert step.us == 2 and "measured: 2.00 us" in step.time_text and step.judgement.verdict == "not there"
    assert step.score.us == 3.0
    rows = json.loads((tmp_path / "h200" / "sums.json").read_text())["rows"]
    assert [row["step"] for row in rows] == ["serial", "parallel", "parts: adds"]
    assert rows[1]["compared_us"] == [2, 2] and rows[1]["after"] == "serial" and rows[1]["config"] == {"scale": 1}
    assert judgement_of(rows[1]).remaining_us == 1.5 and judgement_of(rows[2]) is None
