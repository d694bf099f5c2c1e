"""Ranks of one process: what they have of one another."""

import pytest
import torch

from moe_numba import simulator
from moe_numba.expert_parallel import LocalGroup


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
