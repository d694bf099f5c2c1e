"""Experts of a layer in torch, one after another, and those of transformers."""

import torch

from moe_numba.expert_parallel.reference import per_token_cast_to_fp8
from moe_numba.grouped_gemm.reference import quantise_rows
from moe_numba.moe_layer import reference

IMPLEMENTATIONS = "grouped_mm", "batched_mm", "eager"  # of transformers, for bfloat16


def expected_output(x, w13, w2, topk_weights, topk_ids, w13_scale=None, w2_scale=None):
    """Return the float64 reference [tokens, hidden] of ``fused_experts``, expert by expert to save memory."""
    total = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for expert in topk_ids.unique().tolist():
        own, ids = slice(expert, expert + 1), torch.where(topk_ids == expert, 0, -1)
        scales = (None, None) if w13_scale is None else (w13_scale[own], w2_scale[own])
        total += reference.fused_experts(x, w13[own], w2[own], topk_weights, ids, *scales)
    return total


def loop_over_experts(x, w13, w2, topk_weights, topk_ids, w13_scale=None, w2_scale=None):
    """Compute the experts one after another with bfloat16 GEMMs of torch.

    The host waits for the GPU, to learn which tokens an expert has. FP8 weights and activations are converted to
    bfloat16 in front of each GEMM: torch has no GEMM with a scale per 128 x 128 block for all GPUs.
    """
    is_fp8, total = w13_scale is not None, torch.zeros(x.shape, device=x.device)
    if is_fp8:
        x = _round_trip(x, per_token_cast_to_fp8)
    for expert in topk_ids.unique().tolist():
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)
        first, second = w13[expert], w2[expert]
        if is_fp8:
            own = slice(expert, expert + 1)
            first = reference.dequantise_blocks(w13[own], w13_scale[own])[0].bfloat16()
            second = reference.dequantise_blocks(w2[own], w2_scale[own])[0].bfloat16()
        activated = reference.silu_and_mul(x[tokens] @ first.T)
        activated = _round_trip(activated, quantise_rows) if is_fp8 else activated.bfloat16()
        total.index_add_(0, tokens, (activated @ second.T) * topk_weights[tokens, column, None])
    return total.bfloat16()


def _round_trip(rows, quantise):
    """Return rows in bfloat16 as they are after a round trip through FP8."""
    values, scales = quantise(rows)
    return (values.float() * scales.repeat_interleave(reference.BLOCK, 1)[:, : rows.shape[1]]).bfloat16()


def transformers_version() -> str | None:
    """Return the version of transformers, or None if it has no implementations of experts, or is not installed."""
    try:
        import transformers
        from transformers.integrations import moe
    except ImportError:
        return None
    return transformers.__version__ if hasattr(moe, "ALL_EXPERTS_FUNCTIONS") else None


class TransformersExperts:
    """Qwen3-MoE's module of experts of transformers 5, with given bfloat16 weights.

    transformers' functions for FP8 experts are not included: they download their kernels.
    """

    def __init__(self, w13, w2):
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        experts, twice, hidden = w13.shape
        self.config = Qwen3MoeConfig(num_experts=experts, hidden_size=hidden, moe_intermediate_size=twice // 2)
        with torch.device("meta"):
            self.module = Qwen3MoeExperts(self.config)
        self.module.gate_up_proj = torch.nn.Parameter(w13, requires_grad=False)
        self.module.down_proj = torch.nn.Parameter(w2, requires_grad=False)

    def __call__(self, implementation, x, topk_weights, topk_ids):
        """Compute the experts; weights are bfloat16 and ids int64, as from Qwen3-MoE's router."""
        self.config._experts_implementation = implementation
        return self.module(x, topk_ids, topk_weights)
