"""Kernel that sums the experts' rows for each received token while combine sends the sums: a flag follows each row.

A CTA sums one row after another, in the order in which combine's channels send them: channels are ranges of a source
rank's tokens, so the rows of all source ranks alternate. Rows beyond the received ones are not summed.
"""

from functools import cache

from numba import cuda, float32, int32, int64, uint32

from moe_numba.moe_layer.weighted_sum.kernel import VECTOR, add_row
from moe_numba.ptx.atomics import st_release_sys_s32
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4

THREADS = 256  # several CTAs fit on an SM, so that others load while one waits for its flag
_MAX_BATCH = 8  # rows that a thread loads at once


@cache
def make_sum_for_combine_kernel(hidden, topk, ranks, threads=THREADS):
    """Make the kernel for one ``hidden``, number of experts' rows per token and number of source ranks."""
    vectors, batch = hidden // VECTOR, -(-topk // -(-topk // _MAX_BATCH))
    num_words = 4 * batch

    @cuda.jit(device=True)
    def sum_vector(rows, inverse_indices, topk_weights, out, token, vector, num_rows):
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
                    a, b, c, d = load_nc_u32x4(rows, int64(row[k]) * hidden + vector * VECTOR)
                    words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = a, b, c, d
            for k in range(batch):
                if row[k] >= 0 and row[k] < num_rows:
                    add_row(words, 4 * k, weight[k], sums)
        results = cuda.local.array(4, int32)
        for i in range(4):
            results[i] = int32(cvt_rn_bf16x2_f32(sums[2 * i + 1], sums[2 * i]))
        index = int64(token) * hidden + vector * VECTOR
        st_global_s32x4(out, index, results[0], results[1], results[2], results[3])

    @cuda.jit
    def sum_for_combine(rows, inverse_indices, topk_weights, out, ready, rank_prefix, rank, num_rows, num_tokens):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        thread = int32(cuda.threadIdx.x)
        source = int32(cuda.blockIdx.x) % ranks
        # Rows from a source begin where those from the one before end; see the handle of dispatch.
        first = rank_prefix[int32((source - 1) * ranks + rank)] if source > 0 else int32(0)
        end = min(rank_prefix[int32(source * ranks + rank)], int32(num_tokens))
        token = int32(first + int32(cuda.blockIdx.x) // ranks)
        while token < end:
            for vector in range(thread, vectors, threads):
                sum_vector(rows, inverse_indices, topk_weights, out, token, int32(vector), num_rows)
            cuda.syncthreads()
            if thread == 0:
                st_release_sys_s32(ready, token, int32(1))
            token = int32(token + int32(cuda.gridDim.x) // ranks)

    return sum_for_combine


SIGNATURE = "uint16*", "int32*", "float32*", "uint16*", "int32*", "int32*", "int32", "int32", "int32"
