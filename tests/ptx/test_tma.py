"""Tensor maps and TMA: host-side checks, and faulty kernels that the simulator must reject."""

import math

import pytest
import torch
from helpers.hopper import BF16, aligned_zeros, check_refused, outcomes, simulated

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from numba import cuda, float32, uint8, uint32, uint64

from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.matrix import stmatrix_x4
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.tensormap import (
    fence_proxy_tensormap_acquire_gpu,
    make_tensormap_replace_global_dim,
    make_tensormap_replace_global_stride,
    tensormap_cp_fenceproxy,
    tensormap_replace_global_address,
)
from moe_numba.ptx.tma import tma_load_2d, tma_load_2d_multicast, tma_load_3d, tma_store_2d, tma_store_3d
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import tensor_map

# --- encoding on the host -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int32])
def test_a_map_is_128_aligned_bytes_on_its_tensors_device(dtype, device):
    x = torch.zeros(4, 32, 64, dtype=torch.uint8, device=device).view(dtype)
    for tensor, box in (x, (1, 8, 16)), (x[1], (8, 16)), (x[0, 0], (16,)), (x[:, None, :, None], (1, 1, 8, 1, 16)):
        found = tensor_map(tensor, box)
        assert found.shape == (128,) and found.dtype == torch.uint8 and found.device == x.device
        assert found.data_ptr() % 128 == 0


def test_a_dimension_of_one_may_have_any_stride(device):
    x = torch.zeros(64, dtype=torch.uint8, device=device)
    tensor_map(x.as_strided((1, 1, 64), (3, 5, 1)), (1, 1, 64), swizzle=64)


@pytest.mark.parametrize(
    "error, words, call",
    [
        (TypeError, "tensor is list", lambda x: tensor_map([1], (1,))),
        (ValueError, "tensor is torch.int64", lambda x: tensor_map(x.view(torch.int64), (1, 2))),
        (ValueError, "tensor has 6 dimensions", lambda x: tensor_map(x.view(1, 1, 1, 1, 32, 256), (1,) * 6)),
        (ValueError, r"tensor has shape \(0, 256\)", lambda x: tensor_map(x[:0], (1, 16))),
        (ValueError, "it must be a multiple of 16", lambda x: tensor_map(x[:, 8:], (1, 16))),
        (ValueError, r"strides \(1, 256\); its last dimension must be", lambda x: tensor_map(x.T, (16, 1))),
        (
            ValueError,
            "that of dimension 0 is 24 bytes, but must be a multiple of 16",
            lambda x: tensor_map(x.view(-1)[:240].view(10, 24), (1, 16)),
        ),
        (ValueError, "that of dimension 0 is 0 bytes", lambda x: tensor_map(x[:1].expand(4, -1), (1, 16))),
        (ValueError, "swizzle is 16; it must be 0, 32, 64 or 128", lambda x: tensor_map(x, (1, 16), swizzle=16)),
        (
            ValueError,
            "l2_promotion is 32; it must be 0, 64, 128 or 256",
            lambda x: tensor_map(x, (1, 16), l2_promotion=32),
        ),
        (ValueError, r"box is \(1,\); it must have 2 extents", lambda x: tensor_map(x, (1,))),
        (
            ValueError,
            r"box is \(257, 16\); it must have 2 extents, each from 1 to 256",
            lambda x: tensor_map(x, (257, 16)),
        ),
        (ValueError, r"box is \(0, 16\)", lambda x: tensor_map(x, (0, 16))),
        (ValueError, r"its rows have 24 bytes; they must be a multiple of 16", lambda x: tensor_map(x, (1, 24))),
        (ValueError, r"rows have 256 bytes; with swizzle 128", lambda x: tensor_map(x, (1, 256), swizzle=128)),
        (ValueError, r"rows have 64 bytes; with swizzle 128", lambda x: tensor_map(x, (1, 64), swizzle=128)),
    ],
)
def test_unsupported_tensors_and_boxes_are_refused(error, words, call, device):
    with pytest.raises(error, match=words):
        call(torch.zeros(32, 256, dtype=torch.uint8, device=device))


# --- faulty kernels -------------------------------------------------------------------------------------------------


def assert_refused(error, kernel, arguments, *patterns, **options):
    """Assert that every seed raises this error with these patterns."""
    check_refused(error, outcomes(kernel, arguments, **options), *patterns)


def map_and_tensor():
    """Return a map of 32 rows of 128 bytes with box (8, 128), and its tensor."""
    x = torch.arange(32 * 128).to(torch.uint8).view(32, 128)
    return [tensor_map(x, (8, 128), swizzle=128), x]


@cuda.jit(device=True)
def make_barrier(barrier, size):
    if cuda.threadIdx.x == 0:
        mbarrier_init(barrier, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(barrier, 0, size)


def make_load(load, alignment=1024):
    load = cuda.jit(device=True)(load)

    @cuda.jit
    def kernel(map, x):
        smem, barrier = cuda.shared.array(2048, uint8, alignment), cuda.shared.array(1, uint64)
        make_barrier(barrier, 1024)
        if cuda.threadIdx.x == 0:
            load(smem, map, barrier)
        cuda.syncthreads()
        mbarrier_wait_parity(barrier, 0, 0)

    return kernel


@simulated
@pytest.mark.parametrize(
    "error, words, alignment, load",
    [
        (
            "Misaligned",
            "aligned to 128 bytes, but index 64",
            1024,
            lambda s, m, b: tma_load_2d(s, 64, m, 0, 0, 0, b, 0),
        ),
        ("Misaligned", "array(..., 128)", 16, lambda s, m, b: tma_load_2d(s, 0, m, 0, 0, 0, b, 0)),
        ("Misaligned", "array(..., 1024)", 128, lambda s, m, b: tma_load_2d(s, 0, m, 0, 0, 0, b, 0)),
        ("OutOfBounds", "1024 bytes at index 1152", 1024, lambda s, m, b: tma_load_2d(s, 1152, m, 0, 0, 0, b, 0)),
        ("SimulatorError", "of 3 dimensions, not 2", 1024, lambda s, m, b: tma_load_3d(s, 0, m, 0, 0, 0, 0, b, 0)),
        ("OutOfBounds", "a tensor map at index 384", 1024, lambda s, m, b: tma_load_2d(s, 0, m, 384, 0, 0, b, 0)),
        ("Misaligned", "aligned to 64 bytes", 1024, lambda s, m, b: tma_load_2d(s, 0, m, 16, 0, 0, b, 0)),
        ("SimulatorError", "holds no tensor map", 1024, lambda s, m, b: tma_load_2d(s, 0, m, 64, 0, 0, b, 0)),
        ("OutOfBounds", "mask 0x3", 1024, lambda s, m, b: tma_load_2d_multicast(s, 0, m, 0, 0, 0, b, 0, 3)),
        ("BarrierMisuse", "as an mbarrier", 1024, lambda s, m, b: tma_load_2d(s, 0, m, 0, 0, 0, s, 1024)),
    ],
)
def test_a_wrong_operand_is_refused(error, words, alignment, load):
    def arguments():
        map, x = map_and_tensor()
        maps = aligned_zeros(256, torch.uint8)
        maps[:128] = map
        return [maps, x]

    assert_refused(getattr(simulator, error), make_load(load, alignment), arguments, words, "block (0, 0, 0)", seeds=2)


def make_box_store(store):
    """Make a kernel that fills shared memory with nines; one thread issues the store."""
    wait_read, store = make_bulk_wait_group_read(0), cuda.jit(device=True)(store)

    @cuda.jit
    def kernel(map, x):
        smem, t = cuda.shared.array(1024, uint8, 1024), cuda.threadIdx.x
        for i in range(t, 1024, 64):
            smem[i] = 9
        fence_proxy_async_shared()
        cuda.syncthreads()
        if t == 0:
            store(smem, map)
            bulk_commit_group()
            wait_read()

    return kernel


@simulated
@pytest.mark.parametrize(
    "dtype, x", [*((torch.uint8, x) for x in (1, 8, 200, -8, -500)), (torch.float32, 1), (BF16, 4)]
)
def test_a_box_must_start_at_a_multiple_of_16_bytes(dtype, x):
    def arguments():
        tensor = torch.zeros(1, 8, 256, dtype=torch.uint8).view(dtype)
        box = 128 // dtype.itemsize
        flat, deep = tensor_map(tensor[0], (8, box)), tensor_map(tensor, (1, 8, box))
        maps = aligned_zeros(256, torch.uint8)
        maps[:128], maps[128:] = flat, deep
        return [maps, tensor]

    kernels = [
        make_load(lambda s, m, b: tma_load_2d(s, 0, m, 0, x, 3, b, 0)),
        make_load(lambda s, m, b: tma_load_2d_multicast(s, 0, m, 0, x, 3, b, 0, 1)),
        make_load(lambda s, m, b: tma_load_3d(s, 0, m, 128, x, 3, 0, b, 0)),
        make_box_store(lambda s, m: tma_store_2d(m, 0, x, 3, s, 0)),
        make_box_store(lambda s, m: tma_store_3d(m, 128, x, 3, 0, s, 0)),
    ]
    words = "block (0, 0, 0) warp 0 lane 0: cp.async.bulk.tensor", "a multiple of 16 bytes of a row", "test_tma.py:"
    for kernel in kernels:
        at = f"innermost coordinate is {x}, which is byte {x * dtype.itemsize}"
        assert_refused(simulator.Misaligned, kernel, arguments, *words, at, seeds=1)


@simulated
@pytest.mark.parametrize(
    "dtype, width, written",
    [(torch.uint8, 100, 112), (torch.uint8, 33, 48), (torch.float32, 84, 96), (torch.uint8, 96, 96)],
)
def test_a_store_clips_rows_to_whole_chunks_of_16_bytes(dtype, width, written):
    """The store overwrites columns after the tensor, a slice of a wider one, but no rows below it."""

    def arguments():
        whole = torch.zeros(7, 160, dtype=torch.uint8)
        part = whole[1:6, 16 : 16 + width].view(dtype)
        return [tensor_map(part, (8, 128 // dtype.itemsize)), whole]

    right = torch.zeros(7, 160, dtype=torch.uint8)
    right[1:6, 16 : 16 + written] = 9
    for _, whole in outcomes(make_box_store(lambda s, m: tma_store_2d(m, 0, 0, 0, s, 0)), arguments):
        assert torch.equal(whole, right)


@simulated
@pytest.mark.parametrize("x, y", [(-16, 0), (0, -1), (-128, -8)])
def test_a_store_must_not_start_before_the_tensor(x, y):
    def arguments():
        tensor = torch.zeros(8, 256, dtype=torch.uint8)
        return [tensor_map(tensor, (8, 128)), tensor]

    words = "does not start before the tensor", "test_tma.py:", f"coordinates are [{x}, {y}]"
    assert_refused(
        simulator.OutOfBounds, make_box_store(lambda s, m: tma_store_2d(m, 0, x, y, s, 0)), arguments, *words, seeds=1
    )
    load = make_load(lambda s, m, b: tma_load_2d(s, 0, m, 0, x, y, b, 0))
    assert not any(isinstance(found, Exception) for found in outcomes(load, arguments, seeds=1))


@simulated
def test_a_store_must_not_extend_past_the_end_of_memory():
    def arguments():
        x = torch.zeros(1, 33, dtype=torch.uint8)
        return [tensor_map(x, (8, 128)), x]

    words = "15 bytes past the end", "a store writes whole chunks of 16 bytes"
    assert_refused(
        simulator.OutOfBounds, make_box_store(lambda s, m: tma_store_2d(m, 0, 0, 0, s, 0)), arguments, *words, seeds=2
    )
    load = make_load(lambda s, m, b: tma_load_2d(s, 0, m, 0, 0, 0, b, 0))
    assert not any(isinstance(found, Exception) for found in outcomes(load, arguments, seeds=2))


@simulated
def test_a_tile_read_before_its_barrier_is_refused():
    @cuda.jit
    def kernel(map, x):
        smem, barrier = cuda.shared.array(1024, uint8, 1024), cuda.shared.array(1, uint64)
        make_barrier(barrier, 1024)
        if cuda.threadIdx.x == 0:
            tma_load_2d(smem, 0, map, 0, 0, 0, barrier, 0)
            x[0] = smem[300]

    words = (
        "reads index 300 of the shared array of test_tma.py:",
        "cp.async.bulk.tensor.2d to shared memory, which block",
    )
    assert_refused(simulator.AsyncRace, kernel, map_and_tensor, *words)


def make_store(fence=True, wait=True, sync=True):
    wait_read = make_bulk_wait_group_read(0)

    @cuda.jit
    def kernel(map, x):
        smem, t = cuda.shared.array(1024, uint8, 1024), cuda.threadIdx.x
        for iteration in range(2):
            stmatrix_x4(smem, t % 64 * 16, uint32(iteration), uint32(iteration), uint32(iteration), uint32(iteration))
            if fence:
                fence_proxy_async_shared()
            if sync:
                cuda.syncthreads()
            if t == 0:
                tma_store_2d(map, 0, 0, 8 * iteration, smem, 0)
                bulk_commit_group()
                if wait:
                    wait_read()
            cuda.syncthreads()
        if t == 0:
            wait_read()

    return kernel


@simulated
def test_a_store_needs_fence_barrier_and_wait():
    for _, x in outcomes(make_store(), map_and_tensor):
        assert (x[:16].view(torch.int32).view(2, 8, 32) == torch.arange(2)[:, None, None]).all()
    assert_refused(
        simulator.MissingFence,
        make_store(fence=False),
        map_and_tensor,
        "tensor.2d to global memory",
        "fence_proxy_async_shared",
    )
    for mistake in (dict(wait=False), dict(sync=False)):
        errors = [e for e in outcomes(make_store(**mistake), map_and_tensor, seeds=24) if isinstance(e, Exception)]
        assert len(errors) > 4 and {type(e) for e in errors} <= {simulator.AsyncRace, simulator.MissingFence}


@simulated
def test_a_multicast_needs_a_cluster_barrier_first():
    @cuda.jit
    def kernel(map, x):
        smem, barrier = cuda.shared.array(1024, uint8, 1024), cuda.shared.array(1, uint64)
        make_barrier(barrier, 1024)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0 and cuda.blockIdx.x == 0:
            tma_load_2d_multicast(smem, 0, map, 0, 0, 0, barrier, 0, 3)
        mbarrier_wait_parity(barrier, 0, 0)
        barrier_cluster_arrive()
        barrier_cluster_wait()

    assert_refused(simulator.ClusterError, kernel, map_and_tensor, "may not have started", blocks=2, cluster=2)


@simulated
def test_a_map_must_refer_to_an_existing_tensor():
    kernel = make_load(lambda s, m, b: tma_load_2d(s, 0, m, 0, 0, 0, b, 0))

    def freed_tensor():
        map = tensor_map(torch.zeros(32, 128, dtype=torch.uint8), (8, 128), swizzle=128)
        return [map, torch.zeros(1)]

    def too_large():
        x = torch.zeros(32, 128, dtype=torch.uint8)
        simulator.tensor_map.register(x)
        described = simulator.tensor_map.TensorMap(x.data_ptr(), 1, [128, 320], [128], [128, 8], 128)
        map = tensor_map(x, (8, 128))
        map[:] = torch.frombuffer(bytearray(described.pack()), dtype=torch.uint8)
        return [map, x]

    assert_refused(
        simulator.SimulatorError, kernel, freed_tensor, "which is in no tensor that a map was encoded for", seeds=2
    )
    past_the_end = make_load(lambda s, m, b: tma_load_2d(s, 0, m, 0, 0, 32, b, 0))
    assert_refused(simulator.OutOfBounds, past_the_end, too_large, "extends 1024 bytes past the end", seeds=2)


# --- maps modified on the device ------------------------------------------------------------------------------------


def make_map_writer(modify, acquire=True, other_acquires=False, lanes_differ=False, address=0):
    """Make a kernel that modifies a map, publishes it and uses it for a load."""
    modify = cuda.jit(device=True)(modify)

    @cuda.jit
    def kernel(maps_out, map, x, out):
        smem, barrier = cuda.shared.array(1024, uint8, 1024), cuda.shared.array(1, uint64)
        copy, t = cuda.shared.array(32, uint32, 128), cuda.threadIdx.x
        make_barrier(barrier, 1024)
        if t < 32:
            copy[t] = map[t]
            cuda.syncwarp()
            if t == 0:
                tensormap_replace_global_address(copy, 0, x, address)
                modify(copy)
            cuda.syncwarp()
            tensormap_cp_fenceproxy(maps_out, 32 * (t % 2 if lanes_differ else 1), copy, 0)
        cuda.syncthreads()
        if t == (1 if other_acquires else 0) and acquire:
            fence_proxy_tensormap_acquire_gpu(maps_out, 32)
        cuda.syncthreads()
        if t == 0:
            tma_load_2d(smem, 0, maps_out, 32, 0, 0, barrier, 0)
        mbarrier_wait_parity(barrier, 0, 0)
        out[t] = smem[t]

    return kernel


def map_writer_arguments():
    map, x = map_and_tensor()
    return [aligned_zeros(64, torch.int32), map.view(torch.int32), x, torch.zeros(64, dtype=torch.uint8)]


def unmodified(copy):
    pass


@simulated
def test_a_map_modified_on_the_device_must_be_acquired_by_its_user():
    for *_, x, out in outcomes(make_map_writer(unmodified, address=128 * 3), map_writer_arguments):
        assert torch.equal(out, x[3, :64])
    words = (
        "block (0, 0, 0) warp 0 lane 0 uses the tensor map at index 32 of maps_out",
        "fence_proxy_tensormap_acquire_gpu",
    )
    assert_refused(simulator.MissingFence, make_map_writer(unmodified, acquire=False), map_writer_arguments, *words)
    assert_refused(
        simulator.MissingFence, make_map_writer(unmodified, other_acquires=True), map_writer_arguments, *words
    )


@simulated
def test_a_map_from_an_earlier_launch_must_be_acquired():
    @cuda.jit
    def uses(maps_out, map, x, out):
        smem, barrier = cuda.shared.array(1024, uint8, 1024), cuda.shared.array(1, uint64)
        make_barrier(barrier, 1024)
        if cuda.threadIdx.x == 0:
            tma_load_2d(smem, 0, maps_out, 32, 0, 0, barrier, 0)

    arguments = map_writer_arguments()
    launch(make_map_writer(unmodified), 1, 64, *arguments)
    assert_refused(simulator.MissingFence, uses, lambda: arguments, "which was changed on the device", seeds=2)


width, height, third = (make_tensormap_replace_global_dim(i) for i in range(3))
stride, second_stride = make_tensormap_replace_global_stride(0), make_tensormap_replace_global_stride(1)


@simulated
@pytest.mark.parametrize(
    "error, words, modify",
    [
        ("SimulatorError", "sets dimension 1 to 0; it must be 1 to 2^32", lambda c: height(c, 0, 0)),
        ("SimulatorError", "no dims[2] in a tensor of 2 dimensions", lambda c: third(c, 0, 5)),
        ("SimulatorError", "no strides[1] in a tensor of 2 dimensions", lambda c: second_stride(c, 0, 64)),
        ("Misaligned", "sets strides to 0x88, which is not a multiple of 16", lambda c: stride(c, 0, 0x88)),
        ("OutOfBounds", "128 bytes at index 4 of the shared array", lambda c: width(c, 4, 5)),
        ("OutOfBounds", "past the end of the memory", lambda c: stride(c, 0, 4096)),
    ],
)
def test_a_wrong_replacement_is_refused(error, words, modify):
    assert_refused(getattr(simulator, error), make_map_writer(modify), map_writer_arguments, words, seeds=2)


@simulated
def test_a_replaced_address_must_be_in_a_registered_tensor():
    @cuda.jit
    def kernel(maps_out, map, x, out):
        copy, t = cuda.shared.array(32, uint32, 128), cuda.threadIdx.x
        smem, barrier = cuda.shared.array(1024, uint8, 1024), cuda.shared.array(1, uint64)
        make_barrier(barrier, 1024)
        copy[t % 32] = map[t % 32]
        cuda.syncthreads()
        if t == 0:
            tensormap_replace_global_address(copy, 0, out, 0)
        cuda.syncthreads()
        if t < 32:
            tensormap_cp_fenceproxy(maps_out, 32, copy, 0)
            fence_proxy_tensormap_acquire_gpu(maps_out, 32)
            if t == 0:
                tma_load_2d(smem, 0, maps_out, 32, 0, 0, barrier, 0)

    assert_refused(
        simulator.SimulatorError,
        kernel,
        map_writer_arguments,
        "which is in no tensor that a map was encoded for",
        seeds=2,
    )


@simulated
def test_the_lanes_of_a_warp_must_publish_the_same_map():
    assert_refused(
        simulator.SimulatorError,
        make_map_writer(unmodified, lanes_differ=True),
        map_writer_arguments,
        "publish different tensor maps",
    )


@simulated
def test_the_size_of_shared_memory_is_limited():
    @cuda.jit
    def kernel(map, x):
        x[0] = cuda.shared.array(0, uint8, 1024)[0]
        x[1] = cuda.shared.array(1024, uint8)[0]

    for size, found in (226 * 1024 + 1, 227 * 1024 + 1), (227 * 1024 + 1, 227 * 1024 + 1):
        words = f"shared memory has {found} bytes; the maximum is 232448"
        assert_refused(simulator.SimulatorError, kernel, map_and_tensor, words, seeds=1, shared_bytes=size)
    assert len(list(outcomes(kernel, map_and_tensor, seeds=1, shared_bytes=226 * 1024))[0]) == 2


@simulated
def test_races_are_detected_in_kernels_that_the_static_scan_misses():
    """The scan does not find functions in a tuple."""
    hidden = tma_load_2d, mbarrier_init, fence_mbarrier_init

    @cuda.jit
    def kernel(map, x):
        smem, barrier = cuda.shared.array(1024, uint8, 1024), cuda.shared.array(1, uint64)
        if cuda.threadIdx.x == 0:
            hidden[1](barrier, 0, 1)
            hidden[2]()
            hidden[0](smem, 0, map, 0, 0, 0, barrier, 0)
            x[0] = float32(smem[300])

    assert_refused(simulator.AsyncRace, kernel, map_and_tensor, "reads index 300 of the shared array")
    assert math.isfinite(simulator.memory.watching) and simulator.memory.watching == 0
