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
# A mixture-of-experts (MoE) layer sends each token to a few of many small networks, the **experts**. Between "here is
# a token" and "here is its result" a GPU runs several special programs, called **kernels**. This course builds these
# kernels in Python, with Numba CUDA. Each notebook starts from plain torch code and ends with a kernel that you can
# use.
#
# This first notebook builds no MoE kernel. It shows what the other notebooks take for granted: how to read them, what
# the simulator finds, how a kernel is started, and how its time is taken. The longest section is about times that are
# wrong.
#
# ## 1. The map
#
# Each notebook follows a Chinese article about a kernel that is in use. It covers all that the article tells, and
# then goes on from there. This is the way of a token through the layer:
#
# | a token ... | notebook | the article is about |
# |---|---|---|
# | chooses its experts | [01_gate](01_gate.ipynb) | `moe_fused_gate`, SGLang's kernel for DeepSeek-V3's gate |
# | visits shared experts too | [04_shared_experts](04_shared_experts.ipynb) | folding them into the others, in SGLang |
# | is told where to go | [07_dispatch_layout](07_dispatch_layout.ipynb) | DeepEP's dispatch layout, and its buffer |
# | travels there | [08_ring_buffer_dispatch](08_ring_buffer_dispatch.ipynb) | DeepEP's `dispatch` in one machine |
# | is put in line by expert | [02_align](02_align.ipynb) | `moe_align_block_size`, version by version, in SGLang |
# | goes through the experts | [06_grouped_gemm](06_grouped_gemm.ipynb) | the grouped product (group GEMM) of hpc-ops |
# | comes home, and is added up | [09_combine](09_combine.ipynb) | DeepEP's `combine`, which the article leaves out |
#
# Before the grouped product, [05_hopper_from_numba](05_hopper_from_numba.ipynb) shows the instructions that it is made
# of. It follows no article.
#
# From the gate you learn about threads and warps, shuffles, registers, wide loads, and sorting. From the alignment you
# learn about prefix sums, atomics, races, and blocks that wait for each other. From the shared experts you learn how to
# find out what a change to a whole layer is worth. From the dispatch layout you learn about the banks of shared memory
# and clusters of blocks, and how a process reaches another GPU's memory. From dispatch and combine you learn about
# memory that several GPUs share: rings in it, who sees what when, and how long to wait for another GPU. From the
# grouped product you learn about tensor cores and asynchronous copies.
#
# Read this notebook first, then the others by number. You should know Python and some torch; you need to know nothing
# about GPUs.
#
# A few words to begin with. A kernel is run by many **threads** at once. 32 threads form a **warp** and run in step;
# a thread's place in its warp is its **lane**, 0 to 31. Up to 1024 threads form a **block**, whose threads can wait
# for each other and have some fast memory in common, the **shared memory**. All blocks together are the **grid**. The
# CPU and its Python program, which start the kernel, are the **host**.
#
# ## 2. How to read a step
#
# A notebook climbs a **ladder** of steps. Each step has the same six parts.
#
# | part | what it is | what to do with it |
# |---|---|---|
# | **Idea** | the one thing that this step changes | say in your own words why it should help |
# | **Prediction** | a time, computed before the measurement | make your own first |
# | **Kernel** | the code, or the lines that differ from the step before | find the line that carries the idea |
# | **Check** | a comparison with the torch reference | a wrong step has no time |
# | **Measure** | one line: two times, and how they compare | see section 5 for what the two times are |
# | **Look back** | what the prediction missed | this is where most of the learning is |
#
# Some steps make the kernel slower. They stay in, grey in the figures, because they teach as much as the others.
#
# ## 3. Simulator or GPU
#
# The first import decides where kernels run: on a GPU, or in a **simulator** if there is none. It must come before
# Numba's.

# %%
import moe_numba  # before Numba: it decides whether there is a GPU, or the simulator must do

print("the simulator" if moe_numba.simulator.ENABLED else "a GPU", "runs the kernels:", moe_numba.simulator.REASON)

# %%
import time

import matplotlib
import torch
from IPython.display import HTML
from numba import cuda, float32

from moe_numba import doctor, simulator
from moe_numba.course.bench import Stats, call_time, kernel_time, kernel_times, plots, records, rotating
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.simulate import in_simulator
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import address, current_stream, launch, launcher

SIMULATED = simulator.ENABLED
DEVICE = "cpu" if SIMULATED else "cuda"
FLOATS = 1 << 10 if SIMULATED else 1 << 22  # 16 MB of float32 on a GPU
MANY_FLOATS = 1 << 12 if SIMULATED else 1 << 28  # 1 GB on a GPU
SIDE = 64 if SIMULATED else 8192  # of a square matrix
FEW_TOKENS, MANY_TOKENS = 64, 65536  # the many are for a GPU only
torch.manual_seed(0)

print("\n".join(doctor.report()))

# %% [markdown]
# This is what `python -m moe_numba doctor` prints: the GPU, the versions, whether the compiler works, and what will
# therefore run. `sm_90a` is the name that the compiler gives to Hopper GPUs such as the H100 and the H200.
#
# The simulator runs the kernel's Python source, thread by thread, on the CPU. You can use it beside a GPU too: set
# the environment variable `MOE_NUMBA_SIMULATE=1` before you start Jupyter.
#
# | | simulator | GPU |
# |---|---|---|
# | right results | yes, on small inputs | yes |
# | an index outside the memory | an error that names the line | garbage, or a crash later |
# | a lane that does not come | an error that names the lane | undefined |
# | a missing barrier | a wrong result, under some orders of the threads; with `races()` an error that names both lines | a wrong result, once in a while |
# | threads that wait for ever | an error that says who waits where | it hangs |
# | memory that nobody wrote | poison (NaN) | whatever lay there |
# | time, registers, caches | none | yes |
#
# Most of this course also runs on GPUs older than Hopper. A step that needs more than yours has is not run: it prints
# the reason, and the time that an H200 took. Notebooks 05, 06, 08 and 09 are about Hopper's instructions. With any other
# GPU their kernels run in the simulator.
#
# Only one thread runs at a time, and each sees what the others wrote at once. On a GPU two writes may arrive in another
# order, unless the code asks for the right one. The race detector below finds where it does not ask, and
# `simulator.weak_memory()` runs a kernel with stores to global memory that arrive late.
#
# The next cells run kernels with a mistake in them. On a GPU a mistake may hang or break the whole process, so we run
# them in the simulator, and in a process of its own. `in_simulator` starts that process. It hands over the source of a
# function and of the kernels that the function starts.


# %% [markdown]
# ### A lane missing from a shuffle
#
# 32 lanes add up 32 numbers. A **shuffle** gives each lane the value that another lane holds. After five of them, over
# distances 16, 8, 4, 2 and 1, every lane has the sum. The first argument of the shuffle is a mask with a bit for each
# lane that takes part: here all 32. But the `if` lets only `count` lanes in.


# %%
@cuda.jit
def sum_of_lanes(x, out, count):
    lane = cuda.threadIdx.x
    if lane < count:
        value = x[lane]
        for k in range(5):
            value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 16 >> k)
        out[lane] = value


def try_missing_lanes():
    for count in (32, 24):
        out = torch.zeros(32)
        try:
            sum_of_lanes[1, 32](torch.ones(32), out, count)
            print(f"{count} lanes: the sum is {out[0].item():g}")
        except simulator.SimulatorError as error:
            print(f"{count} lanes: {type(error).__name__}: {error}")


in_simulator(try_missing_lanes)

# %% [markdown]
# With 32 lanes the sum is right. With 24 the simulator stops as soon as one of the missing lanes has reached the
# kernel's end. It says which lane that is, which operation names it, and where others wait. `cell:7` is the seventh
# line of the function, counted from `@cuda.jit`: the shuffle. On a GPU the result would be undefined: it may even look
# right.
#
# The mistake is repaired by moving the `if`: all lanes shuffle, and those from 24 on bring a zero. Kernels in this
# course do that wherever a shuffle or a barrier follows: no thread leaves early.
#
# ### A missing barrier
#
# 64 threads turn 64 numbers round. Each puts its number into shared memory and takes out the number at the other end.
# That one was put there by another thread, of the other warp. So all must have put before one may take. That is what
# the **barrier** `cuda.syncthreads()` is for: no thread goes on before all have come. With `barrier=0` it is left
# out.
#
# Threads run in no fixed order. The simulator draws one at random, and the **seed** fixes which. The same seed gives
# the same order again, so that a mistake can be looked at twice.


# %%
@cuda.jit
def reverse(x, out, barrier):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    if barrier:
        cuda.syncthreads()
    out[i] = tile[63 - i]


def try_seeds():
    x = torch.arange(64.0)
    for barrier in (0, 1):
        for seed in (0, 1):
            out = torch.zeros(64)
            with simulator.seed(seed):
                reverse[1, 64](x, out, barrier)
            wrong = (out != x.flip(0)).nonzero().flatten().tolist()
            where = f"the numbers {wrong[0]} to {wrong[-1]}" if wrong else "none"
            print(f"barrier={barrier}, seed {seed}: wrong are {where}; the result begins {out[:3].tolist()}")


in_simulator(try_seeds)

# %% [markdown]
# Without the barrier the result depends on the order: each seed gets other elements wrong. This is a **race**. The
# wrong elements are NaN, because the simulator fills shared memory with poison before the block starts. On a GPU old
# numbers would lie there. With the barrier every seed gives the right result.
#
# ### A lost update
#
# Some races need a finer order. Here 64 threads add 1 to the same number. Each reads it, adds, and writes it back. If
# another thread comes between, one of the two additions is lost. By itself the simulator changes threads only where
# they wait for each other. With `preempt=0.5` it may also change at each access to memory.


# %%
@cuda.jit
def count_threads(count):
    count[0] = count[0] + 1


def try_preemption():
    for preempt in (0.0, 0.5):
        for seed in (0, 1, 2):
            count = torch.zeros(1, dtype=torch.int32)
            with simulator.seed(seed, preempt=preempt):
                count_threads[1, 64](count)
            print(f"preempt={preempt}, seed {seed}: {count.item()} of 64 threads counted")


in_simulator(try_preemption)

# %% [markdown]
# Another seed, another result: that is how a race shows itself. The tests of this project run each kernel under several
# seeds. A test that passes under one seed shows little.
#
# ### The race detector
#
# A race may give the right result under every seed that you try. Two unordered accesses to the same memory, at least one
# of them a write, are a data race. Under `simulator.races()` they are an error even if the result happens to be right.
# Barriers order accesses, and so does a release that another thread acquires. The detector sees only the code that a
# run executes, so run every branch, with several inputs. The next cell checks `reverse` and `count_threads`. To check
# your own kernel, replace them in `runs`.


# %%
def detect_races():
    x, out, count = torch.arange(64.0), torch.zeros(64), torch.zeros(1, dtype=torch.int32)
    runs = {
        "reverse without a barrier": lambda: reverse[1, 64](x, out, 0),
        "reverse with a barrier": lambda: reverse[1, 64](x, out, 1),
        "count_threads": lambda: count_threads[1, 64](count),
    }
    for name, run in runs.items():
        try:
            with simulator.races():
                run()
            print(f"{name}: no race")
        except simulator.DataRace as error:
            print(f"{name}: {error}")


in_simulator(detect_races)

# %% [markdown]
# Each report names both threads, both lines, the memory, and what would order the two accesses.
#
# ### Counters per source line
#
# The simulator has no clock, but it can count. The kernel below transposes a matrix of 32 x 32 numbers through shared
# memory. A warp writes a row of the tile and reads a column. Shared memory has 32 **banks**, and neighbouring 4-byte
# words lie in neighbouring banks. With 32 words per row, all words of a column lie in the same bank, which serves one
# word per **wavefront**, so a warp's load takes 32 wavefronts instead of 1 (a 32-way bank conflict).
# `simulator.profile()` counts these **bank conflicts** for each line of the source, beside other counters: how often a
# warp executed the line, how many bytes it moved, how long it waited.


# %%
@cuda.jit
def transpose(x, out, words_per_row):
    tile = cuda.shared.array(32 * 33, float32)
    column, row = cuda.threadIdx.x, cuda.threadIdx.y
    tile[row * words_per_row + column] = x[row, column]
    cuda.syncthreads()
    out[row, column] = tile[column * words_per_row + row]


def count_bank_conflicts():
    x, pages = torch.rand(32, 32), []
    for words_per_row in (32, 33):
        out = torch.empty(32, 32)
        with simulator.profile() as profile:
            transpose[1, (32, 32)](x, out, words_per_row)
        total, right = profile["transpose"].total, "right" if torch.equal(out, x.T) else "WRONG"
        print(
            f"{words_per_row} words per row: {right}, {total.shared_load_requests} loads from shared memory,", end=" "
        )
        print(f"{total.shared_load_wavefronts} wavefronts, {total.bank_conflicts} bank conflicts")
        pages.append(profile.heatmap("bank_conflicts").body)
    return pages[0]


HTML(in_simulator(count_bank_conflicts))

# %% [markdown]
# The table shows the source of the first run, and its conflicts by line: they are all in the last one, which reads
# columns. Padding each row to 33 words puts the words of a column into 32 different banks.
# `print(profile)` shows all counters; docs/simulator_profile.md explains them.
#
# ## 4. How a kernel is started
#
# There are three ways in this course. We take the smallest kernel there is, and start it in all three.


# %%
@cuda.jit
def add_one(x, y, n):
    i = cuda.grid(1)  # the thread's number in the whole grid
    if i < n:
        y[i] = x[i] + float32(1)


x = torch.rand(FLOATS, device=DEVICE)
y = torch.empty_like(x)
GRID, BLOCK = FLOATS // 256, 256  # so many blocks, of so many threads each


def by_numba():
    """Numba's own way: it looks at every argument, and passes an array as its address, shape, strides, ..."""
    add_one[GRID, BLOCK](x, y, FLOATS)


def by_launch():
    """moe_numba.runtime.launch: a tensor becomes a plain pointer; torch's current stream is asked for."""
    launch(add_one, GRID, BLOCK, x, y, FLOATS)


start = launcher(add_one, ("float32*", "float32*", "int32"), 0)  # compiled once, for pointers and numbers


def by_launcher():
    """What moe_numba.runtime.launch uses inside, and what the package's own functions use."""
    start(GRID, BLOCK, current_stream(0), address(x), address(y), FLOATS)


for way in (by_numba, by_launch, by_launcher):
    y.fill_(float("nan"))
    way()
    print(f"{way.__name__}: {'right' if torch.equal(y, x + 1) else 'WRONG'}")

# %% [markdown]
# - `kernel[grid, block](...)` is Numba's way and the one to start with. The first steps of each notebook use it.
# - `moe_numba.runtime.launch.launch(kernel, grid, block, ...)` takes the same arguments. A tensor reaches the kernel as a
#   pointer to its first element, so the kernel is told the sizes as numbers.
# - `launcher(...)` returns a function that only packs the arguments and asks the driver. The **driver** is the
#   software that hands work to the GPU.
#
# A **stream** is a queue of work for the GPU. The last two ways use the stream that torch uses at this moment. The
# first one uses a fixed one, unless it is told otherwise: `kernel[grid, block, stream]`. The source of the kernel is
# the same for all three.
#
# How much do they cost? The next cells need a way to tell times. On a GPU they measure. In the simulator there is
# nothing to measure, so they show what was recorded on an H200, and say so.

# %%
ROWS = []  # what this notebook measures


RECORD, GATE = records.recorded("start_here"), records.recorded("gate")


def tell(name, kernel=None, call=None, **more):
    """Print the times of a step, just measured or recorded, and give its row; None where there is neither."""
    if SIMULATED:
        row = records.find(RECORD, step=name) if RECORD else None
    else:
        row = records.row(name, kernel=kernel, call=call, **more)
        ROWS[:] = [old for old in ROWS if old["step"] != name] + [row]  # a cell that is run again replaces its row
    if row is None:
        print(f"{name}: ran, not timed; no figure is recorded yet")
        return None
    times = [f"{records.format_us(row[key]['median'])} us {key[:-3]}" for key in ("kernel_us", "call_us") if key in row]
    print(f"{name}: {', '.join(times)}{' (recorded on an H200)' if SIMULATED else ''}")
    return row


for way in (by_numba, by_launch, by_launcher):
    tell(way.__name__, call=call_time(way))

# %% [markdown]
# These are **call times**: what the Python call costs on the host. Much of the difference is work that Numba does for
# each argument, every time. A small kernel takes a few microseconds on the GPU, so this work can cost more than the
# kernel itself.
#
# ## 5. How times are taken, and how one lies with them
#
# A wrong time is easier to get than a right one, and it is rarely too slow. Here are nine ways to get one. Each has
# a remedy, and the notebooks use all nine remedies.
#
# ### Lie 1: forgetting to wait
#
# A call puts work into the stream and comes back at once. The GPU may not even have begun. A clock around the call
# measures the host. We add 1 to a large array, and then ask how much memory the GPU must have moved per second.


# %%
def stopwatch(call, wait, repeats=30):
    """Times of single calls on the host's clock, for `tell`; nothing in the simulator."""
    if SIMULATED:
        call()
        return {}
    samples = []
    for _ in range(repeats):
        torch.cuda.synchronize()  # the GPU is idle when the clock starts
        begin = time.perf_counter()
        call()
        if wait:
            torch.cuda.synchronize()
        samples.append((time.perf_counter() - begin) * 1e6)
    mean = sum(samples) / repeats
    return {"call": Stats.of(samples), "min_us": min(samples), "mean_us": mean, "max_us": max(samples)}


def bandwidth(row, key):
    """Say how many terabytes a second a time would mean."""
    if row:
        print(f"    {row['bytes'] / row[key]['median'] / 1e6:.1f} TB/s")


large, result = torch.rand(MANY_FLOATS, device=DEVICE), torch.empty(MANY_FLOATS, device=DEVICE)


def add_large():
    torch.add(large, 1, out=result)


for name, wait in (("the clock stops at once", False), ("the clock stops when the GPU is done", True)):
    row = tell(name, **stopwatch(add_large, wait), bytes=8 * MANY_FLOATS)  # each float is read and written
    bandwidth(row, "call_us")

# %% [markdown]
# By its data sheet the memory of an H200 moves 4.8 TB/s. A figure far above that says: nobody waited. The simulator
# cannot show this, because its calls come back when the work is done.
#
# **Remedy.** Wait before the clock stops, or let the GPU take the time. And compare each time with what the chip can
# do at all.
#
# ### Lie 2: one time for two things
#
# There are two honest times, and they answer two questions.
#
# - **Kernel time**: what does the GPU spend? We put many launches into a **CUDA graph**, a list of work that the GPU
#   goes through without asking the host again. The time of the whole graph, divided by the number of launches, is the
#   kernel time. It contains the small gap between two launches.
# - **Call time**: what does the host spend? We call the Python function many times in a row, without waiting.
#
# Which of them a user feels depends on the size, and on whether the user has a graph. Here is the package's gate, for
# few tokens and for many.

# %%
CONFIG = {"num_expert_group": 8, "topk_group": 4}


def make_gate(tokens):
    """A function that routes random tokens to 8 of 256 experts; its outputs are allocated here, once."""
    logits, bias = torch.randn(tokens, 256, device=DEVICE), torch.rand(256, device=DEVICE)
    out = torch.empty(tokens, 8, device=DEVICE), torch.empty(tokens, 8, dtype=torch.int32, device=DEVICE)
    return lambda: moe_numba.biased_grouped_topk(logits, bias, 8, **CONFIG, out=out)


gate = make_gate(2 if SIMULATED else FEW_TOKENS)


def gate_row(tokens):
    """The gate's two times: measured here, or in the simulator those of the record of `bench gate`."""
    if not SIMULATED:
        run = make_gate(tokens)
        return tell(f"gate, {tokens} tokens", kernel_time(run), call_time(run), size={"tokens": tokens})
    wanted = {"config": {"num_experts": 256, **CONFIG}, "size": {"tokens": tokens}, "dtype": "float32"}
    row = records.find(GATE, step="final, out=", **wanted) if GATE else None
    if row is None:
        return print(f"gate, {tokens} tokens: no figure is recorded yet")
    kernel_us, call_us = row["kernel_us"]["median"], row["call_us"]["median"]
    print(f"gate, {tokens} tokens: {kernel_us:.2f} us kernel, {call_us:.2f} us call (recorded on an H200)")
    return row


gate()
FEW, MANY = gate_row(FEW_TOKENS), gate_row(MANY_TOKENS)


# %%
def timeline(cases, caption="", calls=4):
    """Who works when, in `calls` calls in a row: {label: (call time, or None in a graph, kernel time)}."""
    with matplotlib.rc_context(plots.STYLE):
        figure = plots.Picture(figsize=(9.2, 0.95 * len(cases) + 1.1))
        axes = figure.add_axes((0.27, 0.62 / figure.get_figheight(), 0.71, 1 - 1.05 / figure.get_figheight()))
        names, ends = [], []
        for case, (label, (call_us, kernel_us)) in enumerate(cases.items()):
            host_y, gpu_y, free = 2.6 * case, 2.6 * case + 1, 0.0
            for i in range(calls):
                ready = (i + 1) * call_us if call_us else 0.0
                begin = max(ready, free)  # a kernel starts when it was asked for and the one before it is done
                free = begin + kernel_us
                axes.barh(gpu_y, kernel_us, left=begin, height=0.8, color=plots.BLUE, edgecolor="white")
                if call_us:
                    axes.barh(host_y, call_us, left=i * call_us, height=0.8, color=plots.ORANGE, edgecolor="white")
            ends.append(free)
            axes.annotate(f" {free / calls:.1f} us for each", (free, gpu_y), va="center", fontsize=8.5)
            names += [(host_y, f"{label}:  host"), (gpu_y, "GPU")]
        axes.set_yticks(*zip(*names), color=plots.INK)
        axes.set_ylim(2.6 * len(cases) - 1, -0.7)
        axes.set_xlim(0, 1.16 * max(ends))
        axes.set_xlabel("µs")
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x")
        figure.text(0.01, 0.985, f"{calls} calls in a row: who works when", va="top", fontsize=12, fontweight="bold")
        figure.text(0.01, 0.02, caption, fontsize=7.5, color=plots.GREY)
    return figure


def times(row):
    return row["call_us"]["median"], row["kernel_us"]["median"]


if FEW and MANY:
    picture = timeline(
        {
            f"{FEW_TOKENS} tokens, called": times(FEW),
            f"{FEW_TOKENS} tokens, in a graph": (None, times(FEW)[1]),
            f"{MANY_TOKENS} tokens, called": times(MANY),
        },
        caption=plots.caption(GATE) if SIMULATED else "measured in this notebook",
    )
else:
    picture = print("No figures are recorded yet, so there is no picture of a call.")
picture

# %% [markdown]
# The picture is drawn from the two times above. An orange bar is a call on the host, a blue bar is a kernel on the
# GPU. A kernel starts when it was asked for and the one before it is done. If the calls take longer than the kernels,
# the GPU waits, and a faster kernel gains nothing. In a graph nobody waits for the host. If the kernels take longer
# than the calls, the host runs ahead, and its cost is hidden.
#
# **Remedy.** Give both times, and say which is which.
#
# ### Lie 3: inputs that are still in the cache
#
# An H200 keeps up to 60 MB in its L2 cache. A benchmark calls the same kernel on the same input again and again. If
# the input fits, the memory is hardly asked. In a real model other kernels have run in between, and the input must
# come from memory. We add 1 to 16 MB, first always the same, then several arrays by turns: together more than twice
# the cache.

# %%
sets = rotating(lambda: (torch.rand(FLOATS, device=DEVICE), torch.empty(FLOATS, device=DEVICE)), 8 * FLOATS)


def add_to(a, b):
    return lambda: torch.add(a, 1, out=b)


times_us = kernel_times({"one array": add_to(*sets[0]), "arrays by turns": [add_to(*pair) for pair in sets]})
for name, stats in times_us.items():
    row = tell(name, kernel=stats, bytes=8 * FLOATS)
    bandwidth(row, "kernel_us")

# %% [markdown]
# If the first figure is above 4.8 TB/s, it cannot come from the memory.
#
# **Remedy.** `moe_numba.course.bench.rotating` makes enough inputs to take turns. Sometimes the cache is honest: a kernel
# that reads what the one before it just wrote does find it there. Say which case is meant.
#
# ### Lie 4: the first call
#
# The first call compiles the kernel. It also loads the code onto the GPU. Later calls do neither.


# %%
@cuda.jit
def add_two(x, y, n):
    i = cuda.grid(1)
    if i < n:
        y[i] = x[i] + float32(2)


def by_launch_two():
    launch(add_two, GRID, BLOCK, x, y, FLOATS)


for name in ("the first call", "the second call"):
    tell(name, **stopwatch(by_launch_two, wait=True, repeats=1))

# %% [markdown]
# **Remedy.** Call once or twice before the clock starts. If a server's start-up time matters, time it on its own.
#
# ### Lie 5: the best of many, or the mean of many
#
# Times of the same call differ. The operating system interrupts, clocks change, Python collects its garbage. The
# smallest time happened once, under the best of circumstances. The mean is moved by a single bad sample. Here are
# 1000 single calls of the gate, each with the wait for the GPU.

# %%
row = tell("1000 single calls", **stopwatch(gate, wait=True, repeats=1000))
if row:
    call = row["call_us"]
    shown = {
        "smallest": row["min_us"],
        "10th percentile": call["p10"],
        "median": call["median"],
        "mean": row["mean_us"],
        "90th percentile": call["p90"],
        "largest": row["max_us"],
    }
    print("    " + ", ".join(f"{name} {us:.1f}" for name, us in shown.items()), "us")

# %% [markdown]
# **Remedy.** The **median**: half of the samples are below it. With it, the 10th and the 90th **percentile** say how
# far the samples spread. If those of two kernels overlap, neither is faster. To compare kernels, we measure them by
# turns in one process, so that a clock that drifts hits both.
#
# ### Lie 6: a wrong kernel that looks fast
#
# A kernel that does half of the work takes half of the time. The check should notice. But here the output still holds
# the right result of an earlier run, and the check looks at that.

# %%
want = x + 1


def right():
    launch(add_one, GRID, BLOCK, x, y, FLOATS)


def forgets_half():
    launch(add_one, GRID // 2, BLOCK, x, y, FLOATS // 2)


def weak_check(result):
    """Is any difference too large?"""
    return "refused" if ((result - want).abs() > 1e-6).any() else "accepted"


def check(result):
    """Is every difference small? A NaN is not small."""
    good = (result - want).abs() <= 1e-6
    return "accepted" if good.all() else f"refused: {int((~good).sum())} of {len(good)} elements are wrong"


right()
forgets_half()
print("no poison, check:   ", check(y))
y.fill_(float("nan"))
forgets_half()
print("poison, weak check: ", weak_check(y))
print("poison, check:      ", check(y))
y.fill_(float("nan"))
right()
print("right, poison, check:", check(y))

times_us = kernel_times({"right": right, "forgets half": forgets_half})
for name, stats in times_us.items():
    tell(name, kernel=stats)

# %% [markdown]
# Two things are needed. The outputs must be **poisoned** first, with NaN or with a number that no kernel would write.
# And the check must refuse a NaN. `weak_check` asks whether a difference is too large. A difference from NaN is NaN,
# and a comparison with NaN is always false. So it accepts. `check` asks the opposite question, whether each
# difference is small, and refuses.
#
# **Remedy.** Poison, check, and only then take the time. The project's tests also contain kernels that are wrong on
# purpose. A check that accepts one of them fails the test.
#
# ### Lie 7: zeros
#
# The easiest input to make is zeros. A chip needs less power when few bits change, and a chip that needs less power
# can keep a higher clock. So a large matrix product runs faster on zeros than on random numbers. There is a second
# reason: with equal inputs some kernels take a shorter way, for example when they sort.

# %%
HALF = torch.bfloat16 if gpu_of(0).hardware_capability >= (8, 0) else torch.float16  # what tensor cores multiply
random = torch.randn(SIDE, SIDE, device=DEVICE).to(HALF)
product = torch.empty_like(random)


def multiply(matrix):
    return lambda: torch.matmul(matrix, matrix, out=product)


for name, matrix in (("product, random", random), ("product, zeros", torch.zeros_like(random))):
    row = tell(name, kernel=kernel_time(multiply(matrix), launches=20), dtype=str(HALF)[6:], size={"n": SIDE})
    if row:
        print(f"    {2 * row['size']['n'] ** 3 / row['kernel_us']['median'] / 1e6:.0f} TFLOP/s")

# %% [markdown]
# **Remedy.** Random inputs, spread like real ones. For the experts' load this matters even more: real tokens do not
# choose all experts equally often.
#
# ### Lie 8: an empty graph
#
# A CUDA graph holds what was put into torch's current stream while it was made. A kernel that is started on some
# other stream is not in it. The graph is then empty, and very fast. If the stream was looked up once and kept, this
# happens without any error.
#
# **Remedy.** The package asks for the current stream at every call. A test poisons the outputs, replays the graph,
# and checks them.
#
# ### Lie 9: two things compared that are not the same
#
# Does the other kernel allocate its outputs? Does it return its results in order? Does it wait for the GPU? Was it
# timed on the same day, with the same driver? A figure from another machine, or from an article, can be quoted. It
# cannot be compared.
#
# **Remedy.** The kernels of other projects are timed by the same code, in the same process, by turns with ours, and
# pass the same check.
#
# ## 6. How figures are recorded
#
# A notebook's times are worth little if the code has changed since. So a measurement on a GPU is written to
# `docs/results/<gpu>/<topic>.json`, together with the GPU, the driver, the versions, the commit, and a **hash** of each
# source file that it used. A hash (here SHA-256) is a number that changes when the file changes. For a notebook only
# the code cells count: words may be mended without measuring again.

# %%
if SIMULATED:
    print("simulator: nothing was timed, so nothing is written")
else:
    path = records.write("start_here", ROWS, notebook_sources("notebooks/00_start_here.py"))
    print(f"{len(ROWS)} rows written to docs/results/{path.parent.name}/{path.name}")

# %% [markdown]
# Now the guard. We make a small record of our own, ask whether it is stale, then pretend that the file has changed.

# %%
trial = {"topic": "trial", "date": "2026-01-01", "sources": records.sources(["moe_numba/course/bench/timing.py"])}
print("recorded now:      ", records.stale(trial) or "up to date")
trial["sources"]["moe_numba/course/bench/timing.py"] = "another hash"
print("after a change:    ", *records.stale(trial))

if GATE:
    print("the gate's record: ", plots.caption(GATE))
    print("                   ", len(GATE["rows"]), "rows;", *(records.stale(GATE) or ["up to date"]))
else:
    print("the gate's record:  there is none yet; `python -m moe_numba bench gate` makes it on a GPU")

# %% [markdown]
# A test asks the same question about every record and every notebook. If code has changed and the figures have not,
# the test fails. All figures and the tables in the README are drawn from records, so anybody can draw them again
# without a GPU: `python -m moe_numba plot gate`.
#
# ## 7. Exercises
#
# 1. **Half a barrier.** In `reverse`, write `if barrier and i < 32:`, so that only the first warp comes to the
#    barrier. What do you expect of a GPU, and what does the simulator say?
#    *Hint: a barrier waits for all threads of the block. Let `try_seeds` only try `barrier=1`.*
# 2. **Count them all.** Repair `count_threads`, so that it counts 64 under every seed, with `preempt=0.5` too.
#    *Hint: `cuda.atomic.add(count, 0, 1)` reads, adds and writes without letting another thread between.*
# 3. **Who waits?** A kernel takes 6 us, and its call takes 9 us. You may halve one of the two. Which one, if there are
#    many calls in a row? Which one in a CUDA graph? Which one if the call takes 4 us?
#    *Hint: `timeline({"before": (9, 6), "after": (4.5, 6)})` draws your numbers; it needs no record.*
#
# ## 8. Sources
#
# The articles that the notebooks follow, in the order of the map:
#
# - the gate: a walk through SGLang's `moe_fused_gate` and its torch function `biased_grouped_topk`
# - shared experts: 分享一个DeepSeek V3和R1中 Shared Experts和普通Experts融合的一个小技巧, about [sglang PR
#   4918](https://github.com/sgl-project/sglang/pull/4918), after [vllm PR
#   15502](https://github.com/vllm-project/vllm/pull/15502)
# - DeepEP: [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), by BoLi2001
# - align: sgl-kernel MoE Align Block Size Kernel 优化过程解析
# - grouped GEMM: CUTLASS CUTE 7 hpc-ops 之 group gemm & tma
#
# On CUDA in Python: the documentation of [Numba CUDA](https://nvidia.github.io/numba-cuda/). On the rules for threads,
# barriers and shuffles: NVIDIA's *CUDA C++ Programming Guide* and *PTX ISA*. A check that let NaN pass, and so gave a
# time to a broken kernel, was found in a well-known course: [SGEMM_CUDA PR
# 20](https://github.com/siboehm/SGEMM_CUDA/pull/20).
