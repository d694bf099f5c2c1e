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
# [Notebook 02](02_align.ipynb) ended with version 0x5 of SGLang's `moe_align_block_size`: a first kernel counts the token
# slots of each expert, a second one places them. This notebook does both in one launch, step by step, and ends with the
# kernels of the package. The last section fuses the alignment with the gate of [notebook 01](01_gate.ipynb).

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)

# %% jupyter={"source_hidden": true} tags=["hide-input"]
import contextlib
import warnings
from functools import cache

import torch
from IPython.display import display
from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba import simulator
from moe_numba.align.device_functions import make_scan
from moe_numba.align.reference import sizes
from moe_numba.course.align_runs import poisoned, random_ids, wrong
from moe_numba.course.bench import plots, records
from moe_numba.course.bench.baselines.limits import chip_limits
from moe_numba.course.bench.sources import notebook_sources
from moe_numba.course.draw import align_one_launch as draw
from moe_numba.course.draw.phases import phase_bars
from moe_numba.course.draw.player import Player
from moe_numba.course.exercises import exercise
from moe_numba.course.instruction_mix import instruction_mix
from moe_numba.course.ladder import Ladder
from moe_numba.course.phase_times import phase_instructions, phases
from moe_numba.course.prose import say
from moe_numba.course.simulate import changed_source, define, in_simulator
from moe_numba.course.source_diff import change
from moe_numba.gate.kernel import GateConfig, make_router
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
    "**Result** (kernel time of 4096 tokens, 256 experts, top-8, expert blocks of 16, recorded on {gpu}): {ours:.1f} us in one launch. "
    "SGLang's compiled kernel, which version 0x5 became, takes {aot:.1f} us in two launches, SGLang's current one (v2) {v2:.1f} us, "
    "and vLLM's {vllm:.1f} us.",
    gpu=ALIGN and ALIGN["gpu"].replace("NVIDIA", "an NVIDIA"),
    ours=recorded_us("final", 4096),
    aot=recorded_us("peer:sglang-aot", 4096),
    v2=recorded_us("peer:sglang-v2", 4096),
    vllm=recorded_us("peer:vllm", 4096),
)

# %% [markdown]
# ## 1. The problem in one figure
#
# The function gets `topk_ids`, the experts that each token visits. An element of it is a **slot**: slot `s` belongs to
# token `s // topk`. `sorted_token_ids` lists the slots by expert. The part of each expert is padded to whole **expert
# blocks**, the row tiles of the grouped GEMM that follows, and `expert_ids` names the expert of each block.

# %%
draw.two_launches()

# %% [markdown]
# Version 0x5 counts in one CTA. The other SMs are idle, except for one that fills `sorted_token_ids` with padding. A
# second launch reads all ids again and takes the position of each slot from a counter in global memory. The order of an
# expert's slots therefore changes from run to run. The kernels of this notebook return the same bits in every run.
#
# ## 2. The reference and the starting point
#
# All shapes below are variables; try others. `wrong` compares the outputs with the package's torch reference, element by
# element. Outputs are poisoned before each step. Only 0x5 is compared without the order and the unused tail, which it
# leaves undefined.

# %%
SIMULATED = simulator.ENABLED
DEVICE = "cpu" if SIMULATED else "cuda"
EXPERTS, TOPK, BLOCK = (64, 4, 16) if SIMULATED else (256, 8, 16)  # DeepSeek-V3 has 256 experts and top-8
TOKENS, FEW_TOKENS = (64, 8) if SIMULATED else (4096, 64)
CTAS, THREADS = (4, 128) if SIMULATED else (64, 1024)  # more threads than experts

torch.manual_seed(0)
IDS = random_ids(TOKENS, EXPERTS, TOPK, DEVICE)
NUMEL = IDS.numel()
OTHERS = {  # each step is checked for these, too
    f"{FEW_TOKENS} tokens": IDS[:FEW_TOKENS].contiguous(),
    "1 token": IDS[:1].contiguous(),
    "all to the same experts": IDS[:1].repeat(TOKENS, 1).contiguous(),
}


def check(outputs, ids=IDS):
    return wrong(outputs, ids, EXPERTS, BLOCK)


ladder = Ladder(
    "align_one_launch_ladder",
    check,
    title=f"Align in one launch: {TOKENS} tokens, {EXPERTS} experts, top-{TOPK}, expert blocks of {BLOCK}",
    reference_name="0x5",
    config={"num_experts": EXPERTS, "topk": TOPK, "block_size": BLOCK},
    size={"tokens": TOKENS},
)

# %% [markdown]
# The folded cell defines version 0x5 as notebook 02 derives it. The comments `# count`, `# scan` and `# write` mark its
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


def main_of_0x5(make, ids=IDS):
    """Return a call that launches the main kernel, and the arrays that the sort kernel needs."""
    kernel, outputs = make(EXPERTS, THREADS_0X5), poisoned(ids, EXPERTS, BLOCK)
    cumsum = torch.empty(EXPERTS + 1, dtype=torch.int32, device=DEVICE)
    numbers = BLOCK, ids.numel(), len(outputs[0])
    return lambda: launch(kernel, 2, THREADS_0X5, ids, *outputs, cumsum, *numbers), (*outputs, cumsum)


def run_0x5(ids=IDS):
    main, (*outputs, cumsum) = main_of_0x5(make_0x5, ids)

    def call():
        main()
        launch(count_and_sort, -(-ids.numel() // 256), 256, ids, outputs[0], cumsum, ids.numel())
        return *outputs, "any order", "any tail"

    return call


# %%
RUNS = {"0x5": run_0x5}
for what, ids in OTHERS.items():
    assert not check(run_0x5(ids)(), ids), what
ladder.step("0x5", run_0x5(), dtype="int32")

# %% [markdown]
# ## 3. Lower bound
#
# The ids are read once and each output element is written once. All of them fit in the L2 cache. The next cell compares
# their bytes with an empty kernel, and measures the latency of a load from L2 by a chain of loads, each of which needs
# the one before. Predictions below are multiples of this latency.


# %%
@cuda.jit
def empty(links):
    griddepcontrol_wait()  # step 10 explains these two
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


FLOOR_US = max(bytes_of(TOKENS) / LIMITS.copy_bandwidth * 1e6, EMPTY_US)
say(
    "{tokens} tokens: {kb:.0f} KB, {bytes_us:.2f} us at the speed of a copy. An empty kernel takes {empty:.2f} us, a load from L2 "
    "{latency:.0f} ns. The kernel is limited by latency: by the number of things that must happen one after another.",
    tokens=TOKENS,
    kb=bytes_of(TOKENS) / 1e3,
    bytes_us=bytes_of(TOKENS) / LIMITS.copy_bandwidth * 1e6,
    empty=basics and EMPTY_US,
    latency=1000 * LATENCY_US,
)

# %% [markdown]
# ## 4. Every CTA counts all slots
#
# ### Step 1: one launch
#
# **Bottleneck.** How long does each of the two kernels of 0x5 take? The sort kernel cannot be repeated alone, because it
# changes the counters that it reads, so it is the difference.

# %%
KERNELS = ladder.times("kernels of 0x5", {"both": run_0x5(), "main": main_of_0x5(make_0x5)[0]})
SORT_US = KERNELS["both"] - KERNELS["main"] if KERNELS else 0.0
PHASES = {"0x5": phases(ladder, "0x5", make_0x5, lambda make: main_of_0x5(make)[0])}
PHASES["0x5"]["sort kernel"] = KERNELS and SORT_US
say(
    "The sort kernel takes {sort:.1f} of {both:.1f} us, the main kernel {main:.1f}, of which counting takes {count:.1f}.",
    sort=KERNELS and SORT_US,
    both=KERNELS and KERNELS["both"],
    main=KERNELS and KERNELS["main"],
    count=PHASES["0x5"]["count"],
)

# %% [markdown]
# **Idea.** One launch of many CTAs, which need nothing from each other:
#
# - **Each CTA counts all slots.** That is redundant, but the SMs were idle.
# - **Each output element has one writer.** From the counts every CTA knows which element holds a slot, padding, or tail.
#   Nothing is filled first and overwritten later, so nothing must be ordered. A CTA places the slots of its own chunk;
#   padding and tail are distributed over all warps of the grid.
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
# The kernel in full. `make_scan` is the two-level scan of notebook 02, from the package; it returns the sum over lower
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
        tid, first = cuda.threadIdx.x, cuda.blockIdx.x * chunk
        slot = first + tid
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
    """Return a call that launches a kernel on ids and returns its outputs, which are poisoned once."""
    outputs, chunk = poisoned(ids, EXPERTS, BLOCK), -(-ids.numel() // ctas)
    numbers = BLOCK, ids.numel(), len(outputs[0]), chunk

    def call():
        launch(kernel, ctas, threads, ids, *outputs, *workspace, *numbers, **options)
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


# %% [markdown]
# **Predicted gain.** The sort kernel goes. Two loads from L2 come instead, one after the other: the slot's own id for its
# bit, and again for its place.

# %%
step("one launch", make_one_launch, count_all, after="0x5", predicted_gain_us=SORT_US - 2 * LATENCY_US)

# %% [markdown]
# **Explanation.** The phases of the kernel: `start` is the launch and the clearing of shared memory, `scan` includes the
# bits, `write` the rank.

# %%
PHASES["one launch"] = phases(ladder, "one launch", make_one_launch, count_all)
say(
    "Counting takes {count:.1f} us (in 0x5 {old:.1f}): {ctas} CTAs load the same ids at once. Placing the slots and writing the padding takes "
    "{write:.1f} us, against {sort:.1f} us of the sort kernel.",
    count=PHASES["one launch"]["count"],
    old=PHASES["0x5"]["count"],
    ctas=CTAS,
    write=PHASES["one launch"]["write"],
    sort=PHASES["0x5"]["sort kernel"],
)  # after the GPU run: say which phase explains the difference from the prediction

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
# **Bottleneck.** Counting is the longest phase. The compiler tells how many instructions it takes; no GPU is needed.

# %%
SIGNATURE = ("int32*",) * 4 + ("int32",) * 4


def per_slot(made, atomics=1):
    """Instructions of the counting loop per slot; its atomic operations tell how often the compiler unrolled it."""
    return sum(made["count"].values()) / (made["count"]["atomic"] / atomics)


SASS = {"one launch": phase_instructions(make_one_launch, (256, 1024), SIGNATURE, 1024)}
print({phase: sum(made.values()) for phase, made in SASS["one launch"].items()})
say(
    "{all} instructions, {integer} of them on integers; {slot:.0f} per slot in the loop of `count`.",
    all=sum(sum(made.values()) for made in SASS["one launch"].values()),
    integer=sum(made["integer"] for made in SASS["one launch"].values()),
    slot=per_slot(SASS["one launch"], atomics=2),
)

# %% [markdown]
# **Idea.** Numba computes with Python's integers in mind. `int32 + int32` is an `int64`; `//` and `%` round towards minus
# infinity; a negative index counts from the end of a shared array, so every signed index is tested. A GPU has 32-bit
# integer units: 64-bit additions take two instructions, and 64-bit divisions take about a hundred. `uint32(...)` around
# each result tells the compiler that 32 bits suffice and that nothing is negative. `range` computes in 64 bits as well, so
# loops become `while`.
#
# **Predicted gain.** An SM issues four warp instructions per clock. Counting executes the loop's instructions once for each
# 32 slots. If issue limits the phase, it saves the difference of instructions per slot.

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
change(make_one_launch, make_unsigned)

# %%
SASS["unsigned"] = phase_instructions(make_unsigned, (256, 1024), SIGNATURE, 1024)
fewer = per_slot(SASS["one launch"], atomics=2) - per_slot(SASS["unsigned"], atomics=2)
issue_us = lambda instructions: instructions * NUMEL / 32 / 4 / LIMITS.boost_clock * 1e6
step("unsigned integers", make_unsigned, count_all, after="one launch", predicted_gain_us=issue_us(fewer))

# %% [markdown]
# **Explanation.** Instructions and time of each phase, before and after:

# %%
PHASES["unsigned integers"] = phases(ladder, "unsigned integers", make_unsigned, count_all)
for phase in SASS["unsigned"]:
    print(f"{phase:<8}" + " -> ".join(f"{sum(made[phase].values()):5}" for made in SASS.values()) + " instructions")
say(
    "`count` went from {count:.2f} to {now:.2f} us with {fewer:.0f} instructions per slot less. What remains of it is mostly the wait for the "
    "loads: {waits:.1f} us for {rounds} loads, one after the other.",
    count=PHASES["one launch"]["count"],
    now=PHASES["unsigned integers"]["count"],
    fewer=fewer,
    waits=LATENCY_US * -(-NUMEL // THREADS),
    rounds=-(-NUMEL // THREADS),
)  # after the GPU run: compare the phases in which no load waits
