"""Ranks of one process: what they have of one another."""

import threading
import time

import pytest
import torch

from moe_numba import simulator
from moe_numba.expert_parallel import LocalGroup, transport


def test_gather_gives_everybodys_value_in_order():
    given = LocalGroup(3).run(lambda t: [t.gather(10 * i + t.rank) for i in range(3)])
    assert given == [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]] * 3


def test_results_come_in_the_order_of_the_ranks():
    assert LocalGroup(4).run(lambda t: (t.rank, t.num_ranks)) == [(rank, 4) for rank in range(4)]


def test_memory_is_zeroed_and_everybody_knows_where_it_is():
    def work(transport):
        shared = transport.allocate(4096)
        assert shared.local.dtype == torch.uint8 and shared.local.shape == (4096,) and not shared.local.any()
        addresses = shared.addresses.tolist()
        assert addresses[transport.rank] == shared.local.data_ptr() and len(set(addresses)) == 3
        shared.close()
        shared.close()  # a second time does nothing
        return addresses

    given = LocalGroup(3).run(work)
    assert given[0] == given[1] == given[2]


def test_the_error_of_a_rank_is_raised():
    def work(transport):
        if transport.rank == 1:
            raise KeyError("rank 1's own")
        transport.gather(None)

    with pytest.raises(KeyError, match="rank 1's own"):
        LocalGroup(3).run(work)


def test_the_others_may_clean_up():
    """What they do in the end, and even that they wait for one another there, hides no error."""
    ended = []

    def work(transport):
        try:
            transport.gather(None)
            if transport.rank == 1:
                raise KeyError("rank 1's own")
            transport.gather(None)
        finally:
            ended.append(transport.rank)
            transport.gather(None)

    with pytest.raises(KeyError):
        LocalGroup(3).run(work)
    assert sorted(ended) == [0, 1, 2]


@pytest.mark.skipif(not simulator.ENABLED, reason="threads wait longer")
def test_who_waits_for_nobody_is_told_so():
    with pytest.raises(TimeoutError, match="rank 0 waits for the others"):
        LocalGroup(2).run(lambda t: t.gather(None) if t.rank == 0 else None)
    assert LocalGroup(2).run(lambda t: t.wait(lambda: False, 0.1)) == [False, False]


@pytest.mark.skipif(simulator.ENABLED, reason="in the simulator there are no GPUs")
def test_as_many_devices_as_ranks():
    with pytest.raises(ValueError, match="devices has 1 entries"):
        LocalGroup(2, devices=[0])


@pytest.fixture
def lined_up(monkeypatch):
    """``lined_up(works, is_shared)``: each rank's ``work(rank, launch)``, where a launch is an entry of the log."""

    def run(works, is_shared):
        log, group = [], LocalGroup(len(works))
        group.is_shared, group.starts, group.start_condition = is_shared, [0] * len(works), threading.Condition()
        note = lambda kernel, *_, **options: lambda *_: log.append((kernel, options))
        monkeypatch.setattr(transport, "launcher", note)

        def on_rank(rank):
            end, flags = transport._ThreadRank(group, rank), torch.zeros(1)
            works[rank](log, lambda kernel, **options: end.launch(kernel, 1, 32, flags, **options))

        threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return log

    return run


def three_times(rank):
    def work(log, launch):
        for i in range(3):
            time.sleep(0.01 * ((rank + i) % 3))
            log.append("before")
            launch("kernel", cooperative=True)
            log.append("after")

    return work


def in_rounds(log, *entries):
    """Whether these entries, of all, came in three rounds: each three times, then the next one."""
    return [entry for entry in log if entry in entries] == 3 * [entry for entry in entries for _ in range(3)]


def test_ranks_that_share_a_gpu_start_together(lined_up):
    """Each kernel when all are about to start it; and nobody does anything else before all have."""
    log = lined_up([three_times(rank) for rank in range(3)], True)
    start = "kernel", {}  # not as a cooperative launch
    assert in_rounds(log, "before", start) and in_rounds(log, start, "after") and len(log) == 27


def test_ranks_with_gpus_of_their_own_wait_for_the_first_start_alone(lined_up):
    log = lined_up([three_times(rank) for rank in range(3)], False)
    start = ("kernel", {"cooperative": True})
    assert log[:3] == 3 * ["before"] and start not in log[:3]
    assert log.count(start) == 9 and not in_rounds(log, "before", start)


def test_who_does_not_come_is_waited_for_with_patience(lined_up):
    begin = time.monotonic()
    log = lined_up([lambda log, launch: launch("kernel", timeout=0.05), lambda log, launch: None], True)
    assert log == [("kernel", {})] and 0.1 <= time.monotonic() - begin < 5
