"""Exercises: stubs and typical wrong answers get the right message, solutions pass."""

import importlib
import itertools
import pkgutil
import re
import sys
import types

import pytest
from wrong_answers import WRONG

from moe_numba import simulator

# isort: split
from numba import cuda

from moe_numba.course import grader, lessons
from moe_numba.course.exercises import exercise, numbered
from moe_numba.runtime.changed_source import changed_source, define

TOPICS = [module.name for module in pkgutil.iter_modules(lessons.__path__)]
NAMES = [f"{topic}-{number}" for topic in TOPICS for number in numbered(topic)]
ROWS = [pytest.param(name, row, id=f"{name}-{n}") for name in WRONG for n, row in enumerate(WRONG[name])]
_numbers = itertools.count()


@pytest.fixture
def notebook(monkeypatch):
    """Return a module that stands for the notebook in which the answers are defined."""
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def planted(notebook, name, right, wrong):
    """Return the solution of an exercise with a passage of its source replaced."""
    solution = exercise(name).solution
    function = getattr(solution, "py_func", solution)
    source, file = changed_source(solution, right, wrong), f"{name}_{next(_numbers)}.py"  # the source is found by file
    vars(notebook).update(define(source, function.__globals__ | {"__name__": "__main__"}, file))
    return vars(notebook)[function.__name__]


def evaluated(name, text):
    """Return the value of an expression that may name what the exercise's module contains."""
    topic, _, _ = name.rpartition("-")
    return eval(text, vars(importlib.import_module(f"moe_numba.course.lessons.{topic}.exercises")))


@pytest.mark.parametrize("name, row", ROWS)
def test_wrong_answers_are_told_what_is_wrong(notebook, name, row):
    *answer, message = row
    result = exercise(name).check(planted(notebook, name, *answer) if len(answer) == 2 else evaluated(name, *answer))
    assert result.wrong is not None
    assert re.search(message, result.wrong, re.DOTALL), result.wrong


def test_on_a_gpu_kernels_run_in_a_process_with_the_simulator(notebook, monkeypatch):
    monkeypatch.setattr(simulator, "ENABLED", False)
    without_barrier = planted(notebook, "start-1", "    cuda.syncthreads()\n", "")
    assert exercise("start-1").check(without_barrier).wrong.startswith("two threads race")
    assert exercise("start-2").check(exercise("start-2").solution).wrong is None


@pytest.mark.skipif(not simulator.ENABLED, reason="another process, with its own limit, runs the kernel")
def test_an_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(grader, "TIMEOUT_S", 1)
    message = "it has not ended after 1 s: does a loop never end?; in the line `"
    assert message in exercise("start-2").check(_endless_kernel).wrong
    assert message in exercise("start-5").check(_endless).wrong
    assert exercise("start-2").check(exercise("start-2").solution).wrong is None


@cuda.jit
def _endless_kernel(x, count):
    i = cuda.grid(1)
    while i >= 0:
        i += 1


def _endless(*_):
    number = 1
    while number:
        number += 1


@pytest.mark.parametrize("name", NAMES)
def test_a_stub_is_not_answered(name):
    found = exercise(name)
    result = found.check(...)
    assert result.wrong == f"not answered yet: the answer is {found.task}" and str(result).startswith(f"{name}: not")


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_is_right(name):
    found = exercise(name)
    solution = evaluated(name, found.solution) if isinstance(found.solution, str) else found.solution
    result = found.check(solution)
    assert result.wrong is None and str(result) == f"{name}: right"
    assert "<summary>Hint" in result._repr_html_() and "<summary>Solution" in result._repr_html_()


@pytest.mark.parametrize("answer", [None, 4, "n"])
def test_what_is_no_function_is_refused(answer):
    assert exercise("start-5").check(answer).wrong == f"the answer must be a function, not {answer!r}"


@pytest.mark.parametrize("name", NAMES)
def test_each_exercise_is_shown_wrong_answers(name):
    assert WRONG[name]


@pytest.mark.parametrize("name", ["start-9", "start", "start-x", "nothing-1", "-1"])
def test_unknown_exercises_are_named(name):
    with pytest.raises(ValueError, match="there is no exercise"):
        exercise(name)
