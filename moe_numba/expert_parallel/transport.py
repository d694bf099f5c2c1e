"""How ranks reach one another's memory: one interface, three backends.

A **transport** knows its rank, gathers small values from all ranks, allocates **shared** memory (a buffer on each
rank's GPU, and the addresses at which a kernel of this rank finds all of them), and starts kernels that wait for those
of other ranks.

- ``SymmetricMemory``: torch's, for a ``torch.distributed`` group of processes. The default.
- ``CudaIpc``: CUDA's handles through CuPy, for the same groups: the document's way.
- ``LocalGroup``: ranks that are threads of one process, on several GPUs, on one, or in the simulator.
"""

import contextlib
import os
import threading
import time
from dataclasses import dataclass, field

import torch

from moe_numba import simulator
from moe_numba.runtime.launch import current_stream, launcher, signature_of

_PATIENCE = 100.0  # seconds
COMPILING = threading.Lock()  # ranks that are threads need each kernel once, and Numba one thread


@dataclass
class Shared:
    """Memory that all ranks of a group reach."""

    local: torch.Tensor  # [bytes] uint8, this rank's
    addresses: torch.Tensor  # [num_ranks] uint64 on this rank's device: everybody's, as this rank's kernels reach them
    _close: object = field(default=lambda: None, repr=False)

    def close(self):
        """Give the memory back. No kernel of any rank may use it any more: synchronise all ranks first."""
        close, self._close, self.local = self._close, lambda: None, None
        close()


def alike(transport, name, value):
    """Refuse what is not the same on all ranks."""
    values = transport.gather(value)
    if any(other != value for other in values):
        raise ValueError(f"{name} is {', '.join(map(str, values))} on the ranks; it must be the same on all")


class _Transport:
    """What all backends have in common."""

    def __init__(self):
        self._started = {}

    def ready(self, kernel, signature, patience=_PATIENCE, **options):
        """Make a kernel ready that waits for those of other ranks; all ranks must do so, and start it, in one order.

        Parameters
        ----------
        kernel, signature, **options : as for ``moe_numba.runtime.launch.launcher``
        patience : float
            Seconds to wait for ranks that do not come to the same start. Then this one starts nevertheless: how long
            its kernel waits for them is its own affair.

        Returns
        -------
        ``start(grid, block, *arguments)``, on the current stream.
        """
        device = self.device.index or 0
        with COMPILING:
            start = launcher(kernel, signature, device, **options)
        return lambda grid, block, *arguments: start(grid, block, current_stream(device), *arguments)

    def launch(self, kernel, grid, block, *args, **options):
        """``moe_numba.runtime.launch.launch`` for a kernel that waits for those of other ranks."""
        signature, values = signature_of(args)
        key = kernel, signature, tuple(options.items())
        if key not in self._started:
            self._started[key] = self.ready(kernel, signature, **options)
        self._started[key](grid, block, *values)


class _Processes(_Transport):
    """What the backends for a group of processes have in common."""

    def __init__(self, group, device=None):
        import torch.distributed as dist

        super().__init__()
        self.group, self.rank, self.num_ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.device = torch.device("cuda", torch.cuda.current_device() if device is None else device)

    def gather(self, value):
        """Everybody's value, in the order of the ranks; all ranks must call it."""
        import torch.distributed as dist

        values = [None] * self.num_ranks
        dist.all_gather_object(values, value, self.group)
        return values

    def wait(self, ready, seconds):
        """Wait until ``ready()`` is true, without holding the GIL; gives False after so many seconds."""
        return _poll(ready, seconds)

    def _addresses(self, values):
        return torch.tensor(values, dtype=torch.uint64).to(self.device)


def _poll(ready, seconds):
    end = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > end:
            return False
        os.sched_yield()  # other threads may run; time.sleep(0) lasts 50 microseconds on Linux
    return True


class SymmetricMemory(_Processes):
    """Torch's symmetric memory: file descriptors of CUDA's virtual memory, exchanged by torch.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup
    device : int, optional
        This rank's GPU; the current one if not given.
    """

    def allocate(self, num_bytes):
        """Zeroed memory of so many bytes on each rank; all ranks must ask for the same."""
        import torch.distributed._symmetric_memory as symmetric

        local = symmetric.empty(num_bytes, dtype=torch.uint8, device=self.device)
        handle = symmetric.rendezvous(local, self.group)
        local.zero_()
        torch.cuda.synchronize(self.device)
        peers = [handle.get_buffer(rank, (num_bytes,), torch.uint8) for rank in range(self.num_ranks)]
        self.gather(None)  # all are zeroed
        kept = [handle, peers]
        return Shared(local, self._addresses([peer.data_ptr() for peer in peers]), kept.clear)


class CudaIpc(_Processes):
    """CUDA's inter-process handles: each rank opens those of the others; parameters as for `SymmetricMemory`."""

    def allocate(self, num_bytes):
        """Zeroed memory of so many bytes on each rank; all ranks must ask for the same."""
        import cupy

        runtime = cupy.cuda.runtime
        with torch.cuda.device(self.device):
            own = runtime.malloc(num_bytes)
            runtime.memset(own, 0, num_bytes)
            runtime.deviceSynchronize()
            handles = self.gather(runtime.ipcGetMemHandle(own))  # all are zeroed
            addresses = [
                own if rank == self.rank else runtime.ipcOpenMemHandle(handle) for rank, handle in enumerate(handles)
            ]
        memory = cupy.cuda.UnownedMemory(own, num_bytes, self, self.device.index)
        with cupy.cuda.Device(self.device.index):
            array = cupy.ndarray(num_bytes, cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))
        local = torch.from_dlpack(array)

        def close():
            with torch.cuda.device(self.device):
                for rank, address in enumerate(addresses):
                    if rank != self.rank:
                        runtime.ipcCloseMemHandle(address)
                self.gather(None)  # nobody has it open any more
                runtime.free(own)

        return Shared(local, self._addresses(addresses), close)


class LocalGroup:
    """Several ranks of one process: ``LocalGroup(4).run(work)`` calls ``work(transport)`` for each of them.

    Parameters
    ----------
    num_ranks : int
    devices : sequence of int, optional
        The GPU of each rank; as many GPUs as there are, by turns, if not given. Ranks that share a GPU run on streams
        of their own. So all their blocks must fit at once. In the simulator ranks take turns on the host, and their
        kernels run together when all of them wait.

    Notes
    -----
    What the host asks of a GPU (memory, a kernel's code) may have to wait until all that runs there is done. If that
    waits for a kernel which a rank on the same GPU has not started yet, it never is. So such ranks start their kernels
    together: each when all are about to, and none does anything else before all have. Those with GPUs of their own
    need this only for the first start.
    """

    def __init__(self, num_ranks, devices=None):
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
        self.is_shared = len(set(self.devices)) < num_ranks  # a GPU has several ranks

    def run(self, work):
        """``work(transport)`` of every rank, at the same time; gives what they return. The first error is raised."""
        return (self._run_simulated if simulator.ENABLED else self._run_threads)(work)

    def _run_threads(self, work):
        self._meeting = threading.Barrier(self.num_ranks)
        self.starts, self.starting = [0] * self.num_ranks, threading.Condition()
        _enable_peer_access({device.index for device in self.devices})
        results, errors = [None] * self.num_ranks, []

        def run(rank):
            try:
                device = self.devices[rank]
                with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
                    results[rank] = work(_ThreadRank(self, rank))
                    torch.cuda.current_stream().synchronize()
            except BaseException as error:  # whatever it is, nobody else sees it
                errors.append(error)
                self._meeting.abort()  # who waits for this rank goes on, with an error of its own
            finally:
                with self.starting:
                    self.starts[rank] = float("inf")
                    self.starting.notify_all()

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
        going = {r: greenlet.greenlet(lambda r=r: results.__setitem__(r.rank, work(r))) for r in self.ranks}
        try:
            while going:
                able = [r for r in going if r.awaited is None or r.awaited()]
                if not able:
                    able = list(going)
                    for r in able:
                        r.in_vain = True
                with simulator.together():  # what they launch runs when each of them waits, or is done
                    for r in able:
                        with simulator.on_rank(r.rank):
                            going[r].switch()
                        if going[r].dead:
                            del going[r]
        finally:
            for r, strand in going.items():  # a rank has failed: no other may go on to wait for it
                r.abandoned = True
                with contextlib.suppress(Exception):
                    strand.throw()
        return results


def _enable_peer_access(indices):
    """Kernels of each of these GPUs may reach the others' memory from now on."""
    from cuda.bindings import runtime

    for own in indices:
        with torch.cuda.device(own):
            for other in indices - {own}:
                (error,) = runtime.cudaDeviceEnablePeerAccess(other, 0)
                if error not in (
                    runtime.cudaError_t.cudaSuccess,
                    runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled,
                ):
                    raise RuntimeError(f"GPU {own} cannot reach the memory of GPU {other}: {error.name}")


class _LocalRank(_Transport):
    """The transport of one rank of a `LocalGroup`."""

    def __init__(self, group, rank):
        super().__init__()
        self.group, self.rank, self.num_ranks, self.device = group, rank, group.num_ranks, group.devices[rank]

    def gather(self, value):
        """Everybody's value, in the order of the ranks; all ranks must call it."""
        self.group.values[self.rank] = value
        self._meet()
        values = list(self.group.values)
        self._meet()  # all have read them
        return values

    def ready(self, kernel, signature, patience=_PATIENCE, **options):  # noqa: D102
        if self.group.is_shared:
            options.pop("cooperative", None)  # it would keep the grids of other ranks away
        return super().ready(kernel, signature, patience, **options)

    def allocate(self, num_bytes):
        """Zeroed memory of so many bytes on each rank; all ranks must ask for the same."""
        local = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        close = lambda: None
        if simulator.ENABLED:
            address = simulator.register(local, f"the buffer of rank {self.rank}")
            close = lambda: simulator.forget(address)
        else:
            torch.cuda.synchronize(self.device)
        addresses = self.gather(local.data_ptr())
        return Shared(local, torch.tensor(addresses, dtype=torch.uint64).to(self.device), close)


class _ThreadRank(_LocalRank):
    def ready(self, kernel, signature, patience=_PATIENCE, **options):  # noqa: D102
        start = super().ready(kernel, signature, patience, **options)
        if not self.group.is_shared:
            self._line_up(patience)
            return start

        def start_together(grid, block, *arguments):
            self._line_up(patience)
            start(grid, block, *arguments)
            self._line_up(patience)

        return start_together

    def _line_up(self, seconds):
        """Wait until all ranks have come as often as this one, or have ended; for so many seconds at most."""
        group = self.group
        with group.starting:
            group.starts[self.rank] += 1
            group.starting.notify_all()
            group.starting.wait_for(lambda: min(group.starts) >= group.starts[self.rank], seconds)

    def _meet(self):
        self.group._meeting.wait(_PATIENCE)

    def wait(self, ready, seconds):
        """Wait until ``ready()`` is true, without holding the GIL; gives False after so many seconds."""
        return _poll(ready, seconds)


class _SimulatedRank(_LocalRank):
    awaited, in_vain, meetings = None, False, 0  # what it waits for; that all do; how often it came to meet the others
    abandoned = False

    def __init__(self, group, rank, host):
        super().__init__(group, rank)
        self._host = host

    def _meet(self):
        self.meetings += 1
        if not self.wait(lambda: all(other.meetings >= self.meetings for other in self.group.ranks), None):
            raise TimeoutError(f"rank {self.rank} waits for the others, who wait for something else or have ended")

    def wait(self, ready, seconds):
        """Let the other ranks go on, and the kernels run, until ``ready()``; False where all ranks wait in vain."""
        if self.abandoned:
            raise RuntimeError(f"rank {self.rank} cannot go on: another rank has failed")
        self.awaited = ready
        self._host.switch()
        in_vain, self.awaited, self.in_vain = self.in_vain, None, False
        return not in_vain
