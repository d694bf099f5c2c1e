"""Which tile a block computes next: arithmetic that host and device share, so that it can be tested and drawn.

A group's tokens are cut into tiles of at most so many, all alike but the last, and a tile into parts. A tile of the
output is a tile of tokens by 128 of the weights' rows. Tiles are numbered through: group by group, within a group by
the weights' rows, and tokens first, so that blocks which run at the same time share what they read.
"""

from types import SimpleNamespace

from numba import cuda, int32, uint32

TILE_ROWS = 128  # of the weights


def _functions(jit):
    @jit
    def divide(a, b):
        """a // b of two numbers that are not negative, in 32 bits: a division of 64 is a call."""
        return int32(uint32(uint32(a) // uint32(b)))

    @jit
    def tiles_of(rows, most):
        """How many tiles of at most ``most`` tokens."""
        return divide(rows + most - 1, most)

    @jit
    def part_of(rows, tiles, parts):
        """Tokens of a part of a tile: as even as multiples of 8 allow, which are a multiplication's smallest step."""
        each = divide(rows + tiles * parts - 1, tiles * parts)
        return int32((each + 7) & -8)

    @jit
    def group_of(first_tiles, at, groups, tile):
        """The group of a tile, where ``first_tiles[at + g]`` is the first tile of group g: the last that has begun.

        A group without tokens begins where the next one does, and is passed over.
        """
        low, high = int32(0), int32(groups - 1)
        while low < high:
            middle = int32((low + high + 1) >> 1)
            if first_tiles[uint32(at + middle)] <= tile:
                low = middle
            else:
                high = int32(middle - 1)
        return low

    return SimpleNamespace(divide=divide, tiles_of=tiles_of, part_of=part_of, group_of=group_of)


host, device = _functions(lambda function: function), _functions(cuda.jit(device=True))
