"""Vector versions of what kernels call: builtins, casts, arithmetic, `cuda` functions, and other Python functions.

A function without a hand-written version is transformed from its source. Some of the simulator's own functions are
called lane by lane.
"""

import builtins
import functools
import itertools
import sys
import types

import numpy as np
from numba.core.types.abstract import Type
from numba.core.types.scalars import Float, Integer

from moe_numba.simulator.core import arithmetic, barrier, cuda_module, engine, floats, memory, warp
from moe_numba.simulator.core.kernel import Kernel
from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.memory_model import ranks, scoped_access
from moe_numba.simulator.vector import access, atomic, collectives, state, transform
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lanes import Pointers, choose, count_nonzero, select, split, truth
from moe_numba.simulator.vector.numbers import Weak

ndarray = np.ndarray


def varies(value):
    """Return whether a value, or an item of a tuple, differs between lanes."""
    kind = type(value)
    if kind is ndarray or kind is Weak or kind is Pointers:
        return True
    return isinstance(value, tuple) and any(varies(item) for item in value)


def _integers(mask, value):
    """Return the numbers of all lanes as integers of 64 bits, truncated as a C cast does."""
    values = value.values if type(value) is Weak else value
    if values.dtype.kind != "f":
        return values.astype(np.int64) if values.dtype.kind == "b" else values
    active = values if mask is None else np.where(mask, values, 0)
    if not (np.abs(active) < 2.0**63).all():
        raise Unsupported("a float that no integer holds")
    return active.astype(np.int64)


def _number_cast(scalar):
    """Make the vector version of a Numba type that is called."""
    dtype = np.dtype(getattr(np, "bool_" if scalar.name == "bool" else scalar.name))
    to_integer = dtype.kind in "iu"

    def cast(mask, value, *more):
        kind = type(value)
        if kind is ndarray:
            if value.dtype is dtype or value.dtype == dtype:
                return value
            if to_integer and value.dtype.kind == "f":
                value = _integers(mask, value)
            return value.astype(dtype)
        if kind is Weak:
            return (_integers(mask, value) if to_integer else value.values).astype(dtype)
        return scalar(value, *more)

    return cast


def _scalar_cast(scalar):
    """Make the vector version of a NumPy scalar type, which refuses integers that it cannot hold."""
    cast = _number_cast(types.SimpleNamespace(name=scalar.__name__, __call__=scalar))
    dtype = np.dtype(scalar)

    def checked(mask, value=0):
        if not varies(value):
            return scalar(value)
        values = value.values if type(value) is Weak else value
        if dtype.kind in "iu" and values.dtype != dtype:
            values, info = _integers(mask, value), np.iinfo(dtype)
            active = values if mask is None else np.where(mask, values, 0)
            if active.min() < info.min or active.max() > info.max:
                raise Unsupported(f"an integer that {dtype} cannot hold")
            values = values.astype(np.int64) if values.dtype.kind == "b" else values
        return cast(mask, values)

    return checked


def _pairwise(function, ufunc, better):
    def extreme(mask, *values, **keywords):
        if keywords or len(values) == 1:
            if varies(values) or keywords:
                raise Unsupported("max or min of an iterable")
            return function(*values)
        result = values[0]
        for value in values[1:]:
            a, b = type(result), type(value)
            if (
                a is ndarray
                and result.dtype.kind in "iu"
                and (value.dtype == result.dtype if b is ndarray else b is int)
            ):
                result = ufunc(result, value)
            elif a is not ndarray and b is not ndarray and a is not Weak and b is not Weak:
                result = function(result, value)
            else:
                result = choose(mask, better(value, result), value, result)
        return result

    return extreme


def _per_lane_math(function):
    def call(mask, *values):
        if not varies(values):
            return function(*values)
        return per_lane(function)(mask, *values)

    return call


def item(value, lane):
    """Return what one lane sees of a value."""
    kind = type(value)
    if kind is ndarray:
        return value[lane]
    if kind is Weak:
        return value.values[lane].item()
    if kind is Pointers:
        return value.pointers[value.which[lane]]
    if kind is access.Local or kind is access.Rows:
        raise Unsupported("a local array in a function that is called lane by lane")
    if isinstance(value, tuple) and varies(value):
        items = [item(v, lane) for v in value]
        return tuple(items) if kind is tuple else kind._make(items)
    return value


def _items(value, lanes):
    """Return an iterable of what each of these lanes sees of a value."""
    if type(value) is Weak:
        return value.values[lanes].tolist()
    if type(value) is ndarray:
        return list(value[lanes])
    if type(value) in (int, Array, Pointer, str, types.NoneType):
        return itertools.repeat(value)
    return [item(value, lane) for lane in lanes]


def collect(values, lanes):
    """Return the results of some lanes as one value."""
    first = values[0]
    if len(values) == 1 or all(v is first for v in values):
        return first
    if isinstance(first, tuple):
        items = [collect([v[k] for v in values], lanes) for k in range(len(first))]
        return tuple(items) if type(first) is tuple else type(first)._make(items)
    if isinstance(first, Pointer):
        which, known = np.zeros(state.gang.size, np.int64), {}
        for lane, pointer in zip(lanes, values):
            which[lane] = known.setdefault((pointer.address, pointer.dtype, pointer.size), (len(known), pointer))[0]
        pointers = [p for _, p in known.values()]
        return pointers[0] if len(pointers) == 1 else Pointers(pointers, which)
    strong = isinstance(first, np.generic)
    if any(type(v) is not type(first) for v in values) or not strong and type(first) not in (int, bool, float):
        raise Unsupported(f"a result of type {type(first).__name__} that differs between lanes")
    result = np.zeros(state.gang.size, first.dtype if strong else np.asarray(first).dtype)
    try:
        result[lanes] = values
    except OverflowError:
        raise Unsupported("Python integers of more than 63 bits") from None
    return result if strong else Weak(result)


def per_lane(function):
    """Make the version of a function that calls it once for each active lane."""

    def call(mask, *arguments, **keywords):
        gang = state.gang
        if keywords:
            raise Unsupported("keyword arguments of a function that is called lane by lane")
        lanes = gang.all_lanes if mask is None else mask.nonzero()[0]
        columns, results = [_items(a, lanes) for a in arguments], []
        for lane, *own in zip(lanes.tolist(), *columns):
            gang.lane = lane
            results.append(function(*own))
        return collect(results, lanes)

    return call


def _uniform(function):
    """Make the version of a function that takes only values that do not differ between lanes."""

    def call(mask, *arguments, **keywords):
        if any(varies(a) or type(a) is access.Local for a in (*arguments, *keywords.values())):
            raise Unsupported(f"{getattr(function, '__name__', function)} of values that differ between lanes")
        return function(*arguments, **keywords)

    return call


def _direct(function):
    """Make the version of a NumPy function of numbers."""

    def call(mask, *arguments, **keywords):
        if keywords:
            raise Unsupported("keyword arguments of a NumPy function")
        weak = [type(a) is Weak for a in arguments]
        return function(*[a.values if w else a for a, w in zip(arguments, weak)])

    return call


def _words(value):
    """Return an integer's bits as uint64, and their count, as `arithmetic._unsigned_bits` does."""
    if type(value) is ndarray:
        if value.dtype.kind not in "iub":
            raise Unsupported("bits of a float")
        width = 8 * value.itemsize
        return value.view(f"u{value.itemsize}").astype(np.uint64), width
    values = value.values.astype(np.int64)
    small = (values >= -(2**31)) & (values < 2**32)
    return np.where(small, values & 0xFFFFFFFF, values).view(np.uint64), np.where(small, 32, 64)


def _bitwise(scalar, compute):
    def call(mask, value):
        if not varies(value):
            return scalar(value)
        return Weak(compute(*_words(value)).astype(np.int64))

    return call


def _bit_length(bits):
    high, low = (bits >> np.uint64(32)).astype(np.float64), (bits & np.uint64(0xFFFFFFFF)).astype(np.float64)
    return np.where(high > 0, 32 + np.frexp(high)[1], np.frexp(low)[1])


def _ffs(bits, width):
    return _bit_length(bits & (~bits + np.uint64(1)))


def _brev(bits, width):
    reverse = [int(f"{int(b):0{w}b}"[::-1], 2) for b, w in zip(bits, np.broadcast_to(width, bits.shape))]
    return np.array(reverse, np.uint64)


def _fma(mask, a, b, c):
    if not varies((a, b, c)):
        return arithmetic.fma(a, b, c)
    return per_lane(arithmetic.fma)(mask, a, b, c)


def _bf16_bits(mask, value):
    if not varies(value):
        return floats.bf16_bits(value)
    value = np.asarray(value.values if type(value) is Weak else value).astype(np.float32)
    bits = value.view(np.uint32).astype(np.int64)
    return Weak(np.where(value == value, (bits + 0x7FFF + (bits >> 16 & 1)) >> 16, 0x7FFF))


def _e4m3_bits(mask, value):
    if not varies(value):
        return floats.e4m3_bits(value)
    value = np.asarray(value.values if type(value) is Weak else value).astype(np.float32)
    magnitude = np.abs(value.astype(np.float64))
    code = np.searchsorted(floats.MIDPOINTS, magnitude)
    tie = (code < 126) & (magnitude == floats.MIDPOINTS[np.minimum(code, 125)]) & (code & 1 == 1)
    code = (code + tie) | np.where(np.signbit(value), 0x80, 0)
    return Weak(np.where(value == value, code, 0x7F))


def _shared_array(mask, shape, dtype, alignment=None):
    return state.gang.block.shared.array(shape, dtype, alignment, sys._getframe(1))


def _local_array(mask, shape, dtype, alignment=None):
    return access.Local.new(shape, dtype)


def _selp(mask, condition, a, b):
    return choose(mask, condition, a, b)


def _grid(mask, ndim):
    gang = state.gang
    axes = "xyz"
    values = [b * d + gang.index("threadIdx", axis) for b, d, axis in zip(gang.block.index, gang.grid.block_dim, axes)]
    return cuda_module.per_dimension("grid", ndim, values)


def _gridsize(mask, ndim):
    grid = state.gang.grid
    return cuda_module.per_dimension("gridsize", ndim, [b * g for b, g in zip(grid.block_dim, grid.grid_dim)])


def _spin(mask, *_):
    state.gang.spin()


def _nothing(mask, *_):
    return None


class LaneThread:
    """What `simulator.thread()` returns to a vector function."""

    lane = property(lambda self: state.gang.index("lane"))
    grid = property(lambda self: state.gang.grid)
    block = property(lambda self: state.gang.block)

    def spin(self, what="polling"):
        state.gang.spin(what)


def _load(mask, array, index):
    return access.load(mask, array, index)


def _store(mask, array, index, value):
    access.store(mask, array, index, value)


_THREAD = LaneThread()
VERSIONS = {
    **atomic.OPERATIONS,
    builtins.max: _pairwise(max, np.maximum, lambda new, old: new > old),
    builtins.min: _pairwise(min, np.minimum, lambda new, old: new < old),
    builtins.abs: lambda mask, x: abs(x),
    builtins.int: lambda mask, x: Weak(_integers(mask, x).astype(np.int64)) if varies(x) else int(x),
    builtins.float: lambda mask, x: (
        Weak((x.values if type(x) is Weak else x).astype(np.float64)) if varies(x) else float(x)
    ),
    builtins.bool: lambda mask, x: Weak(truth(x)) if varies(x) else bool(x),
    builtins.len: lambda mask, x: len(x),
    builtins.tuple: lambda mask, x=(): tuple(transform.lanes.iterate(x)),
    builtins.range: _uniform(range),
    builtins.isinstance: _uniform(isinstance),
    builtins.getattr: _uniform(getattr),
    builtins.hasattr: _uniform(hasattr),
    builtins.slice: slice,
    np.array: _uniform(np.array),
    np.dtype: _uniform(np.dtype),
    cuda_module.Shared.array: _shared_array,
    cuda_module.Local.array: _local_array,
    cuda_module.Const.array_like: lambda mask, array: array,
    cuda_module.grid: _grid,
    cuda_module.gridsize: _gridsize,
    cuda_module.load: _load,
    cuda_module.store: _store,
    cuda_module.lanemask_lt: collectives.lanemask_lt,
    cuda_module.syncthreads: collectives.syncthreads,
    cuda_module.syncthreads_count: collectives.syncthreads_count,
    cuda_module.syncthreads_and: collectives.syncthreads_and,
    cuda_module.syncthreads_or: collectives.syncthreads_or,
    cuda_module.ballot_sync: collectives.ballot_sync,
    cuda_module.match_any_sync: collectives.match_any_sync,
    cuda_module.match_all_sync: collectives.match_all_sync,
    cuda_module.nanosleep: _spin,
    cuda_module.threadfence: _nothing,
    scoped_access.fence: _nothing,
    warp.shuffle: collectives.shuffle,
    warp.vote: collectives.vote,
    warp.match: collectives.match,
    warp.redux: collectives.redux,
    warp.syncwarp: collectives.syncwarp,
    warp.activemask: collectives.activemask,
    warp.elect: collectives.elect,
    engine.thread: lambda mask: _THREAD,
    ranks.pointer_at: per_lane(ranks.pointer_at),
    arithmetic.popc: _bitwise(arithmetic.popc, lambda bits, width: np.bitwise_count(bits)),
    arithmetic.clz: _bitwise(arithmetic.clz, lambda bits, width: width - _bit_length(bits)),
    arithmetic.ffs: _bitwise(arithmetic.ffs, _ffs),
    arithmetic.brev: _bitwise(arithmetic.brev, _brev),
    arithmetic.selp: _selp,
    arithmetic.fma: _fma,
    arithmetic.cbrt: _direct(np.cbrt),
    floats.bf16_bits: _bf16_bits,
    floats.e4m3_bits: _e4m3_bits,
    memory.convert: _uniform(memory.convert),
}
_TRANSFORMED = {"shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync", "all_sync", "any_sync", "eq_sync"}


NAMES = {}  # (module of `ptx`, function) -> version
FACTORIES = {}  # the same of functions that a factory makes -> function that makes the version


def _refused(what):
    def refuse(mask, *_, **__):
        raise Unsupported(what)

    return refuse


def version(function):
    """Return the vector version of a callable; if there is none, a function that raises `Unsupported`."""
    if isinstance(function, Kernel):
        return CALLS[function.py_func]
    if isinstance(function, Type):
        return _number_cast(function) if isinstance(function, (Integer, Float)) else _uniform(function)
    if isinstance(function, type):
        if issubclass(function, np.number) or function is np.bool_:
            return _scalar_cast(function)
        if issubclass(function, tuple):
            return lambda mask, *arguments, **keywords: function(*arguments, **keywords)
        return _uniform(function) if function.__module__ == "builtins" else _refused(f"{function.__name__}()")
    if isinstance(function, np.ufunc):
        return _direct(function)
    if isinstance(function, types.BuiltinFunctionType) and function.__module__ == "math":
        return _per_lane_math(function)
    if isinstance(function, types.MethodType):
        inner = CALLS[function.__func__]
        return lambda mask, *arguments, **keywords: inner(mask, function.__self__, *arguments, **keywords)
    if isinstance(function, functools._lru_cache_wrapper):  # it makes device functions
        return _uniform(function)
    if not isinstance(function, types.FunctionType):
        return _refused(f"{getattr(function, '__name__', function)}()")
    module = function.__module__ or ""
    if module.startswith("moe_numba.ptx.") and (module[14:], function.__name__) in NAMES:
        return NAMES[module[14:], function.__name__]
    if module.startswith("moe_numba.ptx.") and (module[14:], function.__name__) in FACTORIES:
        return FACTORIES[module[14:], function.__name__](function)
    if module.startswith("moe_numba.simulator.") and function.__name__ not in _TRANSFORMED:
        return _refused(f"{function.__module__.rpartition('.')[2]}.{function.__name__}")
    try:
        return transform.vector_function(function, special)
    except Unsupported as error:
        return _refused(str(error))


class _Versions(dict):
    def __missing__(self, function):
        made = self[function] = version(function)
        return made


class _Effects(dict):
    """Versions of calls whose result is not used."""

    def __missing__(self, function):
        made = self[function] = CALLS[function]
        return made


CALLS = _Versions(VERSIONS)
EFFECTS = _Effects(atomic.EFFECTS)


@functools.cache
def _special_names():
    from numba import cuda

    return {id(getattr(cuda, name)) for name in ("threadIdx", "blockIdx", "blockDim", "gridDim")}, cuda


def special(value):
    """Say what is special about a static value; see `transform.vector_function`."""
    indices, module = _special_names()
    if id(value) in indices:
        return "index"
    if value is module:
        return "module"
    if isinstance(value, Type):
        return "type"
    if any(value is f for f in (max, min, abs, bool, arithmetic.popc, arithmetic.selp)):
        return "cast"
    return None


def index_of(base, name):
    """Return `threadIdx.x` and the like."""
    if isinstance(base, types.ModuleType):
        return state.gang.index("lane")
    return state.gang.index(base._name, name)


def attribute(value, name):
    if type(value) is ndarray or type(value) is Weak:
        raise Unsupported(f"attribute {name} of a number")
    return getattr(value, name)


def method(mask, value, name, *arguments, **keywords):
    """Call a method of a value."""
    kind = type(value)
    if kind is Pointer or kind is Pointers or kind is Array and name in ("load_vector", "store_vector"):
        if name in ("load_vector", "store_vector"):
            return getattr(access, name)(mask, value, *arguments, **keywords)
        if kind is Pointers:
            pointers = [getattr(p, name)(*arguments) for p in value.pointers] if not varies(arguments) else None
            if pointers is None:
                raise Unsupported("a pointer that differs between lanes")
            return Pointers(pointers, value.which)
        if varies(arguments):
            return per_lane(getattr(value, name))(mask, *arguments)
        return getattr(value, name)(*arguments, **keywords)
    if kind is ndarray and name == "view":
        dtype = memory.as_dtype(arguments[0])
        if dtype.itemsize != value.itemsize:
            raise Unsupported("a view of another size")
        return value.view(dtype)
    if kind is ndarray and name == "astype":
        return _scalar_cast(memory.as_dtype(arguments[0]).type)(mask, value)
    if kind is ndarray or kind is Weak:
        raise Unsupported(f"method {name} of a number")
    if kind is LaneThread:
        return getattr(value, name)(*arguments)
    found = getattr(value, name)
    if isinstance(found, types.MethodType) and isinstance(value, (Array, np.generic)):
        return _uniform(found)(mask, *arguments, **keywords)
    if getattr(found, "__self__", None) is None or isinstance(value, tuple) and isinstance(found, types.FunctionType):
        return CALLS[found](mask, *arguments, **keywords)
    if isinstance(found, types.MethodType) and found.__func__ in CALLS:
        return CALLS[found.__func__](mask, value, *arguments, **keywords)
    return _uniform(found)(mask, *arguments, **keywords)


def unpack(value):
    if type(value) is ndarray or type(value) is Weak:
        raise Unsupported("unpacking of a value that differs between lanes")
    return value


def check_assertion(mask, condition):
    if split(mask, condition)[1] is not False:
        raise Unsupported("an assertion fails")


transform.HELPERS.update(
    {
        "_Vload": access.load,
        "_Vstore": access.store,
        "_Vslice": slice,
        "_Vcall": CALLS,
        "_Veffect": EFFECTS,
        "_Vmethod": method,
        "_Vattribute": attribute,
        "_Vindex": index_of,
        "_Vunpack": unpack,
        "_Vassert": check_assertion,
    }
)
VERSIONS[barrier.grid] = lambda mask: state.gang.grid_barrier(mask)
CALLS[barrier.grid] = VERSIONS[barrier.grid]
CALLS[cuda_module.GridGroup.sync] = VERSIONS[barrier.grid]
CALLS[cuda_module.CooperativeGroups.this_grid] = lambda mask: cuda_module.GridGroup()
__all__ = ["CALLS", "count_nonzero", "select"]
