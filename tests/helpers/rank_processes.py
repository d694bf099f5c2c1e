"""One process and one GPU per rank: run functions on all ranks, in processes that stay for the next test."""

import atexit
import faulthandler
import gc
import importlib.util
import traceback
from multiprocessing.connection import wait

import pytest
import torch

from moe_numba.expert_parallel.ranks.process_group import free_port, process_group

SECONDS = 220  # for one function
needs_nvshmem = pytest.mark.skipif(
    importlib.util.find_spec("nvshmem") is None, reason="needs NVSHMEM4Py: pip install 'moe_numba[nvshmem]'"
)
_context = torch.multiprocessing.get_context("spawn")
_ranks: "_Ranks | None" = None  # the processes that stay


def num_ranks():
    """Return the number of ranks: one per GPU, at most 8."""
    return min(8, torch.cuda.device_count())


def run(work, *arguments):
    """Run ``work(rank, ranks, *arguments)`` on all ranks; a failure of one is raised with its traceback.

    It starts the processes, or uses those of an earlier test: starting them takes longer than most tests.
    """
    global _ranks
    if _ranks is None:
        _ranks = _Ranks(num_ranks())
        atexit.register(stop)
    try:
        _ranks.run(work, arguments)
    except BaseException:
        stop()  # the others may wait for the rank that failed
        raise


def stop():
    """End the processes that stay."""
    global _ranks
    if _ranks is not None:
        _ranks.stop()
    _ranks = None


def run_to_exit(work, *arguments):
    """Run ``work(rank, ranks, *arguments)`` in processes of its own, and return their exit codes."""
    ranks, port = num_ranks(), free_port()
    processes = [_process(_run_once, rank, ranks, port, work, arguments) for rank in range(ranks)]
    for process in processes:
        process.join(SECONDS)
        assert process.exitcode is not None, "a rank hangs"
    return [process.exitcode for process in processes]


def _process(target, *arguments):
    process = _context.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


class _Ranks:
    def __init__(self, ranks):
        port = free_port()
        pipes = [_context.Pipe() for _ in range(ranks)]
        self._connections = [own for own, _ in pipes]
        self._processes = [_process(_serve, rank, ranks, port, other) for rank, (_, other) in enumerate(pipes)]
        for _, other in pipes:
            other.close()  # so that the end of a process ends the wait for its answer

    def run(self, work, arguments):
        for connection in self._connections:
            connection.send((work, arguments))
        waiting = dict(zip(self._connections, range(len(self._connections)), strict=True))
        while waiting:
            ready = wait(list(waiting), SECONDS)
            assert ready, f"rank {min(waiting.values())} hangs"
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    error = connection.recv()
                except EOFError:
                    error = f"its process ended with exit code {self._exit_code(rank)}"
                assert error is None, f"rank {rank}: {error}"

    def _exit_code(self, rank):
        self._processes[rank].join(5)
        return self._processes[rank].exitcode

    def stop(self):
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()


def _run_once(rank, ranks, port, work, arguments):
    with _time_limit(), process_group(rank, ranks, port):
        work(rank, ranks, *arguments)


def _serve(rank, ranks, port, connection):
    torch.set_num_threads(2)  # small tensors, many processes
    with process_group(rank, ranks, port):
        while True:
            try:
                work, arguments = connection.recv()
            except EOFError:
                break
            error = None
            with _time_limit():
                try:
                    work(rank, ranks, *arguments)
                except BaseException:
                    error = traceback.format_exc()
            connection.send(error)
            if error is not None:
                break
            _restore()


class _time_limit:
    """Prints where a rank hangs, and ends its process."""

    def __enter__(self):
        faulthandler.dump_traceback_later(SECONDS - 20, exit=True)

    def __exit__(self, *_):
        faulthandler.cancel_dump_traceback_later()


def _restore():
    """Undo what a function may have set, and free the memory that only cycles refer to."""
    from moe_numba.expert_parallel import Buffer

    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    Buffer._uses_tma = None
    gc.collect()
