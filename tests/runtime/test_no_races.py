"""Kernels of every topic have no data races and read no uninitialised memory.

`MOE_NUMBA_RACE_SEEDS=20` runs each under 20 orders of the threads; one is the default.
"""

import os

import pytest
from helpers.calls import CALLS

from moe_numba import simulator

# isort: split
from moe_numba.grouped_gemm.wgmma import producer
from moe_numba.moe_layer import launches

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests in the simulator")
SEEDS = int(os.environ.get("MOE_NUMBA_RACE_SEEDS", "1"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("topic", CALLS)
def test_no_data_races(topic, seed):
    with simulator.races(), simulator.seed(seed):
        CALLS[topic]()


def test_rows_of_x_that_are_loaded_before_the_wait_are_a_race(monkeypatch):
    monkeypatch.setattr(producer, "griddepcontrol_wait", lambda: None)
    with simulator.races(), pytest.raises(simulator.DataRace, match="at tma_producer.* reads .* store_rows"):
        CALLS["experts of a layer"]()


def test_group_sizes_that_are_read_before_the_wait_are_a_race(monkeypatch):
    """Behind ``group_by_expert`` the first grouped GEMM must not load weights early."""
    group_gemm = launches.group_gemm
    early = lambda *args, **options: group_gemm(*args, **options | dict(early_weight=True))
    monkeypatch.setattr(launches, "group_gemm", early)
    with simulator.races(), pytest.raises(simulator.DataRace, match="at group_rows.* reads .* group_by_expert"):
        CALLS["experts of a layer"]()
