"""Test fused_moe: the gate in front of the experts, against the references of both."""

import importlib
from functools import partial

import pytest
import torch
from helpers.placements import make_placement
from helpers.wrong_kernels import is_rejected

import moe_numba
from moe_numba import simulator
from moe_numba.gate.placement import TENSORS
from moe_numba.grouped_gemm.reference import mismatch, quantise_blocks
from moe_numba.moe_layer import ExpertsWorkspace, fused_moe, reference
from moe_numba.moe_layer.fused_experts import ExpertsPlan
from moe_numba.runtime.outputs import Outputs

gate_and_experts = importlib.import_module("moe_numba.moe_layer.fused_moe")  # the package exports the function

SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a function of the layer in the simulator")
DEEPSEEK = dict(num_expert_group=4, topk_group=2, routed_scaling_factor=2.5)
CASES = {
    "DeepSeek-V3": (5, 4, DEEPSEEK),
    "DeepSeek-V3, fused shared expert": (5, 5, DEEPSEEK | dict(num_fused_shared_experts=1)),
    "Mixtral": (5, 2, dict(scoring="softmax")),
    "OLMoE": (4, 3, dict(scoring="softmax", renormalize=False)),
    "top-1": (3, 1, dict(scoring="softmax", renormalize=False)),
    "padded": (5, 2, dict(num_token_non_padded=3)),
    "one token": (1, 4, DEEPSEEK),
    "masked": (5, 2, dict(is_padding=torch.tensor([True, False, False, True, False]), renormalize_epsilon=0.25)),
    "placed": (5, 5, DEEPSEEK | dict(num_fused_shared_experts=1, placement=make_placement(16))),
    "placed, one token": (1, 3, dict(scoring="softmax", placement=make_placement(16, how="random", seed=9))),
}


def make_inputs(tokens, topk, device, fp8=False, routed=16, hidden=128, intermediate=128, seed=0, **options):
    """Arguments of a call; DeepSeek-V3's router has a bias, those that use softmax have none."""
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random)
    x, shared, logits, bias = draw(tokens, hidden), draw(tokens, hidden), draw(tokens, routed), draw(routed) / 4
    if placed := options.get("placement"):
        tensors = {n: getattr(placed, n).to(device, copy=True) for n in TENSORS}
        options |= dict(placement=placed._replace(**tensors))
    experts = placed.num_physical_experts if placed else routed
    experts += options.get("num_fused_shared_experts", 0)
    w13 = draw(experts, 2 * intermediate, hidden) / hidden**0.5
    w2 = draw(experts, hidden, intermediate) / intermediate**0.5
    scales = {}
    if fp8:
        (w13, scales["w13_scale"]), (w2, scales["w2_scale"]) = quantise_blocks(w13), quantise_blocks(w2)
    else:
        w13, w2 = w13.bfloat16(), w2.bfloat16()
    bias = None if options.get("scoring") == "softmax" else bias
    given = dict(x=x.bfloat16(), router_logits=logits, correction_bias=bias, w13=w13, w2=w2, topk=topk)
    given |= scales | dict(shared=shared.bfloat16()) | options
    return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in given.items()}


def wrong(given, arguments):
    """Return None, or how a result differs from the reference; for the bounds see `test_moe_layer.wrong`."""
    rounds_sums = "w13_scale" in arguments and not simulator.ENABLED
    return mismatch(given, reference.fused_moe(**arguments), 1e-2 if rounds_sums else 4e-3)


def workspace_of(given, max_tokens=None):
    return ExpertsWorkspace(max_tokens or len(given["x"]), given["topk"], given["w13"], given["w2"])


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(case, fp8, device):
    tokens, topk, options = CASES[case]
    given = make_inputs(tokens, topk, device, fp8, **options)
    result = fused_moe(**given)
    assert wrong(result, given) is None
    out = torch.full_like(result, float("nan"))
    assert fused_moe(**given, out=out, workspace=workspace_of(given, tokens + 2)) is out
    assert torch.equal(out, result)


def test_reference_against_a_loop_over_tokens():
    """Route by hand: softmax, the two best experts, weights that sum to 1."""
    given = make_inputs(4, 2, "cpu", routed=4, scoring="softmax")
    wanted = given["shared"].double()
    for token, scores in enumerate(given["router_logits"].double().softmax(1)):
        weights, experts = scores.topk(2)
        for weight, expert in zip(weights / weights.sum(), experts, strict=True):
            gate, up = (given["w13"][expert].double() @ given["x"][token].double()).chunk(2)
            wanted[token] += weight * (given["w2"][expert].double() @ (torch.nn.functional.silu(gate) * up))
    error = reference.fused_moe(**given) - wanted
    assert float(error.norm() / wanted.norm()) < 0.004


def test_no_tokens(device):
    given = make_inputs(0, 2, device)
    assert fused_moe(**given).shape == (0, 128)


def test_padding_on_the_device_computes_no_expert(device):
    given = make_inputs(5, 2, device, num_token_non_padded=torch.tensor([3], dtype=torch.int32))
    result = fused_moe(**given)
    assert torch.equal(result[3:], given["shared"][3:]) and not torch.equal(result[:3], given["shared"][:3])


def test_placement(device):
    """Counters add up from call to call, seeds and tables may change, and physical experts are those of the weights."""
    given = make_inputs(5, 3, device, placement=make_placement(16, how="random"))
    placed = given["placement"]
    placed.load.zero_()
    for seed in (0, 1, 0):
        given["placement"] = placed._replace(seed=seed, physical_ids=placed.physical_ids.clone())
        assert wrong(fused_moe(**given), given) is None
    assert placed.load.sum() == 3 * 5 * 3
    for change, message in (
        (dict(num_physical_experts=24), "placement.num_physical_experts is 24; it must be 25, as w13 has 25 experts"),
        (dict(physical_ids=placed.physical_ids[:15]), "as router_logits has 16 columns"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_moe(**given | dict(placement=placed._replace(**change)))


def test_fused_shared_expert_has_weight_one(device):
    given = make_inputs(3, 3, device, num_fused_shared_experts=1, routed_scaling_factor=2.5)
    given["w2"][:-1] = 0  # only the shared expert, the last one, computes something
    alone = torch.full((3, 1), 16, dtype=torch.int32, device=device)
    weight = torch.ones(3, 1, device=device)
    expected = reference.fused_experts(given["x"], given["w13"], given["w2"], weight, alone, shared=given["shared"])
    assert mismatch(fused_moe(**given), expected, 4e-3) is None


def test_with_out_and_workspace_nothing_is_allocated(device, monkeypatch):
    given = make_inputs(5, 2, device)
    out, workspace = fused_moe(**given), workspace_of(given)
    fused_moe(**given, out=out, workspace=workspace)
    call = Outputs.__call__

    def refuse(self, given=None):
        assert given is not None, "a tensor was allocated"
        return call(self, given)

    monkeypatch.setattr(Outputs, "__call__", refuse)
    monkeypatch.setattr(ExpertsPlan, "new_memory", lambda self: refuse(None))
    fused_moe(**given, out=out, workspace=workspace)
    with pytest.raises(AssertionError, match="a tensor was allocated"):
        fused_moe(**given, out=out)


def test_prepared_call_with_another_routing(device):
    given = make_inputs(5, 2, device)
    with pytest.raises(ValueError, match="workspace is None; a prepared call needs one"):
        moe_numba.prepare(fused_moe, **given)
    prepared = moe_numba.prepare(fused_moe, **given, workspace=workspace_of(given))
    later = make_inputs(5, 2, device, seed=1)
    for name in ("x", "router_logits"):
        given[name].copy_(later[name])
    assert wrong(prepared(), given) is None


def gate_with(change):
    """Return the gate of the layer with other arguments or results."""
    gate = moe_numba.biased_grouped_topk
    return lambda logits, **options: change(partial(gate, logits), options)


def without_scaling(gate, options):
    return gate(**options | dict(apply_routed_scaling_factor_on_output=False))


def without_bias(gate, options):
    return gate(**options | dict(correction_bias=None))


def neighbours(gate, options):
    weights, ids = gate(**options)
    return weights, (ids + 1) % 16


def swapped_weights(gate, options):
    weights, ids = gate(**options)
    return weights.flip(1).contiguous(), ids


@SIMULATED
@pytest.mark.parametrize("change", [without_scaling, without_bias, neighbours, swapped_weights])
def test_wrong_gates_are_rejected(change, device, monkeypatch):
    given = make_inputs(6, 4, device, **DEEPSEEK)
    given["correction_bias"] *= 8
    assert wrong(fused_moe(**given), given) is None
    monkeypatch.setattr(gate_and_experts, "biased_grouped_topk", gate_with(change))
    assert is_rejected(lambda seed: wrong(fused_moe(**given), given), seeds=1)


REFUSALS = [
    (dict(router_logits=torch.zeros(5, 15)), ValueError, r"router_logits has shape \(5, 15\); it must be \[5, 16\]"),
    (dict(router_logits=torch.zeros(5, 16).int()), TypeError, "router_logits is torch.int32; it must be torch.float32"),
    (dict(router_logits=torch.zeros(16, 5).T), ValueError, "router_logits has strides .* columns must be contiguous"),
    (dict(correction_bias=torch.zeros(4)), ValueError, "correction_bias has shape"),
    (dict(topk=0), ValueError, "topk is 0; 1 to 32 are allowed"),
    (dict(topk=2.0), TypeError, "topk is 2.0; it must be an int"),
    (dict(num_fused_shared_experts=2), ValueError, "num_fused_shared_experts is 2; 0 to 1 are allowed"),
    (dict(num_fused_shared_experts=1), ValueError, r"router_logits has shape \(5, 16\); it must be \[5, 15\]"),
    (dict(num_expert_group=3), ValueError, "num_expert_group"),
    (dict(scoring="tanh"), ValueError, "scoring is 'tanh'; it must be one of sigmoid, softmax"),
    (dict(routed_scaling_factor=0.0), ValueError, "routed_scaling_factor is 0.0; it must be finite and not zero"),
    (dict(w13=torch.zeros(16, 256, 128)), TypeError, "w13 is torch.float32; it must be torch.bfloat16"),
    (dict(workspace=3), TypeError, "workspace is int; it must be an ExpertsWorkspace or None"),
    (dict(x=torch.zeros(5, 64).bfloat16()), ValueError, "x has 64 columns; it must have w13's hidden, 128"),
]


@pytest.mark.parametrize("change, error, message", REFUSALS)
def test_invalid_arguments(change, error, message, device):
    arguments = make_inputs(5, 2, device) | {k: v.to(device) if hasattr(v, "to") else v for k, v in change.items()}
    with pytest.raises(error, match=message):
        fused_moe(**arguments)


def test_a_workspace_that_is_too_small_is_refused_before_the_gate_runs(device, monkeypatch):
    given = make_inputs(5, 2, device)
    monkeypatch.setattr(gate_and_experts, "biased_grouped_topk", lambda *_: pytest.fail("the gate was launched"))
    with pytest.raises(ValueError, match="workspace is for up to 4 tokens with 2 experts each; the call has 5 tokens"):
        fused_moe(**given, workspace=workspace_of(given, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("tokens", [16, 2048])
def test_graph_replays_with_other_logits(tokens, fp8):
    shape = dict(routed=32, hidden=1024, intermediate=512, **DEEPSEEK)
    given = make_inputs(tokens, 8, "cuda", fp8, **shape)
    workspace, out = workspace_of(given, tokens + 5), torch.empty_like(given["x"])
    call = lambda: fused_moe(**given, out=out, workspace=workspace)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for seed in range(1, 4):
        later = make_inputs(tokens, 8, "cuda", fp8, **shape, seed=seed)
        for name in ("x", "router_logits", "shared"):
            given[name].copy_(later[name])
        out.fill_(float("nan"))
        graph.replay()
        assert wrong(out, given) is None
