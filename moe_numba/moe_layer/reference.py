"""Reference implementation of the layer in torch: grouping, activation, weighted sum, and a loop over the experts."""

import torch

from moe_numba.expert_parallel.reference import per_token_cast_to_fp8
from moe_numba.gate.reference import biased_grouped_topk
from moe_numba.grouped_gemm.reference import BLOCK, quantise_rows


def group_by_expert(topk_ids, num_experts):
    """Group assignments by expert; see :func:`moe_numba.group_by_expert`."""
    tokens, topk = topk_ids.shape
    flat = topk_ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    order = torch.where(valid, flat, num_experts).sort(stable=True).indices
    seqlens = torch.bincount(flat[valid], minlength=num_experts)
    cu_seqlens = torch.cat([seqlens.new_zeros(1), seqlens.cumsum(0)])
    rows = int(cu_seqlens[-1])
    gather_indices = torch.full_like(flat, -1)
    gather_indices[:rows] = order[:rows] // topk
    inverse_indices = torch.full_like(flat, -1)
    inverse_indices[order[:rows]] = torch.arange(rows, device=flat.device)
    outputs = seqlens, cu_seqlens, gather_indices, inverse_indices.view(tokens, topk)
    return tuple(tensor.int() for tensor in outputs)


def weighted_sum(rows, inverse_indices, topk_weights, shared=None):
    """Sum rows per token; see :func:`moe_numba.weighted_sum`.

    A product of a bfloat16 and a float32 is exact in float64, so each step equals a fused multiply-add.
    """
    tokens, topk = inverse_indices.shape
    total = torch.zeros(tokens, rows.shape[1], device=rows.device)
    for k in range(topk):
        index = inverse_indices[:, k].long()
        valid = (index >= 0) & (index < len(rows))
        product = topk_weights[valid, k, None].double() * rows[index[valid]].double()
        total[valid] = (total[valid].double() + product).float()
    if shared is not None:
        total = total + shared.float()
    return total.bfloat16()


def silu_and_mul(x):
    """Return ``silu(gate) * up`` in float32 for [rows, 2 * columns], gate first."""
    gate, up = x.float().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up


def dequantise_blocks(weight, scale):
    """Return an FP8 weight [experts, n, k] times its scales per 128 x 128 block, in float32."""
    wide = scale.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)
    return weight.float() * wide[:, : weight.shape[1], : weight.shape[2]]


def _quantised(rows, quantise):
    """Return float32 rows as they are after a round trip through FP8 with scales per 128 columns."""
    values, scales = quantise(rows)
    return values.float() * scales.repeat_interleave(BLOCK, 1)[:, : rows.shape[1]]


def fused_experts(x, w13, w2, topk_weights, topk_ids, w13_scale=None, w2_scale=None, shared=None):
    """Compute the experts one after another; see :func:`moe_numba.fused_experts` for the arguments.

    Products are accumulated in float64. Where the kernels store bfloat16 or FP8 between two launches, numbers are
    rounded in the same way.
    """
    is_fp8, total = w13_scale is not None, torch.zeros(len(x), w2.shape[1], dtype=torch.float64, device=x.device)
    x = _quantised(x, per_token_cast_to_fp8) if is_fp8 else x.float()
    w13 = dequantise_blocks(w13, w13_scale) if is_fp8 else w13.float()
    w2 = dequantise_blocks(w2, w2_scale) if is_fp8 else w2.float()
    for expert in range(len(w13)):
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)
        activated = silu_and_mul((x[tokens].double() @ w13[expert].double().T).bfloat16())
        activated = _quantised(activated, quantise_rows) if is_fp8 else activated.bfloat16().float()
        rows = (activated.double() @ w2[expert].double().T).bfloat16()
        total.index_add_(0, tokens, rows.double() * topk_weights[tokens, column, None].double())
    return total if shared is None else total + shared.double()


def fused_moe(
    x, router_logits, correction_bias, w13, w2, topk, w13_scale=None, w2_scale=None, shared=None, **gate_options
):
    """Route, then compute the experts; see :func:`moe_numba.fused_moe` for the arguments."""
    options = gate_options | dict(apply_routed_scaling_factor_on_output=True)
    weights, ids = biased_grouped_topk(router_logits, correction_bias, topk, **options)
    return fused_experts(x, w13, w2, weights, ids, w13_scale, w2_scale, shared)
