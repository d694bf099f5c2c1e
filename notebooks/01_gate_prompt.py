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
# # The gate: choose each token's experts
#
# DeepSeek-V3 has 256 experts in each mixture-of-experts layer and sends each token to 8 of them. The **gate** chooses these
# 8 and computes their weights. This notebook ports SGLang's CUDA C++ kernel `moe_fused_gate`
# ([PR 4530](https://github.com/sgl-project/sglang/pull/4530)), which an article in Chinese explains, to Numba, and
# then improves it step by step. It assumes [00_start_here](00_start_here.ipynb).

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import math
import time
import warnings
from functools import cache

import numpy as np
import torch
from numba import cuda, float32, int32, uint32

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.timing.launch_profile import launch_profile
from moe_numba.course.draw.launch_timeline import is_search, launch_timeline
from moe_numba.course.draw.player import Player
from moe_numba.course.draw.warp_frames import shuffles
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.gate import draw
from moe_numba.course.lessons.gate.draw_warp_loads import warp_loads
from moe_numba.course.lessons.gate.pipe_clocks import PipeClocks, pipe_clocks
from moe_numba.course.lessons.gate.runs import GateRuns, Routing, numba_stream, phases, resident_ctas, shared_bytes_of
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.instruction_mix import instruction_mix
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.source_diff import OpCounter, change
from moe_numba.gate.device_functions import LOG2_E, make_sort_descending, sorting_network
from moe_numba.gate.four_tokens_per_warp import WARPS_PER_BLOCK, launch_bounds, make_4tokens_kernel, supports
from moe_numba.gate.one_token_per_warp import GateConfig
from moe_numba.gate.reference import biased_grouped_topk as reference
from moe_numba.gate.reference import choose_experts
from moe_numba.ptx.arithmetic import ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.memory import ld_shared_s32x4, load_nc_u32x4, st_shared_s32x4
from moe_numba.ptx.warp import redux_sync_max_s32
from moe_numba.runtime.changed_source import changed_source, define
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")

# %%
EXPERTS, GROUPS, KEPT, TOPK = 256, 8, 4, 8  # DeepSeek-V3; (128, 4, 2, 6) works as well
SHAPE = EXPERTS, GROUPS, KEPT, TOPK
TOKENS = 16 if simulator.ENABLED else 16384
MODEL_TOKENS = 16384 if simulator.ENABLED else TOKENS  # of predictions: recorded times are for 16384

# %% [markdown]
# ## What you will build

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GATE, LADDER = records.recorded("gate"), records.recorded("gate_ladder")
CONFIG = {"num_experts": 256, "num_expert_group": 8}


def recorded_us(record, step, **where):
    """The median kernel time of a step in a record, or None."""
    row = record and records.find(record, step=step, **where)
    return row and row["kernel_us"]["median"]


where = {"size": {"tokens": 16384}, "dtype": "float32", "config": CONFIG}
compile_us, sglang, final = (recorded_us(GATE, step, **where) for step in ("torch.compile", "peer:sglang-aot", "final"))
port = recorded_us(LADDER, "port, static sizes") or recorded_us(LADDER, "article, static")
say(
    "Recorded on an H200 with 16384 tokens: SGLang's kernel, compiled from C++, takes {sglang:.0f} us. Our Numba port "
    "of it takes {port:.0f} us. The kernel at the end of this notebook takes {final:.1f} us: **{faster:.1f} times as "
    "fast as the C++ original** and {more:.0f} times as fast as `torch.compile` ({compiled:.0f} us).",
    sglang=sglang,
    port=port,
    final=final,
    faster=sglang and final and sglang / final,
    more=compile_us and final and compile_us / final,
    compiled=compile_us,
)

# %% [markdown]
# ## 1. The problem
#
# For each token the model computes one number per expert, the **logit**. The gate computes:
#
# 1. **Sigmoid**: each logit becomes a score between 0 and 1.
# 2. **Bias**: a learned number per expert is added, which balances the load. It affects the choice, not the weight.
# 3. **Group scores**: 256 experts form 8 groups; the score of a group is the sum of its two best experts.
# 4. **Groups**: the 4 best groups are kept.
# 5. **Experts**: the 8 best experts of the kept groups are chosen.
# 6. **Weights**: the chosen experts' scores without the bias, divided by their sum.
#
# DeepSeek-V3 was trained with each group on a node of its own, so that a token travels to at most 4 nodes.

# %%
gate = GateRuns(TOKENS, *SHAPE)  # logits from a normal distribution, in several sets that exceed the L2 cache
bias = gate.bias  # 0 to 0.2
draw.problem(gate.logits[0].cpu(), bias.cpu(), GROUPS, KEPT, TOPK)

# %% [markdown]
# ## 2. The reference
#
# The torch function from which SGLang and vLLM started:


# %%
def biased_grouped_topk_impl(
    hidden_states, gating_output, correction_bias, topk, renormalize, num_expert_group=0, topk_group=0
):
    assert hidden_states.shape[0] == gating_output.shape[0], "Number of tokens mismatch"
    scores = gating_output.sigmoid()  # [tokens, experts]
    num_token, num_experts = scores.shape
    scores_for_choice = scores.view(num_token, -1) + correction_bias.unsqueeze(0)
    group_scores = scores_for_choice.view(num_token, num_expert_group, -1).topk(2, dim=-1)[0].sum(dim=-1)
    group_idx = torch.topk(group_scores, k=topk_group, dim=-1, sorted=False)[1]
    group_mask = torch.zeros_like(group_scores)  # [tokens, groups]
    group_mask.scatter_(1, group_idx, 1)
    size = num_experts // num_expert_group
    score_mask = group_mask.unsqueeze(-1).expand(num_token, num_expert_group, size).reshape(num_token, -1)
    tmp_scores = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
    _, topk_ids = torch.topk(tmp_scores, k=topk, dim=-1, sorted=False)
    topk_weights = scores.gather(1, topk_ids)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    return topk_weights.to(torch.float32), topk_ids.to(torch.int32)


# %% [markdown]
# `torch.topk` does not define which of two equal values it takes. Kernels are therefore compared with a float64 reference
# that returns the best expert first and, of equal values, the lower index. Outputs are **poisoned** with NaN and -7, so that
# an element that a kernel does not write is found. A check must be able to fail:

# %%
weights, ids = reference(gate.logits, bias, TOPK, num_expert_group=GROUPS, topk_group=KEPT)
wrong_ids = ids.clone()
wrong_ids[TOKENS // 2, 3] = (ids[TOKENS // 2, 3] + 1) % EXPERTS
for name, outputs in {
    "reference": (weights, ids),
    "one wrong expert": (weights, wrong_ids),
    "nothing written": gate.poisoned(),
}.items():
    print(f"{name:<17}", gate.check(Routing(*outputs, gate.logits)) or "right")

# %% [markdown]
# ## 3. Lower bound
#
# A token is 256 logits of 4 bytes of input and 8 x 8 bytes of output, which DRAM must transfer at the bandwidth of a copy. With
# the instructions `ex2` and `rcp`, a sigmoid takes two results of the special function unit (MUFU), which returns 16 per clock
# and SM.

# %%
LIMITS = chip_limits()
SMS, CLOCK = LIMITS.sm_count, LIMITS.boost_clock


def lower_bounds_us(tokens):
    """What each limit allows at best, in microseconds."""
    return {
        "DRAM": tokens * (EXPERTS * 4 + TOPK * 8) / LIMITS.copy_bandwidth * 1e6,
        "MUFU": tokens * EXPERTS * 2 / (16 * SMS * CLOCK) * 1e6,
    }


print(LIMITS)
for tokens in (64, 1024, 16384, 65536):
    print(f"{tokens:6} tokens: " + ", ".join(f"{name} {us:.2f} us" for name, us in lower_bounds_us(tokens).items()))
FLOOR_US = max(lower_bounds_us(MODEL_TOKENS).values())

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# {False: an ordinary launch, True: with programmatic dependent launch, step 21}
EMPTY = {on: recorded_us(GATE, "empty kernel", config={"dependent": on}) for on in (False, True)}
say(
    "An empty kernel takes {empty:.2f} us in a CUDA graph, and {dependent:.2f} us with the launch of step 21, so with few "
    "tokens the launch is the bound.",
    empty=EMPTY[False],
    dependent=EMPTY[True],
)

# %% [markdown]
# ## 4. Timing, and a model of the instruction pipes
#
# `measure` checks a step against the reference and times it. The inputs rotate through more logits than the L2 cache holds.

# %%
config = {"num_experts": EXPERTS, "num_expert_group": GROUPS, "topk_group": KEPT, "topk": TOPK}
title = f"The gate, {MODEL_TOKENS} tokens"
ladder = Ladder("gate_ladder", gate.check, title, config=config, size={"tokens": TOKENS})
BYTES = TOKENS * (EXPERTS * 4 + TOPK * 8) + EXPERTS * 4


def measure(name, run, any_order=False, **more):
    """Check and time ``run(logits, weights, ids)``."""
    call, timed = gate.calls(run, any_order=any_order)
    ladder.step(name, call, timed=timed, floor_us=FLOOR_US, bytes=BYTES, **more)


# %% [markdown]
# An SM has four schedulers. Each issues one instruction per clock for one of its warps, to one of several **pipes**:
#
# | pipe | instructions | clocks per instruction of a warp |
# |---|---|---|
# | FMA | float add, multiply; integer multiply | 1; 2 |
# | ALU | other integer instructions, compare, select, minimum, maximum | 2 |
# | XU | MUFU, conversions, bit counts (`popc`, `ffs`), maximum of a warp (`redux`, step 12) | 8 |
# | LSU | loads, stores, shuffles | 4 |
#
# `pipe_clocks` compiles a kernel for an H200, disassembles it, and adds up these clocks for one warp. The **issue slots** are the
# number of instructions. If some warp is always ready, the time in microseconds is
#
# clocks of the slowest pipe x (tokens / tokens per warp) / (4 x SMs) / clock rate.
#
# This is an estimate: too low where warps wait, too high where a branch skips instructions, such as the slow path of a
# division. For loops, the notebook states how often a warp executes one kind of instruction, such as SHFL or REDUX; the trip
# count follows.

# %%
SIGNATURE = ("float32*", "float32*", "float32*", "int32*", "int32")  # logits, bias, weights, ids, tokens
ARRAYS = ("float32[,]", "float32[]", "float32[,]", "int32[,]")
CLOCKS = PipeClocks()


TOKENS_PER_WARP = {}


def count(name, make, executed=None, signature=SIGNATURE, tokens_per_warp=1, threads=None):
    """Count the clocks of ``make(*SHAPE)``, which has loops that execute its shuffles ``executed`` times in total."""
    TOKENS_PER_WARP[name] = tokens_per_warp
    CLOCKS.update(pipe_clocks({name: (f"{make.__name__}{SHAPE}", signature, executed, threads)}, [make]))


def pipe_us(name):
    """Clocks of a warp in the slowest pipe x warps per scheduler / clock rate, in microseconds."""
    warps = MODEL_TOKENS / TOKENS_PER_WARP[name]
    return CLOCKS[name] * warps / (4 * SMS) / CLOCK * 1e6


# %% [markdown]
# ## 5. The steps
#
# ### Step 1: torch, operation by operation
#
# **Idea.** Torch launches at least one kernel per operation, and each reads its input from memory
# and writes its output back.


# %%
def torch_eager(x, *_):
    return biased_grouped_topk_impl(x, x, bias, TOPK, True, GROUPS, KEPT)


with OpCounter() as operations:
    torch_eager(gate.logits)
print(len(operations.names), "operations:", ", ".join(operations.names))
measure("torch eager", torch_eager, any_order=True, timeline=launch_profile(lambda: torch_eager(gate.logits)))

# %% [markdown]
# ### Step 2: torch.compile
#
# **Bottleneck.** `torch.compile` does not fuse operations like `topk`, so this step is about the others. Most read and write
# tables of one number per token and expert: eight passes over float tables (sigmoid 2, sum with the bias 2, expanded mask 1, its
# conversion 1, `masked_fill` 2) and four over tables of bytes (the mask as bool), nine times tokens x 1 KB.
#
# **Idea.** `torch.compile` generates fused kernels.
#
# **Predicted gain.** Four passes remain: logits in, biased scores out for `topk`, these in again, masked scores out. 5 x
# tokens x 1 KB / the bandwidth of a copy disappear. The model leaves out the small kernels.

# %%
if simulator.ENABLED:
    print("torch.compile is not run in the simulator")
else:
    compiled_gate = torch.compile(biased_grouped_topk_impl, dynamic=False)

    def torch_compiled(x, *_):
        return compiled_gate(x, x, bias, TOPK, True, GROUPS, KEPT)

    started = time.perf_counter()
    torch_compiled(gate.logits)
    torch.cuda.synchronize()
    more = {"compile_s": time.perf_counter() - started, "timeline": launch_profile(lambda: torch_compiled(gate.logits))}
    gain_us = 5 * TOKENS * EXPERTS * 4 / LIMITS.copy_bandwidth * 1e6
    measure("torch.compile", torch_compiled, True, after="torch eager", predicted_gain_us=gain_us, **more)

# %% [markdown]
# **Explanation.** Torch's profiler recorded the kernels of one call:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
rows = {name: ladder.row(name) or {} for name in ("torch eager", "torch.compile")}
timelines = {name: row["timeline"] for name, row in rows.items() if row.get("timeline")}
if timelines and final:
    picture = launch_timeline(timelines | {"this notebook": [["moe_numba", 0, final]]}, "Kernels of one call")
else:
    picture = print("no kernels of a call are recorded yet")
picture

# %% jupyter={"source_hidden": true} tags=["hide-input"]
scores = gate.logits.sigmoid() + bias
topks = {
    "two best of each group": lambda: scores.view(TOKENS, GROUPS, -1).topk(2, dim=-1),
    "experts": lambda: scores.topk(TOPK, dim=-1, sorted=False),
}
topk_us = ladder.times("torch.topk alone", topks) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
split = {
    name: [sum(us for kernel, _, us in kernels if is_search(kernel) == searches) for searches in (True, False)]
    for name, kernels in timelines.items()
}
eager, compiled = (split.get(name, [None, None]) for name in ("torch eager", "torch.compile"))
pass_us = MODEL_TOKENS * EXPERTS * 4 / LIMITS.copy_bandwidth * 1e6  # over a float table
say(
    "Kernels that select or sort take {before:.0f} us of torch's call and {after:.0f} us of `torch.compile`'s: they are not "
    "fused. Alone, the two large `topk` take {topk:.0f} us; `torch.topk` is made for long rows, not for 32 or 256 "
    "elements. All other kernels take {others:.0f} us and, fused, {fused:.0f} us. Of these the predicted passes, at the "
    "bandwidth of a copy, are {passes:.0f} and {fused_passes:.0f} us. The rest, which the model leaves out, is small kernels, "
    "and passes that are slower than a copy: {rest:.0f} and {fused_rest:.0f} us. The first compiled call took {compile_s:.1f} s.",
    before=eager[0],
    after=compiled[0],
    topk=sum(topk_us.values()) or None,
    others=eager[1],
    fused=compiled[1],
    passes=9 * pass_us,
    fused_passes=4 * pass_us,
    rest=eager[1] and eager[1] - 9 * pass_us,
    fused_rest=compiled[1] and compiled[1] - 4 * pass_us,
    compile_s=rows["torch.compile"].get("compile_s"),
)

# %% [markdown]
# ### Step 3: one thread per token
#
# **Bottleneck.** `torch.topk` takes most of the time.
#
# **Idea.** One kernel does everything. If each thread routes one token, threads do not communicate.


# %%
LOWEST, EXCLUDED = -3.4028234663852886e38, 3.4028234663852886e38  # -FLT_MAX and FLT_MAX


@cuda.jit(device=True)
def sigmoid(x):
    return float32(1) / (float32(1) + float32(math.exp(-x)))


@cuda.jit
def one_thread_per_token(logits, bias, weights, ids):
    token = cuda.grid(1)
    if token >= logits.shape[0]:
        return  # no other thread waits for this one
    score = cuda.local.array(EXPERTS, float32)
    choice = cuda.local.array(EXPERTS, float32)
    group_score = cuda.local.array(GROUPS, float32)
    size = EXPERTS // GROUPS
    for g in range(GROUPS):
        best, second = float32(LOWEST), float32(LOWEST)
        for e in range(g * size, (g + 1) * size):
            score[e] = sigmoid(logits[token, e])
            choice[e] = score[e] + bias[e]
            second = max(second, min(best, choice[e]))
            best = max(best, choice[e])
        group_score[g] = best + second
    for _ in range(GROUPS - KEPT):
        worst = 0
        for g in range(GROUPS):
            if group_score[g] <= group_score[worst]:  # of equal groups the later one is dropped
                worst = g
        group_score[worst] = float32(EXCLUDED)
        for e in range(worst * size, (worst + 1) * size):
            choice[e] = float32(LOWEST)
    total = float32(0)
    for k in range(TOPK):
        best_expert = 0
        for e in range(EXPERTS):
            if choice[e] > choice[best_expert]:
                best_expert = e
        choice[best_expert] = float32(LOWEST)
        weights[token, k], ids[token, k] = score[best_expert], best_expert
        total += score[best_expert]
    for k in range(TOPK):
        weights[token, k] /= total


# %% [markdown]
# `float32(...)` is needed because Numba types a global such as `LOWEST` as a 64-bit float.
#
# **Predicted gain.** The time of step 1 disappears. 16384 threads are one warp per scheduler, so a warp waits for each of its own
# results. The model assumes 34 instructions per expert for the scores, 21 per expert and pick, and 5 clocks for each: experts x
# (34 + 21 x picks) x 5 clocks / clock rate remain.


# %%
def run_one_thread_per_token(x, weights, ids):
    one_thread_per_token[-(-len(x) // 32), 32, numba_stream()](x, bias, weights, ids)


waiting_us = EXPERTS * (34 + 21 * TOPK) * 5 / CLOCK * 1e6
gain_us = (ladder.median_us("torch eager") or 0) - waiting_us
measure("one thread per token", run_one_thread_per_token, after="torch eager", predicted_gain_us=gain_us)

# %% [markdown]
# ### Step 4: SGLang's design, with run-time sizes
#
# **Bottleneck.** The arrays are indexed with values that are only known at run time. Registers cannot be indexed dynamically
# (and 520 values exceed the 255 registers of a thread), so the arrays are in **local memory**: DRAM, behind the caches. The
# machine code shows it:

# %%
instruction_mix({"one thread per token": (one_thread_per_token, ARRAYS)})

# %% [markdown]
# The counts are static: an instruction in a loop counts once, and unrolling raises the count. The stack holds the three
# arrays: (256 + 256 + 8) x 4 bytes.
#
# **Idea.** One thread per *group* of a token. A thread holds the 32 experts of its group (`VPT`, values per thread), and
# `THREADS_PER_ROW` = 8 neighbouring lanes share a token. They find the worst group and the best expert with shuffles.

# %%
draw.thread_model(EXPERTS, GROUPS)

# %% [markdown]
# SGLang selects a **template** of the kernel for 256 or 128 experts, or a **dynamic** kernel with run-time sizes, which this
# step ports:
#
# | phase | kernel | torch |
# |---|---|---|
# | load, sigmoid, bias | 32 values each, in the thread | `scores`, `scores_for_choice` |
# | exclude groups, 4 times | each thread: sum of its two best; butterfly: the lowest sum, of equal sums the higher index; its thread sets its values to `FLT_MAX` | `group_scores`, `group_idx`, `group_mask`, `masked_fill` |
# | choose experts, 8 times | each thread: its best value; butterfly: the highest, of equal values the lower index; its thread stores weight and id, and sets the value to `-FLT_MAX` | `topk_ids`, `gather` |
# | rescale | the first thread of the token divides by the sum | `topk_weights / topk_weights.sum()` |
#
# In the butterfly `lowest`, each lane exchanges a value and its group with the lane at distance 1, 2, then 4, and keeps the
# lower value:


# %%
FULL = 0xFFFFFFFF  # all 32 lanes take part


@cuda.jit(device=True)
def lowest(value, index, start, stop):
    """The lowest value among the lanes at distances start, 2 start, ... below stop, and its index."""
    step = start
    while step < stop:
        other = cuda.shfl_xor_sync(FULL, value, step)
        other_index = cuda.shfl_xor_sync(FULL, index, step)
        if other < value or (other == value and other_index > index):
            value, index = other, other_index
        step *= 2
    return value, index


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def worst_group_of_each_token(sums, out):
    lane = cuda.threadIdx.x
    _, out[lane] = lowest(sums[lane], int32(lane % GROUPS), 1, GROUPS)


def trace_butterfly():
    sums = np.random.default_rng(0).integers(100, 240, 32).astype(np.float32) / 100
    with simulator.trace() as events:
        worst_group_of_each_token[1, 32](sums, np.zeros(32, np.int32))
    explain = lambda number, _, distance: (
        f"Round {number // 2 + 1}: each lane receives the {'group' if number % 2 else 'sum'} of the lane at distance {distance}."
    )
    return Player(*shuffles(events, explain=explain), f"Butterfly: the lowest sum among {GROUPS} lanes").as_dict()


butterfly = Player.from_dict(in_simulator(trace_butterfly))
butterfly

# %%
butterfly.strip([0, 1, len(butterfly.frames) - 2])  # half of the lanes, and three of the shuffles

# %% [markdown]
# **Exercise 1.** If 16 lanes share a token, two tokens share a warp. With four shuffles, leave in `out[lane]` the maximum of
# the lane's own half of the warp.


# %%
@cuda.jit
def max_of_half_warps(x, out):
    lane = cuda.threadIdx.x
    value = x[lane]
    for r in range(5):
        value = max(value, cuda.shfl_xor_sync(FULL, value, 1 << r))
    out[lane] = value


exercise("gate-1").check(max_of_half_warps)

# %% [markdown]
# `highest` is `lowest` with both comparisons reversed. The port follows; `int32(...)` stands where SGLang's kernel has `int`. An
# excluded group's values become `FLT_MAX`, so its sum is never the lowest again, and `choice[0] != EXCLUDED` is true for the
# groups that are kept.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
WARPS = 6  # per CTA
MAX_VPT = 32


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


# %%
@cuda.jit
def port_dynamic(logits, bias, weights, ids, num_expert_group, topk_group, topk):
    num_rows, num_experts = logits.shape
    vpt = num_experts // num_expert_group
    rows_per_warp = max(1, 32 // num_expert_group)
    lane = cuda.threadIdx.x
    row = (cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * rows_per_warp + lane // num_expert_group
    safe_row = min(row, num_rows - 1)
    group = int32(lane % num_expert_group)
    first = int32(group * vpt)
    score, choice = cuda.local.array(MAX_VPT, float32), cuda.local.array(MAX_VPT, float32)
    for i in range(vpt):
        score[i] = sigmoid(logits[safe_row, first + i])
        choice[i] = score[i] + bias[first + i]
    for _ in range(num_expert_group - topk_group):
        best, second = float32(LOWEST), float32(LOWEST)
        for i in range(vpt):
            second = max(second, min(best, choice[i]))
            best = max(best, choice[i])
        _, worst_group = lowest(best + second, group, 1, num_expert_group)
        if group == worst_group:
            for i in range(vpt):
                choice[i] = float32(EXCLUDED)
    total = float32(0)
    for k in range(topk):
        best, expert = float32(LOWEST), first
        if choice[0] != float32(EXCLUDED):
            for i in range(vpt):
                if choice[i] > best:
                    best, expert = choice[i], int32(first + i)
        best, expert = highest(best, expert, 1, num_expert_group)
        if group == expert // vpt and row < num_rows:
            choice[expert % vpt] = float32(LOWEST)
            weights[row, k], ids[row, k] = score[expert % vpt], expert
        cuda.syncwarp()  # the next line reads what another lane has just written
        if group == 0 and row < num_rows:
            total += weights[row, k]
    if group == 0 and row < num_rows:
        for k in range(topk):
            weights[row, k] /= total


# %% [markdown]
# The port fixes a bug: in SGLang's kernel, the first thread of a token reads a weight that another lane has just stored;
# here `syncwarp` orders the two. The simulator shows the race. (Threads without a token return early in SGLang's kernel, and a
# shuffle does not wait for lanes that have exited; here they compute on the last token and store nothing.)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
no_barrier = changed_source(
    port_dynamic,
    "        cuda.syncwarp()  # the next line reads what another lane has just written\n",
    "",
    "no_barrier",
)
no_barrier = define(no_barrier, globals(), "no_barrier.py")["no_barrier"]


# %%
def show_race():
    logits, bias = torch.randn(4, EXPERTS), torch.rand(EXPERTS)
    with simulator.races():
        for kernel in (port_dynamic, no_barrier):
            try:
                kernel[1, (32, 1)](
                    logits, bias, torch.zeros(4, TOPK), torch.zeros(4, TOPK, dtype=torch.int32), GROUPS, KEPT, TOPK
                )
                print(f"{kernel.__name__}: no race")
            except simulator.DataRace as error:
                print(f"{kernel.__name__}: {error}")


in_simulator(show_race)

# %% [markdown]
# **Predicted gain.** There are 8 times as many warps. If each has an eighth of the work and only waits, the time falls to an
# eighth.


# %%
def ctas(tokens, tokens_per_warp):
    return -(-tokens // (tokens_per_warp * WARPS))


def run_dynamic(kept, topk):
    def run(x, weights, ids):
        grid = ctas(len(x), 32 // GROUPS)
        port_dynamic[grid, (32, WARPS), numba_stream()](x, bias, weights, ids, GROUPS, kept, topk)

    return run


gain_us = (ladder.median_us("one thread per token") or 0) * (1 - 1 / GROUPS)
measure("port, run-time sizes", run_dynamic(KEPT, TOPK), after="one thread per token", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** Each of the four rounds recomputes all group sums. Time the kernel with all groups kept, which leaves out the
# group phase, and with one pick. Of the time `t`, the groups take `t` - `t(all kept)`, the picks (`t` - `t(one pick)`) x 8 / 7,
# loading the rest:

# %%
PHASES = phases(ladder, gate, "port, run-time sizes", run_dynamic) or {}
instruction_mix({"port, run-time sizes": (port_dynamic, (*ARRAYS, "int32", "int32", "int32"))})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Choosing the experts takes {pick:.0f} us, choosing the groups {group:.0f} us, and the rest {load:.0f} us. The "
    "compiler unrolls loops of run-time length by four and tests after each four whether more are left; each comparison "
    "loads a value from local memory. The divisions by run-time sizes are calls of a 64-bit division in software, one "
    "of them in each pick.",
    pick=PHASES.get("choose experts"),
    group=PHASES.get("choose groups"),
    load=PHASES.get("load, sigmoid, bias"),
)

# %% [markdown]
# ### Step 5: the same, static
#
# **Bottleneck.** Loop counters, tests and 64-bit divisions, needed only for run-time sizes.
#
# **Idea.** C++ passes the sizes as template parameters. In Python a **closure** does the same: a function that makes the kernel.
# Numba treats names from the enclosing function as constants, so loops can be unrolled and divisions become shifts. `cache`
# keeps one kernel per combination.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_port_static(num_experts, num_expert_group, topk_group, topk):
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
            best, second = float32(LOWEST), float32(LOWEST)
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = float32(EXCLUDED)
        total = float32(0)
        for k in range(topk):
            best, expert = float32(LOWEST), first
            if choice[0] != float32(EXCLUDED):
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            if group == expert // vpt and row < num_rows:
                choice[expert % vpt] = float32(LOWEST)
                weights[row, k] = score[expert % vpt]
                ids[row, k] = expert
            cuda.syncwarp()  # the next line reads what another lane has just written
            if group == 0 and row < num_rows:
                total += weights[row, k]
        if group == 0 and row < num_rows:
            for k in range(topk):
                weights[row, k] /= total

    return kernel


# %% [markdown]
# **Predicted gain.** Measured time before - pipe time after: the loops of step 4 depend on arguments, so step 4 has no pipe
# time. Later steps predict **by pipe times**: the difference of the slowest pipes before and after.


# %%
def run_static(x, weights, ids):
    grid = ctas(len(x), 32 // GROUPS)
    make_port_static(*SHAPE)[grid, (32, WARPS), numba_stream()](x, bias, weights, ids)


ROUNDS = GROUPS.bit_length() - 1  # of a butterfly over the groups
executed = {"SHFL.BFLY": (GROUPS - KEPT + TOPK) * 2 * ROUNDS}
count("port, static sizes", make_port_static, executed, ARRAYS, tokens_per_warp=32 // GROUPS)
before_us = ladder.median_us("port, run-time sizes") or 0
gain_us = before_us and before_us - pipe_us("port, static sizes")
measure("port, static sizes", run_static, after="port, run-time sizes", predicted_gain_us=gain_us)
CLOCKS

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The instructions alone would take {pipe:.0f} us of the {us:.0f} us: this kernel still waits most of the time.",
    pipe=pipe_us("port, static sizes"),
    us=ladder.median_us("port, static sizes"),
)

# %% [markdown]
# ### Step 6: pointers instead of arrays
#
# **Bottleneck.** The call. Numba passes an array as shape, strides and more, which Python collects at each call.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "A call of the static kernel takes {call:.0f} us of CPU time, {ratio:.1f} times its kernel time.",
    call=ladder.median_us("port, static sizes", "call_us"),
    ratio=(ladder.median_us("port, static sizes", "call_us") or 0) / (ladder.median_us("port, static sizes") or 1)
    or None,
)

# %% [markdown]
# **Idea.** `launch` compiles a kernel once for bare pointers and then packs a few numbers per call. The kernel computes its
# indices itself.
#
# **Predicted gain.** In kernel time, the difference of the slowest pipes: run-time strides make every index a 64-bit
# multiplication.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
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
            best, second = float32(LOWEST), float32(LOWEST)
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = float32(EXCLUDED)
        total = float32(0)
        for k in range(topk):
            best, expert = float32(LOWEST), first
            if choice[0] != float32(EXCLUDED):
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            if group == expert // vpt and row < num_rows:
                choice[expert % vpt] = float32(LOWEST)
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
change(make_port_static, make_pointers)


# %%
def run_pointers(make, tokens_per_warp):
    def run_of(kept, topk, **options):
        kernel = make(EXPERTS, GROUPS, kept, topk)

        def run(x, weights, ids):
            grid = ctas(len(x), tokens_per_warp)
            launch(kernel, grid, (32, WARPS), x, bias, weights, ids, len(x), **options)

        return run

    return run_of


def predicted_us(before, after):
    """What the slowest pipe saves, in microseconds; a negative number is a loss."""
    return pipe_us(before) - pipe_us(after)


count("pointers", make_pointers, {"SHFL.BFLY": (GROUPS - KEPT + TOPK) * 2 * ROUNDS}, tokens_per_warp=32 // GROUPS)
run_pointers_of = run_pointers(make_pointers, 32 // GROUPS)
gain_us = predicted_us("port, static sizes", "pointers")
measure("pointers", run_pointers_of(KEPT, TOPK), after="port, static sizes", predicted_gain_us=gain_us)
CLOCKS.select("port, static sizes", "pointers")

# %% [markdown]
# **Explanation.** Step 5 found that the kernel mostly waits. Integer instructions that are issued during a wait cost no time.
# The small loss remains unexplained.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
makes = {"port, static sizes": (make_port_static, ARRAYS), "pointers": (make_pointers, SIGNATURE)}
kernels = {name: (f"{make.__name__}{SHAPE}", signature) for name, (make, signature) in makes.items()}
mix = instruction_mix(kernels, [make for make, _ in makes.values()])

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Call time: {call:.0f} -> {call_now:.0f} us. Integer instructions in the machine code: {integers:,} -> {now:,}. "
    "Kernel time: {us:.1f} -> {us_now:.1f} us, where the pipes alone take {pipe:.1f} and {pipe_now:.1f} us. In "
    "kernel time, nothing of the prediction showed.",
    call=ladder.median_us("port, static sizes", "call_us"),
    call_now=ladder.median_us("pointers", "call_us"),
    integers=mix["port, static sizes"]["integer"],
    now=mix["pointers"]["integer"],
    us=ladder.median_us("port, static sizes"),
    us_now=ladder.median_us("pointers"),
    pipe=pipe_us("port, static sizes"),
    pipe_now=pipe_us("pointers"),
)

# %% [markdown]
# ### Step 7: arrays in registers
#
# **Bottleneck.** Local memory again: `choice[expert % vpt]` needs an index that is known only at run time, as in C++.
#
# **Idea.** Go through all 32 places and act on the one whose number equals the index. The loop is unrolled, all indices are constants, and
# `cuda.local.array` becomes registers.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_in_registers(num_experts, num_expert_group, topk_group, topk):
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
            best, second = float32(LOWEST), float32(LOWEST)
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = float32(EXCLUDED)
        total = float32(0)
        for k in range(topk):
            best, expert = float32(LOWEST), first
            if choice[0] != float32(EXCLUDED):
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            for i in range(vpt):
                if first + i == expert and row < num_rows:
                    choice[i] = float32(LOWEST)
                    weights[row * topk + k] = score[i]
                    ids[row * topk + k] = expert
            cuda.syncwarp()  # the next line reads what another lane has just written
            if group == 0 and row < num_rows:
                total += weights[row * topk + k]
        if group == 0 and row < num_rows:
            for k in range(topk):
                weights[row * topk + k] /= total

    return kernel


# %%
change(make_pointers, make_in_registers)

# %%
makes = make_pointers, make_in_registers
instruction_mix({make.__name__: (f"{make.__name__}{SHAPE}", SIGNATURE) for make in makes}, makes)

# %% [markdown]
# Local memory is not accessed any more. But each pick now compares 32 indices, and for each of them has
# two stores, which only the lane that holds the expert executes.
#
# **Predicted gain.** By pipe times, a loss:

# %%
marks = {"SHFL.BFLY": (GROUPS - KEPT + TOPK) * 2 * ROUNDS, "LDG": EXPERTS // GROUPS * 2 + 2 * TOPK}
count("in registers", make_in_registers, marks, tokens_per_warp=32 // GROUPS)
gain_us = predicted_us("pointers", "in registers")
run_registers_of = run_pointers(make_in_registers, 32 // GROUPS)
measure("in registers", run_registers_of(KEPT, TOPK), after="pointers", predicted_gain_us=gain_us, slower=True)
CLOCKS.select("pointers", "in registers")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
registers = {name: CLOCKS.codes[name].registers for name in ("pointers", "in registers")}
say(
    "The loss has the predicted size, but fewer warps per SM may be part of it. Eliminating local memory is a means, not an "
    "end: it is cached, and a pick touched it only a few times. The arrays also raise the registers per thread from "
    "{before} to {after}, so {warps} instead of {most} warps fit on an SM. We go on from the kernel with pointers.",
    before=registers["pointers"],
    after=registers["in registers"],
    most=resident_ctas(registers["pointers"], WARPS) * WARPS,
    warps=resident_ctas(registers["in registers"], WARPS) * WARPS,
)

# %% [markdown]
# ### Step 8: 16-byte loads
#
# **Bottleneck.** The loads, with 4 bytes per lane. The simulator counts the 32-byte **sectors** that the loads of one warp touch:


# %%
def make_load(count):
    @cuda.jit(device=True)
    def load(pointer, at, into):
        for i in range(0, count, 4):
            a, b, c, d = load_nc_u32x4(pointer, at + i)
            into[i], into[i + 1] = uint_as_float(a), uint_as_float(b)
            into[i + 2], into[i + 3] = uint_as_float(c), uint_as_float(d)

    return load


# %% jupyter={"source_hidden": true} tags=["hide-input"]
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
            best, second = float32(LOWEST), float32(LOWEST)
            for i in range(vpt):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            _, worst_group = lowest(best + second, group, 1, num_expert_group)
            if group == worst_group:
                for i in range(vpt):
                    choice[i] = float32(EXCLUDED)
        total = float32(0)
        for k in range(topk):
            best, expert = float32(LOWEST), first
            if choice[0] != float32(EXCLUDED):
                for i in range(vpt):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, num_expert_group)
            if group == expert // vpt and row < num_rows:
                choice[expert % vpt] = float32(LOWEST)
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
def count_sectors():
    rows, found = 32 // GROUPS, {}
    logits, bias, weights = torch.randn(rows, EXPERTS), torch.rand(EXPERTS), torch.zeros(rows, TOPK)
    for name, make in (("4 bytes", make_pointers), ("16 bytes", make_wide_loads)):
        kernel, ids = make(EXPERTS, GROUPS, KEPT, TOPK), torch.zeros(rows, TOPK, dtype=torch.int32)
        with simulator.profile() as profile:
            launch(kernel, 1, (32, 1), logits, bias, weights, ids, rows)
        total = profile["kernel"].total
        found[name] = total.global_load_sectors
        print(f"{name}: {total.global_load_requests} requests of a warp, {found[name]} sectors")
    return found


SECTORS = in_simulator(count_sectors)

# %% [markdown]
# **Idea.** `ld.global.nc.v4.u32` loads 16 bytes per lane: 16 requests for logits and bias instead of 64. The other 16 read the
# weights again: 8 for the sum, 8 for the division. In the figure, a row is the 1,024 bytes of one token.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
size = EXPERTS // GROUPS * 4  # bytes between the lanes
loads = {f"{width} bytes per lane": (width, [lane * size for lane in range(32)]) for width in (4, 16)}
warp_loads(loads, EXPERTS * 4, "One load instruction of a warp, one thread per group")

# %%
change(make_pointers, make_wide_loads)

# %% [markdown]
# **Predicted gain.** The instructions hardly change, so this step predicts from the loads. Each lane's sector lies in a 128-byte
# line of its own: here lines = sectors. The L1 cache of an SM looks up about one line per clock, so the difference in
# sectors x warps per SM / clock rate is the gain.

# %%
fewer = SECTORS["4 bytes"] - SECTORS["16 bytes"]
gain_us = fewer * MODEL_TOKENS / (32 // GROUPS) / SMS / CLOCK * 1e6
run_of = run_pointers(make_wide_loads, 32 // GROUPS)
measure("16-byte loads", run_of(KEPT, TOPK), after="pointers", predicted_gain_us=gain_us)
executed = {"SHFL.BFLY": (GROUPS - KEPT + TOPK) * 2 * ROUNDS}
count("16-byte loads", make_wide_loads, executed, tokens_per_warp=32 // GROUPS)

# %% [markdown]
# **Explanation.** A lane comes back to its line for the next 4 bytes, so the line must stay in the L1 cache. L1 and shared
# memory are one memory. Unused shared memory, as much as three CTAs per SM allow, shrinks L1:

# %%
unused = {"shared_bytes": shared_bytes_of(3)}
runs = {"4 bytes": run_pointers_of, "16 bytes": run_of}
calls = {name: gate.calls(run(KEPT, TOPK))[1] for name, run in runs.items()}
calls |= {f"{name}, small L1": gate.calls(run(KEPT, TOPK, **unused))[1] for name, run in runs.items()}
l1_us = ladder.times("size of L1", calls) or dict.fromkeys(calls)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
warps = resident_ctas(CLOCKS.codes["pointers"].registers, WARPS) * WARPS
say(
    "With the small L1, loads of 4 bytes take {narrow_small:.1f} instead of {narrow:.1f} us ({narrow_ratio:.2f} times), loads of "
    "16 bytes {wide_small:.1f} instead of {wide:.1f} us ({wide_ratio:.2f} times). {warps} warps keep {warps} x 32 lines of 128 "
    "bytes in use, {lines:.0f} KB; a line is needed for 32 loads of 4 bytes, or for 8 of 16 bytes. Local memory, {local:.0f} KB, "
    "competes for the same cache.",
    warps=warps,
    lines=warps * 32 * 128 / 1e3,
    local=warps * 32 * CLOCKS.codes["pointers"].stack_bytes / 1e3,
    narrow_ratio=l1_us["4 bytes"] and l1_us["4 bytes, small L1"] / l1_us["4 bytes"],
    wide_ratio=l1_us["16 bytes"] and l1_us["16 bytes, small L1"] / l1_us["16 bytes"],
    narrow=l1_us["4 bytes"],
    narrow_small=l1_us["4 bytes, small L1"],
    wide=l1_us["16 bytes"],
    wide_small=l1_us["16 bytes, small L1"],
)

# %% [markdown]
# ### Step 9: one warp per token
#
# **Bottleneck.** Neighbouring lanes still read from different lines. And with few tokens most SMs idle: 64 tokens are 16 warps.
#
# **Idea.** 32 lanes share one token; a lane holds 8 experts, and 4 lanes are a group. A request then touches 8 lines instead
# of 32, and a token has four times the threads. Almost all of the source changes. The `int32(...)` of the port are dropped on
# purpose; step 10 restores and measures them. Each lane finds its two best values, and two rounds merge them (`merge_two`).
# Lane `k` keeps pick `k`, and one store each writes the 8 weights and ids.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
loads = {"one thread per group": (16, [lane * size for lane in range(32)])}
loads["one warp per token"] = 16, [lane * EXPERTS // 32 * 4 for lane in range(32)]
warp_loads(loads, EXPERTS * 4, "One load instruction of a warp, 16 bytes per lane")


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def merge_two(best, second, start, stop):
    """The two best values among the lanes at distances start, 2 start, ... below stop."""
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
    """Lane k stores pick k, its weight divided by the sum over the picks; the weight of the other lanes is 0."""
    total, lane = weight, int32(cuda.threadIdx.x)
    step = 1
    while step < 32:
        total += cuda.shfl_xor_sync(FULL, total, step)
        step *= 2
    if lane < topk and valid:
        weights[at + lane] = weight / total
        ids[at + lane] = expert


@cache
def make_one_warp_per_token(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = cuda.threadIdx.x
        token = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
        safe_token = min(token, tokens - 1)
        group = lane // share
        first = lane * held
        score = cuda.local.array(held, float32)
        choice = cuda.local.array(held, float32)
        load(logits, safe_token * num_experts + first, score)
        load(bias, first, choice)
        for i in range(held):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
        for _ in range(num_groups - kept):
            best, second = float32(LOWEST), float32(LOWEST)
            for i in range(held):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            best, second = merge_two(best, second, 1, share)
            _, worst_group = lowest(best + second, group, share, 32)
            if group == worst_group:
                for i in range(held):
                    choice[i] = float32(EXCLUDED)
        weight, expert = float32(0), 0
        for k in range(topk):
            best, winner = float32(LOWEST), first
            if choice[0] != float32(EXCLUDED):
                for i in range(held):
                    if choice[i] > best:
                        best, winner = choice[i], first + i
            best, winner = highest(best, winner, 1, 32)
            won = float32(0)
            for i in range(held):
                if first + i == winner:
                    choice[i], won = float32(LOWEST), score[i]
            won = cuda.shfl_sync(FULL, won, winner // held)
            if lane == k:
                weight, expert = won, winner
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %% [markdown]
# **Predicted gain.** By pipe times, a loss: a lane has a quarter of the experts but takes part in as
# many butterflies, and there are four times as many warps.


# %%
def butterflies(words):
    """How often a warp executes a shuffle, if an index takes this many 32-bit words."""
    merge = 2 * (32 // GROUPS).bit_length() - 2
    return {
        "SHFL.BFLY": (GROUPS - KEPT) * (merge + ROUNDS * (1 + words)) + TOPK * 5 * (1 + words) + 5,
        "SHFL.IDX": TOPK,
    }


count("one warp per token", make_one_warp_per_token, butterflies(2))
gain_us = predicted_us("16-byte loads", "one warp per token")
run_of = run_pointers(make_one_warp_per_token, 1)
measure("one warp per token", run_of(KEPT, TOPK), after="16-byte loads", predicted_gain_us=gain_us, slower=True)
CLOCKS.select("16-byte loads", "one warp per token")

# %% [markdown]
# **Explanation.** Measured time / pipe time of both kernels, and both kernels with 64 tokens:

# %%
few = {"one thread per group": run_pointers(make_wide_loads, 32 // GROUPS), "one warp per token": run_of}
few_us = ladder.times("64 tokens", {key: gate.calls(run(KEPT, TOPK), tokens=64)[1] for key, run in few.items()})
few_us = few_us or dict.fromkeys(few)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "With {tokens} tokens the kernel takes {us:.1f} us, {ratio:.2f} times its pipe time, and the one before it {before:.1f} us, "
    "{before_ratio:.2f} times. With 64 tokens one thread per group takes {group:.1f} us, one warp per token {warp:.1f} us. "
    "One warp per token needs more pipe clocks per token, but waits less.",
    before=ladder.median_us("16-byte loads"),
    before_ratio=(ladder.median_us("16-byte loads") or 0) / pipe_us("16-byte loads") or None,
    tokens=MODEL_TOKENS,
    us=ladder.median_us("one warp per token"),
    ratio=(ladder.median_us("one warp per token") or 0) / pipe_us("one warp per token") or None,
    group=few_us["one thread per group"],
    warp=few_us["one warp per token"],
)

# %% [markdown]
# ### Step 10: 32-bit integers
#
# **Bottleneck.** The butterflies. Numba widens: `int32 + int32`, an index of `range` and `lane * 8` are **int64**. A register
# has 32 bits, so an index takes two of them, and two shuffles. One butterfly alone:


# %%
@cuda.jit
def best_int64(x, out):
    lane = cuda.threadIdx.x
    _, out[lane] = highest(x[lane], lane * 8, 1, 32)


@cuda.jit
def best_int32(x, out):
    lane = int32(cuda.threadIdx.x)
    _, out[lane] = highest(x[lane], int32(lane * 8), 1, 32)


instruction_mix({kernel.__name__: (kernel, ("float32*", "int32*")) for kernel in (best_int64, best_int32)})

# %% [markdown]
# **Idea.** Cast each index back to 32 bits, as the port does.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_int32(num_experts, num_groups, kept, topk):
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
            best, second = float32(LOWEST), float32(LOWEST)
            for i in range(held):
                second = max(second, min(best, choice[i]))
                best = max(best, choice[i])
            best, second = merge_two(best, second, 1, share)
            _, worst_group = lowest(best + second, group, share, 32)
            if group == worst_group:
                for i in range(held):
                    choice[i] = float32(EXCLUDED)
        weight, expert = float32(0), int32(0)
        for k in range(topk):
            best, winner = float32(LOWEST), first
            if choice[0] != float32(EXCLUDED):
                for i in range(held):
                    if choice[i] > best:
                        best, winner = choice[i], int32(first + i)
            best, winner = highest(best, winner, 1, 32)
            won = float32(0)
            for i in range(held):
                if first + i == winner:
                    choice[i], won = float32(LOWEST), score[i]
            won = cuda.shfl_sync(FULL, won, winner // held)
            if lane == k:
                weight, expert = won, winner
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
change(make_one_warp_per_token, make_int32)

# %% [markdown]
# **Predicted gain.** By pipe times.

# %%
count("32-bit integers", make_int32, butterflies(1))
gain_us = predicted_us("one warp per token", "32-bit integers")
run_of = run_pointers(make_int32, 1)
measure("32-bit integers", run_of(KEPT, TOPK), after="one warp per token", predicted_gain_us=gain_us)
CLOCKS.select("one warp per token", "32-bit integers")

# %% [markdown]
# **Explanation.** To isolate the gain of the shuffles, the kernel of step 9 with casts only where an index is shuffled:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
source = changed_source(
    make_one_warp_per_token, "best + second, group,", "best + second, int32(group),", "make_short_shuffles"
)
source = changed_source(source, "float32(0), 0\n", "float32(0), int32(0)\n")
source = changed_source(source, "float32(LOWEST), first\n", "float32(LOWEST), int32(first)\n")
source = changed_source(source, "choice[i], first + i", "choice[i], int32(first + i)")
make_short_shuffles = define(source, globals(), "make_short_shuffles.py")["make_short_shuffles"]

# %%
makes = {"int64": make_one_warp_per_token, "int32 in shuffles": make_short_shuffles, "int32": make_int32}
calls = {name: gate.calls(run_pointers(make, 1)(KEPT, TOPK))[1] for name, make in makes.items()}
shuffles_us = ladder.times("32-bit shuffles", calls) or dict.fromkeys(calls)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "int64 {wide:.1f} us, int32 in shuffles {short:.1f} us, int32 everywhere {narrow:.1f} us. Most of the gain is that of the "
    "shuffles. The comparison after a shuffle waits for its result; the pipe clocks contain no waiting.",
    wide=shuffles_us["int64"],
    short=shuffles_us["int32 in shuffles"],
    narrow=shuffles_us["int32"],
)

# %% [markdown]
# ### Step 11: rank the groups by counting
#
# **Bottleneck.** The group phase. Compiled with all 8 groups kept, the kernel has none:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
executed = {"SHFL.BFLY": TOPK * 5 * 2 + 5, "SHFL.IDX": TOPK}
kernel = f"make_int32{(EXPERTS, GROUPS, GROUPS, TOPK)}"
no_groups = pipe_clocks({"without groups": (kernel, SIGNATURE, executed)}, [make_int32])

# %% jupyter={"source_hidden": true} tags=["hide-input"]
pipe = CLOCKS.slowest("32-bit integers")
say(
    "Choosing the groups takes {groups} of {all} clocks of the {pipe}: four times the same search.",
    groups=CLOCKS["32-bit integers"] - no_groups.counts["without groups"][pipe],
    all=CLOCKS["32-bit integers"],
    pipe=pipe,
)

# %% [markdown]
# **Idea.** A group is kept if fewer than 4 groups are better. 8 groups make 64 comparisons, two for each lane. `ballot_sync`
# collects a bit of each lane in a word, and `popc` counts the bits. The two best values are now found once, with the scores,
# and a pick needs no test for dropped groups.
#
# **Predicted gain.** By pipe times.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
sums = (gate.logits[0].float().sigmoid() + bias).view(GROUPS, -1).topk(2)[0].sum(-1).tolist()
draw.rank_by_counting(sums, KEPT)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def better_groups(score, group, share, num_groups):
    """How many groups are better than this lane's: each of the ``share`` lanes of a group compares it with some."""
    lane = int32(cuda.threadIdx.x)
    own_lanes = uint32(((1 << share) - 1) << (group * share))
    count = int32(0)
    for i in range((num_groups + share - 1) // share):
        rival = int32(lane % share + i * share)
        rival_score = cuda.shfl_sync(FULL, score, rival * share)
        better = rival < num_groups and (rival_score > score or (rival_score == score and rival < group))
        count += int32(cuda.popc(uint32(cuda.ballot_sync(FULL, better)) & own_lanes))
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
        best, second = float32(LOWEST), float32(LOWEST)
        for i in range(held):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
            second = max(second, min(best, choice[i]))
            best = max(best, choice[i])
        best, second = merge_two(best, second, 1, share)
        if better_groups(best + second, group, share, num_groups) >= kept:
            for i in range(held):
                choice[i] = float32(LOWEST)
        weight, expert = float32(0), int32(0)
        for k in range(topk):
            best, winner = float32(LOWEST), first
            for i in range(held):
                if choice[i] > best:
                    best, winner = choice[i], int32(first + i)
            best, winner = highest(best, winner, 1, 32)
            won = float32(0)
            for i in range(held):
                if first + i == winner:
                    choice[i], won = float32(LOWEST), score[i]
            won = cuda.shfl_sync(FULL, won, winner // held)
            if lane == k:
                weight, expert = won, winner
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
change(make_int32, make_rank_groups)

# %%
RIVALS = -(-GROUPS // (32 // GROUPS))  # groups that a lane compares with its own
count("rank by counting", make_rank_groups, {"SHFL.IDX": TOPK + RIVALS})
gain_us = predicted_us("32-bit integers", "rank by counting")
run = run_pointers(make_rank_groups, 1)(KEPT, TOPK)
measure("rank by counting", run, after="32-bit integers", predicted_gain_us=gain_us)

# %% [markdown]
# In `better_groups` the shuffle stands before the `and`: after it, lanes whose left operand is false would skip it and wait at
# `ballot_sync`, and the others for them. This is undefined, and a GPU may hang. The simulator stops:


# %%
@cuda.jit
def like_my_neighbour(a, b, out):
    lane = cuda.threadIdx.x
    same = a[lane] == cuda.shfl_xor_sync(FULL, a[lane], 1) and b[lane] == cuda.shfl_xor_sync(FULL, b[lane], 1)
    out[lane] = int32(cuda.popc(uint32(cuda.ballot_sync(FULL, same))))


def show_missing_lanes():
    b = torch.arange(32, dtype=torch.int32) // 2  # lanes 0 and 1 have 0, lanes 2 and 3 have 1, ...
    a = b.clone()
    a[5] = 99  # so lanes 4 and 5 differ
    try:
        like_my_neighbour[1, 32](a, b, torch.zeros_like(b))
    except simulator.SimulatorError as error:
        print(error)


in_simulator(show_missing_lanes)

# %% [markdown]
# **Exercise 2.** Of two equal groups the one with the lower index is kept. Find eight sums for which `better_groups`, without
# the part after `or`, keeps too many groups.

# %%
exercise("gate-2").check([...] * 8)

# %% [markdown]
# ### Step 12: integer keys and redux
#
# **Bottleneck.** A pick takes 5 rounds, each with two shuffles and three comparisons. Compiled for one pick, the kernel
# shows the cost of a pick:


# %%
def pick_clocks(name, make, executed):
    """The clocks of one pick in the slowest pipe, and the share of all picks, of a kernel that was counted."""
    one = pipe_clocks({name: (f"{make.__name__}{(EXPERTS, GROUPS, KEPT, 1)}", SIGNATURE, executed)}, [make])
    pipe = CLOCKS.slowest(name)
    each = (CLOCKS[name] - one.counts[name][pipe]) / (TOPK - 1)
    text = "A pick takes {each:.0f} of {total} clocks of the {pipe}, so all picks take {share:.0%}."
    return say(text, each=each, total=CLOCKS[name], pipe=pipe, share=TOPK * each / CLOCKS[name])


pick_clocks("rank by counting", make_rank_groups, {"SHFL.IDX": 1 + RIVALS})

# %% [markdown]
# **Idea.** `redux.sync.max` finds the maximum of 32 lanes in one instruction (compute capability 8.0 or higher; on older GPUs
# `moe_numba.ptx` uses shuffles), on Hopper only of integers. So we convert each float to an integer that sorts in the same way, its **key**. A
# `ballot` of the lanes whose best key is the maximum and `ffs`, the lowest set bit, find the winner: the lowest lane holds the
# lowest experts, so ties are resolved as well.
#
# **Predicted gain.** By pipe times.
#
# **Exercise 3.** The bits of a positive float already sort as an integer. `bits` are the bits of any float, as a signed 32-bit
# Python int. Return an int of the int32 range that sorts as the float does, from -inf to inf (solution: the folded cell
# below).


# %%
def key_of(bits):
    return ...


exercise("gate-3").check(key_of)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
NEVER = -(1 << 31)  # less than the key of every float


@cuda.jit(device=True)
def order_key(x):
    """An integer that sorts as the float does."""
    bits = float_as_int(x)
    return int32(bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF)))


@cuda.jit(device=True)
def key_as_float(key):
    """The float of a key."""
    return int_as_float(int32(key ^ ((key >> int32(31)) & int32(0x7FFFFFFF))))


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
        best, second = float32(LOWEST), float32(LOWEST)
        for i in range(held):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
            second = max(second, min(best, choice[i]))
            best = max(best, choice[i])
        best, second = merge_two(best, second, 1, share)
        keep = better_groups(best + second, group, share, num_groups) < kept
        for i in range(held):
            key[i] = order_key(choice[i]) if keep else int32(NEVER)
        weight, expert = float32(0), int32(0)
        for k in range(topk):
            best_key, slot = int32(NEVER), int32(0)
            for i in range(held):
                if key[i] > best_key:
                    best_key, slot = key[i], int32(i)
            highest_key = redux_sync_max_s32(uint32(FULL), best_key)
            winner = int32(cuda.ffs(cuda.ballot_sync(FULL, best_key == highest_key)) - 1)
            won = float32(0)
            for i in range(held):
                if lane == winner and i == slot:
                    key[i] = int32(NEVER)
                won = score[i] if i == slot else won
            won = cuda.shfl_sync(FULL, won, winner)
            slot = cuda.shfl_sync(FULL, slot, winner)
            if lane == k:
                weight, expert = won, int32(winner * held + slot)
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
change(make_rank_groups, make_integer_keys)

# %%
count("integer keys", make_integer_keys, {"REDUX": TOPK})
run = run_pointers(make_integer_keys, 1)(KEPT, TOPK)
measure(
    "integer keys", run, after="rank by counting", predicted_gain_us=predicted_us("rank by counting", "integer keys")
)
CLOCKS.select("32-bit integers", "rank by counting", "integer keys")

# %% [markdown]
# ### Step 13: sort once, then pop
#
# **Bottleneck.** For each pick, every lane compares its 8 keys again, though 31 of 32 lanes have not changed.

# %%
pick_clocks("integer keys", make_integer_keys, {"REDUX": 1})

# %% [markdown]
# **Idea.** Sort the keys of a lane once. Its best key is then always in front, and the winner moves the rest up (a **pop**). A
# **sorting network** is a list of compare-exchange steps that does not depend on the data, so all indices are constants and the keys
# stay in registers.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
lane_0 = (gate.logits[0, : EXPERTS // 32].float().sigmoid() + bias[: EXPERTS // 32]).tolist()
draw.sorting_network([round(value, 3) for value in lane_0], sorting_network(EXPERTS // 32))


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_sorted_lanes(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)
    pairs = tuple(sorting_network(held))
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
        for step in range(steps):
            i, j = pairs[step]
            swap = key[j] > key[i] or (key[j] == key[i] and slot[j] < slot[i])
            key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
            slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
        best, second = merge_two(key_as_float(key[0]), key_as_float(key[1]), 1, share)
        if better_groups(best + second, group, share, num_groups) >= kept:
            key[0] = int32(NEVER)
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
                key[held - 1] = int32(NEVER)
            won = cuda.shfl_sync(FULL, won, winner)
            front = cuda.shfl_sync(FULL, front, winner)
            if lane == k:
                weight, expert = won, int32(winner * held + front)
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
change(make_integer_keys, make_sorted_lanes)

# %% [markdown]
# Sorting loses which expert a key belongs to, and a network does not keep the order of equal keys. So each key is sorted with
# its place in the lane, `slot`. A lane that never wins
# never moves its keys up, so clearing `key[0]` is enough to drop its group.
#
# **Predicted gain.** By pipe times.

# %%
count("sorted lanes", make_sorted_lanes, {"REDUX": TOPK})
run = run_pointers(make_sorted_lanes, 1)(KEPT, TOPK)
measure("sorted lanes", run, after="integer keys", predicted_gain_us=predicted_us("integer keys", "sorted lanes"))
CLOCKS.select("integer keys", "sorted lanes")

# %% [markdown]
# The picks of token 0, from a trace of this kernel:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def trace_picks(logits, bias):
    outputs = torch.zeros(1, TOPK), torch.zeros(1, TOPK, dtype=torch.int32)
    with simulator.trace() as events:
        launch(
            make_sorted_lanes(EXPERTS, GROUPS, KEPT, TOPK),
            1,
            (32, 1),
            torch.tensor([logits]),
            torch.tensor(bias),
            *outputs,
            1,
        )
    return Player(*draw.pick_frames(draw.picks_of(events), GROUPS), "Eight picks from sorted lanes").as_dict()


picks = Player.from_dict(in_simulator(trace_picks, gate.logits[0].tolist(), bias.tolist()))
picks

# %%
picks.strip([0, 1, len(picks.frames) - 1])

# %% [markdown]
# ### Step 14: no short circuits
#
# **Bottleneck.** `x or (y and z)` evaluates `y` only if `x` is false. In a long network the compiler keeps branches; with
# `|` and `&` on booleans it computes all and selects. The network alone:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
PAIRS = tuple(sorting_network(8))
STEPS = len(PAIRS)


@cuda.jit
def network(keys, slots):
    row = cuda.grid(1)
    key, slot = cuda.local.array(8, int32), cuda.local.array(8, int32)
    for i in range(8):
        key[i], slot[i] = keys[row * 8 + i], slots[row * 8 + i]
    for step in range(STEPS):
        i, j = PAIRS[step]
        swap = key[j] > key[i] or (key[j] == key[i] and slot[j] < slot[i])
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    for i in range(8):
        keys[row * 8 + i], slots[row * 8 + i] = key[i], slot[i]


# %%
SHORT_CIRCUIT = "key[j] > key[i] or (key[j] == key[i] and slot[j] < slot[i])"
NO_SHORT_CIRCUIT = "(key[j] > key[i]) | ((key[j] == key[i]) & (slot[j] < slot[i]))"


def network_with(condition, name):
    return define(changed_source(network, SHORT_CIRCUIT, condition, name), globals(), f"{name}.py")[name]


networks = {
    "always swap": network_with("True", "network_without"),
    "or, and": network,
    "|, &": network_with(NO_SHORT_CIRCUIT, "network_bits"),
}
mix = instruction_mix({name: (kernel, ("int32*", "int32*")) for name, kernel in networks.items()})
mix

# %% jupyter={"source_hidden": true} tags=["hide-input"]
source = changed_source(make_sorted_lanes, SHORT_CIRCUIT, NO_SHORT_CIRCUIT, "make_no_branches")
make_no_branches = define(source, globals(), "make_no_branches.py")["make_no_branches"]

# %%
change(make_sorted_lanes, make_no_branches)

# %% [markdown]
# **Predicted gain.** By pipe times, almost nothing. They contain no branch latency; a gain would be the cost of branches.

# %%
count("no short circuits", make_no_branches, {"REDUX": TOPK})
run = run_pointers(make_no_branches, 1)(KEPT, TOPK)
measure(
    "no short circuits", run, after="sorted lanes", predicted_gain_us=predicted_us("sorted lanes", "no short circuits")
)
CLOCKS.select("integer keys", "sorted lanes", "no short circuits")

# %% [markdown]
# **Explanation.** The removed branches cost next to nothing. The counts:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def branches(name):
    """How many branch and reconvergence instructions the main path of a kernel has."""
    (start, end), opcodes = CLOCKS.codes[name].body, CLOCKS.codes[name].opcodes
    return sum(opcode.partition(".")[0] in ("BRA", "BSSY", "BSYNC") for opcode in opcodes[start : end + 1])


total = {name: sum(mix[name].values()) for name in networks}
say(
    "Alone, a compare-exchange takes {slow:.0f} instructions with `or` and `and`, and the network has {branches} branches; "
    "with `|` and `&` it takes {fast:.0f}, and the network has none. In the kernel, which the compiler optimizes as a whole, "
    "branches and their reconvergence take {kernel} instructions, and {after} without short circuits.",
    slow=(total["or, and"] - total["always swap"]) / STEPS,
    fast=(total["|, &"] - total["always swap"]) / STEPS,
    branches=mix["or, and"]["branch"] - mix["always swap"]["branch"],
    kernel=branches("sorted lanes"),
    after=branches("no short circuits"),
)

# %% [markdown]
# **Exercise 4.** The kernel below sorts four keys. Remove its branches, and every `and` and `or`.


# %%
@cuda.jit
def sort_four(keys, slots):
    row = cuda.threadIdx.x
    key, slot = cuda.local.array(4, int32), cuda.local.array(4, int32)
    for i in range(4):
        key[i], slot[i] = keys[row, i], slots[row, i]
    for i, j in ((0, 1), (2, 3), (0, 2), (1, 3), (1, 2)):
        swap = key[j] > key[i] or (key[j] == key[i] and slot[j] < slot[i])
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    for i in range(4):
        keys[row, i], slots[row, i] = key[i], slot[i]


exercise("gate-4").check(sort_four)

# %% [markdown]
# ### Step 15: a fast sigmoid
#
# **Bottleneck.** `math.exp` and an exact division also handle subnormal numbers and overflow, and the division rounds correctly. The machine code of one
# sigmoid, and of one with `ex2.approx` and `rcp.approx`, which are one MUFU instruction each, with errors of at most 2 units
# in the last place:


# %%
@cuda.jit(device=True)
def fast_sigmoid(x):
    return rcp_approx(float32(1) + ex2_approx(-LOG2_E * x))


@cuda.jit
def exact(x):
    x[cuda.grid(1)] = sigmoid(x[cuda.grid(1)])


@cuda.jit
def fast(x):
    x[cuda.grid(1)] = fast_sigmoid(x[cuda.grid(1)])


instruction_mix({"exact": (exact, ("float32*",)), "fast": (fast, ("float32*",))})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
source = changed_source(make_no_branches, "score[i] = sigmoid(", "score[i] = fast_sigmoid(", "make_fast_sigmoid")
make_fast_sigmoid = define(source, globals(), "make_fast_sigmoid.py")["make_fast_sigmoid"]

# %%
change(make_no_branches, make_fast_sigmoid)

# %% [markdown]
# **Predicted gain.** By pipe times.

# %%
count("fast sigmoid", make_fast_sigmoid, {"REDUX": TOPK})
run = run_pointers(make_fast_sigmoid, 1)(KEPT, TOPK)
gain_us = predicted_us("no short circuits", "fast sigmoid")
measure("fast sigmoid", run, after="no short circuits", predicted_gain_us=gain_us)

# %% [markdown]
# ### Step 16: a pop without a branch
#
# **Bottleneck.** In each pick the winner alone moves its keys and slots up, behind a branch, while 31 lanes wait.

# %%
pick_clocks("fast sigmoid", make_fast_sigmoid, {"REDUX": 1})

# %% [markdown]
# **Idea.** All lanes select: the next key if they won, their own if not. This prepares step 17, where less has to move.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
POP = """            if lane == winner:
                for i in range(held - 1):
                    key[i], slot[i] = key[i + 1], slot[i + 1]
                key[held - 1] = int32(NEVER)
"""
SELECTING_POP = """            wins = lane == winner
            for i in range(held - 1):
                key[i], slot[i] = key[i + 1] if wins else key[i], slot[i + 1] if wins else slot[i]
            key[held - 1] = int32(NEVER) if wins else key[held - 1]
"""
source = changed_source(make_fast_sigmoid, POP, SELECTING_POP, "make_selecting_pop")
make_selecting_pop = define(source, globals(), "make_selecting_pop.py")["make_selecting_pop"]

# %%
change(make_fast_sigmoid, make_selecting_pop)

# %% [markdown]
# **Predicted gain.** By pipe times, a loss: a pop selects 15 times.

# %%
count("selecting pop", make_selecting_pop, {"REDUX": TOPK})
run = run_pointers(make_selecting_pop, 1)(KEPT, TOPK)
gain_us = predicted_us("fast sigmoid", "selecting pop")
measure("selecting pop", run, after="fast sigmoid", predicted_gain_us=gain_us, slower=True)
CLOCKS.select("fast sigmoid", "selecting pop")

# %% [markdown]
# ### Step 17: sort the keys alone
#
# **Bottleneck.** The slots. Each compare-exchange selects two of them, each pop moves 7, and each pick shuffles slot and
# score of the winner, although only lane `k` needs them.
#
# **Idea.** Sort only keys: a compare-exchange is one maximum and one minimum. Lane `k` remembers the key of pick `k` and the
# lane that held it. At the end, lane `k` looks for its key among the unsorted keys of that lane and loads the logit of the
# expert it finds. All three changes belong together: without slots, each winner must be searched for. `sort_descending` is
# Batcher's network again ([device_functions.py](../moe_numba/gate/device_functions.py)).
#
# Equal keys of one lane are taken in ascending order (`drop_taken`). If experts 3 and 5 of a lane have equal keys, picks 0 and 1
# both find `matches` = `0b101000`. Pick 1 repeats key and lane of pick 0, so it clears the lowest bit: `0b100000` is expert 5.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def drop_taken(matches, picked, holder, column):
    """Clear the matches that earlier picks of an equal key took from the same lane; this lane has pick ``column``.

    Lanes without a pick pass 0. Their columns would all repeat the one before, and the loop below would count down.
    """
    k = int32(cuda.threadIdx.x)
    previous = cuda.shfl_up_sync(FULL, picked, 1)
    previous_holder = cuda.shfl_up_sync(FULL, holder, 1)
    repeats = uint32(cuda.ballot_sync(FULL, (picked == previous) & (holder == previous_holder) & (column > 0)))
    if repeats != uint32(0):
        while (repeats >> uint32(k)) & uint32(1):
            matches = uint32(matches & uint32(matches - uint32(1)))
            k = int32(k - 1)
    return matches


@cache
def make_keys_alone(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)
    sort_descending = make_sort_descending(held)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        safe_token = min(token, tokens - 1)
        group = int32(lane // share)
        first = int32(lane * held)
        column = lane if lane < topk else int32(0)  # the pick that this lane keeps
        score = cuda.local.array(held, float32)
        choice = cuda.local.array(held, float32)
        key = cuda.local.array(held, int32)
        queue = cuda.local.array(held, int32)
        load(logits, safe_token * num_experts + first, score)
        load(bias, first, choice)
        for i in range(held):
            key[i] = order_key(fast_sigmoid(score[i]) + choice[i])
            queue[i] = key[i]
        sort_descending(queue)
        best, second = merge_two(key_as_float(queue[0]), key_as_float(queue[1]), 1, share)
        if better_groups(best + second, group, share, num_groups) >= kept:
            queue[0] = int32(NEVER)
        picked, holders = int32(0), uint32(0)
        for k in range(topk):
            highest_key = redux_sync_max_s32(uint32(FULL), queue[0])
            ballot = uint32(cuda.ballot_sync(FULL, queue[0] == highest_key))
            if lane == k:
                picked, holders = highest_key, ballot
            wins = lane == int32(cuda.ffs(ballot) - 1)
            for i in range(held - 1):
                queue[i] = queue[i + 1] if wins else queue[i]
            queue[held - 1] = int32(NEVER) if wins else queue[held - 1]
        holder = int32(cuda.ffs(holders) - 1)
        matches = uint32(0)
        for i in range(held):
            same = cuda.shfl_sync(FULL, key[i], holder) == picked
            matches = uint32(matches | uint32(1 << i)) if same else matches
        expert = int32(holder * held + cuda.ffs(drop_taken(matches, picked, holder, column)) - 1)
        weight = float32(0)
        if lane < topk:
            weight = fast_sigmoid(logits[safe_token * num_experts + expert])
        store_scaled(weights, ids, token * topk, weight, expert, topk, token < tokens)

    return kernel


# %%
change(make_selecting_pop, make_keys_alone)

# %% [markdown]
# **Predicted gain.** By pipe times.

# %%
count("keys alone", make_keys_alone, {"REDUX": TOPK})
run = run_pointers(make_keys_alone, 1)(KEPT, TOPK)
measure("keys alone", run, after="selecting pop", predicted_gain_us=predicted_us("selecting pop", "keys alone"))
CLOCKS.select("selecting pop", "keys alone")

# %% [markdown]
# ### Step 18: loads ahead of their use
#
# **Bottleneck.** The ratio of measured time to pipe time has grown. How much is waiting for DRAM? The same kernel, if every warp
# reads the logits of token 0, which stay in the L1 cache:

# %%
source = changed_source(
    make_keys_alone,
    "load(logits, safe_token * num_experts + first, score)",
    "load(logits, first, score)",
    "make_cached",
)
source = changed_source(source, "logits[safe_token * num_experts + expert]", "logits[expert]")
make_cached = define(source, globals(), "make_cached.py")["make_cached"]
variants = {"from DRAM": make_keys_alone, "from L1": make_cached}
loads_us = ladder.times(
    "loads of keys alone", {name: gate.calls(run_pointers(make, 1)(KEPT, TOPK))[1] for name, make in variants.items()}
)
loads_us = loads_us or dict.fromkeys(variants)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Measured / pipe time was {first:.2f} in step 10 and is {now:.2f}. From DRAM {dram:.1f} us, from L1 {l1:.1f} us; the "
    "slowest pipe needs {pipe:.1f} us.",
    first=(ladder.median_us("32-bit integers") or 0) / pipe_us("32-bit integers") or None,
    now=(ladder.median_us("keys alone") or 0) / pipe_us("keys alone") or None,
    dram=loads_us["from DRAM"],
    l1=loads_us["from L1"],
    pipe=pipe_us("keys alone"),
)

# %% [markdown]
# **Idea.** A warp routes several tokens in a loop and loads the logits of the next one before it sorts the keys of the
# current one. The grid has as many CTAs as fit on the SMs at once.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_loads_ahead(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds
    share = 32 // num_groups  # lanes that share a group
    load = make_load(held)
    sort_descending = make_sort_descending(held)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        warps = int32(cuda.gridDim.x * WARPS)
        group = int32(lane // share)
        first = int32(lane * held)
        column = lane if lane < topk else int32(0)  # the pick that this lane keeps
        score = cuda.local.array(held, float32)
        choice = cuda.local.array(held, float32)
        key = cuda.local.array(held, int32)
        queue = cuda.local.array(held, int32)
        if token < tokens:
            load(logits, token * num_experts + first, score)
        load(bias, first, choice)
        while token < tokens:
            cuda.syncwarp()  # redux needs all lanes, and the stores below diverge
            for i in range(held):
                key[i] = order_key(fast_sigmoid(score[i]) + choice[i])
                queue[i] = key[i]
            following = int32(token + warps)
            if following < tokens:
                load(logits, following * num_experts + first, score)
            sort_descending(queue)
            best, second = merge_two(key_as_float(queue[0]), key_as_float(queue[1]), 1, share)
            if better_groups(best + second, group, share, num_groups) >= kept:
                queue[0] = int32(NEVER)
            picked, holders = int32(0), uint32(0)
            for k in range(topk):
                highest_key = redux_sync_max_s32(uint32(FULL), queue[0])
                ballot = uint32(cuda.ballot_sync(FULL, queue[0] == highest_key))
                if lane == k:
                    picked, holders = highest_key, ballot
                wins = lane == int32(cuda.ffs(ballot) - 1)
                for i in range(held - 1):
                    queue[i] = queue[i + 1] if wins else queue[i]
                queue[held - 1] = int32(NEVER) if wins else queue[held - 1]
            holder = int32(cuda.ffs(holders) - 1)
            matches = uint32(0)
            for i in range(held):
                same = cuda.shfl_sync(FULL, key[i], holder) == picked
                matches = uint32(matches | uint32(1 << i)) if same else matches
            expert = int32(holder * held + cuda.ffs(drop_taken(matches, picked, holder, column)) - 1)
            weight = float32(0)
            if lane < topk:
                weight = fast_sigmoid(logits[token * num_experts + expert])
            store_scaled(weights, ids, token * topk, weight, expert, topk, True)
            token = following

    return kernel


# %%
change(make_keys_alone, make_loads_ahead)

# %% [markdown]
# **Predicted gain.** The wait for DRAM, measured above: an upper bound, because the first load of each warp is never hidden.


# %%
count("loads ahead", make_loads_ahead, {"REDUX": TOPK})


def run_in_a_loop(name, make):
    """As many CTAs as fit on all SMs, by the registers of the kernel."""
    kernel, most = make(*SHAPE), resident_ctas(CLOCKS.codes[name].registers, WARPS) * SMS

    def run(x, weights, ids):
        launch(kernel, min(ctas(len(x), 1), most), (32, WARPS), x, bias, weights, ids, len(x))

    return run


gain_us = (loads_us["from DRAM"] or 0) - (loads_us["from L1"] or 0)
run_ahead = run_in_a_loop("loads ahead", make_loads_ahead)
measure("loads ahead", run_ahead, after="keys alone", predicted_gain_us=gain_us, slower=True)

# %% [markdown]
# **Explanation.** The same loop with each token's load at its usual place:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
AHEAD = """            following = int32(token + warps)
            if following < tokens:
                load(logits, following * num_experts + first, score)
"""
source = changed_source(make_loads_ahead, AHEAD, "            following = int32(token + warps)\n", "make_loop")
source = changed_source(
    source,
    "            for i in range(held):\n                key[i] = order",
    "            load(logits, token * num_experts + first, score)\n            for i in range(held):\n                key[i] = order",
)
make_loop = define(source, globals(), "make_loop.py")["make_loop"]

# %%
count("loop", make_loop, {"REDUX": TOPK})
CTAS = {name: resident_ctas(CLOCKS.codes[name].registers, WARPS) for name in ("keys alone", "loop", "loads ahead")}
run_of = run_pointers(make_keys_alone, 1)
loops = {"one": run_of(KEPT, TOPK), "loop": run_in_a_loop("loop", make_loop), "ahead": run_ahead}
ROUNDS_OF_ALL = math.lcm(*CTAS.values()) * WARPS * SMS  # tokens
rounds = GateRuns(TOKENS if simulator.ENABLED else ROUNDS_OF_ALL, *SHAPE)
calls = {name: gate.calls(run)[1] for name, run in loops.items()}
calls |= {f"{name}, whole rounds": rounds.calls(run)[1] for name, run in loops.items()}
few_warps = run_of(KEPT, TOPK, shared_bytes=shared_bytes_of(CTAS["loads ahead"]))
calls["one, few warps"] = gate.calls(few_warps)[1]
loop_us = ladder.times("loads ahead", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "One token per warp takes {one:.1f} us, in a loop {loop:.1f} us, with loads ahead {ahead:.1f} us. {registers}, "
    "{loop_registers} and {ahead_registers} registers per thread let {warps}, {loop_warps} and {ahead_warps} warps fit on an SM. "
    "In the loops a warp routes {loop_tokens:.1f} and {ahead_tokens:.1f} tokens on average, so the last round is partly empty. "
    "With {all_rounds:,} tokens, whole rounds for all three, they take {one_whole:.1f}, {loop_whole:.1f} and {ahead_whole:.1f} us. "
    "One token per warp takes {few:.1f} us if unused shared memory leaves only {ahead_warps} warps per SM. We go on from the "
    "kernel of step 17.",
    one=loop_us.get("one"),
    loop=loop_us.get("loop"),
    ahead=loop_us.get("ahead"),
    registers=CLOCKS.codes["keys alone"].registers,
    loop_registers=CLOCKS.codes["loop"].registers,
    ahead_registers=CLOCKS.codes["loads ahead"].registers,
    warps=CTAS["keys alone"] * WARPS,
    loop_warps=CTAS["loop"] * WARPS,
    ahead_warps=CTAS["loads ahead"] * WARPS,
    loop_tokens=MODEL_TOKENS / (CTAS["loop"] * WARPS * SMS),
    ahead_tokens=MODEL_TOKENS / (CTAS["loads ahead"] * WARPS * SMS),
    all_rounds=ROUNDS_OF_ALL,
    one_whole=loop_us.get("one, whole rounds"),
    loop_whole=loop_us.get("loop, whole rounds"),
    ahead_whole=loop_us.get("ahead, whole rounds"),
    few=loop_us.get("one, few warps"),
)

# %% [markdown]
# ### Step 19: four tokens per warp
#
# **Bottleneck.** Half of the lanes, those of dropped groups, sort and pick without a result:

# %%
pick_clocks("keys alone", make_keys_alone, {"REDUX": 1})

# %% [markdown]
# **Idea.** A warp scores four tokens one after another and writes the keys to shared memory. Then it **redistributes** the
# candidates: 8 lanes per token, 16 candidates per lane. A pick takes three shuffle rounds, but for four tokens.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# the kept groups of four tokens
sums = (gate.logits[:4].float().sigmoid() + bias).view(4, GROUPS, -1).topk(2)[0].sum(-1)
draw.redistribution(sums.topk(KEPT).indices.tolist(), GROUPS)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_four_tokens(num_experts, num_groups, kept, topk):
    held = num_experts // 32  # experts that a lane holds while the groups are chosen
    size = num_experts // num_groups
    candidates = kept * size // 8  # experts that a lane holds while the experts are chosen
    lanes_per_group = size // candidates
    pitch = size + 4  # 16 bytes of padding against bank conflicts
    num_keys = WARPS * 4 * num_groups * pitch
    load = make_load(held)
    sort_descending = make_sort_descending(candidates)

    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
        group, part = int32(lane // 4), int32(lane % 4)  # while the groups are chosen
        own, column = int32(lane // 8), int32(lane % 8)  # while the experts are chosen: token `own` of the warp
        token = int32((cuda.blockIdx.x * WARPS + warp) * 4)
        keys = cuda.shared.array(num_keys, int32)
        kept_groups = cuda.shared.array((WARPS, 4, num_groups), int32)
        score = cuda.local.array((4, held), float32)
        choice = cuda.local.array(held, float32)
        key = cuda.local.array(held, int32)
        queue = cuda.local.array(candidates, int32)
        load(bias, int32(lane * held), choice)
        for t in range(4):
            load(logits, int32(min(token + t, tokens - 1) * num_experts + lane * held), score[t])

        # Groups: 32 lanes score one token after another. Lane (group, part) then ranks the group for token `part`.
        sum_key = int32(NEVER)
        for t in range(4):
            best, second = int32(NEVER), int32(NEVER)
            for i in range(held):
                key[i] = order_key(fast_sigmoid(score[t, i]) + choice[i])
                second = max(second, min(best, key[i]))
                best = max(best, key[i])
            place = int32(((warp * 4 + t) * num_groups + group) * pitch + part * held)
            for i in range(0, held, 4):
                st_shared_s32x4(keys, int32(place + i), key[i], key[i + 1], key[i + 2], key[i + 3])
            best, second = merge_two(best, second, 1, 4)
            if part == t:
                sum_key = order_key(key_as_float(best) + key_as_float(second))
        better = int32(0)
        for i in range(1, num_groups):
            rival = cuda.shfl_xor_sync(FULL, sum_key, 4 * i)
            better += int32((rival > sum_key) | ((rival == sum_key) & ((group ^ i) < group)))
        ballot = uint32(cuda.ballot_sync(FULL, better < kept))
        lower_groups = uint32(uint32(0x11111111 << part) & uint32((1 << lane) - 1))
        if better < kept:
            kept_groups[warp, part, cuda.popc(uint32(ballot & lower_groups))] = group
        cuda.syncwarp()

        # Experts: 8 lanes take the candidates of a token, and the four tokens pick at the same time.
        source = kept_groups[warp, own, column // lanes_per_group]
        start = int32(column % lanes_per_group * candidates)
        place = int32(((warp * 4 + own) * num_groups + source) * pitch + start)
        for i in range(0, candidates, 4):
            queue[i], queue[i + 1], queue[i + 2], queue[i + 3] = ld_shared_s32x4(keys, int32(place + i))
        sort_descending(queue)
        own_lanes = uint32(0xFF << (own * 8))
        picked, holders = int32(0), uint32(0)
        for k in range(topk):
            highest_key = queue[0]
            for s in range(3):
                highest_key = max(highest_key, cuda.shfl_xor_sync(FULL, highest_key, 1 << s))
            ballot = uint32(uint32(cuda.ballot_sync(FULL, queue[0] == highest_key)) & own_lanes)
            if column == k:
                picked, holders = highest_key, ballot
            wins = lane == int32(cuda.ffs(ballot) - 1)
            for i in range(topk - 1):
                queue[i] = queue[i + 1] if wins else queue[i]
            queue[topk - 1] = int32(NEVER) if wins else queue[topk - 1]

        # Lane (own, column) looks for pick `column` among the candidates of the lane that held it.
        holder = int32((cuda.ffs(holders) - 1) % 8)
        source = kept_groups[warp, own, holder // lanes_per_group]
        start = int32(holder % lanes_per_group * candidates)
        place = int32(((warp * 4 + own) * num_groups + source) * pitch + start)
        for i in range(0, candidates, 4):
            queue[i], queue[i + 1], queue[i + 2], queue[i + 3] = ld_shared_s32x4(keys, int32(place + i))
        matches = uint32(0)
        for i in range(candidates):
            matches = uint32(matches | uint32(1 << i)) if queue[i] == picked else matches
        expert = int32(source * size + start + cuda.ffs(drop_taken(matches, picked, holder, column)) - 1)
        weight, valid = float32(0), (column < topk) & (token + own < tokens)
        if valid:
            weight = fast_sigmoid(logits[(token + own) * num_experts + expert])
        total = weight
        for s in range(3):
            total += cuda.shfl_xor_sync(FULL, total, 1 << s)
        if valid:
            weights[(token + own) * topk + column] = weight / total
            ids[(token + own) * topk + column] = expert

    return kernel


# %% [markdown]
# **Predicted gain.** By pipe times.

# %%
FOUR = supports(*SHAPE, 0)  # as the package's kernel: 8 groups, no shared experts


def run_four_tokens(x, weights, ids, bounds=(32 * WARPS, 4)):  # threads per CTA, and at least 4 CTAs per SM
    kernel = make_four_tokens(*SHAPE)
    launch(kernel, ctas(len(x), 4), (32, WARPS), x, bias, weights, ids, len(x), launch_bounds=bounds)


if FOUR:
    count("four tokens per warp", make_four_tokens, tokens_per_warp=4, threads=(32 * WARPS, 4))
    gain_us = predicted_us("keys alone", "four tokens per warp")
    measure("four tokens per warp", run_four_tokens, after="keys alone", predicted_gain_us=gain_us)
else:
    print("left out: the kernel needs 8 groups")

# %% [markdown]
# **Explanation.** The launch bounds allow 4 CTAs of 6 warps per SM. These 24 warps on every SM, 4 tokens each, are one **wave**
# of the grid. Both kernels with one set of logits, which stays in the L2 cache, and this step's with whole waves from DRAM:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FULL_WAVE = 24 * 4 * SMS  # tokens
WAVE = FULL_WAVE if not simulator.ENABLED else TOKENS
waves_us, l2_us = {}, {}
if FOUR:
    # inputs of each size have sets of their own, which exceed the L2 cache
    calls = {f"{n}": GateRuns(n * WAVE, *SHAPE).calls(run_four_tokens)[1] for n in (1, 2, 4)}
    waves_us = ladder.times("waves of four tokens per warp", calls) or {}
    runs = {"before": run_pointers(make_keys_alone, 1)(KEPT, TOPK), "after": run_four_tokens}
    calls = {name: gate.calls(run)[1][:1] for name, run in runs.items()}
    l2_us = ladder.times("four tokens, logits in L2", calls) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
judgement = ladder.gain("four tokens per warp") if FOUR else None
say(
    "The pipes save {pipe_gain:.1f} us. With logits in L2 the step takes {l2_before:.1f} -> {l2_after:.1f} us, from DRAM "
    "{before:.1f} -> {after:.1f} us. So DRAM adds {wait_before:.1f} us before and {wait:.1f} us after, with {warps} and 24 warps "
    "per SM to hide it. 16384 tokens are {count:.1f} waves. One wave takes {one:.1f} us, two {two:.1f} us, four {four:.1f} us. In "
    "the steady state a wave takes {each:.1f} us; its pipes need {pipe:.1f} us and, at the same time, its bytes {dram:.1f} us. The "
    "other {ends:.1f} us of a single wave are the launch, and the start and end of the grid, where warps hide less of each other's "
    "waits. In {count:.1f} waves they weigh more than in many.",
    pipe_gain=pipe_us("keys alone") - pipe_us("four tokens per warp") if FOUR else None,
    l2_before=l2_us.get("before"),
    l2_after=l2_us.get("after"),
    before=judgement and judgement.before_us,
    after=judgement and judgement.after_us,
    wait_before=judgement and l2_us.get("before") and judgement.before_us - l2_us["before"],
    wait=judgement and l2_us.get("after") and judgement.after_us - l2_us["after"],
    warps=CTAS["keys alone"] * WARPS,
    count=16384 / FULL_WAVE,
    one=waves_us.get("1"),
    two=waves_us.get("2"),
    four=waves_us.get("4"),
    each=waves_us and (waves_us["4"] - waves_us["2"]) / 2 or None,
    ends=waves_us and waves_us["1"] - (waves_us["4"] - waves_us["2"]) / 2 or None,
    pipe=pipe_us("four tokens per warp") * FULL_WAVE / MODEL_TOKENS if FOUR else None,
    dram=lower_bounds_us(FULL_WAVE)["DRAM"],
)

# %% [markdown]
# ### Step 20: the package's kernel
#
# `moe_numba.biased_grouped_topk` uses a kernel like that of step 19 for many tokens and one like that of step 18 for few (one
# token per warp, so the loop runs once). Both sources
# ([kernel_4tokens.py](../moe_numba/gate/four_tokens_per_warp.py), [kernel.py](../moe_numba/gate/one_token_per_warp.py)) differ too much for a
# diff: they also handle NaN, 16-bit logits, other shapes, shared experts and padding.
#
# **Bottleneck.** By the pipe clocks, still the ALU.
#
# **Idea.** The package's kernel has 4 warps per CTA, bounds of 6 CTAs per SM, and fewer instructions for ranks and picks.
#
# **Predicted gain.** By pipe times.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PACKAGE = ("float32*", "float32*", "float32*", "int32*", "int32", "int64", "int32", "float32", "float32")
PACKAGE_CTA = 32 * WARPS_PER_BLOCK, 6  # threads per CTA, and at least 6 CTAs per SM


def count_package(dtype):
    """Count the clocks of the package's kernel for four tokens of a type, and keep them under its name."""
    width = min(16, EXPERTS // 32 * (4 if dtype == "float32" else 2))  # bytes per load: all of a lane, or 16
    config = f"GateConfig{SHAPE}._replace(dtype={dtype!r}, load_bytes={width})"
    signature = (
        PACKAGE[0] if dtype == "float32" else "uint16*",
        *PACKAGE[1:],
    )  # 16-bit floats are passed as their bits
    name = f"package, {dtype}"
    TOKENS_PER_WARP[name] = TOKENS_PER_WARP["four tokens per warp"]
    kernel = f"make_4tokens_kernel({config})", signature, None, PACKAGE_CTA
    CLOCKS.update(pipe_clocks({name: kernel}, [make_4tokens_kernel, GateConfig]))
    return name


def run_package_kernel(x, weights, ids, **config):
    kernel, tokens = make_4tokens_kernel(GateConfig(*SHAPE)._replace(**config)), len(x)
    grid = -(-tokens // (4 * WARPS_PER_BLOCK))
    scales = 1.0, 1.0  # of shared experts and of the output
    sizes = tokens, np.int64(x.stride(0)), tokens  # tokens, elements between rows, tokens that are not padding
    launch(kernel, grid, PACKAGE_CTA[0], x, bias, weights, ids, *sizes, *scales, launch_bounds=BOUNDS)


# %%
if FOUR:
    BOUNDS = launch_bounds(gpu_of(gate.logits.device).capability)  # PACKAGE_CTA, and others before Hopper
    gain_us = predicted_us("four tokens per warp", count_package("float32"))
    measure("package kernel", run_package_kernel, after="four tokens per warp", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** Both kernels with one set of logits, which stays in the L2 cache:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
l2_us = {}
if FOUR:
    calls = {"four tokens per warp": run_four_tokens, "package kernel": run_package_kernel}
    calls = {name: gate.calls(run)[1][:1] for name, run in calls.items()}
    l2_us = ladder.times("logits in L2", calls) or {}
before, after = l2_us.get("four tokens per warp"), l2_us.get("package kernel")
judgement = ladder.gain("package kernel") if FOUR else None
say(
    "From L2: {before:.1f} -> {after:.1f} us, a gain of {gain:.1f} us where {predicted:.1f} us were predicted. From DRAM: "
    "{dram_before:.1f} -> {dram_after:.1f} us. So DRAM adds {wait_before:.1f} us before and {wait:.1f} us after: fewer instructions do "
    "not make the logits arrive earlier.",
    before=before,
    after=after,
    gain=before and after and before - after,
    predicted=judgement and judgement.predicted_us,
    dram_before=judgement and judgement.before_us,
    dram_after=judgement and judgement.after_us,
    wait_before=judgement and before and judgement.before_us - before,
    wait=judgement and after and judgement.after_us - after,
)

# %% [markdown]
# ### Step 21: programmatic dependent launch
#
# **Bottleneck.** The launch: a kernel starts only when the one before it has ended.
#
# **Idea.** With **programmatic dependent launch** (compute capability 9.0 or higher) it may start while the other ends; before
# its first load it executes `griddepcontrol.wait`, which waits for the other to complete. The public function launches in this
# way.
#
# **Predicted gain.** The difference between two empty kernels, one of them launched in this way.

# %%
OPTIONS = {"num_expert_group": GROUPS, "topk_group": KEPT}


def run_package(x, weights, ids):
    return moe_numba.biased_grouped_topk(x, bias, TOPK, **OPTIONS, out=(weights, ids))


gain_us = EMPTY[False] - EMPTY[True] if all(EMPTY.values()) else 0.0
measure("final", run_package, after="package kernel" if FOUR else "keys alone", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** An empty kernel has one CTA. The gain of larger grids:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
sizes = {"4096": min(4096, 4 * WAVE), "16384": TOKENS, "waves": 4 * WAVE}
dependent_us = {}
if FOUR:
    runs = {name: GateRuns(n, *SHAPE) for name, n in sizes.items()}
    calls = {name: runs[name].calls(run_package_kernel)[1] for name in sizes}
    calls |= {f"{name}, dependent": runs[name].calls(run_package)[1] for name in sizes}
    dependent_us = ladder.times("dependent launch", calls) or {}
judgement = ladder.gain("final")
say(
    "4096 tokens, a third of a wave: {few:.2f} -> {few_now:.2f} us. {tokens} tokens: {all:.2f} -> {all_now:.2f} us, where the step "
    "above measured {step:.2f} -> {step_now:.2f} us. Four waves: {many:.2f} -> {many_now:.2f} us. A dependent grid starts its "
    "CTAs and reads its parameters while the grid before ends, before it waits for that grid.",
    few=dependent_us.get("4096"),
    few_now=dependent_us.get("4096, dependent"),
    tokens=MODEL_TOKENS,
    all=dependent_us.get("16384"),
    all_now=dependent_us.get("16384, dependent"),
    step=judgement and judgement.before_us,
    step_now=judgement and judgement.after_us,
    many=dependent_us.get("waves"),
    many_now=dependent_us.get("waves, dependent"),
)

# %% [markdown]
# ### Step 22: bfloat16
#
# **Bottleneck.** The wait for DRAM. Many models compute logits in bfloat16.
#
# **Idea.** Load 16-bit logits, 8 per 16-byte load, and compute in float32. SGLang's kernel computes in the type of the logits.
# Scores then have 8 significant bits, and the choice changes:

# %%
half = GateRuns(TOKENS, *SHAPE, dtype=torch.bfloat16)
logits_16 = torch.randn(4096, EXPERTS, device=half.device).bfloat16()
rounded = logits_16.sigmoid() + bias.bfloat16()  # both operations round to bfloat16
exact = logits_16.float().sigmoid() + bias
chosen = [choose_experts(scores.float(), TOPK, GROUPS, KEPT).sort().values for scores in (rounded, exact)]

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Rounding to bfloat16 changes the experts of {share:.0%} of the tokens.",
    share=(chosen[0] != chosen[1]).any(dim=1).float().mean().item(),
)

# %% [markdown]
# **Predicted gain.** max(DRAM time, pipe time) before - after. A token has 576 bytes instead of 1,088: the outputs stay.

# %%
BYTES_16 = TOKENS * (EXPERTS * 2 + TOPK * 8) + EXPERTS * 4
if FOUR:
    dram_us = lower_bounds_us(MODEL_TOKENS)["DRAM"]
    dram_16_us = dram_us * (EXPERTS * 2 + TOPK * 8) / (EXPERTS * 4 + TOPK * 8)
    gain_us = max(dram_us, pipe_us("package, float32")) - max(dram_16_us, pipe_us(count_package("bfloat16")))
    call, timed = half.calls(run_package)
    more = {"timed": timed, "after": "final", "dtype": "bfloat16", "bytes": BYTES_16}
    ladder.step("final, bfloat16", call, predicted_gain_us=gain_us, **more)

# %% [markdown]
# **Explanation.** The prediction assumes that computing hides DRAM, so that only the slower of the two counts. With
# logits in the L2 cache:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
WIDTH = min(16, EXPERTS // 32 * 2)  # bytes per load of bfloat16 logits


def run_with_loads_of(width):
    return lambda *tensors: run_package_kernel(*tensors, dtype="bfloat16", load_bytes=width)


calls = {}
for dtype, runs in (("float32", gate), ("bfloat16", half)):
    calls[f"{dtype}, DRAM"] = runs.calls(run_package)[1]
    calls[dtype] = runs.calls(run_package)[1][:1]
if FOUR:
    calls["wide loads"] = half.calls(run_with_loads_of(WIDTH))[1][:1]
    calls["narrow loads"] = half.calls(run_with_loads_of(WIDTH // 2))[1][:1]
types_us = ladder.times("types, logits in L2 and DRAM", calls) or {}
wait_us = {
    dtype: types_us.get(f"{dtype}, DRAM") and types_us[f"{dtype}, DRAM"] - types_us[dtype]
    for dtype in ("float32", "bfloat16")
}
say(
    "From L2, {float32:.1f} us with float32 and {bfloat16:.1f} us with bfloat16; from DRAM {wait:.1f} and {wait_16:.1f} us more. "
    "Computing hides only the rest of the {dram:.1f} and {dram_16:.1f} us that DRAM needs, so the saved bytes count. Launched in "
    "the ordinary way and from L2, bfloat16 takes {wide:.1f} us with loads of {width} bytes, and {narrow:.1f} us with twice as "
    "many loads, as many as float32 needs: the number of loads explains {loads:.1f} of the {gain:.1f} us that bfloat16 saves from L2.",
    float32=types_us.get("float32"),
    bfloat16=types_us.get("bfloat16"),
    wait=wait_us["float32"],
    wait_16=wait_us["bfloat16"],
    dram=dram_us if FOUR else None,
    dram_16=dram_16_us if FOUR else None,
    wide=types_us.get("wide loads"),
    narrow=types_us.get("narrow loads"),
    loads=types_us.get("wide loads") and types_us["narrow loads"] - types_us["wide loads"],
    gain=types_us.get("float32") and types_us["float32"] - types_us["bfloat16"],
    width=WIDTH,
)

# %% [markdown]
# ## 6. The whole ladder
#
# All steps once more, timed interleaved. In the figures "speed of light" is the lower bound of section 3, and in the sweep
# at least the time of an empty kernel. "Previous" is the last step not marked as slower; grey points are slower than it.
# "aot" is SGLang's C++ kernel, compiled ahead of time.

# %%
ladder.measure_all()
ladder.save()


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def named(step):
    """The name of a peer with its version, such as "sglang-aot (sglang#4530)"."""
    row = records.find(GATE, step=step)
    return f"{step.removeprefix('peer:')} ({row['version'].split()[0].rpartition('/')[2]})"


PEERS = {step: named(step) for step in records.peers(GATE)} if GATE else {}
times = {name: recorded_us(GATE, step, **where) for step, name in PEERS.items()}
ladder.plot(floor_us=FLOOR_US, peers={name: us for name, us in times.items() if us})

# %% [markdown]
# Pipe time against measured time:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print(f"{'':<22}{'slowest pipe':>14}{'clocks':>8}{'pipe us':>9}{'measured us':>13}")
for name in CLOCKS.counts:
    measured = ladder.median_us(name.replace("package, float32", "package kernel"))
    line = f"{name:<22}{CLOCKS.slowest(name):>14}{CLOCKS[name]:>8,}{pipe_us(name):>9.1f}"
    print(line + (f"{measured:>13.1f}" if measured else ""))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
l2, pipe = types_us.get("float32"), pipe_us("package, float32") if FOUR else 0.0
say(
    "The final kernel takes {ratio:.1f} times the lower bound. Of {us:.1f} us, DRAM adds {wait:.1f} us to the {l2:.1f} us from L2. "
    "The pipes take {pipe:.1f} us and the launch {launch:.2f} us, even as a dependent one; {rest:.1f} us are neither DRAM, pipes "
    "nor launch.",
    ratio=(ladder.median_us("final") or 0) / FLOOR_US or None,
    us=types_us.get("float32, DRAM"),
    wait=wait_us["float32"],
    l2=l2,
    pipe=pipe if FOUR else None,
    launch=EMPTY[True],
    rest=l2 and EMPTY[True] and l2 - pipe - EMPTY[True],
)

# %% [markdown]
# To save what DRAM adds, a warp would have to load the next tokens while it chooses experts. Asynchronous copies into shared
# memory need no registers for this.
#
# ## 7. The sweep over tokens
#
# From the record of `python -m moe_numba bench gate`; the peers are built from their sources and timed in the same run:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
if GATE:
    names = {"final": "moe_numba", "torch eager": "torch eager", "torch.compile": "torch.compile"} | PEERS
    lines = {name: records.series(GATE, step=step, dtype="float32", config=CONFIG) for step, name in names.items()}
    lines = {name: points for name, points in lines.items() if points}
    sizes = sorted({tokens for points in lines.values() for tokens in points})
    floor = {tokens: max(*lower_bounds_us(tokens).values(), EMPTY[True]) for tokens in sizes}
    picture = plots.sweep_figure(lines, floor=floor, title="The gate over tokens, float32", caption=plots.caption(GATE))
else:
    picture = print("nothing is recorded yet; `python -m moe_numba bench gate` records it")
picture

# %% [markdown]
# ## Sources
#
# - The article: a walk through SGLang's `moe_fused_gate`, in Chinese. We compare [its claims](../docs/claims.md#gate) with our measurements.
# - The kernel: [sglang PR 4530](https://github.com/sgl-project/sglang/pull/4530), used since
#   [PR 5371](https://github.com/sgl-project/sglang/pull/5371). The article traces it to TensorRT-LLM and
#   FasterTransformer.
# - Later kernels: FlashInfer `fused_topk_deepseek`
#   ([PR 15347](https://github.com/sgl-project/sglang/pull/15347)), SGLang's Triton router
#   ([PR 29771](https://github.com/sgl-project/sglang/pull/29771)).
# - NVIDIA: *CUDA C++ Programming Guide*, arithmetic throughput; *PTX ISA*.
# - K. E. Batcher, *Sorting networks and their applications*, 1968.
