"""What the document's kernels have in common: waiting for other ranks, but not for ever; channels; copies of rows.

Each wait has an end. A thread whose patience runs out writes down what it waited for into ``status``, 8 int32 of this
rank that are zero beforehand: the code of the wait, rank, channel, peer, head, tail, and how many threads gave up. All
other waits of the rank then end too, so that its kernels do; what they have written is worth nothing, and neither is
the buffer.
"""

from functools import cache

from numba import cuda, int32, int64, uint64

from moe_numba.ptx.atomics import atom_add_relaxed_sys_s32, ld_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import st_na_s32x4
from moe_numba.ptx.special_registers import globaltimer

FULL = 0xFFFFFFFF
STATUS = 8  # int32
# What a status begins with.
CODES = {
    1: "a rank did not come to the barrier: its signal stayed positive (given as head)",
    2: "a sender did not say which rows it sends",
    3: "a sender found no room in a ring, whose receiver did not move the head on",
    4: "a receiver found nothing in a ring, whose sender did not move the tail on",
    5: "a token's row (its place given as head) did not come back",
}
BARRIER, OFFSETS, ROOM, ROWS, TOKEN = CODES
_CLAIMS = 6  # where in a status threads are counted


def explain(status):
    """A status in words; None if all is well."""
    code, rank, channel, peer, head, tail, *_ = map(int, status)
    if not code:
        return None
    where = f"channel {channel}, " if channel >= 0 else ""
    return f"rank {rank} gave up waiting for rank {peer}: {CODES[code]} ({where}head {head}, tail {tail})"


@cuda.jit(device=True)
def _gave_up(waited, patience, status, code, rank, channel, peer, head, tail):
    """Whether a thread that has waited so long stops, and if it is the first one, why."""
    if waited <= patience and ld_relaxed_sys_s32(status, 0) == 0:
        return False
    if atom_add_relaxed_sys_s32(status, _CLAIMS, 1) == 0:
        status[1] = int32(rank)
        status[2] = int32(channel)
        status[3] = int32(peer)
        status[4] = int32(head)
        status[5] = int32(tail)
        st_release_sys_s32(status, 0, code)
    return True


@cache
def make_wait(poll, until, code):
    """``wait(flags, at, limit, mine, rank, channel, peer, patience, status)``: poll until ``until(value, limit)``.

    Gives whether that came to pass, and the last value. ``mine`` is the other one of head and tail, for the status.
    ``patience`` is in nanoseconds; 0 is without end.
    """
    polls_the_tail = code in (ROWS, TOKEN)

    @cuda.jit(device=True)
    def wait(flags, at, limit, mine, rank, channel, peer, patience, status):
        value = poll(flags, at)
        since = now = uint64(0)
        while not until(value, limit):
            if patience > 0:
                now = globaltimer()
                if since == 0:
                    since = now
                head, tail = (mine, value) if polls_the_tail else (value, mine)
                if _gave_up(int64(now - since), patience, status, code, rank, channel, peer, head, tail):
                    return False, value
            value = poll(flags, at)
        return True, value

    return wait


@cuda.jit(device=True)
def at_least(value, limit):
    return value >= limit


@cuda.jit(device=True)
def more_than(value, limit):
    return value > limit


@cuda.jit(device=True)
def at_most(value, limit):
    return value <= limit


@cuda.jit(device=True)
def other_than(value, limit):
    return value != limit


@cache
def make_channel_range(channels):
    """``channel_range(num_tokens, channel)``: the first token of a channel, and the one after its last."""

    @cuda.jit(device=True)
    def channel_range(num_tokens, channel):
        share = (int64(num_tokens) + (channels - 1)) // channels
        first = min(share * channel, int64(num_tokens))
        return first, min(first + share, int64(num_tokens))

    return channel_range


@cache
def make_copy_row(row_bytes, load, at_once=4):
    """``copy_row(to, to_at, source, source_at, lane)``: a warp copies a row; places are in int32.

    A lane has ``at_once`` vectors of 16 bytes on their way at a time.
    """
    vectors, size = row_bytes // 16, 4 * at_once

    @cuda.jit(device=True)
    def copy_row(to, to_at, source, source_at, lane):
        words = cuda.local.array(size, int32)
        for first in range(lane, vectors, 32 * at_once):
            for k in range(at_once):
                if first + 32 * k < vectors:
                    a, b, c, d = load(source, source_at + 4 * (first + 32 * k))
                    words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = a, b, c, d
            for k in range(at_once):
                if first + 32 * k < vectors:
                    a, b, c, d = words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]
                    st_na_s32x4(to, to_at + 4 * (first + 32 * k), a, b, c, d)

    return copy_row
