"""Tile scheduler: maps the tiles of all groups to persistent CTAs.

The rows of a group are split into tiles of at most ``block_m`` rows, evenly or not, and a tile into subtiles. A tile
of the output is a tile of rows by a number of rows of weight, such as 128. Tiles are numbered group by group,
within a group by rows of weight, and rows of x innermost, so that CTAs that run at the same time share x and weight in
the L2 cache.
"""

from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

from numba import cuda, int32, uint32

from moe_numba.ptx.cluster import cluster_ctarank
from moe_numba.ptx.warp import warp_inclusive_scan


class Problem(NamedTuple):
    """Group sizes, as pointers to global memory and integers; see :func:`make_group_rows`."""

    lengths: Any  # int32 pointer
    starts: Any  # int32 pointer
    groups: Any
    total_rows: Any
    capacity: Any


class TileInfo(NamedTuple):
    """A tile: rows ``row`` to ``row + rows`` of x by tile ``n_tile`` of the rows of a weight."""

    group: Any
    row: Any
    rows: Any
    subtile_rows: Any
    n_tile: Any


def _functions(jit):
    """Compile the arithmetic that kernels and host code share; ``jit`` makes a function of either."""

    @jit
    def divide(a, b):
        """``a // b`` of two non-negative integers in 32 bits; a 64-bit division would be a function call."""
        return int32(uint32(uint32(a) // uint32(b)))

    @jit
    def num_tiles(rows, block_m):
        """Number of tiles of at most ``block_m`` rows."""
        return divide(rows + block_m - 1, block_m)

    @jit
    def subtile_size(rows, tiles, m_subtiles):
        """Rows of a subtile if ``rows`` are split evenly, rounded up to 8, the granularity of wgmma's N."""
        size = divide(rows + tiles * m_subtiles - 1, tiles * m_subtiles)
        return int32((size + 7) & -8)

    @jit
    def find_group(first_tiles, offset, groups, tile):
        """Binary search for the group of a tile; ``first_tiles[offset + g]`` is the first tile of group g.

        It returns the last group that begins at or before ``tile``, so empty groups are skipped.
        """
        low, high = int32(0), int32(groups - 1)
        while low < high:
            middle = int32((low + high + 1) >> 1)
            if first_tiles[uint32(offset + middle)] <= tile:
                low = middle
            else:
                high = int32(middle - 1)
        return low

    return SimpleNamespace(divide=divide, num_tiles=num_tiles, subtile_size=subtile_size, find_group=find_group)


host, device = _functions(lambda function: function), _functions(cuda.jit(device=True))
divide, num_tiles, subtile_size, find_group = device.divide, device.num_tiles, device.subtile_size, device.find_group


@cache
def make_group_rows(row_layout):
    """Make ``first, count = group_rows(problem, group)``, clamped to the ``total_rows`` rows of x.

    ``first`` is clamped on its own, and then ``count`` to the rows from there on: a group that begins before row 0 is
    moved, not cut.

    - "lengths": ``lengths`` has the number of rows of each group, ``starts`` its first row.
    - "offsets": ``lengths`` has the end of each group.
    - "masked": ``lengths`` has the number of rows, and group g begins at row ``g * capacity``.
    """

    @cuda.jit(device=True)
    def group_rows(problem, group):
        if row_layout == "offsets":
            first = problem.lengths[group - 1] if group else int32(0)
            count = int32(problem.lengths[group] - first)
        elif row_layout == "masked":
            first, count = int32(group * problem.capacity), int32(min(problem.lengths[group], problem.capacity))
        else:
            first, count = problem.starts[group], problem.lengths[group]
        first = int32(min(max(first, int32(0)), problem.total_rows))
        return first, int32(min(max(count, int32(0)), int32(problem.total_rows - first)))

    return group_rows


@cache
def make_tiles_of_group(block_m):
    """Make ``tiles = tiles_of_group(rows, n_tiles)``: tiles of at most ``block_m`` rows."""

    @cuda.jit(device=True)
    def tiles_of_group(rows, n_tiles):
        return int32(num_tiles(rows, block_m) * n_tiles)

    return tiles_of_group


@cache
def make_count_tiles(config, layout, tiles_of_group=None):
    """Make ``tiles = count_tiles(smem, problem, n_tiles)``, which all threads of a CTA must call.

    It writes the first tile of each group to shared memory (an exclusive prefix sum over the groups) and returns the
    total number of tiles. ``tiles_of_group(rows, n_tiles)`` returns the tiles of a group.
    """
    warp_sums, first_tile = layout.warp_sums_offset, layout.first_tile_offset
    tiles_of_group = tiles_of_group or make_tiles_of_group(config.block_m)
    group_rows, threads, warps = make_group_rows(config.row_layout), layout.threads, layout.threads // 32

    @cuda.jit(device=True)
    def count_tiles(smem, problem, n_tiles):
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        total = int32(0)
        for base in range(0, problem.groups, threads):
            g, count = int32(base + thread), int32(0)
            if g < problem.groups:
                _, rows = group_rows(problem, g)
                count = tiles_of_group(rows, n_tiles)
            inclusive = warp_inclusive_scan(count, lane)
            if lane == 31:
                smem.i32[uint32(warp_sums + warp)] = inclusive
            cuda.syncthreads()
            before, after = total, total
            for w in range(warps):
                warp_sum = smem.i32[uint32(warp_sums + w)]
                before = int32(before + warp_sum) if w < warp else before
                after = int32(after + warp_sum)
            if g < problem.groups:
                smem.i32[uint32(first_tile + g)] = int32(before + inclusive - count)
            total = after
            cuda.syncthreads()
        return total

    return count_tiles


@cache
def make_split_rows(config, even=True):
    """Make ``tiles, subtile_rows = split_rows(count)``: the tiles of a group's rows, and the rows of a subtile.

    With ``even`` the rows are split evenly; otherwise all tiles but the last have ``block_m`` rows. Rows that fit into
    one subtile are not split into two.
    """
    m_subtiles, block_m, subtile_m = config.m_subtiles, config.block_m, config.subtile_m

    @cuda.jit(device=True)
    def split_rows(count):
        tiles = num_tiles(count, block_m)
        subtile_rows = subtile_size(count, tiles, m_subtiles) if even else int32(block_m)
        if m_subtiles == 2 and count <= subtile_m:
            subtile_rows = subtile_size(count, tiles, 1)
        return tiles, subtile_rows

    return split_rows


@cache
def make_get_tile(config, layout, even=True):
    """Make ``tile_info = get_tile(smem, problem, tile)``, which looks up a tile after ``count_tiles``.

    ``even`` is as for :func:`make_split_rows`.
    """
    first_tile, m_subtiles, cluster_size = layout.first_tile_offset, config.m_subtiles, config.cluster_size
    split_rows = make_split_rows(config, even)
    group_rows = make_group_rows(config.row_layout)

    @cuda.jit(device=True)
    def get_tile(smem, problem, tile):
        g = find_group(smem.i32, first_tile, problem.groups, tile)
        first, count = group_rows(problem, g)
        tiles, subtile_rows = split_rows(count)
        tile_in_group = int32(tile - smem.i32[uint32(first_tile + g)])
        n_tile = divide(tile_in_group, tiles)
        begin = int32(int32(tile_in_group - n_tile * tiles) * int32(subtile_rows * m_subtiles))
        if cluster_size == 2:
            n_tile = int32(2 * n_tile + int32(cluster_ctarank()))
        row, rows = int32(first + begin), int32(min(subtile_rows * m_subtiles, int32(count - begin)))
        return TileInfo(g, row, rows, subtile_rows, n_tile)

    return get_tile


@cache
def make_get_banded_tile(config, layout):
    """Make ``tile_info = get_tile(smem, problem, n_tiles, tile)``, which looks up a tile after ``count_tiles``.

    A group of many rows is split into bands of ``config.band_rows`` rows, which follow one another, so that the CTAs
    that run at the same time compute an area of the output that is about as wide as it is high. Within a band, rows of
    x are innermost. ``n_tiles`` counts tiles of columns, or pairs of them if a cluster has two CTAs.
    """
    first_tile, m_subtiles, cluster_size = layout.first_tile_offset, config.m_subtiles, config.cluster_size
    band_tiles, split_rows = max(config.band_rows // config.block_m, 1), make_split_rows(config)
    group_rows = make_group_rows(config.row_layout)

    @cuda.jit(device=True)
    def get_tile(smem, problem, n_tiles, tile):
        g = find_group(smem.i32, first_tile, problem.groups, tile)
        first, count = group_rows(problem, g)
        tiles, subtile_rows = split_rows(count)
        tile_rows = int32(subtile_rows * m_subtiles)
        tile_in_group = int32(tile - smem.i32[uint32(first_tile + g)])
        band = divide(tile_in_group, int32(band_tiles * n_tiles))
        tile_in_band = int32(tile_in_group - int32(band * band_tiles) * n_tiles)
        tiles_of_band = int32(min(int32(tiles - band * band_tiles), int32(band_tiles)))
        n_tile = divide(tile_in_band, tiles_of_band)
        m_tile = int32(int32(band * band_tiles) + int32(tile_in_band - n_tile * tiles_of_band))
        begin = int32(m_tile * tile_rows)
        if cluster_size == 2:
            n_tile = int32(2 * n_tile + int32(cluster_ctarank()))
        return TileInfo(g, int32(first + begin), int32(min(tile_rows, int32(count - begin))), subtile_rows, n_tile)

    return get_tile


@cache
def make_tile_loop(cluster_size):
    """Make ``first_tile()`` and ``next_tile(tile)`` of a persistent CTA; the CTAs of a cluster get the same number."""
    shift = cluster_size - 1

    @cuda.jit(device=True)
    def first_tile():
        return int32(cuda.blockIdx.x >> shift)

    @cuda.jit(device=True)
    def next_tile(tile):
        return int32(tile + int32(cuda.gridDim.x >> shift))

    return first_tile, next_tile
