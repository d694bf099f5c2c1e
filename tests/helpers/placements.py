"""Placements of experts for tests."""

import torch

from moe_numba import ExpertPlacement


def make_placement(num_experts, device="cpu", redundant=9, dtype=torch.int32, seed=0, counts=True, **fields):
    """Place experts, of which random ones have further replicas, in random order; with counters that begin at 7."""
    random = torch.Generator().manual_seed(seed)
    extra = torch.randint(num_experts, (redundant,), generator=random)
    logical = torch.cat([torch.arange(num_experts), extra])[torch.randperm(num_experts + redundant, generator=random)]
    physical = [(logical == expert).nonzero()[:, 0] for expert in range(num_experts)]
    table = torch.nn.utils.rnn.pad_sequence(physical, batch_first=True, padding_value=-1).to(device, dtype)
    count = torch.tensor([len(p) for p in physical], dtype=dtype, device=device)
    load = torch.full((len(logical),), 7, dtype=torch.int32, device=device) if counts else None
    return ExpertPlacement(table.contiguous(), count, len(logical), load=load, **fields)
