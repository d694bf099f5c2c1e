"""The clock of the GPU, for those who will not wait for ever."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def globaltimer():
    """``%globaltimer``: nanoseconds since some time in the past, on a clock that all of a GPU's threads share.

    It goes forward by steps, of up to a microsecond on some GPUs. In the simulator each of the scheduler's steps takes
    a microsecond, and who waits for longer than some thousand of them in vain is taken for deadlocked.
    """
    world = simulator.thread().grid.world
    world.footprints = None  # who looks at the clock is not back where it was: some time it will give up
    return np.uint64(1000 * world.steps)


globaltimer = instruction("mov.u64 $0, %globaltimer;", "u64", simulate=globaltimer)
