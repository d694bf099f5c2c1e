"""Tile scheduler that deals out full tiles and half tiles apart, so that all CTAs get as many of each, or one more.

A tile with at most 64 rows has half the multiplications of a full one. In a group of 129 to 192 rows both kinds
alternate, and many GPUs have an even number of SMs: if tiles were dealt out round robin, half of the CTAs would get all
full ones. Here CTA i of n gets the full tiles i, i + n, ... and the half tiles n - 1 - i, 2 n - 1 - i, ..., and takes
them in the order of the groups, so that CTAs that run at the same time still share weights in the L2 cache.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, int32, uint32

from moe_numba.grouped_gemm.block_scaled.config import BLOCK_M, BOX_ROWS
from moe_numba.grouped_gemm.common.scheduler import (
    TileInfo,
    divide,
    find_group,
    make_count_tiles,
    make_group_rows,
    num_tiles,
)


class _Offsets(NamedTuple):
    """What `make_count_tiles` needs of a layout."""

    threads: int
    warp_sums_offset: int
    first_tile_offset: int


@cuda.jit(device=True)
def half_tiles(rows):
    """Return whether the last tile of ``rows`` rows has at most 64, as 0 or 1."""
    left = int32(rows & (BLOCK_M - 1))
    return int32(1 if (left > 0) & (left <= BOX_ROWS) else 0)


@cuda.jit(device=True)
def full_tiles(rows):
    """Return the other tiles of ``rows`` rows."""
    return int32(num_tiles(rows, BLOCK_M) - half_tiles(rows))


@cuda.jit(device=True)
def full_tiles_of_group(rows, n_tiles):
    """Return the full tiles of a group of ``rows`` rows."""
    return int32(full_tiles(rows) * n_tiles)


@cuda.jit(device=True)
def half_tiles_of_group(rows, n_tiles):
    """Return the half tiles of a group of ``rows`` rows."""
    return int32(half_tiles(rows) * n_tiles)


@cuda.jit(device=True)
def share(tiles, first):
    """Return how many of ``tiles`` tiles are ``first``, ``first`` plus the number of CTAs, and so on."""
    ctas = int32(cuda.gridDim.x)
    return divide(int32(tiles - first + ctas - 1), ctas) if tiles > first else int32(0)


@cuda.jit(device=True)
def first_of_cta():
    """Return the number of a CTA's first tile, among its own."""
    return int32(0)


@cuda.jit(device=True)
def next_of_cta(number):
    """Return the number of a CTA's tile after this one."""
    return int32(number + 1)


@cuda.jit(device=True)
def first_walk():
    """Return the numbers of a CTA's first full tile and of its first half tile."""
    return int32(cuda.blockIdx.x), int32(cuda.gridDim.x - 1 - cuda.blockIdx.x)


@cache
def make_balanced_tiles(config, layout):
    """Make ``count_tiles`` and ``look_up_tile``.

    ``count_tiles(smem, problem, n_tiles)`` returns the number of this CTA's tiles; all threads must call it.
    ``info, shares_weight, walk = look_up_tile(smem, problem, number, walk)`` returns the next one of them, from
    ``first_walk()`` on; behind the last one, any.
    """
    first_full, first_half, total = layout.first_tile_offset, layout.first_half_tile_offset, layout.total_offset
    of_halves = _Offsets(layout.threads, layout.warp_sums_offset, first_half)
    count_full = make_count_tiles(config, layout, full_tiles_of_group)
    count_half = make_count_tiles(config, of_halves, half_tiles_of_group)
    group_rows = make_group_rows(config.row_layout)

    @cuda.jit(device=True)
    def count_tiles(smem, problem, n_tiles):
        full, half = count_full(smem, problem, n_tiles), count_half(smem, problem, n_tiles)
        if cuda.threadIdx.x == 0:
            smem.i32[uint32(total)] = full
        walk = first_walk()
        return int32(share(full, walk[0]) + share(half, walk[1]))

    @cuda.jit(device=True)
    def look_up_tile(smem, problem, number, walk):
        full, half = walk
        g, g_half = (
            find_group(smem.i32, first_full, problem.groups, full),
            find_group(smem.i32, first_half, problem.groups, half),
        )
        is_half = (g_half < g) | (full >= smem.i32[uint32(total)])
        g = g_half if is_half else g
        first, count = group_rows(problem, g)
        full_of_group = full_tiles(count)
        if is_half:
            n_tile, m_tile = int32(half - smem.i32[uint32(first_half + g)]), full_of_group
            half = int32(half + cuda.gridDim.x)
        else:
            number_in_group = int32(full - smem.i32[uint32(first_full + g)])
            n_tile = divide(number_in_group, max(full_of_group, int32(1)))
            m_tile = int32(number_in_group - n_tile * full_of_group)
            full = int32(full + cuda.gridDim.x)
        begin = int32(m_tile * BLOCK_M)
        info = TileInfo(g, int32(first + begin), int32(min(count - begin, BLOCK_M)), int32(BLOCK_M), n_tile)
        return info, False, (full, half)

    return count_tiles, look_up_tile
