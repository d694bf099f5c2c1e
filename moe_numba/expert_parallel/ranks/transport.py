"""Transports: how ranks access one another's memory. One interface, four backends; here two of those for processes.

A **transport** knows its rank, gathers small values from all ranks, waits on the host until all ranks have arrived at a
point, allocates **shared memory** (a buffer on each rank's GPU, and the addresses at which this rank's kernels access
all of them), and starts kernels that wait for kernels of other ranks.

- ``SymmetricMemory``: torch's symmetric memory, for a ``torch.distributed`` group of processes. The default.
- ``CudaIpc``: CUDA IPC handles through CuPy, for the same groups, as in DeepEP.
- ``transport_nvshmem.Nvshmem``: NVSHMEM's symmetric heap, for the same groups.
- ``local_group.LocalGroup``: ranks that are threads of one process, on several GPUs, on one GPU, or in the simulator.
"""

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_numba.expert_parallel.ranks.peer_access import check_peer_access
from moe_numba.runtime.context import current_stream
from moe_numba.runtime.launch import launcher, signature_of

TIMEOUT_S = 100.0
COMPILE_LOCK = threading.RLock()  # Numba's compiler is not thread-safe, and ranks may be threads


@dataclass
class SymmetricAllocation:
    """Memory that all ranks of a group can access."""

    local: Any  # torch.Tensor, uint8 [bytes], this rank's part
    addresses: torch.Tensor  # uint64 [num_ranks] on this rank's device: the address of each rank's part on this device
    _close: Callable[[float], object] = field(default=lambda seconds: None, repr=False)

    def close(self, seconds: float = TIMEOUT_S) -> None:
        """Free the memory; all ranks must call it, after their own kernels that use it have ended.

        Waits for the other ranks, at most ``seconds``. If one is missing then, memory to which it may still write stays
        allocated. With 0 a rank only announces that it has ended.
        """
        close, self._close, self.local = self._close, lambda seconds: None, None
        close(seconds)


def check_same_on_all_ranks(transport: "Transport", call: str, **arguments: Any) -> None:
    """Raise ValueError on all ranks unless all of them make this call, with equal arguments; name all that differ."""
    found = transport.gather((call, arguments))
    calls = [part[0] if type(part) is tuple and isinstance(part[0], str) else "another one" for part in found]
    if len(set(calls)) > 1:
        raise ValueError(f"the call is {_by_rank(calls)}; all ranks must make the same calls in the same order")
    values = {name: [of_rank[name] for _, of_rank in found] for name in arguments}
    differing = [f"{name} is {_by_rank(v)}" for name, v in values.items() if any(other != v[0] for other in v)]
    if differing:
        it = "it" if len(differing) == 1 else "they"
        raise ValueError(f"{call}: {', '.join(differing)}; {it} must be the same on all ranks")


def _by_rank(values):
    """Format the values of all ranks, each with its ranks: "2 on rank 0 and 4 on ranks 1, 2"."""
    ranks = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(str(rank))
    parts = [f"{value} on rank{'s' * (len(of) > 1)} {', '.join(of)}" for value, of in ranks.items()]
    return " and ".join(parts)


class Transport:
    """Common part of all backends."""

    rank: int
    num_ranks: int
    device: torch.device
    can_repeat = True  # whether a rank may launch a kernel again that its peers launch once, and wait in

    def __init__(self):
        self._prepared, self._num_allocations = {}, 0

    def gather(self, value: Any) -> list:
        """Return the values of all ranks, by rank."""
        raise NotImplementedError

    def rendezvous(self, name: str, seconds: float, absent: Collection[int] = ()) -> bool:
        """Wait until all ranks have called this as often with this name as this rank, or have ended.

        Parameters
        ----------
        name : str
            The point that ranks reach.
        seconds : float
            Longest wait; 0 announces this rank's arrival to the others, and does not wait for them.
        absent : collection of int
            Ranks to go on without.

        Returns
        -------
        bool
            Whether all ranks have arrived; False for 0 seconds.
        """
        raise NotImplementedError

    def missing_at(self, name: str) -> list[int]:
        """Return the ranks that have not ended, and have called `rendezvous` with this name less often than this rank.

        If that cannot be found out, the list is empty.
        """
        raise NotImplementedError

    def describe(self, *ranks: int) -> str:
        """Return what is known of the functions of late ranks, as the end of an error message; often nothing."""
        return ""

    def _name_allocation(self):
        """Return a name for the next shared memory, the same on all ranks, which allocate in the same order."""
        self._num_allocations += 1
        return f"close memory {self._num_allocations}"

    def prepare_kernel(self, kernel, signature, timeout=TIMEOUT_S, **options):
        """Compile and load a kernel that waits for kernels of other ranks.

        All ranks must start such kernels in the same order. Ranks compile for different times: `rendezvous` keeps the
        GPU of one from waiting for the compiler of another.

        Parameters
        ----------
        kernel, signature, **options : as for ``moe_numba.runtime.launch.launcher``
        timeout : float
            Seconds to wait for ranks that share the GPU and do not reach the same start. This rank then starts its
            kernel anyway; the kernel has a timeout of its own.

        Returns
        -------
        Callable
            ``start(grid, block, *arguments)`` launches the kernel on the current stream. It may have ``bind``, see
            `bind`.
        """
        device = self.device.index or 0
        with COMPILE_LOCK:
            launch = launcher(kernel, signature, device, **options)

        def start(grid, block, *arguments):
            launch(grid, block, current_stream(device), *arguments)

        if hasattr(launch, "bind"):
            start.bind = launch.bind
        return start

    def launch(self, kernel, grid, block, *args, **options):
        """Launch a kernel that waits for kernels of other ranks; as ``moe_numba.runtime.launch.launch``.

        The first launch waits until all ranks have compiled the kernel.
        """
        signature, values = signature_of(args)
        key = kernel, signature, tuple(options.items())
        if key not in self._prepared:
            self._prepared[key] = self.prepare_kernel(kernel, signature, **options)
            self.rendezvous("launch", options.get("timeout", TIMEOUT_S))
        self._prepared[key](grid, block, *values)


def bind(start, grid, block, values, first, last):
    """Return ``launch(stream, *changed)``: starts a prepared kernel with ``values[first:last]`` replaced.

    ``stream`` is the raw handle of the current stream. A launch is not thread-safe.
    """
    if hasattr(start, "bind"):
        return start.bind(grid, block, values, first, last)
    before, after = tuple(values[:first]), tuple(values[last:])
    return lambda stream, *changed: start(grid, block, *before, *changed, *after)


class ProcessGroupTransport(Transport):
    """Common part of the backends for a ``torch.distributed`` process group."""

    def __init__(self, group: Any, device: int | None = None):
        import torch.distributed as dist

        super().__init__()
        group = dist.group.WORLD if group is None else group
        self.group, self.rank, self.num_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)
        # The group's store is on the host: a rendezvous neither uses nor waits for a GPU.
        self._store = dist.distributed_c10d._get_process_group_store(group)
        self._arrivals: Counter[str] = Counter()
        self._prefix = self.gather(uuid.uuid4().hex)[0]
        check_peer_access(self)

    def gather(self, value: Any) -> list:
        """Return the values of all ranks, in rank order; all ranks must call it."""
        import torch.distributed as dist

        values = [None] * self.num_ranks
        dist.all_gather_object(values, value, self.group)
        return values

    def rendezvous(self, name: str, seconds: float, absent: Collection[int] = ()) -> bool:  # noqa: D102
        self._arrivals[name] += 1
        keys = [self._key(name, rank) for rank in range(self.num_ranks) if rank not in absent]
        end = time.monotonic() + seconds
        try:
            self._store.set(self._key(name, self.rank), "")
            while seconds:
                if self._store.check(keys):
                    return True
                if time.monotonic() > end:
                    break
                time.sleep(1e-3)
        except RuntimeError:  # the process with the store is lost
            pass
        return False

    def _key(self, name, rank):
        return f"moe_numba/{self._prefix}/{name}/{self._arrivals[name]}/{rank}"

    def missing_at(self, name: str) -> list[int]:  # noqa: D102
        try:
            return [rank for rank in range(self.num_ranks) if not self._store.check([self._key(name, rank)])]
        except RuntimeError:  # the process with the store is lost
            return []

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready()`` is true, without holding the GIL; return False after ``seconds``."""
        return poll(ready, seconds)

    def _addresses(self, values):
        return torch.tensor(values, dtype=torch.uint64, device="cpu").to(self.device)

    def _tensor(self, address, num_bytes):
        """Return memory of this rank's GPU that torch has not allocated as a tensor, which does not own it."""
        import cupy

        memory = cupy.cuda.UnownedMemory(address, num_bytes, self, self.device.index)
        with cupy.cuda.Device(self.device.index):
            return torch.from_dlpack(cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0)))


def poll(ready, seconds):
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        os.sched_yield()  # lets other threads run; time.sleep(0) takes 50 us on Linux
    return True


class SymmetricMemory(ProcessGroupTransport):
    """Transport over torch's symmetric memory (CUDA virtual memory, shared by file descriptors).

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks, with one GPU each.
    device : int, optional
        This rank's GPU; by default the current one.
    """

    def allocate(self, num_bytes: int) -> SymmetricAllocation:
        """Allocate ``num_bytes`` of zeroed memory on each rank; all ranks must pass the same size."""
        import torch.distributed._symmetric_memory as symmetric

        local = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(local, self.group)
        local.zero_()
        torch.cuda.synchronize(self.device)
        peers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.num_ranks)]
        self.gather(None)  # the memory of all ranks is zeroed
        references, name = [handle, peers], self._name_allocation()

        def close(seconds):
            self.rendezvous(name, seconds)
            references.clear()  # the driver frees the memory after all ranks have released it

        return SymmetricAllocation(local, self._addresses([peer.data_ptr() for peer in peers]), close)


class CudaIpc(ProcessGroupTransport):
    """Transport over CUDA IPC: each rank opens the handles of the others. It needs CuPy.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
        The ranks, with one GPU each.
    device : int, optional
        This rank's GPU; by default the current one.
    """

    def allocate(self, num_bytes: int) -> SymmetricAllocation:
        """Allocate ``num_bytes`` of zeroed memory on each rank; all ranks must pass the same size."""
        import cupy

        runtime = cupy.cuda.runtime
        with torch.cuda.device(self.device):
            own = runtime.malloc(num_bytes)
            runtime.memset(own, 0, num_bytes)
            runtime.deviceSynchronize()
            handles = self.gather(runtime.ipcGetMemHandle(own))  # the memory of all ranks is zeroed
            addresses = [
                own if rank == self.rank else runtime.ipcOpenMemHandle(handle) for rank, handle in enumerate(handles)
            ]
        local, name = self._tensor(own, num_bytes), self._name_allocation()

        def close(seconds):
            with torch.cuda.device(self.device):
                for rank, address in enumerate(addresses):
                    if rank != self.rank:
                        runtime.ipcCloseMemHandle(address)
                if self.rendezvous(name, seconds):  # all ranks have closed their handles
                    runtime.free(own)

        return SymmetricAllocation(local, self._addresses(addresses), close)
