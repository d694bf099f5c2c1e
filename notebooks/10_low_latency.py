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
# [08](08_ring_buffer_dispatch.ipynb) and [09](09_combine.ipynb) are built for thousands of tokens: rows stream through
# ring buffers, and the bandwidth of NVLink limits the time. With few tokens almost nothing is sent, but the pair still
# takes tens of microseconds. This notebook shows where that time goes, and builds a pair of kernels that avoids most of
# it: one launch for each direction, no counts, and no wait on the CPU.
#
# Notebooks 08 and 09 explain ranks, dispatch and combine, [notebook 00](00_start_here.ipynb) the simulator.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import warnings
from functools import cache, partial

import torch
from IPython.display import Markdown
from numba import cuda, float32, int32

from moe_numba import simulator
from moe_numba.course import low_latency_model as model
from moe_numba.course.bench import plots, records
from moe_numba.course.draw import low_latency as draw
from moe_numba.course.draw.player import Player
from moe_numba.course.exercises import exercise
from moe_numba.course.ladder import Ladder
from moe_numba.course.low_latency_runs import Round, Sizes, first_error, random_rounds, run_rounds
from moe_numba.course.prediction import Judgement
from moe_numba.course.prose import say
from moe_numba.course.simulate import changed_source, define, in_simulator, source_of
from moe_numba.course.source_diff import change
from moe_numba.expert_parallel import Buffer, LocalGroup
from moe_numba.expert_parallel.kernels.low_latency_combine import add_row, round_sums
from moe_numba.expert_parallel.kernels.low_latency_layout import SENTINEL
from moe_numba.expert_parallel.kernels.low_latency_protocol import clean, copied, has_arrived
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_relaxed_sys_s32, st_relaxed_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import ld_global_s32x4, pointer_from_address, st_global_s32x4
from moe_numba.ptx.system_vectors import ld_relaxed_sys_s32x4, st_relaxed_sys_s32x4

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # some kernels have few CTAs on purpose
PAIR, NORMAL = records.recorded("low_latency"), records.recorded("dispatch_combine")
BASICS = (records.recorded("align_one_launch_ladder") or {}).get("diagnosis", {}).get("basics")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
TOKEN_COUNTS = (1, 8, 32, 128)


def times_of(record, step, ranks, dtype="bf16", **more):
    """Return {tokens: median microseconds} of a step, empty if nothing is recorded."""
    series = records.series(record, step=step, dtype=dtype, config={"ranks": ranks}, **more) if record else {}
    return {tokens: stats["median"] for tokens, stats in series.items() if tokens in TOKEN_COUNTS}


def listed(times):
    """Format the times of several numbers of tokens."""
    return " / ".join(map(records.format_us, times.values()))


say(
    "**Question.** Dispatch and combine through ring buffers together take {normal} us for 1 / 8 / 32 / 128 tokens per "
    "rank (2 GPUs, hidden 7168, top-8 of 256 experts, in a CUDA graph; recorded on {gpu}). At the 450 GB/s of NVLink "
    "the bytes of one token take {wire_us:.2f} us each way. Where does the rest go?",
    normal=listed(times_of(NORMAL, "final, graph", 2, operation="dispatch and combine")) or None,
    gpu=NORMAL and NORMAL["gpu"],
    wire_us=model.bytes_each_way(2, 1) / 450e3,
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ALONE = {step: times_of(PAIR, step, 1) for step in ("in slots", "final")}
NO_RECORD = (
    "There is no record `low_latency` of one rank yet; `python -m moe_numba bench low_latency` makes it on a GPU."
)
text = NO_RECORD
if all(ALONE.values()):
    text = (
        f"One rank alone on {PAIR['gpu']} takes {listed(ALONE['in slots'])} us for as many tokens, and "
        f"{listed(ALONE['final'])} us if rows are packed by expert. In this measurement no row crosses NVLink; section 9 "
        "says what it contains."
    )
Markdown(f"**Result.** {text}")

# %% [markdown]
# ## 1. A chain of dependent latencies
#
# With one token nothing overlaps: every operation waits for the one before it. The table lists latencies that were
# measured before the kernels of this notebook were written. The CUDA C++ programs that measured them are not part of
# the repository. Only the lines that name a record can be measured again with the repository.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
LAUNCH_US, LOAD_US = model.TWO_DEPENDENT_KERNELS_US / 2, 0.15
if BASICS:
    LAUNCH_US, LOAD_US = BASICS["empty, dependent"], (BASICS["2048 loads"] - BASICS["1024 loads"]) / 1024
H200S, RECORD = model.MEASURED, "record `align_one_launch_ladder`" if BASICS else "assumed, not measured"
LATENCIES = (
    ("a flag is stored over NVLink, and a poll of the other GPU reads it", model.ONE_WAY_US, H200S),
    ("the same with a system-scope fence before the store", model.FENCED_WAY_US, H200S),
    ("two empty kernels in a CUDA graph", model.TWO_EMPTY_KERNELS_US, H200S),
    ("the same with programmatic dependent launch", model.TWO_DEPENDENT_KERNELS_US, H200S),
    *((f"kernel `{name}` through ring buffers, 1 token", us, H200S) for name, us in model.NORMAL_KERNELS_US.items()),
    ("dispatch and combine through ring buffers, 1 token", model.NORMAL_PAIR_US, H200S),
    ("one empty kernel in a CUDA graph, dependent launch", LAUNCH_US, RECORD),
    ("a load from L2 that depends on the load before", LOAD_US, RECORD),
)
table = [f"| {what} | {us:.2f} | {where} |" for what, us, where in LATENCIES]
Markdown("\n".join(["| latency | us | measured on |", "|---|---:|---|", *table]))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
combine_begins = model.NORMAL_PAIR_US - model.NORMAL_KERNELS_US["combine"]
normal = [
    ("notify", "kernel", 0, model.NORMAL_KERNELS_US["notify"]),
    ("dispatch", "kernel", combine_begins - model.NORMAL_KERNELS_US["dispatch"], combine_begins),
    ("combine", "kernel", combine_begins, model.NORMAL_PAIR_US),
]
bound, BOUND_US = [], 0.0
for name, kind, us in 2 * (
    ("launch", "launch", LAUNCH_US),
    ("load", "memory", LOAD_US),
    ("", "link", model.ONE_WAY_US),
):
    bound.append((name, kind, BOUND_US, BOUND_US + us))
    BOUND_US += us
prototype = [("prototype, CUDA C++", "kernel", 0, model.PROTOTYPE_US["data as its own flag"][1])]
draw.latency_chain(
    {"ring buffers": normal, "steps 2 and 3": prototype, "lower bound": bound},
    "Dispatch and combine of one token on two H200s",
    f"Kernels: measured on {H200S}, not a record. Dispatch starts before notify ends.",
)

# %% [markdown]
# The three kernels do the following, each operation after the one before:
#
# - **notify** exchanges counts, because a receiver must know how many rows come and where they go. Each rank stores its
#   counts in the memory of all others, executes a system-scope fence, stores a flag, and waits for the others' flags.
# - **dispatch** moves a row in six dependent operations: a bulk load into shared memory, a bulk store into the peer's
#   ring, a fence and the store of the ring's tail, the receiver's poll, a bulk load, and a bulk store into the output.
# - **combine** does the same in the other direction.
#
# The **lower bound** contains what no such pair avoids: for each direction a launch, a load (the experts of the token),
# and one way over NVLink.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The lower bound is {bound:.1f} us, {share:.0f} % of the {pair:.1f} us that the pair took in this measurement.",
    bound=BOUND_US,
    share=100 * BOUND_US / model.NORMAL_PAIR_US,
    pair=model.NORMAL_PAIR_US,
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
# inputs under each of six seeds, which determine the order of the threads. Memory is **weak**: a store becomes visible
# late, and in any order, unless a fence or a release orders it. All rounds are queued at once, so a rank runs as far
# ahead of the other as the kernels permit. Outputs are filled with NaN first.


# %%
def error_of(name, source, combine=None, packed=False):
    """Return the first error of a kernel whose factory has this source, or None."""
    sizes = Sizes(RANKS, TOKENS, HIDDEN, TOPK, LOCAL_EXPERTS)
    kernels = [define(source, globals(), f"{name}.py")[name](sizes), combine and globals()[combine](sizes)]
    return first_error(sizes, check_packed if packed else check, *kernels, packed)


def try_kernel(make, source=None, combine=None, packed=False):
    others = [make, make_combine] if combine else [make]  # what the simulator's process needs on a GPU
    arguments = make.__name__, source or source_of(make), combine, packed
    return in_simulator(error_of, *arguments, functions=[*others, check, check_packed])


def check_packed(inputs, outputs):
    """As `check`, for rows packed by expert (step 4)."""
    for rank, got in enumerate(outputs):
        for e, count in enumerate(got["counts"].tolist()):
            has_expert = (torch.stack(inputs.topk_idx) == rank * LOCAL_EXPERTS + e).any(dim=-1)
            rows = torch.stack(inputs.x)[has_expert]  # by source rank, then by token
            if count != len(rows) or not torch.equal(got["recv_x"][e, :count], rows):
                return f"rank {rank}: the rows of expert {e} are wrong"
    return None


ladder = Ladder("low_latency_ladder", lambda error: error, untimed="virtual ranks")

# %% [markdown]
# ## 3. Step 1: fixed slots, flags after data
#
# **Bottleneck.** The counts and the rings: no row leaves before `notify` has ended, and each row passes through shared
# memory and a ring.
#
# **Idea.** The address of a slot depends only on the rank and the number of the token. Nothing must be counted, and a
# sender needs no answer. CTA `t` sends token `t` of its rank and receives token `t` of every rank:
#
# - It stores the row directly in the slot on each rank that has one of the token's experts.
# - After a barrier and a system-scope fence it stores a **flag** on *all* ranks: twice the number of the operation,
#   plus 1 if the slot has a row. A rank thus knows for every slot whether a row comes.
# - It polls the flags of token `t` from all ranks, and copies the rows to the output.
#
# A CUDA graph passes the same arguments in each replay, so every CTA counts the operations itself, in `epochs`. Flags
# contain this number, so they are never cleared. Slots have two **halves**, which operations use alternately: a rank in
# operation n + 1 does not overwrite rows that another rank still reads in operation n. A rank cannot be two operations
# ahead, because operation n + 1 ends only with the flags of all ranks, which they store after their operation n. All
# CTAs must be resident at the same time, because they wait for CTAs of other ranks.
#
# **Predicted gain.** A dispatch and a combine with this protocol take two launches, two loads, and two ways with
# fences.


# %%
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


# %%
@cache
def make_flags(sizes):
    ranks, tokens, slots, words, rows = sizes.ranks, sizes.tokens, sizes.slots, sizes.hidden // 2, sizes.metadata_words
    targets_of = make_targets(sizes.topk, sizes.local_experts)

    @cuda.jit
    def dispatch(local, peers, epochs, rank, x, topk_idx, recv_x, has_row):
        lane, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        number = int32(epochs[token] + 1)  # of this operation
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


ladder.step("flags after data", lambda: try_kernel(make_flags))

# %% [markdown]
# `local` is the memory of this rank, `peers` has the addresses of that of all ranks. `sizes.metadata_words` is where
# the rows begin, behind the flags.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PROTOTYPE_US = {protocol: times[1] for protocol, times in model.PROTOTYPE_US.items()}
FLAGS_US, SAVED_US = (
    PROTOTYPE_US["flags after data"],
    model.NORMAL_PAIR_US - 2 * (LAUNCH_US + LOAD_US + model.FENCED_WAY_US),
)
say(
    "**Measured.** 1 token, a prototype of dispatch and combine in CUDA C++ on the two H200s of section 1: {judgement}. "
    "The prediction leaves out further loads from local memory, each of which waits for the one before: the number of the "
    "operation, the row, and at the receiver the row again. Slots need memory for the worst case: 8 ranks x 128 tokens "
    "x 14336 bytes x 2 halves are {mb:.0f} MB on each rank.",
    judgement=Judgement(model.NORMAL_PAIR_US, FLAGS_US, SAVED_US),
    mb=8 * 128 * 14336 * 2 / 1e6,
)

# %% [markdown]
# The player shows two operations of a simulated run, with rows of 16 bytes: the slots of both ranks, with the flag
# above and the row below. `1:0` is token 0 of rank 1. Blue: stored in this frame. Orange: a row whose flag is missing.
# Green: a row that may be read.


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
# Three frames, for viewers that run no scripts: the first flag, the first flag of a row, and a store of rank 1 in
# operation 2 while rank 0 still has to read a row of operation 1. The two rows are in different halves.


# %%
def frame_of(player, *words):
    """Return the number of the first frame whose sentence contains these words, in this order."""
    notes = [frame.note for frame in player.frames]
    return next(n for n, note in enumerate(notes) if all(word in note for word in words))


player.strip([frame_of(player, "flag"), frame_of(player, ": row."), frame_of(player, "Operation 2", "the row")])

# %% [markdown]
# ## 4. Step 2: the data is its own flag
#
# **Bottleneck.** The fence. It completes when the row has been stored in the memory of the peer, and only then the flag
# leaves. Both trips over NVLink are part of the latency.
#
# **Idea.** The receiver polls the row itself. TensorRT-LLM, whose all-reduce uses this protocol, calls it "Lamport".
#
# - Every word of an empty slot holds a **sentinel**, `0xFFFFFFFF`. A 16-byte vector has arrived when *none* of its four
#   words is the sentinel, because PTX treats a vector access as four accesses in no order.
# - `clean` replaces words of a row that equal the sentinel. Such a word is two bfloat16 NaNs, and remains two NaNs.
# - After reading, the receiver **resets** the slot to the sentinel, for operation n + 2, which uses the same half. A
#   sender of operation n + 2 has received the receiver's metadata of operation n + 1. At that time the receiver's
#   kernel of operation n had ended, with all its resets.
# - The word that says whether a row comes is now **metadata**. It contains the number of the operation, so it is its
#   own flag. No store must come after another one: all are relaxed, without fence and barrier.
#
# **Predicted gain.** Twice the difference between a way with a fence and one without: in dispatch and in combine.


# %%
@cuda.jit(device=True)
def wait_vector(local, offset):
    a, b, c, d = copied(ld_relaxed_sys_s32x4(local, offset))  # `copied` works around a bug of the compiler
    while not has_arrived(a, b, c, d):
        a, b, c, d = copied(ld_relaxed_sys_s32x4(local, offset))
    return a, b, c, d


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_lamport(sizes):
    ranks, tokens, slots, words, rows = sizes.ranks, sizes.tokens, sizes.slots, sizes.hidden // 2, sizes.metadata_words
    targets_of = make_targets(sizes.topk, sizes.local_experts)

    @cuda.jit
    def dispatch(local, peers, epochs, rank, x, topk_idx, recv_x, has_row):
        lane, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        number = int32(epochs[token] + 1)  # of this operation
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
ladder.step("data as its own flag", lambda: try_kernel(make_lamport))
GAIN_US = 2 * (model.FENCED_WAY_US - model.ONE_WAY_US)
print("1 token, prototypes of both protocols:", Judgement(*PROTOTYPE_US.values(), GAIN_US))

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
# **Idea.** The way back uses the same protocol with slots `[expert rank, token]` in the memory of the source rank. The
# source knows from its own `topk_idx` which ranks send a row, so combine needs no metadata. Rows may arrive in any
# order; each thread waits for them in rank order, adds them in float32 and rounds once. `add_row` and `round_sums` are
# the package's.


# %%
@cache
def make_combine(sizes):
    ranks, tokens, slots, words = sizes.ranks, sizes.tokens, sizes.slots, sizes.hidden // 2
    targets_of = make_targets(sizes.topk, sizes.local_experts)

    @cuda.jit
    def combine(local, peers, epochs, rank, y, has_row, topk_idx, out):
        vector, sums = cuda.local.array(4, int32), cuda.local.array(8, float32)
        lane, token = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        number = int32(epochs[token] + 1)
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


ladder.step("with combine", lambda: try_kernel(make_lamport, combine="make_combine"))

# %% [markdown]
# The check compares bits. In these rounds every dispatch is followed by a combine, and the metadata of the next
# dispatch keeps the ranks within one operation of each other. In the package a combine may also follow a combine: every
# rank signals to all others that its combine has started, and waits for their signals.
#
# ## 6. Step 4: packed by expert
#
# **Bottleneck.** The grouped GEMM ([notebook 06](06_grouped_gemm.ipynb)) reads the rows of each expert one after the
# other. Its **masked** layout is `[local experts, capacity, hidden]`, with the number of rows of each expert on the
# GPU.
#
# **Idea.** The place of a row is the number of earlier slots with the same expert. Metadata now names the experts, in
# one word for each of the top-k. Every CTA collects the metadata of all slots in shared memory and counts, so that no
# CTA needs results of another one. Rows of an expert are ordered by source rank, then by token, in every run.

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
        number = int32(epochs[token] + 1)  # of this operation
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
ladder.step("packed by expert", lambda: try_kernel(make_packed, packed=True))

# %% [markdown]
# Packing adds latency: no CTA places a row before the metadata of all slots has arrived. The combine of packed rows
# also does more than that of step 3. Each rank first sums the rows of its own experts, times their weights, in float32,
# and rounds to bfloat16, so that one row per rank and token is sent. The source sums these rows as in step 3.
#
# **Exercise 2.** Compute the places in torch. `experts` is `[slots, topk]`, with local experts, or -1 for experts on
# other ranks. Return a tensor of the same shape with the number of earlier elements that are equal, or -1.

# %%
place_rows = ...
exercise("low_latency-2").check(place_rows)

# %% [markdown]
# ## 7. Wrong kernels
#
# A run on a GPU may not show the following mistakes: ranks must be an operation apart, or stores must become visible
# out of order. Each mistake replaces one passage of a dispatch, and the check must reject it in the simulator.

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
    ladder.step(name, partial(try_kernel, make, changed_source(make, right, wrong)), expect_wrong=True)
assert all("refused" in row for row in ladder.rows[-len(MISTAKES) :])

# %% [markdown]
# - **One half** is reused too early: a rank that is one operation ahead overwrites rows that the other has not read.
#   With flags, rows are wrong. With data as its own flag the receiver also resets newer rows, and both ranks wait
#   forever.
# - **Sentinel not reset**: two operations later the poll ends at once, with the old row.
# - **A flag before its data**: without the fence the flag may become visible before the row. Without the barrier, lane
#   0 may store the flag before other lanes have stored their parts of the row.
#
# ## 8. The package
#
# The package's kernels follow steps 1 to 4 and add what a server needs:
#
# - Every wait has a timeout. A rank that is late or dead is marked in a mask, and tokens with experts on it become NaN.
#   The next call raises an error, or with `enable_shrink` the other ranks continue without it.
# - If tokens are few, several CTAs share a row. A word of metadata has two experts and the low bits of the operation's
#   number.
# - A third of the CTAs send while the others receive, so that slots are read while the link is busy. A rank reads
#   its own rows where they are, without slots.
# - Packed by expert, the metadata of all tokens is sent before any row. A receiving CTA sets a bit for each slot and
#   expert in shared memory; a row's place is the number of bits before its own.
# - Dispatch can quantise rows to FP8, with scales, and combine the sums that it sends (`use_fp8_combine`). Combine
#   applies the top-k weights of packed rows.
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
# In a CUDA graph, and with FP8 rows and a receive hook:
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
#
# ## 9. Times
#
# ### One rank alone
#
# `python -m moe_numba bench low_latency` measures the pair in a CUDA graph. On one GPU it measures one rank with 128
# experts, as many as each of two ranks has. The rank copies its own tokens, and nothing crosses NVLink: what remains is
# the cost of the launches and of the copies on the GPU. Packing writes 8 rows per token of the rank, as it does on
# average with several ranks.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
KINDS = {
    "in slots": ("in slots", "bf16"),
    "in slots, flags": ("in slots, flags", "bf16"),
    "packed by expert": ("final", "bf16"),
    "packed, flags": ("flags", "bf16"),
    "packed, FP8 dispatch": ("final", "e4m3"),
}
ALONE = {name: found for name, (step, dtype) in KINDS.items() if (found := times_of(PAIR, step, 1, dtype))}
TITLE = "One rank alone: dispatch and combine, hidden 7168, top-8 of 128 experts"
plots.sweep_figure(ALONE, caption=plots.caption(PAIR), title=TITLE) if ALONE else Markdown(f"*{NO_RECORD}*")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
text = f"*{NO_RECORD}*"
if len(ALONE) == len(KINDS):
    slots, _, packed, _, fp8 = (times[1] for times in ALONE.values())
    text = (
        f"With 1 token, packing by expert takes {packed - slots:.1f} us more than slots, with FP8 dispatch "
        f"{fp8 - slots:.1f} us more."
    )
Markdown(text)

# %% [markdown]
# ### Several GPUs: a model
#
# The model adds a constant, for all latencies of a pair, and the time of the bytes that a rank sends in each direction.
# The columns of the model are predictions; none of them was measured.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PROTOTYPE = model.PROTOTYPE_US["data as its own flag"]
ERROR = max(abs(model.pair_us(2, tokens) / us - 1) for tokens, us in PROTOTYPE.items())
table = [
    f"| {tokens} | {PROTOTYPE[tokens]:.1f} | " + " | ".join(f"{model.pair_us(n, tokens):.1f}" for n in (2, 4, 8)) + " |"
    for tokens in TOKEN_COUNTS
]
Markdown(
    f"Model: {model.MODEL_US} us + bytes / {model.MODEL_GBPS} GB/s in each direction. Its largest deviation from the "
    f"prototype, at {min(PROTOTYPE)} to {max(PROTOTYPE)} tokens, is {100 * ERROR:.0f} %. Microseconds, bfloat16 rows "
    "in slots:\n\n| tokens | prototype in CUDA C++, 2 GPUs | model, 2 GPUs | model, 4 GPUs | model, 8 GPUs |\n"
    "|---:|---:|---:|---:|---:|\n" + "\n".join(table)
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GROUPS = sorted({row["config"]["ranks"] for row in PAIR["rows"]} - {1}) if PAIR else []


def of_group(n):
    """Describe the recorded times of a group of GPUs."""
    slots, flags = times_of(PAIR, "in slots", n), times_of(PAIR, "in slots, flags", n)
    peers = [(peer.removeprefix("peer:"), times_of(PAIR, peer, n)) for peer in records.peers(PAIR)]
    others = "".join(f"; {name} {listed(times)} us" for name, times in peers if times)
    return (
        f"- {n} GPUs, recorded: {listed(slots)} us in slots{others}. With 1 token, data as its own flag instead of "
        f"flags: {Judgement(flags[1], slots[1], GAIN_US)}; the prediction is that of step 2."
    )


Markdown(
    "\n".join(map(of_group, GROUPS))
    or "**The kernels of the package have not been measured on two or more GPUs yet.** Only the prototype has been, "
    "which has neither timeouts nor packing."
)

# %% [markdown]
# **Exercise 3.** On two GPUs every token goes to the other rank (hidden 7168, bfloat16). With how many tokens per rank
# do the bytes of dispatch and combine together take as long as the constant of the model?

# %%
tokens = ...
exercise("low_latency-3").check(tokens)

# %% [markdown]
# ## 10. Sources
#
# - DeepSeek: [DeepEP](https://github.com/deepseek-ai/DeepEP), `low_latency_dispatch` and `low_latency_combine`, whose
#   interface the package follows. DeepEP sends a row once per expert; here it is sent once per rank.
# - NVIDIA: TensorRT-LLM, one-shot all-reduce ("Lamport": the data is its own flag), and its one-sided NVLink
#   all-to-all.
# - NVIDIA: *PTX ISA*, memory consistency model, vector accesses; *CUDA C++ Programming Guide*, programmatic dependent
#   launch.
# - The final kernels: [`low_latency_dispatch.py`](../moe_numba/expert_parallel/kernels/low_latency_dispatch.py),
#   [`low_latency_packing.py`](../moe_numba/expert_parallel/kernels/low_latency_packing.py),
#   [`low_latency_combine.py`](../moe_numba/expert_parallel/kernels/low_latency_combine.py),
#   [`low_latency_protocol.py`](../moe_numba/expert_parallel/kernels/low_latency_protocol.py).
