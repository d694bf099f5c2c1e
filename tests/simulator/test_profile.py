"""Profiler of the simulator: kernels whose counters are known exactly."""

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from helpers.hopper_gemm import K, M, N, make_gemm, shared_bytes
from numba import cuda, float32, int32

from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, st_cluster_s32
from moe_numba.ptx.cp_async import cp_async_16, cp_async_commit_group, make_cp_async_wait_group
from moe_numba.ptx.matrix import stmatrix_x2
from moe_numba.ptx.memory import ld_global_s32x4, ld_shared_s32x4, st_shared_s32x4
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import disassembler
from moe_numba.runtime.tensor_map import tensor_map
from moe_numba.simulator.core.scheduler import override_settings
from moe_numba.simulator.memory_model.ranks import pointer_at
from moe_numba.simulator.profiler.bank_conflicts import count_wavefronts
from moe_numba.simulator.profiler.coalescing import sectors_of
from moe_numba.simulator.profiler.counters import METRICS
from moe_numba.simulator.profiler.occupancy import gpu_properties, occupancy
from moe_numba.simulator.profiler.report import source_text
from moe_numba.simulator.vector import launch as launches

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

wait_for_copies = make_cp_async_wait_group(0)


def profiled(kernel, grid, block, *args, **options):
    """Run a kernel once; return its counters."""
    with simulator.profile() as p:
        simulator.run(kernel, grid, block, args, **options)
    (result,) = p.kernels
    return result


def line(result, text):
    """Return the counters of the only line of a kernel's source that contains `text`."""
    lines, first = inspect.getsourcelines(result.function)
    (number,) = [first + i for i, source in enumerate(lines) if text in source]
    return result[number]


def line_of(result, text):
    """Return the counters of the only executed line that contains `text`, of the kernel or a device function."""
    (found,) = [found for found in result.lines if text in source_text(found)]
    return found


@cuda.jit
def copy(x, y, stride, first):
    i = cuda.grid(1)
    y[i] = x[first + i * stride]


# --- global memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride, sectors", [(0, 1), (1, 4), (2, 8), (8, 32), (32, 32)])
def test_sectors_per_request_of_strided_loads(stride, sectors):
    x, y = np.zeros(64 * 32, np.float32), np.zeros(64, np.float32)
    copied = line(profiled(copy, 2, 32, x, y, stride, 0), "y[i] = x")
    assert copied.executions == copied.global_load_requests == copied.global_store_requests == 2
    assert copied.global_load_sectors == 2 * sectors
    assert copied.global_store_sectors == 2 * 4
    assert copied.requested_bytes == 2 * (128 + 128)
    assert copied.transferred_bytes == 2 * 32 * (sectors + 4)
    assert copied.vector_widths == [4]


@pytest.mark.parametrize("dtype, sectors", [(np.int8, 1), (np.float16, 2), (np.float32, 4), (np.float64, 8)])
def test_sectors_per_request_by_type(dtype, sectors):
    x, y = np.zeros(32, dtype), np.zeros(32, dtype)
    assert line(profiled(copy, 1, 32, x, y, 1, 0), "y[i] = x").global_load_sectors == sectors


def test_a_misaligned_copy_touches_one_more_sector():
    x, y = np.zeros(40, np.float32), np.zeros(32, np.float32)
    assert line(profiled(copy, 1, 32, x, y, 1, 1), "y[i] = x").sectors_per_request == (5 + 4) / 2


def test_an_array_starts_at_a_sector_and_its_view_does_not():
    x, y = np.zeros(40, np.float32), np.zeros(40, np.float32)
    assert line(profiled(copy, 1, 32, x[1:], y[8:], 1, 0), "y[i] = x").sectors_per_request == (5 + 4) / 2


def test_tensors_and_pointers_are_counted():
    torch = pytest.importorskip("torch")
    x, y = torch.zeros(64), torch.zeros(64)
    result = profiled(copy, 1, 32, simulator.pointer(x[1:]), y[8:], 1, 0)
    copied = line(result, "y[i] = x")
    assert (copied.global_load_sectors, copied.global_store_sectors) == (5, 4)


def test_vector_loads_and_stores_are_one_request():
    @cuda.jit
    def kernel(x, y):
        i = cuda.threadIdx.x
        v = ld_global_s32x4(x, 4 * i)
        y[i] = v[0] + v[3]

    x, y = np.arange(128, dtype=np.int32), np.zeros(32, np.int32)
    loaded = line(profiled(kernel, 1, 32, simulator.pointer(x), y), "ld_global")
    assert (loaded.global_load_requests, loaded.global_load_sectors, loaded.vector_widths) == (1, 16, [16])


def test_loads_of_one_line_are_separate_requests():
    @cuda.jit
    def kernel(x, y):
        i = cuda.threadIdx.x
        y[i] = x[i] + x[i + 32] + x[i]

    result = profiled(kernel, 1, 32, np.zeros(64, np.float32), np.zeros(32, np.float32))
    assert line(result, "y[i]").global_load_requests == 3


def test_stores_to_a_slice_count_each_element():
    @cuda.jit
    def kernel(y):
        y[cuda.threadIdx.x, :] = float32(1)

    stored = line(profiled(kernel, 1, 32, np.zeros((32, 2), np.float32)), "y[cuda")
    assert (stored.global_store_requests, stored.global_store_sectors) == (2, 16)


def test_weak_memory_does_not_change_the_counts():
    with simulator.weak_memory():
        result = profiled(copy, 2, 32, np.zeros(64, np.float32), np.zeros(64, np.float32), 1, 0)
    assert line(result, "y[i] = x").global_load_sectors == 8


def test_local_arrays_are_not_counted():
    @cuda.jit
    def kernel(y):
        a = cuda.local.array(2, float32)
        a[0] = float32(1)
        y[cuda.threadIdx.x] = a[0]

    result = profiled(kernel, 1, 32, np.zeros(32, np.float32))
    assert result.total.global_store_requests == 1
    assert result.total.global_load_requests == 0


def test_cp_async_counts_sectors_and_bytes():
    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array(128, float32, 16)
        i = cuda.threadIdx.x
        cp_async_16(tile, 4 * i, x, 4 * i, 16)
        cp_async_commit_group()
        wait_for_copies()
        y[i] = tile[4 * i]

    result = profiled(kernel, 1, 32, simulator.pointer(np.zeros(128, np.float32)), np.zeros(32, np.float32))
    copied = line(result, "cp_async_16")
    assert copied.accesses["global", "cp.async", 16].sectors == 16
    assert copied.async_bytes == 512
    assert copied.global_load_requests == 0
    assert line(result, "wait_for_copies").waits.keys() <= {"cp.async.wait_group"}


# --- shared memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pitch, wavefronts", [(32, 32), (33, 1), (34, 2)])
def test_bank_conflicts_of_a_transposed_tile(pitch, wavefronts):
    @cuda.jit
    def transpose(x, y):
        tile = cuda.shared.array((32, pitch), float32)
        column = cuda.threadIdx.x
        for row in range(cuda.threadIdx.y, 32, cuda.blockDim.y):
            tile[row, column] = x[row, column]
        cuda.syncthreads()
        for row in range(cuda.threadIdx.y, 32, cuda.blockDim.y):
            y[row, column] = tile[column, row]

    x, y = np.random.rand(32, 32).astype(np.float32), np.zeros((32, 32), np.float32)
    result = profiled(transpose, 1, (32, 4), x, y)
    assert (y == x.T).all()
    stored, loaded = line(result, "tile[row, column]"), line(result, "tile[column, row]")
    assert (stored.shared_store_requests, stored.shared_store_wavefronts, stored.bank_conflicts) == (32, 32, 0)
    assert (loaded.shared_load_requests, loaded.shared_load_wavefronts) == (32, 32 * wavefronts)
    assert loaded.bank_conflicts == result.total.bank_conflicts == 32 * (wavefronts - 1)
    assert loaded.shared_bytes == 4096


@pytest.mark.parametrize(
    "stride, size, load, expected",
    [
        *((1, 4, True, (1, 1)), (2, 4, True, (2, 1)), (32, 4, False, (32, 1)), (33, 4, True, (1, 1))),
        *((0, 4, True, (1, 1)), (0, 4, False, (1, 1)), (1, 2, True, (1, 1)), (1, 1, True, (1, 1))),
        # Half-warps and quarter-warps: 2 and 4 wavefronts without a conflict.
        *((1, 8, True, (2, 2)), (2, 8, True, (4, 2)), (16, 8, True, (32, 2)), (17, 8, False, (2, 2))),
        *((1, 16, True, (4, 4)), (2, 16, True, (8, 4)), (8, 16, True, (32, 4)), (9, 16, True, (4, 4))),
        # A broadcast of a vector shares wavefronts when it is loaded.
        *((0, 8, True, (1, 1)), (0, 8, False, (2, 2)), (0, 16, True, (2, 2)), (0, 16, False, (4, 4))),
    ],
)
def test_wavefronts_by_width(stride, size, load, expected):
    assert count_wavefronts({lane: lane * stride * size for lane in range(32)}, size, load) == expected


def test_inactive_parts_of_a_warp_need_no_wavefronts():
    assert count_wavefronts({lane: 16 * lane for lane in range(8)}, 16) == (1, 1)
    assert count_wavefronts({0: 0, 31: 496}, 16) == (2, 2)


def test_pairs_of_lanes_that_load_one_address_share_wavefronts():
    assert count_wavefronts({lane: lane // 2 * 16 for lane in range(32)}, 16) == (2, 2)
    assert count_wavefronts({lane: (lane & ~2) * 16 for lane in range(32)}, 16) == (4, 2)


def test_shared_vector_accesses():
    @cuda.jit
    def kernel(y):
        tile = cuda.shared.array(256, int32, 16)
        i = int32(cuda.threadIdx.x)
        st_shared_s32x4(tile, 4 * i, i, i, i, i)
        cuda.syncwarp()
        y[i] = ld_shared_s32x4(tile, 8 * (i % 16) + 4 * (i // 16))[0]

    result = profiled(kernel, 1, 32, np.zeros(32, np.int32))
    stored, loaded = line(result, "st_shared"), line(result, "ld_shared")
    assert (stored.shared_store_requests, stored.shared_store_wavefronts, stored.bank_conflicts) == (1, 4, 0)
    assert (loaded.shared_load_wavefronts, loaded.bank_conflicts) == (8, 4)


@pytest.mark.parametrize("pitch, conflicts", [(16, 0), (128, 14), (144, 0)])
def test_a_matrix_store_takes_one_wavefront_per_matrix_without_conflicts(pitch, conflicts):
    @cuda.jit
    def kernel():
        tile = cuda.shared.array(16 * 144, np.uint8, 16)
        stmatrix_x2(tile, pitch * (cuda.threadIdx.x % 16), np.uint32(1), np.uint32(2))

    stored = line(profiled(kernel, 1, 32), "stmatrix_x2")
    assert (stored.shared_store_requests, stored.bank_conflicts) == (1, conflicts)
    assert stored.shared_store_wavefronts == 2 + conflicts


def test_distributed_shared_memory_has_a_space_of_its_own():
    @cuda.jit
    def kernel(y):
        tile = cuda.shared.array(32, int32)
        i = int32(cuda.threadIdx.x)
        barrier_cluster_arrive()
        barrier_cluster_wait()
        st_cluster_s32(tile, i, np.uint32(1 - cuda.blockIdx.x), i)
        barrier_cluster_arrive()
        barrier_cluster_wait()
        y[cuda.grid(1)] = tile[i]

    result = profiled(kernel, 2, 32, np.zeros(64, np.int32), cluster=2)
    assert result.total.distributed_shared_bytes == 2 * 128
    assert result.total.shared_store_requests == 0
    assert result.total.shared_load_requests == 2


# --- asynchronous operations ----------------------------------------------------------------------------------------


def profile_of_a_gemm(gpu=None):
    """Profile one tile of `helpers.hopper_gemm` with two stages of k."""
    torch = pytest.importorskip("torch")
    a, b = (torch.zeros(rows, 2 * K, dtype=torch.uint8).view(torch.float8_e4m3fn) for rows in (M, N))
    d = torch.zeros(M, N, dtype=torch.bfloat16)
    maps = (tensor_map(x, box, swizzle=128) for x, box in ((a, (M, K)), (b, (N, K)), (d, (64, N))))
    with simulator.profile(gpu) as p:
        launch(make_gemm(2), 1, 384, *maps, 1, 1, 2, shared_bytes=shared_bytes(2))
    return p


def test_tma_copies_and_wgmma_by_shape():
    gemm = profile_of_a_gemm()["gemm"]
    operations = {name: (o.count, o.bytes) for name, o in gemm.total.operations.items()}
    assert operations == {
        "cp.async.bulk.tensor.2d to shared memory [128 x 128]": (2, 2 * M * K),
        "cp.async.bulk.tensor.2d to shared memory [128 x 64]": (2, 2 * N * K),
        "cp.async.bulk.tensor.2d to global memory [64 x 64]": (2, 2 * 64 * 64 * 2),
        "wgmma m64n64k32 e4m3": (2 * 2 * 4, 2 * 2 * 4 * (64 + N) * 32),  # warpgroups, stages, steps of 32 bytes
    }
    assert gemm.total.async_bytes == 2 * (M + N) * K + M * N * 2
    assert gemm.total.requested_bytes == gemm.total.bank_conflicts == 0
    assert gemm.setmaxnreg == {0: 40, 1: 232, 2: 232}
    assert {"barrier 1", "barrier 2", "syncthreads"} <= gemm.total.waits.keys()
    assert {found.function for found in gemm.lines} == {"gemm", "produce", "consume"}
    # Every lane of a consumer warp executes the main loop, and one lane of the producer warp its loop.
    assert line_of(gemm, "acc = wait(tile(a, b))").divergence == 1
    assert line_of(gemm, "tma_load_2d(smem, offset, map_a").divergence == 1 / 32


def test_registers_of_a_kernel_with_setmaxnreg():
    static = profile_of_a_gemm("H200")["gemm"].static
    assert static.reason is None
    assert (static.registers, static.launch_bounds, static.setmaxnreg_registers) == (
        168,
        (384, 1),
        128 * (40 + 2 * 232),
    )


# --- atomics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("addresses, contention", [(1, 32), (4, 8), (32, 1)])
def test_contention_of_atomics(addresses, contention):
    @cuda.jit
    def kernel(counts):
        cuda.atomic.add(counts, cuda.threadIdx.x % addresses, 1)

    result = profiled(kernel, 2, 64, np.zeros(32, np.int32))
    added = line(result, "atomic")
    assert (added.global_atomic_requests, added.contention) == (4, contention)
    assert added.global_load_requests == added.global_store_requests == 0


def test_shared_atomics():
    @cuda.jit
    def kernel(y):
        counts = cuda.shared.array(1, int32)
        if cuda.threadIdx.x == 0:
            counts[0] = 0
        cuda.syncthreads()
        cuda.atomic.add(counts, 0, 1)
        cuda.syncthreads()
        y[cuda.threadIdx.x] = counts[0]

    added = line(profiled(kernel, 1, 64, np.zeros(64, np.int32)), "atomic")
    assert (added.shared_atomic_requests, added.contention, added.bank_conflicts) == (2, 32, 0)


@pytest.mark.parametrize("engine", ["vector", "threads"])
def test_contention_across_warps(engine):
    """Six warps add to one address of global memory, three of each block to one of shared memory."""

    @cuda.jit
    def kernel(total):
        count = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        if i < 32:
            count[i] = 0
        cuda.syncthreads()
        cuda.atomic.add(count, i // 32, 1)
        cuda.atomic.add(count, 8, 1)
        cuda.atomic.add(total, 0, 1)

    with override_settings(engine=engine):
        result = profiled(kernel, 2, 96, np.zeros(1, np.int32))
    found = {text: line(result, text).warp_contention for text in ("i // 32", "count, 8", "total, 0")}
    assert found == {"i // 32": 1, "count, 8": 3, "total, 0": 6}
    assert result.total.warp_contention == 6


@pytest.mark.parametrize("engine", ["vector", "threads"])
def test_first_sectors_and_contention_of_sectors(engine):
    @cuda.jit
    def kernel(x, total):
        i = cuda.threadIdx.x
        for k in range(8):
            x[256 + i] = x[8 * i + k]
        cuda.atomic.add(total, i // 32, 1)
        cuda.atomic.add(total, i % 32, 1)

    with override_settings(engine=engine):
        result = profiled(kernel, 2, 64, np.zeros(768, np.int32), np.zeros(32, np.int32))
    loads, same, spread = line(result, "x[8"), line(result, "i // 32"), line(result, "i % 32")
    assert (loads.global_load_sectors, loads.global_load_first_sectors) == (2 * 2 * 8 * 32, 2 * 64)
    assert loads.accesses["global", "load", 4].wavefronts == 2 * 2 * 8 * 8
    # Four warps update a sector: all of them at one address, two at each of two addresses, and each of four sectors.
    assert (same.warp_contention, same.sector_contention) == (2, 4)
    assert (spread.warp_contention, spread.sector_contention) == (4, 4)


@pytest.mark.parametrize(
    "cluster, blocks, ran", [(None, 4, [8, 24, 40, 56]), (2, 5, [16, 17, 48, 49]), (None, 100, None)]
)
def test_a_sample_of_the_blocks(cluster, blocks, ran):
    @cuda.jit
    def kernel(y):
        if cuda.threadIdx.x == 0:
            y[cuda.blockIdx.x] = 1

    y = np.zeros(64, np.int32)
    with simulator.profile(blocks=blocks) as p:
        launch(kernel, 64, 64, torch.from_numpy(y), cluster=cluster)
    ran = list(range(64)) if ran is None else ran
    assert y.nonzero()[0].tolist() == ran
    found = p["kernel"].launches[0]
    assert (found["grid"], found["blocks"], found["warps"]) == ([64, 1, 1], len(ran), 2 * len(ran))
    assert p["kernel"].total.global_store_requests == len(ran)
    with pytest.raises(ValueError, match="blocks is 0; it must be at least 1"), simulator.profile(blocks=0):
        pass


# --- executions and divergence --------------------------------------------------------------------------------------


def test_a_divergent_branch():
    @cuda.jit
    def kernel(y):
        i = cuda.threadIdx.x
        if i % 2 == 0:
            y[i] = float32(1)
        elif i % 4 == 1:
            y[i] = float32(2)
        else:
            y[i] = float32(3)
        y[i] += float32(1)

    result = profiled(kernel, 1, 64, np.zeros(64, np.float32))
    expected = {"float32(2)": (2, 0.25), "float32(3)": (2, 0.25), "if i % 2": (2, 1), "elif": (2, 0.5), "+=": (2, 1)}
    for text, (executions, divergence) in expected.items():
        found = line(result, text) if text != "if i % 2" else line(result, "if i % 2 == 0")
        assert (found.executions, found.divergence) == (executions, divergence)
    together = line(result, "+=")
    assert (together.global_load_requests, together.global_load_sectors) == (2, 8)
    assert line(result, "float32(2)").global_store_sectors == 2 * 4


def test_a_uniform_loop():
    @cuda.jit
    def kernel(x, y):
        total = float32(0)
        for k in range(5):
            total += x[32 * k + cuda.threadIdx.x]
        y[cuda.threadIdx.x] = total

    result = profiled(kernel, 1, 32, np.zeros(160, np.float32), np.zeros(32, np.float32))
    added, loop = line(result, "total +="), line(result, "for k")
    assert (added.executions, added.divergence, added.global_load_requests, added.global_load_sectors) == (5, 1, 5, 20)
    assert (loop.executions, line(result, "y[cuda").executions) == (6, 1)


def test_lanes_leave_a_loop_one_by_one():
    @cuda.jit
    def kernel(x, y):
        i = cuda.threadIdx.x
        for k in range(i + 1):
            y[i] += x[k]
        y[i] *= float32(2)

    result = profiled(kernel, 1, 32, np.ones(32, np.float32), np.zeros(32, np.float32))
    body, behind = line(result, "+="), line(result, "*=")
    assert (body.executions, body.active_lanes) == (32, 33 * 16)
    assert body.accesses["global", "load", 4].requests == 64  # of x and of y
    assert (behind.executions, behind.divergence) == (1, 1)


def test_iterations_of_nested_loops_are_matched_by_their_numbers():
    """Lane i runs the inner loop i % 2 + 1 times: lanes meet again in each iteration of the outer loop."""

    @cuda.jit
    def kernel(x, y):
        i = cuda.threadIdx.x
        for j in range(3):
            for k in range(i % 2 + 1):
                y[i] += x[32 * (2 * j + k) + i]

    result = profiled(kernel, 1, 32, np.ones(192, np.float32), np.zeros(32, np.float32))
    body = line(result, "+=")
    assert (body.executions, body.active_lanes) == (6, 3 * 32 + 3 * 16)
    loads = body.accesses["global", "load", 4]
    assert (loads.requests, loads.sectors) == (12, 2 * 24)


@pytest.mark.parametrize("seed", range(3))
def test_while_loops_with_break_and_continue(seed):
    @cuda.jit
    def kernel(y):
        i = cuda.threadIdx.x
        k = 0
        while True:
            k += 1
            if k % 2 == 0:
                continue
            if k > i:
                break
            y[i] += float32(k)
        y[i] += float32(100)

    with simulator.seed(seed):
        result = profiled(kernel, 1, 32, np.zeros(32, np.float32))
    # Lane i breaks at the first odd k > i: k = 1 for lane 0, 3 for lanes 1 and 2, ..., 33 for lane 31.
    assert line(result, "k += 1").executions == 33
    assert line(result, "continue").executions == 16
    assert (line(result, "break").executions, line(result, "break").active_lanes) == (17, 32)
    assert line(result, "float32(k)").executions == 16
    assert (line(result, "100").executions, line(result, "100").divergence) == (1, 1)


def test_the_condition_of_a_while_loop_with_continue():
    """The odd lanes have one iteration more; Python tests the condition at two places of its code."""

    @cuda.jit
    def kernel(y):
        i = cuda.threadIdx.x
        k = 0
        while k < i % 2 + 4:
            k += 1
            if k == 2 + i % 2:
                continue
            y[i] += float32(1)
            while k == 7:
                k += 1
        y[i] += float32(2)

    result = profiled(kernel, 1, 32, np.zeros(32, np.float32))
    for text, executions, lanes in [
        ("while k < i % 2", 6, 5 * 32 + 16),
        ("if k == 2 + i % 2", 5, 4 * 32 + 16),
        ("continue", 2, 32),
        ("while k == 7", 5, 3 * 32 + 16),
        ("float32(2)", 1, 32),
    ]:
        assert (line(result, text).executions, line(result, text).active_lanes) == (executions, lanes), text


def test_calls_of_a_device_function_are_told_apart_by_their_call_sites():
    @cuda.jit(device=True)
    def square(v):
        w = v * v
        return w

    @cuda.jit
    def kernel(x, y):
        i = cuda.threadIdx.x
        if i < 16:
            y[i] = square(x[i])
        else:
            y[i] = square(x[i]) + square(y[i])

    with simulator.profile() as p:
        kernel[1, 32](np.ones(32, np.float32), np.ones(32, np.float32))
    multiplied = next(found for found in p["kernel"].lines if found.function == "square")
    assert (multiplied.executions, multiplied.active_lanes) == (3, 48)


def test_a_statement_of_several_lines_executes_once():
    @cuda.jit
    def kernel(x, y):
        i = cuda.threadIdx.x
        y[i] = max(
            x[i],  # the comments keep the lines apart
            x[31 - i],
        )

    result = profiled(kernel, 1, 32, np.ones(32, np.float32), np.zeros(32, np.float32))
    assert line(result, "max(").executions == 1
    assert line(result, "x[31 - i]").global_load_requests == 1


def test_a_barrier_separates_accesses():
    """Lanes that reach the same collective by two branches have executed what is before it apart."""

    @cuda.jit
    def kernel(y):
        i = cuda.threadIdx.x
        v = cuda.shfl_xor_sync(0xFFFFFFFF, i, 1)
        y[i] = cuda.shfl_xor_sync(0xFFFFFFFF, v, 2)

    for seed in range(3):
        with simulator.seed(seed):
            result = profiled(kernel, 2, 64, np.zeros(64, np.int32))
        assert line(result, "y[i] =").executions == line(result, "y[i] =").global_store_requests == 4
        assert result.total.divergence == 1


def test_preemption_does_not_split_requests():
    with simulator.seed(1, preempt=0.3):
        result = profiled(copy, 2, 64, np.zeros(128, np.float32), np.zeros(128, np.float32), 1, 0)
    copied = line(result, "y[i] = x")
    assert (copied.executions, copied.divergence, copied.global_load_sectors) == (4, 1, 16)


def test_waits_at_barriers():
    @cuda.jit
    def kernel(y):
        cuda.syncthreads()
        y[cuda.threadIdx.x] = float32(1)

    result = profiled(kernel, 1, 128, np.zeros(128, np.float32))
    waited = line(result, "syncthreads")
    assert (waited.waits, waited.barriers, line(result, "y[cuda").barriers) == ({"syncthreads": 4}, 4, 0)


def test_polls_are_counted_as_waits():
    @cuda.jit
    def kernel(flag, y):
        if cuda.blockIdx.x == 0:
            while cuda.atomic.add(flag, 0, 0) == 0:
                pass
        else:
            cuda.atomic.add(flag, 0, 1)
        y[cuda.blockIdx.x] = 1

    result = profiled(kernel, 2, 1, np.zeros(1, np.int32), np.zeros(2, np.int32))
    assert set(result.total.waits) == {"an atomic that changes nothing"}


# --- warps and phases -----------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def warp_sum(v):
    for distance in (16, 8, 4, 2, 1):
        v += cuda.shfl_xor_sync(0xFFFFFFFF, v, distance)
    return v


@cuda.jit
def uneven(x, y):
    """Warp 0 loads 8 elements while warp 1 shuffles 5 times; after the barrier warp 1 loads 3."""
    tile = cuda.shared.array(64, int32)
    i = int32(cuda.threadIdx.x)
    tile[i] = i
    if i < 32:
        for k in range(8):
            tile[i] += x[32 * k + i]
    else:
        tile[i] = warp_sum(i)
    cuda.syncthreads()
    if i >= 32:
        for k in range(3):
            y[cuda.grid(1)] += tile[32 * (k % 2) + i - 32]
    votes = cuda.ballot_sync(0xFFFFFFFF, i < 40)
    cuda.syncwarp()
    y[cuda.grid(1)] += votes


@pytest.mark.parametrize("engine", ["vector", "threads"])
def test_the_critical_path_takes_the_busiest_warp_between_two_barriers(engine):
    with override_settings(engine=engine):
        result = profiled(uneven, 3, 64, np.ones(256, np.int32), np.zeros(192, np.int32))
    first, second = result.critical_path.phases
    assert (first["global_load_requests"], first["shuffles"], first["barriers"]) == (8, 5, 1)
    assert (second["shared_load_requests"], second["votes"], second["syncwarps"]) == (3, 1, 1)
    assert "shuffles" not in second and "barriers" not in second
    assert (result.total.global_load_requests, result.total.shuffles) == (3 * (8 + 3 + 2), 3 * 5)
    # Warp 0 in the first phase, warp 1 in the second: each has 3 loads of its own elements.
    assert result.longest_chain({"global_load_requests": 2, "shuffles": 3}) == max(16, 15) + 2 * 4
    ones = {counters: np.array([1.0, 0.0]) for counters in result.lines}
    (each,) = result.phases.per_warp(ones)  # the blocks did the same
    path = [phase["executions"] for phase in result.critical_path.phases]
    assert (
        each.shape == (2, 32, 2)
        and each[..., 0].max(1).tolist() == path
        and each[..., 0].sum() * 3 == (result.total.executions)
    )
    with pytest.raises(ValueError, match="weights has loads; its keys must be of executions"):
        result.longest_chain({"loads": 1})
    with pytest.raises(AttributeError, match="a critical path has no counter 'loads'"):
        _ = result.critical_path.loads


@pytest.mark.parametrize("engine", ["vector", "threads"])
def test_counters_of_a_device_function(engine):
    with override_settings(engine=engine):
        result = profiled(uneven, 1, 64, np.ones(256, np.int32), np.zeros(64, np.int32))
    own = result.functions["warp_sum"]
    assert own.total.collectives == {"shfl_xor_sync": 5} and own.total.shared_load_requests == 0
    assert own.critical_path.phases[0]["executions"] == 1 + 2 * 5 + 1
    assert result.functions["uneven"].critical_path.shuffles == 0
    assert result.part("warp_sum", "uneven").total.executions == result.total.executions
    with pytest.raises(KeyError, match="has called no function 'scan'; it has uneven, warp_sum"):
        result.part("scan")


def test_collectives_of_parts_of_a_warp():
    @cuda.jit
    def kernel(y):
        i = cuda.threadIdx.x
        half = 0xFFFF if i % 32 < 16 else 0xFFFF0000
        y[i] = cuda.shfl_xor_sync(half, i, 1) + cuda.match_any_sync(half, i // 4)

    for engine in ("vector", "threads"):
        with override_settings(engine=engine):
            total = profiled(kernel, 1, 64, np.zeros(64, np.int64)).total
        assert (total.shuffles, total.matches, total.votes) == (4, 4, 0)


def test_a_launch_that_vectors_give_up_is_counted_once():
    @cuda.jit
    def kernel(y):
        y[0] = cuda.threadIdx.x  # a race
        y[1 + cuda.threadIdx.x] = y[0]

    launches.fallbacks.clear()
    result = profiled(kernel, 1, 64, np.zeros(65, np.int32))
    assert launches.fallbacks and result.total.global_store_requests == 4
    assert len(result.launches) == 1


def test_profiles_use_vectors():
    launches.fallbacks.clear()
    profiled(uneven, 2, 64, np.ones(256, np.int32), np.zeros(128, np.int32))
    assert not launches.fallbacks


def test_an_access_through_a_pointer_that_differs_between_lanes_is_one_request():
    @cuda.jit
    def kernel(a, b, y):
        i = cuda.threadIdx.x
        x = a
        if i % 2:
            x = b
        y[i] = x[i]

    for engine in ("vector", "threads"):
        with override_settings(engine=engine):
            a, b = (simulator.pointer(np.arange(64, dtype=np.int32)) for _ in range(2))
            total = profiled(kernel, 1, 64, a, b, np.zeros(64, np.int32)).total
        assert (total.global_load_requests, total.global_load_sectors) == (2, 16)


def test_bytes_in_the_memory_of_other_ranks():
    @cuda.jit
    def kernel(own, address, n):
        peer = pointer_at(address, own)
        if cuda.threadIdx.x < n:
            peer[cuda.threadIdx.x] = own[cuda.threadIdx.x]

    arrays = [np.zeros(64, np.int32) for _ in range(2)]
    addresses = [simulator.register(array, f"rank {rank}", rank) for rank, array in enumerate(arrays)]
    for engine in ("vector", "threads"):
        with override_settings(engine=engine), simulator.profile() as p, simulator.together():
            for rank in range(2):
                with simulator.on_rank(rank):
                    simulator.run(kernel, 1, 64, (simulator.pointer(arrays[rank]), addresses[1 - rank], 8 * rank))
        assert p["kernel"].total.peers == {0: 32} and p["kernel"].total.peer_bytes == 32
        assert len(p["kernel"].launches) == 2
    for address in addresses:
        simulator.forget(address)


# --- the report -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def profile_of_copies():
    with simulator.profile() as p:
        for stride in (1, 8):
            copy[2, 32](np.zeros(512, np.float32), np.zeros(64, np.float32), stride, 0)
    return p


def test_launches_of_a_kernel_are_added_up(profile_of_copies):
    (kernel,) = profile_of_copies.kernels
    assert [launch["grid"] for launch in kernel.launches] == [[2, 1, 1]] * 2
    assert kernel.total.global_load_sectors == 2 * (4 + 32)


def test_the_table_has_a_row_per_line_and_a_total(profile_of_copies):
    text = profile_of_copies.table()
    header, first, second, total = [row.split() for row in text.splitlines()[3:7]]
    assert text == str(profile_of_copies)
    assert header[:4] == ["line", "exec", "lanes", "ld"]
    assert first[1] == second[1] == "4" and total[:2] == ["total", "8"]
    assert "y[i] = x[first + i * stride]" in text and "18" in second  # 72 sectors of 4 requests


def test_json_has_every_counter(profile_of_copies):
    data = json.loads(profile_of_copies.json())
    (kernel,) = data["kernels"]
    assert data["schema"] == 2 and kernel["static"] is None
    assert kernel["total"]["counters"].keys() == METRICS.keys()
    assert kernel["lines"][1]["counters"]["global_load_sectors"] == 72
    assert kernel["lines"][1]["accesses"][0]["space"] == "global"


def test_every_counter_and_key_is_documented(profile_of_copies):
    text = (Path(__file__).parents[2] / "docs/simulator_profile.md").read_text()
    for name, metric in METRICS.items():
        assert f"| `{name}` | {metric.description} |" in text and metric.nsight_compute in text
    kernel = profile_of_copies.as_dict()["kernels"][0]
    for key in [*kernel, *kernel["launches"][0], *kernel["lines"][0], *kernel["lines"][1]["accesses"][0]]:
        assert key in text, key


def test_the_heat_map_colours_the_line_with_the_largest_counter(profile_of_copies):
    page = str(profile_of_copies.heatmap("global_load_sectors"))
    coloured = [row for row in page.split("<tr") if "background" in row]
    assert len(coloured) == 1 and "y[i] = x[first" in coloured[0] and "0.70" in coloured[0]
    assert "color-scheme: light dark" in page and "<script" not in page and "http" not in page
    assert profile_of_copies._repr_html_() in str(profile_of_copies.heatmap("executions"))
    with pytest.raises(ValueError, match="counter is 'sectors'"):
        profile_of_copies.heatmap("sectors")


@pytest.mark.parametrize("name, words", [("p.txt", "kernel copy"), ("p.json", '"schema"'), ("p.html", "<table>")])
def test_a_report_is_written_in_the_format_of_its_name(name, words, profile_of_copies, tmp_path):
    simulator.write_report(profile_of_copies, str(tmp_path / name))
    assert words in (tmp_path / name).read_text()


def test_nothing_is_traced_outside_a_profile(profile_of_copies):
    assert sys.gettrace() is None or "profiler" not in str(sys.gettrace())
    assert simulator.memory.watching == 0
    assert simulator.scheduler.settings["profile"] is None


def test_ranks_are_profiled_together():
    with simulator.profile() as p, simulator.together():
        for _ in range(2):
            simulator.run(copy, 1, 32, (np.zeros(32, np.float32), np.zeros(32, np.float32), 1, 0))
    assert p["copy"].total.global_load_sectors == 8
    with simulator.together(), pytest.raises(simulator.SimulatorError, match="enter it outside"):
        with simulator.profile():
            pass


def test_a_failing_kernel_leaves_its_counters():
    @cuda.jit
    def kernel(y):
        y[cuda.threadIdx.x] = 1
        y[99] = 1

    with simulator.profile() as p, pytest.raises(simulator.OutOfBounds):
        kernel[1, 32](np.zeros(32, np.int32))
    assert p["kernel"].total.global_store_requests >= 1
    assert simulator.memory.watching == 0


def test_the_profiler_needs_neither_torch_nor_matplotlib():
    code = """
import sys
sys.modules["torch"] = sys.modules["matplotlib"] = None
import types
sys.modules["moe_numba"] = p = types.ModuleType("moe_numba"); p.__path__ = ["moe_numba"]
from moe_numba import simulator
import numpy as np
from numba import cuda
@cuda.jit
def kernel(y):
    y[cuda.threadIdx.x] = 1
with simulator.profile() as p:
    kernel[1, 32](np.zeros(32, np.int32))
print(p.kernels[0].total.global_store_sectors)
"""
    environment = {k: v for k, v in os.environ.items() if "SIM" not in k} | {"MOE_NUMBA_SIMULATE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "4\n", done.stderr


# --- the compiler and occupancy -------------------------------------------------------------------------------------


def test_static_properties_from_the_compiler():
    @cuda.jit(device=True)
    def twice(v):
        return v + v

    @cuda.jit
    def kernel(x, y, n):
        tile = cuda.shared.array(256, float32)
        i = cuda.grid(1)
        tile[cuda.threadIdx.x] = twice(x[i])
        cuda.syncthreads()
        y[i, 0] = tile[255 - cuda.threadIdx.x] + n

    with simulator.profile(gpu="H200") as p:
        kernel[4, 256](np.zeros(1024, np.float32), np.zeros((1024, 2), np.float32), np.float32(1))
    static = p["kernel"].static
    assert static.reason is None and 8 <= static.registers <= 40 and static.spilled_bytes == 0
    assert static.static_shared_bytes == 1024
    assert static.occupancy[0].blocks_per_sm == 8 and static.occupancy[0].all_resident
    assert "8 blocks per SM, limited by warps" in str(p)
    assert json.loads(p.json())["gpu"]["name"] == "H200"
    if disassembler():
        instructions = p["kernel"].estimated_instructions
        assert instructions == 32 * p["kernel"].instructions  # a kernel without branches


def test_a_kernel_that_cannot_be_compiled_says_why():
    def kernel(y):
        y[cuda.threadIdx.x] = int("3")

    with simulator.profile(gpu="H200") as p:
        simulator.run(kernel, 1, 32, (np.zeros(32, np.int32),))
    static = p["kernel"].static
    assert static.registers is None and static.reason and "not compiled" in str(p)
    assert static.occupancy[0].blocks_per_sm == 32


def test_instructions_of_a_function_that_is_inlined(tmp_path, monkeypatch):
    """The program is run by a relative path; the compiler has absolute ones."""
    source = """
from numba import cuda, float32

@cuda.jit(device=True)
def polynomial(v):
    w = v * v + float32(1)
    w = w * v + float32(2)
    return w * v

@cuda.jit
def kernel(x, y):
    i = cuda.grid(1)
    y[i, 0] = polynomial(x[i])
"""
    if not disassembler():
        pytest.skip("without nvdisasm the lines of instructions are not known")
    (tmp_path / "program.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    scope = {"__name__": "program"}
    exec(compile(source, "program.py", "exec"), scope)
    with simulator.profile(gpu="H200") as p:
        scope["kernel"][2, 64](np.zeros(128, np.float32), np.zeros((128, 2), np.float32))
    kernel = p["kernel"]
    assert kernel.static.reason is None
    function, own = (kernel.functions[name] for name in ("polynomial", "kernel"))
    assert 3 <= function.instructions <= 6 and function.instructions < own.instructions
    assert function.estimated_instructions == 4 * function.instructions
    assert function.estimated_instructions + own.estimated_instructions == kernel.estimated_instructions


@pytest.mark.parametrize(
    "gpu, threads, registers, shared_bytes, blocks, limit",
    [
        ("H200", 1024, 32, 0, 2, "warps"),
        ("H200", 32, 16, 0, 32, "blocks"),
        ("H200", 256, 255, 0, 1, "registers"),
        ("H200", 384, 168, 200 * 1024, 1, "shared memory"),
        ("H200", 128, 128, 0, 4, "registers"),
        ("A100", 1024, 32, 40 * 1024, 2, "warps"),
        ("T4", 256, 32, 0, 4, "warps"),
        ("L4", 512, 64, 0, 2, "registers"),
        ("H200", 128, None, 113 * 1024, 2, "shared memory"),
    ],
)
def test_occupancy(gpu, threads, registers, shared_bytes, blocks, limit):
    found = occupancy(gpu_properties(gpu), threads, 1000, registers, shared_bytes)
    assert found.blocks_per_sm == blocks and limit in found.limited_by
    assert found.all_resident == (1000 <= blocks * gpu_properties(gpu).sm_count)


def test_a_gpu_is_named_or_described():
    class Described:
        capability, sm_count = (8, 0), 42

    assert gpu_properties(Described).shared_bytes == 164 * 1024
    with pytest.raises(ValueError, match="gpu is 'H300'"):
        gpu_properties("H300")
    with pytest.raises(TypeError, match="must be a name"):
        gpu_properties(3)


def test_sectors_of_accesses_across_their_boundaries():
    sectors, new, lines = sectors_of(
        np.array([[30, 30, 30, 30], [0, 4, 28, 32], [0, 96, 126, 300]]), np.ones((3, 4), bool), 4
    )
    assert [row[kept].tolist() for row, kept in zip(sectors, new)] == [[0, 1], [0, 1], [0, 3, 4, 9]]
    assert lines.tolist() == [1, 1, 3]
