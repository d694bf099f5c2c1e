"""Warp specialisation: named barriers for some of a block's warps, register reallocation, and lane election."""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import factory, instruction


def bar_sync(barrier, threads):
    """``bar.sync a, b``: wait until ``threads`` threads have arrived at named barrier ``barrier`` (1 to 15).

    ``threads`` is a multiple of 32: whole warps arrive. Barrier 0 is that of ``cuda.syncthreads``.
    """
    simulator.barrier.named("bar.sync", int(barrier), int(threads), wait=True)


def bar_arrive(barrier, threads):
    """``bar.arrive a, b``: arrive at a named barrier for ``threads`` threads, without waiting."""
    simulator.barrier.named("bar.arrive", int(barrier), int(threads), wait=False)


def elect_sync(mask):
    """``elect.sync``: return 1 in one lane of ``mask``, always the same one for a mask, and 0 in the others."""
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
        simulator.registers.setmaxnreg(direction, registers)

    return instruction(f"setmaxnreg.{direction}.sync.aligned.u32 {registers};", "void", simulate=setmaxnreg)


@factory
def make_setmaxnreg_dec(registers):
    """Make ``release()``, ``setmaxnreg.dec``: reduce the warpgroup to ``registers`` registers per thread.

    All four warps of the warpgroup must execute it. ``registers`` is a multiple of 8 from 24 to 256.
    """
    return _setmaxnreg("dec", registers)


@factory
def make_setmaxnreg_inc(registers):
    """Make ``request()``, ``setmaxnreg.inc``: raise the warpgroup to ``registers`` registers per thread.

    It waits until enough registers are free. All four warps of the warpgroup must execute it. A thread starts with the
    number of registers that follows from ``launch_bounds``.
    """
    return _setmaxnreg("inc", registers)
