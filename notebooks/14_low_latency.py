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
# # Low-latency dispatch and combine
#
# During decode each rank (GPU) has 1 to 128 tokens per step. The dispatch and combine of notebooks
# [12](12_dispatch.ipynb) and [13](13_combine.ipynb) are built for thousands of tokens: rows stream through
# ring buffers, and the bandwidth of NVLink limits the time. With few tokens almost nothing is sent, but the pair still
# takes tens of microseconds. This notebook shows where that time goes, and builds a pair of kernels that avoids most of
# it: one launch for each direction, and no exchange of counts, so the CPU need not wait either.
#
# Notebooks 12 and 09 explain ranks, dispatch and combine, [notebook 00](00_start_here.ipynb) the simulator.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import warnings
from functools import cache

import torch
from IPython.display import Markdown
from numba import cuda, float32, int32

from moe_numba import simulator
from moe_numba.course.bench import records
from moe_numba.course.bench.figures import plots
from moe_numba.course.draw.player import Player
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.low_latency import draw, model, times
from moe_numba.course.lessons.low_latency.runs import Round, Sizes, first_error, random_rounds, run_rounds
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.source_diff import change, listing, passage
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.expert_parallel.low_latency import dispatch as low_latency_dispatch
from moe_numba.expert_parallel.low_latency import protocol as low_latency_protocol
from moe_numba.expert_parallel.low_latency.combine import add_row, round_sums
from moe_numba.expert_parallel.low_latency.layout import CLEAN_NAN, SENTINEL
from moe_numba.expert_parallel.low_latency.protocol import copied
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address, st_global_s32x4
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4, st_relaxed_sys_s32x4
from moe_numba.runtime.changed_source import changed_source, define, source_of

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # some kernels have few CTAs on purpose

# %% jupyter={"source_hidden": true} tags=["hide-input"]
RECORD = records.read("low_latency", "h200")
RANKS_RECORDED = sorted({row["config"]["ranks"] for row in RECORD["rows"]})
TOKEN_COUNTS = (1, 8, 32, 128, 256)
LINES = {
    "this notebook, packed by expert": "final",
    "this notebook, in slots": "in slots",
    "ring buffers (notebooks 12, 13)": "normal, graph",
    **times.peer_steps(RECORD),
}
PAIRS = {name: found for name, step in LINES.items() if (found := times.times_of(RECORD, step, 2))}
DEEPEP, NCCL = (next((n for n in PAIRS if n.startswith(name)), None) for name in ("DeepEP low", "NCCL all-to"))
VERSIONS = ", ".join(
    sorted({f"{row['step'][5:].split()[0]} {row['version']}" for row in RECORD["rows"] if "version" in row})
)
Markdown(
    f"**Result.** Dispatch and combine of a few tokens per rank on 2 GPUs ({RECORD['gpu']}), microseconds: hidden 7168, "
    "top-8 of 256 experts, bfloat16, median time of the slowest rank in a CUDA graph; all lines are measured interleaved "
    f"({VERSIONS}).\n\n" + times.table(PAIRS, TOKEN_COUNTS, "tokens per rank")
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PACKED, SLOTS, RING = (times.spread(RECORD, step, 2) for step in ("final", "in slots", "normal, graph"))
peers = [
    f"{100 * PACKED['median'] / PAIRS[name][1]:.0f} % of the time of {what}"
    for name, what in (
        (DEEPEP, "DeepEP's low-latency kernels, whose output has the same layout"),
        (NCCL, "NCCL's all-to-all"),
    )
    if name
]
Markdown(
    f"With 1 token the pair takes {PACKED['median']:.1f} us packed by expert"
    + (f": {', and '.join(peers)}" if peers else "")
    + f". In slots it takes {SLOTS['median']:.1f} us. Single samples vary: the 10th and 90th percentiles are "
    f"{PACKED['p10']:.1f} and {PACKED['p90']:.1f} us packed, {SLOTS['p10']:.1f} and {SLOTS['p90']:.1f} us in slots. "
    "NCCL's pairs send every token to all ranks and back; they neither select ranks nor place rows by expert, and the "
    "all-to-all does not add."
)

# %% [markdown]
# ## 1. A chain of dependent latencies
#
# With one token nothing overlaps: every operation waits for the one before it. Through ring buffers three kernels run:
#
# - **notify** exchanges counts, because a receiver must know how many rows arrive and where they go. Each rank stores
#   its counts in the memory of all others, executes a system-scope fence, stores a flag, and waits for the others'
#   flags.
# - **dispatch** moves a row in six dependent operations: a TMA bulk load into shared memory, a bulk store into the
#   peer's ring, a fence and the store of the ring's tail, the receiver's poll, a bulk load, and a bulk store into the
#   output.
# - **combine** does the same in the other direction.
#
# The **lower bound** is what no such pair avoids in either direction: a launch, a load (the token's experts), and a
# one-way NVLink latency. These are the latencies that all predictions below start from:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
BASICS = records.read("align_one_launch_ladder", "h200")["diagnosis"]["basics"]
LAUNCH_US = BASICS["empty, dependent"]
LOAD_US = (BASICS["2048 loads"] - BASICS["1024 loads"]) / 1024


def chain_us(one_way_us):
    """Return the time of two launches, each followed by a dependent load and a store to the peer that it polls."""
    return 2 * (LAUNCH_US + LOAD_US + one_way_us)


BOUND_US = chain_us(model.ONE_WAY_US)
latencies = (
    ("an empty kernel in a CUDA graph, with programmatic dependent launch", LAUNCH_US, "`align_one_launch_ladder`"),
    ("a load from L2 that depends on the load before", LOAD_US, "`align_one_launch_ladder`"),
    ("one way over NVLink: a flag is stored, and a poll of the peer reads it", model.ONE_WAY_US, model.MEASURED),
    ("the same with a system-scope fence before the store", model.FENCED_ONE_WAY_US, model.MEASURED),
)
Markdown(
    "| latency | us | record |\n|---|---:|---|\n"
    + "\n".join(f"| {what} | {us:.2f} | {where} |" for what, us, where in latencies)
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
bound = {
    "2 launches": ("launch", 2 * LAUNCH_US),
    "2 loads": ("memory", 2 * LOAD_US),
    "2 NVLink latencies": ("link", 2 * model.ONE_WAY_US),
}
chains = {name: times.spans({"": ("kernel", found[1])}) for name, found in PAIRS.items()}
draw.latency_chain(
    {**chains, "lower bound": times.spans(bound)},
    "Dispatch and combine of 1 token on 2 GPUs",
    f"Pairs: {plots.provenance(RECORD)}. Lower bound: table above.",
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The lower bound is {bound:.1f} us, {share:.0f} % of the {pair:.1f} us of ring buffers. Bandwidth is no part of it: at "
    "NVLink's 450 GB/s the bytes of one token take {wire:.2f} us each way.",
    bound=BOUND_US,
    share=100 * BOUND_US / RING["median"],
    pair=RING["median"],
    wire=model.bytes_each_way(2, 1) / 450e3,
)

# %% [markdown]
# ## 2. The reference
#
# Each rank has the same number of consecutive experts, and its memory has a **slot** for every token of every rank,
# `[source rank, token]`. Dispatch copies the row of a token to its slot on each rank that has one of the token's
# experts. These ranks compute one result row per slot. Combine sums the results of a token in rank order, in float32,
# and rounds once to bfloat16, so that the bits do not depend on which row arrives first.

# %%
RANKS, TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS = 2, 4, 64, 2, 2  # of the step kernels; tokens and experts are per rank


def slots_with_rows(topk_idx):
    """Return for each rank a mask [source rank, token]: the rank has one of the token's experts."""
    owners = torch.stack(topk_idx) // LOCAL_EXPERTS
    return [(owners == rank).any(dim=-1) for rank in range(RANKS)]


def combine_reference(y, masks):
    """Return the sums [source rank, token, hidden] of the results [source rank * token, hidden] of each rank."""
    total = torch.zeros(RANKS, TOKENS, HIDDEN)
    for rows, mask in zip(y, masks):
        total += torch.where(mask[..., None], rows.view(total.shape).float(), 0)
    return total.bfloat16()


def check(inputs, outputs):
    """Return what is wrong with the outputs of a round, or None."""
    x, masks = torch.stack(inputs.x), slots_with_rows(inputs.topk_idx)
    sums = combine_reference(inputs.y, masks)
    for rank, (got, mask) in enumerate(zip(outputs, masks)):
        if not torch.equal(got["has_row"].view(RANKS, TOKENS), mask.int()):
            return f"rank {rank}: has_row is wrong"
        wrong = (got["recv_x"].view(x.shape) != x).any(dim=-1) & mask
        if wrong.any():
            return f"rank {rank}: {int(wrong.sum())} of {int(mask.sum())} rows are wrong"
        if "out" in got and not torch.equal(got["out"].view(torch.int16), sums[rank].view(torch.int16)):
            return f"rank {rank}: the sums are wrong"
    return None


# %% [markdown]
# The kernels of the steps have no timeouts, so a wrong one may never end. They run in the simulator on every computer,
# with two **virtual ranks** (`LocalGroup(2)`), and are checked, but not timed. `first_error` runs four rounds of random
# inputs under each of six seeds, which determine the order of the threads. Simulated memory is **weakly ordered**:
# stores become visible late and in any order, unless a fence or a release orders them. All rounds are queued at once,
# so a rank runs as far ahead of the other as the kernels permit. Outputs are filled with NaN first.
#
# Times are those of the package's kernels, which use the same protocols; section 8 lists what they add.


# %%
def error_of(name, source, combine=None, packed=False):
    """Return the first error of a kernel whose factory has this source, or None."""
    sizes = Sizes(RANKS, TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS)
    kernels = [define(source, globals(), f"{name}.py")[name](sizes), combine and globals()[combine](sizes)]
    return first_error(sizes, check_packed if packed else check, *kernels, packed)


def try_kernel(what, make, source=None, combine=None, packed=False, expect_wrong=False):
    """Check a kernel in the simulator, and print what is wrong with it; raise an error unless that is expected."""
    others = [make, make_combine] if combine else [make]  # what the simulator's process needs on a GPU
    arguments = make.__name__, source or source_of(make), combine, packed
    error = in_simulator(error_of, *arguments, functions=[*others, check, check_packed])
    print(f"{what}: {f'rejected: {error}' if error else 'correct in all rounds'}")
    assert bool(error) == expect_wrong, error or f"{what}: the check accepts a wrong kernel"


def check_packed(inputs, outputs):
    """As `check`, for rows packed by expert (step 4)."""
    for rank, got in enumerate(outputs):
        for e, count in enumerate(got["counts"].tolist()):
            has_expert = (torch.stack(inputs.topk_idx) == rank * LOCAL_EXPERTS + e).any(dim=-1)
            rows = torch.stack(inputs.x)[has_expert]  # by source rank, then by token
            if count != len(rows) or not torch.equal(got["recv_x"][e, :count], rows):
                return f"rank {rank}: the rows of expert {e} are wrong"
    return None


# %% [markdown]
# ## 3. Step 1: fixed slots, flags after data
#
# **Bottleneck.** The counts and the rings: no row leaves before `notify` has ended, and each row passes through shared
# memory and a ring. Their shares of the pair's time are not measured.
#
# **Idea.** The address of a slot depends only on the rank and the number of the token. Nothing must be counted, and a
# sender needs no answer. CTA `t` sends token `t` of its rank and receives token `t` of every rank:
#
# - It stores the row directly in the slot on each rank that has one of the token's experts.
# - After a barrier and a system-scope fence it stores a **flag** on *all* ranks: for the n-th dispatch (**operation**
#   n) `2 * n`, plus 1 if the slot has a row. Thus a rank receives for every slot whether it has a row.
# - It polls the flags of token `t` from all ranks, and copies the rows to the output.
#
# A CUDA graph passes the same arguments in each replay, so every CTA counts the operations itself, in `epochs`. Flags
# contain this number, so they are never cleared. Slots are double-buffered, in two **halves** that operations use
# alternately: a rank in operation n + 1 does not overwrite rows that another rank still reads in operation n. A rank
# cannot be two operations ahead, because operation n + 1 ends only with the flags of all ranks, which they store after
# their operation n. All CTAs must be resident at the same time, because they wait for CTAs of other ranks.
#
# A flag has few bits for the number: `2 * number` overflows after 2^30 operations, and the `number << 8` of step 4
# after 2^23, whereupon a receiver would wait forever. So numbers wrap after 2^22 operations. A few values suffice,
# since a slot holds the flag of operation n - 2 or n; their count must be even, so that the halves alternate.
#
# **Predicted time of the pair** (step 3 builds the combine): two launches, two loads, two fenced one-way NVLink
# latencies.

# %%
NUMBERS = (1 << 22) - 1  # operations are counted modulo 2^22


@cache
def make_targets(topk, local_experts):
    @cuda.jit(device=True)
    def targets_of(topk_idx, token):
        """Return the mask of the ranks that have one of a token's experts."""
        mask = int32(0)
        for k in range(topk):
            mask = int32(mask | 1 << (topk_idx[token * topk + k] // local_experts))
        return mask

    return targets_of


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_flags(sizes):
    ranks, tokens, slots, words, rows = sizes.ranks, sizes.tokens, sizes.slots, sizes.hidden // 2, sizes.metadata_words
    targets_of = make_targets(sizes.topk, sizes.local_experts)

    @cuda.jit
    def dispatch(local, peers, epochs, rank, x, topk_idx, recv_x, has_row):
        lane, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        number = int32(epochs[token] + 1 & NUMBERS)  # of this operation
        half, targets = int32(number & 1), targets_of(topk_idx, token)
        slot = int32(half * slots + rank * tokens + token)
        for r in range(ranks):
            if targets >> r & 1:
                remote = pointer_from_address(peers[r], local)
                for i in range(4 * lane, words, 128):
                    a, b, c, d = ld_global_s32x4(x, token * words + i)
                    st_relaxed_sys_s32x4(remote, rows + slot * words + i, a, b, c, d)
        cuda.syncthreads()  # all lanes have stored their part
        if lane < ranks:
            fence_acq_rel_sys()
            remote = pointer_from_address(peers[lane], local)
            st_relaxed_sys_s32(remote, slot, int32(2 * number + (targets >> lane & 1)))
        for r in range(ranks):
            slot, out = int32(half * slots + r * tokens + token), int32(r * tokens + token)
            flag = ld_acquire_sys_s32(local, slot)
            while flag >> 1 != number:
                flag = ld_acquire_sys_s32(local, slot)
            has_row[out] = flag & 1
            if flag & 1:
                for i in range(4 * lane, words, 128):
                    a, b, c, d = ld_global_s32x4(local, rows + slot * words + i)
                    st_global_s32x4(recv_x, out * words + i, a, b, c, d)
        cuda.syncthreads()
        if lane == 0:
            epochs[token] = number

    return dispatch


# %% [markdown]
# `local` is the memory of this rank, `peers` has the addresses of that of all ranks. `sizes.metadata_words` is where
# the rows begin, behind the flags. These lines of the kernel (folded above) are the protocol:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
passage(make_flags, "cuda.syncthreads()  # all lanes", "has_row[out] = flag & 1")

# %%
try_kernel("flags after data", make_flags)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def where_time_goes(step):
    """Format the parts of the recorded time of a pair of 1 token on 2 GPUs."""
    parts = times.parts_of(RECORD, step, model.ONE_WAY_US)
    return " + ".join(f"{us:.1f} us ({name})" for name, us in parts.items())


FLAGS_US = times.spread(RECORD, "in slots, flags", 2)["median"]
fenced_us = chain_us(model.FENCED_ONE_WAY_US)
say(
    "**Measured.** 1 token, 2 GPUs: {ring:.1f} us through ring buffers, {flags:.1f} us with flags. The predicted time is "
    "{fenced:.1f} us; the pair takes {ratio:.1f} times as long.\n\n"
    "**Where does the rest go?** {flags:.1f} us = {parts}. One rank alone, whose rows do not cross NVLink, already takes "
    "{alone:.1f} us: the prediction leaves out loads that wait for one another (the number of the operation, then the row, "
    "at the receiver the row again), barriers, and the fences. With two GPUs a fence also waits for the peer's acknowledgements, which is in the rest; "
    "section 9 discusses it.\n\n"
    "Slots need memory for the worst case: 8 ranks x 128 tokens x 14336 bytes x 2 halves are {mb:.0f} MB on each rank.",
    ring=RING["median"],
    flags=FLAGS_US,
    fenced=fenced_us,
    ratio=FLAGS_US / fenced_us,
    parts=where_time_goes("in slots, flags"),
    alone=times.spread(RECORD, "in slots, flags", 1)["median"],
    mb=8 * 128 * 14336 * 2 / 1e6,
)

# %% [markdown]
# The player shows two operations of a simulated run, with rows of 16 bytes: the slots of both ranks, with the flag
# above and the row below. `1:0` is token 0 of rank 1.


# %%
def play(name, source, data_is_flag):
    sizes, rows = Sizes(2, 2, 8, 1, 1), torch.ones(4, 8).bfloat16()  # one expert on each rank
    operations = [[[0], [1]], [[0], [0]]], [[[1], [0]], [[0], [1]]]  # experts by rank and token
    rounds = [Round([rows[:2]] * 2, [torch.tensor(ids) for ids in experts], [rows] * 2) for experts in operations]
    kernel = define(source, globals(), f"{name}.py")[name](sizes)
    with simulator.seed(1), simulator.trace(accesses=True) as events:
        run_rounds(sizes, rounds, kernel)
    title = "Data as its own flag" if data_is_flag else "Flags after data"
    return Player(*draw.slot_frames(events, sizes, data_is_flag), f"{title}: slots of two ranks").as_dict()


player = Player.from_dict(in_simulator(play, "make_flags", source_of(make_flags), False, functions=[make_flags]))
player

# %% [markdown]
# Viewers that run no scripts, such as GitHub's, show only the last frame; open the notebook in Jupyter to step through
# all of them. Here are three: the first flag, the first flag of a row, and a store of rank 1 in operation 2 while rank 0
# still has to read a row of operation 1. The two rows are in different halves.


# %%
def frame_of(player, *words):
    """Return the number of the first frame whose sentence contains these words, in this order."""
    notes = [frame.note for frame in player.frames]
    return next(n for n, note in enumerate(notes) if all(word in note for word in words))


player.strip([frame_of(player, "flag"), frame_of(player, ": row."), frame_of(player, "Operation 2", "the row")])

# %% [markdown]
# ## 4. Step 2: the data is its own flag
#
# **Bottleneck.** The fence. It waits until the row's stores are acknowledged, presumably one NVLink round trip; only
# then does the flag leave, another one-way trip.
#
# **Idea.** The receiver polls the row itself. TensorRT-LLM, whose all-reduce uses this protocol, calls it "Lamport".
#
# - Every word of an empty slot holds a **sentinel**, `0xFFFFFFFF`. A 16-byte vector has arrived when *none* of its four
#   words is the sentinel, because PTX treats a vector access as four accesses in no order.
# - `clean` replaces words of a row that equal the sentinel. Such a word is two bfloat16 NaNs, and remains two NaNs.
# - After reading, the receiver **resets** the slot to the sentinel, for operation n + 2, which uses the same half. A
#   sender of operation n + 2 has received the receiver's metadata of operation n + 1. At that time the receiver's
#   kernel of operation n had ended, with all its resets.
# - The word that signals whether the slot has a row is now **metadata**. It contains the number of the operation, so it
#   is its own flag. Within an operation no ordering between stores is required: all are relaxed, without fence or
#   barrier.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GAIN_US = 2 * (model.FENCED_ONE_WAY_US - model.ONE_WAY_US)
say(
    "**Predicted gain.** In the ping-pong of section 1 a fence adds {fence:.2f} us to a one-way latency, so dispatch and "
    "combine gain {gain:.1f} us together. That is a lower estimate: a fence of the ping-pong has no row's stores to wait "
    "for, whose acknowledgement takes a round trip, {trip:.2f} us.",
    fence=model.FENCED_ONE_WAY_US - model.ONE_WAY_US,
    gain=GAIN_US,
    trip=2 * model.ONE_WAY_US,
)

# %% [markdown]
# `has_arrived`, `clean` and `wait_vector` are the protocol:


# %%
@cuda.jit(device=True)
def has_arrived(a, b, c, d):
    return (a != SENTINEL) & (b != SENTINEL) & (c != SENTINEL) & (d != SENTINEL)


@cuda.jit(device=True)
def clean(word):
    return int32(CLEAN_NAN) if word == SENTINEL else word


@cuda.jit(device=True)
def wait_vector(local, offset):
    a, b, c, d = copied(ld_relaxed_sys_s32x4(local, offset))
    while not has_arrived(a, b, c, d):
        a, b, c, d = copied(ld_relaxed_sys_s32x4(local, offset))
    return a, b, c, d


# %% [markdown]
# `copied` copies four registers; ptxas removes the copies. Without it NVVM of CUDA 13.0 does not finish compiling a
# loop that polls with a vector load:

# %%
listing(copied)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_lamport(sizes):
    ranks, tokens, slots, words, rows = sizes.ranks, sizes.tokens, sizes.slots, sizes.hidden // 2, sizes.metadata_words
    targets_of = make_targets(sizes.topk, sizes.local_experts)

    @cuda.jit
    def dispatch(local, peers, epochs, rank, x, topk_idx, recv_x, has_row):
        lane, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        number = int32(epochs[token] + 1 & NUMBERS)  # of this operation
        half, targets = int32(number & 1), targets_of(topk_idx, token)
        slot = int32(half * slots + rank * tokens + token)
        if lane < ranks:
            remote = pointer_from_address(peers[lane], local)
            st_relaxed_sys_s32(remote, slot, int32(2 * number + (targets >> lane & 1)))
        for r in range(ranks):
            if targets >> r & 1:
                remote = pointer_from_address(peers[r], local)
                for i in range(4 * lane, words, 128):
                    a, b, c, d = ld_global_s32x4(x, token * words + i)
                    st_relaxed_sys_s32x4(remote, rows + slot * words + i, clean(a), clean(b), clean(c), clean(d))
        for r in range(ranks):
            slot, out = int32(half * slots + r * tokens + token), int32(r * tokens + token)
            flag = ld_relaxed_sys_s32(local, slot)
            while flag >> 1 != number:
                flag = ld_relaxed_sys_s32(local, slot)
            has_row[out] = flag & 1
            if flag & 1:
                for i in range(4 * lane, words, 128):
                    a, b, c, d = wait_vector(local, rows + slot * words + i)
                    st_relaxed_sys_s32x4(local, rows + slot * words + i, SENTINEL, SENTINEL, SENTINEL, SENTINEL)
                    st_global_s32x4(recv_x, out * words + i, a, b, c, d)
        cuda.syncthreads()
        if lane == 0:
            epochs[token] = number

    return dispatch


# %%
change(make_flags, make_lamport)

# %%
try_kernel("data as its own flag", make_lamport)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
gain = Judgement(FLAGS_US, SLOTS["median"], GAIN_US)
flags_alone, slots_alone = (times.spread(RECORD, step, 1)["median"] for step in ("in slots, flags", "in slots"))
say(
    "**Measured.** 1 token, 2 GPUs, both protocols interleaved: {gain}.\n\n"
    "**Explanation.** The prediction counts NVLink only. One rank alone gains {alone:.1f} us, although it sends no row: "
    "with flags it still has sending CTAs in dispatch, which execute a barrier and a system-scope fence, while with data as "
    "its own flag it has none; and combine signals its start with a release at system scope instead of a relaxed store. Two "
    "GPUs gain {link:.1f} us beyond that, where {gain_us:.1f} us were predicted.",
    gain_us=GAIN_US,
    gain=gain,
    alone=flags_alone - slots_alone,
    link=gain.saved_us - (flags_alone - slots_alone),
)

# %% [markdown]
# The player shows the same two operations as before. Nothing is orange, because a row may be read as soon as it is
# stored. The receiver stores the sentinel after reading.

# %%
player = Player.from_dict(in_simulator(play, "make_lamport", source_of(make_lamport), True, functions=[make_lamport]))
player

# %%
player.strip([frame_of(player, "the row"), frame_of(player, "reads"), frame_of(player, "Operation 2", "the row")])

# %% [markdown]
# **Exercise 1.** Two ranks exchange one word per launch; each launch has one thread per rank. `local` has two words,
# which hold the sentinel at first, and `epoch[0]` is the number of earlier launches. No value equals the sentinel.
# Repair the kernel, which has two mistakes.


# %%
@cuda.jit
def exchange(local, peers, epoch, rank, value, out):
    remote = pointer_from_address(peers[1 - rank], local)
    st_relaxed_sys_s32(remote, 0, value[0])
    word = ld_relaxed_sys_s32(local, 0)
    while word == SENTINEL:
        word = ld_relaxed_sys_s32(local, 0)
    out[0] = word
    epoch[0] += 1


exercise("low_latency-1").check(exchange)

# %% [markdown]
# ## 5. Step 3: combine in rank order
#
# **Bottleneck.** Through ring buffers a result row takes the same six dependent operations as in dispatch (section 1),
# and the receiver waits until rings reach positions that the dispatch recorded. Adding rows in the order of arrival
# would need no such record, but the bits of a sum would change from run to run.
#
# **Idea.** Combine uses the same protocol with slots `[expert rank, token]` in the memory of the source rank. The
# source computes from its own `topk_idx` which ranks send a row, so combine needs no metadata. Rows may arrive in any
# order; each thread waits for them in rank order, adds them in float32 and rounds once. `add_row` and `round_sums` are
# the package's.
#
# **Predicted time.** Half of the lower bound: a launch, a load, a one-way NVLink latency. The order costs no time: all
# rows are on their way at once, and the sum is complete with the last of them in any order.

# %%
listing(add_row)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_combine(sizes):
    ranks, tokens, slots, words = sizes.ranks, sizes.tokens, sizes.slots, sizes.hidden // 2
    targets_of = make_targets(sizes.topk, sizes.local_experts)

    @cuda.jit
    def combine(local, peers, epochs, rank, y, has_row, topk_idx, out):
        vector, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
        lane, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        number = int32(epochs[token] + 1 & NUMBERS)
        half, targets = int32(number & 1), targets_of(topk_idx, token)
        slot = int32(half * slots + rank * tokens + token)
        for source in range(ranks):
            row = int32(source * tokens + token)
            if has_row[row]:
                remote = pointer_from_address(peers[source], local)
                for i in range(4 * lane, words, 128):
                    a, b, c, d = ld_global_s32x4(y, row * words + i)
                    st_relaxed_sys_s32x4(remote, slot * words + i, clean(a), clean(b), clean(c), clean(d))
        for i in range(4 * lane, words, 128):
            for j in range(8):
                sums[j] = float32(0)
            for r in range(ranks):  # in rank order
                if targets >> r & 1:
                    at = int32((half * slots + r * tokens + token) * words + i)
                    vector[0], vector[1], vector[2], vector[3] = wait_vector(local, at)
                    st_relaxed_sys_s32x4(local, at, SENTINEL, SENTINEL, SENTINEL, SENTINEL)
                    add_row(sums, vector, 0, float32(1))
            round_sums(sums, vector)
            st_global_s32x4(out, token * words + i, vector[0], vector[1], vector[2], vector[3])
        cuda.syncthreads()
        if lane == 0:
            epochs[token] = number

    return combine


# %%
passage(make_combine, "for j in range(8):", "st_global_s32x4(out")

# %%
try_kernel("dispatch and combine", make_lamport, combine="make_combine")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "**Measured.** The record times pairs, since the combine's wait keeps the ranks together: {pair:.1f} us for dispatch "
    "and combine with 1 token on 2 GPUs, {half:.1f} us for each of the two on average, where the lower bound of one is "
    "{bound:.1f} us. Where it goes: {parts}; see section 9.",
    pair=SLOTS["median"],
    half=SLOTS["median"] / 2,
    bound=BOUND_US / 2,
    parts=where_time_goes("in slots"),
)

# %% [markdown]
# The check compares bits. In these rounds every dispatch is followed by a combine, and the metadata of the next
# dispatch keeps the ranks within one operation of each other. In the package a combine may also follow a combine: every
# rank signals to all others that its combine has started, and waits for their signals.
#
# ## 6. Step 4: packed by expert
#
# **Bottleneck.** The grouped GEMM ([notebook 07](07_grouped_gemm.ipynb)) reads the rows of each expert one after the
# other. Its **masked** layout is `[local experts, capacity, hidden]`, with the number of rows of each expert on the
# GPU. Rows in slots would have to be copied once more, in another launch.
#
# **Idea.** A row's **place**, its index within its expert, is the number of earlier slots with that expert. Metadata
# now names the experts, in one word for each of the top-k. Every CTA collects the metadata of all slots in shared
# memory and counts, so that no CTA needs results of another one. Rows of an expert are ordered by source rank, then by
# token, in every run.
#
# The combine of packed rows also does more. Each rank first sums the rows of its own experts, times their weights, in
# float32, and rounds to bfloat16, so that one row per rank and token is sent. The source sums these rows as in step 3.
#
# **Predicted gain.** Negative. To each rank metadata leaves before the row, so it adds no NVLink latency to dispatch.
# In combine the expert ranks need the weights, which the source sends first: one more one-way NVLink latency. They load
# row numbers, then rows: two more dependent loads.

# %%
EXAMPLE_IDS = [[[0, 1], [2, 0], [3, 2], [1, 3]], [[2, 3], [0, 3], [1, 2], [0, 1]]]  # 2 experts on each of 2 ranks
draw.packed_rows(EXAMPLE_IDS, rank=1, local_experts=2)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_packed(sizes):
    ranks, tokens, slots, words, rows = sizes.ranks, sizes.tokens, sizes.slots, sizes.hidden // 2, sizes.metadata_words
    topk, local_experts, entries = sizes.topk, sizes.local_experts, sizes.slots * sizes.topk
    targets_of = make_targets(topk, local_experts)

    @cuda.jit
    def dispatch(local, peers, epochs, rank, x, topk_idx, recv_x, counts):
        experts = cuda.shared.array(entries, int32)  # of all slots
        lane, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        number = int32(epochs[token] + 1 & NUMBERS)  # of this operation
        half, targets = int32(number & 1), targets_of(topk_idx, token)
        slot = int32(half * slots + rank * tokens + token)
        for r in range(ranks):
            remote = pointer_from_address(peers[r], local)
            if lane < topk:
                expert = int32(topk_idx[token * topk + lane] - r * local_experts)
                code = expert if 0 <= expert < local_experts else int32(255)
                st_relaxed_sys_s32(remote, slot * topk + lane, int32(number << 8 | code))
            if targets >> r & 1:
                for i in range(4 * lane, words, 128):
                    a, b, c, d = ld_global_s32x4(x, token * words + i)
                    st_relaxed_sys_s32x4(remote, rows + slot * words + i, clean(a), clean(b), clean(c), clean(d))
        for j in range(lane, entries, 32):
            word = ld_relaxed_sys_s32(local, half * entries + j)
            while word >> 8 != number:
                word = ld_relaxed_sys_s32(local, half * entries + j)
            experts[j] = word & 255
        cuda.syncthreads()
        for r in range(ranks):
            first = int32((r * tokens + token) * topk)  # entry of this slot
            for i in range(4 * lane, words, 128):
                at, has_read = int32(rows + (half * slots + r * tokens + token) * words + i), False
                for k in range(topk):
                    expert, place = experts[first + k], int32(0)
                    if expert < 255:
                        if not has_read:
                            a, b, c, d = wait_vector(local, at)
                            st_relaxed_sys_s32x4(local, at, SENTINEL, SENTINEL, SENTINEL, SENTINEL)
                            has_read = True
                        for j in range(first):
                            place = int32(place + (experts[j] == expert))
                        st_global_s32x4(recv_x, (expert * slots + place) * words + i, a, b, c, d)
        if token == 0 and lane < local_experts:
            count = int32(0)
            for j in range(entries):
                count = int32(count + (experts[j] == lane))
            counts[lane] = count
        cuda.syncthreads()
        if lane == 0:
            epochs[token] = number

    return dispatch


# %%
change(make_lamport, make_packed)

# %%
try_kernel("packed by expert", make_packed, packed=True)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
loss = Judgement(SLOTS["median"], PACKED["median"], -(model.ONE_WAY_US + 2 * LOAD_US))
packed_alone = times.spread(RECORD, "final", 1)["median"]
say(
    "**Measured.** 1 token, 2 GPUs, slots against packed by expert: {loss}.\n\n"
    "**Explanation.** One rank alone already loses {alone:.1f} us ({slots:.1f} -> {packed:.1f} us), without NVLink: "
    "receivers clear and fill a set of slots for each expert in shared memory between barriers, no CTA places a row before "
    "the metadata of all slots has arrived, a row is written once per expert, and combine reads and sums as many rows; "
    "their shares are not measured. "
    "The {link:.1f} us that two GPUs lose beyond that contain the trip of the weights. Packing replaces a separate copy: "
    "a launch that reads and writes every row again.",
    loss=loss,
    alone=packed_alone - slots_alone,
    slots=slots_alone,
    packed=packed_alone,
    link=-loss.saved_us - (packed_alone - slots_alone),
)

# %% [markdown]
# **Exercise 2.** Compute the places in torch. `experts` is `[slots, topk]`, with local experts, or -1 for experts on
# other ranks. Return a tensor of the same shape with the number of earlier elements that are equal, or -1.

# %%
place_rows = ...
exercise("low_latency-2").check(place_rows)

# %% [markdown]
# ## 7. Wrong kernels
#
# A run on a GPU may hide the following mistakes: they show only if ranks are an operation apart or stores become
# visible out of order. Each mistake replaces one passage of a dispatch, and the check must reject it in the simulator.

# %%
RESET = (
    "                    st_relaxed_sys_s32x4(local, rows + slot * words + i, SENTINEL, SENTINEL, SENTINEL, SENTINEL)\n"
)
BARRIER = "        cuda.syncthreads()  # all lanes have stored their part\n"
MISTAKES = {
    "one half, flags": (make_flags, "int32(number & 1)", "int32(0)"),
    "one half, own flag": (make_lamport, "int32(number & 1)", "int32(0)"),
    "sentinel not reset": (make_lamport, RESET, ""),
    "flag without fence": (make_flags, "            fence_acq_rel_sys()\n", ""),
    "flag without barrier": (make_flags, BARRIER, ""),
}
for name, (make, right, wrong) in MISTAKES.items():
    try_kernel(name, make, changed_source(make, right, wrong), expect_wrong=True)

# %% [markdown]
# - **One half** is reused too early: a rank that is one operation ahead overwrites rows that the other has not read.
#   With flags, rows are wrong. With data as its own flag the receiver also resets newer rows, and both ranks wait
#   forever.
# - **Sentinel not reset**: two operations later the poll ends at once, with the old row.
# - **A flag before its data**: without the fence the flag may become visible before the row. Without the barrier, lane
#   0 may store the flag before other lanes have stored their parts of the row.
#
# ## 8. What the package adds
#
# The package's kernels follow steps 1 to 4. Two additions follow; their gains are not measured here.
#
# **Placement by bits.** In step 4 every thread that places a row walks through all earlier slots. In the package each
# receiving CTA builds a bit set of slots for each expert in shared memory, as the metadata arrives. A row's place is
# the number of bits before its own: one warp counts 32 words at once, with a population count and a warp reduction.

# %%
make_dispatch = low_latency_dispatch.make_low_latency_dispatch
listing((make_dispatch, "add_slot"), (make_dispatch, "count_slots"))

# %% [markdown]
# **Senders and receivers.** In the steps a CTA sends its token and then receives. Loads issued after stores to a peer
# probably wait until NVLink has accepted the stores. In the package each CTA of a launch does one of the two: the first
# third of the CTAs sends, and the others read slots meanwhile. They begin with the rank's own rows, which need no slot,
# and if tokens are few, several CTAs share a row.

# %%
listing(low_latency_protocol.roles, low_latency_protocol.slot_at)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
MOST = max(PAIRS["this notebook, packed by expert"])
wire_us = 2 * model.bytes_each_way(2, MOST) / 450e3
say(
    "**Recorded** with these kernels, 2 GPUs: placement and everything else that packing adds takes {few:.1f} us with 1 "
    "token and {many:.1f} us with {most} tokens, {alone:.1f} and {alone_many:.1f} us on one rank alone. In slots the pair "
    "of {most} tokens takes {slots:.1f} us; at NVLink's 450 GB/s its bytes alone take {wire:.1f} us, {share:.0f} % of that.",
    few=-loss.saved_us,
    many=PAIRS["this notebook, packed by expert"][MOST] - PAIRS["this notebook, in slots"][MOST],
    alone=packed_alone - slots_alone,
    alone_many=times.times_of(RECORD, "final", 1)[MOST] - times.times_of(RECORD, "in slots", 1)[MOST],
    most=MOST,
    slots=PAIRS["this notebook, in slots"][MOST],
    wire=wire_us,
    share=100 * wire_us / PAIRS["this notebook, in slots"][MOST],
)

# %% [markdown]
# Further additions are what a server needs:
#
# - Every wait has a timeout. A rank that is late or dead is marked in a mask, and tokens with experts on it become NaN.
#   The next call raises an error, or with `enable_shrink` the other ranks continue without it.
# - Dispatch can quantise rows to FP8, with scales, and combine the sums that it sends (`use_fp8_combine`). Combine
#   applies the top-k weights of packed rows. A word of metadata has two experts and the low bits of the operation's
#   number.
# - `return_recv_hook` splits a call into a send phase and a receive phase; no SM is in use between the two.
# - `protocol="lamport"`, data as its own flag, is the default; `"flags"` is the protocol of step 1.
#
# `Buffer.low_latency_dispatch` and `low_latency_combine` have DeepEP's names and arguments. `Buffer.low_latency`
# prepares a pair with fixed outputs, which a CUDA graph can capture. The next cell runs both, on two virtual ranks:

# %%
LAYER = Sizes(2, 4, 64, 2, 4) if simulator.ENABLED else Sizes(2, 8, 7168, 8, 128)
NUM_EXPERTS = LAYER.ranks * LAYER.local_experts
INPUTS = random_rounds(LAYER, 1, seed=0)[0]
WEIGHTS = [torch.rand(LAYER.tokens, LAYER.topk) for _ in range(LAYER.ranks)]
FACTORS = 1 + torch.arange(NUM_EXPERTS) / NUM_EXPERTS  # expert e multiplies rows by FACTORS[e]


def decode_step(transport):
    """Dispatch, apply this rank's experts, and combine, through both interfaces."""
    own = slice(transport.rank * LAYER.local_experts, (transport.rank + 1) * LAYER.local_experts)
    factors = FACTORS[own, None, None].to(transport.device)
    given = INPUTS.x[transport.rank], INPUTS.topk_idx[transport.rank], WEIGHTS[transport.rank]
    x, topk_idx, weights = (tensor.to(transport.device) for tensor in given)
    buffer = Buffer(transport, low_latency_mode=True)

    recv_x, recv_count, handle, event, hook = buffer.low_latency_dispatch(
        x, topk_idx, LAYER.tokens, NUM_EXPERTS, use_fp8=False
    )
    y = (recv_x.float() * factors).bfloat16()  # a masked grouped GEMM takes recv_x and recv_count
    combined, event, hook = buffer.low_latency_combine(y, topk_idx, weights, handle)

    pair = buffer.low_latency(LAYER.tokens, LAYER.hidden, NUM_EXPERTS, LAYER.topk)
    received = pair.dispatch(x, topk_idx)
    again = pair.combine((received.x.float() * factors).bfloat16(), topk_idx, weights).clone()
    buffer.check(synchronize=True)  # raises the error of a timeout
    pair.close()
    buffer.destroy()
    return combined.cpu(), again.cpu(), recv_count.tolist()


for rank, (combined, again, counts) in enumerate(LocalGroup(LAYER.ranks).run(decode_step)):
    factors, weights = FACTORS[INPUTS.topk_idx[rank]], WEIGHTS[rank]
    results = (INPUTS.x[rank].float()[:, None] * factors[..., None]).bfloat16().double()  # [tokens, topk, hidden]
    expected, size = ((part * weights[..., None]).sum(dim=1) for part in (results, results.abs()))
    assert torch.equal(combined, again) and ((combined - expected).abs() <= 2**-7 * size).all()
    print(f"rank {rank}: right, the same bits twice; it received {sum(counts)} rows for {len(counts)} experts")

# %% [markdown]
# In a CUDA graph, and with FP8 rows and a receive hook, where `experts` are the model's expert layers, and `w13` and
# `w13_scale` FP8 weights with their scales:
#
# ```python
# with torch.cuda.graph(graph):  # after one call outside of it
#     received = pair.dispatch(x, topk_idx)
#     out = pair.combine(experts(received.x, received.counts), topk_idx, weights)
#
# (values, scales), counts, handle, _, receive = buffer.low_latency_dispatch(
#     x, topk_idx, 128, num_experts, use_fp8=True, return_recv_hook=True
# )
# receive()  # other kernels may run between the two phases
# y = moe_numba.group_gemm_blockwise_fp8(values, w13, counts, None, scales.contiguous(), w13_scale)
# ```

# %% [markdown]
# ## 9. Times
#
# ### Where does the time go?
#
# `python -m moe_numba bench low_latency` measures the pair in a CUDA graph, for one rank alone and for groups of GPUs.
# One rank alone has 128 experts, as many as each of two ranks has. It copies its own tokens, and nothing crosses
# NVLink: what remains is the cost of the launches and of the work on the GPU. Two ranks add two one-way NVLink
# latencies to it, and a rest.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
KINDS = {"one rank alone": "kernel", "2 NVLink latencies": "link", "rest": "rest"}
STEPS = {
    "step 1: slots, flags": "in slots, flags",
    "steps 2 and 3: slots": "in slots",
    "step 4: packed by expert": "final",
}
PARTS = {name: times.parts_of(RECORD, step, model.ONE_WAY_US) for name, step in STEPS.items()}
draw.latency_chain(
    {name: times.spans({part: (KINDS[part], us) for part, us in parts.items()}) for name, parts in PARTS.items()},
    "1 token on 2 GPUs: recorded time, split",
    f"Pairs and one rank alone: {plots.provenance(RECORD)}. NVLink: table of section 1.",
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
spread_us = {ranks: times.spread(RECORD, "in slots", ranks) for ranks in (1, 2)}
width_us = {ranks: found["p90"] - found["p10"] for ranks, found in spread_us.items()}
say(
    "In slots {alone:.1f} of {pair:.1f} us are work on one GPU, of which two launches and two loads explain {known:.1f} us. "
    "NVLink explains {link:.1f} us, and {rest:.1f} us are left. No measurement divides this rest. One candidate is that whole "
    "rows are stored and polled, while the latency in the table is that of one word. Another one is waiting for the slower "
    "rank, which each dispatch and each combine do; if that varies, it is a small part: between the 10th and the 90th "
    "percentile, samples span {two:.1f} us on 2 GPUs, {one:.1f} us on one.",
    alone=PARTS["steps 2 and 3: slots"]["one rank alone"],
    pair=SLOTS["median"],
    known=2 * (LAUNCH_US + LOAD_US),
    link=PARTS["steps 2 and 3: slots"]["2 NVLink latencies"],
    rest=PARTS["steps 2 and 3: slots"]["rest"],
    two=width_us[2],
    one=width_us[1],
)

# %% [markdown]
# ### One rank alone
#
# Packing writes 8 rows per token of the rank, as on average with several ranks. Why packing takes longer with 1 token
# than with 8 is not known.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
OPTIONS = {
    "in slots": ("in slots", "bf16"),
    "in slots, flags": ("in slots, flags", "bf16"),
    "packed by expert": ("final", "bf16"),
    "packed, flags": ("flags", "bf16"),
    "packed, FP8 dispatch": ("final", "e4m3"),
}
alone = {name: times.times_of(RECORD, step, 1, dtype) for name, (step, dtype) in OPTIONS.items()}
TITLE = "One rank alone: dispatch and combine, hidden 7168, top-8 of 128 experts"
plots.sweep_figure(alone, caption=plots.caption(RECORD), title=TITLE)

# %% [markdown]
# ### More tokens, more GPUs: a model
#
# The model adds a constant, for all latencies of a pair, and the time of the bytes that a rank sends in each direction.
# Both are fitted to the record of 2 GPUs, in slots. With more GPUs a rank sends each token to more ranks; the
# extrapolated columns assume the same constant and bandwidth, and nothing has confirmed them.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
RECORDED = times.times_of(RECORD, "in slots", 2)
MODEL = model.fit(2, RECORDED)
COLUMNS = {}
for n in (2, 4, 8):
    if n in RANKS_RECORDED:
        COLUMNS[f"{n} GPUs, recorded"] = times.times_of(RECORD, "in slots", n)
    kind = "fit" if n == 2 else "extrapolated"
    COLUMNS[f"{n} GPUs, {kind}"] = {tokens: MODEL.pair_us(n, tokens) for tokens in RECORDED}
by_tokens = {str(tokens): {name: column[tokens] for name, column in COLUMNS.items()} for tokens in RECORDED}
Markdown(
    f"Fit: {MODEL.latency_us:.1f} us + bytes of both directions / {MODEL.gbps:.0f} GB/s, {MODEL.gbps / 4.5:.0f} % of NVLink's "
    f"rate; its largest deviation from the record is {100 * MODEL.deviation(2, RECORDED):.0f} %. Microseconds, bfloat16 rows "
    "in slots:\n\n" + times.table(by_tokens, COLUMNS, "tokens")
)

# %% [markdown]
# **Exercise 3.** On two GPUs every token goes to the other rank (hidden 7168, bfloat16). With how many tokens per rank
# do the bytes of dispatch and combine together take as long as the constant of the model? Write a function of the model
# above, whose `latency_us` and `gbps` are its two numbers.

# %%
break_even_tokens = ...
exercise("low_latency-3").check(break_even_tokens)

# %% [markdown]
# ## 10. Sources
#
# - DeepSeek: [DeepEP](https://github.com/deepseek-ai/DeepEP), `low_latency_dispatch` and `low_latency_combine`, whose
#   interface the package follows. DeepEP sends a row once per expert; this package sends it once per rank.
# - NVIDIA: TensorRT-LLM, one-shot all-reduce ("Lamport": the data is its own flag), and its one-sided NVLink
#   all-to-all.
# - NVIDIA: *PTX ISA*, memory consistency model, vector accesses; *CUDA C++ Programming Guide*, programmatic dependent
#   launch.
# - The final kernels: [`dispatch.py`](../moe_numba/expert_parallel/low_latency/dispatch.py) and
#   [`combine.py`](../moe_numba/expert_parallel/low_latency/combine.py), with
#   [`protocol.py`](../moe_numba/expert_parallel/low_latency/protocol.py).
