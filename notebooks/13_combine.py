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
# # Combine: return the experts' results and sum them per token
#
# Notebook 12 sent tokens to the **ranks** (GPUs) that hold their experts. A token that was sent to three ranks has
# three result rows, one on each. **Combine** sends these rows back to the token's **source rank** and sums them there.
#
# The article of notebooks 10 and 08, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824),
# ends before combine. This notebook follows the code of DeepEP's first version; "DeepEP's rings" are our Numba port.
#
# From notebook 12: a **ring** is a circular buffer of token slots in the receiver's memory. Its **tail** counts the
# rows written, its **head** the rows consumed. A **channel** is a range of a rank's tokens with rings of its own. A
# sender writes the data, then stores the tail with **release**; a receiver that loads the tail with **acquire** sees
# the data.
#
# With fewer GPUs than ranks, the ranks are **virtual** (notebook 12), and recorded times are shown.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import inspect
import itertools
import random
import textwrap
import warnings
from contextlib import contextmanager
from functools import cache
from math import comb

import numpy as np
import torch
from IPython.display import Markdown
from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba import simulator
from moe_numba.course.bench import kernel_times, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.timing.multigpu import can_time, outputs_of, rank_times, settle
from moe_numba.course.deepep_port import combine as deepep_combine
from moe_numba.course.deepep_port import launch as deepep_launch
from moe_numba.course.deepep_port import notify as deepep_notify
from moe_numba.course.deepep_port import simulate
from moe_numba.course.deepep_port.buffer_layout import DeepEPConfig, combine_offsets, min_buffer_bytes, min_ring_slots
from moe_numba.course.deepep_port.notify import NO_HEAD
from moe_numba.course.deepep_port.polling import (
    BARRIER,
    STATUS_WORDS,
    WaitContext,
    at_least,
    explain,
    make_copy_row,
    make_wait,
)
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.combine import combine_inputs as inputs
from moe_numba.course.lessons.combine import draw
from moe_numba.course.lessons.combine.channel_sender import CombineTensors, PrefixMatrices, RingMemory, make_send
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.expert_parallel import reference
from moe_numba.expert_parallel.buffer import Buffer
from moe_numba.expert_parallel.common import reduce
from moe_numba.expert_parallel.common.arguments import RankContext
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG, buffer_layout, received_counters
from moe_numba.expert_parallel.common.timeout import COMBINE_ROWS, start_of_wait, warp_abort_if_timed_out
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.expert_parallel.rings import combine as final_kernel
from moe_numba.expert_parallel.rings.bulk_pipeline import init_barriers
from moe_numba.expert_parallel.rings.channels import first_channel, first_token, next_channel, retire_warp
from moe_numba.expert_parallel.rings.config import Config, num_channels
from moe_numba.expert_parallel.rings.progress import clear_progress, make_publish, post_progress
from moe_numba.ptx.arithmetic import add_rn_bf16x2, uint_as_float
from moe_numba.ptx.atomics import ld_acquire_sys_s32, ld_volatile_s32, st_release_cta_shared_s32, st_release_sys_s32
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_wait, ld_global_s32x4, ld_nc_na_s32x4, pointer_from_address, st_na_s32x4
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.runtime.changed_source import changed_module
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # some of these kernels have few CTAs on purpose
HERE = inputs.combine_sizes()  # DeepSeek-V3's on GPUs, small ones in the simulator
RANKS, TOKENS, HIDDEN, TOPK, EXPERTS = HERE.ranks, HERE.tokens, HERE.hidden, HERE.topk, HERE.experts
ROW_BYTES = 2 * HIDDEN  # bfloat16
GROUP = LocalGroup(RANKS, HERE.devices)  # ranks that are threads of this process
DEVICES = GROUP.devices
TIMED = can_time(GROUP)  # each rank has a GPU of its own
WHEN = "measured now" if TIMED else "recorded"
print(
    f"{RANKS} ranks on {', '.join(str(device) for device in DEVICES)};",
    "timed" if TIMED else "virtual ranks: nothing is timed between them",
)

# %% [markdown]
# ## 1. The problem in one figure
#
# Three ranks have four tokens each, and two experts each. Every rank has received rows, ordered by source rank and
# token, and computed a result for each. These are the rows of rank 0's tokens:

# %%
SMALL_IDX = inputs.random_routing([4, 4, 4], num_experts=6, topk=2, seed=5)
SMALL = [layout[2] for layout in inputs.layouts_of(SMALL_IDX, 6)]  # is_token_in_rank of each rank
draw.problem(SMALL, home=0)

# %% [markdown]
# The **handle** of the dispatch determines where each rank sends its rows, and which rows each source rank expects:
#
# - `rank_prefix_matrix[s, r]`: the number of rows that rank `r` received from ranks 0 to `s`. The rows that rank `r`
#   returns to `s` are contiguous.
# - `recv_channel_prefix_matrix[s, c]`: where the rows of channel `c` begin in that range.
# - `recv_src_idx`: for each row, the index of the token on its source rank.
# - `send_head[t, r]`: the position of token `t` in its channel's queue to rank `r`, or -1 if it was not sent there.
#   Rows return in the same order. **This is therefore also the position of its result in the queue from `r`.**
# - `is_token_in_rank` and `channel_prefix_matrix`.
#
# For the small example with two channels (computed in torch; a test compares it with a dispatch):

# %%
CHANNELS = 2
handle = inputs.handles_of(SMALL, CHANNELS)[0]
print("rank_prefix_matrix, the same on all ranks:", handle.rank_prefix_matrix.tolist())
print("recv_channel_prefix_matrix of rank 0:     ", handle.recv_channel_prefix_matrix.tolist())
print("recv_src_idx of rank 0:                   ", handle.recv_src_idx.tolist())
for channel, tokens in enumerate(inputs.channel_ranges(4, CHANNELS)):
    for token in tokens:
        print(f"rank 0, channel {channel}, token {token}: send_head {handle.send_head[token].tolist()}")

# %% [markdown]
# `send_head` starts at 0 in each channel, because each channel has its own queues. Combine needs less than dispatch: no
# row index has to be sent, no counts are exchanged, and the host does not wait.
#
# ## 2. The reference
#
# The package's reference sums in `float64`:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
head, _, rest = inspect.getsource(reference.combine).partition('    """')
Markdown("```python\n" + head + rest.partition('"""\n')[2] + "```")

# %% [markdown]
# A kernel returns `bfloat16`, and should return the *same* bits in every call. Two things are therefore specified:
#
# - **The order of the ranks.** Rows are added in rank order, in whatever order they arrive.
# - **One rounding.** `bfloat16` has 8 significant bits. The sum is accumulated in `float32`, with 24, and rounded once.
#
# The figure compares this with rounding after each row, for one element of eight rows:

# %%
torch.manual_seed(3)
draw.sum_in_steps((torch.randn(8) * 3).tolist())

# %% [markdown]
# The same for many elements and many orders of the ranks:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def spread(dtype, rows, orders):
    """Sum rows in several orders, rounding to ``dtype`` after each row: mean and worst error, fraction that differs."""
    exact, results = rows.double().sum(dim=0), []
    for order in orders:
        total = rows[order[0]].to(dtype)
        for rank in order[1:]:
            total = (total.float() + rows[rank].float()).to(dtype)
        results.append(total.bfloat16())
    results = torch.stack(results)
    errors = (results.double() - exact).abs()
    differ = (results != results[0]).any(dim=0).float().mean().item()
    return errors[0].mean().item(), errors.max().item(), differ


alike = torch.randn(8, 20_000)
large = torch.randn(3, 20_000) * 2**14
KINDS = {"of similar magnitude": alike.bfloat16(), "that cancel": torch.cat([large, alike[:2], -large]).bfloat16()}
draw_order = random.Random(0)
orders = [list(range(8)), *(draw_order.sample(range(8), 8) for _ in range(30))]
ERRORS = {
    (kind, dtype): spread(dtype, rows, orders)
    for kind, rows in KINDS.items()
    for dtype in (torch.bfloat16, torch.float32)
}
for (kind, dtype), (mean, worst, differ) in ERRORS.items():
    print(
        f"rows {kind}, rounded to {str(dtype).removeprefix('torch.'):8} after each row: mean error {mean:.3g}, worst "
        f"{worst:.3g}; {100 * differ:.3f} % of the elements depend on the order"
    )

# %% [markdown]
# Rounding once has the smaller error. For rows of similar magnitude no element of this sample depends on the order: the
# summands have 8 significant bits, so 24 bits usually hold their sum exactly. Where large summands cancel and small
# ones remain, the result depends on the order.
#
# **Exercise 1.** Find three `bfloat16` numbers whose sum, rounded to `bfloat16` after each addition from left to right,
# differs from the sum that is accumulated in `float32` and rounded once. Replace the three `...`.

# %%
exercise("combine-1").check((..., ..., ...))

# %% [markdown]
# `Y` in the next cell has one result row for each row that a rank received. `check` requires the exact bits of "in rank
# order, in `float32`, rounded once".


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def random_rows(count, device, seed):
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator, device=device).bfloat16()


TOPK_IDX = inputs.random_routing([TOKENS] * RANKS, EXPERTS, TOPK)
LAYOUTS = inputs.layouts_of(TOPK_IDX, EXPERTS)
IS_IN = [layout[2] for layout in LAYOUTS]
RECEIVED = inputs.received_by(IS_IN)
X = [random_rows(TOKENS, device, rank) for rank, device in enumerate(DEVICES)]
Y = [random_rows(len(received.src_idx), DEVICES[rank], 100 + rank) for rank, received in enumerate(RECEIVED)]
OTHER = [rows.flip(0) for rows in Y]  # each step combines these first, then Y, which is checked
WANTED = [sums.to(DEVICES[rank]) for rank, sums in enumerate(inputs.sums_of(Y, RECEIVED, [TOKENS] * RANKS))]


def bits(tensor):
    return tensor.view(torch.int16)


def check(outputs, wanted=None):
    """Return None, or a sentence that describes the error in the ranks' outputs."""
    for rank, (given, right) in enumerate(zip(outputs, WANTED if wanted is None else wanted, strict=True)):
        if given.shape != right.shape or given.dtype != right.dtype:
            return f"rank {rank} has {given.dtype} {tuple(given.shape)}, not {right.dtype} {tuple(right.shape)}"
        if len(wrong := (bits(given) != bits(right)).any(dim=1).nonzero()):
            return f"rank {rank}: {len(wrong)} of {len(right)} tokens are wrong; the first is token {int(wrong[0])}"
    return None


def reference_error():
    """Return the largest error of WANTED for a few columns, in units of the largest error of one rounding to bfloat16."""
    part = [rows[:, :64].cpu() for rows in Y]
    totals = reference.combine(part, RECEIVED, [TOKENS] * RANKS)
    sizes = reference.combine([rows.abs() for rows in part], RECEIVED, [TOKENS] * RANKS)
    allowed = [total.abs() * 2**-8 + size * 2**-22 + 1e-30 for (total, _), (size, _) in zip(totals, sizes)]
    return max(
        ((sums[:, :64].cpu().double() - total).abs() / most).max().item()
        for sums, (total, _), most in zip(WANTED, totals, allowed)
    )


def synchronize_all():
    """Wait until the inputs are on all devices: ranks use streams of their own."""
    for device in set() if simulator.ENABLED else set(DEVICES):
        torch.cuda.synchronize(device)


synchronize_all()
ONE_ROUNDING = reference_error()
print(f"against float64: at most {ONE_ROUNDING:.3f} of the largest error of one rounding")
poison = [torch.full_like(rows, float("nan")) for rows in WANTED]
print("poison:", check(poison))
print("correct:", check([rows.clone() for rows in WANTED]))

# %% [markdown]
# ## 3. The lower bound
#
# A row that leaves its rank is sent once. NVLink of an H200 has 18 links in each direction (`LINK`). On the source rank
# each received row is written to memory and read again, and the sums are written. **Published bandwidths often include
# rows that stay on their rank**; here only the bytes on the wire count. Figures call the lower bound "speed of light".
#
# Predictions use notebook 12's rate of plain stores to a peer (`PUSH`), time of a flag (`FLAG_US`), and rate of a CTA
# that bulk-loads rows and bulk-stores them to a peer (`RATES`).

# %%
LINK = 18 * 25e9  # bytes per second each way, an H200's NVLink by its data sheet
LIMITS = chip_limits()
print(LIMITS)
MEMORY = LIMITS.copy_bandwidth  # bytes per second
ALIGN, DISPATCH = records.recorded("align"), records.recorded("ring_buffer_dispatch_ladder")
EMPTY_US = records.find(ALIGN, step="empty kernel", config={"dependent": False})["kernel_us"]["median"]
MEASURED_08 = records.find(DISPATCH, step="final")  # notebook 12's measurements
RATES = {name: 1e9 * gbps for name, gbps in MEASURED_08["push_gbps"].items()}  # bytes per second, by "way: CTAs"
PUSH, FLAG_US = max(rate for name, rate in RATES.items() if name.startswith("stores")), MEASURED_08["flag"]["us"]


def ranks_of_a_token(num_experts, topk, ranks):
    """How many ranks a token visits on average, if all experts are equally likely."""
    others = num_experts - num_experts // ranks
    return ranks * (1 - comb(others, topk) / comb(num_experts, topk))


def floor_of(ranks, tokens=4096, hidden=7168, topk=8, num_experts=256):
    """Return a rank's bytes on the wire, its bytes of memory traffic, and the least microseconds of each."""
    rows = tokens * ranks_of_a_token(num_experts, topk, ranks)
    wire = rows * (ranks - 1) / ranks * 2 * hidden
    memory = wire + rows * 2 * hidden + tokens * 2 * hidden
    return wire, memory, wire / LINK * 1e6, memory / MEMORY * 1e6


for ranks in (2, 4, 8):
    wire, memory, wire_us, memory_us = floor_of(ranks)
    print(
        f"{ranks} ranks, 4096 tokens of 7168: {wire / 1e6:5.1f} MB on the wire, {wire_us:3.0f} us; memory "
        f"{memory / 1e6:5.1f} MB, {memory_us:3.0f} us; counted with its own rows it is "
        f"{wire * ranks / (ranks - 1) / 1e6:.1f} MB"
    )

# %% [markdown]
# The link determines the lower bound, and the summation can overlap with it if it runs *while* rows arrive.
#
# ## 4. Gaps in `send_head`
#
# Before combine, DeepEP's kernel `cached_notify_combine` clears heads and tails between two barriers, and changes
# `send_head`.
#
# In DeepEP's combine several warps of a CTA sum rows (**reducing warps**), one token per warp and iteration. A head may
# advance only past rows that *no* warp still needs. Each warp therefore publishes, for each rank, the position before
# which it needs no rows. After a token that was sent to the rank, this is the token's position plus 1. After a token
# that was *not* sent there (`send_head` is -1), it is the position of the *next* row from that rank.
#
# Each -1 is therefore replaced by `-n - 1`, where `n` is the position of the next token that was sent to the rank. It
# stays negative, which means "not sent". A loop from the last token to the first finds `n`:


# %%
def fill_gaps(column, verbose=False):
    """Fill the gaps of one channel's column of send_head, from the last token to the first."""
    following, filled = NO_HEAD, list(column)
    for token in reversed(range(len(column))):
        if column[token] < 0:
            filled[token] = -following - 1
            if verbose:
                note = "no row follows" if following == NO_HEAD else f"next position {following}: {filled[token]}"
                print(f"    token {token}: {column[token]}, {note}")
        else:
            following = column[token]
            if verbose:
                print(f"    token {token}: position {following}")
    return filled


generator = torch.Generator().manual_seed(4)
GAPPED = [torch.rand(22, RANKS, generator=generator) < 0.45 for _ in range(RANKS)]
GAPPED_HANDLES = inputs.handles_of(GAPPED, 2)
column = GAPPED_HANDLES[0].send_head[:11, RANKS - 1].tolist()  # channel 0's tokens
print("send_head:", column)
filled = fill_gaps(column, verbose=True)

# %%
draw.head_gaps(column, filled, NO_HEAD)

# %% [markdown]
# (A gap before position 0 stays -1.) The operation is idempotent, so a handle can be used for several combines. In the
# kernel a warp processes 32 tokens at a time. A ballot finds the lanes whose token was sent; each lane finds the
# nearest of them among the lower lanes, which have the *later* tokens:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def excerpt(function, begin, end):
    """Return a function's source from one string up to another, or to the end."""
    source = inspect.getsource(inspect.unwrap(getattr(function, "py_func", function)))
    last = source.index(end) if end else len(source)
    return Markdown("```python\n" + textwrap.dedent(source[source.index(begin) : last]) + "```")


excerpt(deepep_notify.make_cached_notify_combine, "    @cuda.jit(device=True)\n    def fill_in", "    @cuda.jit\n")

# %% [markdown]
# The next cell runs it on all ranks. A step is a context manager `make(transport)`, as in notebook 12.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@contextmanager
def made_by_deepep(transport, constants, handles, call):
    """Yield ``call(rank, handle, ...)``, for a rank with its own buffer for DeepEP's kernels."""
    rank, close = inputs.deepep_rank(transport, min_buffer_bytes(combine=constants))
    handle = deepep_launch.Handle(*(tensor.to(transport.device, copy=True) for tensor in handles[transport.rank]))

    yield lambda *given: call(rank, handle, *given)
    if error := explain(rank.status.cpu()):
        raise RuntimeError(error)
    close()


def make_gaps(transport):
    constants = DeepEPConfig(RANKS, 2, HERE.ring, HERE.chunk, ROW_BYTES, 0, 0, EXPERTS, HERE.warps)

    def call(rank, handle):
        deepep_launch.cached_notify_combine(rank, constants, handle)
        deepep_launch.cached_notify_combine(rank, constants, handle)  # the second time changes nothing
        return handle.send_head

    return made_by_deepep(transport, constants, GAPPED_HANDLES, call)


found = outputs_of(GROUP, make_gaps)
GAPS_RIGHT = True
for rank in range(RANKS):
    for channel, peer in itertools.product(range(2), range(RANKS)):
        tokens = slice(11 * channel, 11 * (channel + 1))
        right = fill_gaps(GAPPED_HANDLES[rank].send_head[tokens, peer].tolist())
        GAPS_RIGHT &= found[rank][tokens, peer].tolist() == right
print("the kernel, run twice, fills the gaps as the loop does:", GAPS_RIGHT)
assert GAPS_RIGHT

# %% [markdown]
# **Exercise 2.** A channel has 32 tokens. Here lane `t` handles token `t`, so higher lanes have later tokens. `send_head`
# is one rank's column; `filled` should become what `fill_gaps` returns, with `NO_HEAD` where no later token is sent.
# Repair the kernel.


# %%
@cuda.jit
def fill_gaps_of_warp(send_head, filled):
    lane = int32(cuda.threadIdx.x)
    position = send_head[lane]
    sent = uint32(cuda.ballot_sync(FULL_MASK, position >= 0))
    nearest = int32(31 - cuda.clz(sent))
    following = cuda.shfl_sync(FULL_MASK, position, max(nearest, 0))
    filled[lane] = position if position >= 0 else int32(-following - 1)


exercise("combine-2").check(fill_gaps_of_warp)

# %% [markdown]
# ## 5. The ladder
#
# Each step returns all rows and sums them: on GPUs 4096 tokens of 7168 elements per rank, with the top 8 of 256
# experts. Steps with rings use 24 SMs; the others use all. Steps are checked and timed as in notebook 12; the slowest
# rank counts. Each step predicts what it saves over an earlier one; both are timed interleaved.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder = Ladder(
    "combine_ladder",
    check,
    reference_name="torch",
    config={"num_experts": EXPERTS, "topk": TOPK, "ranks": RANKS, "num_sms": HERE.num_sms},
    size={"tokens": TOKENS, "hidden": HIDDEN},
    untimed=None if TIMED else "virtual ranks",
)
us = ladder.median_us  # a step's median time, measured now or recorded
RECORDED = {} if TIMED else ladder.row("final") or {}
SHOWN_RANKS = RECORDED["config"]["ranks"] if RECORDED else RANKS  # of the times that are shown
ladder.title = f"Combine, step by step: 4096 tokens a rank of 7168, {SHOWN_RANKS} ranks"
WIRE_BYTES, MEMORY_BYTES, FLOOR_US, MEMORY_US = floor_of(SHOWN_RANKS)
SUM_BYTES = MEMORY_BYTES - WIRE_BYTES  # that a rank's summation reads and writes
ROWS_BYTES = WIRE_BYTES * SHOWN_RANKS / (SHOWN_RANKS - 1)  # of a rank's received rows, its own included
STEPS = {}  # by name, how each is made
FACTS = {}  # other measurements; the record's row of the last step keeps them


def fact(name, measured):
    """Keep and return a measurement, or what is recorded of it, or None."""
    FACTS[name] = measured or RECORDED.get(name)
    return FACTS[name]


def times_of(makes):
    """Return ``{name: Stats}`` of the slowest rank, measured interleaved; {} if nothing is timed."""
    return rank_times(GROUP, makes, launches=HERE.launches, samples=HERE.samples) if TIMED else {}


def median_of(make):
    """Return a step's median time, or None if nothing is timed."""
    return round(times_of({"": make})[""].median, 2) if TIMED else None


def poisoned(make):
    """Wrap a step for its check: it runs on other rows first, and memory that it may allocate is filled with NaN."""

    @contextmanager
    def checked(transport):
        def run():
            step(OTHER)
            settle(transport)
            stale = torch.full((TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16, device=transport.device)
            settle(transport)
            del stale
            return step(Y)

        with make(transport) as step:
            yield run

    return checked


def measure(name, make, after=None, predicted_gain_us=None):
    """Check a step on all ranks and time it, interleaved with the step ``after``."""
    STEPS[name] = make
    compared = {step: STEPS[step] for step in (after, name) if step}
    ladder.step(
        name,
        lambda: outputs_of(GROUP, poisoned(make)),
        dtype="bfloat16",
        operation="combine",
        after=after,
        predicted_gain_us=predicted_gain_us,
        floor_us=FLOOR_US,
        bytes=int(WIRE_BYTES),
        kernel=lambda: times_of(compared),
    )
    if us(name):
        print(f"    {WIRE_BYTES / us(name) / 1000:.0f} GB/s on the wire, of {LINK / 1e9:.0f}; {WHEN}")


print(f"{SHOWN_RANKS} ranks: {WIRE_BYTES / 1e6:.1f} MB leave each rank, which takes {FLOOR_US:.0f} us or more")

# %% [markdown]
# ### Step 0: torch
#
# **Idea.** Each rank *pulls* its rows: it copies its range from each other rank, converts it to `float32`, and adds
# each row to its token's sum with `index_add_`, in rank order. A token has at most one row per range, so no two
# additions conflict. The copies and the summation do not overlap.


# %%
def section(rank, peer):
    """Return which rows of a peer belong to a rank, and to which of its tokens."""
    received = RECEIVED[peer]
    first = int(received.rank_prefix_matrix[rank - 1, peer]) if rank else 0
    rows = slice(first, int(received.rank_prefix_matrix[rank, peer]))
    return rows, received.src_idx[rows].long()


@contextmanager
def make_torch(transport):
    device = transport.device
    parts = [
        (peer, rows, tokens.to(device)) for peer in range(RANKS) for rows, tokens in [section(transport.rank, peer)]
    ]

    def call(y=Y):
        total = torch.zeros(TOKENS, HIDDEN, device=device)
        for peer, rows, tokens in parts:
            total.index_add_(0, tokens, y[peer][rows].to(device, non_blocking=True).float())
        return total.bfloat16()

    yield call


measure("torch", make_torch)

# %% [markdown]
# ### Step 1: push, then sum
#
# **Idea.** The rank that has a row *pushes* it, because a store needs no reply. Each rank has a buffer for the worst
# case, one row from each rank for each token, so nothing is counted. One kernel pushes all rows, a warp per row; after
# a barrier of all ranks a second one sums them, a warp per token. Another barrier precedes the push, so that no rank
# overwrites rows that a slower rank still sums. In the barrier kernel lane `p` stores a sequence number in rank `p`'s
# memory, with release, and waits for the same number from rank `p`. `call` in the folded cell launches these kernels in
# order.
#
# **Predicted gain.** Torch's time, less the push at the rate of plain stores, the reading of the rows and writing of the
# sums at the bandwidth of a copy, four launches, and two barriers of one flag each.

# %%
FIRST = 32  # words before the rows: the flags of the barriers


@cache
def make_push_kernel(ranks, row_bytes):
    copy_row, row_words = make_copy_row(row_bytes, ld_nc_na_s32x4), row_bytes // 4

    @cuda.jit
    def push(y, src_idx, rank_prefix, rows, peers, rank):
        thread = int64(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        warps = cuda.gridDim.x * cuda.blockDim.x // 32
        row, lane = thread // 32, int32(cuda.threadIdx.x % 32)
        while row < rows:
            source = int32(0)
            while row >= rank_prefix[source * ranks + rank]:
                source = int32(source + 1)
            remote = pointer_from_address(peers[source], y)
            place = int64(src_idx[row]) * ranks + rank
            copy_row(remote, FIRST + place * row_words, y, row * row_words, lane)
            row += warps

    return push


@cache
def make_barrier_kernel(ranks):
    wait = make_wait(ld_acquire_sys_s32, at_least, BARRIER)

    @cuda.jit
    def barrier(local, peers, rank, number, timeout_ns, status):
        lane = int32(cuda.threadIdx.x)
        if lane < ranks:
            st_release_sys_s32(pointer_from_address(peers[lane], local), rank, number)
            wait(local, lane, number, number, -1, lane, WaitContext(rank, timeout_ns, status))

    return barrier


# %%
@cache
def make_sum_kernel(ranks, row_words, vectors):
    held = 4 * ranks * vectors

    @cuda.jit
    def sum_rows(local, is_token_in_rank, tokens, out):
        words, sums = cuda.local.array(held, int32), cuda.local.array(8, float32)
        thread = int64(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        warps = cuda.gridDim.x * cuda.blockDim.x // 32
        token, lane = thread // 32, int32(cuda.threadIdx.x % 32)
        while token < tokens:
            mask = int32(0)
            for r in range(ranks):
                if is_token_in_rank[token * ranks + r] != 0:
                    mask = int32(mask | (1 << r))
            for first in range(4 * lane, row_words, 128 * vectors):
                for u in range(vectors):  # all these loads are in flight together
                    for r in range(ranks):
                        if first + 128 * u < row_words and mask >> r & 1:
                            at, j = FIRST + (token * ranks + r) * row_words + first + 128 * u, 4 * (ranks * u + r)
                            words[j], words[j + 1], words[j + 2], words[j + 3] = ld_global_s32x4(local, at)
                for u in range(vectors):
                    if first + 128 * u < row_words:
                        for k in range(8):
                            sums[k] = float32(0)
                        for r in range(ranks):
                            if mask >> r & 1:
                                for k in range(4):  # a bfloat16 is the upper half of a float32
                                    word = uint32(words[4 * (ranks * u + r) + k])
                                    sums[2 * k] += uint_as_float(uint32(word << uint32(16)))
                                    sums[2 * k + 1] += uint_as_float(uint32(word & uint32(0xFFFF0000)))
                        a, b = cvt_rn_bf16x2_f32(sums[1], sums[0]), cvt_rn_bf16x2_f32(sums[3], sums[2])
                        c, d = cvt_rn_bf16x2_f32(sums[5], sums[4]), cvt_rn_bf16x2_f32(sums[7], sums[6])
                        at = token * row_words + first + 128 * u
                        st_na_s32x4(out, at, int32(a), int32(b), int32(c), int32(d))
            token += warps

    return sum_rows


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def make_push_and_sum(vectors, only_push=False):
    @contextmanager
    def make(transport):
        r, device, numbers = transport.rank, transport.device, itertools.count(1)
        shared = transport.allocate(4 * FIRST + TOKENS * RANKS * ROW_BYTES)
        local, status = shared.local.view(torch.int32), torch.zeros(STATUS_WORDS, dtype=torch.int32, device=device)
        timeout_ns = np.int64(0 if simulator.ENABLED else 10**10)
        src_idx, prefix = RECEIVED[r].src_idx.to(device), RECEIVED[r].rank_prefix_matrix.to(device)
        is_in, start = IS_IN[r].to(device), transport.launch

        def barrier():
            start(make_barrier_kernel(RANKS), 1, 32, local, shared.addresses, r, next(numbers), timeout_ns, status)

        def call(y=Y):
            out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
            barrier()
            start(
                make_push_kernel(RANKS, ROW_BYTES),
                HERE.blocks,
                HERE.threads,
                y[r].view(torch.int32),
                src_idx,
                prefix,
                len(y[r]),
                shared.addresses,
                r,
            )
            if not only_push:
                barrier()
                start(
                    make_sum_kernel(RANKS, ROW_BYTES // 4, vectors),
                    HERE.blocks,
                    HERE.threads,
                    local,
                    is_in,
                    TOKENS,
                    out.view(torch.int32),
                )
            return out

        yield call
        if error := explain(status.cpu()):
            raise RuntimeError(error)
        shared.close()

    return make


push_us, sum_us = WIRE_BYTES / PUSH * 1e6, SUM_BYTES / MEMORY * 1e6
print(f"push {push_us:.0f} us, sum {sum_us:.0f} us, launches and barriers {4 * EMPTY_US + 2 * FLAG_US:.1f} us")
gain_us = (us("torch") or 0) - (push_us + sum_us + 4 * EMPTY_US + 2 * FLAG_US)
measure("push, then sum", make_push_and_sum(1), after="torch", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The next cell measures the push alone, with its barrier, on all SMs. It takes longer than predicted,
# probably because it also copies the rows that stay on their rank, during which its link is idle; so it is no upper
# limit. The rings below are compared with it.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PUSH_US = fact("push_us", median_of(make_push_and_sum(1, only_push=True)))
if PUSH_US:
    print(
        f"the push alone, {WHEN}: {PUSH_US:.0f} us, {WIRE_BYTES / PUSH_US / 1000:.0f} GB/s on the wire; the summation "
        f"and the second barrier: {us('push, then sum') - PUSH_US:.0f} us"
    )
else:
    print("the push alone: no time is recorded yet")

# %% [markdown]
# ### Step 2: more loads in flight
#
# **Idea.** A lane that loads 16 bytes of each row, adds and stores them, and only then loads the next 16 bytes, mostly
# waits for memory. It should issue several 16-byte loads per row before the first addition: `vectors` in the kernel
# above. The summation alone, with few and with many CTAs:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
MOST = max(n for n in HERE.loads if n * RANKS <= 16)


def sum_gbps():
    """Time the sum kernel alone, on one GPU: {"CTAs, vectors": GB/s}; None in the simulator, where it only runs."""
    device = DEVICES[0]
    local = torch.randn(4 * FIRST + TOKENS * RANKS * HIDDEN, device=device).bfloat16().view(torch.int32)
    is_in, out = IS_IN[0].to(device), torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=device)
    moved = (int(IS_IN[0].sum()) + TOKENS) * ROW_BYTES
    calls = {}
    for ctas, vectors in itertools.product(HERE.sum_blocks, [n for n in HERE.loads if n <= MOST]):
        calls[f"{ctas}, {vectors}"] = lambda ctas=ctas, vectors=vectors: launch(
            make_sum_kernel(RANKS, ROW_BYTES // 4, vectors),
            ctas,
            HERE.threads,
            local,
            is_in,
            TOKENS,
            out.view(torch.int32),
        )
    times = kernel_times(calls, replays=10)
    return None if simulator.ENABLED else {name: round(moved / stats.median / 1000) for name, stats in times.items()}


recorded_gbps = fact("sum_gbps", sum_gbps()) or {}
SUM_GBPS = {tuple(map(int, name.split(", "))): gbps for name, gbps in recorded_gbps.items()}
if SUM_GBPS:
    print(f"The sum kernel alone, {'recorded' if simulator.ENABLED else 'measured now'}:")
for (ctas, vectors), gbps in SUM_GBPS.items():
    print(f"{ctas:>3} CTAs of 512 threads, vectors per row {vectors}: {gbps} GB/s")

# %% [markdown]
# Little's law: the bytes in flight are bandwidth times latency. With few CTAs and one vector per row it gives the latency
# (`LATENCY_NS`), because there the loads in flight are known. For the bandwidth of a copy, that latency requires:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
LATENCY_NS = None
if SUM_GBPS:
    ctas, vectors = min(SUM_GBPS)
    in_flight = ctas * 512 * vectors * 16 * ROWS_BYTES / (4096 * 2 * 7168)  # bytes: a row of each rank that has one
    LATENCY_NS = in_flight / (SUM_GBPS[ctas, vectors] * ROWS_BYTES / SUM_BYTES)  # reads are a part of the bytes
    needed = MEMORY * LATENCY_NS * 1e-9
    print(
        f"{MEMORY / 1e12:.1f} TB/s x {LATENCY_NS:.0f} ns = {needed / 1e6:.2f} MB in flight in the whole GPU, "
        f"{needed / LIMITS.sm_count / 1024:.0f} KB in each of {LIMITS.sm_count} SMs"
    )
for vectors in (1, 2, 4, 8):
    print(f"vectors per row {vectors}, 2 rows, 512 threads: {vectors * 2 * 16 * 512 / 1024:.0f} KB in an SM")

# %% [markdown]
# **Predicted gain.** The bytes of the summation at the rates of the kernel alone, with one vector per row and with the
# largest number (`MOST`), on all SMs. The push is unchanged.

# %%
all_sms = max((ctas for ctas, _ in SUM_GBPS), default=0)
of_all = {vectors: gbps for (ctas, vectors), gbps in SUM_GBPS.items() if ctas == all_sms}
gain_us = SUM_BYTES * (1 / of_all[1] - 1 / of_all[max(of_all)]) / 1000 if of_all else 0
measure("more loads in flight", make_push_and_sum(MOST), after="push, then sum", predicted_gain_us=gain_us)

# %% [markdown]
# The gain is small, because the push dominates. The step uses the whole GPU, its buffer has the worst-case size, and the
# link is idle during the summation.
#
# **Exercise 3.** A kernel sums `rows` rows per token. Each of `threads` threads on each of `sms` SMs issues `n` loads of
# 16 bytes for each row before the first addition. Write a function that returns the smallest `n` whose bytes in flight
# suffice for `bandwidth` (bytes per second) and `latency_ns`.

# %%
loads_in_flight = ...  # your answer: lambda bandwidth, latency_ns, sms, threads, rows: ...
exercise("combine-3").check(loads_in_flight)

# %% [markdown]
# ### Step 3: DeepEP's rings
#
# **Idea.** Each channel has a pair of CTAs. The even one sends: its warps are divided among the ranks, and write chunks
# of rows into the ranks' rings, as in dispatch. In the odd one, one lane of warp 0 per rank reads the tail and advances
# the head. The other warps take the tokens round-robin. Each waits until the token's rows have arrived from all ranks,
# sums them, and publishes the position before which it needs no rows; the head is the minimum over the warps.

# %%
Markdown("```python\n" + inspect.getsource(deepep_combine.make_update_heads) + "```")

# %%
Markdown("```python\n" + inspect.getsource(deepep_combine.make_reduce) + "```")

# %% [markdown]
# `released` in the listing uses the gaps of section 4: for a token that was not sent to rank `r`, `-position - 1` is
# the position of the next row from there.
#
# **Predicted gain.** Negative: the rings take as long as those of dispatch in notebook 12, on as many ranks and SMs, which
# move as many bytes.


# %%
@cache
def deepep_constants(num_sms):
    return DeepEPConfig(RANKS, num_sms // 2, HERE.ring, HERE.chunk, ROW_BYTES, 0, 0, EXPERTS, HERE.warps)


@cache
def deepep_handles(channels):
    return inputs.handles_of(IS_IN, channels)


def make_deepep(num_sms=HERE.num_sms):
    constants = deepep_constants(num_sms)

    def make(transport):
        def call(rank, handle, y=Y):
            deepep_launch.cached_notify_combine(rank, constants, handle)
            return deepep_launch.combine(rank, constants, y[transport.rank], handle)[0]

        return made_by_deepep(transport, constants, deepep_handles(constants.channels), call)

    return make


DISPATCH_STEP = records.find(DISPATCH, step="DeepEP's ring")
if DISPATCH_STEP and DISPATCH_STEP["config"]["ranks"] == SHOWN_RANKS:
    gain_us = (us("more loads in flight") or 0) - DISPATCH_STEP["kernel_us"]["median"]
    measure("DeepEP's rings", make_deepep(), after="more loads in flight", predicted_gain_us=gain_us)
else:
    measure("DeepEP's rings", make_deepep())  # notebook 12's times are of another number of ranks

# %% [markdown]
# **Explanation.** Our port of combine takes much longer than that of dispatch, and than the push, which uses more than
# five times as many SMs. This notebook does not measure the cause; step 4 changes several candidates together.
#
# ### Step 4: one warp per channel
#
# **Idea.** As in the package's dispatch, one *warp* handles a channel, so there are many more channels.
#
# - **The receiving warp processes its tokens in order**, alone, and so consumes each ring in order: the head is its own
#   count. There is no minimum over warps and **no gap to fill**.
# - **The sending warp serves its rings round-robin.** In each iteration it sends one row to each rank whose ring has
#   space. It never *waits* for one ring (section 6).
# - **Bulk copies**, issued by one thread, move rows into shared memory and from there to the peer.
# - One signalling warp per CTA publishes the progress of the others (notebook 12).
# - Heads and tails continue from launch to launch.
#
# The sender is the package's; `pipeline` is the module that copies rows. This is its loop:

# %%
excerpt(
    final_kernel.make_combine,
    "                    while cuda.any_sync(FULL_MASK, rows_left > 0)",
    "                        # Post the rows of earlier iterations",
)

# %% [markdown]
# In steps 4 to 6 the sender (`channel_sender.py`) differs in one thing: a rank also sends its *own rows* through rings,
# to itself.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def changed(*changes):
    """Return a copy of the combine kernel's module with some lines changed."""
    return changed_module(final_kernel, *changes)


def buffer_with(make_combine=final_kernel.make_combine, channels_per_warp=1):
    """Return a constructor of a ``Buffer`` with another combine kernel and number of channels (None: its own number)."""

    def make(*arguments, **options):
        buffer = Buffer(*arguments, **options)
        buffer._channels_per_warp = channels_per_warp
        prepare = buffer._runtime.prepare_kernel
        replaced = lambda make: make_combine if make is final_kernel.make_combine else make
        buffer._runtime.prepare_kernel = lambda make, *rest: prepare(replaced(make), *rest)
        return buffer

    return make


# %% [markdown]
# A lane loads `vectors` 16-byte vectors of each row before the first addition; in this step, one. (`packed` is for
# step 6.) The next two cells are folded: `sum_token` loads into `words` and sums, as in step 1. For each token, `receive`
# polls `tail` until its rows have arrived (`wanted`), calls `sum_token`, and posts `head`.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_sum_token(shape, vectors, packed):
    ranks, row_words, stride = shape.num_ranks, shape.slot.row, shape.slot.stride
    row_vectors, held, places_held = row_words // 4, 4 * ranks * vectors, max(2, ranks)

    @cuda.jit(device=True)
    def sum_token(local, first_ring, ring_words, places, mask, out, token, lane):
        """``places``: of lane r, the slot in rank r's ring."""
        begins, words = cuda.local.array(places_held, int64), cuda.local.array(held, int32)
        sums = cuda.local.array(8, float32)
        for r in range(ranks):
            place = cuda.shfl_sync(FULL_MASK, places, r)
            begins[r] = first_ring + int64(r) * ring_words + int64(place) * stride
        for first in range(lane, row_vectors, 32 * vectors):
            for u in range(vectors):  # all these loads are in flight together
                i = first + 32 * u
                for r in range(ranks):
                    if i < row_vectors and mask >> uint32(r) & uint32(1):
                        j = 4 * (ranks * u + r)
                        words[j], words[j + 1], words[j + 2], words[j + 3] = ld_global_s32x4(local, begins[r] + 4 * i)
            for u in range(vectors):
                i = first + 32 * u
                if i < row_vectors and packed and mask == uint32(3):
                    for k in range(8 * u, 8 * u + 4):
                        total = add_rn_bf16x2(uint32(words[k]), uint32(0))  # a sum is 0, not -0, even of -0 and -0
                        words[k] = int32(add_rn_bf16x2(total, uint32(words[k + 4])))
                    st_na_s32x4(
                        out,
                        int64(token) * row_words + 4 * i,
                        words[8 * u],
                        words[8 * u + 1],
                        words[8 * u + 2],
                        words[8 * u + 3],
                    )
                elif i < row_vectors:
                    for k in range(8):
                        sums[k] = float32(0)
                    for r in range(ranks):
                        if mask >> uint32(r) & uint32(1):
                            for k in range(4):
                                word = uint32(words[4 * (ranks * u + r) + k])
                                sums[2 * k] += uint_as_float(uint32(word << uint32(16)))
                                sums[2 * k + 1] += uint_as_float(uint32(word & uint32(0xFFFF0000)))
                    a, b = cvt_rn_bf16x2_f32(sums[1], sums[0]), cvt_rn_bf16x2_f32(sums[3], sums[2])
                    c, d = cvt_rn_bf16x2_f32(sums[5], sums[4]), cvt_rn_bf16x2_f32(sums[7], sums[6])
                    st_na_s32x4(out, int64(token) * row_words + 4 * i, int32(a), int32(b), int32(c), int32(d))

    return sum_token


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_receive(shape, vectors, packed):
    ranks, warps, slots = shape.num_ranks, shape.warps, shape.slots
    progress_offset, done_offset = shape.progress_offset, shape.done_offset
    tail_offset, received_offset = buffer_layout(ranks).tail(True), received_counters(True)
    sum_token = make_sum_token(shape, vectors, packed)

    @cuda.jit(device=True)
    def receive(smem_i32, smem_u64, channel, channels, ctx, rings, tensors):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        local, send_head = ctx.local, tensors.send_head
        source, has_ring = lane if lane < ranks else int32(0), lane < ranks
        retire_warp(smem_i32, ctx.state, done_offset, warps, lane)  # step 8 takes further channels
        if channel >= channels:
            return
        token = first_token(channel, channels, tensors.num_tokens)
        end = first_token(channel + 1, channels, tensors.num_tokens)
        first_ring = rings.offset + int64(channel * ranks) * rings.stride
        progress_slot = int32(progress_offset + warp * ranks + lane)
        base = uint32(ctx.state[received_offset + channel * ranks + source])
        head, tail, ready = base, base, int32(1)
        next_position = send_head[int64(token) * ranks + source] if has_ring and token < end else int32(-1)
        while token < end:
            position = next_position
            wanted, start, waiting = uint32(base + uint32(position)), uint64(0), int32(1)
            while waiting != 0:
                missing = has_ring and position >= 0 and int32(uint32(tail - wanted)) <= 0
                if missing:
                    tail = uint32(ld_acquire_sys_s32(local, tail_offset + channel * ranks + source))
                    missing = int32(uint32(tail - wanted)) <= 0
                waiting = int32(1 if cuda.any_sync(FULL_MASK, missing) else 0)
                if waiting != 0:
                    start = start_of_wait(start)
                    if warp_abort_if_timed_out(start, missing, ctx, COMBINE_ROWS, channel, lane, wanted, tail):
                        waiting = ready = int32(0)
            if ready == 0:
                break
            cuda.syncwarp()  # what a lane has acquired, all lanes read
            mask = uint32(cuda.ballot_sync(FULL_MASK, position >= 0))
            next_position = send_head[int64(token + 1) * ranks + source] if has_ring and token + 1 < end else int32(-1)
            slot = int32(uint32(position) % uint32(slots))
            sum_token(local, first_ring, rings.stride, slot, mask, tensors.out, token, lane)
            cuda.syncwarp()  # all have read
            if has_ring and position >= 0:
                head = uint32(wanted + uint32(1))
                post_progress(smem_u64, progress_slot, channel, head)
            token = int32(token + 1)
        if has_ring:
            ctx.state[received_offset + channel * ranks + source] = int32(head)

    return receive


# %% [markdown]
# In the folded kernel `combine` each warp runs `publish`, `receive` or `send`; weights and biases are not used.
# `with_vectors(n)` selects `vectors`.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_channels_kernel(shape, vectors, packed=False):
    ranks, warps, barrier_offset = shape.num_ranks, shape.warps, shape.barrier_offset
    progress_offset, published_offset, done_offset = shape.progress_offset, shape.published_offset, shape.done_offset
    tail_offset, head_offset = buffer_layout(ranks).tail(True), buffer_layout(ranks).head(True)
    send, receive, publish = make_send(shape), make_receive(shape, vectors, packed), make_publish(shape)

    @cuda.jit
    def combine(
        local,
        peers,
        state,
        status,
        timeout_ns,
        rank,
        senders,
        channels,
        rings_offset,
        ring_words,
        x,
        topk_weights,
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        send_head,
        num_tokens,
        bias_0,
        bias_1,
        out,
        out_weights,
        num_rows,
    ):
        smem_i32, smem_u64 = cuda.shared.array(0, int32, 128), cuda.shared.array(0, uint64, 128)  # the same memory
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        ctx = RankContext(local, peers, state, status, timeout_ns, rank)
        rings = RingMemory(rings_offset, ring_words)
        prefix = PrefixMatrices(rank_prefix, channel_prefix, recv_channel_prefix)
        tensors = CombineTensors(x, num_rows, send_head, num_tokens, out)
        receives, blocks, channel = first_channel(senders, warp)
        griddepcontrol_wait()
        init_barriers(smem_u64, barrier_offset, warps)
        clear_progress(smem_i32, smem_u64, progress_offset, published_offset, done_offset, warps, ranks)
        if ld_volatile_s32(local, ABORT_FLAG) != 0:
            pass  # the rank has aborted in an earlier kernel
        elif warp == warps:
            publish(smem_i32, smem_u64, lane, rank, head_offset if receives else tail_offset, local, peers)
        else:
            if receives:
                receive(smem_i32, smem_u64, channel, channels, ctx, rings, tensors)
            else:
                send(smem_i32, smem_u64, channel, channels, blocks, ctx, rings, prefix, tensors)
            cuda.syncwarp()
            if lane == 0:
                st_release_cta_shared_s32(smem_i32, done_offset + warp, 1)

    return combine


def with_vectors(n, packed=False):
    """Return a constructor of a ``Buffer`` with this kernel and n vectors of each row in flight."""
    return buffer_with(lambda shape, biases: make_channels_kernel(shape, n, packed))


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@contextmanager
def dispatched(transport, kind, config):
    """Yield a rank's buffer, made by ``kind``, and the handle of a dispatch."""
    buffer = kind(transport, config.get_nvl_buffer_size_hint(ROW_BYTES, RANKS), timeout=20.0)
    per_rank, per_expert, is_in = (tensor.to(transport.device) for tensor in LAYOUTS[transport.rank])
    yield (
        buffer,
        buffer.dispatch(
            X[transport.rank],
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=is_in,
            config=config,
        )[4],
    )
    buffer.destroy()


def make_package(num_sms=HERE.num_sms, kind=Buffer):
    config = Config(num_sms, HERE.chunk, HERE.ring)

    @contextmanager
    def make(transport):
        with dispatched(transport, kind, config) as (buffer, handle):
            yield lambda y=Y: buffer.combine(y[transport.rank], handle, config=config)[0]

    return make


channels = num_channels(HERE.num_sms, RANKS, ROW_BYTES, per_warp=1)
print(f"{HERE.num_sms} SMs: {channels} channels here, {HERE.num_sms // 2} in DeepEP's kernel")

# %% [markdown]
# **Predicted gain.** The time of step 3, less the slower of two parts. Sending: half of the 24 SMs copy all rows, or the
# link limits them. Reading: the other SMs read all rows; each reads its bytes in flight once per latency.


# %%
OWN_BYTES = ROWS_BYTES - WIRE_BYTES


def sending_us(own_bytes, senders=12):
    """Return the time in which the sending SMs copy the rows that leave the rank, and ``own_bytes``."""
    cta, link = (RATES[f"bulk copies after bulk loads: {ctas}"] for ctas in (1, senders))
    return max((WIRE_BYTES + own_bytes) / (senders * cta), WIRE_BYTES / link) * 1e6


def reading_us(vectors, readers=12, warps=15):
    """Return the time in which the receiving SMs read all rows."""
    in_flight = vectors * SHOWN_RANKS * 16 * 32 * warps  # bytes in an SM
    return ROWS_BYTES / readers / in_flight * LATENCY_NS / 1000 if LATENCY_NS else 0


print(f"reading takes {reading_us(1):.0f} us, sending {sending_us(OWN_BYTES):.0f} us")
gain_us = (us("DeepEP's rings") or 0) - max(sending_us(OWN_BYTES), reading_us(1))
measure("one warp per channel", make_package(kind=with_vectors(1)), after="DeepEP's rings", predicted_gain_us=gain_us)

# %% [markdown]
# Reading is the slower part: too few bytes are in flight.
#
# ### Step 5: several vectors per row
#
# **Idea.** More loads in flight, as in step 2, but now on few SMs, where it matters more: a larger `vectors`.
# We use as many as fit in 32 registers: four vectors per row with two ranks, two with four ranks.
#
# **Predicted gain.** Two measurements predict a third. Assume that a part of the time is waiting for loads, that this part
# is divided by the number of vectors, and that the rest is constant. The gain from the *second* vector is then half of
# the waiting.


# %%
def loads_sweep():
    """Time each number of vectors in flight, {number: microseconds}; None if nothing is timed, and each only runs."""
    makes = {n: make_package(kind=with_vectors(n)) for n in HERE.loads if n * RANKS <= 16}
    for n, make in makes.items():
        wrong = check(outputs_of(GROUP, poisoned(make)))
        assert not wrong, f"{n} vectors: {wrong}"
    return {str(n): round(stats.median, 2) for n, stats in times_of(makes).items()} or None


def saved_by(vectors, one, two):
    """Return what ``vectors`` per row save over one, predicted from the times with one and two."""
    return 2 * (one - two) * (1 - 1 / vectors)


SEVERAL = max(1, 8 // SHOWN_RANKS)  # 4 registers each
LOADS = {int(n): time for n, time in (fact("loads_us", loads_sweep()) or {}).items()}
if {1, 2} <= LOADS.keys():
    print(f"1 vector: {LOADS[1]:.0f} us, 2 vectors: {LOADS[2]:.0f} us, {WHEN}")
    gain_us = saved_by(SEVERAL, LOADS[1], LOADS[2])
else:
    gain_us = reading_us(1) - max(sending_us(OWN_BYTES), reading_us(SEVERAL))
several = make_package(kind=with_vectors(max(1, 8 // RANKS)))
measure("several vectors per row", several, after="one warp per channel", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print(f"All numbers of vectors, {WHEN}:" if LOADS else "Other numbers of vectors: no times are recorded yet")
for n, time in LOADS.items():
    predicted = f", predicted {LOADS[1] - saved_by(n, LOADS[1], LOADS[2]):.0f}" if n > 2 else ""
    print(f"{n} in flight: {time:.0f} us{predicted}; {WIRE_BYTES / time / 1000:.0f} GB/s on the wire")
for few, many in itertools.pairwise(LOADS):
    saved = 100 * (1 - LOADS[many] / LOADS[few])
    print(f"from {few} to {many}: {-saved:+.1f} % of the time{'' if saved > 5 else ': this doubling does not help'}")

# %% [markdown]
# **Explanation.** More than two vectors gain less than predicted, and the largest number is slower than the one below it:
# the model does not hold beyond two.
#
# ### Step 6: two rows as packed pairs
#
# **Idea.** The instructions of the summation may be the next limit. A 32-bit word holds two elements; summing two such
# words takes 9 instructions: unpack, add in `float32`, pack. For *two* rows, Hopper adds two pairs of `bfloat16` in one
# instruction (`add.rn.bf16x2`), which rounds each sum once. Rounding first to 24 bits and then to 8 never differs from
# this for the sum of two numbers of 8 bits, because 24 is at least 2 x 8 + 2 (Figueroa 1995, section 9). Two
# instructions per word remain: one adds 0, so that a sum is 0 and not -0, and one adds the second row.
#
# **Predicted gain.** If instructions limit the receivers, the senders are the new limit: step 5 less the sending time.

# %%
gain_us = (us("several vectors per row") or 0) - sending_us(OWN_BYTES) if SHOWN_RANKS == 2 else 0
packed_pairs = with_vectors(max(1, 8 // RANKS), RANKS == 2)  # with more ranks the kernel is that of step 5
measure("packed pairs", make_package(kind=packed_pairs), after="several vectors per row", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The gain is much smaller than predicted, so instructions were not the main limit.
#
# ### Step 7: own rows without rings, bulk copies in the receiver
#
# **Idea.** A rank's *own rows need no ring*. Without them the senders have half of their work with two ranks. Receiving
# warps can also use bulk copies, and have shared memory for one row:
#
# - A bulk copy loads the own row into shared memory while the warp waits for the rows of other ranks.
# - The sum replaces it there, and another bulk copy stores it while the warp continues with the next token.

# %%
excerpt(final_kernel.make_combine, "                        own = cuda.shfl_sync", "                        wanted = ")

# %%
excerpt(
    final_kernel.make_combine,
    "                        reduce_token(",
    "                        token = int32(token + 1)",
)

# %% [markdown]
# For tokens that may have more than two rows, or with biases, `reduce_token` accumulates in `float32` and keeps two
# rows in flight:

# %%
excerpt(reduce.make_reduce_token_general, "            remaining = mask", "            for w in range(num_words):")

# %% [markdown]
# **Predicted gain.** The sending time with own rows, less that without. With fewer SMs the step should gain more.

# %%
gain_us = sending_us(OWN_BYTES) - sending_us(0)
measure("bulk copies", make_package(kind=buffer_with()), after="packed pairs", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
KINDS_OF_BUFFER = {"packed pairs": packed_pairs, "bulk copies": buffer_with()}
FEWER = fact("twelve_us", TIMED and {name: median_of(make_package(12, kind)) for name, kind in KINDS_OF_BUFFER.items()})
if FEWER:
    print(f"with 12 SMs, {WHEN}: {FEWER['packed pairs']:.0f} -> {FEWER['bulk copies']:.0f} us")

# %% [markdown]
# With 12 SMs the step gains more. Senders now copy only the rows that leave the rank, and receivers load only the rows
# that have arrived.
#
# ### Step 8: dynamic load balancing
#
# **Idea.** So far all sending warps have equal shares. The next cell measures when each warp finishes.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
WRITTEN_DOWN = (
    ("from moe_numba.ptx.memory", "from moe_numba.ptx.special_registers import globaltimer\nfrom moe_numba.ptx.memory"),
    ("        griddepcontrol_wait()\n", "        griddepcontrol_wait()\n        begun = globaltimer()\n"),
    (
        "                st_release",
        "                bias_0[int32(cuda.blockIdx.x * warps + warp)] = int32(globaltimer() - begun)\n"
        "                st_release",
    ),
)


def ends_of(channels_per_warp):
    """Return when rank 0's sending warps finish, in microseconds: the first, the mean, and the last."""
    config, kernel = Config(HERE.num_sms, HERE.chunk, HERE.ring), changed(*WRITTEN_DOWN).make_combine
    kind, ends = buffer_with(lambda shape, biases: kernel(shape, 0), channels_per_warp), [None] * RANKS

    @contextmanager
    def make(transport):
        r = transport.rank
        ends[r] = torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16, device=transport.device)
        with dispatched(transport, kind, config) as (buffer, handle):
            yield lambda: buffer.combine(Y[r], handle, bias=ends[r], config=config)[0]

    rank_times(GROUP, {"": make}, launches=3, samples=1)  # of the last launch: the first one waits for the other ranks
    sending = num_channels(HERE.num_sms, RANKS, ROW_BYTES, per_warp=1)
    us = ends[0].view(torch.int32).flatten()[:sending].double() / 1000
    return TIMED and [round(float(t), 1) for t in (us.min(), us.mean(), us.max())]


def ends_text(ends):
    return f"the first sending warp finishes after {ends[0]:.0f} us, the mean {ends[1]:.0f}, the last {ends[2]:.0f}"


EQUAL_SHARES = fact("equal_shares_us", ends_of(1))
print(f"equal shares: {ends_text(EQUAL_SHARES)}; {WHEN}" if EQUAL_SHARES else "equal shares: no times are recorded yet")

# %% [markdown]
# The warps finish at different times. With equal shares, a warp delayed by a full ring cannot pass work to another. The
# tokens are therefore divided into four channels per sending warp, and a warp that has finished a channel takes the
# next one from an atomic counter.

# %%
excerpt(next_channel, "    taken = ", None)

# %% [markdown]
# The ranks cannot deadlock, although a warp now has several channels. Warps take channels in ascending order, so on
# each rank some warp works on the lowest unfinished channel, and none of these warps waits for another channel.
#
# **Predicted gain.** The difference between the last warp and the mean.

# %%
gain_us = EQUAL_SHARES[2] - EQUAL_SHARES[1] if EQUAL_SHARES else 0
measure("final", make_package(), after="bulk copies", predicted_gain_us=gain_us)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
DYNAMIC_SHARES = fact("dynamic_shares_us", ends_of(None))
if DYNAMIC_SHARES:
    print(f"dynamic: {ends_text(DYNAMIC_SHARES)}; {WHEN}")

# %% [markdown]
# **Explanation.** The sending warps finish closer together, but later than the former mean, so the gain is smaller than
# predicted.
#
# **The cost of the summation.** In the next cell receivers only wait for rows and store zeros.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
NO_SUMMATION = ("uint32(cuda.ballot_sync(FULL_MASK, position >= 0))", "uint32(0)")
NO_SUMMATION_US = fact(
    "no_summation_us", median_of(make_package(kind=buffer_with(changed(NO_SUMMATION).make_combine, None)))
)
if NO_SUMMATION_US:
    print(
        f"no summation, {WHEN}: {NO_SUMMATION_US:.0f} us, {NO_SUMMATION_US / PUSH_US:.2f} times as long as the push "
        f"by the whole GPU; the summation adds {us('final') - NO_SUMMATION_US:.0f} us"
    )
else:
    print("no summation: no time is recorded yet")

# %% [markdown]
# Without the summation combine takes little less time, so the summation is almost completely hidden.
#
# ### Time over the number of SMs
#
# Half of the SMs send, but no more than saturate the link.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sm_sweep():
    """Return {line: {num_sms: statistics}}; None if nothing is timed, and each only runs."""
    makes = {("moe_numba", n): make_package(n) for n in HERE.sweep}
    makes |= {("DeepEP's rings", n): make_deepep(n) for n in HERE.deepep_sweep}
    for name, make in makes.items():
        wrong = check(outputs_of(GROUP, poisoned(make)))
        assert not wrong, f"{name}: {wrong}"
    lines = {}
    for (line, n), stats in times_of(makes).items():
        lines.setdefault(line, {})[n] = {key: round(getattr(stats, key), 3) for key in ("median", "p10", "p90")}
    return lines or None


SWEEP = fact("sweep", sm_sweep()) or {}
LINES = {line: {int(n): stats for n, stats in points.items()} for line, points in SWEEP.items()}
if LINES:
    picture = plots.sweep_figure(
        LINES,
        xlabel="SMs",
        floor={n: FLOOR_US for n in LINES["moe_numba"]},
        title="Combine over the number of SMs",
        caption=plots.caption(records.environment(), "measured now on")
        if TIMED
        else plots.caption(ladder.record, "not measured here: recorded on"),
    )
else:
    picture = print("The sweep over SMs has not been recorded yet.")
picture

# %% jupyter={"source_hidden": true} tags=["hide-input"]
print(f"The package's combine, {WHEN}:" if LINES else "no times are recorded yet")
for n, stats in LINES["moe_numba"].items() if LINES else ():
    gbps = WIRE_BYTES / stats["median"] / 1000
    print(f"{n:3} SMs: {stats['median']:6.1f} us, {gbps:3.0f} GB/s on the wire")

# %% [markdown]
# From 24 SMs on, the package's time hardly changes. Our port of DeepEP's combine with 48 SMs takes longer than the
# package's with 8.
#
# ### Negative tests: wrong results must be rejected
#
# Three wrong results: a sum in descending rank order, a sum rounded after each row, and one token
# missing. With two ranks the first two would be *correct*, so this test uses four ranks, on the host.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sums_in(order, narrow=False):
    """Return rank 0's sums of the trial in an order of the ranks; ``narrow``: rounded after each row."""
    total = torch.zeros(40, 8)
    for peer in order:
        first, last = 0, int(TRIAL[peer].rank_prefix_matrix[0, peer])
        tokens = TRIAL[peer].src_idx[first:last].long()
        total[tokens] += TRIAL_Y[peer][first:last].float()
        total = total.bfloat16().float() if narrow else total
    return total.bfloat16()


TRIAL = inputs.received_by([torch.ones(40, 4, dtype=torch.bool)] * 4)
generator = torch.Generator().manual_seed(0)
TRIAL_Y = [torch.randn(160, 8, generator=generator).bfloat16() for _ in range(4)]
TRIAL_Y[0][:40] *= 2**14  # large, and cancelled by the last rank's rows
TRIAL_Y[3][:40] = -TRIAL_Y[0][:40]
TRIAL_WANTED = [list(inputs.sums_of(TRIAL_Y, TRIAL, [40] * 4))[0]]
short_by_one = TRIAL_WANTED[0].clone()
short_by_one[-1] = float("nan")
trial = Ladder("combine_trial", lambda outputs: check(outputs, TRIAL_WANTED))
assert check([sums_in(range(4))], TRIAL_WANTED) is None
WRONG = {
    "descending order": sums_in(range(3, -1, -1)),
    "rounded after each row": sums_in(range(4), True),
    "last token missing": short_by_one,
}
for name, wrong in WRONG.items():
    trial.step(name, lambda wrong=wrong: [wrong], expect_wrong=True)

# %% [markdown]
# ### The whole ladder
#
# All steps again, interleaved.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder.measure_all(times_of(STEPS))
if TIMED:
    for row in ladder.rows:
        row["wire_gbps"] = round(WIRE_BYTES / us(row["step"]) / 1000, 1)

# %%
ladder.plot(floor_us=FLOOR_US, peers={"the push alone": PUSH_US} if PUSH_US else None)

# %% [markdown]
# **Result.** The package's combine on 24 SMs takes about as long as the push alone on all SMs.
#
# ## 6. Deadlock
#
# Ranks **deadlock** if they wait for one another in a cycle. This section runs in the simulator, which detects that no
# thread can continue.

# %% [markdown]
# ### A ring that is too short
#
# DeepEP requires rings longer than a chunk. The next cell tests whether that is sufficient, with two ranks, one
# channel, and several numbers of reducing warps (`R`), chunks, rings and seeds.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def lock_up(cases):
    """Return for each (warps of a rank, chunk, ring, seed) if it deadlocked, and rank 0's head and tail of rank 1's queue."""
    found = []
    for warps, chunk, ring, seed in cases:
        reducers = 2 * warps - 1
        chosen = [torch.ones(3 * reducers, 2, dtype=torch.bool)] * 2
        handles = inputs.handles_of(chosen, 1)
        c = DeepEPConfig(2, 1, ring, chunk, 16, 0, 0, 2, warps, fault="short ring")
        y = [torch.ones(len(h.recv_src_idx), 8).bfloat16() for h in handles]
        with simulate.virtual_ranks(2, min_buffer_bytes(combine=c)) as ranks, simulator.seed(seed):
            try:
                simulate.combine_all(ranks, c, y, handles)
                hung = False
            except simulator.Deadlock:
                hung = True
            buffer = int(ranks[0].buffers[0])
            like = simulator.pointer(torch.zeros(1, dtype=torch.int32))
            flags = [simulator.ranks.pointer_at(buffer + offset, like)[1] for offset in combine_offsets(c)[:2]]
        found.append({"hung": hung, "head": int(flags[0]), "tail": int(flags[1])})
    return found


CASES = [
    (warps, chunk, ring, seed)
    for warps, chunk in ((2, 2), (2, 3), (3, 2))
    for ring in range(chunk + 1, chunk + 2 * warps)
    for seed in range(2 if warps == 2 else 1)
]
CASES += [(12, 4, 25, 0), (12, 4, 26, 0)]
LOCKED = dict(zip(CASES, in_simulator(lock_up, CASES)))
for (warps, chunk), cases in itertools.groupby(CASES, key=lambda case: case[:2]):
    rings = {}
    for case in cases:
        rings.setdefault(case[2], []).append(LOCKED[case]["hung"])
    found = ", ".join(
        f"ring {ring} {'deadlocks' if all(hung) else 'deadlocks under some seeds' if any(hung) else 'is correct'}"
        for ring, hung in rings.items()
    )
    reducers = 2 * warps - 1
    print(f"R = {reducers:2}, chunk {chunk}: {found}; chunk + R - 1 = {chunk + reducers - 1}")

# %% [markdown]
# A ring of `chunk + R - 1` rows is sufficient in all runs, and one row less deadlocks. The figure shows such a run.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def stuck_picture(case):
    warps, chunk, ring, _ = case
    head, tail, reducers = LOCKED[case]["head"], LOCKED[case]["tail"], 2 * warps - 1
    tokens, states = 3 * reducers, []
    for warp in range(reducers):
        own = range(warp, tokens, reducers)  # each token goes to all ranks: its index is its position
        later = [position for position in own if position >= tail]
        states.append(([position for position in own if position < tail], later[0] if later else None))
    assert head == min(read[-1] + 1 if read else 0 for read, _ in states), "the head is not the minimum"
    return draw.deadlocked_ring(ring, chunk, head, tail, states, tokens)


stuck_picture(next(case for case in CASES if LOCKED[case]["hung"] and case[2] == case[1] + 2 * case[0] - 3))

# %% [markdown]
# Every row in the ring has been read, but the head does not advance. The last warp waits for a row that has not been
# sent, and can only publish the position after its previous token. In the worst case this minimum is `R - 1` rows
# behind. The sender waits for space for a whole chunk, so the ring needs `R - 1 + chunk` rows. DeepEP's own check
# requires `chunk + 1`. Our port and the package's `Config` refuse rings below the bound:

# %%
c = DeepEPConfig(8)
print(
    f"DeepEP's combine on 8 ranks: {c.warps * c.ranks - 1} reducing warps; the ring must have chunk + "
    f"{min_ring_slots(c) - c.chunk} rows"
)
for ring in (25, 26):
    try:
        print(f"Config with chunks of 4 and rings of {ring} rows: accepted, {Config(24, 4, ring)}")
    except ValueError as error:
        print("refused:", error)

# %% [markdown]
# The package's kernel cannot deadlock in this way: a row that a receiving warp has read is free immediately. A ring of
# one slot is sufficient.
#
# ### A sender that waits
#
# The package's sender of combine skips a full ring, while that of dispatch *waits* for space. In dispatch this is
# harmless, because a receiver always consumes the rows that have arrived. A receiver of combine waits for *all* rows of
# its next token, and meanwhile consumes nothing from the other rings.
#
# The example has three ranks. The first tokens of rank `r` go to rank `r + 1` only, the later ones to all ranks. In the
# changed kernel, if *any* ring that still has rows to send is full, the sender sends nothing (`WAITING` in the folded
# cell).


# %% jupyter={"source_hidden": true} tags=["hide-input"]
WAITING = (
    "                        can_send = rows_left > 0 and uint32(tail - head) < capacity\n",
    "                        full = cuda.any_sync(FULL_MASK, rows_left > 0 and uint32(tail - head) >= capacity)\n"
    "                        can_send = rows_left > 0 and not full\n",
)
KEPT = []  # buffers of aborted ranks, which cannot be closed


def three_ranks(changes):
    """Return if the sums of three ranks are right, the errors of those that abort, and heads, tails and send_head."""
    early = torch.zeros(3, 3, 3, dtype=torch.bool)
    for rank in range(3):
        early[rank, :, (rank + 1) % 3] = True
    chosen = [torch.cat([early[rank], torch.ones(3, 3, dtype=torch.bool)]).repeat(2, 1) for rank in range(3)]
    kind, slots, heads = buffer_with(changed(*changes).make_combine), 2, [None] * 3
    config, buffers = Config(2, 1, 23), [None] * 3

    def work(transport):
        r = transport.rank
        # The size for rings of two rows: 2 halves of 2 channels, 3 ranks, 32 words.
        buffers[r] = buffer = kind(transport, 2 * 2 * 3 * 32 * 4 * slots)
        counts = chosen[r].sum(dim=0, dtype=torch.int32)
        x = torch.ones(len(chosen[r]), 16).bfloat16()
        y, _, _, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=counts,
            num_tokens_per_expert=counts.clone(),
            is_token_in_rank=chosen[r],
            config=config,
        )
        heads[r], buffer._runtime.timeout = handle[5], 0.004
        out = buffer.combine(y, handle, config=config)[0]
        return bool((out[:, 0] == chosen[r].sum(dim=1)).all())

    right, flags, errors = LocalGroup(3).run(work), buffer_layout(3), []
    for buffer in buffers:
        try:
            buffer._runtime.check_alive()
        except TimeoutError as error:
            errors.append(str(error))
    words = [buffer._runtime._local for buffer in buffers]
    KEPT.extend(buffers)
    return {
        "right": right,
        "errors": errors,
        "slots": slots,
        "heads": [h.tolist() for h in heads],
        "tail": [w[flags.tail(True) :][:3].tolist() for w in words],  # [at rank][from], channel 0
        "head": [w[flags.head(True) :][:3].tolist() for w in words],
    }  # [at rank][to]


def three_ranks_of(senders):
    return {name: three_ranks(changes) for name, changes in senders.items()}


SENDERS = {"unchanged": (), "a sender that waits": (WAITING,)}
THREE = in_simulator(three_ranks_of, SENDERS)
for name, found in THREE.items():
    print(f"{name}: {'all sums are right' if all(found['right']) and not found['errors'] else 'the ranks aborted'}")
    for sentence in found["errors"]:
        print("   ", sentence)

# %% [markdown]
# The heads and tails left in memory determine the whole cycle:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def wait_cycle(found, rank=0):
    """Follow the waits of channel 0 from a rank's sender on; return the cycle, [(waiter, reason)], or None."""
    tail, head, places, chain, sends = found["tail"], found["head"], found["heads"], [], True
    while not chain or (rank, sends) != chain[0][0]:
        if sends:  # a ring that leads away is full
            full = [to for to in range(3) if to != rank and tail[to][rank] - head[rank][to] == found["slots"]]
            if not full:
                return None
            chain.append(((rank, True), f"no space in the ring to rank {full[0]}"))
            rank = full[0]
        else:  # the next token lacks a row
            taken = [head[source][rank] for source in range(3)]
            others = [source for source in range(3) if source != rank]
            token = next(row for row in places[rank][:6] if any(row[s] >= taken[s] for s in others))
            missing = [s for s in others if token[s] >= tail[rank][s]]
            if not missing:
                return None
            chain.append(((rank, False), f"no row from rank {missing[0]}"))
            rank = missing[0]
        sends = not sends
        if len(chain) > 8:
            return None
    return [(f"rank {rank} {'sends' if sends else 'receives'}", reason) for (rank, sends), reason in chain]


CYCLE = wait_cycle(THREE["a sender that waits"]) if THREE["a sender that waits"]["errors"] else None
draw.wait_cycle(CYCLE) if CYCLE else print("no cycle was found")

# %% [markdown]
# A sender of combine must therefore not wait for one ring while another has space. Longer rings do not help: longer
# runs of tokens to one rank fill them. In DeepEP's kernel each rank has its own sending warps, so a full ring delays
# only the rows to that rank.
#
# **Exercise 4.** Two ranks combine rows of one word through rings of two slots; own rows use rings, too. `y` has
# `rows[0]` rows to rank 0, then `rows[1]` to rank 1, each in token order. Bit `s` of `sources[t]` is set if rank `s` has
# a row of the receiving rank's token `t`. Repair the sender, which deadlocks.

# %%
SLOTS, TAILS, HEADS, RINGS = 2, 0, 2, 4  # the last three are offsets in `local`; each counter has a word per source


@cuda.jit
def combine_two_ranks(local, peers, rank, y, rows, sources, tokens, out):
    if cuda.threadIdx.x == 0:  # sends
        tail = cuda.local.array(2, int32)
        tail[0] = tail[1] = 0
        while tail[0] < rows[0] or tail[1] < rows[1]:
            for to in range(2):
                remote = pointer_from_address(peers[to], local)
                if tail[to] < rows[to]:
                    while tail[to] - ld_acquire_sys_s32(remote, HEADS + rank) == SLOTS:
                        pass
                    remote[RINGS + SLOTS * rank + tail[to] % SLOTS] = y[to * rows[0] + tail[to]]
                    tail[to] += 1
                    st_release_sys_s32(remote, TAILS + rank, tail[to])
    elif cuda.threadIdx.x == 32:  # receives
        head = cuda.local.array(2, int32)
        head[0] = head[1] = 0
        for token in range(tokens):
            out[token] = 0
            for source in range(2):
                if sources[token] >> source & 1:
                    while ld_acquire_sys_s32(local, TAILS + source) == head[source]:
                        pass
                    out[token] += local[RINGS + SLOTS * source + head[source] % SLOTS]
                    head[source] += 1
                    st_release_sys_s32(local, HEADS + source, head[source])


exercise("combine-4").check(combine_two_ranks)

# %% [markdown]
# ## 7. Weights and biases
#
# The output of an MoE layer is a *weighted* sum of its experts' results, but **combine only adds**: each rank
# multiplies by its experts' weights (from dispatch) before the rows are returned. Combine can also return the weights,
# for training. Each weight is nonzero on one rank only, so exactly the bits that were sent must return.
#
# Up to two **biases**, for example the result of a shared expert, are added to the sum first. That saves a launch, but
# the receiving warps must load them, and the packed additions of step 6 cannot be used.


# %%
@contextmanager
def make_with_all(transport):
    r, device, config = transport.rank, transport.device, Config(HERE.num_sms, HERE.chunk, HERE.ring)
    buffer = Buffer(transport, config.get_nvl_buffer_size_hint(ROW_BYTES, RANKS), timeout=20.0)
    per_rank, per_expert, is_in = (tensor.to(device) for tensor in LAYOUTS[r])
    _, _, weights, _, handle, _ = buffer.dispatch(
        X[r],
        num_tokens_per_rank=per_rank,
        num_tokens_per_expert=per_expert,
        is_token_in_rank=is_in,
        topk_idx=TOPK_IDX[r].to(device),
        topk_weights=WEIGHTS[r].to(device),
        config=config,
    )
    yield lambda: buffer.combine(Y[r], handle, weights, BIASES[r], config)[:2]
    buffer.destroy()


WEIGHTS = [torch.rand(TOKENS, TOPK, generator=torch.Generator().manual_seed(rank)) for rank in range(RANKS)]
BIASES = [tuple(random_rows(TOKENS, device, 10 * rank + i) for i in (50, 51)) for rank, device in enumerate(DEVICES)]
synchronize_all()
outputs = outputs_of(GROUP, make_with_all)
wanted = [sums.to(DEVICES[rank]) for rank, sums in enumerate(inputs.sums_of(Y, RECEIVED, [TOKENS] * RANKS, BIASES))]
WITH_ALL = check([out for out, _ in outputs], wanted)
WEIGHTS_BACK = all(torch.equal(given.cpu(), sent) for (_, given), sent in zip(outputs, WEIGHTS))
print("two biases:", WITH_ALL or "correct to the last bit")
print("the returned weights have the bits that were sent:", WEIGHTS_BACK)
WITH_ALL_US = fact("with_all_us", median_of(make_with_all))
if WITH_ALL_US:
    print(f"with weights and two biases: {WITH_ALL_US:.0f} us; without: {us('final'):.0f} us, {WHEN}")
assert not WITH_ALL and WEIGHTS_BACK

# %% [markdown]
# **A property test.** If each rank returns the rows that it received, `combine(dispatch(x))` is exactly `x` times the
# number of the token's ranks, rounded once. This needs no reference, so it can be tested on any shape. Each handle is
# used twice.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def shapes():
    """Yield names and routings, with different numbers of tokens per rank."""
    few, some, many = max(1, TOKENS // 10), max(2, TOKENS // 3), TOKENS // (2 if simulator.ENABLED else 1)
    first, skewed = [many, *[few] * (RANKS - 1)], [some] * RANKS
    yield "unequal", inputs.random_routing(first, EXPERTS, TOPK, seed=1)
    yield "many -1", inputs.random_routing(first[::-1], EXPERTS, TOPK, seed=2, holes=0.8)
    yield "a rank without tokens", inputs.random_routing([0, *[some] * (RANKS - 1)], EXPERTS, TOPK, seed=3)
    yield "all to the last rank", [torch.full((n, 1), EXPERTS - 1) for n in skewed]


@contextmanager
def there_and_back(transport):
    r, device, config = transport.rank, transport.device, Config(HERE.num_sms, HERE.chunk, HERE.ring)
    buffer = Buffer(transport, config.get_nvl_buffer_size_hint(ROW_BYTES, RANKS), timeout=20.0)
    cases = [
        (name, *(tensor.to(device) for tensor in inputs.layouts_of(routing, EXPERTS)[r])) for name, routing in shapes()
    ]

    def call():
        found = []
        for name, per_rank, per_expert, is_in in cases:
            x = random_rows(len(is_in), device, 7)
            y, _, _, _, handle, _ = buffer.dispatch(
                x, num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=is_in, config=config
            )
            first, again = (buffer.combine(y, handle, config=config)[0] for _ in range(2))
            right = (x.float() * is_in.sum(dim=1, keepdim=True) + 0.0).bfloat16()  # an empty sum is 0, not -0
            found.append((name, *(bool(torch.equal(bits(first), bits(other))) for other in (right, again))))
        return found

    yield call
    buffer.destroy()


found = outputs_of(GROUP, there_and_back)
PROPERTY = {name: [all(rank[i][k] for rank in found) for k in (1, 2)] for i, (name, *_) in enumerate(found[0])}
for name, (right, same) in PROPERTY.items():
    print(
        f"{name}: {'correct' if right else 'WRONG'}; the second combine returns {'the same' if same else 'OTHER'} bits"
    )
assert all(all(results) for results in PROPERTY.values())

# %% [markdown]
# ## 8. Faults
#
# Three faults in our port of DeepEP's kernel, each under six seeds, in the simulator with weak memory:
#
# - **plain tail**: the tail is stored without release.
# - **no barrier**: the warps of a chunk do not synchronise before one of them publishes the tail.
# - **early head**: a reducing warp releases its rows before it has read them.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def faults(names):
    """Return {fault: the number of wrong tokens, of 15, under each of six seeds}."""
    chosen, found = [torch.ones(tokens, 2, dtype=torch.bool) for tokens in (8, 7)], {}
    handles, generator = inputs.handles_of(chosen, 1), torch.Generator().manual_seed(0)
    y = [torch.randn(len(h.recv_src_idx), 16, generator=generator).bfloat16() for h in handles]
    wanted = list(inputs.sums_of(y, inputs.received_by(chosen), [8, 7]))
    for name in names:
        c, wrong = DeepEPConfig(2, 1, 4, 2, 32, 0, 0, 2, 2, fault=name), []
        for seed in range(6):
            with simulate.virtual_ranks(2, min_buffer_bytes(combine=c)) as ranks:
                with simulator.seed(seed), simulator.weak_memory():
                    got = simulate.combine_all(ranks, c, y, handles)
            pairs = zip(got, wanted, strict=True)
            wrong.append(sum(int((a[0].view(torch.int16) != b.view(torch.int16)).any(1).sum()) for a, b in pairs))
        found[name] = wrong
    return found


FAULTS = in_simulator(faults, ["", *(name for name in deepep_combine.FAULTS if name != "short ring")])
for name, wrong in FAULTS.items():
    seeds = [seed for seed, tokens in enumerate(wrong) if tokens]
    result = f"wrong under seeds {seeds}; at most {max(wrong)} of 15 tokens" if seeds else "correct under all six seeds"
    print(f"{name or 'unchanged'}: {result}")

# %% [markdown]
# "early head" shows in the fewest tokens, and only if the sender overwrites a slot before a reducing warp has read it.
#
# **A rank that does not arrive.** Rank 1 does not call combine. Rank 0 aborts after the timeout, an argument of
# `Buffer`, and its next call raises the error. (DeepEP executes `trap` after 100 seconds, which makes the CUDA context
# unusable.)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def without_peer(timeout):
    """Return the error of a rank whose peer does not call combine."""
    chosen, errors = [torch.ones(4, 2, dtype=torch.bool)] * 2, []

    def work(transport):
        buffer, config = Buffer(transport, 1 << 16, timeout=timeout), Config(2, 1, 23)
        KEPT.append(buffer)
        counts = torch.full((2,), 4, dtype=torch.int32)
        y, _, _, _, handle, _ = buffer.dispatch(
            torch.ones(4, 16).bfloat16(),
            num_tokens_per_rank=counts,
            num_tokens_per_expert=counts.clone(),
            is_token_in_rank=chosen[transport.rank],
            config=config,
        )
        buffer.combine(y, handle, config=config)
        if transport.rank == 0:
            buffer.combine(y, handle, config=config)  # alone
            try:
                buffer.combine(y, handle, config=config)
            except TimeoutError as error:
                errors.append(str(error))

    LocalGroup(2).run(work)
    return errors


TIMEOUT_ERROR = in_simulator(without_peer, 0.004)
print(*TIMEOUT_ERROR)
assert TIMEOUT_ERROR

# %% jupyter={"source_hidden": true} tags=["hide-input"]
if TIMED:
    ladder.row("final").update({name: found for name, found in FACTS.items() if found})
ladder.save()

# %% [markdown]
# ## 9. Sources
#
# - [DeepEP](https://github.com/deepseek-ai/DeepEP), by DeepSeek: `cached_notify_combine` and `combine` in
#   `csrc/kernels/intranode.cu` of its first version, and `tests/test_intranode.py`, the origin of the property test.
# - BoLi2001, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), 2025, in Chinese.
# - NVIDIA, *PTX ISA*, "Memory Consistency Model".
# - Samuel A. Figueroa, "When is Double Rounding Innocuous?", *ACM SIGNUM Newsletter* 30 (3), 1995.
# - John D. C. Little, "A Proof for the Queuing Formula: L = λW", *Operations Research* 9 (3), 1961.
#
# ## The final kernel
#
# The kernel that `Buffer.combine` runs, and the module that sums the rows.

# %%
Markdown("```python\n" + inspect.getsource(final_kernel) + "\n```")

# %%
Markdown("```python\n" + inspect.getsource(reduce) + "\n```")
