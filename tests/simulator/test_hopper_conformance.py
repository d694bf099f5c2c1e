"""Conformance of GPU and simulator: mbarriers, bulk copies, TMA and tensor maps.

Small kernels, one per instruction, compared with NumPy. The tests run on the GPU or in the simulator, whichever this
process uses; passing on both shows that both agree. Tensor core instructions: test_hopper_conformance_wgmma.py.
"""

import math

import numpy as np
import pytest
import torch

from moe_numba import simulator  # noqa: F401  before numba: it selects the simulator or the GPU

# isort: split
from helpers.hopper import BF16, E4M3, aligned_zeros, hopper, random_bytes, runs
from numba import cuda, float32, uint8, uint32, uint64

from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.cp_async import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    make_bulk_wait_group,
    make_bulk_wait_group_read,
)
from moe_numba.ptx.fence import fence_acq_rel_gpu, fence_proxy_async, fence_proxy_async_shared
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
    mbarrier_wait_parity_cluster,
)
from moe_numba.ptx.tensormap import (
    fence_proxy_tensormap_acquire_gpu,
    fence_proxy_tensormap_acquire_sys,
    make_tensormap_replace_global_dim,
    make_tensormap_replace_global_stride,
    tensormap_cp_fenceproxy,
    tensormap_replace_global_address,
)
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d,
    tma_load_2d_hint,
    tma_load_2d_multicast,
    tma_load_3d,
    tma_load_3d_hint,
    tma_reduce_add_3d,
    tma_store_2d,
    tma_store_3d,
)
from moe_numba.runtime.tensor_map import tensor_map

pytestmark = hopper


def as_bytes(tensor):
    return tensor.contiguous().view(torch.uint8).cpu().numpy()


# --- mbarriers ------------------------------------------------------------------------------------------------------


@cuda.jit
def step_through_phases(out):
    barriers = cuda.shared.array(3, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(barriers, 1, 64)
        fence_mbarrier_init()
    cuda.syncthreads()
    out[8 * t] = mbarrier_try_wait_parity(barriers, 1, 1)
    cuda.syncthreads()
    for phase in range(3):
        if t == 0 and phase == 1:
            out[3] = mbarrier_try_wait_parity(barriers, 1, 1)
        cuda.syncthreads()
        mbarrier_arrive(barriers, 1)
        mbarrier_wait_parity(barriers, 1, phase & 1)
        out[8 * t + 4 + phase] = mbarrier_try_wait_parity(barriers, 1, phase & 1)
        cuda.syncthreads()
    out[8 * t + 1] = mbarrier_try_wait_parity(barriers, 1, 0)
    cuda.syncthreads()
    if t == 0:
        mbarrier_inval(barriers, 1)
        mbarrier_init(barriers, 1, 1)
        out[2] = mbarrier_try_wait_parity(barriers, 1, 0)


def test_mbarrier_phases(device):
    for (out,) in runs(
        step_through_phases, lambda: [torch.full((8 * 64,), 9, dtype=torch.int32).to(device)], threads=64
    ):
        out = out.view(64, 8).cpu()
        assert (out[:, [0, 4, 5, 6, 1]] == 1).all() and out[0, 2:4].tolist() == [0, 0]


@cuda.jit
def bulk_copies(out, x, late):
    buffer = cuda.shared.array(512, float32, 128)
    barriers = cuda.shared.array(2, uint64)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier_init(barriers, 0, 1)
        fence_mbarrier_init()
        if not late:
            mbarrier_expect_tx(barriers, 0, 1024)
        bulk_load(buffer, 0, x, 8, 1024, barriers, 0)
        bulk_load(buffer, 256, x, 4, 512, barriers, 0)
        mbarrier_arrive_expect_tx(barriers, 0, 1536 if late else 512)
    cuda.syncthreads()
    mbarrier_wait_parity(barriers, 0, 0)
    buffer[t] += buffer[256 + t % 128]
    fence_proxy_async_shared()
    cuda.syncthreads()
    if t == 0:
        bulk_store(out, 4, buffer, 0, 512)
        bulk_commit_group()
        bulk_store(out, 132, buffer, 128, 512)
        bulk_commit_group()
        wait_group_1()
        wait_group_0()


wait_group_0, wait_group_1, wait_group_read_0 = (
    make_bulk_wait_group(0),
    make_bulk_wait_group(1),
    make_bulk_wait_group_read(0),
)


@pytest.mark.parametrize("late", [0, 1], ids=["expected first", "expected last"])
def test_bulk_loads_and_stores(late, device):
    x = torch.arange(300.0)
    right = x[8:264] + x[4:132].repeat(2)
    for out, *_ in runs(bulk_copies, lambda: [torch.full((264,), -1.0).to(device), x.to(device), late], threads=256):
        assert torch.equal(out[4:260].cpu(), right) and (out[:4] == -1).all() and (out[260:] == -1).all()


# --- TMA ------------------------------------------------------------------------------------------------------------


def swizzled(rows, swizzle):
    """Return rows of bytes in their shared memory layout: 16-byte chunks are permuted by the row's index."""
    if not swizzle:
        return rows
    row, chunk = np.indices((rows.shape[0], swizzle // 16))
    swizzled_chunk = {128: chunk ^ row % 8, 64: chunk ^ row // 2 % 4, 32: chunk ^ row // 4 % 2}[swizzle]
    out = np.empty_like(rows).reshape(-1, swizzle // 16, 16)
    out[row, swizzled_chunk] = rows.reshape(out.shape)
    return out.reshape(rows.shape)


def box_of(x, start, box):
    """Return a box of an array as a load does, with zeros outside the array."""
    out = np.zeros(box, x.dtype)
    inside = [slice(max(0, s), min(n, s + b)) for s, n, b in zip(start, x.shape, box)]
    if all(i.start < i.stop for i in inside):
        out[tuple(slice(i.start - s, i.stop - s) for i, s in zip(inside, start))] = x[tuple(inside)]
    return out


@cuda.jit
def load_box_2d(out, map, x, y, size, hinted):
    """Load a box, and copy shared memory to `out` unchanged."""
    smem = cuda.shared.array(0, uint8, 1024)
    barrier = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        fence_proxy_tensormap_acquire_sys(map, 0)
        mbarrier_init(barrier, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(barrier, 0, size)
        if hinted == 1:
            tma_load_2d_hint(smem, 1024, map, 0, x, y, barrier, 0, createpolicy_evict_first())
        elif hinted == 2:
            tma_load_2d_hint(smem, 1024, map, 0, x, y, barrier, 0, createpolicy_evict_last())
        else:
            tma_load_2d(smem, 1024, map, 0, x, y, barrier, 0)
    cuda.syncthreads()
    mbarrier_wait_parity(barrier, 0, 0)
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        out[i] = smem[1024 + i]


BOXES = [
    # dtype, swizzle, box (rows, columns)
    (torch.uint8, 0, (5, 48)),
    (torch.uint8, 128, (24, 128)),
    (torch.uint8, 64, (16, 64)),
    (torch.uint8, 32, (16, 32)),
    (E4M3, 128, (8, 128)),
    (BF16, 128, (8, 64)),
    (BF16, 64, (8, 32)),
    (torch.float32, 0, (3, 8)),
    (torch.float32, 128, (8, 32)),
    (torch.int32, 32, (8, 8)),
]


def matrix(dtype, rows, row_bytes, device):
    return random_bytes(rows, row_bytes).view(dtype).to(device)


@pytest.mark.parametrize("dtype, swizzle, box", BOXES)
def test_a_load_fills_outside_the_tensor_with_zeros(dtype, swizzle, box, device):
    """Rows end within a 16-byte chunk, and the memory after them is not zero."""
    size = dtype.itemsize
    x = matrix(dtype, 30, 160, device)[:, : 148 // size]
    whole, row = as_bytes(x), box[1] * size
    for y, at in [(0, 0), (3, 16), (26, 144), (-2, -16), (5, 64), (0, -512), (0, 160), (100, 0)]:
        start, right = (y, at // size), box_of(whole, (y, at), (box[0], row))
        make = lambda start=start: [
            torch.full((box[0] * row,), 7, dtype=torch.uint8).to(device),
            tensor_map(x, box, swizzle=swizzle),
            start[1],
            start[0],
            box[0] * row,
            abs(start[0]) % 3,
        ]
        for out, *_ in runs(load_box_2d, make, threads=64, count=2, shared_bytes=1024 + box[0] * row):
            assert (out.cpu().numpy().reshape(box[0], row) == swizzled(right, swizzle)).all(), start


@cuda.jit
def load_box_3d(out, map, x, y, z, size, hinted):
    """Load a box, with the barrier after the box in dynamic shared memory."""
    smem = cuda.shared.array(0, uint8, 1024)
    barrier = cuda.shared.array(0, uint64, 1024)[size // 8 :]
    if cuda.threadIdx.x == 0:
        mbarrier_init(barrier, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(barrier, 0, size)
        fence_proxy_tensormap_acquire_sys(map, 128)
        if hinted:
            tma_load_3d_hint(smem, 0, map, 128, x, y, z, barrier, 0, createpolicy_evict_first())
        else:
            tma_load_3d(smem, 0, map, 128, x, y, z, barrier, 0)
    cuda.syncthreads()
    mbarrier_wait_parity(barrier, 0, 0)
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        out[i] = smem[i]


@pytest.mark.parametrize("swizzle, box", [(0, (2, 3, 16)), (128, (2, 4, 128)), (64, (3, 8, 64))])
def test_a_load_of_three_dimensions(swizzle, box, device):
    """The map is the second of two, and the tensor is a slice of a larger one."""
    whole = random_bytes(4, 10, 256).to(device)
    x = whole[:, 1:9, 16:237]
    for start in [(0, 0, 0), (1, 2, 32), (3, 6, 208), (-1, -2, -16)]:
        right = box_of(as_bytes(x), start, box).reshape(-1, box[2])
        make = lambda start=start: [
            torch.full((math.prod(box),), 7, dtype=torch.uint8).to(device),
            torch.stack([tensor_map(whole, (1, 1, 16)), tensor_map(x, box, swizzle=swizzle)]),
            *start[::-1],
            math.prod(box),
            start[0],
        ]
        for out, *_ in runs(load_box_3d, make, threads=64, count=2, shared_bytes=math.prod(box) + 8):
            assert (out.cpu().numpy().reshape(-1, box[2]) == swizzled(right, swizzle)).all(), start


@cuda.jit
def store_box_2d(data, map, x, y, size):
    smem = cuda.shared.array(0, uint8, 1024)
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        smem[i] = data[i]
    fence_proxy_async()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        fence_proxy_tensormap_acquire_sys(map, 0)
        tma_store_2d(map, 0, x, y, smem, 0)
        bulk_commit_group()
        wait_group_0()


@cuda.jit
def store_box_3d(data, map, x, y, z, size):
    smem = cuda.shared.array(0, uint8, 1024)
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        smem[i] = data[i]
    fence_proxy_async_shared()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        fence_proxy_tensormap_acquire_sys(map, 0)
        tma_store_3d(map, 0, x, y, z, smem, 0)
        bulk_commit_group()
        wait_group_read_0()


def stored_width(width):
    """Return how many bytes of a row a store may write: whole 16-byte chunks, even if the tensor ends within one."""
    return -(-width // 16) * 16


@pytest.mark.parametrize(
    "dtype, width, box, swizzle, start",  # width, box and start in bytes
    [
        (torch.uint8, 160, (8, 48), 0, (3, 16)),
        (torch.uint8, 100, (8, 48), 0, (3, 80)),
        (torch.uint8, 100, (8, 128), 128, (26, 32)),
        (torch.uint8, 160, (16, 64), 64, (17, 112)),
        (torch.uint8, 33, (16, 64), 64, (0, 0)),
        (torch.uint8, 145, (8, 32), 32, (0, 144)),
        (torch.uint8, 33, (8, 32), 32, (0, 48)),
        (torch.float32, 84, (8, 128), 128, (23, 0)),
        (BF16, 90, (8, 64), 64, (5, 48)),
        (torch.uint8, 160, (2, 3, 48), 0, (1, 2, 16)),
        (torch.uint8, 33, (2, 3, 48), 0, (3, 5, 16)),
        (torch.uint8, 100, (2, 8, 128), 128, (3, 2, 80)),
        (torch.uint8, 145, (1, 8, 64), 64, (0, 0, 96)),
    ],
)
def test_a_store_is_clipped_to_the_tensor(dtype, width, box, swizzle, start, device):
    shape = (30, 160) if len(box) == 2 else (4, 7, 160)
    size, data = math.prod(box), random_bytes(*box)
    right = np.full([n + 2 * 256 for n in shape], 7, np.uint8)  # with a margin for the clipped part
    right[tuple(slice(256 + s, 256 + s + b) for s, b in zip(start, box))] = data
    right = right[(slice(256, -256),) * len(box)]
    right[..., stored_width(width) :] = 7
    *outer, row = box
    *above, at = start
    laid_out = torch.from_numpy(swizzled(data.numpy().reshape(-1, box[-1]), swizzle)).reshape(-1).to(device)

    def make():
        kept.append(torch.full((math.prod(shape) + 256,), 7, dtype=torch.uint8, device=device))
        x = kept[-1][128:-128].view(shape)  # the margins must stay unchanged
        x = x.view(dtype)[..., : width // dtype.itemsize]
        map = tensor_map(x, (*outer, row // dtype.itemsize), swizzle=swizzle)
        return [laid_out, map, at // dtype.itemsize, *above[::-1], size]

    kept = []
    kernel = store_box_2d if len(box) == 2 else store_box_3d
    for _ in runs(kernel, make, threads=64, shared_bytes=size):
        found = kept[-1].cpu().numpy()
        assert (found[128:-128].reshape(shape) == right).all()
        assert (found[:128] == 7).all() and (found[-128:] == 7).all()


@cuda.jit
def add_box_3d(data, map, x, y, z, size):
    smem = cuda.shared.array(0, float32, 1024)
    for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
        smem[i] = data[i]
    fence_proxy_async_shared()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        fence_proxy_tensormap_acquire_sys(map, 0)
        tma_reduce_add_3d(map, 0, x, y, z, smem, 0)
        tma_reduce_add_3d(map, 0, x, y, z, smem, 0)
        bulk_commit_group()
        wait_group_0()


@pytest.mark.parametrize("start", [(1, 2, 4), (3, 5, 28)])
def test_a_reduction_adds_to_the_tensor(start, device):
    """The box is added twice, and clipped to the tensor."""
    (z, y, x), before, data = start, torch.randn(4, 7, 36), torch.randn(2, 8, 32)
    padded = np.zeros((4 + 2, 7 + 8, 36 + 32), np.float32)
    padded[z : z + 2, y : y + 8, x : x + 32] = data
    added = padded[:4, :7, :36]
    right = (before.numpy() + added) + added
    laid_out = swizzled(data.numpy().view(np.uint8).reshape(16, 128), 128).reshape(-1).view(np.float32)

    def make():
        kept.append(before.clone().to(device))
        return [torch.from_numpy(laid_out).to(device), tensor_map(kept[-1], (2, 8, 32), swizzle=128), x, y, z, 512]

    kept = []
    for _ in runs(add_box_3d, make, threads=64, shared_bytes=2048):
        assert (kept[-1].cpu().numpy() == right).all()


@cuda.jit
def multicast_loads(out, map_a, map_b, rows):
    """Each block of a pair loads half of the tiles for both blocks, and signals when it has read them."""
    smem = cuda.shared.array(0, uint8, 1024)
    barriers = cuda.shared.array(2, uint64)
    t, rank = cuda.threadIdx.x, cluster_ctarank()
    if t == 0:
        mbarrier_init(barriers, 0, 1)
        mbarrier_init(barriers, 1, 2 * 64)
        fence_mbarrier_init()
        fence_proxy_tensormap_acquire_sys(map_a, 0)
        fence_proxy_tensormap_acquire_sys(map_b, 0)
    barrier_cluster_arrive()
    barrier_cluster_wait()
    for iteration in range(3):
        if t == 0:
            if iteration > 0:
                mbarrier_wait_parity_cluster(barriers, 1, (iteration - 1) & 1)
            mbarrier_arrive_expect_tx(barriers, 0, 2 * 1024)
            if rank == 0:
                tma_load_2d_multicast(smem, 0, map_a, 0, 0, 8 * iteration, barriers, 0, 3)
            else:
                tma_load_2d_multicast(smem, 1024, map_b, 0, 0, 8 * iteration, barriers, 0, 3)
        mbarrier_wait_parity(barriers, 0, iteration & 1)
        for i in range(t, 2048, 64):
            out[(cuda.blockIdx.x * 3 + iteration) * 2048 + i] = smem[i]
        mbarrier_arrive_cluster(barriers, 1, 0)
        mbarrier_arrive_cluster(barriers, 1, 1)
    barrier_cluster_arrive()
    barrier_cluster_wait()


def test_multicast_loads(device):
    a, b = random_bytes(24, 128).to(device), random_bytes(24, 128).to(device)
    right = torch.stack([a.view(3, 1024), b.view(3, 1024)], 1).expand(4, 3, 2, 1024).cpu()
    make = lambda: [
        torch.zeros(4 * 3 * 2048, dtype=torch.uint8, device=device),
        tensor_map(a, (8, 128)),
        tensor_map(b, (8, 128)),
        24,
    ]
    for out, *_ in runs(multicast_loads, make, blocks=4, threads=64, cluster=2, shared_bytes=2048):
        assert torch.equal(out.view(4, 3, 2, 1024).cpu(), right)


# --- tensor maps modified on the device -----------------------------------------------------------------------------

replace_width, replace_height = make_tensormap_replace_global_dim(0), make_tensormap_replace_global_dim(1)
replace_stride = make_tensormap_replace_global_stride(0)


@cuda.jit
def store_groups(maps, template, out, data, starts, pitches, widths):
    """Block g stores 16 rows of 128 bytes to group g of `out`, through a map of its own."""
    smem = cuda.shared.array(2048, uint8, 1024)
    copy = cuda.shared.array(32, uint32, 128)
    t, g = cuda.threadIdx.x, cuda.blockIdx.x
    if t < 32:
        copy[t] = template[t]
        cuda.syncwarp()
        if t == 0:
            tensormap_replace_global_address(copy, 0, out, starts[g])
            replace_width(copy, 0, widths[g])
            replace_height(copy, 0, (starts[g + 1] - starts[g]) // pitches[g])
            replace_stride(copy, 0, pitches[g])
        cuda.syncwarp()
        tensormap_cp_fenceproxy(maps, 32 * g, copy, 0)
    for i in range(t, 2048, 64):
        smem[i] = data[2048 * g + i]
    fence_proxy_async_shared()
    fence_acq_rel_gpu()
    cuda.syncthreads()
    if t == 32:  # not the warp that modified the map
        fence_proxy_tensormap_acquire_gpu(maps, 32 * g)
        tma_store_2d(maps, 32 * g, 0, 0, smem, 0)
        bulk_commit_group()
        wait_group_0()


def test_maps_modified_on_the_device(device):
    rows, pitches, widths = [3, 16, 1, 9], [128, 256, 144, 160], [128, 100, 16, 33]
    starts = np.concatenate([[0], np.cumsum(np.array(rows) * pitches)]).astype(np.int32)
    data = random_bytes(4, 16, 128)
    right = np.full(starts[-1], 7, np.uint8)
    for g in range(4):
        width = stored_width(widths[g])
        right[starts[g] : starts[g + 1]].reshape(rows[g], pitches[g])[:, :width] = data[g, : rows[g], :width]

    def make():
        out = torch.full((int(starts[-1]),), 7, dtype=torch.uint8, device=device)
        template = tensor_map(out[: int(starts[-1]) // 128 * 128].view(-1, 128), (16, 128)).view(torch.uint32)
        maps = aligned_zeros(4 * 32, torch.uint32, device)
        numbers = [torch.tensor(n, dtype=torch.int32).to(device) for n in (starts, pitches, widths)]
        return [maps, template, out, data.view(-1).to(device), *numbers]

    for _, _, out, *_ in runs(store_groups, make, blocks=4, threads=64):
        assert (out.cpu().numpy() == right).all()
