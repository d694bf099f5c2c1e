"""Configuration of our Numba port of DeepEP's kernels, and the byte offsets of the sections of a rank's buffer.

Rank r's buffer holds a **queue** for each channel c and each source rank s, with index ``c * ranks + s``, which s fills
and r empties: a ring of rows with their metadata, a head and a tail. Sections are aligned to 128 bytes. DeepEP does not
pad them, so its rows are aligned only for some numbers of ranks.
"""

from collections.abc import Callable
from typing import NamedTuple

ALIGNMENT = 128
SIGNALS_BYTES = ALIGNMENT  # of the barrier: one int32 per rank


class DeepEPConfig(NamedTuple):
    """Compile-time configuration of the kernels of one operation, dispatch or combine."""

    ranks: int  # 1 to 8
    channels: int = 12  # half of the CTAs
    ring: int = 256  # slots of a queue
    chunk: int = 6  # rows sent before the tail is published
    row_bytes: int = 14336  # a multiple of 16
    topk: int = 8  # 0 to 32; 0 without experts and weights
    scales: int = 0  # float32 per row; dispatch only
    experts: int = 256  # of all ranks; dispatch only
    warps: int = 3  # per CTA and rank
    biases: int = 0  # 0 to 2; combine only
    fault: str = ""  # a deliberate mistake, for demonstrations: see FAULTS
    on_row: Callable | None = None  # simulator only: called by dispatch when a lane has written its part of a row

    @property
    def threads(self):
        """Threads of a CTA."""
        return 32 * self.warps * self.ranks


class DispatchOffsets(NamedTuple):
    """Byte offsets of the sections of a dispatch, and their total size."""

    rank_prefix: int  # int32 [ranks, ranks]
    start: int  # int32 [queues], as the next three
    end: int
    head: int
    tail: int
    x: int  # [queues, ring, row_bytes]
    src_idx: int  # int32 [queues, ring]
    topk_idx: int  # int64 [queues, ring, topk]
    topk_weights: int  # float32 [queues, ring, topk]
    scales: int  # float32 [queues, ring, scales]
    size: int


class CombineOffsets(NamedTuple):
    """Byte offsets of the sections of a combine, and their total size."""

    head: int  # int32 [queues]
    tail: int
    x: int  # [queues, ring, row_bytes]
    src_idx: int  # int32 [queues, ring]
    topk_weights: int  # float32 [queues, ring, topk]
    size: int


def align_up(size):
    """Round a size up to a multiple of 128."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def _prefix_sum(*sizes):
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + align_up(size))
    return offsets


def dispatch_offsets(config):
    """Compute the offsets of a dispatch."""
    queues = config.ranks * config.channels
    rows = queues * config.ring
    ring = (rows * config.row_bytes, 4 * rows, 8 * rows * config.topk, 4 * rows * config.topk, 4 * rows * config.scales)
    return DispatchOffsets(*_prefix_sum(4 * config.ranks**2, *[4 * queues] * 4, *ring))


def combine_offsets(config):
    """Compute the offsets of a combine, which overwrites the sections of the dispatch before it."""
    queues = config.ranks * config.channels
    rows = queues * config.ring
    return CombineOffsets(*_prefix_sum(*[4 * queues] * 2, rows * config.row_bytes, 4 * rows, 4 * rows * config.topk))


def notify_bytes(config):
    """Return the bytes that notify_dispatch uses: prefix matrix, then the counts of this rank's experts by source."""
    return dispatch_offsets(config).start + align_up(4 * config.experts)


def min_buffer_bytes(dispatch=None, combine=None):
    """Return the minimum size of a buffer for a dispatch, a combine, or one after the other; without signals."""
    sizes = [max(dispatch_offsets(dispatch).size, notify_bytes(dispatch))] if dispatch else []
    return max(sizes + ([combine_offsets(combine).size] if combine else []))


def min_ring_slots(combine):
    """Return the minimum number of ring slots with which a combine cannot deadlock.

    Each of a CTA's ``reducers`` warps holds a token. The head may trail the rows that have been read by
    ``reducers - 1`` rows, while the sender waits for space for a whole chunk. DeepEP requires only chunk + 1 slots, and
    may deadlock.
    """
    reducers = combine.warps * combine.ranks - 1
    return combine.chunk + reducers - 1
