"""Sizes of the dispatch notebook: DeepSeek-V3's on GPUs, a few short rows in the simulator."""

from types import SimpleNamespace

import torch

from moe_numba import simulator


def reachable_gpus():
    """Return the number of GPUs if all of them can access one another's memory, otherwise 1."""
    gpus = torch.cuda.device_count()
    all_reachable = all(torch.cuda.can_device_access_peer(a, b) for a in range(gpus) for b in range(gpus) if a != b)
    return gpus if all_reachable else 1


def dispatch_sizes():
    """Return the sizes: DeepSeek-V3's rows on all GPUs, a few short ones in the simulator.

    ``devices`` has a GPU for each rank. If ranks share a GPU, nothing is timed.
    """
    if simulator.ENABLED:
        return SimpleNamespace(
            device="cpu",
            devices=None,
            ranks=2,
            num_experts=8,
            topk=2,
            tokens=12,
            hidden=16,
            sms=4,
            sweep=(2, 4),
            deepep_sweep=(2, 4, 6),
            ring=4,
            chunk=2,
            warps=1,
            push_rows=8,
            push_blocks=(1, 2),
            push_warps=2,
            threads=64,
            rounds=4,
            launches=1,
            samples=1,
        )
    shared, ranks = reachable_gpus() < 2, min(8, max(2, reachable_gpus()))
    # Ranks wait for one another's CTAs, and an SM holds one CTA: those of all ranks on a GPU must be resident at once.
    max_sms = torch.cuda.get_device_properties(0).multi_processor_count // (ranks if shared else 1)
    return SimpleNamespace(
        device="cuda",
        devices=[0] * ranks if shared else list(range(ranks)),
        ranks=ranks,
        num_experts=256 // ranks * ranks,
        topk=8,
        tokens=4096,
        hidden=7168,
        sms=24,
        sweep=tuple(sms for sms in (4, 8, 12, 16, 24, 32, 48) if sms <= max_sms),
        deepep_sweep=(8, 24, 48),
        ring=256,
        chunk=24 if ranks == 2 else 6,
        warps=24 // ranks,
        push_rows=4096,
        push_blocks=(1, 2, 4, 8, 12, 24, 48),
        push_warps=8,
        threads=1024,
        rounds=200,
        launches=10,
        samples=20,
    )
