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
# # Align in one launch
#
# [Notebook 03](03_align_published.ipynb) ended with version 0x5 of SGLang's `moe_align_block_size`: a first kernel counts the token
# slots of each expert, a second one places them. This notebook does both in one launch and ends with the
# kernels of the package. The last section fuses the alignment with the gate of [notebook 01](01_gate_prompt.ipynb).

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import math
import warnings
from functools import cache

import torch
from IPython.display import Markdown, display
from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba import simulator
from moe_numba.align.device_functions import make_scan
from moe_numba.align.reference import moe_align_block_size, sizes
from moe_numba.course.bench import records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.figures import plots
from moe_numba.course.draw.phases import phase_bars
from moe_numba.course.draw.player import Player
from moe_numba.course.exercises import exercise
from moe_numba.course.lessons.align_one_launch import buffer_copies, draw
from moe_numba.course.lessons.align_one_launch.phase_times import atomic_loop, phase_instructions, phases
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.align_runs import poisoned, random_ids, wrong
from moe_numba.course.steps.kernel_phases import until
from moe_numba.course.steps.ladder import Ladder
from moe_numba.course.steps.simulate import in_simulator
from moe_numba.course.steps.source_diff import change
from moe_numba.gate.one_token_per_warp import GateConfig, make_router
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_gpu_u64,
    ld_relaxed_gpu_u64x2,
    st_relaxed_gpu_s32,
    st_relaxed_gpu_u64,
)
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank, st_cluster_s32
from moe_numba.ptx.memory import atom_add_s32, griddepcontrol_launch_dependents, griddepcontrol_wait
from moe_numba.ptx.warp import lanemask_lt
from moe_numba.runtime.changed_source import changed_source, define, source_of
from moe_numba.runtime.launch import launch

warnings.filterwarnings("ignore", message=".*low occupancy.*")  # some kernels have few CTAs on purpose
ALIGN, GATE = records.recorded("align"), records.recorded("gate")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
CONFIG = {"num_experts": 256, "topk": 8, "block_size": 16}


def recorded_us(step, tokens, **config):
    """Return the median kernel time of a step of `python -m moe_numba bench align`, or None."""
    row = ALIGN and records.find(ALIGN, step=step, size={"tokens": tokens}, config=CONFIG | config)
    return row["kernel_us"]["median"] if row and "kernel_us" in row else None


say(
    "**Result** (kernel time of 4096 tokens, 256 experts, top-8, expert blocks of 16, recorded on {gpu}): "
    "{ours:.1f} us in one launch. SGLang's compiled kernel, which version 0x5 became, takes {aot:.1f} us in two "
    "launches, SGLang's current one (v2) {v2:.1f} us, and vLLM's {vllm:.1f} us.",
    gpu=ALIGN and ALIGN["gpu"].replace("NVIDIA", "an NVIDIA"),
    ours=recorded_us("final", 4096),
    aot=recorded_us("peer:sglang-aot", 4096),
    v2=recorded_us("peer:sglang-v2", 4096),
    vllm=recorded_us("peer:vllm", 4096),
)

# %% [markdown]
# ## 1. The problem in one figure
#
# The function gets `topk_ids`, the experts of each token. An element of it is a **slot**: slot `s` belongs to token
# `s // topk`. `sorted_token_ids` lists the slots by expert. The part of each expert is padded to whole **expert
# blocks**, the row tiles of the grouped GEMM that follows, and `expert_ids` names the expert of each block. The arrays
# are allocated for the worst case; their unused end is the **tail**.

# %%
draw.two_launches()

# %% [markdown]
# Version 0x5 counts in one CTA. The other SMs are idle, except for one that fills `sorted_token_ids` with padding. A
# second launch reads all ids again and takes the position of each slot from a counter in global memory. The order of an
# expert's slots therefore changes from run to run. The kernels of this notebook return the same bits in every run.
#
# ## 2. The reference and the starting point
#
# All shapes are variables; try others. `wrong` compares the outputs with the package's torch reference, element by
# element. Outputs are filled with -7 before each step. The order and the tail, which 0x5 leaves undefined, are not
# compared for it.

# %%
SIMULATED = simulator.ENABLED
DEVICE = "cpu" if SIMULATED else "cuda"
EXPERTS, TOPK, BLOCK = (64, 4, 16) if SIMULATED else (256, 8, 16)  # DeepSeek-V3 has 256 experts and top-8
TOKENS, FEW_TOKENS = (64, 8) if SIMULATED else (4096, 64)
CTAS, THREADS = (6, 128) if SIMULATED else (64, 1024)  # more threads than experts
# Tokens, slots, experts, CTAs and threads of the times below: in the simulator they are recorded ones.
TIMED = (4096, 32768, 256, 64, 1024) if SIMULATED else (TOKENS, TOKENS * TOPK, EXPERTS, CTAS, THREADS)
TIMED_TOKENS, TIMED_SLOTS, TIMED_EXPERTS, TIMED_CTAS, TIMED_THREADS = TIMED
assert EXPERTS < THREADS and TOKENS * TOPK <= CTAS * THREADS

torch.manual_seed(0)
IDS = random_ids(TOKENS, EXPERTS, TOPK, DEVICE)
NUMEL = IDS.numel()
OTHERS = {  # each step is checked for these, too
    "few tokens": IDS[:FEW_TOKENS].contiguous(),
    "1 token": IDS[:1].contiguous(),
    "all to the same experts": IDS[:1].repeat(TOKENS, 1).contiguous(),
}


def check(outputs, ids=IDS):
    return wrong(outputs, ids, EXPERTS, BLOCK)


ladder = Ladder(
    "align_one_launch_ladder",
    check,
    title=f"Align in one launch: {TIMED_TOKENS} tokens, {TIMED_EXPERTS} experts, expert blocks of 16",
    reference_name="0x5",
    config={"num_experts": EXPERTS, "topk": TOPK, "block_size": BLOCK},
    size={"tokens": TOKENS},
)

# %%
right = moe_align_block_size(IDS, BLOCK, EXPERTS)
swapped = right[0].clone()
swapped[:2] = right[0][:2].flip(0)
print("the reference:", check(right))
print("the first two elements exchanged:", check((swapped, *right[1:])))
print("poison:", check(poisoned(IDS, EXPERTS, BLOCK)))

# %% [markdown]
# The folded cell defines 0x5, as derived in notebook 03. The comments `# count`, `# scan` and `# write` mark its
# **phases**: `phases` times copies of a kernel that end after each of them.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
THREADS_0X5 = THREADS


@cuda.jit(device=True)
def find_expert(prefix, num_experts, row):
    """Return the last expert that begins at or before a row."""
    left, right = int32(0), int32(num_experts)
    while left < right:
        middle = int32((left + right) >> 1)
        if prefix[middle] <= row:
            left = int32(middle + 1)
        else:
            right = middle
    return left - 1


@cache
def make_0x5(num_experts, threads):
    """The main kernel of version 0x5; launch two CTAs, the second of which fills."""
    ends, scan = num_experts + 1, make_scan(threads)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        shared_counts = cuda.shared.array(num_experts, int32)
        prefix = cuda.shared.array(ends, int32)
        warp_sums = cuda.shared.array(32, int32)
        # start
        tid = cuda.threadIdx.x
        # count
        if cuda.blockIdx.x == 1:
            for i in range(tid, length, threads):
                sorted_token_ids[i] = numel
            return
        if tid < num_experts:
            shared_counts[tid] = 0
        cuda.syncthreads()
        for i in range(tid, numel, threads):
            cuda.atomic.add(shared_counts, topk_ids[i], 1)
        cuda.syncthreads()
        # scan
        padded = int32(0)
        if tid < num_experts:
            padded = int32(uint32(shared_counts[tid] + block_size - 1) // uint32(block_size) * uint32(block_size))
        begin, total = scan(padded, warp_sums)
        if tid < num_experts:
            prefix[tid] = begin
            cumsum[tid] = begin
        if tid == 0:
            prefix[num_experts] = total
            total_tokens_post_pad[0] = total
        cuda.syncthreads()
        # write
        for i in range(tid, uint32(prefix[num_experts]) // uint32(block_size), threads):
            expert_ids[i] = find_expert(prefix, num_experts, i * block_size)

    return kernel


@cuda.jit
def count_and_sort(topk_ids, sorted_token_ids, cumsum, numel):
    """The sort kernel of versions 0x1 to 0x5: a thread for each slot."""
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        sorted_token_ids[atom_add_s32(cumsum, topk_ids[i], 1)] = i


def buffers_of_0x5(ids=IDS):
    """Return poisoned outputs, and the counters `cumsum`."""
    return *poisoned(ids, EXPERTS, BLOCK), torch.empty(EXPERTS + 1, dtype=torch.int32, device=DEVICE)


def main_of_0x5(make, ids=IDS, buffers=None):
    """Return a call that launches the main kernel, and the arrays that the sort kernel needs."""
    kernel, (*outputs, cumsum) = make(EXPERTS, THREADS_0X5), buffers or buffers_of_0x5(ids)
    numbers = BLOCK, ids.numel(), len(outputs[0])
    return lambda: launch(kernel, 2, THREADS_0X5, ids, *outputs, cumsum, *numbers), (*outputs, cumsum)


def run_0x5(ids=IDS, buffers=None):
    main, (*outputs, cumsum) = main_of_0x5(make_0x5, ids, buffers)

    def call():
        main()
        launch(count_and_sort, -(-ids.numel() // 256), 256, ids, outputs[0], cumsum, ids.numel())
        return *outputs, "any order", "any tail"

    return call


# %%
RUNS = {"0x5": run_0x5}
for what, ids in OTHERS.items():
    assert not check(run_0x5(ids)(), ids), what
LADDER_BUFFERS = buffers_of_0x5()  # step 1 compares them with others
ladder.step("0x5", run_0x5(buffers=LADDER_BUFFERS), dtype="int32")

# %% [markdown]
# ## 3. Lower bound
#
# The ids are read once and each output element is written once. All of them fit in the L2 cache. The next cell compares
# the time of copying their bytes with that of an empty kernel, and measures the latency of a load from L2 by a chain of
# loads, each of which needs the one before. A dependent launch (step 11) of the empty kernel bounds the sweep of section 7.
#
# The predictions below use one **cost model**: `n` accesses to L2, each of which needs the one before, take `n L`, where `L`
# is this latency; atomic operations, polls and fences count as accesses. Bytes take bytes / `B_L2`, the bandwidth of
# L2, and `n` instructions per slot take `n` x slots / (32 x 4 x `f`), because an SM issues four warp instructions per
# clock, with frequency `f`. Measured times are written `t`.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def empty(links):
    griddepcontrol_wait()  # step 11 explains these two
    griddepcontrol_launch_dependents()


@cuda.jit
def chain_of_loads(links, out, n):
    at = int32(0)
    for _ in range(n):
        at = links[at]
    out[0] = at


order = torch.randperm(1 << (10 if SIMULATED else 20), device=DEVICE)  # 4 MB: more than an SM's L1, less than the L2
links = torch.empty_like(order, dtype=torch.int32)
links[order] = order.roll(-1).int()  # a path through all elements
found = torch.zeros(1, dtype=torch.int32, device=DEVICE)
basics = ladder.times(
    "basics",
    {
        "empty": lambda: launch(empty, 1, 32, links),
        "empty, dependent": lambda: launch(empty, 1, 32, links, dependent=True),
        "1024 loads": lambda: launch(chain_of_loads, 1, 1, links, found, 1024),
        "2048 loads": lambda: launch(chain_of_loads, 1, 1, links, found, 2048),
    },
)
LIMITS = chip_limits()
EMPTY_US, DEPENDENT_US = (basics["empty"], basics["empty, dependent"]) if basics else (0.5, 0.4)
LATENCY_US = (basics["2048 loads"] - basics["1024 loads"]) / 1024 if basics else 0.15


def bytes_of(tokens, topk=TOPK, num_experts=EXPERTS, block_size=BLOCK):
    length, blocks = sizes(tokens * topk, block_size, num_experts)
    return 4 * (tokens * topk + length + blocks + 1)


TIMED_BYTES = bytes_of(TIMED_TOKENS, TIMED_SLOTS // TIMED_TOKENS, TIMED_EXPERTS)
COPY_US = TIMED_BYTES / LIMITS.copy_bandwidth * 1e6
FLOOR_US = max(COPY_US, EMPTY_US)
say(
    "{tokens} tokens: {kb:.0f} KB, {bytes_us:.2f} us at the bandwidth of a copy. An empty kernel takes {empty:.2f} us, a "
    "load from L2 {latency:.0f} ns. The bytes are no limit: launch and latency bound the time from below. In the model, `B_L2` "
    "is {l2:.1f} TB/s and `f` {clock:.2f} GHz.",
    tokens=TIMED_TOKENS,
    kb=TIMED_BYTES / 1e3,
    bytes_us=COPY_US,
    empty=basics and EMPTY_US,
    latency=1000 * LATENCY_US,
    l2=LIMITS.l2_bandwidth / 1e12,
    clock=LIMITS.boost_clock / 1e9,
)

# %% [markdown]
# ## 4. Every CTA counts all slots
#
# ### Step 1: one launch
#
# **Bottleneck.** The next cell times the two kernels of 0x5. The sort kernel cannot be repeated alone, because it changes
# the counters that it reads; its time is the difference between both kernels and the main kernel.

# %%
KERNELS = ladder.times("kernels of 0x5", {"both": run_0x5(), "main": main_of_0x5(make_0x5)[0]})
SORT_US = max(KERNELS["both"] - KERNELS["main"], 0.0) if KERNELS else 0.0
PHASES = {"0x5": phases(ladder, "0x5", make_0x5, lambda make: main_of_0x5(make)[0])}
PHASES["0x5"]["sort kernel"] = KERNELS and SORT_US

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The sort kernel takes {sort:.1f} of {both:.1f} us, the main kernel {main:.1f}, of which counting takes "
    "{count:.1f}.",
    sort=KERNELS and SORT_US,
    both=KERNELS and KERNELS["both"],
    main=KERNELS and KERNELS["main"],
    count=PHASES["0x5"]["count"],
)

# %% [markdown]
# **Idea.** One launch of many CTAs, which do not communicate:
#
# - **Each CTA counts all slots.** That is redundant, but the SMs were idle.
# - **Each output element has one writer.** From the counts every CTA knows which element holds a slot, padding, or tail.
#   Nothing is filled first and overwritten later, so nothing must be ordered. The slots are
#   split into as many consecutive **chunks** as there are CTAs; a CTA places the slots of its own. The padding of expert
#   `e` goes to warp `e` of the grid, the tail to all threads.
# - **Ranks come from bitmasks.** A slot's row is the first row of its expert, plus the expert's slots in earlier chunks
#   (`before`), plus its rank in the chunk. Each expert has a bit for each slot of the chunk; the rank is the number of set
#   bits below the slot's own. An atomic *or* has the same result in any order, so the order is stable.

# %%
torch.manual_seed(0)
display(draw.element_writers(random_ids(6, 4, 2), block_size=4, num_experts=4, ctas=2))
draw.bitmask_rank([2, 0, 3, 2, 1, 2, 0, 2, 3, 1, 2, 0, 1, 2, 3, 0], expert=2)


# %%
@cuda.jit(device=True)
def rank_of(masks, word):
    """The set bits below this thread's own in the masks that begin at a word."""
    rank = 0
    for w in range(cuda.threadIdx.x // 32):
        rank += cuda.popc(masks[word + w])
    # `lanemask_lt()` has a bit for each lane below this one; `popc` counts the bits set
    return rank + cuda.popc(masks[word + cuda.threadIdx.x // 32] & lanemask_lt())


@cuda.jit(device=True)
def write_padding(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length):
    """Write all that is no slot; an expert is the work of one warp of the grid."""
    lane, thread, all_threads = cuda.threadIdx.x % 32, cuda.grid(1), cuda.gridsize(1)
    for e in range(thread // 32, num_experts, all_threads // 32):
        for row in range(first_block[e] * block_size + counts[e] + lane, first_block[e + 1] * block_size, 32):
            sorted_token_ids[row] = numel
        for block in range(first_block[e] + lane, first_block[e + 1], 32):
            expert_ids[block] = e
    used = first_block[num_experts]
    for row in range(used * block_size + thread, length, all_threads):
        sorted_token_ids[row] = numel
    for block in range(used + thread, (length + block_size - 1) // block_size, all_threads):
        expert_ids[block] = -1
    if thread == 0:
        total[0] = used * block_size


# %% [markdown]
# The kernel in full. `make_scan` is the two-level scan of notebook 03, from the package; it returns the sum over lower
# threads and the total. `chunk` is the number of slots that each CTA places.


# %%
@cache
def make_one_launch(num_experts, threads):
    words, ends, scan = threads // 32, num_experts + 1, make_scan(threads)
    mask_words = num_experts * words

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk):
        before, counts = cuda.shared.array(num_experts, int32), cuda.shared.array(num_experts, int32)
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(ends, int32), cuda.shared.array(32, int32)
        # start
        tid, first, slot = cuda.threadIdx.x, cuda.blockIdx.x * chunk, cuda.blockIdx.x * chunk + cuda.threadIdx.x
        if tid < num_experts:
            before[tid] = counts[tid] = 0
        for i in range(tid, mask_words, threads):
            masks[i] = 0
        cuda.syncthreads()
        # count
        for i in range(tid, numel, threads):
            if i < first:
                cuda.atomic.add(before, topk_ids[i], 1)
            else:
                cuda.atomic.add(counts, topk_ids[i], 1)
        # scan
        if tid < chunk and slot < numel:
            cuda.atomic.or_(masks, topk_ids[slot] * words + tid // 32, 1 << tid % 32)
        cuda.syncthreads()
        blocks = 0
        if tid < num_experts:
            counts[tid] += before[tid]
            blocks = (counts[tid] + block_size - 1) // block_size
        start, _ = scan(int32(blocks), warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if tid < chunk and slot < numel:
            e = topk_ids[slot]
            sorted_token_ids[first_block[e] * block_size + before[e] + rank_of(masks, e * words)] = slot
        write_padding(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
def align(kernel, ids, ctas, threads, *workspace, **options):
    """Return a call that launches a kernel on ids and returns its outputs, which are poisoned once.

    With `launch_bounds` the compiler uses at most as many registers as a CTA of this size can have.
    """
    outputs, chunk = poisoned(ids, EXPERTS, BLOCK), -(-ids.numel() // ctas)
    arguments = ids, *outputs, *workspace, BLOCK, ids.numel(), len(outputs[0]), chunk

    def call():
        launch(kernel, ctas, threads, *arguments, launch_bounds=threads, **options)
        return outputs

    return call


def count_all(make, ids=IDS):
    return align(make(EXPERTS, THREADS), ids, CTAS, THREADS)


def step(name, make, run, **prediction):
    """Check a kernel for all sizes, then check and time it for `IDS`; `run(make, ids)` returns the call."""
    with ladder.attempt(name, "int32"):
        for what, ids in OTHERS.items():
            fault = check(run(make, ids)(), ids)
            assert fault is None, f"{name}, {what}: {fault}"
        ladder.step(name, run(make), dtype="int32", floor_us=FLOOR_US, bytes=bytes_of(TOKENS), **prediction)
        RUNS[name] = lambda ids=IDS: run(make, ids)


def saved(before, after, phase):
    """Return how much less a phase takes in a later step; None if it is not measured."""
    old, new = PHASES[before][phase], PHASES[after][phase]
    return None if None in (old, new) else old - new


# %% [markdown]
# **Predicted gain.** `t_sort - 2 L`: the sort kernel is no longer needed. Two loads from L2 come instead, one after the
# other: the slot's own id for its bit, and again for its place. Counting, scan and launch are as in 0x5; clearing and
# padding are not counted.

# %%
step("one launch", make_one_launch, count_all, after="0x5", predicted_gain_us=SORT_US - 2 * LATENCY_US)

# %% [markdown]
# **Explanation.** The phases of the kernel: `start` is the launch and the clearing of shared memory, `scan` includes the
# bits, `write` the rank. The compiled counting loops show in which order a thread loads ids and adds to counters:

# %%
PHASES["one launch"] = phases(ladder, "one launch", make_one_launch, count_all)
SIGNATURE = ("int32*",) * 4 + ("int32",) * 4
LOOPS = {
    "0x5": atomic_loop(make_0x5, (256, 1024), ("int32*",) * 5 + ("int32",) * 3, 1024),
    "one launch": atomic_loop(make_one_launch, (256, 1024), SIGNATURE, 1024),
}
for name, loop in LOOPS.items():
    words = {"LDG": "load", "ATOMS": "add"}
    print(f"{name}:", *(words[op.split(".")[0]] for op in loop.opcodes if op.split(".")[0] in words))
(*outputs, counters), *others = copies = [LADDER_BUFFERS, *(buffers_of_0x5() for _ in range(7))]
calls = {f"copy {n}": run_0x5(buffers=copy) for n, copy in enumerate(copies)}
calls |= {f"outputs of copy {n}": run_0x5(buffers=(*copy[:-1], counters)) for n, copy in enumerate(others, 1)}
calls |= {f"counters of copy {n}": run_0x5(buffers=(*outputs, copy[-1])) for n, copy in enumerate(others, 1)}
copies_us = ladder.times("buffers of 0x5", calls)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
ROUNDS = -(-TIMED_SLOTS // TIMED_THREADS)  # ids that a thread counts
if KERNELS and ladder.median_us("0x5"):
    PHASES["0x5"]["sort kernel"] = max(ladder.median_us("0x5") - KERNELS["main"], 0.0)
LONGER = [saved("one launch", "0x5", phase) for phase in ("start", "count", "write")]
LONGER = None if None in LONGER else LONGER
display(
    say(
        "In the ladder the launches of 0x5 take {both:.1f} us, not {above:.1f}: they are the same, with other buffers. "
        "The sort kernel then accounts for {sort:.1f} us. Phases that the prediction left out or took as unchanged are "
        "longer: `count` by {count:.1f} us, `write`, which now ranks and pads, by {write:.1f} us, `start`, which clears "
        "the masks, by {start:.1f} us; together {sum:.1f} us. `count` lost its loads in flight: in 0x5 a thread issues four loads before the first addition, here the additions are in "
        "branches, and the compiler moves no load across them. That is {waits} more waits, {us:.1f} us by the model.",
        both=ladder.median_us("0x5"),
        above=KERNELS and KERNELS["both"],
        sort=PHASES["0x5"]["sort kernel"],
        count=saved("one launch", "0x5", "count"),
        write=saved("one launch", "0x5", "write"),
        start=saved("one launch", "0x5", "start"),
        sum=LONGER and sum(LONGER),
        waits=ROUNDS - ROUNDS // 4,
        us=(ROUNDS - ROUNDS // 4) * LATENCY_US,
    )
)
ranges, ladder_us = {}, ladder.median_us("0x5")
for what in ("copy", "outputs", "counters") if copies_us else ():
    ranges[what] = "{:.1f} to {:.1f}".format(*(pick(buffer_copies.of(copies_us, what)) for pick in (min, max)))
say(
    "With the buffers of the ladder, copy 0, 0x5 takes {first:.1f} us here; with each of seven other copies, which have "
    "their own allocations, {copy} us. Within one allocation the address of the counters makes no difference "
    "(notebook 03). With the counters of copy 0 but the outputs of another copy, 0x5 takes {outputs} us, with the outputs "
    "of copy 0 but the counters of another {counters} us. {conclusion} All factors over 0x5 in this notebook compare with "
    "{ladder:.1f} us.",
    first=copies_us and copies_us["copy 0"],
    copy=ranges.get("copy"),
    outputs=ranges.get("outputs"),
    counters=ranges.get("counters"),
    conclusion=copies_us and ladder_us and buffer_copies.conclude(copies_us, ladder_us),
    ladder=ladder_us,
)

# %% [markdown]
# **Exercise 1.** Counters with atomic additions rank slots in the order in which threads arrive. Make the ranks of this
# kernel stable: `ranks[i]` must be the number of earlier elements of `ids` with the same expert. It is launched with one
# CTA of 64 threads and 8 experts.


# %%
@cuda.jit
def stable_ranks(ids, ranks):
    counts = cuda.shared.array(8, int32)
    i = cuda.threadIdx.x
    if i < 8:
        counts[i] = 0
    cuda.syncthreads()
    ranks[i] = cuda.atomic.add(counts, ids[i], 1)


exercise("align_one_launch-1").check(stable_ranks)

# %% [markdown]
# ### Step 2: 32-bit unsigned integers
#
# **Bottleneck.** The instructions of the phases:


# %%
def per_slot(loop):
    """Instructions of the counting loop per slot; it loads an id for each slot, so its loads show the unrolling."""
    return len(loop.opcodes) / loop.count("LDG")


SASS = {"one launch": phase_instructions(make_one_launch, (256, 1024), SIGNATURE, 1024)}
print({phase: sum(made.values()) for phase, made in SASS["one launch"].items()})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "{all} instructions, {integer} of them on integers. The counting loop, from its label to the branch back, has {slot:.0f} "
    "per slot.",
    all=sum(sum(made.values()) for made in SASS["one launch"].values()),
    integer=sum(made["integer"] for made in SASS["one launch"].values()),
    slot=per_slot(LOOPS["one launch"]),
)

# %% [markdown]
# **Idea.** Numba follows Python's integer rules. `int32 + int32` is an `int64`; `//` rounds towards minus infinity and
# `%` takes the divisor's sign; a negative index counts from the end of a shared array, so every signed index is tested.
# A GPU has 32-bit integer units: a 64-bit addition takes two instructions, and a 64-bit division a long routine.
# `uint32(...)` around each result tells the compiler that 32 bits suffice and that nothing is negative. `range`
# computes in 64 bits if an argument is a Python integer, and may take more instructions than a `while` with `uint32`.
#
# **Predicted gain.** `d` x slots / (32 x 4 x `f`), if issue limits the counting: `d` is the difference of instructions per
# slot.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def rank_below(masks, word):
    """The set bits below this thread's own in the masks that begin at a word."""
    warp, w, rank = uint32(cuda.threadIdx.x >> 5), uint32(0), uint32(0)
    while w < warp:
        rank = uint32(rank + cuda.popc(uint32(masks[uint32(word + w)])))
        w = uint32(w + 1)
    return uint32(rank + cuda.popc(uint32(uint32(masks[uint32(word + warp)]) & lanemask_lt())))


@cuda.jit(device=True)
def write_rest(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length):
    """Write all that is no slot; an expert is the work of one warp of the grid."""
    thread, all_threads = uint32(cuda.grid(1)), uint32(cuda.gridsize(1))
    e, lane = uint32(thread >> 5), uint32(cuda.threadIdx.x & 31)
    while e < num_experts:
        block, end = uint32(first_block[e]), uint32(first_block[uint32(e + 1)])
        row = uint32(block * block_size + counts[e] + lane)
        while row < uint32(end * block_size):
            sorted_token_ids[row] = numel
            row = uint32(row + 32)
        block = uint32(block + lane)
        while block < end:
            expert_ids[block] = e
            block = uint32(block + 32)
        e = uint32(e + (all_threads >> 5))
    used = uint32(first_block[uint32(num_experts)])
    row = uint32(used * block_size + thread)
    while row < length:
        sorted_token_ids[row] = numel
        row = uint32(row + all_threads)
    block = uint32(used + thread)
    while uint32(block * block_size) < length:
        expert_ids[block] = -1
        block = uint32(block + all_threads)
    if thread == 0:
        total[0] = uint32(used * block_size)


@cuda.jit(device=True)
def clear(array, length):
    i = uint32(cuda.threadIdx.x)
    while i < length:
        array[i] = 0
        i = uint32(i + cuda.blockDim.x)


@cache
def make_unsigned(num_experts, threads):
    words, ends, scan = threads // 32, num_experts + 1, make_scan(threads)
    mask_words = num_experts * words

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk):
        before, counts = cuda.shared.array(num_experts, int32), cuda.shared.array(num_experts, int32)
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(ends, int32), cuda.shared.array(32, int32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid, first = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x * chunk)
        slot = uint32(first + tid)
        if tid < num_experts:
            before[tid] = counts[tid] = 0
        clear(masks, mask_words)
        cuda.syncthreads()
        # count
        i = tid
        while i < numel:
            e = uint32(topk_ids[i])
            if i < first:
                cuda.atomic.add(before, e, 1)
            else:
                cuda.atomic.add(counts, e, 1)
            i = uint32(i + threads)
        # scan
        if tid < chunk and slot < numel:
            word = uint32(uint32(topk_ids[slot]) * words + (tid >> uint32(5)))
            cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        blocks = int32(0)
        if tid < num_experts:
            counts[tid] += before[tid]
            blocks = int32(uint32(counts[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if tid < chunk and slot < numel:
            e = uint32(topk_ids[slot])
            row = uint32(first_block[e] * block_size + before[e] + rank_below(masks, uint32(e * words)))
            sorted_token_ids[row] = slot
        write_rest(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
display(change(rank_of, rank_below), change(write_padding, write_rest))
change(make_one_launch, make_unsigned)

# %%
SASS["unsigned"] = phase_instructions(make_unsigned, (256, 1024), SIGNATURE, 1024)
LOOPS["unsigned"] = atomic_loop(make_unsigned, (256, 1024), SIGNATURE, 1024)
fewer = per_slot(LOOPS["one launch"]) - per_slot(LOOPS["unsigned"])
issue_us = lambda instructions: instructions * TIMED_SLOTS / 32 / 4 / LIMITS.boost_clock * 1e6
step("unsigned integers", make_unsigned, count_all, after="one launch", predicted_gain_us=issue_us(fewer))

# %% [markdown]
# **Explanation.** Instructions and time of each phase:

# %%
PHASES["unsigned integers"] = phases(ladder, "unsigned integers", make_unsigned, count_all)
for phase in SASS["unsigned"]:
    print(f"{phase:<8}" + " -> ".join(f"{sum(made[phase].values()):5}" for made in SASS.values()) + " instructions")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The prediction holds for the loop: `count` takes {count:.2f} us less, predicted {predicted:.2f}. It left out the other "
    "phases: `start` takes {start:.2f} us less, `write` {write:.2f}. Of the {now:.1f} us of `count`, {waits:.1f} are waits by "
    "the model: each thread loads {rounds} ids, one after the other.",
    count=saved("one launch", "unsigned integers", "count"),
    predicted=issue_us(fewer),
    start=saved("one launch", "unsigned integers", "start"),
    write=saved("one launch", "unsigned integers", "write"),
    now=PHASES["unsigned integers"]["count"],
    waits=LATENCY_US * ROUNDS,
    rounds=ROUNDS,
)

# %% [markdown]
# ### Step 3: eight loads in flight
#
# **Bottleneck.** Counting waits: because of the branches around the additions, a thread has one load in flight.
#
# **Idea.** Load eight ids into registers, then count them. `cuda.local.array` with constant indices is kept in
# registers, not memory, and `range(8)` is unrolled, because its length is a constant.
#
# **Predicted gain.** A thread loads `R` = slots / threads ids and waits once for eight of them: `(R - R/8) L`.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_eight_loads(num_experts, threads):
    words, ends, scan = threads // 32, num_experts + 1, make_scan(threads)
    mask_words = num_experts * words

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk):
        before, counts = cuda.shared.array(num_experts, int32), cuda.shared.array(num_experts, int32)
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(ends, int32), cuda.shared.array(32, int32)
        ids = cuda.local.array(8, uint32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid, first = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x * chunk)
        slot = uint32(first + tid)
        if tid < num_experts:
            before[tid] = counts[tid] = 0
        clear(masks, mask_words)
        cuda.syncthreads()
        # count
        i = tid
        while i < numel:
            for k in range(8):
                s = uint32(i + k * threads)
                ids[k] = topk_ids[s] if s < numel else 0
            for k in range(8):
                s = uint32(i + k * threads)
                if s < numel:
                    if s < first:
                        cuda.atomic.add(before, ids[k], 1)
                    else:
                        cuda.atomic.add(counts, ids[k], 1)
            i = uint32(i + 8 * threads)
        # scan
        if tid < chunk and slot < numel:
            word = uint32(uint32(topk_ids[slot]) * words + (tid >> uint32(5)))
            cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        blocks = int32(0)
        if tid < num_experts:
            counts[tid] += before[tid]
            blocks = int32(uint32(counts[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if tid < chunk and slot < numel:
            e = uint32(topk_ids[slot])
            row = uint32(first_block[e] * block_size + before[e] + rank_below(masks, uint32(e * words)))
            sorted_token_ids[row] = slot
        write_rest(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
change(make_unsigned, make_eight_loads)

# %%
waits = ROUNDS - -(-ROUNDS // 8)
step("eight loads", make_eight_loads, count_all, after="unsigned integers", predicted_gain_us=waits * LATENCY_US)

# %% [markdown]
# **Explanation.** The counting loop alone, and what it does at the level of instructions:

# %%
PHASES["eight loads"] = phases(ladder, "eight loads", make_eight_loads, count_all)
LOOPS["eight loads"] = atomic_loop(make_eight_loads, (256, 1024), SIGNATURE, 1024)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "`count` went from {before:.2f} to {now:.2f} us. Its waits are down to {waits:.2f} us, but each of the eight slots has "
    "three branches, two for its tests and one past the other addition: the loop has {branch} branches, and {slot:.0f} "
    "instructions per slot instead of {old:.0f}. Issuing these takes at least {issue:.2f} us. Waits and issue together are "
    "{sum:.2f} us of the {now:.2f}; the model does not explain the rest.",
    before=PHASES["unsigned integers"]["count"],
    now=PHASES["eight loads"]["count"],
    waits=LATENCY_US * -(-ROUNDS // 8),
    branch=LOOPS["eight loads"].count("BRA"),
    slot=per_slot(LOOPS["eight loads"]),
    old=per_slot(LOOPS["unsigned"]),
    issue=issue_us(per_slot(LOOPS["eight loads"])),
    sum=LATENCY_US * -(-ROUNDS // 8) + issue_us(per_slot(LOOPS["eight loads"])),
)

# %% [markdown]
# ### Step 4: a drop bin
#
# **Bottleneck.** Each slot has three branches: one tests whether it exists, one whether it lies in an earlier chunk, one
# skips the other addition. They also keep the compiler from interleaving the eight slots.
#
# **Idea.** Slots past the end go to a **drop bin**, `num_experts`, which is not used. `before` and `counts` become the
# two halves of one array, so that the half is a number to be added, not a branch.
#
# **Predicted gain.** As in step 2: `d` x slots / (32 x 4 x `f`). The next cell compiles both kernels for `d`.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_drop_bin(num_experts, threads):
    words, bins, scan = threads // 32, num_experts + 1, make_scan(threads)
    mask_words, both = num_experts * words, 2 * bins

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk):
        halves = cuda.shared.array(both, int32)
        before, counts = halves[:bins], halves[bins:]
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(bins, int32), cuda.shared.array(32, int32)
        ids = cuda.local.array(8, uint32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid, first = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x * chunk)
        slot = uint32(first + tid)
        clear(halves, both)
        clear(masks, mask_words)
        cuda.syncthreads()
        # count
        i = tid
        while i < numel:
            for k in range(8):
                s = uint32(i + k * threads)
                ids[k] = topk_ids[s] if s < numel else num_experts
            for k in range(8):
                half = uint32(0) if uint32(i + k * threads) < first else uint32(bins)
                cuda.atomic.add(halves, uint32(ids[k] + half), 1)
            i = uint32(i + 8 * threads)
        # scan
        if tid < chunk and slot < numel:
            word = uint32(uint32(topk_ids[slot]) * words + (tid >> uint32(5)))
            cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        blocks = int32(0)
        if tid < num_experts:
            counts[tid] += before[tid]
            blocks = int32(uint32(counts[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if tid < chunk and slot < numel:
            e = uint32(topk_ids[slot])
            row = uint32(first_block[e] * block_size + before[e] + rank_below(masks, uint32(e * words)))
            sorted_token_ids[row] = slot
        write_rest(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
change(make_eight_loads, make_drop_bin)

# %%
LOOPS["drop bin"] = atomic_loop(make_drop_bin, (256, 1024), SIGNATURE, 1024)
fewer = per_slot(LOOPS["eight loads"]) - per_slot(LOOPS["drop bin"])
branches = [LOOPS[name].count("BRA") for name in ("eight loads", "drop bin")]
print(f"{fewer:.1f} instructions per slot less; branches in the loop: {branches[0]} -> {branches[1]}")
step("drop bin", make_drop_bin, count_all, after="eight loads", predicted_gain_us=issue_us(fewer))

# %% [markdown]
# **Explanation.** Two kernels that end after `count` show what limits the counting now: one stores to the same words
# instead of adding atomically, one computes ids instead of loading them. `wavefronts` counts how often shared memory is
# accessed for one instruction of a warp: once for each distinct word in the most-accessed bank.


# %%
def only_count(old="", new="", make=make_drop_bin):
    if old:
        make = define(changed_source(make, old, new), globals(), f"drop bin: {new}")["make_drop_bin"]
    return count_all(until(make, "count", globals()))


ATOMIC, STORE = "cuda.atomic.add(halves, uint32(ids[k] + half), 1)", "halves[uint32(ids[k] + half)] = 1"
LOAD, HASH = "topk_ids[s]", "uint32(uint32(s * s * uint32(2654435769)) >> uint32(20)) % uint32(num_experts)"
calls = {"additions": only_count(), "stores": only_count(ATOMIC, STORE), "no loads": only_count(LOAD, HASH)}
counting = ladder.times("additions and loads", calls)
squares = torch.arange(TIMED_SLOTS) ** 2
HASHED = ((squares * 2654435769 & 0xFFFFFFFF) >> 20) % TIMED_EXPERTS
RANDOM = random_ids(TIMED_TOKENS, TIMED_EXPERTS, TIMED_SLOTS // TIMED_TOKENS).flatten()


@cache
def wavefronts(pitch, hashed=False):
    """Return the mean over all warps of ids, if a lane accesses word `pitch * id`."""
    warps = (HASHED if hashed else RANDOM).split(32)
    return sum(int((torch.unique(pitch * ids) % 32).bincount().max()) for ids in warps) / len(warps)


PHASES["drop bin"] = phases(ladder, "drop bin", make_drop_bin, count_all)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
less = {what: counting["additions"] - counting[what] for what in ("stores", "no loads")} if counting else {}
limit = "Neither the additions nor the loads alone limit the counting"
if counting and max(less.values()) > 0.1 * counting["additions"]:
    limit = f"Of the two, the {'atomic additions' if less['stores'] > less['no loads'] else 'loads'} limit the counting"
OTHER_PHASES = [saved("drop bin", "eight loads", phase) for phase in ("start", "scan", "write")]
say(
    "`count` changes by {change:+.2f} us, predicted {predicted:+.2f}, the other phases together by {others:+.2f} us. "
    "`start` and `count` take {all:.2f} us, with stores instead of atomic additions {stores:.2f}, with computed ids, which "
    "need {hashed:.1f} wavefronts, instead of loads {loads:.2f}. {limit}. The ids of a warp are random, so an addition, "
    "like a store, needs {banks:.1f} wavefronts, {us:.1f} us for all slots, however few instructions surround it. `count` "
    "is {share:.0f} % of the kernel's {total:.1f} us, and more CTAs would not help: every CTA counts all {slots} slots.",
    change=saved("drop bin", "eight loads", "count"),
    predicted=-issue_us(fewer),
    others=None if None in OTHER_PHASES else sum(OTHER_PHASES),
    all=counting and counting["additions"],
    stores=counting and counting["stores"],
    loads=counting and counting["no loads"],
    hashed=wavefronts(1, hashed=True),
    limit=limit,
    banks=wavefronts(1),
    us=wavefronts(1) * TIMED_SLOTS / 32 / LIMITS.boost_clock * 1e6,
    slots=TIMED_SLOTS,
    share=PHASES["drop bin"]["count"] and 100 * PHASES["drop bin"]["count"] / sum(PHASES["drop bin"].values()),
    total=PHASES["drop bin"]["count"] and sum(PHASES["drop bin"].values()),
)

# %% [markdown]
# ## 5. CTAs exchange counts
#
# ### Step 5: a grid-wide barrier
#
# **Bottleneck.** Each CTA counts all slots, which takes the share of the time that is printed above.
#
# **Idea.** Each CTA counts only its own chunk and stores its counts in a **workspace** in global memory. When all have
# done so, each CTA adds up the counts of all CTAs, and separately those of earlier CTAs. With one slot per thread, four
# more things change:
#
# - A CTA has as many threads as its chunk has slots (512 instead of 1024), at least one for each expert.
# - A thread keeps its slot's id in the register `e` until `write`, instead of loading it three times.
# - The mask bits are set in `count`, where `e` is known, instead of `scan`.
# - The drop bin gets a mask, too, so that threads without a slot set their bit there.

# %%
draw.exchange_counts(ctas=3, experts=4)

# %% [markdown]
# `cuda.syncthreads()` synchronises only the threads of one CTA. A **grid-wide barrier** is a counter in global memory: each CTA
# adds to it and then **polls** until all CTAs have arrived. The functions `..._relaxed_gpu_...` access the counter.
# *Relaxed* accesses are atomic but order no other access; *gpu scope* means that all threads of this GPU see them. A
# **fence**, `cuda.threadfence()`, adds the order: what a thread accessed before it comes before what it accesses after it,
# for all threads of the GPU. Three things must be right:
#
# - **All CTAs are resident** on SMs at the same time: a waiting CTA keeps its place, and if another CTA could not start,
#   the grid would wait forever. A **cooperative launch** (`cooperative=True`) makes the driver refuse a grid that does not
#   fit.
# - **Order.** The counts must be visible to other SMs before the arrival is: a fence between the two, and another between
#   the last poll and the loads of the counts.
# - **The next use** finds the counter as this one left it. The last CTA could reset the counter to the 0 for which the
#   others poll, but with a second barrier in the kernel a late poll would miss it. If each launch adds the number of
#   CTAs and waits for the next multiple, the 32-bit counter overflows at some point (exercise 2). Here the CTAs
#   together add `2**31`: CTA 0 adds `2**31` minus the number of others, these add 1 each. The top bit flips when the
#   last one arrives, and the lower bits are 0 again.


# %%
HEADER = 4  # int32 elements of the workspace before the counts


@cuda.jit(device=True)
def grid_barrier(workspace):
    """Wait until all CTAs have arrived; what they stored before is then visible."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        others = uint32(uint32(1 << 31) - uint32(cuda.gridDim.x - 1))
        old = atom_add_relaxed_gpu_s32(workspace, 0, int32(others) if cuda.blockIdx.x == 0 else int32(1))
        while int32(old ^ ld_relaxed_gpu_s32(workspace, 0)) >= 0:  # the top bit is the same
            pass
        cuda.threadfence()
    cuda.syncthreads()


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def barrier_only(workspace, passed):
    grid_barrier(workspace)
    if cuda.threadIdx.x == 0:
        passed[cuda.blockIdx.x] = 1


def play_barrier():
    workspace, passed = torch.zeros(HEADER, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with simulator.trace(accesses=True) as events:
        launch(barrier_only, 4, 32, workspace, passed, cooperative=True)
    return Player(*draw.barrier_frames(events, 4), "A grid-wide barrier of 4 CTAs").as_dict()


player = Player.from_dict(in_simulator(play_barrier))
player

# %%
player.strip([1, len(player.frames) - 5, len(player.frames) - 1])

# %% [markdown]
# **Exercise 2.** Each of three CTAs, of one thread, computes the sum of their three numbers; the barrier waits for the
# next multiple of 3. The check launches it with the counters that it would find after very many launches. Repair it.


# %%
@cuda.jit
def sum_of_all(values, rows, sums, counter):
    cta = cuda.blockIdx.x
    rows[cta] = values[cta]
    cuda.threadfence()
    arrived = atom_add_relaxed_gpu_s32(counter, 0, 1)
    goal = int32((arrived // 3 + 1) * 3)
    while ld_relaxed_gpu_s32(counter, 0) < goal:
        pass
    cuda.threadfence()
    sums[cta] = rows[0] + rows[1] + rows[2]


exercise("align_one_launch-2").check(sum_of_all)

# %% [markdown]
# **Predicted gain.** `t_count - (1 + 5 + CTAs / 8) L - bytes / B_L2`. `count` shrinks to one load. The exchange adds a store,
# a fence, an atomic addition, a poll and a fence, one after the other, and then a load for each CTA, eight at a time. Each
# CTA loads the counts of all: 4 x experts x CTAs² bytes.


# %%
@cuda.jit(device=True)
def add_up(workspace, num_experts):
    """Add up the counts of expert `tid` of all CTAs, and of earlier CTAs, with eight loads in flight."""
    loaded = cuda.local.array(8, int32)
    all_ctas, earlier, cta = int32(0), int32(0), uint32(0)
    while cta < uint32(cuda.gridDim.x):
        for k in range(8):
            loaded[k] = 0
            if uint32(cta + k) < uint32(cuda.gridDim.x):
                loaded[k] = workspace[uint32(HEADER + uint32(cta + k) * num_experts + cuda.threadIdx.x)]
        for k in range(8):
            all_ctas = int32(all_ctas + loaded[k])
            earlier = int32(earlier + (loaded[k] if uint32(cta + k) < uint32(cuda.blockIdx.x) else int32(0)))
        cta = uint32(cta + 8)
    return all_ctas, earlier


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_grid_barrier(num_experts, threads):
    words, bins, scan = threads // 32, num_experts + 1, make_scan(threads)
    mask_words = bins * words

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, workspace, block_size, numel, length, chunk):
        counts, before = cuda.shared.array(bins, int32), cuda.shared.array(bins, int32)
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(bins, int32), cuda.shared.array(32, int32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid = uint32(cuda.threadIdx.x)
        slot = uint32(cuda.blockIdx.x * chunk + tid)
        clear(counts, bins)
        clear(masks, mask_words)
        cuda.syncthreads()
        # count
        e = uint32(num_experts)
        if tid < chunk and slot < numel:
            e = uint32(topk_ids[slot])
        cuda.atomic.add(counts, e, 1)
        word = uint32(e * words + (tid >> uint32(5)))
        cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        # exchange
        if tid < num_experts:
            workspace[uint32(HEADER + cuda.blockIdx.x * num_experts + tid)] = counts[tid]
        grid_barrier(workspace)
        if tid < num_experts:
            counts[tid], before[tid] = add_up(workspace, num_experts)
        # scan
        blocks = int32(0)
        if tid < num_experts:
            blocks = int32(uint32(counts[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if e < num_experts:
            row = uint32(first_block[e] * block_size + before[e] + rank_below(masks, uint32(e * words)))
            sorted_token_ids[row] = slot
        write_rest(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
change(make_drop_bin, make_grid_barrier)

# %%
OWN_THREADS = -(-max(-(-NUMEL // CTAS), EXPERTS + 1) // 32) * 32  # a thread for each slot of the chunk
TIMED_OWN = 512 if SIMULATED else OWN_THREADS


def exchange(make, ids=IDS):
    workspace = torch.zeros(HEADER + 2 * CTAS * (EXPERTS + 3), dtype=torch.int32, device=DEVICE)
    return align(make(EXPERTS, OWN_THREADS), ids, CTAS, OWN_THREADS, workspace, cooperative=True)


L2_US = lambda bytes_per_count: bytes_per_count * TIMED_EXPERTS * TIMED_CTAS**2 / LIMITS.l2_bandwidth * 1e6
exchange_us = (5 + -(-TIMED_CTAS // 8)) * LATENCY_US + L2_US(4)
gain_us = (PHASES["drop bin"]["count"] or 0) - LATENCY_US - exchange_us
step("grid-wide barrier", make_grid_barrier, exchange, after="drop bin", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** `exchange` is the new phase.

# %%
PHASES["grid-wide barrier"] = phases(ladder, "grid-wide barrier", make_grid_barrier, exchange)
workspace, passed = (torch.zeros(length, dtype=torch.int32, device=DEVICE) for length in (HEADER, CTAS))
barrier = ladder.times(
    "barrier alone",
    {
        "barrier": lambda: launch(barrier_only, CTAS, OWN_THREADS, workspace, passed, cooperative=True),
        "empty": lambda: launch(empty, CTAS, OWN_THREADS, workspace, cooperative=True),
    },
)


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def ranks_us(pitch):
    """Return what the masks of one CTA cost: warp w loads w + 1 words for each rank; masks are `pitch` words apart."""
    warps = TIMED_SLOTS // TIMED_CTAS // 32
    return wavefronts(pitch) * warps * (warps + 1) / 2 / LIMITS.boost_clock * 1e6


EXCHANGE_US = PHASES["grid-wide barrier"]["exchange"]
say(
    "Two errors of the prediction cancel. The exchange takes {exchange:.2f} us, predicted {predicted:.2f}. The barrier alone "
    "takes {barrier:.2f} us, not 5 L = {five:.2f} us, which explains {part:.2f} of the {error:.2f} us; the rest is in the "
    "loads of the counts, or in waiting for CTAs that arrive later. And `write` takes {less:.2f} us less: with half the threads a mask is "
    "half as long. The masks of the experts begin in {banks} banks instead of {old_banks}, so each load for the ranks "
    "needs {new:.0f} wavefronts instead of {old:.0f}, by the model {new_us:.1f} us in all instead of {old_us:.1f}.",
    exchange=EXCHANGE_US,
    predicted=exchange_us,
    barrier=barrier and barrier["barrier"] - barrier["empty"],
    five=5 * LATENCY_US,
    part=barrier and barrier["barrier"] - barrier["empty"] - 5 * LATENCY_US,
    error=None if EXCHANGE_US is None else EXCHANGE_US - exchange_us,
    less=saved("drop bin", "grid-wide barrier", "write"),
    banks=32 // math.gcd(32, TIMED_OWN // 32),
    old_banks=32 // math.gcd(32, TIMED_THREADS // 32),
    new=wavefronts(TIMED_OWN // 32),
    old=wavefronts(TIMED_THREADS // 32),
    new_us=ranks_us(TIMED_OWN // 32),
    old_us=ranks_us(TIMED_THREADS // 32),
)

# %% [markdown]
# ### Step 6: counts that carry the launch number
#
# **Bottleneck.** Before a CTA may load the first count it waits for a fence, for its own arrival, and for a poll that sees
# the last arrival.
#
# **Idea.** Store each count and the number of this launch with one aligned 64-bit store, which is atomic. A reader that
# finds the right number knows that the count is there: it polls the data itself. **Decoupled look-back** (Merrill and
# Garland), the scan of NVIDIA's CUB, publishes its sums like this. It then reads only earlier CTAs. Here every CTA must
# know the totals of all experts before it can place a slot, so it reads all. The figure also shows step 7.

# %%
draw.count_words()

# %% [markdown]
# The launch number is in the workspace, because a CUDA graph repeats a launch with the same arguments. The last CTA that
# has read all counts increments it. This needs no fence either: the next launch begins after this one has ended. A zeroed
# workspace is right for the first launch because the numbers start at 1. When the number overflows, every count still
# carries that of the launch before; a cell below checks it.
#
# **Exercise 3.** Here each of four CTAs adds its value to the prefix of the CTA before, whose flag it polls. The order of
# the two stores is wrong, and fences are missing. Repair the kernel with `cuda.threadfence()`.


# %%
@cuda.jit
def chained_scan(values, prefix, flags):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    st_relaxed_gpu_s32(flags, cta, 1)
    prefix[cta] = before + values[cta]


exercise("align_one_launch-3").check(chained_scan)

# %% [markdown]
# **Predicted gain.** `4 L - bytes / B_L2`: two fences, the atomic addition and the poll of the counter are no longer
# needed; but a count takes 8 bytes instead of 4, until step 7 packs two.

# %%
LAUNCHES, DONE = 0, 1  # in the workspace: launches so far, CTAs that have read all counts


@cuda.jit(device=True)
def publish(workspace, counts, number, num_experts):
    tid = uint32(cuda.threadIdx.x)
    if tid < num_experts:
        word = uint64(uint64(number) << uint64(32)) | uint64(uint32(counts[tid]))
        st_relaxed_gpu_u64(workspace, int64(HEADER + 2 * (cuda.blockIdx.x * num_experts + tid)), word)


@cuda.jit(device=True)
def end_exchange(workspace, number):
    """Let the last CTA that has read all counts store the number of this launch."""
    if cuda.threadIdx.x == 0:
        if atom_add_relaxed_gpu_s32(workspace, DONE, 1) == cuda.gridDim.x - 1:
            st_relaxed_gpu_s32(workspace, DONE, 0)
            st_relaxed_gpu_s32(workspace, LAUNCHES, int32(number))


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def add_up_tagged(workspace, number, num_experts):
    """As `add_up`; waits until all counts have the number of this launch."""
    word = cuda.local.array(8, uint64)
    tag = uint64(uint64(number) << uint64(32))
    all_ctas, earlier, cta = int32(0), int32(0), uint32(0)
    while cta < uint32(cuda.gridDim.x):
        differ = uint64(1) << uint64(32)
        while differ >> uint64(32) != uint64(0):
            differ = uint64(0)
            for k in range(8):
                word[k] = tag  # past the last CTA: a count of 0
                if uint32(cta + k) < uint32(cuda.gridDim.x):
                    at = int64(HEADER + 2 * (uint32(cta + k) * num_experts + cuda.threadIdx.x))
                    word[k] = ld_relaxed_gpu_u64(workspace, at)
                differ |= word[k] ^ tag
        for k in range(8):
            count = int32(word[k] & uint64(0xFFFFFFFF))
            all_ctas = int32(all_ctas + count)
            earlier = int32(earlier + (count if uint32(cta + k) < uint32(cuda.blockIdx.x) else int32(0)))
        cta = uint32(cta + 8)
    return all_ctas, earlier


@cache
def make_tagged(num_experts, threads):
    words, bins, scan = threads // 32, num_experts + 1, make_scan(threads)
    mask_words = bins * words

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, workspace, block_size, numel, length, chunk):
        counts, before = cuda.shared.array(bins, int32), cuda.shared.array(bins, int32)
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(bins, int32), cuda.shared.array(32, int32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid = uint32(cuda.threadIdx.x)
        slot = uint32(cuda.blockIdx.x * chunk + tid)
        clear(counts, bins)
        clear(masks, mask_words)
        cuda.syncthreads()
        # count
        number = uint32(ld_relaxed_gpu_s32(workspace, LAUNCHES) + 1)
        e = uint32(num_experts)
        if tid < chunk and slot < numel:
            e = uint32(topk_ids[slot])
        cuda.atomic.add(counts, e, 1)
        word = uint32(e * words + (tid >> uint32(5)))
        cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        # exchange
        publish(workspace, counts, number, num_experts)
        if tid < num_experts:
            counts[tid], before[tid] = add_up_tagged(workspace, number, num_experts)
        cuda.syncthreads()
        end_exchange(workspace, number)
        # scan
        blocks = int32(0)
        if tid < num_experts:
            blocks = int32(uint32(counts[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if e < num_experts:
            row = uint32(first_block[e] * block_size + before[e] + rank_below(masks, uint32(e * words)))
            sorted_token_ids[row] = slot
        write_rest(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
display(change(add_up, add_up_tagged))
change(make_grid_barrier, make_tagged)

# %%
step("tagged counts", make_tagged, exchange, after="grid-wide barrier", predicted_gain_us=4 * LATENCY_US - L2_US(4))

# %% [markdown]
# **Explanation.** The exchange before and after; and what happens when the launch number overflows:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def overflow():
    ids = random_ids(64, 64, 4)
    for launches in (2**31 - 1, -1):
        workspace = torch.zeros(HEADER + 2 * 6 * 64, dtype=torch.int32)
        workspace[LAUNCHES] = workspace[HEADER + 1 :: 2] = launches  # as the launch with this number left it
        for _ in range(2):
            outputs = poisoned(ids, 64, 16)
            launch(make_tagged(64, 96), 6, 96, ids, *outputs, workspace, 16, 256, len(outputs[0]), 43, cooperative=True)
            print(f"launch number {launches} -> {int(workspace[LAUNCHES])}: {wrong(outputs, ids, 64, 16) or 'correct'}")
            launches = int(workspace[LAUNCHES])


# %%
in_simulator(overflow)
PHASES["tagged counts"] = phases(ladder, "tagged counts", make_tagged, exchange)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
BARRIER_US = barrier and barrier["barrier"] - barrier["empty"]
EXCHANGE_CHANGE = saved("tagged counts", "grid-wide barrier", "exchange")
say(
    "`exchange` went from {before:.2f} to {now:.2f} us. The barrier, {barrier:.2f} us when alone, is no longer needed, but "
    "twice the bytes take {bytes:.2f} us more by the model: together {both:+.2f} us. The other {rest:+.2f} us are not "
    "explained; step 7 measures the loads.",
    before=PHASES["grid-wide barrier"]["exchange"],
    now=PHASES["tagged counts"]["exchange"],
    bytes=L2_US(4),
    barrier=BARRIER_US,
    both=BARRIER_US and L2_US(4) - BARRIER_US,
    rest=None if None in (EXCHANGE_CHANGE, BARRIER_US) else EXCHANGE_CHANGE - L2_US(4) + BARRIER_US,
)

# %% [markdown]
# ### Step 7: packed counts
#
# **Bottleneck.** A thread adds up the counts of one expert, in rounds of eight loads. The next cell replaces
# the loop by its first round; the result is wrong, and the difference is what the other rounds take.

# %%
ONE_ROUND = changed_source(add_up_tagged, "while cta < uint32(cuda.gridDim.x)", "while cta < uint32(8)")
make_one_round = define(ONE_ROUND + "\n" + source_of(make_tagged), globals(), "one round")["make_tagged"]
rounds = ladder.times("rounds of loads", {"all": exchange(make_tagged), "one": exchange(make_one_round)})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "{threads} of {all_threads} threads add up. {rounds} rounds of loads instead of one take {us:.2f} us more, "
    "{latencies:.1f} latencies.",
    threads=TIMED_EXPERTS,
    all_threads=TIMED_OWN,
    rounds=-(-TIMED_CTAS // 8),
    us=rounds and rounds["all"] - rounds["one"],
    latencies=rounds and (rounds["all"] - rounds["one"]) / LATENCY_US,
)

# %% [markdown]
# **Idea.** Store two counts of 16 bits with one launch number, and load 16 bytes with four counts at once; the number of
# experts is rounded up to a multiple of 4. Two more changes follow from this one. 64 threads load all counts of a CTA, so
# 512 threads load those of 8 CTAs at once, and they combine their sums with atomic additions in shared memory.
#
# **Exercise 4.** How many slots may a CTA have at most, if all may go to one expert? Which counts of experts 0 and 1 does
# a reader unpack if a CTA packs 65537 and 4?

# %%
exercise("align_one_launch-4").check((..., ..., ...))

# %% [markdown]
# **Predicted gain.** `(CTAs / 8 - 1) L + bytes / B_L2 - t_atomics`. One round of loads is left, and a count takes 4
# bytes instead of 8. Each thread adds 8 sums in shared memory; four lanes of a warp share a bank, so these take 8 x 4
# clocks per warp.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit(device=True)
def publish_packed(workspace, counts, number, columns):
    i = uint32(cuda.threadIdx.x)
    if i < uint32(columns // 2):
        two = uint32(uint32(counts[uint32(2 * i)]) | uint32(uint32(counts[uint32(2 * i + 1)]) << uint32(16)))
        at = int64(HEADER + cuda.blockIdx.x * columns + 2 * i)
        st_relaxed_gpu_u64(workspace, at, uint64(uint64(number) << uint64(32)) | uint64(two))


@cuda.jit(device=True)
def add_up_packed(workspace, number, totals, before, columns, threads):
    """Add to the totals of all CTAs and of earlier CTAs; waits until all counts have the number of this launch."""
    low, high = cuda.local.array(8, uint64), cuda.local.array(8, uint64)
    all_ctas, earlier = cuda.local.array(4, int32), cuda.local.array(4, int32)
    tag, ctas = uint64(uint64(number) << uint64(32)), uint32(cuda.gridDim.x)
    vectors = uint32(columns // 4)  # of 16 bytes per CTA
    groups = uint32(threads // vectors)
    group = uint32(uint32(cuda.threadIdx.x) // vectors)
    vector, cta = uint32(cuda.threadIdx.x - group * vectors), group
    if group >= groups:
        cta = ctas
    for c in range(4):
        all_ctas[c] = earlier[c] = 0
    while cta < ctas:
        differ = uint64(1) << uint64(32)
        while differ >> uint64(32) != uint64(0):
            differ = uint64(0)
            for k in range(8):
                low[k] = high[k] = tag
                if uint32(cta + k * groups) < ctas:
                    at = int64(HEADER + uint32(cta + k * groups) * columns + 4 * vector)
                    low[k], high[k] = ld_relaxed_gpu_u64x2(workspace, at)
                differ |= (low[k] ^ tag) | (high[k] ^ tag)
        for k in range(8):
            is_earlier = uint32(cta + k * groups) < uint32(cuda.blockIdx.x)
            for c in range(4):
                two = uint32((low[k] if c < 2 else high[k]) & uint64(0xFFFFFFFF))
                count = int32(two >> uint32(16)) if c % 2 else int32(two & uint32(0xFFFF))
                all_ctas[c] = int32(all_ctas[c] + count)
                earlier[c] = int32(earlier[c] + (count if is_earlier else int32(0)))
        cta = uint32(cta + 8 * groups)
    if group < groups:
        for c in range(4):
            cuda.atomic.add(totals, uint32(4 * vector + c), all_ctas[c])
            cuda.atomic.add(before, uint32(4 * vector + c), earlier[c])


@cache
def make_packed(num_experts, threads):
    columns = -(-num_experts // 4) * 4  # counts that a CTA publishes
    words, bins, scan = threads // 32, columns + 1, make_scan(threads)
    mask_words, sums = bins * words, 2 * bins

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, workspace, block_size, numel, length, chunk):
        counts, both = cuda.shared.array(bins, int32), cuda.shared.array(sums, int32)
        totals, before = both[:bins], both[bins:]
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(bins, int32), cuda.shared.array(32, int32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid = uint32(cuda.threadIdx.x)
        slot = uint32(cuda.blockIdx.x * chunk + tid)
        clear(counts, bins)
        clear(both, sums)
        clear(masks, mask_words)
        cuda.syncthreads()
        # count
        number = uint32(ld_relaxed_gpu_s32(workspace, LAUNCHES) + 1)
        e = uint32(columns)
        if tid < chunk and slot < numel:
            e = uint32(topk_ids[slot])
        cuda.atomic.add(counts, e, 1)
        word = uint32(e * words + (tid >> uint32(5)))
        cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        # exchange
        publish_packed(workspace, counts, number, columns)
        add_up_packed(workspace, number, totals, before, columns, threads)
        cuda.syncthreads()
        end_exchange(workspace, number)
        # scan
        blocks = int32(0)
        if tid < num_experts:
            blocks = int32(uint32(totals[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if e < num_experts:
            row = uint32(first_block[e] * block_size + before[e] + rank_below(masks, uint32(e * words)))
            sorted_token_ids[row] = slot
        write_rest(first_block, totals, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
display(change(publish, publish_packed))
change(make_tagged, make_packed)

# %%
clocks = 8 * 4 * TIMED_OWN // 32
gain_us = (-(-TIMED_CTAS // 8) - 1) * LATENCY_US + L2_US(4) - clocks / LIMITS.boost_clock * 1e6
step("packed counts", make_packed, exchange, after="tagged counts", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The exchange before and after:

# %%
PHASES["packed counts"] = phases(ladder, "packed counts", make_packed, exchange)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "`exchange` went from {before:.2f} to {now:.2f} us. The CTAs together load {mb:.1f} MB of counts, {us:.2f} us at `B_L2`, "
    "instead of {twice:.1f} MB. Step 10 tests whether this traffic still limits the exchange.",
    before=PHASES["tagged counts"]["exchange"],
    now=PHASES["packed counts"]["exchange"],
    mb=TIMED_CTAS**2 * TIMED_EXPERTS * 4 / 1e6,
    us=L2_US(4),
    twice=TIMED_CTAS**2 * TIMED_EXPERTS * 8 / 1e6,
)

# %% [markdown]
# ### Step 8: rank while the counts arrive
#
# **Bottleneck.** From its own store until the last count arrives, a CTA is idle. Its slots' ranks within the chunk need
# no counts of others, but are computed before (the bits) and after (the rank). The next cell removes both.


# %%
def without_ranks(make):
    source = changed_source(make, "cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))", "pass")
    source = source.replace("rank_below(masks, uint32(e * words))", "uint32(0)")
    return define(source, globals(), f"{make.__name__} without ranks")[make.__name__]


calls = {"with": exchange(make_packed), "without": exchange(without_ranks(make_packed))}
ranks = ladder.times("ranks", calls)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The ranks take {us:.2f} us, the exchange {exchange:.2f} us.",
    us=ranks and ranks["with"] - ranks["without"],
    exchange=PHASES["packed counts"]["exchange"],
)

# %% [markdown]
# **Idea.** Publish the counts first, then set the bits and rank, and only then wait for the counts of the others. This
# needs one more barrier: the bits must be set before a thread ranks.
#
# **Predicted gain.** `t_ranks`, unless the counts arrive earlier than the ranks are done.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_overlapped(num_experts, threads):
    columns = -(-num_experts // 4) * 4
    words, bins, scan = threads // 32, columns + 1, make_scan(threads)
    mask_words, sums = bins * words, 2 * bins

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, workspace, block_size, numel, length, chunk):
        counts, both = cuda.shared.array(bins, int32), cuda.shared.array(sums, int32)
        totals, before = both[:bins], both[bins:]
        masks = cuda.shared.array(mask_words, int32)
        first_block, warp_sums = cuda.shared.array(bins, int32), cuda.shared.array(32, int32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid = uint32(cuda.threadIdx.x)
        slot = uint32(cuda.blockIdx.x * chunk + tid)
        clear(counts, bins)
        clear(both, sums)
        clear(masks, mask_words)
        cuda.syncthreads()
        # count
        number = uint32(ld_relaxed_gpu_s32(workspace, LAUNCHES) + 1)
        e = uint32(columns)
        if tid < chunk and slot < numel:
            e = uint32(topk_ids[slot])
        cuda.atomic.add(counts, e, 1)
        cuda.syncthreads()
        # exchange
        publish_packed(workspace, counts, number, columns)
        word = uint32(e * words + (tid >> uint32(5)))
        cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        rank = rank_below(masks, uint32(e * words))
        add_up_packed(workspace, number, totals, before, columns, threads)
        cuda.syncthreads()
        end_exchange(workspace, number)
        # scan
        blocks = int32(0)
        if tid < num_experts:
            blocks = int32(uint32(totals[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        if e < num_experts:
            sorted_token_ids[uint32(first_block[e] * block_size + before[e] + rank)] = slot
        write_rest(first_block, totals, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
change(make_packed, make_overlapped)

# %%
gain_us = ranks["with"] - ranks["without"] if ranks else 0.0
step("overlapped ranks", make_overlapped, exchange, after="packed counts", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The ranks are removed once more, from the new kernel:

# %%
calls = {"with": exchange(make_overlapped), "without": exchange(without_ranks(make_overlapped))}
hidden = ladder.times("overlapped ranks", calls)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The ranks took {before:.2f} us and still add {now:.2f} us: only {hidden:.2f} us of them are hidden. The counts arrive "
    "before the ranks are done, so the ranks must become faster.",
    before=ranks and ranks["with"] - ranks["without"],
    now=hidden and hidden["with"] - hidden["without"],
    hidden=ranks and hidden and ranks["with"] - ranks["without"] - hidden["with"] + hidden["without"],
)

# %% [markdown]
# ### Step 9: warps rank their own slots
#
# **Bottleneck.** The ranks, of which step 8 hides only a part: the masks of two experts are W words apart, for W warps, so
# that many lanes of a load share a bank, and warp w loads w + 1 words.
#
# **Idea.** A warp ranks its own slots, in rounds of 32. A mask per warp and expert has the bits of the lanes with that
# expert, and a counter per warp and expert the number of earlier slots. Afterwards one thread per expert turns the
# counters into sums over lower warps. `cuda.match_any_sync` returns the same mask without shared memory; the package
# uses it only where the masks do not fit there.
#
# **Predicted gain.** `t_left - max(0, t_new - t_hidden)`: `t_left` is what the ranks still add, `t_hidden` what step 8
# hides. For `t_new`, a rank loads two words. A thread per expert loads W counters together, in one latency of shared
# memory (assumed: 30 clocks), and stores W sums, a clock each: 2 W x `wavefronts(1)` + 30 + 2 W x experts / 32 clocks.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_warp_ranks(num_experts, threads, slots=1):
    columns, warps, scan = -(-num_experts // 4) * 4, threads // 32, make_scan(threads)
    bins = columns + 1
    sums, words = 2 * bins, warps * bins

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, workspace, block_size, numel, length, chunk):
        counts, both = cuda.shared.array(bins, int32), cuda.shared.array(sums, int32)
        totals, before = both[:bins], both[bins:]
        masks, counters = cuda.shared.array(words, int32), cuda.shared.array(words, int32)
        first_block, warp_sums = cuda.shared.array(bins, int32), cuda.shared.array(32, int32)
        e, rank = cuda.local.array(slots, uint32), cuda.local.array(slots, int32)
        # start
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid, first = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x * chunk)
        row_of_warp = uint32((tid >> uint32(5)) * uint32(bins))
        own = uint32((tid >> uint32(5)) * uint32(32 * slots) + (tid & uint32(31)))  # its first slot in the chunk
        clear(counts, bins)
        clear(both, sums)
        clear(masks, words)
        clear(counters, words)
        cuda.syncthreads()
        # count
        number = uint32(ld_relaxed_gpu_s32(workspace, LAUNCHES) + 1)
        for k in range(slots):
            e[k] = columns
            if uint32(own + 32 * k) < chunk and uint32(first + own + 32 * k) < numel:
                e[k] = topk_ids[uint32(first + own + 32 * k)]
        for k in range(slots):
            cuda.atomic.add(counts, e[k], 1)
        cuda.syncthreads()
        # exchange
        publish_packed(workspace, counts, number, columns)
        for k in range(slots):
            word = uint32(row_of_warp + e[k])
            cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
            cuda.syncwarp()  # all lanes have set their bits
            same, earlier = uint32(masks[word]), int32(counters[word])
            cuda.syncwarp()  # all lanes have loaded, so the lowest may store
            lower = uint32(same & lanemask_lt())
            rank[k] = int32(earlier + cuda.popc(lower))
            if lower == uint32(0):  # the lowest lane of each expert
                masks[word], counters[word] = 0, int32(earlier + cuda.popc(same))
            cuda.syncwarp()  # for the next slot
        cuda.syncthreads()
        if tid < num_experts:
            earlier = int32(0)
            for w in range(warps):
                word = uint32(w * bins + tid)
                of_warp = counters[word]
                counters[word] = earlier
                earlier = int32(earlier + of_warp)
        add_up_packed(workspace, number, totals, before, columns, threads)
        cuda.syncthreads()
        end_exchange(workspace, number)
        # scan
        blocks = int32(0)
        if tid < num_experts:
            blocks = int32(uint32(totals[tid] + block_size - 1) // block_size)
        start, _ = scan(blocks, warp_sums)
        if tid <= num_experts:
            first_block[tid] = start
        cuda.syncthreads()
        # write
        for k in range(slots):
            if e[k] < num_experts:
                in_chunk = int32(counters[uint32(row_of_warp + e[k])] + rank[k])
                row = uint32(first_block[e[k]] * block_size + before[e[k]] + in_chunk)
                sorted_token_ids[row] = uint32(first + own + 32 * k)
        write_rest(first_block, totals, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return kernel


# %%
change(make_overlapped, make_warp_ranks)

# %%
TIMED_WARPS = TIMED_OWN // 32
RANK_US = 2 * TIMED_WARPS * wavefronts(1) / LIMITS.boost_clock * 1e6
new_us = RANK_US + (30 + 2 * TIMED_WARPS * TIMED_EXPERTS / 32) / LIMITS.boost_clock * 1e6
still_us, all_us = (times["with"] - times["without"] if times else 0.0 for times in (hidden, ranks))
gain_us = still_us - max(0.0, new_us - (all_us - still_us))
step("ranks per warp", make_warp_ranks, exchange, after="overlapped ranks", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The phases before and after:

# %%
PHASES["overlapped ranks"] = phases(ladder, "overlapped ranks", make_overlapped, exchange)
PHASES["ranks per warp"] = phases(ladder, "ranks per warp", make_warp_ranks, exchange)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "`exchange` went from {old:.2f} to {new:.2f} us, `write` from {old_write:.2f} to {write:.2f} us. The old `write` includes "
    "the ranks here, because the compiler removes them from the copy that ends after `exchange` and does not use them. "
    "Before, masks were {pitch} words apart, so that a load needed {banks:.0f} wavefronts, and warp w loaded w + 1 words: "
    "{us:.1f} us. Now neighbouring experts have neighbouring masks: a load needs {now:.1f} wavefronts, and a rank needs two "
    "loads, whatever its warp.",
    old_write=PHASES["overlapped ranks"]["write"],
    write=PHASES["ranks per warp"]["write"],
    old=PHASES["overlapped ranks"]["exchange"],
    new=PHASES["ranks per warp"]["exchange"],
    pitch=TIMED_OWN // 32,
    banks=wavefronts(TIMED_OWN // 32),
    us=ranks_us(TIMED_OWN // 32),
    now=wavefronts(1),
)

# %% [markdown]
# ### Step 10: half the CTAs, two slots per thread
#
# **Bottleneck.** Each CTA loads the counts of all CTAs, so the traffic grows with the square of their number. To
# measure its cost, each CTA of a variant that ends after `exchange` loads only a quarter of the counts.

# %%
QUARTER = changed_source(add_up_packed, "uint32(cta + k * groups) < ctas:", "uint32(cta + k * groups) < ctas // 4:")
make_until = until(make_warp_ranks, "exchange", globals())
make_quarter = define(QUARTER + "\n" + source_of(make_until), globals(), "a quarter")["make_warp_ranks"]
traffic = ladder.times("traffic", {"all counts": exchange(make_until), "a quarter": exchange(make_quarter)})
traffic_us = traffic["all counts"] - traffic["a quarter"] if traffic else 0.0
say(
    "Loading a quarter of the counts saves {us:.2f} of the {exchange:.2f} us of `exchange`.",
    us=traffic and traffic_us,
    exchange=PHASES["ranks per warp"]["exchange"],
)

# %% [markdown]
# **Idea.** Half the CTAs, which load a quarter in all: the same kernel, compiled with `slots=2`. Larger inputs need
# several slots per thread anyway.
#
# **Predicted gain.** `t_traffic - t_rank`: what the quarter saves, less a second rank, 2 W x `wavefronts(1)` clocks.


# %%
def exchange_half(make, ids=IDS, ctas=-(-CTAS // 2), slots=2, **options):
    workspace = torch.zeros(HEADER + ctas * (EXPERTS + 3), dtype=torch.int32, device=DEVICE)
    return align(make(EXPERTS, OWN_THREADS, slots), ids, ctas, OWN_THREADS, workspace, cooperative=True, **options)


gain_us = traffic_us - RANK_US
step("two slots per thread", make_warp_ranks, exchange_half, after="ranks per warp", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** The same kernel with other numbers of CTAs, and its phases:

# %%
PHASES["two slots per thread"] = phases(ladder, "two slots per thread", make_warp_ranks, exchange_half)
SHAPES = {f"{-(-CTAS // n)} CTAs, {n} per thread": (-(-CTAS // n), n) for n in (1, 2, 4)}
by_ctas = ladder.times(
    "numbers of CTAs", {name: exchange_half(make_warp_ranks, IDS, *shape) for name, shape in SHAPES.items()}
)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "{times}. With a quarter of the traffic, and a second rank, `exchange` changes from {before:.2f} to {now:.2f} us. `write` "
    "takes {more:.2f} us more, because half the CTAs write the same outputs; the prediction left this out. {fastest} are "
    "fastest. Step 11 keeps two slots, as the package does, because larger inputs need several per thread.",
    times=by_ctas and "; ".join(f"{name}: {us:.2f} us" for name, us in by_ctas.items()),
    before=PHASES["ranks per warp"]["exchange"],
    now=PHASES["two slots per thread"]["exchange"],
    more=saved("two slots per thread", "ranks per warp", "write"),
    fastest=by_ctas and min(by_ctas, key=by_ctas.get).partition(",")[0],
)

# %% [markdown]
# ### Step 11: programmatic dependent launch
#
# **Bottleneck.** `start`: the launch, and the clearing of shared memory. Normally a kernel begins when the one before in the
# stream has ended and its stores are visible.
#
# **Idea.** With **programmatic dependent launch** (Hopper and newer) the next kernel may start early: when all CTAs of
# this one have executed `griddepcontrol.launch_dependents`, or have ended. It clears its shared memory meanwhile, and
# must execute `griddepcontrol.wait` before it accesses memory that an earlier kernel writes or still reads: that waits
# until the previous kernel has ended and its stores are visible. This kernel lets its successor start once it has read
# all counts. All CTAs of this kernel are resident by then, so the successor cannot take the SM of a CTA that others
# poll. Older GPUs cannot do this.
#
# **Predicted gain.** `t_start - t_empty,dependent`: `start` shrinks to the dependent launch of an empty kernel.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
early = changed_source(
    make_warp_ranks,
    """        cuda.syncthreads()
        # count
""",
    """        cuda.syncthreads()
        griddepcontrol_wait()
        # count
""",
    "make_dependent",
).replace(
    """        end_exchange(workspace, number)
""",
    """        end_exchange(workspace, number)
        griddepcontrol_launch_dependents()
""",
)
make_dependent = define(early, globals(), "dependent")["make_dependent"]
# For the explanation: dependents may start at once
at_once = early.replace("        griddepcontrol_launch_dependents()\n", "").replace(
    "griddepcontrol_wait()\n", "griddepcontrol_wait()\n        griddepcontrol_launch_dependents()\n"
)
make_at_once = define(at_once, globals(), "dependents at once")["make_dependent"]

# %%
change(make_warp_ranks, make_dependent)


# %%
def dependent(make, ids=IDS):
    return exchange_half(make, ids, dependent=True)


# `needs`: the compute capability, here that of Hopper; the ladder leaves the step out on older GPUs
gain_us = (PHASES["two slots per thread"]["start"] or DEPENDENT_US) - DEPENDENT_US
before = "two slots per thread"
step("dependent launch", make_dependent, dependent, after=before, predicted_gain_us=gain_us, needs=(9, 0))

# %% [markdown]
# **Explanation.** The same machine code without the launch attribute, and a kernel that lets its successor start at once:

# %%
calls = {"in order": exchange_half(make_dependent), "after the exchange": dependent(make_dependent)}
DEPENDENT = ladder.times("dependent launches", calls | {"at once": dependent(make_at_once)})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "In order, the new instructions change nothing: {order:.2f} us. With the early start the kernel takes {late:.2f} us. "
    "Letting the successor start at once is no faster, {at_once:.2f} us: `scan` and `write`, which follow the exchange, "
    "take {rest:.2f} us, long enough for the `start` of the successor, {start:.2f} us.",
    order=DEPENDENT and DEPENDENT["in order"],
    late=DEPENDENT and DEPENDENT["after the exchange"],
    at_once=DEPENDENT and DEPENDENT["at once"],
    rest=PHASES["two slots per thread"]["scan"]
    and PHASES["two slots per thread"]["scan"] + PHASES["two slots per thread"]["write"],
    start=PHASES["two slots per thread"]["start"],
)

# %% [markdown]
# ## 6. The whole ladder
#
# For 256 experts `moe_numba.moe_align_block_size` uses four kernels of [`moe_numba/align`](../moe_numba/align). Up to 16 slots: a warp per
# slot, without barriers. Up to 512 slots: two warps per expert; every CTA counts all slots, and one barrier separates the
# counting from the stores. Up to 16384 slots: the kernel of step 4 with a dependent launch. Beyond: the kernel of step 11, which also
# sorts its chunk in shared memory, so that neighbouring lanes store to neighbouring rows. All accept invalid ids and an
# expert map.


# %%
def package(ids=IDS):
    outputs = poisoned(ids, EXPERTS, BLOCK)
    return lambda: moe_numba.moe_align_block_size(ids, BLOCK, EXPERTS, out=outputs)


RUNS["final"] = package
ladder.step("final", package(), dtype="int32", floor_us=FLOOR_US, bytes=bytes_of(TOKENS))
ladder.measure_all()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "The package's kernel takes {final:.2f} us, step 11 {last:.2f}: it also sorts its chunks and checks ids, which does not "
    "pay at this size.",
    final=ladder.median_us("final"),
    last=ladder.median_us("dependent launch"),
)

# %%
PEERS = {}
for step_of_peer in records.peers(ALIGN) if ALIGN else ():
    row = records.find(ALIGN, step=step_of_peer, size={"tokens": 4096}, config=CONFIG)
    PEERS[f"{step_of_peer.removeprefix('peer:')} {row['version'].rpartition('@')[2]}"] = row["kernel_us"]["median"]
ladder.plot(floor_us=FLOOR_US, peers=PEERS)

# %%
known = {name: parts for name, parts in PHASES.items() if None not in parts.values()}
phase_bars(known, "Where the time of each step goes") if known else print("no phases are recorded yet")

# %% [markdown]
# All steps with other inputs. Redundant counting grows with the slots, an exchange has a fixed cost: the package uses both.

# %%
for what, ids in OTHERS.items():
    found = ladder.times(what, {name: run(ids) for name, run in RUNS.items()})
    print(f"{what}: " + (", ".join(f"{name} {us:.2f}" for name, us in found.items()) if found else "not measured yet"))
ladder.save()

# %% [markdown]
# ## 7. The sweep over tokens
#
# Measured by `python -m moe_numba bench align`, with the kernels of SGLang and vLLM in the same run (their commits are in the
# figure above). `sglang-v2` also uses programmatic dependent launch; "in order" is the package's kernel without it.

# %%
LINES = {"moe_numba": "final", "moe_numba, in order": "final, in order", "torch": "torch"}
LINES |= {name.removeprefix("peer:"): name for name in (records.peers(ALIGN) if ALIGN else [])}
lines = {label: records.series(ALIGN, step=name, config=CONFIG) for label, name in LINES.items()} if ALIGN else {}
copied_us = lambda tokens: bytes_of(tokens, 8, 256, 16) / LIMITS.copy_bandwidth * 1e6
floor = {tokens: max(copied_us(tokens), DEPENDENT_US) for tokens in lines.get("moe_numba", ())}
if lines:
    title = "Align over tokens: 256 experts, top-8, expert blocks of 16"
    display(plots.sweep_figure(lines, floor=floor, title=title, caption=plots.caption(ALIGN)))

# %% jupyter={"source_hidden": true} tags=["hide-input"]
times = {t: {label: us["median"] for label, points in lines.items() if (us := points.get(t))} for t in floor}
table = ["| tokens | " + " | ".join(lines) + " |", "|---:" * (len(lines) + 1) + "|"]
for tokens, found in sorted(times.items()):
    fastest = min(found.values())
    cells = (f"**{found[name]:.2f}**" if found[name] == fastest else f"{found[name]:.2f}" for name in lines)
    table.append(f"| {tokens} | {' | '.join(cells)} |")
Markdown("\n".join(["Kernel times in microseconds; the fastest of each row in bold:", "", *table]) if lines else "")

# %%
slower = []
for row in ALIGN["rows"] if ALIGN else ():
    tokens, config = row["size"].get("tokens"), row["config"]
    ours = recorded_us("final", tokens, block_size=config.get("block_size"))
    if row["step"] in records.peers(ALIGN) and config["num_experts"] == 256 and ours > row["kernel_us"]["median"]:
        times = f"{row['kernel_us']['median']:.2f} against {ours:.2f} us"
        what = f"{row['step'][5:]} with {tokens} token{'s' * (tokens > 1)} and expert blocks of {config['block_size']}"
        slower.append(f"{what} ({times})")

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say("Where the package is slower: {slower}.", slower=(", ".join(slower) or "nowhere in this record") if ALIGN else None)

# %% [markdown]
# ## 8. Fused with the gate
#
# During decoding, the gate and the alignment run one after the other for about 64 tokens. The ids pass through global
# memory between two launches. A second ladder starts from these, both dependent launches where the GPU supports them.
# The gate is the device function of notebook 01's final kernel: one warp routes one token. The alignment is a
# simplified step 4 with one load at a time.

# %% jupyter={"source_hidden": true} tags=["hide-input"]
GROUPS = 8
PER_LANE = -(-EXPERTS // GROUPS // 4)  # experts per lane: four lanes hold a group
WIDTH = max(w for w in (16, 8, 4) if 4 * PER_LANE % w == 0 and 4 * (EXPERTS // GROUPS) % w == 0)
GATE_CONFIG = GateConfig(EXPERTS, GROUPS, 4, TOPK, load_bytes=WIDTH, bias_load_bytes=WIDTH)


@cache
def make_route(config):
    """The gate of notebook 01: one warp routes one token; lane k gets column k of the result."""
    lane_slice, fetch, unpack, load_bias, route, experts_per_lane, raw_words = make_router(config)
    num_experts = config.num_experts

    @cuda.jit(device=True)
    def route_token(logits, bias, token):
        lane_bias, scores = cuda.local.array(experts_per_lane, float32), cuda.local.array(experts_per_lane, float32)
        raw = cuda.local.array(raw_words, uint32)
        lane, group, lane_in_group, first_expert, num_valid = lane_slice()
        start = int64(token) * num_experts
        fetch(logits, start + first_expert, num_valid, raw)
        load_bias(bias, first_expert, num_valid, lane_bias)
        unpack(raw, num_valid, scores)
        one = float32(1)
        return route(logits, start, scores, lane_bias, lane, group, lane_in_group, num_valid, one, one)

    return route_token


@cache
def make_align_ids(num_experts, threads):
    """Step 4 with one load at a time, for ids in global or shared memory."""
    words, bins, scan = threads // 32, num_experts + 1, make_scan(threads)
    both, mask_words = 2 * bins, num_experts * words

    @cuda.jit(device=True)
    def align_ids(ids, halves, masks, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk):
        """`halves` and `masks` are shared and zero, and this CTA is synchronised."""
        before, counts = halves[:bins], halves[bins:]
        first_block, warp_sums = cuda.shared.array(bins, int32), cuda.shared.array(32, int32)
        block_size, numel, length, chunk = uint32(block_size), uint32(numel), uint32(length), uint32(chunk)
        tid, first = uint32(cuda.threadIdx.x), uint32(cuda.blockIdx.x * chunk)
        slot, i, e = uint32(first + tid), tid, uint32(num_experts)
        while i < numel:
            half = uint32(0) if i < first else uint32(bins)
            cuda.atomic.add(halves, uint32(uint32(ids[i]) + half), 1)
            i = uint32(i + threads)
        if tid < chunk and slot < numel:
            e = uint32(ids[slot])
            word = uint32(e * words + (tid >> uint32(5)))
            cuda.atomic.or_(masks, word, int32(uint32(1) << uint32(tid & 31)))
        cuda.syncthreads()
        blocks = int32(0)
        if tid < num_experts:
            counts[tid] += before[tid]
            blocks = int32(uint32(counts[tid] + block_size - 1) // block_size)
        start, all_blocks = scan(blocks, warp_sums)
        if tid < num_experts:
            first_block[tid] = start
        if tid == 0:
            first_block[num_experts] = all_blocks
        cuda.syncthreads()
        if e < num_experts:
            row = uint32(first_block[e] * block_size + before[e] + rank_below(masks, uint32(e * words)))
            sorted_token_ids[row] = slot
        write_rest(first_block, counts, sorted_token_ids, expert_ids, total, num_experts, block_size, numel, length)

    return align_ids, both, mask_words


@cache
def make_gate(config, warps):
    """The first of two launches: a warp routes a token."""
    topk, route_token = config.topk, make_route(config)

    @cuda.jit
    def kernel(logits, bias, weights, topk_ids, tokens):
        lane, token = int32(cuda.threadIdx.x & 31), int32(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5))
        griddepcontrol_wait()
        while token < tokens:
            weight, expert = route_token(logits, bias, token)
            if lane < topk:
                weights[int32(token * topk + lane)] = weight
                topk_ids[int32(token * topk + lane)] = expert
            cuda.syncwarp()
            token = int32(token + cuda.gridDim.x * warps)
        griddepcontrol_launch_dependents()

    return kernel


@cache
def make_align(num_experts, threads):
    """The second of two launches."""
    align_ids, both, mask_words = make_align_ids(num_experts, threads)

    @cuda.jit
    def kernel(topk_ids, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk):
        halves, masks = cuda.shared.array(both, int32), cuda.shared.array(mask_words, int32)
        clear(halves, both)
        clear(masks, mask_words)
        cuda.syncthreads()
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        align_ids(topk_ids, halves, masks, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk)

    return kernel


# %% jupyter={"source_hidden": true} tags=["hide-input"]
def gate_outputs(tokens):
    weights = torch.full((tokens, TOPK), float("nan"), device=DEVICE)
    ids = torch.full((tokens, TOPK), -7, dtype=torch.int32, device=DEVICE)
    return weights, ids, *poisoned(ids, EXPERTS, BLOCK)


def routed_outputs(tokens):
    """As `gate_outputs`, with the gate's results: for times of the alignment alone."""
    outputs = gate_outputs(tokens)
    for output, expected in zip(outputs, EXPECTED[tokens]):
        output.copy_(expected)
    return outputs


def numbers(outputs, ctas):
    numel = outputs[1].numel()
    return BLOCK, numel, len(outputs[2]), -(-numel // ctas)


def gate_call(tokens, outputs, ctas, warps):
    kernel = make_gate(GATE_CONFIG, warps)
    arguments = LOGITS[tokens], BIAS, *outputs[:2], tokens
    return lambda: launch(kernel, ctas, 32 * warps, *arguments, dependent=True, launch_bounds=32 * warps)


def align_call(outputs, ctas, threads):
    kernel, arguments = make_align(EXPERTS, threads), (*outputs[1:], *numbers(outputs, ctas))
    return lambda: launch(kernel, ctas, threads, *arguments, dependent=True, launch_bounds=threads)


def two_launches(tokens=FEW_TOKENS):
    """The gate with a warp per token, then the alignment with four times as many CTAs."""
    outputs = gate_outputs(tokens)
    calls = gate_call(tokens, outputs, CLUSTER, WARPS), align_call(outputs, 4 * CLUSTER, 32 * WARPS)

    def call():
        for launch_one in calls:
            launch_one()
        return outputs

    return call


# %%
WARPS, CLUSTER = -(-EXPERTS // 32), 4 if SIMULATED else 8  # warps per CTA, CTAs per cluster: a warp for each token
assert FEW_TOKENS <= WARPS * CLUSTER and FEW_TOKENS * TOPK <= THREADS
BIAS = torch.rand(EXPERTS, device=DEVICE) * 0.2
LOGITS = {tokens: torch.randn(tokens, EXPERTS, device=DEVICE) for tokens in (FEW_TOKENS, 1)}
OPTIONS = {"num_expert_group": GROUPS, "topk_group": 4}
EXPECTED = {n: moe_numba.biased_grouped_topk(logits, BIAS, TOPK, **OPTIONS) for n, logits in LOGITS.items()}


def check_fused(outputs):
    weights, ids, *aligned = outputs
    expected_weights, expected_ids = EXPECTED[len(ids)]
    if not torch.equal(ids, expected_ids):
        return f"{int((ids != expected_ids).sum())} ids differ from those of the gate"
    if not torch.allclose(weights, expected_weights, rtol=1e-5):
        return "weights differ from those of the gate"
    return check(aligned, expected_ids)


fused = Ladder(
    "gate_align_ladder",
    check_fused,
    title=f"Gate and alignment: {64 if SIMULATED else FEW_TOKENS} tokens, {TIMED_EXPERTS} experts",
    reference_name="two launches",
    config={"num_experts": EXPERTS, "topk": TOPK, "block_size": BLOCK},
    size={"tokens": FEW_TOKENS},
)
outputs = routed_outputs(FEW_TOKENS)
outputs[1][0] = outputs[1][0].flip(0)
print("the ids of a token in another order:", check_fused(outputs))
fused.step("two launches", two_launches())

# %% [markdown]
# ### Fused step 1: one CTA
#
# **Bottleneck.** The parts alone, with as many CTAs as above and with fewer:

# %%
parts = {
    f"gate, {CLUSTER} CTAs": gate_call(FEW_TOKENS, gate_outputs(FEW_TOKENS), CLUSTER, WARPS),
    "gate, 1 CTA": gate_call(FEW_TOKENS, gate_outputs(FEW_TOKENS), 1, THREADS // 32),
    f"align, {4 * CLUSTER} CTAs": align_call(routed_outputs(FEW_TOKENS), 4 * CLUSTER, 32 * WARPS),
    f"align, {CLUSTER} CTAs": align_call(routed_outputs(FEW_TOKENS), CLUSTER, 32 * WARPS),
    "align, 1 CTA": align_call(routed_outputs(FEW_TOKENS), 1, THREADS),
}
measured = fused.times("parts", parts)
PARTS = list((measured or dict.fromkeys(parts, 0.0)).values())

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say("{times}.", times=measured and ", ".join(f"{name}: {us:.2f} us" for name, us in measured.items()))

# %% [markdown]
# **Idea.** One CTA with all warps routes all tokens and keeps their ids in shared memory. This works on every GPU.
#
# **Predicted gain.** `(g8 + a32) - (g1 + a1 - t_empty,dependent - 2 L)`, where `g8` is the time of the gate with 8 CTAs,
# `a32` that of the alignment with 32: one launch less, and no store and load of the ids; but all work is on one SM.


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_one_cta(config, warps, max_slots):
    topk, threads, route_token = config.topk, 32 * warps, make_route(config)
    align_ids, both, mask_words = make_align_ids(config.num_experts, threads)

    @cuda.jit
    def kernel(
        logits, bias, weights, topk_ids, sorted_token_ids, expert_ids, total, tokens, block_size, numel, length, chunk
    ):
        halves, masks = cuda.shared.array(both, int32), cuda.shared.array(mask_words, int32)
        ids = cuda.shared.array(max_slots, int32)
        lane, token = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        clear(halves, both)
        clear(masks, mask_words)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        while token < tokens:
            weight, expert = route_token(logits, bias, token)
            if lane < topk:
                ids[int32(token * topk + lane)] = expert
                weights[int32(token * topk + lane)] = weight
                topk_ids[int32(token * topk + lane)] = expert
            cuda.syncwarp()
            token = int32(token + warps)
        cuda.syncthreads()
        align_ids(ids, halves, masks, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk)

    return kernel


# %%
change(make_align, make_one_cta)


# %%
def fused_call(kernel, ctas, threads, tokens=FEW_TOKENS, **options):
    outputs = gate_outputs(tokens)
    arguments = LOGITS[tokens], BIAS, *outputs, tokens, *numbers(outputs, ctas)

    def call():
        launch(kernel, ctas, threads, *arguments, dependent=True, launch_bounds=threads, **options)
        return outputs

    return call


def one_cta(tokens=FEW_TOKENS):
    return fused_call(make_one_cta(GATE_CONFIG, THREADS // 32, FEW_TOKENS * TOPK), 1, THREADS, tokens)


assert check_fused(one_cta(1)()) is None
gain_us = PARTS[0] + PARTS[2] - (PARTS[1] + PARTS[4] - DEPENDENT_US - 2 * LATENCY_US)
fused.step("one CTA", one_cta(), after="two launches", predicted_gain_us=gain_us)

# %% [markdown]
# **Explanation.** Gate and alignment alone, each in one CTA, and both together:

# %%
again = fused.times("one CTA", {"gate": parts["gate, 1 CTA"], "align": parts["align, 1 CTA"], "both": one_cta()})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Alone they take {gate:.2f} and {align:.2f} us, together {both:.2f} us. One launch less saves {saved:.2f} us, predicted "
    "{predicted:.2f}; one SM instead of many costs far more.",
    gate=again and again["gate"],
    align=again and again["align"],
    both=again and again["both"],
    saved=again and again["gate"] + again["align"] - again["both"],
    predicted=DEPENDENT_US + 2 * LATENCY_US,
)

# %% [markdown]
# ### Fused step 2: a cluster
#
# **Bottleneck.** One SM routes all tokens, several per warp, and writes all outputs.
#
# **Idea.** A **thread block cluster** (Hopper and newer) is a group of CTAs that are co-scheduled on one GPC (a group of SMs) and can
# access each other's shared memory: **distributed shared memory**. Each CTA routes its share of the tokens, one per warp, and stores the ids in
# the shared memory of all. After a **cluster barrier** every CTA has all ids. Then each counts all slots and writes its
# share, as in step 1. A CTA's shared memory exists only while the CTA runs. A first barrier therefore ensures that all have
# started; no CTA accesses remote memory after the second, so CTAs may end at any time. Older GPUs, which have no clusters,
# keep fused step 1 or two launches.

# %%
draw.cluster_ids()


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cache
def make_cluster(config, warps, ctas, max_slots):
    topk, threads, route_token = config.topk, 32 * warps, make_route(config)
    align_ids, both, mask_words = make_align_ids(config.num_experts, threads)

    @cuda.jit
    def kernel(
        logits, bias, weights, topk_ids, sorted_token_ids, expert_ids, total, tokens, block_size, numel, length, chunk
    ):
        halves, masks = cuda.shared.array(both, int32), cuda.shared.array(mask_words, int32)
        ids = cuda.shared.array(max_slots, int32)
        lane = int32(cuda.threadIdx.x & 31)
        token = int32(int32(cuda.threadIdx.x >> 5) * ctas + int32(cluster_ctarank()))
        barrier_cluster_arrive()  # this CTA has started
        clear(halves, both)
        clear(masks, mask_words)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        weight, expert = route_token(logits, bias, min(token, tokens - 1))  # warps without a token route the last one
        barrier_cluster_wait()
        if token < tokens and lane < topk:
            for cta in range(ctas):
                st_cluster_s32(ids, int32(token * topk + lane), uint32(cta), expert)
            if cuda.blockIdx.x < ctas:  # of several clusters the first stores the gate's outputs
                weights[int32(token * topk + lane)] = weight
                topk_ids[int32(token * topk + lane)] = expert
        cuda.syncwarp()
        barrier_cluster_arrive()
        barrier_cluster_wait()
        align_ids(ids, halves, masks, sorted_token_ids, expert_ids, total, block_size, numel, length, chunk)

    return kernel


# %%
change(make_one_cta, make_cluster)

# %% [markdown]
# **Predicted gain.** `(g1 - g8) + (a1 - a8) - 2 L`: gate and alignment take as long as on 8 CTAs; each of the two barriers of
# the cluster is taken as one latency.


# %%
def clusters(number, tokens=FEW_TOKENS):
    kernel = make_cluster(GATE_CONFIG, WARPS, CLUSTER, WARPS * CLUSTER * TOPK)
    return fused_call(kernel, number * CLUSTER, 32 * WARPS, tokens, cluster=CLUSTER)


gain_us = PARTS[1] - PARTS[0] + PARTS[4] - PARTS[3] - 2 * LATENCY_US
with fused.attempt("one cluster"):
    assert check_fused(clusters(1, 1)()) is None
    fused.step("one cluster", clusters(1), after="one CTA", predicted_gain_us=gain_us, needs=(9, 0))

# %% [markdown]
# **Explanation.** A chain of cluster barriers gives the time of one:


# %% jupyter={"source_hidden": true} tags=["hide-input"]
@cuda.jit
def chain_of_cluster_barriers(out, n):
    for _ in range(n):
        barrier_cluster_arrive()
        barrier_cluster_wait()
    out[0] = n


number = torch.zeros(1, dtype=torch.int32, device=DEVICE)
chain = lambda n: launch(chain_of_cluster_barriers, CLUSTER, 32 * WARPS, number, n, cluster=CLUSTER)
barriers = fused.times("cluster barriers", {"32": lambda: chain(32), "64": lambda: chain(64)})
say(
    "A barrier of {ctas} CTAs takes {ns:.0f} ns, {ratio:.1f} L instead of one; beside the gain this is little.",
    ctas=8 if SIMULATED else CLUSTER,
    ns=barriers and 1000 * (barriers["64"] - barriers["32"]) / 32,
    ratio=barriers and (barriers["64"] - barriers["32"]) / 32 / LATENCY_US,
)

# %% [markdown]
# ### Fused step 3: four clusters
#
# **Bottleneck.** Few CTAs write many elements of padding and tail.
#
# **Idea.** Clusters do not communicate: four of them route all tokens redundantly, and each CTA writes
# a quarter of its former share.
#
# **Predicted gain.** `a8 - a32`, what the alignment alone gains from four times as many CTAs (first cell of fused step 1).

# %%
with fused.attempt("four clusters"):
    assert check_fused(clusters(4, 1)()) is None
    gain_us = PARTS[3] - PARTS[2]
    fused.step("four clusters", clusters(4), after="one cluster", predicted_gain_us=gain_us, needs=(9, 0))

# %% [markdown]
# **Explanation.** Other numbers of clusters:

# %%
numbers_of_clusters = fused.times("clusters", {f"{n} clusters": clusters(n) for n in (1, 2, 4, 8)})

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "{times}. Eight clusters instead of four change the time by {change:+.0f} %; the package uses at least four.",
    change=numbers_of_clusters and 100 * (numbers_of_clusters["8 clusters"] / numbers_of_clusters["4 clusters"] - 1),
    times=numbers_of_clusters
    and ", ".join(
        f"{name.removesuffix('s' * (name[0] == '1'))}: {us:.2f} us" for name, us in numbers_of_clusters.items()
    ),
)

# %% [markdown]
# ### The package
#
# `moe_numba.biased_grouped_topk_align` uses one CTA up to 32 slots, at least four clusters up to 64 tokens, and two launches
# beyond. It returns the same bits as the two functions in a row.
#
# **Predicted gain.** `t_empty,dependent`: one launch less.


# %%
def two_functions(tokens=FEW_TOKENS):
    outputs = gate_outputs(tokens)

    def call():
        moe_numba.biased_grouped_topk(LOGITS[tokens], BIAS, TOPK, **OPTIONS, out=outputs[:2])
        moe_numba.moe_align_block_size(outputs[1], BLOCK, EXPERTS, out=outputs[2:])
        return outputs

    return call


def one_function(tokens=FEW_TOKENS):
    outputs = gate_outputs(tokens)
    options = OPTIONS | {"out": outputs}
    return lambda: moe_numba.biased_grouped_topk_align(LOGITS[tokens], BIAS, TOPK, BLOCK, **options)


fused.step("two functions", two_functions())
fused.step("final", one_function(), after="two functions", predicted_gain_us=DEPENDENT_US)

# %% [markdown]
# **Explanation.** The two functions alone, and the call times, which matter without a CUDA graph:

# %%
logits, outputs = LOGITS[FEW_TOKENS], routed_outputs(FEW_TOKENS)
gate_alone = lambda: moe_numba.biased_grouped_topk(logits, BIAS, TOPK, **OPTIONS, out=outputs[:2])
align_alone = lambda: moe_numba.moe_align_block_size(outputs[1], BLOCK, EXPERTS, out=outputs[2:])
alone = fused.times("functions", {"gate": gate_alone, "align": align_alone})
fused.measure_all()
fused.save()

# %% jupyter={"source_hidden": true} tags=["hide-input"]
say(
    "Kernel time: the gate alone {gate:.2f} us, the alignment alone {align:.2f} us, both {two:.2f} us, fused "
    "{one:.2f} us. The launch saves less than predicted, because the fused kernel waits at two cluster barriers, "
    "{barriers:.2f} us by the chain above. Call time: {call_two:.1f} us for two calls, {call_one:.1f} us for one.",
    barriers=barriers and (barriers["64"] - barriers["32"]) / 16,
    gate=alone and alone["gate"],
    align=alone and alone["align"],
    two=fused.median_us("two functions"),
    one=fused.median_us("final"),
    call_two=fused.median_us("two functions", "call_us"),
    call_one=fused.median_us("final", "call_us"),
)

# %%
fused.plot(floor_us=DEPENDENT_US)

# %% [markdown]
# ## 9. Sources
#
# - SGLang's versions of the kernel: notebook 03 and the links there.
# - D. Merrill, M. Garland: *Single-pass parallel prefix scan with decoupled look-back*, 2016.
# - NVIDIA: *CUDA C++ Programming Guide*: cooperative groups, thread block clusters, programmatic dependent launch;
#   *PTX ISA*: memory consistency model, `griddepcontrol`, `barrier.cluster`.
# - Users who need the same order in every run: [sglang 33511](https://github.com/sgl-project/sglang/pull/33511),
#   [vllm 52532](https://github.com/vllm-project/vllm/pull/52532).
# - The final kernels: [`moe_numba/align`](../moe_numba/align), [`moe_numba/align/with_gate.py`](../moe_numba/align/with_gate.py).
