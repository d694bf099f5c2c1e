"""The `cuda` module that a kernel sees: Numba's simulated module, with names that refer to the current thread.

Numba's simulator swaps a function's globals at each launch. Here thread indices are objects that look up the current
greenlet. Device functions and closures are therefore plain Python calls, and the module can be imported under any name.
"""

import functools
import sys
import types

from moe_numba.simulator.core import (
    arithmetic,
    barrier,
    host,
    libdevice,
    memory,
    mlir_names,
    numba_modules,
    random,
    warp,
)
from moe_numba.simulator.core.atomic import Atomic
from moe_numba.simulator.core.engine import thread
from moe_numba.simulator.core.errors import file_name
from moe_numba.simulator.core.kernel import call_cpu_functions_as_python, jit
from moe_numba.simulator.memory_model import scoped_access


class _Index:
    """threadIdx, blockIdx, blockDim or gridDim of the current thread."""

    def __init__(self, name, get):
        self._name, self._get = name, get

    x = property(lambda self: self._get(thread()).x)
    y = property(lambda self: self._get(thread()).y)
    z = property(lambda self: self._get(thread()).z)

    def __iter__(self):
        return iter(self._get(thread()))

    def __repr__(self):
        return f"cuda.{self._name}"


class _Module(types.ModuleType):
    """Module class with `laneid`, the only name that is a plain value and differs between threads."""

    laneid = property(lambda self: thread().lane)


class Shared:
    @staticmethod
    def array(shape, dtype, alignment=None):
        return thread().block.shared.array(shape, dtype, alignment, sys._getframe(1))


@functools.lru_cache(maxsize=1024)
def _local_name(code, line):
    return f"the local array of {file_name(code.co_filename)}:{line}"


class Local:
    @staticmethod
    def array(shape, dtype, alignment=None):
        frame = sys._getframe(1)
        array = memory.local(shape, dtype, alignment, _local_name(frame.f_code, frame.f_lineno))
        thread().grid.add_local_array((frame.f_code, frame.f_lasti), array.array.nbytes)
        return array


class Const:
    @staticmethod
    def array_like(array):
        return array


class GridGroup:
    @staticmethod
    def sync():
        barrier.grid()


class CooperativeGroups(types.ModuleType):
    @staticmethod
    def this_grid():
        return GridGroup()


def grid(ndim):
    t = thread()
    return per_dimension("grid", ndim, [b * d + i for b, d, i in zip(t.block.index, t.grid.block_dim, t.threadIdx)])


def gridsize(ndim):
    t = thread()
    return per_dimension("gridsize", ndim, [b * g for b, g in zip(t.grid.block_dim, t.grid.grid_dim)])


def per_dimension(name, ndim, values):
    if ndim not in (1, 2, 3):
        raise ValueError(f"cuda.{name}({ndim}): the number of dimensions must be 1, 2 or 3")
    return values[0] if ndim == 1 else tuple(values[:ndim])


def _signed(mask):
    """Convert a mask to int32, the type that Numba assigns to the results of ballot and match."""
    return mask - (1 << 32) if mask >> 31 else mask


def shfl_sync(mask, value, src_lane):
    return warp.shuffle("idx", mask, value, src_lane, what="shfl_sync")


def shfl_up_sync(mask, value, delta):
    return warp.shuffle("up", mask, value, delta, what="shfl_up_sync")


def shfl_down_sync(mask, value, delta):
    return warp.shuffle("down", mask, value, delta, what="shfl_down_sync")


def shfl_xor_sync(mask, value, lane_mask):
    return warp.shuffle("bfly", mask, value, lane_mask, what="shfl_xor_sync")


def all_sync(mask, predicate):
    return warp.vote("all", mask, predicate, what="all_sync")


def any_sync(mask, predicate):
    return warp.vote("any", mask, predicate, what="any_sync")


def eq_sync(mask, predicate):
    return warp.vote("uni", mask, predicate, what="eq_sync")


def ballot_sync(mask, predicate):
    return _signed(warp.vote("ballot", mask, predicate, what="ballot_sync"))


def match_any_sync(mask, value):
    return _signed(warp.match("any", mask, value, what="match_any_sync"))


def match_all_sync(mask, value):
    lanes, all_equal = warp.match("all", mask, value, what="match_all_sync")
    return _signed(lanes), all_equal


def lanemask_lt():
    return (1 << thread().lane) - 1


def syncthreads():
    barrier.block("syncthreads")


def syncthreads_count(predicate):
    return barrier.block("syncthreads_count", bool(predicate), sum)


def syncthreads_and(predicate):
    return int(barrier.block("syncthreads_and", bool(predicate), all))


def syncthreads_or(predicate):
    return int(barrier.block("syncthreads_or", bool(predicate), any))


def nanosleep(_):
    thread().spin("nanosleep")


def threadfence():
    """Fence at gpu scope, for `weak_memory` and `races`; threads otherwise see memory in one order."""
    scoped_access.fence("gpu")


def threadfence_block():
    """Fence at cta scope."""
    scoped_access.fence("cta")


def threadfence_system():
    """Fence at sys scope."""
    scoped_access.fence("sys")


def literal_unroll(items):
    """Return a tuple of mixed types, over which a kernel then loops; the compiler unrolls such a loop."""
    return items


def load(array, i):
    return array[i]


def store(array, i, value):
    array[i] = value


_FUNCTIONS = (
    (jit, grid, gridsize, lanemask_lt, nanosleep, warp.activemask)
    + (threadfence, threadfence_block, threadfence_system)
    + (shfl_sync, shfl_up_sync, shfl_down_sync, shfl_xor_sync, match_any_sync, match_all_sync)
    + (all_sync, any_sync, eq_sync, ballot_sync)
    + (syncthreads, syncthreads_count, syncthreads_and, syncthreads_or)
    + (arithmetic.popc, arithmetic.brev, arithmetic.clz, arithmetic.ffs)
    + (arithmetic.selp, arithmetic.fma, arithmetic.cbrt, literal_unroll)
)


def install():
    """Replace the thread-dependent names of Numba's simulated `cuda` module, and add the names it lacks."""
    cuda = numba_modules.import_cuda()
    from numba.cuda.simulator.kernelapi import FakeCUDAFp16

    cuda.__class__ = _Module
    names = {function.__name__: function for function in _FUNCTIONS}
    names |= dict.fromkeys(("ldca", "ldcg", "ldcs", "ldlu", "ldcv"), load)
    names |= dict.fromkeys(("stcg", "stcs", "stwb", "stwt"), store)
    names |= {
        "threadIdx": _Index("threadIdx", lambda t: t.threadIdx),
        "blockIdx": _Index("blockIdx", lambda t: t.block.index),
        "blockDim": _Index("blockDim", lambda t: t.grid.block_dim),
        "gridDim": _Index("gridDim", lambda t: t.grid.grid_dim),
        "warpsize": 32,
        "syncwarp": warp.syncwarp,
        "shared": Shared,
        "local": Local,
        "const": Const,
        "atomic": Atomic,
        "fp16": FakeCUDAFp16(),
        "cg": CooperativeGroups("numba.cuda.cg"),
    }
    for name, value in names.items():
        setattr(cuda, name, value)
    sys.modules["numba.cuda.cg"] = cuda.cg
    host.install(cuda)
    libdevice.install()
    random.install()
    mlir_names.install()
    call_cpu_functions_as_python()
