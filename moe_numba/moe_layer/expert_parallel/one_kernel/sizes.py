"""Sizes of a layer whose rows travel in the order of the experts, and the memory that its ranks share."""

from typing import NamedTuple

from moe_numba.expert_parallel.common.buffer_layout import (
    ABORT_RECORDS,
    ALIGNMENT_WORDS,
    MAX_RANKS,
    RECORD_WORDS,
    align_words,
)

WARP = 32
SEQUENCE, EXPECTED_BACK, EXPECTED = 3, 4, ALIGNMENT_WORDS  # private state: calls, rows sent, rows of each expert


class Sizes(NamedTuple):
    """Sizes that are the same on all ranks, and offsets of the sections of a rank's shared memory, in 4-byte words.

    count_flags  [ranks]                     sequence number of the last call for which rank s has sent its counts
    counts       [2][ranks][all experts]     rows of rank s for each expert; two calls take turns
    arrived      [experts]                   rows that have arrived for each expert, in all calls
    returned     [1]                         rows of this rank's tokens that have come back, in all calls
    rows         [capacity][row_words]       rows of x, in the order of the experts
    scales       [capacity][scale_words]
    origins      [capacity]                  rank of a row * assignments + its place among that rank's rows
    back         [assignments][hidden / 2]   rows of the second GEMM, in the order in which the rank sent its rows
    """

    ranks: int
    experts: int  # of a rank
    hidden: int
    topk: int
    max_tokens: int  # of a rank
    row_words: int
    scale_words: int  # 0: rows of x are bfloat16
    warps: int = 8  # of a CTA that moves rows

    @property
    def all_experts(self) -> int:
        return self.ranks * self.experts

    @property
    def assignments(self) -> int:
        """Most rows that a rank sends."""
        return self.max_tokens * self.topk

    @property
    def capacity(self) -> int:
        """Most rows that a rank receives: those of all ranks."""
        return self.ranks * self.assignments

    @property
    def count_flags(self) -> int:
        return align_words(ABORT_RECORDS + MAX_RANKS * RECORD_WORDS)

    @property
    def counts(self) -> int:
        return self.count_flags + align_words(self.ranks)

    @property
    def arrived(self) -> int:
        return self.counts + align_words(2 * self.ranks * self.all_experts)

    @property
    def returned(self) -> int:
        return self.arrived + align_words(self.experts)

    @property
    def rows(self) -> int:
        return self.returned + align_words(1)

    @property
    def scales(self) -> int:
        return self.rows + align_words(self.capacity * self.row_words)

    @property
    def origins(self) -> int:
        return self.scales + align_words(self.capacity * self.scale_words)

    @property
    def back(self) -> int:
        return self.origins + align_words(self.capacity)

    @property
    def words(self) -> int:
        """Words of a rank's shared memory."""
        return self.back + align_words(self.assignments * self.hidden // 2)

    @property
    def state_words(self) -> int:
        return EXPECTED + align_words(self.experts)
