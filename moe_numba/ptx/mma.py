"""``mma.sync``: matrix multiply-accumulate by one warp, with operands in registers; and ``ldmatrix``, which loads them.

One ``mma.sync.m16n8`` adds A B^T to a 16 x 8 tile of float32, from 16 rows of A and 8 rows of B, 32 bytes of k each
(the elements of a row are contiguous: ``row.col``). With ``g = lane // 4`` and ``c = lane % 4`` a lane holds

- of A four registers: ``a[2 h + r]`` is bytes ``16 h + 4 c`` to ``16 h + 4 c + 3`` of row ``g + 8 r``;
- of B two registers: ``b[h]`` is the same bytes of row ``g``;
- of D four floats: ``d[2 r + i]`` is row ``g + 8 r``, column ``2 c + i``.

``ldmatrix`` loads 8 x 8 matrices of 16-bit elements: lane ``8 i + r`` addresses row ``r`` of matrix ``i``, 16 bytes,
and every lane receives the bytes ``4 c`` to ``4 c + 3`` of row ``g`` of each matrix. All lanes of the warp must execute
these instructions.
"""

from moe_numba import simulator
from moe_numba.ptx.accumulators import tuple_intrinsic
from moe_numba.ptx.intrinsic import factory, make_intrinsic, simulated

# PTX types of A and B, and elements of k per instruction.
_TYPES = {"bf16": ("bf16", 16), "f16": ("f16", 16), "e4m3": ("e4m3", 32)}


@factory
def make_ldmatrix_x4(offsets=(0,)):
    """Make ``load(array, index)``, ``ldmatrix.sync.aligned.m8n8.x4.shared.b16``, once for each offset.

    Each lane passes a row of 16 bytes, 16-byte aligned, by a shared uint8 array and the index of its first byte;
    ``offsets`` are added to it. Returns a tuple of ``4 * len(offsets)`` uint32 registers.
    """

    def ldmatrix_x4(array, index):
        return simulator.matrix.load(array, index, 4, offsets)

    return ldmatrix_x4 if simulator.ENABLED else _ldmatrix(ldmatrix_x4, offsets)


def _ldmatrix(simulate, offsets):
    from llvmlite import ir
    from numba import types

    word = ir.IntType(32)
    function = ir.FunctionType(ir.LiteralStructType([word] * 4), [word])

    def typing(array, index):
        def codegen(context, builder, sig, arguments):
            data = context.make_array(sig.args[0])(context, builder, value=arguments[0]).data
            data = builder.addrspacecast(data, data.type.pointee.as_pointer(3))
            address, registers = builder.ptrtoint(builder.gep(data, [arguments[1]]), word), []
            for offset in offsets:  # the offset is part of the instruction, so one address serves all of them
                text = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{offset}];"
                assembly = ir.InlineAsm(function, text, "=r,=r,=r,=r,r,~{memory}", side_effect=True)
                loaded = builder.call(assembly, [address], attrs=("convergent",))
                registers += [builder.extract_value(loaded, i) for i in range(4)]
            return context.make_tuple(builder, sig.return_type, registers)

        return types.UniTuple(types.uint32, 4 * len(offsets))(array, types.int32), codegen

    return make_intrinsic(simulate, 2, typing)


@factory
def make_mma(dtype, m=16, n=8, accumulate=True):
    """Make ``d = mma(d, a, b)``, ``mma.sync.aligned.m16n8``, once for each 16 x 8 part of an m x n tile.

    ``dtype`` is ``"bf16"`` or ``"f16"`` (``m16n8k16``) or ``"e4m3"`` (``m16n8k32``). ``d`` has the four floats of part
    (i, j) from element ``4 * (i * n // 8 + j)`` on, ``a`` the registers of its rows from ``4 * i`` on, and ``b`` those
    of its columns from ``2 * j`` on. Without ``accumulate`` it is ``mma(a, b)``, and ``d`` starts from zero.
    """
    if dtype not in _TYPES or m % 16 or n % 8:
        raise ValueError(f"mma takes dtype bf16, f16 or e4m3, m of 16 and n of 8, not {dtype}, m {m}, n {n}")

    def mma(*arguments):
        """``mma.sync``: multiply and add."""
        d, a, b = arguments if accumulate else (None, *arguments)
        return simulator.matrix.multiply(dtype, m, n, d, a, b)

    name, k = _TYPES[dtype]
    text = (
        f"mma.sync.aligned.m16n8k{k}.row.col.f32.{name}.{name}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )
    return simulated(mma, text) if simulator.ENABLED else _mma(mma, text, m, n, accumulate)


def _mma(simulate, text, m, n, accumulate):
    from llvmlite import ir
    from numba import types

    constraints = ",".join(["=f"] * 4 + ["r"] * 6 + ["0", "1", "2", "3"])
    real, word = ir.FloatType(), ir.IntType(32)
    function = ir.FunctionType(ir.LiteralStructType([real] * 4), [word] * 6 + [real] * 4)
    # Its results depend on its operands alone, so the compiler may move it. Neighbours share a register of A or B.
    parts = [(i, j if i % 2 == 0 else n // 8 - 1 - j) for i in range(m // 16) for j in range(n // 8)]
    zeros = [ir.Constant(real, 0.0)] * (m * n // 32)

    def emit(builder, values):
        d, a, b = values if accumulate else (zeros, *values)
        results = [None] * len(d)
        for i, j in parts:
            first = 4 * (i * (n // 8) + j)
            assembly = ir.InlineAsm(function, text, constraints)
            operands = [*a[4 * i : 4 * i + 4], *b[2 * j : 2 * j + 2], *d[first : first + 4]]
            out = builder.call(assembly, operands, attrs=("convergent",))
            results[first : first + 4] = [builder.extract_value(out, r) for r in range(4)]
        return results

    floats = types.UniTuple(types.float32, m * n // 32)
    a, b = types.UniTuple(types.uint32, m // 4), types.UniTuple(types.uint32, n // 4)
    return tuple_intrinsic(simulate, floats, [floats] * accumulate + [a, b], emit)


@factory
def make_fma_rows(m, n, halves=1):
    """Make ``fma(total, d, factors)``: ``total + d * factor`` for an m x n tile, with one factor per row.

    A lane's rows are ``16 i + 8 r + g``; their factors are ``factors[2 i + r]``. With ``halves`` 2 the columns from
    ``n // 2`` on have factors of their own, the second half of ``factors``.
    """
    rows, columns = m // 8, n // 8
    index = [
        2 * (e // (4 * columns)) + e // 2 % 2 + rows * (halves * (e // 4 % columns) // columns)
        for e in range(m * n // 32)
    ]

    def fma_rows(total, d, factors):
        return simulator.fragments.fma(total, d, [factors[i] for i in index])

    if simulator.ENABLED:
        return fma_rows
    from numba import types

    def emit(builder, values):
        total, d, factors = values
        return [builder.fma(d[e], factors[i], total[e]) for e, i in enumerate(index)]

    floats = types.UniTuple(types.float32, len(index))
    return tuple_intrinsic(fma_rows, floats, [floats, floats, types.UniTuple(types.float32, rows * halves)], emit)


@factory
def make_e4m3_as_f16(count, odd):
    """Make ``convert(registers)``: convert two of the four e4m3 of each of ``count`` registers to two float16.

    They are bytes 1 and 3 if ``odd``, and else 0 and 2. A result is 2**-8 times the number, because e4m3 has 4 bits of
    exponent and float16 has 5: the bits need only be shifted. A NaN stays a NaN. Multiplying the odd elements and the
    even ones by ``mma.sync`` of A and B alike covers all of k.
    """

    def e4m3_as_f16(registers):
        return simulator.matrix.e4m3_as_f16(registers, odd)

    if simulator.ENABLED:
        return e4m3_as_f16
    from llvmlite import ir
    from numba import types

    def emit(builder, values):
        constant = lambda value: ir.Constant(ir.IntType(32), value)
        results = []
        for register in values[0]:
            word = register if odd else builder.shl(register, constant(8))
            sign = builder.and_(word, constant(0x80008000))
            bits = builder.and_(builder.lshr(word, constant(1)), constant(0x3F803F80))
            # Only a NaN, all ones, carries into the highest bit of the exponent.
            carry = builder.and_(builder.add(bits, constant(0x00800080)), constant(0x40004000))
            results.append(builder.or_(builder.or_(bits, carry), sign))
        return results

    words = types.UniTuple(types.uint32, count)
    return tuple_intrinsic(e4m3_as_f16, words, [words], emit)
