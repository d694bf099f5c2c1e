"""Backward of ``fused_experts``, and ``fused_moe`` with gradients: the gate, then ``fused_experts``."""

from functools import partial

import torch

from moe_numba.gate import biased_grouped_topk
from moe_numba.grouped_gemm.api.autograd import transposed, weight_gradient
from moe_numba.grouped_gemm.api.bf16 import group_gemm_bf16
from moe_numba.grouped_gemm.api.k_grouped import k_grouped_gemm_bf16
from moe_numba.grouped_gemm.call.checks import has_wgmma
from moe_numba.moe_layer.backward.activation import silu_and_mul_backward
from moe_numba.moe_layer.fused_experts import fused_experts
from moe_numba.moe_layer.fused_moe import check_layer, fused_moe, own_names
from moe_numba.moe_layer.group_by_expert.api import group_by_expert
from moe_numba.moe_layer.permute.api import permute_tokens
from moe_numba.moe_layer.weighted_sum.api import weighted_sum
from moe_numba.runtime.torch_op import OPS, register_autograd, register_differentiable

_KEPT = "x", "w13", "w2", "topk_weights", "topk_ids", "w13_bias", "w2_bias"
_GRADIENTS = "x", "w13", "w2", "topk_weights", "w13_bias", "w2_bias", "shared"


def refuse_quantised(function, arguments):
    """Raise if weights are not in bfloat16, naming a tensor that requires grad."""
    if (dtype := arguments["w13"].dtype) != torch.bfloat16:
        name = next(name for name, t in arguments.items() if isinstance(t, torch.Tensor) and t.requires_grad)
        raise ValueError(
            f"{name} requires grad; {function} has a backward only with bfloat16 weights, and w13 is {dtype}: use "
            "torch.no_grad() or detach()"
        )


def setup_context(ctx, call, output):
    """Keep the inputs; the backward computes gate and up again, so that no activation is stored."""
    ctx.needed = {name for name in _GRADIENTS if (t := getattr(call, name)) is not None and t.requires_grad}
    refuse_quantised("fused_experts", vars(call))
    ctx.save_for_backward(*(getattr(call, name) for name in _KEPT))
    ctx.activation = call.activation, call.alpha, call.limit


def backward(ctx, grad):
    """Return the gradients that are needed, by name.

    With the gradient g of a token's output, u = w2.T @ g for each of its assignments is one grouped GEMM, of which
    :func:`silu_and_mul_backward` makes the gradients of gate, up and the routing weights, and w * a for that of w2.
    """
    if torch.is_grad_enabled():
        raise NotImplementedError("create_graph is True, but fused_experts has no second derivative")
    x, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias = ctx.saved_tensors
    grad, wanted = grad.contiguous(), ctx.needed
    if not len(x):
        inputs = dict(zip(_KEPT, ctx.saved_tensors, strict=True), shared=grad)
        return {name: torch.zeros_like(inputs[name]) for name in wanted}
    seqlens, cu_seqlens, gather_indices, inverse_indices = group_by_expert(topk_ids, len(w13))
    groups = seqlens, cu_seqlens
    gate_up = group_gemm_bf16(x, w13, *groups, gather_indices=gather_indices, bias=w13_bias)
    u = group_gemm_bf16(grad, transposed(w2), *groups, gather_indices=gather_indices)
    weights = topk_weights.contiguous()
    of_gate_up, weighted, of_weights = silu_and_mul_backward(gate_up, u, inverse_indices, weights, *ctx.activation)
    result = {"shared": grad, "topk_weights": of_weights}
    if w2_bias is not None and "topk_weights" in wanted:
        products = grad.float() @ w2_bias.float().T  # [tokens, experts]
        is_valid = inverse_indices >= 0
        ids = torch.where(is_valid, topk_ids, 0).long()
        result["topk_weights"] = of_weights + products.gather(1, ids) * is_valid
    if "x" in wanted:
        rows = group_gemm_bf16(of_gate_up, transposed(w13), *groups)
        result["x"] = weighted_sum(rows, inverse_indices, torch.ones_like(weights))
    outer_products = partial(_outer_products, groups=groups, dtype=torch.bfloat16)
    if "w13" in wanted:
        result["w13"] = weight_gradient(of_gate_up, permute_tokens(x, inverse_indices), w13, outer_products)
    if "w2" in wanted:
        result["w2"] = weight_gradient(permute_tokens(grad, inverse_indices), weighted, w2, outer_products)
    if "w13_bias" in wanted:
        ones = torch.ones(len(of_gate_up), 8, dtype=torch.bfloat16, device=x.device)
        result["w13_bias"] = _outer_products(of_gate_up, ones, groups, w13_bias.dtype)[:, :, 0].to(w13_bias.dtype)
    if "w2_bias" in wanted:
        result["w2_bias"] = (_routing_matrix(topk_ids, weights, len(w13)).T @ grad.float()).to(w2_bias.dtype)
    return {name: result[name] for name in wanted}


def _outer_products(a, b, groups, dtype):
    """Return the sum of the outer products of each group's rows, on GPUs without wgmma by torch, and in bfloat16."""
    if has_wgmma(a.device):
        return k_grouped_gemm_bf16(a, b, *groups, out_dtype=dtype)
    return torch.nn.functional.grouped_mm(a.mT, b, offs=groups[1][1:])


def _routing_matrix(topk_ids, weights, num_experts):
    """Return the weight of each expert for each token, [tokens, experts] in float32, added in order of the columns."""
    experts = torch.arange(num_experts, device=topk_ids.device)
    matrix = torch.zeros(len(topk_ids), num_experts, device=topk_ids.device)
    for k in range(topk_ids.shape[1]):
        matrix += (topk_ids[:, k, None] == experts) * weights[:, k, None]
    return matrix


def differentiable_moe(**arguments):
    """Compute a call of ``fused_moe`` in which a tensor requires grad, by functions that have a backward."""
    if (
        not torch.compiler.is_dynamo_compiling()
    ):  # else the fake implementations check, under the names of two functions
        check_layer(arguments)
    refuse_quantised("fused_moe", arguments)
    of_gate = {name: arguments[name] for name in OPS["biased_grouped_topk"] if name in arguments and name != "out"}
    of_gate |= dict(gating_output=arguments["router_logits"], apply_routed_scaling_factor_on_output=True)
    with own_names():
        weights, ids = biased_grouped_topk(**of_gate)
    of_experts = {name: arguments[name] for name in OPS["fused_experts"] if name in arguments and name != "workspace"}
    return fused_experts(topk_weights=weights, topk_ids=ids, **of_experts)


register_autograd(fused_experts, backward, setup_context)
register_differentiable(fused_moe, differentiable_moe)
