"""``fused_experts_lora`` and its gradients against a float64 reference with the adapters added to the weights."""

import pytest
import torch
from moe_layer.test_backward import (
    EMPTY,
    EXPERTS,
    HIDDEN,
    IDS,
    INTERMEDIATE,
    TOKENS,
    error,
    inputs,
    reference,
    with_grad,
)

import moe_numba
from moe_numba.grouped_gemm.w4.reference import quantise_mxfp4
from moe_numba.moe_layer import fused_experts_lora, lora
from moe_numba.moe_layer import weights as layer_weights
from moe_numba.moe_layer.backward import experts as backward_experts
from moe_numba.moe_layer.backward import plan as backward_plan
from moe_numba.moe_layer.reference_mxfp4 import unpack, unpack_gate_up
from moe_numba.moe_layer.weights import pack_mxfp4_experts

NAMES = "w13_a", "w13_b", "w2_a", "w2_b"
SCALING = dict(w13_scaling=2.0, w2_scaling=0.5)


def adapters(device, rank=8, experts=EXPERTS, names=NAMES, dtype=torch.bfloat16):
    """Return adapters that change an output as much as the weights do."""
    generator = torch.Generator().manual_seed(7)
    draw = lambda *shape: torch.randn(*shape, generator=generator) * shape[2] ** -0.5
    sizes = (rank, HIDDEN), (2 * INTERMEDIATE, rank), (rank, INTERMEDIATE), (HIDDEN, rank)
    made = {name: draw(experts, *size).to(device, dtype) for name, size in zip(NAMES, sizes, strict=True)}
    return {name: made[name] for name in names}


def with_adapters(given):
    """Return the arguments of `reference`, with the weights that the adapters make."""
    given = dict(given)
    for name in ("w13", "w2"):
        a, b = given.pop(f"{name}_a", None), given.pop(f"{name}_b", None)
        if a is not None:
            given[name] = given[name] + SCALING[f"{name}_scaling"] * b @ a
    return given


def check(given, ids, activation="silu", trained=None):
    """Raise AssertionError for a result or gradient that differs from the reference's, named."""
    trained = [name for name in given if name not in ("w13", "w2")] if trained is None else trained
    own, wanted = with_grad(given, trained), with_grad({name: t.double() for name, t in given.items()}, trained)
    y = fused_experts_lora(**own, topk_ids=ids, activation=activation, **SCALING)
    expected = reference(ids, activation, None, **with_adapters(wanted))
    assert error(y.detach(), expected.detach()) < 0.01, "y"
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.device)
    y.backward(grad)
    expected.backward(grad.double())
    for name in trained:
        assert own[name].grad.dtype == given[name].dtype and error(own[name].grad, wanted[name].grad) < 0.02, name
    return [y.detach(), *(own[name].grad for name in trained)]


@pytest.mark.parametrize("rank", (8, 16, 72))
@pytest.mark.parametrize("ids", (IDS, EMPTY))
def test_results_and_gradients_are_those_of_the_reference(rank, ids, device):
    check(inputs(device, has_shared=True) | adapters(device, rank), torch.tensor(ids, device=device))


@pytest.mark.parametrize("transposed", (False, True))
def test_gpt_oss(transposed, device):
    """With biases and interleaved gate and up, and with weights that transformers keeps transposed."""
    given = inputs(device, has_bias=True) | adapters(device)
    if transposed:
        given |= {name: given[name].mT.contiguous().mT for name in ("w13", "w2")}
    check(given, torch.tensor(IDS, device=device), "swigluoai")


@pytest.mark.parametrize("names", (NAMES[:2], NAMES[2:]))
def test_one_weight_is_adapted(names, device):
    check(inputs(device) | adapters(device, names=names), torch.tensor(IDS, device=device))


def test_the_weights_have_gradients_too(device):
    given = inputs(device) | adapters(device)
    check(given, torch.tensor(IDS, device=device), trained=list(given))


@pytest.mark.parametrize("name", NAMES)
def test_only_one_factor_is_trained(name, device):
    check(inputs(device) | adapters(device), torch.tensor(IDS, device=device), trained=[name])


def test_many_tokens(device):
    """Several tiles for an expert, some of which are not full, and groups that end within one."""
    given, ids = inputs(device) | adapters(device, 16), torch.tensor(IDS, device=device).repeat(40, 1)
    given |= dict(x=given["x"].repeat(40, 1), topk_weights=given["topk_weights"].repeat(40, 1))
    check(given, ids)


def test_adapters_of_peft_are_float32_views(device):
    """Its A is [experts * rank, inputs], and its B [outputs, rank * experts]."""
    given, ids = inputs(device), torch.tensor(IDS, device=device)
    made = adapters(device, dtype=torch.float32)
    plain = check(given | made, ids)
    views = {n: t.permute(1, 2, 0).contiguous().permute(2, 0, 1) if n.endswith("b") else t for n, t in made.items()}
    assert not views["w2_b"].is_contiguous()
    assert all(map(torch.equal, plain, check(given | views, ids)))


def test_calls_with_other_adapters_follow_each_other(device, monkeypatch):
    """Each has launches of its own, which later calls repeat on a GPU: of another rank, of one weight, of none."""
    monkeypatch.setattr(backward_experts, "_plans", plans := {})
    given, ids = inputs(device), torch.tensor(IDS, device=device)
    calls = dict(rank=16), dict(rank=40), dict(rank=16, names=NAMES[:2]), dict(rank=16, names=NAMES[2:]), dict(names=())
    for options in (*calls, *calls[::-1]):
        check(given | adapters(device, **options), ids, trained=["x"])
    assert len(plans) == len(calls)


def test_one_adapter_is_shared_by_all_experts(device):
    check(inputs(device) | adapters(device, experts=1), torch.tensor(IDS, device=device))


def test_adapters_of_zero_change_nothing(device):
    """And without gradients the bits are those of a call of many tokens that has none."""
    given, ids = inputs(device), torch.tensor(IDS, device=device)
    zero = {n: torch.zeros_like(t) if n.endswith("b") else t for n, t in adapters(device).items()}
    plain = moe_numba.fused_experts(**given, topk_ids=ids, batch_invariant=True)
    assert torch.equal(fused_experts_lora(**given, topk_ids=ids, **zero), plain)
    assert torch.equal(fused_experts_lora(**given, topk_ids=ids), moe_numba.fused_experts(**given, topk_ids=ids))


def test_results_without_wgmma_are_the_same(device, monkeypatch):
    monkeypatch.setattr(lora, "has_wgmma", lambda device: False)
    check(inputs(device) | adapters(device), torch.tensor(IDS, device=device))


def test_compiled_gradients_are_the_same(device):
    given, ids, found = inputs(device) | adapters(device), torch.tensor(IDS, device=device), []
    for call in (fused_experts_lora, torch.compile(fused_experts_lora, backend="aot_eager", fullgraph=True)):
        own = with_grad(given, NAMES)
        call(**own, topk_ids=ids, **SCALING).float().pow(2).sum().backward()
        found.append([own[name].grad for name in NAMES])
    assert all(map(torch.equal, *found)) and all(gradient.any() for gradient in found[0])


def test_no_tokens(device):
    given = inputs(device) | {name: inputs(device)[name][:0] for name in ("x", "topk_weights")} | adapters(device)
    own = with_grad(given, NAMES)
    fused_experts_lora(**own, topk_ids=torch.zeros(0, 2, dtype=torch.int32, device=device)).sum().backward()
    assert all(not own[name].grad.any() for name in NAMES)


def test_weights_without_gradients_take_no_memory(device, monkeypatch):
    """No k-grouped GEMM has the size of a weight."""
    sizes, right = [], backward_plan.k_grouped_gemm_bf16
    noted = lambda a, b, **given: sizes.append((a.shape[1], b.shape[1])) or right(a, b, **given)
    monkeypatch.setattr(backward_plan, "k_grouped_gemm_bf16", noted)
    monkeypatch.setattr(backward_experts, "_backward_plans", {})
    check(inputs(device) | adapters(device), torch.tensor(IDS, device=device))
    assert sorted(sizes) == sorted([(HIDDEN, 16), (16, INTERMEDIATE), (2 * INTERMEDIATE, 16), (16, HIDDEN)])


@pytest.mark.parametrize(
    "part, at", (("weight_low", "y"), ("scaling", "y"), ("low", "w2_b"), ("low_grad", "w2_a")), ids=lambda v: v
)
def test_wrong_adapters_are_rejected(part, at, device, monkeypatch):
    """An adapter that is not added, one without its factor, and gradients of factors from other rows."""
    monkeypatch.setattr(backward_experts, "_backward_plans", {})
    if part == "scaling":
        monkeypatch.setitem(SCALING, "w2_scaling", 1.0)
        with pytest.raises(AssertionError, match="^y"):
            given = inputs(device) | adapters(device)
            wrong = fused_experts_lora(**given, topk_ids=torch.tensor(IDS, device=device))
            right = reference(IDS_TENSOR, "silu", None, **with_adapters({n: t.double() for n, t in given.items()}))
            assert error(wrong, right.to(device)) < 0.01, "y"
        return
    right = backward_plan.BackwardPlan._sum_outer_products
    if part == "weight_low":
        adapted = lora.adapted_experts
        forget = lambda **given: adapted(**given | dict(w2_a=torch.zeros_like(given["w2_a"])))
        monkeypatch.setattr(lora, "adapted_experts", forget)
    else:

        def rolled(self, grad, given, groups, out):
            is_factor = out is not None and 16 in out.shape[1:]
            right(self, grad, given.roll(1, 0) if is_factor else given, groups, out)

        monkeypatch.setattr(backward_plan.BackwardPlan, "_sum_outer_products", rolled)
    with pytest.raises(AssertionError):
        check(inputs(device) | adapters(device), torch.tensor(IDS, device=device), trained=[at] if at != "y" else None)


IDS_TENSOR = torch.tensor(IDS)


@pytest.mark.parametrize(
    "changes, message",
    (
        (dict(w2_b=None), "w2_a is given, w2_b is None; both must be given"),
        (dict(w13_a=None), "w13_b is given, w13_a is None; both must be given"),
        (dict(w13_a=torch.zeros(EXPERTS, 8, 32)), r"w13_a .*w13 has 64 inputs"),
        (dict(w2_b=torch.zeros(EXPERTS, HIDDEN, 4)), r"w2_b .*w2_a has rank 8"),
        (dict(w2_a=torch.zeros(3, 8, INTERMEDIATE)), "w2_a has 3 experts; it must have w2's 4, or 1 for all"),
        (dict(w13_scaling="2"), "w13_scaling is '2'; it must be a number"),
        (dict(w2_a=torch.zeros(EXPERTS, 8, INTERMEDIATE).int()), "w2_a .*torch.int32"),
    ),
)
def test_invalid_adapters(changes, message, device):
    changes = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in changes.items()}
    with pytest.raises((ValueError, TypeError), match=message):
        fused_experts_lora(**inputs(device) | adapters(device) | changes, topk_ids=torch.tensor(IDS, device=device))


def test_weights_in_fp8_are_refused(device):
    given = inputs(device) | {n: inputs(device)[n].to(torch.float8_e4m3fn) for n in ("w13", "w2")} | adapters(device)
    with pytest.raises(TypeError, match="w13 .*torch.bfloat16"):
        fused_experts_lora(**given, topk_ids=torch.tensor(IDS, device=device))


def packed(given, gate_up, intermediate=INTERMEDIATE):
    """Return the arguments with their weights in MXFP4, packed; and with the same numbers in bfloat16."""
    w13, w2 = given["w13"][:, : 2 * intermediate], given["w2"][:, :, :intermediate].contiguous()
    w13, w2 = pack_mxfp4_experts(*quantise_mxfp4(w13), *quantise_mxfp4(w2), gate_up)
    decoded = dict(w13=torch.stack([unpack_gate_up(w, gate_up == "interleaved") for w in w13]).bfloat16())
    decoded["w2"] = torch.stack([unpack(w) for w in w2]).bfloat16()
    return given | dict(w13=w13, w2=w2), given | decoded


def results(given, ids, activation="silu", names=(*NAMES, "x", "topk_weights"), call=fused_experts_lora):
    """Return the result and the gradients of the tensors that are named, and the tensors that autograd saves."""
    own, saved = with_grad(given, [name for name in names if name in given]), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = call(**own, topk_ids=ids, activation=activation, **SCALING)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(y.device))
    return [y.detach(), *(t.grad for t in own.values() if t.requires_grad)], saved


def mxfp4_is_wrong(device, activation="silu", gate_up="stacked", names=NAMES, ids=IDS, **options):
    """Return what is wrong with packed weights: results are those of the same numbers in bfloat16, bit for bit."""
    given = inputs(device, has_bias=True) | adapters(device, names=names)
    own, decoded = packed(given, gate_up)
    ids = torch.tensor(ids, device=device)
    (found, saved), (wanted, _) = results(own, ids, activation, **options), results(decoded, ids, activation)
    assert all(gradient.any() for gradient in wanted)
    if not all(map(torch.equal, found, wanted)):
        return "results differ"
    weight = EXPERTS * HIDDEN * INTERMEDIATE
    large = [tuple(t.shape) for t in saved if t.is_floating_point() and t.numel() >= weight]
    return f"tensors {large} are kept" if large else None


@pytest.mark.parametrize(
    "activation, gate_up, names",
    (
        ("silu", "stacked", NAMES),
        ("swigluoai", "interleaved", NAMES),
        ("swigluoai", "interleaved", NAMES[:2]),
        ("silu", "stacked", NAMES[2:]),
    ),
)
def test_mxfp4_weights_have_the_bits_of_decoded_ones(activation, gate_up, names, device):
    """And none in bfloat16 is kept for the backward."""
    assert mxfp4_is_wrong(device, activation, gate_up, names) is None


def test_compiled_calls_with_mxfp4_weights(device):
    compiled = torch.compile(fused_experts_lora, backend="aot_eager", fullgraph=True)
    assert mxfp4_is_wrong(device, "swigluoai", "interleaved", call=compiled) is None


def test_mxfp4_weights_with_a_limit_of_silu(device):
    """Which the grouped GEMM with MXFP4 weights does not have."""
    calls = lambda **given: fused_experts_lora(**given, limit=1.0)
    own, decoded = packed(inputs(device) | adapters(device), "stacked")
    found, wanted = (results(given, torch.tensor(IDS, device=device), call=calls)[0] for given in (own, decoded))
    assert all(map(torch.equal, found, wanted))


def test_mxfp4_weights_that_packing_pads(device):
    """Of 32 columns of the activation, whose adapters are padded with zeros."""
    made = adapters(device)
    made["w13_b"], made["w2_a"] = made["w13_b"][:, :128].contiguous(), made["w2_a"][..., :64].contiguous()
    own, decoded = packed(inputs(device) | made, "stacked", intermediate=32)
    assert decoded["w13"].shape == (EXPERTS, 128, HIDDEN) and not decoded["w2"][..., 32:].any()
    found, wanted = (results(given, torch.tensor(IDS, device=device))[0] for given in (own, decoded))
    assert all(map(torch.equal, found, wanted))


def test_mxfp4_weights_without_adapters_are_those_of_fused_experts(device):
    own, _ = packed(inputs(device), "stacked")
    ids = torch.tensor(IDS, device=device)
    assert torch.equal(fused_experts_lora(**own, topk_ids=ids), moe_numba.fused_experts(**own, topk_ids=ids))
    own["x"].requires_grad_()
    with pytest.raises(ValueError, match="x requires grad; fused_experts has a backward only with bfloat16 weights"):
        fused_experts_lora(**own, topk_ids=ids)


@pytest.mark.parametrize("name", ("w13", "w2"))
def test_one_packed_weight_is_refused(name, device):
    given = inputs(device) | adapters(device)
    given[name] = packed(given, "stacked")[0][name]
    types = ("torch.uint8", "torch.bfloat16")[:: 1 if name == "w13" else -1]
    with pytest.raises(ValueError, match="w13 is {}, w2 is {}; both must be torch.bfloat16, or both".format(*types)):
        fused_experts_lora(**given, topk_ids=torch.tensor(IDS, device=device))


@pytest.mark.parametrize(
    "changes, message",
    (
        (lambda t: dict(w13=t["w2"]), "w13 has shape .*packed it without gate_up"),
        (lambda t: dict(w2=t["w2"][:3]), "w2 has shape .*w13 has 4 experts"),
        (lambda t: dict(w13_b=t["w13_b"][:, :128].contiguous()), "w13_b .*w13 has 256 outputs"),
        (lambda t: dict(w2_a=t["w2_a"][..., :64].contiguous()), "w2_a .*w2 has 128 inputs"),
        (lambda t: dict(w2=t["w2"].new_empty(t["w2"].numel() + 1)[1:].view(t["w2"].shape)), "w2 starts at address"),
    ),
)
def test_invalid_mxfp4_weights(changes, message, device):
    own, _ = packed(inputs(device) | adapters(device), "stacked")
    own |= changes(own)
    with pytest.raises(ValueError, match=message):
        fused_experts_lora(**own, topk_ids=torch.tensor(IDS, device=device))


def test_mxfp4_weights_need_wgmma(device, monkeypatch):
    for module in (lora, layer_weights):
        monkeypatch.setattr(module, "has_wgmma", lambda device: False)
    own, _ = packed(inputs(device) | adapters(device), "stacked")
    with pytest.raises(moe_numba.UnsupportedDeviceError, match="MXFP4 weights need compute capability 9.0"):
        fused_experts_lora(**own, topk_ids=torch.tensor(IDS, device=device))


@pytest.mark.parametrize("what", ("order", "backward", "kept"))
def test_wrong_decoding_is_rejected(what, device, monkeypatch):
    """Rows in the other order in both passes or in the backward, and decoded weights that are kept for it."""
    right, adapted, calls = backward_experts._decoded, lora.adapted_experts, []

    def decoded(w13, w2, activation):
        calls.append(activation)
        is_wrong = w13.dtype == torch.uint8 and (what == "order" or len(calls) == 2)
        return right(w13, w2, "swigluoai" if is_wrong else activation)

    def adapted_and_kept(**given):
        w13, w2 = right(given["w13"], given["w2"], "silu")
        return adapted(**given | dict(w13=w13, w2=w2))

    if what == "kept":
        monkeypatch.setattr(lora, "adapted_experts", adapted_and_kept)
    else:
        monkeypatch.setattr(backward_experts, "_decoded", decoded)
    found = mxfp4_is_wrong(device)
    assert found and found.startswith("tensors" if what == "kept" else "results differ")


def test_sizes():
    assert TOKENS == len(IDS), "of the tokens of `inputs`"
