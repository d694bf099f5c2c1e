"""LoRA adapters that PEFT puts on the experts of a model of transformers."""

import copy

import pytest
import torch

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from moe_numba.integrations import transformers as integration  # noqa: E402
from moe_numba.integrations import transformers_layout  # noqa: E402
from moe_numba.integrations.transformers import register  # noqa: E402

SIZES = dict(vocab_size=64, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
SIZES |= dict(head_dim=32, num_experts_per_tok=2, pad_token_id=0)
MODELS = {
    "Qwen3Moe": SIZES | dict(intermediate_size=64, moe_intermediate_size=64, num_experts=4),
    "GptOss": SIZES | dict(intermediate_size=64, num_local_experts=4),
}
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(kind, targets, device):
    """Return a model whose adapters change its output."""
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(getattr(transformers, f"{kind}Config")(**MODELS[kind]))
    model = peft.get_peft_model(
        model.bfloat16().to(device), peft.LoraConfig(r=8, lora_alpha=16, target_parameters=targets, target_modules=[])
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    return model


def step(model, implementation):
    """Return the logits and the gradients of the adapters, by name."""
    model = copy.deepcopy(model)
    model.get_base_model().set_experts_implementation(implementation)
    tokens = torch.randint(1, 64, (1, 8), generator=torch.Generator().manual_seed(1)).to(model.device)
    logits = model(tokens).logits
    logits.float().pow(2).sum().backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def difference(found, wanted):
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("targets", (EXPERTS, EXPERTS[:1], EXPERTS[1:]), ids=("both", "gate_up", "down"))
def test_adapters_are_computed_apart_from_the_weights(kind, targets, device, monkeypatch):
    """Their results and gradients are those of eager, which adds them to the weights; no weight is formed."""
    called, right = [], integration.fused_experts_lora
    monkeypatch.setattr(integration, "fused_experts_lora", lambda *a, **k: called.append(set(k)) or right(*a, **k))
    register()
    model = adapted(kind, targets, device)
    wanted, gradients = step(model, "eager")
    logits, found = step(model, "moe_numba")
    assert difference(logits, wanted) < 0.02 and found.keys() == gradients.keys() and len(found) == 2 * len(targets)
    for name in found:
        assert difference(found[name], gradients[name]) < 0.03, name
    names = {f"{n}_{f}" for n, t in zip(("w13", "w2"), EXPERTS, strict=True) if t in targets for f in "ab"}
    assert len(called) == 1 and {n for n in called[0] if n.endswith(("_a", "_b"))} == names
    # The same adapters, added to the weights.
    monkeypatch.setattr(transformers_layout, "_adapter_of", lambda module, attribute: None)
    merged, of_merged = step(model, "moe_numba")
    assert len(called) == 1 and difference(merged, wanted) < 0.02
    assert all(difference(found[name], of_merged[name]) < 0.03 for name in found)


def test_adapters_that_are_disabled_are_not_added(device):
    register()
    model = adapted("Qwen3Moe", EXPERTS, device)
    model.get_base_model().set_experts_implementation("moe_numba")
    tokens = torch.ones(1, 4, dtype=torch.int64, device=device)
    with torch.no_grad():
        own = model(tokens).logits
        with model.disable_adapter():
            plain = model(tokens).logits
    assert difference(own, plain) > 0.01


def test_two_adapters_are_added_to_the_weights(device):
    register()
    model = adapted("Qwen3Moe", EXPERTS, device)
    model.add_adapter("other", peft.LoraConfig(r=4, target_parameters=EXPERTS, target_modules=[]))
    model.base_model.set_adapter(["default", "other"])
    wanted, _ = step(model, "eager")
    logits, _ = step(model, "moe_numba")
    assert difference(logits, wanted) < 0.02
