"""Compilation of all kernels that some calls launch, by several processes, before the calls are made.

A process is started that imports the package once. It makes the calls in compile-only mode, which reports the kernels,
and forks a process for each new kernel, which compiles it into the cache of machine code.
"""

import gc
import multiprocessing
import os
import pickle
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, context
from typing import Any

import torch

from moe_numba.runtime import cubin_cache, device

MAX_PROCESSES = 32


def compile_calls(
    calls: Iterable[Any],
    gpu: device.GPU | None = None,
    processes: int | None = None,
    prepare: Callable[[], None] | None = None,
) -> Iterator[tuple[int, int]]:
    """Compile the kernels of some calls; yield (kernels that are compiled, all kernels) whenever one is ready.

    Parameters
    ----------
    calls : iterable of callables
        Without arguments; they can be pickled, and call functions of the package on CPU tensors whose values do not
        matter. Kernels of the first calls are compiled while the iterable is read, so that it may take its time.
    gpu : GPU, optional
        By default the current one.
    processes : int, optional
        Kernels that are compiled at the same time; by default one per core, at most `MAX_PROCESSES`.
    prepare : callable, optional
        A function of a module: it imports what the calls need, before the first one is made.

    Raises
    ------
    Exception
        What a call raises, or the compiler.
    """
    gpu = gpu or device.gpu_of(torch.cuda.current_device())
    pipe, other = multiprocessing.Pipe()
    server = _Process(target=_serve, args=(other, gpu, processes or default_processes(), prepare))
    server.start()
    other.close()
    try:
        _send_all(pipe, calls)
        while (message := _receive(pipe)) is not None:
            if isinstance(message, BaseException):
                raise message
            yield message
    finally:
        pipe.close()  # which ends the process, if it still compiles
        server.join()


def _send_all(pipe, calls):
    sent = set()
    try:
        for call in calls:
            if call not in sent:
                sent.add(call)
                pipe.send(call)
        pipe.send(None)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the process has ended; what it sent last says why


def usable_cores():
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows


def default_processes():
    """Return how many processes compile by default: one per core, at most `MAX_PROCESSES`."""
    return min(MAX_PROCESSES, usable_cores())


class _Process(context.SpawnProcess):
    """A process that does not import the caller's script: it may call this, and have no ``if __name__ == ...``.

    A process that was forked could not use the GPU's context, nor a lock that a thread of its parent held.
    """

    @staticmethod
    def _Popen(process):
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            return context.SpawnProcess._Popen(process)
        finally:
            sys.modules["__main__"] = main


def _receive(pipe):
    """Receive what a process sends, which is an exception if it has ended instead."""
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return RuntimeError("a process that compiles kernels ended; it may have been short of memory")


def _serve(pipe, gpu, processes, prepare):
    """Send (kernels that are compiled, all kernels) for the calls that come through a pipe, or an exception."""
    try:
        if prepare:
            prepare()
        for progress in _progress(pipe, gpu, processes):
            pipe.send(progress)
        pipe.send(None)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the caller has given up
    except Exception as error:
        pipe.send(_picklable(error))
        # A pipe that is closed with calls unread would lose the error.
        while callable(_receive(pipe)):
            pass


def _picklable(error):
    """Return an exception that another process can raise, with a note where it was raised."""
    where = "".join(traceback.format_exception(error))
    error.add_note(where)
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(where)


def _progress(pipe, gpu, processes):
    fork = multiprocessing.get_context("fork")
    found: list = []  # different kernels

    def add(kernel, signature, options):
        launch = kernel, signature, options["launch_bounds"]
        if launch not in found:
            found.append(launch)

    device.compile_only(gpu, add)
    gc.freeze()  # a collection would copy the pages that forked processes share
    running: list = []
    started, reading = 0, True
    while reading or started < len(found) or running:
        for ready in connection.wait([*running, *([pipe] if reading else [])]):
            message = _receive(ready)
            if isinstance(message, BaseException):
                if ready is pipe:  # the caller has given up
                    return
                raise message
            if ready is not pipe:
                running.remove(ready)
                yield started - len(running), len(found)
            elif message is None:
                reading = False
            else:
                message()
        while started < len(found) and len(running) < processes:
            receiver, sender = fork.Pipe(duplex=False)
            fork.Process(target=_compile, args=(sender, gpu, *found[started]), daemon=True).start()
            sender.close()
            running.append(receiver)
            started += 1


def _compile(sender, gpu, kernel, signature, bounds):
    """Compile a kernel, and send True or an exception."""
    try:
        cubin_cache.machine_code(kernel, signature, arch=gpu.arch, link_arch=gpu.hardware_arch, launch_bounds=bounds)
        sender.send(True)
    except Exception as error:
        sender.send(_picklable(error))
