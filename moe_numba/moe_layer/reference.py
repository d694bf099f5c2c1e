"""Reference implementation of the layer in torch: grouping, activation, weighted sum, and a loop over the experts."""

import torch

from moe_numba.gate.reference import biased_grouped_topk
from moe_numba.grouped_gemm import reference as gemm
from moe_numba.grouped_gemm.reference import FP8
from moe_numba.moe_layer.launches import ExpertsTensors
from moe_numba.moe_layer.reference_mxfp4 import unpack, unpack_gate_up
from moe_numba.moe_layer.weights import FP8_BLOCK, FP8_TENSOR, MXFP4, format_of, scaling_of
from moe_numba.ptx.conversions import FP8_MAX
from moe_numba.quantise import FP8_SCALE_BLOCK
from moe_numba.quantise.reference import per_token_cast_to_fp8


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


def silu_and_mul(x, activation="silu", alpha=1.702, limit=None):
    """Return the activation of gate and up [rows, 2 * columns] in float32; see :func:`moe_numba.silu_and_mul`."""
    if activation == "swigluoai":
        return gemm.swigluoai(x.float(), alpha, 7.0 if limit is None else limit)
    gate, up = x.float().chunk(2, dim=1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return torch.nn.functional.silu(gate) * up


def quantise_rows(x, scale=None):
    """Quantise float32 rows to FP8 with a scale per row, or with a given one for all.

    Returns
    -------
    values : tensor of x's shape, float8_e4m3fn
    scales : tensor [rows], float32
    """
    if scale is None:
        amax = x.abs().amax(1).clamp(min=1e-4)
        scales, factors = amax * (1 / FP8_MAX), amax.reciprocal() * FP8_MAX
    else:
        scales = scale.reshape(1).expand(len(x))
        factors = scales.reciprocal()
    return (x * factors[:, None]).clamp(-FP8_MAX, FP8_MAX).to(FP8), scales.contiguous()


def dequantise_blocks(weight, scale):
    """Return an FP8 weight [experts, n, k] times its scales per 128 x 128 block, in float32."""
    wide = scale.repeat_interleave(FP8_SCALE_BLOCK, 1).repeat_interleave(FP8_SCALE_BLOCK, 2)
    return weight.float() * wide[:, : weight.shape[1], : weight.shape[2]]


def dequantise_rows(values, scales):
    """Return rows in FP8 times their scales per 128 columns, in float32."""
    return values.float() * scales.repeat_interleave(FP8_SCALE_BLOCK, 1)[:, : values.shape[1]]


def float_weights(t, format_, interleaved, expert):
    """Return w13 and w2 of one expert in float32, those of MXFP4 in the order before packing.

    ``t`` is an ``ExpertsTensors``; ``interleaved``: whether rows of gate and up alternate.
    """
    weights, scales = (t.w13[expert], t.w2[expert]), (t.w13_scale, t.w2_scale)
    if format_ == MXFP4:
        return unpack_gate_up(weights[0], interleaved), unpack(weights[1])
    if format_ == FP8_BLOCK:
        blocks = zip(weights, scales, strict=True)
        return tuple(dequantise_blocks(weight[None], scale[expert, None])[0] for weight, scale in blocks)
    if format_ == FP8_TENSOR:
        return tuple(weight.float() * scale[expert] for weight, scale in zip(weights, scales, strict=True))
    return tuple(weight.float() for weight in weights)


def fused_experts(
    x,
    w13,
    w2,
    topk_weights,
    topk_ids,
    w13_scale=None,
    w2_scale=None,
    shared=None,
    w13_bias=None,
    w2_bias=None,
    activation="silu",
    alpha=1.702,
    limit=None,
    a1_scale=None,
    a2_scale=None,
    x_scale=None,
    use_fast_accum=False,
    batch_invariant=False,
):
    """Compute the experts one after another; see :func:`moe_numba.fused_experts` for the arguments.

    Products are accumulated in float64, whatever ``use_fast_accum`` and ``batch_invariant`` are. Where kernels store
    bfloat16 or FP8 between two launches, numbers are rounded in the same way; gate and up are rounded only with FP8
    weights, as with others an epilogue reads them.
    """
    t = ExpertsTensors(x, w13, w2, topk_weights, topk_ids, w13_scale, w2_scale)
    format_, options = format_of(w13, scaling_of(w13_scale)), dict(activation=activation, alpha=alpha, limit=limit)
    total = torch.zeros(len(x), x.shape[1], dtype=torch.float64, device=x.device)
    if x_scale is None:
        x = _quantised(x.float(), format_, per_token_cast_to_fp8, a1_scale)
    else:
        x = dequantise_rows(x, x_scale)
    for expert in range(len(w13)):
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)
        if not len(tokens):
            continue
        gate_up_weight, down_weight = float_weights(t, format_, activation == "swigluoai", expert)
        gate_up = x[tokens].double() @ gate_up_weight.double().T
        if w13_bias is not None:
            gate_up = gate_up + w13_bias[expert].double()
        gate_up = gate_up.bfloat16() if format_ in (FP8_BLOCK, FP8_TENSOR) else gate_up
        activated = _quantised(silu_and_mul(gate_up, **options), format_, gemm.quantise_rows, a2_scale)
        rows = activated.double() @ down_weight.double().T
        if w2_bias is not None:
            rows = rows + w2_bias[expert].double()
        total.index_add_(0, tokens, rows.bfloat16().double() * topk_weights[tokens, column, None].double())
    return total if shared is None else total + shared.double()


def _quantised(rows, format_, quantise_blocks, scale):
    """Return float32 rows as they are after a round trip through the format of a grouped GEMM's x."""
    if format_ == FP8_BLOCK:
        return dequantise_rows(*quantise_blocks(rows))
    if format_ == FP8_TENSOR:
        values, scales = quantise_rows(rows, scale)
        return values.float() * scales[:, None]
    return rows.bfloat16().float()


def fused_moe(x, router_logits, correction_bias, w13, w2, topk, w13_scale=None, w2_scale=None, shared=None, **options):
    """Route, then compute the experts; see :func:`moe_numba.fused_moe` for the arguments."""
    names = "w13_bias", "w2_bias", "activation", "alpha", "limit", "a1_scale", "a2_scale"
    names = *names, "use_fast_accum", "batch_invariant"
    experts = {name: options.pop(name) for name in names if name in options}
    options |= dict(apply_routed_scaling_factor_on_output=True)
    weights, ids = biased_grouped_topk(router_logits, correction_bias, topk, **options)
    return fused_experts(x, w13, w2, weights, ids, w13_scale, w2_scale, shared, **experts)
