"""Conformance of GPU and simulator: small kernels, one per primitive, compared with NumPy.

The tests run on the GPU or in the simulator, whichever this process uses; passing on both shows that both agree.
Kernels with Numba's own primitives take NumPy arrays and are launched as in Numba. Kernels with `moe_numba.ptx` take
pointers and are launched by `moe_numba.runtime.launch`.
"""

import math
import warnings

import numpy as np
import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, int32, uint32, uint64

from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_gpu_u64,
    ld_relaxed_gpu_u64x2,
    st_relaxed_gpu_u64,
)
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
from moe_numba.ptx.memory import st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK, redux_sync_add_s32
from moe_numba.runtime.launch import launch

MAX_POLLS = 1 << 20  # bounds polling, so that a failing test on a GPU does not hang
LANES = np.arange(32)
RNG = np.random.default_rng(0)
WORDS = RNG.integers(0, 2**32, 32, dtype=np.uint32)
WORDS[:8] = 0, 1, 2, 0x80000000, 0xFFFFFFFF, 0x7FFFFFFF, 0xAAAAAAAA, 0x10000
INTS = WORDS.view(np.int32)
FLOATS = (RNG.standard_normal(32) * 10.0 ** RNG.integers(-6, 6, 32)).astype(np.float32)


def run(kernel, dtype, *args, threads=32, blocks=1, shape=None, shared_bytes=0):
    """Launch a kernel whose first argument is its output; by default one element per thread."""
    size = math.prod(threads) if isinstance(threads, tuple) else threads
    out = np.zeros(shape or blocks * size, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of small grids and host arrays, which are intended
        kernel[blocks, threads, 0, shared_bytes](out, *args)
        cuda.synchronize()
    return out


# --- indices --------------------------------------------------------------------------------------------------------


def test_indices():
    @cuda.jit
    def kernel(out):
        x, y, z = cuda.grid(3)
        at = x + cuda.gridsize(3)[0] * (y + cuda.gridsize(3)[1] * z)
        out[at, 0] = cuda.threadIdx.x + 10 * cuda.threadIdx.y + 100 * cuda.threadIdx.z
        out[at, 1] = cuda.blockIdx.x + 10 * cuda.blockIdx.y + 100 * cuda.blockIdx.z
        out[at, 2] = cuda.blockDim.x + 10 * cuda.blockDim.y + 100 * cuda.blockDim.z
        out[at, 3] = cuda.gridDim.x + 10 * cuda.gridDim.y + 100 * cuda.gridDim.z
        out[at, 4] = cuda.laneid

    block, grid = (4, 2, 8), (2, 3, 1)
    out = run(kernel, np.int32, threads=block, blocks=grid, shape=(8 * 6 * 8, 5))
    z, y, x = (a.reshape(-1) for a in np.indices((8, 6, 8)))
    assert (out[:, 0] == x % 4 + 10 * (y % 2) + 100 * (z % 8)).all()
    assert (out[:, 1] == x // 4 + 10 * (y // 2) + 100 * (z // 8)).all()
    assert (out[:, 2] == 4 + 20 + 800).all() and (out[:, 3] == 2 + 30 + 100).all()
    assert (out[:, 4] == (x % 4 + 4 * (y % 2) + 8 * (z % 8)) % 32).all()


def test_lanemask_and_warpsize():
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.x] = cuda.lanemask_lt() + cuda.warpsize

    assert (run(kernel, np.int64, threads=64) == np.tile((1 << LANES) - 1 + 32, 2)).all()


# --- shuffles -------------------------------------------------------------------------------------------------------


@cuda.jit
def shuffle_idx(out, x, d):
    out[cuda.laneid] = cuda.shfl_sync(FULL_MASK, x[cuda.laneid], d)


@cuda.jit
def shuffle_up(out, x, d):
    out[cuda.laneid] = cuda.shfl_up_sync(FULL_MASK, x[cuda.laneid], d)


@cuda.jit
def shuffle_down(out, x, d):
    out[cuda.laneid] = cuda.shfl_down_sync(FULL_MASK, x[cuda.laneid], d)


@cuda.jit
def shuffle_xor(out, x, d):
    out[cuda.laneid] = cuda.shfl_xor_sync(FULL_MASK, x[cuda.laneid], d)


SOURCES = [
    (shuffle_idx, lambda lane, d: lane * 0 + d % 32),
    (shuffle_up, lambda lane, d: np.where(lane >= d, lane - d, lane)),
    (shuffle_down, lambda lane, d: np.where(lane + d < 32, lane + d, lane)),
    (shuffle_xor, lambda lane, d: lane ^ d),
]


@pytest.mark.parametrize("kernel, source", SOURCES, ids=["idx", "up", "down", "xor"])
@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_shuffles_over_every_distance(kernel, source, dtype):
    x = RNG.integers(-(2**31), 2**31, 32).astype(dtype) * dtype(3)
    for d in range(32):
        assert (run(kernel, dtype, x, d) == x[source(LANES, d)]).all(), d


def test_shuffle_source_beyond_the_warp_wraps():
    assert (run(shuffle_idx, np.int32, INTS, 37) == INTS[5]).all()


def test_each_lane_selects_its_own_source():
    @cuda.jit
    def kernel(out, x, source):
        out[cuda.laneid] = cuda.shfl_sync(FULL_MASK, x[cuda.laneid], source[cuda.laneid])

    source = RNG.permutation(32).astype(np.int32)
    assert (run(kernel, np.int32, INTS, source) == INTS[source]).all()


def test_half_warps_shuffle_separately():
    @cuda.jit
    def kernel(out, x):
        lane = cuda.laneid
        v = x[lane]
        if lane < 16:
            for d in (8, 4, 2, 1):
                v += cuda.shfl_xor_sync(0x0000FFFF, v, d)
        else:
            for d in (8, 4, 2, 1):
                v = max(v, cuda.shfl_xor_sync(0xFFFF0000, v, d))
        out[lane] = v

    x = RNG.integers(-1000, 1000, 32)
    assert (run(kernel, np.int64, x) == np.repeat([x[:16].sum(), x[16:].max()], 16)).all()


# --- votes and matches ----------------------------------------------------------------------------------------------


@cuda.jit
def votes(out, x, mask):
    lane = cuda.laneid
    if mask >> lane & 1:
        out[lane, 0] = cuda.all_sync(mask, x[lane])
        out[lane, 1] = cuda.any_sync(mask, x[lane])
        out[lane, 2] = cuda.eq_sync(mask, x[lane])
        out[lane, 3] = cuda.ballot_sync(mask, x[lane])


@pytest.mark.parametrize("mask", [FULL_MASK, 0x0F0F00FF, 0x80000001, 0x10])
@pytest.mark.parametrize("yes", [0, FULL_MASK, 0x0F0F00FF, 0x80000000, 0x12345678])
def test_votes_under_masks(mask, yes):
    x = (yes >> LANES & 1).astype(np.int32)
    out = run(votes, np.int64, x, mask, shape=(32, 4))
    voted = x[(mask >> LANES & 1) == 1]
    ballot = np.uint32(mask & yes).view(np.int32)  # Numba's ballot is an int32
    right = [voted.all(), voted.any(), len(set(voted)) == 1, ballot]
    assert (out == np.where((mask >> LANES & 1)[:, None], np.array(right, np.int64), 0)).all()


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.float32, np.float64])
def test_match_any(dtype):
    @cuda.jit
    def kernel(out, x):
        out[cuda.laneid] = cuda.match_any_sync(FULL_MASK, x[cuda.laneid])

    x = RNG.integers(-3, 3, 32).astype(dtype)
    masks = [sum(1 << int(lane) for lane in np.flatnonzero(x == v)) for v in x]
    assert (run(kernel, np.int32, x).view(np.uint32) == masks).all()


@pytest.mark.parametrize("odd_one", [None, 13])
def test_match_all(odd_one):
    @cuda.jit
    def kernel(out, x):
        out[cuda.laneid, 0], out[cuda.laneid, 1] = cuda.match_all_sync(FULL_MASK, x[cuda.laneid])

    x = np.full(32, 7, np.int32)
    if odd_one:
        x[odd_one] = 8
    assert (run(kernel, np.int32, x, shape=(32, 2)) == ([0, 0] if odd_one else [-1, 1])).all()


# --- barriers -------------------------------------------------------------------------------------------------------


def test_syncwarp_orders_shared_memory():
    @cuda.jit
    def kernel(out, x):
        lane = cuda.laneid
        s = cuda.shared.array(32, int32)
        s[lane] = x[lane]
        cuda.syncwarp()
        if lane < 16:
            v = s[15 - lane]
            cuda.syncwarp(0x0000FFFF)
            s[lane] = v
            cuda.syncwarp(0x0000FFFF)
        out[lane] = s[lane ^ 1] if lane < 16 else s[lane]

    right = INTS.copy()
    right[:16] = INTS[:16][::-1][LANES[:16] ^ 1]
    assert (run(kernel, np.int32, INTS) == right).all()


def test_syncthreads_orders_shared_memory():
    @cuda.jit
    def kernel(out, x):
        t = cuda.threadIdx.x
        s = cuda.shared.array(256, float32)
        s[t] = x[t]
        cuda.syncthreads()
        step = 128
        while step > 0:
            if t < step:
                s[t] += s[t + step]
            cuda.syncthreads()
            step //= 2
        out[t] = s[0]

    x = RNG.integers(-1000, 1000, 256).astype(np.float32)
    assert (run(kernel, np.float32, x, threads=256) == x.sum()).all()


def test_voting_barriers():
    @cuda.jit
    def kernel(out, x):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.syncthreads_count(x[t])
        out[t, 1] = cuda.syncthreads_and(x[t])
        out[t, 2] = cuda.syncthreads_or(x[t])

    for x in (np.zeros(96, np.int32), np.ones(96, np.int32), RNG.integers(0, 2, 96).astype(np.int32)):
        out = run(kernel, np.int32, x, threads=96, shape=(96, 3))
        assert (out[:, 0] == x.sum()).all()
        assert ((out[:, 1:] != 0) == [x.all(), x.any()]).all()


def test_dynamic_shared_memory():
    @cuda.jit
    def kernel(out):
        t = cuda.threadIdx.x
        s = cuda.shared.array(0, int32)
        s[t] = t * t
        cuda.syncthreads()
        out[t] = s[63 - t]

    assert (run(kernel, np.int32, threads=64, shared_bytes=256) == np.arange(64)[::-1] ** 2).all()


def test_blocks_run_concurrently():
    @cuda.jit
    def kernel(out, flag):
        if cuda.threadIdx.x == 0:
            if cuda.blockIdx.x == 0:
                while cuda.atomic.add(flag, 0, 0) == 0:
                    cuda.nanosleep(100)
                cuda.threadfence()
                out[0] = out[1] + 1
            else:
                out[1] = 41
                cuda.threadfence()
                cuda.atomic.exch(flag, 0, 1)

    assert run(kernel, np.int32, np.zeros(1, np.int32), blocks=2, shape=2).tolist() == [42, 41]


# --- atomics --------------------------------------------------------------------------------------------------------


def test_atomic_add_returns_each_value_once():
    @cuda.jit
    def kernel(out, counter):
        out[cuda.grid(1)] = cuda.atomic.add(counter, 1, 1)

    counter = np.array([5, 7, 9], np.int32)
    assert sorted(run(kernel, np.int32, counter, threads=64, blocks=3)) == list(range(7, 7 + 192))
    assert counter.tolist() == [5, 7 + 192, 9]


@cuda.jit
def every_atomic(out, x):
    v = x[cuda.grid(1)]
    cuda.atomic.add(out, 0, v)
    cuda.atomic.sub(out, 1, v)
    cuda.atomic.max(out, 2, v)
    cuda.atomic.min(out, 3, v)
    cuda.atomic.and_(out, 4, v)
    cuda.atomic.or_(out, 5, v)
    cuda.atomic.xor(out, 6, v)


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_atomics_on_integers(dtype):
    x = RNG.integers(0, 2**32, 96, dtype=np.uint32).view(dtype)
    out = run(every_atomic, dtype, x, threads=32, blocks=3, shape=7)
    zero = np.zeros(1, dtype)
    with np.errstate(over="ignore"):
        right = [x.sum(dtype=dtype), zero[0] - x.sum(dtype=dtype), max(x.max(), 0), min(x.min(), 0), 0]
    right += [np.bitwise_or.reduce(x), np.bitwise_xor.reduce(x)]
    assert out.tolist() == [int(v) for v in right]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_atomics_on_floats_and_shared_memory(dtype):
    kind = float32 if dtype is np.float32 else np.float64

    @cuda.jit
    def kernel(out, x):
        t = cuda.threadIdx.x
        s = cuda.shared.array(1, kind)
        if t == 0:
            s[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(s, 0, x[t])
        cuda.atomic.max(out, 1, x[t])
        cuda.syncthreads()
        if t == 0:
            out[0] = s[0]

    x = RNG.integers(-1000, 1000, 128).astype(dtype)
    assert run(kernel, dtype, x, threads=128, shape=2).tolist() == [x.sum(), x.max()]


def test_atomic_exchange_compare_increment_decrement():
    @cuda.jit
    def kernel(out, cells):
        t = cuda.threadIdx.x
        out[t, 0] = cuda.atomic.cas(cells, 0, 0, t + 1)
        out[t, 1] = cuda.atomic.exch(cells, 1, t + 1)
        out[t, 2] = cuda.atomic.inc(cells, 2, 4)
        out[t, 3] = cuda.atomic.dec(cells, 3, 4)

    cells = np.zeros(4, np.uint32)
    out = run(kernel, np.uint32, cells, shape=(32, 4))
    winner = int(cells[0])
    assert (out[:, 0] == np.where(LANES + 1 == winner, 0, winner)).all()
    assert sorted([*out[:, 1], cells[1]]) == list(range(33))
    assert sorted(out[:, 2]) == sorted(i % 5 for i in range(32)) and cells[2] == 32 % 5
    assert sorted(out[:, 3]) == sorted(-i % 5 for i in range(32)) and cells[3] == -32 % 5


# --- bits and numbers -----------------------------------------------------------------------------------------------


def bits(word, width=32):
    return f"{int(word) % (1 << width):0{width}b}"


def test_bit_counting():
    @cuda.jit
    def kernel(out, words, ints):
        t = cuda.laneid
        out[t, 0] = cuda.popc(words[t])
        out[t, 1] = cuda.clz(words[t])
        out[t, 2] = cuda.ffs(words[t])
        out[t, 3] = cuda.brev(words[t])
        out[t, 4] = cuda.popc(ints[t])
        out[t, 5] = cuda.clz(ints[t])
        out[t, 6] = cuda.ffs(ints[t])

    out = run(kernel, np.int64, WORDS, INTS, shape=(32, 7))
    for word, row in zip(WORDS, out):
        b = bits(word)
        popc, clz, ffs = b.count("1"), 32 - len(b.lstrip("0")), (b[::-1].find("1") + 1)
        assert row.tolist() == [popc, clz, ffs, int(b[::-1], 2), popc, clz, ffs]


def test_64_bit_counting():
    @cuda.jit
    def kernel(out, x):
        t = cuda.laneid
        out[t, 0], out[t, 1], out[t, 2] = cuda.popc(x[t]), cuda.clz(x[t]), cuda.ffs(x[t])

    x = (WORDS.astype(np.uint64) << np.uint64(32)) | WORDS[::-1]
    for word, row in zip(x, run(kernel, np.int64, x, shape=(32, 3))):
        b = bits(word, 64)
        assert row.tolist() == [b.count("1"), 64 - len(b.lstrip("0")), b[::-1].find("1") + 1]


@pytest.mark.parametrize("x", [INTS, WORDS], ids=["int32", "uint32"])
def test_integers_wrap_around_when_stored(x):
    @cuda.jit
    def kernel(out, x, y):
        t = cuda.laneid
        out[t, 0] = x[t] + y[t]
        out[t, 1] = x[t] - y[t]
        out[t, 2] = x[t] * y[t]
        out[t, 3] = x[t] >> 3
        out[t, 4] = x[t] << 3
        out[t, 5] = x[t] ^ y[t]

    y, big = np.roll(x, 5), x.astype(np.int64)
    right = [big + y, big - y, [int(a) * int(b) for a, b in zip(x, y)], big >> 3, big << 3, big ^ y]
    right = np.array([[int(v) & FULL_MASK for v in column] for column in right], np.uint32).T
    assert (run(kernel, x.dtype, x, y, shape=(32, 6)).view(np.uint32) == right).all()


def test_float32_is_rounded_after_each_operation():
    @cuda.jit
    def kernel(out, x, y):
        t = cuda.laneid
        out[t, 0] = x[t] + y[t]
        out[t, 1] = x[t] * y[t]
        out[t, 2] = x[t] / y[t]
        out[t, 3] = math.sqrt(abs(x[t]))
        out[t, 4] = (x[t] + y[t]) - x[t]

    y = np.roll(FLOATS, 7)
    right = [FLOATS + y, FLOATS * y, FLOATS / y, np.sqrt(abs(FLOATS)), (FLOATS + y) - FLOATS]
    assert (run(kernel, np.float32, FLOATS, y, shape=(32, 5)) == np.array(right).T).all()


def test_conversions():
    @cuda.jit
    def kernel(out, floats, ints):
        t = cuda.laneid
        out[t, 0] = int32(floats[t])
        out[t, 1] = int32(float32(ints[t]) * float32(0.5))
        out[t, 2] = uint32(ints[t] & 0xFFFF)
        out[t, 3] = int32(uint32(-1 - t))

    floats = (RNG.standard_normal(32) * 1e6).astype(np.float32)
    right = [
        floats.astype(np.int32),
        (INTS.astype(np.float32) * np.float32(0.5)).astype(np.int32),
        INTS & 0xFFFF,
        -1 - LANES,
    ]
    assert (run(kernel, np.int32, floats, INTS, shape=(32, 4)) == np.array(right).T).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_fma_rounds_once(dtype):
    @cuda.jit
    def kernel(out, x, y, z):
        t = cuda.laneid
        out[t] = cuda.fma(x[t], y[t], z[t])

    from fractions import Fraction

    x, y = RNG.standard_normal((2, 32)).astype(dtype)
    z = (-x * y).astype(dtype) * np.where(LANES % 2, 1, dtype(1 + 2 ** -(9 + LANES / 4))).astype(dtype)
    out = run(kernel, dtype, x, y, z)
    for got, a, b, c in zip(out, x, y, z):
        exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c))
        error = abs(Fraction(float(got)) - exact)
        for neighbour in (np.nextafter(got, dtype(np.inf)), np.nextafter(got, dtype(-np.inf))):
            assert error <= abs(Fraction(float(neighbour)) - exact)


def test_selection_and_cube_root():
    @cuda.jit
    def kernel(out, x):
        t = cuda.laneid
        out[t, 0] = cuda.selp(x[t] > 0, x[t], 2 * x[t])
        out[t, 1] = cuda.cbrt(x[t])

    out = run(kernel, np.float64, FLOATS.astype(np.float64), shape=(32, 2))
    assert (out[:, 0] == np.where(FLOATS > 0, FLOATS, FLOATS.astype(np.float64) * 2)).all()
    np.testing.assert_allclose(out[:, 1], np.cbrt(FLOATS.astype(np.float64)), rtol=1e-14)


# --- functions and arrays -------------------------------------------------------------------------------------------


def test_device_functions_closures_and_local_arrays():
    columns = 5

    @cuda.jit(device=True)
    def extremes(values):
        low, high = values[0], values[0]
        for i in range(1, columns):
            low, high = min(low, values[i]), max(high, values[i])
        return low, high

    @cuda.jit
    def kernel(out, x):
        t = cuda.laneid
        values = cuda.local.array(columns, float32)
        for i in range(columns):
            values[i] = x[t, i]
        low, high = extremes(values)
        out[t] = high - low

    x = RNG.standard_normal((32, columns)).astype(np.float32)
    assert (run(kernel, np.float32, x) == x.max(1) - x.min(1)).all()


def test_block_wide_scan():
    """Combine primitives: an inclusive scan over a block, by shuffles and one barrier."""

    @cuda.jit
    def kernel(out, x):
        t, lane = cuda.threadIdx.x, cuda.laneid
        sums = cuda.shared.array(8, int32)
        v = x[t]
        d = 1
        while d < 32:
            other = cuda.shfl_up_sync(FULL_MASK, v, d)
            if lane >= d:
                v = int32(v + other)
            d *= 2
        if lane == 31:
            sums[t // 32] = v
        cuda.syncthreads()
        for w in range(t // 32):
            v = int32(v + sums[w])
        out[t] = v

    x = RNG.integers(-1000, 1000, 256).astype(np.int32)
    assert (run(kernel, np.int32, x, threads=256) == x.cumsum()).all()


# --- PTX instructions -----------------------------------------------------------------------------------------------


def runs(kernel, device, *args, threads=32, blocks=1, **options):
    """Launch a kernel on copies of the NumPy arrays among its arguments, and yield the arrays afterwards.

    In the simulator it runs under ten seeds, with preemption under odd ones; on a GPU once.
    """
    for seed in range(10 if simulator.ENABLED else 1):
        tensors = [torch.from_numpy(a).clone().to(device) if isinstance(a, np.ndarray) else a for a in args]
        with simulator.seed(seed, preempt=0.2 if seed % 2 else 0.0):
            launch(kernel, blocks, threads, *tensors, **options)
        yield [t.cpu().numpy() for t in tensors if isinstance(t, torch.Tensor)]


def test_a_16_byte_store_leaves_neighbours_unchanged(device):
    @cuda.jit
    def kernel(out, x):
        t = cuda.threadIdx.x
        st_global_s32x4(out, 8 * t + 4, x[4 * t], x[4 * t + 1], x[4 * t + 2], x[4 * t + 3])

    for out, _ in runs(kernel, device, np.full(64, -7, np.int32), INTS, threads=8):
        assert (out.reshape(8, 2, 4)[:, 0] == -7).all()
        assert (out.reshape(8, 2, 4)[:, 1] == INTS.reshape(8, 4)).all()


def test_redux_sync_add(device):
    @cuda.jit
    def kernel(out, x):
        lane = cuda.laneid
        out[lane] = redux_sync_add_s32(FULL_MASK, x[lane])
        if lane < 12:
            out[lane + 32] = redux_sync_add_s32(0x00000FFF, x[lane])
        else:
            out[lane + 32] = redux_sync_add_s32(0xFFFFF000, x[lane])

    lowest = np.full(32, -(2**31), np.int32)
    for x in (INTS, INTS | lowest, -LANES.astype(np.int32), lowest, ~lowest):  # all but the third wrap around
        parts = np.repeat([part.sum(dtype=np.int32) for part in (x, x[:12], x[12:])], [32, 12, 20])
        for out, _ in runs(kernel, device, np.zeros(64, np.int32), x):
            assert (out == parts).all()


def test_blocks_exchange_64_bit_words(device):
    """A 64-bit store is single-copy atomic: a reader that polls one half sees both halves change."""

    @cuda.jit
    def kernel(out, shared, words):
        block, blocks, t = cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x
        if t == 0:
            st_relaxed_gpu_u64(shared, 2 * block + 4, words[block])
        if t < blocks:
            watched = uint64(FULL_MASK) << uint64(t % 2 * 32)
            low, high, polls = uint64(0), uint64(0), 0
            while (low & watched == uint64(0) or high & watched == uint64(0)) and polls < MAX_POLLS:
                low, high = ld_relaxed_gpu_u64x2(shared, t // 2 * 4 + 4)
                polls += 1
            out[2 * cuda.grid(1)] = low
            out[2 * cuda.grid(1) + 1] = high

    words = (WORDS[2:10].astype(np.uint64) << np.uint64(32)) | WORDS[10:18]
    empty = np.zeros(8 * 32 * 2, np.uint64), np.zeros(4 + 2 * 8 + 4, np.int32)
    for out, shared, _ in runs(kernel, device, *empty, words, blocks=8, cooperative=True):
        assert (out.reshape(8, 32, 2)[:, :8] == words.reshape(4, 2).repeat(2, axis=0)).all()
        assert (shared[4:-4].view(np.uint64) == words).all() and not shared[:4].any() and not shared[-4:].any()


def test_blocks_poll_a_64_bit_word(device):
    """Each block waits for the word of the next one, of which both halves change at once."""

    @cuda.jit
    def kernel(out, shared, words):
        block, blocks, word, polls = cuda.blockIdx.x, cuda.gridDim.x, uint64(0), 0
        st_relaxed_gpu_u64(shared, 2 * block + 2, words[block])
        while word >> uint64(32) == uint64(0) and polls < MAX_POLLS:
            word = ld_relaxed_gpu_u64(shared, 2 * ((block + 1) % blocks) + 2)
            polls += 1
        out[block] = word

    words = (WORDS[2:10].astype(np.uint64) << np.uint64(32)) | WORDS[10:18]
    empty = np.zeros(8, np.uint64), np.zeros(2 + 2 * 8 + 2, np.int32)
    for out, shared, _ in runs(kernel, device, *empty, words, blocks=8, threads=1, cooperative=True):
        assert (out == np.roll(words, -1)).all()
        assert (shared[2:-2].view(np.uint64) == words).all() and not shared[:2].any() and not shared[-2:].any()


@pytest.mark.parametrize("step", [3, -5])
def test_blocks_synchronize_on_a_counter(step, device):
    @cuda.jit
    def kernel(tickets, counts, step, end):
        if cuda.threadIdx.x == 0:
            tickets[cuda.blockIdx.x] = atom_add_relaxed_gpu_s32(counts, 1, step)
            polls = 0
            while ld_relaxed_gpu_s32(counts, 1) != end and polls < MAX_POLLS:
                polls += 1
            tickets[cuda.gridDim.x + cuda.blockIdx.x] = ld_relaxed_gpu_s32(counts, 1)

    start = 2**31 - 10 if step > 0 else -(2**31) + 10
    values = (start + step * np.arange(9)).astype(np.int32)  # wraps around
    end = int(values[8])
    before = np.zeros(16, np.int32), np.array([1, start, 2], np.int32)
    for tickets, counts in runs(kernel, device, *before, step, end, blocks=8, cooperative=True):
        assert sorted(tickets[:8]) == sorted(values[:8])
        assert (tickets[8:] == end).all() and counts.tolist() == [1, end, 2]


def test_distributed_shared_memory(device):
    @cuda.jit
    def kernel(out, x):
        one = cuda.shared.array(4, int32)
        four = cuda.shared.array(8, int32)
        block, t, rank, ranks = cuda.blockIdx.x, cuda.threadIdx.x, cluster_ctarank(), cluster_nctarank()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if t == 0:
            st_cluster_s32(one, 3, (rank + 1) % ranks, x[block])
            st_cluster_s32x4(four, 4, (rank + 3) % ranks, x[block], x[block + 8], x[block + 16], x[block + 24])
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if t == 33:
            out[12 * block], out[12 * block + 1] = rank, ranks
            out[12 * block + 2], out[12 * block + 3] = one[3], four[6]
            out[12 * block + 4] = ld_cluster_s32(one, 3, (rank + 2) % ranks)
            a, b, c, d = ld_cluster_s32x4(four, 4, (rank + 2) % ranks)
            out[12 * block + 5], out[12 * block + 6], out[12 * block + 7], out[12 * block + 8] = a, b, c, d
        barrier_cluster_arrive()
        barrier_cluster_wait()

    rank = np.arange(8) % 4
    first, values = np.arange(8) - rank, INTS.reshape(4, 8)

    def of(shift):
        return values[:, first + (rank + shift) % 4]

    right = [rank, rank * 0 + 4, of(-1)[0], of(1)[2], of(1)[0], *of(3)]
    for out, _ in runs(kernel, device, np.zeros(96, np.int32), INTS, threads=64, blocks=8, cluster=4):
        assert (out.reshape(8, 12)[:, :9] == np.array(right).T).all()
