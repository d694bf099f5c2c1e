"""What the tests of Hopper's instructions share: running a kernel in many orders, and numbers to run it on."""

import numpy as np
import pytest
import torch

from moe_numba import simulator
from moe_numba.by_value import start

RNG = np.random.default_rng(0)
E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

_is_there = simulator.ENABLED or (torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0))
hopper = pytest.mark.skipif(not _is_there, reason="these instructions came with Hopper GPUs")


def runs(kernel, make, *, blocks=1, threads=32, count=6, **options):
    """Start a kernel over what `make` makes anew each time; yield that.

    As a program, since a linker of PTX may not align dynamic shared memory behind static. In the simulator threads and
    copies run in several orders, under every other seed with preemption.
    """
    for seed in range(count if simulator.ENABLED else 1):
        arguments = make()
        with simulator.seed(seed, preempt=0.2 if seed % 2 else 0.0):
            start(kernel, blocks, threads, *arguments, **options)
        yield arguments


def random_bytes(*shape):
    return torch.from_numpy(RNG.integers(0, 256, shape, dtype=np.uint8))


def small_integers(shape, dtype, device):
    """Numbers whose sums of products every tensor core gets right to the last bit."""
    return torch.from_numpy(RNG.integers(-3, 4, shape)).float().to(dtype).to(device)
