"""Barriers of a block and of a grid: all threads must come, and to the same line; and barriers of some of its warps.

A GPU leaves undefined what else happens.
"""

import sys

from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import DivergentBarrier, MissingLane, SimulatorError, kernel_frame, place


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


def named(what, barrier, threads, wait):
    """Come to one of a block's numbered barriers, which takes so many threads, and wait for them or go on."""
    t = thread()
    if not 1 <= barrier <= 15:
        raise SimulatorError(f"{t}: {what} takes a barrier from 1 to 15, not {barrier}; 0 is that of syncthreads")
    if threads % 32 or not 32 <= threads <= (t.block.size + 31) // 32 * 32:
        raise SimulatorError(f"{t}: {what} takes a multiple of 32 threads, up to those of its block, not {threads}")
    meeting = t.block.meetings.get((f"barrier {barrier}", None))
    if meeting is not None and meeting.partners != threads:
        raise DivergentBarrier(
            f"{t} comes to barrier {barrier} ({place(sys._getframe())}) for {threads} threads, "
            f"but others came to it for {meeting.partners}"
        )
    if threads == t.block.size and (gone := _missing(t.block, f"barrier {barrier}")):
        raise DivergentBarrier(
            f"{t} comes to barrier {barrier} ({place(sys._getframe())}) for all threads of its block, "
            f"but {gone} of them have exited"
        )
    t.meet(t.block, f"barrier {barrier}", threads, wait=wait)


def warpgroup(what):
    """The current thread's warpgroup, all of whose four warps are to come to `what`."""
    t = thread()
    group = t.block.warps[t.warp].group
    if group.size != 128:
        raise SimulatorError(f"{t}: {what} takes four warps, from a multiple of four on, but {group} are not four")
    if gone := _missing(group, what):
        raise DivergentBarrier(
            f"{t} comes to {what} ({place(sys._getframe())}), but {gone} threads of its warpgroup have exited"
        )
    return group


def _missing(scope, what):
    """How many of a scope's threads have exited without having come to the meeting `what`."""
    came = scope.meetings[what, None].values if scope.exited and (what, None) in scope.meetings else ()
    return scope.exited - sum(other.dead for other in came)


def warpgroup_arrives(what):
    """Come to what all warps of the warpgroup must come to, and go on."""
    group = warpgroup(what)
    thread().meet(group, what, group.size, wait=False)
