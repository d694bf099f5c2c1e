"""Reference implementation of the layer in torch: grouping, activation, weighted sum, and a loop over the experts."""

import torch


def group_by_expert(topk_ids, num_experts):
    """Group assignments by expert; see :func:`moe_numba.group_by_expert`."""
    tokens, topk = topk_ids.shape
    flat = topk_ids.reshape(-1).long()
    valid = (flat >= 0) & (flat < num_experts)
    order = torch.where(valid, flat, num_experts).sort(stable=True).indices
    seqlens = torch.bincount(flat[valid], minlength=num_experts)
    cu_seqlens = torch.cat([seqlens.new_zeros(1), seqlens.cumsum(0)])
    rows = int(cu_seqlens[-1])
    gather_indices = torch.full_like(flat, -1)
    gather_indices[:rows] = order[:rows] // topk
    inverse_indices = torch.full_like(flat, -1)
    inverse_indices[order[:rows]] = torch.arange(rows, device=flat.device)
    outputs = seqlens, cu_seqlens, gather_indices, inverse_indices.view(tokens, topk)
    return tuple(tensor.int() for tensor in outputs)


def weighted_sum(rows, inverse_indices, topk_weights, shared=None):
    """Sum rows per token; see :func:`moe_numba.weighted_sum`.

    A product of a bfloat16 and a float32 is exact in float64, so each step equals a fused multiply-add.
    """
    tokens, topk = inverse_indices.shape
    total = torch.zeros(tokens, rows.shape[1], device=rows.device)
    for k in range(topk):
        index = inverse_indices[:, k].long()
        valid = (index >= 0) & (index < len(rows))
        product = topk_weights[valid, k, None].double() * rows[index[valid]].double()
        total[valid] = (total[valid].double() + product).float()
    if shared is not None:
        total = total + shared.float()
    return total.bfloat16()


def silu_and_mul(x):
    """Return ``silu(gate) * up`` in float32 for [rows, 2 * columns], gate first."""
    gate, up = x.float().chunk(2, dim=1)
    return torch.nn.functional.silu(gate) * up
