"""hpc-ops' two tile schedulers, shared by host and device code.

``m`` counts tiles of rows of x within a group, ``n`` tiles of rows of weight, of which each group has ``n_tiles``. A
persistent CTA starts with the tile of its own number, and adds the grid size for each further tile.
"""

from types import SimpleNamespace

from numba import cuda, int32

from moe_numba.grouped_gemm.common import scheduler


def select_tile_m(average: int) -> int:
    """Return hpc-ops' kTileM, rows of x in a tile, for an average number of rows per group."""
    return next((tile_m for tile_m in (16, 32, 48) if average <= tile_m), 64)


def _functions(jit, arithmetic):
    divide, find_group = arithmetic.divide, arithmetic.find_group

    @jit
    def horizontal(tiles, offset, groups, n_tiles, tile, g, tiles_before):
        """Return ``g, tiles_before, m, n``; neighbouring tiles share rows of x. ``g == groups``: no tile is left.

        ``tiles[offset + g]`` is group g's number of tiles along m. ``g`` and ``tiles_before``, the tiles of the groups
        before g, are those of the CTA's previous tile (at first 0): the linear search continues there.
        """
        number = divide(tile, n_tiles)
        while g < groups and tiles_before + tiles[offset + g] <= number:
            tiles_before = int32(tiles_before + tiles[offset + g])
            g = int32(g + 1)
        return g, tiles_before, int32(number - tiles_before), int32(tile - number * n_tiles)

    @jit
    def vertical(first_tiles, offset, groups, n_tiles, tile, g, tiles_before):
        """Return ``g, tiles_before, m, n``; neighbouring tiles share rows of weight. ``g == groups``: no tile is left.

        ``first_tiles[offset + g]`` is the number of tiles along m in the groups before g, and the entry behind the last
        group is their total. The binary search needs no state, so ``g`` is ignored and ``tiles_before`` is returned.
        """
        total = int32(first_tiles[offset + groups])
        n = divide(tile, total) if total > 0 else int32(n_tiles)
        if n >= n_tiles:
            return int32(groups), tiles_before, int32(0), int32(0)
        number = int32(tile - n * total)
        found = find_group(first_tiles, offset, groups, number)
        return found, tiles_before, int32(number - first_tiles[offset + found]), n

    return SimpleNamespace(horizontal=horizontal, vertical=vertical)


host = _functions(lambda function: function, scheduler.host)
device = _functions(cuda.jit(device=True), scheduler.device)


def use_horizontal(n: int, k: int) -> bool:
    """Return whether hpc-ops uses the horizontal scheduler, which it does for small weights."""
    return k <= 1024 or n <= 1024
