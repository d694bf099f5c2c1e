"""Kernels of every topic have no data races and read no uninitialised memory.

`MOE_NUMBA_RACE_SEEDS=20` runs each under 20 orders of the threads; one is the default.
"""

import os

import pytest
from helpers.calls import CALLS

from moe_numba import simulator

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests in the simulator")
SEEDS = int(os.environ.get("MOE_NUMBA_RACE_SEEDS", "1"))


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("topic", CALLS)
def test_no_data_races(topic, seed):
    with simulator.races(), simulator.seed(seed):
        CALLS[topic]()
