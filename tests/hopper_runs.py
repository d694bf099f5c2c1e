"""What the tests of Hopper's instructions share: running a kernel in many orders, and numbers to run it on."""

import numpy as np
import pytest
import torch

from moe_numba import simulator
from moe_numba.runtime.launch import launch

RNG = np.random.default_rng(0)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

_is_there = simulator.ENABLED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))
hopper = pytest.mark.skipif(not _is_there, reason="these instructions came with Hopper GPUs")


def runs(kernel, make, *, blocks=1, threads=32, count=6, **options):
    """Start a kernel over what `make` makes anew each time; yield that.

    With an entry in C++: a linker of PTX may not align dynamic shared memory behind static. In the simulator threads
    and copies run in several orders, under every other seed with preemption.
    """
    for seed in range(count if simulator.ENABLED else 1):
        arguments = make()
        with simulator.seed(seed, preempt=0.2 if seed % 2 else 0.0):
            launch(kernel, blocks, threads, *arguments, cpp_entry=True, **options)
        yield arguments


def outcomes(kernel, make, *, takes=None, blocks=1, threads=64, seeds=8, **options):
    """What each seed makes of a kernel: what `make` made for it (it takes the first `takes`), or the error."""
    for seed in range(seeds):
        arguments = make()
        try:
            with simulator.seed(seed, preempt=0.2 if seed % 2 else 0.0):
                launch(kernel, blocks, threads, *arguments[:takes], **options)
            yield arguments
        except simulator.SimulatorError as error:
            yield error


def refused(error, found, *patterns, every=True):
    """Of a kernel's outcomes all (or some) are this error, in these words; gives the others."""
    found = list(found)
    errors = [e for e in found if isinstance(e, Exception)]
    assert errors and (len(errors) == len(found) or not every), found
    for e in errors:
        assert type(e) is error, e
        for pattern in patterns:
            assert any(p in str(e) for p in pattern.split("|")), f"{pattern!r} is not in: {e}"
    return [f for f in found if not isinstance(f, Exception)]


def random_bytes(*shape):
    return torch.from_numpy(RNG.integers(0, 256, shape, dtype=np.uint8))


def small_integers(shape, dtype, device):
    """Numbers whose sums of products every tensor core gets right to the last bit."""
    return torch.from_numpy(RNG.integers(-3, 4, shape)).float().to(dtype).to(device)
