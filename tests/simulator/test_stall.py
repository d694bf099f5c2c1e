"""Loops that never end are diagnosed, and loops that take long are not."""

import numpy as np
import pytest
from numba import cuda, float32, int32, uint64

from moe_numba import simulator
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.simulator.core import stall
from moe_numba.simulator.core.settings import override_settings

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")


@pytest.fixture(autouse=True)
def often(monkeypatch):
    """Check for a stall from the start, and run each thread in Python."""
    monkeypatch.setattr(stall, "FIRST_CHECK", 32)
    with override_settings(engine="threads"):
        yield


@cuda.jit
def polls_at_a_barrier(x):
    while x[0] == 0:
        cuda.syncthreads()


@cuda.jit
def polls_at_two_barriers(x):
    tile = cuda.shared.array(1, int32)
    tile[0] = 0
    cuda.syncthreads()
    while x[0] == 0 and tile[0] == 0:
        cuda.syncthreads()
        if cuda.threadIdx.x < 32:
            cuda.syncwarp()
        cuda.syncthreads()


@cuda.jit
def one_warp_polls(x):
    if cuda.threadIdx.x < 32:
        while cuda.shfl_sync(0xFFFFFFFF, x[0], 0) == 0:
            pass
    cuda.syncthreads()


@pytest.mark.parametrize("threads", [32, 96])
@pytest.mark.parametrize("kernel", [polls_at_a_barrier, polls_at_two_barriers, one_warp_polls])
def test_a_loop_that_waits_for_ever_is_a_deadlock(kernel, threads):
    message = r"deadlock: every thread repeats what it did, and no memory changes\n  block \(0, 0, 0\) warp 0 lanes"
    with pytest.raises(simulator.Deadlock, match=message):
        kernel[2, threads](np.zeros(2, np.int32))


@cuda.jit
def counts_in_a_variable(x):
    for _ in range(3000):
        cuda.syncthreads()


@cuda.jit
def counts_in_shared_memory(x):
    count = cuda.shared.array(1, int32)
    count[0] = 0
    cuda.syncthreads()
    while count[0] < 1000:
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            count[0] += 1
        cuda.syncthreads()


@cuda.jit
def counts_in_global_memory(x):
    while x[0] < 1000:
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            x[0] += 1
        cuda.syncthreads()


@cuda.jit
def counts_in_a_local_array(x):
    count = cuda.local.array(1, float32)
    count[0] = 0
    while count[0] < 2000:
        count[0] += 1
        cuda.syncthreads()


@cuda.jit
def waits_for_another_warp(x):
    if cuda.threadIdx.x < 32:
        for _ in range(3000):
            cuda.syncwarp()
    cuda.syncthreads()


@cuda.jit
def waits_for_the_clock(x):
    start = globaltimer()
    while globaltimer() - start < uint64(3_000_000):
        cuda.syncthreads()


@cuda.jit
def waits_for_an_atomic(x):
    if cuda.threadIdx.x == 63:
        for _ in range(2000):
            cuda.atomic.add(x, 1, 1)
        cuda.atomic.add(x, 0, 1)
    elif cuda.threadIdx.x < 32:
        while cuda.shfl_sync(0xFFFFFFFF, cuda.atomic.add(x, 0, 0), 0) == 0:
            pass


SLOW = [counts_in_a_variable, counts_in_shared_memory, counts_in_global_memory, counts_in_a_local_array]
SLOW += [waits_for_another_warp, waits_for_the_clock, waits_for_an_atomic]


@pytest.mark.parametrize("kernel", SLOW)
def test_a_loop_that_takes_long_is_none(kernel):
    kernel[1, 64](np.zeros(2, np.int32))


@cuda.jit
def waits_with_timeouts(x, timeouts):
    start = globaltimer()
    while cuda.atomic.add(x, 0, 0) == 0:
        if globaltimer() - start > timeouts[cuda.threadIdx.x // 32]:
            cuda.atomic.compare_and_swap(x, 0, cuda.threadIdx.x // 32 + 1)


@pytest.mark.parametrize("engine", ["threads", "either"])
def test_the_clock_is_set_forward_if_all_threads_poll_in_vain(engine):
    """The shorter timeout expires first."""
    x, timeouts = np.zeros(1, np.int32), np.array([200, 100, 150]) * np.uint64(10**9)
    with override_settings(engine=engine):
        waits_with_timeouts[1, 96](x, timeouts)
    assert x[0] == 2


def test_threads_that_read_the_clock_and_wait_for_ever_are_a_deadlock():
    with pytest.raises(simulator.Deadlock, match="polls in vain"):
        waits_with_timeouts[1, 32](np.zeros(1, np.int32), np.full(1, 2**64 - 1, np.uint64))


@cuda.jit
def spins(x):
    i = cuda.threadIdx.x
    if i == 1000:
        while True:
            for k in range(3):
                if k > x[0]:
                    break


@cuda.jit(device=True)
def wait_for_ever():
    while 1:
        pass


@cuda.jit
def calls(x):
    wait_for_ever()


@pytest.mark.parametrize("kernel, place", [(spins, ""), (calls, r" \(device function wait_for_ever\)")])
def test_a_loop_without_an_exit_is_refused(kernel, place):
    message = rf"kernel {kernel.__name__} has a loop that never ends, at test_stall.py:\d+{place}: `while (True|1)`"
    with pytest.raises(simulator.Deadlock, match=message):
        kernel[1, 1](np.zeros(1))


@cuda.jit
def leaves(x):
    while True:
        x[0] += 1
        for _ in range(2):
            break
        else:
            break
        if x[0] > 3:
            break
    while True:
        for _ in range(2):
            return


def test_a_loop_with_an_exit_is_not():
    leaves[1, 1](np.zeros(1))
