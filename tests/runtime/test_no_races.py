"""Kernels of every topic have no data races and read no uninitialised memory.

`MOE_NUMBA_RACE_SEEDS=20` runs each under 20 orders of the threads; one is the default.
"""

import math
import os
from types import FunctionType

import pytest
from helpers.calls import CALLS
from helpers.wrong_kernels import changed_maker

from moe_numba import simulator
from moe_numba.runtime.kernel_key import enclosed_by

# isort: split
from moe_numba.grouped_gemm.call import plan
from moe_numba.grouped_gemm.wgmma import kernel, launch
from moe_numba.moe_layer import launches
from moe_numba.runtime.driver_launch import three

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests in the simulator")
SEEDS = int(os.environ.get("MOE_NUMBA_RACE_SEEDS", "1"))


BLOCK_BARRIERS = {"syncthreads", "bar_sync", "bar_arrive"}
LONG_ROWS = {"experts of a layer, FP8 with a scale per expert": "rows in FP8, a scale per row"}  # where they are tested


def has_block_barrier(function, seen):
    """Return whether a kernel, or a function of the package that it calls, names a barrier of the block."""
    function = getattr(function, "py_func", function)
    if function in seen or not isinstance(function, FunctionType) or not function.__module__.startswith("moe_numba."):
        return False
    seen.add(function)
    names = set(function.__code__.co_names)
    used = [*enclosed_by(function).values(), *map(function.__globals__.get, names & function.__globals__.keys())]
    return bool(names & BLOCK_BARRIERS) or any(has_block_barrier(f, seen) for f in used if callable(f))


@pytest.fixture
def blocks(monkeypatch):
    """Threads of the blocks of each kernel that is launched."""
    run, found = simulator.run, {}

    def noted(kernel, grid, block, *arguments, **options):
        found.setdefault(kernel, set()).add(math.prod(three(block)))
        return run(kernel, grid, block, *arguments, **options)

    monkeypatch.setattr(simulator, "run", noted)
    return found


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("topic", CALLS)
def test_no_data_races(topic, seed, blocks):
    """A block of one warp would not test barriers of the block: without them its kernel would be as good."""
    with simulator.races(), simulator.seed(seed):
        CALLS[topic]()
    assert blocks and LONG_ROWS.get(topic, topic) in CALLS
    for launched, threads in blocks.items():
        if has_block_barrier(launched, set()) and topic not in LONG_ROWS:
            assert max(threads) > 32, f"{launched.py_func.__name__} has blocks of one warp only"


def test_rows_of_x_that_are_loaded_before_the_wait_are_a_race(monkeypatch):
    wait_of_producer = "                    griddepcontrol_wait()\n"
    monkeypatch.setattr(launch, "make_kernel", changed_maker(kernel, "make_kernel", kernel, wait_of_producer, ""))
    monkeypatch.setattr(launch, "get_launcher", launch.get_launcher.__wrapped__)
    monkeypatch.setattr(plan, "_plans", {})
    with simulator.races(), pytest.raises(simulator.DataRace, match="at compute_tiles.* reads .* store_chunk"):
        CALLS["experts of a layer"]()


def test_group_sizes_that_are_read_before_the_wait_are_a_race(monkeypatch):
    """Behind ``group_by_expert`` the first grouped GEMM must not load weights early."""
    group_gemm = launches.group_gemm
    early = lambda *args, **options: group_gemm(*args, **options | dict(early_weight=True))
    monkeypatch.setattr(launches, "group_gemm", early)
    with simulator.races(), pytest.raises(simulator.DataRace, match="at group_rows.* reads .* group_by_expert"):
        CALLS["experts of a layer"]()
