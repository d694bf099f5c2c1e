"""Compile-time configuration and shared-memory layout of the grouped GEMM kernel for MXFP4 weights."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from moe_numba.grouped_gemm.config import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, EPILOGUE_BYTES, MAX_SHARED_BYTES
from moe_numba.grouped_gemm.packing_mxfp4 import UNIT, UNIT_BYTES


class Mxfp4Config(NamedTuple):
    """Compile-time configuration of the kernel: a tile has up to ``subtile_m`` rows of x by 64 rows of weight for each
    consumer warpgroup.
    """

    subtile_m: int = 32  # maximum rows of x in a tile
    mma_n: tuple[int, ...] = (32, 16, 8)  # wgmma N sizes, descending; a tile uses the smallest that holds its rows
    box_rows: int = 8  # rows of x that one TMA load copies
    stages: int = 9  # pipeline stages
    stage_units: int = 2  # units of weight along k in a stage, 64 elements of k each: 1 or 2
    warpgroups: int = 2  # consumer warpgroups: 2 or 4
    row_layout: str = "lengths"  # a group's rows: "lengths" and starts, "offsets" (group ends), or "masked"
    max_groups: int = 512
    gather: bool = False  # rows of x are read through an array of row indices
    activation: str = ""  # of gate and up, of which a unit has 32 rows each: "silu" or "swigluoai", or none
    alpha: float = 1.702  # of swigluoai
    limit: float = 7.0  # of swigluoai
    bias: str = ""  # dtype of a bias per row of weight: "bf16" or "f32", or none
    out_dtype: str = "bf16"  # "bf16" or "f32"
    accumulate: bool = False  # add to y, in f32
    scatter: bool = False  # rows of y are stored to the rows that an index array names
    row_weights: bool = False  # each row of y is multiplied by a factor
    overlap: bool = True  # decode registers of A while the previous wgmmas run

    @property
    def block_n(self) -> int:
        """Rows of weight in a tile."""
        return UNIT * self.warpgroups

    @property
    def columns(self) -> int:
        """Columns of y in a tile."""
        return self.block_n // 2 if self.activation else self.block_n

    # What the tile scheduler, the gather and the epilogue ask of any kernel's configuration:

    @property
    def block_m(self) -> int:
        return self.subtile_m

    @property
    def m_subtiles(self) -> int:
        return 1

    @property
    def cluster_size(self) -> int:
        return 1

    @property
    def silu_and_mul(self) -> bool:
        return False  # with two accumulators, for gate and up

    @property
    def quantises(self) -> bool:
        return False

    @property
    def interleaved(self) -> bool:
        return False

    @property
    def scaling(self) -> str:
        return "none"

    @property
    def has_row_terms(self) -> bool:
        return bool(self.bias)

    @property
    def has_row_values(self) -> bool:
        return self.row_weights or self.scatter

    @property
    def scale_in_tile(self) -> bool:
        """Whether the epilogue multiplies by the scale of a tile; with a bias it does so as it adds the bias."""
        return not self.bias


class UnitLayout(NamedTuple):
    """The rows of x of all stages as a ring of units, 64 elements of k each, for ``gather.py``."""

    stage_bytes: int
    subtile_bytes: int
    row_index_pitch: int
    x_offset: int = 0


@dataclass(frozen=True)
class Mxfp4Layout:
    """Offsets in the dynamic shared memory of a CTA, in elements of the view that is named.

    The rows of x of all stages come first, because their swizzle needs an alignment of 1024 bytes, which the units of
    weight do not have.
    """

    config: Mxfp4Config

    @property
    def threads(self) -> int:
        return 128 * (self.config.warpgroups + 1)

    @property
    def consumer_warps(self) -> int:
        return 4 * self.config.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of producers and consumers, at most 65536 in all."""
        if self.config.warpgroups == 4:
            return 32, 112
        if not self.config.gather:
            return 24, 240
        return (72, 216) if self.config.subtile_m > 128 else (56, 224)

    @property
    def subtile_bytes(self) -> int:
        """u8: rows of x by 64 elements of k."""
        return self.config.subtile_m * BLOCK_K_BYTES

    @property
    def stage_bytes(self) -> int:
        """u8: from a stage's rows of x to the next one's."""
        return self.config.stage_units * self.subtile_bytes

    @property
    def weight_offset(self) -> int:
        """u8: the weights of the first stage, warpgroup by warpgroup."""
        return self.config.stages * self.stage_bytes

    @property
    def weight_bytes(self) -> int:
        """u8: the weights of a stage."""
        return self.config.warpgroups * self.config.stage_units * UNIT_BYTES

    @property
    def epilogue_offset(self) -> int:
        """u8: the epilogue buffers of the consumer warpgroups."""
        return self.weight_offset + self.config.stages * self.weight_bytes

    @cached_property
    def full(self) -> int:
        """barriers: index of the first stage's full barrier, which completes when the stage's data have arrived."""
        return (self.epilogue_offset + self.config.warpgroups * EPILOGUE_BYTES) // 8

    @property
    def empty(self) -> int:
        """barriers: index of the first stage's empty barrier, which completes when the stage may be overwritten."""
        return self.full + self.config.stages

    @property
    def tile_info_offset(self) -> int:
        """i32: 4 per stage, in which the producer describes the tile whose first stage it is."""
        return -(-2 * (self.empty + self.config.stages) // 4) * 4

    @property
    def warp_sums_offset(self) -> int:
        """i32: each warp's sum in the scan over groups."""
        return self.tile_info_offset + 4 * self.config.stages

    @property
    def first_tile_offset(self) -> int:
        """i32: the first tile of each group."""
        return self.warp_sums_offset + self.threads // 32

    @property
    def row_index_pitch(self) -> int:
        """i32: the row indices of a tile, a multiple of the warp size."""
        return -(-self.config.subtile_m // 32) * 32

    @property
    def row_indices(self) -> int:
        """i32 elements that an auxiliary producer warp has for a tile's row indices."""
        return self.row_index_pitch if self.config.gather else 0

    @cached_property
    def row_index_offset(self) -> int:
        """i32, a multiple of 4: the row indices of the auxiliary producer warps, which they read four at a time."""
        return -(-(self.first_tile_offset + self.config.max_groups) // 4) * 4

    @cached_property
    def scale_pitch(self) -> int:
        """As ``SharedMemoryLayout.scale_pitch``, for the values of rows of x that the epilogue reads."""
        count = -(-self.config.subtile_m // 16) * 4
        return count + 4 * (count % 16 == 0)

    @cached_property
    def row_value_offsets(self) -> tuple[int, int, int, int]:
        """f32 or i32: scales of x, of which there are none, row weights, and rows of y, and the end of them."""
        first = self.row_index_offset + AUX_PRODUCER_WARPS * self.row_indices
        second = first + 4 * self.scale_pitch * self.config.row_weights
        return first, first, second, second + 4 * self.scale_pitch * self.config.scatter

    @cached_property
    def bytes(self) -> int:
        return 4 * self.row_value_offsets[-1]

    @property
    def units(self) -> UnitLayout:
        return UnitLayout(self.subtile_bytes, self.subtile_bytes, self.row_index_pitch)


def check_mxfp4_config(config: Mxfp4Config) -> None:
    """Refuse a configuration that the kernel does not support."""
    sizes = config.mma_n
    is_descending = all(large > small for large, small in zip(sizes, sizes[1:]))
    if not sizes or sizes[0] != config.subtile_m or not is_descending or any(n % 8 or not 8 <= n <= 256 for n in sizes):
        raise ValueError(
            f"mma_n is {sizes}; it must descend from subtile_m ({config.subtile_m}) in multiples of 8, from 256 to 8"
        )
    if config.box_rows % 8 or not config.box_rows or config.subtile_m % config.box_rows:
        raise ValueError(
            f"box_rows is {config.box_rows}; it must be a multiple of 8 that divides subtile_m ({config.subtile_m})"
        )
    if config.warpgroups not in (2, 4):
        raise ValueError(f"warpgroups is {config.warpgroups}; it must be 2 or 4")
    if config.warpgroups == 4 and config.has_row_values:
        raise ValueError("warpgroups is 4; with scatter or row_weights it must be 2")
    if config.stage_units not in (1, 2):
        raise ValueError(f"stage_units is {config.stage_units}; it must be 1 or 2")
    others = config.out_dtype != "bf16" or config.accumulate or config.scatter or config.row_weights
    if config.activation not in ("", "silu", "swigluoai") or (config.activation and others):
        raise ValueError(f"activation is {config.activation!r}; it must be 'silu' or 'swigluoai', with bf16 results")
    if config.gather and config.stages < AUX_PRODUCER_WARPS:
        # A warp that handles every third stage could mistake a phase of its barrier for the one after the next.
        raise ValueError(f"stages is {config.stages}; with gather it must be {AUX_PRODUCER_WARPS} or more")
    if (num_bytes := Mxfp4Layout(config).bytes) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {num_bytes} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}")


# (maximum average rows per group, tile configuration). Boxes of few rows keep a tile from reading rows of x that it
# does not have: with 128 rows of weight, 16 rows of x take half as many bytes of a stage as the weights.
CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (12, dict(subtile_m=32, mma_n=(32, 24, 16, 8), box_rows=8, stages=11)),
    (40, dict(subtile_m=64, mma_n=(64, 48, 32, 16), box_rows=16, stages=8)),
    (112, dict(subtile_m=128, mma_n=(128, 96, 64, 32), box_rows=32, stages=5)),
    (None, dict(subtile_m=256, mma_n=(256, 208, 160, 112, 56), box_rows=32, stages=5, stage_units=1, overlap=False)),
)


def fit_registers(config: Mxfp4Config) -> Mxfp4Config:
    """Return the configuration without ``overlap`` if its options leave no registers for a second set of A."""
    has_options = config.gather or config.bias or config.has_row_values or config.out_dtype != "bf16"
    return config._replace(overlap=False) if config.subtile_m > 64 and has_options else config


@cache
def select_mxfp4_config(row_layout: str, average: int) -> Mxfp4Config:
    """Select the configuration for groups of ``average`` rows."""
    tile = next(tile for limit, tile in CONFIGS if limit is None or average <= limit)
    return Mxfp4Config(row_layout=row_layout, **tile)
