"""Test the gate's checker: it must reject wrong choices, and accept exactly the outcomes of near ties."""

import itertools
import math
import random

import pytest
import torch

from moe_numba.gate.reference import biased_grouped_topk, mismatch

NAN, NEAR, FAR = float("nan"), 4e-7, 1e-4  # differences below and beyond the tolerance


def check(bias, ids, weights=None, **options):
    """Check the choice ``ids`` among experts with equal scores, which only ``bias`` orders."""
    bias = torch.tensor([bias], dtype=torch.float64)
    ids = torch.tensor([ids], dtype=torch.int32)
    weights = torch.full(ids.shape, 1 / ids.shape[1]) if weights is None else torch.tensor([weights])
    return mismatch(weights, ids, torch.zeros_like(bias).float(), bias[0], ids.shape[1], **options)


GROUPS = dict(num_expert_group=3, topk_group=2)
CLEAR = [0.9, 0.1, 0.8, 0.3, 0.2, 0.4]  # groups of two experts: 0 and 1 are kept


@pytest.mark.parametrize(
    "bias, ids, options, message",
    [
        (CLEAR, [0, 5], GROUPS, "a group that is not kept"),
        (CLEAR, [0, 3], GROUPS, "lacks an expert that is better"),
        (CLEAR, [0, 0], GROUPS, "an expert twice"),
        (CLEAR, [0, 6], GROUPS, r"an id that is not in 0\.\.5"),
        (CLEAR, [0, -1], GROUPS, r"an id that is not in 0\.\.5"),
        (CLEAR, [2, 0], GROUPS, "in the wrong order"),
        ([0.5, 0.5 + FAR, 0.1], [0, 1], {}, "in the wrong order"),
        ([0.5, 0.5, 0.1], [1, 0], {}, "in the wrong order"),  # an exact tie goes to the lower expert
        ([0.5, 0.5, 0.1], [1], {}, "lacks an expert that is better"),
        ([NAN, 0.5, 0.5 + NEAR, 0.5 - FAR], [1, 3], {}, "lacks an expert that is better"),  # a near tie and a NaN
        ([NAN, 0.5], [0, 1], {}, "in the wrong order"),
        # Other experts, in another order: what they are counts first.
        (CLEAR, [3, 0], GROUPS, "lacks an expert that is better"),
        (CLEAR, [5, 4], GROUPS, "a group that is not kept"),
        ([NAN, 0.5, 0.5 + NEAR, 0.5 - FAR], [0, 1], {}, "lacks an expert that is better"),
        ([NAN, -math.inf, 0.5], [2, 0], {}, "lacks an expert that is better"),  # NaN ranks below -inf
        ([NAN, NAN, 0.5], [2, 1], {}, "lacks an expert that is better"),
        # Groups 1 and 2 are near ties, but group 0 is kept for certain.
        ([0.9, 0.9, 0.5, 0.4, 0.5, 0.4 + NEAR], [2, 4], GROUPS, "of more than 2 groups"),
        ([0.9, 0.1, 0.5, 0.4, 0.5 - 3 * NEAR, 0.4 + 4 * NEAR], [2, 4, 0], GROUPS, "of more than 2 groups"),
        ([0.9, 0.1, 0.5, 0.4, 0.5, 0.4 + NEAR], [0, 2, 4], GROUPS, "of more than 2 groups"),
        # Either near tie that completes the kept groups would contribute a better expert.
        ([0.9, 0.8, 0.5, 0.4, 0.5, 0.4 + NEAR], [0, 1, 3], GROUPS, "lacks an expert that is better"),
        ([0.9, 0.1, 0.5, 0.4, 0.5, 0.4 + NEAR], [0, 1], GROUPS, "a group that is not kept"),
    ],
)
def test_rejects_wrong_choices(bias, ids, options, message):
    with pytest.raises(AssertionError, match=message):
        assert (wrong := check(bias, ids, **options)) is None, wrong


@pytest.mark.parametrize(
    "bias, each, options",
    [
        ([0.5, 0.5 + NEAR, 0.1], [[0, 1], [1, 0]], {}),
        ([NAN, 0.5, 0.5 + NEAR, 0.1], [[1, 2], [2, 1]], {}),
        ([NAN, 0.5, 0.5 + NEAR, NAN], [[1, 2, 0], [2, 1, 0]], {}),
        ([1e6, 1e6 + 0.5, 0.0], [[0, 1], [1, 0]], {}),  # the tolerance is relative
        ([0.9, 0.1, 0.5, 0.4, 0.5, 0.4 + NEAR], [[0, 2], [0, 4]], GROUPS),
        ([0.9, 0.1, 0.5, 0.4, 0.25, 0.65], [[0, 2], [0, 5]], GROUPS),  # equal sums of different terms
    ],
)
def test_accepts_near_ties(bias, each, options):
    assert [check(bias, ids, **options) for ids in each] == [None] * len(each)


WEIGHTS = [0.25, 0.75]


@pytest.mark.parametrize("weights", [[0.75, 0.25], [0.25, 0.7501], [0.5, 0.5], [0.25, NAN]])
def test_rejects_wrong_weights_of_near_ties(weights):
    """Two experts of equal biased scores, but of different scores; either order is right with its own weights."""
    logits = torch.tensor([[math.log(1 / 3), math.log(3), -9.0]], dtype=torch.float64)  # scores of 1/4 and 3/4
    bias = torch.tensor([0.5, NEAR, 0.0], dtype=torch.float64)
    for ids, right in (([0, 1], WEIGHTS), ([1, 0], WEIGHTS[::-1])):
        ids = torch.tensor([ids], dtype=torch.int32)
        assert mismatch(torch.tensor([right]), ids, logits, bias, 2) is None
    assert mismatch(torch.tensor([weights]), torch.tensor([[0, 1]], dtype=torch.int32), logits, bias, 2)


@pytest.mark.parametrize("column, value", [(2, 7), (2, 5), (3, 6), (3, -1)])
def test_rejects_wrong_shared_experts(column, value):
    options = dict(num_fused_shared_experts=2, **GROUPS)
    ids, weights = [0, 2, 6, 7], [0.5, 0.5, 1.0, 1.0]
    assert check(CLEAR, ids, weights, **options) is None
    ids[column] = value
    assert "shared expert" in check(CLEAR, ids, weights, **options)


def test_rejects_written_padding():
    bias = torch.tensor(CLEAR)
    x, options = torch.zeros(3, 6), dict(num_token_non_padded=1)
    weights, ids = biased_grouped_topk(x, bias, 2, **options)
    assert mismatch(weights, ids, x, bias, 2, **options) is None
    for tensor, value in ((weights, 0.5), (ids, 0)):
        changed = tensor.clone()
        changed[2, 1] = value
        given = (changed, ids) if tensor is weights else (weights, changed)
        assert "token 2 is padding" in mismatch(*given, x, bias, 2, **options)


# Every outcome of the near ties, by trying all orders


def certainly_better(a, b):
    (v, i), (w, j) = a, b
    if math.isnan(v) or math.isnan(w):
        return (math.isnan(v), i) < (math.isnan(w), j)
    return v - w > 1e-6 * (1 if math.isinf(w) else max(1, abs(w))) or (v == w and i < j)


def possible_orders(values, is_better=certainly_better):
    for order in itertools.permutations(range(len(values))):
        if not any(is_better((values[b], b), (values[a], a)) for a, b in itertools.combinations(order, 2)):
            yield order


def possible_choices(bias, num_groups, kept, count):
    size = len(bias) // num_groups
    numbers = [-math.inf if math.isnan(b) else b for b in bias]
    top2 = [tuple(sorted(numbers[g * size : g * size + size])[:-3:-1]) for g in range(num_groups)]

    def group_is_better(a, b):
        same_sum = a[0] == b[0] and math.isfinite(a[0]) and top2[a[1]] != top2[b[1]]
        return certainly_better(a, b) and not same_sum

    scores = [sum(pair) for pair in top2] if size > 1 else bias
    expert_orders = list(possible_orders(bias))
    return {
        tuple(e for e in order if e // size in groups[:kept])[:count]
        for groups in possible_orders(scores, group_is_better if size > 1 else certainly_better)
        for order in expert_orders
    }


@pytest.mark.parametrize("seed", range(16))
def test_accepts_exactly_the_outcomes_of_near_ties(seed):
    rng = random.Random(seed)
    num_groups, kept = rng.choice([(1, 1), (2, 1), (3, 1), (3, 2), (6, 3)])
    count = rng.randint(1, min(3, kept * 6 // num_groups))
    bias = [rng.choice([0.25, 0.5, 0.5]) + rng.choice([0, NEAR, 2 * NEAR, 3 * NEAR, 4 * NEAR]) for _ in range(6)]
    for expert in range(6):
        bias[expert] = rng.choice([bias[expert]] * 6 + [NAN, -math.inf])
    possible = possible_choices(bias, num_groups, kept, count)
    accepted = {
        ids
        for ids in itertools.permutations(range(6), count)
        if check(bias, ids, num_expert_group=num_groups, topk_group=kept) is None
    }
    assert accepted == possible, f"{bias}, {num_groups} groups, {kept} kept"
