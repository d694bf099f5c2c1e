"""Sizes of the lesson on low-latency dispatch and combine: change them here. Records belong to the first ones."""

RANKS = 2  # 2, 4 or 8; the simulator needs a minute or two for 4 ranks, and ten minutes for 8
TOKENS, MANY = 1, 32  # of each rank: of steps 1 to 4, and of steps 5 and 6
HIDDEN, TOPK, EXPERTS = 7168, 8, 256  # of the times
SMALL_TOKENS, SMALL_HIDDEN, SMALL_TOPK, SMALL_LOCAL_EXPERTS = 2, 264, 2, 2  # of what the simulator runs, and counts
ROUNDS = 4  # operations of a check, queued at once: at least 4

if EXPERTS % RANKS or EXPERTS // RANKS > 254:
    raise ValueError(f"EXPERTS is {EXPERTS}; each of {RANKS} ranks must have the same number of them, at most 254")
for _hidden in (HIDDEN, SMALL_HIDDEN):
    if _hidden % 8:
        raise ValueError(f"a row has {_hidden} elements; it must have whole vectors of 8")
