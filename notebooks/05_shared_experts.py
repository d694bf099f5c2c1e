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
# # Shared experts
#
# DeepSeek-V3 sends each token to 8 of 256 **routed experts**, and to one **shared expert**, which all tokens use. For a long time, servers gave the
# shared expert GEMMs of its own, and added its output at the end. An article about SGLang
# ([PR 4918](https://github.com/sgl-project/sglang/pull/4918)) **fuses** it with the others: the shared expert becomes expert number 256, which every
# token has as its ninth. The article reports that tokens come earlier: with 8 queries per second, the first one after 3.4 s instead of 6.3.
#
# This lesson has one question: **what does the fusion save?** You derive the weight of the ninth expert and write the kernel that appends it. Then
# you move that kernel into the gate, until nothing is left of it. On the way you collect what you need to answer the question.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import torch
from numba import cuda, float32, int32, uint32

from moe_numba import (
    fused_experts,
    group_gemm_bf16,
    group_gemm_blockwise_fp8,
    group_gemm_silu_and_mul_bf16,
    group_gemm_silu_and_mul_blockwise_fp8,
    per_token_cast_to_fp8,
)
from moe_numba.course.lessons.shared_experts import draw, exercises
from moe_numba.course.lessons.shared_experts import runs as page
from moe_numba.course.lessons.shared_experts.routing import (
    HELD,
    WORDS,
    fetch,
    lane_slice,
    load_bias,
    route,
    routing,
    unpack,
    with_column,
)
from moe_numba.course.lessons.shared_experts.sizes import EXPERTS, GATE_EXPERTS, GATE_TOPK, REPLICAS, SCALE, WARPS
from moe_numba.course.steps.lesson import factory

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = page.layers.step
print(page.result())

# %% [markdown]
# ## The problem
#
# An expert is an MLP with three matrices: `down(silu(gate x) * up x)`. The gate chooses a token's experts and gives each a weight. (DeepSeek's code
# calls the router `gate`; in this course the *gate* is the kernel that chooses.) One token, before and after the fusion:

# %%
weights, ids = page.many_tokens()
draw.problem(weights[0], ids[0], num_experts=GATE_EXPERTS, scale=SCALE)

# %% [markdown]
# This is the layer before, as the article prints it, without the sum over GPUs:
#
# ```python
# def forward_normal(self, hidden_states):
#     shared_output = self.shared_experts(hidden_states)
#     router_logits = self.gate(hidden_states)
#     final_hidden_states = self.experts(hidden_states, router_logits) * self.routed_scaling_factor
#     return final_hidden_states + shared_output
# ```
#
# ## Build: the ninth weight
#
# Let `w_1` to `w_8` be the weights of a token, `E_1` to `E_8` its experts, `S` the shared expert, and `s` the `routed_scaling_factor`, which is 2.5.
# Before the fusion, the layer computes the left side. After it, the layer computes the right side, and both must be equal:
#
# `s (w_1 E_1(x) + ... + w_8 E_8(x)) + S(x)  =  s (w_1 E_1(x) + ... + w_8 E_8(x) + w_9 S(x))`
#
# Write `nine_weights`. It takes `weights` of shape `[tokens, 8]` and returns nine columns. With `renormalize` the eight weights must first be divided
# by their sum. With `scaled` the nine weights contain the factor `s`, because the layer does not multiply its sum by `s` again.


# %%
def my_nine_weights(weights, s, renormalize, scaled):
    return ...  # yours


nine_weights = exercises.ninth_weight.use(my_nine_weights)

# %% [markdown]
# The table checks it, in float64, with a small layer. A check is worth something if it rejects wrong layers. A **replica** is a copy of the shared
# expert under a number of its own. All replicas compute the same, so a token must use exactly one of them.

# %%
page.show_ninth_weight(nine_weights)

# %% [markdown]
# ## What cannot be saved
#
# The article's server uses **tensor parallelism** on 8 GPUs: each GPU has one eighth of every expert, 3 x 7168 x 256 weights. With few tokens, reading
# them takes the time. An expert must be read if any token has chosen it, and is read once however many have. For random logits that are routed by
# DeepSeek-V3's rule:

# %%
page.show_lower_bound()

# %% [markdown]
# **Predict.** How many *more* experts does a GPU read than with a separate shared expert? With 64 tokens and the ninth column; with 64 tokens of which
# each uses one of 8 replicas, in turn; with 4 tokens and 8 replicas.

# %%
exercises.experts_read.check(ninth_column_64=..., replicas_64=..., replicas_4=...)

# %% [markdown]
# ## Step 1: a separate shared expert
#
# A step of this lesson is a whole layer: router, gate, alignment, two grouped GEMMs, and the weighted sum. `fused_experts` does all but
# the first two. Each step is checked with FP8 and with bfloat16 weights against float64, and its kernel launches are counted.
# On a GPU the steps are timed with 8 tokens, as in decoding, and with the weights of four layers in turn, which do not fit in the L2 cache.
#
# The gate's weights contain the factor `s`. `fused_experts` adds `shared` in the kernel of the weighted sum, so the addition costs no launch. (In FP8 both
# sides cast `x`. A server could share that cast, and then one launch less would be left to save.)


# %%
def experts(layer, x, weights, ids, count, shared=None):
    w13, w2, w13_scale, w2_scale = layer.experts(0, count)  # of the first `count` experts
    return fused_experts(x, w13, w2, weights, ids, w13_scale, w2_scale, shared=shared)


def shared_expert(layer, x):
    w13, w2, w13_scale, w2_scale = layer.experts(EXPERTS, EXPERTS + 1)
    ends = layer.ends(len(x))  # a grouped GEMM with one group is a GEMM
    if w13_scale is None:
        hidden = group_gemm_silu_and_mul_bf16(x, w13, None, None, offs=ends)
        return group_gemm_bf16(hidden, w2, None, None, offs=ends)
    x, x_scale = per_token_cast_to_fp8(x)
    hidden, scale = group_gemm_silu_and_mul_blockwise_fp8(x, w13, None, None, x_scale, w13_scale, offs=ends)
    return group_gemm_blockwise_fp8(hidden, w2, None, None, scale, w2_scale, offs=ends)


def separate(layer, x):
    weights, ids = layer.route(x)
    return experts(layer, x, weights, ids, EXPERTS, shared_expert(layer, x))


step("separate", separate)

# %% [markdown]
# The predictions below need to know what parts of this layer take alone. A *small operation* is one of torch on a table of 8 x 9 numbers.

# %%
parts = page.parts(shared_expert)

# %% [markdown]
# **Take away.** Before you make a change, write down which bytes and which operations it leaves as they are. The rest is the most that it can gain.
#
# ## Step 2: the ninth column in torch
#
# The article changes the routing only: it appends a column with expert 256 and its weight. Then all nine experts go into the same
# grouped GEMM. Our weights contain the factor `s` already, so the ninth one is 1.
#
# **Prediction.** The kernels of the shared expert disappear, but its weights must still be read. Four small operations are new: two that make
# the column and two that append it.


# %%
def ninth_in_torch(layer, x):
    weights, ids = layer.route(x)
    ids = torch.cat([ids, torch.full_like(ids[:, :1], EXPERTS)], dim=1)
    weights = torch.cat([weights, torch.ones_like(weights[:, :1])], dim=1)
    return experts(layer, x, weights, ids, EXPERTS + 1)


step("column in torch", ninth_in_torch, predicted_us=page.by_torch("separate", parts, operations=4))

# %% [markdown]
# Compare the launches: we have replaced the shared expert's kernels by kernels that move 72 numbers, and there are more of them. Yet the layer is
# faster. So the number of launches was not what was expensive: the shared expert alone takes many times as long as its weights need to arrive, because
# its first GEMM is cut into four tiles, each for one SM, and 128 SMs wait.
#
# **Take away.** A launch costs what its kernel leaves idle. A GEMM of one expert leaves most of the GPU idle; a kernel for 72 numbers is just a launch.
#
# ## Build: append a column
#
# Write the whole kernel. `topk_weights` and `topk_ids` have `tokens` rows of `topk` elements, `weights` and `ids` have `tokens` rows of `topk + 1`.
# All are passed as pointers, so element (t, c) of `ids` is `ids[t * (topk + 1) + c]`. There is a thread for each element of the output, and the last CTA
# has threads too many.
#
# - The first `topk` columns are copied.
# - The last column of token `t` is expert `num_experts + t % replicas`, with weight `shared_weight`.
# - A token whose first id is negative is **padding**: its last column gets id -1 and weight 0.
#
# Par: each warp stores 32 adjacent elements with one instruction. That makes 144 sectors of 32 bytes for 64 tokens.

# %%
draw.appended()


# %%
@cuda.jit
def my_append(topk_weights, topk_ids, weights, ids, tokens, topk, num_experts, replicas, shared_weight):
    pass  # yours


append_column = exercises.append_column.use(my_append)

# %% [markdown]
# ## Step 3: the ninth column in a kernel
#
# **Prediction.** One kernel replaces four operations, so three small operations disappear.


# %%
def ninth_by_kernel(layer, x):
    weights, ids = with_column(append_column, *layer.route(x), EXPERTS)  # one replica, weight 1
    return experts(layer, x, weights, ids, EXPERTS + 1)


step("column in a kernel", ninth_by_kernel, predicted_us=page.fewer_operations("column in torch", parts, 3))

# %% [markdown]
# **Take away.** Count the launches that a change adds beside those that it removes, and fuse the small ones first.
#
# ## Why replicas?
#
# The article does not stop here. All tokens choose expert 256, while a routed expert gets one token in 32. That looks unbalanced, so the article stores
# eight copies of the shared expert and gives each token one of them. These are the rows of each expert for 4096 tokens:

# %%
page.show_load()

# %% [markdown]
# Does imbalance cost time? A grouped GEMM cuts the rows of an expert into tiles, which form a **column of tiles**. If an SM has to process a
# whole column, the longest one determines the time. If every tile is scheduled on its own, only their number counts:

# %%
draw.schedules([1, 2, 1, 1, 2, 1, 8], workers=4, shared={6})

# %% [markdown]
# **Build: rounds.** Let a *round* be the time of one tile. `counts` has the rows of each expert; a tile has `tile_rows` rows; and each expert has
# `across` columns of tiles side by side, because its matrix is wider than a tile. Return two numbers for `sms` SMs: the rounds that single tiles need, and a
# lower bound for whole columns, from the longest column and from the number of all tiles.


# %%
def my_rounds(counts, tile_rows, across, sms):
    return ...  # yours


rounds = exercises.rounds.use(my_rounds)

# %%
page.show_rounds(rounds)

# %% [markdown]
# The grouped GEMMs of torch, of SGLang and of this package schedule single tiles.
#
# ## Step 4: eight replicas
#
# **Prediction.** We predict a loss. With single tiles there is nothing to balance, and each replica that is used has to be read. Eight tokens use all
# eight, so seven more experts are read.


# %%
def replicas_by_kernel(layer, x):
    weights, ids = with_column(append_column, *layer.route(x), EXPERTS, REPLICAS)
    return experts(layer, x, weights, ids, EXPERTS + REPLICAS)


step("8 replicas", replicas_by_kernel, predicted_us=page.more_experts("column in a kernel", 7))

# %% [markdown]
# The article's author measured the opposite, on a server with SGLang's Triton kernel: there one shared expert was slower than eight replicas. We cannot
# say why. SGLang dropped the replicas later ([PR 6736](https://github.com/sgl-project/sglang/pull/6736)).
#
# **Take away.** Ask how work is scheduled before you balance it.
#
# ## The gate has an idle lane
#
# The kernel of step 3 loads what the gate has just stored, and stores it again with one element more. So go back to the gate, the kernel of
# [lesson 02](02_gate_decode.ipynb), here with its device functions from the package. A warp routes a token. `route` returns to lane `k`
# the weight and the expert of column `k`; the lanes above have none. `store` is a hole:


# %%
@factory
def make_gate(store):
    @cuda.jit
    def gate(logits, bias, weights, ids, tokens):
        words, score = cuda.local.array(WORDS, uint32), cuda.local.array(HELD, float32)
        lane_bias = cuda.local.array(HELD, float32)
        lane, group, lane_in_group, first, valid = lane_slice()  # the experts that this lane holds
        token = int32(cuda.blockIdx.x * WARPS + (cuda.threadIdx.x >> 5))
        if token < tokens:  # the same for all lanes of a warp
            row = int32(token * GATE_EXPERTS)
            fetch(logits, row + first, valid, words)
            load_bias(bias, first, valid, lane_bias)
            unpack(words, valid, score)
            held = lane, group, lane_in_group, valid
            # no shared expert yet (0); weights are multiplied by SCALE
            weight, expert = route(logits, row, score, lane_bias, *held, float32(0), float32(SCALE))
            store(weights, ids, token, lane, weight, expert)  # <-- a hole: lane k has column k

    return gate


@cuda.jit(device=True)
def store_eight(weights, ids, token, lane, weight, expert):
    if lane < GATE_TOPK:
        weights[token * GATE_TOPK + lane] = weight
        ids[token * GATE_TOPK + lane] = expert


routing.step("gate, then append", (make_gate(store_eight), append_column))

# %% [markdown]
# A version is a tuple of kernels that are launched one after the other.
#
# ## Build: store nine columns
#
# Fill the hole so that the gate writes nine columns, the ninth of which is the shared expert: expert `GATE_EXPERTS` with weight 1. A row of the output has
# `GATE_TOPK + 1` elements. Par: two store instructions of a warp, as before.

# %%
draw.lanes()


# %%
@cuda.jit(device=True)
def my_store_nine(weights, ids, token, lane, weight, expert):
    pass  # yours


store_nine = exercises.store_nine.use(my_store_nine)

# %% [markdown]
# **Prediction.** The launch of an empty kernel disappears, at least. The kernel that is gone also waited for its own loads, of what the gate had just
# stored; we do not know for how long, so we leave that out.

# %%
predicted_us = page.launch_us("gate, then append")
routing.step("gate with nine columns", (make_gate(store_nine),), predicted_us=predicted_us)

# %% [markdown]
# ## Step 5: the ninth column in the gate
#
# The gate of the package does the same; `layer.route(x, 1)` asks it for one shared expert. Compared with step 3, the layer has one launch less.


# %%
def ninth_in_gate(layer, x):
    weights, ids = layer.route(x, 1)
    return experts(layer, x, weights, ids, EXPERTS + 1)


predicted_us = page.without_launch("column in a kernel")
step("column in the gate", ninth_in_gate, after="column in a kernel", predicted_us=predicted_us)

# %% [markdown]
# **Take away.** The cheapest kernel is a store that another kernel makes with an idle lane.
#
# ## Diagnose: what does the fusion save?
#
# The first cell has recorded times of a layer with torch's GEMMs, separate and fused. What makes the fused one faster? The check lists four candidates;
# the numbers that decide appear with your choice.

# %%
exercises.what_saves.check(...)

# %% [markdown]
# ## All sizes
#
# One table of all sizes, in microseconds. On its left is the layer with **torch's** grouped GEMMs, from the record of `python -m moe_numba bench
# shared_experts`: there the shared expert's activations are quantised by several small operations, so FP8 has many launches to save. On its right is
# **this package's** layer, with as few launches as we know how to make. *All alike* are 64 copies of one token, which all choose the same nine experts.

# %%
page.show_sizes(separate, ninth_in_gate, replicas_by_kernel)

# %% [markdown]
# Both layers read the same weights. If launches were all that the fusion saves, then each launch less would save the same:

# %%
page.show_saved_per_launch("separate", "column in the gate")

# %% [markdown]
# It does not. With torch's kernels in FP8, most of the gain are launches of small operations. This package has few launches to save, and each is worth
# more: what it saves are the shared expert's own two GEMMs, which fill a few SMs while the others wait. (Our separate shared expert is a grouped GEMM with
# one group. A dense GEMM is a better one; this is what the fusion saves then, with the package's grouped GEMM in torch's layer:)

# %%
page.show_dense()

# %% [markdown]
# With some hundred tokens a dense GEMM fills the SMs by itself, and nothing is left to save.
#
# With thousands of tokens, the launches of torch's layer are no longer small: they quantise and add rows of 7168 numbers for each token. Then the fusion
# also saves their work. And torch chooses its tiles by the *average* number of rows of an expert, which the ninth column raises:

# %%
print(page.torch_tiles())

# %% [markdown]
# Where the tiles differ, the table compares two different kernels. That is also why the article's author had to tune the GEMM again.
#
# **Take away.** A fusion gains what the separate kernels wasted: launches, and SMs without work.
#
# ## What a layer can explain
#
# The article measured a server with 8 H200, with replicas. **TTFT** is the time to the first token, **ITL** the time between two tokens. DeepSeek-V3 has 58 layers with
# experts. A token of the output passes all of them once, and so does a prompt. The table takes, for each metric, the number of tokens where 58 layers
# with replicas save most. A prompt usually runs without a CUDA graph, so the CPU, too, has fewer kernels to launch:

# %%
page.show_explained()

# %% [markdown]
# So the layers alone do not make the first token come that much earlier. A server has queues: if each step takes a little less time, a
# queue gets shorter, and waiting can shrink by more than the step did. We have no server here, and did not measure that.
#
# ## What did not pay, and why

# %%
page.show_what_did_not_pay()

# %% [markdown]
# ## All steps

# %%
page.save()
page.layers.summary()

# %%
routing.summary()

# %% [markdown]
# **You can now** say before you build a fusion what it can save: bytes, arithmetic, launches, or SMs without work.
#
# ## Next step, not built
#
# The fusion makes the shared expert wait for the gate, although it needs no routing. **Build** the opposite: launch its GEMMs on a second stream before
# the router, so that they read weights while the gate and the alignment leave DRAM idle, and let `fused_experts` add the result (`shared=`). Which of
# the launches that we have saved come back, and do they still cost time? The most that this can gain over step 5:

# %%
print(page.lower_bound_of_overlap())

# %% [markdown]
# ## Sources
#
# - The article: BBuf (GiantPandaCV), 分享一个DeepSeek V3和R1中 Shared Experts和普通Experts融合的一个小技巧, in Chinese. We compare
#   [its claims](../docs/claims.md#shared-experts) with our measurements. How a checkpoint is loaded with the shared expert as expert 256, and what replicas
#   cost in memory: [a page on the weights of shared experts](../docs/shared_expert_weights.md).
# - The idea: DiegoD94, [vllm 15502](https://github.com/vllm-project/vllm/pull/15502).
# - SGLang: [PR 4918](https://github.com/sgl-project/sglang/pull/4918), the fusion; [PR 5371](https://github.com/sgl-project/sglang/pull/5371), in the gate; [PR
#   6736](https://github.com/sgl-project/sglang/pull/6736), no replicas.
# - DeepSeek-AI: [DeepSeekMoE](https://arxiv.org/abs/2401.06066), which introduces shared experts; [DeepSeek-V3 Technical
#   Report](https://arxiv.org/abs/2412.19437).
#
# Before: [04, alignment in one launch](04_align_one_launch.ipynb). Next: [06, a Hopper GEMM](06_hopper_gemm.ipynb), the kernel that reads all these weights.
