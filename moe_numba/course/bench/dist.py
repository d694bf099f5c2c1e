"""Ranks that are processes of this machine, each with a GPU of its own: where they meet, and torch's group of them."""

import os
import socket
from contextlib import contextmanager

import torch


def free_port():
    """A port of this machine that nobody uses now: where the ranks of a group find one another."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def process_group(rank, ranks, port):
    """Be one of ``ranks`` processes, on the GPU of the rank's number: torch's default group, over NCCL.

    All ranks must enter, with one port (`free_port`). After an error the group is left as it is: to end it in good
    order would mean to wait for the others.
    """
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    yield
    dist.destroy_process_group()
