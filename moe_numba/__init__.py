"""Mixture-of-Experts kernels for NVIDIA GPUs, written in Python with Numba CUDA.

Public functions in the order in which a token meets them: routing, alignment, expert-parallel dispatch, the experts'
grouped GEMMs, combine. They need the extra `kernels`. Without a GPU the same kernels run in a simulator.
`moe_numba.simulator` is useful on its own and needs no extra.
"""

import importlib
from typing import TYPE_CHECKING

from moe_numba import simulator  # decides, before Numba is imported, whether there is a GPU to compile for
from moe_numba.extras import missing_extra

__version__ = "0.2.0"

simulator.compiler.MODULE = "moe_numba.runtime.compile_report"

if TYPE_CHECKING:
    from moe_numba.align import moe_align_block_size
    from moe_numba.align.with_gate import biased_grouped_topk_align
    from moe_numba.expert_parallel import Buffer, Config, get_dispatch_layout
    from moe_numba.gate import ExpertPlacement, biased_grouped_topk
    from moe_numba.grouped_gemm import (
        group_gemm_bf16,
        group_gemm_blockwise_fp8,
        group_gemm_mxfp4,
        group_gemm_pertensor_fp8,
        group_gemm_rowwise_fp8,
        group_gemm_silu_and_mul_bf16,
        group_gemm_silu_and_mul_blockwise_fp8,
        group_gemm_silu_and_mul_mxfp4,
        group_gemm_silu_and_mul_pertensor_fp8,
        k_grouped_gemm_bf16,
        pack_mxfp4,
    )
    from moe_numba.moe_layer import (
        ExpertsWorkspace,
        pack_mxfp4_experts,
        per_token_quant_fp8,
        permute_cast_to_fp8,
        permute_tokens,
        shard_experts,
        silu_and_mul_quant_fp8,
    )
    from moe_numba.moe_layer.fused_experts import fused_experts
    from moe_numba.moe_layer.fused_moe import fused_moe
    from moe_numba.moe_layer.group_by_expert.api import group_by_expert
    from moe_numba.moe_layer.silu_and_mul.api import silu_and_mul
    from moe_numba.moe_layer.warm_up import warm_up
    from moe_numba.moe_layer.weighted_sum.api import weighted_sum
    from moe_numba.quantise.fp8_cast import per_token_cast_back, per_token_cast_to_fp8
    from moe_numba.runtime.prepare import prepare
    from moe_numba.runtime.validate import UnsupportedDeviceError
    from moe_numba.shared_experts import fuse_checkpoint, fuse_routing, memory_cost

# Loaded on first use, so that the simulator can be imported without torch.
_HOME = {
    "ExpertPlacement": "gate",
    "biased_grouped_topk": "gate",
    "biased_grouped_topk_align": "align.with_gate",
    "fuse_routing": "shared_experts",
    "fuse_checkpoint": "shared_experts",
    "memory_cost": "shared_experts",
    "moe_align_block_size": "align",
    "get_dispatch_layout": "expert_parallel",
    "Buffer": "expert_parallel",
    "Config": "expert_parallel",
    "per_token_cast_to_fp8": "quantise.fp8_cast",
    "per_token_cast_back": "quantise.fp8_cast",
    "group_gemm_pertensor_fp8": "grouped_gemm",
    "group_gemm_blockwise_fp8": "grouped_gemm",
    "group_gemm_rowwise_fp8": "grouped_gemm",
    "group_gemm_bf16": "grouped_gemm",
    "group_gemm_mxfp4": "grouped_gemm",
    "group_gemm_silu_and_mul_mxfp4": "grouped_gemm",
    "pack_mxfp4": "grouped_gemm",
    "group_gemm_silu_and_mul_bf16": "grouped_gemm",
    "group_gemm_silu_and_mul_pertensor_fp8": "grouped_gemm",
    "group_gemm_silu_and_mul_blockwise_fp8": "grouped_gemm",
    "k_grouped_gemm_bf16": "grouped_gemm",
    "group_by_expert": "moe_layer",
    "pack_mxfp4_experts": "moe_layer",
    "per_token_quant_fp8": "moe_layer",
    "permute_cast_to_fp8": "moe_layer",
    "permute_tokens": "moe_layer",
    "shard_experts": "moe_layer",
    "silu_and_mul": "moe_layer",
    "silu_and_mul_quant_fp8": "moe_layer",
    "weighted_sum": "moe_layer",
    "fused_experts": "moe_layer",
    "fused_moe": "moe_layer",
    "ExpertsWorkspace": "moe_layer",
    "prepare": "runtime.prepare",
    "warm_up": "moe_layer.warm_up",
    "UnsupportedDeviceError": "runtime.validate",
}

__all__ = [
    "Buffer",
    "Config",
    "ExpertPlacement",
    "ExpertsWorkspace",
    "UnsupportedDeviceError",
    "biased_grouped_topk",
    "biased_grouped_topk_align",
    "fuse_checkpoint",
    "fuse_routing",
    "fused_experts",
    "fused_moe",
    "get_dispatch_layout",
    "group_by_expert",
    "group_gemm_bf16",
    "group_gemm_blockwise_fp8",
    "group_gemm_mxfp4",
    "group_gemm_pertensor_fp8",
    "group_gemm_rowwise_fp8",
    "group_gemm_silu_and_mul_bf16",
    "group_gemm_silu_and_mul_blockwise_fp8",
    "group_gemm_silu_and_mul_mxfp4",
    "group_gemm_silu_and_mul_pertensor_fp8",
    "k_grouped_gemm_bf16",
    "memory_cost",
    "moe_align_block_size",
    "pack_mxfp4",
    "pack_mxfp4_experts",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "per_token_quant_fp8",
    "permute_cast_to_fp8",
    "permute_tokens",
    "prepare",
    "shard_experts",
    "silu_and_mul",
    "silu_and_mul_quant_fp8",
    "simulator",
    "warm_up",
    "weighted_sum",
]


# Imported when they are first named, as `moe_numba.moe_layer.MoELayer`.
_SUBPACKAGES = {"expert_parallel", "grouped_gemm", "integrations", "moe_layer", "ptx", "quantise", "shared_experts"}


def __getattr__(name):
    if name in _SUBPACKAGES:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ImportError as error:
            raise missing_extra(error, f"moe_numba.{name}") or error from None
    if name in _HOME:
        try:
            module = importlib.import_module(f"{__name__}.{_HOME[name]}")
        except ImportError as error:
            raise missing_extra(error, f"moe_numba.{name}") or error from None
        value = globals()[name] = getattr(module, name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_HOME])
