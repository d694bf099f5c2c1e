"""The transport of ranks in one process: threads on one or several GPUs, or ranks of the simulator."""

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from moe_numba import simulator
from moe_numba.expert_parallel.common.buffer_layout import MAX_RANKS
from moe_numba.expert_parallel.ranks.peer_access import enable_peer_access
from moe_numba.expert_parallel.ranks.transport import TIMEOUT_S, SymmetricAllocation, Transport, poll
from moe_numba.runtime.recording import wrap_recorded
from moe_numba.runtime.validate import check_int

_PACKAGE = "moe_numba.expert_parallel"
_MOST_TURNS = 1000  # of ranks before kernels run: one may call `synchronize` until a kernel of another rank has run


class LocalGroup:
    """Several ranks in one process: ``LocalGroup(4).run(work)`` calls ``work(transport)`` for each of them.

    Parameters
    ----------
    num_ranks : int
        1 to 8.
    devices : sequence of int, optional
        The GPU of each rank; by default all GPUs, round-robin. Ranks that share a GPU run on separate streams, so all
        their CTAs must be resident at once. In the simulator the ranks' host functions alternate. Kernels that wait
        for those of other ranks run together when all ranks wait, and other kernels at once.

    Notes
    -----
    A host call (an allocation, loading a kernel) may block until all work of the GPU has finished. If that work waits
    for a kernel that another rank on the same GPU has not launched yet, this is a deadlock. Ranks that share a GPU
    therefore launch together: each rank launches when all are about to, and continues when all have launched. Ranks
    with GPUs of their own need this only for the first launch of a kernel.

    Memory that is closed while a rank is missing stays allocated as long as the group.

    Examples
    --------
    >>> from moe_numba.expert_parallel import LocalGroup
    >>> LocalGroup(2).run(lambda group: group.rank)
    [0, 1]
    """

    def __init__(self, num_ranks: int, devices: Sequence[int] | None = None):
        self.num_ranks = num_ranks = check_int("num_ranks", num_ranks, 1, MAX_RANKS)
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
        """Run a function for all ranks concurrently.

        Parameters
        ----------
        work : callable
            Called as ``work(transport)``, whose ``rank`` says which one it is.

        Returns
        -------
        list
            The results by rank.

        Raises
        ------
        Exception
            The first error of a rank; one that is not a TimeoutError, if there is one, because that of a rank is often
            the consequence of another rank's error. Errors of other ranks are its notes.
        """
        self._forget_arrivals()
        return (self._run_simulated if simulator.ENABLED else self._run_threads)(work)

    def end(self, rank):
        """Record that a rank has ended: no rendezvous waits for it.

        :meta private:
        """
        with self.arrival:
            self.ended[rank] = True
            self.arrival.notify_all()

    def _run_threads(self, work):
        self._thread_barrier = _Barrier(self.num_ranks)
        enable_peer_access({device.index for device in self.devices})
        results, errors = [None] * self.num_ranks, []
        streams = [torch.cuda.Stream(device) for device in self.devices]

        def run(rank):
            try:
                device, stream = torch.cuda.device(self.devices[rank]), torch.cuda.stream(streams[rank])
                # Otherwise one thread per GPU runs the backwards of all its ranks, whose exchanges wait for each other.
                with device, stream, torch.autograd.set_multithreading_enabled(False):
                    results[rank] = work(_ThreadRank(self, rank))
                    streams[rank].synchronize()
            except BaseException as error:  # an exception of a thread is otherwise lost
                errors.append((rank, error))
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
        _raise_first(errors)
        return results

    def _run_simulated(self, work):
        errors = []
        self.ranks = [_SimulatedRank(self, rank) for rank in range(self.num_ranks)]
        self.threads = [_RankThread(rank, work) for rank in self.ranks]
        running = dict(zip(self.ranks, self.threads, strict=True))
        try:
            while running:
                ready = [r for r in running if r.condition is None or r.condition()]
                if not ready:  # no rank can continue: the shortest waits time out
                    ready = [r for r in running if r.seconds == min(other.seconds for other in running)]
                    for r in ready:
                        r.timed_out = True
                with simulator.together(only_exchanges=True):  # they run when all ranks wait for them, or have ended
                    for _ in range(_MOST_TURNS):
                        for r in ready:
                            try:
                                with simulator.on_rank(r.rank):
                                    running[r].switch()
                            except TimeoutError as error:  # the rank that it waited for may still raise the cause
                                errors.append((r.rank, error))
                            except BaseException as error:
                                _raise_first([(r.rank, error), *errors])
                            if running[r].dead:
                                del running[r]
                                self.end(r.rank)
                        ready = [r for r in running if r.needs_no_kernel()]
                        if not ready:
                            break
        finally:
            for r, thread in running.items():  # a rank has failed: the others must not wait for it
                r.abandoned = True
                with contextlib.suppress(Exception):
                    thread.end()
        _raise_first(errors)
        return [thread.result for thread in self.threads]


class _Barrier:
    """A barrier of threads that a thread, once all have arrived, passes even if another one aborts it at once.

    One that waits in a ``threading.Barrier`` can raise then, and hide the error of which the abort is a consequence.
    """

    def __init__(self, num_threads):
        self._num_threads, self._arrived, self._is_aborted = num_threads, 0, False
        self._changed = threading.Condition()

    def wait(self, seconds):
        with self._changed:
            self._arrived += 1
            needed = -(-self._arrived // self._num_threads) * self._num_threads
            self._changed.notify_all()
            have_arrived = lambda: self._arrived >= needed
            self._changed.wait_for(lambda: have_arrived() or self._is_aborted, seconds)
            if not have_arrived():
                raise threading.BrokenBarrierError

    def abort(self):
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


class _Ended(BaseException):
    """Ends the function of a simulated rank that waits."""


class _RankThread:
    """The function of a simulated rank, in a thread of its own: torch keeps its state by thread.

    Such are whether gradients are recorded, hooks of checkpoints, and what a backward runs. Only one thread runs at a
    time, the group's or that of a rank.
    """

    def __init__(self, rank, work):
        from moe_numba.simulator.core.settings import settings

        self.result, self.dead, self._is_ended, self._error = None, False, False, None
        self._rank, self._work, self._adopt_settings = rank, work, settings.of_this_thread()
        self._to_rank, self._to_group = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self.run, daemon=True)

    def run(self):
        self._adopt_settings()
        try:
            self.result = self._work(self._rank)
        except _Ended:
            pass
        except BaseException as error:
            self._error = error
        finally:
            self.dead = True
            self._to_group.release()

    def switch(self):
        """Let the function go on until it waits or ends; raise the error that it ends with."""
        if self._thread.ident is None:
            self._thread.start()
        else:
            self._to_rank.release()
        self._to_group.acquire()
        if self.dead and self._error is not None:
            raise self._error

    def end(self):
        """End the function where it waits, if it does."""
        if self._thread.ident is not None and not self.dead:
            self._is_ended = True
            self.switch()

    def pause(self):
        """Let the group go on, from the function, until it switches back; what waits in the group's thread goes on."""
        if threading.current_thread() is not self._thread:
            return
        self._to_group.release()
        self._to_rank.acquire()
        if self._is_ended:
            raise _Ended

    def frame(self):
        """Return the innermost frame of the function, or None if it does not run."""
        return sys._current_frames().get(self._thread.ident)


def _raise_first(errors):
    """Raise the error of the first rank for which it is not the consequence of another, with the others as notes."""
    consequences = TimeoutError, threading.BrokenBarrierError
    errors = sorted(errors, key=lambda pair: (isinstance(pair[1], consequences), pair[0]))
    for rank, error in errors[1:]:
        if not isinstance(error, threading.BrokenBarrierError) and str(error) != str(errors[0][1]):
            errors[0][1].add_note(f"rank {rank} has raised {type(error).__name__}: {error}")
    if errors:
        raise errors[0][1]


class _LocalRank(Transport):
    """The transport of one rank of a `LocalGroup`."""

    def __init__(self, group, rank):
        super().__init__()
        self.group, self.rank, self.num_ranks, self.device = group, rank, group.num_ranks, group.devices[rank]
        self.can_repeat = not group.is_shared  # ranks that share a GPU, or the simulator, launch together

    def _barrier(self):
        raise NotImplementedError

    def gather(self, value: Any) -> list:
        """Return the values of all ranks, in rank order; all ranks must call it."""
        self.group.values[self.rank] = value
        self._barrier()
        values = list(self.group.values)
        self._barrier()  # all ranks have read the values
        return values

    def rendezvous(self, name: str, seconds: float, absent: Collection[int] = ()) -> bool:  # noqa: D102
        group = self.group
        with group.arrival:
            arrivals = group.arrivals.setdefault(name, [0] * self.num_ranks)
            arrivals[self.rank] += 1
            group.arrival.notify_all()
        have_arrived = lambda: all(rank in absent for rank in self.missing_at(name))
        return seconds > 0 and self._wait_for_arrivals(have_arrived, seconds)

    def missing_at(self, name: str) -> list[int]:  # noqa: D102
        arrivals, ended = self.group.arrivals[name], self.group.ended
        own = arrivals[self.rank]
        return [rank for rank, arrived in enumerate(arrivals) if arrived < own and not ended[rank]]

    def describe(self, *ranks: int) -> str:  # noqa: D102
        # Of all ranks: one that has ended may be the cause even if another rank, which waits for it, is late, too.
        return "".join(
            f"; the function of rank {rank} has ended" for rank, ended in enumerate(self.group.ended) if ended
        )

    def _wait_for_arrivals(self, have_arrived, seconds):
        raise NotImplementedError

    def prepare_kernel(self, kernel, signature, timeout=TIMEOUT_S, **options):  # noqa: D102
        if self.group.is_shared:
            options.pop("cooperative", None)  # a cooperative grid would exclude the grids of the other ranks
        return super().prepare_kernel(kernel, signature, timeout, **options)

    def allocate(self, num_bytes: int) -> SymmetricAllocation:
        """Allocate ``num_bytes`` of zeroed memory on each rank; all ranks must pass the same size."""
        local, name = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device), self._name_allocation()
        if simulator.ENABLED:
            simulator.register(local, f"the buffer of rank {self.rank}", self.rank)
        else:
            torch.cuda.synchronize(self.device)

        def close(seconds):
            if not self.rendezvous(name, seconds):
                self.group.kept.append(local)
            elif simulator.ENABLED:
                simulator.forget(local.data_ptr())

        addresses = self.gather(local.data_ptr())
        return SymmetricAllocation(
            local, torch.tensor(addresses, dtype=torch.uint64, device="cpu").to(self.device), close
        )


class _ThreadRank(_LocalRank):
    def prepare_kernel(self, kernel, signature, timeout=TIMEOUT_S, **options):  # noqa: D102
        start = super().prepare_kernel(kernel, signature, timeout, **options)
        if not self.group.is_shared:
            return start

        def together(launch):
            def launch_together(*arguments):
                self.rendezvous("start", timeout)
                launch(*arguments)
                self.rendezvous("start", timeout)

            return launch_together

        return _replayable(start, together)

    def _wait_for_arrivals(self, have_arrived, seconds):
        with self.group.arrival:
            return self.group.arrival.wait_for(have_arrived, seconds)

    def _barrier(self):
        self.group._thread_barrier.wait(TIMEOUT_S)

    def wait(self, ready: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``ready()`` is true, without holding the GIL; return False after ``seconds``."""
        return poll(ready, seconds)


class _SimulatedRank(_LocalRank):
    condition, seconds = None, math.inf  # what the rank waits for, and for how long
    waits_for_hosts = False  # only for other ranks' functions, not for a kernel: its own may stay queued
    timed_out = False  # no rank can continue, and this one's wait is the shortest
    barriers = 0  # that the rank has reached
    abandoned = False  # another rank has failed

    def needs_no_kernel(self):
        """Return whether the rank can go on before the queued kernels run: it waits for none of its own."""
        with simulator.on_rank(self.rank):
            return (self.waits_for_hosts or not simulator.has_queued()) and self.condition()

    def prepare_kernel(self, kernel, signature, timeout=TIMEOUT_S, **options):  # noqa: D102
        start = super().prepare_kernel(kernel, signature, timeout, **options)

        def queued(launch):
            def queue(*arguments):
                with simulator.exchange():
                    launch(*arguments)

            return queue

        return _replayable(start, queued)

    def _barrier(self):
        self.barriers += 1
        if not self._wait_for_hosts(lambda: all(other.barriers >= self.barriers for other in self.group.ranks), None):
            late = [other.rank for other in self.group.ranks if other.barriers < self.barriers]
            raise TimeoutError(
                f"rank {self.rank} waits in {self._call_of(self.rank)} for ranks {late}{self.describe(*late)}"
            )

    def describe(self, *ranks: int) -> str:  # noqa: D102
        calls = {rank: self._call_of(rank) for rank in ranks if rank != self.rank}
        return "".join(f"; rank {rank} is now in {call}" for rank, call in calls.items() if call) + super().describe()

    def _call_of(self, rank):
        """Return the name of the call of this package in which a rank waits, None if it does not."""
        frame, call = self.group.threads[rank].frame(), None
        while frame is not None and frame.f_code is not _RankThread.run.__code__:
            if frame.f_globals.get("__name__", "").startswith(_PACKAGE):
                call = frame.f_code.co_name
            frame = frame.f_back
        return call

    def _wait_for_hosts(self, ready, seconds):
        self.waits_for_hosts = True
        try:
            return self.wait(ready, seconds)
        finally:
            self.waits_for_hosts = False

    _wait_for_arrivals = _wait_for_hosts

    def wait(self, ready, seconds):
        """Run the other ranks and the kernels until ``ready()``.

        Returns False if no rank can continue, and no other rank waits for fewer ``seconds`` (None: without limit).
        """
        if self.abandoned:
            raise RuntimeError(f"rank {self.rank} cannot go on: another rank has failed")
        self.condition, self.seconds = ready, math.inf if seconds is None else seconds
        self.group.threads[self.rank].pause()
        timed_out, self.condition, self.timed_out = self.timed_out, None, False
        return not timed_out


def _replayable(start, wrap):
    """Return ``wrap(start)``; a prepared call replays what it launches wrapped, too."""
    wrapped = wrap(start)

    def start_and_record(*arguments):
        wrapped(*arguments)
        wrap_recorded(wrap)

    return start_and_record
