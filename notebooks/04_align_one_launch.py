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
# # Alignment in one launch
#
# [Lesson 03](03_align_published.ipynb) took version 0x5 of SGLang's `moe_align_block_size` apart: a first launch counts the **assignments** of each expert (an assignment
# is an element of `topk_ids`), and a second launch places them. One SM counts while 130 are idle, every assignment costs an atomic operation on global memory, and
# the order of an expert's assignments changes from run to run.
#
# This lesson does it in one launch, spread over 64 CTAs, with the assignments in order. All of it follows from one question: **what must a CTA know of
# the others before it can place its assignments?** There are three answers, each right for another size: nothing, if it recomputes everything; a barrier;
# and words that say of themselves that they have arrived.

# %%
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import torch
from numba import cuda, int32, uint32, uint64

from moe_numba.course.lessons.align_one_launch import draw, exercises
from moe_numba.course.lessons.align_one_launch import one_launch as page
from moe_numba.course.lessons.align_one_launch.one_launch import decode, four, lesson
from moe_numba.course.lessons.align_one_launch.sizes import (
    BINS,
    BOTH,
    COLUMNS,
    CTAS,
    DECODE,
    EXPERTS,
    FOUR,
    FULL,
    HEADER,
    MASKS,
    SCRATCH,
    TOKENS,
    TOPK,
    VECTORS,
    WARPS,
    WORDS,
)
from moe_numba.course.pages.prose import say
from moe_numba.course.steps.align_runs import random_ids
from moe_numba.course.steps.exercises import predict
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.atomics import (
    atom_add_relaxed_gpu_s32,
    ld_relaxed_gpu_s32,
    ld_relaxed_gpu_u64x2,
    st_relaxed_gpu_s32,
    st_relaxed_gpu_u64,
)
from moe_numba.ptx.memory import atom_add_s32, griddepcontrol_launch_dependents, griddepcontrol_wait, ld_global_s32x4
from moe_numba.ptx.warp import lanemask_lt, redux_sync_add_s32, warp_inclusive_scan

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
print(f"{EXPERTS} experts, {TOPK} for each token; inputs of {FOUR}, {DECODE} and {TOKENS} tokens; FULL is {FULL:#x}")
print(page.result())

# %%
page.constants()

# %%
draw.two_launches()

# %% [markdown]
# ## Where version 0x5 stands
#
# These are the two kernels that lesson 03 put together. The scan is that of version 0x4, with one barrier: each warp adds up the sums of the
# lower warps itself, with `redux`, which returns a sum over the lanes of a warp.


# %%
@cuda.jit(device=True)
def blocks_of(count, block_size):
    return int32(uint32(count + block_size - 1) // uint32(block_size))


@cuda.jit(device=True)
def scan(value):
    """Return the sum over lower threads of the CTA, and over all."""
    sums = cuda.shared.array(32, int32)
    lane, warp, warps = cuda.threadIdx.x & 31, cuda.threadIdx.x >> 5, cuda.blockDim.x >> 5
    inclusive = warp_inclusive_scan(value, lane)
    if lane == 31:
        sums[warp] = inclusive
    cuda.syncthreads()
    sum_of_warp = sums[lane] if lane < warps else int32(0)
    below = redux_sync_add_s32(FULL, sum_of_warp if lane < warp else int32(0))
    return int32(below + inclusive - value), redux_sync_add_s32(FULL, sum_of_warp)


@cuda.jit
def main_0x5(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, cumsum, block_size, numel, length):
    counts = cuda.shared.array(EXPERTS, int32)
    tid = cuda.threadIdx.x
    if cuda.blockIdx.x == 1:  # the second CTA fills
        for i in range(tid, length, cuda.blockDim.x):
            sorted_token_ids[i] = numel
        return
    if tid < EXPERTS:
        counts[tid] = 0
    cuda.syncthreads()
    for i in range(tid, numel, cuda.blockDim.x):
        cuda.atomic.add(counts, topk_ids[i], 1)
    cuda.syncthreads()
    blocks = blocks_of(counts[tid], block_size) if tid < EXPERTS else int32(0)
    first, used = scan(blocks)
    if tid < EXPERTS:
        cumsum[tid] = first * block_size
        for block in range(first, first + blocks):
            expert_ids[block] = tid
    if tid == 0:
        total_tokens_post_pad[0] = used * block_size


@cuda.jit
def sort_0x5(topk_ids, sorted_token_ids, cumsum, numel):
    for i in range(cuda.grid(1), numel, cuda.gridsize(1)):
        place = atom_add_s32(cumsum, topk_ids[i], 1)
        sorted_token_ids[place] = i


version_0x5 = ((main_0x5, 2, 1024), (sort_0x5, -(-TOKENS * TOPK // 256), 256))
lesson.step("0x5", version_0x5)

# %% [markdown]
# A version is a tuple: the kernel, its CTAs, its threads; this one has two launches. Of the global atomics, up to *atomics on one address* hit the same
# counter, and eight counters share a sector. That takes most of the second launch, and how much depends on where the counters lie:

# %%
page.show_allocations(version_0x5)

# %% [markdown]
# So a factor over 0x5 means little unless the lowest and the highest time are given. The kernels below have no atomic operation on global memory in their data path.
#
# ## Four tokens: a warp that knows everything
#
# Begin with the smallest input. Four tokens have 32 assignments: as many as a warp has lanes. A lane that holds an assignment's expert can find out, from the other
# 31 lanes alone, where its assignment belongs. No CTA needs to tell another one anything, because **each warp computes everything again**.
#
# **Build: the rank in a warp.** (It is a part of `take_places` in lesson 03.) `expert` is this lane's expert. Return two `int32`: how many lanes
# *below* this one have the same expert (the rank, which keeps the assignments in order), and how many lanes have it in all. `cuda.match_any_sync(FULL, x)`
# returns to each lane a mask of the lanes with the same `x`; `cuda.popc` counts bits; `lanemask_lt()` has the bits of the lanes below. Par: no
# shuffle, no shared memory.


# %%
@cuda.jit(device=True)
def my_rank_in_warp(expert):
    return ...  # yours: rank, count


rank_in_warp = exercises.rank_in_warp.use(my_rank_in_warp)

# %% [markdown]
# This is the whole kernel. There are as many warps as assignments. Warp `w` serves the expert of assignment `w`, if assignment `w` is the first of
# its expert: then it writes the expert's assignments, padding and `expert_ids`. All threads share the tail after the last block.


# %%
@cuda.jit(device=True)
def fill(array, first, end, step, value):
    i = first
    while i < end:
        array[i] = value
        i = int32(i + step)


@cuda.jit
def align_four(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
    lane, warp, thread, threads = cuda.threadIdx.x & 31, cuda.grid(1) >> 5, cuda.grid(1), cuda.gridsize(1)
    griddepcontrol_launch_dependents()  # as in lesson 02; step 6 comes back to it
    griddepcontrol_wait()
    expert = topk_ids[lane] if lane < numel else int32(EXPERTS)  # each warp loads all ids
    rank, count = rank_in_warp(expert)
    blocks = blocks_of(count, block_size)
    counted = blocks if (rank == 0) & (expert < EXPERTS) else int32(0)  # once for each expert
    mine, my_rank = cuda.shfl_sync(FULL, expert, warp), cuda.shfl_sync(FULL, rank, warp)  # of assignment `warp`
    my_count, my_blocks = cuda.shfl_sync(FULL, count, warp), cuda.shfl_sync(FULL, blocks, warp)
    first = redux_sync_add_s32(FULL, counted if expert < mine else int32(0))  # blocks of lower experts
    used = redux_sync_add_s32(FULL, counted)
    if (my_rank == 0) & (mine < EXPERTS):
        if expert == mine:
            sorted_token_ids[first * block_size + rank] = lane
        fill(sorted_token_ids, first * block_size + my_count + lane, (first + my_blocks) * block_size, 32, numel)
        fill(expert_ids, first + lane, first + my_blocks, 32, mine)
    fill(sorted_token_ids, used * block_size + thread, length, threads, numel)
    fill(expert_ids, used + thread, blocks_of(length, block_size), threads, -1)
    if thread == 0:
        total_tokens_post_pad[0] = used * block_size


four.step("0x5", version_0x5)

# %%
four.step("a warp for each assignment", (align_four, -(-FOUR * TOPK // 4), 128))

# %% [markdown]
# The atomics, the shared memory and all barriers are gone, and so is the second launch. In exchange every warp loads all ids: look at *sectors
# loaded*. They come from the L1 or L2, all at once.
#
# `fill` says `int32(i + step)`. With `i += step` Numba computes in 64 bits, where a sum cannot overflow, so the compiler may unroll the loop; for that it
# computes the number of trips with a 64-bit division, which takes far longer than the trips. Try it, and compare the estimates.
#
# A decode step launches such kernels one after another, and [lesson 02](02_gate_decode.ipynb) lets each start before the one before it has ended. Here is the time of
# this kernel launched in that way, as the package launches its own:

# %%
page.show_variants(
    "kernels for four tokens",
    {
        "in order": (align_four, -(-FOUR * TOPK // 4), 128),
        "dependent": (align_four, -(-FOUR * TOPK // 4), 128, "dependent"),
    },
    four,
)

# %% [markdown]
# **Take away.** What every thread can compute in a few instructions need not be communicated. Recompute it.
#
# ## 4096 tokens: a kernel with three holes
#
# 32,768 assignments fit in no warp. 64 CTAs share them: each places a **chunk** of 512 consecutive assignments. The row of an assignment is a sum of three numbers:
#
# - the first row of its expert, for which a CTA must know the counts of *all* assignments,
# - the assignments of its expert in earlier chunks (`before`),
# - and its rank among the assignments of its own chunk.
#
# Every element of the output has exactly one writer, which follows from the counts. So nothing is filled first and overwritten later, and nothing
# must be ordered:

# %%
torch.manual_seed(0)
draw.element_writers(random_ids(6, 4, 2), block_size=4, num_experts=4, ctas=2)

# %% [markdown]
# Here is the kernel. `publish`, `rank_in_chunk` and `collect` are holes. In the **workspace**, an array in global memory, CTAs leave words for each other.
# A CTA publishes what the others need of it, ranks its own assignments,
# for which it needs no other CTA, and then collects what it needs of the others.


# %%
@cuda.jit(device=True)
def clear(array, length):
    fill(array, cuda.threadIdx.x, length, cuda.blockDim.x, 0)


@cuda.jit(device=True)
def write_rest(first_block, counts, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
    """Write all that is no assignment: padding and expert_ids, each expert by a warp of the grid, the tail by all threads."""
    thread, threads, lane = cuda.grid(1), cuda.gridsize(1), cuda.threadIdx.x & 31
    e = thread >> 5
    while e < EXPERTS:
        first, end = first_block[e], first_block[e + 1]
        row = first * block_size + counts[e] + counts[BINS + e] + lane
        fill(sorted_token_ids, row, end * block_size, 32, numel)
        fill(expert_ids, first + lane, end, 32, e)
        e = int32(e + (threads >> 5))
    used = first_block[EXPERTS]
    fill(sorted_token_ids, used * block_size + thread, length, threads, numel)
    fill(expert_ids, used + thread, blocks_of(length, block_size), threads, -1)
    if thread == 0:
        total_tokens_post_pad[0] = used * block_size


@factory
def make_align(publish, rank_in_chunk, collect):
    @cuda.jit
    def align(
        topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, workspace, block_size, numel, length, chunk
    ):
        # start
        own, counts = cuda.shared.array(BINS, int32), cuda.shared.array(BOTH, int32)
        scratch, first_block = cuda.shared.array(SCRATCH, int32), cuda.shared.array(BINS, int32)
        tid, first = cuda.threadIdx.x, cuda.blockIdx.x * chunk
        clear(own, BINS)
        clear(counts, BOTH)
        clear(scratch, SCRATCH)
        cuda.syncthreads()
        # publish
        e = uint32(EXPERTS)  # the bin that nothing reads, for threads without an assignment
        if tid < chunk and first + tid < numel:
            e = uint32(topk_ids[first + tid])
        number = publish(e, own, workspace)  # <-- a hole: tell the other CTAs about this one
        # rank
        rank = rank_in_chunk(e, scratch)  # <-- a hole: the assignments of expert e in this chunk before this one
        # collect
        # A hole: leave each expert's assignments in earlier chunks in counts[e], and all others in counts[BINS + e].
        collect(number, topk_ids, workspace, counts, first, numel)
        # scan
        start, used = scan(blocks_of(counts[tid] + counts[BINS + tid], block_size) if tid < EXPERTS else int32(0))
        if tid < EXPERTS:
            first_block[tid] = start
        if tid == 0:
            first_block[EXPERTS] = used
        cuda.syncthreads()
        # write
        if e < EXPERTS:
            sorted_token_ids[first_block[e] * block_size + counts[e] + rank] = first + tid
        write_rest(first_block, counts, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length)

    return align


# %% [markdown]
# ## Step 1: every CTA counts everything
#
# The bottleneck of 0x5 is the second launch: it exists only because many CTAs place the assignments, and one CTA counts them. The idea is that of
# the warp above: all 64 CTAs count all assignments. That is 64 times the work, on SMs that were idle. `publish` has nothing to do.
#
# Atomic counters would rank the assignments in any order. A rank that is **stable** counts bits: each expert has a bit for each assignment of the chunk, and the
# rank is the number of bits below the assignment's own. An atomic *or* has the same result in any order.

# %%
draw.bitmask_rank([2, 0, 3, 2, 1, 2, 0, 2, 3, 1, 2, 0, 1, 2, 3, 0], expert=2)


# %% [markdown]
# **Prediction.** We save the sort kernel. All else takes as long as before.


# %%
@cuda.jit(device=True)
def publish_nothing(e, own, workspace):
    return uint32(0)


@cuda.jit(device=True)
def rank_by_bits(e, masks):
    warp, rank = cuda.threadIdx.x >> 5, 0
    if e < EXPERTS:
        cuda.atomic.or_(masks, e * WARPS + warp, 1 << (cuda.threadIdx.x & 31))
    cuda.syncthreads()
    if e < EXPERTS:
        for w in range(warp):
            rank += cuda.popc(masks[e * WARPS + w])
        rank += cuda.popc(uint32(masks[e * WARPS + warp]) & lanemask_lt())
    return rank


@cuda.jit(device=True)
def count_all(number, topk_ids, workspace, counts, first, numel):
    for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
        if i < first:
            cuda.atomic.add(counts, topk_ids[i], 1)
        else:
            cuda.atomic.add(counts, BINS + topk_ids[i], 1)
    cuda.syncthreads()


one_launch = make_align(publish_nothing, rank_by_bits, count_all)
lesson.step("one launch", (one_launch, CTAS, 1024), predicted_us=page.less("0x5", page.sort_us()))

# %% [markdown]
# The global atomics are gone, and all warps together execute many times the lines. The prediction takes the time of the sort kernel from lesson 03. Where the
# counters of 0x5 lie better, there is less to save: compare the time *before* with that of 0x5 above. And counting does not take as long as before: a
# thread still handles 32 ids, and now there is a branch between an id and the next. The old kernel counted without a branch,
# and the compiler could issue four loads before the first addition.
#
# **Take away.** One launch removes what two launches make necessary: counters in global memory, filling first, a random order. The price is
# work that is done 64 times.
#
# ## What does the counting loop wait for?
#
# A thread loads an id and adds to a counter in shared memory. Two variants leave out one of the two: A stores instead of adding
# atomically, B computes an id instead of loading it, by a hash of its index.


# %%
@factory
def make_counting(loads, adds):
    @cuda.jit
    def count_only(topk_ids, out, numel, first):
        counts = cuda.shared.array(BOTH, int32)
        clear(counts, BOTH)
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x, numel, cuda.blockDim.x):
            e = topk_ids[i] if loads else (i * 2654435761 >> 16) & (EXPERTS - 1)
            at = e if i < first else BINS + e
            if adds:
                cuda.atomic.add(counts, at, 1)
            else:
                counts[at] = 1
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            out[cuda.blockIdx.x] = counts[0]

    return count_only


variants = {
    "as it is": make_counting(True, True),
    "A: stores": make_counting(True, False),
    "B: no loads": make_counting(False, True),
}

# %% [markdown]
# **Diagnose.** Which variant takes less than three quarters of the time: "A", "B" or "neither"? Decide before you run the cell.

# %%
exercises.counting.check(variants, ...)

# %% [markdown]
# ## Build: a counting loop that does not wait 32 times
#
# `ld_global_s32x4(ids, i)` loads the four elements from `i` on with one instruction of 16 bytes; `i` must be a multiple of four. So a thread has four ids at
# once, and no branch between them: whether an id lies before the chunk is a number to be added to the index.
#
# Write `count_ids`: for each id at index `i` below `numel`, add 1 to `counts[id]` if `i < first`, and to `counts[BINS + id]` otherwise. `numel` may be no multiple
# of four. Beware of `i +=` in a loop. Par: a load of a warp for 128 ids.


# %%
@cuda.jit(device=True)
def my_count_ids(topk_ids, counts, first, numel): ...  # yours


count_ids = exercises.count_ids.use(my_count_ids)

# %% [markdown]
# ## Step 2: four ids at once
#
# **Prediction.** A thread waits 8 times for the L2 instead of 32 times, if it waits for each load.


# %%
@cuda.jit(device=True)
def count_in_vectors(number, topk_ids, workspace, counts, first, numel):
    count_ids(topk_ids, counts, first, numel)
    cuda.syncthreads()


count_everything = make_align(publish_nothing, rank_by_bits, count_in_vectors)
lesson.step("counting loop", (count_everything, CTAS, 1024), predicted_us=page.less("one launch", 24 * page.l2_us()))

# %% [markdown]
# **Take away.** Latency is paid once for all loads that are in flight. Wide loads, and code without branches between the loads, put
# more of them in flight.
#
# ## The exchange
#
# Where does the time go? We cut the kernel off after each phase, as in lesson 03. Until now a CTA counts in `collect`:

# %%
page.show_phases(
    make_align,
    {
        "one launch": (publish_nothing, rank_by_bits, count_all),
        "counting loop": (publish_nothing, rank_by_bits, count_in_vectors),
    },
)

# %% [markdown]
# Recomputing can go no further: each CTA adds to shared memory for all 32,768 assignments, however good the loop is. With one
# assignment for each thread, a CTA could count its own 512 assignments and receive the other counts:

# %%
draw.exchange_counts(ctas=3, experts=4)

# %% [markdown]
# For that, all CTAs must have stored their counts before one of them loads. `cuda.syncthreads()` waits for the threads of a CTA only. A
# **barrier of the grid** is a counter in global memory: each CTA adds to it, and polls until all have. Three things must be right:
#
# - **All CTAs are resident.** A CTA that polls keeps its SM. If another one could not start, the grid would wait forever. A *cooperative* launch makes
#   the driver refuse a grid that does not fit.
# - **Order.** *Relaxed* accesses are atomic, and order nothing else. A **fence**, `cuda.threadfence()`, adds the order: what a thread accessed before it comes
#   before what it accesses after it, for all threads of the GPU. The counts must be visible before the arrival is, and the arrivals of the others must be
#   seen before their counts are loaded.
# - **The next use** finds the counter as this one left it.
#
# The third is where barriers fail. Let the last CTA reset the counter, and the others wait for 0? Two barriers in a row show what happens:


# %%
@cuda.jit(device=True)
def barrier_that_resets(counter):
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        if atom_add_relaxed_gpu_s32(counter, 0, 1) == cuda.gridDim.x - 1:
            st_relaxed_gpu_s32(counter, 0, 0)  # the last one
        while ld_relaxed_gpu_s32(counter, 0) != 0:
            pass
        cuda.threadfence()
    cuda.syncthreads()


exercises.show_two_in_a_row(barrier_that_resets)

# %% [markdown]
# The last CTA has reset the counter, has gone on, and has arrived at the next barrier, while another one still polls. It misses the 0.
#
# **Build: the barrier of the grid.** Write `grid_barrier(counter)`, which all threads of all CTAs call. `counter` is an int32 array in global memory: the
# `HEADER` of the workspace, four elements, so that the counts after it begin at a multiple of 16 bytes. One element suffices for the barrier. They are zeroed before the first launch and never again. A CUDA graph may launch the kernel 2^31 times and more: the check sets the counter to what
# it will be then. Use `atom_add_relaxed_gpu_s32(counter, index, value)`, which returns the old value, `ld_relaxed_gpu_s32(counter, index)`, and fences.
# Par: one atomic operation of each CTA in a barrier.


# %%
@cuda.jit(device=True)
def my_grid_barrier(counter): ...  # yours


grid_barrier = exercises.grid_barrier.use(my_grid_barrier)

# %% [markdown]
# What does it cost alone? `cuda.threadfence()` compiles to `membar.gl`, a *sequentially consistent* fence. A barrier needs no more than
# the order of `fence.acq_rel.gpu`, which `moe_numba.ptx` has as `fence_acq_rel_gpu()`. Does it also cost less? Here are kernels that only wait at a
# barrier, with either:

# %%
page.show_fences({"cuda.threadfence()": grid_barrier, "fence_acq_rel_gpu()": exercises.answers.grid_barrier_acq_rel})

# %% [markdown]
# ## Step 3: exchange counts at a barrier
#
# A CTA publishes its counts in the workspace, after the four elements of the barrier. After the barrier it loads the rows of all
# CTAs, 16 bytes at a time: 64 threads load a row, so 512 threads load eight rows at once, and a thread has all its eight loads in flight.
#
# **Predict.** How many atomic operations on shared memory will remain on the critical path? A thread adds to `own`, sets its bit, and adds the sums of its
# four experts to `counts`, before and others. Replace the `...`.
#
# **Prediction.** We save the phase `collect` of step 2, and pay for a barrier as in the table above, a store, and two loads one after another: of the id, and of the counts.

# %%
my_guess = predict("exchange of counts", shared_atomics=...)


# %%
@cuda.jit(device=True)
def publish_counts(e, own, workspace):
    tid = cuda.threadIdx.x
    cuda.atomic.add(own, e, 1)
    cuda.syncthreads()
    if tid < EXPERTS:
        workspace[HEADER + cuda.blockIdx.x * COLUMNS + tid] = own[tid]
    return uint32(0)


@cuda.jit(device=True)
def collect_after_barrier(number, topk_ids, workspace, counts, first, numel):
    # n[k, c] is the count of CTA cta + k * rows and expert 4 * vector + c. It lies in registers once the loops are unrolled.
    n = cuda.local.array((8, 4), int32)
    before, everywhere = cuda.local.array(4, int32), cuda.local.array(4, int32)
    cta, vector, rows = cuda.threadIdx.x // VECTORS, cuda.threadIdx.x % VECTORS, cuda.blockDim.x // VECTORS
    for c in range(4):
        before[c] = everywhere[c] = 0
    if cta >= rows:  # threads that are left over
        cta = cuda.gridDim.x
    grid_barrier(workspace)
    while cta < cuda.gridDim.x:
        for k in range(8):
            for c in range(4):
                n[k, c] = 0
            if cta + k * rows < cuda.gridDim.x:
                row = HEADER + (cta + k * rows) * COLUMNS
                n[k, 0], n[k, 1], n[k, 2], n[k, 3] = ld_global_s32x4(workspace, row + 4 * vector)
        for k in range(8):
            for c in range(4):
                before[c] += n[k, c] if cta + k * rows < cuda.blockIdx.x else 0
                everywhere[c] += n[k, c]
        cta += 8 * rows
    for c in range(4):
        cuda.atomic.add(counts, 4 * vector + c, before[c])
        cuda.atomic.add(counts, BINS + 4 * vector + c, everywhere[c] - before[c])
    cuda.syncthreads()


exchanged = make_align(publish_counts, rank_by_bits, collect_after_barrier)
lesson.step(
    "grid barrier", (exchanged, CTAS, 512, "cooperative"), predicted_us=page.less("counting loop", page.exchange_us())
)

# %%
my_guess.judge(lesson.steps["grid barrier"].score)

# %% [markdown]
# The loads and additions of the counting are gone. Is that a gain? The estimate says no: its longest chain of dependent instructions grows by the barrier and the loads
# after it. Here are the phases:

# %%
page.show_phases(make_align, {"grid barrier": (publish_counts, rank_by_bits, collect_after_barrier)})

# %%
say(
    "In step 2, counting (`publish` and `collect`) took {counted:.2f} us; to publish the counts, wait and load them takes {collected:.2f} us. `scan` and `write` "
    "took {wrote:.2f} us with 1024 threads, and take {writes:.2f} us with 512. {so}",
    **page.exchanged(),
)

# %% [markdown]
# **Take away.** A barrier costs several accesses to the L2, one after another: the store, a fence, the arrival, a poll that sees the last arrival, a fence, and
# only then the first load. A kernel of a few microseconds pays a large part of its time for that.
#
# ## Data that says of itself that it has arrived
#
# Of that chain only two links carry data: the store, and the load. The others make sure of their order. A reader needs no order between two accesses
# if there is only one: let the word that carries the count also carry the **number of the launch**. A reader that finds the right number
# knows that the count beside it belongs to this launch. It polls the data itself.

# %%
draw.who_waits()

# %% [markdown]
# *Decoupled look-back*, the scan of NVIDIA's CUB, publishes its sums in this way. A word of 64 bits is stored and loaded in one piece:

# %%
draw.count_words()

# %% [markdown]
# **Predict.** Two counts of 16 bits share a word. How many assignments may a CTA have at most, if all of them may go to one expert? And what
# will a reader unpack for the experts 0 and 1 if a CTA packs 65537 and 4 as `a | b << 16`?

# %%
predict("packed counts", most_assignments=..., expert_0=..., expert_1=...).judge(page.packed(65537, 4))

# %% [markdown]
# **Build: where the fences go.** Without such words a reader needs a flag, and two fences. In this chain each CTA, of one thread, adds its `value` to the sum of
# the CTA before it, whose flag it polls, and sets its own flag to 1. The order of the last two stores is wrong, and fences are missing. Repair it. `prefix` stays a
# plain array, which is loaded and stored as `prefix[...]`.


# %%
@cuda.jit(device=True)
def my_hand_on(prefix, flags, value):
    cta, before = cuda.blockIdx.x, int32(0)
    if cta > 0:
        while ld_relaxed_gpu_s32(flags, cta - 1) == 0:
            pass
        before = prefix[cta - 1]
    st_relaxed_gpu_s32(flags, cta, 1)
    prefix[cta] = before + value
    return before


exercises.hand_on.check(my_hand_on)

# %% [markdown]
# ## Step 4: words with the number of the launch
#
# The number is in the workspace, because a CUDA graph repeats a launch with the same arguments. The last CTA that has read all counts increments it; that needs no
# fence, since the next launch begins after this one. When the number overflows, every word still carries that of the launch before. A thread's sums of
# two packed counts need no unpacking: it adds words, because a sum of 16 bits over the rows of one thread does not carry.
#
# A load of 16 bytes brings two such words. Each is loaded in one piece, but not both together, so the loop below tests the number in *both*. (The simulator would not
# notice if one test were missing: there the two words of a load are always stored together.)
#
# **Prediction.** We save what a barrier takes alone.

# %%
LAUNCHES, DONE = 0, 1  # elements of the workspace: launches so far, CTAs that have read all counts of this one


@cuda.jit(device=True)
def publish_numbered(e, own, workspace):
    number = uint32(ld_relaxed_gpu_s32(workspace, LAUNCHES) + 1)
    cuda.atomic.add(own, e, 1)
    cuda.syncthreads()
    i = cuda.threadIdx.x
    if i < COLUMNS // 2:
        two = uint32(own[2 * i]) | (uint32(own[2 * i + 1]) << uint32(16))
        word = (uint64(number) << uint64(32)) | uint64(two)
        st_relaxed_gpu_u64(workspace, HEADER + cuda.blockIdx.x * COLUMNS + 2 * i, word)
    return number


@cuda.jit(device=True)
def add_two(counts, at, two):
    cuda.atomic.add(counts, at, int32(two & 0xFFFF))
    cuda.atomic.add(counts, at + 1, int32(two >> 16))


@cuda.jit(device=True)
def collect_numbered(number, topk_ids, workspace, counts, first, numel):
    a, b = cuda.local.array(8, uint64), cuda.local.array(8, uint64)
    before_a = before_b = all_a = all_b = uint32(0)
    cta, vector, rows = cuda.threadIdx.x // VECTORS, cuda.threadIdx.x % VECTORS, cuda.blockDim.x // VECTORS
    if cta >= rows:
        cta = cuda.gridDim.x
    tag = uint64(number) << uint64(32)
    while cta < cuda.gridDim.x:
        stale = True
        while stale:  # until all eight loads have found the number
            differ = uint64(0)
            for k in range(8):
                a[k] = b[k] = tag  # past the last CTA: counts of 0
                if cta + k * rows < cuda.gridDim.x:
                    at = HEADER + (cta + k * rows) * COLUMNS + 4 * vector
                    a[k], b[k] = ld_relaxed_gpu_u64x2(workspace, at)
                differ |= (a[k] ^ tag) | (b[k] ^ tag)
            stale = differ >> uint64(32) != uint64(0)
        for k in range(8):
            if cta + k * rows < cuda.blockIdx.x:
                before_a, before_b = uint32(before_a + uint32(a[k])), uint32(before_b + uint32(b[k]))
            all_a, all_b = uint32(all_a + uint32(a[k])), uint32(all_b + uint32(b[k]))
        cta += 8 * rows
    add_two(counts, 4 * vector, before_a)
    add_two(counts, 4 * vector + 2, before_b)
    add_two(counts, BINS + 4 * vector, uint32(all_a - before_a))
    add_two(counts, BINS + 4 * vector + 2, uint32(all_b - before_b))
    cuda.syncthreads()
    if cuda.threadIdx.x == 0 and atom_add_relaxed_gpu_s32(workspace, DONE, 1) == cuda.gridDim.x - 1:
        st_relaxed_gpu_s32(workspace, DONE, 0)
        st_relaxed_gpu_s32(workspace, LAUNCHES, int32(number))


numbered = make_align(publish_numbered, rank_by_bits, collect_numbered)
lesson.step(
    "numbered counts", (numbered, CTAS, 512, "cooperative"), predicted_us=page.less("grid barrier", page.barrier_us())
)

# %% [markdown]
# **Take away.** An order between two accesses costs a fence on both sides. If one access can carry both the data and the news of it, there is nothing to
# order.
#
# ## Step 5: ranks of each warp
#
# The ranks need no other CTA, so they overlap with the exchange. They take too long for that now: look at *bank conflicts*. The masks of two experts are 16 words apart, so that
# the lanes of a load, which have different experts, share two banks. And warp `w` loads `w + 1` words: the last warp has most to do.
#
# Let a warp rank its own 32 assignments. It has a mask and a counter of its own for each expert. The lowest lane of each expert leaves the number of
# its lanes in the counter. Then one thread for each expert adds up the counters of the warps, as the two-level scan does, and a rank is a sum of two numbers:

# %%
draw.warp_ranks([[2, 0, 2, 1, 3, 2, 0, 1], [1, 2, 3, 2, 0, 1, 2, 2]])

# %% [markdown]
# Neighbouring experts now have neighbouring words, so random experts lie in random banks. How a warp finds the lanes with the same expert is a
# hole once more. Your `match_any` could do it. When we measured the package's kernel, it took several times as long as an atomic *or* on a mask in shared memory; the
# table after step 6 compares the two here.
#
# **Prediction.** We save one clock for each bank conflict of a CTA.


# %%
@cuda.jit(device=True)
def lanes_by_mask(masks, at):
    cuda.atomic.or_(masks, at, 1 << (cuda.threadIdx.x & 31))
    cuda.syncwarp()  # all lanes have set their bits
    return uint32(masks[at])


@factory
def make_rank_per_warp(lanes_with):
    @cuda.jit(device=True)
    def rank_per_warp(e, scratch):
        masks, counters = scratch[: WARPS * BINS], scratch[WARPS * BINS :]
        tid, row = cuda.threadIdx.x, (cuda.threadIdx.x >> 5) * BINS
        same = lanes_with(masks, row + e)
        lower = same & lanemask_lt()
        if lower == 0:  # the lowest lane of each expert
            counters[row + e] = cuda.popc(same)
        cuda.syncthreads()
        if tid < EXPERTS:
            earlier, i = 0, tid
            while i < (cuda.blockDim.x >> 5) * BINS:
                of_warp = counters[i]
                counters[i] = earlier
                earlier += of_warp
                i += BINS
        cuda.syncthreads()
        return counters[row + e] + cuda.popc(lower)

    return rank_per_warp


ranked = make_align(publish_numbered, make_rank_per_warp(lanes_by_mask), collect_numbered)
lesson.step(
    "ranks per warp",
    (ranked, CTAS, 512, "cooperative"),
    predicted_us=page.less("numbered counts", page.conflicts_us("numbered counts")),
)

# %% [markdown]
# The prediction takes each conflict for a lost clock of the whole CTA. But the ranks stand between the stores and the loads of the exchange, where the CTA waits for the
# others anyway, so part of their time was never lost. And the new ranks need a barrier and more stores of their own: see *barriers* and *shared stores*.

# %%
say(
    "In an earlier version of these kernels, leaving the ranks out saved {first:.2f} us when they stood before the exchange, and only {overlapped:.2f} us when they "
    "stood where they are now.",
    **page.ranks_us(),
)

# %%
page.show_phases(
    make_align,
    {
        "numbered counts": (publish_numbered, rank_by_bits, collect_numbered),
        "ranks per warp": (publish_numbered, make_rank_per_warp(lanes_by_mask), collect_numbered),
    },
)

# %% [markdown]
# **Take away.** Let each warp work on what it has alone, and add up over warps once. Lay out shared memory so that the lanes of *one* access
# lie in different banks.
#
# ## Step 6: start before the kernel before has ended
#
# What is left before the first load is the launch, and the clearing of 37 KB of shared memory. With a dependent launch, as in [lesson 02](02_gate_decode.ipynb),
# the kernel clears its shared memory while the one before it still runs. `griddepcontrol.wait` returns when that one has ended, and
# `griddepcontrol.launch_dependents` lets the next one start.
#
# Where may each of the two go? `wait` stands before the first access to global memory; the workspace counts. `launch_dependents` has no effect before all CTAs have
# executed it or have ended, so all CTAs of this grid are resident by then, wherever it stands. But once it is released, the waiting CTAs of the next grid occupy registers,
# shared memory and places for warps of the SMs. Measure where it pays; here it stands after `collect`.
#
# **Prediction.** We save what starting and clearing took, minus the time of a dependent launch.
#
# The whole kernel, with all that you have built:

# %%
rank_per_warp = make_rank_per_warp(lanes_by_mask)


@cuda.jit
def align_dependent(
    topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, workspace, block_size, numel, length, chunk
):
    own, counts = cuda.shared.array(BINS, int32), cuda.shared.array(BOTH, int32)
    scratch, first_block = cuda.shared.array(SCRATCH, int32), cuda.shared.array(BINS, int32)
    tid, first = cuda.threadIdx.x, cuda.blockIdx.x * chunk
    clear(own, BINS)
    clear(counts, BOTH)
    clear(scratch, SCRATCH)
    cuda.syncthreads()
    griddepcontrol_wait()  # <-- new: from here on the kernel before has ended
    e = uint32(EXPERTS)
    if tid < chunk and first + tid < numel:
        e = uint32(topk_ids[first + tid])
    number = publish_numbered(e, own, workspace)
    rank = rank_per_warp(e, scratch)
    collect_numbered(number, topk_ids, workspace, counts, first, numel)
    griddepcontrol_launch_dependents()  # <-- new: the next kernel may start
    start, used = scan(blocks_of(counts[tid] + counts[BINS + tid], block_size) if tid < EXPERTS else int32(0))
    if tid < EXPERTS:
        first_block[tid] = start
    if tid == 0:
        first_block[EXPERTS] = used
    cuda.syncthreads()
    if e < EXPERTS:
        sorted_token_ids[first_block[e] * block_size + counts[e] + rank] = first + tid
    write_rest(first_block, counts, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length)


lesson.step(
    "dependent launch",
    (align_dependent, CTAS, 512, "cooperative", "dependent"),
    predicted_us=page.less("ranks per warp", page.start_us()),
)

# %% [markdown]
# The estimate knows that a dependent launch takes less, and not that clearing overlaps with the kernel before, so only a GPU shows the gain. The simulator shows
# something else: delete `griddepcontrol_wait()`, and it reports the race with the kernel before. Moved below `publish_numbered` it would be wrong, too, because the number
# could still be that of the launch before the last one. But relaxed accesses never race, and no detector objects.
#
# **Take away.** A kernel of a few microseconds spends a good part of them on starting. Let it start while the one before still works.
#
# How many CTAs? More of them have fewer assignments each, and write the rest faster. But each reads the counts of all, so the traffic grows with the square of
# their number. The other variants rank with `match_any`, and launch in order:


# %%
@cuda.jit(device=True)
def lanes_by_match(masks, at):
    return uint32(cuda.match_any_sync(FULL, at))


matched = make_align(publish_numbered, make_rank_per_warp(lanes_by_match), collect_numbered)
page.show_variants(
    "variants of the last step",
    {
        f"{CTAS} CTAs of 512 threads": (align_dependent, CTAS, 512, "cooperative", "dependent"),
        f"{2 * CTAS} CTAs of 256 threads": (align_dependent, 2 * CTAS, 256, "cooperative", "dependent"),
        "in order": (align_dependent, CTAS, 512, "cooperative"),
        "in order, with match_any": (matched, CTAS, 512, "cooperative"),
    },
)

# %% [markdown]
# ## 64 tokens: two warps for each expert
#
# An exchange has a fixed price, whatever the input: two trips through the L2, and as many rows to read as there are CTAs. In a decode step there are 512 assignments. Each CTA can count them
# all with one load a thread, so we begin with step 2's kernel. What is its critical path?

# %%
decode.step("every CTA counts all", (count_everything, CTAS, 512))

# %% [markdown]
# So few assignments keep no memory busy: a warp mostly waits for its own instructions. So the opposite of what paid above pays here: spread the work over as many warps as possible, and let **one**
# barrier separate the loads of the ids from the stores. After it no warp waits for another one. The scan is no longer needed: each warp adds up the blocks of the lower
# experts itself, 8 counts a lane and one `redux`. The rank of an assignment is not needed either: two warps serve an expert, one of which reads its assignments off the
# expert's mask, a word for each lane, while the other one writes the padding.
#
# A division takes some 20 instructions, and each lane would have to do eight. Multiplying by a rounded reciprocal is exact for up to 1024 assignments.


# %%
@cuda.jit(device=True)
def blocks_by_reciprocal(count, reciprocal):
    return int32(int32(count * reciprocal + ((1 << 20) - reciprocal)) >> 20)


@cuda.jit(device=True)
def blocks_below(counts, expert, reciprocal):
    """Return the blocks of the experts below one, and of all."""
    below, used, e = int32(0), int32(0), cuda.threadIdx.x & 31
    while e < EXPERTS:
        blocks = blocks_by_reciprocal(counts[e], reciprocal)
        used = int32(used + blocks)
        below = int32(below + (blocks if e < expert else int32(0)))
        e = int32(e + 32)
    return redux_sync_add_s32(FULL, below), redux_sync_add_s32(FULL, used)


@cuda.jit
def align_few(topk_ids, sorted_token_ids, expert_ids, total_tokens_post_pad, block_size, numel, length):
    counts, masks = cuda.shared.array(EXPERTS, int32), cuda.shared.array(MASKS, int32)
    lane, warp, thread, threads = cuda.threadIdx.x & 31, cuda.grid(1) >> 5, cuda.grid(1), cuda.gridsize(1)
    clear(counts, EXPERTS)
    clear(masks, MASKS)
    reciprocal = int32(uint32(block_size + ((1 << 20) - 1)) // uint32(block_size))
    cuda.syncthreads()
    griddepcontrol_wait()
    i = cuda.threadIdx.x
    while i < numel:  # every CTA counts all assignments, and notes each in the mask of its expert
        e = uint32(topk_ids[i])
        cuda.atomic.add(counts, e, 1)
        cuda.atomic.or_(masks, e * WORDS + (i >> 5), 1 << (i & 31))
        i = int32(i + cuda.blockDim.x)
    cuda.syncthreads()  # the only barrier between the ids and the outputs
    griddepcontrol_launch_dependents()
    mine = warp >> 1
    first, used = blocks_below(counts, mine, reciprocal)
    while mine < EXPERTS:  # once, unless the grid has fewer warps than experts
        if warp & 1 == 0:
            mask = uint32(masks[mine * WORDS + lane]) if lane < WORDS else uint32(0)
            mine_here = int32(cuda.popc(mask))  # assignments of the expert in this lane's word
            row = first * block_size + warp_inclusive_scan(mine_here, lane) - mine_here
            while mask != 0:
                sorted_token_ids[row] = 32 * lane + cuda.ffs(mask) - 1
                row += 1
                mask &= mask - uint32(1)  # without its lowest bit
        else:
            end = first + blocks_by_reciprocal(counts[mine], reciprocal)
            fill(sorted_token_ids, first * block_size + counts[mine] + lane, end * block_size, 32, numel)
            fill(expert_ids, first + lane, end, 32, mine)
        mine = int32(mine + (threads >> 6))
        if mine < EXPERTS:
            first, used = blocks_below(counts, mine, reciprocal)
    fill(sorted_token_ids, used * block_size + thread, length, threads, numel)
    fill(expert_ids, used + thread, blocks_of(length, block_size), threads, -1)
    if thread == 0:
        total_tokens_post_pad[0] = used * block_size


decode.step("two warps for each expert", (align_few, -(-EXPERTS // 4), 256))

# %%
decode_ctas = -(-EXPERTS // 4)
page.show_variants(
    "kernels for few tokens",
    {"in order": (align_few, decode_ctas, 256), "dependent": (align_few, decode_ctas, 256, "dependent")},
    decode,
)

# %% [markdown]
# The package's kernel for this input begins with the same idea and takes less. It loads eight counts with two loads of 16 bytes; and where `warp_inclusive_scan` exchanges five
# times, each time after the exchange before, it uses six ballots that do not wait for each other.
#
# **Take away.** The best kernel depends on what the input keeps busy. With few assignments it is the instructions of one warp, so that recomputing beats every form of waiting.
#
# ## What did not pay
#
# Some changes that we have tried with earlier versions of these kernels gained nothing, or next to nothing:

# %%
page.show_what_did_not_pay()

# %% [markdown]
# Note the first row: words with a number alone gained nothing. They pay only if a reader has all its loads in flight, and no more bytes to read.
#
# ## All steps

# %%
lesson.save(four, decode)
lesson.summary()

# %% [markdown]
# A factor compares with the step before as it was timed beside this one. 0x5 has two times: they depend on where its counters lie, as the table of allocations shows.
#
# And the compiled kernels of SGLang and vLLM, timed on the same GPU as the package. The last column has inputs that send all assignments to one
# expert: atomic operations on one counter are served one after another, while setting a bit in a mask takes as long for any input.

# %%
page.show_peers()

# %% [markdown]
# ## What the package does
#
# `moe_numba.moe_align_block_size` chooses by the number of assignments. For 256 experts:
#
# | assignments | kernel | the idea | here |
# |---|---|---|---|
# | up to 16 | [`small.py`](../moe_numba/align/small.py) | a warp for each assignment; compares assignments by shuffles, eight in flight | four tokens have 32 assignments, so the package already takes the next kernel |
# | up to 512 | [`one_expert_per_warp.py`](../moe_numba/align/one_expert_per_warp.py) | two warps for each expert, one barrier | 64 tokens |
# | up to 16,384 | [`medium.py`](../moe_numba/align/medium.py) | every CTA counts everything | step 2 |
# | up to 262,144 | [`large.py`](../moe_numba/align/large.py) | words with the number of the launch, several assignments a thread | step 6 |
# | more | [`counting_sort.py`](../moe_numba/align/counting_sort.py) | a warp adds up one expert's counts for all CTAs: a second exchange, and less to read | - |
#
# All accept invalid ids and an expert map, which costs them some instructions. `large.py` also sorts its assignments in shared memory, so that neighbouring lanes store to neighbouring rows: with
# 4096 tokens that does not pay yet, and the kernel of step 6 needs less time. During decoding the gate and the alignment can share a launch: see
# [gate and alignment in one launch](../docs/gate_and_alignment.md).
#
# **You can now** choose between recomputing, a barrier of the grid, and words that carry the number of the launch, and write each of them.
#
# ## Next step, not built
#
# In step 6 each CTA reads 64 rows of counts, of which it needs two sums. CTAs of a *cluster* can read each other's shared memory. **Build** an exchange in which a
# cluster of eight adds up its counts first, publishes only the sum, and reads 8 rows instead of 64. What must the CTAs of a cluster wait for, and does it take less than the 56 rows?

# %%
print(page.lower_bound())

# %% [markdown]
# ## Sources
#
# - SGLang's versions of the kernel: [lesson 03](03_align_published.ipynb) and the links there.
# - D. Merrill and M. Garland, *Single-pass parallel prefix scan with decoupled look-back*, 2016.
# - NVIDIA, *CUDA C++ Programming Guide*: cooperative groups, programmatic dependent launch; *PTX ISA*: memory consistency model, `griddepcontrol`.
# - Users who need the same order in every run: [sglang 33511](https://github.com/sgl-project/sglang/pull/33511),
#   [vllm 52532](https://github.com/vllm-project/vllm/pull/52532).
#
# Before: [03, alignment as published](03_align_published.ipynb). Next: [05, shared experts](05_shared_experts.ipynb), which are routed like all others
# and so must be aligned, too.
