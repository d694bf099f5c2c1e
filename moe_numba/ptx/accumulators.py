"""Intrinsics on tuples of floats: accumulators that stay in registers between matrix instructions.

Numba represents a tuple of float32 as that many registers. They are operands of the assembly, so the compiler sees
which instruction produces and which consumes them, and does not reorder across.
"""

import inspect

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.intrinsic import factory, make_intrinsic


def tuple_intrinsic(simulate, result, arguments, emit):
    """Make an intrinsic of this signature; ``emit(builder, values)`` returns the list of result registers.

    A tuple argument is a list of registers in ``values``.
    """
    signature = result(*arguments)

    def codegen(context, builder, sig, values):
        flat = []
        for typ, value in zip(sig.args, values, strict=True):
            count = getattr(typ, "count", None)
            flat.append(value if count is None else [builder.extract_value(value, i) for i in range(count)])
        return context.make_tuple(builder, sig.return_type, emit(builder, flat))

    return make_intrinsic(simulate, len(arguments), lambda *_: (signature, codegen))


@factory
def make_for_each_chunk(count, size, body, tuples=1):
    """Make ``for_each_chunk(values, *others)``: call ``body(first, chunk, *others)`` for each ``size`` of the values.

    ``values`` is a tuple of ``count`` floats, or they are ``tuples`` of them, one after the other. ``chunk`` is the
    tuple ``values[first : first + size]``, or what is left of it. ``body`` is a device function without a result.

    Only constants can index a tuple, so a loop over accumulators would move them to local memory. This one is unrolled:
    ``first``, an int32, is a constant in the machine code of each call.
    """
    firsts = range(0, count, size)

    def for_each_chunk(*arguments):
        values, others = arguments[:tuples], arguments[tuples:]
        for first in firsts:
            body(np.int32(first), *(tuple(v)[first : first + size] for v in values), *others)

    return for_each_chunk if simulator.ENABLED else _for_each_chunk(count, firsts, size, body, tuples, for_each_chunk)


def _for_each_chunk(count, firsts, size, body, tuples, simulate):
    from numba import types
    from numba.cuda.typing.typeof import typeof

    def typing(*arguments):
        others = arguments[tuples:]
        signature = types.void(*[types.UniTuple(types.float32, count)] * tuples, *others)

        def codegen(context, builder, sig, arguments):
            registers = [[builder.extract_value(v, i) for i in range(count)] for v in arguments[:tuples]]
            functions = {}
            for first in firsts:
                kind = types.UniTuple(types.float32, min(size, count - first))
                if kind not in functions:
                    wanted = types.int32, *[kind] * tuples, *others
                    wanted = typeof(body).get_call_type(context.typing_context, wanted, {})
                    functions[kind] = context.get_function(typeof(body), wanted)
                    context.add_linking_libs(functions[kind].libs)
                chunks = [context.make_tuple(builder, kind, r[first : first + size]) for r in registers]
                functions[kind](builder, (context.get_constant(types.int32, first), *chunks, *arguments[tuples:]))
            return context.get_dummy_value()

        return signature, codegen

    return make_intrinsic(simulate, len(inspect.signature(body.py_func).parameters) - 1, typing)


def assembly(template, count, operands=0, *, words=0, in_place, simulate):
    """Make a function for assembly that writes ``count`` float registers and returns them as a tuple.

    Parameters
    ----------
    template : callable
        Returns the PTX. Its arguments are the list of register names, then the name of each word and operand.
    count : int
    operands : int
        Number of 64-bit unsigned operands.
    words : int
        Number of uint32 operands, which the function takes as one tuple before the 64-bit operands.
    in_place : bool
        The function's first argument is a tuple with the initial values of the registers.
    simulate : callable
        Python implementation for the simulator.
    """
    if simulator.ENABLED:
        return simulate
    from llvmlite import ir
    from numba import types

    floats = types.UniTuple(types.float32, count)
    first = 2 * count if in_place else count
    text = template([f"${i}" for i in range(count)], *(f"${first + i}" for i in range(words + operands)))
    constraints = ["=f"] * count + [str(i) for i in range(count)] * in_place + ["r"] * words + ["l"] * operands
    registers, inputs = [ir.FloatType()] * count, [ir.IntType(32)] * words + [ir.IntType(64)] * operands
    function = ir.FunctionType(ir.LiteralStructType(registers), registers * in_place + inputs)
    arguments = [floats] * in_place + [types.UniTuple(types.uint32, words)] * (words > 0) + [types.uint64] * operands

    def emit(builder, values):
        values = [v for value in values for v in (value if isinstance(value, list) else [value])]
        assembly = ir.InlineAsm(function, text, ",".join([*constraints, "~{memory}"]), side_effect=True)
        out = builder.call(assembly, values, attrs=("convergent",))
        return [builder.extract_value(out, i) for i in range(count)]

    return tuple_intrinsic(simulate, floats, arguments, emit)


def arithmetic(counts, result, emit, *, simulate):
    """Make a function of tuples of floats, of ``counts`` elements each (None: a single float), that returns ``result``.

    ``emit(builder, *arguments)`` returns the result registers; a tuple argument is a list of registers.
    """
    if simulator.ENABLED:
        return simulate
    from numba import types

    arguments = [types.float32 if n is None else types.UniTuple(types.float32, n) for n in counts]
    returned = types.UniTuple(types.float32, result)
    return tuple_intrinsic(simulate, returned, arguments, lambda b, values: emit(b, *values))


@factory
def make_fma(n):
    """Make ``fma(total, acc, factor)``: total + acc * factor per accumulator, rounded once; ``factor`` is one float."""

    def fma(total, acc, factor):
        return simulator.fragments.fma(total, acc, factor)

    def emit(builder, total, acc, factor):
        return [builder.fma(x, factor, t) for t, x in zip(total, acc)]

    return arithmetic((n // 2, n // 2, None), n // 2, emit, simulate=fma)


@factory
def make_fma_columns(n):
    """Make ``fma(total, acc, factors)``, as ``make_fma`` with one factor per column, for a thread's n / 4 columns."""

    def fma_columns(total, acc, factors):
        return simulator.fragments.fma_columns(total, acc, factors)

    def emit(builder, total, acc, factors):
        return [builder.fma(x, factors[2 * (r // 4) + r % 2], t) for r, (t, x) in enumerate(zip(total, acc))]

    return arithmetic((n // 2, n // 2, n // 4), n // 2, emit, simulate=fma_columns)


@factory
def make_fma_blocks(n, width):
    """Make ``fma(total, acc, factors)``, as ``make_fma`` with one factor per row and block of ``width`` columns.

    ``factors[2 * b + h]`` is the factor of block ``b`` in the thread's row ``h`` of two.
    """

    def fma_blocks(total, acc, factors):
        return simulator.fragments.fma_blocks(total, acc, factors, width)

    def emit(builder, total, acc, factors):
        index = [2 * (8 * (r // 4) // width) + r // 2 % 2 for r in range(n // 2)]
        return [builder.fma(x, factors[i], t) for i, t, x in zip(index, total, acc)]

    return arithmetic((n // 2, n // 2, 2 * (n // width)), n // 2, emit, simulate=fma_blocks)
