"""Sizes of the lesson "Block scales": change them here. Recorded times belong to M, N and K."""

M, N, K = 4096, 4608, 7168  # D is M x N; of the times
SMALL_M, SMALL_N, SMALL_K = 256, 384, 384  # of what the simulator runs, and counts
SMALL_SMS = 2  # CTAs in the simulator

ROWS = 128  # of A in a tile: 64 for each of two warpgroups
BLOCK_K = 128  # elements of k in a stage, one byte each, and in a block of scales
WARPGROUP_BYTES = 64 * BLOCK_K  # the rows of A of a warpgroup in a stage
A_BYTES = ROWS * BLOCK_K  # A in a stage; B follows, and then the scales
SCALE_BYTES = 2048  # scales in a stage: up to four floats for each row of a tile
MMA_WARPS = 8  # two warpgroups that multiply
SCALE_WARPS = 2  # warps that write the scales of a stage, 64 rows each
W_SCALES = 128  # scales of w begin here among the floats of a stage, behind those of x

for _m, _n, _k in ((M, N, K), (SMALL_M, SMALL_N, SMALL_K)):
    if _m % ROWS or _n % 384 or _k % BLOCK_K:
        raise ValueError(f"M, N, K are {_m}, {_n}, {_k}; they must be multiples of {ROWS}, 384 and {BLOCK_K}")
