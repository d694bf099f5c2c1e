"""The gate against its reference, on a GPU or in the simulator; and the checker against wrong kernels."""

import itertools

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from wrong_kernels import changed

import moe_numba
from moe_numba import biased_grouped_topk, simulator
from moe_numba.gate import api, kernel, kernel_4tokens, reference
from moe_numba.gate.reference import mismatch

SHAPES = [  # experts, groups, groups kept, top-k
    (128, 4, 2, 4),
    (256, 8, 4, 8),
    (512, 16, 8, 16),
    (384, 1, 1, 8),
    (160, 1, 1, 8),
    (256, 16, 8, 8),
    (128, 8, 4, 6),
]
ODD_SHAPES = [
    (100, 5, 2, 7),
    (96, 48, 20, 8),
    (1024, 1, 1, 32),
    (896, 1, 1, 16),
    (7, 7, 3, 3),
    (1, 1, 1, 1),
    (60, 3, 1, 8),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def route(logits, bias, topk, **options):
    """Call the public function on poisoned outputs."""
    out = (
        torch.full((len(logits), topk), float("nan"), device=logits.device),
        torch.full((len(logits), topk), -7, dtype=torch.int32, device=logits.device),
    )
    return biased_grouped_topk(logits, bias, topk, out=out, **options)


def check(logits, bias, topk, **options):
    assert mismatch(*route(logits, bias, topk, **options), logits, bias, topk, **options) is None


def some(tokens, experts, device, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=random).to(device, dtype)
    return logits, torch.rand(experts, generator=random).to(device)


@pytest.fixture(params=["few", "many"])
def kernel_for(request, monkeypatch):
    """Both kernels serve any number of tokens; the switch between them only looks at which is faster."""
    monkeypatch.setattr(api, "MANY_TOKENS", 1 if request.param == "many" else 1 << 31)
    return request.param


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
def test_shapes(shape, dtype, device, kernel_for):
    experts, groups, kept, topk = shape
    check(*some(6, experts, device, dtype), topk, num_expert_group=groups, topk_group=kept)


@pytest.mark.parametrize("shared, flag, renormalize", list(itertools.product((0, 1, 2), (False, True), (False, True))))
def test_weights(shared, flag, renormalize, device, kernel_for):
    check(
        *some(5, 256, device),
        8 + shared,
        renormalize=renormalize,
        num_expert_group=8,
        topk_group=4,
        num_fused_shared_experts=shared,
        routed_scaling_factor=2.5,
        apply_routed_scaling_factor_on_output=flag,
    )


@pytest.mark.parametrize("scoring", reference.SCORINGS)
@pytest.mark.parametrize("shape", [(256, 8, 4, 8), (160, 1, 1, 8), (96, 48, 20, 8)], ids=str)
def test_scorings(shape, scoring, device, kernel_for):
    experts, groups, kept, topk = shape
    logits, bias = some(5, experts, device)
    check(3 * logits, bias / 100, topk, num_expert_group=groups, topk_group=kept, scoring=scoring)
    check(30 * logits, None, topk, num_expert_group=groups, topk_group=kept, scoring=scoring)


@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_of_any_type(dtype, bias_dtype, device):
    logits, bias = some(5, 256, device, dtype)
    check(logits, bias_dtype and bias.to(bias_dtype), 8, num_expert_group=8, topk_group=4)


def test_softmax_and_sigmoid_differ(device):
    logits, bias = some(5, 64, device)
    assert not torch.equal(
        biased_grouped_topk(logits, bias, 4)[0], biased_grouped_topk(logits, bias, 4, scoring="softmax")[0]
    )


@pytest.mark.parametrize("kind", [int, torch.int32, torch.int64])
@pytest.mark.parametrize("limit", [0, 1, 6, 9, 100])
def test_padding(limit, kind, device, kernel_for):
    logits, bias = some(9, 256, device)
    given = limit if kind is int else torch.tensor([limit], dtype=kind, device=device)
    options = dict(num_expert_group=8, topk_group=4, num_token_non_padded=given)
    check(logits, bias, 8, **options)
    weights, ids = route(logits, bias, 8, **options)
    assert (ids[limit:] == -1).all() and (weights[limit:] == 0).all() and (ids[:limit] >= 0).all()


def test_strided_and_unaligned_rows(device, kernel_for):
    for width, start, dtype in [(300, 0, torch.float32), (264, 8, torch.bfloat16), (257, 1, torch.float16)]:
        wide, bias = some(6, width, device, dtype)
        check(wide[:, start : start + 256], bias[start : start + 256], 8, num_expert_group=8, topk_group=4)


def test_no_tokens(device):
    logits, bias = some(0, 256, device)
    weights, ids = biased_grouped_topk(logits, bias, 8, num_expert_group=8, topk_group=4)
    assert weights.shape == ids.shape == (0, 8)


def test_nothing_beside_the_outputs_is_written(device, kernel_for):
    logits, bias = some(7, 256, device)
    around = torch.full((3, 7 * 9), 12345.0, device=device)
    beside = torch.full((3, 7 * 9), 12345, dtype=torch.int32, device=device)
    out = around[1].view(7, 9), beside[1].view(7, 9)
    options = dict(num_expert_group=8, topk_group=4, num_fused_shared_experts=1)
    biased_grouped_topk(logits, bias, 9, out=out, **options)
    assert mismatch(*out, logits, bias, 9, **options) is None
    assert (around[::2] == 12345).all() and (beside[::2] == 12345).all()


def test_numpy_and_cupy_come_back_as_they_came(device):
    logits, bias = some(3, 64, device)
    if simulator.ENABLED:
        weights, ids = biased_grouped_topk(logits.numpy(), bias.numpy(), 4)
        assert type(weights) is type(ids) is np.ndarray
    else:
        cupy = pytest.importorskip("cupy")
        weights, ids = biased_grouped_topk(cupy.from_dlpack(logits), cupy.from_dlpack(bias), 4)
        assert type(weights) is type(ids) is cupy.ndarray
    weights, ids = (torch.from_dlpack(a) for a in (weights, ids))
    assert mismatch(weights, ids, logits, bias, 4) is None


# What breaks ties, and what may not break anything.

awkward = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 20.0, -20.0, 100.0, -100.0, np.inf, -np.inf, np.nan])
EQUAL_IN_FLOAT32 = np.array([[20.0, 100.0, *[np.nan] * 126]] * 3, np.float32)  # under the sigmoid


@settings(max_examples=40, deadline=None)
@given(
    logits=arrays.arrays(np.float32, (3, 128), elements=awkward),
    bias=arrays.arrays(np.float32, 128, elements=st.sampled_from([0.0, 1.0, -1.0, -np.inf, np.inf, np.nan])),
    groups=st.sampled_from([(1, 1), (4, 2), (8, 4)]),
    scoring=st.sampled_from(reference.SCORINGS),
    many=st.booleans(),
)
@example(EQUAL_IN_FLOAT32, np.zeros(128, np.float32), (1, 1), "sigmoid", False)
@example(EQUAL_IN_FLOAT32, np.zeros(128, np.float32), (1, 1), "sigmoid", True)
def test_ties_infinities_and_nan(logits, bias, groups, scoring, many):
    device = "cpu" if simulator.ENABLED else "cuda"
    logits, bias = torch.from_numpy(logits).to(device), torch.from_numpy(bias).to(device)
    options = dict(num_expert_group=groups[0], topk_group=groups[1], scoring=scoring)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "MANY_TOKENS", 1 if many else 1 << 31)
        weights, ids = route(logits, bias, 6, **options)
    assert weights.isfinite().all() and ((ids >= 0) & (ids < 128)).all()
    assert all(len(set(row)) == 6 for row in ids.tolist())
    wrong = mismatch(weights, ids, logits, bias, 6, **options)
    if wrong and (reference.scores_of(logits, scoring) + bias).gather(1, ids.long()).isnan().any():
        # Among so few numbers the judge does not see that two are equal in float32: the reference in float32 does.
        right_weights, right_ids = reference.biased_grouped_topk(logits, bias, 6, **options)
        assert torch.equal(ids, right_ids), wrong
        torch.testing.assert_close(weights, right_weights)
    else:
        assert wrong is None


def test_nothing_but_nan_in_a_group(device, kernel_for):
    """A NaN counts as -inf in what its group is worth, on every kernel and in the reference."""
    logits, bias = some(4, 256, device)
    logits[0, 1:32] = float("nan")  # one number is left in the first group,
    logits[1, :32] = float("nan")  # none,
    logits[2, :128] = float("nan")  # four groups have none, and four must be kept,
    logits[3, :160] = float("nan")  # so one of these is kept
    check(logits, bias, 8, num_expert_group=8, topk_group=4)


def test_no_tokens_pass_the_check(device):
    check(*some(0, 256, device), 8, num_expert_group=8, topk_group=4)


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scoring", reference.SCORINGS)
def test_a_row_of_one_value(fill, scoring, device, kernel_for):
    logits = torch.full((2, 256), fill, device=device)
    weights, ids = route(logits, None, 8, num_expert_group=8, topk_group=4, scoring=scoring)
    assert weights.isfinite().all()
    assert ids.tolist() == [list(range(8))] * 2


def test_a_zero_sum_weighs_nothing(device):
    weights, ids = route(torch.full((1, 64), -200.0, device=device), torch.arange(64.0, device=device), 4)
    assert ids.tolist() == [[63, 62, 61, 60]] and (weights == 0).all()


# The peers' bugs, each a test that passes here.


def test_peer_bug_dangling_else(device):
    """SGLang's static templates for 256/16 and 128/8 were unreachable; here any grouping gets a kernel of its own."""
    for experts, groups in ((256, 16), (128, 8)):
        lanes, values = kernel.layout(experts, groups)
        assert lanes * groups == 32 and values * lanes * groups == experts
        check(*some(3, experts, device), 8, num_expert_group=groups, topk_group=groups // 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_peer_bug_sentinel_in_16_bits(dtype, device, kernel_for):
    """FLT_MAX becomes +inf in 16 bits, so a live group that begins with +inf was taken for a dropped one."""
    logits, bias = some(2, 256, device, dtype)
    bias = bias.to(dtype)
    bias[::32] = float("inf")
    check(logits, bias, 8, num_expert_group=8, topk_group=4)
    assert set(route(logits, bias, 8, num_expert_group=8, topk_group=8)[1][0].tolist()) == set(range(0, 256, 32))


@pytest.mark.parametrize("seed", range(4))
def test_peer_bug_unsynchronised_sum(seed, device, kernel_for):
    """The sum read what another lane had just stored; here every order of the lanes gives the same bits."""
    logits, bias = some(5, 256, device)
    with simulator.seed(0):
        first = route(logits, bias, 8, num_expert_group=8, topk_group=4)
    with simulator.seed(seed):
        again = route(logits, bias, 8, num_expert_group=8, topk_group=4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 23])
def test_peer_bug_return_before_a_barrier(tokens, device, kernel_for):
    """Tokens that do not fill a block: nobody leaves while others wait, which the simulator would report."""
    check(*some(tokens, 256, device), 8, num_expert_group=8, topk_group=4)


def test_peer_bug_renormalize_ignored(device):
    logits, bias = some(4, 256, device)
    options = dict(num_expert_group=8, topk_group=4)
    weights, ids = biased_grouped_topk(logits, bias, 8, renormalize=False, **options)
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids.long()), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights.sum(1), torch.ones(4, device=device))


def test_peer_bug_duplicated_maximum(device, kernel_for):
    """Discarding all copies of a group's best left it a second best that is too small."""
    logits = torch.zeros(1, 256, device=device)
    logits[0, 32:34] = 4.0  # twins: worth 2 * sigmoid(4)
    logits[0, 64:66] = torch.tensor([5.0, 0.5], device=device)  # worth less
    assert route(logits, None, 2, num_expert_group=8, topk_group=1)[1].tolist() == [[32, 33]]


# Refusals: a sentence that names the argument, what it was and what is allowed.


@pytest.mark.parametrize(
    "change, error, sentence",
    [
        (
            dict(gating_output=torch.zeros(4)),
            ValueError,
            r"gating_output has shape \(4,\); it must be \[tokens, num_experts\]",
        ),
        (
            dict(gating_output=torch.zeros(4, 64).double()),
            TypeError,
            "gating_output is torch.float64; it must be float32",
        ),
        (dict(gating_output=torch.zeros(4, 1025)), ValueError, "gating_output has 1025 experts; 1 to 1024 are allowed"),
        (dict(gating_output=torch.zeros(64, 4).T), ValueError, "gating_output has column stride 4; it must be 1"),
        (dict(correction_bias=torch.zeros(63)), ValueError, r"correction_bias has shape \(63,\); it must be \(64,\)"),
        (dict(correction_bias=torch.zeros(64).int()), TypeError, "correction_bias is torch.int32; it must be"),
        (
            dict(correction_bias=lambda device: torch.zeros(128, device=device)[::2]),
            ValueError,
            "correction_bias has stride 2; it must be contiguous",
        ),
        (dict(topk=0), ValueError, "topk is 0; 1 to 32 are allowed"),
        (dict(topk=33), ValueError, "topk is 33; 1 to 32 are allowed"),
        (dict(topk=2.0), TypeError, "topk is 2.0; it must be an int"),
        (dict(num_expert_group=5), ValueError, "num_expert_group is 5; it must divide the 64 experts"),
        (
            dict(num_expert_group=4, topk_group=5),
            ValueError,
            r"topk_group is 5; 1 to num_expert_group \(4\) are allowed",
        ),
        (
            dict(num_fused_shared_experts=4),
            ValueError,
            r"num_fused_shared_experts is 4; 0 to topk - 1 \(3\) are allowed",
        ),
        (
            dict(num_expert_group=32, topk_group=1),
            ValueError,
            "asks for 4 routed experts; the groups that are kept have 2",
        ),
        (dict(scoring="relu"), ValueError, "scoring is 'relu'; it must be one of sigmoid, softmax, sqrtsoftplus"),
        (dict(routed_scaling_factor=0.0), ValueError, "routed_scaling_factor is 0.0; it must be finite and not zero"),
        (dict(num_token_non_padded=-1), ValueError, "num_token_non_padded is -1; it may not be negative"),
        (
            dict(num_token_non_padded=torch.zeros(2)),
            TypeError,
            "num_token_non_padded must be an int, or a tensor of one",
        ),
        (
            dict(out=(torch.zeros(4, 3), torch.zeros(4, 4).int())),
            ValueError,
            "out's weights is .* it must be contiguous",
        ),
        (dict(out=(torch.zeros(4, 4), torch.zeros(4, 4).long())), ValueError, "out's ids is .* it must be contiguous"),
    ],
)
def test_refusals(change, error, sentence, device):
    arguments = dict(gating_output=torch.zeros(4, 64), correction_bias=torch.zeros(64), topk=4)
    arguments.update(change)

    def there(value):
        if isinstance(value, tuple):
            return tuple(map(there, value))
        if callable(value):
            return value(device)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    with pytest.raises(error, match=sentence):
        biased_grouped_topk(**{name: there(value) for name, value in arguments.items()})


def test_a_tensor_on_the_wrong_device_is_refused():
    elsewhere = torch.empty(4, 64, device="meta" if simulator.ENABLED else "cpu")
    with pytest.raises(ValueError, match="gating_output is on .* it must be on"):
        biased_grouped_topk(elsewhere, None, 4)


# The checker must be able to fail.


def spoil(name):
    def off_by_one(weights, ids):
        ids[1, 3] = (ids[1, 3] + 1) % 256

    def twice(weights, ids):
        ids[2, 0] = ids[2, 1]

    def out_of_range(weights, ids):
        ids[0, 7] = 256

    def unwritten_id(weights, ids):
        ids[3, 2] = -7

    def unwritten_weight(weights, ids):
        weights[3, 2] = float("nan")

    def another_order(weights, ids):
        weights[1], ids[1] = weights[1].flip(0), ids[1].flip(0)

    def not_normalised(weights, ids):
        weights[2] *= 1.01

    return locals()[name]


@pytest.mark.parametrize(
    "what",
    ["off_by_one", "twice", "out_of_range", "unwritten_id", "unwritten_weight", "another_order", "not_normalised"],
)
def test_the_checker_rejects_spoiled_outputs(what, device):
    logits, bias = some(5, 256, device)
    options = dict(num_expert_group=8, topk_group=4)
    weights, ids = route(logits, bias, 8, **options)
    assert mismatch(weights, ids, logits, bias, 8, **options) is None
    spoil(what)(weights, ids)
    assert mismatch(weights, ids, logits, bias, 8, **options)


WRONG = {  # a module's source, what is changed in it, and what it does then
    "the tie goes to the higher group": (
        kernel,
        "theirs == mine and rival < group",
        "theirs == mine and rival > group",
    ),
    "one group too many is kept": (kernel, ">= topk_group:", "> topk_group:"),
    "an expert too high": (kernel, "holder * values + cuda.ffs(slots) - 1", "holder * values + cuda.ffs(slots)"),
    "the last column is not written": (kernel, "if lane < topk:", "if lane < topk - 1:"),
    "the bias is forgotten": (kernel, "row[j] + offset[j] if has_bias else row[j]", "row[j]"),
    "twins are taken for one": (kernel, "if twins != 0:", "if twins == 12345:"),
    "no barrier before the dealing": (
        kernel_4tokens,
        "& below_of_rank))] = group\n            cuda.syncwarp()",
        "& below_of_rank))] = group",
    ),
    "the tie of groups goes wrong": (kernel_4tokens, "mine - lower", "mine"),
}


RACES = {"no barrier before the dealing"}  # a GPU's lanes mostly run in step and hide them


@pytest.mark.parametrize("what", [what for what in WRONG if simulator.ENABLED or what not in RACES])
def test_the_checker_rejects_wrong_kernels(what, monkeypatch, device):
    """Each changes one thing in the real kernel; the first run, or some seed of the simulator's, must show it."""
    module, right, wrong = WRONG[what]
    made = changed(module, right, wrong)
    name = "make_kernel" if module is kernel else "make_throughput_kernel"
    monkeypatch.setattr(module, name, made[name])
    monkeypatch.setattr(api, "MANY_TOKENS", 1 if module is kernel_4tokens else 1 << 31)
    monkeypatch.setattr(api, "_plans", {})
    logits, bias = some(8, 256, device)
    logits[4:] = (2 * logits[4:]).round()  # with ties, and a bias that makes none
    logits[6:, :] = logits[6:, :32].repeat(1, 8)  # every group alike,
    logits[7, 224:] += 1  # but for the last
    bias[:] = bias.round()
    bias[:] = torch.where(torch.arange(256, device=device) % 32 < 16, bias[:32].repeat(8), torch.zeros_like(bias))
    for seed in range(10):
        try:
            with simulator.seed(seed):
                weights, ids = route(logits, bias, 8, num_expert_group=8, topk_group=4)
        except simulator.SimulatorError:
            return
        if mismatch(weights, ids, logits, bias, 8, num_expert_group=8, topk_group=4):
            return
    pytest.fail(f"the check let a kernel pass in which {what}")


# On a GPU: large, and the things that a simulator has not.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
def test_all_token_counts(shape, dtype):
    experts, groups, kept, topk = shape
    for tokens in (*range(10), 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        logits, bias = some(tokens, experts, "cuda", dtype, seed=tokens)
        for shared, flag in itertools.product((0, 1, 2), (False, True)):
            if tokens > 4096 and shared != 1 or topk + shared > 32:
                continue
            options = dict(num_expert_group=groups, topk_group=kept, num_fused_shared_experts=shared)
            options |= dict(routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=flag)
            wrong = mismatch(*route(logits, bias, topk + shared, **options), logits, bias, topk + shared, **options)
            assert wrong is None, f"{tokens} tokens, {options}: {wrong}"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 16384])
def test_graph_replays_on_changed_inputs(tokens):
    logits, bias = some(tokens, 256, "cuda")
    options = dict(num_expert_group=8, topk_group=4)
    out = route(logits, bias, 8, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        biased_grouped_topk(logits, bias, 8, out=out, **options)
    for seed in range(3):
        logits.copy_(some(tokens, 256, "cuda", seed=seed + 1)[0])
        out[0].fill_(float("nan"))
        out[1].fill_(-7)
        graph.replay()
        assert mismatch(*out, logits, bias, 8, **options) is None


@pytest.mark.gpu
def test_it_runs_on_the_callers_stream():
    logits, bias = some(4096, 256, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        later = logits.clone().mul_(-1)
        weights, ids = biased_grouped_topk(later, bias, 8, num_expert_group=8, topk_group=4)
    stream.synchronize()
    assert mismatch(weights, ids, -logits, bias, 8, num_expert_group=8, topk_group=4) is None


@pytest.mark.gpu
def test_the_same_bits_every_run_beside_other_work():
    logits, bias = some(16384, 256, "cuda")
    options = dict(num_expert_group=8, topk_group=4)
    first = route(logits, bias, 8, **options)
    other, a = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(other):
            a @ a
        assert all(torch.equal(x, y) for x, y in zip(first, route(logits, bias, 8, **options), strict=True))


def test_public_names():
    assert moe_numba.biased_grouped_topk is biased_grouped_topk
    assert "tokens, num_experts" in biased_grouped_topk.__doc__
