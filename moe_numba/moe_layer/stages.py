"""The layer stage by stage, each computed by its kernel or by its torch reference."""

import torch

from moe_numba.expert_parallel.fp8_cast import per_token_cast_to_fp8
from moe_numba.expert_parallel.reference import per_token_cast_to_fp8 as reference_cast
from moe_numba.gate import biased_grouped_topk
from moe_numba.gate.reference import biased_grouped_topk as reference_topk
from moe_numba.grouped_gemm import group_gemm_bf16, group_gemm_blockwise_fp8, group_gemm_silu_and_mul_blockwise_fp8
from moe_numba.grouped_gemm import reference as gemm
from moe_numba.moe_layer import reference
from moe_numba.moe_layer.activation import silu_and_mul
from moe_numba.moe_layer.routing import group_by_expert
from moe_numba.moe_layer.unpermute import weighted_sum

STAGES = "gate", "permute", "quantise", "gate_up", "activation", "down", "sum"
_ONLY_FP8, _ONLY_BF16 = {"quantise"}, {"activation"}  # for FP8 weights the gate_up GEMM's epilogue is the activation


def check_stages(names, fp8):
    """Return the names of stages to replace as a frozenset; refuse a name that is no stage with these weights."""
    if isinstance(names, str):
        raise TypeError(f"reference is the str {names!r}; it must be a set of stages")
    allowed = [name for name in STAGES if name not in (_ONLY_BF16 if fp8 else _ONLY_FP8)]
    for name in names:
        if name not in allowed:
            weights = "FP8" if fp8 else "bfloat16"
            raise ValueError(f"reference has {name!r}; the stages with {weights} weights are {', '.join(allowed)}")
    return frozenset(names)


def route(logits, correction_bias, topk, options, replaced):
    """Return the weights [tokens, topk] and ids of the gate."""
    gate = reference_topk if "gate" in replaced else biased_grouped_topk
    return gate(logits, correction_bias, topk, **options)


def run_experts(x, w13, w2, weights, ids, w13_scale, w2_scale, shared, replaced):
    """Compute the experts as :func:`moe_numba.fused_experts`, with the stages in ``replaced`` in torch.

    References of GEMMs wait for the GPU to learn the group sizes.
    """
    group = reference.group_by_expert if "permute" in replaced else group_by_expert
    seqlens, cu_seqlens, gather_indices, inverse_indices = group(ids, len(w13))
    groups, starts = (seqlens, cu_seqlens), cu_seqlens[:-1]
    gathered = dict(gather_indices=gather_indices)
    if w13_scale is not None:
        values, scales = (reference_cast if "quantise" in replaced else per_token_cast_to_fp8)(x)
        if "gate_up" in replaced:
            rows, row_scales = _gather(values, gather_indices), gemm.gather_rows(scales, gather_indices)
            gate_up = gemm.group_gemm_blockwise(rows, w13, seqlens, starts, row_scales, w13_scale)
            values, scales = gemm.quantise_rows(gemm.silu_and_mul(gate_up))
        else:
            values, scales = group_gemm_silu_and_mul_blockwise_fp8(values, w13, *groups, scales, w13_scale, **gathered)
        if "down" in replaced:
            rows = gemm.group_gemm_blockwise(values, w2, seqlens, starts, scales, w2_scale).bfloat16()
        else:
            rows = group_gemm_blockwise_fp8(values, w2, *groups, scales, w2_scale)
    else:
        if "gate_up" in replaced:
            gate_up = gemm.group_gemm(gemm.gather_rows(x, gather_indices), w13, seqlens, starts).bfloat16()
        else:
            gate_up = group_gemm_bf16(x, w13, *groups, **gathered)
        if "activation" in replaced:
            activated = reference.silu_and_mul(gate_up).bfloat16()
        else:
            activated = silu_and_mul(gate_up, num_valid_rows=cu_seqlens[-1:])
        if "down" in replaced:
            rows = gemm.group_gemm(activated, w2, seqlens, starts).bfloat16()
        else:
            rows = group_gemm_bf16(activated, w2, *groups)
    total = reference.weighted_sum if "sum" in replaced else weighted_sum
    return total(rows, inverse_indices, weights, shared)


def _gather(values, indices):
    """Gather FP8 rows as bytes, since torch indexes no FP8 tensors on some devices."""
    return gemm.gather_rows(values.view(torch.uint8), indices).view(values.dtype)
