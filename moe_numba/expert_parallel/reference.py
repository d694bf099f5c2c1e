"""Expert parallelism in torch: the ground truth.

A **rank** is a GPU of the group. Experts lie on the ranks in equal consecutive parts.
"""

from typing import NamedTuple

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


class Received(NamedTuple):
    """What a rank has after a dispatch: rows by source rank, and those of one rank in the order of its tokens."""

    x: object  # [rows, hidden], or a tuple of such tensors
    topk_idx: torch.Tensor | None  # [rows, topk], int64: numbers of this rank's own experts, or -1
    topk_weights: torch.Tensor | None  # [rows, topk], 0 where topk_idx is -1
    src_idx: torch.Tensor  # [rows], int32: which of its rank's tokens a row is
    rank_prefix_matrix: torch.Tensor  # [ranks, ranks], int32: (i, j) is how many rows rank j has of ranks 0 to i


def dispatch(x, is_token_in_rank, topk_idx=None, topk_weights=None, num_experts=None):
    """Send each token to the ranks that it names; all arguments are lists with an entry for each rank.

    Parameters
    ----------
    x : list of tensor [tokens, hidden], or of tuples of tensors that go together, such as values and scales
    is_token_in_rank : list of tensor [tokens, ranks], bool
    topk_idx, topk_weights : list of tensor [tokens, topk], optional
    num_experts : int, optional
        Of all ranks; needed with ``topk_idx``.

    Returns
    -------
    list of Received
    """
    ranks = len(x)
    counts = torch.stack([chosen.sum(dim=0) for chosen in is_token_in_rank])
    rank_prefix_matrix = counts.cumsum(dim=0).to(torch.int32)

    def gather(parts, sources):
        return torch.cat([part[source] for part, source in zip(parts, sources)])

    results = []
    for rank in range(ranks):
        sources = [chosen[:, rank].nonzero().flatten() for chosen in is_token_in_rank]
        if isinstance(x[0], tuple):
            rows = tuple(gather(parts, sources) for parts in zip(*x))
        else:
            rows = gather(x, sources)
        own_idx = own_weights = None
        if topk_idx is not None:
            experts = num_experts // ranks
            own_idx, own_weights = gather(topk_idx, sources) - rank * experts, gather(topk_weights, sources)
            is_own = (own_idx >= 0) & (own_idx < experts)
            own_idx, own_weights = own_idx.where(is_own, -1), own_weights.where(is_own, 0)
        src_idx = torch.cat(sources).to(torch.int32)
        results.append(Received(rows, own_idx, own_weights, src_idx, rank_prefix_matrix))
    return results


def combine(y, received, num_tokens, topk_weights=None, biases=None):
    """Bring each token's rows back, and add them up; arguments are lists with an entry for each rank.

    Parameters
    ----------
    y : list of tensor [rows, hidden]
        For each row that a rank received, what came of it.
    received : list of Received
    num_tokens : list of int
        How many tokens each rank had.
    topk_weights : list of tensor [rows, topk], optional
    biases : list of tuples of tensors [tokens, hidden], optional
        What is added to each token.

    Returns
    -------
    list of (tensor [tokens, hidden], float64; tensor [tokens, topk], float64, or None)
    """
    results = []
    for rank, tokens in enumerate(num_tokens):
        total = torch.zeros(tokens, y[rank].shape[1], dtype=torch.float64, device=y[rank].device)
        for bias in biases[rank] if biases else ():
            total += bias
        weights = None
        if topk_weights is not None:
            weights = torch.zeros(tokens, topk_weights[rank].shape[1], dtype=torch.float64, device=total.device)
        for peer, there in enumerate(received):
            first = int(there.rank_prefix_matrix[rank - 1, peer]) if rank else 0
            rows = slice(first, int(there.rank_prefix_matrix[rank, peer]))
            tokens_there = there.src_idx[rows].long()
            total.index_add_(0, tokens_there, y[peer][rows].double())
            if weights is not None:
                weights.index_add_(0, tokens_there, topk_weights[peer][rows].double())
        results.append((total, weights))
    return results
