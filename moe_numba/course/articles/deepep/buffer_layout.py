"""Where things lie in a rank's buffer while the document's kernels run: offsets in bytes.

Rank r's buffer holds a **queue** for each channel c and each source rank s, number ``c * ranks + s``, which s fills and
r empties: a ring of rows and what goes with them, and a head and a tail. The sections follow one another, each from a
multiple of 128 bytes on. DeepEP pads nothing: its rows are aligned for some numbers of ranks only.
"""

from typing import NamedTuple

ALIGNMENT = 128
SIGNALS_BYTES = ALIGNMENT  # of the barrier: an int32 for each rank


class Constants(NamedTuple):
    """What the kernels of one operation, dispatch or combine, are compiled for."""

    ranks: int  # 1 to 8
    channels: int = 12  # half the blocks
    ring: int = 256  # rows of a queue
    chunk: int = 6  # rows that are sent before the tail is published
    row_bytes: int = 14336  # a multiple of 16
    topk: int = 8  # 0 to 32; without experts' indices and weights 0
    scales: int = 0  # of a row, float32; dispatch only
    experts: int = 256  # of all ranks; dispatch only
    warps: int = 3  # of a block, for each rank
    biases: int = 0  # 0 to 2; combine only
    fault: str = ""  # what is done wrong, to be shown

    @property
    def threads(self):
        """Of a block."""
        return 32 * self.warps * self.ranks


class Dispatch(NamedTuple):
    """Offsets in bytes, and the end of it all."""

    rank_prefix: int  # int32 [ranks, ranks]
    start: int  # int32 [queues], as all four of them
    end: int
    head: int
    tail: int
    x: int  # [queues, ring, row_bytes]
    src_idx: int  # int32 [queues, ring]
    topk_idx: int  # int64 [queues, ring, topk]
    topk_weights: int  # float32 [queues, ring, topk]
    scales: int  # float32 [queues, ring, scales]
    size: int


class Combine(NamedTuple):
    """Offsets in bytes, and the end of it all."""

    head: int  # int32 [queues]
    tail: int
    x: int  # [queues, ring, row_bytes]
    src_idx: int  # int32 [queues, ring]
    topk_weights: int  # float32 [queues, ring, topk]
    size: int


def padded(size):
    """The next multiple of 128."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _offsets(*sizes):
    at = [0]
    for size in sizes:
        at.append(at[-1] + padded(size))
    return at


def dispatch_regions(c):
    """The sections of a dispatch."""
    queues = c.ranks * c.channels
    rows = queues * c.ring
    ring = (rows * c.row_bytes, 4 * rows, 8 * rows * c.topk, 4 * rows * c.topk, 4 * rows * c.scales)
    return Dispatch(*_offsets(4 * c.ranks**2, *[4 * queues] * 4, *ring))


def combine_regions(c):
    """The sections of a combine, which takes the place of the dispatch before it."""
    queues = c.ranks * c.channels
    rows = queues * c.ring
    return Combine(*_offsets(*[4 * queues] * 2, rows * c.row_bytes, 4 * rows, 4 * rows * c.topk))


def notify_bytes(c):
    """What notify_dispatch needs: after the prefix matrix, each source rank's counts of this rank's experts."""
    return dispatch_regions(c).start + padded(4 * c.experts)


def least_bytes(dispatch=None, combine=None):
    """The least size of a buffer for a dispatch, a combine, or the one and then the other; signals not included."""
    sizes = [max(dispatch_regions(dispatch).size, notify_bytes(dispatch))] if dispatch else []
    return max(sizes + ([combine_regions(combine).size] if combine else []))


def least_ring(combine):
    """The fewest rows of a combine's ring with which it cannot lock up.

    Each of a block's ``reducers`` has a token. The head may be as many rows less one behind what they have read, while
    the sender waits for room for a whole chunk. DeepEP asks for chunk + 1 rows, and may hang.
    """
    reducers = combine.warps * combine.ranks - 1
    return combine.chunk + reducers - 1
