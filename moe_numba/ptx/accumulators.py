"""Intrinsics over tuples of floats: the accumulators of a wgmma between one instruction and the next.

To Numba a tuple of float32 is as many registers. The assembly gets them as operands, so that the compiler sees which
instruction produces and which consumes them, and reorders nothing across.
"""

from functools import cache

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction, make_intrinsic


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


@cache
def make_fma(n):
    """``fma(total, acc, factor)``: total + acc * factor, each rounded once; ``factor`` is one float."""

    def fma(total, acc, factor):
        return simulator.fragments.fma(total, acc, factor)

    def emit(builder, total, acc, factor):
        return [builder.fma(x, factor, t) for t, x in zip(total, acc)]

    return arithmetic((n // 2, n // 2, None), n // 2, emit, simulate=fma)


@cache
def make_fma_columns(n):
    """``fma(total, acc, factors)``: with a factor for each of the thread's n / 4 columns, in their order."""

    def fma_columns(total, acc, factors):
        return simulator.fragments.fma_columns(total, acc, factors)

    def emit(builder, total, acc, factors):
        return [builder.fma(x, factors[2 * (r // 4) + r % 2], t) for r, (t, x) in enumerate(zip(total, acc))]

    return arithmetic((n // 2, n // 2, n // 4), n // 2, emit, simulate=fma_columns)


@cache
def make_fma_rows(n):
    """``fma(total, acc, low, high)``: with one factor for the thread's lower row and one for the row 8 further on."""

    def fma_rows(total, acc, low, high):
        return simulator.fragments.fma_rows(total, acc, low, high)

    def emit(builder, total, acc, low, high):
        return [builder.fma(x, high if r & 2 else low, t) for r, (t, x) in enumerate(zip(total, acc))]

    return arithmetic((n // 2, n // 2, None, None), n // 2, emit, simulate=fma_rows)


@cache
def make_scale(count):
    """``scale(values, factor)``: each of ``count`` floats times ``factor``."""

    def scale(values, factor):
        return simulator.fragments.scale(values, factor)

    def emit(builder, values, factor):
        return [builder.fmul(x, factor) for x in values]

    return arithmetic((count, None), count, emit, simulate=scale)


@cache
def make_load_columns(n):
    """``load(array, index)``, ``ld.shared.v2.f32``: of n floats in shared memory, those of the thread's n / 4 columns.

    ``index`` is the element of the thread's first column, ``2 * (lane % 4)`` past the first of the n floats.
    """

    def load_columns(array, index):
        return simulator.fragments.load_columns(array, index, n)

    loads = " ".join(f"ld.shared.v2.f32 {{${2 * j}, ${2 * j + 1}}}, [${n // 4}+{32 * j}];" for j in range(n // 8))
    return instruction(loads, f"f32 x {n // 4}", SHARED, simulate=load_columns)
