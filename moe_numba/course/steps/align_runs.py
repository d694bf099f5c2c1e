"""Inputs, poisoned outputs and checks of the alignment's notebooks."""

import torch

from moe_numba.align.reference import mismatch, sizes

POISON = -7  # neither a slot nor an expert


def random_ids(tokens: int, num_experts: int, topk: int, device: str = "cpu") -> torch.Tensor:
    """Return distinct experts for each token, as a gate chooses them: int32, shape (tokens, topk)."""
    scores = torch.rand(tokens, num_experts, device=device)
    return scores.argsort(dim=1)[:, :topk].to(torch.int32).contiguous()


def poisoned(ids: torch.Tensor, num_experts: int, block_size: int) -> tuple[torch.Tensor, ...]:
    """Return outputs that no kernel leaves as they are: sorted_token_ids, expert_ids, num_tokens_post_pad."""
    lengths = *sizes(ids.numel(), block_size, num_experts), 1
    return tuple(torch.full((length,), POISON, dtype=torch.int32, device=ids.device) for length in lengths)


def wrong(outputs: tuple, ids: torch.Tensor, num_experts: int, block_size: int) -> str | None:
    """Compare an alignment with the reference; return None, or a sentence on the first error.

    ``outputs`` are the three tensors and, behind them, what the kernel does not promise: "any order" accepts the slots
    of an expert in any order, "any tail" accepts anything past ``num_tokens_post_pad``.
    """
    sorted_token_ids, expert_ids, total, *relaxed = outputs
    if unknown := set(relaxed) - {"any order", "any tail"}:
        raise ValueError(f"outputs end with {unknown}; known are 'any order' and 'any tail'")
    options = {"any_order": "any order" in relaxed, "any_tail": "any tail" in relaxed}
    return mismatch(sorted_token_ids, expert_ids, total, ids, block_size, num_experts, **options)
