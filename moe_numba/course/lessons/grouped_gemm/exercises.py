"""Exercises of notebook 07, on the grouped GEMM."""

import numpy as np

from moe_numba import simulator  # noqa: F401  before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.exercises import Exercise
from moe_numba.course.grader import Run, function_test, kernel_test
from moe_numba.ptx.warp import FULL_MASK

# 1: coalesced loads


@cuda.jit
def one_token(x, weight, y, k):
    lane, first = int32(cuda.threadIdx.x), int32(32 * cuda.blockIdx.x)
    own = float32(0)
    for i in range(32):
        total = float32(0)
        for j in range(lane, k, 32):
            total += x[j] * weight[first + i, j]
        for r in range(5):
            total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << r)
        own = total if lane == i else own
    y[first + lane] = own


def _gemv(n, k):
    x, weight = (np.arange(k) % 5).astype(np.float32), (np.arange(n * k) % 7).reshape(n, k).astype(np.float32)
    arguments = {"x": x, "weight": weight, "y": np.full(n, np.nan, np.float32), "k": k}
    return Run((n // 32, 32), arguments, {"y": weight @ x}, f"n = {n}, k = {k}")


_MOST_SECTORS = 2 * 32 * 96 * 4 // 32 + 32  # those of weight, and those of x again for each row


# 2: stages that hide a latency


def fewest_stages(latency, iteration):
    return 1 + -(-latency // iteration)


_PIPELINES = (1400, 512), (1000, 500), (600, 1000), (1300, 300)


# 3: tiles of groups


@cuda.jit
def scale_groups(x, y_scale, seqlens, y):
    thread, tile = int32(cuda.threadIdx.x), int32(cuda.blockIdx.x)
    g, first, before = int32(0), int32(0), int32(0)
    while g < seqlens.shape[0]:
        tiles = (seqlens[g] + 3) // 4
        if tile < before + tiles:
            row = 4 * (tile - before) + thread
            if row < seqlens[g]:
                y[first + row] += x[first + row] * y_scale[g]
            tile += cuda.gridDim.x
        else:
            first += seqlens[g]
            before += tiles
            g += 1


def _groups(*seqlens):
    x, y_scale = np.arange(1, sum(seqlens) + 1, dtype=np.float32), np.array([1, 10, 100, 1000], np.float32)
    y = np.full(len(x), 0.5, np.float32)
    arguments = {"x": x, "y_scale": y_scale, "seqlens": np.array(seqlens, np.int32), "y": y}
    return Run((2, 4), arguments, {"y": y + x * np.repeat(y_scale, seqlens)}, f"seqlens {list(seqlens)}")


# 4: bands of tiles


def in_bands(tile, m_tiles, n_tiles):
    band, tile = divmod(tile, 8 * n_tiles)
    n, m = divmod(tile, min(8, m_tiles - 8 * band))
    return 8 * band + m, n


_TILES = [
    (tile, m_tiles, n_tiles)
    for m_tiles, n_tiles in ((8, 3), (16, 4), (19, 5), (3, 2))
    for tile in range(m_tiles * n_tiles)
]


EXERCISES = {
    1: Exercise(
        "a kernel that computes 32 elements of y with one warp, and whose loads are coalesced",
        kernel_test(_gemv(32, 32), _gemv(32, 96), at_most={"sectors per load": 4, "loaded sectors": _MOST_SECTORS}),
        "Let the 32 lanes load 32 consecutive elements of one row at a time. Each row then needs a sum over the lanes: "
        "cuda.shfl_xor_sync.",
        one_token,
    ),
    2: Exercise(
        "a function of the latency of a copy and the time of an iteration, both in clocks, that returns a number of "
        "stages",
        function_test(fewest_stages, _PIPELINES),
        "One stage is being multiplied. How many iterations pass between the issue of a copy and its use?",
        fewest_stages,
    ),
    3: Exercise(
        "a kernel that adds each scaled row of x to y once",
        kernel_test(_groups(5, 0, 9, 3), _groups(0, 2, 2, 7), _groups(4, 8, 1, 0), seeds=4),
        "How many tiles has a group of 5 rows? Which rows does the last of them have, and which of them are the "
        "group's?",
        scale_groups,
    ),
    4: Exercise(
        "a function of tile, m_tiles and n_tiles that returns (m, n)",
        function_test(in_bands, _TILES),
        "A whole band has 8 * n_tiles tiles: divmod twice. How many token tiles has the last band?",
        in_bands,
    ),
}
