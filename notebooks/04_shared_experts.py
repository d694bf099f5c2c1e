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
# # Shared experts: a ninth expert for every token
#
# DeepSeek-V3 sends each token to 8 of 256 experts, and every token also to one more, the **shared expert** (共享专家).
# The shared expert has a place of its own in the code: its own matrices, its own matrix products, and a sum at the end.
# But it has the same shape as the others. So it can be one of them: expert number 256, which every token chooses as its
# ninth. Then one grouped matrix product does all the work.
#
# This notebook follows a Chinese article about that trick in SGLang. Its author tells (0x0, 前言) how it came about:
# [DiegoD94](https://github.com/vllm-project/vllm/pull/15502) tried it in vLLM and wrote a
# [technical document](https://docs.google.com/document/d/1iXgzR6Mt6s0DpT7w2Pz93ExlUJ-nnSnU_o9Sqd8TE34); throughput and
# both latencies gained; and over a weekend it was built for SGLang too, as [PR
# 4918](https://github.com/sgl-project/sglang/pull/4918). No CUDA code had to change, because SGLang's
# `moe_align_block_size` could already sort more than 256 experts. The article thanks DiegoD94, and so do we.
#
# There is little kernel code in it. What there is to learn is how to find out what a change is worth: what must stay
# the same, what gets less, and how much of a server's gain one layer can explain.
#
# As in the other notebooks, everything runs on a GPU, and small in a simulator on any computer. Times that you see
# without a GPU are recorded ones and say so.

# %%
import moe_numba  # before Numba: it decides whether there is a GPU, or the simulator must do

print("the simulator" if moe_numba.simulator.ENABLED else "a GPU", "runs the kernels:", moe_numba.simulator.REASON)

# %%
import inspect
import json
import tempfile
import time
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from IPython.display import Markdown
from numba import cuda, int32
from safetensors import safe_open
from safetensors.torch import save_file

from moe_numba import simulator
from moe_numba.align.reference import mismatch as align_mismatch
from moe_numba.course.bench import call_times, kernel_times, plots, records
from moe_numba.course.bench.baselines import limits, torch_layer
from moe_numba.course.bench.baselines.torch_layer import FP8, NAMES, SMALL, TP8, Layer, mismatch, moe_numba_grouped_gemm
from moe_numba.course.bench.layer_figure import layer_bars
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.bench.topics.shared_experts import GATES, layer_times
from moe_numba.course.draw import shared_experts as draw
from moe_numba.course.ladder import Ladder
from moe_numba.gate.reference import biased_grouped_topk as reference_gate
from moe_numba.runtime.launch import launch
from moe_numba.shared_experts import fuse_checkpoint, fuse_routing, memory_cost, reference

HERE = torch_layer.notebook_sizes()  # DeepSeek-V3's layer on a GPU, a small one in the simulator
DEVICE = HERE.device
SHARED = records.recorded("shared_experts")  # what `python -m moe_numba bench shared_experts` measured

# %% [markdown]
# ## 1. The problem in one picture
#
# An **expert** (专家) is a small network of three matrices, an **MLP**: `down(silu(gate x) * up x)`. The **routed
# experts** (路由专家) are those that a router chooses. For each token it chooses the best `topk`, here 8, and gives
# each a weight. The layer's result is the weighted sum of the eight outputs, times a constant, `routed_scaling_factor`
# (2.5 for DeepSeek-V3), plus the shared expert's output. A picture of one token:

# %%
torch.manual_seed(0)
MANY_LOGITS, MANY_BIAS = torch.randn(4096, 256), torch.rand(256) * 0.1
MANY_WEIGHTS, MANY_IDS = reference_gate(MANY_LOGITS, MANY_BIAS, 8, num_expert_group=8, topk_group=4)

draw.problem(MANY_WEIGHTS[0], MANY_IDS[0], num_experts=256, scale=2.5)

# %% [markdown]
# In vLLM and SGLang a token's **hidden state** (隐藏状态, the vector that stands for it) went through the shared
# expert first, then through the kernel for the routed ones (FusedMoE), and then the two were added. After the change
# there are 257 experts, a token has nine of them, and the ninth is always the shared one. No sum is left but the
# weighted one.
#
# Three words that are easily mixed up. DeepSeek's code calls the *router* `gate`; in this course the *gate* is what
# chooses the experts from the router's scores ([notebook 01](01_gate.ipynb)); and each expert's first matrix is called
# `gate_proj`.
#
# ## 2. The reference
#
# This is the layer's code before the change, as the article has it. (On the page `is not None` has lost its spaces.)
# `tensor_model_parallel_all_reduce` adds up the shares of the GPUs that work on the same tokens. We look at one GPU,
# and neither side of our comparison does that sum.


# %%
def tensor_model_parallel_all_reduce(share):
    return share  # one GPU's share is all there is here


class DeepseekV2MoE:
    """The article's layer; ``layer`` has the weights."""

    def __init__(self, layer):
        self.n_shared_experts = layer.shape.n_shared_experts
        self.routed_scaling_factor = layer.shape.routed_scaling_factor
        self.tp_size = 8
        self.gate, self.shared_experts = layer.logits, layer.shared_experts
        self.experts = lambda hidden_states, router_logits: layer.experts(
            hidden_states, *layer.choose(router_logits), layer.shape.num_experts
        )

    def forward_normal(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if self.n_shared_experts is not None:
            shared_output = self.shared_experts(hidden_states)
        # router_logits: (num_tokens, n_experts)
        router_logits = self.gate(hidden_states)
        final_hidden_states = (
            self.experts(hidden_states=hidden_states, router_logits=router_logits) * self.routed_scaling_factor
        )
        if shared_output is not None:
            final_hidden_states = final_hidden_states + shared_output
        if self.tp_size > 1:
            final_hidden_states = tensor_model_parallel_all_reduce(final_hidden_states)
        return final_hidden_states


exact = Layer(SMALL, torch.float64, DEVICE)
x = exact.tokens(9)
before = DeepseekV2MoE(exact).forward_normal(x)
print(
    "forward_normal against the package's reference:", mismatch(before, exact.expected(x), torch.float64) or "the same"
)

# %% [markdown]
# ### The ninth weight
#
# Let `w_k` be the eight weights, `E_k` the chosen experts, `S` the shared one, and `s` the scaling factor. The layer
# computes the left side. We want the right one, with a ninth term inside the sum:
#
# `s * (w_1 E_1(x) + ... + w_8 E_8(x)) + S(x)  =  s * (w_1 E_1(x) + ... + w_8 E_8(x) + w_9 S(x))`
#
# So `s * w_9 = 1`, and **the ninth weight is `1 / s`**. The article says: in `grouped_topk` the weight of the ninth,
# the shared expert, is divided by `routed_scaling_factor` beforehand, so that the numbers stay the same (数值等价).
#
# This is an equation between real numbers. A computer rounds. In float64 the two sides agree to the last digits. But
# the package's routing is float32, and `1 / 2.5` is no float32 number, which costs 8 digits of the 16. In bfloat16 and
# FP8 nobody will see that. And a check must be able to fail, so here are three wrong fusions too.

# %%
WEIGHTS, IDS = exact.route(x)
SCALE, FIRST_SHARED = SMALL.routed_scaling_factor, SMALL.num_experts
COPIES = Layer(SMALL, torch.float64, DEVICE, replicas=8)  # the same numbers: replicas come last


def appended(replicas=1, scale=SCALE, policy="round_robin"):
    """The routing in float64 with its ninth column, by the package's reference."""
    return reference.fuse_routing(WEIGHTS.double(), IDS, FIRST_SHARED, replicas, scale, policy)


def fused_in_float32(replicas=1):
    return fuse_routing(WEIGHTS, IDS, FIRST_SHARED, replicas, SCALE, "round_robin")


FUSIONS = {
    "one shared expert": appended(),
    "8 replicas": appended(8),
    "one, weight in float32": fused_in_float32(),
    "wrong: the ninth weight is 1": appended(scale=1.0),
    "wrong: all 8 replicas added": appended(8, policy="all"),
    "wrong: the ninth weight is left out": appended(scale=1e30),
}
WRONG = {}
for name, (weights, ids) in FUSIONS.items():
    after = COPIES.fused(x, weights, ids)
    error = float((after - before).norm() / before.norm())
    WRONG[name] = mismatch(after, before, torch.float32 if "float32" in name else torch.float64)
    print(f"{name:<36} relative error {error:.1e}: {WRONG[name] or 'right'}")
assert all(bool(wrong) == name.startswith("wrong") for name, wrong in WRONG.items())

# %% [markdown]
# A **replica** is a copy of the shared expert. More about them in section 5. All replicas give the same output, so it
# does not matter which one a token takes, as long as it takes one. A model may also have several *distinct* shared
# experts (DeepSeek-V2 has two). Those are all added, each in a column of its own.
#
# Now the same in the types that are used. `mismatch` compares with float64. It allows a token's result to be off by a
# part of its length: 1 % in bfloat16, whose numbers have 8 significant bits, and 8 % in **FP8**, whose numbers have 4
# (and somewhat more in this small layer, where a few numbers make a result). In FP8 each row of a matrix has a scale of
# its own, and each token's row is scaled and rounded on the fly (**quantised**) before each product, on both sides of
# the comparison.

# %%
for dtype in (torch.float32, torch.bfloat16, FP8):
    layer = Layer(SMALL, dtype, DEVICE, replicas=8)
    tokens = layer.tokens(9)
    right = layer.expected(tokens)
    results = {"before": layer.separate(tokens), "after": layer.fused(tokens, *layer.route(tokens, 1))}
    for replicas in (2, 8):
        routing = fuse_routing(*layer.route(tokens), FIRST_SHARED, replicas, SCALE, "random")
        results[f"after, {replicas} replicas"] = layer.fused(tokens, *routing)
    for name, out in results.items():
        error = float((out.double() - right).norm() / right.norm())
        assert not mismatch(out, right, dtype), f"{NAMES[dtype]}, {name}: {mismatch(out, right, dtype)}"
        print(f"{NAMES[dtype]:<14} {name:<18} relative error {error:.1e}")

# %% [markdown]
# After is as good as before, and what is left of the error comes from the types. With the fusion in, the article's
# author ran GSM8K, a test of 1319 school problems, on the branch `support_r1_shared_expers_fusion`:
#
# ```text
# ➜  python3 benchmark/gsm8k/bench_sglang.py --num-questions 2000 --parallel 2000 --num-shots 8
# 100%|████████████████████████████████████| 1319/1319 [01:08<00:00, 19.14it/s]
# Accuracy: 0.952
# Invalid: 0.000
# Latency: 69.547 s
# Output throughput: 1998.856 token/s
# ```
#
# ## 3. The floor: what does the fusion save?
#
# The article's server runs DeepSeek-V3 on 8 GPUs with **tensor parallelism** (TP8): each GPU, or **rank**, holds an
# eighth of every expert. One expert's share is 3 x 7168 x 256 weights. With few tokens the time goes into reading
# weights: an expert that any token has chosen must be read once.


# %%
LIMITS = limits.H200 if HERE.untimed else limits.chip_limits()  # of the GPU whose times are shown
print(LIMITS)
BANDWIDTH = LIMITS.copy_bandwidth  # bytes per second
RATES = LIMITS.tensor_flops  # operations per second
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}  # of a weight


def experts_chosen(tokens, shape=TP8):
    """How many of the routed experts at least one of so many tokens has chosen, on average."""
    return shape.num_experts * (1 - (1 - shape.topk / shape.num_experts) ** tokens)


def weights_us(experts, dtype="bfloat16"):
    """The time to read so many experts' weights, in microseconds."""
    return experts * TP8.expert_weights * BYTES[dtype] / BANDWIDTH * 1e6


def floor_us(tokens, dtype="bfloat16"):
    """The least time for a layer, shared expert included: its bytes or its operations, in microseconds."""
    flops = 2 * tokens * (TP8.topk + 1) * TP8.expert_weights
    return max(weights_us(experts_chosen(tokens) + 1, dtype), flops / RATES[dtype] * 1e6)


print("tokens   experts read   floor in bfloat16   of which the shared one   floor in FP8")
for tokens in (1, 8, 64, 256, 1024, 4096):
    part = weights_us(1) / weights_us(experts_chosen(tokens) + 1)
    print(
        f"{tokens:6}   {experts_chosen(tokens):12.0f}   {floor_us(tokens):14.1f} us   {100 * part:21.1f} %   "
        f"{floor_us(tokens, 'float8_e4m3fn'):9.1f} us"
    )
DECODE, BATCH, PREFILL = 8, 64, 1024  # tokens in the ladder, on a GPU: few users, many users, and a prompt
FLOOR_US = floor_us(DECODE)

# %% [markdown]
# The floor tells something at once. Before and after, the same weights are read and the same products are done. **The
# fusion saves no weight and no product.** What it can save is everything else: the start of the shared expert's own
# kernels, and the time in which they leave most of the GPU idle. A product of 64 rows with one expert's share has few
# tiles, so few of the 132 multiprocessors have any work.
#
# Two more things follow. With one token there are nine experts to read, and the shared one is a ninth of it. With 64
# tokens it is less than a hundredth. So the gain must shrink with the tokens. And whatever adds bytes, such as
# replicas, costs something as long as reading weights is the limit.
#
# ## 4. The ladder
#
# The steps are whole layers: router, gate, alignment, two grouped products, and the weighted sum, for DeepSeek-V3's
# shapes on one of 8 GPUs. The gate and the alignment are this package's ([01](01_gate.ipynb), [02](02_align.ipynb)).
# The products are torch's, `torch._grouped_mm` in bfloat16 and `torch._scaled_grouped_mm` in FP8. Between them stand
# torch operations. Another grouped product can be put in their place, `Layer(..., grouped=...)`, and in the end we put
# our own there. This is the layer:

# %%
Markdown("```python\n" + inspect.getsource(Layer.experts) + "```")

# %%
Markdown("```python\n" + inspect.getsource(Layer.shared_experts) + "\n" + inspect.getsource(Layer.separate) + "```")

# %% [markdown]
# Main size: 8 tokens in bfloat16, as in decoding (a server that writes answers, a token at a time for each user).
# Beside it each step is timed for 1 and for 64 tokens, for 1024 tokens (**prefill**, reading a prompt), and in FP8.
# Four layers' weights take turns, because a model's next layer does not find its weights in the cache either. Each step
# is checked in all five settings before it is timed.


# %%
def setting(dtype, tokens):
    """Layers whose weights take turns, tokens, and what the first layer must make of them."""
    first = LAYERS[dtype][0]
    x = first.tokens(tokens)
    return LAYERS[dtype], x, first.expected(x)


LAYERS = {}
for dtype in (torch.bfloat16, FP8):
    first = Layer(HERE.shape, dtype, DEVICE, replicas=HERE.replicas)
    LAYERS[dtype] = [first, *(first.clone() for _ in range(HERE.layers - 1))]
MAIN = setting(torch.bfloat16, HERE.decode)
OTHERS = {
    "one": setting(torch.bfloat16, 1),
    "batch": setting(torch.bfloat16, HERE.batch),
    "prefill": setting(torch.bfloat16, HERE.prefill),
    "fp8": setting(FP8, HERE.decode),
}
SAYS = {"one": "1 token", "batch": f"{BATCH} tokens", "prefill": f"{PREFILL} tokens", "fp8": f"{DECODE} tokens, FP8"}
EXPERTS, REPLICAS = HERE.shape.num_experts, HERE.replicas

ladder = Ladder(
    "shared_experts_ladder",
    lambda out: mismatch(out, MAIN[2], torch.bfloat16),
    title=f"Folding the shared expert in: {DECODE} tokens, bfloat16, DeepSeek-V3 on one of 8 GPUs",
    reference_name="separate",
    config={
        "num_experts": EXPERTS,
        "topk": HERE.shape.topk,
        "hidden_size": HERE.shape.hidden_size,
        "moe_intermediate_size": HERE.shape.moe_intermediate_size,
    },
    size={"tokens": HERE.decode},
    untimed=HERE.untimed,
)
us = ladder.median_us  # a step's median time, measured now or recorded


def measure(name, forward, predicted, others=OTHERS, **more):
    """Check and time ``forward(layer, x)`` in all settings."""
    with ladder.attempt(name, "bfloat16"):
        for which, (layers, x, right) in others.items():
            wrong = mismatch(forward(layers[0], x), right, layers[0].dtype)
            assert not wrong, f"{name}, {SAYS[which]}: {wrong}"
            calls = [partial(forward, layer, x) for layer in layers]
            often = {"launches": len(calls), "replays": 12} if which == "prefill" else {}
            stats = None if ladder.untimed else kernel_times({"": calls}, **often)[""]
            more[f"{which}_us"] = stats and stats.median
        layers, x, _ = MAIN
        calls = [partial(forward, layer, x) for layer in layers]
        ladder.step(
            name,
            calls[0],
            timed=calls,
            dtype="bfloat16",
            prediction_us=round(predicted, 1),
            floor_us=FLOOR_US,
            launches=torch_layer.count_kernels(calls[0]),
            **more,
        )


def look_back(name, before=None, predicted=None):
    """What the step gained in each setting, and how many kernels it starts."""
    ladder.report(name, before, predicted, FLOOR_US)
    row, old = ladder.row(name), ladder.row(before) if before else None
    if row and "launches" in row:
        print(f"    {row['launches']} kernels" + (f" (before: {old['launches']})" if old else ""))
    for which, says in SAYS.items():
        now, then = us(name, f"{which}_us"), us(before, f"{which}_us") if before else None
        if now:
            change = f" (before: {then:.1f} us, {now - then:+.1f})" if then else ""
            print(f"    {says}: {now:.1f} us{change}")


# %% [markdown]
# ### Step 0: the shared expert apart
#
# **Idea.** The layer as it was: `forward_normal`.
#
# **Prediction.** Three guesses go into it, and they are written down here before anything is measured: torch's grouped
# product reads weights at 70 % of the bandwidth, a small kernel costs 2 us, and a plain product of a few rows with one
# expert's share takes 10 us, because it has so few tiles. Let us count kernels. A grouped product is two: one prepares
# addresses and sizes for the other.

# %%
EFFICIENCY, START_US, SMALL_GEMM_US = 0.7, 2.0, 10.0
ROUTED_KERNELS = {
    "router": 1,
    "gate": 1,
    "alignment": 1,
    "ends of the experts": 1,
    "weights by slot": 1,
    "tokens by slot": 2,
    "gate_up product": 2,
    "silu, times up": 2,
    "times weight": 1,
    "down product": 2,
    "where each slot went": 3,
    "rows back": 1,
    "sum": 1,
    "times scaling factor": 1,
}
SHARED_KERNELS = {"gate_up product": 1, "silu, times up": 2, "down product": 1, "added": 1}
COUNT = sum(ROUTED_KERNELS.values()), sum(SHARED_KERNELS.values())

prediction = (
    weights_us(experts_chosen(DECODE)) / EFFICIENCY
    + START_US * (COUNT[0] - 4)  # all but the grouped products
    + START_US * (COUNT[1] - 2)
    + 2 * SMALL_GEMM_US
)
print(f"{COUNT[0]} kernels for the routed experts, {COUNT[1]} for the shared one; prediction: {prediction:.0f} us")


def separate(layer, x):
    return layer.separate(x)


measure("separate", separate, prediction)

# %%
look_back("separate", predicted=prediction)
if row := ladder.row("separate"):
    print(
        f"{row['launches']} kernels were started, {sum(COUNT)} were counted; "
        f"measured / predicted is {us('separate') / prediction:.2f}"
    )

# %% [markdown]
# **Look back.** By our count most of this time is one thing: reading the weights of the chosen experts. The ratio to
# the floor says how far torch's layer is from that. One guess was too good: the record of section 5 has the products
# alone, and torch's grouped product reads weights at little more than half of the bandwidth here, not at 70 %. That is
# a good part of what the prediction missed. These products are not our subject yet; what the fusion can win is in the
# rest. In FP8 the layer starts more kernels than in bfloat16, since each quantisation is four or five torch operations.
# A server has one kernel for them. Keep this in mind when FP8 looks better below than it would be in a server.
#
# ### Step 1: the ninth column, by torch
#
# **Idea.** Fold it in as the article does. The gate is asked for nine experts. The last column is then overwritten:
# with the number of the shared expert, and with the weight that makes the equation of section 2 true. The article's
# line for the ids, with its names:
#
# ```python
# topk_ids[:, -1] = torch.randint(
#     low=num_experts,
#     high=num_experts + n_share_experts_fusion,
#     size=(topk_ids.size(0),),
#     dtype=topk_ids.dtype,
#     device=topk_ids.device,
# )
# ```
#
# The line is made for several replicas: each token takes one at random. With one shared expert all get number 256. Its
# picture of the change to the weights is missing in the text that we have; in the merged change the weights are not yet
# divided by their sum at this place, so the ninth becomes the sum of the other eight, divided by the scaling factor.
#
# **Prediction.** Five kernels of the shared expert go, two of them products. The torch operations that overwrite the
# column come: seven, by our count. The grouped product reads one expert more.


# %%
def append_by_torch(topk_weights, topk_ids, num_experts, n_share_experts_fusion, routed_scaling_factor):
    """The article's ninth column; the weights come in before they are divided by their sum."""
    topk_ids[:, -1] = torch.randint(
        low=num_experts,
        high=num_experts + n_share_experts_fusion,
        size=(topk_ids.size(0),),
        dtype=topk_ids.dtype,
        device=topk_ids.device,
    )
    topk_weights[:, -1] = topk_weights[:, :-1].sum(dim=-1) / routed_scaling_factor
    return topk_weights / topk_weights[:, :-1].sum(dim=-1, keepdim=True), topk_ids


def by_torch(layer, logits, replicas=1):
    """Gate and ninth column: nine experts are chosen, and one is thrown away."""
    nine = layer.choose(logits, topk=layer.shape.topk + 1, renormalize=False)
    return append_by_torch(*nine, layer.shape.num_experts, replicas, layer.shape.routed_scaling_factor)


def folded_by_torch(layer, x, replicas=1):
    return layer.fused(x, *by_torch(layer, layer.logits(x), replicas), layer.shape.num_experts + replicas)


gain = START_US * (COUNT[1] - 2) + 2 * SMALL_GEMM_US - 7 * START_US - weights_us(1) / EFFICIENCY
prediction = (us("separate") or prediction) - gain
measure("ninth column by torch", folded_by_torch, prediction)

# %%
look_back("ninth column by torch", "separate", prediction)

# %% [markdown]
# **Look back.** The kernels before and after tell the trick's weak point: what the shared expert's kernels gave back,
# the operations on a little table of 8 x 9 numbers take again. In bfloat16 the layer is about even with 8 and with 64
# tokens, where we had hoped for a little, and loses with 1 and 1024. With 1024 tokens something else grows too: the
# ninth slot's rows are gathered, put back and summed like those of the other eight, and torch reads and writes them
# each time. In FP8 it gains most. The shared expert's products had rows of their own to quantise, and these operations
# are gone. In SGLang this code ran inside `torch.compile`, which makes fewer kernels of the little ones. We shall need
# none.
#
# ### Step 2: replicas
#
# **Idea.** Every token goes to expert 256. With 64 tokens it has 64 rows where others have two. The article supposes
# that such an uneven load makes the computation inefficient (计算效率低), and that copies are made for this reason: as
# many as there are ranks, `tp_size = 8`. Each token takes one at random, a kind of load balancing (负载均衡). The
# author tuned and measured a single shared expert too. It was worse than eight, and the time to the first token even
# grew.
#
# **Prediction.** Eight tokens that choose among eight replicas take five different ones on average; so four experts
# more are read. (64 tokens take all: seven more.) That is what it costs. What does it gain? A tile of torch's product
# has 64 rows or more. 64 rows in one expert are one tile; spread over eight experts they are eight tiles, of eight rows
# each. We see no gain in that, and predict a loss.

# %%
replicas_read = 8 * (1 - (1 - 1 / 8) ** DECODE)
prediction = (us("ninth column by torch") or prediction) + weights_us(replicas_read - 1) / EFFICIENCY
print(f"{replicas_read:.1f} of 8 replicas are read; prediction: {prediction:.0f} us")
measure("8 replicas", partial(folded_by_torch, replicas=REPLICAS), prediction)
if not ladder.untimed:
    ladder.rows[-1].update({"slower": True} if us("8 replicas") > us("ninth column by torch") else {})

# %%
look_back("8 replicas", "ninth column by torch", prediction)

# %% [markdown]
# **Look back.** A loss, as predicted, but for one token: that takes one copy and reads no more than before. If replicas
# pay anywhere, it is for many tokens, where the shared expert's column of tiles is long. Section 5 looks at that. We go
# on from step 1, with one shared expert.
#
# ### Step 3: the ninth column in one kernel
#
# **Idea.** A table with nine columns is written from a table with eight. One thread for each element of the new table:
# it copies, or writes the shared expert. With replicas a token takes number `token % replicas` (**round robin**), which
# spreads them evenly and needs no random numbers.
#
# **Prediction.** One kernel in place of seven.


# %%
@cuda.jit
def append_shared(topk_weights, topk_ids, weights, ids, elements, topk, num_experts, replicas, shared_weight):
    i = int32(cuda.grid(1))
    if i < elements:
        token, column = int32(i // (topk + 1)), int32(i % (topk + 1))
        if column < topk:
            weights[i] = topk_weights[token * topk + column]
            ids[i] = topk_ids[token * topk + column]
        else:
            weights[i] = shared_weight
            ids[i] = int32(num_experts + token % replicas)


def by_own_kernel(layer, logits, replicas=1):
    topk_weights, topk_ids = layer.choose(logits)
    tokens, topk = topk_ids.shape
    weights = torch.empty(tokens, topk + 1, device=logits.device)
    ids = torch.empty(tokens, topk + 1, dtype=torch.int32, device=logits.device)
    numbers = weights.numel(), topk, layer.shape.num_experts, replicas, 1 / layer.shape.routed_scaling_factor
    launch(append_shared, -(-weights.numel() // 128), 128, topk_weights, topk_ids, weights, ids, *numbers)
    return weights, ids


def folded_by_own_kernel(layer, x):
    return layer.fused(x, *by_own_kernel(layer, layer.logits(x)), layer.shape.num_experts + 1)


for replicas in (1, 3):  # the routing itself, not only what the layer makes of it
    layer, x, _ = MAIN
    logits = layer[0].logits(x)
    right = reference.fuse_routing(*layer[0].choose(logits), EXPERTS, replicas, 2.5, "round_robin")
    assert all(map(torch.equal, by_own_kernel(layer[0], logits, replicas), right))

prediction = (us("ninth column by torch") or prediction) - 6 * START_US
measure("ninth column, one kernel", folded_by_own_kernel, prediction)

# %%
look_back("ninth column, one kernel", "ninth column by torch", prediction)

# %% [markdown]
# **Look back.** Six small kernels are six gaps less. In the call time the difference is larger than in the kernel time,
# since each torch operation costs the host some microseconds.
#
# ### Step 4: the package's kernel
#
# **Idea.** `moe_numba.shared_experts.fuse_routing` is the same kernel with what a library needs. It has three policies:
# `"all"` for distinct shared experts, each with a column, and `"round_robin"` and `"random"` for replicas. The random
# choice is a hash of the token's number and a seed, so the same seed gives the same routing. A token that is only
# padding (id -1) stays padding. And its blocks take their places while the gate's kernel still runs (programmatic
# dependent launch, see notebook 01).
#
# **Prediction.** Half a microsecond less, for the early start.


# %%
def by_fuse_routing(layer, logits, replicas=1, policy="all"):
    scale = layer.shape.routed_scaling_factor
    return fuse_routing(*layer.choose(logits), layer.shape.num_experts, replicas, scale, policy)


def folded_by_fuse_routing(layer, x):
    return layer.fused(x, *by_fuse_routing(layer, layer.logits(x)), layer.shape.num_experts + 1)


prediction = (us("ninth column, one kernel") or prediction) - 0.5
measure("fuse_routing", folded_by_fuse_routing, prediction)

# %%
look_back("fuse_routing", "ninth column, one kernel", prediction)

# %% [markdown]
# **Look back.** About as predicted. In a layer of hundreds of microseconds one would not believe such a difference; but
# it has the same sign in all five settings. The call takes longer than our own kernel's, because the function also
# checks what it is given.
#
# ### Step 5: the ninth column in the gate's own launch
#
# **Idea.** The article ends with an outlook: together with a fused gate the trick would be worth more
# (在fused moe gate的加持下会更有用一些). Indeed the gate writes the table anyway. Told `num_fused_shared_experts=1` it
# writes nine columns in place of eight, and no kernel is left over for the shared expert at all.
#
# **Prediction.** One kernel less: 1.5 us, since with the early start it costs less than the 2 us of other kernels.


# %%
def by_gate(layer, logits):
    return layer.choose(logits, shared=1)


def folded_by_gate(layer, x):
    return layer.fused(x, *by_gate(layer, layer.logits(x)), layer.shape.num_experts + 1)


prediction = (us("fuse_routing") or prediction) - 1.5
measure("final", folded_by_gate, prediction)

# %%
look_back("final", "fuse_routing", prediction)

# %% [markdown]
# **Look back.** In the whole layer such steps are hard to see: a microsecond or two beside so many. So let us time
# the routing alone, from the router's scores to the finished table. Kernel time and call time, all ways by turns:

# %%
ROUTES = {
    "gate alone": lambda layer, logits: layer.choose(logits),
    "gate, then torch": by_torch,
    "gate, then own kernel": by_own_kernel,
    "gate, then fuse_routing": by_fuse_routing,
    "gate, column inside": by_gate,
}


def measure_routes():
    """Microseconds of each way in decoding and in prefill: {way: {which: {"kernel": ..., "call": ...}}}."""
    found = {name: {} for name in ROUTES}
    for which, (layers, x, _) in {"decode": MAIN, "prefill": OTHERS["prefill"]}.items():
        logits = layers[0].logits(x)
        calls = {name: partial(route, layers[0], logits) for name, route in ROUTES.items()}
        kernel, call = kernel_times(calls), call_times(calls)
        for name in ROUTES:
            if kernel[name]:
                found[name][which] = {"kernel": round(kernel[name].median, 3), "call": round(call[name].median, 3)}
    return found


ROUTE_TIMES = measure_routes()
for row in ladder.rows:
    if row["step"] == "final" and not ladder.untimed:
        row["routes"] = ROUTE_TIMES
KNOWN_ROUTES = (ladder.row("final") or {}).get("routes")
for name, times in (KNOWN_ROUTES or {}).items():
    parts = [
        f"{size} tokens: {times[which]['kernel']:6.2f} us kernel, {times[which]['call']:6.1f} us call"
        for which, size in (("decode", DECODE), ("prefill", PREFILL))
    ]
    print(f"{name:<24} {';  '.join(parts)}")
if not KNOWN_ROUTES:
    print("no figure is recorded yet")

# %% [markdown]
# Here it is plain: with the column inside, the gate takes as long as without. The column is free. Torch's operations
# take several times as long as the gate itself, and more so for the host.
#
# ### One more step: our own grouped product
#
# **Idea.** Torch's two grouped products have stayed the same up to here, and they are most of the time. The package has
# a grouped product too, the subject of [notebook 06](06_grouped_gemm.ipynb), and `group_gemm_bf16` takes what torch's
# takes: rows in order, and where each expert's end (`offs`). So it goes in their place, and nothing else changes.
#
# Only in bfloat16. This layer's FP8 matrices have a scale for each row, as torch's product wants them. The package's
# takes one scale for an expert, or one for each 128 x 128 numbers as DeepSeek publishes them. The two layers would not
# compute the same.

# %%
Markdown("```python\n" + inspect.getsource(moe_numba_grouped_gemm) + "```")

# %% [markdown]
# **Prediction.** For step 0 we guessed that torch's product reads weights at 70 % of the bandwidth, and we keep to that
# guess. In notebook 06 ours was above 90 % with few tokens. And it has no kernel before it, so two of 2 us go. (The
# second product is a hard case, however. K is only 256 here, so a tile is finished after four turns.)

# %%
READS = weights_us(experts_chosen(DECODE) + 1)
prediction = (us("final") or prediction) - READS / EFFICIENCY + READS / 0.9 - 2 * START_US


def folded_on_own(layer, x):
    return folded_by_gate(layer.with_grouped_gemm(moe_numba_grouped_gemm), x)


IN_BFLOAT16 = {which: OTHERS[which] for which in ("one", "batch", "prefill")}
measure("own grouped GEMM", folded_on_own, prediction, {} if simulator.ENABLED else IN_BFLOAT16)

# %%
look_back("own grouped GEMM", "final", prediction)

# %% [markdown]
# **Look back.** It wins more than predicted, and with 1, 64 and 1024 tokens it wins too. Ours reads as fast as we said
# (see the products alone, below). But torch's product was never as good as 70 % (step 0), so there was more to win.
# Look at the call time too: it is longer than before. Starting our product from Python costs the host more than
# starting torch's. Without a CUDA graph that eats up the gain.
#
# Does the folding still pay with it? That is in the record of `python -m moe_numba bench shared_experts`: the layer
# before and after, on either product, and the products alone.


# %%
def recorded_us(variant, tokens, dtype="float8_e4m3fn", what="layer", model="tp8", key="kernel_us"):
    """A recorded median in microseconds, or None."""
    wanted = dict(step=f"{what}: {variant}", size={"tokens": tokens}, dtype=dtype, config={"model": model})
    row = SHARED and records.find(SHARED, **wanted)
    return row[key]["median"] if row and key in row else None


def percent(new, old):
    return 100 * (new / old - 1)


def own_beside_torchs():
    """Lines of the recorded layers in bfloat16, on torch's product and on ours."""
    for what in ("layer", "GEMMs"):
        for tokens in (1, 8, 64, 256, 1024, 4096):
            found = [
                recorded_us(name, tokens, "bfloat16", what)
                for name in ("separate", "1 shared", "separate, own GEMM", "1 shared, own GEMM")
            ]
            if all(found):
                torchs, ours = (
                    f"{old:7.1f} -> {new:7.1f} us ({percent(new, old):+5.1f} %)" for old, new in (found[:2], found[2:])
                )
                yield f"{what:<6} {tokens:5} tokens, apart -> folded in: on torch's {torchs}; on ours {ours}"


print("\n".join(own_beside_torchs()) or "no figure is recorded yet")

# %% [markdown]
# **Look back.** What a layer gains by another product is what the product gains; the rest stays. With up to 64 tokens
# the folding saves about as many microseconds as on torch's product, and so a larger part of a shorter time. From 256
# tokens on it is about even on torch's, and costs 1 to 3 % on ours. By then, we suppose, the shared expert's own
# products fill the GPU by themselves: a grouped product does them no better, and the ninth slot's rows cost what they
# cost in step 1.
#
# ### A check must be able to fail
#
# Three wrong layers, all of which must be refused: the article's ninth weight without the division; eight replicas that
# are all added, as if they were distinct; and a layer that forgets the shared expert of one token.


# %%
def no_division(layer, x):
    return layer.fused(x, *fuse_routing(*layer.route(x), EXPERTS, 1, 1.0))


def all_replicas(layer, x):
    return layer.fused(x, *fuse_routing(*layer.route(x), EXPERTS, REPLICAS, layer.shape.routed_scaling_factor, "all"))


def forgets_one(layer, x):
    weights, ids = layer.route(x, 1)
    weights[len(x) // 2, -1] = 0
    return layer.fused(x, weights, ids)


trial = Ladder("shared_experts_trial", ladder.check)
for wrong_layer in (no_division, all_replicas, forgets_one):
    trial.step(wrong_layer.__name__, partial(wrong_layer, MAIN[0][0], MAIN[1]), expect_wrong=True)

# %% [markdown]
# ### The whole ladder
#
# All steps once more, measured by turns, so that a clock that drifts hits all of them alike.

# %%
ladder.measure_all()
ladder.save(notebook_sources("notebooks/04_shared_experts.py"))

# %%
ladder.plot(floor_us=FLOOR_US)

# %% [markdown]
# The last steps before our own product differ by less than the layer's time varies: in this figure a step may even
# seem slower than the one before it. The routing alone, above, has decided that.
#
# Kernel time is what a server pays that runs its layers in a CUDA graph, as SGLang does when it decodes. Prefill mostly
# runs without a graph. There the host must start every kernel, and call time counts:

# %%
LADDER = ladder.record if ladder.untimed else {"rows": ladder.rows}
if LADDER:
    picture = plots.split_figure(LADDER["rows"], title="What the GPU takes, and what Python takes")
else:
    picture = print("No ladder is recorded yet, so there is nothing to draw.")
picture

# %% [markdown]
# ## 5. One shared expert, or eight copies?
#
# Here is the load that worries the article. 4096 tokens, routed by DeepSeek-V3's rule from random scores. Each expert's
# rows are one bar. A grouped product cuts them into tiles of, say, 128 rows; the tiles of one expert stand in a
# **column**, and the fullest expert has the longest one.


# %%
def rows_of(ids, experts):
    return torch.bincount(ids.flatten().long(), minlength=experts).tolist()


ROUTINGS = {"apart": (MANY_IDS, 256)}
for name, replicas in (("one shared expert", 1), ("8 replicas, chosen at random", 8)):
    ROUTINGS[name] = (reference.fuse_routing(MANY_WEIGHTS, MANY_IDS, 256, replicas, 2.5, "random")[1], 256 + replicas)
LOADS = {name: rows_of(*routing) for name, routing in ROUTINGS.items()}

draw.load({name: counts for name, counts in LOADS.items() if name != "apart"}, 256, tile_rows=128)

# %% [markdown]
# The load is uneven, no doubt. But does it matter? That depends on how the product deals its tiles to the
# multiprocessors (SM). If one of them had to walk down a whole column, all would wait for the longest column. If the
# tiles of all experts stand in one queue and are dealt one by one, only the total counts:

# %%
draw.schedules([1, 2, 1, 1, 2, 1, 8], workers=4, shared={6})

# %% [markdown]
# Torch's product (from CUTLASS) deals tile by tile, and so do the usual ones, SGLang's Triton kernel among them. The
# next cell counts both ways for the real load: all SMs, and 4 columns of tiles for each expert, because the
# first product is 512 wide and a tile 128.


# %%
def units(counts, tile_rows, whole_columns, across=4):
    """Return the time that the SMs need, in tiles."""
    tiles = [column for column in draw.tiles_per_expert(counts, tile_rows) for _ in range(across)]
    return max(start + length for _, start, length, _ in draw.list_schedule(tiles, LIMITS.sm_count, whole_columns))


LONGEST = {}
for tile_rows in (64, 128):
    for name, counts in LOADS.items():
        tiles = draw.tiles_per_expert(counts, tile_rows)
        LONGEST[name, tile_rows] = max(tiles)
        print(
            f"tiles of {tile_rows:3} rows, {name:<29} longest column {max(tiles):2}, all {sum(tiles)}; rounds with "
            f"whole columns {units(counts, tile_rows, True):3}, tile by tile {units(counts, tile_rows, False):2}"
        )

# %% [markdown]
# Dealt tile by tile, one shared expert and eight copies take the same number of rounds, or differ by one. So the
# prediction is: for many tokens no difference, for few a loss of seven experts' bytes. Now the measurement. First the
# matrix products alone, without anything around them, then the whole layer, each against the layer with its shared
# expert apart. These come from the record of `python -m moe_numba bench shared_experts`.


# %%
def bars(what, dtype, model="tp8"):
    """The recorded times of one setting as a figure, or a sentence."""
    times = SHARED and layer_times(SHARED, model, dtype, what)
    if not times:
        return print("The layers have not been recorded yet; `python -m moe_numba bench shared_experts` does it.")
    says = {"layer": "The layer", "GEMMs": "Its matrix products alone"}[what]
    ranks = {"tp8": "an eighth of 256 experts", "ep8": "32 whole experts"}[model]
    return layer_bars(times, "separate", title=f"{says}: {ranks}, {dtype}", caption=plots.caption(SHARED))


bars("GEMMs", "bfloat16")

# %%
bars("GEMMs", "float8_e4m3fn")


# %%
def compare_replicas(dtype, what):
    """{tokens: how much longer one shared expert takes than eight replicas, in per cent}; empty if not recorded."""
    times = layer_times(SHARED, "tp8", dtype, what) if SHARED else {}
    return {tokens: 100 * (own["1 shared"] / own["8 replicas"] - 1) for tokens, own in times.items()}


for dtype in BYTES:
    for what in ("GEMMs", "layer"):
        if differences := compare_replicas(dtype, what):
            listed = ", ".join(f"{tokens}: {more:+.1f} %" for tokens, more in differences.items())
            print(f"one shared expert against 8 replicas, {what:<5}, {dtype:<14} {listed}")
if not SHARED:
    print("no figure is recorded yet")

# %% [markdown]
# **Look back.** For few tokens it is as predicted: the copies cost what their bytes cost. (One token takes one copy, so
# there the two are alike.) For many tokens one shared expert is not slower either. It is even a little faster in every
# row, which the count of rounds does not explain, and with 8192 tokens in bfloat16 by much. Why, we have not found out.
#
# One thing to know when reading such figures. Torch chooses its tile by the *average* number of rows: 64 rows up to an
# average of 128, beyond that 128 rows. A ninth column raises the average. At 4096 tokens the layer before is just on
# one side of the border and the layer after on the other:

# %%
for tokens in (1024, 2048, 4096, 8192):
    rules = []
    for name, replicas in (("apart", 0), ("one", 1), ("eight", 8)):
        slots, experts = tokens * (8 + (replicas > 0)), 256 + replicas
        tile = torch_layer.tile_rows(slots, experts, 512, 7168, torch.bfloat16)
        rules.append(f"{name}: {slots // experts} rows on average, tiles of {tile}")
    print(f"{tokens} tokens: " + "; ".join(rules))

# %% [markdown]
# So at 4096 tokens before and after are two kernels, and not only two loads; most of what the products gain there comes
# from it. This is the small print behind the article's remark that the fused kernel must be **tuned** anew, since the
# number of experts has changed. SGLang's Triton kernel takes its tile sizes from a file for each number of experts. A
# run with 257 experts and no file for it uses default sizes, and a comparison with a tuned 264 then says little about
# replicas. (The author writes that both were tuned.)
#
# What became of the replicas? In SGLang the number of fused shared experts was later set to the number of shared
# experts that the model has ([PR 6736](https://github.com/sgl-project/sglang/pull/6736)): one for DeepSeek-V3, no
# copies. In vLLM's discussion a reviewer had suggested early that one should be the default.
#
# ## 6. The sweep over tokens
#
# The whole layer, before and after, over tokens. A bar is a part of the time before.

# %%
bars("layer", "bfloat16")

# %%
bars("layer", "float8_e4m3fn")

# %% [markdown]
# In bfloat16 the trick pays for few tokens. From 1024 on there is nothing in it, or less than nothing; only the change
# of tiles at 4096 helps. In FP8 it pays everywhere. How much of that is torch's chain of operations for quantising,
# which goes with the shared expert's own products? Compare with the products alone in section 5. Between 64 and 2048
# tokens they gain 1 to 3 %, and the layer 7 to 10. The larger part is the quantising, and a server with one kernel for
# it would gain less.
#
# The other way to share experts among 8 GPUs is **expert parallelism**: each has 32 whole experts. Now an expert is
# eight times as large, a token's share of them is what the other GPUs send here, and the shared expert has four times
# the rows of a routed one, not 32 times.

# %%
bars("layer", "bfloat16", "ep8")

# %%
bars("layer", "float8_e4m3fn", "ep8")

# %% [markdown]
# In bfloat16 it loses at every size. We suppose this is why: a whole expert's product has tiles enough for all
# multiprocessors, so nothing was idle that the fusion could fill, and torch's plain product reads faster than its
# grouped one. Copies cost most here, for each is a whole expert more to read, up to a fifth of the time. In FP8, with
# one shared expert, the quantising that goes is worth more than that.
#
# And the routing over tokens, also from the record. (Torch's way is shorter here than in step 1: one shared expert
# needs no random number, and the weights come divided already.)

# %%
GATE_CONFIG = {"num_experts": 256, "num_expert_group": 8}
if SHARED:
    lines = {name: records.series(SHARED, step=name, config=GATE_CONFIG) for name in GATES}
    picture = plots.sweep_figure(lines, title="The gate and its shared column", caption=plots.caption(SHARED))
else:
    picture = print("The routing over tokens has not been recorded yet.")
picture

# %% [markdown]
# ## 7. Loading the weights
#
# A checkpoint holds the shared expert under names of its own, `mlp.shared_experts.up_proj.weight` and so on. Somebody
# must turn them into experts 256, 257, ... The article shows how SGLang's `load_weights` did it, and that it removes
# the one shared expert too many of each layer. We make a checkpoint of DeepSeek-V3's form, one dense layer and two with
# experts, only smaller, and run that code. (`w[0] not in` has lost a bracket and a space on the page. Its progress bar,
# "Cloning 8 replicas of the shared expert into MoE", is left out.)

# %%
MODEL = {
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
}


def make_checkpoint(folder, model, scales=True):
    """Write a small checkpoint with its config.json, in two files."""
    hidden, wide, tensors = model["hidden_size"], model["moe_intermediate_size"], {}
    for layer in range(model["num_hidden_layers"]):
        dense = layer < model["first_k_dense_replace"]
        names = ["mlp"] if dense else [f"mlp.experts.{e}" for e in range(model["n_routed_experts"])]
        for name in names if dense else [*names, "mlp.shared_experts"]:
            own = wide * (model["n_shared_experts"] if name.endswith("shared_experts") else 1)
            for part, shape in (("gate", (own, hidden)), ("up", (own, hidden)), ("down", (hidden, own))):
                full = f"model.layers.{layer}.{name}.{part}_proj.weight"
                tensors[full] = torch.rand(shape)
                if scales:
                    tensors[f"{full}_scale_inv"] = torch.rand([size // 16 for size in shape])
    half = list(tensors.items())[: len(tensors) // 2]
    save_file(dict(half), folder / "model-00001-of-00002.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in dict(half)}, folder / "model-00002-of-00002.safetensors")
    (folder / "config.json").write_text(json.dumps(model))


ALIVE = SimpleNamespace(bytes=0, most=0)


def watched(folder):
    """The checkpoint's (name, tensor) pairs; ALIVE knows how many bytes of them are held at the same time."""
    ALIVE.bytes = ALIVE.most = 0

    def gone(size):
        ALIVE.bytes -= size

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                tensor = opened.get_tensor(name)
                ALIVE.bytes += tensor.nbytes
                ALIVE.most = max(ALIVE.most, ALIVE.bytes)
                weakref.finalize(tensor, gone, tensor.nbytes)
                yield name, tensor
                del tensor


def article_load_weights(self, weights):
    """The article's part of ``DeepseekV2ForCausalLM.load_weights``."""
    if self.n_share_experts_fusion != 0:
        weights_list = list(weights)
        weights_dict = dict(weights_list)
        suffix_list = [
            "down_proj.weight",
            "down_proj.weight_scale_inv",
            "gate_proj.weight",
            "gate_proj.weight_scale_inv",
            "up_proj.weight",
            "up_proj.weight_scale_inv",
        ]
        names_to_remove = []
        for moe_layer in range(
            self.config.first_k_dense_replace, self.config.num_hidden_layers, self.config.moe_layer_freq
        ):
            for num_repeat in range(self.n_share_experts_fusion):
                for suffix in suffix_list:
                    weights_list.append(
                        (
                            f"model.layers.{moe_layer}."
                            f"mlp.experts."
                            f"{self.config.n_routed_experts + num_repeat}"
                            f".{suffix}",
                            weights_dict[f"model.layers.{moe_layer}.mlp.shared_experts.{suffix}"].clone(),
                        )
                    )
                names_to_remove += [f"model.layers.{moe_layer}.mlp.shared_experts.{suffix}" for suffix in suffix_list]
        weights = [w for w in weights_list if w[0] not in names_to_remove]
    return weights


def load_both(model, replicas=8, scales=True):
    """Both ways on one checkpoint: results as sets of (name, bits), and the most bytes that each held."""
    model_object = SimpleNamespace(config=SimpleNamespace(**model), n_share_experts_fusion=replicas)
    bits = lambda tensor: tensor.contiguous().numpy().tobytes()
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder), model, scales)
        size = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors"))
        streamed = set()
        for name, tensor in fuse_checkpoint(
            watched(Path(folder)),
            replicas,
            num_experts=model["n_routed_experts"],
            n_shared_experts=model["n_shared_experts"],
            progress=False,
        ):
            streamed.add((name, bits(tensor)))
            del tensor
        held = [ALIVE.most]
        originals = dict(watched(Path(folder)))
        loaded = article_load_weights(model_object, iter(originals.items()))
        clones = {
            t.data_ptr(): t.nbytes for _, t in loaded if t.data_ptr() not in {o.data_ptr() for o in originals.values()}
        }
        held.append(ALIVE.most + sum(clones.values()))
        return streamed, {(name, bits(tensor)) for name, tensor in loaded}, held, size


ours, articles, held, size = load_both(MODEL)
print(f"the same {len(ours)} tensors: {ours == articles}")
print(f"of {size} bytes the article's code held {held[1]} at once, clones included; fuse_checkpoint {held[0]}")

# %% [markdown]
# The result is right. The way to it could be shorter:
#
# - **Everything is held.** `weights` is an iterator, so that a tensor can be copied to the GPU and let go before the
#   next is read. `list(weights)` holds them all, 671 billion weights, in each of 8 processes.
# - **Every copy is made beforehand.** `clone()` makes eight copies of each shared expert in host memory, although the
#   loader copies them to the GPU anyway. One tensor can be given eight times.
# - **A list is searched for every tensor.** `w[0] not in names_to_remove` compares with all names, and each name is in
#   the list eight times, because `names_to_remove +=` stands inside the loop over the replicas. A set would need one
#   look.
#
# `moe_numba.shared_experts.fuse_checkpoint` goes through the checkpoint tensor by tensor. It gives each one on, and one
# of the shared expert once for each replica, under its new names. Before the first one it has checked names and shapes.
# What would the article's way cost for the real model?

# %%
MEBI, GIBI = 1 << 20, 1 << 30
cost = memory_cost(8)
entries = cost.moe_layers * (256 + 8 + 1) * 6  # tensors of experts, replicas and shared experts, with their scales
names_to_remove = [
    f"model.layers.{layer}.mlp.shared_experts.{part}_proj.weight{scale}"
    for layer in range(3, 61)
    for _ in range(8)
    for part in ("down", "gate", "up")
    for scale in ("", "_scale_inv")
]
sample = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight" for layer in range(3, 23) for expert in range(10)]


def seconds_for_all(names):
    """The time to look all entries up in ``names``, from a sample, on this computer."""
    started = time.perf_counter()
    found = sum(name in names for name in sample)
    assert found == 0
    return (time.perf_counter() - started) / len(sample) * entries


print(f"clones: {cost.replicas_bytes / GIBI:.1f} GiB of host memory in each process")
print(
    f"{entries} names to look up, {len(names_to_remove)} in the list, {len(set(names_to_remove))} of them different: "
    f"{entries * len(names_to_remove) / 1e6:.0f} million comparisons"
)
print(
    f"here they take about {seconds_for_all(names_to_remove):.1f} s, with a set "
    f"{seconds_for_all(set(names_to_remove)):.3f} s"
)

# %% [markdown]
# ### Two checkpoints that it cannot load
#
# The code asks for scales by name. A checkpoint in bfloat16 has none. And DeepSeek-V2 has two shared experts, which its
# checkpoint keeps as *one* MLP of twice the width. The article's premise, that a shared expert has exactly the shape of
# a routed one, holds for V3 and R1. For V2 the wide MLP must first be cut in two. (The trick still works: an MLP of
# twice the width is the sum of two.)

# %%
try:
    load_both(MODEL, scales=False)
    print("no scales: loaded")
except KeyError as error:
    print("no scales, the article's code: KeyError:", error)
ours, articles, _, _ = load_both({**MODEL, "n_shared_experts": 2}, replicas=1)
for says, loaded in (("the article's code", articles), ("fuse_checkpoint", ours)):
    lengths = {name: len(bits) for name, bits in loaded if name.endswith("up_proj.weight")}
    widths = {expert: lengths.get(f"model.layers.1.mlp.experts.{expert}.up_proj.weight") for expert in (0, 8, 9)}
    print(f"two shared experts, {says}: bytes of up_proj of experts 0, 8 and 9: {list(widths.values())}")

# %% [markdown]
# ## 8. What the replicas cost in memory
#
# The article's sum: an expert has hidden_size x moe_intermediate_size x 3 = 7168 x 2048 x 3 weights, in FP8 42 MB. Each
# rank gets one expert more in each of the (51 - 3) layers that have experts. 48 x 42 MB = 2016 MB, and 2016 / 1024 =
# 1.96 GB (1.96875, and the rest cut off). To get the best out of the trick, it says, a TP rank uses 1 to 2 GB more.
#
# Two remarks. DeepSeek-V3 has 61 layers, not 51; the first 3 have no experts. And with TP8 a rank holds an eighth of
# each of the eight copies. That is one whole expert for each layer. But before it held an eighth of the shared expert,
# which is gone now.

# %%
theirs, layers58, on_a_rank = memory_cost(num_hidden_layers=51), memory_cost(), memory_cost(8, tensor_parallel_size=8)
one_on_a_rank = memory_cost(1, tensor_parallel_size=8)
print(f"an expert: {theirs.expert_bytes / MEBI:g} MiB")
for says, layers, amount in (
    ("the article's 51 layers, one expert each", theirs.moe_layers, theirs.replicas_bytes),
    ("61 layers, one expert each", layers58.moe_layers, layers58.replicas_bytes),
    ("TP8, 8 replicas, on a rank", on_a_rank.moe_layers, on_a_rank.replicas_bytes),
    ("the same, less the share that was there before", on_a_rank.moe_layers, on_a_rank.extra_bytes),
    ("TP8, one shared expert, no copies", one_on_a_rank.moe_layers, one_on_a_rank.extra_bytes),
):
    each = amount / layers / MEBI
    print(f"{says:<48} {layers} x {each:5.2f} MiB = {amount / MEBI:6.1f} MiB = {amount / GIBI:.3f} GiB")

# %%
EXTRA = {replicas: memory_cost(replicas, tensor_parallel_size=8).extra_bytes / GIBI for replicas in range(1, 9)}
draw.memory(
    EXTRA,
    {
        "the article's 51 layers": theirs.replicas_bytes / GIBI,
        "58 layers, one whole expert each": layers58.replicas_bytes / GIBI,
    },
)

# %% [markdown]
# With one shared expert and no copies the trick costs no memory at all.
#
# ## 9. What the article measured, and what a layer can explain
#
# These are the article's end-to-end figures, on H200, served with 8 GPUs (`--disable-shared-experts-fusion` against the
# fusion with 8 replicas). **QPS** is queries per second. **TTFT** is the time to the first token, **ITL** the time
# between two tokens after it. The percentages are the article's; more throughput is better, and less of the others.
#
# | QPS | | before | after | better by |
# |---|---|---:|---:|---:|
# | 1 | throughput (总吞吐量), tokens per second | 483.47 | 485.72 | 0.5 % |
# | 1 | mean TTFT (平均TTFT), ms | 949.18 | 664.25 | 30.0 % |
# | 1 | mean ITL (平均ITL), ms | 54.69 | 50.20 | 8.2 % |
# | 4 | throughput | 1088.59 | 1132.73 | 4.0 % |
# | 4 | mean TTFT | 2630.26 | 2144.08 | 18.5 % |
# | 4 | mean ITL | 156.21 | 132.75 | 15.0 % |
# | 8 | throughput | 1188.77 | 1235.63 | 3.9 % |
# | 8 | mean TTFT | 6320.67 | 3443.59 | 45.5 % |
# | 8 | mean ITL | 188.29 | 178.94 | 5.0 % |
#
# It concludes: with QPS up to 4 the throughput rises by 4 %, and TTFT and ITL fall by some 15 to 20 %. The commands are
# in PR 4918. These are measurements of a whole server, and we cannot repeat them with a layer. But a layer can say how
# much of them the fusion can explain. DeepSeek-V3 has 58 layers with experts. What one layer saves, times 58, is what a
# token can save between two others; a prompt of so many tokens passes the layers once.

# %%
THEIRS = {
    1: {"throughput": (483.47, 485.72, 0.5), "TTFT": (949.18, 664.25, 30.0), "ITL": (54.69, 50.20, 8.2)},
    4: {"throughput": (1088.59, 1132.73, 4.0), "TTFT": (2630.26, 2144.08, 18.5), "ITL": (156.21, 132.75, 15.0)},
    8: {"throughput": (1188.77, 1235.63, 3.9), "TTFT": (6320.67, 3443.59, 45.5), "ITL": (188.29, 178.94, 5.0)},
}
MOE_LAYERS = layers58.moe_layers
DECODE_SIZES, PREFILL_SIZES = (1, 8, 64, 256), (1024, 4096)


def saved_ms(tokens, variant="1 shared", key="kernel_us"):
    """What 58 layers save in FP8, in milliseconds, or None."""
    old, new = (recorded_us(name, tokens, key=key) for name in ("separate", variant))
    return (old - new) * MOE_LAYERS / 1000 if old and new else None


def explained(metric, qps, sizes, variant):
    """The largest part of the article's difference that the layers explain, and how; or None.

    Decoding runs in a CUDA graph. Prefill may wait for the host, so what the calls save counts too.
    """
    before, after, _ = THEIRS[qps][metric]
    found = {f"{tokens} tokens": saved_ms(tokens, variant) for tokens in sizes}
    if metric == "TTFT":
        found["the host's calls"] = saved_ms(64, variant, "call_us")
    parts = [(ms / (before - after), how) for how, ms in found.items() if ms is not None]
    return max(parts, default=None)


for variant in ("1 shared", "8 replicas"):
    for tokens in (*DECODE_SIZES, *PREFILL_SIZES):
        if (ms := saved_ms(tokens, variant)) is not None:
            print(f"{variant:<10} {tokens:5} tokens: 58 layers save {ms:+.2f} ms")
for qps in THEIRS:
    for metric, sizes in (("ITL", DECODE_SIZES), ("TTFT", PREFILL_SIZES)):
        if best := explained(metric, qps, sizes, "8 replicas"):
            before, after, _ = THEIRS[qps][metric]
            print(
                f"QPS {qps}, {metric}: {before - after:.1f} ms less in the article; 58 layers with 8 replicas "
                f"explain at most {100 * best[0]:.1f} % of it ({best[1]})"
            )
for variant in ("1 shared", "8 replicas"):
    if (ms := saved_ms(64, variant, "call_us")) is not None:
        print(f"{variant:<10} without a CUDA graph the host saves {ms:.1f} ms in the calls of 58 layers")
if not SHARED:
    print("no figure is recorded yet")

# %% [markdown]
# For ITL the layers can explain most of the difference at one query per second, and a smaller part at four and eight.
# Even that is generous. The number of tokens is the one that explains most, and our FP8 layer saves quantising that a
# server does not have (section 6). So the shares in the table below are the most that the layers can explain.
#
# TTFT is another matter. A mean of a second at one query per second is long for such prompts. (In a run of the same
# benchmark, published with [PR 5125](https://github.com/sgl-project/sglang/pull/5125), 300 prompts had 95293 tokens.)
# It suggests that a first token waits for other things than its own layers: for other prompts, or for a kernel to be
# compiled. When a queue is long, a little less work shortens it by much, so an end-to-end gain can exceed what the
# layers save. But then it is a statement about that queue.
#
# ## 10. The article's claims
#
# A verdict is computed, never typed. Where it needs a figure that is not recorded, it says so.

# %%
NOT_RECORDED = "open: not recorded yet"
SIZES = (1, 8, 64, 256, 1024, 2048, 4096, 8192)


def verdict(holds, figure):
    return f"{'confirmed' if holds else 'refuted'}: {figure}"


def worse_for(dtype, what):
    """For which tokens one shared expert is more than 1 % slower than eight, as a verdict on the article's claim."""
    if not (found := compare_replicas(dtype, what)):
        return NOT_RECORDED
    slower = [tokens for tokens, more in found.items() if more > 1]
    extremes = f"between {min(found.values()):+.1f} and {max(found.values()):+.1f} %"
    if not slower:
        return f"refuted: over {min(found)} to {max(found)} tokens the difference is {extremes}"
    if len(slower) == len(found):
        return f"confirmed: {extremes}"
    return f"more subtle: slower for {', '.join(map(str, slower))} tokens, not for the others; {extremes}"


claims = []
claims.append(
    (
        "After the fusion the layer's output is exactly the same",
        "more subtle: equal as real numbers; in "
        f"float64 {'right' if not WRONG['one shared expert'] else 'wrong'} to 1e-12; beyond, rounding differs",
    )
)
claims.append(
    (
        "The ninth weight must be divided by routed_scaling_factor",
        verdict(
            WRONG["wrong: the ninth weight is 1"] and not WRONG["one shared expert"], "without it the check refuses"
        ),
    )
)
ids = fuse_routing(*(t[:8].to(DEVICE) for t in (MANY_WEIGHTS, MANY_IDS)), 256, 8, 2.5, "random")[1]
aligned = moe_numba.moe_align_block_size(ids, 16, 264)
claims.append(
    (
        "No CUDA code must change: the alignment takes more than 256 experts",
        verdict(not align_mismatch(*aligned, ids, 16, 264), "264 experts, ours; see notebook 02 for SGLang's"),
    )
)
shapes = Counter(len(bits) for name, bits in articles if "mlp.experts" in name and name.endswith("up_proj.weight"))
claims.append(
    (
        "A shared expert has exactly the shape of a routed one",
        f"more subtle: in V3 and R1; two shared experts, as in V2, give {len(shapes)} different shapes (section 7)",
    )
)
wrong = [
    (qps, name)
    for qps, own in THEIRS.items()
    for name, (before, after, said) in own.items()
    if abs(abs(percent(after, before)) - said) > 0.06
]
claims.append(
    (
        "The percentages of its table",
        verdict(not wrong, f"not at {wrong}" if wrong else "they follow from its figures; not measured again here"),
    )
)
falls = {qps: [-percent(*own[name][1::-1]) for name in ("TTFT", "ITL")] for qps, own in THEIRS.items()}
inside = [14.5 < fall < 20.5 for qps in (1, 4) for fall in falls[qps]]
claims.append(
    (
        "With QPS up to 4, TTFT and ITL fall by 15 to 20 %",
        ("confirmed: " if all(inside) else "more subtle: " if any(inside) else "refuted: ")
        + "; ".join(f"QPS {qps}: {ttft:.1f} and {itl:.1f} %" for qps, (ttft, itl) in falls.items()),
    )
)
for metric, sizes in (("ITL", DECODE_SIZES), ("TTFT", PREFILL_SIZES)):
    parts = [explained(metric, qps, sizes, "8 replicas") for qps in THEIRS]
    if all(parts):
        shares = {qps: share for qps, (share, _) in zip(THEIRS, parts)}
        least, most = min(shares.values()), max(shares.values())
        text = "confirmed" if least > 0.5 else "refuted" if most < 0.05 else "more subtle"
        text += f": of the difference {MOE_LAYERS} layers explain at most " + ", ".join(
            f"{100 * share:.1f} % at QPS {qps}" for qps, share in shares.items()
        )
    else:
        text = NOT_RECORDED
    claims.append((f"The fusion makes the gain in {metric} (with its 8 replicas)", text))
for tokens in (1, 64, 1024, 4096):
    old, new = (recorded_us(name, tokens) for name in ("separate", "1 shared"))
    claims.append(
        (
            f"The fused layer is faster, {tokens} token{'s' * (tokens > 1)}, FP8, one shared expert",
            verdict(new < old, f"{old:.1f} -> {new:.1f} us, {percent(new, old):+.1f} %")
            if old and new
            else NOT_RECORDED,
        )
    )
for dtype in BYTES:
    claims.append((f"One shared expert is slower than 8 replicas (the layer, {dtype})", worse_for(dtype, "layer")))
claims.append(
    ("Too uneven a load makes the products inefficient (the products alone, FP8)", worse_for("float8_e4m3fn", "GEMMs"))
)
one, eight = (LOADS[name] for name in LOADS if name != "apart")
if_columns = units(one, 128, True) / units(eight, 128, True)
products = [recorded_us(name, 4096, what="GEMMs") for name in ("1 shared", "8 replicas")]
claims.append(
    (
        "The fullest expert's column decides (the products alone, 4096 tokens, FP8)",
        verdict(
            products[0] / products[1] > (1 + if_columns) / 2,
            f"then one shared expert would take {if_columns:.1f} times as "
            f"long as 8 replicas; it takes {products[0] / products[1]:.2f} times",
        )
        if all(products)
        else NOT_RECORDED,
    )
)
slower = []
for tokens in PREFILL_SIZES:
    old, new = (recorded_us(name, tokens) for name in ("separate", "1 shared"))
    slower.append(percent(new, old) if old and new else None)
if None in slower:
    text = NOT_RECORDED
else:
    text = verdict(
        min(slower) > 0,
        " and ".join(f"{more:+.1f} % for {tokens} tokens" for more, tokens in zip(slower, PREFILL_SIZES)),
    )
claims.append(("With one shared expert even TTFT gets longer (the layer in prefill, FP8)", text))
tiles = [torch_layer.tile_rows(4096 * topk, experts, 512, 7168, FP8) for topk, experts in ((8, 256), (9, 264))]
claims.append(
    (
        "The fused kernel must be tuned anew",
        verdict(
            tiles[0] != tiles[1], f"torch's own rule goes from tiles of {tiles[0]} rows to {tiles[1]} at 4096 tokens"
        ),
    )
)
claims.append(
    ("An expert is 42 MB in FP8", verdict(theirs.expert_bytes == 42 * MEBI, "42 MiB to the byte, scales apart"))
)
claims.append(
    (
        "(51 - 3) x 42 MB = 1.96 GB on each rank",
        "more subtle: the sum is right, but the model has "
        f"{MOE_LAYERS} such layers, {layers58.replicas_bytes / GIBI:.2f} GiB; less the share before, "
        f"{on_a_rank.extra_bytes / GIBI:.2f} GiB; without copies {one_on_a_rank.extra_bytes}",
    )
)
extra = on_a_rank.extra_bytes / GIBI
claims.append(
    (
        "1 to 2 GB more on a rank",
        f"{'confirmed' if 1 <= extra <= 2 else 'more subtle'}: {extra:.2f} GiB "
        f"with 8 replicas, {EXTRA[4]:.2f} with 4, {EXTRA[1]:.0f} with one shared expert",
    )
)
rows = {name: SHARED and records.find(SHARED, step=name, size={"tokens": 64}, config=GATE_CONFIG) for name in GATES}
if all(rows.values()):
    inside, outside = rows["gate, column inside"], rows["gate, then torch"]
    figure = "; ".join(
        f"{says} {outside[key]['median']:.1f} -> {inside[key]['median']:.1f} us"
        for says, key in (("kernel", "kernel_us"), ("call", "call_us"))
    )
    text = verdict(inside["kernel_us"]["median"] < outside["kernel_us"]["median"], f"{figure} for 64 tokens")
else:
    text = NOT_RECORDED
claims.append(("With a fused gate the trick is worth more", text))
claims.append(("GSM8K: accuracy 0.952", "quoted: not measured again here"))

Markdown("| claim | verdict |\n|---|---|\n" + "\n".join(f"| {claim} | {text} |" for claim, text in claims))

# %% [markdown]
# ## 11. Faults to know
#
# ### A name that is not always there
#
# Look at `forward_normal` once more. `shared_output` gets a value only if the model has shared experts, and is asked
# for in any case. For a model without them Python stops.

# %%
without = DeepseekV2MoE(exact)
without.n_shared_experts = None
try:
    without.forward_normal(exact.tokens(2))
except UnboundLocalError as error:
    print("UnboundLocalError:", error)

# %% [markdown]
# ### An expert that is chosen to be thrown away
#
# The article's routing chooses nine experts and overwrites the ninth. If the groups that are kept have only `topk`
# experts left, there is no ninth to choose, although none is needed. Our gate counts the routed ones only:

# %%
tight = torch.randn(4, 8, device=DEVICE)  # 8 experts in 4 groups, 2 groups kept: 4 candidates
groups = {"num_expert_group": 4, "topk_group": 2}
try:
    moe_numba.biased_grouped_topk(tight, None, 5, **groups)
except ValueError as error:
    print("five routed experts:", error)
_, ids = moe_numba.biased_grouped_topk(tight, None, 5, **groups, num_fused_shared_experts=1)
print("four and a shared one:", ids[0].tolist())

# %% [markdown]
# ### A result that depends on chance
#
# With `torch.randint` a token's replica is another one in each run. All replicas are equal, so the result should be the
# same. But a row then lies in another expert's tile, beside other rows. Whether its bits stay the same is the product's
# affair, not ours (see notebook 02 on the order of slots). `fuse_routing` takes a seed, and then the routing at least
# is the same in every run. Let us try it, five seeds, then five times the same one:

# %%
layer, tokens, _ = OTHERS["prefill"]
for says, seeds in (("five seeds", range(5)), ("one seed, five times", [0] * 5)):
    results = []
    for seed in seeds:
        routing = fuse_routing(*layer[0].route(tokens), EXPERTS, REPLICAS, 2.5, "random", seed)
        results.append(layer[0].fused(tokens, *routing))
    different = 1 + sum(not any(torch.equal(out, other) for other in results[:i]) for i, out in enumerate(results) if i)
    print(f"{says}: {different} different result{'s' * (different > 1)}")

# %% [markdown]
# One result means that all five runs have the same bits. So torch's product gave a row the same bits, whatever stood
# beside it. It does not promise that, and another size may take another kernel.
#
# ## 12. Exercises
#
# Each can be done in the simulator. `mismatch` tells whether a layer is right; a GPU tells whether it is fast.
#
# 1. **Two shared experts.** Give `append_shared` a second column for a second, distinct shared expert.
#    *Hint: `Shape(..., n_shared_experts=2)` makes a layer that has two. What is the weight of each?*
# 2. **A gate without renormalisation.** With `renormalize=False` the eight weights do not add up to one. What must the
#    ninth weight be then?  *Hint: read section 2 again. Does the sum of the weights occur in it? Then look at what the
#    gate does.*
# 3. **The scaling factor inside.** Multiply all nine weights by `s` in the routing, and drop the product with
#    `routed_scaling_factor`. What is the ninth weight now?  *Hint: `apply_routed_scaling_factor_on_output`.*
# 4. **A fair share.** Give `append_shared` a policy that sends a token to the replica with the fewest rows so far. Is
#    it better than round robin?  *Hint: how many rows can two replicas differ by under round robin?*
# 5. **Columns after all.** Write a `grouped` function in which one block walks down an expert's whole column, as in the
#    picture of section 5. How many replicas does it want?  *Hint: `units(counts, 128, True)` predicts it.*
# 6. **Fewer kernels.** Which of the kernels counted in step 0 could be one? Write one of them in Numba and put it into
#    `Layer.experts`.  *Hint: "where each slot went" is three; a thread for each slot does it in one store.*
#
# ## 13. Sources
#
# - The article: 分享一个DeepSeek V3和R1中 Shared Experts和普通Experts融合的一个小技巧, in Chinese, by BBuf
#   (GiantPandaCV). (It ends with an offer of loquats from Miyi, 米易枇杷, which we cannot improve upon.)
# - The idea: DiegoD94, [vllm 15502](https://github.com/vllm-project/vllm/pull/15502), and the
#   [technical document](https://docs.google.com/document/d/1iXgzR6Mt6s0DpT7w2Pz93ExlUJ-nnSnU_o9Sqd8TE34).
# - In SGLang: [PR 4918](https://github.com/sgl-project/sglang/pull/4918), with the commands and the benchmark of a
#   single shared expert; [PR 4348](https://github.com/sgl-project/sglang/pull/4348), more than 256 experts in the
#   alignment; [PR 5371](https://github.com/sgl-project/sglang/pull/5371), the fused gate; [PR
#   6736](https://github.com/sgl-project/sglang/pull/6736), no copies.
# - The model: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024; *DeepSeekMoE*, 2024, on shared experts.
#
# ## The final kernel
#
# This is what `moe_numba.shared_experts.fuse_routing` runs. The gate's own column is in
# `moe_numba/gate/device_functions.py`.

# %%
from moe_numba.shared_experts import kernel as final_kernel

Markdown("```python\n" + inspect.getsource(final_kernel) + "\n```")
