"""Choice of the configuration on GPUs with wgmma: from the table of measurements, or else by the rows per group."""

from functools import lru_cache
from math import inf, log
from typing import Any

from moe_numba.grouped_gemm.block_scaled.config import BlockScaledConfig, select_block_scaled_config
from moe_numba.grouped_gemm.call.config_table import CONFIGS, TABLE
from moe_numba.grouped_gemm.w4.config import W4Config, select_w4_config
from moe_numba.grouped_gemm.wgmma.config import GemmConfig, fit_one_group, select_config

# Most by which a size may differ from the measured one that stands for it. Farther away the rules are better: with a
# group's rows doubled or halved, the configuration of the other problem took 2 % to 25 % longer than the best one.
SIZE_FACTOR, AVERAGE_FACTOR = 1.25, 1.2


def kind_of(scaling: str, silu_and_mul: bool = False) -> str:
    """Return the name of a kind of grouped GEMM in the table."""
    return f"{scaling}, silu" if silu_and_mul else scaling


def distance(sizes: tuple[int, ...], others: tuple[int, ...], factor: float) -> float:
    """Return the sum of the differences of the sizes' logarithms, or infinity if one is over that of ``factor``."""
    differences = [abs(log(max(size, 1) / other)) for size, other in zip(sizes, others, strict=True)]
    return sum(differences) if max(differences) <= log(factor) + 1e-9 else inf


@lru_cache(maxsize=4096)
def measured_config(kind: str, n: int, k: int, groups: int, average: int) -> Any:
    """Return the configuration of the nearest measured problem, or None if none is near.

    The table has no single groups, of which the host knows the number of tiles; see `config.fit_one_group`.

    Parameters
    ----------
    kind : str
        See :func:`kind_of`; or "mxfp4".
    n, k : int
        Sizes of a weight.
    groups, average : int
        Number of groups, and of rows per group.
    """
    entries, sizes = TABLE.get(kind, {}), (n, k, groups)
    near = {shape: distance(sizes, shape, SIZE_FACTOR) for shape in entries}
    for shape in sorted((shape for shape in near if near[shape] < inf), key=lambda shape: near[shape]):
        by_rows = {rows: distance((average,), (rows,), AVERAGE_FACTOR) for rows in entries[shape]}
        rows = min(by_rows, key=lambda rows: by_rows[rows])
        if by_rows[rows] < inf:
            return CONFIGS[kind][entries[shape][rows]]
    return None


def select_w4(row_layout: str, n: int, k: int, groups: int, average: int, in_tuning_table: bool) -> W4Config:
    """Select the configuration for MXFP4 weights. The arguments are those of the other functions of this module."""
    config = measured_config("mxfp4", n, k, groups, average) if in_tuning_table else None
    if config is None:
        return select_w4_config(row_layout, average)
    return config._replace(row_layout=row_layout)


def select_wgmma_config(
    shape, default_epilogue: bool, in_tuning_table: bool, ctas: int
) -> GemmConfig | BlockScaledConfig:
    """Select the configuration for a call.

    Parameters
    ----------
    shape : GemmShape
    default_epilogue : bool
        Whether the call needs only an epilogue that all kernels have.
    in_tuning_table : bool
        Whether the call needs nothing that the configurations of the table were not measured with.
    ctas : int
        CTAs of the launch.
    """
    scaling, row_layout, silu_and_mul = shape.scaling, shape.row_layout, shape.silu_and_mul
    if in_tuning_table:
        n = shape.n * (1 + silu_and_mul)
        config = measured_config(kind_of(scaling, silu_and_mul), n, shape.k, shape.groups, shape.average)
        if config is not None:
            return config._replace(row_layout=row_layout)
    if scaling == "block" and default_epilogue:
        config = select_block_scaled_config(row_layout, shape.average, silu_and_mul, shape.n)
        if config is not None:
            return config
    config = select_config(scaling, row_layout, shape.average, silu_and_mul)
    return fit_one_group(config, shape.total_rows, shape.n, ctas) if shape.groups == 1 else config
