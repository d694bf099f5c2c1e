"""How many ranks lessons between ranks can have on this machine."""

import torch


def reachable_gpus():
    """Return the number of GPUs if all of them can access one another's memory, otherwise 1."""
    gpus = torch.cuda.device_count()
    all_reachable = all(torch.cuda.can_device_access_peer(a, b) for a in range(gpus) for b in range(gpus) if a != b)
    return gpus if all_reachable else 1
