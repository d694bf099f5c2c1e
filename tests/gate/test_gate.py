"""Test the gate against its reference, on a GPU or in the simulator, and the checker against wrong kernels."""

import itertools

import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from helpers import gate_shapes
from helpers.wrong_kernels import changed
from hypothesis import example, given, settings
from hypothesis import strategies as st

import moe_numba
from moe_numba import biased_grouped_topk, simulator
from moe_numba.gate import api, four_tokens_per_warp, generic, one_token_per_warp, reference
from moe_numba.gate.reference import mismatch

SHAPES = [  # experts, groups, groups kept per token, top-k
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
    (561, 17, 5, 8),  # 33 experts per lane, if a lane held adjacent experts of one group
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


def make_inputs(tokens, experts, device, dtype=torch.float32, seed=0):
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, experts, generator=random).to(device, dtype)
    return logits, torch.rand(experts, generator=random).to(device)


def force_kernel(four_tokens, monkeypatch):
    """Select the kernel: both are correct for any number of tokens."""
    monkeypatch.setattr(api, "MANY_TOKENS", 1 if four_tokens else 1 << 31)


@pytest.fixture(params=[False, True], ids=["1 token", "4 tokens"])
def each_kernel(request, monkeypatch):
    force_kernel(request.param, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
def test_shapes(shape, dtype, device, each_kernel):
    experts, groups, topk_group, topk = shape
    check(*make_inputs(6, experts, device, dtype), topk, num_expert_group=groups, topk_group=topk_group)


@pytest.mark.parametrize("lanes_per_group", [0, 1, 2, 4, 8, 16, 32])
def test_classes_of_shapes(lanes_per_group):
    """Any group count, with one expert per lane up to more than 32."""
    assert not gate_shapes.check_shapes(gate_shapes.sample(lanes_per_group, 8 if lanes_per_group else 3))


@pytest.mark.gpu
@pytest.mark.parametrize("lanes_per_group", [0, 1, 2, 4, 8, 16, 32])
def test_more_shapes_of_each_class(lanes_per_group):
    """For all shapes run tests/helpers/gate_shapes.py."""
    assert not gate_shapes.check_shapes(gate_shapes.sample(lanes_per_group, 48, seed=1))


@pytest.mark.parametrize("tokens", [9, 41])
@pytest.mark.parametrize("limit", [None, 38])
def test_warps_route_several_tokens(tokens, limit, device, each_kernel):
    """Each warp routes several tokens, one after another; the last tokens are padding."""
    if simulator.ENABLED:
        assert tokens > 2 * api._SIMULATED_WARPS
    options = dict(num_expert_group=8, topk_group=4, num_token_non_padded=limit)
    check(*make_inputs(tokens, 256, device), 8, **options)
    check(*make_inputs(tokens, 96, device), 8, **options | dict(num_expert_group=48, topk_group=20))
    check(*make_inputs(tokens, 96, device), 8, **options | dict(num_expert_group=1, topk_group=1))


def test_rows_beyond_2_31_elements(device):
    """The stride between rows is 2**30, so the third row starts where int32 indices end."""
    # Only the rows are touched, so that they alone take physical memory on the CPU; torch.empty would fill all of it
    # with poison.
    memory = torch.UntypedStorage(2 * ((1 << 31) + 256), device=device)
    logits = torch.empty(0, dtype=torch.bfloat16, device=device).set_(memory, 0, (3, 256), (1 << 30, 1))
    few, bias = make_inputs(3, 256, device, torch.bfloat16)
    logits.copy_(few)
    check(logits, bias, 8, num_expert_group=8, topk_group=4)


@pytest.mark.parametrize("shared, flag, renormalize", list(itertools.product((0, 1, 2), (False, True), (False, True))))
def test_weights(shared, flag, renormalize, device, each_kernel):
    check(
        *make_inputs(5, 256, device),
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
def test_scorings(shape, scoring, device, each_kernel):
    experts, groups, topk_group, topk = shape
    logits, bias = make_inputs(5, experts, device)
    check(3 * logits, bias / 100, topk, num_expert_group=groups, topk_group=topk_group, scoring=scoring)
    check(30 * logits, None, topk, num_expert_group=groups, topk_group=topk_group, scoring=scoring)


@pytest.mark.parametrize("bias_dtype", [None, *DTYPES])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_dtypes(dtype, bias_dtype, device):
    logits, bias = make_inputs(5, 256, device, dtype)
    check(logits, bias_dtype and bias.to(bias_dtype), 8, num_expert_group=8, topk_group=4)


def test_softmax_and_sigmoid_differ(device):
    logits, bias = make_inputs(5, 64, device)
    assert not torch.equal(
        biased_grouped_topk(logits, bias, 4)[0], biased_grouped_topk(logits, bias, 4, scoring="softmax")[0]
    )


@pytest.mark.parametrize("kind", [int, torch.int32, torch.int64])
@pytest.mark.parametrize("limit", [0, 1, 6, 9, 100])
def test_padding(limit, kind, device, each_kernel):
    logits, bias = make_inputs(9, 256, device)
    value = limit if kind is int else torch.tensor([limit], dtype=kind, device=device)
    options = dict(num_expert_group=8, topk_group=4, num_token_non_padded=value)
    check(logits, bias, 8, **options)
    weights, ids = route(logits, bias, 8, **options)
    assert (ids[limit:] == -1).all() and (weights[limit:] == 0).all() and (ids[:limit] >= 0).all()


@pytest.mark.parametrize("kind", ["array", "Parameter", "subclass"])
def test_any_tensor_of_the_number_of_tokens(kind, device):
    """Arrays of other libraries beside torch's logits, and tensors of other types."""
    library = np if simulator.ENABLED else pytest.importorskip("cupy")
    number = torch.tensor([2], device=device)
    limit = {
        "array": lambda: library.from_dlpack(number),
        "Parameter": lambda: torch.nn.Parameter(number, requires_grad=False),
        "subclass": lambda: number.as_subclass(type("Subclass", (torch.Tensor,), {})),
    }[kind]()
    logits, bias = make_inputs(3, 64, device)
    expected = biased_grouped_topk(logits, bias, 4, num_token_non_padded=number)
    given = biased_grouped_topk(logits, bias, 4, num_token_non_padded=limit)
    assert all(map(torch.equal, given, expected)) and given[1].tolist()[2] == [-1] * 4
    fused = moe_numba.biased_grouped_topk_align(logits, bias, 4, 8, num_token_non_padded=limit)
    assert all(map(torch.equal, fused[:2], expected))
    with pytest.raises(TypeError, match=r"num_token_non_padded is torch.int32 \(0,\)"):
        biased_grouped_topk(logits, bias, 4, num_token_non_padded=library.from_dlpack(number.int()[1:]))


def test_strided_and_unaligned_rows(device, each_kernel):
    for width, start, dtype in [(300, 0, torch.float32), (264, 8, torch.bfloat16), (257, 1, torch.float16)]:
        wide, bias = make_inputs(6, width, device, dtype)
        check(wide[:, start : start + 256], bias[start : start + 256], 8, num_expert_group=8, topk_group=4)


def test_no_tokens(device):
    logits, bias = make_inputs(0, 256, device)
    weights, ids = biased_grouped_topk(logits, bias, 8, num_expert_group=8, topk_group=4)
    assert weights.shape == ids.shape == (0, 8)


def test_no_out_of_bounds_writes(device, each_kernel):
    logits, bias = make_inputs(7, 256, device)
    weight_buffers = torch.full((3, 7 * 9), 12345.0, device=device)
    id_buffers = torch.full((3, 7 * 9), 12345, dtype=torch.int32, device=device)
    out = weight_buffers[1].view(7, 9), id_buffers[1].view(7, 9)
    options = dict(num_expert_group=8, topk_group=4, num_fused_shared_experts=1)
    biased_grouped_topk(logits, bias, 9, out=out, **options)
    assert mismatch(*out, logits, bias, 9, **options) is None
    assert (weight_buffers[::2] == 12345).all() and (id_buffers[::2] == 12345).all()


@pytest.mark.gpu
def test_a_call_with_cupy_arrays_runs_on_cupys_stream():
    """Torch's stream is busy meanwhile; with ``out`` nothing but the stream orders the caller's read."""
    cupy = pytest.importorskip("cupy")
    logits, _ = make_inputs(64, 256, "cuda")
    expected = biased_grouped_topk(logits, None, 8)[1].cpu().numpy()
    with cupy.cuda.Stream(non_blocking=True):
        out = cupy.zeros((64, 8), cupy.float32), cupy.full((64, 8), -7, cupy.int32)
        array = cupy.from_dlpack(logits)
        torch.cuda._sleep(200_000_000)
        assert biased_grouped_topk(array, None, 8, out=out) is out
        assert (out[1].get() == expected).all()


def test_numpy_and_cupy_arrays(device):
    logits, bias = make_inputs(3, 64, device)
    if simulator.ENABLED:
        weights, ids = biased_grouped_topk(logits.numpy(), bias.numpy(), 4)
        assert type(weights) is type(ids) is np.ndarray
    else:
        cupy = pytest.importorskip("cupy")
        weights, ids = biased_grouped_topk(cupy.from_dlpack(logits), cupy.from_dlpack(bias), 4)
        assert type(weights) is type(ids) is cupy.ndarray
    weights, ids = (torch.from_dlpack(a) for a in (weights, ids))
    assert mismatch(weights, ids, logits, bias, 4) is None


# Ties, infinities and NaN

awkward = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 20.0, -20.0, 100.0, -100.0, np.inf, -np.inf, np.nan])
EQUAL_IN_FLOAT32 = np.array([[20.0, 100.0, *[np.nan] * 126]] * 3, np.float32)  # under the sigmoid


@settings(max_examples=40, deadline=None)
@given(
    logits=arrays.arrays(np.float32, (3, 128), elements=awkward),
    bias=arrays.arrays(np.float32, 128, elements=st.sampled_from([0.0, 1.0, -1.0, -np.inf, np.inf, np.nan])),
    groups=st.sampled_from([(1, 1), (4, 2), (8, 4)]),
    scoring=st.sampled_from(reference.SCORINGS),
    four_tokens=st.booleans(),
)
@example(EQUAL_IN_FLOAT32, np.zeros(128, np.float32), (1, 1), "sigmoid", False)
@example(EQUAL_IN_FLOAT32, np.zeros(128, np.float32), (1, 1), "sigmoid", True)
def test_ties_infinities_and_nan(logits, bias, groups, scoring, four_tokens):
    device = "cpu" if simulator.ENABLED else "cuda"
    logits, bias = torch.from_numpy(logits).to(device), torch.from_numpy(bias).to(device)
    options = dict(num_expert_group=groups[0], topk_group=groups[1], scoring=scoring)
    with pytest.MonkeyPatch.context() as patch:
        force_kernel(four_tokens, patch)
        weights, ids = route(logits, bias, 6, **options)
    assert weights.isfinite().all() and ((ids >= 0) & (ids < 128)).all()
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert mismatch(weights, ids, logits, bias, 6, **options) is None


def test_group_of_nan(device, each_kernel):
    """NaN counts as -inf in a group's score."""
    logits, bias = make_inputs(4, 256, device)
    logits[0, 1:32] = float("nan")  # the first group has one number left
    logits[1, :32] = float("nan")  # the first group has none
    logits[2, :128] = float("nan")  # four groups have none, and four are topk_group
    logits[3, :160] = float("nan")  # five groups have none, so one of them is topk_group
    check(logits, bias, 8, num_expert_group=8, topk_group=4)


@pytest.mark.parametrize("groups", [8, 64])
def test_nan_ranks_below_minus_infinity_in_groups_of_one(groups, device):
    bias = torch.full((groups,), -float("inf"), device=device)
    bias[: groups // 2] = float("nan")
    check(torch.zeros(2, groups, device=device), bias, 3, num_expert_group=groups, topk_group=groups // 2 + 1)
    ids = route(torch.zeros(1, groups, device=device), bias, 2, num_expert_group=groups, topk_group=2)[1]
    assert ids.tolist() == [[groups // 2, groups // 2 + 1]]


def test_checker_accepts_no_tokens(device):
    check(*make_inputs(0, 256, device), 8, num_expert_group=8, topk_group=4)


@pytest.mark.parametrize("fill", [0.0, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("scoring", reference.SCORINGS)
def test_constant_rows(fill, scoring, device, each_kernel):
    logits = torch.full((2, 256), fill, device=device)
    weights, ids = route(logits, None, 8, num_expert_group=8, topk_group=4, scoring=scoring)
    assert weights.isfinite().all()
    assert ids.tolist() == [list(range(8))] * 2


@pytest.mark.parametrize("topk_group", [1, 2, 4])
def test_tied_groups(topk_group, device, each_kernel):
    """All groups have the same logits: lower groups are kept, and their experts are chosen in ascending order."""
    logits = make_inputs(5, 32, device)[0].repeat(1, 8)
    check(logits, None, 8, num_expert_group=8, topk_group=topk_group)


@pytest.mark.parametrize("bias", [None, -float("inf")])
@pytest.mark.parametrize("fill", [-200.0, float("nan"), -float("inf")])
def test_constant_rows_in_partly_filled_lanes(fill, bias, device):
    """Places of a lane that hold no expert rank below experts with the lowest scores."""
    for experts, groups, topk_group, topk in ODD_SHAPES:
        logits, biases = torch.full((1, experts), fill, device=device), None
        if bias is not None:
            biases = torch.full((experts,), bias, device=device)
        ids = route(logits, biases, topk, num_expert_group=groups, topk_group=topk_group)[1]
        assert ids.tolist() == [list(range(topk))]


def test_zero_sum_has_zero_weights(device):
    weights, ids = route(torch.full((1, 64), -200.0, device=device), torch.arange(64.0, device=device), 4)
    assert ids.tolist() == [[63, 62, 61, 60]] and (weights == 0).all()


# Bugs found in other implementations


def test_peer_bug_dangling_else(device):
    """SGLang's static templates for 256/16 and 128/8 were unreachable."""
    for experts, groups in ((256, 16), (128, 8)):
        lanes, values = one_token_per_warp.lane_layout(experts, groups)
        assert lanes * groups == 32 and values * lanes * groups == experts
        check(*make_inputs(3, experts, device), 8, num_expert_group=groups, topk_group=groups // 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_peer_bug_sentinel_in_16_bits(dtype, device, each_kernel):
    """FLT_MAX becomes +inf in 16 bits, so a topk_group group that begins with +inf was treated as dropped."""
    logits, bias = make_inputs(2, 256, device, dtype)
    bias = bias.to(dtype)
    bias[::32] = float("inf")
    check(logits, bias, 8, num_expert_group=8, topk_group=4)
    assert set(route(logits, bias, 8, num_expert_group=8, topk_group=8)[1][0].tolist()) == set(range(0, 256, 32))


@pytest.mark.parametrize("seed", range(4))
def test_peer_bug_unsynchronised_sum(seed, device, each_kernel):
    """The sum raced with the stores of other lanes; here the result does not depend on the thread order."""
    logits, bias = make_inputs(5, 256, device)
    with simulator.seed(0):
        first = route(logits, bias, 8, num_expert_group=8, topk_group=4)
    with simulator.seed(seed):
        again = route(logits, bias, 8, num_expert_group=8, topk_group=4)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 23])
def test_peer_bug_return_before_a_barrier(tokens, device, each_kernel):
    """With a partial block, no warp may exit before a barrier; the simulator reports it."""
    check(*make_inputs(tokens, 256, device), 8, num_expert_group=8, topk_group=4)


def test_peer_bug_renormalize_ignored(device):
    logits, bias = make_inputs(4, 256, device)
    options = dict(num_expert_group=8, topk_group=4)
    weights, ids = biased_grouped_topk(logits, bias, 8, renormalize=False, **options)
    torch.testing.assert_close(weights, logits.sigmoid().gather(1, ids.long()), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(weights.sum(1), torch.ones(4, device=device))


def test_peer_bug_duplicated_maximum(device, each_kernel):
    """Discarding all copies of a group's maximum made its second best too small."""
    logits = torch.zeros(1, 256, device=device)
    logits[0, 32:34] = 4.0  # a group score of 2 * sigmoid(4)
    logits[0, 64:66] = torch.tensor([5.0, 0.5], device=device)  # a lower group score
    assert route(logits, None, 2, num_expert_group=8, topk_group=1)[1].tolist() == [[32, 33]]


# Error messages: the argument, its value and what is allowed


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            dict(gating_output=torch.zeros(4)),
            ValueError,
            r"gating_output has shape \(4,\); it must be \[tokens, num_experts\]",
        ),
        (
            dict(gating_output=torch.zeros(4, 64).double()),
            TypeError,
            "gating_output is torch.float64; it must be torch.float32 or",
        ),
        (dict(gating_output=torch.zeros(4, 1025)), ValueError, "gating_output has 1025 experts; 1 to 1024 are allowed"),
        (dict(gating_output=torch.zeros(64, 4).T), ValueError, "gating_output has column stride 4; it must be 1"),
        (dict(correction_bias=torch.zeros(63)), ValueError, r"correction_bias has shape \(63,\) .*; it must be \[64\]"),
        (dict(correction_bias=torch.zeros(64).int()), TypeError, "correction_bias is torch.int32; it must be"),
        (
            dict(correction_bias=lambda device: torch.zeros(128, device=device)[::2]),
            ValueError,
            r"correction_bias has .* strides \(2,\); it must be \[64\] and contiguous",
        ),
        (dict(topk=0), ValueError, "topk is 0; 1 to 32 are allowed"),
        (dict(topk=33), ValueError, "topk is 33; 1 to 32 are allowed"),
        (dict(topk=2.0), TypeError, "topk is 2.0; it must be an int"),
        (dict(topk=True), TypeError, "topk is True; it must be an int"),
        (dict(topk=np.float32(2)), TypeError, r"topk is np.float32\(2.0\); it must be an int"),
        (dict(num_expert_group="1"), TypeError, "num_expert_group is '1'; it must be an int"),
        (dict(topk_group=None), TypeError, "topk_group is None; it must be an int"),
        (dict(num_fused_shared_experts=0.0), TypeError, "num_fused_shared_experts is 0.0; it must be an int"),
        (dict(renormalize="yes"), TypeError, "renormalize is 'yes'; it must be True or False"),
        (dict(renormalize=[1]), TypeError, r"renormalize is \[1\]; it must be True or False"),
        (
            dict(apply_routed_scaling_factor_on_output=None),
            TypeError,
            "apply_routed_scaling_factor_on_output is None; it must be True or False",
        ),
        (dict(scoring=["sigmoid"]), TypeError, r"scoring is \['sigmoid'\]; it must be one of sigmoid"),
        (dict(routed_scaling_factor="2"), TypeError, "routed_scaling_factor is '2'; it must be a number"),
        (dict(num_token_non_padded=1.0), TypeError, "num_token_non_padded is float; it must be an int"),
        (dict(num_token_non_padded=True), TypeError, "num_token_non_padded is True; it must be an int"),
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
            "topk is 4: 4 routed experts; the 1 groups that are kept have 2",
        ),
        (dict(scoring="relu"), ValueError, "scoring is 'relu'; it must be one of sigmoid, softmax, sqrtsoftplus"),
        (dict(routed_scaling_factor=0.0), ValueError, "routed_scaling_factor is 0.0; it must be finite and not zero"),
        (dict(routed_scaling_factor=-1e39), ValueError, "routed_scaling_factor is -1e.39; it must be .* in float32"),
        (dict(routed_scaling_factor=1e-39), ValueError, "as must its reciprocal, in float32"),
        (dict(routed_scaling_factor=float("nan")), ValueError, "routed_scaling_factor is nan"),
        (dict(routed_scaling_factor=torch.ones(2)), TypeError, r"routed_scaling_factor is tensor\(.*must be a number"),
        (dict(num_token_non_padded=-1), ValueError, "num_token_non_padded is -1; it must be 0 or more"),
        (
            dict(num_token_non_padded=torch.zeros(2)),
            TypeError,
            r"num_token_non_padded is torch.float32 \(2,\); it must be an int, or a tensor of one",
        ),
        (
            dict(out=(torch.zeros(4, 3), torch.zeros(4, 4).int())),
            ValueError,
            "out's topk_weights is .* it must be contiguous",
        ),
        (
            dict(out=(torch.zeros(4, 4), torch.zeros(4, 4).long())),
            ValueError,
            "out's topk_ids is .* it must be contiguous",
        ),
    ],
)
def test_invalid_arguments(change, error, message, device):
    arguments = dict(gating_output=torch.zeros(4, 64), correction_bias=torch.zeros(64), topk=4)
    arguments.update(change)

    def on_device(value):
        if isinstance(value, tuple):
            return tuple(map(on_device, value))
        if callable(value):
            return value(device)
        return value.to(device) if isinstance(value, torch.Tensor) else value

    with pytest.raises(error, match=message):
        biased_grouped_topk(**{name: on_device(value) for name, value in arguments.items()})


def test_numpy_numbers(device):
    """They find the plan of Python's numbers; no scaling factor is one of 1, as in SGLang."""
    logits, bias = make_inputs(5, 64, device)
    options = dict(num_expert_group=8, topk_group=4, num_fused_shared_experts=1, num_token_non_padded=3)
    expected = route(logits, bias, 5, routed_scaling_factor=1.0, **options)
    plans = len(api._plans)
    numbers = {name: np.int64(value) for name, value in options.items()}
    for scale, flag in ((np.float64(1), np.bool_(True)), (None, 1), (1, True)):
        given = biased_grouped_topk(logits, bias, np.uint8(5), flag, routed_scaling_factor=scale, **numbers)
        assert all(map(torch.equal, given, expected))
    assert len(api._plans) == plans


@pytest.mark.gpu
def test_wrong_device():
    with pytest.raises(ValueError, match="gating_output is on cpu; it must be on a CUDA GPU"):
        biased_grouped_topk(torch.empty(4, 64), None, 4)


# The checker must reject wrong outputs and wrong kernels.


def scale_weights(weights, ids):
    weights[2] *= 1.01


def reverse_columns(weights, ids):
    weights[1], ids[1] = weights[1].flip(0), ids[1].flip(0)


CORRUPTIONS = {
    "id off by one": lambda weights, ids: ids[1, 3].copy_((ids[1, 3] + 1) % 256),
    "repeated id": lambda weights, ids: ids[2, 0].copy_(ids[2, 1]),
    "id out of range": lambda weights, ids: ids[0, 7].fill_(256),
    "unwritten id": lambda weights, ids: ids[3, 2].fill_(-7),
    "unwritten weight": lambda weights, ids: weights[3, 2].fill_(float("nan")),
    "wrong order": reverse_columns,
    "not normalised": scale_weights,
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_checker_rejects_wrong_outputs(case, device):
    logits, bias = make_inputs(5, 256, device)
    options = dict(num_expert_group=8, topk_group=4)
    weights, ids = route(logits, bias, 8, **options)
    assert mismatch(weights, ids, logits, bias, 8, **options) is None
    CORRUPTIONS[case](weights, ids)
    assert mismatch(weights, ids, logits, bias, 8, **options)


WRONG = {  # name: (module, source text, its replacement)
    "the tie goes to the higher group": (
        one_token_per_warp,
        "rival_key == group_key and rival_group < group",
        "rival_key == group_key and rival_group > group",
    ),
    "one group too many is kept": (
        one_token_per_warp,
        "lane, group, lane_in_group) < topk_group",
        "lane, group, lane_in_group) <= topk_group",
    ),
    "several lanes win a pick": (
        one_token_per_warp,
        "is_ambiguous | (uint32(ballot & uint32(ballot - uint32(1))) != uint32(0))",
        "False",
    ),
    "equal keys of a lane are not noticed": (one_token_per_warp, "(wins & (sorted_keys[1] == best))", "False"),
    "what is wrong is not stored again": (one_token_per_warp, "            if is_wrong:\n", "            if False:\n"),
    "the weight is that of the next expert": (
        one_token_per_warp,
        "held_scores[j] if place == j",
        "held_scores[j] if place == j + 1",
    ),
    "expert ids are one too high": (
        one_token_per_warp,
        "holder_lane * experts_per_lane + place",
        "holder_lane * experts_per_lane + place + 1",
    ),
    "the last column is not written": (one_token_per_warp, "if lane < topk:", "if lane < topk - 1:"),
    "the bias is forgotten": (one_token_per_warp, "scores[j] + lane_bias[j] if has_bias else scores[j]", "scores[j]"),
    "repeats are ignored": (one_token_per_warp, "if repeats != 0:", "if repeats == 12345:"),
    "no barrier before the redistribution": (
        four_tokens_per_warp,
        "& lower_group_lanes))] = group\n            cuda.syncwarp()",
        "& lower_group_lanes))] = group",
    ),
    "tied groups are resolved wrongly": (four_tokens_per_warp, "group_key - tie_break", "group_key"),
}
WRONG_LOOPS = {  # of the kernel whose warps route several tokens, one after another
    "the next row is not loaded": (one_token_per_warp, "if next_token < num_unpadded:", "if next_token < 0:"),
    "the same row is loaded again": (one_token_per_warp, "int64(next_token) * row_stride", "int64(token) * row_stride"),
    "the stride is too large": (
        one_token_per_warp,
        "token_stride = int32(cuda.gridDim.x *",
        "token_stride = int32(2 * cuda.gridDim.x *",
    ),
    "the bias is overwritten": (
        one_token_per_warp,
        "token = next_token",
        "lane_bias[0], token = scores[0], next_token",
    ),
}


RACES = {"no barrier before the redistribution"}  # lanes of a GPU mostly run in lockstep, which hides races


def use_wrong_kernel(module, right, wrong, monkeypatch):
    names = ("make_kernel", "make_loop_kernel") if module is one_token_per_warp else ("make_4tokens_kernel",)
    for name in names:
        monkeypatch.setattr(module, name, changed(module, right, wrong)[name])
    force_kernel(module is four_tokens_per_warp, monkeypatch)
    monkeypatch.setattr(api, "_plans", {})


def is_rejected(logits, bias):
    """Return whether the simulator or the checker finds an error in one of ten thread orders."""
    for seed in range(10):
        try:
            with simulator.seed(seed):
                weights, ids = route(logits, bias, 8, num_expert_group=8, topk_group=4)
        except simulator.SimulatorError:
            return True
        if mismatch(weights, ids, logits, bias, 8, num_expert_group=8, topk_group=4):
            return True
    return False


@pytest.mark.parametrize("case", [case for case in WRONG if simulator.ENABLED or case not in RACES])
def test_checker_rejects_wrong_kernels(case, monkeypatch, device):
    """Change one thing in the kernel: the checker must reject one of ten thread orders."""
    use_wrong_kernel(*WRONG[case], monkeypatch)
    logits, bias = make_inputs(8, 256, device)
    logits[4:] = (2 * logits[4:]).round()  # ties that the bias keeps
    logits[3, 40:42] = 6  # the best two, of one lane
    logits[6:, :] = logits[6:, :32].repeat(1, 8)  # equal groups
    logits[7, 224:] += 1  # the last group differs
    bias[:] = bias.round()
    bias[:] = torch.where(torch.arange(256, device=device) % 32 < 16, bias[:32].repeat(8), torch.zeros_like(bias))
    assert is_rejected(logits, bias), f"the checker accepted a wrong kernel: {case}"


@pytest.mark.parametrize("case", WRONG_LOOPS)
def test_checker_rejects_wrong_loops(case, monkeypatch, device):
    use_wrong_kernel(*WRONG_LOOPS[case], monkeypatch)
    monkeypatch.setattr(api, "MANY_TOKENS", 1)
    monkeypatch.setattr(four_tokens_per_warp, "supports", lambda *shape: False)
    assert is_rejected(*make_inputs(41 if simulator.ENABLED else 20000, 256, device))


# Kernel factories refuse what they do not support.

V3 = one_token_per_warp.GateConfig(256, 8, 4, 8)


@pytest.mark.parametrize(
    "make, config, message",
    [
        (
            one_token_per_warp.make_kernel,
            V3._replace(num_experts=960, num_expert_group=6),
            "960 experts, 6 groups.* 32 experts per lane",
        ),
        (one_token_per_warp.make_kernel, V3._replace(num_experts=1024, num_expert_group=64), "1024 experts, 64 groups"),
        (one_token_per_warp.make_kernel, V3._replace(num_expert_group=7), "256 experts, 7 groups, .* must divide"),
        (one_token_per_warp.make_kernel, V3._replace(topk_group=9), "8 groups, 9 kept"),
        (one_token_per_warp.make_kernel, V3._replace(topk=33), "top-33 .* at most 32"),
        (one_token_per_warp.make_kernel, V3._replace(num_experts=96), r"load_bytes is 16; it must be one of \[4\]"),
        (one_token_per_warp.make_kernel, V3._replace(num_experts=96, load_bytes=4), "bias_load_bytes is 16"),
        (
            four_tokens_per_warp.make_4tokens_kernel,
            one_token_per_warp.GateConfig(128, 4, 2, 6),
            "128 experts, 4 groups, .* 8 groups",
        ),
        (four_tokens_per_warp.make_4tokens_kernel, V3._replace(topk=9), "top-9 .* at most 8 routed"),
        (
            four_tokens_per_warp.make_4tokens_kernel,
            one_token_per_warp.GateConfig(1024, 8, 1, 8),
            "1024 experts",
        ),  # 66 KB of keys
        (four_tokens_per_warp.make_4tokens_kernel, V3._replace(num_expert_group=0), "0 groups"),
    ],
)
def test_factories_refuse_shapes(make, config, message):
    with pytest.raises(ValueError, match=message):
        make(config)


def test_generic_factory_refuses_scorings_and_dtypes():
    with pytest.raises(ValueError, match="scoring is 'relu'; it must be one of"):
        generic.make_generic_kernel("relu")
    with pytest.raises(ValueError, match="dtype is 'float64'; it must be one of"):
        generic.make_generic_kernel(dtype="float64")


# On a GPU: large inputs, graphs, streams


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + ODD_SHAPES, ids=str)
def test_all_token_counts(shape, dtype):
    experts, groups, topk_group, topk = shape
    for tokens in (*range(10), 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536):
        logits, bias = make_inputs(tokens, experts, "cuda", dtype, seed=tokens)
        for shared, flag in itertools.product((0, 1, 2), (False, True)):
            if tokens > 4096 and shared != 1 or topk + shared > 32:
                continue
            options = dict(num_expert_group=groups, topk_group=topk_group, num_fused_shared_experts=shared)
            options |= dict(routed_scaling_factor=2.5, apply_routed_scaling_factor_on_output=flag)
            wrong = mismatch(*route(logits, bias, topk + shared, **options), logits, bias, topk + shared, **options)
            assert wrong is None, f"{tokens} tokens, {options}: {wrong}"


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 16384])
def test_graph_replays_on_changed_inputs(tokens):
    logits, bias = make_inputs(tokens, 256, "cuda")
    options = dict(num_expert_group=8, topk_group=4)
    out = route(logits, bias, 8, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        biased_grouped_topk(logits, bias, 8, out=out, **options)
    for seed in range(3):
        logits.copy_(make_inputs(tokens, 256, "cuda", seed=seed + 1)[0])
        out[0].fill_(float("nan"))
        out[1].fill_(-7)
        graph.replay()
        assert mismatch(*out, logits, bias, 8, **options) is None


@pytest.mark.gpu
def test_runs_on_the_current_stream():
    logits, bias = make_inputs(4096, 256, "cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        later = logits.clone().mul_(-1)
        weights, ids = biased_grouped_topk(later, bias, 8, num_expert_group=8, topk_group=4)
    stream.synchronize()
    assert mismatch(weights, ids, -logits, bias, 8, num_expert_group=8, topk_group=4) is None


@pytest.mark.gpu
def test_deterministic_beside_other_work():
    logits, bias = make_inputs(16384, 256, "cuda")
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
