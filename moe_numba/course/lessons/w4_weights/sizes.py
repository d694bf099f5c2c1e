"""Sizes of the lesson "4-bit weights": change them here. Recorded times belong to EXPERTS, N and K."""

EXPERTS, N, K = 32, 4096, 7168  # of the times: a weight [N, K] for each expert
SMALL_EXPERTS, SMALL_N, SMALL_K = 2, 256, 256  # of what the simulator runs, and counts
SMALL_SMS = 1  # CTAs in the simulator

TOKENS = 8  # of an expert: a matrix instruction has at least 8 columns
TILE = 64  # rows, and elements of k, of a weight tile
CODE_BYTES, SCALE_BYTES = 2048, 128  # of a weight tile
TILE_BYTES = CODE_BYTES + SCALE_BYTES
STAGE_TILES = 2  # weight tiles along k in a stage, for each warpgroup
X_BYTES = TOKENS * 2 * TILE  # tokens of a weight tile's elements of k, in bfloat16
EXPONENT_OFFSET, RESULT_EXPONENT = 94, 32  # codes are scaled by 2**(offset - 127) too little, and y by 2**32 at the end

for _n, _k in ((N, K), (SMALL_N, SMALL_K)):
    if _n % 256 or _k % (STAGE_TILES * TILE):
        raise ValueError(f"N, K are {_n}, {_k}; they must be multiples of 256 and {STAGE_TILES * TILE}")
