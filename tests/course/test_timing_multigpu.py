"""Multi-GPU timing: order of the steps, the slowest rank's time, and its use by a ladder."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from moe_numba import simulator
from moe_numba.course.bench import Stats
from moe_numba.course.bench.timing import multigpu as timing_multigpu
from moe_numba.course.steps import ladder
from moe_numba.course.steps.ladder import Ladder, WrongResult
from moe_numba.expert_parallel.ranks.local_group import LocalGroup

# isort: split
from numba import cuda

from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address

only_simulated = pytest.mark.skipif(not simulator.ENABLED, reason="these ranks are simulated")


@cuda.jit
def signal(peers, local, rank, number):
    st_release_sys_s32(pointer_from_address(peers[1 - rank], local), 0, number)
    while ld_acquire_sys_s32(local, 0) < number:
        pass


@contextmanager
def make_signal(transport, log):
    start, shared = transport.launch, transport.allocate(128)
    local, calls = shared.local.view(torch.int32), [0]
    log.append(("made", transport.rank))

    def step():
        calls[0] += 1
        log.append(("call", transport.rank))
        start(signal, 1, 1, shared.addresses, local, transport.rank, calls[0])
        return local

    yield step
    log.append(("left", transport.rank, int(local[0])))
    shared.close()


@only_simulated
def test_steps_close_after_all_ranks_have_finished():
    log = []
    outputs = timing_multigpu.outputs_of(LocalGroup(2), lambda transport: make_signal(transport, log))
    assert [int(out[0]) for out in outputs] == [1, 1]
    assert [entry for entry in log if entry[0] == "call"] == [("call", 0), ("call", 1)]
    assert sorted(log[-2:]) == [("left", 0, 1), ("left", 1, 1)]


@only_simulated
def test_simulated_steps_run_once_and_are_not_timed():
    log = []
    make = lambda transport: make_signal(transport, log)
    group = LocalGroup(2)
    assert not timing_multigpu.can_time(group)
    for times in (timing_multigpu.rank_times, timing_multigpu.host_times):
        log.clear()
        assert times(group, {"a": make, "b": make}) == {"a": None, "b": None}
        assert sum(entry[0] == "call" for entry in log) == 4


@pytest.mark.multigpu
@pytest.mark.parametrize("times", [timing_multigpu.rank_times, timing_multigpu.host_times])
def test_two_gpus_are_timed(times):
    group = LocalGroup(2, [0, 1])
    assert timing_multigpu.can_time(group) and not timing_multigpu.can_time(LocalGroup(2, [0, 0]))
    found = times(group, {name: lambda transport: make_signal(transport, []) for name in ("a", "b")})
    assert all(0.5 < stats.p10 <= stats.median < 1000 for stats in found.values()), found


class FakeClock:
    """A rank's clock, which counts simulated microseconds."""

    def __init__(self, now, log):
        self.now, self.log = now, log

    def hold(self, number):
        self.log.append(("hold", number))

    def mark(self):
        return self.now[0]

    def open(self, number):
        self.log.append(("open", number))

    def elapsed_us(self, begin, end):
        return end - begin


@pytest.mark.parametrize("launches, samples", [(1, 1), (4, 3)])
def test_times_are_those_of_the_slowest_rank(launches, samples):
    """Rank 1 is slower with "a", rank 0 with "b"."""
    cost, found, log = {"a": (2.0, 5.0), "b": (7.0, 1.0)}, [None, None], []
    barrier = threading.Barrier(2)

    def run(rank):
        now = [0.0]

        def step(name):
            now[0] += cost[name][rank]

        transport = SimpleNamespace(gather=lambda value: barrier.wait(10))
        steps = {name: lambda name=name: step(name) for name in cost}
        clock = FakeClock(now, log if rank == 0 else [])
        found[rank] = timing_multigpu.measure(transport, steps, launches, samples, clock)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timing_multigpu.slowest(found) == {"a": Stats(5.0, 5.0, 5.0), "b": Stats(7.0, 7.0, 7.0)}
    numbers = range(1, 2 * samples + 1)
    assert log == [entry for n in numbers for entry in (("hold", n), ("open", n))], "each gate is opened, in order"


def test_the_maximum_over_ranks_is_taken_per_sample():
    assert timing_multigpu.slowest([{"a": [1.0, 9.0, 1.0]}, {"a": [3.0, 2.0, 3.0]}])["a"].median == 3.0


@pytest.fixture
def measured(monkeypatch):
    """Replace the GPU and its timing: all times are constant."""
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ladder, "kernel_times", lambda named: {name: Stats(1, 1, 1) for name in named})
    monkeypatch.setattr(ladder, "call_times", lambda named: {name: Stats(2, 2, 2) for name in named})


def test_a_ladder_accepts_given_times(measured, capsys, tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    steps = Ladder("toy", lambda out: None if out == 1 else "wrong", root=tmp_path)
    steps.step("own", lambda: 1, kernel=lambda: Stats(30.0, 29.0, 31.0), bytes=5)
    assert steps.median_us("own") == 30.0 and "call_us" not in steps.rows[0]
    assert "30.0 us kernel" in capsys.readouterr().out
    steps.measure_all({"own": Stats(20.0, 19.0, 21.0)})
    assert steps.median_us("own") == 20.0 and steps.rows[0]["bytes"] == 5 and "call_us" not in steps.rows[0]
    with pytest.raises(WrongResult):
        steps.step("wrong", lambda: 2, kernel=lambda: pytest.fail("timed a wrong step"))


def test_a_step_that_measures_its_own_time_is_compared_with_the_step_that_it_changes(measured, capsys, tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    steps = Ladder("toy", lambda out: None, root=tmp_path)
    steps.step("first", lambda: 1, kernel=lambda: Stats(30.0, 29.0, 31.0))
    both = {"first": Stats(32.0, 31.0, 33.0), "second": Stats(24.0, 23.0, 25.0)}
    steps.step("second", lambda: 1, kernel=lambda: both, after="first", predicted_gain_us=6.0)
    assert steps.median_us("second") == 24.0 and steps.rows[1]["compared_us"] == [32.0, 24.0]
    assert steps.gain("second").verdict == "within a third"
    assert "32.0 -> 24.0 us; predicted 26 us (-19 %), measured 24 us (-25 %)" in capsys.readouterr().out
    steps.measure_all({name: Stats(20.0, 19.0, 21.0) for name in both})
    assert steps.rows[1]["compared_us"] == [32.0, 24.0]
    steps.step("alone", lambda: 1, kernel=lambda: Stats(9.0, 8.0, 10.0), after="second", predicted_gain_us=1.0)
    assert steps.gain("alone") is None and "9.00 us kernel" in capsys.readouterr().out


def test_an_untimed_ladder_reports_the_reason(measured, capsys, tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    steps = Ladder("toy", lambda out: None, root=tmp_path, untimed="one GPU")
    steps.step("own", lambda: 1, kernel=lambda: pytest.fail("timed"))
    steps.measure_all()
    steps.save()
    assert steps.plot() is None and steps.median_us("own") is None
    printed = capsys.readouterr().out
    assert "correct; not timed (one GPU)" in printed and "not timed (one GPU): no record is written" in printed


@only_simulated
def test_a_trace_contains_stores_to_flags():
    with simulator.trace() as events:
        timing_multigpu.outputs_of(LocalGroup(2), lambda transport: make_signal(transport, []))
    stores = [(event.rank, event.details) for event in events if event.what == "store"]
    wanted = {"index": 0, "value": 1, "release": True}
    assert sorted(stores, key=lambda s: s[0]) == [
        (rank, {"buffer": f"the buffer of rank {1 - rank}", **wanted}) for rank in (0, 1)
    ]
