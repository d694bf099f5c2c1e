"""Compile-time configuration and shared-memory layout of the grouped GEMM kernel."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from moe_numba.grouped_gemm.common.constants import (
    ALPHA,
    AUX_PRODUCER_WARPS,
    BLOCK_K_BYTES,
    BLOCK_N,
    EPILOGUE_BYTES,
    LIMIT,
    MAX_GROUPS,
    MAX_SHARED_BYTES,
    THREADS,
    WARPS,
)

SILU_ROWS = 32  # rows of y that the silu-and-mul epilogue processes at once
SILU_ROW_BYTES = 2 * 2 * BLOCK_N + 16  # a row's gate and up in bf16, and 16 bytes that spread rows over the banks

# With such tiles a group may have rows for several, which read the same weights. With weights kept in L2, bfloat16 with
# 256 rows per group and 4096 x 7168 takes 10 % less time on an H200; others gain up to 3 %, or change by about 1 %.
MIN_BLOCK_M_KEEPING_WEIGHT = 128


class GemmConfig(NamedTuple):
    """Compile-time configuration of the kernel.

    The kernel computes the transposed product, so rows of x are wgmma's N and rows of weight its M. A tile has
    ``m_subtiles`` subtiles of at most ``subtile_m`` rows of x, each with its own accumulator, by 128 rows of weight.
    """

    dtype: str = "e4m3"  # of x and weight: "e4m3" or "bf16"
    # "tensor": one per group; "row": per row of x and of weight; "block": per 1 x 128 of x, 128 x 128 of weight; "none"
    scaling: str = "tensor"
    subtile_m: int = 128  # maximum rows of x in a subtile
    m_subtiles: int = 1  # subtiles per tile, 1 or 2
    mma_n: tuple[int, ...] = (128,)  # wgmma N sizes, descending; a tile uses the smallest that holds its subtile
    stages: int = 5  # pipeline stages
    row_layout: str = "lengths"  # a group's rows: "lengths" and starts, "offsets" (group ends), or "masked"
    max_groups: int = MAX_GROUPS
    silu_and_mul: bool = False  # weight is gate and up; the kernel writes silu(gate) * up, in FP8 if dtype is e4m3
    activation: str = "silu"  # "silu": gate is stacked on up; "swigluoai": their rows are interleaved, with limits
    alpha: float = ALPHA  # of swigluoai
    limit: float = LIMIT  # of swigluoai
    ragged_n: bool = False  # with FP8 results of silu_and_mul: their last block has less than 128 columns
    bias: str = ""  # dtype of a bias per row of weight: "bf16" or "f32", or none
    out_dtype: str = "bf16"  # "bf16" or "f32"
    accumulate: bool = False  # add to y, in f32
    scatter: bool = False  # rows of y are stored to the rows that an index array names
    row_weights: bool = False  # each row of y is multiplied by a factor
    cluster_size: int = 1  # CTAs with neighbouring tiles of weight that load their rows of x by multicast, 1 or 2
    gather: bool = False  # rows of x are read through an array of row indices
    warp_uniform: bool = True  # tell the compiler which values of the main loop are warp-uniform
    fast_accumulation: bool = False  # FP8: accumulate over all of k in the tensor cores, see `multiply_stage`
    band_rows: int = 0  # rows of a group whose tiles follow one another; 0: all, see `scheduler.make_get_banded_tile`
    # Block scales as packed UE8M0 exponents instead of float32, see `block_scales.py`:
    packed_x_scale: bool = False
    packed_weight_scale: bool = False
    weight_major: str = "k"  # contiguous dimension of weight [groups, n, k]: "k", or with bf16 "mn", which is n
    scaled_x: bool = False  # with scaling "tensor": x has a scale, too
    scaled_y: bool = False  # with FP8 results of silu_and_mul: y has one given scale instead of one per 128 columns
    early_weight: bool = False  # load weights before griddepcontrol.wait, see kernel.py
    stores_gate_up: bool = False  # with bf16 results of silu_and_mul: gate and up are an output, too, for a backward
    low_rank: bool = (
        False  # with bf16: the product of a second pair, x_low and weight_low, is added to that of x and weight
    )

    @property
    def keep_weight(self) -> bool:
        """Whether weights are kept in L2 as long as rows of x: groups of many rows read them more than once."""
        return self.block_m >= MIN_BLOCK_M_KEEPING_WEIGHT

    @property
    def block_m(self) -> int:
        """Maximum rows of x in a tile."""
        return self.subtile_m * self.m_subtiles

    @property
    def quantises(self) -> bool:
        """Whether y is FP8, with a scale per 128 columns or a given one."""
        return self.silu_and_mul and self.dtype == "e4m3"

    @property
    def interleaved(self) -> bool:
        """Whether gate and up are the even and the odd rows of weight."""
        return self.silu_and_mul and self.activation == "swigluoai"

    @property
    def splits_weight(self) -> bool:
        """Whether the tensor map of weight has gate and up as a dimension of its own."""
        return self.interleaved or self.ragged_n

    @property
    def has_row_terms(self) -> bool:
        """Whether the epilogue reads values for each row of weight."""
        return bool(self.bias) or self.scaling == "row"

    @property
    def has_row_values(self) -> bool:
        """Whether the epilogue reads values for each row of x."""
        return self.scaling == "row" or self.row_weights or self.scatter

    @property
    def epilogue_loads(self) -> bool:
        """Whether the epilogue reads arrays of its own."""
        return self.has_row_terms or self.has_row_values

    @property
    def takes_epilogue_inputs(self) -> bool:
        """Whether the kernel has parameters for these arrays: with ``low_rank`` also if the epilogue reads none."""
        return self.epilogue_loads or self.low_rank

    @property
    def scale_in_tile(self) -> bool:
        """Whether the producer publishes the group's scale with a tile; otherwise it publishes the group."""
        return self.scaling == "tensor" and not self.has_row_terms


@dataclass(frozen=True)
class SharedMemoryLayout:
    """Offsets in the dynamic shared memory of a CTA, which begins at a multiple of 1024 bytes.

    The kernel has no static shared memory: the linker does not guarantee a dynamic array's alignment behind static
    arrays. Offsets count elements of the view that is named.
    """

    config: GemmConfig
    threads = THREADS

    @property
    def subtile_bytes(self) -> int:
        return self.config.subtile_m * BLOCK_K_BYTES

    @property
    def x_box_rows(self) -> int:
        """Rows of x in one TMA load: a subtile, or half of one if two CTAs share a single subtile."""
        return self.config.subtile_m // (self.config.cluster_size if self.config.m_subtiles == 1 else 1)

    @property
    def weight_tiles(self) -> int:
        """Tiles of weight in a stage: gate and up, or one."""
        return 2 if self.config.silu_and_mul else 1

    @property
    def accumulators(self) -> int:
        """Accumulators of a consumer warpgroup: one for each subtile, or for gate and up."""
        return 2 if self.config.silu_and_mul else self.config.m_subtiles

    @property
    def x_offset(self) -> int:
        """u8, within a stage: x lies behind the tiles of weight."""
        return self.weight_tiles * BLOCK_N * BLOCK_K_BYTES

    @property
    def stage_bytes(self) -> int:
        return self.x_offset + self.config.m_subtiles * self.subtile_bytes

    @property
    def tma_bytes(self) -> int:
        """Bytes of a stage that TMA writes."""
        return self.x_offset if self.config.gather else self.stage_bytes

    @property
    def epilogue_offset(self) -> int:
        """u8."""
        return self.config.stages * self.stage_bytes

    @cached_property
    def scale_pitch(self) -> int:
        """f32 elements from one quarter of a subtile's scales to the next, so that quarters start in different banks.

        Thread ``q`` of four holds columns ``8 j + 2 q + i`` of an accumulator. Their scales form quarter ``q``, ordered
        by j and i.
        """
        count = -(-self.config.subtile_m // 16) * 4
        return count + 4 * (count % 16 == 0)

    @property
    def stage_scales(self) -> int:
        """f32 elements of a stage's scales: 4 quarters for each accumulator."""
        return 4 * self.scale_pitch * self.accumulators if self.config.scaling == "block" else 0

    @cached_property
    def scale_offset(self) -> int:
        """f32."""
        epilogue_bytes = SILU_ROWS * SILU_ROW_BYTES if self.config.quantises else 2 * EPILOGUE_BYTES
        return (self.epilogue_offset + epilogue_bytes) // 4

    @cached_property
    def full(self) -> int:
        """barriers: index of the first stage's full barrier, which completes when the stage's data have arrived."""
        return -(-(self.scale_offset + self.config.stages * self.stage_scales) // 2)

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
    def row_index_pitch(self) -> int:
        """i32 elements from one subtile's row indices to the next's: a multiple of the warp size."""
        return -(-self.config.subtile_m // 32) * 32

    @property
    def row_indices(self) -> int:
        """i32 elements that an auxiliary producer warp has for a tile's row indices."""
        return self.config.m_subtiles * self.row_index_pitch if self.config.gather else 0

    @cached_property
    def row_index_offset(self) -> int:
        """i32, a multiple of 4: the row indices of the auxiliary producer warps, which they read four at a time."""
        return -(-(self.first_tile_offset + self.config.max_groups + 1) // 4) * 4

    @property
    def row_value_offsets(self) -> tuple[int, ...]:
        """f32 or i32: the scales of x, row weights and rows of y for the rows of a tile, and the end of them."""
        offset = self.row_index_offset + AUX_PRODUCER_WARPS * self.row_indices
        count, offsets = 4 * self.scale_pitch * self.config.m_subtiles, [offset]
        for used in (self.config.scaling == "row", self.config.row_weights, self.config.scatter):
            offset += count * used
            offsets.append(offset)
        return tuple(offsets)

    @cached_property
    def bytes(self) -> int:
        return 4 * self.row_value_offsets[-1]


def check_config(config: GemmConfig) -> None:
    """Raise ValueError if the kernel does not support a configuration."""
    sizes = config.mma_n
    is_descending = all(large > small for large, small in zip(sizes, sizes[1:]))
    if not sizes or sizes[0] != config.subtile_m or not is_descending or any(n % 8 or not 8 <= n <= 256 for n in sizes):
        raise ValueError(
            f"mma_n is {sizes}; it must descend from subtile_m ({config.subtile_m}) in multiples of 8, from 256 to 8"
        )
    if config.m_subtiles not in (1, 2) or (config.silu_and_mul and config.m_subtiles == 2):
        raise ValueError(f"m_subtiles is {config.m_subtiles}; it must be 1 or 2, and with silu_and_mul 1")
    check_epilogue(config)
    if config.weight_major not in ("k", "mn") or (config.weight_major == "mn" and config.dtype != "bf16"):
        raise ValueError(f"weight_major is {config.weight_major!r}; it must be 'k', or with bf16 'mn'")
    if config.low_rank and (config.dtype != "bf16" or config.gather):
        raise ValueError(
            f"low_rank is True; dtype must be 'bf16', is {config.dtype!r}, and gather False, is {config.gather}"
        )
    if config.cluster_size not in (1, 2):
        raise ValueError(f"cluster_size is {config.cluster_size}; it must be 1 or 2")
    if config.cluster_size == 2 and config.gather:
        raise ValueError("cluster_size is 2; with gather it must be 1, because each CTA copies its own rows")
    if config.cluster_size == 2 and config.m_subtiles == 1 and config.subtile_m % 16:
        raise ValueError(f"subtile_m is {config.subtile_m}; with cluster_size 2 it must be a multiple of 16")
    if (config.scaling == "block" or config.gather) and config.stages < AUX_PRODUCER_WARPS:
        # A warp that handles every third stage could mistake a phase of its barrier for the one after the next.
        raise ValueError(
            f"stages is {config.stages}; with block scaling or gather it must be {AUX_PRODUCER_WARPS} or more"
        )
    if (num_bytes := SharedMemoryLayout(config).bytes) > MAX_SHARED_BYTES:
        raise ValueError(f"{config} needs {num_bytes} bytes of shared memory; a CTA has {MAX_SHARED_BYTES}")


def check_epilogue(config: GemmConfig) -> None:
    """Raise ValueError if the kernel does not support a combination of epilogue options."""
    if config.accumulate and config.out_dtype != "f32":
        raise ValueError(f"out_dtype is {config.out_dtype}; with accumulate it must be f32")
    others = dict(out_dtype="bf16", scatter=False, row_weights=False)
    changed = [name for name, value in others.items() if getattr(config, name) != value]
    if config.silu_and_mul and (changed or config.scaling == "row"):
        raise ValueError(f"silu_and_mul is True; {changed[0] if changed else 'scaling'} must be the default then")
    if config.stores_gate_up and (not config.silu_and_mul or config.dtype != "bf16"):
        raise ValueError("stores_gate_up is True; silu_and_mul must be True, too, and dtype 'bf16'")
    if (config.scaled_x or config.scaled_y) and config.scaling != "tensor":
        raise ValueError(f"scaling is {config.scaling!r}; with scaled_x or scaled_y it must be 'tensor'")
    if config.scaled_y and not config.quantises:
        raise ValueError("scaled_y is True; silu_and_mul must be, too")
    if config.splits_weight and (config.scaling == "block" or (config.ragged_n and not config.quantises)):
        raise ValueError(f"activation is {config.activation}, ragged_n {config.ragged_n}: scales must be per tensor")


# (maximum average rows per group, tile configuration), measured by course/bench/topics/grouped_gemm_tiles.
CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (10, dict(subtile_m=32, mma_n=(32, 16), stages=10, cluster_size=2)),
    (40, dict(subtile_m=64, mma_n=(64, 32), stages=8, cluster_size=2)),
    (120, dict(subtile_m=128, mma_n=(128, 96, 64, 32), stages=6, cluster_size=2)),
    (None, dict(subtile_m=144, m_subtiles=2, mma_n=(144, 136, 128, 120, 104, 88, 64, 32), stages=4, band_rows=3456)),
)
# In bfloat16 with at most one row per group on average, most groups have none, and the others few. In a layer with 64
# to 128 rows for 128 groups (2048 x 768, H200) the first tile takes 3 to 15 % less time than what is best with a row
# for each.
BF16_CONFIGS = (1, dict(subtile_m=16, mma_n=(16, 8), stages=12)), *CONFIGS
# With silu_and_mul a stage has two tiles of weight.
SILU_CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (10, dict(subtile_m=32, mma_n=(32, 16), stages=5, cluster_size=2)),
    (40, dict(subtile_m=64, mma_n=(64, 32), stages=5)),
    (120, dict(subtile_m=96, mma_n=(96, 64), stages=4)),
    (None, dict(subtile_m=144, mma_n=(144, 136, 128, 120), stages=4)),
)
# Per-row scales need registers and shared-memory bandwidth, so the largest tiles are smaller with block scaling. Tiles
# for many rows serve few, too, if a tile can use a small wgmma: then they lose nothing where rows are spread evenly
# (DeepSeek-V3, 64 to 512 tokens, H200: within 1 % of the best tile), and up to half of the time where few groups have
# all rows, of which the host knows nothing.
BLOCK_SCALED_CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (2, dict(subtile_m=64, mma_n=(64, 32, 16), stages=8, cluster_size=2)),
    (40, dict(subtile_m=128, mma_n=(128, 96, 64, 32), stages=6, cluster_size=2)),
    (None, dict(subtile_m=128, mma_n=(128, 96, 64), stages=6, cluster_size=2)),
)
BLOCK_SCALED_SILU_CONFIGS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (40, dict(subtile_m=96, mma_n=(96, 64, 32, 16), stages=4)),
    (None, dict(subtile_m=96, mma_n=(96, 64), stages=4)),
)


@cache
def select_config(scaling: str, row_layout: str, average: int, silu_and_mul: bool = False) -> GemmConfig:
    """Select the configuration for groups of ``average`` rows."""
    if silu_and_mul:
        configs = BLOCK_SCALED_SILU_CONFIGS if scaling == "block" else SILU_CONFIGS
    else:
        configs = {"block": BLOCK_SCALED_CONFIGS, "none": BF16_CONFIGS}.get(scaling, CONFIGS)
    tile = next(tile for limit, tile in configs if limit is None or average <= limit)
    dtype = "bf16" if scaling == "none" else "e4m3"
    return GemmConfig(dtype=dtype, scaling=scaling, row_layout=row_layout, silu_and_mul=silu_and_mul, **tile)


@cache
def fit_one_group(config: GemmConfig, rows: int, n: int, ctas: int) -> GemmConfig:
    """Return the configuration with the number of rows per tile that keeps ``ctas`` CTAs busy until the end.

    Only of a single group the host knows the number of tiles. Each of the CTAs computes ``ceil(tiles / ctas)`` tiles:
    of 8192 x 8192 results, tiles of 288 rows need 15 x 283 rows, those of 256 rows 16 x 256.
    """
    if config.m_subtiles == 1:
        return config

    def rows_per_cta(block_m):
        tiles = -(-rows // block_m)
        return -(-tiles * -(-n // BLOCK_N) // ctas) * -(-rows // tiles)

    sizes = [size for size in config.mma_n if 2 * size * 9 >= 16 * config.subtile_m]  # from 8/9 of the rows on
    subtile_m = min(sizes, key=lambda size: rows_per_cta(config.m_subtiles * size))
    mma_n = tuple(size for size in config.mma_n if size <= subtile_m)
    return config._replace(subtile_m=subtile_m, mma_n=mma_n)


def fit_registers(config: GemmConfig) -> GemmConfig:
    """Return the configuration with at most 128 rows per subtile where the consumers would spill with more.

    Sums that are promoted need an accumulator and a wgmma result, and scales per row or float32 results more addresses.
    """
    needs_more = config.scaling == "row" or config.out_dtype == "f32"
    if config.m_subtiles == 1 or config.dtype == "bf16" or not needs_more:
        return config
    mma_n = tuple(size for size in config.mma_n if size <= 128)
    return config._replace(subtile_m=mma_n[0], mma_n=mma_n)
