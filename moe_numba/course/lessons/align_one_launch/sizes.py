"""Sizes of the lesson "Alignment in one launch": change them here. Recorded times belong to those below."""

EXPERTS, TOPK, BLOCK = 256, 8, 16  # DeepSeek-V3, blocks of 16 rows
FOUR, DECODE, TOKENS = 4, 64, 4096  # tokens: of one warp, of a decode step, of a prompt
CTAS = 64  # of the kernels for a prompt
WARPS = 16  # the most of a CTA that ranks its slots; a CTA places at most 32 of them for each
FULL = 0xFFFFFFFF  # all 32 lanes of a warp

# What follows from them. Shared arrays need constants with names.
COLUMNS = -(-EXPERTS // 4) * 4  # counts of a CTA in the workspace
BINS = COLUMNS + 1  # counters in shared memory; that at EXPERTS is for threads without a slot, and nothing reads it
BOTH = 2 * BINS  # for each expert: the slots in the chunks before this CTA's, and in all others
SCRATCH = 2 * WARPS * BINS  # words in which a CTA ranks its slots
VECTORS = COLUMNS // 4  # loads of 16 bytes that they take
HEADER = 4  # elements of the workspace before the counts
WORDS = -(-DECODE * TOPK // 32)  # of a mask with a bit for each slot of a decode step
MASKS = EXPERTS * WORDS

if FOUR * TOPK > 32:
    raise ValueError(f"FOUR is {FOUR} and TOPK {TOPK}; a warp has 32 lanes, one for each slot")
if TOKENS * TOPK > 32 * WARPS * CTAS:
    raise ValueError(f"TOKENS is {TOKENS}, TOPK {TOPK} and CTAS {CTAS}; a CTA places at most {32 * WARPS} slots")
if not 32 <= EXPERTS <= 32 * WARPS:
    raise ValueError(f"EXPERTS is {EXPERTS}; it must be from 32 to {32 * WARPS}, a thread for each")
