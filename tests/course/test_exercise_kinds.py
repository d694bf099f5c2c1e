"""Choices, numbers and formulas: each verdict, and that explanations appear only with an answer."""

import pytest
from numba import cuda

from moe_numba import simulator
from moe_numba.course.grader import Wrong
from moe_numba.course.steps.exercises import Build, Choose, Formula, Predict
from moe_numba.course.steps.verdict import OPEN, RIGHT, WRONG

LETTERS = {"A": "it waits", "B": "it races"}


@pytest.mark.parametrize(
    "choice, state", [(..., OPEN), ("C", WRONG), (1, WRONG), ("A", WRONG), ("b", RIGHT), ("B", RIGHT)]
)
def test_a_choice_is_explained_with_the_verdict(choice, state):
    verdict = Choose("end", LETTERS, "B", "Two threads store.").check(choice)
    answered = choice in ("A", "b", "B")
    assert verdict.state == state and ("Two threads store." in verdict.text) == answered
    assert answered or "A: it waits; B: it races" in verdict.text


def test_evidence_is_only_asked_for_after_a_choice():
    choose = Choose("end", LETTERS, "A", lambda seeds: f"Wrong under {seeds} seeds.")
    assert choose.check().state == OPEN
    assert "it is A. Wrong under 3 seeds." in choose.check("B", 3).text


@pytest.mark.parametrize(
    "guesses, state, text",
    [
        ({}, OPEN, "no prediction yet"),
        ({"tiles": ...}, OPEN, "no prediction yet"),
        ({"tiles": 4}, RIGHT, "right: tiles: you predicted 4, it is 4. Rounded up."),
        ({"tiles": 4, "percent": 52}, RIGHT, "percent: you predicted 52, it is 50"),
        ({"percent": 54}, WRONG, "wrong: percent: you predicted 54, it is 50"),
        ({"tiles": "4"}, WRONG, "tiles='4' is no number"),
        ({"rows": 4}, WRONG, "rows is not asked; tiles, percent are"),
    ],
)
def test_numbers_appear_beside_guesses(guesses, state, text):
    verdict = Predict("tiles", {"tiles": 4, "percent": 50}, "Rounded up.", within={"percent": 3}).check(**guesses)
    assert verdict.state == state and text in verdict.text
    assert ("Rounded up." in verdict.text) == ("you predicted" in verdict.text)


def test_numbers_may_depend_on_evidence():
    predict = Predict("double", lambda number: {"twice": 2 * number}, lambda number: f"Of {number}.")
    assert predict.check(3, twice=6).state == RIGHT and "Of 3." in predict.check(3, twice=5).text


def _is_square(answer):
    if (found := answer(3)) != 9:
        raise Wrong(f"of 3 the result is {found}, not 9")


def square(number):
    return number * number


@pytest.mark.parametrize(
    "answer, state, text",
    [
        (..., OPEN, "write a function of a number"),
        (lambda number: ..., OPEN, "not answered yet"),
        (lambda number: number + 1, WRONG, "of 3 the result is 4, not 9"),
        (lambda number: number.none, WRONG, "none"),
        (lambda number: number**2, RIGHT, "right: all squares"),
    ],
)
def test_a_formula_is_judged_by_its_results(answer, state, text):
    verdict = Formula("square", "a function of a number", square, _is_square, "all squares").check(answer)
    assert verdict.state == state and text in verdict.text
    assert verdict.answer is (answer if state == RIGHT else square)


@cuda.jit(device=True)
def next_number(number):
    return number + 1


@cuda.jit
def of_next(out):
    out[0] = next_number(out[0])


@pytest.mark.skipif(not simulator.ENABLED, reason="another process judges answers on a GPU: test_score")
@pytest.mark.parametrize(
    "own, other, text", [(next_number, of_next, "write @cuda.jit(device=True)"), (of_next, next_number, "no kernel")]
)
def test_a_kernel_is_no_device_function(own, other, text):
    """In the simulator a kernel can call another one, so that no test of the answer would fail."""
    build = Build("next", "the next number", own, lambda answer: None, lambda answer: None, "shuffles", 0)
    assert text in build.judge(other)[1] and build.judge(other)[0] == WRONG


def test_an_answer_whose_profile_fails_is_wrong():
    """As one that waits for ever with the numbers of the profile, but not with those of the test."""

    def profile(answer):
        raise Wrong("with 64 numbers it waits for ever")

    build = Build("next", "the next number", next_number, lambda answer: None, profile, "shuffles", 0)
    assert build.judge(next_number) == (WRONG, "with 64 numbers it waits for ever", None)
