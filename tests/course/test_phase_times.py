"""Phases of kernels: times from shortened kernels, and instructions of each phase."""

import inspect
from functools import cache

import numpy as np
import pytest

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, float32

from moe_numba.course.bench.timing import Stats
from moe_numba.course.lessons.align_one_launch import phase_times
from moe_numba.course.lessons.align_one_launch.phase_times import atomic_loop, phase_instructions, phases
from moe_numba.course.steps import ladder
from moe_numba.course.steps.ladder import Ladder


@cache
def make_scaled(size):
    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array(size, float32)
        # load
        i = cuda.threadIdx.x
        tile[i] = x[i]
        # scale
        cuda.syncthreads()
        tile[i] = tile[i] / x[i + size]
        # write
        y[i] = tile[i]

    return kernel


def run(make):
    x, y = np.arange(1, 65, dtype=np.float32), np.full(32, -7, np.float32)
    return lambda: (make(32)[1, 32](x, y), y)[1]


def test_each_phase_takes_the_difference_of_two_kernels(monkeypatch, capsys):
    written = {}

    def kernel_times(calls):
        written.update({label: call().copy() for label, call in calls.items()})
        return {label: Stats(us, us, us) for label, us in zip(calls, (1.5, 1.25, 4.0))}

    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(ladder, "kernel_times", kernel_times)
    steps = Ladder("scaled", lambda outputs: None)
    steps.untimed = None
    found = phases(steps, "step", make_scaled, run)
    assert found == {"load": 1.5, "scale": 0.0, "write": 2.5}, "no phase takes less than zero"
    assert steps.diagnosis == {"phases of step": {"load": 1.5, "scale": 1.25, "write": 4.0}}
    assert capsys.readouterr().out == "step: load 1.50, scale 0.00, write 2.50; 4.00 us\n"
    assert (written["load"] == -7).all() and (written["scale"] == -7).all(), "the shortened kernels write nothing"
    assert (written["write"] == np.arange(1, 33, dtype=np.float32) / np.arange(33, 65, dtype=np.float32)).all()


def test_without_times_the_phases_are_unknown():
    untimed = Ladder("scaled", lambda outputs: None, untimed="another GPU")
    assert phases(untimed, "step", make_scaled, run) == dict.fromkeys(["load", "scale", "write"])


def test_instructions_are_those_of_each_phase(monkeypatch):
    monkeypatch.setattr(phase_times, "source_with_dependencies", lambda functions: IMPORTS)
    found = phase_instructions(make_scaled, (32,), ("float32*", "float32*"), 32)
    assert list(found) == ["load", "scale", "write"]
    counts = {phase: {kind: count for kind, count in made.items() if count} for phase, made in found.items()}
    assert counts["load"]["global load"] == 1 and counts["write"]["global store"] == 1
    assert counts["scale"]["special function"] >= 1 and counts["scale"]["barrier, fence"] == 1
    assert "global store" not in counts["load"] and "special function" not in counts["write"]


@cache
def make_counts(unused):
    @cuda.jit
    def kernel(x, y):
        counts = cuda.shared.array(32, float32)
        for i in range(int(x[0])):
            counts[i % 32] += x[i]
        for i in range(int(x[1])):
            for k in range(3):
                cuda.atomic.add(counts, (i + 5 * k) % 32, x[i])
        y[0] = counts[0]

    return kernel


def test_the_loop_is_the_one_with_the_atomic_operations(monkeypatch):
    source = IMPORTS + inspect.getsource(inspect.unwrap(make_counts))
    monkeypatch.setattr(phase_times, "source_with_dependencies", lambda functions: source)
    loop = atomic_loop(make_counts, (0,), ("float32*", "float32*"), 32)
    assert loop.count("LDG") >= 1 and loop.opcodes[-1].startswith("BRA")
    source = IMPORTS + inspect.getsource(inspect.unwrap(make_scaled))
    with pytest.raises(ValueError, match="no loop of the kernel of make_scaled has an atomic operation"):
        atomic_loop(make_scaled, (32,), ("float32*", "float32*"), 32)


IMPORTS = "from functools import cache\nfrom numba import cuda, float32\n"


def test_kernels_without_phases_are_refused():
    @cache
    def make_nothing(size):
        return None

    with pytest.raises(ValueError, match="the kernel of make_nothing has no comments that mark phases"):
        phases(Ladder("scaled", lambda outputs: None), "step", make_nothing, run)
