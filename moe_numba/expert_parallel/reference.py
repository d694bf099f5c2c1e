"""Expert parallelism in torch: the ground truth.

A **rank** is a GPU of the group. Experts lie on the ranks in equal consecutive parts.
"""

import torch


def dispatch_layout(topk_idx, num_ranks, num_experts):
    """Count the tokens of each rank and of each expert, and say which token goes to which rank.

    Parameters
    ----------
    topk_idx : tensor [tokens, topk], int64
        The experts of each token; what is not in 0..num_experts-1 is no expert.
    num_ranks, num_experts : int
        ``num_experts`` is a multiple of ``num_ranks``.

    Returns
    -------
    num_tokens_per_rank : tensor [num_ranks], int32
        A token counts once for a rank, however many of its experts are there.
    num_tokens_per_expert : tensor [num_experts], int32
    is_token_in_rank : tensor [tokens, num_ranks], bool
    """
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    experts = topk_idx.where(is_expert, num_experts)  # one more expert, on one more rank, for what is no expert
    num_tokens_per_expert = torch.bincount(experts.flatten(), minlength=num_experts + 1)[:num_experts]

    is_token_in_rank = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    is_token_in_rank.scatter_(1, experts // (num_experts // num_ranks), True)
    is_token_in_rank = is_token_in_rank[:, :num_ranks].contiguous()
    return is_token_in_rank.sum(dim=0, dtype=torch.int32), num_tokens_per_expert.to(torch.int32), is_token_in_rank
