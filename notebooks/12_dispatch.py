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
# # Dispatch: send token rows through ring buffers
#
# In **dispatch** each rank sends its rows (the hidden vectors of its tokens) to the ranks that have the tokens'
# experts. Notebook 13 returns the results.
#
# The notebook follows `notify_dispatch` and `dispatch` of the article
# [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824). It compares torch, NCCL, a naive
# kernel, our Numba port of DeepEP's rings, the package's rings, and direct writes.
#
# With fewer GPUs than ranks, the ranks are **virtual**: they share a GPU, or the simulator runs them. Every step is
# then executed and checked, but not timed; recorded times are shown and labelled. "DeepEP's ring" is our port.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import inspect
import textwrap
import warnings
from contextlib import contextmanager
from functools import cache

import torch
from IPython.display import HTML, Markdown
from numba import cuda, int32, uint32, uint64

from moe_numba import simulator
from moe_numba.course.bench import Stats, records
from moe_numba.course.bench.baselines.nccl_all_to_all import all_to_all_counts, all_to_all_rows, played
from moe_numba.course.bench.figures import plots
from moe_numba.course.bench.timing.multigpu import can_time, host_times, outputs_of, rank_times, settle
from moe_numba.course.bench.topics.dispatch_combine import measure as dispatch_combine_measure
from moe_numba.course.bench.topics.dispatch_layout import uniform_routing
from moe_numba.course.deepep_port import dispatch as deepep_dispatch
from moe_numba.course.deepep_port import launch as deepep_launch
from moe_numba.course.deepep_port import notify as deepep_notify
from moe_numba.course.deepep_port import polling, simulate
from moe_numba.course.deepep_port.buffer_layout import SIGNALS_BYTES, DeepEPConfig, min_buffer_bytes
from moe_numba.course.deepep_port.simulate import RankTimeoutError, dispatch_all, virtual_ranks
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.ring_buffer_dispatch import draw
from moe_numba.course.lessons.ring_buffer_dispatch.draw_ring_trace import play
from moe_numba.course.pages.sizes import dispatch_sizes
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.prediction import Judgement
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.expert_parallel import reference
from moe_numba.expert_parallel.buffer import Buffer
from moe_numba.expert_parallel.ranks.local_group import LocalGroup
from moe_numba.expert_parallel.rings import dispatch as final_kernel
from moe_numba.expert_parallel.rings import dispatch_direct, notify, progress, token_slot
from moe_numba.expert_parallel.rings.channels import next_channel
from moe_numba.expert_parallel.rings.config import Config, num_direct_senders
from moe_numba.ptx.atomics import (
    ld_acquire_sys_s32,
    ld_relaxed_sys_s32,  # noqa: F401  by its name
    st_relaxed_sys_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.cp_async import (
    bulk_commit_group,
    bulk_load,
    bulk_store,
    make_bulk_wait_group,
    make_bulk_wait_group_read,
)
from moe_numba.ptx.fence import fence_acq_rel_sys, fence_proxy_async, fence_proxy_async_shared
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive_expect_tx, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import ld_nc_na_s32x4, pointer_from_address, st_na_s32x4
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.quantise.fp8_cast import per_token_cast_back, per_token_cast_to_fp8
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # most of these kernels have few CTAs on purpose
HERE = dispatch_sizes()  # DeepSeek-V3's rows on GPUs, a few short ones in the simulator
RANKS, EXPERTS, TOPK, TOKENS, HIDDEN, SMS = (
    HERE.ranks,
    HERE.num_experts,
    HERE.topk,
    HERE.tokens,
    HERE.hidden,
    HERE.sms,
)
ROW_BYTES = 2 * HIDDEN
GROUP = LocalGroup(RANKS, HERE.devices)  # ranks that are threads of this process
PAIR = LocalGroup(2, HERE.devices and HERE.devices[:2])
TIMED = can_time(GROUP)
print(
    f"{RANKS} ranks on {', '.join(str(device) for device in GROUP.devices)};",
    "timed" if TIMED else "virtual ranks: nothing is timed",
)

# %% [markdown]
# `LocalGroup` runs one thread per rank in this process, each with a **transport**. It has the `rank`, `gather` (returns
# the values of all ranks), and `allocate`, which returns memory that all ranks can access, with its `addresses`.
#
# ## 1. The problem in one figure
#
# Two ranks have eight tokens each:

# %%
EXAMPLE = [
    [[1, 0], [0, 1], [0, 1], [1, 1], [1, 0], [0, 1], [1, 1], [0, 1]],
    [[0, 1], [1, 0], [1, 1], [1, 0], [0, 1], [1, 0], [1, 0], [1, 1]],
]  # is_token_in_rank of rank 0, and of rank 1
CHANNELS = 4
draw.row_order(EXAMPLE, CHANNELS)

# %% [markdown]
# `recv_x` is ordered by source **rank**, then **channel**, then token. A channel is a contiguous range of a rank's
# tokens that is sent as one stream, in parallel with the others.
#
# A receiver needs three numbers before it can place a row in `recv_x`:
#
# 1. the total number of rows, with which the host allocates `recv_x`;
# 2. the number of rows from lower ranks;
# 3. the number of rows from the same rank in lower channels.
#
# Each sender has only its own counts. Therefore **notify** exchanges counts, and then **dispatch** sends rows. The
# counts are kept in a **handle**. A second dispatch with the same layout (for example in the backward pass) passes the
# handle and skips notify.
#
# ### The reference
#
# The reference takes the tensors of all ranks:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def show(thing, start=None, stop=None):
    """Return a function's source, or the part from the line with ``start`` up to the line with ``stop``."""
    lines = inspect.getsource(inspect.unwrap(getattr(thing, "py_func", thing))).splitlines()
    first = next(i for i, line in enumerate(lines) if start in line) if start else 0
    last = next((i for i, line in enumerate(lines) if stop and i > first and stop in line), len(lines))
    return Markdown("```python\n" + textwrap.dedent("\n".join(lines[first:last])).strip("\n") + "\n```")


show(reference.dispatch, "ranks = len(x)")

# %% [markdown]
# Dispatch also sends metadata: `src_idx`, the token's index on its source rank; `topk_idx`, its experts as indices of
# the receiver's local experts, or -1; `topk_weights`; and scales. The steps below send the rows and `src_idx`.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
torch.manual_seed(0)
IDS = [uniform_routing(TOKENS, EXPERTS, TOPK, device) for device in GROUP.devices]
LAYOUTS = [reference.dispatch_layout(ids, RANKS, EXPERTS) for ids in IDS]
X = [torch.randn(TOKENS, HIDDEN, device=device).bfloat16() for device in GROUP.devices]
OTHER = [x.roll(1, dims=0) for x in X]  # rows of a first call, so that old results cannot pass the check
HOME = GROUP.devices[0]
WANT = reference.dispatch([x.to(HOME) for x in X], [layout[2].to(HOME) for layout in LAYOUTS])
ROWS = [len(want.src_idx) for want in WANT]  # that each rank receives


def bits(tensor):
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype)


def check(outputs):
    """Return None, or a sentence that describes the error; outputs are (recv_x, src_idx) of each rank."""
    for rank, ((recv_x, src_idx), want) in enumerate(zip(outputs, WANT, strict=True)):
        for name, given, right in (("src_idx", src_idx, want.src_idx), ("recv_x", recv_x, want.x)):
            if given.shape != right.shape or given.dtype != right.dtype:
                return f"{name} of rank {rank} is {given.dtype} {tuple(given.shape)}, not {tuple(right.shape)}"
            differ = (bits(given.to(HOME)) != bits(right)).view(len(right), -1).any(dim=1)
            if differ.any():
                return (
                    f"{name} of rank {rank}: {int(differ.sum())} of {len(right)} rows are wrong, "
                    f"the first is row {int(differ.nonzero()[0])}"
                )
    return None


print("the reference:", check([(want.x, want.src_idx) for want in WANT]))
wrong = WANT[1].x.clone()
wrong[[0, 1]] = wrong[[1, 0]]
print(
    "two rows exchanged:",
    check([(WANT[0].x, WANT[0].src_idx), (wrong, WANT[1].src_idx), *((want.x, want.src_idx) for want in WANT[2:])]),
)

# %% [markdown]
# ## 2. The lower bound
#
# The bytes of rows that leave their rank are the **wire bytes**. Published bandwidths often count all rows ("logical"
# bytes), and can then exceed the link's. The lower bound is the wire bytes divided by the highest rate measured below;
# figures call it "speed of light".

# %%
SENT = [[int(layout[0][to]) for to in range(RANKS)] for layout in LAYOUTS]  # rows from each rank to each rank
WIRE_ROWS = max(sum(row) - row[rank] for rank, row in enumerate(SENT))
WIRE_BYTES, ALL_BYTES = WIRE_ROWS * ROW_BYTES, max(map(sum, SENT)) * ROW_BYTES
print(
    f"{TOKENS} tokens of {ROW_BYTES} bytes: {ALL_BYTES / 1e6:.4g} MB leave a rank, {WIRE_BYTES / 1e6:.4g} MB of them "
    f"over its link: {100 * WIRE_BYTES / ALL_BYTES:.0f} %"
)

# %% [markdown]
# The next cell measures the rate at which kernels write to the next rank's memory, all ranks at the same time:
#
# - **stores** of 16 bytes, by all threads of a number of CTAs;
# - **bulk copies** (TMA, notebook 06): one thread per warp copies a whole row from shared memory to the peer, once from
#   shared memory alone, and once after a bulk load of the row from local memory, as in dispatch.
#
# A thread does not wait for its stores to complete, so the rate at which an SM issues stores should limit a CTA, and a
# few CTAs should saturate the link.

# %%
FLAGS, PAYLOAD = 32, 64  # offsets of the small kernels' flags and data, in words
copied, sent = make_bulk_wait_group(0), make_bulk_wait_group_read(0)


@cuda.jit
def push_stores(peers, local, to, vectors):
    remote = pointer_from_address(peers[to], local)
    for i in range(cuda.grid(1), vectors, cuda.gridsize(1)):
        k = int32(i)
        st_na_s32x4(remote, 4 * i, k, k, k, k)


@cache
def make_push_bulk(row_words, warps, with_loads):
    bar = warps * row_words // 2  # mbarriers lie after the rows; in words of 8 bytes

    @cuda.jit
    def push_bulk(peers, local, x, to, rows):
        smem, bars = cuda.shared.array(0, int32, 128), cuda.shared.array(0, uint64, 128)
        thread, parity = int32(cuda.threadIdx.x), uint32(0)
        warp, lane, remote = thread // 32, thread % 32, pointer_from_address(peers[to], local)
        stage = int32(warp * row_words)
        for i in range(lane, row_words, 32):
            smem[int32(stage + i)] = int32(7)
        if lane == 0:
            mbarrier_init(bars, bar + warp, 1)
            fence_mbarrier_init()
        fence_proxy_async_shared()
        cuda.syncthreads()
        if lane == 0:
            for row in range(cuda.blockIdx.x * warps + warp, rows, cuda.gridDim.x * warps):
                if with_loads:
                    sent()  # the store of the previous row has read shared memory
                    mbarrier_arrive_expect_tx(bars, bar + warp, 4 * row_words)
                    bulk_load(smem, stage, x, row * row_words, 4 * row_words, bars, bar + warp)
                    mbarrier_wait_parity(bars, bar + warp, parity)
                    parity = uint32(parity ^ uint32(1))
                bulk_store(remote, row * row_words, smem, stage, 4 * row_words)
                bulk_commit_group()
            copied()

    return push_bulk


# %% [markdown]
# Each rank queues its kernels behind a small kernel that spins until all ranks have queued theirs. Events on each
# rank's stream measure the time, and the slowest rank counts.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ladder = Ladder(
    "ring_buffer_dispatch_ladder",
    check,
    title=f"Dispatch, step by step: {TOKENS} tokens per rank, {RANKS} ranks, rows of {ROW_BYTES} bytes",
    reference_name="torch",
    config={"num_experts": EXPERTS, "topk": TOPK, "ranks": RANKS},
    size={"tokens": TOKENS, "hidden": HIDDEN},
    untimed=None if TIMED else "virtual ranks",
)
us = ladder.median_us  # a step's median time, measured now or recorded
RECORDED = {} if TIMED else ladder.row("final") or {}
if RECORDED:
    size = RECORDED["size"]
    ladder.title = (
        f"Dispatch, step by step: {size['tokens']} tokens per rank, {RECORDED['config']['ranks']} ranks, "
        f"rows of {2 * size['hidden']} bytes"
    )
FACTS = {}  # other measurements; the record's row of the step "final" keeps them


def fact(name, measured):
    """Keep and return a measurement, or what is recorded of it."""
    FACTS[name] = measured if TIMED else RECORDED.get(name) or {}
    if FACTS[name] and not TIMED:
        print("not measured here; recorded:")
    return FACTS[name]


METHODS = ("stores", "bulk copies", "bulk copies after bulk loads")


def push(method, ctas):
    """Return a step in which each rank writes rows into the next one's memory."""
    with_loads = method == METHODS[2]
    row_words, warps = ROW_BYTES // 4, HERE.push_warps
    kernel = push_stores if method == METHODS[0] else make_push_bulk(row_words, warps, with_loads)

    @contextmanager
    def make(transport):
        start, to = transport.launch, (transport.rank + 1) % transport.num_ranks
        shared = transport.allocate(HERE.push_rows * ROW_BYTES)
        local = shared.local.view(torch.int32)
        x = torch.arange(len(local), dtype=torch.int32, device=transport.device)

        def step():
            if method == METHODS[0]:
                vectors = len(local) // 4
                start(kernel, ctas, HERE.threads, shared.addresses, local, to, vectors, launch_bounds=HERE.threads)
            else:
                start(
                    kernel,
                    ctas,
                    32 * warps,
                    shared.addresses,
                    local,
                    x,
                    to,
                    HERE.push_rows,
                    shared_bytes=warps * (ROW_BYTES + 8),
                    launch_bounds=32 * warps,
                )
            return local

        yield step
        settle(transport)
        index = torch.arange(len(local), dtype=torch.int32, device=transport.device)
        right = {METHODS[0]: index // 4, METHODS[1]: torch.full_like(index, 7), METHODS[2]: index}[method]
        assert torch.equal(local, right), f"{method}: not all rows have arrived"
        shared.close()

    return make


PUSHES = {f"{method}: {ctas}": push(method, ctas) for method in METHODS for ctas in HERE.push_blocks}
times = rank_times(GROUP, PUSHES, launches=HERE.launches, samples=HERE.samples)
PUSH = fact(
    "push_gbps",
    {name: round(HERE.push_rows * ROW_BYTES / stats.median / 1e3, 1) for name, stats in times.items() if stats},
)
for method in METHODS:
    rates = {name.split(": ")[1]: rate for name, rate in PUSH.items() if name.split(": ")[0] == method}
    print(
        f"{method}, GB/s by the number of CTAs:",
        ", ".join(f"{ctas}: {rate:.0f}" for ctas, rate in rates.items()) or "checked; no rates are recorded yet",
    )
PEAK = max(PUSH.values(), default=0) * 1e9 or None  # bytes per second
DATA_SHEET = 450  # GB/s each way, of an H200's NVLink
if PEAK:
    print(f"the fastest: {PEAK / 1e9:.0f} GB/s, {100 * PEAK / 1e9 / DATA_SHEET:.0f} % of the data sheet's {DATA_SHEET}")
FLOOR_US = WIRE_BYTES / PEAK * 1e6 if TIMED else RECORDED.get("floor_us")
if TIMED:
    print(f"the lower bound for {WIRE_BYTES / 1e6:.1f} MB: {FLOOR_US:.0f} us")

# %% [markdown]
# One SM reaches a fraction of the link's bandwidth, somewhat less with bulk loads, so several SMs must send. Our port
# of DeepEP's kernel gets 24 SMs: half send and half receive.
#
# **Exercise 1.** Each rank sends its rows to all `ranks` ranks, itself included, in equal numbers. A sending CTA copies
# `cta_gbps` GB/s, own rows included, and a link carries `link_gbps`. Write a function that returns the smallest number
# of sending CTAs that saturates the link.

# %%
ctas_that_saturate = ...  # your answer: lambda ranks, cta_gbps, link_gbps: ...
exercise("ring_buffer_dispatch-1").check(ctas_that_saturate)

# %% [markdown]
# ## 3. The first store to a peer
#
# Rank 0 stores a message in rank 1's memory and then sets a **flag**. Rank 1 polls the flag, then reads the message. A
# store with **release** semantics makes everything visible first that the thread has stored, or has observed from other
# threads. A load with **acquire** semantics completes before the loads that follow it. The scope `sys` covers all GPUs.
# The barrier before the release (`syncthreads`) extends it to the stores of the CTA's other threads.


# %%
@cache
def make_message(store, load):
    @cuda.jit
    def message(peers, local, out, rank, number):
        thread = int32(cuda.threadIdx.x)
        if rank == 0:
            remote = pointer_from_address(peers[1], local)
            remote[PAYLOAD + thread] = int32(number + thread)
            cuda.syncthreads()
            if thread == 0:
                store(remote, FLAGS, number)
        else:
            if thread == 0:
                while load(local, FLAGS) != number:
                    pass
            cuda.syncthreads()
            out[thread] = local[PAYLOAD + thread]

    return message


message = make_message(st_release_sys_s32, ld_acquire_sys_s32)


@contextmanager
def send_message(transport):
    start, shared = transport.launch, transport.allocate(1024)
    local, out = shared.local.view(torch.int32), torch.zeros(64, dtype=torch.int32, device=transport.device)

    def step(number=100):
        start(message, 1, 64, shared.addresses, local, out, transport.rank, number)
        return out

    yield step
    shared.close()


got = outputs_of(PAIR, send_message)[1]
print("rank 1 read", got[:8].tolist(), "...")
assert got.tolist() == list(range(100, 164))

# %% [markdown]
# The one-way latency follows from a ping-pong: each rank waits for the other's flag and replies.


# %%
@cuda.jit
def ping_pong(peers, local, rank, rounds, before):
    remote = pointer_from_address(peers[1 - rank], local)
    for i in range(rounds):
        number = int32(before + i + 1)
        if rank == 0:
            st_release_sys_s32(remote, FLAGS, number)
        while ld_acquire_sys_s32(local, FLAGS) < number:
            pass
        if rank == 1:
            st_release_sys_s32(remote, FLAGS, number)


@contextmanager
def play_ping_pong(transport):
    start, shared, played = transport.launch, transport.allocate(1024), [0]
    local = shared.local.view(torch.int32)

    def step():
        start(ping_pong, 1, 1, shared.addresses, local, transport.rank, HERE.rounds, played[0])
        played[0] += HERE.rounds
        return local

    yield step
    assert int(local[FLAGS]) == played[0]
    shared.close()


stats = rank_times(PAIR, {"ping-pong": play_ping_pong}, launches=2, samples=HERE.samples)["ping-pong"]
FLAG = fact("flag", stats and {"us": round(stats.median / HERE.rounds / 2, 3)})
print(
    f"a flag takes {FLAG['us']:.2f} us from one GPU to the other"
    if FLAG
    else "the ping-pong ran; no time is recorded yet"
)

# %% [markdown]
# A request to another rank costs a round trip, twice this latency. A dispatch kernel must issue few requests, or have
# other work meanwhile.
#
# **Weaker memory orders.** In the simulator's **weak memory model** stores become visible to other ranks late and in
# any order, unless an instruction orders them; a seed determines the order. The next cell runs the kernel with a
# relaxed store, and with a relaxed load.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
BY_NAME = "from moe_numba.ptx.atomics import *"  # `PAIRS` names them by strings


def try_messages(pairs, seeds):
    """Return for each pair of a store and a load the number of runs in which rank 1 read other data than rank 0 sent."""
    return [
        sum(is_torn(make_message(globals()[store], globals()[load]), n) for n in range(seeds)) for store, load in pairs
    ]


def is_torn(kernel, number):
    buffers = [torch.zeros(256, dtype=torch.int32) for _ in range(2)]
    named = [simulator.register(buffer, f"the buffer of rank {r}") for r, buffer in enumerate(buffers)]
    peers, out = torch.tensor(named, dtype=torch.uint64), torch.zeros(64, dtype=torch.int32)
    with simulator.seed(number), simulator.weak_memory(), simulator.together():
        for rank in (0, 1):
            with simulator.on_rank(rank):
                launch(kernel, 1, 64, peers, buffers[rank], out, rank, 100)
    for address in named:
        simulator.forget(address)
    return out.tolist() != list(range(100, 164))


SEEDS = 12
PAIRS = [
    ["st_release_sys_s32", "ld_acquire_sys_s32"],
    ["st_relaxed_sys_s32", "ld_acquire_sys_s32"],
    ["st_release_sys_s32", "ld_relaxed_sys_s32"],
]
for pair, torn in zip(PAIRS, in_simulator(try_messages, PAIRS, SEEDS, setup=BY_NAME)):
    print(f"{', '.join(pair)}: the message was torn under {torn} of {SEEDS} seeds")

# %% [markdown]
# ## 4. The ladder: torch, NCCL, and a naive kernel
#
# A step is a context manager `make(transport)` that allocates, yields the function to call, and frees the memory. It is
# checked before it is timed, after a call with different rows, so that old results in a buffer cannot pass. The counts
# are known, as with a handle. Each step predicts what it saves over an earlier one; both are timed interleaved.
# `rate_of(method, ctas)` returns a rate of section 2.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
STEPS = {}


def poisoned(make):
    """Wrap a step for its check: it runs on other rows first, and memory that it may allocate is filled with NaN."""

    @contextmanager
    def checked(transport):
        rows = ROWS[transport.rank]

        def run():
            step(OTHER[transport.rank])
            settle(transport)
            stale = [
                torch.full((rows, HIDDEN), float("nan"), dtype=torch.bfloat16, device=transport.device),
                torch.full((rows,), -7, dtype=torch.int32, device=transport.device),
            ]
            del stale
            outputs = step(X[transport.rank])
            settle(transport)
            return tuple(tensor.clone() for tensor in outputs)

        with make(transport) as step:
            yield run

    return checked


def measure(name, make, after=None, predicted_gain_us=None, **more):
    """Check a step on all ranks and time it, interleaved with the step ``after``."""
    STEPS[name] = make
    compared = {step: STEPS[step] for step in (after, name) if step}
    ladder.step(
        name,
        lambda: outputs_of(GROUP, poisoned(make)),
        dtype="bfloat16",
        operation="dispatch",
        after=after,
        predicted_gain_us=predicted_gain_us,
        floor_us=FLOOR_US,
        bytes=WIRE_BYTES,
        kernel=lambda: rank_times(GROUP, compared, launches=HERE.launches, samples=HERE.samples),
        **more,
    )
    if TIMED:
        ladder.row(name)["wire_gbps"] = round(WIRE_BYTES / us(name) / 1e3, 1)
    print_rates(name)


FACTS["wire_share"] = round(WIRE_BYTES / ALL_BYTES, 4)
WIRE_SHARE = FACTS["wire_share"] if TIMED else RECORDED.get("wire_share")


def print_rates(name):
    if rate := us(name, "wire_gbps"):
        sms = us(name, "num_sms")
        per_sm = (
            f"; {rate / WIRE_SHARE / sms:.0f} GB/s per SM of {sms}, own rows included" if WIRE_SHARE and sms else ""
        )
        print(f"    {rate:.0f} GB/s over each rank's link{per_sm}")


def rate_of(method, ctas):
    """Return the bytes per second of a method of section 2 with the nearest number of CTAs; infinite if not known."""
    known = {int(name.split(": ")[1]): rate for name, rate in PUSH.items() if name.split(": ")[0] == method}
    return 1e9 * known[min(known, key=lambda n: abs(n - ctas))] if known else float("inf")


def limit_us(method, senders, copied_bytes):
    """Return the time of ``senders`` CTAs that copy ``copied_bytes``, of which the wire bytes pass through the link."""
    return max(copied_bytes / (senders * rate_of(method, 1)), WIRE_BYTES / rate_of(method, senders)) * 1e6


# %% [markdown]
# ### Step 0: torch
#
# **Idea.** Each rank gathers the rows for each peer (`index_select`) and copies them to their place in the peer's
# `recv_x`: the data movement of an *all-to-all*. When the barrier kernel of all ranks (`wait_for_all`) ends, all rows have
# arrived. Copies between GPUs run on copy engines and use no SMs.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def wait_for_all(peers, local, rank, ranks, number):
    """Barrier of all ranks: each stores a sequence number in each peer's memory and waits for those of all peers."""
    thread = int32(cuda.threadIdx.x)
    if thread < ranks:
        st_release_sys_s32(pointer_from_address(peers[thread], local), FLAGS + rank, number)
        while ld_acquire_sys_s32(local, FLAGS + thread) < number:
            pass


def make_barrier(transport, start):
    """Return the barrier's memory, and a function that launches `wait_for_all`."""
    shared, times = transport.allocate(1024), [0]
    local = shared.local.view(torch.int32)

    def barrier():
        times[0] += 1
        start(wait_for_all, 1, 32, shared.addresses, local, transport.rank, transport.num_ranks, times[0])

    return shared, barrier


PREFIX = WANT[0].rank_prefix_matrix.tolist()  # (i, j): rows that rank j gets from ranks 0 to i


def first_row(source, rank):
    """Return where a source's rows begin in a rank's recv_x."""
    return PREFIX[source - 1][rank] if source else 0


@contextmanager
def torch_dispatch(transport):
    rank, device = transport.rank, transport.device
    recv_x = torch.full((ROWS[rank], HIDDEN), float("nan"), dtype=torch.bfloat16, device=device)
    src_idx = torch.full((ROWS[rank],), -7, dtype=torch.int32, device=device)
    everywhere = transport.gather((recv_x, src_idx))  # one process: the peers' tensors themselves
    chosen = [LAYOUTS[rank][2][:, to].nonzero().flatten() for to in range(RANKS)]
    shared, barrier = make_barrier(transport, transport.launch)

    def step(x=X[rank]):
        for to, tokens in enumerate(chosen):
            rows = slice(first_row(rank, to), first_row(rank, to) + len(tokens))
            everywhere[to][0][rows].copy_(x.index_select(0, tokens), non_blocking=True)
            everywhere[to][1][rows].copy_(tokens.int(), non_blocking=True)
        barrier()
        return recv_x, src_idx

    yield step
    settle(transport)
    shared.close()


measure("torch", torch_dispatch)

# %% [markdown]
# ### Step 1: NCCL
#
# **Idea.** A rank exchanges its counts, waits on the host for the sizes, gathers its rows, and calls
# `torch.distributed.all_to_all_single`. Here the counts are known. NCCL needs one process per rank, so the functions
# take the collective as an argument, `all_to_all`. The check here emulates it; the timing runs NCCL in separate
# processes, on tokens drawn from the same distribution.
#
# **Predicted gain.** None: NCCL runs in other processes, so its time cannot be interleaved with that of another step.

# %%
show(all_to_all_counts)

# %%
show(all_to_all_rows)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
BY_NCCL = "index_select and NCCL"


@contextmanager
def by_all_to_all(transport):
    exchange = played(transport)
    receives, sends, order = known = all_to_all_counts(LAYOUTS[transport.rank][2], exchange)
    src_idx = torch.full((sum(receives),), -7, dtype=torch.int32, device=transport.device)
    exchange(src_idx, order.int(), receives, sends)  # once, as the counts
    yield lambda x=X[transport.rank]: (all_to_all_rows(x, *known, exchange), src_idx)


def nccl_time():
    """Time NCCL in processes of its own, and keep the rows of all three variants."""
    assert (dispatch_combine_measure.TOKENS, dispatch_combine_measure.HIDDEN, dispatch_combine_measure.TOPK) == (
        TOKENS,
        HIDDEN,
        TOPK,
    ), "other sizes"
    NCCL_ROWS.update({row["step"]: row for row in dispatch_combine_measure.measure([RANKS], parts=["nccl"])})
    return Stats(**NCCL_ROWS[BY_NCCL]["kernel_us"])


NCCL_ROWS = {}
ladder.step(
    BY_NCCL,
    lambda: outputs_of(GROUP, poisoned(by_all_to_all)),
    dtype="bfloat16",
    operation="dispatch",
    floor_us=FLOOR_US,
    kernel=nccl_time,
)
if TIMED:
    ladder.row(BY_NCCL).update({key: NCCL_ROWS[BY_NCCL][key] for key in ("bytes", "wire_gbps")})
NCCL = fact(
    "nccl", {name: {"us": row["kernel_us"]["median"], "gbps": row["wire_gbps"]} for name, row in NCCL_ROWS.items()}
)
for name, known in NCCL.items():
    print(f"{name}: {known['us']:.0f} us, {known['gbps']:.0f} GB/s over each rank's link")

# %% [markdown]
# The lines are the exchange of rows that are already in order, the same with `index_select`, and
# everything that a first dispatch needs. The last one synchronises the host with the GPU twice: for the length of
# `order` and for the counts.
#
# ### Step 2: a naive dispatch
#
# **Idea.** If a rank has the row index of each of its rows in each peer's `recv_x`, a warp per token can load the row
# once and store it to all destinations. This requires the counts of all ranks: here the host gathers them and computes
# `place[token, rank]`. In the folded kernel `make_naive` each lane loads four vectors into `words`, then stores them to
# every rank `r` whose `place` is not -1.
#
# **Predicted gain.** Torch's time, less that of the wire bytes at the rate of the stores of section 2 with many CTAs.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_naive(ranks, row_bytes, src_idx_at):
    vectors, row_words = row_bytes // 16, row_bytes // 4

    @cuda.jit
    def naive(x, place, peers, local, tokens):
        words = cuda.local.array(16, int32)
        lane, warps = int32(cuda.threadIdx.x & 31), cuda.gridsize(1) // 32
        for token in range(cuda.grid(1) // 32, tokens, warps):
            for first in range(lane, vectors, 128):
                for k in range(4):
                    if first + 32 * k < vectors:
                        a, b, c, d = ld_nc_na_s32x4(x, token * row_words + 4 * (first + 32 * k))
                        words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = a, b, c, d
                for r in range(ranks):
                    to = place[token * ranks + r]
                    if to >= 0:
                        remote = pointer_from_address(peers[r], local)
                        for k in range(4):
                            if first + 32 * k < vectors:
                                a, b, c, d = words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]
                                st_na_s32x4(remote, to * row_words + 4 * (first + 32 * k), a, b, c, d)
            if lane < ranks:
                to = place[token * ranks + lane]
                if to >= 0:
                    pointer_from_address(peers[lane], local)[src_idx_at + to] = int32(token)

    return naive


def places(rank, prefix):
    """Return for each token and rank the token's row in that rank's recv_x, or -1; int64."""
    chosen = LAYOUTS[rank][2]
    before = torch.tensor([prefix[rank - 1][to] if rank else 0 for to in range(RANKS)], device=chosen.device)
    return (chosen.cumsum(dim=0) - 1 + before).where(chosen, -1).contiguous()


def naive_dispatch(ctas, with_counts=False):
    """Return the step; ``with_counts``: the host fetches and exchanges the counts in each call."""
    src_idx_at = RANKS * TOKENS * ROW_BYTES // 4  # recv_x has the capacity for all tokens of all ranks
    kernel = make_naive(RANKS, ROW_BYTES, src_idx_at)

    @contextmanager
    def make(transport):
        rank, start = transport.rank, transport.launch
        shared = transport.allocate(RANKS * TOKENS * (ROW_BYTES + 4))
        local = shared.local.view(torch.int32)
        local.fill_(-7)
        settle(transport)
        flags, barrier = make_barrier(transport, start)
        known = places(rank, PREFIX)

        def step(x=X[rank]):
            place = known
            if with_counts:
                counts = transport.gather(LAYOUTS[rank][2].sum(dim=0).tolist())  # tolist waits for the GPU
                place = places(rank, torch.tensor(counts).cumsum(dim=0).tolist())
            start(
                kernel,
                ctas,
                HERE.threads,
                x.view(torch.int32),
                place,
                shared.addresses,
                local,
                TOKENS,
                launch_bounds=HERE.threads,
            )
            barrier()
            rows = local[: ROWS[rank] * ROW_BYTES // 4].view(torch.bfloat16).view(ROWS[rank], HIDDEN)
            return rows, local[src_idx_at : src_idx_at + ROWS[rank]]

        yield step
        settle(transport)
        flags.close()
        shared.close()

    return make


ALL_SMS = 2 if simulator.ENABLED else torch.cuda.get_device_properties(HOME).multi_processor_count
gain_us = (us("torch") or 0) - WIRE_BYTES / rate_of(METHODS[0], 48) * 1e6
measure("naive, all SMs", naive_dispatch(ALL_SMS), after="torch", predicted_gain_us=gain_us, num_sms=ALL_SMS)

# %% [markdown]
# The kernel writes each row once, directly to its place, and nearly reaches the lower bound. But it uses all SMs, and the
# host must wait for the counts.
#
# **The same kernel with few SMs.** A server computes while tokens are sent, so most SMs should stay free.
#
# **Predicted gain.** Negative: the difference between the rates of section 2 with many CTAs and with as many as now.

# %%
FEW = "naive, few SMs"
gain_us = (WIRE_BYTES / rate_of(METHODS[0], 48) - WIRE_BYTES / rate_of(METHODS[0], SMS)) * 1e6
measure(FEW, naive_dispatch(SMS), after="naive, all SMs", predicted_gain_us=gain_us, num_sms=SMS)

# %% [markdown]
# **Explanation.** The kernel loses more than predicted. The stores of section 2 write constants; this kernel
# must also load each row, copy the rows that stay on their rank, and wait for a barrier kernel.
#
# ## 5. DeepEP's kernels: `notify_dispatch`
#
# Our Numba ports are in `moe_numba/course/articles/deepep`; excerpts follow. DeepEP requests a **cooperative** launch:
# all CTAs are resident at the same time, because they wait for CTAs of other ranks.
#
# `notify_dispatch` has `1 + ranks` CTAs. CTA 0, the **coordinator**, exchanges counts. CTA `1 + r`, a **worker**,
# counts the tokens for rank `r` and fills its row of `channel_prefix_matrix`: each warp takes channels, its lanes take
# tokens, and a warp reduction sums the counts. Then one thread computes the prefix sum of the row.

# %%
show(deepep_notify.make_notify_dispatch, "def count_channels", "@cuda.jit")

# %%
show(polling.make_channel_range, "def channel_range", "return channel_range")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
many, sms, warps = 10000, 100, 128 // 32  # the article's example
share = -(-many // (sms // 2))
print(
    f"{many} tokens, {sms} SMs: {sms // 2} channels of {share} tokens. The {warps} warps of a worker take "
    f"{-(-(sms // 2) // warps)} channels each at most, and a lane {-(-share // 32)} tokens of a channel."
)

# %% [markdown]
# **The coordinator** executes three barriers with the other ranks. After the first, no rank uses the buffer any more.
# Thread `r` then writes this rank's counts to rank `r`'s buffer. After the second, all ranks have written.

# %%
show(deepep_notify.make_notify_dispatch, "arrived = barrier_block(signals", "local = pointer")

# %% [markdown]
# Thread `j` computes the prefix sum of column `j`. This yields `rank_prefix_matrix`: entry `(i, j)` is the number of
# rows that rank `j` receives from ranks 0 to `i`. The total for this rank, and the sums for each local expert, rounded
# up to a multiple of `expert_alignment`, go to counters in mapped host memory. Then the coordinator clears the memory
# of the expert counts, which the flags of the queues reuse. After the third barrier, the flags are zero on all ranks.

# %%
show(deepep_notify.make_notify_dispatch, "local = pointer", "@cuda.jit")

# %% [markdown]
# **The barrier** (`barrier_block`) needs no sequence numbers and no clearing. A rank adds 1024 to its own signal for
# each peer, and subtracts 1024 from its signal at that peer. In any order of arrival, both return to zero.

# %%
show(deepep_notify.make_barrier, "def barrier_block", "return barrier_block")

# %% [markdown]
# **The host polls** the counters, which start at -1, and then allocates the outputs. With a handle,
# `cached_notify_dispatch` runs instead: it copies the prefix matrix, clears the flags, and executes two barriers.
#
# The matrices for the example of section 1, from the simulator:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
PLAYED = in_simulator(play, EXAMPLE, 4, 2, CHANNELS)
COLUMNS = "| | " + " | ".join(f"channel {c}" for c in range(CHANNELS)) + " |\n|---|" + "---:|" * CHANNELS
tables = []
for rank, matrices in enumerate(PLAYED["matrices"]):
    lines = [
        f"| to rank {to} | {' | '.join(map(str, row))} |" for to, row in enumerate(matrices["channel_prefix_matrix"])
    ]
    tables.append(f"`channel_prefix_matrix` of rank {rank}:\n\n{COLUMNS}\n" + "\n".join(lines))
prefix = PLAYED["matrices"][0]["rank_prefix_matrix"]
lines = [f"| from ranks 0 to {i} | {' | '.join(map(str, row))} |" for i, row in enumerate(prefix)]
tables.append(
    "`rank_prefix_matrix`, the same on both:\n\n| | rank 0 gets | rank 1 gets |\n|---|---:|---:|\n" + "\n".join(lines)
)
Markdown("\n\n".join(tables))

# %% [markdown]
# The exchange of expert counts for two ranks with two experts each, rounded up to multiples of 4:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def try_notify(ids, alignment):
    """Return what each rank counted, and what each rank's host reads after notify_dispatch."""
    ids = [torch.tensor(rows) for rows in ids]
    layouts = [reference.dispatch_layout(rows, 2, 4) for rows in ids]
    c = DeepEPConfig(2, 2, 2, 2, 32, 2, 0, 4, 1)
    with virtual_ranks(2, min_buffer_bytes(c)) as ranks, simulator.seed(0), simulator.weak_memory():
        found = simulate.notify_all(ranks, c, [layout[2] for layout in layouts], ids, alignment)
    counted = [[layout[0].tolist(), layout[1].tolist()] for layout in layouts]
    return counted, [[int(counter), per_expert.tolist()] for _, _, counter, per_expert in found]


FEW_IDS = [uniform_routing(5, 4, 2, "cpu").tolist() for _ in range(2)]
COUNTED, HOST_SEES = in_simulator(try_notify, FEW_IDS, 4)
for rank in range(2):
    print(f"rank {rank} counted: num_tokens_per_rank {COUNTED[rank][0]}, num_tokens_per_expert {COUNTED[rank][1]}")
for rank in range(2):
    print(f"rank {rank}'s host sees {HOST_SEES[rank][0]} rows, and for its experts {HOST_SEES[rank][1]}")

# %% [markdown]
# The buffer after notify. The first sections have one int32 for each **queue**, that is, for each channel and source
# rank.

# %%
draw.queues(DeepEPConfig(2, CHANNELS, 4, 2, 32, 2, 0, 4, 1))

# %% [markdown]
# ## 6. DeepEP's kernels: `dispatch`
#
# **CTA and warp roles.** Each channel has two CTAs: the even one sends, the odd one receives. The 24 warps of a CTA are
# divided equally among the ranks. Each group of warps serves one rank, the destination in a sending CTA and the source
# in a receiving one. A sender writes to the *destination* rank's buffer, so both use the same ring.

# %%
show(deepep_dispatch.make_dispatch, "def dispatch(", "return dispatch")

# %% [markdown]
# **The ring.** Each queue has a ring of token slots *in the receiver's buffer*. The sender fills slots from the
# **tail** on and publishes the new tail; the receiver copies rows from the **head** on to `recv_x` and publishes the
# new head. Both counters only increase; row `n` is in slot `n % ring`. A ring's size is independent of the number of
# rows, and its address is known before the counts. Both counters are in the receiver's buffer, so the sender polls the
# head *over NVLink*.
#
# **The sender** first publishes the prefix sums before and including this channel: `start` and `end`. Zero is a valid
# count, so counts are encoded as `-n - 1`; 0 means "not written yet".

# %%
show(deepep_dispatch.make_send, "address, queue = peers", "while token < last")

# %% [markdown]
# For the example:

# %% jupyter={"source_hidden": true} tags=["hide-input"]
offsets = {(m[1], m[2], m[3], m[0]): m[4] for m in PLAYED["moments"] if m[0] in ("start", "end")}
lines = [
    f"| {channel} | {source} | "
    + " | ".join(f"{offsets[to, source, channel, name]}" for to in range(2) for name in ("start", "end"))
    + " |"
    for channel in range(CHANNELS)
    for source in range(2)
]
Markdown(
    "| channel | from rank | start at rank 0 | end at rank 0 | start at rank 1 | end at rank 1 |\n"
    "|---|---|---:|---:|---:|---:|\n" + "\n".join(lines)
)

# %% [markdown]
# **Exercise 2.** A receiver `rank` has the array `rank_prefix` (`rank_prefix_matrix` of section 5) and the flag `start`
# of a channel of rank `source`, as published. Write a function that returns this channel's first row in `recv_x`.

# %%
first_row_of_channel = ...  # your answer: lambda rank_prefix, start, source, rank: ...
exercise("ring_buffer_dispatch-2").check(first_row_of_channel)

# %% [markdown]
# The sender then sends **chunks** of rows. Reading the head costs an NVLink round trip, so the sender reads it once per
# chunk and waits until the whole chunk fits. All warps of the group iterate over all tokens of the channel and take the
# selected ones round-robin. After the chunk they synchronise (`bar_sync`, a named barrier), and one thread publishes
# the tail with a release. `send_head` stores each token's position in its queue, for combine. (`fault` is for section
# 8.)

# %%
show(deepep_dispatch.make_send, "while token < last", "return send")

# %% [markdown]
# One warp copies a row and its metadata.

# %%
show(deepep_dispatch.make_send_row, "def send_row", "if config.on_row")

# %%
show(polling.make_copy_row, "def copy_row", "return copy_row")

# %% [markdown]
# **The receiver** computes its first row in `recv_x` from `rank_prefix_matrix` and `start`, and stores `start` in the
# handle, as `recv_channel_prefix_matrix`. *One* thread polls the tail and passes it to the other warps through shared
# memory, because all of them must work on the same rows. The warps copy the rows and synchronise, and one thread
# publishes the head.

# %%
show(deepep_dispatch.make_receive, "start = end = int32(0)", "return receive")

# %%
show(deepep_dispatch.make_receive_rows, "def receive_rows", "return receive_rows")

# %% [markdown]
# DeepEP's code polls the head with `ld.volatile`, stores it with `st.relaxed`, and reads the ring with `ld.global.nc`,
# which is specified for memory that is read-only during the kernel. The PTX memory model does not guarantee that this
# is correct. Our port uses acquire loads, release stores, and ordinary loads.
#
# ### The rings over time
#
# The example with one channel and rings of two rows, traced in the simulator; each line is a ring:

# %%
SLOW = in_simulator(play, EXAMPLE, 2, 1, 1, 1, 3)
draw.timeline(SLOW)

# %% [markdown]
# An animation with two channels and fewer tokens:

# %%
SHORT = in_simulator(play, [rows[:6] for rows in EXAMPLE], 2, 1, 2, 1, 3)
HTML(draw.animation(SHORT))

# %% [markdown]
# **Exercise 3.** A thread of rank 0 sends `rows` elements of `x` through a ring in rank 1's memory, where a thread stores
# them in `out`. `TAIL`, `HEAD` and `RING` are offsets in that memory, which is 0 at first. Rank 0 should use all slots;
# tail and head end as `rows`. Repair the two mistakes.

# %%
SLOTS, TAIL, HEAD, RING = 4, 0, 1, 2


@cuda.jit
def send_through_ring(local, peers, rank, x, rows, out):
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        for n in range(rows):
            while n - ld_acquire_sys_s32(remote, HEAD) > SLOTS:
                pass
            remote[RING + n % SLOTS] = x[n]
            st_release_sys_s32(remote, TAIL, int32(n + 1))
    else:
        for n in range(rows):
            while ld_acquire_sys_s32(local, TAIL) <= n:
                pass
            st_release_sys_s32(local, HEAD, int32(n + 1))
            out[n] = local[RING + n % SLOTS]


exercise("ring_buffer_dispatch-3").check(send_through_ring)

# %% [markdown]
# ### Step 3: DeepEP's ring on GPUs
#
# **Idea.** The counts are known, so the step runs `cached_notify_dispatch` and `dispatch` (`step` in the folded
# `deepep_step`).
#
# **Predicted gain.** The time of the naive kernel on as many SMs, less two barriers of one flag each and the slower of
# two limits: half of the CTAs send all rows at the rate of one CTA (section 2), and the link.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def constants_for(sms, chunk=None):
    return DeepEPConfig(RANKS, sms // 2, HERE.ring, chunk or HERE.chunk, ROW_BYTES, 0, 0, EXPERTS, HERE.warps)


def deepep_step(sms, chunk=None, with_counts=False):
    """Return the step of our port; ``with_counts``: with notify_dispatch, for whose counts the host waits."""
    c = constants_for(sms, chunk)
    for make_kernel in (
        deepep_notify.make_notify_dispatch,
        deepep_notify.make_cached_notify_dispatch,
        deepep_dispatch.make_dispatch,
    ):
        make_kernel(c)  # before the ranks' threads start, each of which would make its own

    @contextmanager
    def make(transport):
        rank, device, size = transport.rank, transport.device, min_buffer_bytes(c)
        shared = transport.allocate(size + SIGNALS_BYTES)
        signals = (shared.addresses.view(torch.int64) + size).view(torch.uint64)
        status = torch.zeros(polling.STATUS_WORDS, dtype=torch.int32, device=device)
        r = deepep_launch.Rank(rank, shared.addresses, signals, status, start=transport.launch)
        share, chosen = -(-TOKENS // c.channels), LAYOUTS[rank][2]
        parts = [chosen[i * share : (i + 1) * share].sum(dim=0) for i in range(c.channels)]
        channel_prefix = torch.stack(parts, dim=1).cumsum(dim=1).to(torch.int32).contiguous()
        rank_prefix = WANT[0].rank_prefix_matrix.to(device)
        pinned = {} if simulator.ENABLED else {"pin_memory": True}
        counter, of_experts = (torch.full((n,), -1, dtype=torch.int32, **pinned) for n in (1, EXPERTS // RANKS))

        def notify():
            counter.fill_(-1), of_experts.fill_(-1)
            found = deepep_launch.notify_dispatch(r, c, LAYOUTS[rank], counter, of_experts)
            arrived = transport.wait(lambda: int(counter[0]) >= 0 and int(of_experts.min()) >= 0, 10)
            assert arrived, f"rank {rank}: no counts have arrived; {polling.explain(status)}"
            return *found, int(counter[0])

        def step(x=X[rank]):
            if with_counts:
                known = notify()
            else:
                deepep_launch.cached_notify_dispatch(r, c, rank_prefix)
                known = rank_prefix, channel_prefix, ROWS[rank]
            recv_x, _, _, handle = deepep_launch.dispatch(r, c, x, chosen, *known)
            return recv_x, handle.recv_src_idx

        yield step
        settle(transport)
        error = polling.explain(status)
        assert error is None, error
        shared.close()

    return make


DEEPEP = "DeepEP's ring"
BARRIERS_US = 2 * FLAG.get("us", 0)
gain_us = (us(FEW) or 0) - limit_us(METHODS[0], SMS // 2, ALL_BYTES) - BARRIERS_US
measure(DEEPEP, deepep_step(SMS), after=FEW, predicted_gain_us=gain_us, num_sms=SMS)

# %% [markdown]
# **Explanation.** The port is slower than predicted, and slower than the naive kernel on as many SMs. Every row is
# written twice: to the ring, and from there to `recv_x`. In return the memory that peers write to is small, and the
# outputs are ordinary tensors.
#
# ### Step 4: more and fewer SMs
#
# **Idea.** Each channel uses two SMs; vary the number of channels.
#
# **Predicted gain.** The time is inversely proportional to the number of SMs, until the link is saturated.

# %%
RINGS = dict(zip((f"{DEEPEP}, fewer SMs", DEEPEP, f"{DEEPEP}, more SMs"), HERE.deepep_sweep))
ring_us = us(DEEPEP) or 0
for name, sms in RINGS.items():
    if name != DEEPEP:
        gain_us = ring_us - max(ring_us * RINGS[DEEPEP] / sms, FLOOR_US or 0)
        measure(name, deepep_step(sms), after=DEEPEP, predicted_gain_us=gain_us, slower=True, num_sms=sms)

# %% [markdown]
# **Explanation.** A sending CTA moves twice the bytes printed per SM. This is less than the rate of one CTA in
# section 2, and it falls as the number of SMs grows, although the link is not saturated. Possible causes: waits for the
# head, the barrier and the release.
#
# ## 7. The package's dispatch
#
# The package's rings divide the work differently. First a measurement: in the folded kernel `signal_cost`, thread 0 repeats
# a store, a release or one of two fences, alone and while other warps of the SM write to a peer.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
SIGNALS = ("st.relaxed.sys", "st.release.sys", "fence.acq_rel.sys", "fence.proxy.async")


@cuda.jit
def signal_cost(peers, local, to, vectors, rounds, signal, out):
    """Time a signal that thread 0 repeats; with ``vectors``, the other warps write rows to the peer meanwhile."""
    remote, thread = pointer_from_address(peers[to], local), int32(cuda.threadIdx.x)
    if thread == 0:
        begin = globaltimer()
        for i in range(rounds):
            if signal == 0:
                st_relaxed_sys_s32(remote, FLAGS, int32(i))
            elif signal == 1:
                st_release_sys_s32(remote, FLAGS, int32(i))
            elif signal == 2:
                fence_acq_rel_sys()
            else:
                fence_proxy_async()
        out[0] = int32(uint64(globaltimer() - begin) // uint64(rounds))
    elif thread >= 32:
        for i in range(thread, vectors, cuda.blockDim.x):
            st_na_s32x4(remote, PAYLOAD + 4 * int32(i & 0xFFFF), thread, thread, thread, thread)


def time_signal(signal, busy):
    @contextmanager
    def make(transport):
        start, shared = transport.launch, transport.allocate(4 * PAYLOAD + 16 * 65536)
        local, out = shared.local.view(torch.int32), torch.zeros(1, dtype=torch.int32, device=transport.device)
        vectors = (8 if simulator.ENABLED else 1 << 21) if busy else 0

        def step():
            start(
                signal_cost,
                1,
                HERE.threads,
                shared.addresses,
                local,
                (transport.rank + 1) % 2,
                vectors,
                HERE.rounds,
                SIGNALS.index(signal),
                out,
                launch_bounds=HERE.threads,
            )
            return out

        yield step
        shared.close()

    return make


COST = {}
for signal in SIGNALS:
    for busy in (False, True):
        ns = max(int(out) for out in outputs_of(PAIR, time_signal(signal, busy)))
        COST[f"{signal}, {'busy' if busy else 'idle'}"] = ns
COST = fact("signal_ns", COST)
for signal in SIGNALS:
    print(
        f"{signal}: {COST[f'{signal}, idle']} ns alone, {COST[f'{signal}, busy']} ns while other warps write"
        if COST
        else f"{signal}: ran; no time is recorded yet"
    )

# %% [markdown]
# **One warp per channel.** In DeepEP's kernel three groups of warps read a token that goes to three ranks. Here one
# warp handles the token. One thread bulk-loads the row into shared memory; then one lane per destination rank issues
# one bulk store of the **packed token**, the row with its metadata. No warp waits for another one, so there is no
# `bar_sync`.

# %%
show(token_slot.make_pack_token, "def pack_token(", "return pack_token")

# %% [markdown]
# **Dynamic load balancing.** With equal shares some warps finish much later than others (notebook 13). If more SMs send
# than saturate the link, there are four channels per sending warp, and a warp that has finished a channel takes the
# next one from an atomic counter.

# %%
show(next_channel, "taken = ")

# %% [markdown]
# Warps take channels in ascending order. On each rank some warp therefore works on the lowest unfinished channel and
# waits for no other channel, so the ranks cannot deadlock.

# %% [markdown]
# **A signalling warp.** As measured, a system-scope release or fence takes several times as long while other warps of
# the SM write to a peer. The copy warps therefore post their progress in shared memory. The CTA's last warp, which
# copies no rows, issues a *single* system-scope fence on their behalf and then stores the flags.

# %%
show(progress.make_publish, "def publish", "return publish")

# %% [markdown]
# **Exercise 4.** On rank 0, warps 0 and 1 each store 32 elements of `x` in rank 1's memory, and warp 2 signals them with
# flags 0 and 1. Two warps of rank 1 poll the flags and copy the elements to `out`. Rank 1 is correct; repair the
# two mistakes of rank 0.

# %%
from moe_numba.ptx.atomics import poll_acquire_cta_shared_s32, st_release_cta_shared_s32

DATA = 2  # words of rank 1's memory before the elements: the flags


@cuda.jit
def signal_for_others(local, peers, rank, x, out):
    posted, thread = cuda.shared.array(2, int32), int32(cuda.threadIdx.x)
    warp, lane = thread // 32, thread % 32
    if thread < 2:
        posted[thread] = 0
    cuda.syncthreads()
    if rank == 0:
        remote = pointer_from_address(peers[1], local)
        if warp < 2:
            remote[DATA + thread] = x[thread]
            if lane == 0:
                st_release_cta_shared_s32(posted, warp, 1)
        elif lane < 2:
            while poll_acquire_cta_shared_s32(posted, lane) == 0:
                pass
            st_relaxed_sys_s32(remote, lane, 1)
            fence_acq_rel_sys()
    elif warp < 2:
        while ld_acquire_sys_s32(local, warp) == 0:
            pass
        out[thread] = local[DATA + thread]


exercise("ring_buffer_dispatch-4").check(signal_for_others)

# %% [markdown]
# **Fewer proxy fences.** Bulk copies access memory through another *proxy* than loads and stores. A thread that has
# acquired a flag must execute `fence.proxy.async` before a bulk copy accesses what the flag guards. A receiver executes
# it only after it has read a *new* tail, a sender only after it has read the head, for which it has no reason while its
# rings have space.
#
# In the listing, `pipeline` is the module that copies rows: `bulk_pipeline.py` on Hopper, `register_pipeline.py` on
# older GPUs.
#
# **The head is in the sender's memory.** Sender and receiver both poll local memory, as in the ping-pong.

# %%
show(final_kernel.make_dispatch, "# Wait for space in all rings", "if token == end")

# %% [markdown]
# **Own rows.** Rows that stay on their rank use no ring, but an SM must copy them, at the rate of section 2. A sender
# copies every second one, and the receivers copy the others while no rows arrive.

# %%
show(final_kernel.make_dispatch, "elif token < end", "else:")

# %% [markdown]
# **Counters are never cleared.** Heads and tails continue from the previous launch. The flags of notify are sequence
# numbers, and the counts are double-buffered. No barrier is needed before or after dispatch; DeepEP's notify has three,
# its cached notify two.

# %%
show(notify.make_notify_dispatch, "def notify_dispatch(", "return notify_dispatch")

# %% [markdown]
# ### Step 5: the package's dispatch
#
# **Predicted gain.** The time of step 3, less the slower of the two limits. Half of the SMs send, at the rate with bulk
# loads, all rows that leave the rank and half of the own rows.


# %%
def package_step(sms, with_counts=False, x=X, direct=False):
    """Return the package's dispatch; ``direct`` is for step 6."""
    given = x
    ring = Buffer.get_dispatch_config(RANKS).num_max_nvl_chunked_recv_tokens
    config = Config(sms, HERE.chunk, 64 if simulator.ENABLED else ring)
    size = config.get_nvl_buffer_size_hint(ROW_BYTES, RANKS)
    size = 1 << 18 if simulator.ENABLED else -(-size // 256) * 256

    @contextmanager
    def make(transport):
        rank = transport.rank
        buffer = Buffer(transport, size, timeout=10.0)
        per_rank, per_expert, chosen = LAYOUTS[rank]
        layout = dict(num_tokens_per_rank=per_rank, num_tokens_per_expert=per_expert, is_token_in_rank=chosen)
        options = dict(config=config, out=buffer.new_output(RANKS * TOKENS, HIDDEN) if direct else None)
        handle = None if with_counts else buffer.dispatch(given[rank], **layout, **options)[4]

        def step(x=given[rank]):
            if with_counts:
                got = buffer.dispatch(x, **layout, **options)
            else:
                got = buffer.dispatch(x, handle=handle, **options)
            return got[0], got[4][3]

        yield step
        if direct:
            options["out"].close()
        buffer.destroy()

    return make


copied_bytes = WIRE_BYTES + (ALL_BYTES - WIRE_BYTES) / 2
gain_us = (us(DEEPEP) or 0) - limit_us(METHODS[2], SMS // 2, copied_bytes)
measure("final", package_step(SMS), after=DEEPEP, predicted_gain_us=gain_us, num_sms=SMS)

# %% [markdown]
# ### Step 6: direct writes to the peer's output buffer
#
# **Idea.** With rings each row that leaves the rank is copied twice, and half of the SMs only receive. The naive kernel
# copied it once, but needed the host for the row indices. After `notify`, however, each rank's *GPU* has all counts,
# and a warp that processes its channel's tokens in order can increment the row index. All CTAs send, with bulk copies,
# directly to the destination rank's `recv_x`. (The package uses at most 16 CTAs.)

# %%
show(dispatch_direct.make_dispatch_direct, "while token < end:", "if has_next:")

# %% [markdown]
# `recv_x` must then be in memory that peers can write to: an **output** that all ranks allocate together
# (`Buffer.new_output`), and that the next dispatch with it overwrites. All ranks execute a barrier before, so that no
# rank still uses the previous contents, and one after, so that all rows have arrived.
#
# **Predicted gain.** The time of step 5, less both barriers and the slower limit, if 16 CTAs send all rows.

# %%
DIRECT, SENDING = "direct writes", num_direct_senders(SMS)


def direct_us(sms):
    """Return the predicted time of direct writes."""
    return limit_us(METHODS[2], sms, ALL_BYTES) + BARRIERS_US


gain_us = (us("final") or 0) - direct_us(SENDING)
measure(DIRECT, package_step(SMS, direct=True), after="final", predicted_gain_us=gain_us, num_sms=SENDING)

# %% [markdown]
# **Explanation.** With two ranks both limits are close: a CTA moves nearly as much as one CTA alone in section 2 with
# bulk loads, and the link carries nearly the rate measured there.
#
# ### The sweep: time over the number of SMs
#
# **Predicted gain.** With few SMs direct writes take less time, because all CTAs send: half with many ranks, two thirds
# with two ranks, where receivers copy every second own row.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def sweep_us(direct):
    """Return the microseconds by the number of SMs, as text; the rows that arrive are checked first."""
    steps = {f"{sms}": package_step(sms, direct=direct) for sms in HERE.sweep}
    for name, make in steps.items():
        wrong = check(outputs_of(GROUP, poisoned(make)))
        assert not wrong, f"{name} SMs: {wrong}"
    times = rank_times(GROUP, steps, launches=HERE.launches, samples=HERE.samples) if TIMED else {}
    return {name: round(stats.median, 2) for name, stats in times.items() if stats}


SWEEPS = {"moe_numba's rings": fact("sms_us", sweep_us(False)), DIRECT: fact("direct_sms_us", sweep_us(True))}
LINES = {
    **{name: {int(sms): t for sms, t in line.items()} for name, line in SWEEPS.items()},
    DEEPEP: {ladder.row(name)["num_sms"]: us(name) for name in RINGS if us(name)},
}
LINES = {name: line for name, line in LINES.items() if line}
for name, line in LINES.items():
    print(f"{name}:", ", ".join(f"{t:.0f} us with {sms} SMs" for sms, t in sorted(line.items())))
AT_12 = {name: line[12] for name, line in LINES.items() if 12 in line}
if DIRECT in AT_12 and TIMED:
    print(f"{DIRECT}, 12 SMs: {AT_12[DIRECT]:.0f} us, predicted {direct_us(12):.0f}")
figure = None
if LINES:
    figure = plots.sweep_figure(
        LINES,
        xlabel="SMs",
        floor=FLOOR_US and {sms: FLOOR_US for line in LINES.values() for sms in line},
        title="Dispatch over the number of SMs",
        caption=plots.caption(records.environment(), "measured now on")
        if TIMED
        else plots.caption(ladder.record, "not measured here: recorded on"),
    )
figure

# %% [markdown]
# **Explanation.** With few SMs direct writes take slightly less than the predicted two thirds of the time of the rings,
# and they reach their minimum with fewer SMs. There the two differ little. Our port of DeepEP's kernel does not reach
# it within this sweep.
#
# ### FP8 rows
#
# `x` may be a pair: values in FP8 (`e4m3`), and one scale per 128 consecutive elements, their maximum absolute value
# divided by 448, the largest e4m3 number. This is the article's function:


# %%
def article_cast(x):
    assert x.dim() == 2 and x.size(1) % 128 == 0
    m, n = x.shape
    x_view = x.view(m, -1, 128)
    x_amax = x_view.abs().float().amax(dim=2).view(m, -1).clamp(1e-4)
    return (x_view * (448.0 / x_amax.unsqueeze(2))).to(torch.float8_e4m3fn).view(m, n), (x_amax / 448.0).view(m, -1)


some = torch.randn(8, 256, device=HOME)
(values, scales), (own_values, own_scales) = article_cast(some), per_token_cast_to_fp8(some)
SAME_CAST = float((values.view(torch.uint8) == own_values.view(torch.uint8)).float().mean())
print(
    f"{100 * SAME_CAST:.1f} % of the values have the same bits; "
    f"scales differ by {float((own_scales / scales - 1).abs().max()):.1g} at most"
)
FP8 = [per_token_cast_to_fp8(x) for x in X]
FP8_ROW = HIDDEN + 4 * FP8[0][1].shape[1]
print(f"a row has {FP8_ROW} bytes, {100 * FP8_ROW / ROW_BYTES:.0f} % of {ROW_BYTES}")

# %% [markdown]
# Scales that are powers of two may be packed, four to an `int32`, as exponents of `float32` numbers. The next cell
# unpacks four of them with the article's function and the package's.


# %%
def article_cast_back(x_fp8, x_scales):
    if x_scales.dtype == torch.int:
        x_scales = (x_scales.view(dtype=torch.int8).to(torch.int) << 23).view(dtype=torch.float)
    x_fp32 = x_fp8.to(torch.float32).view(x_fp8.size(0), -1, 128)
    return (x_fp32 * x_scales.view(x_fp8.size(0), -1, 1)).view(x_fp8.shape).to(torch.bfloat16)


assert torch.equal(article_cast_back(values, scales), per_token_cast_back(values, scales))
powers, ones = torch.tensor([0.25, 0.5, 1, 2], device=HOME), torch.ones(1, 512, device=HOME).to(torch.float8_e4m3fn)
exponents = (powers.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)[:, None]
BACK = [cast_back(ones, exponents)[0, ::128].tolist() for cast_back in (article_cast_back, per_token_cast_back)]
print(f"ones with scales {powers.tolist()}: {BACK[0]} by the article's function, {BACK[1]} by the package's")


# %% [markdown]
# **Predicted gain.** The time of step 5, multiplied by the part of the row that is saved.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def fp8_step(sms):
    @contextmanager
    def make(transport):
        with package_step(sms, x=FP8)(transport) as step:
            yield lambda: (lambda got: (*got[0], got[1]))(step(FP8[transport.rank]))

    return make


fp8_want = reference.dispatch(
    [tuple(part.to(HOME) for part in pair) for pair in FP8], [layout[2].to(HOME) for layout in LAYOUTS]
)
for (*given, src_idx), want in zip(outputs_of(GROUP, fp8_step(SMS)), fp8_want, strict=True):
    for a, b in zip((*given, src_idx), (*want.x, want.src_idx), strict=True):
        assert torch.equal(a.to(HOME).contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)), "FP8 is wrong"
both = {"bfloat16": STEPS["final"], "FP8": fp8_step(SMS)}
times = TIMED and rank_times(GROUP, both, launches=HERE.launches, samples=HERE.samples)
IN_FP8 = fact(
    "fp8",
    times
    and {
        "us": round(times["FP8"].median, 1),
        "bfloat16_us": round(times["bfloat16"].median, 1),
        "gbps": round(WIRE_ROWS * FP8_ROW / times["FP8"].median / 1e3, 1),
        "share": round(FP8_ROW / ROW_BYTES, 3),
    },
)
if IN_FP8:
    before_us = IN_FP8.get("bfloat16_us") or us("final")
    gain = Judgement(before_us, IN_FP8["us"], before_us * (1 - IN_FP8["share"]))
    print(f"FP8: {before_us:.0f} -> {IN_FP8['us']:.0f} us; {gain}; {IN_FP8['gbps']:.0f} GB/s over each rank's link")
else:
    print("FP8: correct; no time is recorded yet")

# %% [markdown]
# **Explanation.** FP8 gains less than predicted, because the link carries a lower rate.
#
# ### With the counts: host time
#
# A first dispatch exchanges counts, and the host waits for the total. The next cell measures the host time from the
# call until the GPU is idle, with and without counts.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
calls = {
    f"{FEW}, known": naive_dispatch(SMS),
    f"{FEW}, with counts": naive_dispatch(SMS, with_counts=True),
    f"{DEEPEP}, known": deepep_step(SMS),
    f"{DEEPEP}, with counts": deepep_step(SMS, with_counts=True),
    "final, known": package_step(SMS),
    "final, with counts": package_step(SMS, with_counts=True),
    f"{DIRECT}, known": package_step(SMS, direct=True),
    f"{DIRECT}, with counts": package_step(SMS, with_counts=True, direct=True),
}
for name in list(calls)[1::2]:
    wrong = check(outputs_of(GROUP, poisoned(calls[name])))
    assert not wrong, f"{name}: {wrong}"
times = host_times(GROUP, calls) if TIMED else {}
HOST = fact("host_us", {name: round(stats.median, 1) for name, stats in times.items() if stats})
for name in calls:
    print(f"{name}: " + (f"{HOST[name]:.0f} us" if name in HOST else "correct; no time is recorded yet"))

# %% [markdown]
# The difference between two lines contains the exchange, the synchronisation, and Python code that allocates the
# outputs while the GPU is idle. `num_worst_tokens` avoids the wait with outputs of the worst-case size.
#
# All ranks share one GIL here, so these times cannot be compared with NCCL's.
#
# ### The whole ladder
#
# All steps again, interleaved, except NCCL, whose processes have ended.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
again = rank_times(GROUP, STEPS, launches=HERE.launches, samples=HERE.samples) if TIMED else None
ladder.measure_all(again)
if TIMED:
    for row in ladder.rows:
        if row["step"] in STEPS:
            row["wire_gbps"] = round(WIRE_BYTES / row["kernel_us"]["median"] / 1e3, 1)
        if row["step"] == "final":
            row |= FACTS

# %%
ladder.save()
ladder.plot(floor_us=FLOOR_US)

# %% [markdown]
# **Result.** With known counts the naive kernel on all SMs is the fastest step, close to the lower bound. With at most
# 24 SMs the package's two kernels are faster than the naive kernel and our port of DeepEP's ring, each on 24. The time
# of torch differs noticeably from its first measurement.
#
# ## 8. Faults
#
# In five places of our port, marked with `fault`, a weaker memory order, a missing barrier or a line moved earlier
# makes the kernel incorrect. The simulator runs each with weak memory.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
WHAT = {
    "": "unchanged",
    "plain tail": "the tail is published with a plain store, without release",
    "tail first": "the tail is published before the row is written",
    "no barrier": "the sender's warps do not synchronise before the tail is published",
    "relaxed poll": "the receiver polls the tail with relaxed loads",
    "early head": "the head is published before the rows are copied",
}


def try_faults(faults, seeds):
    torch.use_deterministic_algorithms(True)  # torch.empty is then filled, so that each seed gives the same run
    try:
        return {fault: try_fault(fault, seeds) for fault in faults}
    finally:
        torch.use_deterministic_algorithms(False)


def try_fault(fault, seeds):
    """Return for each seed None, or the error in the dispatch of two ranks."""
    torch.manual_seed(1)
    chosen = [torch.ones(tokens, 2, dtype=torch.bool) for tokens in (9, 7)]
    x = [torch.randn(len(rows), 16).bfloat16() for rows in chosen]
    want, found = reference.dispatch(x, chosen), []
    c = DeepEPConfig(2, 1, 2, 2, 32, 0, 0, 2, 2, fault=fault)
    for number in range(seeds):
        try:
            with virtual_ranks(2, min_buffer_bytes(c)) as ranks, simulator.seed(number), simulator.weak_memory():
                got = dispatch_all(ranks, c, x, chosen)
            wrong = [int((a[0].view(torch.int16) != b.x.view(torch.int16)).any(dim=1).sum()) for a, b in zip(got, want)]
            found.append(f"{wrong[0]} rows of rank 0 and {wrong[1]} of rank 1" if any(wrong) else None)
        except simulator.SimulatorError as error:
            found.append(f"{type(error).__name__}: {str(error).splitlines()[0]}")
    return found


SEEDS_OF_FAULTS = 6
FOUND = in_simulator(try_faults, list(WHAT), SEEDS_OF_FAULTS)
lines = []
for fault, found in FOUND.items():
    seeds = [str(i) for i, error in enumerate(found) if error]
    first = next(filter(None, found), "")
    lines.append(f"| {WHAT[fault]} | {', '.join(seeds) or 'none'} | {first} |")
Markdown(
    f"| the kernel | wrong under these of {SEEDS_OF_FAULTS} seeds | wrong rows under the first of them |\n"
    "|---|---|---|\n" + "\n".join(lines)
)

# %% [markdown]
# Without weak memory a simulator cannot show faults in memory ordering.
#
# ### Timeouts
#
# If a rank fails, DeepEP's kernels abort after 100 seconds with `trap`, which makes the CUDA context unusable. Our
# kernels record what they waited for and exit, and the host raises an exception. In the next cell rank 1 never starts.
# (Our port's timeout can be switched off; the simulator then detects the deadlock, where a GPU would hang.)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def try_alone(timeout_ns):
    """Return the errors of rank 0 if rank 1 does not start."""
    c, errors, known = DeepEPConfig(2, 1, 2, 2, 32, 0, 0, 2, 1), {}, torch.zeros(2, 2, dtype=torch.int32)
    for name, timeout in (("DeepEP's ring, with a timeout", timeout_ns), ("DeepEP's ring, without", 0)):
        try:
            with virtual_ranks(2, min_buffer_bytes(c), timeout) as ranks, simulator.seed(0):
                simulate.on_all(ranks[:1], lambda r: deepep_launch.cached_notify_dispatch(r, c, known))
        except (RankTimeoutError, simulator.Deadlock) as error:
            errors[name] = "\n    ".join([type(error).__name__ + ": ", *str(error).splitlines()[:3]])

    def work(transport):
        buffer = Buffer(transport, 1 << 18, timeout=1e-5)  # ten of the simulator's steps
        x, chosen = torch.zeros(4, 16, dtype=torch.bfloat16), torch.ones(4, 2, dtype=torch.bool)
        counts = torch.full((2,), 4, dtype=torch.int32)
        if transport.rank == 0:
            buffer.dispatch(x, num_tokens_per_rank=counts, num_tokens_per_expert=counts, is_token_in_rank=chosen)

    try:
        LocalGroup(2).run(work)
    except TimeoutError as error:
        errors["the package's rings"] = f"TimeoutError: {error}"
    return errors


ERRORS = in_simulator(try_alone, 1_000_000)
for name, error in ERRORS.items():
    print(f"{name}: {error}")

# %% [markdown]
# ## 9. Sources
#
# - BoLi2001, [一文彻底看懂DeepEP（1）：intranode](https://zhuanlan.zhihu.com/p/1935094821804040824), 2025, in Chinese.
#   We compare [its claims](../docs/claims.md#deepep) with our measurements.
# - [DeepEP](https://github.com/deepseek-ai/DeepEP), by DeepSeek: `csrc/kernels/intranode.cu` and `csrc/deep_ep.cpp` of
#   its first version. [TileScale](https://github.com/tile-ai/tilescale) has a port with direct writes.
# - NVIDIA, *PTX ISA*, "Memory Consistency Model" and "Proxies".
#
# ## The final kernel
#
# The kernels that `Buffer.dispatch` runs: with rings, and with direct writes if an output is passed.

# %%
Markdown("```python\n" + inspect.getsource(final_kernel) + "\n```")

# %%
Markdown("```python\n" + inspect.getsource(dispatch_direct) + "\n```")
