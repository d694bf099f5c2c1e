"""Kernels of every topic on both engines of the simulator: the same outputs, and a list of kernels that fall back."""

import pytest
import torch
from helpers.calls import CALLS
from helpers.expert_parallel import bitwise_equal

from moe_numba import simulator
from moe_numba.simulator.core.scheduler import override_settings
from moe_numba.simulator.vector import launch

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests the simulator")

# Kernels that run with one greenlet per thread because the vector engine gives them up, and why. Do not add to it.
FALLBACKS = {}


@pytest.fixture(autouse=True)
def deterministic_memory():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def on_engine(name, call):
    with override_settings(engine=name):
        results = call()
    results = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(r for r in results if isinstance(r, torch.Tensor))


@pytest.mark.parametrize("topic", CALLS)
def test_both_engines_have_the_same_outputs(topic):
    call, launch.fallbacks = CALLS[topic], {}
    assert bitwise_equal(on_engine("either", call), on_engine("threads", call))
    assert set(launch.fallbacks) <= set(FALLBACKS), launch.fallbacks
