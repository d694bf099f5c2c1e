"""``ldmatrix`` and ``stmatrix``: 8 x 16-byte matrices between a warp's registers and shared memory.

Lane ``8 i + r`` names row ``r`` of matrix ``i`` by (array, index), a multiple of 16 bytes. In registers, lane ``l`` has
from each matrix one word, two 16-bit elements: row ``l // 4``, columns ``2 (l % 4)`` (its low half) and the next one.
With ``_trans`` it has column ``l // 4`` and those two rows instead. That is the layout of wgmma's results. All lanes of
the warp must execute them.
"""

from functools import cache

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.intrinsic import SHARED, instruction


def _stmatrix(count, trans):
    def simulate(array, index, *words):
        simulator.matrix.store(array, index, words, trans)

    name = f"stmatrix_x{count}" + "_trans" * trans
    simulate.__name__ = simulate.__qualname__ = name
    registers = ", ".join(f"r{i}" for i in range(count))
    variant = f"x{count}" + ".trans" * trans
    simulate.__doc__ = (
        f"``{name}(array, index, {registers})``, ``stmatrix.sync.aligned.m8n8.{variant}.shared.b16``: "
        f"store {count} matri{'x' if count == 1 else 'ces'}."
    )
    template = (
        f"stmatrix.sync.aligned.m8n8.{variant}.shared.b16 [$0], {{{', '.join(f'${1 + i}' for i in range(count))}}};"
    )
    return instruction(template, "void", SHARED, *["u32"] * count, simulate=simulate)


def _ldmatrix(count, trans):
    def simulate(array, index):
        return simulator.matrix.load(array, index, count, trans)

    name = f"ldmatrix_x{count}" + "_trans" * trans
    simulate.__name__ = simulate.__qualname__ = name
    variant = f"x{count}" + ".trans" * trans
    simulate.__doc__ = (
        f"``{name}(array, index)``, ``ldmatrix.sync.aligned.m8n8.{variant}.shared.b16``: load {count} matrices."
    )
    registers = ", ".join(f"${i}" for i in range(count))
    template = f"ldmatrix.sync.aligned.m8n8.{variant}.shared.b16 {{{registers}}}, [${count}];"
    return instruction(template, f"u32 x {count}", SHARED, simulate=simulate)


stmatrix_x1, stmatrix_x1_trans = _stmatrix(1, False), _stmatrix(1, True)
stmatrix_x2, stmatrix_x2_trans = _stmatrix(2, False), _stmatrix(2, True)
stmatrix_x4, stmatrix_x4_trans = _stmatrix(4, False), _stmatrix(4, True)
ldmatrix_x2, ldmatrix_x2_trans = _ldmatrix(2, False), _ldmatrix(2, True)
ldmatrix_x4, ldmatrix_x4_trans = _ldmatrix(4, False), _ldmatrix(4, True)


@cache
def make_load_shared(n):
    """``load(array, index)``: factors of the n / 4 columns that a thread's results lie in, from shared memory.

    They are neighbours, from element ``index`` of a float32 array on, a multiple of 16 bytes (``ld.shared.v4.f32``).
    """

    def load_shared(array, index):
        factors = []
        for i in range(0, n // 4, 4):
            factors += array.pointer().load_vector(index + i, np.float32, min(4, n // 4 - i))
        return tuple(factors)

    return load_shared if simulator.ENABLED else _load_shared(n)


def _load_shared(n):
    from numba import types
    from numba.cuda.extending import intrinsic

    floats = types.UniTuple(types.float32, n // 4)

    @intrinsic
    def load_shared(typingctx, array, index):
        def codegen(context, builder, sig, arguments):
            data, factors = _shared_floats(context, builder, sig.args[0], *arguments), []
            for i in range(0, n // 4, 4):
                factors += _four(builder, data, i, n)
            return context.make_tuple(builder, sig.return_type, factors)

        return floats(array, types.int32), codegen

    return load_shared


def _shared_floats(context, builder, array_type, array, index):
    """A pointer to an element of a shared array."""
    from llvmlite import ir

    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(builder.addrspacecast(data, ir.FloatType().as_pointer(3)), [index])


def _four(builder, data, i, n):
    """The factors from the i-th on, four or what there is."""
    from llvmlite import ir

    width = min(4, n // 4 - i)
    vector = ir.VectorType(ir.FloatType(), width).as_pointer(3)
    here = builder.bitcast(builder.gep(data, [ir.Constant(ir.IntType(32), i)]), vector)
    four = builder.load(here, align=4 * width)
    return [builder.extract_element(four, ir.Constant(ir.IntType(32), k)) for k in range(width)]


@cache
def make_fma_shared(n):
    """``fma(total, product, array, index)``: ``total + product * factor``, each factor loaded just before its use.

    As :func:`make_load_shared` and then ``make_fma_columns``, where there are no registers for all of the factors.
    """

    def fma_shared(total, product, array, index):
        return simulator.fragments.fma_columns(total, product, make_load_shared(n)(array, index))

    return fma_shared if simulator.ENABLED else _fma_shared(n)


def _fma_shared(n):
    from numba import types
    from numba.cuda.extending import intrinsic

    floats = types.UniTuple(types.float32, n // 2)

    @intrinsic
    def fma_shared(typingctx, total, product, array, index):
        def codegen(context, builder, sig, arguments):
            data, results = _shared_floats(context, builder, sig.args[2], *arguments[2:]), []
            for i in range(0, n // 4, 4):
                factors = _four(builder, data, i, n)
                for r in range(2 * i, 2 * (i + len(factors))):  # d[4 j + 2 h + i] is in column 2 j + i
                    factor = factors[2 * (r // 4) + r % 2 - i]
                    at = builder.extract_value(arguments[1], r), factor, builder.extract_value(arguments[0], r)
                    results.append(builder.fma(*at))
            return context.make_tuple(builder, sig.return_type, results)

        return floats(floats, floats, array, types.int32), codegen

    return fma_shared


@cache
def make_stmatrix_fragment(n, first, count, pitch):
    """``store(array, at, values, factor)``: columns ``first`` to ``first + count`` of a fragment, as rows of bf16.

    Each float times ``factor`` is rounded to bf16 (``cvt.rn.bf16x2``). ``stmatrix.x2.trans`` makes a row of 16 results,
    two chunks of 16 bytes, of each column of a warp's part. Lane l names by ``at`` the chunk ``l // 8`` of the row of
    column ``first + l % 8``; those of the columns after it lie ``pitch`` bytes apart. ``array`` is one of bytes.
    """

    def stmatrix_fragment(array, at, values, factor):
        for j in range(count // 8):
            at_value = (first // 8 + j) * 4
            a, b, c, d = (np.float32(v * factor) for v in tuple(values)[at_value : at_value + 4])
            stmatrix_x2_trans(array, at + 8 * j * pitch, cvt_rn_bf16x2_f32(b, a), cvt_rn_bf16x2_f32(d, c))

    if simulator.ENABLED:
        return stmatrix_fragment
    return _stmatrix_fragment(n, first, count, pitch)


def _stmatrix_fragment(n, first, count, pitch):
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    used, address, factor = count // 2, count // 2, count // 2 + 1
    lines = ["{ .reg .b32 a, b; .reg .f32 x, y;"]
    for j in range(count // 8):
        for word, at in (("a", 4 * j), ("b", 4 * j + 2)):
            lines.append(f"mul.f32 x, ${at}, ${factor}; mul.f32 y, ${at + 1}, ${factor};")
            lines.append(f"cvt.rn.bf16x2.f32 {word}, y, x;")
        lines.append(f"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [${address}+{8 * j * pitch}], {{a, b}};")
    text, constraints = " ".join([*lines, "}"]), ",".join(["f"] * used + ["r", "f", "~{memory}"])
    function = ir.FunctionType(ir.VoidType(), [ir.FloatType()] * used + [ir.IntType(32), ir.FloatType()])

    @intrinsic
    def stmatrix_fragment(typingctx, array, at, values, factor):
        def codegen(context, builder, sig, arguments):
            data = context.make_array(sig.args[0])(context, builder, value=arguments[0]).data
            data = builder.addrspacecast(data, data.type.pointee.as_pointer(3))
            place = builder.ptrtoint(builder.gep(data, [arguments[1]]), ir.IntType(32))
            floats = [builder.extract_value(arguments[2], first // 2 + i) for i in range(used)]
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            builder.call(assembly, [*floats, place, arguments[3]], attrs=("convergent",))
            return context.get_dummy_value()

        return types.void(array, types.int32, types.UniTuple(types.float32, n // 2), types.float32), codegen

    return stmatrix_fragment
