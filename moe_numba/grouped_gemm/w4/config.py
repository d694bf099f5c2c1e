"""Compile-time configuration of the grouped GEMM kernel for MXFP4 weights."""

from functools import cache
from typing import Any, NamedTuple

from moe_numba.grouped_gemm.common.constants import ALPHA, LIMIT
from moe_numba.grouped_gemm.w4.weight_tiles import TILE


class W4Config(NamedTuple):
    """Compile-time configuration of the kernel: a tile has up to ``subtile_m`` rows of x by 64 rows of weight for each
    consumer warpgroup.
    """

    subtile_m: int = 32  # maximum rows of x in a tile
    mma_n: tuple[int, ...] = (32, 16, 8)  # wgmma N sizes, descending; a tile uses the smallest that holds its rows
    box_rows: int = 8  # rows of x that one TMA load copies
    stages: int = 9  # pipeline stages
    stage_tiles: int = 2  # weight tiles along k in a stage, 64 elements of k each: 1 or 2
    warpgroups: int = 2  # consumer warpgroups: 2 or 4
    row_layout: str = "lengths"  # a group's rows: "lengths" and starts, "offsets" (group ends), or "masked"
    max_groups: int = 512
    gather: bool = False  # rows of x are read through an array of row indices
    activation: str = ""  # "silu", "swigluoai" or none; a weight tile then has 32 rows of gate and 32 of up
    alpha: float = ALPHA  # for swigluoai
    limit: float = LIMIT  # for swigluoai
    bias: str = ""  # dtype of a bias per row of weight: "bf16" or "f32", or none
    out_dtype: str = "bf16"  # "bf16" or "f32"
    accumulate: bool = False  # add to y, in f32
    scatter: bool = False  # rows of y are stored to the rows that an index array names
    row_weights: bool = False  # each row of y is multiplied by a factor
    overlap: bool = True  # decode registers of A while the previous wgmmas run
    early_weight: bool = False  # load weights before griddepcontrol.wait, see kernel.py

    @property
    def columns(self) -> int:
        """Columns of y in a tile."""
        return self.warpgroups * TILE // 2 if self.activation else self.warpgroups * TILE

    # The tile scheduler, the gather and the epilogue read these from any kernel's configuration:

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
        return False  # gate and up share an accumulator

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


# (maximum average rows per group, tile configuration). Boxes of few rows keep a tile from reading rows of x that it
# does not have: with 128 rows of weight, 16 rows of x in bf16 take half as many bytes of a stage as the weights.
CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (16, dict(subtile_m=32, mma_n=(32, 16, 8), box_rows=8, stages=8, warpgroups=4)),
    (40, dict(subtile_m=64, mma_n=(64, 48, 32, 16), box_rows=16, stages=6, warpgroups=4)),
    (112, dict(subtile_m=128, mma_n=(128, 96, 64, 32), box_rows=32, stages=5)),
    (None, dict(subtile_m=256, mma_n=(256, 208, 160, 112, 56), box_rows=32, stages=5, stage_tiles=1, overlap=False)),
)


def fit_registers(config: W4Config) -> W4Config:
    """Return a configuration whose accumulators and registers of A fit beside those of its options.

    That is one without ``overlap``, which needs a second set of registers of A.
    """
    has_options = config.gather or config.bias or config.has_row_values or config.out_dtype != "bf16"
    if not has_options or config.subtile_m <= (32 if config.warpgroups == 4 else 64):
        return config
    return config._replace(overlap=False)


@cache
def select_w4_config(row_layout: str, average: int) -> W4Config:
    """Select the configuration for groups of ``average`` rows."""
    config = W4Config(row_layout=row_layout)
    return config._replace(**next(tile for limit, tile in CONFIGS if limit is None or average <= limit))
