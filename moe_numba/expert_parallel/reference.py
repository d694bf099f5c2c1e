"""Reference implementation of expert parallelism in torch: dispatch layout, dispatch, combine, and the FP8 casts.

A **rank** is a GPU of the group. Each rank holds an equal range of consecutive experts.
"""

from typing import NamedTuple

import torch


def dispatch_layout(topk_idx, num_ranks, num_experts):
    """Count the tokens that go to each rank and to each expert.

    Parameters
    ----------
    topk_idx : torch.Tensor [tokens, topk], int64
        The experts of each token; values outside 0..num_experts-1 are ignored.
    num_ranks, num_experts : int
        ``num_experts`` is a multiple of ``num_ranks``.

    Returns
    -------
    num_tokens_per_rank : torch.Tensor [num_ranks], int32
        A token counts once per rank, even if several of its experts are on that rank.
    num_tokens_per_expert : torch.Tensor [num_experts], int32
    is_token_in_rank : torch.Tensor [tokens, num_ranks], bool
    """
    is_expert = (topk_idx >= 0) & (topk_idx < num_experts)
    experts = topk_idx.where(is_expert, num_experts)  # invalid entries map to an extra expert on an extra rank
    num_tokens_per_expert = torch.bincount(experts.flatten(), minlength=num_experts + 1)[:num_experts]

    is_token_in_rank = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    is_token_in_rank.scatter_(1, experts // (num_experts // num_ranks), True)
    is_token_in_rank = is_token_in_rank[:, :num_ranks].contiguous()
    return is_token_in_rank.sum(dim=0, dtype=torch.int32), num_tokens_per_expert.to(torch.int32), is_token_in_rank


class Received(NamedTuple):
    """The result of a dispatch on one rank: rows ordered by source rank, then by token."""

    x: torch.Tensor | tuple[torch.Tensor, ...]  # [rows, hidden], or a tuple of such tensors
    topk_idx: torch.Tensor | None  # [rows, topk], int64: indices of this rank's own experts, or -1
    topk_weights: torch.Tensor | None  # [rows, topk], 0 where topk_idx is -1
    src_idx: torch.Tensor  # [rows], int32: the token's index on its source rank
    rank_prefix_matrix: torch.Tensor  # [ranks, ranks], int32: (i, j) is the number of rows from ranks 0 to i to rank j


def dispatch(x, is_token_in_rank, topk_idx=None, topk_weights=None, num_experts=None):
    """Send each token to its destination ranks; all arguments are lists with one entry per rank.

    Parameters
    ----------
    x : list of torch.Tensor [tokens, hidden], or list of tuples of tensors such as (values, scales)
    is_token_in_rank : list of torch.Tensor [tokens, ranks], bool
    topk_idx, topk_weights : list of torch.Tensor [tokens, topk], optional
    num_experts : int, optional
        Experts of all ranks; required with ``topk_idx``.

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
            is_local = (own_idx >= 0) & (own_idx < experts)
            own_idx, own_weights = own_idx.where(is_local, -1), own_weights.where(is_local, 0)
        src_idx = torch.cat(sources).to(torch.int32)
        results.append(Received(rows, own_idx, own_weights, src_idx, rank_prefix_matrix))
    return results


def combine(y, received, num_tokens, topk_weights=None, biases=None):
    """Send rows back to their source ranks and sum each token's rows; arguments are lists with one entry per rank.

    Parameters
    ----------
    y : list of torch.Tensor [rows, hidden]
        The expert output for each row that a rank received.
    received : list of Received
    num_tokens : list of int
        Tokens of each rank.
    topk_weights : list of torch.Tensor [rows, topk], optional
    biases : list of tuples of torch.Tensor [tokens, hidden], optional
        Added to each token.

    Returns
    -------
    list of (torch.Tensor [tokens, hidden], float64; torch.Tensor [tokens, topk], float64, or None)
    """
    results = []
    for rank, count in enumerate(num_tokens):
        total = torch.zeros(count, y[rank].shape[1], dtype=torch.float64, device=y[rank].device)
        for bias in biases[rank] if biases else ():
            total += bias
        weights = None
        if topk_weights is not None:
            weights = torch.zeros(count, topk_weights[rank].shape[1], dtype=torch.float64, device=total.device)
        for peer, at_peer in enumerate(received):
            first = int(at_peer.rank_prefix_matrix[rank - 1, peer]) if rank else 0
            rows = slice(first, int(at_peer.rank_prefix_matrix[rank, peer]))
            tokens = at_peer.src_idx[rows].long()
            total.index_add_(0, tokens, y[peer][rows].double())
            if weights is not None:
                weights.index_add_(0, tokens, topk_weights[peer][rows].double())
        results.append((total, weights))
    return results
