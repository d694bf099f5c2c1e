"""Tests of the answers to exercises: they compare with a reference, and read the simulator's counters.

A test is a function of the answer. It raises `Wrong` with one of two messages: "out[3] is 4, not 5; 2 of 64 are wrong",
or "right, but with 128 global atomics; at most 41 are needed". `kernel_test`, `function_test` and `number_test` make a
test from data; any other test is a function that uses `case`, `expect_equal` and `expect_between`. `fault` runs a
test. An error that the simulator or the answer raises is a fault, too.
"""

import contextlib
import copy
import functools
import inspect
import linecache
import math
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from moe_numba import simulator

TIMEOUT_S = 60  # for an answer with an endless loop; tests take a few seconds

_FINDINGS = {
    "DataRace": "two threads race",
    "AsyncRace": "an asynchronous copy races with a thread",
    "UninitializedRead": "it reads memory that nothing has written",
    "OutOfBounds": "an index is out of bounds",
    "Misaligned": "an access is not aligned",
    "Deadlock": "threads wait for ever",
    "DivergentBarrier": "not all threads reach the barrier",
    "BarrierMisuse": "a barrier is used wrongly",
    "MissingFence": "a fence is missing",
    "MissingLane": "a lane is missing from a warp's operation",
    "ClusterError": "the CTAs of a cluster are not synchronised",
    "CompileError": "Numba would not compile it",
}
_COUNTERS = {  # functions of `simulator.profile`'s report of a kernel
    "global atomics": lambda report: sum(
        found.lanes for (space, operation, _), found in report.total.accesses.items() if (space, operation) == _ATOMIC
    ),
    "shuffles by each lane": lambda report: report.total.shuffles,
    "shuffles that only some lanes execute": lambda report: sum(
        line.shuffles for line in report.lines if line.divergence < 1
    ),
    "loads of a warp from shared memory": lambda report: report.total.shared_load_requests,
    "bank conflicts": lambda report: report.total.bank_conflicts,
    "bytes of shared memory": lambda report: report.launches[0]["shared_bytes"],
    "bytes stored to other CTAs": lambda report: report.total.distributed_shared_bytes,
    "loaded sectors": lambda report: report.total.global_load_sectors,
    "sectors per load": lambda report: max(
        line.global_load_sectors / max(line.global_load_requests, 1) for line in report.lines
    ),
}
_ATOMIC = "global", "atomic"


class Wrong(Exception):
    """An answer is wrong; the message says what is."""


class _NotAnswered(Exception):
    pass


class _TooLong(Exception):
    pass


class Run(NamedTuple):
    """One launch of a kernel.

    Attributes
    ----------
    launch : (int, int) or callable
        CTAs and threads per CTA, or ``launch(kernel, *arguments)``, which may return further outputs by name.
    arguments : dict
        By name. Each launch gets a copy.
    wanted : dict
        What outputs contain after the launch, by name.
    case : str
        Begins the messages.
    """

    launch: tuple[int, int] | Callable
    arguments: Mapping[str, Any]
    wanted: Mapping[str, Any]
    case: str = ""

    def __call__(self, kernel: Callable) -> None:
        """Launch the kernel, and raise `Wrong` if an output is wrong."""
        outputs = copy.deepcopy(dict(self.arguments))
        launch = self.launch if callable(self.launch) else lambda kernel, *given: kernel[self.launch](*given)
        outputs.update(launch(kernel, *outputs.values()) or {})
        for name, wanted in self.wanted.items():
            expect_equal(name, outputs[name], wanted)


def kernel_test(
    *runs: Run, seeds: int = 1, at_most: Mapping[str, float] | None = None, at_least: Mapping[str, float] | None = None
) -> Callable[[Any], None]:
    """Return a test of a kernel: all runs with several thread orders, and limits on the last run's `_COUNTERS`."""

    def test(kernel):
        for run in runs:
            for seed in range(seeds):
                order = f"thread order {seed}" if seeds > 1 else ""
                with case(", ".join(filter(None, (run.case, order)))), simulator.seed(seed):
                    run(kernel)
        if at_most or at_least:
            with simulator.profile() as profile:
                runs[-1](kernel)
            (report,) = profile.kernels
            with case(runs[-1].case):
                for name, most in (at_most or {}).items():
                    expect_between(name, _COUNTERS[name](report), most=most)
                for name, least in (at_least or {}).items():
                    expect_between(name, _COUNTERS[name](report), least=least)

    return test


def function_test(reference: Callable, cases, rtol: float = 0) -> Callable[[Any], None]:
    """Return a test that compares a function with a reference.

    ``cases`` are tuples of arguments, or a dict of such tuples by what the messages call them. ``rtol`` is the largest
    relative error.
    """
    names = list(inspect.signature(reference).parameters)
    if not isinstance(cases, Mapping):
        texts = (", ".join(f"{n} = {_text(value)}" for n, value in zip(names, given, strict=True)) for given in cases)
        cases = dict(zip(texts, cases, strict=True))

    def test(answer):
        for name, arguments in cases.items():
            with case(name):
                given = copy.deepcopy(arguments)
                found = answer(*given)
                for argument, value, before in zip(names, given, arguments, strict=True):
                    if _text(value) != _text(before):
                        raise Wrong(f"it changes its argument {argument}")
                expect_equal("the result", found, reference(*arguments), rtol)

    return test


def number_test(*wanted: float) -> Callable[[Any], None]:
    """Return a test of a tuple of numbers, whose message says which are wrong, and not the right ones."""

    def test(answer):
        if not isinstance(answer, tuple | list) or len(answer) != len(wanted):
            raise Wrong(f"{len(wanted)} numbers are needed, in parentheses")
        pairs = enumerate(zip(answer, wanted, strict=True), 1)
        if wrong := [f"number {n}, {found!r}," for n, (found, right) in pairs if found != right]:
            raise Wrong(f"{' and '.join(wrong)} {'is' if len(wrong) == 1 else 'are'} wrong")

    return test


@contextlib.contextmanager
def case(name: str) -> Iterator[None]:
    """Begin the message of an error that is raised within this context with the name of a case."""
    try:
        yield
    except Exception as error:
        error.case = f"{name}: " if name else ""
        raise


def expect_equal(name: str, found: Any, wanted: Any, rtol: float = 0) -> None:
    """Raise `Wrong` if a number, a tuple of numbers, or the elements of an array or a list are not as wanted."""
    if isinstance(wanted, Real | tuple):
        if not _is_number(found, wanted, rtol):
            raise Wrong(f"{name} is {_text(found)}, not {_text(wanted)}")
        return
    found, wanted = np.asarray(found), np.asarray(wanted)
    if found.shape != wanted.shape:
        raise Wrong(f"{name} has the shape {found.shape}, not {wanted.shape}")
    equal = np.isclose(found, wanted, rtol=rtol, atol=0) if rtol else found == wanted
    if len(wrong := np.argwhere(~equal)):
        index = tuple(wrong[0].tolist())
        found_text, text = _text(found[index].item()), _text(wanted[index].item())
        share = f"{len(wrong)} of {equal.size} {'is' if len(wrong) == 1 else 'are'} wrong"
        raise Wrong(f"{name}[{', '.join(map(str, index))}] is {found_text}, not {text}; {share}")


def expect_between(name: str, found: float, least: float = 0, most: float = math.inf) -> None:
    """Raise `Wrong` if a right answer needs too little or too much of what ``name`` says."""
    if not least <= found <= most:
        limit = f"at most {most}" if found > most else f"at least {least}"
        raise Wrong(f"right, but with {_text(found)} {name}; {limit} are needed")


def _is_number(found, wanted, rtol):
    if isinstance(wanted, tuple):
        same_length = isinstance(found, tuple | list) and len(found) == len(wanted)
        return same_length and all(_is_number(*pair, rtol) for pair in zip(found, wanted, strict=True))
    found = found.item() if hasattr(found, "item") else found  # of NumPy or torch
    return isinstance(found, Real) and math.isclose(found, wanted, rel_tol=rtol)


def _text(value):
    value = value.tolist() if hasattr(value, "tolist") else value
    if type(value) is tuple:
        return f"({', '.join(map(_text, value))}{',' if len(value) == 1 else ''})"
    return f"{value:.8g}" if isinstance(value, float) else repr(value)


def is_kernel(answer: Any) -> bool:
    """Return whether an answer is what `cuda.jit` returns."""
    return hasattr(answer, "__getitem__") and callable(getattr(answer, "py_func", None))


def fault(test: Callable[[Any], None], answer: Any) -> str | None:
    """Return what a test finds wrong with an answer, or None."""
    try:
        with _time_limit():
            test(_refuse_ellipsis(answer) if callable(answer) and not is_kernel(answer) else answer)
    except _NotAnswered:
        return "not answered yet: the function returns ..."
    except Exception as error:
        return getattr(error, "case", "") + _message(error, answer)
    return None


def _refuse_ellipsis(function):
    """Return the function, but let it raise `_NotAnswered` where it returns ``...``, as that of a stub does."""

    @functools.wraps(function)
    def call(*arguments):
        if (found := function(*arguments)) is ...:
            raise _NotAnswered
        return found

    return call


def _message(error, answer):
    if isinstance(error, Wrong):
        return str(error)
    if isinstance(error, _TooLong):
        return f"it has not ended after {TIMEOUT_S} s: does a loop never end?{_place(error, answer)}"
    name = type(error).__name__
    if isinstance(error, simulator.SimulatorError):
        name = _FINDINGS.get(name, "the simulator refuses it")
    return f"{name}: {error}{_place(error, answer)}"


@contextlib.contextmanager
def _time_limit():
    """Raise `_TooLong` in this thread after `TIMEOUT_S` seconds, where the system has such signals."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_):
        raise _TooLong

    handler = signal.signal(signal.SIGALRM, stop)
    # Python ignores what is raised within a destructor, so raise again.
    timer = signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S, min(TIMEOUT_S, 5))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)  # such as the time limit of pytest


def _place(error, answer):
    """Return the line of the answer that raised an error, unless the message names it already; otherwise ""."""
    code = getattr(getattr(answer, "py_func", answer), "__code__", None)
    frames = traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in frames if code and frame.f_code.co_filename == code.co_filename]
    if not lines or f"{os.path.basename(code.co_filename)}:{lines[-1]}" in str(error):
        return ""
    text = linecache.getline(code.co_filename, lines[-1]).strip()
    return f"; in the line `{text}`" if text else ""
