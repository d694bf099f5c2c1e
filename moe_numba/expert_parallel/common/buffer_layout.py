"""Memory map of the buffer that each rank shares with its peers, and of the rank's private state, in 4-byte words.

    abort_flag                          1 + the rank whose abort ends all waits of this rank; 0: none
    abort_records  [8][8]               why rank s has aborted: the error code, and the numbers of its message
    notify_flags   [N]                  sequence number of the last notify for which rank s has sent its counts
    barrier_flags  [N]                  sequence number of the last barrier that rank s has reached
    counts         [2][N][...]          counts from rank s: tokens per rank, per local expert, and per-channel prefix;
                                        then the arguments of its call that must be the same on all ranks
    ring_flags     2 x (tail, head)[C, N]  of the rings of dispatch, then of those of combine
    rings          2 x [C, N][slots]    token slots

A ring leads from one channel of rank s to the same channel of this rank. Its *tail* (rows written so far) is stored on
the receiving rank, where the receiver polls it. Its *head* (rows consumed so far) is stored on rank s, where the sender
polls it, so no rank polls across NVLink. Both counters continue from launch to launch; neither is ever cleared.

The rank's **state** is private memory: the progress of its own ends of the rings, and the numbers of notifies and
barriers it has executed.
"""

from dataclasses import dataclass
from functools import cache

MAX_RANKS, MAX_CHANNELS, MAX_EXPERTS = 8, 1056, 1024  # 66 CTAs of 16 warps; experts of one rank
MAX_TOPK = 32  # one lane per expert
CALL_WORDS = 9  # arguments of a dispatch that must be the same on all ranks, see `timeout.CALL_ARGUMENTS`
RECORD_WORDS = 8
MAX_ROWS = (1 << 31) - 1
ALIGNMENT_WORDS = 32  # sections start at multiples of 128 bytes

# These two offsets are the same for any number of ranks.
ABORT_FLAG, ABORT_RECORDS = 0, ALIGNMENT_WORDS


def align_words(words):
    """Round a number of words up to a multiple of 128 bytes."""
    return -(-words // ALIGNMENT_WORDS) * ALIGNMENT_WORDS


@dataclass(frozen=True)
class BufferLayout:
    """Offsets of the sections of the shared buffer, in words."""

    num_ranks: int
    notify_flags: int
    barrier_flags: int
    counts: int
    counts_stride: int  # per source rank
    call: int  # offset of the call's arguments among the counts
    ring_flags: int
    ring_flags_stride: int  # size of one array of tails or heads
    rings: int

    def tail(self, combine):
        """Offset of the tails of one operation's rings, [channel, source rank]."""
        return self.ring_flags + 2 * combine * self.ring_flags_stride

    def head(self, combine):
        """Offset of the heads of one operation's outgoing rings, [channel, destination rank]."""
        return self.tail(combine) + self.ring_flags_stride


@cache
def buffer_layout(num_ranks):
    """Compute the layout of the shared buffer for a group of ``num_ranks`` ranks."""
    notify_flags = ABORT_RECORDS + MAX_RANKS * RECORD_WORDS
    barrier_flags = notify_flags + align_words(num_ranks)
    counts, call = barrier_flags + align_words(num_ranks), num_ranks + MAX_EXPERTS + MAX_CHANNELS
    counts_stride = align_words(call + CALL_WORDS)
    flags, stride = counts + 2 * num_ranks * counts_stride, align_words(MAX_CHANNELS * num_ranks)
    return BufferLayout(
        num_ranks, notify_flags, barrier_flags, counts, counts_stride, call, flags, stride, flags + 4 * stride
    )


# Private state, in words: how many threads have aborted, the number of barriers, the number of ranks, and the number of
# notifies (one counter for each CTA of the notify kernel). Then, for the current launch, the next channel of the
# senders and of the receivers (one counter each), and the number of CTAs whose warps have all retired.
ABORTED, BARRIER_COUNT, NUM_RANKS, NOTIFY_COUNTS = 0, 1, 2, 3
NEXT_CHANNEL, BLOCKS_DONE = ALIGNMENT_WORDS, ALIGNMENT_WORDS + 2
_RING_COUNTERS = 2 * ALIGNMENT_WORDS


def sent_counters(combine):
    """Offset in the state of the rows written to each outgoing ring, [channel, destination rank]."""
    return _RING_COUNTERS + 2 * combine * MAX_CHANNELS * MAX_RANKS


def received_counters(combine):
    """Offset in the state of the rows consumed from each incoming ring, [channel, source rank]."""
    return sent_counters(combine) + MAX_CHANNELS * MAX_RANKS


STATE_WORDS = _RING_COUNTERS + 4 * MAX_CHANNELS * MAX_RANKS
