"""Warp-wide and block-wide operations of a gang: shuffles, votes, reductions and barriers."""

import functools

import numpy as np

from moe_numba.simulator.core.warp import FULL_MASK, unbounded_source, undefined_value
from moe_numba.simulator.vector import state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.indices import take
from moe_numba.simulator.vector.lanes import truth
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray


def participants(mask, active, what=None, is_barrier=False):
    """Check that the lanes that a mask names are those that execute the operation, and order their accesses.

    In strict mode only a barrier orders them. Returns None if whole warps take part. Otherwise it returns an array of
    bools [warp, lane, other lane]: whether the lane's mask names the other lane.
    """
    gang = state.gang
    if type(mask) is not Weak and type(mask) is not ndarray:
        if int(mask) & FULL_MASK == FULL_MASK and (active is None or _whole_warps(active)):
            if is_barrier or not gang.engine.strict:
                gang.log.collective(active)
            if gang.notes is not None and what is not None:
                gang.notes.collective(what, _warps_of(active))
            return None
        mask = np.full(gang.size, int(mask) & FULL_MASK, np.int64)
    else:
        mask = (mask.values if type(mask) is Weak else mask).astype(np.int64) & FULL_MASK
    warps, exists = gang.num_warps, gang.pad(np.ones(gang.size, bool), False)
    mask = gang.pad(mask, 0).reshape(warps, 32)
    running = exists if active is None else gang.pad(active, False)
    running, exists = running.reshape(warps, 32), exists.reshape(warps, 32)
    named = (mask[:, :, None] >> np.arange(32) & 1).astype(bool)
    same = (mask[:, :, None] == mask[:, None, :]) & running[:, None, :]
    wrong = (named & exists[:, None, :] & ~same).any(2) | ~named[:, range(32), range(32)]
    if (wrong & running).any():
        raise Unsupported("a warp operation whose mask does not name the lanes that execute it together")
    if gang.notes is not None and what is not None:
        gang.notes.collective(what, np.array([len(set(m[r].tolist())) for m, r in zip(mask, running)]))
    if np.array_equal((named & exists[:, None, :] & running[:, :, None]).sum((1, 2)), exists.sum(1) ** 2):
        if is_barrier or not gang.engine.strict:
            gang.log.collective(active)
        return None
    return named & exists[:, None, :]


def _warps_of(active):
    """Return an array of a number for each warp: 1 if one of its lanes is active."""
    gang = state.gang
    if active is None:
        return _ones(gang.num_warps)
    return gang.pad(active, False).reshape(gang.num_warps, 32).any(1).astype(np.int64)


@functools.cache
def _ones(count):
    return np.ones(count, np.int64)


def _whole_warps(active):
    gang = state.gang
    if active is gang.whole:
        return True
    rows = gang.pad(active, True).reshape(gang.num_warps, 32)
    if len(active) % 32:
        rows[-1, len(active) % 32 :] = active[-1]
    if (rows.any(1) != rows.all(1)).any():
        return False
    gang.whole = active
    return True


@functools.cache
def _sources(size, mode, operand, width):
    """Return the lane that each lane reads, and whether some lane reads one that the block does not have."""
    source = _compute_sources(np.arange(size), mode, operand, width)
    missing = source >= size
    return np.where(missing, 0, source), missing if missing.any() else None


def _compute_sources(number, mode, operand, width):
    lane, base = number & 31, number & ~31
    first = lane & ~(width - 1)
    last = first + width - 1
    source = unbounded_source(mode, lane, operand, first, width)
    outside = (source > last) | (source < first if mode == "up" else False)
    return base + np.where(outside, lane, source)


def shuffle(active, mode, mask, value, operand, width=32, what=None):
    named, gang = participants(mask, active, what or f"shfl.sync.{mode}"), state.gang
    varying = type(value) is ndarray or type(value) is Weak
    if type(operand) is ndarray or type(operand) is Weak:
        operand = operand.values if type(operand) is Weak else operand
        source = _compute_sources(gang.all_lanes, mode, operand.astype(np.int64) & 31, width)
        missing = source >= gang.size
        source, missing = np.where(missing, 0, source), missing if missing.any() else None
    else:
        source, missing = _sources(gang.size, mode, int(operand) & 31, width)
    if named is not None:
        taken = gang.pad(source, 0).reshape(-1, 32) & 31
        absent = ~np.take_along_axis(named, taken[:, :, None], 2)[:, :, 0].reshape(-1)[: gang.size]
        missing = absent if missing is None else absent | missing
    if not varying:
        if missing is None:
            return value
        value = spread(value)
    values = value.values if type(value) is Weak else value
    result = take(values, source)
    if missing is not None:
        poison = undefined_value(float("nan") if values.dtype.kind == "f" else 0) if type(value) is Weak else None
        result = np.where(missing, undefined_value(values[0]) if poison is None else poison, result)
    return Weak(result) if type(value) is Weak else result


def spread(value):
    """Return a uniform number as a vector."""
    if type(value) is ndarray or type(value) is Weak:
        return value
    filled = np.full(state.gang.size, value)
    if filled.dtype.kind == "O":
        raise Unsupported("Python integers of more than 63 bits")
    return filled if isinstance(value, np.generic) else Weak(filled)


def _bits(predicate):
    """Return an integer per warp with the bits of its lanes."""
    gang = state.gang
    return np.packbits(gang.pad(predicate, False), bitorder="little").view(np.uint32)


def per_warp(values):
    """Return one Python number per warp as a value of the lanes."""
    gang = state.gang
    if gang.num_warps == 1:
        return values[0].item()
    return Weak(values.repeat(32)[: gang.size])


def vote(active, mode, mask, predicate, what=None):
    named = participants(mask, active, what or f"vote.sync.{mode}")
    predicate, everyone = truth(predicate), state.gang.everyone if active is None else active
    if type(predicate) is bool:
        predicate = everyone if predicate else np.zeros(state.gang.size, bool)
    elif active is not None:
        predicate = predicate & active
    if named is not None:
        return _vote_in_groups(mode, named, predicate)
    bits = _bits(predicate)
    if mode == "ballot":
        return per_warp(bits.astype(np.int64))
    if mode == "any":
        return per_warp(bits != 0)
    everyone = bits == _bits(everyone)
    return per_warp(everyone if mode == "all" else everyone | (bits == 0))


def _vote_in_groups(mode, named, predicate):
    gang = state.gang
    true = named & gang.pad(predicate, False).reshape(-1, 1, 32)
    if mode == "ballot":
        result = (true.astype(np.int64) << np.arange(32)).sum(2)
    elif mode == "any":
        result = true.any(2)
    else:
        result = (true == named).all(2)
        result = result if mode == "all" else result | ~true.any(2)
    return Weak(result.reshape(-1)[: gang.size])


def ballot_sync(active, mask, predicate):
    return _signed(vote(active, "ballot", mask, predicate, "ballot_sync"))


def _signed(bits):
    if type(bits) is Weak:
        return Weak(bits.values.astype(np.uint32).view(np.int32).astype(np.int64))
    return bits - (1 << 32) if bits >> 31 else bits


def match(active, mode, mask, value, what=None):
    named, gang = participants(mask, active, what or f"match.{mode}.sync"), state.gang
    if named is not None and mode == "all":
        raise Unsupported("match_all of a part of a warp")
    value = spread(value)
    values = value.values if type(value) is Weak else value
    values = gang.pad(values.view(f"u{values.itemsize}"), 0).reshape(-1, 32)
    equal = values[:, :, None] == values[:, None, :]
    taking_part = gang.everyone if active is None else active
    equal &= named if named is not None else gang.pad(taking_part, False).reshape(-1, 1, 32)
    bits = (equal.astype(np.int64) << np.arange(32)).sum(2).reshape(-1)[: gang.size]
    if mode == "any":
        return Weak(bits)
    members = _bits(taking_part).astype(np.int64).repeat(32)[: gang.size]
    return Weak(np.where(bits == members, members, 0)), Weak(bits == members)


def match_any_sync(active, mask, value):
    return _signed(match(active, "any", mask, value, "match_any_sync"))


def match_all_sync(active, mask, value):
    bits, equal = match(active, "all", mask, value, "match_all_sync")
    return _signed(bits), equal


_REDUCTIONS = {
    "add": (np.add, 0),
    "min": (np.minimum, np.iinfo(np.int64).max),
    "max": (np.maximum, np.iinfo(np.int64).min),
    "and": (np.bitwise_and, -1),
    "or": (np.bitwise_or, 0),
    "xor": (np.bitwise_xor, 0),
}


def redux(active, op, mask, value, dtype=None):
    gang, value = state.gang, spread(value)
    kind = np.dtype(dtype or (np.int32 if type(value) is Weak else value.dtype))
    if kind not in (np.uint32, np.int32):
        raise Unsupported("redux.sync of a type that it does not take")
    named = participants(mask, active, f"redux.sync.{op}.{'u32' if kind.kind == 'u' else 's32'}")
    values = (value.values if type(value) is Weak else value).astype(kind).astype(np.int64)
    function, identity = _REDUCTIONS[op]
    rows = gang.pad(values, identity).reshape(-1, 32)
    if named is not None:
        rows = np.where(named, rows[:, None, :], identity)
        return function.reduce(rows, 2).astype(kind).reshape(-1)[: gang.size]
    reduced = function.reduce(rows, 1).astype(kind)
    return reduced[0] if gang.num_warps == 1 else reduced.repeat(32)[: gang.size]


def syncwarp(active, mask=FULL_MASK):
    participants(mask, active, "syncwarp", is_barrier=True)


def activemask(active):
    return per_warp(_bits(state.gang.everyone if active is None else active).astype(np.int64))


def elect(active, mask):
    gang = state.gang
    if participants(mask, active, "elect.sync") is not None or type(mask) is Weak or type(mask) is ndarray:
        raise Unsupported("elect.sync of a part of a warp")
    elected, mask = gang.world.elected_lanes, int(mask) & FULL_MASK
    if mask not in elected:
        elected[mask] = gang.world.rng.choice(range(min(32, gang.size)))
    return Weak((gang.all_lanes & 31) == elected[mask])


def _values(predicate):
    predicate = truth(predicate)
    return state.gang.everyone & predicate if type(predicate) is bool else predicate


def syncthreads(active):
    state.gang.block_barrier(active, "syncthreads")


def syncthreads_count(active, predicate):
    return state.gang.block_barrier(active, "syncthreads_count", int(_values(predicate).sum()), sum)


def syncthreads_and(active, predicate):
    return int(state.gang.block_barrier(active, "syncthreads_and", bool(_values(predicate).all()), all))


def syncthreads_or(active, predicate):
    return int(state.gang.block_barrier(active, "syncthreads_or", bool(_values(predicate).any()), any))


def lanemask_lt(active):
    return Weak((1 << (state.gang.all_lanes & 31)) - 1)
