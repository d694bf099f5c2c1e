"""The document's two schedulers (hpc-ops'): which tile block number ``block`` computes. Host and device share them.

Tiles of tokens are ``m``, counted inside a group; tiles of the weights' rows are ``n``, of which there are ``across``.
A block that is done adds the grid's size to its number and asks again. ``g == groups`` says that nothing is left.
"""

from types import SimpleNamespace

from numba import cuda, int32

from moe_numba.grouped_gemm import schedule


def tokens_of_tile(average):
    """The document's kTileM: tokens of a tile, by the average number of tokens in a group."""
    return next((tokens for tokens in (16, 32, 48) if average <= tokens), 64)


def _functions(jit, arithmetic):
    divide, group_of = arithmetic.divide, arithmetic.group_of

    @jit
    def horizontal(tiles, at, groups, across, block, g, before):
        """``g, before, m, n``: neighbours share tokens; ``tiles[at + g]`` are group g's tiles of tokens.

        ``g`` and ``before``, the tiles of the groups before it, are those of the block's last tile, at first 0 and 0:
        the search through the groups goes on from there.
        """
        number = divide(block, across)
        while g < groups and before + tiles[at + g] <= number:
            before = int32(before + tiles[at + g])
            g = int32(g + 1)
        return g, before, int32(number - before), int32(block - number * across)

    @jit
    def vertical(first_tiles, at, groups, across, block, g, before):
        """``g, before, m, n``: neighbours share weights; ``first_tiles[at + g]`` are the tiles of the groups before g.

        Behind the last group stands how many tiles of tokens there are. Nothing is remembered from tile to tile.
        """
        total = int32(first_tiles[at + groups])
        n = divide(block, total) if total > 0 else int32(across)
        if n >= across:
            return int32(groups), before, int32(0), int32(0)
        number = int32(block - n * total)
        found = group_of(first_tiles, at, groups, number)
        return found, before, int32(number - first_tiles[at + found]), n

    return SimpleNamespace(horizontal=horizontal, vertical=vertical)


host = _functions(lambda function: function, schedule.host)
device = _functions(cuda.jit(device=True), schedule.device)


def use_horizontal(n, k):
    """The document's choice: small matrices go horizontally, large ones vertically."""
    return k <= 1024 or n <= 1024
