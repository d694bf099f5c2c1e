"""Compile-time configuration of the grouped GEMM kernel for 4-bit weights."""

from functools import cache
from typing import Any, NamedTuple

from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES
from moe_numba.grouped_gemm.w4.packing import TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import CODE_BYTES, TILE


class W4Config(NamedTuple):
    """Compile-time configuration of the kernel: a tile has up to ``subtile_m`` rows of x by 64 rows of weight for each
    consumer warpgroup.
    """

    weight: str = "mxfp4"  # "mxfp4" or "int4"
    dtype: str = "bf16"  # of x: "bf16", or with mxfp4 "e4m3"
    x_scaling: str = "none"  # of x in e4m3: "tensor", "row", or "block" for one scale per 1 x 128
    group_size: int = 32  # elements of k that share a scale of the weight: 32, or with int4 also 64 or 128
    scale_dtype: str = "bf16"  # of the scales of int4: "bf16", "f16" or "f32"
    subtile_m: int = 32  # maximum rows of x in a tile
    mma_n: tuple[int, ...] = (32, 16, 8)  # wgmma N sizes, descending; a tile uses the smallest that holds its rows
    box_rows: int = 8  # rows of x that one TMA load copies
    stages: int = 9  # pipeline stages
    stage_tiles: int = 2  # weight tiles along k in a stage, 64 elements of k each: 2, or with mxfp4 and bf16 also 1
    warpgroups: int = 2  # consumer warpgroups: 2 or 4
    row_layout: str = "lengths"  # a group's rows: "lengths" and starts, "offsets" (group ends), or "masked"
    max_groups: int = 512
    gather: bool = False  # rows of x are read through an array of row indices
    activation: str = ""  # of gate and up, of which a weight tile has 32 rows each: "silu" or "swigluoai", or none
    alpha: float = 1.702  # of swigluoai
    limit: float = 7.0  # of swigluoai
    bias: str = ""  # dtype of a bias per row of weight: "bf16" or "f32", or none
    out_dtype: str = "bf16"  # "bf16" or "f32"
    accumulate: bool = False  # add to y, in f32
    scatter: bool = False  # rows of y are stored to the rows that an index array names
    row_weights: bool = False  # each row of y is multiplied by a factor
    overlap: bool = True  # decode registers of A while the previous wgmmas run
    early_weight: bool = False  # load weights before griddepcontrol.wait, see `producer.make_tma_producer`

    @property
    def columns(self) -> int:
        """Columns of y in a tile."""
        return self.warpgroups * TILE // 2 if self.activation else self.warpgroups * TILE

    @property
    def scales_in_registers(self) -> bool:
        """Whether decoding multiplies the weights by their scales, instead of the main loop the accumulators."""
        return self.weight == "mxfp4" and self.dtype == "bf16"

    @property
    def tile_bytes(self) -> int:
        """Bytes of a packed weight tile."""
        return TILE_BYTES if self.weight == "mxfp4" else CODE_BYTES

    @property
    def scale_group_bytes(self) -> int:
        """Bytes of the scales of 64 rows of weight and one group along k, if they are not part of a weight tile."""
        return TILE * (4 if self.scale_dtype == "f32" else 2) if self.weight == "int4" else 0

    @property
    def x_tile_k(self) -> int:
        """Elements of k in 128 bytes of a row of x."""
        return BLOCK_K_BYTES if self.dtype == "e4m3" else BLOCK_K_BYTES // 2

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
        return "row" if self.x_scaling == "row" else "none"

    @property
    def has_row_terms(self) -> bool:
        return bool(self.bias)

    @property
    def has_row_values(self) -> bool:
        return self.row_weights or self.scatter or self.x_scaling == "row"

    @property
    def scale_in_tile(self) -> bool:
        """Whether the epilogue multiplies by the scale of a tile; with a bias it does so as it adds the bias."""
        return not self.bias


# (maximum average rows per group, tile configuration). Boxes of few rows keep a tile from reading rows of x that it
# does not have: with 128 rows of weight, 16 rows of x in bf16 take half as many bytes of a stage as the weights.
Configs = tuple[tuple[int | None, dict[str, Any]], ...]
_TINY = dict(subtile_m=16, mma_n=(16, 8), box_rows=8)
_SMALL = dict(subtile_m=32, mma_n=(32, 24, 16, 8), box_rows=8)
_MEDIUM = dict(subtile_m=64, mma_n=(64, 48, 32, 16), box_rows=16)
_LARGE = dict(subtile_m=128, mma_n=(128, 96, 64, 32), box_rows=32)
CONFIGS: Configs = (
    (16, dict(subtile_m=32, mma_n=(32, 16, 8), box_rows=8, stages=8, warpgroups=4)),
    (40, _MEDIUM | dict(stages=6, warpgroups=4)),
    (112, _LARGE | dict(stages=5)),
    (None, dict(subtile_m=256, mma_n=(256, 208, 160, 112, 56), box_rows=32, stages=5, stage_tiles=1, overlap=False)),
)
# Four warpgroups have registers for the accumulators of four blocks of 32 columns with up to 24 rows of x, two with 64.
# Without overlap, the accumulators of one block leave registers for 128 rows, and with scales of blocks of x for 96.
# int4 in groups of 64 or 128 decodes a tile while the previous one is multiplied in any case.
INT4_CONFIGS: Configs = (
    (16, _SMALL | dict(stages=8, warpgroups=4, overlap=False)),
    (40, _MEDIUM | dict(stages=6, warpgroups=4, overlap=False)),
    (None, _LARGE | dict(stages=5, overlap=False)),
)
E4M3_CONFIGS: Configs = (
    (16, _TINY | dict(stages=10, warpgroups=4)),
    (64, _MEDIUM | dict(stages=12)),
    (None, _LARGE | dict(stages=8, overlap=False)),
)
BLOCK_SCALED_CONFIGS: Configs = (
    *E4M3_CONFIGS[:2],
    (None, dict(subtile_m=96, mma_n=(96, 64, 32), box_rows=32, stages=9, overlap=False)),
)


def fit_registers(config: W4Config) -> W4Config:
    """Return a configuration whose accumulators and registers of A fit beside those of its options.

    That is one without ``overlap``, which needs a second set of registers of A, or with two warpgroups instead of four.
    """
    has_options = config.gather or config.bias or config.has_row_values or config.out_dtype != "bf16"
    if not has_options or config.subtile_m <= (32 if config.warpgroups == 4 else 64):
        return config
    if config.scales_in_registers:
        return config._replace(overlap=False)
    return config._replace(warpgroups=2)


@cache
def select_w4_config(row_layout: str, average: int, **formats) -> W4Config:
    """Select the configuration for groups of ``average`` rows; ``formats`` are its fields for x and the weight."""
    config = W4Config(row_layout=row_layout, **formats)
    if config.scales_in_registers:
        configs = CONFIGS
    elif config.weight == "int4":
        configs = INT4_CONFIGS
    else:
        configs = BLOCK_SCALED_CONFIGS if config.x_scaling == "block" else E4M3_CONFIGS
    return config._replace(**next(tile for limit, tile in configs if limit is None or average <= limit))
