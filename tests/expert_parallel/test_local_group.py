"""Ranks in one process: barriers of their threads. Transports of real ranks are tested in ``tests/multigpu``."""

import threading

import pytest

from moe_numba.expert_parallel.ranks import local_group


def aborted_after(barrier):
    """Let two threads pass a barrier, of which one aborts it at once; return whether the other has passed it, too."""
    passed = []

    def wait():
        try:
            barrier.wait(10)
            passed.append(True)
        except threading.BrokenBarrierError:
            passed.append(False)

    waiting = threading.Thread(target=wait)
    waiting.start()
    barrier.wait(10)
    barrier.abort()
    waiting.join()
    return passed == [True]


def test_a_barrier_that_is_aborted_after_all_arrived_is_passed():
    """That of Python is not: a rank in it raises an error that hides the one of which the abort is a consequence."""
    assert all(aborted_after(local_group._Barrier(2)) for _ in range(200))
    assert not all(aborted_after(threading.Barrier(2)) for _ in range(200)), "the test finds such a barrier"


def test_a_barrier_separates_rounds_and_a_missing_thread_ends_them():
    barrier, seen = local_group._Barrier(3), []

    def work(rank):
        for round_ in range(20):
            seen.append(round_)
            barrier.wait(10)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == sorted(seen)
    with pytest.raises(threading.BrokenBarrierError):
        barrier.wait(0.01)
