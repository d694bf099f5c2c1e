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
# # Dispatch layout: count the tokens for each rank
#
# With **expert parallelism** (EP) the experts of a layer are distributed over several GPUs, called **ranks**: with 8
# ranks, each holds 32 of DeepSeek-V3's 256 experts. Each rank also has its own tokens. **Dispatch** sends every token
# to the ranks that hold its experts, and **combine** returns and sums the results. Before a rank can send, it must
# count how many of its tokens go to each rank and to each expert: the **dispatch layout**, the subject of this
# notebook.
#
# The notebook follows the first part of an article on [DeepEP](https://github.com/deepseek-ai/DeepEP), DeepSeek's
# library for dispatch and combine: [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824).
# **Intranode** means that all ranks are on one node.
#
# DeepEP has two families of kernels:
#
# - The **normal** kernels are optimised for throughput: training and **prefill** (processing the prompts). Within a
#   node, tokens travel over **NVLink**; between nodes first over the network (**RDMA**) to one GPU of the target node.
#   A small kernel, `notify_dispatch`, exchanges the counts, so that every rank can allocate its output.
# - The **low-latency** kernels are for **decoding** (generating one token per request and step). No counts are
#   exchanged in advance, so the buffers must have the capacity for the worst case.
#
# This notebook follows the normal kernels within a node. Without a GPU, everything runs at a small size in the
# simulator, and times are read from a record. "DeepEP's kernel" is our Numba port of the kernel in DeepEP's first
# version, which the article describes.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import inspect
import subprocess
import sys
import textwrap
import warnings
from functools import cache
from math import comb

import numpy as np
import torch
from IPython.display import Markdown
from numba import cuda, int32, int64, uint8

from moe_numba import simulator
from moe_numba.course.bench import kernel_time, kernel_times, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.topics.dispatch_layout import layout_bytes, layout_outputs, sizes, uniform_routing
from moe_numba.course.deepep_port import dispatch_layout as deepep_layout
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.dispatch_layout import draw
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import NOISE
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.source_diff import OpCounter, diff
from moe_numba.expert_parallel import get_dispatch_layout
from moe_numba.expert_parallel.layout.kernel import CLUSTER_SIZE, make_layout_kernel
from moe_numba.expert_parallel.reference import dispatch_layout
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.ptx.memory import atom_add_s32, pointer_from_address
from moe_numba.runtime.changed_source import changed_module, source_of
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # most of these kernels have few CTAs on purpose
HERE = sizes()  # DeepSeek-V3's routing on a GPU, a small one in the simulator
DEVICE, EXPERTS, TOPK, RANKS, THREADS = HERE.device, HERE.num_experts, HERE.topk, HERE.ranks, HERE.threads

# %% [markdown]
# ## 1. The problem in one figure
#
# Two ranks with four tokens each, and four experts, two per rank. On the left are the experts that the gate has chosen.
# Each rank computes three outputs for its own tokens:
#
# - `is_token_in_rank`: for each token and rank, whether the token goes to the rank. **A token is sent to a rank once**,
#   even if the rank holds several of its experts. This saves NVLink traffic.
# - `num_tokens_per_rank`: the number of tokens that go to each rank, the column sums of `is_token_in_rank`.
# - `num_tokens_per_expert`: the number of tokens of each expert. A token with two experts on one rank counts twice
#   here.

# %%
torch.manual_seed(0)
SMALL = [uniform_routing(4, 4, 2, "cpu") for _ in range(2)]  # two ranks' tokens
draw.problem(SMALL, num_experts=4)

# %% [markdown]
# ## 2. The reference
#
# The package's reference in torch. An id outside `0..num_experts - 1` is not counted; -1 usually marks a padding token.
# `check` (folded) compares a kernel's outputs with it.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
head, _, rest = inspect.getsource(dispatch_layout).partition('    """')
Markdown("```python\n" + head + rest.partition('"""\n')[2] + "```")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
NAMES = "num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"
for rank, topk_idx in enumerate(SMALL):
    found = zip(NAMES, dispatch_layout(topk_idx, 2, 4))
    print(f"rank {rank}:", ", ".join(f"{name} {tensor.int().tolist()}" for name, tensor in found))


def poisoned(ids):
    """Outputs that no kernel would leave as they are: every byte is 0xCD, which is no flag and no likely count."""
    return layout_outputs(len(ids), EXPERTS, RANKS, DEVICE)


def check(outputs, ids=None):
    """Return None, or a sentence that describes the error. A flag is a byte that is 0 or 1."""
    ids = IDS if ids is None else ids
    for name, given, right in zip(NAMES, outputs, dispatch_layout(ids, RANKS, EXPERTS)):
        if given.shape != right.shape or given.dtype != right.dtype:
            return f"{name} is {given.dtype} {tuple(given.shape)}, not {right.dtype} {tuple(right.shape)}"
        if right.dtype == torch.bool:
            given, right = given.view(torch.uint8), right.view(torch.uint8)
        wrong = (given != right).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            return (
                f"{name}: {len(wrong)} of {right.numel()} are wrong; the first, at {list(at)}, is "
                f"{given[at].item()}, not {right[at].item()}"
            )
    return None


torch.manual_seed(0)
IDS = uniform_routing(HERE.tokens, EXPERTS, TOPK)
HOLES = IDS[: HERE.few].clone()  # every fifth id is -1, and all ids of one token
HOLES.view(-1)[::5] = -1
HOLES[1] = -1
OTHERS = {
    "one": IDS[:1].contiguous(),
    "few": IDS[: HERE.few].contiguous(),
    "many": uniform_routing(HERE.many, EXPERTS, TOPK),
    "skewed": IDS[:1].repeat(HERE.tokens, 1).contiguous(),  # all tokens have the same experts
}
OTHER_SIZES = {
    "one": "1 token",
    "few": "64 tokens",
    "many": "65536 tokens",
    "skewed": "4096 tokens to the same experts",
}
print("the reference:", check(dispatch_layout(IDS, RANKS, EXPERTS)))
print("poison:       ", check(poisoned(IDS)))

# %% [markdown]
# The next cell computes how many ranks a token visits on average. With `topk` distinct, uniformly chosen experts, a
# token skips a rank if all its experts are on other ranks.


# %%
def ranks_of_a_token(num_experts=256, topk=8, ranks=8):
    """How many ranks a token visits, on average."""
    others = num_experts - num_experts // ranks
    return ranks * (1 - comb(others, topk) / comb(num_experts, topk))


per_rank, per_expert, _ = dispatch_layout(IDS, RANKS, EXPERTS)
print(
    f"8 of 256 experts on 8 ranks: {ranks_of_a_token():.3f} ranks of 8 on average, so "
    f"{100 * (1 - ranks_of_a_token() / 8):.0f} % of what a copy for each expert would send is saved"
)
VISITED = int(per_rank.sum()) / HERE.tokens
print(
    f"here, {TOPK} of {EXPERTS} experts on {RANKS} ranks: {VISITED:.3f} counted, "
    f"{ranks_of_a_token(EXPERTS, TOPK, RANKS):.3f} expected"
)

# %% [markdown]
# ## 3. The lower bound
#
# The kernel reads the ids once (8 bytes each, torch's index type), writes the flags once (one byte each) and writes
# about a kilobyte of counts. The next cell divides these bytes by the copy bandwidth, and loads the latencies that
# notebooks 03 and 03 measured (`LOAD_US`, `SHARED_US`, `GLOBAL_US`, `CLUSTER_BARRIER_US`).

# %% jupyter={"source_hidden": true} tags=["hide-input"]
LIMITS = chip_limits()
print(LIMITS)
BANDWIDTH = LIMITS.copy_bandwidth  # bytes per second
ALIGN_LADDER, ALIGN = records.recorded("align_ladder"), records.recorded("align")
EMPTY_US = {False: 0.5, True: 0.4}  # a kernel that does nothing: alone, and with programmatic dependent launch
if ALIGN:
    EMPTY_US = {
        d: records.find(ALIGN, step="empty kernel", config={"dependent": d})["kernel_us"]["median"] for d in EMPTY_US
    }
NS = {"a load from the L2": 150, "a shared atomic": 50, "a barrier": 20, "a global atomic": 400}
if ALIGN_LADDER:  # what notebook 03 measured with chains of equal links
    CHAINS = ALIGN_LADDER["diagnosis"]["chains"]  # microseconds of 1024 and of 2048 links
    NS = {name: 1000 * (CHAINS[f"{name} x 2048"] - CHAINS[f"{name} x 1024"]) / 1024 for name in NS}
LOAD_US, SHARED_US, GLOBAL_US = (
    NS[name] / 1000 for name in ("a load from the L2", "a shared atomic", "a global atomic")
)
CLOCK_MHZ = LIMITS.boost_clock / 1e6
CLUSTER_BARRIER_US = 0.25
if GATE_ALIGN := records.recorded("gate_align_ladder"):  # what notebook 04 measured with chains of cluster barriers
    CHAINS = GATE_ALIGN["diagnosis"]["cluster barriers"]
    CLUSTER_BARRIER_US = (CHAINS["64"] - CHAINS["32"]) / 32

for tokens in (1, 64, 4096, 65536):
    count = layout_bytes(tokens, 8, 256, 8)
    print(f"{tokens:6} tokens: {count / 1e6:5.2f} MB, {count / BANDWIDTH * 1e6:4.2f} us")
print(f"an empty kernel: {EMPTY_US[False]:.2f} us; {EMPTY_US[True]:.2f} us if it may start before the last one ends")
latencies = NS | {"a cluster barrier": 1000 * CLUSTER_BARRIER_US}
print(", ".join(f"{name} {ns:.0f} ns" for name, ns in latencies.items()))
FLOOR_US = max(layout_bytes(4096, 8, 256, 8) / BANDWIDTH * 1e6, EMPTY_US[False])

# %% [markdown]
# As in the alignment, the launch takes longer than the memory traffic, except for very many tokens. The lower bound of
# the ladder is therefore the time of an empty kernel. The kernel itself is limited by **latency**, by a chain of
# dependent operations: launch, load of the ids, atomic addition, barrier of all threads that counted, store.
#
# ## 4. The step ladder
#
# All steps process 4096 tokens with top-8 of 256 experts and 8 ranks. `measure` checks a step, also on ids that contain
# -1, then times it for 4096, 1, 64 and 65536 tokens, and for 4096 tokens that all choose the same 8 experts (the
# `skewed` input). Each step predicts the microseconds that it saves at 4096 tokens over the step `after`; both are timed
# interleaved. For the other inputs, the time of the step `after` is in parentheses.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder = Ladder(
    "dispatch_layout_ladder",
    check,
    title="Dispatch layout, step by step: 4096 tokens, top-8 of 256 experts, 8 ranks",
    reference_name="torch",
    config={"num_experts": EXPERTS, "topk": TOPK, "ranks": RANKS},
    size={"tokens": HERE.tokens},
)
us = ladder.median_us  # a step's median time, measured now or recorded
RUNS = {}  # the steps by name: run(ids, outputs)


def bound(run, ids):
    """A call with outputs of its own, poisoned once: a timed call must not allocate."""
    outputs = poisoned(ids)
    return lambda: run(ids, outputs)


def measure(name, run, after=None, predicted_gain_us=None, graph=True, **more):
    """Check and time ``run(ids, outputs)`` for the main size, compared with the step ``after``, and for the others."""
    with ladder.attempt(name, "int64"):
        for which, ids in {**OTHERS, "holes": HOLES}.items():
            wrong = check(run(ids, poisoned(ids)), ids)
            assert not wrong, f"{name}, {OTHER_SIZES.get(which, 'with -1')}: {wrong}"
            if graph and which in OTHER_SIZES:
                stats = None if simulator.ENABLED else kernel_time(bound(run, ids))
                more[f"{which}_us"] = stats and stats.median
        ladder.step(
            name,
            bound(run, IDS),
            dtype="int64",
            after=after,
            predicted_gain_us=predicted_gain_us,
            graph=graph,
            floor_us=FLOOR_US,
            bytes=layout_bytes(HERE.tokens, TOPK, EXPERTS, RANKS),
            operation="layout",
            **more,
        )
        RUNS[name] = run
        mark_if_slower(name)
        print_other_sizes(name, after)


def mark_if_slower(name):
    """Draw the step that was just measured in grey if an earlier one is as fast."""
    earlier = [us(row["step"]) for row in ladder.rows if row["step"] != name and "kernel_us" in row]
    if not simulator.ENABLED and us(name) and us(name) >= min(earlier, default=float("inf")):
        ladder.rows[-1]["slower"] = True


def print_other_sizes(name, before):
    for which, size in OTHER_SIZES.items():
        now, then = us(name, f"{which}_us"), us(before, f"{which}_us") if before else None
        if now:
            print(f"    {size}: {now:.2f} us" + (f" ({then:.2f} us)" if then else ""))


# %% [markdown]
# ### Step 0: torch
#
# **Idea.** The reference. Its `bincount` synchronises with the GPU to read the largest id, so it cannot be captured in
# a CUDA graph, and only its call time is measured. `scatter_add_` counts without synchronising. A `TorchDispatchMode`
# counts the operations; each launches at least one kernel.


# %%
def torch_layout(ids, outputs=None):
    experts = ids.where((ids >= 0) & (ids < EXPERTS), EXPERTS)  # one more expert, on one more rank, for no expert
    flat = experts.flatten()
    per_expert = torch.zeros(EXPERTS + 1, dtype=torch.int32, device=DEVICE)
    per_expert.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.int32))
    is_in = torch.zeros(len(ids), RANKS + 1, dtype=torch.bool, device=DEVICE)
    is_in.scatter_(1, experts // (EXPERTS // RANKS), True)
    is_in = is_in[:, :RANKS].contiguous()
    return is_in.sum(dim=0, dtype=torch.int32), per_expert[:EXPERTS], is_in


with OpCounter() as count:
    torch_layout(IDS)
print(len(count.names), "operations:", ", ".join(count.names))
measure("torch, bincount", lambda ids, outputs: dispatch_layout(ids, RANKS, EXPERTS), graph=False, slower=True)
measure("torch", torch_layout, operations=len(count.names))

# %% [markdown]
# One token causes almost no work, but the same launches. At 4096 tokens more than half of the time is work.
#
# ### Step 1: global atomics
#
# **Idea.** One kernel with one thread per token. The thread reads its token's ids in a loop and atomically adds 1 to
# each expert's counter in global memory. It collects the ranks in a bit mask, so that a rank that occurs twice is
# counted once. Then it writes the flags and adds 1 to the counter of each rank in the mask. The counters must be zeroed
# first, by two more launches.
#
# **Predicted gain.** Torch's time, less three launches, `topk` dependent loads, and the contention: each of the 8 rank
# counters receives an addition from most tokens. The model assumes that the L2 performs one addition per nanosecond to
# one address.


# %%
@cache
def make_global_atomics(num_experts, ranks, topk):
    experts_of_rank = num_experts // ranks

    @cuda.jit
    def kernel(topk_idx, per_rank, per_expert, is_token_in_rank, num_tokens):
        token = int64(cuda.grid(1))
        if token < num_tokens:
            bits = int32(0)
            for k in range(topk):
                expert = topk_idx[token * topk + k]
                if 0 <= expert and expert < num_experts:
                    atom_add_s32(per_expert, int32(expert), 1)
                    bits = int32(bits | (int32(1) << int32(int32(expert) // experts_of_rank)))
            for rank in range(ranks):
                flag = int32((bits >> rank) & 1)
                is_token_in_rank[token * ranks + rank] = uint8(flag)
                if flag:
                    atom_add_s32(per_rank, rank, 1)

    return kernel


def run_global_atomics(ids, outputs):
    per_rank, per_expert, _ = outputs
    per_rank.zero_(), per_expert.zero_()
    kernel = make_global_atomics(EXPERTS, RANKS, TOPK)
    launch(kernel, -(-len(ids) // THREADS), THREADS, ids, *outputs, len(ids))
    return outputs


CONTENTION_US = 4096 * ranks_of_a_token() / 8 / 1000
chain_us = 3 * EMPTY_US[False] + 8 * LOAD_US + GLOBAL_US
print(f"launches and loads {chain_us:.1f} us, contention at each rank's counter {CONTENTION_US:.1f} us")
gain_us = (us("torch") or 0) - chain_us - CONTENTION_US
measure("global atomics", run_global_atomics, after="torch", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
one_us, main_us, many_us, skewed_us = (
    us("global atomics", which) for which in ("one_us", "kernel_us", "many_us", "skewed_us")
)
known = None not in (one_us, main_us, many_us, skewed_us)
say(
    "**Explanation.** One token, without contention, takes {one:.1f} us instead of the predicted {chain:.1f}. From 4096 to "
    "65536 tokens the time grows by {ns:.1f} ns per addition to a rank's counter; the model assumes one. If all tokens have "
    "the same experts, the kernel takes {ratio:.1f} times as long.",
    one=one_us,
    chain=chain_us,
    ns=1000 * (many_us - main_us) / ((65536 - 4096) * ranks_of_a_token() / 8) if known else None,
    ratio=skewed_us / main_us if known else None,
)

# %% [markdown]
# **Exercise 1.** Each thread of this kernel counts one token for the ranks that hold its experts; there are as many
# threads as tokens. `topk_idx` is `[tokens, topk]`, -1 stands for no expert, and `per_rank`, a count per rank, is zero
# at first. Each rank holds `experts_per_rank` consecutive experts. Some counts are too large. Find the mistake, and
# repair the kernel.


# %%
@cuda.jit
def count_for_ranks(topk_idx, per_rank, experts_per_rank):
    token = cuda.grid(1)
    previous = int32(-1)
    for k in range(topk_idx.shape[1]):
        expert = int32(topk_idx[token, k])
        if expert >= 0:
            rank = expert // experts_per_rank
            if rank != previous:
                cuda.atomic.add(per_rank, rank, int32(1))
            previous = rank


exercise("dispatch_layout-1").check(count_for_ranks)

# %% [markdown]
# ### Step 2: shared atomics
#
# **Bottleneck.** Global atomics to the same address are serialised.
#
# **Idea.** Each CTA counts in its own **shared memory** (`count_token` in the folded cell, with `cuda.atomic.add`). At
# the end it adds its counts to the global counters, one global atomic per counter instead of one per token (the last
# loop of `make_shared_atomics`).
#
# **Predicted gain.** The contention of step 1, which is what its time grows by from one token to 4096. Each token now
# costs `2 topk` shared atomics, and each CTA one more round of global atomics.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def count_token(topk_idx, is_token_in_rank, counts, token, num_experts, ranks, topk):
    """What a thread does for one token; ``counts`` holds the experts' counters, and after them the ranks'."""
    bits = int32(0)
    for k in range(topk):
        expert = topk_idx[token * topk + k]
        if 0 <= expert and expert < num_experts:
            cuda.atomic.add(counts, int32(expert), int32(1))
            bits = int32(bits | (int32(1) << int32(int32(expert) // (num_experts // ranks))))
    for rank in range(ranks):
        flag = int32((bits >> rank) & 1)
        is_token_in_rank[token * ranks + rank] = uint8(flag)
        if flag:
            cuda.atomic.add(counts, int32(num_experts + rank), int32(1))


@cache
def make_shared_atomics(num_experts, ranks, topk):
    numbers = num_experts + ranks

    @cuda.jit
    def kernel(topk_idx, per_rank, per_expert, is_token_in_rank, num_tokens):
        counts = cuda.shared.array(numbers, int32)
        t, threads = int32(cuda.threadIdx.x), int32(cuda.blockDim.x)
        for i in range(t, numbers, threads):
            counts[i] = int32(0)
        cuda.syncthreads()
        token = int64(cuda.blockIdx.x * threads + t)
        if token < num_tokens:
            count_token(topk_idx, is_token_in_rank, counts, token, num_experts, ranks, topk)
        cuda.syncthreads()
        for i in range(t, numbers, threads):
            if counts[i]:
                if i < num_experts:
                    atom_add_s32(per_expert, i, counts[i])
                else:
                    atom_add_s32(per_rank, int32(i - num_experts), counts[i])

    return kernel


def run_shared_atomics(ids, outputs):
    per_rank, per_expert, _ = outputs
    per_rank.zero_(), per_expert.zero_()
    kernel = make_shared_atomics(EXPERTS, RANKS, TOPK)
    launch(kernel, -(-len(ids) // THREADS), THREADS, ids, *outputs, len(ids))
    return outputs


contention_us = main_us - one_us if known else CONTENTION_US
gain_us = contention_us - 2 * 8 * SHARED_US - GLOBAL_US
measure("shared atomics", run_shared_atomics, after="global atomics", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
before_us, after_us = (
    [us(step, which) for which in ("one_us", "kernel_us")] for step in ("global atomics", "shared atomics")
)
known = None not in (*before_us, *after_us)
say(
    "**Explanation.** From one token to 4096 the time now grows by {now:.1f} us instead of {before:.1f}. But one token "
    "takes {more:.1f} us more: the kernel has two more barriers, and each CTA clears 264 counters and adds them to the "
    "global ones. The model counts only the atomics of this, {model:.1f} us.",
    now=after_us[1] - after_us[0] if known else None,
    before=before_us[1] - before_us[0] if known else None,
    more=after_us[0] - before_us[0] if known else None,
    model=2 * 8 * SHARED_US + GLOBAL_US,
)

# %% [markdown]
# **Exercise 2.** `flags` is `[tokens, 8]`: 1 for each rank that a token goes to, else 0. CTAs of 64 threads add the
# flags to `per_rank`, one token per thread; the last warp may have fewer than 32 tokens. Let each warp add at most once
# to each rank's counter, with `cuda.ballot_sync` and `cuda.popc`.


# %%
@cuda.jit
def add_flags(flags, per_rank):
    token = cuda.grid(1)
    if token < flags.shape[0]:
        for rank in range(8):
            if flags[token, rank] != 0:
                cuda.atomic.add(per_rank, rank, int32(1))


exercise("dispatch_layout-2").check(add_flags)

# %% [markdown]
# ### Step 3: private counters, as in DeepEP's first version
#
# **Idea.** **Each thread has its own counters**, so no addition needs to be atomic. Shared memory cannot hold 256
# counters for each of 256 threads, so the counters are partitioned over CTAs:
#
# - Some CTAs count 32 experts each, in a shared-memory table of 256 threads x 32 experts.
# - The remaining CTAs count 8 ranks each, in a table of 256 x 8. They also write the flags.
#
# Each CTA reads *all* tokens, 256 per iteration, one per thread, and counts only its own experts or ranks. A
# **reduction** over the columns follows: each of the first 32 (or 8) threads sums one column of 256 counters.
#
# With 4 threads and 4 experts per CTA:

# %%
torch.manual_seed(0)
draw.private_counters(uniform_routing(8, 8, 2, "cpu"), num_experts=8, experts_of_block=4, threads=4)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
CTAS = deepep_layout.num_blocks(256, 8)
print(
    f"256 experts, 8 ranks: {deepep_layout.num_blocks(256, 0)} CTAs count experts, "
    f"{CTAS - deepep_layout.num_blocks(256, 0)} counts ranks"
)
for experts, ranks in ((256, 8), (64, 4), (384, 8), (256, 16)):
    print(f"    {experts} experts, {ranks:2} ranks: {deepep_layout.num_blocks(experts, ranks)} CTAs")
print(f"tables: {256 * 32 * 4} bytes for experts, {256 * 8 * 4} for ranks")

# %% [markdown]
# Because each global counter belongs to exactly one CTA, nothing must be zeroed and one launch is sufficient. Our Numba
# port of the kernel:

# %%
Markdown("```python\n" + inspect.getsource(deepep_layout.make_layout_kernel) + "```")

# %% [markdown]
# **Bank conflicts.** Shared memory has 32 **banks** of 4-byte words; word `w` is in bank `w % 32`. In one wavefront a
# bank serves one word. If the 32 lanes of a warp access different words of one bank, the access needs several
# wavefronts: a **bank conflict**. A row of the table has 32 words, so column `j` of *every* row is in bank `j`. The
# figure uses 8 banks:

# %%
draw.banks(8, (8, 9))

# %% [markdown]
# The accesses to the table:
#
# - **Clearing** goes down the columns: all lanes of a warp clear column 0, then column 1, and so on. The counting of
#   ranks also goes down the columns, in rows of 8 words.
# - **Counting experts**: each lane accesses the column of its own token's expert. Lanes with the same expert conflict.
# - **The reduction** reads along a row, without conflicts.
#
# The next cell counts the wavefronts of one CTA, with rows of 32 and of 33 words. `CLEARING_US` is the clearing's time.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def wavefronts_of_counting(ids, width, experts_of_block=32, threads=256):
    """Wavefronts of the additions of the CTA with the most: each reads its counter and writes it."""
    ids = ids.cpu()[: len(ids) // 32 * 32].view(-1, 32, ids.shape[1])  # warps' tokens: [warp, lane, k]
    worst = 0
    for begin in range(0, EXPERTS, experts_of_block):
        lane = torch.arange(len(ids) * 32).view(-1, 32, 1) % threads
        bank = (lane * width + ids - begin) % 32
        mine = (ids >= begin) & (ids < begin + experts_of_block)
        seen = torch.zeros(len(ids), 32, ids.shape[2], dtype=torch.int64).scatter_add_(1, bank, mine.long())
        worst = max(worst, 2 * int(seen.amax(dim=1).sum()))
    return worst


def wavefronts_of_cta(ids, width, columns=32, threads=256):
    """Wavefronts of a CTA that counts experts: ``{phase: number}``."""
    warps = threads // 32
    clearing = sum(draw.wavefronts([t * width + j for t in range(32)]) for j in range(columns)) * warps
    reduction = sum(draw.wavefronts([i * width + t for t in range(columns)]) for i in range(threads))
    counting = wavefronts_of_counting(ids, width, columns, threads)
    return {"clearing": clearing, "counting": counting, "reduction": reduction}


for which, ids in {"": IDS, ", the same experts for all": OTHERS["skewed"]}.items():
    for width in (32, 33):
        found = ", ".join(f"{phase} {number}" for phase, number in wavefronts_of_cta(ids, width).items())
        print(f"wavefronts of {len(ids)} tokens{which}, rows of {width}: {found}")
CLEARING = {width: wavefronts_of_cta(IDS, width)["clearing"] for width in (32, 33)}
CLEARING_US = {width: number / CLOCK_MHZ for width, number in CLEARING.items()}
print(f"the clearing alone: {CLEARING_US[32]:.1f} us with rows of 32, {CLEARING_US[33]:.2f} us with rows of 33")

# %% [markdown]
# **Predicted gain.** Negative: the time of step 2, less the launch, the clearing, the loop over the tokens, and the
# reduction. 4096 tokens are 16 iterations of 8 loads per thread. A branch and possibly a counter update separate the
# loads, so the model assumes that each load waits for the previous one. The reduction is 256 dependent additions of
# about 4 cycles.

# %%
LOOP_US = 4096 / 256 * 8 * LOAD_US
REDUCTION_US = 256 * 4 / CLOCK_MHZ
print(
    f"clearing {CLEARING_US[32]:.1f}, loop {LOOP_US:.1f}, reduction {REDUCTION_US:.1f}, launch {EMPTY_US[False]:.1f} us"
)


def run_deepep(ids, outputs):
    return deepep_layout.get_dispatch_layout(ids, EXPERTS, RANKS, out=outputs)


gain_us = (us("shared atomics") or 0) - (EMPTY_US[False] + CLEARING_US[32] + LOOP_US + REDUCTION_US)
measure("private counters", run_deepep, after="shared atomics", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
one_us, main_us, many_us, skewed_us = (
    us("private counters", which) for which in ("one_us", "kernel_us", "many_us", "skewed_us")
)
known = None not in (one_us, main_us, many_us, skewed_us)
say(
    "**Explanation.** Each of the {ctas} CTAs reads all ids, and only {ctas} of the {sms} SMs are used. More tokens mean "
    "more iterations, not more CTAs. One token takes {one:.1f} us, whatever there is to count: launch, clearing and "
    "reduction. Each further iteration of 256 tokens takes {iteration:.2f} us, {ratio:.1f} times as long as eight dependent "
    "L2 loads, so the model misses a cost. Tokens that all have the same experts take {skewed:.2f} times as long as others, so "
    "bank conflicts of the counting are not it.",
    ctas=CTAS,
    sms=LIMITS.sm_count,
    one=one_us,
    iteration=(many_us - one_us) / (65536 / 256 - 1) if known else None,
    ratio=(many_us - one_us) / (65536 / 256 - 1) / (8 * LOAD_US) if known else None,
    skewed=skewed_us / main_us if known else None,
)

# %% [markdown]
# The next three steps change the port one property at a time to narrow the cost down. `changed` replaces lines of the
# port's source; the outputs show them.
#
# ### Step 4: rows of 33 words
#
# **Idea.** Pad each row by one word. Column `j` of row `t` is then in bank `(t + j) % 32`, and a column access is free
# of conflicts. (The rank table gets rows of 9 words.)
#
# **Predicted gain.** The clearing's time with rows of 32 words, less that with 33.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def changed(*changes):
    """Return the ``get_dispatch_layout`` of a copy of the port's module with some lines changed."""
    function = changed_module(deepep_layout, *changes).get_dispatch_layout
    return lambda ids, outputs: function(ids, outputs[1].numel(), outputs[0].numel(), out=outputs)


def show(*changes):
    for old, new in changes:
        for sign, text in (("-", old), ("+", new)):
            print(*(f"{sign} {line}" for line in textwrap.dedent(text).splitlines()), sep="\n")


WIDER = (
    ("rows = cuda.shared.array((threads, EXPERTS_PER_BLOCK), int32)", "rows = cuda.shared.array((threads, 33), int32)"),
    ("rows = cuda.shared.array((threads, RANKS_PER_BLOCK), int32)", "rows = cuda.shared.array((threads, 9), int32)"),
)
show(*WIDER)

# %%
gain_us = CLEARING_US[32] - CLEARING_US[33]
measure("rows of 33 words", changed(*WIDER), after="private counters", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The clearing does not depend on the number of tokens, so the saving should be the same for all sizes.
# For 1 and 64 tokens about half of it is measured. (Hypothesis: stores are asynchronous, so part of the wavefronts was
# already hidden.) From 4096 tokens on there is no gain; 4096 and 65536 uniform tokens are slightly slower.
#
# A possible reason is that the CTA that counts ranks is the slowest one there. Padding to 9 words removes most of its
# bank conflicts without a gain, so something else must limit it.
#
# **Exercise 3.** One CTA of 64 threads counts the experts of 64 tokens, one `ids[t]` per thread, out of 32 experts.
# Padding would remove the bank conflicts of the clearing, but takes memory. Keep a row of 32 words for each thread, and
# clear the rows without bank conflicts. What must then separate clearing and counting?


# %%
@cuda.jit
def count_experts(ids, per_expert):
    rows = cuda.shared.array((64, 32), int32)
    t = cuda.threadIdx.x
    for j in range(32):
        rows[t, j] = int32(0)
    rows[t, ids[t]] += int32(1)
    cuda.syncthreads()
    if t < 32:
        total = int32(0)
        for i in range(64):
            total = int32(total + rows[i, t])
        per_expert[t] = total


exercise("dispatch_layout-3").check(count_experts)

# %% [markdown]
# ### Step 5: the same kernel with atomics
#
# **Idea.** Steps 2 and 3 differ in more than private counters against atomics. To compare only these, this variant
# keeps the CTAs and the loop of step 3, but gives each CTA a single row of counters and adds to it atomically. The
# clearing and the reduction almost disappear; one barrier is added.
#
# **Predicted gain.** Clearing and reduction disappear. In the CTA that counts ranks all threads now add to the same 8
# words. The model serialises these additions, one cycle each, which is a loss.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ATOMIC = (
    ("cuda.shared.array((threads, EXPERTS_PER_BLOCK), int32)", "cuda.shared.array((1, EXPERTS_PER_BLOCK), int32)"),
    ("cuda.shared.array((threads, RANKS_PER_BLOCK), int32)", "cuda.shared.array((1, RANKS_PER_BLOCK), int32)"),
    (
        "        for j in range(EXPERTS_PER_BLOCK):\n            rows[t, j] = int32(0)\n",
        "        if t < EXPERTS_PER_BLOCK:\n            rows[0, t] = int32(0)\n        cuda.syncthreads()\n",
    ),
    (
        "        for j in range(RANKS_PER_BLOCK):\n            rows[t, j] = int32(0)\n",
        "        if t < RANKS_PER_BLOCK:\n            rows[0, t] = int32(0)\n        cuda.syncthreads()\n",
    ),
    ("rows[t, int32(expert - begin)] += int32(1)", "cuda.atomic.add(rows, (0, int32(expert - begin)), int32(1))"),
    ("rows[t, j] += flag", "cuda.atomic.add(rows, (0, j), flag)"),
    ("for i in range(threads):", "for i in range(1):"),
)
show(*ATOMIC)

# %%
SERIALISED_US = 4096 * 8 / CLOCK_MHZ
print(f"serialised additions to the rank counters: {SERIALISED_US:.1f} us")
gain_us = CLEARING_US[32] + REDUCTION_US - SERIALISED_US
measure("the same with atomics", changed(*ATOMIC), after="private counters", predicted_gain_us=gain_us)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def private_or_atomic():
    """Return ``{size: times}`` of private counters, of rows of 33 words, and of atomics; {} without times."""
    found = {}
    for which in ("kernel_us", *(f"{name}_us" for name in OTHER_SIZES)):
        times = [us(name, which) for name in ("private counters", "rows of 33 words", "the same with atomics")]
        if all(times):
            found[OTHER_SIZES.get(which.removesuffix("_us"), "4096 tokens")] = times
    return found


def faster_of(private, atomic):
    """Return the name of the shorter of two times, or "neither" if they differ by less than the noise."""
    if abs(private / atomic - 1) < NOISE:
        return "neither"
    return "private counters" if private < atomic else "atomics"


for size, (private, wide, atomic) in private_or_atomic().items():
    print(
        f"{size}: private {private:.2f}, in rows of 33 {wide:.2f}, atomic {atomic:.2f} us; "
        f"faster: {faster_of(min(private, wide), atomic)}"
    )

# %% [markdown]
# **Explanation.** Private counters have a constant cost: clearing and reducing a table with 256 times as many rows. For
# 1 and 64 tokens this is more than half of the time. Comparing with step 4, where the clearing has few wavefronts,
# shows that the reduction costs several times the prediction; a likely reason is that each addition also waits for its
# load from shared memory.
#
# The predicted contention at the rank counters does not appear: from 4096 tokens on both kernels take the same time. We
# have not isolated the reason.
#
# ### Step 6: 4 experts per CTA
#
# **Idea.** A later version of DeepEP uses 4 experts per CTA instead of 32, so 65 CTAs run instead of 9.
#
# **Predicted gain.** With rows of 4 words one eighth of the counters must be cleared, with fewer bank conflicts. The
# loop over all tokens and the CTA that counts ranks do not change.

# %%
FOUR = (("EXPERTS_PER_BLOCK, RANKS_PER_BLOCK = 256, 32, 8", "EXPERTS_PER_BLOCK, RANKS_PER_BLOCK = 256, 4, 8"),)
show(*FOUR)
clearing_us = sum(draw.wavefronts([t * 4 + j for t in range(32)]) for j in range(4)) * 8 / CLOCK_MHZ
gain_us = CLEARING_US[32] - clearing_us
measure("4 experts per CTA", changed(*FOUR), after="private counters", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** For 1 and 64 tokens the saving is about that of step 4, because the clearing needs fewer wavefronts.
# For more tokens the gain is at most a few percent. Hypothesis: the CTA that counts ranks is the slowest, since it
# divides each id by a number that is only known at run time and keeps its flags in local memory.
#
# More CTAs do not help while each of them reads all tokens. They should partition the tokens instead of the counters.
# Then their counts must be summed, for which step 2 needed zeroed counters.
#
# ### Step 7: one cluster
#
# **Bottleneck.** Two of the three launches of step 2 only write zeros. The same call without them (its counts are wrong,
# because they are added to those of earlier calls):


# %%
def without_zeroing(ids, outputs):
    kernel = make_shared_atomics(EXPERTS, RANKS, TOPK)
    launch(kernel, -(-len(ids) // THREADS), THREADS, ids, *outputs, len(ids))


calls = {"three launches": bound(run_shared_atomics, IDS), "one launch": bound(without_zeroing, IDS)}
zeroing = ladder.times("zeroing", calls)
ZEROING_US = zeroing["three launches"] - zeroing["one launch"] if zeroing else 2 * EMPTY_US[False]

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The two launches take {us:.2f} us, {part:.0f} % of the time.",
    us=zeroing and ZEROING_US,
    part=zeroing and 100 * ZEROING_US / zeroing["three launches"],
)

# %% [markdown]
# **Idea.** A **thread block cluster** is a group of CTAs (up to 8 portably) that are co-scheduled, have a common
# barrier, and can access each other's shared memory (**distributed shared memory**). One cluster of 8 CTAs partitions
# the tokens. Each CTA counts into its own shared memory, as in step 2. Then each CTA reduces one eighth of the
# counters: every CTA stores its counts of that eighth into the reducing CTA's shared memory, a cluster barrier follows,
# and the reducing CTA sums and stores the results. Nothing must be zeroed by a separate launch, and concurrent launches
# share no scratch memory.
#
# **Predicted gain.** Over step 2: the two zeroing launches, less two cluster barriers.


# %%
@cache
def make_cluster(num_experts, ranks, topk, threads):
    numbers = num_experts + ranks
    share = -(-numbers // CLUSTER_SIZE)  # counters that a CTA sums
    all_shares = CLUSTER_SIZE * share

    @cuda.jit
    def kernel(topk_idx, per_rank, per_expert, is_token_in_rank, num_tokens):
        counts = cuda.shared.array(numbers, int32)
        shares = cuda.shared.array(all_shares, int32)  # this CTA's share, from each CTA
        t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
        barrier_cluster_arrive()  # this CTA has started: others may store into its memory
        for i in range(t, numbers, threads):
            counts[i] = int32(0)
        cuda.syncthreads()
        token = int64(cta * threads + t)
        while token < num_tokens:
            count_token(topk_idx, is_token_in_rank, counts, token, num_experts, ranks, topk)
            token += CLUSTER_SIZE * threads
        cuda.syncthreads()
        barrier_cluster_wait()
        for i in range(t, numbers, threads):
            to = int32(i // share)
            st_cluster_s32(shares, int32(cta * share + i - to * share), to, counts[i])
        cuda.syncwarp()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if t < share and cta * share + t < numbers:
            total, i = int32(0), int32(cta * share + t)
            for other in range(CLUSTER_SIZE):
                total = int32(total + shares[other * share + t])
            if i < num_experts:
                per_expert[i] = total
            else:
                per_rank[int32(i - num_experts)] = total

    return kernel


diff(make_shared_atomics, make_cluster)


# %%
def run_cluster(ids, outputs):
    kernel = make_cluster(EXPERTS, RANKS, TOPK, 2 * THREADS)
    launch(kernel, CLUSTER_SIZE, 2 * THREADS, ids, *outputs, len(ids), cluster=CLUSTER_SIZE)
    return outputs


measure("one cluster", run_cluster, after="shared atomics", predicted_gain_us=ZEROING_US - 2 * CLUSTER_BARRIER_US)

# %% [markdown]
# **Explanation.** The prediction leaves out the other differences: step 2 has 16 CTAs and global atomics, this kernel
# has 8 CTAs, which store their counts into distributed shared memory. For 65536 tokens step 2 is much faster: it has 256
# CTAs on all SMs, this kernel has 8. Here each thread has 16 iterations of 8 dependent loads. The next step shortens
# these, but still uses only 8 SMs.
#
# **Exercise 4.** The 8 CTAs of a cluster, of 32 threads each, have 8 counts each. CTA `c` must store in `sums[c]` the
# sum of `counts[8 * cta + c]` over all CTAs. Each CTA stores its counts into the shared memory of the CTAs that sum
# them. The kernel has two synchronisation errors. Repair them.


# %%
@cuda.jit
def sum_counts(counts, sums):
    parts = cuda.shared.array(8, int32)
    t, cta = int32(cuda.threadIdx.x), int32(cluster_ctarank())
    if t < 8:
        st_cluster_s32(parts, cta, t, counts[8 * cta + t])
    cuda.syncthreads()
    if t == 0:
        total = int32(0)
        for other in range(8):
            total = int32(total + parts[other])
        sums[cta] = total


exercise("dispatch_layout-4").check(sum_counts)

# %% [markdown]
# ### Step 8: a group of lanes per token
#
# **Idea.** The package's kernel uses the cluster of step 7 and distributes the tokens differently. A **group** of 8
# neighbouring lanes processes one token, one id per lane, so all ids of a token are loaded at once and the loads are
# coalesced. Each lane issues the loads for four tokens before it uses the first. Three shuffles combine the group's
# rank masks, and each lane writes the flag of one rank. Each lane counts the tokens of its rank in a register and adds
# the count once at the end.
#
# **Predicted gain.** One round of loads instead of 8 for 4096 tokens, and 8 fewer shared atomics per token.

# %%
MANY_THREADS = 4 * THREADS


def run_groups(ids, outputs):
    kernel = make_layout_kernel(EXPERTS, RANKS, TOPK, MANY_THREADS)
    options = {"launch_bounds": MANY_THREADS, "cluster": CLUSTER_SIZE}
    launch(kernel, CLUSTER_SIZE, MANY_THREADS, ids, *outputs, np.uint32(len(ids)), **options)
    return outputs


measure("groups of lanes", run_groups, after="one cluster", predicted_gain_us=7 * LOAD_US + 8 * SHARED_US)

# %% [markdown]
# For 65536 tokens the time drops to little more than half.
#
# ### Step 9: the package's function
#
# **Idea.** `moe_numba.expert_parallel.get_dispatch_layout` launches this kernel with **programmatic dependent launch**
# (notebook 01): its CTAs start and clear their counters while the preceding kernel finishes. The function supports 1 to
# 8 ranks, up to 1024 experts and a `topk` of up to 32, and ignores invalid ids.
#
# **Predicted gain.** The saving of programmatic dependent launch for an empty kernel.


# %%
def run_package(ids, outputs):
    return get_dispatch_layout(ids, EXPERTS, RANKS, out=outputs)


measure("final", run_package, after="groups of lanes", predicted_gain_us=EMPTY_US[False] - EMPTY_US[True])

# %% [markdown]
# **Explanation.** The saving is much larger than for an empty kernel, which has no work to overlap. This kernel starts
# its cluster, arrives at the first cluster barrier and clears its counters before it waits for the preceding kernel,
# and it allows the next launch as soon as its tokens are counted, before the reduction. After another kernel than
# itself the gain may differ.
#
# ### Negative tests: wrong results must be rejected
#
# Three wrong results: counts instead of flags (a 2 is also true, but wrong for a caller that sums the flags),
# `num_tokens_per_rank` counted once per expert, and a missing last token.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def count_experts_for_ranks(ids, outputs):
    run_package(ids, outputs)
    outputs[0].copy_(outputs[1].view(RANKS, -1).sum(dim=1))
    return outputs


def without_last_token(ids, outputs):
    run_package(ids[:-1], (*outputs[:2], outputs[2][:-1]))
    return outputs


trial = Ladder("dispatch_layout_trial", check)
counts_for_flags = changed(("uint8(flag)", "uint8(is_in_rank[j])"))
for name, run in (
    ("counts for flags", counts_for_flags),
    ("once per expert", count_experts_for_ranks),
    ("last token missing", without_last_token),
):
    trial.step(name, bound(run, IDS), expect_wrong=True)

# %% [markdown]
# ## 5. The sweep over tokens
#
# One line per approach, from 1 to 65536 tokens; "DeepEP's kernel" is step 3, with atomics step 5, and `moe_numba` is
# step 9.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
SWEPT = {
    "moe_numba": "final",
    "one cluster": "one cluster",
    "DeepEP's kernel": "private counters",
    "DeepEP's kernel, atomics": "the same with atomics",
    "global atomics": "global atomics",
    "torch": "torch",
}
SWEPT = {line: step for line, step in SWEPT.items() if step in RUNS}  # those that this GPU can run


def sweep():
    """Kernel times over tokens, ``{line: {tokens: statistics}}``; None in the simulator."""
    found = {line: {} for line in SWEPT}
    for tokens in HERE.sweep:
        ids = uniform_routing(tokens, EXPERTS, TOPK)
        assert not any(check(RUNS[step](ids, poisoned(ids)), ids) for step in SWEPT.values())
        times = kernel_times({line: bound(RUNS[step], ids) for line, step in SWEPT.items()}, replays=15)
        for line, stats in times.items():
            found[line][tokens] = stats and {
                "median": round(stats.median, 3),
                "p10": round(stats.p10, 3),
                "p90": round(stats.p90, 3),
            }
    return None if simulator.ENABLED else found


SWEEP = sweep()
if SWEEP:
    next(row for row in ladder.rows if row["step"] == "final")["sweep"] = SWEEP
    CAPTION = plots.caption(records.environment(), "measured now on")
else:
    SWEEP = (ladder.row("final") or {}).get("sweep")
    CAPTION = plots.caption(ladder.record) if SWEEP else ""
LINES = {line: {int(tokens): times for tokens, times in points.items()} for line, points in (SWEEP or {}).items()}
if LINES:
    floor = {n: max(layout_bytes(n, 8, 256, 8) / BANDWIDTH * 1e6, EMPTY_US[True]) for n in LINES["torch"]}
    picture = plots.sweep_figure(LINES, floor=floor, title="The dispatch layout over tokens", caption=CAPTION)
else:
    picture = print("The sweep over tokens has not been recorded yet.")
picture

# %% jupyter={"source_hidden": true} tags=["hide-input"]
for tokens in LINES["moe_numba"] if LINES else ():
    own, deepep = (LINES[line][tokens]["median"] for line in ("moe_numba", "DeepEP's kernel"))
    print(f"{tokens:6} tokens: {own:6.2f} us; DeepEP's kernel {deepep:7.2f} us, {deepep / own:.1f} times as long")

# %% [markdown]
# The sweep does not include step 2. Up to 4096 tokens it is much slower than the package's kernel; at 65536 tokens,
# with 256 CTAs, it takes about half as long (see the times printed by steps 2 and 9). In the sweep, with other ids and
# outputs, global atomics take up to 1.7 times as long as in step 1; the cause is not known. We keep the cluster:
# sending 65536 bfloat16 rows of 7168 numbers takes milliseconds over NVLink.
#
# ### The whole ladder
#
# All steps once more, measured interleaved.

# %%
ladder.measure_all()

# %%
ladder.plot(floor_us=FLOOR_US)

# %% [markdown]
# ## 6. The buffer
#
# The layout needs only one GPU. Dispatch and combine need memory that other GPUs can access. A **buffer** is allocated
# once, before the first dispatch.
#
# **Rank numbering.** A node has up to 8 GPUs connected by NVLink. The rank determines the node, `rdma_rank`, and the
# GPU within the node, `nvl_rank`:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PEERS = draw.PEERS  # DeepEP's NUM_MAX_NVL_PEERS
for rank in (0, 5, 8, 15):
    print(f"rank {rank:2} of 16: rdma_rank {rank // PEERS}, nvl_rank {rank % PEERS}")
print(
    f"16 ranks: num_rdma_ranks {max(1, 16 // PEERS)}, num_nvl_ranks {min(16, PEERS)}; "
    f"4 ranks: num_rdma_ranks {max(1, 4 // PEERS)}, num_nvl_ranks {min(4, PEERS)}"
)

# %% [markdown]
# **One allocation.** Each rank calls `cudaMalloc` once. The allocation has four parts:
#
# 1. the data, `num_nvl_bytes`, where tokens arrive;
# 2. barrier signals, one int per GPU of the node, initially zero;
# 3. `buffer_ptrs`, the addresses of all GPUs' buffers;
# 4. `barrier_signal_ptrs`, the addresses of all GPUs' barrier signals.
#
# To scale, with 2 GB of data as in DeepEP's test:

# %%
draw.buffer_map(2 * 10**9)

# %% [markdown]
# (A second buffer, of `num_rdma_bytes`, is for traffic between nodes. They serve two networks and are no double buffer,
# as the article calls them.)
#
# **IPC handles.** A device address is valid in one process only. CUDA IPC (inter-process communication) shares
# allocations: the owner creates a 64-byte **handle** (`cudaIpcGetMemHandle`), the ranks exchange the handles
# (`all_gather_object`), and each process opens those of the node's other GPUs (`cudaIpcOpenMemHandle` with
# `cudaIpcMemLazyEnablePeerAccess`). Opening maps the memory into the process and returns an address, which kernels can
# load from and store to over NVLink. This is what DeepEP's `sync` does. It then copies both lists of addresses into
# parts 3 and 4, where kernels can read them.
#
# A process cannot open its own handle, so `across_processes` in the folded cell starts a second process. Its kernel
# `store_into_peer` converts `buffer_ptrs[peer]` to a pointer and stores there, into this process's buffer. In the
# simulator all ranks run in one process; a **registered** buffer has an address that is valid for the kernels of all
# simulated ranks.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def store_into_peer(buffer_ptrs, mine, peer, value):
    theirs = pointer_from_address(buffer_ptrs[peer], mine)
    theirs[cuda.threadIdx.x] = value + cuda.threadIdx.x


PARTS = draw.buffer_parts(1024)
BUFFER_BYTES = sum(size for _, size in PARTS.values())
SECOND_PROCESS = """
import sys
import moe_numba, cupy, torch
from numba import cuda
from moe_numba.runtime.launch import launch
from moe_numba.ptx.memory import pointer_from_address

exec(compile({kernel!r}, "notebook", "exec"))
mine = torch.zeros(8, dtype=torch.int32, device="cuda")
address = cupy.cuda.runtime.ipcOpenMemHandle(bytes.fromhex(sys.argv[1]))
buffer_ptrs = torch.tensor([address, mine.data_ptr()], dtype=torch.uint64, device="cuda")
launch(store_into_peer, 1, 8, buffer_ptrs, mine, 0, 100)
torch.cuda.synchronize()
cupy.cuda.runtime.ipcCloseMemHandle(address)
"""


def across_processes(cupy):
    """Return what a second process's kernel stored into this one's buffer, and whether this process may open its handle."""
    runtime = cupy.cuda.runtime
    address = runtime.malloc(BUFFER_BYTES)
    runtime.memset(address, 0, BUFFER_BYTES)
    runtime.deviceSynchronize()
    handle = runtime.ipcGetMemHandle(address)
    try:
        runtime.ipcCloseMemHandle(runtime.ipcOpenMemHandle(handle))
        own = "opened by its own process"
    except runtime.CUDARuntimeError as error:
        own = f"refused in its own process: {error}"
    program = SECOND_PROCESS.format(kernel=source_of(store_into_peer))
    done = subprocess.run([sys.executable, "-c", program, bytes(handle).hex()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, BUFFER_BYTES, None), 0)
    words = cupy.ndarray(8, cupy.int32, memory).get().tolist()
    runtime.free(address)
    return {"words": words, "handle_bytes": len(handle), "own_process": own}


def across_simulated_ranks():
    """The same between two ranks of the simulator."""
    buffers = [torch.zeros(BUFFER_BYTES // 4, dtype=torch.int32) for _ in range(2)]
    addresses = [simulator.register(buffer, f"the buffer of rank {rank}") for rank, buffer in enumerate(buffers)]
    offset, size = PARTS["buffer_ptrs"]
    for buffer in buffers:
        buffer[offset // 4 : (offset + size) // 4].view(torch.int64)[:2] = torch.tensor(addresses)
    buffer_ptrs = buffers[1][offset // 4 : (offset + size) // 4].view(torch.uint64)
    with simulator.together(), simulator.on_rank(1):
        launch(store_into_peer, 1, 8, buffer_ptrs, buffers[1], 0, 100)
    try:
        with simulator.together(), simulator.on_rank(1):
            launch(store_into_peer, 1, 8, buffer_ptrs, buffers[1], 7, 100)  # there is no rank 7
    except simulator.OutOfBounds as error:
        print("rank 7, which does not exist:", str(error).splitlines()[0])
    for address in addresses:
        simulator.forget(address)
    return {"words": buffers[0][:8].tolist()}


# %% jupyter={"source_hidden": true} tags=["hide-input"]
try:
    import cupy
except ImportError:
    cupy = None

if simulator.ENABLED:
    SHARED = across_simulated_ranks()
    print("rank 1 stored into the buffer of rank 0:", SHARED["words"])
elif cupy is None:
    SHARED = None
    print("CuPy, which has the functions for IPC handles, is not installed; this cell is skipped.")
else:
    try:
        SHARED = across_processes(cupy)
        print(f"a handle of {SHARED['handle_bytes']} bytes;", SHARED["own_process"])
        print("a second process stored into this one's buffer:", SHARED["words"])
    except RuntimeError as error:  # CUDA's own error is one too
        SHARED = None
        print("This system does not share memory between processes:", str(error).strip().splitlines()[-1])
assert SHARED is None or SHARED["words"] == list(range(100, 108))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
# The handle's size goes into the record of the ladder.
if not simulator.ENABLED and SHARED:
    next(row for row in ladder.rows if row["step"] == "final")["ipc"] = {"handle_bytes": SHARED["handle_bytes"]}
ladder.save()

# %% [markdown]
# Both processes use the same GPU here; with two GPUs the same stores travel over NVLink. Two rules: a handle refers to
# a whole `cudaMalloc` allocation, so tensors from torch's caching allocator cannot be shared this way; and the owner
# must not free the memory before all other processes have closed it.
#
# **Counters in pinned host memory.** After the layout the ranks exchange counts, and the *host* needs the total to
# allocate the output. The constructor therefore allocates counters in **pinned** (page-locked) host memory that is
# mapped into the GPU's address space: one for all tokens to be received and one per local expert. They start at -1, and
# the host **polls** until the kernel has stored the number.


# %%
@cuda.jit
def report(counter, value):
    counter[0] = value


counter = torch.full((1,), -1, dtype=torch.int32, pin_memory=not simulator.ENABLED)
launch(report, 1, 1, counter, int(per_rank.sum()))
polls = 1
while counter[0] < 0 and polls < 1_000_000:
    polls += 1
print(f"the host read {int(counter[0])} tokens after {'one poll' if polls == 1 else 'several polls'}")
assert counter[0] == per_rank.sum()

# %% [markdown]
# **Between nodes** DeepEP uses NVSHMEM: every GPU can access the memory that a group of GPUs allocates collectively,
# over the network if necessary. For the normal kernels a group has one GPU per node, those with the same `nvl_rank`.
#
# ## 7. Common bugs
#
# Each bug is a change of one or two lines in the port, run in the simulator on a small input.


# %%
TRUNCATED = ("expert = topk_idx[token * num_topk + j]", "expert = int32(topk_idx[token * num_topk + j])")
FAULTS = {
    "unchanged": (),
    "no barrier before the reduction": (("        cuda.syncthreads()\n", ""),),
    "one row for all threads, without atomics": (("rows[t, int32", "rows[0, int32"),),
    "counters not cleared": (("            rows[t, j] = int32(0)\n", "            pass\n"),),
    "no lower-bound test": (("begin <= expert and expert < end:", "expert < end:"),),
    "ids truncated to 32 bits, as in the article's code": (TRUNCATED,),
}


SMALL_SIZES = dict(DEVICE="cpu", EXPERTS=64, TOPK=4, RANKS=4)


def faults(changes_of):
    """Return the first error that the simulator or the check reports for each change, under several seeds."""
    torch.manual_seed(0)
    ids = uniform_routing(70, 64, 4, "cpu")
    ids[3, 1], ids[5, 0], ids[6, 2] = -1, -1, (1 << 32) + 1  # the last one is no expert either
    found = {}
    for name, changes in changes_of.items():
        found[name] = "correct under five seeds"
        for seed in range(5):
            outputs = layout_outputs(70, 64, 4, "cpu")
            try:
                with simulator.seed(seed, preempt=0.02 if "one row" in name else 0):
                    wrong = check(changed(*changes)(ids, outputs), ids)
            except simulator.SimulatorError as error:
                wrong = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            if wrong:
                found[name] = wrong
                break
    return found


for name, error in in_simulator(faults, FAULTS, constants=SMALL_SIZES).items():
    print(f"{name}: {error}")

# %% [markdown]
# - **No barrier.** A thread sums counters that other threads have not written yet.
# - **One row without atomics.** Two threads read the same value, both add 1, and both store: one addition is lost.
# - **Counters not cleared.** Shared memory is uninitialised.
# - **No lower-bound test.** An expert of an earlier CTA, or -1, becomes a negative index.
# - **Ids truncated to 32 bits.** The article's code converts each 64-bit id to `int`, so an id of 2**32 + 1 becomes
#   expert 1. A gate does not produce such ids, but uninitialised memory may contain them.
#
# ## 8. Sources
#
# - The article: BoLi2001, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), 2025, in
#   Chinese. We compare [its claims](../docs/claims.md#deepep) with our measurements.
# - The code: [DeepEP](https://github.com/deepseek-ai/DeepEP), by DeepSeek: `csrc/kernels/layout.cu`, `csrc/deep_ep.cpp`
#   and `deep_ep/buffer.py` of its first version. Commit `d4f3497` changed 32 experts per CTA to 4.
# - On clusters and IPC: NVIDIA, *CUDA C++ Programming Guide*, "Thread Block Clusters" and "Interprocess Communication";
#   *PTX ISA*: `barrier.cluster`, `st.shared::cluster`.
#
# ## The final kernel
#
# The kernel of `moe_numba.expert_parallel.get_dispatch_layout`.

# %%
from moe_numba.expert_parallel.layout import kernel as final_kernel

Markdown("```python\n" + inspect.getsource(final_kernel) + "\n```")
