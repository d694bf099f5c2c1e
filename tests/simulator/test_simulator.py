"""Simulator: memory, warps, blocks, deadlocks, seeds; kernels it must reject, with their error messages."""

import contextlib
import itertools
import os
import random
import subprocess
import sys
import traceback
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
import numba
from numba import cuda, uint8, uint32, uint64

from moe_numba.ptx.atomics import ld_volatile_s32
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait
from moe_numba.ptx.matrix import stmatrix_x2
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import ld_global_s32x4
from moe_numba.ptx.mma import make_ldmatrix_x4, make_mma
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import bar_sync
from moe_numba.ptx.wgmma import make_wgmma_wait_registers
from moe_numba.simulator.core.scheduler import shuffle

pytestmark = pytest.mark.skipif(not simulator.ENABLED, reason="kernels run on a GPU here: set MOE_NUMBA_SIMULATE=1")

ROOT = Path(__file__).parents[2]


def lanes(kernel, *args, threads=32, dtype=np.int64):
    """Run a kernel that writes one value per thread to its first argument; return the values."""
    out = np.zeros(threads, dtype)
    kernel[1, threads](out, *args)
    return out.tolist()


# --- the mode -------------------------------------------------------------------------------------------------------


def test_lanes_are_shuffled_as_python_shuffles_them():
    for seed in range(20):
        ours, pythons = random.Random(seed), random.Random(seed)
        for size in (0, 1, 2, 5, 31, 32, 33):
            shuffled, expected = list(range(size)), list(range(size))
            shuffle(shuffled, ours)
            pythons.shuffle(expected)
            assert shuffled == expected and ours.getstate() == pythons.getstate()


def in_a_new_process(code, **environment):
    environment = {k: v for k, v in os.environ.items() if "SIM" not in k} | environment
    return subprocess.run([sys.executable, "-c", code], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_without_simulation_the_simulator_does_not_import_numba():
    alone = (
        "import sys, types; sys.modules['moe_numba'] = p = types.ModuleType('moe_numba'); p.__path__ = ['moe_numba']; "
    )
    code = (
        alone + "from moe_numba.simulator import ENABLED, REASON, run; print(ENABLED, REASON, 'numba' in sys.modules)"
    )
    assert in_a_new_process(code, MOE_NUMBA_SIMULATE="0").stdout == "False MOE_NUMBA_SIMULATE=0 False\n"


def test_both_switches_turn_simulation_on():
    code = "from moe_numba import simulator; from numba import cuda; print(simulator.REASON, cuda.shfl_sync.__module__)"
    for name in ("MOE_NUMBA_SIMULATE", "NUMBA_ENABLE_CUDASIM"):
        assert in_a_new_process(code, **{name: "1"}).stdout == f"{name}=1 moe_numba.simulator.core.cuda_module\n"


@pytest.mark.parametrize(
    "visible, gpus, found",
    [
        *((None, 0, False), (None, 1, True), ("", 8, False), ("-1", 8, False), ("7", 8, True), ("8", 8, False)),
        *(("1, 0", 2, True), ("none", 2, False), ("GPU-8f2e", 1, True), ("MIG-8f2e", 1, True), ("0", 0, False)),
    ],
)
def test_visible_gpus(visible, gpus, found, monkeypatch):
    monkeypatch.setattr(simulator, "_count_gpus", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert simulator._gpu_is_present() == found


def test_the_simulator_and_ptx_work_without_torch():
    code = """
import sys
sys.modules["torch"] = None  # makes "import torch" fail
import importlib, pkgutil
from moe_numba import simulator
import numpy as np
from numba import cuda, float32, uint64
import moe_numba.ptx
for module in pkgutil.walk_packages(moe_numba.ptx.__path__, "moe_numba.ptx."):
    importlib.import_module(module.name)
from moe_numba.ptx.cp_async import bulk_load
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity

@cuda.jit
def reverse(out, x):
    tile, barrier = cuda.shared.array(32, float32, 16), cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(barrier, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(barrier, 0, 128)
        bulk_load(tile, 0, x, 0, 128, barrier, 0)
    cuda.syncthreads()
    mbarrier_wait_parity(barrier, 0, 0)
    out[cuda.threadIdx.x] = tile[31 - cuda.threadIdx.x]

x = np.zeros(36, np.float32)
x = x[-x.ctypes.data % 16 // 4 :][:32]  # 16-byte aligned
x[:] = np.arange(32)
out = np.zeros(32, np.float32)
simulator.run(reverse, 1, 32, [out, simulator.pointer(x)])
print((out == x[::-1]).all(), sys.modules["torch"])
"""
    done = in_a_new_process(code, MOE_NUMBA_SIMULATE="1")
    assert done.stdout == "True None\n", done.stderr


def test_importing_numba_cuda_first_is_refused():
    code = "import numba.cuda; import moe_numba.simulator"
    assert "import moe_numba before numba.cuda" in in_a_new_process(code, MOE_NUMBA_SIMULATE="1").stderr


# --- memory ---------------------------------------------------------------------------------------------------------


@cuda.jit
def double(out, x, n):
    i = cuda.grid(1)
    if i < n:
        out[i] = x[i] + x[i]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int32])
def test_pointers_to_tensors_of_every_type(dtype):
    x = torch.tensor([1.0, -2.0, 0.5, 3.0]).to(dtype)
    out = torch.zeros(4).to(dtype)
    simulator.run(double, 1, 32, (simulator.pointer(out), simulator.pointer(x), 4))
    assert (out.float() == 2 * x.float()).all()


def test_pointer_reaches_to_the_end_of_the_storage():
    storage = torch.arange(12.0)
    p = simulator.pointer(storage.view(3, 4)[1, 1:3])
    assert p.size == 7 and p[6] == 11
    assert simulator.pointer(storage.view(3, 4).t()[1]).size == 11
    assert simulator.pointer(np.arange(12.0).reshape(3, 4)[1, 1:3]).size == 7


def test_pointer_elements_are_scalars_of_their_type_and_share_the_memory():
    x = torch.zeros(4, dtype=torch.bfloat16)
    p = simulator.pointer(x)
    p[1] = 1.005859375
    assert type(p[1]) is ml_dtypes.bfloat16 and x[1].item() == 1.0078125
    assert p.dtype == ml_dtypes.bfloat16 and p.size == 4


def test_stores_convert_as_c_does():
    p = simulator.pointer(np.zeros(4, np.uint8))
    for i, value in enumerate((-1, 300, np.int64(513), 3.9)):
        p[i] = value
    assert p.array.tolist() == [255, 44, 1, 3]


def test_views_offsets_and_vectors_share_memory():
    x = torch.arange(16, dtype=torch.int16).to(torch.bfloat16)
    p = simulator.pointer(x)
    words = p.load_vector(np.int32(8), np.uint32, 4)
    assert [type(w) for w in words] == [np.uint32] * 4
    assert words == tuple(p.view(np.uint32)[4 + i] for i in range(4))
    p.offset(8).store_vector(0, words[::-1])
    assert x[8:].tolist() == [14, 15, 12, 13, 10, 11, 8, 9]
    assert (p + 3)[0] == 3
    with pytest.raises(simulator.Misaligned, match="16 bytes at index 2"):
        p.load_vector(2, np.uint32, 4)
    with pytest.raises(simulator.OutOfBounds, match=r"index 16 \(16 bytes\)"):
        p.load_vector(16, np.uint32, 4)
    with pytest.raises(simulator.Misaligned, match="not aligned for uint32"):
        p.offset(1).view(np.uint32)


@pytest.mark.parametrize("index", [64, -1])
@pytest.mark.parametrize("wrap", [simulator.pointer, lambda a: a] if simulator.ENABLED else [])
def test_out_of_bounds_names_thread_index_and_argument(index, wrap):
    @cuda.jit
    def kernel(table, index):
        if cuda.blockIdx.x == 1 and cuda.threadIdx.x == 37:
            table[index] = 1

    with pytest.raises(simulator.OutOfBounds) as error:
        simulator.run(kernel, 2, 64, (wrap(np.zeros(64, np.float32)), index))
    message = f"block (1, 0, 0) warp 1 lane 5: index {index} is outside table (64 x float32)"
    is_array = wrap is not simulator.pointer
    from_the_end = "; check for the boundary before this access. Compiled Numba counts a negative index from the end"
    assert str(error.value).startswith(message + (from_the_end if is_array and index < 0 else ""))
    assert ("--wraparound" in str(error.value)) == (is_array and index < 0)


@cuda.jit
def reads_uninitialised_memory(out, integers):
    static = cuda.shared.array(4, numba.float32)
    dynamic = cuda.shared.array(0, numba.float32)
    local = cuda.local.array((2, 2), np.float64)
    numbers = cuda.shared.array(4, numba.int32)
    out[0], out[1], out[2] = static[1], local[1, 1], dynamic[7]
    integers[0] = numbers[0]


def test_shared_and_local_memory_starts_as_poison():
    out, integers = np.zeros(3), np.zeros(1, np.int32)
    reads_uninitialised_memory[1, 1, 0, 32](out, integers)
    assert np.isnan(out).all() and abs(integers[0]) > 1000


def test_shared_arrays_are_per_block_and_call_site():
    @cuda.jit
    def kernel(out):
        a, b = cuda.shared.array(1, np.int32), cuda.shared.array(1, np.int32)
        if cuda.threadIdx.x == 0:
            a[0], b[0] = cuda.blockIdx.x, 10 + cuda.blockIdx.x
        cuda.syncthreads()
        out[cuda.grid(1)] = 100 * a[0] + b[0]
        if cuda.threadIdx.x == 1:
            out[a[0] - 1 - cuda.blockIdx.x] = 0  # a negative index

    with pytest.raises(simulator.OutOfBounds, match="index -1 is outside out"):
        kernel[2, 2](np.zeros(4, np.int32))
    with pytest.raises(simulator.OutOfBounds, match="the shared array of test_simulator.py"):
        cuda.jit(lambda: cuda.shared.array(1, np.int32)[1])[1, 1]()


def test_dynamic_shared_memory_has_one_address_for_all_types():
    @cuda.jit
    def kernel(out):
        cuda.shared.array(0, np.float32)[0] = 1.0
        out[0] = cuda.shared.array(0, np.uint32)[0]
        out[1] = len(cuda.shared.array(0, np.uint16))

    assert lanes(with_dynamic_shared(kernel, 10), threads=2) == [0x3F800000, 5]


def with_dynamic_shared(kernel, shared_bytes):
    """Add dynamic shared memory to the launch configuration [grid, block] that `lanes` uses."""

    class Configured:
        def __getitem__(self, configuration):
            return kernel[(*configuration, 0, shared_bytes)]

    return Configured()


def test_numbas_host_interface_copies_arrays():
    x = np.arange(6, dtype=np.float32).reshape(2, 3)

    @cuda.jit
    def kernel(out, x):
        i, j = cuda.grid(2)
        if i < x.shape[0] and j < x.shape[1]:
            out[i, j] = x[i, j] + 1
            out[i][j] += x.T[j, i]

    device, out = cuda.to_device(x), cuda.device_array((2, 3), np.float32)
    kernel[(1, 1), (4, 4), cuda.stream()](out, device)
    cuda.synchronize()
    assert (out.copy_to_host() == 2 * x + 1).all()
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    kernel[1, (4, 4)](tensor, x)
    assert (tensor.float().numpy() == 2 * x + 1).all()
    before = x.copy()
    kernel[1, (4, 4)](cuda.In(x), x.copy())
    assert (x == before).all()
    double.forall(6)(out := np.zeros(6), np.arange(6.0), 6)
    assert out.tolist() == [0, 2, 4, 6, 8, 10]


def test_records_and_arrays_without_dimensions():
    @cuda.jit
    def kernel(out, points, one, number):
        for i in range(len(points)):
            out[i] = points[i].x + points["y"][i] + points.x[i] + one.y + number[()]
        points[0].x = 7

    points = np.array([(1, 2.5), (3, 4.5)], np.dtype([("x", np.int32), ("y", np.float32)]))
    out = np.zeros(2)
    kernel[1, 1](out, points, points[1], np.array(100.0))
    assert out.tolist() == [109, 115] and points["x"].tolist() == [7, 3]


def test_names_of_numbas_simulator_are_kept():
    from numba.cuda.simulator.kernelapi import FakeCUDAModule

    for name in dir(FakeCUDAModule((1, 1, 1), (1, 1, 1), 0)):
        if not name.startswith("_") and name != "laneid":
            assert hasattr(cuda, name), name
    assert cuda.float32x4(1, 2, 3, 4).w == 4
    assert lanes(cuda.jit(lambda out: out.__setitem__(cuda.laneid, cuda.laneid))) == list(range(32))


def test_device_functions_and_closures_are_plain_calls():
    @cuda.jit(device=True)
    def lane_sum(v):
        for d in (16, 8, 4, 2, 1):
            v += cuda.shfl_xor_sync(FULL_MASK, v, d)
        return v

    @cuda.jit("void(int64[:])", fastmath=True, max_registers=32, cache=True)
    def kernel(out):
        out[cuda.threadIdx.x] = lane_sum(cuda.laneid)

    assert lanes(kernel) == [496] * 32


# --- warps ----------------------------------------------------------------------------------------------------------


def test_redux_of_both_signs():
    @cuda.jit
    def kernel(out):
        lane = cuda.laneid
        out[lane, 0] = simulator.warp.redux("max", FULL_MASK, np.int32(lane - 16))
        out[lane, 1] = simulator.warp.redux("max", FULL_MASK, np.uint32((lane - 16) & FULL_MASK))
        out[lane, 2] = simulator.warp.redux("add", FULL_MASK, np.uint32(0x80000000))
        out[lane, 3] = simulator.warp.redux("min", FULL_MASK, lane - 16)
        out[lane, 4] = simulator.warp.redux("xor", 0xFFFF if lane < 16 else 0xFFFF0000, lane, np.uint32)
        out[lane, 5] = simulator.warp.redux("and", FULL_MASK, np.uint32(lane | 64)) + simulator.warp.redux(
            "or", FULL_MASK, lane
        )

    out = np.zeros((32, 6), np.int64)
    kernel[1, 32](out)
    assert (out == [15, FULL_MASK, 0, -16, 0, 64 + 31]).all()


def test_shuffles_stay_within_their_width():
    @cuda.jit
    def kernel(out):
        out[cuda.laneid] = simulator.warp.shuffle("up", FULL_MASK, cuda.laneid, 1, width=8)

    assert lanes(kernel) == [max(lane - 1, lane & ~7) for lane in range(32)]


def test_value_of_a_lane_outside_the_mask_is_poison():
    @cuda.jit
    def kernel(out):
        if cuda.laneid < 16:
            out[cuda.laneid] = cuda.shfl_down_sync(0xFFFF, np.float32(1), 8)

    out = np.zeros(32)
    kernel[1, 32](out)
    assert (out[:8] == 1).all() and np.isnan(out[8:16]).all()


def test_lanes_beyond_the_block_need_not_take_part():
    @cuda.jit
    def kernel(out):
        cuda.syncwarp()
        out[cuda.threadIdx.x] = cuda.popc(cuda.ballot_sync(FULL_MASK, True))

    assert lanes(kernel, threads=40) == [32] * 32 + [8] * 8


def test_disjoint_halves_of_a_warp_diverge():
    @cuda.jit
    def kernel(out):
        if cuda.laneid < 16:
            v = cuda.laneid
            for d in (8, 4, 2, 1):
                v += cuda.shfl_xor_sync(0xFFFF, v, d)
        else:
            v = cuda.ballot_sync(0xFFFF0000, cuda.laneid & 1)
        out[cuda.laneid] = v

    assert lanes(kernel) == [120] * 16 + [np.int32(-0x55560000)] * 16


def assert_refused(error, kernel, *patterns, grid=1, threads=32, seeds=range(4)):
    """Assert that every seed raises this error with these patterns, and that the simulator still works afterwards."""
    for seed in seeds:
        with simulator.seed(seed), pytest.raises(error) as found:
            kernel[grid, threads](np.zeros(64, np.int64))
        for pattern in patterns:
            assert any(p in str(found.value) for p in pattern.split("|")), f"{pattern!r} is not in: {found.value}"
        assert (
            lanes(cuda.jit(lambda out: out.__setitem__(cuda.laneid, cuda.shfl_sync(FULL_MASK, cuda.laneid, 5))))
            == [5] * 32
        )


def test_an_exited_lane_is_reported_at_once():
    @cuda.jit
    def kernel(out):
        if cuda.threadIdx.x == 39:
            return
        out[cuda.threadIdx.x] = cuda.shfl_xor_sync(FULL_MASK, 1, 1)

    assert_refused(
        simulator.MissingLane,
        kernel,
        "block (0, 0, 0) warp 1: lanes 7 are named in mask 0xffffffff of shfl_xor_sync but have exited",
        "move it out of the `if` or loop, or name only the lanes that reach it",
        threads=64,
    )


def test_a_shuffle_in_a_divergent_branch_is_told_to_leave_it():
    @cuda.jit
    def kernel(out):
        value = cuda.laneid
        if value < 20:
            value += cuda.shfl_xor_sync(FULL_MASK, value, 1)
        cuda.syncwarp()

    words = "every lane that the mask names must execute it: move it out of the `if` or loop"
    assert_refused(simulator.MissingLane, kernel, words)


def test_a_lane_that_waits_elsewhere_is_reported():
    @cuda.jit
    def another_operation(out):
        if cuda.laneid == 7:
            cuda.any_sync(FULL_MASK, True)
        cuda.all_sync(FULL_MASK, True)

    @cuda.jit
    def another_mask(out):
        cuda.syncwarp(0xFF if cuda.laneid == 3 else FULL_MASK)

    @cuda.jit
    def at_the_barrier(out):
        if cuda.laneid == 7:
            cuda.syncthreads()
        cuda.syncwarp()
        cuda.syncthreads()

    assert_refused(
        simulator.MissingLane,
        another_operation,
        "of any_sync|of all_sync",
        "but wait at",
        "another_operation, test_simulator",
    )
    assert_refused(simulator.MissingLane, another_mask, "mask 0x000000ff", "mask 0xffffffff")
    assert_refused(
        simulator.MissingLane, at_the_barrier, "of syncwarp", "syncthreads", "at_the_barrier, test_simulator.py:"
    )


def test_a_caller_must_be_in_its_own_mask():
    @cuda.jit
    def kernel(out):
        if cuda.laneid == 31:
            cuda.syncwarp(0x7FFFFFFF)

    assert_refused(
        simulator.MissingLane, kernel, "warp 0 lane 31 calls syncwarp with mask 0x7fffffff, which does not name it"
    )


@cuda.jit
def mask_of_each_branch(out):
    i = cuda.threadIdx.x
    if i % 2 == 0:
        out[i] = cuda.activemask()
    else:
        out[i] = cuda.activemask()


@cuda.jit
def mask_of_the_rest(out):
    i = cuda.threadIdx.x
    if i % 32 >= 20:
        return
    out[i] = cuda.activemask()


@cuda.jit(device=True)
def masks_of_iterations(n):
    found = 0
    for i in range(n):
        if i > 0:
            found += cuda.activemask()
    return found


@cuda.jit
def masks_in_loops(out):
    i = cuda.threadIdx.x
    found = 0
    for k in range(4):
        steps = 0
        while steps < (i + k) % 4:  # lanes are in different iterations, and meet behind the loop
            steps += 1
        if (i + k) % 2:
            for _ in range(2):  # not of all lanes that meet behind the branch
                steps += 1
            found = 3 * found + cuda.activemask() + steps - 2
        elif i % 5 == 0:
            continue
        found += masks_of_iterations(i % 3)
        if i % 7 == 6:
            break
    out[i] = found + cuda.activemask()


def masks_that_are_expected(kernel):
    i = np.arange(50)
    if kernel is mask_of_each_branch:
        return np.where(i < 32, np.where(i % 2, 0xAAAAAAAA, 0x55555555), np.where(i % 2, 0x2AAAA, 0x15555))
    if kernel is mask_of_the_rest:
        return np.where(i >= 32, 0x3FFFF, np.where(i < 20, 0xFFFFF, 0))
    meet = lambda lanes: sum(1 << lane % 32 for lane in lanes)
    found = [0] * 50
    for warp in (range(32), range(32, 50)):
        running = list(warp)
        for k in range(4):
            odd = [t for t in running if (t + k) % 2]
            for t in odd:
                found[t] = 3 * found[t] + meet(odd) + (t + k) % 4
            into = [t for t in running if t in odd or t % 5]
            for t in into:
                found[t] += meet(u for u in into if u % 3 == 2) if t % 3 == 2 else 0
            running = [t for t in running if t not in into or t % 7 != 6]
        for t in warp:
            found[t] += meet(warp)
    return np.array(found)


@pytest.mark.parametrize("engine, seed, preempt", [("vector", 0, 0), ("threads", 0, 0), ("threads", 1, 0.1)])
@pytest.mark.parametrize("kernel", [mask_of_each_branch, mask_of_the_rest, masks_in_loops], ids=lambda k: k.__name__)
def test_activemask_is_that_of_the_lanes_that_execute_it_together(kernel, engine, seed, preempt):
    out = np.zeros(50, np.int64)
    with simulator.settings.override_settings(engine=engine, seed=seed, preempt=preempt):
        kernel[1, 50](out)
    assert out.tolist() == masks_that_are_expected(kernel).tolist()


# --- instructions that the lanes of a warp execute together -----------------------------------------------------------

MMA, LDMATRIX, WGMMA_WAIT = make_mma("bf16", accumulate=False), make_ldmatrix_x4(), make_wgmma_wait_registers(1, 0)


@cuda.jit(device=True)
def mma_sync(tile):
    one = uint32(1)
    MMA((one, one, one, one), (one, one))


@cuda.jit(device=True)
def ldmatrix(tile):
    LDMATRIX(tile, 0)


@cuda.jit(device=True)
def stmatrix(tile):
    stmatrix_x2(tile, 0, uint32(1), uint32(1))


@cuda.jit(device=True)
def cluster_barrier(tile):
    barrier_cluster_arrive()
    barrier_cluster_wait()


@cuda.jit(device=True)
def wgmma_wait(tile):
    WGMMA_WAIT((uint32(1),))


@cuda.jit(device=True)
def named_barrier(tile):
    bar_sync(1, 32)


ALIGNED = [mma_sync, ldmatrix, stmatrix, cluster_barrier, wgmma_wait, named_barrier]


def kernel_of(body, instruction):
    @cuda.jit
    def kernel(out):
        tile = cuda.shared.array(16, uint8, 16)
        tile[cuda.laneid % 16] = 0
        cuda.syncthreads()
        body(instruction, tile, cuda.laneid)

    return kernel


@cuda.jit(device=True)
def in_both_branches(instruction, tile, lane):
    if lane < 16:
        instruction(tile)
    else:
        instruction(tile)


@cuda.jit(device=True)
def in_every_other_iteration(instruction, tile, lane):
    for i in range(4):
        if (i + lane) % 2:
            instruction(tile)


@cuda.jit(device=True)
def behind_divergent_code(instruction, tile, lane):
    """Lanes take different branches and leave loops in different iterations, and meet behind them."""
    steps = 0
    for i in range(3):
        instruction(tile)
        if lane == i:
            steps += 1
        while steps < lane % 4:
            steps += 1
            if lane == 7:
                break
        instruction(tile)
        if lane % 5 == 0:
            continue
        elif lane % 3 == 0:
            for k in range(3):
                steps += k % 2
        steps -= 1


@pytest.mark.parametrize("instruction", ALIGNED, ids=lambda function: function.__name__)
def test_lanes_must_reach_an_aligned_instruction_together(instruction):
    for body in (in_both_branches, in_every_other_iteration):
        assert_refused(simulator.DivergentBarrier, kernel_of(body, instruction), "by different calls, or in different")
    for seed in range(4):
        with simulator.seed(seed), simulator.settings.override_settings(engine="threads"):
            lanes(kernel_of(behind_divergent_code, instruction))


@pytest.mark.parametrize("engine", ["vector", "threads"])
def test_atomics_aggregated_by_active_lanes(engine):
    @cuda.jit
    def kernel(count, out):
        i = cuda.grid(1)
        if i % 3 == 1 and i > 4:
            mask = cuda.activemask()
            leader, before = cuda.ffs(mask) - 1, 0
            if cuda.laneid == leader:
                before = cuda.atomic.add(count, 0, cuda.popc(mask))
            out[i] = cuda.shfl_sync(mask, before, leader) + cuda.popc(mask & ((1 << cuda.laneid) - 1))

    count, out = np.zeros(1, np.int32), np.full(96, -1, np.int32)
    with simulator.settings.override_settings(engine=engine):
        kernel[2, 48](count, out)
    assert count[0] == 30 and sorted(out[out >= 0]) == list(range(30))


# --- blocks and grids -----------------------------------------------------------------------------------------------


def test_two_barriers_of_one_block_are_divergent():
    @cuda.jit
    def kernel(out):
        if cuda.threadIdx.x < 40:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    first = kernel.py_func.__code__.co_firstlineno + 3
    assert_refused(
        simulator.DivergentBarrier, kernel, f"test_simulator.py:{first}", f"test_simulator.py:{first + 2}", threads=64
    )


@cuda.jit
def stage_then_read(out, n):
    tile = cuda.shared.array(64, np.int32)
    i = cuda.threadIdx.x
    tile[i] = i
    if i >= n:
        return
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[63 - i]


@cuda.jit
def count_the_rest(out, n):
    i = cuda.threadIdx.x
    out[cuda.grid(1)] = 0
    if i < n:
        out[cuda.grid(1)] = cuda.syncthreads_count(i >= n - 2)


@cuda.jit
def one_more_returns_each_time(out, n):
    i = cuda.threadIdx.x
    for k in range(64):
        if i == 63 - k:
            return
        out[cuda.grid(1)] = k + 1
        cuda.syncthreads()


@cuda.jit
def sync_the_grid_with_the_rest(out, n):
    i = cuda.grid(1)
    out[i] = -1
    if i >= 96 + n:
        return
    cuda.cg.this_grid().sync()
    out[i] = out[127] - i


@pytest.mark.parametrize(
    "kernel, n, expected",
    [
        (stage_then_read, 40, lambda i, n: np.where(i < n, 63 - i, 7)),
        (stage_then_read, 1, lambda i, n: np.where(i < n, 63 - i, 7)),
        (count_the_rest, 40, lambda i, n: np.where(i < n, 2, 0)),
        (one_more_returns_each_time, 0, lambda i, n: np.where(i < 63, 63 - i, 7)),
        (sync_the_grid_with_the_rest, 10, None),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("seed", range(3))
def test_barriers_do_not_wait_for_threads_that_have_exited(kernel, n, expected, seed):
    out, i = np.full(128, 7, np.int32), np.arange(64)
    with simulator.races(), simulator.seed(seed):
        kernel[2, 64](out, n)
    if expected is None:
        assert out[: 96 + n].tolist() == [-1 - i for i in range(96 + n)]
    else:
        assert out.reshape(2, 64).tolist() == 2 * [expected(i, n).tolist()]


@pytest.mark.parametrize("exits_first", [False, True])
def test_threads_that_exited_without_a_barrier_do_not_hide_others_at_another(exits_first):
    @cuda.jit
    def two_barriers(out):
        i = cuda.threadIdx.x
        if i < 20:
            return
        if i < 40:
            cuda.syncthreads()
        else:
            cuda.syncthreads()

    @cuda.jit
    def the_first_thread_exits(out):
        i = cuda.grid(1)
        if exits_first and cuda.blockIdx.x == 1:
            cuda.nanosleep(1)
        if i == 32:
            if not exits_first:
                for _ in range(20):
                    cuda.nanosleep(1)
            return
        cuda.cg.this_grid().sync()

    words = "all threads of the block that have not exited must reach the same one: move it out of the `if` or loop"
    assert_refused(simulator.DivergentBarrier, two_barriers, "waits at syncthreads", words, threads=64)
    words = "the first thread of each block must reach it"
    kernel = the_first_thread_exits
    assert_refused(simulator.DivergentBarrier, kernel, "block (1, 0, 0) warp 0 lane 0 has exited", words, grid=2)


def test_grid_sync_orders_stores_of_all_blocks():
    @cuda.jit
    def kernel(out, scratch):
        scratch[cuda.blockIdx.x] = cuda.blockIdx.x + 1
        cuda.cg.this_grid().sync()
        out[cuda.grid(1)] = scratch[(cuda.blockIdx.x + 1) % cuda.gridDim.x]

    for seed in range(5):
        out = np.zeros(8, np.int64)
        with simulator.seed(seed):
            kernel[4, 2](out, np.zeros(4, np.int64))
        assert out.tolist() == [2, 2, 3, 3, 4, 4, 1, 1]


@cuda.jit
def message_passing(flag, data, out):
    if cuda.blockIdx.x == 1:
        if cuda.threadIdx.x == 0:
            data[0] = 42
            cuda.threadfence()
            cuda.atomic.exch(flag, 0, 1)
    else:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(20)
        out[cuda.threadIdx.x] = data[0]


def test_blocks_run_concurrently():
    for seed in range(10):
        out = np.zeros(32, np.int32)
        simulator.run(message_passing, 2, 32, (np.zeros(1, np.int32), np.zeros(1, np.int32), out), seed=seed)
        assert (out == 42).all()


def test_a_spin_lock_is_exclusive():
    @cuda.jit
    def kernel(lock, count):
        if cuda.threadIdx.x == 0:
            while cuda.atomic.cas(lock, 0, 0, 1) != 0:
                pass
            old = count[0]
            cuda.nanosleep(1)
            count[0] = old + 1
            cuda.atomic.exch(lock, 0, 0)

    count = np.zeros(1, np.int32)
    kernel[16, 2](np.zeros(1, np.int32), count)
    assert count[0] == 16


# --- deadlocks ------------------------------------------------------------------------------------------------------


def test_endless_polling_is_a_deadlock():
    line = message_passing.py_func.__code__.co_firstlineno + 8
    with pytest.raises(simulator.Deadlock) as found:
        message_passing[1, 32](np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(32, np.int32))
    assert "polls in vain" in str(found.value) and "block (0, 0, 0) warp 0 lanes 0-31" in str(found.value)
    assert f"message_passing, test_simulator.py:{line}" in str(found.value) or f"simulator.py:{line + 1}" in str(
        found.value
    )


@cuda.jit
def poll_plainly(flag, out):
    if cuda.blockIdx.x == 0:
        while flag[0] == 0:
            pass
    flag[0] = 1


@cuda.jit
def count_polls(flag, out):
    polls = 0
    while flag[0] == 0:
        polls += 1
    out[0] = polls


@cuda.jit
def poll_two_flags(flag, out):
    last = out[-1 + len(out)]
    while flag[0] == 0 and out[cuda.laneid] == last:
        pass


@cuda.jit
def poll_shared_memory(flag, out):
    ready = cuda.shared.array(1, numba.int32)
    ready[0] = 0
    while ready[0] == 0:
        pass


@cuda.jit
def poll_in_a_device_function(flag, out):
    while not is_set(flag):
        pass


@cuda.jit(device=True)
def is_set(flag):
    return flag[0] != 0


PLAIN_POLLS = {
    poll_plainly: r"flag\[0\]",
    count_polls: r"flag\[0\]",
    poll_two_flags: r"flag\[0\], out\[\d+\]|out\[\d+\], flag\[0\]",
    poll_shared_memory: r"the shared array of test_simulator.py:\d+\[0\]",
    poll_in_a_device_function: r"flag\[0\]",
}


@pytest.mark.parametrize("preempt", [0, 0.1])
@pytest.mark.parametrize("kernel", PLAIN_POLLS, ids=lambda kernel: kernel.__name__)
def test_a_loop_that_polls_with_plain_loads_is_a_deadlock(kernel, preempt):
    where = "is_set" if kernel is poll_in_a_device_function else kernel.__name__
    message = rf"lane \d+ polls ({PLAIN_POLLS[kernel]}) with plain loads, at {where}, test_simulator.py:\d+"
    with simulator.seed(0, preempt), pytest.raises(simulator.Deadlock, match=message):
        kernel[1, 32](np.zeros(1, np.int32), np.zeros(32, np.int32))


def test_a_deadlock_report_names_what_is_polled():
    @cuda.jit
    def volatile(flag, out):
        while ld_volatile_s32(flag, cuda.laneid // 16) == 0:
            pass

    @cuda.jit
    def atomic(flag, out):
        while cuda.atomic.add(flag, cuda.laneid, 0) == 0:
            pass

    arguments = [simulator.pointer(np.zeros(32, np.int32)), 0]
    for kernel, words in (
        (volatile, r"lanes 0-31: ld.volatile, at volatile, test_simulator.py:\d+, polls flag\[0\], flag\[1\]$"),
        (atomic, r"lanes 0-31: an atomic that changes nothing, at atomic, .*, polls flag\[0\], .*, flag\[3\], \.\.\.$"),
    ):
        with pytest.raises(simulator.Deadlock, match=words):
            simulator.run(kernel, 1, 32, arguments)


def test_polling_stale_memory_with_plain_loads_is_a_deadlock():
    with simulator.weak_memory(), pytest.raises(simulator.Deadlock, match=r"polls flag\[0\] with plain loads"):
        poll_plainly[2, 1](np.zeros(1, np.int32), np.zeros(32, np.int32))


@cuda.jit
def sum_up(x, out):
    total = 0
    for i in range(len(x)):
        total += x[i]
    out[cuda.laneid] = total


@cuda.jit
def repeat_one_load(x, out):
    total = 0
    for _ in range(2 * len(x)):
        total += x[0]
    out[cuda.laneid] = total


@cuda.jit
def count_in_memory(x, out):
    while x[0] < 50_000:
        x[0] += 1
    out[cuda.laneid] = x[0]


@cuda.jit
def take_tickets(x, out):
    while x[1] == 1 and cuda.atomic.add(x, 0, 1) < 100_000:
        out[cuda.laneid] = 1


@pytest.mark.parametrize("kernel", [sum_up, repeat_one_load, count_in_memory, take_tickets])
def test_long_loops_of_plain_loads_run(kernel):
    kernel[1, 2](np.ones(100_000, np.int64), np.zeros(32, np.int64))


def test_a_leader_that_polls_for_its_warp_is_a_deadlock():
    @cuda.jit
    def kernel(out):
        ready = 0
        while ready == 0:
            if cuda.laneid == 0:
                ready = cuda.atomic.add(out, 0, 0)
            ready = cuda.shfl_sync(FULL_MASK, ready, 0)

    assert_refused(
        simulator.Deadlock, kernel, "lanes 0: an atomic that changes nothing", "lanes 1-31: shfl_sync", seeds=[0]
    )


def test_a_bounded_wait_is_not_a_deadlock():
    @cuda.jit
    def kernel(out):
        tries = 0
        while cuda.atomic.add(out, 40, 0) == 0 and tries < 500:
            tries += 1
        out[cuda.laneid] = tries

    out = np.zeros(64, np.int64)
    kernel[1, 32](out)
    assert (out[:32] == 500).all()


def test_a_deadlock_report_lists_at_most_eight_groups():
    @cuda.jit
    def kernel(out):
        if cuda.blockIdx.x > 0:
            cuda.cg.this_grid().sync()
        else:
            t = simulator.thread()
            t.rendezvous(t.block, "bar.sync 1", 64)

    assert_refused(
        simulator.Deadlock,
        kernel,
        "no thread can run",
        "block (0, 0, 0) warp 0 lanes 0-31: bar.sync 1 (32 of 64 arrived), at kernel, test_simulator.py:",
        "grid sync (352 of 384 arrived)",
        "and 4 more groups",
        grid=12,
    )


def test_an_exception_in_a_kernel_names_the_thread_and_cleans_up():
    @cuda.jit
    def kernel(out):
        if cuda.blockIdx.x == 1 and cuda.threadIdx.y == 2:
            raise KeyError("missing")
        cuda.syncthreads()

    with pytest.raises(KeyError) as found:
        kernel[2, (1, 4)](np.zeros(1))
    assert "block (1, 0, 0) warp 0 lane 2, threadIdx (0, 2, 0), of kernel kernel" in found.value.__notes__[0]
    assert lanes(cuda.jit(lambda out: cuda.syncthreads())) == [0] * 32


@cuda.jit(device=True)
def read_behind_the_end(x):
    return x[100]


@cuda.jit
def call_a_faulty_function(x, pointer):
    cuda.syncthreads()
    x[0] = read_behind_the_end(x)


@cuda.jit
def add_behind_the_end(x, pointer):
    cuda.atomic.add(x, 100, 1)


@cuda.jit
def read_a_pointer_behind_the_end(x, pointer):
    ld_global_s32x4(pointer, 100)


TRACEBACKS = {
    call_a_faulty_function: ["call_a_faulty_function", "read_behind_the_end"],
    add_behind_the_end: ["add_behind_the_end"],
    read_a_pointer_behind_the_end: ["read_a_pointer_behind_the_end"],
}


@pytest.mark.parametrize("weak", [False, True])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("kernel", TRACEBACKS, ids=lambda kernel: kernel.__name__)
def test_a_traceback_ends_at_the_kernels_line(kernel, together, weak):
    x = np.zeros(4, np.int32)
    with pytest.raises(simulator.OutOfBounds) as found, contextlib.ExitStack() as stack:
        if weak:
            stack.enter_context(simulator.weak_memory())
        if together:
            stack.enter_context(simulator.together())
        simulator.run(kernel, 1, 1, [x, simulator.pointer(x)])
    frames = traceback.extract_tb(found.tb)
    own = [frame.name for frame in frames if frame.filename == __file__]
    assert own == ["test_a_traceback_ends_at_the_kernels_line", *TRACEBACKS[kernel]]
    assert frames[-1].filename == __file__ and not any(
        "simulator/" in frame.filename for frame in frames if frame.name not in own
    )
    assert found.value.__cause__ is None and (found.value.__suppress_context__ or not found.value.__context__)


@pytest.mark.threads("it breaks a function that the vector engine does not call")
def test_an_error_of_the_simulator_itself_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(simulator.warp, "collective", None)
    with pytest.raises(TypeError) as found:
        simulator.run(sync_one_warp, 1, 32, [])
    assert [frame.name for frame in traceback.extract_tb(found.tb)][-2:] == ["sync_one_warp", "syncwarp"]


@cuda.jit
def sync_one_warp():
    cuda.syncwarp()


def test_print_shows_the_contents_of_an_array(capsys):
    @cuda.jit
    def kernel(x, pointer):
        a = cuda.shared.array(4, np.int32)
        a[cuda.laneid] = cuda.laneid
        cuda.syncwarp()
        if cuda.laneid == 0:
            print("a is", a, "x is", x, "pointer is", pointer)

    x = np.arange(3)
    simulator.run(kernel, 1, 4, [x, simulator.pointer(x)])
    assert capsys.readouterr().out == "a is [0 1 2 3] x is [0 1 2] pointer is [0 1 2]\n"
    assert repr(simulator.pointer(x, "x")) == "Pointer(x (3 x int64), [0 1 2])"


def test_dir_lists_the_public_names():
    names = dir(simulator)
    assert {"run", "seed", "trace", "weak_memory", "Deadlock", "OutOfBounds", "UnsupportedInstruction"} <= set(names)
    assert all(hasattr(simulator, name) and not name.startswith("_") for name in names)
    errors = [
        e for e in vars(simulator.errors).values() if isinstance(e, type) and issubclass(e, simulator.SimulatorError)
    ]
    assert {e.__name__ for e in errors} <= set(names)


def test_wrong_launches_are_refused():
    kernel = cuda.jit(lambda out: None)
    for grid, block, words in ((0, 1, "grid is 0"), (1, 2048, "block is 2048"), (1, (32, 64), "at most 1024 threads")):
        with pytest.raises(ValueError, match=words):
            kernel[grid, block](np.zeros(1))
    with pytest.raises(TypeError, match=r"takes 1 arguments \(out\), but 2 were given"):
        kernel[1, 1](1, 2)
    with pytest.raises(ValueError, match="launch configuration"):
        kernel(1)
    with pytest.raises(simulator.SimulatorError, match="outside one"):
        cuda.threadIdx.x  # noqa: B018


# --- seeds ----------------------------------------------------------------------------------------------------------


@cuda.jit
def sum_by_lane_0(out, with_syncwarp):
    partial = cuda.shared.array(32, np.int64)
    partial[cuda.laneid] = cuda.laneid
    if with_syncwarp:
        cuda.syncwarp()
    if cuda.laneid == 0:
        for i in range(32):
            out[0] += partial[i]


@cuda.jit
def next_warps_sum(out, with_syncthreads):
    partial = cuda.shared.array(4, np.int64)
    warp = cuda.threadIdx.x // 32
    partial[warp] = cuda.popc(cuda.ballot_sync(FULL_MASK, True))
    cuda.syncwarp()
    if with_syncthreads:
        cuda.syncthreads()
    out[warp] = partial[(warp + 1) % 4]


@pytest.mark.parametrize("kernel, threads, right", [(sum_by_lane_0, 32, [496]), (next_warps_sum, 128, [32] * 4)])
def test_a_missing_barrier_fails_under_some_seeds(kernel, threads, right):
    def results(with_barrier):
        for seed in range(10):
            out = np.zeros(len(right), np.int64)
            with simulator.seed(seed):
                kernel[1, threads](out, with_barrier)
            yield out.tolist() == right

    assert all(results(True))
    assert not all(results(False))


def test_a_seed_repeats_a_run_and_preemption_separates_load_from_store():
    @cuda.jit
    def kernel(out):
        out[0] = out[0] + 1

    def run(seed, preempt):
        out = np.zeros(1, np.int64)
        with simulator.seed(seed, preempt=preempt):
            kernel[2, 32](out)
        return int(out[0])

    assert run(3, 0) == 64 and run(3, 0.2) < 64
    assert run(3, 0.2) == run(3, 0.2)
    assert len({run(seed, 0.2) for seed in range(8)}) > 1


def test_a_slow_warp_runs_after_all_others():
    """Warp 0 overwrites what warp 1 has stored, unless warp 1 is the slow one; random orders do both."""

    @cuda.jit
    def kernel(out):
        if cuda.threadIdx.x % 32 == 0:
            out[cuda.blockIdx.x] = cuda.threadIdx.x // 32

    def run(seed, **options):
        out = np.full(3, -1)
        with simulator.seed(seed, **options):
            kernel[3, 64](out)
        return out.tolist()

    for seed, slow_warp in itertools.product(range(6), (0, 1)):
        assert run(seed, slow_warp=slow_warp) == [slow_warp] * 3
    assert {value for seed in range(6) for value in run(seed, preempt=0.1)} == {0, 1}


def test_a_slow_warp_finds_a_wait_for_a_phase_that_has_passed():
    """Warp 0 waits for an arrival of warp 1, which does not wait for it: the second phase may have ended before."""

    @cuda.jit
    def kernel(out):
        barriers = cuda.shared.array(1, uint64)
        if cuda.threadIdx.x == 0:
            mbarrier_init(barriers, 0, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if cuda.threadIdx.x == 32:
            mbarrier_arrive(barriers, 0)
            mbarrier_arrive(barriers, 0)
        if cuda.threadIdx.x == 0:
            out[0] = 1
            mbarrier_wait_parity(barriers, 0, uint32(0))

    def deadlocks(slow_warp):
        with simulator.seed(0, preempt=1.0, slow_warp=slow_warp):
            try:
                kernel[1, 64](np.zeros(1))
            except simulator.Deadlock:
                return True
        return False

    assert deadlocks(0) and not deadlocks(1)


def test_atomics_hold_under_preemption():
    @cuda.jit
    def kernel(out):
        cuda.atomic.add(out, cuda.threadIdx.x & 1, 1)

    out = np.zeros(2, np.int32)
    with simulator.seed(1, preempt=0.5):
        kernel[4, 64](out)
    assert out.tolist() == [128, 128]


def test_trace_has_every_warp_operation():
    @cuda.jit
    def kernel(out):
        cuda.syncthreads()
        out[cuda.laneid] = cuda.shfl_xor_sync(FULL_MASK, cuda.laneid, 1)

    with simulator.trace() as events:
        lanes(kernel)
    lanes(kernel)
    assert [e.what for e in events] == ["syncthreads"] * 32 + ["shfl_xor_sync"] * 32
    last = {e.lane: e for e in events}
    assert last[5].details["result"] == 4 and last[5].block == (0, 0, 0) and last[5].step > events[0].step


def test_grids_of_one_world_run_concurrently():
    """Run two launches at once, each of which waits for the other."""

    def kernel(local, remote):
        local[0] = 1
        simulator.thread().grid.memory_changed()
        while remote[0] == 0:
            simulator.thread().spin()

    a, b = simulator.pointer(np.zeros(1)), simulator.pointer(np.zeros(1))
    world = simulator.World(seed=0)
    world.add(simulator.Grid(world, kernel, (1, 1, 1), (1, 1, 1), (a, b)))
    world.add(simulator.Grid(world, kernel, (1, 1, 1), (1, 1, 1), (b, a)))
    world.run()
    assert a[0] == b[0] == 1


# --- speed ----------------------------------------------------------------------------------------------------------


def test_a_shuffle_takes_few_scheduler_steps():
    """A warp takes one scheduler step per shuffle, and one to end: 32 warps with 5 shuffles each."""

    def kernel(x, out):
        v = x[cuda.grid(1)]
        for d in (16, 8, 4, 2, 1):
            v += cuda.shfl_xor_sync(FULL_MASK, v, d)
        if cuda.laneid == 0:
            out[cuda.grid(1) // 32] = v

    x, out = np.arange(1024, dtype=np.float32), np.zeros(32, np.float32)
    world = simulator.World(seed=0)
    world.add(simulator.Grid(world, kernel, (4, 1, 1), (256, 1, 1), (simulator.pointer(x), simulator.pointer(out))))
    world.run()
    assert (out == x.reshape(32, 32).sum(1)).all()
    assert world.steps <= 32 * 6
