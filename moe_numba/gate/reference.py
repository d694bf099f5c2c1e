"""Reference implementation of the gate in torch, and the checker that compares a kernel's routing with it."""

import torch

SCORINGS = ("sigmoid", "softmax", "sqrtsoftplus")


def expert_scores(gating_output, scoring="sigmoid"):
    """Return the unbiased scores [tokens, experts] in the dtype of the logits.

    Scores below 2**-126, the smallest normal float32, are flushed to 0.
    """
    if scoring == "sigmoid":
        scores = gating_output.sigmoid()
    elif scoring == "softmax":
        scores = gating_output.softmax(dim=-1)
    else:
        float32_max = torch.finfo(torch.float32).max  # keep the weight of an infinite logit finite
        scores = torch.nn.functional.softplus(gating_output.clamp(max=float32_max), threshold=50.0).sqrt()
    return scores.masked_fill(scores < torch.finfo(torch.float32).tiny, 0.0)


def argsort_descending(values):
    """Return the indices that sort each row in descending order; ties keep the lower index first, NaN comes last."""
    is_nan = values.isnan()
    order = values.masked_fill(is_nan, float("-inf")).sort(dim=-1, descending=True, stable=True).indices
    nan_last = is_nan.gather(-1, order).to(torch.uint8).sort(dim=-1, stable=True).indices
    return order.gather(-1, nan_last)


def top2_per_group(biased, num_expert_group):
    """Return the two best scores of each group of experts, [tokens, groups, 2]. NaN counts as -inf."""
    tokens, num_experts = biased.shape
    grouped = biased.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    grouped = grouped.view(tokens, num_expert_group, num_experts // num_expert_group)
    return grouped.gather(-1, argsort_descending(grouped)[..., :2])


def choose_experts(biased, count, num_expert_group=1, topk_group=1):
    """Return the best ``count`` experts of the best ``topk_group`` groups in descending order, [tokens, count].

    A group's score is the sum of its two best scores.
    """
    tokens, num_experts = biased.shape
    groups = argsort_descending(top2_per_group(biased, num_expert_group).sum(dim=-1))[:, :topk_group]
    kept = torch.zeros(tokens, num_expert_group, dtype=torch.bool, device=biased.device).scatter_(1, groups, True)
    kept = kept.repeat_interleave(num_experts // num_expert_group, dim=1)
    # Move the experts of dropped groups to the end, behind even the NaN scores of kept groups.
    order = argsort_descending(biased)
    dropped_last = (~kept).gather(1, order).to(torch.uint8).sort(dim=1, stable=True).indices
    return order.gather(1, dropped_last)[:, :count]


def expert_weights(
    chosen,
    num_fused_shared_experts=0,
    renormalize=True,
    routed_scaling_factor=1.0,
    apply_routed_scaling_factor_on_output=False,
):
    """Return the weights [tokens, topk] for the chosen experts' scores [tokens, routed]; shared experts come last."""
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
    """Route each token to ``topk`` experts in plain torch; see :func:`moe_numba.biased_grouped_topk` for the arguments.

    ``dtype`` is the dtype of the arithmetic: float32 as in the kernels, or float64 to check them.
    """
    tokens, num_experts = gating_output.shape
    scores = expert_scores(gating_output.to(dtype), scoring)
    biased = scores if correction_bias is None else scores + correction_bias.to(dtype)
    ids = choose_experts(biased, topk - num_fused_shared_experts, num_expert_group, topk_group)
    weights = expert_weights(
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
    """Compare a routing with the float64 reference; return a description of the first error, or None.

    Where the reference's choice depends on a difference below the rounding error of float32 arithmetic (``tolerance``,
    for scores of about 1), other ids are accepted if they are distinct, in range and as good to within the tolerance.
    Everywhere else, exact ties included, ids must equal the reference's, in the same order.

    Parameters
    ----------
    weights, ids : torch.Tensor
        The routing, [tokens, topk].
    gating_output, correction_bias, topk, **options
        The arguments of the call to :func:`biased_grouped_topk`.
    tolerance : float

    Returns
    -------
    str or None
    """
    tokens, num_experts = gating_output.shape
    routed = topk - options.get("num_fused_shared_experts", 0)
    num_groups, topk_group = options.get("num_expert_group", 1), options.get("topk_group", 1)
    if tuple(ids.shape) != (tokens, topk) or tuple(weights.shape) != (tokens, topk):
        return f"the outputs have shapes {tuple(weights.shape)} and {tuple(ids.shape)}, not {(tokens, topk)}"
    if weights.dtype != torch.float32 or ids.dtype != torch.int32:
        return f"the outputs are {weights.dtype} and {ids.dtype}, not float32 and int32"
    if not weights.isfinite().all():
        return f"token {_first_row(~weights.isfinite())} has a weight that is not finite"

    expected_weights, expected_ids = biased_grouped_topk(
        gating_output, correction_bias, topk, **{**options, "dtype": torch.float64}
    )
    scores = expert_scores(gating_output.double(), options.get("scoring", "sigmoid"))
    biased = scores if correction_bias is None else scores + correction_bias.double()
    differs = (ids != expected_ids).any(dim=1)
    uncertain = differs & _near_ties(biased, num_groups, topk_group, routed, tolerance) & (expected_ids[:, 0] >= 0)
    is_wrong = differs & ~uncertain
    if is_wrong.any():
        row = _first_row(is_wrong[:, None])
        return (
            f"{int(is_wrong.sum())} of {tokens} tokens have wrong ids; the first is token {row}: "
            f"{ids[row].tolist()} instead of {expected_ids[row].tolist()}"
        )
    if uncertain.any():
        given = ids[uncertain].long()
        if ((given[:, :routed] < 0) | (given[:, :routed] >= num_experts)).any():
            return f"an id is not in 0..{num_experts - 1}"
        if (given.sort(dim=1).values.diff(dim=1) == 0).any():
            return f"token {_first_row(uncertain[:, None])} names an expert twice"
        last_expected, given = expected_ids[uncertain, routed - 1 :][:, :1].long(), given[:, :routed]
        slack = 4 * tolerance * biased[uncertain].gather(1, last_expected).abs().clamp(min=1.0)
        if (
            num_groups == 1
            and (biased[uncertain].gather(1, given) < biased[uncertain].gather(1, last_expected) - slack).any()
        ):
            return f"token {_first_row(uncertain[:, None])} was routed to a worse expert than the best available"
        names = ("renormalize", "routed_scaling_factor", "apply_routed_scaling_factor_on_output")
        shared = options.get("num_fused_shared_experts", 0)
        chosen = expert_weights(
            scores[uncertain].gather(1, given), shared, **{n: options[n] for n in names if n in options}
        )
        expected_weights[uncertain] = chosen.to(torch.float32)
    weight_differs = (weights - expected_weights).abs() > 1e-5 * expected_weights.abs() + 1e-7
    if weight_differs.any():
        row = _first_row(weight_differs)
        return f"token {row} has weights {weights[row].tolist()} instead of {expected_weights[row].tolist()}"
    return None


def _near_ties(biased, num_groups, topk_group, routed, tolerance):
    """Find rows in which two compared values differ by less than the rounding error of float32 arithmetic."""

    def has_near_tie(values, count, whole_prefix):
        """Find near ties of adjacent sorted values around position ``count``, or up to it (``whole_prefix``)."""
        ordered = values.gather(1, argsort_descending(values))
        upper, lower, last = ordered[:, :-1], ordered[:, 1:], ordered[:, count - 1 : count]
        slack = tolerance * lower.abs().clamp(min=1.0)
        near = (upper > lower) & (upper - lower < slack) & (upper >= last - slack)
        return (near & (whole_prefix | (lower <= last + slack))).any(dim=1)

    if topk_group == num_groups:
        return has_near_tie(biased, routed, True)
    top2 = top2_per_group(biased, num_groups)
    group_scores = top2.sum(dim=-1)
    order = argsort_descending(group_scores)
    kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, order[:, :topk_group], True)
    kept = kept.repeat_interleave(biased.shape[1] // num_groups, dim=1)
    # Equal sums of different pairs may round differently. Equal sums of equal pairs are exact ties.
    top2 = top2.gather(1, order[:, topk_group - 1 : topk_group + 1, None].expand(-1, -1, top2.shape[-1]))
    same_sum = (top2[:, 0].sum(-1) == top2[:, 1].sum(-1)) & (top2[:, 0] != top2[:, 1]).any(-1)
    return (
        same_sum
        | has_near_tie(group_scores, topk_group, False)
        | has_near_tie(biased.masked_fill(~kept, float("-inf")), routed, True)
    )


def _first_row(rows):
    """Return the index of the first row that has a true element."""
    return int(rows.any(dim=1).nonzero()[0])
