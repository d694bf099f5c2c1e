"""Reference implementation in torch of appending shared experts to a routing, and of the layer around it.

Policies "random" and "round_robin" append one column: they choose one of several replicas of a shared expert, each of
which computes its whole output. Policy "all" appends one column per distinct shared expert.
"""

import torch

from moe_numba.gate.reference import random_uint32

POLICIES = ("all", "round_robin", "random")


def num_columns(num_fused_shared_experts, policy):
    """Return the number of columns that a policy appends."""
    return num_fused_shared_experts if policy == "all" else 1


def fuse_routing(
    topk_weights, topk_ids, num_experts, num_fused_shared_experts=1, routed_scaling_factor=1.0, policy="all", seed=0
):
    """Append shared experts to a routing; see :func:`moe_numba.shared_experts.fuse_routing` for the arguments."""
    tokens, device = len(topk_ids), topk_ids.device
    routed_scaling_factor = 1.0 if routed_scaling_factor is None else routed_scaling_factor
    if policy == "all":
        chosen = torch.arange(num_fused_shared_experts, device=device).expand(tokens, -1)
    elif policy == "round_robin":
        chosen = torch.arange(tokens, device=device)[:, None] % num_fused_shared_experts
    else:
        chosen = (random_uint32(tokens, seed) * num_fused_shared_experts >> 32)[:, None].to(device)
    padding = topk_ids[:, :1] < 0
    ids = (chosen + num_experts).masked_fill(padding, -1).to(torch.int32)
    topk_ids = topk_ids.long().masked_fill(topk_ids != topk_ids.int(), -1).int()  # invalid if int32 cannot hold it
    weights = torch.full(ids.shape, 1.0 / routed_scaling_factor, dtype=topk_weights.dtype, device=device)
    return torch.cat([topk_weights, weights.masked_fill(padding, 0.0)], dim=1), torch.cat([topk_ids, ids], dim=1)


def mlp(x, gate, up, down):
    """Compute the SwiGLU MLP of an expert for tokens [tokens, hidden]."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def moe_experts(x, topk_weights, topk_ids, matrices):
    """Compute the weighted sum over each token's experts; ``matrices`` holds (gate, up, down) per expert."""
    total = torch.zeros_like(x)
    for expert, weights in enumerate(matrices):
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)
        total.index_add_(0, tokens, mlp(x[tokens], *weights) * topk_weights[tokens, column, None].to(x.dtype))
    return total


def forward_normal(x, topk_weights, topk_ids, routed, shared, routed_scaling_factor):
    """Compute the layer before the fusion: scaled routed experts plus the shared experts."""
    total = moe_experts(x, topk_weights, topk_ids, routed) * routed_scaling_factor
    for weights in shared:
        total = total + mlp(x, *weights)
    return total
