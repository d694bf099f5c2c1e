"""The checks of a lesson's format accept a lesson that keeps the rules, and find each rule that one breaks."""

import pytest

from moe_numba.course.bench import records
from moe_numba.course.pages import executed, lesson
from moe_numba.course.steps.lesson import Orders

HEAD = "# ---\n# jupyter:\n#   jupytext:\n#     formats: ipynb,py:percent\n# ---\n\n"
PROSE = "# %% [markdown]\n"
CODE = "# %%\n"
STEP = 'ladder.step("wide loads", run, after="pointers", predicted_gain_us=16.0)\n'
MISSED = {"rows": [{"step": "wide loads", "compared_us": [48.2, 45.5], "predicted_gain_us": 16.0}]}
HIT = {"rows": [{"step": "wide loads", "compared_us": [48.2, 33.5], "predicted_gain_us": 16.0}]}
EXPLANATION = PROSE + "# **Explanation.** Loads alone:\n\n" + CODE + 'ladder.times("loads", {"loads": loads_only})\n'


@pytest.fixture
def read(tmp_path):
    def read(text):
        path = tmp_path / "01_small.py"
        path.write_text(HEAD + text)
        return executed.read(path)

    return read


def test_a_good_lesson_has_no_problems(read):
    notebook = read(PROSE + "# ### Step 7: 16-byte loads\n#\n# > 36 us before\n\n" + CODE + STEP + "\n" + EXPLANATION)
    assert lesson.problems(notebook, MISSED) == []


@pytest.mark.parametrize(
    "text", ["It takes 8 us.", "by 5.5 %", "moves 4,300 GB/s", "a gain of 12% here", "16-25 µs", "3 microseconds later"]
)
def test_typed_measurements_are_found(read, text):
    (problem,) = lesson.problems(read(PROSE + f"# {text}\n"))
    assert "typed measurement" in problem


@pytest.mark.parametrize(
    "text", ["32 lanes, 16 bytes each", "> 8 us, says the article", "128 GB of memory", "{us:.1f} us"]
)
def test_numbers_that_are_no_measurements_are_accepted(read, text):
    assert lesson.problems(read(PROSE + f"# {text}\n")) == []


@pytest.mark.parametrize(
    "rest",
    [
        "",
        PROSE + "# **Explanation.** The cache.\n",  # measures nothing
        CODE + "ladder.times('loads', {})\n",  # explains nothing
        PROSE + "# ### Step 8\n\n" + EXPLANATION,  # another step's
    ],
)
def test_a_missed_prediction_needs_an_explanation_that_is_measured(read, rest):
    notebook = read(CODE + STEP + "\n" + rest)
    (problem,) = lesson.problems(notebook, MISSED)
    assert "wide loads" in problem and "overestimated" in problem
    assert lesson.problems(notebook, HIT) == lesson.problems(notebook, None) == []


def test_a_recorded_step_without_a_cell_is_found(read):
    (problem,) = lesson.problems(read(CODE + "x = 1\n"), MISSED)
    assert "no cell has the step 'wide loads'" in problem


@pytest.mark.parametrize("use, count", [("f(3)", 1), ("x = limit + 1", 1), ("g(3)", 0), ("f = limit = 2", 0)])
def test_uses_of_an_exercise_are_found(read, use, count):
    exercise = 'limit = 4\n\n\ndef f(x):\n    g = x\n    return g\n\n\nexercise("gate-1").check(f)\n'
    found = lesson.problems(read(CODE + exercise + "\n" + CODE + use + "\n"))
    assert len(found) == count and all('exercise("gate-1").check(f)' in problem for problem in found)


def test_command_line_reports_problems(read, tmp_path, capsys):
    read(PROSE + "# It takes 8 us.\n")
    assert lesson.main([str(tmp_path / "01_small.py")]) == 1
    assert "typed measurement" in capsys.readouterr().out
    read(CODE + "%pip install x\n")
    assert lesson.main([str(tmp_path / "01_small.py")]) == 0


# Later lessons judge predictions on the page (`course.steps.lesson`).
LESSONS = ("00_start_here",)


@pytest.mark.parametrize("name", LESSONS)
def test_the_lessons_keep_the_rules(name, capsys):
    path = records.repository() / "notebooks" / f"{name}.py"
    assert lesson.main([str(path)]) == 0, capsys.readouterr().out


@pytest.mark.parametrize("path", executed.find(records.repository()), ids=lambda path: path.stem)
def test_notebooks_keep_the_rules(path):
    assert lesson.problems(executed.read(path)) == []


def test_an_error_that_is_also_the_race_is_said_once():
    said = lambda *fields: str(Orders(4, *fields))
    assert said(4, "Deadlock: two waits", "Deadlock: two waits").count("Deadlock") == 1
    assert said(4, "wrong", "DataRace") == "wrong under 4 of 4 thread orders: wrong\nDataRace"
    assert said(0, None, None) == "wrong under 0 of 4 thread orders\nno race found"
