"""Intrinsics over tuples of floats: how the accumulators of a wgmma travel from one instruction to the next.

To Numba a tuple of float32 is as many registers. The assembly gets them as operands, so that the compiler sees who
needs what from whom, and moves nothing across.
"""

from moe_numba import simulator
from moe_numba.ptx.intrinsic import make_intrinsic


def _intrinsic(simulate, result, arguments, emit):
    """Make a Numba intrinsic of this signature; ``emit(builder, values)`` returns the list of result registers."""
    signature = result(*arguments)

    def codegen(context, builder, sig, values):
        flat = []
        for typ, value in zip(sig.args, values, strict=True):
            count = getattr(typ, "count", None)
            flat.append(value if count is None else [builder.extract_value(value, i) for i in range(count)])
        return context.make_tuple(builder, sig.return_type, emit(builder, flat))

    return make_intrinsic(simulate, len(arguments), lambda *_: (signature, codegen))


def assembly(template, count, operands=(), *, tied, simulate):
    """Make a function for assembly that leaves ``count`` floats in registers, its tuple of results.

    Parameters
    ----------
    template : callable
        Gives the PTX. It takes the names of the registers, and then that of each operand.
    count : int
    operands : tuple of str
        ``"u64"`` or ``"s32"`` for each operand.
    tied : bool
        The function's first argument is a tuple, what the registers hold before.
    simulate : callable
        What the assembly means, in Python.
    """
    if simulator.ENABLED:
        return simulate
    from llvmlite import ir
    from numba import types

    scalars = {"u64": (types.uint64, ir.IntType(64), "l"), "s32": (types.int32, ir.IntType(32), "r")}
    floats = types.UniTuple(types.float32, count)
    first = 2 * count if tied else count
    text = template([f"${i}" for i in range(count)], *(f"${first + i}" for i in range(len(operands))))
    constraints = ["=f"] * count + [str(i) for i in range(count)] * tied + [scalars[o][2] for o in operands]
    registers = [ir.FloatType()] * count
    function = ir.FunctionType(ir.LiteralStructType(registers), registers * tied + [scalars[o][1] for o in operands])

    def emit(builder, values):
        values = [*values[0], *values[1:]] if tied else values
        assembly = ir.InlineAsm(function, text, ",".join([*constraints, "~{memory}"]), side_effect=True)
        out = builder.call(assembly, values, attrs=("convergent",))
        return [builder.extract_value(out, i) for i in range(count)]

    arguments = [floats] * tied + [scalars[o][0] for o in operands]
    return _intrinsic(simulate, floats, arguments, emit)


def arithmetic(counts, result, emit, *, simulate):
    """Make a function of tuples of floats (``counts`` each; None is a single float) that gives ``result`` floats.

    ``emit(builder, *arguments)`` gives the results; a tuple reaches it as a list of registers.
    """
    if simulator.ENABLED:
        return simulate
    from numba import types

    arguments = [types.float32 if n is None else types.UniTuple(types.float32, n) for n in counts]
    returned = types.UniTuple(types.float32, result)
    return _intrinsic(simulate, returned, arguments, lambda b, values: emit(b, *values))
