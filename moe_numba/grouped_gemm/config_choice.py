"""Choice of the configuration on GPUs with wgmma: from the table of measurements, or else by the rows per group."""

from functools import lru_cache
from math import log
from typing import Any

from moe_numba.grouped_gemm.config import GemmConfig, fit_one_group, select_config
from moe_numba.grouped_gemm.config_block_scaled import BlockScaledConfig, select_block_scaled_config
from moe_numba.grouped_gemm.config_table import CONFIGS, TABLE
from moe_numba.grouped_gemm.config_w4 import W4Config, select_w4_config

MAX_FACTOR = 2  # between a size and the measured one that stands for it


def kind_of(scaling: str, silu_and_mul: bool = False) -> str:
    """Return the name of a kind of grouped GEMM in the table."""
    return f"{scaling}, silu" if silu_and_mul else scaling


def distance(sizes: tuple[int, ...], others: tuple[int, ...]) -> float:
    """Return the sum of the differences of the sizes' logarithms, or infinity if two differ by over MAX_FACTOR."""
    differences = [abs(log(max(size, 1)) - log(other)) for size, other in zip(sizes, others, strict=True)]
    return sum(differences) if max(differences) <= log(MAX_FACTOR) + 1e-9 else float("inf")


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
    entries = TABLE.get(kind, {})
    shape = min(entries, key=lambda sizes: distance((n, k, groups), sizes), default=None)
    if shape is None or distance((n, k, groups), shape) == float("inf"):
        return None
    nearest = min(entries[shape], key=lambda rows: abs(log(max(average, 1)) - log(rows)))
    is_inside = min(entries[shape]) <= MAX_FACTOR * max(average, 1) and average <= MAX_FACTOR * max(entries[shape])
    return CONFIGS[kind][entries[shape][nearest]] if is_inside else None


def select_w4(
    row_layout: str, n: int, k: int, groups: int, average: int, is_measured: bool, **formats: Any
) -> W4Config:
    """Select the configuration for 4-bit weights; ``formats`` are its fields that describe x and the weight.

    The other arguments are those of the other functions of this module. MXFP4 weights with x in bfloat16 are measured.
    """
    is_measured = is_measured and W4Config(**formats).scales_in_registers
    config = measured_config("mxfp4", n, k, groups, average) if is_measured else None
    if config is None:
        return select_w4_config(row_layout, average, **formats)
    return config._replace(row_layout=row_layout)


def select_wgmma_config(shape, is_plain: bool, is_measured: bool, ctas: int) -> GemmConfig | BlockScaledConfig:
    """Select the configuration for a call.

    Parameters
    ----------
    shape : GemmShape
    is_plain : bool
        Whether the call needs only an epilogue that all kernels have.
    is_measured : bool
        Whether the call needs nothing that the configurations of the table were not measured with.
    ctas : int
        CTAs of the launch.
    """
    scaling, row_layout, silu_and_mul = shape.scaling, shape.row_layout, shape.silu_and_mul
    if is_measured:
        n = shape.n * (1 + silu_and_mul)
        config = measured_config(kind_of(scaling, silu_and_mul), n, shape.k, shape.groups, shape.average)
        if config is not None:
            return config._replace(row_layout=row_layout)
    if scaling == "block" and is_plain:
        config = select_block_scaled_config(row_layout, shape.average, silu_and_mul, shape.n)
        if config is not None:
            return config
    config = select_config(scaling, row_layout, shape.average, silu_and_mul)
    return fit_one_group(config, shape.total_rows, shape.n, ctas) if shape.groups == 1 else config
