"""Warp-wide operations: each lane that the mask names contributes a value and receives a result.

Lanes that a block does not have (its last warp may be partial) need not take part, as on a GPU. A value read from a
lane that does not take part is undefined on a GPU and poison here.
"""

import operator
import sys
from functools import reduce

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.engine import Rendezvous, thread
from moe_numba.simulator.core.errors import (
    ALIGNED,
    ALL_LANES,
    DivergentBarrier,
    MissingLane,
    format_lanes,
    format_place,
    kernel_frame,
    source_location,
)
from moe_numba.simulator.core.typed_code import position

FULL_MASK = 0xFFFFFFFF


def collective(what, mask, value=None, finish=None):
    """Wait for all lanes in `mask` to call `what` with this mask; `finish` maps {lane: value} to {lane: result}."""
    t = thread()
    warp = t.unit
    mask = int(mask) & FULL_MASK
    if not mask >> t.lane & 1:
        raise MissingLane(f"{t} calls {what} with mask {mask:#010x}, which does not name it")
    members = mask & warp.lanes
    if members & warp.exited:
        raise MissingLane(
            f"{warp}: lanes {format_lanes(members & warp.exited)} are named in mask {mask:#010x} of {what} "
            f"but have exited, while lane {t.lane} arrives; {ALL_LANES}"
        )
    if (current := warp.open_rendezvous.get((what, members))) is not None:
        return t.arrive(current, value, finish, True, True)
    _check_no_cycle(t, warp, what, mask)
    return t.rendezvous(warp, what, members.bit_count(), value, finish, members, by_lane=True)


def aligned(what, value=None, finish=None):
    """Execute an `.aligned` instruction of all lanes of the warp; see `collective`."""
    check_aligned(what)
    return collective(what, FULL_MASK, value, finish)


def check_aligned(what):
    """Raise unless the lanes of a warp reach an `.aligned` instruction by the same calls, in the same iterations.

    The PTX ISA allows one in conditional code only if all lanes evaluate the condition identically. Divergent code
    before it is allowed: ptxas makes the warp converge behind that (`WARPSYNC.ALL`).
    """
    t, frame = thread(), kernel_frame(sys._getframe(1))
    own = t, position(frame), (frame.f_code, frame.f_lineno), 0
    lane, places = 1 << t.lane, t.unit.aligned
    first, there, place, arrived = places.get(what, own)
    if arrived & lane:  # of the last time, when a lane has exited instead
        first, there, place, arrived = own
    if own[1] != there:
        how = "at different lines" if own[2] != place else "by different calls, or in different iterations"
        raise DivergentBarrier(
            f"{t} ({format_place(*own[2])}) and lane {first.lane} ({format_place(*place)}) reach {what} {how}; "
            f"{ALIGNED}"
        )
    places[what] = first, there, place, arrived | lane
    if arrived | lane | t.unit.exited == t.unit.lanes:
        del places[what]


def _check_no_cycle(t, warp, what, mask):
    """Raise if a lane that the mask names waits elsewhere for this one: it would never arrive here."""
    for other in warp.threads:
        if type(other.waits) is Rendezvous and mask >> other.lane & 1 and other.waits.needs(t):
            raise MissingLane(
                f"{warp}: lanes {other.lane} are named in mask {mask:#010x} of {what} but wait at {other.waits}, "
                f"{source_location(other.gr_frame)}, which needs lane {t.lane}; {ALL_LANES}"
            )


def undefined_value(like):
    """Return what a lane reads where the instruction defines no value."""
    if isinstance(like, np.generic):
        return memory.poison(1, like.dtype)[0]
    return float("nan") if isinstance(like, float) else 0xCDCDCDCD


def unbounded_source(mode, lane, operand, first, width):
    """Return the lane that a mode names, also outside the segment that begins at ``first``; numbers or arrays."""
    if mode == "bfly":
        return lane ^ operand
    if mode == "idx":
        return first | (operand & (width - 1))
    return lane - operand if mode == "up" else lane + operand


def source_lane(mode, lane, operand, width=32):
    """Return the lane that `shfl.sync` in a mode reads from; a lane without a source reads its own value."""
    first = lane & ~(width - 1)
    source = unbounded_source(mode, lane, operand, first, width)
    return lane if source > first + width - 1 or (mode == "up" and source < first) else source


def shuffle(mode, mask, value, operand, width=32, what=None):
    """Read another lane's value: mode "idx", "up", "down" or "bfly" of `shfl.sync`, in segments of `width` lanes."""
    operand = int(operand) & 31

    def finish(values):
        results = {}
        for lane, (own, operand) in values.items():
            source = source_lane(mode, lane, operand, width)
            results[lane] = values[source][0] if source in values else undefined_value(own)
        return results

    return collective(what or f"shfl.sync.{mode}", mask, (value, operand), finish)


def _broadcast(combine):
    """Return a `finish` function that hands every lane the same result, `combine(values)`."""
    return lambda values: dict.fromkeys(values, combine(values))


_VOTES = {
    "all": _broadcast(lambda values: all(values.values())),
    "any": _broadcast(lambda values: any(values.values())),
    "uni": _broadcast(lambda values: len(set(values.values())) == 1),
    "ballot": _broadcast(lambda values: sum(1 << lane for lane, predicate in values.items() if predicate)),
}


def vote(mode, mask, predicate, what=None):
    """Combine predicates: mode "all", "any", "uni" (all equal) or "ballot" (unsigned mask of the lanes with true)."""
    return collective(what or f"vote.sync.{mode}", mask, bool(predicate), _VOTES[mode])


def match(mode, mask, value, what=None):
    """Find the lanes whose values have the same bits: 0.0 and -0.0 differ, and a NaN equals itself.

    Mode "any" returns to each lane the unsigned mask of the lanes that match it; "all" returns (mask or 0, all match).
    """

    def finish(values):
        groups = {}
        for lane, bits in values.items():
            groups[bits] = groups.get(bits, 0) | 1 << lane
        if mode == "any":
            return {lane: groups[bits] for lane, bits in values.items()}
        members = sum(1 << lane for lane in values)
        return dict.fromkeys(values, (members, True) if len(groups) == 1 else (0, False))

    return collective(what or f"match.{mode}.sync", mask, np.asarray(value).tobytes(), finish)


_REDUCTIONS = {
    "add": operator.add,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def redux(op, mask, value, dtype=None):
    """Reduce the lanes' integers (`redux.sync`) as uint32 or int32: `dtype`, or the type of the value."""
    kind = np.dtype(dtype or getattr(value, "dtype", np.int32))
    if kind not in (np.uint32, np.int32):
        raise TypeError(f"{thread()}: redux.sync.{op} takes uint32 or int32, not {kind}")
    finish = _broadcast(lambda values: memory.convert(reduce(_REDUCTIONS[op], values.values()), kind))
    what = f"redux.sync.{op}.{'u32' if kind.kind == 'u' else 's32'}"
    return collective(what, mask, int(memory.convert(value, kind)), finish)


def syncwarp(mask=FULL_MASK):
    """Wait for the lanes in `mask`."""
    collective("syncwarp", mask)


def activemask():
    """Return the mask of the lanes that execute this call together: by the same calls, in the same iterations of loops.

    Lanes reconverge where branches and loops end. A GPU guarantees less: it may execute converged code in parts.
    """
    t = thread()
    return t.unit.converge(t, position(kernel_frame(sys._getframe(1))))


def elect(mask):
    """Return whether this lane is the elected one of `mask`: an arbitrary lane, but always the same for one mask."""
    elected = thread().grid.world.elected_lanes
    mask = int(mask) & FULL_MASK

    def finish(lanes):
        if mask not in elected or elected[mask] not in lanes:
            elected[mask] = thread().grid.world.rng.choice(sorted(lanes))
        return {lane: lane == elected[mask] for lane in lanes}

    return collective("elect.sync", mask, None, finish)
