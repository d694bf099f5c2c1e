"""Load a checkpoint whose shared experts become routed experts, by the article's code and by `fuse_checkpoint`.

Run it with ``python docs/examples/shared_expert_weights.py``; it needs no GPU. It also computes the memory of replicas.
"""

import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from moe_numba.shared_experts import fuse_checkpoint, memory_cost, reference

MODEL = SimpleNamespace(
    num_hidden_layers=3,
    first_k_dense_replace=1,
    moe_layer_freq=1,
    n_routed_experts=8,
    n_shared_experts=1,
    hidden_size=64,
    moe_intermediate_size=32,
)
MEBI, GIBI = 1 << 20, 1 << 30


def make_checkpoint(file: Path, model: SimpleNamespace, scales: bool = True) -> None:
    """Write a small checkpoint with DeepSeek-V3's names."""
    hidden, wide, tensors = model.hidden_size, model.moe_intermediate_size, {}
    random = torch.Generator().manual_seed(0)
    for layer in range(model.first_k_dense_replace, model.num_hidden_layers):
        for expert in [*(f"experts.{e}" for e in range(model.n_routed_experts)), "shared_experts"]:
            own = wide * (model.n_shared_experts if expert == "shared_experts" else 1)
            for part, shape in (("gate", (own, hidden)), ("up", (own, hidden)), ("down", (hidden, own))):
                name = f"model.layers.{layer}.mlp.{expert}.{part}_proj.weight"
                tensors[name] = torch.rand(shape, generator=random) / hidden
                if scales:
                    tensors[f"{name}_scale_inv"] = torch.rand([n // 16 for n in shape], generator=random)
    save_file(tensors, file)


def article_load_weights(self, weights):
    """Return the pairs of name and tensor that the article's part of ``load_weights`` goes on with."""
    if self.n_share_experts_fusion != 0:
        weights_list = list(weights)
        weights_dict = dict(weights_list)
        suffix_list = [
            "down_proj.weight",
            "down_proj.weight_scale_inv",
            "gate_proj.weight",
            "gate_proj.weight_scale_inv",
            "up_proj.weight",
            "up_proj.weight_scale_inv",
        ]
        names_to_remove = []
        for moe_layer in range(
            self.config.first_k_dense_replace, self.config.num_hidden_layers, self.config.moe_layer_freq
        ):
            for num_repeat in range(self.n_share_experts_fusion):
                for suffix in suffix_list:
                    weights_list.append(
                        (
                            f"model.layers.{moe_layer}."
                            f"mlp.experts."
                            f"{self.config.n_routed_experts + num_repeat}"
                            f".{suffix}",
                            weights_dict[f"model.layers.{moe_layer}.mlp.shared_experts.{suffix}"].clone(),
                        )
                    )
                names_to_remove += [f"model.layers.{moe_layer}.mlp.shared_experts.{suffix}" for suffix in suffix_list]
        weights = [w for w in weights_list if w[0] not in names_to_remove]
    return weights


class Watched:
    """Reads a checkpoint, and counts the bytes that are held at the same time."""

    def __init__(self, file: Path):
        self.file, self.held, self.most = file, 0, 0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        with safe_open(self.file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  not a dictionary
                yield name, self.watch(opened.get_tensor(name))

    def watch(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor until it is released."""
        self._count(tensor.nbytes)
        weakref.finalize(tensor, self._count, -tensor.nbytes)
        return tensor

    def _count(self, num_bytes):
        self.held += num_bytes
        self.most = max(self.most, self.held)


def load(load_weights: Callable, model: SimpleNamespace, scales: bool = True) -> tuple[dict, int]:
    """Load a small checkpoint; return the bytes of each tensor by name, and the most bytes of it that were held."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(file := Path(folder) / "model.safetensors", model, scales)
        loaded, watched = {}, Watched(file)
        for name, tensor in load_weights(watched):
            loaded[name] = tensor.contiguous().numpy().tobytes()
            del tensor
        return loaded, watched.most


def load_both(model: SimpleNamespace, replicas: int, scales: bool = True) -> list[tuple[dict, int]]:
    """Load a checkpoint by the article's code and by `fuse_checkpoint`."""
    server = SimpleNamespace(config=model, n_share_experts_fusion=replicas)
    experts = dict(num_experts=model.n_routed_experts, n_shared_experts=model.n_shared_experts)
    return [
        load(lambda weights: article_load_weights(server, weights), model, scales),
        load(lambda weights: fuse_checkpoint(weights, replicas, **experts, progress=False), model, scales),
    ]


def compare_loaders() -> None:
    """Print whether both return the same tensors, and how much each holds."""
    (theirs, held_by_theirs), (ours, held) = load_both(MODEL, replicas=8)
    print(f"the same {len(ours)} tensors: {theirs == ours}")
    print(f"bytes of the file held at once: the article's code {held_by_theirs:,}, fuse_checkpoint {held:,}")
    layers, suffixes, replicas = memory_cost().moe_layers, 6, 8
    entries, names = layers * (256 + replicas + 1) * suffixes, layers * replicas * suffixes
    print(f"names to look up for DeepSeek-V3: {entries:,} in a list of {names:,}, of which {names // replicas} differ")
    print(f"clones in host memory, of each process: {memory_cost(replicas).replicas_bytes / GIBI:.1f} GiB")


def checkpoints_that_fail() -> None:
    """Print what becomes of a checkpoint without scales, and of one with two shared experts."""
    server = SimpleNamespace(config=MODEL, n_share_experts_fusion=1)
    try:
        load(lambda weights: article_load_weights(server, weights), MODEL, scales=False)
    except KeyError as error:
        print(f"without scales, the article's code: KeyError: {error}")
    two = SimpleNamespace(**vars(MODEL) | {"n_shared_experts": 2})
    (theirs, _), (ours, _) = load_both(two, replicas=1)
    for name, loaded in (("the article's code", theirs), ("fuse_checkpoint", ours)):
        sizes = {e: len(loaded.get(f"model.layers.1.mlp.experts.{e}.up_proj.weight", b"")) for e in (0, 8, 9)}
        print(f"two shared experts, {name}: bytes of up_proj of experts 0, 8 and 9: {list(sizes.values())}")


def two_are_one_of_twice_the_width() -> None:
    """Print the difference between an MLP and the sum of its halves."""
    random = torch.Generator().manual_seed(0)
    make = lambda *size: torch.randn(size, generator=random, dtype=torch.float64)
    x, gate, up, down = make(5, 64), make(64, 64), make(64, 64), make(64, 64)
    whole = reference.mlp(x, gate, up, down)
    halves = sum(reference.mlp(x, gate[part], up[part], down[:, part]) for part in (slice(32), slice(32, 64)))
    print(f"two halves of an MLP: relative difference {float((halves - whole).norm() / whole.norm()):.4f}")


def memory() -> None:
    """Print the article's computation of the memory of replicas, and ours."""
    theirs, all_layers = memory_cost(num_hidden_layers=51), memory_cost()
    replicas, one = (memory_cost(n, tensor_parallel_size=8) for n in (8, 1))
    print(f"an expert in FP8: {theirs.expert_bytes / MEBI:g} MiB")
    for name, layers, num_bytes in (
        ("the article: 51 layers, one more expert in each", theirs.moe_layers, theirs.replicas_bytes),
        ("61 layers, one more expert in each", all_layers.moe_layers, all_layers.replicas_bytes),
        ("8 replicas on 8 GPUs, less the part that was there", replicas.moe_layers, replicas.extra_bytes),
        ("one shared expert, fused", one.moe_layers, one.extra_bytes),
    ):
        print(f"{name:<51} {layers} x {num_bytes / layers / MEBI:5.2f} MiB = {num_bytes / GIBI:.2f} GiB")


if __name__ == "__main__":
    compare_loaders()
    checkpoints_that_fail()
    two_are_one_of_twice_the_width()
    memory()
