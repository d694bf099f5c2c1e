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
# # Alignment as published
#
# The gate ([01](01_gate_prompt.ipynb)) has chosen eight experts for each token. A grouped GEMM works on blocks of, say, 16 rows, and all rows of a
# block must belong to one expert. So the tokens must be sorted by expert, and each expert's part padded to whole blocks. SGLang does
# this with `moe_align_block_size`. That moves few bytes, and takes many times as long as the bytes need. Why?
#
# An article by its author describes five versions, 0x1 to 0x5 ([what it claims](../docs/claims.md#align)). We rebuild them from one kernel with
# two holes and find out what each change is worth. You write some of the pieces, and meet a race that no GPU run has shown.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import torch
from numba import cuda, int32, uint32

from moe_numba.course.lessons.align import draw, exercises
from moe_numba.course.lessons.align import published as page
from moe_numba.course.lessons.align.published import lesson
from moe_numba.course.lessons.align.sizes import BLOCK, EXPERTS, FULL, LINE, SPREAD, THREADS
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.align_runs import random_ids
from moe_numba.course.steps.exercises import predict
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.memory import atom_add_s32, st_global_s32x4

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
print(f"{EXPERTS} experts, blocks of {BLOCK} rows; the main kernel has {THREADS} threads; FULL is {FULL:#x}")
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# Each element of `topk_ids` is an **assignment** of a token to an expert. Here six tokens choose two of four experts each, and a block has four rows:

# %%
example = random_ids(6, 4, 2)
draw.problem(example, block_size=4, num_experts=4)

# %% [markdown]
# This is a counting sort. **Count** the assignments of each expert. **Scan** the padded counts: the exclusive prefix sum is where each expert
# starts. Write `expert_ids`, fill the padding, and **sort**: put every assignment into its place. In torch, without a loop:

# %%
ids, numel, block = example.flatten().long(), example.numel(), 4
counts = torch.bincount(ids, minlength=4)
padded = (counts + block - 1) // block * block
starts, before = padded.cumsum(0) - padded, counts.cumsum(0) - counts
order = ids.argsort(stable=True)
place = starts[ids[order]] + torch.arange(numel) - before[ids[order]]
print("counts", counts.tolist(), "padded", padded.tolist(), "starts", starts.tolist())
print("sorted_token_ids", torch.full((int(padded.sum()),), numel).scatter_(0, place, order).tolist())
print("expert_ids      ", torch.arange(4).repeat_interleave(padded // block).tolist())

# %% [markdown]
# ## Where the time goes, first
#
# Before we build anything, look at the result: the five versions on an H200, each divided into its phases. To time a phase, we cut the
# kernel off after it, and subtract the time of the kernel that is cut off before it. These are
# [ports of SGLang's sources](../moe_numba/course/lessons/align/ports.py).

# %%
page.show_phases()

# %% [markdown]
# Version 0x5 has lost almost all of its scan. Its sort kernel takes as long as that of 0x1: no version touches it.
#
# **Predict.** What would you attack first, and what next? Name two phases of 0x1 in the order in which you would work on them.

# %%
exercises.attack.check(..., ...)  # "count", "scan", "expert_ids", "fill" or "sort"

# %% [markdown]
# ## The kernel, with two holes
#
# This is the whole main kernel, which one CTA runs. `count` and `scan` are holes; `make_main` puts a device function into each. From
# here on a step writes one function and fills one hole.


# %%
@cuda.jit(device=True)
def round_up(count, block_size):
    return int32(uint32(count + block_size - 1) // uint32(block_size) * uint32(block_size))


@factory
def make_main(count, scan):
    @cuda.jit
    def align(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        counts = cuda.shared.array(EXPERTS, int32)
        tid = cuda.threadIdx.x
        # count
        count(counts, topk_ids, numel)  # <-- a hole: leave the number of assignments of each expert in counts
        # scan
        scan(counts, cumsum, total_tokens_post_pad, block_size)  # <-- a hole: leave EXPERTS + 1 starts in cumsum
        # expert_ids
        if tid < EXPERTS:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid
        # fill
        for i in range(tid, (total_tokens_post_pad[0] + 3) // 4, cuda.blockDim.x):
            st_global_s32x4(sorted_token_ids, 4 * i, numel, numel, numel, numel)  # four elements at once

    return align


# %% [markdown]
# `EXPERTS` is a compile-time constant of the kernel, as a template parameter is in C++. `int32(...)` keeps a sum in 32 bits; Numba's integers
# are 64 bits wide otherwise. The padding is filled with `numel`, the number of assignments, which no assignment has as its index.
#
# The **sort kernel** follows in a second launch, with many CTAs. A thread takes an assignment, adds 1 to where its expert continues,
# and receives the assignment's place:


# %%
@cuda.jit
def sort_assignments(topk_ids, sorted_token_ids, cumsum, numel):
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        place = atom_add_s32(cumsum, topk_ids[i], 1)
        sorted_token_ids[place] = i


# %% [markdown]
# ## Step 1: version 0x1
#
# SGLang's first kernel was written for private counters per warp: `experts_per_warp` is 32, and an expert's counter is at
# `expert // 32 * 32 + expert % 32`, which is `expert`. All threads share one histogram after all. Thread 0 scans. (The port above takes longer: its
# thread 0 computes such rows, too, and the padding is filled by a launch of its own.)


# %%
@cuda.jit(device=True)
def count_in_rows(counts, topk_ids, numel):
    row = cuda.threadIdx.x // 32 * 32
    for i in range(32):
        if row + i < EXPERTS:
            counts[row + i] = 0
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        warp, offset = topk_ids[i] // 32, topk_ids[i] % 32
        cuda.atomic.add(counts, warp * 32 + offset, 1)
    cuda.syncthreads()


@cuda.jit(device=True)
def one_thread_scans(counts, cumsum, total_tokens_post_pad, block_size):
    if cuda.threadIdx.x == 0:
        start = int32(0)
        cumsum[0] = start
        for e in range(EXPERTS):
            start = int32(start + round_up(counts[e], block_size))
            cumsum[e + 1] = start
        total_tokens_post_pad[0] = start
    cuda.syncthreads()


step("0x1", (make_main(count_in_rows, one_thread_scans), sort_assignments, 1))

# %% [markdown]
# Read the table from the top. The rows of the **critical path** follow the warp that has most to do between two barriers, because all
# others wait for it: thread 0 loads the count of each expert, one after another, and stores each start. The rows of **all warps** are what the
# schedulers must issue and the memory must serve. Between them, *time* is an **estimate**: what a model of an H200 makes of the counts and of the machine
# code ([lesson 01](01_gate_prompt.ipynb) says how).
#
# **Take away.** One thread that works while all others wait costs its whole chain of loads.
#
# ## Step 2: plain counters
#
# In the bars of 0x1, counting is the longest phase of the main kernel after the scan. The article suspects the atomic additions, and there are other suspects: the row index costs
# instructions in every iteration, and Python's `//` and `%` more than C's: Numba divides in 64 bits toward zero, and then corrects the result for negative
# numbers, which the compiler cannot exclude. And all 32 lanes of a
# warp clear the same 32 counters, one after another. We vary one at a time, and cut the kernel off after `count`:

# %%
page.show_counting()

# %%
say(
    "The additions are cheap: counting takes {with_us:.2f} us with them and {without_us:.2f} us without. (The variant without them must compare "
    "each index with something instead, or the compiler would not even load the ids. So its time may be the longer one.)",
    **page.additions_us(),
)

# %% [markdown]
# The compiler turns "add 1 in shared memory, result unused" into one instruction that counts the lanes with the
# same address. Version 0x3 uses `counts[expert]`, and one thread per counter clears it.


# %%
@cuda.jit(device=True)
def count_assignments(counts, topk_ids, numel):
    tid = cuda.threadIdx.x
    if tid < EXPERTS:
        counts[tid] = 0
    cuda.syncthreads()
    for i in range(tid, numel, cuda.blockDim.x):
        cuda.atomic.add(counts, topk_ids[i], 1)
    cuda.syncthreads()


step("0x3 plain counters", (make_main(count_assignments, one_thread_scans), sort_assignments, 1))

# %% [markdown]
# **Take away.** In a loop that every thread runs, count instructions, not only memory accesses. And check what an index simplifies to.
#
# ## Step 3: a tree of sums
#
# Now the critical path is the loop of thread 0. Blelloch's scan needs only log n levels instead of n iterations. The up-sweep adds
# neighbours, then pairs, then fours. Then the last element becomes zero, and the down-sweep hands out what lies before each half:

# %%
draw.blelloch([3, 1, 7, 0, 4, 1, 6, 3])

# %% [markdown]
# **Predict.** The cell after the next runs this scan. A barrier follows the first store, every level, the zero and the last
# store. How many barriers are that in the whole kernel, with two in `count_assignments`? And how many bank conflicts will the strided accesses cause
# on the critical path? Replace the two `...`.

# %%
my_guess = predict("Blelloch", barriers=..., bank_conflicts=...)


# %%
@cuda.jit(device=True)
def blelloch_scan(counts, cumsum, total_tokens_post_pad, block_size):
    tree = cuda.shared.array(EXPERTS, int32)
    tid, stride = cuda.threadIdx.x, 1
    if tid < EXPERTS:
        tree[tid] = round_up(counts[tid], block_size)
    cuda.syncthreads()
    while stride < EXPERTS:  # up: a tree of sums
        right = 2 * stride * (tid + 1) - 1
        if right < EXPERTS:
            tree[right] += tree[right - stride]
        stride *= 2
        cuda.syncthreads()
    if tid == 0:
        cumsum[EXPERTS] = total_tokens_post_pad[0] = tree[EXPERTS - 1]
        tree[EXPERTS - 1] = 0
    cuda.syncthreads()
    while stride > 1:  # down: hand out what lies before each half
        stride //= 2
        right = 2 * stride * (tid + 1) - 1
        if right < EXPERTS:
            left = tree[right - stride]
            tree[right - stride] = tree[right]
            tree[right] += left
        cuda.syncthreads()
    if tid < EXPERTS:
        cumsum[tid] = tree[tid]
    cuda.syncthreads()


step("0x3 Blelloch", (make_main(count_assignments, blelloch_scan), sort_assignments, 1))

# %%
exercises.judge_blelloch(my_guess)

# %% [markdown]
# Bank conflicts appear, and so do barriers. Still the critical path is much shorter, and most of what
# remains of the scan is barriers.
#
# **Take away.** A tree adds twice as often as a loop does, but in far fewer steps that wait for each other. What waits is what counts.
#
# ## Build: the scan of a warp
#
# The lanes of a warp need neither shared memory nor a barrier to exchange registers. `cuda.shfl_up_sync(FULL, x, d)` returns the `x` of the
# lane `d` below; lanes 0 to d - 1 receive their own `x`. Write the **inclusive scan of a warp**: `x` is this lane's value; return the sum
# over lanes 0 to this one. Par: 5 shuffles.


# %%
@cuda.jit(device=True)
def my_warp_scan(x):
    return ...  # yours


warp_scan = exercises.warp_scan.use(my_warp_scan)

# %% [markdown]
# ## Step 4: warps first, then their sums
#
# Each of the CTA's warps scans its lanes with your `warp_scan`, and something must tell every warp what lies below it:

# %%
draw.two_level_scan()

# %% [markdown]
# Version 0x4: the warps leave their sums in shared memory, warp 0 scans them, and every thread fetches one. The scan has a hole of its
# own for that.


# %%
@cuda.jit(device=True)
def warp_0_scans(inclusive):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    if warp == 0:
        sums[lane] = warp_scan(sums[lane] if lane < warps else int32(0))
    cuda.syncthreads()
    return sums[warp - 1] if warp > 0 else int32(0)


@factory
def make_two_levels(sum_below):
    @cuda.jit(device=True)
    def two_level_scan(counts, cumsum, total_tokens_post_pad, block_size):
        tid = cuda.threadIdx.x
        inclusive = warp_scan(round_up(counts[tid], block_size) if tid < EXPERTS else int32(0))
        end = int32(sum_below(inclusive) + inclusive)  # <-- a hole: return the sum of all warps below this one
        if tid < EXPERTS:
            cumsum[tid + 1] = end
        if tid == 0:
            cumsum[0] = 0
        if tid == EXPERTS - 1:
            total_tokens_post_pad[0] = end
        cuda.syncthreads()

    return two_level_scan


step("0x4 two levels", (make_main(count_assignments, make_two_levels(warp_0_scans)), sort_assignments, 1))

# %% [markdown]
# Most barriers and all bank conflicts of the scan are gone; ten shuffles do their work.
#
# **Take away.** Exchange registers within a warp; use shared memory and barriers only between warps.
#
# ## A race that no GPU run has shown
#
# In SGLang's source of 0x4 the last barrier of the scan was missing
# ([PR 37663](https://github.com/sgl-project/sglang/pull/37663) added it in September 2026). Here is the scan without it. The threads that write `expert_ids` and fill
# read elements of `cumsum`, and the total, which other threads may not have written yet. Most of these belong to the same warp; a `cuda.syncwarp()` orders them, so that what remains
# is the race between warps:


# %%
@cuda.jit(device=True)
def scan_as_in_sglang(counts, cumsum, total_tokens_post_pad, block_size):
    tid = cuda.threadIdx.x
    inclusive = warp_scan(round_up(counts[tid], block_size) if tid < EXPERTS else int32(0))
    end = int32(warp_0_scans(inclusive) + inclusive)
    if tid < EXPERTS:
        cumsum[tid + 1] = end
    if tid == 0:
        cumsum[0] = 0
    if tid == EXPERTS - 1:
        total_tokens_post_pad[0] = end
    cuda.syncwarp()


lesson.orders((make_main(count_assignments, scan_as_in_sglang), sort_assignments, 1))

# %% [markdown]
# Warps that run close together hide the race on a GPU. The simulator runs the warps in other orders, too, and names both lines. A thread that reads too early
# finds what an earlier launch has left there: then blocks multiply with another expert's weights, without any error, or a store is out of bounds.
#
# **Break.** Remove **one** barrier from this copy of `warp_0_scans` so that the kernel returns the right result in every thread order, and the
# race detector still objects. (The check uses 64 experts and 256 threads.)


# %%
@cuda.jit(device=True)
def broken(inclusive):
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    sums = cuda.shared.array(32, int32)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    if warp == 0:
        sums[lane] = warp_scan(sums[lane] if lane < warps else int32(0))
    cuda.syncthreads()
    return sums[warp - 1] if warp > 0 else int32(0)


exercises.one_barrier_less.check(broken)

# %% [markdown]
# ## Build: one barrier
#
# `warp_0_scans` needs two barriers. While warp 0 scans the sums, the others wait for it at the second one. Write a function with the same
# contract and **one** barrier: every thread of the CTA passes the inclusive sum that its warp scan has returned, and receives the sum of
# all warps below its own, 0 in warp 0. You may call `warp_scan`. Par: 1 barrier, and no chain of loads.


# %%
@cuda.jit(device=True)
def my_sum_below(inclusive):
    return ...  # yours


sum_below = exercises.sum_below.use(my_sum_below)

# %% [markdown]
# ## Step 5: do it in every warp

# %%
scan_in_every_warp = make_two_levels(sum_below)
step("one barrier", (make_main(count_assignments, scan_in_every_warp), sort_assignments, 1))

# %% [markdown]
# All warps together execute more. But they did nothing else meanwhile.

# %%
say("On an H200 this step {saved}.", saved=page.saved("one barrier", "0x4 two levels"))

# %% [markdown]
# **Take away.** If all warps must wait for what one computes, each can compute it instead: that removes a barrier and costs nothing that matters.
#
# ## Step 6: a second CTA fills
#
# One SM does everything in the main kernel, and all others are idle. The padding needs neither counts nor scan: version 0x5 launches a second
# CTA, which fills the whole array while the first one counts. The two need no synchronisation, because the sort kernel, which overwrites
# the fill, is a later launch.
#
# **Prediction.** The main kernel saves its phase `fill`, because CTA 1 is done before CTA 0.


# %%
@factory
def make_two_ctas(count, scan):
    @cuda.jit
    def align(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
        counts = cuda.shared.array(EXPERTS, int32)
        tid = cuda.threadIdx.x
        if cuda.blockIdx.x == 1:
            for i in range(tid, length, cuda.blockDim.x):
                sorted_token_ids[i] = numel
            return  # the whole CTA returns, so no barrier waits for it
        count(counts, topk_ids, numel)
        scan(counts, cumsum, total_tokens_post_pad, block_size)
        if tid < EXPERTS:
            for i in range(cumsum[tid], cumsum[tid + 1], block_size):
                expert_ids[uint32(i) // uint32(block_size)] = tid

    return align


filled_apart = make_two_ctas(count_assignments, scan_in_every_warp)
v0x5 = filled_apart, sort_assignments, 2
step("0x5 second CTA", v0x5, predicted_us=page.without_fill())

# %% [markdown]
# The estimate rises, although CTA 0 executes fewer lines and CTA 1 is done long before it. The compiler has arranged the loop of `expert_ids` differently, and the
# model charges more clocks for each of its trips. That is a few percent, far less than what such an estimate may be off.
#
# **Take away.** Work that depends on nothing can run beside everything. A second CTA costs no synchronisation if only a later launch reads
# what it writes.
#
# Version 0x5 also makes the array shorter. The caller allocates it before anybody knows the counts, so it must hold any routing: at most
# `numel + num_experts * (block_size - 1)` places, and if there are fewer assignments than experts, `numel * block_size`, because
# experts without an assignment have no block.
#
# **Build.** That rule suffices, but it is not tight. Write a function that returns the fewest places that suffice for any
# routing; each assignment may be to any expert.


# %%
def my_length(numel, num_experts, block_size):
    return ...  # yours


exercises.length.check(my_length)

# %% [markdown]
# ## What is the sort kernel waiting for?
#
# The bars at the top show that the sort kernel takes more than half of 0x5, and no version has touched it. It loads an id, adds to a counter
# in L2 and stores an assignment's index to a scattered place. Which of the three takes the time? Vary one part at a time. (All kernels of this page use
# the same buffers, also those of the bars: where the counters lie changes the time of the sort kernel, as a table near the end shows.)


# %%
@factory
def make_sort(atomic, scattered, spread):
    @cuda.jit
    def sort(topk_ids, sorted_token_ids, cumsum, numel, mask):
        for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
            counter = topk_ids[i] * spread
            place = atom_add_s32(cumsum, counter, 1) if atomic else cumsum[counter] + (i & 127)
            if scattered or place == -1:  # never -1, but the compiler does not know, and keeps the atomic operation
                sorted_token_ids[place & mask] = i

    return sort


variants = {
    "as it is": make_sort(True, True, 1),
    "A: no scattered stores": make_sort(True, False, 1),
    "B: a load instead of the atomic": make_sort(False, True, 1),
    "C: a cache line per counter": make_sort(True, True, 32),
}

# %% [markdown]
# **Diagnose.** Which variants will take less than three quarters of the time of the kernel as it is? Put their letters into one string. Decide before you
# run the cell.

# %%
exercises.culprit.check(variants, ...)

# %% [markdown]
# ## Step 7: a cache line per counter
#
# Variant C leaves nothing out, so it is also a remedy. The scan gets one line more: after it has written the starts, it copies each one to a
# counter that has a cache line of 128 bytes, `LINE` elements, for itself. The counters begin at element `SPREAD` of the same array. The array grows from
# one to 33 KB, and no instruction is saved.
#
# **Prediction.** We save what variant C saves.


# %%
@cuda.jit(device=True)
def scan_and_spread(counts, cumsum, total_tokens_post_pad, block_size):
    scan_in_every_warp(counts, cumsum, total_tokens_post_pad, block_size)
    if cuda.threadIdx.x < EXPERTS:
        cumsum[SPREAD + LINE * cuda.threadIdx.x] = cumsum[cuda.threadIdx.x]


@cuda.jit
def sort_spread(topk_ids, sorted_token_ids, cumsum, numel):
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        place = atom_add_s32(cumsum, SPREAD + LINE * topk_ids[i], 1)
        sorted_token_ids[place] = i


spread = make_two_ctas(count_assignments, scan_and_spread), sort_spread, 2
step("a cache line per counter", spread, predicted_us=page.with_spread_counters())

# %% [markdown]
# Few counts change: the atomic operations are as many as before. The estimate changes, because the model knows which of them meet in one sector. It charges
# a fixed time for each of them, measured with counters at another place in memory, while our prediction uses what variant C saved here. So the two need not agree.
#
# **Take away.** Counters that many SMs update at once should not share cache lines.
#
# ## Build: one atomic operation for all lanes with the same expert
#
# Another remedy: if several lanes of a warp have the same expert, one of them adds for all.

# %%
draw.aggregation([2, 0, 2, 3, 0, 2, 1, 2])

# %% [markdown]
# `cuda.match_any_sync(FULL, expert)` returns to each lane a mask of the lanes with the same value; `cuda.popc` counts bits and
# `cuda.ffs` finds the lowest, from 1. Write `take_places`: each lane passes its expert, and receives a place of its own, counted by
# `next_place[expert]`. Add with `atom_add_s32(next_place, expert, n)`, which returns the value before. Par: an atomic operation per distinct
# expert of the warp.


# %%
@cuda.jit(device=True)
def my_take_places(next_place, expert):
    return ...  # yours


take_places = exercises.take_places.use(my_take_places)

# %% [markdown]
# ## Step 8: aggregated atomics
#
# We return to 0x5, whose counters lie side by side, and change the sort kernel only. The assignments of a warp belong to a few tokens, and the experts of one token all differ. So in random routing a warp still adds almost
# once per lane. If all tokens choose the same experts, it adds once per choice of a token instead of once per lane.


# %%
@cuda.jit
def sort_aggregated(topk_ids, sorted_token_ids, cumsum, numel):
    last = (numel + 31) // 32 * 32  # whole warps take part in match_any
    for i in range(cuda.grid(1), last, cuda.gridsize(1)):
        expert = topk_ids[i] if i < numel else int32(EXPERTS)
        place = take_places(cumsum, expert)
        if i < numel:
            sorted_token_ids[place] = i


aggregated = filled_apart, sort_aggregated, 2
step("aggregated atomics", aggregated, after="0x5 second CTA")

# %% [markdown]
# Now all tokens choose the same experts:

# %%
page.concentrated({"0x5": v0x5, "aggregated": aggregated, "a cache line per counter": spread})

# %% [markdown]
# **Take away.** Aggregation merges what one warp adds. But warps on different SMs still add to the same counters, and no warp knows of
# the others. What helps for every routing is in [the next lesson](04_align_one_launch.ipynb): no atomics on global memory at all.
#
# ## What did not pay
#
# Four changes of the published versions gained nothing, or next to nothing:

# %%
page.show_what_did_not_pay()

# %% [markdown]
# SGLang also has a small kernel for at most 64 experts and fewer than 1024 assignments: one launch of one CTA in which each thread has a row of
# counters of its own. [Our port of it](../docs/claims.md#align-the-small-kernel-loses-against-the-two-large-ones) is slower than the two
# launches, because one of its threads scans alone.
#
# ## All steps

# %%
lesson.summary()

# %% [markdown]
# ### Where the buffers lie
#
# All steps use the same buffers. Here are two of them with outputs and counters in several other places:

# %%
page.show_allocations({"0x5": v0x5, "a cache line per counter": spread})

# %%
say(
    "An earlier measurement moved the outputs and the counters separately. With other outputs, 0x5 took {outputs_low:.1f} to {outputs_high:.1f} us, and with "
    "other counters {counters_low:.1f} to {counters_high:.1f} us. So the place of the counters decides, and counters with a cache line each should depend on it "
    "less. Which bits of an address matter we do not know. SGLang's compiled kernel was timed with its counters in one place only, so whether it or our "
    "0x5 takes less time says little about the two.",
    **page.moved_us(),
)

# %%
lesson.save()

# %% [markdown]
# The compiled kernels of SGLang and vLLM beside the package's, for other numbers of tokens, and if all assignments are to one expert. The order of
# an expert's assignments differs from run to run in all but the package's, because `atomicAdd` hands out places in the order of arrival:

# %%
page.show_peers()

# %% [markdown]
# **You can now** time the phases of a kernel apart, scan and aggregate in a warp, and tell waiting for a counter from waiting for memory.
#
# ## Next step, not built
#
# `count` runs on one SM: all ids pass through one L1, and the loop of a thread is as long as the ids divided by the CTA's threads.
# **Build** a main kernel whose counting is spread over several CTAs, and beat 0x5. What must the CTAs exchange, and which of them may then scan? A
# lower bound for two launches:

# %%
print(page.lower_bound())

# %% [markdown]
# ## Sources
#
# - The article *sgl-kernel MoE Align Block Size Kernel*, in Chinese, by the author of 0x1; we have no address to link. SGLang pull requests
#   [7437](https://github.com/sgl-project/sglang/pull/7437) (0x2, ispobock), [7794](https://github.com/sgl-project/sglang/pull/7794) (0x3, ispobock),
#   [7884](https://github.com/sgl-project/sglang/pull/7884) (0x4, yuan-luo) and [14133](https://github.com/sgl-project/sglang/pull/14133) (0x5, BBuf, after
#   jinzhen-lin's [vLLM PR 29642](https://github.com/vllm-project/vllm/pull/29642)).
#   On AMD GPUs the same source shuffles with a macro `SHFL_UP` that leaves the mask out.
# - G. E. Blelloch, *Prefix sums and their applications*, 1990.
# - We compare [the article's claims](../docs/claims.md#align) with our measurements.
#
# Before: [01, the gate for a prompt](01_gate_prompt.ipynb). Next: [04, the alignment in one launch](04_align_one_launch.ipynb).
