"""Pytest plugin: run the tests of a Numba-CUDA project in the simulator, each with several seeds.

    pytest -p moe_numba.simulator.pytest_plugin --simulator-seeds 10

It takes effect where it is named with ``-p``: before the project imports Numba. A test named ``test_sum`` then runs as
``test_sum[seed0]`` to ``test_sum[seed9]``. The marker ``simulator_seeds(n)`` sets the number for one test; the fixture
``simulator_seed`` is the seed of the running test. Fixtures of a wider scope than one test run with ``MOE_NUMBA_SEED``.
"""

import functools
import os
import unittest

import pytest

from moe_numba import simulator
from moe_numba.simulator import capability
from moe_numba.simulator.compiler.launched import compile_launched
from moe_numba.simulator.core.settings import settings

_SEED, _COMPILED = pytest.StashKey[int](), pytest.StashKey[list]()


def pytest_addoption(parser):
    group = parser.getgroup("simulator", "CUDA simulator of moe_numba")
    seeds = "run each test with the seeds 0 to N-1"
    group.addoption("--simulator-seeds", type=int, metavar="N", help=seeds)
    races = "report data races, also those that change no value (MOE_NUMBA_RACES, or yes)"
    group.addoption("--simulator-races", action="store_true", default=None, help=races)
    without = "report no data races"
    group.addoption("--simulator-no-races", action="store_false", dest="simulator_races", help=without)
    compile = "compile the launched kernels at the end, with Numba's compiler; no GPU"
    group.addoption("--simulator-compile", action="store_true", help=compile)
    group.addoption("--simulator-arch", metavar="80", help="compute capability of the simulated GPU (default: 90)")


def pytest_load_initial_conftests(early_config):
    """Choose the simulator before the first conftest.py imports Numba."""
    options = early_config.known_args_namespace
    if options.simulator_seeds is not None and options.simulator_seeds < 1:
        raise pytest.UsageError(f"--simulator-seeds is {options.simulator_seeds}, but must be at least 1")
    os.environ.setdefault("MOE_NUMBA_RACES", "1")
    if options.simulator_races is not None:
        os.environ["MOE_NUMBA_RACES"] = str(int(options.simulator_races))
    if options.simulator_compile:
        os.environ["MOE_NUMBA_COMPILE"] = "1"
    try:
        arch = capability.parse(options.simulator_arch, "--simulator-arch") if options.simulator_arch else None
        settings.check_environment()
        simulator.enable("-p moe_numba.simulator.pytest_plugin", arch)
    except (RuntimeError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error


def pytest_configure(config):
    config.addinivalue_line("markers", "simulator_seeds(n): run the test in the simulator with the seeds 0 to n-1")


def pytest_report_header(config):
    seeds = config.option.simulator_seeds
    chosen = f"seeds 0 to {seeds - 1}" if seeds else f"seed {settings['seed']}"
    races = "" if settings["races"] else ", without data races"
    return "simulator: {}, compute capability {}.{}{}".format(chosen, *capability.SIMULATED, races)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Compile the launched kernels; those that do not compile fail the run."""
    errors, notes = compile_launched()
    session.config.stash[_COMPILED] = errors + notes
    if errors and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if messages := config.stash.get(_COMPILED, None):
        terminalreporter.section("kernels compiled by the simulator")
        for message in messages:
            terminalreporter.line(message)


@pytest.fixture(autouse=True)
def simulator_seed(request):
    """The seed of this test's simulated launches."""
    seed = getattr(request, "param", getattr(request.function, "simulator_seed", settings["seed"]))
    request.node.stash[_SEED] = seed
    # By the environment, so that it holds in threads and processes that the test starts.
    before = os.environ.get("MOE_NUMBA_SEED")
    os.environ["MOE_NUMBA_SEED"] = str(seed)
    yield seed
    if before is None:
        del os.environ["MOE_NUMBA_SEED"]
    else:
        os.environ["MOE_NUMBA_SEED"] = before


def _seeds(marker, config):
    """Return the seeds of a test with this marker, or None if it runs once, with the seed of the environment."""
    count = marker.args[0] if marker else config.option.simulator_seeds
    return None if count is None else range(count)


def pytest_generate_tests(metafunc):
    seeds = _seeds(metafunc.definition.get_closest_marker("simulator_seeds"), metafunc.config)
    if seeds is not None:
        metafunc.parametrize("simulator_seed", seeds, indirect=True, ids=[f"seed{seed}" for seed in seeds])


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector, obj):
    """Repeat the methods of `unittest` classes, which pytest does not parametrise."""
    item = yield
    if isinstance(item, pytest.Collector) and isinstance(obj, type) and issubclass(obj, unittest.TestCase):
        item.obj = _repeat_methods(obj, collector)
    return item


def _repeat_methods(cls, collector):
    """Return a subclass with a method for each test and seed."""
    members = {}
    for name in unittest.defaultTestLoader.getTestCaseNames(cls):
        method = getattr(cls, name)
        marks = (*getattr(method, "pytestmark", ()), *getattr(cls, "pytestmark", ()))
        marker = next((mark for mark in marks if mark.name == "simulator_seeds"), None)
        seeds = _seeds(marker or collector.get_closest_marker("simulator_seeds"), collector.config)
        if seeds is not None:
            members[name] = None
            members |= {f"{name}[seed{seed}]": _with_seed(method, seed) for seed in seeds}
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls)(cls.__name__, (cls,), names | members) if members else cls


def _with_seed(method, seed):
    @functools.wraps(method)
    def repeated(self):
        return method(self)

    repeated.simulator_seed = seed
    return repeated


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.failed and _SEED in item.stash:
        seed = item.stash[_SEED]
        report.sections.append(
            ("simulator", f"seed {seed}; MOE_NUMBA_SEED={seed} repeats it without --simulator-seeds")
        )
    return report
