"""Sizes of the lesson "A Hopper GEMM": change them here. Recorded times belong to M, N and K."""

M, N, K = 4096, 4096, 7168  # D is M x N; of the times
SMALL_M, SMALL_N, SMALL_K = 256, 512, 896  # of what the simulator runs, and counts
SMALL_SMS = 2  # CTAs of a persistent kernel in the simulator

ROWS = 128  # of A in a tile: 64 for each of two warpgroups
BLOCK_K = 128  # elements of k in a stage, one byte each
WARPGROUP_BYTES = 64 * BLOCK_K  # the rows of A of a warpgroup in a stage
A_BYTES = ROWS * BLOCK_K  # A in a stage; B follows
BARRIER_BYTES = 1024  # behind the last stage, so that what follows is aligned to 1024 bytes
BUFFER_BYTES = 16 * 128  # of a warp's 16 rows, 64 columns of bfloat16 each
FREE, WRITTEN = 0, 1  # places of a TMA store: before a warp writes its buffer, and after it
MMA_WARPS = 8  # two warpgroups that multiply

for _m, _n, _k in ((M, N, K), (SMALL_M, SMALL_N, SMALL_K)):
    if _m % (2 * ROWS) or _n % 256 or _k % BLOCK_K:
        raise ValueError(f"M, N, K are {_m}, {_n}, {_k}; they must be multiples of {2 * ROWS}, 256 and {BLOCK_K}")
