"""Shared-memory layout of the grouped GEMM kernel for MXFP4 weights, and the check of its configuration."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from moe_numba.grouped_gemm.common.constants import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, EPILOGUE_BYTES, MAX_SHARED_BYTES
from moe_numba.grouped_gemm.w4.config import W4Config
from moe_numba.grouped_gemm.w4.packing import TILE_BYTES


class XTileLayout(NamedTuple):
    """The rows of x of all stages as a ring of tiles, 128 bytes along k each, for ``gather.py``."""

    stage_bytes: int
    subtile_bytes: int
    row_index_pitch: int
    x_offset: int = 0


@dataclass(frozen=True)
class W4Layout:
    """Offsets in the dynamic shared memory of a CTA, in elements of the view that is named.

    The rows of x of all stages come first, because their swizzle needs an alignment of 1024 bytes, which weight tiles
    do not have.
    """

    config: W4Config

    @property
    def threads(self) -> int:
        return 128 * (self.config.warpgroups + 1)

    @property
    def consumer_warps(self) -> int:
        return 4 * self.config.warpgroups

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of producers and consumers, at most 65536 in all."""
        gather = self.config.gather
        if self.config.warpgroups == 4:
            return (64, 104) if gather else (32, 112)
        if gather and self.config.subtile_m > 128:
            return 72, 216
        return (56, 224) if gather else (24, 240)

    @property
    def subtile_bytes(self) -> int:
        """u8: rows of x by 128 bytes of k."""
        return self.config.subtile_m * BLOCK_K_BYTES

    @property
    def stage_bytes(self) -> int:
        """u8: from a stage's rows of x to the next one's."""
        return self.config.stage_tiles * self.subtile_bytes

    @property
    def weight_offset(self) -> int:
        """u8: the weight tiles of the first stage, warpgroup by warpgroup."""
        return self.config.stages * self.stage_bytes

    @property
    def weight_bytes(self) -> int:
        """u8: the weight tiles of a stage."""
        return self.config.warpgroups * self.config.stage_tiles * TILE_BYTES

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

    @property
    def row_values(self) -> int:
        """f32 or i32 elements of one kind of values of a tile's rows of x."""
        return 4 * self.scale_pitch

    @cached_property
    def row_value_offsets(self) -> tuple[int, int, int, int]:
        """f32 or i32: scales of rows of x, of which there are none, row weights, and rows of y, and the end of them."""
        weights = self.row_index_offset + AUX_PRODUCER_WARPS * self.row_indices
        destinations = weights + self.row_values * self.config.row_weights
        return weights, weights, destinations, destinations + self.row_values * self.config.scatter

    @cached_property
    def bytes(self) -> int:
        return 4 * self.row_value_offsets[-1]

    @property
    def x_tiles(self) -> XTileLayout:
        return XTileLayout(self.subtile_bytes, self.subtile_bytes, self.row_index_pitch)


def fit_shared_memory(config: W4Config) -> W4Config:
    """Return the configuration with fewer stages if it would need more shared memory than a CTA has."""
    while W4Layout(config).bytes > MAX_SHARED_BYTES and config.stages > AUX_PRODUCER_WARPS:
        config = config._replace(stages=config.stages - 1)
    return config


def check_w4_config(config: W4Config) -> None:
    """Raise if the kernel does not support the configuration."""
    if config.stage_tiles not in (1, 2):
        raise ValueError(f"stage_tiles is {config.stage_tiles}; it must be 1 or 2")
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
    others = config.out_dtype != "bf16" or config.accumulate or config.scatter or config.row_weights
    if config.activation not in ("", "silu", "swigluoai") or (config.activation and others):
        raise ValueError(f"activation is {config.activation!r}; it must be 'silu' or 'swigluoai', with bf16 results")
    if config.gather and config.stages < AUX_PRODUCER_WARPS:
        # A warp that handles every third stage could mistake a phase of its barrier for the one after the next.
        raise ValueError(f"stages is {config.stages}; with gather it must be {AUX_PRODUCER_WARPS} or more")
    if (num_bytes := W4Layout(config).bytes) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {num_bytes} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}")
