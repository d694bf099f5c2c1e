"""Compile-time shape and memory map of the low-latency kernels, in 4-byte words.

Every pair of ranks has a fixed slot for each token, so nothing is counted before rows are sent. Each rank's shared
memory has two halves, which consecutive operations use alternately. A rank that starts operation n + 2 has received
something from all ranks in operation n + 1, so no rank still reads the half from operation n.

Dispatch, slot [source rank][token]:
    metadata [2][slots][parts][...]  the token's experts on this rank, two per word, each word with a stamp
    rows     [2][slots][...]         the row, its scales, and the token's weights

Combine, slot [expert rank][token]; the weights' slots are [source rank][token]:
    started  [num_ranks]             the last combine that rank r has started
    weights  [2][slots][topk]        pairs of a weight and the number of the combine
    flags    [2][slots][parts]       the combine that wrote the row; only if data is not its own flag
    rows     [2][slots][...]         sums of the rows of one rank's experts
"""

from dataclasses import dataclass

from moe_numba.expert_parallel.common.buffer_layout import MAX_RANKS, align_words

SCALE_GROUP = 128  # elements that share a scale
# A metadata word has two experts and, above them, the low bits of the dispatch's number. An expert is its number on the
# receiving rank, plus REPEATED if the token names it before, or NO_EXPERT if it is on another rank.
ID_BITS, STAMP_SHIFT = 11, 22
REPEATED, NO_EXPERT = 1 << (ID_BITS - 1), (1 << ID_BITS) - 1
MAX_LOCAL_EXPERTS = REPEATED - 1
STAMP_MASK = (1 << (32 - STAMP_SHIFT)) - 1
NO_EXPERTS = NO_EXPERT << ID_BITS | NO_EXPERT
SENTINEL = -1  # marks words that have not arrived; a NaN in float32, and two or four of them in bfloat16 or e4m3
CLEAN_NAN = 0x7FFF7FFF  # is sent in place of a payload word equal to the sentinel: also NaNs
POISONED = -2  # in ``rows``: the row was lost in a timeout

# Private state of each direction: CTAs done, whether a wait of this launch timed out, and from CTA_STATE on the
# operations that each CTA has sent and received. With one count for all CTAs, each would end with an atomic operation.
BLOCKS_DONE, EXPIRED = range(2)
CTA_STATE = 8
# The rank mask: a word for each rank, and the number of timeouts, the first of which is reported to the host.
REPORTED, MASK_WORDS = MAX_RANKS, MAX_RANKS + 1


@dataclass(frozen=True)
class LowLatencyShape:
    """What the low-latency kernels are compiled for.

    Parameters
    ----------
    num_ranks, max_tokens, hidden, topk, num_experts : int
        ``num_experts`` counts the experts of all ranks.
    dtype : str
        Of the rows that dispatch sends: "bfloat16" or "float8_e4m3fn".
    scales : str
        With FP8: "float32", "rounded" (float32 powers of two) or "ue8m0" (their exponents, four in an int32).
    expert_major : bool
        Pack received rows by expert; otherwise a row stays in its slot [source rank][token].
    combines_fp8 : bool
        Combine sends sums in FP8, with float32 scales.
    data_is_flag : bool
        Receivers poll the data, which senders never let equal the sentinel; otherwise flags follow the data.
    parts : int
        CTAs that share a row.
    threads : int
        Per CTA.
    ctas_per_sender : int
        In a kernel that sends and receives, every ``ctas_per_sender``-th CTA sends.
    ctas_per_sm : int
        That are resident at once.
    sends, receives : bool
        The phases of the kernel. A kernel that only sends, and later one that only receives, are the two phases of an
        operation with a receive hook.
    """

    num_ranks: int
    max_tokens: int
    hidden: int
    topk: int
    num_experts: int
    dtype: str = "bfloat16"
    scales: str = "float32"
    expert_major: bool = True
    combines_fp8: bool = False
    data_is_flag: bool = True
    parts: int = 1
    threads: int = 512
    ctas_per_sender: int = 3
    ctas_per_sm: int = 1
    sends: bool = True
    receives: bool = True

    @property
    def is_fp8(self):
        """Whether dispatch quantises rows."""
        return self.dtype == "float8_e4m3fn"

    @property
    def slots(self):
        """Slots of a half."""
        return self.num_ranks * self.max_tokens

    @property
    def local_experts(self):
        """Experts of a rank."""
        return self.num_experts // self.num_ranks

    @property
    def rows_per_slot(self):
        """Rows of the output that a slot may have."""
        return self.topk if self.expert_major else 1

    @property
    def row_words(self):
        """Words of a dispatched row."""
        return self.hidden // (4 if self.is_fp8 else 2)

    @property
    def num_scales(self):
        """Scales of a dispatched row."""
        return self.hidden // SCALE_GROUP if self.is_fp8 else 0

    @property
    def metadata_words(self):
        """Words of a slot's metadata: two experts in each, whole 16-byte vectors."""
        return -(-self.topk // 8) * 4

    @property
    def slot_words(self):
        """Words of a dispatch slot: row, scales and, if rows stay in their slots, weights."""
        return -(-(self.row_words + self.num_scales + (0 if self.expert_major else self.topk)) // 4) * 4

    def vectors_of_part(self, row_words):
        """16-byte vectors of a row that one CTA moves; whole groups of elements that share a word of scales."""
        group = 32 if self.scales == "ue8m0" else 16 if self.combines_fp8 else 8
        return -(-row_words // (4 * group * self.parts)) * group

    def fits_threads(self, row_words):
        """Whether each thread has at most one vector of a part.

        Loops over the vectors then end after one step, which the compiler must see, or it unrolls them.
        """
        return self.vectors_of_part(row_words) <= self.threads

    @property
    def combined_words(self):
        """Words of a row that combine reads and writes."""
        return self.hidden // 2

    @property
    def sum_words(self):
        """Words of a combine slot."""
        return (
            -(-(self.hidden // 4 + self.hidden // SCALE_GROUP) // 4) * 4 if self.combines_fp8 else self.combined_words
        )

    @property
    def shared_bytes(self):
        """Shared memory of dispatch: the metadata of all slots, the slots of each expert, and the rows of one slot."""
        bit_words = self.local_experts * self.num_ranks * self.bit_words_of_rank
        return 4 * (self.slots * self.metadata_words + bit_words + self.topk) if self.expert_major else 0

    @property
    def bit_words_of_rank(self):
        """Words with a bit for each token of a rank."""
        return -(-self.max_tokens // 32)

    @property
    def reads_own_rows(self):
        """Whether a rank reads rows of its own tokens where they are, without slots."""
        return self.sends and self.receives

    # Offsets in the shared memory of dispatch.

    @property
    def metadata_half(self):
        """Words of a half of the metadata."""
        return align_words(self.slots * self.parts * self.metadata_words)

    @property
    def dispatch_rows(self):
        """Offset of the rows of dispatch."""
        return 2 * self.metadata_half

    @property
    def dispatch_words(self):
        """Size of dispatch's memory."""
        return self.dispatch_rows + 2 * self.slots * self.slot_words

    # Offsets in the shared memory of combine.

    @property
    def weights_half(self):
        """Words of a half of the weights; rows that stay in their slots are not weighted."""
        return 2 * self.slots * self.topk if self.expert_major else 0

    @property
    def weights_offset(self):
        """Offset of the weights."""
        return align_words(self.num_ranks)

    @property
    def flags_half(self):
        """Words of a half of the flags."""
        return 0 if self.data_is_flag else self.slots * self.parts

    @property
    def flags_offset(self):
        """Offset of the flags."""
        return self.weights_offset + 2 * self.weights_half

    @property
    def combine_rows(self):
        """Offset of the rows of combine."""
        return align_words(self.flags_offset + 2 * self.flags_half)

    @property
    def combine_words(self):
        """Size of combine's memory."""
        return self.combine_rows + 2 * self.slots * self.sum_words
