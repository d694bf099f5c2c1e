"""Kernels of ``fused_experts`` for a few tokens, whose experts have a row each, in FP8 with block scales.

As in ``bf16.py`` warps multiply rows of the weights with a vector, but with ``mma.sync``, because CUDA cores
would take about as long to convert and multiply FP8 as the weights take to load. A warp multiplies 16 rows, 64 bytes of
each at a time: two ``m16n8k32``, whose eight columns are all the same vector. Which of the 64 columns is which k of an
instruction does not matter, if it is the same for weights and vector. So a lane loads 16 adjacent bytes of two rows:
its registers of A for both instructions.

Each kernel quantises its vector per 128 elements in shared memory, so that no launch is needed for that. In the first
kernel all warps of a CTA multiply the same token: they quantise it together, and one ``__syncthreads`` follows. In the
second each warp has its own expert's activations, and loads its first weights before ``griddepcontrol.wait``; the warps
meet once, to add their sums. Weights go to registers, a batch of chunks at a time, and never to shared memory.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32, int64, uint32

from moe_numba.moe_layer.gemv.bf16 import bf16_bits
from moe_numba.moe_layer.silu_and_mul.kernel import high_half, low_half, silu_and_mul_f32
from moe_numba.ptx.arithmetic import float_as_int, int_as_float, rcp_rn, uint_as_float
from moe_numba.ptx.conversions import FP8_MAX, cvt_rn_satfinite_e4m3x2_f32
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_global_s32x4,
    ld_nc_na_s32x4,
    ld_shared_s32x4,
    load_nc_u32x4,
    st_shared_s32x4,
)
from moe_numba.ptx.mma import make_mma
from moe_numba.ptx.warp import FULL_MASK, uniform
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.quantise.fp8_cast_kernels import AMAX_MIN_BITS

CHUNK = 64  # bytes of a row that a warp multiplies at a time
MMA_ROWS = 16  # rows of weight that a warp multiplies: those of mma.sync
FP8_WARP_ACTIVATIONS = MMA_ROWS // 2  # a warp of the first kernel multiplies 8 rows of gate and 8 of up
FP8_MAX_TOPK = 16  # the second kernel has a warp for each expert of a token
FP8_MAX_ACTIVATION_BYTES = 40960  # quantised activations of a token, in the second kernel's shared memory
_LANES = FP8_SCALE_BLOCK // 16  # lanes that quantise a group together, 16 elements each


class DecodeFp8Shape(NamedTuple):
    """What the kernels are compiled for."""

    num_experts: int
    hidden: int
    intermediate: int
    topk: int
    batch: int = 4  # chunks that a lane loads at once, of two rows
    warps: int = 8  # warps of a CTA of the first kernel


@cache
def make_quantise(lanes):
    """Make ``quantise(values)``: 16 float32 of each of ``lanes`` lanes in FP8, as four words, and their common scale.

    As `per_token_cast_to_fp8`.
    """

    @cuda.jit(device=True)
    def quantise(values):
        largest = int32(AMAX_MIN_BITS)
        for i in range(16):
            largest = max(largest, int32(float_as_int(values[i]) & 0x7FFFFFFF))  # orders NaN above all numbers
        for distance in (1, 2, 4):
            if distance < lanes:
                largest = max(largest, cuda.shfl_xor_sync(FULL_MASK, largest, distance))
        amax = int_as_float(largest)
        factor = rcp_rn(amax) * float32(FP8_MAX)
        words = cuda.local.array(4, int32)
        for i in range(4):
            low = uint32(cvt_rn_satfinite_e4m3x2_f32(values[4 * i + 1] * factor, values[4 * i] * factor))
            high = uint32(cvt_rn_satfinite_e4m3x2_f32(values[4 * i + 3] * factor, values[4 * i + 2] * factor))
            words[i] = int32(low | uint32(high << uint32(16)))
        return words[0], words[1], words[2], words[3], amax * float32(1 / FP8_MAX)

    return quantise


@cache
def make_multiply_chunk():
    """Make ``multiply(a, b, x)``, which multiplies a chunk of 16 rows by the vector; return a lane's two results.

    Lane l has 16 bytes of two rows: ``a`` is of row ``l // 4`` of the MMA, ``b`` of row ``l // 4 + 8``, and ``x`` has
    the same 16 of the 64 bytes of the vector. The MMA sums over the four lanes of a row; all four get the results.
    """
    first, add = make_mma("e4m3", accumulate=False), make_mma("e4m3")

    @cuda.jit(device=True)
    def multiply(a, b, x):
        d = first((uint32(a[0]), uint32(b[0]), uint32(a[1]), uint32(b[1])), (uint32(x[0]), uint32(x[1])))
        d = add(d, (uint32(a[2]), uint32(b[2]), uint32(a[3]), uint32(b[3])), (uint32(x[2]), uint32(x[3])))
        return d[0], d[2]

    return multiply


@cache
def make_decode_fp8_gate_up_kernel(shape: DecodeFp8Shape):
    """Make the kernel that computes the activations [assignments, intermediate] in float32.

    A warp computes eight of them: its 16 rows are eight of gate and eight of up. Those of invalid ids are not written.
    """
    num_experts, hidden, intermediate, topk, batch, warps = shape
    chunks, ctas_per_assignment = hidden // CHUNK, intermediate // (8 * warps)
    scales_per_row, groups = -(-hidden // FP8_SCALE_BLOCK), -(-hidden // FP8_SCALE_BLOCK)
    row_blocks, threads = 2 * intermediate // FP8_SCALE_BLOCK, 32 * warps
    vectors, words_of_x, num_words, num_scales = hidden // 16, hidden // 4, 8 * batch, 2 * batch
    rounds = -(-groups * _LANES // threads)
    is_whole, multiply, quantise = chunks % batch == 0, make_multiply_chunk(), make_quantise(_LANES)

    @cuda.jit(device=True)
    def quantise_token(x, token, x_words, x_scales):
        """Quantise a token into shared memory; all threads of the CTA."""
        values = cuda.local.array(16, float32)
        for i in range(rounds):
            vector = int32(cuda.threadIdx.x + i * threads)
            for j in range(16):
                values[j] = float32(0)
            if vector < vectors:
                for half in range(2):
                    pairs = load_nc_u32x4(x, int64(token) * hidden + (16 * vector + 8 * half))
                    for j in range(4):
                        values[8 * half + 2 * j] = low_half(uint32(pairs[j]))
                        values[8 * half + 2 * j + 1] = high_half(uint32(pairs[j]))
            # All lanes take part in the shuffles, those without a vector with zeros.
            a, b, c, d, scale = quantise(values)
            if vector < vectors:
                st_shared_s32x4(x_words, 4 * vector, a, b, c, d)
                if vector % _LANES == 0:
                    x_scales[vector // _LANES] = scale

    @cuda.jit
    def decode_fp8_gate_up(x, w13, w13_scale, topk_ids, activated, token_stride, column_stride):
        x_words, x_scales = cuda.shared.array(words_of_x, int32, 16), cuda.shared.array(groups, float32)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        lane, warp = int32(cuda.threadIdx.x & 31), uniform(int32(cuda.threadIdx.x >> 5))
        assignment = int32(uint32(cuda.blockIdx.x) // uint32(ctas_per_assignment))
        token = int32(uint32(assignment) // uint32(topk))
        given = topk_ids[int64(token) * token_stride + int64(assignment - token * topk) * column_stride]
        if given >= 0 and given < num_experts:  # the same for all threads of the CTA
            expert = int32(given)
            cta = int32(cuda.blockIdx.x - assignment * ctas_per_assignment)
            first = int32(cta * (8 * warps) + 8 * warp)
            column = int32(first + (lane >> 2))
            gate = (int64(expert) * (2 * intermediate) + column) * hidden + 16 * (lane & 3)
            up = gate + int64(intermediate) * hidden
            # A block scale is for 128 rows, so the warp's rows share it, and for 128 elements of k, two chunks.
            blocks = int64(expert) * row_blocks + (first >> 7)
            gate_scales = blocks * scales_per_row
            up_scales = (blocks + (intermediate >> 7)) * scales_per_row
            sum_of_gate, sum_of_up = float32(0), float32(0)
            words, scales = cuda.local.array(num_words, int32), cuda.local.array(num_scales, float32)
            quantise_token(x, token, x_words, x_scales)
            cuda.syncthreads()
            for start in range(0, chunks, batch):
                # Load a batch: of each chunk four words of gate, four of up, and their two scales.
                for i in range(batch):
                    if is_whole or start + i < chunks:
                        a = ld_nc_na_s32x4(w13, gate + CHUNK * (start + i))
                        b = ld_nc_na_s32x4(w13, up + CHUNK * (start + i))
                        for j in range(4):
                            words[8 * i + j], words[8 * i + 4 + j] = a[j], b[j]
                        scales[2 * i] = w13_scale[gate_scales + ((start + i) >> 1)]
                        scales[2 * i + 1] = w13_scale[up_scales + ((start + i) >> 1)]
                for i in range(batch):
                    if is_whole or start + i < chunks:
                        of_x = ld_shared_s32x4(x_words, 16 * (start + i) + 4 * (lane & 3))
                        scale = x_scales[(start + i) >> 1]
                        w = words[8 * i], words[8 * i + 1], words[8 * i + 2], words[8 * i + 3]
                        v = words[8 * i + 4], words[8 * i + 5], words[8 * i + 6], words[8 * i + 7]
                        products = multiply(w, v, of_x)
                        sum_of_gate = cuda.fma(scale * scales[2 * i], products[0], sum_of_gate)
                        sum_of_up = cuda.fma(scale * scales[2 * i + 1], products[1], sum_of_up)
            if (lane & 3) == 0:
                # Rounded to bfloat16 as between the grouped GEMM and its activation.
                rounded_gate = uint_as_float(uint32(uint32(bf16_bits(sum_of_gate)) << uint32(16)))
                rounded_up = uint_as_float(uint32(uint32(bf16_bits(sum_of_up)) << uint32(16)))
                activated[int64(assignment) * intermediate + column] = silu_and_mul_f32(rounded_gate, rounded_up)

    return decode_fp8_gate_up


@cache
def make_decode_fp8_down_kernel(shape: DecodeFp8Shape, has_shared):
    """Make the kernel that computes the weighted sums of the experts' outputs [tokens, hidden].

    A CTA computes 16 columns of a token; each of its warps multiplies the rows of one of the token's experts. The sums
    of the warps are weighted and added in the order of the experts in float32, and rounded once.
    """
    num_experts, hidden, intermediate, topk, batch, _ = shape
    chunks, ctas_per_token, groups = intermediate // CHUNK, hidden // MMA_ROWS, intermediate // FP8_SCALE_BLOCK
    scales_per_row, row_blocks, vectors = (
        intermediate // FP8_SCALE_BLOCK,
        -(-hidden // FP8_SCALE_BLOCK),
        intermediate // 16,
    )
    words_of_expert, num_words, rounds = intermediate // 4, 8 * batch, -(-intermediate // 512)
    words_of_all, scales_of_all, sums_of_all = topk * words_of_expert, topk * groups, topk * MMA_ROWS
    is_whole, multiply, quantise = chunks % batch == 0, make_multiply_chunk(), make_quantise(_LANES)

    @cuda.jit(device=True)
    def load_weights(w2, w2_scale, weights, weight_scales, start, words, scales):
        """Load a batch: of each chunk four words of a row, four of the row eight below, and their common scale."""
        for i in range(batch):
            if is_whole or start + i < chunks:
                a = ld_nc_na_s32x4(w2, weights + CHUNK * (start + i))
                b = ld_nc_na_s32x4(w2, weights + 8 * intermediate + CHUNK * (start + i))
                for j in range(4):
                    words[8 * i + j], words[8 * i + 4 + j] = a[j], b[j]
                scales[i] = w2_scale[weight_scales + ((start + i) >> 1)]

    @cuda.jit(device=True)
    def quantise_activations(activated, row, lane, words, first_word, scales, first_scale):
        """Quantise the activations of one expert into shared memory; one warp."""
        values = cuda.local.array(16, float32)
        for i in range(rounds):
            vector = int32(lane + 32 * i)
            for j in range(16):
                values[j] = float32(0)
            if vector < vectors:
                for part in range(4):
                    four = ld_global_s32x4(activated, int64(row) * intermediate + (16 * vector + 4 * part))
                    for j in range(4):
                        values[4 * part + j] = int_as_float(four[j])
            a, b, c, d, scale = quantise(values)
            if vector < vectors:
                st_shared_s32x4(words, first_word + 4 * vector, a, b, c, d)
                if vector % _LANES == 0:
                    scales[first_scale + vector // _LANES] = scale

    @cuda.jit
    def decode_fp8_down(activated, w2, w2_scale, topk_ids, topk_weights, shared, out, token_stride, column_stride):
        x_words, x_scales = cuda.shared.array(words_of_all, int32, 16), cuda.shared.array(scales_of_all, float32)
        sums = cuda.shared.array(sums_of_all, float32)
        lane, warp = int32(cuda.threadIdx.x & 31), uniform(int32(cuda.threadIdx.x >> 5))
        token = int32(uint32(cuda.blockIdx.x) // uint32(ctas_per_token))
        column = int32(cuda.blockIdx.x - token * ctas_per_token) * MMA_ROWS
        given = topk_ids[int64(token) * token_stride + int64(warp) * column_stride]
        has_expert = given >= 0 and given < num_experts
        expert = int32(given) if has_expert else int32(0)
        weights = (int64(expert) * hidden + column + (lane >> 2)) * intermediate + 16 * (lane & 3)
        weight_scales = (int64(expert) * row_blocks + (column >> 7)) * scales_per_row
        words, scales = cuda.local.array(num_words, int32), cuda.local.array(batch, float32)
        if has_expert:
            load_weights(w2, w2_scale, weights, weight_scales, 0, words, scales)
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        low, high = float32(0), float32(0)
        if has_expert:
            row, first_word, first_scale = token * topk + warp, warp * words_of_expert, warp * groups
            quantise_activations(activated, row, lane, x_words, first_word, x_scales, first_scale)
            cuda.syncwarp()
            for start in range(0, chunks, batch):
                for i in range(batch):
                    if is_whole or start + i < chunks:
                        of_x = ld_shared_s32x4(x_words, first_word + 16 * (start + i) + 4 * (lane & 3))
                        scale = x_scales[first_scale + ((start + i) >> 1)] * scales[i]
                        w = words[8 * i], words[8 * i + 1], words[8 * i + 2], words[8 * i + 3]
                        v = words[8 * i + 4], words[8 * i + 5], words[8 * i + 6], words[8 * i + 7]
                        products = multiply(w, v, of_x)
                        low, high = cuda.fma(scale, products[0], low), cuda.fma(scale, products[1], high)
                if start + batch < chunks:
                    load_weights(w2, w2_scale, weights, weight_scales, start + batch, words, scales)
        # ---- Add the sums of the warps, one for each expert ----
        if (lane & 3) == 0:
            weight = topk_weights[int64(token) * topk + warp]
            sums[warp * MMA_ROWS + (lane >> 2)] = weight * low if has_expert else float32(0)
            sums[warp * MMA_ROWS + 8 + (lane >> 2)] = weight * high if has_expert else float32(0)
        cuda.syncthreads()
        if cuda.threadIdx.x < MMA_ROWS:
            total, index = float32(0), int64(token) * hidden + (column + cuda.threadIdx.x)
            for k in range(topk):
                total = total + sums[k * MMA_ROWS + cuda.threadIdx.x]
            if has_shared:
                total = total + low_half(uint32(shared[index]))
            out[index] = bf16_bits(total)

    return decode_fp8_down
