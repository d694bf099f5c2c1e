"""Common device functions of our port of DeepEP's kernels: waits with timeouts, channel ranges, and copies of rows.

A thread whose wait times out writes what it waited for to ``status``, 8 int32 of this rank that are zero beforehand:
the code of the wait, rank, channel, peer, head, tail, and how many threads have timed out. All other waits of the rank
then end too, so that its kernels terminate; their outputs and the buffer are invalid.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, int32, int64, uint64

from moe_numba.ptx.atomics import atom_add_relaxed_sys_s32, ld_relaxed_sys_s32, st_release_sys_s32
from moe_numba.ptx.memory import st_na_s32x4
from moe_numba.ptx.special_registers import globaltimer

STATUS_WORDS = 8
# What a thread waited for: the code in ``status[0]``.
CODES = {
    1: "the rank did not reach the barrier: its signal stayed positive (reported as head)",
    2: "the sender did not publish which rows it sends",
    3: "no space in the ring: the receiver did not advance the head",
    4: "no rows in the ring: the sender did not advance the tail",
    5: "a token's row (its position reported as head) did not come back",
}
BARRIER, OFFSETS, SPACE, ROWS, TOKEN = CODES
_NUM_TIMEOUTS = 6  # index in the status


class WaitContext(NamedTuple):
    """What every wait needs to report a timeout."""

    rank: object  # int32
    timeout_ns: object  # int64; 0: no timeout
    status: object  # int32* [STATUS_WORDS]


def explain(status):
    """Return a status as a message; None if no thread has timed out."""
    code, rank, channel, peer, head, tail, *_ = map(int, status)
    if not code:
        return None
    where = f"channel {channel}, " if channel >= 0 else ""
    return f"rank {rank} timed out waiting for rank {peer}: {CODES[code]} ({where}head {head}, tail {tail})"


@cuda.jit(device=True)
def _timed_out(waited, ctx, code, channel, peer, head, tail):
    """Return whether a thread that has waited for ``waited`` ns must stop; the first one reports the reason."""
    if waited <= ctx.timeout_ns and ld_relaxed_sys_s32(ctx.status, 0) == 0:
        return False
    if atom_add_relaxed_sys_s32(ctx.status, _NUM_TIMEOUTS, 1) == 0:
        ctx.status[1] = int32(ctx.rank)
        ctx.status[2] = int32(channel)
        ctx.status[3] = int32(peer)
        ctx.status[4] = int32(head)
        ctx.status[5] = int32(tail)
        st_release_sys_s32(ctx.status, 0, code)
    return True


@cache
def make_wait(poll, until, code):
    """Make ``wait(flags, offset, limit, other, channel, peer, ctx)``: poll a flag until ``until(value, limit)``.

    ``wait`` returns whether the condition became true, and the last value. ``other`` is the counterpart of the polled
    flag (of a tail the head, of a head the tail), for the status.
    """
    polls_tail = code in (ROWS, TOKEN)

    @cuda.jit(device=True)
    def wait(flags, offset, limit, other, channel, peer, ctx):
        value = poll(flags, offset)
        start = now = uint64(0)
        while not until(value, limit):
            if ctx.timeout_ns > 0:
                now = globaltimer()
                if start == 0:
                    start = now
                head, tail = (other, value) if polls_tail else (value, other)
                if _timed_out(int64(now - start), ctx, code, channel, peer, head, tail):
                    return False, value
            value = poll(flags, offset)
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
    """Make ``channel_range(num_tokens, channel)``: the first token of a channel, and the one after its last."""

    @cuda.jit(device=True)
    def channel_range(num_tokens, channel):
        share = (int64(num_tokens) + (channels - 1)) // channels
        first = min(share * channel, int64(num_tokens))
        return first, min(first + share, int64(num_tokens))

    return channel_range


@cache
def make_copy_row(row_bytes, load, unroll=4):
    """Make ``copy_row(dst, dst_offset, src, src_offset, lane)``: a warp copies a row; offsets are in int32.

    A lane has ``unroll`` 16-byte loads in flight.
    """
    if row_bytes % 16:
        raise ValueError(f"row_bytes is {row_bytes}; it must be a multiple of 16")
    vectors, num_words = row_bytes // 16, 4 * unroll

    @cuda.jit(device=True)
    def copy_row(dst, dst_offset, src, src_offset, lane):
        words = cuda.local.array(num_words, int32)
        for first in range(lane, vectors, 32 * unroll):
            for k in range(unroll):
                if first + 32 * k < vectors:
                    a, b, c, d = load(src, src_offset + 4 * (first + 32 * k))
                    words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3] = a, b, c, d
            for k in range(unroll):
                if first + 32 * k < vectors:
                    a, b, c, d = words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]
                    st_na_s32x4(dst, dst_offset + 4 * (first + 32 * k), a, b, c, d)

    return copy_row
