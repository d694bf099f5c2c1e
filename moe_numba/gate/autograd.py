"""Backward of ``biased_grouped_topk``: the gradient of the logits through the weights of the chosen experts."""

import torch

from moe_numba.gate.api import GateOptions, biased_grouped_topk
from moe_numba.runtime.torch_op import register_differentiable


class _Topk(torch.autograd.Function):
    """The gate, with a gradient of the logits; the choice of experts, and so the bias, has none."""

    @staticmethod
    def forward(ctx, gating_output, arguments):
        weights, ids = biased_grouped_topk(gating_output, **arguments)
        ctx.save_for_backward(gating_output, ids)
        ctx.mark_non_differentiable(ids)
        ctx.options = GateOptions(*(arguments[name] for name in GateOptions._fields))
        return weights, ids

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad, _):
        return logits_gradient(*ctx.saved_tensors, grad, ctx.options), None


def differentiable_topk(gating_output, correction_bias, *, placement=None, **arguments):
    """Return weights and ids of a call in which the logits, or the bias, require grad."""
    if placement is not None and gating_output.requires_grad:
        raise ValueError(
            "gating_output requires grad; biased_grouped_topk has a backward only without placement: use "
            "torch.no_grad() or detach()"
        )
    bias = None if correction_bias is None else correction_bias.detach()
    arguments |= dict(correction_bias=bias, placement=placement)
    if gating_output.requires_grad:
        return _Topk.apply(gating_output, arguments)
    with torch.no_grad():
        return biased_grouped_topk(gating_output, **arguments)


def logits_gradient(logits, topk_ids, grad, options):
    """Return the gradient of the logits from that of the weights.

    Parameters
    ----------
    logits : tensor [tokens, experts]
    topk_ids : tensor [tokens, topk], int32
        As the gate returned them; -1 in rows of padding.
    grad : tensor [tokens, topk], float32
    options : GateOptions

    Returns
    -------
    tensor [tokens, experts], dtype of the logits
        Zero for experts that were not chosen, but with a softmax over all of them that is not renormalised.
    """
    num_experts, shared = logits.shape[1], options.num_fused_shared_experts
    scale = 1.0 if options.routed_scaling_factor is None else options.routed_scaling_factor
    factor = scale if options.apply_routed_scaling_factor_on_output else 1.0
    routed = topk_ids.shape[1] - shared
    ids = topk_ids[:, :routed].long()
    is_valid = ids >= 0
    values = logits.float().clamp(max=torch.finfo(torch.float32).max)  # as the kernels count +inf
    if options.scoring == "softmax":
        everything = values.nan_to_num(nan=-torch.inf, neginf=-torch.inf).softmax(1).nan_to_num(0.0)
        scores = everything.gather(1, ids.clamp(min=0))
    else:
        chosen = values.gather(1, ids.clamp(min=0))
        scores = chosen.sigmoid() if options.scoring == "sigmoid" else torch.nn.functional.softplus(chosen).sqrt()
    is_valid = is_valid & ~scores.isnan()
    scores = torch.where(is_valid, scores, 0.0)
    # A shared expert's weight is the routed sum / scale, before both are divided by the sum.
    of_weights = grad[:, :routed] + grad[:, routed:].sum(1, keepdim=True) / scale
    if options.renormalize:
        total = scores.sum(1, keepdim=True)
        divisor = torch.where(total > 0, total + options.renormalize_epsilon, 1.0)
        products = (of_weights * scores).sum(1, keepdim=True)
        of_scores = (of_weights - torch.where(total > 0, products / divisor, 0.0)) / divisor
    else:
        of_scores = of_weights
    of_scores = torch.where(is_valid, of_scores * factor, 0.0)
    if options.scoring == "softmax":
        of_logits = of_scores * scores
    elif options.scoring == "sigmoid":
        of_logits = of_scores * scores * (1 - scores)
    else:  # the derivative of sqrt(softplus(x)) is sigmoid(x) / (2 * sqrt(softplus(x)))
        of_logits = torch.where(scores > 0, of_scores * chosen.sigmoid() / (2 * scores), 0.0)
    # Rows of padding write to a column of their own, so that no two elements are stored to one place.
    columns = torch.where(ids >= 0, ids, num_experts)
    result = values.new_zeros(len(values), num_experts + 1).scatter(1, columns, of_logits)[:, :num_experts]
    if options.scoring == "softmax":
        result = result - everything * (of_scores * scores).sum(1, keepdim=True)
    return result.to(logits.dtype)


register_differentiable(biased_grouped_topk, differentiable_topk)
