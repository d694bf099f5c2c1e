"""Reference implementation of the gate in torch, and the checker that compares a kernel's routing with it."""

import torch

SCORINGS = ("sigmoid", "softmax", "sqrtsoftplus")
REPLICA_CHOICES = ("round_robin", "static", "random")
_NO_PADDING = {"num_token_non_padded": None, "is_padding": None}
_UINT32_MASK = (1 << 32) - 1
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
    renormalize_epsilon=0.0,
):
    """Return the weights [tokens, topk] for the chosen experts' scores [tokens, routed]; shared experts come last."""
    routed_scaling_factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    weights = chosen.masked_fill(chosen.isnan(), 0.0)
    total = weights.sum(dim=1, keepdim=True)
    weights = torch.cat([weights, (total / routed_scaling_factor).expand(-1, num_fused_shared_experts)], dim=1)
    if renormalize:
        weights = weights / torch.where(total > 0, total + renormalize_epsilon, 1.0)
    if apply_routed_scaling_factor_on_output:
        weights = weights * routed_scaling_factor
    return weights


def random_uint32(tokens, seed):
    """Hash each token index with the seed to 32 random bits; int64, 0 to 2**32 - 1.

    Applies the finalizer of MurmurHash3 twice, in which every input bit affects every output bit.
    """
    words = murmur3_finalizer(torch.arange(tokens, dtype=torch.int64, device="cpu") ^ (seed & _UINT32_MASK))
    return murmur3_finalizer((words + (seed >> 32 & _UINT32_MASK)) & _UINT32_MASK)


def murmur3_finalizer(words):
    """Apply the 32-bit finalizer of MurmurHash3 to int64 numbers below 2**32."""
    words = words ^ (words >> 16)
    words = words * 0x85EBCA6B & _UINT32_MASK
    words = words ^ (words >> 13)
    words = words * 0xC2B2AE35 & _UINT32_MASK
    return words ^ (words >> 16)


def place_experts(ids, placement, num_experts):
    """Return the physical experts [tokens, topk] of logical ones; shared experts come last, padding is -1.

    See :class:`moe_numba.ExpertPlacement`.
    """
    table, logical = placement.physical_ids, ids.clamp(0, num_experts - 1).long()
    if placement.how == "static":
        replica = torch.zeros_like(logical)
    else:
        count = placement.num_replicas.long()[logical]
        if placement.how == "round_robin":
            replica = torch.arange(len(ids), device=ids.device)[:, None] % count
        else:
            words = random_uint32(len(ids), placement.seed)[:, None].to(ids.device)
            replica = murmur3_finalizer((words + logical) & _UINT32_MASK) * count >> 32
    placed = torch.where(ids < num_experts, table[logical, replica], ids + placement.num_physical_experts - num_experts)
    return placed.masked_fill(ids < 0, -1).to(ids.dtype)


def expert_load(ids, num_physical_experts):
    """Return how many elements of ``ids`` name each physical expert: what a call adds to a placement's counters."""
    routed = ids[(ids >= 0) & (ids < num_physical_experts)]
    return torch.bincount(routed, minlength=num_physical_experts).to(torch.int32)


def padding_rows(tokens, num_token_non_padded=None, is_padding=None, device="cpu"):
    """Return which rows are padding, [tokens]."""
    limit = tokens if num_token_non_padded is None else int(num_token_non_padded)
    padded = torch.arange(tokens, device=device) >= limit
    return padded if is_padding is None else padded | is_padding


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
    renormalize_epsilon=0.0,
    is_padding=None,
    placement=None,
    dtype=torch.float32,
):
    """Route each token to ``topk`` experts in plain torch; see :func:`moe_numba.biased_grouped_topk` for the arguments.

    ``dtype`` is the dtype of the arithmetic: float32 as in the kernels, or float64 to check them. The counters of
    ``placement`` are not changed; see :func:`expert_load`.
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
        renormalize_epsilon,
    )
    shared = torch.arange(num_experts, num_experts + num_fused_shared_experts, device=ids.device)
    ids = torch.cat([ids, shared.expand(tokens, -1)], dim=1)
    if placement is not None:
        ids = place_experts(ids, placement, num_experts)
    padded = padding_rows(tokens, num_token_non_padded, is_padding, ids.device)[:, None]
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
    placement = options.pop("placement", None)
    if tuple(ids.shape) != (tokens, topk) or tuple(weights.shape) != (tokens, topk):
        return f"the outputs have shapes {tuple(weights.shape)} and {tuple(ids.shape)}, not {(tokens, topk)}"
    if weights.dtype != torch.float32 or ids.dtype != torch.int32:
        return f"the outputs are {weights.dtype} and {ids.dtype}, not float32 and int32"
    if not weights.isfinite().all():
        return f"token {_first_row(~weights.isfinite())} has a weight that is not finite"

    padded = padding_rows(tokens, options.get("num_token_non_padded"), options.get("is_padding"), ids.device)
    is_written = ((ids != -1) | (weights != 0)) & padded[:, None]
    if is_written.any():
        return f"token {_first_row(is_written)} is padding, but has an id other than -1 or a weight"
    if placement is not None:
        ids, error = _logical_experts(ids, placement, num_experts, num_shared, padded)
        if error:
            return error
    weights, ids, x = weights[~padded], ids[~padded].long(), gating_output[~padded].double()
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

    names = "renormalize", "routed_scaling_factor", "apply_routed_scaling_factor_on_output", "renormalize_epsilon"
    given = {name: options[name] for name in names if name in options}
    expected_weights = expert_weights(scores.gather(1, chosen), num_shared, **given)
    weight_differs = (weights - expected_weights).abs() > 1e-5 * expected_weights.abs() + 1e-7
    if weight_differs.any():
        row = _first_row(weight_differs)
        return f"token {row} has weights {weights[row].tolist()} instead of {expected_weights[row].tolist()}"
    return None


def _logical_experts(ids, placement, num_experts, num_shared, padded):
    """Return the logical experts of physical ones, and a description of the first that a token may not use, or None."""
    # What each token would get for every logical expert and, behind them, for the shared ones
    all_ids = torch.arange(num_experts + num_shared, device=ids.device).expand(len(ids), -1)
    allowed = place_experts(all_ids, placement, num_experts)
    is_match = ids[:, :, None] == allowed[:, None]
    wrong = ~is_match.any(dim=2) & ~padded[:, None]
    if wrong.any():
        row = _first_row(wrong)
        return (ids, f"token {row} has a physical expert that the placement does not give it: {ids[row].tolist()}")
    return is_match.int().argmax(dim=2).to(ids.dtype), None


def _wrong_choices(biased, chosen, num_groups, topk_group, tolerance):
    """Yield (reason, rows): the rows [rows] whose ``chosen`` experts no outcome of the near ties explains."""
    num_experts = biased.shape[1]
    out_of_range = ((chosen < 0) | (chosen >= num_experts)).any(dim=1)
    yield f"has an id that is not in 0..{num_experts - 1}", out_of_range
    chosen = chosen.clamp(0, num_experts - 1)
    yield "has an expert twice", (chosen.sort(dim=1).values.diff(dim=1) == 0).any(dim=1)

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
    values = biased.gather(1, chosen)
    is_missed = _certainly_better(biased, expert, values, chosen, tolerance).any(dim=2)
    is_missed = is_missed.scatter(1, chosen, False)
    group_is_missed = is_missed.view(len(biased), num_groups, num_experts // num_groups).any(dim=2)
    yield "lacks an expert that is better than one that it has", (group_is_missed & kept).any(dim=1)
    # The remaining kept groups are near ties: they must suffice without a group that would contribute an expert.
    possible = ~group_is_missed & ~dropped
    possible &= ~(better & (group_is_missed | dropped)[:, :, None]).any(dim=1)
    yield "has an expert of a group that is not kept", (possible | kept).sum(dim=1) < topk_group

    # Last, because other experts than the best are mostly in another order, too.
    later_is_better = _certainly_better(values, chosen, values, chosen, tolerance).tril(-1)
    yield "has its experts in the wrong order", later_is_better.flatten(1).any(dim=1)


def _certainly_better(values, index, others, other_index, tolerance):
    """Compare all pairs: whether ``values`` [rows, n] certainly rank before ``others`` [rows, m], as [rows, n, m]."""
    a, b, a_index, b_index = values[:, :, None], others[:, None], index[:, :, None], other_index[:, None]
    slack = tolerance * b.nan_to_num(0.0, 0.0, 0.0).abs().clamp(min=1.0)
    equal = (a == b) | (a.isnan() & b.isnan())
    return (a - b > slack) & (a > b) | ~a.isnan() & b.isnan() | equal & (a_index < b_index)


def _first_row(rows):
    """Return the index of the first row that has a true element."""
    return int(rows.any(dim=1).nonzero()[0])
