"""Exercises of notebook 06, on the grouped GEMM."""

from numbers import Integral

import numpy as np

from moe_numba import simulator  # before numba

# isort: split
from numba import cuda, float32, int32

from moe_numba.course.exercises import Exercise
from moe_numba.ptx.warp import FULL_MASK
from moe_numba.simulator.profiler.report import source_text

_SEEDS = 4


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


def _loads_whole_sectors(kernel):
    for n, k in ((32, 32), (64, 96)):
        x, weight = (np.arange(k) % 5).astype(np.float32), (np.arange(n * k) % 7).reshape(n, k).astype(np.float32)
        y, wanted = np.full(n, np.nan, np.float32), weight @ x
        kernel[n // 32, 32](x, weight, y, k)
        if (wrong := np.flatnonzero(y != wanted)).size:
            return (
                f"n = {n}, k = {k}: y[{wrong[0]}] is {y[wrong[0]]:g}, not {wanted[wrong[0]]:g}; {wrong.size} of {n} "
                "are wrong"
            )
    with simulator.profile() as profile:
        kernel[n // 32, 32](x, weight, y, k)
    loads, held = profile.kernels[0].total, weight.nbytes // 32
    most = 2 * held + 64  # x may be loaded again for each row
    if loads.global_load_sectors > most:
        return (
            f"the result is right, but {loads.global_load_requests} load requests touch {loads.global_load_sectors} "
            f"sectors of 32 bytes; weight has {held}, and at most {most} are allowed"
        )
    for line in profile.kernels[0].lines:
        if line.global_load_sectors > 4 * line.global_load_requests:
            return (
                f"the result is right, but the loads in the line `{source_text(line).strip()}` touch "
                f"{line.global_load_sectors / line.global_load_requests:.3g} sectors of 32 bytes on average, not 4"
            )
    return None


# 2: stages that hide a latency


def fewest_stages(latency, iteration):
    return 1 + -(-latency // iteration)


def _hides_the_latency(answer):
    for latency, iteration in ((1400, 512), (1000, 500), (600, 1000), (1300, 300)):
        found, wanted = answer(latency, iteration), fewest_stages(latency, iteration)
        given = f"latency {latency}, {iteration} clocks per iteration"
        if found is ...:
            return "not answered yet: return a number of stages"
        if not isinstance(found, Integral):
            return f"{given}: {found!r} is no integer"
        ahead = int(found) - 1
        if found < wanted:
            return f"{given}: with {found} stages a copy has {ahead} iterations, {ahead * iteration} clocks, to arrive"
        if found > wanted:
            return f"{given}: {found} stages hide the latency, but so do {wanted}"
    return None


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


_BEFORE = 0.5  # in y


def _adds_each_row_once(kernel):
    for seqlens in ([5, 0, 9, 3], [0, 2, 2, 7], [4, 8, 1, 0]):
        group = np.repeat(np.arange(4), seqlens)
        x, y_scale = np.arange(1, len(group) + 1, dtype=np.float32), np.array([1, 10, 100, 1000], np.float32)
        for seed in range(_SEEDS):
            y = np.full(len(x), _BEFORE, np.float32)
            try:
                with simulator.seed(seed):
                    kernel[2, 4](x, y_scale, np.array(seqlens, np.int32), y)
            except simulator.DataRace as error:
                where = str(error).partition("; nothing orders")[0]
                return f"seqlens {seqlens}: two tiles update the same row of y (DataRace: {where})"
            if (wrong := np.flatnonzero(y != (wanted := _BEFORE + x * y_scale[group]))).size:
                row = wrong[0]
                return (
                    f"seqlens {seqlens}: row {row} of y, in group {group[row]}, was {_BEFORE} and is {y[row]:g}, not "
                    f"{wanted[row]:g}"
                )
    return None


# 4: bands of tiles


def in_bands(tile, m_tiles, n_tiles):
    band, tile = divmod(tile, 8 * n_tiles)
    n, m = divmod(tile, min(8, m_tiles - 8 * band))
    return 8 * band + m, n


def _walks_in_bands(answer):
    for m_tiles, n_tiles in ((8, 3), (16, 4), (19, 5), (3, 2)):
        order, seen = [], {}
        for tile in range(m_tiles * n_tiles):
            found = answer(tile, m_tiles, n_tiles)
            if found is ...:
                return "not answered yet: return a pair (m, n)"
            if not isinstance(found, (tuple, list)) or len(found) != 2:
                return f"tile {tile} becomes {found!r}; return a pair (m, n)"
            order.append(tuple(found))
        named = f"m_tiles {m_tiles}, n_tiles {n_tiles}"
        for tile, (m, n) in enumerate(order):
            if not (0 <= m < m_tiles and 0 <= n < n_tiles):
                return f"{named}: tile {tile} becomes (m, n) = {(m, n)}, which does not exist"
            if (m, n) in seen:
                return f"{named}: tiles {seen[m, n]} and {tile} both become (m, n) = {(m, n)}"
            seen[m, n] = tile
            if (wanted := in_bands(tile, m_tiles, n_tiles)) != (m, n):
                return f"{named}: tile {tile} becomes (m, n) = {(m, n)}, not {wanted}"
    return None


EXERCISES = {
    1: Exercise(
        "a kernel that computes 32 elements of y with one warp, and whose loads are coalesced",
        _loads_whole_sectors,
        "Let the 32 lanes load 32 consecutive elements of one row at a time. Each row then needs a sum over the lanes: "
        "cuda.shfl_xor_sync.",
        one_token,
    ),
    2: Exercise(
        "a function of the latency of a copy and the time of an iteration, both in clocks, that returns a number of "
        "stages",
        _hides_the_latency,
        "One stage is being multiplied. How many iterations pass between the issue of a copy and its use?",
        fewest_stages,
    ),
    3: Exercise(
        "a kernel that adds each scaled row of x to y once",
        _adds_each_row_once,
        "How many tiles has a group of 5 rows? Which rows does the last of them have, and which of them are the "
        "group's?",
        scale_groups,
    ),
    4: Exercise(
        "a function of tile, m_tiles and n_tiles that returns (m, n)",
        _walks_in_bands,
        "A whole band has 8 * n_tiles tiles: divmod twice. How many token tiles has the last band?",
        in_bands,
    ),
}
