"""Test fused_experts with each format of weights and activation, and the modules with them, against the reference."""

import importlib

import numpy as np
import pytest
import torch
from helpers.wrong_kernels import is_rejected

from moe_numba import simulator
from moe_numba.grouped_gemm.call.checks import has_wgmma
from moe_numba.grouped_gemm.reference import FP8, mismatch
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4, quantise_mxfp4
from moe_numba.moe_layer import (
    Experts,
    ExpertsWorkspace,
    MoELayer,
    fused_experts,
    launches,
    pack_mxfp4_experts,
    reference,
    reference_mxfp4,
)
from moe_numba.moe_layer import workspace as layer_workspace
from moe_numba.moe_layer.weights import FORMATS, scaling_of

api = importlib.import_module("moe_numba.moe_layer.fused_experts")  # the package exports the function

SIMULATED = pytest.mark.skipif(not simulator.ENABLED, reason="replaces a function of the layer in the simulator")
GPT_OSS = dict(activation="swigluoai", limit=1.0)  # small enough that some of gate and up are limited
# Format of the weights, whether there are biases, other options.
CASES = {
    "gpt-oss": ("bf16", True, GPT_OSS),
    "gpt-oss, transposed weights": ("transposed", True, GPT_OSS | dict(alpha=1.0)),
    "silu with a limit": ("bf16", False, dict(limit=1.0)),
    "FP8, a scale per expert": ("fp8_tensor", False, {}),
    "FP8, given scales": ("fp8_tensor", False, dict(a1_scale=0.004, a2_scale=0.003)),
    "FP8, given scales, swigluoai": (
        "fp8_tensor",
        False,
        dict(a1_scale=0.004, a2_scale=0.003, activation="swigluoai", limit=1.0),
    ),
    "FP8, a given scale of the activations": ("fp8_tensor", False, dict(a2_scale=0.003)),
    "MXFP4": ("mxfp4", False, {}),
    "MXFP4, gpt-oss": ("mxfp4", True, GPT_OSS),
}
each_case = pytest.mark.parametrize("case", CASES)


def make_inputs(case, device, tokens=5, topk=2, experts=3, hidden=64, intermediate=64, seed=0):
    """Arguments of a call. Some ids are -1 or too large, and experts may be repeated within a token."""
    format_, has_bias, options = CASES[case]
    random = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=random)
    w13, w2 = draw(experts, 2 * intermediate, hidden) / hidden**0.5, draw(experts, hidden, intermediate) / 8
    given = {name: torch.tensor([v]) if name.endswith("scale") else v for name, v in options.items()}
    if format_ == "bf16":
        given |= dict(w13=w13.bfloat16(), w2=w2.bfloat16())
    elif format_ == "transposed":
        given |= dict(w13=w13.bfloat16().mT.contiguous().mT, w2=w2.bfloat16().mT.contiguous().mT)
    elif format_ == "fp8_tensor":
        for name, weight in (("w13", w13), ("w2", w2)):
            scale = weight.abs().amax((1, 2)) / 448
            given |= {name: (weight / scale[:, None, None]).to(FP8), f"{name}_scale": scale}
    else:
        gate_up = "interleaved" if "activation" in options else "stacked"
        given["w13"], given["w2"] = pack_mxfp4_experts(*quantise_mxfp4(w13), *quantise_mxfp4(w2), gate_up)
    if has_bias:
        given |= dict(w13_bias=draw(experts, 2 * intermediate).bfloat16(), w2_bias=draw(experts, hidden))
    given |= dict(x=draw(tokens, hidden).bfloat16(), shared=draw(tokens, hidden).bfloat16())
    given["topk_ids"] = torch.randint(-1, experts + 1, (tokens, topk), generator=random, dtype=torch.int32)
    given["topk_weights"] = torch.rand(tokens, topk, generator=random)
    return {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in given.items()}


def wrong(given, arguments):
    """Return None, or how a result differs from the reference; see also `test_moe_layer.wrong`.

    A GPU's tensor cores add FP8 products with about 13 significant bits. With sums that are wrong by 1e-3 the reference
    itself changes by 1.3e-2 to 1.5e-2 in the norm, and single rows by 3e-2 to 4e-2: the largest activation of a row,
    rounded to another bfloat16, changes the scale of the row, and so the rounding of all others.
    """
    rounds_sums = arguments["w13"].dtype == FP8 and not simulator.ENABLED
    return mismatch(given, reference.fused_experts(**arguments), 2.5e-2 if rounds_sums else 4e-3)


def workspace_of(given):
    return ExpertsWorkspace(*given["topk_ids"].shape, given["w13"], given["w2"], scaling_of(given.get("w13_scale")))


def test_fast_accumulation(device):
    """In the simulator, whose tensor cores add exactly, it changes roundings only."""
    for case in ("FP8, given scales", "FP8, a scale per expert"):
        given = make_inputs(case, device) | dict(use_fast_accum=True)
        assert wrong(fused_experts(**given), given) is None


@each_case
def test_equals_reference(case, device, monkeypatch):
    """Also bit by bit: in a workspace full of NaN, with tokens in another order, and in the order of the experts."""
    given = make_inputs(case, device)
    result, workspace = fused_experts(**given), workspace_of(given)
    assert wrong(result, given) is None
    order = torch.tensor([4, 0, 3, 1, 2], device=device)
    moved = given | {name: given[name][order] for name in ("x", "topk_weights", "topk_ids", "shared")}
    workspace.buffer.fill_(0xFF)
    out = torch.full_like(result, float("nan"))
    assert fused_experts(**moved, out=out, workspace=workspace) is out and torch.equal(out, result[order])
    monkeypatch.setattr(layer_workspace, "MAX_GATHERED_AVERAGE", dict.fromkeys(FORMATS, 2))
    monkeypatch.setattr(api, "_plans", {})
    assert torch.equal(fused_experts(**given), result)


@pytest.mark.parametrize("tokens, fuses", [(1, False), (2, True)])
def test_given_scales_with_few_assignments(tokens, fuses, device, monkeypatch):
    """With one or two, a launch of its own computes the activation; the result is of the same accuracy."""
    given, launched = make_inputs("FP8, given scales", device, tokens), []
    make = api.launches_of
    monkeypatch.setattr(api, "launches_of", lambda *args: launched.append(make(*args)) or launched[-1])
    assert wrong(fused_experts(**given), given) is None
    assert ("activation" not in launched[0]) == (fuses and has_wgmma(given["w13"].device))


def call_with(change):
    """Return a maker of functions that call another one with changed options."""
    return lambda function: lambda *args, **options: function(*args, **options | change(options))


def if_fused(is_fused, change):
    """Return a change of the options of grouped GEMMs that compute the activation, or else of the others."""
    return lambda options: change(options) if options.get("silu_and_mul", False) == is_fused else {}


WRONG = {  # case, function, change
    "no activation's limit": ("gpt-oss", "group_gemm", call_with(if_fused(True, lambda _: dict(limit=100.0)))),
    "another alpha": ("gpt-oss, transposed weights", "silu_and_mul", call_with(lambda _: dict(alpha=1.2))),
    "biases of the next expert": (
        "gpt-oss",
        "group_gemm",
        call_with(if_fused(False, lambda o: dict(bias=o["bias"].roll(1, 0)))),
    ),
    "biases left out": ("MXFP4, gpt-oss", "group_gemm_w4", call_with(if_fused(True, lambda _: dict(bias=None)))),
    "gate and up stacked": (
        "MXFP4, gpt-oss",
        "group_gemm_w4",
        call_with(if_fused(True, lambda _: dict(activation="silu"))),
    ),
    "a row too few is activated": (
        "silu with a limit",
        "silu_and_mul",
        # The output is filled first: its memory may still hold the rows of the call before.
        call_with(lambda o: dict(num_valid_rows=o["num_valid_rows"] - 1, out=o["out"].fill_(7))),
    ),
    "scales of other rows": (
        "FP8, a scale per expert",
        "group_gemm",
        call_with(lambda o: dict(row_weights=o["row_weights"].roll(1))),
    ),
    "another scale of the activations": (
        "FP8, given scales",
        "group_gemm",
        call_with(if_fused(True, lambda o: dict(out_scale=o["out_scale"] * 1.1))),
    ),
    "own scales instead of the given one": (
        "FP8, a given scale of the activations",
        "silu_and_mul_quant_fp8",
        lambda function: lambda x, scale, **options: function(x, None, **options),
    ),
}


@SIMULATED
@pytest.mark.parametrize("name", WRONG)
def test_wrong_layers_are_rejected(name, device, monkeypatch):
    case, function, change = WRONG[name]
    given = make_inputs(case, device)
    monkeypatch.setattr(launches, function, change(getattr(launches, function)))
    assert is_rejected(lambda seed: wrong(fused_experts(**given), given), seeds=1)


def test_unpacked_weights_are_those_before_packing():
    weights = torch.randn(2, 2, 128, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([[[1.0]], [[30]]])
    (blocks, scales), (down, down_scales) = quantise_mxfp4(weights[0]), quantise_mxfp4(weights[1, :, :64])
    scales[0, 3, 1], scales[1, 5, 0] = 255, 20  # NaN, and so small that it becomes 0
    wanted = dequantise_mxfp4(blocks, scales).float()
    wanted[1, 5, :32] = 0
    for gate_up in ("interleaved", "stacked"):
        w13, w2 = pack_mxfp4_experts(blocks, scales, down, down_scales, gate_up)
        for expert in range(2):
            unpacked = reference_mxfp4.unpack_gate_up(w13[expert], gate_up == "interleaved")
            assert torch.equal(unpacked.nan_to_num(7), wanted[expert].nan_to_num(7))
            assert torch.equal(reference_mxfp4.unpack(w2[expert]), dequantise_mxfp4(down, down_scales)[expert].float())


def test_mxfp4_is_that_of_gpt_oss(device):
    """Against a loop over the experts in float64 with the weights of the checkpoint, as they were before packing."""
    given = make_inputs("MXFP4, gpt-oss", device)
    random = torch.Generator().manual_seed(0)
    w13, w2 = (torch.randn(3, *size, generator=random) / 8 for size in ((128, 64), (64, 64)))
    w13, w2 = (dequantise_mxfp4(*quantise_mxfp4(weight)).to(device) for weight in (w13, w2))
    wanted = given["shared"].double()
    for token, (ids, weights) in enumerate(zip(given["topk_ids"], given["topk_weights"], strict=True)):
        for expert, weight in zip(ids.tolist(), weights.tolist(), strict=True):
            if 0 <= expert < 3:
                gate_up = w13[expert] @ given["x"][token].double() + given["w13_bias"][expert].double()
                gate, up = gate_up[::2].clamp(max=1.0), gate_up[1::2].clamp(-1.0, 1.0)
                row = w2[expert] @ ((up + 1) * gate * torch.sigmoid(1.702 * gate)) + given["w2_bias"][expert].double()
                wanted[token] += weight * row
    error = reference.fused_experts(**given) - wanted
    assert float(error.norm() / wanted.norm()) < 0.004


# Error messages: change of the arguments of a case, and the message

PACKED = torch.zeros(3, 2, 1, 136, 16, dtype=torch.uint8)
REFUSALS = [
    (
        "MXFP4",
        dict(w13=PACKED[..., :-1]),
        "w13 has shape .*; in torch.uint8 it must be what pack_mxfp4_experts returns",
    ),
    ("MXFP4", dict(w13=PACKED[:, :1].clone()), "w13 has shape .*intermediate must be multiples of 64"),
    ("MXFP4", dict(w2=PACKED.flatten(3)), r"w2 has shape \(3, 2, 1, 2176\).*; it must be \[3, 1, 1, 2176\]"),
    (
        "MXFP4",
        dict(w2=PACKED[:, :1]),
        r"w2 has shape \(3, 1, 1, 136, 16\): .* it must be packed without gate_up: \[..., 2",
    ),
    (
        "MXFP4",
        dict(w13=PACKED.flatten(3)),
        r"w13 has shape \(3, 2, 1, 2176\): .* packed it without gate_up; it must be ",
    ),
    ("MXFP4", dict(limit=7.0), "limit is 7.0; with MXFP4 weights and 'silu' it must be None"),
    ("MXFP4", dict(w13_scale=torch.ones(3)), "w13_scale is given, but the weights are torch.uint8; scales are for FP8"),
    ("gpt-oss", dict(w13_bias=torch.zeros(3, 64)), r"w13_bias has shape \(3, 64\).*; it must be \[3, 128\]"),
    (
        "gpt-oss",
        dict(w2_bias=torch.zeros(3, 64).double()),
        "w2_bias is torch.float64; it must be torch.bfloat16 or torch",
    ),
    ("gpt-oss", dict(activation="gelu"), "activation is 'gelu'; it must be one of silu, swigluoai"),
    ("gpt-oss", dict(limit=-1.0), "limit is -1.0; it must be positive and finite"),
    (
        "gpt-oss",
        dict(a1_scale=torch.ones(1)),
        "a1_scale is given; it is allowed only with FP8 weights that have a scale",
    ),
    ("FP8, given scales", dict(use_fast_accum=2), "use_fast_accum is 2; it must be"),
    ("gpt-oss", dict(use_fast_accum=True), "use_fast_accum is True; it is allowed only with FP8 weights that have"),
    ("FP8, given scales", dict(a2_scale=torch.ones(3)), r"a2_scale has shape \(3,\); it must have one element"),
    ("FP8, given scales", dict(w2_scale=torch.ones(3, 1, 1)), r"w2_scale has shape \(3, 1, 1\); it must be \(3,\)"),
    (
        "FP8, given scales",
        dict(w2_bias=torch.zeros(3, 64)),
        "w13_bias or w2_bias is given; with FP8 weights both must be",
    ),
]


@pytest.mark.parametrize("case, change, message", REFUSALS)
def test_invalid_arguments(case, change, message, device, monkeypatch):
    monkeypatch.setattr(api, "launches_of", lambda *_: pytest.fail("a kernel was launched"))
    moved = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in change.items()}
    with pytest.raises((TypeError, ValueError), match=message):
        fused_experts(**make_inputs(case, device) | moved)


CHECKPOINT = {  # the tensors of a layer of gpt-oss
    "gate_up_proj_blocks": (3, 128, 2, 16),
    "gate_up_proj_scales": (3, 128, 2),
    "down_proj_blocks": (3, 64, 2, 16),
    "down_proj_scales": (3, 64, 2),
}


def make_checkpoint():
    return {name: torch.randint(0, 150, size, dtype=torch.uint8) for name, size in CHECKPOINT.items()}


def test_packs_arrays_of_other_libraries():
    tensors = make_checkpoint()
    packed = pack_mxfp4_experts(**{name: tensor.numpy() for name, tensor in tensors.items()})
    assert all(isinstance(array, np.ndarray) for array in packed)
    assert all(map(torch.equal, map(torch.from_numpy, packed), pack_mxfp4_experts(**tensors)))
    mixed = pack_mxfp4_experts(**tensors | dict(down_proj_scales=tensors["down_proj_scales"].numpy()))
    assert torch.equal(mixed[1], torch.from_numpy(packed[1]))


@pytest.mark.parametrize("name", CHECKPOINT)
def test_packs_no_lists(name):
    with pytest.raises(TypeError, match=f"{name} is list; it must be a tensor, or an array"):
        pack_mxfp4_experts(**make_checkpoint() | {name: [1]})


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(gate_up="columns"), "gate_up is 'columns'; it must be one of interleaved, stacked"),
        (dict(gate_up_proj_scales=torch.zeros(3, 64, 2).byte()), r"gate_up_proj_scales .* be \[3, 128, 2\], as"),
        (dict(down_proj_scales=torch.zeros(3, 64, 4).byte()), r"down_proj_scales has shape .* must be \[3, 64, 2\]"),
    ],
)
def test_invalid_checkpoints(change, message):
    with pytest.raises(ValueError, match=message):
        pack_mxfp4_experts(**make_checkpoint() | change)


# Modules


def make_experts(case, device, **options):
    """Return a module with the weights of a case, and arguments of a call."""
    given = make_inputs(case, device, tokens=3)
    format_, has_bias, more = CASES[case]
    more = {name: value for name, value in more.items() if not name.endswith("scale")}
    scaling = "tensor" if format_ == "fp8_tensor" else "block"
    sizes = 3, 64, 64, given["w13"].dtype, device
    experts = Experts(*sizes, scaling=scaling, has_bias=has_bias, **more, **options)
    experts.load_state_dict({name: given[name] for name in experts.state_dict()})
    experts.a1_scale, experts.a2_scale = given.get("a1_scale"), given.get("a2_scale")
    return experts, {name: given[name] for name in ("x", "topk_weights", "topk_ids", "shared")}


STAGES = [
    ("gpt-oss", {"gate_up"}),
    ("gpt-oss", {"activation", "down"}),
    *(("FP8, given scales", {stage}) for stage in ("permute", "quantise", "gate_up", "activation", "down")),
    ("FP8, a scale per expert", {"quantise", "activation"}),
    ("FP8, a given scale of the activations", {"down"}),
    ("MXFP4, gpt-oss", {"gate_up"}),
    ("MXFP4, gpt-oss", {"permute", "down", "sum"}),
]


@pytest.mark.parametrize("case, stages", STAGES)
def test_stages_can_be_their_references(case, stages, device, monkeypatch):
    """Also with tokens in the order of the experts, bit by bit."""
    experts, given = make_experts(case, device, reference=stages)
    wanted = reference.fused_experts(**given, **experts.tensors, **experts.activation.options)
    result = experts(**given)
    assert mismatch(result, wanted, 1e-2) is None
    monkeypatch.setattr(layer_workspace, "MAX_GATHERED_AVERAGE", dict.fromkeys(FORMATS, 0))
    assert torch.equal(experts(**given), result)


def test_a_layer_of_gpt_oss(device):
    """The router has a bias, and the softmax is over the chosen experts."""
    experts, given = make_experts("MXFP4, gpt-oss", device)
    options = dict(dtype=torch.uint8, has_bias=True, has_router_bias=True, scoring="softmax", **GPT_OSS)
    layer = MoELayer(3, 64, 64, 2, device=device, **options)
    random = torch.Generator().manual_seed(1)
    state = {f"experts.{name}": tensor for name, tensor in experts.state_dict().items()}
    state |= dict(router_weight=torch.randn(3, 64, generator=random), router_bias=torch.tensor([0.0, 3, -3]))
    layer.load_state_dict(state)
    assert set(layer.state_dict()) == set(state)
    logits = given["x"].float() @ layer.router_weight.float().T + layer.router_bias.float()
    values, ids = logits.topk(2)
    options = experts.tensors | experts.activation.options
    wanted = reference.fused_experts(given["x"], topk_weights=values.softmax(1), topk_ids=ids, **options)
    result = layer(given["x"])
    assert mismatch(result, wanted, 4e-3) is None
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(given["x"]), result)
    assert torch.equal(layer(given["x"], workspace=layer.experts.workspace(4, 2)), result)
    layer.router_bias.zero_()
    assert mismatch(layer(given["x"]), wanted, 4e-3) is not None


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(dtype=torch.uint8, intermediate=96), "hidden is 64 and intermediate 96; with MXFP4 weights they must be"),
        (dict(dtype=FP8, scaling="row"), "scaling is 'row'; it must be one of block, tensor"),
        (
            dict(dtype=FP8, scaling="tensor", has_bias=True),
            "w13_bias or w2_bias is given; with FP8 weights both must be",
        ),
        (
            dict(dtype=FP8, intermediate=128, limit=7.0),
            "activation is 'silu', limit 7.0; with a scale per 128 x 128 block",
        ),
        (
            dict(reference={"quantise"}),
            "reference has 'quantise'; the stages with bfloat16 weights are gate, permute, gat",
        ),
        (
            dict(dtype=torch.uint8, reference={"activation"}),
            "reference has 'activation'; the stages with MXFP4 weights",
        ),
    ],
)
def test_invalid_modules(options, message):
    with pytest.raises(ValueError, match=message):
        Experts(**dict(num_experts=3, hidden=64, intermediate=64) | options)


# On a GPU: large sizes, graphs


def classes_of_bits(compute, given, sizes):
    """Compute the first tokens of a batch, as many as each size says; return how many results of a token differ."""
    per_token = [name for name in ("x", "topk_weights", "topk_ids", "shared") if name in given]
    results = [compute(given | {name: given[name][:size] for name in per_token}) for size in sizes]
    return len({tuple(result[0].tolist()) for result in results})


@pytest.mark.parametrize("case", ["gpt-oss", "FP8, a scale per expert", "FP8, given scales", "MXFP4"])
def test_batch_invariant(case, device):
    """A token has the same bits in batches of 12 sizes; without the option one token has others, by other kernels."""
    sizes = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 33] if simulator.ENABLED else [2**i for i in range(11)] + [4096]
    given = make_inputs(case, device, tokens=sizes[-1], experts=8, hidden=128, intermediate=128, seed=1)
    given["topk_ids"][0] = torch.tensor([1, 6])
    assert classes_of_bits(lambda g: fused_experts(**g, batch_invariant=True), given, sizes) == 1
    if not case.startswith("FP8"):
        assert classes_of_bits(lambda g: fused_experts(**g), given, sizes[:3]) == 2


def test_a_batch_invariant_layer(device):
    """Logits, gate and experts; torch's GEMM need not be batch-invariant, ours is."""
    sizes = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 24, 33] if simulator.ENABLED else [2**i for i in range(11)] + [4096]
    random = torch.Generator().manual_seed(0)
    options = dict(device=device, batch_invariant=True, has_router_bias=True, has_correction_bias=True)
    layer = MoELayer(20, 128, 64, 3, **options)  # 20 rows of weight are padded for the grouped GEMM
    for tensor in (*layer.parameters(), *layer.buffers()):
        tensor.copy_(torch.randn(tensor.shape, generator=random).to(tensor) / 8)
    x = torch.randn(sizes[-1], 128, generator=random).bfloat16().to(device)
    assert classes_of_bits(lambda g: layer(g["x"]), dict(x=x), sizes) == 1
    expected = MoELayer(20, 128, 64, 3, **options | dict(batch_invariant=False))
    expected.load_state_dict(layer.state_dict())
    assert mismatch(layer(x[:5]), expected(x[:5]), 4e-3) is None


@pytest.mark.gpu
@each_case
@pytest.mark.parametrize("tokens", [1, 64, 1500])
def test_large(case, tokens):
    """Bit-identical from run to run, and in a graph that is replayed with another routing."""
    sizes = dict(tokens=tokens, topk=4, experts=16, hidden=1024, intermediate=512)
    given = make_inputs(case, "cuda", **sizes)
    first = fused_experts(**given)
    assert wrong(first, given) is None
    for _ in range(10):
        assert torch.equal(fused_experts(**given), first)
    workspace, out, graph = workspace_of(given), torch.empty_like(first), torch.cuda.CUDAGraph()
    fused_experts(**given, out=out, workspace=workspace)
    with torch.cuda.graph(graph):
        fused_experts(**given, out=out, workspace=workspace)
    later = make_inputs(case, "cuda", **sizes, seed=1)
    for name in ("x", "topk_ids", "topk_weights", "shared"):
        given[name].copy_(later[name])
    out.fill_(float("nan"))
    graph.replay()
    assert wrong(out, given) is None and not torch.equal(out, first)
