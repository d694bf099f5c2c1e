"""PTX through intrinsics and through linked CUDA C++: equal results, and what each compiles to."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from moe_numba import simulator  # before numba: it selects the simulator or the GPU

# isort: split
from helpers.hopper import E4M3, RNG, aligned_zeros, hopper, small_integers
from numba import cuda, float32, int32, uint8, uint64

from moe_numba.ptx import cuda_cpp
from moe_numba.ptx import tensormap as intrinsics
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group
from moe_numba.ptx.cuda_cpp import ffi
from moe_numba.ptx.cuda_cpp import tensormap as linked
from moe_numba.ptx.cuda_cpp.wgmma import wgmma_step_m64n64k128_e4m3
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.intrinsic import simulated
from moe_numba.ptx.tma import tma_store_2d
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.sass import compile_apart, disassembler
from moe_numba.runtime.tensor_map import tensor_map

TILE = 64 * 128
ZEROS = (np.float32(0),) * 32
add_tile, wait = make_wgmma_tile(64, "e4m3", accumulate=True), make_wgmma_wait(64, 0)
wait_stores = make_bulk_wait_group(0)


@cuda.jit(device=True)
def fill(smem, data, tiles, fence):
    """Copy rows of 128 bytes to shared memory with the 128-byte swizzle."""
    for i in range(cuda.threadIdx.x, tiles * TILE, 128):
        smem[i ^ ((i >> 7 & 7) << 4)] = data[i]
    if fence:
        fence_proxy_async_shared()
    cuda.syncthreads()


@cuda.jit(launch_bounds=(128, 1))
def step_by_intrinsics(out, data, steps, fence):
    smem = cuda.shared.array(0, uint8, 1024)
    fill(smem, data, 2 * steps, fence)
    acc = ZEROS
    for i in range(steps):
        offset = int32(i * 2 * TILE)
        acc = wait(add_tile(acc, wgmma_descriptor(smem, offset), wgmma_descriptor(smem, offset + TILE)))
    first = cuda.threadIdx.x * 32
    for j in range(8):
        out[first + 4 * j], out[first + 4 * j + 1] = acc[4 * j], acc[4 * j + 1]
        out[first + 4 * j + 2], out[first + 4 * j + 3] = acc[4 * j + 2], acc[4 * j + 3]


@cuda.jit(launch_bounds=(128, 1))
def step_by_cpp(out, data, steps, fence):
    smem = cuda.shared.array(0, uint8, 1024)
    fill(smem, data, 2 * steps, fence)
    acc = cuda.local.array(32, float32)
    for i in range(steps):
        offset = int32(i * 2 * TILE)
        wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), offset, offset + TILE, int32(i > 0))
    first = cuda.threadIdx.x * 32
    for j in range(32):
        out[first + j] = acc[j]


def make_map_kernel(interface):
    """Make a kernel whose blocks store 16 rows of 128 bytes each, through a map modified by one of the interfaces."""
    by = {"intrinsics": intrinsics, "linked": linked}[interface]
    set_address, publish = by.tensormap_replace_global_address, by.tensormap_cp_fenceproxy
    set_width, set_height = by.make_tensormap_replace_global_dim(0), by.make_tensormap_replace_global_dim(1)
    set_stride = by.make_tensormap_replace_global_stride(0)
    acquire, is_linked = by.fence_proxy_tensormap_acquire_gpu, interface == "linked"

    @cuda.jit(launch_bounds=(32, 1))
    def store_rows(maps, template, out, starts, pitches, widths, heights):
        smem = cuda.shared.array(2048, uint8, 1024)
        copy = cuda.shared.array(128, uint8, 128)
        t, g = cuda.threadIdx.x, cuda.blockIdx.x
        for i in range(t, 2048, 32):
            smem[i] = 16 * g + (i >> 7)
        for i in range(t, 128, 32):
            copy[i] = template[i]
        cuda.syncwarp()
        if is_linked:
            descriptor = ffi.from_buffer(copy)
        else:
            descriptor = copy
        if t == 0:
            set_address(descriptor, 0, ffi.from_buffer(out), starts[g])
            set_width(descriptor, 0, widths[g])
            set_height(descriptor, 0, heights[g])
            set_stride(descriptor, 0, uint64(pitches[g]))
        cuda.syncwarp()
        publish(ffi.from_buffer(maps), 128 * g, descriptor, 0)
        fence_proxy_async_shared()
        cuda.syncwarp()
        if t == 0:
            acquire(ffi.from_buffer(maps), 128 * g)
            tma_store_2d(ffi.from_buffer(maps), 128 * g, 0, 0, smem, 0)
            bulk_commit_group()
            wait_stores()

    return store_rows


def seeds(count=6):
    """Iterate over several seeds in the simulator; once on a GPU."""
    for seed in range(count if simulator.ENABLED else 1):
        with simulator.seed(seed, preempt=0.05 if seed % 2 else 0.0):
            yield seed


@hopper
@pytest.mark.parametrize("kernel", [step_by_intrinsics, step_by_cpp])
def test_a_step_is_exact_through_either_interface(kernel, device):
    a, b = (small_integers((2, 64, 128), E4M3, "cpu") for _ in range(2))
    expected = sum(x.double() @ y.double().T for x, y in zip(a, b))
    data = torch.stack([a.view(torch.uint8), b.view(torch.uint8)], 1).reshape(-1).contiguous().to(device)
    for _ in seeds(3):
        out = torch.full((128 * 32,), float("nan"), device=device)
        kernel[1, 128, 0, 4 * TILE](out, data, 2, 1)
        d = out.cpu().view(4, 8, 4, 8, 2, 2)  # warp, lane // 4, lane % 4, j, h, i
        found = d.permute(0, 4, 1, 3, 2, 5).reshape(64, 64)
        assert torch.equal(found.double(), expected)


@pytest.mark.skipif(not simulator.ENABLED, reason="undefined on a GPU")
@pytest.mark.parametrize("kernel", [step_by_intrinsics, step_by_cpp])
def test_both_interfaces_refuse_unfenced_operands(kernel):
    data = torch.zeros(2 * TILE, dtype=torch.uint8)
    with pytest.raises(simulator.MissingFence, match="fence_proxy_async_shared"):
        kernel[1, 128, 0, 2 * TILE](torch.zeros(128 * 32), data, 1, 0)


@hopper
@pytest.mark.parametrize("interface", ["intrinsics", "linked"])
def test_maps_are_modified_through_either_interface(interface, device):
    heights, pitches, widths = [3, 16, 1, 9], [128, 256, 144, 160], [128, 100, 16, 33]
    starts = np.concatenate([[0], np.cumsum(np.array(heights) * pitches)])
    expected = np.full(starts[-1], 7, np.uint8)
    for g in range(4):
        rows = expected[starts[g] : starts[g + 1]].reshape(heights[g], pitches[g])
        written = -(-widths[g] // 16) * 16  # a store clips rows to whole chunks of 16 bytes
        rows[:, :written] = 16 * g + np.arange(heights[g])[:, None]
    kernel = make_map_kernel(interface)
    for _ in seeds():
        out = torch.full((int(starts[-1]),), 7, dtype=torch.uint8, device=device)
        template = tensor_map(out[: int(starts[-1]) // 128 * 128].view(-1, 128), (16, 128))
        maps = aligned_zeros(4 * 128, torch.uint8, device)
        numbers = [torch.tensor(n, dtype=torch.int32).to(device) for n in (starts, pitches, widths, heights)]
        kernel[4, 32](maps, template, out, *numbers)
        assert (out.cpu().numpy() == expected).all()


@pytest.mark.skipif(not simulator.ENABLED, reason="undefined on a GPU")
def test_a_linked_map_must_be_acquired(monkeypatch):
    monkeypatch.setattr(linked, "fence_proxy_tensormap_acquire_gpu", simulated(lambda *_: None, ""))
    out = torch.zeros(2048, dtype=torch.uint8)
    template = tensor_map(out.view(-1, 128), (16, 128))
    maps, one = template.clone(), torch.ones(1, dtype=torch.int32)
    with pytest.raises(simulator.MissingFence, match="acquire"):
        make_map_kernel("linked")[1, 32](maps, template, out, 0 * one, 128 * one, 128 * one, 16 * one)


@pytest.mark.skipif(not simulator.ENABLED, reason="cffi is used on a GPU")
def test_from_buffer_takes_arrays_only():
    @cuda.jit
    def twice(out):
        pointer = ffi.from_buffer(out)
        ffi.from_buffer(pointer)

    with pytest.raises(TypeError, match="takes an array, but got Pointer"):
        twice[1, 1](torch.zeros(4))


def test_every_declared_function_is_in_its_file():
    folder = Path(cuda_cpp.__file__).parent
    for name in ("tensormap", "wgmma"):
        assert cuda_cpp.source(name) == str(folder / f"{name}.cu")
        text = (folder / f"{name}.cu").read_text()
        for function in re.findall(r'"(cu_\w+)"', (folder / f"{name}.py").read_text()):
            assert re.search(rf"\b{function}\(", text), function
    text = (folder / "tensormap.cu").read_text()
    assert "DIM(0) DIM(1) DIM(2) DIM(3) DIM(4)" in text and "STRIDE(0) STRIDE(1) STRIDE(2) STRIDE(3)" in text


STEP, MAPS = ["float32*", "uint8*", "int32", "int32"], ["uint8[]", "uint8[]", "uint8[]", *["int32[]"] * 4]


@pytest.fixture(scope="module")
def codes():
    source = f"""
import sys; sys.path[:0] = {[str(folder) for folder in Path(__file__).parents[:2]]!r}
import moe_numba
from numba import cuda, float32, int32
from test_ptx_modules import *

@cuda.jit
def intrinsics(out, data, steps, fence):
    smem = cuda.shared.array(0, uint8, 1024)
    acc = wait(add_tile(ZEROS, wgmma_descriptor(smem, 0), wgmma_descriptor(smem, TILE)))
    first = cuda.threadIdx.x * 32
    for j in range(8):
        out[first + 4 * j], out[first + 4 * j + 1] = acc[4 * j], acc[4 * j + 1]
        out[first + 4 * j + 2], out[first + 4 * j + 3] = acc[4 * j + 2], acc[4 * j + 3]

@cuda.jit
def module(out, data, steps, fence):
    smem = cuda.shared.array(0, uint8, 1024)
    acc = cuda.local.array(32, float32)
    for j in range(32):
        acc[j] = float32(0)
    wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), int32(0), int32(TILE), int32(1))
    first = cuda.threadIdx.x * 32
    for j in range(32):
        out[first + j] = acc[j]

dims = [linked.make_tensormap_replace_global_dim(i) for i in range(5)]
strides = [linked.make_tensormap_replace_global_stride(i) for i in range(4)]
d0, d1, d2, d3, d4 = dims
s0, s1, s2, s3 = strides

@cuda.jit
def every_function(out, map, tensor, n):
    copy = cuda.shared.array(128, uint8, 128)
    p = ffi.from_buffer(copy)
    linked.tensormap_replace_global_address(p, 0, tensor, n)
    d0(p, 0, n), d1(p, 0, n), d2(p, 0, n), d3(p, 0, n), d4(p, 0, n)
    s0(p, 0, n), s1(p, 0, n), s2(p, 0, n), s3(p, 0, n)
    linked.tensormap_cp_fenceproxy(out, n, p, 0)
    linked.fence_proxy_tensormap_acquire_gpu(out, n)
"""
    requests = {}
    for lto in (True, False):
        how = "lto" if lto else "ptx"
        for name in ("intrinsics", "module"):
            requests[f"{name} {how}"] = name, STEP, 128, lto
        requests[f"every {how}"] = "every_function", ["uint8*"] * 3 + ["int32"], 32, lto
    requests |= {
        f"{interface} maps": (f"__import__('test_ptx_modules').make_map_kernel({interface!r})", MAPS, 32, True)
        for interface in ("intrinsics", "linked")
    }
    return compile_apart(source, {name: list(request) for name, request in requests.items()})


def test_the_disassembler_is_installed():
    assert disassembler(), "pip install nvidia-cuda-nvdisasm, or the extra test"


def test_with_lto_both_interfaces_compile_alike(codes):
    """The call is inlined, the accumulators stay in registers, and the instructions are the same."""
    one, other = codes["intrinsics lto"], codes["module lto"]
    for code in (one, other):
        assert code.count("QGMMA") == 4 and code.count("CALL") == 0
        assert code.stack_bytes == code.spilled_bytes == 0 and code.complaints == []
        assert code.count("LDL", "STL", "LD", "ST") == 0
    assert abs(one.registers - other.registers) <= 8


def test_without_lto_the_call_remains_and_accumulators_go_through_memory(codes):
    one, other = codes["intrinsics ptx"], codes["module ptx"]
    assert one.count("CALL") == 0 and one.stack_bytes == one.spilled_bytes == 0
    assert other.count("CALL") > 0 and other.stack_bytes >= 128
    assert other.count("LD") == other.count("ST") == 32  # the function's pointer is generic
    assert one.count("QGMMA") == other.count("QGMMA") == 4


@pytest.mark.parametrize("how, calls", [("lto", 0), ("ptx", 12)])
def test_every_tensor_map_function_links(how, calls, codes):
    code = codes[f"every {how}"]
    assert code.count("UTMACCTL") == 1 and code.spilled_bytes == 0
    assert (code.count("CALL") == 0) == (calls == 0) and code.count("CALL") >= calls


def test_both_interfaces_modify_tensor_maps_by_the_same_instructions(codes):
    one, other = codes["intrinsics maps"], codes["linked maps"]
    assert one.count("CALL") == other.count("CALL") == 0
    for name in ("UTMACCTL", "UTMASTG", "ATOMS", "MEMBAR"):
        assert one.count(name) == other.count(name), name


def test_fill_swizzles_as_tma_does():
    """Compare the swizzle of `fill` with the simulator's."""
    from moe_numba.simulator.asynchronous.tensor_map import swizzled_chunks

    offset = np.arange(TILE)
    chunks = swizzled_chunks(0, TILE, 128)
    data = RNG.integers(0, 256, TILE, dtype=np.uint8)
    by_threads = np.empty_like(data)
    by_threads[offset ^ ((offset >> 7 & 7) << 4)] = data
    assert (by_threads == data.reshape(-1, 16)[chunks].reshape(-1)).all()
