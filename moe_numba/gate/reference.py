"""Grouped top-k routing in torch: the ground truth, readable above all, and the check that every kernel must pass."""

import torch

SCORINGS = ("sigmoid", "softmax", "sqrtsoftplus")


def scores_of(gating_output, scoring="sigmoid"):
    """What each expert is worth to each token, before the bias: [tokens, experts], the dtype of the logits.

    A score below 2**-126, where float32 runs out of normal numbers, counts as 0.
    """
    if scoring == "sigmoid":
        scores = gating_output.sigmoid()
    elif scoring == "softmax":
        scores = gating_output.softmax(dim=-1)
    else:
        largest = torch.finfo(torch.float32).max  # an infinite logit must not make an infinite weight
        scores = torch.nn.functional.softplus(gating_output.clamp(max=largest), threshold=50.0).sqrt()
    return scores.masked_fill(scores < torch.finfo(torch.float32).tiny, 0.0)


def best_first(values):
    """Indices of each row from best to worst: ties keep the lower index first, NaN comes last."""
    missing = values.isnan()
    order = values.masked_fill(missing, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    missing_last = missing.gather(-1, order).to(torch.uint8).sort(dim=-1, stable=True).indices
    return order.gather(-1, missing_last)


def best_two(choice, num_expert_group):
    """The two best scores of each group of experts: [tokens, groups, 2]. NaN counts as -inf."""
    tokens, num_experts = choice.shape
    grouped = choice.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    grouped = grouped.view(tokens, num_expert_group, num_experts // num_expert_group)
    return grouped.gather(-1, best_first(grouped)[..., :2])


def choose(choice, count, num_expert_group=1, topk_group=1):
    """The best ``count`` experts of the best ``topk_group`` groups, best first: [tokens, count].

    A group is worth the sum of its two best experts.
    """
    tokens, num_experts = choice.shape
    groups = best_first(best_two(choice, num_expert_group).sum(dim=-1))[:, :topk_group]
    kept = torch.zeros(tokens, num_expert_group, dtype=torch.bool, device=choice.device).scatter_(1, groups, True)
    kept = kept.repeat_interleave(num_experts // num_expert_group, dim=1)
    # The experts of the other groups move behind the rest, so that even a NaN of a kept group comes before them.
    order = best_first(choice)
    others_last = (~kept).gather(1, order).to(torch.uint8).sort(dim=1, stable=True).indices
    return order.gather(1, others_last)[:, :count]


def weigh(
    chosen,
    num_fused_shared_experts=0,
    renormalize=True,
    routed_scaling_factor=1.0,
    apply_routed_scaling_factor_on_output=False,
):
    """The weights that belong to the chosen experts' scores [tokens, routed], those of shared experts appended."""
    weights = chosen.masked_fill(chosen.isnan(), 0.0)
    total = weights.sum(dim=1, keepdim=True)
    weights = torch.cat([weights, (total / routed_scaling_factor).expand(-1, num_fused_shared_experts)], dim=1)
    if renormalize:
        weights = weights / torch.where(total > 0, total, 1.0)
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    return weights


def biased_grouped_topk(
    gating_output,
    correction_bias,
    topk,
    renormalize=True,
    num_expert_group=1,
    topk_group=1,
    num_fused_shared_experts=0,
    routed_scaling_factor=1.0,
    apply_routed_scaling_factor_on_output=False,
    num_token_non_padded=None,
    scoring="sigmoid",
    dtype=torch.float32,
):
    """Route each token to ``topk`` experts, in plain torch; the arguments are :func:`moe_numba.biased_grouped_topk`'s.

    ``dtype`` is the arithmetic's: float32 as in the kernels, or float64 to judge them.
    """
    tokens, num_experts = gating_output.shape
    scores = scores_of(gating_output.to(dtype), scoring)
    choice = scores if correction_bias is None else scores + correction_bias.to(dtype)
    ids = choose(choice, topk - num_fused_shared_experts, num_expert_group, topk_group)
    weights = weigh(
        scores.gather(1, ids),
        num_fused_shared_experts,
        renormalize,
        routed_scaling_factor,
        apply_routed_scaling_factor_on_output,
    )
    shared = torch.arange(num_experts, num_experts + num_fused_shared_experts, device=ids.device)
    ids = torch.cat([ids, shared.expand(tokens, -1)], dim=1)
    if num_token_non_padded is not None:
        padded = torch.arange(tokens, device=ids.device)[:, None] >= int(num_token_non_padded)
        ids, weights = ids.masked_fill(padded, -1), weights.masked_fill(padded, 0.0)
    return weights.to(torch.float32), ids.to(torch.int32)


def mismatch(weights, ids, gating_output, correction_bias, topk, *, tolerance=1e-6, **options):
    """Say what is wrong with a routing, or None if nothing is.

    The judge computes in float64. Where its choice hangs on a difference that is smaller than float32 arithmetic can
    promise (``tolerance``, for scores of about 1), other ids are accepted if they are distinct, in range and as good to
    within the tolerance. Everywhere else ids must be the judge's, in its order; an exact tie is no excuse.

    Parameters
    ----------
    weights, ids : torch.Tensor
        The routing, [tokens, topk].
    gating_output, correction_bias, topk, **options
        What :func:`biased_grouped_topk` was called with.
    tolerance : float

    Returns
    -------
    str or None
    """
    tokens, num_experts = gating_output.shape
    routed = topk - options.get("num_fused_shared_experts", 0)
    groups, topk_group = options.get("num_expert_group", 1), options.get("topk_group", 1)
    if tuple(ids.shape) != (tokens, topk) or tuple(weights.shape) != (tokens, topk):
        return f"the outputs have shapes {tuple(weights.shape)} and {tuple(ids.shape)}, not {(tokens, topk)}"
    if weights.dtype != torch.float32 or ids.dtype != torch.int32:
        return f"the outputs are {weights.dtype} and {ids.dtype}, not float32 and int32"
    if not weights.isfinite().all():
        return f"token {_first(~weights.isfinite())} has a weight that is not finite"

    right_weights, right_ids = biased_grouped_topk(
        gating_output, correction_bias, topk, **{**options, "dtype": torch.float64}
    )
    scores = scores_of(gating_output.double(), options.get("scoring", "sigmoid"))
    choice = scores if correction_bias is None else scores + correction_bias.double()
    other = (ids != right_ids).any(dim=1)
    doubtful = other & _is_close(choice, groups, topk_group, routed, tolerance) & (right_ids[:, 0] >= 0)
    wrong = other & ~doubtful
    if wrong.any():
        row = _first(wrong[:, None])
        return (
            f"{int(wrong.sum())} of {tokens} tokens have wrong ids; the first is token {row}: "
            f"{ids[row].tolist()} instead of {right_ids[row].tolist()}"
        )
    if doubtful.any():
        mine = ids[doubtful].long()
        if ((mine[:, :routed] < 0) | (mine[:, :routed] >= num_experts)).any():
            return f"an id is not in 0..{num_experts - 1}"
        if (mine.sort(dim=1).values.diff(dim=1) == 0).any():
            return f"token {_first(doubtful[:, None])} names an expert twice"
        last, mine = right_ids[doubtful, routed - 1 :][:, :1].long(), mine[:, :routed]
        slack = 4 * tolerance * choice[doubtful].gather(1, last).abs().clamp(min=1.0)
        if groups == 1 and (choice[doubtful].gather(1, mine) < choice[doubtful].gather(1, last) - slack).any():
            return f"token {_first(doubtful[:, None])} was given a worse expert than it could have had"
        names = ("renormalize", "routed_scaling_factor", "apply_routed_scaling_factor_on_output")
        shared = options.get("num_fused_shared_experts", 0)
        chosen = weigh(scores[doubtful].gather(1, mine), shared, **{n: options[n] for n in names if n in options})
        right_weights[doubtful] = chosen.to(torch.float32)
    off = (weights - right_weights).abs() > 1e-5 * right_weights.abs() + 1e-7
    if off.any():
        row = _first(off)
        return f"token {row} has weights {weights[row].tolist()} instead of {right_weights[row].tolist()}"
    return None


def _is_close(choice, groups, topk_group, routed, tolerance):
    """Rows in which two values that the choice compares differ, but by less than float32 arithmetic can promise."""

    def narrow(values, count, from_the_top):
        """Different neighbours too near each other, around place ``count`` or anywhere from the top down to it."""
        ordered = values.gather(1, best_first(values))
        upper, lower, last = ordered[:, :-1], ordered[:, 1:], ordered[:, count - 1 : count]
        slack = tolerance * lower.abs().clamp(min=1.0)
        near = (upper > lower) & (upper - lower < slack) & (upper >= last - slack)
        return (near & (from_the_top | (lower <= last + slack))).any(dim=1)

    if topk_group == groups:
        return narrow(choice, routed, True)
    pairs = best_two(choice, groups)
    worth = pairs.sum(dim=-1)
    order = best_first(worth)
    kept = torch.zeros_like(worth, dtype=torch.bool).scatter_(1, order[:, :topk_group], True)
    kept = kept.repeat_interleave(choice.shape[1] // groups, dim=1)
    # Equal sums of different pairs may round apart; equal sums of equal pairs are a tie like any other.
    pairs = pairs.gather(1, order[:, topk_group - 1 : topk_group + 1, None].expand(-1, -1, pairs.shape[-1]))
    same_sum = (pairs[:, 0].sum(-1) == pairs[:, 1].sum(-1)) & (pairs[:, 0] != pairs[:, 1]).any(-1)
    return same_sum | narrow(worth, topk_group, False) | narrow(choice.masked_fill(~kept, float("-inf")), routed, True)


def _first(rows):
    """The first row in which anything is true."""
    return int(rows.any(dim=1).nonzero()[0])
