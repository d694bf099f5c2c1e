"""Special registers: the global timer."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def globaltimer():
    """``%globaltimer``: return the time in nanoseconds, on a clock shared by all threads of a GPU.

    Its resolution is up to a microsecond on some GPUs. In the simulator each scheduler step takes a microsecond, and
    threads that poll for some thousand rounds without any change of memory count as deadlocked.
    """
    world = simulator.thread().grid.world
    world.snapshots = None  # a thread that reads the clock makes progress: it may time out
    return np.uint64(1000 * world.steps)


globaltimer = instruction("mov.u64 $0, %globaltimer;", "u64", simulate=globaltimer)
