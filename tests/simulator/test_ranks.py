"""Several ranks at once: flags, rings and barriers between them, weak memory, and what is said of a deadlock."""

import numpy as np
import pytest
import torch

from moe_numba import simulator  # before numba: it chooses the engine

# isort: split
from numba import cuda, int32, uint32, uint64

from moe_numba.ptx.atomics import (
    atom_add_relaxed_sys_s32,
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,
    ld_volatile_s32,
    red_add_relaxed_sys_s32,
    red_add_release_sys_s32,
    st_relaxed_sys_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.cp_async import bulk_load
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import ld_nc_na_s32x4, pointer_from_address, st_na_s32x4
from moe_numba.ptx.warpgroup import bar_sync
from moe_numba.runtime.launch import launch

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="these ranks are simulated: set MOE_NUMBA_SIMULATE=1")

SEEDS = range(20)


@pytest.fixture
def share():
    """Make a buffer of integers for each of so many ranks; gives the buffers, and their addresses as a tensor."""
    made = []

    def make(ranks, size):
        buffers = [torch.zeros(size, dtype=torch.int32) for _ in range(ranks)]
        made.extend(simulator.register(b, f"the buffer of rank {r}") for r, b in enumerate(buffers))
        return buffers, torch.tensor(made[-ranks:], dtype=torch.uint64)

    yield make
    for address in made:
        simulator.forget(address)


def run(kernels, seed=0, weak=True, threads=64):
    """Run a kernel with its arguments on each rank, all at once."""
    with simulator.seed(seed), simulator.weak_memory() if weak else simulator.seed(seed):
        with simulator.together():
            for rank, (kernel, *args) in enumerate(kernels):
                with simulator.on_rank(rank):
                    launch(kernel, 1, threads, *args)


# --- message passing ------------------------------------------------------------------------------------------------


def make_sender(fault=""):
    """All threads store a word into the peer's buffer, and one raises a flag there: element 0."""

    @cuda.jit
    def sender(peers, mine):
        theirs = pointer_from_address(peers[1], mine)
        t = cuda.threadIdx.x
        if fault == "tail first":
            if t == 0:
                st_release_sys_s32(theirs, 0, 1)
            cuda.syncthreads()
        theirs[16 + t] = t + 1
        if fault == "syncwarp":
            cuda.syncwarp()
        elif fault != "no barrier":
            bar_sync(1, 64)
        if t == 0 and fault != "tail first":
            if fault == "plain store":
                theirs[0] = 1
            elif fault == "relaxed store":
                st_relaxed_sys_s32(theirs, 0, 1)
            elif fault == "fence":
                fence_acq_rel_sys()
                st_relaxed_sys_s32(theirs, 0, 1)
            elif fault == "threadfence":
                cuda.threadfence_system()
                theirs[0] = 1
            elif fault == "relaxed atomic":
                atom_add_relaxed_sys_s32(theirs, 0, 1)
            elif fault == "atomic":
                red_add_release_sys_s32(theirs, 0, 1)
            else:
                st_release_sys_s32(theirs, 0, 1)

    return sender


def make_receiver(fault=""):
    """One thread waits for the flag; then all read."""
    poll = {"relaxed": ld_relaxed_sys_s32, "volatile": ld_volatile_s32, "fence": ld_volatile_s32}
    poll = poll.get(fault, ld_acquire_sys_s32)

    @cuda.jit
    def receiver(mine, out):
        t = cuda.threadIdx.x
        if t == 0:
            while poll(mine, 0) == 0:
                pass
            if fault == "fence":
                fence_acq_rel_sys()
        cuda.syncthreads()
        out[t] = mine[16 + t]

    return receiver


def is_right(share, sender, receiver, seed, weak=True):
    buffers, addresses = share(2, 96)
    out = torch.zeros(64, dtype=torch.int32)
    run([(sender, addresses, buffers[0]), (receiver, buffers[1], out)], seed, weak)
    assert buffers[1][16:80].tolist() == list(range(1, 65)), "at the end all stores are there"
    return out.tolist() == list(range(1, 65))


@pytest.mark.parametrize("sent, received", [("", ""), ("fence", ""), ("threadfence", "fence"), ("atomic", "fence")])
def test_a_message_that_is_released_and_acquired_arrives_whole(share, sent, received):
    sender, receiver = make_sender(sent), make_receiver(received)
    assert all(is_right(share, sender, receiver, seed) for seed in SEEDS)


@pytest.mark.parametrize(
    "sent, received",
    [
        *[(fault, "") for fault in ("plain store", "relaxed store", "relaxed atomic", "tail first")],
        *[("no barrier", ""), ("syncwarp", ""), ("", "relaxed"), ("", "volatile")],
    ],
)
def test_a_message_that_is_not_is_seen_torn_under_some_seed(share, sent, received):
    sender, receiver = make_sender(sent), make_receiver(received)
    assert not all(is_right(share, sender, receiver, seed) for seed in SEEDS)


def test_without_weak_memory_a_flag_needs_no_release(share):
    sender, receiver = make_sender("plain store"), make_receiver("relaxed")
    assert all(is_right(share, sender, receiver, seed, weak=False) for seed in SEEDS)


def test_a_seed_repeats_what_weak_memory_shows(share):
    sender, receiver = make_sender("no barrier"), make_receiver()

    def shown(seed):
        buffers, addresses = share(2, 96)
        out = torch.zeros(64, dtype=torch.int32)
        run([(sender, addresses, buffers[0]), (receiver, buffers[1], out)], seed)
        return out.tolist()

    first = [shown(seed) for seed in SEEDS]
    assert first == [shown(seed) for seed in SEEDS]


def test_blocks_of_one_grid_are_weak_too_and_a_block_reads_its_own_stores():
    @cuda.jit
    def kernel(x, out, with_fence):
        if cuda.blockIdx.x == 0:
            x[1] = 7
            out[0] = x[1]
            if with_fence:
                cuda.threadfence()
            x[0] = 1
        else:
            while cuda.atomic.add(x, 0, 0) == 0:
                pass
            cuda.threadfence()
            out[1] = x[1]

    def results(with_fence):
        for seed in range(40):
            x, out = np.zeros(2, np.int32), np.zeros(2, np.int32)
            with simulator.seed(seed), simulator.weak_memory():
                kernel[2, 1](x, out, with_fence)
            assert out[0] == 7 and x.tolist() == [1, 7]
            yield out[1]

    assert set(results(True)) == {7}
    assert set(results(False)) == {0, 7}


def test_it_is_open_whose_store_is_the_last():
    @cuda.jit
    def kernel(x):
        x[0] = cuda.blockIdx.x

    def last(seed):
        x = np.zeros(1, np.int32)
        with simulator.seed(seed), simulator.weak_memory():
            kernel[2, 1](x)
        return x[0]

    assert {last(seed) for seed in SEEDS} == {0, 1}


@pytest.mark.parametrize("with_barrier", [True, False])
def test_the_sync_of_a_grid_publishes_what_came_before(with_barrier):
    @cuda.jit
    def kernel(x, out):
        i = cuda.grid(1)
        x[i] = i + 1
        if with_barrier:
            cuda.cg.this_grid().sync()
        else:
            cuda.syncthreads()
        out[i] = x[(i + 4) % 8]

    def is_right(seed):
        x, out = np.zeros(8, np.int32), np.zeros(8, np.int32)
        with simulator.seed(seed), simulator.weak_memory():
            kernel[2, 4](x, out)
        return out.tolist() == [5, 6, 7, 8, 1, 2, 3, 4]

    assert all(is_right(seed) for seed in SEEDS) == with_barrier


@pytest.mark.parametrize("with_wait", [True, False])
def test_what_is_handed_on_through_an_mbarrier_is_released_too(share, with_wait):
    @cuda.jit
    def sender(peers, mine):
        barriers = cuda.shared.array(1, uint64)
        theirs = pointer_from_address(peers[1], mine)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(barriers, 0, 64)
            fence_mbarrier_init()
        cuda.syncthreads()
        theirs[16 + t] = t + 1
        mbarrier_arrive(barriers, 0)
        if t == 0:
            if with_wait:
                mbarrier_wait_parity(barriers, 0, uint32(0))
            st_release_sys_s32(theirs, 0, 1)

    receiver = make_receiver()
    assert all(is_right(share, sender, receiver, seed) for seed in SEEDS) == with_wait


@pytest.mark.parametrize("with_fence", [True, False])
def test_a_copy_reads_what_its_block_has_acquired(share, with_fence):
    @cuda.jit
    def receiver(mine, out):
        barriers, buffer = cuda.shared.array(1, uint64), cuda.shared.array(64, int32, 128)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(barriers, 0, 1)
            fence_mbarrier_init()
            while ld_relaxed_sys_s32(mine, 0) == 0:
                pass
            if with_fence:
                fence_acq_rel_sys()
            mbarrier_arrive_expect_tx(barriers, 0, 256)
            bulk_load(buffer, 0, mine, 16, 256, barriers, 0)
        cuda.syncthreads()
        mbarrier_wait_parity(barriers, 0, uint32(0))
        out[t] = buffer[t]

    sender = make_sender()
    assert all(is_right(share, sender, receiver, seed) for seed in SEEDS) == with_fence


# --- rings ----------------------------------------------------------------------------------------------------------


def make_ring(ranks, slots, chunk, messages, fault=""):
    """Each rank sends `messages` rows of 4 integers to each rank: warp d sends to d, warp `ranks` + s receives from s.

    A buffer holds, for each source: tail, head (which lies at the sender, by destination), and its slots.
    """
    first = 32  # integers before the slots; tails from 0 on, heads from 16 on

    @cuda.jit
    def ring(peers, mine, out, me):
        warp, lane = cuda.threadIdx.x // 32, cuda.laneid
        if warp < ranks:
            theirs = pointer_from_address(peers[warp], mine)
            tail = 0
            while tail < messages:
                count = min(chunk, messages - tail)
                if lane == 0:
                    while slots - (tail - ld_acquire_sys_s32(mine, 16 + warp)) < count:
                        pass
                cuda.syncwarp()
                if lane < count:
                    row = tail + lane
                    at = first + 4 * (me * slots + row % slots)
                    st_na_s32x4(theirs, at, me, warp, row, 1000 * me + row)
                tail += count
                if fault != "no syncwarp":
                    cuda.syncwarp()
                if lane == 0:
                    st_release_sys_s32(theirs, me, tail)
        else:
            source = warp - ranks
            theirs = pointer_from_address(peers[source], mine)
            head = 0
            while head < messages:
                tail = 0
                if lane == 0:
                    tail = ld_acquire_sys_s32(mine, source)
                    while tail == head:
                        tail = ld_acquire_sys_s32(mine, source)
                tail = cuda.shfl_sync(0xFFFFFFFF, tail, 0)
                if fault == "early head":
                    if lane == 0:
                        st_release_sys_s32(theirs, 16 + me, tail)
                    cuda.syncwarp()
                if lane < tail - head:
                    row = head + lane
                    a, b, c, d = ld_nc_na_s32x4(mine, first + 4 * (source * slots + row % slots))
                    to = 4 * (source * messages + row)
                    out[to], out[to + 1], out[to + 2], out[to + 3] = a, b, c, d
                head = tail
                cuda.syncwarp()
                if lane == 0 and fault not in ("no head", "early head"):
                    st_release_sys_s32(theirs, 16 + me, head)

    return ring


def ring_is_right(share, kernel, ranks, slots, messages, seed):
    buffers, addresses = share(ranks, 32 + 4 * ranks * slots)
    outs = [torch.zeros(4 * ranks * messages, dtype=torch.int32) for _ in range(ranks)]
    run([(kernel, addresses, buffers[r], outs[r], r) for r in range(ranks)], seed, threads=64 * ranks)
    rows = [[[[s, r, i, 1000 * s + i] for i in range(messages)] for s in range(ranks)] for r in range(ranks)]
    return [out.view(ranks, messages, 4).tolist() for out in outs] == rows


@pytest.mark.parametrize("ranks, slots, chunk, messages", [(2, 4, 3, 11), (3, 5, 2, 7)])
def test_a_ring_of_few_slots(share, ranks, slots, chunk, messages):
    kernel = make_ring(ranks, slots, chunk, messages)
    assert all(ring_is_right(share, kernel, ranks, slots, messages, seed) for seed in SEEDS)


@pytest.mark.parametrize("fault", ["no syncwarp", "early head"])
def test_a_wrong_ring_shows_under_some_seed(share, fault):
    kernel = make_ring(2, 4, 3, 11, fault)
    assert not all(ring_is_right(share, kernel, 2, 4, 11, seed) for seed in SEEDS)


@pytest.mark.parametrize("slots, fault", [(2, ""), (4, "no head")])
def test_a_ring_that_locks_up_is_reported_with_its_ranks(share, slots, fault):
    kernel = make_ring(2, slots, 3, 11, fault)
    with pytest.raises(simulator.Deadlock) as error:
        ring_is_right(share, kernel, 2, slots, 11, 0)
    for rank in (0, 1):
        for warp in range(4):
            assert f"rank {rank} block (0, 0, 0) warp {warp} lanes" in str(error.value)
    assert "ld.acquire.sys, at ring, test_ranks.py:" in str(error.value)


# --- barriers -------------------------------------------------------------------------------------------------------

TAG = 1024


def make_barrier(ranks):
    """DeepEP's: each rank adds to its own signal for each peer, and takes away from its peers'. It resets itself."""

    @cuda.jit(device=True)
    def barrier(peers, mine, me):
        t = cuda.threadIdx.x
        fence_acq_rel_sys()
        cuda.syncthreads()
        if t < ranks:
            red_add_relaxed_sys_s32(mine, t, TAG)
            red_add_relaxed_sys_s32(pointer_from_address(peers[t], mine), me, -TAG)
            while ld_volatile_s32(mine, t) > 0:
                pass
            fence_acq_rel_sys()
        cuda.syncthreads()

    return barrier


def make_rounds(ranks, rounds, skips=-1):
    """In each round each rank writes to all, and reads after a barrier what all wrote to it."""
    barrier = make_barrier(ranks)

    @cuda.jit
    def kernel(peers, mine, out, me):
        t = cuda.threadIdx.x
        for i in range(rounds):
            if t < ranks:
                pointer_from_address(peers[t], mine)[16 + me] = 100 * i + me
            if skips != me or i < rounds - 1:
                barrier(peers, mine, me)
            if t < ranks:
                out[i * ranks + t] = mine[16 + t]
            if i < rounds - 1:
                barrier(peers, mine, me)

    return kernel


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_barrier_of_all_ranks_can_be_used_again(share, ranks):
    kernel, rounds = make_rounds(ranks, 3), 3
    for seed in SEEDS:
        buffers, addresses = share(ranks, 32)
        outs = [torch.zeros(rounds * ranks, dtype=torch.int32) for _ in range(ranks)]
        run([(kernel, addresses, buffers[r], outs[r], r) for r in range(ranks)], seed, threads=32)
        for out in outs:
            assert out.view(rounds, ranks).tolist() == [[100 * i + s for s in range(ranks)] for i in range(rounds)]
        assert all((b[:16] == 0).all() for b in buffers)


def test_a_rank_that_does_not_come_to_the_barrier_leaves_the_others_waiting(share):
    kernel = make_rounds(3, 2, skips=1)
    buffers, addresses = share(3, 32)
    out = torch.zeros(6, dtype=torch.int32)
    with pytest.raises(simulator.Deadlock) as error:
        run([(kernel, addresses, buffers[r], out, r) for r in range(3)], threads=32)
    for rank in (0, 2):
        assert f"rank {rank} block (0, 0, 0) warp 0 lanes 1: ld.volatile, at barrier" in str(error.value)
    assert "rank 1" not in str(error.value)


def test_a_rank_that_is_never_launched_leaves_the_others_waiting(share):
    kernel = make_rounds(3, 1)
    buffers, addresses = share(3, 32)
    with pytest.raises(simulator.Deadlock) as error, simulator.together():
        for rank in (0, 2):
            with simulator.on_rank(rank):
                launch(kernel, 1, 32, addresses, buffers[rank], torch.zeros(3, dtype=torch.int32), rank)
    for rank in (0, 2):
        assert f"rank {rank} block (0, 0, 0) warp 0 lanes 1: ld.volatile, at barrier" in str(error.value)


# --- launches -------------------------------------------------------------------------------------------------------


@cuda.jit
def raise_flag(x, i):
    x[i] = x[i] + 1


@cuda.jit
def wait_for(x, i, value):
    while ld_acquire_sys_s32(x, i) != value:
        pass


def test_launches_of_one_rank_follow_one_another_and_others_do_not_wait():
    x = torch.zeros(4, dtype=torch.int32)
    with simulator.together():
        with simulator.on_rank(5):
            launch(wait_for, 1, 1, x, 0, 1)
            launch(raise_flag, 1, 1, x, 1)
        launch(raise_flag, 1, 1, x, 0)
        launch(wait_for, 1, 1, x, 1, 1)
        assert x.tolist() == [0, 0, 0, 0]
    assert x.tolist() == [1, 1, 0, 0]


def test_who_waits_for_a_later_launch_of_his_own_rank_waits_for_ever():
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(simulator.Deadlock) as error:
        with simulator.together():
            for rank in (0, 1):
                with simulator.on_rank(rank):
                    launch(wait_for, 1, 1, x, rank, 1)
                    launch(raise_flag, 1, 1, x, rank)
    assert "rank 1 block (0, 0, 0) warp 0 lanes 0: ld.acquire.sys, at wait_for, test_ranks.py" in str(error.value)
    assert "rank 0 grid of kernel raise_flag waits for the end of kernel wait_for" in str(error.value)


def test_numba_launches_are_collected_and_their_copies_come_back_at_the_end():
    @cuda.jit
    def kernel(out, value):
        out[0] = value

    a, b = np.zeros(1, np.int32), np.zeros(1, np.int32)
    with simulator.together():
        kernel[1, 1](cuda.Out(a), 1)
        kernel[1, 1](b, 2)
        assert a[0] == b[0] == 0
    assert a[0] == 1 and b[0] == 2


def test_errors_name_the_rank_where_there_are_several():
    @cuda.jit
    def kernel(x, i):
        x[i] = 1

    good, bad = np.zeros(4, np.int32), np.zeros(4, np.int32)
    with pytest.raises(simulator.OutOfBounds, match=r"^rank 1 block \(0, 0, 0\) warp 0 lane 0: index 4 is outside x"):
        with simulator.together():
            kernel[1, 1](good, 0)
            kernel[1, 1](bad, 4)
    with pytest.raises(simulator.OutOfBounds, match=r"^block \(0, 0, 0\) warp 0 lane 0"):
        with simulator.together():
            kernel[1, 1](bad, 4)
    with pytest.raises(simulator.SimulatorError, match="within itself"):
        with simulator.together(), simulator.together():
            pass


def test_a_trace_names_the_rank():
    @cuda.jit
    def kernel():
        cuda.syncthreads()

    with simulator.trace() as events:
        kernel[1, 1]()
        with simulator.together():
            kernel[1, 1]()
            kernel[1, 1]()
    assert events[0].rank is None and {e.rank for e in events[1:]} == {0, 1}


# --- addresses ------------------------------------------------------------------------------------------------------


@cuda.jit
def store_at(addresses, like, i, value):
    pointer_from_address(addresses[i], like)[i] = value


def test_a_store_by_address_lands_in_the_peers_buffer(share):
    buffers, addresses = share(2, 8)
    addresses = torch.tensor([int(addresses[0]), int(addresses[1]) + 8], dtype=torch.uint64)
    for i in (0, 1):
        launch(store_at, 1, 1, addresses, buffers[0], i, 7 + i)
    assert buffers[0].tolist() == [7, 0, 0, 0, 0, 0, 0, 0] and buffers[1].tolist() == [0, 0, 0, 8, 0, 0, 0, 0]


def test_an_address_that_is_wrong_is_refused(share):
    buffers, addresses = share(1, 8)
    address, like = int(addresses[0]), buffers[0]

    def refused(error, address, match, i=0):
        wrong = torch.full((100,), address, dtype=torch.uint64)
        with pytest.raises(error, match=match):
            launch(store_at, 1, 1, wrong, like, i, 1)

    refused(simulator.OutOfBounds, address, r"index 8 is outside the buffer of rank 0 \(8 x int32\)", 8)
    refused(simulator.OutOfBounds, address + 8, r"index 6 is outside the buffer of rank 0 \+ 8 bytes \(6 x int32\)", 6)
    refused(simulator.OutOfBounds, address + 36, f"address {address + 36:#x} .* rank 0, which ends 4 bytes before")
    refused(simulator.OutOfBounds, 64, "address 0x40 lies in no registered buffer")
    refused(simulator.Misaligned, address + 2, f"address {address + 2:#x} in the buffer of rank 0 is not aligned")


def test_a_buffer_is_registered_once_and_forgotten():
    x = torch.zeros(8, dtype=torch.int32)
    address = simulator.register(x, "x")
    assert address == x.data_ptr()
    with pytest.raises(ValueError, match="y is registered already, as x"):
        simulator.register(x, "y")
    simulator.forget(address)
    with pytest.raises(simulator.OutOfBounds, match=f"address {address:#x}"):
        launch(store_at, 1, 1, torch.tensor([address], dtype=torch.uint64), x, 0, 1)
    with pytest.raises(ValueError, match="y is empty"):
        simulator.register(torch.zeros(0), "y")
