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
# The notebooks before this one built parts: a gate, a sort, a grouped GEMM, dispatch and combine. This notebook assembles
# the experts of a mixture-of-experts layer from them, `moe_numba.fused_experts`, and writes the small kernels that are
# still missing. It starts from a loop in torch, replaces one stage after another, and ends with two GPUs and with a model
# of the transformers library.

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
from moe_numba.course.bench import plots, records
from moe_numba.course.bench.baselines.limits import H200, chip_limits
from moe_numba.course.bench.launch_profile import launch_profile
from moe_numba.course.bench.parts_figure import EXPERTS, parts_of, stacked_parts
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.bench.topics import moe_layer as bench
from moe_numba.course.bench.topics.grouped_gemm import TORCH_NAMES
from moe_numba.course.bench.topics.moe_layer_measure import Layer, make_inputs, make_weights
from moe_numba.course.draw import dispatch_layout as draw_layout
from moe_numba.course.draw import moe_layer as draw
from moe_numba.course.draw.launch_timeline import launch_timeline
from moe_numba.course.exercises import exercise
from moe_numba.course.exercises.moe_layer import ranks_per_token
from moe_numba.course.ladder import Ladder
from moe_numba.course.prose import say
from moe_numba.course.simulate import in_simulator, source_of
from moe_numba.course.source_diff import OpCounter
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.moe_layer import ExpertParallelMoE, Experts, ExpertsWorkspace, fused_experts, reference
from moe_numba.moe_layer import kernel_silu_and_mul as silu_module
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import lanemask_lt
from moe_numba.runtime.launch import launch

SIMULATED = simulator.ENABLED
DEVICE, LIMITS = ("cpu", H200) if SIMULATED else ("cuda", chip_limits())
RECORD = records.recorded("moe_layer")  # what `python -m moe_numba bench moe_layer` measured
QWEN, DEEPSEEK = "Qwen3-30B-A3B", "DeepSeek-V3"


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def recorded(step, model, tokens, field="kernel_us"):
    """Return a step's recorded median in microseconds, or another field of its row; None if there is none."""
    row = RECORD and records.find(RECORD, step=step, config={"model": model}, size={"tokens": tokens})
    value = row and row.get(field)
    return value["median"] if isinstance(value, dict) else value


say(
    "**Result** (kernel time, recorded on {gpu}): {model}'s experts take {one:.1f} us for 1 token, {batch:.0f} us for 64 "
    "and {many:.0f} us for 4096. transformers' `grouped_mm`, which uses torch's grouped GEMM, takes {torch_one:.0f}, "
    "{torch_batch:.0f} and {torch_many:.0f} us. The lower bound, reading weights or multiplying, is {bound:.1f}, "
    "{bound_batch:.0f} and {bound_many:.0f} us.",
    gpu=RECORD and RECORD["gpu"].replace("NVIDIA", "an NVIDIA"),
    model=QWEN,
    one=recorded("final", QWEN, 1),
    batch=recorded("final", QWEN, 64),
    many=recorded("final", QWEN, 4096),
    torch_one=recorded("peer:transformers grouped_mm", QWEN, 1),
    torch_batch=recorded("peer:transformers grouped_mm", QWEN, 64),
    torch_many=recorded("peer:transformers grouped_mm", QWEN, 4096),
    bound=recorded("final", QWEN, 1, "floor_us"),
    bound_batch=recorded("final", QWEN, 64, "floor_us"),
    bound_many=recorded("final", QWEN, 4096, "floor_us"),
)

# %% [markdown]
# ## 1. The problem in one figure
#
# The gate gives each token `topk` experts and their weights. An element of `topk_ids` is an **assignment**. A grouped GEMM
# needs the rows of an expert next to each other, so assignments are grouped by expert; afterwards the rows of a token are
# summed with the gate's weights.

# %%
torch.manual_seed(3)
draw.layer(torch.rand(6, 4).topk(2).indices.int(), num_experts=4)

# %% [markdown]
# ## 2. The layer in torch
#
# An expert is a SwiGLU MLP of two weights: `w13` computes gate and up, `w2` computes the output from `silu(gate) * up`. For
# each expert the loop selects its tokens, runs two GEMMs and adds the weighted rows to the output. The sizes are those of
# Qwen3-30B-A3B on a GPU, and small in the simulator.

# %%
LAYERS = {layer.model: layer for layer in bench.LAYERS}
LAYER = Layer("small", 8, 128, 64, "bf16", (), 2) if SIMULATED else LAYERS[QWEN]
TOKENS = 6 if SIMULATED else 64
WEIGHTS = make_weights(LAYER, DEVICE)  # random
x, w13, w2, topk_weights, topk_ids, *_ = GIVEN = make_inputs(LAYER, TOKENS, *WEIGHTS)  # distinct experts at random


def experts_in_torch(x, w13, w2, topk_weights, topk_ids):
    out = torch.zeros(x.shape, device=x.device)
    for expert in topk_ids.unique().tolist():  # the host waits for the GPU
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)  # here, too
        gate, up = (x[tokens] @ w13[expert].T).float().chunk(2, dim=1)
        activated = (torch.nn.functional.silu(gate) * up).bfloat16()
        out.index_add_(0, tokens, (activated @ w2[expert].T) * topk_weights[tokens, column, None])
    return out.bfloat16()


EXPECTED = reference.fused_experts(*GIVEN)  # in float64, rounded where kernels store bfloat16


def check(out):
    return mismatch(out, EXPECTED, 1e-2)


print("the loop:", check(experts_in_torch(*GIVEN[:5])) or "right")

# %% [markdown]
# The check bounds the relative error of the whole output, of each row and of each element. It must reject wrong layers:
# weights that are applied twice, an expert off by one, an assignment that is lost, and gate and up exchanged.

# %%
lost = topk_ids.clone()
lost[-1, -1] = -1  # adds nothing
WRONG = {
    "weights applied twice": (x, w13, w2, topk_weights**2, topk_ids),
    "expert off by one": (x, w13, w2, topk_weights, (topk_ids + 1) % LAYER.num_experts),
    "an assignment is lost": (x, w13, w2, topk_weights, lost),
    "gate and up exchanged": (x, w13.roll(LAYER.intermediate, 1), w2, topk_weights, topk_ids),
}
for name, arguments in WRONG.items():
    assert (wrong := check(fused_experts(*arguments))), f"the check accepts: {name}"
    print(f"{name}: {wrong}")

# %% [markdown]
# ## 3. Lower bound
#
# A layer must read the weights of each expert that any token uses, once, and multiply. Let `W` be the weights of an expert.
# `n` tokens use `E (1 - (1 - k/E)^n)` of `E` experts on average, if routing is uniform. They cost `2 k n W` operations.
#
# **Exercise 1.** With many tokens all experts are read. From which number of tokens on does computing take longer than
# reading?


# %%
# Your answer, a function: lambda num_experts, topk, bytes_per_weight, bytes_per_second, operations_per_second: ...
tokens_that_fill = ...
exercise("moe_layer-1").check(tokens_that_fill)


# %%
def bounds(layer, tokens, limits=H200):
    """Return (experts used, us to read their weights, us to compute)."""
    used = layer.num_experts * (1 - (1 - layer.topk / layer.num_experts) ** tokens)
    weights, size = 3 * layer.hidden * layer.intermediate, {"bf16": 2, "e4m3": 1}[layer.dtype]
    compute = 2 * layer.topk * tokens * weights / limits.tensor_flops[TORCH_NAMES[layer.dtype]]
    return used, used * weights * size / limits.hbm_bandwidth * 1e6, compute * 1e6


def limit_of(layer, tokens):
    _, read, compute = bounds(layer, tokens)
    return "memory bandwidth" if read > compute else "tensor cores"


lines = [
    "| experts | tokens | experts used | read weights, us | compute, us | limit |",
    "|---|---:|---:|---:|---:|---|",
]
for layer in bench.LAYERS:
    for tokens in layer.token_counts:
        used, read, compute = bounds(layer, tokens)
        cells = layer.model, tokens, f"{used:.0f}", f"{read:.1f}", f"{compute:.1f}", limit_of(layer, tokens)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
Markdown("\n".join([*lines, "", f"Rates: data sheet of an H200, {H200.hbm_bandwidth / 1e12:g} TB/s."]))

# %% [markdown]
# Decode is reading: with 64 tokens nearly all experts are read for a few rows each. Everything besides the two GEMMs must
# therefore be short, and must not add a pass over a large tensor in prefill.
#
# ## 4. One stage after another
#
# `moe_numba.moe_layer.Experts` computes each stage by a kernel or, if it is named in `reference`, in torch. All stages:
#
# | stage | idea | notebook |
# |---|---|---|
# | `gate` | One launch scores, chooses and normalises. A token belongs to a few lanes, whose registers hold all of its scores. | [01](01_gate.ipynb) |
# | `permute` | A counting sort in one launch returns group sizes and indices in both directions. Rows need no padding, unlike [expert blocks](02_align.ipynb). | section 5 |
# | `quantise` | FP8 weights need FP8 tokens. Each 128 elements of a token share a scale, which one warp computes. | [08](08_ring_buffer_dispatch.ipynb) |
# | `gate_up` | One launch multiplies the rows of all experts. With few rows per expert the producer warps gather rows of x by index; with many, `permute_tokens` stores x by expert first, because TMA then loads consecutive rows. | [06](06_grouped_gemm.ipynb) |
# | `activation` | `silu(gate) * up` in one pass. With FP8 it is part of the first GEMM's epilogue, which also quantises the result. | section 6 |
# | `down` | The same grouped GEMM. Group sizes stay on the GPU, so the host never waits for them. | [06](06_grouped_gemm.ipynb) |
# | `sum` | A thread adds the rows of a token in the order of k. No atomic addition, so the bits do not depend on timing. | section 6 |
#
# A shared expert can be one more column of the routing ([04](04_shared_experts.ipynb)). `fused_moe` is `fused_experts`
# behind the gate.

# %%
experts = Experts(*LAYER[1:4], device=DEVICE, reference={"permute", "activation", "sum"})
experts.load_state_dict({"w13": w13, "w2": w2})
print(experts)

STAGES = {  # step -> stages in torch; None: the loop of section 2
    "torch loop": None,
    "with grouped GEMMs": {"permute", "activation", "sum"},
    "with group_by_expert": {"activation", "sum"},
    "with silu_and_mul": {"sum"},
    "with weighted_sum": set(),
}

# %% [markdown]
# The GEMMs come first, both at once, because their references compute in float64. While a stage in torch determines group
# sizes, the host waits for the GPU, so no CUDA graph can capture the step; such steps have a call time only. Counting torch
# operations shows what the host must launch.


# %%
def with_stages(in_torch, given=GIVEN):
    """Compute the experts with some stages in torch; None: all of them, by the loop."""
    if in_torch is None:
        return experts_in_torch(*given[:5])
    experts.reference = in_torch
    return experts(given.x, given.weights, given.ids)


layer_ladder = Ladder(
    "moe_layer_ladder",
    check,
    title=f"The experts of a layer, stage by stage: {QWEN}, 64 tokens",
    reference_name="torch loop",
    config={"num_experts": LAYER.num_experts, "topk": LAYER.topk, "hidden": LAYER.hidden},
    size={"tokens": TOKENS},
)
ONE_TOKEN = make_inputs(LAYER, 1, *WEIGHTS)  # of the timelines in section 7
for name, in_torch in STAGES.items():
    with OpCounter() as operations:
        with_stages(in_torch)
    graph = name == "with weighted_sum"  # no stage waits
    more = {"operations": len(operations.names), "timeline": launch_profile(partial(with_stages, in_torch, ONE_TOKEN))}
    layer_ladder.step(name, partial(with_stages, in_torch), graph=graph, dtype="bf16", **more)
    print(f"{'':<24}torch operations: {len(operations.names)}")

# %% [markdown]
# The last step keeps all intermediate results in an `ExpertsWorkspace` and writes into `out`: nothing is allocated. The
# kernels are the same.


# %%
def prepared(given):
    """Return a call that allocates nothing; its output is poisoned."""
    out = torch.full_like(given.x, float("nan"))
    workspace = ExpertsWorkspace(len(given.x), LAYER.topk, given.w13, given.w2)
    return partial(fused_experts, *given, out=out, workspace=workspace)


layer_ladder.step("final", prepared(GIVEN), dtype="bf16", timeline=launch_profile(prepared(ONE_TOKEN)))
layer_ladder.measure_all()
layer_ladder.save(notebook_sources("notebooks/11_moe_layer.py"))

# %% [markdown]
# With FP8 weights the stages are others: `quantise` instead of `activation`. The same check of every step, in small:

# %%
SMALL_FP8 = Layer("small", 4, 128, 128, "e4m3", (), 2)
small = make_inputs(SMALL_FP8, 5, *make_weights(SMALL_FP8, DEVICE))
small_expected = reference.fused_experts(*small)
experts_fp8 = Experts(4, 128, 128, FP8, DEVICE)
experts_fp8.load_state_dict({name: getattr(small, name) for name in ("w13", "w2", "w13_scale", "w2_scale")})
for in_torch in ({"permute", "quantise", "sum"}, {"quantise", "sum"}, {"sum"}, {"gate_up"}, {"down"}, set()):
    experts_fp8.reference = in_torch
    out = experts_fp8(small.x, small.weights, small.ids)
    assert not (wrong := mismatch(out, small_expected, 1e-2)), f"{in_torch}: {wrong}"
    print("right with stages in torch:", ", ".join(sorted(in_torch)) or "none")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "On {gpu}, a call of the loop takes {loop:.0f} us; with grouped GEMMs {gemms:.0f} us, with all kernels {all:.0f} us and "
    "with a workspace {final:.0f} us, of which the GPU works {kernel:.0f} us. The difference is the CPU's time, which a CUDA "
    "graph removes.",
    gpu=layer_ladder.record and layer_ladder.record["gpu"],
    loop=layer_ladder.median_us("torch loop", "call_us"),
    gemms=layer_ladder.median_us("with grouped GEMMs", "call_us"),
    all=layer_ladder.median_us("with weighted_sum", "call_us"),
    final=layer_ladder.median_us("final", "call_us"),
    kernel=layer_ladder.median_us("final"),
)

# %% [markdown]
# ## 5. Group by expert in one launch
#
# A grouped GEMM wants `seqlens` (rows of each expert), `cu_seqlens` (first row of each) and `gather_indices` (the token of
# each row). The weighted sum wants `inverse_indices` (the row of each assignment). Torch needs a stable sort and several small
# operations, here without waiting for the GPU:

# %%
G_EXPERTS, G_TOPK, G_TOKENS = (16, 4, 20) if SIMULATED else (256, 8, 64)
TIMED_EXPERTS, TIMED_ASSIGNMENTS = 256, 512  # of the recorded times
torch.manual_seed(4)
IDS = torch.rand(G_TOKENS, G_EXPERTS).topk(G_TOPK).indices.int().to(DEVICE)


def group_in_torch(ids):
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    seqlens = torch.zeros(G_EXPERTS, dtype=torch.int64, device=DEVICE).scatter_add_(0, flat, torch.ones_like(flat))
    cu_seqlens = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0))
    inverse = torch.empty_like(flat).scatter_(0, order, torch.arange(len(flat), device=DEVICE))
    return seqlens.int(), cu_seqlens.int(), (order // G_TOPK).int(), inverse.int().view(ids.shape)


NAMES = "seqlens", "cu_seqlens", "gather_indices", "inverse_indices"
GROUPS = reference.group_by_expert(IDS, G_EXPERTS)


def check_groups(outputs):
    for name, out, right in zip(NAMES, outputs, GROUPS, strict=True):
        if not torch.equal(out, right):
            return f"{name} differs at {(out != right).nonzero()[0].tolist()}"
    return None


group_ladder = Ladder(
    "moe_layer_group_ladder",
    check_groups,
    title=f"Grouping {TIMED_ASSIGNMENTS} assignments by expert: {TIMED_EXPERTS} experts",
    reference_name="torch",
    config={"num_experts": G_EXPERTS, "topk": G_TOPK},
    size={"tokens": G_TOKENS},
)
with OpCounter() as operations:
    group_in_torch(IDS)
print(len(operations.names), "operations:", ", ".join(operations.names))
group_ladder.step("torch", partial(group_in_torch, IDS), dtype="int32")


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def empty_groups(tokens=G_TOKENS):
    sizes = (G_EXPERTS,), (G_EXPERTS + 1,), (tokens * G_TOPK,), (tokens, G_TOPK)
    return [torch.full(size, -7, dtype=torch.int32, device=DEVICE) for size in sizes]


def group_by(kernel, threads, ids=IDS):
    outputs = empty_groups(len(ids))

    def call():
        launch(kernel, 1, threads, ids, *outputs, ids.numel())
        return outputs

    return call


@cuda.jit
def empty(x):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()


# %% [markdown]
# **A thread per expert.** The simplest kernel that is stable: each thread owns an expert, counts its assignments, adds up
# the counts of lower experts, and walks through all assignments again.
#
# **Predicted gain.** `(m - 1) t_empty - 2 n 6 (E / 32) / (4 f)`: `m` operations become one launch. Each of the `E / 32` warps
# executes two loops over all `n` assignments, about 6 instructions each, and the SM issues four per clock, with frequency `f`.


# %%
@cache
def make_thread_per_expert(num_experts, topk):
    @cuda.jit
    def thread_per_expert(topk_ids, seqlens, cu_seqlens, gather_indices, inverse_indices, assignments):
        counts = cuda.shared.array(num_experts, int32)
        expert, count, row = int32(cuda.threadIdx.x), int32(0), int32(0)
        for i in range(assignments):
            if topk_ids[i] == expert:
                count = int32(count + 1)
        counts[expert] = count
        cuda.syncthreads()
        for lower in range(expert):
            row = int32(row + counts[lower])
        seqlens[expert], cu_seqlens[expert] = count, row
        if expert == num_experts - 1:
            cu_seqlens[num_experts] = row + count
        for i in range(assignments):
            if topk_ids[i] == expert:
                gather_indices[row] = i // topk
                inverse_indices[i] = row
                row = int32(row + 1)

    return thread_per_expert


EMPTY = {"alone": {}, "dependent": {"dependent": True}}
basics = group_ladder.times("empty", {n: partial(launch, empty, 1, 32, IDS, **o) for n, o in EMPTY.items()})
EMPTY_US, DEPENDENT_US = (basics["alone"], basics["dependent"]) if basics else (1.0, 0.5)
LOOPS_US = 2 * TIMED_ASSIGNMENTS * 6 * TIMED_EXPERTS / 32 / (4 * LIMITS.boost_clock) * 1e6
walk = group_by(make_thread_per_expert(G_EXPERTS, G_TOPK), G_EXPERTS)
gain_us = (len(operations.names) - 1) * EMPTY_US - LOOPS_US
group_ladder.step("a thread per expert", walk, after="torch", predicted_gain_us=gain_us, dtype="int32")

# %% [markdown]
# **A share per warp.** Every thread reads every assignment. A **counting sort** reads each assignment twice: warps count
# contiguous shares in counters of their own, a scan turns counts into first rows, and warps place their shares.

# %%
torch.manual_seed(3)
draw.counting_sort(torch.rand(32, 8).topk(2).indices, num_experts=8, warps=2)

# %% [markdown]
# The sort is stable because shares are contiguous, each warp places 32 assignments at a time in order, and a lane ranks
# itself among the lanes with the same expert by `match_any_sync`, whose result has a bit per such lane.
#
# **Predicted gain.** `31/32` of the loops' time: a lane looks at `1/32` of what a thread has looked at before.


# %%
@cache
def make_share_per_warp(num_experts, topk, warps):
    words, threads = warps * num_experts, 32 * warps

    @cuda.jit
    def share_per_warp(topk_ids, seqlens, cu_seqlens, gather_indices, inverse_indices, assignments):
        counts = cuda.shared.array(words, int32)
        starts = cuda.shared.array(num_experts, int32)
        tid, share = cuda.threadIdx.x, (assignments + threads - 1) // threads * 32
        mine, first = (tid >> 5) * num_experts, (tid >> 5) * share
        end = min(first + share, assignments)
        for i in range(tid, words, threads):
            counts[i] = 0
        cuda.syncthreads()
        for i in range(first + (tid & 31), end, 32):
            cuda.atomic.add(counts, mine + topk_ids[i], 1)
        cuda.syncthreads()
        if tid < num_experts:
            total = int32(0)
            for warp in range(warps):
                counts[warp * num_experts + tid], total = total, int32(total + counts[warp * num_experts + tid])
            seqlens[tid] = starts[tid] = total
        cuda.syncthreads()
        row = int32(0)
        for lower in range(min(tid, num_experts)):
            row = int32(row + starts[lower])
        cuda.syncthreads()
        if tid < num_experts:
            starts[tid] = cu_seqlens[tid] = row
            if tid == num_experts - 1:
                cu_seqlens[num_experts] = row + seqlens[tid]
        cuda.syncthreads()
        place(topk_ids, gather_indices, inverse_indices, starts, counts, mine, first, end, num_experts, topk)

    return share_per_warp


# %%
@cuda.jit(device=True)
def place(topk_ids, gather_indices, inverse_indices, starts, counts, mine, first, end, num_experts, topk):
    """Write the rows of a warp's share; ``counts[mine + e]`` is the number of earlier assignments of expert e."""
    lane = cuda.threadIdx.x & 31
    for base in range(first, end, 32):
        i, expert = int32(base + lane), int32(num_experts)
        if i < end:
            expert = topk_ids[i]
        same = uint32(cuda.match_any_sync(0xFFFFFFFF, expert))
        lower = int32(cuda.popc(same & lanemask_lt()))
        if i < end:
            row = int32(starts[expert] + counts[mine + expert] + lower)
            gather_indices[row] = i // topk
            inverse_indices[i] = row
        cuda.syncwarp()
        if i < end and lower == 0:
            counts[mine + expert] += int32(cuda.popc(same))
        cuda.syncwarp()


WARPS = 2 if SIMULATED else 8
by_warps = group_by(make_share_per_warp(G_EXPERTS, G_TOPK, WARPS), 32 * WARPS)
group_ladder.step(
    "a share per warp", by_warps, after="a thread per expert", predicted_gain_us=LOOPS_US * 31 / 32, dtype="int32"
)

# %% [markdown]
# **The package.** `moe_numba.group_by_expert` differs in details: several ids in flight per lane, ballots per bit of the
# expert's number instead of `match_any_sync`, a warp scan, ids outside of the experts get no row, and a dependent launch. Up
# to 4096 assignments it is one launch of one CTA. Beyond that it is three launches: CTAs count chunks, one CTA scans, CTAs
# place their chunks.
#
# **Predicted gain.** `t_empty - t_dependent`.

# %%
outputs = empty_groups()
group_ladder.step(
    "final",
    lambda: moe_numba.group_by_expert(IDS, G_EXPERTS, out=outputs),
    after="a share per warp",
    predicted_gain_us=EMPTY_US - DEPENDENT_US,
    dtype="int32",
)

# %% [markdown]
# **Explanation.** Torch's sort alone, and the two kernels with one token: what remains then does not depend on the
# number of assignments.

# %%
flat, few = IDS.flatten().long(), IDS[:1].contiguous()
calls = {"sort": lambda: flat.argsort(stable=True)}
calls["thread"] = group_by(make_thread_per_expert(G_EXPERTS, G_TOPK), G_EXPERTS, few)
calls["warp"] = group_by(make_share_per_warp(G_EXPERTS, G_TOPK, WARPS), 32 * WARPS, few)
parts = group_ladder.times("parts", calls)
group_ladder.measure_all()
group_ladder.save(notebook_sources("notebooks/11_moe_layer.py"))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The sort takes {sort:.1f} of torch's {torch:.1f} us. With one token a thread per expert takes {thread:.1f} us instead "
    "of {walk:.1f}, a share per warp {warp:.1f} us instead of {share:.1f}; the package's kernel takes {final:.1f} us.",
    sort=parts and parts["sort"],
    thread=parts and parts["thread"],
    warp=parts and parts["warp"],
    torch=group_ladder.median_us("torch"),
    walk=group_ladder.median_us("a thread per expert"),
    share=group_ladder.median_us("a share per warp"),
    final=group_ladder.median_us("final"),
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
group_ladder.plot(floor_us=DEPENDENT_US)

# %% [markdown]
# A sort that takes positions from an atomic counter is faster to write and not stable: the rows of an expert are in the
# order in which threads arrive. Each row is still computed correctly, so a check of the layer's output accepts it. The check
# of the indices must not. The simulator draws the order of threads by a seed:


# %%
@cuda.jit
def unstable(topk_ids, cu_seqlens, counters, gather_indices, inverse_indices, topk):
    i = cuda.threadIdx.x
    row = cu_seqlens[topk_ids[i]] + cuda.atomic.add(counters, topk_ids[i], 1)
    gather_indices[row] = i // topk
    inverse_indices[i] = row


def orders_of_unstable(seeds):
    """Return whether the unstable sort gives the stable order, for each seed."""
    ids = torch.tensor([[0, 1], [1, 2], [0, 2], [1, 0]], dtype=torch.int32)
    right = reference.group_by_expert(ids, 3)
    found = []
    for seed in range(seeds):
        counters = torch.zeros(3, dtype=torch.int32)
        gather, inverse = torch.full((8,), -7, dtype=torch.int32), torch.full((8,), -7, dtype=torch.int32)
        with simulator.seed(seed):
            launch(unstable, 1, 8, ids, right[1], counters, gather, inverse, 2)
        found.append(torch.equal(gather, right[2]) and torch.equal(inverse, right[3].flatten()))
    return found


stable = in_simulator(orders_of_unstable, 8)
print("stable order, by seed:", stable)
assert not all(stable), "the check accepts an unstable sort"

# %% [markdown]
# ## 6. Activation and weighted sum
#
# `silu_and_mul` reads gate and up once, and writes half as much. A thread computes eight adjacent columns with 16-byte loads
# and one 16-byte store. A bfloat16 is the upper half of a float32, so a shift converts it. The number of valid rows is read on
# the GPU:

# %%
Markdown("```python\n" + source_of(silu_module.make_silu_and_mul_kernel) + "```")

# %%
torch.manual_seed(5)
gate_up = torch.randn(7, 64, device=DEVICE).bfloat16()
activated = moe_numba.silu_and_mul(gate_up, num_valid_rows=torch.tensor([5], dtype=torch.int32, device=DEVICE))
right = reference.silu_and_mul(gate_up).double()
assert not mismatch(activated[:5], right[:5])
assert mismatch(moe_numba.silu_and_mul(gate_up.roll(32, 1)), right), "the check accepts gate and up exchanged"

# %% [markdown]
# The weighted sum reads the rows of a token wherever they are: `out[t] = sum over k of weight[t, k] * rows[inverse[t, k]]`.
# Scattering with atomic additions would need no inverse indices. But float addition is not associative, so the bits would
# depend on the order of arrival:

# %%
terms = torch.tensor([1.0, 2.0**-24, 2.0**-24, -1.0])
print("in order:", float(((terms[0] + terms[1]) + terms[2]) + terms[3]))
print("another order:", float(((terms[1] + terms[2]) + terms[0]) + terms[3]))

# %% [markdown]
# **Exercise 2.** This kernel scatters. Give every element of `out` one thread, which adds in the order of k.


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
# In torch the sum is a gather, a product and a reduction. Each writes its result to memory: with `R` bytes of rows the
# gather moves `2 R`, the product in float32 `3 R`, the reduction `2 R`.
#
# **A thread per two columns.** One pass reads `R` bytes. Two adjacent columns are one 32-bit word, and neighbouring threads
# read neighbouring words. **Predicted gain.** `6 R` / the bandwidth of a copy.


# %%
@cuda.jit
def two_columns(rows, inverse_indices, topk_weights, out, words, hidden_words, topk):
    word = cuda.grid(1)
    if word < words:
        token = word // hidden_words
        low, high = float32(0), float32(0)
        for k in range(topk):
            row, weight = inverse_indices[token * topk + k], topk_weights[token * topk + k]
            if row >= 0:
                pair = uint32(rows[row * hidden_words + word % hidden_words])
                low = cuda.fma(weight, uint_as_float(uint32(pair << uint32(16))), low)
                high = cuda.fma(weight, uint_as_float(uint32(pair & uint32(0xFFFF0000))), high)
        out[word] = int32(cvt_rn_bf16x2_f32(high, low))


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


def sum_by_words():
    words = SUM.numel() // 2
    arguments = ROWS.view(torch.int32), INVERSE, SHARES, SUM.view(torch.int32), words, S_HIDDEN // 2, S_TOPK
    launch(two_columns, -(-words // 128), 128, *arguments)
    return SUM


R_BYTES = 4096 * 8 * 2048 * 2  # of the recorded times
SUM_BOUND = R_BYTES * 9 / 8 / LIMITS.copy_bandwidth * 1e6  # with the output
sum_ladder = Ladder(
    "moe_layer_sum_ladder",
    lambda out: mismatch(out, EXACT),
    title="The weighted sum: 4096 tokens, top-8, hidden 2048",
    reference_name="torch",
    config={"topk": S_TOPK, "hidden": S_HIDDEN},
    size={"tokens": S_TOKENS},
)
sum_ladder.step("torch", sum_in_torch, dtype="bf16")
SUM.fill_(float("nan"))
gain_us = 6 * R_BYTES / LIMITS.copy_bandwidth * 1e6
sum_ladder.step("two columns", sum_by_words, after="torch", predicted_gain_us=gain_us, dtype="bf16")

# %% [markdown]
# **The package.** `weighted_sum` computes eight columns per thread, with 16-byte loads, and loads the rows of all k before
# it adds the first, so that more bytes are in flight. **Predicted gain.** `t - 9/8 R / B`: it reaches the bandwidth `B` of a
# copy.

# %%
call = lambda: moe_numba.weighted_sum(ROWS, INVERSE, SHARES, out=SUM)
SUM.fill_(float("nan"))
gain_us = (sum_ladder.median_us("two columns") or SUM_BOUND) - SUM_BOUND
sum_ladder.step("final", call, after="two columns", predicted_gain_us=gain_us, dtype="bf16", floor_us=SUM_BOUND)
assert torch.equal(sum_by_words().clone(), call()), "both kernels add in the same order"

# %% [markdown]
# **Explanation.** A copy of the rows bounds what any of these can reach, and a reduction alone shows what the gather and the
# product cost in torch:

# %%
wide = ROWS.view(S_TOKENS, S_TOPK, S_HIDDEN)
copies = sum_ladder.times("parts", {"copy": lambda: torch.add(ROWS, 1), "reduction": lambda: wide.sum(1)})
sum_ladder.measure_all()
sum_ladder.save(notebook_sources("notebooks/11_moe_layer.py"))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Torch takes {torch:.0f} us, of which a reduction of the rows is {reduction:.0f} us. Two columns per thread take "
    "{two:.1f} us, eight {final:.1f} us. Reading and writing as many bytes as the rows have takes {copy:.1f} us; the sum "
    "reads them and writes an eighth.",
    torch=sum_ladder.median_us("torch"),
    reduction=copies and copies["reduction"],
    copy=copies and copies["copy"],
    two=sum_ladder.median_us("two columns"),
    final=sum_ladder.median_us("final"),
)

# %% [markdown]
# In a fixed order, and with GEMMs that compute each row on its own, a token's result depends neither on the run nor on its
# place in the batch:

# %%
order = torch.randperm(TOKENS, device=DEVICE)
whole = fused_experts(*GIVEN)
assert torch.equal(fused_experts(x[order], w13, w2, topk_weights[order], topk_ids[order]), whole[order])
assert all(torch.equal(fused_experts(*GIVEN), whole) for _ in range(3))
print("the same bits in four runs, and in another order of the tokens")

# %% [markdown]
# ## 7. Where the time goes
#
# Each launch alone in a CUDA graph, one call, and the lower bound of section 3:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
NOT_RECORDED = "not recorded yet: `python -m moe_numba bench moe_layer` measures it"


def draw_parts(title, *models):
    """Draw the recorded launches at 1, 64 and 4096 tokens, or print that there are none."""
    if not (groups := parts_of(RECORD, models, (1, 64, 4096)) if RECORD else {}):
        return print(NOT_RECORDED)
    return stacked_parts(groups, title=f"{title}: time of each launch", caption=plots.caption(RECORD), colours=EXPERTS)


draw_parts(f"{QWEN}'s experts, bf16", QWEN)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
draw_parts(f"{DEEPSEEK}'s experts, FP8", DEEPSEEK, f"{DEEPSEEK}, 1 of 8 GPUs")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
heads = "experts", "tokens", "one call", "sum of launches", "both GEMMs", "lower bound", "call / bound", "limit"
lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 6 + "---|"]
for model, tokens, steps in bench.layers(RECORD) if RECORD else ():
    median = {step: row["kernel_us"]["median"] for step, row in steps.items()}
    launches = sum(us for step, us in median.items() if step.startswith("part: "))
    times = median[bench.OURS], launches, median[bench.GEMMS], steps[bench.OURS]["floor_us"]
    cells = [*map(records.format_us, times), f"{times[0] / times[-1]:.2f}", limit_of(LAYERS[model], tokens)]
    lines.append(f"| {model} | {tokens} | {' | '.join(cells)} |")
Markdown("\n".join([*lines, "", f"Microseconds, {plots.caption(RECORD)}."]) if RECORD else NOT_RECORDED)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def besides_gemms(model, tokens):
    """Return the share of one call that is not its two GEMMs, in percent, or None."""
    us = recorded("final", model, tokens)
    return us and 100 * (1 - recorded("both GEMMs", model, tokens) / us)


say(
    "In decode the limit is memory bandwidth. All launches besides the GEMMs are {few:.1f} % of one call of "
    + QWEN
    + " with 64 "
    "tokens, so only GEMMs that read weights faster, or fewer bytes per weight, would make the layer much faster. With 4096 "
    "tokens the limit is tensor cores, and the other launches are {many:.0f} %: permuting, activating and summing move `topk` "
    "rows per token through memory. Doing that inside the GEMMs would save those passes. DeepSeek-V3's FP8 GEMMs are further "
    "from the bound, because CUDA cores scale each product of 128 elements ([notebook 06](06_grouped_gemm.ipynb), section 8).",
    few=besides_gemms(QWEN, 64),
    many=besides_gemms(QWEN, 4096),
)

# %% [markdown]
# The launches of one call for a single token on a time axis, as torch's profiler saw them without a CUDA graph. The loop
# launches several kernels per expert and waits in between.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
rows = {name: layer_ladder.row(name) or {} for name in ("torch loop", "with group_by_expert", "final")}
timelines = {name: row["timeline"] for name, row in rows.items() if row.get("timeline")}
title = f"Kernels of one call for 1 token: {QWEN}'s experts"
launch_timeline(timelines, title) if timelines else print("no kernels of a call are recorded yet")

# %% [markdown]
# ## 8. Expert parallel
#
# With several GPUs each **rank** holds a part of the experts. A token is sent once to each rank that has one of its experts
# ([07](07_dispatch_layout.ipynb), [08](08_ring_buffer_dispatch.ipynb)), that rank computes the weighted sum of its experts,
# and combine adds the ranks' sums in the order of the ranks ([09](09_combine.ipynb)).

# %%
torch.manual_seed(7)
draw_layout.problem([torch.rand(3, 4).topk(2).indices for _ in range(2)], num_experts=4)

# %% [markdown]
# `ExpertParallelMoE` is that sequence. Ids on the receiving rank are local, and -1 where another rank computes, which
# `group_by_expert` gives no row. Two virtual ranks in the simulator, against one GPU with all experts:


# %%
def run_two_ranks(shift):
    """Return what is wrong with each rank's result; with ``shift`` 1 each rank holds the other rank's experts."""
    random = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(shape, generator=random)
    first_gemm, second_gemm = (normal(4, 256, 128) / 11).bfloat16(), (normal(4, 128, 128) / 11).bfloat16()
    tokens = [(normal(3, 128).bfloat16(), normal(3, 2).abs(), normal(3, 4).topk(2).indices) for _ in range(2)]

    def work(rank):
        first = 2 * ((rank.rank + shift) % 2)
        local = Experts(2, 128, 128)
        local.load_state_dict({"w13": first_gemm[first : first + 2], "w2": second_gemm[first : first + 2]})
        buffer = Buffer(rank, 1 << 22)
        layer = ExpertParallelMoE(buffer, local, num_worst_tokens=6)  # the host does not wait for counts
        result = layer(*tokens[rank.rank])
        buffer.destroy()
        return result

    wanted = [reference.fused_experts(rows, first_gemm, second_gemm, *routing) for rows, *routing in tokens]
    return [mismatch(out, right, 1e-2) for out, right in zip(LocalGroup(2).run(work), wanted, strict=True)]


found = in_simulator(run_two_ranks, 0)
print("ranks 0 and 1:", found)
assert found == [None, None]
assert all(in_simulator(run_two_ranks, 1)), "the check accepts another rank's experts"

# %% [markdown]
# **Exercise 3.** A token with topk experts reaches fewer ranks if several of them are on one rank. With distinct experts
# chosen at random, how many ranks does a token reach on average?


# %%
ranks_reached = ...  # your answer: lambda num_experts, topk, ranks: ... (ranks divides num_experts)
exercise("moe_layer-3").check(ranks_reached)

# %% [markdown]
# ## 9. A model of transformers
#
# `moe_numba.integrations.transformers.register()` makes `fused_experts` known to transformers 5. One more line selects it,
# and `fuse_routers` replaces the routers by the gate's kernel. A tiny Qwen3-MoE model with random weights, before and after:


# %%
def generate_before_and_after():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from moe_numba.integrations.transformers import fuse_routers, register

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=64, moe_intermediate_size=64, head_dim=32)
    counts = dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_experts=8)
    tokens = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0, num_experts_per_tok=2)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **counts, **tokens)).bfloat16().eval().to(DEVICE)
    for parameter in model.parameters():  # larger than by default, so that the tokens differ from one another
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    prompt = torch.arange(5, device=DEVICE).view(1, 5)
    logits, generated = {}, {}
    for implementation in ("eager", "moe_numba"):
        register()
        model.set_experts_implementation(implementation)
        if implementation == "moe_numba":
            print("fused routers:", fuse_routers(model))
        with torch.no_grad():
            logits[implementation] = model(prompt).logits.double()
        generated[implementation] = model.generate(prompt, max_new_tokens=3, do_sample=False)[0, 5:].tolist()
    difference = (logits["moe_numba"] - logits["eager"]).norm() / logits["eager"].norm()
    return generated, float(difference)


try:
    generated, difference = generate_before_and_after()
    print(f"tokens: {generated}; relative difference of the logits: {difference:.4f}")
    assert difference < 0.02
except ImportError as error:
    print(f"transformers 5 is not installed ({error}): pip install 'moe_numba[transformers]'")

# %% [markdown]
# The logits differ by roundings: eager rounds each expert's weighted row to bfloat16 before it adds it. Models whose layout
# the kernels do not support, such as gpt-oss with its biases and interleaved weights, are refused with a sentence.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
MODELS = records.recorded("models")


def pass_us(step, tokens):
    """Return the recorded time of a forward pass of Qwen3-30B-A3B's width in a CUDA graph, or None."""
    row = MODELS and records.find(MODELS, step=step, config={"model": QWEN}, size={"tokens": tokens})
    return row and row["kernel_us"]["median"]


say(
    "At the real width of {model}, with {layers} layers and random weights, a forward pass takes {after:.0f} us instead of "
    "{before:.0f} for 1 token, and {after_many:.0f} instead of {before_many:.0f} us for 4096 (in a CUDA graph; before: "
    "transformers' `grouped_mm`, after: experts and routers of this package; recorded on {gpu}).",
    model=QWEN,
    layers=MODELS and records.find(MODELS, config={"model": QWEN})["config"]["layers"],
    before=pass_us("peer:transformers grouped_mm", 1),
    after=pass_us("final, fused routers", 1),
    before_many=pass_us("peer:transformers grouped_mm", 4096),
    after_many=pass_us("final, fused routers", 4096),
    gpu=MODELS and MODELS["gpu"],
)

# %% [markdown]
# ## 10. What 64 GPUs would change
#
# Nothing here is measured. This is a model of one DeepSeek-V3 layer, with these assumptions: nodes of 8 GPUs; data-sheet
# rates of an H200; NVLink and network bandwidth as below, per GPU and direction; uniform routing; a row crosses the network
# once per node and is forwarded over NVLink; FP8 dispatch, bfloat16 combine; every stage at its bound; transfers do not
# overlap with GEMMs.

# %%
NVLINK, NETWORK, NODE = 450e9, 50e9, 8  # bytes per second, GPUs
E, TOPK, HIDDEN, WIDE, MOE_LAYERS = 256, 8, 7168, 2048, 58
W = 3 * HIDDEN * WIDE  # weights of an expert, bytes in FP8


def layer_times(gpus, tokens):
    """Return {part: us} of a layer with ``tokens`` tokens on each GPU."""
    nodes = max(gpus // NODE, 1)
    used = E // gpus * (1 - (1 - TOPK / E) ** (tokens * gpus))
    near = tokens * ranks_per_token(E, TOPK, gpus) * (gpus - nodes) / gpus  # rows that cross NVLink
    far = tokens * ranks_per_token(E, TOPK, nodes) * (nodes - 1) / nodes  # rows that cross the network
    seconds_per_byte = max(near / NVLINK, far / NETWORK)
    seconds = {
        "read weights": used * W / H200.hbm_bandwidth,
        "compute": 2 * TOPK * tokens * W / H200.tensor_flops["float8_e4m3fn"],
        "dispatch": seconds_per_byte * (HIDDEN + HIDDEN / 128 * 4),  # a float32 scale per 128 elements
        "combine": seconds_per_byte * 2 * HIDDEN,
    }
    return {name: 1e6 * value for name, value in seconds.items()}


def total_us(gpus, tokens):
    parts = layer_times(gpus, tokens)
    return max(parts["read weights"], parts["compute"]) + parts["dispatch"] + parts["combine"]


heads = "GPUs, tokens on each", "weights on each, GB", "rows per expert", *layer_times(1, 1), "us per token"
lines = [f"| {' | '.join(heads)} |", "|---|" + "---:|" * 7]
for tokens in (64, 4096):
    for gpus in (1, 8, 64):
        parts, gigabytes = layer_times(gpus, tokens), MOE_LAYERS * E // gpus * W / 1e9
        cells = [f"{gigabytes:.0f}", f"{tokens * gpus * TOPK / E:.0f}", *(f"{us:.0f}" for us in parts.values())]
        lines.append(f"| {gpus}, {tokens} | {' | '.join(cells)} | {total_us(gpus, tokens) / tokens:.2f} |")
Markdown("\n".join([*lines, "", f"Parts in microseconds per layer; weights of the experts of {MOE_LAYERS} layers."]))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
sent = {n: layer_times(64, n)["dispatch"] + layer_times(64, n)["combine"] for n in (64, 4096)}
say(
    "With 64 tokens on each GPU, each of 64 GPUs reads {less:.0f} times fewer bytes than each of 8, because it holds {local} "
    "experts instead of {node}. Per token, a layer takes {few:.1f} times less time. The network is now the limit: dispatch "
    "and combine are {share:.0f} % of the layer. With 4096 tokens tensor cores are the limit already, so reading less gains "
    "nothing: dispatch and combine take {ratio:.1f} times as long as the GEMMs, and hiding them behind GEMMs can at best leave "
    "the longer of the two. A token reaches {nodes:.1f} of 8 nodes on average; DeepSeek-V3's gate limits it to 4, which "
    "shortens the transfers.",
    less=layer_times(8, 64)["read weights"] / layer_times(64, 64)["read weights"],
    local=E // 64,
    node=E // 8,
    few=total_us(8, 64) / total_us(64, 64),
    share=100 * sent[64] / total_us(64, 64),
    ratio=sent[4096] / layer_times(64, 4096)["compute"],
    nodes=ranks_per_token(E, TOPK, 8),
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
