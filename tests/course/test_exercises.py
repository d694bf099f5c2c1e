"""Exercises: stubs and typical wrong answers get the right message, solutions pass."""

import importlib
import os
import pkgutil
import re

import numpy as np
import pytest
from wrong_answers import start

from moe_numba import simulator

# isort: split
from numba import cuda

from moe_numba.course import exercises, lessons
from moe_numba.course.exercises import exercise

TOPICS = [module.name for module in pkgutil.iter_modules(lessons.__path__)]
NAMES = [
    f"{topic}-{number}"
    for topic in TOPICS
    for number in importlib.import_module(f"moe_numba.course.lessons.{topic}.exercises").EXERCISES
]
WRONG = [answer for topic in TOPICS for answer in importlib.import_module(f"wrong_answers.{topic}").WRONG]


@pytest.mark.parametrize("name, answer, message", WRONG, ids=lambda value: getattr(value, "__name__", None))
def test_wrong_answers_are_told_what_is_wrong(name, answer, message, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))  # other processes import kernels from there
    result = exercise(name).check(answer)
    assert result.wrong is not None
    assert re.search(message, result.wrong, re.DOTALL), result.wrong


def test_on_a_gpu_kernels_run_in_a_process_with_the_simulator(monkeypatch):
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    assert exercise("start-1").check(start.no_barrier).wrong.startswith("two threads race")
    assert exercise("start-2").check(exercise("start-2").solution).wrong is None


@pytest.mark.skipif(not simulator.ENABLED, reason="another process, with its own limit, runs the kernel")
def test_an_endless_loop_is_stopped(monkeypatch):
    monkeypatch.setattr(exercises, "TIMEOUT_S", 1)
    message = "it has not ended after 1 s: does a loop never end?; in the line `"
    assert message in exercise("start-2").check(_endless_kernel).wrong
    assert message in exercise("align-3").check(_endless).wrong
    assert exercise("start-2").check(exercise("start-2").solution).wrong is None


@cuda.jit
def _endless_kernel(x, count):
    i = cuda.grid(1)
    while i >= 0:
        i += 1


def _endless(number):
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
    solution = eval(found.solution) if isinstance(found.solution, str) else found.solution
    result = found.check(solution)
    assert result.wrong is None and str(result) == f"{name}: right"
    assert "<summary>Hint" in result._repr_html_() and "<summary>Solution" in result._repr_html_()


def test_numpy_integers_are_integers():
    assert exercise("align-3").check(lambda experts: np.int64(experts | 1)).wrong is None


@pytest.mark.parametrize("answer", [None, 4, "n"])
def test_what_is_no_function_is_refused(answer):
    assert exercise("combine-3").check(answer).wrong == f"the answer must be a function, not {answer!r}"


@pytest.mark.parametrize("name", NAMES)
def test_each_exercise_is_shown_wrong_answers(name):
    assert any(wrong == name for wrong, *_ in WRONG)


@pytest.mark.parametrize("name", ["start-9", "start", "start-x", "nothing-1", "-1"])
def test_unknown_exercises_are_named(name):
    with pytest.raises(ValueError, match="there is no exercise"):
        exercise(name)
