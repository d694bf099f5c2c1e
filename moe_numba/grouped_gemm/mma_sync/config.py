"""Compile-time configuration and shared-memory layout of the grouped GEMM kernel with ``mma.sync``."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from moe_numba.grouped_gemm.common.constants import MAX_GROUPS
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.runtime.device import GPU

COLUMN_GROUP = 32  # columns of y of which a lane holds 8 neighbours of a row
STEP_BYTES = 32  # bytes of k that one mma.sync multiplies


class MmaConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    A tile has ``block_m`` rows of x by ``block_n`` rows of weight. Its warps are arranged as ``warps_m`` x ``warps_n``,
    and each computes an equal part.
    """

    dtype: str = "bf16"  # of x and weight: "bf16" or "e4m3"
    mma: str = "bf16"  # of mma.sync: "bf16", "e4m3", or "f16", to which e4m3 is converted in registers
    # "tensor": one per group; "row": per row of x and of weight; "block": per 1 x 128 of x, 128 x 128 of weight; "none"
    scaling: str = "none"
    block_m: int = 128
    block_n: int = 256
    warps_m: int = 2
    warps_n: int = 4
    stages: int = 3  # pipeline stages
    block_k_bytes: int = 128  # bytes of k in a stage, 64 or 128
    min_blocks: int = 1  # CTAs per SM
    band_rows: int = 2048  # rows of a group whose tiles follow one another
    row_layout: str = "lengths"  # a group's rows: "lengths" and starts, "offsets" (group ends), or "masked"
    max_groups: int = MAX_GROUPS
    silu_and_mul: bool = False  # weight is gate stacked on up; the kernel writes silu(gate) * up in FP8
    gather: bool = False  # rows of x are read through an array of row indices
    bias: str = ""  # dtype of a bias per row of weight: "bf16" or "f32", or none
    out_dtype: str = "bf16"  # "bf16" or "f32"
    accumulate: bool = False  # add to y, in f32
    scatter: bool = False  # rows of y are stored to the rows that an index array names
    row_weights: bool = False  # each row of y is multiplied by a factor
    # Block scales as packed UE8M0 exponents instead of float32, see `block_scales.py`:
    packed_x_scale: bool = False
    packed_weight_scale: bool = False

    # As in `config.GemmConfig`, for the tile scheduler:

    @property
    def m_subtiles(self) -> int:
        return 1

    @property
    def cluster_size(self) -> int:
        return 1

    @property
    def subtile_m(self) -> int:
        return self.block_m

    @property
    def has_epilogue_math(self) -> bool:
        """Whether the epilogue does more than to round scaled rows to bfloat16."""
        return bool(self.bias) or self.scaling == "row" or self.out_dtype == "f32" or self.scatter or self.row_weights

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def warp_m(self) -> int:
        """Rows of x in a warp's part of a tile."""
        return self.block_m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Rows of weight in a warp's part of a tile."""
        return self.block_n // self.warps_n

    @property
    def columns(self) -> int:
        """Columns of y in a tile; with ``silu_and_mul`` half of the tile's rows of weight are up."""
        return self.block_n // 2 if self.silu_and_mul else self.block_n

    @property
    def promotes(self) -> bool:
        """Whether the products of a stage are summed apart, and then scaled and added to the accumulators.

        Tensor cores sum FP8 products with fewer bits than float32.
        """
        return self.mma == "e4m3" or self.scaling == "block"


@dataclass(frozen=True)
class MmaLayout:
    """Offsets in the dynamic shared memory of a CTA, in elements of the view that is named."""

    config: MmaConfig

    @property
    def threads(self) -> int:
        return self.config.threads

    @property
    def vectors(self) -> int:
        """16-byte vectors of a row in a stage."""
        return self.config.block_k_bytes // 16

    @property
    def rows_per_pass(self) -> int:
        """Rows of which all threads copy one vector each."""
        return self.threads // self.vectors

    @property
    def weight_offset(self) -> int:
        """u8, within a stage: the rows of weight lie behind the rows of x."""
        return self.config.block_m * self.config.block_k_bytes

    @property
    def stage_bytes(self) -> int:
        return (self.config.block_m + self.config.block_n) * self.config.block_k_bytes

    @property
    def row_max_offset(self) -> int:
        """f32: each warp's maxima of its rows, with silu_and_mul."""
        return self.config.stages * self.stage_bytes // 4

    @property
    def tile_info_offset(self) -> int:
        """i32, a multiple of 4: 8 for each tile between the one that is copied and the one before its epilogue."""
        return self.row_max_offset + (self.config.warps_n * self.config.block_m if self.config.silu_and_mul else 0)

    @property
    def tile_slots(self) -> int:
        """Tiles that are described in shared memory: a stage's copies may run ahead by that many tiles."""
        return self.config.stages + 1

    @property
    def warp_sums_offset(self) -> int:
        """i32: each warp's sum in the scan over groups."""
        return self.tile_info_offset + 8 * self.tile_slots

    @property
    def first_tile_offset(self) -> int:
        """i32: the first tile of each group."""
        return self.warp_sums_offset + self.threads // 32

    @cached_property
    def bytes(self) -> int:
        return 4 * (self.first_tile_offset + self.config.max_groups)


def check_mma_config(config: MmaConfig) -> None:
    """Raise ValueError if the kernel does not support a configuration."""
    unit = 2 * COLUMN_GROUP if config.silu_and_mul else COLUMN_GROUP
    if config.block_m % (16 * config.warps_m) or config.block_n % (unit * config.warps_n):
        raise ValueError(
            f"block_m x block_n is {config.block_m} x {config.block_n}; each of {config.warps_m} x {config.warps_n} "
            f"warps must compute a multiple of 16 x {unit}"
        )
    if config.silu_and_mul and config.block_n != 2 * FP8_SCALE_BLOCK:
        raise ValueError(f"block_n is {config.block_n}; with silu_and_mul it must be {2 * FP8_SCALE_BLOCK}")
    if config.block_k_bytes not in (64, 128) or (config.promotes and config.block_k_bytes != 128):
        raise ValueError(f"block_k_bytes is {config.block_k_bytes}; it must be 64 or 128, and with e4m3 or blocks 128")
    if config.scaling == "block" and FP8_SCALE_BLOCK % config.warp_n:
        raise ValueError(f"block_n is {config.block_n}; a warp's part must divide {FP8_SCALE_BLOCK} with block scaling")
    if config.silu_and_mul and config.has_epilogue_math:
        raise ValueError("silu_and_mul is True; bias, out_dtype, scatter and row_weights must be the defaults")
    if config.accumulate and config.out_dtype != "f32":
        raise ValueError(f"out_dtype is {config.out_dtype}; with accumulate it must be f32")
    if config.stages < 2:
        raise ValueError(f"stages is {config.stages}; it must be 2 or more")
    rows = MmaLayout(config).rows_per_pass
    if rows % 16 or config.block_m % rows or config.block_n % rows:
        raise ValueError(f"{config.threads} threads copy {rows} rows at once; block_m and block_n must be multiples")


def is_mma_config(config: MmaConfig) -> bool:
    """Whether the kernel supports a configuration."""
    try:
        check_mma_config(config._replace(stages=2))
    except ValueError:
        return False
    return True


# (maximum average rows per group, tile configuration): a warp loads fewer bytes per mma.sync the larger its part of the
# tile is, and a tile should not have many more rows than a group.
_CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (16, dict(block_m=16, block_n=128, warps_m=1, warps_n=4)),
    (32, dict(block_m=32, block_n=128, warps_m=1, warps_n=4)),
    (64, dict(block_m=64, block_n=128, warps_m=2, warps_n=4)),
    (None, dict(block_m=128, block_n=256, warps_m=2, warps_n=4)),
)
# e4m3 has smaller parts: converted fragments, or the sum of a stage, need registers beside the accumulators.
_E4M3_CONFIGS = *_CONFIGS[:-1], (None, dict(block_m=128, block_n=128, warps_m=4, warps_n=2))
_SILU_CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (16, dict(block_m=16, block_n=256, warps_m=1, warps_n=4)),
    (32, dict(block_m=32, block_n=256, warps_m=2, warps_n=4)),
    (None, dict(block_m=64, block_n=256, warps_m=2, warps_n=4)),
)
_MAX_STAGES, _MAX_SHARED_BYTES = 6, 163 * 1024  # more would take memory from the L1 cache
# GPUs on which ptxas replaces mma.sync of e4m3 by conversions to float16, which need registers.
_WITHOUT_E4M3_MMA = (9, 0), (10, 0), (10, 3)


@cache
def select_mma_config(gpu: GPU, scaling: str, row_layout: str, average: int, silu_and_mul: bool = False) -> MmaConfig:
    """Select the configuration for groups of ``average`` rows."""
    dtype = "bf16" if scaling == "none" else "e4m3"
    mma = "f16" if dtype == "e4m3" and gpu.capability < (8, 9) else dtype
    configs = _SILU_CONFIGS if silu_and_mul else _CONFIGS if dtype == "bf16" else _E4M3_CONFIGS
    if mma == "e4m3" and gpu.hardware_capability in _WITHOUT_E4M3_MMA and not (silu_and_mul and scaling == "tensor"):
        average = min(average, 32 if silu_and_mul else 64)
    tile = next(tile for limit, tile in configs if limit is None or average <= limit)
    config = MmaConfig(dtype, mma, scaling, row_layout=row_layout, silu_and_mul=silu_and_mul, **tile)
    shared_bytes = min(gpu.shared_bytes, _MAX_SHARED_BYTES)
    shallow = config._replace(block_k_bytes=64)
    if most_stages(config, shared_bytes) < 3 and is_mma_config(shallow):
        config = shallow
    return config._replace(stages=min(most_stages(config, shared_bytes), _MAX_STAGES))


def most_stages(config: MmaConfig, shared_bytes: int) -> int:
    """Number of pipeline stages that fit into the shared memory of a CTA."""
    layout = MmaLayout(config._replace(stages=0))
    return (shared_bytes - layout.bytes) // layout.stage_bytes
