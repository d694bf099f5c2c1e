"""The gate's kernel for 16-bit logits without a bias; it ranks logits, so its ids equal the reference's exactly."""

import itertools

import numpy as np
import pytest
import torch
from helpers.wrong_kernels import changed

from moe_numba import biased_grouped_topk
from moe_numba.gate import api, merged_keys, packed_keys
from moe_numba.gate.packed_keys import PackedConfig, select_lanes, supports
from moe_numba.gate.reference import SCORINGS, mismatch
from moe_numba.gate.reference import biased_grouped_topk as expected

SHAPES = [(128, 8), (32, 4), (512, 10), (384, 8), (896, 16), (64, 6), (160, 8), (8, 2), (1024, 32), (320, 3)]
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[1 << 31, 0], ids=["few tokens", "many tokens"], autouse=True)
def each_number_of_lanes(request, monkeypatch):
    monkeypatch.setattr(packed_keys, "MANY_TOKENS_PER_PICK", request.param)
    monkeypatch.setattr(api, "_plans", {})


def make_logits(tokens, experts, device, dtype=torch.bfloat16, seed=0):
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def error_of(logits, topk, scoring="softmax", **options):
    """Return how a call differs from the reference, or None; ids must be the same."""
    options["scoring"] = scoring
    out = torch.full((len(logits), topk), float("nan")).to(logits.device), torch.full((len(logits), topk), -7)
    out = out[0], out[1].to(logits.device, torch.int32)
    weights, ids = biased_grouped_topk(logits, None, topk, out=out, **options)
    assert next(reversed(api._plans.values())).packed_configs, "another kernel has run"
    right = expected(logits.double(), None, topk, dtype=torch.float64, **options)[1]
    if not torch.equal(ids, right):
        return f"ids {ids.tolist()} instead of {right.tolist()}"
    return mismatch(weights, ids, logits, None, topk, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape, dtype, device):
    experts, topk = shape
    for tokens in (1, 7, 40):
        assert error_of(make_logits(tokens, experts, device, dtype), topk) is None


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shared, flag, renormalize", list(itertools.product((0, 2), (False, True), (False, True))))
def test_weights(scoring, shared, flag, renormalize, device):
    options = dict(
        num_fused_shared_experts=shared, apply_routed_scaling_factor_on_output=flag, routed_scaling_factor=2.5
    )
    assert error_of(make_logits(9, 128, device), 8, scoring, renormalize=renormalize, **options) is None


@pytest.mark.parametrize("limit", [0, 1, 6, 100, torch.tensor(5)])
def test_padding(limit, device):
    limit = limit.to(device) if isinstance(limit, torch.Tensor) else limit
    assert error_of(make_logits(9, 64, device), 4, num_token_non_padded=limit) is None


AWKWARD = [0.0, -0.0, 1.0, -1.0, 20.0, 30.0, -20.0, 1e-40, -1e-40, 6e4, -6e4, np.inf, -np.inf, np.nan, -np.nan]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring, renormalize", [("softmax", True), ("softmax", False), ("sigmoid", True)])
def test_ties_infinities_and_nan(scoring, renormalize, dtype, device):
    random = np.random.default_rng(0)
    rows = [random.choice(random.permutation(AWKWARD)[: 2 + i % 9], 64) for i in range(40)]
    rows += [np.full(64, value) for value in AWKWARD]
    logits = torch.from_numpy(np.array(rows, np.float32)).to(device, dtype)
    assert error_of(logits, 6, scoring, renormalize=renormalize) is None


def test_one_nan_excludes_one_expert(device):
    logits = make_logits(4, 128, device)
    best = logits.argmax(1)
    logits[torch.arange(4), best] = float("nan")
    weights, ids = biased_grouped_topk(logits, None, 8, scoring="softmax")
    assert not (ids == best[:, None]).any() and torch.allclose(weights.sum(1).cpu(), torch.ones(4))


@pytest.mark.parametrize("shape", [(128, 8), (512, 10), (896, 16)], ids=str)
def test_all_experts_of_a_token_in_one_lane(shape, device):
    """A lane has more picks than it has sorted keys."""
    experts, topk = shape
    logits = make_logits(64, experts, device)
    for row in range(64):  # groups of 8 experts are one load of a lane
        logits[row, 8 * row % experts :][:8] += 30
    assert error_of(logits, topk) is None


def test_strided_and_unaligned_rows(device):
    for offset, experts in ((0, 128), (2, 128), (4, 64), (8, 512)):
        logits = make_logits(5, experts + 24, device)[:, offset : offset + experts]
        assert error_of(logits, 8) is None


# Wrong kernels


WRONG = {  # name: (source text, its replacement)
    "ties go to the higher expert": ("uint32(0xFFFF - expert - first_expert)", "uint32(expert + first_expert + 1)"),
    "-0.0 is less than 0.0": ("raw[w] = canonical(raw[w])", "raw[w] = raw[w]"),
    "NaN ranks first": ("picked >= first_nan or", "False or"),
    "a NaN stays": ("raw[w] = replace_nan(raw[w])", "raw[w] = raw[w]"),
    "negative logits are in reverse": ("& uint32(0x7FFF7FFF))", "& uint32(0))"),
    "a lane that has run out of sorted keys is not noticed": ("keys[0] == EXCLUDED)", "keys[0] == 12345)"),
    "the winner keeps its key": ("keys[d] = keys[d + 1] if wins", "keys[d] = keys[d + 1] if not wins"),
    "the slow picks repeat one": ("if keys[j] < last", "if keys[j] <= last"),
    "the sum of a row is of one lane": ("row_sum += cuda.shfl_xor_sync(FULL_MASK, row_sum, 1 << s)", "pass"),
    "+inf has no weight": ("logit = FLOAT32_MAX if logit > FLOAT32_MAX else logit", "pass"),
    "padding is routed": ("token >= num_unpadded, optional", "token > num_unpadded, optional"),
    "what is wrong is not stored again": ("            if is_wrong:\n", "            if False:\n"),
    "padding rows are not stored": ("token < num_tokens and first + column < topk", "False"),
}


def use_changed(monkeypatch, *change):
    monkeypatch.setattr(packed_keys, "make_packed_kernel", changed(packed_keys, *change)["make_packed_kernel"])


@pytest.mark.parametrize("case", WRONG)
def test_wrong_kernels_are_rejected(case, monkeypatch, device):
    if case == "padding is routed" and packed_keys.MANY_TOKENS_PER_PICK:
        pytest.skip("a warp with one token does not route padding")
    use_changed(monkeypatch, *WRONG[case])
    tokens, experts = 41, 128 if case == "padding is routed" else 256  # with 128 experts a warp has two tokens
    logits = make_logits(tokens, experts, device)
    logits[1] = logits[1].round()  # ties
    logits[2] = torch.where(torch.arange(experts, device=device) % 2 == 0, -0.0, 0.0)
    logits[20, 5] = float("nan")
    logits[4, 40:48] += 30  # one lane has the best experts
    logits[5] = -logits[5].abs()
    logits[6, 3] = float("inf")
    topk = 8 if packed_keys.MANY_TOKENS_PER_PICK else merged_keys.KEPT + 2  # which are picked one by one, too
    assert error_of(logits, topk, renormalize=False, num_token_non_padded=tokens - 2)


WRONG_MERGES = {
    "a chunk is not sorted": ("            _sort_keys(keys)\n", ""),
    "the best keys are not sorted again": ("    _sort_bitonic(best)\n", ""),
    "a chunk replaces the best keys": ("                merge(best, keys)\n", "                best[0] = keys[0]\n"),
    "sorted keys are compared first with first": ("other[KEPT - 1 - i]", "other[i]"),
    "lanes do not exchange keys": ("cuda.shfl_xor_sync(FULL_MASK, best[i], distance)", "best[i]"),
    "-0.0 is less than 0.0": ("raw[w] = canonical(raw[w])", "pass"),
    "NaN ranks first": ("cuda.any_sync(FULL_MASK, best[0] >= first_nan)", "False"),
    "all lanes have the first picks": ("if column == other else key", "if column == 99 else key"),
    "the total is of one lane": ("total += cuda.shfl_xor_sync(FULL_MASK, total, 1 << s)", "pass"),
    "the sum of a row is of one lane": ("row_sum += cuda.shfl_xor_sync(FULL_MASK, row_sum, 1 << s)", "pass"),
    "+inf has no weight": ("logit = FLOAT32_MAX if logit > FLOAT32_MAX else logit", "pass"),
    "padding is routed": ("is_padding = token >= num_unpadded", "is_padding = token > num_unpadded"),
}


@pytest.mark.parametrize("case", WRONG_MERGES)
def test_wrong_merges_are_rejected(case, monkeypatch, device):
    if packed_keys.MANY_TOKENS_PER_PICK:
        pytest.skip("few tokens take the other kernel")
    wrong = changed(merged_keys, *WRONG_MERGES[case])["make_merged_kernel"]
    monkeypatch.setattr(merged_keys, "make_merged_kernel", wrong)
    tokens = 43
    logits = make_logits(tokens, 256, device)
    logits[2] = torch.where(torch.arange(256, device=device) % 2 == 0, -0.0, 0.0)
    logits[20, 5] = float("nan")
    logits[6, 3] = float("inf")
    assert any(error_of(logits, 8, renormalize=flag, num_token_non_padded=tokens - 1) for flag in (False, True))


def test_tokens_seldom_need_the_slow_loop(monkeypatch, device):
    """Of random logits, the sorted keys of a lane are enough for most tokens: the fast path chooses their experts."""
    use_changed(
        monkeypatch, "store(weights, ids, unsorted_picks(keys, column), raw", "store(weights, ids, int32(0), raw"
    )
    for experts, topk in SHAPES:
        logits = make_logits(32, experts, device)
        ids = biased_grouped_topk(logits, None, topk, scoring="softmax")[1]
        right = expected(logits.double(), None, topk, scoring="softmax", dtype=torch.float64)[1]
        assert (ids == right).all(dim=1).sum() >= 16, (experts, topk)


# Choice and refusals


def test_lanes():
    assert [select_lanes(128, 8, many) for many in (False, True)] == [32, 16]
    assert [select_lanes(128, 4, many) for many in (False, True)] == [32, 8]
    assert [select_lanes(32, 4, many) for many in (False, True)] == [4, 4]
    assert [select_lanes(512, 10, many) for many in (False, True)] == [32, 32]
    assert select_lanes(127, 8, True) is None and select_lanes(128, 33, True) is None
    for experts in range(1, 1025):
        for routed in (1, 2, 8, 32):
            for many in (False, True):
                lanes = select_lanes(experts, routed, many)
                assert lanes is None or supports(experts, routed, lanes)


def test_lanes_that_merge():
    assert [merged_keys.select_lanes(experts, 8) for experts in (128, 160, 256, 384, 512)] == [2, 4, 4, 8, 8]
    assert [merged_keys.select_lanes(32, picks) for picks in (1, 4, 5, 8, 9)] == [None, None, 2, 2, None]
    assert merged_keys.select_lanes(520, 8) is None and merged_keys.select_lanes(1024, 8) is None


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(dtype="float32"), "dtype is float32; it must be one of bfloat16, float16"),
        (dict(lanes=3), "lanes is 3; 128 experts must be"),
        (dict(topk=9), "the 9 routed experts at most the number of lanes"),
        (dict(num_experts=120), "lanes is 8; 120 experts must be an even number"),
        (dict(load_bytes=12), "load_bytes is 12; it must be 4, 8 or 16"),
    ],
)
def test_the_factory_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        packed_keys.make_packed_kernel(PackedConfig(128, 8, 8)._replace(**change))
