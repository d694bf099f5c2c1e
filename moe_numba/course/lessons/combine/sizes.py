"""Sizes of the lesson "Combine": change them here, and the page runs with yours."""

RANKS = 2  # 2 to 8
TOKENS, HIDDEN, TOPK, EXPERTS = (
    4096,
    7168,
    8,
    256,
)  # tokens of a rank, elements of a row, experts of a token and of all ranks
SMS = 24  # of each rank; half of them send
WARPS = 15  # of a CTA that copy rows; one more signals
RING_ROWS = 256  # rows that the rings from one rank to one receiving SM hold together
CHUNKS = {2: 10, 3: 9, 4: 9}  # rows that our port of DeepEP's kernel sends at a time, by ranks; 4 with more

# The simulator runs these:
SMALL_TOKENS, SMALL_HIDDEN, SMALL_TOPK = 7, 288, 3
SMALL_SMS, SMALL_WARPS, SMALL_RING_ROWS = 2, 2, 4
