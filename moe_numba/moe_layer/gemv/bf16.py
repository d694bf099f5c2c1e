"""Kernels of ``fused_experts`` for a few tokens, whose experts have a row each: matrix-vector products in bfloat16.

With one row per expert a grouped GEMM has too few tiles to fill a GPU, and grouping the rows takes longer than the
multiplications. Here each warp computes a few dot products: its lanes load adjacent 16-byte vectors of the weights'
rows, several of them at once, and multiply in float32. The first kernel computes an assignment's activations, the
second the weighted sum of a token's experts, so no other launch is needed.

Warps do not cooperate: there is no shared memory and no barrier. An item is the work of a warp, ``columns`` results. A
lane loads a batch of vectors of all of the warp's rows to registers, and then multiplies them; sums over the lanes are
taken by shuffles, once at the end.

The second kernel loads its first weights before ``griddepcontrol.wait``, while the first one still runs: it needs only
``topk_ids``, which the first kernel has waited for before it let the second one start.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint16, uint32

from moe_numba.grouped_gemm.common.constants import ALPHA
from moe_numba.moe_layer.silu_and_mul.kernel import high_half, low_half, make_activation
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_nc_na_s32x4, load_nc_u32x4
from moe_numba.ptx.warp import FULL_MASK, uniform

VECTOR = 8  # elements in 16 bytes
MAX_BLOCK = 64  # columns of an assignment that neighbouring warps of the first kernel compute, at most
BF16_MAX_TOPK = 32  # a lane of a warp holds the expert of an assignment


class DecodeShape(NamedTuple):
    """What the kernels are compiled for."""

    num_experts: int
    hidden: int
    intermediate: int
    topk: int
    bias: str  # dtype of the bias, "bf16" or "f32", or none
    columns: int  # columns of the result that a warp computes
    max_loads: int = 4  # vectors of weights that a lane loads at once
    warps: int = 4  # warps of a CTA


def _batch(steps, rows, max_loads):
    """Return how many of the ``steps`` vectors of each of ``rows`` rows a lane loads at once, evenly distributed."""
    most = max(1, max_loads // rows)
    return -(-steps // -(-steps // most))


@cache
def make_load_bias(dtype):
    """Make ``load_bias(bias, index)``, which returns a float32."""

    @cuda.jit(device=True)
    def load_bf16(bias, index):
        return low_half(uint32(bias[index]))

    @cuda.jit(device=True)
    def load_f32(bias, index):
        return float32(bias[index])

    return load_bf16 if dtype == "bf16" else load_f32


@cuda.jit(device=True)
def sum_of_lanes(value):
    """Return the sum of a float32 over the warp to all lanes, always added in the same order."""
    for distance in (16, 8, 4, 2, 1):
        value = value + cuda.shfl_xor_sync(FULL_MASK, value, distance)
    return value


@cuda.jit(device=True)
def bf16_bits(value):
    """Return a float32 rounded to bfloat16."""
    return uint16(uint32(cvt_rn_bf16x2_f32(value, value)) & uint32(0xFFFF))


@cache
def make_decode_gate_up_kernel(shape: DecodeShape, activation="silu", alpha=ALPHA, limit=None):
    """Make the kernel that computes the activations [assignments, intermediate]; those of invalid ids are not written.

    A warp computes ``shape.columns`` of them: the dot products of a token with as many rows of gate and of up.
    """
    num_experts, hidden, intermediate, topk, bias_dtype, columns, max_loads, warps = shape
    activate, interleaved = make_activation(activation, alpha, limit), activation == "swigluoai"
    rows, num_vectors, warps_per_assignment = 2 * columns, hidden // VECTOR, intermediate // columns
    block = next(size for size in range(MAX_BLOCK, 0, -1) if warps_per_assignment % size == 0)
    steps = -(-num_vectors // 32)
    batch = _batch(steps, rows, max_loads)
    num_words, words_of_x = 4 * rows * batch, 4 * batch
    is_whole = num_vectors % (32 * batch) == 0
    # Rows of w13 from the first gate of a warp to its row i: gates are even, ups odd.
    distance = tuple(i if interleaved else (i >> 1) + (i & 1) * intermediate for i in range(rows))
    load_bias, has_bias, row_step = make_load_bias(bias_dtype), bool(bias_dtype), 2 if interleaved else 1

    @cuda.jit
    def decode_gate_up(x, w13, bias, topk_ids, activated, num_items, token_stride, column_stride):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        lane = int32(cuda.threadIdx.x & 31)
        item = uniform(int32(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5)))
        # The first block of columns of all assignments comes first, then the second of all: tokens with the same
        # expert read a block of its rows at about the same time, and all but the first find it in L2.
        assignments = uint32(num_items) // uint32(warps_per_assignment)
        number = uint32(item) // uint32(block)  # of a block
        block_of_columns = uint32(number // assignments)
        assignment = int32(number - block_of_columns * assignments)
        column = int32(block_of_columns * uint32(block) + uint32(item) % uint32(block)) * columns
        token = int32(uint32(assignment) // uint32(topk))
        expert = int32(-1)
        if item < num_items:
            given = topk_ids[int64(token) * token_stride + int64(assignment - token * topk) * column_stride]
            if given >= 0 and given < num_experts:
                expert = int32(given)
        if expert >= 0:
            first_row = int64(expert) * (2 * intermediate) + column * row_step
            weights, tokens = first_row * hidden + lane * VECTOR, int64(token) * hidden + lane * VECTOR
            sums = cuda.local.array(rows, float32)
            words, xs = cuda.local.array(num_words, uint32), cuda.local.array(words_of_x, uint32)
            for i in range(rows):
                sums[i] = float32(0)
            for step in range(0, steps, batch):
                # Issue all loads of a batch before the first multiplication, which waits for them.
                for b in range(batch):
                    offset = (step + b) * 32 * VECTOR
                    is_inside = is_whole or int32(lane + (step + b) * 32) < num_vectors
                    for i in range(rows):
                        for j in range(4):
                            words[4 * (b * rows + i) + j] = uint32(0)
                        if is_inside:
                            vector = ld_nc_na_s32x4(w13, weights + distance[i] * hidden + offset)
                            for j in range(4):
                                words[4 * (b * rows + i) + j] = uint32(vector[j])
                    for j in range(4):
                        xs[4 * b + j] = uint32(0)
                    if is_inside:
                        vector_of_x = load_nc_u32x4(x, tokens + offset)
                        for j in range(4):
                            xs[4 * b + j] = vector_of_x[j]
                for b in range(batch):
                    for j in range(4):
                        low, high = low_half(xs[4 * b + j]), high_half(xs[4 * b + j])
                        for i in range(rows):
                            word = words[4 * (b * rows + i) + j]
                            sums[i] = cuda.fma(low_half(word), low, sums[i])
                            sums[i] = cuda.fma(high_half(word), high, sums[i])
            for i in range(rows):
                sums[i] = sum_of_lanes(sums[i])
                if has_bias:
                    sums[i] = sums[i] + load_bias(bias, first_row + distance[i])
            if lane == 0:
                for c in range(columns):
                    index = int64(assignment) * intermediate + (column + c)
                    activated[index] = bf16_bits(activate(sums[2 * c], sums[2 * c + 1]))

    return decode_gate_up


@cache
def make_decode_down_kernel(shape: DecodeShape, has_shared):
    """Make the kernel that computes the weighted sums of the experts' outputs [tokens, hidden].

    A warp computes ``shape.columns`` of a token: the dot products of the activations of the token's experts, one after
    another, with as many rows of w2. Products are weighted and added in float32 and rounded once.
    """
    num_experts, hidden, intermediate, topk, bias_dtype, columns, max_loads, warps = shape
    num_vectors, warps_per_token = intermediate // VECTOR, hidden // columns
    steps_of_expert = -(-num_vectors // 32)
    steps, is_whole = topk * steps_of_expert, num_vectors % 32 == 0
    batch = _batch(steps, columns, max_loads)
    num_words, words_of_x = 4 * columns * batch, 4 * batch
    load_bias, has_bias = make_load_bias(bias_dtype), bool(bias_dtype)

    @cuda.jit(device=True)
    def load_weights(w2, own_expert, column, lane, first, words):
        """Load the vectors of steps ``first`` to ``first + batch``, zeros where there is none."""
        for b in range(batch):
            for j in range(4 * columns):
                words[4 * columns * b + j] = uint32(0)
            if first + b < steps:
                k = int32(uint32(first + b) // uint32(steps_of_expert))
                expert = cuda.shfl_sync(FULL_MASK, own_expert, k)
                vector_index = int32(lane + 32 * (first + b - k * steps_of_expert))
                if expert >= 0 and (is_whole or vector_index < num_vectors):
                    row = int64(expert) * hidden + column
                    for c in range(columns):
                        vector = ld_nc_na_s32x4(w2, (row + c) * intermediate + vector_index * VECTOR)
                        for j in range(4):
                            words[4 * (columns * b + c) + j] = uint32(vector[j])

    @cuda.jit(device=True)
    def multiply(activated, own_expert, own_weight, row, lane, first, words, sums):
        """Multiply the vectors in ``words`` by activations and routing weights, and add the products to ``sums``.

        The activations of the token's first assignment are in row ``row``.
        """
        xs = cuda.local.array(words_of_x, uint32)
        for b in range(batch):
            for j in range(4):
                xs[4 * b + j] = uint32(0)
            if first + b < steps:
                k = int32(uint32(first + b) // uint32(steps_of_expert))
                vector_index = int32(lane + 32 * (first + b - k * steps_of_expert))
                # Activations of an invalid expert are not written, so they may be NaN.
                has_expert = cuda.shfl_sync(FULL_MASK, own_expert, k) >= 0
                if has_expert and (is_whole or vector_index < num_vectors):
                    vector = load_nc_u32x4(activated, int64(row + k) * intermediate + vector_index * VECTOR)
                    for j in range(4):
                        xs[4 * b + j] = vector[j]
        for b in range(batch):
            if first + b < steps:
                weight = cuda.shfl_sync(FULL_MASK, own_weight, int32(uint32(first + b) // uint32(steps_of_expert)))
                for c in range(columns):
                    product = float32(0)
                    for j in range(4):
                        word, of_x = words[4 * (columns * b + c) + j], xs[4 * b + j]
                        product = cuda.fma(low_half(word), low_half(of_x), product)
                        product = cuda.fma(high_half(word), high_half(of_x), product)
                    sums[c] = cuda.fma(weight, product, sums[c])

    @cuda.jit
    def decode_down(activated, w2, bias, topk_ids, topk_weights, shared, out, num_items, token_stride, column_stride):
        lane = int32(cuda.threadIdx.x & 31)
        item = uniform(int32(cuda.blockIdx.x * warps + (cuda.threadIdx.x >> 5)))
        is_inside = item < num_items
        item = item if is_inside else int32(0)
        token = int32(uint32(item) // uint32(warps_per_token))
        column = int32(item - token * warps_per_token) * columns
        # Lane k keeps expert and routing weight of the token's assignment k; the other lanes get them by shuffles.
        own_expert, own_weight = int32(-1), float32(0)
        if is_inside and lane < topk:
            given = topk_ids[int64(token) * token_stride + int64(lane) * column_stride]
            if given >= 0 and given < num_experts:
                own_expert = int32(given)
        sums, words = cuda.local.array(columns, float32), cuda.local.array(num_words, uint32)
        load_weights(w2, own_expert, column, lane, 0, words)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        if own_expert >= 0:
            own_weight = topk_weights[int64(token) * topk + lane]
        for c in range(columns):
            sums[c] = float32(0)
            if has_bias and own_expert >= 0:  # lane k begins with the bias of expert k: the warp's sum has each once
                sums[c] = own_weight * load_bias(bias, int64(own_expert) * hidden + (column + c))
        for first in range(0, steps, batch):
            multiply(activated, own_expert, own_weight, token * topk, lane, first, words, sums)
            if first + batch < steps:
                load_weights(w2, own_expert, column, lane, first + batch, words)
        for c in range(columns):
            total = sum_of_lanes(sums[c])
            index = int64(token) * hidden + (column + c)
            if is_inside and lane == 0:
                if has_shared:
                    total = total + low_half(uint32(shared[index]))
                out[index] = bf16_bits(total)

    return decode_down
