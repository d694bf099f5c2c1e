"""Simulator: limits of launches, resident blocks, shared and local memory."""

import numpy as np
import pytest

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int8

from moe_numba.simulator import grid as grid_module

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")


@cuda.jit
def sync_grid(out):
    cuda.cg.this_grid().sync()


@cuda.jit
def nothing(out):
    pass


@cuda.jit(launch_bounds=64)
def bounded(out):
    pass


@cuda.jit
def await_the_last_block(flag):
    last = cuda.blockIdx.x == cuda.gridDim.x - 1
    while cuda.atomic.add(flag, 0, int(last)) == 0 and not last:
        pass


@cuda.jit
def await_the_block_before(flags):
    while cuda.blockIdx.x and cuda.atomic.add(flags, cuda.blockIdx.x - 1, 0) == 0:
        pass
    cuda.atomic.add(flags, cuda.blockIdx.x, 1)


@pytest.mark.parametrize("block, bounds", [(129, 128), ((64, 3), (128, 2))])
def test_a_block_within_the_launch_bounds_is_required(block, bounds):
    with pytest.raises(ValueError, match=r"launch_bounds allow at most 128 threads"):
        simulator.run(nothing, 1, block, [0], launch_bounds=bounds)
    simulator.run(nothing, 1, 128, [0], launch_bounds=bounds)
    with pytest.raises(ValueError, match=r"launch_bounds allow at most 64 threads"):
        bounded[1, 65](0)


def test_grid_sync_needs_a_cooperative_launch():
    with pytest.raises(
        simulator.SimulatorError, match=r"calls grid.sync\(\), but kernel sync_grid was not launched with"
    ):
        simulator.run(sync_grid, 2, 32, [0])
    simulator.run(sync_grid, 2, 32, [0], cooperative=True)
    sync_grid[2, 32](0)


def test_a_cooperative_launch_has_resident_blocks():
    words = "300 blocks of 1024 threads and 0 bytes of shared memory; at most 264 of them are resident on the simulated"
    with pytest.raises(simulator.SimulatorError, match=words):
        simulator.run(nothing, 300, 1024, [0], cooperative=True)
    with pytest.raises(simulator.SimulatorError, match="133 blocks of 32 threads and 120000 bytes .* at most 132"):
        simulator.run(nothing, 133, 32, [0], shared_bytes=120_000, cooperative=True)


def test_static_shared_memory_limits_a_cooperative_launch(monkeypatch):
    @cuda.jit
    def kernel(out):
        cuda.shared.array(40_000, int8)
        cuda.cg.this_grid().sync()

    monkeypatch.setattr(grid_module, "SM_COUNT", 1)
    kernel[5, 32](0)
    with pytest.raises(simulator.SimulatorError, match="6 blocks of 32 threads and 40000 bytes .* at most 5"):
        kernel[6, 32](0)


def test_blocks_that_wait_for_a_block_that_is_not_resident_are_a_deadlock(monkeypatch):
    monkeypatch.setattr(grid_module, "SM_COUNT", 1)
    await_the_last_block[32, 1](np.zeros(1, np.int32))
    with pytest.raises(simulator.Deadlock) as found:
        await_the_last_block[100, 1](np.zeros(1, np.int32))
    words = "68 blocks of grid of kernel await_the_last_block have not started: at most 32 of them are resident"
    assert words in str(found.value) and "block (31, 0, 0)" not in str(found.value)


@pytest.mark.parametrize("cluster", [None, 3])
def test_blocks_start_as_others_end(cluster, monkeypatch):
    monkeypatch.setattr(grid_module, "SM_COUNT", 1)
    flags = np.zeros(99, np.int32)
    simulator.run(await_the_block_before, 99, 1, [flags], cluster=cluster)
    assert (flags == 1).all()


def test_static_shared_memory_has_48_kib():
    @cuda.jit
    def kernel(out):
        cuda.shared.array(10_000, float32)
        if out[0]:
            cuda.shared.array(3_000, float32)

    kernel[1, 1](np.zeros(1))
    with pytest.raises(simulator.SimulatorError, match="static shared memory has 52000 bytes; the maximum is 49152"):
        kernel[1, 1](np.ones(1))
    simulator.run(nothing, 1, 1, [0], shared_bytes=100_000)


def test_local_memory_of_a_thread_has_512_kib():
    @cuda.jit
    def kernel(out):
        for _ in range(3):
            cuda.local.array(100_000, float32)
        if out[0]:
            cuda.local.array((100, 1000), float32)

    kernel[1, 2](np.zeros(1))
    with pytest.raises(
        simulator.SimulatorError, match="local arrays of kernel kernel have 800000 bytes per thread; the m"
    ):
        kernel[1, 1](np.ones(1))
