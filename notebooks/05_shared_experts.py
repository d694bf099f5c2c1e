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
# # Shared experts: fuse the shared expert with the routed ones
#
# DeepSeek-V3 sends each token to 8 of 256 routed experts and to one **shared expert**. Implementations used to give the
# shared expert its own GEMMs and add its output at the end. But it has the shape of a routed expert. As expert number
# 256, which every token chooses as its ninth, it becomes part of one grouped GEMM.
#
# This notebook follows an article about this fusion in SGLang ([PR
# 4918](https://github.com/sgl-project/sglang/pull/4918)), after an idea by DiegoD94 for vLLM (section 11). No CUDA code
# had to change there, because SGLang's `moe_align_block_size` already supported more than 256 experts.
#
# The subject is what a change is worth: which work stays the same, which is saved, and how much of an end-to-end gain
# one layer explains. Without a GPU, times are read from a record.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import inspect
import json
import tempfile
import time
import weakref
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from IPython.display import Markdown
from numba import cuda, int32
from safetensors import safe_open
from safetensors.torch import save_file

from moe_numba import simulator
from moe_numba.course.bench import call_times, kernel_times, records
from moe_numba.course.bench.baselines import limits, torch_layer
from moe_numba.course.bench.baselines.torch_layer import FP8, NAMES, SMALL, TP8, Layer, mismatch, moe_numba_grouped_gemm
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.topics.shared_experts import GATES, layer_times
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.shared_experts import draw
from moe_numba.course.lessons.shared_experts.layer_figure import layer_bars
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.ladder import Ladder
from moe_numba.gate.reference import biased_grouped_topk as reference_gate
from moe_numba.runtime.launch import launch
from moe_numba.shared_experts import fuse_checkpoint, fuse_routing, memory_cost, reference

HERE = torch_layer.notebook_sizes()  # DeepSeek-V3's layer on a GPU, a small one in the simulator
DEVICE = HERE.device
SHARED = records.recorded("shared_experts")  # what `python -m moe_numba bench shared_experts` measured


def recorded_us(variant, tokens, dtype="float8_e4m3fn", what="layer", model="tp8", key="kernel_us"):
    """Return a median of this record in microseconds, or None."""
    wanted = dict(step=f"{what}: {variant}", size={"tokens": tokens}, dtype=dtype, config={"model": model})
    row = SHARED and records.find(SHARED, **wanted)
    return row[key]["median"] if row and key in row else None


# %% [markdown]
# ## 1. The problem in one figure
#
# An **expert** is an MLP with three matrices: `down(silu(gate x) * up x)`. A router chooses each token's best `topk`
# **routed experts**, here 8, each with a weight. The layer's output is the weighted sum of their outputs times
# `routed_scaling_factor` (2.5 for DeepSeek-V3), plus the shared expert's output. One token:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
torch.manual_seed(0)
MANY_LOGITS, MANY_BIAS = torch.randn(4096, 256), torch.rand(256) * 0.1
MANY_WEIGHTS, MANY_IDS = reference_gate(MANY_LOGITS, MANY_BIAS, 8, num_expert_group=8, topk_group=4)

draw.problem(MANY_WEIGHTS[0], MANY_IDS[0], num_experts=256, scale=2.5)

# %% [markdown]
# Before the change, vLLM and SGLang computed the shared expert, then the routed experts in one kernel (FusedMoE), and
# added both results. After it there are 257 experts, and each token has nine.
#
# (DeepSeek's code calls the *router* `gate`. In this course the *gate* chooses the experts from the router's scores.)
#
# ## 2. The reference
#
# The layer before the change, after the article's listing. This notebook uses one GPU and omits the all-reduce on both
# sides of the comparison.


# %%
def tensor_model_parallel_all_reduce(share):
    return share  # one GPU: nothing to reduce


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
# Let `w_k` be the eight weights, `E_k` the chosen experts, `S` the shared expert, and `s` the scaling factor. The layer
# computes the left side, the fused layer the right side:
#
# `s * (w_1 E_1(x) + ... + w_8 E_8(x)) + S(x)  =  s * (w_1 E_1(x) + ... + w_8 E_8(x) + w_9 S(x))`
#
# So `s * w_9 = 1`: **the ninth weight is `1 / s`**. This is the division by `routed_scaling_factor` in the article.
#
# In float64 both sides agree to the last digits. The package's routing weights are float32, in which `1 / 2.5` is not
# exact, so the results then agree to about 8 digits; the rounding of bfloat16 and FP8 is much coarser. Three wrong
# fusions must be rejected.

# %%
WEIGHTS, IDS = exact.route(x)
SCALE, FIRST_SHARED = SMALL.routed_scaling_factor, SMALL.num_experts
COPIES = Layer(SMALL, torch.float64, DEVICE, replicas=8)  # the same weights; replicas are the last experts


def appended(replicas=1, scale=SCALE, policy="round_robin"):
    """Append the ninth column in float64 with the package's reference."""
    return reference.fuse_routing(WEIGHTS.double(), IDS, FIRST_SHARED, replicas, scale, policy)


def fused_in_float32(replicas=1):
    return fuse_routing(WEIGHTS, IDS, FIRST_SHARED, replicas, SCALE, "round_robin")


FUSIONS = {
    "one shared expert": appended(),
    "8 replicas": appended(8),
    "one, weight in float32": fused_in_float32(),
    "wrong: the ninth weight is 1": appended(scale=1.0),
    "wrong: all 8 replicas added": appended(8, policy="all"),
    "wrong: the ninth weight is 0": appended(scale=1e30),
}
WRONG = {}
for name, (weights, ids) in FUSIONS.items():
    after = COPIES.fused(x, weights, ids)
    error = float((after - before).norm() / before.norm())
    WRONG[name] = mismatch(after, before, torch.float32 if "float32" in name else torch.float64)
    print(f"{name:<36} relative error {error:.1e}: {WRONG[name] or 'right'}")
assert all(bool(wrong) == name.startswith("wrong") for name, wrong in WRONG.items())

# %% [markdown]
# **Exercise 1.** Write `nine_weights(weights, s, renormalize, scaled)`, from `[tokens, 8]` to `[tokens, 9]`. With
# `renormalize` the eight weights are first divided by their sum, otherwise not. With `scaled` the nine weights contain
# the factor `s`, and the layer does not multiply its sum by `s` again.

# %%
nine_weights = ...
exercise("shared_experts-1").check(nine_weights)

# %% [markdown]
# A **replica** is a copy of the shared expert (section 5). All replicas compute the same output, so each token must use
# exactly one. *Distinct* shared experts (DeepSeek-V2 has two) are all added, each in its own column.
#
# The next cell compares in the data types of real models. `mismatch` allows a relative error of one percent per token
# in bfloat16 (8 significant bits) and eight percent in **FP8** (4 bits; more in this small layer, where each result
# sums few numbers). In FP8 each row of a weight matrix has a scale, and each token's row is **quantised** before each
# GEMM.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
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
# The fused layer is as accurate as the separate one. For the served model with the fusion the article reports an
# accuracy of 0.952 on GSM8K.
#
# ## 3. The lower bound: what the fusion can save
#
# The article's server uses **tensor parallelism** on 8 GPUs (TP8): each GPU, or **rank**, holds one eighth of every
# expert, 3 x 7168 x 256 weights. For few tokens, reading weights dominates: an expert that any token has chosen must be
# read once.


# %%
LIMITS = limits.H200 if HERE.untimed else limits.chip_limits()  # of the GPU whose times are shown
print(LIMITS)
BANDWIDTH = LIMITS.copy_bandwidth  # bytes per second
RATES = LIMITS.tensor_flops  # operations per second
BYTES = {"bfloat16": 2, "float8_e4m3fn": 1}  # of a weight


def experts_chosen(tokens, shape=TP8):
    """Return the average number of routed experts that at least one of ``tokens`` tokens chooses."""
    return shape.num_experts * (1 - (1 - shape.topk / shape.num_experts) ** tokens)


def weights_us(experts, dtype="bfloat16"):
    """Return the microseconds to read the weights of ``experts`` experts."""
    return experts * TP8.expert_weights * BYTES[dtype] / BANDWIDTH * 1e6


def lower_bound_us(tokens, dtype="bfloat16"):
    """Return the microseconds to read a layer's weights or to compute, whichever takes longer."""
    flops = 2 * tokens * (TP8.topk + 1) * TP8.expert_weights
    return max(weights_us(experts_chosen(tokens) + 1, dtype), flops / RATES[dtype] * 1e6)


print("tokens   experts read   lower bound in bfloat16   shared expert's part   lower bound in FP8")
for tokens in (1, 8, 64, 256, 1024, 4096):
    part = weights_us(1) / weights_us(experts_chosen(tokens) + 1)
    print(
        f"{tokens:6}   {experts_chosen(tokens):12.0f}   {lower_bound_us(tokens):20.1f} us   {100 * part:18.1f} %   "
        f"{lower_bound_us(tokens, 'float8_e4m3fn'):15.1f} us"
    )
DECODE, BATCH, PREFILL = 8, 64, 1024  # tokens in the ladder, on a GPU: few users, many users, and a prompt
LOWER_BOUND_US = lower_bound_us(DECODE)

# %% [markdown]
# Before and after the fusion, the same weights are read and the same GEMMs are computed. **The fusion saves neither
# weight traffic nor FLOPs.** It can save the launches of the shared expert's kernels, and the time in which these leave
# most of the GPU idle: a GEMM of 64 rows with one eighth of an expert has tiles for few of the 132 SMs.
#
# With one token the shared expert is one of nine experts to read; with 64 tokens it is less than a hundredth of the
# bytes. So the relative gain must shrink as the number of tokens grows. And replicas, which add bytes, cost time as
# long as reading weights is the limit.
#
# ## 4. The step ladder
#
# The steps are whole layers (router, gate, alignment, two grouped GEMMs, weighted sum) with DeepSeek-V3's shapes on one
# of 8 GPUs. Gate and alignment are this package's. The grouped GEMMs are torch's, `torch._grouped_mm` in bfloat16 and
# `torch._scaled_grouped_mm` in FP8; the last step uses the package's. The layer:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown("```python\n" + inspect.getsource(Layer.experts) + "```")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown("```python\n" + inspect.getsource(Layer.shared_experts) + "\n" + inspect.getsource(Layer.separate) + "```")

# %% [markdown]
# The main size is 8 tokens in bfloat16, as in decoding. Each step is also timed for 1 and 64 tokens, for 1024 tokens
# (**prefill**, processing a prompt), and in FP8, and is checked first in all five settings. The measurement rotates
# through the weights of four layers, so that they are not in the L2 cache.
#
# A step predicts what it saves over an earlier step; both are timed interleaved. The line of a step has both times, and
# the predicted and the measured change.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def setting(dtype, tokens):
    """Return layers with different weights, tokens, and the expected output of the first layer."""
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
SETTINGS = {
    "one": "1 token",
    "batch": f"{BATCH} tokens",
    "prefill": f"{PREFILL} tokens",
    "fp8": f"{DECODE} tokens, FP8",
}
EXPERTS, REPLICAS = HERE.shape.num_experts, HERE.replicas

ladder = Ladder(
    "shared_experts_ladder",
    lambda out: mismatch(out, MAIN[2], torch.bfloat16),
    title=f"Fused shared expert: {DECODE} tokens, bfloat16, DeepSeek-V3 on one of 8 GPUs",
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


def measure(name, forward, others=OTHERS, **more):
    """Check and time ``forward(layer, x)`` in all settings."""
    with ladder.attempt(name, "bfloat16"):
        for which, (layers, x, right) in others.items():
            wrong = mismatch(forward(layers[0], x), right, layers[0].dtype)
            assert not wrong, f"{name}, {SETTINGS[which]}: {wrong}"
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
            floor_us=LOWER_BOUND_US,
            launches=torch_layer.count_kernels(calls[0]),
            **more,
        )


def print_settings(name, before=None):
    """Print a step's number of kernels and its times in the other settings, beside those of step ``before``."""
    ladder.report(name, floor_us=LOWER_BOUND_US)
    row, old = ladder.row(name), ladder.row(before) if before else None
    if row and "launches" in row:
        print(f"    {row['launches']} kernels" + (f" (before: {old['launches']})" if old else ""))
    for which, label in SETTINGS.items():
        now, then = us(name, f"{which}_us"), us(before, f"{which}_us") if before else None
        if now:
            change = f" (before: {then:.1f} us, {now - then:+.1f})" if then else ""
            print(f"    {label}: {now:.1f} us{change}")


# %% [markdown]
# ### Step 0: a separate shared expert
#
# **Idea.** The layer as it was: `forward_normal`.


# %%
def separate(layer, x):
    return layer.separate(x)


measure("separate", separate)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_settings("separate")

# %% [markdown]
# The predictions need the times of parts of this layer: a small torch operation, here on a table of eight tokens' nine
# weights, and the shared expert. What torch's grouped GEMM needs per expert follows from its time alone in the record of
# `python -m moe_numba bench shared_experts`.

# %%
TABLE = torch.rand(HERE.decode, HERE.shape.topk + 1, device=DEVICE)
PARTS = ladder.times(
    "parts of separate",
    {
        "small operation": partial(torch.mul, TABLE, 1.0, out=TABLE),
        "shared expert": [partial(layer.shared_experts, MAIN[1]) for layer in MAIN[0]],
    },
)
SMALL_US, SHARED_US = (PARTS["small operation"], PARTS["shared expert"]) if PARTS else (0, 0)
GEMMS_US = recorded_us("1 shared", DECODE, "bfloat16", "GEMMs")
EXPERT_US = GEMMS_US / (experts_chosen(DECODE) + 1) if GEMMS_US else weights_us(1)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "A small operation takes {small:.1f} us, the shared expert {shared:.1f} us. Torch's grouped GEMM takes {expert:.1f} us per "
    "expert; to read its weights at the bandwidth of a copy takes {weights:.1f} us.",
    small=PARTS and SMALL_US,
    shared=PARTS and SHARED_US,
    expert=GEMMS_US and EXPERT_US,
    weights=weights_us(1),
)

# %% [markdown]
# Most of the layer's time is spent in the grouped GEMMs; the fusion can only gain in the rest. In FP8 each quantisation is
# several torch operations where a server uses one kernel, so the FP8 results overstate the gain.
#
# ### Step 1: the ninth column with torch operations
#
# **Idea.** Fuse as the article does. The gate chooses nine experts. The last column is then overwritten with the number
# of the shared expert (with replicas, of a random one) and with the weight of section 2. At this point the weights are
# not yet normalised, so the ninth becomes the sum of the other eight divided by the scaling factor.
#
# **Predicted gain.** The shared expert and the addition of its output disappear. Seven torch operations for the column
# are added, and the grouped GEMM reads one more expert.


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
    """Choose nine experts, and overwrite the last one."""
    nine = layer.choose(logits, topk=layer.shape.topk + 1, renormalize=False)
    return append_by_torch(*nine, layer.shape.num_experts, replicas, layer.shape.routed_scaling_factor)


def fused_by_torch(layer, x, replicas=1):
    return layer.fused(x, *by_torch(layer, layer.logits(x), replicas), layer.shape.num_experts + replicas)


gain_us = SHARED_US + SMALL_US - 7 * SMALL_US - EXPERT_US
measure("ninth column, torch", fused_by_torch, after="separate", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_settings("ninth column, torch", "separate")

# %% [markdown]
# **Explanation.** In bfloat16 the fusion gains nothing: for 8 tokens the change is within the noise, and in the other
# three settings the layer is slower. The operations on a small table of 8 x 9 numbers need as many launches as the
# shared expert's kernels did. Gathering, scattering and summing the rows of the ninth slot is added, which costs most
# for 1024 tokens. In FP8 the fusion is faster, since the quantisation for the shared expert's own GEMMs disappears.
#
# ### Step 2: replicas
#
# **Idea.** Every token goes to expert 256: with 64 tokens it has 64 rows, a routed expert two on average. The article
# assumes that this imbalance makes the GEMM inefficient, and that replicas, as many as ranks (`tp_size = 8`), balance
# the load: each token takes a random one. Its author measured that one shared expert was slower than eight replicas.
#
# **Predicted gain.** A loss. Eight tokens use about five of eight replicas, so about four more experts are read. Nothing
# offsets this: 64 rows in one expert fill one tile of torch's GEMM; in eight replicas they are eight partly filled
# tiles.

# %%
replicas_read = 8 * (1 - (1 - 1 / 8) ** DECODE)
print(f"{replicas_read:.1f} of 8 replicas are read")
gain_us = -(replicas_read - 1) * EXPERT_US
eight = partial(fused_by_torch, replicas=REPLICAS)
measure("8 replicas", eight, after="ninth column, torch", predicted_gain_us=gain_us)
if not ladder.untimed and (gain := ladder.gain("8 replicas")) and gain.saved_us < 0:
    ladder.rows[-1]["slower"] = True

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_settings("8 replicas", "ninth column, torch")

# %% [markdown]
# **Explanation.** A loss as predicted, except for one token, which uses one replica. Its size beside the GEMMs alone:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
REPLICA_GEMMS_US = recorded_us("8 replicas", DECODE, "bfloat16", "GEMMs")
say(
    "By the record, replicas add {loss:.1f} us to the GEMMs. At the bandwidth of a copy, reading {more:.1f} more experts takes "
    "{weights:.1f} us, at the rate of the whole GEMM {average:.1f} us. That rate, which the prediction uses, includes fixed costs.",
    loss=GEMMS_US and REPLICA_GEMMS_US and REPLICA_GEMMS_US - GEMMS_US,
    more=replicas_read - 1,
    weights=weights_us(replicas_read - 1),
    average=(replicas_read - 1) * EXPERT_US,
)

# %% [markdown]
# Section 5 measures many tokens, where the shared expert has many tiles. The next step continues from step 1.
#
# ### Step 3: the ninth column in one kernel
#
# **Idea.** One kernel writes a table of nine columns from one of eight, with one thread per element. With replicas a
# token takes number `token % replicas` (**round-robin**), which balances the load to within one row, without random
# numbers.
#
# **Predicted gain.** One kernel instead of seven saves six small operations.


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


def fused_by_own_kernel(layer, x):
    return layer.fused(x, *by_own_kernel(layer, layer.logits(x)), layer.shape.num_experts + 1)


for replicas in (1, 3):  # the routing itself, not only what the layer makes of it
    layer, x, _ = MAIN
    logits = layer[0].logits(x)
    right = reference.fuse_routing(*layer[0].choose(logits), EXPERTS, replicas, 2.5, "round_robin")
    assert all(map(torch.equal, by_own_kernel(layer[0], logits, replicas), right))

measure("ninth column, 1 kernel", fused_by_own_kernel, after="ninth column, torch", predicted_gain_us=6 * SMALL_US)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_settings("ninth column, 1 kernel", "ninth column, torch")

# %% [markdown]
# **Explanation.** Six kernels fewer, and faster in all settings except for 1024 tokens, where the saving is lost in the
# noise. The call time falls by more than the kernel time, because each torch operation also costs CPU time.
#
# ### Step 4: the package's `fuse_routing`
#
# **Idea.** `moe_numba.shared_experts.fuse_routing` extends this kernel. It has three policies: `"all"` for distinct
# shared experts, and `"round_robin"` and `"random"` for replicas. The random choice is a hash of the token's number and
# a seed. A padding token (id -1) remains padding. With programmatic dependent launch (notebook 01) its CTAs start while
# the gate's kernel is still running.
#
# **Predicted gain.** What programmatic dependent launch saves for an empty kernel, from the record.


# %%
def by_fuse_routing(layer, logits, replicas=1, policy="all"):
    scale = layer.shape.routed_scaling_factor
    return fuse_routing(*layer.choose(logits), layer.shape.num_experts, replicas, scale, policy)


def fused_by_fuse_routing(layer, x):
    return layer.fused(x, *by_fuse_routing(layer, layer.logits(x)), layer.shape.num_experts + 1)


def empty_kernel_us(dependent):
    """Return the recorded time of an empty kernel; 0 if there is no record."""
    row = SHARED and records.find(SHARED, step="empty kernel", config={"dependent": dependent})
    return row["kernel_us"]["median"] if row else 0


gain_us = empty_kernel_us(dependent=False) - empty_kernel_us(dependent=True)
measure("fuse_routing", fused_by_fuse_routing, after="ninth column, 1 kernel", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_settings("fuse_routing", "ninth column, 1 kernel")

# %% [markdown]
# **Explanation.** The predicted change is far below the noise of a whole layer, and so are the measured changes.
#
# **Exercise 2.** This kernel appends a ninth column to the routing, one thread per element. Token `t` must take replica
# `t % replicas`. A padding token, whose ids are -1, must get the id -1 and the weight 0 in this column, too. `weights`
# and `ids` are `[tokens, 9]`. Find the two mistakes, and repair them.


# %%
@cuda.jit
def append_replica(topk_weights, topk_ids, weights, ids, num_experts, replicas, shared_weight):
    i = cuda.grid(1)
    tokens, columns = ids.shape
    token, column = i // columns, i % columns
    if token < tokens:
        if column < columns - 1:
            weights[token, column] = topk_weights[token, column]
            ids[token, column] = topk_ids[token, column]
        else:
            weights[token, column] = shared_weight
            ids[token, column] = num_experts + i % replicas


exercise("shared_experts-2").check(append_replica)

# %% [markdown]
# ### Step 5: the ninth column in the gate's kernel
#
# **Idea.** The article expects a larger gain in combination with a fused gate. With `num_fused_shared_experts=1` the
# gate writes nine columns instead of eight, and the shared expert needs no additional kernel.
#
# **Predicted gain.** One kernel less saves the time of an empty kernel with programmatic dependent launch.


# %%
def by_gate(layer, logits):
    return layer.choose(logits, shared=1)


def fused_by_gate(layer, x):
    return layer.fused(x, *by_gate(layer, layer.logits(x)), layer.shape.num_experts + 1)


measure("final", fused_by_gate, after="fuse_routing", predicted_gain_us=empty_kernel_us(dependent=True))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_settings("final", "fuse_routing")

# %% [markdown]
# **Explanation.** This change, too, is within the noise of the whole layer. The next cell therefore times the routing
# alone, from the router's scores to the finished table, all variants interleaved:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ROUTES = {
    "gate alone": lambda layer, logits: layer.choose(logits),
    "gate, then torch": by_torch,
    "gate, then one kernel": by_own_kernel,
    "gate, then fuse_routing": by_fuse_routing,
    "gate, column inside": by_gate,
}


def measure_routes():
    """Time each variant in decoding and in prefill: {variant: {which: {"kernel": us, "call": us}}}."""
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
    print("no times are recorded yet")

# %% [markdown]
# At both sizes the gate with the ninth column takes as long as without it. The torch operations take several times as
# long as the gate itself, in kernel time and in call time.
#
# ### Step 6: moe_numba's grouped GEMM
#
# **Idea.** Torch's grouped GEMMs are most of the remaining time. The package's `group_gemm_bf16` ([notebook
# 06](07_grouped_gemm.ipynb)) takes the same arguments: rows sorted by expert and the end offset of each expert
# (`offs`).
#
# In FP8 the two are not interchangeable: torch's GEMM expects one scale per row of a weight matrix, the package's one
# scale per expert or one per 128 x 128 block.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown("```python\n" + inspect.getsource(moe_numba_grouped_gemm) + "```")

# %% [markdown]
# **Predicted gain.** The difference of the GEMMs alone, from the record. Each of torch's two includes a kernel that
# prepares addresses and sizes.


# %%
def fused_with_moe_numba_gemm(layer, x):
    return fused_by_gate(layer.with_grouped_gemm(moe_numba_grouped_gemm), x)


IN_BFLOAT16 = {which: OTHERS[which] for which in ("one", "batch", "prefill")}
OTHER_SETTINGS = {} if simulator.ENABLED else IN_BFLOAT16
OWN_GEMMS_US = recorded_us("1 shared, own GEMM", DECODE, "bfloat16", "GEMMs")
gain_us = GEMMS_US - OWN_GEMMS_US if GEMMS_US and OWN_GEMMS_US else 0
measure("moe_numba grouped GEMM", fused_with_moe_numba_gemm, OTHER_SETTINGS, after="final", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print_settings("moe_numba grouped GEMM", "final")

# %% [markdown]
# **Explanation.** The layer saves about what its GEMMs save alone. The call time is several times the kernel time:
# without a CUDA graph the CPU limits the layer, and the call times of the whole ladder do not show the gain.
#
# The record has the layer before and after the fusion, with torch's GEMM and with moe_numba's:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def percent(new, old):
    return 100 * (new / old - 1)


def both_grouped_gemms():
    """Format the recorded layers in bfloat16 with torch's grouped GEMM and with moe_numba's, a line per size."""
    for what in ("layer", "GEMMs"):
        for tokens in (1, 8, 64, 256, 1024, 4096):
            found = [
                recorded_us(name, tokens, "bfloat16", what)
                for name in ("separate", "1 shared", "separate, own GEMM", "1 shared, own GEMM")
            ]
            if all(found):
                torch_us, moe_numba_us = (
                    f"{old:7.1f} -> {new:7.1f} us ({percent(new, old):+5.1f} %)" for old, new in (found[:2], found[2:])
                )
                yield f"{what:<6} {tokens:5} tokens, separate -> fused: torch {torch_us}; moe_numba {moe_numba_us}"


print("\n".join(both_grouped_gemms()) or "no times are recorded yet")

# %% [markdown]
# Up to 64 tokens the fusion saves about as many microseconds as with torch's GEMM. From 256 tokens on it is about
# neutral with torch's GEMM and slightly slower with the package's. With the package's GEMM the loss at 256 and 1024
# tokens is in the GEMMs themselves; the cause is not known. At 4096 tokens it is outside of them: the rows of the ninth
# slot must be gathered and summed, as in step 1.
#
# ### Negative tests: wrong results must be rejected
#
# Three wrong layers: the ninth weight without the division; eight replicas that are all added, as if they were
# distinct; and no shared expert for one token.


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
# All steps once more, measured interleaved.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder.measure_all()
ladder.save()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder.plot(floor_us=LOWER_BOUND_US)

# %% [markdown]
# The last steps before `moe_numba grouped GEMM` differ by less than the layer's time varies from one measurement to the
# next; the routing alone, above, decides their order.
#
# In a CUDA graph, as in SGLang's decoding, the kernel time counts. Prefill usually runs without a graph, and the call
# time counts:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
LADDER = ladder.record if ladder.untimed else {"rows": ladder.rows}
if LADDER:
    picture = plots.split_figure(LADDER["rows"], title="Kernel time and call time")
else:
    picture = print("No ladder is recorded yet.")
picture

# %% [markdown]
# ## 5. One shared expert against eight replicas
#
# The imbalance that the article describes: 4096 tokens, routed by DeepSeek-V3's rule from random scores. Each bar shows
# the rows of one expert. A grouped GEMM divides them into tiles of, for example, 128 rows. The tiles of one expert form
# a **column**.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def rows_of(ids, experts):
    return torch.bincount(ids.flatten().long(), minlength=experts).tolist()


ROUTINGS = {"separate": (MANY_IDS, 256)}
for name, replicas in (("one shared expert", 1), ("8 replicas, random", 8)):
    ROUTINGS[name] = (reference.fuse_routing(MANY_WEIGHTS, MANY_IDS, 256, replicas, 2.5, "random")[1], 256 + replicas)
LOADS = {name: rows_of(*routing) for name, routing in ROUTINGS.items()}

draw.load({name: counts for name, counts in LOADS.items() if name != "separate"}, 256, tile_rows=128)

# %% [markdown]
# If one SM processes a whole column, the longest column determines the time. If the tiles are scheduled individually
# from one queue, only their total number matters:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw.schedules([1, 2, 1, 1, 2, 1, 8], workers=4, shared={6})

# %% [markdown]
# Torch's grouped GEMM (from CUTLASS) schedules single tiles, and so do others, such as SGLang's Triton kernel. The next
# cell computes both schedules for this load, with 4 tiles side by side, because the first GEMM is 512 wide and a tile
# 128. A `round` is the time of one tile.


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
            f"tiles of {tile_rows:3} rows, {name:<18} longest column {max(tiles):2}, all {sum(tiles)}; rounds with "
            f"whole columns {units(counts, tile_rows, True):3}, tile by tile {units(counts, tile_rows, False):2}"
        )

# %% [markdown]
# **Exercise 3.** Write `rounds(counts, tile_rows, across, sms)`, which returns a pair: the rounds that single tiles
# need, and a lower bound for whole columns, from the longest column and the number of all tiles. `counts` has the rows
# of each expert, and an expert has `across` columns.

# %%
rounds = ...
exercise("shared_experts-3").check(rounds)

# %% [markdown]
# With single tiles, one shared expert and eight replicas need the same number of rounds, or one more or less. The
# prediction: no difference for many tokens, and for few tokens a loss of up to seven experts' bytes. The figures show
# the GEMMs alone, relative to the layer with a separate shared expert, from the record of `python -m moe_numba bench
# shared_experts`.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def bars(what, dtype, model="tp8"):
    """Draw the recorded times of one setting."""
    times = SHARED and layer_times(SHARED, model, dtype, what)
    if not times:
        return print("The layers have not been recorded yet; `python -m moe_numba bench shared_experts` does it.")
    label = {"layer": "The layer", "GEMMs": "Its GEMMs alone"}[what]
    ranks = {"tp8": "an eighth of 256 experts", "ep8": "32 whole experts"}[model]
    return layer_bars(times, "separate", title=f"{label}: {ranks}, {dtype}", caption=plots.caption(SHARED))


bars("GEMMs", "bfloat16")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
bars("GEMMs", "float8_e4m3fn")


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def compare_replicas(dtype, what):
    """Return {tokens: percent by which one shared expert is slower than eight replicas}; empty if not recorded."""
    times = layer_times(SHARED, "tp8", dtype, what) if SHARED else {}
    return {tokens: 100 * (own["1 shared"] / own["8 replicas"] - 1) for tokens, own in times.items()}


for dtype in BYTES:
    for what in ("GEMMs", "layer"):
        if differences := compare_replicas(dtype, what):
            listed = ", ".join(f"{tokens}: {more:+.1f} %" for tokens, more in differences.items())
            print(f"one shared expert against 8 replicas, {what:<5}, {dtype:<14} {listed}")
if not SHARED:
    print("no times are recorded yet")

# %% [markdown]
# **Explanation.** For few tokens replicas are slower, as predicted (except for one token, which uses one replica), and
# at 64 and 256 tokens they lose more than the time to read seven experts. For many tokens one shared expert is not
# slower either: it is faster in almost all settings, mostly by one to two percent. The number of rounds does not
# explain this, and we have not isolated the reason.
#
# A pitfall: torch selects its tile size by the *average* number of rows per expert, 64 rows up to an average of 128 and
# 128 rows above. The ninth column raises the average:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
for tokens in (1024, 2048, 4096, 8192):
    rules = []
    for name, replicas in (("separate", 0), ("1 shared", 1), ("8 replicas", 8)):
        slots, experts = tokens * (8 + (replicas > 0)), 256 + replicas
        tile = torch_layer.tile_rows(slots, experts, 512, 7168, torch.bfloat16)
        rules.append(f"{name}: {slots // experts} rows on average, tiles of {tile}")
    print(f"{tokens} tokens: " + "; ".join(rules))

# %% [markdown]
# So at 4096 tokens two different kernels are compared; this is a likely reason for the larger gain of the FP8 GEMMs at
# that size. It is also why a fused kernel must be **tuned** again, as the article remarks: SGLang's Triton kernel reads
# its tile sizes from a file per number of experts.
#
# SGLang later dropped the replicas ([PR 6736](https://github.com/sgl-project/sglang/pull/6736)).
#
# ## 6. The sweep over tokens
#
# The whole layer, relative to the layer with a separate shared expert.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
bars("layer", "bfloat16")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
bars("layer", "float8_e4m3fn")

# %% [markdown]
# In bfloat16 the fusion pays for few tokens. From 1024 tokens on it is neutral or slightly slower. In FP8 it pays at
# every size. Much of that gain comes from the quantisation that disappears with the shared expert's own GEMMs: between
# 64 and 2048 tokens the GEMMs alone gain a few percent only, the whole layer clearly more, and the bfloat16 layer shows
# no such gain.
#
# With **expert parallelism** each of 8 GPUs holds 32 whole experts. An expert is then eight times as large, its rows
# come from all GPUs, and the shared expert has 4 times the rows of a routed one instead of 32 times.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
bars("layer", "bfloat16", "ep8")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
bars("layer", "float8_e4m3fn", "ep8")

# %% [markdown]
# In bfloat16 the fusion with one shared expert gains slightly at 64 and 256 tokens and is slower at the other sizes.
# Hypothesis: a whole expert's GEMM has enough tiles for all SMs. Replicas, each a whole expert to read, are slower at
# every size. In FP8 the fusion with one shared expert is faster at every size, again with less quantisation.
#
# Below, the routing over tokens. (`gate, then torch` has fewer operations than in step 1: one shared expert needs no
# random number, and the weights are already normalised.) The ninth column in the gate's kernel adds little at any size.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GATE_CONFIG = {"num_experts": 256, "num_expert_group": 8}
if SHARED:
    lines = {name: records.series(SHARED, step=name, config=GATE_CONFIG) for name in GATES}
    picture = plots.sweep_figure(lines, title="Gate and ninth column", caption=plots.caption(SHARED))
else:
    picture = print("The routing over tokens has not been recorded yet.")
picture

# %% [markdown]
# ## 7. Loading the weights
#
# A checkpoint stores the shared expert under its own names, such as `mlp.shared_experts.up_proj.weight`. The loader
# must rename it to experts 256, 257, ... The folded cell creates a small checkpoint of DeepSeek-V3's structure and runs
# the article's listing of SGLang's `load_weights` (`article_load_weights`) on it.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
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
    """Yield the checkpoint's (name, tensor) pairs, and count in ALIVE the bytes that are held at the same time."""
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
    """Load a checkpoint with fuse_checkpoint and with the article's code: sets of (name, bits), and the peak bytes."""
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
# Both return the same tensors. The article's code has three inefficiencies:
#
# - **It holds all tensors.** `weights` is an iterator, so that each tensor can be copied to the GPU and released.
#   `list(weights)` holds all 671 billion weights, in each of 8 processes.
# - **It clones every replica.** `clone()` makes eight copies of each shared expert in host memory; the same tensor can
#   be yielded eight times.
# - **It searches a list for every tensor.** Each name occurs eight times in `names_to_remove`, because `+=` is inside
#   the loop over replicas. A set needs one lookup.
#
# `moe_numba.shared_experts.fuse_checkpoint` checks names and shapes and then streams the checkpoint tensor by tensor.
# The next cell estimates the cost of the article's code for the real model.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
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
    """Estimate the seconds to look all entries up in ``names``, from a sample, on this computer."""
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
    f"on this computer they take about {seconds_for_all(names_to_remove):.1f} s, with a set "
    f"{seconds_for_all(set(names_to_remove)):.3f} s"
)

# %% [markdown]
# **Exercise 4.** Write a generator `load_weights(weights, replicas, num_experts)` over an iterator of (name, tensor).
# It yields each tensor of `shared_experts` once per replica, under the names of experts `num_experts` and following
# (`mlp.experts.256.up_proj.weight`), and all other pairs unchanged. It must not copy tensors, nor keep those that it
# has yielded.

# %%
load_weights = ...
exercise("shared_experts-4").check(load_weights)

# %% [markdown]
# ### Two checkpoints that the article's code cannot load
#
# A bfloat16 checkpoint has no scales, which the code expects for every weight. And DeepSeek-V2's checkpoint stores its
# two shared experts as *one* MLP of twice the width, which must first be split. (This is exact: an MLP of twice the
# width is the sum of two.)

# %%
try:
    load_both(MODEL, scales=False)
    print("no scales: loaded")
except KeyError as error:
    print("no scales, the article's code: KeyError:", error)
ours, articles, _, _ = load_both({**MODEL, "n_shared_experts": 2}, replicas=1)
for label, loaded in (("the article's code", articles), ("fuse_checkpoint", ours)):
    lengths = {name: len(bits) for name, bits in loaded if name.endswith("up_proj.weight")}
    widths = {expert: lengths.get(f"model.layers.1.mlp.experts.{expert}.up_proj.weight") for expert in (0, 8, 9)}
    print(f"two shared experts, {label}: bytes of up_proj of experts 0, 8 and 9: {list(widths.values())}")

# %% [markdown]
# ## 8. The memory cost of replicas
#
# The article computes: an expert has 7168 x 2048 x 3 weights, 42 MB in FP8. Each rank stores one more expert in each of
# (51 - 3) layers: 48 x 42 MB = 2016 MB = 1.96 GB.
#
# Two corrections. DeepSeek-V3 has 61 layers, of which the first 3 have no experts. And with TP8 a rank holds one eighth
# of each of the eight replicas, in total one expert per layer, but no longer the eighth of the separate shared expert.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
theirs, layers58, on_a_rank = memory_cost(num_hidden_layers=51), memory_cost(), memory_cost(8, tensor_parallel_size=8)
one_on_a_rank = memory_cost(1, tensor_parallel_size=8)
print(f"an expert: {theirs.expert_bytes / MEBI:g} MiB")
for label, layers, amount in (
    ("the article's 51 layers, one expert each", theirs.moe_layers, theirs.replicas_bytes),
    ("61 layers, one expert each", layers58.moe_layers, layers58.replicas_bytes),
    ("TP8, 8 replicas, on a rank", on_a_rank.moe_layers, on_a_rank.replicas_bytes),
    ("the same, less the share that was there before", on_a_rank.moe_layers, on_a_rank.extra_bytes),
    ("TP8, one shared expert, no copies", one_on_a_rank.moe_layers, one_on_a_rank.extra_bytes),
):
    each = amount / layers / MEBI
    print(f"{label:<48} {layers} x {each:5.2f} MiB = {amount / MEBI:6.1f} MiB = {amount / GIBI:.3f} GiB")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
EXTRA = {replicas: memory_cost(replicas, tensor_parallel_size=8).extra_bytes / GIBI for replicas in range(1, 9)}
draw.memory(
    EXTRA,
    {
        "the article's 51 layers": theirs.replicas_bytes / GIBI,
        "58 layers, one whole expert each": layers58.replicas_bytes / GIBI,
    },
)

# %% [markdown]
# Without replicas the fusion needs no additional memory.
#
# ## 9. The article's measurements, and what a layer can explain
#
# `THEIRS` in the folded cell holds the article's end-to-end results: before, after, and the change in percent. The model
# was served on 8 H200, with the fusion with 8 replicas and without it. QPS is queries per second, **TTFT** the time to
# the first token and **ITL** the inter-token latency in milliseconds; throughput is in tokens per second.
#
# A single layer cannot reproduce measurements of a server, but it gives an upper bound on what the fusion can explain.
# DeepSeek-V3 has 58 layers with experts: 58 times the saving of one layer is the possible saving between two tokens; a
# prompt passes all layers once.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
THEIRS = {
    1: {"throughput": (483.47, 485.72, 0.5), "TTFT": (949.18, 664.25, 30.0), "ITL": (54.69, 50.20, 8.2)},
    4: {"throughput": (1088.59, 1132.73, 4.0), "TTFT": (2630.26, 2144.08, 18.5), "ITL": (156.21, 132.75, 15.0)},
    8: {"throughput": (1188.77, 1235.63, 3.9), "TTFT": (6320.67, 3443.59, 45.5), "ITL": (188.29, 178.94, 5.0)},
}
MOE_LAYERS = layers58.moe_layers
DECODE_SIZES, PREFILL_SIZES = (1, 8, 64, 256), (1024, 4096)


def saved_ms(tokens, variant="1 shared", key="kernel_us"):
    """Return the milliseconds that 58 layers save in FP8, or None."""
    old, new = (recorded_us(name, tokens, key=key) for name in ("separate", variant))
    return (old - new) * MOE_LAYERS / 1000 if old and new else None


def explained(metric, qps, sizes, variant):
    """Return the largest share of the article's difference that the layers explain, and its source; or None.

    Decoding runs in a CUDA graph. Prefill may wait for the CPU, so the call time counts too.
    """
    before, after, _ = THEIRS[qps][metric]
    found = {f"{tokens} tokens": saved_ms(tokens, variant) for tokens in sizes}
    if metric == "TTFT":
        found["call time"] = saved_ms(64, variant, "call_us")
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
        print(f"{variant:<10} without a CUDA graph the CPU saves {ms:.1f} ms in the calls of 58 layers")
if not SHARED:
    print("no times are recorded yet")

# %% [markdown]
# For ITL the layers can explain most of the difference at one query per second, and a smaller part at four and eight.
# These are upper bounds: the calculation takes the most favourable number of tokens, and our FP8 layer saves
# quantisation operations that a server does not have.
#
# For TTFT they explain a small part only. Hypothesis: first tokens also wait for queued prompts. A shorter queue can
# make the end-to-end gain larger than the layers' saving, but that depends on the load of the server.
#
# ## 10. Common bugs
#
# ### A variable that is not always assigned
#
# `forward_normal` assigns `shared_output` only if the model has shared experts, but always reads it.

# %%
without = DeepseekV2MoE(exact)
without.n_shared_experts = None
try:
    without.forward_normal(exact.tokens(2))
except UnboundLocalError as error:
    print("UnboundLocalError:", error)

# %% [markdown]
# ### Choosing an expert that is then overwritten
#
# The article's routing chooses nine experts and overwrites the ninth. If the kept groups contain only `topk` experts,
# there is no ninth to choose. The package's gate counts only the routed experts:

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
# ### Nondeterministic routing
#
# With `torch.randint` a token uses a different replica in each run. Its row is then in another expert's tile, next to
# other rows; whether its result stays bit-identical depends on the GEMM. `fuse_routing` takes a seed, which makes the
# routing reproducible. Five seeds, then one seed five times:

# %%
layer, tokens, _ = OTHERS["prefill"]
for label, seeds in (("five seeds", range(5)), ("one seed, five times", [0] * 5)):
    results = []
    for seed in seeds:
        routing = fuse_routing(*layer[0].route(tokens), EXPERTS, REPLICAS, 2.5, "random", seed)
        results.append(layer[0].fused(tokens, *routing))
    different = 1 + sum(not any(torch.equal(out, other) for other in results[:i]) for i, out in enumerate(results) if i)
    print(f"{label}: {different} different result{'s' * (different > 1)}")

# %% [markdown]
# All five runs are bit-identical: here torch's GEMM computed the same bits for a row, independent of its neighbours.
# Torch does not guarantee this.
#
# ## 11. Sources
#
# - The article: BBuf (GiantPandaCV), 分享一个DeepSeek V3和R1中 Shared Experts和普通Experts融合的一个小技巧, in Chinese.
#   We compare [its claims](../docs/claims.md#shared-experts) with our measurements.
# - The idea: DiegoD94, [vllm 15502](https://github.com/vllm-project/vllm/pull/15502), with a [technical
#   document](https://docs.google.com/document/d/1iXgzR6Mt6s0DpT7w2Pz93ExlUJ-nnSnU_o9Sqd8TE34).
# - SGLang: [PR 4918](https://github.com/sgl-project/sglang/pull/4918), with commands and a benchmark of a single shared
#   expert; [PR 4348](https://github.com/sgl-project/sglang/pull/4348), more than 256 experts in the alignment; [PR
#   5371](https://github.com/sgl-project/sglang/pull/5371), the fused gate; [PR
#   6736](https://github.com/sgl-project/sglang/pull/6736), no replicas.
# - The model: DeepSeek-AI, *DeepSeek-V3 Technical Report*, 2024; *DeepSeekMoE*, 2024.
#
# ## The final kernel
#
# The kernel of `moe_numba.shared_experts.fuse_routing`. The gate's own column is in
# `moe_numba/gate/device_functions.py`.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from moe_numba.shared_experts import kernel as final_kernel

Markdown("```python\n" + inspect.getsource(final_kernel) + "\n```")
