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
# # One kernel
#
# A layer on several GPUs is a chain of launches: the exchange of counts, dispatch, grouping, permutation, two grouped GEMMs, the weighted sum, combine. Each launch
# waits for *all* of the one before it. While rows cross NVLink the tensor cores wait, and while the GEMMs compute the links do.
#
# This lesson has one question: **what may start when, and can one kernel with flags instead of launches do it?** You build a kernel in which some warps
# send rows while others multiply those that have arrived. Each step replaces one wait by a smaller one. Then you find out which warp should count what
# is finished, why the kernel cannot deadlock, and how it does deadlock after a change of one line. Three of the functions are yours to write.
#
# All sizes, and the number of ranks, stand in `moe_numba/course/lessons/one_kernel/sizes.py`.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from functools import cache

from numba import cuda, int32, uint64

from moe_numba.course.lessons.one_kernel import draw, exercises
from moe_numba.course.lessons.one_kernel import tables as page
from moe_numba.course.lessons.one_kernel.runs import Version, lesson
from moe_numba.course.lessons.one_kernel.tile import (
    CHAIN,
    COLUMNS,
    FIRST,
    RETURN,
    ROWS,
    SECOND,
    SEND,
    TILE_COLUMNS,
    WARPS,
    copy_row,
    make_memory,
    memory_of,
    multiply,
    pair,
    row_tiles,
    silu_and_mul,
    wait_for,
)
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.atomics import (
    red_add_relaxed_gpu_s32,
    red_add_release_sys_s32,
    st_relaxed_sys_s32,
    st_release_sys_s32,
)
from moe_numba.ptx.fence import fence_acq_rel_gpu
from moe_numba.ptx.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait_parity
from moe_numba.ptx.memory import pointer_from_address

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# Here is the chain of [lesson 15](15_moe_layer.ipynb), from a record that times dispatch, experts and combine apart. In each bar one of the two resources idles:

# %%
draw.chain(page.parts())

# %% [markdown]
# What does each part really need? No part but the last sum of a token needs *all* rows of anything:

# %%
draw.dependencies()

# %% [markdown]
# The **lower bound** is the two GEMMs: no overlap can make the layer shorter. For experts of DeepSeek-V3, 32 on each GPU, in FP8, records say how far the chain is from it:

# %%
page.show_bounds()

# %% [markdown]
# ## How steps are checked
#
# The page's kernel has small tiles, 16 rows by 16 columns, in bfloat16, which two warps compute by `mma.sync` from global memory. This lesson is about flags, places,
# order and fences; how a tile gets fast is the subject of lessons [06](06_hopper_gemm.ipynb) to [08](08_block_scales.ipynb), and the package's kernel has it all. So the times of the page's kernel
# say nothing about that of the package, and predictions on this page are those of a model for the package's.
#
# Each step runs three calls of the layer, all queued at once, on ranks that run ahead of each other as far as the kernels let them: one with random experts, one in which
# each rank's tokens have its own experts, so that no rank waits for rows, and one in which the first experts get all rows and the last rank none. Memory is **weakly ordered**: stores become visible late and in any order, unless a
# fence or a release orders them. Races are reported, and results are compared with torch.
#
# ## Step 1: rows travel in the order of the experts
#
# **Idea.** The chain sends a row once to each rank that has one of the token's experts. The receiver then groups and permutes rows, and can do so only when all are there.
# Send a row **once for each expert** instead, straight to its **place** among that expert's rows. Then the GEMM can read rows where they have arrived: neither grouping nor permutation is left.
#
# To know the place, a rank must know how many rows come before its own: those of earlier experts from all ranks, and those of the same expert from earlier ranks. That is
# an exclusive prefix sum over experts and ranks, and all it takes are the counts of all ranks.

# %%
EXAMPLE = [[3, 1, 0, 2], [1, 2, 2, 1]]  # rows of each rank for each expert: 2 ranks, 2 experts on each
draw.places(EXAMPLE, rank=0, experts=2)

# %% [markdown]
# What does it cost? More bytes, because two experts of a token are often on one rank:

# %%
page.show_bytes()

# %% [markdown]
# ## Build: the places
#
# Write `place_of`: how many rows come before those of rank `source` for expert `g`, in the memory of the rank that has `g`? Experts are numbered over all ranks, and each
# rank has `experts` consecutive ones. Rank `s` has `counts[at + s * ranks * experts + e]` rows for expert `e`. `source` may also be `ranks`: then the result is the end of the
# expert's rows. Par: each count that comes before is loaded once.


# %%
@cuda.jit(device=True)
def my_place_of(counts, at, ranks, experts, source, g):
    pass  # yours


place_of = exercises.place_of.use(my_place_of)

# %% [markdown]
# The first launch of a call sends this rank's counts to all ranks, waits for theirs, and computes places with your function. No rank can be a call ahead: to send rows it needs the
# counts of all ranks for this call, which a rank sends when its call before has ended. Counters to which other ranks add are **never cleared**: another rank may add rows of this call
# before this rank would have cleared them. They count the rows of all calls, and `state` has how many are expected. `done`, to which only this rank adds, is cleared here. Counts
# have two halves, which calls use alternately, since a rank may send those of the next call while another one still reads.


# %%
@factory
def make_exchange(place_of):
    @cache
    def exchange_of(sizes):
        ranks, experts, all_experts = sizes.ranks, sizes.experts, sizes.all_experts
        counts, pieces = sizes.counts, sizes.pieces

        @cuda.jit
        def exchange(local, peers, state, rank, first_rows, places, lengths, starts, done):
            t = int32(cuda.threadIdx.x)
            call = int32(state[0] + 1)
            at = int32(counts + (call & 1) * ranks * all_experts)
            for d in range(ranks):
                remote = pointer_from_address(peers[d], local)
                for g in range(t, all_experts, 32):
                    st_relaxed_sys_s32(remote, at + rank * all_experts + g, first_rows[g + 1] - first_rows[g])
            cuda.syncthreads()
            if t < ranks:
                st_release_sys_s32(pointer_from_address(peers[t], local), rank, call)
                wait_for(local, t, call)
            cuda.syncthreads()
            for g in range(t, all_experts, 32):
                places[g] = place_of(local, at, ranks, experts, rank, g)  # <-- a hole
            for e in range(t, experts, 32):
                g = int32(rank * experts + e)
                starts[e] = place_of(local, at, ranks, experts, int32(0), g)
                lengths[e] = int32(place_of(local, at, ranks, experts, int32(ranks), g) - starts[e])
                state[2 + e] = int32(state[2 + e] + lengths[e])  # rows that have arrived then, in all calls
                done[e], done[experts + e] = int32(0), int32(0)
            if t == 0:
                state[0], state[1] = call, int32(state[1] + pieces * first_rows[all_experts])

        return exchange

    return exchange_of


# %% [markdown]
# Four device functions move rows. `send_rows` is the work of one warp in each CTA: every `ctas`-th row of a rank and expert, expert by expert, so that all ranks' first experts are
# complete first. A row carries its **origin**: its rank, and its number among the rows of that rank. When a warp has sent its rows for an expert, it adds their number to the
# counter of the rank that has it, with a *release*: a thread that acquires the counter sees the rows.


# %%
@cuda.jit(device=True)
def send_rows(memory, x, tokens_of_rows, first_rows, places, cta, ctas, lane):
    for n in range(memory.experts * memory.ranks):
        e, d = int32(n // memory.ranks), int32((memory.rank + 1 + n % memory.ranks) % memory.ranks)
        g, sent, remote = int32(d * memory.experts + e), int32(0), memory_of(memory, d)
        for i in range(first_rows[g] + cta, first_rows[g + 1], ctas):
            row, source = int32(places[g] + i - first_rows[g]), int32(tokens_of_rows[i] * memory.words)
            copy_row(remote, memory.rows + row * memory.words, x, source, memory.words, lane)
            if lane == 0:
                remote[memory.origins + row] = int32(memory.rank * memory.assignments + i)
            sent = int32(sent + 1)
        cuda.syncwarp()
        if lane == 0 and sent > 0:
            red_add_release_sys_s32(remote, memory.arrived + e, sent)


@cuda.jit(device=True)
def place_in_y(memory, row):
    return memory.local, int32(memory.y + row * memory.words)


@cuda.jit(device=True)
def place_at_home(memory, row):
    origin = memory.local[memory.origins + row]
    rank = int32(origin // memory.assignments)
    return memory_of(memory, rank), int32(memory.back + (origin - rank * memory.assignments) * memory.words)


@cuda.jit(device=True)
def count_at_home(memory, row, rows, pieces, lane):
    if lane < memory.ranks:  # a lane for each rank
        count = int32(0)
        for r in range(row, row + rows):
            count = int32(count + (memory.local[memory.origins + r] // memory.assignments == lane))
        if count > 0:
            red_add_release_sys_s32(memory_of(memory, lane), memory.returned, pieces * count)


# %% [markdown]
# `count_at_home` tells the ranks of some rows that pieces of them have come back; a rank knows how many pieces it expects.
#
# Now the kernel. A CTA has four warps, with the roles that the package's kernel has, too:
#
# - Two **consumer** warps multiply. A tile has 16 rows of one expert, and 16 columns, 8 for each warp. In the first GEMM these are columns of gate and of up, and
#   the warp stores `silu(gate) * up`; in the second one they are columns of the result.
# - The **leader** waits until a tile's rows are there, and lets the consumers begin by an mbarrier. With a second mbarrier the consumers say that they have stored it. Even and odd tiles have mbarriers
#   of their own, so that the leader is one tile ahead and a phase cannot be missed.
# - The **mover** sends rows, and brings rows back.
#
# The tiles of the first GEMM come before those of the second, expert by expert; the first CTA has tiles 0, `ctas`, `2 * ctas` and so on. `parts` says which of its four parts a launch
# does. Step 1 launches the kernel four times, once for each; a launch that does all of them is step 2. Holes are `place` and, in the leader,
# `rows_needed`, `wait_for_first` and `count_first`; the order of tiles and the sending of rows are exchanged only to break them:


# %%
@cuda.jit(device=True)
def ascending(n, begin, end, cta, ctas):
    return int32(begin + cta + n * ctas)  # tile n of this CTA


@factory
def make_kernel(rows_needed, wait_for_first, place, count_first=None, tile_of=ascending, send=send_rows):
    goes_home, consumers_count = place is not place_in_y, count_first is None

    @cache
    def kernel_of(sizes):
        experts, hidden, intermediate, words = sizes.experts, sizes.hidden, sizes.intermediate, sizes.words
        columns_1, columns_2, half = -(-intermediate // TILE_COLUMNS), -(-hidden // TILE_COLUMNS), intermediate // 2
        pieces, shared = sizes.pieces, make_memory(sizes)

        @cuda.jit(device=True)
        def look_up(lengths, starts, tile, tiles_1):
            is_second, columns = tile >= tiles_1, int32(columns_1)
            if is_second:
                tile, columns = int32(tile - tiles_1), int32(columns_2)
            e = int32(0)
            while tile >= row_tiles(lengths[e]) * columns:
                tile, e = int32(tile - row_tiles(lengths[e]) * columns), int32(e + 1)
            first, column = int32(tile // columns * ROWS), int32(tile % columns * TILE_COLUMNS)
            return e, is_second, int32(starts[e] + first), int32(min(lengths[e] - first, ROWS)), column

        @cuda.jit(device=True)
        def count_tile(memory, done, e, is_second, row, rows, warps, lane):
            if is_second and goes_home:
                count_at_home(memory, row, rows, warps, lane)
            elif lane == 0:
                fence_acq_rel_gpu()
                red_add_relaxed_gpu_s32(done, e + (experts if is_second else 0), warps)

        @cuda.jit(device=True)
        def finish(memory, barriers, done, lengths, starts, n, tile, tiles_1, lane):
            mbarrier_wait_parity(barriers, 2 + (n & 1), n >> 1 & 1)  # the consumers have stored tile n
            if not consumers_count:
                e, is_second, row, rows, _ = look_up(lengths, starts, tile, tiles_1)
                count_tile(memory, done, e, is_second, row, rows, int32(WARPS), lane)

        @cuda.jit
        def one_kernel(
            local, peers, state, rank, parts, x, tokens, first_rows, places, lengths, starts, done, w13, w2, activated
        ):
            memory = shared(local, peers, rank)
            lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
            cta, ctas = int32(cuda.blockIdx.x), int32(cuda.gridDim.x)
            barriers = cuda.shared.array(4, uint64)  # 0, 1: rows are there; 2, 3: a tile is stored
            if cuda.threadIdx.x == 0:
                for slot in range(2):
                    mbarrier_init(barriers, slot, 1)
                    mbarrier_init(barriers, 2 + slot, WARPS)
                fence_mbarrier_init()
            cuda.syncthreads()
            tiles = int32(0)  # of rows
            for e in range(experts):
                tiles = int32(tiles + row_tiles(lengths[e]))
            tiles_1 = int32(tiles * columns_1)
            begin = int32(0) if parts & FIRST else tiles_1
            end = int32(tiles_1 + tiles * columns_2) if parts & SECOND else tiles_1
            own_tiles = int32((end - begin - cta + ctas - 1) // ctas)

            if warp < WARPS:  # ==== Consumers ====
                for n in range(own_tiles):
                    tile = tile_of(n, begin, end, cta, ctas)
                    e, is_second, row, rows, column = look_up(lengths, starts, tile, tiles_1)
                    column = int32(column + warp * COLUMNS)
                    mbarrier_wait_parity(barriers, n & 1, n >> 1 & 1)
                    if is_second:
                        w = int32((e * hidden + column) * half)
                        acc = multiply(activated, row * half, rows, w2, w, half, lane)
                    else:
                        at, w = int32(memory.rows + row * words), int32((e * 2 * intermediate + column) * words)
                        gate = multiply(local, at, rows, w13, w, words, lane)
                        acc = silu_and_mul(gate, multiply(local, at, rows, w13, w + intermediate * words, words, lane))
                    for lower in range(2):
                        r = int32((lane >> 2) + 8 * lower)
                        if r < rows:
                            to, at = activated, int32((row + r) * half)
                            if is_second:
                                to, at = place(memory, int32(row + r))  # <-- a hole
                            to[at + (column >> 1) + (lane & 3)] = pair(acc, lower)
                    cuda.syncwarp()  # all lanes have stored
                    if consumers_count:
                        count_tile(memory, done, e, is_second, row, rows, int32(1), lane)
                    if lane == 0:
                        mbarrier_arrive(barriers, 2 + (n & 1))

            if warp == WARPS:  # ==== Leader ====
                before = int32(0)
                for n in range(own_tiles):
                    tile, is_finished = tile_of(n, begin, end, cta, ctas), n == 0  # <-- a hole
                    e, is_second, row, rows, column = look_up(lengths, starts, tile, tiles_1)
                    if not consumers_count:
                        if n > 0 and count_first(is_second, before >= tiles_1):  # <-- a hole
                            finish(memory, barriers, done, lengths, starts, int32(n - 1), before, tiles_1, lane)
                            is_finished = True
                    if is_second:
                        wait_for_first(done, lengths, e, experts, columns_1 * WARPS)  # <-- a hole
                    else:
                        first, last = rows_needed(e, experts)  # <-- a hole
                        for other in range(first, last):
                            wait_for(local, memory.arrived + other, state[2 + other])
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(barriers, n & 1)
                    if not is_finished:
                        finish(memory, barriers, done, lengths, starts, int32(n - 1), before, tiles_1, lane)
                    before = tile
                if own_tiles > 0:
                    finish(memory, barriers, done, lengths, starts, int32(own_tiles - 1), before, tiles_1, lane)

            if warp == WARPS + 1:  # ==== Mover ====
                if parts & SEND:
                    send(memory, x, tokens, first_rows, places, cta, ctas, lane)
                if parts & RETURN:
                    for e in range(0 if goes_home else experts):
                        wait_for(done, experts + e, row_tiles(lengths[e]) * pieces)
                        for row in range(starts[e] + cta, starts[e] + lengths[e], ctas):
                            to, at = place_at_home(memory, int32(row))
                            copy_row(to, at, local, memory.y + row * words, words, lane)
                            cuda.syncwarp()
                            count_at_home(memory, int32(row), int32(1), int32(pieces), lane)
                    if cta == 0:
                        wait_for(local, memory.returned, state[1])  # this rank's rows are back

        return one_kernel

    return kernel_of


# %% [markdown]
# `wait_for(counters, at, count)` polls with an acquire until a counter has reached a number; it compares by the difference, so that a
# counter that has already passed the number ends the wait, too, and may overflow. `multiply` is the tile's product of one warp, `pair` two of its columns as a word. They stand in
# [`tile.py`](../moe_numba/course/lessons/one_kernel/tile.py).
#
# At first the leader waits for everything. The mover that brings rows back waits for one expert at a time; in step 1 the launch boundary hides that. Launches of a rank run one
# after the other, so within the rank nothing has to be waited for; rows of *other* ranks do have to be.


# %%
@cuda.jit(device=True)
def rows_of_all(e, experts):
    return int32(0), experts  # experts whose rows must be there: from the first to before the last


@cuda.jit(device=True)
def first_gemm_of_all(done, lengths, e, experts, counts_of_a_tile):
    for other in range(experts):
        wait_for(done, other, row_tiles(lengths[other]) * counts_of_a_tile)


exchange = make_exchange(place_of)
kernel = make_kernel(rows_of_all, first_gemm_of_all, place_in_y)
step("launches by expert", Version(exchange, kernel, CHAIN))

# %% [markdown]
# A third kernel adds up the rows of each token, in the order of its experts, in float32, and rounds once; it is the same in all steps.
#
# **Take away.** A rank that has all counts can compute all places. Then a row needs to move only once, to where it is used. By itself this may not pay: the additional bytes take longer than
# grouping and permutation did. It pays because the next steps can hide these bytes.
#
# ## Step 2: one launch
#
# **Bottleneck.** Three of the launches start only when *all* CTAs of the launch before have ended.
#
# **Idea.** The same kernel does all parts in one launch. The leader already waits for what two of the boundaries waited for: all rows, and all tiles of the first
# GEMM. For the third one the mover waits for `done[experts + e]`, one expert at a time, so rows already go back while the second GEMM runs. A CTA no longer waits for the slowest CTA of each launch, only for what is counted.
#
# All CTAs must be **resident** at the same time, as they wait for each other: one CTA for each SM.

# %%
print(page.predict("one_launch"))

# %%
step("one launch", Version(exchange, kernel))

# %% [markdown]
# The critical path is that of the warp that has most to do in a launch, and one launch now has all parts. Launches are those of both ranks, each with the exchange of counts, the kernel's, and the sum.
#
# **Take away.** A launch boundary is a wait for everything, which flags can do as well. It pays only when flags then wait for less.
#
# ## Step 3: a tile waits for its expert's rows
#
# **Bottleneck.** The first tile waits until the last row has arrived. With many tokens that is the whole dispatch.
#
# **Idea.** There is a counter for each expert. A tile waits for that of its own expert. Rows are sent expert by expert, and tiles are in the same order, so the first tiles can begin
# when about one part in `experts` of the rows is there.

# %%
print(page.predict("rows_of_an_expert"))


# %%
@cuda.jit(device=True)
def rows_of_expert(e, experts):
    return e, int32(e + 1)


kernel = make_kernel(rows_of_expert, first_gemm_of_all, place_in_y)
step("rows of an expert", Version(exchange, kernel))

# %% [markdown]
# The score counts the same work. What changed is *when*: the next table counts tiles of the first GEMM that were stored before the last row of their rank arrived, tiles
# of the second one that were stored before the last tile of the first one, and pieces of rows that were at home before the last tile of the second one was stored. The simulator runs warps in random
# order, so these are shares of several runs, and no times:

# %%
page.show_overlap("one launch", "rows of an expert")

# %% [markdown]
# **Take away.** Send in the order in which it is needed, and count in the units in which it is needed.
#
# ## Step 4: a tile of the second GEMM waits for its expert's tiles
#
# **Bottleneck.** The first tile of the second GEMM waits for the last one of the first GEMM. While the last tiles are computed, CTAs without one idle.
#
# **Idea.** `done[e]` counts the tiles of the first GEMM that are stored for expert `e`. A tile of the second one needs all columns of its rows, and all tiles of rows of its expert are
# as good: it waits for its expert. The tiles of expert 0 were the first ones, so they have long been done when the second GEMM starts.
#
# **Prediction.** The model has GEMMs without a tail, so it predicts nothing here. The idle time is at most one tile of the first GEMM in each CTA:

# %%
print(page.tail())

# %% [markdown]
# ## Build: the wait of the second GEMM
#
# Write `wait_for_expert`: wait until all tiles of the first GEMM for expert `e` have been counted in `done[e]`. Expert `e` has `lengths[e]` rows, that is
# `row_tiles(lengths[e])` blocks of 16 rows. The tiles of one block, over all columns, together add `counts_of_a_tile` to the counter: each tile adds one for each consumer warp. You have `wait_for(done, index, count)`.


# %%
@cuda.jit(device=True)
def my_wait_for_expert(done, lengths, e, experts, counts_of_a_tile):
    pass  # yours


wait_for_expert = exercises.wait_for_expert.use(my_wait_for_expert)

# %%
kernel = make_kernel(rows_of_expert, wait_for_expert, place_in_y)
step("tiles of an expert", Version(exchange, kernel))

# %%
page.show_overlap("rows of an expert", "tiles of an expert")

# %% [markdown]
# **Take away.** Between two dependent GEMMs a counter for each group of rows replaces a barrier of the whole grid.
#
# ## Step 5: rows go home from the epilogue
#
# **Bottleneck.** Results are stored in `y`, and the movers load and send them when an expert's tiles are done. A row is stored twice, and the last expert's rows leave after the last tile.
#
# In the model, rows go back after the last tile in all steps before this one. The page's movers return an expert's rows earlier, as the table above shows, so the gain of this step is smaller than predicted
# where the links are not the limit.
#
# **Idea.** The epilogue of the second GEMM stores its columns of a row at the rank that has the token: `place_at_home` computes where from the row's origin, and a store
# to another GPU is a store. A rank counts *pieces*, since the columns of a row come from several warps. The pass of the movers is gone.

# %%
print(page.predict("rows_go_home"))

# %%
kernel = make_kernel(rows_of_expert, wait_for_expert, place_at_home)
step("rows go home", Version(exchange, kernel))

# %%
page.show_overlap("tiles of an expert", "rows go home")

# %% [markdown]
# **Take away.** With peer memory mapped, an epilogue can store to any GPU. What is left to organise is the address, and a count for the rank that waits.
#
# ## What a count costs
#
# A count says: *everything that I stored before is visible*. So it is a **release**, a fence and an atomic addition. The fence waits until the stores of the warp have been acknowledged, those at
# other GPUs by way of NVLink there and back. Consumers that count their tile at once stand still as long.
#
# **Choose.** What if the mover counts rows *before* it sends them, to save the wait? "A": the results are right, because the stores arrive before another warp notices the count. "B": the results are
# right, because a release orders all stores of the warp. "C": a tile may read rows that are not there.

# %%
exercises.early.check(...)

# %% [markdown]
# The next cell runs it: the flag is written before the data.


# %%
@cuda.jit(device=True)
def send_counts_first(memory, x, tokens_of_rows, first_rows, places, cta, ctas, lane):
    for n in range(memory.experts * memory.ranks):
        e, d = int32(n // memory.ranks), int32((memory.rank + 1 + n % memory.ranks) % memory.ranks)
        g, remote = int32(d * memory.experts + e), memory_of(memory, d)
        count = int32((first_rows[g + 1] - first_rows[g] - cta + ctas - 1) // ctas)
        if lane == 0 and count > 0:
            red_add_release_sys_s32(remote, memory.arrived + e, count)
        for i in range(first_rows[g] + cta, first_rows[g + 1], ctas):
            row, source = int32(places[g] + i - first_rows[g]), int32(tokens_of_rows[i] * memory.words)
            copy_row(remote, memory.rows + row * memory.words, x, source, memory.words, lane)
            if lane == 0:
                remote[memory.origins + row] = int32(memory.rank * memory.assignments + i)


early = make_kernel(rows_of_expert, wait_for_expert, place_at_home, None, ascending, send_counts_first)
print(page.brief(lesson.orders(Version(exchange, early), seeds=2)))

# %% [markdown]
# ## Step 6: the leader counts
#
# **Bottleneck.** Every tile of a CTA ends with a fence, during which its consumers do not multiply.
#
# **Idea.** The leader has time. Consumers say by an mbarrier that they have stored a tile, and start the next one. The leader has let them begin that, and now counts the one before: its fence
# covers the consumers' stores, because the mbarrier ordered them before it (*cumulativity*). So a tile is counted while the next one is computed.
#
# There is one exception. The next tile may be of the second GEMM and wait for the one that is not counted yet: the leader would wait for its own count. So it counts the last tile of the first GEMM
# **at once**, before it waits for the next.
#
# **Prediction.** Consumers no longer wait for a fence after each tile. At most:

# %%
print(page.fences())


# %%
@cuda.jit(device=True)
def at_the_change(is_second, was_second):
    return is_second and not was_second


kernel = make_kernel(rows_of_expert, wait_for_expert, place_at_home, at_the_change)
step("the leader counts", Version(exchange, kernel))

# %% [markdown]
# A tile is counted once now, and not once by each of two warps.
#
# What the same change did for the package's kernel is in [How it is built](../docs/one_kernel.md#how-it-is-built).
#
# **Take away.** A warp that has nothing to multiply can wait for stores on behalf of those that have.
#
# ## Step 7: why it cannot deadlock
#
# Warps wait for counters here that other warps raise, on this GPU and on others. Three observations suffice:
#
# 1. **Movers wait for nothing before they have sent all rows.** They need the counts of all ranks, and the launch before has those. So every counter of rows reaches its number.
# 2. **The unfinished tile with the lowest number can always be done.** A CTA's tiles ascend, so its CTA has finished all its earlier tiles, and this one is next. A tile of the first GEMM waits only
#    for rows (1). A tile of the second one waits for tiles of the first, whose numbers are all lower: these are finished.
# 3. **What is finished is counted** before a leader waits in vain for it. Consumers that count at once do so. A leader that counts later has at most one tile that it has not counted. If it waits for rows, these
#    arrive anyway (1). If it waits for tiles of the first GEMM, its uncounted tile is one of the second (`at_the_change`), for which only the mover of
#    each rank's CTA 0 waits. No tile waits for that mover, so the leader's wait ends, and then it counts.
#
# And all CTAs are resident: otherwise a CTA that runs could wait for one that cannot start. An argument is a beginning; the simulator runs each step in several orders of threads, and reports
# a deadlock as soon as no thread can continue. Here is the last step in several more, and then without the exception of step 6: the last tile of the first GEMM is counted late.


# %%
@cuda.jit(device=True)
def never(is_second, was_second):
    return False


print("as above:", lesson.orders(Version(exchange, kernel), seeds=4), "", sep="\n")
late = make_kernel(rows_of_expert, wait_for_expert, place_at_home, never)
print("counted late:", page.brief(lesson.orders(Version(exchange, late), seeds=2)), sep="\n")

# %% [markdown]
# In the report a leader polls `done`, and the consumers of its CTA wait for the mbarrier by which it would let them begin. The count that the leader waits for is its own.
#
# ## Break: another order
#
# The order of tiles is a hole, too: `tile_of(n, begin, end, cta, ctas)` is the tile that CTA `cta` of `ctas` computes as its n-th, of those from `begin` to before `end`. Write an order in which every tile is still
# computed exactly once, by whichever CTA, but the kernel deadlocks. CTA `cta` computes `(end - begin - cta + ctas - 1) // ctas` tiles. The exercise runs the waits and counts of the kernel without its
# GEMMs, with a count right after each tile, and shows the simulator's report.


# %%
@cuda.jit(device=True)
def my_order(n, begin, end, cta, ctas):
    pass  # yours


exercises.deadlock.check(my_order)

# %% [markdown]
# **Choose.** Which of these orders can deadlock? "A": each CTA computes consecutive tiles, the first CTA the first ones. "B": both GEMMs of expert 0, then both of expert 1, and so on, CTA after CTA.
# "C": the tiles of the second GEMM first.

# %%
exercises.orders.check(...)

# %% [markdown]
# ## The package's kernel
#
# `ExpertParallelMoE(..., fused=True)` launches [`one_kernel`](../moe_numba/moe_layer/expert_parallel/one_kernel/kernel.py), with the flags of this page and tiles as in [lesson 08](08_block_scales.ipynb): 128 rows by 256 columns, in FP8 or bfloat16, `wgmma`, TMA, four stages.
# Its CTA has 12 warps: eight consumers, one that issues TMA loads and waits for rows, two that write the factors of FP8 tiles and count, one mover, which copies rows through shared memory by bulk copies.
# Two things are different here, and a third below:
#
# - **Which warps count.** Two warps write factors, the products of scales, to every stage. They count a tile just before they write the last factors of the next one, so the consumers cannot finish that before the tile
#   is counted. At the change of GEMMs they count at once, as the leader does in step 6. Both count, so a tile of the first GEMM counts 2.
# - **A TMA load reads through the async proxy.** After an acquire, a proxy fence must order it behind what other threads have stored.
#
# Here is that wait, and the count. `told` says of which GEMM the tile is, 1 or 2. The first GEMM's count stays on this GPU, so a fence for the GPU is enough. The second one's go to the ranks that have the tokens, one for all rows of a rank, and
# `destinations` has the rank of each row of the tile (a warp of factors has 64 of them, two for each lane):

# %%
print(page.show_code("wait_count(ctx, counter, place, expected, code, g)", lines=2))

# %%
print(page.show_code("def count_stored"))

# %% [markdown]
# The third difference is **which CTA computes a tile**. On this page tiles are dealt out round robin: CTA c of n computes the tiles c, c + n, c + 2n and so on. An earlier version of the package's kernel did that, too. It numbers an expert's tiles
# by columns, and for each tile of columns by blocks of 128 rows. An expert with 129 to 192 rows has a full block and one of at most 64 rows, with half of the multiplications, so its full and half tiles alternate. Every expert has an even number of
# tiles, and there are 132 CTAs, so half of the CTAs got the full tiles of all such experts. Now a CTA's first tile has its own number. When its loading thread has issued all loads of a tile, it takes the next number from a counter:

# %%
print(page.show_code("tile = int32(cuda.gridDim.x + atom_add_relaxed_gpu_s32", lines=1))

# %% [markdown]
# With 512 tokens an expert has 128 rows on average, so about half of the experts have two tiles. Before you look: how much more than the mean does the busiest CTA multiply?

# %%
page.show_balance()

# %% [markdown]
# (A half tile loads all of its weights, so it takes more than half the time of a full one, and the gain is smaller than the table says.) The argument of step 7 holds as before: tiles are taken in ascending order, so the lowest unfinished one is
# with a CTA that has finished its earlier ones, or is the next to be taken. Which CTA computes a tile depends on time now, the result does not. [How it is built](../docs/one_kernel.md#how-it-is-built) says what the change gained.
#
# And waits have a timeout: a rank that died must end with an error message, not in a loop.
#
# ## What did not pay, and when a chain is better
#
# Recorded times of a DeepSeek-V3 layer in FP8, 32 experts on each GPU: the best chain of launches, launches by expert (step 1 with the package's kernels), one kernel, and its two GEMMs
# alone, where they are recorded.

# %%
page.show_records()

# %% [markdown]
# Three limits of the idea:
#
# - **Few tokens.** With few rows per expert reading the weights takes nearly all of the time, for one kernel as for a chain. There is little to overlap: only what the chain takes beside its GEMMs.
# - **SMs set aside for communication** are lost to the GEMMs for the whole launch. A warp in each CTA costs issue slots and L2 bandwidth, of which the GEMMs leave some.
# - **One expert with all rows.** Then there is one counter, and the kernel waits as in step 2; its rank computes while all others wait. Flags cannot balance load.
#
# The table has a change of the chain that gained little, and one kernel with few tokens where a record has it. [Measured](../docs/one_kernel.md#measured) has all recorded times of the package's kernel.

# %%
page.show_lost()

# %% [markdown]
# ## The timeline after
#
# The same resources as in the first figure, now in the model of [One kernel: a model](../docs/one_kernel.md): when the first rows are there, the GEMMs end, the last row is at home, and the last sum is stored.

# %%
draw.kernel(page.timelines())

# %% [markdown]
# Steps, as the model sees them:

# %%
page.show_model()

# %% [markdown]
# ## Predict: the way home
#
# On 8 GPUs with 4096 tokens on each, all rows of the second GEMM cross NVLink in bfloat16, once for each expert (top-8, 7168 columns), unless the token is on the same GPU. How many microseconds does that
# take at the push rate below, and is the second GEMM longer or shorter than that? Write the microseconds; a tenth more or less is fine.

# %%
print(page.rate())
exercises.way_home.check(microseconds=...)

# %% [markdown]
# ## All steps

# %%
lesson.save()
lesson.summary()

# %% [markdown]
# **You can now** say of each part of a layer what it waits for, replace a launch boundary by counters, and argue that no wait is in vain.
#
# ## Next steps, not built
#
# - **The sum in the moving warps.** A token whose rows are all back could be added up while other rows are still on their way. The movers have time, and the last launch would be gone.
# - **Pairs of CTAs that share weights.** Two tiles of rows of the same expert load the same weights. In a cluster TMA multicasts them, as in lesson [06](06_hopper_gemm.ipynb).
#
# ## Sources
#
# - DeepSeek: [DeepGEMM, pull request 383](https://github.com/deepseek-ai/DeepGEMM/pull/383), MegaMoE: dispatch, both GEMMs and combine in one kernel.
# - FlashInfer: pull requests [4069](https://github.com/flashinfer-ai/flashinfer/pull/4069) and [4113](https://github.com/flashinfer-ai/flashinfer/pull/4113).
# - DeepSeek: [DeepEP](https://github.com/deepseek-ai/DeepEP), whose low-latency dispatch also sends a row once for each expert.
# - NVIDIA: *PTX ISA*, memory consistency model: release patterns, causality order, proxies.
# - The package's kernel: [`one_kernel`](../moe_numba/moe_layer/expert_parallel/one_kernel), and the same as launches:
#   [`by_launches.py`](../moe_numba/course/lessons/one_kernel/by_launches.py).
#
# Before: [15, a layer](15_moe_layer.ipynb). This is the last lesson of the course. [Use the kernels](../docs/usage.md) is where to go from here, or back to
# [lesson 00](00_start_here.ipynb), whose table has all of them.
