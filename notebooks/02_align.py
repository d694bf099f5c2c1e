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
# # Align: put the tokens in line, expert by expert
#
# The gate has chosen 8 experts for every token. Before the experts can work, somebody must put the tokens in line: all
# that go to expert 0, then all that go to expert 1, and so on, each group filled up to whole blocks. This small job is
# called `moe_align_block_size`. It moves almost no data. That is what makes it interesting: it is all about waiting.
#
# This notebook follows a Chinese article about SGLang's kernel
# ([`moe_align_kernel.cu`](https://github.com/sgl-project/sglang/blob/main/sgl-kernel/csrc/moe/moe_align_kernel.cu)).
# The article tells how it was made faster, version by version:
#
# | version | what is new | by |
# |---|---|---|
# | 0x1 | the baseline: a kernel that works warp by warp, and a small one | the article's author |
# | 0x2 | [padding inside the kernel](https://github.com/sgl-project/sglang/pull/7437), 16 bytes a store | ispobock |
# | 0x3 | [a parallel prefix sum](https://github.com/sgl-project/sglang/pull/7794), Blelloch's scan | ispobock |
# | 0x4 | [a prefix sum with shuffles](https://github.com/sgl-project/sglang/pull/7884), in two levels | yuan-luo |
# | 0x5 | [smaller buffers, other threads fill](https://github.com/sgl-project/sglang/pull/14133) | the community |
#
# All five are here, each as a kernel that runs. One of them has a race, and the simulator finds it. Then we go on: to
# kernels that need one launch, and whose result is the same in every run.
#
# As in the other notebooks, every kernel runs on a GPU, and with few tokens in a simulator on any computer. Times that
# you see without a GPU are recorded ones and say so.

# %%
import moe_numba  # before Numba: it decides whether there is a GPU, or the simulator must do

print("the simulator" if moe_numba.simulator.ENABLED else "a GPU", "runs the kernels:", moe_numba.simulator.REASON)

# %%
import contextlib
import importlib.util
import inspect
import re
import warnings
from functools import cache

import torch
from IPython.display import Markdown
from numba import cuda, int32, uint32

from moe_numba import simulator
from moe_numba.align.reference import mismatch, sizes
from moe_numba.align.reference import moe_align_block_size as reference
from moe_numba.course import gpu_support
from moe_numba.course.bench import kernel_time, kernel_times, plots, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.draw import align as draw
from moe_numba.course.ladder import Ladder
from moe_numba.course.simulate import in_simulator
from moe_numba.course.source_diff import OpCounter, diff
from moe_numba.ptx.memory import atom_add_s32, st_global_s32x4
from moe_numba.runtime.compile import compile_kernel
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # most of these kernels have one block, on purpose
warnings.filterwarnings("ignore", message="ExternalStream is deprecated")  # its successor is newer than CuPy 14.0
DEVICE = "cpu" if simulator.ENABLED else "cuda"
EXPERTS, TOPK = (64, 4) if simulator.ENABLED else (256, 8)  # DeepSeek-V3: 256 experts, of which a token visits 8
TOKENS, FEW_TOKENS = (64, 8) if simulator.ENABLED else (4096, 64)
BLOCK = 16  # rows of a block
THREADS = 128 if simulator.ENABLED else 1024  # of a thread block; the most that a GPU allows
SMALL_EXPERTS = 16 if simulator.ENABLED else 64  # for the kernels that are made for few experts
FULL = 0xFFFFFFFF  # all 32 lanes

# %% [markdown]
# ## 1. The problem in one picture
#
# An expert is a matrix. Its work is a matrix product: its tokens, one a row, times the matrix. A **grouped GEMM** does
# the products of all experts in one kernel. It cuts the rows into **blocks** of, say, 16 or 128, and each block of rows
# is multiplied with *one* matrix. So a block may only hold tokens of one expert, and a group that does not fill its
# last block must be padded.
#
# One word first. The gate's result `topk_ids` has one row a token and one column a choice. We call each element of it a
# **slot**, and count slots row by row: slot `s` belongs to token `s // topk`. The function returns three things:
#
# - `sorted_token_ids`: the slots, sorted by expert. Each expert's part is padded to whole blocks with the number of
#   slots, `numel`. No slot has that number, so a reader knows padding when it sees it.
# - `expert_ids`: for each block, its expert.
# - `num_tokens_post_pad`: how much of `sorted_token_ids` is used. The arrays must be allocated before anybody knows
#   how many slots each expert has, so they are as long as could be needed, and the rest is a **tail**.
#
# In the article's words, a kernel must do four things: **count** the slots of each expert; make the **prefix sum**
# (前缀和) of the padded counts, which says where each expert begins; write `expert_ids`; and **sort** the slots.


# %%
def random_ids(tokens, num_experts, topk):
    """Distinct experts for each token, as a gate gives them: int32 [tokens, topk]."""
    scores = torch.rand(tokens, num_experts, device=DEVICE)
    return scores.argsort(dim=1)[:, :topk].to(torch.int32).contiguous()


torch.manual_seed(0)
draw.problem(random_ids(6, 4, 2).cpu(), block_size=4, num_experts=4)

# %% [markdown]
# ## 2. The reference
#
# The package's reference is plain torch. A **stable** `argsort` puts the slots in line: within an expert they stay in
# ascending order. Here is its heart, on the ids of the picture:

# %%
torch.manual_seed(0)
ids = random_ids(6, 4, 2).cpu()
flat, numel, block = ids.flatten().long(), ids.numel(), 4
order = flat.argsort(stable=True)
counts = torch.bincount(flat, minlength=4)
padded = (counts + block - 1) // block * block
starts, before = padded.cumsum(0) - padded, counts.cumsum(0) - counts
place = starts[flat[order]] + torch.arange(numel) - before[flat[order]]
in_line = torch.full((int(padded.sum()),), numel).scatter_(0, place, order)
print("slots of each expert:", counts.tolist(), "-> padded", padded.tolist(), "-> starts", starts.tolist())
print("sorted_token_ids:    ", in_line.tolist())
print("expert_ids:          ", torch.arange(4).repeat_interleave(padded // block).tolist())

# %% [markdown]
# `mismatch` compares a result with the reference and returns `None`, or a sentence that says what is wrong. The
# reference defines every element of the outputs, also the tails: `numel` in one, -1 in the other. The article's kernels
# promise less. They leave an expert's slots in any order, and parts of the tails unwritten. So they may ask for
# mercy: a kernel that returns the words "any order" or "any tail" is not blamed for these two. Nothing else is
# forgiven.
#
# Outputs are poisoned with -7 before a kernel runs, so that an element which nobody wrote cannot look right.


# %%
def poisoned(ids, num_experts=EXPERTS, block_size=BLOCK):
    """Outputs that no kernel would leave as they are: sorted_token_ids, expert_ids, num_tokens_post_pad."""
    lengths = *sizes(ids.numel(), block_size, num_experts), 1
    return tuple(torch.full((length,), -7, dtype=torch.int32, device=DEVICE) for length in lengths)


IDS = random_ids(TOKENS, EXPERTS, TOPK)
ONE = IDS[:1].contiguous()
FEW = IDS[:FEW_TOKENS].contiguous()
SKEWED = IDS[:1].repeat(TOKENS, 1).contiguous()  # every token wants the same experts
NUMEL = IDS.numel()
LENGTH, NUM_BLOCKS = sizes(NUMEL, BLOCK, EXPERTS)


def check(outputs, ids=IDS, num_experts=EXPERTS, block_size=BLOCK):
    sorted_token_ids, expert_ids, total, *mercy = outputs
    mercy = {"any_order": "any order" in mercy, "any_tail": "any tail" in mercy}
    return mismatch(sorted_token_ids, expert_ids, total, ids, block_size, num_experts, **mercy)


print(f"{NUMEL} slots, {LENGTH} places, {NUM_BLOCKS} blocks; used are {int(reference(IDS, BLOCK, EXPERTS)[2])} places")
print("the reference:", check(reference(IDS, BLOCK, EXPERTS)))
print("poison:       ", check(poisoned(IDS)))

# %% [markdown]
# **Why the order matters.** A row's product does not depend on its neighbours, so one may think that any order will do.
# But a fast GEMM may cut a product into parts and add them up, and how it cuts can depend on where a row lies. Another
# order, another rounding; a few layers later another word. Users reported just that. With 4097 tokens, top-16 and 128
# experts only 1 of 100 runs gave the same bits as the first ([sglang
# 33511](https://github.com/sgl-project/sglang/pull/33511)). For vLLM there is a patch that sorts the slots once more
# before its Marlin kernel reads them ([vllm 52532](https://github.com/vllm-project/vllm/pull/52532)). A kernel that
# gives the same order in every run needs no such patch. The last steps of our ladder do.
#
# ## 3. The floor: how fast could it be?


# %%
LIMITS = chip_limits()
print(LIMITS)
BANDWIDTH = LIMITS.copy_bandwidth  # bytes per second


# What `python -m moe_numba bench gate` and `bench align` measured
GATE, ALIGN = records.recorded("gate"), records.recorded("align")
EMPTY_US = {False: 0.5, True: 0.4}  # a kernel that does nothing: alone, and with programmatic dependent launch
if GATE:
    EMPTY_US = {
        d: records.find(GATE, step="empty kernel", config={"dependent": d})["kernel_us"]["median"] for d in EMPTY_US
    }


def bytes_of(tokens, topk=8, num_experts=256, block_size=16):
    """Bytes to read and write at least: the ids once, each output once."""
    length, num_blocks = sizes(tokens * topk, block_size, num_experts)
    return 4 * (tokens * topk + length + num_blocks + 1)


for tokens in (1, 64, 1024, 4096, 16384, 65536):
    count = bytes_of(tokens)
    print(f"{tokens:6} tokens: {count / 1e6:5.2f} MB, {count / BANDWIDTH * 1e6:4.2f} us")
print(f"an empty kernel: {EMPTY_US[False]:.2f} us; {EMPTY_US[True]:.2f} us if it may start before the last one ends")
FLOOR_US = max(bytes_of(4096) / BANDWIDTH * 1e6, EMPTY_US[False])

# %% [markdown]
# For 4096 tokens the bytes take less than a tenth of a microsecond. (The ids come from the gate, which ran just before,
# so they are in the L2 cache, and the outputs stay there too: we do not take turns over several inputs.) An empty
# kernel takes longer than all the bytes. Yet SGLang's kernel needs 15 us on an H200. So what is the time spent on?
#
# On **latency**: how long one thing takes when the next one must wait for it. Here is a chain that nobody can avoid:
# load an id; add 1 to a counter; wait until everybody has counted; sum up; wait for the sums; store the slot. Four
# things in it can be measured by a chain of equal links: a load from the L2 cache, an addition to a counter in shared
# memory, a barrier of 1024 threads, and an addition to a counter in global memory. (An **atomic** addition reads, adds
# and writes without letting another thread come between. It returns what was there before.)


# %%
@cuda.jit
def chain_of_loads(links, out, n):
    at = int32(0)
    for _ in range(n):
        at = links[at]  # the next address is what this load brings
    out[0] = at


@cuda.jit
def chain_of_shared_atomics(links, out, n):
    counter = cuda.shared.array(1, int32)
    counter[0] = 0
    at = int32(0)
    for _ in range(n):
        at = cuda.atomic.add(counter, at >> 31, 1)  # the sign of what came back, 0, is the next index
    out[0] = at


@cuda.jit
def chain_of_barriers(links, out, n):
    for _ in range(n):
        cuda.syncthreads()
    out[cuda.threadIdx.x] = n


@cuda.jit
def chain_of_global_atomics(links, out, n):
    at = int32(0)
    for _ in range(n):
        at = atom_add_s32(out, at >> 31, 1)
    out[1] = at


CHAINS = {
    "a load from the L2": (chain_of_loads, 1),
    "a shared atomic": (chain_of_shared_atomics, 1),
    "a barrier": (chain_of_barriers, THREADS),
    "a global atomic": (chain_of_global_atomics, 1),
}


def measure_chains(links=8 if simulator.ENABLED else 1024):
    """Nanoseconds for one link of each chain; None in the simulator."""
    steps = torch.randperm(1 << 10 if simulator.ENABLED else 1 << 20, device=DEVICE)  # 4 MB: in the L2, not in the L1
    path = torch.empty_like(steps, dtype=torch.int32)
    path[steps] = steps.roll(-1).int()  # one round trip through all of them
    out = torch.zeros(THREADS, dtype=torch.int32, device=DEVICE)
    calls = {
        (name, n): lambda kernel=kernel, threads=threads, n=n: launch(kernel, 1, threads, path, out, n)
        for name, (kernel, threads) in CHAINS.items()
        for n in (links, 2 * links)
    }
    times = kernel_times(calls, launches=20)
    if simulator.ENABLED:
        return None
    return {
        name: round(1000 * (times[name, 2 * links].median - times[name, links].median) / links, 1) for name in CHAINS
    }


LATENCY_NS = measure_chains()
ASSUMED_NS = {"a load from the L2": 150, "a shared atomic": 50, "a barrier": 20, "a global atomic": 400}


def latencies():
    """The links' times measured just now, or recorded earlier on an H200, or None."""
    row = LATENCY_NS is None and ladder.record and records.find(ladder.record, step="torch")
    return LATENCY_NS or (row and row.get("latency_ns"))


# %% [markdown]
# We shall predict each step's time from such numbers. To be honest we wrote them down before we measured them:
# `ASSUMED_NS`. The cell below the first step prints how good the guess was.
#
# ## 4. The ladder
#
# Each step has an idea, a prediction, a kernel, a check with a measurement, and a look back. All steps work on 4096
# tokens, 256 experts, top-8 and blocks of 16, on a GPU. Each is also timed for 64 tokens and for one token, as in
# decoding, and for 4096 tokens that all want the same 8 experts. It is checked for each of them before it is timed.

# %%
ladder = Ladder(
    "align_ladder",
    check,
    title=f"Align, step by step: {4096} tokens, 256 experts, top-8, blocks of 16",
    reference_name="torch",
    config={"num_experts": EXPERTS, "topk": TOPK, "block_size": BLOCK},
    size={"tokens": TOKENS},
)
us = ladder.median_us  # a step's median time, measured now or recorded
OTHERS = {"few": FEW, "one": ONE, "skewed": SKEWED}
SAYS = {"few": "64 tokens", "one": "1 token", "skewed": "4096 tokens to the same experts"}


def bound(run, ids=IDS):
    """A call with outputs of its own, poisoned once: a timed call must not allocate."""
    outputs = poisoned(ids)
    return lambda: run(ids, outputs)


def time_of(run, ids=IDS):
    """The median kernel time in microseconds; None in the simulator."""
    stats = None if simulator.ENABLED else kernel_time(bound(run, ids))
    return stats and stats.median


def measure(name, run, **more):
    """Check and time ``run(ids, outputs)`` for the main size and for the others."""
    with ladder.attempt(name, "int32"):
        if more.get("graph", True):
            for which, ids in OTHERS.items():
                wrong = check(run(ids, poisoned(ids)), ids)
                assert not wrong, f"{name}, {SAYS[which]}: {wrong}"
                more[f"{which}_us"] = time_of(run, ids)
        size = bytes_of(TOKENS, TOPK, EXPERTS)
        ladder.step(name, bound(run), dtype="int32", floor_us=FLOOR_US, bytes=size, **more)


def add_to_row(name, **times):
    """More times (or None, in the simulator) for the row of a step that was measured."""
    for row in ladder.rows:
        if row["step"] == name:
            row.update({key: round(value, 3) for key, value in times.items() if value is not None})


def guess(before, change, default):
    """The prediction: what the step before took, and what the idea changes."""
    return (us(before) or default) + change


def look_back(name, before=None, predicted=None):
    """Say what the step gained for each size, and how far off the prediction was."""
    ladder.report(name, before, predicted)
    for which, says in SAYS.items():
        now, then = us(name, f"{which}_us"), us(before, f"{which}_us") if before else None
        if now:
            print(f"    {says}: {now:.1f} us" + (f" (before: {then:.1f} us)" if then else ""))


# %% [markdown]
# ### Step 0: torch
#
# **Idea.** The reference, but so that a CUDA graph can hold it. A graph is a fixed list of launches, so no operation
# may wait for the GPU to learn a size. `bincount` and `repeat_interleave` do. `scatter_add_` counts without waiting,
# and `searchsorted` finds the expert of each block: the first one that ends after the block's beginning.
#
# **Prediction.** A `TorchDispatchMode` counts the operations. Each is at least one kernel of about 2 us; the sort of
# 64-bit keys is worth another ten.


# %%
def torch_align(ids, outputs=None):
    flat, numel = ids.flatten().long(), ids.numel()
    length, num_blocks = sizes(numel, BLOCK, EXPERTS)
    order = flat.argsort(stable=True)
    expert = flat[order]
    counts = torch.zeros(EXPERTS, dtype=torch.long, device=DEVICE).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends = padded.cumsum(0)
    rank = torch.arange(numel, device=DEVICE) - (counts.cumsum(0) - counts)[expert]
    sorted_token_ids = torch.full((length,), numel, dtype=torch.int32, device=DEVICE)
    sorted_token_ids.scatter_(0, (ends - padded)[expert] + rank, order.int())
    expert_ids = torch.searchsorted(ends, torch.arange(num_blocks, device=DEVICE) * BLOCK, right=True)
    expert_ids = torch.where(expert_ids < EXPERTS, expert_ids, -1)
    return sorted_token_ids, expert_ids.int(), ends[-1:].int()


with OpCounter() as count:
    torch_align(IDS)
prediction = 2.0 * (len(count.names) + 10)
print(len(count.names), "operations:", ", ".join(count.names))
print(f"prediction: {prediction:.0f} us")
measure("torch", torch_align, prediction_us=prediction, operations=len(count.names), latency_ns=LATENCY_NS)

# %%
look_back("torch", predicted=prediction)
if latencies():
    for name, ns in latencies().items():
        print(f"{name}: {ns:.0f} ns, assumed were {ASSUMED_NS[name]}")

# %% [markdown]
# **Look back.** Compare the line for 64 tokens. It is a sixty-fourth of the work, but just as many kernels, and each
# needs its while to start. With few tokens this is a step of launches, not of sorting.
#
# There is also a ready-made sort. CuPy's `sort` calls **CUB**, NVIDIA's library of such building blocks. It sorts keys,
# so we make one key of expert and slot: `expert << bits | slot`. Sorted keys are in order of experts, and within an
# expert in order of slots. A CUDA graph cannot hold this step, because CuPy allocates memory and waits. So it has a
# call time and no kernel time. `cuda.compute`, from the package cuda-cccl, offers the same sort to Python.

# %%
try:
    import cupy
except ImportError:
    cupy = None


def cupy_align(ids, outputs=None):
    with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
        flat, numel = cupy.from_dlpack(ids.flatten()), ids.numel()
        length, num_blocks = sizes(numel, BLOCK, EXPERTS)
        slots, bits = cupy.arange(numel, dtype=cupy.int32), numel.bit_length()
        keys = (flat << bits) | slots
        keys.sort()
        expert = keys >> bits
        edges = cupy.searchsorted(expert, cupy.arange(EXPERTS + 1, dtype=cupy.int32))  # where each expert begins
        padded = (edges[1:] - edges[:-1] + BLOCK - 1) // BLOCK * BLOCK
        ends = padded.cumsum()
        sorted_token_ids = cupy.full(length, numel, dtype=cupy.int32)
        sorted_token_ids[(ends - padded)[expert] + slots - edges[expert]] = keys & ((1 << bits) - 1)
        expert_ids = cupy.searchsorted(ends, cupy.arange(num_blocks) * BLOCK, side="right")
        expert_ids = cupy.where(expert_ids < EXPERTS, expert_ids, -1)
        outputs = sorted_token_ids, expert_ids.astype(cupy.int32), ends[-1:].astype(cupy.int32)
        return tuple(torch.from_dlpack(output) for output in outputs)


if simulator.ENABLED or cupy is None:
    print("CuPy needs a GPU, and to be installed; here this step is left out.")
else:
    measure("CuPy, one sort", cupy_align, graph=False, slower=True)
if importlib.util.find_spec("cuda.compute") is None:
    print("cuda.compute (package cuda-cccl) is not installed; it would run the same CUB sort.")
else:
    print("cuda.compute is installed; it is not measured here: its radix_sort is the same CUB sort.")

# %%
if us("CuPy, one sort", "call_us") and us("torch", "call_us"):
    print(f"a call: {us('CuPy, one sort', 'call_us'):.0f} us with CuPy, {us('torch', 'call_us'):.0f} us with torch")

# %% [markdown]
# ### Step 1: the baseline, 0x1
#
# **Idea.** Two kernels of our own. The first, `moe_align_block_size_kernel`, has a single block of 1024 threads and
# does the first three things. The second, `count_and_sort_expert_tokens_kernel`, has many blocks and does the fourth.
#
# **The main kernel.**
#
# 1. Clear the counters, in **shared memory**. Each warp looks after `experts_per_warp` of them (SGLang passes 32), out
#    of `padded_num_experts`, the experts rounded up to whole warps. The article's arguments are closure constants here.
# 2. Count. All threads go through the slots and add 1 to the expert's counter, atomically.
# 3. Prefix sum. Thread 0 alone walks through the experts. It rounds each count up to whole blocks and adds it to a
#    running sum, `cumsum`, in global memory. `cumsum[e]` is where expert `e` begins; the last one is the total.
# 4. `expert_ids`. Each thread takes one expert and writes its number for each of its blocks.
#
# Between the four stands a barrier. The article names the design: counters in shared memory, to spare global memory;
# atomics, so that threads do not get into each other's way; a serial prefix sum, which becomes the main subject of the
# optimisation; `expert_ids` in parallel, a thread for each expert.
#
# **The sort kernel.** Each thread takes a slot, adds 1 to `cumsum` of its expert, and gets the place that was next.
#
# `sorted_token_ids` must hold `numel` wherever no slot comes to lie. In 0x1 Python does that before: `fill_`, which is
# a launch of its own.
#
# **Prediction.** Everything is a loop of one block. Counting: 32 slots a thread, and each round waits for a load. The
# prefix sum: 256 rounds of some 40 clocks. Each of the three launches costs the half microsecond of an empty kernel.
# The fill writes for another; the sort loads, adds and stores.

# %%
COUNT_US = 4096 * 8 / 1024 * (ASSUMED_NS["a load from the L2"] + 20) / 1000
SERIAL_US = 256 * 40 / 1980
SORT_US = (ASSUMED_NS["a load from the L2"] + ASSUMED_NS["a global atomic"]) / 1000 + 0.5
prediction = 3 * EMPTY_US[False] + COUNT_US + SERIAL_US + 1.0 + SORT_US
print(f"count {COUNT_US:.1f}, scan {SERIAL_US:.1f}, fill 1.0, sort {SORT_US:.1f}, with launches {prediction:.1f} us")


@cuda.jit(device=True)
def round_up(count, block_size):
    return int32(uint32(count + block_size - 1) // uint32(block_size) * uint32(block_size))


@cache
def make_baseline(num_experts, experts_per_warp=32):
    padded_num_experts = -(-num_experts // 32) * 32

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(padded_num_experts, int32)
        tid, stride = cuda.threadIdx.x, cuda.blockDim.x
        my_expert_start = tid // 32 * experts_per_warp
        for i in range(experts_per_warp):
            if my_expert_start + i < padded_num_experts:
                shared_counts[my_expert_start + i] = 0
        cuda.syncthreads()
        for i in range(tid, numel, stride):
            expert = topk_ids[i]
            warp, offset = expert // experts_per_warp, expert % experts_per_warp
            cuda.atomic.add(shared_counts, warp * experts_per_warp + offset, 1)
        cuda.syncthreads()
        if tid == 0:
            start = int32(0)
            cumsum[0] = start
            for i in range(num_experts):
                warp, offset = i // experts_per_warp, i % experts_per_warp
                count = shared_counts[warp * experts_per_warp + offset]
                start = int32(start + round_up(count, block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid

    return kernel


@cuda.jit
def count_and_sort(topk_ids, sorted_token_ids, cumsum, numel):
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        rank_post_pad = atom_add_s32(cumsum, topk_ids[i], 1)
        sorted_token_ids[rank_post_pad] = i


# %%
def run_main(kernel, ids, outputs, cumsum, block_size=BLOCK, blocks=1, fill=False):
    """The article's host code: the main kernel, then the sort kernel. The order within an expert is left to luck."""
    sorted_token_ids, expert_ids, total = outputs
    numel, length = ids.numel(), len(sorted_token_ids)
    if fill:
        sorted_token_ids.fill_(numel)
    launch(kernel, blocks, THREADS, ids, sorted_token_ids, expert_ids, total, cumsum, block_size, numel, length)
    launch(count_and_sort, -(-numel // 256), 256, ids, sorted_token_ids, cumsum, numel)
    return *outputs, "any order", "any tail"


CUMSUM = torch.empty(EXPERTS + 1, dtype=torch.int32, device=DEVICE)


def main_step(make, **options):
    """``run(ids, outputs)`` for a step of the main kernel."""
    kernel = make(EXPERTS)
    return lambda ids, outputs: run_main(kernel, ids, outputs, CUMSUM, **options)


run_baseline = main_step(make_baseline, fill=True)
measure("0x1 baseline", run_baseline, prediction_us=round(prediction, 1))

# %%
look_back("0x1 baseline", "torch", prediction)

# %% [markdown]
# **Look back.** A detail first. "Each warp looks after 32 experts" promises that a warp counts for its own experts.
# Look at the index: `warp * 32 + offset` with `warp = expert // 32` and `offset = expert % 32`. That is `expert`. Every
# thread adds to every counter; the warps only share the clearing, and there all 32 lanes write the same zeros. From 0x3
# on the article's code says plainly `shared_counts[expert]`.
#
# The article sees two bottlenecks (瓶颈): the serial prefix sum, during which 1023 threads idle, and the many atomic
# additions. Let us not believe but measure. One small kernel only reads the ids, a second one reads and counts them.


# %%
@cache
def make_part(num_experts, counting):
    """The main kernel's first part: the loads alone, or with the counting."""

    @cuda.jit
    def kernel(topk_ids, out, numel):
        shared_counts = cuda.shared.array(num_experts, int32)
        tid, stride = cuda.threadIdx.x, cuda.blockDim.x
        if tid < num_experts:
            shared_counts[tid] = 0
        cuda.syncthreads()
        total = int32(0)
        for i in range(tid, numel, stride):
            if counting:
                cuda.atomic.add(shared_counts, topk_ids[i], 1)
            else:
                total = int32(total + topk_ids[i])
        cuda.syncthreads()
        if tid < num_experts:
            out[tid] = int32(total + shared_counts[tid])

    return kernel


def part_us(ids, counting):
    out = torch.empty(EXPERTS, dtype=torch.int32, device=DEVICE)
    stats = kernel_time(lambda: launch(make_part(EXPERTS, counting), 1, THREADS, ids, out, ids.numel()))
    return stats and stats.median


def fill_us():
    sorted_token_ids = poisoned(IDS)[0]
    stats = kernel_time(lambda: sorted_token_ids.fill_(NUMEL))
    return stats and stats.median


parts = {
    "loads_us": part_us(IDS, False),
    "count_us": part_us(IDS, True),
    "skewed_count_us": part_us(SKEWED, True),
    "fill_us": fill_us(),
}
add_to_row("0x1 baseline", **parts)
if us("0x1 baseline"):
    for name, says in (
        ("loads_us", "reading the ids"),
        ("count_us", "reading and counting"),
        ("skewed_count_us", "reading and counting, all tokens to the same experts"),
        ("fill_us", "the fill, a launch of its own"),
    ):
        print(f"{says}: {us('0x1 baseline', name):.1f} us, launch included, of {us('0x1 baseline'):.1f} us")

# %% [markdown]
# #### The small kernel of 0x1
#
# For few experts and few slots (`num_experts <= 64` and `numel < 1024`; the article's overview says "token <= 1024",
# its code counts slots) the article has a third kernel, which goes back to vLLM's, with memory accesses in better
# order. It does everything in one launch and without atomics. Each thread has counters of its own: a table
# `tokens_cnts` of `threads + 1` rows and `num_experts` columns in shared memory.
#
# 1. Each thread clears its row, number `thread + 1`, and counts its own slots there.
# 2. Each thread takes a column, an expert, and sums it up from top to bottom. Row `t` then says how many slots of each
#    expert the threads before thread `t` have.
# 3. Thread 0 makes the prefix sum of the padded counts, as before.
# 4. `expert_ids`, as before. Then each thread sorts its own slots: a slot's place is where the expert begins, plus row
#    `t`, which then grows by one.
#
# The advantages, says the article: counting, prefix sum and sorting in one kernel, no atomics, fewer launches. There is
# one more: nobody races for a place, so the order is the same in every run. It is not ascending: thread 0 brings slots
# 0, 64, 128 before thread 1 brings slot 1.


# %%
@cache
def make_small(num_experts):
    threads = max(num_experts, 32)
    ends, cells = num_experts + 1, (threads + 1) * num_experts

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
        cumsum = cuda.shared.array(ends, int32)
        tokens_cnts = cuda.shared.array(cells, int32)
        tid = cuda.threadIdx.x
        for i in range(num_experts):
            tokens_cnts[(tid + 1) * num_experts + i] = 0
        for i in range(tid, numel, threads):
            tokens_cnts[(tid + 1) * num_experts + topk_ids[i]] += 1
        cuda.syncthreads()
        if tid < num_experts:
            tokens_cnts[tid] = 0
            for i in range(1, threads + 1):
                tokens_cnts[i * num_experts + tid] += tokens_cnts[(i - 1) * num_experts + tid]
        cuda.syncthreads()
        if tid == 0:
            start = int32(0)
            cumsum[0] = start
            for i in range(num_experts):
                start = int32(start + round_up(tokens_cnts[threads * num_experts + i], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        for i in range(tid, numel, threads):
            mine = tid * num_experts + topk_ids[i]
            sorted_token_ids[cumsum[topk_ids[i]] + tokens_cnts[mine]] = i
            tokens_cnts[mine] += 1

    return kernel


# %%
SMALL_IDS = random_ids(FEW_TOKENS, SMALL_EXPERTS, TOPK)  # 64 tokens, 64 experts: 512 slots


def measure_small(make, more_threads=0, fill=False):
    """Check the small kernel and give its time, launches of its own included; None in the simulator."""
    kernel, threads = make(SMALL_EXPERTS), max(SMALL_EXPERTS, 32) + more_threads
    outputs = sorted_token_ids, expert_ids, total = poisoned(SMALL_IDS, SMALL_EXPERTS)
    numel = SMALL_IDS.numel()

    def run():
        if fill:
            sorted_token_ids.fill_(numel)
        launch(kernel, 1, threads, SMALL_IDS, *outputs, BLOCK, numel, len(sorted_token_ids))

    run()
    wrong = check((*outputs, "any order", "any tail"), SMALL_IDS, SMALL_EXPERTS)
    assert not wrong, f"the small kernel: {wrong}"
    stats = None if simulator.ENABLED else kernel_time(run)
    return stats and stats.median


def main_for_small(make, blocks):
    """The main kernel's time on the small kernel's input."""
    kernel, outputs = make(SMALL_EXPERTS), poisoned(SMALL_IDS, SMALL_EXPERTS)
    wrong = check(run_main(kernel, SMALL_IDS, outputs, CUMSUM, blocks=blocks), SMALL_IDS, SMALL_EXPERTS)
    assert not wrong, f"the main kernel with few experts: {wrong}"
    stats = kernel_time(lambda: run_main(kernel, SMALL_IDS, outputs, CUMSUM, blocks=blocks))
    return stats and stats.median


add_to_row("0x1 baseline", small_us=measure_small(make_small, fill=True))
print("the small kernel: right")
if us("0x1 baseline", "small_us"):
    print(f"the small kernel and its fill, 64 tokens, 64 experts: {us('0x1 baseline', 'small_us'):.1f} us")

# %% [markdown]
# ### Step 2: padding in the kernel, 0x2
#
# **Idea.** The fill is a launch of its own. Let the main kernel do it, after `expert_ids`. The sort kernel then writes
# over the places that get a slot. Each thread stores 16 bytes at once, four numbers. In C++ that needs a type: the
# article's `AlignedArray<int32_t, 4>` (`Vec`) is an array that promises to lie at a multiple of 16 bytes, just like
# CUDA's own `int4`, so the compiler may use a wide store. In Python we ask for the instruction by
# name: `st_global_s32x4`.
#
# Why wide stores, in the article's words: they use four times the bandwidth of single ones; they join what would be
# several memory transactions; and the fill value `numel` lets a reader recognise padding. The padding runs beside other
# work, at almost no extra cost (几乎没额外开销). We shall come back to each of these claims in section 6.
#
# `pad_sorted_token_ids` says in SGLang whether to fill at all. Here it is always on.
#
# **Prediction.** A launch less, 0.5 us and the fill's 1.0. But 34000 places, 140 KB, now leave through a single
# multiprocessor, at 64 bytes a clock at best: 1.1 us.

# %%
prediction = guess("0x1 baseline", -1.5 + 1.1, prediction)


@cuda.jit(device=True)
def fill(sorted_token_ids, value, count):
    """The first ``count`` places, rounded up to four."""
    for i in range(cuda.threadIdx.x, (count + 3) // 4, cuda.blockDim.x):
        st_global_s32x4(sorted_token_ids, 4 * i, value, value, value, value)


@cache
def make_padding(num_experts, experts_per_warp=32):
    padded_num_experts = -(-num_experts // 32) * 32

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(padded_num_experts, int32)
        tid, stride = cuda.threadIdx.x, cuda.blockDim.x
        my_expert_start = tid // 32 * experts_per_warp
        for i in range(experts_per_warp):
            if my_expert_start + i < padded_num_experts:
                shared_counts[my_expert_start + i] = 0
        cuda.syncthreads()
        for i in range(tid, numel, stride):
            expert = topk_ids[i]
            warp, offset = expert // experts_per_warp, expert % experts_per_warp
            cuda.atomic.add(shared_counts, warp * experts_per_warp + offset, 1)
        cuda.syncthreads()
        if tid == 0:
            start = int32(0)
            cumsum[0] = start
            for i in range(num_experts):
                warp, offset = i // experts_per_warp, i % experts_per_warp
                count = shared_counts[warp * experts_per_warp + offset]
                start = int32(start + round_up(count, block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        if tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        fill(sorted_token_ids, numel, total_tokens_post_pad[0])

    return kernel


# %%
diff(make_baseline, make_padding)

# %%
measure("0x2 padding inside", main_step(make_padding), prediction_us=round(prediction, 1))

# %%
look_back("0x2 padding inside", "0x1 baseline", prediction)

# %% [markdown]
# What is a wide store worth? The next cell fills the whole array with one block and nothing else, four numbers at a
# time and one at a time.


# %%
@cuda.jit(device=True)
def fill_singly(sorted_token_ids, value, count):
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        sorted_token_ids[i] = value


@cuda.jit
def only_fill(sorted_token_ids, value, count):
    fill(sorted_token_ids, value, count)


@cuda.jit
def only_fill_singly(sorted_token_ids, value, count):
    fill_singly(sorted_token_ids, value, count)


fills = {"four at a time": only_fill, "one at a time": only_fill_singly}
places = {name: poisoned(IDS)[0] for name in fills}
times = kernel_times(
    {
        name: lambda kernel=kernel, name=name: launch(kernel, 1, THREADS, places[name], NUMEL, LENGTH)
        for name, kernel in fills.items()
    }
)
print(*(f"{name}: {'right' if (places[name] == NUMEL).all() else 'WRONG'}" for name in fills), sep="\n")
add_to_row(
    "0x2 padding inside",
    wide_us=times["four at a time"] and times["four at a time"].median,
    single_us=times["one at a time"] and times["one at a time"].median,
)
if us("0x2 padding inside", "wide_us"):
    for name, key in (("four at a time", "wide_us"), ("one at a time", "single_us")):
        took = us("0x2 padding inside", key)
        print(f"{name}: {took:.2f} us, an empty kernel's {EMPTY_US[False]:.2f} us included")

# %% [markdown]
# **Look back.** The launch is gone and its work is not: it has moved to a single multiprocessor, where it comes after
# everything else. With few tokens that should be a clear gain: published rows for one token show 25.8 us with the fill
# outside and 23.9 us with it inside (PR 7794). With many tokens it is a trade: for 512 tokens they show 32.06 us and
# 31.97 us (PR 7437).
#
# Two more things can be read in the code. The article says that the whole array is filled. The loop stops at
# `num_tokens_post_pad`, so the tail behind it stays what it was. And the count is rounded *up* to four: if the array
# ends before that, the last store runs over its end (section 7).
#
# ### Step 3: Blelloch's scan, 0x3
#
# **Idea.** "Only thread 0 works" was the worst of it. There are ways to make a prefix sum, or **scan**, with many
# threads. Blelloch's is a classic. It works in place, in a shared array whose length is a power of two, and in two
# phases.
#
# - **Up-sweep** (the reduce phase). Neighbours are added up, then pairs of neighbours, then fours: a tree of sums, from
#   the bottom to the top. The last number becomes the sum of all.
# - **Down-sweep** (the distribution phase). The last number is set to zero. Then the tree is walked from the top to the
#   bottom. For each pair `(ai, bi)` the left one gets the right one's value, and the right one gets the sum of both.
#   What is handed down is "the sum of everything before this part".
#
# In the end each place holds the sum of all numbers before it. That is called an **exclusive** scan. The down-sweep is
# the up-sweep run backwards: each of its steps hands out what one step of the other collected. The work is O(n), as
# for one thread, but the depth, the number of steps one after the other, is O(log n).
#
# The article steps through eight numbers. So do we, and let the GPU do it: this kernel writes the whole array down
# after each step. Then we compare with the article's rows.


# %%
@cuda.jit(device=True)
def up_sweep(scan_buf, tid, offset):
    ai = offset * (2 * tid + 1) - 1
    bi = offset * (2 * tid + 2) - 1
    scan_buf[bi] += scan_buf[ai]


@cuda.jit(device=True)
def down_sweep(scan_buf, tid, offset):
    ai = offset * (2 * tid + 1) - 1
    bi = offset * (2 * tid + 2) - 1
    left = scan_buf[ai]
    scan_buf[ai] = scan_buf[bi]
    scan_buf[bi] += left


@cuda.jit
def blelloch_in_rows(values, rows, n):
    scan_buf = cuda.shared.array(32, int32)
    tid = cuda.threadIdx.x
    scan_buf[tid] = values[tid]
    cuda.syncthreads()
    offset, row = 1, 0
    while offset < n:
        if tid < n // (2 * offset):
            up_sweep(scan_buf, tid, offset)
        cuda.syncthreads()
        rows[row * n + tid] = scan_buf[tid]
        cuda.syncthreads()
        offset, row = offset * 2, row + 1
    if tid == 0:
        scan_buf[n - 1] = 0
    cuda.syncthreads()
    rows[row * n + tid] = scan_buf[tid]
    cuda.syncthreads()
    while offset > 1:
        offset, row = offset // 2, row + 1
        if tid < n // (2 * offset):
            down_sweep(scan_buf, tid, offset)
        cuda.syncthreads()
        rows[row * n + tid] = scan_buf[tid]
        cuda.syncthreads()


NUMBERS = [3, 1, 7, 0, 4, 1, 6, 3]
ARTICLE = {
    "up, step 1: neighbours": [3, 4, 7, 7, 4, 5, 6, 9],
    "up, step 2: 2 apart": [3, 4, 7, 11, 4, 5, 6, 14],
    "up, step 3: 4 apart, the last is the total": [3, 4, 7, 11, 4, 5, 6, 25],
    "down, step 0: the last becomes 0": [3, 4, 7, 11, 4, 5, 6, 0],
    "down, step 1: stride 4, pair (3, 7)": [3, 4, 7, 0, 4, 5, 6, 11],
    "down, step 2: stride 2, pairs (1, 3) (5, 7)": [3, 0, 7, 4, 4, 11, 6, 16],
    "down, step 3: stride 1, all neighbours": [0, 3, 4, 11, 11, 15, 16, 22],
}
values = torch.tensor(NUMBERS, dtype=torch.int32, device=DEVICE)
rows = torch.full((len(ARTICLE), 8), -7, dtype=torch.int32, device=DEVICE)
launch(blelloch_in_rows, 1, 8, values, rows, 8)
for (name, expected), row in zip(ARTICLE.items(), rows.tolist()):
    print(f"{name:<45}", row, "as in the article" if row == expected else f"but the article has {expected}")
print("the sums of all numbers before each:         ", [sum(NUMBERS[:i]) for i in range(8)])

# %%
draw.blelloch(NUMBERS)

# %% [markdown]
# Look at the places 3 and 7 while the tree is walked down. After step 1, place 7 holds 11, the sum of places 0 to 3.
# After step 2, place 3 holds 4, the sum of places 0 and 1, and place 7 holds 16, the sum of places 0 to 5.
#
# (The kernel has a barrier after each row that it writes down, too. Our first version had none, and the simulator
# showed other rows than the article: some threads had gone on to the next step while others still copied. That was a
# race.)
#
# **`expert_ids` by binary search.** In 0x2 each thread wrote all blocks of one expert. If one expert has most of the
# tokens, one thread has most of the work. Now each thread takes *blocks* and asks to whom a block belongs: it searches
# the prefix sums for the last one that is not above the block's first place. All threads take part, the load is
# balanced, and a search takes O(log num_experts) steps. (In the article's terms: before, O(blocks / experts) for a
# thread, unevenly spread; now O(blocks), evenly.) The article recommends it for uneven loads.
#
# **Shared memory.** Three arrays now: `shared_counts` with a number for each expert, `prefix` with one more, and
# `scan_buf` with `scan_size = next_pow2(num_experts)`. The article computes 1540 bytes for 128 experts:


# %%
def next_pow2(n):
    return 1 << (n - 1).bit_length()


def shared_bytes(num_experts, warp_sums=0):
    return (num_experts + (num_experts + 1) + next_pow2(num_experts) + warp_sums) * 4


for experts in (128, 256):
    print(f"{experts} experts: {shared_bytes(experts)} bytes, with 0x4's 32 sums {shared_bytes(experts, 32)}")

# %% [markdown]
# **Prediction.** The serial loop goes. In exchange come the barriers: one in each step of the tree, eight up and
# eight down for 256 experts, and two between.

# %%
prediction = guess("0x2 padding inside", 18 * ASSUMED_NS["a barrier"] / 1000 - SERIAL_US, prediction)


@cuda.jit(device=True)
def find_expert(prefix, num_experts, block_start):
    """The last expert that begins at or before this place."""
    left, right = int32(0), int32(num_experts)
    while left < right:
        mid = int32((left + right) >> 1)
        if prefix[mid] <= block_start:
            left = int32(mid + 1)
        else:
            right = mid
    return left - 1


@cuda.jit(device=True)
def search_experts(prefix, num_experts, expert_ids, block_size):
    num_blocks = int32(uint32(prefix[num_experts]) // uint32(block_size))
    for i in range(cuda.threadIdx.x, num_blocks, cuda.blockDim.x):
        expert_ids[i] = find_expert(prefix, num_experts, i * block_size)


@cuda.jit(device=True)
def count_slots(shared_counts, topk_ids, num_experts, numel):
    tid = cuda.threadIdx.x
    if tid < num_experts:
        shared_counts[tid] = 0
    cuda.syncthreads()
    for i in range(tid, numel, cuda.blockDim.x):
        cuda.atomic.add(shared_counts, topk_ids[i], 1)
    cuda.syncthreads()


@cache
def make_blelloch(num_experts):
    ends, scan_size = num_experts + 1, next_pow2(num_experts)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        scan_buf = cuda.shared.array(scan_size, int32)
        tid = cuda.threadIdx.x
        count_slots(shared_counts, topk_ids, num_experts, numel)
        if tid < scan_size:
            scan_buf[tid] = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        cuda.syncthreads()
        offset = 1
        while offset < scan_size:
            if tid < scan_size // (2 * offset):
                up_sweep(scan_buf, tid, offset)
            offset *= 2
            cuda.syncthreads()
        if tid == 0:
            prefix[num_experts] = scan_buf[scan_size - 1]
            scan_buf[scan_size - 1] = 0
        cuda.syncthreads()
        while offset > 1:
            offset //= 2
            if tid < scan_size // (2 * offset):
                down_sweep(scan_buf, tid, offset)
            cuda.syncthreads()
        if tid < num_experts:
            prefix[tid] = scan_buf[tid]
        cuda.syncthreads()
        if tid <= num_experts:
            cumsum[tid] = prefix[tid]
        total_tokens_post_pad[0] = prefix[num_experts]
        search_experts(prefix, num_experts, expert_ids, block_size)
        fill(sorted_token_ids, numel, prefix[num_experts])

    return kernel


# %%
measure("0x3 Blelloch scan", main_step(make_blelloch), prediction_us=round(prediction, 1))

# %%
look_back("0x3 Blelloch scan", "0x2 padding inside", prediction)


if simulator.ENABLED:
    print("The compiler's view of the shared arrays needs a GPU: nothing is compiled in the simulator.")
else:
    ptx = compile_kernel(make_blelloch(128), ("int32*",) * 5 + ("int32",) * 3).ptx
    arrays = [int(n) for n in re.findall(r"^\.visible \.shared .*\[(\d+)\];", ptx, re.MULTILINE)]
    print(f"shared arrays as compiled for 128 experts: {' + '.join(map(str, arrays))} = {sum(arrays)} bytes")

# %% [markdown]
# **Look back.** O(n) for one thread became O(log n) for many. Published rows for one token and 256 experts show the
# change from 25.8 to 20.9 us, and with the padding inside from 23.9 to 19.2 us (PR 7794). But "from O(128) to O(7)" is
# not "18 times fewer steps". The tree is climbed twice, each step ends in a barrier, and there are a few more between.
# The simulator counts the barriers that a thread comes to; we let it, after the next step.
#
# Compare also the lines for tokens that all go to the same experts: that is where the binary search should gain most.
#
# ### Step 4: a scan in two levels, 0x4
#
# **Idea.** Each step of Blelloch's tree ends with a barrier of 1024 threads. The lanes of a *warp* need no barrier to
# talk to each other: a shuffle reads another lane's register, without memory, in a few clocks. In `shfl_up` each lane
# reads from the lane `offset` below it. `warp_exclusive_scan` does that with offsets 1, 2, 4, 8 and 16, five rounds for
# 32 lanes, and takes off the lane's own number at the end, to make the scan exclusive.
#
# The article lists three advantages: no barrier, because the lanes of a warp are "in step by nature" (天然同步); a
# latency of a few clocks, from register to register; and more independent instructions. The first needs a footnote.
# Since 2017 the lanes of NVIDIA's GPUs may run apart. What keeps them together here is the shuffle: it waits for
# all lanes that its mask names.
#
# (In C++ a macro `SHFL_UP` stands for `__shfl_up_sync` on NVIDIA's GPUs and for `__shfl_up` on AMD's, where a shuffle
# takes no mask.)
#
# Again on the article's eight numbers:


# %%
@cuda.jit(device=True)
def warp_exclusive_scan(v):
    """The sum of the numbers of all lanes below this one."""
    original, lane = v, cuda.threadIdx.x & 31
    for s in range(5):
        n = cuda.shfl_up_sync(FULL, v, 1 << s)
        if lane >= 1 << s:
            v = int32(v + n)
    return int32(v - original)


@cuda.jit
def warp_scan_in_rows(values, rows):
    lane = cuda.threadIdx.x
    v = values[lane]
    for s in range(3):
        n = cuda.shfl_up_sync(FULL, v, 1 << s)
        if lane >= 1 << s:
            v = int32(v + n)
        rows[s * 32 + lane] = v
    rows[3 * 32 + lane] = warp_exclusive_scan(values[lane])


ARTICLE = {
    "offset 1": [3, 4, 8, 7, 4, 5, 7, 9],
    "offset 2": [3, 4, 11, 11, 12, 12, 11, 14],
    "offset 4": [3, 4, 11, 11, 15, 16, 22, 25],
    "exclusive": [0, 3, 4, 11, 11, 15, 16, 22],
}
values = torch.zeros(32, dtype=torch.int32, device=DEVICE)
values[:8] = torch.tensor(NUMBERS)
rows = torch.full((4, 32), -7, dtype=torch.int32, device=DEVICE)
launch(warp_scan_in_rows, 1, 32, values, rows)
for (name, expected), row in zip(ARTICLE.items(), rows[:, :8].tolist()):
    print(f"{name:<10}", row, "as in the article" if row == expected else f"but the article has {expected}")

# %%
draw.warp_scan(NUMBERS)

# %% [markdown]
# 256 experts are eight warps. So there are **two levels** (两层扫描):
#
# 1. Every warp scans its own 32 numbers. Its last lane writes the warp's sum to `warp_sums`.
# 2. After a barrier, warp 0 scans the warp sums.
# 3. After another barrier, every thread adds what is before its warp.
#
# `warp_sums` has 32 numbers, because a block has at most 32 warps: 128 bytes more shared memory.

# %%
draw.two_level_scan()

# %% [markdown]
# The article counts three barriers for this, "in place of 2 log(128) = 14", and promises about 10 % for 128 experts or
# more. Its listing, though, does it twice. The first pass finds the total (an *inclusive* scan, whose last sum is the
# total), the second one finds the starts. Here is the listing as it stands; we only gave its two passes names. With
# `mended=False` it is the article's code, step for step. Can you see what is wrong with it? We have added one line.
#
# **Prediction.** Ten barriers in place of twenty-one: 0.2 us.

# %%
prediction = guess("0x3 Blelloch scan", -11 * ASSUMED_NS["a barrier"] / 1000, prediction)


@cuda.jit(device=True)
def total_over_block(v, warp_sums, num_warps):
    """The article's first pass: an inclusive scan, for its last sum."""
    tid = cuda.threadIdx.x
    warp_sum = int32(warp_exclusive_scan(v) + v)
    if tid & 31 == 31:
        warp_sums[tid // 32] = warp_sum
    cuda.syncthreads()
    if tid < 32:
        sums = warp_sums[tid] if tid < num_warps else int32(0)
        warp_sums[tid] = int32(warp_exclusive_scan(sums) + sums)
    cuda.syncthreads()
    return warp_sums[num_warps - 1]


@cuda.jit(device=True)
def block_exclusive_scan(v, warp_sums, num_warps):
    """The article's second pass: the sum of the numbers of all threads below this one."""
    warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x & 31
    pre = warp_exclusive_scan(v)
    if lane == 31:
        warp_sums[warp] = int32(pre + v)
    cuda.syncthreads()
    if warp == 0:
        sums = warp_sums[lane] if lane < num_warps else int32(0)
        warp_sums[lane] = warp_exclusive_scan(sums)
    cuda.syncthreads()
    return int32(pre + warp_sums[warp])


@cache
def make_two_level(num_experts, mended=True):
    ends, scan_size = num_experts + 1, next_pow2(num_experts)
    num_warps_for_scan = -(-scan_size // 32)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        scan_buf = cuda.shared.array(scan_size, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid = cuda.threadIdx.x
        count_slots(shared_counts, topk_ids, num_experts, numel)
        padded_count = int32(0)
        if tid < num_experts:
            padded_count = round_up(shared_counts[tid], block_size)
            scan_buf[tid] = padded_count
        total = total_over_block(padded_count, warp_sums, num_warps_for_scan)
        if tid == 0:
            prefix[num_experts] = total
            total_tokens_post_pad[0] = total
        cuda.syncthreads()
        if num_experts <= tid < scan_size:
            scan_buf[tid] = 0
        cuda.syncthreads()
        v = scan_buf[tid] if tid < scan_size else int32(0)
        start = block_exclusive_scan(v, warp_sums, num_warps_for_scan)
        if tid < scan_size:
            scan_buf[tid] = start
        cuda.syncthreads()
        if tid < num_experts:
            prefix[tid] = scan_buf[tid]
        if tid <= num_experts:
            cumsum[tid] = prefix[tid]
        if mended:
            cuda.syncthreads()
        search_experts(prefix, num_experts, expert_ids, block_size)
        fill(sorted_token_ids, numel, prefix[num_experts])

    return kernel


# %%
measure("0x4 two-level scan", main_step(make_two_level), prediction_us=round(prediction, 1))

# %%
look_back("0x4 two-level scan", "0x3 Blelloch scan", prediction)

# %% [markdown]
# #### The race
#
# The listing's last lines write `prefix[tid]`, a number by each of the first 256 threads. Then all threads search
# `prefix`, all of it, for the expert of their blocks. Between the two the article has no barrier. A warp that is early
# searches numbers that have not been written yet. (In 0x3 there was a barrier. It got lost in the change.)
#
# On a GPU the warps run closely side by side, and the search begins with the middle of the table. So the mistake may
# hide for years. SGLang's code had it from 0x4 on, and the barrier was added later. In the simulator it cannot hide:
# threads run in an order that a seed draws, and shared memory begins as poison. We run the kernel under eight seeds,
# first as the article has it, then mended. Where a GPU runs this notebook, the simulator runs in a process of its own.

# %%
SMALL_SIZES = dict(DEVICE="cpu", EXPERTS=64, TOPK=4, TOKENS=64, BLOCK=16, THREADS=128)


def simulate_main(make, ids, num_experts=64, block_size=16, **options):
    """The main kernel and the sort in the simulator; gives the outputs, and what is wrong with them."""
    lengths = *sizes(ids.numel(), block_size, num_experts), 1
    outputs = tuple(torch.full((length,), -7, dtype=torch.int32) for length in lengths)
    cumsum = torch.empty(num_experts + 1, dtype=torch.int32)
    run_main(make(num_experts, **options), ids, outputs, cumsum, block_size)
    return outputs, mismatch(*outputs, ids, block_size, num_experts, any_order=True, any_tail=True)


def race():
    torch.manual_seed(0)
    ids = random_ids(64, 64, 4)
    for mended in (False, True):
        wrong = {}
        for seed in range(8):
            with simulator.seed(seed):
                _, fault = simulate_main(make_two_level, ids, mended=mended)
            if fault:
                wrong[seed] = fault
        print("mended:" if mended else "as in the article:", "wrong for the seeds", list(wrong))
        for seed, fault in list(wrong.items())[:2]:
            print(f"    seed {seed}: {fault}")


in_simulator(race, constants=SMALL_SIZES)

# %% [markdown]
# One `syncthreads` mends it. Only `expert_ids` come out wrong, and only some of them: the GEMM would multiply those
# blocks with another expert's matrix, and no error would be raised.
#
# #### How many barriers?
#
# The simulator can also count. A **trace** (`simulator.trace()`) records each time a thread comes to a barrier, a
# shuffle or another operation of many threads.


# %%
def count_barriers():
    ids, found = random_ids(8, 128, 4), {}
    for name, make, options in (
        ("0x2, serial", make_padding, {}),
        ("0x3, Blelloch", make_blelloch, {}),
        ("0x4, as in the article", make_two_level, {"mended": False}),
        ("0x4, mended", make_two_level, {}),
    ):
        with simulator.trace() as events:
            simulate_main(make, ids, 128, **options)
        found[name] = sum(e.what == "syncthreads" for e in events) // THREADS
        print(f"{name:<24}{found[name]:3} barriers for 128 experts")
    return found


BARRIERS = in_simulator(count_barriers, constants=SMALL_SIZES)

# %% [markdown]
# Three barriers each belong to the other parts of the kernel: two to the counting, and one after `scan_buf` is filled
# (in 0x4, after the zeros). What is left belongs to the scan. For Blelloch's scan that is `2 log(n)`, plus one for the
# zero at the top, plus one before the search. For 0x4 it is six, and seven with the one that was missing. Neither is
# three: the article counts one pass of two.

# %% [markdown]
# ### Step 5: one pass is enough
#
# **Idea.** The second pass of 0x4 knows everything. If threads without an expert bring a zero, then thread
# `num_experts` receives the sum of all counts: the total. So the first pass can go, and with it `scan_buf` and its
# zeros, because a thread can keep its own number in a register. That leaves the three barriers that the article speaks
# of: one after the warp sums, one after warp 0, and one before the search.
#
# (The block must have a thread for `num_experts` too, so 1023 experts are the most. `fill_first` is for step 6.)
#
# **Prediction.** Five barriers less: 0.1 us.

# %%
prediction = guess("0x4 two-level scan", -5 * ASSUMED_NS["a barrier"] / 1000, prediction)


@cache
def make_one_pass(num_experts, fill_first=False):
    ends, num_warps_for_scan = num_experts + 1, num_experts // 32 + 1

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid = cuda.threadIdx.x
        if fill_first:
            fill_singly(sorted_token_ids, numel, length)
        count_slots(shared_counts, topk_ids, num_experts, numel)
        padded_count = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        start = block_exclusive_scan(padded_count, warp_sums, num_warps_for_scan)
        if tid <= num_experts:
            prefix[tid] = start
            cumsum[tid] = start
        if tid == num_experts:
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        search_experts(prefix, num_experts, expert_ids, block_size)
        if not fill_first:
            fill(sorted_token_ids, numel, prefix[num_experts])

    return kernel


# %%
measure("0x4, one pass", main_step(make_one_pass), prediction_us=round(prediction, 1))

# %%
look_back("0x4, one pass", "0x4 two-level scan", prediction)
if latencies() and us("0x2 padding inside"):
    scan = (us("0x2 padding inside") - us("0x4, one pass")) / us("0x2 padding inside")
    print(f"From 0x2 to here {100 * scan:.0f} % of the time went away; a barrier is {latencies()['a barrier']:.0f} ns.")

# %% [markdown]
# **Look back.** The code is half as long, and easier to get right. What five barriers are worth can be computed from
# the chain of section 3; it is not much beside the serial loop that 0x3 took away. The scan is short now. What remains
# is one block that goes through all slots, the fill, and the second launch.
#
# ### Step 6: smaller buffers, and other threads that fill, 0x5
#
# **Idea 1: a smaller buffer for few slots** (动态padding). How long must `sorted_token_ids` be? Each of the experts may
# end in a block with a single slot, so there may be `num_experts * (block_size - 1)` places of padding:
#
# ```python
# max_num_tokens_padded = topk_ids.numel() + num_experts * (block_size - 1)
# if pad_sorted_ids:
#     max_num_tokens_padded = round_up(max_num_tokens_padded, block_size)
# if topk_ids.numel() < num_experts:                                    # new in 0x5
#     max_num_tokens_padded = topk_ids.numel() * block_size
# ```
#
# With fewer slots than experts, though, at most `numel` experts have any slot, and each of them needs at least a block.
# In the worst case every slot has a block of its own. The article's example has 8 slots, 256 experts and blocks of 128:


# %%
def max_num_tokens_padded(numel, num_experts, block_size, pad_sorted_ids=False, dynamic=True):
    length = numel + num_experts * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    return numel * block_size if dynamic and numel < num_experts else length


OLD_LENGTH = max_num_tokens_padded(8, 256, 128, dynamic=False)
NEW_LENGTH = max_num_tokens_padded(8, 256, 128)
SAVED = 100 * (1 - NEW_LENGTH / OLD_LENGTH)
print(f"8 slots, 256 experts, blocks of 128: {OLD_LENGTH} -> {NEW_LENGTH} places, {SAVED:.2f} % saved")
worse = [
    (n, e, b)
    for n in range(1, 40)
    for e in range(1, 40)
    for b in (1, 2, 16, 128)
    if max_num_tokens_padded(n, e, b) > max_num_tokens_padded(n, e, b, dynamic=False)
]
print("cases in which the new length is the longer one:", worse)

# %% [markdown]
# **Idea 2: fill beside the counting** (并行填充). The fill does not depend on the counts, if it fills the whole array.
# So the kernel is started with *two* blocks, `<<<2, threads>>>` in place of `<<<1, threads>>>`. Block 1 fills and
# is done. Block 0 does the rest, without the fill. The two run on different multiprocessors at the same time.
# Neither waits for the other, and nothing goes wrong: who writes the slots over the fill is the sort kernel, a
# second launch, which begins when both blocks are done. The article expects most of it where the arrays are large.
#
# What does it replace? In this section of the article 0x4 fills at the beginning, one number at a time, the whole
# array. In section 0x2 it filled at the end, four at a time, the used part. So we measure the kernel of step 5 in both
# ways: filling at the end, as it stands above, and filling first.
#
# **Prediction.** Filling first means 36 single stores a thread, some 2 us more than no fill. With a second block the
# fill costs nothing, as long as it takes less time than the counting.

# %%
FILL_US = 2.0
prediction = guess("0x4, one pass", FILL_US - 1.1, prediction)


def make_filling_first(num_experts):
    return make_one_pass(num_experts, fill_first=True)


measure("0x4, filling first", main_step(make_filling_first), slower=True, prediction_us=round(prediction, 1))
prediction = guess("0x4, filling first", -FILL_US, prediction)


@cache
def make_parallel_fill(num_experts):
    ends, num_warps_for_scan = num_experts + 1, num_experts // 32 + 1

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid = cuda.threadIdx.x
        if cuda.blockIdx.x == 1:
            fill_singly(sorted_token_ids, numel, length)
            return  # the whole block leaves, so no barrier waits for it
        count_slots(shared_counts, topk_ids, num_experts, numel)
        padded_count = round_up(shared_counts[tid], block_size) if tid < num_experts else int32(0)
        start = block_exclusive_scan(padded_count, warp_sums, num_warps_for_scan)
        if tid <= num_experts:
            prefix[tid] = start
            cumsum[tid] = start
        if tid == num_experts:
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        search_experts(prefix, num_experts, expert_ids, block_size)

    return kernel


# %%
diff(make_one_pass, make_parallel_fill)

# %%
measure("0x5 parallel fill", main_step(make_parallel_fill, blocks=2), prediction_us=round(prediction, 1))

# %% [markdown]
# #### The small kernel of 0x5
#
# The small kernel has one block, so there is no second block to fill. It gets more threads instead: `fill_threads`, 256
# of them, a template argument in C++, so that it is started with `<<<1, fill_threads + threads>>>`. They fill, and the
# other threads count. Then everybody must wait, because the block's own threads write the slots over the fill.
#
# In the article the fill threads stand in a branch of their own. They fill, call `__syncthreads()` three times and
# return. The other threads call it three times too, at other lines of the code: after counting, after summing up the
# columns, after the prefix sum. The three calls exist only so that the numbers of barriers agree. CUDA's rules allow a
# barrier in a branch only if *all* threads of the block take that branch. A GPU counts arrivals and does not look at
# lines, so it works. It is still undefined, and the simulator refuses it:


# %%
@cuda.jit
def barriers_in_two_branches(out, fill_threads):
    tid = cuda.threadIdx.x
    if tid < fill_threads:
        out[tid] = 1
        cuda.syncthreads()
        cuda.syncthreads()
        cuda.syncthreads()
        return
    cuda.syncthreads()
    cuda.syncthreads()
    cuda.syncthreads()
    out[tid] = 2


def try_two_branches():
    try:
        barriers_in_two_branches[1, 128](torch.zeros(128, dtype=torch.int32), 64)
        print("no objection")
    except simulator.SimulatorError as error:
        print(f"{type(error).__name__}: {error}")


in_simulator(try_two_branches)

# %% [markdown]
# The remedy costs nothing: all threads walk through the same three barriers, and what they do between them depends on
# who they are. We first make the small kernel fill by itself, as in 0x2 and 0x4, and then give it the extra threads.


# %%
@cache
def make_small_filling(num_experts, fill_threads=0):
    threads = max(num_experts, 32)
    ends, cells = num_experts + 1, (threads + 1) * num_experts

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
        cumsum = cuda.shared.array(ends, int32)
        tokens_cnts = cuda.shared.array(cells, int32)
        tid = cuda.threadIdx.x - fill_threads
        if tid < 0 or fill_threads == 0:
            for i in range(cuda.threadIdx.x, length, fill_threads or threads):
                sorted_token_ids[i] = numel
        if tid >= 0:
            for i in range(num_experts):
                tokens_cnts[(tid + 1) * num_experts + i] = 0
            for i in range(tid, numel, threads):
                tokens_cnts[(tid + 1) * num_experts + topk_ids[i]] += 1
        cuda.syncthreads()
        if 0 <= tid < num_experts:
            tokens_cnts[tid] = 0
            for i in range(1, threads + 1):
                tokens_cnts[i * num_experts + tid] += tokens_cnts[(i - 1) * num_experts + tid]
        cuda.syncthreads()
        if tid == 0:
            start = int32(0)
            cumsum[0] = start
            for i in range(num_experts):
                start = int32(start + round_up(tokens_cnts[threads * num_experts + i], block_size))
                cumsum[i + 1] = start
            total_tokens_post_pad[0] = start
        cuda.syncthreads()
        if 0 <= tid < num_experts:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        if tid >= 0:
            for i in range(tid, numel, threads):
                mine = tid * num_experts + topk_ids[i]
                sorted_token_ids[cumsum[topk_ids[i]] + tokens_cnts[mine]] = i
                tokens_cnts[mine] += 1

    return kernel


# %%
FILL_THREADS = 64 if simulator.ENABLED else 256
add_to_row("0x4 two-level scan", small_us=measure_small(make_small_filling))
add_to_row(
    "0x5 parallel fill",
    small_us=measure_small(lambda experts: make_small_filling(experts, FILL_THREADS), FILL_THREADS),
    main_for_small_us=main_for_small(make_parallel_fill, 2),
)
print("both small kernels: right")

# %% [markdown]
# To test what the article promises for small batches we need four more times, all for one token and blocks of 128: the
# kernel that fills first, with the old length and with the new one, and the parallel fill with the old and the new.


# %%
def for_one_token(make, blocks, dynamic):
    """The time for one token and blocks of 128, with the old length or the new one; None in the simulator."""
    outputs = poisoned(ONE, block_size=128)
    if not dynamic:
        length = max_num_tokens_padded(ONE.numel(), EXPERTS + 1, 128, True, dynamic)
        outputs = (torch.full((length,), -7, dtype=torch.int32, device=DEVICE), *outputs[1:])
    kernel = make(EXPERTS)
    wrong = check(run_main(kernel, ONE, outputs, CUMSUM, 128, blocks), ONE, block_size=128)
    assert not wrong, wrong
    stats = None if simulator.ENABLED else kernel_time(lambda: run_main(kernel, ONE, outputs, CUMSUM, 128, blocks))
    return stats and stats.median


add_to_row(
    "0x5 parallel fill",
    serial_old_us=for_one_token(make_filling_first, 1, False),
    serial_new_us=for_one_token(make_filling_first, 1, True),
    parallel_old_us=for_one_token(make_parallel_fill, 2, False),
    parallel_new_us=for_one_token(make_parallel_fill, 2, True),
)
look_back("0x4, filling first", "0x4, one pass")
look_back("0x5 parallel fill", "0x4, filling first", prediction)
if us("0x5 parallel fill", "small_us"):
    for fill_way in ("serial", "parallel"):
        old, new = (us("0x5 parallel fill", f"{fill_way}_{length}_us") for length in ("old", "new"))
        print(f"one token, blocks of 128, {fill_way} fill: old length {old:.1f} us, new length {new:.1f} us")
    print(
        f"the small kernel, 64 tokens, 64 experts: {us('0x4 two-level scan', 'small_us'):.1f} us, "
        f"with fill threads {us('0x5 parallel fill', 'small_us'):.1f} us; "
        f"the main kernel there: {us('0x5 parallel fill', 'main_for_small_us'):.1f} us"
    )

# %% [markdown]
# **Look back.** Here the article ends. What is left? One block counts 32768 slots while 131 multiprocessors watch. A
# second launch reads all ids again, and its atomic additions meet in 256 places of global memory. And each place that
# gets a slot is written twice, first by the fill and then by the sort.
#
# ### The order changes from run to run
#
# The second launch has another fault, and no measurement shows it. `atomicAdd` hands out places in the order in which
# threads come. We run 0x5 several times and count how many different `sorted_token_ids` come out.


# %%
def distinct_results(run, ids, times=8):
    """How many different outputs a step gives in so many runs; in the simulator each run has its own seed."""
    seen = set()
    for n in range(times):
        with simulator.seed(n) if simulator.ENABLED else contextlib.nullcontext():
            outputs = run(ids, poisoned(ids))[:3]
        seen.add(tuple(tuple(output.tolist()) for output in outputs))
    return len(seen)


RUNS = 4 if simulator.ENABLED else 50
ORDERS = distinct_results(main_step(make_parallel_fill, blocks=2), IDS, RUNS)
print(f"0x5: {ORDERS} different results in {RUNS} runs")

# %% [markdown]
# ### Step 7: each output element once
#
# **Idea.** The rest of the ladder is this project's. Three thoughts, in one kernel:
#
# - **Every output element is written once, by one thread.** A place of `sorted_token_ids` is a slot, or padding, or
#   tail. Whoever knows the counts knows which, so nothing has to be filled first and then written over. Then no two
#   writes can come in the wrong order, and there is nothing to wait for.
# - **Every block counts everything.** Many blocks share the writing. Each needs the counts of all slots, and gets them
#   by counting all slots itself. That sounds wasteful, but the multiprocessors are there, and counting it oneself is
#   faster than waiting for somebody else's message. So there is one launch, and no talk between blocks.
# - **A rank from bits.** Where does a slot go? Its expert's start, plus the slots of the expert before it. Those before
#   the block's own part are counted apart (`before`). For those inside it each expert has a **bitmask**, one bit for
#   each slot of the block's part. A slot sets its bit with an atomic *or*. Its rank is the number of bits below its
#   own. An atomic addition would hand out ranks in the order of arrival. An *or* is the same in any order. So the
#   result is stable, and the same in every run.

# %%
draw.element_writers(random_ids(6, 4, 2).cpu(), block_size=4, num_experts=4, blocks=2)

# %%
draw.bitmask_rank([2, 0, 3, 2, 1, 2, 0, 2, 3, 1, 2, 0, 1, 2, 3, 0], expert=2)

# %% [markdown]
# (In the first picture a block has a single warp, so the experts' padding goes to the blocks by turns. Blocks have more
# warps, and then the warps of all blocks take turns.)
#
# **Prediction.** For few tokens: one launch in place of two and three barriers, 1.5 us. For 4096 tokens each block
# still goes through all slots, so counting takes as long as before, but the second launch is gone.

# %%
prediction = guess("0x5 parallel fill", -EMPTY_US[False] - SORT_US, prediction)


@cuda.jit(device=True)
def fill_gaps(
    counts, first_block, sorted_token_ids, expert_ids, total_tokens_post_pad, num_experts, block_size, numel, length
):
    """All that is no slot: padding and expert ids, an expert a warp, and both tails. The whole grid shares the work."""
    lane, first, step = int32(cuda.threadIdx.x & 31), int32(cuda.grid(1)), int32(cuda.gridsize(1))
    e = int32(first >> 5)
    while e < num_experts:
        row, end = int32(first_block[e] * block_size + counts[e] + lane), int32(first_block[e + 1] * block_size)
        while row < end:
            sorted_token_ids[row] = numel
            row = int32(row + 32)
        row, end = int32(first_block[e] + lane), int32(first_block[e + 1])
        while row < end:
            expert_ids[row] = e
            row = int32(row + 32)
        e = int32(e + (step >> 5))
    used = int32(first_block[num_experts])
    row = int32(used * block_size + first)
    while row < length:
        sorted_token_ids[row] = numel
        row = int32(row + step)
    row = int32(used + first)
    while int32(row * block_size) < length:
        expert_ids[row] = -1
        row = int32(row + step)
    if first == 0:
        total_tokens_post_pad[0] = int32(used * block_size)


@cuda.jit(device=True)
def rank_of(masks, row):
    """The set bits below this thread's own, in a row of words with a bit for each thread."""
    warp, lane, rank = int32(cuda.threadIdx.x >> 5), cuda.threadIdx.x & 31, int32(0)
    for w in range(warp):
        rank = int32(rank + cuda.popc(masks[row + w]))
    below = uint32((uint32(1) << uint32(lane)) - uint32(1))
    return int32(rank + cuda.popc(uint32(masks[row + warp] & below)))


@cuda.jit(device=True)
def count_one_by_one(topk_ids, counts, before, first, numel, threads):
    i = int32(cuda.threadIdx.x)
    while i < numel:
        e = topk_ids[i]
        cuda.atomic.add(counts if i >= first else before, e, 1)  # a block's own slots and later ones; earlier ones
        i = int32(i + threads)


@cache
def make_each_once(num_experts, threads, count=count_one_by_one):
    words = threads // 32
    ends, bits, num_warps_for_scan = num_experts + 1, num_experts * words, num_experts // 32 + 1

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length, part):
        counts = cuda.shared.array(num_experts, int32)
        before = cuda.shared.array(num_experts, int32)
        first_block = cuda.shared.array(ends, int32)
        masks = cuda.shared.array(bits, uint32)
        warp_sums = cuda.shared.array(32, int32)
        tid = int32(cuda.threadIdx.x)
        first = int32(cuda.blockIdx.x * part)  # this block's own slots: `part` of them, at most one a thread
        slot = int32(first + tid)
        mine = tid < part and slot < numel
        if tid < num_experts:
            counts[tid] = before[tid] = 0
        for w in range(num_experts * words // threads + 1):
            if tid + w * threads < bits:
                masks[tid + w * threads] = uint32(0)
        cuda.syncthreads()
        count(topk_ids, counts, before, first, numel, threads)
        if mine:
            cuda.atomic.or_(masks, topk_ids[slot] * words + (tid >> 5), uint32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        if tid < num_experts:
            counts[tid] += before[tid]
        blocks = (counts[tid] + block_size - 1) // block_size if tid < num_experts else int32(0)
        place = block_exclusive_scan(int32(blocks), warp_sums, num_warps_for_scan)
        if tid <= num_experts:
            first_block[tid] = place
        cuda.syncthreads()
        if mine:
            e = topk_ids[slot]
            sorted_token_ids[first_block[e] * block_size + before[e] + rank_of(masks, e * words)] = slot
        fill_gaps(
            counts,
            first_block,
            sorted_token_ids,
            expert_ids,
            total_tokens_post_pad,
            num_experts,
            block_size,
            numel,
            length,
        )

    return kernel


# %%
GRID = 2 if simulator.ENABLED else min(64, LIMITS.sm_count)  # with 64 every expert's padding has a warp of its own


def each_once_step(count):
    """A way to run the kernel, with this way to count."""
    kernel = make_each_once(EXPERTS, THREADS, count)

    def run(ids, outputs):
        part = -(-ids.numel() // GRID)
        launch(kernel, GRID, THREADS, ids, *outputs, BLOCK, ids.numel(), len(outputs[0]), part)
        return outputs  # no mercy is asked for: order and tails are the reference's

    return run


run_each_once = each_once_step(count_one_by_one)
measure("each element once", run_each_once, prediction_us=round(prediction, 1))

# %%
look_back("each element once", "0x5 parallel fill", prediction)
print(f"{distinct_results(run_each_once, IDS, RUNS)} different result in {RUNS} runs")

# %% [markdown]
# **Look back.** For decoding this is the right shape. For many tokens it waits: in the loop over the slots a thread
# loads an id, adds 1, and only then loads the next one. The atomic addition stands between two loads, and the compiler
# may not move a load across it. So every round takes the latency of a load, and 32768 slots are 32 rounds for 1024
# threads.
#
# ### Step 8: eight loads at once
#
# **Idea.** A thread first asks for eight ids, and only then begins to count. Eight loads are under way at the same
# time, and their latency is paid once. The ids wait in registers (`cuda.local.array`: with constant indices it is no
# memory at all).
#
# **Prediction.** 32 rounds of waiting become 4. A load took the latency printed above, and each round has one.


# %%
@cuda.jit(device=True)
def count_eight_at_once(topk_ids, counts, before, first, numel, threads):
    ids = cuda.local.array(8, int32)
    start = int32(cuda.threadIdx.x)
    while start < numel:
        for k in range(8):
            i = int32(start + k * threads)
            ids[k] = topk_ids[i] if i < numel else int32(-1)
        for k in range(8):
            i = int32(start + k * threads)
            if i < numel:
                cuda.atomic.add(counts if i >= first else before, ids[k], 1)
        start = int32(start + 8 * threads)


ROUNDS = -(-NUMEL // THREADS)
gain_us = (ROUNDS - -(-ROUNDS // 8)) * ASSUMED_NS["a load from the L2"] / 1000
prediction = guess("each element once", -gain_us, prediction)
run_eight = each_once_step(count_eight_at_once)
measure("eight loads at once", run_eight, prediction_us=round(prediction, 1))

# %%
look_back("eight loads at once", "each element once", prediction)

# %% [markdown]
# **Look back.** What is left for many tokens is the counting itself: each block adds up all 32768 slots, so more blocks
# do not help. The remedy is to share the counting too, and then blocks must talk.
#
# ### Step 9: many blocks, and a hand-over
#
# **Idea.** Each block counts only its own slots, and writes its counts down in global memory, a row for each block.
# Then it waits until all rows are there, and adds them up: all rows give the counts, and the rows of the blocks before
# it give `before`. From there on all is as in step 7.
#
# How does a block wait for other blocks? A barrier only knows the threads of its own block. Here a counter in global
# memory does it: whoever has written its row adds 1; then one thread looks at the counter again and again (it
# **polls**) until all have come. Three things must be right.
#
# - **All blocks must run at the same time.** A block that waits keeps its multiprocessor. If the last block found no
#   room, all blocks would wait forever. With at most one block for each SM there is room. (With
#   `cooperative=True` the driver refuses a grid that does not fit.)
# - **The order of writes.** The row must be visible to others before the counter is. `threadfence()` says so: what
#   stands before it is visible before what stands after it. The barrier before it makes sure that the whole block has
#   written.
# - **The next launch.** The counter is never set back. Each launch adds as many as it has blocks, so a block waits for
#   the next multiple of that number.

# %%
draw.exchange_counts(blocks=3, experts=4)

# %% [markdown]
# **Prediction.** Counting is one slot a thread now. The hand-over is a write, an atomic addition, a poll and the loads
# of 64 rows, eight at a time: a dozen global latencies. Scan, rank and stores are as before. With the launch: 0.5 + 12
# x 0.2 + 1 = 4 us.


# %%
@cuda.jit(device=True)
def wait_for_all(counter):
    """Come back when all blocks of the grid have come here; what they wrote before is then visible."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        arrived, blocks = atom_add_s32(counter, 0, 1), cuda.gridDim.x
        goal = int32((arrived // blocks + 1) * blocks)
        while atom_add_s32(counter, 0, 0) < goal:
            pass
        cuda.threadfence()
    cuda.syncthreads()


@cuda.jit(device=True)
def add_up_rows(rows, num_experts, counts, before):
    """Column ``tid`` of all blocks' rows, and of those of earlier blocks, eight loads at once."""
    tid, me, blocks = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
    here = cuda.local.array(8, int32)
    everywhere, earlier, start = int32(0), int32(0), int32(0)
    while start < blocks:
        for k in range(8):
            here[k] = rows[int32((start + k) * num_experts + tid)] if int32(start + k) < blocks else int32(0)
        for k in range(8):
            everywhere = int32(everywhere + here[k])
            earlier = int32(earlier + (here[k] if int32(start + k) < me else int32(0)))
        start = int32(start + 8)
    counts[tid], before[tid] = everywhere, earlier


@cache
def make_hand_over(num_experts, threads):
    words = threads // 32
    ends, bits, num_warps_for_scan = num_experts + 1, num_experts * words, num_experts // 32 + 1

    @cuda.jit
    def kernel(
        topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, rows, counter, block_size, numel, length, part
    ):
        counts = cuda.shared.array(num_experts, int32)
        before = cuda.shared.array(num_experts, int32)
        first_block = cuda.shared.array(ends, int32)
        masks = cuda.shared.array(bits, uint32)
        warp_sums = cuda.shared.array(32, int32)
        tid = int32(cuda.threadIdx.x)
        slot = int32(cuda.blockIdx.x * part + tid)  # this block's own slots: `part` of them, at most one a thread
        mine = tid < part and slot < numel
        if tid < num_experts:
            counts[tid] = 0
        for w in range(num_experts * words // threads + 1):
            if tid + w * threads < bits:
                masks[tid + w * threads] = uint32(0)
        cuda.syncthreads()
        if mine:
            cuda.atomic.add(counts, topk_ids[slot], 1)
            cuda.atomic.or_(masks, topk_ids[slot] * words + (tid >> 5), uint32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        if tid < num_experts:
            rows[int32(cuda.blockIdx.x * num_experts + tid)] = counts[tid]
        wait_for_all(counter)
        if tid < num_experts:
            add_up_rows(rows, num_experts, counts, before)
        blocks = (counts[tid] + block_size - 1) // block_size if tid < num_experts else int32(0)
        place = block_exclusive_scan(int32(blocks), warp_sums, num_warps_for_scan)
        if tid <= num_experts:
            first_block[tid] = place
        cuda.syncthreads()
        if mine:
            e = topk_ids[slot]
            sorted_token_ids[first_block[e] * block_size + before[e] + rank_of(masks, e * words)] = slot
        fill_gaps(
            counts,
            first_block,
            sorted_token_ids,
            expert_ids,
            total_tokens_post_pad,
            num_experts,
            block_size,
            numel,
            length,
        )

    return kernel


# %%
diff(make_each_once, make_hand_over)

# %%
handing_over = make_hand_over(EXPERTS, THREADS)
ROWS = torch.empty(GRID * EXPERTS, dtype=torch.int32, device=DEVICE)
COUNTER = torch.zeros(1, dtype=torch.int32, device=DEVICE)  # only knows multiples of GRID


def run_handing_over(ids, outputs):
    part = -(-ids.numel() // GRID)
    assert part <= THREADS, "this kernel takes one slot a thread"
    numbers = BLOCK, ids.numel(), len(outputs[0]), part
    launch(handing_over, GRID, THREADS, ids, *outputs, ROWS, COUNTER, *numbers, cooperative=True)
    return outputs


measure("hand-over", run_handing_over, prediction_us=4.0)

# %%
look_back("hand-over", "eight loads at once", 4.0)
print(f"{distinct_results(run_handing_over, IDS, RUNS)} different result in {RUNS} runs")

# %% [markdown]
# **Look back.** Compare the last two steps at each size: the hand-over is a fixed price, the counting grows with the
# tokens. Where the two lines cross, one kernel should give way to the other. The package does that.
#
# ### Step 10: the package
#
# **Idea.** `moe_numba.moe_align_block_size` has the kernels of steps 8 and 9, made ready for use, and a third one for a
# handful of slots: one block with a warp for each slot, whose lanes hold all slots, so that two votes tell how a slot
# stands to the others. What they add:
#
# - **Every input.** 8- to 64-bit ids of any shape; 1 to 8192 experts, and any number of them for up to 1024 slots; any
#   block size; invalid ids; an `expert_map` for experts on other GPUs; no token at all.
# - **Many slots a thread.** A block may take thousands of slots. It sorts them by expert in shared memory while the
#   other blocks' counts are on their way, and then writes runs of neighbouring places.
# - **Counts that say whether they are new.** A count travels in one word with the number of the launch. A reader sees
#   from the word itself whether it is there, and needs no counter and no fence.
# - **Programmatic dependent launch.** Its blocks take their places while the kernel before it ends.
# - **Fewer instructions.** A multiprocessor starts at most four instructions a clock, and compiled Python is wordy: it
#   counts in 64 bits, asks of every index whether it is negative, and branches where a C++ programmer would not. In the
#   package indices are unsigned, and a slot that is not there counts into a bin of its own instead of being skipped.
#
# **Prediction.** The hand-over of step 9, with two global latencies less, and without the launch's full price: a
# microsecond less than step 9, and for one token 1.5 us.

# %%
from moe_numba.align import api

prediction = guess("hand-over", -1.0, 3.0)
print(f"one kernel up to {api.SMALL_MAX_SLOTS} slots, one up to {api.MEDIUM_MAX_SLOTS}, one beyond; here are {NUMEL}")


def run_package(ids, outputs):
    return moe_numba.moe_align_block_size(ids, BLOCK, EXPERTS, out=outputs)


measure("final", run_package, prediction_us=round(prediction, 1))
print(f"{distinct_results(run_package, IDS, RUNS)} different result in {RUNS} runs")

# %%
look_back("final", "hand-over", prediction)

# %% [markdown]
# ### Step 11: fused with the gate
#
# **Idea.** When a server decodes, the gate runs and then the alignment, each for some 64 tokens, each with a launch.
# The ids go through global memory in between. One kernel can do both. It is a **thread block cluster**: a few blocks
# that run side by side and can read each other's shared memory. Each block routes some tokens; the ids are exchanged
# through that shared memory; then each block writes its share, as in step 7.
#
# **Prediction.** One launch less and no wait for memory between the two: 0.7 us less than the sum of the two calls.

# %%
OPTIONS = {"num_expert_group": 8, "topk_group": 4}
BIAS = torch.rand(EXPERTS, device=DEVICE) * 0.2


def both_outputs(tokens):
    """Poisoned outputs of the gate and of the alignment."""
    weights = torch.full((tokens, TOPK), float("nan"), device=DEVICE)
    ids = torch.full((tokens, TOPK), -7, dtype=torch.int32, device=DEVICE)
    return weights, ids, *poisoned(ids)


def gate_then_align(logits, outputs):
    moe_numba.biased_grouped_topk(logits, BIAS, TOPK, **OPTIONS, out=outputs[:2])
    moe_numba.moe_align_block_size(outputs[1], BLOCK, EXPERTS, out=outputs[2:])


def fused(logits, outputs):
    moe_numba.biased_grouped_topk_align(logits, BIAS, TOPK, BLOCK, **OPTIONS, out=outputs)


for which, tokens in (("few", FEW_TOKENS), ("one", 1)):
    logits, first, second = torch.randn(tokens, EXPERTS, device=DEVICE), both_outputs(tokens), both_outputs(tokens)
    calls = {
        "two": lambda x=logits, out=first: gate_then_align(x, out),
        "one": lambda x=logits, out=second: fused(x, out),
    }
    for call in calls.values():
        call()
    same = all(map(torch.equal, first, second))
    assert same and not check(first[2:], first[1]), "the fused kernel and the two calls differ"
    print(f"{tokens} tokens, fused and in two calls: the same bits")
    stats = kernel_times(calls)
    add_to_row(
        "final",
        **{
            f"{which}_two_calls_us": stats["two"] and stats["two"].median,
            f"{which}_fused_us": stats["one"] and stats["one"].median,
        },
    )

by_function = {row.name: row.path for row in gpu_support.functions(gpu_of(IDS.device))}
print("on this GPU:", by_function["fused gate and alignment"])

# %%
for which in ("few", "one"):
    two, one = us("final", f"{which}_two_calls_us"), us("final", f"{which}_fused_us")
    if one:
        print(f"{SAYS[which]}: gate and align in two calls {two:.2f} us, fused {one:.2f} us, {two - one:.2f} us less")
    else:
        print(f"{SAYS[which]}: no figure is recorded yet")

# %% [markdown]
# ### A check must be able to fail
#
# Two wrong steps on purpose. The first swaps two slots of one expert, which only a check of the order notices. The
# second forgets the last slot of the tail.


# %%
def swaps_two():
    outputs = run_each_once(IDS, poisoned(IDS))
    sorted_token_ids = outputs[0]
    sorted_token_ids[:2] = sorted_token_ids[:2].flip(0)  # expert 0's first two places
    return outputs


def forgets_the_end():
    outputs = run_each_once(IDS, poisoned(IDS))
    outputs[0][-1] = -7
    return outputs


trial = Ladder("align_trial", check)
trial.step("swaps two slots", swaps_two, expect_wrong=True)
trial.step("forgets the end", forgets_the_end, expect_wrong=True)
print("the first one, where any order will do:", check((*swaps_two(), "any order")))

# %% [markdown]
# ### The whole ladder
#
# All steps once more, measured by turns, so that a clock that drifts hits all of them alike.

# %%
ladder.measure_all()
ladder.save(notebook_sources("notebooks/02_align.py"))

# %%
CONFIG = {"num_experts": 256, "topk": 8, "block_size": 16}


def align_us(step, tokens):
    """A step's kernel time from the record of the whole comparison, in microseconds, or None."""
    row = ALIGN and records.find(ALIGN, step=step, size={"tokens": tokens}, config=CONFIG)
    return row["kernel_us"]["median"] if row and "kernel_us" in row else None


PEERS = records.peers(ALIGN) if ALIGN else []
times = {name.removeprefix("peer:"): align_us(name, 4096) for name in PEERS}
ladder.plot(floor_us=FLOOR_US, peers={name: time for name, time in times.items() if time})

# %% [markdown]
# With few tokens the picture is another one. The same steps, for 64 tokens and for one:

# %%
LADDER = ladder.record["rows"] if simulator.ENABLED and ladder.record else ladder.rows
for row in LADDER:
    if "few_us" in row:
        print(f"{row['step']:<22}{row['few_us']:7.2f} us for 64 tokens{row['one_us']:7.2f} us for 1 token")
if not any("few_us" in row for row in LADDER):
    print("no figure is recorded yet")

# %% [markdown]
# ## 5. The sweep over tokens
#
# The comparison with the kernels of other projects is measured by `python -m moe_numba bench align` and read here from
# its record. `sglang-aot` is the kernel that the article's 0x5 became. `sglang-v2` is its successor, which also needs
# one launch for few tokens and uses programmatic dependent launch. Since it is measured with that, ours is measured
# with and without it ("no early start").

# %%
if ALIGN:
    lines = {
        "moe_numba": records.series(ALIGN, step="final", config=CONFIG),
        "moe_numba, no early start": records.series(ALIGN, step="final, in order", config=CONFIG),
    }
    for name in [*PEERS, "torch"]:
        lines[name.removeprefix("peer:")] = records.series(ALIGN, step=name, config=CONFIG)
    lines = {name: points for name, points in lines.items() if points}
    tokens = sorted({t for points in lines.values() for t in points})
    floor = {t: max(bytes_of(t) / BANDWIDTH * 1e6, EMPTY_US[True]) for t in tokens}
    picture = plots.sweep_figure(
        lines, floor=floor, title="Align over tokens, 256 experts, top-8, blocks of 16", caption=plots.caption(ALIGN)
    )
else:
    picture = print("The comparison over tokens has not been recorded yet; `python -m moe_numba bench align` does it.")
picture

# %%
for tokens in (1, 64, 1024, 4096, 16384, 65536) if ALIGN else ():
    early, in_order = align_us("final", tokens), align_us("final, in order", tokens)
    if early and in_order:
        print(
            f"{tokens:6} tokens: {early:5.2f} us; {in_order:5.2f} us without the early start; "
            f"the bytes alone {bytes_of(tokens) / BANDWIDTH * 1e6:.2f} us"
        )
for tokens in (1, 4, 16, 64) if ALIGN else ():
    two, one = (align_us(step, tokens) for step in ("gate, then align", "gate and align fused"))
    if two and one:
        print(f"{tokens:6} tokens: gate, then align {two:.2f} us; fused {one:.2f} us")

# %% [markdown]
# Even for 65536 tokens the bytes take only a microsecond. What is the rest? We once let thread 0 of each block read the
# clock (`%clock`) between the parts of the kernel. The launch aside, about two fifths are waiting for the counts and
# adding them up: each of 128 blocks reads the rows of all 128, a little more than a kilobyte each, and that is 19 MB
# through the L2 for 4 MB of data. A quarter is sorting the chunk in shared memory, where each step waits for the one
# before. Reading and counting the ids are a tenth, and so are the stores. What is left is the scan and the padding.
#
# So the next thing to attack would be the adding up. Blocks of a cluster could share it, as they share the routing in
# step 11. The number of blocks is a compromise already: with more of them each has less to sort and more rows to add,
# so the package lets it grow with the square root of the slots.

# %% [markdown]
# ## 6. The article's claims
#
# Most of the article's figures come without a table. These are rows that were published with the changes themselves.
# All times are in microseconds, and contain three copies of the inputs in each call. "Inside" means with the padding in
# the kernel; otherwise a fill runs before. For 0x5 the text that we have does not say which of the two is the older
# kernel.
#
# | change | tokens, experts, top-k | before | after |
# |---|---|---|---|
# | 0x2, PR 7437 | 512, 256, 8 | 32.06 | 31.97 inside |
# | 0x3, PR 7794 | 1, 256, 8 | 25.8 (23.9 inside) | 20.9 (19.2 inside) |
# | 0x4, PR 7884 | 8192, 256, 8 | 53.9 (56.8 inside) | 52.5 (55.4 inside) |
# | 0x5, PR 14133, one table | 4096, 256, 8 | 21.1 | 22.5 inside |
# | 0x5, PR 14133, one table | 256, 256, 8 | 10.0 | 10.5 inside |
#
# The article's summary (总结) calls the whole a typical way of optimising a CUDA kernel: first right, with a serial
# prefix sum; 0x2 for the bandwidth; 0x3 for a clear gain with a parallel prefix sum; 0x4 for fewer barriers, about 10 %
# for 128 experts and more; 0x5 on all sides at once, another 10 to 30 %. For small cases it recommends the small
# kernel, which does everything in one launch.
#
# The next cell compares each claim with the ladder. A verdict is computed, never typed. Where it needs a figure that is
# not recorded, it says so.

# %%
NOT_RECORDED = "open: not recorded yet"
PUBLISHED_0X4 = 100 * (1 - 52.5 / 53.9)


def verdict(holds, figure):
    return f"{'confirmed' if holds else 'refuted'}: {figure}"


def saves(old, new, promised, most=100):
    """Whether the new time is less than the old one by the promised percentage, or more."""
    if not old or not new:
        return NOT_RECORDED
    gain = 100 * (1 - new / old)
    more = ", more than promised" if gain > most else ""
    change = f"{abs(gain):.0f} % {'less' if gain >= 0 else 'more'}"
    return verdict(gain >= promised, f"{old:.2f} -> {new:.2f} us, {change}{more}")


def step_saves(old, new, promised, most=100, which="kernel_us"):
    return saves(us(old, which), us(new, which), promised, most)


baseline, padding, blelloch = "0x1 baseline", "0x2 padding inside", "0x3 Blelloch scan"
two_level, one_pass, first, parallel = "0x4 two-level scan", "0x4, one pass", "0x4, filling first", "0x5 parallel fill"
claims, known = [], us(parallel) is not None

serial, atomics = {}, {}
for which in ("kernel_us", "few_us") if known else ():
    serial[which] = 100 * (1 - us(one_pass, which) / us(padding, which))
if known:
    atomics = 100 * (us(baseline, "count_us") - us(baseline, "loads_us")) / us(baseline)
claims.append(
    (
        "The serial prefix sum is the largest bottleneck of 0x1 and 0x2",
        verdict(
            min(serial.values()) > 50,
            f"a parallel one takes {serial['kernel_us']:.0f} % of the time away for 4096 tokens, "
            f"{serial['few_us']:.0f} % for 64",
        )
        if known
        else NOT_RECORDED,
    )
)
claims.append(
    (
        "The many atomic additions of the counting cost a lot",
        verdict(
            atomics > 10,
            f"counting takes {us(baseline, 'count_us'):.1f} us, reading alone {us(baseline, 'loads_us'):.1f} us; "
            f"the difference is {atomics:.0f} % of 0x1",
        )
        if known
        else NOT_RECORDED,
    )
)
if known:
    wide, single = (us(padding, key) - EMPTY_US[False] for key in ("wide_us", "single_us"))
claims.append(
    (
        "0x2: 16-byte stores use four times the bandwidth",
        verdict(single / wide > 3, f"one block fills the array {single / wide:.1f} times as fast")
        if known
        else NOT_RECORDED,
    )
)
if known:
    extra = us(padding) - (us(baseline) - us(baseline, "fill_us"))
claims.append(
    (
        "0x2: the padding runs beside other work, at almost no extra cost",
        verdict(
            extra < 0.05 * us(padding),
            f"it adds {extra:.1f} us to {us(baseline) - us(baseline, 'fill_us'):.1f} us; in the "
            "listing it comes after all other work",
        )
        if known
        else NOT_RECORDED,
    )
)
claims.append(
    (
        "0x2: with the padding the output is deterministic",
        verdict(
            ORDERS == 1, f"{ORDERS} different results in {RUNS} runs; padding does not decide the order of the slots"
        ),
    )
)
scan = {name: count - 3 for name, count in BARRIERS.items()}  # without those of the other parts
took = f"{us(padding):.1f} -> {us(blelloch):.1f} us" if known else NOT_RECORDED
claims.append(
    (
        "0x3: from O(128) to O(7)",
        f"more subtle: seven levels, walked up and down, with {scan['0x3, Blelloch']} barriers; the time: {took}",
    )
)
if known:
    even, uneven = (100 * (1 - us(blelloch, which) / us(padding, which)) for which in ("kernel_us", "skewed_us"))
claims.append(
    (
        "0x3: the binary search suits uneven loads",
        verdict(uneven > even, f"0x3 saves {uneven:.0f} % when all tokens go to the same experts, else {even:.0f} %")
        if known
        else NOT_RECORDED,
    )
)
claims.append(
    (
        "0x3: 1540 bytes of shared memory for 128 experts; 0x4: 128 more",
        verdict(
            (shared_bytes(128), shared_bytes(128, 32)) == (1540, 1668),
            f"{shared_bytes(128)} and {shared_bytes(128, 32)}",
        ),
    )
)
claims.append(
    (
        "0x4: 3 barriers in place of 14",
        verdict(
            (scan["0x4, as in the article"], scan["0x3, Blelloch"]) == (3, 14),
            f"{scan['0x4, as in the article']} in place of {scan['0x3, Blelloch']}, and one more is needed; the single pass of "
            "step 5 has three",
        ),
    )
)
for which, says in (("kernel_us", "4096 tokens"), ("few_us", "64 tokens")):
    claims.append(
        (
            f"0x4: about 10 % faster for 128 experts or more ({says}, 256 experts)",
            step_saves(blelloch, two_level, 8, which=which),
        )
    )
claims.append(
    (
        "0x4: about 10 % faster (the published row for 8192 tokens)",
        verdict(PUBLISHED_0X4 >= 8, f"{PUBLISHED_0X4:.1f} %"),
    )
)
claims.append(
    (
        "0x5: 96.8 % less memory for 8 slots, 256 experts, blocks of 128",
        verdict(abs(SAVED - 96.8) < 0.1, f"{SAVED:.2f} %"),
    )
)
claims.append(
    (
        "0x5: the smaller buffer gains 5 to 10 % (one token, blocks of 128, serial fill)",
        saves(us(parallel, "serial_old_us"), us(parallel, "serial_new_us"), 5, 10),
    )
)
claims.append(
    (
        "0x5: the smaller buffer gains 5 to 10 % (the same, with the parallel fill)",
        saves(us(parallel, "parallel_old_us"), us(parallel, "parallel_new_us"), 5, 10),
    )
)
claims.append(("0x5: the parallel fill gains 20 to 30 % in the main kernel", step_saves(first, parallel, 20, 30)))
claims.append(("the same, against a fill of four at a time at the end", step_saves(one_pass, parallel, 20, 30)))
claims.append(
    (
        "0x5: the parallel fill gains 10 to 15 % in the small kernel",
        saves(us(two_level, "small_us"), us(parallel, "small_us"), 10, 15),
    )
)
claims.append(
    (
        "0x5 in all: 15 to 30 % for small batches (one token, blocks of 128)",
        saves(us(parallel, "serial_old_us"), us(parallel, "parallel_new_us"), 15, 30),
    )
)
claims.append(("0x5 in all: 10 to 20 % for large batches (4096 tokens)", step_saves(first, parallel, 10, 20)))
for which, says in (("kernel_us", "4096 tokens"), ("few_us", "64 tokens"), ("one_us", "1 token")):
    times = {name: us(name, which) for name in (baseline, padding, blelloch, two_level, parallel)}
    best = known and min(times, key=times.get)
    claims.append(
        (
            f"0x4 is the fastest version now (the article's introduction; {says})",
            verdict(best == two_level, f"of the article's it is {best}, {times[best]:.1f} us")
            if known
            else NOT_RECORDED,
        )
    )
claims.append(
    (
        "For few experts the small kernel is the better one (64 tokens, 64 experts)",
        saves(us(parallel, "main_for_small_us"), us(parallel, "small_us"), 0),
    )
)

Markdown("| claim | verdict |\n|---|---|\n" + "\n".join(f"| {claim} | {text} |" for claim, text in claims))

# %% [markdown]
# ## 7. Faults to know
#
# As with the gate, reading other people's kernels taught us a lot. The race of 0x4 was one fault, the order of the sort
# another, the barriers in two branches a third. Here are more. Each is tried in the simulator, on a small input; beside
# it stands what our function does.


# %%
def faults():
    torch.manual_seed(0)
    found = {}

    def attempt(name, make, ids, **options):
        try:
            found[name] = simulate_main(make, ids, **options)[1] or "right"
        except simulator.SimulatorError as error:
            found[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    good = random_ids(16, 64, 4)
    for name, wrong_id in (("id 64 of 64 experts", 64), ("id -1", -1)):
        bad = good.clone()
        bad[3, 1] = wrong_id
        attempt(name, make_baseline, bad)
    attempt("128 threads, 128 experts", make_padding, random_ids(16, 128, 4), num_experts=128)
    attempt("128 threads, 160 experts", make_padding, random_ids(16, 160, 4), num_experts=160)
    attempt("5 slots, blocks of 1", make_padding, random_ids(5, 64, 1), block_size=1)
    return found


FOUND = in_simulator(faults, constants=SMALL_SIZES)


def ours(ids, num_experts, block_size=16, **options):
    """What the package's function makes of the same input, as a sentence."""
    outputs = moe_numba.moe_align_block_size(ids, block_size, num_experts, **options)
    return mismatch(*outputs, ids, block_size, num_experts, **options) or "right"


# %% [markdown]
# ### Ids out of range
#
# None of the article's kernels looks at an id before it uses it as an index. An id of `num_experts` or more adds 1 to
# something behind the counters, and the sort kernel stores a slot wherever it is told to. On a GPU no error is raised.
#
# An id of -1 is not even a mistake: servers use it for tokens that are only there to fill a batch, and for experts on
# other GPUs. SGLang's later kernels therefore count id `i` in bucket `i + 1`. Bucket 0 takes the -1, and its blocks get
# `expert_ids` of -1, which the GEMM skips. Ids of `num_experts` and more are still not looked at.
#
# Ours looks at every id. What is out of range is treated as -1.

# %%
for name in ("id 64 of 64 experts", "id -1"):
    print(f"{name}, the article's: {FOUND[name]}")
for wrong_id in (64, -1, 1 << 30):
    ids = random_ids(16, 64, 4)
    ids[3, 1] = wrong_id
    dropped = ours(ids, 64, ignore_invalid_experts=True)
    print(f"id {wrong_id}, ours: {ours(ids, 64)}; where such ids are to be dropped: {dropped}")

# %% [markdown]
# ### A small kernel that is never reached
#
# The bucket for -1 has a side effect. Callers now pass `num_experts + 1`. The rule for the small kernel was written
# before:


# %%
def takes_small_kernel(numel, num_experts):
    return numel < 1024 and num_experts <= 64


for experts in (63, 64):
    print(
        f"{experts} experts, 512 slots: {takes_small_kernel(512, experts)} without the bucket, "
        f"{takes_small_kernel(512, experts + 1)} with it"
    )

# %% [markdown]
# Models with 64 experts are common, and lose the kernel that was made for them. The result is right, so no test
# notices.
#
# ### More experts than threads
#
# Many lines say `if tid < num_experts`. A block has 1024 threads at most, so with more experts some counters are
# neither cleared nor summed, and nothing checks it. In the simulator a block of 128 threads shows the same:

# %%
for name in ("128 threads, 128 experts", "128 threads, 160 experts"):
    print(f"{name}: {FOUND[name]}")
print("1100 experts, ours:", ours(random_ids(8, 1100, 4), 1100))

# %% [markdown]
# ### A store past the end
#
# 0x2 fills `(total + 3) // 4` groups of four. If the buffer is longer than `total`, or a multiple of four, this is
# harmless. With blocks of 1, 2 or 6 and no padding of the length it writes up to three numbers behind the end. SGLang's
# newest kernel fills whole groups and then the rest singly.

# %%
print("5 slots, blocks of 1, 0x2:", FOUND["5 slots, blocks of 1"])
print("5 slots, blocks of 1, ours:", ours(random_ids(5, 64, 1), 64, 1, pad_sorted_ids=False))

# %% [markdown]
# ### Tails that nobody writes
#
# All these kernels needed "any tail": `expert_ids` behind the last block are left as they were. A reader that stops at
# `num_tokens_post_pad` never sees them. A reader in a CUDA graph, which has a fixed number of blocks, may look at all.
# With what an earlier and larger batch left there it computes blocks that do not exist. Ours writes -1 to the end.

# %%
for name, run in (("0x5", main_step(make_parallel_fill, blocks=2)), ("ours", run_package)):
    outputs = poisoned(FEW)
    run(FEW, outputs)
    print(f"{name}: {sum(int((output == -7).sum()) for output in outputs)} elements were never written")

# %% [markdown]
# ## 8. Exercises
#
# Each can be done in the simulator. `check` tells whether a kernel is right; a GPU tells whether it is fast.
#
# 1. **Which barrier can go?** The mended 0x4 has ten. One of them has nothing to separate. Find it, leave it out, and
#    let eight seeds confirm it.
#    *Hint: who reads `prefix[num_experts]` right after it is written?*
# 2. **Fewer atomics.** When all tokens go to the same experts, 32 lanes add to the same counter. Let each warp find the
#    lanes with the same id (`cuda.match_any_sync`), and let one of them add for all.
#    *Hint: `cuda.popc` of the mask is the number to add. Which lane is the lowest? Does it pay when ids are random?*
# 3. **Wide loads.** The counting loop loads one id at a time, and waits for each. Load four with `load_nc_u32x4` from
#    `moe_numba.ptx.memory`.
#    *Hint: what if `numel` is no multiple of four?*
# 4. **A stable small kernel.** `make_small` gives each thread the slots `tid`, `tid + threads`, ... Which slots must it
#    get instead, so that the order is ascending without "any order"?
#    *Hint: what does row `t` of the table say?*
# 5. **A bucket for -1.** Let step 7 count id `i` in bucket `i + 1`, and everything out of range in bucket 0.
#    *Hint: `expert_ids` are `bucket - 1`; the reference does it already, so `check` will tell.*
# 6. **A hand-over too early.** In `wait_for_all`, leave out the first `syncthreads`. Which seeds fail? Then leave out
#    only the first `threadfence`. Why does the simulator not notice that?
#    *Hint: see the table in notebook 00: what does the simulator promise about the order of writes?*
#
# ## 9. Sources
#
# - The article: sgl-kernel MoE Align Block Size Kernel 优化过程解析, in Chinese. Its author wrote the baseline; 0x2 and
#   0x3 are by [ispobock](https://github.com/ispobock); 0x4 is by [yuan-luo](https://github.com/yuan-luo).
# - The changes: sglang PRs [7437](https://github.com/sgl-project/sglang/pull/7437) (0x2),
#   [7794](https://github.com/sgl-project/sglang/pull/7794) (0x3),
#   [7884](https://github.com/sgl-project/sglang/pull/7884) (0x4),
#   [14133](https://github.com/sgl-project/sglang/pull/14133) (0x5), which follows [vllm
#   29642](https://github.com/vllm-project/vllm/pull/29642).
# - On the order of the slots: [sglang 33511](https://github.com/sgl-project/sglang/pull/33511) and
#   [vllm 52532](https://github.com/vllm-project/vllm/pull/52532).
# - G. E. Blelloch, *Prefix sums and their applications*, 1990.
# - The instructions: NVIDIA, *PTX ISA*: `st.global.v4`, `shfl.sync`, `atom`, `griddepcontrol`; on barriers in branches
#   the *CUDA C++ Programming Guide*.
#
# ## The final kernels
#
# This is what `moe_numba.moe_align_block_size` runs: the kernels for a handful of slots, for few, and for many. What
# they share is in `moe_numba/align/device_functions.py`.

# %%
from moe_numba.align import kernel_large as many_slots
from moe_numba.align import kernel_medium as few_slots
from moe_numba.align import kernel_small as handful_of_slots

Markdown("```python\n" + inspect.getsource(handful_of_slots) + "\n```")

# %%
Markdown("```python\n" + inspect.getsource(few_slots) + "\n```")

# %%
Markdown("```python\n" + inspect.getsource(many_slots) + "\n```")
