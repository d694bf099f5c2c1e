"""Transport over NVSHMEM's symmetric heap, through NVSHMEM4Py (extra ``nvshmem``).

NVSHMEM numbers the processes that have initialised it together: its PEs. It can be initialised once in a process.
Allocating and freeing on its heap are collective: each waits for all PEs, without a timeout.
"""

import os
from typing import Any, ClassVar

import torch

from moe_numba.expert_parallel.ranks.transport import (
    ProcessGroupTransport,
    SymmetricAllocation,
    check_same_on_all_ranks,
)
from moe_numba.extras import missing_extra
from moe_numba.runtime.device import UnsupportedDeviceError


class Nvshmem(ProcessGroupTransport):
    """Transport over NVSHMEM's symmetric heap, whose parts on other GPUs kernels load from and store to.

    The first `Nvshmem` of a process initialises NVSHMEM, which remains initialised until the process ends. The ranks of
    its group are NVSHMEM's PEs; the groups of later ones must have the same ranks. An NVSHMEM that was initialised
    elsewhere is used if its PEs are all processes of ``torch.distributed``.

    Two environment variables get a value if they have none: ``NVSHMEM_DISABLE_NVLS=1``, because no kernel of this
    package uses multicast, and, if all ranks are on one host, ``NVSHMEM_REMOTE_TRANSPORT=none``, so that NVSHMEM looks
    for no network.

    Initialising NVSHMEM takes GPU memory for itself: 2 GiB on an H200 with NVSHMEM 3.4.5. The heap grows with the
    allocations, in steps of ``NVSHMEM_CUMEM_GRANULARITY`` (by default 512 MiB). With ``NVSHMEM_DISABLE_CUDA_VMM=1`` it
    does not grow; its size is then ``NVSHMEM_SYMMETRIC_SIZE`` (1 GiB).

    After the loss of a rank, NVSHMEM can allocate nothing in the processes of the others.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks, with one GPU each.
    device : int, optional
        This rank's GPU; by default the current one.

    Raises
    ------
    ImportError
        If NVSHMEM4Py is not installed.
    ValueError
        If the group's ranks, or the GPU of one of them, are not those with which NVSHMEM was initialised.
    RuntimeError
        If NVSHMEM cannot be initialised.
    """

    _job: ClassVar[str | None] = None  # identifies the ranks with which this process has initialised NVSHMEM
    _heap_device: ClassVar[torch.device | None] = None  # the GPU with which it has done so

    def __init__(self, group: Any, device: int | None = None):
        try:
            from nvshmem import bindings, core
        except ImportError as error:
            raise missing_extra(error, "moe_numba.expert_parallel.Nvshmem") or error from None
        super().__init__(group, device)
        # The bindings instead of `core`'s buffers: those report an error when memory that a missing rank may still
        # write to is garbage-collected.
        self._core, self._bindings = core, bindings
        self._pes = self._join()

    def _join(self):
        """Initialise NVSHMEM if it is not, and return the PEs of the group's ranks."""
        self._core.get_version()  # loads NVSHMEM's library
        found = self.gather(self._identity())
        if not any(found):
            self._initialise()
            found = self.gather(self._identity())
            if None in found:
                missing = [rank for rank, identity in enumerate(found) if identity is None]
                raise RuntimeError(
                    f"NVSHMEM could not be initialised on ranks {missing}; with NVSHMEM_DEBUG=INFO it prints the reason"
                )
        pes = _pes_of(found, torch.distributed.get_world_size())
        for rank, (heap, device) in enumerate(self.gather((self._heap_device, self.device))):
            if heap not in (None, device):
                raise ValueError(f"device is {device} on rank {rank}; NVSHMEM was initialised there with {heap}")
        return pes

    def _identity(self):
        """Return what identifies this process: its job, the number of PEs, and its PE; None before initialisation."""
        status = self._core.InitStatus
        if not status.STATUS_IS_INITIALIZED <= self._core.init_status() < status.STATUS_INVALID:
            return None
        return type(self)._job, self._core.n_pes(), self._core.my_pe()

    def _initialise(self):
        from cuda.core import Device

        os.environ.setdefault("NVSHMEM_DISABLE_NVLS", "1")
        if len(set(self.gather(os.uname().nodename))) == 1:
            os.environ.setdefault("NVSHMEM_REMOTE_TRANSPORT", "none")
        unique_id = self.gather(self._core.get_unique_id() if self.rank == 0 else None)[0]
        with torch.cuda.device(self.device):
            device = Device(self.device.index)
            device.set_current()
            self._core.init(
                device=device, uid=unique_id, rank=self.rank, nranks=self.num_ranks, initializer_method="uid"
            )
        type(self)._job, type(self)._heap_device = self._prefix, self.device

    def allocate(self, num_bytes: int) -> SymmetricAllocation:
        """Allocate ``num_bytes`` of zeroed memory on each rank; all ranks must pass the same size.

        Raises
        ------
        ValueError
            If sizes differ.
        MemoryError
            If the heap is full.
        UnsupportedDeviceError
            If kernels cannot access the memory of a peer, as on another node.
        """
        check_same_on_all_ranks(self, "Nvshmem.allocate", num_bytes=num_bytes)  # the ranks' heaps must stay alike
        with torch.cuda.device(self.device):
            own = self._bindings.malloc(num_bytes)
        if not all(self.gather(own)):
            raise MemoryError(
                f"{num_bytes} bytes cannot be allocated on NVSHMEM's heap on all ranks; it grows up to the GPU's free "
                "memory, or, with NVSHMEM_DISABLE_CUDA_VMM=1, has NVSHMEM_SYMMETRIC_SIZE bytes"
            )
        addresses = [self._bindings.ptr(own, pe) for pe in self._pes]
        unreachable = self.gather([rank for rank, address in enumerate(addresses) if not address])
        if any(unreachable):
            self._free(own)
            raise UnsupportedDeviceError(_no_access(unreachable))
        local, name = self._tensor(own, num_bytes), self._name_allocation()
        local.zero_()
        torch.cuda.synchronize(self.device)
        self.gather(None)  # the memory of all ranks is zeroed

        def close(seconds):
            if self._all_free(name, seconds):
                self._free(own)

        return SymmetricAllocation(local, self._addresses(addresses), close)

    def _free(self, address):
        with torch.cuda.device(self.device):
            self._bindings.free(address)

    def _all_free(self, name, seconds):
        """Wait for the other ranks; return whether memory is freed, the same on all ranks.

        A rank that frees waits for all PEs, so that a difference would be a hang: the first rank to decide does so for
        all of them. It decides to free only after all ranks have arrived to wait.
        """
        key = f"moe_numba/{self._prefix}/{name}/freed"
        decide = lambda answer: self._store.compare_set(key, "", answer) == b"yes"
        try:
            if not seconds:
                decide("no")  # before this rank's arrival could make another one free
            return decide("yes" if self.rendezvous(name, seconds) else "no")
        except RuntimeError:  # the process with the store is lost
            return False


def _pes_of(found, world_size):
    """Return the PEs of a group's ranks, given their identities; refuse a group that is not all PEs of one job."""
    if None not in found:
        jobs, counts, pes = zip(*found, strict=True)
        # An NVSHMEM that was initialised elsewhere does not say with which processes; with all of them, there is one.
        is_one_job = len(set(jobs)) == 1 and (jobs[0] is not None or counts[0] == world_size)
        if is_one_job and sorted(pes) == list(range(counts[0])):
            return pes
    seen = ", ".join("none" if identity is None else f"PE {identity[2]} of {identity[1]}" for identity in found)
    raise ValueError(
        f"the ranks of the group are, in NVSHMEM: {seen}; NVSHMEM is initialised once in a process, so a group must "
        "have the same ranks as the first group with which an Nvshmem was made (or all ranks, if NVSHMEM was "
        "initialised elsewhere). SymmetricMemory and CudaIpc accept any group"
    )


def _no_access(unreachable):
    """Return an error message, given the list of unreachable ranks of each rank."""
    rank = next(rank for rank, peers in enumerate(unreachable) if peers)
    return (
        f"NVSHMEM has no address at which GPU kernels of rank {rank} could access the memory of rank "
        f"{unreachable[rank][0]}; all ranks must be on one node (or in one NVLink domain), with peer access between "
        "their GPUs: the kernels load from and store to peers' memory, and send nothing over a network"
    )
