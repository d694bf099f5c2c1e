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
# # Start here
#
# A mixture-of-experts (MoE) layer sends each token to a few of many small networks, the **experts**. Choosing the experts,
# sorting the tokens by expert, sending them to the GPUs that hold their experts, and multiplying them by the experts'
# weights takes a handful of GPU kernels. This course builds these kernels in Python with Numba CUDA. Most lessons start
# from a torch reference and end with the kernel that the package `moe_numba` ships.
#
# This page introduces what the lessons assume: how a kernel is launched, what threads, warps, CTAs and memory spaces
# are, how the simulator finds mistakes, and how times are measured. For this page you need Python and some torch, and no CUDA.
# The lessons are for people who want to write kernels: they count machine instructions, read PTX, and expect you to do so too.
#
# On Colab or Kaggle, clone the repository first (`!git clone`, then `%cd moe_numba/notebooks`). The next cell then installs the package.

# %%
import importlib.util
import subprocess
import sys

if importlib.util.find_spec("moe_numba") is None:
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-e", "..[cu12,notebooks]"], check=True)
    sys.path.insert(0, "..")  # this process does not see a package that is installed while it runs

import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% [markdown]
# `moe_numba.course` holds this course's helpers for figures, timing and exercises; each is explained where it is used.

# %%
import warnings

import numpy as np
import torch
from IPython.display import HTML, Markdown
from numba import cuda, float32

from moe_numba import doctor, simulator
from moe_numba.course.bench import records, rotating
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.draw.player import Player
from moe_numba.course.draw.shared_memory import shared_accesses
from moe_numba.course.draw.warp_frames import shuffles
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.start.draw import call_timeline
from moe_numba.course.lessons.start.exercises import repair
from moe_numba.course.pages import readme
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.source_diff import change
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # some launches are small on purpose


# %% [markdown]
# ## What you will build
#
# A token passes through the layer in this order. An **assignment** is one pair of a token and an expert that it chose.
#
# | lesson | what it builds | reference |
# |---|---|---|
# | [01](01_gate_prompt.ipynb) | gate, for a prompt: choose the experts of thousands of tokens | SGLang's `moe_fused_gate` |
# | [02](02_gate_decode.ipynb) | gate, for decode: the chain of one token | the same |
# | [03](03_align_published.ipynb) | alignment as published: sort the assignments by expert | SGLang's `moe_align_block_size` |
# | [04](04_align_one_launch.ipynb) | alignment in one launch | the same |
# | [05](05_shared_experts.ipynb) | shared experts, which every token visits | SGLang |
# | [06](06_hopper_gemm.ipynb) | a GEMM with Hopper's asynchronous copies and tensor cores | CUTLASS |
# | [07](07_grouped_gemm.ipynb) | grouped GEMM: multiply each expert's tokens by its weights | hpc-ops |
# | [08](08_block_scales.ipynb) | a GEMM with block scales | DeepGEMM |
# | [09](09_w4_weights.ipynb) | a GEMM with 4-bit weights, for few tokens | Marlin |
# | [10](10_dispatch_layout.ipynb) | dispatch layout: count what goes to which GPU | DeepEP |
# | [11](11_talk_to_a_peer.ipynb) | talk to another GPU: release and acquire, flags, rings | DeepEP |
# | [12](12_dispatch.ipynb) | dispatch: send the tokens to the GPUs of their experts | DeepEP |
# | [13](13_combine.ipynb) | combine: return the results, and add them up | DeepEP |
# | [14](14_low_latency.ipynb) | dispatch and combine for decode | DeepEP |
# | [15](15_moe_layer.ipynb) | the experts of a whole layer in one call | vLLM and SGLang |
# | [16](16_one_kernel.ipynb) | a layer on several GPUs in one kernel | DeepGEMM |
#
# 01 and 03 need this page only, and 03 is the shorter one. 02 goes on from 01; 04 from 02 and 03; 05 takes the gate of 02. 06 to 09 are a course of
# their own on Hopper's tensor cores, 10 to 14 one on several GPUs. 15 brings all of them together, and 16 puts a layer on several GPUs into one kernel. The documentation compares [the claims of the
# articles](../docs/claims.md) that the lessons follow with our measurements.
#
# Here are kernel times of the package's kernels on an H200, beside the fastest of the other kernels that were measured in the same
# run. The ratio is the other time divided by the package's: below 1, the other kernel is faster. [Measurements](../docs/measurements.md) has all that was measured.

# %%
Markdown(readme.headline())

# %% [markdown]
# ## 1. A first kernel
#
# A **kernel** is a function that many **threads** execute at the same time. The decorator `@cuda.jit` compiles a Python
# function into one. Each thread computes its own index and processes one element:

# %%
SIMULATED = simulator.ENABLED
DEVICE = "cpu" if SIMULATED else "cuda"
SIZE = 1000 if SIMULATED else 10_000_000  # elements; try others


@cuda.jit
def add_one(x, y):
    i = cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x  # cuda.grid(1) is short for this
    if i < len(x):
        y[i] = x[i] + float32(1)  # float32 plus a Python int would be computed in float64


x = torch.rand(SIZE, device=DEVICE)
y = torch.empty_like(x)
threads = 256
blocks = -(-SIZE // threads)  # rounded up, so that there are enough threads
add_one[blocks, threads](x, y)
print("y == x + 1:", torch.equal(y, x + 1))

# %% [markdown]
# `add_one[blocks, threads](x, y)` **launches** the kernel: the numbers in brackets are the launch configuration, the
# arguments follow in parentheses.
#
# - The threads are organised in **CTAs** (cooperative thread arrays), which CUDA also calls thread *blocks*. All CTAs of a
#   launch are the **grid**. `cuda.blockIdx.x` is the index of the CTA in the grid, `cuda.blockDim.x` the number of threads
#   per CTA, and `cuda.threadIdx.x` the index of the thread in its CTA.
# - If `SIZE` is no multiple of 256, the last CTA has threads without an element; `if i < len(x)` keeps them from accessing
#   memory outside the arrays.
# - A launch returns before the kernel has finished. Later operations on the same **stream**, a queue of work for the GPU,
#   wait for it.
#
# ### Warps and memory
#
# The hardware executes threads in groups of 32, called **warps**. A thread's position in its warp is its **lane**. One
# instruction is issued for a whole warp; lanes that do not take part in a branch idle while the others execute it
# (**divergence**). A GPU has tens to hundreds of **SMs** (streaming multiprocessors); each CTA runs on one SM.
#
# | memory | who can access it | size on an H200 | written in Numba |
# |---|---|---|---|
# | registers | one thread | 255 x 4 bytes per thread | local variables |
# | local memory | one thread; lies in DRAM, cached | 512 KB per thread | `cuda.local.array` with an index that is no constant; registers that do not fit |
# | shared memory | the threads of a CTA | 48 KB per CTA, up to 227 KB if it is sized at the launch | `cuda.shared.array` |
# | L1 cache | the CTAs of an SM | 256 KB per SM, together with shared memory | not addressed directly |
# | L2 cache | all SMs | 60 MB | not addressed directly |
# | global memory | all threads, and the CPU through copies | 141 GB | arrays passed as arguments |
#
# `doctor` prints what this computer has. (sm_90a is the instruction set of Hopper GPUs. The line "results" is for
# developers: it says whether records are older than their kernels.)

# %%
print("\n".join(doctor.report()))

# %% [markdown]
# ## 2. Threads that cooperate
#
# ### Shared memory and barriers
#
# 64 threads, two warps, reverse 64 numbers: each thread writes one to shared memory and reads another one. The thread that
# wrote it is in the other warp, so all threads must have written before any thread reads. `cuda.syncthreads()` is the
# **barrier** that ensures it: no thread continues before all threads of the CTA have reached it, and what they wrote before
# it is visible to all of them after it.
#
# (The kernels of this page run in a browser, too, with NumPy arrays instead of torch's: they are the examples "Start here" of the
# [playground](../docs/playground).)
#
# **Exercise 1.** The kernel below lacks the barrier. It is launched with one CTA of 64 threads. Run the cell, read the message,
# and repair the kernel.


# %%
@cuda.jit
def reverse(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    out[i] = tile[63 - i]


exercise("start-1").check(reverse)

# %% [markdown]
# The check ran the kernel in the **simulator**, with its race detector. A **data race** is a pair of accesses to the same
# memory that nothing orders, at least one of which is a write. The message names both threads, both lines, the memory,
# and what would order the accesses.
#
# The player steps through one order of the accesses, for 8 threads without the barrier. Blue: accessed in this step. Green:
# written earlier. Orange and "?": read before any thread wrote it, so the value is undefined. The simulator orders the
# threads of a warp independently, as CUDA permits; a GPU normally executes the store for all 8 at once, which hides this
# race until the threads belong to different warps.


# %%
@cuda.jit
def reverse_8(x, out):
    tile = cuda.shared.array(8, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    out[i] = tile[7 - i]


def race():
    with simulator.seed(1), simulator.trace(accesses=True) as events:
        reverse_8[1, 8](np.arange(8, dtype=np.float32), np.zeros(8, np.float32))
    title = "Reversing 8 numbers without a barrier"
    return Player(*shared_accesses(events, 8, 8), title).as_dict()  # on a GPU, the simulator is another process


player = Player.from_dict(in_simulator(race))
player

# %% [markdown]
# Steps 1, 2 and 8 of the 16, for viewers that run no scripts:

# %%
player.strip([0, 1, 7])

# %% [markdown]
# ### Atomic operations
#
# When many threads update one element, each must read, modify and write it as one indivisible step, an **atomic**
# operation. `count[0] = count[0] + 1` is three steps, between which other threads may run, so increments can be lost.
# `cuda.atomic.add(array, index, value)` is one.
#
# **Exercise 2.** Repair the kernel, which adds the number of positive elements of `x` to `count[0]`. It is launched with 4
# CTAs of 64 threads, and `x` has 256 elements or fewer. There are two mistakes.


# %%
@cuda.jit
def count_positive(x, count):
    i = cuda.grid(1)
    if x[i] > 0:
        count[0] = count[0] + 1


exercise("start-2").check(count_positive)

# %% [markdown]
# ### Shuffles
#
# The lanes of a warp can exchange registers without shared memory. `cuda.shfl_xor_sync(mask, value, distance)` returns
# the `value` of lane `lane ^ distance`. Five of these **shuffles**, at distances 1, 2, 4, 8
# and 16, leave the maximum of all 32 lanes in every lane: a **butterfly reduction**. The mask has a bit for each lane that
# takes part; all of these lanes must execute the shuffle.
#
# The player shows the first 16 lanes of a simulated run. After each shuffle a lane keeps the larger of the two values, which
# the next step shows as "before". Click on a lane to follow its value.


# %%
@cuda.jit
def warp_max(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    for k in range(5):
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << k))
    out[lane] = value


def butterfly():
    numbers = (np.arange(32) * 7 % 32).astype(np.int32)
    with simulator.trace() as events:
        warp_max[1, 32](numbers, np.zeros(32, np.int32))
    explain = lambda number, what, distance: f"Each lane receives the value of the lane at distance {distance}."
    return Player(*shuffles(events, explain=explain), "Butterfly maximum: what lanes 0 to 15 receive").as_dict()


player = Player.from_dict(in_simulator(butterfly))
player

# %% [markdown]
# Three of the five shuffles, for viewers that run no scripts:

# %%
player.strip([0, 1, 3])

# %% [markdown]
# ## 3. The simulator
#
# The simulator runs the Python source of a kernel on the CPU, with warps, CTAs, the asynchronous copies and
# tensor-core instructions of notebook 06, and several GPUs. Every notebook runs in it on any computer. On a machine with a GPU, cells that show
# mistakes start it in a process of its own (`in_simulator`), because a faulty kernel can hang a GPU.
#
# | fault | simulator | GPU |
# |---|---|---|
# | index out of bounds | error with thread, line and array | undefined; possibly a crash later |
# | data race | error with both threads and lines (`simulator.races()`) | wrong result, sometimes |
# | lane missing from a shuffle | error with the lane and the line | undefined |
# | deadlock | error that lists what each thread waits for | the kernel never ends |
# | read of unwritten global memory | error (`simulator.races()`) | undefined value |
# | store that becomes visible late | `simulator.weak_memory()` runs the kernel with delayed stores | rare, timing-dependent |
#
# Threads run in an order that a **seed** determines, so that a failure can be repeated. The kernel below has a barrier,
# but still a race:


# %%
@cuda.jit
def double_neighbour(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    tile[i] = tile[(i + 1) % 64] * float32(2)  # the previous thread may not have read tile[i] yet
    cuda.syncthreads()
    out[i] = tile[i]


def try_seeds():
    x, message = torch.arange(64.0), "no race under any seed"
    for seed in range(4):
        out = torch.zeros(64)
        with simulator.seed(seed):
            double_neighbour[1, 64](x, out)
            wrong = int((out != 2 * x.roll(-1)).sum())
            found = "no race found"
            try:
                with simulator.races():
                    double_neighbour[1, 64](x, out)
            except simulator.DataRace as error:
                found, message = "race found", error
            print(f"seed {seed}: {wrong} of 64 elements are wrong; {found}")
    print(message)


in_simulator(try_seeds)

# %% [markdown]
# The number of wrong elements depends on the seed. A GPU normally executes the load of line 7 for all lanes of a warp, then the
# store. Only two threads read what the other warp writes: thread 31 reads `tile[32]`, and thread 63 reads `tile[0]`. The warp that
# comes first reads the right number, so at most one element is wrong, and only if one warp stores before the other loads. The race
# detector reports the race under every seed, because it checks whether something orders the two accesses, not which of them came
# first. Repair the kernel: load the neighbour into a variable, let all threads meet, then store. Run the cell again.
#
# ### Counters per source line
#
# The simulator has no clock, but it counts what the hardware would do. `simulator.profile()` reports executed
# instructions, divergence, memory transactions and bank conflicts for each line of the source. Shared memory has 32
# **banks**; the 4-byte word `w` lies in bank `w % 32`. If lanes of a warp access different words of one bank, the request
# takes several **wavefronts**. The kernel transposes a tile of 32 x 32 numbers, whose rows are stored 32 or 33 words apart.


# %%
@cuda.jit
def transpose(x, out, row_pitch):
    tile = cuda.shared.array(32 * 33, float32)
    column, row = cuda.threadIdx.x, cuda.threadIdx.y
    tile[row * row_pitch + column] = x[row, column]
    cuda.syncthreads()
    out[row, column] = tile[column * row_pitch + row]


def count_bank_conflicts():
    x, pages = torch.rand(32, 32), []
    for row_pitch in (32, 33):
        out = torch.empty(32, 32)
        with simulator.profile() as profile:
            transpose[1, (32, 32)](x, out, row_pitch)
        total = profile["transpose"].total
        correct = torch.equal(out, x.T)
        print(
            f"row pitch {row_pitch}: correct {correct}, {total.shared_load_requests} loads of a warp from shared memory "
            f"take {total.shared_load_wavefronts} wavefronts"
        )
        pages.append(profile.heatmap("bank_conflicts").body)
    return pages[0]


HTML(in_simulator(count_bank_conflicts))

# %% [markdown]
# The table belongs to a row pitch of 32. All bank conflicts, which are wavefronts beyond one per request, are in the last
# line. It reads a column of the tile, and with this pitch all words of a column lie in one bank.
#
# ### Choose the repair
#
# Here is a kernel that is right, and slow for several reasons. Each thread adds up a row of 64 numbers, keeps the sum in shared memory,
# in a place of 128 bytes, as one would on a CPU, where two threads should not write to one cache line; then it counts the sums above zero.


# %%
FULL = 0xFFFFFFFF  # all 32 lanes


@cuda.jit
def count_rows(x, count):
    sums = cuda.shared.array(256 * 32, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for column in range(64):
        total += x[t, column]
    sums[32 * t] = total
    cuda.syncthreads()
    if sums[32 * t] > 0:
        cuda.atomic.add(count, 0, 1)


def profile_rows():
    with simulator.profile() as profile:
        count_rows[1, 256](torch.randn(256, 64), torch.zeros(1, dtype=torch.int32))
    print(profile)


in_simulator(profile_rows)

# %% [markdown]
# A row of the table is a source line: how often warps executed it (`exec`), the share of lanes that took part (`lanes`), requests to global memory
# (`ld req`) and the sectors of each, requests to shared memory (`lds req`, `sts req`) and their wavefronts (`wavefr`), bank conflicts, the bytes that
# a lane accesses at a time (`width`), atomic operations (`atomics`), how many lanes of one of these update the same address at most (`contention`), and
# how often a warp waited at a barrier (`waits`). The **critical path** counts only the warp that has most to do between two barriers, which the others
# wait for.
#
# There are three proposals. **A** puts the sums side by side. **B** lets the 32 lanes of a warp read a row together. **C** counts within the warp first, so
# that one lane adds for all.


# %%
@cuda.jit
def side_by_side(x, count):  # A
    sums = cuda.shared.array(256, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for column in range(64):
        total += x[t, column]
    sums[t] = total
    cuda.syncthreads()
    if sums[t] > 0:
        cuda.atomic.add(count, 0, 1)


# %%
@cuda.jit
def rows_by_warps(x, count):  # B
    sums = cuda.shared.array(256 * 32, float32)
    t, lane, first = cuda.threadIdx.x, cuda.threadIdx.x % 32, cuda.threadIdx.x // 32 * 32
    for row in range(first, first + 32):
        total = x[row, lane] + x[row, lane + 32]
        for k in range(5):
            total += cuda.shfl_xor_sync(FULL, total, 1 << k)
        if lane == 0:
            sums[32 * row] = total
    cuda.syncthreads()
    if sums[32 * t] > 0:
        cuda.atomic.add(count, 0, 1)


@cuda.jit
def one_lane_adds(x, count):  # C
    sums = cuda.shared.array(256 * 32, float32)
    t = cuda.threadIdx.x
    total = float32(0)
    for column in range(64):
        total += x[t, column]
    sums[32 * t] = total
    cuda.syncthreads()
    ballot = cuda.ballot_sync(FULL, sums[32 * t] > 0)  # a bit for each lane
    if t % 32 == 0:
        cuda.atomic.add(count, 0, cuda.popc(ballot))


# %% [markdown]
# **Exercise 3.** Which proposal leaves the fewest transactions, that is sectors of global memory, wavefronts of shared memory, and lanes that add?
# Write "A", "B" or "C" instead of `...`. The counts appear with your answer.

# %%
repair.check(count_rows, {"A": side_by_side, "B": rows_by_warps, "C": one_lane_adds}, ...)

# %% [markdown]
# ## 4. Kernel time and call time
#
# A launch has two costs. **Kernel time** is what the GPU spends per launch, including the gap to the next
# one. The course measures it from many launches in one **CUDA
# graph**, a list of launches that the GPU executes without the CPU. **Call time** is what the CPU spends on the Python
# call, measured over many calls without waiting for the GPU.
#
# The next cell launches one kernel in two ways. `kernel[grid, block](...)` is Numba's launch, which inspects every argument
# and passes an array as its address, shape and strides. `launch` from `moe_numba.runtime` passes a tensor as a pointer to
# its first element and uses torch's current stream; a pointer has no length, so the kernel takes `n`. A `Ladder` runs each step, checks its output, and measures it. In the
# simulator, where nothing is timed, it shows what was recorded on an H200.


# %%
@cuda.jit
def add_one_pointer(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] + float32(1)


def check(outputs):
    result, expected = outputs
    wrong = int((~((result - expected).abs() <= 1e-6)).sum())
    return f"{wrong} of {result.numel()} elements differ" if wrong else None


small_x, small_y = torch.rand(1024, device=DEVICE), torch.empty(1024, device=DEVICE)
expected_y = small_x + 1
ladder = Ladder("start_here", check, "Launching and copying", "one row per thread")


def by_numba():
    add_one[4, 256](small_x, small_y)
    return small_y, expected_y


def by_launch():
    launch(add_one_pointer, 4, 256, small_x, small_y, 1024)
    return small_y, expected_y


for name, run in (("kernel[grid, block](...)", by_numba), ("launch(kernel, ...)", by_launch)):
    small_y.fill_(float("nan"))  # a kernel that writes nothing must not pass with an older result
    ladder.step(name, run, graph=False)

# %%
numba_us, launch_us = (
    ladder.median_us(name, "call_us") for name in ("kernel[grid, block](...)", "launch(kernel, ...)")
)
say("Numba's launch takes {numba:.0f} us of CPU time, `launch` {launch:.0f} us.", numba=numba_us, launch=launch_us)

# %% [markdown]
# In a loop of calls the longer of the two times limits the throughput. The figure shows consecutive calls of the package's
# gate, drawn from its recorded times. If the calls take longer than the kernels, the GPU waits for the CPU, and a faster
# kernel gains nothing. In a graph no kernel waits for the CPU. If the kernels take longer, the CPU runs ahead and its cost
# is hidden.

# %%
GATE, CALLS = records.recorded("gate"), records.recorded("call_time")
SAME = {"config": {"num_experts": 256, "num_expert_group": 8}, "dtype": "float32"}
kernel_us = {tokens: stats["median"] for tokens, stats in records.series(GATE, step="final", **SAME).items()}
call_us = records.find(CALLS, step="final, out=", operation="biased_grouped_topk")["call_us"]["median"]

call_timeline(
    {
        "64 tokens": (call_us, kernel_us[64]),
        "64 tokens, CUDA graph": (None, kernel_us[64]),
        "65536 tokens": (call_us, kernel_us[65536]),
    },
    caption="records gate and call_time: " + plots.caption(GATE),
)

# %% [markdown]
# **Exercise 4.** In microseconds, a kernel takes 6 and its call 9. A loop makes many calls without waiting for the GPU. What is
# the average time per iteration if the kernel becomes twice as fast? And if, instead, the call becomes twice as fast?

# %%
halved_kernel, halved_call = ..., ...
exercise("start-4").check((halved_kernel, halved_call))

# %% [markdown]
# ## 5. How to read a step
#
# The lessons improve a kernel step by step. A step has these parts: the measured **bottleneck**, the
# **idea**, a **prediction**, the code, a check of the result, the measured **gain**, and, where the
# prediction fails or comes true for another reason, an **explanation** that is measured as well. The page judges the prediction:
# *within a third* means that the predicted saving, and the predicted time, are both off by less than a third of themselves. In the first lessons the
# whole kernel stands on the page once, with **holes**; a step is then one function, which fills one hole, and which you can edit. Here is a step with
# whole kernels, as an example. Its starting point copies a matrix of 32 columns, one row per thread. `rotating` makes enough inputs that none is still
# in the L2 cache when it is used again; `copy_with` bundles what is checked and what is timed.

# %%
ROWS, COLUMNS = (64, 32) if SIMULATED else (1 << 19, 32)
SETS = rotating(lambda: torch.randn(ROWS, COLUMNS, device=DEVICE), ROWS * COLUMNS * 8)
copied = torch.empty(ROWS, COLUMNS, device=DEVICE)


@cuda.jit
def copy_rows(x, y, rows):
    row = cuda.grid(1)
    if row < rows:
        for column in range(COLUMNS):
            y[row * COLUMNS + column] = x[row * COLUMNS + column]


def copy_with(kernel, threads):
    """Return the call that is checked, and the calls that are timed: one per input, so that L2 does not hold them."""
    grid = -(-threads // 256)
    timed = [lambda x=x: launch(kernel, grid, 256, x, copied, ROWS) for x in SETS]

    def call():
        copied.fill_(float("nan"))
        timed[0]()
        return copied, SETS[0]

    return dict(call=call, timed=timed, size={"rows": ROWS, "columns": COLUMNS}, bytes=2 * ROWS * COLUMNS * 4)


ladder.step("one row per thread", **copy_with(copy_rows, ROWS))

# %% [markdown]
# ### Step: one element per thread
#
# **Bottleneck.** GPUs read and write global memory in **sectors** of 32 bytes. The profile counts how many sectors a load
# of a warp touches. If 32 lanes read 32 neighbouring floats, these are 4 sectors.


# %%
def sectors_per_load():
    x = torch.rand(64 * 32)
    with simulator.profile() as profile:
        copy_rows[1, 64](x, torch.empty_like(x), 64)
    total = profile["copy_rows"].total
    return total.global_load_sectors / total.global_load_requests


SECTORS = in_simulator(sectors_per_load, constants={"COLUMNS": COLUMNS})
say("Each load touches {sectors:.0f} sectors, and uses 4 of the 32 bytes of each.", sectors=SECTORS)

# %% [markdown]
# **Idea.** Let neighbouring lanes copy neighbouring elements: thread `i` copies element `i`. Such accesses are called
# **coalesced**.
#
# **Predicted gain.** If each sector were fetched again for every column, the time would be proportional to the number of
# sectors per load. (The step before is timed again beside the new one, so its time differs a little from the one above.)


# %%
@cuda.jit
def copy_elements(x, y, rows):
    i = cuda.grid(1)
    if i < rows * COLUMNS:
        y[i] = x[i]


change(copy_rows, copy_elements)

# %%
before_us = ladder.median_us("one row per thread")
ladder.step(
    "one element per thread",
    **copy_with(copy_elements, ROWS * COLUMNS),
    after="one row per thread",
    predicted_gain_us=(before_us or 0) * (1 - 4 / SECTORS),
)

# %% [markdown]
# **Explanation.** The prediction may be close, but its model cannot be right: it ignores the L1 cache, which may keep a sector until a
# warp needs its next columns, and it treats loads and stores alike, although stores always go to the L2 cache, each on its own. Four more
# kernels take the copy apart. `read_rows` reads whole rows and writes one sum per row. `write_rows` reads one number per row and writes whole
# rows. `read_then_write` copies by rows, but reads a whole row into registers before it writes, so no store comes between its loads.


# %%
@cuda.jit
def read_rows(x, y, rows):
    row, total = cuda.grid(1), float32(0)
    if row < rows:
        for column in range(COLUMNS):
            total += x[row * COLUMNS + column]
        y[row] = total


@cuda.jit
def write_rows(x, y, rows):
    row = cuda.grid(1)
    if row < rows:
        value = x[row]
        for column in range(COLUMNS):
            y[row * COLUMNS + column] = value


@cuda.jit
def read_then_write(x, y, rows):
    row, values = cuda.grid(1), cuda.local.array(COLUMNS, float32)
    if row < rows:
        for column in range(COLUMNS):
            values[column] = x[row * COLUMNS + column]
        for column in range(COLUMNS):
            y[row * COLUMNS + column] = values[column]


# %%
parts = {
    name: copy_with(kernel, threads)["timed"]
    for name, kernel, threads in (
        ("read by rows", read_rows, ROWS),
        ("written by rows", write_rows, ROWS),
        ("copied by rows", copy_rows, ROWS),
        ("read, then written by rows", read_then_write, ROWS),
        ("copied by elements", copy_elements, ROWS * COLUMNS),
    )
}
parts_us = ladder.times("parts of the copy", parts) or {}

# %%
rows_us, staged_us = parts_us.get("copied by rows"), parts_us.get("read, then written by rows")
read_us, write_us, both_us = (parts_us.get(name) for name in ("read by rows", "written by rows", "copied by elements"))
say(
    "Reading by rows takes {read:.0f} us, and writing by rows {write:.0f} us: {share:.0f} times as long as the whole coalesced copy "
    "({both:.0f} us). Stores of 4 bytes of a sector at a time cost much more than such loads.",
    read=read_us,
    write=write_us,
    both=both_us,
    share=write_us and both_us and write_us / both_us,
)

# %%
say(
    "The copy by rows takes {rows:.0f} us, which is {more:.0f} us more than reading and writing one after the other. If it reads a "
    "whole row before it writes, it takes {staged:.0f} us. So these {more:.0f} us are the price neither of the loads nor of the stores alone, but of "
    "stores between the loads of a row. They may evict the sectors that the next loads need from the L1 cache, or keep these "
    "loads waiting. We did not isolate which; a profiler that counts the hits of the L1 cache would.",
    rows=rows_us,
    staged=staged_us,
    more=rows_us and read_us and write_us and rows_us - read_us - write_us,
)

# %% [markdown]
# ## 6. Mistakes in measuring
#
# | mistake | what happens | what the course does |
# |---|---|---|
# | stop the clock without waiting | the launch has returned, the kernel still runs | events on the GPU, CUDA graphs |
# | one input, repeated | it stays in the L2 cache; the "bandwidth" exceeds that of DRAM | `rotating` inputs |
# | time the first call | it includes compilation and loading | warm-up before the clock starts |
# | report the minimum or the mean | one lucky or one interrupted sample decides | median, 10th and 90th percentile |
# | compare runs of different days | the clock frequency differs | interleaved measurements in one process |
# | launch on a stream that the graph does not capture | the graph is empty, and fast | launches use torch's current stream |
# | time a kernel that is wrong | half of the work takes half of the time | outputs are poisoned with NaN and checked first |
#
# The second one, measured:

# %%
FLOATS = 1024 if SIMULATED else 1 << 22
PAIRS = rotating(lambda: (torch.rand(FLOATS, device=DEVICE), torch.empty(FLOATS, device=DEVICE)), 8 * FLOATS)
adds = [lambda x=x, out=out: torch.add(x, 1, out=out) for x, out in PAIRS]
repeated_us = ladder.times("repeated inputs", {"one input": adds[0], "rotating inputs": adds})

# %%
MEGABYTES = 2 * 4 * (1 << 22) / 1e6  # read and written; MB per us are TB/s
say(
    "Adding 1 to 16 MB seems to move {hot:.1f} TB/s with one input, and {cold:.1f} TB/s with rotating inputs. A copy of large arrays "
    "moves {copy:.1f} TB/s from and to DRAM; a kernel of {us:.0f} us spends a part of its time on starting and ending, without "
    "loads to wait for.",
    us=repeated_us and repeated_us["rotating inputs"],
    copy=chip_limits().copy_bandwidth / 1e12,
    hot=repeated_us and MEGABYTES / repeated_us["one input"],
    cold=repeated_us and MEGABYTES / repeated_us["rotating inputs"],
)

# %% [markdown]
# **Exercise 5.** Outputs are filled with NaN before a kernel runs, so that elements that it does not write are found. Write
# the check that finds them. It returns whether all elements of a result are within 0.001 of the expected ones.


# %%
def all_close(result, expected):
    return not ((result - expected).abs() > 1e-3).any()


exercise("start-5").check(all_close)

# %% [markdown]
# ## 7. Records
#
# A measurement on a GPU is written to `docs/results/<gpu>/<topic>.json` with the GPU, the driver, the versions, the commit
# and hashes of the kernels that were timed. All figures and tables are drawn from these records; `python -m
# moe_numba plot gate` draws them again on any computer. `make stale` lists records of kernels that have changed since.

# %%
ladder.save()

# %% [markdown]
# **You can now** launch a kernel, find its races, read its counters line by line, and time it without the mistakes of section 6.
#
# ## Sources
#
# - NVIDIA: *CUDA C++ Programming Guide*, *PTX ISA*
# - [Numba CUDA](https://nvidia.github.io/numba-cuda/)
# - A check that let NaN pass and gave a time to a broken kernel: [SGEMM_CUDA PR
#   20](https://github.com/siboehm/SGEMM_CUDA/pull/20)
# - The articles that the notebooks follow are named in each notebook.
#
# Next: [01, the gate for a prompt](01_gate_prompt.ipynb), or [03, alignment as published](03_align_published.ipynb).
