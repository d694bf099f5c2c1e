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
# # The experts of an MoE layer
#
# The earlier notebooks built a gate, grouped GEMMs, dispatch and combine. This notebook assembles the experts of a
# layer, `moe_numba.fused_experts`. It starts from a loop over experts in torch and replaces one stage after another by
# a kernel. Two of these kernels are new and are built here: `group_by_expert` and `weighted_sum`. The last sections
# show where the time goes, what one token needs instead, run the layer on two virtual ranks (GPUs) and in a model of
# the transformers library, and estimate what 64 GPUs would change.
#
# Notebooks [01](01_gate.ipynb) and [06](06_grouped_gemm.ipynb) explain gate and grouped GEMM,
# [notebook 00](00_start_here.ipynb) the simulator.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from functools import cache, partial

import torch
from IPython.display import Markdown
from numba import cuda, float32, int32, uint32

from moe_numba import simulator
from moe_numba.align.device_functions import make_scan
from moe_numba.course import moe_layer_model as model
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.launch_profile import launch_profile
from moe_numba.course.bench.parts_figure import draw_parts, parts_table, rates_table
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.bench.topics import moe_layer as bench
from moe_numba.course.bench.topics import moe_layer_ranks as ranks_bench
from moe_numba.course.bench.topics.moe_layer_measure import Layer, make_inputs, make_weights, part_calls
from moe_numba.course.draw import moe_layer as draw
from moe_numba.course.draw.launch_timeline import launch_timeline
from moe_numba.course.exercises import exercise
from moe_numba.course.exercises.moe_layer import ranks_per_token
from moe_numba.course.ladder import Ladder
from moe_numba.course.moe_layer_runs import call_times_table, group_by, groups_mismatch, poisoned_groups, tiny_model
from moe_numba.course.prose import NOT_MEASURED, say
from moe_numba.course.simulate import in_simulator
from moe_numba.course.source_diff import OpCounter, change
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.moe_layer import ExpertParallelMoE, Experts, ExpertsWorkspace, fused_experts, reference
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.warp import lanemask_lt
from moe_numba.runtime.launch import launch

SIMULATED = simulator.ENABLED
DEVICE, LIMITS = "cpu" if SIMULATED else "cuda", chip_limits()
RECORD = records.recorded("moe_layer")  # written by `python -m moe_numba bench moe_layer`
NO_RECORD = "There is no record `moe_layer` yet; `python -m moe_numba bench moe_layer` writes it on a GPU."
QWEN, DEEPSEEK, SIZES = "Qwen3-30B-A3B", "DeepSeek-V3", (1, 64, 4096)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def recorded(step, model, tokens, field="kernel_us", record=RECORD):
    """Return a step's recorded median in microseconds, or another field of its row; None if there is none."""
    row = record and records.find(record, step=step, config={"model": model}, size={"tokens": tokens})
    value = row and row.get(field)
    return value["median"] if isinstance(value, dict) else value


def listed(step, field="kernel_us", record=RECORD):
    """Format what is recorded of Qwen3-30B-A3B for several numbers of tokens; None if one is missing."""
    found = [recorded(step, QWEN, tokens, field, record) for tokens in SIZES]
    return None if None in found else " / ".join(map(records.format_us, found))


def print_times(times):
    """Print measured or recorded microseconds by name."""
    print(", ".join(f"{name}: {us:.2f} us" for name, us in times.items()) or "no times are recorded")


say(
    "**Result.** On {gpu} the experts of one {model} layer take {ours} us for 1 / 64 / 4096 tokens (kernel time, "
    "recorded). transformers' `grouped_mm`, which uses torch's grouped GEMM, takes {peer} us. The lower bound, the time "
    "to read the weights or to compute, whichever is longer, is {bound} us.",
    gpu=RECORD and RECORD["gpu"].replace("NVIDIA", "an NVIDIA"),
    model=QWEN,
    ours=listed("final"),
    peer=listed("peer:transformers grouped_mm"),
    bound=listed("final", "floor_us"),
)

# %% [markdown]
# ## 1. The problem in one figure
#
# The gate chooses `topk` experts for each token, and their weights. An element of `topk_ids` is an **assignment** of a
# token to an expert. A grouped GEMM needs the rows of an expert next to each other, so assignments are grouped by
# expert. Afterwards the rows of each token are summed with the weights of the gate.

# %%
torch.manual_seed(3)
draw.layer(torch.rand(6, 4).topk(2).indices.int(), num_experts=4)

# %% [markdown]
# ## 2. The layer in torch
#
# An expert is a SwiGLU MLP with two weight matrices. `w13` computes gate and up, the two halves of its output; `w2`
# computes the expert's output from `silu(gate) * up`. For each expert the loop selects the tokens, runs two GEMMs, and
# adds the weighted rows to the output. On a GPU the sizes are those of Qwen3-30B-A3B in bfloat16; in the simulator they
# are small.

# %%
LAYERS = {layer.model: layer for layer in bench.LAYERS}
LAYER = Layer("small", 8, 128, 64, "bf16", (), 2) if SIMULATED else LAYERS[QWEN]
TOKENS = 6 if SIMULATED else 64
WEIGHTS = make_weights(LAYER, DEVICE)  # random
GIVEN = make_inputs(LAYER, TOKENS, *WEIGHTS)  # each token's experts are drawn at random
x, w13, w2, topk_weights, topk_ids, *_ = GIVEN


def experts_in_torch(x, w13, w2, topk_weights, topk_ids):
    out = torch.zeros(x.shape, device=x.device)
    for expert in topk_ids.unique().tolist():  # the CPU waits for the GPU
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)  # and waits again
        gate, up = (x[tokens] @ w13[expert].T).float().chunk(2, dim=1)
        activated = (torch.nn.functional.silu(gate) * up).bfloat16()
        out.index_add_(0, tokens, (activated @ w2[expert].T) * topk_weights[tokens, column, None])
    return out.bfloat16()


EXPECTED = reference.fused_experts(*GIVEN)  # in float64, rounded where kernels store bfloat16


def check(out):
    return mismatch(out, EXPECTED, 1e-2)


print("the loop:", check(experts_in_torch(*GIVEN[:5])) or "correct")

# %% [markdown]
# The check bounds the relative error of the whole output, of each row and of each element. It must reject wrong layers:

# %%
missing = topk_ids.clone()
missing[-1, -1] = -1  # an invalid expert id adds nothing
WRONG = {
    "weights applied twice": (x, w13, w2, topk_weights**2, topk_ids),
    "expert off by one": (x, w13, w2, topk_weights, (topk_ids + 1) % LAYER.num_experts),
    "an assignment is missing": (x, w13, w2, topk_weights, missing),
    "gate and up exchanged": (x, w13.roll(LAYER.intermediate, 1), w2, topk_weights, topk_ids),
}
for name, arguments in WRONG.items():
    assert (wrong := check(fused_experts(*arguments))), f"the check accepts: {name}"
    print(f"{name}: {wrong}")

# %% [markdown]
# ## 3. Lower bound
#
# A layer must read the weights of every expert that has a token, once, and must compute the GEMMs. If each token's `k`
# of `E` experts are drawn evenly at random, `n` tokens use `E (1 - (1 - k/E)^n)` experts on average. The GEMMs take
# `2 k n W` operations, where `W` is the number of weights of an expert.
#
# **Exercise 1.** With many tokens all experts are read. From how many tokens on does computing take longer than reading?


# %%
# Your answer, a function: lambda num_experts, topk, bytes_per_weight, bytes_per_second, operations_per_second: ...
tokens_that_fill = ...
exercise("moe_layer-1").check(tokens_that_fill)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
SHOWN = QWEN, DEEPSEEK, f"{DEEPSEEK}, 1 of 8 GPUs"
flops = [f"{model.GPU.tensor_flops[name] / 1e12:.0f} TFLOP/s in {name}" for name in ("bfloat16", "float8_e4m3fn")]
rates = f"Rates: data sheet of an H200, {model.GPU.hbm_bandwidth / 1e12:g} TB/s, {' and '.join(flops)}."
Markdown(f"{model.bounds_table([layer for layer in bench.LAYERS if layer.model in SHOWN])}\n\n{rates}")

# %% [markdown]
# Each of 8 GPUs holds 32 of the 256 experts; in this row all 8 experts of every token are local. The bounds are those of
# the expected number of experts; bounds beside measured times, in section 7, are those of the experts that were drawn.
#
# In decode the limit is reading: with 64 tokens nearly all experts are read for a few rows each. With a prompt of 4096
# tokens the limit is computing. In decode the other stages should add as little latency as possible; with a prompt they
# should not move large tensors through memory more often than necessary.
#
# ## 4. One stage after another
#
# `moe_numba.moe_layer.Experts` is the layer as a module of torch. Every stage is a kernel, or a torch reference if
# `reference` names it:
#
# | stage | kernel | built in |
# |---|---|---|
# | `permute` | `group_by_expert`: a counting sort in one launch returns the group sizes and the indices in both directions. Groups have no padding, unlike the [expert blocks of notebook 02](02_align.ipynb). | section 5 |
# | `quantise` | FP8 weights need FP8 tokens: one scale per 128 elements of a token. The launch is called `cast`; with many tokens `permute` does it. | [08](08_ring_buffer_dispatch.ipynb) |
# | `gate_up` | A grouped GEMM: one launch for all experts. Group sizes stay on the GPU, so the CPU does not wait for them. | [06](06_grouped_gemm.ipynb) |
# | `activation` | `silu(gate) * up`: part of the epilogue of the first grouped GEMM on GPUs with wgmma, otherwise one pass of a kernel. | |
# | `down` | The same grouped GEMM. | [06](06_grouped_gemm.ipynb) |
# | `sum` | `weighted_sum`: a thread adds the rows of a token in the order of k. | section 6 |
#
# With few rows per expert, the producer warps of the first grouped GEMM gather the rows of `x` by index. With many,
# `permute_tokens` copies `x` into the order of the experts first, because TMA loads consecutive rows faster.

# %%
experts = Experts(*LAYER[1:4], device=DEVICE, reference={"permute", "activation", "sum"})
experts.load_state_dict({"w13": w13, "w2": w2})
print(experts)

STEPS = {  # step -> stages in torch; None: the loop of section 2
    "torch loop": None,
    "grouped GEMMs": {"permute", "activation", "sum"},
    "group_by_expert": {"activation", "sum"},
    "silu_and_mul": {"sum"},
    "weighted_sum": set(),
}

# %% [markdown]
# Each step moves one stage out of torch; the first moves both GEMMs. A last step, `final`, keeps the intermediate
# results in an `ExpertsWorkspace` and writes into `out`, so that nothing is allocated.
#
# **Bottleneck.** Few tokens are little work for a GPU, but the CPU must launch every operation, and waits wherever torch
# needs a size that is known on the GPU only. A CUDA graph cannot capture a step that waits. The steps are therefore
# compared by call time, and the number of torch operations is counted.
#
# **Predicted gain.** The call time of the loop, divided by its torch operations, is the CPU's time per operation. A step
# saves this time for each operation fewer.


# %%
def with_stages(in_torch, given=GIVEN):
    """Compute the experts with some stages in torch; None: all of them, by the loop."""
    if in_torch is None:
        return experts_in_torch(*given[:5])
    experts.reference = in_torch
    return experts(given.x, given.weights, given.ids)


def prepared(given):
    """Return a call that allocates nothing; its output is poisoned."""
    out = torch.full_like(given.x, float("nan"))
    workspace = ExpertsWorkspace(len(given.x), LAYER.topk, given.w13, given.w2)
    return partial(fused_experts, *given, out=out, workspace=workspace)


layer_ladder = Ladder(
    "moe_layer_ladder",
    check,
    title=f"The experts of a layer, stage by stage: {QWEN}, 64 tokens",
    reference_name="torch loop",
    config={"num_experts": LAYER.num_experts, "topk": LAYER.topk, "hidden": LAYER.hidden},
    size={"tokens": TOKENS},
)
ONE_TOKEN = make_inputs(LAYER, 1, *WEIGHTS)  # of the timeline in section 7
calls = {name: partial(with_stages, in_torch) for name, in_torch in STEPS.items()} | {"final": prepared(GIVEN)}
for name, call in calls.items():
    with OpCounter() as operations:
        call()
    count = sum(operation != "moe_numba" for operation in operations.names)  # without functions of the package
    one = prepared(ONE_TOKEN) if name == "final" else partial(call, ONE_TOKEN)
    more = {"operations": count, "timeline": launch_profile(one)}
    layer_ladder.step(name, call, graph=name in ("weighted_sum", "final"), dtype="bf16", **more)
    print(f"{'':<24} {count} torch operations")
layer_ladder.measure_all()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(call_times_table(layer_ladder, calls) or NOT_MEASURED)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "**Explanation.** The prediction leaves out the functions of the package, and the memory that they allocate without "
    "a workspace. The launches of `final` take {final:.0f} us of CPU time. Their kernel time is {kernel:.0f} us, so with 64 tokens the "
    "{limit} is the limit now. With 1 token the kernels take {one:.0f} us; there a CUDA graph removes the CPU's time.",
    final=layer_ladder.median_us("final", "call_us"),
    kernel=layer_ladder.median_us("final"),
    limit="GPU"
    if (layer_ladder.median_us("final") or 0) > (layer_ladder.median_us("final", "call_us") or 0)
    else "CPU",
    one=recorded("final", QWEN, 1),
)

# %% [markdown]
# ## 5. Grouping by expert in one launch
#
# The grouped GEMMs need `seqlens` (rows of each expert), `cu_seqlens` (first row of each expert) and `gather_indices`
# (token of each row). The weighted sum needs `inverse_indices` (row of each assignment).
#
# ### Step 0: torch
#
# **Idea.** A stable sort and several small operations, here without waiting for the GPU.

# %%
G_EXPERTS, G_TOPK, G_TOKENS = (16, 4, 20) if SIMULATED else (256, 8, 64)
TIMED_EXPERTS, TIMED_ASSIGNMENTS = 256, 512  # of the recorded times
torch.manual_seed(4)
IDS = torch.rand(G_TOKENS, G_EXPERTS).topk(G_TOPK).indices.int().to(DEVICE)
FEW = IDS[:1].contiguous()  # one token
GROUPS = reference.group_by_expert(IDS, G_EXPERTS)


def group_in_torch(ids):
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    seqlens = torch.zeros(G_EXPERTS, dtype=torch.int64, device=DEVICE).scatter_add_(0, flat, torch.ones_like(flat))
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0))
    inverse = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=DEVICE))
    return seqlens.int(), cu_seqlens.int(), (order // G_TOPK).int(), inverse.int().view(ids.shape)


group_ladder = Ladder(
    "moe_layer_group_ladder",
    lambda outputs: groups_mismatch(outputs, GROUPS),
    title=f"Grouping {TIMED_ASSIGNMENTS} assignments by expert: {TIMED_EXPERTS} experts",
    reference_name="torch",
    config={"num_experts": G_EXPERTS, "topk": G_TOPK},
    size={"tokens": G_TOKENS},
)
with OpCounter() as operations:
    group_in_torch(IDS)
print(len(operations.names), "operations:", ", ".join(operations.names))
group_ladder.step("torch", partial(group_in_torch, IDS), dtype="int32")

# %% [markdown]
# ### Step 1: a counting sort in one launch
#
# **Bottleneck.** Each operation is a kernel or more. By **programmatic dependent launch** a kernel starts while the one
# before it in the stream still runs, and calls `griddepcontrol_wait` before it reads what that one writes. An empty
# kernel, launched in both ways, and torch's sort take:


# %%
@cuda.jit
def empty(x):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()


one_cta = partial(launch, empty, 1, 32, IDS)
calls = {"empty": one_cta, "empty, dependent": partial(one_cta, dependent=True)}
calls["sort"] = lambda: IDS.flatten().long().argsort(stable=True)
BASICS = group_ladder.times("basics", calls) or {}
print_times(BASICS)

# %% [markdown]
# **Idea.** A **counting sort** in one CTA. Each warp counts a contiguous share of the assignments in counters of its
# own, in shared memory. A scan turns counts into first rows. Then each warp reads its share again and places it.

# %%
torch.manual_seed(3)
draw.counting_sort(torch.rand(32, 8).topk(2).indices, num_experts=8, warps=2)

# %% [markdown]
# The sort is stable: shares are contiguous, a warp places 32 assignments at a time in order, and a lane counts the lower
# lanes with the same expert. `match_any_sync` returns a mask of the lanes with the same value. The scan over experts is
# `make_scan`, the two-level scan of [notebook 02](02_align.ipynb).
#
# **Predicted gain.** Torch's sort, and an empty launch for every other operation, less the launch of the new kernel.


# %%
@cache
def make_share_per_warp(num_experts, topk, warps):
    num_counts, threads = warps * num_experts, 32 * warps
    scan = make_scan(threads)

    @cuda.jit
    def share_per_warp(topk_ids, seqlens, cu_seqlens, gather_indices, inverse_indices, assignments):
        counts, starts = cuda.shared.array(num_counts, int32), cuda.shared.array(num_experts, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid, share = cuda.threadIdx.x, (assignments + threads - 1) // threads * 32
        own, first = (tid >> 5) * num_experts, (tid >> 5) * share
        end = min(first + share, assignments)
        for i in range(tid, num_counts, threads):
            counts[i] = 0
        cuda.syncthreads()
        for i in range(first + (tid & 31), end, 32):
            cuda.atomic.add(counts, own + topk_ids[i], 1)
        cuda.syncthreads()
        total = int32(0)
        if tid < num_experts:
            for warp in range(0, num_counts, num_experts):
                counts[warp + tid], total = total, int32(total + counts[warp + tid])
        row, _ = scan(total, warp_sums)
        if tid < num_experts:
            seqlens[tid], starts[tid], cu_seqlens[tid] = total, row, row
            if tid == num_experts - 1:
                cu_seqlens[num_experts] = row + total
        cuda.syncthreads()
        place(topk_ids, gather_indices, inverse_indices, starts, counts, own, first, end, num_experts, topk)

    return share_per_warp


# %%
@cuda.jit(device=True)
def place(topk_ids, gather_indices, inverse_indices, starts, counts, own, first, end, num_experts, topk):
    """Write the rows of a warp's share; ``counts[own + e]`` is the number of earlier assignments of expert e."""
    lane = cuda.threadIdx.x & 31
    for base in range(first, end, 32):
        i, expert = int32(base + lane), int32(num_experts)
        if i < end:
            expert = topk_ids[i]
        same = uint32(cuda.match_any_sync(0xFFFFFFFF, expert))
        lower = int32(cuda.popc(same & lanemask_lt()))
        if i < end:
            row = int32(starts[expert] + counts[own + expert] + lower)
            gather_indices[row] = i // topk
            inverse_indices[i] = row
        cuda.syncwarp()
        if i < end and lower == 0:
            counts[own + expert] += int32(cuda.popc(same))
        cuda.syncwarp()


def group_step(name, make_call, **options):
    """Run a step of this section; ``make_call(ids, num_experts)`` returns a call, whose outputs are poisoned."""
    MAKE_CALL[name] = make_call
    group_ladder.step(name, make_call(IDS, G_EXPERTS), dtype="int32", **options)


MAKE_CALL, WARPS = {}, 2 if SIMULATED else 8
others = len(operations.names) - 3  # without the sort, its conversion to int64, and empty_like, which launches nothing
gain_us = BASICS["sort"] + (others - 1) * BASICS["empty"] if BASICS else 0
by_warps = partial(group_by, make_share_per_warp(G_EXPERTS, G_TOPK, WARPS), 32 * WARPS)
group_step("a share per warp", by_warps, after="torch", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The prediction leaves out the work of the kernel and of torch's small operations. The same kernel with
# one token shows how much of its time depends on the number of assignments:


# %%
def with_one_token(name):
    """Measure a step with all tokens and with one."""
    calls = {"all": MAKE_CALL[name](IDS, G_EXPERTS), "one": MAKE_CALL[name](FEW, G_EXPERTS)}
    times = group_ladder.times(f"one token, {name}", calls) or {}
    print_times({f"{name}, {which}": us for which, us in times.items()})
    return times


BY_SHARE = with_one_token("a share per warp")

# %% [markdown]
# ### Step 2: the package
#
# **Bottleneck.** The launch itself, of which `basics` above shows the part that a dependent launch avoids.
#
# **Idea.** `moe_numba.group_by_expert` starts by programmatic dependent launch: it clears its counters while the kernel
# before it ends. It also loads four ids per lane at once, uses ballots instead of `match_any_sync`, and skips invalid
# expert ids. Up to 4096 assignments it launches one CTA. Beyond that it takes three launches: CTAs count chunks, one
# CTA scans, CTAs place their chunks.
#
# **Predicted gain.** `t_empty - t_dependent`.


# %%
def package_call(ids, num_experts):
    return partial(moe_numba.group_by_expert, ids, num_experts, out=poisoned_groups(ids, num_experts))


gain_us = BASICS["empty"] - BASICS["empty, dependent"] if BASICS else 0
group_step("final", package_call, after="a share per warp", predicted_gain_us=gain_us)

# %% [markdown]
# The same kernel with one token shows the time that does not depend on the number of assignments:

# %%
BY_PACKAGE = with_one_token("final")
group_ladder.measure_all()
group_ladder.save(notebook_sources("notebooks/11_moe_layer.py"))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
both = BY_SHARE and BY_PACKAGE
say(
    "**Explanation.** With one token the time changes by {fixed:+.2f} us, predicted {predicted:+.2f}: that is the launch. "
    "What depends on the number of assignments changes by {variable:+.2f} us. The package checks each id, and counts "
    "warps' shares that may begin anywhere, for the calls with more than 4096 assignments and with invalid ids; it is "
    "kept for these, and because layers launch it behind another kernel.",
    fixed=BY_PACKAGE["one"] - BY_SHARE["one"] if both else None,
    predicted=BASICS["empty, dependent"] - BASICS["empty"] if BASICS else None,
    variable=BY_PACKAGE["all"] - BY_PACKAGE["one"] - BY_SHARE["all"] + BY_SHARE["one"] if both else None,
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
group_ladder.plot(peers={"empty launch, measured": BASICS["empty, dependent"]} if BASICS else None)

# %% [markdown]
# A sort that takes rows from an atomic counter is simpler, but not stable: the rows of an expert are in the order in
# which threads arrive. Every row is still computed correctly, so a check of the layer's output accepts it. The check of
# the indices must reject it. In the simulator a seed determines the order of the threads:


# %%
@cuda.jit
def unstable(topk_ids, cu_seqlens, counters, gather_indices, inverse_indices, topk):
    i = cuda.threadIdx.x
    row = cu_seqlens[topk_ids[i]] + cuda.atomic.add(counters, topk_ids[i], 1)
    gather_indices[row] = i // topk
    inverse_indices[i] = row


def error_of_unstable(seed):
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0]], dtype=torch.int32)
    expected, outputs = reference.group_by_expert(ids, 3), poisoned_groups(ids, 3)
    with simulator.seed(seed):
        launch(unstable, 1, 8, ids, expected[1], torch.zeros(3, dtype=torch.int32), *outputs[2:], 2)
    return groups_mismatch((*expected[:2], *outputs[2:]), expected)


errors = [in_simulator(error_of_unstable, seed) for seed in range(4)]
print("by seed:", errors)
assert any(errors), "the check accepts an unstable sort"

# %% [markdown]
# ## 6. The weighted sum
#
# `out[t] = sum over k of weight[t, k] * rows[inverse[t, k]]`. A kernel could instead add every row to its token with
# atomic additions, and would need no inverse indices. But floating-point addition is not associative, so the bits would
# depend on which thread adds first:

# %%
terms = torch.tensor([1.0, 2.0**-24, 2.0**-24, -1.0])
print("in order:", float(((terms[0] + terms[1]) + terms[2]) + terms[3]))
print("another order:", float(((terms[1] + terms[2]) + terms[0]) + terms[3]))

# %% [markdown]
# **Exercise 2.** This kernel uses atomic additions. Let one thread compute each element of `out`, in the order of k.


# %%
@cuda.jit
def sum_in_order(rows, inverse, weights, out):  # a CTA per token; as many threads as out has columns
    token, k = cuda.blockIdx.x, cuda.threadIdx.x
    out[token, k] = 0
    cuda.syncthreads()
    if k < inverse.shape[1]:
        for column in range(out.shape[1]):
            cuda.atomic.add(out, (token, column), weights[token, k] * rows[inverse[token, k], column])


exercise("moe_layer-2").check(sum_in_order)

# %% [markdown]
# ### Step 0: torch
#
# **Idea.** A gather, a multiplication and a reduction, each of which writes its result to memory.

# %%
S_TOKENS, S_TOPK, S_HIDDEN = (8, 2, 64) if SIMULATED else (4096, 8, 2048)
torch.manual_seed(6)
ROWS = torch.randn(S_TOKENS * S_TOPK, S_HIDDEN, device=DEVICE).bfloat16()
INVERSE = torch.randperm(S_TOKENS * S_TOPK, device=DEVICE).int().view(S_TOKENS, S_TOPK)
SHARES = torch.rand(S_TOKENS, S_TOPK, device=DEVICE)
SUM = torch.empty(S_TOKENS, S_HIDDEN, dtype=torch.bfloat16, device=DEVICE)
EXACT = (ROWS[INVERSE.long()].double() * SHARES[..., None].double()).sum(1)


def sum_in_torch():
    rows = ROWS.index_select(0, INVERSE.flatten()).view(S_TOKENS, S_TOPK, S_HIDDEN)
    return (rows * SHARES[..., None]).sum(1).bfloat16()


sum_ladder = Ladder(
    "moe_layer_sum_ladder",
    lambda out: mismatch(out, EXACT),
    title="The weighted sum: 4096 tokens, top-8, hidden 2048",
    reference_name="torch",
    config={"topk": S_TOPK, "hidden": S_HIDDEN},
    size={"tokens": S_TOKENS},
)
sum_ladder.step("torch", sum_in_torch, dtype="bf16")

# %% [markdown]
# ### Step 1: one pass, two columns per thread
#
# **Bottleneck.** Memory traffic. With `R` bytes of rows the gather moves `2 R`, the multiplication `3 R`, because its
# result is float32, and the reduction `2 R`. A copy, which moves `2 R`, gives the rate.

# %%
COPIES = sum_ladder.times("copies", {"copy": lambda: torch.clone(ROWS)}) or {}
print("copy:", f"{COPIES['copy']:.1f} us" if COPIES else "no time is recorded")

# %% [markdown]
# **Idea.** One kernel reads each row once. Two adjacent columns are one 32-bit word, and adjacent threads load adjacent
# words. A bfloat16 is the upper half of a float32, so a shift or a mask converts it.
#
# **Predicted gain.** `(7 - 9/8) R` at the rate of the copy: the kernel reads `R` and writes an eighth of it.


# %%
@cuda.jit
def two_columns(rows, inverse_indices, topk_weights, out, row_words, topk):
    token, word = int32(cuda.blockIdx.y), int32(cuda.blockIdx.x * 128 + cuda.threadIdx.x)
    if word < row_words:
        low, high = float32(0), float32(0)
        for k in range(topk):
            row, weight = inverse_indices[token * topk + k], topk_weights[token * topk + k]
            if row >= 0:
                pair = uint32(rows[int32(row * row_words + word)])
                low = cuda.fma(weight, uint_as_float(uint32(pair << uint32(16))), low)
                high = cuda.fma(weight, uint_as_float(uint32(pair & uint32(0xFFFF0000))), high)
        out[int32(token * row_words + word)] = int32(cvt_rn_bf16x2_f32(high, low))


def sum_by(kernel, columns):
    """Return a call of a kernel whose threads compute this many columns; its output is poisoned."""
    out = torch.full_like(SUM, float("nan"))
    grid = -(-S_HIDDEN // (128 * columns)), S_TOKENS
    arguments = ROWS.view(torch.int32), INVERSE, SHARES, out.view(torch.int32), S_HIDDEN // 2, S_TOPK

    def call():
        launch(kernel, grid, 128, *arguments)
        return out

    return call


R_BYTES = 4096 * 8 * 2048 * 2  # of the recorded times
COPY_US = COPIES.get("copy", 2 * R_BYTES / LIMITS.copy_bandwidth * 1e6)  # of 2 R
BOUND_US = 9 / 16 * COPY_US
sum_ladder.step(
    "two columns", sum_by(two_columns, 2), after="torch", predicted_gain_us=(7 - 9 / 8) / 2 * COPY_US, dtype="bf16"
)
print(f"at the rate of the copy the kernel's bytes would take {BOUND_US:.1f} us")

# %% [markdown]
# **Explanation.** The prediction takes torch's operations at the rate of a copy. Each of them alone:

# %%
gathered = ROWS.view(S_TOKENS, S_TOPK, S_HIDDEN)
weighted = gathered * SHARES[..., None]
calls = {
    "gather": lambda: ROWS.index_select(0, INVERSE.flatten()),
    "multiplication": lambda: gathered * SHARES[..., None],
    "reduction": lambda: weighted.sum(1),
}
TORCH = sum_ladder.times("torch's operations", calls) or {name: COPIES[name] for name in calls if name in COPIES}
print_times(TORCH)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "In sum they take {total:.0f} us, {ideal:.0f} us at the rate of a copy. The multiplication reads bfloat16 and writes "
    "float32, at {rate:.1f} TB/s; it is most of the miss.",
    total=sum(TORCH.values()) or None,
    ideal=3.5 * COPY_US if TORCH else None,
    rate=3 * R_BYTES / TORCH["multiplication"] * 1e-6 if TORCH else None,
)

# %% [markdown]
# ### Step 2: eight columns per thread
#
# **Bottleneck.** The difference between these two times. Each thread loads 4 bytes at a time.
#
# **Idea.** Loads and stores of 16 bytes: a quarter of the threads and instructions, four times the bytes per load.
#
# **Predicted gain.** The whole difference.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def eight_columns(rows, inverse_indices, topk_weights, out, row_words, topk):
    token, word = int32(cuda.blockIdx.y), 4 * int32(cuda.blockIdx.x * 128 + cuda.threadIdx.x)
    if word < row_words:
        sums, words = cuda.local.array(8, float32), cuda.local.array(4, uint32)
        for i in range(8):
            sums[i] = float32(0)
        for k in range(topk):
            row, weight = inverse_indices[token * topk + k], topk_weights[token * topk + k]
            if row >= 0:
                words[0], words[1], words[2], words[3] = load_nc_u32x4(rows, int32(row * row_words + word))
                for i in range(4):
                    low = uint_as_float(uint32(words[i] << uint32(16)))
                    high = uint_as_float(uint32(words[i] & uint32(0xFFFF0000)))
                    sums[2 * i] = cuda.fma(weight, low, sums[2 * i])
                    sums[2 * i + 1] = cuda.fma(weight, high, sums[2 * i + 1])
        for i in range(4):
            words[i] = cvt_rn_bf16x2_f32(sums[2 * i + 1], sums[2 * i])
        a, b, c, d = int32(words[0]), int32(words[1]), int32(words[2]), int32(words[3])
        st_global_s32x4(out, int32(token * row_words + word), a, b, c, d)


# %%
change(two_columns, eight_columns)

# %%
gain_us = max(0, (sum_ladder.median_us("two columns") or BOUND_US) - BOUND_US)
sum_ladder.step("eight columns", sum_by(eight_columns, 8), after="two columns", predicted_gain_us=gain_us, dtype="bf16")

# %% [markdown]
# ### Step 3: the package
#
# **Bottleneck.** In step 2 a load waits for the additions of the row before, unless the compiler moves it up.
#
# **Idea.** `moe_numba.weighted_sum` knows `topk` when it is compiled, and loads the rows of all k before it adds the
# first. It also starts by dependent launch, and can add the output of shared experts.
#
# **Predicted gain.** The remaining gap to the copy-rate bound.

# %%
gain_us = max(0, (sum_ladder.median_us("eight columns") or BOUND_US) - BOUND_US)
final = partial(moe_numba.weighted_sum, ROWS, INVERSE, SHARES, out=SUM.fill_(float("nan")))
sum_ladder.step(
    "final", final, after="eight columns", predicted_gain_us=gain_us, dtype="bf16", floor_us=COPIES and BOUND_US
)

# %% [markdown]
# **Explanation.** The copy again, interleaved with the three kernels:

# %%
by_two, by_eight = sum_by(two_columns, 2), sum_by(eight_columns, 8)
calls = {"copy": lambda: torch.clone(ROWS), "two columns": by_two, "eight columns": by_eight, "final": final}
assert torch.equal(by_two(), final()) and torch.equal(by_eight(), final()), "all kernels add in the same order"
for name, us in (sum_ladder.times("rates", calls) or {}).items():
    moved = R_BYTES * (2 if name == "copy" else 9 / 8)
    print(f"{name:<16}{us:6.1f} us, {moved / us * 1e-6:.2f} TB/s")
sum_ladder.measure_all()
sum_ladder.save(notebook_sources("notebooks/11_moe_layer.py"))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
sum_ladder.plot(peers={"its bytes at the copy's rate, measured": BOUND_US} if COPIES else None)

# %% [markdown]
# The sum has a fixed order, and the GEMMs compute each row independently of the others. So the bits of a token's result
# depend neither on the run nor on the token's place in the batch:

# %%
order = torch.randperm(TOKENS, device=DEVICE)
result = fused_experts(*GIVEN)
assert torch.equal(fused_experts(x[order], w13, w2, topk_weights[order], topk_ids[order]), result[order])
assert all(torch.equal(fused_experts(*GIVEN), result) for _ in range(3))
print("the same bits in four runs, and with the tokens in another order")

# %% [markdown]
# ## 7. Where the time goes
#
# The benchmark measures every launch alone, many times in a CUDA graph, and one call with all of them. With one token, and
# in bfloat16, the call is the two kernels of the subsection "One token".

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw_parts(RECORD, f"{QWEN}'s experts, bfloat16", [QWEN], SIZES) if RECORD else Markdown(NO_RECORD)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
models = [DEEPSEEK, f"{DEEPSEEK}, 1 of 8 GPUs"]
draw_parts(RECORD, f"{DEEPSEEK}'s experts, FP8", models, SIZES) if RECORD else Markdown(NO_RECORD)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(parts_table(RECORD) if RECORD else NO_RECORD)

# %% [markdown]
# The same layers in other projects, measured in the same run:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(bench.readme_table(RECORD) if RECORD else NO_RECORD)


# %% [markdown]
# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sum_of_launches(model, tokens):
    """Return the sum of the recorded times of a call's launches, each alone; None if there are none."""
    size = {"tokens": tokens}
    rows = RECORD["rows"] if RECORD else []
    found = [row for row in rows if row["config"]["model"] == model and row["size"] == size]
    parts = [row["kernel_us"]["median"] for row in found if row["step"].startswith("part: ")]
    return sum(parts) or None


SUMS = [sum_of_launches(QWEN, tokens) for tokens in SIZES]
say(
    "For 1 / 64 / 4096 tokens {model}'s launches take {sums} us in sum, one call {calls} us, and both GEMMs, launched "
    "alternately in one graph, {gemms} us. A launch alone follows itself and does not wait for results of another kernel, "
    "which matters with 1 token. With 4096 tokens the difference lies in the first grouped GEMM: directly behind "
    "`permute`, which leaves the L2 cache full of rows that it has written, it takes longer than alone.",
    model=QWEN,
    sums=None if None in SUMS else " / ".join(map(records.format_us, SUMS)),
    calls=listed("final"),
    gemms=listed("both GEMMs"),
)

# %% [markdown]
# With 4096 tokens some launches are neither GEMMs nor short. Each reads and writes large tensors; these are their rates:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(rates_table(RECORD, QWEN, SIZES[-1]) if RECORD else NO_RECORD)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
CALL, GEMMS = ({tokens: recorded(step, QWEN, tokens) for tokens in SIZES} for step in ("final", "both GEMMs"))
OTHERS = {tokens: us and 100 * (1 - GEMMS[tokens] / us) for tokens, us in CALL.items()}  # percent
say(
    "A large copy reaches {copy:.1f} TB/s, so these launches can hardly become faster. Only fusing them with a GEMM would "
    "save their time; everything besides the GEMMs is {many:.0f} % of the call. With 64 tokens it is {few:.1f} %: only "
    "GEMMs that read the weights faster, or fewer bytes per weight, would make the layer much faster. With 1 token the "
    "GEMMs take {one:.0f} us, and reading their weights at full bandwidth {bound:.0f} us. {model}'s FP8 GEMMs of a prompt "
    "are far from their bound, because CUDA cores multiply the sum of every 128 products by its scales "
    "([notebook 06](06_grouped_gemm.ipynb), section 8).",
    copy=model.GPU.copy_bandwidth / 1e12,
    many=OTHERS[4096],
    few=OTHERS[64],
    one=GEMMS[1],
    bound=recorded("final", QWEN, 1, "floor_us"),
    model=DEEPSEEK,
)

# %% [markdown]
# ### One token
#
# **Bottleneck.** With one token each chosen expert has one row. Grouping has nothing to group, and a tile of the
# grouped GEMM computes many rows of which one exists. The launches of a grouped call, each alone:

# %%
ONE_EXPECTED, ONE_OUT = reference.fused_experts(*ONE_TOKEN), torch.full_like(ONE_TOKEN.x, float("nan"))
ONE_WORKSPACE = ExpertsWorkspace(1, LAYER.topk, w13, w2)
GROUPED = part_calls(ONE_TOKEN, ONE_WORKSPACE, ONE_OUT, {}, decodes=False)  # name -> call of one launch
LAUNCHES = layer_ladder.times("launches with 1 token", GROUPED) or {}
print_times(LAUNCHES)


def grouped():
    for start in GROUPED.values():
        start()
    return ONE_OUT


# %% [markdown]
# **Idea.** Multiply matrices with vectors instead. A warp computes a few dot products: its lanes load adjacent 16-byte
# vectors of the weights' rows, four of them before the first is used, and multiply in float32 on CUDA cores, which is
# enough because each weight is used once. Two launches remain. The first reads the experts of each assignment from
# `topk_ids` and computes the activations. The second computes the rows of a token's experts, weights and adds them;
# it loads its first weights before `griddepcontrol.wait`, while the first kernel still runs.
#
# **Predicted gain.** The launches of grouping and sum, and what the GEMMs take beyond reading the weights at the rate of
# a copy.

# %%
weight_bytes = 3 * LAYER.topk * LAYER.hidden * LAYER.intermediate * 2
GAIN_US = sum(LAUNCHES.values()) - weight_bytes / LIMITS.copy_bandwidth * 1e6
calls = {"grouped": grouped, "two kernels": prepared(ONE_TOKEN)}
for name, call in calls.items():
    assert mismatch(call(), ONE_EXPECTED, 1e-2) is None, name
ONE = layer_ladder.times("one call with 1 token", calls) or {}
layer_ladder.save(notebook_sources("notebooks/11_moe_layer.py"))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "**Measured.** {grouped:.1f} us with groups, {ours:.1f} us with the two kernels: {gain:+.1f} us, predicted "
    "{predicted:+.1f}. The kernels read {rate:.1f} TB/s.",
    grouped=ONE.get("grouped"),
    ours=ONE.get("two kernels"),
    gain=ONE and ONE["two kernels"] - ONE["grouped"] or None,
    predicted=-GAIN_US if LAUNCHES else None,
    rate=ONE and weight_bytes / ONE["two kernels"] * 1e-6 or None,
)

# %% [markdown]
# The kernels read an expert's weights once for each of its tokens, so `fused_experts` uses them only for so few tokens
# that hardly two of them share an expert, and only where these experts' weights have at most 128 MiB: with more, the two
# launches that are saved weigh less than the higher rate at which grouped GEMMs read.
#
# The kernels of one call of the torch loop and of these two kernels, called without a CUDA graph, as torch's profiler saw
# them. The loop launches several kernels per expert, and the CPU waits in between.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
rows = {name: layer_ladder.row(name) or {} for name in ("torch loop", "final")}
timelines = {name: row["timeline"] for name, row in rows.items() if row.get("timeline")}
title = f"Kernels of one call for 1 token: {QWEN}'s experts"
caption = "Bars are at least a pixel wide; most kernels of the loop take less time than that."
launch_timeline(timelines, title, caption) if timelines else Markdown(NOT_MEASURED)

# %% [markdown]
# ## 8. Expert parallel
#
# With several GPUs each **rank** holds a part of the experts. A token is sent once to each rank that has one of its
# experts (notebooks [07](07_dispatch_layout.ipynb) and [08](08_ring_buffer_dispatch.ipynb)). That rank computes the
# weighted sum of its own experts, and combine adds the sums of the ranks in rank order ([09](09_combine.ipynb)).
#
# `ExpertParallelMoE` does this. On the receiving rank ids are local, and -1 for experts of other ranks; `group_by_expert`
# gives these no row. Two virtual ranks in the simulator must agree with one GPU that holds all experts:


# %%
def run_two_ranks(shift):
    """Return what is wrong with each rank's result; with ``shift`` 1 each rank holds the other rank's experts."""
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=random)
    w13, w2 = (normal(4, 256, 128) / 11).bfloat16(), (normal(4, 128, 128) / 11).bfloat16()
    tokens = [(normal(3, 128).bfloat16(), normal(3, 2).abs(), normal(3, 4).topk(2).indices) for _ in range(2)]

    def work(rank):
        own = slice(2 * (rank.rank ^ shift), 2 * (rank.rank ^ shift) + 2)
        local = Experts(2, 128, 128)
        local.load_state_dict({"w13": w13[own], "w2": w2[own]})
        buffer = Buffer(rank, 1 << 22)
        layer = ExpertParallelMoE(buffer, local, num_worst_tokens=6)  # the CPU does not wait for counts
        result = layer(*tokens[rank.rank])
        buffer.destroy()
        return result

    expected = [reference.fused_experts(rows, w13, w2, *routing) for rows, *routing in tokens]
    return [mismatch(out, right, 1e-2) for out, right in zip(LocalGroup(2).run(work), expected, strict=True)]


assert in_simulator(run_two_ranks, 0) == [None, None]
assert all(in_simulator(run_two_ranks, 1)), "the check accepts experts of another rank"
print("ranks 0 and 1: correct; with exchanged experts the check rejects both")

# %% [markdown]
# Options of the layer send tokens in FP8, run a shared expert on a stream of its own, let combine send the first sums
# while the last ones are computed, or use the low-latency pair of [notebook 10](10_low_latency.ipynb), also with sums in
# FP8.
# [Expert parallelism](../docs/expert_parallel.md) computes what other ways to overlap would gain. Recorded times:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
RANKS = records.recorded("moe_layer_ranks")
Markdown(ranks_bench.layers_table(RANKS) if RANKS else NO_RECORD.replace("moe_layer", "moe_layer_ranks"))

# %% [markdown]
# **Exercise 3.** A token with topk experts reaches fewer than topk ranks if a rank has several of them. If a token's
# distinct experts are drawn at random, how many ranks does it reach on average?


# %%
ranks_reached = ...  # your answer: lambda num_experts, topk, ranks: ... (ranks divides num_experts)
exercise("moe_layer-3").check(ranks_reached)

# %% [markdown]
# ## 9. A model of transformers
#
# `register()` makes `fused_experts` known to transformers 5, `set_experts_implementation` selects it for a model, and
# `fuse_routers` replaces the model's routers by the kernel of the gate. Here with a tiny Qwen3-MoE model with random
# weights, and the token that it predicts behind each token of a prompt. `eager` is the loop over experts in transformers:


# %%
def logits_and_tokens(model, implementation):
    model.set_experts_implementation(implementation)
    prompt = torch.arange(0, 56, 7, device=DEVICE).view(1, 8)
    with torch.no_grad():
        logits = model(prompt).logits.double()
    return logits, logits[0].argmax(-1).tolist()


try:
    import warnings

    warnings.filterwarnings("ignore", message="IProgress not found")  # of tqdm, which transformers imports
    from moe_numba.integrations.transformers import fuse_routers, register

    register()
    qwen = tiny_model(DEVICE)
    eager_logits, eager_tokens = logits_and_tokens(qwen, "eager")
    print("fused routers:", fuse_routers(qwen))
    logits, tokens = logits_and_tokens(qwen, "moe_numba")
    difference = float((logits - eager_logits).norm() / eager_logits.norm())
    print(f"predicted: {eager_tokens}, then {tokens}; relative difference of the logits: {difference:.4f}")
    assert difference < 0.02
except ImportError as error:
    print(f"transformers 5 is not installed ({error}): pip install 'moe_numba[transformers]'")

# %% [markdown]
# The logits differ by rounding: eager rounds the weighted row of each expert to bfloat16 before it adds the row. Models
# with a layout that the kernels do not support are refused with a message. The experts of gpt-oss, with biases and
# their own activation, also run with their weights in MXFP4 ([example](../docs/examples/gpt_oss_mxfp4.py)).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
MODELS = records.recorded("models")
say(
    "A forward pass of {layers} layers of {model}'s width with random weights takes {before} us for 1 / 64 / 4096 tokens "
    "with transformers' `grouped_mm`, and {after} us with the experts and routers of the package (in a CUDA graph, "
    "recorded on {gpu}). The rest of a pass, such as attention, is the same.",
    layers=MODELS and records.find(MODELS, config={"model": QWEN})["config"]["layers"],
    model=QWEN,
    before=listed("peer:transformers grouped_mm", record=MODELS),
    after=listed("final, fused routers", record=MODELS),
    gpu=MODELS and MODELS["gpu"],
)

# %% [markdown]
# ## 10. What 64 GPUs would change
#
# **The rows for 64 GPUs are a model**, of one DeepSeek-V3 layer whose experts are distributed over GPUs in nodes of 8, with
# uniform routing. A row crosses the network once per node that has one of its experts, and is
# forwarded over NVLink; dispatch sends FP8, combine bfloat16. Every part takes the time of its bytes or operations, and
# transfers do not overlap with GEMMs.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
assumed = (
    f"Parts in us per layer; weights of the experts of {model.MOE_LAYERS} layers. NVLink {model.NVLINK / 1e9:.0f} GB/s, "
    f"network {model.NETWORK / 1e9:.0f} GB/s, per GPU and direction; other rates: data sheet of an H200. The last column is "
    "the longer of reading and computing, plus dispatch and combine, divided by the tokens of a GPU."
)
Markdown(f"{model.table((1, 8, 64), (64, 4096))}\n\n{assumed}")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FEW_TOKENS, MANY_TOKENS = 64, 4096
ON_EIGHT = {tokens: ranks_bench.fastest(RANKS, 8, tokens) if RANKS else None for tokens in (FEW_TOKENS, MANY_TOKENS)}
say(
    "For 8 GPUs there are measurements (section 8): with {few} tokens the model gives {few_model:.0f} us, and {few_us} us "
    "are measured; with {many} tokens {many_model:.0f} and {many_us} us. The model leaves out what does not depend on the "
    "number of rows, launches and the exchange of counts, and assumes the peak rates of memory, tensor cores and links.",
    few=FEW_TOKENS,
    many=MANY_TOKENS,
    few_model=model.total_us(8, FEW_TOKENS),
    many_model=model.total_us(8, MANY_TOKENS),
    few_us=ON_EIGHT[FEW_TOKENS] and records.format_us(ON_EIGHT[FEW_TOKENS]),
    many_us=ON_EIGHT[MANY_TOKENS] and records.format_us(ON_EIGHT[MANY_TOKENS]),
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "With {few} tokens on each GPU, each of 64 GPUs reads {less:.0f} times fewer bytes than each of 8, because it holds "
    "fewer experts. A layer takes {faster:.1f} times less time per token, and the network is the limit: dispatch and "
    "combine are {share:.0f} % of the time. With {many} tokens the tensor cores are the limit already on 8 GPUs, so "
    "reading less saves nothing, and dispatch and combine take {ratio:.1f} times as long as the GEMMs. If they overlapped "
    "perfectly with the GEMMs, the longer of the two would remain. A token reaches {nodes:.1f} of 8 nodes on average; "
    "DeepSeek-V3's gate limits it to 4, which shortens the transfers.",
    few=FEW_TOKENS,
    many=MANY_TOKENS,
    less=model.part_times(8, FEW_TOKENS)["read weights"] / model.part_times(64, FEW_TOKENS)["read weights"],
    faster=model.total_us(8, FEW_TOKENS) / model.total_us(64, FEW_TOKENS),
    share=100 * model.transfer_us(64, FEW_TOKENS) / model.total_us(64, FEW_TOKENS),
    ratio=model.transfer_us(64, MANY_TOKENS) / model.part_times(64, MANY_TOKENS)["compute"],
    nodes=ranks_per_token(model.NUM_EXPERTS, model.TOPK, 64 // model.NODE),
)

# %% [markdown]
# ## 11. Sources
#
# - Names and arguments of `fused_experts` and `silu_and_mul`: vLLM and SGLang. Order of operations with several ranks:
#   [DeepEP](https://github.com/deepseek-ai/DeepEP).
# - Counting sort: D. Knuth, *The Art of Computer Programming*, volume 3, section 5.2.
# - Users who need the same bits in every batch: [sglang 36174](https://github.com/sgl-project/sglang/issues/36174).
# - DeepSeek-AI: *DeepSeek-V3 Technical Report*, 2024, section 2.1.2 on routing that is limited to a few nodes.
# - Code: [`moe_numba/moe_layer`](../moe_numba/moe_layer), [`moe_numba/integrations`](../moe_numba/integrations),
#   [examples](../docs/examples).
