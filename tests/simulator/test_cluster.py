"""Thread block clusters: their barrier, the other blocks' shared memory, and what careless kernels are told."""

import numpy as np
import pytest
import torch
from helpers.hopper import simulated
from helpers.hopper_compile import compile_whole

from moe_numba import simulator  # before numba: it chooses the engine

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
    """Run the loop's body in as many orders; on a GPU once, for there the order is the GPU's."""
    for seed in range(count if simulator.ENABLED else 1):
        with simulator.seed(seed):
            yield seed


def neighbours(cluster, shift):
    """A grid of two clusters, and for each block, x first, the number of the one `shift` ranks on in its cluster."""
    x, y, _ = cluster if isinstance(cluster, tuple) else (cluster, 1, 1)
    grid = np.arange(2 * x * y).reshape(y, 2, x).swapaxes(0, 1).reshape(2, x * y)
    right = np.empty(2 * x * y, np.int32)
    right[grid.ravel()] = np.roll(grid, -shift, axis=1).ravel()
    return (2 * x, y), torch.from_numpy(right.repeat(THREADS))


# --- what kernels are for -------------------------------------------------------------------------------------------


@cuda.jit
def stores(out):
    """Every thread hands its block's number to the same thread of the next block."""
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
def loads(out):
    """Every thread fetches the number of the next block."""
    mine = cuda.shared.array(THREADS, int32)
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x + cuda.gridDim.x * cuda.blockIdx.y
    mine[thread] = block
    barrier_cluster_arrive()
    barrier_cluster_wait()
    got = ld_cluster_s32(mine, thread, (cluster_ctarank() + 1) % cluster_nctarank())
    out[block * cuda.blockDim.x + thread] = got
    barrier_cluster_arrive()
    barrier_cluster_wait()


@cuda.jit
def vectors(out):
    """Every fourth thread hands four numbers to the next block, and fetches four that came to the one after."""
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
def test_blocks_hand_values_to_one_another(cluster, device):
    for kernel, shift in (stores, -1), (loads, 1):
        grid, right = neighbours(cluster, shift)
        for _ in seeds():
            out = torch.full((len(right),), -1, dtype=torch.int32, device=device)
            launch(kernel, grid, THREADS, out, cluster=cluster)
            assert torch.equal(out.cpu(), right)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_blocks_hand_vectors_to_one_another_in_dynamic_shared_memory(cluster, device):
    grid, right = neighbours(cluster, 1)
    right = right * THREADS + torch.arange(THREADS).repeat(len(right) // THREADS)
    for _ in seeds():
        out = torch.full((len(right),), -1, dtype=torch.int32, device=device)
        launch(vectors, grid, THREADS, out, cluster=cluster, shared_bytes=8 * THREADS)
        assert torch.equal(out.cpu(), right.to(torch.int32))


@cuda.jit
def sums_round_by_round(out, rounds):
    """Every block adds up what its left neighbour had in the round before; two buffers, so one barrier a round."""
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


def test_the_barrier_can_be_used_again_and_again(device):
    for _ in seeds():
        out = torch.zeros(4 * THREADS, dtype=torch.int32, device=device)
        launch(sums_round_by_round, 4, THREADS, out, 6, cluster=4)
        assert out.view(4, THREADS)[:, 5].tolist() == [(rank - 6) % 4 * 64 for rank in range(4)]


@cuda.jit
def counts_then_meets(out, counter):
    atom_add_s32(counter, cuda.blockIdx.x // 4, 1)
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = atom_add_s32(counter, cuda.blockIdx.x // 4, 0)


def test_nobody_leaves_the_barrier_before_all_have_come(device):
    for _ in seeds():
        out = torch.zeros(8 * 40, dtype=torch.int32, device=device)
        launch(counts_then_meets, 8, 40, out, torch.zeros(2, dtype=torch.int32, device=device), cluster=4)
        assert (out == 4 * 40).all()


@cuda.jit
def works_meanwhile(out, flag):
    """Block 1 comes only when it has seen what block 0 does between its arrival and its wait."""
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


def test_work_can_stand_between_arrival_and_wait(device):
    for _ in seeds():
        out = torch.zeros(64, dtype=torch.int32, device=device)
        launch(works_meanwhile, 2, 32, out, torch.zeros(1, dtype=torch.int32, device=device), cluster=2)
        assert (out == 7).all()


@cuda.jit
def some_blocks_go(out, arrive_first):
    if cluster_ctarank() % 2:
        if arrive_first:
            barrier_cluster_arrive()
        return
    for _ in range(3):
        barrier_cluster_arrive()
        barrier_cluster_wait()
    out[cuda.grid(1)] = 1


@pytest.mark.parametrize("arrive_first", [0, 1])
def test_a_block_that_has_exited_is_not_waited_for(arrive_first, device):
    for _ in seeds():
        out = torch.zeros(4 * THREADS, dtype=torch.int32, device=device)
        launch(some_blocks_go, 4, THREADS, out, arrive_first, cluster=4)
        assert out.view(4, THREADS)[:, 9].tolist() == [1, 0, 1, 0]


@cuda.jit
def asks_who_it_is(out):
    here = cuda.shared.array(1, int32)
    if cuda.threadIdx.x == 0:
        st_cluster_s32(here, 0, 0, 10 * cluster_ctarank() + cluster_nctarank())
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = here[0]


def test_without_clusters_every_block_is_its_own(device):
    for _ in seeds():
        out = torch.zeros(3 * THREADS, dtype=torch.int32, device=device)
        launch(asks_who_it_is, 3, THREADS, out)
        assert (out == 1).all()


# --- what becomes of it in machine code -----------------------------------------------------------------------------


@cuda.jit
def meets_between_branches(out, limit):
    """A compiler that forgets what a barrier is would meet once in each branch."""
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
    "stores": ["int32*"],
    "loads": ["int32*"],
    "vectors": ["int32*"],
    "sums_round_by_round": ["int32*", "int32"],
    "counts_then_meets": ["int32*", "int32*"],
    "works_meanwhile": ["int32*", "int32*"],
    "some_blocks_go": ["int32*", "int32"],
    "asks_who_it_is": ["int32*"],
    "meets_between_branches": ["int32*", "int32"],
}


@pytest.fixture(scope="module")
def reports():
    kernels = [["test_cluster", name, None, types] for name, types in KERNELS.items()]
    return dict(zip(KERNELS, compile_whole(kernels), strict=True))


def test_every_barrier_is_one_instruction(reports):
    meetings = {"stores": 2, "loads": 2, "vectors": 3, "counts_then_meets": 1, "meets_between_branches": 1}
    for name, count in meetings.items():
        assert reports[name].count("UCGABAR_ARV") == reports[name].count("UCGABAR_WAIT") == count, name
    assert reports["works_meanwhile"].count("UCGABAR_ARV") == 2
    assert reports["works_meanwhile"].count("UCGABAR_WAIT") == 1


def test_an_arrival_releases_and_a_wait_acquires(reports):
    """The fence before an arrival, and the first-level cache that is emptied after a wait."""
    assert reports["stores"].count("MEMBAR.ALL.GPU") == reports["stores"].count("CCTL.IVALL") == 2


def test_another_blocks_memory_is_reached_by_its_generic_address(reports):
    """Plain shared memory is STS and LDS; through the cluster's window it is ST and LD."""

    def counts(name):
        return [reports[name].instructions.count(i) for i in ("ST.E", "LD.E", "ST.E.128", "LD.E.128")]

    assert counts("stores") == [1, 0, 0, 0]
    assert counts("loads") == [0, 1, 0, 0]
    assert counts("vectors") == [0, 0, 1, 1]
    assert counts("meets_between_branches") == [0, 0, 0, 0]


def test_nothing_spills(reports):
    assert all(report.spilled == report.stack == 0 for report in reports.values())


# --- what shows only in the simulator -------------------------------------------------------------------------------


def check(kernel, *numbers, cluster=2, threads=THREADS, count=20):
    """What each seed makes of a kernel: whether its only output is all ones, or the error."""
    for _ in seeds(count):
        out = torch.zeros(cluster * threads, dtype=torch.int32)
        try:
            launch(kernel, cluster, threads, out, *numbers, cluster=cluster)
            yield bool((out == 1).all())
        except simulator.SimulatorError as error:
            yield error


def refused(error, kernel, *patterns, **options):
    """Under every seed a kernel must be refused, in these words."""
    for found in check(kernel, **options):
        assert type(found) is error, found
        for pattern in patterns:
            assert any(p in str(found) for p in pattern.split("|")), f"{pattern!r} is not in: {found}"


@cuda.jit
def hands_over(out, with_barrier):
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
def test_a_missing_barrier_before_the_read_shows_under_some_seeds():
    assert list(check(hands_over, 1)) == [True] * 20
    without = list(check(hands_over, 0))
    assert False in without and set(without) <= {True, False}


@cuda.jit
def reads_then_goes(out, with_barrier):
    mine = cuda.shared.array(THREADS, int32)
    mine[cuda.threadIdx.x] = 1
    barrier_cluster_arrive()
    barrier_cluster_wait()
    out[cuda.grid(1)] = ld_cluster_s32(mine, cuda.threadIdx.x, 1 - cluster_ctarank())
    if with_barrier:
        barrier_cluster_arrive()
        barrier_cluster_wait()


@simulated
def test_a_missing_barrier_before_the_exit_shows_under_some_seeds():
    assert list(check(reads_then_goes, 1)) == [True] * 20
    errors = [found for found in check(reads_then_goes, 0) if found is not True]
    assert errors and all(type(error) is simulator.ClusterError for error in errors)
    for words in ("the shared array of test_cluster.py", "has exited", "needs a cluster barrier before its end"):
        assert words in str(errors[0])


@simulated
def test_a_block_that_may_not_have_started_must_not_be_touched():
    @cuda.jit
    def store(out):
        there = cuda.shared.array(4, int32)
        st_cluster_s32(there, 0, 1 - cluster_ctarank(), 1)

    @cuda.jit
    def load(out):
        there = cuda.shared.array(4, int32)
        barrier_cluster_arrive()
        ld_cluster_s32(there, 0, 1 - cluster_ctarank())
        barrier_cluster_wait()

    for kernel in (store, load):
        line = kernel.py_func.__code__.co_firstlineno + 2
        where = f"accesses the shared array of test_cluster.py:{line} in block "
        refused(simulator.ClusterError, kernel, where, "may not have started", "needs a cluster barrier before it")


def accesses(access):
    """A kernel that makes one access between two barriers."""

    @cuda.jit
    def kernel(out):
        there = cuda.shared.array(8, int32)
        barrier_cluster_arrive()
        barrier_cluster_wait()
        access(there, out)
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
    refused(getattr(simulator, error), accesses(access), words, count=3)


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

    refused(simulator.ClusterError, twice, "warp", "arrives at the cluster barrier twice without a wait in between")
    refused(simulator.ClusterError, never, "warp", "waits at the cluster barrier, at which it has not arrived")


@simulated
def test_a_warp_comes_to_the_barrier_as_one():
    @cuda.jit
    def a_lane_goes(out):
        if cuda.threadIdx.x == 39:
            return
        barrier_cluster_arrive()
        barrier_cluster_wait()

    @cuda.jit
    def a_lane_stays_away(out):
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
    refused(simulator.MissingLane, a_lane_goes, "lanes 7 are named", "barrier.cluster.arrive", "have exited")
    refused(simulator.MissingLane, a_lane_stays_away, "barrier.cluster.arrive", "barrier.cluster.wait")
    refused(simulator.DivergentBarrier, two_lines, "at different lines", f"py:{line}", f"py:{line + 2}")


@simulated
def test_a_warp_that_waits_elsewhere_is_a_deadlock():
    @cuda.jit
    def kernel(out):
        if cluster_ctarank() == 1 and cuda.threadIdx.x < 32:
            cuda.syncthreads()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        cuda.syncthreads()

    refused(
        simulator.Deadlock,
        kernel,
        "block (0, 0, 0) warp 1 lanes 0-31: barrier.cluster.wait (3 of 4 warps arrived), at kernel, test_cluster.py:",
        "block (1, 0, 0) warp 0 lanes 0-31: syncthreads",
    )


@simulated
def test_clusters_must_divide_the_grid_and_be_small():
    out = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(
        ValueError, match=r"the grid is \(6, 1, 1\), which clusters of \(4, 1, 1\) blocks do not divide"
    ):
        launch(stores, 6, 32, out, cluster=4)
    with pytest.raises(ValueError, match=r"the grid is \(4, 3, 1\), which clusters of \(2, 2, 1\)"):
        launch(stores, (4, 3), 32, out, cluster=(2, 2))
    for cluster in (0, 16, (4, 4, 1)):
        with pytest.raises(ValueError, match="the cluster is"):
            launch(stores, 16, 32, out, cluster=cluster)


@simulated
def test_the_barrier_is_in_the_trace():
    with simulator.trace() as events:
        assert list(check(hands_over, 1, count=1)) == [True]
    arrivals = [e for e in events if e.what == "barrier.cluster.arrive"]
    assert len(arrivals) == 3 * 2 * THREADS and {e.block for e in arrivals} == {(0, 0, 0), (1, 0, 0)}
    assert len([e for e in events if e.what == "barrier.cluster.wait"]) == len(arrivals)
