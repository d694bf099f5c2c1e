"""Where everything lies in the buffer that each rank shares with the others; in words of 4 bytes.

    ready    [N]                     exchanges that rank s has sent this rank counts for, as a running number
    arrived  [N]                     barriers that rank s has come to
    counts   [2][N][...]             what rank s sends: tokens for each rank, for each expert here, up to each channel
    flags    2 x (tail, head)[C, N]  of the rings for dispatch, and of those for combine
    rings    2 x [C, N][slots]       rows on their way

A ring leads from one channel of rank s to the same channel of this rank. Its *tail*, how many rows have been put into
it, lies here, where the receiver polls it. Its *head*, how many have been taken out, lies on rank s, where the sender
polls it: nobody polls across the link. Both count on from launch to launch, so nothing is ever cleared.

What no other rank touches is the rank's own **state**: how far its own ends of the rings are, and how many exchanges
and barriers it has been to.
"""

from dataclasses import dataclass
from functools import cache

MOST_RANKS, MOST_CHANNELS, MOST_EXPERTS = 8, 1056, 1024  # 66 blocks of 16 warps; experts of one rank
MOST_TOPK = 32  # a lane for each
MOST_ROWS = (1 << 31) - 1
LINE = 32  # words: sections start at multiples of 128 bytes


def lines(words):
    """Words, rounded up to whole lines."""
    return -(-words // LINE) * LINE


@dataclass(frozen=True)
class Regions:
    """The offsets, in words, for so many ranks."""

    num_ranks: int
    ready: int
    arrived: int
    counts: int
    counts_stride: int  # of one source rank
    flags: int
    flags_stride: int  # of one kind: tail, head
    rings: int

    def tail(self, combine):
        """Tails of one operation's rings, [channel, source rank]."""
        return self.flags + 2 * combine * self.flags_stride

    def head(self, combine):
        """Heads of the rings that lead away from here, [channel, destination rank]."""
        return self.tail(combine) + self.flags_stride


@cache
def regions(num_ranks):
    """The offsets in a shared buffer of a group of so many ranks."""
    ready, arrived = 0, lines(num_ranks)
    counts = arrived + lines(num_ranks)
    counts_stride = lines(num_ranks + MOST_EXPERTS + MOST_CHANNELS)
    flags, flags_stride = counts + 2 * num_ranks * counts_stride, lines(MOST_CHANNELS * num_ranks)
    return Regions(num_ranks, ready, arrived, counts, counts_stride, flags, flags_stride, flags + 4 * flags_stride)


# The state, in words: whether this rank has given up, its barriers, and the exchanges of each block of the notify. Then
# how many channels senders and receivers have asked for in this launch, and how many blocks ask for no more.
LOST, BARRIERS, EXCHANGES = 0, 1, 2
ASKED, AT_END = LINE, LINE + 2
_ENDS = 2 * LINE


def sent(combine):
    """How many rows this rank has put into each ring that leads away, [channel, destination rank]."""
    return _ENDS + 2 * combine * MOST_CHANNELS * MOST_RANKS


def taken(combine):
    """How many rows this rank has taken out of each ring that leads here, [channel, source rank]."""
    return sent(combine) + MOST_CHANNELS * MOST_RANKS


STATE_WORDS = _ENDS + 4 * MOST_CHANNELS * MOST_RANKS


@dataclass(frozen=True)
class Record:
    """A row as it travels: the row itself, then what goes with it, in words."""

    row: int
    scales: int = 0
    topk: int = 0  # an expert and a weight each
    source: bool = True  # with the token's index on its own rank

    @property
    def experts(self):
        """Where the experts' numbers begin."""
        return self.row + self.scales

    @property
    def weights(self):
        """Where their weights begin."""
        return self.experts + self.topk

    @property
    def source_index(self):
        """Where the token's index is."""
        return self.weights + self.topk

    @property
    def words(self):
        """All of it, a multiple of 16 bytes, as bulk copies have it."""
        return -(-(self.source_index + self.source) // 4) * 4

    @property
    def stride(self):
        """From slot to slot."""
        return lines(self.words)
