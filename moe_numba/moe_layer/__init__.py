"""An MoE layer on one GPU: gate, group assignments by expert, two grouped GEMMs, activation, weighted sum."""

from typing import TYPE_CHECKING

from moe_numba.moe_layer.backward import experts  # noqa: F401  registers the backward of fused_experts
from moe_numba.moe_layer.fused_experts import fused_experts
from moe_numba.moe_layer.fused_moe import fused_moe
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.lora import fused_experts_lora
from moe_numba.moe_layer.module import Experts, MoELayer
from moe_numba.moe_layer.per_token_quant.api import per_token_quant_fp8, silu_and_mul_quant_fp8
from moe_numba.moe_layer.permute.api import permute_cast_to_fp8, permute_tokens
from moe_numba.moe_layer.shards import shard_experts
from moe_numba.moe_layer.silu_and_mul.api import silu_and_mul
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.moe_layer.weights import pack_mxfp4_experts
from moe_numba.moe_layer.workspace import ExpertsWorkspace

if TYPE_CHECKING:
    from moe_numba.moe_layer.expert_parallel.layer import ExpertParallelMoE

__all__ = [
    "ExpertParallelMoE",
    "Experts",
    "ExpertsWorkspace",
    "MoELayer",
    "fused_experts",
    "fused_experts_lora",
    "fused_moe",
    "group_by_expert",
    "pack_mxfp4_experts",
    "per_token_quant_fp8",
    "permute_cast_to_fp8",
    "permute_tokens",
    "shard_experts",
    "silu_and_mul",
    "silu_and_mul_quant_fp8",
    "weighted_sum",
]


def __getattr__(name):
    if name == "ExpertParallelMoE":  # a quarter of the package, which one GPU does not need
        from moe_numba.moe_layer.expert_parallel.layer import ExpertParallelMoE

        globals()[name] = ExpertParallelMoE
        return ExpertParallelMoE
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
