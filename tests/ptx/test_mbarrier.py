"""Faulty uses of mbarriers, bulk copies and named barriers, which the simulator must reject."""

import numpy as np
import pytest
import torch
from helpers.hopper import check_refused
from helpers.hopper import outcomes as outcomes_of_seeds

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, uint32, uint64

from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.cp_async import bulk_commit_group, bulk_load, bulk_store, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_cluster,
    mbarrier_arrive_expect_tx,
    mbarrier_expect_tx,
    mbarrier_init,
    mbarrier_inval,
    mbarrier_try_wait_parity,
    mbarrier_wait_parity,
)
from moe_numba.ptx.warpgroup import bar_arrive, bar_sync, make_setmaxnreg_dec, make_setmaxnreg_inc

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="undefined on a GPU: set MOE_NUMBA_SIMULATE=1")

THIS_FILE = "test_mbarrier.py"


def outcomes(kernel, **options):
    """Yield for each seed the 256 floats that a kernel(out, x) wrote, or the error."""
    make = lambda: [torch.full((256,), -1.0), torch.arange(256.0)]
    for found in outcomes_of_seeds(kernel, make, **options):
        yield found if isinstance(found, Exception) else found[0]


def assert_refused(error, kernel, *patterns, every=True, **options):
    """Assert that every seed (or some) raises this error with these patterns; return the outputs of the others."""
    return check_refused(error, outcomes(kernel, **options), *patterns, every=every)


def line(kernel, offset):
    """Format a line of a function, counted from its first one (a kernel's decorator), as in error messages."""
    function = getattr(kernel, "py_func", kernel)
    return f"{function.__name__}, {THIS_FILE}:{function.__code__.co_firstlineno + offset}"


@cuda.jit(device=True)
def make_barriers(barriers, count):
    if cuda.threadIdx.x == 0:
        for i in range(len(barriers)):
            mbarrier_init(barriers, i, count)
        fence_mbarrier_init()
    cuda.syncthreads()


def by_one_thread(body):
    """Make a kernel in which thread 0 calls `body(buffer, x, barriers)` with an mbarrier of one arrival."""
    body = cuda.jit(device=True)(body)

    @cuda.jit
    def kernel(out, x):
        buffer, barriers = cuda.shared.array(64, float32, 128), cuda.shared.array(1, uint64)
        make_barriers(barriers, 1)
        if cuda.threadIdx.x == 0:
            body(buffer, x, barriers)

    return kernel


# --- barriers -------------------------------------------------------------------------------------------------------


def test_an_mbarrier_must_be_initialised_before_use():
    @cuda.jit
    def never(out, x):
        barriers = cuda.shared.array(2, uint64)
        mbarrier_arrive(barriers, 1)

    @cuda.jit
    def unfenced(out, x):
        barriers = cuda.shared.array(2, uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(barriers, 1, 64)
        cuda.syncthreads()
        mbarrier_arrive(barriers, 1)

    @cuda.jit
    def unsynchronised(out, x):
        barriers = cuda.shared.array(2, uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(barriers, 1, 64)
            fence_mbarrier_init()
        mbarrier_arrive(barriers, 1)
        out[cuda.threadIdx.x] = -1

    assert_refused(
        simulator.BarrierMisuse,
        never,
        "bytes 8 to 15 of the shared array",
        line(never, 3),
        "no thread has initialised one there",
    )
    assert_refused(
        simulator.BarrierMisuse, unfenced, "mbarrier 1 of", line(unfenced, 6), "has not called fence_mbarrier_init"
    )
    for out in assert_refused(
        simulator.BarrierMisuse, unsynchronised, "no thread has initialised one", every=False, seeds=20
    ):
        assert (out == -1).all()


def test_an_mbarrier_is_initialised_once_and_is_opaque():
    @cuda.jit
    def twice(out, x):
        barriers = cuda.shared.array(2, uint64)
        mbarrier_init(barriers, 0, 1)

    @cuda.jit
    def overwritten(out, x):
        barriers = cuda.shared.array(2, uint64)
        make_barriers(barriers, 1)
        barriers[1] = uint64(0)

    @cuda.jit
    def inspected(out, x):
        barriers = cuda.shared.array(2, uint64)
        make_barriers(barriers, 1)
        out[0] = float32(barriers[0])

    @cuda.jit
    def without_arrivals(out, x):
        mbarrier_init(cuda.shared.array(2, uint64), 0, 0)

    @cuda.jit
    def invalidated_too_early(out, x):
        barriers = cuda.shared.array(1, uint64)
        buffer = cuda.shared.array(64, float32, 128)
        if cuda.threadIdx.x == 0:
            mbarrier_init(barriers, 0, 1)
            fence_mbarrier_init()
            bulk_load(buffer, 0, x, 0, 64, barriers, 0)
            mbarrier_inval(barriers, 0)

    assert_refused(simulator.BarrierMisuse, twice, "calls mbarrier_init", line(twice, 3), "which block (0, 0, 0) warp")
    assert_refused(
        simulator.AsyncRace, overwritten, "writes index 1 of the shared array", "mbarrier 1 of", "lies, which"
    )
    assert_refused(
        simulator.AsyncRace, inspected, "reads index 0 of the shared array", line(inspected, 4), "mbarrier_inval"
    )
    assert_refused(simulator.BarrierMisuse, without_arrivals, "with 0 arrivals")
    assert_refused(
        simulator.BarrierMisuse, invalidated_too_early, "invalidates mbarrier 0", "waits for 1 of 1 arrivals"
    )


def test_a_missing_arrival_is_a_deadlock_that_names_the_barrier():
    @cuda.jit
    def waits(out, x):
        barriers = cuda.shared.array(3, uint64)
        make_barriers(barriers, 64)
        if cuda.threadIdx.x != 37:
            mbarrier_arrive(barriers, 2)
        mbarrier_wait_parity(barriers, 2, 0)

    @cuda.jit
    def polls(out, x):
        barriers = cuda.shared.array(3, uint64)
        make_barriers(barriers, 65)
        mbarrier_arrive(barriers, 2)
        while mbarrier_try_wait_parity(barriers, 2, 0) == uint32(0):
            pass

    words = "mbarrier.try_wait for phase bit 0 of mbarrier 2 of the shared array of test_mbarrier.py:"
    state = "its phase 0 (phase bit 0) waits for 1 of 6"  # of 64 or 65
    assert_refused(simulator.Deadlock, waits, words, state, "block (0, 0, 0) warp 1 lanes 0-31", line(waits, 6))
    assert_refused(simulator.Deadlock, polls, words, state, line(polls, 5), seeds=2)


def test_an_extra_arrival_is_refused():
    @cuda.jit
    def kernel(out, x):
        barriers = cuda.shared.array(1, uint64)
        make_barriers(barriers, 2)
        if cuda.threadIdx.x == 0:
            mbarrier_arrive_expect_tx(barriers, 0, 16)
        cuda.syncthreads()
        if 1 <= cuda.threadIdx.x <= 2:
            mbarrier_arrive(barriers, 0)

    assert_refused(simulator.BarrierMisuse, kernel, "mbarrier 0 of", "its phase 0 already has all 2 arrivals")


def test_a_phase_bit_is_0_or_1():
    @cuda.jit
    def kernel(out, x):
        barriers = cuda.shared.array(1, uint64)
        make_barriers(barriers, 64)
        mbarrier_wait_parity(barriers, 0, 2)

    assert_refused(
        simulator.BarrierMisuse, kernel, "waits at mbarrier 0 of", "for phase bit 2, which is neither 0 nor 1"
    )


def test_a_wait_two_phases_late_is_a_deadlock():
    @cuda.jit
    def kernel(out, x):
        barriers = cuda.shared.array(1, uint64)
        make_barriers(barriers, 1)
        if cuda.threadIdx.x == 0:
            mbarrier_arrive(barriers, 0)
            mbarrier_arrive(barriers, 0)
        cuda.syncthreads()
        mbarrier_wait_parity(barriers, 0, 0)  # phases 0 and 1 have completed: phase bit 0 means phase 2

    assert_refused(
        simulator.Deadlock, kernel, "for phase bit 0 of", "its phase 2 (phase bit 0) waits for 1 of 1 arrivals"
    )


# --- bulk copies into shared memory ---------------------------------------------------------------------------------


def make_pipeline(stages=2, iterations=6, expected=64, flip=1, wait_full=1, wait_empty=1, release_early=0):
    """Make a pipeline of stages of 16 floats with a producer and a consumer warp, and optional mistakes."""
    size = stages * 16

    @cuda.jit
    def kernel(out, x):
        buffer = cuda.shared.array(size, float32, 128)
        full, empty = cuda.shared.array(stages, uint64), cuda.shared.array(stages, uint64)
        make_barriers(full, 1)
        make_barriers(empty, 32)
        t = cuda.threadIdx.x
        if t == 0:
            for iteration in range(iterations):
                if wait_empty:
                    mbarrier_wait_parity(empty, iteration % stages, 1 ^ (iteration // stages & 1))
                bulk_load(buffer, iteration % stages * 16, x, iteration * 16, 64, full, iteration % stages)
                mbarrier_arrive_expect_tx(full, iteration % stages, expected)
        elif t >= 32:
            for iteration in range(iterations):
                if wait_full:
                    mbarrier_wait_parity(full, iteration % stages, flip & (iteration // stages & 1))
                if release_early:
                    mbarrier_arrive(empty, iteration % stages)
                    cuda.syncwarp()
                if t < 48:
                    out[iteration * 16 + t - 32] = buffer[iteration % stages * 16 + t - 32]
                if not release_early:
                    mbarrier_arrive(empty, iteration % stages)

    return kernel


def test_a_correct_pipeline_is_accepted():
    for out in outcomes(make_pipeline(), seeds=16):
        assert torch.equal(out[:96], torch.arange(96.0)) and (out[96:] == -1).all()


@pytest.mark.parametrize(
    "mistake, kinds",
    [
        (dict(wait_full=0), ("AsyncRace", "Deadlock")),
        (dict(wait_empty=0), ("AsyncRace", "BarrierMisuse")),
        (dict(release_early=1), ("AsyncRace",)),
        (dict(flip=0), ("AsyncRace", "Deadlock")),
        (dict(expected=48), ("BarrierMisuse",)),
        (dict(expected=80), ("Deadlock",)),
    ],
    ids=str,
)
def test_a_faulty_pipeline_is_rejected(mistake, kinds):
    """Some of the seeds report the mistake."""
    found = [o for o in outcomes(make_pipeline(**mistake), seeds=24) if isinstance(o, Exception)]
    assert {type(e).__name__ for e in found} <= set(kinds) and len(found) >= 6, found
    if "expected" in mistake:
        assert len(found) == 24


def test_a_tile_read_before_its_barrier_names_the_copy():
    error = next(e for e in outcomes(make_pipeline(wait_full=0), seeds=24) if isinstance(e, simulator.AsyncRace))
    for words in (
        "block (0, 0, 0) warp 1 lane ",
        "reads index ",
        "of the shared array of test_mbarrier.py:",
        "at kernel, test_mbarrier.py:",
        "cp.async.bulk to shared memory, which block (0, 0, 0) warp 0 lane 0 issued at kernel, test_mbarrier.py:",
        "may be in flight: wait for its mbarrier first",
    ):
        assert words in str(error)


def test_expected_and_copied_bytes_must_match():
    assert_refused(
        simulator.BarrierMisuse,
        make_pipeline(expected=48),
        "bytes more have been copied than|its 64 bytes were not expected",
    )
    assert_refused(
        simulator.Deadlock,
        make_pipeline(expected=80),
        "mbarrier.try_wait for phase bit 0 of mbarrier 0 of",
        "its phase 0 (phase bit 0) waits for 0 of 1 arrivals and 16 bytes",
    )


def test_a_phase_must_not_complete_before_its_copies():
    @cuda.jit
    def kernel(out, x):
        buffer, barriers = cuda.shared.array(64, float32, 128), cuda.shared.array(1, uint64)
        make_barriers(barriers, 1)
        if cuda.threadIdx.x == 0:
            bulk_load(buffer, 0, x, 0, 64, barriers, 0)
            bulk_load(buffer, 16, x, 0, 64, barriers, 0)
            mbarrier_arrive_expect_tx(barriers, 0, 64)
        mbarrier_wait_parity(barriers, 0, 0)

    words = "phase 0 of mbarrier 0 of|64 bytes more have been copied"
    assert_refused(simulator.BarrierMisuse, kernel, words, "were not expected|was told to expect")


def test_a_copy_whose_bytes_no_phase_expects_is_explained():
    """The message names `expect_tx`, whether the copy or the arrival comes first."""

    def make(copy_first):
        @cuda.jit
        def kernel(out, x):
            buffer, barriers = cuda.shared.array(64, float32, 128), cuda.shared.array(1, uint64)
            make_barriers(barriers, 1)
            if cuda.threadIdx.x == 0:
                if copy_first:
                    bulk_load(buffer, 0, x, 0, 256, barriers, 0)
                mbarrier_arrive(barriers, 0)
                if not copy_first:
                    bulk_load(buffer, 0, x, 0, 256, barriers, 0)
            mbarrier_wait_parity(barriers, 0, 0)
            if cuda.threadIdx.x < 64:
                out[cuda.threadIdx.x] = buffer[cuda.threadIdx.x]

        return kernel

    words = "must expect the bytes of all its copies, by mbarrier_arrive_expect_tx or mbarrier_expect_tx"
    assert_refused(simulator.BarrierMisuse, make(True), words)
    words = "phase 0 of its mbarrier completed with 0 expected bytes, so waiting for it does not wait", words
    assert_refused(simulator.AsyncRace, make(False), *words, every=False, seeds=8)


def test_a_block_does_not_end_before_its_loads():
    def load(buffer, x, barriers):
        mbarrier_arrive_expect_tx(barriers, 0, 64)
        bulk_load(buffer, 0, x, 0, 64, barriers, 0)

    words = "block (0, 0, 0) ends, while in", "may be in flight"
    assert_refused(simulator.AsyncRace, by_one_thread(load), *words, every=False, seeds=20)


def test_conflicting_copies_and_stores_are_refused():
    def two_loads(buffer, x, barriers):
        mbarrier_expect_tx(barriers, 0, 128)
        bulk_load(buffer, 0, x, 0, 64, barriers, 0)
        bulk_load(buffer, 12, x, 0, 64, barriers, 0)

    def over_a_store(buffer, x, barriers):
        buffer[5] = float32(1)
        bulk_load(buffer, 0, x, 0, 64, barriers, 0)

    def under_a_store(buffer, x, barriers):
        bulk_load(buffer, 0, x, 0, 64, barriers, 0)
        buffer[5] = float32(1)

    assert_refused(
        simulator.AsyncRace,
        by_one_thread(two_loads),
        line(two_loads, 3),
        "writes bytes from 48 on of",
        "may be in flight",
    )
    assert_refused(
        simulator.MissingFence,
        by_one_thread(over_a_store),
        "writes byte 20 of",
        "has not called fence_proxy_async_shared since",
    )
    assert_refused(
        simulator.AsyncRace,
        by_one_thread(under_a_store),
        "writes index 5 of",
        "which block (0, 0, 0) warp 0 lane 0 issued",
    )


@pytest.mark.parametrize(
    "error, words, copy",
    [
        ("Misaligned", "a multiple of 16 bytes, not 24", lambda b, x, m: bulk_load(b, 0, x, 0, 24, m, 0)),
        ("Misaligned", "index 2 of the shared array", lambda b, x, m: bulk_load(b, 2, x, 0, 32, m, 0)),
        ("Misaligned", "index 3 of x (256 x float32) is not", lambda b, x, m: bulk_load(b, 0, x, 3, 32, m, 0)),
        ("OutOfBounds", "64 bytes at index 56 of the shared", lambda b, x, m: bulk_load(b, 56, x, 0, 64, m, 0)),
        ("OutOfBounds", "64 bytes at index 252 of x", lambda b, x, m: bulk_load(b, 0, x, 252, 64, m, 0)),
        ("OutOfBounds", "8 bytes at index 1 of", lambda b, x, m: bulk_load(b, 0, x, 0, 64, m, 1)),
        (
            "SimulatorError",
            "shared memory, which x (256 x float32) is",
            lambda b, x, m: bulk_load(x, 0, x, 0, 64, m, 0),
        ),
        ("BarrierMisuse", "as an mbarrier, but no thread", lambda b, x, m: bulk_load(b, 0, x, 0, 64, b, 32)),
        ("BarrierMisuse", "not between 0 and 1048575", lambda b, x, m: mbarrier_expect_tx(m, 0, 1 << 20)),
    ],
)
def test_a_wrong_operand_is_refused(error, words, copy):
    assert_refused(getattr(simulator, error), by_one_thread(copy), words, "block (0, 0, 0) warp 0 lane 0", seeds=2)


def test_copies_need_aligned_memory():
    @cuda.jit
    def kernel(out, x):
        buffer, barriers = cuda.shared.array(64, float32), cuda.shared.array(1, uint64)
        make_barriers(barriers, 1)
        if cuda.threadIdx.x == 0:
            bulk_load(buffer, 0, x, 0, 64, barriers, 0)

    assert_refused(simulator.Misaligned, kernel, "is aligned to 4: declare it with cuda.shared.array(..., 16)", seeds=2)


# --- bulk copies out of shared memory -------------------------------------------------------------------------------

wait_read = make_bulk_wait_group_read(0)


def make_store(fence=1, sync=1, wait=1, commit=1, fence_all=1):
    """Make a kernel whose threads fill a buffer, of which one thread issues a copy, and fill it again."""

    @cuda.jit
    def kernel(out, x):
        buffer = cuda.shared.array(64, float32, 128)
        t = cuda.threadIdx.x
        for iteration in range(2):
            buffer[t] = x[iteration * 64 + t]
            if fence and (fence_all or t == 0):
                fence_proxy_async_shared()
            if sync:
                cuda.syncthreads()
            if t == 0:
                bulk_store(out, iteration * 64, buffer, 0, 256)
                if commit:
                    bulk_commit_group()
                if wait:
                    wait_read()
            cuda.syncthreads()
        if t == 0:
            wait_read()

    return kernel


def test_a_correct_store_is_accepted():
    for out in outcomes(make_store()):
        assert torch.equal(out[:128], torch.arange(128.0)) and (out[128:] == -1).all()


@pytest.mark.parametrize(
    "mistake, kinds, words",
    [
        (dict(fence=0), ("MissingFence",), "has not called fence_proxy_async_shared since"),
        (dict(fence_all=0), ("MissingFence",), "reads byte 4 of the shared array"),
        (dict(wait=0), ("AsyncRace",), "wait for its group with make_bulk_wait_group_read"),
        (dict(commit=0), ("AsyncRace",), "wait for its group with make_bulk_wait_group_read"),
        (dict(sync=0), ("AsyncRace", "MissingFence"), "cp.async.bulk to global memory"),
    ],
    ids=str,
)
def test_a_faulty_store_is_rejected(mistake, kinds, words):
    found = [o for o in outcomes(make_store(**mistake), seeds=24) if isinstance(o, Exception)]
    assert {type(e).__name__ for e in found} <= set(kinds) and len(found) >= 6, found
    assert all(words in str(e) for e in found)
    if "fence" in mistake:
        assert len(found) == 24


def test_a_store_reads_its_source_asynchronously():
    """Without a wait and without overwriting the source, only the end of the block is too early."""

    @cuda.jit
    def kernel(out, x):
        buffer = cuda.shared.array(64, float32, 128)
        t = cuda.threadIdx.x
        buffer[t] = x[t]
        fence_proxy_async_shared()
        cuda.syncthreads()
        if t == 0:
            bulk_store(out, 0, buffer, 0, 256)
            bulk_commit_group()

    for out in assert_refused(simulator.AsyncRace, kernel, "block (0, 0, 0) ends, while in", every=False, seeds=20):
        assert torch.equal(out[:64], torch.arange(64.0))


# --- clusters -------------------------------------------------------------------------------------------------------


def test_a_remote_mbarrier_needs_a_cluster_barrier_first():
    @cuda.jit
    def kernel(out, x):
        barriers = cuda.shared.array(1, uint64)
        make_barriers(barriers, 64)
        mbarrier_arrive_cluster(barriers, 0, 1 - cluster_ctarank())
        mbarrier_wait_parity(barriers, 0, 0)
        barrier_cluster_arrive()
        barrier_cluster_wait()

    assert_refused(simulator.ClusterError, kernel, "may not have started", blocks=2, cluster=2)


def test_each_block_of_a_cluster_has_its_own_mbarrier():
    @cuda.jit
    def kernel(out, x):
        barriers = cuda.shared.array(1, uint64)
        make_barriers(barriers, 64)
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if cluster_ctarank() == 1:
            mbarrier_arrive_cluster(barriers, 0, 0)
        mbarrier_wait_parity(barriers, 0, 0)
        barrier_cluster_arrive()
        barrier_cluster_wait()

    words = "mbarrier 0 of the shared array of test_mbarrier.py:"
    assert_refused(
        simulator.Deadlock,
        kernel,
        words,
        "in block (1, 0, 0): its phase 0 (phase bit 0) waits for 64",
        blocks=2,
        cluster=2,
    )


# --- named barriers -------------------------------------------------------------------------------------------------


def test_misused_named_barriers_are_refused():
    @cuda.jit
    def odd(out, x):
        bar_sync(1, 48)

    @cuda.jit
    def reserved(out, x):
        bar_sync(0, 64)

    @cuda.jit
    def beyond(out, x):
        bar_sync(1, 128)

    @cuda.jit
    def differ(out, x):
        bar_sync(3, 64 if cuda.threadIdx.x < 32 else 96)

    @cuda.jit
    def a_warp_exits(out, x):
        if cuda.threadIdx.x < 32:
            bar_sync(3, 64)

    @cuda.jit
    def a_warp_waits_elsewhere(out, x):
        if cuda.threadIdx.x < 64:
            bar_sync(3 + cuda.threadIdx.x // 32, 64)
        else:
            bar_arrive(5, 64)

    assert_refused(simulator.SimulatorError, odd, "a multiple of 32 threads", "not 48", seeds=2)
    assert_refused(simulator.SimulatorError, reserved, "a barrier from 1 to 15, not 0", seeds=2)
    assert_refused(simulator.SimulatorError, beyond, "not 128", seeds=2)
    assert_refused(simulator.DivergentBarrier, differ, "for 96 threads|for 64 threads", "barrier 3", threads=96)
    assert_refused(simulator.DivergentBarrier, a_warp_exits, "barrier 3", "exited")
    assert_refused(simulator.Deadlock, a_warp_waits_elsewhere, "barrier 3 (32 of 64", "barrier 4 (32 of 64", threads=96)


@pytest.mark.parametrize("registers", [0, 20, 100, 264])
def test_setmaxnreg_takes_multiples_of_eight(registers):
    for make in (make_setmaxnreg_dec, make_setmaxnreg_inc):
        with pytest.raises(ValueError, match=f"a multiple of 8 from 24 to 256, not {registers}"):
            make(registers)


def test_setmaxnreg_takes_whole_warpgroups():
    dec, inc = make_setmaxnreg_dec(24), make_setmaxnreg_inc(240)

    @cuda.jit
    def three_of_four(out, x):
        if cuda.threadIdx.x < 96:
            inc()

    @cuda.jit
    def short(out, x):
        dec()

    words = (
        "exited, while others wait for it at setmaxnreg.inc 240|reaches setmaxnreg.inc 240",
        "warps |threads of its",
    )
    assert_refused(simulator.DivergentBarrier, three_of_four, *words, threads=128)
    assert_refused(simulator.SimulatorError, short, "needs a warpgroup", threads=96)


def make_register_exchange(released, requested, first=0):
    """Make a kernel in which warpgroup ``first`` releases registers, and the other two request more."""
    dec, inc = make_setmaxnreg_dec(released), make_setmaxnreg_inc(requested)

    @cuda.jit
    def kernel(out, x):
        if cuda.threadIdx.x // 128 == first:
            dec()
        else:
            inc()
        out[cuda.threadIdx.x] = x[cuda.threadIdx.x]

    return kernel


@pytest.mark.parametrize("bounds", [None, 384, (384, 1)])
@pytest.mark.parametrize("released, requested", [(24, 240), (40, 232), (56, 224)])
def test_setmaxnreg_moves_registers_between_warpgroups(released, requested, bounds):
    for first in range(3):
        out = np.zeros(384)
        kernel = make_register_exchange(released, requested, first)
        simulator.run(kernel, 2, 384, [out, np.ones(384)], launch_bounds=bounds, seed=first)
        assert out.all()


@pytest.mark.parametrize(
    "released, requested, bounds, at_launch, wanted",
    [
        (24, 256, 384, 168, 68608),
        (40, 240, 384, 168, 66560),
        (24, 240, 512, 128, 64512),
        (24, 112, (384, 2), 80, 31744),
    ],
)
def test_setmaxnreg_needs_registers_that_the_block_has(released, requested, bounds, at_launch, wanted):
    words = (
        rf"warp \d+ lanes [-\d, ]+: setmaxnreg.inc {requested} \(the block's threads want {wanted} registers; "
        rf"it was launched with {at_launch} for each of 384 threads, {384 * at_launch}\), at kernel, {THIS_FILE}"
    )
    arguments = [np.zeros(384), np.ones(384)]
    with pytest.raises(simulator.Deadlock, match=words):
        simulator.run(make_register_exchange(released, requested), 1, 384, arguments, launch_bounds=bounds)


# --- trace ----------------------------------------------------------------------------------------------------------


def test_copies_and_barriers_are_in_the_trace():
    with simulator.trace() as events:
        list(outcomes(make_pipeline(), seeds=1))
    copies = [e.details["event"] for e in events if e.what == "async copy"]
    assert copies.count("starts") == copies.count("lands") == 6
    waits = [e for e in events if e.what == "mbarrier.wait"]
    assert len(waits) == 6 + 6 * 32 and {e.details["phase_bit"] for e in waits} == {0, 1}
    assert len([e for e in events if e.what == "mbarrier.arrive"]) == 6 + 6 * 32
    assert np.all(np.diff([e.step for e in events]) >= 0)
