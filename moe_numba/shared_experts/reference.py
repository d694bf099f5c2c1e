"""Shared experts appended to a routing, in torch: the ground truth.

Replicas of one shared expert are chosen between, since each of them gives its whole output: policies "random" and
"round_robin" append one column. Distinct shared experts are all added: policy "all" appends a column for each.
"""

import torch

POLICIES = ("all", "round_robin", "random")
_WORD = (1 << 32) - 1


def columns(num_fused_shared_experts, policy):
    """How many columns a policy appends."""
    return num_fused_shared_experts if policy == "all" else 1


def random_words(tokens, seed):
    """A word of 32 random bits for each token, which the seed and the token's number decide: int64, 0 to 2**32 - 1.

    Twice the finisher of MurmurHash3, which lets each bit of its input change each bit of its output.
    """
    words = _finish(torch.arange(tokens, dtype=torch.int64) ^ (seed & _WORD))
    return _finish((words + (seed >> 32 & _WORD)) & _WORD)


def _finish(words):
    words = words ^ (words >> 16)
    words = words * 0x85EBCA6B & _WORD
    words = words ^ (words >> 13)
    words = words * 0xC2B2AE35 & _WORD
    return words ^ (words >> 16)


def fuse_routing(
    topk_weights, topk_ids, num_experts, num_fused_shared_experts=1, routed_scaling_factor=1.0, policy="all", seed=0
):
    """Append shared experts to a routing; the arguments are :func:`moe_numba.shared_experts.fuse_routing`'s."""
    tokens, device = len(topk_ids), topk_ids.device
    if policy == "all":
        chosen = torch.arange(num_fused_shared_experts, device=device).expand(tokens, -1)
    elif policy == "round_robin":
        chosen = torch.arange(tokens, device=device)[:, None] % num_fused_shared_experts
    else:
        chosen = (random_words(tokens, seed) * num_fused_shared_experts >> 32)[:, None].to(device)
    padding = topk_ids[:, :1] < 0
    ids = (chosen + num_experts).masked_fill(padding, -1).to(topk_ids.dtype)
    weights = torch.full(ids.shape, 1.0 / routed_scaling_factor, dtype=topk_weights.dtype, device=device)
    return torch.cat([topk_weights, weights.masked_fill(padding, 0.0)], dim=1), torch.cat([topk_ids, ids], dim=1)


def mlp(x, gate, up, down):
    """What an expert, routed or shared, makes of its tokens [tokens, hidden]."""
    return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def experts(x, topk_weights, topk_ids, matrices):
    """The weighted sum over each token's experts; ``matrices`` has (gate, up, down) for each expert."""
    total = torch.zeros_like(x)
    for expert, own in enumerate(matrices):
        tokens, column = (topk_ids == expert).nonzero(as_tuple=True)
        total.index_add_(0, tokens, mlp(x[tokens], *own) * topk_weights[tokens, column, None].to(x.dtype))
    return total


def forward_normal(x, topk_weights, topk_ids, routed, shared, routed_scaling_factor):
    """The layer before the fusion: routed experts, scaled, and then the shared experts, each added."""
    total = experts(x, topk_weights, topk_ids, routed) * routed_scaling_factor
    for own in shared:
        total = total + mlp(x, *own)
    return total
