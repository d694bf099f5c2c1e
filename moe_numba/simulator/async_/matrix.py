"""Matrices of 8 x 8 16-bit elements between a warp's registers and shared memory."""

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.shared import region
from moe_numba.simulator.core.warp import FULL, collective


def store(array, index, words, trans):
    """Each lane brings a word of every matrix, and the place of a row."""
    count = len(words)
    what = f"stmatrix.x{count}" + ".trans" * trans
    _attend()

    def finish(lanes):
        rows = np.array([lanes[lane][1] for lane in range(32)], np.uint32).T  # count x 32
        matrices = np.ascontiguousarray(rows).view(np.uint16).reshape(count, 8, 8)
        if trans:
            matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
        for lane, row in enumerate(matrices.reshape(8 * count, 8)):
            here, t = lanes[lane][0], lanes[lane][2]
            if here.room.watch is not None:
                here.room.watch.touch_bytes(t, here, writes=True)
            here.bytes[:] = row.view(np.uint8)
        return dict.fromkeys(lanes)

    collective(what, FULL, (_row(array, index, count, what), [int(w) for w in words], thread()), finish)


def load(array, index, count, trans):
    """Each lane names the place of a row, and gets a word of every matrix."""
    what = f"ldmatrix.x{count}" + ".trans" * trans
    _attend()

    def finish(lanes):
        rows = []
        for lane in range(8 * count):
            here, t = lanes[lane]
            if here.room.watch is not None:
                here.room.watch.touch_bytes(t, here, writes=False)
            rows.append(here.bytes.view(np.uint16))
        matrices = np.array(rows).reshape(count, 8, 8)
        if trans:
            matrices = matrices.swapaxes(1, 2)
        words = np.ascontiguousarray(matrices).view(np.uint32).reshape(count, 32)
        return {lane: tuple(words[:, lane]) for lane in lanes}

    return collective(what, FULL, (_row(array, index, count, what), thread()), finish)


def _row(array, index, count, what):
    """The 16 bytes that a lane names; those of lanes beyond the last matrix's rows mean nothing."""
    return region(array, index, 16, 16, what) if thread().lane < 8 * count else None


def _attend():
    if memory.attentive:
        memory.before(memory.NOWHERE, 0, writes=False)
