"""What a kernel of this room is compiled for, and where its shared memory lies."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moe_numba.grouped_gemm.schedule import TILE_ROWS

LINE = 128  # bytes of k in a stage: a row of the swizzle, and 4 steps of a multiplication
WARPS = 12  # two groups of four that multiply, and four that load
THREADS = 32 * WARPS
MULTIPLIERS = 8
SCALERS = 3  # warps that bring factors, or rows chosen by an index, in turn
CHUNK = 16  # tokens that go through the staging at once
STAGING = 2 * CHUNK * LINE  # bytes of a multiplying warpgroup, through which its results become rows: two buffers
ACTIVATED = 32  # tokens that go through it at once to be activated
ROW = 2 * 2 * TILE_ROWS + 16  # bytes of a token's gate and up in the staging; 16 more, to fall on other banks


class Constants(NamedTuple):
    """Compile-time constants."""

    dtype: str = "e4m3"  # of x and weight; or "bf16"
    scaling: str = "tensor"  # "tensor": a factor a group; "block": 1 x 128 of x, 128 x 128 of weight; "none"
    tokens: int = 128  # most of a part
    parts: int = 1  # of a tile
    sizes: tuple = (128,)  # of multiplications, in tokens, descending; a part takes the smallest that holds it
    stages: int = 5
    rows: str = "lengths"  # where a group's tokens are: "lengths" and starts, "offsets" (ends), or "masked"
    groups: int = 512  # most
    activated: bool = False  # weights are gate and up, one above the other; what is written is silu(gate) * up, in FP8
    cluster: int = 1  # blocks that take neighbouring tiles of weights, and load their tokens together
    gather: bool = False  # a row of the product has its tokens from the row of x that an index names


@dataclass(frozen=True)
class Layout:
    """Shared memory, all of it dynamic, from an address that is a multiple of 1024 on.

    Nothing is static beside it: the linker does not promise a dynamic array's alignment behind static ones.
    """

    constants: Constants

    @property
    def part_bytes(self):
        return self.constants.tokens * LINE

    @property
    def box_tokens(self):
        """Tokens of one load: a part, or where two blocks share one part, a half of it."""
        return self.constants.tokens // (self.constants.cluster if self.constants.parts == 1 else 1)

    @property
    def products(self):
        """That a warpgroup adds up: of two parts, or of gate and up."""
        return 2 if self.constants.activated else self.constants.parts

    @property
    def x_at(self):
        """Of a stage: the tiles of weights come first."""
        return (2 if self.constants.activated else 1) * TILE_ROWS * LINE

    @cached_property
    def factor_pitch(self):
        """Floats from a quarter of a part's factors to the next, so that four quarters fall on different banks."""
        has = -(-self.constants.tokens // 16) * 4
        return has + 4 * (has % 16 == 0)

    @cached_property
    def stage_bytes(self):
        """A stage's tiles."""
        return self.x_at + self.constants.parts * self.part_bytes

    @property
    def tma_bytes(self):
        """What TMA brings of a stage."""
        return self.x_at if self.constants.gather else self.stage_bytes

    @cached_property
    def staging_at(self):
        return self.constants.stages * self.stage_bytes

    @cached_property
    def factors_at(self):
        """In floats; a stage has 4 quarters for each product."""
        return (self.staging_at + (ACTIVATED * ROW if self.constants.activated else 2 * STAGING)) // 4

    @cached_property
    def stage_factors(self):
        return 4 * self.factor_pitch * self.products if self.constants.scaling == "block" else 0

    @cached_property
    def full_at(self):
        """In barriers, of 8 bytes: a stage's data are there."""
        return -(-(self.factors_at + self.constants.stages * self.stage_factors) // 2)

    @cached_property
    def empty_at(self):
        """In barriers: a stage may be filled."""
        return self.full_at + self.constants.stages

    @cached_property
    def orders_at(self):
        """In integers, 4 for each stage: the tile whose first stage it is, as the loading thread tells the others."""
        return -(-2 * (self.empty_at + self.constants.stages) // 4) * 4

    @cached_property
    def sums_at(self):
        """In integers: each warp's part of the scan."""
        return self.orders_at + 4 * self.constants.stages

    @cached_property
    def tiles_at(self):
        """In integers: the first tile of each group, and behind the last how many there are."""
        return self.sums_at + WARPS

    @property
    def chosen_pitch(self):
        """Integers from a part's indices of rows to the other's: as many as lanes have, in whole rounds."""
        return -(-self.constants.tokens // 32) * 32

    @property
    def chosen(self):
        """Integers that a warp has for a tile's indices of rows."""
        return self.constants.parts * self.chosen_pitch if self.constants.gather else 0

    @cached_property
    def chosen_at(self):
        """In integers: what the warps have of them, which they read four at a time."""
        return -(-(self.tiles_at + self.constants.groups + 1) // 4) * 4

    @cached_property
    def bytes(self):
        return 4 * (self.chosen_at + SCALERS * self.chosen)
