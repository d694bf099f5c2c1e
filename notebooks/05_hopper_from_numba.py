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
# # Hopper from Numba: two doors, one instruction at a time
#
# The H100 and the H200 are GPUs of the **Hopper** kind. They have instructions that no older GPU has, and a fast matrix
# product needs them: copies that go on by themselves, barriers that count bytes, and tensor cores that read shared
# memory without the threads' help. Numba knows none of them. This notebook shows how to say them all the same, from
# Python, and builds a matrix product (**GEMM**) out of them, step by step. The next notebook,
# [06_grouped_gemm](06_grouped_gemm.ipynb), makes an MoE layer's product of it.
#
# There are two doors from Numba to such an instruction.
#
# 1. **The linked door.** A function in CUDA C++ holds the instruction. Numba is told its name and types
#    (`cuda.declare_device(..., link=...)`), and hands it arrays as pointers (`ffi.from_buffer`). This is the way that
#    Numba documents.
# 2. **The intrinsic.** One Python function puts one instruction into the code that Numba makes. This is the way that
#    this course takes, and its names are in `moe_numba/ptx/`.
#
# Both are open here, and at the end of the first part we measure what each costs. **PTX** is NVIDIA's assembly
# language, in which all these instructions are written down; **SASS** is what the GPU really runs.
#
# As in the other notebooks, everything runs on a GPU, and small in a simulator on any computer. Times that you see
# without a GPU are recorded ones and say so.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether there is a GPU, or the simulator must do

print("the simulator" if moe_numba.simulator.ENABLED else "a GPU", "runs the kernels:", moe_numba.simulator.REASON)

# %%
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import torch
from IPython.display import Markdown
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba import simulator
from moe_numba.course.bench import kernel_times
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.draw import hopper as draw
from moe_numba.course.ladder import Ladder
from moe_numba.course.simulate import changed_source, define, in_simulator, source_of
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
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart
from moe_numba.runtime.tensor_map import TensorMap, tensor_map

DEVICE = "cpu" if simulator.ENABLED else "cuda"
TIMED = dict(m=4096, n=4096, k=7168, copy=(8192, 8192))  # the sizes that a GPU measures here, or has recorded
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
# ## 1. The problem in one picture
#
# A GPU has many **streaming multiprocessors** (SMs; an H200 has 132). Each has its own **shared memory**, up to 227 KB,
# and four **tensor cores**, which multiply small matrices. The matrices lie in global memory. Who carries them to the
# tensor cores?

# %%
draw.problem()

# %% [markdown]
# On the left, threads carry every byte twice: into registers, out to shared memory, and into registers again. That
# takes instructions, and registers. On the right they give orders. Three things are new.
#
# - **TMA**, the tensor memory accelerator: one thread orders the copy of a whole box of a matrix, and goes on.
# - **mbarriers**: barriers in shared memory. They count threads that arrive *and bytes that land*, so that one can wait
#   for a copy.
# - **wgmma**: a **warpgroup** (four warps, 128 threads) orders a product of matrices that lie in shared memory, and
#   goes on.
#
# All three are *asynchronous*: the order is given now, the work is done later. So every mistake here has one form:
# somebody touches memory too early. The simulator keeps watch over that, and section 8 shows how it says so.
#
# ## 2. The reference
#
# The product is `D = A Bᵀ`. A has `m` rows and B has `n` rows, of `k` numbers each, in **FP8** (`e4m3`: a sign, 4 bits
# of exponent, 3 of fraction, so one byte each). D is `bfloat16`. The truth is added up in float64, from float32
# products of 128 columns: of FP8 numbers such a product is all but exact, whatever the library does inside.


# %%
def reference(a, b):
    out = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device)
    for k in range(0, a.shape[1], 128):
        out += a[:, k : k + 128].float() @ b[:, k : k + 128].float().T
    return out


def relative_error(out, right):
    """Of the whole result; NaN if an element was not written."""
    return float((out.double() - right).norm() / right.norm())


def mismatch(outputs, bound=3e-2):
    """None, or a sentence saying what is wrong; the bound leaves room for the tensor cores' own sums (see below)."""
    out, right = outputs
    error = relative_error(out, right)
    if error <= bound:
        return None
    return f"{int(out.isnan().sum())} elements are not written, the relative error is {error:.1e}; {bound:g} is allowed"


A = torch.randn(SIZES.m, SIZES.k, device=DEVICE).to(E4M3)
B = torch.randn(SIZES.n, SIZES.k, device=DEVICE).to(E4M3)
EXPECTED = reference(A, B)
ROUNDING = relative_error(EXPECTED.bfloat16(), EXPECTED)
print(f"A {tuple(A.shape)}, B {tuple(B.shape)}; bfloat16 alone makes an error of {ROUNDING:.2e}")

# %% [markdown]
# ## 3. The floor: what can one SM do?
#
# A clock is a fraction of a nanosecond. The data sheet gives 1979 TFLOP/s for FP8. Over 132 SMs at 1.83 GHz that is
# 8192 floating point operations per clock and SM. Its shared memory gives or takes 128 bytes per clock, that is 32
# **banks** of 4 bytes. For the L2 cache there is no official number; others have measured about 5.5 TB/s for the whole
# chip, 23 bytes per clock and SM. Global memory gives 20.
#
# Now take a tile of D, `64 g x n`, that `g` warpgroups compute, and one **stage** of it: 128 numbers of `k`. How many
# clocks does each part of the SM need? A and B must come through the L2 cache. TMA must write them to shared memory.
# And each warpgroup reads its 64 rows of A and all `n` rows of B from there.


# %%
LIMITS = chip_limits()
print(LIMITS)
CLOCK, SMS, PEAK = LIMITS.tensor_clock, LIMITS.sm_count, LIMITS.tensor_flops["float8_e4m3fn"]
FLOPS, SHARED_BYTES, L2_BYTES = PEAK / CLOCK / SMS, 128, LIMITS.l2_bandwidth / CLOCK / SMS


def clocks(n, groups):
    """Of a stage of 128 bytes of k: what the tensor cores, shared memory and the L2 cache need."""
    rows = 64 * groups
    return {
        "tensor cores": 2 * rows * n * 128 / FLOPS,
        "shared memory": ((rows + n) * 128 + groups * (64 + n) * 128) / SHARED_BYTES,
        "L2 cache": (rows + n) * 128 / L2_BYTES,
    }


def limit(n, groups):
    """The share of the peak that the slowest part allows."""
    parts = clocks(n, groups)
    return parts["tensor cores"] / max(parts.values())


def predicted_us(n, groups, m=TIMED.m, columns=TIMED.n, k=TIMED.k):
    """Microseconds for the whole product, if the slowest part decides."""
    return 2 * m * columns * k / (PEAK * limit(n, groups)) * 1e6


print(" tile       tensor cores   shared memory   L2 cache   share of the peak")
for groups, n in ((1, 64), (2, 128), (2, 256)):
    parts = clocks(n, groups)
    print(
        f"{64 * groups:4} x {n:<4} {parts['tensor cores']:10.0f} {parts['shared memory']:15.0f} "
        f"{parts['L2 cache']:11.0f}   {100 * limit(n, groups):10.0f} %"
    )
LOWER_BOUND_US = 2 * TIMED.m * TIMED.n * TIMED.k / PEAK * 1e6

# %% [markdown]
# By this table the tile decides. A small tile is loaded often, and then the L2 cache is too slow; a larger one is used
# more often for the same bytes. The table is our prediction for the steps of the ladder. Whether its figure for the L2
# cache holds, step 2 will show.
#
# ## 4. One instruction at a time
#
# ### A tile, carried by threads
#
# **Idea.** Before the new way, the old one. A block takes a tile of 64 rows and 128 bytes into shared memory and puts
# it back elsewhere. 128 threads carry 16 bytes each, four times.
#
# **Prediction.** The bytes are read and written once, at 4.3 TB/s (what an H200 has been measured to copy at).

# %%
FULL_MASK = 0xFFFFFFFF
TILE = 64 * 128  # bytes: 64 rows of 128
COPY_US = 2 * TIMED.copy[0] * TIMED.copy[1] / LIMITS.copy_bandwidth * 1e6
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
    title="A copy, tile by tile",
    reference_name="threads",
    config={"tile": [64, 128]},
    size={"rows": SIZES.copy[0], "row_bytes": SIZES.copy[1]},
)
copies.step("threads", by_threads, dtype="uint8", prediction_us=round(COPY_US, 1), bytes=2 * SOURCE.numel())

# %%
copies.report("threads", predicted=COPY_US)
print(f"with three passes over the bytes in place of two we should have predicted {1.5 * COPY_US:.1f} us")

# %% [markdown]
# **Look back.** The prediction forgot that each call also clears the result with `torch.zeros_like`, so that a tile
# which is left out is seen. That is one more write of the matrix, and the larger part of what was missed; the next step
# has it too. Count the instructions of a thread: per 16 bytes an address, a load, a store, and then the same way out.
#
# ### A first TMA load, and its mbarrier
#
# **Idea.** One thread orders the whole box. For that it needs three things. A **tensor map**: 128 bytes that describe
# the matrix (address, extents, distances) and the box (how much one copy takes). `TensorMap` makes one, on the host. A
# place in shared memory, at a multiple of 128 bytes. And a barrier that hears when the bytes have landed.
#
# The way back is a copy too, but it has no barrier. The thread that ordered it puts it in a **bulk group**, and waits
# for the group before the block ends.


# %%
BARRIER = 2 * TILE // 8  # a barrier's place, counted in its own size: behind two tiles
SHARED_MEMORY = 2 * TILE + 8


@cuda.jit
def copy_by_tma(map_x, map_y, y):
    smem = cuda.shared.array(0, uint8, 1024)
    barriers = cuda.shared.array(0, uint64, 1024)  # the same memory, seen as barriers
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


copies.step("TMA", by_tma, dtype="uint8", prediction_us=round(COPY_US, 1), bytes=2 * SOURCE.numel())

# %%
copies.report("TMA", "threads", COPY_US)

# %% [markdown]
# **Look back.** A block is a single warp now, and one lane of it does all there is to do. It never sees the bytes.
# Where memory is the limit, both ways take about the same time. What TMA saves is threads: those will multiply.
#
# Four things about this kernel that are easy to get wrong, all found the hard way:
#
# - **Everything lies in dynamic shared memory**, the barrier too, as another view of the same bytes. With static arrays
#   in front, one linker did not align the dynamic array to 1024 bytes, and TMA stopped with a misaligned address.
# - **`elect_sync`, not `thread == 0`.** Both pick one lane. But only of an elected lane does the compiler *know* that
#   it is alone. Else it adds a loop around each TMA instruction. Section 5 counts these.
# - **A tensor map must be a value.** TMA takes maps from a kernel's parameters (a `__grid_constant__` in C++), which
#   Numba cannot say. `launch` builds a little C++ entry around the kernel for that (`moe_numba/runtime/compile.py`). A map in
#   global memory works too, and then wants a fence; we shall use that below.
# - **`fence_mbarrier_init`.** Threads make the barrier one way (the *generic proxy*), TMA reaches it another way (the
#   *async proxy*). A fence lies between the two.
#
# ### What an mbarrier counts
#
# **Idea.** An mbarrier goes from **phase** to phase. A phase ends when all arrivals have come *and* no bytes are due. A
# waiting thread names the phase by its **parity**: 0 for the first phase, 1 for the second, 0 again. Let us watch one.
# The simulator can record what happens (`simulator.trace`), in a process of its own, which `in_simulator` starts.

# %%
SETUP = """
import moe_numba, torch, numpy as np
from functools import cache
from numba import cuda, float32, int32, int64, uint8, uint32, uint64
from moe_numba import simulator
from moe_numba.course.simulate import define
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
# The first kernel loads boxes of `TILE` bytes, one after another into the same place, and puts each into `out`. How
# many bytes it announces is an argument.


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

# %%
draw.barrier_life([e for e in EVENTS if "mbarrier" in e.what or "copy" in e.what], 2048, 1)

# %% [markdown]
# With the right count, phase 0 ends when the first box has landed, and phase 1 when the second has. The matrix had only
# 100 rows. The second box reaches beyond them; the rest of it came as zeros, *and these zeros count as bytes*. With 16
# bytes less the phase ends while the copy is still under way; with 16 more it never ends. On a GPU the first is a race
# that one may not see for weeks, the second hangs.
#
# One thing looks odd: a barrier that nobody has used yet says that phase "parity 1" has ended. So waiting for parity 1
# on a new barrier returns at once. Whoever fills a ring of stages begins that way: all stages are free.
#
# ### The swizzle
#
# **Idea.** A tile has 64 rows of 128 bytes, and shared memory has 32 banks of 4 bytes: also 128. So the same column of
# all rows lies in the same banks. Whoever reads 16 bytes of each of 8 rows, as tensor cores do, meets only four banks,
# and must come eight times (a **bank conflict**). The remedy is to let the chunks of each row change places, each row
# in another way. TMA does that while it writes: `swizzle=128`.

# %%
draw.swizzle()

# %% [markdown]
# **Check.** Let TMA write a box with the swizzle, look at the raw bytes, and undo it by the formula.


# %%
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
# ### A first wgmma
#
# **Idea.** `wgmma.mma_async.m64n64k32`: a warpgroup multiplies 64 rows of A with 64 rows of B, 32 bytes of each. The
# operands stay in shared memory. The results, 64 x 64 floats, are spread over the registers of 128 threads, 32 each:
# the **fragment**, or the **accumulators**. Around it stand three more instructions: a fence before the registers are
# used, a commit that makes a group, and a wait for the group. `make_wgmma_tile` gives one function with a fence, four
# wgmmas (128 bytes of k) and a commit; `make_wgmma_wait` gives the wait. Results go *through* the wait, so that nobody
# can look at them before.

# %%
draw.fragment()

# %%
add_tile, wait_tile = make_wgmma_tile(64, "e4m3", accumulate=True), make_wgmma_wait(64, 0)
ZEROS = (np.float32(0),) * 32


@cuda.jit(device=True)
def store_fragment(out, acc):
    """Each thread's 32 results to where they belong in a matrix of 64 x 64 floats."""
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
# The tensor cores multiply FP8 exactly, but they add up in fewer bits than float32 has (about 14 of its 24). In the
# simulator they add up in float32. Remember that for the ladder, where 7168 products are added.
#
# ### The descriptor's bits
#
# How does the instruction know where the tiles lie? By a number of 64 bits for each of them, the **descriptor**: where
# the tile starts, how far it is to the next 8 rows, and which swizzle it has. This is the one of a tile that starts at
# byte 9216 of the SM's shared memory. (The system keeps the first 1024 for itself.)

# %%
DESCRIPTOR = 1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 9216 >> 4
draw.descriptor(DESCRIPTOR)

# %% [markdown]
# "leading bytes" is not used with this swizzle. A step along k is 32 bytes, so the next instruction's descriptor is
# this one + 2. A descriptor says nothing of the matrices' size: that is in the instruction's name.
#
# ### The same step through the linked door
#
# **Idea.** Now the other door. This is the C++ that holds the instructions, from `moe_numba/ptx/cuda_cpp/wgmma.cu`:

# %%
with open(source("wgmma")) as file:
    WGMMA_CU = file.read()
Markdown("```cpp\n" + WGMMA_CU[WGMMA_CU.index('extern "C"') :] + "```")

# %% [markdown]
# Numba is told of it like this (in `moe_numba/ptx/cuda_cpp/`; `"c"` means: as C passes arguments):
#
# ```python
# step = cuda.declare_device(
#     "cu_wgmma_step_m64n64k128_e4m3",
#     "int32(CPointer(float32), CPointer(uint8), int32, int32, int32)",
#     link="wgmma.cu", abi="c",
# )
# ```
#
# C++ cannot take a tuple. So the accumulators are a local array, and the function gets a pointer to it. This kernel is
# started by Numba itself, which compiles and links the C++. Numba's launch cannot pass a map by value. So the maps lie
# in global memory here, and the thread that uses them first calls `fence_proxy_tensormap_acquire_sys`.


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
    """Torch's current stream, as Numba wants it."""
    return 0 if simulator.ENABLED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)


again = torch.full((64 * 64,), float("nan"), device=DEVICE)
maps = [tensor_map(t.view(torch.uint8), (64, 128), swizzle=128) for t in (A, B)]
first_linked_wgmma[1, 128, stream(), SHARED_MEMORY](*maps, again)
print("both doors give", "the same bits" if torch.equal(again.view(64, 64), out) else "DIFFERENT results")
assert torch.equal(again.view(64, 64), out)

# %% [markdown]
# ## 5. What the doors cost
#
# **Idea.** The results agree. Does the machine code? We compile both kernels, each in two ways, with no GPU, in a
# process of their own.
#
# - **With LTO** (link-time optimisation): Numba's code and the C++ are linked while both are still intermediate code.
#   The compiler sees through the call.
# - **Without**: each becomes machine code by itself, and the linker joins the pieces.
#
# **Prediction.** With LTO: the same. Without: a call stays, and a pointer must point to memory, so 32 floats go through
# memory, out and in, at every step.

# %%
POINTERS, ARRAYS = ["uint8*", "uint8*", "float32*"], ["uint8[]", "uint8[]", "float32[]"]


def compiled(requests, *functions):
    """What the compiler makes of kernels: name -> (expression, signature, threads, lto)."""
    return compile_apart(SETUP + "\n".join(map(source_of, functions)), requests)


def table(codes, columns):
    """A table of machine codes; a column is a name and what it shows."""
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
        f"{door}, {'with' if lto else 'without'} LTO": (kernel, signature, 128, lto)
        for door, kernel, signature in (("intrinsics", "first_wgmma", POINTERS), ("linked", "cpp_variant", POINTERS))
        for lto in (True, False)
    }
    | {
        "linked, as Numba starts it, with LTO": ("first_linked_wgmma", ARRAYS, 128, True),
        "the same, and `out` stays an array": ("into_an_array", ARRAYS, 128, True),
    },
    store_fragment,
    first_wgmma,
    CPP_VARIANT,
    first_linked_wgmma,
    changed_source(first_linked_wgmma, "ffi.from_buffer(out)", "out", "into_an_array"),
)
table(INTERFACE_CODES, COLUMNS)

# %% [markdown]
# **Look back.** The kernels of the first four lines differ in the step alone. With LTO the linked door costs nothing:
# the local array has become registers, and the call is gone. Without LTO it costs what we predicted, and more: a stack,
# and loads and stores that must find out which memory they are for. The intrinsics do not care how they are linked.
#
# The last two lines hold a surprise that has nothing to do with doors. An index into a Numba *array* may be negative,
# and counts from the end then. Each of the 32 stores looks after that, which costs registers and instructions. A
# *pointer* has no end. That is why the kernels of this course take pointers, and why `first_linked_wgmma` turns `out`
# into one.
#
# So both doors are open, and which one to take is a matter of taste, *if* the linking is done with LTO. Numba does that
# by itself where it can. The course takes intrinsics, for two reasons. A function in Python can have a meaning for the
# simulator beside it. And accumulators that are values, not memory, let the compiler see who needs what.
#
# ### Three traps, seen in the same way
#
# They concern the kernel that we build in section 6, which is shown there: one warpgroup loads and two multiply. First
# the four ways to compile it.


# %%
@cache
def make_gemm(n, stages, exact=False):
    """``gemm(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch)``: tiles of 128 x n; pitch counts 4 bytes of out."""
    stage_bytes = (128 + n) * 128
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    load, multiply = make_load(n, stages), make_multiply(n, stages, exact)
    release, request = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)

    @cuda.jit
    def gemm(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch):
        smem = cuda.shared.array(0, uint8, 1024)
        barriers = cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(barriers, full + stage, 1)
                mbarrier_init(barriers, empty + stage, 8)  # one arrival for each warp that multiplies
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
        stage, phase = int32(0), uint32(1)  # of a new barrier, phase "1" has ended: all stages are free
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
def make_multiply(n, stages, exact):
    stage_bytes = (128 + n) * 128
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    step, store, zeros = make_step(n, exact), make_store(n), (np.float32(0),) * (n // 2)

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
def make_step(n, exact):
    """A stage's product, added to the accumulators: by the tensor cores, or exactly, in float32."""
    add, tile = make_wgmma_tile(n, "e4m3", accumulate=True), make_wgmma_tile(n, "e4m3")
    wait, fma = make_wgmma_wait(n, 0), make_fma(n)

    @cuda.jit(device=True)
    def step(acc, a, b):
        if exact:
            return fma(acc, wait(tile(a, b)), float32(1))
        return wait(add(acc, a, b))

    return step


@cache
def make_store(n):
    @cuda.jit(device=True)
    def store(out, acc, row, column, pitch):
        """A warpgroup's results as bfloat16, two to a word of 4 bytes."""
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
        offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))
        for j in range(n // 8):
            out[offset + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 1], acc[4 * j]))
            out[offset + 8 * pitch + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 3], acc[4 * j + 2]))

    return store


# %%
GEMM_PARTS = make_gemm, make_load, make_multiply, make_step, make_store
GEMM_SIGNATURE = ["uint8*", "uint8*", "int32*", *["int32"] * 4]


VARIANTS = {
    "as it is": (),
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
TRAPS = compiled(requests, *sources)
table(
    TRAPS,
    {
        "registers": COLUMNS["registers"],
        "setmaxnreg": lambda code: code.count("USETMAXREG"),
        "loops around TMA": lambda code: code.count("BRA.U.ANY"),
        "CALL": COLUMNS["CALL"],
        "ptxas complains": lambda code: ", ".join(sorted(set(code.complaints))) or "no",
    },
)

# %% [markdown]
# - `setmaxnreg` moves registers from the warps that load to those that multiply. **Without LTO the compiler ignores
#   it** and says so: C7504. For the linker makes code that others may call, and their registers are not known.
# - **Integers of 64 bits.** Numba's integers have 64 bits unless you say otherwise, and a division of these is a call
#   of a function. Ours stands outside of the loop. Even so, without LTO the compiler lets all wgmmas of the kernel wait
#   for one another, and says so: C7509. That is why the kernel says `uint32` so often.
# - **`elect_sync`**: without it each TMA instruction gets a loop around it.
#
# ## 6. The ladder: a matrix product
#
# Now we put the instructions together. On a GPU the product has 4096 x 4096 results of 7168 products each. The peer
# is cuBLAS, NVIDIA's library, through `torch._scaled_mm` with fast accumulation, as ours has it. A first line for it:


# %%
def output():
    """A result that is not written is NaN."""
    return torch.full((SIZES.m, SIZES.n), float("nan"), dtype=torch.bfloat16, device=DEVICE)


ONE = torch.ones((), device=DEVICE)
OUT = output()
MAPS = [TensorMap(t.view(torch.uint8), (64, 128), swizzle=128) for t in (A, B)]
LINES, PITCH, K_BLOCKS = OUT.view(torch.int32), SIZES.n // 2, SIZES.k // 128  # the result, two numbers to a word


def by_cublas(fast=True):
    if simulator.ENABLED:
        return (A.float() @ B.float().T).bfloat16(), EXPECTED
    out = torch._scaled_mm(A, B.t(), scale_a=ONE, scale_b=ONE, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return out, EXPECTED


ladder = Ladder(
    "hopper_ladder",
    mismatch,
    title=f"An FP8 matrix product, {TIMED.m} x {TIMED.n} x {TIMED.k}, from Numba",
    reference_name="torch",
    size={"m": SIZES.m, "n": SIZES.n, "k": SIZES.k},
)


def measure(name, launch_it, prediction_us=None, **more):
    """Check one step of the ladder, time it, and say what rate that is and how exact the result is."""

    def run():
        return launch_it() or (OUT, EXPECTED)

    OUT.fill_(float("nan"))
    error = relative_error(run()[0], EXPECTED)
    more |= {
        "flops": 2 * SIZES.m * SIZES.n * SIZES.k,
        "error": float(f"{error:.2e}"),
        "floor_us": round(LOWER_BOUND_US, 1),
    }
    ladder.step(name, run, dtype="float8_e4m3fn", prediction_us=prediction_us and round(prediction_us, 1), **more)


def look_back(name, before=None, predicted=None, tile=None):
    """What a step gained, its rate and its error; with a tile's rows and columns, what it loads in a second."""
    ladder.report(name, before, predicted)
    if row := ladder.row(name):
        us = row["kernel_us"]["median"]
        print(f"    {row['flops'] / us / 1e6:.0f} TFLOP/s, relative error {row['error']:.2e}")
        if tile:
            loaded = row["flops"] / 2 * (1 / tile[0] + 1 / tile[1])
            print(
                f"    {loaded / us / 1e6:.1f} TB/s come into shared memory; the table lets the L2 cache give "
                f"{L2_BYTES * CLOCK * SMS / 1e12:.1f}"
            )


def lost_unless_faster(name, than):
    """Draw the step that was just measured in grey if it is no faster than an earlier one."""
    if not simulator.ENABLED and ladder.median_us(name) >= ladder.median_us(than):
        ladder.rows[-1]["slower"] = True


measure("torch", by_cublas)

# %%
look_back("torch")

# %% [markdown]
# ### Step 1: threads carry, tensor cores multiply
#
# **Idea.** A block of one warpgroup computes 64 x 64 results. Its threads copy both tiles, with the swizzle, since that
# is how the tensor cores want them. What threads wrote through their own way (generic proxy) the tensor cores read
# through theirs (async proxy). So each thread calls `fence_proxy_async_shared` before the barrier.
#
# **Prediction.** The floor's table says that the L2 cache allows a fifth of the peak for this tile. Copy and product
# take turns here, so we expect half of that.


# %%
@cuda.jit(device=True)
def copy_tile(smem_i32, offset, x, row, k, pitch):
    """64 rows of 128 bytes, 16 bytes a thread at a time, swizzled; all in words of 4 bytes."""
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


prediction = 2 * predicted_us(64, 1)
measure("threads carry", gemm_with_thread_copies, prediction)

# %%
look_back("threads carry", "torch", prediction, (64, 64))

# %% [markdown]
# **Look back.** Half of the predicted time. A thread issues a load, waits for it, and stores, and its block multiplies
# nothing meanwhile. But other blocks on the same SM do: they fill the gaps, which the prediction left empty. cuBLAS is
# the mark for the rest of the ladder.
#
# ### Step 2: TMA carries
#
# **Idea.** One lane orders both tiles. Everything else stays: one stage, and copy and product take turns.
#
# **Prediction.** As before: the bytes are the same, and so is the L2 cache.


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


measure("TMA carries", gemm_with_tma, prediction)

# %%
look_back("TMA carries", "threads carry", prediction, (64, 64))

# %% [markdown]
# **Look back.** The registers and the instructions of copying are gone, and so is the fence: TMA writes the way the
# tensor cores read. What is left is waiting: in a block, copy and product still take turns.
#
# And the prediction is refuted. The last line says why: about twice the bytes come into shared memory that the table
# lets the L2 cache give. Neighbouring blocks want the same tiles at the same time; perhaps one answer of the cache
# serves several of them. We have not measured that. So for small tiles the table promises too little.
#
# ### Step 3: the same through the linked door
#
# **Idea.** The step inside is the C++ function now. The difference of the two kernels is what section 4 told: pointers,
# and maps in global memory.
#
# **Prediction.** The same time, for section 5 says that the code is the same.


# %%
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


prediction = ladder.median_us("TMA carries") or predicted_us(64, 1)
measure("linked door", gemm_through_cpp, prediction)
lost_unless_faster("linked door", "TMA carries")

# %%
look_back("linked door", "TMA carries", prediction)

# %% [markdown]
# **Look back.** It is slower, which we had not predicted. Section 5 compared the machine code of one step, and that is
# the same. But here the maps lie in global memory, and the whole kernel is compiled and started by Numba. Which of
# these costs the time, we have not measured. Compare the two *call* times as well: Numba's own launch looks at each
# argument anew.
#
# ### Step 4: a ring of stages
#
# **Idea.** While the tensor cores multiply one stage, the next ones should be on their way. So there are four stages,
# used in turn: a **ring**. Each has a barrier that says "full". Stage `k % 4` is full for the `k // 4`-th time; that
# number's lowest bit is the parity to wait for. When all four warps are done with a stage (`syncthreads`), one lane
# orders the tiles that come four steps later.
#
# **Prediction.** If the L2 cache is the limit, and is kept busy without a pause: the table's fifth of the peak.


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
    for k in range(-4, k_blocks):  # the first four turns only load
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


prediction = predicted_us(64, 1)
measure("ring of 4 stages", gemm_with_pipeline, prediction)
lost_unless_faster("ring of 4 stages", "TMA carries")

# %%
look_back("ring of 4 stages", "TMA carries", prediction)

# %% [markdown]
# **Look back.** Better than the table's fifth, for the reason of step 2, but slower than step 2 itself: the ring loses.
# It takes four times the shared memory, so fewer blocks share an SM. And blocks that share an SM overlap too: while one
# waits, another multiplies. As long as the tile is small, the ring does not make up for them. The table of section 3
# says what to do: a larger tile. It needs more warps, and those must not all wait for each other at every stage.
#
# ### Step 5: warps that load, warps that multiply
#
# **Idea.** This is the kernel of section 5. A tile has 128 x 128 results. Two warpgroups multiply, one loads (**warp
# specialisation**). Each stage has a second barrier, "empty": each multiplying warp arrives there when it is done with
# the stage, and the loader waits for it before it fills the stage again. No `syncthreads` is left in the loop.
# `setmaxnreg` gives the registers of the loading warps to the others. Let us play it in the simulator, small.


# %%
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
# The simulator draws its order by chance, so lengths mean nothing here, but who may follow whom is what a GPU does too.
# In one stage, loading and using alternate: that is what the two barriers are for. Across stages they overlap.
#
# **Prediction.** From the table, for 128 x 128.


# %%
def run_gemm(n, stages, blocks=None, exact=False, a=A, lines=LINES):
    """The kernel of section 5; without a number of blocks, one for each tile."""
    tiles_m, tiles = len(a) // 128, len(a) // 128 * (SIZES.n // n)
    maps = [TensorMap(t.view(torch.uint8), (rows, 128), swizzle=128) for t, rows in ((a, 128), (B, n))]
    shared_bytes = stages * ((128 + n) * 128 + 16)
    launch(
        make_gemm(n, stages, exact),
        min(blocks or tiles, tiles),
        384,
        *maps,
        lines,
        tiles_m,
        tiles,
        K_BLOCKS,
        PITCH,
        shared_bytes=shared_bytes,
    )


prediction = predicted_us(128, 2)
measure("loaders and multipliers", partial(run_gemm, 128, 6), prediction)

# %%
look_back("loaders and multipliers", "ring of 4 stages", prediction, (128, 128))

# %% [markdown]
# **Look back.** Two things changed at once here. The tile has four times the results, so half the bytes come through
# the L2 cache for each product. The specialised warps are what makes such a tile possible: one SM holds only one such
# block, and nobody else would fill its gaps. The prediction was too slow again, since more comes through the L2 cache
# than the table says.
#
# ### Step 6: blocks that stay
#
# **Idea.** A block of step 5 computes one tile and goes. Its successor must make its barriers anew and fill its ring,
# and while a block stores its results nothing is loaded. Now there are as many blocks as SMs, and each walks over the
# tiles (a **persistent** kernel). The kernel does that already: `tile += gridDim.x`. Only the grid changes. The ring
# knows nothing of tiles. So the loader is with the next tile while the others still store this one.
#
# **Prediction.** Of a tile's time the start and the stores go: perhaps a tenth.

# %%
prediction = 0.9 * (ladder.median_us("loaders and multipliers") or prediction)
measure("persistent", partial(run_gemm, 128, 6, SIZES.sms), prediction)

# %%
look_back("persistent", "loaders and multipliers", prediction)

# %% [markdown]
# **Look back.** Less than the tenth. The two steps differ by less than the time of either varies, so the line above may
# even say that this one is slower. At the end all are measured again, by turns; there it is some per cent faster. On an
# H200 there are 1024 tiles for 132 blocks, which is 7.8 each: in the last round some blocks have nothing to do. That
# part no persistent kernel mends. Notebook 06 draws it.
#
# ### Step 7: a wider tile
#
# **Idea.** 128 x 256. Shared memory is read less often for each product. A thread now has 128 accumulators. That is
# where the registers go that `setmaxnreg` brought. A stage has 48 KB, so only four fit.
#
# **Prediction.** From the table: the L2 cache is the limit again, but a higher one.

# %%
prediction = predicted_us(256, 2)
measure("128 x 256", partial(run_gemm, 256, 4, SIZES.sms), prediction)
lost_unless_faster("128 x 256", "persistent")

# %%
look_back("128 x 256", "persistent", prediction, (128, 256))

# %% [markdown]
# **Look back.** The step loses. Its time is near the table's, but by chance: the table also had 128 x 128 slower than
# this, and step 6 was far better than its row. Our explanation, which we did not measure, is a tile's end. A block has
# four tiles now, not eight, and behind its last one nothing hides 64 KB of stores, four bytes each.
#
# What cuBLAS has beyond this: two blocks of a cluster share the tiles that they load, so the L2 cache gives half the
# bytes again (exercise 5); its results go out by TMA (exercise 4); and it walks over the tiles in an order in which
# neighbours are computed at the same time.
#
# ### Step 8: exact sums
#
# **Idea.** Look at the relative errors. FP8's tensor cores add up in fewer bits than float32. The remedy (DeepSeek's,
# and every serving library's): take what they have after each stage of 128, and add it up in float32, in the threads'
# registers (**promotion**). That needs twice the accumulators, so the tile is 128 x 128 again.
#
# **Prediction.** 64 additions in float32 for each thread and stage: 128 x 128 / 128 lanes of the SM is 128 clocks
# beside the 512 of the tensor cores. Two warpgroups can overlap that. We expect 10 % more time than step 6.

# %%
prediction = 1.1 * (ladder.median_us("persistent") or predicted_us(128, 2))
measure("exact sums", partial(run_gemm, 128, 6, SIZES.sms, exact=True), prediction, slower=True)

# %%
look_back("exact sums", "persistent", prediction)
if not simulator.ENABLED:
    ladder.rows[-1]["torch_exact_error"] = float(f"{relative_error(by_cublas(fast=False)[0], EXPECTED):.2e}")
ERRORS = {name: (ladder.row(name) or {}).get("error") for name in ("torch", "persistent", "exact sums")}
ERRORS["torch, without fast accumulation"] = (ladder.row("exact sums") or {}).get("torch_exact_error")
for name, error in ERRORS.items():
    if error:  # independent errors add up as squares
        print(f"    {name}: {error:.2e}; without bfloat16's own rounding {max(0, error**2 - ROUNDING**2) ** 0.5:.1e}")

# %% [markdown]
# **Look back.** The relative error is that of the result against float64, and rounding to bfloat16 is a part of it
# (section 2). The last lines take that part out. What is left is a small part of what it was before: within a stage of
# 128 the tensor cores add up well enough. cuBLAS can do the same, if it is told not to take its fast way. This is the
# form that notebook 06 goes on with. Its scales of 1 x 128 numbers need it anyway.
#
# ### Other sizes
#
# How do few rows fare? With 128 rows there are 16 tiles of 128 x 256, so most SMs have nothing to do.


# %%
def sweep():
    """Microseconds for some numbers of rows: {rows: {"torch": ..., "ours": ...}}; every result is checked."""
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
    if row["step"] == "128 x 256" and not simulator.ENABLED:
        row["sweep"] = SWEEP
for rows, times in ((ladder.row("128 x 256") or {}).get("sweep") or {}).items():
    rates = {name: 2 * int(rows) * 4096 * 7168 / us / 1e6 for name, us in times.items()}
    print(
        f"{rows:>5} rows: ours {times['ours']:7.1f} us, {rates['ours']:5.0f} TFLOP/s; "
        f"cuBLAS {times['torch']:7.1f} us, {rates['torch']:5.0f} TFLOP/s"
    )
if not ladder.row("128 x 256"):
    print("no figure is recorded yet")

# %% [markdown]
# ### A check must be able to fail
#
# Three wrong products: one that leaves out the last 128 of k, one that computes no last tile, and one that multiplies
# with another row of B.


# %%
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
# All steps once more, measured by turns, so that a clock that drifts hits all of them alike.

# %%
SOURCES = [
    *notebook_sources("notebooks/05_hopper_from_numba.py"),
    *(f"moe_numba/ptx/cuda_cpp/{name}.cu" for name in ("tensormap", "wgmma")),
]
copies.measure_all()
copies.save(SOURCES)
ladder.measure_all()
ladder.save(SOURCES)

# %%
ladder.plot(floor_us=LOWER_BOUND_US)

# %%
for name in [row["step"] for row in (ladder.record or {"rows": ladder.rows})["rows"]]:
    if row := ladder.row(name):
        rate, best = row["flops"] / row["kernel_us"]["median"] / 1e6, ladder.median_us("torch")
        print(
            f"{name:<26} {rate:5.0f} TFLOP/s, {100 * best / row['kernel_us']['median']:4.0f} % of cuBLAS, "
            f"relative error {row['error']:.2e}"
        )

# %% [markdown]
# ## 7. Tensor maps made on the device
#
# **Idea.** A map describes a matrix. In an MoE layer each expert has a few rows of one long matrix, and how many is
# known on the GPU only. hpc-ops makes a map for each of them there. The steps:
#
# 1. A warp copies a **template**, a map that the host made, to shared memory.
# 2. One thread replaces fields: `tensormap.replace`, here the address and the number of rows.
# 3. The warp publishes the copy: `tensormap.cp_fenceproxy` writes its 128 bytes to global memory, and is a fence.
# 4. Whoever uses the new map first *acquires* it, with the fence at the other end.
#
# We take the linked door, for which such rarely used instructions are a good match: nobody minds a call here. The first
# kernel makes the maps; the second loads one box of each group.


# %%
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
    """Three groups' boxes, with a map for each: what lies behind a group's rows comes as zeros."""
    device = "cpu" if simulator.ENABLED else "cuda"
    starts = torch.tensor([0, 20, 84, 100], dtype=torch.int32, device=device)
    x = torch.randint(1, 256, (100, 128), dtype=torch.uint8, device=device)
    maps = tensor_map(x, (64, 128)).repeat(4)[: 3 * 128].clone()
    template = tensor_map(x, (64, 128))
    make_maps[3, 32, stream()](maps, template, x.view(-1), starts)
    pick, first = torch.arange(3, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    out = torch.zeros(3, 64, 128, dtype=torch.uint8, device=device)
    launch(load_groups, 3, 32, maps, out, pick, first, shared_bytes=SHARED_MEMORY)
    one = torch.zeros_like(out)  # one map for all, and a row to start from
    launch(load_groups, 3, 32, template, one, 0 * pick, starts[:3].clone(), shared_bytes=SHARED_MEMORY)
    own = [x[a:b] for a, b in zip(starts.tolist(), starts.tolist()[1:])]
    clipped = all(torch.equal(o[: len(r)], r) and not o[len(r) :].any() for o, r in zip(out, own))
    there = all(torch.equal(o[: len(r)], r) for o, r in zip(one, own))
    foreign = bool(one[0, 20:].any())
    return {"right and clipped": clipped, "one map: rows are there": there, "one map: foreign rows too": foreign}


GROUPS = groups_by_maps()
print("; ".join(f"{name}: {'yes' if holds else 'NO'}" for name, holds in GROUPS.items()))
assert GROUPS["right and clipped"]

# %% [markdown]
# Look at the last two. *Loading* works with a single map for all groups: a box may start at any row. (Along a row it
# must start at a multiple of 16 bytes, or the GPU stops with an illegal instruction.) It then brings
# rows of the next group too, which do no harm as long as nobody stores what is computed from them. [Notebook
# 08](06_grouped_gemm.ipynb) makes use of that. For *storing* by TMA it is another matter, since there the map is what
# keeps a box from writing over its neighbour.
#
# A matrix of three dimensions, such as the weights of all experts, needs one map. Its box may be flat: one expert, 64
# rows, 128 bytes.


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
for name, shape in (("flat", (1, 64, 128)), ("through two experts", (2, 32, 128))):
    out = torch.zeros(shape, dtype=torch.uint8, device=DEVICE)
    launch(load_3d, 1, 32, TensorMap(W, shape), out, 128, 64, 1, shared_bytes=SHARED_MEMORY)
    BOXES[name] = torch.equal(out, W[1 : 1 + shape[0], 64 : 64 + shape[1], 128:])
print(BOXES)
assert all(BOXES.values())

# %% [markdown]
# ## 8. Wrong kernels
#
# Each of these differs from one above by a line. On a GPU each is a race or a hang, and may even look right. The
# simulator stops at the line and says what was touched too early, and by whom.


# %%
def try_cases(cases):
    """What the simulator says to each of the cases: (name, sources, call)."""

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
        "the tile is read before its barrier",
        [changed_source(load_boxes, "mbarrier_wait_parity(barriers, BARRIER, uint32(box & 1))", "pass")],
        "boxes()",
    ),
    ("always the same parity", [*SMALL, changed_source(gemm_by_tma, "uint32(k & 1)", "uint32(0)")], BY_TMA),
    (
        "no fence between the proxies",
        [*SMALL, source_of(copy_tile), changed_source(gemm_by_threads, "fence_proxy_async_shared()", "pass")],
        BY_THREADS,
    ),
    (
        "the results are read before the wait",
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
        "a stage is filled while it is used",
        parts_with(make_load, "mbarrier_wait_parity(barriers, empty + stage, phase)", "pass"),
        BY_GEMM,
    ),
    (
        "loaders and multipliers both begin with phase 0",
        parts_with(make_load, "stage, phase = int32(0), uint32(1)", "stage, phase = int32(0), uint32(0)"),
        BY_GEMM,
    ),
    (
        "the bytes are announced after the copy is ordered",
        [changed_source(load_boxes, EXPECT + ORDER, ORDER + EXPECT)],
        "boxes()",
    ),
    (
        "a map is used that was not acquired",
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
for name, said in REFUSED.items():
    print(f"{name}:\n    {said}\n")

# %% [markdown]
# One of them is not wrong at all: the bytes may be announced after the copy was ordered, since the phase cannot end
# before the one arrival that it waits for. (The article's pseudo-code has that order.)
#
# ## 9. The article's claims
#
# The course's article about TMA is [that of notebook 06](06_grouped_gemm.ipynb), *CUTLASS CUTE 7: hpc-ops 之 group gemm
# & tma*. What it says of the instructions themselves is checked here. A verdict is computed, never typed.

# %%
GLOBAL_REPLACE = """
from moe_numba.ptx.intrinsic import POINTER, instruction
def in_global(pointer, index, value): pass
in_global = instruction("tensormap.replace.tile.global_address.global.b1024.b64 [$0], $1;", "void", POINTER, "u64",
                        simulate=in_global)
@cuda.jit
def replace_in_global(map, value):
    in_global(map, 0, value)
"""
try:
    compiled({"replace": ("replace_in_global", ["uint8*", "uint64"], 32, True)}, GLOBAL_REPLACE)
    IN_GLOBAL = True
except RuntimeError:
    IN_GLOBAL = False


def verdict(holds, figure):
    return f"{'confirmed' if holds else 'refuted'}: {figure}"


def refusal(name):
    return REFUSED[name].split(":")[0]


claims = [
    (
        "One TMA map of a matrix of three dimensions, and a copy of a box of two",
        verdict(BOXES["flat"], "the box is (1, 64, 128); the copy names three coordinates"),
    ),
    (
        "The box follows the order of the dimensions: with the experts first it would go through experts",
        verdict(BOXES["through two experts"], "a box of (2, 32, 128) brings rows of two experts"),
    ),
    (
        "With one map for all groups the rows must be padded; else each group needs a map of its own",
        "more subtle: for loads one map is enough, any row may come first"
        if GROUPS["one map: rows are there"]
        else "confirmed",
    ),
    (
        "Only address and shape of a map must be replaced, the distances stay",
        verdict(
            GROUPS["right and clipped"], "our maps differ in these two alone, and rows past a group's end come as zeros"
        ),
    ),
    (
        "tensormap.replace needs the map in shared memory",
        "more subtle: PTX has a form for global memory too, and it compiles" if IN_GLOBAL else "confirmed",
    ),
    (
        "Between replace and publication a bulk group must be committed and waited for (tma_desc_commit_group)",
        "more subtle: ours goes without, by syncwarp, and its maps are right"
        if GROUPS["right and clipped"]
        else "open",
    ),
    (
        "The release of the new map must be met by an acquire",
        verdict(refusal("a map is used that was not acquired") == "MissingFence", "without it the simulator refuses"),
    ),
    (
        "The bytes are announced after both copies (its pseudo-code)",
        verdict(REFUSED["the bytes are announced after the copy is ordered"] == "right", "either order is right"),
    ),
    (
        "Producer and consumer both begin with phase 0 (its pseudo-code)",
        verdict(
            refusal("loaders and multipliers both begin with phase 0") == "right",
            f"on new barriers that is a {refusal('loaders and multipliers both begin with phase 0')}; "
            "the producer begins with parity 1",
        ),
    ),
]
Markdown("| claim | verdict |\n|---|---|\n" + "\n".join(f"| {claim} | {text} |" for claim, text in claims))

# %% [markdown]
# ## 10. Exercises
#
# Each can be done in the simulator. `mismatch` tells whether a product is right; a GPU tells whether it is fast.
#
# 1. **bfloat16.** Make `first_wgmma` multiply bfloat16. *Hint: `"bf16"`, 16 numbers are 32 bytes; what must the maps
#    say?*
# 2. **64 bytes a row.** Use `swizzle=64` and `wgmma_descriptor_64b`. *Hint: how many wgmmas has a stage then? See
#    `steps=`.*
# 3. **One product under way.** Keep one group of wgmmas under way while the next is ordered: `make_wgmma_wait(n, 1)`.
#    *Hint: which stage may be given back then? The simulator says whether you were too early.*
# 4. **Results by TMA.** Let TMA store the results, as `tests/hopper_gemm.py` does: `stmatrix` into shared memory, a
#    fence, one copy. *Hint: who may order the copy, and when may the memory be used again?*
# 5. **Two blocks, one load.** Blocks of a cluster can share what they load: `tma_load_2d_multicast`. *Hint: how many
#    warps give a stage back then, and to which block's barrier?*
# 6. **A function of your own behind the linked door.** Add `prefetch.tensormap` to `tensormap.cu`, and declare it.
#    *Hint: it takes a pointer and an index, like `fence_proxy_tensormap_acquire_gpu`.*
#
# ## 11. Sources
#
# - NVIDIA, [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/): *mbarrier*, *cp.async.bulk.tensor*,
#   *tensormap.replace*, *wgmma.mma_async*, *setmaxnreg*, *Proxies*.
# - [Numba CUDA's documentation](https://nvidia.github.io/numba-cuda/user/cuda_ffi.html) on calling foreign functions:
#   `declare_device`, `ffi.from_buffer`, linking.
# - pranjalssh, [fast.cu](https://github.com/pranjalssh/fast.cu), a ladder to a fast product on an H100 in C++;
#   DeepSeek-AI, [DeepGEMM](https://github.com/deepseek-ai/DeepGEMM), where the model of section 3 and the promotion
#   come from.
# - The article: *CUTLASS CUTE 7: hpc-ops 之 group gemm & tma*, in Chinese.
# - NVIDIA, *H200 Tensor Core GPU* data sheet, for the peak.
