"""16-byte cp.async: results, and faulty kernels that the simulator must reject."""

import pytest
import torch
from helpers.hopper import check_refused, outcomes, runs, simulated

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, uint8

from moe_numba.ptx.cp_async import cp_async_16, cp_async_commit_group, make_cp_async_wait_group
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.launch import launch

wait_for_older, wait_for_all = make_cp_async_wait_group(1), make_cp_async_wait_group(0)


@cuda.jit
def copies(out, x, valid):
    """Copy chunk t of both halves by thread t, as two groups."""
    smem, t = cuda.shared.array(1024, uint8, 16), cuda.threadIdx.x
    for half in range(2):
        first = -1 << 40 if valid[t] == 0 else 16 * t  # with 0 valid bytes nothing is read
        cp_async_16(smem, 512 * half + 16 * t, x, first + 512 * half, valid[t])
        cp_async_commit_group()
    wait_for_older()
    for i in range(16):
        out[16 * t + i] = smem[16 * t + i]
    wait_for_all()
    for i in range(512 + 16 * t, 528 + 16 * t):
        out[i] = smem[i]


def test_copies_bring_bytes_and_zeros(device):
    x = torch.arange(1024).to(torch.uint8)
    valid = torch.tensor([16, 0, 8, 4] * 8, dtype=torch.int32)
    right = torch.where(torch.arange(16) < valid[:, None], x.view(2, 32, 16), 0).view(-1)
    make = lambda: [torch.full((1024,), 7, dtype=torch.uint8).to(device), x.to(device), valid.to(device)]
    for out, *_ in runs(copies, make):
        assert torch.equal(out.cpu(), right)


def assert_refused(error, kernel, *patterns, **options):
    make = lambda: [torch.zeros(4096), torch.arange(4096).to(torch.uint8)]
    return check_refused(error, outcomes(kernel, make, threads=128, **options), *patterns)


def make_reader(commit=True, wait=True):
    @cuda.jit
    def kernel(out, x):
        smem, t = cuda.shared.array(2048, uint8, 16), cuda.threadIdx.x
        cp_async_16(smem, 16 * t, x, 16 * t, 16)
        if commit:
            cp_async_commit_group()
        if wait:
            wait_for_all()
        out[t] = float32(smem[16 * t])
        wait_for_all()

    return kernel


@simulated
@pytest.mark.parametrize("mistake", [dict(commit=False), dict(wait=False)], ids=str)
def test_a_read_before_the_wait_is_refused(mistake):
    assert_refused(
        simulator.AsyncRace, make_reader(**mistake), "reads index", "wait for its group with make_cp_async_wait"
    )


@simulated
def test_a_warp_copies_as_a_vector():
    """No lane runs on its own, also where pointers and sizes differ between lanes and some lanes issue no copy."""

    @cuda.jit
    def kernel(out, x):
        smem, t = cuda.shared.array(2048, uint8, 16), cuda.threadIdx.x
        if t % 8 < 5:
            cp_async_16(smem, 16 * (t ^ 9), x.offset(16 * (t % 3)), 32 * t, (t % 3) * 8)
        cp_async_commit_group()
        wait_for_all()
        cuda.syncthreads()
        out[t] = smem[16 * (t ^ 9) + 9] if t % 8 < 5 and t % 3 == 2 else 0

    t = torch.arange(128)
    right = torch.where((t % 8 < 5) & (t % 3 == 2), (32 + 32 * t + 9) % 256, 0)
    for seed in range(4):
        out, x = torch.zeros(128), torch.arange(8192).to(torch.uint8)
        with simulator.seed(seed), simulator.settings.settings.override(engine="vector"):
            launch(kernel, 1, 128, out, x)
        assert torch.equal(out.int(), right.int())


@simulated
def test_copies_of_two_lanes_must_not_overlap():
    @cuda.jit
    def kernel(out, x):
        cp_async_16(cuda.shared.array(2048, uint8, 16), 16 * (cuda.threadIdx.x // 2), x, 0, 16)
        cp_async_commit_group()
        wait_for_all()

    assert_refused(simulator.AsyncRace, kernel, "issues cp.async of 16 bytes", "which writes bytes from")


@simulated
def test_lanes_may_commit_and_wait_alone():
    @cuda.jit
    def kernel(out, x):
        smem, t = cuda.shared.array(4096, uint8, 16), cuda.threadIdx.x
        for half in range(2):
            cp_async_16(smem, 16 * (2 * t + half), x, 16 * (2 * t + half), 16)
            if t % 2 or half:
                cp_async_commit_group()
        if t % 2:
            wait_for_older()  # the other threads' older copy is in the same group as the newer one
        else:
            wait_for_all()
        out[t] = smem[32 * t]
        wait_for_all()

    for out, x in runs(kernel, lambda: [torch.zeros(128), torch.arange(4096).to(torch.uint8)], threads=128):
        assert torch.equal(out, x[::32].float())


@simulated
def test_a_block_must_not_end_before_its_copies():
    @cuda.jit
    def kernel(out, x):
        cp_async_16(cuda.shared.array(2048, uint8, 16), 16 * cuda.threadIdx.x, x, 0, 16)
        cp_async_commit_group()

    assert_refused(simulator.AsyncRace, kernel, "ends, while in", "cp.async of 16 bytes, which block (0, 0, 0) warp")


@simulated
@pytest.mark.parametrize(
    "error, words, copy",
    [
        ("OutOfBounds", "16 bytes at index 4096 of x", lambda s, x: cp_async_16(s, 0, x, 4096, 16)),
        ("OutOfBounds", "4 bytes at index -16 of x", lambda s, x: cp_async_16(s, 0, x, -16, 4)),
        ("OutOfBounds", "16 bytes at index 2048 of the shared", lambda s, x: cp_async_16(s, 2048, x, 0, 0)),
        ("Misaligned", "index 8 of x (4096 x uint8) is not", lambda s, x: cp_async_16(s, 0, x, 8, 16)),
        ("Misaligned", "index 8 of the shared", lambda s, x: cp_async_16(s, 8, x, 0, 16)),
        ("SimulatorError", "17 valid bytes; it must be 0 to 16", lambda s, x: cp_async_16(s, 0, x, 0, 17)),
    ],
)
def test_a_wrong_operand_is_refused(error, words, copy):
    copy = cuda.jit(device=True)(copy)

    @cuda.jit
    def kernel(out, x):
        smem = cuda.shared.array(2048, uint8, 16)
        if cuda.threadIdx.x == 0:
            copy(smem, x)

    assert_refused(getattr(simulator, error), kernel, words, "block (0, 0, 0) warp 0 lane 0", seeds=2)


def make_gemm(wait=True, fence="after"):
    """Make a kernel in which a warpgroup copies two tiles and multiplies them."""
    multiply, wait_for_gemm = make_wgmma_tile(8, "e4m3"), make_wgmma_wait(8, 0)

    @cuda.jit
    def kernel(out, x):
        smem, t = cuda.shared.array(0, uint8, 1024), cuda.threadIdx.x
        for i in range(t, 72 * 8, 128):
            cp_async_16(smem, (i ^ (i >> 3 & 7)) * 16, x, 0, 0)
        cp_async_commit_group()
        if fence == "before":
            fence_proxy_async_shared()
        if wait:
            wait_for_all()
        if fence == "after":
            fence_proxy_async_shared()
        cuda.syncthreads()
        acc = wait_for_gemm(multiply(wgmma_descriptor(smem, 0), wgmma_descriptor(smem, 8192)))
        out[t] = acc[0]
        wait_for_all()

    return kernel


@simulated
def test_wgmma_operands_need_a_wait_and_then_a_fence():
    make = lambda: [torch.ones(128), torch.zeros(16, dtype=torch.uint8)]
    for out, _ in outcomes(make_gemm(), make, threads=128, shared_bytes=9216):
        assert not out.any()
    words = "issues wgmma m64n8 e4m3", "has not called fence_proxy_async_shared since"
    for fence in ("before", "never"):
        assert_refused(simulator.MissingFence, make_gemm(fence=fence), *words, shared_bytes=9216)
    assert_refused(simulator.AsyncRace, make_gemm(wait=False), "make_cp_async_wait_group", shared_bytes=9216)
