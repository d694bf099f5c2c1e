"""Operations of a warp: the lanes that a mask names bring a value each, and each gets a result.

Lanes that a block does not have (its last warp may be short) need not come, as on a GPU. A value read from a lane that
takes no part is undefined there; here it is poison.
"""

import operator
from functools import reduce

import numpy as np

from moe_numba.simulator.core import memory
from moe_numba.simulator.core.engine import Meeting, thread
from moe_numba.simulator.core.errors import MissingLane, lanes_of, place

FULL = 0xFFFFFFFF


def collective(what, mask, value=None, finish=None):
    """Wait for all lanes in `mask` to call `what` with this mask; `finish` maps {lane: value} to {lane: result}."""
    t = thread()
    warp = t.block.warps[t.warp]
    mask = int(mask) & FULL
    if not mask >> t.lane & 1:
        raise MissingLane(f"{t} calls {what} with mask {mask:#010x}, which does not name it")
    members = mask & warp.lanes
    if members & warp.exited:
        gone = lanes_of(members & warp.exited)
        raise MissingLane(
            f"{warp}: lanes {gone} are named in mask {mask:#010x} of {what} but have exited, while lane {t.lane} comes"
        )
    if (what, members) not in warp.meetings:
        _refuse_cycle(t, warp, what, mask)
    return t.meet(warp, what, members.bit_count(), value, finish and (lambda values: _by_lane(values, finish)), members)


def _by_lane(values, finish):
    results = finish({t.lane: value for t, value in values.items()})
    return {t: results[t.lane] for t in values}


def _refuse_cycle(t, warp, what, mask):
    """A lane that waits elsewhere for this one will never come here."""
    for other in warp.threads:
        if mask >> other.lane & 1 and isinstance(other.waits, Meeting) and other.waits.needs(t):
            raise MissingLane(
                f"{warp}: lanes {other.lane} are named in mask {mask:#010x} of {what} but wait at {other.waits}, "
                f"{place(other.gr_frame)}, which needs lane {t.lane} in its turn"
            )


def undefined(like):
    """What a lane reads where the instruction defines nothing."""
    if isinstance(like, np.generic):
        return memory.poison(1, like.dtype)[0]
    return float("nan") if isinstance(like, float) else 0xCDCDCDCD


def shuffle(mode, mask, value, operand, width=32, what=None):
    """Read another lane's value: mode "idx", "up", "down" or "bfly" of `shfl.sync`, in segments of `width` lanes."""
    operand = int(operand) & 31

    def finish(values):
        results = {}
        for lane, (own, operand) in values.items():
            first = lane & ~(width - 1)
            last = first + width - 1
            if mode == "bfly":
                source = lane ^ operand
            elif mode == "idx":
                source = first | (operand & (width - 1))
            else:
                source = lane - operand if mode == "up" else lane + operand
            if source > last or (mode == "up" and source < first):
                source = lane
            results[lane] = values[source][0] if source in values else undefined(own)
        return results

    return collective(what or f"shfl.sync.{mode}", mask, (value, operand), finish)


def _for_all(answer):
    """All lanes get the same answer to what all have said."""
    return lambda values: dict.fromkeys(values, answer(values))


_VOTES = {
    "all": _for_all(lambda values: all(values.values())),
    "any": _for_all(lambda values: any(values.values())),
    "uni": _for_all(lambda values: len(set(values.values())) == 1),
    "ballot": _for_all(lambda values: sum(1 << lane for lane, said in values.items() if said)),
}


def vote(mode, mask, predicate, what=None):
    """Ask all lanes at once: mode "all", "any", "uni" (all agree) or "ballot" (the unsigned mask of the yeses)."""
    return collective(what or f"vote.sync.{mode}", mask, bool(predicate), _VOTES[mode])


def _bits(value):
    """Equality of bits, not of numbers: 0.0 and -0.0 differ, a NaN equals itself."""
    return np.asarray(value).tobytes()


def match(mode, mask, value, what=None):
    """Find the lanes with the same bits.

    Mode "any" gives each lane the unsigned mask of its equals; "all" gives (mask or 0, whether all are equal).
    """

    def finish(values):
        groups = {}
        for lane, bits in values.items():
            groups[bits] = groups.get(bits, 0) | 1 << lane
        if mode == "any":
            return {lane: groups[bits] for lane, bits in values.items()}
        everyone = sum(1 << lane for lane in values)
        return dict.fromkeys(values, (everyone, True) if len(groups) == 1 else (0, False))

    return collective(what or f"match.{mode}.sync", mask, _bits(value), finish)


_REDUCTIONS = {
    "add": operator.add,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def redux(op, mask, value, dtype=None):
    """Reduce the lanes' integers, as `redux.sync` does; the type, uint32 or int32, is `dtype` or the value's own."""
    kind = np.dtype(dtype or getattr(value, "dtype", np.int32))
    if kind not in (np.uint32, np.int32):
        raise TypeError(f"{thread()}: redux.sync.{op} takes uint32 or int32, not {kind}")

    def finish(values):
        return dict.fromkeys(values, memory.convert(reduce(_REDUCTIONS[op], values.values()), kind))

    what = f"redux.sync.{op}.{'u32' if kind.kind == 'u' else 's32'}"
    return collective(what, mask, int(memory.convert(value, kind)), finish)


def sync(mask=FULL):
    """Wait for the lanes in `mask`."""
    collective("syncwarp", mask)


def activemask():
    """The lanes that have not exited: a GPU promises less, so no kernel should build on it."""
    t = thread()
    warp = t.block.warps[t.warp]
    return warp.lanes & ~warp.exited


def elect(mask):
    """Whether this lane is the one that acts for all in `mask`: any of them, but always the same one."""
    leaders = thread().grid.world.leaders
    mask = int(mask) & FULL

    def finish(lanes):
        if mask not in leaders or leaders[mask] not in lanes:
            leaders[mask] = thread().grid.world.rng.choice(sorted(lanes))
        return {lane: lane == leaders[mask] for lane in lanes}

    return collective("elect.sync", mask, None, finish)
