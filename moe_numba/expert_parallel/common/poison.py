"""Poisoning: after an abort, outputs hold values that no later kernel can mistake for results.

All bits of the outputs are set. That is a NaN in bfloat16, float8_e4m3fn and float32, and -1, no expert, in integers.
A captured graph that is replayed after an abort therefore returns NaNs at once; the host does not see its kernels.

Each CTA with a warp that ended early overwrites all outputs. Any row that is missing was the task of such a warp, so
none keeps stale memory. Correct rows that other CTAs write meanwhile may remain.
"""

from functools import cache

from numba import cuda, float32, int32, int64

from moe_numba.expert_parallel.common.timeout import abort

_NAN = float("nan")


@cuda.jit(device=True)
def fill(pointer, count, value):
    """Store ``value`` to ``count`` elements, with all threads of the CTA."""
    i = int64(cuda.threadIdx.x)
    while i < count:
        pointer[i] = value
        i += int64(cuda.blockDim.x)


@cuda.jit(device=True)
def adopt_abort(ctx):
    """Write the reason for which a peer has aborted to the host, unless this rank has aborted itself."""
    if cuda.threadIdx.x == 0:
        abort(ctx, int32(0), int32(0), int32(0), int32(0), int32(0))


@cache
def make_poison_rows(slot):
    """Make ``poison_rows``, which poisons the output of a dispatch of packed tokens like ``slot``."""
    row_words, scale_words, topk = slot.row, slot.scales, slot.topk

    @cuda.jit(device=True)
    def poison_rows(ctx, recv):
        adopt_abort(ctx)
        rows = int64(recv.num_rows)
        fill(recv.x, rows * row_words, int32(-1))
        fill(recv.scales, rows * scale_words, int32(-1))
        fill(recv.topk_idx, rows * topk, int32(-1))
        fill(recv.topk_weights, rows * topk, int32(-1))
        fill(recv.src_idx, rows, int32(-1))

    return poison_rows


@cache
def make_poison_sums(slot):
    """Make ``poison_sums``, which poisons the output of a combine."""
    row_words, topk = slot.row, slot.scales

    @cuda.jit(device=True)
    def poison_sums(ctx, tensors):
        adopt_abort(ctx)
        tokens = int64(tensors.num_tokens)
        fill(tensors.out, tokens * row_words, int32(-1))
        fill(tensors.out_weights, tokens * topk, float32(_NAN))

    return poison_sums
