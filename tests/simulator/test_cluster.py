"""Thread block clusters: barrier, distributed shared memory, machine code, and kernels the simulator must reject."""

import numpy as np
import pytest
import torch
from helpers.hopper import simulated
from helpers.hopper_compile import compile_whole

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32

from moe_numba.ptx.cluster import (
    barrier_cluster_arrive,
    barrier_cluster_wait,
    cluster_ctarank,
    cluster_nctarank,
    ld_cluster_s32,
    ld_cluster_s32x4,
    st_cluster_s32,
    st_cluster_s32x4,
)
from moe_numba.ptx.memory import atom_add_s32, st_shared_s32x4
from moe_numba.runtime.launch import launch

THREADS = 64
CLUSTERS = [1, 2, 4, 8, (2, 2, 1)]


def seeds(count=10):
    """Iterate over `count` seeds in the simulator; once on a GPU."""
    for seed in range(count if simulator.ENABLED else 1):
        with simulator.seed(seed):
            yield seed


def neighbours(cluster, shift):
    """Return a grid of two clusters, and per thread the index of the block `shift` ranks further in its cluster."""
    x, y, _ = cluster if isinstance(cluster, tuple) else (cluster, 1, 1)
    grid = np.arange(2 * x * y).reshape(y, 2, x).swapaxes(0, 1).reshape(2, x * y)
    right = np.empty(2 * x * y, np.int32)
    right[grid.ravel()] = np.roll(grid, -shift, axis=1).ravel()
    return (2 * x, y), torch.from_numpy(right.repeat(THREADS))


# --- results --------------------------------------------------------------------------------------------------------


@cuda.jit
def store_to_next_block(out):
    """Store the block index to the next block of the cluster."""
    barrier_cluster_arrive()
    barrier_cluster_wait()
    other = cuda.shared.array(THREADS, int32)
    got = cuda.shared.array(THREADS, int32)
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
    other[thread] = -1
    st_cluster_s32(got, thread, (cluster_ctarank() + 1) % cluster_nctarank(), block)
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[block * cuda.blockDim.x + thread] = got[thread] + other[thread] + 1


@cuda.jit
def load_from_next_block(out):
    """Load the block index of the next block of the cluster."""
    values = cuda.shared.array(THREADS, int32)
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
    values[thread] = block
    barrier_cluster_arrive()
    barrier_cluster_wait()
    got = ld_cluster_s32(values, thread, (cluster_ctarank() + 1) % cluster_nctarank())
    out[block * cuda.blockDim.x + thread] = got
    barrier_cluster_arrive()
    barrier_cluster_wait()


@cuda.jit
def exchange_vectors(out):
    """Store 16 bytes per four threads to the next block, and load the 16 bytes stored to the block after it."""
    got = cuda.shared.array(0, int32)[THREADS:]
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
    rank, ranks = cluster_ctarank(), cluster_nctarank()
    barrier_cluster_arrive()
    barrier_cluster_wait()
    if thread % 4 == 0:
        first = block * cuda.blockDim.x + thread
        st_cluster_s32x4(got, thread, (rank + 1) % ranks, first, first + 1, first + 2, first + 3)
    barrier_cluster_arrive()
    barrier_cluster_wait()
    if thread % 4 == 0:
        a, b, c, d = ld_cluster_s32x4(got, thread, (rank + 2) % ranks)
        out[first], out[first + 1], out[first + 2], out[first + 3] = a, b, c, d
    barrier_cluster_arrive()
    barrier_cluster_wait()


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_blocks_exchange_values(cluster, device):
    for kernel, shift in (store_to_next_block, -1), (load_from_next_block, 1):
        grid, right = neighbours(cluster, shift)
        for _ in seeds():
            out = torch.full((len(right),), -1, dtype=torch.int32, device=device)
            launch(kernel, grid, THREADS, out, cluster=cluster)
            assert torch.equal(out.cpu(), right)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_blocks_exchange_vectors_in_dynamic_shared_memory(cluster, device):
    grid, right = neighbours(cluster, 1)
    right = right * THREADS + torch.arange(THREADS).repeat(len(right) // THREADS)
    for _ in seeds():
        out = torch.full((len(right),), -1, dtype=torch.int32, device=device)
        launch(exchange_vectors, grid, THREADS, out, cluster=cluster, shared_bytes=8 * THREADS)
        assert torch.equal(out.cpu(), right.to(torch.int32))


@cuda.jit
def accumulate_in_rounds(out, rounds):
    """Send twice the block's value to the next block in each round; two buffers need one barrier per round."""
    value = cuda.shared.array(2, int32)
    rank, ranks, thread = cluster_ctarank(), cluster_nctarank(), cuda.threadIdx.x
    if thread == 0:
        value[0] = rank
    for i in range(rounds):
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if thread == THREADS - 1:
            st_cluster_s32(value, (i + 1) % 2, (rank + 1) % ranks, 2 * value[i % 2])
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = value[rounds % 2]


def test_the_barrier_is_reusable(device):
    for _ in seeds():
        out = torch.zeros(4 * THREADS, dtype=torch.int32, device=device)
        launch(accumulate_in_rounds, 4, THREADS, out, 6, cluster=4)
        assert out.view(4, THREADS)[:, 5].tolist() == [(rank - 6) % 4 * 64 for rank in range(4)]


@cuda.jit
def count_then_synchronize(out, counter):
    atom_add_s32(counter, cuda.blockIdx.x // 4, 1)
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = atom_add_s32(counter, cuda.blockIdx.x // 4, 0)


def test_no_thread_passes_the_barrier_before_all_have_arrived(device):
    for _ in seeds():
        out = torch.zeros(8 * 40, dtype=torch.int32, device=device)
        launch(count_then_synchronize, 8, 40, out, torch.zeros(2, dtype=torch.int32, device=device), cluster=4)
        assert (out == 4 * 40).all()


@cuda.jit
def work_between_arrive_and_wait(out, flag):
    """Block 1 arrives only after it has seen what block 0 does between its arrival and its wait."""
    if cluster_ctarank() == 0:
        barrier_cluster_arrive()
        if cuda.threadIdx.x == 0:
            atom_add_s32(flag, 0, 7)
    else:
        if cuda.threadIdx.x == 0:
            while atom_add_s32(flag, 0, 0) == 0:
                cuda.nanosleep(100)
        cuda.syncwarp()
        barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = atom_add_s32(flag, 0, 0)


def test_work_between_arrive_and_wait(device):
    for _ in seeds():
        out = torch.zeros(64, dtype=torch.int32, device=device)
        launch(work_between_arrive_and_wait, 2, 32, out, torch.zeros(1, dtype=torch.int32, device=device), cluster=2)
        assert (out == 7).all()


@cuda.jit
def some_blocks_exit(out, arrive_first):
    if cluster_ctarank() % 2:
        if arrive_first:
            barrier_cluster_arrive()
        return
    for _ in range(3):
        barrier_cluster_arrive()
        barrier_cluster_wait()
    out[cuda.grid(1)] = 1


@pytest.mark.parametrize("arrive_first", [0, 1])
def test_the_barrier_does_not_wait_for_exited_blocks(arrive_first, device):
    for _ in seeds():
        out = torch.zeros(4 * THREADS, dtype=torch.int32, device=device)
        launch(some_blocks_exit, 4, THREADS, out, arrive_first, cluster=4)
        assert out.view(4, THREADS)[:, 9].tolist() == [1, 0, 1, 0]


@cuda.jit
def query_cluster_rank(out):
    smem = cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 0:
        st_cluster_s32(smem, 0, 0, 10 * cluster_ctarank() + cluster_nctarank())
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = smem[0]


def test_without_clusters_a_block_is_its_own_cluster(device):
    for _ in seeds():
        out = torch.zeros(3 * THREADS, dtype=torch.int32, device=device)
        launch(query_cluster_rank, 3, THREADS, out)
        assert (out == 1).all()


# --- machine code ---------------------------------------------------------------------------------------------------


@cuda.jit
def barrier_between_branches(out, limit):
    """A compiler that ignores convergence could duplicate the barrier into both branches."""
    x = out[cuda.threadIdx.x]
    large = False
    if x > limit:
        x = out[x]
        large = True
    barrier_cluster_arrive()
    barrier_cluster_wait()
    if large:
        out[cuda.threadIdx.x] = x + 1


KERNELS = {
    "store_to_next_block": ["int32*"],
    "load_from_next_block": ["int32*"],
    "exchange_vectors": ["int32*"],
    "accumulate_in_rounds": ["int32*", "int32"],
    "count_then_synchronize": ["int32*", "int32*"],
    "work_between_arrive_and_wait": ["int32*", "int32*"],
    "some_blocks_exit": ["int32*", "int32"],
    "query_cluster_rank": ["int32*"],
    "barrier_between_branches": ["int32*", "int32"],
}


@pytest.fixture(scope="module")
def reports():
    return compile_whole({name: ("test_cluster", name, types) for name, types in KERNELS.items()})


def test_every_barrier_is_one_instruction(reports):
    barriers = {
        "store_to_next_block": 2,
        "load_from_next_block": 2,
        "exchange_vectors": 3,
        "count_then_synchronize": 1,
        "barrier_between_branches": 1,
    }
    for name, count in barriers.items():
        assert reports[name].count("UCGABAR_ARV") == reports[name].count("UCGABAR_WAIT") == count, name
    assert reports["work_between_arrive_and_wait"].count("UCGABAR_ARV") == 2
    assert reports["work_between_arrive_and_wait"].count("UCGABAR_WAIT") == 1


def test_an_arrival_releases_and_a_wait_acquires(reports):
    """Arriving emits a fence, and waiting invalidates the L1 cache."""
    assert (
        reports["store_to_next_block"].count("MEMBAR.ALL.GPU")
        == reports["store_to_next_block"].count("CCTL.IVALL")
        == 2
    )


def test_remote_shared_memory_is_accessed_by_generic_address(reports):
    """A block's own shared memory is accessed by STS and LDS, remote shared memory by ST and LD."""

    def counts(name):
        return [reports[name].opcodes.count(i) for i in ("ST.E", "LD.E", "ST.E.128", "LD.E.128")]

    assert counts("store_to_next_block") == [1, 0, 0, 0]
    assert counts("load_from_next_block") == [0, 1, 0, 0]
    assert counts("exchange_vectors") == [0, 0, 1, 1]
    assert counts("barrier_between_branches") == [0, 0, 0, 0]


def test_nothing_spills(reports):
    assert all(report.spilled_bytes == report.stack_bytes == 0 for report in reports.values())


# --- faulty kernels in the simulator --------------------------------------------------------------------------------


def results(kernel, *numbers, cluster=2, threads=THREADS, count=20):
    """Yield for each seed whether the kernel's output is all ones, or the error."""
    for _ in seeds(count):
        out = torch.zeros(cluster * threads, dtype=torch.int32)
        try:
            launch(kernel, cluster, threads, out, *numbers, cluster=cluster)
            yield bool((out == 1).all())
        except simulator.SimulatorError as error:
            yield error


def assert_refused(error, kernel, *patterns, **options):
    """Assert that every seed raises this error with these patterns."""
    for found in results(kernel, **options):
        assert type(found) is error, found
        for pattern in patterns:
            assert any(p in str(found) for p in pattern.split("|")), f"{pattern!r} is not in: {found}"


@cuda.jit
def store_then_read(out, with_barrier):
    got = cuda.shared.array(THREADS, int32)
    thread = cuda.threadIdx.x
    got[thread] = 0
    barrier_cluster_arrive()
    barrier_cluster_wait()
    st_cluster_s32(got, thread, 1 - cluster_ctarank(), 1)
    if with_barrier:
        barrier_cluster_arrive()
        barrier_cluster_wait()
    out[cuda.grid(1)] = got[thread]
    barrier_cluster_arrive()
    barrier_cluster_wait()


@simulated
def test_a_missing_barrier_before_the_read_fails_under_some_seeds():
    assert list(results(store_then_read, 1)) == [True] * 20
    without = list(results(store_then_read, 0))
    assert False in without and set(without) <= {True, False}


@cuda.jit
def read_then_exit(out, with_barrier):
    values = cuda.shared.array(THREADS, int32)
    values[cuda.threadIdx.x] = 1
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = ld_cluster_s32(values, cuda.threadIdx.x, 1 - cluster_ctarank())
    if with_barrier:
        barrier_cluster_arrive()
        barrier_cluster_wait()


@simulated
def test_a_missing_barrier_before_the_exit_fails_under_some_seeds():
    assert list(results(read_then_exit, 1)) == [True] * 20
    errors = [found for found in results(read_then_exit, 0) if found is not True]
    assert errors and all(type(error) is simulator.ClusterError for error in errors)
    for words in ("the shared array of test_cluster.py", "has exited", "needs a cluster barrier before its end"):
        assert words in str(errors[0])


@simulated
def test_access_to_a_block_that_may_not_have_started_is_refused():
    @cuda.jit
    def store(out):
        smem = cuda.shared.array(4, int32)
        st_cluster_s32(smem, 0, 1 - cluster_ctarank(), 1)

    @cuda.jit
    def load(out):
        smem = cuda.shared.array(4, int32)
        barrier_cluster_arrive()
        ld_cluster_s32(smem, 0, 1 - cluster_ctarank())
        barrier_cluster_wait()

    for kernel in (store, load):
        line = kernel.py_func.__code__.co_firstlineno + 2
        where = f"accesses the shared array of test_cluster.py:{line} in block "
        assert_refused(
            simulator.ClusterError, kernel, where, "may not have started", "needs a cluster barrier before it"
        )


def accesses(access):
    """Make a kernel with one access between two cluster barriers."""
    access = cuda.jit(device=True)(access)

    @cuda.jit
    def kernel(out):
        smem = cuda.shared.array(8, int32)
        barrier_cluster_arrive()
        barrier_cluster_wait()
        access(smem, out)
        barrier_cluster_arrive()
        barrier_cluster_wait()

    return kernel


@simulated
@pytest.mark.parametrize(
    "error, words, access",
    [
        ("OutOfBounds", "rank 2 is outside its cluster, which has 2 blocks", lambda a, _: st_cluster_s32(a, 0, 2, 1)),
        ("OutOfBounds", "rank -1 is outside its cluster", lambda a, _: ld_cluster_s32(a, 0, -1)),
        ("OutOfBounds", "index 8 (4 bytes) is outside the shared array", lambda a, _: st_cluster_s32(a, 8, 1, 1)),
        ("OutOfBounds", "in block (0, 0, 0) (8 x int32)", lambda a, _: ld_cluster_s32(a, -1, 0)),
        ("OutOfBounds", "index 6 (4 bytes) is outside", lambda a, _: ld_cluster_s32(a[2:], 6, 1)),
        ("OutOfBounds", "index 8 (16 bytes)", lambda a, _: ld_cluster_s32x4(a, 8, 1)),
        ("OutOfBounds", "index 8 (16 bytes)", lambda a, _: st_shared_s32x4(a, 8, 1, 2, 3, 4)),
        ("Misaligned", "is not aligned to 16 bytes, but lies 4", lambda a, _: st_cluster_s32x4(a, 1, 1, 1, 2, 3, 4)),
        ("Misaligned", "is not aligned to 16 bytes, but lies 8", lambda a, _: ld_cluster_s32x4(a[2:], 0, 1)),
        ("SimulatorError", "out (128 x int32) is not in shared memory", lambda _, out: ld_cluster_s32(out, 0, 1)),
    ],
)
def test_a_wrong_access_is_refused(error, words, access):
    assert_refused(getattr(simulator, error), accesses(access), words, count=3)


@simulated
def test_arrivals_and_waits_must_alternate():
    @cuda.jit
    def twice(out):
        barrier_cluster_arrive()
        barrier_cluster_arrive()
        barrier_cluster_wait()

    @cuda.jit
    def never(out):
        barrier_cluster_wait()

    assert_refused(
        simulator.ClusterError, twice, "warp", "arrives at the cluster barrier twice without a wait in between"
    )
    assert_refused(simulator.ClusterError, never, "warp", "waits at the cluster barrier, at which it has not arrived")


@simulated
def test_all_lanes_of_a_warp_must_reach_the_barrier():
    @cuda.jit
    def a_lane_exits(out):
        if cuda.threadIdx.x == 39:
            return
        barrier_cluster_arrive()
        barrier_cluster_wait()

    @cuda.jit
    def a_lane_does_not_arrive(out):
        if cuda.threadIdx.x != 39:
            barrier_cluster_arrive()
        barrier_cluster_wait()

    @cuda.jit
    def two_lines(out):
        if cuda.threadIdx.x < 40:
            barrier_cluster_arrive()
        else:
            barrier_cluster_arrive()
        barrier_cluster_wait()

    line = two_lines.py_func.__code__.co_firstlineno + 3
    assert_refused(simulator.MissingLane, a_lane_exits, "lanes 7 are named", "barrier.cluster.arrive", "have exited")
    assert_refused(simulator.MissingLane, a_lane_does_not_arrive, "barrier.cluster.arrive", "barrier.cluster.wait")
    assert_refused(simulator.DivergentBarrier, two_lines, "at different lines", f"py:{line}", f"py:{line + 2}")


@simulated
def test_a_warp_that_waits_elsewhere_is_a_deadlock():
    @cuda.jit
    def kernel(out):
        if cluster_ctarank() == 1 and cuda.threadIdx.x < 32:
            cuda.syncthreads()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        cuda.syncthreads()

    assert_refused(
        simulator.Deadlock,
        kernel,
        "block (0, 0, 0) warp 1 lanes 0-31: barrier.cluster.wait (3 of 4 warps arrived), at kernel, test_cluster.py:",
        "block (1, 0, 0) warp 0 lanes 0-31: syncthreads",
    )


@simulated
def test_clusters_must_divide_the_grid_and_have_at_most_eight_blocks():
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"the grid is \(6, 1, 1\), which clusters of \(4, 1, 1\) blocks do not divide"
    ):
        launch(store_to_next_block, 6, 32, out, cluster=4)
    with pytest.raises(ValueError, match=r"the grid is \(4, 3, 1\), which clusters of \(2, 2, 1\)"):
        launch(store_to_next_block, (4, 3), 32, out, cluster=(2, 2))
    for cluster in (0, 16, (4, 4, 1)):
        with pytest.raises(ValueError, match="the cluster is"):
            launch(store_to_next_block, 16, 32, out, cluster=cluster)


@simulated
def test_the_barrier_is_in_the_trace():
    with simulator.trace() as events:
        assert list(results(store_then_read, 1, count=1)) == [True]
    arrivals = [e for e in events if e.what == "barrier.cluster.arrive"]
    assert len(arrivals) == 3 * 2 * THREADS and {e.block for e in arrivals} == {(0, 0, 0), (1, 0, 0)}
    assert len([e for e in events if e.what == "barrier.cluster.wait"]) == len(arrivals)
