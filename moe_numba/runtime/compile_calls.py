"""Compilation of all kernels that some calls launch, by several processes, before the calls are made.

Each process makes the calls in compile-only mode, which reports the kernels, and compiles some of them into the cache
of machine code.
"""

import os
import sys
import types
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import context
from typing import Any

import torch

from moe_numba.runtime import cubin_cache, device

MAX_PROCESSES = 32


def compile_calls(
    calls: Iterable[Any], gpu: device.GPU | None = None, processes: int | None = None
) -> Iterator[tuple[int, int]]:
    """Compile the kernels of some calls; yield (kernels that are compiled, all kernels) whenever one is ready.

    Parameters
    ----------
    calls : iterable of callables
        Without arguments; they can be pickled, and call functions of the package on CPU tensors whose values do not
        matter.
    gpu : GPU, optional
        By default the current one.
    processes : int, optional
        By default one per core, at most `MAX_PROCESSES`.

    Raises
    ------
    Exception
        What a call raises, or the compiler.
    """
    calls, processes = tuple(calls), processes or default_processes()
    gpu = gpu or device.gpu_of(torch.cuda.current_device())
    with compiler_pool(processes, _start, (gpu, calls)) as pool:
        futures = [pool.submit(_compile, i) for i in range(processes)]
        total, done = futures[0].result()[1], 0
        futures += [pool.submit(_compile, i) for i in range(processes, total)]
        for future in as_completed(futures):
            done += future.result()[0]
            yield done, total


def default_processes():
    """Return how many processes compile by default: one per core, at most `MAX_PROCESSES`."""
    return min(MAX_PROCESSES, len(os.sched_getaffinity(0)))


def compiler_pool(processes, *initializer):
    """Return a pool of processes that compile; ``initializer`` as for ``ProcessPoolExecutor``."""
    # A process that was forked could not use the GPU's context, nor a lock that a thread of its parent held.
    return ProcessPoolExecutor(processes, _Spawn(), *initializer)


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


def _start(gpu, calls):
    """Give a process what `_definitions` needs."""
    global _calls, _gpu
    _calls, _gpu = calls, gpu


@cache
def _definitions():
    """Return the different kernels of the calls, those first that take longest to compile; the same in each process."""
    launches = []
    device.compile_only(_gpu, lambda *launch: launches.append(launch))
    for call in _calls:
        call()
    found = dict.fromkeys((kernel, signature, options["launch_bounds"]) for kernel, signature, options in launches)
    return sorted(found, key=lambda definition: -len(definition[0].py_func.__code__.co_code))


def _compile(number):
    """Compile a kernel; return (1 if there is one of this number, number of all kernels)."""
    found = _definitions()
    if number >= len(found):
        return 0, len(found)
    kernel, signature, bounds = found[number]
    cubin_cache.machine_code(kernel, signature, arch=_gpu.arch, link_arch=_gpu.hardware_arch, launch_bounds=bounds)
    return 1, len(found)
