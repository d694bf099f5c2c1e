"""Faulty uses of wgmma that the simulator must reject; on a GPU their results are undefined."""

import numpy as np
import pytest
import torch
from helpers.hopper import check_refused, simulated
from helpers.hopper import outcomes as outcomes_of_seeds
from helpers.hopper_compile import compile_whole

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, uint8, uint64

from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.wgmma import (
    make_wgmma_descriptor_mn,
    make_wgmma_tile,
    make_wgmma_tile_rs,
    make_wgmma_wait,
    make_wgmma_wait_registers,
    wgmma_descriptor,
    wgmma_descriptor_64b,
)
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import tensor_map

N = 16
A_BYTES, B_BYTES = 64 * 128, N * 128
AB_BYTES = A_BYTES + B_BYTES
tile, tile_on = make_wgmma_tile(N, "e4m3"), make_wgmma_tile(N, "e4m3", accumulate=True)
wait, wait_1 = make_wgmma_wait(N, 0), make_wgmma_wait(N, 1)
tile_rs, wait_registers = make_wgmma_tile_rs(N, "e4m3"), make_wgmma_wait_registers(16, 0)
fma = make_fma(N)
ZEROS = (np.float32(0),) * (N // 2)
ONES = (np.uint32(0x38383838),) * 16  # 1 in e4m3


@pytest.mark.parametrize("n, dtype", [(12, "e4m3"), (0, "bf16"), (264, "e4m3"), (64, "e5m2")])
def test_unsupported_shapes_are_refused(n, dtype):
    with pytest.raises(ValueError, match=f"not {dtype}, n {n}"):
        make_wgmma_tile(n, dtype)
    with pytest.raises(ValueError, match=f"not {dtype}, n {n}"):
        make_wgmma_tile_rs(n, dtype)


@pytest.mark.parametrize(
    "n, dtype, a_major, b_major, words",
    [
        (64, "e4m3", "mn", "k", "a_major is 'mn'; it must be 'k', or with bf16 'mn'"),
        (64, "e4m3", "k", "mn", "b_major is 'mn'; it must be 'k', or with bf16 'mn'"),
        (64, "bf16", "k", "m", "b_major is 'm'"),
        (96, "bf16", "mn", "mn", "n is 96; for an MN-major B it must be a multiple of 64"),
    ],
)
def test_unsupported_majors_are_refused(n, dtype, a_major, b_major, words):
    with pytest.raises(ValueError, match=words):
        make_wgmma_tile(n, dtype, a_major=a_major, b_major=b_major)
    if b_major != "k":
        with pytest.raises(ValueError, match=words):
            make_wgmma_tile_rs(n, dtype, b_major=b_major)


@pytest.mark.parametrize("leading", [0, 512, 1 << 18])
def test_a_distance_that_a_descriptor_cannot_hold_is_refused(leading):
    with pytest.raises(ValueError, match=f"leading_bytes is {leading}; it must be a multiple of 1024 below 2"):
        make_wgmma_descriptor_mn(leading)


def arguments():
    a, b = torch.ones(64, 128).to(torch.float8_e4m3fn), torch.ones(N, 128).to(torch.float8_e4m3fn)
    maps = tensor_map(a, (64, 128), swizzle=128), tensor_map(b, (N, 128), swizzle=128)
    return [torch.full((256,), -1.0), *maps, a, b]


def outcomes(kernel, *, threads=128, seeds=6):
    """Yield for each seed what a kernel wrote, or the error."""
    for found in outcomes_of_seeds(kernel, arguments, takes=3, threads=threads, seeds=seeds):
        yield found if isinstance(found, Exception) else found[0]


def assert_refused(error, kernel, *patterns, only_some=False, **options):
    """Assert that every seed (or some) raises this error with these patterns."""
    check_refused(error, outcomes(kernel, **options), *patterns, every=not only_some)


@cuda.jit(device=True)
def load(smem, barriers, map_a, map_b):
    """Issue loads of the tiles A and B, contiguous in shared memory."""
    if cuda.threadIdx.x == 0:
        mbarrier_init(barriers, 0, 1)
        mbarrier_init(barriers, 1, 4)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(barriers, 0, A_BYTES + B_BYTES)
        tma_load_2d(smem, 0, map_a, 0, 0, 0, barriers, 0)
        tma_load_2d(smem, A_BYTES, map_b, 0, 0, 0, barriers, 0)
    cuda.syncthreads()


def make_kernel(body, wait_for_tiles=True):
    """Make a kernel that loads the tiles and then calls `body(smem, barriers, a, b, out, map_a)`."""
    body = cuda.jit(device=True)(body)

    @cuda.jit
    def kernel(out, map_a, map_b):
        smem, barriers = cuda.shared.array(AB_BYTES, uint8, 1024), cuda.shared.array(2, uint64)
        load(smem, barriers, map_a, map_b)
        if wait_for_tiles:
            mbarrier_wait_parity(barriers, 0, 0)
        body(smem, barriers, wgmma_descriptor(smem, 0), wgmma_descriptor(smem, A_BYTES), out, map_a)
        cuda.syncthreads()

    return kernel


@simulated
def test_a_correct_kernel_is_accepted():
    def body(smem, barriers, a, b, out, map_a):
        total = fma(ZEROS, wait(tile(a, b)), np.float32(0.5))
        total = wait(tile_on(total, a, b))
        out[cuda.threadIdx.x] = total[3]

    for out in outcomes(make_kernel(body)):
        assert (out[:128] == 64 + 128).all()
    with simulator.trace() as events:
        list(outcomes(make_kernel(body), seeds=1))
    found = [e.details["event"] for e in events if e.what == "wgmma"]
    assert found == ["starts", "is done"] * 2


@simulated
def test_groups_complete_in_order():
    def body(smem, barriers, a, b, out, map_a):
        first, second = tile(a, b), tile(a, b)
        first = wait_1(first)
        out[cuda.threadIdx.x] = first[0]
        second = wait(second)
        out[128 + cuda.threadIdx.x] = second[0]

    def too_early(smem, barriers, a, b, out, map_a):
        tile(a, b)
        second = wait_1(tile(a, b))
        out[0] = second[0]

    for out in outcomes(make_kernel(body)):
        assert (out == 128).all()
    assert_refused(
        simulator.AsyncRace,
        make_kernel(too_early),
        "reads accumulators at too_early, test_wgmma.py:",
        "make_wgmma_wait",
    )


@simulated
def test_pending_accumulators_must_not_be_read():
    def no_wait(smem, barriers, a, b, out, map_a):
        acc = tile(a, b)
        out[0] = acc[0]

    def in_arithmetic(smem, barriers, a, b, out, map_a):
        fma(ZEROS, tile(a, b), np.float32(1))

    def around_the_wait(smem, barriers, a, b, out, map_a):
        acc = tile(a, b)
        wait(ZEROS)
        out[0] = acc[0]

    for body in (no_wait, in_arithmetic, around_the_wait):
        words = f"reads accumulators at {body.__name__}, test_wgmma.py:", "wgmma m64n16 e4m3"
        assert_refused(simulator.AsyncRace, make_kernel(body), *words, "block (0, 0, 0) warp ")


@simulated
def test_a_block_must_not_end_before_its_wgmmas():
    def body(smem, barriers, a, b, out, map_a):
        tile(a, b)

    assert_refused(simulator.AsyncRace, make_kernel(body), "ends, but has not waited for wgmma m64n16 e4m3, which it")


@simulated
def test_operands_must_be_loaded_first():
    def body(smem, barriers, a, b, out, map_a):
        wait(tile(a, b))
        mbarrier_wait_parity(barriers, 0, 0)

    kernel = make_kernel(body, wait_for_tiles=False)
    words = (
        "issues wgmma m64n16 e4m3 at body, test_wgmma.py:",
        "tensor.2d to shared memory, which",
        "its mbarrier first",
    )
    assert_refused(simulator.AsyncRace, kernel, *words, only_some=True, seeds=16)


@simulated
def test_operands_must_not_be_overwritten():
    def by_a_thread(smem, barriers, a, b, out, map_a):
        acc = tile(a, b)
        smem[77] = 0
        wait(acc)

    def by_a_copy(smem, barriers, a, b, out, map_a):
        acc = tile(a, b)
        if cuda.threadIdx.x == 0:
            tma_load_2d(smem, 0, map_a, 0, 0, 0, barriers, 0)
        wait(acc)

    words = "writes index 77 of", "wgmma m64n16 e4m3, which block (0, 0, 0) warp 0 lane 0 and its warpgroup issued at"
    assert_refused(simulator.AsyncRace, make_kernel(by_a_thread), *words)
    errors = [str(e) for e in outcomes(make_kernel(by_a_copy), seeds=20)]
    words = "issues cp.async.bulk.tensor.2d to shared memory at by_a_copy", "make_wgmma_wait"
    assert sum(all(word in error for word in words) for error in errors) >= 10


@simulated
def test_a_stage_must_not_be_released_before_its_wgmma_completes():
    """The producer waits for an empty stage, which the consumers release too early or in time."""

    def make(early):
        @cuda.jit
        def kernel(out, map_a, map_b):
            smem, barriers = cuda.shared.array(AB_BYTES, uint8, 1024), cuda.shared.array(2, uint64)
            load(smem, barriers, map_a, map_b)
            if cuda.threadIdx.x < 128:
                for iteration in range(4):
                    mbarrier_wait_parity(barriers, 0, iteration & 1)
                    acc = tile(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, A_BYTES))
                    if early and cuda.laneid == 0:
                        mbarrier_arrive(barriers, 1)
                    acc = wait(acc)
                    if not early and cuda.laneid == 0:
                        mbarrier_arrive(barriers, 1)
                    out[cuda.threadIdx.x] = acc[0]
            elif cuda.threadIdx.x == 128:
                for iteration in range(3):
                    mbarrier_wait_parity(barriers, 1, iteration & 1)
                    mbarrier_arrive_expect_tx(barriers, 0, A_BYTES + B_BYTES)
                    tma_load_2d(smem, 0, map_a, 0, 0, 0, barriers, 0)
                    tma_load_2d(smem, A_BYTES, map_b, 0, 0, 0, barriers, 0)

        return kernel

    for out in outcomes(make(False), threads=160, seeds=10):
        assert (out[:128] == 128).all()
    errors = [e for e in outcomes(make(True), threads=160, seeds=24) if isinstance(e, Exception)]
    assert len(errors) >= 6
    assert all(type(e) is simulator.AsyncRace and "wgmma m64n16 e4m3, which" in str(e) for e in errors)


@simulated
def test_operands_written_by_threads_need_a_proxy_fence():
    def make(fence):
        @cuda.jit
        def kernel(out, map_a, map_b):
            smem = cuda.shared.array(AB_BYTES, uint8, 1024)
            for i in range(cuda.threadIdx.x, A_BYTES + B_BYTES, 128):
                smem[i] = 0x38  # 1 in e4m3
            if fence:
                fence_proxy_async_shared()
            cuda.syncthreads()
            acc = wait(tile(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, A_BYTES)))
            out[cuda.threadIdx.x] = acc[0]

        return kernel

    for out in outcomes(make(True), seeds=2):
        assert (out[:128] == 128).all()
    assert_refused(simulator.MissingFence, make(False), "issues wgmma m64n16 e4m3", "fence_proxy_async_shared", seeds=2)


@simulated
def test_all_four_warps_must_execute_wgmma():
    def three_warps(smem, barriers, a, b, out, map_a):
        if cuda.threadIdx.x < 96:
            wait(tile(a, b))

    def one_waits_elsewhere(smem, barriers, a, b, out, map_a):
        if cuda.threadIdx.x >= 96:
            mbarrier_wait_parity(barriers, 1, 0)
        else:
            wait(tile(a, b))

    @cuda.jit
    def one_has_exited(out, map_a, map_b):
        smem = cuda.shared.array(AB_BYTES, uint8, 1024)
        if cuda.threadIdx.x < 96:
            wait(tile(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, A_BYTES)))

    words = "block (0, 0, 0) warp 3 lanes 0-31: ", "wgmma m64n16 e4m3 (96 of 128 arrived)"
    assert_refused(simulator.Deadlock, make_kernel(three_warps), *words, "syncthreads")
    assert_refused(
        simulator.Deadlock, make_kernel(one_waits_elsewhere), *words, "mbarrier.try_wait for phase bit 0 of mbarrier 1"
    )
    assert_refused(simulator.DivergentBarrier, one_has_exited, "warp ", "wgmma m64n16 e4m3", "exited")
    assert_refused(
        simulator.SimulatorError, make_kernel(three_warps), "wgmma m64n16 e4m3 needs a warpgroup", threads=96
    )


@simulated
def test_a_in_registers():
    def right(smem, barriers, a, b, out, map_a):
        acc = tile_rs(tile(a, b), ONES, b)
        wait_registers(ONES)
        acc = wait(acc)
        out[cuda.threadIdx.x] = acc[3]

    def no_wait(smem, barriers, a, b, out, map_a):
        acc = tile_rs(ZEROS, ONES, b)
        out[0] = acc[0]

    def overwritten(smem, barriers, a, b, out, map_a):
        acc = tile_rs(ZEROS, ONES, b)
        smem[A_BYTES] = 0
        wait(acc)

    for out in outcomes(make_kernel(right)):
        assert (out[:128] == 256).all()
    assert_refused(simulator.AsyncRace, make_kernel(no_wait), "reads accumulators at no_wait", seeds=2)
    assert_refused(simulator.AsyncRace, make_kernel(overwritten), "writes index 8192", "wgmma m64n16 e4m3", seeds=2)


def on_two_lines(a, b):
    if cuda.threadIdx.x < 64:
        tile(a, b)
    else:
        tile(a, b)


@simulated
@pytest.mark.parametrize(
    "error, words, body",
    [
        (
            "SimulatorError",
            "pass different descriptors",
            lambda s, m, a, b, out, map: wait(tile(a, b + uint64(512 * (cuda.threadIdx.x // 64)))),
        ),
        ("DivergentBarrier", "at different lines", lambda s, m, a, b, out, map: on_two_lines(a, b)),
        ("SimulatorError", "takes bytes 32 to 160 of rows of 128", lambda s, m, a, b, out, map: tile(a + uint64(2), b)),
        ("Misaligned", "both must be aligned to 1024 bytes", lambda s, m, a, b, out, map: tile(a, b + uint64(8))),
        ("OutOfBounds", "bytes past the end of the shared", lambda s, m, a, b, out, map: tile(b + uint64(64), b)),
        ("OutOfBounds", "which holds no array", lambda s, m, a, b, out, map: tile(a, b + uint64(8192))),
        ("SimulatorError", "without a swizzle", lambda s, m, a, b, out, map: tile(a & uint64(0xFFFFFFFF), b)),
        ("Misaligned", "aligned to 16 bytes", lambda s, m, a, b, out, map: wgmma_descriptor(s, 8)),
        (
            "Misaligned",
            "both must be aligned to 512 bytes",
            lambda s, m, a, b, out, map: make_wgmma_tile(N, "e4m3", 2)(wgmma_descriptor_64b(s, 64), b),
        ),
        ("SimulatorError", "takes 8 accumulators, not 4", lambda s, m, a, b, out, map: tile_on(ZEROS[:4], a, b)),
        ("SimulatorError", "takes 16 registers of A, not 4", lambda s, m, a, b, out, map: tile_rs(ZEROS, ONES[:4], b)),
        (
            "SimulatorError",
            "pass different descriptors",
            lambda s, m, a, b, out, map: tile_rs(ZEROS, ONES, b + uint64(512 * (cuda.threadIdx.x // 64))),
        ),
    ],
)
def test_wrong_operands_are_refused(error, words, body):
    assert_refused(getattr(simulator, error), make_kernel(body), words, "block (0, 0, 0) warp ", seeds=2)


@simulated
def test_operands_need_aligned_memory():
    @cuda.jit
    def kernel(out, map_a, map_b):
        smem = cuda.shared.array(AB_BYTES, uint8, 128)
        tile(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, A_BYTES))

    assert_refused(
        simulator.Misaligned, kernel, "which is aligned to 128", "both must be aligned to 1024 bytes", seeds=2
    )


# MN-major operands

MN_N = 128
mn_tile, mn_wait = make_wgmma_tile(MN_N, "bf16", a_major="mn", b_major="mn"), make_wgmma_wait(MN_N, 0)
BOX = 64 * 128  # 64 k by 64 rows
mn_descriptor = make_wgmma_descriptor_mn(BOX)


def run_mn(body, size=3 * BOX):
    """Run ``body(smem, a, b)`` on all of A and B in shared memory, A first; return its tile."""
    torch.manual_seed(0)
    a, b = torch.randn(64, 64).bfloat16(), torch.randn(MN_N, 64).bfloat16()
    transposed = [m.T.contiguous() for m in (a, b)]
    maps = [tensor_map(m, (64, 64), swizzle=128) for m in transposed]
    body = cuda.jit(device=True)(body)

    @cuda.jit
    def kernel(out, map_a, map_b):
        smem, barriers = cuda.shared.array(size, uint8, 1024), cuda.shared.array(1, uint64)
        thread = cuda.threadIdx.x
        if thread == 0:
            mbarrier_init(barriers, 0, 1)
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(barriers, 0, 3 * BOX)
            tma_load_2d(smem, 0, map_a, 0, 0, 0, barriers, 0)
            for i in range(2):
                tma_load_2d(smem, (1 + i) * BOX, map_b, 0, 64 * i, 0, barriers, 0)
        cuda.syncthreads()
        mbarrier_wait_parity(barriers, 0, 0)
        acc = body(smem, mn_descriptor(smem, 0), mn_descriptor(smem, BOX))
        for i in range(MN_N // 2):
            out[thread * (MN_N // 2) + i] = acc[i]

    out = torch.empty(128 * MN_N // 2)
    launch(kernel, 1, 128, out, *maps)
    tile, coordinates = np.empty((64, MN_N)), simulator.fragments.accumulator_coordinates(MN_N)
    tile[coordinates] = out.view(128, -1).numpy()
    return tile, (a.double() @ b.double().T).numpy()


@simulated
def test_mn_major_operands():
    found, right = run_mn(lambda smem, a, b: mn_wait(mn_tile(a, b)))
    assert np.allclose(found, right, rtol=1e-5, atol=1e-5)


WITH_STRIDE = lambda descriptor, stride: descriptor & ~uint64(0x3FFF << 32) | uint64(stride >> 4 << 32)
K_MAJOR_A = make_wgmma_tile(MN_N, "bf16", b_major="mn")
K_MAJOR_B = make_wgmma_tile(MN_N, "bf16", a_major="mn")


@simulated
@pytest.mark.parametrize(
    "body",
    [
        lambda smem, a, b: mn_wait(K_MAJOR_A(a, b)),
        lambda smem, a, b: mn_wait(K_MAJOR_B(a, b)),
        lambda smem, a, b: mn_wait(mn_tile(WITH_STRIDE(a, 2048), b)),
        lambda smem, a, b: mn_wait(mn_tile(a, WITH_STRIDE(b, 0))),
        lambda smem, a, b: mn_wait(mn_tile(a, make_wgmma_descriptor_mn(1024)(smem, BOX))),
    ],
    ids=["A as if K-major", "B as if K-major", "stride of two atoms", "stride 0", "leading dimension of an atom"],
)
def test_wrong_mn_major_descriptors_change_the_result(body):
    found, right = run_mn(body)
    assert np.linalg.norm(found - right) > 0.1 * np.linalg.norm(right)


@simulated
@pytest.mark.parametrize(
    "error, words, body",
    [
        (
            "Misaligned",
            "leading-dimension offset of 16 bytes",
            lambda smem, a, b: mn_tile(a, wgmma_descriptor(smem, BOX)),
        ),
        ("Misaligned", "stride offset of 512 bytes", lambda smem, a, b: mn_tile(WITH_STRIDE(a, 512), b)),
        ("Misaligned", "both must be aligned to 1024 bytes", lambda smem, a, b: mn_tile(a + uint64(8), b)),
        ("OutOfBounds", "bytes past the end of the shared", lambda smem, a, b: mn_tile(a, b + uint64(128))),
        (
            "OutOfBounds",
            "bytes past the end of the shared",
            lambda smem, a, b: mn_tile(a, make_wgmma_descriptor_mn(2 * BOX)(smem, BOX)),
        ),
        (
            "SimulatorError",
            "MN-major with a swizzle of 64 bytes",
            lambda smem, a, b: mn_tile(wgmma_descriptor_64b(smem, 0), b),
        ),
    ],
)
def test_wrong_mn_major_operands_are_refused(error, words, body):
    with pytest.raises(getattr(simulator, error), match=words):
        run_mn(body)


def test_machine_code_of_mn_major_tiles():
    module, majors = "test_hopper_conformance_wgmma", [("k", "k"), ("mn", "k"), ("k", "mn"), ("mn", "mn")]
    kernels = {f"{a} {b}": (f"make_multiply_mn(64, {a!r}, {b!r})", ["float32*", "uint8*", "uint8*"]) for a, b in majors}
    for b in ("k", "mn"):
        kernels[f"registers {b}"] = f"make_multiply_rs(64, 'bf16', {b!r})", ["float32*", "uint32*", "uint8*"]
    reports = compile_whole({name: (module, *kernel) for name, kernel in kernels.items()})
    for name, report in reports.items():
        a, b = name.split()
        wanted = ".tnspA" * (a == "mn") + ".tnspB" * (b == "mn")
        assert report.complaints == [] and report.spilled_bytes == report.stack_bytes == 0
        assert report.count("HGMMA") == 4
        assert report.wgmma_transposes == [wanted] * 4, name
