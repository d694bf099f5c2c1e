"""Test what the gate's kernels do beside choosing experts: placements (EPLB), padding masks, an epsilon."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
from helpers.placements import make_placement
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.library import opcheck

import moe_numba
from moe_numba import ExpertPlacement, biased_grouped_topk, biased_grouped_topk_align, simulator
from moe_numba.gate import api, packed_keys, placement
from moe_numba.gate.reference import REPLICA_CHOICES, expert_load, mismatch

DEEPSEEK = dict(topk=8, num_expert_group=8, topk_group=4)
KERNELS = {  # of the gate: number of experts, dtype, few or many tokens, options
    "packed, few tokens": (64, torch.bfloat16, False, dict(topk=6, scoring="softmax")),
    "packed, many tokens": (64, torch.float16, True, dict(topk=6, scoring="softmax")),
    "packed, shared": (64, torch.bfloat16, True, dict(topk=9, num_fused_shared_experts=1, scoring="sqrtsoftplus")),
    "one token": (100, torch.float32, False, dict(topk=7, num_expert_group=5, topk_group=2)),
    "one token, logits": (40, torch.float32, False, dict(topk=7, scoring="softmax", num_fused_shared_experts=1)),
    "four tokens": (256, torch.float32, True, DEEPSEEK | dict(scoring="softmax")),
    "four tokens, shared": (256, torch.float32, True, DEEPSEEK | dict(topk=9, num_fused_shared_experts=1)),
    "generic": (96, torch.float32, False, dict(topk=8, num_expert_group=48, topk_group=20)),
}
each_kernel = pytest.mark.parametrize("kernel", KERNELS)


def make_logits(tokens, num_experts, device, dtype=torch.float32):
    return torch.randn(tokens, num_experts, generator=torch.Generator().manual_seed(1)).to(device, dtype)


def check(logits, options, bias=None):
    """Compare a call with the reference, and the counters, if there are any, with its ids."""
    tokens, topk, placed = len(logits), options["topk"], options.get("placement")
    weights = torch.full((tokens, topk), float("nan"), device=logits.device)
    ids = torch.full((tokens, topk), -7, dtype=torch.int32, device=logits.device)
    before = placed.load.clone() if placed and placed.load is not None else None
    biased_grouped_topk(logits, bias, out=(weights, ids), **options)
    assert mismatch(weights, ids, logits, bias, **options) is None
    if before is not None:
        assert torch.equal(placed.load - before, expert_load(ids, placed.num_physical_experts))
    return weights, ids


def use_kernel(kernel, device, monkeypatch, tokens=9):
    """Select a kernel; return logits, its options, and a bias for every second one."""
    num_experts, dtype, many, options = KERNELS[kernel]
    for module, name in ((api, "MANY_TOKENS"), (packed_keys, "MANY_TOKENS_PER_PICK")):
        monkeypatch.setattr(module, name, 0 if many else 1 << 31)
    bias = torch.linspace(0, 0.3, num_experts, device=device) if options.get("topk_group") else None
    return make_logits(tokens, num_experts, device, dtype), dict(options), bias


@pytest.mark.parametrize("how", REPLICA_CHOICES)
@each_kernel
def test_placements(kernel, how, device, monkeypatch):
    logits, options, bias = use_kernel(kernel, device, monkeypatch, tokens=37)
    for dtype, counts in ((torch.int32, True), (torch.int64, False)):
        placed = make_placement(logits.shape[1], device, dtype=dtype, counts=counts, how=how, seed=1 << 40)
        check(logits, options | dict(placement=placed), bias)


@each_kernel
def test_padding_anywhere(kernel, device, monkeypatch):
    logits, options, bias = use_kernel(kernel, device, monkeypatch)
    for rows in ([0, 3, 4, 8], [], range(9)):
        is_padding = torch.zeros(9, dtype=torch.bool, device=device)
        is_padding[list(rows)] = True
        noise = torch.where(is_padding[:, None], torch.nan, logits)
        for limit in (None, 6, torch.tensor(7, device=device)):
            _, ids = check(noise, options | dict(is_padding=is_padding, num_token_non_padded=limit), bias)
            assert (ids[is_padding] == -1).all() and (limit is not None or (ids[~is_padding] >= 0).all())


@pytest.mark.parametrize("renormalize", [True, False])
@each_kernel
def test_epsilon(kernel, renormalize, device, monkeypatch):
    logits, options, bias = use_kernel(kernel, device, monkeypatch)
    options |= dict(renormalize=renormalize)
    before, _ = check(logits, options, bias)
    for epsilon in (1e-20, 0.25, 1000):
        weights, _ = check(logits, options | dict(renormalize_epsilon=epsilon), bias)
        assert torch.allclose(weights, before, rtol=1e-5) == (not renormalize or epsilon < 1e-10)


def test_epsilon_in_small_sums(device):
    """The sigmoid of this logit is 1e-20, the epsilon of transformers."""
    logits = torch.full((1, 8), math.log(1e-20), device=device)
    for epsilon, each in ((0.0, 1 / 2), (1e-20, 1 / 3)):
        weights, _ = check(logits, dict(topk=2, renormalize_epsilon=epsilon))
        assert (weights - each).abs().max() < 1e-4


@pytest.mark.parametrize("tokens", [1, 8, 40])
@pytest.mark.parametrize("how", REPLICA_CHOICES)
def test_gate_and_alignment(how, tokens, device):
    """One launch, or two; the CTAs that repeat the routing do not count it again."""
    logits, bias = make_logits(tokens, 96, device), torch.rand(96, device=device)
    is_padding = torch.arange(tokens, device=device) % 3 == 1
    for groups, shared in ((8, 1), (48, 0)):
        placed = make_placement(96, device, how=how)
        gate = dict(num_expert_group=groups, topk_group=groups // 2, num_fused_shared_experts=shared)
        gate |= dict(is_padding=is_padding, placement=placed, renormalize_epsilon=0.5)
        weights, ids, *aligned = biased_grouped_topk_align(logits, bias, 7, 8, **gate)
        assert mismatch(weights, ids, logits, bias, 7, **gate) is None
        assert torch.equal(placed.load - 7, expert_load(ids, placed.num_physical_experts))
        num_experts = placed.num_physical_experts + shared
        assert all(map(torch.equal, aligned, moe_numba.moe_align_block_size(ids, 8, num_experts)))


def by_hand(how, device, **fields):
    """Expert 0 is physical expert 4, 1 and 0, expert 1 is 2, expert 2 is 3."""
    table = torch.tensor([[4, 1, 0], [2, -1, -1], [3, -1, -1]], dtype=torch.int32, device=device)
    count, load = torch.tensor([3, 1, 1], dtype=torch.int32, device=device), torch.zeros(5, **INT, device=device)
    return ExpertPlacement(table, count, 5, how, load=load, **fields)


@pytest.mark.parametrize(
    "how, first, load",
    [("round_robin", [4, 1, 0, -1, 1], [1, 2, 4, 0, 1]), ("static", [4, 4, 4, -1, 4], [0, 0, 4, 0, 4])],
)
def test_by_hand(how, first, load, device):
    """Each token chooses expert 0, then expert 1 and a shared one; token 3 is padding."""
    placed, is_padding = by_hand(how, device), torch.arange(5, device=device) == 3
    logits = torch.tensor([[2.0, 1.0, 0.0]], device=device).repeat(5, 1)
    options = dict(num_fused_shared_experts=1, is_padding=is_padding, placement=placed)
    _, ids = biased_grouped_topk(logits, None, 3, **options)
    assert ids.tolist() == [[e, 2, 5] if e >= 0 else [-1, -1, -1] for e in first] and placed.load.tolist() == load
    biased_grouped_topk(logits, None, 3, **options)
    assert placed.load.tolist() == [2 * n for n in load], "counts add up from call to call"


def test_random_replicas_are_even_and_follow_the_seed(device):
    logits, chosen = torch.tensor([[2.0, 1.0, 0.0]], device=device).repeat(300, 1), []
    for seed in (0, 0, 1, 1 << 32, (1 << 64) - 1):
        placed = by_hand("random", device, seed=seed)
        chosen.append(biased_grouped_topk(logits, None, 2, placement=placed)[1])
        assert (placed.load[[0, 1, 4]] - 100).abs().max() < 30, "about five standard deviations are 41"
    assert torch.equal(chosen[0], chosen[1])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(chosen[1:], 2))


def test_random_replicas_of_two_experts_are_independent(device):
    table = torch.arange(4, **INT, device=device).view(2, 2)
    placed = ExpertPlacement(table, torch.full((2,), 2, **INT, device=device), 4, "random")
    logits = torch.tensor([[1.0, 0.0]], device=device).repeat(200, 1)
    _, ids = biased_grouped_topk(logits, None, 2, placement=placed)
    assert 60 < int(((ids[:, 0] & 1) == (ids[:, 1] & 1)).sum()) < 140


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_placement(device, data):
    num_experts, tokens = data.draw(st.integers(1, 40), "experts"), data.draw(st.integers(0, 6), "tokens")
    fields = dict(redundant=data.draw(st.integers(0, 50)), seed=data.draw(st.integers(0, 99)))
    placed = make_placement(num_experts, device, dtype=data.draw(st.sampled_from([torch.int32, torch.int64])), **fields)
    how, seed = data.draw(st.sampled_from(REPLICA_CHOICES)), data.draw(st.integers(0, (1 << 64) - 1))
    topk, shared = data.draw(st.integers(1, min(num_experts, 16))), data.draw(st.integers(0, 2))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    padded = data.draw(st.lists(st.booleans(), min_size=tokens, max_size=tokens))
    is_padding = torch.tensor(padded, dtype=torch.bool, device=device)
    options = dict(topk=topk + shared, num_fused_shared_experts=shared, is_padding=is_padding)
    check(
        make_logits(tokens, num_experts, device, dtype), options | dict(placement=placed._replace(how=how, seed=seed))
    )


@pytest.mark.parametrize("how", REPLICA_CHOICES)
def test_wrong_tables_are_not_followed(how, device, monkeypatch):
    """The simulator names a wrong value. Where the host reads no tables, the kernel stays within them."""
    monkeypatch.setattr(placement, "check_values", lambda placed: None)
    logits, placed = make_logits(6, 8, device), make_placement(8, device, redundant=4, how=how, dtype=torch.int64)
    placed.physical_ids[::2, 0] = torch.tensor([-1, 12, 1 << 32, -(1 << 40)], device=device)
    placed.physical_ids[:, 1:] = -1
    placed.num_replicas.copy_(torch.tensor([0, 1, -1, 1, 1, 1, 1 << 32, 40], device=device))
    weights, ids = biased_grouped_topk(logits, None, 8, placement=placed)
    is_valid = ids >= 0
    assert ((ids < 12) & (is_valid == (weights > 0))).all() and 6 <= int(is_valid.sum()) <= 24
    assert torch.equal(placed.load - 7, expert_load(ids, 12))


INT = dict(dtype=torch.int32)
WRONG_VALUES = {
    "placement.num_replicas has 0 for expert 1; 1 to 2": (("num_replicas", 1), 0),
    "placement.num_replicas has 3 for expert 0; 1 to 2": (("num_replicas", 0), 3),
    "placement.physical_ids has -1 for replica 1 of expert 0; 0 to 4": (("physical_ids", (0, 1)), -1),
    "placement.physical_ids has 5 for replica 0 of expert 2; 0 to 4": (("physical_ids", (2, 0)), 5),
    "placement.physical_ids has 2 for expert 1 and for expert 2; a": (("physical_ids", (2, 0)), 2),
}


@pytest.mark.skipif(not simulator.ENABLED, reason="on a GPU the host does not read the tables")
@pytest.mark.parametrize("message", WRONG_VALUES)
def test_the_simulator_names_wrong_values(message):
    table = torch.tensor([[4, 1], [2, -1], [3, -1], [0, -1]], **INT)
    placed = ExpertPlacement(table, torch.tensor([2, 1, 1, 1], **INT), 5)
    (field, index), value = WRONG_VALUES[message]
    getattr(placed, field)[index] = value
    with pytest.raises(ValueError, match=message):
        biased_grouped_topk(torch.zeros(2, 4), None, 2, placement=placed)


REFUSED = [
    (dict(placement=torch.zeros(4, 2)), TypeError, "placement is Tensor; it must be a moe_numba.ExpertPlacement"),
    (
        dict(physical_ids=torch.zeros(4, 2)),
        TypeError,
        "placement.physical_ids is torch.float32; it must be torch.int32",
    ),
    (dict(physical_ids=[[0]]), TypeError, "placement.physical_ids is list"),
    (dict(physical_ids=torch.zeros(4, **INT)), ValueError, r"placement.physical_ids has shape \(4,\)"),
    (dict(physical_ids=torch.zeros(3, 1, **INT)), ValueError, "as gating_output has 4 columns"),
    (dict(physical_ids=torch.zeros(2, 4, **INT).T), ValueError, "and contiguous"),
    (dict(physical_ids=torch.zeros(4, 0, **INT)), ValueError, "placement.physical_ids has 0 columns; 1 to"),
    (dict(physical_ids=torch.zeros(4, 6, **INT)), ValueError, "placement.physical_ids has 6 columns; 1 to"),
    (
        dict(num_replicas=torch.ones(4).long()),
        TypeError,
        "placement.num_replicas is torch.int64; it must be torch.int32",
    ),
    (dict(num_replicas=torch.ones(5, **INT)), ValueError, r"placement.num_replicas has shape \(5,\)"),
    (dict(num_replicas=None), TypeError, "placement.num_replicas is None; with how='round_robin'"),
    (dict(num_physical_experts=0), ValueError, "placement.num_physical_experts is 0; 1 to"),
    (dict(num_physical_experts=5.0), TypeError, "placement.num_physical_experts is 5.0; it must be an int"),
    (dict(num_physical_experts=True), TypeError, "placement.num_physical_experts is True; it must be an int"),
    (dict(how="nearest"), ValueError, "placement.how is 'nearest'; it must be one of round_robin, static, random"),
    (dict(seed=-1), ValueError, "placement.seed is -1; 0 to"),
    (dict(seed=1.0), TypeError, "placement.seed is 1.0; it must be an int"),
    (dict(load=torch.zeros(5)), TypeError, "placement.load is torch.float32; it must be torch.int32"),
    (dict(load=torch.zeros(4, **INT)), ValueError, "as placement.num_physical_experts is 5"),
    (dict(load=torch.zeros(10, **INT)[::2]), ValueError, "and contiguous"),
    (dict(load=torch.zeros(5, dtype=torch.int32, device="meta")), ValueError, "placement.load is on meta"),
    (dict(is_padding=torch.zeros(2)), TypeError, "is_padding is torch.float32; it must be torch.bool"),
    (dict(is_padding=torch.zeros(3, dtype=torch.bool)), ValueError, "as gating_output has 2 rows"),
    (dict(is_padding=torch.zeros(4, dtype=torch.bool)[::2]), ValueError, "and contiguous"),
    (dict(is_padding=[False, True]), TypeError, "is_padding is list"),
    (dict(renormalize_epsilon=-1e-20), ValueError, "renormalize_epsilon is -1e-20; it must be 0 or more"),
    (dict(renormalize_epsilon=float("nan")), ValueError, "renormalize_epsilon is nan; it must be 0 or more"),
    (dict(renormalize_epsilon=1e39), ValueError, "finite in float32"),
    (dict(renormalize_epsilon=None), TypeError, "renormalize_epsilon is None; it must be a number"),
    (dict(renormalize_epsilon=True), TypeError, "renormalize_epsilon is True; it must be a number"),
]


@pytest.mark.parametrize("function", [biased_grouped_topk, partial(biased_grouped_topk_align, block_size=4)])
@pytest.mark.parametrize("change, error, message", REFUSED, ids=lambda case: case if isinstance(case, str) else "")
def test_refusals(change, error, message, function, device):
    table = torch.tensor([[4, 1], [2, -1], [3, -1], [0, -1]], **INT, device=device)
    count, load = torch.tensor([2, 1, 1, 1], **INT, device=device), torch.zeros(5, **INT, device=device)
    good = ExpertPlacement(table, count, 5, load=load)
    given = dict(gating_output=torch.zeros(2, 4, device=device), correction_bias=None, topk=2, placement=good)
    for name, value in change.items():
        if isinstance(value, torch.Tensor) and value.device.type == "cpu":
            moved = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
            change = {name: moved.copy_(value)}
    function(**given)
    of_placement = {n: v for n, v in change.items() if n in ExpertPlacement._fields}
    given |= dict(placement=good._replace(**of_placement)) if of_placement else change
    for _ in range(2):
        with pytest.raises(error, match=message):
            function(**given)


def test_counters_overlap_no_other_tensor(device):
    placed = make_placement(8, device, redundant=0)
    for name, change in {
        "placement.num_replicas": dict(load=placed.num_replicas),
        "placement.physical_ids": dict(load=placed.physical_ids.view(-1)),
    }.items():
        with pytest.raises(ValueError, match=f"placement.load overlaps {name} in memory"):
            biased_grouped_topk(make_logits(2, 8, device), None, 2, placement=placed._replace(**change))
    out = torch.empty(4, 2, device=device), placed.load.view(4, 2)
    with pytest.raises(ValueError, match="placement.load overlaps topk_ids in memory"):
        biased_grouped_topk(make_logits(4, 8, device), None, 2, placement=placed, out=out)


@pytest.mark.skipif(not simulator.ENABLED, reason="NumPy's arrays are on the CPU")
def test_arrays_of_another_library():
    logits, placed = make_logits(3, 8, "cpu"), make_placement(8)
    options = dict(is_padding=torch.tensor([False, True, False]), placement=placed)
    wanted, count = biased_grouped_topk(logits, None, 2, **options), placed.load.clone()
    arrays = placed._replace(**{n: getattr(placed, n).numpy() for n in placement.TENSORS})
    for first in (logits, logits.numpy()):
        placed.load.fill_(7)
        found = biased_grouped_topk(first, None, 2, is_padding=np.array([False, True, False]), placement=arrays)
        assert all(map(torch.equal, map(torch.as_tensor, found), wanted)) and torch.equal(placed.load, count)


def test_prepared_call(device):
    logits, placed = make_logits(3, 8, device), make_placement(8, device)
    is_padding = torch.zeros(3, dtype=torch.bool, device=device)
    call = moe_numba.prepare(biased_grouped_topk, logits, None, 2, is_padding=is_padding, placement=placed)
    is_padding[1] = True
    placed.load.zero_()
    weights, ids = call()
    assert mismatch(weights, ids, logits, None, 2, is_padding=is_padding, placement=placed) is None
    assert torch.equal(placed.load, expert_load(ids, placed.num_physical_experts))


def op_arguments(device, counts=True):
    placed = make_placement(8, device, counts=counts, how="random", seed=3)
    fields = {f"placement_{name}": value for name, value in placed._asdict().items()}
    mask = torch.tensor([False, True, False], device=device)
    return placed, fields | dict(renormalize_epsilon=0.5, is_padding=mask)


@pytest.mark.parametrize("op", ["biased_grouped_topk", "biased_grouped_topk_align"])
def test_ops(op, device):
    """An op takes the fields of a placement, and modifies the counters."""
    placed, options = op_arguments(device)
    op, arguments = getattr(torch.ops.moe_numba, op), (make_logits(3, 8, device), None, 2)
    arguments += (4,) if op is torch.ops.moe_numba.biased_grouped_topk_align else ()
    checks = "test_schema", "test_autograd_registration", "test_faketensor"
    opcheck(op.default, arguments, options, test_utils=checks)
    placed.load.fill_(7)
    weights, ids, *_ = op(*arguments, **options)
    given = dict(is_padding=options["is_padding"], renormalize_epsilon=0.5, placement=placed)
    assert mismatch(weights, ids, arguments[0], None, 2, **given) is None
    assert torch.equal(placed.load - 7, expert_load(ids, placed.num_physical_experts))
    assert [a.name for a in op.default._schema.arguments if a.is_write] == ["placement_load"]


@pytest.mark.parametrize("counts", [True, False])
def test_compiled(counts, device):
    placed, options = op_arguments(device, counts)
    options = {name: options[name] for name in ("is_padding", "renormalize_epsilon")}

    def function(logits, placed):
        weights, ids = biased_grouped_topk(logits * 2, None, 2, placement=placed, **options)
        return weights + 1, ids

    torch._dynamo.reset()
    logits = make_logits(3, 8, device)
    weights, ids = torch.compile(function, fullgraph=True, backend="aot_eager")(logits, placed)
    assert mismatch(weights - 1, ids, logits * 2, None, 2, tolerance=1e-5, placement=placed, **options) is None
    if counts:
        assert torch.equal(placed.load - 7, expert_load(ids, placed.num_physical_experts))
    with pytest.raises(Exception, match="placement is tuple; it must be a"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(logits, tuple(placed))


def test_reference_finds_wrong_ids_and_counts(device):
    """The checker rejects logical ids, another replica, and a shared expert behind the logical ones."""
    logits, placed = make_logits(4, 8, device), make_placement(8, device)
    options = dict(num_fused_shared_experts=1, placement=placed)
    weights, ids = biased_grouped_topk(logits, None, 3, **options)
    assert mismatch(weights, ids, logits, None, 3, **options) is None
    plain = biased_grouped_topk(logits, None, 3, num_fused_shared_experts=1)[1]
    rolled = biased_grouped_topk(logits, None, 3, **options | dict(placement=placed._replace(how="static")))[1]
    for wrong in (plain, rolled, torch.cat([ids[:, :2], plain[:, 2:]], dim=1)):
        assert "has a physical expert that the placement does not give it" in mismatch(
            weights, wrong, logits, None, 3, **options
        )


def test_calls_without_options_have_the_kernels_of_before(device):
    plan, _ = api.get_plan(make_logits(3, 8, device), None, None, (2, True, 1, 1, 0, 1.0, False, "sigmoid", 0.0))
    assert plan.optional_types == ()
