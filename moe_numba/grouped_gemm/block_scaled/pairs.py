"""Tile scheduler for clusters of two CTAs: maps pairs of tiles to clusters.

Tiles have up to 128 rows of x. The two tiles of a pair are either

- two tiles of rows with the same columns. They share the weights: each CTA loads half of them for both. Or
- for the last rows of a group, if one tile holds them, two neighbouring tiles of columns, so that neither CTA idles.

Without pairs, CTAs that use the same weights drift apart, because tiles take different times. The weights are then
evicted from L2 between their uses and read from DRAM again.
"""

from functools import cache

from numba import cuda, int32, uint32

from moe_numba.grouped_gemm.common.scheduler import TileInfo, divide, find_group, make_get_tile, make_group_rows
from moe_numba.ptx.cluster import cluster_ctarank

BLOCK_ROWS = 64  # rows of wgmma's M: rows are split between the CTAs of a pair in units of it
TILE_BLOCKS = 2  # such blocks in a tile


@cuda.jit(device=True)
def count_pairs(rows):
    """Return the pairs that share weights, for each tile of columns, and the blocks of rows that are left."""
    blocks = int32((rows + BLOCK_ROWS - 1) // BLOCK_ROWS)
    sharing = divide(blocks, int32(2 * TILE_BLOCKS))
    left = int32(blocks - 2 * TILE_BLOCKS * sharing)
    if left > TILE_BLOCKS:
        sharing, left = int32(sharing + 1), int32(0)
    return sharing, left


@cuda.jit(device=True)
def pairs_of_two_columns(rows):
    """Return the pairs of two neighbouring tiles of columns."""
    sharing, left = count_pairs(rows)
    return int32(2 * sharing + (1 if left > 0 else 0))


@cuda.jit(device=True)
def pairs_of_group(rows, n_tiles):
    """Return the pairs of a group of ``rows`` rows."""
    return int32(pairs_of_two_columns(rows) * ((n_tiles + 1) >> 1))


@cache
def make_look_up_tile(config, layout):
    """Make ``tile, shares_weight, walk = look_up_tile(smem, problem, number, walk)``, for after ``count_tiles``.

    In a cluster of two CTAs it returns this CTA's tile of pair ``number``. A tile of columns may then lie beyond the
    weight, if their number is odd. Pairs with the same columns follow one another. ``walk`` is for ``balanced.py``.
    """
    pairs, first_pair, tile_rows = config.cluster_size == 2, layout.first_tile_offset, TILE_BLOCKS * BLOCK_ROWS
    get_tile, group_rows = make_get_tile(config, layout, even=False), make_group_rows(config.row_layout)

    @cuda.jit(device=True)
    def look_up_tile(smem, problem, number, walk):
        if not pairs:
            return get_tile(smem, problem, number), False, walk
        g = find_group(smem.i32, first_pair, problem.groups, number)
        first, count = group_rows(problem, g)
        sharing, left = count_pairs(count)
        rank = int32(cluster_ctarank())
        pair = int32(number - smem.i32[uint32(first_pair + g)])
        of_two_columns = pairs_of_two_columns(count)
        n_pair = divide(pair, of_two_columns)
        pair = int32(pair - n_pair * of_two_columns)
        n_tile, shares_weight = int32(2 * n_pair), pair < 2 * sharing
        blocks = int32((count + BLOCK_ROWS - 1) // BLOCK_ROWS)
        if shares_weight:
            if pair >= sharing:
                n_tile, pair = int32(n_tile + 1), int32(pair - sharing)
            begin, end = int32(2 * TILE_BLOCKS * pair), int32(min(2 * TILE_BLOCKS * (pair + 1), blocks - left))
            middle = int32((begin + end + 1) >> 1)
            if rank == 0:
                end = middle
            else:
                begin = middle
        else:
            begin, end, n_tile = int32(blocks - left), blocks, int32(n_tile + rank)
        begin, end = int32(begin * BLOCK_ROWS), int32(min(end * BLOCK_ROWS, count))
        return TileInfo(g, int32(first + begin), int32(end - begin), int32(tile_rows), n_tile), shares_weight, walk

    return look_up_tile
