"""Helpers for tests of Hopper instructions: run a kernel under several seeds, and make test data."""

import numpy as np
import pytest
import torch

from moe_numba import simulator
from moe_numba.runtime.launch import launch

RNG = np.random.default_rng(0)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

_available = simulator.ENABLED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))
hopper = pytest.mark.skipif(not _available, reason="these instructions need a Hopper GPU")
simulated = pytest.mark.skipif(not simulator.ENABLED, reason="undefined on a GPU: set MOE_NUMBA_SIMULATE=1")


def _seeded(seed):
    """Return a context with this seed, with preemption under odd seeds."""
    return simulator.seed(seed, preempt=0.2 if seed % 2 else 0.0)


def runs(kernel, make, *, blocks=1, threads=32, count=6, **options):
    """Launch a kernel on new arguments from `make()` under `count` seeds (once on a GPU); yield the arguments.

    It launches through a C++ entry: from PTX alone the linker may misalign dynamic shared memory after static.
    """
    for seed in range(count if simulator.ENABLED else 1):
        arguments = make()
        with _seeded(seed):
            launch(kernel, blocks, threads, *arguments, cpp_entry=True, **options)
        yield arguments


def outcomes(kernel, make, *, takes=None, blocks=1, threads=64, seeds=8, **options):
    """Yield for each seed the arguments from `make()` after the launch, or the simulator's error.

    The kernel takes the first `takes` of them; `make` may return more, to keep them alive.
    """
    for seed in range(seeds):
        arguments = make()
        try:
            with _seeded(seed):
                launch(kernel, blocks, threads, *arguments[:takes], **options)
            yield arguments
        except simulator.SimulatorError as error:
            yield error


def check_refused(error, results, *patterns, every=True):
    """Assert that all outcomes (or some, with `every=False`) are this error with these patterns; return the others.

    Each pattern lists alternatives, separated by `|`.
    """
    results = list(results)
    errors = [e for e in results if isinstance(e, Exception)]
    assert errors and (len(errors) == len(results) or not every), results
    for e in errors:
        assert type(e) is error, e
        for pattern in patterns:
            assert any(p in str(e) for p in pattern.split("|")), f"{pattern!r} is not in: {e}"
    return [f for f in results if not isinstance(f, Exception)]


def random_bytes(*shape):
    return torch.from_numpy(RNG.integers(0, 256, shape, dtype=np.uint8))


def aligned_zeros(size, dtype, device="cpu"):
    """Return zeros at an address that is a multiple of 128 bytes, as tensor maps need."""
    padding = 128 // dtype.itemsize
    x = torch.zeros(size + padding, dtype=dtype, device=device)
    return x[-x.data_ptr() % 128 // dtype.itemsize :][:size]


def small_integers(shape, dtype, device):
    """Return random integers from -3 to 3, whose sums of products are exact on a tensor core."""
    return torch.from_numpy(RNG.integers(-3, 4, shape)).float().to(dtype).to(device)
