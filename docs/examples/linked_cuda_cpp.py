"""Call device functions in CUDA C++ from Numba kernels: an MMA, and tensor maps that a kernel edits.

Run it with ``python docs/examples/linked_cuda_cpp.py``. Without a Hopper GPU the kernels run in the simulator. It also
compiles both kinds of kernels, which needs no GPU, and prints what the compiler makes of them.
"""

import os
from pathlib import Path

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import numpy as np
import torch
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.ptx.cuda_cpp import ffi
from moe_numba.ptx.cuda_cpp import tensormap as linked
from moe_numba.ptx.cuda_cpp.wgmma import wgmma_step_m64n64k128_e4m3
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_sys
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart
from moe_numba.runtime.tensor_map import TensorMap, tensor_map

TILE = 64 * 128  # bytes: 64 rows of 128
BARRIER = 2 * TILE // 8  # index of the mbarrier behind two tiles
SHARED_BYTES = 2 * TILE + 8
ZEROS = (np.float32(0),) * 32
multiply, wait = make_wgmma_tile(64, "e4m3", accumulate=True), make_wgmma_wait(64, 0)
set_address, set_extent = linked.tensormap_replace_global_address, linked.make_tensormap_replace_global_dim(1)


@cuda.jit(device=True)
def load_tiles(smem, barriers, map_a, map_b):
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if thread < 32 and elect_sync(FULL_MASK):
        mbarrier_arrive_expect_tx(barriers, BARRIER, 2 * TILE)
        tma_load_2d(smem, 0, map_a, 0, 0, 0, barriers, BARRIER)
        tma_load_2d(smem, TILE, map_b, 0, 0, 0, barriers, BARRIER)
    mbarrier_wait_parity(barriers, BARRIER, uint32(0))


@cuda.jit(device=True)
def store_fragment(out, acc):
    lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
    offset = (16 * warp + (lane >> 2)) * 64 + 2 * (lane & 3)
    for j in range(8):
        out[offset + 8 * j], out[offset + 8 * j + 1] = acc[4 * j], acc[4 * j + 1]
        out[offset + 512 + 8 * j], out[offset + 512 + 8 * j + 1] = acc[4 * j + 2], acc[4 * j + 3]


@cuda.jit
def by_intrinsics(map_a, map_b, out):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    load_tiles(smem, barriers, map_a, map_b)
    store_fragment(out, wait(multiply(ZEROS, wgmma_descriptor(smem, 0), wgmma_descriptor(smem, TILE))))


@cuda.jit
def by_linked_cpp(map_a, map_b, out):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    load_tiles(smem, barriers, map_a, map_b)
    acc = cuda.local.array(32, float32)  # passed as a pointer
    wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), int32(0), int32(TILE), int32(0))
    store_fragment(out, acc)


@cuda.jit
def into_an_array(map_a, map_b, out):
    """Is `by_linked_cpp` with Numba arrays as arguments, as Numba's own launch passes them."""
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    load_tiles(smem, barriers, ffi.from_buffer(map_a), ffi.from_buffer(map_b))
    acc = cuda.local.array(32, float32)
    wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), int32(0), int32(TILE), int32(0))
    store_fragment(out, acc)


@cuda.jit
def make_maps(maps, template, x, starts):
    """Make a tensor map for each group of rows of x, from a template: one warp per group."""
    copy = cuda.shared.array(128, uint8, 128)
    lane, group = cuda.threadIdx.x, cuda.blockIdx.x
    for i in range(lane, 128, 32):
        copy[i] = template[i]
    cuda.syncwarp()
    if lane == 0:
        set_address(ffi.from_buffer(copy), 0, ffi.from_buffer(x), int64(starts[group]) * 128)
        set_extent(ffi.from_buffer(copy), 0, uint32(starts[group + 1] - starts[group]))
    cuda.syncwarp()
    linked.tensormap_cp_fenceproxy(ffi.from_buffer(maps), 128 * group, ffi.from_buffer(copy), 0)  # a release fence


@cuda.jit
def load_groups(maps, out):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    lane, group = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    if elect_sync(FULL_MASK):
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
        fence_proxy_tensormap_acquire_sys(maps, group * 128)  # the matching acquire
        mbarrier_arrive_expect_tx(barriers, BARRIER, TILE)
        tma_load_2d(smem, 0, maps, group * 128, 0, 0, barriers, BARRIER)
    cuda.syncwarp()
    mbarrier_wait_parity(barriers, BARRIER, uint32(0))
    for i in range(lane, TILE, 32):
        out[group * TILE + i] = smem[i]


# Run and compile them: what follows is no part of the kernels' source.

DEVICE = "cpu" if moe_numba.simulator.ENABLED else "cuda"
POINTERS, ARRAYS = ["uint8*", "uint8*", "float32*"], ["uint8[]", "uint8[]", "float32[]"]
KERNELS = {
    "intrinsics": ("by_intrinsics", POINTERS, 128, True),
    "linked, with LTO": ("by_linked_cpp", POINTERS, 128, True),
    "linked, without LTO": ("by_linked_cpp", POINTERS, 128, False),
    "linked, with LTO, arrays": ("into_an_array", ARRAYS, 128, True),
}


def compare():
    torch.manual_seed(0)
    operands = [torch.randn(64, 128, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
    results = []
    for kernel in (by_intrinsics, by_linked_cpp):
        maps = (TensorMap(t.view(torch.uint8), (64, 128), swizzle=128) for t in operands)
        out = torch.full((64, 64), float("nan"), device=DEVICE)
        launch(kernel, 1, 128, *maps, out, shared_bytes=SHARED_BYTES)
        results.append(out)
    assert torch.equal(*results)
    right = operands[0].float() @ operands[1].float().T
    print(f"relative difference of the MMA from torch: {float((results[1] - right).norm() / right.norm()):.4f}")


def edit_maps():
    starts = [0, 20, 84, 100]
    x = torch.randint(1, 256, (100, 128), dtype=torch.uint8, device=DEVICE)
    template = tensor_map(x, (64, 128))
    maps, out = template.repeat(3), torch.zeros(3, 64, 128, dtype=torch.uint8, device=DEVICE)
    stream = 0 if moe_numba.simulator.ENABLED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)
    make_maps[3, 32, stream](maps, template, x.view(-1), torch.tensor(starts, dtype=torch.int32, device=DEVICE))
    launch(load_groups, 3, 32, maps, out, shared_bytes=SHARED_BYTES)
    right = torch.zeros_like(out)  # rows beyond a group come as zeros
    for group, (first, end) in enumerate(zip(starts, starts[1:])):
        right[group, : end - first] = x[first:end]
    print(f"relative difference of the loaded groups: {float((out != right).float().mean()):.4f}")


def compile_them():
    source = Path(__file__).read_text().partition("\n# Run and compile them")[0]
    print(f"{'':<26}registers  stack bytes  calls  local loads and stores  instructions")
    for name, code in compile_apart(source, KERNELS).items():
        local, count = code.count("LDL", "STL", "LD", "ST"), code.opcodes and len(code.opcodes)
        facts = code.registers, code.stack_bytes, code.count("CALL"), local, count
        print(f"{name:<26}{facts[0]:>9}{facts[1]!s:>13}{facts[2]!s:>7}{facts[3]!s:>24}{facts[4]!s:>14}")


if __name__ == "__main__":
    compare()
    edit_maps()
    compile_them()
