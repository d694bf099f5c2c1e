"""Warp-wide reductions, lane masks, and warp-uniform values.

The compiler keeps a value that it knows to be uniform in a uniform register. Uniform registers have their own ALUs, and
wgmma and TMA take their descriptors and addresses from them: a value in an ordinary register is copied to a uniform
register again for each instruction.
"""

import numpy as np
from numba import cuda, int32

from moe_numba import simulator
from moe_numba.ptx.intrinsic import instruction

FULL_MASK = 0xFFFFFFFF  # all 32 lanes


def redux_sync_max_s32(mask, value):
    """``redux.sync.max.s32``: return the maximum of the values of the lanes in ``mask`` to each of them.

    Below compute capability 8.0, which lacks it: five shuffles. The mask must then be full.
    """
    return simulator.warp.redux("max", mask, np.int32(value))


def redux_sync_add_s32(mask, value):
    """``redux.sync.add.s32``: return the sum of the values of the lanes in ``mask`` to each of them.

    Below compute capability 8.0, which lacks it: five shuffles. The mask must then be full.
    """
    return simulator.warp.redux("add", mask, np.int32(value))


def _max_by_shuffles(mask, value):
    for d in range(5):
        value = max(value, cuda.shfl_xor_sync(FULL_MASK, value, 1 << d))
    return value


def _sum_by_shuffles(mask, value):
    for d in range(5):
        value = int32(value + cuda.shfl_xor_sync(FULL_MASK, value, 1 << d))
    return value


def lanemask_lt():
    """``%lanemask_lt``: return the mask of all lanes below this one."""
    return np.uint32((1 << simulator.thread().lane) - 1)


redux_sync_max_s32 = instruction(
    "redux.sync.max.s32 $0, $2, $1;", "s32", "u32", "s32", simulate=redux_sync_max_s32, fallback=_max_by_shuffles
)
redux_sync_add_s32 = instruction(
    "redux.sync.add.s32 $0, $2, $1;", "s32", "u32", "s32", simulate=redux_sync_add_s32, fallback=_sum_by_shuffles
)
lanemask_lt = instruction("mov.u32 $0, %lanemask_lt;", "u32", simulate=lanemask_lt, side_effect=False)


@cuda.jit(device=True)
def uniform(value):
    """Return lane 0's int32 as a warp-uniform value; all lanes must execute it."""
    return cuda.shfl_sync(FULL_MASK, value, 0)


@cuda.jit(device=True)
def warp_inclusive_scan(value, lane):
    """Return the sum of the int32 ``value`` over lanes 0 to ``lane``. All 32 lanes of the warp must call it."""
    for d in range(5):
        below = cuda.shfl_up_sync(FULL_MASK, value, 1 << d)
        value = int32(value + below) if lane >= (1 << d) else value
    return value


def uniform_array(array):
    """Return a shared array whose address is in a uniform register; all lanes must execute it.

    Otherwise the compiler recomputes the address at each use, which takes about 30 cycles.
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
            address = builder.ptrtoint(builder.addrspacecast(made.data, shared), ir.IntType(32))
            function = ir.FunctionType(ir.IntType(32), [ir.IntType(32)])
            text = "shfl.sync.idx.b32 $0, $1, 0, 31, 0xffffffff;"
            address = builder.call(
                ir.InlineAsm(function, text, "=r,r", side_effect=True), [address], attrs=("convergent",)
            )
            made.data = builder.addrspacecast(builder.inttoptr(address, shared), made.data.type)
            return made._getvalue()

        return array(array), codegen

    return uniform_array


if not simulator.ENABLED:
    uniform_array = _uniform_array()
