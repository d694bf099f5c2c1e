"""Warp-wide reductions, lane masks, and values that are warp-uniform.

The compiler keeps a value that it knows to be uniform in a uniform register. Such registers have arithmetic units of
their own, and the descriptors and addresses of wgmma and TMA must lie in them: from a lane's register they are copied
again for each instruction.
"""

import numpy as np
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction


def redux_sync_max_s32(mask, value):
    """``redux.sync.max.s32``: the largest of the values that the lanes named in ``mask`` bring, given to each."""
    return simulator.warp.redux("max", mask, np.int32(value))


def redux_sync_add_s32(mask, value):
    """``redux.sync.add.s32``: the sum of the values that the lanes named in ``mask`` bring, given to each."""
    return simulator.warp.redux("add", mask, np.int32(value))


def lanemask_lt():
    """``%lanemask_lt``: a word with a bit for every lane below this one."""
    return np.uint32((1 << simulator.thread().lane) - 1)


redux_sync_max_s32 = instruction("redux.sync.max.s32 $0, $2, $1;", "s32", "u32", "s32", simulate=redux_sync_max_s32)
redux_sync_add_s32 = instruction("redux.sync.add.s32 $0, $2, $1;", "s32", "u32", "s32", simulate=redux_sync_add_s32)
lanemask_lt = instruction("mov.u32 $0, %lanemask_lt;", "u32", simulate=lanemask_lt, side_effect=False)


FULL_MASK = 0xFFFFFFFF  # all 32 lanes


@cuda.jit(device=True)
def uniform(value):
    """An int32 that is the same in all lanes, which must all come: lane 0's."""
    return cuda.shfl_sync(FULL_MASK, value, 0)


@cuda.jit(device=True)
def warp_inclusive_scan(value, lane):
    """Return the sum of the int32 ``value`` over lanes 0 to ``lane``. All 32 lanes of the warp must call it."""
    for d in range(5):
        below = cuda.shfl_up_sync(FULL_MASK, value, 1 << d)
        value = int32(value + below) if lane >= (1 << d) else value
    return value


def uniform_array(array):
    """An array in shared memory, as itself, with its address in a register for all lanes.

    Otherwise the compiler thinks it cheap to compute the address for each use, though that takes some 30 clocks.
    """
    return array


def _uniform_array():
    from llvmlite import ir
    from numba.cuda.extending import intrinsic

    @intrinsic
    def uniform_array(typingctx, array):
        def codegen(context, builder, sig, arguments):
            made = context.make_array(sig.args[0])(context, builder, value=arguments[0])
            shared = made.data.type.pointee.as_pointer(3)
            word = builder.ptrtoint(builder.addrspacecast(made.data, shared), ir.IntType(32))
            function = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
            text = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
            word = builder.call(ir.InlineAsm(function, text, "=r,r", side_effect=True), [word], attrs=("convergent",))
            made.data = builder.addrspacecast(builder.inttoptr(word, shared), made.data.type)
            return made._getvalue()

        return array(array), codegen

    return uniform_array


if not simulator.ENABLED:
    uniform_array = _uniform_array()
