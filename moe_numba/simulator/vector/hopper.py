"""Blocking and asynchronous instructions of gangs that are warps: mbarriers, copies, wgmma, named and cluster barriers.

Copies and mbarriers are those of `asynchronous`: most instructions are executed lane by lane, by the simulator's code.
"""

import sys

import numpy as np

from moe_numba.simulator.asynchronous import async_copy, fragments, mbarrier, race_detector, tensor_map, wgmma
from moe_numba.simulator.core import barrier, cluster, registers
from moe_numba.simulator.core.warp import FULL_MASK
from moe_numba.simulator.vector import access, collectives, cp_async, fragment, state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lane_calls import collect, item, per_lane, varies
from moe_numba.simulator.vector.numbers import Weak


def per_distinct(function):
    """Make the version of a function that calls it once for each distinct tuple of arguments."""

    def call(mask, *arguments):
        gang = state.gang
        lanes = gang.all_lanes if mask is None else mask.nonzero()[0]
        arguments = [_same_in(a, lanes) for a in arguments]
        if not any(varies(a) for a in arguments):
            gang.lane = int(lanes[0])
            return function(*arguments)
        known, results = {}, []
        for lane in lanes:
            own = [item(a, lane) for a in arguments]
            key = tuple(id(a) if hasattr(a, "allocation") else a for a in own)
            if key not in known:
                gang.lane = int(lane)
                known[key] = function(*own)
            results.append(known[key])
        return collect(results, lanes)

    return call


def _same_in(value, lanes):
    """Return the value that all of these lanes see if it is the same, and else what they see."""
    if type(value) is Weak or type(value) is np.ndarray:
        values = (value.values if type(value) is Weak else value)[lanes]
        if (values == values[0]).all():
            return item(value, lanes[0])
    return value


def scalar(value):
    """Return the one value of all lanes."""
    if type(value) is Weak or type(value) is np.ndarray:
        values = value.values if type(value) is Weak else value
        if (values != values[0]).any():
            raise Unsupported("a value that differs between lanes where one value is needed")
        return values[0].item() if type(value) is Weak else values[0]
    return value


def _whole_warp(mask, what):
    if mask is not None or state.gang.num_warps != 1:
        raise Unsupported(f"{what} that not all lanes of one warp execute")


def _find(barriers, index):
    return mbarrier.find(barriers, index)


def _wait(barriers, index, phase):
    _find(barriers, index).wait(phase)


def _try_wait(barriers, index, phase):
    found = _find(barriers, index)
    if not found.test(phase):
        found.poll(phase)
    return np.uint32(found.test(phase))


def _test_wait(barriers, index, phase):
    return np.uint32(_find(barriers, index).test(phase))


def _meet(scope, what, expected, count, value=None, finish=None, wait=True):
    """Arrive with `count` threads at an operation of a scope; wait until `expected` threads have arrived."""
    gang, opened = state.gang, scope.open_rendezvous
    if wait or not gang.engine.strict:
        gang.log.collective(None)
    current = opened.get((what, None))
    if current is None:
        current = opened[what, None] = _Meeting(expected)
    if current.expected != expected or gang in current.values:
        raise Unsupported(f"{what}: warps disagree")
    current.values[gang], point = value, current
    current.arrived += count
    gang.engine.clocks.release(gang, point)
    if wait:
        current.waiting.append(gang)
    if current.arrived == expected:
        del opened[what, None]
        results = finish(current.values) if finish else {}
        for other in current.waiting:
            other.result = results.get(other)
        gang.world.wake(current.waiting)
    if wait:
        result = gang.park(what)
        gang.engine.clocks.acquire(gang, point)
        return result
    return None


class _Meeting:
    def __init__(self, expected):
        self.expected, self.arrived, self.values, self.waiting = expected, 0, {}, []


def named(mask, what, number, threads, wait):
    _whole_warp(mask, what)
    number, threads, block = int(scalar(number)), int(scalar(threads)), state.gang.block
    if not 1 <= number <= 15 or threads % 32 or not 32 <= threads <= (block.size + 31) // 32 * 32:
        raise Unsupported(f"{what} with other arguments than it takes")
    _meet(block, f"barrier {number}", threads, state.gang.size, wait=wait)


def _warpgroup(mask, what):
    _whole_warp(mask, what)
    group = state.gang.warps[0].warpgroup
    if group.size != 128:
        raise Unsupported(f"{what} in less than a warpgroup")
    return group


def warpgroup_arrive(mask, what):
    group = _warpgroup(mask, what)
    if state.gang.notes is not None:
        state.gang.notes.warpgroup_instruction(group, what)
    _meet(group, what, 128, 32, wait=False)


def setmaxnreg(mask, direction, count):
    """Give registers back (`dec`), or poll until other warps of the block have released enough (`inc`)."""
    what = f"setmaxnreg.{direction} {count}"
    warpgroup_arrive(mask, what)
    gang = state.gang
    block, warp = gang.block, gang.warps[0]
    at_launch = registers.at_launch(block)
    if block.registers is None:  # of each warp's threads
        block.registers = dict.fromkeys(block.warps, at_launch)
    held = block.registers
    if (count < held[warp]) == (direction == "dec"):
        while count - held[warp] > at_launch * len(held) - sum(held.values()):
            gang.spin(what)
        held[warp] = count
        gang.grid.memory_changed()


def multiply(mask, n, dtype, a, b, accumulators, steps, majors=("k", "k")):
    """wgmma: the four warps of a warpgroup issue it together."""
    what = f"wgmma m64n{n} {dtype}"
    state.gang.engine.refuse_if_strict(what)
    group = _warpgroup(mask, what)
    if accumulators is not None and not isinstance(accumulators, (fragment.LaneFragment, wgmma.PendingAccumulators)):
        accumulators = fragment.LaneFragment(fragment.as_matrix(accumulators))
    descriptors, a_registers = (a, b), None
    if isinstance(a, tuple):
        if len(a) != 4 * steps:
            raise Unsupported(f"{what} with {len(a)} registers of A")
        descriptors, a_registers = (b,), np.stack([fragment.register(r) for r in a], 1)
    line = sys._getframe(1).f_back.f_lineno
    value = (line, *(int(scalar(d)) for d in descriptors)), accumulators, a_registers
    return _meet(group, what, 128, 32, value, lambda values: _issue(what, n, dtype, values, steps, majors))


def _issue(what, n, dtype, values, steps, majors):
    gangs = sorted(values, key=lambda gang: gang.first)
    (line, *descriptors), accumulators, a_registers = values[gangs[0]]
    if any(values[gang][0] != (line, *descriptors) for gang in gangs):
        raise Unsupported(f"the warps of a warpgroup pass different operands to {what}")
    state.gang.lane = 0
    group = wgmma.Wgmma(what, [gangs[0].warps[0].threads[0]])
    if a_registers is None:
        a_tile = wgmma.operand(group, descriptors[0], 64, dtype, steps, "A", majors[0])
    else:
        a_tile = wgmma.register_operand(np.concatenate([values[gang][2] for gang in gangs]), dtype)
    b_tile = wgmma.operand(group, descriptors[-1], n, dtype, steps, "B", majors[1])
    total = (a_tile.reshape(8, 8, -1) @ b_tile.T).reshape(64, n)
    if accumulators is not None:
        values = [values[gang][1].values for gang in gangs]
        tile = np.empty((64, n))
        tile[fragments.accumulator_coordinates(n)] = np.concatenate(values)
        total += tile
    results = fragments.scatter(total.astype(np.float32), n)
    group.start()
    if state.gang.notes is not None:
        k, shared_rows = a_tile.shape[1] // steps, n + 64 * (a_registers is None)
        state.gang.notes.operation(f"wgmma m64n{n}k{k} {dtype}", shared_rows * steps * wgmma.K_BYTES, count=steps)
    for gang in gangs:
        gang.warps[0].wgmma_groups.append(group)
    return {gang: wgmma.PendingAccumulators(group, results[32 * k : 32 * k + 32]) for k, gang in enumerate(gangs)}


def wait(mask, pending, accumulators):
    _whole_warp(mask, "wgmma.wait_group")
    collectives.participants(FULL_MASK, mask)
    warp = state.gang.warps[0]
    older = warp.wgmma_groups[: len(warp.wgmma_groups) - pending]
    warp.wgmma_groups = warp.wgmma_groups[len(older) :]
    for group in older:
        group.wait()
    if not isinstance(accumulators, wgmma.PendingAccumulators) or accumulators.wgmma in warp.wgmma_groups:
        return accumulators
    return fragment.LaneFragment(accumulators.values)


def cluster_arrive(mask):
    _whole_warp(mask, "barrier.cluster.arrive")
    gang = state.gang
    group = gang.block.cluster
    collectives.participants(FULL_MASK, mask)
    gang.engine.clocks.release(gang, (group, group.phase))
    gang.count_at_arrival = gang.log.count()
    group.arrive(gang.warps[0])


def cluster_wait(mask):
    _whole_warp(mask, "barrier.cluster.wait")
    gang = state.gang
    group = gang.block.cluster
    collectives.participants(FULL_MASK, mask)
    phase = group.begin_wait(gang.warps[0])
    if phase == group.phase:
        group.waiting.append(gang)
        gang.park(group)
    group.synchronized.add(gang.warps[0])
    gang.engine.clocks.acquire(gang, (group, phase))
    if gang.log.count() == gang.count_at_arrival:  # accesses between arrival and wait are ordered before neither
        gang.log.collective(None)


def fence(mask, thread, shared_only=False):
    """A proxy fence of the active lanes."""
    gang = state.gang
    for detector, (first, last, base) in list(gang.unfenced.items()):
        part = detector.unfenced[first:last]
        own = (part >= base) & (part < base + gang.size)
        if mask is not None:
            own &= mask[np.where(own, part - base, 0)]
        part[own] = 0
        if mask is None:
            del gang.unfenced[detector]
    for t in gang.existing_threads(mask):
        if t.unfenced_writes or t.unfenced_barriers:
            race_detector.fence(t)


def fence_init(mask):
    for t in state.gang.existing_threads(mask):
        race_detector.fence_barriers(t)


def _record_box(map_pointer, map_index, coordinates, writes):
    """Record the access of a TMA copy to global memory: the rows that it writes, or all that a box spans."""
    gang = state.gang
    gang.engine.refuse_if_strict("a tensor copy")
    tensor = tensor_map.map_for_copy(map_pointer, map_index)
    if len(coordinates) != tensor.rank:
        return  # an error, which the copy raises
    _, view = tensor._views([int(c) for c in coordinates], writes)
    if view is None:
        return
    whole = not writes or view.flags.c_contiguous
    rows = [view] if whole else [view[index] for index in np.ndindex(view.shape[:-1])]
    lane = np.zeros(gang.size, bool)
    lane[gang.lane] = True
    for row in rows:
        low, high = np.lib.array_utils.byte_bounds(row)
        region = gang.engine.memory.at(low)
        if writes and not region.written:
            region.save()
        (gang.log.writes if writes else gang.log.reads).append((region, low, 0, high - low, 0, lane, None))


def _load_box(array, offset, map_pointer, map_index, coordinates, *more):
    _record_box(map_pointer, map_index, coordinates, False)
    async_copy.load_box(array, offset, map_pointer, map_index, coordinates, *more)


def _store_box(map_pointer, map_index, coordinates, array, offset, add=False):
    _record_box(map_pointer, map_index, coordinates, True)
    async_copy.store_box(map_pointer, map_index, coordinates, array, offset, add)


def _recorded(function, pointer, index, size, writes):
    """Make the version of a copy, whose access to global memory is recorded when it is issued."""

    def call(*arguments):
        gang, x = state.gang, arguments[pointer]
        gang.engine.refuse_if_strict("an asynchronous copy")
        region = x.region or access.region_of(x)
        if writes and not region.written:
            region.save()
        lane = np.zeros(gang.size, bool)
        lane[gang.lane] = True
        nbytes = int(arguments[size])
        entry = (region, x.address + int(arguments[index]) * x.array.itemsize, 0, nbytes, 0, lane, None)
        if nbytes:
            (gang.log.writes if writes else gang.log.reads).append(entry)
        return function(*arguments)

    return per_lane(call)


VERSIONS = {
    async_copy.load: _recorded(async_copy.load, 2, 3, 4, False),
    async_copy.load_16: cp_async.load_16,
    async_copy.store: _recorded(async_copy.store, 0, 1, 4, True),
    async_copy.load_box: per_lane(_load_box),
    async_copy.store_box: per_lane(_store_box),
    mbarrier.init: per_lane(mbarrier.init),
    mbarrier.invalidate: per_lane(mbarrier.invalidate),
    mbarrier.fence_init: fence_init,
    race_detector.fence: fence,
    barrier.named: named,
    barrier.warpgroup_arrive: warpgroup_arrive,
    registers.setmaxnreg: setmaxnreg,
    wgmma.multiply: multiply,
    wgmma.wait: wait,
    wgmma.address: per_distinct(wgmma.address),
    cluster.arrive: cluster_arrive,
    cluster.wait: cluster_wait,
    cluster.remote: per_distinct(cluster.remote),
    tensor_map.acquire: per_lane(tensor_map.acquire),
}


def _copy_wait(mask, pending, read_only, kind="cp.async.bulk"):
    if kind == cp_async.KIND:
        cp_async.groups(mask).wait(state.gang, pending)
        return
    for t in state.gang.existing_threads(mask):
        if t.copy_groups and kind in t.copy_groups:  # other lanes have issued no copies
            state.gang.lane = t.thread_id - state.gang.first
            t.copy_groups[kind].wait(pending, read_only)


def _commit(mask, kind="cp.async.bulk"):
    if kind == cp_async.KIND:
        cp_async.groups(mask).commit()
        return
    for t in state.gang.existing_threads(mask):
        state.gang.lane = t.thread_id - state.gang.first
        if t.copy_groups and kind in t.copy_groups:
            async_copy.commit(kind)


VERSIONS |= {async_copy.wait: _copy_wait, async_copy.commit: _commit}


def _arrive(barriers, index, rank=None, expected_bytes=0):
    mbarrier.find(barriers, index, rank).arrive(expected_bytes)


def _expect(barriers, index, tx_bytes):
    _find(barriers, index).expect(int(tx_bytes))


NAMES = {
    ("mbarrier", "mbarrier_wait_parity"): per_distinct(_wait),
    ("mbarrier", "mbarrier_wait_parity_cluster"): per_distinct(_wait),
    ("mbarrier", "mbarrier_try_wait_parity"): per_distinct(_try_wait),
    ("mbarrier", "mbarrier_test_wait_parity"): per_distinct(_test_wait),
    ("mbarrier", "mbarrier_arrive"): per_lane(_arrive),
    ("mbarrier", "mbarrier_arrive_cluster"): per_lane(lambda b, i, rank: _arrive(b, i, rank)),
    ("mbarrier", "mbarrier_arrive_release_cta_cluster"): per_lane(lambda b, i, rank: _arrive(b, i, rank)),
    ("mbarrier", "mbarrier_arrive_expect_tx"): per_lane(lambda b, i, size: _arrive(b, i, None, int(size))),
    ("mbarrier", "mbarrier_expect_tx"): per_lane(_expect),
}
