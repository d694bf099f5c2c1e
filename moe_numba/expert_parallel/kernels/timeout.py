"""Timeouts for cross-rank waits.

A thread that waits longer than ``timeout_ns`` aborts: it sets a flag in the rank's state, so that all waits of the rank
end and its kernels terminate, and writes to ``status`` in host memory what it waited for. The host raises an error. The
peers, which now wait for this rank, time out as well.
"""

from numba import cuda, int32, uint64

from moe_numba.expert_parallel.kernels.buffer_layout import ABORTED
from moe_numba.ptx.atomics import atom_add_relaxed_sys_s32, ld_volatile_s32, st_release_sys_s32
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.warp import FULL_MASK

STATUS_WORDS = 8
# Why a rank has aborted: the code in ``status[0]``, and the error message, which takes the other numbers in ``status``.
(DISPATCH_SPACE, DISPATCH_ROWS, COMBINE_SPACE, COMBINE_ROWS, COUNTS, BARRIER, COUNT_MISMATCH, TOO_MANY_ROWS) = range(
    1, 9
)
MESSAGES = {
    DISPATCH_SPACE: "dispatch: rank {rank}, channel {channel} waited for space in its ring to rank {peer}: head "
    "{head}, tail {tail}",
    DISPATCH_ROWS: "dispatch: rank {rank}, channel {channel} waited for rows from rank {peer}: head {head}, "
    "tail {tail}",
    COMBINE_SPACE: "combine: rank {rank}, channel {channel} waited for space in its ring to rank {peer}: head {head}, "
    "tail {tail}",
    COMBINE_ROWS: "combine: rank {rank}, channel {channel} waited for rows from rank {peer}: head {head}, tail {tail}",
    COUNTS: "notify: rank {rank} waited for the counts of rank {peer}: expected notify {head}, found {tail}",
    BARRIER: "barrier: rank {rank} waited for rank {peer}: expected barrier {head}, found {tail}",
    COUNT_MISMATCH: "notify: on rank {rank} num_tokens_per_rank has {head} tokens for rank {peer}, is_token_in_rank "
    "{tail}",
    TOO_MANY_ROWS: "notify: rank {rank} receives {tail} tokens; the output has {head} rows (num_worst_tokens, or out)",
}
COUNT_ERRORS = COUNT_MISMATCH, TOO_MANY_ROWS  # errors without a wait


@cuda.jit(device=True)
def timed_out(start, ctx):
    """Return whether a wait that began at ``start`` must end: after the timeout, or because the rank has aborted."""
    return ld_volatile_s32(ctx.state, ABORTED) != 0 or uint64(globaltimer() - start) > ctx.timeout_ns


@cuda.jit(device=True)
def abort(ctx, code, channel, peer, head, tail):
    """Abort the rank; the first thread that does so writes the reason to the host."""
    if atom_add_relaxed_sys_s32(ctx.state, ABORTED, 1) == 0:
        ctx.status[1] = ctx.rank
        ctx.status[2] = channel
        ctx.status[3] = peer
        ctx.status[4] = int32(head)
        ctx.status[5] = int32(tail)
        st_release_sys_s32(ctx.status, 0, code)


@cuda.jit(device=True)
def start_of_wait(start):
    """Return the time at which a wait began: now if ``start`` is 0."""
    return globaltimer() if start == uint64(0) else start


@cuda.jit(device=True)
def warp_abort_if_timed_out(start, waiting, ctx, code, channel, peer, head, tail):
    """Return whether a warp must end its wait; the first lane with ``waiting`` to see the timeout aborts the rank."""
    expired = timed_out(start, ctx)
    if expired and waiting:
        abort(ctx, code, channel, peer, head, tail)
    return cuda.any_sync(FULL_MASK, expired)
