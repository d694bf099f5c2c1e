"""Steps of the block-scaled grouped GEMM: the kernel of ``kernel.py`` with some factories exchanged, and launches.

The first step exchanges the most factories (for those of ``parts.py``). The last one exchanges none: it is the
package's kernel. See ``diagnoses.py`` for variants that are no steps.
"""

from collections.abc import Callable
from typing import Any

import torch

from moe_numba.course.lessons.grouped_gemm_scales import kernel as kernel_in_parts
from moe_numba.course.lessons.grouped_gemm_scales import parts as replacements
from moe_numba.course.steps.simulate import changed_module
from moe_numba.expert_parallel.ranks.compile_ahead import KernelDefinition
from moe_numba.grouped_gemm.block_scaled import kernel as block_scaled_kernel
from moe_numba.grouped_gemm.block_scaled.config import BLOCK_M, BOX_ROWS, BUFFER_COLUMNS, BUFFER_ROWS, BlockScaledConfig
from moe_numba.grouped_gemm.common.constants import BLOCK_K_BYTES, THREADS
from moe_numba.grouped_gemm.common.tma_launch import SIGNATURE as TMA_SIGNATURE
from moe_numba.runtime.compile import TENSOR_MAP
from moe_numba.runtime.device import persistent_ctas
from moe_numba.runtime.launch import address, launcher
from moe_numba.runtime.tensor_map import tensor_map_template

# The fifth argument, the scales of y, is used by silu_and_mul only; here it is the memory of a trace.
SIGNATURE = TENSOR_MAP, *TMA_SIGNATURE[:3], "int32*", *TMA_SIGNATURE[4:]
TRACE_FIELDS = 3  # start and end of a tile in nanoseconds, and its CTA plus 1


# Steps: a configuration, and the factories that replace those of the package's kernel


COLUMNS_128 = BlockScaledConfig(
    block_n=128,
    stages=6,
    max_groups=64,
    keep_weight=True,
    cluster_size=1,
    vector_x_scale=True,  # k is a multiple of 512
    vector_weight_scale=True,
)
COLUMNS_192 = COLUMNS_128._replace(block_n=192, stages=5)
PAIRS_192 = COLUMNS_192._replace(cluster_size=2)
BY_LANES = {
    "make_store": replacements.make_store_by_lanes,
    "BlockScaledLayout": replacements.OneBufferLayout,
    "check_block_scaled_config": replacements.check_one_buffer_config,
}
NO_LOOK_AHEAD = BY_LANES | {
    "make_tma_producer": replacements.make_tma_producer_without_look_ahead,
    "make_aux_producer": replacements.make_factors_without_look_ahead,
}
BY_FACTORS = NO_LOOK_AHEAD | {"make_multiply": replacements.make_multiply_by_factors}
BY_FOUR = NO_LOOK_AHEAD | {
    "make_multiply": replacements.make_multiply_by_scales,
    "make_aux_producer": replacements.make_scales_by_four,
}
BY_ONE = BY_FOUR | {"make_aux_producer": replacements.make_scales_by_one, "aux_warps": replacements.three_aux_warps}
OF_ONE_CTA = BY_ONE | {"make_tma_producer": replacements.make_tma_producer_of_one_cta}
STEPS: dict[str, tuple[BlockScaledConfig, dict[str, Callable]]] = {
    "scales per row": (COLUMNS_128, OF_ONE_CTA),
    "192 columns": (COLUMNS_192, OF_ONE_CTA),
    "pairs of tiles": (PAIRS_192, BY_ONE),
    "scales of four stages": (PAIRS_192, BY_FOUR),
    "factors by producers": (PAIRS_192, BY_FACTORS),
    "barrier tested early": (PAIRS_192, NO_LOOK_AHEAD),
    "look-up ahead": (PAIRS_192, BY_LANES),
    "TMA store": (PAIRS_192._replace(stages=4), {}),
}

# Tiles of the package's table of measurements, as the last step's kernel:
_LAST = STEPS["TMA store"][0]
TILES = {
    "192 columns, pairs": _LAST,
    "192 columns, single": _LAST._replace(cluster_size=1),
    "256 columns, pairs": _LAST._replace(block_n=256, stages=3),
    "256 columns, single": _LAST._replace(block_n=256, stages=3, cluster_size=1),
    "256 columns, early test": _LAST._replace(block_n=256, stages=3, cluster_size=1, early_test=True),
}

KERNELS: dict[str, tuple[BlockScaledConfig, dict[str, Callable]]] = STEPS | {n: (tile, {}) for n, tile in TILES.items()}


def tile_of(config: BlockScaledConfig) -> tuple:
    """Return the fields of a configuration that describe its tile; the others depend on the call."""
    return config.block_n, config.stages, config.cluster_size, config.keep_weight, config.early_test


def changed_fields(before: BlockScaledConfig, after: BlockScaledConfig) -> str:
    """Describe in which fields two configurations differ: "block_n 128 -> 192, stages 6 -> 5"."""
    pairs = zip(before._fields, before, after, strict=True)
    return ", ".join(f"{name} {old} -> {new}" for name, old, new in pairs if old != new)


# Kernels and launches


def make_step_kernel(config: BlockScaledConfig, **parts: Callable) -> tuple[Any, int]:
    """Return the kernel with other factories of these names, and its shared memory in bytes.

    Without any it is the package's kernel.
    """
    if not parts:
        return block_scaled_kernel.make_kernel(config)
    module = changed_module(kernel_in_parts)
    for name, part in parts.items():
        if not hasattr(module, name):
            raise ValueError(f"{name!r} is not the name of a factory of {kernel_in_parts.__name__}")
        setattr(module, name, part)
    return module.make_kernel(config)


def make_kernel_of(config: BlockScaledConfig, parts: tuple) -> Any:
    """Return the kernel of :func:`make_step_kernel`; ``parts`` are pairs of a name and a factory."""
    return make_step_kernel(config, **dict(parts))[0]


def definition(config: BlockScaledConfig, parts: dict[str, Callable]) -> KernelDefinition:
    """Return what :func:`compile_ahead` needs to compile a step."""
    return KernelDefinition(make_kernel_of, (config, tuple(parts.items())), SIGNATURE, THREADS)


class StepLaunch:
    """Launches a variant of the block-scaled kernel for problems of one shape.

    Parameters
    ----------
    config : BlockScaledConfig
    problem : object
        With ``x``, ``weight``, ``x_scale``, ``w_scale`` (contiguous), ``seqlens``, ``cu_seqlens`` and ``out``.
    **parts : factory
        As for :func:`make_step_kernel`.

    Calling it with a problem returns ``problem.out``. A kernel with a traced consumer records its tiles in
    ``trace``, int32 [rows, tiles of columns, 3]: start and end in nanoseconds and the CTA plus 1, at the first row of
    each tile.
    """

    def __init__(self, config: BlockScaledConfig, problem: Any, **parts: Callable):
        self.config, self.parts = config, parts
        kernel, shared_bytes = make_step_kernel(config, **parts)
        groups, n, k = problem.weight.shape
        device, pair = problem.x.device, config.cluster_size
        options = dict(launch_bounds=THREADS, shared_bytes=shared_bytes, cluster=pair if pair > 1 else None)
        self.start = launcher(kernel, SIGNATURE, device.index or 0, dependent=True, **options)
        self.x_map = tensor_map_template(problem.x, (BOX_ROWS, BLOCK_K_BYTES), swizzle=128, name="x")
        box = 1, config.half_rows, BLOCK_K_BYTES
        self.weight_map = tensor_map_template(problem.weight, box, swizzle=128, name="weight")
        self.y_map = tensor_map_template(problem.out, (BUFFER_ROWS, BUFFER_COLUMNS), swizzle=128, name="out")
        self.sizes = groups, len(problem.x), 0, n, k, -(-k // BLOCK_K_BYTES), 1, 0
        self.grid = persistent_ctas(device, 2)
        self.trace = torch.zeros(
            len(problem.x), -(-n // config.columns), TRACE_FIELDS, dtype=torch.int32, device=device
        )

    def __call__(self, problem: Any) -> torch.Tensor:
        """Launch the kernel on the current stream."""
        p, lengths = problem, address(problem.seqlens)
        pointers = p.out, self.trace, p.seqlens, p.cu_seqlens, p.x_scale, p.w_scale
        maps = self.x_map(p.x), self.weight_map(p.weight), self.y_map(p.out)
        unused = address(p.x), lengths, len(p.x), 0  # of gather
        self.start(self.grid, THREADS, None, *maps, *map(address, pointers), *self.sizes, *unused)
        return p.out

    def __repr__(self):
        config, cluster = self.config, ", clusters of 2" * (self.config.cluster_size == 2)
        return f"tiles of {BLOCK_M} x {config.block_n}, {config.stages} stages{cluster}"
