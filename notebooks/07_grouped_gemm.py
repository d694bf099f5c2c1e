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
# # Grouped GEMM: the GEMMs of all experts in one launch
#
# Each expert multiplies its tokens by its weight, and the numbers of tokens differ. One kernel that computes all these
# GEMMs is a **grouped GEMM**. The final kernel is faster than a loop over cuBLAS.
#
# An article explains the FP8 kernel of [hpc-ops](https://github.com/Tencent/hpc-ops): warp specialisation, mbarriers
# between producer and consumers, a TMA descriptor per group, a tile size `kTileM` that depends on the average number
# of tokens, and two schedulers. Sections 5 and 6 build these; section 7 goes further. [Notebook
# 05](06_hopper_gemm.ipynb) explains TMA, mbarriers and wgmma. Without a GPU the times shown are recorded ones.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether there is a GPU, or the simulator must do

print("the simulator" if moe_numba.simulator.ENABLED else "a GPU", "runs the kernels:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import inspect
from functools import cache

import numpy as np
import torch
from IPython.display import Markdown
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba import simulator
from moe_numba.course.bench import kernel_time, kernel_times, records, rotating
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.topics.grouped_gemm import show as topic
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.grouped_gemm import draw
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port import group_gemm, update_grouped_tma
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.launch import HpcOpsGroupGemm
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.scheduler import host as schedulers
from moe_numba.course.lessons.grouped_gemm.hpc_ops_port.scheduler import select_tile_m, use_horizontal
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.source_diff import diff
from moe_numba.grouped_gemm import (
    group_gemm_blockwise_fp8,
    group_gemm_pertensor_fp8,
    group_gemm_silu_and_mul_pertensor_fp8,
    reference,
)
from moe_numba.grouped_gemm.common.constants import THREADS
from moe_numba.grouped_gemm.common.tma_launch import SIGNATURE
from moe_numba.grouped_gemm.wgmma import kernel as final_kernel
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, SharedMemoryLayout
from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.arithmetic import ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32, cvt_rn_satfinite_e4m3x2_f32, e4m3x2_as_floats
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_try_wait_parity,
    mbarrier_wait_parity,
)
from moe_numba.ptx.tma import tma_load_2d, tma_load_3d, tma_store_2d
from moe_numba.ptx.warp import FULL_MASK, redux_sync_max_s32
from moe_numba.ptx.warpgroup import bar_sync, elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart
from moe_numba.runtime.tensor_map import TensorMap

DEVICE = "cpu" if simulator.ENABLED else "cuda"
GROUPS, N, K = (2, 128, 256) if simulator.ENABLED else (32, 4096, 7168)  # DeepSeek-V3's gate_up on one of 8 GPUs
ROWS = 14 if simulator.ENABLED else 2048  # tokens in all groups together
DENSE_ROWS = 8 if simulator.ENABLED else 512  # in one group
FEW_ROWS, MANY_ROWS = (3, 30) if simulator.ENABLED else (32, 8192)
STAGES = 2 if simulator.ENABLED else 4
FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
GEMM = records.recorded("grouped_gemm")  # what `python -m moe_numba bench grouped_gemm` measured

# %% [markdown]
# ## 1. The problem in one picture
#
# The rows of `X` (tokens) are split into `num_group` consecutive groups, each with its own weight:
#
# ```python
# Y[start_i : end_i, :] = X[start_i : end_i, :] * W[i, :, :]^T
# ```

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.problem([5, 0, 9, 3])

# %% [markdown]
# `X` `[M, K]` and `W` `[num_group, N, K]` are **FP8** (e4m3), scaled before rounding; the result `Y` `[M, N]` is
# scaled back to bfloat16. `seqlens` holds the number of tokens of each group, `cu_seqlens` its exclusive prefix sum.
#
# ## 2. The reference
#
# The folded cell contains the article's torch loop, which calls `torch._scaled_mm` for each group with tokens:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def naive_group_gemm_pertensor_fp8(x, w, seqlens, cu_seqlens, scale):
    # Step 1: get tensor shapes
    m, k = x.shape  # m = total_seq, k = hidden_size
    num_group, n, _ = w.shape  # n = output_dim

    # Step 2: init output tensor
    y = torch.zeros((m, n), dtype=torch.bfloat16, device=x.device)

    # Step 3: iterate each group and compute independent GEMM
    start_idx = 0
    for i in range(num_group):
        # get start and end positions of current group
        start_idx = int(cu_seqlens[i].item())
        end_idx = int(start_idx + seqlens[i].item())

        # skip empty groups
        if seqlens[i].item() == 0:
            continue

        # extract input and weight for current group
        x_group = x[start_idx:end_idx]  # shape: [seqlens[i], k]
        w_group = w[i]  # shape: [n, k]

        # perform matmul (with scaled FP8)
        y_group = torch._scaled_mm(
            x_group,
            w_group.t(),  # w_group.t() shape: [k, n]
            scale_a=scale,
            scale_b=scale,
            bias=None,
            out_dtype=torch.bfloat16,
        )

        # write result to corresponding output region
        y[start_idx:end_idx] = y_group

    return y


SMALL = topic.make_problem(
    topic.random_weight(4, 128, 256, device=DEVICE), torch.tensor([5, 0, 9, 3], dtype=torch.int32)
)


def expected_output(p):
    """The package's reference, in float64; a group's results times ``y_scale[group]``."""
    return reference.group_gemm(p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale)


for scale in (1.0, 0.5):
    given = SMALL.x, SMALL.weight, SMALL.seqlens, SMALL.cu_seqlens
    y = naive_group_gemm_pertensor_fp8(*given, torch.tensor(scale, device=DEVICE))
    plain = reference.group_gemm(*given)
    ratio = float((y.double() * plain).sum() / (plain * plain).sum())
    print(
        f"scale {scale}: the result is {ratio:.3f} times the unscaled one; bf16's rounding: "
        f"{float((y.double() / ratio - plain).norm() / plain.norm()):.1e} of it"
    )

# %% [markdown]
# The function passes `scale` as `scale_a` *and* `scale_b`, so 0.5 becomes 0.25. hpc-ops and this notebook use one
# scale per group, `y_scale`.
#
# Outputs are filled with NaN before each kernel. `mismatch` compares each row with float64; bfloat16's rounding is
# less than half of what it allows.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def poisoned(p):
    p.out.fill_(float("nan"))
    return p


def check(output, right):
    """None, or what is wrong; the tolerance is larger for cuBLAS with fast accumulation."""
    y, *notes = output if isinstance(output, tuple) else (output,)
    return reference.mismatch(y, right, 1e-2 if "fast accumulation" in notes else 2e-3)


def check_small(y):
    return reference.mismatch(y, expected_output(SMALL))


print("the reference:           ", check_small(expected_output(SMALL).to(BF16)))
print("poison:                  ", check_small(poisoned(SMALL).out))
print("one scale for all groups:", check_small(naive_group_gemm_pertensor_fp8(*given, torch.ones((), device=DEVICE))))

# %% [markdown]
# ## 3. Lower bound (speed of light)
#
# Each byte of `X`, `Y` and the weights of non-empty groups moves once, and the tensor cores execute every
# multiplication. The larger of the two times, at data-sheet rates, is the lower bound: the **roofline** model.
# Predictions use the DRAM bandwidth that a copy reaches.


# %%
LIMITS = chip_limits()
BANDWIDTH, RATE = LIMITS.hbm_bandwidth, LIMITS.tensor_flops["float8_e4m3fn"]  # bytes and operations per second
print(f"{LIMITS.source}: {BANDWIDTH / 1e12:.1f} TB/s, {RATE / 1e12:.0f} TFLOP/s in FP8")


def lower_bound_us(rows, groups, n=4096, k=7168):
    count = groups * n * k + rows * k + 2 * rows * n
    return max(count / BANDWIDTH, 2 * rows * n * k / RATE) * 1e6


def crossover(groups, n, k):
    """Rows from which on the multiplications take longer than the bytes."""
    slope = 2 * n * k / RATE - (k + 2 * n) / BANDWIDTH
    return groups * n * k / BANDWIDTH / slope


print("rows of 32 groups:        ", "".join(f"{rows:>9}" for rows in topic.ROWS))
for name, sides in topic.SHAPES.items():
    times = [lower_bound_us(rows, min(32, rows), **sides) for rows in topic.ROWS]
    print(
        f"{name:<8} lower bound, us:",
        "".join(f"{us:9.1f}" for us in times),
        f"  crossover at {crossover(1, **sides):.0f} rows per group",
    )
spread = topic.random_lengths(32, 32)
print(
    f"32 rows at random leave {int((spread == 0).sum())} groups empty: {topic.lower_bound(spread, 4096, 7168)[0]:.1f} us"
)

# %% [markdown]
# Up to about 230 rows per group the kernel is memory-bound: it **streams the weights**, 940 MB. On the H20, for which
# hpc-ops was made, that is about 40 rows.
#
# ## 4. Why grouped?
#
# In a loop each group is a **launch**, and consecutive launches do not overlap. The loop's operations:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
class OperationCounter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts a function's GEMMs, copies, and synchronisations of CPU and GPU."""

    def __init__(self):
        super().__init__()
        self.found = {"GEMMs": 0, "copies and fills": 0, "synchronisations": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = str(function)
        for part, what in (
            ("_scaled_mm", "GEMMs"),
            ("copy_", "copies and fills"),
            ("zeros", "copies and fills"),
            ("_local_scalar_dense", "synchronisations"),
        ):
            self.found[what] += part in name
        return function(*args, **(kwargs or {}))


with OperationCounter() as starts:
    naive_group_gemm_pertensor_fp8(*given, torch.ones((), device=DEVICE))
LOOP_OPERATIONS = starts.found
print("the loop, 4 groups, one of them empty:", ", ".join(f"{count} {what}" for what, count in LOOP_OPERATIONS.items()))

# %% [markdown]
# `.item()` synchronises CPU and GPU, and a CUDA graph cannot capture it.
#
# Each step prints its **kernel time** (on the GPU, in a CUDA graph) and its **call time** (on the CPU, without a
# graph). Where a gain was predicted, both kernels are timed interleaved (unless one takes milliseconds), and the line
# ends with a verdict: "within a third" of the predicted change, "within the noise" (below 1/50 of the time), "no
# change", "overestimated", "underestimated" or "wrong sign".
#
# ## 5. The ladder, first part: one matrix
#
# One group, 512 tokens, N = 4096, K = 7168. Weights alternate, so that none is in L2. `measure_dense` in the folded
# cell checks and times a step.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def dense_problem():
    weight = topic.random_weight(1, N, K, device=DEVICE)
    p = topic.make_problem(weight, torch.tensor([DENSE_ROWS], dtype=torch.int32))
    p.maps = {}
    return p


DENSE = rotating(dense_problem, N * K)
DENSE_EXPECTED = expected_output(DENSE[0])
TIMED_ROWS, TIMED_N, TIMED_K = 512, 4096, 7168  # of the times below: in the simulator they are recorded ones
DENSE_BOUND, DENSE_BYTES, DENSE_FLOPS = topic.lower_bound(torch.tensor([TIMED_ROWS]), TIMED_N, TIMED_K)
dense = Ladder(
    "grouped_gemm_dense_ladder",
    lambda output: check(output, DENSE_EXPECTED),
    title="FP8 GEMM, step by step: 512 x 4096 x 7168, one matrix",
    reference_name="torch",
    config={"num_groups": 1, "n": N, "k": K},
    size={"rows": DENSE_ROWS},
)


def measure_dense(name, run, **more):
    """Check and time ``run(problem)``."""
    more |= dict(floor_us=DENSE_BOUND, bytes=DENSE_BYTES, flops=DENSE_FLOPS)
    calls = [lambda p=p: run(p) for p in DENSE]
    poisoned(DENSE[0])
    dense.step(name, calls[0], timed=calls, dtype="e4m3", **more)
    row = dense.rows[-1]
    if "after" in row and "kernel_us" in row and "compared_us" not in row:  # one takes milliseconds: not interleaved
        row["compared_us"] = [round(dense.median_us(step), 3) for step in (row["after"], name)]
        print(f"    {dense.gain(name)}")
    rates(dense, name)


def rates(ladder, name):
    """TFLOP/s, GB/s and the share of the roofline, measured now or recorded."""
    row = ladder.row(name)
    if row and "kernel_us" in row:
        us = row["kernel_us"]["median"]
        print(
            f"    {row['flops'] / us / 1e6:.0f} TFLOP/s, {row['bytes'] / us / 1e3:.0f} GB/s, "
            f"{100 * row['floor_us'] / us:.2g} % of the roofline"
        )


print(f"lower bound: {DENSE_BYTES / 1e6:.1f} MB, {DENSE_FLOPS / 1e9:.1f} GFLOP, {DENSE_BOUND:.2f} us")

# %% [markdown]
# ### Step 0: torch
#
# `torch._scaled_mm` calls cuBLAS.

# %%
ONE = torch.ones((), device=DEVICE)


def run_torch(p):
    arguments = p.x, p.weight[0].t(), p.y_scale[0], ONE
    return torch._scaled_mm(*arguments, out_dtype=BF16, use_fast_accum=True), "fast accumulation"


measure_dense("torch", run_torch)

# %% [markdown]
# cuBLAS reaches two thirds of the roofline.
#
# ### Step 1: a naive kernel
#
# **Idea.** One thread computes one element of `Y`.
#
# **Predicted gain.** A loss. The 32 lanes of a warp read 32 rows of `W`, so a load takes 32 clocks, one per cache line,
# and feeds 64 multiply-adds.


# %%
@cuda.jit
def naive(x, weight, y_scale, y, rows, n, k):
    column, row = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x, cuda.blockIdx.y
    if column < n and row < rows:
        total, pairs = float32(0), int32(k >> 1)
        for i in range(pairs):
            a, b = e4m3x2_as_floats(uint32(x[row * pairs + i]))
            c, d = e4m3x2_as_floats(uint32(weight[int64(column) * pairs + i]))
            total += a * c + b * d
        y[row * n + column] = uint32(cvt_rn_bf16x2_f32(float32(0), total * y_scale[0]))  # its low half


def run_naive(p):
    grid = -(-N // 128), len(p.x)
    pairs = p.x.view(torch.int16).view(torch.uint16), p.weight.view(torch.int16).view(torch.uint16)
    launch(naive, grid, 128, *pairs, p.y_scale, p.out.view(torch.uint16), len(p.x), N, K)
    return p.out


MULTIPLY_ADDS = TIMED_ROWS * TIMED_N * TIMED_K
SM_CLOCKS_PER_US = LIMITS.sm_count * LIMITS.boost_clock / 1e6  # of all SMs together
gain_us = (dense.median_us("torch") or 0) - MULTIPLY_ADDS / 64 * 32 / SM_CLOCKS_PER_US
measure_dense("naive", run_naive, slow=True, after="torch", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** Less than a thousandth of the roofline: each load brings two elements, and `W` is read again for
# every row of `X`.
#
# **Exercise 1.** This is the naive kernel for one token: each CTA of 32 threads computes 32 elements of `y`; `weight`
# is `[n, k]`, in float32, and n and k are multiples of 32. Each load of `weight` by the warp touches 32 sectors of 32
# bytes. Change the kernel so that each touches 4.


# %%
@cuda.jit
def one_token(x, weight, y, k):
    lane, first = int32(cuda.threadIdx.x), int32(32 * cuda.blockIdx.x)
    total = float32(0)
    for j in range(k):
        total += x[j] * weight[first + lane, j]
    y[first + lane] = total


exercise("grouped_gemm-1").check(one_token)

# %% [markdown]
# ### Step 2: tiles in shared memory
#
# **Idea.** A CTA computes a **tile** of 64 x 64 results. In the folded cell, `load_floats` converts each element once
# per CTA, and the loop over `j` in `tiled` uses it 64 times.
#
# **Predicted gain.** Shared memory is the new limit: it serves one warp-wide load per clock and SM, and for 16
# multiply-adds per thread a warp issues eight.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
TILE, DEPTH, PITCH = 64, 32, 33  # the pitch is odd, so that a column falls on different banks
TILE_ELEMENTS = TILE * PITCH


@cuda.jit(device=True)
def load_floats(source, smem_tile, first, limit, pairs, offset, thread):
    """64 rows of 32 elements, zeros beyond the last row; 4 threads a row."""
    row, part = thread // 4, thread % 4
    for i in range(4):
        a, b = float32(0), float32(0)
        if first + row < limit:
            a, b = e4m3x2_as_floats(uint32(source[int64(first + row) * pairs + offset + part * 4 + i]))
        smem_tile[row * PITCH + part * 8 + 2 * i] = a
        smem_tile[row * PITCH + part * 8 + 2 * i + 1] = b


@cuda.jit
def tiled(x, weight, y_scale, y, rows, n, k):
    xs, ws = cuda.shared.array(TILE_ELEMENTS, float32), cuda.shared.array(TILE_ELEMENTS, float32)
    totals = cuda.local.array(16, float32)
    thread, pairs = int32(cuda.threadIdx.x), int32(k >> 1)
    column, row = int32(cuda.blockIdx.x * TILE), int32(cuda.blockIdx.y * TILE)
    thread_column, thread_row = thread % 16, thread // 16
    for i in range(16):
        totals[i] = 0
    for offset in range(0, pairs, DEPTH // 2):
        load_floats(x, xs, row, rows, pairs, offset, thread)
        load_floats(weight, ws, column, n, pairs, offset, thread)
        cuda.syncthreads()
        for j in range(DEPTH):
            for i in range(4):
                a = xs[(thread_row + 16 * i) * PITCH + j]
                for h in range(4):
                    totals[4 * i + h] += a * ws[(thread_column + 16 * h) * PITCH + j]
        cuda.syncthreads()
    for i in range(4):
        for h in range(4):
            if row + thread_row + 16 * i < rows and column + thread_column + 16 * h < n:
                value = uint32(cvt_rn_bf16x2_f32(float32(0), totals[4 * i + h] * y_scale[0]))
                y[(row + thread_row + 16 * i) * n + column + thread_column + 16 * h] = value


def run_tiled(p):
    grid = -(-N // TILE), -(-len(p.x) // TILE)
    pairs = p.x.view(torch.int16).view(torch.uint16), p.weight.view(torch.int16).view(torch.uint16)
    launch(tiled, grid, 256, *pairs, p.y_scale, p.out.view(torch.uint16), len(p.x), N, K)
    return p.out


loads_us = MULTIPLY_ADDS / (16 * 32) * 8 / SM_CLOCKS_PER_US
gain_us = (dense.median_us("naive") or 0) - loads_us
measure_dense("tiles in shared memory", run_tiled, slow=True, after="naive", predicted_gain_us=gain_us)
print(f"    model: {loads_us:.0f} us for loads from shared memory")

# %% [markdown]
# The kernel takes several times as long as its loads from shared memory: the model ignores conversions, stores to
# shared memory and waits at barriers. The next steps use tensor cores.
#
# ### Step 3: TMA and wgmma, one stage
#
# **Idea.** Use three features of Hopper ([notebook 06](06_hopper_gemm.ipynb), section 4):
#
# - **TMA** copies a box of a matrix to shared memory. One thread issues the copy with a **tensor map**, a descriptor
#   made by the host.
# - An **mbarrier** completes a **phase** when all expected arrivals and bytes have arrived.
# - **wgmma** multiplies matrices in shared memory; the four warps of a **warpgroup** issue it together.
#
# A CTA computes 128 tokens x 128 columns. An iteration fills one **stage**, K = 128. The tensor cores accumulate in
# fewer bits than float32, so `fma` adds each iteration's result to float32 accumulators: **promotion**.
#
# The folded cell contains the kernel, `make_one_stage`. Its loop over `block` matters: `load_stage`, wait on `full`,
# `tile` (wgmma), `fma`, `syncthreads`.
#
# **Predicted gain.** Each of the 56 iterations takes the time of its copy, 32 KB per CTA from L2, and then that of its
# MMA, computed from the GPU's limits.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
BLOCK_K = 128  # bytes of K in a stage: four wgmmas
TILE_BYTES = 128 * BLOCK_K
STAGE_BYTES = 2 * TILE_BYTES  # tokens, then weights
ZEROS = (np.float32(0),) * 64


@cuda.jit(device=True)
def load_stage(smem, offset, map_x, map_weight, block, row, column, barriers, full):
    mbarrier_arrive_expect_tx(barriers, full, STAGE_BYTES)
    tma_load_2d(smem, offset, map_x, 0, block * BLOCK_K, row, barriers, full)
    tma_load_3d(smem, offset + TILE_BYTES, map_weight, 0, block * BLOCK_K, column, 0, barriers, full)


@cuda.jit(device=True)
def store_rows(y, total, row, column, rows, pitch):
    """A thread's fragment to global memory, two neighbours in a word; a row of y has ``pitch`` words."""
    offset = int64(row) * pitch + (column >> 1)
    for j in range(16):
        if row < rows:
            y[offset + 4 * j] = cvt_rn_bf16x2_f32(total[4 * j + 1], total[4 * j])
        if row + 8 < rows:
            y[offset + 8 * pitch + 4 * j] = cvt_rn_bf16x2_f32(total[4 * j + 3], total[4 * j + 2])


@cache
def make_one_stage():
    tile, wait, fma = make_wgmma_tile(128, "e4m3"), make_wgmma_wait(128, 0), make_fma(128)
    full = STAGE_BYTES // 8  # the barrier lies behind the stage

    @cuda.jit
    def kernel(map_x, map_weight, y_scale, y, rows, n, k):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        row, column = int32(cuda.blockIdx.y * 128), int32(cuda.blockIdx.x * 128)
        if thread == 0:
            mbarrier_init(barriers, full, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        total, half = ZEROS, int32((warp >> 2) * (64 * BLOCK_K))
        for block in range((k + BLOCK_K - 1) // BLOCK_K):
            if warp == 0 and elect_sync(FULL_MASK):
                load_stage(smem, 0, map_x, map_weight, block, row, column, barriers, full)
            mbarrier_wait_parity(barriers, full, uint32(block & 1))
            a, b = wgmma_descriptor(smem, half), wgmma_descriptor(smem, TILE_BYTES)
            product = wait(tile(a, b))
            total = fma(total, product, y_scale[0])
            cuda.syncthreads()  # before the stage is filled again
        store_rows(y, total, row + 16 * warp + (lane >> 2), column + 2 * (lane & 3), rows, n >> 1)

    return kernel, STAGE_BYTES + 8


# %%
def maps_of(p, tokens=128):
    """Maps of x and of the weights, made once."""
    if tokens not in p.maps:
        p.maps[tokens] = (
            TensorMap(p.x, (tokens, BLOCK_K), swizzle=128),
            TensorMap(p.weight, (1, 128, BLOCK_K), swizzle=128),
        )
    return p.maps[tokens]


def dense_step(made, threads):
    """``run(problem)`` for a kernel of tiles of 128 x 128."""
    kernel, shared_bytes = made

    def run(p):
        grid = -(-N // 128), -(-len(p.x) // 128)
        launch(
            kernel,
            grid,
            threads,
            *maps_of(p),
            p.y_scale,
            p.out.view(torch.int32),
            len(p.x),
            N,
            K,
            shared_bytes=shared_bytes,
        )
        return p.out

    return run


run_one_stage = dense_step(make_one_stage(), 256)
ITERATIONS, TILES = TIMED_K // BLOCK_K, TIMED_ROWS // 128 * (TIMED_N // 128)  # a tile per CTA, a CTA per SM
COPY_US = TILES * STAGE_BYTES / LIMITS.l2_bandwidth * 1e6
MMA_US = 128**3 / 4096 / LIMITS.tensor_clock * 1e6  # 4096 multiply-adds per clock and SM
gain_us = (dense.median_us("tiles in shared memory") or 0) - ITERATIONS * (COPY_US + MMA_US)
measure_dense("wgmma, one stage", run_one_stage, after="tiles in shared memory", predicted_gain_us=gain_us)
print(f"    model of an iteration: copy {COPY_US:.2f} us, MMA {MMA_US:.2f} us")

# %% [markdown]
# ### Step 4: ring of stages
#
# **Idea.** Use a **ring** of four stages. Each iteration issues the copy three iterations ahead, into the stage that
# the previous one consumed. The kernel is folded; see the diff.
#
# **Predicted gain.** Copies and MMAs overlap: of step 3's time only that of the copies, the longer of the two, remains.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_ring(stages):
    tile, wait, fma = make_wgmma_tile(128, "e4m3"), make_wgmma_wait(128, 0), make_fma(128)
    full = stages * STAGE_BYTES // 8  # the barriers lie behind the stages

    @cuda.jit
    def kernel(map_x, map_weight, y_scale, y, rows, n, k):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        row, column = int32(cuda.blockIdx.y * 128), int32(cuda.blockIdx.x * 128)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(barriers, full + stage, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        total, half = ZEROS, int32((warp >> 2) * (64 * BLOCK_K))
        k_blocks = int32((k + BLOCK_K - 1) // BLOCK_K)
        stage, phase, next_stage = int32(0), uint32(0), int32(0)
        for block in range(1 - stages, k_blocks):
            if block + stages - 1 < k_blocks:
                if warp == 0 and elect_sync(FULL_MASK):
                    load_stage(
                        smem,
                        next_stage * STAGE_BYTES,
                        map_x,
                        map_weight,
                        block + stages - 1,
                        row,
                        column,
                        barriers,
                        full + next_stage,
                    )
                next_stage = int32(next_stage + 1) if next_stage + 1 < stages else int32(0)
            if block >= 0:
                mbarrier_wait_parity(barriers, full + stage, phase)
                a = wgmma_descriptor(smem, stage * STAGE_BYTES + half)
                b = wgmma_descriptor(smem, stage * STAGE_BYTES + TILE_BYTES)
                product = wait(tile(a, b))
                total = fma(total, product, y_scale[0])
                cuda.syncthreads()  # before the stage is filled again
                stage = int32(stage + 1)
                if stage == stages:
                    stage, phase = int32(0), uint32(phase ^ uint32(1))
        store_rows(y, total, row + 16 * warp + (lane >> 2), column + 2 * (lane & 3), rows, n >> 1)

    return kernel, stages * (STAGE_BYTES + 8)


run_ring = dense_step(make_ring(STAGES), 256)
gain_us = (dense.median_us("wgmma, one stage") or 0) - ITERATIONS * max(COPY_US, MMA_US)
measure_dense("ring of stages", run_ring, after="wgmma, one stage", predicted_gain_us=gain_us)

# %%
diff(make_one_stage, make_ring)

# %% [markdown]
# Loads and MMAs overlap, but copies are issued after a CTA-wide barrier.
#
# **Exercise 2.** Such a ring issues copies `stages - 1` iterations ahead. With how many stages, at least, does no
# iteration wait for its copy? `latency` is the time from issue to arrival, `iteration` that of an iteration, both in
# clocks. All numbers are integers.

# %%
fewest_stages = ...  # your answer: lambda latency, iteration: ...
exercise("grouped_gemm-2").check(fewest_stages)

# %% [markdown]
# ### Step 5: warp specialisation
#
# **Idea.** A third warpgroup, the **producer**, only issues copies; the two **consumers** only multiply. Per stage,
# `full` completes when the bytes have arrived, `empty` when the consumers have read them. `setmaxnreg` moves registers
# from producer to consumers.
#
# A wait with parity `p` returns once *the phase with parity `p` has completed*. A new barrier is in phase 0, so a
# producer that must not wait in its first round starts with parity 1. The article's pseudocode starts with 0 and would
# deadlock:


# %%
@cuda.jit
def try_wait_on_new_barrier(answers):
    barriers = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(barriers, 0, 1)
        fence_mbarrier_init()
        for phase in range(2):
            answers[phase] = mbarrier_try_wait_parity(barriers, 0, uint32(phase))


answers = torch.full((2,), -7, dtype=torch.int32, device=DEVICE)
launch(try_wait_on_new_barrier, 1, 32, answers)
NEW_BARRIER = answers.tolist()
print(f"phase 0: {bool(NEW_BARRIER[0])}; phase 1: {bool(NEW_BARRIER[1])}")

# %% [markdown]
# **Predicted gain.** Without the CTA-wide barrier one warpgroup promotes while the other multiplies, which hides 64
# FMAs of eight warps per iteration; an SM issues four per clock.
#
# In the folded `make_specialised`, the branch `warp >= 8` is the producer, the other one the consumers.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def advance(stage, phase, stages):
    """The next stage of the ring; the phase changes where it begins anew."""
    stage = int32(stage + 1)
    return (int32(0), uint32(phase ^ uint32(1))) if stage == stages else (stage, phase)


@cuda.jit(device=True)
def init_barriers(barriers, full, empty, stages):
    """New barriers for all stages, which all threads may use after it."""
    if cuda.threadIdx.x == 0:
        for stage in range(stages):
            mbarrier_init(barriers, full + stage, 1)
            mbarrier_init(barriers, empty + stage, 8)  # an arrival from each warp that multiplies
        fence_mbarrier_init()
    cuda.syncthreads()


@cache
def make_specialised(stages):
    tile, wait, fma = make_wgmma_tile(128, "e4m3"), make_wgmma_wait(128, 0), make_fma(128)
    release_registers, request_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)
    full = stages * STAGE_BYTES // 8
    empty = full + stages

    @cuda.jit
    def kernel(map_x, map_weight, y_scale, y, rows, n, k):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        row, column = int32(cuda.blockIdx.y * 128), int32(cuda.blockIdx.x * 128)
        init_barriers(barriers, full, empty, stages)
        k_blocks, stage = int32((k + BLOCK_K - 1) >> 7), int32(0)
        if warp >= 8:
            release_registers()
            if warp == 8 and elect_sync(FULL_MASK):
                phase = uint32(1)
                for block in range(k_blocks):
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    load_stage(smem, stage * STAGE_BYTES, map_x, map_weight, block, row, column, barriers, full + stage)
                    stage, phase = advance(stage, phase, stages)
        else:
            request_registers()
            total, half, phase = ZEROS, int32((warp >> 2) * (64 * BLOCK_K)), uint32(0)
            for _ in range(k_blocks):
                mbarrier_wait_parity(barriers, full + stage, phase)
                a = wgmma_descriptor(smem, stage * STAGE_BYTES + half)
                b = wgmma_descriptor(smem, stage * STAGE_BYTES + TILE_BYTES)
                product = wait(tile(a, b))
                if lane == 0:
                    mbarrier_arrive(barriers, empty + stage)
                total = fma(total, product, y_scale[0])
                stage, phase = advance(stage, phase, stages)
            store_rows(y, total, row + 16 * warp + (lane >> 2), column + 2 * (lane & 3), rows, n >> 1)

    return kernel, stages * (STAGE_BYTES + 16)


run_specialised = dense_step(make_specialised(STAGES), 384)
gain_us = ITERATIONS * 64 * 8 / 4 / LIMITS.tensor_clock * 1e6
measure_dense("warp specialisation", run_specialised, after="ring of stages", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** More than predicted, probably because the barrier also delayed copies.
#
# A warp waits only for its own part of a wgmma, so one lane of each consumer warp arrives on `empty` (in the article,
# one thread per warpgroup).
#
# ### Step 6: transposed MMA
#
# **Idea.** wgmma processes 64 rows of its first operand, so three tokens cost as much as 64. The second operand may
# have any multiple of 8 rows. So compute `Y^T = W * X^T`:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.padded_work([1, 8, 16, 32, 48, 64, 100, 128])

# %% [markdown]
# In the folded `make_transposed` the descriptors `a` and `b` are swapped. A tile has `tokens` tokens (hpc-ops'
# kTileM). `make_store_columns` stores two bytes at a time, because neighbours in a fragment now belong to two tokens.
#
# **Predicted gain.** 512 tokens: none. The MMAs are the same, and twice as many stores touch half as many cache lines
# each. 16 tokens: the MMA multiplies 16 rows instead of 128.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def load_tile(smem, offset, map_x, map_weight, block, row, column, g, barriers, full, stage_bytes):
    """Weights, then tokens."""
    mbarrier_arrive_expect_tx(barriers, full, stage_bytes)
    tma_load_3d(smem, offset, map_weight, 0, block * BLOCK_K, column, g, barriers, full)
    tma_load_2d(smem, offset + TILE_BYTES, map_x, 0, block * BLOCK_K, row, barriers, full)


@cache
def make_store_columns(tokens):
    """A thread's fragment of ``Y^T``: every neighbour is another token."""

    @cuda.jit(device=True)
    def store(y, total, token, column, rows, n, scale):
        for j in range(tokens // 8):
            for i in range(2):
                if token + 8 * j + i < rows:
                    offset = int64(token + 8 * j + i) * n + column
                    y[offset] = cvt_rn_bf16x2_f32(float32(0), total[4 * j + i] * scale)
                    y[offset + 8] = cvt_rn_bf16x2_f32(float32(0), total[4 * j + 2 + i] * scale)

    return store


@cache
def make_transposed(tokens, stages):
    tile, wait, fma = make_wgmma_tile(tokens, "e4m3"), make_wgmma_wait(tokens, 0), make_fma(tokens)
    release_registers, request_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)
    stage_bytes, zeros, store = (
        TILE_BYTES + tokens * BLOCK_K,
        (np.float32(0),) * (tokens // 2),
        make_store_columns(tokens),
    )
    full = stages * stage_bytes // 8
    empty = full + stages

    @cuda.jit
    def kernel(map_x, map_weight, y_scale, y, rows, n, k):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        row, column = int32(cuda.blockIdx.y * tokens), int32(cuda.blockIdx.x * 128)
        init_barriers(barriers, full, empty, stages)
        k_blocks, stage = int32((k + BLOCK_K - 1) >> 7), int32(0)
        if warp >= 8:
            release_registers()
            if warp == 8 and elect_sync(FULL_MASK):
                phase = uint32(1)
                for block in range(k_blocks):
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    load_tile(
                        smem,
                        stage * stage_bytes,
                        map_x,
                        map_weight,
                        block,
                        row,
                        column,
                        0,
                        barriers,
                        full + stage,
                        stage_bytes,
                    )
                    stage, phase = advance(stage, phase, stages)
        else:
            request_registers()
            total, half, phase = zeros, int32((warp >> 2) * (64 * BLOCK_K)), uint32(0)
            for _ in range(k_blocks):
                mbarrier_wait_parity(barriers, full + stage, phase)
                a = wgmma_descriptor(smem, stage * stage_bytes + half)
                b = wgmma_descriptor(smem, stage * stage_bytes + TILE_BYTES)
                product = wait(tile(a, b))
                if lane == 0:
                    mbarrier_arrive(barriers, empty + stage)
                total = fma(total, product, float32(1))
                stage, phase = advance(stage, phase, stages)
            store(y, total, row + 2 * (lane & 3), column + 16 * warp + (lane >> 2), rows, n, y_scale[0])

    return kernel, stages * (stage_bytes + 16)


def transposed_step(tokens):
    kernel, shared_bytes = make_transposed(tokens, STAGES)

    def run(p):
        grid = -(-N // 128), -(-len(p.x) // tokens)
        launch(
            kernel,
            grid,
            384,
            *maps_of(p, tokens),
            p.y_scale,
            p.out.view(torch.int16).view(torch.uint16),
            len(p.x),
            N,
            K,
            shared_bytes=shared_bytes,
        )
        return p.out

    return run


DENSE_TOKENS = 16 if simulator.ENABLED else 128  # of a tile
run_transposed = transposed_step(DENSE_TOKENS)
STORE_LINES = {"warp specialisation": 32 * 8, "transposed MMA": 64 * 4}  # of a warp: stores x cache lines of each
gain_us = 8 * (STORE_LINES["warp specialisation"] - STORE_LINES["transposed MMA"]) / LIMITS.tensor_clock * 1e6
measure_dense("transposed MMA", run_transposed, after="warp specialisation", predicted_gain_us=gain_us)

# %%
diff(make_specialised, make_transposed)

# %% [markdown]
# With 16 tokens, before and after:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sixteen_tokens():
    """The same matrices and 16 tokens."""
    made = [topic.make_problem(p.weight, torch.tensor([16], dtype=torch.int32)) for p in DENSE]
    for p in made:
        p.maps = {}
    return made


SIXTEEN = sixteen_tokens()
SIXTEEN_RUNS = {"warp specialisation": run_specialised, "transposed MMA": transposed_step(16)}
for name, run in SIXTEEN_RUNS.items():
    wrong = reference.mismatch(run(poisoned(SIXTEEN[0])), expected_output(SIXTEEN[0]))
    assert not wrong, f"{name}, 16 tokens: {wrong}"
found = kernel_times({name: [lambda p=p, run=run: run(p) for p in SIXTEEN] for name, run in SIXTEEN_RUNS.items()})
for row in dense.rows:
    if found.get(row["step"]):
        row["sixteen_us"] = round(found[row["step"]].median, 3)
before, after = (dense.median_us(name, "sixteen_us") for name in SIXTEEN_RUNS)
if before and after:
    gain_us = ITERATIONS * MMA_US * (1 - 16 / 128)
    print(f"16 tokens: {before:.1f} -> {after:.1f} us; {Judgement(before, after, gain_us)}")
    print(f"    {TIMED_N * TIMED_K / after / 1e3:.0f} GB/s of weights")

# %% [markdown]
# **Explanation.** With 512 tokens the step gains a few percent; the cause was not measured. With 16 tokens the time is
# halved, but DRAM is far from its limit: only 32 of 132 SMs have a tile.
#
# ### Step 7: stmatrix and TMA store
#
# **Idea.** `stmatrix.trans` writes 8 x 8 matrices from registers to shared memory, transposed, and one thread stores
# the tile with TMA, which clips what lies outside `Y`. From our port of hpc-ops' kernel:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown("```python\n" + inspect.getsource(group_gemm.make_store_smem) + "```")

# %% [markdown]
# TMA reads shared memory through the **async proxy**, so `make_store_tile` in the folded cell needs
# `fence_proxy_async_shared` and a barrier before the store.
#
# **Predicted gain.** The stores of step 6 take a clock per cache line. Instead the tile is written to shared memory and
# read from it, 128 bytes per clock.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_store_tile(tokens):
    """What comes in place of ``store(...)``."""
    store_smem = group_gemm.make_store_smem(group_gemm.HpcOpsConfig(tile_m=tokens))
    wait_read = make_bulk_wait_group_read(0)

    @cuda.jit(device=True)
    def store_tile(smem, offset, map_y, total, row, column, warp, lane):
        half = int32(warp >> 2)
        out = int32(offset + half * (tokens * 128))
        store_smem(smem, out, warp, lane, total)
        fence_proxy_async_shared()
        bar_sync(1 + half, 128)
        if (warp & 3) == 0 and elect_sync(FULL_MASK):
            tma_store_2d(map_y, 0, column + 64 * half, row, smem, out)
            bulk_commit_group()
            wait_read()  # a block must not end before its copies have read what they copy

    return store_tile


@cache
def make_epilogue(tokens, stages):
    tile, wait, fma = make_wgmma_tile(tokens, "e4m3"), make_wgmma_wait(tokens, 0), make_fma(tokens)
    release_registers, request_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)
    stage_bytes, zeros = TILE_BYTES + tokens * BLOCK_K, (np.float32(0),) * (tokens // 2)
    store_tile, out_offset = make_store_tile(tokens), stages * stage_bytes
    full = (out_offset + 2 * tokens * 128) // 8
    empty = full + stages

    @cuda.jit
    def kernel(map_x, map_weight, map_y, y_scale, k):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        row, column = int32(cuda.blockIdx.y * tokens), int32(cuda.blockIdx.x * 128)
        init_barriers(barriers, full, empty, stages)
        k_blocks, stage = int32((k + BLOCK_K - 1) >> 7), int32(0)
        if warp >= 8:
            release_registers()
            if warp == 8 and elect_sync(FULL_MASK):
                phase = uint32(1)
                for block in range(k_blocks):
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    load_tile(
                        smem,
                        stage * stage_bytes,
                        map_x,
                        map_weight,
                        block,
                        row,
                        column,
                        0,
                        barriers,
                        full + stage,
                        stage_bytes,
                    )
                    stage, phase = advance(stage, phase, stages)
        else:
            request_registers()
            total, half, phase = zeros, int32((warp >> 2) * (64 * BLOCK_K)), uint32(0)
            for _ in range(k_blocks):
                mbarrier_wait_parity(barriers, full + stage, phase)
                a = wgmma_descriptor(smem, stage * stage_bytes + half)
                b = wgmma_descriptor(smem, stage * stage_bytes + TILE_BYTES)
                product = wait(tile(a, b))
                if lane == 0:
                    mbarrier_arrive(barriers, empty + stage)
                total = fma(total, product, y_scale[0])
                stage, phase = advance(stage, phase, stages)
            store_tile(smem, out_offset, map_y, total, row, column, warp, lane)

    return kernel, stages * (stage_bytes + 16) + 2 * tokens * 128


def epilogue_step(tokens):
    kernel, shared_bytes = make_epilogue(tokens, STAGES)

    def run(p):
        if "y" not in p.maps:
            p.maps["y"] = TensorMap(p.out, (tokens, 64), swizzle=128)
        launch(
            kernel,
            (-(-N // 128), -(-len(p.x) // tokens)),
            384,
            *maps_of(p, tokens),
            p.maps["y"],
            p.y_scale,
            K,
            shared_bytes=shared_bytes,
        )
        return p.out

    return run


store_clocks = 2 * (128 * 128 * 2) / 128
gain_us = (8 * STORE_LINES["transposed MMA"] - store_clocks) / LIMITS.tensor_clock * 1e6
run = epilogue_step(DENSE_TOKENS)
measure_dense("stmatrix and TMA store", run, after="transposed MMA", predicted_gain_us=gain_us)

# %%
diff(make_transposed, make_epilogue)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
if took := dense.median_us("stmatrix and TMA store"):
    print(f"{took / ITERATIONS:.2f} us per iteration; the MMA takes {MMA_US:.2f} us of it")

# %% [markdown]
# The stores cost little; torch is still faster. A CTA has one tile, so the tensor cores idle at its start and end;
# section 6 overlaps both with the next tile. In each iteration a warpgroup waits, multiplies and promotes one after the
# other. The MMA's time assumes the clock of the peak rate.
#
# ### A check must be able to fail
#
# Two wrong kernels: one leaves out the last 128 elements of K, one leaves a row unwritten.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def short_k(p):
    kernel, shared_bytes = make_one_stage()
    launch(
        kernel,
        (-(-N // 128), -(-len(p.x) // 128)),
        256,
        *maps_of(p),
        p.y_scale,
        p.out.view(torch.int32),
        len(p.x),
        N,
        K - BLOCK_K,
        shared_bytes=shared_bytes,
    )
    return p.out


def forgets_a_row(p):
    y = run_one_stage(p)
    y[-1] = float("nan")
    return y


trial = Ladder("grouped_gemm_trial", dense.check)
for wrong_step in (short_k, forgets_a_row):
    trial.step(wrong_step.__name__, lambda run=wrong_step: run(poisoned(DENSE[0])), expect_wrong=True)

# %% [markdown]
# All steps interleaved; the two slowest keep their times.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
dense.measure_all()
dense.save()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
dense.plot(floor_us=DENSE_BOUND)

# %% [markdown]
# ## 6. The ladder, second part: 32 groups
#
# 32 groups have 2048 tokens together, in other runs 32 and 8192. Two sets of weights, 940 MB each, alternate. A step is
# compared with the one that it changes for all three sizes; the figure at the end has 2048 tokens.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
WEIGHTS = [topic.random_weight(GROUPS, N, K, device=DEVICE) for _ in range(1 if simulator.ENABLED else topic.SETS)]
SIZES = {"main": ROWS, "few": FEW_ROWS, "many": MANY_ROWS}
RECORDED = {"main": 2048, "few": 32, "many": 8192}  # what a GPU measures here, and what is recorded
LABELS = {which: f"{rows} tokens" for which, rows in RECORDED.items()}
OTHER_LABELS = {which: LABELS[which] for which in ("few", "many")}
KEYS = {"main": "kernel_us", "few": "few_us", "many": "many_us"}  # of a step's times
PROBLEMS, EXPECTED, BOUND, TIMED_LENGTHS = {}, {}, {}, {}
for which, rows in SIZES.items():
    lengths = topic.random_lengths(GROUPS, rows)
    PROBLEMS[which] = [topic.make_problem(weight, lengths) for weight in WEIGHTS]
    for p in PROBLEMS[which]:
        p.maps, p.made = {}, {}
        p.ends = lengths.cumsum(0).tolist()
    EXPECTED[which] = expected_output(PROBLEMS[which][0])
    TIMED_LENGTHS[which] = topic.random_lengths(32, RECORDED[which]).tolist()
    BOUND[which] = topic.lower_bound(torch.tensor(TIMED_LENGTHS[which]), TIMED_N, TIMED_K)
    print(f"{which:<5} {lengths.tolist()}; {RECORDED[which]} tokens in 32 groups: lower bound {BOUND[which][0]:.1f} us")

ladder = Ladder(
    "grouped_gemm_ladder",
    lambda output: check(output, EXPECTED["main"]),
    title="Grouped GEMM, step by step: 32 groups, 2048 tokens, N 4096, K 7168",
    reference_name="torch",
    config={"num_groups": GROUPS, "n": N, "k": K},
    size={"rows": ROWS},
)
us = ladder.median_us  # a step's median time, measured now or recorded
RUNS = {}  # step -> run(problem)


def calls_of(run, which="main"):
    return [lambda p=p: run(p) for p in PROBLEMS[which]]


def kernel_us(run, which):
    """The kernel time for a number of tokens, of a kernel that is right there; None in the simulator."""
    wrong = check(run(poisoned(PROBLEMS[which][0])), EXPECTED[which])
    assert not wrong, f"{LABELS[which]}: {wrong}"
    stats = kernel_time(calls_of(run, which), launches=10, replays=15)
    return stats and round(stats.median, 2)


def other_times(name, after, which, predicted_gain_us):
    """Check a step for another number of tokens, and time it interleaved with the step that it changes."""
    wrong = check(RUNS[name](poisoned(PROBLEMS[which][0])), EXPECTED[which])
    assert not wrong, f"{LABELS[which]}: {wrong}"
    steps = [after, name] if after else [name]
    found = kernel_times({step: calls_of(RUNS[step], which) for step in steps}, launches=10, replays=15)
    if simulator.ENABLED:
        return {}
    medians = [round(found[step].median, 2) for step in steps]
    compared = {f"{which}_compared_us": medians, f"{which}_predicted_gain_us": predicted_gain_us} if after else {}
    return {f"{which}_us": medians[-1]} | compared


def measure(name, run, *, after=None, predicted_gain_us=None, **more):
    """Check and time ``run(problem)`` for all sizes; ``predicted_gain_us`` is {size: gain over step ``after``}."""
    RUNS[name], gains = run, predicted_gain_us or {}
    for which in OTHER_LABELS:
        more |= other_times(name, after, which, gains.get(which))
    more |= dict(zip(("floor_us", "bytes", "flops"), BOUND["main"])) | dict(after=after)
    poisoned(PROBLEMS["main"][0])
    calls = calls_of(run)
    ladder.step(name, calls[0], timed=calls, dtype="e4m3", predicted_gain_us=gains.get("main"), **more)
    rates(ladder, name)
    row = ladder.row(name) or {}
    for which, label in OTHER_LABELS.items():
        times, gain_us = row.get(f"{which}_compared_us"), row.get(f"{which}_predicted_gain_us")
        if times:
            print(f"    {label}: {times[0]:.0f} -> {times[1]:.0f} us", end="")
            print("" if gain_us is None else f"; {Judgement(*times, gain_us)}")
        elif f"{which}_us" in row:
            print(f"    {label}: {row[f'{which}_us']:.0f} us")


def keep(field, figures):
    """Record figures in the last step's row; return them, or the recorded ones in the simulator."""
    for row in ladder.rows:
        if row["step"] == "final" and figures:
            row[field] = figures
    return (ladder.row("final") or {}).get(field, {})


# %% [markdown]
# Predictions use two models: **waves** (each SM computes its tiles one after the other, each in step 7's time) and
# **memory** (the longer of the times that the bytes need from DRAM and from L2, at step 7's rate).


# %%
found = ladder.times("small kernel", {"addition": lambda: PROBLEMS["main"][0].seqlens + 1})
SMALL_US = found["addition"] if found else 0.0
TILE_US = dense.median_us("stmatrix and TMA store")
L2_RATE = TILES * ITERATIONS * STAGE_BYTES / TILE_US if TILE_US else LIMITS.l2_bandwidth / 1e6  # bytes per us
N_TILES = TIMED_N // 128
print(f"a small kernel: {SMALL_US:.1f} us; L2 in step 7: {L2_RATE / 1e6:.1f} TB/s")


def dram_us(count):
    return count / LIMITS.copy_bandwidth * 1e6


def tiles_per_sm(which, tokens):
    return -(-sum(-(-rows // tokens) for rows in TIMED_LENGTHS[which]) * N_TILES // LIMITS.sm_count)


def l2_bytes(which, tokens, box=None):
    """Bytes from L2: a tile loads 128 rows of weight, and ``box`` rows of X or just those of its group."""
    tiles = sum(-(-rows // tokens) for rows in TIMED_LENGTHS[which])
    return N_TILES * TIMED_K * (128 * tiles + (box * tiles if box else sum(TIMED_LENGTHS[which])))


def memory_us(which, count):
    return max(dram_us(BOUND[which][1]), count / L2_RATE)


def part_saved(which, before, after):
    """The part of the time that is saved, by the model of memory, if ``after`` bytes come from L2."""
    return 1 - memory_us(which, after) / memory_us(which, before)


# %% [markdown]
# ### Step 8: torch's loop
#
# The best case of a loop: lengths on the CPU, no copies of the results.


# %%
def run_loop(p):
    return topic.scaled_mm_loop(p, list(zip([0, *p.ends], p.ends, strict=False))), "fast accumulation"


measure("torch", run_loop)

# %% [markdown]
# With 8192 tokens the loop reaches more than two fifths of the roofline. With 32 it takes twice the lower bound. The
# call time is several times the kernel time.
#
# ### Step 9: padding, one tensor map
#
# **Idea.** CuTe's tiled copies divide a tensor into boxes, so tiles begin at multiples of the box. Groups do not
# (red bars: tiles with rows of two groups). The article's solutions: **pad** each group, or make a tensor map per
# group.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.tile_starts([5, 3, 9, 2], 4)

# %% [markdown]
# This step pads, as in notebook 03. The folded cell contains step 7's kernel, with the changes that its output shows,
# and `Padded`, which copies rows to padded positions and results back.
#
# **Predicted gain.** The step has 13 small kernels, copies of `X` and `Y`, and a GEMM, for which the model of waves
# holds: a CTA fills an SM, so tiles do not overlap.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_padded(tokens, stages):
    tile, wait, fma = make_wgmma_tile(tokens, "e4m3"), make_wgmma_wait(tokens, 0), make_fma(tokens)
    release_registers, request_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)
    stage_bytes, zeros = TILE_BYTES + tokens * BLOCK_K, (np.float32(0),) * (tokens // 2)
    store_tile, out_offset = make_store_tile(tokens), stages * stage_bytes
    full = (out_offset + 2 * tokens * 128) // 8
    empty = full + stages

    @cuda.jit
    def kernel(map_x, map_weight, map_y, group_of_tile, y_scale, k):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        row, column = int32(cuda.blockIdx.x * tokens), int32(cuda.blockIdx.y * 128)
        init_barriers(barriers, full, empty, stages)
        g = group_of_tile[cuda.blockIdx.x]
        k_blocks, stage = int32((k + BLOCK_K - 1) >> 7) if g >= 0 else int32(0), int32(0)
        if warp >= 8:
            release_registers()
            if warp == 8 and elect_sync(FULL_MASK):
                phase = uint32(1)
                for block in range(k_blocks):
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    load_tile(
                        smem,
                        stage * stage_bytes,
                        map_x,
                        map_weight,
                        block,
                        row,
                        column,
                        g,
                        barriers,
                        full + stage,
                        stage_bytes,
                    )
                    stage, phase = advance(stage, phase, stages)
        elif g >= 0:
            request_registers()
            total, half, phase = zeros, int32((warp >> 2) * (64 * BLOCK_K)), uint32(0)
            for _ in range(k_blocks):
                mbarrier_wait_parity(barriers, full + stage, phase)
                a = wgmma_descriptor(smem, stage * stage_bytes + half)
                b = wgmma_descriptor(smem, stage * stage_bytes + TILE_BYTES)
                product = wait(tile(a, b))
                if lane == 0:
                    mbarrier_arrive(barriers, empty + stage)
                total = fma(total, product, y_scale[g])
                stage, phase = advance(stage, phase, stages)
            store_tile(smem, out_offset, map_y, total, row, column, warp, lane)

    return kernel, stages * (stage_bytes + 16) + 2 * tokens * 128


PAD_TOKENS = 16 if simulator.ENABLED else 64


class Padded:
    """Buffers for padded rows, and the three parts: where rows go, the copies, and the GEMM."""

    def __init__(self, p, tokens=PAD_TOKENS):
        self.p, self.tokens, self.tiles = p, tokens, len(p.x) // tokens + GROUPS  # the most that there can be
        self.x = torch.zeros(self.tiles * tokens, K, dtype=torch.uint8, device=DEVICE)
        self.y = torch.empty(len(self.x), N, dtype=BF16, device=DEVICE)
        self.rows = torch.arange(len(p.x), dtype=torch.int32, device=DEVICE)
        self.starts = torch.arange(self.tiles, device=DEVICE) * tokens
        self.group_of_tile = torch.empty(self.tiles, dtype=torch.int32, device=DEVICE)
        maps = (self.x.view(FP8), (tokens, BLOCK_K)), (p.weight, (1, 128, BLOCK_K)), (self.y, (tokens, 64))
        self.maps = [TensorMap(tensor, box, swizzle=128) for tensor, box in maps]
        self.kernel, self.shared_bytes = make_padded(tokens, STAGES)

    def __call__(self):
        p, padded = self.p, (self.p.seqlens + self.tokens - 1) // self.tokens * self.tokens
        ends = padded.cumsum(0)
        group = torch.searchsorted(p.cu_seqlens[1:], self.rows, right=True)
        place = self.rows + (ends - padded - p.cu_seqlens[:-1])[group]
        group_of_tile = torch.searchsorted(ends, self.starts, right=True)
        self.group_of_tile.copy_(torch.where(group_of_tile < GROUPS, group_of_tile, -1))
        self.x.index_copy_(0, place, p.x.view(torch.uint8))
        self.multiply()
        return torch.index_select(self.y, 0, place, out=p.out)

    def multiply(self):
        launch(
            self.kernel,
            (self.tiles, -(-N // 128)),
            384,
            *self.maps,
            self.group_of_tile,
            self.p.y_scale,
            K,
            shared_bytes=self.shared_bytes,
        )


def run_padded(p):
    if "padded" not in p.made:
        p.made["padded"] = Padded(p)
    return p.made["padded"]()


diff(make_epilogue, make_padded)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
SMALL_KERNELS = 13


def padded_us(which):
    """Predicted times of the GEMM, and of what precedes and follows it."""
    copies = dram_us(RECORDED[which] * (2 * TIMED_K + 4 * TIMED_N))
    gemm = max(dram_us(BOUND[which][1]), tiles_per_sm(which, 64) * (TILE_US or 0))
    return gemm, copies + SMALL_KERNELS * SMALL_US


gains = {which: (us("torch", key) or 0) - sum(padded_us(which)) for which, key in KEYS.items()}
measure("padding, one tensor map", run_padded, after="torch", predicted_gain_us=gains)
if not simulator.ENABLED and us("padding, one tensor map") > us("torch"):
    ladder.rows[-1]["slower"] = True  # drawn in grey

# %% jupyter={"source_hidden": true} tags=["hide-input"]
if alone := kernel_time([p.made["padded"].multiply for p in PROBLEMS["main"]]):
    ladder.rows[-1]["gemm_us"] = round(alone.median, 2)
GEMM_ALONE_US = us("padding, one tensor map", "gemm_us")
if GEMM_ALONE_US:
    rest_us = us("padding, one tensor map") - GEMM_ALONE_US
    gemm, rest = padded_us("main")
    print(
        f"2048 tokens: the GEMM alone takes {GEMM_ALONE_US:.0f} us (model: {gemm:.0f}), the rest {rest_us:.0f} us ({rest:.0f})"
    )

# %% [markdown]
# **Explanation.** Slower than the loop with 2048 and 8192 tokens, faster with 32. The GEMM takes about as long as
# predicted, far longer than reading the weights: each CTA starts with empty stages. The rest takes longer than
# predicted.
#
# ### Step 10: a tensor map per group (`update_grouped_tma`)
#
# **Idea.** hpc-ops' solution: group `i` of `X` begins at row `cu_seqlens[i]` and has `seqlens[i]` rows, so each group
# gets its own tensor map; the one of `Y` clips a tile's last rows. A small kernel makes the maps. Its last CTA counts
# **tiles**, `ceil(seqlens[g] / kTileM)`, and their prefix sum. Our port:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown("```python\n" + inspect.getsource(update_grouped_tma.make_update_grouped_tma) + "```")

# %% [markdown]
# The kernel copies a **template** to shared memory, where `tensormap.replace` changes address and number of rows.
# `tensormap.cp_fenceproxy` copies the map to global memory and is a **release**. TMA caches tensor maps, so the thread
# that issues the copies must **acquire** them. The article also waits for bulk copies, but there are none. The
# article's example of the prefix sum:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ARTICLE = {"a": 3, "b": 0, "c": 4, "d": 2}  # tiles of four groups
counted = topic.make_problem(SMALL.weight, torch.tensor([16 * tiles for tiles in ARTICLE.values()], dtype=torch.int32))
scan = HpcOpsGroupGemm(
    counted.x,
    counted.weight,
    counted.seqlens,
    counted.cu_seqlens,
    counted.y_scale,
    counted.out,
    group_gemm.HpcOpsConfig(tile_m=16),
    1,
)
scan.update_maps()
EXCLUSIVE, AGGREGATE = scan.cu_tiles.tolist()[:-1], scan.cu_tiles.tolist()[-1]
values = list(ARTICLE.values())
print("input:    ", values)
print("exclusive:", EXCLUSIVE, "as it should be:", EXCLUSIVE == [sum(values[:i]) for i in range(4)])
print("total:    ", AGGREGATE)
print("inclusive:", [a + b for a, b in zip(EXCLUSIVE, values, strict=True)])

# %% [markdown]
# One map with three dimensions describes all weights. The article supposes that with dimensions (num_group, n, k) a
# box extends along the first two; the cell loads a box of one weight, then tries that:


# %%
@cuda.jit
def load_a_box(map_weight, out, k, n, g):
    smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
    if cuda.threadIdx.x == 0:
        mbarrier_init(barriers, 128, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(barriers, 128, 8 * 128)
        tma_load_3d(smem, 0, map_weight, 0, k, n, g, barriers, 128)
    cuda.syncthreads()
    mbarrier_wait_parity(barriers, 128, uint32(0))
    for i in range(cuda.threadIdx.x, 8 * 128, 32):
        out[i] = smem[i]


box = torch.zeros(8, 128, dtype=torch.uint8, device=DEVICE)
launch(load_a_box, 1, 32, TensorMap(SMALL.weight, (1, 8, 128)), box, 128, 40, 2, shared_bytes=1032)
BOX_MATCHES = torch.equal(box, SMALL.weight[2, 40:48, 128:].view(torch.uint8))
print("box (1, 8, 128) at k 128, n 40, group 2, is weight[2, 40:48, 128:256]:", BOX_MATCHES)
try:
    OTHER_BOX = TensorMap(SMALL.weight, (4, 8, 1)) and "TMA takes it"
except ValueError as error:
    OTHER_BOX = str(error)
print("box (4, 8, 1):", OTHER_BOX)

# %% [markdown]
# TMA rejects the second box: its innermost extent must be a multiple of 16 bytes.
#
# **The main kernel** is step 7 made **persistent**: one CTA per SM computes one tile after another. The producer loads
# the next tile's first stages while the consumers compute the current tile. Both call `get_next_tile`:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(
    "```python\n" + "\n\n".join(map(inspect.getsource, (group_gemm.make_producer, group_gemm.make_consumer))) + "```"
)

# %% [markdown]
# CTA `b` computes tiles `b`, `b + 132` and so on. A scheduler maps tile `i` to (group, m, n):
#
# - **Horizontal.** `m, n = divmod(i, n_tiles)`: neighbouring CTAs share tokens.
# - **Vertical.** `n, m = divmod(i, m_tiles)`: neighbouring CTAs share columns.
#
# In the figure, tiles in one column run at the same time.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown("```python\n" + "\n".join(map(inspect.getsource, (schedulers.horizontal, schedulers.vertical))) + "```")


# %%
def schedule(name, tiles, n_tiles, blocks):
    """Each block's tiles, (group, m, n), in its order."""
    table, groups = list(tiles), len(tiles)
    if name == "vertical":
        table = [sum(tiles[:g]) for g in range(groups + 1)]
    schedules = [[] for _ in range(blocks)]
    for first in range(blocks):
        block, g, before = first, 0, 0
        while g < groups:
            g, before, m, n = getattr(schedulers, name)(table, 0, groups, n_tiles, block, g, before)
            if g < groups:
                schedules[first].append((int(g), int(m), int(n)))
            block += blocks
    return schedules


draw.schedules({name: schedule(name, [2, 1, 3], 4, 5) for name in ("horizontal", "vertical")}, 3)

# %% [markdown]
# In the last **wave** some CTAs are idle:


# %%
def waves(lengths, n, tokens, blocks=LIMITS.sm_count):
    """Tiles, waves, and the share of the blocks' time in which there is something to do."""
    tiles = sum(-(-int(rows) // tokens) for rows in lengths) * -(-n // 128)
    count = -(-tiles // blocks)
    return tiles, count, tiles / (count * blocks)


for rows, groups, n in ((32, 32, 4096), (2048, 32, 4096), (8192, 32, 4096), (2048, 32, 7168), (512, 8, 7168)):
    lengths = topic.random_lengths(groups, rows)
    tiles, count, busy = waves(lengths, n, select_tile_m(rows // groups))
    print(f"{rows:5} tokens, {groups:2} groups, N {n}: {tiles:5} tiles, {count:3} waves, {100 * busy:.0f} % busy")

# %% [markdown]
# **Predicted gain.** Step 9's time besides its GEMM, less a small kernel. The overlap of tiles is not modelled. The
# folded `hpc_ops_step` runs our port.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def hpc_ops_step(name, tokens=16 if simulator.ENABLED else 64, **options):
    """``run(problem)`` for our Numba port of hpc-ops' two kernels."""
    layout = group_gemm.SharedMemoryLayout(group_gemm.HpcOpsConfig(tile_m=tokens))
    available = 227 * 1024 - 4 * 257 - 128 - 2 * layout.output_bytes
    stages = STAGES if simulator.ENABLED else min(8, available // layout.stage_bytes)
    dependent = options.pop("dependent", False)
    config = group_gemm.HpcOpsConfig(tile_m=tokens, stages=stages, **options)

    def run(p):
        if name not in p.made:
            tensors = p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.out
            p.made[name] = HpcOpsGroupGemm(*tensors, config, dependent=dependent)
        return p.made[name]()

    return run


run_horizontal = hpc_ops_step("horizontal", schedule="horizontal")
gains = {"main": us("padding, one tensor map") - GEMM_ALONE_US - SMALL_US if GEMM_ALONE_US else 0}
measure("tensor map per group", run_horizontal, after="padding, one tensor map", predicted_gain_us=gains)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
update_us = kernel_time([lambda p=p: p.made["horizontal"].update_maps() for p in PROBLEMS["main"]])
if update_us:
    ladder.rows[-1]["update_us"] = round(update_us.median, 2)
UPDATE_US = us("tensor map per group", "update_us") or 0
if UPDATE_US:
    print(f"update_grouped_tma alone: {UPDATE_US:.2f} us")

# %% [markdown]
# **Explanation.** Tiles overlap, so the main kernel is also faster than step 9's GEMM. With 32 and 2048 tokens the step
# is faster than the loop. With 8192 it is much slower: four or five tiles per group load the same weights (see step
# 13).
#
# **Exercise 3.** Two persistent CTAs of 4 threads add `x[row] * y_scale[group]` to each `y[row]`, by tiles of 4 rows, a
# thread per row. As above, groups are not padded, and a tile has rows of only one group. Find two mistakes.


# %%
@cuda.jit
def scale_groups(x, y_scale, seqlens, y):
    thread, tile = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    g, first, before = int32(0), int32(0), int32(0)  # a group, its first row, and the tiles of earlier groups
    while g < seqlens.shape[0]:
        tiles = seqlens[g] // 4
        if tile < before + tiles:
            row = 4 * (tile - before) + thread
            if first + row < x.shape[0]:
                y[first + row] += x[first + row] * y_scale[g]
            tile += cuda.gridDim.x
        else:
            first += seqlens[g]
            before += tiles
            g += 1


exercise("grouped_gemm-3").check(scale_groups)

# %% [markdown]
# ### Step 11: vertical scheduler
#
# **Idea.** The tiles of a group that share weights run at the same time. hpc-ops uses it for large N and K.
#
# **Predicted gain.** None: either order reads the weights from DRAM once.

# %%
run_vertical = hpc_ops_step("vertical", schedule="vertical")
gains = dict.fromkeys(KEYS, 0.0)
measure("vertical scheduler", run_vertical, after="tensor map per group", predicted_gain_us=gains)
print("hpc-ops takes", {True: "horizontal", False: "vertical"}[use_horizontal(4096, 7168)])

# %% [markdown]
# The differences are small.
#
# **Exercise 4.** Triton's tutorial on matrix multiplication calls a third order *grouped ordering*: bands of 8 token
# tiles, the last possibly smaller, one after the other, and vertical order within a band. Map the number of a tile to
# `(m, n)`, for one group of `m_tiles` x `n_tiles` tiles.

# %%
in_bands = ...  # your answer: lambda tile, m_tiles, n_tiles: ...
exercise("grouped_gemm-4").check(in_bands)

# %% [markdown]
# ### Step 12: programmatic dependent launch (PDL)
#
# **Idea.** CTAs of the main kernel start before `update_grouped_tma` has ended, and wait in `griddepcontrol.wait`.
#
# **Predicted gain.** At most the time of the small kernel, whatever the number of tokens.

# %%
gains = dict.fromkeys(KEYS, UPDATE_US)
run_dependent = hpc_ops_step("dependent", dependent=True)
measure("PDL", run_dependent, after="vertical scheduler", predicted_gain_us=gains, slower=True)

# %% [markdown]
# **Explanation.** Slower with 2048 tokens, within the noise with 32 and 8192. The cause is not known.
#
# ### Step 13: kTileM by the average
#
# **Idea.** The article chooses `kTileM` by the average number of tokens per group: 16, 32, 48 up to these averages, 64
# above. Each tile loads 128 x 128 weights per iteration, however few its tokens.
#
# **Predicted gain.** The part of the time that is saved in the model of memory: larger tiles load weights from L2 fewer
# times. The output has the model's times and the measured ones; the step is the fastest tile for 2048 tokens.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
TOKENS = (8,) if simulator.ENABLED else (8, 16, 32, 48, 64, 96, 128)
BY_TILE = {}
for tokens in TOKENS:
    run = hpc_ops_step(f"tokens {tokens}", tokens=tokens)
    BY_TILE[tokens] = {which: kernel_us(run, which) for which in SIZES}
for row in ladder.rows:
    if row["step"] == "vertical scheduler" and not simulator.ENABLED:
        row["by_tile"] = {str(tokens): own for tokens, own in BY_TILE.items()}
KNOWN_TILES = (ladder.row("vertical scheduler") or {}).get("by_tile", {})
for tokens in (8, 16, 32, 48, 64, 96, 128):
    own, words = KNOWN_TILES.get(str(tokens), {}), []
    for which, label in LABELS.items():
        measured = f", measured {own[which]:.0f}" if own else ""
        words.append(f"{label}: model {memory_us(which, l2_bytes(which, tokens)):.0f}{measured} us")
    print(f"kTileM {tokens:>3}: " + "; ".join(words))
if not KNOWN_TILES:
    print("no times are recorded")


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def best_tile(which, most=None):
    """The fastest kTileM for a size, of those up to ``most``, or None."""
    found = {int(tokens): own[which] for tokens, own in KNOWN_TILES.items() if not most or int(tokens) <= most}
    return min(found, key=found.get) if found else None


AVERAGES = {"few": 1, "main": 64, "many": 256}
for which, average in AVERAGES.items():
    if KNOWN_TILES:
        print(
            f"{average:3} tokens per group: the article takes {select_tile_m(average)}, the fastest is "
            f"{best_tile(which)}; up to 64 it is {best_tile(which, 64)}"
        )
best = best_tile("main") or TOKENS[-1]
run_adapted = hpc_ops_step(f"tokens {best}", tokens=best)
saved = {which: part_saved(which, l2_bytes(which, 64), l2_bytes(which, best)) for which in KEYS}
gains = {which: saved[which] * (us("vertical scheduler", key) or 0) for which, key in KEYS.items()}
measure("kTileM by the average", run_adapted, after="vertical scheduler", predicted_gain_us=gains)

# %% [markdown]
# **Explanation.** With 2048 tokens each group is now one tile. With 32 large tiles are slower, which the model does not
# explain. With 8192 tokens small tiles are much slower; from 64 on the gains are smaller than the model's.
#
# ## 7. Beyond hpc-ops
#
# ### Step 14: one tensor map for X
#
# **Idea.** A TMA box may begin at any row, so one map of all of `X` suffices. A group's last tile also loads rows of
# the *next* group, but these affect only rows of `Y` that its map clips.
#
# **Predicted gain.** A loss, by the model of memory: each tile loads a whole box of `X`, also the rows that a map per
# group replaces by zeros. With 2048 tokens DRAM remains the limit.

# %%
run_whole_x = hpc_ops_step("whole x", tokens=best, whole_x=True)
saved = {which: part_saved(which, l2_bytes(which, best), l2_bytes(which, best, best)) for which in KEYS}
gains = {which: saved[which] * (us("kTileM by the average", key) or 0) for which, key in KEYS.items()}
measure("one tensor map for X", run_whole_x, after="kTileM by the average", predicted_gain_us=gains)

# %% [markdown]
# **Explanation.** With 32 tokens the loss is much larger than predicted, with 8192 it does not show (causes not
# measured).
#
# ### Step 15: no per-group maps
#
# **Idea.** The package's kernel (`moe_numba/grouped_gemm/`) changes four things at once, not measured separately:
#
# - **Stores** (`common/store_tile.py`). Threads store the group's own rows, so `Y` needs no maps. One warpgroup stores
#   while the other multiplies.
# - **No kernel before it** (`wgmma/kernel.py`). CTAs count the tiles. Tensor maps are kernel parameters and need no
#   acquire.
# - **Order of tiles** (`scheduler.py`). By group, then column, tokens innermost, so that concurrent CTAs share data in
#   L2.
# - **Even tiles** per group.
#
# The folded `package_step` launches it.
#
# **Predicted gain.** The kernel that makes the maps, and the stores of each SM's tiles (as in step 7). The effects of
# order and even tiles are not modelled.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
BLOCKS = 2 if simulator.ENABLED else torch.cuda.get_device_properties(0).multi_processor_count


def package_config(subtile_m, mma_n, stages, **more):
    """The package's configuration; in the simulator everything is small."""
    small = dict(subtile_m=16, mma_n=(16,), stages=3)
    given = small if simulator.ENABLED else dict(subtile_m=subtile_m, mma_n=mma_n, stages=stages)
    return GemmConfig(**given, **more)


def package_step(config):
    """``run(problem)`` for the package's kernel in one configuration."""

    def run(p):
        kernel, shared_bytes = final_kernel.make_kernel(config)
        boxes = (p.x, (SharedMemoryLayout(config).x_box_rows, 128)), (p.weight, (1, 128, 128))
        maps = [TensorMap(tensor, box, swizzle=128) for tensor, box in boxes]
        out = p.out.view(torch.int32)
        sizes = len(p.weight), len(p.x), 0, p.weight.shape[1], p.x.shape[1]
        unused = 0, 0, 0, p.x.view(torch.uint8), p.seqlens, len(p.x), 0  # of block scales and gathered rows
        launch(
            kernel,
            BLOCKS,
            THREADS,
            *maps,
            out,
            p.y_scale,
            p.seqlens,
            p.cu_seqlens,
            p.y_scale,
            p.y_scale,
            *sizes,
            *unused,
            shared_bytes=shared_bytes,
            cluster=config.cluster_size if config.cluster_size > 1 else None,
            dependent=True,
        )
        return p.out

    return run


ONE_SUBTILE = package_config(96, (96, 64), 7)
STORE_US = 2 * (96 * 128 * 2) / 128 / LIMITS.tensor_clock * 1e6  # of a tile
gains = {which: UPDATE_US + tiles_per_sm(which, 96) * STORE_US for which in KEYS}
run = package_step(ONE_SUBTILE._replace(warp_uniform=False))
measure("no per-group maps", run, after="one tensor map for X", predicted_gain_us=gains)

# %% [markdown]
# **Explanation.** The gains are much larger, most of all with 8192 tokens; their cause was not measured.
#
# ### Step 16: warp-uniform values
#
# **Idea.** wgmma takes descriptors from **uniform registers**, one per warp. The compiler cannot prove the stage
# number warp-uniform, so it moves descriptors there (`R2UR`). A shuffle from lane 0, `uniform(x)`, helps. Instructions
# without and with the shuffle:


# %%
def machine_codes(named):
    """The instructions that the compiler makes, in a process of its own; no GPU is needed. {name: MachineCode}."""
    text = "from moe_numba.grouped_gemm.wgmma.config import GemmConfig\nfrom moe_numba.grouped_gemm.wgmma.kernel import make_kernel"
    requests = {name: (f"make_kernel({config!r})[0]", SIGNATURE, THREADS, True) for name, config in named.items()}
    return compile_apart(text, requests)


WARP_UNIFORM = GemmConfig(subtile_m=96, mma_n=(96, 64), stages=7)
CODES = machine_codes({"without shuffle": WARP_UNIFORM._replace(warp_uniform=False), "with shuffle": WARP_UNIFORM})
for name, code in CODES.items():
    print(
        f"{name:<15} {len(code.opcodes or ())} instructions, {code.count('R2UR')} R2UR, "
        f"{code.count('S2UR', 'S2R')} reads of special registers, {code.count('QGMMA')} wgmmas"
    )

# %% [markdown]
# **Predicted gain.** With 32 and 2048 tokens memory is the limit: none. With 8192, if the consumers' instructions are
# the limit, the share of instructions that disappears.

# %%
before, after = (len(code.opcodes or ()) for code in CODES.values())
many_us = us("no per-group maps", "many_us") or 0
gains = {"main": 0.0, "few": 0.0, "many": many_us * (1 - after / before if before else 0)}
run = package_step(ONE_SUBTILE)
measure("warp-uniform values", run, after="no per-group maps", predicted_gain_us=gains)

# %% [markdown]
# With 8192 tokens the gain exceeds the share of instructions (cause not measured).
#
# ### Step 17: two subtiles
#
# **Idea.** More tokens per tile mean fewer bytes from L2, but registers limit a fragment. So a stage holds one tile of
# weights and two **subtiles** of up to 144 tokens, and a warpgroup keeps two accumulators.
#
# **Predicted gain.** 8192 tokens: most groups are one tile; the time falls with the bytes from L2. 2048: a loss. The
# smallest MMA has 120 columns, subtiles 32 tokens, so the MMAs take longer than reading from DRAM.

# %%
mma_us = tiles_per_sm("main", 288) * ITERATIONS * MMA_US * 2 * 120 / 128
saved = 1 - l2_bytes("many", 288, 288) / l2_bytes("many", 96, 96)
many_us = us("warp-uniform values", "many_us") or 0
gains = {"main": min(0.0, dram_us(BOUND["main"][1]) - mma_us), "many": saved * many_us}
run = package_step(package_config(144, (144, 136, 128, 120), 4, m_subtiles=2))
measure("two subtiles", run, after="warp-uniform values", predicted_gain_us=gains, slower=True)

# %% [markdown]
# **Explanation.** With 8192 tokens much of the predicted gain is reached. With 2048 the loss is larger than predicted:
# Probably MMAs and DRAM reads of about equal length do not overlap perfectly.
#
# ### Step 18: cluster of two CTAs
#
# **Idea.** The two CTAs of a **cluster** compute neighbouring columns of the same tokens, and each loads half of them
# with a **multicast**. A consumer warp arrives on both CTAs' `empty` barriers.
#
# **Predicted gain.** A tile of 128 tokens loads 128 + 64 rows per iteration: with 8192 tokens the time falls with the
# bytes from L2. With 2048 DRAM remains the limit.

# %%
saved = 1 - l2_bytes("many", 128, 64) / l2_bytes("many", 96, 96)
run = package_step(package_config(128, (128, 96, 64), 6, cluster_size=2))
gains = {"main": 0.0, "many": saved * many_us}
measure("cluster of two CTAs", run, after="warp-uniform values", predicted_gain_us=gains)
if took := us("cluster of two CTAs", "many_us"):
    iteration_us = took / (ITERATIONS * tiles_per_sm("many", 128))
    print(f"    8192 tokens: {iteration_us:.2f} us per iteration; the MMA takes {MMA_US:.2f} us")

# %% [markdown]
# **Explanation.** With 8192 tokens little is gained, so L2 traffic is not the main limit. An iteration takes longer
# than its MMA (last line): the steps of a warpgroup are dependent, and the clock may be lower than assumed ([lesson
# 08](08_block_scales.ipynb)).
#
# ### Step 19: final, the package's choice
#
# **Idea.** `moe_numba.course.bench.topics.grouped_gemm_tiles.tune` measures configurations and writes `config_table.py`. For the
# three sizes: small tiles with many stages, one subtile of 96, both in clusters of two, and two subtiles of 144.
#
# **Predicted gain.** None with 2048 tokens; 8192 take as long as in step 17, and 32 as long as reading from DRAM.


# %%
def run_package(p):
    return group_gemm_pertensor_fp8(p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.average, out=p.out)


few_us, many_us = (us("cluster of two CTAs", key) or 0 for key in ("few_us", "many_us"))
reading_us, two_subtiles_us = dram_us(BOUND["few"][1]), us("two subtiles", "many_us") or 0
gains = {"main": 0.0, "few": few_us - reading_us, "many": many_us - two_subtiles_us}
measure("final", run_package, after="cluster of two CTAs", predicted_gain_us=gains)

# %% [markdown]
# With 2048 tokens steps 15, 16, 18 and 19 differ little. Small tiles pay with 32 tokens, and two subtiles with 8192.
#
# ### The whole ladder
#
# All steps interleaved:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder.measure_all()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GEMM_CONFIG = topic.row_config("gate_up")


def recorded_us(step, rows, shape="gate_up", scaling="tensor", key="kernel_us"):
    """A step's time, or another field, from the record of the whole comparison, or None."""
    row = GEMM and records.find(GEMM, step=step, size={"rows": rows}, config=topic.row_config(shape, scaling))
    value = row and row.get(key)
    return value["median"] if isinstance(value, dict) else value


PEERS = records.peers(GEMM) if GEMM else []
times = {name.removeprefix("peer:"): recorded_us(name, 2048) for name in PEERS}
ladder.plot(floor_us=BOUND["main"][0], peers={name: time for name, time in times.items() if time})

# %% [markdown]
# ### A check must be able to fail
#
# Two wrong kernels: one gets a length that is one too small, one the neighbouring groups' scales.


# %%
def omits_a_row(p):
    lengths = p.seqlens.clone()
    lengths[lengths.argmax()] -= 1
    return group_gemm_pertensor_fp8(p.x, p.weight, lengths, p.cu_seqlens, p.y_scale, p.average, out=p.out)


def neighbours_scale(p):
    return group_gemm_pertensor_fp8(p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale.roll(1), out=p.out)


trial = Ladder("grouped_gemm_trial", ladder.check)
for wrong_step in (omits_a_row, neighbours_scale):
    trial.step(wrong_step.__name__, lambda run=wrong_step: run(poisoned(PROBLEMS["main"][0])), expect_wrong=True)

# %% [markdown]
# ## 8. Block scales
#
# With block scales, CUDA cores multiply each partial sum over 128 elements of K by a factor ([lesson
# 08](08_block_scales.ipynb)). Accuracy, where one token is twenty thousand times as large as the others:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
torch.manual_seed(3)
hard = torch.randn(len(SMALL.x), 256, device=DEVICE)
hard[7] *= 20000
matrices = torch.randn(SMALL.weight.shape, device=DEVICE)
(by_block, x_scale), (w_by_block, w_scale) = reference.quantise_rows(hard), reference.quantise_blocks(matrices)
one_scale = float(hard.abs().max()) / 448, float(matrices.abs().max()) / 448
by_tensor = (hard / one_scale[0]).to(FP8), (matrices / one_scale[1]).to(FP8)
lengths_and_starts = SMALL.seqlens, SMALL.cu_seqlens
true = reference.group_gemm(hard, matrices, *lengths_and_starts)
outputs = {
    "one scale": group_gemm_pertensor_fp8(
        *by_tensor, *lengths_and_starts, torch.full((4,), one_scale[0] * one_scale[1], device=DEVICE)
    ),
    "block scales": group_gemm_blockwise_fp8(by_block, w_by_block, *lengths_and_starts, x_scale, w_scale),
}
blocks_expected = reference.group_gemm_blockwise(by_block, w_by_block, *lengths_and_starts, x_scale, w_scale)
print("the blockwise kernel:", reference.mismatch(outputs["block scales"], blocks_expected) or "right")
for name, y in outputs.items():
    errors = (y.double() - true).norm(dim=1) / true.norm(dim=1)
    print(
        f"{name:<12} relative error against the unrounded numbers: the large token {100 * float(errors[7]):.1f} %, "
        f"the worst row {100 * float(errors.max()):.1f} %"
    )

# %% [markdown]
# The time of both kinds:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def with_blocks(p):
    if not hasattr(p, "x_scale"):
        topic.add_block_scales([p])
    return group_gemm_blockwise_fp8(p.x, p.weight, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale, p.average, out=p.out)


for which in SIZES:
    p = PROBLEMS[which][0]
    if which == "main" or not simulator.ENABLED:
        wrong = reference.mismatch(with_blocks(poisoned(p)), topic.expected_blockwise(p))
        assert not wrong, f"blockwise, {which}: {wrong}"
    stats = kernel_time(calls_of(with_blocks, which), launches=10, replays=15)
    for row in ladder.rows:
        if row["step"] == "final" and stats:
            row[f"blocks_{which}_us"] = round(stats.median, 2)
    key = "kernel_us" if which == "main" else f"{which}_us"
    if us("final", f"blocks_{which}_us") and us("final", key):
        print(
            f"{LABELS[which]}: {us('final', key):.0f} us with one scale per group, "
            f"{us('final', f'blocks_{which}_us'):.0f} us with block scales"
        )
if not us("final", "blocks_main_us"):
    print("no times are recorded")

# %% [markdown]
# Block scales cost time with 8192 tokens only.
#
# ## 9. More in the same launch
#
# ### The activation behind gate and up
#
# **Idea.** `silu(gate) * up` and rounding to FP8 follow an expert's first GEMM. If a CTA computes a tile of gate *and*
# the same tile of up, its epilogue can do both. The folded cell contains a separate kernel, `silu_and_mul_fp8`, and
# `fused_silu_and_mul`, which calls the package's.
#
# **Predicted gain.** The separate kernel: a launch, and the bytes that it reads and writes.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def silu_and_mul_fp8(y, scale, gate_up, rows, half):
    """``gate_up``: words of two bfloat16 numbers, ``half`` words a token; y: words of four in FP8."""
    warp, lane = int32((cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) >> 5), int32(cuda.threadIdx.x & 31)
    blocks = int32(half >> 7)
    row = int32(uint32(warp) // uint32(blocks))
    block = int32(warp - row * blocks)
    if row < rows:
        offset, largest = int64(row) * half + int32(block * 64 + 2 * lane), float32(0)
        values = cuda.local.array(4, float32)
        for i in range(2):
            gates, ups = uint32(gate_up[offset + i]), uint32(gate_up[offset + (half >> 1) + i])
            for h in range(2):
                g = uint_as_float(uint32(gates & uint32(0xFFFF0000)) if h else uint32(gates << uint32(16)))
                u = uint_as_float(uint32(ups & uint32(0xFFFF0000)) if h else uint32(ups << uint32(16)))
                values[2 * i + h] = g * rcp_approx(float32(1) + ex2_approx(g * float32(-1.4426950408889634))) * u
                largest = max(largest, abs(values[2 * i + h]))
        largest = int_as_float(redux_sync_max_s32(uint32(FULL_MASK), float_as_int(largest)))
        by = max(largest, float32(1e-10)) * float32(1 / 448)
        low = cvt_rn_satfinite_e4m3x2_f32(values[1] / by, values[0] / by)
        high = cvt_rn_satfinite_e4m3x2_f32(values[3] / by, values[2] / by)
        y[(int64(row) * half + block * 128) // 4 + lane] = int32(uint32(low | uint32(high << uint32(16))))
        if lane == 0:
            scale[row * blocks + block] = by


def activated_outputs(p):
    if not hasattr(p, "activated"):
        rows, half = p.out.shape[0], p.out.shape[1] // 2
        p.activated = (torch.empty(rows, half, dtype=FP8, device=DEVICE), torch.empty(rows, half // 128, device=DEVICE))
    return p.activated


def two_kernels(p):
    y, scale = activated_outputs(p)
    out, half = run_package(p), y.shape[1]
    launch(
        silu_and_mul_fp8,
        -(-len(y) * half // 128 // 8),
        256,
        y.view(torch.int32),
        scale,
        out.view(torch.int32),
        len(y),
        half,
    )
    return y, scale


def fused_silu_and_mul(p):
    given = p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.average
    return group_gemm_silu_and_mul_pertensor_fp8(*given, out=activated_outputs(p))


def small_activated():
    weight = topic.random_weight(4, 256, 256, device=DEVICE)
    p = topic.make_problem(weight, torch.tensor([5, 0, 9, 3], dtype=torch.int32))
    p.y_scale *= 0.02  # so that gate is neither all of a step nor nothing
    return p


def activation_error(output, p):
    """The relative error of a kernel's output; rounding to FP8 makes nearly all of it."""
    right = reference.silu_and_mul(reference.group_gemm(p.x, p.weight, p.seqlens, p.cu_seqlens, p.y_scale))
    y, scale = output
    return float((y.double() * scale.repeat_interleave(128, 1) - right).norm() / right.norm())


p = small_activated()
for name, run in (("two kernels", two_kernels), ("one kernel", fused_silu_and_mul)):
    error = activation_error(run(p), p)
    print(f"{name}: relative error {100 * error:.1f} %")
    assert error < 0.035
wrong_error = activation_error((p.activated[0].view(torch.uint8).roll(1, 0).view(FP8), p.activated[1]), p)
print(f"with rows exchanged: {100 * wrong_error:.0f} %")
assert wrong_error > 0.1

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ACTIVATION = {}
if N % 256 == 0:
    for which in SIZES:
        steps = {"GEMM alone": run_package, "two kernels": two_kernels, "one kernel": fused_silu_and_mul}
        found = kernel_times({name: calls_of(run, which) for name, run in steps.items()}, launches=10, replays=15)
        ACTIVATION[which] = {name: round(stats.median, 1) for name, stats in found.items() if stats}
ACTIVATION = keep("activation", ACTIVATION)
for which, found in ACTIVATION.items():
    gain_us = SMALL_US + dram_us(RECORDED[which] * (2 * TIMED_N + TIMED_N // 2))
    print(
        f"{LABELS[which]}: "
        + ", ".join(f"{name} {time:.0f} us" for name, time in found.items())
        + f"; {Judgement(found['two kernels'], found['one kernel'], gain_us)}"
    )
if not ACTIVATION:
    print("no times are recorded")

# %% [markdown]
# **Explanation.** With 2048 tokens the separate kernel takes longer than predicted, and the fused one no longer than
# the GEMM alone. With 32, where almost nothing can be saved, it is slower. With 8192 the fused GEMM is slower by as
# much as the separate kernel costs (cause not measured).
#
# ### Rows gathered while they are loaded
#
# **Idea.** Instead of a kernel that copies each token to its experts' rows, three warps of the producer warpgroup
# gather the tokens (`gather_indices`) with `cp.async`, and arrive on `full` after a proxy fence.
#
# **Predicted gain.** The copy of the rows and its launch. Not modelled: 96 threads issue 16-byte copies where one
# thread issued 32 KB.


# %%
def gathered_problem(p):
    """The same GEMM with rows from half as many tokens, each used twice on average."""
    if not hasattr(p, "tokens"):
        torch.manual_seed(5)
        p.tokens = p.x[: max(1, len(p.x) // 2)].clone()
        p.indices = torch.randint(len(p.tokens), (len(p.x),), dtype=torch.int32, device=DEVICE)
        p.copied = torch.empty_like(p.x)
    return p


def copy_and_multiply(p):
    p = gathered_problem(p)
    torch.index_select(p.tokens.view(torch.int32), 0, p.indices, out=p.copied.view(torch.int32))
    given = p.copied, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.average
    return group_gemm_pertensor_fp8(*given, out=p.out)


def multiply_gathered(p):
    p = gathered_problem(p)
    given = p.tokens, p.weight, p.seqlens, p.cu_seqlens, p.y_scale, p.average
    return group_gemm_pertensor_fp8(*given, out=p.out, gather_indices=p.indices)


copied = copy_and_multiply(poisoned(PROBLEMS["main"][0])).clone()
print("the same bits:", torch.equal(multiply_gathered(poisoned(PROBLEMS["main"][0])), copied))
assert torch.equal(PROBLEMS["main"][0].out, copied)
GATHERED = {}
for which in SIZES:
    steps = {"copy, then GEMM": copy_and_multiply, "gathered": multiply_gathered}
    found = kernel_times({name: calls_of(run, which) for name, run in steps.items()}, launches=10, replays=15)
    GATHERED[which] = {name: round(stats.median, 1) for name, stats in found.items() if stats}
GATHERED = keep("gathered", {which: found for which, found in GATHERED.items() if found})
for which, found in GATHERED.items():
    before, after = found.values()
    gain_us = SMALL_US + dram_us(2 * RECORDED[which] * TIMED_K)
    print(
        f"{LABELS[which]}, copy and GEMM, gathered: {before:.0f} -> {after:.0f} us; {Judgement(before, after, gain_us)}"
    )
if not GATHERED:
    print("no times are recorded")

# %% [markdown]
# **Explanation.** Gathering is always slower, most with 8192 tokens. The copy warps probably are the limit (not
# measured).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder.save()

# %% [markdown]
# ## 10. The sweep over tokens
#
# The figures show the record of `python -m moe_numba bench grouped_gemm`, of an earlier commit. `torch` is
# `_scaled_grouped_mm`, with a scale per row.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sweep(shape, series, label):
    """The times of all in ``series``, {label: {tokens: statistics}}, over the number of tokens; or a sentence."""
    if not GEMM or not series:
        return print("The comparison has not been recorded yet; `python -m moe_numba bench grouped_gemm` does it.")
    floors = records.series(GEMM, over="rows", value="floor_us", step="final", config=topic.row_config(shape))
    return plots.sweep_figure(
        series,
        xlabel="tokens in 32 groups",
        floor=floors,
        caption=plots.caption(GEMM),
        title=f"Grouped GEMM, N {topic.SHAPES[shape]['n']}, K {topic.SHAPES[shape]['k']}, {label}",
    )


sweep("gate_up", GEMM and topic.series_by_label(GEMM, "gate_up"), "one scale per group")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
sweep("down", GEMM and topic.series_by_label(GEMM, "down"), "one scale per group")

# %% [markdown]
# With block scales:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
BLOCKWISE = {}
for scaling, label in (("tensor", ", one scale"), ("block", ", block scales")) if GEMM else ():
    own = topic.series_by_label(GEMM, "gate_up", scaling)
    BLOCKWISE |= {name + label: points for name, points in own.items() if not name.startswith("torch")}
sweep("gate_up", BLOCKWISE, "one scale per group, and block scales")

# %% [markdown]
# The roofline:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
topic.roofline(GEMM, plots.caption(GEMM)) if GEMM else print("no roofline is recorded yet")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
for shape in topic.SHAPES if GEMM else ():
    for rows in topic.ROWS:
        row = records.find(GEMM, step="final", size={"rows": rows}, config=topic.row_config(shape))
        if row:
            took = row["kernel_us"]["median"]
            print(
                f"{shape:<8} {rows:5} tokens: {took:6.1f} us, {row['flops'] / took / 1e6:5.0f} TFLOP/s, "
                f"{row['bytes'] / took / 1e3:5.0f} GB/s, {100 * row['floor_us'] / took:3.0f} % of the roofline"
            )

# %% [markdown]
# Up to 512 tokens the kernel reaches about nine tenths of the roofline, from 8192 on about three fifths.
#
# ## 11. Defects found in hpc-ops
#
# Our port (`moe_numba/course/lessons/grouped_gemm/hpc_ops_port/group_gemm.py`) avoids these:
#
# - Two of three schedulers do not acquire the tensor maps.
# - The vertical scheduler divides by the number of tiles, which may be zero.
# - After `mbarrier.init` there is no `fence.mbarrier_init`, which TMA's proxy needs.
#
# ## 12. Sources
#
# - *CUTLASS CUTE 7: hpc-ops 之 group gemm & tma*, in Chinese, on [Tencent/hpc-ops](https://github.com/Tencent/hpc-ops),
#   `src/group_gemm/kernels.cuh`. We compare [its claims](../docs/claims.md#hpc-ops) with our measurements.
# - NVIDIA, *PTX ISA*.
# - *DeepSeek-V3 Technical Report*, section 3.3.2: accumulation in FP8 tensor cores.
# - Order of the steps: [SGEMM_CUDA](https://github.com/siboehm/SGEMM_CUDA),
#   [fast.cu](https://github.com/pranjalssh/fast.cu).
#
# ## The final kernel
#
# The kernel of `group_gemm_pertensor_fp8`:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown("```python\n" + inspect.getsource(final_kernel) + "\n```")
