"""Flags and other accesses with a memory order, and their part in the order between gangs.

As in the simulator without weak memory, all of them take place in one order: each store releases to its address, and
each load acquires from it. A strict engine does not count on that, since it does not follow what single lanes know.
"""

import numpy as np

from moe_numba.simulator.core.memory import Pointer
from moe_numba.simulator.memory_model import scoped_access
from moe_numba.simulator.vector import access, atomic, state
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lanes import Pointers, select

ndarray = np.ndarray


def _elements(operation, mask, x, index, dtype, count):
    """Return (elements, index of each active lane, lanes, points, whether the index varies, record of the access)."""
    gang = state.gang
    gang.engine.refuse_if_many("an access with a memory order")
    dtype = np.dtype(dtype)
    elements, index, step = access.vector_elements(mask, x, index, dtype, count)
    region = x.region or access.region_of(x)
    entry = access.vector_entry(region, x, index, step, dtype.itemsize * count, mask)
    if region.shared is not None and region.shared.detector is not None:
        gang.watch(region, x.address, step, dtype.itemsize * count, index, mask, False)
    if gang.notes is not None:
        gang.notes.access(operation, x, *entry[:6])
    lanes = gang.all_lanes if mask is None else mask.nonzero()[0]
    where = index[lanes] if type(index) is ndarray else np.full(1, index)
    first = where * step // dtype.itemsize if step != dtype.itemsize else where
    distinct = set(where.tolist())
    if min(distinct) < 0 or max(distinct) * step // dtype.itemsize + count > len(elements):
        raise Unsupported("an index out of bounds")
    points = [(region, x.address + k * step) for k in distinct] if not gang.engine.strict else []
    return elements, first, lanes, points, type(index) is ndarray, entry


def _pointer(x, dtype):
    return x if type(x) is Pointer or x.dtype == dtype and x.ndim == 1 else x.pointer()


def load(mask, x, index, dtype, count=1):
    """Load elements and acquire from their address."""
    gang = state.gang
    if type(x) is Pointers:
        result = None
        with access.one_access():
            for one, part in x.parts(mask):
                value = load(part, one, index, dtype, count)
                result = value if result is None or part is None else select(part, value, result)
        return result
    elements, first, lanes, points, many, entry = _elements("load", mask, _pointer(x, dtype), index, dtype, count)
    for point in points:
        gang.engine.clocks.acquire(gang, point)
    gang.log.loads.append(entry)
    if not many:
        return tuple(elements[first[0] + k] for k in range(count))
    made = []
    for k in range(count):
        value = np.zeros(gang.size, elements.dtype)
        value[lanes] = elements[first + k]
        made.append(value)
    return tuple(made)


def store(mask, x, index, value, dtype):
    """Release to an address, and store there."""
    if type(x) is Pointers:
        with access.one_access():
            for one, part in x.parts(mask):
                store(part, one, index, value, dtype)
        return
    gang, x = state.gang, _pointer(x, dtype)
    region = x.region or access.region_of(x)
    if not region.written:
        region.save()
    elements, first, lanes, points, many, entry = _elements("store", mask, x, index, dtype, 1)
    gang.log.atomics.append(entry)
    for point in points:
        gang.engine.clocks.release(gang, point)
    value = atomic.operand(value, lanes, elements.dtype)
    if not many:
        value = value[-1:]
    changed = (elements[first] != value).any()
    elements[first] = value
    return changed


def _check_scope(scope):
    """Raise for a scope in which two strong accesses may race, if races are detected."""
    if scope in ("cta", "cluster"):
        state.gang.engine.refuse_if_strict(f"an access of {scope} scope")


def scoped_load(mask, what, pointer, index, acquire=False, scope="sys"):
    _check_scope(scope)
    state.gang.spin(what)
    return load(mask, pointer, index, np.int32)[0]


def scoped_store(mask, pointer, index, value, release=False, scope="sys"):
    _check_scope(scope)
    store(mask, pointer, index, value, np.int32)
    state.gang.grid.memory_changed()


def scoped_add(mask, pointer, index, value, release=False):
    if type(pointer) is Pointers:
        result = None
        with access.one_access():
            for one, part in pointer.parts(mask):
                old = scoped_add(part, one, index, value)
                result = old if result is None or part is None else select(part, old, result)
        return result
    return atomic.OPERATIONS[atomic.Atomic.add](mask, pointer, index, value)


def ld_relaxed_gpu_s32(mask, pointer, index):
    return scoped_load(mask, "ld.relaxed", pointer, index)


def ld_relaxed_gpu_u64(mask, pointer, index):
    state.gang.spin("ld.relaxed")
    return load(mask, pointer, index, np.uint64, 1)[0]


def ld_relaxed_gpu_u64x2(mask, pointer, index):
    state.gang.spin("ld.relaxed")
    return load(mask, pointer, index, np.uint64, 2)


def st_relaxed_gpu_u64(mask, pointer, index, value):
    store(mask, pointer, index, value, np.uint64)
    state.gang.grid.memory_changed()


def shared_load(mask, array, index):
    _check_scope("cta")
    return load(mask, array, index, array.dtype)[0]


def shared_poll(mask, array, index):
    state.gang.spin("ld.acquire.cta.shared")
    return shared_load(mask, array, index)


def shared_store(mask, array, index, value):
    _check_scope("cta")
    if store(mask, array, index, value, array.dtype):
        state.gang.grid.memory_changed()


def globaltimer(mask):
    world = state.gang.world
    world.clock_reads += 1
    return np.uint64(world.nanoseconds)


NAMES = {
    ("memory", "griddepcontrol_wait"): lambda mask: state.gang.wait_for_kernel_before(mask),
    ("memory", "griddepcontrol_launch_dependents"): lambda mask: state.gang.allow_next_kernel(),
    ("special_registers", "globaltimer"): globaltimer,
    ("atomics", "ld_relaxed_gpu_s32"): ld_relaxed_gpu_s32,
    ("atomics", "ld_relaxed_gpu_u64"): ld_relaxed_gpu_u64,
    ("atomics", "ld_relaxed_gpu_u64x2"): ld_relaxed_gpu_u64x2,
    ("atomics", "st_relaxed_gpu_u64"): st_relaxed_gpu_u64,
    ("atomics", "_simulated_load"): shared_load,
    ("atomics", "_simulated_poll"): shared_poll,
    ("atomics", "_simulated_store"): shared_store,
}
VERSIONS = {scoped_access.load: scoped_load, scoped_access.store: scoped_store, scoped_access.add: scoped_add}
