"""The sizes of the lesson "The gate, for a prompt". Others work if a warp is eight groups of four lanes.

A lane holds the experts of one or more 16-byte loads of bfloat16 logits, so their number is a multiple of 256.
"""

from moe_numba import simulator  # before Numba: it decides whether kernels run on a GPU or in the simulator

# isort: split
from numba import float32, int32

from moe_numba.gate.device_functions import make_sort_descending, sorting_network

EXPERTS, GROUPS, KEPT, TOPK = 256, 8, 4, 8  # DeepSeek-V3; (512, 8, 4, 6) works as well
TOKENS = 16384  # of the times
WARPS = 4  # of a CTA, whose threads are (32, WARPS): threadIdx.x is the lane

SIZE = EXPERTS // GROUPS  # experts of a group
HELD = EXPERTS // 32  # experts of a lane, if a warp has a token
SHARE = 32 // GROUPS  # lanes that share a group, if a warp has a token
TOKENS_PER_WARP = 32 // GROUPS  # if a thread has a group
CANDIDATES = KEPT * SIZE // 8  # experts of a lane, if eight lanes have the kept groups of a token
if GROUPS != 8 or EXPERTS % 256 or KEPT not in (1, 2, 4, 8) or CANDIDATES > 32 or TOPK > 8:
    raise ValueError(
        f"{EXPERTS} experts in {GROUPS} groups, {KEPT} kept, top-{TOPK}: the kernels of this lesson need a multiple of "
        "256 experts, 8 groups of which 1, 2, 4 or 8 are kept, at most 32 candidates per lane, and at most top-8"
    )

FULL = 0xFFFFFFFF  # all 32 lanes of a warp
LOWEST, DROPPED = float32(-3.4028234663852886e38), float32(3.4028234663852886e38)  # -FLT_MAX and FLT_MAX
NEVER = int32(-(1 << 31))  # less than the key of every float
LOG2_E = float32(1.4426950408889634)
PAIRS = tuple(sorting_network(HELD))  # Batcher's network: (i, j) of each compare-exchange
sort_held, sort_candidates = make_sort_descending(HELD), make_sort_descending(CANDIDATES)
DEVICE = "cpu" if simulator.ENABLED else "cuda"

MEANINGS = {  # name -> what it stands for, for the page
    "EXPERTS, GROUPS, KEPT, TOPK": "experts, groups of experts, groups that are kept, experts that are chosen",
    "SIZE": "experts of a group",
    "WARPS": "warps of a CTA; threadIdx.y is the warp, threadIdx.x the lane",
    "FULL": "the mask of all 32 lanes",
    "TOKENS_PER_WARP": "steps 2 and 3: a lane has a whole group of a token, so a warp has this many tokens",
    "HELD": "from step 4 on: experts that a lane holds, because a warp has one token",
    "SHARE": "from step 4 on: lanes that share a group",
    "CANDIDATES": "step 10: keys that a lane sorts, when eight lanes share the kept groups of a token",
    "LOWEST": "a score below all others (-FLT_MAX): a choice that is taken, or in a group that is dropped",
    "DROPPED": "SGLang's mark of a dropped group (FLT_MAX): its sum is never the lowest again",
    "NEVER": "a key below that of every float: nothing is left to pick",
    "PAIRS": "the compare-exchanges (i, j) of a network that sorts HELD keys",
    "LOG2_E": "log2(e): 2 ** (LOG2_E * x) is e ** x",
}
