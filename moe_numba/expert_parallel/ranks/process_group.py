"""Process groups of ranks on one node, one GPU per rank."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def free_port() -> int:
    """Return an unused port for the rendezvous of a process group."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


@contextmanager
def process_group(rank: int, ranks: int, port: int) -> Iterator[None]:
    """Join torch's default process group over NCCL, on the GPU with the rank's number.

    All ranks must enter with the same port (`free_port`). After an error the group is not destroyed, because that
    would wait for the other ranks.
    """
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    yield
    dist.destroy_process_group()
