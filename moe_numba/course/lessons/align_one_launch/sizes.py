"""Sizes of the lesson "Alignment in one launch": change them here. Recorded times belong to those below."""

EXPERTS, TOPK, BLOCK = 256, 8, 16  # DeepSeek-V3, blocks of 16 rows
FOUR, DECODE, TOKENS = 4, 64, 4096  # tokens: of one warp, of a decode step, of a prompt
CTAS = 64  # of the kernels for a prompt
WARPS = 16  # the most of a CTA that ranks its assignments; a CTA places at most 32 of them for each
FULL = 0xFFFFFFFF  # all 32 lanes of a warp

# What follows from them. Shared arrays need constants with names.
COLUMNS = -(-EXPERTS // 4) * 4
BINS = COLUMNS + 1
BOTH = 2 * BINS
SCRATCH = 2 * WARPS * BINS
VECTORS = COLUMNS // 4
HEADER = 4
WORDS = -(-DECODE * TOPK // 32)
MASKS = EXPERTS * WORDS

MEANINGS = {  # name -> what it stands for, for the page
    "EXPERTS, TOPK, BLOCK": "experts, experts of a token, rows of an expert block",
    "FOUR, DECODE, TOKENS": "tokens of the three inputs",
    "CTAS": "CTAs of the kernels for the largest input",
    "WARPS": "most warps of a CTA; it places at most 32 assignments for each",
    "FULL": "the mask of all 32 lanes",
    "BINS": "counters in shared memory: one for each expert, and one at EXPERTS for threads without an assignment",
    "BOTH": "two such arrays, one after the other: assignments in earlier chunks, and all others",
    "SCRATCH": "words in which a CTA ranks its assignments",
    "HEADER": "elements at the beginning of the workspace that the CTAs synchronise with; the counts follow",
    "COLUMNS": "elements of a CTA's row of counts in the workspace",
    "VECTORS": "loads of 16 bytes that such a row takes",
    "WORDS, MASKS": "for DECODE tokens: words of an expert's mask, with a bit for each assignment, and of all masks",
}

if FOUR * TOPK > 32:
    raise ValueError(f"FOUR is {FOUR} and TOPK {TOPK}; a warp has 32 lanes, one for each assignment")
if TOKENS * TOPK > 32 * WARPS * CTAS:
    raise ValueError(f"TOKENS is {TOKENS}, TOPK {TOPK} and CTAS {CTAS}; a CTA places at most {32 * WARPS} assignments")
if not 32 <= EXPERTS <= 32 * WARPS:
    raise ValueError(f"EXPERTS is {EXPERTS}; it must be from 32 to {32 * WARPS}, a thread for each")
