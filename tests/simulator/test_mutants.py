"""Planted bugs: the tests find those that they found before; and the runner that plants them."""

import pytest
from mutants import runner
from mutants.mutant import Mutant, mutant
from mutants.runner import FOUND, MUTANTS, NOT_FOUND, TIMED_OUT, check_control, try_mutant

KERNEL = "moe_numba/gate/one_token_per_warp.py"
NO_TOKENS = "tests/gate/test_gate.py", "-k", "test_no_tokens"
LOOPS = "tests/gate/test_gate.py", "-k", "test_warps_route_several_tokens and None-41"
CONSTANT = ("tests/gate/test_gate.py::test_constant_rows[1 token-sigmoid-0.0]",)


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name):
    planted = MUTANTS[name]
    outcome = try_mutant(planted)
    if outcome.result == FOUND:
        check_control((outcome.test,))
        assert not planted.equivalent, f"a test finds {name}, which is equivalent: {planted.equivalent}"
    elif not planted.is_expected:
        pytest.xfail(planted.equivalent or planted.not_found_yet)
    else:
        pytest.fail(f"{name}, {planted.mistake}: {outcome.result}; make mutants ARGS='--only {name}' repeats it")


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_change_code(name):
    """Each passage occurs in today's sources as often as stated, and the code without it differs."""
    assert MUTANTS[name].changes_code()


def test_names_are_unique():
    assert len(MUTANTS) == sum(len(topic.MUTANTS) for topic in runner.TOPICS)


def plant(right, wrong, tests=CONSTANT, count=1):
    return mutant("X01", "a test", tests, (KERNEL, right, wrong, count))


def test_a_found_bug_names_the_test_and_its_error():
    outcome = try_mutant(plant("if lane < topk:", "if lane <= topk:", count=4))
    assert (outcome.result, outcome.test) == (FOUND, *CONSTANT) and "DataRace" in outcome.error


@pytest.mark.parametrize(
    "wrong, timeout, result",
    [("token = int32(next_token)", runner.TIMEOUT, NOT_FOUND), ("token = int32(token + 0)", 8, TIMED_OUT)],
    ids=["no fault", "a loop that does not end"],
)
def test_results_other_than_found(wrong, timeout, result):
    assert try_mutant(plant("token = next_token", wrong, LOOPS), timeout=timeout).result == result


@pytest.mark.parametrize(
    "planted, message",
    [
        (plant("lane < topk", "lane < missing", count=4), "the change is no valid code: NameError"),
        (
            plant("from typing import Any, NamedTuple", "from typing import Any, NamedTuples"),
            "(?s)ended with 4.*test_gate.py",
        ),
        (plant("lane < topk", "lane <= topk", ("tests/gate/test_gate.py", "-k", "nothing"), 4), "ended with 5"),
    ],
    ids=["unknown name", "import error", "no tests"],
)
def test_what_does_not_count_is_refused(planted, message):
    with pytest.raises(RuntimeError, match=message):
        try_mutant(planted)


def test_a_control_that_fails_is_refused(tmp_path):
    (tmp_path / "test_it.py").write_text("def test_it():\n    assert False\n")
    option = "def pytest_addoption(parser):\n    parser.addoption('--cheapest-first', action='store_true')\n"
    (tmp_path / "conftest.py").write_text(option)
    with pytest.raises(RuntimeError, match="without a planted bug the tests .* do not pass"):
        check_control((str(tmp_path / "test_it.py"),))


def test_stale_passages_are_refused():
    with pytest.raises(ValueError, match=r"one_token_per_warp.py has 4 times, not 1, the passage 'if lane < topk:'"):
        plant("if lane < topk:", "if lane <= topk:").changes_code()
    assert not plant("# padding rows", "# rows of padding").changes_code()


@pytest.mark.parametrize("least, status", [(0, 0), (2, 1)])
@pytest.mark.parametrize("reasons, found", [({}, True), ({}, False), (dict(not_found_yet="a reason"), False)])
def test_exit_status(reasons, found, least, status, monkeypatch, capsys):
    """1 if a mutant that is expected is not found, or if fewer are found than ``--least``."""
    monkeypatch.setattr(runner, "MUTANTS", {"X01": Mutant("X01", "a test", (), NO_TOKENS, **reasons)})
    result = runner.Outcome(FOUND, "test_gate.py::test_it", "AssertionError") if found else runner.Outcome(NOT_FOUND)
    monkeypatch.setattr(runner, "try_mutant", lambda *_: result)
    monkeypatch.setattr(runner, "check_control", lambda *_: None)
    monkeypatch.setattr("sys.argv", ["mutants", "--least", str(least)])
    assert runner.main() == (status or int(not found and not reasons))
    assert f"{int(found)} of 1 found" in capsys.readouterr().out
