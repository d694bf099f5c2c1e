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
# # The gate, for a prompt
#
# DeepSeek-V3 has 256 experts in each mixture-of-experts layer and sends each token to 8 of them. The **gate** chooses the 8. For a prompt of
# 16,384 tokens that should be little work: the GPU reads 16 MB and writes 1 MB. Torch takes more than a hundred times as long as the bytes
# need. SGLang's CUDA C++ kernel `moe_fused_gate` ([PR 4530](https://github.com/sgl-project/sglang/pull/4530)), which an article in Chinese
# explains (see [Sources](#Sources)), still takes more than ten times as long.
#
# Where does the time go? In this lesson one kernel becomes another in twelve steps, each of which starts from what limits the one before. You
# write five of the pieces, and you find a race in SGLang's kernel that no GPU run shows. You need to know what a warp, a shuffle and shared memory are;
# [00](00_start_here.ipynb) introduces them.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import math

import torch
from numba import cuda, float32, int32, uint32

from moe_numba.course.lessons.gate import draw
from moe_numba.course.lessons.gate import prompt as page
from moe_numba.course.lessons.gate.prompt import exercises, gate, lesson
from moe_numba.course.lessons.gate.sizes import (
    CANDIDATES,
    EXPERTS,
    GROUPS,
    HELD,
    KEPT,
    SHARE,
    SIZE,
    TOKENS_PER_WARP,
    TOPK,
    WARPS,
)

# isort: split
from moe_numba.course.lessons.gate.sizes import DROPPED, FULL, LOG2_E, LOWEST, NEVER, PAIRS, sort_candidates, sort_held
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.exercises import predict
from moe_numba.course.steps.instruction_mix import instruction_mix
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.arithmetic import ex2_approx, float_as_int, int_as_float, rcp_approx, uint_as_float
from moe_numba.ptx.memory import griddepcontrol_wait, ld_shared_s32x4, load_nc_u32x4, st_shared_s32x4
from moe_numba.ptx.warp import redux_sync_max_s32

step = lesson.step
print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
print(page.result())

# %% [markdown]
# ## The problem
#
# For each token a small GEMM, the **router**, computes one number per expert, the **logit**. The gate computes:
#
# 1. **Sigmoid**: each logit becomes a score between 0 and 1.
# 2. **Bias**: a learned number per expert is added, which balances the load. It affects the choice, not the weight.
# 3. **Group scores**: the experts form 8 groups of 32. The score of a group is the sum of its two best.
# 4. **Groups**: the 4 best groups are kept. (DeepSeek-V3 was trained with each group on one node, so a token travels to at most 4 nodes.)
# 5. **Experts**: the 8 best experts of the kept groups are chosen.
# 6. **Weights**: the chosen experts' scores without the bias, divided by their sum.
#
# All numbers in the text are for DeepSeek-V3's sizes. The code takes the sizes from [sizes.py](../moe_numba/course/lessons/gate/sizes.py), where you can change them.
# These are the names in the code; look here when one of them appears:

# %%
page.constants()

# %%
logits, bias = page.inputs()["random logits"]
draw.problem(logits[0].cpu(), bias.cpu())

# %% [markdown]
# This is the torch function from which SGLang and vLLM started, as the article prints it:


# %%
def biased_grouped_topk(hidden_states, gating_output, correction_bias, topk, renormalize, num_expert_group, topk_group):
    scores = gating_output.sigmoid()  # [tokens, experts]
    num_token, num_experts = scores.shape
    scores_for_choice = scores + correction_bias.unsqueeze(0)
    group_scores = scores_for_choice.view(num_token, num_expert_group, -1).topk(2, dim=-1)[0].sum(dim=-1)
    group_idx = torch.topk(group_scores, k=topk_group, dim=-1, sorted=False)[1]
    group_mask = torch.zeros_like(group_scores).scatter_(1, group_idx, 1)  # [tokens, groups]
    size = num_experts // num_expert_group
    score_mask = group_mask.unsqueeze(-1).expand(-1, -1, size).reshape(num_token, -1)
    tmp_scores = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
    topk_ids = torch.topk(tmp_scores, k=topk, dim=-1, sorted=False)[1]
    topk_weights = scores.gather(1, topk_ids)
    if renormalize:
        topk_weights = topk_weights / topk_weights.sum(dim=-1, keepdim=True)
    return topk_weights.to(torch.float32), topk_ids.to(torch.int32)


page.torch_faults(biased_grouped_topk)

# %% [markdown]
# `torch.topk` does not define which of two equal values it takes, and the check of this lesson does: the best expert comes first, and of equal
# experts or groups the lower one. So torch may fail where the inputs have few values, and every kernel below must not. The second set of inputs
# also has tokens whose logits are all equal, masked experts (-inf), and scores of exactly 0 and 1. Outputs are filled with NaN and -7 before each
# launch, so that an element that a kernel forgets is found. NaN logits are not part of the contract here; the package ranks them last.
#
# ## Where torch's time goes

# %%
page.torch_kernels(biased_grouped_topk)

# %%
print(page.torch_shares(biased_grouped_topk))
print(page.show_lower_bounds())

# %% [markdown]
# Torch launches a kernel per operation. The long ones belong to `topk`: over 32 values for each group, whose results are also sorted, and over 256
# values for each token. They are made for long rows. (The bars add up to less than the times at the top of this page, which include the gaps
# between the kernels.) `torch.compile` fuses everything else. So we write one kernel that does all six steps, and keep
# everything of a token in registers.
#
# The lower bounds: DRAM must move each logit once, and the special function unit (MUFU) must deliver two results per sigmoid, an exponential and
# a reciprocal.
#
# ## How to read the tables
#
# An SM has four schedulers. Each issues one instruction per clock, for one of its warps, to one of several **pipes**:
#
# | pipe | instructions | clocks per instruction of a warp |
# |---|---|---|
# | FMA | float add and multiply; integer multiply | 1; 2 |
# | ALU | other integer instructions, compare, select, minimum, maximum | 2 |
# | XU | MUFU, conversions, bit counts (`popc`, `ffs`), maximum of a warp (`redux`) | 8 |
# | LSU | loads, stores, shuffles | 4 |
#
# Each step prints a table in three parts. The simulator counts two of them, and the third is a model of an H200:
#
# | part of a table | what its rows mean |
# |---|---|
# | critical path | the work of one warp: the busiest one of the CTAs that the simulator has run. *source lines* are the lines of Python that it executes, by any of its lanes. |
# | model | *time* is the **estimate**, in microseconds, from the machine code and the counts. The other rows estimate how long the launch, the chain of dependent instructions, each pipe and each memory would take alone. |
# | all warps | the work of the grid. *instructions* are machine code, of which a source line may take one or thirty. A *sector* is 32 bytes, the unit in which caches are read and written. A *wavefront* is one pass of a warp's access through shared memory; each *bank conflict* adds one. |
#
# The estimate is at least the launch and the largest other row. It is more where two of them do not overlap: the warps of a CTA load before they
# compute, and the last CTAs of the grid run alone. The largest row is where to look next. All of these rows are estimates, too, and one can lie
# above the measured time.
#
# A step's **prediction** is the measured time of the step before, times the ratio of the two estimates. Where a prediction
# misses, the text below the step says why, or that we do not know.
#
# ## Step 1: one thread per token
#
# The simplest kernel that does everything: each thread routes one token, and no thread needs another. `score`, `choice` and `group_score` are
# arrays of the thread.


# %%
@cuda.jit(device=True)
def sigmoid(x):
    return float32(1) / (float32(1) + float32(math.exp(-x)))


@cuda.jit
def one_thread_per_token(logits, bias, weights, ids, tokens):
    token = int32((cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * 32 + cuda.threadIdx.x)
    if token >= tokens:
        return  # no other thread waits for this one
    score = cuda.local.array(EXPERTS, float32)
    choice = cuda.local.array(EXPERTS, float32)
    group_score = cuda.local.array(GROUPS, float32)
    for g in range(GROUPS):
        first, second = LOWEST, LOWEST
        for e in range(g * SIZE, (g + 1) * SIZE):
            score[e] = sigmoid(logits[token * EXPERTS + e])
            choice[e] = score[e] + bias[e]
            second = max(second, min(first, choice[e]))
            first = max(first, choice[e])
        group_score[g] = first + second
    for _ in range(GROUPS - KEPT):
        worst = 0
        for g in range(GROUPS):
            if group_score[g] <= group_score[worst]:  # of equal groups the later one is dropped
                worst = g
        group_score[worst] = DROPPED
        for e in range(worst * SIZE, (worst + 1) * SIZE):
            choice[e] = LOWEST
    total = float32(0)
    for k in range(TOPK):
        best = 0
        for e in range(EXPERTS):
            if choice[e] > choice[best]:
                best = e
        choice[best] = LOWEST
        weights[token * TOPK + k], ids[token * TOPK + k] = score[best], best
        total += score[best]
    for k in range(TOPK):
        weights[token * TOPK + k] /= total


step("one thread per token", gate(one_thread_per_token, tokens_per_warp=32))

# %% [markdown]
# Look at *local memory per thread*. Registers have no addresses, so an array that is indexed with a number known only at run time cannot live in
# them. It goes to **local memory**, which is DRAM behind the caches. And look at the *dependent chain*: 16,384 threads are 512 warps, not even one
# per scheduler, so each warp waits for nearly every one of its own instructions, and nothing else runs meanwhile.
#
# (The model is weak here in two ways. The compiler unrolls the eight picks into eight loops, and the model takes each of the eight to run as
# often as the source line, so this step's *instructions*, and what follows from them, are several times too many. On the other hand the model
# takes a load from local memory to last 20 clocks, less than any cache needs. The errors have opposite signs.)
#
# **Take away.** A GPU hides latency with other warps. One thread per item needs many more items than this.
#
# ## Step 2: SGLang's design, a thread per group
#
# Eight lanes share a token, one per group:

# %%
draw.lanes("a thread per token", "a thread per group")

# %% [markdown]
# There are eight times as many warps, each with an eighth of the work. The lanes of a token now have to agree:
#
# | phase | SGLang's kernel | torch |
# |---|---|---|
# | load, sigmoid, bias | 32 values in each thread | `scores`, `scores_for_choice` |
# | exclude groups, 4 times | each thread: the sum of its two best; butterfly: the lowest sum, of equal sums the higher group; its thread overwrites its values with `FLT_MAX` | `group_scores`, `group_idx`, `masked_fill` |
# | choose experts, 8 times | each thread: its best value; butterfly: the highest, of equal values the lower index; its thread stores weight and id | `topk_ids`, `gather` |
# | rescale | the first thread of the token divides by the sum | `topk_weights / topk_weights.sum()` |
#
# In a butterfly each lane exchanges with the lane at distance 1, then 2, then 4, and keeps the better value. After three rounds all eight lanes
# know the best. The article's kernel has 6 warps in a CTA; here all kernels have 4, so that the steps differ in nothing else.


# %%
@cuda.jit(device=True)
def lowest(value, index, start, stop):
    """Return the lowest value of the lanes at distances start, 2 start, ... below stop, and its index."""
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
    step = start
    while step < stop:
        other = cuda.shfl_xor_sync(FULL, value, step)
        other_index = cuda.shfl_xor_sync(FULL, index, step)
        if other > value or (other == value and other_index < index):
            value, index = other, other_index
        step *= 2
    return value, index


@cuda.jit(device=True)
def two_largest(values):
    first, second = LOWEST, LOWEST
    for i in range(len(values)):
        second = max(second, min(first, values[i]))
        first = max(first, values[i])
    return first, second


# %% [markdown]
# The kernel has two holes. (`@factory` stands above a function that makes a kernel. With the same functions it returns the same kernel.) `load` copies
# consecutive values from global memory into an array. `store_and_add` is called once per pick by all lanes: the lane that holds the expert stores its
# weight, and the first lane of the token adds it to the sum.


# %%
@factory
def make_thread_per_group(load, store_and_add):
    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32((cuda.blockIdx.x * WARPS + cuda.threadIdx.y) * TOKENS_PER_WARP + lane // GROUPS)
        row = min(token, tokens - 1)  # lanes without a token take part in the shuffles, and store nothing
        group = int32(lane % GROUPS)
        first = int32(group * SIZE)
        score = cuda.local.array(SIZE, float32)
        choice = cuda.local.array(SIZE, float32)
        load(logits, row * EXPERTS + first, score)  # <-- a hole
        load(bias, first, choice)
        for i in range(SIZE):
            score[i] = sigmoid(score[i])
            choice[i] = score[i] + choice[i]
        for _ in range(GROUPS - KEPT):
            best, second = two_largest(choice)
            _, worst = lowest(best + second, group, 1, GROUPS)
            if group == worst:
                for i in range(SIZE):
                    choice[i] = DROPPED  # so its sum is never the lowest again
        total = float32(0)
        for k in range(TOPK):
            best, expert = LOWEST, first
            if choice[0] != DROPPED:
                for i in range(SIZE):
                    if choice[i] > best:
                        best, expert = choice[i], int32(first + i)
            best, expert = highest(best, expert, 1, GROUPS)
            place, at = expert % SIZE, token * TOPK + k
            holds, adds = group == expert // SIZE and token < tokens, group == 0 and token < tokens
            if holds:
                choice[place] = LOWEST
            total = store_and_add(weights, ids, at, holds, score[place], expert, adds, total)  # <-- a hole
        if group == 0 and token < tokens:
            for k in range(TOPK):
                weights[token * TOPK + k] /= total

    return kernel


@cuda.jit(device=True)
def load_one_by_one(pointer, at, into):
    for i in range(len(into)):
        into[i] = pointer[at + i]


@cuda.jit(device=True)
def store_sync_add(weights, ids, at, holds, weight, expert, adds, total):
    if holds:
        weights[at] = weight
        ids[at] = expert
    cuda.syncwarp()
    if adds:
        total += weights[at]
    return total


narrow = gate(make_thread_per_group(load_one_by_one, store_sync_add), TOKENS_PER_WARP)
step("SGLang's design", narrow)

# %% [markdown]
# `EXPERTS` and its like are constants of the kernel, as template parameters are in C++, so the compiler unrolls loops and turns `%` into a mask.
# `int32(...)` stands where the C++ has `int`; we come back to that.

# %%
page.miss("one thread per token", "SGLang's design")

# %% [markdown]
# The model is why: for step 1 its two errors come out too high, and for step 2 the missing local memory makes it too low. A prediction has the
# quotient of both.
#
# In the table *source lines* of all warps rise, because eight times as many warps execute them, each only a third as many as before.
#
# **Take away.** Split an item over several lanes: more warps to hide latency, and less for each of them to keep.
#
# ## A race that no GPU run shows
#
# Our port has a `syncwarp` that SGLang's kernel does not have. There, the first lane of a token reads the weight that another lane has just
# stored, and only then comes a barrier:


# %%
@cuda.jit(device=True)
def store_and_add_as_sglang(weights, ids, at, holds, weight, expert, adds, total):
    if holds:
        weights[at] = weight
        ids[at] = expert
    if adds:
        total += weights[at]
    cuda.syncthreads()
    return total


racing = gate(make_thread_per_group(load_one_by_one, store_and_add_as_sglang), TOKENS_PER_WARP)
print(lesson.orders(racing, seeds=2))
print(page.on_a_gpu(racing))

# %% [markdown]
# On a GPU the lanes of this warp happen to run in step, so the store comes first. CUDA does not promise that: since Volta each lane has a program
# counter of its own, and a new compiler may put the two sides of the `if` in another order. The simulator runs the lanes in other orders too, and
# names both lines. The wrong result would be a weight that is NaN, or stale from the last layer.
#
# **Diagnose.** Which of these repairs the kernel: "A", "B", "C", or several, such as "AB"? Think of the whole kernel: its first lane reads the
# weights a second time, to divide them. Decide before you run the cell, which checks the three kernels as `step` does.


# %%
@cuda.jit(device=True)
def repair_a(weights, ids, at, holds, weight, expert, adds, total):
    if holds:
        weights[at] = weight
        ids[at] = expert
    cuda.threadfence()  # orders the stores before the load
    if adds:
        total += weights[at]
    return total


@cuda.jit(device=True)
def repair_b(weights, ids, at, holds, weight, expert, adds, total):
    if holds:
        weights[at] = weight
        ids[at] = expert
    cuda.syncwarp()  # waits for the lanes of the warp
    if adds:
        total += weights[at]
    return total


@cuda.jit(device=True)
def repair_c(weights, ids, at, holds, weight, expert, adds, total):
    if holds:
        weights[at] = weight
        ids[at] = expert
    holder = cuda.ffs((cuda.ballot_sync(FULL, holds) >> (cuda.threadIdx.x & 24)) & 255) - 1  # lane of the token
    total += cuda.shfl_sync(FULL, weight, (cuda.threadIdx.x & 24) + max(holder, 0))  # without memory
    return total


repairs = {
    "A": gate(make_thread_per_group(load_one_by_one, repair_a), TOKENS_PER_WARP),
    "B": gate(make_thread_per_group(load_one_by_one, repair_b), TOKENS_PER_WARP),
    "C": gate(make_thread_per_group(load_one_by_one, repair_c), TOKENS_PER_WARP),
}
exercises.race.check(repairs, ...)

# %% [markdown]
# **Take away.** That a kernel has always worked does not order its accesses. If one lane reads what another has stored, a barrier must come between
# the store and the load.
#
# ## Step 3: 16 bytes per load
#
# In the table of step 2 the row *L1 and shared memory* is the largest bound. A lane's 32 logits are exactly one 128-byte cache line, and no other
# lane needs them. So each load instruction of a warp touches 32 different lines. `ld.global.v4` loads 16 bytes per lane. (The article's `AccessType`,
# an aligned array of 32 values, is there for the same purpose: the C++ compiler may load it in wide pieces.)

# %%
draw.visits()

# %% [markdown]
# **Predict.** The table of step 2 has the *global loads* of a warp: one per expert of a group for the logits, as many for the bias, and two per pick
# that read the weights again, for the sum and for the division. How many are there with 16-byte loads? Replace the `...`.

# %%
my_guess = predict("16-byte loads", global_loads=...)


# %%
@cuda.jit(device=True)
def load_wide(pointer, at, into):
    for i in range(0, len(into), 4):
        a, b, c, d = load_nc_u32x4(pointer, at + i)
        into[i], into[i + 1] = uint_as_float(a), uint_as_float(b)
        into[i + 2], into[i + 3] = uint_as_float(c), uint_as_float(d)


wide = gate(make_thread_per_group(load_wide, store_sync_add), TOKENS_PER_WARP)
step("16-byte loads", wide)

# %%
my_guess.judge(lesson.steps["16-byte loads"].score)

# %% [markdown]
# Why does it help? Two explanations fit. **Throughput**: the L1 cache looks up about one line per clock, and there are fewer look-ups. Or
# **capacity**: a lane comes back to its line for the next 4 bytes, and between two visits the line must survive in the cache, beside the lines of
# all other lanes on this SM, and beside local memory:

# %%
print(page.l1_footprint())

# %% [markdown]
# An experiment tells them apart. L1 cache and shared memory are one memory. A launch that asks for shared memory and does not use it leaves less
# L1, and changes neither the instructions nor the number of warps. Local memory needs the cache as well, so both kernels may become slower. If
# capacity is the cause, the kernel with narrow loads loses more, because it visits each line more often; if throughput is, what wide loads gain
# stays the same.

# %%
page.l1_probe(narrow, wide)

# %%
say(
    "With the whole cache, wide loads save {gain:.1f} us; with the small one, {small_gain:.1f} us. {conclusion}.",
    **page.l1_numbers(narrow, wide),
)

# %% [markdown]
# **Take away.** If a lane walks through a line of its own, take the line in as few visits as possible. And test an explanation with a change that
# only the explanation can feel.
#
# ## An aside: Numba's integers are 64 bits wide
#
# In Numba `int32 + int32` is an int64, and so is an index of `range`. A register has 32 bits, so an int64 takes two registers, two shuffles, and
# two or three instructions where one would do. The best of 32 lanes, with both kinds of index:


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
# **Take away.** In a kernel that counts instructions, cast indices back to `int32`. All kernels of this lesson do.
#
# ## Step 4: one warp per token
#
# A thread still holds 64 values, and `choice[place]`, an index known only at run time, keeps them in local memory. Take the idea of step 2 as far as
# it goes: 32 lanes share a token. Each lane holds 8 experts in registers, and 4 lanes are a group. Neighbouring lanes now read neighbouring bytes:

# %%
draw.lanes("a thread per group", "a warp per token")

# %% [markdown]
# The price: a search among 32 lanes takes five rounds instead of three, and serves one token instead of four. **This step does not pay by
# itself**, not with so many tokens. It is an investment: with 8 values in registers, and all lanes of a warp on one token, everything that follows becomes
# possible.
#
# The group of a lane is spread over 4 lanes now, so its two best must be merged.
#
# **Build: the two largest of a group.** `first` and `second` are the two largest values of this lane, `first >= second`. Return the two largest of the
# four lanes 4 g to 4 g + 3, in all four. `cuda.shfl_xor_sync(FULL, x, d)` returns the `x` of the lane whose number differs in the bit of d.
# Par: 4 shuffles.


# %%
@cuda.jit(device=True)
def my_two_largest_of_group(first, second):
    return ...  # yours


two_largest_of_group = exercises.largest.use(my_two_largest_of_group)

# %% [markdown]
# The new kernel has two holes as well. `sigmoid` is one. `route` is everything between the scores and the result: it gets this lane's 8 biased
# scores and scores, and returns pick `k` to lane `k`, as (weight, expert). A `route` is made of two parts for now: `drop_groups` overwrites the
# values of dropped groups, and `pick` chooses experts.


# %%
@factory
def make_warp_per_token(sigmoid, route):
    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane = int32(cuda.threadIdx.x)
        token = int32(cuda.blockIdx.x * WARPS + cuda.threadIdx.y)
        row = min(token, tokens - 1)
        score = cuda.local.array(HELD, float32)
        choice = cuda.local.array(HELD, float32)
        load_wide(logits, row * EXPERTS + lane * HELD, score)
        load_wide(bias, lane * HELD, choice)
        for i in range(HELD):
            score[i] = sigmoid(score[i])  # <-- a hole
            choice[i] = score[i] + choice[i]
        weight, expert = route(choice, score)  # <-- a hole: lane k receives pick k; the weight of others is 0
        total = weight
        for distance in (1, 2, 4, 8, 16):
            total += cuda.shfl_xor_sync(FULL, total, distance)
        if lane < TOPK and token < tokens:
            weights[token * TOPK + lane] = weight / total
            ids[token * TOPK + lane] = expert

    return kernel


@factory
def make_route(drop_groups, pick):
    @cuda.jit(device=True)
    def route(choice, score):
        drop_groups(choice)
        return pick(choice, score)

    return route


@cuda.jit(device=True)
def drop_worst_groups(choice):  # as SGLang does it: four times the lowest sum
    group = int32(cuda.threadIdx.x // SHARE)
    for _ in range(GROUPS - KEPT):
        first, second = two_largest(choice)
        first, second = two_largest_of_group(first, second)
        _, worst = lowest(first + second, group, SHARE, 32)
        if group == worst:
            for i in range(HELD):
                choice[i] = DROPPED
    if choice[0] == DROPPED:
        for i in range(HELD):
            choice[i] = LOWEST


@cuda.jit(device=True)
def pick_by_search(choice, score):  # as SGLang does it: eight times the highest value
    lane = int32(cuda.threadIdx.x)
    weight, expert = float32(0), int32(0)
    for k in range(TOPK):
        best, winner = LOWEST, int32(lane * HELD)
        for i in range(HELD):
            if choice[i] > best:
                best, winner = choice[i], int32(lane * HELD + i)
        best, winner = highest(best, winner, 1, 32)
        won = float32(0)
        for i in range(HELD):  # no index at run time: all eight are compared, so they stay in registers
            if lane * HELD + i == winner:
                choice[i], won = LOWEST, score[i]
        won = cuda.shfl_sync(FULL, won, winner // HELD)
        if lane == k:
            weight, expert = won, winner
    return weight, expert


step("one warp per token", gate(make_warp_per_token(sigmoid, make_route(drop_worst_groups, pick_by_search))))

# %% [markdown]
# *Local memory per thread* is gone, and a warp loads its token with a few instructions. The pipes are busier than before.

# %%
page.miss("16-byte loads", "one warp per token")

# %% [markdown]
# The prediction starts from the estimate of step 3, which is too low: the model counts no traffic of local memory, and step 3 has some. From this
# step on no kernel has any.
#
# From here on the pipes are the bottleneck, so we ask which function keeps the slowest one busy:

# %%
page.where("one warp per token")

# %% [markdown]
# **Take away.** Distribute a small array over the lanes of a warp, and it fits in registers. Exchange then costs instructions, and those are what we
# work on now.
#
# ## Step 5: rank by counting
#
# `drop_worst_groups` finds all sums again in each of its four rounds, although only one group has changed, and searches the lowest of them in a
# butterfly. But we do not need the groups in order. A group is kept if fewer than 4 groups are better, and that can be **counted**. 8 groups make 64
# comparisons, two for each lane:

# %%
sums = (logits[0].float().sigmoid() + bias).view(GROUPS, -1).topk(2)[0].sum(-1).tolist()
draw.rank_by_counting(sums)

# %% [markdown]
# **Build: rank by counting.** `score` is the sum of this lane's group, the same in its four lanes. Return how many groups are better: those with a higher
# sum, and of equal sums the lower group. `cuda.shfl_sync(FULL, x, lane)` returns the `x` of any lane. `cuda.ballot_sync(FULL, condition)` collects
# one bit from each lane, and `cuda.popc` counts bits. Par: 2 shuffles.
#
# Write the shuffle *before* an `and` or `or`, not inside: lanes whose left side decides would skip it, and the others would wait for them.


# %%
@cuda.jit(device=True)
def my_better_groups(score):
    return ...  # yours


better_groups = exercises.rank.use(my_better_groups)


# %%
@cuda.jit(device=True)
def rank_groups(choice):
    first, second = two_largest(choice)
    first, second = two_largest_of_group(first, second)
    if better_groups(first + second) >= KEPT:
        for i in range(HELD):
            choice[i] = LOWEST


step("rank by counting", gate(make_warp_per_token(sigmoid, make_route(rank_groups, pick_by_search))))

# %% [markdown]
# **Take away.** To choose the best of a few, count for each how many are better. All comparisons are independent, so nothing waits.
#
# ## Step 6: integer keys

# %%
page.where("rank by counting")

# %% [markdown]
# `pick_by_search` and `highest` remain: eight times five rounds, each with two shuffles and three comparisons. Since Ampere one instruction does this
# for integers: `redux.sync.max` returns the maximum of 32 lanes to all of them. Hopper has it for integers only. So we need an integer that
# sorts as the float does.
#
# **Build: sortable bits.** `bits` are the bits of a float32, as an int32. Return an int32 that sorts as the float does, from -inf to inf. The
# function must be its own inverse, so that it also turns a key back into the bits. (The bits of positive floats already sort as integers.) Par: 1
# executed line of source.


# %%
@cuda.jit(device=True)
def my_sortable(bits):
    return ...  # yours


sortable = exercises.key.use(my_sortable)

# %% [markdown]
# Each lane finds its best key; `redux` finds the best of all lanes; a ballot of the lanes that hold it and `ffs`, the lowest set bit, find the
# winner. The lowest lane holds the lowest experts, so ties are resolved as well. (Our sums are never -0.0, whose key would be below that of 0.0.)


# %%
@cuda.jit(device=True)
def pick_by_key(choice, score):
    lane = int32(cuda.threadIdx.x)
    key = cuda.local.array(HELD, int32)
    for i in range(HELD):
        key[i] = sortable(float_as_int(choice[i]))
    weight, expert = float32(0), int32(0)
    for k in range(TOPK):
        best, slot = NEVER, int32(0)
        for i in range(HELD):
            slot = int32(i) if key[i] > best else slot
            best = max(best, key[i])
        highest_key = redux_sync_max_s32(uint32(FULL), best)
        winner = int32(cuda.ffs(cuda.ballot_sync(FULL, best == highest_key)) - 1)
        won = float32(0)
        for i in range(HELD):
            key[i] = NEVER if (lane == winner) & (i == slot) else key[i]
            won = score[i] if i == slot else won
        won = cuda.shfl_sync(FULL, won, winner)
        slot = cuda.shfl_sync(FULL, slot, winner)
        if lane == k:
            weight, expert = won, int32(winner * HELD + slot)
    return weight, expert


step("integer keys", gate(make_warp_per_token(sigmoid, make_route(rank_groups, pick_by_key))))

# %% [markdown]
# **Take away.** Know what the hardware can do in one instruction, and bring the data into the form that it needs.
#
# ## Step 7: sort once, then pop

# %%
page.where("integer keys")

# %% [markdown]
# For each pick every lane compares its 8 keys again, although 31 of 32 lanes have not changed. Sort the keys of a lane once. Then its best key is
# always in front, and the winner moves the rest up: it **pops**. A **sorting network** is a list of compare-exchanges that does not depend on the
# data. All its indices are constants, so the keys stay in registers:

# %%
values = (logits[0, :HELD].float().sigmoid() + bias[:HELD]).tolist()
draw.network(values)

# %% [markdown]
# Sorting loses which expert a key belongs to, and a network does not keep the order of equal keys. So each key moves together with its place in the
# lane, its `slot`. The two best of the lane are now in front, too, and a lane that never wins never moves its keys, so it is enough to clear
# `key[0]` of a dropped group. `|` and `&` compute both sides, where `or` and `and` would branch.


# %%
COMPARE_EXCHANGES = len(PAIRS)


@cuda.jit(device=True)
def sort_and_pop(choice, score):
    lane = int32(cuda.threadIdx.x)
    key, slot = cuda.local.array(HELD, int32), cuda.local.array(HELD, int32)
    for i in range(HELD):
        key[i], slot[i] = sortable(float_as_int(choice[i])), int32(i)
    for n in range(COMPARE_EXCHANGES):
        i, j = PAIRS[n]
        swap = (key[j] > key[i]) | ((key[j] == key[i]) & (slot[j] < slot[i]))
        key[i], key[j] = key[j] if swap else key[i], key[i] if swap else key[j]
        slot[i], slot[j] = slot[j] if swap else slot[i], slot[i] if swap else slot[j]
    first, second = two_largest_of_group(int_as_float(sortable(key[0])), int_as_float(sortable(key[1])))
    if better_groups(first + second) >= KEPT:
        key[0] = NEVER
    weight, expert = float32(0), int32(0)
    for k in range(TOPK):
        highest_key = redux_sync_max_s32(uint32(FULL), key[0])
        winner = int32(cuda.ffs(cuda.ballot_sync(FULL, key[0] == highest_key)) - 1)
        front, won = slot[0], float32(0)
        for i in range(HELD):
            won = score[i] if i == front else won
        if lane == winner:  # the pop
            for i in range(HELD - 1):
                key[i], slot[i] = key[i + 1], slot[i + 1]
            key[HELD - 1] = NEVER
        won = cuda.shfl_sync(FULL, won, winner)
        front = cuda.shfl_sync(FULL, front, winner)
        if lane == k:
            weight, expert = won, int32(winner * HELD + front)
    return weight, expert


step("sort once, then pop", gate(make_warp_per_token(sigmoid, sort_and_pop)))

# %% [markdown]
# **Take away.** If a loop searches the same data again and again, sort it once, even if only eight values of it are yours.
#
# ## Step 8: a fast sigmoid

# %%
page.where("sort once, then pop")

# %% [markdown]
# `math.exp` and an exact division also handle subnormal numbers and overflow, and the division rounds correctly. `ex2.approx` and `rcp.approx` are
# one MUFU instruction each, with errors of at most two units in the last place. All experts get the same treatment, so equal logits still have
# equal scores.


# %%
@cuda.jit(device=True)
def fast_sigmoid(x):
    return rcp_approx(float32(1) + ex2_approx(-LOG2_E * x))


step("fast sigmoid", gate(make_warp_per_token(fast_sigmoid, sort_and_pop)))

# %% [markdown]
# **Take away.** Exactness has a price per element. Find out what your result needs.
#
# ## Step 9: keys alone

# %%
page.where("fast sigmoid")

# %% [markdown]
# Half of `sort_and_pop` is about slots: each compare-exchange selects two of them, each pop moves seven, and each pick finds a score and shuffles both to
# all lanes, although only lane `k` wants them. Sort the keys alone. Then a compare-exchange is one minimum and one maximum
# (`sort_held` is the same network, written like that). Lane `k` notes the key of pick `k` and the lane that held it. **At the end**, once, each
# lane `k` asks that lane for its unsorted keys, and finds the place of its own key among them.
#
# A pop moves seven keys and no slots now, which is little enough for all lanes to do it by selecting, without a branch.
#
# **Build: pop.** `queue` is this lane's array of `HELD` keys, largest first, with `NEVER` after the last. Return the warp's highest key, and the mask
# of the lanes whose queue begins with it (as `uint32`). Drop it from the *lowest* of these lanes. All lanes select, as in `a if wins else b`; there is
# no `if` statement. Par: no shuffle at all.


# %%
@cuda.jit(device=True)
def my_pop(queue):
    return ...  # yours


pop = exercises.pop.use(my_pop)

# %% [markdown]
# What if a lane holds two equal keys? Then two picks in a row have the same key and the same holder, and both find the same two places: say
# `matches` is `0b101000`, experts 3 and 5 of the lane. The first of the two picks takes the lowest bit, the second one must skip it. So a pick skips as many
# bits as picks directly before it had its key and its holder. A ballot marks the repeats: bit `k` says that pick `k` has the key and the holder of
# pick `k - 1`. Lane `k` walks down from its own bit, and clears one match for each repeat that it passes: if bits 3 and 4 are set, pick 4 is the third
# with its key, and clears two. In `keys_alone`, lanes without a pick have an empty mask, whose `ffs` is 0; `& 31` turns the lane -1 into 31, a valid
# source for the shuffles, and their results are not used.


# %%
@cuda.jit(device=True)
def skip_taken(matches, picked, holder, column):
    """Clear the matches that earlier picks of an equal key took from the same lane; this lane has pick `column`."""
    same = (picked == cuda.shfl_up_sync(FULL, picked, 1)) & (holder == cuda.shfl_up_sync(FULL, holder, 1))
    repeats = uint32(cuda.ballot_sync(FULL, same & (column > 0)))
    if repeats != 0:  # seldom
        lane = int32(cuda.threadIdx.x)
        while (repeats >> uint32(lane)) & uint32(1):  # walk down the ones that end at this lane's bit
            matches = uint32(matches & uint32(matches - uint32(1)))
            lane = int32(lane - 1)
    return matches


@cuda.jit(device=True)
def keys_alone(choice, score):
    lane = int32(cuda.threadIdx.x)
    column = lane if lane < TOPK else int32(0)  # the pick that this lane keeps
    key, queue = cuda.local.array(HELD, int32), cuda.local.array(HELD, int32)
    for i in range(HELD):
        key[i] = queue[i] = sortable(float_as_int(choice[i]))
    sort_held(queue)
    first, second = two_largest_of_group(int_as_float(sortable(queue[0])), int_as_float(sortable(queue[1])))
    if better_groups(first + second) >= KEPT:
        queue[0] = NEVER
    picked, holders = int32(0), uint32(0)
    for k in range(TOPK):
        highest_key, holding = pop(queue)
        if lane == k:
            picked, holders = highest_key, holding
    holder = int32((cuda.ffs(holders) - 1) & 31)
    matches, held_score = uint32(0), cuda.local.array(HELD, float32)
    for i in range(HELD):
        held_score[i] = cuda.shfl_sync(FULL, score[i], holder)
        same = cuda.shfl_sync(FULL, key[i], holder) == picked
        matches = uint32(matches | uint32(1 << i)) if same else matches
    slot = int32(cuda.ffs(skip_taken(matches, picked, holder, column)) - 1)
    weight = float32(0)
    for i in range(HELD):
        weight = held_score[i] if (i == slot) & (lane < TOPK) else weight
    return weight, int32(holder * HELD + slot)


step("keys alone", gate(make_warp_per_token(fast_sigmoid, keys_alone)))

# %% [markdown]
# The package routes a prompt with other shapes, and all small batches, with a kernel like this one:
# [one_token_per_warp.py](../moe_numba/gate/one_token_per_warp.py).
#
# **Take away.** Carry along what decides, and look up the rest at the end.
#
# ## Step 10: four tokens per warp

# %%
page.where("keys alone")

# %% [markdown]
# Half of the lanes belong to dropped groups. They sort keys that are never picked, and pop in vain. Choosing groups needs all 256 experts of a token;
# choosing experts needs 128. And each pop of a warp serves a single token. If four tokens share a pop, its instructions are issued once instead of
# four times; that should pay for more keys to sort in each lane and for the way through shared memory. So let a warp take four tokens, with two
# layouts. **To score**, its 32 lanes take one token after another, as before. The keys go to shared memory. **To pick**, 8 lanes take the 128 candidates of a token, 16 each, and all four tokens pick at the same time:

# %%
four = (torch.randn(4, EXPERTS).sigmoid() + bias.cpu()).view(4, GROUPS, -1).topk(2)[0].sum(-1)
draw.four_tokens(four.topk(KEPT).indices.tolist())

# %% [markdown]
# A pick needs three rounds of shuffles again, and each round serves four tokens. `redux` could take a mask of eight lanes, but then one instruction
# finds the maximum of one token only, and a pick would need four of them.
#
# To rank groups, the lanes have a third role. All four lanes of group g know its sum for each of the four tokens, and lane 4 g + t keeps only the
# sum of token t. It compares that with the sums of the seven other groups for token t, which the lanes at distances 4, 8, ... 28 keep. The lanes
# whose group is kept write its number to `kept[t]`, in order.
#
# **Build: the place among the kept groups.** `is_kept` says whether this lane's group is kept for its token, t = lane % 4. Return how many *lower* groups
# are kept for the same token. Par: 1 vote, and no shuffle.


# %%
@cuda.jit(device=True)
def my_place_among_kept(is_kept):
    return ...  # yours


place_among_kept = exercises.place.use(my_place_among_kept)

# %% [markdown]
# Four small functions first: how a lane ranks its group, and how keys move to and from shared memory, 16 bytes at a time. A group's 32 keys are
# followed by 4 unused ones (`PITCH`), which spreads the groups over the banks. The stores have no conflicts then. The loads have some: shared memory
# serves eight lanes of a 16-byte load at a time, the eight of a token, and of those two want the same banks if groups g and g + 4 are both kept.

# %%
PER_GROUP = SIZE // CANDIDATES  # lanes that share a kept group
PITCH = SIZE + 4
NUM_KEYS = WARPS * 4 * GROUPS * PITCH  # of a CTA
QUEUE = min(CANDIDATES, TOPK)  # keys of a lane that can still be picked


@cuda.jit(device=True)
def better_groups_of_token(sum_key):
    group, better = int32(cuda.threadIdx.x // 4), int32(0)
    for i in range(1, GROUPS):
        rival = cuda.shfl_xor_sync(FULL, sum_key, 4 * i)  # of group ^ i
        better += int32((rival > sum_key) | ((rival == sum_key) & ((group ^ i) < group)))
    return better


@cuda.jit(device=True)
def store_keys(keys, place, key):
    for i in range(0, HELD, 4):
        st_shared_s32x4(keys, int32(place + i), key[i], key[i + 1], key[i + 2], key[i + 3])


@cuda.jit(device=True)
def load_candidates(keys, place, queue):
    for i in range(0, CANDIDATES, 4):
        queue[i], queue[i + 1], queue[i + 2], queue[i + 3] = ld_shared_s32x4(keys, int32(place + i))


@cuda.jit(device=True)
def two_largest_keys(key):
    first, second = NEVER, NEVER
    for i in range(HELD):
        second = max(second, min(first, key[i]))
        first = max(first, key[i])
    return first, second


# %% [markdown]
# The whole kernel, which is also the last one of this lesson. Its holes are for the next two steps: `load` and `load_one` for other types of
# logits, `wait` for another kind of launch.


# %%
@factory
def make_four_tokens(load, load_one, wait):
    @cuda.jit
    def kernel(logits, bias, weights, ids, tokens):
        lane, warp = int32(cuda.threadIdx.x), int32(cuda.threadIdx.y)
        group, part = int32(lane >> 2), int32(lane & 3)  # to score: a part of a group
        own, column = int32(lane >> 3), int32(lane & 7)  # to pick: token `own` of the warp, pick `column`
        token = int32((cuda.blockIdx.x * WARPS + warp) * 4)
        keys = cuda.shared.array(NUM_KEYS, int32)
        kept = cuda.shared.array((WARPS, 4, GROUPS), int32)
        score = cuda.local.array((4, HELD), float32)
        lane_bias = cuda.local.array(HELD, float32)
        key = cuda.local.array(HELD, int32)
        queue = cuda.local.array(CANDIDATES, int32)
        wait()  # <-- a hole, for step 11
        load_wide(bias, lane * HELD, lane_bias)
        for t in range(4):  # all loads first
            load(logits, min(token + t, tokens - 1) * EXPERTS + lane * HELD, score[t])  # <-- a hole, for step 12

        # Score: all lanes take one token after another; lane (group, part) keeps the sum of token `part`.
        sum_key = NEVER
        for t in range(4):
            for i in range(HELD):
                key[i] = sortable(float_as_int(fast_sigmoid(score[t, i]) + lane_bias[i]))
            store_keys(keys, int32(((warp * 4 + t) * GROUPS + group) * PITCH + part * HELD), key)
            first, second = two_largest_keys(key)
            first, second = two_largest_of_group(first, second)
            if part == t:
                both = int_as_float(sortable(first)) + int_as_float(sortable(second))
                sum_key = sortable(float_as_int(both))
        is_kept = better_groups_of_token(sum_key) < KEPT
        place = place_among_kept(is_kept)
        if is_kept:
            kept[warp, part, place] = group
        cuda.syncwarp()  # the keys and the kept groups are read by other lanes

        # Pick: eight lanes per token, each with the sorted candidates of a part of a kept group.
        source, start = kept[warp, own, column // PER_GROUP], int32(column % PER_GROUP * CANDIDATES)
        load_candidates(keys, int32(((warp * 4 + own) * GROUPS + source) * PITCH + start), queue)
        sort_candidates(queue)
        own_lanes = uint32(uint32(0xFF) << uint32(own * 8))
        picked, holders = int32(0), uint32(0)
        for k in range(TOPK):
            highest_key = queue[0]
            for distance in (1, 2, 4):
                highest_key = max(highest_key, cuda.shfl_xor_sync(FULL, highest_key, distance))
            holding = uint32(uint32(cuda.ballot_sync(FULL, queue[0] == highest_key)) & own_lanes)
            if column == k:
                picked, holders = highest_key, holding
            wins = lane == int32(cuda.ffs(holding) - 1)
            for i in range(QUEUE - 1):
                queue[i] = queue[i + 1] if wins else queue[i]
            queue[QUEUE - 1] = NEVER if wins else queue[QUEUE - 1]

        # Look up: lane (own, column) finds pick `column` among the candidates of the lane that held it.
        holder = int32((cuda.ffs(holders) - 1) & 7)
        source, start = kept[warp, own, holder // PER_GROUP], int32(holder % PER_GROUP * CANDIDATES)
        load_candidates(keys, int32(((warp * 4 + own) * GROUPS + source) * PITCH + start), queue)
        matches = uint32(0)
        for i in range(CANDIDATES):
            matches = uint32(matches | uint32(1 << i)) if queue[i] == picked else matches
        expert = int32(source * SIZE + start + cuda.ffs(skip_taken(matches, picked, holder, column)) - 1)
        weight, is_valid = float32(0), (column < TOPK) & (token + own < tokens)
        if is_valid:
            weight = fast_sigmoid(load_one(logits, (token + own) * EXPERTS + expert))  # of step 12, too
        total = weight
        for distance in (1, 2, 4):
            total += cuda.shfl_xor_sync(FULL, total, distance)
        if is_valid:
            weights[(token + own) * TOPK + column] = weight / total
            ids[(token + own) * TOPK + column] = expert

    return kernel


@cuda.jit(device=True)
def load_float(pointer, at):
    return pointer[at]


@cuda.jit(device=True)
def no_wait():
    pass


step("four tokens per warp", gate(make_four_tokens(load_wide, load_float, no_wait), tokens_per_warp=4, ctas_per_sm=6))

# %%
say(
    "`ctas_per_sm=6` asks the compiler for no more than 6 CTAs on an SM, 24 warps that hide each other's waits, so it may use up to 80 registers "
    "per thread. It takes {registers:.0f}; without this number it would take {unlimited:.0f}. The kernel executes {instructions:.1f} million "
    "instructions instead of {instructions_before:.1f}, and the ALU is busy for {ALU:.1f} us instead of {ALU_before:.1f}. It moves {mb:.1f} MB "
    "instead of {mb_before:.1f}, because a lane reads its bias once for four tokens.",
    unlimited=page.registers_without_limit("four tokens per warp"),
    **page.counted("keys alone", "four tokens per warp"),
)

# %%
page.miss("keys alone", "four tokens per warp")

# %%
say(
    "The estimate goes from {estimate_before:.1f} to {estimate:.1f} us although every pipe is less busy, because now all CTAs fit on the GPU at the "
    "same time. The model takes none of them to compute while others load, and so adds the time of L2 ({L2:.1f} us) to that of the ALU "
    "({ALU:.1f} us). A GPU overlaps more of the two than the model does.",
    **page.counted("keys alone", "four tokens per warp"),
)

# %% [markdown]
# **Take away.** If half of the lanes have nothing left to do, give them other work: redistribute through shared memory.
#
# ## Step 11: start before the others have ended
#
# A kernel normally starts when the one before it has ended completely. With **programmatic dependent launch** (compute capability 9.0) it may start
# while the other's last CTAs still run: its CTAs get their registers, read their parameters and compute their indices. Before it touches memory
# that the other kernel may write, it executes `griddepcontrol.wait`. The check of this step launches the kernel after another one that writes its
# logits late; without the wait it reads them too early.

# %%
last = gate(
    make_four_tokens(load_wide, load_float, griddepcontrol_wait), tokens_per_warp=4, ctas_per_sm=6, dependent=True
)
step("dependent launch", last)

# %%
page.miss("four tokens per warp", "dependent launch")

# %% [markdown]
# The early start can save little here: no CTA executes `griddepcontrol.launch_dependents`, so the next kernel starts when the last CTA of this one
# has ended. What is left to save is a part of the launch, which is short beside this kernel.
#
# (One more instruction can change what the compiler makes of all others. If *registers per thread* exceed 64, fewer CTAs fit on an SM, and the last ones
# start in a second **wave**, when the first ones have ended. Then the model lets some CTAs load while others compute, and its estimate falls further
# than the time.)
#
# This kernel is the package's for many tokens in all its ideas. [four_tokens_per_warp.py](../moe_numba/gate/four_tokens_per_warp.py) also handles
# NaN, other scorings and shapes, shared experts and padding, and spends fewer instructions on ranks and picks. The times of the package's kernel on
# this page are of another run than those of the steps.
#
# **Take away.** The end of one kernel and the start of the next can overlap. With few tokens that gains much more, as
# [the next lesson](02_gate_decode.ipynb) measures.
#
# ## Step 12: bfloat16 logits
#
# Many models compute logits in bfloat16: half the bytes to wait for. A bfloat16 is the upper half of a float32, so 16 bytes are the 8 logits of a
# lane. SGLang's kernel also computes and compares scores in the type of the logits (its `cmp_gt` and `cmp_eq` exist because the operators of half are
# ambiguous there). We compute them in float32, because it matters:

# %%
print(page.rounded_to_bfloat16())


# %%
@cuda.jit(device=True)
def load_bfloat16s(pointer, at, into):
    for i in range(0, HELD, 8):
        words = load_nc_u32x4(pointer, at + i)  # two logits in each
        for w in range(4):
            into[i + 2 * w] = uint_as_float(uint32(words[w] << uint32(16)))
            into[i + 2 * w + 1] = uint_as_float(uint32(words[w] & uint32(0xFFFF0000)))


@cuda.jit(device=True)
def load_bfloat16(pointer, at):
    return uint_as_float(uint32(uint32(pointer[at]) << uint32(16)))


halves = make_four_tokens(load_bfloat16s, load_bfloat16, griddepcontrol_wait)
step("bfloat16 logits", gate(halves, tokens_per_warp=4, ctas_per_sm=6, dependent=True, dtype="bfloat16"))

# %% [markdown]
# **Take away.** Load in the type that is there, compute in the type that the result needs.
#
# ## All steps
#
# Each row has the estimate, with the clocks of the slowest pipe in it, and the measured time:

# %%
page.chart()

# %%
say(
    "Read the chart from the top. In the first three steps the slowest pipe takes {first} of the estimate: the warps wait, for their own results, for "
    "local memory, and for cache lines. From *one warp per token* to *fast sigmoid* it takes {middle}, and each step removes instructions. In the "
    "other steps it takes {last}: the pipe limits less, and fewer instructions save less.",
    **page.shares_of_the_slowest_pipe(),
)

# %%
lesson.summary()

# %% [markdown]
# ## What did not pay, and why

# %%
page.what_did_not_pay()

# %% [markdown]
# ## Other kernels
#
# SGLang has replaced this kernel twice: by FlashInfer's `fused_topk_deepseek` ([PR 15347](https://github.com/sgl-project/sglang/pull/15347)) for shapes
# like this one, and by a Triton router ([PR 29771](https://github.com/sgl-project/sglang/pull/29771)). These are all the kernels of other projects that
# the record has, for today's shapes, timed in the same run as the package's:

# %%
page.peers()

# %% [markdown]
# **You can now** spread a small array over the lanes of a warp, rank by counting, let integers compare floats, and say from a table which pipe limits a kernel.
#
# ## Next step, not built
#
# **Predict.** The kernel of step 11 reads its logits from DRAM. How long would it take if they lay in the L2 cache already? Step 12 loads half of
# the bytes, which helps to guess. Replace the `...` by microseconds; a guess within a tenth of the time is right.

# %%
exercises.from_l2.check(last, ...)

# %%
page.open_problem(last)

# %%
lesson.save()

# %% [markdown]
# Each warp loads its four tokens, waits, computes, and ends. The other warps of the SM hide some of that wait, but not all: while the first wave of CTAs
# loads, no warp computes, and when the last ones compute, no warp loads. Loading the next tokens into *registers* did not pay (see the table above).
# **Build it with asynchronous copies**: `cp.async` or TMA brings the next four tokens into shared memory while the warp picks experts for the
# current ones, and needs no registers for it. The bound to beat is the time from L2 in the table. What does the kernel
# need then: how many CTAs, how many stages, which barrier? And what happens to the last, partly filled wave?
#
# With 64 tokens nothing of this matters. Then the chain of instructions of a single token is all there is, and that is the
# [next lesson](02_gate_decode.ipynb).
#
# ## Sources
#
# - The article: a walk through SGLang's `moe_fused_gate`, in Chinese. We compare [its claims](../docs/claims.md#gate) with our measurements.
# - The kernel: [sglang PR 4530](https://github.com/sgl-project/sglang/pull/4530), used since
#   [PR 5371](https://github.com/sgl-project/sglang/pull/5371). The article traces it to TensorRT-LLM and FasterTransformer.
# - NVIDIA: *CUDA C++ Programming Guide*, arithmetic throughput and independent thread scheduling; *PTX ISA*, `redux.sync` and `griddepcontrol`.
# - K. E. Batcher, *Sorting networks and their applications*, 1968.
#
# Before: [00, start here](00_start_here.ipynb). Next: [02, the gate for decode](02_gate_decode.ipynb).
