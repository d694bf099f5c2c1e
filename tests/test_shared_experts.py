"""Shared experts as routed ones: the checkpoint, and what they cost."""

import gc
import json
import weakref

import pytest
import torch
from safetensors.torch import save_file

from moe_numba.shared_experts import fuse_checkpoint, memory_cost

EXPERTS, HIDDEN, WIDE = 4, 32, 16
PROJECTIONS = {"gate_proj": (WIDE, HIDDEN), "up_proj": (WIDE, HIDDEN), "down_proj": (HIDDEN, WIDE)}


def checkpoint(shared=1, scales=True, layers=(1, 2)):
    """A small checkpoint of DeepSeek-V3's shape: a dense layer, then layers with experts."""
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


def test_no_more_than_one_tensor_is_held():
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
        assert len(alive) <= 2  # the one that was given out before may not have been let go yet
        del tensor


@pytest.mark.parametrize("as_text", [False, True])
def test_files(tmp_path, as_text):
    weights = checkpoint(2)
    half = len(weights) // 2
    save_file(dict(list(weights.items())[:half]), tmp_path / "model-00001-of-00002.safetensors")
    save_file(dict(list(weights.items())[half:]), tmp_path / "model-00002-of-00002.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"n_routed_experts": EXPERTS, "n_shared_experts": 2}))
    fused = dict(fuse_checkpoint(str(tmp_path) if as_text else tmp_path, 2, progress=False))
    right = fuse(weights, 2, n_shared_experts=2)
    assert fused.keys() == right.keys() and all(torch.equal(fused[name], right[name]) for name in right)


def test_one_file_of_fp8(tmp_path):
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
    "no tensor is of a routed expert": lambda w: without(w, ".mlp.experts"),
    "is of an expert past num_experts": lambda w: w | {"model.layers.1.mlp.experts.4.up_proj.weight": torch.rand(1, 1)},
    "the layer's other experts have": lambda w: w | {"model.layers.1.mlp.experts.3.up_proj.weight": torch.rand(3, 3)},
    "has shared_experts.down_proj.weight, but no routed": lambda w: without(w, "layers.1.mlp.experts"),
}


@pytest.mark.parametrize("sentence", WRONG)
def test_wrong_checkpoints(sentence, tmp_path):
    weights = WRONG[sentence](checkpoint())
    with pytest.raises(ValueError, match=sentence):
        fuse(weights)
    save_file(weights, tmp_path / "all.safetensors")
    with pytest.raises(ValueError, match=sentence):  # before the first tensor is asked for
        fuse_checkpoint(tmp_path, num_experts=EXPERTS)


@pytest.mark.parametrize(
    "options, sentence",
    [
        (dict(num_experts=None), "num_experts must be given"),
        (dict(num_experts=0), "num_experts is 0"),
        (dict(num_replicas=0), "num_replicas is 0"),
        (dict(n_shared_experts=1.0), "n_shared_experts is 1.0"),
        (dict(n_shared_experts=3), "cannot be taken apart into 3"),
    ],
)
def test_wrong_arguments(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        fuse(checkpoint(), **options)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no safetensors file"):
        fuse_checkpoint(tmp_path, num_experts=EXPERTS)


def test_the_documents_arithmetic():
    """42 MB an expert; the document counts 51 layers, the model card 61."""
    mega, giga = 1 << 20, 1 << 30
    theirs = memory_cost(num_hidden_layers=51)
    assert theirs.expert_bytes == 7168 * 2048 * 3 == 42 * mega
    assert theirs.moe_layers == 48 and theirs.replicas_bytes == 2016 * mega
    assert int(100 * theirs.replicas_bytes / giga) == 196  # 1.96 GB, its last digit cut off
    cost = memory_cost()
    assert cost.moe_layers == 58 and cost.replicas_bytes == 58 * 42 * mega and cost.extra_bytes == 0


def test_replicas_on_a_rank():
    """As many replicas as ranks, each cut into as many parts: a rank holds one expert's worth for a layer."""
    cost = memory_cost(8, tensor_parallel_size=8)
    assert cost.replicas_bytes == 58 * cost.expert_bytes
    assert cost.extra_bytes == 58 * cost.expert_bytes * 7 // 8
    assert memory_cost(8, tensor_parallel_size=8, bytes_per_weight=2).extra_bytes == 2 * cost.extra_bytes


@pytest.mark.parametrize("wrong", [dict(num_replicas=0), dict(first_k_dense_replace=62), dict(tensor_parallel_size=11)])
def test_wrong_costs(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        memory_cost(**wrong)
