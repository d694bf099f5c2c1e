"""Kernels of every topic have no data races and read no uninitialised memory.

`MOE_NUMBA_RACE_SEEDS=20` runs each under 20 orders of the threads; one is the default.
"""

import os

import pytest
from helpers.calls import CALLS
from helpers.wrong_kernels import changed_maker

from moe_numba import simulator

# isort: split
from moe_numba.grouped_gemm.call import plan
from moe_numba.grouped_gemm.wgmma import kernel, launch
from moe_numba.moe_layer import launches

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests in the simulator")
SEEDS = int(os.environ.get("MOE_NUMBA_RACE_SEEDS", "1"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("topic", CALLS)
def test_no_data_races(topic, seed):
    with simulator.races(), simulator.seed(seed):
        CALLS[topic]()


def test_rows_of_x_that_are_loaded_before_the_wait_are_a_race(monkeypatch):
    wait_of_producer = "                    griddepcontrol_wait()\n"
    monkeypatch.setattr(launch, "make_kernel", changed_maker(kernel, "make_kernel", kernel, wait_of_producer, ""))
    monkeypatch.setattr(launch, "get_launcher", launch.get_launcher.__wrapped__)
    monkeypatch.setattr(plan, "_plans", {})
    with simulator.races(), pytest.raises(simulator.DataRace, match="at compute_tiles.* reads .* store_rows"):
        CALLS["experts of a layer"]()


def test_group_sizes_that_are_read_before_the_wait_are_a_race(monkeypatch):
    """Behind ``group_by_expert`` the first grouped GEMM must not load weights early."""
    group_gemm = launches.group_gemm
    early = lambda *args, **options: group_gemm(*args, **options | dict(early_weight=True))
    monkeypatch.setattr(launches, "group_gemm", early)
    with simulator.races(), pytest.raises(simulator.DataRace, match="at group_rows.* reads .* group_by_expert"):
        CALLS["experts of a layer"]()
