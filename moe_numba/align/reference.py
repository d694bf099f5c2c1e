"""Aligning a routing to blocks, in torch: the ground truth, and the check that every kernel must pass.

A **slot** is one element of ``topk_ids``: token ``slot // topk``, choice ``slot % topk``.
"""

import torch


def sizes(numel, block_size, num_experts, pad_sorted_ids=True, ignore_invalid_experts=False):
    """How long the outputs must be whatever the routing: (sorted_token_ids, expert_ids).

    Every bucket may end in a block that holds one slot only; but no more buckets than slots have any block at all.
    """
    buckets = num_experts + (not ignore_invalid_experts)
    length = numel + buckets * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    if numel < buckets:
        length = min(length, numel * block_size)
    return length, -(-length // block_size)


def buckets_of(topk_ids, num_experts, expert_map=None, ignore_invalid_experts=False):
    """The bucket of each slot, flat: 0 for an invalid id, 1 + e for expert e; an ignored slot is past all buckets."""
    ids = topk_ids.reshape(-1).long()
    valid = (ids >= 0) & (ids < num_experts)
    if ignore_invalid_experts and expert_map is not None:
        valid &= expert_map.long()[ids.clamp(0, num_experts - 1)] >= 0
    return torch.where(valid, ids + 1, num_experts + 1 if ignore_invalid_experts else 0)


def _count(topk_ids, block_size, num_experts, expert_map, ignore_invalid_experts):
    """The bucket of each slot, and for each bucket its slots and its blocks."""
    bucket = buckets_of(topk_ids, num_experts, expert_map, ignore_invalid_experts)
    counts = torch.bincount(bucket, minlength=num_experts + 2)[: num_experts + 1]
    return bucket, counts, (counts + block_size - 1) // block_size


def moe_align_block_size(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=True, ignore_invalid_experts=False
):
    """Sort slots by expert and pad each expert's to whole blocks, in plain torch.

    The arguments are :func:`moe_numba.moe_align_block_size`'s.
    """
    numel, device = topk_ids.numel(), topk_ids.device
    bucket, counts, blocks = _count(topk_ids, block_size, num_experts, expert_map, ignore_invalid_experts)
    starts, before = (blocks.cumsum(0) - blocks) * block_size, counts.cumsum(0) - counts
    length, num_blocks = sizes(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts)

    order = bucket.argsort(stable=True)[: int(counts.sum())]  # without the ignored slots, which come last
    rank = torch.arange(len(order), device=device) - before[bucket[order]]
    sorted_token_ids = torch.full((length,), numel, dtype=torch.int32, device=device)
    sorted_token_ids[starts[bucket[order]] + rank] = order.to(torch.int32)

    expert_of = torch.arange(-1, num_experts, device=device)
    if expert_map is not None:
        expert_of[1:] = expert_map
    expert_ids = torch.full((num_blocks,), -1, dtype=torch.int32, device=device)
    expert_ids[: int(blocks.sum())] = expert_of.repeat_interleave(blocks).to(torch.int32)
    return sorted_token_ids, expert_ids, (blocks.sum() * block_size).to(torch.int32).reshape(1)


def mismatch(
    sorted_token_ids,
    expert_ids,
    num_tokens_post_pad,
    topk_ids,
    block_size,
    num_experts,
    *,
    any_order=False,
    any_tail=False,
    **options,
):
    """Say what is wrong with an alignment, or None if nothing is.

    Parameters
    ----------
    sorted_token_ids, expert_ids, num_tokens_post_pad : torch.Tensor
        The outputs. They may be longer than they need be; then what is too much is judged as a part of the tail.
    topk_ids, block_size, num_experts, **options
        What :func:`moe_align_block_size` was called with.
    any_order : bool
        Accept an expert's slots in any order, as kernels leave them that place slots with atomics.
    any_tail : bool
        Accept anything past ``num_tokens_post_pad``, which no consumer should read.

    Returns
    -------
    str or None
    """
    right = moe_align_block_size(topk_ids, block_size, num_experts, **options)
    given = {"sorted_token_ids": sorted_token_ids, "expert_ids": expert_ids, "num_tokens_post_pad": num_tokens_post_pad}
    for (name, tensor), other in zip(given.items(), right, strict=True):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or len(tensor) < len(other):
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not int32 with {len(other)} elements"
    total, numel = int(right[2]), topk_ids.numel()
    if num_tokens_post_pad.tolist() != [total]:
        return f"num_tokens_post_pad is {num_tokens_post_pad.tolist()}, not [{total}]"
    slots = sorted_token_ids[:total]
    if any_order:
        _, _, blocks = _count(
            topk_ids, block_size, num_experts, options.get("expert_map"), options.get("ignore_invalid_experts", False)
        )
        run = torch.arange(num_experts + 1, device=slots.device).repeat_interleave(blocks * block_size)
        slots = _ascending(slots, run, numel)
    for name, mine, wanted in (
        ("expert_ids", expert_ids[: total // block_size], right[1][: total // block_size]),
        ("sorted_token_ids", slots, right[0][:total]),
    ):
        if (wrong := mine != wanted).any():
            at = int(wrong.nonzero()[0])
            return f"{name}[{at}] is {int(mine[at])} instead of {int(wanted[at])}; {int(wrong.sum())} are wrong"
    tails = (("sorted_token_ids", total, numel), ("expert_ids", total // block_size, -1))
    for name, used, rest in () if any_tail else tails:
        if (wrong := given[name][used:] != rest).any():
            at = used + int(wrong.nonzero()[0])
            return f"{name}[{at}], past the end of what is used, is {int(given[name][at])} instead of {rest}"
    return None


def _ascending(slots, run, numel):
    """Each run's slots in ascending order, where they are slots; padding and what is out of range stay in place."""
    is_slot = (slots >= 0) & (slots < numel)
    key = run[is_slot] * max(numel, 1) + slots[is_slot].long()
    slots = slots.clone()
    slots[is_slot] = (key.sort().values % max(numel, 1)).to(slots.dtype)
    return slots
