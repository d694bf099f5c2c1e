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
# # Grouped GEMM
#
# A mixture-of-experts layer sends each token to a few experts. Each expert then multiplies its tokens by its own weights. So the layer needs
# many GEMMs whose numbers of rows differ, and only the GPU knows them.
#
# This lesson has one question: **how does one launch compute the GEMMs of all experts, whatever their sizes?** You start with the persistent
# kernel of [lesson 06](06_hopper_gemm.ipynb), one launch per expert. Then you teach it to find its tiles itself: you count tiles, you write the
# schedulers, and you decide which rows a tile may load and store. It ends as a kernel that needs neither padding, nor a tensor map per expert,
# nor a kernel that runs before it.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import numpy as np
from numba import cuda, int32, int64, uint8, uint32, uint64

from moe_numba.course.lessons.grouped_gemm import draw, exercises
from moe_numba.course.lessons.grouped_gemm import runs as page
from moe_numba.course.lessons.grouped_gemm.runs import Table, Tile, Version, lesson
from moe_numba.course.lessons.grouped_gemm.sizes import (
    BAND,
    BLOCK_K,
    BUFFER_BYTES,
    HEAD_BYTES,
    MANY,
    MAP_BYTES,
    MAPS_BYTES,
    MMA_WARPS,
    ROW_BYTES,
    ROWS,
    TABLE,
    THREADS,
    TILE_N,
    W_BYTES,
    WARPGROUP_BYTES,
)
from moe_numba.course.lessons.hopper.runs import Ring, advance, wait_for_buffer, wait_for_stores
from moe_numba.course.steps.lesson import factory
from moe_numba.grouped_gemm.common.scheduler import divide, num_tiles  # of two int32, rounded down and up
from moe_numba.ptx.accumulators import make_fma, make_for_each_chunk
from moe_numba.ptx.cp_async import bulk_commit_group
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.matrix import make_stmatrix_columns, stmatrix_rows
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4  # for your answers
from moe_numba.ptx.tensormap import (
    fence_proxy_tensormap_acquire_gpu,  # for your answers
    make_tensormap_replace_global_dim,
    tensormap_cp_fenceproxy,
    tensormap_replace_global_address,
)
from moe_numba.ptx.tma import tma_load_2d, tma_load_3d, tma_store_2d
from moe_numba.ptx.warp import FULL_MASK, warp_inclusive_scan  # for your answers
from moe_numba.ptx.warpgroup import bar_sync, elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# The package's kernel is the one to which this lesson leads. It is faster than a loop over cuBLAS where rows spread over many groups, and not
# where one GEMM is large enough to fill the GPU alone. The sweep at the end has all recorded cases, also those that it loses.
#
# ## The problem
#
# The rows of `x` are sorted by expert, which here is called a **group**. Group `g` has `lengths[g]` rows, the first of which is `starts[g]`.
# Each group has weights of its own:

# %%
draw.problem((5, 0, 9, 3))

# %% [markdown]
# `x` and the weights are **FP8** (`e4m3`), as in lesson 06. The kernel multiplies the results of a group by `scales[g]`, and rounds them to
# bfloat16. The reference is a loop, here in torch:
#
# ```python
# for g in range(groups):
#     rows = slice(starts[g], starts[g] + lengths[g])
#     y[rows] = (x[rows].float() @ weight[g].float().T * scales[g]).bfloat16()
# ```
#
# (The article that we follow passes its scale to `torch._scaled_mm` as `scale_a` *and* as `scale_b`, which applies it twice.)
#
# ## Lower bound
#
# All weights of groups that have rows must be read once, and every row must be multiplied:

# %%
page.show_bounds()

# %% [markdown]
# Up to a few hundred rows per group, reading the weights takes longest. There, a good kernel streams weights from DRAM and does everything else
# meanwhile. With more rows the tensor cores are the limit, as in lesson 06.
#
# ## The kernel, with holes
#
# This is the persistent kernel with specialised warps of lesson 06, and it stands until the end of this lesson. Weights are now the first part
# of a stage, and a tensor map with three dimensions has those of all groups: the box has two, and the third coordinate is the group. It has five
# holes:
#
# - `get_table` puts a table into shared memory: how many tiles of rows come before group `g`, and behind the last group how many there are.
# - `next_tile` returns the tile that has a number: its group, its first row in the group, its rows, and its place `n` among the tiles of weights.
# - `place` says which tensor map has the rows of a tile, and where in it they begin.
# - `multiply` and `store` do what they did in lesson 06.


# %%
@factory
def make_grouped_gemm(get_table, next_tile, place, multiply, store, tokens, stages, subtiles=1):
    stage_bytes, subtile = W_BYTES + tokens * BLOCK_K, tokens // subtiles
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    at, zeros = stages * stage_bytes // 4 + TABLE, (np.float32(0),) * (tokens // 2)
    give_registers, take_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)

    @cuda.jit
    def grouped_gemm(x, map_w, y, scales, lengths, starts, first, groups, n_tiles, k_blocks):
        # shared memory, in bytes, words and barriers: the stages, their barriers, the table, what stores need
        smem, words = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, int32, 1024)
        barriers = cuda.shared.array(0, uint64, 1024)
        ring = Ring(smem, barriers, int32(full), int32(empty), int32(stages), int32(stage_bytes))
        table = Table(words, int32(at), groups)
        thread, number = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(barriers, full + s, 1)  # the producer, and bytes
                mbarrier_init(barriers, empty + s, MMA_WARPS)  # lane 0 of each consumer warp
            fence_mbarrier_init()
        get_table(table, lengths, first, tokens)  # <-- a hole: the tiles of rows before each group
        cuda.syncthreads()
        tiles = int32(words[uint32(at + groups)] * n_tiles)

        if thread >= 32 * MMA_WARPS:
            # the producer's warpgroup
            give_registers()
            if thread < 32 * MMA_WARPS + 32 and elect_sync(FULL_MASK):
                stage, phase = int32(0), uint32(1)
                while number < tiles:
                    tile = next_tile(table, lengths, n_tiles, number, tokens)  # <-- a hole: the scheduler
                    map_at, row = place(x, int32(0), starts, tile)  # <-- a hole: where the rows are
                    column = int32(tile.n * TILE_N)
                    for k in range(k_blocks):
                        mbarrier_wait_parity(barriers, empty + stage, phase)
                        barrier, offset, k_at = int32(full + stage), int32(stage * stage_bytes), int32(k * BLOCK_K)
                        mbarrier_arrive_expect_tx(barriers, barrier, stage_bytes)
                        tma_load_3d(smem, offset, map_w, 0, k_at, column, tile.group, barriers, barrier)
                        for s in range(subtiles):  # one, until step 8
                            to = int32(offset + W_BYTES + s * (subtile * BLOCK_K))
                            tma_load_2d(smem, to, x, map_at, k_at, int32(row + s * subtile), barriers, barrier)
                        stage, phase = advance(ring, stage, phase)
                    number = int32(number + int32(cuda.gridDim.x))
        else:
            # two warpgroups of consumers
            take_registers()
            warpgroup, lane = int32(thread >> 7), int32(thread & 31)
            stage, phase = int32(0), uint32(0)
            while number < tiles:
                acc = zeros
                for _ in range(k_blocks):
                    mbarrier_wait_parity(barriers, full + stage, phase)
                    offset = int32(stage * stage_bytes)
                    acc = multiply(acc, smem, offset, warpgroup)  # <-- a hole: add the product of a stage
                    if lane == 0:
                        mbarrier_arrive(barriers, empty + stage)
                    stage, phase = advance(ring, stage, phase)
                tile = next_tile(table, lengths, n_tiles, number, tokens)  # <-- the same scheduler
                store(smem, words, y, acc, tile, scales[tile.group], starts, n_tiles)  # <-- a hole: store the tile
                number = int32(number + int32(cuda.gridDim.x))
            wait_for_stores()

    return grouped_gemm


# %% [markdown]
# Producer and consumers never talk about tiles. Both ask the same scheduler for the same numbers, so they get the same tiles.
#
# ## Build: which group has a tile?
#
# The table says where the tiles of each group begin. A group without rows begins where the next one does. Write `group_of`, which returns
# the group of a tile of rows. `table.words[uint32(table.at + g)]` is the number of tiles before group `g`, and there are `table.groups` groups.
# One lane of the producer calls it, and all lanes of each consumer warp. Par: 6 loads for 32 groups.


# %%
@cuda.jit(device=True)
def my_group_of(table, m):
    pass  # yours: the group of tile m


group_of = exercises.group_of.use(my_group_of)

# %% [markdown]
# ## Step 1: a launch per group
#
# These functions fill the holes for the beginning. `horizontal` is the article's name for this order: neighbouring CTAs compute tiles of the
# same rows, `n` runs fastest. `cut` gives each tile its rows.


# %%
@cuda.jit(device=True)
def copy_table(table, lengths, first, tokens):
    for g in range(int32(cuda.threadIdx.x), table.groups + 1, THREADS):
        table.words[uint32(table.at + g)] = first[g]


@cuda.jit(device=True)
def horizontal(table, n_tiles, number):
    m = divide(number, n_tiles)
    group = group_of(table, m)
    return group, int32(m - table.words[uint32(table.at + group)]), int32(number - m * n_tiles)


@cuda.jit(device=True)
def cut(length, m, tokens):  # first row, counted from that of the group, and rows of its tile m
    row = int32(m * tokens)
    return row, int32(min(tokens, int32(length - row)))


@factory
def make_next_tile(order, cut):
    @cuda.jit(device=True)
    def next_tile(table, lengths, n_tiles, number, tokens):
        group, m, n = order(table, n_tiles, number)
        row, rows = cut(lengths[group], m, tokens)
        return Tile(group, row, rows, n)

    return next_tile


@cuda.jit(device=True)
def place_in_all(maps, which, starts, tile):
    return int32(0), int32(starts[tile.group] + tile.row)  # one map, which has the rows of all groups


# %% [markdown]
# `multiply` and `store` are those of lesson 06, the latter with TMA. A warp stores 16 rows of 64 columns at a time, and two buffers take turns.
# Rows of x are the first operand of `wgmma`, so a warpgroup has 64 of a tile's 128 rows.


# %%
@factory
def make_multiply(columns):
    add, wait = make_wgmma_tile(columns, "e4m3", accumulate=True), make_wgmma_wait(columns, 0)

    @cuda.jit(device=True)
    def multiply(acc, smem, offset, warpgroup):
        a = wgmma_descriptor(smem, int32(offset + W_BYTES) + warpgroup * WARPGROUP_BYTES)  # the warpgroup's rows of x
        return wait(add(acc, a, wgmma_descriptor(smem, offset)))

    return multiply


@factory
def make_store_by_warps(place, stages):
    buffers = stages * (W_BYTES + 128 * BLOCK_K) + HEAD_BYTES
    fma, zeros = make_fma(64), (np.float32(0),) * 32

    @cuda.jit(device=True)
    def store_64_columns(first, values, smem, y, map_at, buffer, row, column, scale):
        lane = int32(cuda.threadIdx.x & 31)
        buffer = int32(buffer + (first >> 5 & 1) * BUFFER_BYTES)
        wait_for_buffer()
        cuda.syncwarp()
        t = int32(lane & 15)
        scaled = fma(zeros, values, scale)
        stmatrix_rows(smem, int32(buffer + 128 * t + (((t & 7) ^ (lane >> 4)) << 4)), scaled)
        fence_proxy_async_shared()
        cuda.syncwarp()
        if elect_sync(FULL_MASK):
            tma_store_2d(y, map_at, int32(column + 2 * first), row, smem, buffer)
            bulk_commit_group()

    for_each_64_columns = make_for_each_chunk(64, 32, store_64_columns)

    @cuda.jit(device=True)
    def store(smem, words, y, acc, tile, scale, starts, n_tiles):
        warp = int32(cuda.threadIdx.x >> 5)
        map_at, row = place(y, int32(MAP_BYTES), starts, tile)
        own = int32(buffers + 2 * BUFFER_BYTES * warp)
        for_each_64_columns(acc, smem, y, map_at, own, int32(row + 16 * warp), int32(tile.n * TILE_N), scale)

    return store


multiply_rows, next_horizontal = make_multiply(128), make_next_tile(horizontal, cut)
store_in_all = make_store_by_warps(place_in_all, 6)
one_map = make_grouped_gemm(copy_table, next_horizontal, place_in_all, multiply_rows, store_in_all, 128, 6)
step("a launch per group", Version(one_map))

# %% [markdown]
# The host makes tensor maps of each group's rows of `x` and `y`, and launches the kernel with a table of one group. TMA fills rows beyond a
# group with zeros when it loads, and skips them when it stores, because the map ends there.
#
# The loop has two faults. The host must know the lengths, so it waits for the GPU that has just computed them (that wait is not in the times
# below). And the launches run one after another: each has a first load that nothing hides, and a last wave that does not fill the GPU. A third
# fault is our own: a launch has `n_tiles` tiles here, fewer than there are SMs, because a tile has all rows of a small group. cuBLAS takes
# smaller tiles:

# %%
page.show_loop(Version(one_map))

# %% [markdown]
# **Take away.** A loop of GEMMs costs launches, a wait for the host, and a ragged end per launch. A persistent kernel has one launch and one
# ragged end, if it can find its tiles itself.
#
# ## Where does a tile begin?
#
# CuTe, with which the article's kernel is written, cuts a tensor into boxes, so tiles begin at multiples of the box. Groups do not. Then a
# tile has rows of two groups, which need different weights. The article sees two ways out:

# %%
draw.tile_starts((5, 3, 9, 2), 4)

# %% [markdown]
# **Predict.** How many tiles of 128 rows have the 32 groups of our problem, whose lengths are printed here, and how many percent of the rows
# that the MMAs multiply are padding?

# %%
print(page.lengths_of(ROWS).tolist())
exercises.padding.check(tiles=..., percent=...)

# %% [markdown]
# ## Step 2: padding, one tensor map
#
# Copy each group's rows to a multiple of 128. Then all groups share one map, and one launch of the same kernel computes all tiles: the
# machine code is that of step 1, only the launch differs. Some small kernels of torch count the tiles, compute where each row goes, and copy
# rows there and results back.
#
# **Prediction.** The kernel takes as long as its busiest unit, and both copies run at the rate of a large copy.

# %%
predicted_us = page.limits(ROWS, 128).us + page.copies_us()
step("padding, one tensor map", Version(one_map, "padded"), predicted_us=predicted_us)

# %%
page.show_padding()

# %% [markdown]
# The small kernels of torch are not in the prediction; the table below counts them. They and the copies are what we pay here. The MMAs that multiply
# zeros are hidden behind the loads of weights as long as groups are small.
#
# **Take away.** Padding turns ragged groups into a regular problem. You pay for copies of all rows and, with many rows, for MMAs that multiply zeros.
#
# ## Step 3: a tensor map per group
#
# The other way out: each group gets its own tensor maps, of `x` and of `y`. They begin at the group's first row and end behind its last one,
# as the maps of step 1 did. But now the GPU makes them, because it knows the lengths. This is the article's kernel `update_grouped_tma`. One warp
# edits the maps of a group: it copies a **template**, made by the host, to shared memory, and replaces the address and the number of rows.
# Strides and box stay. One further warp counts tiles.


# %%
@factory
def make_update_grouped_tma(count_tiles, tokens):
    replace_rows = make_tensormap_replace_global_dim(1)  # of dimension 1; dimension 0 is innermost

    @cuda.jit
    def update_grouped_tma(map_x, map_y, maps, x, y, lengths, starts, first, groups, n, k):
        copies = cuda.shared.array(0, uint8, 1024)  # of both templates
        lane, g = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
        if g == groups:
            count_tiles(lengths, groups, tokens, first, int32(0))  # <-- a hole: yours
        else:
            for i in range(lane, MAP_BYTES, 32):
                copies[i] = map_x[i]
                copies[MAP_BYTES + i] = map_y[i]
            cuda.syncwarp()
            rows = max(lengths[g], int32(1))  # a map must have a row; no tile uses that of an empty group
            if lane == 0:
                tensormap_replace_global_address(copies, 0, x, int64(starts[g]) * k)
                replace_rows(copies, 0, rows)
            if lane == 1:
                tensormap_replace_global_address(copies, MAP_BYTES, y, int64(starts[g]) * n)
                replace_rows(copies, MAP_BYTES, rows)
            cuda.syncwarp()
            tensormap_cp_fenceproxy(maps, MAPS_BYTES * g, copies, 0)  # to global memory, and a release
            tensormap_cp_fenceproxy(maps, MAPS_BYTES * g + MAP_BYTES, copies, MAP_BYTES)

    return update_grouped_tma


# %% [markdown]
# `tensormap.cp_fenceproxy` copies a map and is a **release**: whatever acquires it sees the whole map. TMA reads maps through a cache of its own,
# so the thread that issues copies must **acquire** a map before it uses it, or TMA may use the old one.
#
# The article asks whether `tma_store_fence`, which lesson 06 calls `fence_proxy_async_shared`, is an acquire or a release, and answers: **both**.
# That is right. It orders all accesses of the thread to shared memory, reads and writes, before and after it, between the generic proxy and
# the async proxy. No write may move behind it, and no TMA copy in front of it. (The article also commits and waits for bulk copies here.
# `tensormap.replace` is none, so nothing is waited for; `syncwarp` does the work.)
#
# ## Build: count the tiles
#
# Write `count_tiles`. All 32 lanes of a warp call it. For each of up to 256 groups, store the number of tiles of `tokens` rows in the groups before
# it to `first[at + g]`, and the number of all tiles to `first[at + groups]`. `num_tiles(length, tokens)` rounds up. You may use
# `cuda.shfl_up_sync`, or `warp_inclusive_scan(value, lane)`, which makes five shuffles. Par: five shuffles for any number of groups.


# %%
@cuda.jit(device=True)
def my_count_tiles(lengths, groups, tokens, first, at):
    pass  # yours


count_tiles = exercises.count_tiles.use(my_count_tiles)

# %% [markdown]
# ## Build: the place of a tile
#
# In the article, the main kernel copies like this:
#
# ```c++
# cute::copy(tma_a.with(td_x, readable[ismem_write]), tAg(_, itile_m, itile_k), tAs(_, 0, 0, ismem_write));
# ```
#
# `tma.with(td_x, barrier)` says: use the map `td_x` instead of the one from the host, and report to this barrier. And `tAg` is no memory. It is
# a **coordinate tensor**, which turns indices of a tile into coordinates. The map decides what the coordinates mean. A group's map begins at its
# first row, so row 0 is the group's row 0, and one `tAg` serves all groups, if the index counts the tiles *of the group*.
#
# Write `place` for maps of groups. `maps` is where they lie in global memory: group `g` has its map of x at byte `MAPS_BYTES * g`, and that of y
# `MAP_BYTES` behind; `which` is 0 or `MAP_BYTES`. Acquire the map with `fence_proxy_tensormap_acquire_gpu(maps, index)`. Return its index, and
# the coordinate of the tile's first row.


# %%
@cuda.jit(device=True)
def my_place(maps, which, starts, tile):
    pass  # yours; return index, row


place_in_group = exercises.place.use(my_place)

# %% [markdown]
# **Prediction.** The copies disappear. The MMAs stay the same, and so do the loads: TMA fills a box with zeros where padding was.

# %%
update_128 = make_update_grouped_tma(count_tiles, 128)
store_in_group = make_store_by_warps(place_in_group, 6)
mapped = make_grouped_gemm(copy_table, next_horizontal, place_in_group, multiply_rows, store_in_group, 128, 6)
MAPPED = dict(way="maps", update=update_128)
predicted_us = page.changed_by("padding, one tensor map", -page.copies_us())
step("a tensor map per group", Version(mapped, **MAPPED), predicted_us=predicted_us)

# %% [markdown]
# The saving is larger than that of two copies, because the small kernels of torch went as well.
#
# **Take away.** A tensor map is 128 bytes of data, and a kernel can edit it. The coordinates of a copy count from where its map begins.
#
# ## Step 4: another order
#
# The order of tiles decides which CTAs run at the same time, and so what they can share in the L2 cache:

# %%
draw.orders((2, 1, 3), 4, 6)

# %% [markdown]
# Horizontal: neighbours share rows of x. **Vertical**: neighbours share weights, if a group has several tiles of rows. The article's kernel takes
# the vertical order for large weights, and says that horizontal mode searches the table linearly, vertical mode by halves. The order does not
# need that: `group_of` is the same in both.
#
# **Prediction.** No change: either order reads all weights from DRAM once, and x fits into L2.


# %%
@cuda.jit(device=True)
def vertical(table, n_tiles, number):
    tiles = table.words[uint32(table.at + table.groups)]  # of rows, in all groups
    n = divide(number, tiles)
    m = int32(number - n * tiles)
    group = group_of(table, m)
    return group, int32(m - table.words[uint32(table.at + group)]), n


next_vertical = make_next_tile(vertical, cut)
across = make_grouped_gemm(copy_table, next_vertical, place_in_group, multiply_rows, store_in_group, 128, 6)
predicted_us = page.changed_by("a tensor map per group", 0)
step("vertical order", Version(across, **MAPPED), predicted_us=predicted_us)

# %% [markdown]
# ## Build: bands
#
# Between both orders lie **bands**: take `BAND` tiles of rows, all groups counted together, in vertical order; then the next `BAND`. The
# last band may be smaller. With a band of 1 this is horizontal, with a band of all tiles vertical. (Triton's tutorial calls it *grouped ordering*.)


# %%
@cuda.jit(device=True)
def my_bands(table, n_tiles, number):
    pass  # yours; return group, m (counted from the group's first tile), n


in_bands = exercises.bands.use(my_bands)

# %%
banded = make_grouped_gemm(
    copy_table, make_next_tile(in_bands, cut), place_in_group, multiply_rows, store_in_group, 128, 6
)
orders = {"horizontal": mapped, "vertical": across, f"bands of {BAND}": banded}
page.show_sizes("order", {name: Version(kernel, **MAPPED) for name, kernel in orders.items()})

# %% [markdown]
# Every order reads all weights once, and yet they differ, and which is best depends on the rows. In horizontal order, the CTAs that run together read the
# weights of few experts; in vertical order they read a part of every expert's. We do not know what in DRAM or the L2 cache makes the difference. For the
# 2048 rows of the steps horizontal order is good, so we go on with it.
#
# **Take away.** The scheduler is a function from a number to a tile. An order pays if the CTAs that run together need the same bytes *and* these
# bytes are the limit.
#
# ## Few rows
#
# With 32 rows most tiles have one row, and `wgmma` multiplies 64 for each warpgroup. Its first operand always has 64 rows. Its second operand may
# have any multiple of 8, up to 256. So exchange the operands, and compute the transposed product:

# %%
draw.padded_work((1, 8, 16, 40, 64, 100))

# %% [markdown]
# ## Step 5: transposed MMA
#
# `multiply` exchanges two descriptors. Each warpgroup now has 64 *weights*, and all rows of x. So `store` must change, too: the neighbours in a
# thread's fragment belong to different rows of y. `stmatrix` with `.trans` transposes blocks of 8 x 8 on the way to shared memory. Four warps
# hold the 64 columns of a row together, so the warpgroup meets at a named barrier, and one lane stores all rows.
#
# **Prediction.** With 128 rows in a tile, as here, nothing changes: the MMAs are the same.


# %%
@factory
def make_transposed_multiply(tokens):
    add, wait = make_wgmma_tile(tokens, "e4m3", accumulate=True), make_wgmma_wait(tokens, 0)

    @cuda.jit(device=True)
    def multiply(acc, smem, offset, warpgroup):
        a = wgmma_descriptor(smem, offset + warpgroup * WARPGROUP_BYTES)  # the warpgroup's weights
        return wait(add(acc, a, wgmma_descriptor(smem, int32(offset + W_BYTES))))

    return multiply


@factory
def make_store_by_warpgroup(place, tokens, stages):
    buffers, stmatrix = stages * (W_BYTES + tokens * BLOCK_K) + HEAD_BYTES, make_stmatrix_columns(ROW_BYTES)

    @cuda.jit(device=True)
    def store(smem, words, y, acc, tile, scale, starts, n_tiles):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5)
        warpgroup, quarter = int32(warp >> 2), int32(warp & 3)
        buffer, vector = int32(buffers + warpgroup * (tokens * ROW_BYTES)), int32(2 * quarter + (lane >> 3 & 1))
        if quarter == 0:
            wait_for_stores()  # the last tile's store has read the buffer
        bar_sync(int32(1 + warpgroup), 128)
        stmatrix(smem, int32(buffer + (lane & 7) * ROW_BYTES + ((vector ^ (lane & 7)) << 4)), acc, scale)
        fence_proxy_async_shared()
        bar_sync(int32(1 + warpgroup), 128)
        if quarter == 0 and elect_sync(FULL_MASK):  # the elected lane alone asks for the place
            map_at, row = place(y, int32(MAP_BYTES), starts, tile)
            tma_store_2d(y, map_at, int32(tile.n * TILE_N + 64 * warpgroup), row, smem, buffer)
            bulk_commit_group()

    return store


@factory
def make_transposed(tokens, stages):
    multiply, store = make_transposed_multiply(tokens), make_store_by_warpgroup(place_in_group, tokens, stages)
    return make_grouped_gemm(copy_table, next_horizontal, place_in_group, multiply, store, tokens, stages)


def transposed_version(tokens, stages):
    update = make_update_grouped_tma(count_tiles, tokens)
    return Version(make_transposed(tokens, stages), "maps", tokens, stages, transposed=True, update=update)


predicted_us = page.changed_by("a tensor map per group", 0)
step("transposed MMA", transposed_version(128, 6), after="a tensor map per group", predicted_us=predicted_us)

# %% [markdown]
# What the step is for, the next one shows: tiles of 16 rows.
#
# **Take away.** wgmma's two operands are not alike: one has 64 rows, the other any multiple of 8. Put the ragged dimension where the granularity
# is fine.
#
# ## Step 6: rows of a tile
#
# Now a tile can have as many rows as we like. The article chooses `kTileM` by the *average* length, which the host knows without waiting: 16, 32,
# or 48 for averages up to these numbers, and 64 above. Smaller tiles have less padding. But each tile loads its 128 rows of weights from L2, so
# smaller tiles load the same weights more often:

# %%
TILES = {tokens: transposed_version(tokens, stages) for tokens, stages in ((16, 8), (32, 8), (48, 8), (64, 8), (96, 7))}
page.show_tile_sizes(TILES | {128: transposed_version(128, 6)})

# %% [markdown]
# The model names the unit that it finds busiest. For 64 rows per group on average the article takes tiles of 64. But an average is not a maximum: a
# group with 65 rows needs two tiles, and then reads its weights from L2 twice. Compare the tiles of 64 and 96 rows. The model does not see that where
# DRAM is busier; it also has no cost for a tile as such, so with 32 rows it says the same for all sizes.
#
# **Prediction.** The busiest unit of the model.

# %%
step("tiles of 96 rows", TILES[96], predicted_us=page.limits(ROWS, 96).us)

# %% [markdown]
# **Take away.** The size of a tile is a compromise between padding and loads. The average tells the host which compromise; it says nothing
# about one hot expert.
#
# ## Do groups need maps?
#
# TMA does not care for boxes that CuTe cuts: a box may begin at any row. So **one** map of x is enough, if a tile may also load rows of the next
# group. It may. A row of the result depends on one row of x alone, so such rows only make results that nobody needs. They must not be stored.
# A TMA store knows nothing of groups; it would write them over the results of the next group. So threads store the rows of the
# tile, and no others.
#
# ## Build: store the rows of a tile
#
# A warpgroup has written 16 rows of 64 columns to shared memory, at byte `buffer`. The 16-byte vector `v` of row `r` lies at byte
# `128 * r + ((v ^ (r & 7)) << 4)` of it. Store the first `rows` of them (there may be more than 16, or none) to rows `row`, `row + 1`, ... of y, at
# `column`. A row of y has `pitch` words of two elements. All 128 threads call the function. You have:
#
# - `ld_shared_s32x4(words, index)` returns four words of shared memory, and `index` counts words.
# - `st_global_s32x4(y, index, a, b, c, d)` stores them; make the index an `int64`.


# %%
@cuda.jit(device=True)
def my_store_chunk(words, buffer, y, row, rows, column, pitch):
    pass  # yours


store_chunk = exercises.store_chunk.use(my_store_chunk)

# %% [markdown]
# ## Step 7a: no maps of groups
#
# Here is the store around yours: 16 rows at a time, two buffers take turns, so that one barrier per chunk is enough. And each CTA counts the
# tiles itself, with your `count_tiles`. So nothing runs before the kernel any more. The place of a tile in x is that of steps 1 and 2,
# without padding.
#
# **Prediction.** We save the kernel that makes the maps.


# %%
@cuda.jit(device=True)
def count_table(table, lengths, first, tokens):
    if cuda.threadIdx.x < 32:
        count_tiles(lengths, table.groups, tokens, table.words, table.at)


@factory
def make_store_rows(store_chunk, tokens, stages):
    buffers, stmatrix = stages * (W_BYTES + tokens * BLOCK_K) + HEAD_BYTES, make_stmatrix_columns(ROW_BYTES)

    @cuda.jit(device=True)
    def store_16_rows(first, values, smem, words, y, buffer, row, rows, column, pitch, scale):
        lane, quarter = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
        buffer = int32(buffer + (first >> 3 & 1) * BUFFER_BYTES)  # 8 accumulators are 16 rows
        vector = int32(2 * quarter + (lane >> 3 & 1))
        stmatrix(smem, int32(buffer + (lane & 7) * ROW_BYTES + ((vector ^ (lane & 7)) << 4)), values, scale)
        bar_sync(int32(1 + (cuda.threadIdx.x >> 7)), 128)
        store_chunk(words, buffer, y, int32(row + 2 * first), int32(rows - 2 * first), column, pitch)

    for_each_16_rows = make_for_each_chunk(tokens // 2, 8, store_16_rows)

    @cuda.jit(device=True)
    def store(smem, words, y, acc, tile, scale, starts, n_tiles):
        warpgroup = int32(cuda.threadIdx.x >> 7)
        buffer, row = int32(buffers + warpgroup * (2 * BUFFER_BYTES)), int32(starts[tile.group] + tile.row)
        column, pitch = int32(tile.n * TILE_N + 64 * warpgroup), int32(n_tiles * (TILE_N // 2))
        bar_sync(int32(1 + warpgroup), 128)  # all threads have read the last tile's chunks
        for_each_16_rows(acc, smem, words, y, buffer, row, tile.rows, column, pitch, scale)

    return store


@factory
def make_without_maps(next_tile, store_chunk, tokens, stages):
    multiply, store = make_transposed_multiply(tokens), make_store_rows(store_chunk, tokens, stages)
    return make_grouped_gemm(count_table, next_tile, place_in_all, multiply, store, tokens, stages)


ONE_MAP = dict(way="one map", tokens=96, stages=7, transposed=True)
without_maps = make_without_maps(next_horizontal, store_chunk, 96, 7)
predicted_us = page.without_update("tiles of 96 rows", TILES[96])
step("no maps of groups", Version(without_maps, **ONE_MAP), predicted_us=predicted_us)

# %% [markdown]
# This step changes where the rows are, how they are stored, and who counts. They belong together: without maps nothing clips what a tile stores.
#
# **Diagnose.** A colleague finds the comparison with `rows` superfluous: the next group's tile stores its own rows anyway. This version always
# stores whole chunks of 16 rows. What is wrong? The check lists four candidates.


# %%
@cuda.jit(device=True)
def store_whole_chunk(words, buffer, y, row, rows, column, pitch):
    if rows > 0:
        store_chunk(words, buffer, y, row, int32(16), column, pitch)


whole_chunks = make_without_maps(next_vertical, store_whole_chunk, 96, 7)  # tiles of the same columns, side by side
exercises.whole_chunks.check(..., Version(whole_chunks, **ONE_MAP))

# %% [markdown]
# The package's scheduler has two further ideas, which do not need this step. Each is measured alone, against it.
#
# ## Step 7b: one group after the other
#
# In horizontal order, the CTAs that run together share rows of x, and a group with three tiles of rows reads its weights three times. In this order, too, a
# group is finished before the next one begins, but its tiles of rows are innermost: the CTAs that run together share its weights.
#
# **Prediction.** No change for the step's 2048 rows, where a group has one tile, and both orders are the same. The table below has more rows.


# %%
@cuda.jit(device=True)
def by_group(table, n_tiles, number):
    group = group_of(table, divide(number, n_tiles))  # group g begins with number n_tiles * (its first tile)
    before, behind = table.words[uint32(table.at + group)], table.words[uint32(table.at + group + 1)]
    own = int32(number - before * n_tiles)
    n = divide(own, int32(behind - before))
    return group, int32(own - n * int32(behind - before)), n


grouped = make_without_maps(make_next_tile(by_group, cut), store_chunk, 96, 7)
predicted_us = page.changed_by("no maps of groups", 0)
step("one group after the other", Version(grouped, **ONE_MAP), after="no maps of groups", predicted_us=predicted_us)

# %% [markdown]
# ## Step 7c: even tiles
#
# A group of 100 rows has two tiles of at most 96, with 96 rows and 4. Even tiles have 56 and 44: rows are split evenly, rounded up to 8.
#
# **Predict.** The kernel always loads and multiplies boxes of 96 rows. What do even tiles change in its time?

# %%
exercises.even.check(...)


# %%
@cuda.jit(device=True)
def cut_evenly(length, m, tokens):
    tiles = num_tiles(length, tokens)
    size = int32((num_tiles(length, tiles) + 7) & -8)
    row = int32(m * size)
    return row, int32(min(size, int32(length - row)))


even = make_without_maps(make_next_tile(horizontal, cut_evenly), store_chunk, 96, 7)
predicted_us = page.changed_by("no maps of groups", 0)
step("even tiles", Version(even, **ONE_MAP), after="no maps of groups", predicted_us=predicted_us)

# %%
both = make_without_maps(make_next_tile(by_group, cut_evenly), store_chunk, 96, 7)
alone = {"no maps of groups": without_maps, "one group after the other": grouped, "even tiles": even, "both": both}
page.show_sizes("alone", {name: Version(kernel, **ONE_MAP) for name, kernel in alone.items()})

# %% [markdown]
# Even tiles can hardly pay in a kernel with one size of MMA. They do in a kernel that has several sizes and takes the smallest one that holds a tile, as
# the package's does.
#
# **Take away.** One map is enough where stores respect the groups. Change one thing at a time: of three ideas that come together, some may do
# nothing.
#
# ## Step 8: two subtiles
#
# With 8192 rows a group has 256, thus three tiles of 96, and each loads all weights from L2. A tile of 288 rows would load them once. But an MMA
# has at most 256 columns, and a thread 232 registers. So a stage holds **two subtiles** of 144 rows behind one tile of weights, and a
# warpgroup multiplies its weights by both:

# %%
draw.subtiles(144)

# %% [markdown]
# 144 of a thread's registers are accumulators, and nothing but `multiply` changes. **Prediction** for 8192 rows: the busiest unit of the model.
# With 2048 rows, a group has one tile either way, and the MMAs multiply many more columns than rows.

# %%
print(", ".join(f"{tokens} rows: {page.limits(MANY, tokens).us:.0f} us" for tokens in (96, 288)), "for 8192 rows")


@factory
def make_two_multiplies(tokens):
    half, held = tokens // 2, tokens // 4  # rows of a subtile, and a thread's accumulators of them
    add, wait = make_wgmma_tile(half, "e4m3", accumulate=True), make_wgmma_wait(half, 0)

    @cuda.jit(device=True)
    def multiply(acc, smem, offset, warpgroup):
        a = wgmma_descriptor(smem, offset + warpgroup * WARPGROUP_BYTES)
        b = wgmma_descriptor(smem, int32(offset + W_BYTES))
        left = add(acc[:held], a, b)
        right = add(acc[held:], a, wgmma_descriptor(smem, int32(offset + W_BYTES + half * BLOCK_K)))
        return wait(left) + wait(right)  # the first wait is for both

    return multiply


@factory
def make_two_subtiles(next_tile, store_chunk, tokens, stages):
    multiply, store = make_two_multiplies(tokens), make_store_rows(store_chunk, tokens, stages)
    return make_grouped_gemm(count_table, next_tile, place_in_all, multiply, store, tokens, stages, 2)


TWO = Version(make_two_subtiles(make_next_tile(by_group, cut), store_chunk, 288, 4), "one map", 288, 4, True, 2)
step("two subtiles", TWO, after="one group after the other")

# %%
page.show_sizes("subtiles", {"one of 96 rows": Version(grouped, **ONE_MAP), "two of 144 rows": TWO})

# %% [markdown]
# With 8192 rows the model promises more than comes, and we do not know what it misses: its busiest unit is busy for that long, but not only it.
#
# **Take away.** Load a tile of weights once, and use it for as many rows as registers hold. The best tile depends on the number of rows, so a
# library needs several kernels and a rule, and the host only knows the average.
#
# ## What did not pay, and why

# %%
page.show_what_did_not_pay()

# %% [markdown]
# ## All steps

# %%
lesson.summary()

# %% [markdown]
# ## Even and skewed rows
#
# Routers are not fair. `Zipf` gives group g a share proportional to 1 / (g + 1); *all in one group* is a single hot expert. Here is the kernel of
# step 7b beside a loop over cuBLAS, which knows all lengths and chooses its tiles for each, and beside the package, which by default promotes sums to
# float32 (step 9 of lesson 06), and with the tensor cores' fast accumulation, as cuBLAS and this lesson have it. If the run also had kernels of other
# projects, they follow, with one scale per group as well, and the line below the table has their versions:

# %%
page.show_last(Version(grouped, **ONE_MAP))

# %%
lesson.save()

# %% [markdown]
# And this is the record of `python -m moe_numba bench grouped_gemm` with all peers, of another run: compare times within a table. A star marks the
# fastest of a row. hpc-ops is the library of the article. `torch, grouped` is
# `torch._scaled_grouped_mm`. DeepGEMM's FP8 kernels need block scales, so they appear in [lesson 08](08_block_scales.ipynb).

# %%
page.show_sweep()

# %%
print(page.losses())

# %% [markdown]
# In those cases the tensor cores are the limit, and the loop has few launches or one, each of which fills the GPU. cuBLAS adds up with
# the tensor cores' *fast accumulation*, while the package's default promotes each stage to float32 as in step 9 of lesson 06. With one hot expert that is
# most of the difference, as the table before shows in its column of the package with fast accumulation.
#
# **You can now** give a persistent GEMM a scheduler for groups of any size, and choose its tiles by a model of the busiest unit.
#
# ## Next step, not built
#
# **Build** a kernel that has both: even tiles *and* an MMA that fits each of them. Compile `multiply` and `store` for two sizes, choose by
# `tile.rows` (all threads of a warpgroup take the same branch), and measure with rows by Zipf's law. The column of lower bounds above says how
# far there is to go.
#
# ## Sources
#
# - The article *CUTLASS CUTE 7: hpc-ops 之 group gemm & tma*, in Chinese, on [Tencent/hpc-ops](https://github.com/Tencent/hpc-ops),
#   `src/group_gemm/kernels.cuh`. [Its claims](../docs/claims.md#hpc-ops) beside our measurements.
# - NVIDIA: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/) (`tensormap.replace`, `tensormap.cp_fenceproxy`, `fence.proxy`).
# - DeepSeek-AI: [DeepGEMM](https://github.com/deepseek-ai/DeepGEMM), grouped GEMMs with one map and padded or masked groups.
# - Triton: [matrix multiplication](https://triton-lang.org/main/getting-started/tutorials/03-matrix-multiplication.html), *grouped ordering*.
# - The package's kernel: `moe_numba/grouped_gemm/wgmma/kernel.py`, with its scheduler in `moe_numba/grouped_gemm/common/scheduler.py`.
#
# Before: [06, a Hopper GEMM](06_hopper_gemm.ipynb). Next: [08, block scales](08_block_scales.ipynb): each 128 elements of k
# have a scale of their own.
