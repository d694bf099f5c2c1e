"""Warps that work apart: barriers for some of a block's warps, registers handed over, one lane that acts for all."""

from functools import cache

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def bar_sync(barrier, threads):
    """``bar.sync a, b``: wait until ``threads`` threads, whole warps, have come to one of the barriers 1 to 15.

    Barrier 0 is that of ``cuda.syncthreads``.
    """
    simulator.barrier.named("bar.sync", int(barrier), int(threads), wait=True)


def bar_arrive(barrier, threads):
    """``bar.arrive a, b``: count as one of the ``threads`` that ``bar_sync`` waits for, and go on."""
    simulator.barrier.named("bar.arrive", int(barrier), int(threads), wait=False)


def elect_sync(mask):
    """``elect.sync``: 1 in one of the lanes that ``mask`` names, the same one for the same mask; 0 in the others."""
    return np.uint32(simulator.warp.elect(mask))


bar_sync = instruction("bar.sync $0, $1;", "void", "u32", "u32", simulate=bar_sync)
bar_arrive = instruction("bar.arrive $0, $1;", "void", "u32", "u32", simulate=bar_arrive)
elect_sync = instruction(
    "{ .reg .pred p; .reg .b32 r; elect.sync r|p, $1; selp.u32 $0, 1, 0, p; }", "u32", "u32", simulate=elect_sync
)


def _setmaxnreg(direction, registers):
    if registers % 8 or not 24 <= registers <= 256:
        raise ValueError(f"setmaxnreg takes a multiple of 8 from 24 to 256, not {registers}")

    def setmaxnreg():
        simulator.barrier.warpgroup_arrives(f"setmaxnreg.{direction} {registers}")

    return instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {registers};", "void", simulate=setmaxnreg)


@cache
def make_setmaxnreg_dec(registers):
    """``release()``, ``setmaxnreg.dec``: this warpgroup's threads keep so many registers and give the others back."""
    return _setmaxnreg("dec", registers)


@cache
def make_setmaxnreg_inc(registers):
    """``request()``, ``setmaxnreg.inc``: this warpgroup's threads get so many registers, as soon as there are any.

    Each of a warpgroup's four warps must come. ``launch_bounds`` says with how many registers a thread starts.
    """
    return _setmaxnreg("inc", registers)
