"""Plants bugs in copies of the package, and runs the tests that should find them.

A bug counts as found if one of its tests fails that passes without it; they run in the order of their times, so that
it is the cheapest one. Bugs are planted in a temporary folder of
symbolic links to the repository; only the changed files are copies. Tests run in the simulator, in a process of their
own, which gets this process's environment, so that settings such as MOE_NUMBA_SEED apply to the bug and its control.
"""

import argparse
import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from helpers.measure_costs import write_costs
from helpers.suite import read_costs

from . import (
    align,
    block_scaled,
    dispatch_layout,
    expert_parallel,
    gate,
    gemv,
    grouped_gemm,
    k_grouped,
    low_latency,
    mma_sync,
    moe_layer,
    w4,
)
from .mutant import REPOSITORY

TOPICS = (
    gate,
    align,
    dispatch_layout,
    expert_parallel,
    low_latency,
    grouped_gemm,
    block_scaled,
    k_grouped,
    mma_sync,
    w4,
    gemv,
    moe_layer,
)
MUTANTS = {m.name: m for topic in TOPICS for m in topic.MUTANTS}
TIMEOUT = 120  # seconds, for one run of a mutant's tests

OUTPUT = "output.txt"  # of pytest

# Tests run in copies of a process that has imported what takes long and does not depend on the package.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "hypothesis.extra.numpy", "pytest"])

FOUND, NOT_FOUND, TIMED_OUT = "found", "not found", "timeout"


class Outcome(NamedTuple):
    """Whether a mutant was found; the failing test, and the first line of its error."""

    result: str
    test: str = ""
    error: str = ""
    seed: int | None = None


@contextlib.contextmanager
def planted(sources):
    """Yield a folder with links to the repository's package and tests, in which ``sources`` {file: text} differ."""
    with tempfile.TemporaryDirectory(prefix="moe_numba-mutant-") as folder:
        root = Path(folder)
        for name in ("pyproject.toml", "tests"):
            (root / name).symlink_to(REPOSITORY / name)
        changed = {REPOSITORY / file for file in sources}
        for path in (REPOSITORY / "moe_numba").rglob("*"):
            copy = root / path.relative_to(REPOSITORY)
            if path.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            # A changed file's bytecode is left out: it could pass for that of a change made in the same second.
            elif path not in changed and not _is_bytecode_of(path, changed):
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.symlink_to(path)
        for file, text in sources.items():
            (root / file).write_text(text)
        yield root


def _is_bytecode_of(path, sources):
    return path.suffix == ".pyc" and path.parent.parent / f"{path.name.partition('.')[0]}.py" in sources


def run_tests(tests, sources=None, seed=None, timeout=TIMEOUT):
    """Run tests with changed sources, up to the first failure; return an `Outcome`."""
    environment = {"MOE_NUMBA_RACES": os.environ.get("MOE_NUMBA_RACES", "1")}
    environment |= {} if seed is None else {"MOE_NUMBA_SEED": str(seed)}
    with planted(sources or {}) as root:
        process = _processes.Process(target=_run_pytest, args=(root, tests, dict(os.environ) | environment))
        process.start()
        process.join(timeout)
        if process.exitcode is None:
            with contextlib.suppress(ProcessLookupError):  # it has not become a group of its own yet
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
            return Outcome(TIMED_OUT)
        output = (root / OUTPUT).read_text()
    if process.exitcode == 0:
        return Outcome(NOT_FOUND)
    failure = re.search(r"^(?:FAILED|ERROR) (\S+?::\w+(?:\[.*?\])?)(?: - (.*))?$", output, re.MULTILINE)
    if process.exitcode != 1 or failure is None:  # no tests were selected, or pytest itself has failed
        raise RuntimeError(f"pytest {' '.join(tests)} ended with {process.exitcode}:\n{output}")
    error = failure[2] or ""
    if sources and re.match(r"(NameError|UnboundLocalError|SyntaxError|ImportError|ModuleNotFoundError)\b", error):
        raise RuntimeError(f"the change is no valid code: {error}")
    return Outcome(FOUND, failure[1], error, seed)


def _run_pytest(root, tests, environment):
    """Run tests in ``root``, and end this process with pytest's exit status."""
    os.setsid()  # so that a timeout can kill the processes that the tests start, too
    os.chdir(root)
    with open(OUTPUT, "wb") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
    os.environ.clear()
    os.environ.update(environment | {"PYTHONPATH": str(root), "MOE_NUMBA_SIMULATE": "1"})
    os.environ["COLUMNS"] = "1000"  # lines of the summary are cut to the terminal's width
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True  # the folder has links to the repository's
    import moe_numba  # noqa: I001  before pytest's plugins
    import pytest

    if not Path(moe_numba.__file__).is_relative_to(root):
        raise RuntimeError(f"tests would import {moe_numba.__file__}, which is not in {root}")
    sys.exit(
        pytest.main([*"-x -q --tb=no -rfE -p no:cacheprovider --hypothesis-seed=0 --cheapest-first".split(), *tests])
    )


def check_control(tests, seed=None):
    """Raise an error unless tests pass without a planted bug."""
    outcome = run_tests(tests, seed=seed, timeout=3 * TIMEOUT)
    if outcome.result != NOT_FOUND:
        raise RuntimeError(f"without a planted bug the tests {' '.join(tests)} do not pass: {outcome}")


def try_mutant(mutant, seeds=(None,), timeout=TIMEOUT):
    """Run a mutant's tests under each of ``seeds`` (None: the environment's) until one finds it.

    That the test passes without the bug is for the caller to check, with `check_control`.
    """
    outcome = Outcome(NOT_FOUND)
    for seed in seeds:
        outcome = run_tests(mutant.tests, mutant.changed_sources(), seed, timeout)
        if outcome.result == FOUND:
            break
    return outcome


def _row(mutant, outcome):
    """Return the lines of the table for a mutant: the test that found it, or why none is expected to."""
    note = f"equivalent: {mutant.equivalent}" if mutant.equivalent else f"not found yet: {mutant.not_found_yet}"
    if outcome.result == FOUND:
        seed = "" if outcome.seed is None else f" (seed {outcome.seed})"
        note = f"{outcome.test.removeprefix('tests/kernels/')}{seed}: {outcome.error[:160]}"
    elif mutant.is_expected:
        note = "expected to be found"
    return f"{mutant.name}  {outcome.result:9}  {mutant.mistake}\n{'':16}{note}"


def write_finder(name, test):
    """Name the test that finds a bug in ``tests/costs.json``, and remove bugs that are no longer planted."""
    costs = read_costs()
    finders = {other: found for other, found in costs["finders"].items() if other in MUTANTS}
    write_costs(costs["functions"], costs["modules"], finders | {name: test})


def main():
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MUTANTS, default=MUTANTS, help="such as G02 A06")
    parser.add_argument("--seeds", type=int, metavar="N", help="thread orders to try: MOE_NUMBA_SEED=0 to N-1")
    parser.add_argument("-n", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="processes")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, metavar="SECONDS", help="for one run of tests")
    parser.add_argument("--write", action="store_true", help="name the tests that found them in tests/costs.json")
    parser.add_argument("--least", type=int, default=0, metavar="N", help="fail if fewer mutants are found")
    arguments = parser.parse_args()
    names, seeds = list(arguments.only), range(arguments.seeds) if arguments.seeds else (None,)
    with ThreadPoolExecutor(arguments.n) as pool:
        tried = pool.map(lambda name: try_mutant(MUTANTS[name], seeds, arguments.timeout), names)
        outcomes = {}
        for name, outcome in zip(names, tried, strict=True):
            outcomes[name] = outcome
            print(_row(MUTANTS[name], outcome), flush=True)
            if arguments.write and outcome.result == FOUND:
                write_finder(name, outcome.test)
        used = {((outcome.test,), outcome.seed) for outcome in outcomes.values() if outcome.result == FOUND}
        list(pool.map(lambda control: check_control(*control), used))
    found = [name for name, outcome in outcomes.items() if outcome.result == FOUND]
    lost = [name for name in names if name not in found and MUTANTS[name].is_expected]
    print(f"{len(found)} of {len(names)} found" + (f"; expected, but not found: {', '.join(lost)}" if lost else ""))
    return int(bool(lost) or len(found) < arguments.least)


if __name__ == "__main__":
    sys.exit(main())
