"""Test the fusion of shared experts: checkpoints and memory cost."""

import gc
import json
import weakref

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moe_numba.shared_experts import fuse_checkpoint, fuse_routing, memory_cost

EXPERTS, HIDDEN, WIDE = 4, 32, 16
PROJECTIONS = {"gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}


def checkpoint(shared=1, scales=True, layers=(1, 2)):
    """Make a small checkpoint like DeepSeek-V3's: a dense layer, then layers with experts."""
    random = torch.Generator().manual_seed(0)
    weights = {"model.embed_tokens.weight": torch.rand(8, HIDDEN, generator=random)}
    weights |= {f"model.layers.0.mlp.{name}.weight": torch.rand(shape) for name, shape in PROJECTIONS.items()}
    for layer in layers:
        mlp = f"model.layers.{layer}.mlp"
        weights[f"{mlp}.gate.weight"] = torch.rand(EXPERTS, HIDDEN, generator=random)
        for expert in [*(f"experts.{e}" for e in range(EXPERTS)), "shared_experts"]:
            for name, shape in PROJECTIONS.items():
                times = shared if expert == "shared_experts" else 1
                shape = [size * times if size == WIDE else size for size in shape]
                weights[f"{mlp}.{expert}.{name}.weight"] = torch.rand(shape, generator=random, dtype=torch.float64)
                if scales:
                    blocks = [size // 8 for size in shape]
                    weights[f"{mlp}.{expert}.{name}.weight_scale_inv"] = torch.rand(blocks, generator=random)
    return weights


def fuse(weights, num_replicas=1, **options):
    options = {"num_experts": EXPERTS, "progress": False} | options
    weights = weights.items() if isinstance(weights, dict) else weights
    fused = list(fuse_checkpoint(weights, num_replicas, **options))
    assert len({name for name, _ in fused}) == len(fused)
    return dict(fused)


def mlp(x, weights, name):
    gate, up, down = (weights[f"{name}.{projection}.weight"] for projection in PROJECTIONS)
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_shared_experts_become_the_experts_after_the_routed_ones(replicas, scales):
    weights = checkpoint(scales=scales)
    fused = fuse(weights, replicas)
    assert not any("shared_experts" in name for name in fused)
    for name, tensor in weights.items():
        if "shared_experts" not in name:
            assert fused.pop(name) is tensor
        else:
            for expert in range(EXPERTS, EXPERTS + replicas):
                assert torch.equal(fused.pop(name.replace("shared_experts", f"experts.{expert}")), tensor)
    assert not fused


@pytest.mark.parametrize("shared, replicas", [(2, 1), (2, 3), (4, 1)])
def test_several_shared_experts_add_up_to_the_one_that_holds_them(shared, replicas):
    weights = checkpoint(shared)
    fused = fuse(weights, replicas, n_shared_experts=shared)
    x = torch.rand(5, HIDDEN, dtype=torch.float64)
    for replica in range(replicas):
        experts = [EXPERTS + s * replicas + replica for s in range(shared)]
        total = sum(mlp(x, fused, f"model.layers.1.mlp.experts.{expert}") for expert in experts)
        torch.testing.assert_close(total, mlp(x, weights, "model.layers.1.mlp.shared_experts"), rtol=1e-12, atol=0)
    scale = weights["model.layers.2.mlp.shared_experts.down_proj.weight_scale_inv"]
    last = fused[f"model.layers.2.mlp.experts.{EXPERTS + shared * replicas - 1}.down_proj.weight_scale_inv"]
    assert torch.equal(last, scale[:, -WIDE // 8 :])


def test_holds_at_most_one_tensor():
    alive = set()

    def stream():
        for number, (name, tensor) in enumerate(checkpoint().items()):
            tensor = tensor.clone()
            alive.add(number)
            weakref.finalize(tensor, alive.discard, number)
            yield name, tensor
            del tensor

    gc.collect()
    for _name, tensor in fuse_checkpoint(stream(), 4, num_experts=EXPERTS, progress=False):
        assert len(alive) <= 2  # the previous one may not have been released yet
        del tensor


@pytest.mark.parametrize("as_text", [False, True])
def test_folder_of_files(tmp_path, as_text):
    weights = checkpoint(2)
    half = len(weights) // 2
    save_file(dict(list(weights.items())[:half]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(list(weights.items())[half:]), tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"n_routed_experts": EXPERTS, "n_shared_experts": 2}))
    fused = dict(fuse_checkpoint(str(tmp_path) if as_text else tmp_path, 2, progress=False))
    expected = fuse(weights, 2, n_shared_experts=2)
    assert fused.keys() == expected.keys() and all(torch.equal(fused[name], expected[name]) for name in expected)


def test_single_fp8_file(tmp_path):
    weights = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in checkpoint(scales=False).items()}
    save_file(weights, tmp_path / "all.safetensors")
    fused = fuse(tmp_path / "all.safetensors", 1)
    name = "model.layers.1.mlp.{}.up_proj.weight"
    assert fused[name.format(f"experts.{EXPERTS}")].dtype == torch.float8_e4m3fn
    before, after = weights[name.format("shared_experts")], fused[name.format(f"experts.{EXPERTS}")]
    assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def without(weights, part):
    return {name: tensor for name, tensor in weights.items() if part not in name}


SHARED = "model.layers.2.mlp.shared_experts"
WRONG = {
    "model.layers.2.mlp has routed experts but no shared_experts": lambda w: without(w, "layers.2.mlp.shared_experts"),
    f"{SHARED}.up_proj.weight is missing": lambda w: w if not w.pop(f"{SHARED}.up_proj.weight").numel() else w,
    f"{SHARED}.up_proj.weight_scale_inv is missing": lambda w: without(w, f"{SHARED}.up_proj.weight_scale_inv"),
    r"is \(12, 32\); for 1 shared experts": lambda w: w | {f"{SHARED}.gate_proj.weight": torch.rand(12, HIDDEN)},
    "no tensor of a routed expert": lambda w: without(w, ".mlp.experts"),
    "belongs to an expert with id num_experts": lambda w: (
        w | {"model.layers.1.mlp.experts.4.up_proj.weight": torch.rand(1, 1)}
    ),
    "the layer's other experts have": lambda w: w | {"model.layers.1.mlp.experts.3.up_proj.weight": torch.rand(3, 3)},
    "has shared_experts.down_proj.weight, but no routed": lambda w: without(w, "layers.1.mlp.experts"),
    r"mlp.experts.2.\w+_proj.\w+ is missing; num_experts is 4": lambda w: without(w, "layers.1.mlp.experts.2"),
    r"mlp.experts.3.down_proj.weight_scale_inv is missing": lambda w: without(w, "2.mlp.experts.3.down_proj.weight_s"),
    "shared_experts.down_proj.bias; of an expert, only": lambda w: w | {f"{SHARED}.down_proj.bias": torch.rand(3)},
    "experts.1.up_proj.weight_scale; of an": lambda w: (
        w | {"layers.1.mlp.experts.1.up_proj.weight_scale": torch.rand(3)}
    ),
    r"has shape \(3,\); it must have 2 dimensions": lambda w: (
        w | {f"{SHARED}.down_proj.weight_scale_inv": torch.rand(3)}
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_invalid_checkpoints(message, tmp_path):
    weights = WRONG[message](checkpoint())
    with pytest.raises(ValueError, match=message):
        fuse(weights)
    save_file(weights, tmp_path / "all.safetensors")
    with pytest.raises(ValueError, match=message):  # before the first tensor is read
        fuse_checkpoint(tmp_path, num_experts=EXPERTS)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(num_experts=None), "num_experts is None; it is required"),
        (dict(num_experts=0), "num_experts is 0"),
        (dict(num_replicas=0), "num_replicas is 0"),
        (dict(n_shared_experts=1.0), "n_shared_experts is 1.0"),
        (dict(n_shared_experts=3), "cannot be split into 3"),
    ],
)
def test_invalid_arguments(options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fuse(checkpoint(), **options)


@pytest.mark.parametrize(
    "weights, message",
    [
        (None, "weights is NoneType"),
        ({}, "weights is dict; it must be a path or an iterable"),
        ([1], "weights has the element int; each must be"),
        ([("name", 1)], r"weights has the element \('name', int\); each must be"),
    ],
)
def test_weights_of_a_wrong_type(weights, message):
    with pytest.raises(TypeError, match=message):
        list(fuse_checkpoint(weights, num_experts=EXPERTS, progress=False))


def test_a_name_that_occurs_twice():
    pairs = list(checkpoint().items())
    with pytest.raises(ValueError, match="weights has model.layers.1.mlp.shared_experts.up_proj.weight twice"):
        fuse(pairs + [pair for pair in pairs if "1.mlp.shared_experts.up" in pair[0]])


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="neither a safetensors file"):
        fuse_checkpoint(tmp_path, num_experts=EXPERTS)
    with pytest.raises(FileNotFoundError, match="^weights is .*missing, which is neither"):
        fuse_checkpoint(tmp_path / "missing")


def test_memory_cost_of_the_article():
    """42 MB per expert. The article counts 51 layers, the model card 61."""
    mega, giga = 1 << 20, 1 << 30
    article = memory_cost(num_hidden_layers=51)
    assert article.expert_bytes == 7168 * 2048 * 3 == 42 * mega
    assert article.moe_layers == 48 and article.replicas_bytes == 2016 * mega
    assert int(100 * article.replicas_bytes / giga) == 196  # 1.96 GB, truncated
    cost = memory_cost()
    assert cost.moe_layers == 58 and cost.replicas_bytes == 58 * 42 * mega and cost.extra_bytes == 0


def test_replicas_on_a_rank():
    """With as many replicas as ranks, a rank holds the bytes of one whole expert per layer."""
    cost = memory_cost(8, tensor_parallel_size=8)
    assert cost.replicas_bytes == 58 * cost.expert_bytes
    assert cost.extra_bytes == 58 * cost.expert_bytes * 7 // 8
    assert memory_cost(8, tensor_parallel_size=8, bytes_per_weight=2).extra_bytes == 2 * cost.extra_bytes


def test_memory_cost_of_numpy_integers():
    sizes = dict(num_replicas=4, hidden_size=7168, moe_intermediate_size=2048, first_k_dense_replace=3)
    assert memory_cost(**{name: np.int32(size) for name, size in sizes.items()}) == memory_cost(**sizes)


@pytest.mark.parametrize("wrong", [dict(num_replicas=0), dict(first_k_dense_replace=62), dict(tensor_parallel_size=11)])
def test_memory_cost_invalid_arguments(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        memory_cost(**wrong)


FUSIONS = [("all", 1, 1), ("all", 2, 1), ("round_robin", 1, 3), ("random", 1, 2)]


@pytest.mark.parametrize("policy, shared, replicas", FUSIONS)
def test_the_logits_of_deepseek_v3_stay_the_same(policy, shared, replicas, tmp_path, device):
    """Fuse the checkpoint and the routing of a transformers model and remove its shared expert."""
    transformers = pytest.importorskip("transformers")
    sizes = dict(hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=3, vocab_size=64)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=8)
    moe = dict(n_routed_experts=8, n_shared_experts=shared, n_group=2, topk_group=1, num_experts_per_tok=2)
    config = transformers.DeepseekV3Config(
        **sizes, **heads, **moe, v_head_dim=8, qk_nope_head_dim=8, first_k_dense_replace=1, routed_scaling_factor=2.5
    )
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(config).eval()
    tokens = torch.arange(20).view(2, 10)
    before = model(tokens).logits
    model.save_pretrained(tmp_path)
    fused = dict(fuse_checkpoint(tmp_path, replicas, progress=False))

    count = 8 + shared * replicas
    for number, layer in enumerate(model.model.layers[1:], start=1):
        names = [f"model.layers.{number}.mlp.experts.{expert}" for expert in range(count)]
        gate_up = [torch.cat([fused[f"{n}.gate_proj.weight"], fused[f"{n}.up_proj.weight"]]) for n in names]
        layer.mlp.experts.gate_up_proj = torch.nn.Parameter(torch.stack(gate_up))
        layer.mlp.experts.down_proj = torch.nn.Parameter(torch.stack([fused[f"{n}.down_proj.weight"] for n in names]))
        layer.mlp.experts.num_experts = count
        layer.mlp.shared_experts = torch.nn.Module()
        layer.mlp.shared_experts.forward = torch.zeros_like
        layer.mlp.gate.register_forward_hook(
            lambda module, args, routed: (routed[0], *append(*routed[1:], shared * replicas, policy, device))
        )
    assert not torch.allclose(before, before.roll(1, dims=1), rtol=1e-3)  # the comparison below is not vacuous
    torch.testing.assert_close(model(tokens).logits, before, rtol=1e-4, atol=1e-5)


def append(weights, ids, count, policy, device):
    """Fuse the routing. The model's weights include the scaling factor, so shared experts have weight 1."""
    weights, ids = fuse_routing(weights.detach().to(device), ids.int().to(device), 8, count, 1.0, policy)
    return weights.cpu(), ids.long().cpu()
