"""Peer access: whether, and how, kernels of one GPU access the memory of another, over NVLink or PCIe.

The kernels only load from, store to, and fence the memory of peers. They need no atomic operations between GPUs, which
PCIe lacks: counters that several threads add to are in the memory of their own GPU.
"""

import torch

from moe_numba.runtime.device import UnsupportedDeviceError


def check_peer_access(transport):
    """Raise, on all ranks, for a group in which the GPU of one rank cannot access the memory of another's.

    GPUs are compared by UUID, because processes may number them differently. A GPU that is not visible in a process is
    not checked there.

    Parameters
    ----------
    transport
        With a ``device``, a ``rank`` and ``gather``.

    Raises
    ------
    UnsupportedDeviceError
        The message names both GPUs.
    """
    own = transport.device.index
    index_of = {_uuid(index): index for index in range(torch.cuda.device_count())}
    peers = [index_of.get(uuid) for uuid in transport.gather(_uuid(own))]
    missing = [
        f"GPU {own} of rank {transport.rank} cannot access GPU {peer}'s memory, of rank {rank}"
        for rank, peer in enumerate(peers)
        if peer not in (None, own) and not torch.cuda.can_device_access_peer(own, peer)
    ]
    _refuse([message for of_rank in transport.gather(missing) for message in of_rank])


def enable_peer_access(indices):
    """Enable access from kernels of each of these GPUs, all in this process, to the memory of the others."""
    from cuda.bindings import runtime

    _refuse(
        [
            f"GPU {own} cannot access GPU {peer}'s memory"
            for own in indices
            for peer in indices - {own}
            if not torch.cuda.can_device_access_peer(own, peer)
        ]
    )
    done = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
    for own in indices:
        with torch.cuda.device(own):
            for peer in indices - {own}:
                (error,) = runtime.cudaDeviceEnablePeerAccess(peer, 0)
                if error not in done:
                    raise RuntimeError(f"access from GPU {own} to GPU {peer}'s memory cannot be enabled: {error.name}")


def _uuid(index):
    return str(torch.cuda.get_device_properties(index).uuid)


def _refuse(messages):
    if messages:
        raise UnsupportedDeviceError(
            f"{messages[0]}; ranks exchange rows by peer access, over NVLink or PCIe ('nvidia-smi topo -p2p w' lists "
            "the pairs of GPUs that have it)"
        )
