"""What every wait for another rank has: an end.

Who has waited longer than ``patience``, in nanoseconds, gives up: it says so in the rank's state, so that all waits of
the rank end and its kernels too, and tells the host in ``status`` what it waited for. The host raises, and the other
ranks, who now wait for this one, give up in their turn.
"""

from numba import cuda, int32, uint64

from moe_numba.expert_parallel.kernels.buffer_layout import LOST
from moe_numba.expert_parallel.kernels.progress import FULL
from moe_numba.ptx.atomics import atom_add_relaxed_sys_s32, ld_volatile_s32, st_release_sys_s32
from moe_numba.ptx.special_registers import globaltimer

STATUS_WORDS = 8
# What was waited for: a code in the status, and the sentence of the error, which takes the status' numbers.
SPACE, ROWS, COMBINE_SPACE, COMBINE_ROWS, COUNTS, BARRIER, MISCOUNT, TOO_MANY = range(1, 9)
SENTENCES = {
    SPACE: "dispatch: rank {rank}, channel {channel} waited for space in its ring to rank {peer}: head {head}, tail "
    "{tail}",
    ROWS: "dispatch: rank {rank}, channel {channel} waited for rows from rank {peer}: head {head}, tail {tail}",
    COMBINE_SPACE: "combine: rank {rank}, channel {channel} waited for space in its ring to rank {peer}: head {head}, "
    "tail {tail}",
    COMBINE_ROWS: "combine: rank {rank}, channel {channel} waited for rows from rank {peer}: head {head}, tail {tail}",
    COUNTS: "notify: rank {rank} waited for the counts of rank {peer}: exchange {head} was wanted, {tail} has come",
    BARRIER: "barrier: rank {rank} waited for rank {peer}: barrier {head} was wanted, {tail} has come",
    MISCOUNT: "notify: on rank {rank} num_tokens_per_rank has {head} tokens for rank {peer}, is_token_in_rank {tail}",
    TOO_MANY: "notify: rank {rank} gets {tail} tokens; there is room for {head} (num_worst_tokens, or out)",
}
WRONG_COUNTS = MISCOUNT, TOO_MANY  # nobody waited


@cuda.jit(device=True)
def out_of_patience(start, patience, state):
    """Whether to wait no longer; ``start`` is the time at which this wait began."""
    return ld_volatile_s32(state, LOST) != 0 or uint64(globaltimer() - start) > patience


@cuda.jit(device=True)
def give_up(state, status, what, rank, channel, peer, head, tail):
    """Let the rank give up; the first thread to do so tells the host why."""
    if atom_add_relaxed_sys_s32(state, LOST, 1) == 0:
        status[1] = rank
        status[2] = channel
        status[3] = peer
        status[4] = int32(head)
        status[5] = int32(tail)
        st_release_sys_s32(status, 0, what)


@cuda.jit(device=True)
def since(start):
    """When a wait began: now, if ``start`` is 0."""
    return globaltimer() if start == uint64(0) else start


@cuda.jit(device=True)
def warp_gives_up(start, patience, waits, state, status, what, rank, channel, peer, head, tail):
    """Whether a warp is to wait no longer; of the lanes that ``waits`` is true for, the first one tells why."""
    tired = out_of_patience(start, patience, state)
    if tired and waits:
        give_up(state, status, what, rank, channel, peer, head, tail)
    return cuda.any_sync(FULL, tired)
