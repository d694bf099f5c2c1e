"""Reference implementation of the alignment in torch, and the checker that compares a kernel's outputs with it.

A **slot** is one element of ``topk_ids``: token ``slot // topk``, choice ``slot % topk``.
"""

import torch


def sizes(numel, block_size, num_experts, pad_sorted_ids=True, ignore_invalid_experts=False):
    """Return the lengths of (sorted_token_ids, expert_ids) that suffice for any routing.

    In the worst case the last block of every bucket holds a single slot. Buckets without slots have no blocks.
    """
    buckets = num_experts + int(not ignore_invalid_experts)  # a bool would not be a number in symbolic arithmetic
    length = numel + buckets * (block_size - 1)
    if pad_sorted_ids:
        length = -(-length // block_size) * block_size
    # With fewer slots than buckets, a block for each slot. No branch: numel is symbolic while torch.compile traces.
    least = torch.sym_min if isinstance(numel, torch.SymInt) else min
    length = least(length, numel * block_size)
    return length, -(-length // block_size)


def _local_ids(expert_map):
    """Return an expert map whose elements that int32 cannot hold are -1, as those of experts of other ranks."""
    return expert_map.where(expert_map.int() == expert_map, -1).long()


def buckets_of(topk_ids, num_experts, expert_map=None, ignore_invalid_experts=False):
    """Return the bucket of each slot: 0 for an invalid id, 1 + e for expert e, num_experts + 1 for an ignored slot."""
    ids = topk_ids.reshape(-1).long()
    valid = (ids >= 0) & (ids < num_experts)
    if ignore_invalid_experts and expert_map is not None:
        valid &= _local_ids(expert_map)[ids.clamp(0, num_experts - 1)] >= 0
    return torch.where(valid, ids + 1, num_experts + 1 if ignore_invalid_experts else 0)


def _count(topk_ids, block_size, num_experts, expert_map, ignore_invalid_experts):
    """Return the bucket of each slot, and the number of slots and of blocks per bucket."""
    bucket = buckets_of(topk_ids, num_experts, expert_map, ignore_invalid_experts)
    counts = torch.bincount(bucket, minlength=num_experts + 2)[: num_experts + 1]
    return bucket, counts, (counts + block_size - 1) // block_size


def moe_align_block_size(
    topk_ids, block_size, num_experts, expert_map=None, pad_sorted_ids=True, ignore_invalid_experts=False
):
    """Sort slots by expert and pad each expert to whole blocks in plain torch; see moe_numba.moe_align_block_size."""
    numel, device = topk_ids.numel(), topk_ids.device
    bucket, counts, blocks = _count(topk_ids, block_size, num_experts, expert_map, ignore_invalid_experts)
    starts, slots_before = (blocks.cumsum(0) - blocks) * block_size, counts.cumsum(0) - counts
    length, num_blocks = sizes(numel, block_size, num_experts, pad_sorted_ids, ignore_invalid_experts)

    order = bucket.argsort(stable=True)[: int(counts.sum())]  # ignored slots come last and are dropped
    rank = torch.arange(len(order), device=device) - slots_before[bucket[order]]
    sorted_token_ids = torch.full((length,), numel, dtype=torch.int32, device=device)
    sorted_token_ids[starts[bucket[order]] + rank] = order.to(torch.int32)

    expert_of = torch.arange(-1, num_experts, device=device)
    if expert_map is not None:
        expert_of[1:] = _local_ids(expert_map)
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
    """Compare an alignment with the reference; return a description of the first error, or None.

    Parameters
    ----------
    sorted_token_ids, expert_ids, num_tokens_post_pad : torch.Tensor
        The outputs. Elements beyond the needed lengths are checked as part of the tail.
    topk_ids, block_size, num_experts, **options
        The arguments of the call to :func:`moe_align_block_size`.
    any_order : bool
        Accept the slots of an expert in any order, as produced by kernels that use atomics.
    any_tail : bool
        Accept anything past ``num_tokens_post_pad``, which no consumer should read.

    Returns
    -------
    str or None
    """
    expected = moe_align_block_size(topk_ids, block_size, num_experts, **options)
    given = {"sorted_token_ids": sorted_token_ids, "expert_ids": expert_ids, "num_tokens_post_pad": num_tokens_post_pad}
    for (name, tensor), other in zip(given.items(), expected, strict=True):
        if tensor.dtype != torch.int32 or tensor.dim() != 1 or len(tensor) < len(other):
            return f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not int32 with {len(other)} elements"
    total, numel = int(expected[2]), topk_ids.numel()
    if num_tokens_post_pad.tolist() != [total]:
        return f"num_tokens_post_pad is {num_tokens_post_pad.tolist()}, not [{total}]"
    slots = sorted_token_ids[:total]
    if any_order:
        _, _, blocks = _count(
            topk_ids, block_size, num_experts, options.get("expert_map"), options.get("ignore_invalid_experts", False)
        )
        run = torch.arange(num_experts + 1, device=slots.device).repeat_interleave(blocks * block_size)
        slots = _sort_within_runs(slots, run, numel)
    for name, actual, wanted in (
        ("expert_ids", expert_ids[: total // block_size], expected[1][: total // block_size]),
        ("sorted_token_ids", slots, expected[0][:total]),
    ):
        if (wrong := actual != wanted).any():
            index = int(wrong.nonzero()[0])
            return (
                f"{name}[{index}] is {int(actual[index])} instead of {int(wanted[index])}; {int(wrong.sum())} are wrong"
            )
    tails = (("sorted_token_ids", total, numel), ("expert_ids", total // block_size, -1))
    for name, used, fill_value in () if any_tail else tails:
        if (wrong := given[name][used:] != fill_value).any():
            index = used + int(wrong.nonzero()[0])
            return f"{name}[{index}], in the unused tail, is {int(given[name][index])} instead of {fill_value}"
    return None


def _sort_within_runs(slots, run, numel):
    """Sort the slots of each run in ascending order; padding and out-of-range values stay in place."""
    is_slot = (slots >= 0) & (slots < numel)
    key = run[is_slot] * max(numel, 1) + slots[is_slot].long()
    slots = slots.clone()
    slots[is_slot] = (key.sort().values % max(numel, 1)).to(slots.dtype)
    return slots
