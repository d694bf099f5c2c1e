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
# # 4-bit weights
#
# When a model writes its answer token by token, each expert sees only a few tokens at a time. Then a layer takes as long as it takes to **read the
# weights**. Halve the bytes of a weight, and you could halve the time. gpt-oss stores weights in **MXFP4**: 4 bits each, and a scale for every 32.
# Hopper's tensor cores cannot multiply such numbers. So somebody has to decode them to bfloat16, and there are a billion of them.
#
# This lesson has one question: **how do you decode weights in no time?** The first version does it in a kernel of its own, which makes everything slower than
# weights in bfloat16. The last one decodes on the way from shared memory to the tensor cores, with a few shifts and masks, while the next codes are arriving. (Whether that is
# "no time", the end of the page says.)
# You will write the decoder, the place of each code in memory, and the multiplication.

# %%
import os

os.environ["MOE_NUMBA_ONLY"] = "90"  # Hopper: with another GPU the simulator runs the kernels
import moe_numba  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint16, uint32, uint64

from moe_numba.course.lessons.hopper.runs import Ring, advance
from moe_numba.course.lessons.w4_weights import draw, exercises
from moe_numba.course.lessons.w4_weights import runs as page
from moe_numba.course.lessons.w4_weights.runs import First, Version, lesson, load_rows, mma  # for your answers
from moe_numba.course.lessons.w4_weights.sizes import (
    CODE_BYTES,
    RESULT_EXPONENT,
    STAGE_TILES,
    TILE,
    TILE_BYTES,
    TOKENS,
    X_BYTES,
)
from moe_numba.course.steps.lesson import factory
from moe_numba.ptx.arithmetic import int_as_float, mul_rn_bf16x2
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.cp_async import bulk_load
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import ld_shared_s32x4, st_global_s32x4
from moe_numba.ptx.tma import tma_load_2d
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.ptx.warpgroup import elect_sync
from moe_numba.ptx.wgmma import make_wgmma_tile_rs, make_wgmma_wait, make_wgmma_wait_registers, wgmma_descriptor

print("kernels run", "in the simulator:" if moe_numba.simulator.ENABLED else "on a GPU:", moe_numba.simulator.REASON)
step = lesson.step
print(page.result())

# %% [markdown]
# ## The problem
#
# Each expert `e` has a weight `w[e]` of `[n, k]` and eight tokens `x[e]` of `[8, k]` in bfloat16. We compute `y[e] = x[e] w[e]ᵀ`. A weight is a
# **code** of four bits, **e2m1**: a sign, two bits of exponent, one of mantissa. 32 codes that follow one another along k share a scale, a power of two
# in one byte. In torch, with `values` of the 16 codes:
#
# ```python
# w = values[codes] * 2.0 ** (scales.repeat_interleave(32, -1) - 127)
# y = (x.float() @ w.float().transpose(1, 2)).bfloat16()
# ```

# %%
draw.codes()

# %% [markdown]
# bfloat16 has eight bits of exponent and seven of mantissa, so each product of a code and a scale is a bfloat16, exactly. The lower bound is the time of reading codes and
# scales once, 4.25 bits per weight:

# %%
print(page.lower_bound())

# %% [markdown]
# ## Step 1: dequantise first
#
# A kernel decodes all weights to bfloat16 in global memory, and then the package's bfloat16 GEMM reads them. A thread decodes eight codes. It takes the definition at
# its word: find the number of a code, multiply it by the scale, round to bfloat16.
#
# **Predict.** How many bits per weight cross the memory bus: how many does the decoder read, how many does it write, and how many does the GEMM read?

# %%
exercises.traffic.check(decoder_reads=..., decoder_writes=..., gemm_reads=...)

# %% [markdown]
# **Prediction.** All of these bytes at the rate of a copy.


# %%
@cuda.jit(device=True)
def value_of(code):
    exponent, mantissa = int32(code >> uint32(1) & uint32(3)), int32(code & uint32(1))
    doubled = mantissa if exponent == 0 else int32((2 | mantissa) << (exponent - 1))
    value = float32(doubled) * float32(0.5)
    return -value if code & uint32(8) else value


@cuda.jit(device=True)
def decode_two(low, high, scale):
    return cvt_rn_bf16x2_f32(value_of(high) * scale, value_of(low) * scale)  # the second argument is the low half


@cuda.jit
def dequantise(blocks, scales, out, words):
    i = int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    if i < words:
        word, scale = uint32(blocks[i]), int_as_float(int32(int32(scales[i >> 2]) << 23))
        a, b = decode_two(word, word >> uint32(4), scale), decode_two(word >> uint32(8), word >> uint32(12), scale)
        c = decode_two(word >> uint32(16), word >> uint32(20), scale)
        d = decode_two(word >> uint32(24), word >> uint32(28), scale)
        st_global_s32x4(out, int64(4) * i, int32(a), int32(b), int32(c), int32(d))


step("dequantise first", First(dequantise), predicted_us=page.two_passes())

# %% [markdown]
# **Take away.** A smaller format saves nothing, if you expand it before the bus has been crossed for the last time.
#
# ## A kernel that decodes
#
# So codes must stay codes until they have arrived in an SM. `wgmma` takes A from shared memory, or **from registers**. That is the gap: a thread loads
# codes from shared memory, decodes them in registers, and multiplies. Rows of w are A, tokens are B:

# %%
draw.path()

# %% [markdown]
# A **weight tile** has 64 rows and 64 elements of k: 2048 bytes of codes and 128 of scales. A warpgroup multiplies it by four `wgmma`, of 16 elements of k each. For each
# one a thread has four registers of A, with two weights each: register `2 h + r` of lane `l` in warp `w` has columns `8 h + 2 (l % 4)` and the next one, of row `16 w + l // 4 + 8 r`.
#
# So a thread needs 32 codes of a tile, 16 bytes. In a checkpoint these are scattered over two rows. But a checkpoint is packed once, when it is loaded. So let us put them **in
# the order in which threads need them**: thread `t` of the warpgroup has the bytes `16 t` to `16 t + 15` and loads them by one instruction. These are four words, one for each
# `wgmma`. A word has four codes in its low half, those of the first columns of registers 0 to 3, and in its high half those of the second columns:

# %%
draw.word()

# %% [markdown]
# ## Build: the place of a code
#
# Where is the code of `row` and `column`, 0 to 63 each, of a weight tile? Return the thread of the warpgroup, its word, and the lowest of the four bits.


# %%
def my_place_of(row, column):
    return ...  # yours; (thread, word, bit)


exercises.place.check(my_place_of)

# %% [markdown]
# ## Step 2: decode in the consumer
#
# This kernel stands until the end of the lesson. Weight tiles are contiguous in memory, so one `cp.async.bulk` copies those of a stage for each warpgroup, without a tensor map; TMA loads the
# tokens. The consumers are 2 warpgroups at first. `decode` and `multiply` are holes.
#
# Scales: a thread has two rows and a tile has two blocks of 32 columns, so it needs four scales, the bytes of a word. Packing has added 94 to each byte. As the exponent of a
# bfloat16 it then stands for the scale times `2**94`; step 3 says why. The decoder below subtracts 126 again, so that y is too small by `2**32`, as it will be in step 3, and
# the epilogue multiplies by that.


# %%
@factory
def make_gemm(decode, multiply, warpgroups, stages):
    x_bytes, weight_bytes = STAGE_TILES * X_BYTES, STAGE_TILES * TILE_BYTES  # of a stage; and for each warpgroup
    loaded = x_bytes + warpgroups * weight_bytes
    stage_bytes = (loaded + 1023) // 1024 * 1024  # tokens, then weight tiles
    full, empty = stages * stage_bytes // 8, stages * stage_bytes // 8 + stages
    zeros, result_scale = (np.float32(0),) * (TOKENS // 2), np.float32(2.0**RESULT_EXPONENT)

    @cuda.jit
    def gemm(map_x, weight, out, tiles_of_expert, tiles, k_stages, n):
        smem, words = cuda.shared.array(0, uint8, 1024), cuda.shared.array(0, int32, 1024)
        barriers = cuda.shared.array(0, uint64, 1024)
        ring = Ring(smem, barriers, int32(full), int32(empty), int32(stages), int32(stage_bytes))
        thread, tile = int32(cuda.threadIdx.x), uint32(cuda.blockIdx.x)
        warp, lane = int32(thread >> 5), int32(thread & 31)
        if thread == 0:
            for s in range(stages):
                mbarrier_init(barriers, full + s, 1)
                mbarrier_init(barriers, empty + s, 4 * warpgroups)
            fence_mbarrier_init()
        cuda.syncthreads()

        if warp == 4 * warpgroups:
            # the producer: one thread
            if elect_sync(FULL_MASK):
                stage, phase = int32(0), uint32(1)
                while tile < uint32(tiles):
                    expert = int32(tile // uint32(tiles_of_expert))
                    for k in range(k_stages):
                        mbarrier_wait_parity(barriers, empty + stage, phase)
                        mbarrier_arrive_expect_tx(barriers, full + stage, loaded)
                        to = int32(stage * stage_bytes)
                        for t in range(STAGE_TILES):
                            at = int32((STAGE_TILES * k + t) * 2 * TILE)  # bytes of a token
                            tokens, first_token = int32(to + t * X_BYTES), int32(TOKENS * expert)
                            tma_load_2d(smem, tokens, map_x, 0, at, first_token, barriers, full + stage)
                        for group in range(warpgroups):
                            row_of_tiles = int64(tile) * warpgroups + group
                            first = (row_of_tiles * k_stages + k) * weight_bytes
                            place = int32(to + x_bytes + group * weight_bytes)
                            bulk_load(smem, place, weight, first, uint32(weight_bytes), barriers, full + stage)
                        stage, phase = advance(ring, stage, phase)
                    tile = uint32(tile + uint32(cuda.gridDim.x))
        else:
            # consumers: each warpgroup has 64 rows of the weight
            group, stage, phase = int32(thread >> 7), int32(0), uint32(0)
            while tile < uint32(tiles):
                acc = zeros
                for _ in range(k_stages):
                    mbarrier_wait_parity(barriers, full + stage, phase)
                    first = int32(stage * stage_bytes)
                    for t in range(STAGE_TILES):
                        at = int32((first + x_bytes + group * weight_bytes + t * TILE_BYTES) >> 2)
                        codes = ld_shared_s32x4(words, int32(at + 4 * (thread & 127)))
                        scales = words[uint32(at + CODE_BYTES // 4 + 8 * (warp & 3) + (lane >> 2))]
                        a = decode(codes, uint32(scales))  # <-- a hole: 16 registers of A
                        acc = multiply(acc, a, smem, int32(first + t * X_BYTES))  # <-- a hole
                    cuda.syncwarp()
                    if lane == 0:
                        mbarrier_arrive(barriers, empty + stage)
                    stage, phase = advance(ring, stage, phase)
                # the thread has rows `row` and `row + 8`, and two tokens
                expert = int32(tile // uint32(tiles_of_expert))
                in_expert = int32(tile - uint32(expert) * uint32(tiles_of_expert))
                row = int32((in_expert * warpgroups + group) * TILE + 16 * (warp & 3) + (lane >> 2))
                to = int64(TOKENS * expert + 2 * (lane & 3)) * n + row
                low = cvt_rn_bf16x2_f32(acc[1] * result_scale, acc[0] * result_scale)
                high = cvt_rn_bf16x2_f32(acc[3] * result_scale, acc[2] * result_scale)
                out[to], out[to + n] = uint16(low), uint16(low >> uint32(16))
                out[to + 8], out[to + n + 8] = uint16(high), uint16(high >> uint32(16))
                tile = uint32(tile + uint32(cuda.gridDim.x))

    return gemm


# %% [markdown]
# The decoder by value, and the multiplication by `wgmma`. `make_wgmma_wait_registers` also waits, and keeps the compiler from using the registers of A for something else while
# `wgmma` still reads them:


# %%
@cuda.jit(device=True)
def decode_word_by_value(word, scale_0, scale_1):  # the scales of rows l // 4 and l // 4 + 8
    return (
        decode_two(word, word >> uint32(16), scale_0),
        decode_two(word >> uint32(4), word >> uint32(20), scale_1),
        decode_two(word >> uint32(8), word >> uint32(24), scale_0),
        decode_two(word >> uint32(12), word >> uint32(28), scale_1),
    )


@cuda.jit(device=True)
def scale_by_value(scales, i):
    return int_as_float(int32((int32(scales >> uint32(8 * i) & uint32(255)) - 126) << 23))


@cuda.jit(device=True)
def decode_by_value(codes, scales):
    a, b, c, d = codes
    p, q, r, s = (
        scale_by_value(scales, 0),
        scale_by_value(scales, 1),
        scale_by_value(scales, 2),
        scale_by_value(scales, 3),
    )
    first = decode_word_by_value(uint32(a), p, q) + decode_word_by_value(uint32(b), p, q)
    return first + decode_word_by_value(uint32(c), r, s) + decode_word_by_value(uint32(d), r, s)


wgmma, wait = make_wgmma_tile_rs(TOKENS, "bf16", 4), make_wgmma_wait(TOKENS, 0)
wait_registers = make_wgmma_wait_registers(16, 0)


@cuda.jit(device=True)
def multiply(acc, a, smem, at):  # tokens of the tile's elements of k are at `at`
    acc = wgmma(acc, a, wgmma_descriptor(smem, at))
    wait_registers(a)
    return wait(acc)


# %% [markdown]
# **Prediction.** The kernel takes the longer one of reading the codes and issuing its instructions, one per clock on each of an SM's four schedulers. The compiler says how many a thread needs for its 32 weights
# of a tile:

# %%
in_consumer = Version(make_gemm(decode_by_value, multiply, 2, 12), 2, 12)
page.show_limits({"by value": in_consumer})

# %%
step("decode in the consumer", in_consumer, predicted_us=page.by_instructions(in_consumer))

# %% [markdown]
# The kernel takes almost twice what the model says, which lets each scheduler issue in every clock. A scheduler has two consumer warps here, and both may wait at the same time; step
# 4 tests that. Still, most of the time is instructions, not bytes.
#
# **Take away.** The bus is not the limit any more: instructions are. There are 16 registers to fill, so each instruction per register counts.
#
# ## Step 3: shift, mask, multiply
#
# Look at the bits. The exponent of e2m1 has a bias of 1, and that of bfloat16 one of 127. Put the sign of a code to bit 15 and its other three bits to bits 8 to 6, and fill up with zeros. The result is a bfloat16:
# the number of the code, times `2**-126`. That is true of the subnormal 0.5, too, which is subnormal in both formats. So there is nothing to compute. One multiplication puts the exponent right, and it
# can apply the scale as well, for two weights at once (`mul.bf16x2`):

# %%
draw.decoding(0b1101)

# %% [markdown]
# `2**126` times a scale may exceed the range of bfloat16. That is why packing adds only 94 to the exponent, and the epilogue multiplies by `2**32`.
#
# ## Build: decode a word
#
# Write `decode_word`: it takes a word, and returns four registers, uint32, that still have to be multiplied by `2**126`. Register `i` has the code of bits `4 i` to `4 i + 3` in its low half, and that of bits
# `4 i + 16` to `4 i + 19` in its high half. All other bits are 0. Shift with `uint32(word << uint32(12))`: a plain `word << 12` has 64 bits. The check tries all 16 codes in all eight places, and
# counts the instructions that the compiler makes of it. Par: 16.


# %%
@cuda.jit(device=True)
def my_decode_word(word):
    pass  # yours; return four registers


decode_word = exercises.decode.use(my_decode_word)

# %% [markdown]
# The two halves of `pair` are the scale of a row, as a bfloat16 whose exponent is the byte of the packed scale:


# %%
@cuda.jit(device=True)
def pair(scales, i):
    return uint32((uint32(scales >> uint32(8 * i)) & uint32(255)) * uint32(0x00800080))  # exponents begin at bit 7


@cuda.jit(device=True)
def scaled(word, scale_0, scale_1):
    a, b, c, d = decode_word(word)
    return mul_rn_bf16x2(a, scale_0), mul_rn_bf16x2(b, scale_1), mul_rn_bf16x2(c, scale_0), mul_rn_bf16x2(d, scale_1)


@cuda.jit(device=True)
def decode_by_masks(codes, scales):
    a, b, c, d = codes
    p, q, r, s = pair(scales, 0), pair(scales, 1), pair(scales, 2), pair(scales, 3)
    return scaled(uint32(a), p, q) + scaled(uint32(b), p, q) + scaled(uint32(c), r, s) + scaled(uint32(d), r, s)


by_masks = Version(make_gemm(decode_by_masks, multiply, 2, 12), 2, 12)
page.show_limits({"by value": in_consumer, "by masks": by_masks})

# %%
step("shift, mask, multiply", by_masks, predicted_us=page.by_instructions(by_masks))

# %% [markdown]
# The model is off by about the same factor as before, so it still predicts how much *fewer instructions* save.
#
# **Take away.** Before you compute, look at the bits. Two formats that are built alike differ by a shift and a power of two.
#
# (The package needs fewer instructions still, two for most registers: it packs codes such that the bits of one register stand at the right distances after *one* shift. [`w4/packing.py`](../moe_numba/grouped_gemm/w4/packing.py) explains it.)
#
# ## What is left: a kernel that does not decode
#
# What does decoding cost now? Pass the codes to `wgmma` as they are. The result is wrong, and the time is that of everything else:


# %%
@cuda.jit(device=True)
def decode_nothing(codes, scales):
    a, b, c, d = codes
    four = uint32(a), uint32(b), uint32(c), uint32(uint32(d) ^ scales)
    return four + four + four + four


page.show_parts(
    {
        "by value": in_consumer,
        "by masks": by_masks,
        "not decoded": Version(make_gemm(decode_nothing, multiply, 2, 12), 2, 12),
    }
)

# %% [markdown]
# ## A model with wrong weights
#
# A colleague has written another `pack`. The kernel's results are wrong. To see why, use a weight whose row `c` is 1 in column `c` and 0 elsewhere, and ask for each column by a token that is 1 there and 0 elsewhere. Which
# column comes?

# %%
page.show_columns(by_masks, exercises.colleagues_pack)

# %% [markdown]
# **Diagnose.** What has `pack` done wrong? The check lists four candidates; choose one.

# %%
exercises.columns.check(...)

# %% [markdown]
# ## Step 4: four warpgroups
#
# A warpgroup loads codes, decodes, issues MMAs, waits, and only then loads the next codes. With two warpgroups, a scheduler has two such warps, and is idle while both wait. Four warpgroups give it four, and while one waits the
# others decode. A thread needs few registers here, since a tile has only eight tokens, so they fit.
#
# **Prediction.** Half of what the kernel takes beyond reading the codes, since twice as many warps share the waiting.

# %%
FOUR = 4, 11  # warpgroups, and stages, which are larger
four = Version(make_gemm(decode_by_masks, multiply, *FOUR), *FOUR)
step("four warpgroups", four, predicted_us=page.with_all_codes_read("shift, mask, multiply", 0.5))

# %% [markdown]
# **Take away.** A chain of dependent instructions needs either other work in the same warp, or other warps.
#
# ## Step 5: mma.sync for few tokens
#
# `wgmma` multiplies at least 64 rows by 8 columns, with A from registers, and a whole warpgroup waits for it. The older `mma.sync` multiplies 16 rows by 8 columns in a single warp, and its result is simply there, for the next
# instruction to use: no fence, no wait, no warpgroup. With large tiles it is slower than `wgmma` by far. But this kernel multiplies little: eight tokens only. And its registers of A and of the accumulators are
# those of `wgmma`, so `decode` and the epilogue stay as they are. Only B is different: a warp loads tokens into registers, by `ldmatrix`:

# %%
draw.ldmatrix()

# %% [markdown]
# ## Build: the multiplication of a warp
#
# Write `multiply`. Tokens lie at `at`: 8 rows of 128 bytes, and in row `r` the 16-byte chunk `i` stands at place `i ^ r` (TMA's swizzle, [lesson 06](06_hopper_gemm.ipynb)). `load_rows(smem, index)` is an `ldmatrix` of four 8 x 8 matrices: lane `8 i
# + r` passes the index of the first byte of row `r` of matrix `i`, and the result is a tuple of four registers, one of each matrix. Matrix `i` shall be chunk `i`, and with a second load chunk `i + 4`. `mma(acc, a, b)` adds the product of 16
# elements of k: `a` are four registers of A, `b` two of B, those of chunks `2 s` and `2 s + 1` for `mma` number `s`. Return the accumulators. Par: two loads, four `mma`.


# %%
@cuda.jit(device=True)
def my_multiply(acc, a, smem, at):
    pass  # yours; return acc


multiply_by_warp = exercises.multiply.use(my_multiply)

# %% [markdown]
# **Prediction.** What the kernel takes beyond reading the codes is halved again. (That is more than there is: decoding does not become faster.)

# %%
last = Version(make_gemm(decode_by_masks, multiply_by_warp, *FOUR), *FOUR)
step("mma.sync", last, predicted_us=page.with_all_codes_read("four warpgroups", 0.5))

# %% [markdown]
# So the answer to the question is: not in no time. Beside the kernel that does not decode, about a quarter of the time is left to decoding; the package's packing, in the table of
# peers below, is close to what that kernel takes.
#
# **Take away.** The fastest instruction for large tiles need not be the fastest for small ones.
#
# ## What did not pay, and why

# %%
page.show_what_did_not_pay()

# %% [markdown]
# ## All steps, and others' kernels
#
# `torch.bmm` multiplies by weights in bfloat16, which need no decoding. The package's kernel takes groups of any size, and decodes by fewer instructions. Other
# projects' kernels are there if the run had them:

# %%
page.show_peers(last)

# %% [markdown]
# Where do 4-bit weights stop paying? These are times of the package's grouped GEMMs from the record of `bench grouped_gemm`. (32 tokens do not reach all experts, so their time may be
# below the bound of this page, whose 256 tokens do.) With many tokens the MMAs are the limit, and bfloat16's take twice as long as FP8's; decoding comes on top, once for each tile of tokens. Then 4 bits
# save memory, but no time:

# %%
page.show_rows()

# %%
lesson.save()
lesson.summary()

# %% [markdown]
# **You can now** store weights in the order in which threads need them, and decode them in registers on the way to the tensor cores.
#
# ## Next step, not built
#
# Each weight is decoded by multiplications that only shift exponents. **Build** a packing that needs one shift and one mask per register, as the package does, or a decoder that puts the scale into the sum instead: multiply the partial sums of 32 elements of k, as
# [lesson 08](08_block_scales.ipynb) does, and no weight at all. Count the instructions of both per weight tile before you write them. The bound to beat is the one of the beginning:

# %%
print(page.lower_bound())

# %% [markdown]
# ## Sources
#
# - Open Compute Project: *OCP Microscaling Formats (MX) Specification 1.0* (MXFP4: e2m1, a scale for 32 elements).
# - [Marlin](https://github.com/IST-DASLab/marlin), which packs 4-bit integers in the order of fragments.
# - OpenAI: [gpt-oss](https://github.com/openai/gpt-oss), whose experts have such weights.
# - NVIDIA: [PTX ISA](https://docs.nvidia.com/cuda/parallel-thread-execution/) (`wgmma` with A in registers, `mma.sync`, `ldmatrix`, `cp.async.bulk`).
# - The package's kernel: [`w4/kernel.py`](../moe_numba/grouped_gemm/w4/kernel.py).
#
# Before: [08, block scales](08_block_scales.ipynb). Next: [10, the dispatch layout](10_dispatch_layout.ipynb), which counts the tokens that must leave the GPU.
