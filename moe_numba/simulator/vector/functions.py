"""Vector versions of what kernels call: builtins, casts, arithmetic, `cuda` functions, and other Python functions.

A function without a hand-written version is transformed from its source. Some of the simulator's own functions are
called lane by lane.
"""

import builtins
import functools
import sys
import types

import numpy as np
from numba.core.types.abstract import Type
from numba.core.types.scalars import Float, Integer

from moe_numba.simulator.core import arithmetic, barrier, cuda_module, engine, floats, memory, warp
from moe_numba.simulator.core.kernel import Kernel
from moe_numba.simulator.core.memory import Array, Pointer
from moe_numba.simulator.core.operators import to_float, to_int
from moe_numba.simulator.core.source import NoSource
from moe_numba.simulator.core.typed_code import FUNCTIONS
from moe_numba.simulator.memory_model import ranks, scoped_access
from moe_numba.simulator.vector import access, atomic, casts, collectives, loops, state, transform
from moe_numba.simulator.vector.errors import Unsupported
from moe_numba.simulator.vector.lane_calls import per_lane, varies
from moe_numba.simulator.vector.lanes import Pointers, choose, split, truth
from moe_numba.simulator.vector.local import Local
from moe_numba.simulator.vector.numbers import Weak
from moe_numba.simulator.vector.operators import VECTOR

ndarray = np.ndarray


def _uniform(function):
    """Make the version of a function that takes only values that do not differ between lanes."""

    def call(mask, *arguments, **keywords):
        if any(varies(a) or type(a) is Local for a in (*arguments, *keywords.values())):
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


def _shared_array(mask, shape, dtype, alignment=None):
    return state.gang.block.shared.array(shape, dtype, alignment, sys._getframe(1))


def _local_array(mask, shape, dtype, alignment=None):
    made, frame = Local.new(shape, dtype), sys._getframe(1)
    state.gang.grid.add_local_array((frame.f_code, frame.f_lasti), made.size * made.dtype.itemsize)
    return made


def _selp(mask, condition, a, b):
    return choose(mask, condition, a, b)


def _grid(mask, ndim):
    gang = state.gang
    index = lambda d, axis: gang.index("blockIdx", axis) * d + gang.index("threadIdx", axis)
    return cuda_module.per_dimension("grid", ndim, list(map(index, gang.grid.block_dim, "xyz")))


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
    builtins.max: casts.pairwise(max, np.maximum, lambda new, old: new > old),
    builtins.min: casts.pairwise(min, np.minimum, lambda new, old: new < old),
    builtins.abs: lambda mask, x: abs(x),
    builtins.pow: lambda mask, a, b: VECTOR["pow"](a, b),
    builtins.int: lambda mask, x: Weak(casts.integers(mask, x).astype(np.int64)) if varies(x) else to_int(x),
    builtins.float: lambda mask, x: (x.values if type(x) is Weak else x).astype(float) if varies(x) else to_float(x),
    builtins.bool: lambda mask, x: Weak(truth(x)) if varies(x) else bool(x),
    builtins.len: lambda mask, x: len(x),
    builtins.enumerate: lambda mask, x, start=0: enumerate(loops.iterate(x), start),
    builtins.zip: lambda mask, *values: zip(*map(loops.iterate, values)),
    builtins.tuple: lambda mask, x=(): tuple(loops.iterate(x)),
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
    cuda_module.threadfence_block: _nothing,
    cuda_module.threadfence_system: _nothing,
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
    arithmetic.popc: casts.bitwise(arithmetic.popc, lambda bits, width: np.bitwise_count(bits)),
    arithmetic.clz: casts.bitwise(arithmetic.clz, lambda bits, width: width - casts.bit_length(bits)),
    arithmetic.ffs: casts.bitwise(arithmetic.ffs, casts.ffs),
    arithmetic.brev: casts.bitwise(arithmetic.brev, casts.brev),
    arithmetic.selp: _selp,
    arithmetic.fma: casts.fma,
    arithmetic.cbrt: _direct(np.cbrt),
    floats.bf16_bits: casts.bf16_bits,
    floats.e4m3_bits: casts.e4m3_bits,
    memory.convert: _uniform(memory.convert),
}
_TRANSFORMED = {"shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync", "all_sync", "any_sync", "eq_sync"}


NAMES = {}  # (module of `ptx`, function) -> version
FACTORIES = {}  # the same of functions that a factory makes -> function that makes the version


def _refused(what):
    def refuse(mask, *_, **__):
        raise Unsupported(what)

    return refuse


def version(function, calls):
    """Return the vector version of a callable; if there is none, a function that raises `Unsupported`.

    `calls` has the versions of what it calls.
    """
    if isinstance(function, Kernel):
        return calls[function.py_func]
    if isinstance(function, Type):
        return casts.number_cast(function) if isinstance(function, (Integer, Float)) else _uniform(function)
    if isinstance(function, type):
        if issubclass(function, np.number) or function is np.bool_:
            return casts.scalar_cast(function)
        if issubclass(function, tuple):
            return lambda mask, *arguments, **keywords: function(*arguments, **keywords)
        return _uniform(function) if function.__module__ == "builtins" else _refused(f"{function.__name__}()")
    if isinstance(function, np.ufunc):
        return _direct(function)
    if isinstance(function, types.BuiltinFunctionType) and function.__module__ == "math":
        return casts.per_lane_math(FUNCTIONS.get(function, function))
    if isinstance(function, types.MethodType):
        inner = calls[function.__func__]
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
        return transform.vector_function(function, special, calls)
    except (Unsupported, NoSource) as error:
        return _refused(str(error))


class _Versions(dict):
    """Vector versions by function; `notes_statements`: they note each statement that they execute, for a profile."""

    def __init__(self, known, notes_statements):
        super().__init__(known)
        self.notes_statements, self.effects = notes_statements, _Effects(self)

    def __missing__(self, function):
        made = self[function] = version(function, self)
        return made


class _Effects(dict):
    """Versions of calls whose result is not used."""

    def __init__(self, calls):
        super().__init__(atomic.EFFECTS)
        self.calls = calls

    def __missing__(self, function):
        made = self[function] = self.calls[function]
        return made


CALLS, NOTED_CALLS = _Versions(VERSIONS, False), _Versions(VERSIONS, True)


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
        return casts.scalar_cast(memory.as_dtype(arguments[0]).type)(mask, value)
    if kind is ndarray or kind is Weak:
        raise Unsupported(f"method {name} of a number")
    if kind is LaneThread:
        return getattr(value, name)(*arguments)
    if isinstance(value, (list, dict, set)):
        raise Unsupported(f"{name} of a {kind.__name__}, which the host may see")
    found = getattr(value, name)
    if isinstance(found, types.MethodType) and isinstance(value, (Array, np.generic)):
        return _uniform(found)(mask, *arguments, **keywords)
    if getattr(found, "__self__", None) is None or isinstance(value, tuple) and isinstance(found, types.FunctionType):
        return state.gang.engine.calls[found](mask, *arguments, **keywords)
    if isinstance(found, types.MethodType) and found.__func__ in CALLS:
        return state.gang.engine.calls[found.__func__](mask, value, *arguments, **keywords)
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
        "_Vmethod": method,
        "_Vattribute": attribute,
        "_Vindex": index_of,
        "_Vunpack": unpack,
        "_Vassert": check_assertion,
    }
)
for _calls in (CALLS, NOTED_CALLS):
    _calls[barrier.grid] = _calls[cuda_module.GridGroup.sync] = lambda mask: state.gang.grid_barrier(mask)
    _calls[cuda_module.CooperativeGroups.this_grid] = lambda mask: cuda_module.GridGroup()
