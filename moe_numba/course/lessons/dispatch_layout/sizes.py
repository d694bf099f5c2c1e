"""Sizes of the lesson "Dispatch layout": change them here. Recorded times belong to those below."""

EXPERTS, TOPK, RANKS = 256, 8, 8  # DeepSeek-V3 on a node of eight GPUs
TOKENS = 4096  # of a rank: of the steps
SWEEP = (1, 64, 1024, 4096, 16384, 65536)  # tokens of the last tables
CHECKED = 300  # tokens of a check in the simulator
THREADS = 256  # of a CTA, in the kernels whose grid grows with the tokens
CLUSTER, CLUSTER_THREADS = 8, 1024  # CTAs of a cluster, and their threads
PORT_THREADS, EXPERTS_PER_CTA, RANKS_PER_CTA = 256, 32, 8  # of the port, as in the first version of DeepEP

# What follows from them. Shared arrays need constants with names.
EACH = EXPERTS // RANKS  # experts of a rank
COUNTERS = EXPERTS + RANKS  # of the experts, then of the ranks
SHARE = -(-COUNTERS // CLUSTER)  # counters that a CTA of the cluster adds up
SHARES = CLUSTER * SHARE
LANE_BITS = (max(TOPK, RANKS) - 1).bit_length()
LANES = 1 << LANE_BITS  # of a warp, for each token
PER_WARP = 32 // LANES  # tokens of a warp
FULL = 0xFFFFFFFF  # all 32 lanes of a warp

MEANINGS = {  # name -> what it stands for, for the page
    "EXPERTS, TOPK, RANKS": "experts of all ranks, experts of a token, ranks",
    "TOKENS": "tokens of this rank",
    "EACH": "experts of a rank",
    "COUNTERS": "counters: one for each expert, then one for each rank",
    "FULL": "the mask of all 32 lanes of a warp",
}

if EXPERTS % RANKS or not 2 <= RANKS <= 8:
    raise ValueError(f"EXPERTS is {EXPERTS} and RANKS {RANKS}; use 2 to 8 ranks with equally many experts")
if not 1 <= TOPK <= 32:
    raise ValueError(f"TOPK is {TOPK}; a warp has 32 lanes, one for each expert of a token")
