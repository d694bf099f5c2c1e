"""The pytest plugin: a project's Numba-CUDA tests under several seeds."""

import pytest

from moe_numba import simulator

pytest_plugins = "pytester"
pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

PROJECT = """
import unittest
import numpy as np
import pytest
from numba import cuda
from moe_numba import simulator

@cuda.jit
def arrival_order(order, count):
    order[cuda.atomic.add(count, 0, 1)] = cuda.grid(1)

def order():
    order, count = np.full(64, -1, np.int32), np.zeros(1, np.int32)
    arrival_order[2, 32](order, count)
    return order.tolist()

def test_all_threads_arrive():
    assert sorted(order()) == list(range(64))

@pytest.mark.parametrize("n", [1, 2])
def test_parameters(n, simulator_seed):
    with simulator.seed(simulator_seed):
        expected = order()
    assert order() == expected

@pytest.mark.simulator_seeds(4)
def test_marked(simulator_seed):
    assert simulator_seed != 3, "wrong under seed 3"

class TestUnits(unittest.TestCase):
    def setUp(self):
        self.order = order()

    def test_in_a_class(self):
        assert order() == self.order
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """Return a function that runs pytest with the plugin in a process of its own."""
    monkeypatch.delenv("MOE_NUMBA_SEED", raising=False)

    def run(*arguments, simulate="0", project=PROJECT):
        monkeypatch.setenv("MOE_NUMBA_SIMULATE", simulate)
        monkeypatch.setenv("NUMBA_ENABLE_CUDASIM", simulate)
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
        pytester.makepyfile(test_project=project)
        plugins = "-p", "moe_numba.simulator.pytest_plugin", "-p", "no:cacheprovider"
        return pytester.runpytest_subprocess(*plugins, "-v", "-W", "error", *arguments)

    return run


def test_each_test_runs_with_each_seed(run):
    result = run("--simulator-seeds", "3")
    result.assert_outcomes(passed=3 + 6 + 3 + 3, failed=1)
    result.stdout.fnmatch_lines(["simulator: seeds 0 to 2, compute capability 9.0"])
    for name in (
        *("test_all_threads_arrive[[]seed2]", "test_parameters[[]seed1-1]", "test_marked[[]seed2]"),
        "TestUnits::test_in_a_class[[]seed2]",
    ):
        result.stdout.fnmatch_lines([f"test_project.py::{name} PASSED*"])


def test_a_failure_names_its_seed(run):
    result = run("--simulator-seeds", "1")
    result.assert_outcomes(passed=4 + 3, failed=1)
    result.stdout.fnmatch_lines(
        ["*- simulator -*", "seed 3; MOE_NUMBA_SEED=3 repeats it without --simulator-seeds", "*test_marked[[]seed3]*"]
    )


def test_without_seeds_the_environment_decides(run, monkeypatch):
    monkeypatch.setenv("MOE_NUMBA_SEED", "5")
    project = "def test_seed(simulator_seed):\n    assert simulator_seed == 5"
    run(project=project).assert_outcomes(passed=1)


@pytest.mark.parametrize("simulate", ["0", "1"])
def test_options_reach_the_simulator(run, simulate):
    project = """
        from moe_numba import simulator
        from moe_numba.simulator.core.settings import settings

        def test_options():
            assert simulator.ENABLED and simulator.capability.SIMULATED == (8, 6)
            assert not settings["races"]
    """
    result = run("--simulator-arch", "86", "--simulator-no-races", simulate=simulate, project=project)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["simulator: seed 0, compute capability 8.6, without data races"])


@pytest.mark.parametrize("options, variable, reported", [((), None, True), ((), "0", False), (["--races"], "0", True)])
def test_races_are_reported_by_default(run, monkeypatch, options, variable, reported):
    project = """
        import numpy as np
        from numba import cuda

        @cuda.jit
        def kernel(x):
            x[0] = cuda.grid(1)

        def test_kernel():
            kernel[2, 1](np.zeros(1))
    """
    monkeypatch.delenv("MOE_NUMBA_RACES", raising=False)
    if variable is not None:
        monkeypatch.setenv("MOE_NUMBA_RACES", variable)
    result = run(*(option.replace("--", "--simulator-") for option in options), project=project)
    result.assert_outcomes(failed=int(reported), passed=int(not reported))
    assert ("DataRace" in result.stdout.str()) == reported


def test_threads_of_a_test_have_its_seed(run):
    project = """
        from concurrent.futures import ThreadPoolExecutor
        from moe_numba.simulator.core.settings import settings

        def test_thread(simulator_seed):
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(lambda: settings["seed"]).result() == simulator_seed
    """
    run("--simulator-seeds", "2", project=project).assert_outcomes(passed=2)


def test_kernels_that_do_not_compile_fail_the_run(run):
    project = """
        import numpy as np
        from numba import cuda

        @cuda.jit
        def kernel(x):
            x[0] = (1, 2).count(1)

        def test_kernel():
            kernel[1, 1](np.zeros(1))
    """
    run(project=project).assert_outcomes(passed=1)
    result = run("--simulator-compile", project=project)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["kernel kernel(float64[[]:[]]) does not compile: test_project.py:6: *"])


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("--simulator-seeds", "0", "--simulator-seeds is 0, but must be at least 1"),
        ("--simulator-arch", "77", "--simulator-arch is '77'; it must be one of 75, 80, *"),
    ],
)
def test_wrong_options_are_one_sentence(run, option, value, said):
    result = run(option, value)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {said}"])


def test_a_wrong_seed_variable_is_one_sentence(run, monkeypatch):
    monkeypatch.setenv("MOE_NUMBA_SEED", "abc")
    result = run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: MOE_NUMBA_SEED is 'abc'; it must be an integer"])
