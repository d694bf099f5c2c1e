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
# # Block scales and 4-bit weights
#
# [Notebook 07](07_grouped_gemm.ipynb) builds a grouped GEMM in FP8 with one scale per group. Checkpoints have finer
# formats: DeepSeek-V3 stores FP8 weights with a scale per 128 x 128 block, and gpt-oss stores MXFP4, 4-bit weights with
# a scale per 32 elements. This notebook builds the package's kernel for each of them. Notebooks
# [06](06_hopper_gemm.ipynb) and [07](07_grouped_gemm.ipynb) explain the pipeline of TMA, mbarriers and wgmma,
# [notebook 00](00_start_here.ipynb) the simulator.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
from functools import partial
from statistics import median
from textwrap import dedent
from types import SimpleNamespace

import torch
from IPython.display import Markdown, display

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.topics.grouped_gemm import show as topic
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.grouped_gemm_scales import diagnoses, draw
from moe_numba.course.lessons.grouped_gemm_scales import kernel as kernel_in_parts
from moe_numba.course.lessons.grouped_gemm_scales import mxfp4_steps as mxfp4
from moe_numba.course.lessons.grouped_gemm_scales import parts as block_scale_parts
from moe_numba.course.lessons.grouped_gemm_scales import steps as scales
from moe_numba.course.lessons.grouped_gemm_scales.tile_traces import dram_bytes, l2_to_sm_bytes, lags, tiles_of
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.source_diff import change
from moe_numba.expert_parallel.ranks.compile_ahead import compile_ahead
from moe_numba.grouped_gemm import group_gemm_bf16, group_gemm_blockwise_fp8, group_gemm_mxfp4, pack_mxfp4, reference
from moe_numba.grouped_gemm.block_scaled import pairs as scheduler_pairs
from moe_numba.grouped_gemm.call.heuristics import measured_config
from moe_numba.grouped_gemm.call.plan import group_gemm
from moe_numba.grouped_gemm.w4 import kernel as w4_kernel
from moe_numba.grouped_gemm.w4 import packing as packing_mxfp4
from moe_numba.grouped_gemm.wgmma import kernel
from moe_numba.grouped_gemm.wgmma.config import GemmConfig
from moe_numba.runtime.changed_source import source_of

# %% jupyter={"source_hidden": true} tags=["hide-input"]
SIMULATED = simulator.ENABLED
DEVICE, LIMITS, BF16 = "cpu" if SIMULATED else "cuda", chip_limits(), torch.bfloat16
GPUS = "h200", "h100-80gb-hbm3"  # folders of records, the first one that has what is asked for


def recorded_gpu(name, **wanted):
    """Return the folder of the first record that has such a row, or that of an H200."""
    found = {gpu: records.recorded(name, gpu) for gpu in GPUS}
    return next((gpu for gpu, record in found.items() if record and records.find(record, **wanted)), GPUS[0])


RECORD = records.recorded("grouped_gemm", recorded_gpu("grouped_gemm", config={"scaling": "mxfp4"}))


def recorded_us(step, scaling, rows):
    """Return a recorded median of 32 groups, 4096 x 7168, rows drawn evenly; None if there is none."""
    config = topic.row_config("gate_up", scaling)
    row = RECORD and records.find(RECORD, step=step, config=config, size={"rows": rows})
    return row["kernel_us"]["median"] if row else None


# %% jupyter={"source_hidden": true} tags=["hide-input"]
PEER_NAMES = {f"peer:deepgemm-{layout}": f"DeepGEMM ({layout} layout)" for layout in ("masked", "contiguous")}
PEERS = {us: name for name in records.peers(RECORD) if (us := recorded_us(name, "block", 8192))} if RECORD else {}
PEER_US, BLOCK_US = min(PEERS, default=None), recorded_us("final", "block", 8192)
say(
    "**Result.** 32 groups, 4096 x 7168, kernel times recorded on {gpu} at commit {commit}. Block scales, 8192 rows: {block:.0f} us; "
    "with one scale per group {tensor:.0f} us. The fastest of the other implementations in the record, {name}, takes {peer:.0f} us with "
    "block scales, {less:.1%} less. MXFP4 weights, 128 rows: {four:.0f} us, where FP8 weights take {eight:.0f} us.",
    gpu=RECORD and RECORD["gpu"].replace("NVIDIA", "an NVIDIA"),
    commit=RECORD and RECORD["commit"][:7],
    block=BLOCK_US,
    tensor=recorded_us("final", "tensor", 8192),
    name=PEER_NAMES.get(PEERS.get(PEER_US), PEERS.get(PEER_US)),
    peer=PEER_US,
    less=1 - PEER_US / BLOCK_US if PEER_US and BLOCK_US else None,
    four=recorded_us("final", "mxfp4", 128),
    eight=recorded_us("final", "tensor", 128),
)

# %% [markdown]
# ## 1. Block scales: the problem
#
# `x` and `weight` are FP8. Each row of `x` has a scale for every 128 elements of k (a **k-block**), and each block of
# 128 rows of weight by 128 elements of k has a scale. The result is a sum of scaled partial sums:
#
# `y[i, j] = sum over k-blocks b of x_scale[i, b] * w_scale[j // 128, b] * (x[i, b] . weight[j, b])`
#
# Tensor cores compute the partial sum of a k-block. CUDA cores multiply each element by the product of two scales, its
# **factor**, and add it to an accumulator in registers (**promotion**).

# %%
GROUPS, N, K = (2, 256, 512) if SIMULATED else (32, 4096, 7168)
LENGTHS = torch.tensor([150, 20]).int() if SIMULATED else topic.random_lengths(32, 8192)
EVEN_LENGTHS = torch.full_like(LENGTHS, int(LENGTHS.sum()) // GROUPS)
WEIGHT = topic.random_weight(GROUPS, N, K, device=DEVICE)


def problem(lengths):
    """Make random rows, and random block scales for x and the weights."""
    made = topic.make_problem(WEIGHT, lengths)
    topic.add_block_scales([made])
    return made


P, EVEN = problem(LENGTHS), problem(EVEN_LENGTHS)
TIMED, TIMED_ROWS = topic.SHAPES["gate_up"], topic.random_lengths(32, 8192).tolist()  # of all times below
print(f"timed: {sum(TIMED_ROWS)} rows in 32 groups of {min(TIMED_ROWS)} to {max(TIMED_ROWS)} rows, {TIMED}")
print(f"here: {len(P.x)} rows in {GROUPS} groups, {dict(n=N, k=K)}")

# %% [markdown]
# From step 2 on, a step is the package's kernel divided into functions
# ([`kernel.py`](../moe_numba/course/lessons/grouped_gemm_scales/kernel.py)), some replaced by earlier versions
# ([`parts.py`](../moe_numba/course/lessons/grouped_gemm_scales/parts.py)). `VARIANTS` lists these steps, and kernels that
# leave something out to explain a time.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
NO_MULTIPLY = {"make_multiply": diagnoses.make_multiply_nothing}
NO_LOADS = {"make_tma_producer": diagnoses.make_tma_producer_without_loads}
TRACED = {"make_consumer": diagnoses.make_traced_consumer}
CHANGES = {  # name -> step, and functions exchanged further
    "loads of 128 columns": ("scales per row", NO_MULTIPLY),
    "loads of 192 columns": ("192 columns", NO_MULTIPLY),
    "without loads": ("192 columns", NO_LOADS),
    "traced": ("192 columns", TRACED),
    "loads of pairs": ("pairs of tiles", NO_MULTIPLY),
    "traced pairs": ("pairs of tiles", TRACED),
    "rows exchanged": ("pairs of tiles", {"make_multiply": diagnoses.make_multiply_exchanging_rows}),
    "no scale loads": ("pairs of tiles", {"make_aux_producer": diagnoses.make_scales_without_loads}),
    "four stages, no loads": ("scales of four stages", {"make_aux_producer": block_scale_parts.make_ones_by_four}),
    "scales loaded once": ("scales of four stages", {"make_multiply": diagnoses.make_multiply_loading_once}),
    "tested late, no loads": ("factors by producers", NO_LOADS),
    "tested early, no loads": ("barrier tested early", NO_LOADS),
    "traced early": ("barrier tested early", TRACED),
    "traced look-up": ("look-up ahead", TRACED),
    "no store": ("look-up ahead", {"make_store": diagnoses.make_store_nothing}),
}
VARIANTS = scales.KERNELS | {
    name: (scales.STEPS[step][0], scales.STEPS[step][1] | parts) for name, (step, parts) in CHANGES.items()
}
STORE_CONFIG = VARIANTS["TMA store"][0]
VARIANTS["four stages, stores by lanes"] = STORE_CONFIG, scales.BY_LANES
VARIANTS["weights not kept"] = STORE_CONFIG._replace(keep_weight=False), {}
FEW_AVERAGE, MANY_AVERAGE = 4, 64  # rows per group of the second ladder
FOUR_TILE = measured_config("mxfp4", 4096, 7168, 32, FEW_AVERAGE)  # of the package
if not SIMULATED:
    definitions = [scales.definition(*variant) for variant in VARIANTS.values()]
    definitions += [mxfp4.definition(rows, parts) for rows in (FEW_AVERAGE, MANY_AVERAGE) for parts in mxfp4.PARTS]
    definitions.append(mxfp4.definition(FEW_AVERAGE, "shift and mask", FOUR_TILE))
    print(compile_ahead(definitions), "kernels")
LAUNCHES = {name: scales.StepLaunch(config, P, **parts) for name, (config, parts) in VARIANTS.items()}

# %% [markdown]
# ### Step 0: torch
#
# The definition, in float32.
#
# All times are kernel times of launches in a CUDA graph; a second number is the call time, measured on the host. A
# step's line has both kernels interleaved, the predicted time, the measured one and a verdict: "within a third" of the
# saving and of what remains, "within the noise" (both changes are below 1/50 of the time), "not there" (a gain was
# predicted, the measured change is below 1/50), "overestimated", "underestimated" or "wrong sign".
#
# The GPU runs at its power limit: a kernel is faster if lighter kernels run in between. So compare numbers of one line
# or table only; section 2 ends with the spread between lines. The predictions of steps 3, 8 and 10 use times of earlier
# lines, which adds this spread to their error. Kernels that leave out loads or wgmma also draw less power and may run
# at a higher clock: their times are estimates.


# %%
def bounds_of(lengths):
    ends = lengths.cumsum(0).tolist()
    return list(zip([0, *ends], ends))


def block_scales_in_torch(p):
    for g, (start, end) in enumerate(bounds_of(LENGTHS)):
        x = p.x[start:end].float().unflatten(1, (-1, 128)) * p.x_scale[start:end, :, None]
        weight = p.weight[g].float().unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        weight = (weight * p.w_scale[g][:, None, :, None]).flatten(2).flatten(0, 1)
        p.out[start:end] = x.flatten(1) @ weight.T
    return p.out


# %% jupyter={"source_hidden": true} tags=["hide-input"]
FLOOR_US, BYTES, FLOPS = topic.lower_bound(torch.tensor(TIMED_ROWS), **TIMED)
RIGHT = topic.expected_output(P, "block")  # float64
ladder = Ladder(
    "grouped_gemm_block_scales_ladder",
    lambda y: reference.mismatch(y, RIGHT),
    title="Grouped GEMM with block scales: 32 groups, 4096 x 7168, 8192 rows",
    reference_name="torch",
    config={"num_groups": GROUPS, "n": N, "k": K, "scaling": "block"},
    size={"rows": len(P.x)},
    gpu=recorded_gpu("grouped_gemm_block_scales_ladder"),
)
STEPS = {}  # name -> launch(problem)


def step(name, launch, after=None, **options):
    STEPS[name] = launch
    if after in VARIANTS and name in VARIANTS and VARIANTS[after][0] != VARIANTS[name][0]:
        print("configuration:", scales.changed_fields(VARIANTS[after][0], VARIANTS[name][0]))
    P.out.fill_(float("nan"))  # elements that the kernel does not write are found
    options |= dict(dtype="e4m3", floor_us=FLOOR_US, bytes=BYTES, flops=FLOPS)
    ladder.step(name, partial(launch, P), after=after, **options)


def times(name, launches, p=P, ladder=ladder):
    """Time launches that explain a step; return {label: us}, or None if nothing is timed or recorded."""
    found = ladder.times(name, {label: partial(launch, p) for label, launch in launches.items()}) or {}
    if not launches.keys() <= found.keys():
        return print("no times are recorded")
    print(", ".join(f"{label}: {found[label]:.1f} us" for label in launches))
    return {label: found[label] for label in launches}


step("torch", block_scales_in_torch, slow=True)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "**Lower bound.** To read weights and x once and to write y takes {read:.0f} us, to compute {compute:.0f} us "
    "(peak rates; {source}). The bound of the ladder is the larger one, {bound:.0f} us.",
    read=BYTES / LIMITS.hbm_bandwidth * 1e6,
    compute=FLOPS / LIMITS.tensor_flops["float8_e4m3fn"] * 1e6,
    source=LIMITS.source,
    bound=FLOOR_US,
)

# %% [markdown]
# ## 2. Block scales: the ladder
#
# ### Step 1: a scale per column
#
# The kernel of notebook 07 computes the transposed product: rows of weight are wgmma's M, rows of x its N. A tile has
# 128 of each. A stage in shared memory has 128 bytes of k of these rows, and the factors of its k-block. Beside the
# thread that issues TMA loads, three **auxiliary warps** of the producer warpgroup load scales and write factors, each
# for every third stage: a warp waits until `empty` shows that the consumers have read the stage, writes, and arrives on
# `full`, which also counts the bytes of TMA. The figure shows which factors one consumer thread reads, for 24 of the
# 128 columns.

# %%
draw.factors(lane=5)

# %%
PER_COLUMN = GemmConfig(scaling="block", subtile_m=128, mma_n=(128, 96, 64), stages=6)


def multiply(p, scaling, **options):
    given = dict(x=p.x, weight=p.weight, seqlens=p.seqlens, cu_seqlens=p.cu_seqlens, out=p.out)
    return group_gemm(scaling, given, num_seq_per_group_avg=p.average, **options)


def per_column(p):
    return multiply(p, "block", x_scale=p.x_scale, w_scale=p.w_scale, config=PER_COLUMN)


step("scales per column", per_column)

# %% [markdown]
# ### Step 2: a scale per row
#
# **Bottleneck.** The same kernel with the same tile and one scale per group, which it applies in the epilogue:


# %%
def one_scale(p):
    return multiply(p, "tensor", y_scale=p.y_scale, config=PER_COLUMN._replace(scaling="tensor"))


COLUMN_TIMES = times("bottleneck of columns", {"scales per column": per_column, "one scale": one_scale})

# %% [markdown]
# The difference is about the cost of the scales. A thread accumulates 2 rows and 32 columns of a 64 x 128 product, so
# it loads 32 factors from shared memory per k-block, 128 bytes.
#
# **Idea.** Make the rows of x the rows of wgmma, as DeepGEMM does (right side of the figure). A thread then needs two
# scales of x, and one of weight, because 128 rows of weight share it. The auxiliary warps write scales without
# multiplying them.
#
# **Predicted gain.** The cost of the scales, in proportion to the bytes that a thread loads: 2 x 4 for x and 16 for
# weight (a vector of three scales, for the wider tile of step 3) instead of 128.

# %%
gain_us = (COLUMN_TIMES["scales per column"] - COLUMN_TIMES["one scale"]) * (1 - 24 / 128) if COLUMN_TIMES else 0
per_row = LAUNCHES["scales per row"]
step("scales per row", per_row, after="scales per column", predicted_gain_us=gain_us)

# %% [markdown]
# **Change.** Step 1 multiplies a stage as in the first function. The second is the main loop of a consumer warpgroup
# from now on: `a` and `b` are the factors of the thread's two rows, for up to three blocks of columns.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
START = "        @cuda.jit(device=True)\n        def multiply_stage("
OLD = START + source_of(kernel.make_kernel).split(START)[1].split("\n        @cuda.jit")[0]
Markdown(f"```python\n{dedent(OLD)}```\n```python\n{source_of(block_scale_parts.make_multiply_by_scales)}```")

# %% [markdown]
# **Explanation.** Step 1 splits the rows of a group evenly over its tiles, and wgmma's N can be 64 or 96 for smaller
# ones: that is the advantage of the transposed product (notebook 07, step 6). Step 2 gives it up: in many groups the
# last tile has few rows, and loads as many weights as a full one. With equal groups all tiles are full, which shortens
# all three kernels:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
EVEN_STEPS = {"scales per column": per_column, "one scale": one_scale, "scales per row": per_row}
EVEN_TIMES = times("even rows", EVEN_STEPS, EVEN) or {}
COLUMN_US, ONE_US, ROW_US = (EVEN_TIMES.get(name) for name in EVEN_STEPS)
say(
    "With {rows} rows in every group the same model predicts a gain of {predicted:.0f} us, and {measured:.0f} us are measured. A thread now "
    "loads its scales before the wgmma of a stage, and no longer while it runs; step 6 looks at that.",
    rows=sum(TIMED_ROWS) // len(TIMED_ROWS),
    predicted=COLUMN_US and (COLUMN_US - ONE_US) * (1 - 24 / 128),
    measured=COLUMN_US and COLUMN_US - ROW_US,
)

# %% [markdown]
# **Exercise 1.** How many scales does a thread need for the accumulators of a 64 x n product? Count one of weight for
# every 64 columns: a tile may begin in the middle of a scale block.

# %%
scales_of_thread = ...  # your answer: lambda n, x_is_rows: ... (n is a multiple of 64)
exercise("grouped_gemm_scales-1").check(scales_of_thread)

# %% [markdown]
# ### Step 3: 192 columns
#
# **Bottleneck.** The same kernel without wgmma and promotion: consumers only wait for a stage and release it.

# %%
loads_128 = LAUNCHES["loads of 128 columns"]
LOADS_128 = times("loads of 128 columns", {"scales per row": per_row, "loads alone": loads_128})

# %% [markdown]
# **Idea.** A larger tile loads fewer bytes per element of y. With few scales per thread, registers are left for a
# product of 64 x 192: 96 for accumulators and 96 for wgmma's result. A thread needs three scales of weight, one for
# each 64 columns.
#
# **Predicted gain.** The time of loads alone, times the share of bytes that L2 no longer sends to the SMs.

# %%
L2_BYTES = {columns: l2_to_sm_bytes(TIMED_ROWS, **TIMED, columns=columns) for columns in (128, 192)}
print(", ".join(f"{columns} columns: {count / 1e9:.2f} GB" for columns, count in L2_BYTES.items()))
columns_192 = LAUNCHES["192 columns"]
gain_us = LOADS_128["loads alone"] * (1 - L2_BYTES[192] / L2_BYTES[128]) if LOADS_128 else 0
step("192 columns", columns_192, after="scales per row", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** Loads alone with both tiles:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
loads_192 = LAUNCHES["loads of 192 columns"]
LOADS = times("loads of both tiles", {"128 columns": loads_128, "192 columns": loads_192}) or {}
say(
    "Loads alone take {less:.0%} less time, for {bytes:.0%} fewer bytes from L2. These bytes may limit the loads, though a wider tile also "
    "needs fewer stages in all; step 4 looks at another limit, the time at which CTAs load them.",
    less=1 - LOADS["192 columns"] / LOADS["128 columns"] if LOADS else None,
    bytes=1 - L2_BYTES[192] / L2_BYTES[128],
)

# %% [markdown]
# **Exercise 2.** How many bytes does L2 send to the SMs for an element of y and a k-block, with tiles of `rows` x
# `columns`, if clusters of `ctas` CTAs share the weights of a tile?

# %%
bytes_from_l2 = ...  # your answer: lambda rows, columns, ctas: ...
exercise("grouped_gemm_scales-2").check(bytes_from_l2)

# %% [markdown]
# ### Step 4: pairs of tiles share weights
#
# **Bottleneck.** Loads alone, and the kernel without loads, whose producer only signals that a stage is full:

# %%
compute_192 = LAUNCHES["without loads"]
PARTS = times("parts", {"192 columns": columns_192, "loads alone": loads_192, "without loads": compute_192}) or {}
if PARTS and PARTS["without loads"] > PARTS["192 columns"]:
    print("a part takes longer than the whole: probably it runs at a lower clock (end of this section)")

# %% [markdown]
# The longer one is the limit: on an H200 computing, on an H100 the loads (end of this step). To find what the loads
# wait for, a variant of the kernel records when each tile is computed. CTAs that compute tiles with the same weights
# begin together, but tiles of a group's last rows take less time, so CTAs **drift** apart: later, tiles with the same
# weights run at different times.


# %%
def traced(name, p=P):
    """Run a kernel that records its tiles, and return them."""
    launch = LAUNCHES[name]
    for _ in range(2):  # the first run also loads the instructions
        launch.trace.zero_()
        launch(p)
    return tiles_of(launch.trace, p.seqlens)


TILES = traced("traced")
draw.tile_times(TILES, 2 if SIMULATED else 12)

# %% [markdown]
# The **lag** of a block of weights is the time between the first and the last start of the tiles that read it. A model
# of L2 replays the trace with LRU eviction; a tile's reads are spread evenly over its duration.

# %%
L2 = 1 << 18 if SIMULATED else torch.cuda.get_device_properties(0).L2_cache_size


def describe(tiles):
    read, once = dram_bytes(tiles, 192, K, L2)
    return {"lag_us": median(lags(tiles) or [0]), "read_gb": read / 1e9, "once_gb": once / 1e9}


def keep(name, found):
    """Record what was found; if nothing is timed return what was recorded."""
    if ladder.untimed:
        return (ladder.record or {}).get("diagnosis", {}).get(name)
    ladder.diagnosis[name] = {key: round(value, 4) for key, value in found.items()}
    return found


DRIFT = keep("drift", describe(TILES))
EVEN_DRIFT = keep("drift, even rows", describe(traced("traced", EVEN)))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
DRIFTS = DRIFT or {}, EVEN_DRIFT or {}
say(
    "The median lag is {lag:.1f} us. In the model the kernel reads {read:.2f} GB from DRAM, where {once:.2f} GB suffice. With {rows} rows "
    "in every group the lag is {even_lag:.1f} us, and the model reads {even:.2f} GB.",
    rows=sum(TIMED_ROWS) // len(TIMED_ROWS),
    lag=DRIFTS[0].get("lag_us"),
    read=DRIFTS[0].get("read_gb"),
    once=DRIFTS[0].get("once_gb"),
    even_lag=DRIFTS[1].get("lag_us"),
    even=DRIFTS[1].get("read_gb"),
)

# %% [markdown]
# **Idea.** A cluster of two CTAs computes a pair of tiles with the same columns. Each CTA loads half of the weights of
# a stage and multicasts it into the shared memory of both. A stage is overwritten only when both CTAs have released it,
# so they cannot drift apart, and L2 sends the weights once instead of twice. If a group's last rows fit into one tile,
# the two CTAs compute neighbouring tiles of columns.

# %%
draw.pairs(rows=300, n_tiles=4)

# %% [markdown]
# **Change.** Apart from the multicast, only the scheduler and the release of a stage change: a consumer warp arrives at
# the empty barriers of both CTAs, because either may write the other's shared memory. `policy` is the L2 eviction
# policy of a load: `evict_last` for rows of x, and for weights if the configuration has `keep_weight`, else
# `evict_first`. `get_pair` looks up a CTA's tile of a pair
# ([`pairs.py`](../moe_numba/grouped_gemm/block_scaled/pairs.py)).

# %%
change(block_scale_parts.make_load_weight_of_one_cta, kernel_in_parts.make_load_weight)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
SHOWN = kernel.make_release_stage, scheduler_pairs.count_pairs, scheduler_pairs.make_look_up_tile
Markdown("```python\n" + "\n\n".join(map(source_of, SHOWN)) + "```")

# %% [markdown]
# **Predicted gain.** Loads alone shrink with the bytes from L2. The kernel gains as much as its limit, the longer of
# loads and computing, falls.

# %%
pairs = LAUNCHES["pairs of tiles"]
PAIR_BYTES = l2_to_sm_bytes(TIMED_ROWS, **TIMED, columns=192, cluster_size=2)
print(f"from L2: {L2_BYTES[192] / 1e9:.2f} GB without pairs, {PAIR_BYTES / 1e9:.2f} GB with pairs")
gain_us = 0
if PARTS:
    loads_us, compute_us = PARTS["loads alone"], PARTS["without loads"]
    gain_us = max(loads_us, compute_us) - max(loads_us * PAIR_BYTES / L2_BYTES[192], compute_us)
step("pairs of tiles", pairs, after="192 columns", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** Loads alone with and without pairs, and the trace of the new kernel:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PAIR_LOADS = {"loads alone": loads_192, "loads alone, pairs": LAUNCHES["loads of pairs"]}
PAIR_PARTS = times("loads of pairs", PAIR_LOADS) or {}
PAIR_DRIFT = keep("drift of pairs", describe(traced("traced pairs")))
say(
    "For {bytes:.0%} fewer bytes from L2, loads alone take {less:.0%} less time. The lag is now {lag:.1f} us, and the model reads {read:.2f} GB "
    "from DRAM ({before:.2f} before, {once:.2f} once).",
    bytes=1 - PAIR_BYTES / L2_BYTES[192],
    less=1 - PAIR_PARTS["loads alone, pairs"] / PAIR_PARTS["loads alone"] if PAIR_PARTS else None,
    lag=(PAIR_DRIFT or {}).get("lag_us"),
    read=(PAIR_DRIFT or {}).get("read_gb"),
    before=DRIFTS[0].get("read_gb"),
    once=DRIFTS[0].get("once_gb"),
)

# %% [markdown]
# With 192 columns the bytes from L2 hardly limit the loads. The drift is gone, but the kernel is not faster, because
# computing is the limit. Pairs gain where loads are the limit, as on an H100, which has the same SMs, but less DRAM
# bandwidth:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
H100 = records.recorded("grouped_gemm_block_scales_ladder", "h100-80gb-hbm3") or {"rows": [], "diagnosis": {}}
ON_H100 = next((row for row in H100["rows"] if row["step"] == "pairs of tiles"), {}).get("compared_us", [None] * 2)
say(
    "Recorded on an H100: loads alone take {loads:.0f} us and the kernel without loads {compute:.0f} us; with pairs the kernel takes "
    "{after:.0f} us, without {before:.0f} us.",
    loads=H100["diagnosis"].get("parts", {}).get("loads alone"),
    compute=H100["diagnosis"].get("parts", {}).get("without loads"),
    before=ON_H100[0],
    after=ON_H100[1],
)

# %% [markdown]
# ### Step 5: the scales of four stages at once
#
# **Bottleneck.** The same kernel with all scales set to 1 and not loaded from global memory:

# %%
no_scale_loads = LAUNCHES["no scale loads"]
SCALE_TIMES = times("scale loads", {"pairs of tiles": pairs, "no scale loads": no_scale_loads})

# %% [markdown]
# A hypothesis: the latency of the loads is hidden, and their cost is that they compete with wgmma operand reads and TMA
# writes for the L1/shared-memory data path. `x_scale` is row-major, so each lane touches a different 128-byte line, and
# each line costs one **wavefront**. Per tile and stage:

# %%
STAGE_CLOCKS = 2 * 128 * 128 * LIMITS.tensor_clock * LIMITS.sm_count / LIMITS.tensor_flops["float8_e4m3fn"]
for columns in (128, 192):
    operands = 2 * (64 + columns)  # of two warpgroups; a wavefront is 128 bytes, which is all of a row
    wavefronts = f"wavefronts: {operands} of wgmma, {columns + 128} of TMA, 128 of scales"
    print(f"{columns} columns: {columns * STAGE_CLOCKS:.0f} tensor core clocks; {wavefronts}")

# %% [markdown]
# **Idea.** The scales of a row are contiguous along k, so one load of 16 bytes fetches those of four stages, and
# touches as many lines as a load of 4 bytes. Two warps with 64 rows each suffice.
#
# **Predicted gain.** If wavefronts are the cost, three quarters of the difference above.

# %%
by_four = LAUNCHES["scales of four stages"]
gain_us = 0.75 * (SCALE_TIMES["pairs of tiles"] - SCALE_TIMES["no scale loads"]) if SCALE_TIMES else 0
step("scales of four stages", by_four, after="pairs of tiles", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(f"```python\n{source_of(block_scale_parts.make_scales_by_four)}```")

# %% [markdown]
# **Explanation.** A quarter of the wavefronts cost more than all of them before, so the hypothesis is wrong. Both
# steps, each with all scales set to 1:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FOUR = {"pairs of tiles": pairs, "no scale loads": no_scale_loads, "scales of four stages": by_four}
FOUR_TIMES = times("four stages", FOUR | {"four stages, no loads": LAUNCHES["four stages, no loads"]}) or {}
ONE_US, NO_LOADS_US, BY_FOUR_US, FOUR_NO_LOADS_US = FOUR_TIMES.values() if FOUR_TIMES else [None] * 4
say(
    "The loads cost {one:.1f} us in step 4 and {four:.1f} us here. {why}Without loads the step changes the time by {rest:+.1f} us. It "
    "stays as a part of step 6, which is compared with step 4 there.",
    one=ONE_US and ONE_US - NO_LOADS_US,
    four=ONE_US and BY_FOUR_US - FOUR_NO_LOADS_US,
    why="They have a quarter of the wavefronts, but a warp begins them only when it has written four stages, so perhaps less of their latency "
    "is hidden than with three warps, each of which loads three stages ahead. "
    if FOUR_TIMES and BY_FOUR_US - FOUR_NO_LOADS_US > ONE_US - NO_LOADS_US
    else "",
    rest=ONE_US and FOUR_NO_LOADS_US - NO_LOADS_US,
)

# %% [markdown]
# ### Step 6: factors by producers
#
# **Bottleneck.** Loading scales from shared memory into registers delays the first wgmma of each stage. A kernel that
# loads scales once per tile computes wrong results, but shows what this costs.

# %%
once = LAUNCHES["scales loaded once"]
SHARED_TIMES = times("scales to registers", {"scales of four stages": by_four, "scales loaded once": once})

# %%
NEW_REGISTERS = "make_multiply_halves=diagnoses.make_halves_in_new_registers"
COMPILED = {name: (name, "") for name in ("scales of four stages", "factors by producers", "256 columns, single")}
COMPILED["registers by the compiler"] = "256 columns, single", NEW_REGISTERS
LOOPS = {name: diagnoses.main_loop(code) for name, code in diagnoses.machine_code(COMPILED).items()}


def count(name, *opcodes):
    """Count instructions of a main loop; 0 without a disassembler."""
    return sum(op.split(".")[0] in opcodes for op in LOOPS[name] or [])


for name in ("scales of four stages", "factors by producers"):
    print(f"{name}: {count(name, 'LDS')} loads from shared memory, {count(name, 'FMUL')} multiplications")

# %% [markdown]
# **Idea.** The auxiliary warps are mostly idle. For each row of x and each block of columns they write the product of
# the two scales, so that a consumer thread reads the factors of a row with one load of 16 bytes and multiplies none.
#
# **Predicted gain.** The difference above, times the share of loads and multiplications that disappears.

# %%
display(change(block_scale_parts.make_multiply_by_scales, block_scale_parts.make_multiply_by_factors))
change(block_scale_parts.make_write_scales, kernel_in_parts.make_write_factors)

# %%
factors = LAUNCHES["factors by producers"]
BEFORE, AFTER = (count(name, "LDS", "FMUL") for name in ("scales of four stages", "factors by producers"))
SAVED = 1 - AFTER / BEFORE if BEFORE else 0
gain_us = SAVED * (SHARED_TIMES["scales of four stages"] - SHARED_TIMES["scales loaded once"]) if SHARED_TIMES else 0
step("factors by producers", factors, after="scales of four stages", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The gain of step 6 mostly recovers the loss of step 5. Both together:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FACTORS = {"pairs of tiles": pairs, "scales of four stages": by_four, "factors by producers": factors}
FACTOR_TIMES = times("factors", FACTORS | {"scales loaded once": once}) or {}
say(
    "Together they change the time of step 4 by {both:+.1f} us. {rest:.1f} us are left of what scales cost the consumers.",
    both=FACTOR_TIMES["factors by producers"] - FACTOR_TIMES["pairs of tiles"] if FACTOR_TIMES else None,
    rest=FACTOR_TIMES["factors by producers"] - FACTOR_TIMES["scales loaded once"] if FACTOR_TIMES else None,
)

# %% [markdown]
# ### Step 7: the next barrier is tested early
#
# **Bottleneck.** The kernel without loads against the clocks that the tensor cores need for all stages:

# %%
TILES_OF_ROWS = sum(-(-rows // 128) for rows in TIMED_ROWS)


def stages_of_sm(columns):
    """Return the stages that an SM computes, if tiles are distributed evenly."""
    return TILES_OF_ROWS * -(-TIMED["n"] // columns) * (TIMED["k"] // 128) / LIMITS.sm_count


TENSOR_US = stages_of_sm(192) * 192 * STAGE_CLOCKS / LIMITS.tensor_clock * 1e6
print(f"{stages_of_sm(192):.0f} stages per SM; tensor cores: {TENSOR_US:.0f} us at {LIMITS.tensor_clock / 1e9:.2f} GHz")
LATE = {"factors by producers": factors, "without loads": LAUNCHES["tested late, no loads"]}
LATE_TIMES = times("factors without loads", LATE)

# %% [markdown]
# Computing takes most of the time, and more than the tensor cores need at this clock. At the lower clock under load
# (end of this section) they take longer, which is most of the time of the kernel without loads. A warp waits for the
# barrier of a stage, loads its factors, and issues its wgmma. These three are dependent, and testing an mbarrier takes
# a shared-memory round trip even when the stage is already full.
#
# **Idea.** Test the barrier of the next stage, without waiting, before the FFMAs: the result arrives while they are
# executed. The same change advances descriptors by an addition instead of building them for every stage.
#
# **Predicted gain.** That of the loop alone, without loads, where neither loop ever waits for data:

# %%
EARLY = {"tested late": LAUNCHES["tested late, no loads"], "tested early": LAUNCHES["tested early, no loads"]}
EARLY_TIMES = times("barrier without loads", EARLY)
change(block_scale_parts.make_multiply_by_factors, kernel_in_parts.make_multiply)

# %%
tested_early = LAUNCHES["barrier tested early"]
gain_us = EARLY_TIMES["tested late"] - EARLY_TIMES["tested early"] if EARLY_TIMES else 0
step("barrier tested early", tested_early, after="factors by producers", predicted_gain_us=gain_us)

# %% [markdown]
# ### Step 8: look up the next tile ahead
#
# **Bottleneck.** In a trace, a tile begins when its first stage has arrived. Between two tiles a CTA waits, perhaps
# because producers look up the size of a tile's group in global memory before they can load.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
WAITING = keep("waiting", {"share": diagnoses.waiting_share(traced("traced early"))})
say("CTAs wait for the first stage of a tile for {share:.1%} of their time.", share=(WAITING or {}).get("share"))

# %% [markdown]
# **Idea.** Look up the next tile in the middle of the current tile, when all stages are full and the producers are
# idle.
#
# **Predicted gain.** All of this time.

# %%
change(block_scale_parts.make_tma_producer_without_look_ahead, kernel_in_parts.make_tma_producer)

# %%
look_up = LAUNCHES["look-up ahead"]
gain_us = (WAITING or {}).get("share", 0) * (ladder.median_us("barrier tested early") or 0)
step("look-up ahead", look_up, after="barrier tested early", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** If the wait is as short as before, CTAs do not wait for the look-up, and the step neither gains nor
# costs anything. The trace, and both kernels with equal groups:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
AHEAD = keep("waiting after looking up ahead", {"share": diagnoses.waiting_share(traced("traced look-up"))})
AHEAD_TIMES = times("look-up, even rows", {"barrier tested early": tested_early, "look-up ahead": look_up}, EVEN)
say(
    "{share:.1%} of the time lies between tiles ({before:.1%} before).",
    share=(AHEAD or {}).get("share"),
    before=(WAITING or {}).get("share"),
)

# %% [markdown]
# ### Step 9: stores by TMA
#
# **Bottleneck.** The same kernel without the store of its results:

# %%
no_store = LAUNCHES["no store"]
STORE_TIMES = times("store", {"look-up ahead": look_up, "no store": no_store})

# %% [markdown]
# A warp stores 64 columns at a time through a buffer. The tensor cores get no work from it meanwhile.
#
# **Idea.** The buffer has TMA's 128-byte swizzle, so TMA can store it while the warp computes its next tile. Each warp
# then needs buffers for all of its columns, which leaves shared memory for four stages instead of five.
#
# **Predicted gain.** The difference, less the time to write y to DRAM, assuming that four stages suffice.

# %%
change(block_scale_parts.make_store_by_lanes, kernel_in_parts.make_store)

# %%
tma_store = LAUNCHES["TMA store"]
WRITE_US = 2 * sum(TIMED_ROWS) * TIMED["n"] / LIMITS.copy_bandwidth * 1e6
gain_us = STORE_TIMES["look-up ahead"] - STORE_TIMES["no store"] - WRITE_US if STORE_TIMES else 0
step("TMA store", tma_store, after="look-up ahead", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The two changes apart:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
STORES = {name: LAUNCHES[name] for name in ("look-up ahead", "four stages, stores by lanes", "TMA store", "no store")}
STORE_PARTS = times("stages and store", STORES) or {}
FIVE_US, FOUR_US, TMA_US, NONE_US = (STORE_PARTS.get(name) for name in STORES)
say(
    "One stage less takes {stage:+.1f} us, and TMA's stores then {store:+.1f} us. {rest:.1f} us of the store remain, of which writing y to "
    "DRAM is {write:.1f} us at the rate of a copy.",
    stage=FIVE_US and FOUR_US - FIVE_US,
    store=FIVE_US and TMA_US - FOUR_US,
    rest=FIVE_US and TMA_US - NONE_US,
    write=WRITE_US,
)

# %% [markdown]
# ### Step 10: the package's tile
#
# **Bottleneck.** Fixed per-stage costs are amortised over only 192 columns, and the last tile of columns is partly
# empty:

# %%
COMPUTED_COLUMNS = {columns: -(-TIMED["n"] // columns) * columns for columns in (192, 256)}
for columns, computed in COMPUTED_COLUMNS.items():
    print(f"tiles of {columns}: {computed} columns for {TIMED['n']}, {stages_of_sm(columns):.0f} stages per SM")

# %% [markdown]
# **Idea.** A tile of 256 columns has 128 accumulators per thread, which leave no registers for a result of 256 columns.
# So a stage is computed in two halves of 128 columns, whose results use the same registers. Each half lies in one block
# of scales, so a thread needs two factors per row. The price: two dependent sequences of wgmma, wait and FFMAs per
# stage, and shared memory for three stages only. `early_test` adds step 7's test of the next barrier.

# %%
change(kernel_in_parts.make_multiply, kernel_in_parts.make_multiply_halves)

# %% [markdown]
# If the compiler does not assign the same registers to both results, it spills accumulators in the main loop.
# `make_wgmma_tile(..., overwrite=True)` puts the second result into the registers of the first. Instructions that
# access spilled registers:

# %%
for name in ("256 columns, single", "registers by the compiler"):
    print(f"{name}: {count(name, 'STL', 'LDL')} of {len(LOOPS[name] or [])}")

# %% [markdown]
# `group_gemm_blockwise_fp8` uses a [table](../moe_numba/grouped_gemm/call/config_table.py) of each problem's best tile, by
# mean time over three distributions of rows. For this problem single CTAs compute it, so the final kernel has none of
# step 4's pairs; other entries have pairs.
#
# **Predicted gain.** The time of the unused columns, if the package's tile for this problem has 256.


# %%
def package(p):
    return group_gemm_blockwise_fp8(p.x, p.weight, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale, p.average, out=p.out)


CHOSEN = [measured_config("block", TIMED["n"], TIMED["k"], 32, rows // 32) for rows in (8192, 8192, 32768)]
NAMES = {scales.tile_of(config): name for name, config in scales.TILES.items()}
assert scales.tile_of(CHOSEN[0]) in NAMES, f"{CHOSEN[0]} is not one of the tiles above"
print("the package's tile:", NAMES[scales.tile_of(CHOSEN[0])])
gain_us = (ladder.median_us("TMA store") or 0) * (1 - COMPUTED_COLUMNS[CHOSEN[0].block_n] / COMPUTED_COLUMNS[192])
step("final", package, after="TMA store", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** Both widths, in pairs and by single CTAs; the kernels of one problem are interleaved:

# %%
MANY_TIMED_ROWS = topic.random_lengths(32, 32768).tolist()
WIDE = problem(LENGTHS if SIMULATED else torch.tensor(MANY_TIMED_ROWS).int())
WIDE_LAUNCHES = {name: scales.StepLaunch(config, WIDE) for name, config in scales.TILES.items()}
for p, launches, expected in ((P, LAUNCHES, RIGHT), (WIDE, WIDE_LAUNCHES, topic.expected_output(WIDE, "block"))):
    for name in scales.TILES:
        p.out.fill_(float("nan"))
        error = reference.mismatch(launches[name](p), expected)
        assert error is None, f"{name}: {error}"
TILE_TIMES = [
    times(f"tiles, {words}", {name: launches[name] for name in scales.TILES}, p) or {}
    for words, launches, p in (("8192", LAUNCHES, P), ("8192 even", LAUNCHES, EVEN), ("32768", WIDE_LAUNCHES, WIDE))
]

# %% jupyter={"source_hidden": true} tags=["hide-input"]
table = [
    "| tile | GB from L2, 8192 rows | 8192 rows, us | 8192 even, us | 32768 rows, us |",
    "|---|---:|---:|---:|---:|",
]
for name, config in scales.TILES.items():
    count_gb = l2_to_sm_bytes(TIMED_ROWS, **TIMED, columns=config.block_n, cluster_size=config.cluster_size) / 1e9
    cells = [records.format_us(found[name]) if name in found else "" for found in TILE_TIMES]
    own = [scales.tile_of(config) == scales.tile_of(chosen) for chosen in CHOSEN]
    cells = [f"**{text}**" if text and is_own else text for text, is_own in zip(cells, own)]
    table.append(f"| {name} | {count_gb:.2f} | " + " | ".join(cells) + " |")
display(Markdown("\n".join(table) + "\n\nBold: the tile of the package's table for this number of rows."))
AT = TILE_TIMES[0]
BEST = [min(found.values()) for found in TILE_TIMES if found]
CHOSEN_NAMES = [NAMES[scales.tile_of(chosen)] for chosen in CHOSEN]
OWN = [found[name] for found, name in zip(TILE_TIMES, CHOSEN_NAMES) if name in found]
say(
    "With 8192 rows, 256 columns change the time of single CTAs by {single:+.1%}, and that of pairs by {pairs:+.1%}. Giving up pairs changes it "
    "by {lost:+.1%} with 192 columns. The step's two kernels, in the first and the last row, differ by {step:+.1%} here. With even groups and with more rows per group, single CTAs are faster than "
    "pairs by {even:.1%} and {many:.1%} (192 columns). The early test changes the time of single CTAs with 256 columns by {early:+.1%} with 8192 "
    "rows and {early_many:+.1%} with 32768. The tiles of a column differ by up to {range:.1%}, and the package's is up to "
    "{excess:.1%} slower than the best.",
    early=AT["256 columns, early test"] / AT["256 columns, single"] - 1 if OWN else None,
    early_many=TILE_TIMES[2]["256 columns, early test"] / TILE_TIMES[2]["256 columns, single"] - 1 if OWN else None,
    single=AT["256 columns, single"] / AT["192 columns, single"] - 1 if AT else None,
    pairs=AT["256 columns, pairs"] / AT["192 columns, pairs"] - 1 if AT else None,
    step=AT["256 columns, early test"] / AT["192 columns, pairs"] - 1 if AT else None,
    lost=AT["192 columns, single"] / AT["192 columns, pairs"] - 1 if AT else None,
    even=1 - TILE_TIMES[1]["192 columns, single"] / TILE_TIMES[1]["192 columns, pairs"] if AT else None,
    many=1 - TILE_TIMES[2]["192 columns, single"] / TILE_TIMES[2]["192 columns, pairs"] if AT else None,
    range=max(max(found.values()) / min(found.values()) for found in TILE_TIMES) - 1 if BEST else None,
    excess=max(own / best for own, best in zip(OWN, BEST)) - 1 if OWN else None,
)

# %% [markdown]
# ### What limits it now
#
# Under load a GPU lowers its clock until it stays within its power limit. A kernel at the limit takes its energy
# divided by that power. NVML counts the energy while a kernel is launched again and again:


# %%
def energy_of(name):
    """Print and record the energy of a launch and the clock of the SMs."""
    measured = diagnoses.energy_of(partial(STEPS.get(name) or LAUNCHES[name], P))
    energy = keep(f"energy of {name}", measured._asdict() if measured else {})
    if not energy:
        print(f"{name}: not measured, without a GPU or its energy counter")
    else:
        us, mj, mhz, watts, limit = (energy[field] for field in diagnoses.Energy._fields)
        print(f"{name:<20} {us:6.1f} us {mj:6.1f} mJ, SMs at {mhz:.0f} MHz, {watts:.0f} W of {limit:.0f} W")
    return energy or {}


MEASURED = "192 columns", "pairs of tiles", "TMA store", "weights not kept", "final"
ENERGY = {name: energy_of(name) for name in MEASURED}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
MJ = [energy["launch_mj"] for energy in ENERGY.values() if energy]
LIMIT_W = ENERGY["final"].get("limit_watts")
say(
    "The final kernel runs at {mhz:.0f} MHz of up to {boost:.0f} MHz. The kernels need {low:.0f} to {high:.0f} mJ per launch, which at the limit "
    "of {limit:.0f} W take {low_us:.0f} to {high_us:.0f} us. From 192 columns to the final kernel the energy falls by {saved:.0%} and "
    "the time by {faster:.0%}: waiting is gone, but at the power limit the time follows the energy. If step 9 does not keep weights in L2, "
    "its energy changes by {not_kept:+.0%}.",
    mhz=ENERGY["final"].get("sm_mhz"),
    boost=LIMITS.boost_clock / 1e6,
    low=min(MJ, default=None),
    high=max(MJ, default=None),
    limit=LIMIT_W,
    low_us=min(MJ) / LIMIT_W * 1e3 if MJ else None,
    high_us=max(MJ) / LIMIT_W * 1e3 if MJ else None,
    saved=1 - ENERGY["final"]["launch_mj"] / ENERGY["192 columns"]["launch_mj"] if MJ else None,
    faster=1 - ENERGY["final"]["launch_us"] / ENERGY["192 columns"]["launch_us"] if MJ else None,
    not_kept=ENERGY["weights not kept"]["launch_mj"] / ENERGY["TMA store"]["launch_mj"] - 1 if MJ else None,
)

# %% [markdown]
# From `192 columns` to `final` energy and time fall by similar shares, as expected at the power limit. DeepGEMM's
# kernel is faster still (first output of this notebook); which of its differences matters has not been measured.
#
# Wrong kernels must be rejected: one that exchanges the scales of a thread's two rows, and two diagnoses from above.

# %%
WRONG = "rows exchanged", "no scale loads", "scales loaded once"
for name in WRONG:
    step(name, LAUNCHES[name], expect_wrong=True)
assert all("refused" in row for row in ladder.rows[-len(WRONG) :])

# %%
ladder.measure_all()
ladder.save()
ladder.plot(floor_us=FLOOR_US, without=("torch", *WRONG))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
FINAL_US, FOUND = ladder.median_us("final"), (ladder.record or {"rows": []}) if ladder.untimed else vars(ladder)
SAME = {}  # step -> its times in lines above
for name, table in FOUND.get("diagnosis", {}).items():
    if not name.startswith(("loads of", "tiles")) and "even" not in name:
        [SAME.setdefault(label, []).append(us) for label, us in table.items() if label in scales.STEPS]
for row in FOUND["rows"]:
    for label, us in zip((row.get("after"), row["step"]), row.get("compared_us", ())):
        SAME.setdefault(label, []).append(us)
WIDEST = max(SAME, key=lambda label: max(SAME[label]) / min(SAME[label]), default=None)
say(
    "Step 1 takes {first:.0f} us and the final kernel {final:.0f} us, {ratio:.1f} times the lower bound, {rate:.0f} TFLOP/s. In the "
    "comparisons above, without the last table and the energy, the times of a kernel differ most for '{widest}': {low:.0f} to {high:.0f} us, depending on the kernels that run in between.",
    first=ladder.median_us("scales per column"),
    final=FINAL_US,
    ratio=FINAL_US and FINAL_US / FLOOR_US,
    rate=FINAL_US and FLOPS / FINAL_US / 1e6,
    widest=WIDEST,
    low=WIDEST and min(SAME[WIDEST]),
    high=WIDEST and max(SAME[WIDEST]),
)

# %% [markdown]
# ## 3. 4-bit weights: the problem
#
# MXFP4 stores a weight in 4 bits, **e2m1**: sign, two bits of exponent, one of mantissa. Its magnitudes are 0, 0.5, 1,
# 1.5, 2, 3, 4 and 6. 32 consecutive elements of k share a scale, a power of two in one byte (UE8M0), which makes 4.25
# bits per weight. x is bfloat16. Tensor cores of Hopper do not multiply 4-bit numbers, so weights must become bfloat16.
#
# With few rows per group the time is that of reading the weights. The first problem has 128 rows in 32 groups, the
# second 2048.

# %%
FOUR_N, FOUR_K = (128, 128) if SIMULATED else (4096, 7168)
FEW, MANY = (torch.tensor([n, 3]).int() if SIMULATED else topic.random_lengths(32, r) for n, r in ((5, 128), (9, 2048)))
GIVEN = torch.Generator(DEVICE).manual_seed(0)
draw_bytes = partial(torch.randint, dtype=torch.uint8, device=DEVICE, generator=GIVEN)
BLOCKS = draw_bytes(0, 256, (GROUPS, FOUR_N, FOUR_K // 2))
SCALES = draw_bytes(125, 128, (GROUPS, FOUR_N, FOUR_K // 32))
DECODED = torch.stack([mxfp4.dequantise_mxfp4(b, s).to(BF16) for b, s in zip(BLOCKS, SCALES)])
LAYOUTS = {
    "in_rows": mxfp4.pack_rows(BLOCKS, SCALES),
    "in_fragments": mxfp4.pack_fragments(BLOCKS, SCALES),
    "packed": pack_mxfp4(BLOCKS, SCALES),
}


def four_bit_problem(lengths):
    made = topic.make_problem(DECODED, lengths)
    made.right = reference.group_gemm(made.x, DECODED, made.seqlens, made.cu_seqlens)
    made.blocks, made.scales, made.decoded = BLOCKS, SCALES, torch.empty_like(DECODED)
    return SimpleNamespace(**vars(made) | LAYOUTS)


FEW_ROWS, MANY_ROWS = four_bit_problem(FEW), four_bit_problem(MANY)
for name, codes in LAYOUTS.items():
    print(f"{name}: {tuple(codes.shape)}, {8 * codes.numel() / DECODED.numel():.2f} bits per weight")

# %% [markdown]
# ### Step 0: torch

# %%
VALUES = torch.tensor([*mxfp4.E2M1, *(-value for value in mxfp4.E2M1)], device=DEVICE)


def mxfp4_in_torch(p):
    for g, (start, end) in enumerate(bounds_of(FEW)):
        codes = torch.stack([p.blocks[g] & 15, p.blocks[g] >> 4], -1).flatten(1).int()  # the low half is the first
        weight = torch.ldexp(VALUES[codes].unflatten(1, (-1, 32)), p.scales[g].int()[..., None] - 127)
        p.out[start:end] = p.x[start:end] @ weight.flatten(1).to(BF16).T
    return p.out


TIMED_FEW = topic.random_lengths(32, 128)
FOUR_FLOOR_US, FOUR_BYTES, _ = topic.lower_bound(TIMED_FEW, **TIMED, dtype="mxfp4")
READ_US = FOUR_BYTES / LIMITS.copy_bandwidth * 1e6
four = Ladder(
    "grouped_gemm_mxfp4_ladder",
    lambda y: reference.mismatch(y, FEW_ROWS.right),
    title="Grouped GEMM with MXFP4 weights: 32 groups, 4096 x 7168, 128 rows",
    reference_name="torch",
    config={"num_groups": GROUPS, "n": FOUR_N, "k": FOUR_K, "scaling": "mxfp4"},
    size={"rows": len(FEW_ROWS.x)},
    gpu=recorded_gpu("grouped_gemm_mxfp4_ladder"),
)
FOUR_STEPS = {}


def four_step(name, launch, **options):
    FOUR_STEPS[name] = launch
    FEW_ROWS.out.fill_(float("nan"))
    four.step(name, partial(launch, FEW_ROWS), dtype="mxfp4", floor_us=FOUR_FLOOR_US, bytes=FOUR_BYTES, **options)


four_step("torch", mxfp4_in_torch, slow=True)

# %% [markdown]
# ## 4. 4-bit weights: the ladder
#
# ### Step 1: dequantise, then a bfloat16 GEMM
#
# **Idea.** A kernel decodes all weights to bfloat16, and the grouped GEMM of the package reads those.
#
# **Prediction.** The bytes of both kernels at the rate of a copy: codes are read, decoded weights written and read.


# %%
def dequantise_first(p):
    mxfp4.launch_dequantise(p)
    return group_gemm_bf16(p.x, p.decoded, p.seqlens, p.cu_seqlens, p.average, out=p.out)


USED = int((TIMED_FEW > 0).sum())  # groups with rows: the GEMM reads only their weights
WEIGHTS = TIMED["n"] * TIMED["k"]  # of a group
DECODE_US, GEMM_US = (WEIGHTS * each / LIMITS.copy_bandwidth * 1e6 for each in (32 * (17 / 32 + 2), 2 * USED))
four_step("dequantise first", dequantise_first, prediction_us=round(DECODE_US + GEMM_US))
FIRST = {"both": dequantise_first, "dequantise": mxfp4.launch_dequantise}
FIRST_TIMES = times("parts of two kernels", FIRST, FEW_ROWS, four) or {}

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "**Explanation.** The GEMM takes {gemm:.0f} us, with {gemm_predicted:.0f} predicted, but the kernel that decodes {decode:.0f} us, with "
    "{decode_predicted:.0f} predicted: it does not reach the rate of a copy, probably because a thread executes many instructions for a code. Step 2 counts those of a GEMM that decodes in this way.",
    gemm=FIRST_TIMES["both"] - FIRST_TIMES["dequantise"] if FIRST_TIMES else None,
    gemm_predicted=GEMM_US,
    decode=FIRST_TIMES.get("dequantise"),
    decode_predicted=DECODE_US,
)

# %% [markdown]
# ### Step 2: decode in the consumer
#
# **Bottleneck.** Decoded weights cross the memory bus twice, and are 3.8 times as large as the codes.
#
# **Idea.** Let the consumers of the GEMM decode. Codes arrive in shared memory in **weight tiles** of 64 rows by 64
# elements of k: 2048 bytes of codes and 128 bytes of scales, contiguous in memory, so that one `cp.async.bulk` copies a
# tile. wgmma takes its A operand from registers, so rows of weight are A. A thread decodes its 32 weights of a tile
# into 16 registers, and the warpgroup issues four wgmmas with 16 elements of k each. Two sets of registers alternate:
# while the wgmmas of one set run, the thread decodes the other (`make_overlapped_loop` in
# [`w4/kernel.py`](../moe_numba/grouped_gemm/w4/kernel.py)).
#
# In this step the codes of a tile are in the order of rows, two neighbouring codes of a register in one byte:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(f"```python\n{source_of(mxfp4.make_load_tile_by_bytes)}```")

# %% [markdown]
# Decode a code by its definition: multiply its number by the scale of its block, and convert to bfloat16.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
parts = mxfp4.value_of, mxfp4.decode_byte, mxfp4.decode_step, mxfp4.decode_tile_by_value
Markdown("```python\n" + "\n\n".join(map(source_of, parts)) + "```")

# %% [markdown]
# **Predicted gain.** The new kernel takes the longer of reading the codes and issuing its instructions, one per clock
# on each of an SM's four schedulers. The compiler's output shows its instructions per weight tile, less those of a
# kernel that loads 16 bytes and decodes nothing:

# %%
WAYS = "bytes, by value", "16 bytes, by value", "16 bytes, shift and mask"
INSTRUCTIONS = mxfp4.instructions_per_tile(WAYS, without="16 bytes, not decoded")
WARPS = 4 * USED * WEIGHTS // 64**2  # four warps decode a weight tile


def issue_us(way):
    """Return the time to issue the instructions of all weight tiles at the highest clock."""
    return INSTRUCTIONS[way]["all"] * WARPS / (4 * LIMITS.sm_count * LIMITS.boost_clock) * 1e6


for way in WAYS:
    counts = f"{INSTRUCTIONS[way]['all']} instructions ({INSTRUCTIONS[way].get('conversion', 0)} of them conversions)"
    print(f"{way}: {counts} of a thread per weight tile, {issue_us(way):.1f} us")
print(f"reading the codes at the rate of a copy: {READ_US:.1f} us")

# %%
in_rows = mxfp4.StepLaunch(FEW_ROWS, "in_rows", "rows, by value")
bound_us = max(READ_US, issue_us(WAYS[0]))
gain_us = (four.median_us("dequantise first") or bound_us) - bound_us
four_step("decode in the consumer", in_rows, after="dequantise first", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** A kernel that passes the codes to wgmma as they are shows that decoding costs more than issuing its
# instructions. Two likely reasons: instructions wait for earlier ones, and under load the clock is below the highest
# one.

# %%
not_decoded = mxfp4.StepLaunch(FEW_ROWS, "in_fragments", "not decoded")
DECODING = {"decode in the consumer": in_rows, "not decoded": not_decoded}
DECODING_TIMES = times("without decoding", DECODING, FEW_ROWS, four)

# %% [markdown]
# ### Step 3: the order of fragments
#
# **Bottleneck.** A thread loads its codes byte by byte. Eight lanes read the same column of eight rows, 32 bytes apart:
# a two-way bank conflict. Two kernels that do not decode show what this costs where nothing hides it:

# %%
LOADED = {"rows": mxfp4.StepLaunch(FEW_ROWS, "in_rows", "rows, not decoded"), "fragments": not_decoded}
LOADED_TIMES = times("loads without decoding", LOADED, FEW_ROWS, four)
draw.tile_bytes(lane=5)

# %% [markdown]
# **Idea.** When a model is loaded, pack the codes of a tile in the order in which threads need them: 16 consecutive
# bytes for each thread, loaded by one instruction without bank conflicts.
#
# **Predicted gain.** The instructions that are no longer issued.

# %%
change(mxfp4.make_load_tile_by_bytes, mxfp4.make_load_tile)

# %%
in_fragments = mxfp4.StepLaunch(FEW_ROWS, "in_fragments", "fragments, by value")
gain_us = issue_us(WAYS[0]) - issue_us(WAYS[1])
four_step("order of fragments", in_fragments, after="decode in the consumer", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The step is slower, although a thread issues fewer instructions, so the model of instruction issue
# does not hold here; the cause is not known. With 2048 rows the step is faster. Four fifths of the time are decoding:

# %%
ORDERS = {"in rows": in_rows, "in fragments": in_fragments, "not decoded": not_decoded}
ORDER_TIMES = times("fragments", ORDERS, FEW_ROWS, four)

# %% [markdown]
# Step 4 needs this order, because little is left of decoding there.
#
# **Exercise 3.** In which thread of the warpgroup, in which of its 16 bytes and in which half is the code of a row and
# a column? `pack_fragments` has the answer as one permutation.

# %%
place_of = ...  # your answer: lambda row, column: (thread, byte, half), with half 0 for the low one
exercise("grouped_gemm_scales-3").check(place_of)

# %% [markdown]
# ### Step 4: shift, mask, multiply
#
# **Bottleneck.** Decoding by value: it has most of the instructions counted above, and many depend on the one before.
#
# **Idea.** The bits of a code are a bfloat16 if they are put in the right place: the sign at the top, the other three
# in the two low exponent bits and the top mantissa bit.

# %%
draw.decoding(0b1101)

# %% [markdown]
# A register of two codes needs a shift, an AND (`fields`) and one `mul.bf16x2`, which also applies the scale. With the
# exponents' biases, 127 of bfloat16 and 1 of e2m1, the bits are the number times 2^-126. But 2^126 times a scale of 4
# or more exceeds the range of bfloat16. So the multiplication applies the scale times 2^94, and the epilogue multiplies
# y by 2^32. For scales from 2^-93 to 2^33 nothing then overflows, and no decoded weight is subnormal:

# %%
SPLIT = packing_mxfp4.EXPONENT_OFFSET, packing_mxfp4.RESULT_EXPONENT
print(f"fields: word & {packing_mxfp4.FIELDS:#x}; scales are multiplied by 2**{SPLIT[0]}, y by 2**{SPLIT[1]}")
Markdown(f"```python\n{source_of(mxfp4.decode_block)}```")

# %% [markdown]
# Two words of codes, `a` and `b`, become eight registers. `fields` keeps 8 bits of 32, other ones after each shift:
#
# | register | its bits of `a` |
# |---|---|
# | `a` | 31, 24:22, 15, 8:6 |
# | `a << 6` | 25, 18:16, 9, 2:0 |
# | `rotr(a, 4)` | 28:26, 19, 12:10, 3 |
# | remaining | 30:29, 21:20, 14:13, 5:4 |
#
# The 8 remaining bits of `a` and of `b` are not at the distances that one shift needs, so the fourth and the eighth
# register are each the XOR of two shifted words. The XOR also has bits of other registers at these places, so packing
# sets the remaining bits such that the XOR comes out right
# ([`w4/packing.py`](../moe_numba/grouped_gemm/w4/packing.py)):

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(f"```python\n{source_of(packing_mxfp4._pack_codes)}```")

# %% [markdown]
# **Predicted gain.** The instructions that are no longer issued, until reading the codes becomes the limit.


# %%
by_masks = mxfp4.StepLaunch(FEW_ROWS, "packed", "shift and mask")
gain_us = (four.median_us("order of fragments") or READ_US) - max(READ_US, issue_us(WAYS[2]))
four_step("shift, mask, multiply", by_masks, after="order of fragments", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** What is left of the cost of decoding:

# %%
MASK_TIMES = times("masks", {"shift, mask, multiply": by_masks, "not decoded": not_decoded}, FEW_ROWS, four) or {}
LEFT_US = MASK_TIMES["shift, mask, multiply"] - MASK_TIMES["not decoded"] if MASK_TIMES else 0
print(f"decoding: {LEFT_US:.1f} us")

# %% [markdown]
# ### Step 5: four consumer warpgroups
#
# **Bottleneck.** Few instructions decode a tile, but each needs the result of the one before. With two consumer
# warpgroups a scheduler has two warps that decode, and idles while both wait.
#
# **Idea.** Four warpgroups have twice as many warps that decode. This is the tile that `group_gemm_mxfp4` takes from a
# table of measurements, with 256 columns of y.

# %%
for name, config in (("so far", mxfp4.config_of(FEW_AVERAGE)), ("now", FOUR_TILE)):
    print(f"{name}: {config.warpgroups} consumer warpgroups, {config.stages} stages, {config.subtile_m} rows of x")

# %% [markdown]
# **Predicted gain.** What is left of decoding.

# %%
four_warpgroups = mxfp4.StepLaunch(FEW_ROWS, "packed", "shift and mask", FOUR_TILE)
four_step("four warpgroups", four_warpgroups, after="shift, mask, multiply", predicted_gain_us=LEFT_US)

# %% [markdown]
# **Explanation.** The step gains more than what was left of decoding. The kernel that does not decode still has two
# warpgroups: it is no lower bound.

# %%
HIDDEN = {"shift, mask, multiply": by_masks, "four warpgroups": four_warpgroups, "not decoded": not_decoded}
HIDDEN_TIMES = times("four warpgroups", HIDDEN, FEW_ROWS, four)

# %% [markdown]
# ### Step 6: mma.sync for few rows
#
# **Bottleneck.** Neither decoding nor, at the rate of a copy, reading the codes explains this time. What remains is
# wgmma: a tile has few rows of x, but a wgmma with A in registers takes more than three quarters as long for 8 columns
# as for 32.

# %%
ITERATIONS, CTAS = 200, 1 if SIMULATED else LIMITS.sm_count
SUMS = torch.empty(CTAS * mxfp4.PRODUCT_THREADS, device=DEVICE)
PRODUCTS = {
    f"{instruction}, {n} columns": partial(
        mxfp4.launch_products, instruction, n, SUMS, 1 if SIMULATED else ITERATIONS, CTAS
    )
    for instruction, n in (("wgmma", 8), ("wgmma", 32), ("mma.sync", 8), ("mma.sync", 16))
}
PRODUCT_US = four.times("products", PRODUCTS) or {}
PRODUCT_NS = {
    name: us * 1000 / (ITERATIONS * 8 * 4) for name, us in PRODUCT_US.items()
}  # of an SM, with four warpgroups
for name, ns in PRODUCT_NS.items():
    print(f"64 rows of weight, 16 elements of k, {name}: {ns:.1f} ns")

# %% [markdown]
# **Idea.** `mma.sync` multiplies 16 rows by 8 columns in each warp. Its registers of A and of the accumulators are those
# of wgmma, so decoding and epilogue stay as they are. Each warp loads the rows of x itself, by `ldmatrix`:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
Markdown(f"```python\n{source_of(w4_kernel.make_mma_sync_loop)}```")

# %% [markdown]
# **Predicted gain.** At most the time of the multiplications that is saved, until reading the codes becomes the limit.


# %%
def package_mxfp4(p):
    return group_gemm_mxfp4(p.x, p.packed, p.seqlens, p.cu_seqlens, p.average, out=p.out)


COUNT = USED * WEIGHTS / (64 * 16 * LIMITS.sm_count)  # products of an SM
SAVED_US = COUNT * (PRODUCT_NS["wgmma, 8 columns"] - PRODUCT_NS["mma.sync, 8 columns"]) / 1000 if PRODUCT_NS else 0
gain_us = min(SAVED_US, (four.median_us("four warpgroups") or READ_US) - READ_US)
four_step("final", package_mxfp4, after="four warpgroups", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** wgmmas run while other warpgroups load and decode, so only a part of their time was visible.

# %%
FINAL = {"four warpgroups": four_warpgroups, "final": package_mxfp4}
FINAL_TIMES = times("final", FINAL, FEW_ROWS, four)

# %% [markdown]
# **Exercise 4.** Decode a byte with two codes, the first in the low half, to a register of two bfloat16 that still have
# to be multiplied by 2^126.

# %%
decode_two = ...  # your answer: lambda byte: ... (a 32-bit integer)
exercise("grouped_gemm_scales-4").check(decode_two)

# %% [markdown]
# Wrong layouts must be rejected: a thread's rows exchanged with its column halves, and the two codes of a byte
# exchanged.

# %%
CODES = FEW_ROWS.in_fragments[..., :2048].unflatten(-1, (-1, 2, 2)), FEW_ROWS.in_fragments[..., 2048:]
WRONG_CODES = {
    "rows and columns exchanged": CODES[0].transpose(-1, -2).flatten(-3),
    "halves exchanged": CODES[0].flatten(-3) << 4 | CODES[0].flatten(-3) >> 4,
}
FEW_ROWS.wrong = torch.empty_like(FEW_ROWS.in_fragments)
wrong_layout = mxfp4.StepLaunch(FEW_ROWS, "wrong", "fragments, by value")
for name, codes in WRONG_CODES.items():
    torch.cat([codes, CODES[1]], dim=-1, out=FEW_ROWS.wrong)
    four_step(name, wrong_layout, expect_wrong=True)
assert all("refused" in row for row in four.rows[-len(WRONG_CODES) :])

# %%
four.measure_all()
four.plot(floor_us=FOUR_FLOOR_US, without=("torch", *WRONG_CODES))

# %% [markdown]
# ### 64 rows per group
#
# With 2048 rows the same steps use tiles of 128 rows of x. Each weight tile is decoded once per tile of rows.

# %%
MANY_STEPS = {
    "dequantise first": dequantise_first,
    "decode in the consumer": mxfp4.StepLaunch(MANY_ROWS, "in_rows", "rows, by value"),
    "order of fragments": mxfp4.StepLaunch(MANY_ROWS, "in_fragments", "fragments, by value"),
    "final": package_mxfp4,
}
for name, launch in MANY_STEPS.items():
    MANY_ROWS.out.fill_(float("nan"))
    error = reference.mismatch(launch(MANY_ROWS), MANY_ROWS.right)
    assert error is None, f"{name}: {error}"
MANY_US = four.times("many rows", {name: partial(launch, MANY_ROWS) for name, launch in MANY_STEPS.items()})
four.save()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
table = ["| step | 128 rows, us | 2048 rows, us |", "|---|---:|---:|"]
for name in MANY_STEPS:
    cells = four.median_us(name), (MANY_US or {}).get(name)
    table.append(f"| {name} | " + " | ".join("" if us is None else records.format_us(us) for us in cells) + " |")
display(Markdown("\n".join(table) + "\n\nKernel times, measured in this run or recorded."))
FOUR_US = four.median_us("final")
say(
    "With 128 rows the final kernel moves {rate:.2f} TB/s; a copy moves {copy:.2f}. With 2048 rows it takes {many:.0f} us "
    "(lower bound {bound:.0f} us), and the order of fragments changes the time by {order:+.0%}.",
    rate=FOUR_US and FOUR_BYTES / FOUR_US / 1e6,
    copy=LIMITS.copy_bandwidth / 1e12,
    many=(MANY_US or {}).get("final"),
    order=MANY_US["order of fragments"] / MANY_US["decode in the consumer"] - 1 if MANY_US else None,
    bound=topic.lower_bound(topic.random_lengths(32, 2048), **TIMED, dtype="mxfp4")[0],
)

# %% [markdown]
# **Conclusion.** With few rows, 4-bit weights are faster than FP8. With 64 rows per group they are not: the FP8 kernel
# takes less time in the record of `bench grouped_gemm`, and MXFP4 saves memory only. What limits the kernel there has
# not been measured.
#
# ## 5. Sources
#
# - DeepSeek: [DeepGEMM](https://github.com/deepseek-ai/DeepGEMM), whose FP8 kernel has rows of x as wgmma's rows.
# - DeepSeek-AI: *DeepSeek-V3 Technical Report*, 2024, section 3.3.
# - Open Compute Project: *OCP Microscaling Formats (MX) Specification 1.0*.
# - NVIDIA: *PTX ISA*, `wgmma` with A in registers and `cp.async.bulk.tensor` with multicast.
# - [Marlin](https://github.com/IST-DASLab/marlin), which packs 4-bit integers in the order of fragments.
# - The kernels: [`block_scaled/kernel.py`](../moe_numba/grouped_gemm/block_scaled/kernel.py),
#   [`w4/kernel.py`](../moe_numba/grouped_gemm/w4/kernel.py).
