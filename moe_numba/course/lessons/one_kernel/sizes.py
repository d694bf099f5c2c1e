"""Sizes of the lesson on one kernel: change them here. Records belong to the first ones."""

RANKS = 2  # 1, 2, 4 or 8; the simulator needs a few minutes for 4 ranks
TOKENS, HIDDEN, INTERMEDIATE, TOPK, LOCAL_EXPERTS = 1024, 1024, 512, 8, 16  # of each rank: of the times
SMALL_TOKENS, SMALL_HIDDEN, SMALL_INTERMEDIATE = 9, 32, 32  # of what the simulator runs, and counts
SMALL_TOPK, SMALL_LOCAL_EXPERTS, SMALL_CTAS = 2, 2, 3
ROUNDS = 3  # calls of a check, queued at once

for _hidden, _intermediate in ((HIDDEN, INTERMEDIATE), (SMALL_HIDDEN, SMALL_INTERMEDIATE)):
    if _hidden % 16 or _intermediate % 16:
        raise ValueError(f"hidden {_hidden} and intermediate {_intermediate} must be multiples of 16")
