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
# The earlier notebooks built a gate (the kernel of the router), grouped GEMMs, dispatch and combine. This notebook
# assembles the experts of a layer, `moe_numba.fused_experts`. It starts from a loop over experts in torch and replaces
# one stage after another by a kernel. Two of these kernels are new and are built here: `group_by_expert` and
# `weighted_sum`. The last sections profile the layer, add a path for one token, run the layer on two simulated ranks and
# in a Transformers model, and model 64 GPUs.
#
# Notebooks [01](01_gate_prompt.ipynb) and [07](07_grouped_gemm.ipynb) explain router and grouped GEMM,
# [notebook 00](00_start_here.ipynb) the simulator.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from contextlib import redirect_stdout
from functools import cache, partial
from itertools import count

import torch
from IPython.display import Markdown
from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba import simulator
from moe_numba.align.device_functions import make_scan
from moe_numba.course.bench import call_time, records, rotating
from moe_numba.course.bench.timing.launch_profile import launch_profile
from moe_numba.course.bench.topics.moe_layer import show as bench
from moe_numba.course.bench.topics.moe_layer.measure import make_inputs, make_weights, part_calls
from moe_numba.course.bench.topics.moe_layer_ranks import show as ranks_bench
from moe_numba.course.draw.launch_timeline import launch_timeline
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.moe_layer import draw, model
from moe_numba.course.lessons.moe_layer.exercises import ranks_per_token
from moe_numba.course.lessons.moe_layer.parts_figure import EXPERTS, draw_parts, parts_table, rates_table
from moe_numba.course.lessons.moe_layer.runs import (
    RecordedTimes,
    call_times_table,
    group_by,
    groups_mismatch,
    joined,
    of_models,
    poisoned_groups,
    slowdown,
    tiny_model,
)
from moe_numba.course.pages.prose import NOT_MEASURED, say
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.source_diff import OpCounter, change, passage
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.grouped_gemm.common.constants import BLOCK_N
from moe_numba.grouped_gemm.reference import mismatch
from moe_numba.moe_layer import ExpertParallelMoE, Experts, ExpertsWorkspace, fused_experts, reference
from moe_numba.moe_layer.compile_layers import Layer
from moe_numba.moe_layer.gemv import plan as decode
from moe_numba.moe_layer.gemv.bf16 import make_decode_gate_up_kernel
from moe_numba.moe_layer.group_by_expert import api as routing
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.warp import FULL_MASK, lanemask_lt
from moe_numba.ptx.warpgroup import elect_sync
from moe_numba.runtime.device import gpu_of
from moe_numba.runtime.launch import launch
from moe_numba.runtime.tensor_map import TensorMap

SIMULATED = simulator.ENABLED
DEVICE = "cpu" if SIMULATED else "cuda"
RECORD = records.recorded("moe_layer")  # written by `python -m moe_numba bench moe_layer`
NO_RECORD = "There is no record `moe_layer` yet; `python -m moe_numba bench moe_layer` writes it on a GPU."
QWEN, DEEPSEEK, SIZES = "Qwen3-30B-A3B", "DeepSeek-V3", (1, 64, 4096)
SHOWN = QWEN, DEEPSEEK, f"{DEEPSEEK}, 1 of 8 GPUs"


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def print_times(times):
    """Print measured or recorded microseconds by name."""
    print(", ".join(f"{name}: {us:.2f} us" for name, us in times.items()) or "no times are recorded")


SEEN = RecordedTimes(RECORD, QWEN, SIZES)
others = [SEEN.fastest_other(tokens) for tokens in SIZES]
say(
    "**Result.** On {gpu} the experts of one {model} layer take {ours} us for 1 / 64 / 4096 tokens (kernel time, "
    "recorded). The fastest other implementations take {others} us ({names}), and transformers' default, `grouped_mm`, "
    "{default} us. The lower bound, the time to read the weights or to compute, whichever is longer, is {bound} us.",
    gpu=RECORD and RECORD["gpu"].replace("NVIDIA", "an NVIDIA"),
    model=QWEN,
    ours=SEEN.listed("final"),
    others=joined(us for _, us in others),
    names=" / ".join(name for name, _ in others),
    default=SEEN.listed("peer:transformers grouped_mm"),
    bound=SEEN.listed("final", "floor_us"),
)

# %% [markdown]
# ## 1. The problem in one figure
#
# The router selects `topk` experts per token and a weight for each. An element of `topk_ids` is an **assignment** of a
# token to an expert. A grouped GEMM needs the rows of an expert next to each other, so assignments are grouped by
# expert. Afterwards the rows of each token are summed with the weights of the router.

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
GIVEN = make_inputs(LAYER, TOKENS, *WEIGHTS)  # each token's experts are drawn uniformly at random
x, w13, w2, topk_weights, topk_ids, *_ = GIVEN


def experts_in_torch(x, w13, w2, topk_weights, topk_ids, *_):
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


print("the loop:", check(experts_in_torch(*GIVEN)) or "correct")

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
# of `E` experts are drawn uniformly at random, `n` tokens use `E (1 - (1 - k/E)^n)` experts on average. The GEMMs take
# `2 k n W` operations, where `W` is the number of weights of an expert.
#
# **Exercise 1.** With many tokens all experts are read. From how many tokens on does computing take longer than reading?


# %%
# Your answer, a function: lambda num_experts, topk, bytes_per_weight, bytes_per_second, operations_per_second: ...
tokens_that_fill = ...
exercise("moe_layer-1").check(tokens_that_fill)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
flops = [f"{model.GPU.tensor_flops[name] / 1e12:.0f} TFLOP/s in {name}" for name in ("bfloat16", "float8_e4m3fn")]
rates = f"Rates: data sheet of an H200, {model.GPU.hbm_bandwidth / 1e12:g} TB/s, {' and '.join(flops)}."
Markdown(f"{model.bounds_table([layer for layer in bench.LAYERS if layer.model in SHOWN])}\n\n{rates}")

# %% [markdown]
# "1 of 8 GPUs" is one rank with an eighth of the experts that receives 4096 tokens whose 8 experts are all local. Bounds
# here use the expected number of experts; section 7 uses the experts that were drawn.
#
# Decode is memory-bound: 64 tokens already use nearly all experts, with a few rows each. Prefill with 4096 tokens is
# compute-bound. In decode the other stages should add as little latency as possible; in prefill they should not move
# large tensors through memory more often than necessary.
#
# ## 4. Replacing torch stage by stage
#
# | stage | kernel | built in |
# |---|---|---|
# | group | `group_by_expert`: a counting sort that returns the group sizes and the indices in both directions. Groups have no padding, unlike the [expert blocks of notebook 03](03_align_published.ipynb). | section 5 |
# | quantise | FP8 weights need FP8 tokens, with one scale per 128 elements of a token: launch `cast`, or `permute`, which also reorders the tokens. | [12](12_dispatch.ipynb) |
# | gate_up | A grouped GEMM: one launch for all experts. Group sizes stay on the GPU, so the CPU does not wait for them. | [07](07_grouped_gemm.ipynb) |
# | activation | `silu(gate) * up`: part of the epilogue of the first grouped GEMM on GPUs with wgmma, otherwise a launch of its own. | |
# | down | The same grouped GEMM. | [07](07_grouped_gemm.ipynb) |
# | sum | `weighted_sum`: a thread adds its columns of a token's rows in the order of k. | section 6 |
#
# With few rows per expert, the producer warps of the first grouped GEMM gather the rows of `x` by index. With many,
# `permute_tokens` copies `x` into the order of the experts first, so that TMA can load consecutive rows.
#
# Three stages in torch, none of which waits for the GPU, and the layer with a function for each stage:


# %%
def group_in_torch(ids, num_experts):
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    zeros = torch.zeros(num_experts, dtype=torch.int64, device=ids.device)
    seqlens = zeros.scatter_add_(0, flat, torch.ones_like(flat))
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0))
    inverse = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=ids.device))
    return seqlens.int(), cu_seqlens.int(), (order // ids.shape[1]).int(), inverse.int().view(ids.shape)


def swiglu_in_torch(x, w13, *groups, gather_indices):
    gate, up = moe_numba.group_gemm_bf16(x, w13, *groups, gather_indices=gather_indices).float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up).bfloat16()


def sum_in_torch(rows, inverse, weights):
    gathered = rows.index_select(0, inverse.flatten()).view(*inverse.shape, -1)
    return (gathered * weights[..., None]).sum(1).bfloat16()


def layer_of(group, first_gemm, total, given=GIVEN):
    x, w13, w2, topk_weights, topk_ids, *_ = given
    seqlens, cu_seqlens, gather_indices, inverse_indices = group(topk_ids, len(w13))
    activated = first_gemm(x, w13, seqlens, cu_seqlens, gather_indices=gather_indices)
    rows = moe_numba.group_gemm_bf16(activated, w2, seqlens, cu_seqlens)
    return total(rows, inverse_indices, topk_weights)


def prepared(given):
    """Return a call that allocates nothing; its output is filled with NaN."""
    out = torch.full_like(given.x, float("nan"))
    workspace = ExpertsWorkspace(len(given.x), LAYER.topk, given.w13, given.w2)
    return partial(fused_experts, *given, out=out, workspace=workspace)


fused_swiglu = moe_numba.group_gemm_silu_and_mul_bf16
STEPS = {
    "torch loop": lambda given: experts_in_torch(*given),
    "grouped GEMMs": partial(layer_of, group_in_torch, swiglu_in_torch, sum_in_torch),
    "group_by_expert": partial(layer_of, moe_numba.group_by_expert, swiglu_in_torch, sum_in_torch),
    "SwiGLU in the epilogue": partial(layer_of, moe_numba.group_by_expert, fused_swiglu, sum_in_torch),
    "weighted_sum": partial(layer_of, moe_numba.group_by_expert, fused_swiglu, moe_numba.weighted_sum),
}

# %% [markdown]
# Each step moves one stage out of torch; the first moves both GEMMs. The last step, `final`, is `fused_experts` with `out`
# and an `ExpertsWorkspace` for the intermediate results, so that nothing is allocated.
#
# **Bottleneck.** At first the CPU is the bottleneck: it issues every launch, and blocks where the loop needs a size
# that is on the GPU. The steps are therefore compared by call time, and the number of torch operations is counted.
#
# **Predicted gain.** The call time of `group_in_torch`, divided by its operations, is the CPU time of an operation that
# does not wait for the GPU. Each operation removed should save that much.

# %%
with OpCounter() as seen:
    group_in_torch(topk_ids, LAYER.num_experts)
grouping = call_time(partial(group_in_torch, topk_ids, LAYER.num_experts))  # None in the simulator
OPERATION_US = grouping and grouping.median / len(seen.names)

layer_ladder = Ladder(
    "moe_layer_ladder",
    check,
    title=f"The experts of a layer, stage by stage: {QWEN}, 64 tokens",
    reference_name="torch loop",
    config={"num_experts": LAYER.num_experts, "topk": LAYER.topk, "hidden": LAYER.hidden},
    size={"tokens": TOKENS},
)
ONE_TOKEN = make_inputs(LAYER, 1, *WEIGHTS)  # of the timeline
calls = {name: partial(step, GIVEN) for name, step in STEPS.items()} | {"final": prepared(GIVEN)}
with redirect_stdout(None):  # the table below has the times of all steps, measured interleaved
    for name, call in calls.items():
        with OpCounter() as seen:
            call()
        operations = sum(operation != "moe_numba" for operation in seen.names)  # without functions of the package
        one = prepared(ONE_TOKEN) if name == "final" else partial(STEPS[name], ONE_TOKEN)
        more = {"operations": operations, "operation_us": OPERATION_US, "timeline": launch_profile(one)}
        layer_ladder.step(name, call, graph=name != "torch loop", dtype="bf16", **more)
    layer_ladder.measure_all()
print("all steps are correct")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(call_times_table(layer_ladder, calls) or NOT_MEASURED)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
CALL_US, KERNEL_US = layer_ladder.median_us("final", "call_us"), layer_ladder.median_us("final")
LOOP_US, LOOP_OPERATIONS = (layer_ladder.median_us("torch loop", what) for what in ("call_us", "operations"))
say(
    "**Explanation.** An operation of `group_in_torch` takes {operation:.0f} us of CPU time, one of the loop {loop:.0f} us, "
    "because `tolist` and `nonzero` wait for the GPU. The prediction leaves out the calls of the package's functions, of "
    "which `weighted_sum` has four and `final` one. The call of `final` takes {call:.0f} us of CPU time and its kernels "
    "{kernel:.0f} us, so with 64 tokens the {limit} is the limit now. With 1 token the kernels take {one:.0f} us; there a "
    "CUDA graph removes the CPU time.",
    operation=layer_ladder.median_us("torch loop", "operation_us"),
    loop=LOOP_US and LOOP_OPERATIONS and LOOP_US / LOOP_OPERATIONS,
    call=CALL_US,
    kernel=KERNEL_US,
    limit="GPU" if (KERNEL_US or 0) > (CALL_US or 0) else "CPU",
    one=SEEN.us("final", 1),
)

# %% [markdown]
# The kernels of one call for one token without a CUDA graph, as recorded by torch's profiler. The loop launches several
# kernels per expert, and the CPU waits in between. `final` takes the path of the section "One token".

# %% jupyter={"source_hidden": true} tags=["hide-input"]
rows = {name: layer_ladder.row(name) or {} for name in ("torch loop", "final")}
timelines = {name: row["timeline"] for name, row in rows.items() if row.get("timeline")}
title = f"Kernels of one call for 1 token: {QWEN}'s experts"
caption = "Bars are at least a pixel wide; most kernels of the loop take less time than that."
launch_timeline(timelines, title, caption) if timelines else Markdown(NOT_MEASURED)

# %% [markdown]
# ## 5. Grouping by expert in one launch
#
# The grouped GEMMs need `seqlens` (rows of each expert), `cu_seqlens` (offset of each expert's rows) and
# `gather_indices` (token of each row). The weighted sum needs `inverse_indices` (row of each assignment).
#
# ### Step 0: torch
#
# `group_in_torch` of section 4: a stable sort and several small operations.

# %%
G_EXPERTS, G_TOPK, G_TOKENS = (16, 4, 20) if SIMULATED else (256, 8, 64)
TIMED_EXPERTS, TIMED_ASSIGNMENTS = 256, 512  # of the recorded times
torch.manual_seed(4)
IDS = torch.rand(G_TOKENS, G_EXPERTS).topk(G_TOPK).indices.int().to(DEVICE)
GROUPS = reference.group_by_expert(IDS, G_EXPERTS)

group_ladder = Ladder(
    "moe_layer_group_ladder",
    lambda outputs: groups_mismatch(outputs, GROUPS),
    title=f"Grouping {TIMED_ASSIGNMENTS} assignments by expert: {TIMED_EXPERTS} experts",
    reference_name="torch",
    config={"num_experts": G_EXPERTS, "topk": G_TOPK},
    size={"tokens": G_TOKENS},
)
with OpCounter() as seen:
    group_in_torch(IDS, G_EXPERTS)
print(len(seen.names), "operations:", ", ".join(seen.names))
group_ladder.step("torch", partial(group_in_torch, IDS, G_EXPERTS), dtype="int32")

# %% [markdown]
# ### Step 1: a counting sort in one launch
#
# **Bottleneck.** Nearly every operation launches a kernel. The next cell times an empty kernel and torch's sort alone.
# With **programmatic dependent launch** (PDL) a kernel starts before its predecessor ends; it must call
# `griddepcontrol_wait` before it reads the predecessor's output.


# %%
@cuda.jit
def empty(x):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()


one_cta = partial(launch, empty, 1, 32, IDS)
calls = {"empty": one_cta, "empty, PDL": partial(one_cta, dependent=True)}
calls["sort"] = lambda: IDS.flatten().long().argsort(stable=True)
BASICS = group_ladder.times("an empty kernel and a sort", calls) or {}
print_times(BASICS)

# %% [markdown]
# **Idea.** A **counting sort** in one CTA. Each warp counts a contiguous chunk of the assignments in counters of its
# own, in shared memory. A scan turns counts into offsets. Then each warp reads its chunk again and writes each
# assignment to its row.

# %%
torch.manual_seed(3)
draw.counting_sort(torch.rand(32, 6).topk(2).indices, num_experts=6, warps=2)

# %% [markdown]
# The sort is stable: chunks are contiguous, a warp places 32 assignments at a time in order, and a lane counts the lower
# lanes with the same expert. `match_any_sync` returns a mask of the lanes with the same value. The scan over experts is
# `make_scan`, the two-level scan of [notebook 03](03_align_published.ipynb).
#
# **Predicted gain.** `t_sort + (n - 1) t_empty` for `n` other operations: all launches disappear but one.


# %%
@cache
def make_chunk_per_warp(num_experts, topk, warps):
    num_counts, threads = warps * num_experts, 32 * warps
    scan = make_scan(threads)

    @cuda.jit
    def chunk_per_warp(topk_ids, seqlens, cu_seqlens, gather_indices, inverse_indices, assignments):
        counts, starts = cuda.shared.array(num_counts, int32), cuda.shared.array(num_experts, int32)
        warp_sums = cuda.shared.array(32, int32)
        tid, chunk = cuda.threadIdx.x, (assignments + threads - 1) // threads * 32
        own, first = (tid >> 5) * num_experts, (tid >> 5) * chunk
        end = min(first + chunk, assignments)
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
        offset, _ = scan(total, warp_sums)
        if tid < num_experts:
            seqlens[tid], starts[tid], cu_seqlens[tid] = total, offset, offset
            if tid == num_experts - 1:
                cu_seqlens[num_experts] = offset + total
        cuda.syncthreads()
        place(topk_ids, gather_indices, inverse_indices, starts, counts, own, first, end, num_experts, topk)

    return chunk_per_warp


# %%
@cuda.jit(device=True)
def place(topk_ids, gather_indices, inverse_indices, starts, counts, own, first, end, num_experts, topk):
    """Write the rows of a warp's chunk; ``counts[own + e]`` is the number of earlier assignments of expert e."""
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


WARPS = 2 if SIMULATED else 8
others = len(seen.names) - 3  # without the sort, its conversion to int64, and empty_like, which launches nothing
gain_us = BASICS["sort"] + (others - 1) * BASICS["empty"] if BASICS else 0
by_chunk = group_by(make_chunk_per_warp(G_EXPERTS, G_TOPK, WARPS), 32 * WARPS, IDS, G_EXPERTS)
group_ladder.step("a chunk per warp", by_chunk, after="torch", predicted_gain_us=gain_us, dtype="int32")

# %% [markdown]
# **The package's kernel.** `moe_numba.group_by_expert` also starts by PDL and skips invalid expert ids (-1 under expert
# parallelism). It shares its sort with the alignment of many tokens: beyond a limit, the CTAs sort a chunk each and
# exchange their counts within the launch.

# %%
by_package = partial(moe_numba.group_by_expert, IDS, G_EXPERTS, out=poisoned_groups(IDS, G_EXPERTS))
group_ladder.step("final", by_package, dtype="int32")
SORTS = group_ladder.times("two counting sorts", {"a chunk per warp": by_chunk, "final": by_package}) or {}
group_ladder.save()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Interleaved, the package's kernel takes {final:.2f} us and the step's {ours:.2f} us. The former has one CTA up to {limit} assignments.",
    final=SORTS.get("final"),
    ours=SORTS.get("a chunk per warp"),
    limit=routing.MAX_SINGLE_CTA_ASSIGNMENTS,
)

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
# `sum_in_torch` of section 4: a gather, a multiplication and a reduction, each of which writes its result to memory.

# %%
S_TOKENS, S_TOPK, S_HIDDEN = (8, 2, 64) if SIMULATED else (4096, 8, 2048)
torch.manual_seed(6)
ROWS = torch.randn(S_TOKENS * S_TOPK, S_HIDDEN, device=DEVICE).bfloat16()
INVERSE = torch.randperm(S_TOKENS * S_TOPK, device=DEVICE).int().view(S_TOKENS, S_TOPK)
FACTORS = torch.rand(S_TOKENS, S_TOPK, device=DEVICE)  # the weights of the sum
SUM = torch.empty(S_TOKENS, S_HIDDEN, dtype=torch.bfloat16, device=DEVICE)
EXACT = (ROWS[INVERSE.long()].double() * FACTORS[..., None].double()).sum(1)

sum_ladder = Ladder(
    "moe_layer_sum_ladder",
    lambda out: mismatch(out, EXACT),
    title="The weighted sum: 4096 tokens, top-8, hidden 2048",
    reference_name="torch",
    config={"topk": S_TOPK, "hidden": S_HIDDEN},
    size={"tokens": S_TOKENS},
)
sum_ladder.step("torch", partial(sum_in_torch, ROWS, INVERSE, FACTORS), dtype="bf16")

# %% [markdown]
# ### Step 1: one pass, two columns per thread
#
# **Bottleneck.** Memory traffic. With `R` bytes of rows the gather moves `2 R`, the multiplication `3 R`, because its
# result is float32, and the reduction reads `2 R`. Copies, which move `2 R`, give the rate: torch's, and two of our
# own, whose threads load and store 4 or 16 bytes at a time.


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


COPIED, WORDS = torch.empty_like(ROWS), ROWS.numel() // 2
calls = {"torch.clone": lambda: torch.clone(ROWS)}
for size, kernel in {4: copy_4_bytes, 16: copy_16_bytes}.items():
    arguments = -(-4 * WORDS // (128 * size)), 128, ROWS.view(torch.int32), COPIED.view(torch.int32), WORDS
    launch(kernel, *arguments)
    assert torch.equal(COPIED, ROWS)
    COPIED.fill_(float("nan"))
    calls[f"{size} bytes"] = partial(launch, kernel, *arguments)
COPIES = sum_ladder.times("copies by width", calls) or {}
print_times(COPIES)

# %% [markdown]
# **Idea.** One kernel reads each row once. Two adjacent columns are one 32-bit word, and adjacent threads load adjacent
# words. A bfloat16 is the upper half of a float32, so a shift or a mask converts it.
#
# **Predicted gain.** `(7 - 9/8) R` at the rate of torch's copy: the kernel reads `R` and writes an eighth of it.


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
    """Return a call of a kernel whose threads compute this many columns; its output is filled with NaN."""
    out = torch.full_like(SUM, float("nan"))
    grid = -(-S_HIDDEN // (128 * columns)), S_TOKENS
    arguments = ROWS.view(torch.int32), INVERSE, FACTORS, out.view(torch.int32), S_HIDDEN // 2, S_TOPK

    def call():
        launch(kernel, grid, 128, *arguments)
        return out

    return call


R_BYTES = 4096 * 8 * 2048 * 2  # of the recorded times
COPY_US = COPIES.get("torch.clone", 2 * R_BYTES / model.GPU.copy_bandwidth * 1e6)  # of 2 R
BOUND_US = 9 / 16 * COPY_US
gain_us = (7 - 9 / 8) / 2 * COPY_US
sum_ladder.step("two columns", sum_by(two_columns, 2), after="torch", predicted_gain_us=gain_us, dtype="bf16")
print(f"at the rate of the copy the kernel's bytes would take {BOUND_US:.1f} us")

# %% [markdown]
# **Explanation.** The prediction takes torch's operations at the rate of a copy. Each of them alone:

# %%
gathered = ROWS.view(S_TOKENS, S_TOPK, S_HIDDEN)
weighted = gathered * FACTORS[..., None]
calls = {
    "gather": lambda: ROWS.index_select(0, INVERSE.flatten()),
    "multiplication": lambda: gathered * FACTORS[..., None],
    "reduction": lambda: weighted.sum(1),
}
TORCH = sum_ladder.times("torch's operations", calls) or {}
print_times(TORCH)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "In sum they take {total:.0f} us, {ideal:.0f} us at the rate of a copy. The multiplication reads bfloat16 and writes "
    "float32 at {rate:.1f} TB/s, {late:.0f} us more than at the copy's rate: {part:.0f} % of the difference.",
    total=sum(TORCH.values()) or None,
    ideal=3.5 * COPY_US if TORCH else None,
    rate=3 * R_BYTES / TORCH["multiplication"] * 1e-6 if TORCH else None,
    late=TORCH["multiplication"] - 1.5 * COPY_US if TORCH else None,
    part=100 * (TORCH["multiplication"] - 1.5 * COPY_US) / (sum(TORCH.values()) - 3.5 * COPY_US) if TORCH else None,
)

# %% [markdown]
# ### Step 2: eight columns per thread
#
# **Bottleneck.** The kernel takes longer than its bytes at the copy's rate. Each thread loads 4 bytes at a time.
#
# **Idea.** Loads and stores of 16 bytes: a quarter of the threads and instructions, four times the bytes per load.
#
# **Predicted gain.** `9/16 (t_4 - t_16)` of the copies with 4 and 16 bytes per thread, which move `2 R`.


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
gain_us = 9 / 16 * (COPIES["4 bytes"] - COPIES["16 bytes"]) if COPIES else 0
sum_ladder.step("eight columns", sum_by(eight_columns, 8), after="two columns", predicted_gain_us=gain_us, dtype="bf16")

# %% [markdown]
# **Explanation.** The predicted gain exceeds the kernel's whole time: the copy with 4 bytes is no model of the sum. A
# thread of the copy loads one word and ends; one of the sum loads a word of each of the `topk` rows. The rates below,
# interleaved, compare all kernels with a copy.
#
# **The package's kernel** is among them. `moe_numba.weighted_sum` also has `topk` as a compile-time constant, loads the
# rows of all k before it adds the first, starts by PDL, and can add the output of shared experts.

# %%
final = partial(moe_numba.weighted_sum, ROWS, INVERSE, FACTORS, out=SUM.fill_(float("nan")))
by_two, by_eight = sum_by(two_columns, 2), sum_by(eight_columns, 8)
sum_ladder.step("final", final, dtype="bf16", floor_us=COPIES and BOUND_US)
calls = {"copy": lambda: torch.clone(ROWS), "two columns": by_two, "eight columns": by_eight, "final": final}
assert torch.equal(by_two(), final()) and torch.equal(by_eight(), final()), "all kernels add in the same order"
for name, us in (sum_ladder.times("rates", calls) or {}).items():
    moved = R_BYTES * (2 if name == "copy" else 9 / 8)
    print(f"{name:<16}{us:6.1f} us, {moved / us * 1e-6:.2f} TB/s")
sum_ladder.save()

# %% [markdown]
# The sum has a fixed order, and the GEMMs compute each row independently of the others. So the bits of a token's result
# depend neither on the run nor on the token's place in the batch. They may depend on the number of tokens, which
# determines the launches and the GEMM tiles: results are not batch-invariant.

# %%
order = torch.randperm(TOKENS, device=DEVICE)
result = fused_experts(*GIVEN)
assert torch.equal(fused_experts(x[order], w13, w2, topk_weights[order], topk_ids[order]), result[order])
assert all(torch.equal(fused_experts(*GIVEN), result) for _ in range(3))
print("the same bits in four runs, and with the tokens in another order")

# %% [markdown]
# ## 7. Where the time goes
#
# The benchmark measures every launch alone, many times in a CUDA graph, and the whole layer. For one token in bfloat16
# the layer is the two GEMV kernels of "One token".

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw_parts(RECORD, f"{QWEN}'s experts, bfloat16", [QWEN], SIZES) if RECORD else Markdown(NO_RECORD)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(parts_table(of_models(RECORD, SHOWN)) if RECORD else NO_RECORD)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The [README](../README.md#experts-of-a-layer) compares these and other layers with other projects. For 1 / 64 / 4096 "
    "tokens {model}'s launches take {sums} us in sum, and the whole layer {calls} us. A launch that is repeated alone finds "
    "part of its weights in the L2 cache, which shortens the sum with 1 token. With "
    "4096 tokens the whole layer takes {gap:+.0f} us relative to the sum.",
    model=QWEN,
    sums=joined(sum(SEEN.launches(tokens).values()) or None for tokens in SIZES),
    calls=SEEN.listed("final"),
    gap=SEEN.us("final", 4096) and SEEN.us("final", 4096) - sum(SEEN.launches(4096).values()),
)

# %% [markdown]
# **Hypothesis.** `permute` leaves the L2 cache full of rows that it has written, which might slow down the first
# grouped GEMM. To test this, the GEMM runs alone, after `permute`, and after a copy that writes as many bytes,
# interleaved with the whole layer:

# %%
PROMPT = make_inputs(LAYER, TOKENS if SIMULATED else SIZES[-1], *WEIGHTS)
OUT, WORKSPACE = torch.full_like(PROMPT.x, float("nan")), ExpertsWorkspace(len(PROMPT.x), LAYER.topk, w13, w2)
whole = partial(fused_experts, *PROMPT, out=OUT, workspace=WORKSPACE)
assert mismatch(whole(), reference.fused_experts(*PROMPT), 1e-2) is None
parts = part_calls(PROMPT, WORKSPACE, OUT, {})  # name -> call of one launch
permute = parts.get("permute", parts["group_by_expert"])  # the simulator's few tokens are not permuted
rows = moe_numba.permute_tokens(PROMPT.x, moe_numba.group_by_expert(PROMPT.ids, LAYER.num_experts)[3])
written = torch.empty_like(rows)
copy, gate_up = partial(torch.add, rows, 1, out=written), parts["gate_up"]
sizes = torch.full((LAYER.num_experts,), len(rows) // LAYER.num_experts, dtype=torch.int32, device=DEVICE)
equal = sizes, torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
calls = parts | {"copy": copy, "whole layer": whole}
calls |= {"permute, gate_up": lambda: [permute(), gate_up()], "copy, gate_up": lambda: [copy(), gate_up()]}
calls |= {
    "gate_up, equal groups": partial(moe_numba.group_gemm_silu_and_mul_bf16, rows, w13, *equal),
    "torch.mm": lambda: rows @ w13[0].T,
}
GATE_UP = layer_ladder.times("gate_up of a prompt", calls) or {}
print_times(GATE_UP)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ALONE_US = sum(us for name, us in GATE_UP.items() if name in EXPERTS)
GEMM_TFLOP = 2e-12 * 4096 * LAYERS[QWEN].topk * LAYERS[QWEN].hidden * 2 * LAYERS[QWEN].intermediate
RATES = {name: GEMM_TFLOP / us * 1e6 for name, us in GATE_UP.items()}
say(
    "**Measured:** {permute}; {copy}. {conclusion} In this run the whole layer takes {gap:+.0f} us ({percent:+.0f} %) "
    "relative to the sum of its launches.\n\n"
    "With 4096 tokens both GEMMs take {gemms:.0f} us, {ratio:.2f} times the lower bound. The first one reaches {ours:.0f} "
    "TFLOP/s, with groups of equal size {equal:.0f}, and `torch.mm`, a single GEMM with as many operations, {torch:.0f}; "
    "the lower bound assumes the {peak:.0f} of the data sheet. {model}'s FP8 GEMMs of a prompt are farther from their "
    "bound, because CUDA cores multiply the sum of every 128 products by its scales ([notebook "
    "06](07_grouped_gemm.ipynb), section 8).",
    **slowdown(GATE_UP, "gate_up", ("permute", "copy")),
    gap=GATE_UP["whole layer"] - ALONE_US if GATE_UP else None,
    percent=100 * (GATE_UP["whole layer"] / ALONE_US - 1) if GATE_UP else None,
    gemms=SEEN.us("both GEMMs", 4096),
    ratio=SEEN.us("both GEMMs", 4096) / SEEN.us("final", 4096, "floor_us") if RECORD else None,
    ours=RATES.get("gate_up"),
    equal=RATES.get("gate_up, equal groups"),
    torch=RATES.get("torch.mm"),
    peak=model.GPU.tensor_flops["bfloat16"] / 1e12,
    model=DEEPSEEK,
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FEW_US, MANY_US = (
    sum(us for name, us in SEEN.launches(tokens).items() if name not in ("gate_up", "down")) for tokens in (64, 4096)
)
say(
    "Besides the GEMMs, the other launches take {few:.1f} of {few_layer:.0f} us with 64 tokens ({few_part:.0f} %): only "
    "GEMMs that read weights faster, or fewer bytes per weight, would make the layer much faster. With 4096 tokens they "
    "take {many:.0f} of {many_layer:.0f} us ({many_part:.0f} %). Two of them move large tensors; a copy (section 6) reaches "
    "{copy:.1f} TB/s:\n\n{rates}",
    few=FEW_US,
    few_layer=SEEN.us("final", 64),
    few_part=RECORD and 100 * FEW_US / SEEN.us("final", 64),
    many=MANY_US,
    many_layer=SEEN.us("final", 4096),
    many_part=RECORD and 100 * MANY_US / SEEN.us("final", 4096),
    copy=2 * R_BYTES / COPY_US * 1e-6,
    rates=RECORD and rates_table(RECORD, QWEN, SIZES[-1]),
)

# %% [markdown]
# `permute` and a copy that writes as many bytes slow the GEMM down alike, by about the noise. So the effect, if there
# is one, is not special to `permute`.
#
# ### 64 tokens: the rate of reading weights
#
# **Bottleneck.** Nearly all experts have a token, so the GEMMs read nearly all weights. Two kernels that only read them
# show what rate is possible: one loads boxes of 128 rows x 128 bytes by TMA into a ring of stages, as a grouped GEMM
# does, the other one reads memory in order with 16-byte loads.

# %%
STAGES, BOX, BOX_BYTES = 8, (128, 64), 128 * 128  # rows and bfloat16 elements of a box
FULL = STAGES * BOX_BYTES // 8  # the mbarriers are behind the stages


@cuda.jit
def read_boxes(weights, row_tiles, boxes_per_row, odd):
    smem, barriers = cuda.shared.array(0, int32, 1024), cuda.shared.array(0, uint64, 1024)
    if cuda.threadIdx.x == 0:
        for stage in range(STAGES):
            mbarrier_init(barriers, FULL + stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    if elect_sync(FULL_MASK):
        issued, read, found = int32(0), int32(0), int32(0)
        tile, box, tiles = int32(cuda.blockIdx.x), int32(0), int32(cuda.gridDim.x)
        while tile < row_tiles or read < issued:
            if tile < row_tiles and issued < read + STAGES:
                stage = int32(issued % STAGES)
                mbarrier_arrive_expect_tx(barriers, FULL + stage, BOX_BYTES)
                tma_load_2d(smem, stage * (BOX_BYTES // 4), weights, 0, 64 * box, 128 * tile, barriers, FULL + stage)
                issued, box = int32(issued + 1), int32(box + 1)
                if box == boxes_per_row:
                    tile, box = int32(tile + tiles), int32(0)
            else:
                stage = int32(read % STAGES)
                mbarrier_wait_parity(barriers, FULL + stage, uint32(read // STAGES & 1))
                found, read = int32(found + (smem[stage * (BOX_BYTES // 4)] & 1)), int32(read + 1)
        odd[cuda.blockIdx.x] = found


@cuda.jit
def read_in_order(weights, vectors, odd):
    found, step = int32(0), int32(cuda.gridDim.x * cuda.blockDim.x)
    for i in range(cuda.grid(1), vectors, 4 * step):
        for j in range(4):
            if i + j * step < vectors:
                found = int32(found + int32(load_nc_u32x4(weights, int64(i + j * step) * 4)[0] & 1))
    odd[cuda.grid(1)] = found


# %% jupyter={"source_hidden": true} tags=["hide-input"]
MATRIX = w13.flatten(0, 1)  # all experts' rows
WORDS, CTAS, THREADS = MATRIX.view(torch.int32), 4 if SIMULATED else model.GPU.sm_count, 32 if SIMULATED else 512
ODD = torch.zeros(4 * CTAS * THREADS, dtype=torch.int32, device=DEVICE)
PROMOTIONS = (256, 128, 64, 0) if SIMULATED or gpu_of(0).capability >= (9, 0) else ()  # TMA


def read_by_tma(promotion):
    """Return a call that reads the matrix by TMA, with this L2 promotion in the tensor map."""
    boxes = TensorMap(MATRIX, BOX, swizzle=128, l2_promotion=promotion), len(MATRIX) // 128, MATRIX.shape[1] // 64
    return lambda: launch(read_boxes, CTAS, 32, *boxes, ODD, shared_bytes=STAGES * (BOX_BYTES + 8))


READS = {"in order": lambda: launch(read_in_order, 4 * CTAS, THREADS, WORDS, WORDS.numel() // 4, ODD)}
READS |= {f"boxes, L2 promotion {promotion} B": read_by_tma(promotion) for promotion in PROMOTIONS}
for name, read in READS.items():
    ODD.zero_()
    read()
    first_words = WORDS.flatten()[::4] if name == "in order" else WORDS[::128, ::32]
    assert ODD.sum() == (first_words & 1).sum(), name
READ_US = layer_ladder.times("read the weights", READS) or {}
QWEN_LAYER = LAYERS[QWEN]
W13_BYTES = QWEN_LAYER.num_experts * 2 * QWEN_LAYER.intermediate * QWEN_LAYER.hidden * 2
for name, us in READ_US.items():
    print(f"{name:26} {us:7.1f} us, {W13_BYTES / us * 1e-6:.2f} TB/s")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
TOUCHED = (
    RECORD and SEEN.us("final", 64, "floor_us") * model.GPU.hbm_bandwidth * 1e-12
)  # MB of the experts with a token
say(
    "Each kernel counts the odd ones among the first words of its boxes or vectors, which is checked. The **L2 promotion** of "
    "a tensor map is the least that L2 fetches from DRAM. With 256 bytes, twice a box's row, reading takes {slower} relative "
    "to 128 bytes. All bytes are needed in either case; why it is slower is not known. The package's maps have 128 bytes. "
    "For 64 tokens its GEMMs read at {gate_up:.2f} and {down:.2f} TB/s (recorded).",
    slower=f"{READ_US['boxes, L2 promotion 256 B'] / READ_US['boxes, L2 promotion 128 B'] - 1:+.0%}"
    if READ_US and PROMOTIONS
    else None,
    gate_up=RECORD and TOUCHED * 2 / 3 / SEEN.launches(64)["gate_up"],
    down=RECORD and TOUCHED / 3 / SEEN.launches(64)["down"],
)

# %% [markdown]
# ### One token
#
# **Bottleneck.** With one token each chosen expert has one row. The next cell times the launches of a grouped call,
# each alone. Inputs with other experts rotate, so that no launch finds its weights in the L2 cache.


# %%
def launches_for(given, **options):
    """Return {name: [call of one launch per set of inputs]} of checked calls for one token."""
    found = {}
    for one in given:
        out, workspace = torch.full_like(one.x, float("nan")), ExpertsWorkspace(1, LAYER.topk, w13, w2)
        launches = part_calls(one, workspace, out, {}, **options)
        for name, start in launches.items():
            found.setdefault(name, []).append(start)
            start()
        assert mismatch(out, reference.fused_experts(*one), 1e-2) is None
    return found


def one_token():
    """Return inputs of one token with the next experts."""
    experts = (torch.arange(LAYER.topk) + next(first)) % LAYER.num_experts
    return ONE_TOKEN._replace(ids=experts.int()[None].to(DEVICE))


first = count(0, LAYER.topk)
weight_bytes = 3 * LAYER.topk * LAYER.hidden * LAYER.intermediate * 2
SETS = rotating(one_token, weight_bytes // 3)  # the smaller GEMM reads a third
GROUPED = launches_for(SETS, decodes=False)
LAUNCHES = layer_ladder.times("launches with 1 token, rotating", GROUPED) or {}
print_times(LAUNCHES)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GATE_UP_TILES = QWEN_LAYER.topk * -(-QWEN_LAYER.intermediate // BLOCK_N)  # a tile has gate and up
ONE_BYTES = 3 * QWEN_LAYER.topk * QWEN_LAYER.hidden * QWEN_LAYER.intermediate * 2  # of the recorded times
say(
    "The GEMMs read their weights at {gate_up:.1f} and {down:.1f} TB/s. The first one has only {tiles} tiles, for {sms} "
    "SMs. The second one has nearly as many tiles as SMs, but is no faster. Grouping has nothing to group.",
    gate_up=ONE_BYTES * 2 / 3 / LAUNCHES["gate_up"] * 1e-6 if LAUNCHES else None,
    down=ONE_BYTES / 3 / LAUNCHES["down"] * 1e-6 if LAUNCHES else None,
    tiles=GATE_UP_TILES,
    sms=model.GPU.sm_count,
)

# %% [markdown]
# **Idea.** Use matrix-vector kernels (GEMV). A warp computes a few dot products. Its lanes load adjacent 16-byte
# vectors of the weights' rows, several of them before the first is used. They multiply in float32 on CUDA cores, which
# is enough because each weight is used once. Two launches remain. The first reads the expert of each assignment from
# `topk_ids` and computes the activations. The second computes a token's rows, multiplies them by the router's weights
# and adds them; it loads its first weights before `griddepcontrol_wait`, while the first kernel still runs.
#
# **Change.** The main loop of the first kernel. `rows` is the number of weight rows of a warp, half of gate and half of
# up, `batch` the vectors of each that a lane loads at once; a shuffle reduction adds the lanes' sums after the loop:

# %%
passage(make_decode_gate_up_kernel, "for step in range(0, steps, batch)", "sums[i] = cuda.fma(high_half")

# %% [markdown]
# **Predicted gain.** The sum of the four launches, minus the time of a copy that moves as many bytes as the weights have.

# %%
flat, size = w2.flatten(), weight_bytes // 4  # elements: half of the bytes are read, and half written
target = torch.empty_like(flat)
pairs = [(flat[i * size :][:size], target[i * size :][:size]) for i in range(len(SETS))]
calls = {"copy": [partial(torch.add, source, 1, out=copied) for source, copied in pairs]}
GEMV = launches_for(SETS)  # `fused_experts` takes these kernels
calls |= {f"GEMV, {name}": starts for name, starts in GEMV.items()}
for name, launches in {"grouped GEMMs": GROUPED, "GEMV": GEMV}.items():
    calls[name] = [
        lambda starts=starts: [start() for start in starts] for starts in zip(*launches.values(), strict=True)
    ]
ONE = layer_ladder.times("whole layer with 1 token", calls) or {}
print_times(ONE)
layer_ladder.save()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GAIN = Judgement(ONE["grouped GEMMs"], ONE["GEMV"], sum(LAUNCHES.values()) - ONE["copy"]) if ONE and LAUNCHES else None
say(
    "**Measured.** {before:.1f} -> {after:.1f} us; {gain}. The two kernels alone take {first:.1f} and {second:.1f} us, at "
    "{first_rate:.1f} and {second_rate:.1f} TB/s; the copy reaches {copy:.1f} TB/s. One after the other they take "
    "{overlap:+.2f} us relative to their sum.\n\n"
    "The GEMV kernels read an expert's weights once for each of its tokens. So `fused_experts` uses them for one token, and "
    "for more only if `tokens * topk` is at most {ratio:g} times the expected number of distinct experts and the "
    "weights of the assignments take at most {size} MiB in bfloat16. Measurements that this notebook does not repeat gave "
    "these limits.",
    before=ONE.get("grouped GEMMs"),
    after=ONE.get("GEMV"),
    gain=GAIN and str(GAIN),
    first=ONE.get("GEMV, gate_up"),
    second=ONE.get("GEMV, down"),
    first_rate=ONE_BYTES * 2 / 3 / ONE["GEMV, gate_up"] * 1e-6 if ONE else None,
    second_rate=ONE_BYTES / 3 / ONE["GEMV, down"] * 1e-6 if ONE else None,
    copy=ONE_BYTES / ONE["copy"] * 1e-6 if ONE else None,
    overlap=ONE["GEMV"] - ONE["GEMV, gate_up"] - ONE["GEMV, down"] if ONE else None,
    ratio=decode.MAX_ASSIGNMENTS_PER_EXPERT["bf16"],
    size=decode.MAX_WEIGHT_BYTES["bf16"] >> 20,
)

# %% [markdown]
# Measured alone, each kernel follows a launch of itself and loads early as well, so the sum may already contain that gain.
#
# ## 8. Expert parallelism (EP)
#
# With several GPUs each **rank** holds a part of the experts. A token is sent once to each rank that has one of its
# experts (notebooks [10](10_dispatch_layout.ipynb) and [12](12_dispatch.ipynb)). That rank computes the
# weighted sum of its experts' outputs, and combine adds the sums of the ranks in rank order ([13](13_combine.ipynb)).
#
# `ExpertParallelMoE` does this. The receiving rank sees local expert ids; other ranks' experts are -1, and
# `group_by_expert` skips them. Two virtual ranks in the simulator must agree with one GPU that holds all experts:


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
# Options of the layer:
#
# - `fp8_dispatch` sends tokens in FP8.
# - `shared_experts` runs a shared expert on a stream of its own, concurrently with dispatch and experts.
# - `low_latency_tokens` uses the low-latency pair of [notebook 14](14_low_latency.ipynb), `fp8_combine` with sums in FP8.
#   A layer chooses the pair by itself if `num_worst_tokens` says that a rank has at most 512 tokens, as above.
#
# [Expert parallelism](../docs/expert_parallel.md) computes what other ways to overlap would gain. Recorded times:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
RANKS = records.recorded("moe_layer_ranks")
table = RANKS and f"{ranks_bench.layers_table(RANKS)}\n\n{ranks_bench.about_layers()}"
Markdown(table or NO_RECORD.replace("moe_layer", "moe_layer_ranks"))

# %% [markdown]
# **Exercise 3.** A token with topk experts reaches fewer than topk ranks if a rank has several of them. If a token's
# distinct experts are drawn uniformly at random, how many ranks does it reach on average?


# %%
ranks_reached = ...  # your answer: lambda num_experts, topk, ranks: ... (ranks divides num_experts)
exercise("moe_layer-3").check(ranks_reached)

# %% [markdown]
# ## 9. In a model of transformers
#
# `register()` makes `fused_experts` known to transformers 5, `set_experts_implementation` selects it for a model, and
# `fuse_routers` replaces the model's routers by the gate kernel. The cell runs a tiny Qwen3-MoE model with random
# weights and prints the next token predicted at each position. `eager` is the loop over experts in transformers:


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
# The logits differ by rounding: for example, eager rounds the weighted row of each expert to bfloat16 before it adds
# the row. For a model with a layout that the kernels do not support, a ValueError names the attribute. The experts of
# gpt-oss, with biases and their own activation, also run with their weights in MXFP4
# ([example](../docs/examples/gpt_oss_mxfp4.py)).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
MODELS = records.recorded("models")
PASSES = RecordedTimes(MODELS, QWEN, SIZES)
say(
    "A forward pass of {layers} layers of {model}'s width with random weights takes {before} us for 1 / 64 / 4096 tokens "
    "with transformers' `grouped_mm`, and {after} us with the experts and routers of the package (in a CUDA graph, "
    "recorded on {gpu}). The rest of a pass, such as attention, is the same.",
    layers=MODELS and records.find(MODELS, config={"model": QWEN})["config"]["layers"],
    model=QWEN,
    before=PASSES.listed("peer:transformers grouped_mm"),
    after=PASSES.listed("final, fused routers"),
    gpu=MODELS and MODELS["gpu"],
)

# %% [markdown]
# ## 10. What 64 GPUs would change
#
# **All rows below are a model** of one DeepSeek-V3 layer whose experts are distributed over GPUs in nodes of 8, with
# uniform routing. A row crosses the network once per node that has one of its experts, and is forwarded over NVLink;
# dispatch sends FP8, combine bfloat16. Every part takes the time of its bytes or operations, and transfers do not
# overlap with GEMMs.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
assumed = (
    f"Parts in us per layer; weights of the experts of {model.MOE_LAYERS} layers, which do not fit on 1 GPU: its rows are "
    f"hypothetical. NVLink {model.NVLINK / 1e9:.0f} GB/s, network {model.NETWORK / 1e9:.0f} GB/s, per GPU and direction; "
    "other rates: data sheet of an H200. The last column is the longer of reading and computing, plus dispatch and "
    "combine, divided by the tokens of a GPU."
)
Markdown(f"{model.table((1, 8, 64), (64, 4096))}\n\n{assumed}")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FEW_TOKENS, MANY_TOKENS, NODES = 64, 4096, 64 // model.NODE
ON_EIGHT = {tokens: ranks_bench.fastest(RANKS, 8, tokens) if RANKS else None for tokens in (FEW_TOKENS, MANY_TOKENS)}
say(
    "For 8 GPUs there are measurements (section 8): with {few} tokens the model gives {few_model:.0f} us, and {few_us} us "
    "are measured; with {many} tokens {many_model:.0f} and {many_us} us. The model ignores fixed costs (launches, exchange "
    "of counts), and assumes the peak rates of memory, tensor cores and links.\n\n"
    "**By this model 64 GPUs gain in decode and lose in prefill.** With {few} tokens on each, each of 64 GPUs reads {less:.0f} times fewer "
    "bytes than each of 8, because it holds fewer experts, and a layer takes {few_64:.2f} us per token instead of "
    "{few_8:.2f}. With {many} tokens it takes {many_64:.2f} us per token instead of {many_8:.2f}, {slower:.1f} times as long: "
    "computing takes longer than reading already on 8 GPUs, so reading less saves nothing, and dispatch and combine over the "
    "network take {transfer:.0f} us, {ratio:.1f} times as long as the GEMMs. If they overlapped perfectly with the GEMMs, the "
    "longer of the two would remain. A token reaches {reached:.1f} of {nodes} nodes on average; DeepSeek-V3's router limits "
    "it to {limit}, with which the transfers take {limited:.0f} us, and a layer {limited_64:.2f} us per token.",
    few=FEW_TOKENS,
    many=MANY_TOKENS,
    few_model=model.total_us(8, FEW_TOKENS),
    many_model=model.total_us(8, MANY_TOKENS),
    few_us=ON_EIGHT[FEW_TOKENS] and records.format_us(ON_EIGHT[FEW_TOKENS]),
    many_us=ON_EIGHT[MANY_TOKENS] and records.format_us(ON_EIGHT[MANY_TOKENS]),
    less=model.part_times(8, FEW_TOKENS)["read weights"] / model.part_times(64, FEW_TOKENS)["read weights"],
    few_8=model.total_us(8, FEW_TOKENS) / FEW_TOKENS,
    few_64=model.total_us(64, FEW_TOKENS) / FEW_TOKENS,
    many_8=model.total_us(8, MANY_TOKENS) / MANY_TOKENS,
    many_64=model.total_us(64, MANY_TOKENS) / MANY_TOKENS,
    slower=model.total_us(64, MANY_TOKENS) / model.total_us(8, MANY_TOKENS),
    transfer=model.transfer_us(64, MANY_TOKENS),
    ratio=model.transfer_us(64, MANY_TOKENS) / model.part_times(64, MANY_TOKENS)["compute"],
    reached=ranks_per_token(model.NUM_EXPERTS, model.TOPK, NODES),
    nodes=NODES,
    limit=model.MAX_NODES,
    limited=model.transfer_us(64, MANY_TOKENS, model.MAX_NODES),
    limited_64=model.total_us(64, MANY_TOKENS, model.MAX_NODES) / MANY_TOKENS,
)

# %% [markdown]
# ## 11. Sources
#
# - Names of `topk_weights`, `topk_ids`, `w2`, `a1_scale` and `a2_scale`: vLLM's function `fused_experts`; `w13`: its
#   layer's weight. Order of operations with several ranks: [DeepEP](https://github.com/deepseek-ai/DeepEP).
# - Counting sort: D. Knuth, *The Art of Computer Programming*, volume 3, section 5.2.
# - DeepSeek-AI: *DeepSeek-V3 Technical Report*, 2024, section 2.1.2 on routing that is limited to a few nodes.
# - Code: [`moe_numba/moe_layer`](../moe_numba/moe_layer), [`moe_numba/integrations`](../moe_numba/integrations),
#   [examples](../docs/examples).
