"""The choice of a run's tests by their times and by the planted bugs that they find."""

import subprocess
import sys

import pytest
from helpers.measure_costs import write_costs
from helpers.suite import SHARDS, Suite, parse_shard, read_costs
from simulator.mutants.runner import MUTANTS

CHEAP, LONG = [f"tests/a.py::cheap[{i}]" for i in range(50)], [f"tests/a.py::long[{i}]" for i in range(50)]
SHORT, SETUP = ["tests/a.py::twice[0]", "tests/a.py::twice[1]"], [f"tests/b.py::test[{i}]" for i in range(5)]
TESTS = [*CHEAP, *LONG, *SHORT, *SETUP]
COSTS = {
    "functions": {"tests/a.py::cheap": 0.04, "tests/a.py::long": 3.0, "tests/a.py::twice": 0.4},
    "modules": {"tests/b.py": 30.0},
    "finders": {"G01": LONG[7], "G02": CHEAP[3], "G03": LONG[7]},
}


def choose(name, shard=0):
    return Suite(COSTS, name, (shard, SHARDS)).choose(TESTS)


def test_cheap_tests_belong_to_all_runs():
    assert choose("fast") == set(CHEAP)
    assert choose("all") == set(TESTS)
    assert all(choose("commit", shard).issuperset([*CHEAP, *SHORT, LONG[7]]) for shard in range(SHARDS))


def test_shards_are_the_rest_and_take_as_long():
    always = {*CHEAP, *SHORT, LONG[7]}
    rest = [choose("commit", shard) - always for shard in range(SHARDS)]
    assert sum(map(len, rest)) == len(set().union(*rest)) == len(TESTS) - len(always)
    assert sum(set(SETUP) <= shard for shard in rest) == 1, "its fixtures would be made several times"
    assert {len(shard) for shard in rest if not shard & set(SETUP)} <= {1, 2}


@pytest.mark.parametrize("text", ["3", "48/48", "-1/24", "a/b", "1/2/3", ""])
def test_what_is_no_shard_is_refused(text):
    with pytest.raises(ValueError, match="--shard is .*; it must be its number and that of all shards, such as 3/48"):
        parse_shard(text)


def test_each_planted_bug_has_a_test_that_finds_it():
    """``make mutants ARGS='--only NAME --write'`` names one for a new bug."""
    assert read_costs()["finders"].keys() == {name for name, mutant in MUTANTS.items() if mutant.is_expected}


def test_a_run_names_finders_that_are_gone():
    suite = Suite(COSTS, "commit", (0, SHARDS))
    assert suite.missing(TESTS) == [] and suite.missing(LONG) == [CHEAP[3]]


def test_times_that_do_not_matter_are_left_out(tmp_path):
    path = tmp_path / "costs.json"
    write_costs({"t::a": 0.04, "t::b": 1.234}, {"t": 0.5, "u": 9.96}, {"G02": "t::b", "G01": "t::a"}, path)
    assert read_costs(path) == {
        "functions": {"t::b": 1.23},
        "modules": {"u": 10.0},
        "finders": {"G01": "t::a", "G02": "t::b"},
    }


def test_the_header_says_how_to_repeat_a_run():
    command = sys.executable, "-m", "pytest", "--collect-only", "--suite=commit", "--shard=5/48", __file__
    done = subprocess.run(command, capture_output=True, text=True)
    assert "tests: --suite commit --shard 5/48" in done.stdout and done.returncode == 0
    done = subprocess.run([*command[:-2], "--shard=5", __file__], capture_output=True, text=True)
    assert "--shard is '5'; it must be" in done.stderr and done.returncode == 4
