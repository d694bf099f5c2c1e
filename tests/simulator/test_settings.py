"""Settings of simulated runs: contexts of one OS thread, and the environment variables behind them."""

import contextlib
import threading

import numpy as np
import pytest

from moe_numba import simulator

# isort: split
from numba import cuda

from moe_numba.simulator.core.settings import settings

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")


@cuda.jit
def arrival_order(order, count):
    order[cuda.atomic.add(count, 0, 1)] = cuda.grid(1)


def run_order():
    order, count = np.full(256, -1, np.int32), np.zeros(1, np.int32)
    arrival_order[4, 64](order, count)
    return order.tolist()


def run_threads(*works):
    """Run functions of one argument, a barrier of all, in OS threads of their own; return their results."""
    barrier, results = threading.Barrier(len(works), timeout=60), [None] * len(works)

    def run(i):
        try:
            results[i] = works[i](barrier)
        except BaseException as error:
            results[i] = error
            barrier.abort()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_two_threads_keep_their_own_seeds():
    expected = []
    for seed in (1, 2):
        with simulator.seed(seed):
            expected.append(run_order())
    assert expected[0] != expected[1]

    def first(barrier):
        with simulator.seed(1):
            barrier.wait()  # the second thread enters its context now
            barrier.wait()
            order = run_order()
        barrier.wait()
        return order

    def second(barrier):
        barrier.wait()
        with simulator.seed(2):
            barrier.wait()
            barrier.wait()  # the first thread has left its context
            return run_order()

    assert run_threads(first, second) == expected


def test_threads_watch_memory_accesses_independently():
    """Worlds in several threads count themselves in ``memory.watching`` without losing an update."""

    def preempted(barrier):
        barrier.wait()
        with simulator.seed(3, preempt=0.1):
            return [run_order() for _ in range(3)]

    first, second = run_threads(preempted, preempted)
    assert first == second
    assert simulator.memory.watching == 0


@pytest.mark.parametrize(
    "context, name",
    [
        (lambda: simulator.seed(5, preempt=0.5), "seed"),
        (simulator.trace, "events"),
        (simulator.weak_memory, "weak_memory"),
        (lambda: simulator.on_rank(1), "rank"),
        (simulator.together, "ranks"),
    ],
)
def test_a_new_thread_starts_from_the_environment(context, name, monkeypatch):
    monkeypatch.setenv("MOE_NUMBA_SEED", "7")
    default = settings[name]
    with context():
        assert settings[name] != default
        assert run_threads(lambda barrier: settings[name]) == [default]
    assert settings[name] == default and settings["seed"] == 7


def test_contexts_may_end_in_any_order():
    outer, inner = contextlib.ExitStack(), contextlib.ExitStack()
    outer.enter_context(simulator.seed(5))
    inner.enter_context(simulator.weak_memory())
    outer.close()
    assert settings["weak_memory"] and settings["seed"] == 0
    inner.close()
    assert not settings["weak_memory"]


@pytest.mark.parametrize(
    "variable, text, allowed",
    [
        ("MOE_NUMBA_SEED", "abc", "an integer"),
        ("MOE_NUMBA_PREEMPT", "1.5", "a number from 0 to 1"),
        ("MOE_NUMBA_PREEMPT", "often", "a number from 0 to 1"),
        ("MOE_NUMBA_SLOW_WARP", "-1", "the number of a warp in its block"),
        ("MOE_NUMBA_WEAK_MEMORY", "yes", "0 or 1"),
        ("MOE_NUMBA_RACES", "2", "0 or 1"),
    ],
)
def test_invalid_variables_are_named(variable, text, allowed, monkeypatch):
    monkeypatch.setenv(variable, text)
    with pytest.raises(ValueError, match=f"^{variable} is {text!r}; it must be {allowed}$"):
        settings.check_environment()


def test_the_environment_chooses_preemption_and_weak_memory(monkeypatch):
    monkeypatch.setenv("MOE_NUMBA_PREEMPT", "0.25")
    monkeypatch.setenv("MOE_NUMBA_WEAK_MEMORY", "1")
    monkeypatch.setenv("MOE_NUMBA_SLOW_WARP", "3")
    world = simulator.World()
    assert world.preempt == 0.25 and world.memory_model is not None and world.slow_warp == 3
