"""stmatrix: stores 8 x 8 matrices of 16-bit elements from a warp's registers to shared memory."""

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.shared import shared_region
from moe_numba.simulator.core.warp import FULL_MASK, collective


def store(array, index, registers, trans):
    """Store one register per matrix from each lane, to the rows that lanes 0 to 8 * len(registers) - 1 address."""
    count = len(registers)
    what = f"stmatrix.x{count}" + ".trans" * trans

    def finish(lanes):
        words = np.array([lanes[lane][1] for lane in range(32)], np.uint32).T  # count x 32
        matrices = np.ascontiguousarray(words).view(np.uint16).reshape(count, 8, 8)
        if trans:
            matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
        for lane, data in enumerate(matrices.reshape(8 * count, 8)):
            row, _, t = lanes[lane]
            row.check_access(t, writes=True)
            row.bytes[:] = data.view(np.uint8)
        return dict.fromkeys(lanes)

    row = _addressed_row(array, index, count, what)
    collective(what, FULL_MASK, (row, [int(register) for register in registers], thread()), finish)


def _addressed_row(array, index, count, what):
    """Return the 16 bytes that a lane addresses; addresses of lanes beyond the last matrix are ignored."""
    if memory.watching:
        memory.maybe_preempt()
    return shared_region(array, index, 16, 16, what) if thread().lane < 8 * count else None
