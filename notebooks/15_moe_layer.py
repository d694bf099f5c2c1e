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
# # The experts of a layer
#
# You have a gate, grouped GEMMs, dispatch and combine. This lesson assembles what lies between them: the experts of a layer, which is what
# `moe_numba.fused_experts` computes. vLLM and SGLang have a function of this name, too.
#
# The GEMMs are nearly all of the work, and they are done: [lesson 07](07_grouped_gemm.ipynb). The question is: **what else does a layer need, and what does
# it cost?** You start with a loop over experts in torch, and replace one stage after another by a kernel: the grouping of rows, SwiGLU, the
# weighted sum. Then comes the case in which none of this helps, a single token, and at the end the layer is distributed over several GPUs. Four device functions are
# yours to write.
#
# All sizes stand in `moe_numba/course/lessons/moe_layer/sizes.py`.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import math
from functools import cache

import torch
from numba import cuda, float32, int32, int64, uint32

from moe_numba.align.device_functions import make_scan
from moe_numba.course.lessons.moe_layer import draw, exercises
from moe_numba.course.lessons.moe_layer import runs as page
from moe_numba.course.lessons.moe_layer.runs import GEMV_WARPS, Decode, Stages, groups, layers, one, sums, swiglus
from moe_numba.course.lessons.moe_layer.sizes import EXPERTS, HIDDEN, INTERMEDIATE, MANY, TOKENS, TOPK
from moe_numba.course.steps.lesson import factory
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.moe_layer.gemv.bf16 import bf16_bits
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt  # for your answers

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
print(page.result())

# %% [markdown]
# ## The problem
#
# The gate gives each token `topk` experts and a weight for each. An element of `topk_ids` is an **assignment** of a token to an expert. A grouped
# GEMM wants the rows of an expert next to each other, so assignments are grouped by expert. An expert is a SwiGLU MLP with two matrices: `w13` computes
# *gate* and *up*, `w2` the expert's output from `silu(gate) * up`. Afterwards the rows of each token are added, with the weights of the gate.

# %%
torch.manual_seed(3)
draw.layer(torch.rand(6, 4).topk(2).indices.int(), num_experts=4)

# %% [markdown]
# What these stages read and write, for a layer of Qwen3-30B-A3B in bfloat16:

# %%
draw.tensors(TOKENS, MANY, EXPERTS, TOPK, HIDDEN, INTERMEDIATE)

# %% [markdown]
# ## What cannot be saved
#
# A layer must read the weights of every expert that has a token, once, and must compute the GEMMs. If each token's `k` of `E` experts are drawn uniformly
# at random, `n` tokens use `E (1 - (1 - k/E)^n)` experts on average. With `W` weights per expert, the GEMMs take `2 k n W` operations.

# %%
page.show_bounds()

# %% [markdown]
# With few tokens the layer is bound by memory: 64 tokens use nearly all experts, and each has a few rows. With many tokens it is bound by
# the tensor cores. So with few tokens the other stages must add little *latency*, and with many they must move few *bytes*.
#
# ## Formula: how many tokens are many?
#
# With many tokens all experts are read. From how many tokens on does computing take longer than reading?


# %%
def my_tokens_that_fill(num_experts, topk, bytes_per_weight, bytes_per_second, operations_per_second):
    return ...  # yours


exercises.tokens_that_fill.check(my_tokens_that_fill)

# %% [markdown]
# ## Step 1: a loop over experts
#
# For each expert the loop selects the tokens, runs two GEMMs, and adds the weighted rows to the output. The check compares with float64, rounded where
# kernels store bfloat16. It bounds the error of the whole output, of each row and of each element, and it must reject wrong layers.


# %%
def experts_in_torch(x, w13, w2, topk_weights, topk_ids, *_):
    out = torch.zeros(x.shape, device=x.device)
    for expert in topk_ids.unique().tolist():  # the CPU waits for the GPU
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)  # and waits again
        gate, up = (x[tokens] @ w13[expert].T).float().chunk(2, dim=1)
        activated = (torch.nn.functional.silu(gate) * up).bfloat16()
        out.index_add_(0, tokens, (activated @ w2[expert].T) * topk_weights[tokens, column, None])
    return out.bfloat16()


print("the loop:", page.check_loop(experts_in_torch))
page.show_wrong_layers()

# %% [markdown]
# ## Step 2: grouped GEMMs
#
# **Bottleneck.** The CPU. It issues a dozen operations for each expert, and it waits wherever the loop needs a size that is on the GPU.
#
# **Idea.** A grouped GEMM takes all experts in one launch, and group sizes stay on the GPU. The package's needs `seqlens` (rows of each expert, the `lengths` of
# lesson 07), `cu_seqlens` (where they begin, the `starts`) and `gather_indices` (the token of each row). The sum needs `inverse_indices` (the row of each
# assignment). Here are three stages in torch around the two GEMMs, none of which waits for the GPU:


# %%
def group_in_torch(ids, num_experts):
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    seqlens = zeros.scatter_add_(0, flat, torch.ones_like(flat))
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0))
    inverse = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=ids.device))
    return seqlens.int(), cu_seqlens.int(), (order // ids.shape[1]).int(), inverse.int().view(ids.shape)


def swiglu_in_torch(gate_up):
    gate, up = gate_up.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def sum_in_torch(rows, inverse, weights):
    gathered = rows.index_select(0, inverse.flatten().clamp(min=0)).view(*inverse.shape, -1)
    return (gathered * weights[..., None]).sum(1).bfloat16()


in_torch = Stages(group_in_torch, swiglu_in_torch, sum_in_torch)
layers.step("grouped GEMMs", in_torch)

# %% [markdown]
# A kernel time says nothing of the CPU, and the loop has none: while its CPU waits, no CUDA graph can be captured. So we compare **call times**.
#
# **Prediction.** The call time of a version is the number of its torch operations, times what one of them takes that waits for nothing, plus what calls of the
# package take. We measure that time with `group_in_torch`. This model says of the *loop* only what it would take if it never waited; the difference to
# what is measured is the waiting.

# %%
page.show_calls(experts_in_torch, {"grouped GEMMs": in_torch}, group_in_torch)

# %% [markdown]
# The grouped GEMMs save both: the waiting, which is what the loop takes beyond its prediction, and most operations.
#
# **Take away.** Before you make kernels faster, count what the CPU issues for them, and how often it waits.
#
# The other steps are compared by kernel time, in a CUDA graph, which is what a server replays.
#
# ## Step 3: grouping in one launch
#
# **Bottleneck.** Nearly every operation of `group_in_torch` launches a kernel, to sort a few hundred numbers.
#
# **Idea.** A **counting sort** in one CTA. Each warp counts a contiguous chunk of the assignments in counters of its own, in shared memory. A scan turns
# counts into offsets. Then each warp reads its chunk again, and writes each assignment to its row.

# %%
torch.manual_seed(3)
draw.counting_sort(torch.rand(32, 6).topk(2).indices, num_experts=6, warps=2)

# %% [markdown]
# The sort is **stable**: chunks are contiguous, a warp places 32 assignments at a time in order, and within these the lower lane comes first. The kernel has
# a hole: `position(expert)` says how many lower lanes have the same expert as this one, and how many lanes have it in all. `make_scan` is the two-level
# scan of [lesson 03](03_align_published.ipynb).


# %%
@factory
def make_group(position):
    @cache
    def group_of(sizes):
        num_experts, topk, warps = sizes
        num_counts, threads = warps * num_experts, 32 * warps
        scan = make_scan(threads)

        @cuda.jit
        def group(topk_ids, seqlens, cu_seqlens, gather_indices, inverse_indices, assignments):
            counts, starts = cuda.shared.array(num_counts, int32), cuda.shared.array(num_experts, int32)
            warp_sums = cuda.shared.array(32, int32)
            tid, lane = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x & 31)
            own, chunk = int32((tid >> 5) * num_experts), int32((assignments + threads - 1) // threads * 32)
            first = int32((tid >> 5) * chunk)
            end = int32(min(first + chunk, assignments))
            for i in range(tid, num_counts, threads):
                counts[i] = 0
            cuda.syncthreads()

            # each warp counts its chunk
            for i in range(first + lane, end, 32):
                cuda.atomic.add(counts, own + topk_ids[i], 1)
            cuda.syncthreads()

            # a thread for each expert: counts become those of lower warps, and a scan returns where the rows begin
            total = int32(0)
            if tid < num_experts:
                for warp in range(0, num_counts, num_experts):
                    counts[warp + tid], total = total, int32(total + counts[warp + tid])
            offset, _ = scan(total, warp_sums)
            if tid < num_experts:
                seqlens[tid], starts[tid], cu_seqlens[tid] = total, offset, offset
                if tid == num_experts - 1:
                    cu_seqlens[num_experts] = offset + total
            cuda.syncthreads()

            # each warp places its chunk, 32 assignments at a time
            for base in range(first, end, 32):
                i, expert = int32(base + lane), int32(num_experts)
                if i < end:
                    expert = topk_ids[i]
                earlier, equal = position(expert)  # <-- a hole
                if i < end:
                    row = int32(starts[expert] + counts[own + expert] + earlier)
                    gather_indices[row] = i // topk
                    inverse_indices[i] = row
                cuda.syncwarp()
                if i < end and earlier == 0:
                    counts[own + expert] += equal
                cuda.syncwarp()

        return group

    return group_of


# %% [markdown]
# ## Build: the position in a warp
#
# This is the rank in a warp of [lesson 04](04_align_one_launch.ipynb): take yours, or write it again.
#
# Write `position`. All 32 lanes call it, each with its expert; a lane without an assignment passes the number of experts. Return two numbers: how many *lower*
# lanes have the same expert, and how many lanes have it in all, this one included. Par: one instruction in which lanes exchange anything.


# %%
@cuda.jit(device=True)
def my_position(expert):
    pass  # yours; return two numbers


position = exercises.position.use(my_position)

# %% [markdown]
# **Prediction.** One launch. A warp visits its chunk twice, 32 assignments at a time, and waits each time for a load from L2; and there are six barriers, with
# those of the scan.

# %%
group_by_warps = make_group(position)
groups.step("torch", group_in_torch)
groups.step("a chunk per warp", group_by_warps, predicted_us=page.sort_us())

# %% [markdown]
# The prediction leaves out what threads do between barriers: a thread adds up the counts of all warps, one after the other, and the scan shuffles.
#
# In the layer, the kernel should save what it saves alone:

# %%
with_group = Stages(group_by_warps, swiglu_in_torch, sum_in_torch)
predicted_us = page.less("grouped GEMMs", groups, "torch", "a chunk per warp")
layers.step("grouping in one launch", with_group, predicted_us=predicted_us)

# %% [markdown]
# **Take away.** Sorting a few hundred numbers is a job for one CTA. What costs time in torch is not the sort, but the launches around it.
#
# ## Why stable?
#
# A sort that takes rows from an atomic counter is shorter:


# %%
@cuda.jit
def unstable(topk_ids, cu_seqlens, counters, gather_indices, inverse_indices, topk):
    i = int32(cuda.threadIdx.x)
    row = cu_seqlens[topk_ids[i]] + cuda.atomic.add(counters, topk_ids[i], 1)
    gather_indices[row] = i // topk
    inverse_indices[i] = row


# %% [markdown]
# **Choose.** The rows of an expert are then in the order in which threads arrive. "A": the check of the layer's output finds it. "B": only a check of
# the indices finds it. "C": nothing finds it, since all orders are right.

# %%
exercises.unstable.check(...)


# %% [markdown]
# In the simulator a seed determines the order of the threads:


# %%
def errors_by_seed():
    return [page.error_of_unstable(unstable, seed) or "none" for seed in range(4)]


print(in_simulator(errors_by_seed, functions=[unstable]))

# %% [markdown]
# ## Step 4: SwiGLU in one launch
#
# **Bottleneck.** torch converts to float32, splits, computes, multiplies and rounds, each in a kernel of its own, whose results travel through memory.
#
# **Idea.** One kernel reads gate and up once, and writes the result once. A word has two adjacent columns. A bfloat16 is the upper half of a float32, so a
# shift or a mask converts it. This stage and the next one are timed with many tokens, where bytes count.


# %%
@cuda.jit(device=True)
def low(word):
    return uint_as_float(uint32(uint32(word) << uint32(16)))


@cuda.jit(device=True)
def high(word):
    return uint_as_float(uint32(uint32(word) & uint32(0xFFFF0000)))


@cuda.jit(device=True)
def silu(gate):
    return gate / (float32(1) + math.exp(-gate))


@cuda.jit(device=True)
def activate_pair(gate, up):
    first, second = silu(low(gate)) * low(up), silu(high(gate)) * high(up)
    return int32(cvt_rn_bf16x2_f32(second, first))


@cuda.jit(device=True)
def activate_two(gate_up, out, row, word, words):
    at = int64(row) * (2 * words) + word  # a row has the words of gate, then those of up
    out[int64(row) * words + word] = activate_pair(gate_up[at], gate_up[at + words])


@factory
def make_swiglu(activate, columns):
    step = columns // 2

    @cuda.jit
    def swiglu(gate_up, out, words):
        row, word = int32(cuda.blockIdx.y), int32(step * (cuda.blockIdx.x * 128 + cuda.threadIdx.x))
        if word < words:
            activate(gate_up, out, row, word, words)  # <-- a hole

    return swiglu


# %% [markdown]
# **Prediction.** The bytes of gate, up and the result, at the rate of a copy.

# %%
swiglu_by_two = make_swiglu(activate_two, 2)
swiglus.step("torch", (swiglu_in_torch, 0))
swiglus.step("two columns", (swiglu_by_two, 2), predicted_us=page.swiglu_us())

# %% [markdown]
# ## Build: eight columns
#
# A thread that loads 4 bytes at a time needs four times as many instructions as one that loads 16, and has a quarter of the bytes in flight. Write
# `activate_eight`, which computes words `word` to `word + 3` of a row. `load_nc_u32x4(gate_up, at)` returns four words from word `at` on, which must be a multiple of 4, and
# `st_global_s32x4(out, at, a, b, c, d)` stores four. Par: 2 loads, and one store.


# %%
@cuda.jit(device=True)
def my_activate(gate_up, out, row, word, words):
    pass  # yours


activate_eight = exercises.activate_eight.use(my_activate)

# %% [markdown]
# **Prediction.** Where the kernel is already as fast as a copy of its bytes, nothing changes. Otherwise it now takes that time.

# %%
swiglu_by_eight = make_swiglu(activate_eight, 8)
swiglus.step("eight columns", (swiglu_by_eight, 8), predicted_us=page.swiglu_us())

# %% [markdown]
# In the layer, with its few tokens:

# %%
with_swiglu = Stages(group_by_warps, swiglu_by_eight, sum_in_torch)
predicted_us = page.less("grouping in one launch", swiglus, "torch", "eight columns")
layers.step("SwiGLU in one launch", with_swiglu, predicted_us=predicted_us)

# %% [markdown]
# If the layer saves more than predicted: the prediction scales the saving with the number of rows, but with few tokens it is launches that are saved, and their
# number does not fall with the rows.
#
# **Take away.** A chain of elementwise operations is one kernel. Its time is that of its bytes, whatever it computes.
#
# ## Step 5: SwiGLU in the epilogue
#
# **Idea.** The best launch is none. A tile of the first GEMM has gate and up of the same columns in registers, when it is finished. So its epilogue can compute
# SwiGLU and store half as much. The package's `group_gemm_silu_and_mul_bf16` does that; the tile then needs columns of gate and of up.
#
# **Prediction.** A launch less, and `gate and up` is neither written nor read.

# %%
fused = Stages(group_by_warps, moe_numba.group_gemm_silu_and_mul_bf16, sum_in_torch, True)
predicted_us = page.without_swiglu("SwiGLU in one launch")
layers.step("SwiGLU in the epilogue", fused, predicted_us=predicted_us)

# %% [markdown]
# **Take away.** If a result is read by one other kernel only, ask whether one of the two kernels can do the work of both.
#
# ## Step 6: the weighted sum
#
# `out[t] = sum over k of weight[t, k] * rows[inverse[t, k]]`.
#
# **Predict.** Let `R` be the bytes of all rows. How many times `R` do torch's gather, its multiplication by float32 weights, and its reduction move?

# %%
exercises.traffic.check(gather=..., multiplication=..., reduction=...)

# %% [markdown]
# A kernel could also add every row to its token by atomic additions, and would need no `inverse_indices`. But floating-point addition is not associative, so
# the bits would depend on which thread adds first:

# %%
terms = torch.tensor([1.0, 2.0**-24, 2.0**-24, -1.0])
print("in order:", float(((terms[0] + terms[1]) + terms[2]) + terms[3]))
print("another order:", float(((terms[1] + terms[2]) + terms[0]) + terms[3]))

# %% [markdown]
# **Idea.** A thread owns columns of a token. It reads them of the token's rows, in the order of k, and writes them once.


# %%
@cuda.jit(device=True)
def sum_two(rows, inverse, weights, out, words, topk, token, word):
    first, second = float32(0), float32(0)
    for k in range(topk):
        row, weight = inverse[token * topk + k], weights[token * topk + k]
        if row >= 0:
            pair = rows[int64(row) * words + word]
            first, second = cuda.fma(weight, low(pair), first), cuda.fma(weight, high(pair), second)
    out[int64(token) * words + word] = int32(cvt_rn_bf16x2_f32(second, first))


@factory
def make_sum(sum_columns, columns):
    step = columns // 2

    @cuda.jit
    def weighted_sum(rows, inverse, weights, out, words, topk):
        token, word = int32(cuda.blockIdx.y), int32(step * (cuda.blockIdx.x * 128 + cuda.threadIdx.x))
        if word < words:
            sum_columns(rows, inverse, weights, out, words, topk, token, word)  # <-- a hole

    return weighted_sum


# %% [markdown]
# **Prediction.** Nine eighths of `R`, at the rate of a copy.

# %%
sum_by_two = make_sum(sum_two, 2)
sums.step("torch", (sum_in_torch, 0))
sums.step("two columns", (sum_by_two, 2), predicted_us=page.sum_us())

# %% [markdown]
# **Bottleneck.** How fast are 4 bytes at a time? Copies of the same rows, with 4 and with 16 bytes per load, beside this kernel:


# %%
@cuda.jit
def copy_4_bytes(source, target, words):
    i = int32(cuda.blockIdx.x * 128 + cuda.threadIdx.x)
    if i < words:
        target[i] = source[i]


@cuda.jit
def copy_16_bytes(source, target, words):
    i = 4 * int32(cuda.blockIdx.x * 128 + cuda.threadIdx.x)
    if i < words:
        a, b, c, d = load_nc_u32x4(source, i)
        st_global_s32x4(target, i, int32(a), int32(b), int32(c), int32(d))


page.show_copies({"4 bytes": (copy_4_bytes, 4), "16 bytes": (copy_16_bytes, 16)}, (sum_by_two, 2))

# %% [markdown]
# A thread of the copy loads one word and ends. A thread of the sum loads `topk` rows, and so has more bytes in flight: that is why it can be faster than
# the copy with as narrow loads.
#
# ## Build: eight columns
#
# Write `sum_eight`, which adds words `word` to `word + 3` of a token's rows, in the order of k, as `sum_two` does it for one. A row number below 0 means that the
# assignment has no row. Par: per k a row number, a weight, and one load of the row; and one store.


# %%
@cuda.jit(device=True)
def my_sum(rows, inverse, weights, out, words, topk, token, word):
    pass  # yours


sum_eight = exercises.sum_eight.use(my_sum)

# %% [markdown]
# **Prediction.** The bytes at the rate of a copy, as before: if two columns already have it, eight gain nothing.

# %%
sum_by_eight = make_sum(sum_eight, 8)
sums.step("eight columns", (sum_by_eight, 8), predicted_us=page.sum_us())

# %% [markdown]
# In the layer, where the launches are saved again, whatever the number of rows:

# %%
with_sum = Stages(group_by_warps, moe_numba.group_gemm_silu_and_mul_bf16, sum_by_eight, True)
predicted_us = page.less("SwiGLU in the epilogue", sums, "torch", "eight columns")
layers.step("weighted sum in one launch", with_sum, predicted_us=predicted_us)

# %% [markdown]
# **Take away.** Read each byte once, write each byte once, and give a thread enough independent loads.
#
# ## The kernels beside the package's
#
# The package's kernels differ in details: they start while the kernel before still runs (programmatic dependent launch), `topk` is a constant, the sum loads the rows of
# all k before it adds the first, and more than one CTA sorts if there are many assignments.

# %%
page.show_package(group_by_warps, (swiglu_by_eight, 8), (sum_by_eight, 8))

# %% [markdown]
# The sum has a fixed order, and GEMMs compute each row independently of the others. So the bits of a token depend neither on the run nor on its place in the
# batch. They may depend on the *number* of tokens, which determines tiles: results are not batch-invariant.

# %%
print(page.same_bits())

# %% [markdown]
# ## Step 7: one token
#
# **Bottleneck.** With one token each of its experts has one row. There is nothing to group, and the first GEMM has fewer tiles than the GPU has SMs.
#
# **Idea.** Matrix-vector kernels (GEMV). A warp computes a dot product of a token and a row of weights: its lanes load adjacent 16-byte vectors, and multiply on CUDA
# cores, which is enough because each weight is used once. Two launches remain. The first one computes the activations of all assignments. The second one computes the
# rows of the token's experts, multiplies them by the gate's weights, and adds them, all in one warp per column.


# %%
@factory
def make_gate_up(dot):
    @cuda.jit
    def gate_up(x, w13, topk_ids, activated, topk, intermediate, words):
        item = int32(cuda.blockIdx.x * GEMV_WARPS + (cuda.threadIdx.x >> 5))  # a warp has one
        assignment = int32(item // intermediate)
        if assignment < topk:
            column = int32(item - assignment * intermediate)
            gate_row = int64(topk_ids[assignment]) * (2 * intermediate) + column
            gate = dot(x, int64(0), w13, gate_row * words, words)  # <-- a hole
            up = dot(x, int64(0), w13, (gate_row + intermediate) * words, words)
            if cuda.threadIdx.x & 31 == 0:
                activated[item] = bf16_bits(silu(gate) * up)

    return gate_up


@factory
def make_down(dot):
    @cuda.jit
    def down(activated, w2, topk_ids, topk_weights, out, topk, hidden, words):
        column, total = int32(cuda.blockIdx.x * GEMV_WARPS + (cuda.threadIdx.x >> 5)), float32(0)
        if column < hidden:
            for k in range(topk):  # in order
                row = int64(topk_ids[k]) * hidden + column
                product = dot(activated, int64(k) * words, w2, row * words, words)
                total = cuda.fma(topk_weights[k], product, total)
            if cuda.threadIdx.x & 31 == 0:
                out[column] = bf16_bits(total)

    return down


# %% [markdown]
# ## Build: a warp's dot product
#
# Write `dot`: the sum of the products of `x[x_at]`, ... and `w[w_at]`, ..., both of `words` words with two bfloat16 each, a multiple of 4. All 32 lanes of a warp call it
# with the same arguments and return the result. Each lane adds its part in float32, and shuffles add the lanes' parts. Par: loads of 16 bytes, and five shuffles.


# %%
@cuda.jit(device=True)
def my_dot(x, x_at, w, w_at, words):
    pass  # yours


dot = exercises.dot.use(my_dot)

# %% [markdown]
# Inputs with other experts rotate, so that no launch finds its weights in the L2 cache.
#
# **Prediction.** The weights of a token's experts at the rate of a copy, and two launches.

# %%
by_gemv = Decode(make_gate_up(dot), make_down(dot))
one.step("grouped GEMMs", (page.grouped_experts,))
one.step("GEMV", by_gemv, predicted_us=page.gemv_us())

# %% [markdown]
# **Bottleneck.** If these kernels gain little over the grouped GEMMs, and stay far above the prediction, they lack bytes in flight, as the narrow loads of step 6.
# As the kernels are written, a lane multiplies a pair of vectors before it loads the next, a warp of `down` goes through the experts one after the other, and
# between the two kernels no warp loads anything.
#
# **Idea.** The package's two kernels load several vectors before they multiply the first, and the second one loads its first weights while the first one still
# runs:

# %%
one.step("the package's GEMV", (moe_numba.fused_experts,), predicted_us=page.gemv_us())

# %% [markdown]
# **Take away.** With one row, reading the weights is all that counts, so keep bytes in flight from the first to the last. GEMV reads an expert's weights once for
# each of its tokens, so this path ends where tokens begin to share experts: `fused_experts` takes it for one token, and for a few if they share next to nothing.
#
# ## Step 8: several GPUs
#
# With several GPUs each **rank** has a part of the experts. A token is sent once to each rank that has one of its experts ([lesson 12](12_dispatch.ipynb)). That rank computes
# the weighted sum of its experts' rows, and combine adds the ranks' sums, in rank order ([lesson 13](13_combine.ipynb)). With few tokens the pair of
# [lesson 14](14_low_latency.ipynb) does both. `ExpertParallelMoE` is this layer. A rank sees local expert ids; experts of other ranks are -1, and the grouping skips
# them. Ranks must agree with one GPU that has all experts:

# %%
page.show_ranks()

# %% [markdown]
# A token with `topk` experts reaches fewer than `topk` ranks if a rank has several of them; your formula of [lesson 10](10_dispatch_layout.ipynb) says how many.
#
# Recorded times of a DeepSeek-V3 layer in FP8 with 32 experts on each GPU, and times that the authors of DeepGEMM published for 8 GPUs of this kind
# ([pull request 352](https://github.com/deepseek-ai/DeepGEMM/pull/352)). DeepGEMM's mega-MoE does dispatch, experts and combine in one kernel. We have not run it
# ourselves:

# %%
print(page.compare_with_others())
page.show_layers_on_ranks()

# %% [markdown]
# ## All steps, and others' kernels
#
# The record of `python -m moe_numba bench moe_layer`, on one GPU: the package, and the experts of vLLM, SGLang, FlashInfer, Transformers and others that we could run.
# (An empty field: not measured at this size.) The lower bound here counts the experts that the record's tokens have chosen, the first table those that tokens
# choose on average.

# %%
page.show_layers()

# %%
page.save()
layers.summary()

# %%
groups.summary()

# %%
swiglus.summary()

# %%
sums.summary()

# %%
one.summary()

# %% [markdown]
# ## What did not pay, and why
#
# An earlier version of this lesson timed these changes, with 4096 tokens unless the line says otherwise:

# %%
page.show_what_did_not_pay()

# %% [markdown]
# [Where a layer's time goes](../docs/layer_profile.md) has its launches one by one and the tests behind this table. [The experts in a Transformers
# model](../docs/transformers.md) and [What 64 GPUs would change](../docs/layer_on_64_gpus.md) go on from here.
#
# **You can now** assemble a layer, and say of each of its stages whether launches, bytes or operations limit it.
#
# ## Next step, not built
#
# Between the two GEMMs lies a tensor that is written once and read once, and the second GEMM starts only when the first has ended. **Build** a layer in one
# persistent kernel: a CTA that has finished the first GEMM's tiles of some rows raises a flag, and CTAs that wait for it begin with the second GEMM. With many tokens the bound to
# beat is that of the tensor cores; with few, reading the weights. [Lesson 16](16_one_kernel.ipynb) builds such flags for a layer on several GPUs. The bounds:

# %%
page.show_bounds()

# %% [markdown]
# ## Sources
#
# - Names of `topk_weights`, `topk_ids`, `w2`: vLLM's function `fused_experts`; `w13`: its layer's weight. Order of operations with several ranks:
#   [DeepEP](https://github.com/deepseek-ai/DeepEP).
# - Counting sort: D. Knuth, *The Art of Computer Programming*, volume 3, section 5.2.
# - The package's kernels: [`moe_numba/moe_layer`](../moe_numba/moe_layer); whole programs: [examples](../docs/examples).
#
# Before: [14, low-latency dispatch and combine](14_low_latency.ipynb). Next: [16, one kernel](16_one_kernel.ipynb), in which the launches of a layer on several
# GPUs become one.
