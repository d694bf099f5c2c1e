"""Reference implementation of the gate in torch, and the checker that compares a kernel's routing with it."""

import torch

SCORINGS = ("sigmoid", "softmax", "sqrtsoftplus")
_NO_PADDING = {"num_token_non_padded": None}
_MAX_PAIRS = 1 << 24  # that the checker compares at once


def expert_scores(gating_output, scoring="sigmoid"):
    """Return the unbiased scores [tokens, experts] in the dtype of the logits.

    Scores below 2**-126, the smallest normal float32, are flushed to 0. The score of a NaN logit is NaN; the softmax of
    the other experts counts it as -inf.
    """
    float32_max = torch.finfo(torch.float32).max  # in place of +inf: it keeps the weights finite
    if scoring == "sigmoid":
        scores = gating_output.sigmoid()
    elif scoring == "softmax":
        is_nan, logits = gating_output.isnan(), gating_output.nan_to_num(-torch.inf, float32_max, -torch.inf)
        scores = logits.softmax(dim=-1).nan_to_num(0.0)  # NaN if all logits are -inf
        scores = scores.masked_fill(is_nan, torch.nan)
    else:
        scores = torch.nn.functional.softplus(gating_output.clamp(max=float32_max), threshold=50.0).sqrt()
    return scores.masked_fill(scores < torch.finfo(torch.float32).tiny, 0.0)


def ranked_values(gating_output, scores, correction_bias, num_expert_group):
    """Return what experts are ranked by, [tokens, experts]: biased scores, or with neither bias nor groups the logits.

    All scores rise with the logits, but far from 0 different logits have equal scores.
    """
    if correction_bias is None and num_expert_group == 1:
        return gating_output.to(scores.dtype)
    return scores if correction_bias is None else scores + correction_bias.to(scores.dtype)


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


def group_scores(biased, num_expert_group):
    """Return the scores of the groups, [tokens, groups]: the sum of a group's two best scores, or its only one."""
    return biased if num_expert_group == biased.shape[1] else top2_per_group(biased, num_expert_group).sum(dim=-1)


def choose_experts(biased, count, num_expert_group=1, topk_group=1):
    """Return the best ``count`` experts of the best ``topk_group`` groups in descending order, [tokens, count]."""
    tokens, num_experts = biased.shape
    groups = argsort_descending(group_scores(biased, num_expert_group))[:, :topk_group]
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
    routed_scaling_factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
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
    ranked = ranked_values(gating_output, scores, correction_bias, num_expert_group)
    ids = choose_experts(ranked, topk - num_fused_shared_experts, num_expert_group, topk_group)
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

    A value v is certainly better than w if v - w > ``tolerance`` * max(1, abs(w)), or if they are equal and v has the
    lower index. Other pairs are near ties: float32 arithmetic may order them either way. A routing is accepted if some
    outcome of the near ties leads to it. Its weights must be those of the experts that it chooses.

    Parameters
    ----------
    weights, ids : torch.Tensor
        The routing, [tokens, topk].
    gating_output, correction_bias, topk, **options
        The arguments of the call to :func:`biased_grouped_topk`.
    tolerance : float
        Rounding error of float32 arithmetic, for scores of about 1.

    Returns
    -------
    str or None
    """
    tokens, num_experts = gating_output.shape
    num_shared = options.get("num_fused_shared_experts", 0)
    num_groups, topk_group = options.get("num_expert_group", 1), options.get("topk_group", 1)
    limit = options.get("num_token_non_padded")
    if tuple(ids.shape) != (tokens, topk) or tuple(weights.shape) != (tokens, topk):
        return f"the outputs have shapes {tuple(weights.shape)} and {tuple(ids.shape)}, not {(tokens, topk)}"
    if weights.dtype != torch.float32 or ids.dtype != torch.int32:
        return f"the outputs are {weights.dtype} and {ids.dtype}, not float32 and int32"
    if not weights.isfinite().all():
        return f"token {_first_row(~weights.isfinite())} has a weight that is not finite"

    unpadded = tokens if limit is None else min(int(limit), tokens)
    is_written = (ids[unpadded:] != -1) | (weights[unpadded:] != 0)
    if is_written.any():
        return f"token {unpadded + _first_row(is_written)} is padding, but has an id other than -1 or a weight"
    weights, ids, x = weights[:unpadded], ids[:unpadded].long(), gating_output[:unpadded].double()
    expected_ids = biased_grouped_topk(x, correction_bias, topk, dtype=torch.float64, **{**options, **_NO_PADDING})[1]
    scores = expert_scores(x, options.get("scoring", "sigmoid"))
    biased = ranked_values(x, scores, correction_bias, num_groups)
    differs = (ids != expected_ids).any(dim=1).nonzero()[:, 0]
    chosen = ids[:, : topk - num_shared]
    # A row that equals the reference needs no explanation; for the others, all pairs of values are compared.
    pairs_per_row = num_experts * chosen.shape[1] + num_groups**2
    for rows in differs.split(max(_MAX_PAIRS // pairs_per_row, 1)):
        bad_shared = (ids[rows, topk - num_shared :] != expected_ids[rows, topk - num_shared :]).any(dim=1)
        reasons = [("has a wrong id of a shared expert", bad_shared)]
        reasons += _wrong_choices(biased[rows], chosen[rows], num_groups, topk_group, tolerance)
        for reason, is_wrong in reasons:
            if is_wrong.any():
                row = rows[int(is_wrong.nonzero()[0])]
                return f"token {int(row)} {reason}: {ids[row].tolist()} instead of {expected_ids[row].tolist()}"

    names = ("renormalize", "routed_scaling_factor", "apply_routed_scaling_factor_on_output")
    given = {name: options[name] for name in names if name in options}
    expected_weights = expert_weights(scores.gather(1, chosen), num_shared, **given)
    weight_differs = (weights - expected_weights).abs() > 1e-5 * expected_weights.abs() + 1e-7
    if weight_differs.any():
        row = _first_row(weight_differs)
        return f"token {row} has weights {weights[row].tolist()} instead of {expected_weights[row].tolist()}"
    return None


def _wrong_choices(biased, chosen, num_groups, topk_group, tolerance):
    """Yield (reason, rows): the rows [rows] whose ``chosen`` experts no outcome of the near ties explains."""
    num_experts = biased.shape[1]
    out_of_range = ((chosen < 0) | (chosen >= num_experts)).any(dim=1)
    yield f"has an id that is not in 0..{num_experts - 1}", out_of_range
    chosen = chosen.clamp(0, num_experts - 1)
    yield "has an expert twice", (chosen.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)

    values = biased.gather(1, chosen)
    later_is_better = _certainly_better(values, chosen, values, chosen, tolerance).tril(-1)
    yield "has its experts in the wrong order", later_is_better.flatten(1).any(dim=1)

    # Groups: those with fewer than topk_group others that could be better are kept for certain.
    scores, top2 = group_scores(biased, num_groups), top2_per_group(biased, num_groups)
    group = torch.arange(num_groups, device=biased.device).expand(len(biased), -1)
    better = _certainly_better(scores, group, scores, group, tolerance)
    # Equal sums of different terms may round differently.
    rounds_alike = (top2[:, :, None] == top2[:, None]).all(dim=-1) | ~scores.isfinite()[:, None]
    better &= rounds_alike | (scores[:, :, None] != scores[:, None])
    could_be_better = ~better.mT & ~torch.eye(num_groups, dtype=torch.bool, device=biased.device)
    kept = could_be_better.sum(dim=1) < topk_group
    dropped = better.sum(dim=1) >= topk_group
    group_of_chosen = chosen // (num_experts // num_groups)
    yield "has an expert of a group that is not kept", dropped.gather(1, group_of_chosen).any(dim=1)
    # A group that is better than a kept group is kept, too.
    kept = kept.scatter(1, group_of_chosen, True)
    kept |= (better & kept[:, None]).any(dim=2)
    yield f"has experts of more than {topk_group} groups", kept.sum(dim=1) > topk_group

    # Experts: none of a kept group that was not chosen may be better than a chosen one.
    expert = torch.arange(num_experts, device=biased.device).expand(len(biased), -1)
    is_missed = _certainly_better(biased, expert, values, chosen, tolerance).any(dim=2)
    is_missed = is_missed.scatter(1, chosen, False)
    group_is_missed = is_missed.view(len(biased), num_groups, num_experts // num_groups).any(dim=2)
    yield "lacks an expert that is better than one that it has", (group_is_missed & kept).any(dim=1)
    # The remaining kept groups are near ties: they must suffice without a group that would contribute an expert.
    possible = ~group_is_missed & ~dropped
    possible &= ~(better & (group_is_missed | dropped)[:, :, None]).any(dim=1)
    yield "has an expert of a group that is not kept", (possible | kept).sum(dim=1) < topk_group


def _certainly_better(values, index, others, other_index, tolerance):
    """Compare all pairs: whether ``values`` [rows, n] certainly rank before ``others`` [rows, m], as [rows, n, m]."""
    a, b, a_index, b_index = values[:, :, None], others[:, None], index[:, :, None], other_index[:, None]
    slack = tolerance * b.nan_to_num(0.0, 0.0, 0.0).abs().clamp(min=1.0)
    equal = (a == b) | (a.isnan() & b.isnan())
    return (a - b > slack) & (a > b) | ~a.isnan() & b.isnan() | equal & (a_index < b_index)


def _first_row(rows):
    """Return the index of the first row that has a true element."""
    return int(rows.any(dim=1).nonzero()[0])
