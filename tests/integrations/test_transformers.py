"""Tiny random models of transformers with experts and routers on the package's kernels, against eager."""

import copy
import importlib
import io
import pickle
import sys
from functools import partial, update_wrapper
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils import parametrize

transformers = pytest.importorskip("transformers", minversion="5.17", reason="transformers 5.17 or newer is needed")

from helpers.tiny_models import MODELS, make_model  # noqa: E402
from transformers.integrations import finegrained_fp8  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation  # noqa: E402

from moe_numba.expert_parallel import Buffer, LocalGroup  # noqa: E402
from moe_numba.grouped_gemm.reference import mismatch, quantise_blocks  # noqa: E402
from moe_numba.grouped_gemm.w4.reference import dequantise_mxfp4, quantise_mxfp4  # noqa: E402
from moe_numba.integrations import transformers as integration  # noqa: E402
from moe_numba.moe_layer import reference, warm_up  # noqa: E402

# Relative error of all logits, in bfloat16: eager and grouped_mm of transformers differ by about 0.008.
BOUND = 0.02
each_model = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(autouse=True)
def registered():
    integration.register()


def prefill_and_decode(model, device):
    """Return the logits of a prompt of 5 tokens, and of one more token with the cache."""
    first = model(torch.arange(5, device=device).view(1, 5), use_cache=True)
    second = model(torch.tensor([[7]], device=device), past_key_values=first.past_key_values)
    return torch.cat([first.logits, second.logits], dim=1).double()[0]


def differs(logits, expected):
    """Whether logits are not those of eager."""
    return float((logits.to(expected.device) - expected).norm() / expected.norm()) > BOUND


@each_model
def test_logits_of_prefill_and_decode(name, device, monkeypatch):
    model = make_model(name, device)
    model.set_experts_implementation("eager")
    expected = prefill_and_decode(model, device)
    calls = []
    run = integration._run
    monkeypatch.setattr(integration, "_run", lambda *args: calls.append(len(args[1])) or run(*args))
    model.set_experts_implementation("moe_numba")
    layers = 1 if "first_k_dense_replace" in MODELS[name] else 2
    logits = prefill_and_decode(model, device)
    assert calls == [5] * layers + [1] * layers
    assert not differs(logits, expected) and differs(logits.roll(1, 0), expected)
    # Wrong results must be rejected: another expert, or weights that are not applied
    for change in (
        lambda m, x, ids, w, given: run(m, x, (ids + 1) % 8, w, given),
        lambda m, x, ids, w, given: run(m, x, ids, w * 0 + 1, given),
    ):
        monkeypatch.setattr(integration, "_run", change)
        assert differs(prefill_and_decode(model, device), expected)


@each_model
def test_fused_routers(name, device):
    model = make_model(name, device)
    model.set_experts_implementation("eager")
    expected = prefill_and_decode(model, device)
    layers = 1 if "first_k_dense_replace" in MODELS[name] else 2
    router = next(m for m in model.modules() if type(m).__name__.lower().endswith("topkrouter"))
    x = torch.randn(6, 64, device=device).bfloat16()
    before, names = router(x), list(model.state_dict())
    assert integration.fuse_routers(model) == layers and integration.fuse_routers(model) == 0
    after = router(x)
    assert [t.dtype for t in after] == [t.dtype for t in before]
    assert torch.allclose(after[0], before[0], rtol=0, atol=4e-6)  # on a GPU sums have another order
    for tokens in zip(*before[1:], *after[1:], strict=True):
        weights, ids, new_weights, new_ids = tokens
        assert sorted(ids.tolist()) == sorted(new_ids.tolist())
        assert torch.allclose(weights[ids.argsort()], new_weights[new_ids.argsort()], rtol=8e-3)
    assert list(model.state_dict()) == names
    model.set_experts_implementation("moe_numba")
    assert not differs(prefill_and_decode(model, device), expected)
    assert integration.unfuse_routers(model) == layers and "forward" not in vars(router)


def through_file(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": through_file}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["DeepseekV3", "GptOss"])
def test_copies_of_fused_routers(name, how, device, monkeypatch):
    """They are fused, and independent: other weights of one, or its router as it was, do not change the other."""
    model, x = make_model(name, device, num_hidden_layers=2), torch.randn(6, 64, device=device).bfloat16()
    fused = integration.fuse_routers(model)
    copied = COPIES[how](model)
    routers = [next(m for m in each.modules() if hasattr(m, integration._SAVED)) for each in (model, copied)]
    calls, gate = [], integration.biased_grouped_topk
    monkeypatch.setattr(integration, "biased_grouped_topk", lambda *a, **o: calls.append(len(calls)) or gate(*a, **o))
    before, after = (router(x) for router in routers)
    assert len(calls) == 2 and all(map(torch.equal, before, after))
    assert integration.fuse_routers(copied) == 0
    routers[1].weight.data.neg_()
    assert torch.equal(routers[0](x)[0], before[0]) and not torch.equal(routers[1](x)[0], before[0])
    assert integration.unfuse_routers(copied) == fused and "forward" not in vars(routers[1])
    calls.clear()
    routers[1](x)
    assert not calls
    assert torch.equal(routers[0](x)[1], before[1]) and len(calls) == 1
    assert integration.unfuse_routers(model) == fused


@pytest.mark.parametrize("how", [None, "deepcopy", "torch.save"])
@pytest.mark.parametrize("name", ["DeepseekV3", "Qwen3Moe"])
def test_fused_routers_skip_padding(name, how, device, monkeypatch):
    """Prompts that are padded on the left: other tokens stay as they are, and padding reaches no expert."""
    model = make_model(name, device)
    model.set_experts_implementation("moe_numba")
    tokens, mask = torch.arange(10, device=device).view(2, 5) % 7, torch.ones(2, 5, dtype=torch.long, device=device)
    mask[0, :3] = 0
    integration.fuse_routers(model)
    wanted = model(tokens, attention_mask=mask).logits
    integration.unfuse_routers(model)
    fused = integration.fuse_routers(model, skip_padding=True)
    copied, gate, padded = COPIES[how](model) if how else model, integration.biased_grouped_topk, []

    def spy(*args, **options):
        weights, ids = gate(*args, **options)
        padded.append((ids < 0).all(1).tolist())
        return weights, ids

    monkeypatch.setattr(integration, "biased_grouped_topk", spy)
    rows = (mask == 0).flatten().tolist()
    for call, wants in (
        (lambda: copied(tokens, attention_mask=mask), rows),
        (lambda: copied(tokens, mask), rows),
        (lambda: copied(input_ids=tokens), [False] * 10),
        (lambda: copied(tokens[:, -1:], attention_mask=mask), [False] * 2),
    ):
        padded.clear()
        logits = call().logits
        assert padded and padded == [wants] * len(padded)
        if wants is rows:
            assert torch.equal(logits[mask == 1], wanted[mask == 1])
    assert integration.unfuse_routers(copied) == fused
    padded.clear()
    assert copied(tokens, attention_mask=mask) and not padded and not copied._forward_pre_hooks


def test_forwards_around_fused_routers(device):
    """As hooks of accelerate, which keep the forward that an instance has and set another, before or after."""

    def hook(router):
        inner = router.forward
        hooked = partial(lambda module, x: seen.append(module) or inner(x), router)
        router.forward = update_wrapper(hooked, inner)
        return router.forward

    seen, x = [], torch.randn(6, 64, device=device).bfloat16()
    router = next(m for m in make_model("Qwen3Moe", device).modules() if type(m).__name__ == "Qwen3MoeTopKRouter")
    hooked = hook(router)
    assert integration.fuse_routers(router) == 1 and router(x)[0] is not None and not seen
    assert integration.unfuse_routers(router) == 1 and router.forward is hooked
    integration.fuse_routers(router)
    fused = router(x)
    hook(router)
    assert torch.equal(router(x)[1], fused[1]) and seen == [router]


def test_models_without_routers_are_refused():
    with pytest.raises(ValueError, match="model is a Linear without routers that can be fused: DeepseekV3TopkRouter"):
        integration.fuse_routers(torch.nn.Linear(2, 2))


@each_model
def test_torch_compile(name, device):
    model = make_model(name, device)
    model.set_experts_implementation("moe_numba")
    integration.fuse_routers(model)
    block = next(m for m in model.modules() if hasattr(m, "experts"))
    x = torch.randn(1, 4, 64, device=device).bfloat16()
    compiled, wanted = torch.compile(block, fullgraph=True, backend="aot_eager")(x), block(x)
    assert torch.equal(*((compiled[0], wanted[0]) if name == "GptOss" else (compiled, wanted)))


def experts_of(name="Qwen3Moe", device="cpu", **options):
    model = make_model(name, device, **options)
    model.set_experts_implementation("moe_numba")
    return next(m.experts for m in model.modules() if hasattr(m, "experts"))


def gradients(model, device):
    """Return the loss of a language model, and its gradients by parameter, of those that have one."""
    model.requires_grad_(True).zero_grad()
    tokens = torch.arange(6, device=device).view(1, 6)
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


@each_model
def test_gradients_are_those_of_eager(name, device):
    model, results = make_model(name, device), []
    for implementation in ("eager", "moe_numba", "fused routers"):
        if implementation == "fused routers":
            integration.fuse_routers(model)
        else:
            model.set_experts_implementation(implementation)
        results.append(gradients(model, device))
    (loss, wanted), *others = results
    for own_loss, own in others:
        assert abs(own_loss - loss) < BOUND and own.keys() == wanted.keys()
        assert {"gate_up_proj", "down_proj"} <= {parameter.rpartition(".")[2] for parameter in own}
        for parameter, gradient in own.items():
            error = float((gradient - wanted[parameter]).norm() / wanted[parameter].norm().clamp(min=1e-6))
            allowed = 0.1 if parameter.endswith("sinks") else 0.06  # a sink has a sum over all tokens, of both signs
            assert error < allowed, f"{parameter}: {error}"  # eager and grouped_mm of transformers differ by up to 0.03


@each_model
def test_experts_with_parametrized_weights(name, device):
    """PEFT's adapters of experts are parametrizations: while a model runs, the module is of another class."""
    model, x = make_model(name, device), torch.randn(3, 64, device=device).bfloat16()
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 0]], device=device), torch.rand(3, 2, device=device).bfloat16()
    halved = torch.nn.Module()
    halved.forward = lambda weight: weight / 2
    parametrize.register_parametrization(experts, "gate_up_proj", halved)
    results = []
    for implementation in ("eager", "moe_numba"):
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            results.append(experts(x, ids, weights).double())
    eager, own = results
    assert type(experts).__name__.startswith("Parametrized") and (own - eager).norm() < BOUND * eager.norm()


def test_ids_repeated_of_other_ranks_and_sentinels(device):
    experts, x = experts_of(device=device), torch.randn(4, 64, device=device).bfloat16()
    ids = torch.tensor([[3, 3], [-1, 2], [8, 0], [8, -1]], device=device)  # 8: the sentinel of expert parallelism
    weights = torch.rand(4, 2, device=device)
    expected = reference.fused_experts(x, experts.gate_up_proj, experts.down_proj, weights, ids)
    result = experts(x, ids, weights)
    assert mismatch(result, expected, 4e-3) is None and not result[3].any()


def test_no_tokens_and_top_1(device):
    experts, x = experts_of(device=device), torch.randn(3, 64, device=device).bfloat16()
    ids, weights = torch.tensor([[1], [7], [1]], device=device), torch.rand(3, 1, device=device)
    expected = reference.fused_experts(x, experts.gate_up_proj, experts.down_proj, weights, ids)
    assert mismatch(experts(x, ids, weights), expected, 4e-3) is None
    assert experts(x[:0], ids[:0], weights[:0]).shape == (0, 64)


def make_fp8_experts(device, block_size=(128, 128), **options):
    """FP8Experts as transformers makes them from a model's module of experts."""
    decorate = use_experts_implementation(experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    cls = decorate(type("Decorated", (finegrained_fp8.FP8Experts,), {}))
    sizes = dict(hidden_size=128, moe_intermediate_size=128, num_experts=4, hidden_act="silu")
    config = SimpleNamespace(**sizes, _experts_implementation="moe_numba")
    experts = cls(config, block_size=block_size, **options).to(device).requires_grad_(False)
    torch.manual_seed(0)
    for name in ("gate_up_proj", "down_proj"):
        values, scales = quantise_blocks(torch.randn(getattr(experts, name).shape) / 11)
        getattr(experts, name).data = values.to(device)
        if block_size == (128, 128):
            getattr(experts, f"{name}_scale_inv").data = scales.to(device)
    return experts


def test_fp8_experts(device):
    experts, x = make_fp8_experts(device), torch.randn(5, 128, device=device).bfloat16()
    ids, weights = torch.randint(0, 5, (5, 2), device=device), torch.rand(5, 2, device=device).bfloat16()
    scales = experts.gate_up_proj_scale_inv, experts.down_proj_scale_inv
    expected = reference.fused_experts(x, experts.gate_up_proj, experts.down_proj, weights.float(), ids, *scales)
    result = experts(x, ids, weights)
    # Of 128 FP8 activations one that rounds to the other neighbour, in other sums, changes a row by up to 4e-2.
    assert mismatch(result, expected, 2e-2) is None and mismatch(result.flip(0), expected, 2e-2) is not None


@pytest.mark.parametrize("name, kind", [("gpt_oss", "GptOss"), ("deepseek_v4", "DeepseekV4")])
def test_limited_activations(name, kind, device):
    """A module of experts alone, with gate and up beyond their limits."""
    sizes = dict(hidden_size=64, moe_intermediate_size=64, intermediate_size=64, num_local_experts=4)
    config = getattr(transformers, f"{kind}Config")(**sizes)
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    experts = getattr(module, f"{kind}Experts")(config).bfloat16().to(device).requires_grad_(False)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        parameter.normal_(std=0.3)
    x, weights = 3 * torch.randn(5, 64, device=device).bfloat16(), torch.rand(5, 2, device=device).bfloat16()
    ids = torch.randint(0, 4, (5, 2), device=device)
    config._experts_implementation = "eager"
    expected = experts(x, ids, weights).double()
    config._experts_implementation = "moe_numba"
    assert not differs(experts(x, ids, weights).double(), expected)
    experts.limit = 100.0
    assert differs(experts(x, ids, weights).double(), expected)


def test_mxfp4_weights(device):
    """Weights that are exactly representable, from the model and from the tensors of a checkpoint."""
    model, other = (make_model("GptOss", device, num_hidden_layers=1) for _ in range(2))
    name, tensors = "model.layers.0.mlp.experts", {}
    experts, others = model.get_submodule(name), other.get_submodule(name)
    for projection in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, projection)
        blocks, scales = quantise_mxfp4(weight.mT.contiguous())
        weight.copy_(dequantise_mxfp4(blocks, scales).mT)
        tensors |= {f"{name}.{projection}_blocks": blocks, f"{name}.{projection}_scales": scales}
        tensors[f"{name}.{projection}_bias"] = getattr(experts, f"{projection}_bias").clone()
    model.set_experts_implementation("eager")
    expected = prefill_and_decode(model, device)
    assert integration.pack_mxfp4_weights(model) == 1
    model.set_experts_implementation("moe_numba")
    logits = prefill_and_decode(model, device)
    assert not differs(logits, expected) and differs(logits.roll(1, 0), expected)
    others.to("meta")
    assert integration.pack_mxfp4_weights(other, tensors) == 1
    other.set_experts_implementation("moe_numba")
    block, x = model.model.layers[0].mlp, torch.randn(1, 3, 64, device=device).bfloat16()
    assert torch.equal(torch.compile(block, fullgraph=True, backend="aot_eager")(x)[0], block(x)[0])
    assert torch.equal(other.model.layers[0].mlp(x)[0], block(x)[0])
    with pytest.raises(ValueError, match="model is a GptOssForCausalLM without GptOssExperts in bfloat16"):
        integration.pack_mxfp4_weights(model)


def test_mxfp4_weights_are_not_rounded_without_consent():
    model = make_model("GptOss", "cpu", num_hidden_layers=1)
    with pytest.raises(ValueError, match="mlp.experts.gate_up_proj is not exactly representable in MXFP4; pass allow_"):
        integration.pack_mxfp4_weights(model)
    assert integration.pack_mxfp4_weights(model, allow_rounding=True) == 1
    with pytest.raises(
        ValueError, match=r"model has Mxfp4GptOssExperts, .* load it with quantization_config=Mxfp4Conf"
    ):
        integration.pack_mxfp4_weights(torch.nn.Sequential(type("Mxfp4GptOssExperts", (torch.nn.Module,), {})()))


@pytest.mark.parametrize(
    "name, value, error, message",
    [
        (
            "is_concatenated",
            False,
            ValueError,
            "Qwen3MoeExperts.is_concatenated is False; moe_numba supports True only",
        ),
        ("has_gate", False, ValueError, "has_gate is False; moe_numba supports True only"),
        ("limit", 7.0, ValueError, "limit is 7.0; moe_numba supports None only"),
        ("act_fn", torch.nn.GELU(), ValueError, "act_fn is GELU; moe_numba supports SiLU only"),
    ],
)
def test_other_layouts_are_refused(name, value, error, message):
    experts = experts_of()
    setattr(experts, name, value)
    with pytest.raises(error, match=message):
        experts(torch.zeros(1, 64).bfloat16(), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2))


def test_own_gates_and_other_dtypes_are_refused(monkeypatch):
    experts, ids, weights = experts_of(), torch.zeros(1, 2, dtype=torch.long), torch.ones(1, 2)
    with pytest.raises(TypeError, match="hidden_states is torch.float32; moe_numba needs a model in torch.bfloat16"):
        experts(torch.zeros(1, 64), ids, weights)
    monkeypatch.setattr(type(experts), "_apply_gate", lambda self, x: x)
    with pytest.raises(ValueError, match="Qwen3MoeExperts defines _apply_gate"):
        experts(torch.zeros(1, 64).bfloat16(), ids, weights)
    monkeypatch.undo()
    with pytest.raises(TypeError, match="gate_up_proj is torch.float32; moe_numba needs a model in torch.bfloat16"):
        experts.float()(torch.zeros(1, 64), ids, weights)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(block_size=(64, 128)), r"block_size is \(64, 128\); moe_numba supports \(128, 128\) only"),
        (dict(activation_scheme="static"), "activation_scheme is 'static'; moe_numba supports 'dynamic' only"),
    ],
)
def test_other_fp8_layouts_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        make_fp8_experts("cpu", **options)(torch.zeros(1, 128).bfloat16(), torch.zeros(1, 2).long(), torch.ones(1, 2))
    with pytest.raises(TypeError, match="gate_up_proj is torch.bfloat16; moe_numba supports torch.float8_e4m3fn only"):
        integration.fp8_experts_forward(experts_of(), torch.zeros(1, 64).bfloat16(), None, None)


@pytest.mark.parametrize("name, worst", [("Qwen3Moe", 0), ("GptOss", 10)])
def test_expert_parallel(name, worst, device):
    """Two ranks with a model each, whose experts are distributed; each rank has a prompt of its own."""
    prompts = [torch.arange(5).view(1, 5), torch.arange(9, 12).view(1, 3)]
    whole = make_model(name, device)
    whole.set_experts_implementation("eager")
    expected = [whole(prompt.to(device)).logits.double() for prompt in prompts]
    models = [make_model(name, device) for _ in prompts]

    def work(transport):
        model, buffer = models[transport.rank].to(transport.device), Buffer(transport, 1 << 24)
        with pytest.raises(TypeError, match="buffer is NoneType; it must be a moe_numba.Buffer"):
            integration.distribute_experts(model, None)
        with pytest.raises(ValueError, match="num_worst_tokens is -1; it must be 0 or more"):
            integration.distribute_experts(model, buffer, -1)
        assert integration.distribute_experts(model, buffer, worst) == 2
        assert {len(m.gate_up_proj) for m in model.modules() if hasattr(m, "gate_up_proj")} == {4}
        model.set_experts_implementation("moe_numba_ep")
        logits = model(prompts[transport.rank].to(transport.device)).logits.double()
        with pytest.raises(ValueError, match="model is distributed already"):
            integration.distribute_experts(model, buffer)
        buffer.destroy()
        return logits.to(device)

    results = LocalGroup(2).run(work)
    assert [differs(*pair) for pair in zip(results, expected, strict=True)] == [False, False]
    assert differs(results[0][:, :3], expected[1])
    models[0].set_experts_implementation("moe_numba")
    with pytest.raises(ValueError, match=f"{name}Experts is distributed; moe_numba_ep is the only implementation"):
        models[0](prompts[0].to(device))
    whole.set_experts_implementation("moe_numba_ep")
    with pytest.raises(ValueError, match=r"is not distributed; moe_numba_ep needs distribute_experts\(model, buffer\)"):
        whole(prompts[0].to(device))


def test_the_first_call_of_each_size_warms_up(device, monkeypatch):
    warmed, parts_of = [], []

    def warm_up_parts(parts, sizes, layers):
        warmed.append(warm_up._calls_of(parts(9)))
        parts_of.append(list(layers))

    monkeypatch.setattr(integration, "warm_up_parts", warm_up_parts)
    monkeypatch.setattr(integration, "_warm_sizes", set())
    integration.register(warm_up=True)
    ids = torch.arange(3, device=device).view(1, 3)
    for name, options in (("Qwen3Moe", {}), ("Qwen3Moe", dict(num_experts_per_tok=3)), ("GptOss", {})):
        model = make_model(name, device, **options)
        model.set_experts_implementation("moe_numba")
        model(ids)
        model(ids)
        copy.deepcopy(model)(ids)
    assert [[call.function for call in calls] for calls in warmed] == 3 * [["fused_experts"]], "not once a size"
    given = [dict(calls[0].arguments) for calls in warmed]
    assert [g["topk_ids"][:1] + g["topk_ids"][2:] for g in given] == [((9, k), torch.int64) for k in (2, 3, 2)]
    assert given[2]["w13_bias"].shape == (8, 128) and parts_of == [[], [], []]
    integration.register()
    make = make_model("Qwen3Moe", device, num_experts=4)
    make.set_experts_implementation("moe_numba")
    make(ids)
    assert len(warmed) == 3, "register() alone does not"
    with pytest.raises(TypeError, match="warm_up is 2; it must be True or False"):
        integration.register(2)


@pytest.mark.parametrize("worst, rows", [(0, 9), (10, 10)])
def test_distributed_experts_are_warmed_up_on_all_ranks(worst, rows, device, monkeypatch):
    """The experts of received rows are traced, and the layers of all ranks found."""
    prompt, warmed = torch.arange(5).view(1, 5), []

    def warm_up_parts(parts, sizes, layers):
        with warm_up._uses_of(layers) as uses:
            warmed.append((warm_up._calls_of(parts(9))[-1], [key[1:] for key in uses]))

    monkeypatch.setattr(integration, "warm_up_parts", warm_up_parts)
    monkeypatch.setattr(integration, "_warm_sizes", set())
    integration.register(warm_up=True)

    def work(transport):
        model, buffer = make_model("Qwen3Moe", transport.device), Buffer(transport, 1 << 24)
        integration.distribute_experts(model, buffer, worst)
        model.set_experts_implementation("moe_numba_ep")
        model(prompt.to(transport.device))
        calls = warm_up.calls_of(model, 9)
        assert len(warm_up.distributed_layers(model)) == 2
        buffer.destroy()
        return dict(calls[-1].arguments)["x"].shape

    assert LocalGroup(2).run(work) == 2 * [(rows, 64)]
    assert [dict(call.arguments)["x"].shape for call, _ in warmed] == 2 * [(rows, 64)]
    assert [uses for _, uses in warmed] == 2 * [[(2, torch.int64)]]


def test_both_registries_have_the_implementation():
    assert ALL_EXPERTS_FUNCTIONS["moe_numba"] is integration.experts_forward
    assert finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS["moe_numba"] is integration.fp8_experts_forward


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.activations", None)  # an import of it raises ModuleNotFoundError
    for name in (integration.__name__, f"{integration.__name__}_layout"):
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match=r"needs transformers, .*: pip install 'moe_numba\[transformers\]'$"):
        importlib.import_module(integration.__name__)
