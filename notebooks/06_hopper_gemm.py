# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Hopper from Numba: TMA, mbarrier and wgmma
#
# **Hopper** GPUs (H100, H200) have three features that a fast GEMM needs: asynchronous copies (TMA), barriers that
# count bytes (mbarrier), and tensor core instructions that read operands from shared memory (wgmma). Numba supports
# none of them directly. This notebook issues them from Python, in two ways, and builds an FP8 GEMM step by step.
# [07_grouped_gemm](07_grouped_gemm.ipynb) extends it to a grouped GEMM.
#
# 1. **Linked CUDA C++.** A device function in CUDA C++ contains the instruction as inline PTX (NVIDIA's virtual
#    instruction set). Numba declares and calls it.
# 2. **Intrinsics.** A Python function (`moe_numba/ptx/`) emits one PTX instruction into the code that Numba generates.
#
# Without a Hopper GPU the kernels run in the simulator, and printed times are recorded ones.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import torch
from IPython.display import Markdown
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba import simulator
from moe_numba.course.bench import kernel_times
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.hopper import draw
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import NOISE
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.cuda_cpp import ffi, source
from moe_numba.ptx.cuda_cpp import tensormap as linked
from moe_numba.ptx.cuda_cpp.wgmma import wgmma_step_m64n64k128_e4m3
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import load_nc_u32x4, st_shared_s32x4
from moe_numba.ptx.tensormap import fence_proxy_tensormap_acquire_sys
from moe_numba.ptx.tma import tma_load_2d, tma_load_3d, tma_store_2d
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.changed_source import changed_source, define, source_of
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart
from moe_numba.runtime.tensor_map import TensorMap, tensor_map

DEVICE = "cpu" if simulator.ENABLED else "cuda"
TIMED = dict(m=4096, n=4096, k=7168, copy=(8192, 8192))  # the sizes of all times, measured now or recorded
SIZES = SimpleNamespace(
    **(
        dict(m=128, n=256, k=384, sms=1, copy=(128, 256))
        if simulator.ENABLED
        else TIMED | dict(sms=torch.cuda.get_device_properties(0).multi_processor_count)
    )
)
TIMED = SimpleNamespace(**TIMED)
E4M3 = torch.float8_e4m3fn
torch.manual_seed(0)

# %% [markdown]
# ## 1. Data paths before Hopper and on Hopper
#
# Each of the 132 **streaming multiprocessors** (SMs) of an H200 has shared memory, of which a CTA (thread block) can
# use 227 KB, and four **tensor cores**, which multiply small matrices.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.problem()

# %% [markdown]
# On the left, every byte passes through registers twice. On Hopper, threads only issue the copies and the MMAs:
#
# - **TMA**, the tensor memory accelerator: one thread issues the copy of a whole box of a matrix and continues.
# - **mbarrier**: a barrier in shared memory that counts arriving threads *and landed bytes*.
# - **wgmma**: a **warpgroup** (four warps) issues an MMA whose operands are in shared memory, and continues.
#
# All three are *asynchronous*. Section 8 shows the typical bugs: accesses before completion, missing fences and
# deadlocks.
#
# ## 2. Reference
#
# The GEMM is `D = A Bᵀ`. A has `m` rows and B has `n` rows, each of `k` **FP8** elements (`e4m3`: 1 sign, 4 exponent
# and 3 mantissa bits). D is `bfloat16`. The reference adds float32 GEMMs over 128 columns each in float64.


# %%
def reference(a, b):
    out = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for k in range(0, a.shape[1], 128):
        out += a[:, k : k + 128].float() @ b[:, k : k + 128].float().T
    return out


def relative_error(out, right):
    """Norm of the error over norm of the result; NaN if an element was not written."""
    return float((out.double() - right).norm() / right.norm())


def mismatch(outputs, bound=3e-2):
    """Return None, or a description of the error; the bound allows for the tensor cores' accumulation (see below)."""
    out, right = outputs
    error = relative_error(out, right)
    if error <= bound:
        return None
    return f"{int(out.isnan().sum())} elements are not written, the relative error is {error:.1e}; {bound:g} is allowed"


A = torch.randn(SIZES.m, SIZES.k, device=DEVICE).to(E4M3)
B = torch.randn(SIZES.n, SIZES.k, device=DEVICE).to(E4M3)
EXPECTED = reference(A, B)
ROUNDING = relative_error(EXPECTED.bfloat16(), EXPECTED)
print(f"A {tuple(A.shape)}, B {tuple(B.shape)}; rounding to bfloat16 alone gives a relative error of {ROUNDING:.2e}")

# %% [markdown]
# ## 3. Lower bound: what limits one SM
#
# `g` warpgroups compute a tile of `64 g x n` elements of D. Per **stage** of 128 elements of `k`, the L2 cache delivers
# the tiles of A and B, TMA writes them to shared memory, and each warpgroup reads its 64 rows of A and all `n` rows of
# B. `clocks` returns the clocks that each unit needs, from its rate per clock and SM:
#
# - **Tensor cores:** 8192 FLOP, with which 132 SMs reach the data sheet's FP8 peak at 1.83 GHz. (The clock printed
#   first is the maximum boost clock.)
# - **Shared memory:** 128 bytes, from 32 **banks** of 4 bytes.
# - **L2 cache:** 23 bytes. NVIDIA publishes no value; this one was measured on a smaller GPU (an H100 PCIe).


# %%
LIMITS = chip_limits()
print(LIMITS)
CLOCK, SMS, PEAK = LIMITS.tensor_clock, LIMITS.sm_count, LIMITS.tensor_flops["float8_e4m3fn"]
FLOPS, SHARED_BYTES, L2_BYTES = PEAK / CLOCK / SMS, 128, LIMITS.l2_bandwidth / CLOCK / SMS


def clocks(n, groups):
    """Clocks that tensor cores, shared memory and L2 cache need for a stage of 128 bytes of k."""
    rows = 64 * groups
    return {
        "tensor cores": 2 * rows * n * 128 / FLOPS,
        "shared memory": ((rows + n) * 128 + groups * (64 + n) * 128) / SHARED_BYTES,
        "L2 cache": (rows + n) * 128 / L2_BYTES,
    }


def peak_share(n, groups):
    """Share of the peak that the slowest unit allows."""
    parts = clocks(n, groups)
    return parts["tensor cores"] / max(parts.values())


print(" tile       tensor cores   shared memory   L2 cache   share of the peak")
for groups, n in ((1, 64), (2, 128), (2, 256)):
    parts = clocks(n, groups)
    print(
        f"{64 * groups:4} x {n:<4} {parts['tensor cores']:10.0f} {parts['shared memory']:15.0f} "
        f"{parts['L2 cache']:11.0f}   {100 * peak_share(n, groups):10.0f} %"
    )
LOWER_BOUND_US = 2 * TIMED.m * TIMED.n * TIMED.k / PEAK * 1e6

# %% [markdown]
# The L2 cache is the limit in all three rows. A larger tile reuses each loaded byte more often, so its limit is higher.
# Section 6 predicts from this table what a larger tile saves. The lower bound of the GEMM ("speed of light" in figures)
# is its FLOPs divided by the peak.
#
# ## 4. One instruction at a time
#
# ### A tile copied by threads
#
# **Idea.** The baseline uses no TMA. Each CTA of 128 threads copies a tile of 64 rows and 128 bytes to shared memory,
# and from there to the output.
#
# **Lower bound.** Each call passes over the bytes three times: `torch.zeros_like` clears the output, and the kernel reads
# and writes every byte. The bound takes the copy bandwidth printed in section 3 for all of them.
#
# In the output, `kernel` is the GPU time of one launch within a CUDA graph, `call` the CPU time of the Python call.

# %%
FULL_MASK = 0xFFFFFFFF
TILE = 64 * 128  # bytes: 64 rows of 128
COPY_US = 3 * TIMED.copy[0] * TIMED.copy[1] / LIMITS.copy_bandwidth * 1e6  # clear, read, write
SOURCE = torch.randint(0, 256, SIZES.copy, dtype=torch.uint8, device=DEVICE)


@cuda.jit
def copy_by_threads(x, y, pitch):
    smem_i32 = cuda.shared.array(0, int32, 1024)
    thread = int32(cuda.threadIdx.x)
    first = int64(cuda.blockIdx.y) * 64 * pitch + cuda.blockIdx.x * 32  # in words of 4 bytes
    for i in range(thread, 512, 128):  # chunks of 16 bytes, 8 in a row
        a, b, c, d = load_nc_u32x4(x, first + (i >> 3) * pitch + 4 * (i & 7))
        st_shared_s32x4(smem_i32, 4 * i, int32(a), int32(b), int32(c), int32(d))
    cuda.syncthreads()
    for i in range(thread, 2048, 128):
        y[first + (i >> 5) * pitch + (i & 31)] = smem_i32[i]


def by_threads():
    out = torch.zeros_like(SOURCE)
    grid = SIZES.copy[1] // 128, SIZES.copy[0] // 64
    words = SOURCE.view(torch.int32), out.view(torch.int32)
    launch(copy_by_threads, grid, 128, *words, SIZES.copy[1] // 4, shared_bytes=TILE)
    return out, SOURCE


copies = Ladder(
    "hopper_copy",
    lambda outputs: None if torch.equal(*outputs) else "the copy differs",
    title="Copy of a matrix in tiles",
    reference_name="threads",
    config={"tile": [64, 128]},
    size={"rows": SIZES.copy[0], "row_bytes": SIZES.copy[1]},
)
COPY = {"dtype": "uint8", "floor_us": round(COPY_US, 1), "bytes": 2 * SOURCE.numel()}
copies.step("threads", by_threads, **COPY)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
copies.report("threads", floor_us=COPY_US)

# %% [markdown]
# ### A TMA load and its mbarrier
#
# **Idea.** One thread issues the copy of the whole box. It needs a **tensor map**, 128 bytes that describe the matrix
# and the box (`TensorMap` encodes them on the host), a destination in shared memory, aligned to 128 bytes, and an
# mbarrier that counts the landed bytes.
#
# The store is a TMA copy without an mbarrier: the issuing thread commits it to a **bulk group** and waits for the group
# before the CTA exits.
#
# **Predicted gain.** Zero: memory bandwidth limits both kernels, and the bytes are the same.


# %%
BARRIER = 2 * TILE // 8  # index of the mbarrier behind two tiles, in units of its 8 bytes
SHARED_MEMORY = 2 * TILE + 8


@cuda.jit
def copy_by_tma(map_x, map_y, y):
    smem = cuda.shared.array(0, uint8, 1024)
    barriers = cuda.shared.array(0, uint64, 1024)  # the same memory as mbarriers
    thread, row, column = int32(cuda.threadIdx.x), int32(cuda.blockIdx.y * 64), int32(cuda.blockIdx.x * 128)
    if thread == 0:
        mbarrier_init(barriers, TILE // 8, 1)  # each phase takes one arrival
        fence_mbarrier_init()
    cuda.syncwarp()
    if elect_sync(FULL_MASK):
        mbarrier_arrive_expect_tx(barriers, TILE // 8, TILE)  # that arrival, and how many bytes will come
        tma_load_2d(smem, 0, map_x, 0, column, row, barriers, TILE // 8)  # x comes before y: the innermost first
        mbarrier_wait_parity(barriers, TILE // 8, uint32(0))
        tma_store_2d(map_y, 0, column, row, smem, 0)
        bulk_commit_group()
        wait_until_read()


wait_until_read = make_bulk_wait_group_read(0)


def by_tma():
    out = torch.zeros_like(SOURCE)
    grid = SIZES.copy[1] // 128, SIZES.copy[0] // 64
    maps = (TensorMap(t, (64, 128)) for t in (SOURCE, out))
    launch(copy_by_tma, grid, 32, *maps, out, shared_bytes=TILE + 8)
    return out, SOURCE


copies.step("TMA", by_tma, after="threads", predicted_gain_us=0.0, **COPY)

# %% [markdown]
# **Explanation.** The times differ little, because memory bandwidth limits both kernels. TMA needs one warp instead of
# four. Details that are easy to get wrong:
#
# - **All shared memory is dynamic.** Behind static arrays it may not be aligned to 1024 bytes, which the swizzle below
#   requires.
# - **`elect_sync`, not `thread == 0`.** Otherwise the compiler does not treat the code as executed by a single lane and
#   adds loops around TMA instructions (section 5).
# - **A tensor map is passed by value**, as a `__grid_constant__` parameter, which Numba cannot declare. `launch`
#   therefore generates a C++ entry around the kernel. A map in global memory requires a fence.
# - **`fence_mbarrier_init`** makes the barrier, which threads initialise through the *generic proxy*, visible to TMA,
#   which uses the *async proxy*.
#
# ### What an mbarrier counts
#
# **Idea.** An mbarrier passes through **phases**. A phase completes when no arrivals *and* no bytes are pending. A
# waiting thread identifies the phase by its **parity**: 0 for the first, 1 for the second, then 0 again. Below,
# `in_simulator` runs a kernel in a separate process (the folded cell has its imports), and `simulator.trace` records
# its events.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
SETUP = """
import moe_numba, torch, numpy as np
from functools import cache
from numba import cuda, float32, int32, int64, uint8, uint32, uint64
from moe_numba import simulator
from moe_numba.runtime.changed_source import define
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap
from moe_numba.ptx.accumulators import *
from moe_numba.ptx.cp_async import *
from moe_numba.ptx.conversions import *
from moe_numba.ptx.fence import *
from moe_numba.ptx.mbarrier import *
from moe_numba.ptx.memory import *
from moe_numba.ptx.cuda_cpp import ffi, tensormap as linked
from moe_numba.ptx.cuda_cpp.wgmma import wgmma_step_m64n64k128_e4m3
from moe_numba.ptx.tensormap import *
from moe_numba.ptx.tma import *
from moe_numba.ptx.warpgroup import *
from moe_numba.ptx.wgmma import *
from moe_numba.runtime.tensor_map import tensor_map
E4M3, FULL_MASK, TILE, BARRIER, SHARED_MEMORY = torch.float8_e4m3fn, 0xFFFFFFFF, 8192, 2048, 16392
wait_until_read = make_bulk_wait_group_read(0)
add_tile, wait_tile = make_wgmma_tile(64, "e4m3", accumulate=True), make_wgmma_wait(64, 0)
ZEROS = (np.float32(0),) * 32
stream = lambda: 0
"""

# %% [markdown]
# The kernel loads boxes of `TILE` bytes one after another into the same shared memory and copies each to `out`.
# `announced` is the number of bytes that the barrier expects.


# %%
@cuda.jit
def load_boxes(map_x, out, boxes, announced):
    smem = cuda.shared.array(0, uint8, 1024)
    barriers = cuda.shared.array(0, uint64, 1024)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for box in range(boxes):
        if thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(barriers, BARRIER, announced)
            tma_load_2d(smem, 0, map_x, 0, 0, int32(box * 64), barriers, BARRIER)
        mbarrier_wait_parity(barriers, BARRIER, uint32(box & 1))
        for i in range(thread, TILE, 64):
            out[box * TILE + i] = smem[i]
        cuda.syncthreads()


def count_bytes():
    x = (torch.arange(100 * 128) % 251).to(torch.uint8).view(100, 128)
    for announced in (TILE, TILE - 16, TILE + 16):
        out = torch.full((2 * TILE,), 255, dtype=torch.uint8)
        try:
            with simulator.trace() as events:
                launch(load_boxes, 1, 64, TensorMap(x, (64, 128)), out, 2, announced, shared_bytes=SHARED_MEMORY)
            right = torch.zeros(128, 128, dtype=torch.uint8)  # what is outside of x comes as zeros
            right[:100] = x
            print(f"{announced} bytes announced: {'right' if torch.equal(out, right.flatten()) else 'WRONG'}")
            kept = [event._asdict() for event in events]
        except simulator.SimulatorError as error:
            first, *more = str(error).splitlines()
            print(f"\n{announced} bytes announced: {type(error).__name__}: {first}", *more[:1], sep="\n")
    return kept


EVENTS = [SimpleNamespace(**event) for event in in_simulator(count_bytes, setup=SETUP)]

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.barrier_life([e for e in EVENTS if "mbarrier" in e.what or "copy" in e.what], 2048, 1)

# %% [markdown]
# With the right count, each box completes one phase. The matrix has only 100 rows: TMA fills the other rows of the
# second box with zeros, *and these zeros count as bytes*. With 16 bytes too few, the phase can complete before the
# copy, a race. With 16 too many, it never completes.
#
# On a newly initialised barrier a wait for parity 1 returns immediately. The producer of a ring of stages starts with
# this parity, because all stages are free at first.
#
# **Exercise 1.** The kernel loads boxes of 8 rows of 128 bytes into two stages, each with an mbarrier, and copies them
# whole to `out`: box `i + 1` is loaded while box `i` is copied. The last box may end outside the matrix of `rows` rows.
# Find two mistakes.


# %%
@cuda.jit
def load_two_stages(map_x, out, rows, boxes):
    smem, full = cuda.shared.array(2048, uint8, 1024), cuda.shared.array(2, uint64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for box in range(-1, boxes):
        ahead = int32(box + 1)
        if ahead < boxes and thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(full, ahead % 2, min(8, rows - 8 * ahead) * 128)
            tma_load_2d(smem, 1024 * (ahead % 2), map_x, 0, 0, 8 * ahead, full, ahead % 2)
        if box >= 0:
            mbarrier_wait_parity(full, box % 2, uint32(box % 2))
            for i in range(thread, 1024, 64):
                out[1024 * box + i] = smem[1024 * (box % 2) + i]
            cuda.syncthreads()


exercise("hopper-1").check(load_two_stages)

# %% [markdown]
# ### Swizzle
#
# **Idea.** A tile row of 128 bytes spans all 32 banks once. Reading the same 16-byte chunk of 8 rows, as tensor cores
# do, therefore uses only 4 banks and takes 8 wavefronts (a **bank conflict**). The 128-byte swizzle permutes the chunks
# of each row differently. TMA applies it while it writes (`swizzle=128`).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.swizzle()

# %% [markdown]
# **Check.** The folded cell loads a box with the swizzle and undoes it in the raw bytes by its formula,
# `chunk ^ row % 8`.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def dump_box(map_x, out):
    smem = cuda.shared.array(0, uint8, 1024)
    barriers = cuda.shared.array(0, uint64, 1024)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if thread < 32 and elect_sync(FULL_MASK):
        mbarrier_arrive_expect_tx(barriers, BARRIER, TILE)
        tma_load_2d(smem, 0, map_x, 0, 0, 0, barriers, BARRIER)
    mbarrier_wait_parity(barriers, BARRIER, uint32(0))
    for i in range(thread, TILE, 64):
        out[i] = smem[i]


box = torch.randint(0, 256, (64, 128), dtype=torch.uint8, device=DEVICE)
raw = torch.zeros(64, 8, 16, dtype=torch.uint8, device=DEVICE)
launch(dump_box, 1, 64, TensorMap(box, (64, 128), swizzle=128), raw, shared_bytes=SHARED_MEMORY)
row, chunk = np.mgrid[:64, :8]
undone = raw[row, chunk ^ row % 8].reshape(64, 128)
assert torch.equal(undone, box) and not torch.equal(raw.view(64, 128), box)
print(
    "place of a chunk: chunk xor (row mod 8). Banks that a column of 8 chunks lies in:",
    {name: sorted({len(draw.banks(c, on)) for c in range(8)}) for name, on in (("plain", False), ("swizzled", True))},
)

# %% [markdown]
# **Exercise 2.** A tile has 64 rows of 64 bytes, four 16-byte chunks each. Return the place, 0 to 3, of a chunk in its
# row, such that the same chunk of 8 rows (the first a multiple of 8) uses all 32 banks.

# %%
place_of_chunk = ...  # your answer: lambda row, chunk: ...
exercise("hopper-2").check(place_of_chunk)

# %% [markdown]
# ### A first wgmma
#
# **Idea.** With `wgmma.mma_async.m64n64k32` a warpgroup multiplies 64 rows of A by 64 rows of B, 32 bytes of each. The
# result, 64 x 64 floats, is distributed over the registers of 128 threads: the **accumulator fragment**. The figure
# shows 16 columns.
#
# `make_wgmma_tile` returns a function with `wgmma.fence`, four wgmmas (128 bytes of k) and `wgmma.commit_group`.
# `make_wgmma_wait` returns `wgmma.wait_group`. It takes the accumulators and returns them, so code that uses its
# results cannot be scheduled before it.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.fragment()

# %%
add_tile, wait_tile = make_wgmma_tile(64, "e4m3", accumulate=True), make_wgmma_wait(64, 0)
ZEROS = (np.float32(0),) * 32


@cuda.jit(device=True)
def store_fragment(out, acc):
    """Store a thread's 32 accumulators at their positions in a matrix of 64 x 64 floats."""
    lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
    offset = (16 * warp + (lane >> 2)) * 64 + 2 * (lane & 3)
    for j in range(8):
        out[offset + 8 * j], out[offset + 8 * j + 1] = acc[4 * j], acc[4 * j + 1]
        out[offset + 512 + 8 * j], out[offset + 512 + 8 * j + 1] = acc[4 * j + 2], acc[4 * j + 3]


@cuda.jit
def first_wgmma(map_a, map_b, out):
    smem = cuda.shared.array(0, uint8, 1024)
    barriers = cuda.shared.array(0, uint64, 1024)
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
    a, b = wgmma_descriptor(smem, 0), wgmma_descriptor(smem, TILE)
    acc = wait_tile(add_tile(ZEROS, a, b))
    store_fragment(out, acc)


out = torch.full((64, 64), float("nan"), device=DEVICE)
maps = [TensorMap(t.view(torch.uint8), (64, 128), swizzle=128) for t in (A, B)]
launch(first_wgmma, 1, 128, *maps, out, shared_bytes=SHARED_MEMORY)
error = relative_error(out, reference(A[:64, :128], B[:64, :128]))
print(f"64 x 64 results of 128 products each: relative error {error:.1e}")
assert error < 1e-3

# %% [markdown]
# Tensor cores multiply FP8 numbers exactly, but accumulate with lower precision than float32; DeepSeek reports about 14
# bits. The error grows with the number of products added.
#
# ### The descriptor's bits
#
# A 64-bit **descriptor** specifies each operand in shared memory: its start address, the stride to the next 8 rows, and
# its swizzle. The figure shows that of the second tile of `first_wgmma`. Its address is 9216: 1024 bytes that the
# system reserves, and 8192 of the first tile.

# %%
DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 9216 >> 4
draw.descriptor(DESCRIPTOR)

# %% [markdown]
# A step along k is 32 bytes, so the next instruction's descriptor is larger by 2. The tile size is part of the
# instruction, not of the descriptor.
#
# ### The same MMA in linked CUDA C++
#
# **Idea.** The other way is a C++ device function, from `moe_numba/ptx/cuda_cpp/wgmma.cu`:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
with open(source("wgmma")) as file:
    WGMMA_CU = file.read()
Markdown("```cpp\n" + WGMMA_CU[WGMMA_CU.index('extern "C"') :] + "```")

# %% [markdown]
# `moe_numba/ptx/cuda_cpp/` declares it to Numba:
#
# ```python
# step = cuda.declare_device(
#     "cu_wgmma_step_m64n64k128_e4m3",
#     "int32(CPointer(float32), CPointer(uint8), int32, int32, int32)",
#     link="wgmma.cu", abi="c",
# )
# ```
#
# The accumulators are a local array, passed as a pointer (`ffi.from_buffer`). Numba's own launch cannot pass a tensor
# map by value, so the maps are in global memory, and the thread that uses them first calls
# `fence_proxy_tensormap_acquire_sys`.


# %%
@cuda.jit
def first_linked_wgmma(map_a, map_b, out):
    smem = cuda.shared.array(0, uint8, 1024)
    barriers = cuda.shared.array(0, uint64, 1024)
    thread = int32(cuda.threadIdx.x)
    acc = cuda.local.array(32, float32)
    if thread == 0:
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if thread < 32 and elect_sync(FULL_MASK):
        fence_proxy_tensormap_acquire_sys(ffi.from_buffer(map_a), 0)
        fence_proxy_tensormap_acquire_sys(ffi.from_buffer(map_b), 0)
        mbarrier_arrive_expect_tx(barriers, BARRIER, 2 * TILE)
        tma_load_2d(smem, 0, ffi.from_buffer(map_a), 0, 0, 0, barriers, BARRIER)
        tma_load_2d(smem, TILE, ffi.from_buffer(map_b), 0, 0, 0, barriers, BARRIER)
    mbarrier_wait_parity(barriers, BARRIER, uint32(0))
    wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), int32(0), int32(TILE), int32(0))
    store_fragment(ffi.from_buffer(out), acc)


def stream():
    """Return torch's current stream as a stream of Numba."""
    return 0 if simulator.ENABLED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)


again = torch.full((64 * 64,), float("nan"), device=DEVICE)
maps = [tensor_map(t.view(torch.uint8), (64, 128), swizzle=128) for t in (A, B)]
first_linked_wgmma[1, 128, stream(), SHARED_MEMORY](*maps, again)
print("both ways:", "bit-identical" if torch.equal(again.view(64, 64), out) else "DIFFERENT results")
assert torch.equal(again.view(64, 64), out)

# %% [markdown]
# The warning is expected: the example launches one CTA.
#
# ## 5. Cost of the two ways
#
# **Idea.** The results are bit-identical; now compare the machine code. With **LTO** (link-time optimisation), Numba's
# code and the C++ are linked as intermediate code, and the compiler can inline the call. Without LTO, the linker
# combines machine code.
#
# **Prediction.** With LTO the code is the same. Without LTO a call remains. Its pointer argument must point to memory,
# so each call stores 32 floats and loads them again.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
POINTERS, ARRAYS = ["uint8*", "uint8*", "float32*"], ["uint8[]", "uint8[]", "float32[]"]


def compiled(requests, *functions):
    """Compile kernels; ``requests``: name -> (expression, signature, threads, lto)."""
    return compile_apart(SETUP + "\n".join(map(source_of, functions)), requests)


def table(codes, columns):
    """Format machine codes as a table; ``columns``: heading -> function of a code."""
    lines = [["", *columns], ["---"] * (len(columns) + 1)]
    for name, code in codes.items():
        shown = [show(code) for show in columns.values()]
        lines.append([name, *("-" if value is None else str(value) for value in shown)])
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in lines))


COLUMNS = {
    "registers": lambda code: code.registers,
    "stack, bytes": lambda code: code.stack_bytes,
    "spilled, bytes": lambda code: code.spilled_bytes,
    "QGMMA (wgmma)": lambda code: code.count("QGMMA"),
    "CALL": lambda code: code.count("CALL"),
    "loads and stores through a stack": lambda code: code.count("LDL", "STL", "LD", "ST"),
    "instructions": lambda code: code.opcodes and len(code.opcodes),
}
BY_LINK = """    acc = cuda.local.array(32, float32)
    wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), int32(0), int32(TILE), int32(0))"""
CPP_VARIANT = changed_source(first_wgmma, "    acc = wait_tile(add_tile(ZEROS, a, b))", BY_LINK, "cpp_variant")
INTERFACE_CODES = compiled(
    {
        f"{way}, {'with' if lto else 'without'} LTO": (kernel, POINTERS, 128, lto)
        for way, kernel in (("intrinsics", "first_wgmma"), ("linked CUDA C++", "cpp_variant"))
        for lto in (True, False)
    }
    | {
        "linked CUDA C++, launched by Numba, with LTO": ("first_linked_wgmma", ARRAYS, 128, True),
        "the same, `out` an array": ("into_an_array", ARRAYS, 128, True),
    },
    store_fragment,
    first_wgmma,
    CPP_VARIANT,
    first_linked_wgmma,
    changed_source(first_linked_wgmma, "ffi.from_buffer(out)", "out", "into_an_array"),
)
table(INTERFACE_CODES, COLUMNS)

# %% [markdown]
# **Explanation.** The kernels of the first four rows differ only in the MMA. With LTO, linked CUDA C++ costs nothing.
# Without LTO a call, a stack, and its loads and stores remain, as predicted.
#
# The last two rows show a different cost. Numba *arrays* allow negative indices, and each of the 32 stores handles that
# case, which costs registers and instructions. The course's kernels take *pointers*.
#
# With LTO, both ways are equally good for this MMA. The course uses intrinsics because a Python function can have a
# second implementation for the simulator, and because accumulators that are values expose their data flow to the
# compiler.
#
# ### Three compiler pitfalls
#
# The first folded cell defines the GEMM kernel of steps 5 to 8: one lane of the producer warpgroup calls `load`, two
# consumer warpgroups call `multiply`. The important lines are their loops over `k_blocks`: `load` waits for a stage's
# `empty` barrier and issues the copies; `multiply` waits for its `full` barrier, computes and arrives on `empty`. The
# second folded cell compiles this kernel and two variants.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_gemm(n, stages, promote=False):
    """``gemm(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch)``: tiles of 128 x n; pitch counts 4 bytes of out."""
    stage_bytes = (128 + n) * 128
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    load, multiply = make_load(n, stages), make_multiply(n, stages, promote)
    release, request = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)

    @cuda.jit
    def gemm(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch):
        smem = cuda.shared.array(0, uint8, 1024)
        barriers = cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(barriers, full + stage, 1)
                mbarrier_init(barriers, empty + stage, 8)  # one arrival of each consumer warp
            fence_mbarrier_init()
        cuda.syncthreads()
        if thread >= 256:
            release()
            if thread < 288 and elect_sync(FULL_MASK):
                load(smem, barriers, map_a, map_b, tiles_m, tiles, k_blocks)
        else:
            request()
            multiply(smem, barriers, out, tiles_m, tiles, k_blocks, pitch)

    return gemm


@cache
def make_load(n, stages):
    stage_bytes = (128 + n) * 128
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages

    @cuda.jit(device=True)
    def load(smem, barriers, map_a, map_b, tiles_m, tiles, k_blocks):
        stage, phase = int32(0), uint32(1)  # a wait for parity 1 passes on a new barrier: all stages are free
        tile = uint32(cuda.blockIdx.x)
        while tile < uint32(tiles):
            column = uint32(tile // uint32(tiles_m))
            row = int32(uint32(tile - column * uint32(tiles_m)) * uint32(128))
            for k in range(k_blocks):
                mbarrier_wait_parity(barriers, empty + stage, phase)
                mbarrier_arrive_expect_tx(barriers, full + stage, stage_bytes)
                offset = int32(stage * stage_bytes)
                tma_load_2d(smem, offset, map_a, 0, int32(k * 128), row, barriers, full + stage)
                tma_load_2d(
                    smem, offset + 2 * TILE, map_b, 0, int32(k * 128), int32(column * n), barriers, full + stage
                )
                stage = int32(stage + 1)
                if stage == stages:
                    stage, phase = int32(0), uint32(phase ^ uint32(1))
            tile = uint32(tile + uint32(cuda.gridDim.x))

    return load


@cache
def make_multiply(n, stages, promote):
    stage_bytes = (128 + n) * 128
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    step, store, zeros = make_step(n, promote), make_store(n), (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def multiply(smem, barriers, out, tiles_m, tiles, k_blocks, pitch):
        group, lane = int32(cuda.threadIdx.x >> 7), int32(cuda.threadIdx.x & 31)
        stage, phase = int32(0), uint32(0)
        tile = uint32(cuda.blockIdx.x)
        while tile < uint32(tiles):
            column = uint32(tile // uint32(tiles_m))
            row = int32(uint32(tile - column * uint32(tiles_m)) * uint32(128))
            acc = zeros
            for _ in range(k_blocks):
                mbarrier_wait_parity(barriers, full + stage, phase)
                offset = int32(stage * stage_bytes)
                a, b = wgmma_descriptor(smem, offset + group * TILE), wgmma_descriptor(smem, offset + 2 * TILE)
                acc = step(acc, a, b)
                if lane == 0:
                    mbarrier_arrive(barriers, empty + stage)
                stage = int32(stage + 1)
                if stage == stages:
                    stage, phase = int32(0), uint32(phase ^ uint32(1))
            store(out, acc, int32(row + group * 64), int32(column * n), pitch)
            tile = uint32(tile + uint32(cuda.gridDim.x))

    return multiply


@cache
def make_step(n, promote):
    """Accumulate the MMAs of a stage in the tensor cores, or promote them: add them in float32 registers."""
    add, tile = make_wgmma_tile(n, "e4m3", accumulate=True), make_wgmma_tile(n, "e4m3")
    wait, fma = make_wgmma_wait(n, 0), make_fma(n)

    @cuda.jit(device=True)
    def step(acc, a, b):
        if promote:
            return fma(acc, wait(tile(a, b)), float32(1))
        return wait(add(acc, a, b))

    return step


@cache
def make_store(n):
    @cuda.jit(device=True)
    def store(out, acc, row, column, pitch):
        """Store a warpgroup's results as bfloat16, two per 4-byte word."""
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
        offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))
        for j in range(n // 8):
            out[offset + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 1], acc[4 * j]))
            out[offset + 8 * pitch + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 3], acc[4 * j + 2]))

    return store


# %% jupyter={"source_hidden": true} tags=["hide-input"]
GEMM_PARTS = make_gemm, make_load, make_multiply, make_step, make_store
GEMM_SIGNATURE = ["uint8*", "uint8*", "int32*", *["int32"] * 4]


VARIANTS = {
    "unchanged": (),
    "a 64-bit division": ((make_multiply, "uint32(tile // uint32(tiles_m))", "uint32(tile // int64(tiles_m))"),),
    "thread == 256, not elect_sync": ((make_gemm, "thread < 288 and elect_sync(FULL_MASK)", "thread == 256"),),
}
sources, requests = [], {}
for i, (variant, changes) in enumerate(VARIANTS.items()):
    parts = {f: source_of(f) for f in GEMM_PARTS} | {f: changed_source(f, old, new) for f, old, new in changes}
    text = "\n".join(parts.values())
    sources.append(f"space_{i} = define({text!r}, globals())\n")
    for lto in (True, False) if i < 2 else (True,):
        name = f"{variant}, {'with' if lto else 'without'} LTO"
        requests[name] = f"space_{i}['make_gemm'](128, 6)", GEMM_SIGNATURE, 384, lto
PITFALLS = compiled(requests, *sources)
table(
    PITFALLS,
    {
        "registers": COLUMNS["registers"],
        "setmaxnreg": lambda code: code.count("USETMAXREG"),
        "loops around TMA": lambda code: code.count("BRA.U.ANY"),
        "CALL": COLUMNS["CALL"],
        "ptxas warnings": lambda code: ", ".join(sorted(set(code.complaints))) or "none",
    },
)

# %% [markdown]
# - **`setmaxnreg`** moves registers from producer to consumer warps. **Without LTO, ptxas ignores it** (C7504).
# - **64-bit integers.** A division of Numba's 64-bit integers compiles to a function call. Without LTO it makes ptxas
#   serialise the wgmmas (C7509), although it is outside the main loop. Hence the casts to `uint32`.
# - **`elect_sync`.** With `thread == 256` instead, the compiler adds loops around TMA instructions.
#
# ## 6. The ladder: an FP8 GEMM
#
# On a GPU, D has 4096 x 4096 elements and k is 7168. The peer, labelled `torch`, is cuBLAS through `torch._scaled_mm`
# with fast accumulation, like our kernels up to step 7.
#
# A step predicts what it saves over an earlier step. Both are timed interleaved; the line of a step has both times, the
# predicted and the measured change, and a verdict. Slower steps are drawn in grey. `us(name)` is the time of a step.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def output():
    """Make an output in which elements that a kernel does not write are NaN."""
    return torch.full((SIZES.m, SIZES.n), float("nan"), dtype=torch.bfloat16, device=DEVICE)


ONE = torch.ones((), device=DEVICE)
OUT = output()
MAPS = [TensorMap(t.view(torch.uint8), (64, 128), swizzle=128) for t in (A, B)]
LINES, PITCH, K_BLOCKS = OUT.view(torch.int32), SIZES.n // 2, SIZES.k // 128  # two elements of OUT per 4-byte word


def by_cublas(fast=True):
    if simulator.ENABLED:
        return (A.float() @ B.float().T).bfloat16(), EXPECTED
    out = torch._scaled_mm(A, B.t(), scale_a=ONE, scale_b=ONE, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return out, EXPECTED


ladder = Ladder(
    "hopper_ladder",
    mismatch,
    title=f"FP8 GEMM in Numba: {TIMED.m} x {TIMED.n} x {TIMED.k}",
    reference_name="torch",
    size={"m": SIZES.m, "n": SIZES.n, "k": SIZES.k},
)
us = ladder.median_us  # the time of a step, measured now or recorded; None if there is none


def measure(name, launch_it, **more):
    """Check and time a step of the ladder, and record its relative error."""

    def run():
        return launch_it() or (OUT, EXPECTED)

    OUT.fill_(float("nan"))
    error = relative_error(run()[0], EXPECTED)
    more |= {
        "flops": 2 * SIZES.m * SIZES.n * SIZES.k,
        "error": float(f"{error:.2e}"),
        "floor_us": round(LOWER_BOUND_US, 1),
    }
    ladder.step(name, run, dtype="float8_e4m3fn", **more)
    gain = None if ladder.untimed else ladder.gain(name)
    if gain and gain.saved_us < -NOISE * gain.before_us:
        ladder.rows[-1]["slower"] = True


def print_rates(name, tile=None):
    """Print the rate and the error of a step; with the rows and columns of its tile, the rate of its loads."""
    if row := ladder.row(name):
        time_us = row["kernel_us"]["median"]
        print(f"{name}: {row['flops'] / time_us / 1e6:.0f} TFLOP/s, relative error {row['error']:.2e}")
        if tile:
            loaded = row["flops"] / 2 * (1 / tile[0] + 1 / tile[1])
            print(
                f"    tiles: {loaded / time_us / 1e6:.1f} TB/s into shared memory; L2 bandwidth of the table: "
                f"{L2_BYTES * CLOCK * SMS / 1e12:.1f} TB/s"
            )


measure("torch", by_cublas)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("torch")

# %% [markdown]
# ### Step 1: thread copies
#
# **Idea.** A CTA of one warpgroup computes 64 x 64 results. Its threads copy both tiles with the swizzle. They write
# shared memory through the generic proxy, wgmma reads it through the async proxy, so each thread calls
# `fence_proxy_async_shared` before the barrier.
#
# **Predicted gain.** None: this is our first kernel, and it changes no other.


# %%
@cuda.jit(device=True)
def copy_tile(smem_i32, offset, x, row, k, pitch):
    """Copy 64 rows of 128 bytes, 16 bytes per thread and iteration, with the swizzle; offsets count 4-byte words."""
    for i in range(int32(cuda.threadIdx.x), 512, 128):
        a, b, c, d = load_nc_u32x4(x, int64(row + (i >> 3)) * pitch + (k + 4 * (i & 7)))
        chunk = (i & ~7) | ((i ^ i >> 3) & 7)
        st_shared_s32x4(smem_i32, int32(offset + 4 * chunk), int32(a), int32(b), int32(c), int32(d))


store_64 = make_store(64)


@cuda.jit
def gemm_by_threads(a, b, out, k_words, pitch):
    smem, smem_i32 = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, int32, 1024)
    row, column = int32(cuda.blockIdx.x * 64), int32(cuda.blockIdx.y * 64)
    acc = ZEROS
    for k in range(0, k_words, 32):
        copy_tile(smem_i32, 0, a, row, k, k_words)
        copy_tile(smem_i32, 2048, b, column, k, k_words)
        fence_proxy_async_shared()
        cuda.syncthreads()
        acc = wait_tile(add_tile(acc, wgmma_descriptor(smem, 0), wgmma_descriptor(smem, TILE)))
        cuda.syncthreads()
    store_64(out, acc, row, column, pitch)


GRID_64 = SIZES.m // 64, SIZES.n // 64
WORDS = [t.view(torch.int32) for t in (A, B)]


def gemm_with_thread_copies():
    launch(
        gemm_by_threads, GRID_64, 128, *WORDS, LINES, SIZES.k // 4, PITCH, shared_bytes=SHARED_MEMORY, cpp_entry=True
    )


measure("thread copies", gemm_with_thread_copies)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("thread copies", (64, 64))

# %% [markdown]
# The tiles arrive at about the L2 bandwidth of the table, although copies and MMAs alternate within a CTA. A likely
# reason, not measured: while one CTA copies, other CTAs on the same SM compute.
#
# **Exercise 3.** 64 threads add 1 to each byte of a tile of 8 x 128 bytes, and TMA stores the tile; the next tile uses
# the same shared memory. A TMA store reads it through the async proxy. Find two mistakes.


# %%
@cuda.jit
def add_one(x, map_y, tiles):
    smem = cuda.shared.array(1024, uint8, 128)
    thread = int32(cuda.threadIdx.x)
    for tile in range(tiles):
        for i in range(thread, 1024, 64):
            smem[i] = x[1024 * tile + i] + uint8(1)
        cuda.syncthreads()
        if thread < 32 and elect_sync(FULL_MASK):
            tma_store_2d(map_y, 0, 0, int32(8 * tile), smem, 0)
            bulk_commit_group()
            wait_until_read()


exercise("hopper-3").check(add_one)

# %% [markdown]
# ### Step 2: TMA copies
#
# **Idea.** One lane issues the copies of both tiles. There is still one stage, so copies and MMAs alternate.
#
# **Predicted gain.** Zero: by the table the L2 cache is the limit of this tile, and it delivers the same bytes.


# %%
@cuda.jit
def gemm_by_tma(map_a, map_b, out, k_blocks, pitch):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    row, column = int32(cuda.blockIdx.x * 64), int32(cuda.blockIdx.y * 64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    acc = ZEROS
    for k in range(k_blocks):
        if thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(barriers, BARRIER, 2 * TILE)
            tma_load_2d(smem, 0, map_a, 0, int32(k * 128), row, barriers, BARRIER)
            tma_load_2d(smem, TILE, map_b, 0, int32(k * 128), column, barriers, BARRIER)
        mbarrier_wait_parity(barriers, BARRIER, uint32(k & 1))
        acc = wait_tile(add_tile(acc, wgmma_descriptor(smem, 0), wgmma_descriptor(smem, TILE)))
        cuda.syncthreads()
    store_64(out, acc, row, column, pitch)


def gemm_with_tma():
    launch(gemm_by_tma, GRID_64, 128, *MAPS, LINES, K_BLOCKS, PITCH, shared_bytes=SHARED_MEMORY)


measure("TMA copies", gemm_with_tma, after="thread copies", predicted_gain_us=0.0)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("TMA copies", (64, 64))

# %% [markdown]
# **Explanation.** L2 was not the limit of step 1: tiles now arrive at about twice the L2 bandwidth of the table. The
# instructions of the copy are gone, and so is the fence, because TMA, like wgmma, uses the async proxy. Possible reasons
# for the higher rate, not measured: the table's bandwidth is of a smaller GPU, or the memory system combines requests of
# neighbouring CTAs for the same tile.
#
# ### Step 3: linked CUDA C++
#
# **Idea.** Use the linked function. The folded kernel `gemm_linked` is `gemm_by_tma` with `wgmma_step_m64n64k128_e4m3`, a
# local array `acc` and tensor maps in global memory, as in section 4.
#
# **Predicted gain.** Zero: section 5 found the same machine code.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(launch_bounds=(128, 1))
def gemm_linked(map_a, map_b, out, k_blocks, pitch):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    row, column = int32(cuda.blockIdx.x * 64), int32(cuda.blockIdx.y * 64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
        fence_proxy_tensormap_acquire_sys(ffi.from_buffer(map_a), 0)
        fence_proxy_tensormap_acquire_sys(ffi.from_buffer(map_b), 0)
    cuda.syncthreads()
    acc = cuda.local.array(32, float32)
    for k in range(k_blocks):
        if thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(barriers, BARRIER, 2 * TILE)
            tma_load_2d(smem, 0, ffi.from_buffer(map_a), 0, int32(k * 128), row, barriers, BARRIER)
            tma_load_2d(smem, TILE, ffi.from_buffer(map_b), 0, int32(k * 128), column, barriers, BARRIER)
        mbarrier_wait_parity(barriers, BARRIER, uint32(k & 1))
        wgmma_step_m64n64k128_e4m3(ffi.from_buffer(acc), ffi.from_buffer(smem), int32(0), int32(TILE), int32(k > 0))
        cuda.syncthreads()
    store_64(ffi.from_buffer(out), acc, row, column, pitch)


GLOBAL_MAPS = [tensor_map(t.view(torch.uint8), (64, 128), swizzle=128) for t in (A, B)]


def gemm_through_cpp():
    gemm_linked[GRID_64, 128, stream(), SHARED_MEMORY](*GLOBAL_MAPS, LINES.view(-1), K_BLOCKS, PITCH)


measure("linked CUDA C++", gemm_through_cpp, after="TMA copies", predicted_gain_us=0.0)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("linked CUDA C++")

# %% [markdown]
# **Explanation.** The step is slower, although no change was predicted. Section 5 compiled only a kernel with a single
# MMA call. Here the tensor maps are in global memory, and Numba compiles and launches the whole kernel; which of these
# costs the time is not measured. The *call* time is also much longer.
#
# ### Step 4: a ring of 4 stages
#
# **Idea.** While the tensor cores process one stage, TMA loads the next ones. Four stages form a **ring**, each with a
# `full` barrier. Iteration `k` uses stage `k % 4`, and the lowest bit of `k // 4` is the parity to wait for. After
# `syncthreads`, all warps have finished with the stage, and one lane issues the loads for iteration `k + 4`.
#
# **Predicted gain.** In step 2 loads and MMAs of a CTA alternate. If all MMAs are hidden behind loads, their time is saved:
# at the peak rate, that is the lower bound.


# %%
@cuda.jit
def gemm_pipelined(map_a, map_b, out, k_blocks, pitch):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    row, column = int32(cuda.blockIdx.x * 64), int32(cuda.blockIdx.y * 64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for stage in range(4):
            mbarrier_init(barriers, 4 * BARRIER + stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    acc = ZEROS
    for k in range(-4, k_blocks):  # the first four iterations only load
        stage = int32(k & 3)
        offset = int32(stage * 2 * TILE)
        if k >= 0:
            mbarrier_wait_parity(barriers, 4 * BARRIER + stage, uint32(k >> 2 & 1))
            acc = wait_tile(add_tile(acc, wgmma_descriptor(smem, offset), wgmma_descriptor(smem, offset + TILE)))
            cuda.syncthreads()
        if k + 4 < k_blocks and thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(barriers, 4 * BARRIER + stage, 2 * TILE)
            tma_load_2d(smem, offset, map_a, 0, int32((k + 4) * 128), row, barriers, 4 * BARRIER + stage)
            tma_load_2d(smem, offset + TILE, map_b, 0, int32((k + 4) * 128), column, barriers, 4 * BARRIER + stage)
    store_64(out, acc, row, column, pitch)


def gemm_with_pipeline():
    launch(gemm_pipelined, GRID_64, 128, *MAPS, LINES, K_BLOCKS, PITCH, shared_bytes=4 * SHARED_MEMORY)


measure("ring of 4 stages", gemm_with_pipeline, after="TMA copies", predicted_gain_us=LOWER_BOUND_US)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("ring of 4 stages")

# %% [markdown]
# **Explanation.** The step is slower than step 2. Within a CTA, loads and MMAs now overlap, but in step 2 those of
# different CTAs on an SM overlapped already. A likely reason for the loss, not measured, is occupancy: the ring needs
# four times the shared memory, so only three CTAs fit on an SM, fewer than in step 2. A larger tile loads fewer bytes but
# needs more warps, which should not all synchronise at every stage.
#
# ### Step 5: warp specialisation
#
# **Idea.** This is the kernel of section 5. A tile has 128 x 128 results; one warp of a producer warpgroup loads and two
# consumer warpgroups compute (**warp specialisation**). Each stage has a second barrier, `empty`: each consumer warp
# arrives on it after using the stage, and the producer waits for it before refilling the stage. The main loop contains no
# `syncthreads`. The figure traces a small example in the simulator.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def play_ring():
    gemm, k = make_gemm(64, 3), 7 * 128
    a, b = torch.ones(128, k).to(E4M3), torch.ones(64, k).to(E4M3)
    maps = [TensorMap(t.view(torch.uint8), (len(t), 128), swizzle=128) for t in (a, b)]
    out = torch.zeros(128, 32, dtype=torch.int32)
    with simulator.seed(3), simulator.trace() as events:
        launch(gemm, 1, 384, *maps, out, 1, 1, 7, 32, shared_bytes=3 * 192 * 128 + 48)
    assert (out.view(torch.bfloat16) == k).all()
    return [event._asdict() for event in events if "mbarrier" in event.what or "copy" in event.what]


EVENTS = [SimpleNamespace(**event) for event in in_simulator(play_ring, setup=SETUP)]
RING_FULL = 3 * 192 * 128 // 8
for span in draw.ring_spans(EVENTS, RING_FULL, RING_FULL + 3, 3)[:8]:
    print(
        f"k = {3 * span.iteration + span.stage}: stage {span.stage} is {'loaded' if span.what == 'load' else 'used  '} "
        f"from event {span.start} to {span.end}"
    )
draw.ring(EVENTS, RING_FULL, RING_FULL + 3, 3)

# %% [markdown]
# Only the order of events has a meaning, not their lengths, because the simulator randomises the order of threads.
# Within a stage, loads and MMAs alternate, as the two barriers enforce. Across stages they overlap.
#
# **Predicted gain.** The share of the bytes from L2 that the larger tile does not load, of step 4's time.


# %%
def run_gemm(n, stages, ctas=None, promote=False, a=A, lines=LINES):
    """Launch the kernel of section 5 with ``ctas`` CTAs; by default one CTA per tile."""
    tiles_m, tiles = len(a) // 128, len(a) // 128 * (SIZES.n // n)
    maps = [TensorMap(t.view(torch.uint8), (rows, 128), swizzle=128) for t, rows in ((a, 128), (B, n))]
    shared_bytes = stages * ((128 + n) * 128 + 16)
    launch(
        make_gemm(n, stages, promote),
        min(ctas or tiles, tiles),
        384,
        *maps,
        lines,
        tiles_m,
        tiles,
        K_BLOCKS,
        PITCH,
        shared_bytes=shared_bytes,
    )


def saved_by_tile(name, old, new):
    """Microseconds that tile ``new`` = (n, groups) saves over step ``name`` with tile ``old``, if L2 is the limit."""
    return (us(name) or 0) * (1 - peak_share(*old) / peak_share(*new))


gain_us = saved_by_tile("ring of 4 stages", (64, 1), (128, 2))
measure("warp specialisation", partial(run_gemm, 128, 6), after="ring of 4 stages", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("warp specialisation", (128, 128))

# %% [markdown]
# **Explanation.** A tile with four times the results halves the bytes loaded per FLOP. Specialised warps make such a
# tile practical: six stages take 192 KB, so an SM holds only one CTA, and loads must overlap with MMAs within it. As in
# step 2, tiles arrive faster than the table allows; only the ratio of bytes is used for the prediction.
#
# **Exercise 4.** Warp 2 is the producer of a ring of two stages, warps 0 and 1 its consumers. `barriers` has two
# `full` barriers, then two `empty` ones, on which lane 0 arrives for its whole warp. A stage may be refilled too early:
# find two mistakes.


# %%
@cuda.jit
def copy_by_roles(map_x, out, boxes):
    smem, barriers = cuda.shared.array(2048, uint8, 1024), cuda.shared.array(4, uint64)
    thread, warp, lane = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x >> 5), int32(cuda.threadIdx.x & 31)
    if thread == 0:
        for stage in range(2):
            mbarrier_init(barriers, stage, 1)
            mbarrier_init(barriers, 2 + stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if warp < 2:
        for box in range(boxes):
            stage = int32(box % 2)
            mbarrier_wait_parity(barriers, stage, uint32(box // 2 % 2))
            if lane == 0:
                mbarrier_arrive(barriers, 2 + stage)
            for i in range(thread, 1024, 64):
                out[1024 * box + i] = smem[1024 * stage + i]
    elif elect_sync(FULL_MASK):
        for box in range(boxes):
            stage = int32(box % 2)
            mbarrier_wait_parity(barriers, 2 + stage, uint32(1 - box // 2 % 2))
            mbarrier_arrive_expect_tx(barriers, stage, 1024)
            tma_load_2d(smem, 1024 * stage, map_x, 0, 0, int32(8 * box), barriers, stage)


exercise("hopper-4").check(copy_by_roles)

# %% [markdown]
# ### Step 6: persistent CTAs
#
# **Idea.** In step 5 each CTA computes one tile. The next CTA on the SM fills the ring again, and no loads are in
# flight while a CTA stores its results. A **persistent** kernel launches one CTA per SM, which iterates over several
# tiles. The kernel already does this; only the grid changes. The ring continues across tiles: the producer loads the
# next tile while the consumers store the current one.
#
# **Predicted gain.** The time to write D at the copy bandwidth, if loads are the limit and now continue during stores.

# %%
gain_us = 2 * TIMED.m * TIMED.n / LIMITS.copy_bandwidth * 1e6  # bfloat16
persistent = partial(run_gemm, 128, 6, SIZES.sms)
measure("persistent CTAs", persistent, after="warp specialisation", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("persistent CTAs")

# %% [markdown]
# **Explanation.** Persistent CTAs are faster, as predicted, but both gains are smaller than the variation of repeated
# measurements of these two steps. With 1024 tiles for 132 CTAs, 32 CTAs are idle in the last of 8 waves, which a
# persistent kernel does not change.
#
# ### Step 7: a tile of 128 x 256
#
# **Idea.** With the wider tile, each warpgroup reads fewer bytes from shared memory per FLOP. Each consumer thread has 128
# accumulators, and only four stages of 48 KB fit.
#
# **Predicted gain.** As in step 5, the share of the bytes from L2 that the larger tile does not load.

# %%
gain_us = saved_by_tile("persistent CTAs", (128, 2), (256, 2))
wider = partial(run_gemm, 256, 4, SIZES.sms)
measure("tile of 128 x 256", wider, after="persistent CTAs", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_rates("tile of 128 x 256", (128, 256))

# %% [markdown]
# **Explanation.** The step is slower than step 6, so loads from L2 are no longer the limit. The reason is not known:
# all of D is written in less time than the loss. In the sweep below, two tiles per CTA take twice as long as one, so
# each tile is slow.
#
# ### Step 8: float32 accumulation
#
# **Idea.** DeepGEMM's remedy for the reduced accumulation precision is **promotion**: after each stage of 128 elements,
# threads add the tensor cores' partial sums to float32 accumulators in registers (see `make_step`). This needs twice the
# accumulators, so the tile is 128 x 128 again.
#
# **Predicted gain.** A loss. An SM adds 128 floats per clock. One warpgroup's additions can overlap with the other's MMAs.
# If all did, nothing would be lost; if none did, the time of all additions. The prediction is half of this time.

# %%
ADDITIONS_US = TIMED.m * TIMED.n * TIMED.k / 128 / (128 * SMS * CLOCK) * 1e6  # one per result and stage
promoted = partial(run_gemm, 128, 6, SIZES.sms, promote=True)
measure("float32 accumulation", promoted, after="persistent CTAs", predicted_gain_us=-ADDITIONS_US / 2)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
if not ladder.untimed:
    ladder.rows[-1]["torch_accurate_error"] = float(f"{relative_error(by_cublas(fast=False)[0], EXPECTED):.2e}")
ERRORS = {name: (ladder.row(name) or {}).get("error") for name in ("torch", "persistent CTAs", "float32 accumulation")}
ERRORS["torch, use_fast_accum=False"] = (ladder.row("float32 accumulation") or {}).get("torch_accurate_error")
print(f"all additions: {ADDITIONS_US:.1f} us")
for name, error in ERRORS.items():
    if error:  # independent errors add up as squares
        print(
            f"{name}: relative error {error:.2e}, {max(0, error**2 - ROUNDING**2) ** 0.5:.1e} without rounding to bfloat16"
        )

# %% [markdown]
# **Explanation.** The last numbers subtract the rounding to bfloat16. Promotion removes most of the remaining error, so
# the accumulation within a stage of 128 is accurate enough. cuBLAS without fast accumulation has the same error. The
# loss is closer to the time of all additions than to half of it, so the two warpgroups overlap little.
#
# ### Other sizes
#
# The kernel of step 7 and cuBLAS for other numbers of rows:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sweep():
    """Check and time other numbers of rows; return {rows: {"torch": us, "ours": us}}."""
    found = {}
    for rows in (128, 256) if simulator.ENABLED else (128, 512, 1024, 2048, 8192):
        a = torch.randn(rows, SIZES.k, device=DEVICE).to(E4M3)
        out = torch.full((rows, SIZES.n), float("nan"), dtype=torch.bfloat16, device=DEVICE)
        calls = {"ours": partial(run_gemm, 256, 4, SIZES.sms, a=a, lines=out.view(torch.int32))}
        calls["ours"]()
        assert not mismatch((out, reference(a, B))), mismatch((out, reference(a, B)))
        if not simulator.ENABLED:
            calls["torch"] = partial(
                torch._scaled_mm, a, B.t(), scale_a=ONE, scale_b=ONE, out_dtype=torch.bfloat16, use_fast_accum=True
            )
            found[str(rows)] = {name: round(stats.median, 2) for name, stats in kernel_times(calls).items()}
    return found


SWEEP = sweep()
for row in ladder.rows:
    if row["step"] == "tile of 128 x 256" and not ladder.untimed:
        row["sweep"] = SWEEP
for rows, times in ((ladder.row("tile of 128 x 256") or {}).get("sweep") or {}).items():
    rates = {name: 2 * int(rows) * TIMED.n * TIMED.k / time_us / 1e6 for name, time_us in times.items()}
    print(
        f"{rows:>5} rows: ours {times['ours']:7.1f} us, {rates['ours']:5.0f} TFLOP/s; "
        f"cuBLAS {times['torch']:7.1f} us, {rates['torch']:5.0f} TFLOP/s"
    )
if not ladder.row("tile of 128 x 256"):
    print("no times are recorded yet")

# %% [markdown]
# **Result.** cuBLAS is faster at every size. Our kernel takes about the same time for 128 and 512 rows: with 16 and 64
# tiles, each CTA computes at most one.
#
# ### Wrong results must be rejected
#
# Three wrong GEMMs test the check: one omits the last 128 elements of k, one the last column of tiles, and one shifts
# the result by one column.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def skip_one_k_block():
    OUT.fill_(float("nan"))
    tiles = SIZES.m // 128 * (SIZES.n // 128)
    maps = [TensorMap(t.view(torch.uint8), (128, 128), swizzle=128) for t in (A, B)]
    launch(
        make_gemm(128, 6),
        tiles,
        384,
        *maps,
        LINES,
        SIZES.m // 128,
        tiles,
        K_BLOCKS - 1,
        PITCH,
        shared_bytes=6 * (256 * 128 + 16),
    )
    return OUT, EXPECTED


def skip_one_tile():
    OUT.fill_(float("nan"))
    launch(gemm_by_tma, (GRID_64[0], GRID_64[1] - 1), 128, *MAPS, LINES, K_BLOCKS, PITCH, shared_bytes=SHARED_MEMORY)
    return OUT, EXPECTED


def shift_rows():
    run_gemm(128, 6)
    return OUT.roll(1, 1), EXPECTED


trial = Ladder("hopper_trial", mismatch)
for wrong in (skip_one_k_block, skip_one_tile, shift_rows):
    trial.step(wrong.__name__, wrong, expect_wrong=True)

# %% [markdown]
# ### The whole ladder
#
# All steps are timed again, interleaved, so that clock drift affects all alike. The figure shows these times.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
copies.measure_all()
copies.save()
ladder.measure_all()
ladder.save()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder.plot(floor_us=LOWER_BOUND_US)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
for name in [row["step"] for row in (ladder.record or {"rows": ladder.rows})["rows"]]:
    if row := ladder.row(name):
        rate, best = row["flops"] / row["kernel_us"]["median"] / 1e6, ladder.median_us("torch")
        print(
            f"{name:<26} {rate:5.0f} TFLOP/s, {100 * best / row['kernel_us']['median']:4.0f} % of cuBLAS, "
            f"relative error {row['error']:.2e}"
        )

# %% [markdown]
# **Result.** The fastest of our kernels is that of steps 5 and 6; cuBLAS is faster. The two large gains come from TMA (step
# 2) and from the larger tile with specialised warps (step 5).
#
# ## 7. Tensor maps made on the device
#
# **Idea.** In an MoE layer each expert has some rows of one long matrix; their number is known only on the GPU. hpc-ops
# therefore creates a tensor map for each expert on the device:
#
# 1. A warp copies a **template**, a map that the host encoded, to shared memory.
# 2. One thread replaces fields with `tensormap.replace`, here the address and the number of rows.
# 3. The warp publishes the map: `tensormap.cp_fenceproxy` copies it to global memory and is a release fence.
# 4. A thread that uses the map first *acquires* it with the matching fence.
#
# In the folded cell `make_maps` does 1 to 3 (`set_address`, `set_extent`, `tensormap_cp_fenceproxy`), and `load_groups`
# does 4 (`fence_proxy_tensormap_acquire_sys`) and loads one box per group.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
set_address, set_extent = linked.tensormap_replace_global_address, linked.make_tensormap_replace_global_dim(1)


@cuda.jit
def make_maps(maps, template, x, starts):
    copy = cuda.shared.array(128, uint8, 128)
    lane, group = cuda.threadIdx.x, cuda.blockIdx.x
    for i in range(lane, 128, 32):
        copy[i] = template[i]
    cuda.syncwarp()
    if lane == 0:
        set_address(ffi.from_buffer(copy), 0, ffi.from_buffer(x), int64(starts[group]) * 128)
        set_extent(ffi.from_buffer(copy), 0, uint32(starts[group + 1] - starts[group]))
    cuda.syncwarp()
    linked.tensormap_cp_fenceproxy(ffi.from_buffer(maps), 128 * group, ffi.from_buffer(copy), 0)


@cuda.jit
def load_groups(maps, out, pick, rows):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    lane, group = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    if elect_sync(FULL_MASK):
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
        fence_proxy_tensormap_acquire_sys(maps, pick[group] * 128)  # "gpu" would do for maps that no host wrote
        mbarrier_arrive_expect_tx(barriers, BARRIER, TILE)
        tma_load_2d(smem, 0, maps, pick[group] * 128, 0, rows[group], barriers, BARRIER)
    cuda.syncwarp()
    mbarrier_wait_parity(barriers, BARRIER, uint32(0))
    for i in range(lane, TILE, 32):
        out[group * TILE + i] = smem[i]


def groups_by_maps():
    """Load boxes of three groups, with a map per group and with one map for all."""
    device = "cpu" if simulator.ENABLED else "cuda"
    starts = torch.tensor([0, 20, 84, 100], dtype=torch.int32, device=device)
    x = torch.randint(1, 256, (100, 128), dtype=torch.uint8, device=device)
    maps = tensor_map(x, (64, 128)).repeat(4)[: 3 * 128].clone()
    template = tensor_map(x, (64, 128))
    make_maps[3, 32, stream()](maps, template, x.view(-1), starts)
    pick, first = torch.arange(3, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    out = torch.zeros(3, 64, 128, dtype=torch.uint8, device=device)
    launch(load_groups, 3, 32, maps, out, pick, first, shared_bytes=SHARED_MEMORY)
    one = torch.zeros_like(out)  # one map for all groups, and a first row
    launch(load_groups, 3, 32, template, one, 0 * pick, starts[:3].clone(), shared_bytes=SHARED_MEMORY)
    own = [x[a:b] for a, b in zip(starts.tolist(), starts.tolist()[1:])]
    separate = all(torch.equal(o[: len(r)], r) and not o[len(r) :].any() for o, r in zip(out, own))
    own_rows = all(torch.equal(o[: len(r)], r) for o, r in zip(one, own))
    next_rows = bool(one[0, 20:].any())
    return {
        "a map per group: its rows, then zeros": separate,
        "one map: the group's rows": own_rows,
        "one map: rows of the next group": next_rows,
    }


GROUPS = groups_by_maps()
print("; ".join(f"{name}: {'yes' if holds else 'NO'}" for name, holds in GROUPS.items()))
assert GROUPS["a map per group: its rows, then zeros"]

# %% [markdown]
# The last two results concern a single map for all groups. For *loads* it is sufficient, because a box may start at any
# row. The box then also contains rows of the next group; [notebook 07](07_grouped_gemm.ipynb) does not store the
# results computed from them. For TMA *stores* each group needs its own map, whose extent prevents a box from
# overwriting the next group's rows.
#
# A 3D tensor, such as the weights of all experts, needs only one map. Its box can lie in one expert: 1 x 64 rows of 128
# bytes.


# %%
@cuda.jit
def load_3d(map_w, out, x, y, z):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    lane = int32(cuda.threadIdx.x)
    if elect_sync(FULL_MASK):
        mbarrier_init(barriers, BARRIER, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(barriers, BARRIER, TILE)
        tma_load_3d(smem, 0, map_w, 0, x, y, z, barriers, BARRIER)
    cuda.syncwarp()
    mbarrier_wait_parity(barriers, BARRIER, uint32(0))
    for i in range(lane, TILE, 32):
        out[i] = smem[i]


W = torch.randint(0, 256, (3, 128, 256), dtype=torch.uint8, device=DEVICE)  # experts, rows, bytes
BOXES = {}
for name, shape in (("one expert", (1, 64, 128)), ("two experts", (2, 32, 128))):
    out = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    launch(load_3d, 1, 32, TensorMap(W, shape), out, 128, 64, 1, shared_bytes=SHARED_MEMORY)
    BOXES[name] = torch.equal(out, W[1 : 1 + shape[0], 64 : 64 + shape[1], 128:])
print(BOXES)
assert all(BOXES.values())

# %% [markdown]
# ## 8. Wrong kernels
#
# Each of the `CASES` in the folded cell changes one place of a kernel above. Seven of the eight are wrong: races or
# hangs on a GPU, errors in the simulator.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def try_cases(cases):
    """Run cases (name, sources, call) in the simulator; return what it reports for each."""

    def boxes():
        x = (torch.arange(128 * 128) % 251).to(torch.uint8).view(128, 128)
        out = torch.zeros(2 * TILE, dtype=torch.uint8)
        launch(space["load_boxes"], 1, 64, TensorMap(x, (64, 128)), out, 2, TILE, shared_bytes=SHARED_MEMORY)
        return torch.equal(out, x.view(-1))

    def product(name, grid, threads, shared_bytes, by_words=False, *tiles):
        k = 8 * 128
        a, b = torch.ones(128, k).to(E4M3), torch.ones(128, k).to(E4M3)
        rows = 64 if grid == (2, 2) else 128
        maps = [TensorMap(t.view(torch.uint8), (rows, 128), swizzle=128) for t in (a, b)]
        words = [t.view(torch.int32) for t in (a, b)]
        out = torch.zeros(128, 64, dtype=torch.int32)
        sizes = (k // 4,) if by_words else (*tiles, k // 128)
        kernel = space["make_gemm"](128, 3) if name == "make_gemm" else space[name]
        launch(
            kernel,
            grid,
            threads,
            *(words if by_words else maps),
            out,
            *sizes,
            64,
            shared_bytes=shared_bytes,
            cpp_entry=True,
        )
        return bool((out.view(torch.bfloat16) == k).all())

    found = {}
    for name, sources, call in cases:
        space = define("\n".join(sources), globals() | {"boxes": boxes, "product": product})
        try:
            found[name] = "right" if eval(call, space) else "WRONG"
        except simulator.SimulatorError as error:
            found[name] = f"{type(error).__name__}: {str(error)[:430]}"
    return found


EXPECT = "            mbarrier_arrive_expect_tx(barriers, BARRIER, announced)\n"
ORDER = "            tma_load_2d(smem, 0, map_x, 0, 0, int32(box * 64), barriers, BARRIER)\n"
STORE = make_store
SMALL = [source_of(STORE), "store_64 = make_store(64)"]
BY_TMA, BY_THREADS = (
    "product('gemm_by_tma', (2, 2), 128, SHARED_MEMORY)",
    ("product('gemm_by_threads', (2, 2), 128, SHARED_MEMORY, True)"),
)
BY_GEMM = "product('make_gemm', 1, 384, 3 * (256 * 128 + 16), False, 1, 1)"


def parts_with(function, old, new):
    return [changed_source(f, old, new) if f is function else source_of(f) for f in GEMM_PARTS]


CASES = [
    (
        "tile read without waiting for its mbarrier",
        [changed_source(load_boxes, "mbarrier_wait_parity(barriers, BARRIER, uint32(box & 1))", "pass")],
        "boxes()",
    ),
    ("constant parity", [*SMALL, changed_source(gemm_by_tma, "uint32(k & 1)", "uint32(0)")], BY_TMA),
    (
        "no proxy fence",
        [*SMALL, source_of(copy_tile), changed_source(gemm_by_threads, "fence_proxy_async_shared()", "pass")],
        BY_THREADS,
    ),
    (
        "no wgmma.wait_group",
        [
            *SMALL,
            changed_source(
                gemm_by_tma,
                "wait_tile(add_tile(acc, wgmma_descriptor(smem, 0), wgmma_descriptor(smem, TILE)))",
                "add_tile(acc, wgmma_descriptor(smem, 0), wgmma_descriptor(smem, TILE))",
            ),
        ],
        BY_TMA,
    ),
    (
        "producer does not wait for `empty`",
        parts_with(make_load, "mbarrier_wait_parity(barriers, empty + stage, phase)", "pass"),
        BY_GEMM,
    ),
    (
        "producer and consumers begin with the same parity",
        parts_with(make_load, "stage, phase = int32(0), uint32(1)", "stage, phase = int32(0), uint32(0)"),
        BY_GEMM,
    ),
    (
        "bytes expected after the copy is issued",
        [changed_source(load_boxes, EXPECT + ORDER, ORDER + EXPECT)],
        "boxes()",
    ),
    (
        "tensor map not acquired",
        [
            "set_address, set_extent = linked.tensormap_replace_global_address, linked.make_tensormap_replace_global_dim(1)",
            source_of(make_maps),
            changed_source(load_groups, "fence_proxy_tensormap_acquire_sys(maps, pick[group] * 128)", "pass"),
            source_of(groups_by_maps),
        ],
        "all(groups_by_maps().values())",
    ),
]
REFUSED = in_simulator(try_cases, CASES, setup=SETUP)
for name, found in REFUSED.items():
    print(f"{name}:\n    {found}\n")

# %% [markdown]
# One variant is correct: the expected bytes may be announced after the copy is issued, because the phase cannot
# complete before its one pending arrival.
#
# ## 9. Sources
#
# - NVIDIA: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/); *H200 Tensor Core GPU* data sheet.
# - Numba CUDA: [calling foreign functions](https://nvidia.github.io/numba-cuda/user/cuda_ffi.html).
# - pranjalssh: [fast.cu](https://github.com/pranjalssh/fast.cu), a ladder in C++.
# - DeepSeek-AI: [DeepGEMM](https://github.com/deepseek-ai/DeepGEMM) (the model of section 3, promotion); [DeepSeek-V3
#   Technical Report](https://arxiv.org/abs/2412.19437) (accumulation precision).
# - The article: *CUTLASS CUTE 7: hpc-ops 之 group gemm & tma*, in Chinese.
