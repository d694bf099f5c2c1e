"""Transports of ranks in one process: gather, shared memory, errors, and joint launches."""

import threading
import time
from collections import Counter

import pytest
import torch

from moe_numba import simulator
from moe_numba.expert_parallel import LocalGroup
from moe_numba.expert_parallel.ranks import local_group, transport


def test_gather_returns_all_values_in_rank_order():
    given = LocalGroup(3).run(lambda t: [t.gather(10 * i + t.rank) for i in range(3)])
    assert given == [[[0, 1, 2], [10, 11, 12], [20, 21, 22]]] * 3


def test_results_are_in_rank_order():
    assert LocalGroup(4).run(lambda t: (t.rank, t.num_ranks)) == [(rank, 4) for rank in range(4)]
    for number, error in ((0, ValueError), (-1, ValueError), (9, ValueError), (True, TypeError), (2.0, TypeError)):
        with pytest.raises(error, match=f"num_ranks is {number}; "):
            LocalGroup(number)


def test_memory_is_zeroed_and_all_ranks_know_its_addresses():
    def work(transport):
        shared = transport.allocate(4096)
        assert shared.local.dtype == torch.uint8 and shared.local.shape == (4096,) and not shared.local.any()
        addresses = shared.addresses.tolist()
        assert addresses[transport.rank] == shared.local.data_ptr() and len(set(addresses)) == 3
        shared.close()
        shared.close()  # closing twice has no effect
        return addresses

    given = LocalGroup(3).run(work)
    assert given[0] == given[1] == given[2]


def test_the_error_of_a_rank_is_raised():
    def work(transport):
        if transport.rank == 1:
            raise KeyError("error of rank 1")
        transport.gather(None)

    with pytest.raises(KeyError, match="error of rank 1"):
        LocalGroup(3).run(work)


def test_the_other_ranks_run_their_finally_blocks():
    """Even if they gather there, the first error is raised."""
    ended = []

    def work(transport):
        try:
            transport.gather(None)
            if transport.rank == 1:
                raise KeyError("error of rank 1")
            transport.gather(None)
        finally:
            ended.append(transport.rank)
            transport.gather(None)

    with pytest.raises(KeyError):
        LocalGroup(3).run(work)
    assert sorted(ended) == [0, 1, 2]


def test_ranks_have_grad_modes_of_their_own():
    def work(transport):
        modes = [torch.is_grad_enabled()]
        with torch.set_grad_enabled(transport.rank == 1):
            transport.gather(None)
            modes.append(torch.is_grad_enabled())
            with torch.set_grad_enabled(transport.rank == 0):
                transport.gather(None)
                modes.append(torch.is_grad_enabled())
            transport.gather(None)
        return [*modes, torch.is_grad_enabled()]

    assert LocalGroup(2).run(work) == [[True, False, True, True], [True, True, False, True]]
    assert torch.is_grad_enabled()


@pytest.mark.skipif(not simulator.ENABLED, reason="threads wait longer")
def test_a_wait_that_cannot_end_times_out():
    with pytest.raises(TimeoutError, match=r"rank 0 waits in gather for ranks \[1\]; the function of rank 1 has ended"):
        LocalGroup(2).run(lambda t: t.gather(None) if t.rank == 0 else None)
    assert LocalGroup(2).run(lambda t: t.wait(lambda: False, 0.1)) == [False, False]


def test_a_rendezvous_counts_arrivals_by_name():
    """It ends when all ranks have arrived as often, or have ended; 0 seconds announce an arrival without a wait."""

    def work(t):
        assert t.rendezvous("all", 10)
        assert t.rendezvous("one waits", 10 if t.rank == 0 else 0) == (t.rank == 0)
        assert t.rendezvous("all", 10)
        if t.rank:
            return None
        assert not t.rendezvous("rank 0 only", 0)
        return t.rendezvous("rank 0 only", 10)  # after the other has ended

    assert LocalGroup(2).run(work) == [True, None]


def test_a_rendezvous_ends_after_its_time():
    def work(t):
        if t.rank == 0:
            assert not t.rendezvous("rank 0 only", 0.1) and t.missing_at("rank 0 only") == [1]
            assert t.rendezvous("rank 0 only", 10, absent=[1])
        t.gather(None)

    LocalGroup(2).run(work)


def test_memory_that_a_missing_rank_may_write_to_is_kept():
    group = LocalGroup(2)

    def work(t):
        for seconds, kept in ((10, 0), (0, 2)):
            t.allocate(256).close(seconds)
            t.gather(None)
            assert len(group.kept) == kept
            t.gather(None)

    group.run(work)


class Processes(transport.ProcessGroupTransport):
    """Ranks of a process group that share a store, without processes."""

    def __init__(self, store, rank, num_ranks):
        self._store, self.rank, self.num_ranks = store, rank, num_ranks
        self._arrivals, self._prefix = Counter(), "test"


def test_a_rendezvous_of_processes():
    ranks = [Processes(store, rank, 2) for store in [torch.distributed.HashStore()] for rank in range(2)]
    assert not ranks[0].rendezvous("a", 0) and not ranks[0].rendezvous("b", 0.01)
    assert ranks[1].rendezvous("a", 10) and ranks[1].rendezvous("b", 10)
    assert not ranks[1].rendezvous("a", 0.01) and ranks[1].missing_at("a") == [0], "a second time with the same name"
    assert ranks[0].rendezvous("a", 10) and ranks[1].missing_at("a") == []
    assert ranks[0].rendezvous("a", 10, absent=[1])


def test_a_rendezvous_ends_if_the_process_with_the_store_is_lost():
    class Lost:
        def set(self, *_):
            raise torch.distributed.DistNetworkError("connection reset")

        check = set

    process = Processes(Lost(), 0, 2)
    assert not process.rendezvous("a", 10) and process.missing_at("a") == []


@pytest.mark.skipif(simulator.ENABLED, reason="in the simulator there are no GPUs")
def test_one_device_per_rank():
    with pytest.raises(ValueError, match="devices has 1 entries"):
        LocalGroup(2, devices=[0])


@pytest.fixture
def log_of(monkeypatch):
    """``log_of(works, is_shared)`` runs each rank's ``work(log, launch)``; a launch adds an entry to the log."""

    def run(works, is_shared):
        log, group = [], LocalGroup(len(works))
        group.is_shared = is_shared
        note = lambda kernel, *_, **options: lambda *_: log.append((kernel, options))
        monkeypatch.setattr(transport, "launcher", note)

        def on_rank(rank):
            end, flags = local_group._ThreadRank(group, rank), torch.zeros(1)
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
    """Return whether the log has these entries in rounds: each of them three times, then the next one."""
    return [entry for entry in log if entry in entries] == 3 * [entry for entry in entries for _ in range(3)]


def test_ranks_that_share_a_gpu_launch_together(log_of):
    """All ranks reach a launch before one of them launches, and all have launched before one continues."""
    log = log_of([three_times(rank) for rank in range(3)], True)
    start = "kernel", {}  # not as a cooperative launch
    assert in_rounds(log, "before", start) and in_rounds(log, start, "after") and len(log) == 27


def test_ranks_with_their_own_gpus_wait_only_before_the_first_launch(log_of):
    log = log_of([three_times(rank) for rank in range(3)], False)
    start = ("kernel", {"cooperative": True})
    assert log[:3] == 3 * ["before"] and start not in log[:3]
    assert log.count(start) == 9 and not in_rounds(log, "before", start)


def test_a_launch_goes_ahead_without_a_missing_rank_after_the_timeout(log_of):
    log = log_of([lambda log, launch: launch("kernel", timeout=0.05), lambda log, launch: None], True)
    assert log == [("kernel", {})]
