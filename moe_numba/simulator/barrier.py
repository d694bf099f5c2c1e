"""Barriers of a block and of a grid: all threads must come, and to the same line.

A GPU leaves undefined what else happens.
"""

import sys

from moe_numba.simulator.engine import thread
from moe_numba.simulator.errors import DivergentBarrier, MissingLane, kernel_frame, place


def block(what, value=None, finish=None):
    """Wait for all threads of the block; `finish` maps their values to one result for all."""
    t = thread()
    scope, warp = t.block, t.block.warps[t.warp]
    frame = kernel_frame(sys._getframe(1))
    site = frame.f_code.co_filename, frame.f_lineno
    if scope.exited:
        raise DivergentBarrier(
            f"{t} comes to {what} ({place(frame)}), but {scope.exited} threads of its block have exited"
        )
    for other in scope.meetings.values():
        if other.waiting and other.partners == scope.size and (other.site != site or other.what != what):
            first = other.waiting[0]
            raise DivergentBarrier(
                f"{t} comes to {what} ({place(frame)}), but {first} waits at {other.what} ({place(first.gr_frame)})"
            )
    for other in warp.meetings.values():
        if other.needs(t):
            raise MissingLane(
                f"{warp}: lanes {t.lane} are named in mask {other.members:#010x} of {other.what} "
                f"but wait at {what} ({place(frame)}), which needs the lanes that wait there"
            )
    return t.meet(scope, what, scope.size, value, finish and (lambda values: _to_all(values, finish)), site=site)


def _to_all(values, finish):
    return dict.fromkeys(values, finish(values.values()))


def grid():
    """Wait for all threads of the grid."""
    t = thread()
    t.meet(t.grid, "grid sync", t.grid.size)
