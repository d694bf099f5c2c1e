"""Sizes of the lesson "The experts of a layer": change them here. Recorded times belong to the first ones."""

RANKS = 2  # of the last step: 2, 4 or 8
EXPERTS, TOPK, HIDDEN, INTERMEDIATE = 128, 8, 2048, 768  # of a layer of Qwen3-30B-A3B
TOKENS, MANY = 64, 4096  # of the layer and of grouping; of SwiGLU and of the weighted sum
WARPS = 8  # of the CTA that groups

SMALL_EXPERTS, SMALL_TOPK, SMALL_HIDDEN, SMALL_INTERMEDIATE = 8, 2, 128, 64  # of what the simulator runs, and counts
SMALL_TOKENS, SMALL_MANY = 40, 5
SMALL_COLUMNS = 448  # of the rows of SwiGLU and of the weighted sum: eight for each lane of nearly two warps
SMALL_WARPS = 2

for _experts, _warps in ((EXPERTS, WARPS), (SMALL_EXPERTS, SMALL_WARPS)):
    if _experts > 32 * _warps or not 1 <= _warps <= 32:
        raise ValueError(
            f"the CTA has {_warps} warps; it needs a thread for each of {_experts} experts, and at most 1024"
        )
