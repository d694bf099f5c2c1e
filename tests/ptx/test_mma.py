"""``ldmatrix`` and ``mma.sync``: conformance of GPU and simulator, and faulty uses that the simulator must reject."""

import numpy as np
import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from helpers.hopper import BF16, E4M3, check_refused, outcomes, random_bytes, runs, simulated, small_integers
from numba import cuda, int32, uint8

from moe_numba.ptx.capability import needed_by
from moe_numba.ptx.intrinsic import simulated as simulated_instruction
from moe_numba.ptx.mma import make_e4m3_as_f16, make_fma_rows, make_ldmatrix_x4, make_mma
from moe_numba.runtime.device import gpu_of
from moe_numba.simulator import capability

DTYPES = {"bf16": (BF16, (8, 0)), "f16": (torch.float16, (8, 0)), "e4m3": (E4M3, (8, 9))}
G, C = np.arange(32) // 4, np.arange(32) % 4  # a lane's row and its four bytes in each matrix


@pytest.mark.parametrize("offsets", [(0,), (0, 512), (256, 0, 1024)])
def test_ldmatrix(offsets, device):
    """Lane 8 i + r addresses row r of matrix i, in any order of the rows."""
    load, size = make_ldmatrix_x4(offsets), 2048
    count = 4 * len(offsets)

    @cuda.jit
    def kernel(out, data, rows):
        smem, t = cuda.shared.array(size, uint8, 128), cuda.threadIdx.x
        for i in range(t, size, 32):
            smem[i] = data[i]
        cuda.syncwarp()
        registers = load(smem, int32(16 * rows[t]))
        for i in range(count):
            out[t * count + i] = registers[i]

    rows = torch.randperm(32).int()
    make = lambda: [
        torch.zeros(32 * count, dtype=torch.uint32, device=device),
        random_bytes(size).to(device),
        rows.to(device),
    ]
    for out, data, _ in runs(kernel, make):
        words = data.cpu().numpy().view(np.uint32).reshape(-1, 4)  # 16-byte rows
        for o, offset in enumerate(offsets):
            for i in range(4):
                expected = words[rows.numpy()[8 * i + G] + offset // 16, C]
                assert (out.cpu().numpy().reshape(32, -1)[:, 4 * o + i] == expected).all()


def make_product(dtype, m, n, accumulate):
    """Make a kernel in which a warp multiplies registers that it loads, twice with ``accumulate``."""
    first, add = make_mma(dtype, m, n, accumulate=False), make_mma(dtype, m, n)
    load_a, load_b = (make_ldmatrix_x4(tuple(range(0, 32 * rows, 512))) for rows in (m, n))
    a_bytes, b_bytes, count = 32 * m, 32 * n, m * n // 32

    @cuda.jit
    def kernel(out, a, b):
        smem_a, smem_b = cuda.shared.array(a_bytes, uint8, 128), cuda.shared.array(b_bytes, uint8, 128)
        t = cuda.threadIdx.x
        for i in range(t, a_bytes, 32):
            smem_a[i] = a[i]
        for i in range(t, b_bytes, 32):
            smem_b[i] = b[i]
        cuda.syncwarp()
        # Of A: rows 0 to 15 of both halves; of B: both halves of rows 0 to 7, then of rows 8 to 15.
        x = load_a(smem_a, int32((t & 15) * 32 + (t >> 4) * 16))
        w = load_b(smem_b, int32(((t & 7) + (t >> 4) * 8) * 32 + (t >> 3 & 1) * 16))
        d = first(x, w)
        if accumulate:
            d = add(d, x, w)
        for i in range(count):
            out[t * count + i] = d[i]

    return kernel


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("m, n", [(16, 16), (32, 64)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mma(dtype, m, n, accumulate, device):
    """Fragments that ldmatrix loads give A B^T, in the layout of accumulators that the PTX ISA describes."""
    torch_dtype, needed = DTYPES[dtype]
    if needed > gpu_of(0).capability:
        pytest.skip(f"{dtype} needs {needed}")
    k = 32 // torch_dtype.itemsize
    a, b = small_integers((m, k), torch_dtype, "cpu"), small_integers((n, k), torch_dtype, "cpu")
    expected = (a.double() @ b.double().T).numpy() * (1 + accumulate)
    flat = [t.view(torch.uint8).reshape(-1).to(device) for t in (a, b)]
    make = lambda: [torch.full((m * n,), float("nan"), device=device), *flat]
    for out, _, _ in runs(make_product(dtype, m, n, accumulate), make, count=3):
        d = out.cpu().numpy().reshape(32, m // 16, n // 8, 2, 2)  # lane, part of rows, part of columns, r, i
        for r in range(2):
            for i in range(2):
                rows = 16 * np.arange(m // 16)[None, :, None] + (G + 8 * r)[:, None, None]
                columns = 8 * np.arange(n // 8)[None, None, :] + (2 * C + i)[:, None, None]
                assert (d[..., r, i] == expected[rows, columns]).all()


def test_e4m3_as_f16(device):
    """Every e4m3 becomes 2**-8 times its number; of each register first the odd bytes, then the even ones."""
    odd, even = make_e4m3_as_f16(2, True), make_e4m3_as_f16(2, False)

    @cuda.jit
    def kernel(out, codes):
        t = cuda.threadIdx.x
        registers = codes[2 * t], codes[2 * t + 1]
        a, b = odd(registers), even(registers)
        for i in range(2):
            out[4 * t + i], out[4 * t + 2 + i] = a[i], b[i]

    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    make = lambda: [torch.zeros(128, dtype=torch.uint32, device=device), codes.view(torch.uint32).to(device)]
    numbers = codes.view(E4M3).float().numpy().reshape(32, 2, 4)
    for out, _ in runs(kernel, make, count=1):
        halves = out.cpu().numpy().view(np.float16).astype(np.float32).reshape(32, 2, 2, 2)  # lane, odd, register
        for parity, first in ((0, 1), (1, 0)):
            np.testing.assert_array_equal(halves[:, parity] * 256, numbers[:, :, first::2])


@pytest.mark.parametrize("halves", [1, 2])
def test_fma_rows(halves, device):
    """The factors are those of the rows 16 i + 8 r, with two halves first those of the left columns."""
    m, n = 32, 16
    fma, count, ones = make_fma_rows(m, n, halves), m * n // 32, (np.float32(1),) * (m * n // 32)
    factors = tuple(np.float32(i + 2) for i in range(m // 8 * halves))

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        d = fma(ones, ones, factors)
        for i in range(count):
            out[t * count + i] = d[i]

    for (out,) in runs(kernel, lambda: [torch.zeros(32 * count, device=device)], count=1):
        d = out.cpu().numpy().reshape(32, m // 16, n // 8, 2, 2)
        for i in range(m // 16):
            for j in range(n // 8):
                for r in range(2):
                    half = j * halves // (n // 8)
                    assert (d[:, i, j, r] == 1 + factors[2 * i + r + m // 8 * half]).all()


# Faulty uses


@pytest.mark.parametrize("dtype, m, n", [("e5m2", 16, 8), ("bf16", 8, 8), ("bf16", 16, 12)])
def test_unsupported_shapes_are_refused(dtype, m, n):
    with pytest.raises(ValueError, match=f"not {dtype}, m {m}, n {n}"):
        make_mma(dtype, m, n)


@simulated
@pytest.mark.parametrize(
    "error, words, index, lanes",
    [("Misaligned", "8 of", 8, 32), ("OutOfBounds", "2048 of", 2048, 32), ("SimulatorError", "ldmatrix.x4", 0, 31)],
)
def test_wrong_ldmatrix_is_refused(error, words, index, lanes):
    load = make_ldmatrix_x4()

    @cuda.jit
    def kernel(out):
        smem, t = cuda.shared.array(2048, uint8, 128), cuda.threadIdx.x
        for i in range(t, 2048, 32):
            smem[i] = 1
        cuda.syncwarp()
        if t < lanes:
            out[t] = load(smem, int32(index))[0]

    results = list(outcomes(kernel, lambda: [torch.zeros(32, dtype=torch.uint32)], threads=32, seeds=2))
    assert all(isinstance(e, getattr(simulator, error)) and words in str(e) for e in results), results


@simulated
@pytest.mark.parametrize("missing, words", [("lane", "mma.sync"), ("registers", "takes 4 registers of A and 2 of B")])
def test_wrong_mma_is_refused(missing, words):
    mma = make_mma("bf16", accumulate=False)
    a, b, lanes = (np.uint32(0),) * 4, (np.uint32(0),) * (4 if missing == "registers" else 2), 31 + (missing != "lane")

    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        if t < lanes:
            out[t] = mma(a, b)[0]

    results = list(outcomes(kernel, lambda: [torch.zeros(32)], threads=32, seeds=2))
    assert all(isinstance(e, simulator.SimulatorError) and words in str(e) for e in results), results


@simulated
def test_ldmatrix_needs_a_wait_for_cp_async():
    from moe_numba.ptx.cp_async import cp_async_16, cp_async_commit_group, make_cp_async_wait_group

    load, wait_for_all = make_ldmatrix_x4(), make_cp_async_wait_group(0)

    def make_kernel(wait):
        @cuda.jit
        def kernel(out, x):
            smem, t = cuda.shared.array(512, uint8, 128), cuda.threadIdx.x
            cp_async_16(smem, 16 * t, x, 16 * t, 16)
            cp_async_commit_group()
            if wait:
                wait_for_all()
            cuda.syncwarp()
            out[t] = load(smem, int32(16 * t))[0]
            wait_for_all()

        return kernel

    make = lambda: [torch.zeros(32, dtype=torch.uint32), torch.ones(512, dtype=torch.uint8)]
    for out, _ in outcomes(make_kernel(True), make, threads=32):
        assert (out.numpy() == 0x01010101).all()
    check_refused(simulator.AsyncRace, outcomes(make_kernel(False), make, threads=32), "make_cp_async_wait_group")


@pytest.mark.parametrize(
    "text, needed",
    [
        ("ldmatrix.sync.aligned.m8n8.x4.shared.b16", (7, 5)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32", (8, 0)),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", (8, 0)),
        ("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32", (8, 9)),
    ],
)
def test_older_gpus_lack_the_instruction(text, needed, monkeypatch):
    def multiply():
        """``mma.sync``: multiply and add."""

    assert needed_by(text) == needed
    monkeypatch.setattr(capability, "SIMULATED", needed)
    assert simulated_instruction(multiply, text) is multiply
    if needed > (7, 5):
        monkeypatch.setattr(capability, "SIMULATED", (7, 5))
        with pytest.raises(capability.UnsupportedInstruction, match=r"``mma.sync`` needs compute capability"):
            simulated_instruction(multiply, text)()
