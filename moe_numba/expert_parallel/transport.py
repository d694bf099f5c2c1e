"""Transports: how ranks access one another's memory. One interface, three backends.

A **transport** knows its rank, gathers small values from all ranks, waits on the host until all ranks have arrived at a
point, allocates **shared memory** (a buffer on each rank's GPU, and the addresses at which this rank's kernels access
all of them), and starts kernels that wait for kernels of other ranks.

- ``SymmetricMemory``: torch's symmetric memory, for a ``torch.distributed`` group of processes. The default.
- ``CudaIpc``: CUDA IPC handles through CuPy, for the same groups, as in DeepEP.
- ``LocalGroup``: ranks that are threads of one process, on several GPUs, on one GPU, or in the simulator.
"""

import contextlib
import math
import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.peer_access import check_peer_access, enable_peer_access
from moe_numba.runtime.launch import current_stream, launcher, signature_of

_TIMEOUT_S = 100.0
COMPILE_LOCK = threading.RLock()  # Numba's compiler is not thread-safe, and ranks may be threads


@dataclass
class SharedMemory:
    """Memory that all ranks of a group can access."""

    local: Any  # torch.Tensor, uint8 [bytes], this rank's part
    addresses: torch.Tensor  # uint64 [num_ranks] on this rank's device: the address of each rank's part on this device
    _close: Callable[[float], object] = field(default=lambda seconds: None, repr=False)

    def close(self, seconds: float = _TIMEOUT_S) -> None:
        """Free the memory; all ranks must call it, after their own kernels that use it have ended.

        Waits for the other ranks, at most ``seconds``. If one is missing then, memory to which it may still write stays
        allocated. With 0 a rank only announces that it has ended.
        """
        close, self._close, self.local = self._close, lambda seconds: None, None
        close(seconds)


def check_same_on_all_ranks(transport, name, value):
    """Raise ValueError on all ranks unless the value is equal on all of them."""
    values = transport.gather(value)
    if any(other != value for other in values):
        raise ValueError(f"{name} is {', '.join(map(str, values))} on the ranks; it must be the same on all")


class _Transport:
    """Common part of all backends."""

    def __init__(self):
        self._prepared, self._num_allocations = {}, 0

    def rendezvous(self, name: str, seconds: float) -> bool:
        """Wait until all ranks have called this as often with this name as this rank, or have ended.

        Parameters
        ----------
        name : str
            The point that ranks reach.
        seconds : float
            Longest wait; 0 announces this rank's arrival to the others, and does not wait for them.

        Returns
        -------
        bool
            Whether all ranks have arrived; False for 0 seconds.
        """
        raise NotImplementedError

    def _name_allocation(self):
        """Return a name for the next shared memory, the same on all ranks, which allocate in the same order."""
        self._num_allocations += 1
        return f"close memory {self._num_allocations}"

    def prepare_kernel(self, kernel, signature, timeout=_TIMEOUT_S, **options):
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
            ``start(grid, block, *arguments)`` launches the kernel on the current stream.
        """
        device = self.device.index or 0
        with COMPILE_LOCK:
            start = launcher(kernel, signature, device, **options)
        return lambda grid, block, *arguments: start(grid, block, current_stream(device), *arguments)

    def launch(self, kernel, grid, block, *args, **options):
        """Launch a kernel that waits for kernels of other ranks; as ``moe_numba.runtime.launch.launch``.

        The first launch waits until all ranks have compiled the kernel.
        """
        signature, values = signature_of(args)
        key = kernel, signature, tuple(options.items())
        if key not in self._prepared:
            self._prepared[key] = self.prepare_kernel(kernel, signature, **options)
            self.rendezvous("launch", options.get("timeout", _TIMEOUT_S))
        self._prepared[key](grid, block, *values)


class _ProcessGroupTransport(_Transport):
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

    def rendezvous(self, name: str, seconds: float) -> bool:  # noqa: D102
        self._arrivals[name] += 1
        keys = [f"moe_numba/{self._prefix}/{name}/{self._arrivals[name]}/{rank}" for rank in range(self.num_ranks)]
        end = time.monotonic() + seconds
        try:
            self._store.set(keys[self.rank], "")
            while seconds:
                if self._store.check(keys):
                    return True
                if time.monotonic() > end:
                    break
                time.sleep(1e-3)
        except RuntimeError:  # the process with the store is lost
            pass
        return False

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready()`` is true, without holding the GIL; return False after ``seconds``."""
        return _poll(ready, seconds)

    def _addresses(self, values):
        return torch.tensor(values, dtype=torch.uint64, device="cpu").to(self.device)


def _poll(ready, seconds):
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        os.sched_yield()  # lets other threads run; time.sleep(0) takes 50 us on Linux
    return True


class SymmetricMemory(_ProcessGroupTransport):
    """Transport over torch's symmetric memory (CUDA virtual memory, shared by file descriptors).

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
    device : int, optional
        This rank's GPU; by default the current one.
    """

    def allocate(self, num_bytes: int) -> SharedMemory:
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

        return SharedMemory(local, self._addresses([peer.data_ptr() for peer in peers]), close)


class CudaIpc(_ProcessGroupTransport):
    """Transport over CUDA IPC: each rank opens the handles of the others; parameters as for `SymmetricMemory`."""

    def allocate(self, num_bytes: int) -> SharedMemory:
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
        memory = cupy.cuda.UnownedMemory(own, num_bytes, self, self.device.index)
        with cupy.cuda.Device(self.device.index):
            array = cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        local, name = torch.from_dlpack(array), self._name_allocation()

        def close(seconds):
            with torch.cuda.device(self.device):
                for rank, address in enumerate(addresses):
                    if rank != self.rank:
                        runtime.ipcCloseMemHandle(address)
                if self.rendezvous(name, seconds):  # all ranks have closed their handles
                    runtime.free(own)

        return SharedMemory(local, self._addresses(addresses), close)


class LocalGroup:
    """Several ranks in one process: ``LocalGroup(4).run(work)`` calls ``work(transport)`` for each of them.

    Parameters
    ----------
    num_ranks : int
    devices : sequence of int, optional
        The GPU of each rank; by default all GPUs, round-robin. Ranks that share a GPU run on separate streams, so all
        their CTAs must be resident at once. In the simulator the ranks' host functions alternate, and their kernels
        run together when all ranks wait.

    Notes
    -----
    A host call (an allocation, loading a kernel) may block until all work of the GPU has finished. If that work waits
    for a kernel that another rank on the same GPU has not launched yet, this is a deadlock. Ranks that share a GPU
    therefore launch together: each rank launches when all are about to, and continues when all have launched. Ranks
    with GPUs of their own need this only for the first launch of a kernel.

    Memory that is closed while a rank is missing stays allocated as long as the group.
    """

    def __init__(self, num_ranks: int, devices: Sequence[int] | None = None):
        self.num_ranks = num_ranks
        if simulator.ENABLED:
            self.devices = [torch.device("cpu")] * num_ranks
        else:
            found = torch.cuda.device_count()
            indices = [rank % found for rank in range(num_ranks)] if devices is None else list(devices)
            if len(indices) != num_ranks:
                raise ValueError(f"devices has {len(indices)} entries; it must have one for each of {num_ranks} ranks")
            self.devices = [torch.device("cuda", i) for i in indices]
        self.values = [None] * num_ranks
        self.is_shared = len(set(self.devices)) < num_ranks  # some GPU has several ranks
        self.arrival = threading.Condition()
        self.kept: list = []  # closed memory to which a missing rank may still write
        self._forget_arrivals()

    def _forget_arrivals(self):
        """Set how often each rank has arrived at each rendezvous, and whether it has ended."""
        self.arrivals, self.ended = {}, [False] * self.num_ranks

    def run(self, work: Callable[["_LocalRank"], Any]) -> list:
        """Run ``work(transport)`` for all ranks concurrently; return the results by rank, or raise the first error."""
        self._forget_arrivals()
        return (self._run_simulated if simulator.ENABLED else self._run_threads)(work)

    def end(self, rank):
        """Record that a rank has ended: no rendezvous waits for it."""
        with self.arrival:
            self.ended[rank] = True
            self.arrival.notify_all()

    def _run_threads(self, work):
        self._thread_barrier = threading.Barrier(self.num_ranks)
        enable_peer_access({device.index for device in self.devices})
        results, errors = [None] * self.num_ranks, []
        streams = [torch.cuda.Stream(device) for device in self.devices]

        def run(rank):
            try:
                with torch.cuda.device(self.devices[rank]), torch.cuda.stream(streams[rank]):
                    results[rank] = work(_ThreadRank(self, rank))
                    streams[rank].synchronize()
            except BaseException as error:  # an exception of a thread is otherwise lost
                errors.append(error)
                self._thread_barrier.abort()  # ranks that wait for this one continue with a BrokenBarrierError
            finally:
                self.end(rank)
                with contextlib.suppress(Exception):  # no kernel may outlive the memory that it uses
                    streams[rank].synchronize()

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error
        return results

    def _run_simulated(self, work):
        import greenlet

        results = [None] * self.num_ranks
        self.ranks = [_SimulatedRank(self, rank, greenlet.getcurrent()) for rank in range(self.num_ranks)]
        running = {r: greenlet.greenlet(lambda r=r: results.__setitem__(r.rank, work(r))) for r in self.ranks}
        try:
            while running:
                ready = [r for r in running if r.condition is None or r.condition()]
                if not ready:  # no rank can continue: the shortest waits time out
                    ready = [r for r in running if r.seconds == min(other.seconds for other in running)]
                    for r in ready:
                        r.timed_out = True
                with simulator.together():  # the kernels run when each of these ranks waits, or has finished
                    for r in ready:
                        with simulator.on_rank(r.rank):
                            running[r].switch()
                        if running[r].dead:
                            del running[r]
                            self.end(r.rank)
        finally:
            for r, coroutine in running.items():  # a rank has failed: the others must not wait for it
                r.abandoned = True
                with contextlib.suppress(Exception):
                    coroutine.throw()
        return results


class _LocalRank(_Transport):
    """The transport of one rank of a `LocalGroup`."""

    def __init__(self, group, rank):
        super().__init__()
        self.group, self.rank, self.num_ranks, self.device = group, rank, group.num_ranks, group.devices[rank]

    def _barrier(self):
        raise NotImplementedError

    def gather(self, value: Any) -> list:
        """Return the values of all ranks, in rank order; all ranks must call it."""
        self.group.values[self.rank] = value
        self._barrier()
        values = list(self.group.values)
        self._barrier()  # all ranks have read the values
        return values

    def rendezvous(self, name: str, seconds: float) -> bool:  # noqa: D102
        group = self.group
        with group.arrival:
            arrivals = group.arrivals.setdefault(name, [0] * self.num_ranks)
            arrivals[self.rank] += 1
            own = arrivals[self.rank]
            group.arrival.notify_all()
        have_arrived = lambda: all(n >= own or ended for n, ended in zip(arrivals, group.ended, strict=True))
        return seconds > 0 and self._wait_for_arrivals(have_arrived, seconds)

    def _wait_for_arrivals(self, have_arrived, seconds):
        raise NotImplementedError

    def prepare_kernel(self, kernel, signature, timeout=_TIMEOUT_S, **options):  # noqa: D102
        if self.group.is_shared:
            options.pop("cooperative", None)  # a cooperative grid would exclude the grids of the other ranks
        return super().prepare_kernel(kernel, signature, timeout, **options)

    def allocate(self, num_bytes: int) -> SharedMemory:
        """Allocate ``num_bytes`` of zeroed memory on each rank; all ranks must pass the same size."""
        local, name = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device), self._name_allocation()
        if simulator.ENABLED:
            simulator.register(local, f"the buffer of rank {self.rank}")
        else:
            torch.cuda.synchronize(self.device)

        def close(seconds):
            if not self.rendezvous(name, seconds):
                self.group.kept.append(local)
            elif simulator.ENABLED:
                simulator.forget(local.data_ptr())

        addresses = self.gather(local.data_ptr())
        return SharedMemory(local, torch.tensor(addresses, dtype=torch.uint64, device="cpu").to(self.device), close)


class _ThreadRank(_LocalRank):
    def prepare_kernel(self, kernel, signature, timeout=_TIMEOUT_S, **options):  # noqa: D102
        start = super().prepare_kernel(kernel, signature, timeout, **options)
        if not self.group.is_shared:
            return start

        def start_together(grid, block, *arguments):
            self.rendezvous("start", timeout)
            start(grid, block, *arguments)
            self.rendezvous("start", timeout)

        return start_together

    def _wait_for_arrivals(self, have_arrived, seconds):
        with self.group.arrival:
            return self.group.arrival.wait_for(have_arrived, seconds)

    def _barrier(self):
        self.group._thread_barrier.wait(_TIMEOUT_S)

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready()`` is true, without holding the GIL; return False after ``seconds``."""
        return _poll(ready, seconds)


class _SimulatedRank(_LocalRank):
    condition, seconds = None, math.inf  # what the rank waits for, and for how long
    timed_out = False  # no rank can continue, and this one's wait is the shortest
    barriers = 0  # that the rank has reached
    abandoned = False  # another rank has failed

    def __init__(self, group, rank, scheduler):
        super().__init__(group, rank)
        self._scheduler = scheduler

    def _barrier(self):
        self.barriers += 1
        if not self.wait(lambda: all(other.barriers >= self.barriers for other in self.group.ranks), None):
            raise TimeoutError(f"rank {self.rank} waits for the others, which wait for something else or have ended")

    def _wait_for_arrivals(self, have_arrived, seconds):
        return self.wait(have_arrived, seconds)

    def wait(self, ready, seconds):
        """Run the other ranks and the kernels until ``ready()``.

        Returns False if no rank can continue, and no other rank waits for fewer ``seconds`` (None: without limit).
        """
        if self.abandoned:
            raise RuntimeError(f"rank {self.rank} cannot go on: another rank has failed")
        self.condition, self.seconds = ready, math.inf if seconds is None else seconds
        self._scheduler.switch()
        timed_out, self.condition, self.timed_out = self.timed_out, None, False
        return not timed_out
