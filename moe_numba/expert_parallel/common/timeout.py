"""Timeouts of cross-rank waits, and aborts.

A thread that waits longer than ``timeout_ns`` aborts. The rank's first thread to do so writes what it waited for to
``status``, in host memory, and to the abort records of all ranks, and then raises all ranks' abort flags. A raised flag
ends every wait of a rank, and the kernels that the rank starts from then on: they only poison their outputs
(`poison.py`). The host raises an error that gives the reason; so do the hosts of the peers.
"""

from numba import cuda, int32, uint64

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import ABORT_FLAG, ABORT_RECORDS, ABORTED, NUM_RANKS, RECORD_WORDS
from moe_numba.ptx.atomics import atom_add_relaxed_sys_s32, ld_acquire_sys_s32, ld_volatile_s32, st_relaxed_sys_s32
from moe_numba.ptx.fence import fence_acq_rel_sys
from moe_numba.ptx.memory import pointer_from_address
from moe_numba.ptx.special_registers import globaltimer
from moe_numba.ptx.warp import FULL_MASK

STATUS_WORDS = RECORD_WORDS
_NUM_VALUES = 6  # of a record: the error code, and the numbers that the message takes
# Why a rank has aborted: the code in ``status[0]``, and the error message, which takes the other numbers in ``status``.
(DISPATCH_SPACE, DISPATCH_ROWS, COMBINE_SPACE, COMBINE_ROWS, COUNTS, BARRIER) = range(1, 7)
(COUNT_MISMATCH, TOO_MANY_ROWS, CALL_MISMATCH, WRONG_COUNT) = range(7, 11)
(EXPERT_ROWS, FIRST_GEMM, ROWS_BACK) = range(11, 14)
MESSAGES = {
    DISPATCH_SPACE: "dispatch: rank {rank}, channel {channel} waited for space in its ring to rank {peer}: head "
    "{head}, tail {tail}",
    DISPATCH_ROWS: "dispatch: rank {rank}, channel {channel} waited for rows from rank {peer}: head {head}, "
    "tail {tail}",
    COMBINE_SPACE: "combine: rank {rank}, channel {channel} waited for space in its ring to rank {peer}: head {head}, "
    "tail {tail}",
    COMBINE_ROWS: "combine: rank {rank}, channel {channel} waited for rows from rank {peer}: head {head}, tail {tail}",
    COUNTS: "notify: rank {rank} waited for the counts of rank {peer}: expected notify {head}, found {tail}; rank "
    "{peer} was late, or made another call, such as a dispatch with a handle",
    BARRIER: "barrier: rank {rank} waited for rank {peer}: expected barrier {head}, found {tail}",
    COUNT_MISMATCH: "notify: on rank {rank} num_tokens_per_rank has {head} tokens for rank {peer}, is_token_in_rank "
    "{tail}",
    TOO_MANY_ROWS: "notify: rank {rank} receives {tail} tokens; the output has {head} rows (num_worst_tokens, or out)",
    CALL_MISMATCH: "dispatch: {argument} is {head} on rank {rank} and {tail} on rank {peer}; it must be the same on "
    "all ranks",
    WRONG_COUNT: "notify: on rank {rank} num_tokens_per_expert has {head} tokens for an expert of rank {peer}; it must "
    "be 0 to {tail}",
    EXPERT_ROWS: "experts: rank {rank} waited for the rows of its expert {channel}: expected {head} in all calls, "
    "found {tail}",
    FIRST_GEMM: "experts: rank {rank} waited for the first GEMM of its expert {channel}: expected {head} counts, "
    "found {tail}",
    ROWS_BACK: "experts: rank {rank} waited for its tokens' rows to come back: expected {head} pieces in all calls, "
    "found {tail}",
}
ARGUMENT_ERRORS = COUNT_MISMATCH, TOO_MANY_ROWS, CALL_MISMATCH, WRONG_COUNT  # errors without a wait
# The arguments of a dispatch that must be the same on all ranks, in the order in which ranks exchange them, and the
# names of the values of those that are not numbers.
CALL_ARGUMENTS = (
    ("x's hidden size", None),
    ("x's dtype", ("torch.bfloat16", "torch.float8_e4m3fn")),
    ("the number of x's scales per row", None),
    ("the dtype of x's scales", ("None", "torch.float32", "torch.int32")),
    ("the number of topk_idx' columns (0: not given)", None),
    ("the number of experts", None),
    ("the number of out (0: not given)", None),
    ("the number of channels, which depends on config,", None),
    ("the number of slots per ring, which depends on config,", None),
)


def format_seconds(seconds):
    """Format a timeout for messages; in the simulator with its steps, as each takes a microsecond of its clock."""
    return f"{seconds:g} s" + (f" ({1e6 * seconds:g} of the simulator's steps)" if simulator.ENABLED else "")


@cuda.jit(device=True)
def timed_out(start, ctx):
    """Return whether a wait that began at ``start`` must end: after the timeout, or because a rank has aborted."""
    return ld_volatile_s32(ctx.local, ABORT_FLAG) != 0 or uint64(globaltimer() - start) > ctx.timeout_ns


@cuda.jit(device=True)
def abort(ctx, code, channel, peer, head, tail):
    """Abort this rank and its peers; the rank's first thread that does so writes the reason to the host.

    If a peer has aborted before, the reason is the peer's, and the arguments have no effect.
    """
    if atom_add_relaxed_sys_s32(ctx.state, ABORTED, 1) == 0:
        flag, num_ranks = ld_acquire_sys_s32(ctx.local, ABORT_FLAG), ctx.state[NUM_RANKS]
        source = int32(flag - 1) if flag != 0 else ctx.rank
        record = int32(ABORT_RECORDS + RECORD_WORDS * source)
        if flag == 0:
            for r in range(num_ranks):
                remote = pointer_from_address(ctx.peers[r], ctx.local)
                remote[record], remote[record + 1], remote[record + 2] = int32(code), ctx.rank, int32(channel)
                remote[record + 3], remote[record + 4], remote[record + 5] = int32(peer), int32(head), int32(tail)
        for i in range(1, _NUM_VALUES):
            ctx.status[i] = ctx.local[record + i]
        code = ctx.local[record]
        fence_acq_rel_sys()
        if flag == 0:
            for r in range(num_ranks):
                st_relaxed_sys_s32(pointer_from_address(ctx.peers[r], ctx.local), ABORT_FLAG, ctx.rank + 1)
        st_relaxed_sys_s32(ctx.status, 0, code)


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
