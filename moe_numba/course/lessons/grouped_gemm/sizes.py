"""Sizes of the lesson "Grouped GEMM": change them here. Recorded times belong to the first two lines."""

GROUPS, N, K = 32, 4096, 7168  # the gate and up projections of DeepSeek-V3's experts, on one of eight GPUs
FEW, ROWS, MANY = 32, 2048, 8192  # rows of all groups together; the steps are timed with ROWS
SMALL_LENGTHS = (40, 0, 200, 9)  # rows of each group, of what the simulator runs, and counts
SMALL_N, SMALL_K = 256, 384
SMALL_SMS = 2  # CTAs in the simulator

TILE_N = 128  # rows of weight in a tile: 64 for each of two warpgroups
BLOCK_K = 128  # elements of k in a stage, one byte each
W_BYTES = TILE_N * BLOCK_K  # weights in a stage; rows of x follow
WARPGROUP_BYTES = 64 * BLOCK_K  # 64 rows of wgmma's first operand
MMA_WARPS = 8  # two warpgroups that multiply
THREADS = 32 * MMA_WARPS + 128  # and one of the producer
HEAD_BYTES = 2048  # behind the stages: their barriers, and the table of the groups' first tiles
TABLE = 64  # where that table begins, in units of four bytes
MAP_BYTES = 128  # of a tensor map
MAPS_BYTES = 2 * MAP_BYTES  # of a group's maps, of x and of y
ROW_BYTES = 128  # 64 columns of bfloat16: a row of y in shared memory
BAND = 4  # tiles of rows of a band
CHUNK = 16  # rows of y that a warpgroup stores at once
BUFFER_BYTES = CHUNK * ROW_BYTES

if GROUPS > 32 * 8 or len(SMALL_LENGTHS) > 32 * 8:
    raise ValueError(f"there are {GROUPS} groups; the table in shared memory has room for 256")
for _n, _k in ((N, K), (SMALL_N, SMALL_K)):
    if _n % TILE_N or _k % BLOCK_K:
        raise ValueError(f"N and K are {_n} and {_k}; they must be multiples of {TILE_N} and {BLOCK_K}")
