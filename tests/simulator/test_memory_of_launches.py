"""Launches leave nothing behind: the garbage collector frees their grids, whatever dicts their threads are keys of."""

import gc

import numpy as np
import pytest
import torch
from helpers.grouped_gemm import FUNCTIONS, inputs
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.simulator.core.grid import Grid
from moe_numba.simulator.core.scheduler import override_settings, set_history

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests the simulator")


def pipelines():
    """A kernel with TMA, mbarriers, wgmma, named barriers and setmaxnreg."""
    torch.manual_seed(0)
    FUNCTIONS["blockwise"][0](*inputs(n=128)["blockwise"])


@cuda.jit
def deadlock(out):
    if cuda.threadIdx.x < 32:
        cuda.syncthreads()
    elif cuda.atomic.add(out, 0, 1) < 16:
        cuda.shfl_sync(FULL_MASK, 1, 0)


@cuda.jit
def race(out):
    smem = cuda.shared.array(64, int32)
    smem[0] = cuda.threadIdx.x
    out[cuda.threadIdx.x] = smem[0]


def failure():
    with pytest.raises(simulator.SimulatorError):
        deadlock[1, 64](np.zeros(1, np.int32))


def give_up():
    race[1, 64](np.zeros(64, np.int32))


@pytest.mark.parametrize("call", [pipelines, failure, give_up], ids=lambda call: call.__name__)
@pytest.mark.parametrize("engine", ["either", "threads"])
def test_grids_are_freed(engine, call):
    set_history(None)  # that of an earlier test would keep a grid
    gc.collect()
    before = sum(type(o) is Grid for o in gc.get_objects())
    with override_settings(engine=engine):
        call()
    gc.collect()
    assert sum(type(o) is Grid for o in gc.get_objects()) == before
