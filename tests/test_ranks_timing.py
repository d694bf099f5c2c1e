"""Times of several ranks: who runs what in which order, whose time counts, and what a ladder makes of it."""

import threading
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from moe_numba import simulator
from moe_numba.course import ladder
from moe_numba.course.bench import Stats, timing_multigpu
from moe_numba.course.ladder import Ladder, WrongResult
from moe_numba.expert_parallel.transport import LocalGroup

# isort: split
from numba import cuda

from moe_numba.ptx.atomics import ld_acquire_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import pointer_from_address

only_simulated = pytest.mark.skipif(not simulator.ENABLED, reason="these ranks are simulated")


@cuda.jit
def tell(peers, mine, rank, number):
    st_release_sys_s32(pointer_from_address(peers[1 - rank], mine), 0, number)
    while ld_acquire_sys_s32(mine, 0) < number:
        pass


@contextmanager
def talk(transport, log):
    start, shared = transport.launch, transport.allocate(128)
    mine, calls = shared.local.view(torch.int32), [0]
    log.append(("made", transport.rank))

    def step():
        calls[0] += 1
        log.append(("call", transport.rank))
        start(tell, 1, 1, shared.addresses, mine, transport.rank, calls[0])
        return mine

    yield step
    log.append(("left", transport.rank, int(mine[0])))
    shared.close()


@only_simulated
def test_each_rank_runs_its_step_and_leaves_when_all_are_done():
    log = []
    outputs = timing_multigpu.outputs_of(LocalGroup(2), lambda transport: talk(transport, log))
    assert [int(out[0]) for out in outputs] == [1, 1]
    assert [entry for entry in log if entry[0] == "call"] == [("call", 0), ("call", 1)]
    assert sorted(log[-2:]) == [("left", 0, 1), ("left", 1, 1)]


@only_simulated
def test_in_the_simulator_every_step_runs_once_and_has_no_time():
    log = []
    make = lambda transport: talk(transport, log)
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
    found = times(group, {name: lambda transport: talk(transport, []) for name in ("a", "b")})
    assert all(0.5 < stats.p10 <= stats.median < 1000 for stats in found.values()), found


class FakeClock:
    """A rank's clock: each of its calls takes ``step_us``, once the gate is open."""

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
def test_the_slowest_rank_counts(launches, samples):
    """Rank 1 is slower with "a", rank 0 with "b"."""
    cost, found, log = {"a": (2.0, 5.0), "b": (7.0, 1.0)}, [None, None], []
    meeting = threading.Barrier(2)

    def run(rank):
        now = [0.0]

        def step(name):
            now[0] += cost[name][rank]

        transport = SimpleNamespace(gather=lambda value: meeting.wait(10))
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


def test_of_each_sample_the_slowest_rank_counts():
    assert timing_multigpu.slowest([{"a": [1.0, 9.0, 1.0]}, {"a": [3.0, 2.0, 3.0]}])["a"].median == 3.0


@pytest.fixture
def measured(monkeypatch):
    """As on a GPU whose clock stands still."""
    monkeypatch.setattr(simulator, "ENABLED", False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ladder, "kernel_times", lambda named: {name: Stats(1, 1, 1) for name in named})
    monkeypatch.setattr(ladder, "call_times", lambda named: {name: Stats(2, 2, 2) for name in named})


def test_a_ladder_takes_times_that_a_step_gives_itself(measured, capsys, tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    steps = Ladder("toy", lambda out: None if out == 1 else "it is wrong", root=tmp_path)
    steps.step("own", lambda: 1, kernel=lambda: Stats(30.0, 29.0, 31.0), bytes=5)
    assert steps.median_us("own") == 30.0 and "call_us" not in steps.rows[0]
    assert "30.0 us kernel" in capsys.readouterr().out
    steps.measure_all({"own": Stats(20.0, 19.0, 21.0)})
    assert steps.median_us("own") == 20.0 and steps.rows[0]["bytes"] == 5 and "call_us" not in steps.rows[0]
    with pytest.raises(WrongResult):
        steps.step("wrong", lambda: 2, kernel=lambda: pytest.fail("timed before it was right"))


def test_a_ladder_that_must_not_time_says_why(measured, capsys, tmp_path):
    (tmp_path / "docs" / "results").mkdir(parents=True)
    steps = Ladder("toy", lambda out: None, root=tmp_path, untimed="one GPU")
    steps.step("own", lambda: 1, kernel=lambda: pytest.fail("timed"))
    steps.measure_all()
    steps.save([])
    assert steps.plot() is None and steps.median_us("own") is None
    said = capsys.readouterr().out
    assert "correct; not timed (one GPU)" in said and "not timed (one GPU): no record is written" in said


@only_simulated
def test_a_trace_tells_of_stores_to_flags():
    with simulator.trace() as events:
        timing_multigpu.outputs_of(LocalGroup(2), lambda transport: talk(transport, []))
    stores = [(event.rank, event.details) for event in events if event.what == "store"]
    wanted = {"index": 0, "value": 1, "release": True}
    assert sorted(stores, key=lambda s: s[0]) == [
        (rank, {"buffer": f"the buffer of rank {1 - rank}", **wanted}) for rank in (0, 1)
    ]
