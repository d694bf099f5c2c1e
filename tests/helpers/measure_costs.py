"""Measures the CPU time of tests, for ``tests/costs.json``: ``make test-all ARGS=--write-costs``."""

import contextlib
import json
from collections import defaultdict

import psutil
import pytest

from helpers.suite import CASE_S, COSTS, SETUP_S, function_of, read_costs


def cpu_seconds():
    """Return the CPU time of this process and of all that it started, also of those that have ended."""
    process = psutil.Process()
    total = sum(process.cpu_times()[:4])
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:4])
    return total


class CostWriter:
    """Plugin of pytest that replaces the times in ``tests/costs.json`` by those of this run.

    Times of what the run leaves out, and which test finds a planted bug, are kept.
    """

    def __init__(self):
        self._cases, self._setups = defaultdict(list), defaultdict(float)  # of the whole run, in its first process
        self._start, self._setup = 0.0, 0.0

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self._start, self._setup = cpu_seconds(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        start, inner = cpu_seconds(), self._setup
        result = yield
        if fixturedef.scope != "function":
            self._setup = inner + cpu_seconds() - start
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call):
        report = yield
        if call.when == "teardown":
            report.cpu = [cpu_seconds() - self._start - self._setup, self._setup]
        return report

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            seconds, setup = report.cpu
            self._cases[function_of(report.nodeid)].append(seconds)
            self._setups[report.nodeid.partition("::")[0]] += setup

    def pytest_sessionfinish(self, session):
        if hasattr(session.config, "workerinput"):
            return
        costs = read_costs()
        functions = costs["functions"] | {f: sum(times) / len(times) for f, times in self._cases.items()}
        modules = costs["modules"] | self._setups
        write_costs(functions, modules, costs["finders"])


def write_costs(functions, modules, finders, path=COSTS):
    """Write times that matter, sorted and rounded, so that diffs are short."""
    costs = {
        "functions": {name: round(functions[name], 2) for name in sorted(functions) if functions[name] >= CASE_S},
        "modules": {name: round(modules[name], 1) for name in sorted(modules) if modules[name] > SETUP_S},
        "finders": dict(sorted(finders.items())),
    }
    path.write_text(json.dumps(costs, indent=1) + "\n")
