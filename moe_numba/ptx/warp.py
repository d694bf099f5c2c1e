"""Reductions over a warp in one instruction, and a lane's own masks."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def redux_sync_max_s32(mask, value):
    """``redux.sync.max.s32``: the largest of the values that the lanes named in ``mask`` bring, given to each."""
    return simulator.warp.redux("max", mask, np.int32(value))


def redux_sync_add_s32(mask, value):
    """``redux.sync.add.s32``: the sum of the values that the lanes named in ``mask`` bring, given to each."""
    return simulator.warp.redux("add", mask, np.int32(value))


def lanemask_lt():
    """``%lanemask_lt``: a word with a bit for every lane below this one."""
    return np.uint32((1 << simulator.thread().lane) - 1)


redux_sync_max_s32 = instruction("redux.sync.max.s32 $0, $2, $1;", "s32", "u32", "s32", simulate=redux_sync_max_s32)
redux_sync_add_s32 = instruction("redux.sync.add.s32 $0, $2, $1;", "s32", "u32", "s32", simulate=redux_sync_add_s32)
lanemask_lt = instruction("mov.u32 $0, %lanemask_lt;", "u32", simulate=lanemask_lt, side_effect=False)
