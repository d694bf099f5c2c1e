"""Compile-time configuration and shared-memory layout of the block-scaled grouped GEMM kernel."""

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import Any, NamedTuple

from moe_numba.grouped_gemm.common.constants import (
    AUX_PRODUCER_WARPS,
    BLOCK_K_BYTES,
    CONSUMER_WARPS,
    MAX_GROUPS,
    MAX_SHARED_BYTES,
    THREADS,
    WARPS,
)
from moe_numba.quantise import FP8_SCALE_BLOCK

BLOCK_M = 128  # rows of x in a tile: 64, wgmma's M, for each consumer warpgroup
BOX_ROWS = 64  # rows of x that one TMA load copies
ROW_BYTES = 128  # of a row of y in a buffer: 64 columns of bf16, or 128 of FP8
BUFFER_ROWS = 16  # rows of y in a buffer of the epilogue: those of a warp
BUFFER_BYTES = BUFFER_ROWS * ROW_BYTES
BUFFER_COLUMNS = ROW_BYTES // 2  # of bf16
FACTOR_WARPS = 2  # auxiliary warps without gather: each writes the factors of BLOCK_M / 2 rows


class BlockScaledConfig(NamedTuple):
    """Compile-time configuration of the kernel: a tile has 128 rows of x by ``block_n`` rows of weight.

    With ``silu_and_mul`` these are 128 rows of gate and the 128 rows of up that belong to them. TMA loads them in two
    halves: the first and the second half of the rows of weight, or gate and up.
    """

    block_n: int = 192
    stages: int = 4  # pipeline stages
    row_layout: str = "lengths"  # a group's rows: "lengths" and starts, "offsets" (group ends), or "masked"
    max_groups: int = MAX_GROUPS
    silu_and_mul: bool = False  # weight is gate stacked on up; the kernel writes silu(gate) * up in FP8
    keep_weight: bool = False  # keep weights in L2 as long as rows of x
    early_test: bool = False  # with 256 columns: test the next stage's barrier before the last FFMAs of a stage
    gather: bool = False  # rows of x are read through an array of row indices
    cluster_size: int = 2  # CTAs that compute a pair of tiles, see ``pairs.py``; or 1
    # With cluster_size 1: deal out full and half tiles apart, see ``balanced.py``. `bench grouped_gemm_tiles` tries it.
    balanced: bool = False
    # Block scales as packed UE8M0 exponents instead of float32, see `block_scales.py`:
    packed_x_scale: bool = False
    # Scales of four blocks of k, from a multiple of four on, are 16 contiguous and aligned bytes:
    vector_x_scale: bool = False
    vector_weight_scale: bool = False
    packed_weight_scale: bool = False

    @property
    def half_rows(self) -> int:
        """Rows of weight in one TMA load."""
        return self.block_n // 2

    @property
    def columns(self) -> int:
        """Columns of y in a tile."""
        return FP8_SCALE_BLOCK if self.silu_and_mul else self.block_n

    @property
    def scaled_columns(self) -> int:
        """Columns of a tile that share a scale of weight, wherever in a scale block the tile begins."""
        return gcd(self.block_n, FP8_SCALE_BLOCK)

    @property
    def weight_scales(self) -> int:
        """Scales of weight that a tile needs for 128 elements of k."""
        return self.block_n // self.scaled_columns

    @property
    def needs_registers(self) -> bool:
        """Whether a consumer thread needs more than 224 registers, for two accumulators and another CTA's barriers."""
        return self.block_n == 2 * FP8_SCALE_BLOCK and self.cluster_size == 2

    # Interface of the tile scheduler and of gather:

    @property
    def block_m(self) -> int:
        return BLOCK_M

    @property
    def subtile_m(self) -> int:
        return BLOCK_M

    @property
    def m_subtiles(self) -> int:
        return 1


@dataclass(frozen=True)
class BlockScaledLayout:
    """Offsets in the dynamic shared memory of a CTA, in elements of the view that is named."""

    config: BlockScaledConfig
    threads = THREADS

    @property
    def x_offset(self) -> int:
        """u8, within a stage: x lies behind the tile of weight."""
        return self.config.block_n * BLOCK_K_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.x_offset + BLOCK_M * BLOCK_K_BYTES

    @property
    def epilogue_offset(self) -> int:
        """u8: the epilogue buffers of the consumer warps."""
        return self.config.stages * self.stage_bytes

    @property
    def epilogue_warp_bytes(self) -> int:
        """u8: a warp's buffers, for all of its tile's columns in bf16, or in FP8 with silu_and_mul."""
        config = self.config
        return BUFFER_BYTES * config.columns * (1 if config.silu_and_mul else 2) // ROW_BYTES

    @property
    def factor_offset(self) -> int:
        """f32 and i32, a multiple of 4: the factors of each stage, for each row one per scale of weight."""
        return (self.epilogue_offset + CONSUMER_WARPS * self.epilogue_warp_bytes) // 4

    @property
    def stage_factors(self) -> int:
        """f32 elements of a stage's factors, 4 for each row of x."""
        return 4 * BLOCK_M

    @cached_property
    def full(self) -> int:
        """barriers: index of the first stage's full barrier, which completes when the stage's data have arrived."""
        return (self.factor_offset + self.config.stages * self.stage_factors) // 2

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
        return self.warp_sums_offset + WARPS

    @property
    def first_half_tile_offset(self) -> int:
        """i32: with ``balanced``, the first half tile of each group."""
        return self.first_tile_offset + self.config.max_groups

    @property
    def total_offset(self) -> int:
        """i32: with ``balanced``, the number of full tiles of all groups."""
        return self.first_half_tile_offset + self.config.max_groups

    @property
    def tiles_offset(self) -> int:
        """i32: the number of tiles of all groups; with ``balanced`` those of this CTA."""
        return self.total_offset + 1 if self.config.balanced else self.first_half_tile_offset

    @property
    def subtile_bytes(self) -> int:
        """u8: a stage's rows of x."""
        return BLOCK_M * BLOCK_K_BYTES

    @property
    def row_index_pitch(self) -> int:
        """i32: the row indices of a tile."""
        return BLOCK_M

    @property
    def row_indices(self) -> int:
        """i32 elements that an auxiliary producer warp has for a tile's row indices."""
        return BLOCK_M if self.config.gather else 0

    @cached_property
    def row_index_offset(self) -> int:
        """i32, a multiple of 4: the row indices of the auxiliary producer warps, which they read four at a time."""
        return -(-(self.tiles_offset + 1) // 4) * 4

    @cached_property
    def bytes(self) -> int:
        return 4 * (self.row_index_offset + AUX_PRODUCER_WARPS * self.row_indices)


def check_block_scaled_config(config: BlockScaledConfig) -> None:
    """Raise ValueError for a configuration that the kernel does not support."""
    allowed = (2 * FP8_SCALE_BLOCK,) if config.silu_and_mul else (128, 192, 2 * FP8_SCALE_BLOCK)
    if config.block_n not in allowed:
        raise ValueError(
            f"block_n is {config.block_n}; it must be {' or '.join(map(str, allowed))}"
            + " with silu_and_mul" * config.silu_and_mul
        )
    if config.cluster_size not in (1, 2):
        raise ValueError(f"cluster_size is {config.cluster_size}; it must be 1 or 2")
    if config.needs_registers and config.gather:
        raise ValueError(f"cluster_size is 2; with block_n {config.block_n} and gather it must be 1 (registers)")
    if config.balanced and config.cluster_size != 1:
        raise ValueError(f"cluster_size is {config.cluster_size}; with balanced it must be 1")
    if config.stages < AUX_PRODUCER_WARPS:
        # A warp that handles every third stage could mistake a phase of its barrier for the one after the next.
        raise ValueError(f"stages is {config.stages}; it must be {AUX_PRODUCER_WARPS} or more")
    if (num_bytes := BlockScaledLayout(config).bytes) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {num_bytes} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}")


# With fewer rows per group the kernel of ``wgmma/kernel.py`` is as fast.
MIN_AVERAGE = 80
_TILE: dict[str, Any] = dict(block_n=2 * FP8_SCALE_BLOCK, stages=3, cluster_size=1, early_test=True)
# For a tile of rows per group, and for columns of which tiles of 256 would leave more than 1/16 of their work unused.
_NARROW_TILE: dict[str, Any] = dict(block_n=192, stages=4)
_SILU_TILE: dict[str, Any] = dict(block_n=2 * FP8_SCALE_BLOCK, stages=4)
# From here on the early test is faster in pairs of tiles (1024 rows by 4096 x 7168: 2 % to 4 %); with 256 rows it can
# cost 2 %. CTAs that compute no pairs gain up to 2 % by it.
MIN_AVERAGE_TESTED_EARLY = 512


@cache
def select_block_scaled_config(
    row_layout: str, average: int, silu_and_mul: bool = False, n: int = 0
) -> BlockScaledConfig | None:
    """Select the configuration for groups of ``average`` rows and ``n`` columns, or None if the other kernel is faster.

    With ``silu_and_mul`` the number of columns does not matter.
    """
    if average < MIN_AVERAGE:
        return None
    wide, narrow = (-(-n // tile["block_n"]) * tile["block_n"] for tile in (_TILE, _NARROW_TILE))
    is_narrow = average <= BLOCK_M or 15 * wide > 16 * narrow
    tile = _NARROW_TILE if is_narrow else _TILE
    if silu_and_mul:
        tile = dict(_SILU_TILE, early_test=average >= MIN_AVERAGE_TESTED_EARLY)
    return BlockScaledConfig(row_layout=row_layout, silu_and_mul=silu_and_mul, keep_weight=True, **tile)


def with_gather(config: BlockScaledConfig) -> BlockScaledConfig:
    """Return the configuration for gathered rows: producer warps then need the registers of a cluster's consumers."""
    return config._replace(gather=True, cluster_size=1 if config.needs_registers else config.cluster_size)
