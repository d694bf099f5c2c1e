"""Kernels of ``fused_experts`` for a few tokens, whose experts have a row each, with MXFP4 weights.

As in ``fp8_blocks.py`` a warp multiplies 16 rows of the weights by a vector with ``mma.sync``, whose eight columns are
all that vector. The weights are packed for wgmma (``grouped_gemm/w4/packing.py``), in tiles of 64 rows by 64 elements
of k. A warp reads a quarter of a tile, 16 rows: each lane loads 16 bytes of codes and a word of scales, and decodes
them to its registers of A for four ``m16n8k16``. Warps with the same rows split k, and their sums are added in a fixed
order.

Weights go to registers, a batch of tiles at a time. A warp loads the first batch before it stages the vector in shared
memory (in the second kernel even before ``griddepcontrol.wait``), and each further one when it has multiplied the batch
before. In the first kernel all warps stage a token for all; in the second each warp stages what it multiplies, its part
of its expert's activations. At the end of both, warps leave their sums in shared memory, and after ``__syncthreads``
one thread for each result adds them.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import ALPHA
from moe_numba.grouped_gemm.w4.dequantize import decode_scaled_tile
from moe_numba.grouped_gemm.w4.packing import RESULT_EXPONENT, TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES, TILE
from moe_numba.moe_layer.gemv.bf16 import bf16_bits, make_load_bias
from moe_numba.moe_layer.gemv.fp8_blocks import MMA_ROWS
from moe_numba.moe_layer.silu_and_mul.kernel import low_half, make_activation
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_nc_na_s32x4,
    ld_shared_s32x4,
    load_nc_u32x4,
)
from moe_numba.ptx.mma import make_mma
from moe_numba.ptx.warp import uniform

QUARTERS = TILE // MMA_ROWS  # quarters of a weight tile: a warp multiplies one
TILE_ACTIVATIONS = TILE // 2  # activations of a weight tile of gate and up
MXFP4_MAX_TOPK = 16
MAX_SPLITS = 4  # warps that have the same rows
MAX_WARPS = 32  # warps of a CTA of the second kernel
MXFP4_MAX_VECTOR_BYTES = 40960  # vectors of a CTA, in bfloat16 in shared memory
_TILE_WORDS, _CODE_WORDS = TILE_BYTES // 4, CODE_BYTES // 4
_VECTOR_WORDS = TILE // 2  # words of a tile's elements of a vector, in bfloat16
_MAX_BATCH = 8  # tiles whose codes a lane loads at once
_RESULT_SCALE = np.float32(2.0**RESULT_EXPONENT)


class DecodeMxfp4Shape(NamedTuple):
    """What the kernels are compiled for."""

    num_experts: int
    hidden: int
    intermediate: int
    topk: int
    bias: str  # dtype of the bias, "bf16" or "f32", or none
    splits: int  # parts of k, one for each warp with the same rows


def tiles_of(k):
    """Return the weight tiles along k, a multiple of 64."""
    return k // TILE


def part_of(k, splits):
    """Return the weight tiles along k of a warp."""
    return -(-tiles_of(k) // splits)


def launch_bounds_of(threads):
    """Return the threads of a CTA and the least number of CTAs per SM: 24 warps, so that enough loads are in flight."""
    return threads, max(1, 768 // threads)


@cache
def make_stage_vector(k):
    """Make ``stage_vector(vectors, row, words, first, tile, index)``, which copies 16 bytes to shared memory.

    They are elements ``8 * index`` to ``8 * index + 7`` of a tile, of a vector of k elements. As B of ``mma.sync`` lane
    q of a quad takes elements 2 q and 2 q + 1 of every eight, which are word q of the four loaded here. Its eight words
    of a tile lie next to each other, from word ``8 q`` on, so that it loads them with two instructions.
    """

    @cuda.jit(device=True)
    def stage_vector(vectors, row, words, first, tile, index):
        loaded = load_nc_u32x4(vectors, int64(row) * k + (TILE * tile + 8 * index))
        for q in range(4):
            words[int32(first + _VECTOR_WORDS * tile + 8 * q + index)] = int32(loaded[q])

    return stage_vector


@cache
def make_multiply_rows(k, splits):
    """Make ``load`` and ``multiply``, for 16 rows of a weight and a warp's part of k; return them and ``num_words``.

    - ``load(weights, place, start, end, words)`` loads a lane's codes and scales of some tiles along k, from ``start``
      on, to ``words``, which has ``num_words``.
    - ``low, high = multiply(weights, place, lane, begin, end, words, x_words, x_first)`` returns the products of rows
      ``lane // 4`` and ``lane // 4 + 8`` and tiles ``begin`` to ``end``. The caller has loaded the first batch to
      ``words``; the vector's tile t is in ``x_words`` from ``x_first + _VECTOR_WORDS * t`` on.

    ``place`` has the lane's indices of the codes and of the scales in the first tile of the rows (`place_of`).
    """
    part = part_of(k, splits)
    batch = -(-part // -(-part // _MAX_BATCH))
    is_whole, num_words, mma = tiles_of(k) % splits == 0 and part % batch == 0, 5 * batch, make_mma("bf16")
    zeros = (np.float32(0),) * 4

    @cuda.jit(device=True)
    def load(weights, place, start, end, words):
        for i in range(batch):
            if is_whole or start + i < end:
                distance = _TILE_WORDS * (start + i)
                codes = ld_nc_na_s32x4(weights, place[0] + distance)
                for j in range(4):
                    words[5 * i + j] = codes[j]
                words[5 * i + 4] = weights[place[1] + distance]

    @cuda.jit(device=True)
    def multiply(weights, place, lane, begin, end, words, x_words, x_first):
        d = zeros
        for start in range(begin, end, batch):
            for i in range(batch):
                if is_whole or start + i < end:
                    codes = words[5 * i], words[5 * i + 1], words[5 * i + 2], words[5 * i + 3]
                    a = decode_scaled_tile(codes, words[5 * i + 4])
                    of_x = int32(x_first + _VECTOR_WORDS * (start + i) + 8 * (lane & 3))
                    b, c = ld_shared_s32x4(x_words, of_x), ld_shared_s32x4(x_words, of_x + 4)
                    d = mma(d, (a[0], a[1], a[2], a[3]), (uint32(b[0]), uint32(b[1])))
                    d = mma(d, (a[4], a[5], a[6], a[7]), (uint32(b[2]), uint32(b[3])))
                    d = mma(d, (a[8], a[9], a[10], a[11]), (uint32(c[0]), uint32(c[1])))
                    d = mma(d, (a[12], a[13], a[14], a[15]), (uint32(c[2]), uint32(c[3])))
            if start + batch < end:
                load(weights, place, start + batch, end, words)
        return d[0] * _RESULT_SCALE, d[2] * _RESULT_SCALE

    return load, multiply, num_words


@cuda.jit(device=True)
def place_of(first_tile, quarter, lane):
    """Return a lane's indices, in words, of the codes and the scales of a quarter of tile ``first_tile`` (int64)."""
    codes = first_tile * _TILE_WORDS + (128 * quarter + 4 * lane)
    return codes, first_tile * _TILE_WORDS + (_CODE_WORDS + 8 * quarter + (lane >> 2))


@cache
def make_decode_mxfp4_gate_up_kernel(shape: DecodeMxfp4Shape, activation="silu", alpha=ALPHA, limit=None):
    """Make the kernel that computes the activations [assignments, intermediate]; those of invalid ids are not written.

    A CTA computes the 32 that a tile of 64 rows has: of 16 rows the first eight are of gate, the others of up.
    """
    num_experts, hidden, intermediate, topk, bias_dtype, splits = shape
    row_tiles, k_tiles = intermediate // TILE_ACTIVATIONS, tiles_of(hidden)
    part, threads = part_of(hidden, splits), 128 * splits
    words_of_x, vectors, sums_of_all = _VECTOR_WORDS * k_tiles, 8 * k_tiles, 2 * TILE_ACTIVATIONS * splits
    activate, interleaved = make_activation(activation, alpha, limit), activation == "swigluoai"
    stage_vector, (load, multiply, num_words) = make_stage_vector(hidden), make_multiply_rows(hidden, splits)
    load_bias, has_bias = make_load_bias(bias_dtype), bool(bias_dtype)

    @cuda.jit
    def decode_mxfp4_gate_up(x, w13, bias, topk_ids, activated, token_stride, column_stride):
        x_words, sums = cuda.shared.array(words_of_x, int32, 16), cuda.shared.array(sums_of_all, float32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), uniform(int32(thread >> 5))
        assignment = int32(uint32(cuda.blockIdx.x) // uint32(row_tiles))
        row_tile = int32(cuda.blockIdx.x - assignment * row_tiles)
        token = int32(uint32(assignment) // uint32(topk))
        given = topk_ids[int64(token) * token_stride + int64(assignment - token * topk) * column_stride]
        if given >= 0 and given < num_experts:  # the same for all threads of the CTA
            # Four warps have the quarters of the tile's rows; each further four have the next part of k.
            expert, begin = int32(given), int32((warp >> 2) * part)
            end = min(int32(begin + part), int32(k_tiles))
            place = place_of((int64(expert) * row_tiles + row_tile) * k_tiles, warp & 3, lane)
            words = cuda.local.array(num_words, int32)
            load(w13, place, begin, end, words)
            for vector in range(thread, vectors, threads):
                stage_vector(x, token, x_words, 0, vector >> 3, vector & 7)
            cuda.syncthreads()
            low, high = multiply(w13, place, lane, begin, end, words, x_words, 0)
            if (lane & 3) == 0:
                sums[MMA_ROWS * warp + (lane >> 2)] = low
                sums[MMA_ROWS * warp + 8 + (lane >> 2)] = high
            cuda.syncthreads()
            if thread < TILE_ACTIVATIONS:
                gate, up = float32(0), float32(0)
                for split in range(splits):
                    row = MMA_ROWS * (QUARTERS * split + (thread >> 3)) + (thread & 7)
                    gate, up = gate + sums[row], up + sums[row + 8]
                column = int32(TILE_ACTIVATIONS * row_tile + thread)
                if has_bias:
                    first = int64(expert) * (2 * intermediate) + (2 * column if interleaved else column)
                    gate = gate + load_bias(bias, first)
                    up = up + load_bias(bias, first + (1 if interleaved else intermediate))
                activated[int64(assignment) * intermediate + column] = bf16_bits(activate(gate, up))

    return decode_mxfp4_gate_up


@cache
def make_decode_mxfp4_down_kernel(shape: DecodeMxfp4Shape, has_shared):
    """Make the kernel that computes the weighted sums of the experts' outputs [tokens, hidden].

    A CTA computes 16 columns of a token, with ``splits`` warps for each of the token's experts. The sums of an expert's
    warps are added, weighted and added in the order of the experts in float32, and rounded once.
    """
    num_experts, hidden, intermediate, topk, bias_dtype, splits = shape
    ctas_per_token, row_tiles, k_tiles = hidden // MMA_ROWS, tiles_of(hidden), tiles_of(intermediate)
    warps, part = topk * splits, part_of(intermediate, splits)
    words_of_part = _VECTOR_WORDS * part
    words_of_x, sums_of_all = warps * words_of_part, warps * MMA_ROWS
    stage_vector = make_stage_vector(intermediate)
    load, multiply, num_words = make_multiply_rows(intermediate, splits)
    load_bias, has_bias = make_load_bias(bias_dtype), bool(bias_dtype)

    @cuda.jit
    def decode_mxfp4_down(activated, w2, bias, topk_ids, topk_weights, shared, out, token_stride, column_stride):
        x_words, sums = cuda.shared.array(words_of_x, int32, 16), cuda.shared.array(sums_of_all, float32)
        lane, warp = int32(cuda.threadIdx.x & 31), uniform(int32(cuda.threadIdx.x >> 5))
        token = int32(uint32(cuda.blockIdx.x) // uint32(ctas_per_token))
        rows = int32(cuda.blockIdx.x - token * ctas_per_token)
        own = int32(uint32(warp) // uint32(splits))
        split = int32(warp - own * splits)
        given = topk_ids[int64(token) * token_stride + int64(own) * column_stride]
        has_expert = given >= 0 and given < num_experts
        expert, begin = int32(given) if has_expert else int32(0), int32(split * part)
        end = min(int32(begin + part), int32(k_tiles))
        place = place_of((int64(expert) * row_tiles + (rows >> 2)) * k_tiles, rows & 3, lane)
        words = cuda.local.array(num_words, int32)
        if has_expert:
            load(w2, place, begin, end, words)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        low, high = float32(0), float32(0)
        if has_expert:
            # Tiles are numbered from the beginning of k, but the warp stages its own part only: tile ``begin`` first.
            x_first = int32(warp * words_of_part - begin * _VECTOR_WORDS)
            for vector in range(8 * begin + lane, 8 * end, 32):
                stage_vector(activated, token * topk + own, x_words, x_first, vector >> 3, vector & 7)
            cuda.syncwarp()
            low, high = multiply(w2, place, lane, begin, end, words, x_words, x_first)
        if (lane & 3) == 0:
            sums[MMA_ROWS * warp + (lane >> 2)], sums[MMA_ROWS * warp + 8 + (lane >> 2)] = low, high
        cuda.syncthreads()
        if cuda.threadIdx.x < MMA_ROWS:
            column, total = int32(MMA_ROWS * rows + cuda.threadIdx.x), float32(0)
            for k in range(topk):
                chosen = topk_ids[int64(token) * token_stride + k * column_stride]
                if chosen >= 0 and chosen < num_experts:
                    value = float32(0)
                    for part_of_k in range(splits):
                        value = value + sums[MMA_ROWS * (k * splits + part_of_k) + cuda.threadIdx.x]
                    if has_bias:
                        value = value + load_bias(bias, int64(chosen) * hidden + column)
                    total = cuda.fma(topk_weights[int64(token) * topk + k], value, total)
            index = int64(token) * hidden + column
            if has_shared:
                total = total + low_half(uint32(shared[index]))
            out[index] = bf16_bits(total)

    return decode_mxfp4_down
