"""Checks of what the article on shared experts says about code and about DeepSeek-V3's sizes."""

from functools import cache

import torch

from moe_numba.course.verdicts import Found
from moe_numba.shared_experts import memory_cost

GIBI, MEBI = 1 << 30, 1 << 20
SCALING = 2.5  # routed_scaling_factor


def layer_error(ninth_weight: float) -> float:
    """Return the largest difference, relative to the outputs, that folding in the shared expert makes in float64.

    The separate layer adds the shared expert's output to the scaled sum of the routed ones. The folded one has it as
    one more expert, with this weight for all tokens.
    """
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, experts, topk = 32, 16, 8, 2
    x = torch.randn(tokens, hidden, dtype=torch.float64, generator=generator)
    matrices = torch.randn(experts + 1, hidden, hidden, dtype=torch.float64, generator=generator)
    weights, ids = torch.rand(tokens, experts, dtype=torch.float64, generator=generator).topk(topk)
    outputs = torch.einsum("th,eho->teo", x, matrices)

    def weighted(weights, ids):
        return (outputs.gather(1, ids[:, :, None].expand(-1, -1, hidden)) * weights[:, :, None]).sum(dim=1)

    separate = weighted(weights, ids) * SCALING + outputs[:, experts]
    ninth = torch.full((tokens, 1), ninth_weight, dtype=torch.float64)
    folded = weighted(torch.cat([weights, ninth], 1), torch.cat([ids, torch.full((tokens, 1), experts)], 1)) * SCALING
    return float((folded - separate).abs().max() / separate.abs().max())


def error_of_the_fusion() -> Found:
    error = layer_error(1 / SCALING)
    return Found(error, f"differs by {error:.1e} of the largest output, in float64")


def error_without_the_division() -> Found:
    error = layer_error(1.0)
    return Found(error, f"with a ninth weight of 1 it differs by {error:.2g} of the largest output")


@cache
def _ninth_column(copies: int = 8, num_experts: int = 256, tokens: int = 4096) -> torch.Tensor:
    """Draw the shared experts of all tokens as the article's line does."""
    torch.manual_seed(0)
    topk_ids = torch.zeros(tokens, 9, dtype=torch.int32)
    topk_ids[:, -1] = torch.randint(num_experts, num_experts + copies, (tokens,), dtype=torch.int32)
    return topk_ids[:, -1]


def ninth_outside() -> Found:
    column = _ninth_column()
    outside = int(((column < 256) | (column >= 264)).sum())
    return Found(outside, f"ids {int(column.min())} to {int(column.max())} in {len(column)} rows")


def fullest_replica() -> Found:
    column = _ninth_column()
    most = 100 * int((column - 256).bincount().max()) / len(column)
    return Found(most, f"the fullest of 8 copies gets {most:.1f} % of {len(column)} tokens; a single one gets all")


def shared_over_routed() -> Found:
    """Compare the intermediate sizes of the shared and of a routed expert in DeepSeek-V3's configuration."""
    moe_intermediate_size = 2048
    v3, v2 = (n * moe_intermediate_size / moe_intermediate_size for n in (1, 2))  # n_shared_experts
    return Found(v3, f"{v3:g} times the rows with V3's and R1's one shared expert, {v2:g} times with two, as in V2")


def names_left() -> Found:
    """Rename the shared experts of a toy checkpoint as the listing of load_weights does; count those that remain."""
    suffixes = [f"{projection}_proj.weight" for projection in ("down", "gate", "up")]
    layers, copies, routed = range(3, 6), 2, 4
    own = "model.layers.{}.mlp.shared_experts.{}"
    weights = [(own.format(layer, suffix), layer) for layer in layers for suffix in suffixes]
    weights += [(f"model.layers.{n}.mlp.experts.{e}.{s}", e) for n in layers for e in range(routed) for s in suffixes]
    by_name, removed = dict(weights), []
    for layer in layers:
        for copy in range(copies):
            for suffix in suffixes:
                name = f"model.layers.{layer}.mlp.experts.{routed + copy}.{suffix}"
                weights.append((name, by_name[own.format(layer, suffix)]))
            removed += [own.format(layer, suffix) for suffix in suffixes]
    weights = [weight for weight in weights if weight[0] not in removed]
    left = sum("shared_experts" in name for name, _ in weights)
    return Found(left, f"{left} of {len(layers) * len(suffixes)} remain; {len(weights)} tensors in all")


def expert_megabytes() -> Found:
    size = 7168 * 2048 * 3 / MEBI
    return Found(size, f"7168 x 2048 x 3 bytes are {size:g} MiB")


def articles_gigabytes() -> Found:
    size = (51 - 3) * 42 / 1024
    return Found(size, f"{(51 - 3) * 42} / 1024 = {size:.3f}")


def moe_layers() -> Found:
    layers = memory_cost().moe_layers
    return Found(layers, f"{layers}: DeepSeek-V3 has 61 layers, 3 of them without experts")


def experts_more_on_a_rank() -> Found:
    cost = memory_cost(8, tensor_parallel_size=8)
    more = cost.replicas_bytes / cost.moe_layers / cost.expert_bytes
    net = cost.extra_bytes / cost.moe_layers / cost.expert_bytes
    share = f"{more - net:g} of a shared expert, which each rank held before, is removed: {net:g} net"
    return Found(more, f"{more:g} per layer with TP8 and 8 copies; {share}")


def gigabytes_more_on_a_rank() -> Found:
    eight, one = (memory_cost(n, tensor_parallel_size=8).extra_bytes / GIBI for n in (8, 1))
    return Found(eight, f"{eight:.2f} GiB for all layers with TP8 and 8 copies, {one:g} without copies")
