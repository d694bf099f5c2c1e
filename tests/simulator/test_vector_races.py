"""Data races on the vector engine: kernels without races run as vectors; threads report those of all others."""

import numpy as np
import pytest
from numba import cuda, float32, int32

from moe_numba import simulator
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, st_cluster_s32
from moe_numba.ptx.memory import griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK, redux_sync_add_s32
from moe_numba.ptx.warpgroup import bar_arrive, bar_sync
from moe_numba.simulator.core.scheduler import override_settings
from moe_numba.simulator.vector.errors import Conflict, Unsupported

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="it tests the simulator")


def run(kernel, engine, grid, block, size=128, dtype=np.int32, **options):
    data = simulator.pointer(np.zeros(size, dtype), "data")
    with override_settings(engine=engine), simulator.races():
        simulator.run(kernel, grid, block, [data], **options)
    return data.array


@cuda.jit
def reverse_a_block(data):
    smem, t = cuda.shared.array(64, int32), cuda.threadIdx.x
    smem[t] = t + cuda.blockIdx.x
    cuda.syncthreads()
    data[64 * cuda.blockIdx.x + t] = smem[63 - t]


@cuda.jit
def exchange_in_a_warp(data):
    smem, t = cuda.shared.array(64, int32), cuda.threadIdx.x
    for d in range(3):
        smem[t] = cuda.shfl_xor_sync(FULL_MASK, t, d)
        cuda.syncwarp()
        data[t] += smem[t ^ 1]
        cuda.syncwarp()


@cuda.jit
def hand_over(data):
    smem, t = cuda.shared.array(64, int32), cuda.threadIdx.x
    smem[t] = t
    bar_sync(1, 64)
    value = smem[63 - t]
    if t < 32:
        bar_arrive(2, 64)
    else:
        bar_sync(2, 64)
        smem[t - 32] = 5
    cuda.syncthreads()
    data[t] = smem[t // 2] + value


@cuda.jit
def exchange_in_a_cluster(data):
    smem, t = cuda.shared.array(32, int32), cuda.threadIdx.x
    barrier_cluster_arrive()
    barrier_cluster_wait()
    st_cluster_s32(smem, t, 1 - cuda.blockIdx.x, t)
    barrier_cluster_arrive()
    barrier_cluster_wait()
    data[cuda.grid(1)] = smem[31 - t]


@cuda.jit
def count(data):
    counts, t = cuda.shared.array(8, int32), cuda.threadIdx.x
    if t < 8:
        counts[t] = 0
    cuda.syncthreads()
    cuda.atomic.add(counts, t % 8, 1)
    many = cuda.syncthreads_count(t > 20)
    if t < 8:
        cuda.atomic.add(data, t, counts[t] + many)


@cuda.jit
def shift_in_a_grid(data):
    t = cuda.grid(1)
    value = data[(t + 1) % 128]
    cuda.cg.this_grid().sync()
    data[t] = value + 1


@cuda.jit
def same_value(data):
    data[0] = 5


NO_RACES = {  # kernel: grid, block, options
    reverse_a_block: (2, 64, {}),
    exchange_in_a_warp: (1, 64, {}),
    hand_over: (1, 64, {}),
    exchange_in_a_cluster: (2, 32, {"cluster": 2}),
    count: (2, 64, {}),
    shift_in_a_grid: (2, 64, {"cooperative": True}),
}


@pytest.mark.parametrize("kernel", NO_RACES, ids=lambda kernel: kernel.__name__)
def test_kernels_without_races_run_as_vectors(kernel):
    grid, block, options = NO_RACES[kernel]
    for seed in range(4):
        with simulator.seed(seed):
            given = run(kernel, "vector", grid, block, **options)  # gives up nothing: "vector" would raise
            assert (given == run(kernel, "threads", grid, block, **options)).all()


def test_stores_of_one_value_are_no_race():
    assert run(same_value, "vector", 1, 64)[0] == 5


# Races that the order of vectors hides


def _across_lanes(between):
    """Make a kernel whose lanes read what others wrote before something that orders no memory."""

    @cuda.jit
    def kernel(data):
        smem, t = cuda.shared.array(64, int32), cuda.threadIdx.x
        smem[t] = t
        if between == "shuffle":
            cuda.shfl_sync(FULL_MASK, t, 0)
        elif between == "vote":
            cuda.any_sync(FULL_MASK, t > 3)
        elif between == "match":
            cuda.match_any_sync(FULL_MASK, t)
        elif between == "redux":
            redux_sync_add_s32(FULL_MASK, int32(t))
        elif between == "fence":
            cuda.threadfence_block()
        data[t] = smem[t ^ 1]

    return kernel


@cuda.jit
def plain_beside_atomic(data):
    if cuda.threadIdx.x == 40:
        data[0] = 1
    else:
        cuda.atomic.add(data, 0, 1)


@cuda.jit
def atomic_beside_load(data):
    cuda.atomic.add(data, 0, 1)
    data[cuda.threadIdx.x + 8] = data[1] if cuda.threadIdx.x else data[0]


@cuda.jit
def arrival_alone(data):
    """Threads that only arrive at a barrier do not know what others did before it."""
    smem, t = cuda.shared.array(64, int32), cuda.threadIdx.x
    smem[t] = t
    if t < 32:
        bar_arrive(1, 64)
        data[t] = smem[t + 32]
    else:
        bar_sync(1, 64)


@cuda.jit
def between_arrival_and_wait(data):
    """A barrier orders nothing that its threads do after they arrived."""
    smem, t = cuda.shared.array(64, int32), cuda.threadIdx.x
    barrier_cluster_arrive()
    smem[t] = t
    barrier_cluster_wait()
    data[t] = smem[t ^ 1]


@cuda.jit
def block_beside_block(data):
    data[cuda.threadIdx.x + 32 * cuda.blockIdx.x] = cuda.blockIdx.x


@cuda.jit
def flag_by_atomics(data):
    """The second block sees the first one's atomic, which is relaxed."""
    if cuda.threadIdx.x == 0:
        if cuda.blockIdx.x == 0:
            data[1] = 7
            cuda.atomic.add(data, 0, 1)
        else:
            while cuda.atomic.add(data, 0, 0) == 0:
                pass
            data[2] = data[1]


@cuda.jit
def stored_again_and_read(data):
    """One thread reads what another one stores, though it is what memory holds."""
    t = cuda.threadIdx.x
    if t < 2:
        data[t] = 0
    data[8 + t] = data[0]


@cuda.jit
def one_value_and_a_reader(data):
    data[0] = 5
    cuda.any_sync(FULL_MASK, True)
    if cuda.threadIdx.x == 63:
        data[1] = data[0]


KERNELS = (
    arrival_alone,
    between_arrival_and_wait,
    plain_beside_atomic,
    atomic_beside_load,
    block_beside_block,
    flag_by_atomics,
    stored_again_and_read,
)
HIDDEN = {between: _across_lanes(between) for between in ("nothing", "shuffle", "vote", "match", "redux", "fence")}
HIDDEN |= {kernel.__name__: kernel for kernel in (*KERNELS, one_value_and_a_reader)}


@pytest.mark.parametrize("hidden", HIDDEN)
def test_races_that_vectors_would_hide_are_reported(hidden):
    """Some show under some seeds only."""
    grid = 2 if "block" in hidden or "flag" in hidden else 1
    with pytest.raises(Conflict):
        run(HIDDEN[hidden], "vector", grid, 64)
    reports = []
    for seed in range(6):
        for engine in ("threads", "either"):
            try:
                with simulator.seed(seed):
                    run(HIDDEN[hidden], engine, grid, 64)
                reports.append("")
            except simulator.DataRace as race:
                reports.append(str(race))
    assert any(reports) and reports[::2] == reports[1::2]


def test_stores_of_a_value_that_is_rounded_do_not_race():
    """Memory holds the same rounded number, whichever thread stores 0.1 last."""

    @cuda.jit
    def kernel(data):
        data[0] = 0.1

    for engine in ("vector", "threads"):
        assert run(kernel, engine, 1, 64, dtype=np.float32)[0] == np.float32(0.1)


@cuda.jit
def messages_in_one_word(data):
    """Relaxed accesses do not race, whoever makes them; here the message is the word itself."""
    if cuda.blockIdx.x == 0:
        st_relaxed_sys_s32(data, 0, 7)
    else:
        while ld_relaxed_sys_s32(data, 0) == 0:
            pass


@cuda.jit
def message_beside_the_flag(data):
    if cuda.blockIdx.x == 0:
        data[1] = 7
        st_release_sys_s32(data, 0, 1)
    else:
        while ld_acquire_sys_s32(data, 0) == 0:
            pass
        data[2] = data[1]


def test_what_release_and_acquire_order_needs_threads():
    run(messages_in_one_word, "vector", 2, 1)
    with pytest.raises(Conflict):
        run(message_beside_the_flag, "vector", 2, 1)
    assert run(message_beside_the_flag, "either", 2, 1)[2] == 7


def test_accesses_of_block_scope_need_threads():
    @cuda.jit
    def kernel(data):
        st_release_cta_shared_s32(cuda.shared.array(1, int32), 0, 1)

    with pytest.raises(Unsupported, match="an access of cta scope, while data races are detected"):
        run(kernel, "vector", 1, 1)


# Dependent launches


def _consume(waits, reads):
    @cuda.jit
    def consume(data, weights):
        t = cuda.threadIdx.x
        weight = weights[t] if reads == "weights" else data[t] if reads == "results" else 0
        if waits == "all" or waits == "one lane" and t == 0:
            griddepcontrol_wait()
        data[128 + t] = data[t] + weight

    return consume


@cuda.jit
def produce(data, weights):
    t = cuda.threadIdx.x
    data[t] = data[64 + t] + weights[t]


@pytest.mark.parametrize("reads", ["nothing", "weights", "results"])
@pytest.mark.parametrize("waits", ["all", "one lane", "none"])
@pytest.mark.parametrize("first", ["threads", "vector"])
def test_dependent_launches(first, waits, reads):
    """The report is that of threads, though the inputs have changed since the kernel before."""
    results = []
    for engine in ("threads", "either"):
        data, weights = simulator.pointer(np.zeros(256, np.int32)), simulator.pointer(np.arange(64, dtype=np.int32))
        with simulator.seed(3), simulator.races():
            with override_settings(engine="threads" if engine == "threads" else first):
                simulator.run(produce, 1, 64, (data, weights))
            data.array[64:128] = 70
            with override_settings(engine=engine):
                try:
                    simulator.run(_consume(waits, reads), 1, 64, (data, weights), dependent=True)
                    results.append(data.array.tolist())
                except simulator.DataRace as error:
                    results.append(str(error))
    assert results[0] == results[1]
    assert ("overlap the kernel before it, produce" in results[0]) == (waits != "all" or reads == "results")


def test_dependent_launches_that_wait_run_as_vectors():
    data, weights = simulator.pointer(np.zeros(256, np.int32)), simulator.pointer(np.zeros(64, np.int32))
    with simulator.races(), override_settings(engine="vector"):
        simulator.run(produce, 1, 64, (data, weights))
        for _ in range(2):
            simulator.run(_consume("all", "weights"), 1, 64, (data, weights), dependent=True)
        with pytest.raises(Conflict, match="before griddepcontrol.wait"):
            simulator.run(_consume("all", "results"), 1, 64, (data, weights), dependent=True)


@pytest.mark.parametrize("engine", ["threads", "vector"])
def test_a_kernel_whose_races_are_not_detected_ends_the_history(engine):
    @cuda.jit
    def unrelated(data):
        data[200] = float32(1)

    data, weights = simulator.pointer(np.zeros(256, np.float32)), simulator.pointer(np.zeros(64, np.float32))
    with override_settings(engine="either"):
        with simulator.races():
            simulator.run(produce, 1, 64, (data, weights))
        with override_settings(engine=engine):
            simulator.run(unrelated, 1, 1, (data,))
        with simulator.races():
            simulator.run(_consume("none", "nothing"), 1, 64, (data, weights), dependent=True)


def test_shared_memory_of_the_kernel_before_is_not_used_again():
    """A dependent launch would seem to race with accesses at the same addresses of memory that has been freed."""

    @cuda.jit
    def kernel(data):
        smem = cuda.shared.array(4096, int32)
        smem[cuda.threadIdx.x] = 1

    data = simulator.pointer(np.zeros(1, np.int32))
    with simulator.races(), override_settings(engine="threads"):
        for _ in range(8):
            simulator.run(kernel, 4, 64, (data,), dependent=True)
