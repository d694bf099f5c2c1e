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
# # Dispatch layout: who sends which tokens to whom
#
# So far all experts were on one GPU. DeepSeek-V3's experts need more memory than that, so they are dealt out: with 8
# GPUs each has 32 of the 256. This is **expert parallelism** (EP). Each GPU, called a **rank**, has tokens of its own
# too. A token must travel to the ranks that have its experts (**dispatch**), and the results must travel back
# (**combine**). Before anything can travel, each rank must count: how many of my tokens go where? That is the
# **dispatch layout**, and the subject of this notebook. Notebook 08 sends the tokens, and notebook 09 brings them back.
# The package does both with `moe_numba.expert_parallel.Buffer`, used as DeepEP's.
#
# The notebook follows the first part of a Chinese article,
# [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), which walks through
# [DeepEP](https://github.com/deepseek-ai/DeepEP), DeepSeek's library for dispatch and combine. **Intranode** means: all
# ranks are in one host (节点, a node).
#
# DeepEP has two kinds of kernels.
#
# - The **normal** ones are made for throughput (吞吐量): training, and **prefill**, where a server reads prompts.
#   Inside a host tokens go over **NVLink**, the fast links between GPUs. Between hosts there are two stages: all tokens
#   for a host go over the network (**RDMA**: a network card writes into another machine's memory) to *one* GPU there,
#   which passes them on over NVLink. A small kernel, `notify_dispatch`, first tells everybody how much will come.
# - The **low-latency** ones are made for **decoding**, where a server writes answers, a token at a time. Each GPU sends
#   straight to each other one by RDMA (newer versions may use NVLink inside a host), and nobody is told how much will
#   come. The price is memory: there must be room for the worst case.
#
# This course follows the normal kernels inside a host. As in the other notebooks, everything runs on a GPU, and small
# in a simulator on any computer. Times that you see without a GPU are recorded ones and say so.

# %%
import moe_numba  # before Numba: it decides whether there is a GPU, or the simulator must do

print("the simulator" if moe_numba.simulator.ENABLED else "a GPU", "runs the kernels:", moe_numba.simulator.REASON)

# %%
import inspect
import json
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
from moe_numba.course.articles.deepep import dispatch_layout as deepep_layout
from moe_numba.course.bench import kernel_time, kernel_times, plots, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.bench.topics.dispatch_layout import layout_bytes, layout_outputs, sizes, uniform_routing
from moe_numba.course.draw import dispatch_layout as draw
from moe_numba.course.ladder import Ladder
from moe_numba.course.simulate import changed_module, in_simulator, source_of
from moe_numba.course.source_diff import OpCounter, diff
from moe_numba.expert_parallel import get_dispatch_layout
from moe_numba.expert_parallel.kernels.dispatch_layout import CLUSTER_SIZE, make_layout_kernel
from moe_numba.expert_parallel.reference import dispatch_layout
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.ptx.memory import atom_add_s32, pointer_from_address
from moe_numba.runtime.launch import launch
from moe_numba.runtime.sass import compile_apart

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # most of these kernels have few blocks, on purpose
HERE = sizes()  # DeepSeek-V3's routing on a GPU, a small one in the simulator
DEVICE, EXPERTS, TOPK, RANKS, THREADS = HERE.device, HERE.num_experts, HERE.topk, HERE.ranks, HERE.threads

# %% [markdown]
# ## 1. The problem in one picture
#
# Two ranks with four tokens each, and four experts, two on each rank. On the left stands what the gate has chosen. Each
# rank makes three things of it, for its own tokens:
#
# - `is_token_in_rank`: for each token and each rank, whether the token goes there. **A token is sent to a rank once**,
#   even if two of its experts are there. That saves bytes on the links.
# - `num_tokens_per_rank`: how many tokens go to each rank. The sum of a column of the table before.
# - `num_tokens_per_expert`: how many of its tokens each expert gets. Here two experts of one rank count twice.
#
# (Between hosts there is a fourth, the tokens for each host, `num_tokens_per_rdma_rank`. Inside one it is `None`.)

# %%
torch.manual_seed(0)
SMALL = [uniform_routing(4, 4, 2, "cpu") for _ in range(2)]  # two ranks' tokens
draw.problem(SMALL, num_experts=4)

# %% [markdown]
# ## 2. The reference
#
# The package's reference is a few lines of torch. What is not an expert's number (-1, as a rule: a token that is only
# there to fill a batch) counts nowhere.

# %%
head, _, rest = inspect.getsource(dispatch_layout).partition('    """')
Markdown("```python\n" + head + rest.partition('"""\n')[2] + "```")

# %%
NAMES = "num_tokens_per_rank", "num_tokens_per_expert", "is_token_in_rank"
for rank, topk_idx in enumerate(SMALL):
    found = zip(NAMES, dispatch_layout(topk_idx, 2, 4))
    print(f"rank {rank}:", ", ".join(f"{name} {tensor.int().tolist()}" for name, tensor in found))


def poisoned(ids):
    """Outputs that no kernel would leave as they are: every byte is 0xCD, which is no flag and no likely count."""
    return layout_outputs(len(ids), EXPERTS, RANKS, DEVICE)


def check(outputs, ids=None):
    """None, or a sentence that says what is wrong. Flags are compared as bytes: one is 0 or 1, nothing else."""
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
HOLES = IDS[: HERE.few].clone()  # -1 here and there, and one token with nothing else
HOLES.view(-1)[::5] = -1
HOLES[1] = -1
OTHERS = {
    "one": IDS[:1].contiguous(),
    "few": IDS[: HERE.few].contiguous(),
    "many": uniform_routing(HERE.many, EXPERTS, TOPK),
    "skewed": IDS[:1].repeat(HERE.tokens, 1).contiguous(),  # every token wants the same experts
}
SAYS = {"one": "1 token", "few": "64 tokens", "many": "65536 tokens", "skewed": "4096 tokens to the same experts"}
print("the reference:", check(dispatch_layout(IDS, RANKS, EXPERTS)))
print("poison:       ", check(poisoned(IDS)))

# %% [markdown]
# How many ranks does a token visit? With `topk` different experts, all equally likely, a rank is spared if all experts
# come from the other ranks. For DeepSeek-V3 on 8 ranks:


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
# ## 3. The floor: how fast could it be?
#
# The ids are read once (8 bytes each, as torch's indices are), the flags are written once (a byte each), and the counts
# are a kilobyte. How long does that take at the bandwidth of the memory?

# %%
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
if ALIGN_LADDER:  # what notebook 02 measured with chains of equal links
    CHAINS = ALIGN_LADDER["diagnosis"]["chains"]  # microseconds of 1024 and of 2048 links
    NS = {name: 1000 * (CHAINS[f"{name} x 2048"] - CHAINS[f"{name} x 1024"]) / 1024 for name in NS}
LOAD_US, SHARED_US, GLOBAL_US = (
    NS[name] / 1000 for name in ("a load from the L2", "a shared atomic", "a global atomic")
)
CLOCK_MHZ = LIMITS.boost_clock / 1e6

for tokens in (1, 64, 4096, 65536):
    count = layout_bytes(tokens, 8, 256, 8)
    print(f"{tokens:6} tokens: {count / 1e6:5.2f} MB, {count / BANDWIDTH * 1e6:4.2f} us")
print(f"an empty kernel: {EMPTY_US[False]:.2f} us; {EMPTY_US[True]:.2f} us if it may start before the last one ends")
print(", ".join(f"{name} {ns:.0f} ns" for name, ns in NS.items()))
FLOOR_US = max(layout_bytes(4096, 8, 256, 8) / BANDWIDTH * 1e6, EMPTY_US[False])

# %% [markdown]
# As with the alignment, there are hardly any bytes, and the launch costs more than all of them. So this is about
# **latency** again: how long one thing takes when the next must wait for it. At the least there is this chain: the
# launch; a load of ids; an addition to a counter; a meeting of all who have counted; a store.
#
# ## 4. The ladder
#
# All steps work on 4096 tokens, top-8 of 256 experts, 8 ranks, on a GPU. Each is also timed for one token, for 64, for
# 65536, and for 4096 tokens that all want the same 8 experts. Before it is timed, it is checked on all of these, and on
# ids with -1 among them.

# %%
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


def measure(name, run, predicted=None, graph=True, **more):
    """Check and time ``run(ids, outputs)`` for the main size and for the others."""
    with ladder.attempt(name, "int64"):
        for which, ids in {**OTHERS, "holes": HOLES}.items():
            wrong = check(run(ids, poisoned(ids)), ids)
            assert not wrong, f"{name}, {SAYS.get(which, 'with -1')}: {wrong}"
            if graph and which in SAYS:
                stats = None if simulator.ENABLED else kernel_time(bound(run, ids))
                more[f"{which}_us"] = stats and stats.median
        ladder.step(
            name,
            bound(run, IDS),
            dtype="int64",
            prediction_us=predicted and round(predicted, 1),
            graph=graph,
            floor_us=FLOOR_US,
            bytes=layout_bytes(HERE.tokens, TOPK, EXPERTS, RANKS),
            operation="layout",
            **more,
        )
        RUNS[name] = run


def lost_unless_fastest(name):
    """Draw the step that was just measured in grey if an earlier one is as fast."""
    earlier = [us(row["step"]) for row in ladder.rows if row["step"] != name and "kernel_us" in row]
    if not simulator.ENABLED and us(name) and us(name) >= min(earlier):
        ladder.rows[-1]["slower"] = True


def guess(before, change, default):
    """The prediction: what an earlier step took, and what the idea changes."""
    return (us(before) or default) + change


def look_back(name, before=None, predicted=None):
    """Say what the step gained for each size, and how far off the prediction was."""
    ladder.report(name, before, predicted, FLOOR_US)
    for which, says in SAYS.items():
        now, then = us(name, f"{which}_us"), us(before, f"{which}_us") if before else None
        if now:
            print(f"    {says}: {now:.2f} us" + (f" (before: {then:.2f} us)" if then else ""))


# %% [markdown]
# ### Step 0: torch
#
# **Idea.** The reference. But `bincount` waits for the GPU, to learn the largest number, and a CUDA graph (a fixed list
# of launches) cannot hold what waits. `scatter_add_` counts without waiting. The reference itself gets a call time
# only.
#
# **Prediction.** A `TorchDispatchMode` counts the operations. Each is at least one kernel of about 2 us.


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
prediction = 2.0 * len(count.names)
print(len(count.names), "operations:", ", ".join(count.names))
measure("torch, bincount", lambda ids, outputs: dispatch_layout(ids, RANKS, EXPERTS), graph=False, slower=True)
measure("torch", torch_layout, prediction, operations=len(count.names))

# %%
look_back("torch", predicted=prediction)

# %% [markdown]
# **Look back.** Compare the line for one token: next to no work, but just as many kernels. So a launch in a graph costs
# less than the 2 us of our guess. With 4096 tokens the other half of the time is work, most of it, we think, the
# additions of `scatter_add_`.
#
# ### Step 1: global atomics
#
# **Idea.** One kernel, a thread for each token. The thread reads its token's ids one after the other. For each it adds
# 1 to the expert's counter, in global memory, **atomically** (原子操作: read, add and write with no other thread in
# between). It notes the ranks as bits of one number, so a rank that comes twice is there once. Then it writes the
# flags, and adds 1 for each rank. The counters must be zero before: two more launches.
#
# **Prediction.** Three launches; `topk` loads, one after the other; and a queue. There are only 8 counters for ranks,
# and thousands of tokens add to each. Say the L2 cache, where global atomics are done, takes an addition to one address
# each nanosecond.


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


QUEUE_US = 4096 * ranks_of_a_token() / 8 / 1000
prediction = 3 * EMPTY_US[False] + 8 * LOAD_US + GLOBAL_US + QUEUE_US
print(f"{4096 * ranks_of_a_token() / 8:.0f} additions to each rank's counter; prediction: {prediction:.1f} us")
measure("global atomics", run_global_atomics, prediction)

# %%
look_back("global atomics", "torch", prediction)
if us("global atomics"):
    slower = us("global atomics", "skewed_us") / us("global atomics")
    print(f"when all tokens want the same experts it takes {slower:.2f} times as long")

# %% [markdown]
# **Look back.** The chain of launches and loads is a microsecond longer than predicted; the line for one token has next
# to nothing else. And an addition takes longer than a nanosecond. From 4096 to 65536 tokens a rank's counter gets
# 40,000 additions more, and the time grows by some 70 us: nearly two nanoseconds each.
#
# The last line asks whether the time depends on what the tokens want. When all want the same, 8 experts' counters have
# a queue each of all tokens, and the other counters have none.
#
# ### Step 2: shared atomics
#
# **Idea.** Let each block count in its own **shared memory** (共享内存), which is near and has a queue of its own for
# each block. In the end a block adds its counts to the global ones, an addition for each counter instead of one for
# each token. The counters still must be zero before.
#
# **Prediction.** The three launches and the loads stay. The queue shrinks to one addition for each block.


# %%
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


prediction = 3 * EMPTY_US[False] + 8 * (LOAD_US + SHARED_US) + 8 * SHARED_US + 2 * GLOBAL_US
measure("shared atomics", run_shared_atomics, prediction)

# %%
look_back("shared atomics", "global atomics", prediction)
if us("shared atomics"):
    print(f"two launches that write zeros: {200 * EMPTY_US[False] / us('shared atomics'):.0f} % of the time, or more")

# %% [markdown]
# **Look back.** The queue is gone: 65536 tokens take only some 2 us longer than one. What is left takes longer than
# predicted, with one token too, where this step even loses to the one before. It has two barriers more, and a block's
# 264 counters to clear and to hand on. And two of the three launches only write zeros. The last line says what share of
# the time that is at the least, if each is no more than an empty kernel. Keep them in mind: step 7 does without.
#
# ### Step 3: private counters, as in the document
#
# **Idea.** DeepEP goes another way. **Every thread has counters of its own**, so nobody else touches them, and no
# addition must be atomic. A block cannot hold 256 counters for each of 256 threads, so the counters are dealt out:
#
# - Some blocks count experts, 32 each. Their counters are a table in shared memory of 256 threads by 32 experts.
# - After them, some blocks count ranks, 8 each, in a table of 256 by 8. They also write the flags.
#
# Each block walks *all* tokens, a thread a token, 256 tokens a round, and counts only what is its own. In the end the
# columns are added up (规约, a **reduction**): the block's first 32 (or 8) threads take a column each, and add 256
# numbers.
#
# A small example, with 4 threads and 4 experts a block, computed:

# %%
torch.manual_seed(0)
draw.private_counters(uniform_routing(8, 8, 2, "cpu"), num_experts=8, experts_of_block=4, threads=4)

# %%
BLOCKS = deepep_layout.num_blocks(256, 8)
print(
    f"256 experts, 8 ranks: {deepep_layout.num_blocks(256, 0)} blocks count experts, "
    f"{BLOCKS - deepep_layout.num_blocks(256, 0)} counts ranks"
)
for experts, ranks in ((256, 8), (64, 4), (384, 8), (256, 16)):
    print(f"    {experts} experts, {ranks:2} ranks: {deepep_layout.num_blocks(experts, ranks)} blocks")
print(f"tables: {256 * 32 * 4} bytes for experts, {256 * 8 * 4} for ranks")

# %% [markdown]
# It saves more than atomics. Counts are never added up between blocks, since each counter belongs to one block. So
# nothing must be zero before, and one launch is enough. The kernel, in Numba:

# %%
Markdown("```python\n" + inspect.getsource(deepep_layout.make_layout_kernel) + "```")

# %% [markdown]
# **The banks.** Shared memory has 32 **banks** of 4-byte words. Word `w` lies in bank `w % 32`, and a bank serves one
# word at a time. When the 32 threads of a warp want different words of one bank, they must take turns: a **bank
# conflict**. Now look at the table. A row has 32 words, so column `j` of *every* row lies in bank `j`. A picture with 8
# banks:

# %%
draw.banks(8, (8, 9))

# %% [markdown]
# Who goes down a column? Not the counting of experts: there each thread is at its own token's expert. (Two threads at
# the same expert do meet in its bank.) But the **clearing** does: all threads of a warp clear column 0, then column 1,
# and so on. And so does the counting of ranks, in rows of 8 words. Let us count the turns that the banks of one block
# need, for our ids, with rows of 32 words and of 33. The adding up at the end goes along a row: neighbours, different
# banks.


# %%
def turns_of_counting(ids, width, experts_of_block=32, threads=256):
    """Turns for the additions of the busiest block: each reads its counter and writes it."""
    ids = ids.cpu()[: len(ids) // 32 * 32].view(-1, 32, ids.shape[1])  # warps' tokens: [warp, lane, k]
    worst = 0
    for begin in range(0, EXPERTS, experts_of_block):
        lane = torch.arange(len(ids) * 32).view(-1, 32, 1) % threads
        bank = (lane * width + ids - begin) % 32
        mine = (ids >= begin) & (ids < begin + experts_of_block)
        seen = torch.zeros(len(ids), 32, ids.shape[2], dtype=torch.int64).scatter_add_(1, bank, mine.long())
        worst = max(worst, 2 * int(seen.amax(dim=1).sum()))
    return worst


def turns_of_block(ids, width, columns=32, threads=256):
    """Turns of the banks in a block that counts experts, by what they are needed for."""
    warps = threads // 32
    clearing = sum(draw.wavefronts([t * width + j for t in range(32)]) for j in range(columns)) * warps
    adding = sum(draw.wavefronts([i * width + t for t in range(columns)]) for i in range(threads))
    return {"clearing": clearing, "counting": turns_of_counting(ids, width, columns, threads), "adding up": adding}


for which, ids in {"": IDS, ", the same experts for all": OTHERS["skewed"]}.items():
    for width in (32, 33):
        found = ", ".join(f"{what} {turns}" for what, turns in turns_of_block(ids, width).items())
        print(f"{len(ids)} tokens{which}, rows of {width}: {found}")
CLEARING_TURNS = {width: turns_of_block(IDS, width)["clearing"] for width in (32, 33)}
CLEARING_US = {width: turns / CLOCK_MHZ for width, turns in CLEARING_TURNS.items()}
print(f"the clearing alone: {CLEARING_US[32]:.1f} us with rows of 32, {CLEARING_US[33]:.2f} us with rows of 33")

# %% [markdown]
# **Prediction.** A launch, the clearing, and the walk: 4096 tokens are 16 rounds, and in each a thread loads 8 ids.
# Between two loads stands a branch and perhaps a counter, so let us say that each waits for the one before. Then 256
# additions in a row, some 4 clocks each.

# %%
WALK_US = 4096 / 256 * 8 * LOAD_US
ADD_UP_US = 256 * 4 / CLOCK_MHZ
prediction = EMPTY_US[False] + CLEARING_US[32] + WALK_US + ADD_UP_US
print(f"clear {CLEARING_US[32]:.1f}, walk {WALK_US:.1f}, add up {ADD_UP_US:.1f}, with the launch {prediction:.1f} us")


def run_document(ids, outputs):
    return deepep_layout.get_dispatch_layout(ids, EXPERTS, RANKS, out=outputs)


measure("private counters", run_document, prediction)
lost_unless_fastest("private counters")

# %%
look_back("private counters", "shared atomics", prediction)
if us("private counters"):
    a, b = us("private counters", "one_us"), us("private counters", "many_us")
    print(
        f"one token takes {a:.1f} us: that is what clearing and adding up cost, whatever there is to count; each "
        f"further round of 256 tokens takes {1000 * (b - a) / (65536 / 256 - 1):.0f} ns"
    )
    skewed = us("private counters", "skewed_us") / us("private counters")
    print(f"when all tokens want the same experts it takes {skewed:.2f} times as long")

# %% [markdown]
# **Look back.** Each of the 9 blocks reads all ids, so the kernel reads them nine times, and it uses 9 of the GPU's 132
# multiprocessors. More tokens mean more rounds, and no more blocks. A round takes more than twice as long as eight
# loads from the L2, so something else than loads is in it. What, the prediction did not know; the next steps narrow it
# down.
#
# We shall try three changes of this kernel. Each changes some lines of the document's source, which the next cell
# prints, and nothing else.
#
# ### Step 4: rows of 33 words
#
# **Idea.** One word more in each row, which nobody uses. Then column `j` of row `t` lies in bank `(t + j) % 32`: down a
# column all banks are different. (The table of the ranks gets rows of 9.)
#
# **Prediction.** The clearing shrinks as counted above.


# %%
def changed(*changes):
    """The document's source with some lines changed, as a module of its own; gives its get_dispatch_layout."""
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
prediction = guess("private counters", CLEARING_US[33] - CLEARING_US[32], prediction)
measure("rows of 33 words", changed(*WIDER), prediction)
lost_unless_fastest("rows of 33 words")

# %%
look_back("rows of 33 words", "private counters", prediction)

# %% [markdown]
# **Look back.** The clearing does not depend on the tokens, so the differences should be alike for one token and for
# many. They are not. With few tokens half of the prediction is there. (A store need not be waited for, so a part of the
# turns had been hidden, we think.) From 4096 tokens on there is next to nothing, or a small loss. So there the blocks
# that count experts, which have the large table, do not seem to be the slowest. That leaves the one block that counts
# ranks. Rows of 9 words spare it seven of eight turns, and gain nothing there: something else must be what limits it.
#
# ### Step 5: the same with atomics
#
# **Idea.** Are private counters better than atomics? Steps 2 and 3 differ in more than that. So here is the document's
# kernel with one row for the whole block, and atomic additions to it. The blocks and the walk stay as they are. There
# is little to clear and nothing to add up, but a barrier more.
#
# **Prediction.** Clearing and adding up go. But all threads of the block that counts ranks now add to the same 8 words,
# and whoever adds to the same word must queue: a turn for each of them.

# %%
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
RANK_QUEUE_US = 4096 * 8 / CLOCK_MHZ
prediction = guess("private counters", RANK_QUEUE_US - CLEARING_US[32] - ADD_UP_US, 20)
print(f"the ranks' queue: {RANK_QUEUE_US:.1f} us")
measure("the same with atomics", changed(*ATOMIC), prediction)
lost_unless_fastest("the same with atomics")

# %%
look_back("the same with atomics", "private counters", prediction)


def private_or_atomic():
    """For each size: the times with private counters, with rows of 33 words, and with atomics; {} if none is known."""
    found = {}
    for which in ("kernel_us", *(f"{name}_us" for name in SAYS)):
        times = [us(name, which) for name in ("private counters", "rows of 33 words", "the same with atomics")]
        if all(times):
            found[SAYS.get(which.removesuffix("_us"), "4096 tokens")] = times
    return found


def faster_of(private, atomic):
    """Which of two times is the shorter one, by more than the 2 % that two measurements may differ by."""
    if abs(private / atomic - 1) < 0.02:
        return "neither"
    return "private counters" if private < atomic else "atomics"


for says, (private, wide, atomic) in private_or_atomic().items():
    print(
        f"{says}: private {private:.2f}, in rows of 33 {wide:.2f}, atomic {atomic:.2f} us; "
        f"faster: {faster_of(min(private, wide), atomic)}"
    )

# %% [markdown]
# **Look back.** This is the document's main argument, put to the test. What private counters cost is always there: to
# clear a table that is 256 times as large, and to add it up. With few tokens that is more than half of the time. The
# last two steps together say what the adding up costs: some 3 us, not the half that we predicted. Each addition waits
# for its load from shared memory.
#
# What atomics cost depends on how many threads want the same word at the same time. We predicted a queue of 16 us at
# the ranks' counters, and see none of it: from 4096 tokens on the two kernels are equal. We have not looked up why.
# Perhaps the additions of a warp are added up on the way, or they go on beside the loads, for which a thread has to
# wait anyway.
#
# ### Step 6: four experts a block
#
# **Idea.** DeepEP itself changed one number later: 4 experts a block in place of 32. The tables are smaller, and there
# are 65 blocks in place of 9.
#
# **Prediction.** A row of 4 words: there is an eighth to clear, and the banks conflict less. The walk over all tokens
# stays as long as it was, and the block that counts ranks stays as it was.

# %%
FOUR = (("EXPERTS_PER_BLOCK, RANKS_PER_BLOCK = 256, 32, 8", "EXPERTS_PER_BLOCK, RANKS_PER_BLOCK = 256, 4, 8"),)
show(*FOUR)
small_table = sum(draw.wavefronts([t * 4 + j for t in range(32)]) for j in range(4)) * 8 / CLOCK_MHZ
prediction = guess("private counters", small_table - CLEARING_US[32], 20)
measure("4 experts a block", changed(*FOUR), prediction)
lost_unless_fastest("4 experts a block")

# %%
look_back("4 experts a block", "private counters", prediction)

# %% [markdown]
# **Look back.** With few tokens it gains what step 4 gains, for a like cause: its clearing takes fewer turns. With many
# it gains next to nothing. The block that counts ranks has not changed, and a walk over all tokens is as long as
# before. We suppose that this block is the slowest: for each id it divides, by a number that is known only when the
# kernel runs, and it keeps its flags in local memory (see the claims).
#
# In any case blocks are no remedy for a walk that every block makes alone. They should share the tokens, not the
# counters. But then the counts must meet, and step 2 paid for that with launches that write zeros.
#
# ### Step 7: one cluster
#
# **Idea.** A **thread block cluster** is a group of blocks, up to 8 on any Hopper GPU, that run at the same time, have
# a barrier in common, and can store into each other's shared memory. One cluster of 8 blocks shares the tokens. Each
# block counts into its own counters, as in step 2. Then each block takes a share of the counters, an eighth. Every
# block sends it its own counts of that share; they meet at the barrier; the share is added up and stored. Nothing needs
# to be zero beforehand, and nothing goes through global memory but ids, flags and results.
#
# **Prediction.** Step 2 without its two launches of zeros. Two meetings of the cluster come in addition, at a quarter
# of a microsecond each.


# %%
@cache
def make_cluster(num_experts, ranks, topk, threads):
    numbers = num_experts + ranks
    share = -(-numbers // CLUSTER_SIZE)  # counters that a block adds up
    all_shares = CLUSTER_SIZE * share

    @cuda.jit
    def kernel(topk_idx, per_rank, per_expert, is_token_in_rank, num_tokens):
        counts = cuda.shared.array(numbers, int32)
        shares = cuda.shared.array(all_shares, int32)  # this block's share, from each block
        t, block = int32(cuda.threadIdx.x), int32(cluster_ctarank())
        barrier_cluster_arrive()  # this block has started: others may store into its memory
        for i in range(t, numbers, threads):
            counts[i] = int32(0)
        cuda.syncthreads()
        token = int64(block * threads + t)
        while token < num_tokens:
            count_token(topk_idx, is_token_in_rank, counts, token, num_experts, ranks, topk)
            token += CLUSTER_SIZE * threads
        cuda.syncthreads()
        barrier_cluster_wait()
        for i in range(t, numbers, threads):
            to = int32(i // share)
            st_cluster_s32(shares, int32(block * share + i - to * share), to, counts[i])
        cuda.syncwarp()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        if t < share and block * share + t < numbers:
            total, i = int32(0), int32(block * share + t)
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


prediction = guess("shared atomics", 2 * 0.25 - 2 * EMPTY_US[False], 4)
measure("one cluster", run_cluster, prediction)
lost_unless_fastest("one cluster")

# %%
look_back("one cluster", "shared atomics", prediction)

# %% [markdown]
# **Look back.** A little better than predicted: it seems that a launch that writes zeros costs more than an empty
# kernel. But with 65536 tokens step 2 is nearly four times as fast. It has 256 blocks on all multiprocessors, and here
# are 8. Each thread has 16 rounds, and in each it waits for 8 loads, one after the other. For few tokens only the first
# warps have work. The rounds and the idle warps can be mended; eight multiprocessors they remain.
#
# ### Step 8: teams of lanes
#
# **Idea.** The package's kernel is the cluster of step 7, with another way to share the tokens out. A **team** of 8
# neighbouring lanes takes a token, and each lane one of its ids. So all ids of a token are loaded at once, and
# neighbouring lanes load neighbouring words. Each lane has the ids of four tokens on their way before it looks at the
# first. Three shuffles tell each lane of the team which ranks the token visits, and each lane writes one rank's flag.
# How many tokens a rank gets, a lane counts in a register, with one atomic addition at the end.
#
# **Prediction.** One round of loads in place of 8 for 4096 tokens, and 8 shared atomics less for each token.

# %%
MANY_THREADS = 4 * THREADS


def run_teams(ids, outputs):
    kernel = make_layout_kernel(EXPERTS, RANKS, TOPK, MANY_THREADS)
    options = {"launch_bounds": MANY_THREADS, "cluster": CLUSTER_SIZE}
    launch(kernel, CLUSTER_SIZE, MANY_THREADS, ids, *outputs, np.uint32(len(ids)), **options)
    return outputs


prediction = guess("one cluster", -7 * LOAD_US - 8 * SHARED_US, 3)
measure("teams of lanes", run_teams, prediction)

# %%
look_back("teams of lanes", "one cluster", prediction)

# %% [markdown]
# **Look back.** As predicted for 4096 tokens, and the time for 65536 is nearly halved.
#
# ### Step 9: the package
#
# **Idea.** `moe_numba.expert_parallel.get_dispatch_layout` launches this kernel with **programmatic dependent launch**:
# its blocks take their places and clear their counters while the kernel ahead of it still ends (see notebook 01). It
# takes any number of ranks from 1 to 8, up to 1024 experts and up to 32 of them for a token, and whatever is no
# expert's number counts nowhere.
#
# **Prediction.** What an empty kernel gains by that.


# %%
def run_package(ids, outputs):
    return get_dispatch_layout(ids, EXPERTS, RANKS, out=outputs)


prediction = guess("teams of lanes", EMPTY_US[True] - EMPTY_US[False], 2)
measure("final", run_package, prediction)

# %%
look_back("final", "teams of lanes", prediction)

# %% [markdown]
# **Look back.** Far more than the gain of an empty kernel. That one has nothing to do before the launch ahead of it has
# ended. This one has: its cluster takes its places, its blocks meet for the first time, the counters are cleared. And
# it lets the next launch come when it has counted, before its own counts have met. (Here the kernel ahead is the same
# one, launched again and again. Behind another one the gain may be another.)
#
# ### A check must be able to fail
#
# Three results that are wrong on purpose. The first comes from a kernel that writes a count where a flag belongs: a
# token with two experts on a rank gets a 2, which is as true as a 1 to most readers, but not to one that adds up. The
# second counts a token for a rank once for each expert. The third forgets the last token.


# %%
def counts_experts_for_ranks(ids, outputs):
    run_package(ids, outputs)
    outputs[0].copy_(outputs[1].view(RANKS, -1).sum(dim=1))
    return outputs


def forgets_the_last(ids, outputs):
    run_package(ids[:-1], (*outputs[:2], outputs[2][:-1]))
    return outputs


trial = Ladder("dispatch_layout_trial", check)
a_count = changed(("uint8(flag)", "uint8(is_in_rank[j])"))
for name, run in (
    ("a flag is a count", a_count),
    ("once for each expert", counts_experts_for_ranks),
    ("forgets the last token", forgets_the_last),
):
    trial.step(name, bound(run, IDS), expect_wrong=True)

# %% [markdown]
# ## 5. The sweep over tokens
#
# The best of each kind, from 1 token to 65536:

# %%
SWEPT = {
    "moe_numba": "final",
    "one cluster": "one cluster",
    "document": "private counters",
    "document, atomics": "the same with atomics",
    "global atomics": "global atomics",
    "torch": "torch",
}
SWEPT = {line: step for line, step in SWEPT.items() if step in RUNS}  # without those that this GPU cannot run


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

# %%
for tokens in LINES["moe_numba"] if LINES else ():
    own, theirs = (LINES[line][tokens]["median"] for line in ("moe_numba", "document"))
    print(f"{tokens:6} tokens: {own:6.2f} us; the document's kernel {theirs:7.2f} us, {theirs / own:.1f} times as long")

# %% [markdown]
# One line is missing in the figure, that of step 2. Up to 4096 tokens it lies far above the package's, but with 65536
# tokens shared atomics in 256 blocks take half of the package's time (see the lines of steps 2 and 9). We leave it at
# that. A rank that sends 65536 tokens has milliseconds of sending before it. So eight multiprocessors are enough here,
# and the other 124 are left to whatever runs beside.
#
# ### The whole ladder
#
# All steps once more, measured by turns, so that a clock that drifts hits all of them alike.

# %%
ladder.measure_all()

# %%
ladder.plot(floor_us=FLOOR_US)

# %% [markdown]
# ## 6. The buffer
#
# The layout needs one GPU. All that follows needs memory that other GPUs can reach, and the article begins with it. A
# **buffer** (缓冲区) is made once, before the first token travels.
#
# **Which rank is where?** A host has up to 8 GPUs that see each other over NVLink. From the number of a rank follow its
# host, `rdma_rank`, and its place there, `nvl_rank`:

# %%
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
# 1. the data, `num_nvl_bytes`: where tokens arrive;
# 2. signals, an int for each GPU of the host, with which the GPUs wait for each other; they begin as zero;
# 3. `buffer_ptrs`: room for the addresses of all GPUs' buffers;
# 4. `barrier_signal_ptrs`: the same for their signals.
#
# To scale, with 2 GB of data as in DeepEP's test:

# %%
draw.buffer_map(2 * 10**9)

# %% [markdown]
# (A second size, `num_rdma_bytes`, is for what goes between hosts. The article calls the two a double buffer, 双缓冲.
# They are two buffers for two networks, and do not take turns. The low-latency kernels get `num_nvl_bytes = 0`.)
#
# **Handles.** An address means something in one process only. CUDA IPC (inter-process communication) helps: the owner
# asks for a **handle**, 64 bytes that name the allocation (`cudaIpcGetMemHandle`). The handles go around
# (`all_gather_object`), and each process opens those of its host's other GPUs (`cudaIpcOpenMemHandle`, told to allow
# access from GPU to GPU as well, `cudaIpcMemLazyEnablePeerAccess`). It gets an address of its own for that memory
# (内存映射, memory mapping), and a kernel can load and store there, over NVLink. This is what `sync` does. Then it
# copies the two lists of addresses into parts 3 and 4: a kernel cannot read the host's lists.
#
# A process cannot open its own handle, so we start a second one. Its kernel stores into our buffer. The kernel takes an
# address from a list in memory and makes it a pointer, as the kernels that exchange tokens do. In the simulator there
# is one process: there a buffer is **registered**, and its address then stands for it, for the kernels of all simulated
# ranks.


# %%
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
    """What a kernel of a second process stored into this one's buffer, and how the handle fared here."""
    runtime = cupy.cuda.runtime
    address = runtime.malloc(BUFFER_BYTES)
    runtime.memset(address, 0, BUFFER_BYTES)
    runtime.deviceSynchronize()
    handle = runtime.ipcGetMemHandle(address)
    try:
        runtime.ipcCloseMemHandle(runtime.ipcOpenMemHandle(handle))
        here = "opened by its own process"
    except runtime.CUDARuntimeError as error:
        here = f"refused by its own process: {error}"
    program = SECOND_PROCESS.format(kernel=source_of(store_into_peer))
    done = subprocess.run([sys.executable, "-c", program, bytes(handle).hex()], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, BUFFER_BYTES, None), 0)
    words = cupy.ndarray(8, cupy.int32, memory).get().tolist()
    runtime.free(address)
    return {"words": words, "handle_bytes": len(handle), "own_process": here}


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
            launch(store_into_peer, 1, 8, buffer_ptrs, buffers[1], 7, 100)  # nobody has opened rank 7's
    except simulator.OutOfBounds as error:
        print("rank 7, which does not exist:", str(error).splitlines()[0])
    for address in addresses:
        simulator.forget(address)
    return {"words": buffers[0][:8].tolist()}


# %%
try:
    import cupy
except ImportError:
    cupy = None

if simulator.ENABLED:
    SHARED = across_simulated_ranks()
    print("rank 1 stored into the buffer of rank 0:", SHARED["words"])
elif cupy is None:
    SHARED = None
    print("CuPy, which knows the calls for handles, is not installed; here this is left out.")
else:
    try:
        SHARED = across_processes(cupy)
        print(f"a handle of {SHARED['handle_bytes']} bytes;", SHARED["own_process"])
        print("a second process stored into this one's buffer:", SHARED["words"])
    except RuntimeError as error:  # CUDA's own error is one too
        SHARED = None
        print("This system does not share memory between processes:", str(error).strip().splitlines()[-1])
assert SHARED is None or SHARED["words"] == list(range(100, 108))

# %%
# The record of the ladder gets this too.
if not simulator.ENABLED and SHARED:
    next(row for row in ladder.rows if row["step"] == "final")["ipc"] = {"handle_bytes": SHARED["handle_bytes"]}
ladder.save(notebook_sources("notebooks/07_dispatch_layout.py"))

# %% [markdown]
# Both processes used the same GPU here. With two GPUs nothing changes but the way that the stores take. The name of the
# error that a process gets for its own handle misleads: the device is all right. Two more things to know: a handle is
# for a whole `cudaMalloc`, not for a piece of some pool, so torch's usual memory cannot be shared this way. And the
# owner must not free before all others have closed.
#
# **Counters on the host.** After the layout the ranks will tell each other how many tokens to expect, and the *host*
# must know the sum, to allocate the output. So the last thing that the constructor makes are counters (计数器) in
# **pinned** host memory (memory that the operating system does not move), mapped so that a GPU can store into it: one
# for all tokens that will come, and one for each of the rank's experts. They begin at -1, and the host looks again and
# again (it **polls**) until the number is there. No copy is called for.


# %%
@cuda.jit
def report(counter, value):
    counter[0] = value


counter = torch.full((1,), -1, dtype=torch.int32, pin_memory=not simulator.ENABLED)
launch(report, 1, 1, counter, int(per_rank.sum()))
looks = 1
while counter[0] < 0 and looks < 1_000_000:
    looks += 1
print(f"the host saw {int(counter[0])} tokens; it looked {'once' if looks == 1 else 'more than once'}")
assert counter[0] == per_rank.sum()

# %% [markdown]
# **Between hosts** DeepEP uses NVSHMEM, a library in which all GPUs of a group (通信组) own a piece of one large
# memory. One process makes a unique id, all others join with it, and memory that all of them allocate together can be
# reached from each of them, by the network card if need be (IBGDA: the GPU itself gives the card its orders). For the
# normal kernels a group has one GPU of each host, those with the same `nvl_rank`; for the low-latency ones it has all
# GPUs. Networks are outside of this course, and with them NVSHMEM's environment variables, its ways to start, its
# teams, and the counter of rows that come by network. Inside a host none of it is needed.
#
# ## 7. The document's claims
#
# A verdict is computed, never typed. Where it needs a figure that is not recorded, it says so. Some need the machine
# code, which a compiler makes without a GPU:


# %%
def machine_code():
    """Of the document's kernel, and of the one with atomics: {name: {what: number}}; None without a disassembler."""
    source = atomic = inspect.getsource(deepep_layout)
    for old, new in ATOMIC:
        atomic = atomic.replace(old, new)
    types = ("int64*", "int32*", "int32*", "uint8*", *["int32"] * 4)
    names = {"document": "make_layout_kernel", "atomic": "make_atomic_kernel"}
    requests = {name: (f"{function}(256)", types, 256, False) for name, function in names.items()}
    codes = compile_apart(source + atomic.replace("make_layout_kernel", "make_atomic_kernel"), requests)
    return {
        name: {
            "atomics": code.count("ATOMS", "ATOM", "ATOMG", "RED"),
            "shared stores": code.count("STS"),
            "stack bytes": code.stack_bytes,
        }
        for name, code in codes.items()
    }


CODE = machine_code()
print(json.dumps(CODE))

# %%
NOT_RECORDED = "open: not recorded yet"


def verdict(holds, figure):
    return f"{'confirmed' if holds else 'refuted'}: {figure}"


def which_is_faster():
    """Private counters against atomics in the same kernel, over the sizes that were measured."""
    if not (found := private_or_atomic()):
        return NOT_RECORDED
    text = "; ".join(
        f"{says} {private:.1f} us private, {atomic:.1f} atomic" for says, (private, _, atomic) in found.items()
    )
    better = [faster_of(private, atomic) == "private counters" for private, _, atomic in found.values()]
    return f"{'confirmed' if all(better) else 'more subtle' if any(better) else 'refuted'}: {text}"


claims = []
atomics = {name: numbers["atomics"] for name, numbers in CODE.items()}
claims.append(
    (
        "Private counters need no atomic operations",
        NOT_RECORDED
        if None in atomics.values()
        else verdict(
            atomics["document"] == 0 < atomics["atomic"],
            f"{atomics['document']} atomic instructions in the machine code; {atomics['atomic']} in that of step 5",
        ),
    )
)
claims.append(("and so they are the better way (the same kernel with atomics)", which_is_faster()))
claims.append(
    (
        "A block counts 32 experts, or 8 ranks; the grid has a block for each part",
        verdict(
            (deepep_layout.EXPERTS_PER_BLOCK, deepep_layout.RANKS_PER_BLOCK, BLOCKS) == (32, 8, 9),
            f"{BLOCKS} blocks for 256 experts and 8 ranks, on {LIMITS.sm_count} SMs",
        ),
    )
)
ids_bytes = 8 * 4096 * 8
claims.append(
    (
        "Each block walks all tokens",
        f"confirmed: {BLOCKS} blocks read {BLOCKS * ids_bytes / 1e6:.2f} MB, and the ids have {ids_bytes / 1e6:.2f}",
    )
)
one, many = us("private counters", "one_us"), us("private counters", "many_us")
own_one, own_many, four_many = us("final", "one_us"), us("final", "many_us"), us("4 experts a block", "many_us")
claims.append(
    (
        "(not in the article) so its time grows with the tokens, and more blocks do not help",
        verdict(
            many > 2 * one and four_many > many / 2,
            f"{one:.1f} us for 1 token, {many:.1f} for 65536, with 65 blocks "
            f"{four_many:.1f}; the package's {own_one:.1f} and {own_many:.1f}",
        )
        if all((one, many, own_one, own_many, four_many))
        else NOT_RECORDED,
    )
)
claims.append(
    (
        "The counters are a table of 256 x 32, in the end 32 threads add up 256 numbers each",
        verdict(
            256 * 32 * 4 <= 48 * 1024,
            f"{256 * 32 * 4} bytes of shared memory; 224 of 256 threads idle meanwhile, and "
            f"clearing it takes {CLEARING_TURNS[32]} turns of the banks, {CLEARING_TURNS[33]} with rows of 33 words",
        ),
    )
)
old, new = us("private counters"), us("rows of 33 words")
claims.append(
    (
        "(not in the article) the banks cost it time",
        verdict(new < 0.98 * old, f"{old:.1f} -> {new:.1f} us with rows of 33 words") if old and new else NOT_RECORDED,
    )
)
stack = CODE["document"]["stack bytes"]
claims.append(
    (
        "is_in_rank, 8 numbers, is kept in registers (寄存器)",
        verdict(
            stack == 0,
            f"as Numba compiles it, the kernel has a stack of {stack} bytes for it; an index that is known only "
            "when the kernel runs names no register",
        ),
    )
)
experts_on_a_rank = int(per_expert.sum())
claims.append(
    (
        "A token counts once for a rank, and once for each of its experts",
        verdict(
            VISITED < TOPK and experts_on_a_rank == HERE.tokens * TOPK,
            f"{int(per_rank.sum())} against {experts_on_a_rank} for {HERE.tokens} tokens",
        ),
    )
)
parts = draw.buffer_parts(2 * 10**9)
ends = [offset + size for offset, size in parts.values()]
claims.append(
    (
        "One cudaMalloc holds data, signals and both lists of pointers",
        verdict(
            [offset for offset, _ in parts.values()] == [0, *ends[:-1]], f"{ends[-1] - ends[0]} bytes after the data"
        ),
    )
)
claims.append(
    (
        "The two buffers are a double buffer",
        "more subtle: two buffers for two networks; inside a host there is one, and nothing takes turns",
    )
)
handle = (SHARED or {}).get("handle_bytes") or ((ladder.row("final") or {}).get("ipc") or {}).get("handle_bytes")
claims.append(
    (
        "With its handle (CUDA_IPC_HANDLE_SIZE is 64) others map the memory and store into it",
        verdict(handle == 64, f"{handle} bytes; a kernel of a second process stored into this one's buffer")
        if handle
        else "open: in the simulator addresses are registered; no GPU's run is recorded yet",
    )
)

Markdown("| claim | verdict |\n|---|---|\n" + "\n".join(f"| {claim} | {text} |" for claim, text in claims))

# %% [markdown]
# Two of the verdicts need a word more. Private counters against atomics is, from 4096 tokens on, a draw: what differs
# there is a per cent or so. The atomics win with few tokens, and by far. And that the banks cost nothing is said of
# 4096 tokens; with one token the conflicts cost 2 of 9 us (step 4). Nor do these figures judge DeepEP's own kernel,
# which is CUDA C++: they are of the document's way, as Numba compiles it.
#
# ## 8. Faults to know
#
# Each is a change of a line or two in the document's kernel, and tried in the simulator, on a small input. Where a GPU
# runs this notebook, the simulator runs in a process of its own.


# %%
CUT = ("expert = topk_idx[token * num_topk + j]", "expert = int32(topk_idx[token * num_topk + j])")
FAULTS = {
    "as it is": (),
    "no barrier before the columns are added up": (("        cuda.syncthreads()\n", ""),),
    "all threads count in one row, without atomics": (("rows[t, int32", "rows[0, int32"),),
    "counters that nobody clears": (("            rows[t, j] = int32(0)\n", "            pass\n"),),
    "no look at an id's lower end": (("begin <= expert and expert < end:", "expert < end:"),),
    "ids cut to 32 bits, as in the article's code": (CUT,),
}


SMALL_SIZES = dict(DEVICE="cpu", EXPERTS=64, TOPK=4, RANKS=4)


def faults(changes_of):
    """What the simulator, or the check, says of each change, under several orders of the threads."""
    torch.manual_seed(0)
    ids = uniform_routing(70, 64, 4, "cpu")
    ids[3, 1], ids[5, 0], ids[6, 2] = -1, -1, (1 << 32) + 1  # the last one is no expert's number either
    found = {}
    for name, changes in changes_of.items():
        found[name] = "right, under five seeds"
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


for name, said in in_simulator(faults, FAULTS, constants=SMALL_SIZES).items():
    print(f"{name}: {said}")

# %% [markdown]
# - **The barrier.** Without it a thread adds up counters that another has not counted yet. On a GPU the result may be
#   right a million times.
# - **One row.** Two threads read the same number, both add 1, both write. One is lost.
# - **An id's lower end.** An expert of a block before, or -1, is looked up in front of the row.
# - **Cut to 32 bits.** The article's code makes an `int` of each 64-bit id. An id such as 2**32 + 1 then is expert 1.
#   No gate gives such ids, but memory that nobody wrote may.
#
# ## 9. Exercises
#
# Each can be done in the simulator. `check` tells whether a kernel is right; a GPU tells whether it is fast.
#
# 1. **Clear along the row.** Keep rows of 32 words, and clear the table without a bank conflict.
#    *Hint: it is one piece of memory. Which words should the 32 lanes of a warp clear at the same time? What must stand
#    between clearing and counting then?*
# 2. **Add up faster.** 32 threads add up 256 numbers each, and 224 watch. Let all 256 take part.
#    *Hint: thread `t` takes column `t % 32`, and every eighth row. Who adds up the rest? Look at the banks.*
# 3. **Loads first.** In step 7 a thread waits for each id. Load all of them into a `cuda.local.array` before the first
#    is counted. For which sizes does it pay?  *Hint: step 8 of notebook 02.*
# 4. **Fewer atomics for ranks.** In step 2 all lanes of a warp add to the same 8 words. Let one lane add for all.
#    *Hint: `cuda.ballot_sync` of a flag, then `cuda.popc`.*
# 5. **Global atomics without zeros.** Let step 2 clear the global counters without launches of their own.
#    *Hint: the kernel of one call could clear those of the next. What if two streams call at the same time?*
# 6. **Two launches at once.** The package's kernel has no scratch memory. Why does that matter to two CUDA graphs that
#    run side by side?  *Hint: notebook 02 hands counts over in global memory. What does it need there?*
# 7. **A peer's peer.** Let rank 1 store into rank 0's buffer through the list in *rank 0's* buffer.
#    *Hint: in the simulator both lists are alike. In two processes they are not. Why?*
#
# ## 10. Sources
#
# - The article: BoLi2001, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), 2025,
#   in Chinese.
# - The code: [DeepEP](https://github.com/deepseek-ai/DeepEP), by DeepSeek: `csrc/kernels/layout.cu`, `csrc/deep_ep.cpp`
#   and `deep_ep/buffer.py` of its first version. Its commit `d4f3497` went from 32 experts a block to 4.
# - On clusters and IPC: NVIDIA, *CUDA C++ Programming Guide*, "Thread Block Clusters" and "Interprocess Communication";
#   *PTX ISA*: `barrier.cluster`, `st.shared::cluster`.
#
# ## The final kernel
#
# This is what `moe_numba.expert_parallel.get_dispatch_layout` runs.

# %%
from moe_numba.expert_parallel.kernels import dispatch_layout as final_kernel

Markdown("```python\n" + inspect.getsource(final_kernel) + "\n```")
