"""Special registers: the global timer."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def globaltimer():
    """``%globaltimer``: return the time in nanoseconds, on a clock shared by all threads of a GPU.

    Its resolution is up to a microsecond on some GPUs. In the simulator each scheduler step, which runs one warp until
    it waits, takes a microsecond: a second is a million steps. If all threads poll in vain, the clock is set forward
    until a timeout expires; without a timeout that is a deadlock.
    """
    thread = simulator.thread()
    return np.uint64(thread.grid.world.read_clock(thread))


globaltimer = instruction("mov.u64 $0, %globaltimer;", "u64", simulate=globaltimer)
