"""Data races: each kernel that lacks an ordering is reported under every seed, and the same kernel with it is not."""

import re

import numpy as np
import pytest

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, int32, uint8, uint64

from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_acquire_sys_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_sys_s32,
    ld_volatile_s32,
    poll_acquire_cta_shared_s32,
    red_add_release_sys_s32,
    st_relaxed_sys_s32,
    st_release_cta_shared_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, st_cluster_s32
from moe_numba.ptx.cp_async import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    make_bulk_wait_group,
    make_bulk_wait_group_read,
)
from moe_numba.ptx.fence import fence_acq_rel_gpu, fence_acq_rel_sys, fence_proxy_async, fence_proxy_async_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_arrive, bar_sync
from moe_numba.simulator.core.errors import file_name
from moe_numba.simulator.core.scheduler import override_settings

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="the simulator's races")
wait_stores, wait_reads = make_bulk_wait_group(0), make_bulk_wait_group_read(0)
SEEDS = 5


def run(kernel, grid, block, *args, seed=0, **options):
    """Launch a kernel on pointers to copies of the arrays, with races detected; return the copies."""
    arrays = [np.array(a) if isinstance(a, np.ndarray) else a for a in args]
    pointers = [simulator.pointer(a, "data") if isinstance(a, np.ndarray) else a for a in arrays]
    with simulator.seed(seed), simulator.races():
        simulator.run(kernel, grid, block, pointers, **options)
    return arrays


def check(kernel, racy, grid, block, *args, error=simulator.DataRace, message=None, **options):
    """Assert that each seed reports the race, or that none does."""
    for seed in range(SEEDS):
        if not racy:
            run(kernel, grid, block, *args, seed=seed, **options)
            continue
        with pytest.raises(error, match=message):
            run(kernel, grid, block, *args, seed=seed, **options)


def ints(n):
    return np.zeros(n, np.int32)


# Threads of one block


@pytest.mark.parametrize("barrier", ["none", "poll", "vote", "syncwarp", "syncthreads", "bar.sync"])
def test_barriers_of_a_block(barrier):
    """Neither a poll nor a vote nor a barrier of one warp orders the accesses of two warps."""

    @cuda.jit
    def reverse(out):
        smem, t = cuda.shared.array(64, int32), cuda.threadIdx.x
        smem[t] = t
        if barrier == "poll":
            ld_volatile_s32(out, 64)
        elif barrier == "vote":
            cuda.any_sync(FULL_MASK, t > 3)
        elif barrier == "syncwarp":
            cuda.syncwarp()
        elif barrier == "syncthreads":
            cuda.syncthreads()
        elif barrier == "bar.sync":
            bar_sync(1, 64)
        out[t] = smem[63 - t]

    ordered = barrier in ("syncthreads", "bar.sync")
    check(reverse, not ordered, 1, 64, ints(65), message=r"between warps of a block it needs cuda\.syncthreads")


@pytest.mark.parametrize("barrier", ["none", "shuffle", "syncwarp"])
def test_lanes_of_a_warp(barrier):
    @cuda.jit
    def rotate(out):
        smem, t = cuda.shared.array(32, int32), cuda.threadIdx.x
        smem[t] = t
        if barrier == "shuffle":
            cuda.shfl_sync(FULL_MASK, t, 0)
        elif barrier == "syncwarp":
            cuda.syncwarp()
        out[t] = smem[(t + 1) % 32]

    check(rotate, barrier != "syncwarp", 1, 32, ints(32), message=r"lanes of a warp it needs cuda\.syncwarp")


def test_both_accesses_are_named():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if t == 40:
            out[5] = 7
        elif t == 3:
            out[6] = out[5]

    lines = kernel.py_func.__code__.co_firstlineno
    with pytest.raises(simulator.DataRace) as caught:
        run(kernel, 1, 64, ints(8))
    text = str(caught.value)
    assert f"test_races.py:{lines + 4}" in text and f"test_races.py:{lines + 6}" in text
    assert "warp 0 lane 3" in text and "warp 1 lane 8" in text and "index 5 of out (8 x int32)" in text


@pytest.mark.parametrize("consequence", ["out of bounds", "deadlock", "exception"])
def test_a_race_comes_before_its_consequences(consequence):
    """Thread 32 reads what thread 0 writes, before or after; if before, another error follows before the write."""

    @cuda.jit
    def kernel(y):
        index = cuda.shared.array(1, int32)
        i = cuda.threadIdx.x
        if i == 0:
            index[0] = 3
        if i == 32:
            found = index[0]
            if consequence == "out of bounds":
                y[found] = 1
            elif consequence == "exception":
                assert found == 3
            else:
                while found != 3:
                    cuda.atomic.add(y, 0, 0)

    for seed in range(8):
        with simulator.seed(seed), simulator.races(), pytest.raises(simulator.DataRace, match="index"):
            kernel[1, 64](np.zeros(4, np.int32))


def test_an_error_without_a_race_is_raised_with_races_on_too():
    @cuda.jit
    def kernel(y):
        i = cuda.threadIdx.x
        y[i] = 1
        cuda.syncthreads()  # the other threads wait for the one that fails

    with simulator.races(), pytest.raises(simulator.OutOfBounds, match="index 63 is outside"):
        kernel[1, 64](np.zeros(63, np.int32))


@pytest.mark.parametrize("reused", [False, True])
def test_a_write_after_reads_needs_a_barrier(reused):
    """The last reader of a slot must be ordered before the next writer: each of 32 readers, not only the last."""

    @cuda.jit
    def kernel(out):
        smem, t = cuda.shared.array(1, int32), cuda.threadIdx.x
        if t == 0:
            smem[0] = 1
        cuda.syncthreads()
        out[t] = smem[0]
        if not reused:
            cuda.syncthreads()
        elif t >= 32:
            bar_sync(1, 32)  # only the second warp
        if t == 63:
            smem[0] = 2

    check(kernel, reused, 1, 64, ints(64))


@pytest.mark.parametrize("kind", ["bytes", "same value", "other value", "one atomic", "atomics"])
def test_which_accesses_conflict(kind):
    """Neighbouring bytes do not conflict, nor do atomics, nor stores of the value that memory holds."""

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if kind == "bytes":
            out.view(uint8)[t] = t
        elif kind == "same value":
            out[0] = 5
        elif kind == "other value":
            out[0] = t
        elif kind == "one atomic" and t == 0:
            out[0] = 7
        else:
            cuda.atomic.add(out, 0, 1)

    check(kernel, kind in ("other value", "one atomic"), 1, 64, ints(64))


def store_five(tile, warp):
    tile[0] = 5


def store_six(tile, warp):
    tile[0] = 6


def store_a_rounded_number(tile, warp):
    tile[0] = 6.75


def one_loads_what_another_stores_again(tile, warp):
    if warp == 0:
        tile[0] = tile[0]
    elif warp == 1:
        tile[1] = tile[0]


def one_loads_what_others_store_again(tile, warp):
    if warp < 2:
        tile[0] = 5
    else:
        tile[1] = tile[0]


def one_stores_another_value_before(tile, warp):
    if warp == 0:
        tile[0] = 5
    tile[0] = 6


def one_stores_another_value_after(tile, warp):
    tile[0] = 6
    if warp == 0:
        tile[0] = 5


def one_adds_nothing(tile, warp):
    if warp == 0:
        cuda.atomic.add(tile, 0, 0)
    else:
        tile[0] = 5


def a_load_is_ordered_after_one_of_two_stores(tile, warp):
    if warp == 0:
        tile[0] = 6
    elif warp == 1:
        tile[0] = 6
        bar_arrive(1, 64)
    else:
        bar_sync(1, 64)
        tile[1] = tile[0]


def a_store_follows_two_of_one_value(tile, warp):
    tile[0] = 6
    if warp == 1:
        bar_arrive(1, 64)
    elif warp == 2:
        bar_sync(1, 64)
        tile[0] = 7


def the_block_waits_between(tile, warp):
    tile[0] = 6
    cuda.syncthreads()
    tile[0] = 7
    cuda.syncthreads()
    tile[1] = 7


NO_RACE = [store_five, store_six, store_a_rounded_number, the_block_waits_between]
RACE = [one_loads_what_another_stores_again, one_loads_what_others_store_again, one_stores_another_value_before]
RACE += [one_stores_another_value_after, one_adds_nothing, a_load_is_ordered_after_one_of_two_stores]
RACE += [a_store_follows_two_of_one_value]


@pytest.mark.parametrize("body", NO_RACE + RACE, ids=lambda body: body.__name__)
@pytest.mark.parametrize("engine", ["threads", "either"])
def test_stores_of_one_value_by_several_threads(body, engine):
    """They do not race with one another, but with loads and other stores, in any order of the threads."""
    step = cuda.jit(device=True)(body)

    @cuda.jit
    def kernel(out):
        tile, t = cuda.shared.array(2, int32), cuda.threadIdx.x
        if t == 0:
            tile[0] = 5
        cuda.syncthreads()
        step(tile, t // 32)

    with override_settings(engine=engine):
        check(kernel, body in RACE, 1, 96, ints(1))


def test_local_arrays_are_private():
    @cuda.jit
    def kernel(out):
        local = cuda.local.array(8, int32)
        for i in range(8):
            local[i] = i
        out[cuda.threadIdx.x] = local[7]

    check(kernel, False, 2, 32, ints(32) + 7)


@pytest.mark.parametrize("producer", ["arrives", "does not arrive"])
def test_a_barrier_orders_threads_that_only_arrive(producer):
    @cuda.jit
    def kernel(out):
        smem, t = cuda.shared.array(32, int32), cuda.threadIdx.x
        if t < 32:
            if producer == "arrives":
                smem[t] = t
            bar_arrive(1, 64)
            if producer != "arrives":
                smem[t] = t
        else:
            bar_sync(1, 64)
            out[t] = smem[t - 32]

    check(kernel, producer != "arrives", 1, 64, ints(64))


@pytest.mark.parametrize("release, waiting_lane_only", [(True, False), (False, False), (True, True)])
def test_flags_in_shared_memory(release, waiting_lane_only):
    """A plain store publishes nothing, and one lane's acquire does not serve the other lanes."""

    @cuda.jit
    def kernel(out):
        smem, flag, t = cuda.shared.array(1, int32), cuda.shared.array(1, int32), cuda.threadIdx.x
        if t == 0:
            flag[0] = 0
        cuda.syncthreads()
        if t == 0:
            smem[0] = 9
            if release:
                st_release_cta_shared_s32(flag, 0, 1)
            else:
                flag[0] = 1
        elif t >= 32:
            if t == 32 or not waiting_lane_only:
                while poll_acquire_cta_shared_s32(flag, 0) == 0:
                    pass
            cuda.any_sync(FULL_MASK, True)
            out[t] = smem[0]

    check(kernel, not release or waiting_lane_only, 1, 64, ints(64))


# Blocks and ranks

PUBLISH = {
    "release": (lambda p: st_release_sys_s32(p, 0, 1), True),
    "atomic with release": (lambda p: red_add_release_sys_s32(p, 0, 1), True),
    "fence": (lambda p: (fence_acq_rel_sys(), st_relaxed_sys_s32(p, 0, 1)), True),
    "relaxed": (lambda p: st_relaxed_sys_s32(p, 0, 1), False),
    "fence too late": (lambda p: (st_relaxed_sys_s32(p, 0, 1), fence_acq_rel_sys()), False),
    "fence of a block": (lambda p: (cuda.threadfence_block(), st_relaxed_sys_s32(p, 0, 1)), False),
}
OBSERVE = {
    "acquire": (lambda p: _until(p, ld_acquire_sys_s32), True),
    "fence": (lambda p: (_until(p, ld_relaxed_sys_s32), fence_acq_rel_sys()), True),
    "relaxed": (lambda p: _until(p, ld_relaxed_sys_s32), False),
    "volatile": (lambda p: _until(p, ld_volatile_s32), False),
    "fence of a block": (lambda p: (_until(p, ld_relaxed_sys_s32), cuda.threadfence_block()), False),
}


def _until(pointer, load):
    while load(pointer, 0) == 0:
        pass


@pytest.mark.parametrize("observe", OBSERVE)
@pytest.mark.parametrize("publish", PUBLISH)
def test_messages_between_blocks(publish, observe):
    """A message needs a release and an acquire, both in a scope that includes both blocks."""
    (give, releases), (take, acquires) = PUBLISH[publish], OBSERVE[observe]
    give, take = cuda.jit(device=True)(give), cuda.jit(device=True)(take)

    @cuda.jit
    def kernel(data):
        if cuda.blockIdx.x == 0:
            data[9] = 7
            give(data)
        else:
            take(data)
            data[10] = data[9]

    message = "between blocks it needs release and acquire at gpu scope"
    check(kernel, not (releases and acquires), 2, 1, ints(16), message=message)


@pytest.mark.parametrize("fence, racy", [(fence_acq_rel_gpu, True), (fence_acq_rel_sys, False)])
def test_messages_between_ranks_need_system_scope(fence, racy):
    @cuda.jit
    def send(data):
        data[9] = 7
        fence()
        st_relaxed_sys_s32(data, 0, 1)

    @cuda.jit
    def receive(data):
        while ld_relaxed_sys_s32(data, 0) == 0:
            pass
        fence_acq_rel_sys()
        data[10] = data[9]

    def exchange(seed):
        data = simulator.pointer(ints(16), "data")
        with simulator.seed(seed), simulator.races(), simulator.together():
            for rank, kernel in enumerate((send, receive)):
                with simulator.on_rank(rank):
                    simulator.run(kernel, 1, 1, (data,))

    for seed in range(SEEDS):
        if racy:
            with pytest.raises(simulator.DataRace, match="between ranks it needs release and acquire at sys scope"):
                exchange(seed)
        else:
            exchange(seed)


def test_kernels_of_one_rank_are_ordered():
    @cuda.jit
    def shift(data):
        t = cuda.grid(1)
        value = data[(t + 1) % 64] if data.size == 64 else 0
        cuda.cg.this_grid().sync()
        data[t] = value + 1

    data = simulator.pointer(ints(64), "data")
    with simulator.races(), simulator.together(), simulator.on_rank(0):
        for _ in range(3):
            simulator.run(shift, 2, 32, (data,), cooperative=True)
    assert (data.array == 3).all()


@pytest.mark.parametrize("engine", ["threads", "either"])
@pytest.mark.parametrize("order", ["wait, allow", "allow, wait", "allow", "neither"])
def test_dependent_launches_of_three_kernels(order, engine):
    """A kernel that allows the next one to start before it has waited lets it overlap the kernel before, too."""

    @cuda.jit
    def first(ids):
        ids[cuda.threadIdx.x] = 1

    @cuda.jit
    def second(ids, middle):
        if order == "allow, wait" or order == "allow":
            griddepcontrol_launch_dependents()
        if order == "allow, wait" or order == "wait, allow":
            griddepcontrol_wait()
        if order == "wait, allow":
            griddepcontrol_launch_dependents()
        middle[cuda.threadIdx.x] = 2

    @cuda.jit
    def third(ids, middle, out):
        t = cuda.threadIdx.x
        early = ids[t]
        griddepcontrol_wait()
        out[t] = early + middle[t]

    ids, middle, out = (simulator.pointer(ints(64), name) for name in ("ids", "middle", "out"))
    with simulator.races(), override_settings(engine=engine):
        simulator.run(first, 1, 64, (ids,))
        simulator.run(second, 2, 32, (ids, middle), dependent=True)
        if order == "wait, allow":
            simulator.run(third, 1, 64, (ids, middle, out), dependent=True)
        else:
            with pytest.raises(simulator.DataRace, match="may overlap kernel first, since kernel second let it start"):
                simulator.run(third, 1, 64, (ids, middle, out), dependent=True)
        simulator.run(second, 1, 64, (ids, middle))  # an ordinary launch overlaps none
        simulator.run(third, 1, 64, (ids, middle, out), dependent=True)


@pytest.mark.parametrize("conflict", ["reads", "overwrites", "none"])
@pytest.mark.parametrize("waits", [False, True])
def test_dependent_launches(waits, conflict):
    """A dependent launch may overlap the kernel before it, until it waits; an ordinary one does not."""

    @cuda.jit
    def first(data):
        data[cuda.threadIdx.x] = data[64 + cuda.threadIdx.x]

    @cuda.jit
    def second(data):
        if waits:
            griddepcontrol_wait()
        t = cuda.threadIdx.x
        if conflict == "overwrites":
            data[64 + t] = 5
        else:
            data[128 + t] = data[t + (0 if conflict == "reads" else 64)]

    def launch_both(dependent):
        data = simulator.pointer(ints(256), "data")
        simulator.run(first, 1, 64, (data,))
        simulator.run(second, 1, 64, (data,), dependent=dependent)
        simulator.run(second, 1, 64, (data,))

    with simulator.races():
        launch_both(dependent=False)
        if waits or conflict == "none":
            launch_both(dependent=True)
        else:
            with pytest.raises(simulator.DataRace, match="overlap the kernel before it, first: it needs griddep"):
                launch_both(dependent=True)


def test_a_failed_kernel_has_no_history():
    """A dependent launch after a kernel that failed starts without the accesses of kernels before."""

    @cuda.jit
    def read(data):
        data[64 + cuda.threadIdx.x] = data[0]

    @cuda.jit
    def fail(data):
        data[64 + cuda.threadIdx.x] = data[0]
        cuda.syncthreads()
        data[1000]

    data = simulator.pointer(ints(256), "data")
    with simulator.races():
        simulator.run(read, 1, 64, (data,))
        with pytest.raises(simulator.SimulatorError):
            simulator.run(fail, 1, 64, (data,), dependent=True)
        simulator.run(read, 1, 32, (data,), dependent=True)


@pytest.mark.parametrize("fences", [0, 1, 2])
def test_the_last_block_sees_the_others(fences):
    """The pattern of CUDA's threadFenceReduction sample, with a fence before and after the atomic."""

    @cuda.jit
    def kernel(data):
        last, t = cuda.shared.array(1, int32), cuda.threadIdx.x
        data[8 + cuda.blockIdx.x * 32 + t] = t
        cuda.syncthreads()
        if t == 0:
            if fences > 0:
                cuda.threadfence()
            last[0] = atom_add_relaxed_gpu_s32(data, 0, 1) == cuda.gridDim.x - 1
            if fences > 1:
                cuda.threadfence()
        cuda.syncthreads()
        if last[0]:
            for b in range(2):
                data[72 + t] += data[8 + b * 32 + t]

    check(kernel, fences < 2, 2, 32, ints(104))


@pytest.mark.parametrize("barrier", [False, True])
def test_clusters(barrier):
    @cuda.jit
    def kernel(out):
        smem, t = cuda.shared.array(32, int32), cuda.threadIdx.x
        barrier_cluster_arrive()
        barrier_cluster_wait()
        st_cluster_s32(smem, t, 1 - cuda.blockIdx.x, t)
        if barrier:
            barrier_cluster_arrive()
            barrier_cluster_wait()
        out[cuda.blockIdx.x * 32 + t] = smem[t]
        barrier_cluster_arrive()
        barrier_cluster_wait()

    check(kernel, not barrier, 2, 32, ints(64), cluster=2, message="it needs the cluster barrier")


def test_load_to_store_reordering_is_a_race():
    """A slot may be overwritten only after an acquire of the reader's message, though all of its loads come first."""

    @cuda.jit
    def kernel(data):
        if cuda.blockIdx.x == 0:
            data[10] = data[9]
            st_release_sys_s32(data, 0, 1)
        else:
            while ld_volatile_s32(data, 0) == 0:
                pass
            data[9] = 5

    check(kernel, True, 2, 1, ints(16))


@pytest.mark.parametrize("relay", ["acquire and release", "relaxed"])
def test_messages_are_relayed(relay):
    """What a thread has acquired it releases as well (cumulativity)."""

    @cuda.jit
    def kernel(data):
        if cuda.blockIdx.x == 0:
            data[9] = 7
            st_release_sys_s32(data, 0, 1)
        elif cuda.blockIdx.x == 1:
            if relay == "relaxed":
                while ld_relaxed_gpu_s32(data, 0) == 0:
                    pass
                st_relaxed_sys_s32(data, 1, 1)
            else:
                while ld_acquire_sys_s32(data, 0) == 0:
                    pass
                st_release_sys_s32(data, 1, 1)
        else:
            while ld_acquire_sys_s32(data, 1) == 0:
                pass
            data[10] = data[9]

    check(kernel, relay == "relaxed", 3, 1, ints(16))


# Asynchronous copies


@pytest.mark.parametrize("waits", ["all", "lane 0", "lane 0, then the warp"])
def test_threads_must_know_that_a_copy_has_landed(waits):
    @cuda.jit
    def kernel(out, data):
        smem, bars, t = cuda.shared.array(32, int32, 16), cuda.shared.array(1, uint64), cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bars, 0, 1)
            fence_mbarrier_init()
        cuda.syncwarp()
        if t == 0:
            mbarrier_arrive_expect_tx(bars, 0, 128)
            bulk_load(smem, 0, data, 0, 128, bars, 0)
        if t == 0 or waits == "all":
            mbarrier_wait_parity(bars, 0, 0)
        if waits.endswith("the warp"):
            cuda.syncwarp()
        else:
            cuda.any_sync(FULL_MASK, True)
        out[t] = smem[t]

    data = np.arange(64, dtype=np.int32)
    # Another lane may also read before the copy has landed: the reservation of its destination finds that first.
    check(kernel, waits == "lane 0", 1, 32, ints(32), data, error=(simulator.DataRace, simulator.AsyncRace))


@pytest.mark.parametrize("arrival", ["each lane", "lane 0 after syncwarp", "lane 0"])
def test_a_stage_is_released_for_all_lanes(arrival):
    """A lane that arrives at an `empty` barrier releases its own reads; those of other lanes need a syncwarp."""

    @cuda.jit
    def kernel(out, data):
        smem, bars, t = cuda.shared.array(32, int32, 16), cuda.shared.array(2, uint64), cuda.threadIdx.x
        if t == 0:
            mbarrier_init(bars, 0, 1)
            mbarrier_init(bars, 1, 32 if arrival == "each lane" else 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if t < 32:
            mbarrier_wait_parity(bars, 0, 0)
            out[t] = smem[t]
            if arrival == "lane 0 after syncwarp":
                cuda.syncwarp()
            if t == 0 or arrival == "each lane":
                mbarrier_arrive(bars, 1)
        elif t == 32:
            for i in range(2):
                if i == 1:
                    mbarrier_wait_parity(bars, 1, 0)
                mbarrier_arrive_expect_tx(bars, 0, 128)
                bulk_load(smem, 0, data, 0, 128, bars, 0)
            mbarrier_wait_parity(bars, 0, 1)

    data = np.arange(64, dtype=np.int32)
    check(kernel, arrival == "lane 0", 1, 64, ints(64), data)


@pytest.mark.parametrize("fault", ["", "no release", "no wait", "waits for the reads only", "no proxy fence"])
def test_messages_by_bulk_copies(fault):
    """A row goes to another block by TMA and on by TMA: the flag needs a wait and a release, the copy a proxy fence."""

    @cuda.jit
    def kernel(data):
        smem, bars, t = cuda.shared.array(32, int32, 16), cuda.shared.array(1, uint64), cuda.threadIdx.x
        if cuda.blockIdx.x == 0:
            smem[t] = t
            fence_proxy_async_shared()
            cuda.syncwarp()
            if t == 0:
                bulk_store(data, 32, smem, 0, 128)
                bulk_commit_group()
                if fault == "waits for the reads only":
                    wait_reads()
                elif fault != "no wait":
                    wait_stores()
                if fault == "no release":
                    st_relaxed_sys_s32(data, 0, 1)
                else:
                    st_release_sys_s32(data, 0, 1)
                wait_stores()
        elif t == 0:
            mbarrier_init(bars, 0, 1)
            fence_mbarrier_init()
            while ld_acquire_sys_s32(data, 0) == 0:
                pass
            if fault != "no proxy fence":
                fence_proxy_async()
            mbarrier_arrive_expect_tx(bars, 0, 128)
            bulk_load(smem, 0, data, 32, 128, bars, 0)
            mbarrier_wait_parity(bars, 0, 0)

    error = simulator.MissingFence if fault == "no proxy fence" else simulator.DataRace
    check(kernel, bool(fault), 2, 32, ints(64), error=error)


def test_races_are_switched():
    @cuda.jit
    def kernel(out):
        out[0] = cuda.threadIdx.x

    for enabled in (True, False):
        with simulator.races(enabled):
            if enabled:
                with pytest.raises(simulator.DataRace):
                    kernel[1, 64](ints(1))
            else:
                kernel[1, 64](ints(1))


def test_messages_are_one_sentence_per_access():
    @cuda.jit
    def kernel(out):
        out[0] = cuda.threadIdx.x

    with pytest.raises(simulator.DataRace) as caught:
        run(kernel, 1, 64, ints(1))
    pattern = (
        r"^block .* lane \d+, at kernel, test_races\.py:\d+, writes index 0 of out .*, which block .* lane \d+ at "
    )
    assert re.match(pattern + r"kernel, test_races\.py:\d+ wrote; nothing orders the two: .*$", str(caught.value))


def test_the_remedy_of_an_update_is_an_atomic_operation():
    @cuda.jit
    def count(total):
        total[0] = total[0] + int32(1)

    @cuda.jit
    def take_places(counters):
        e = cuda.threadIdx.x & 1
        place = counters[e]
        counters[e] = place + 1

    @cuda.jit
    def shift(tile):
        i = cuda.threadIdx.x
        value = tile[(i + 1) % 64]
        tile[i] = value

    def message(kernel):
        with simulator.races(), pytest.raises(simulator.DataRace) as caught:
            kernel[1, 64](np.zeros(64, np.int32))
        return str(caught.value)

    for kernel in (count, take_places):
        assert "if threads update one element here, it needs an atomic operation; otherwise, between" in message(kernel)
    assert "atomic" not in message(shift) and message(shift).endswith("between the two accesses")


def test_cells_of_notebooks_have_a_readable_name():
    namespace = {"cuda": cuda}
    source = "@cuda.jit\ndef kernel(x):\n    x[99] = 1\n"
    exec(compile(source, "/tmp/ipykernel_7/3051.py", "exec"), namespace)
    with pytest.raises(simulator.OutOfBounds) as caught:
        namespace["kernel"][1, 1](np.zeros(1, np.int32))
    assert file_name("/tmp/ipykernel_7/3051.py") == "cell" and file_name("/tmp/kernels.py") == "kernels.py"
    assert "3051" not in str(caught.value)
