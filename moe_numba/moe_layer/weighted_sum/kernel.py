"""Kernel of ``weighted_sum``: each thread computes eight adjacent columns of a token, with 16-byte loads and stores."""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_global_s32x4,
    load_nc_u32x4,
    st_global_s32x4,
)

THREADS = 128
VECTOR = 8  # columns of a thread
_MAX_BATCH = 10  # rows that a thread loads at once: of DeepSeek-V3 all, with the shared expert


@cuda.jit(device=True)
def add_row(words, first, weight, sums):
    """Add eight weighted bfloat16, in ``words`` from ``first`` on, to ``sums``."""
    for i in range(4):
        word = uint32(words[first + i])
        low, high = uint_as_float(uint32(word << uint32(16))), uint_as_float(uint32(word & uint32(0xFFFF0000)))
        sums[2 * i] = cuda.fma(weight, low, sums[2 * i])
        sums[2 * i + 1] = cuda.fma(weight, high, sums[2 * i + 1])


@cache
def make_weighted_sum_kernel(hidden, topk, has_shared):
    """Make the kernel for one ``hidden`` and number of rows per token; ``has_shared``: add a row of ``shared``."""
    if hidden < 1 or hidden % VECTOR:
        raise ValueError(f"hidden is {hidden}; it must be a multiple of {VECTOR}")
    if topk < 1:
        raise ValueError(f"topk is {topk}; it must be 1 or more")
    vectors_per_token, batch = hidden // VECTOR, -(-topk // -(-topk // _MAX_BATCH))
    num_words = 4 * batch

    @cuda.jit
    def weighted_sum(rows, inverse_indices, topk_weights, shared, out, num_rows, num_vectors):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        vector = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        if vector < uint32(num_vectors):
            token = int32(vector // uint32(vectors_per_token))
            column = int32(vector - uint32(token) * uint32(vectors_per_token)) * VECTOR
            sums, words = cuda.local.array(VECTOR, float32), cuda.local.array(num_words, uint32)
            row, weight = cuda.local.array(batch, int32), cuda.local.array(batch, float32)
            for i in range(VECTOR):
                sums[i] = float32(0)
            for first in range(0, topk, batch):
                for k in range(batch):
                    row[k] = int32(-1)
                    if first + k < topk:
                        row[k] = inverse_indices[int64(token) * topk + (first + k)]
                        weight[k] = topk_weights[int64(token) * topk + (first + k)]
                for k in range(batch):
                    if row[k] >= 0 and row[k] < num_rows:
                        a, b, c, d = load_nc_u32x4(rows, int64(row[k]) * hidden + column)
                        words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = a, b, c, d
                for k in range(batch):
                    if row[k] >= 0 and row[k] < num_rows:
                        add_row(words, 4 * k, weight[k], sums)
            if has_shared:
                # Not through the read-only cache: ``out`` may be ``shared``.
                e, f, g, h = ld_global_s32x4(shared, int64(vector) * VECTOR)
                words[0], words[1], words[2], words[3] = uint32(e), uint32(f), uint32(g), uint32(h)
                add_row(words, 0, float32(1), sums)
            results = cuda.local.array(4, int32)
            for i in range(4):
                results[i] = int32(cvt_rn_bf16x2_f32(sums[2 * i + 1], sums[2 * i]))
            st_global_s32x4(out, int64(vector) * VECTOR, results[0], results[1], results[2], results[3])

    return weighted_sum
