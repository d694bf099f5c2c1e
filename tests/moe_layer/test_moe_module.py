"""Test the modules Experts and MoELayer: every stage by its kernel and by its reference, state_dict, compilation."""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from moe_numba.grouped_gemm.reference import FP8, mismatch, quantise_blocks
from moe_numba.moe_layer import Experts, ExpertsWorkspace, MoELayer, launches, reference, torch_stages
from moe_numba.moe_layer.router import router_logits

DEEPSEEK = dict(num_expert_group=4, topk_group=2, routed_scaling_factor=2.5, has_correction_bias=True)
BF16_STAGES = "gate", "permute", "gate_up", "activation", "down", "sum"
FP8_STAGES = "gate", "permute", "quantise", "gate_up", "down", "sum"
CASES = [(torch.bfloat16, s) for s in BF16_STAGES] + [(FP8, s) for s in FP8_STAGES]


def make_layer(device, dtype=torch.bfloat16, seed=0, **options):
    """A layer of 8 experts with random weights."""
    options = DEEPSEEK | options
    layer = MoELayer(8, 128, 128, 2, dtype=dtype, device=device, **options)
    random = torch.Generator().manual_seed(seed)
    state = {}
    for name, tensor in layer.state_dict().items():
        if not name.endswith("_scale"):
            state[name] = torch.randn(tensor.shape, generator=random) / max(tensor.shape[-1], 16) ** 0.5
    if dtype == FP8:
        for name in ("experts.w13", "experts.w2"):
            state[name], state[f"{name}_scale"] = quantise_blocks(state[name])
    layer.load_state_dict(state)
    return layer


def tokens_of(device, *shape):
    return torch.randn(*shape, 128, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)


def wanted(layer, x):
    """The layer by its reference."""
    logits = x.float() @ layer.router_weight.float().T
    shared = None if layer.shared_experts is None else layer.shared_experts(x)
    e = layer.experts
    weights = e.w13, e.w2, layer.topk, e.w13_scale, e.w2_scale
    return reference.fused_moe(x, logits, layer.correction_bias, *weights, shared, **layer.gate_options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8], ids=["bf16", "fp8"])
def test_equals_reference(dtype, device):
    layer, x = make_layer(device, dtype), tokens_of(device, 5)
    result = layer(x)
    assert mismatch(result, wanted(layer, x), 1e-2) is None
    assert mismatch(result.roll(1, 0), wanted(layer, x), 1e-2) is not None
    workspace = ExpertsWorkspace(5, 2, layer.experts.w13, layer.experts.w2)
    assert torch.equal(layer(x, workspace=workspace), result)


@pytest.mark.parametrize("dtype, stage", CASES, ids=[f"{str(d)[6:]} {s}" for d, s in CASES])
def test_each_stage_can_be_its_reference(dtype, stage, device):
    """The replaced stage rounds its sums at other places; everything else is bit-identical."""
    layer, x = make_layer(device, dtype), tokens_of(device, 5)
    replaced = make_layer(device, dtype, reference={stage})
    assert mismatch(replaced(x), wanted(layer, x), 1e-2) is None
    if stage in ("permute", "quantise", "sum"):
        assert torch.equal(replaced(x), layer(x))


@pytest.mark.parametrize("stage", ["permute", "sum", "gate"])
def test_only_the_named_stage_is_replaced(stage, device, monkeypatch):
    """A kernel that must not run, and a reference that must."""
    kernels = {"permute": "group_by_expert", "sum": "weighted_sum", "gate": "biased_grouped_topk"}
    refuse = lambda *_, **__: pytest.fail(f"the kernel of {stage} was launched")
    monkeypatch.setattr(torch_stages if stage == "gate" else launches, kernels[stage], refuse)
    x = tokens_of(device, 3)
    assert make_layer(device, reference={stage})(x).isfinite().all()
    with pytest.raises(pytest.fail.Exception, match=f"the kernel of {stage} was launched"):
        make_layer(device, reference={"down"})(x)


@pytest.mark.parametrize("references", [set(), set(BF16_STAGES)], ids=["kernels", "torch"])
def test_shared_experts_and_leading_dimensions(references, device):
    shared = nn.Linear(128, 128, bias=False, device=device, dtype=torch.bfloat16).requires_grad_(False)
    layer = make_layer(device, shared_experts=shared, reference=references)
    x = tokens_of(device, 2, 3)
    result = layer(x)
    assert result.shape == (2, 3, 128)
    assert mismatch(result.view(6, 128), wanted(layer, x.view(6, 128)), 1e-2) is None
    layer.shared_experts = None
    assert mismatch(result.view(6, 128), wanted(layer, x.view(6, 128)), 1e-2) is not None


def test_shared_experts_have_their_gradient(device):
    shared, x = nn.Linear(128, 128).to(device, torch.bfloat16), tokens_of(device, 3)
    layer = make_layer(device, shared_experts=shared)
    layer(x).float().sum().backward()
    alone = shared.weight.grad.clone()
    shared.zero_grad()
    shared(x).float().sum().backward()
    assert alone.any() and torch.equal(alone, shared.weight.grad)
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_softmax_router_and_no_tokens(device):
    layer = make_layer(device, scoring="softmax", num_expert_group=1, topk_group=1, has_correction_bias=False)
    x = tokens_of(device, 3)
    assert mismatch(layer(x), wanted(layer, x), 1e-2) is None
    assert layer(x[:0]).shape == (0, 128)


class Operations(TorchDispatchMode):
    """Records the names of torch's operations."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.names.append(operation.name())
        return operation(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_router_converts_nothing_on_a_gpu(dtype):
    """Only bfloat16 and float16 have a GEMM with float32 logits; float32 is multiplied as it is."""
    with FakeTensorMode(), Operations() as seen:
        x, weight = torch.empty(3, 128, dtype=dtype, device="cuda"), torch.empty(8, 128, dtype=dtype, device="cuda")
        logits = router_logits(x, weight, torch.empty(8, dtype=torch.bfloat16, device="cuda"))
    assert logits.dtype == torch.float32 and logits.shape == (3, 8)
    assert ("aten::mm.dtype" in seen.names) == (dtype == torch.bfloat16)
    assert ("aten::_to_copy" in seen.names) == (dtype == torch.float32)  # of the bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits_are_float32(dtype, has_bias, device):
    random = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=random).to(device, dtype)
    x, weight, bias = draw(5, 256), draw(8, 256), draw(8) if has_bias else None
    expected = x.double() @ weight.double().T + (bias.double() if has_bias else 0)
    for given in (x, x.clone().requires_grad_()):
        logits = router_logits(given, weight, bias)
        assert logits.dtype == torch.float32
        torch.testing.assert_close(logits.detach().double(), expected, rtol=1e-5, atol=1e-4)  # bfloat16: 1e-2
    assert not torch.allclose(router_logits(x, weight.roll(1, 0), bias).double(), expected, atol=1e-1)


def test_state_dict_goes_through_a_file(device, tmp_path):
    layer, other = make_layer(device, FP8), MoELayer(8, 128, 128, 2, dtype=FP8, device=device, **DEEPSEEK)
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    names = "router_weight", "correction_bias", *(f"experts.{n}" for n in ("w13", "w2", "w13_scale", "w2_scale"))
    assert set(layer.state_dict()) == set(names)
    x = tokens_of(device, 3)
    assert torch.equal(other(x), layer(x))
    assert not [p for p in layer.parameters() if p.requires_grad]


QUANTISED = {"bf16": torch.bfloat16, "fp8": FP8, "mxfp4": torch.uint8}
CONVERSIONS = {
    "to": lambda m: m.to(torch.float16),
    "to with a device": lambda m: m.to(m.router_weight.device, torch.float16),
    "half": lambda m: m.half(),
    "type": lambda m: m.type(torch.float16),
    "of a parent": lambda m: nn.Sequential(nn.Linear(2, 2), m).half(),
    "back and forth": lambda m: m.bfloat16().float().double().half(),
}


@pytest.mark.parametrize("how", CONVERSIONS)
@pytest.mark.parametrize("format_", QUANTISED)
def test_conversions_leave_bias_scales_and_quantised_weights(format_, how, device):
    dtype = QUANTISED[format_]
    layer = MoELayer(8, 128, 128, 2, dtype=dtype, device=device, has_router_bias=True, **DEEPSEEK)
    layer.experts.a1_scale = torch.tensor(0.1, device=device)  # of the static kind; no stage of this test reads it
    layer.correction_bias.copy_(torch.rand(8) * 0.246 + 6.817)
    before = {name: t.clone() for name, t in [*layer.named_parameters(), *layer.named_buffers()]}
    CONVERSIONS[how](layer)
    after = dict([*layer.named_parameters(), *layer.named_buffers()])
    converted = {name for name, t in after.items() if t.dtype != before[name].dtype}
    weights = {"experts.w13", "experts.w2"} if format_ == "bf16" else set()
    assert converted == {"router_weight", "router_bias"} | weights
    assert {after[name].dtype for name in converted} == {torch.float16}
    for name in after.keys() - converted:
        assert torch.equal(*(t.view(torch.uint8) for t in (after[name].reshape(-1), before[name].reshape(-1)))), name
    moved = layer.to("meta").to_empty(device=device).state_dict()
    assert {n: (t.dtype, t.device) for n, t in moved.items()} == {n: (after[n].dtype, before[n].device) for n in moved}


@pytest.mark.parametrize("assign", [False, True])
def test_a_rounded_checkpoint_leaves_dtypes(assign, device):
    """As a checkpoint that a conversion has been applied to."""
    layer = make_layer(device, FP8)
    state = {name: t if t.dtype == FP8 else t.bfloat16() for name, t in layer.state_dict().items()}
    dtypes = {name: t.dtype for name, t in layer.state_dict().items()}
    layer.load_state_dict(state, assign=assign)
    assert {name: t.dtype for name, t in layer.state_dict().items()} == dtypes
    assert layer(tokens_of(device, 3)).isfinite().all()
    assert layer.share_memory().correction_bias.is_shared()


def test_converted_layers_choose_the_same_experts(device):
    layer, x = make_layer(device, FP8), tokens_of(device, 5)
    before = layer(x)
    assert torch.equal(layer.to(torch.bfloat16)(x), before) and torch.equal(layer.float().bfloat16()(x), before)


def test_torch_compile(device):
    layer, x = make_layer(device), tokens_of(device, 3)
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_experts_alone(device):
    layer, x = make_layer(device), tokens_of(device, 3)
    weights = torch.ones(3, 2, device=device)
    ids = torch.tensor([[0, 0], [-1, 8], [7, 3]], device=device)  # repeated, of another rank, a sentinel
    expected = reference.fused_experts(x, layer.experts.w13, layer.experts.w2, weights, ids)
    result = layer.experts(x, weights, ids)
    assert mismatch(result, expected, 4e-3) is None and not result[1].any()


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: MoELayer(8, 128, 128, 9), ValueError, "topk is 9; 1 to 8 are allowed"),
        (lambda: MoELayer(8, 128, 128, 2, reference={"gates"}), ValueError, "reference has 'gates'; the stages with b"),
        (lambda: MoELayer(8, 128, 128, 2, reference="gate"), TypeError, "reference is the str 'gate'; it must be a"),
        (
            lambda: MoELayer(8, 128, 128, 2, reference=None),
            TypeError,
            "reference is the NoneType None; it must be a set",
        ),
        (lambda: MoELayer(8, 128, 128, 2, renormalize="x"), TypeError, "renormalize is 'x'; it must be True or False"),
        (
            lambda: MoELayer(8, 128, 128, 2, num_expert_group=3),
            ValueError,
            "num_expert_group is 3; it must divide the 8",
        ),
        (lambda: MoELayer(8, 128, 128, 2, topk_group=9), ValueError, "topk_group is 9; 1 to num_expert_group"),
        (lambda: MoELayer(8, 128, 128, 2, routed_scaling_factor=0.0), ValueError, "routed_scaling_factor is 0.0"),
        (lambda: MoELayer(8, 128, 128, 2, scoring="x"), ValueError, "scoring is 'x'; it must be one of sigmoid"),
        (lambda: MoELayer(8, 128, 128, 2, shared_experts=3), TypeError, "shared_experts is 3; it must be a torch.nn.M"),
        (lambda: MoELayer(8, 128, 128, 2, has_bias="x"), TypeError, "has_bias is 'x'; it must be True or False"),
        (lambda: MoELayer(8, 128, 128, 2, has_router_bias=2), TypeError, "has_router_bias is 2; it must be True or"),
        (lambda: MoELayer(8, 128, 128, 2, has_correction_bias=2), TypeError, "has_correction_bias is 2; it must be"),
        (lambda: Experts(8, 128, 128, FP8, reference={"activation"}), ValueError, "the stages with FP8 weights are g"),
        (lambda: Experts(8, 128, 100), ValueError, "intermediate is 100 .w13 has 200 rows, gate and up"),
        (lambda: Experts(0, 128, 128), ValueError, "num_experts is 0; it must be 1 or more"),
        (lambda: Experts(8, 128, 128, torch.float16), TypeError, "^dtype is torch.float16; it must be torch.bf"),
    ],
)
def test_invalid_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    "x, error, message",
    [
        ([1], TypeError, "x is list; it must be a tensor of torch.bfloat16"),
        (torch.zeros(3, 128), TypeError, "x is torch.float32; it must be a tensor of torch.bfloat16"),
        (torch.zeros(3, 64).bfloat16(), ValueError, r"x has shape \(3, 64\); it must be \[..., 128\]"),
        (torch.tensor(1.0).bfloat16(), ValueError, r"x has shape \(\); it must be \[..., 128\]"),
        (torch.zeros(3, 128, device="meta").bfloat16(), ValueError, "x is on meta; it must be where the weights are"),
    ],
)
def test_invalid_inputs(x, error, message, device):
    with pytest.raises(error, match=message):
        make_layer(device)(x if not isinstance(x, torch.Tensor) or x.is_meta else x.to(device))
