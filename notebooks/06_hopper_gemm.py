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
# # A Hopper GEMM
#
# Nearly all the work of a mixture-of-experts layer is matrix multiplication. An SM of an H200 has tensor cores that do 8192 FP8 operations per
# clock. Feeding them is the hard part: the operands must come from the L2 cache to shared memory, wait there at the right moment, and leave
# room for the next ones.
#
# So this lesson has one question: **how does a GEMM reach the tensor cores' limit?** You start with a kernel that loads, multiplies, loads,
# multiplies. Then you let the parts overlap, one after the other: first loads with MMAs, then tiles with tiles, then stores with
# everything. You write the producer that feeds the tensor cores, and you find out why a bigger tile is slower than a smaller one.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.course.lessons.hopper import draw, exercises
from moe_numba.course.lessons.hopper import runs as page
from moe_numba.course.lessons.hopper.runs import (
    Ring,
    Version,
    advance,
    lesson,
    wait_for_buffer,  # for your answers
    wait_for_stores,
)
from moe_numba.course.lessons.hopper.sizes import (
    A_BYTES,
    BARRIER_BYTES,
    BLOCK_K,
    BUFFER_BYTES,
    FREE,
    MMA_WARPS,
    ROWS,
    WARPGROUP_BYTES,
    WRITTEN,
)
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.accumulators import make_fma, make_for_each_chunk
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.cp_async import bulk_commit_group
from moe_numba.ptx.fence import fence_proxy_async_shared  # for your answers
from moe_numba.ptx.matrix import stmatrix_rows
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_arrive_release_cta_cluster,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.tma import tma_load_2d, tma_load_2d_multicast, tma_store_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# We compute `D = A Bᵀ`. A has `m` rows and B has `n` rows, each of `k` **FP8** numbers (`e4m3`: a sign, four bits of exponent, three of
# mantissa). D is `bfloat16`. In torch:
#
# ```python
# D = (A.float() @ B.float().T).bfloat16()
# ```
#
# This is how the operands travel to the tensor cores, before Hopper and on Hopper:

# %%
draw.problem()

# %% [markdown]
# On the left every byte passes through registers twice, and threads are busy with copying. On Hopper, threads only *issue* work:
#
# - **TMA**, the tensor memory accelerator: one thread issues the copy of a whole box of a matrix, and goes on.
# - **mbarrier**: a barrier in shared memory that counts arriving threads *and landed bytes*.
# - **wgmma**: a **warpgroup**, four warps, issues an MMA whose operands lie in shared memory, and goes on.
#
# ## What a tile asks of an SM
#
# A CTA computes a tile of D. For each 128 elements of k it needs the tile's rows of A and of B:

# %%
draw.tile(128)

# %% [markdown]
# The larger the tile, the more often each loaded byte is used. The table shows, for 128 elements of k, how many clocks the tensor cores and
# the shared memory need (TMA writes the operands there, and each warpgroup reads them), and how many bytes the L2 cache must deliver per clock
# to keep the tensor cores busy:

# %%
page.show_shapes()

# %% [markdown]
# Keep this table in mind. It says which tile *can* reach the peak. The steps below are about what keeps a kernel from getting there.
#
# ## One load, one barrier
#
# Start with a single TMA load. It needs a **tensor map**, which describes the matrix and the box (the host makes it), a place in shared
# memory, and an mbarrier. An mbarrier passes through **phases**. A phase is complete when no arrivals and no bytes are pending. Here one
# arrival is pending, and it announces how many bytes will land:


# %%
@cuda.jit
def load_boxes(map_x, out, boxes):
    smem, full = cuda.shared.array(1024, uint8, 1024), cuda.shared.array(1, uint64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        mbarrier_init(full, 0, 1)  # one arrival per phase
        fence_mbarrier_init()  # the barrier becomes visible to TMA
    cuda.syncthreads()
    for box in range(boxes):
        if thread < 32 and elect_sync(FULL_MASK):  # one lane, and the compiler knows that it is one
            mbarrier_arrive_expect_tx(full, 0, 1024)
            tma_load_2d(smem, 0, map_x, 0, 0, int32(8 * box), full, 0)  # x before y: 8 rows of 128 bytes
        mbarrier_wait_parity(full, 0, uint32(box & 1))
        for i in range(thread, 1024, 64):
            out[1024 * box + i] = smem[i]
        cuda.syncthreads()  # nobody reads the box any more: the next one may come


page.show_barrier(load_boxes)

# %% [markdown]
# A waiting thread names a phase by its **parity**: 0 for the first phase, 1 for the second, then 0 again. On a new barrier a wait for
# parity 1 returns at once, as if a phase before the first had completed. That will be useful.
#
# **Take away.** Announce the bytes, issue the copy, wait for the parity of the phase. A parity that never changes is right for one box
# only.
#
# ## The layout in shared memory
#
# Shared memory has 32 **banks** of 4 bytes. A row of 128 bytes spans all of them once. Tensor cores read the same 16 bytes of eight rows, and
# these would all lie in the same four banks. So TMA permutes the 16-byte chunks of each row while it writes them:

# %%
draw.swizzle()

# %% [markdown]
# **Build.** A tile has rows of only 64 bytes, so four chunks each. Return the place, 0 to 3, of a chunk in its row, such that the same chunk
# of eight rows uses all 32 banks.


# %%
def my_place_of_chunk(row, chunk):
    return ...  # yours


exercises.swizzle.check(my_place_of_chunk)

# %% [markdown]
# ## The MMA
#
# `wgmma` multiplies 64 rows of A by `n` rows of B, and adds to `n / 2` registers of each of the warpgroup's 128 threads. This is the
# **fragment**, of its first 16 columns:

# %%
draw.fragment()

# %% [markdown]
# Each operand is given by a 64-bit **descriptor**: where it begins, how far it is to the next eight rows, and how it is swizzled.

# %%
draw.descriptor(1 << 62 | (1024 >> 4) << 32 | 1 << 16 | 9216 >> 4)

# %% [markdown]
# An instruction takes 32 bytes of k. `make_wgmma_tile` makes a function that issues four of them, for a stage of 128 bytes, and
# `make_wgmma_wait` one that waits for them. It takes the accumulators and returns them, so that the compiler cannot read them earlier.


# %%
@factory
def make_multiply(columns):
    add, wait = make_wgmma_tile(columns, "e4m3", accumulate=True), make_wgmma_wait(columns, 0)

    @cuda.jit(device=True)
    def multiply(acc, a, b):  # acc + the product of a stage
        return wait(add(acc, a, b))

    return multiply


# %% [markdown]
# When all of k is added up, each thread rounds its accumulators to bfloat16 and stores them, two at a time. `row` and `column` are where the
# warpgroup's 64 rows of the tile begin in D.


# %%
@factory
def make_store(columns):
    @cuda.jit(device=True)
    def store(smem, out, acc, row, column, pitch):
        lane, warp = int32(cuda.threadIdx.x & 31), int32(cuda.threadIdx.x >> 5 & 3)
        offset = int64(row + 16 * warp + (lane >> 2)) * pitch + ((column >> 1) + (lane & 3))  # in words of two elements
        for j in range(columns // 8):
            out[offset + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 1], acc[4 * j]))
            out[offset + 8 * pitch + 4 * j] = int32(cvt_rn_bf16x2_f32(acc[4 * j + 3], acc[4 * j + 2]))

    return store


# %% [markdown]
# ## Step 1: one stage
#
# This is the first whole kernel. A CTA of two warpgroups computes a tile of 128 x 128. One lane loads a stage, all warps wait for it,
# multiply, and meet at `syncthreads`, so that the next load may overwrite the stage. `multiply` and `store` are holes, which the functions
# above fill.


# %%
@cuda.jit(device=True)
def place(tile, tiles_m, tiles, columns):
    across = uint32(tile // uint32(tiles_m))  # 32 bits: a 64-bit division is a function call
    down = uint32(tile - across * uint32(tiles_m))
    return int32(down * uint32(ROWS)), int32(across * uint32(columns))  # the first row and column of a tile


@cuda.jit(device=True)
def load_stage(ring, map_a, map_b, row, column, k, stage):
    full, offset = int32(ring.full + stage), int32(stage * ring.stage_bytes)
    mbarrier_arrive_expect_tx(ring.barriers, full, ring.stage_bytes)
    tma_load_2d(ring.smem, offset, map_a, 0, int32(k * BLOCK_K), row, ring.barriers, full)
    tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, int32(k * BLOCK_K), column, ring.barriers, full)


@factory
def make_one_stage(multiply, store, columns):
    stage_bytes = A_BYTES + columns * BLOCK_K
    full, zeros = stage_bytes // 8, (np.float32(0),) * (columns // 2)

    @cuda.jit
    def gemm(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)  # the same memory
        ring = Ring(smem, barriers, int32(full), int32(0), int32(1), int32(stage_bytes))
        thread, group = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x >> 7)
        row, column = place(uint32(cuda.blockIdx.x), tiles_m, tiles, columns)
        if thread == 0:
            mbarrier_init(barriers, full, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        acc = zeros
        for k in range(k_blocks):
            if thread < 32 and elect_sync(FULL_MASK):
                load_stage(ring, map_a, map_b, row, column, k, int32(0))
            mbarrier_wait_parity(barriers, full, uint32(k & 1))
            a, b = wgmma_descriptor(smem, group * WARPGROUP_BYTES), wgmma_descriptor(smem, A_BYTES)
            acc = multiply(acc, a, b)  # <-- a hole: add the product of a stage
            cuda.syncthreads()
        store(smem, out, acc, int32(row + 64 * group), column, pitch)  # <-- a hole: store the tile

    return gemm


multiply_128, store_128 = make_multiply(128), make_store(128)
step("one stage", Version(make_one_stage(multiply_128, store_128, 128)))

# %% [markdown]
# `Version` says how to launch a kernel: the columns of a tile, the stages, and so on. A step checks the result on an H200 or in the
# simulator. Then it shows **what the compiler made of the kernel**, which needs no GPU. That is the part to look at in this lesson:
# how many registers a thread has, how many CTAs fit on an SM, how long the main loop is, and what the **epilogue**, the code behind the loop that
# stores the tile, really does.
#
# The kernel has two CTAs on an SM. While one waits for its load, the other multiplies, if they happen to be out of step. Nothing makes sure
# that they are.
#
# **Take away.** Two short loops of instructions can keep two machines busy, the copy engine and the tensor cores. Whether both are busy *at the
# same time* is decided by who waits for whom.
#
# ## Predict: how many CTAs fit?
#
# To load ahead, a CTA needs more stages. A stage has 32 KB here, and an SM gives its CTAs 228 KB of shared memory and 65,536 registers.
# How many CTAs of 256 threads fit on an SM, with one, two, three and four stages? The number of registers is in the table above; the
# hardware allocates them in units of 8 per thread.

# %%
exercises.resident.check(lesson.steps["one stage"].score, one=..., two=..., three=..., four=...)

# %% [markdown]
# ## Build: a third stage
#
# Here is the kernel of the first load with **two** stages. Box `i + 1` is loaded while box `i` is copied. Box `i` goes to stage `i % 2`,
# and completes phase `i // 2` of that stage's barrier.


# %%
@cuda.jit
def load_two_stages(map_x, out, boxes):
    smem, full = cuda.shared.array(2048, uint8, 1024), cuda.shared.array(2, uint64)
    thread = int32(cuda.threadIdx.x)
    if thread == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
        fence_mbarrier_init()
    cuda.syncthreads()
    for box in range(-1, boxes):
        ahead = int32(box + 1)
        if ahead < boxes and thread < 32 and elect_sync(FULL_MASK):
            mbarrier_arrive_expect_tx(full, ahead % 2, 1024)
            tma_load_2d(smem, 1024 * (ahead % 2), map_x, 0, 0, 8 * ahead, full, ahead % 2)
        if box >= 0:
            mbarrier_wait_parity(full, box % 2, uint32(box // 2 % 2))
            for i in range(thread, 1024, 64):
                out[1024 * box + i] = smem[1024 * (box % 2) + i]
            cuda.syncthreads()


# %% [markdown]
# Write a kernel with the same arguments and **three** stages, in which three boxes are under way at once. The check traces the loads.


# %%
@cuda.jit
def my_three_stages(map_x, out, boxes):
    pass  # yours


exercises.three_stages.check(my_three_stages)

# %% [markdown]
# ## Step 2: a ring
#
# The same in the GEMM. `advance` returns the next stage and the parity of its phase; after the last stage it returns to stage 0, and the
# parity changes. Loads run `stages - 1` blocks of k ahead of the MMAs.
#
# **Prediction.** In step 1 a CTA's loads and MMAs alternate. If they now overlap completely, the shorter of the two disappears.


# %%
@factory
def make_ring(multiply, store, columns, stages):
    stage_bytes = A_BYTES + columns * BLOCK_K
    full, zeros = stages * stage_bytes // 8, (np.float32(0),) * (columns // 2)

    @cuda.jit
    def gemm(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch):
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        ring = Ring(smem, barriers, int32(full), int32(0), int32(stages), int32(stage_bytes))
        thread, group = int32(cuda.threadIdx.x), int32(cuda.threadIdx.x >> 7)
        row, column = place(uint32(cuda.blockIdx.x), tiles_m, tiles, columns)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(barriers, full + s, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        acc, stage, phase, target = zeros, int32(0), uint32(0), int32(0)
        for k in range(1 - stages, k_blocks):  # the first iterations only load
            ahead = int32(k + stages - 1)
            if ahead < k_blocks and thread < 32 and elect_sync(FULL_MASK):
                load_stage(ring, map_a, map_b, row, column, ahead, target)
            target, _ = advance(ring, target, phase)
            if k >= 0:
                mbarrier_wait_parity(barriers, full + stage, phase)
                a = wgmma_descriptor(smem, int32(stage * stage_bytes) + group * WARPGROUP_BYTES)
                acc = multiply(acc, a, wgmma_descriptor(smem, int32(stage * stage_bytes) + A_BYTES))
                cuda.syncthreads()  # all warps have read the stage, which the next load overwrites
                stage, phase = advance(ring, stage, phase)
        store(smem, out, acc, int32(row + 64 * group), column, pitch)

    return gemm


step(
    "a ring of 3 stages",
    Version(make_ring(multiply_128, store_128, 128, 3), stages=3),
    predicted_us=page.without_waiting("one stage"),
)

# %% [markdown]
# Registers and CTAs per SM are the same as before: loads and MMAs now overlap within a CTA, too. (Try four stages: `make_ring(..., 4)` and
# `stages=4`. The row of CTAs per SM tells what they cost.)
#
# **Take away.** A ring of stages turns latency into memory: what is under way must lie somewhere, and what lies there limits how many CTAs
# share an SM.
#
# ## Who waits for whom?
#
# All eight warps meet at `syncthreads` for each block of k. The warpgroup that is first waits for the other one, and then both wait until
# the lane that issues loads has done so. No MMA is under way meanwhile.
#
# **Warp specialisation** gives each job to warps of its own. A **producer** loads, **consumers** multiply. They meet at two barriers per
# stage, and nowhere else:

# %%
draw.roles(6)

# %% [markdown]
# ## Build: the producer
#
# You write the producer: one thread executes it, and it feeds the tensor cores. `ring` has `smem`, `barriers`, `stages`, `stage_bytes`, and
# the index of the first `full` and of the first `empty` barrier; those of a stage are at `ring.full + stage` and `ring.empty + stage`.
#
# For each of the `k_blocks` blocks of a tile: wait until the stage is empty (`phase` is the parity to wait for), load it with `load_stage` or
# with its lines, and advance. Return the stage and the phase behind the last block: the next tile goes on there.


# %%
@cuda.jit(device=True)
def my_produce(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    pass  # yours; return stage, phase


produce = exercises.producer.use(my_produce)

# %% [markdown]
# ## Step 3: specialised warps
#
# This kernel stands until the end of the lesson, and all further steps fill its holes. The producer's warpgroup gives most of its
# registers to the consumers (`setmaxnreg`): a thread starts with 168, and then has 40 or 232. Each consumer warp arrives on `empty` itself, so
# that no `syncthreads` is left in the loop.
#
# The producer starts with parity 1. A wait for it returns at once on a new barrier, since all stages are empty at first. (The pseudocode of an
# article on such kernels, see Sources, starts both roles with parity 0. Try it: replace `uint32(1)`, and the simulator reports the deadlock.)
#
# The kernel also has a loop over tiles. In this step each CTA has one tile, as before.
#
# **Prediction.** A loss, for now. Two CTAs on an SM hid the ends of each other's tiles: while one stored, the other one multiplied. With 168
# registers for each of 384 threads only one CTA fits. So we add the time of storing D, and one latency for the first load of each tile. Steps 4
# and 7 take both back.


# %%
@cuda.jit(device=True)
def release_own(ring, stage):
    mbarrier_arrive(ring.barriers, ring.empty + stage)


@factory
def make_gemm(produce, multiply, release, store, columns, stages, cluster=1, place=place):
    stage_bytes = A_BYTES + columns * BLOCK_K
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    zeros = (np.float32(0),) * (columns // 2)
    give_registers, take_registers = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)

    @cuda.jit
    def gemm(map_a, map_b, out, tiles_m, tiles, k_blocks, pitch):
        # shared memory: the stages, then their barriers
        smem, barriers = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, uint64, 1024)
        ring = Ring(smem, barriers, int32(full), int32(empty), int32(stages), int32(stage_bytes))
        thread, tile = int32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(barriers, full + s, 1)  # the producer, and bytes
                mbarrier_init(barriers, empty + s, MMA_WARPS * cluster)  # lane 0 of each consumer warp
            fence_mbarrier_init()
        cuda.syncthreads()
        if cluster > 1:  # see step 8
            barrier_cluster_arrive()
            barrier_cluster_wait()

        if thread >= 32 * MMA_WARPS:
            # the producer's warpgroup
            give_registers()
            if thread < 32 * MMA_WARPS + 32 and elect_sync(FULL_MASK):
                stage, phase = int32(0), uint32(1)
                while tile < uint32(tiles):
                    row, column = place(tile, tiles_m, tiles, columns)
                    # <-- a hole: load all blocks of k of a tile
                    stage, phase = produce(ring, map_a, map_b, row, column, k_blocks, stage, phase)
                    tile = uint32(tile + uint32(cuda.gridDim.x))
        else:
            # two warpgroups of consumers
            take_registers()
            group, lane, stage, phase = int32(thread >> 7), int32(thread & 31), int32(0), uint32(0)
            while tile < uint32(tiles):
                acc = zeros
                for _ in range(k_blocks):
                    mbarrier_wait_parity(barriers, full + stage, phase)
                    a = wgmma_descriptor(smem, int32(stage * stage_bytes) + group * WARPGROUP_BYTES)
                    b = wgmma_descriptor(smem, int32(stage * stage_bytes) + A_BYTES)
                    acc = multiply(acc, a, b)  # <-- a hole: add the product of a stage
                    if lane == 0:
                        release(ring, stage)  # <-- a hole: the warp has read the stage
                    stage, phase = advance(ring, stage, phase)
                row, column = place(tile, tiles_m, tiles, columns)
                store(smem, out, acc, int32(row + 64 * group), column, pitch)  # <-- a hole: store the tile
                tile = uint32(tile + uint32(cuda.gridDim.x))
            wait_for_stores()  # a CTA must not end while TMA reads its shared memory: see step 7
        if cluster > 1:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return gemm


THREADS = 32 * MMA_WARPS + 128
specialised = make_gemm(produce, multiply_128, release_own, store_128, 128, 6)
predicted_us = page.with_bare_ends_of_tiles("a ring of 3 stages", (page.M // ROWS) * (page.N // 128))
step("specialised warps", Version(specialised, stages=6, threads=THREADS), predicted_us=predicted_us)

# %% [markdown]
# Where the loss is smaller than predicted, something wins a part of it back, perhaps that warps no longer wait for each other. We did not isolate it. (The
# ring, timed again beside this step, may take longer than alone: near its power limit a GPU lowers its clock, as the section on power shows. So compare only
# times of one run.)
#
# The loop of a consumer is now a wait, four MMAs, an arrival, and the arithmetic of stages. Registers allow one CTA per SM only, but that CTA
# has six stages for itself.
#
# The simulator can show how the roles take turns, here in a small ring of three stages. Only the order of events has a meaning:

# %%
page.show_ring(
    Version(make_gemm(produce, make_multiply(64), release_own, make_store(64), 64, 3), 64, 3, threads=THREADS)
)

# %% [markdown]
# **Take away.** Give waiting to warps that have nothing else to do. Two barriers per stage, one that says *full* and one that says *empty*,
# replace every barrier of the whole CTA. The price is the second CTA of the SM, which overlapped with the first one by itself; what it hid must
# now be hidden by design.
#
# ## What the simulator says of a wgmma without a wait
#
# An MMA runs on after its instruction. If the consumers release a stage without waiting, TMA overwrites operands that are still being read.
# On a GPU the results would be wrong now and then. Here is `multiply` without its wait:


# %%
@factory
def make_multiply_without_wait(columns):
    add = make_wgmma_tile(columns, "e4m3", accumulate=True)

    @cuda.jit(device=True)
    def multiply(acc, a, b):
        return add(acc, a, b)

    return multiply


unwaited = make_gemm(produce, make_multiply_without_wait(128), release_own, store_128, 128, 6)
lesson.orders(Version(unwaited, stages=6, threads=THREADS), seeds=2)

# %% [markdown]
# ## Step 4: persistent CTAs
#
# When a CTA of step 3 stores its tile, its SM loads and multiplies nothing. The next CTA starts with empty stages. A **persistent** kernel
# launches one CTA per SM, which loops over tiles. The ring goes on from tile to tile: the producer loads the next tile while the consumers
# store.

# %%
draw.timeline()

# %% [markdown]
# **Prediction.** Only the first tile of an SM still waits for its first load. We save one latency per further tile.

# %%
predicted_us = page.without_first_loads("specialised warps", (page.M // ROWS) * (page.N // 128))
step("persistent CTAs", Version(specialised, stages=6, threads=THREADS, persistent=True), predicted_us=predicted_us)

# %% [markdown]
# The machine code is that of step 3. Only the grid differs.
#
# **Take away.** A pipeline that ends with each tile must be filled again for each tile. Let it run on.
#
# ## Loads or MMAs?
#
# What limits this kernel? Leave a part out, and time what remains. The first variant announces each stage without loading it, so that the
# MMAs never wait. The second one loads, and multiplies nothing. Their results are wrong, of course. If one of the two takes nearly as long as the
# whole kernel, that part is a limit. If neither does, they do not overlap as they should. The three take turns in one run, so compare them with one
# another, not with the step above.


# %%
@cuda.jit(device=True)
def announce(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    for _ in range(k_blocks):
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        mbarrier_arrive(ring.barriers, ring.full + stage)
        stage, phase = advance(ring, stage, phase)
    return stage, phase


@cuda.jit(device=True)
def multiply_nothing(acc, a, b):
    return acc


only_mmas = make_gemm(announce, multiply_128, release_own, store_128, 128, 6)
only_loads = make_gemm(produce, multiply_nothing, release_own, store_128, 128, 6)
page.show_parts(
    {
        "without loads": Version(only_mmas, stages=6, threads=THREADS, persistent=True),
        "without MMAs": Version(only_loads, stages=6, threads=THREADS, persistent=True),
        "all": Version(specialised, stages=6, threads=THREADS, persistent=True),
    }
)

# %%
print(page.say_parts())

# %% [markdown]
# ## Step 5: a tile of 128 x 256
#
# The table at the beginning says that shared memory needs more clocks for a tile of 128 x 128 than the tensor cores, and as many for 128 x 256,
# because each warpgroup reads its rows of A half as often. Each thread then holds 128 accumulators, and four stages fit.
#
# **Prediction.** The time falls as the clocks of the busiest unit do.

# %%
draw.tile(256)

# %%
multiply_256, WIDE = make_multiply(256), dict(columns=256, stages=4, threads=THREADS, persistent=True)
looped = make_gemm(produce, multiply_256, release_own, make_store(256), 256, 4)
predicted_us = page.by_busiest_unit("persistent CTAs", page.shape(128, 128), page.shape(128, 256))
step("tile of 128 x 256", Version(looped, **WIDE), predicted_us=predicted_us)

# %% [markdown]
# On a GPU the wide tile is slower than the narrow one, although its main loop is as short. The machine code knows why.
#
# **Diagnose.** What is wrong? "A": the main loop has become longer. "B": the accumulators do not fit, and are spilled. "C": the stores of
# the epilogue are not what was written. "D": fewer CTAs fit on an SM. The table above has all you need.

# %%
exercises.slow_tile.check(..., lesson.steps["persistent CTAs"].score, lesson.steps["tile of 128 x 256"].score)

# %% [markdown]
# And this is the machine code before the first store of a warp. `ISETP` compares the index of the accumulator with a constant, `IMAD.MOV` copies
# one register out of 128, and the branches lead to the next compare, or to the conversion and the store:

# %%
page.show_first_store(Version(looped, **WIDE))

# %% [markdown]
# ## Build: stores without a search
#
# Write `store` for 256 columns, such that the compiler unrolls it. You have two tools. A slice of a tuple with constant bounds, `acc[:64]`, is
# a tuple, and costs nothing. And `make_for_each_chunk(count, size, body)` returns a function `each(values, *others)`, which calls
# `body(first, chunk, *others)` for each `size` of `count` values, always unrolled. Par: no search, that is at most a few compares.


# %%
@cuda.jit(device=True)
def my_store_256(smem, out, acc, row, column, pitch):
    pass  # yours


store_256 = exercises.unrolled.use(my_store_256)

# %% [markdown]
# ## Step 6: unrolled
#
# The same kernel with your stores.

# %%
unrolled = make_gemm(produce, multiply_256, release_own, store_256, 256, 4)
predicted_us = page.by_busiest_unit("persistent CTAs", page.shape(128, 128), page.shape(128, 256))
step("unrolled stores", Version(unrolled, **WIDE), predicted_us=predicted_us)

# %% [markdown]
# The time falls by less than the model says. The model compares clocks of units, as if all kernels ran at the same clock.
#
# **Take away.** Registers have no index. A loop over accumulators that is not unrolled becomes a search, and the compiler says nothing.
# Count the store instructions of each kernel; a test does it for those of this page.
#
# ## Step 7: TMA stores
#
# The consumers still store D themselves: each lane writes 4 bytes here and 4 bytes there, and no MMA is under way meanwhile. TMA can store,
# too. The warp writes its 16 rows of 64 columns to a buffer in shared memory, with the swizzle (`stmatrix` writes 8 x 8 blocks from
# fragments), and one lane issues the store. It goes on to the next 64 columns and then to the next tile, while TMA reads.
#
# This is the code for 64 columns, which are 32 accumulators of a thread. A warp has two buffers, which take turns. `order` is a hole, in two
# places:


# %%
@factory
def make_tma_store(order, columns, stages):
    buffers = stages * (A_BYTES + columns * BLOCK_K) + BARRIER_BYTES  # behind the stages and their barriers

    @cuda.jit(device=True)
    def store_64_columns(first, values, smem, out, buffer, row, column):
        lane = int32(cuda.threadIdx.x & 31)
        buffer = int32(buffer + (first >> 5 & 1) * BUFFER_BYTES)
        order(FREE)  # <-- a hole: TMA may still read this buffer
        t = int32(lane & 15)
        stmatrix_rows(smem, int32(buffer + 128 * t + (((t & 7) ^ (lane >> 4)) << 4)), values)
        order(WRITTEN)  # <-- the same hole: TMA must see what all lanes have written
        if elect_sync(FULL_MASK):
            tma_store_2d(out, 0, int32(column + 2 * first), row, smem, buffer)
            bulk_commit_group()

    for_each_64_columns = make_for_each_chunk(columns // 2, 32, store_64_columns)

    @cuda.jit(device=True)
    def store(smem, out, acc, row, column, pitch):
        warp = int32(cuda.threadIdx.x >> 5)
        own = int32(buffers + 2 * BUFFER_BYTES * warp)
        for_each_64_columns(acc, smem, out, own, int32(row + 16 * (warp & 3)), column)

    return store


# %% [markdown]
# ## Build: the order of a TMA store
#
# Threads write shared memory through the **generic proxy**, TMA reads it through the **async proxy**, and neither waits for the other. Write
# `order`, which all lanes of a warp call at `FREE`, before they write a buffer, and at `WRITTEN`, after it. You have:
#
# - `wait_for_buffer()`: the lane that issues the warp's stores waits until only the latest one still reads its buffer. The other lanes do not wait.
# - `wait_for_stores()`: it waits until none of them reads any more.
# - `fence_proxy_async_shared()`: makes what *the calling thread* has written visible to the async proxy.
# - `cuda.syncwarp()`: all lanes meet.


# %%
@cuda.jit(device=True)
def my_order(place):
    pass  # yours


order = exercises.order.use(my_order)

# %% [markdown]
# **Prediction.** The step saves the time of storing D, which now overlaps with MMAs.

# %%
tma_store = make_tma_store(order, 256, 4)
stored = make_gemm(produce, multiply_256, release_own, tma_store, 256, 4)
step("TMA stores", Version(stored, **WIDE, tma_store=True), predicted_us=page.without_stores("unrolled stores"))

# %% [markdown]
# **Take away.** The epilogue is a pipeline, too: write, fence, issue, go on; wait only when the buffer is needed again.
#
# ## Step 8: multicast
#
# Two tiles that lie below one another need the same rows of B. If their CTAs form a **cluster**, each loads half of B, and TMA writes that half
# into the shared memory of both:

# %%
draw.multicast()

# %% [markdown]
# Two holes change. The producer issues a multicast, whose bytes are reported to the full barriers of both CTAs. And a consumer warp releases a
# stage in both CTAs, because both producers write to both. So an `empty` barrier takes twice as many arrivals. All CTAs must have started
# before one writes to another, and none may end before: that is what the cluster barriers at the start and at the end are for.
#
# **Prediction.** L2 has to deliver a third less. If it was not the limit, nothing changes, and that is our prediction: the busiest unit of the
# table is the same.


# %%
@cuda.jit(device=True)
def produce_multicast(ring, map_a, map_b, row, column, k_blocks, stage, phase):
    rank, half = int32(cluster_ctarank()), int32((ring.stage_bytes - A_BYTES) >> 1)
    for k in range(k_blocks):
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        full, offset, at = int32(ring.full + stage), int32(stage * ring.stage_bytes), int32(k * BLOCK_K)
        mbarrier_arrive_expect_tx(ring.barriers, full, ring.stage_bytes)  # A, and both halves of B
        tma_load_2d(ring.smem, offset, map_a, 0, at, row, ring.barriers, full)
        to, own = int32(offset + A_BYTES + rank * half), int32(column + rank * (half >> 7))
        tma_load_2d_multicast(ring.smem, to, map_b, 0, at, own, ring.barriers, full, 0b11)  # to CTAs 0 and 1
        stage, phase = advance(ring, stage, phase)
    return stage, phase


@cuda.jit(device=True)
def release_both(ring, stage):
    mbarrier_arrive(ring.barriers, ring.empty + stage)
    mbarrier_arrive_release_cta_cluster(ring.barriers, ring.empty + stage, uint32(cluster_ctarank() ^ uint32(1)))


PAIRS = WIDE | dict(tma_store=True, cluster=2)
shared_b = make_gemm(produce_multicast, multiply_256, release_both, tma_store, 256, 4, 2)
step(
    "multicast",
    Version(shared_b, **PAIRS),
    predicted_us=page.by_busiest_unit("TMA stores", page.shape(128, 256), page.shape(128, 256, 2)),
)

# %% [markdown]
# The bytes from L2 fall by a third, and the time does not: L2 was not the limit, as the model says, and CTAs of a cluster wait for each other. So the
# next steps go on from step 7.
#
# **Take away.** CTAs that need the same bytes can load them once. That pays only if loading is the limit, since they must wait for each other.
#
# ## Step 9: accurate sums
#
# Tensor cores multiply FP8 numbers exactly, and add them up with fewer bits than float32; DeepSeek reports about 14. The error grows with k.
# DeepGEMM's remedy is **promotion**: after each stage, threads add the tensor cores' result to float32 accumulators of their own. With 256
# columns, two sets of 128 registers do not fit. So this `multiply` takes the columns in two halves, and both results use the same 64 registers.
#
# **Prediction.** A loss: each accumulator needs an addition per stage. One warpgroup's additions can overlap with the other one's MMAs. If
# half of them do, we lose half of their time.


# %%
@factory
def make_promoting_multiply(columns):
    half = columns // 2
    held, further = half // 2, half * BLOCK_K >> 4  # accumulators of a half; a descriptor counts 16 bytes
    first, second = make_wgmma_tile(half, "e4m3"), make_wgmma_tile(half, "e4m3", overwrite=True)
    wait, fma = make_wgmma_wait(half, 0), make_fma(half)

    @cuda.jit(device=True)
    def multiply(acc, a, b):
        product = wait(first(a, b))
        left = fma(acc[:held], product, float32(1))
        product = wait(second(product, a, uint64(b + uint64(further))))  # in the registers of the first half
        return left + fma(acc[held:], product, float32(1))

    return multiply


promoting = make_gemm(produce, make_promoting_multiply(256), release_own, tma_store, 256, 4)
ALONE = WIDE | dict(tma_store=True)
step(
    "float32 accumulation",
    Version(promoting, **ALONE),
    after="TMA stores",
    predicted_us=page.with_additions("TMA stores"),
)

# %%
page.show_errors({"TMA stores": Version(stored, **ALONE), "float32 accumulation": Version(promoting, **ALONE)})

# %% [markdown]
# The simulator's tensor cores add in float32, so only a GPU shows the difference.
#
# **Take away.** Accuracy is bought with the registers and issue slots of the consumers. [Lesson 08](08_block_scales.ipynb) multiplies
# by block scales at this place, which costs no more than the addition.
#
# ## Where is the rest? Power
#
# The fastest step is far from the data sheet's peak, and so is cuBLAS. A GPU lowers its clock until it stays within its power limit, and
# tensor cores at work take most of that power. In a short burst of launches after a pause, the clock has not fallen yet. The next cell launches
# each kernel for about a second, and asks the driver for clock, power and energy:

# %%
page.show_power(Version(stored, **ALONE))

# %% [markdown]
# The last column compares with the peak *at that clock*. What is missing there is the kernel's; the rest is the clock's. Near the power limit a
# kernel gets faster if it needs less energy: fewer bytes moved, fewer instructions.
#
# **Take away.** Say in which regime you have measured. Times of kernels that were not interleaved in one run may differ by the clock alone.
#
# ## What did not pay, and why
#
# An earlier version of this lesson timed these changes:

# %%
page.show_what_did_not_pay()

# %% [markdown]
# And these are variants of step 7. On a GPU the next cell times them, interleaved; without one, compare what the compiler makes of them. Which of
# them do you expect to cost nothing? `place` is a hole, too: it says which tile a CTA computes. CTAs that run at the same time share more rows of
# A and B through the L2 cache if their tiles lie in bands.


# %%
@factory
def make_multiply_one_by_one(columns):
    add, wait = make_wgmma_tile(columns, "e4m3", steps=1, accumulate=True), make_wgmma_wait(columns, 0)

    @cuda.jit(device=True)
    def multiply(acc, a, b):
        acc = wait(add(acc, a, b))
        acc = wait(add(acc, uint64(a + uint64(2)), uint64(b + uint64(2))))
        acc = wait(add(acc, uint64(a + uint64(4)), uint64(b + uint64(4))))
        return wait(add(acc, uint64(a + uint64(6)), uint64(b + uint64(6))))

    return multiply


BAND = 16  # rows of tiles


@cuda.jit(device=True)
def place_in_bands(tile, tiles_m, tiles, columns):
    in_band = uint32(uint32(BAND) * uint32(uint32(tiles) // uint32(tiles_m)))  # tiles of a band, numbered downwards
    band = uint32(tile // in_band)
    rows = uint32(min(uint32(BAND), uint32(uint32(tiles_m) - band * uint32(BAND))))
    across = uint32(uint32(tile - band * in_band) // rows)
    down = uint32(uint32(tile - band * in_band) - across * rows)
    return int32(uint32(band * uint32(BAND) + down) * uint32(ROWS)), int32(across * uint32(columns))


banded = make_gemm(produce, multiply_256, release_own, tma_store, 256, 4, 1, place_in_bands)
banded_pairs = make_gemm(produce_multicast, multiply_256, release_both, tma_store, 256, 4, 2, place_in_bands)
small = make_gemm(produce, multiply_128, release_own, make_tma_store(order, 128, 6), 128, 6)
three = make_gemm(produce, multiply_256, release_own, make_tma_store(order, 256, 3), 256, 3)
waiting = make_gemm(produce, make_multiply_one_by_one(256), release_own, tma_store, 256, 4)
page.show_variants(
    Version(stored, **ALONE),
    {
        "tiles in bands of 16 rows": Version(banded, **ALONE),
        "bands and multicast": Version(banded_pairs, **PAIRS),
        "three stages": Version(three, **ALONE | dict(stages=3)),
        "everything with 128 columns": Version(small, **ALONE | dict(columns=128, stages=6)),
        "a wait after each instruction": Version(waiting, **ALONE),
        "a CTA per tile": Version(stored, **ALONE | dict(persistent=False)),
    },
)

# %% [markdown]
# Variants that keep the tensor cores as busy take about as long, whatever their tile. That would follow from the power limit: then the energy
# counts, not the tile. We did not isolate it.

# %% [markdown]
# ## All steps

# %%
page.show_peers(Version(stored, **ALONE))

# %% [markdown]
# With 512 rows of A, D has 64 tiles of 128 x 256 for the 132 SMs of an H200, so half of them have no work. A library has smaller tiles for such sizes.

# %%
lesson.save()
lesson.summary()

# %% [markdown]
# **You can now** write a GEMM with TMA, mbarriers, wgmma and specialised warps, and find out whether loads, MMAs, stores or the clock limit it.
#
# ## Next step, not built
#
# Both warpgroups finish a tile at the same time. While they write it to shared memory, the tensor cores are idle. **Build** a kernel in which
# each warpgroup has a tile of its own, and they take turns: one multiplies while the other one stores (CUTLASS calls this *ping-pong*). Which
# barrier keeps them apart, and what must change in the producer? And number the tiles so that the CTAs that run at the same time need fewer
# different rows of A and B from DRAM. The lower bound is the peak:

# %%
print(page.lower_bound())

# %% [markdown]
# ## Sources
#
# - pranjalssh: [fast.cu](https://github.com/pranjalssh/fast.cu), a ladder of Hopper GEMMs in CUDA C++ that ends above cuBLAS.
# - DeepSeek-AI: [DeepGEMM](https://github.com/deepseek-ai/DeepGEMM) (one function from top to bottom; promotion); [DeepSeek-V3 Technical
#   Report](https://arxiv.org/abs/2412.19437) (bits of the accumulation).
# - NVIDIA: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/) (`cp.async.bulk.tensor`, `mbarrier`, `wgmma`, `setmaxnreg`);
#   *H200 Tensor Core GPU* data sheet.
# - The article *CUTLASS CUTE 7: hpc-ops 之 group gemm & tma*, in Chinese. It issues such instructions from CUDA C++. How Numba links CUDA C++,
#   what that costs, and how a kernel edits tensor maps: [a page on linked CUDA C++](../docs/linked_cuda_cpp.md).
#
# Before: [05, shared experts](05_shared_experts.ipynb). Next: [07, a grouped GEMM](07_grouped_gemm.ipynb), one launch for all experts.
