"""Poisoning: after an abort, outputs hold values that no later kernel can mistake for results.

All bits of the outputs are set. That is a NaN in bfloat16, float8_e4m3fn and float32, and -1, no expert, in integers.
A captured graph that is replayed after an abort therefore returns NaNs at once; the host does not see its kernels.

Each CTA with a warp that ended early overwrites all outputs. Any row that is missing was the task of such a warp, so
none keeps stale memory. Correct rows that other CTAs write meanwhile may remain.
"""

from numba import cuda, int32, int64

from moe_numba.expert_parallel.common.timeout import abort


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
