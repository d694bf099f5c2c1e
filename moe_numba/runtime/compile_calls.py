"""Compilation of all kernels that some calls launch, by several processes, before the calls are made.

Each process makes the calls in compile-only mode, which reports the kernels, and compiles some of them into the cache
of machine code.
"""

import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import context
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
        matter. The processes start before the iterable is read, so that it may take its time.
    gpu : GPU, optional
        By default the current one.
    processes : int, optional
        By default one per core, at most `MAX_PROCESSES`.
    prepare : callable, optional
        What each process calls meanwhile, a function of a module: it imports what the calls need.

    Raises
    ------
    Exception
        What a call raises, or the compiler.
    """
    processes = processes or default_processes()
    gpu = gpu or device.gpu_of(torch.cuda.current_device())
    with compiler_pool(processes) as pool:
        for _ in range(processes):
            pool.submit(prepare or _start)
        given = pickle.dumps((gpu, tuple(dict.fromkeys(calls))))
        futures = [pool.submit(_compile, i, given) for i in range(processes)]
        total, done = futures[0].result()[1], 0
        futures += [pool.submit(_compile, i, given) for i in range(processes, total)]
        for future in as_completed(futures):
            done += future.result()[0]
            yield done, total


def usable_cores():
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS and Windows


def default_processes():
    """Return how many processes compile by default: one per core, at most `MAX_PROCESSES`."""
    return min(MAX_PROCESSES, usable_cores())


def compiler_pool(processes):
    """Return a pool of processes that compile."""
    # A process that was forked could not use the GPU's context, nor a lock that a thread of its parent held.
    return ProcessPoolExecutor(processes, _Spawn())


class _Process(context.SpawnProcess):
    """A process that does not import the caller's script: it may call the pool, and have no ``if __name__ == ...``."""

    @staticmethod
    def _Popen(process):
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            return context.SpawnProcess._Popen(process)
        finally:
            sys.modules["__main__"] = main


class _Spawn(context.SpawnContext):
    Process = _Process


def _start():
    """Do nothing: a process that calls it has started, and has imported torch and Numba."""


@cache
def _definitions(given):
    """Return the GPU and the different kernels of the calls, the same in each process.

    Kernels that take longest to compile are the first; ``given`` is the GPU and the calls, pickled.
    """
    gpu, calls = pickle.loads(given)
    launches: list = []
    device.compile_only(gpu, lambda *launch: launches.append(launch))
    for call in calls:
        call()
    found = dict.fromkeys((kernel, signature, options["launch_bounds"]) for kernel, signature, options in launches)
    return gpu, sorted(found, key=lambda definition: -len(definition[0].py_func.__code__.co_code))


def _compile(number, given):
    """Compile a kernel; return (1 if there is one of this number, number of all kernels)."""
    gpu, found = _definitions(given)
    if number >= len(found):
        return 0, len(found)
    kernel, signature, bounds = found[number]
    cubin_cache.machine_code(kernel, signature, arch=gpu.arch, link_arch=gpu.hardware_arch, launch_bounds=bounds)
    return 1, len(found)
