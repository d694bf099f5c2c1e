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
# # Block scales
#
# FP8 numbers have three bits of mantissa and a small range. So a checkpoint stores them with **scales**, by which they are multiplied.
# DeepSeek-V3 has a scale for every 128 x 128 block of a weight, and for every 128 elements of a token. Tensor cores know nothing of such scales:
# someone has to multiply each partial sum of 128 elements of k by two of them.
#
# This lesson has one question: **what do scales cost, and who pays?** You start with the GEMM of [lesson 06](06_hopper_gemm.ipynb) without scales.
# Then you add them in the obvious way, which is expensive. Four more steps try to win that back: you choose the rows of the tile, you give registers to a
# larger one, you let idle warps do the arithmetic, and you ask a barrier early. Not all of them pay. You will also write kernels that leave something out,
# to see what limits the kernel, and read the energy counter of the GPU.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import numpy as np
from numba import cuda, float32, int32, uint8, uint32, uint64

from moe_numba.course.lessons.block_scales import draw, exercises
from moe_numba.course.lessons.block_scales import runs as page
from moe_numba.course.lessons.block_scales.runs import Ring, Scales, Version, lesson, make_store
from moe_numba.course.lessons.block_scales.sizes import (
    A_BYTES,
    BLOCK_K,
    MMA_WARPS,
    ROWS,
    SCALE_BYTES,
    SCALE_WARPS,
    W_SCALES,
    WARPGROUP_BYTES,
)
from moe_numba.course.lessons.hopper.runs import advance
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.accumulators import make_fma, make_fma_blocks, make_fma_columns
from moe_numba.ptx.arithmetic import float_as_int, int_as_float  # for your answers
from moe_numba.ptx.matrix import make_load_shared
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_test_wait_parity,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import ld_shared_s32x4, st_shared_s32x4  # for your answers
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# `x` is `[m, k]` and `w` is `[n, k]`, both in FP8. A **k-block** is 128 elements of k. In torch, with `x_scale[b, i]` of row `i` of x in k-block `b`, and
# `w_scale[j // 128, b]` of row `j` of w:
#
# ```python
# D = sum(x_scale[b, :, None] * w_scale[:, b].repeat_interleave(128) * (x[:, block(b)].float() @ w[:, block(b)].float().T)
#         for b in range(k // 128)).bfloat16()
# ```

# %%
draw.problem()

# %% [markdown]
# Tensor cores compute the partial sum of a k-block. Threads multiply each element of it by its **factor**, the product of two scales, and add it to
# accumulators of their own. That is the **promotion** of lesson 06, step 9: a fused multiply-add takes no longer than the addition. So the arithmetic
# is free, where sums are promoted anyway. What costs time is to bring the right factors into the right registers.
#
# This lesson has a single matrix w. [Lesson 07](07_grouped_gemm.ipynb) has one for each expert, and the main loop is the same: block scales and groups have
# nothing to do with each other. The lower bound:

# %%
print(page.lower_bound())

# %% [markdown]
# ## Start: no scales
#
# This is the specialised, persistent kernel of lesson 06. One warp loads by TMA, two warpgroups multiply. New are **two warps that write scales**: the
# producer's warpgroup has three warps that do nothing. A stage has room for scales behind B, and its `full` barrier now also waits for these two warps.

# %%
draw.roles()

# %% [markdown]
# The kernel has three holes for scales: `write` is what the two warps do for a stage, `read` brings a thread's factors from shared memory into registers,
# and `promote` uses them. Two more holes, `load` and `multiply`, let you leave out loads or MMAs later. `early` belongs to step 5.


# %%
@cuda.jit(device=True)
def place(tile, tiles_m, columns):
    across = uint32(tile // uint32(tiles_m))
    down = uint32(tile - across * uint32(tiles_m))
    return int32(down * uint32(ROWS)), int32(across * uint32(columns))  # the first row and column of a tile


@cuda.jit(device=True)
def load_stage(ring, stage, map_a, map_b, row, column, k):
    full, offset = int32(ring.full + stage), int32(4 * stage * ring.stage_floats)
    mbarrier_arrive_expect_tx(ring.barriers, full, int32(4 * ring.stage_floats - SCALE_BYTES))
    tma_load_2d(ring.smem, offset, map_a, 0, int32(k * BLOCK_K), row, ring.barriers, full)
    tma_load_2d(ring.smem, offset + A_BYTES, map_b, 0, int32(k * BLOCK_K), column, ring.barriers, full)


@factory
def make_multiply(columns):
    tile, wait = make_wgmma_tile(columns, "e4m3"), make_wgmma_wait(columns, 0)

    @cuda.jit(device=True)
    def multiply(a, b):  # the partial sum of a k-block
        return wait(tile(a, b))

    return multiply


@factory
def make_gemm(write, read, promote, columns, stages, early=False, load=load_stage, multiply=None):
    stage_bytes = A_BYTES + columns * BLOCK_K + SCALE_BYTES
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    multiply, store, zeros = multiply or make_multiply(columns), make_store(columns), (np.float32(0),) * (columns // 2)
    give_registers, take_registers = make_setmaxnreg_dec(56), make_setmaxnreg_inc(224)

    @cuda.jit
    def gemm(map_a, map_b, x_scale, w_scale, out, tiles_m, tiles, k_blocks, m, pitch):
        # shared memory: the stages, then their barriers
        smem, floats = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, float32, 1024)
        words, barriers = cuda.shared.array(0, int32, 1024), cuda.shared.array(0, uint64, 1024)
        ring = Ring(
            *(smem, floats, words, barriers, int32(full), int32(empty), int32(stages)),
            *(int32(stage_bytes // 4), int32((stage_bytes - SCALE_BYTES) // 4)),
        )
        scales = Scales(x_scale, w_scale, m, k_blocks)
        thread, tile = int32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp, lane = int32(thread >> 5), int32(thread & 31)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(barriers, full + s, 1 + SCALE_WARPS)  # the producer, bytes, the warps that write scales
                mbarrier_init(barriers, empty + s, MMA_WARPS)
            fence_mbarrier_init()
        cuda.syncthreads()

        if warp >= MMA_WARPS:
            give_registers()
            stage, phase = int32(0), uint32(1)
            if warp == MMA_WARPS:
                # the producer: one thread issues TMA loads
                if elect_sync(FULL_MASK):
                    while tile < uint32(tiles):
                        row, column = place(tile, tiles_m, columns)
                        for k in range(k_blocks):
                            mbarrier_wait_parity(barriers, empty + stage, phase)
                            load(ring, stage, map_a, map_b, row, column, int32(k))
                            stage, phase = advance(ring, stage, phase)
                        tile = uint32(tile + uint32(cuda.gridDim.x))
            elif warp <= MMA_WARPS + SCALE_WARPS:
                # two warps write the scales of 128 rows, 64 each: a lane has rows `own` and `own + 32` of the tile
                own = int32(64 * (warp - MMA_WARPS - 1) + lane)
                while tile < uint32(tiles):
                    row, column = place(tile, tiles_m, columns)
                    for k in range(k_blocks):
                        # <-- a hole: wait for empty, write
                        write(ring, stage, phase, scales, row, column, int32(k), own)
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(barriers, full + stage)
                        stage, phase = advance(ring, stage, phase)
                    tile = uint32(tile + uint32(cuda.gridDim.x))
        else:
            # two warpgroups of consumers
            take_registers()
            group, stage, phase, ready = int32(thread >> 7), int32(0), uint32(0), uint32(0)
            while tile < uint32(tiles):
                acc = zeros
                for _ in range(k_blocks):
                    if ready == 0:
                        mbarrier_wait_parity(barriers, full + stage, phase)
                    factors = read(ring, int32(ring.scales + stage * ring.stage_floats))  # <-- a hole
                    a = wgmma_descriptor(smem, int32(stage * stage_bytes) + group * WARPGROUP_BYTES)
                    b = wgmma_descriptor(smem, int32(stage * stage_bytes) + A_BYTES)
                    part = multiply(a, b)
                    cuda.syncwarp()  # all lanes have read their factors
                    if lane == 0:
                        mbarrier_arrive(barriers, empty + stage)
                    stage, phase = advance(ring, stage, phase)
                    if early:  # see step 5
                        ready = mbarrier_test_wait_parity(barriers, full + stage, phase)
                    acc = promote(acc, part, factors)  # <-- a hole
                row, column = place(tile, tiles_m, columns)
                store(out, acc, int32(row + 64 * group), column, pitch)
                tile = uint32(tile + uint32(cuda.gridDim.x))

    return gemm


# %% [markdown]
# Without scales the two warps write nothing, but wait and arrive as they will later. All factors are 1:


# %%
@cuda.jit(device=True)
def write_nothing(ring, stage, phase, scales, row, column, k, own):
    mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)


@cuda.jit(device=True)
def read_one(ring, at):
    return (float32(1),)


@factory
def make_add(columns):
    fma = make_fma(columns)

    @cuda.jit(device=True)
    def promote(acc, part, factors):
        return fma(acc, part, factors[0])

    return promote


unscaled = make_gemm(write_nothing, read_one, make_add(128), 128, 6)
step("no scales", Version(unscaled, scaled=False))

# %% [markdown]
# The table says what a consumer's **main loop** does besides its MMAs. A k-block of one warpgroup takes the tensor cores 256 clocks. While a warpgroup
# promotes, it multiplies nothing; only the other one can use the tensor cores then, if it is not promoting as well. So each instruction between two
# k-blocks may count: **instructions of the main loop** is the row to watch. (Lesson 06 gives 40 registers to a producer and 232 to a consumer. Here they are 56 and 224, because warps that write
# scales need more than 40.)
#
# **Take away.** Whatever a step with this tile takes more is the price of scales. (A tile of another size needs a kernel without scales of its own to be
# compared with: it comes with step 3.)
#
# ## Step 1: a scale per column
#
# A grouped GEMM often has few tokens per expert. So the kernel of lesson 07 makes the rows of **w** the rows of a tile, and tokens its columns; it
# stores the transpose. Let us add scales to that kernel. (Ours simply leaves D transposed; that changes nothing in the main loop.) All rows of a
# tile share the scale of w, and each column has its scale of x. A thread holds elements of 32 columns, so it needs 32 factors:

# %%
draw.factors(transposed=True)

# %% [markdown]
# The two warps copy the scales of a k-block to the stage. They permute them such that the 32 of a thread are contiguous: `make_load_shared` loads them
# by eight instructions of 16 bytes. (Between the quarters are 4 unused floats. Without them, four neighbouring lanes would read from the same banks.)
# Then the thread multiplies each by the scale of w.
#
# **Prediction.** 9 loads and 32 multiplications more per k-block, for each of two warps of a scheduler, one per clock, and nothing hides them if both
# warpgroups do this at the same time.


# %%
COLUMN_PITCH = 36  # floats from the 32 of one lane of four to those of the next
ROW_SCALE = 4 * COLUMN_PITCH  # the scale of w


@cuda.jit(device=True)
def write_by_column(ring, stage, phase, scales, row, column, k, own):
    first = int32(k * scales.rows + column + own)
    a, b = scales.x[first], scales.x[first + 32]  # load before waiting, so that the latency is hidden
    w = scales.w[(row >> 7) * scales.k_blocks + k]
    mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
    at = int32(ring.scales + stage * ring.stage_floats)
    to = int32(at + (own >> 1 & 3) * COLUMN_PITCH + (own >> 3) * 2 + (own & 1))
    ring.floats[uint32(to)] = a
    ring.floats[uint32(to + 8)] = b
    if own == 0:
        ring.floats[uint32(at + ROW_SCALE)] = w


load_32, scale_32, promote_by_column = make_load_shared(128), make_fma(64), make_fma_columns(128)
NONE = (np.float32(0),) * 32


@cuda.jit(device=True)
def read_by_column(ring, at):
    of_x = load_32(ring.floats, int32(at + (int32(cuda.threadIdx.x) & 3) * COLUMN_PITCH))
    return scale_32(NONE, of_x, ring.floats[uint32(at + ROW_SCALE)])  # 0 + scale of x * scale of w


by_column = make_gemm(write_by_column, read_by_column, promote_by_column, 128, 6)
predicted_us = page.with_instructions("no scales", 9 + 32)
step("scale per column", Version(by_column, transposed=True), predicted_us=predicted_us)

# %% [markdown]
# We have counted instructions. The compiler made some more of them (compare the row of the main loop), and the MMAs also wait until the loads have
# returned.
#
# **Take away.** A factor that belongs to a column is needed by every thread that has an element of this column, and a thread has elements of many
# columns.
#
# ## Step 2: a scale per row
#
# Turn the tile around, as DeepGEMM does: tokens are the rows of a tile. A thread has elements of two rows only, so two scales of x. And all
# columns of a tile of 128 have the same scale of w:

# %%
draw.factors(transposed=False)

# %% [markdown]
# The price: MMAs have 64 rows each. If an expert has few tokens, most of a tile's rows are empty, where the other way round a tile with fewer
# columns would do. With many tokens this does not matter.
#
# The warps copy the scales of x as they are, and behind them one scale of w **for each 64 columns**: a tile of 192 columns, which you will build next, may
# begin in the middle of a block. A tile of 128 columns has two, which are equal.


# %%
@factory
def make_write_by_row(columns):
    blocks = columns // 64

    @cuda.jit(device=True)
    def write(ring, stage, phase, scales, row, column, k, own):
        first = int32(k * scales.rows + row + own)
        a, b = scales.x[first], scales.x[first + 32]
        w = scales.w[((column + 64 * own) >> 7) * scales.k_blocks + k] if own < blocks else float32(0)
        mbarrier_wait_parity(ring.barriers, ring.empty + stage, phase)
        at = int32(ring.scales + stage * ring.stage_floats)
        ring.floats[uint32(at + own)] = a
        ring.floats[uint32(at + own + 32)] = b
        if own < blocks:
            ring.floats[uint32(at + W_SCALES + own)] = w

    return write


# %% [markdown]
# ## Build: the factors of a thread
#
# Write `read`. `ring.floats[at + r]` is the scale of x of the tile's row `r`, and `ring.floats[at + W_SCALES + i]` that of w of columns `64 i` to
# `64 i + 63`. A consumer warp `t` (`cuda.threadIdx.x >> 5`, 0 to 7) has rows `16 t` to `16 t + 15` of the tile, and its lane `l` has rows `l // 4` and
# `l // 4 + 8` of these. Return the four factors of the thread as a tuple: `(row, block 0)`, `(row + 8, block 0)`, `(row, block 1)`, `(row + 8, block 1)`. Par: 4
# loads. Write indices of shared memory as `uint32(...)`: a signed one costs instructions to extend it.


# %%
@cuda.jit(device=True)
def my_read(ring, at):
    pass  # yours; return four factors


read_by_row = exercises.read.use(my_read)

# %% [markdown]
# `make_fma_blocks(columns, 64)` makes the promotion: it multiplies each accumulator by the factor of its row and of its 64 columns.
#
# **Prediction.** Instead of 9 loads and 32 multiplications, 4 loads and 4 multiplications. (The compiler may load the two scales of w by one instruction.)

# %%
by_row = make_gemm(make_write_by_row(128), read_by_row, make_fma_blocks(128, 64), 128, 6)
predicted_us = page.with_instructions("scale per column", 8 - 41)
step("scale per row", Version(by_row), predicted_us=predicted_us)

# %% [markdown]
# As in step 1, what a step changes beyond instructions counts, too: here eight loads less that MMAs wait for.
#
# **Take away.** Before you make a thing faster, ask whether another assignment of data to threads needs less of it.
#
# ## What the simulator says of a stage that is released too early
#
# Scales are a part of the stage. If a thread reads them after its warp has released the stage, they may be those of another k-block. Here is a promotion that reads
# the scales itself, after the release. In most runs it works:


# %%
@cuda.jit(device=True)
def read_place(ring, at):
    return ring, at


promote_128 = make_fma_blocks(128, 64)


@cuda.jit(device=True)
def promote_late(acc, part, factors):
    ring, at = factors
    return promote_128(acc, part, read_by_row(ring, at))


late = make_gemm(make_write_by_row(128), read_place, promote_late, 128, 6)
lesson.orders(Version(late), seeds=2)

# %% [markdown]
# ## Step 3: a tile of 128 x 192
#
# Lesson 06 went from 128 to 256 columns, because shared memory was busier than the tensor cores. Here a thread needs registers twice: for
# accumulators, and for the partial sum that it promotes. With `n` columns these are `n / 2 + n / 2` registers.
#
# **Predict.** A consumer has 224 registers. Which of these tiles has the most columns, and no spilled registers: 128, 192, or 256? The check compiles all three.


# %%
def without_scales(columns, stages):
    kernel = make_gemm(write_nothing, read_one, make_add(columns), columns, stages)
    return Version(kernel, columns, stages, scaled=False)


exercises.widest.check({n: without_scales(n, stages) for n, stages in ((128, 6), (192, 5), (256, 4))}, choice=...)

# %% [markdown]
# ## Build: the promotion of three blocks
#
# A tile of 192 columns has three blocks of 64, and `read` returns six factors: of row and row + 8 in block 0, then in blocks 1 and 2. You have
# `fma_64(total, part, (f, g))`, which promotes 32 accumulators of a thread, those of 64 columns and of its two rows. `acc` and `part` have 96 each, and
# a slice with constant bounds, `acc[:32]`, costs nothing. Tuples are joined by `+`. Par: no search, that is at most a few compares.

# %%
fma_64 = make_fma_blocks(64, 64)


@cuda.jit(device=True)
def my_promote(acc, part, factors):
    pass  # yours; return 96 accumulators


promote_192 = exercises.promote.use(my_promote)

# %% [markdown]
# **Prediction.** The time falls as the clocks of the busiest unit per MMA do, which is shared memory: lesson 06, step 5.


# %%
@cuda.jit(device=True)
def read_three(ring, at):
    row = int32(16 * (int32(cuda.threadIdx.x) >> 5) + (int32(cuda.threadIdx.x) >> 2 & 7))
    a, b = ring.floats[uint32(at + row)], ring.floats[uint32(at + row + 8)]
    u, v, w, _ = ld_shared_s32x4(ring.words, int32(at + W_SCALES))
    u, v, w = int_as_float(u), int_as_float(v), int_as_float(w)
    return a * u, b * u, a * v, b * v, a * w, b * w


WIDE = dict(columns=192, stages=5)
wide = make_gemm(make_write_by_row(192), read_three, promote_192, 192, 5)
step("192 columns", Version(wide, **WIDE), predicted_us=page.by_busiest_unit("scale per row", 128, 192))

# %% [markdown]
# **Take away.** Registers are what a wider tile costs. Promotion needs them twice, which is why this kernel stops at 192 columns, where lesson 06 has 256.
#
# ## A colleague's kernel
#
# A colleague wrote another `write` for tiles of 192 columns. Its results are wrong. With x and w all ones, one k-block, and scales that are different powers of two,
# each element of D says which scales it was multiplied by. The table has the ratio of found and right elements, for rows and blocks of 64 columns of D:

# %%
colleague = make_gemm(exercises.colleagues_write, read_three, promote_192, 192, 5)
page.show_ratios(Version(colleague, **WIDE))

# %% [markdown]
# **Diagnose.** What is wrong with `write`? The check lists four candidates; choose one.

# %%
exercises.ratios.check(...)

# %% [markdown]
# ## What limits it: kernels that leave something out
#
# No profiler says what a kernel would take without its scales. But you can write that kernel: leave one part out, and time what remains. Its results
# are wrong, of course. If a part is hidden behind the others, leaving it out changes nothing.


# %%
@cuda.jit(device=True)
def load_nothing(ring, stage, map_a, map_b, row, column, k):
    mbarrier_arrive(ring.barriers, ring.full + stage)


@cuda.jit(device=True)
def read_constants(ring, at):
    one = float32(1)
    return one, one, one, one, one, one


PART = (np.float32(1),) * 96


@cuda.jit(device=True)
def multiply_nothing(a, b):
    return PART


parts = make_write_by_row(192), read_three, promote_192
page.show_parts(
    {
        "192 columns": Version(wide, **WIDE),
        "no scales": without_scales(192, 5),
        "without loads": Version(make_gemm(*parts, 192, 5, False, load_nothing), **WIDE),
        "without MMAs": Version(make_gemm(*parts, 192, 5, False, load_stage, multiply_nothing), **WIDE),
        "scales not written": Version(make_gemm(write_nothing, read_three, promote_192, 192, 5), **WIDE),
        "scales not read": Version(make_gemm(make_write_by_row(192), read_constants, promote_192, 192, 5), **WIDE),
    }
)

# %% [markdown]
# (Compare these times with one another, not with those of the steps above: they were measured together, in another burst.) "No scales" is what this tile would take without
# them, so the difference to the first row is their price. "Without loads" is the time of everything that consumers do, and "without MMAs" that of everything else. The first
# one is far above the time of all MMAs at the peak rate. A part of that gap is the clock, as in lesson 06. The rest may be what a consumer does *between* its MMAs, which
# is a chain: wait for the barrier, read scales, multiply them, issue MMAs, wait for them, promote. Both remaining steps shorten this chain, and so test that.
#
# ## Step 4: factors by idle warps
#
# The two warps that write scales are mostly idle. Let them multiply. For each row they write the products of its scale and of the three scales
# of w, so a row has four floats, the last of which is unused, and a consumer reads the factors of a row by one instruction:

# %%
draw.stage()

# %% [markdown]
# ## Build: the warps that write factors
#
# Write `write`. All 64 lanes of both warps call it for each stage. It loads the scales of x of rows `row + own` and `row + own + 32` (in `scales.x[k *
# scales.rows + row]`), and those of w of the blocks of columns `column`, `column + 64` and `column + 128` (`scales.w[(column >> 7) * scales.k_blocks + k]`). It waits
# until the stage is empty, as `write_nothing` above does, and writes four floats, the last of which is not used, from `ring.scales + stage *
# ring.stage_floats + 4 * own` on, and for the second row 128 floats further. `st_shared_s32x4(ring.words, index, a, b, c, d)` stores four 32-bit words by one
# instruction, and `float_as_int(f)` is the word of a float. Par: 2 stores.


# %%
@cuda.jit(device=True)
def my_write(ring, stage, phase, scales, row, column, k, own):
    pass  # yours


write_factors = exercises.write.use(my_write)

# %% [markdown]
# **Prediction.** Instead of 3 loads and 6 multiplications, 2 loads.


# %%
@cuda.jit(device=True)
def read_factors(ring, at):
    row = int32(16 * (int32(cuda.threadIdx.x) >> 5) + (int32(cuda.threadIdx.x) >> 2 & 7))
    a_0, a_1, a_2, _ = ld_shared_s32x4(ring.words, int32(at + 4 * row))
    b_0, b_1, b_2, _ = ld_shared_s32x4(ring.words, int32(at + 4 * row + 32))
    a = int_as_float(a_0), int_as_float(a_1), int_as_float(a_2)
    b = int_as_float(b_0), int_as_float(b_1), int_as_float(b_2)
    return a[0], b[0], a[1], b[1], a[2], b[2]


by_producers = make_gemm(write_factors, read_factors, promote_192, 192, 5)
predicted_us = page.with_instructions("192 columns", 2 - 9, 192)
step("factors by producers", Version(by_producers, **WIDE), predicted_us=predicted_us)

# %% [markdown]
# Fewer instructions, and no less time: so issue slots were not the limit here, and neither was this part of the chain.
#
# **Take away.** Work does not have to be done where its result is used, but moving it pays only if it was in the way.
#
# ## Step 5: the next barrier is tested early
#
# At the beginning of a k-block a warp asks the barrier whether the stage is full. The answer takes a round trip to shared memory, even when the stage has been full for
# long. Factors and MMAs wait for it. But a warp can ask *before* it promotes: the answer arrives while it issues multiply-adds, and only if it is "no" does the
# warp wait. That is `early` in the kernel, which the compiler leaves out where it is false.
#
# **Prediction.** One round trip to shared memory less per k-block.

# %%
EARLY = True
early = make_gemm(write_factors, read_factors, promote_192, 192, 5, EARLY)
predicted_us = page.without_round_trip("factors by producers", 192)
step("barrier tested early", Version(early, **WIDE), predicted_us=predicted_us)

# %% [markdown]
# If neither of the two steps changes the time much, the chain between two MMAs is not what keeps "without loads" so far above the MMAs alone.
#
# **Take away.** Ask early, and use the answer late. A load, a barrier, a lookup: what takes a round trip should be under way while you do something else.
#
# ## What limits it now: power
#
# As in lesson 06, the clock falls under sustained load until the GPU stays within its power limit. So a kernel has **two times**, and numbers of different
# runs can only be compared if both are of one kind. All steps of this page are timed in short bursts, interleaved. The next cell also launches each kernel
# for about a second, and reads the energy counter of the GPU:

# %%
versions = {
    "no scales": Version(unscaled, scaled=False),
    "scale per row": Version(by_row),
    "no scales, 192 columns": without_scales(192, 5),
    "192 columns": Version(wide, **WIDE),
    "barrier tested early": Version(early, **WIDE),
}
page.show_power(versions)

# %% [markdown]
# Where the power column is at the limit, a kernel takes its energy divided by the limit, whatever its main loop looks like. Then only less energy makes it faster:
# fewer bytes moved, fewer instructions, no waiting at full clock. Steps 4 and 5 change what a warp waits for, and hardly the energy, so under sustained load they
# cannot gain much. Why they gain as little in short bursts we do not know.
#
# **Take away.** Near the end of an optimisation the resource that runs out may be watts. Say in which regime you have measured.
#
# ## What did not pay, and why
#
# An earlier version of this lesson timed these changes in the package's grouped kernel, 32 groups, at the power limit:

# %%
page.show_what_did_not_pay()

# %% [markdown]
# ## All steps, and others' kernels
#
# The package's kernel is step 5 with groups, and with tiles that were chosen by measurement. cuBLAS multiplies by block scales since CUDA 12.9, and we do not know how
# it works. If the run also had kernels of other projects, they are in the table; the line below it names the fastest kernel, and their versions:

# %%
page.show_peers(Version(early, **WIDE))

# %% [markdown]
# If DeepGEMM is the fastest here, its main loop is not the reason. It has the same tile of 128 x 192, the same order of waits, MMAs and promotion, and about
# as many instructions between two MMAs. What differs lies outside of the loop: the two CTAs of a cluster share each tile of w, which crosses L2 once for both
# (multicast, lesson 06); the rows of x come in one box instead of two, and their scales by TMA; those of w are loaded once per tile. "Without MMAs", in the
# table of kernels that leave something out, takes most of the time of the whole kernel, so loading is where to look first. Which of these differences counts we
# have not measured.
#
# And these are times of grouped GEMMs from the record of `bench grouped_gemm`, another run, 4096 x 7168, with rows that are distributed evenly, by a Zipf law, or all
# to one expert. A star marks the fastest. DeepGEMM's *contiguous* layout has all rows in one array, each group padded to whole tiles; its *masked* layout has room for the same
# number of rows in each group. hpc-ops was written for an H20:

# %%
page.show_grouped()

# %%
lesson.save()
lesson.summary()

# %% [markdown]
# **You can now** bring scales through a pipeline beside its operands, and test what limits a kernel with one that leaves a part out.
#
# ## Next step, not built
#
# Both warpgroups promote at the same time, and then the tensor cores are idle. **Build** a kernel in which they take turns, one promoting while the other one multiplies: a
# named barrier of each warpgroup says whose turn it is (CUTLASS calls this *ping-pong*). Or use scales that are powers of two: then `promote` could add to the
# exponent, or even leave scaling to the tensor cores of the next generation. The lower bound is that of the beginning:

# %%
print(page.lower_bound())

# %% [markdown]
# ## Sources
#
# - DeepSeek-AI: [DeepGEMM](https://github.com/deepseek-ai/DeepGEMM), whose tiles have tokens as rows, and which promotes as this kernel does;
#   [DeepSeek-V3 Technical Report](https://arxiv.org/abs/2412.19437), section 3.3 (why blocks of 128).
# - NVIDIA: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/) (`mbarrier.test_wait`, `wgmma`); NVML (energy counter).
# - The package's kernel: [`block_scaled/kernel.py`](../moe_numba/grouped_gemm/block_scaled/kernel.py).
#
# Before: [07, a grouped GEMM](07_grouped_gemm.ipynb). Next: [09, 4-bit weights](09_w4_weights.ipynb), whose scales are applied before the MMA.
