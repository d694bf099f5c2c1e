"""What a whole warp agrees on, said so that the compiler knows it too: it then keeps it in a register for all lanes.

Such registers have arithmetic units of their own, and the descriptors and addresses of wgmmas and copies must lie in
them. Of what a warp has in lane registers the compiler makes them anew for each instruction.
"""

from numba import cuda

from moe_numba import simulator

FULL = 0xFFFFFFFF


@cuda.jit(device=True)
def uniform(value):
    """An int32 that is the same in all lanes, which must all come: lane 0's."""
    return cuda.shfl_sync(FULL, value, 0)


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
