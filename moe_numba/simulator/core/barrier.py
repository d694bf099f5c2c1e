"""Barriers of a block and of a grid, named barriers of some of a block's warps, and warpgroup-wide instructions.

All threads of a block that have not exited must reach a block-wide barrier, at the same source line; since Volta it
does not wait for the others. Threads that wait elsewhere are undefined on a GPU and an error here.
"""

import sys

from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import (
    ALL_OF_THE_GRID,
    ALL_THREADS,
    DivergentBarrier,
    MissingLane,
    SimulatorError,
    kernel_frame,
    source_location,
)
from moe_numba.simulator.core.warp import check_aligned


def block(what, value=None, finish=None):
    """Wait for the block's threads that have not exited; `finish` maps an iterable of their values to one result."""
    t = thread()
    scope, warp = t.block, t.unit
    frame = kernel_frame(sys._getframe(1))
    site = frame.f_code.co_filename, frame.f_lineno
    for other in scope.open_rendezvous.values():
        expected = other.needs(t) and t not in other.values  # it may have arrived without waiting
        if other.waiting and expected and (other.site != site or other.what != what):
            first = other.waiting[0]
            raise DivergentBarrier(
                f"{t} reaches {what} ({source_location(frame)}), "
                f"but {first} waits at {other.what} ({source_location(first.gr_frame)}); {ALL_THREADS}"
            )
    for other in warp.open_rendezvous.values():
        if other.needs(t):
            raise MissingLane(
                f"{warp}: lanes {t.lane} are named in mask {other.mask:#010x} of {other.what} "
                f"but wait at {what} ({source_location(frame)}), which needs the lanes that wait there"
            )
    broadcast = finish and (lambda values: dict.fromkeys(values, finish(values.values())))
    return t.rendezvous(scope, what, scope.size - scope.exited, value, broadcast, site=site, of_running=True)


def grid():
    """Wait for the grid's threads that have not exited; the first thread of each block arrives for it, as on a GPU."""
    t = thread()
    scope = t.grid
    scope.check_cooperative(t)
    if scope.exited and not scope.open_rendezvous:
        first = next((b.warps[0].threads[0] for b in scope.blocks if b.exited and b.warps[0].exited & 1), None)
        if first is not None:
            raise DivergentBarrier(
                f"{t} reaches grid sync ({source_location(sys._getframe())}), but {first} has exited, and arrives for "
                f"its block; {ALL_OF_THE_GRID}"
            )
    t.rendezvous(scope, "grid sync", scope.size - scope.exited, of_running=True)


def named(what, barrier, threads, wait):
    """Arrive at one of a block's barriers 1 to 15, which expects `threads` threads, and wait for them or continue."""
    t = thread()
    if not 1 <= barrier <= 15:
        raise SimulatorError(f"{t}: {what} takes a barrier from 1 to 15, not {barrier}; 0 is that of syncthreads")
    if threads % 32 or not 32 <= threads <= (t.block.size + 31) // 32 * 32:
        raise SimulatorError(f"{t}: {what} takes a multiple of 32 threads, up to those of its block, not {threads}")
    name = f"barrier {barrier}"
    current = t.block.open_rendezvous.get((name, None))
    if current is not None and current.expected != threads:
        raise DivergentBarrier(
            f"{t} reaches {name} ({source_location(sys._getframe())}) for {threads} threads, "
            f"but other threads reached it for {current.expected}"
        )
    if threads == t.block.size and (absent := _exited_without_arriving(t.block, name)):
        raise DivergentBarrier(
            f"{t} reaches {name} ({source_location(sys._getframe())}) for all threads of its block, "
            f"but {absent} of them have exited"
        )
    check_aligned(f"{what} {barrier}")
    t.rendezvous(t.block, name, threads, wait=wait)


def warpgroup(what):
    """Return the current thread's warpgroup, all of whose four warps must execute the `.aligned` instruction `what`."""
    t = thread()
    group = t.block.warps[t.warp].warpgroup
    if group.size != 128:
        raise SimulatorError(
            f"{t}: {what} needs a warpgroup, four warps of which the first is a multiple of four; {group} are fewer"
        )
    if absent := _exited_without_arriving(group, what):
        raise DivergentBarrier(
            f"{t} reaches {what} ({source_location(sys._getframe())}), "
            f"but {absent} threads of its warpgroup have exited"
        )
    check_aligned(what)
    return group


def warpgroup_arrive(what):
    """Record that this thread executes an instruction that its whole warpgroup must execute, and continue."""
    group = warpgroup(what)
    t = thread()
    if (profile := t.grid.world.profile) is not None:
        profile.warpgroup_instruction(group, what)
    t.rendezvous(group, what, group.size, wait=False)


def _exited_without_arriving(scope, what):
    """Count a scope's threads that have exited without arriving at the rendezvous `what`."""
    current = scope.open_rendezvous.get((what, None)) if scope.exited else None
    return scope.exited - sum(t.dead for t in current.values) if current else scope.exited
