"""``stmatrix``: stores 8 x 8 matrices of 16-bit elements from a warp's registers; and wgmma epilogue helpers.

Lane ``8 i + r`` addresses row ``r`` of matrix ``i`` (16 bytes, 16-byte aligned) by (array, index). Lane ``l`` holds one
32-bit register per matrix, with two elements: row ``l // 4``, columns ``2 (l % 4)`` (low half) and the next one. With
``_trans`` they are column ``l // 4`` and those two rows instead. This is the layout of wgmma accumulators rounded to 16
bits. All lanes of the warp must execute the instruction.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.intrinsic import SHARED, factory, instruction, make_intrinsic


def _stmatrix(count, trans):
    def simulate(array, index, *registers):
        simulator.matrix.store(array, index, registers, trans)

    name = f"stmatrix_x{count}" + "_trans" * trans
    simulate.__name__ = simulate.__qualname__ = name
    registers = ", ".join(f"r{i}" for i in range(count))
    variant = f"x{count}" + ".trans" * trans
    simulate.__doc__ = (
        f"``{name}(array, index, {registers})``, ``stmatrix.sync.aligned.m8n8.{variant}.shared.b16``: "
        f"store {count} matrices."
    )
    template = (
        f"stmatrix.sync.aligned.m8n8.{variant}.shared.b16 [$0], {{{', '.join(f'${1 + i}' for i in range(count))}}};"
    )
    return instruction(template, "void", SHARED, *["u32"] * count, simulate=simulate)


stmatrix_x2, stmatrix_x2_trans = _stmatrix(2, False), _stmatrix(2, True)
stmatrix_x4, stmatrix_x4_trans = _stmatrix(4, False), _stmatrix(4, True)


@factory
def make_load_shared(n):
    """Make ``load(array, index)``: load the factors of a thread's n / 4 accumulator columns (``ld.shared.v4.f32``).

    They are contiguous from element ``index`` of a shared float32 array, 16-byte aligned. Returns a tuple of floats.
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
                factors += _load_factors(builder, data, i, n)
            return context.make_tuple(builder, sig.return_type, factors)

        return floats(array, types.int32), codegen

    return load_shared


def _shared_floats(context, builder, array_type, array, index):
    """Return a pointer to an element of a shared float32 array."""
    from llvmlite import ir

    data = context.make_array(array_type)(context, builder, value=array).data
    return builder.gep(builder.addrspacecast(data, ir.FloatType().as_pointer(3)), [index])


def _load_factors(builder, data, i, n):
    """Load up to four factors from the i-th on, in one instruction."""
    from llvmlite import ir

    width = min(4, n // 4 - i)
    vector = ir.VectorType(ir.FloatType(), width).as_pointer(3)
    address = builder.bitcast(builder.gep(data, [ir.Constant(ir.IntType(32), i)]), vector)
    loaded = builder.load(address, align=4 * width)
    return [builder.extract_element(loaded, ir.Constant(ir.IntType(32), k)) for k in range(width)]


@factory
def make_fma_shared(n):
    """Make ``fma(total, acc, array, index)``: ``total + acc * factor`` per column, loading each factor before its use.

    Equivalent to :func:`make_load_shared` followed by ``make_fma_columns``, but needs fewer registers for the factors.
    """

    def fma_shared(total, acc, array, index):
        return simulator.fragments.fma_columns(total, acc, make_load_shared(n)(array, index))

    return fma_shared if simulator.ENABLED else _fma_shared(n)


def _fma_shared(n):
    from numba import types
    from numba.cuda.extending import intrinsic

    floats = types.UniTuple(types.float32, n // 2)

    @intrinsic
    def fma_shared(typingctx, total, acc, array, index):
        def codegen(context, builder, sig, arguments):
            data, results = _shared_floats(context, builder, sig.args[2], *arguments[2:]), []
            for i in range(0, n // 4, 4):
                factors = _load_factors(builder, data, i, n)
                for r in range(2 * i, 2 * (i + len(factors))):  # d[4 j + 2 h + i] is in column 2 j + i
                    factor = factors[2 * (r // 4) + r % 2 - i]
                    acc, total = builder.extract_value(arguments[1], r), builder.extract_value(arguments[0], r)
                    results.append(builder.fma(acc, factor, total))
            return context.make_tuple(builder, sig.return_type, results)

        return floats(floats, floats, array, types.int32), codegen

    return fma_shared


def _store_chunk(template, simulate, with_factor=False):
    """Make ``store(array, offset, values)``, or with a float behind, for a tuple of floats of any length.

    The arguments of ``template`` are the number of floats and the names of the address and the last float.
    """
    from llvmlite import ir
    from numba import types

    def typing(array, _, values, *others):
        count = len(values)
        registers = [ir.FloatType()] * count + [ir.IntType(32)] + [ir.FloatType()] * with_factor
        text = f"{{ {template(count, f'${count}', f'${count + 1}')} }}"
        constraints = ",".join(["f"] * count + ["r"] + ["f"] * with_factor + ["~{memory}"])

        def codegen(context, builder, sig, arguments):
            data = context.make_array(sig.args[0])(context, builder, value=arguments[0]).data
            data = builder.addrspacecast(data, data.type.pointee.as_pointer(3))
            pointer = builder.ptrtoint(builder.gep(data, [arguments[1]]), ir.IntType(32))
            floats = [builder.extract_value(arguments[2], i) for i in range(count)]
            assembly = ir.InlineAsm(ir.FunctionType(ir.VoidType(), registers), text, constraints, side_effect=True)
            builder.call(assembly, [*floats, pointer, *arguments[3:]], attrs=("convergent",))
            return context.get_dummy_value()

        return types.void(array, types.int32, values, *[types.float32] * with_factor), codegen

    return make_intrinsic(simulate, 3 + with_factor, typing)


@factory
def make_stmatrix_columns(pitch):
    """Make ``store(array, offset, values, factor)``: store columns of a fragment as rows of bf16.

    ``values`` are a thread's accumulators of the columns, four of each eight. Each float times ``factor`` is rounded to
    bf16 (``cvt.rn.bf16x2``). ``stmatrix.x2.trans`` turns each column of a warp's 16 rows into an output row of 16
    elements, two 16-byte vectors. Lane l passes the byte ``offset`` in ``array`` (uint8, shared) of vector ``l // 8``
    of the output row of column ``l % 8``; output rows are ``pitch`` bytes apart.
    """

    def stmatrix_columns(array, offset, values, factor):
        for j in range(len(values) // 4):
            a, b, c, d = (np.float32(v * factor) for v in tuple(values)[4 * j : 4 * j + 4])
            stmatrix_x2_trans(array, offset + 8 * j * pitch, cvt_rn_bf16x2_f32(b, a), cvt_rn_bf16x2_f32(d, c))

    def template(count, address, factor):
        lines = [".reg .b32 a, b; .reg .f32 x, y;"]
        for j in range(count // 4):
            for register, i in (("a", 4 * j), ("b", 4 * j + 2)):
                lines.append(f"mul.f32 x, ${i}, {factor}; mul.f32 y, ${i + 1}, {factor};")
                lines.append(f"cvt.rn.bf16x2.f32 {register}, y, x;")
            lines.append(f"stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [{address}+{8 * j * pitch}], {{a, b}};")
        return " ".join(lines)

    return stmatrix_columns if simulator.ENABLED else _store_chunk(template, stmatrix_columns, with_factor=True)


def _stmatrix_rows():
    def stmatrix_rows(array, offset, values):
        """``stmatrix_rows(array, offset, values)``: store 16 columns for 8 values as rows of bf16.

        Of 64 columns, a warp's 16 rows become rows of 128 bytes, whose 16-byte vectors are XORed with the row number,
        so that the eight rows of a matrix fall into different banks. Lane l passes the byte ``offset`` in ``array``
        (uint8, shared) of vector ``l // 16`` of row ``l % 16``, with the XOR; the rows begin at a multiple of 1024
        bytes.
        """
        for j in range(len(values) // 8):
            part = tuple(values)[8 * j : 8 * j + 8]
            pairs = [cvt_rn_bf16x2_f32(part[i + 1], part[i]) for i in range(0, 8, 2)]
            stmatrix_x4(array, offset ^ (32 * j), *pairs)

    def template(count, address, _):
        lines = [".reg .b32 a, b, c, d, t;"]
        for j in range(count // 8):
            for i, register in enumerate("abcd"):
                lines.append(f"cvt.rn.bf16x2.f32 {register}, ${8 * j + 2 * i + 1}, ${8 * j + 2 * i};")
            lines.append(
                f"xor.b32 t, {address}, {32 * j}; stmatrix.sync.aligned.m8n8.x4.shared.b16 [t], {{a, b, c, d}};"
            )
        return " ".join(lines)

    return stmatrix_rows if simulator.ENABLED else _store_chunk(template, stmatrix_rows)


def _st_shared_rows_f32():
    def st_shared_rows_f32(array, offset, values):
        """``st_shared_rows_f32(array, offset, values)``: store 8 columns for 4 values as rows of float32.

        The rows are those of ``stmatrix_rows``, of 32 columns: a warp's 16 rows of 128 bytes, whose 16-byte vectors are
        XORed with the row number. The instruction is ``st.shared.v2.f32``. Lane l passes the byte ``offset`` in
        ``array`` (uint8, shared) of its two first columns, ``2 * (l % 4)``, in row ``l // 4``, with the XOR.
        """
        for j in range(len(values) // 4):
            for h in range(2):
                i = 4 * j + 2 * h
                array.pointer().store_vector((offset ^ (32 * j)) + 1024 * h, (values[i], values[i + 1]), np.float32)

    def template(count, address, _):
        lines = [".reg .b32 t;"]
        for j in range(count // 4):
            lines.append(f"xor.b32 t, {address}, {32 * j};")
            for h in range(2):
                i = 4 * j + 2 * h
                lines.append(f"st.shared.v2.f32 [t+{1024 * h}], {{${i}, ${i + 1}}};")
        return " ".join(lines)

    return st_shared_rows_f32 if simulator.ENABLED else _store_chunk(template, st_shared_rows_f32)


stmatrix_rows, st_shared_rows_f32 = _stmatrix_rows(), _st_shared_rows_f32()
