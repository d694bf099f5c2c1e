"""Conformance of GPU and simulator: wgmma, fragments, stmatrix, conversions, warp specialisation, and a small GEMM.

Method: see test_hopper_conformance.py.
"""

import math

import numpy as np
import pytest
import torch

from moe_numba import simulator  # noqa: F401  before numba: it selects the simulator or the GPU

# isort: split
from helpers.hopper import BF16, E4M3, RNG, hopper, runs, small_integers
from helpers.hopper_gemm import K, M, N, make_gemm, shared_bytes
from numba import cuda, float32, int32, uint8, uint16, uint64

from moe_numba.ptx.accumulators import make_fma, make_fma_blocks, make_fma_columns, make_for_each_chunk
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32, e4m3x2_as_floats
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.matrix import (
    make_fma_shared,
    make_load_shared,
    st_shared_rows_f32,
    stmatrix_x2,
    stmatrix_x2_trans,
    stmatrix_x4,
    stmatrix_x4_trans,
)
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import load_nc_u32x4
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_sys
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_arrive, bar_sync, elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import (
    make_wgmma_descriptor_mn,
    make_wgmma_tile,
    make_wgmma_tile_rs,
    make_wgmma_wait,
    make_wgmma_wait_registers,
    wgmma_descriptor,
    wgmma_descriptor_64b,
)
from moe_numba.runtime.tensor_map import tensor_map

pytestmark = hopper


# --- wgmma ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def accumulator_coordinates():
    """Return a function that maps n to the rows and columns of the threads' accumulators, as in the PTX ISA."""

    def of(n):
        thread, result = np.indices((128, n // 2))
        warp, lane = thread // 32, thread % 32
        row = warp * 16 + lane // 4 + (result // 2 % 2) * 8
        return row, (result // 4) * 8 + (lane % 4) * 2 + result % 2

    return of


def make_multiply(n, dtype, row_bytes, accumulate):
    """Make a kernel that loads 64 rows of A and n rows of B, 128 (or 64) bytes each, and writes the fragments of A B^T.

    With ``accumulate`` it adds A B^T to itself.
    """
    steps = row_bytes // 32
    tile, tile_on = make_wgmma_tile(n, dtype, steps), make_wgmma_tile(n, dtype, steps, accumulate=True)
    wait = make_wgmma_wait(n, 0)
    b_offset = 64 * row_bytes
    size = (64 + n) * row_bytes
    wide = row_bytes == 128

    @cuda.jit
    def kernel(out, map_a, map_b):
        smem = cuda.shared.array(0, uint8, 1024)
        barrier = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(barrier, 0, 1)
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(barrier, 0, size)
            fence_proxy_tensormap_acquire_sys(map_a, 0)
            fence_proxy_tensormap_acquire_sys(map_b, 0)
            tma_load_2d(smem, 0, map_a, 0, 0, 0, barrier, 0)
            tma_load_2d(smem, b_offset, map_b, 0, 0, 0, barrier, 0)
        cuda.syncthreads()
        mbarrier_wait_parity(barrier, 0, 0)
        if wide:
            a, b = wgmma_descriptor(smem, 0), wgmma_descriptor(smem, b_offset)
        else:
            a, b = wgmma_descriptor_64b(smem, 0), wgmma_descriptor_64b(smem, b_offset)
        if accumulate:
            acc = wait(tile_on(tile(a, b), a, b))
        else:
            acc = wait(tile(a, b))
        first = t * (n // 2)
        for j in range(n // 8):
            out[first + 4 * j] = acc[4 * j]
            out[first + 4 * j + 1] = acc[4 * j + 1]
            out[first + 4 * j + 2] = acc[4 * j + 2]
            out[first + 4 * j + 3] = acc[4 * j + 3]

    return kernel


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("dtype, row_bytes", [("e4m3", 128), ("bf16", 128), ("e4m3", 64), ("bf16", 64)])
@pytest.mark.parametrize("n", [8, 16, 64, 128, 256])
def test_wgmma_of_small_integers_is_exact(n, dtype, row_bytes, accumulate, device, accumulator_coordinates):
    torch_dtype = {"e4m3": E4M3, "bf16": BF16}[dtype]
    columns = row_bytes // torch_dtype.itemsize
    a, b = (small_integers((rows, columns), torch_dtype, device) for rows in (64, n))
    right = (a.double() @ b.double().T).float().cpu().numpy() * (2 if accumulate else 1)
    row, column = accumulator_coordinates(n)
    make = lambda: [
        torch.full((128 * n // 2,), float("nan"), device=device),
        tensor_map(a, (64, columns), swizzle=row_bytes),
        tensor_map(b, (n, columns), swizzle=row_bytes),
    ]
    kernel = make_multiply(n, dtype, row_bytes, accumulate)
    for out, *_ in runs(kernel, make, threads=128, count=2, shared_bytes=(64 + n) * row_bytes):
        assert (out.cpu().numpy().reshape(128, n // 2) == right[row, column]).all()


BOX = 64 * 128  # bytes of 64 k by 64 rows, which one TMA load of an MN-major operand writes


def make_multiply_rs(n, dtype, b_major="k"):
    """Make a kernel that multiplies A, 64 rows in registers, by n rows of B, 128 bytes each, and writes the fragments.

    Each half of k is a group of two steps, and both are in flight at the same time. An MN-major B is given as its
    transpose, [k, n], and loaded in boxes of 64 rows of B.
    """
    tile, wait = make_wgmma_tile_rs(n, dtype, 2, b_major), make_wgmma_wait(n, 0)
    descriptor, half = (make_wgmma_descriptor_mn(BOX), 2 * 128) if b_major == "mn" else (wgmma_descriptor, 2 * 2)
    boxes = n // 64 if b_major == "mn" else 1
    wait_first, wait_second = make_wgmma_wait_registers(8, 1), make_wgmma_wait_registers(8, 0)
    zeros = (np.float32(0),) * (n // 2)

    @cuda.jit
    def kernel(out, words, map_b):
        smem = cuda.shared.array(0, uint8, 1024)
        barrier = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(barrier, 0, 1)
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(barrier, 0, n * 128)
            fence_proxy_tensormap_acquire_sys(map_b, 0)
            for box in range(boxes):
                tma_load_2d(smem, box * BOX, map_b, 0, 64 * box, 0, barrier, 0)
        cuda.syncthreads()
        mbarrier_wait_parity(barrier, 0, 0)
        first = load_nc_u32x4(words, 16 * t) + load_nc_u32x4(words, 16 * t + 4)
        second = load_nc_u32x4(words, 16 * t + 8) + load_nc_u32x4(words, 16 * t + 12)
        b = descriptor(smem, 0)
        acc = tile(zeros, first, b)
        acc = tile(acc, second, b + uint64(half))
        wait_first(first)
        wait_second(second)
        acc = wait(acc)
        index = t * (n // 2)
        for j in range(n // 8):
            out[index + 4 * j] = acc[4 * j]
            out[index + 4 * j + 1] = acc[4 * j + 1]
            out[index + 4 * j + 2] = acc[4 * j + 2]
            out[index + 4 * j + 3] = acc[4 * j + 3]

    return kernel


@pytest.mark.parametrize(
    "n, dtype, b_major",
    [*((n, dtype, "k") for n in (8, 64, 256) for dtype in ("e4m3", "bf16")), (64, "bf16", "mn"), (256, "bf16", "mn")],
)
def test_wgmma_with_a_in_registers_is_exact(n, dtype, b_major, device, accumulator_coordinates):
    torch_dtype = {"e4m3": E4M3, "bf16": BF16}[dtype]
    a, b = (small_integers((rows, 128 // torch_dtype.itemsize), torch_dtype, device) for rows in (64, n))
    right = (a.double() @ b.double().T).float().cpu().numpy()
    thread, register = np.indices((128, 16))
    warp, lane, step, half, r = thread // 32, thread % 32, register // 4, register // 2 % 2, register % 2
    row, word = 16 * warp + lane // 4 + 8 * r, 8 * step + 4 * half + lane % 4  # 32-bit words of a row of 128 bytes
    words = a.cpu().view(torch.int32)[torch.from_numpy(row), torch.from_numpy(word)].flatten().view(torch.uint32)
    box = n, 128 // torch_dtype.itemsize
    if b_major == "mn":
        b, box = b.T.contiguous(), (64, 64)
    make = lambda: [
        torch.full((128 * n // 2,), float("nan"), device=device),
        words.to(device),
        tensor_map(b, box, swizzle=128),
    ]
    row, column = accumulator_coordinates(n)
    for out, *_ in runs(make_multiply_rs(n, dtype, b_major), make, threads=128, count=2, shared_bytes=n * 128):
        assert (out.cpu().numpy().reshape(128, n // 2) == right[row, column]).all()


@pytest.mark.parametrize("dtype, tolerance", [("e4m3", 2e-3), ("bf16", 1e-5)])
def test_wgmma_with_rounding(dtype, tolerance, device, accumulator_coordinates):
    """The tensor core accumulates FP8 products with fewer bits than float32 has; the simulator uses more."""
    torch_dtype, n = {"e4m3": E4M3, "bf16": BF16}[dtype], 64
    columns = 128 // torch_dtype.itemsize
    a, b = (torch.randn(rows, columns).to(torch_dtype).to(device) for rows in (64, n))
    right = (a.double() @ b.double().T).cpu().numpy()
    make = lambda: [
        torch.zeros(128 * n // 2, device=device),
        tensor_map(a, (64, columns), swizzle=128),
        tensor_map(b, (n, columns), swizzle=128),
    ]
    for out, *_ in runs(make_multiply(n, dtype, 128, False), make, threads=128, shared_bytes=(64 + n) * 128):
        error = out.cpu().numpy().reshape(128, n // 2) - right[accumulator_coordinates(n)]
        assert np.linalg.norm(error) < tolerance * np.linalg.norm(right)


def make_multiply_mn(n, a_major, b_major, leading=BOX, skip=0):
    """Make a kernel that multiplies 64 rows of A by n rows of B (bf16), and writes the fragments.

    An MN-major operand is given as its transpose, [k, rows], and loaded in boxes of 64 rows, ``leading`` bytes apart.
    The kernel leaves out the first ``16 * skip`` of 64 k, by adding to the descriptors.
    """
    tile, wait = make_wgmma_tile(n, "bf16", 4 - skip, a_major=a_major, b_major=b_major), make_wgmma_wait(n, 0)
    a_descriptor = make_wgmma_descriptor_mn(BOX) if a_major == "mn" else wgmma_descriptor
    b_descriptor = make_wgmma_descriptor_mn(leading) if b_major == "mn" else wgmma_descriptor
    a_step, b_step = (skip * (128 if major == "mn" else 2) for major in (a_major, b_major))
    boxes, size = n // 64 if b_major == "mn" else 1, BOX + n * 128

    @cuda.jit
    def kernel(out, map_a, map_b):
        smem = cuda.shared.array(0, uint8, 1024)
        barrier = cuda.shared.array(1, uint64)
        t = cuda.threadIdx.x
        if t == 0:
            mbarrier_init(barrier, 0, 1)
            fence_mbarrier_init()
            mbarrier_arrive_expect_tx(barrier, 0, size)
            fence_proxy_tensormap_acquire_sys(map_a, 0)
            fence_proxy_tensormap_acquire_sys(map_b, 0)
            tma_load_2d(smem, 0, map_a, 0, 0, 0, barrier, 0)
            for box in range(boxes):
                tma_load_2d(smem, BOX + box * leading, map_b, 0, 64 * box, 0, barrier, 0)
        cuda.syncthreads()
        mbarrier_wait_parity(barrier, 0, 0)
        a, b = a_descriptor(smem, 0) + uint64(a_step), b_descriptor(smem, BOX) + uint64(b_step)
        acc = wait(tile(a, b))
        first = t * (n // 2)
        for j in range(n // 8):
            out[first + 4 * j] = acc[4 * j]
            out[first + 4 * j + 1] = acc[4 * j + 1]
            out[first + 4 * j + 2] = acc[4 * j + 2]
            out[first + 4 * j + 3] = acc[4 * j + 3]

    return kernel


MN_MAJOR = [
    *((n, "mn", "k", BOX, 0) for n in (8, 24, 144, 256)),
    *((n, "k", "mn", BOX, 0) for n in (64, 192)),
    *((n, "mn", "mn", BOX, 0) for n in (64, 128, 256)),
    (128, "mn", "mn", 3 * BOX, 0),
    (64, "mn", "mn", BOX, 3),
    (128, "k", "mn", BOX, 2),
    (16, "mn", "k", BOX, 1),
]


@pytest.mark.parametrize("n, a_major, b_major, leading, skip", MN_MAJOR)
def test_wgmma_of_mn_major_operands_is_exact(n, a_major, b_major, leading, skip, device, accumulator_coordinates):
    a, b = (small_integers((rows, 64), BF16, device) for rows in (64, n))
    right = a[:, 16 * skip :].double() @ b[:, 16 * skip :].double().T
    if b_major == "mn":
        b = b.T.contiguous()
    if a_major == "mn":
        a = a.T.contiguous()
    make = lambda: [
        torch.full((128 * n // 2,), float("nan"), device=device),
        tensor_map(a, (64, 64), swizzle=128),
        tensor_map(b, (64, 64) if b_major == "mn" else (n, 64), swizzle=128),
    ]
    kernel = make_multiply_mn(n, a_major, b_major, leading, skip)
    size = BOX + max(n * 128, (n // 64 - 1) * leading + BOX if b_major == "mn" else 0)
    for out, *_ in runs(kernel, make, threads=128, count=1, shared_bytes=size):
        found = out.cpu().numpy().reshape(128, n // 2)
        assert (found == right.float().cpu().numpy()[accumulator_coordinates(n)]).all()


def make_fragment_arithmetic(n):
    """Make a kernel that applies one factor, then column factors from a tuple, then from shared memory."""
    fma, fma_columns, fma_shared, load = make_fma(n), make_fma_columns(n), make_fma_shared(n), make_load_shared(n)
    total_before, acc, size = (np.float32(1 / 3),) * (n // 2), (np.float32(0.7),) * (n // 2), n + 32

    @cuda.jit
    def kernel(out, x):
        factors = cuda.shared.array(size, float32, 16)
        t = cuda.threadIdx.x
        for i in range(t, size, 32):
            factors[i] = x[i]
        cuda.syncthreads()
        first = t * (n // 2) * 3
        total = fma(total_before, acc, x[t])
        for i in range(n // 2):
            out[first + i] = total[i]
        total = fma_columns(total, acc, load(factors, 4 * (t % 8)))
        for i in range(n // 2):
            out[first + n // 2 + i] = total[i]
        total = fma_shared(total, acc, factors, 4 * (t % 4))
        for i in range(n // 2):
            out[first + n + i] = total[i]

    return kernel


@pytest.mark.parametrize("n", [8, 24, 64])
def test_arithmetic_on_fragments(n, device):
    x = torch.randn(n + 32, generator=torch.Generator().manual_seed(n))
    make = lambda: [torch.zeros(32 * 3 * n // 2, device=device), x.to(device)]

    def fma(total, factor):
        """Round once, for values where an intermediate rounding to float64 does not matter."""
        return (total.astype(np.float64) + np.float64(np.float32(0.7)) * factor).astype(np.float32)

    t, j, h, i = np.ogrid[:32, : n // 8, :2, :2]
    numbers = x.numpy()
    first = fma(np.full((32, n // 8, 2, 2), np.float32(1 / 3)), numbers[:32, None, None, None])
    second = fma(first, numbers[4 * (t % 8) + 2 * j + i + 0 * h])
    third = fma(second, numbers[4 * (t % 4) + 2 * j + i + 0 * h])
    for out, _ in runs(make_fragment_arithmetic(n), make, count=2):
        for found, expected in zip(np.split(out.cpu().numpy().reshape(32, -1), 3, axis=1), (first, second, third)):
            assert (found == expected.reshape(32, -1)).all()


# --- matrices in shared memory --------------------------------------------------------------------------------------


@cuda.jit
def store_matrices(out, words, trans):
    """Store matrix i to rows from 8 i on, at a row pitch of 48 bytes, 16 bytes into each row."""
    smem = cuda.shared.array(32 * 24, uint16, 128)
    t = cuda.threadIdx.x
    for x in range(2):
        for i in range(t, 32 * 24, 32):
            smem[i] = 7
        cuda.syncwarp()
        a, b, c, d = words[t], words[32 + t], words[64 + t], words[96 + t]
        if trans:
            if x == 0:
                stmatrix_x2_trans(smem, 24 * t + 8, a, b)
            else:
                stmatrix_x4_trans(smem, 24 * t + 8, a, b, c, d)
        else:
            if x == 0:
                stmatrix_x2(smem, 24 * t + 8, a, b)
            else:
                stmatrix_x4(smem, 24 * t + 8, a, b, c, d)
        cuda.syncwarp()
        for i in range(t, 32 * 24, 32):
            out[x * 32 * 24 + i] = smem[i]
        cuda.syncwarp()


@pytest.mark.parametrize("trans", [0, 1])
def test_stmatrix(trans, device):
    words = RNG.integers(0, 2**32, (4, 32), dtype=np.uint32)
    lane, half = np.indices((32, 2))
    row, column = lane // 4, 2 * (lane % 4) + half
    row, column = (column, row) if trans else (row, column)
    right = np.full((2, 4, 8, 24), 7, np.uint16)
    for x, count in enumerate((2, 4)):
        for i in range(count):
            right[x, i, row, 8 + column] = words[i].view(np.uint16).reshape(32, 2)
    make = lambda: [
        torch.zeros(2 * 32 * 24, dtype=torch.uint16, device=device),
        torch.from_numpy(words.reshape(-1)).to(device),
        trans,
    ]
    for out, *_ in runs(store_matrices, make):
        assert (out.cpu().numpy().reshape(2, 4, 8, 24) == right).all()


@cuda.jit
def store_float_rows(out, x):
    """Store 32 columns of a warp's 16 rows to shared memory, and copy that."""
    smem, floats = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, float32, 1024)
    t = cuda.threadIdx.x
    values = (x[t], x[32 + t], x[64 + t], x[96 + t], x[128 + t], x[160 + t], x[192 + t], x[224 + t])
    values = values + (x[256 + t], x[288 + t], x[320 + t], x[352 + t])
    values = values + (x[384 + t], x[416 + t], x[448 + t], x[480 + t])
    st_shared_rows_f32(smem, (t >> 2) * 128 + ((((t & 3) >> 1) ^ (t >> 2)) << 4) + ((t & 1) << 3), values)
    cuda.syncwarp()
    for i in range(t, 512, 32):
        out[i] = floats[i]


def test_rows_of_floats(device):
    x = torch.randn(16, 32)
    lane, i = np.indices((32, 16))
    row, column = lane // 4 + 8 * (i >> 1 & 1), 8 * (i >> 2) + 2 * (lane % 4) + (i & 1)
    right = np.empty((16, 32), np.float32)
    right[row, column ^ (row % 8 << 2)] = x.numpy().T  # 4 floats are a vector of 16 bytes
    make = lambda: [torch.zeros(512, device=device), x.reshape(-1).to(device)]
    for out, _ in runs(store_float_rows, make, shared_bytes=2048):
        assert (out.cpu().numpy().reshape(16, 32) == right).all()


@cuda.jit(device=True)
def copy_chunk(first, values, weights, out, thread, scale):
    for i in range(len(values)):
        out[32 * (first + i) + thread] = values[i] * weights[i] * scale + float32(len(values))


copy_chunks = make_for_each_chunk(5, 2, copy_chunk, tuples=2)


@cuda.jit
def scale_in_chunks(out, x, scale):
    t = cuda.threadIdx.x
    values = x[t], x[32 + t], x[64 + t], x[96 + t], x[128 + t]
    copy_chunks(values, (float32(1), float32(2), float32(3), float32(4), float32(5)), out, t, scale)


def test_chunks_of_a_tuple(device):
    """The last of three chunks is shorter than the others."""
    x = small_integers((5, 32), torch.float32, "cpu")
    right = x * 3 * torch.arange(1, 6)[:, None] + torch.tensor([2, 2, 2, 2, 1])[:, None]
    for out, *_ in runs(scale_in_chunks, lambda: [torch.zeros(160, device=device), x.reshape(-1).to(device), 3.0]):
        assert (out.cpu().reshape(5, 32) == right).all()


# --- conversions ----------------------------------------------------------------------------------------------------


@cuda.jit
def convert(bf16, e4m3, floats, x):
    i = cuda.grid(1)
    bf16[i] = cvt_rn_bf16x2_f32(x[2 * i + 1], x[2 * i])
    pair = cvt_rn_satfinite_e4m3x2_f32(x[2 * i + 1], x[2 * i])
    e4m3[i] = pair
    floats[2 * i], floats[2 * i + 1] = e4m3x2_as_floats(pair)


def test_conversions_round_to_nearest(device):
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    codes = codes[codes == codes].sort().values
    between = (codes[1:] + codes[:-1]) / 2
    x = torch.cat([codes, between, torch.nextafter(between, between * 2), torch.nextafter(between, between * 0)])
    odd = [0.0, -0.0, 464.0, 465.0, 1e9, -1e9, math.inf, -math.inf, 2.0**-10, 2.0**-11, -(2.0**-10) * 1.01, 1e-40]
    bits = torch.from_numpy(RNG.integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32).copy())
    x = torch.cat([x, torch.tensor(odd), bits, torch.randn(4096), torch.tensor([math.nan] * 64)])
    x = x[: len(x) // 64 * 64]
    n = len(x) // 2
    make = lambda: [
        *(torch.zeros(n, dtype=torch.uint32, device=device) for _ in range(2)),
        torch.zeros(2 * n, device=device),
        x.to(device),
    ]
    finite = x == x
    right = x.clamp(-448, 448).to(E4M3)
    for bf16, e4m3, floats, _ in runs(convert, make, blocks=n // 32, count=1):
        found = bf16.cpu().view(BF16)
        assert torch.equal(found[finite], x.to(BF16)[finite]) and found[~finite].isnan().all()
        found = e4m3.cpu().view(torch.uint8).view(-1, 4)[:, :2].reshape(-1)
        assert (e4m3.cpu().numpy() < 1 << 16).all()
        assert torch.equal(found[finite], right.view(torch.uint8)[finite])
        assert found.view(E4M3).float()[~finite].isnan().all()
        decoded = floats.cpu()
        assert torch.equal(decoded[finite], right.float()[finite]) and decoded[~finite].isnan().all()


# --- warp specialisation --------------------------------------------------------------------------------------------

dec, inc = make_setmaxnreg_dec(40), make_setmaxnreg_inc(160)


@cuda.jit(launch_bounds=(256, 1))
def ping_pong(out):
    """One warpgroup fills a buffer and the other reads it, ten times, synchronised by two named barriers."""
    buffer = cuda.shared.array(1, int32)
    t = cuda.threadIdx.x
    if t < 128:
        dec()
        for iteration in range(10):
            bar_sync(1, 256)
            if t == 3:
                buffer[0] = iteration * iteration
            bar_arrive(2, 256)
    else:
        inc()
        for iteration in range(10):
            bar_arrive(1, 256)
            bar_sync(2, 256)
            out[iteration * 128 + t - 128] = buffer[0]


def test_named_barriers(device):
    make = lambda: [torch.zeros(10 * 128, dtype=torch.int32, device=device)]
    for (out,) in runs(ping_pong, make, threads=256):
        assert (out.view(10, 128).cpu() == torch.arange(10)[:, None] ** 2).all()


@cuda.jit
def elect_lane(out):
    t = cuda.threadIdx.x
    fence_acq_rel_sys()
    out[t] = elect_sync(FULL_MASK)
    out[64 + t] = elect_sync(FULL_MASK)
    out[128 + t] = 0
    if t % 32 >= 20:
        out[128 + t] = elect_sync(0xFFF00000)


def test_elect_sync_elects_one_fixed_lane(device):
    for (out,) in runs(elect_lane, lambda: [torch.zeros(192, dtype=torch.int32, device=device)], threads=64):
        first, second, third = out.view(3, 2, 32).cpu()
        assert (first.sum(1) == 1).all() and torch.equal(first, second)
        assert (third.sum(1) == 1).all() and not third[:, :20].any()


# --- GEMM -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("m, n, k, stages, blocks", [(M, N, 256, 2, 1), (200, 192, 640, 4, 2), (M, N, 128, 3, 1)])
def test_a_small_gemm(m, n, k, stages, blocks, device):
    a, b = torch.randn(m, k).to(E4M3).to(device), torch.randn(n, k).to(E4M3).to(device)
    right = (a.double() @ b.double().T * 0.5).to(BF16).double()

    def make():
        d = torch.full((m, n), math.nan, dtype=BF16, device=device)
        kept.append(d)
        maps = (
            tensor_map(a, (M, K), swizzle=128),
            tensor_map(b, (N, K), swizzle=128),
            tensor_map(d, (64, N), swizzle=128),
        )
        return [*maps, -(-m // M), -(-n // N), -(-k // K)]

    kept = []
    for _ in runs(make_gemm(stages), make, blocks=blocks, threads=384, count=4, shared_bytes=shared_bytes(stages)):
        error = (kept[-1].double() - right).norm() / right.norm()
        assert error < 3e-3


def make_block_arithmetic(n, width):
    """Make a kernel that applies one factor per row and block of columns."""
    fma, blocks = make_fma_blocks(n, width), n // width
    total_before, acc = (np.float32(1 / 3),) * (n // 2), (np.float32(0.7),) * (n // 2)

    @cuda.jit
    def kernel(out, x):
        t = cuda.threadIdx.x
        if blocks == 1:
            factors = x[t], x[t + 32]
        else:
            factors = x[t], x[t + 32], x[t + 64], x[t + 96], x[t + 128], x[t + 160]
        total = fma(total_before, acc, factors)
        for i in range(n // 2):
            out[t * (n // 2) + i] = total[i]

    return kernel


@pytest.mark.parametrize("n, width", [(64, 64), (192, 64)])
def test_factors_of_rows_and_blocks(n, width, device):
    x = torch.randn(32 * 2 * (n // width), generator=torch.Generator().manual_seed(n))
    make = lambda: [torch.zeros(32 * n // 2, device=device), x.to(device)]
    factors = x.numpy().reshape(n // width, 1, 2, 1, 32)  # block, column pair, row, column of the pair, lane
    wanted = np.float32(0.7).astype(np.float64) * factors + np.float64(np.float32(1 / 3))
    wanted = np.broadcast_to(wanted, (n // width, width // 8, 2, 2, 32)).reshape(n // 2, 32).T.astype(np.float32)
    for out, *_ in runs(make_block_arithmetic(n, width), make, threads=32):
        assert np.array_equal(out.cpu().numpy().reshape(32, n // 2), wanted)
