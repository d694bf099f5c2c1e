"""Sizes of the lesson "Dispatch": change them here. Times belong to RANKS, EXPERTS, TOPK, TOKENS and HIDDEN."""

from moe_numba import simulator
from moe_numba.course.pages.sizes import reachable_gpus

RANKS = 2 if simulator.ENABLED else max(n for n in (2, 4, 8) if n <= max(2, reachable_gpus()))  # a GPU each, or virtual
EXPERTS, TOPK = 256, 8  # of all ranks; of a token
TOKENS, HIDDEN = 4096, 7168  # of a rank; elements of a row: of the times
SENDERS = 12  # CTAs that send; as many receive
DIRECT_SENDERS = 16  # CTAs that send where none receives
RING_ROWS = 256  # rows that all rings from one CTA to one rank hold together
WARPS = 15  # copy warps of a CTA in which a warp sends a whole token: as many rows fit into shared memory
TEAM_WARPS = 24  # copy warps of a CTA in which each rank has a team of warps
SWEEP = (4, 8, 12, 16, 24)  # senders

SMALL_EXPERTS, SMALL_TOPK = 16, 2  # of what the simulator runs, and counts
SMALL_TOKENS, SMALL_HIDDEN = 16, 128  # a channel has two tokens or more, so that receivers help
SMALL_SENDERS = 1
SMALL_RING_ROWS = 8  # fewer than tokens, so that senders wait for space; a chunk of a warp has two
SMALL_WARPS = 2  # copy warps of a CTA that send one token each
SMALL_TEAM = 2  # warps of a team

for _hidden in (HIDDEN, SMALL_HIDDEN):
    if _hidden % 128:
        raise ValueError(f"HIDDEN is {_hidden}; it must be a multiple of 128, the elements of an FP8 scale")
if RANKS not in (2, 4, 8) or EXPERTS % RANKS or SMALL_EXPERTS % RANKS:
    raise ValueError(f"RANKS is {RANKS}; it must be 2, 4 or 8, and divide EXPERTS and SMALL_EXPERTS")
