"""Compile-time configuration and shared-memory layout of the k-grouped GEMM kernel."""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from moe_numba.grouped_gemm.common.constants import CONSUMER_WARPS, MAX_SHARED_BYTES, THREADS

BLOCK_N = 128  # columns of a in a tile: 64 for each of the two consumer warpgroups
BLOCK_ROWS = 64  # rows of a and b in a stage, four wgmma k-steps
BOX_COLUMNS = 64  # columns of a or b in one TMA load: 128 bytes, the width of the swizzle
BOX_BYTES = BLOCK_ROWS * 2 * BOX_COLUMNS
STORE_ROWS = 16  # rows of out in one TMA store: those of a warp
STORE_BYTES = STORE_ROWS * 128


class KGroupedConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    A tile of a group's output has 128 rows, which are columns of a, and ``block_k`` columns, which are columns of b.
    """

    block_k: int = 256  # wgmma's N, a multiple of 64
    stages: int = 4  # pipeline stages
    out_dtype: str = "float32"  # "float32" or "bfloat16"
    accumulate: bool = False  # add to out, which is float32
    row_layout: str = "lengths"  # a group's rows: "lengths" and starts, or "offsets" (group ends)
    cluster_size: int = 1  # CTAs with neighbouring tiles of n that load their columns of b by multicast, 1 or 2
    band_tiles: int = 16  # tiles of n that all tiles of k follow, so that concurrent CTAs share columns of a and b

    @property
    def store_columns(self) -> int:
        """Columns of out in one TMA store: 128 bytes."""
        return 32 if self.out_dtype == "float32" else 64


@dataclass(frozen=True)
class KGroupedLayout:
    """Offsets in the dynamic shared memory of a CTA, in elements of the view that is named."""

    config: KGroupedConfig
    threads = THREADS

    @property
    def b_offset(self) -> int:
        """u8, within a stage: the boxes of b lie behind those of a."""
        return BLOCK_N // BOX_COLUMNS * BOX_BYTES

    @property
    def b_boxes(self) -> int:
        return self.config.block_k // BOX_COLUMNS

    @property
    def stage_bytes(self) -> int:
        return self.b_offset + self.b_boxes * BOX_BYTES

    @property
    def epilogue_offset(self) -> int:
        """u8: two buffers for each consumer warp."""
        return self.config.stages * self.stage_bytes

    @property
    def full(self) -> int:
        """barriers: index of the first stage's full barrier, which completes when the stage's data have arrived."""
        return (self.epilogue_offset + 2 * CONSUMER_WARPS * STORE_BYTES) // 8

    @property
    def empty(self) -> int:
        """barriers: index of the first stage's empty barrier, which completes when the stage may be overwritten."""
        return self.full + self.config.stages

    @property
    def masked(self) -> int:
        """barriers: index of the first barrier that completes when the rows behind a group's end are zeros.

        There are as many as stages, which the last stages of groups use in order.
        """
        return self.empty + self.config.stages

    @property
    def tile_info_offset(self) -> int:
        """i32: 4 per stage, in which the producer describes the tile whose first stage it is."""
        return -(-2 * (self.masked + self.config.stages) // 4) * 4

    @property
    def bytes(self) -> int:
        return 4 * (self.tile_info_offset + 4 * self.config.stages)


def check_k_grouped_config(config: KGroupedConfig) -> None:
    """Raise ValueError if the kernel does not support a configuration."""
    if config.block_k % BOX_COLUMNS or not BOX_COLUMNS <= config.block_k <= 256:
        raise ValueError(f"block_k is {config.block_k}; it must be a multiple of {BOX_COLUMNS} up to 256")
    if config.cluster_size not in (1, 2) or KGroupedLayout(config).b_boxes % config.cluster_size:
        raise ValueError(
            f"cluster_size is {config.cluster_size}; it must be 1, or 2 with block_k, {config.block_k}, "
            f"a multiple of {2 * BOX_COLUMNS}"
        )
    if config.out_dtype not in ("float32", "bfloat16") or (config.accumulate and config.out_dtype != "float32"):
        raise ValueError(f"out_dtype is {config.out_dtype}; it must be float32, or without accumulate bfloat16")
    if config.stages < 2 or config.band_tiles < 1:
        raise ValueError(f"stages is {config.stages} and band_tiles {config.band_tiles}; they must be 2 and 1 or more")
    if (num_bytes := KGroupedLayout(config).bytes) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {num_bytes} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}")


@cache
def select_k_grouped_config(n: int, k: int, row_layout: str, out_dtype: str, accumulate: bool) -> KGroupedConfig:
    """Select the configuration for outputs of n rows and k columns."""
    block_k = 256 if k > 128 else 128
    cluster_size = 2 if n > BLOCK_N else 1
    config = KGroupedConfig(block_k, 4 if block_k == 256 else 6, out_dtype, accumulate, row_layout, cluster_size)
    return config
