"""Epilogue operations on wgmma fragments: values per row or column, activations, and stores of float32.

A thread's fragment of a 64 x n tile is a tuple: ``d[4 j + 2 h + i]`` is in row ``16 w + l / 4 + 8 h`` and column
``8 j + 2 (l % 4) + i``, for lane ``l`` of warp ``w``. A thread has n / 4 columns, ``2 j + i`` in order, of two rows.
``quarter`` is ``l % 4``.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.accumulators import arithmetic
from moe_numba.ptx.arithmetic import LOG2_E, ex2_approx, float_as_int, int_as_float, rcp_approx
from moe_numba.ptx.intrinsic import factory, make_intrinsic

ROW_STEP = 8  # from a thread's first row to its second


def _columns(n):
    """Return the columns of a thread with quarter 0."""
    return [j + i for j in range(0, n, 8) for i in range(2)]


@factory
def make_broadcast_rows(n):
    """Make ``broadcast(first, second)``: a fragment whose columns are equal, with one float for each of the rows."""

    def broadcast_rows(first, second):
        return (first, first, second, second) * (n // 8)

    def emit(builder, first, second):
        return [first, first, second, second] * (n // 8)

    return arithmetic((None, None), n // 2, emit, simulate=broadcast_rows)


@factory
def make_select_rows(n, second):
    """Make ``select(acc)``: the n / 4 accumulators of a thread's first row, or of its ``second``, by columns."""
    index = [4 * j + 2 * second + i for j in range(n // 8) for i in range(2)]

    def select_rows(acc):
        values = ()
        for k in index:
            values += (acc[k],)
        return values

    return arithmetic((n // 2,), n // 4, lambda _, acc: [acc[k] for k in index], simulate=select_rows)


@factory
def make_silu_and_mul(n):
    """Make ``activate(gate, up)``: ``silu(gate) * up`` per element of two fragments."""

    def silu_and_mul(gate, up):
        results = ()
        for k in range(n // 2):
            sigmoid = rcp_approx(np.float32(1) + ex2_approx(gate[k] * np.float32(-LOG2_E)))
            results += (gate[k] * sigmoid * up[k],)
        return results

    def emit(builder, gates, ups):
        return [builder.fmul(builder.fmul(g, _sigmoid(builder, g, 1.0)), u) for g, u in zip(gates, ups)]

    return arithmetic((n // 2, n // 2), n // 2, emit, simulate=silu_and_mul)


@factory
def make_swigluoai(n, alpha, limit):
    """Make ``activate(gate, up)``: ``(up + 1) * gate * sigmoid(alpha * gate)`` per element of two fragments.

    Before, gate is limited to at most ``limit``, and up to between ``-limit`` and ``limit``.
    """

    def swigluoai(gate, up):
        results = ()
        for k in range(n // 2):
            g = np.float32(limit) if gate[k] > np.float32(limit) else gate[k]
            u = np.float32(limit) if up[k] > np.float32(limit) else up[k]
            u = np.float32(-limit) if u < np.float32(-limit) else u
            sigmoid = rcp_approx(np.float32(1) + ex2_approx(g * np.float32(-LOG2_E * alpha)))
            results += (g * sigmoid * (u + np.float32(1)),)
        return results

    def emit(builder, gates, ups):
        results = []
        for g, u in zip(gates, ups):
            most, least, one = (g.type(float(np.float32(value))) for value in (limit, -limit, 1))
            g = builder.select(builder.fcmp_ordered(">", g, most), most, g)
            u = builder.select(builder.fcmp_ordered(">", u, most), most, u)
            u = builder.select(builder.fcmp_ordered("<", u, least), least, u)
            results.append(builder.fmul(builder.fmul(g, _sigmoid(builder, g, alpha)), builder.fadd(u, one)))
        return results

    return arithmetic((n // 2, n // 2), n // 2, emit, simulate=swigluoai)


def _sigmoid(builder, x, alpha):
    """Emit ``1 / (1 + exp(-alpha * x))`` by ``ex2.approx`` and ``rcp.approx``."""
    from llvmlite import ir

    function = ir.FunctionType(x.type, [x.type])
    exponential = ir.InlineAsm(function, "ex2.approx.ftz.f32 $0, $1;", "=f,f")
    reciprocal = ir.InlineAsm(function, "rcp.approx.ftz.f32 $0, $1;", "=f,f")
    scaled = builder.fmul(x, x.type(float(np.float32(-LOG2_E * alpha))))
    return builder.call(reciprocal, [builder.fadd(x.type(1.0), builder.call(exponential, [scaled]))])


# Stores of float32: each column of a fragment is a row of the output. Each store computes its address in its own
# assembly: the compiler would otherwise keep the addresses of all columns in registers.


def _address(builder, pointer, index=None):
    """Return the address in global memory of an element."""
    from llvmlite import ir

    pointer = builder.addrspacecast(pointer, pointer.type.pointee.as_pointer(1))
    if index is not None:
        pointer = builder.gep(pointer, [builder.sext(index, ir.IntType(64))])
    return builder.ptrtoint(pointer, ir.IntType(64))


@factory
def make_store_columns(n, accumulate):
    """Make ``store(pointer, first, count, quarter, pitch, element, values)``: store a fragment as rows of float32.

    Column c is stored to row ``first + c`` if c is below ``count``, at ``pointer[row * pitch + element]`` of int32 and
    8 elements behind it: ``element`` includes the thread's first row in the fragment. Eight lanes store 32 consecutive
    bytes. ``pitch`` is below 2**29. With ``accumulate`` each element is added to memory by ``red.global.add.f32``: the
    L2 cache adds, and no thread waits for what memory holds. It takes subnormal numbers as zeros.
    """

    def store_columns(pointer, first, count, quarter, pitch, element, values):
        for k, column in enumerate(_columns(n)):
            c = column + 2 * quarter
            for h in range(2):
                if c < count:
                    index = np.int64(first + c) * pitch + element + ROW_STEP * h
                    value = values[4 * (k // 2) + 2 * h + k % 2]
                    pointer[index] = float_as_int(int_as_float(pointer[index]) + value if accumulate else value)

    return store_columns if simulator.ENABLED else _store(n, accumulate, store_columns)


@factory
def make_scatter_columns(n, accumulate):
    """Make ``store(pointer, rows, index, pitch, element, values)``, as :func:`make_store_columns`.

    The rows are in ``rows``, a shared array of int32: that of the thread's k-th column is element ``index + k``. Of a
    negative row nothing is stored.
    """

    def scatter_columns(pointer, rows, index, pitch, element, values):
        for k in range(n // 4):
            row = rows[index + k]
            for h in range(2):
                if row >= 0:
                    at = np.int64(row) * pitch + element + ROW_STEP * h
                    value = values[4 * (k // 2) + 2 * h + k % 2]
                    pointer[at] = float_as_int(int_as_float(pointer[at]) + value if accumulate else value)

    return scatter_columns if simulator.ENABLED else _store(n, accumulate, scatter_columns)


def _store(n, accumulate, simulate):
    """Make the intrinsic of :func:`make_store_columns` or :func:`make_scatter_columns`."""
    from llvmlite import ir
    from numba import types

    scatters, second, integer = simulate.__name__ == "scatter_columns", 4 * ROW_STEP, types.int32
    opcode = "red.global.add.f32" if accumulate else "st.global.f32"
    # Operands: address, pitch in bytes, two values; then 2 * quarter, count and first row, or the address of the rows.
    find = "add.s32 t, $4, {c}; setp.lt.s32 p, t, $5; add.s32 t, t, $6;"
    if scatters:
        find = "ld.shared.s32 t, [$4+{offset}]; setp.ge.s32 p, t, 0;"
    store = f"mad.wide.s32 a, t, $1, $0; @p {opcode} [a], $2; @p {opcode} [a+{second}], $3; }}"
    constraints = f"l,r,f,f,{'r' if scatters else 'r,r,r'},~{{memory}}"

    def codegen(context, builder, sig, arguments):
        pointer, *rows, pitch, element, values = arguments
        base, pitch = _address(builder, pointer, element), builder.shl(pitch, pitch.type(2))
        if scatters:
            data = context.make_array(sig.args[1])(context, builder, value=rows[0]).data
            data = builder.addrspacecast(data, data.type.pointee.as_pointer(3))
            rows = [builder.ptrtoint(builder.gep(data, [rows[1]]), ir.IntType(32))]
        else:
            first, count, quarter = rows
            rows = [builder.shl(quarter, quarter.type(1)), count, first]
        for k, c in enumerate(_columns(n)):
            pair = [builder.extract_value(values, 4 * (k // 2) + k % 2 + i) for i in (0, 2)]
            text = "{ .reg .pred p; .reg .s32 t; .reg .b64 a; " + find.format(c=c, offset=4 * k) + " " + store
            function = ir.FunctionType(ir.VoidType(), [v.type for v in (base, pitch, *pair, *rows)])
            assembly = ir.InlineAsm(function, text, constraints, side_effect=True)
            builder.call(assembly, [base, pitch, *pair, *rows])
        return context.get_dummy_value()

    floats = types.UniTuple(types.float32, n // 2)

    def typing(pointer, rows, *_):
        where = (rows, integer) if scatters else (integer, integer, integer)
        return types.void(pointer, *where, integer, integer, floats), codegen

    return make_intrinsic(simulate, 6 if scatters else 7, typing)
