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
# # The gate: which experts does a token go to?
#
# DeepSeek-V3 has 256 experts in each mixture-of-experts layer, and a token visits 8 of them. The **gate** chooses
# these 8 for every token and says how much each one counts. This notebook builds a GPU kernel for the gate. It starts
# from torch code, goes on to a well-known CUDA C++ design, and ends with the kernels of this package.
#
# It follows a Chinese article about SGLang's kernel `moe_fused_gate`. Everything in that article is here: what the
# function computes, what the fused kernel gained, how its host code and its threads are laid out, and each phase of
# the kernel. Then we go on from there.
#
# Every kernel here runs on a GPU, and, with few tokens, in a simulator on any computer. The simulator checks results
# and finds mistakes. It does not measure time. Where you see times without a GPU, they are recorded ones and say so.

# %%
import moe_numba  # before Numba: it decides whether there is a GPU, or the simulator must do

print("the simulator" if moe_numba.simulator.ENABLED else "a GPU", "runs the kernels:", moe_numba.simulator.REASON)

# %%
import inspect
import math
import time
import warnings
from functools import cache

import numpy as np
import torch
from IPython.display import Markdown
from numba import cuda, float32, int32, uint32

from moe_numba import simulator
from moe_numba.course.bench import kernel_time, plots, records, rotating
from moe_numba.course.bench.baselines.limits import H200
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.draw import gate as draw
from moe_numba.course.ladder import Ladder
from moe_numba.course.simulate import define
from moe_numba.course.source_diff import OpCounter, diff
from moe_numba.gate.device_functions import sorting_network as batcher_network
from moe_numba.gate.kernel import GateConfig
from moe_numba.gate.reference import biased_grouped_topk as reference
from moe_numba.gate.reference import mismatch
from moe_numba.ptx.arithmetic import float_as_int, int_as_float, uint_as_float
from moe_numba.ptx.memory import load_nc_u32x4
from moe_numba.ptx.warp import redux_sync_max_s32
from moe_numba.runtime.compile import compile_kernel
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # some demonstrations use one block, on purpose
EXPERTS, GROUPS, KEPT, TOPK = 256, 8, 4, 8  # DeepSeek-V3: 256 experts in 8 groups; 4 groups are kept; 8 experts chosen
TOKENS = 16 if simulator.ENABLED else 16384
DEVICE = "cpu" if simulator.ENABLED else "cuda"

# %% [markdown]
# ## 1. The problem in one picture
#
# For each token the model computes one number per expert, the **logit** (门控输出, gating output). The gate does six
# things:
#
# 1. **Sigmoid.** Each logit becomes a score between 0 and 1.
# 2. **Bias.** A correction bias (修正偏置) is added, one number per expert. It was learned to spread the load over the
#    experts. It decides *who* is chosen, but it does not change *how much* the chosen expert counts.
# 3. **Group scores.** The experts form 8 groups (专家组) of 32. A group is worth the sum of its two best experts.
# 4. **Grouped top-k.** The 4 best groups are kept. The experts of the other groups are out.
# 5. **Experts.** Of the experts that are left, the 8 best are chosen.
# 6. **Weights.** The weight of a chosen expert is its score *without* the bias, divided by the sum of the eight.
#
# Mixtral and Qwen2 have no groups: they choose the best experts at once. DeepSeek-V3 was trained with each group on a
# machine of its own. With 4 groups a token travels to at most 4 machines.

# %%
torch.manual_seed(0)
LOGITS = rotating(lambda: torch.randn(TOKENS, EXPERTS, device=DEVICE), TOKENS * EXPERTS * 4)  # several sets: section 3
logits = LOGITS[0]
bias = torch.rand(EXPERTS, device=DEVICE) * 0.2

draw.problem(logits[0].cpu(), bias.cpu(), GROUPS, KEPT, TOPK)

# %% [markdown]
# ## 2. The reference
#
# This is the article's torch function, which SGLang and vLLM both started from. The comments are the article's, in
# English. `num_expert_group` is the number of groups, `topk_group` is how many are kept, `topk` is how many experts
# are chosen. Three things must hold: `topk_group <= num_expert_group`, `topk <= num_experts`, and `num_experts %
# num_expert_group == 0`.


# %%
def biased_grouped_topk_impl(
    hidden_states,  # [num_token, ...] only its first dimension is looked at
    gating_output,  # [num_token, num_experts] the logits
    correction_bias,  # [num_experts]
    topk,
    renormalize,  # divide the weights by their sum?
    num_expert_group=0,
    topk_group=0,
):
    assert hidden_states.shape[0] == gating_output.shape[0], "Number of tokens mismatch"
    scores = gating_output.sigmoid()
    num_token, num_experts = scores.shape
    scores_for_choice = scores.view(num_token, -1) + correction_bias.unsqueeze(0)
    # a group's score: the sum of its two best experts
    group_scores = scores_for_choice.view(num_token, num_expert_group, -1).topk(2, dim=-1)[0].sum(dim=-1)
    # the best groups, as a mask: [num_token, num_expert_group]
    group_idx = torch.topk(group_scores, k=topk_group, dim=-1, sorted=False)[1]
    group_mask = torch.zeros_like(group_scores)
    group_mask.scatter_(1, group_idx, 1)
    # the mask stretched from groups to experts: [num_token, num_experts]
    score_mask = (
        group_mask.unsqueeze(-1)
        .expand(num_token, num_expert_group, num_experts // num_expert_group)
        .reshape(num_token, -1)
    )
    # experts of the other groups can never win
    tmp_scores = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
    _, topk_ids = torch.topk(tmp_scores, k=topk, dim=-1, sorted=False)
    # the weight is the score without the bias
    topk_weights = scores.gather(1, topk_ids)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    return topk_weights.to(torch.float32), topk_ids.to(torch.int32)


# %% [markdown]
# This function leaves two things open. `sorted=False` lets the ids come in any order, and `torch.topk` does not say
# which of two equal values it takes. So the package has a reference of its own. It returns the best expert first, and
# of equal values it takes the lower index. `mismatch` compares a result with it: it returns `None`, or a sentence
# that says what is wrong. It computes in float64, and it accepts another choice only where two scores are too close
# for float32.
#
# A kernel that forgets to write an element must not pass by luck, because an older result still lies in memory. So
# all outputs are **poisoned** first: weights with NaN, ids with -7.

# %%
OPTIONS = {"num_expert_group": GROUPS, "topk_group": KEPT}


def poisoned(tokens=TOKENS, topk=TOPK):
    """Outputs that no kernel would leave as they are."""
    weights = torch.full((tokens, topk), float("nan"), device=DEVICE)
    return weights, torch.full((tokens, topk), -7, dtype=torch.int32, device=DEVICE)


def best_first(weights, ids):
    """The same routing in the reference's order: by biased score, the lower id first."""
    order = ids.argsort(dim=1)
    weights, ids = weights.gather(1, order), ids.gather(1, order)
    choice = (logits.sigmoid() + bias).gather(1, ids.long())
    order = choice.argsort(dim=1, descending=True, stable=True)
    return weights.gather(1, order), ids.gather(1, order)


def check(outputs):
    weights, ids, *any_order = outputs
    if any_order:  # the article's torch code promises no order
        weights, ids = best_first(weights, ids)
    return mismatch(weights, ids, logits, bias, TOPK, **OPTIONS)


print("the reference: ", check(reference(logits, bias, TOPK, **OPTIONS)))
print("poison:        ", check(poisoned()))

# %% [markdown]
# ## 3. The floor: how fast could it be?
#
# Before the first kernel we ask what the chip must do at least. There are three limits.
#
# - **Bytes.** A token brings 256 logits of 4 bytes, 1 KB. It takes away 8 weights and 8 ids, 64 bytes. An H200 moves
#   about 4.3 TB/s between its memory and its cores (measured with a copy).
# - **Special functions.** A sigmoid needs one exponential and one reciprocal. A small unit, the **MUFU**, computes
#   these: 16 results per clock on each multiprocessor.
# - **Launch.** Even a kernel that does nothing takes some time in a CUDA graph: the next cell prints it.
#
# A CUDA graph is a list of launches that the GPU runs without asking Python again. We quote two times for every step.
# **Kernel time** is taken inside a graph. **Call time** is what the Python call costs on the host. An H200 keeps up
# to 60 MB in its L2 cache, so the kernel time takes turns over several sets of logits. Otherwise we would measure the
# cache.

# %%
BANDWIDTH = H200.copy_bandwidth  # bytes per second
SMS, SCHEDULERS, CLOCK = H200.sm_count, 4, H200.boost_clock  # an SM has 4 warp schedulers
BYTES = TOKENS * (EXPERTS * 4 + TOPK * 8) + EXPERTS * 4


def floors_us(tokens):
    """What each limit allows at best, in microseconds."""
    return {
        "bytes": tokens * (EXPERTS * 4 + TOPK * 8) / BANDWIDTH * 1e6,
        "MUFU": tokens * EXPERTS * 2 / (16 * SMS * CLOCK) * 1e6,
    }


for tokens in (1, 1024, 16384, 65536):
    print(f"{tokens:6} tokens: " + ", ".join(f"{name} {us:.2f} us" for name, us in floors_us(tokens).items()))
FLOOR_US = max(floors_us(16384).values())


GATE = records.recorded("gate")  # what `python -m moe_numba bench gate` measured
if GATE:
    empty = [records.find(GATE, step="empty kernel", config={"dependent": d})["kernel_us"] for d in (False, True)]
    alone, chained = (stats["median"] for stats in empty)
    print(f"an empty kernel: {alone:.2f} us; {chained:.2f} us if it may start before the last one ends")

# %% [markdown]
# Up to about a thousand tokens the launch is the limit. Beyond, it is the bytes. For 16384 tokens the floor is about 4
# us. (A kernel may start early if it asks for **programmatic dependent launch**: its blocks take their places while
# the kernel before it ends, and it waits before it touches memory. The package's kernels do so.)
#
# There is a fourth limit that we shall meet again and again: **instructions**. A multiprocessor has 4 schedulers, and
# each starts at most one instruction per clock for one warp. (A **warp** is 32 threads that run in step. A thread's
# place in its warp is its **lane**, 0 to 31.) So if every warp runs `n` instructions, this is the least time:


# %%
def issue_us(instructions, warps):
    """Time in which an H200 can start this many instructions for each of this many warps, in microseconds."""
    return instructions * warps / (SMS * SCHEDULERS * CLOCK) * 1e6


print(f"16384 warps with 1000 instructions each: {issue_us(1000, 16384):.1f} us")

# %% [markdown]
# ## 4. The ladder
#
# Each step has an idea, a prediction, a kernel, a check with a measurement, and a look back. A step changes what its
# idea says and nothing else. Predictions are made for 16384 tokens on an H200, before the step was measured. Many of
# them are wrong, and that is where one learns something.

# %%
ladder = Ladder(
    "gate_ladder",
    check,
    title=f"The gate, step by step: {16384} tokens, 256 experts, float32",
    config={"num_experts": EXPERTS, **OPTIONS, "topk": TOPK},
    size={"tokens": TOKENS},
)
us = ladder.median_us  # a step's median time, measured now or recorded


def measure(name, run, **more):
    """Check and time ``run(logits)``; kernel time takes turns over all sets of logits."""
    timed = [lambda x=x: run(x) for x in LOGITS]
    ladder.step(name, lambda: run(logits), timed=timed, floor_us=FLOOR_US, bytes=BYTES, **more)


def bound(run):
    """``run(x, outputs)`` with outputs of its own, poisoned once: a timed call must not allocate."""
    outputs = poisoned()
    return lambda x: run(x, outputs)


def look_back(name, before=None, predicted=None):
    """Say in one sentence what the step gained, and how far off the prediction was."""
    ladder.report(name, before, predicted, FLOOR_US)


def with_few(run, tokens=64):
    """The kernel time with few tokens, as a server decodes; None in the simulator."""
    stats = kernel_time(lambda: run(logits[:tokens]))
    return stats and stats.median


# %% [markdown]
# ### Step 0: torch, line by line
#
# **Idea.** Run the article's function as it is. Torch starts at least one kernel for every operation, and each kernel
# reads its input from memory and writes its output back.
#
# **Prediction.** Let us count. A `TorchDispatchMode` sees every operation that torch carries out. Views cost nothing;
# each of the others starts at least one kernel.


# %%
def torch_eager(x):
    return *biased_grouped_topk_impl(x, x, bias, TOPK, True, GROUPS, KEPT), "any order"


with OpCounter() as count:
    torch_eager(logits)
print(len(count.names), "operations:", ", ".join(count.names))

# %% [markdown]
# Eight of them go through a whole table of 16384 x 256 numbers: 16.8 MB. Six read such a table and write one. The
# other two are the first and the last `topk`. They must search, so we count ten passes for each. The remaining eight
# operations are small.

# %%
TABLE_US = 16384 * EXPERTS * 4 / BANDWIDTH * 1e6
prediction = (6 * 2 + 2 * 10) * TABLE_US + 8 * 2.0  # a small operation takes 2 us
print(f"one pass over the table: {TABLE_US:.1f} us; prediction: {prediction:.0f} us")


# %%
def launches(call):
    """How many kernels a call starts, as a profile of the GPU sees it; None in the simulator."""
    if simulator.ENABLED:
        return None
    from torch.profiler import ProfilerActivity, profile

    call()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        call()
        torch.cuda.synchronize()
    kernels = [e for e in seen.events() if e.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in e.name]
    return len(kernels)


choice = logits.sigmoid() + bias
searches = [lambda: choice.view(TOKENS, GROUPS, -1).topk(2, dim=-1), lambda: choice.topk(TOPK, dim=-1, sorted=False)]
searches = [time and time.median for time in map(kernel_time, searches)]
measure(
    "torch eager",
    torch_eager,
    prediction_us=round(prediction),
    launches=launches(lambda: torch_eager(logits)),
    searches_us=None if simulator.ENABLED else sum(searches),
)

# %%
look_back("torch eager", predicted=prediction)
if row := ladder.row("torch eager"):
    print(f"A profile shows {row.get('launches')} kernels for one call.")
    print(f"The two large topk alone take {row['searches_us']:.0f} us.")

# %% [markdown]
# **Look back.** The passes over memory were counted well. The two searches were not. `torch.topk` does not read a row
# ten times: it finds the k-th best bit by bit and then sorts, for rows that are far too short for it. Counting bytes
# tells little about a search.

# %% [markdown]
# This is what the article's figure "36 us -> 8 us" is about. In a profile of a whole DeepSeek-V3 layer, the gate
# shows up as a row of many small kernels, 36 us together. After the change there is one kernel of 8 us
# (现在只有一个kernel了, "now there is only one kernel"). With few tokens most of the gain is just that: one launch
# in place of many.
#
# ### Step 1: torch.compile
#
# **Idea.** `torch.compile` reads the function and writes fused kernels for it. SGLang and vLLM did this before the
# CUDA kernel existed. It has two drawbacks, says the article: starting a server takes much longer, and operations
# like `topk` and `gather` are not fused.
#
# **Prediction.** Sigmoid, bias and mask become one or two passes, which saves perhaps 8 of the 12 passes. The three
# `topk` stay as they are.

# %%
prediction = prediction - 8 * TABLE_US
if simulator.ENABLED:
    print("torch.compile needs a GPU here; in the simulator this step is left out.")
else:
    compiled = torch.compile(biased_grouped_topk_impl, dynamic=False)

    def torch_compiled(x):
        return *compiled(x, x, bias, TOPK, True, GROUPS, KEPT), "any order"

    started = time.perf_counter()
    torch_compiled(logits)
    torch.cuda.synchronize()
    COMPILE_S = time.perf_counter() - started
    measure(
        "torch.compile",
        torch_compiled,
        prediction_us=round(prediction),
        compile_s=COMPILE_S,
        launches=launches(lambda: torch_compiled(logits)),
    )

# %%
look_back("torch.compile", "torch eager", prediction)
if row := ladder.row("torch.compile"):
    print(f"The first call took {row['compile_s']:.1f} s. One call starts {row['launches']} kernels.")

# %% [markdown]
# **Look back.** The article is right: the searches stay what they were, each between kernels of its own. What is fused
# is what was cheap. A better compiler does not help where the algorithm is the trouble.

# %% [markdown]
# ### Step 2: one thread for a token
#
# **Idea.** One kernel does it all. The simplest split gives each thread one token. Threads need nothing from each
# other, so the code is plain Python: load, sigmoid, bias, the best two of each group, drop the 4 worst groups, pick 8
# times.

# %%
draw.work_split("a thread for a token")

# %% [markdown]
# **Prediction.** A thread runs about 256 x 20 instructions for the sigmoids and 8 x 256 x 4 for the picks, 13000 in
# all. 16384 threads are 512 warps, about one for each scheduler of the chip. A lone warp waits for each of its own
# results: about 10 clocks per instruction, with the arrays in memory. That is 13000 x 10 / 1.98 GHz = 66 us.

# %%
FULL = 0xFFFFFFFF  # all 32 lanes
LOWEST = float32(-3.4028234663852886e38)  # -FLT_MAX
EXCLUDED = float32(3.4028234663852886e38)  # FLT_MAX; the article marks excluded groups with it


@cuda.jit(device=True)
def sigmoid(x):
    return float32(1) / (float32(1) + float32(math.exp(-x)))


@cuda.jit
def thread_a_token(logits, bias, weights, ids):
    token = cuda.grid(1)
    if token >= logits.shape[0]:
        return  # safe here: no thread waits for another one
    score = cuda.local.array(EXPERTS, float32)
    choice = cuda.local.array(EXPERTS, float32)
    group_score = cuda.local.array(GROUPS, float32)
    size = EXPERTS // GROUPS
    for g in range(GROUPS):
        best, second = LOWEST, LOWEST
        for e in range(g * size, (g + 1) * size):
            score[e] = sigmoid(logits[token, e])
            choice[e] = score[e] + bias[e]
            second = max(second, min(best, choice[e]))
            best = max(best, choice[e])
        group_score[g] = best + second
    for _ in range(GROUPS - KEPT):
        worst = 0
        for g in range(GROUPS):
            if group_score[g] <= group_score[worst]:  # of equal groups the later one goes
                worst = g
        group_score[worst] = EXCLUDED
        for e in range(worst * size, (worst + 1) * size):
            choice[e] = LOWEST
    total = float32(0)
    for k in range(TOPK):
        best_expert = 0
        for e in range(EXPERTS):
            if choice[e] > choice[best_expert]:
                best_expert = e
        choice[best_expert] = LOWEST
        weights[token, k] = score[best_expert]
        ids[token, k] = best_expert
        total += score[best_expert]
    for k in range(TOPK):
        weights[token, k] /= total


# %% [markdown]
# `cuda.grid(1)` is the thread's number in the whole grid. `cuda.local.array` is a small array of the thread's own. If
# every index is known when the kernel is compiled, the array lives in **registers**, the fastest memory. Here 256
# values are too many, so it lives in **local memory**: slow memory of the GPU, behind the caches.
#
# The second best of a stream of values needs no `if`: the loser of "new value against best" meets the second best.


# %%
def stream():
    """Torch's current stream, as Numba wants it."""
    return 0 if simulator.ENABLED else cuda.external_stream(torch.cuda.current_stream().cuda_stream)


def run_thread_a_token(x, outputs):
    thread_a_token[(x.shape[0] + 31) // 32, 32, stream()](x, bias, *outputs)
    return outputs


measure("a thread for a token", bound(run_thread_a_token), prediction_us=66)

# %%
look_back("a thread for a token", "torch eager", 66)

# %% [markdown]
# **Look back.** One kernel in place of seventeen is already faster, though this one does almost everything wrong. Its
# lanes read 32 rows at once, 1 KB apart, so every load touches 32 different places. And 512 values a thread do not fit
# in registers: each pick reads all of them again from local memory.

# %% [markdown]
# ### Step 3: the article's design, with run-time sizes
#
# **Idea.** One thread for each *group* of a token. Each thread holds the 32 experts of its group, and 8 neighbouring
# lanes share a token. They find the worst group and the best expert together, by **shuffles**. A shuffle lets each
# lane read a register of another lane, without memory.
#
# #### The host code and the thread model (线程模型)
#
# The article's C++ host function makes the outputs, checks the sizes, chooses a kernel and starts it. Its names:
#
# | name | meaning | for DeepSeek-V3 |
# |---|---|---|
# | `WARP_SIZE` | threads in a warp | 32 |
# | `WARPS_PER_CTA` | warps in a block; CTA is another word for block | 6 |
# | `VPT` | values per thread: `num_experts / num_expert_group` | 256 / 8 = 32 |
# | `THREADS_PER_ROW` | threads for a token: `num_expert_group` | 8 |
# | `ROWS_PER_WARP` | tokens for a warp: `max(1, 32 / num_expert_group)` | 32 / 8 = 4 |
# | `ROWS_PER_CTA` | tokens for a block: `WARPS_PER_CTA * ROWS_PER_WARP` | 6 * 4 = 24 |
# | `block_dim` | `dim3(WARP_SIZE, WARPS_PER_CTA)`: x is the lane, y is the warp | (32, 6) |
# | `num_blocks` | tokens / `ROWS_PER_CTA`, rounded up | 16384 / 24 = 683 |
#
# It refuses what the kernel cannot do: `num_experts` must be a power of two, `num_expert_group` must divide it (and
# is then a power of two itself), and `VPT` may not exceed `MAX_VPT = 32`. It knows three types of logits: bfloat16,
# float16 and float32. It launches on torch's current stream, as `moe_numba.runtime.launch` does. The same host code in
# Python:


# %%
def host(num_rows, num_experts, num_expert_group):
    """What the article's host function checks and computes before it starts the kernel."""
    if num_experts & (num_experts - 1):
        raise ValueError(f"num_experts must be a power of 2, but got {num_experts}")
    if num_experts % num_expert_group:
        raise ValueError(f"num_experts must be divisible by num_expert_group: {num_experts} / {num_expert_group}")
    vpt = num_experts // num_expert_group
    if vpt > 32:
        raise ValueError(f"num_experts / num_expert_group = {vpt} exceeds the maximum supported, 32")
    rows_per_warp = max(1, 32 // num_expert_group)
    num_warps = -(-num_rows // rows_per_warp)
    num_blocks = -(-num_warps // 6)
    return {"VPT": vpt, "ROWS_PER_WARP": rows_per_warp, "ROWS_PER_CTA": 6 * rows_per_warp, "num_blocks": num_blocks}


for experts, groups in ((256, 8), (256, 16), (128, 4), (128, 8)):
    print(f"{experts}/{groups}:", host(16384, experts, groups))

# %%
draw.thread_model(EXPERTS, GROUPS)

# %%
draw.work_split("a thread for a group")

# %% [markdown]
# #### The two kernel interfaces (接口)
#
# The article has one kernel body and two ways in. The **templated** kernel gets all sizes at compile time (`template
# <int VPT, int NUM_EXPERTS, ...>`, collected in a struct `KernelParams` of `constexpr` members). A macro
# `LAUNCH_MOE_GATE_CONFIG` computes them for 256 experts in 8 or 16 groups and for 128 experts in 4 or 8 groups. The
# **dynamic** kernel gets them as arguments, in a struct `KernelParamsDynamic` with the same names. It serves every
# other case. Both follow the same thread model. This step is the dynamic one; the next is the templated one.
#
# #### Helpers and types
#
# - `AlignedArray<T, N>` (from CUTLASS) is an array that promises to lie at a multiple of its own size. The compiler
#   may then load several elements with one instruction. `AccessType` is such an array of `MAX_VPT` elements. In
#   Python we ask for wide loads by name, in step 7.
# - `cmp_gt` and `cmp_eq` compare two values. They exist because C++ cannot decide between several `>` for `at::Half`,
#   the 16-bit float; so it is turned into `float` first. In Python a 16-bit float reaches a kernel as its bits, and
#   the kernel turns them into a float32 itself. The change is exact, so comparisons stay the same.
#
# #### The phases of the kernel
#
# 1. **Who am I?** `thread_row` is the thread's token, `thread_group_idx = tidx % THREADS_PER_ROW` is its group, and
#    `first_elt_read_by_thread = thread_group_idx * VPT` is its first expert.
# 2. **Load.** 32 logits and 32 biases go into arrays of the thread (`row_chunk`, `bias_chunk`).
# 3. **Sigmoid**, in place. (`scores = gating_output.sigmoid()`)
# 4. **Bias.** (`scores_for_choice = scores + correction_bias`)
# 5. **Exclude groups** (排除专家组). Four times: each thread finds its two best values, the eight threads find
#    the lowest sum by shuffles, and the owner fills its array with `FLT_MAX`, the largest float, as a mark. Of equal
#    sums the higher group goes. (`group_scores`, `group_idx`, `group_mask`, `masked_fill`)
# 6. **Top-k.** Eight times: each thread finds its best value (none if its first one bears the mark), the eight
#    threads find the highest, the owner writes weight and id to memory and sets the value to `-FLT_MAX`. Of equal
#    values the lower expert wins. The first thread of the token reads the weight back and adds it up. (`topk`,
#    `gather`, `sum`)
# 7. **Rescale.** The first thread divides the eight weights by their sum. (`topk_weights / topk_weights_sum`)
#
# All of this happens in the type of the logits. With bfloat16 a score, a group's sum and the final weight are rounded
# to 8 significant bits, and many scores become equal. Our kernels compute in float32 whatever comes in.

# %%
draw.flow_chart()

# %% [markdown]
# #### The butterfly
#
# How do eight lanes find the lowest of eight values? In three rounds. In each, a lane swaps its value with a partner,
# and both keep the better one. The partners' lane numbers differ in one bit: `shfl_xor_sync(mask, value, 1)`, then 2,
# then 4. In the end every lane knows the answer. For 32 lanes it takes five rounds. `mask` names the lanes that take
# part, and **all of them must come**, or the result is undefined.

# %%
draw.butterfly([0.62, 0.91, 0.35, 0.77, 0.58, 0.83, 0.49, 0.70], "lowest")


# %%
@cuda.jit(device=True)
def lowest(value, index, start, stop):
    """The lowest value and its index among the lanes that differ in the bits start, 2 start, ... below stop."""
    step = start
    while step < stop:
        other = cuda.shfl_xor_sync(FULL, value, step)
        other_index = cuda.shfl_xor_sync(FULL, index, step)
        if other < value or (other == value and other_index > index):
            value, index = other, other_index
        step *= 2
    return value, index


@cuda.jit(device=True)
def highest(value, index, start, stop):
    """The highest value and its index; of equal values the lower index wins."""
    step = start
    while step < stop:
        other = cuda.shfl_xor_sync(FULL, value, step)
        other_index = cuda.shfl_xor_sync(FULL, index, step)
        if other > value or (other == value and other_index < index):
            value, index = other, other_index
        step *= 2
    return value, index


# %% [markdown]
# **Two repairs.** The article's kernel has two faults that this one does not copy.
#
# - It returns early from threads without a token, although shuffles and barriers follow that want all threads. Here
#   such a thread works on the last token like the others and stores nothing. We call this **predicating**.
# - Its first thread reads a weight from memory right after *another* lane has stored it. Nothing makes it wait. Here
#   a `syncwarp` stands between the two: it lets the lanes of a warp wait for one another. Section 7 shows what
#   happens without it.
#
# **Prediction.** 4096 warps now, so the chip is full. Each runs 32 x 20 instructions for the sigmoids, 4 x 32 x 3 for
# the groups and 8 x 32 x 3 for the picks: about 1800 with the shuffles. But the arrays are indexed with numbers that
# only the running kernel knows, so they lie in local memory and each access is an instruction more: 3000.

# %%
prediction = issue_us(3000, 16384 / 4)
print(f"prediction: {prediction:.0f} us if every scheduler is always busy; we say {2 * prediction:.0f}")
WARPS = 6
MAX_VPT = 32


@cuda.jit
def document_dynamic(logits, bias, weights, ids, num_expert_group, topk_group, topk):
    num_rows, num_experts = logits.shape
    vpt = num_experts // num_expert_group
    rows_per_warp = max(1, 32 // num_expert_group)
    lane = cuda.threadIdx.x
    row = (cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * rows_per_warp + lane // num_expert_group
    safe_row = min(row, num_rows - 1)
    group = int32(lane % num_expert_group)
    first = int32(group * vpt)
    score = cuda.local.array(MAX_VPT, float32)
    choice = cuda.local.array(MAX_VPT, float32)
    for i in range(vpt):
        score[i] = sigmoid(logits[safe_row, first + i])
        choice[i] = score[i] + bias[first + i]
    for _ in range(num_expert_group - topk_group):
        best, second = LOWEST, LOWEST
        for i in range(vpt):
            second = max(second, min(best, choice[i]))
            best = max(best, choice[i])
        _, worst_group = lowest(best + second, group, 1, num_expert_group)
        if group == worst_group:
            for i in range(vpt):
                choice[i] = EXCLUDED
    total = float32(0)
    for k in range(topk):
        best, expert = LOWEST, first
        if choice[0] != EXCLUDED:
            for i in range(vpt):
                if choice[i] > best:
                    best, expert = choice[i], int32(first + i)
        best, expert = highest(best, expert, 1, num_expert_group)
        if group == expert // vpt and row < num_rows:
            choice[expert % vpt] = LOWEST
            weights[row, k] = score[expert % vpt]
            ids[row, k] = expert
        cuda.syncwarp()  # the next line reads what another lane has just written
        if group == 0 and row < num_rows:
            total += weights[row, k]
    if group == 0 and row < num_rows:
        for k in range(topk):
            weights[row, k] /= total


# %%
def blocks(tokens, tokens_per_warp):
    return -(-tokens // (tokens_per_warp * WARPS))


def run_dynamic(x, outputs, kernel=document_dynamic):
    kernel[blocks(x.shape[0], 32 // GROUPS), (32, WARPS), stream()](x, bias, *outputs, GROUPS, KEPT, TOPK)
    return outputs


measure("article, dynamic", bound(run_dynamic), prediction_us=round(2 * prediction))

# %%
look_back("article, dynamic", "a thread for a token", 2 * prediction)

# %% [markdown]
# **Look back.** The prediction counted instructions as if nothing ever waited. But the loops have no fixed length, so
# nothing is unrolled, every value comes from local memory, and each comparison waits for the load before it.

# %% [markdown]
# ### Step 4: the same, static
#
# **Idea.** Tell the compiler the sizes. In C++ that is what templates are for. In Python a **closure** does it: a
# function that makes a kernel. Numba treats the names that the kernel takes from around it as constants.
# `functools.cache` keeps the kernels that were made, so each combination is compiled once. Divisions become shifts,
# and loops can be unrolled.
#
# **Prediction.** A third of the instructions were index arithmetic and loop control: 2000 are left.


# %%
@cache
def make_document_static(num_experts, num_expert_group, topk_group, topk):
    vpt = num_experts // num_expert_group
    rows_per_warp = max(1, 32 // num_expert_group)

    @cuda.jit
    def kernel(logits, bias, weights, ids):
        num_rows = logits.shape[0]
        lane = cuda.threadIdx.x
        row = (cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * rows_per_warp + lane // num_expert_group
        safe_row = min(row, num_rows - 1)
        group = int32(lane % num_expert_group)
        first = int32(group * vpt)
        score = cuda.local.array(vpt, float32)
        choice = cuda.local.array(vpt, float32)
        for i in range(vpt):
            score[i] = sigmoid(logits[safe_row, first + i])
            choice[i] = score[i] + bias[first + i]
        for _ in range(num_expert_group - topk_group):
            best, second = LOWEST, LOWEST
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = EXCLUDED
        total = float32(0)
        for k in range(topk):
            best, expert = LOWEST, first
            if choice[0] != EXCLUDED:
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            if group == expert // vpt and row < num_rows:
                choice[expert % vpt] = LOWEST
                weights[row, k] = score[expert % vpt]
                ids[row, k] = expert
            cuda.syncwarp()  # the next line reads what another lane has just written
            if group == 0 and row < num_rows:
                total += weights[row, k]
        if group == 0 and row < num_rows:
            for k in range(topk):
                weights[row, k] /= total

    return kernel


# %%
document_static = make_document_static(EXPERTS, GROUPS, KEPT, TOPK)


def run_arrays(kernel, tokens_per_warp):
    def run(x, outputs):
        kernel[blocks(x.shape[0], tokens_per_warp), (32, WARPS), stream()](x, bias, *outputs)
        return outputs

    return bound(run)


prediction = issue_us(2000, 16384 / 4) * 2
measure("article, static", run_arrays(document_static, 4), prediction_us=round(prediction))

# %%
look_back("article, static", "article, dynamic", prediction)

# %% [markdown]
# **Look back.** Templates are worth far more than a third. With loops unrolled the compiler keeps many values in
# registers between their uses and starts independent loads together. The count is still too small, for two reasons.
# Comparing, choosing, minimum and maximum, and all integer work run on units that take a warp only every *second*
# clock. And `math.exp` with an exact division is longer than it looks.

# %% [markdown]
# This is the article's kernel, in Python. One thing it could not win: `choice[expert % vpt]` still takes an index
# that is only known at run time. Registers have no index, so both arrays stay in local memory. The C++ kernel has the
# same trouble.
#
# ### Step 5: arrays in registers
#
# **Idea.** Never index with a number that only the running kernel knows. In place of `choice[expert % vpt]` go
# through all 32 places and act on the one whose number fits. The loop is unrolled, so every index is a constant, and
# the arrays become registers.
#
# **Prediction.** A pick costs 32 comparisons more, 8 x 64 instructions in all. But some 32 x 2 x 12 accesses to local
# memory disappear. We expect a gain of a third.


# %%
@cache
def make_in_registers(num_experts, num_expert_group, topk_group, topk):
    vpt = num_experts // num_expert_group
    rows_per_warp = max(1, 32 // num_expert_group)

    @cuda.jit
    def kernel(logits, bias, weights, ids):
        num_rows = logits.shape[0]
        lane = cuda.threadIdx.x
        row = (cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * rows_per_warp + lane // num_expert_group
        safe_row = min(row, num_rows - 1)
        group = int32(lane % num_expert_group)
        first = int32(group * vpt)
        score = cuda.local.array(vpt, float32)
        choice = cuda.local.array(vpt, float32)
        for i in range(vpt):
            score[i] = sigmoid(logits[safe_row, first + i])
            choice[i] = score[i] + bias[first + i]
        for _ in range(num_expert_group - topk_group):
            best, second = LOWEST, LOWEST
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = EXCLUDED
        total = float32(0)
        for k in range(topk):
            best, expert = LOWEST, first
            if choice[0] != EXCLUDED:
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            for i in range(vpt):
                if first + i == expert:
                    choice[i] = LOWEST
                    if row < num_rows:
                        weights[row, k] = score[i]
                        ids[row, k] = expert
            cuda.syncwarp()  # the next line reads what another lane has just written
            if group == 0 and row < num_rows:
                total += weights[row, k]
        if group == 0 and row < num_rows:
            for k in range(topk):
                weights[row, k] /= total

    return kernel


# %%
diff(make_document_static, make_in_registers)

# %%
in_registers = make_in_registers(EXPERTS, GROUPS, KEPT, TOPK)
prediction = 0.67 * (us("article, static") or 32)
measure("in registers", run_arrays(in_registers, 4), prediction_us=round(prediction), slower=True)

# %%
look_back("in registers", "article, static", prediction)

# %% [markdown]
# **Look back.** A loss. The arrays are gone from local memory, as planned. But that memory is cached, and a pick
# touched it only a few times. In exchange every pick makes 32 comparisons more for each lane, on the slow half of the
# units, and more registers for a thread mean fewer warps to hide behind. "No local memory" is a means and no end.

# %% [markdown]
# ### Step 6: pointers in place of arrays
#
# **Idea.** We take the last step back and go on from the static kernel. So far it took Numba arrays. Each is seven
# numbers or more: shape, strides, size, ... Python has to look at every tensor and fill them in, for every call. A
# kernel that takes bare **pointers** needs one number for each. `moe_numba.runtime.launch` compiles such a kernel once and then
# only packs a few numbers. The kernel now indexes by hand: `logits[row * num_experts + expert]`.
#
# **Prediction.** Kernel time stays. Call time falls from some 50 us or more to about 10 us.


# %%
@cache
def make_pointers(num_experts, num_expert_group, topk_group, topk):
    vpt = num_experts // num_expert_group
    rows_per_warp = max(1, 32 // num_expert_group)

    @cuda.jit
    def kernel(logits, bias, weights, ids, num_rows):
        lane = cuda.threadIdx.x
        row = (cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * rows_per_warp + lane // num_expert_group
        safe_row = min(row, num_rows - 1)
        group = int32(lane % num_expert_group)
        first = int32(group * vpt)
        score = cuda.local.array(vpt, float32)
        choice = cuda.local.array(vpt, float32)
        for i in range(vpt):
            score[i] = sigmoid(logits[safe_row * num_experts + first + i])
            choice[i] = score[i] + bias[first + i]
        for _ in range(num_expert_group - topk_group):
            best, second = LOWEST, LOWEST
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = EXCLUDED
        total = float32(0)
        for k in range(topk):
            best, expert = LOWEST, first
            if choice[0] != EXCLUDED:
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            if group == expert // vpt and row < num_rows:
                choice[expert % vpt] = LOWEST
                weights[row * topk + k] = score[expert % vpt]
                ids[row * topk + k] = expert
            cuda.syncwarp()  # the next line reads what another lane has just written
            if group == 0 and row < num_rows:
                total += weights[row * topk + k]
        if group == 0 and row < num_rows:
            for k in range(topk):
                weights[row * topk + k] /= total

    return kernel


# %%
diff(make_document_static, make_pointers)


# %%
def run_pointers(kernel, tokens_per_warp):
    def run(x, outputs):
        launch(kernel, blocks(x.shape[0], tokens_per_warp), (32, WARPS), x, bias, *outputs, x.shape[0])
        return outputs

    return bound(run)


SIGNATURE = ("float32*", "float32*", "float32*", "int32*", "int32")  # logits, bias, weights, ids, tokens


def resources(name, kernel):
    """What ptxas, the GPU's assembler, says of a kernel: registers, local memory ("stack frame"), spills."""
    if simulator.ENABLED:
        return print(f"{name}: only a GPU's compiler knows the registers; nothing is compiled in the simulator")
    log = compile_kernel(kernel, SIGNATURE).log
    lines = [line.removeprefix("ptxas info    :").strip() for line in log.splitlines()]
    print(f"{name}: " + "; ".join(line for line in lines if "stack frame" in line or "registers" in line))


pointers = make_pointers(EXPERTS, GROUPS, KEPT, TOPK)
prediction = us("article, static") or 32
measure("pointers", run_pointers(pointers, 4), prediction_us=round(prediction))
resources("pointers", pointers)

# %%
look_back("pointers", "article, static", prediction)
if us("pointers"):
    arrays_us, pointers_us = us("article, static", "call_us"), us("pointers", "call_us")
    print(f"Call time: {arrays_us:.0f} us with arrays, {pointers_us:.0f} us with pointers.")

# %% [markdown]
# **Look back.** As predicted: the GPU does not care, and Python does. A server that decodes a few tokens at a time
# feels this step more than any other.

# %% [markdown]
# ### Step 7: wide loads
#
# **Idea.** A thread loads its 32 logits one by one, 4 bytes each. It could load 16 bytes at once:
# `ld.global.nc.v4.u32`. The intrinsic `load_nc_u32x4` is this instruction. It gives four 32-bit words, and
# `uint_as_float` reads each as a float without changing a bit. This is what `AlignedArray` hopes for in C++; here it
# is certain.
#
# **Prediction.** 56 instructions of about 2000 disappear, so the instructions hardly matter. But each scalar load of
# a warp touched 32 different 32-byte **sectors**, the pieces in which memory is moved, and used 4 bytes of each. We
# expect a gain of a tenth.


# %%
def make_load(count):
    @cuda.jit(device=True)
    def load(pointer, at, into):
        for i in range(0, count, 4):
            a, b, c, d = load_nc_u32x4(pointer, at + i)
            into[i], into[i + 1] = uint_as_float(a), uint_as_float(b)
            into[i + 2], into[i + 3] = uint_as_float(c), uint_as_float(d)

    return load


@cache
def make_wide_loads(num_experts, num_expert_group, topk_group, topk):
    vpt = num_experts // num_expert_group
    rows_per_warp = max(1, 32 // num_expert_group)
    load = make_load(vpt)

    @cuda.jit
    def kernel(logits, bias, weights, ids, num_rows):
        lane = cuda.threadIdx.x
        row = (cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * rows_per_warp + lane // num_expert_group
        safe_row = min(row, num_rows - 1)
        group = int32(lane % num_expert_group)
        first = int32(group * vpt)
        score = cuda.local.array(vpt, float32)
        choice = cuda.local.array(vpt, float32)
        load(logits, safe_row * num_experts + first, score)
        load(bias, first, choice)
        for i in range(vpt):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
        for _ in range(num_expert_group - topk_group):
            best, second = LOWEST, LOWEST
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = EXCLUDED
        total = float32(0)
        for k in range(topk):
            best, expert = LOWEST, first
            if choice[0] != EXCLUDED:
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            if group == expert // vpt and row < num_rows:
                choice[expert % vpt] = LOWEST
                weights[row * topk + k] = score[expert % vpt]
                ids[row * topk + k] = expert
            cuda.syncwarp()  # the next line reads what another lane has just written
            if group == 0 and row < num_rows:
                total += weights[row * topk + k]
        if group == 0 and row < num_rows:
            for k in range(topk):
                weights[row * topk + k] /= total

    return kernel


# %%
diff(make_pointers, make_wide_loads)

# %%
wide_loads = make_wide_loads(EXPERTS, GROUPS, KEPT, TOPK)
prediction = 0.9 * (us("pointers") or 32)
run_wide_loads = run_pointers(wide_loads, 4)
measure("wide loads", run_wide_loads, prediction_us=round(prediction), few_us=with_few(run_wide_loads))
resources("wide loads", wide_loads)

# %%
look_back("wide loads", "pointers", prediction)

# %% [markdown]
# **Look back.** A little better than predicted. The loads were scattered over 32 rows, and each request now brings four
# times as much. The memory units have a quarter of the requests to look after, and that counts more than the
# instructions saved.

# %% [markdown]
# ### Step 8: a warp for a token
#
# **Idea.** Turn the layout around: 32 lanes share one token, and a lane holds 8 experts. A group is 4 neighbouring
# lanes. Now the lanes of a warp read one piece of 1024 bytes without gaps: the loads are **coalesced**. A lane holds
# 16 values in place of 64, so more warps fit on a multiprocessor. And a token has four times as many threads, which
# helps when tokens are few.
#
# The two best of a group come from 4 lanes: each finds its own two, and two shuffle rounds merge the pairs. Every
# lane knows each pick after the shuffles, so lane `k` keeps pick `k` in a register. Nothing goes through global
# memory any more, and the eight results leave in one store.

# %%
draw.work_split("a warp for a token")

# %% [markdown]
# **Prediction.** Here is the catch. A lane has a quarter of the experts but does just as many shuffles: the rest of
# the work shrinks, the talking does not. Sigmoids 8 x 20, groups 4 x (8 x 2 + 2 x 5 + 3 x 6) = 180, picks 8 x (8 x 3
# + 5 x 6 + 8 x 2) = 560. That is 900 instructions for each of 16384 warps, against 1900 for each of 4096 before.

# %%
prediction = issue_us(900, 16384)
print(f"prediction: {prediction:.0f} us; by the same count the step before is {issue_us(1900, 4096):.0f} us")


@cuda.jit(device=True)
def merge_two(best, second, start, stop):
    """The two best values among the lanes that differ in the bits start, 2 start, ... below stop."""
    step = start
    while step < stop:
        other_best = cuda.shfl_xor_sync(FULL, best, step)
        other_second = cuda.shfl_xor_sync(FULL, second, step)
        second = max(min(best, other_best), max(second, other_second))
        best = max(best, other_best)
        step *= 2
    return best, second


@cuda.jit(device=True)
def store_scaled(weights, ids, at, weight, expert, topk, valid):
    """Lane k stores pick k, its weight divided by the sum over the picks; lanes from topk on bring weight 0."""
    total, lane = weight, int32(cuda.threadIdx.x)
    step = 1
    while step < 32:
        total += cuda.shfl_xor_sync(FULL, total, step)
        step *= 2
    if lane < topk and valid:
        weights[at + lane] = weight / total
        ids[at + lane] = expert


@cache
def make_warp_a_token(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        safe_token = min(token, tokens - 1)
        group = int32(lane // share)
        first = int32(lane * held)
        score = cuda.local.array(held, float32)
        choice = cuda.local.array(held, float32)
        load(logits, safe_token * num_experts + first, score)
        load(bias, first, choice)
        for i in range(held):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
        for _ in range(num_groups - kept):
            best, second = LOWEST, LOWEST
            for i in range(held):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            best, second = merge_two(best, second, 1, share)
            _, worst_group = lowest(best + second, group, share, 32)
            if group == worst_group:
                for i in range(held):
                    choice[i] = EXCLUDED
        weight, expert = float32(0), int32(0)
        for k in range(topk):
            best, winner = LOWEST, first
            if choice[0] != EXCLUDED:
                for i in range(held):
                    if choice[i] > best:
                        best, winner = choice[i], int32(first + i)
            best, winner = highest(best, winner, 1, 32)
            won = float32(0)
            for i in range(held):
                if first + i == winner:
                    choice[i], won = LOWEST, score[i]
            won = cuda.shfl_sync(FULL, won, winner // held)
            if lane == k:
                weight, expert = won, winner
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
warp_a_token = make_warp_a_token(EXPERTS, GROUPS, KEPT, TOPK)
run_warp_a_token = run_pointers(warp_a_token, 1)
measure("a warp for a token", run_warp_a_token, prediction_us=round(prediction), few_us=with_few(run_warp_a_token))
resources("a warp for a token", warp_a_token)

# %%
look_back("a warp for a token", "wide loads", prediction)
rows = [ladder.row("wide loads"), ladder.row("a warp for a token")]
if all(row and "few_us" in row for row in rows):
    print("With 64 tokens: {:.1f} us before, {:.1f} us now.".format(*(row["few_us"] for row in rows)))

# %% [markdown]
# **Look back.** By the count of instructions this step takes twice as long as the one before. With many tokens it
# loses, but only a little: the step before was not limited by its instructions but mostly waited, with a quarter of the
# warps. With few tokens it wins, because each token now has four times the threads. And it opens the way: a lane holds
# so little that all of it stays in registers. The count is wrong in itself, too. A shuffle occupies a unit that the
# four schedulers share, so that it costs each of them four clocks, and comparisons cost two.

# %% [markdown]
# From here on the layout stays, and each step takes instructions away.
#
# ### Step 9: rank the groups by counting
#
# **Idea.** Excluding the worst group four times repeats the same work four times. But a group can find out by itself
# whether it is kept: it counts how many groups are better. With fewer than 4 better ones it stays. Eight groups mean
# 64 comparisons. We have 32 lanes, so each makes two. `ballot_sync` collects one bit from each lane into a word, and
# `popc` counts the bits that are set.

# %%
group_scores = (logits[0].sigmoid() + bias).view(GROUPS, -1).topk(2)[0].sum(-1).cpu()
draw.rank_by_counting(group_scores.tolist(), KEPT)

# %% [markdown]
# **Prediction.** The four rounds cost about 180 instructions. Once through costs 16 + 10 for the two best, and 2 x 8
# for the counting. Some 140 of 900 instructions disappear.


# %%
@cuda.jit(device=True)
def better_groups(score, group, share, num_groups):
    """How many groups are better than this lane's: each of the ``share`` lanes of a group asks some of the others."""
    lane = int32(cuda.threadIdx.x)
    mine = uint32(((1 << share) - 1) << (group * share))  # the lanes of this group
    count = int32(0)
    for i in range((num_groups + share - 1) // share):
        rival = int32(lane % share + i * share)
        theirs = cuda.shfl_sync(FULL, score, rival * share)
        better = rival < num_groups and (theirs > score or (theirs == score and rival < group))
        count += int32(cuda.popc(uint32(cuda.ballot_sync(FULL, better)) & mine))
    return count


@cache
def make_rank_groups(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        safe_token = min(token, tokens - 1)
        group = int32(lane // share)
        first = int32(lane * held)
        score = cuda.local.array(held, float32)
        choice = cuda.local.array(held, float32)
        load(logits, safe_token * num_experts + first, score)
        load(bias, first, choice)
        for i in range(held):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
        best, second = LOWEST, LOWEST
        for i in range(held):
            second = max(second, min(best, choice[i]))
            best = max(best, choice[i])
        best, second = merge_two(best, second, 1, share)
        if better_groups(best + second, group, share, num_groups) >= kept:
            for i in range(held):
                choice[i] = LOWEST
        weight, expert = float32(0), int32(0)
        for k in range(topk):
            best, winner = LOWEST, first
            for i in range(held):
                if choice[i] > best:
                    best, winner = choice[i], int32(first + i)
            best, winner = highest(best, winner, 1, 32)
            won = float32(0)
            for i in range(held):
                if first + i == winner:
                    choice[i], won = LOWEST, score[i]
            won = cuda.shfl_sync(FULL, won, winner // held)
            if lane == k:
                weight, expert = won, winner
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
diff(make_warp_a_token, make_rank_groups)

# %%
rank_groups = make_rank_groups(EXPERTS, GROUPS, KEPT, TOPK)
prediction = (us("a warp for a token") or 14) * (1 - 140 / 900)
measure("rank by counting", run_pointers(rank_groups, 1), prediction_us=round(prediction))
resources("rank by counting", rank_groups)

# %%
look_back("rank by counting", "a warp for a token", prediction)

# %% [markdown]
# **Look back.** Once a kernel is limited by its instructions, predictions come true: so much less work, so much less
# time.

# %% [markdown]
# Look at `better_groups` once more. It shuffles first, for every lane, and uses the result afterwards. That order
# matters.
#
# > **Python's `and` can lose a shuffle.** `a and b` does not look at `b` when `a` is false. So in `a == shfl(a) and b
# > == shfl(b)` only the lanes that pass the first test come to the second shuffle. The others never arrive, and the
# > shuffle waits for all 32. On a GPU such a kernel hung. The simulator names the lanes that are missing.


# %%
@cuda.jit
def like_my_neighbour(a, b, out):
    lane = cuda.threadIdx.x
    same = a[lane] == cuda.shfl_xor_sync(FULL, a[lane], 1) and b[lane] == cuda.shfl_xor_sync(FULL, b[lane], 1)
    out[lane] = int32(1) if same else int32(0)


@cuda.jit
def like_my_neighbour_mended(a, b, out):
    lane = cuda.threadIdx.x
    other_a = cuda.shfl_xor_sync(FULL, a[lane], 1)
    other_b = cuda.shfl_xor_sync(FULL, b[lane], 1)
    out[lane] = int32(1) if a[lane] == other_a and b[lane] == other_b else int32(0)


b = torch.arange(32, dtype=torch.int32, device=DEVICE) // 2  # lanes 0 and 1 have 0, lanes 2 and 3 have 1, ...
a, out = b.clone(), torch.empty_like(b)
a[5] = 99  # lanes 4 and 5 differ
if simulator.ENABLED:
    try:
        like_my_neighbour[1, 32](a, b, out)
    except simulator.SimulatorError as error:
        print(f"{type(error).__name__}: {error}\n")
else:
    print("On a GPU the first kernel may hang, so it is not run here. The simulator shows what is wrong with it.\n")
like_my_neighbour_mended[1, 32](a, b, out)
print("mended:", out.tolist())

# %% [markdown]
# ### Step 10: integer keys and one instruction for 32 lanes
#
# **Idea.** Each pick has five shuffle rounds, with two shuffles and three comparisons in each. Hopper can find the
# maximum of 32 lanes with **one** instruction, `redux.sync.max`, but only for integers. So we turn each float into an
# integer that sorts in the same way, its **key**. For a positive float the bits already do that: read as an integer,
# a larger float is a larger number. For a negative float the order is reversed, and flipping the lower 31 bits puts
# it right.
#
# The key says how good the winner is, but not who it is. A `ballot` does: every lane says whether its own best equals
# the maximum, and `ffs` finds the first set bit. It is the lowest lane, which holds the lowest experts. So ties are
# broken for free.


# %%
@cuda.jit(device=True)
def order_key(x):
    """An integer that sorts as the float does."""
    bits = float_as_int(x)
    return int32(bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF)))


@cuda.jit(device=True)
def key_as_float(key):
    """The float that a key was made from: the same flip again."""
    return int_as_float(int32(key ^ ((key >> int32(31)) & int32(0x7FFFFFFF))))


floats = torch.tensor([-2.0, -0.5, 0.0, 0.25, 0.5, 1.0])
bits = floats.view(torch.int32)
keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # what order_key does, in torch
for row in zip(floats.tolist(), bits.tolist(), keys.tolist()):
    print("{:6.2f}: bits {:12d}, key {:12d}".format(*row))

# %%
by_lane = (logits[0].sigmoid() + bias).cpu().view(32, -1).sort(dim=1, descending=True).values
draw.pick_loop(
    [[round(float(v), 2) for v in lane[:4]] for lane in by_lane[:6]],
    picks=3,
    title="Three picks: redux, ballot, ffs (6 of 32 lanes; of each the best 4 of 8 keys)",
)

# %% [markdown]
# **Prediction.** Of a pick's 5 x 6 + 10 instructions for the rounds, about 8 are left: redux, compare, ballot, ffs,
# two to tell the owner. Eight picks save 8 x 30 = 240 of about 760. (A redux takes longer than a shuffle, but it is
# one.)

# %%
NEVER = int32(-(1 << 31))  # below the key of every float


@cache
def make_integer_keys(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        safe_token = min(token, tokens - 1)
        group = int32(lane // share)
        first = int32(lane * held)
        score = cuda.local.array(held, float32)
        choice = cuda.local.array(held, float32)
        key = cuda.local.array(held, int32)
        load(logits, safe_token * num_experts + first, score)
        load(bias, first, choice)
        best, second = LOWEST, LOWEST
        for i in range(held):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
            second = max(second, min(best, choice[i]))
            best = max(best, choice[i])
        best, second = merge_two(best, second, 1, share)
        keep = better_groups(best + second, group, share, num_groups) < kept
        for i in range(held):
            key[i] = order_key(choice[i]) if keep else NEVER
        weight, expert = float32(0), int32(0)
        for k in range(topk):
            best_key, slot = NEVER, int32(0)
            for i in range(held):
                if key[i] > best_key:
                    best_key, slot = key[i], int32(i)
            highest_key = redux_sync_max_s32(uint32(FULL), best_key)
            winner = int32(cuda.ffs(cuda.ballot_sync(FULL, best_key == highest_key)) - 1)
            won = float32(0)
            for i in range(held):
                if lane == winner and i == slot:
                    key[i] = NEVER
                won = score[i] if i == slot else won
            won = cuda.shfl_sync(FULL, won, winner)
            slot = cuda.shfl_sync(FULL, slot, winner)
            if lane == k:
                weight, expert = won, int32(winner * held + slot)
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
diff(make_rank_groups, make_integer_keys)

# %%
integer_keys = make_integer_keys(EXPERTS, GROUPS, KEPT, TOPK)
prediction = (us("rank by counting") or 12) * (1 - 240 / 760)
measure("integer keys", run_pointers(integer_keys, 1), prediction_us=round(prediction))
resources("integer keys", integer_keys)

# %%
look_back("integer keys", "rank by counting", prediction)

# %% [markdown]
# **Look back.** Close, and a little less than hoped. A `redux` is one instruction but not one clock: like the special
# functions it runs on a unit that takes eight clocks for a warp.

# %% [markdown]
# ### Step 11: sort once, then pop
#
# **Idea.** For each pick every lane looks through its 8 keys again, though 31 of 32 lanes have not changed. If each
# lane **sorts** its keys once, its best is always in front. The winner drops its front and moves the rest up by one.
#
# A sort with `if`s would send the lanes different ways. A **sorting network** is a fixed list of compare-and-swap
# steps, the same for all data. Batcher's network needs 19 of them for 8 values. All indices are constants, so the
# keys stay in registers.


# %%
print(inspect.getsource(batcher_network))
first_lane = (logits[0].sigmoid() + bias)[:8].cpu()
print(len(batcher_network(8)), "compare-and-swap steps for 8 values")
draw.sorting_network([round(float(v), 2) for v in first_lane], batcher_network(8))

# %% [markdown]
# Equal keys must stay in the order of their experts, and a network does not promise that. So each key travels with
# its place in the lane, `slot`, and of equal keys the lower slot goes first.
#
# **Prediction.** A compare-and-swap of key and slot is about 7 instructions: 19 x 7 = 130. A pick no longer searches
# (8 x 3) but moves 7 keys and slots (14, and only the winner changes anything). The search for the score stays. So 8
# x 10 = 80 are saved and 130 spent: we expect a small loss, unless the shorter chain of dependent instructions pays.


# %%
@cache
def make_sorted_lanes(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)
    pairs = tuple(batcher_network(held))
    steps = len(pairs)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        safe_token = min(token, tokens - 1)
        group = int32(lane // share)
        first = int32(lane * held)
        score = cuda.local.array(held, float32)
        choice = cuda.local.array(held, float32)
        key = cuda.local.array(held, int32)
        slot = cuda.local.array(held, int32)
        load(logits, safe_token * num_experts + first, score)
        load(bias, first, choice)
        for i in range(held):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
            key[i], slot[i] = order_key(choice[i]), int32(i)
        for s in range(steps):
            i, j = pairs[s]
            swap = key[j] > key[i] or (key[j] == key[i] and slot[j] < slot[i])
            key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
            slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
        best, second = merge_two(key_as_float(key[0]), key_as_float(key[1]), 1, share)
        if better_groups(best + second, group, share, num_groups) >= kept:
            key[0] = NEVER
        weight, expert = float32(0), int32(0)
        for k in range(topk):
            highest_key = redux_sync_max_s32(uint32(FULL), key[0])
            winner = int32(cuda.ffs(cuda.ballot_sync(FULL, key[0] == highest_key)) - 1)
            front = slot[0]
            won = float32(0)
            for i in range(held):
                won = score[i] if i == front else won
            if lane == winner:
                for i in range(held - 1):
                    key[i], slot[i] = key[i + 1], slot[i + 1]
                key[held - 1] = NEVER
            won = cuda.shfl_sync(FULL, won, winner)
            front = cuda.shfl_sync(FULL, front, winner)
            if lane == k:
                weight, expert = won, int32(winner * held + front)
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
diff(make_integer_keys, make_sorted_lanes)

# %%
sorted_lanes = make_sorted_lanes(EXPERTS, GROUPS, KEPT, TOPK)
prediction = (us("integer keys") or 9) * 1.1
measure("sorted lanes", run_pointers(sorted_lanes, 1), prediction_us=round(prediction))
resources("sorted lanes", sorted_lanes)

# %%
look_back("sorted lanes", "integer keys", prediction)

# %% [markdown]
# **Look back.** We expected a small loss and got a clear gain. The search through eight keys was a chain of
# eight steps, each of which waits for the one before. The network has nineteen, but only six levels: what stands in one
# level does not wait. And the compiler turns a swap into two selections, fewer than we counted.

# %% [markdown]
# ### Step 12: the package's kernel for few tokens
#
# **Idea.** The package's first kernel has the layout and the ideas of step 11. It adds four things.
#
# - **A faster sigmoid.** `math.exp` and an exact division are some 20 instructions. `ex2.approx` and `rcp.approx` are
#   two, with an error of two units in the last place. This is the MUFU of section 3.
# - **Keys sorted alone.** Only keys go through the network. Lane `k` looks for the expert of pick `k` at the end, once
#   for all picks.
# - **Loads ahead of their use.** A warp routes several tokens. It loads the next one's logits while it works on
#   this one.
# - **Every input.** NaN, infinities, ties, 16-bit floats, other numbers of experts and groups, shared experts, padding.
#
# **Prediction.** The sigmoids fall from 160 to 40 instructions, the network from 130 to 40, the picks from about 25 to
# 15 each. With the rest it is some 320 in all.

# %%
from moe_numba.gate import kernel as few_tokens
from moe_numba.gate import kernel_4tokens as many_tokens

config = GateConfig(EXPERTS, GROUPS, KEPT, TOPK)
polished = few_tokens.make_kernel(config)
HAS_4TOKENS = many_tokens.supports(*config[:5])  # 8 groups; for other shapes step 13 is left out
dealing = many_tokens.make_4tokens_kernel(config) if HAS_4TOKENS else None


def run_of_package(kernel, tokens_per_block, warps, most_blocks, **options):
    def run(x, outputs):
        tokens = x.shape[0]
        grid = min(-(-tokens // tokens_per_block), most_blocks)
        # after the outputs: tokens, elements from row to row, tokens to route, two scales
        numbers = tokens, np.int64(x.stride(0)), tokens, 1.0, 1.0
        launch(kernel, grid, 32 * warps, x, bias, *outputs, *numbers, dependent=True, **options)
        return outputs

    return bound(run)


prediction = max(issue_us(320, 16384), FLOOR_US)
print(f"prediction: {prediction:.1f} us; the floor is {FLOOR_US:.1f} us")
run_polished = run_of_package(
    polished, few_tokens.WARPS_PER_BLOCK, few_tokens.WARPS_PER_BLOCK, SMS * 64 // few_tokens.WARPS_PER_BLOCK
)
measure("polished", run_polished, prediction_us=round(prediction, 1))

# %%
look_back("polished", "sorted lanes", prediction)

# %% [markdown]
# **Look back.** Twice the prediction, and now we know why: more than half of the instructions that are left compare,
# choose or shift, and take two clocks each. Count those twice, and the measurement is explained almost to the end. The
# kernel is limited by instructions; its memory traffic would allow half the time.

# %% [markdown]
# ### Step 13: the package's kernel for many tokens
#
# **Idea.** Half of the groups are out, so from then on half of the lanes of a token work for nothing. With few tokens
# that does not matter: there are lanes enough. With many tokens it does. So a warp takes **four tokens**. It chooses
# the groups of one after the other, in the layout of step 8, and puts the keys into shared memory (memory on the
# multiprocessor that the threads of a block share). Then it **deals** the 128 candidates of each token anew: 8 lanes
# for a token, 16 candidates for a lane, and all four tokens pick at the same time. A pick needs three shuffle rounds,
# but they serve four tokens.
#
# `moe_numba.biased_grouped_topk` takes this kernel for many tokens and the one of step 12 for few.
#
# **Prediction.** A pick costs about 25 instructions for four tokens, in place of 15 for one. The network for 16 values
# is longer, 63 steps of 2, but also for four tokens. Sigmoids and groups stay at 100 for each token, and the search for
# the experts is 100 for four. That is 100 + (8 x 25 + 126 + 100) / 4, some 200 for a token.

# %%
count = issue_us(200, 16384)
prediction = max(count, FLOOR_US)
print(f"by the count {count:.1f} us; so the floor is the prediction: {prediction:.1f} us")
run_dealing = run_of_package(
    dealing,
    many_tokens.WARPS_PER_BLOCK * many_tokens.TOKENS_PER_WARP,
    many_tokens.WARPS_PER_BLOCK,
    1 << 20,
    launch_bounds=many_tokens.launch_bounds(gpu_of(0).capability),
)
if HAS_4TOKENS:
    measure("dealt again", run_dealing, prediction_us=round(prediction, 1))


def run_package(x, outputs):
    return moe_numba.biased_grouped_topk(x, bias, TOPK, **OPTIONS, out=outputs)


measure("final", bound(run_package), prediction_us=round(prediction, 1))

# %%
if HAS_4TOKENS:
    look_back("dealt again", "polished", prediction)
# the public function: the same kernel, and what checking the arguments costs
look_back("final", "dealt again" if HAS_4TOKENS else "polished")

# %% [markdown]
# **Look back.** At this size the gain is small. There are only 4096 warps now, eight for each scheduler, and they run
# through once: there is not enough to hide behind. The more tokens, the more the saved instructions count. Here are
# both sizes, from the record of the whole comparison:

# %%
for dtype in ("float32", "bfloat16"):
    for tokens in (16384, 65536):
        row = GATE and records.find(GATE, step="final", dtype=dtype, size={"tokens": tokens}, config=OPTIONS)
        if row:
            took = row["kernel_us"]["median"]
            print(f"{tokens} tokens, {dtype}: {took:.1f} us, {took / row['floor_us']:.1f} times the floor")

# %% [markdown]
# ### A check must be able to fail
#
# Before we believe the times, we try the check on two wrong steps. The first names a wrong expert once, next to the
# right one. The second forgets the last token. Both must be refused, and a refused step gets no time.


# %%
def off_by_one():
    weights, ids = moe_numba.biased_grouped_topk(logits, bias, TOPK, **OPTIONS)
    ids[TOKENS // 2, 3] = (ids[TOKENS // 2, 3] + 1) % EXPERTS
    return weights, ids


def forgets_the_last_token():
    outputs = poisoned()
    launch(wide_loads, blocks(TOKENS, 4), (32, WARPS), logits, bias, *outputs, TOKENS - 1)
    return outputs


trial = Ladder("gate_trial", check)
trial.step("off by one", off_by_one, expect_wrong=True)
trial.step("forgets a token", forgets_the_last_token, expect_wrong=True)

# %% [markdown]
# ### The whole ladder
#
# All steps once more, measured by turns, so that a clock that drifts hits all of them alike.

# %%
ladder.measure_all()
ladder.save(notebook_sources("notebooks/01_gate.py"))


# %%
CONFIG = {"num_experts": EXPERTS, "num_expert_group": GROUPS}


def peers_us(tokens=16384, dtype="float32"):
    """The kernel times of other projects' kernels, {name: us}, from the record of the whole comparison."""
    rows = records.select(GATE, size={"tokens": tokens}, dtype=dtype, config=CONFIG) if GATE else []
    times = {row["step"]: row["kernel_us"]["median"] for row in rows}
    return {name.removeprefix("peer:"): times[name] for name in records.peers(GATE) if name in times} if GATE else {}


ladder.plot(floor_us=FLOOR_US, peers=peers_us())

# %% [markdown]
# Kernel time is not all that a user feels. Without a CUDA graph one also pays for the Python call.

# %%
LADDER = ladder.record if simulator.ENABLED else {"rows": ladder.rows}
if LADDER:
    picture = plots.split_figure(LADDER["rows"], title="What the GPU takes, and what Python takes")
else:
    picture = print("No ladder is recorded yet, so there is nothing to draw.")
picture

# %% [markdown]
# ## 5. The sweep over tokens
#
# One size does not tell much. A server decodes a handful of tokens at a time and reads prompts of thousands. The
# comparison with the kernels of other projects is measured by `python -m moe_numba bench gate` and read here from its
# record.

# %%
NAMES = {"final": "moe_numba"}
if GATE:
    rows = records.select(GATE, dtype="float32", config=CONFIG)
    steps = sorted({row["step"] for row in rows if not row["step"].endswith("out=")})  # with out= only calls differ
    lines = {
        NAMES.get(step, step.removeprefix("peer:")): records.series(GATE, step=step, dtype="float32", config=CONFIG)
        for step in steps
    }
    lines = {name: points for name, points in lines.items() if points}
    sizes = sorted({tokens for points in lines.values() for tokens in points})
    floor = {tokens: max(*floors_us(tokens).values(), chained) for tokens in sizes}  # nor faster than an empty kernel
    picture = plots.sweep_figure(lines, floor=floor, title="The gate over tokens, float32", caption=plots.caption(GATE))
else:
    picture = print("The comparison over tokens has not been recorded yet; `python -m moe_numba bench gate` does it.")
picture

# %% [markdown]
# ## 6. The article's claims
#
# The article promises that DeepSeek-V3 as a whole gains 5 % or more. Its end-to-end test ran on 8 H200, before (main)
# and after (pr) the change:
#
# ```shell
# SGL_ENABLE_JIT_DEEPGEMM=0 python3 -m sglang.launch_server --model /DeepSeek-V3 --tp 8 --trust-remote-code --port 30001
# python3 -m sglang.bench_serving --backend sglang --num-prompts 300 --request-rate 1 --port 30001 --flush-cache \
#     --warmup-requests 20
# ```
#
# Tokens per second (qps is queries per second):
#
# | qps | | input | output | total |
# |---|---|---|---|---|
# | 4 | main | 719.99 | 456.44 | 1176.43 |
# | 4 | pr | 763.11 | 483.77 | 1246.88 |
# | 8 | main | 840.96 | 533.13 | 1374.09 |
# | 8 | pr | 887.35 | 562.54 | 1449.89 |
# | 16 | main | 892.55 | 565.83 | 1458.38 |
# | 16 | pr | 964.91 | 611.70 | 1576.61 |
#
# (The command above says `--request-rate 1`; the table has 4, 8 and 16.)
#
# Its second measurement is a picture: the kernel alone against `torch.compile`, over the number of tokens
# (`seq_length` there, with a batch of one). It says that the fused kernel is ahead by an order of magnitude
# (数量级的领先). The picture's numbers are not in the text, but vLLM repeated the test on an H200
# ([#21107](https://github.com/vllm-project/vllm/pull/21107)). Both times contain the copying of the inputs.
#
# Its third is the profile of a layer, taken with `bench_serving --num-prompts 2 --request-rate 1 --profile`:
# 36 us -> 8 us.
#
# The next cell compares what can be compared. A verdict is computed, never typed. Where it needs a figure that is not
# recorded, it says so.

# %%
THROUGHPUT = {4: (1176.43, 1246.88, 5.9), 8: (1374.09, 1449.89, 5.5), 16: (1458.38, 1576.61, 8.1)}
REPEATED = {5000: (208.9, 25.8), 10000: (400, 35.9), 20000: (719, 52.6), 40000: (1354, 83.4)}  # vLLM's figures, us
PROMISED = ((256, 8), (256, 16), (128, 4), (128, 8))
NOT_RECORDED = "open: not recorded yet"


def reaches_template(num_experts, groups, dtype="float32"):
    """The article's switch, with each ``else`` where C++ puts it (section 7)."""
    outer, inner = {256: (8, 16), 128: (4, 8)}[num_experts]
    if groups == outer:
        if dtype in ("bfloat16", "float16", "float32"):
            return True
        elif groups == inner:
            return True
    return False


def verdict(holds, figure):
    return f"{'confirmed' if holds else 'refuted'}: {figure}"


def compare_times(fast, slow, factor, what):
    """Whether ``slow`` takes ``factor`` times as long as ``fast``; both in us or None."""
    if not fast or not slow:
        return NOT_RECORDED
    return verdict(slow / fast >= factor, f"{slow:.1f} -> {fast:.1f} us, {slow / fast:.1f} times ({what})")


def gate_us(part, tokens):
    """The recorded kernel time of the first step whose name contains ``part``, in microseconds, or None."""
    rows = records.select(GATE, size={"tokens": tokens}, dtype="float32", config=CONFIG) if GATE else []
    found = (row["kernel_us"]["median"] for row in rows if part in row["step"].lower() and "kernel_us" in row)
    return next(found, None)


claims = []
for qps, (main, pr, said) in THROUGHPUT.items():
    gain = 100 * (pr / main - 1)
    claims.append(
        (
            f"qps {qps}: {said} % more tokens per second",
            verdict(abs(gain - said) < 0.15, f"the table itself gives {gain:.1f} %; not measured again here"),
        )
    )
ratios = [slow / fast for slow, fast in REPEATED.values()]
claims.append(
    (
        "The fused kernel is ahead of torch.compile by an order of magnitude, in the article's test",
        verdict(min(ratios) > 8, f"{min(ratios):.0f} to {max(ratios):.0f} times in vLLM's repetition"),
    )
)
for tokens in (64, 1024, 16384):
    claims.append(
        (
            f"The article's kernel is 10 times as fast as torch.compile, {tokens} tokens",
            compare_times(gate_us("aot", tokens), gate_us("torch.compile", tokens), 10, "kernel times in a CUDA graph"),
        )
    )
eager, compiled_row = ladder.row("torch eager"), ladder.row("torch.compile")
if eager:
    text = f"confirmed: torch starts {eager['launches']} kernels; the fused gate is one"
else:
    text = f"torch carries out {len(count.names)} operations; the fused gate is one kernel; times not recorded yet"
claims.append(("36 us -> 8 us: many kernels become one", text))
one_token = {name: gate_us(name, 1) for name in ("torch eager", "torch.compile", "aot")}
if all(one_token.values()):
    text = verdict(
        one_token["torch.compile"] / one_token["aot"] > 2,
        f"in a CUDA graph torch takes {one_token['torch eager']:.1f} us, torch.compile "
        f"{one_token['torch.compile']:.1f} us and the article's kernel {one_token['aot']:.1f} us",
    )
else:
    text = NOT_RECORDED
claims.append(("36 us -> 8 us: the time of one call while decoding (here one token)", text))
claims.append(
    (
        "torch.compile cannot fuse all of it",
        verdict(compiled_row["launches"] > 1, f"{compiled_row['launches']} kernels are left")
        if compiled_row
        else NOT_RECORDED,
    )
)
claims.append(
    (
        "torch.compile makes the start slower",
        verdict(compiled_row["compile_s"] > 1, f"its first call took {compiled_row['compile_s']:.1f} s")
        if compiled_row
        else NOT_RECORDED,
    )
)
claims.append(
    (
        "The templated kernel is worth having",
        compare_times(us("article, static"), us("article, dynamic"), 1.05, "static against dynamic, in Numba"),
    )
)
lost = [f"{experts}/{groups}" for experts, groups in PROMISED if not reaches_template(experts, groups)]
claims.append(
    (
        "256/8, 256/16, 128/4 and 128/8 run a templated kernel",
        verdict(not lost, f"{' and '.join(lost)} never reach theirs (section 7)" if lost else "all do"),
    )
)
rows_per_warp = host(TOKENS, 128, 4)["ROWS_PER_WARP"]
claims.append(
    (
        "128 experts, 4 groups: ROWS_PER_WARP = 32/16 = 2, ROWS_PER_CTA = 12 (a comment)",
        verdict(rows_per_warp == 2, f"32/4 = {rows_per_warp}, so {6 * rows_per_warp}; the macro has it right"),
    )
)
try:
    host(TOKENS, 64, 16)  # 4 experts for a thread
    refused = False
except ValueError:
    refused = True
claims.append(
    (
        "The dynamic kernel wants 8 to 32 experts in a group (a comment)",
        verdict(refused, "only the upper bound is checked; 4 experts in a group pass"),
    )
)
claims.append(
    (
        "The block barrier makes sure that the exclusion is finished",
        "more subtle: each thread excludes only values of its own, so no barrier is needed there; "
        "where one thread reads what another has stored, there is none (section 7)",
    )
)
claims.append(
    (
        "`if (k_idx < topk)` and its twin guard the stores",
        "more subtle: inside `for (k_idx < topk)` they are always true",
    )
)
claims.append(
    (
        "The kernel comes from TensorRT-LLM and FasterTransformer",
        "confirmed: its names (VPT, THREADS_PER_ROW, ROWS_PER_WARP) and its loop of maximum and clear "
        "are those of their `topkGatingSoftmax`",
    )
)

Markdown("| claim | verdict |\n|---|---|\n" + "\n".join(f"| {claim} | {text} |" for claim, text in claims))

# %% [markdown]
# ## 7. Faults to know
#
# Reading other people's kernels taught us more than writing our own. Each remark below names a fault that we found by
# reading, and the cell after it shows what our kernel does.
#
# ### An `else` that belongs to somebody else
#
# ```c++
# if (num_expert_group == 8)
#   if (type == BFloat16) { LAUNCH(bfloat16_t, 256, 8); }
#   else if (type == Half) { LAUNCH(float16_t, 256, 8); }
#   else if (type == Float) { LAUNCH(float32_t, 256, 8); }
#   else if (num_expert_group == 16)          // belongs to the inner ifs, although it is meant for the outer one
#     ...
# ```
#
# In C++ an `else` belongs to the nearest `if`. So 16 groups are only looked at when there are 8 groups and the type
# is none of the three. 256/16 and 128/8 never reach their templates and run the dynamic kernel. The result is right,
# only slower, so no test finds it. In Python indentation decides, and a closure makes the kernel for every
# combination.

# %%
for experts, groups in ((256, 16), (128, 8)):
    x, b = torch.randn(TOKENS, experts, device=DEVICE), torch.rand(experts, device=DEVICE) * 0.2
    out = moe_numba.biased_grouped_topk(x, b, 8, num_expert_group=groups, topk_group=4)
    print(f"{experts}/{groups}:", mismatch(*out, x, b, 8, num_expert_group=groups, topk_group=4) or "right")

# %% [markdown]
# ### A mark that is also a value
#
# The article's kernel marks an excluded group with `FLT_MAX`, the largest float32, in the type of the logits. In 16
# bits there is no such number. It becomes infinity. A group whose first expert has an infinite bias ("always choose
# this one") then looks excluded, and the expert that should always be chosen never is.

# %%
print("FLT_MAX in bfloat16:", torch.tensor(float(EXCLUDED)).to(torch.bfloat16).item())
eager_bias = bias.clone()
eager_bias[0] = float("inf")  # expert 0 must always be chosen
x = logits.to(torch.bfloat16)
weights, ids = moe_numba.biased_grouped_topk(x, eager_bias, TOPK, **OPTIONS)
print("expert 0 is chosen for", int((ids == 0).any(dim=1).sum()), "of", TOKENS, "tokens")

# %% [markdown]
# ### A sum that does not wait
#
# In the article's top-k loop one thread stores a weight, and the first thread of the token reads it in the next line,
# without any barrier between. On today's GPUs it mostly works, because the lanes of a warp mostly run in step. Nobody
# promises that. The simulator runs lanes in a random order that follows from a **seed**. The same kernel without its
# `syncwarp`:

# %%
source = inspect.getsource(document_dynamic.py_func).replace("document_dynamic", "racy")
source = "\n".join(line for line in source.splitlines() if "syncwarp" not in line)  # the same, less one line
racy = define(source, globals())["racy"]


def seeds_that_fail(kernel, seeds=8):
    failed = []
    for seed in range(seeds):
        with simulator.seed(seed):
            if check(run_dynamic(logits, poisoned(), kernel)):
                failed.append(seed)
    return failed


if simulator.ENABLED:
    print("without syncwarp: wrong for the seeds", seeds_that_fail(racy))
    print("with syncwarp:    wrong for the seeds", seeds_that_fail(document_dynamic))
else:
    print("On a GPU this race is rarely lost. Run the notebook in the simulator (MOE_NUMBA_SIMULATE=1) to see it.")

# %% [markdown]
# ### Leaving before the barrier
#
# `if (thread_row >= num_rows) return;` stands at the top of the article's kernel, and `__syncthreads()` below. A
# barrier waits for all threads of a block, and those that returned never come. Today's GPUs forgive it; the language
# does not allow it. The simulator refuses both forms of it: a barrier without all threads, and a shuffle without all
# lanes.


# %%
@cuda.jit
def leaves_early(out, num_rows, barrier):
    row = cuda.threadIdx.y * 4 + cuda.threadIdx.x // 8
    if row >= num_rows:
        return
    if barrier:
        cuda.syncthreads()
    out[row] = cuda.shfl_xor_sync(FULL, int32(cuda.threadIdx.x), 1)


if simulator.ENABLED:
    for tokens, barrier in ((16, True), (15, False)):
        try:
            leaves_early[1, (32, WARPS)](torch.zeros(24, dtype=torch.int32), tokens, barrier)
        except simulator.SimulatorError as error:
            print(f"{tokens} tokens: {type(error).__name__}: {str(error).splitlines()[0]}")
else:
    print("On a GPU this is undefined behaviour and is not run. The simulator shows the errors.")
for tokens in (1, 7, 15):
    out = moe_numba.biased_grouped_topk(logits[:tokens], bias, TOPK, **OPTIONS)
    print(f"{tokens} tokens, ours:", mismatch(*out, logits[:tokens], bias, TOPK, **OPTIONS) or "right")

# %% [markdown]
# ### An argument that nobody reads
#
# The torch function has an argument `renormalize`. The article's kernel has none: it always divides. SGLang's wrapper
# takes the argument and ignores it. Ours obeys.

# %%
for renormalize in (True, False):
    weights, _ = moe_numba.biased_grouped_topk(logits, bias, TOPK, renormalize=renormalize, **OPTIONS)
    print(f"renormalize={renormalize}: the weights of the first token add up to {weights[0].sum().item():.4f}")

# %% [markdown]
# ### Equal values
#
# `torch.topk` does not say which of two equal values it takes. Here all scores of a token are equal, and the bias has
# only four values, so almost everything is a tie. Every kernel of the ladder takes the lower group and the lower
# expert, and so does the reference.

# %%
tied_logits = torch.zeros(TOKENS, EXPERTS, device=DEVICE)
tied_bias = torch.randint(0, 4, (EXPERTS,), device=DEVICE).float() / 8
outputs = {"package": moe_numba.biased_grouped_topk(tied_logits, tied_bias, TOPK, **OPTIONS)}
for name, kernel, tokens_per_warp in (
    ("wide loads", wide_loads, 4),
    ("a warp for a token", warp_a_token, 1),
    ("rank by counting", rank_groups, 1),
    ("integer keys", integer_keys, 1),
    ("sorted lanes", sorted_lanes, 1),
):
    outputs[name] = poisoned()
    launch(kernel, blocks(TOKENS, tokens_per_warp), (32, WARPS), tied_logits, tied_bias, *outputs[name], TOKENS)
for name, (weights, ids) in outputs.items():
    print(f"{name:20}", mismatch(weights, ids, tied_logits, tied_bias, TOPK, **OPTIONS) or "right")

# %% [markdown]
# ## 8. Exercises
#
# Each can be done in the simulator. `check` tells whether a kernel is right; a GPU tells whether it is fast.
#
# 1. **Two tokens for a warp.** In step 8, give 16 lanes to a token and 16 experts to a lane. How many shuffle rounds
#    does a pick need?
#    *Hint: `highest(..., 1, 16)`. A group is two lanes. `store_scaled` must store for two tokens.*
# 2. **The sum without shuffles.** `store_scaled` runs five rounds, although only 8 lanes have a weight. Stop after
#    three.
#    *Hint: lanes 8 to 31 then have a sum of zeros. They divide by it, but do they store?*
# 3. **A faster sigmoid.** Put `ex2_approx` and `rcp_approx` from `moe_numba.ptx.arithmetic` into `sigmoid`. Does the
#    check still pass?  *Hint: exp(-x) = 2^(-x log2 e).*
# 4. **Fewer swaps.** Only the 8 best keys of a token are needed, and a lane has 8. But how often does a lane win more
#    than 4 times? Sort only the four best to the front and find out what breaks.  *Hint: some tokens have 8 picks in
#    one lane. Make one.*
# 5. **No groups.** Kimi-K2 has 384 experts in a single group and picks 8. Which steps fall away? What must change
#    with 12 experts in a lane?  *Hint: 384 / 32 = 12 is three wide loads; Batcher's network works for 12 values too.
#    Check it.*
# 6. **Break a tie.** In `better_groups`, leave out the part after `or`. Which input shows the mistake?
#    *Hint: section 7, equal values. Why does the random input never show it?*
#
# ## 9. Sources
#
# - The article: a walk through SGLang's `moe_fused_gate`, in Chinese. Its kernel came with [sglang PR
#   4530](https://github.com/sgl-project/sglang/pull/4530) and was put to use with [sglang PR
#   5371](https://github.com/sgl-project/sglang/pull/5371). The torch function is in
#   `python/sglang/srt/layers/moe/topk.py`, the kernel in `sgl-kernel/csrc/moe/moe_fused_gate.cu`.
# - As the article says in its summary, the design goes back to TensorRT-LLM and FasterTransformer: a classic of fused
#   kernels in inference frameworks, improved and passed on until it reached DeepSeek-V3.
# - The kernels that came after it: FlashInfer `fused_topk_deepseek` (in SGLang since
#   [#15347](https://github.com/sgl-project/sglang/pull/15347)) and SGLang's Triton router
#   ([#29771](https://github.com/sgl-project/sglang/pull/29771)).
# - K. E. Batcher, *Sorting networks and their applications*, 1968.
# - The instructions: NVIDIA, *PTX ISA*: `shfl.sync`, `vote.sync.ballot`, `redux.sync`, `ld.global.nc`.
#
# ## The final kernels
#
# This is what `moe_numba.biased_grouped_topk` runs: first the kernel for few tokens, then the one for many. What they
# share, such as loading, scoring and sorting, is in `moe_numba/gate/device_functions.py`.

# %%
Markdown("```python\n" + inspect.getsource(few_tokens) + "\n```")

# %%
Markdown("```python\n" + inspect.getsource(many_tokens) + "\n```")
