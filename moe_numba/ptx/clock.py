"""The GPU's clocks, for who waits and means to give up some time."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def globaltimer():
    """``mov.u64 %globaltimer``: nanoseconds of a clock that all the GPU's threads share; it ticks about once in 32.

    In the simulator it counts the steps of the scheduler.
    """
    return np.uint64(simulator.thread().grid.world.steps)


globaltimer = instruction("mov.u64 $0, %globaltimer;", "u64", simulate=globaltimer)
