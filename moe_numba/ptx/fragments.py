"""Epilogue operations on wgmma fragments: values per row or column, activations, and stores of float32.

A thread's fragment of a 64 x n tile is a tuple: ``d[4 j + 2 h + i]`` is in row ``16 w + l / 4 + 8 h`` and column
``8 j + 2 (l % 4) + i``, for lane ``l`` of warp ``w``. A thread has n / 4 columns, ``2 j + i`` in order, of two rows.
``quarter`` is ``l % 4``.
"""

import numpy as np

from moe_numba import simulator
from moe_numba.ptx.accumulators import arithmetic, tuple_intrinsic
from moe_numba.ptx.arithmetic import ex2_approx, float_as_int, int_as_float, rcp_approx
from moe_numba.ptx.intrinsic import factory, make_intrinsic

LOG2_E = 1.4426950408889634
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


# Values per column, from global memory


@factory
def make_load_columns(n):
    """Make ``load(pointer, first, count, quarter)``: load a value for each of a thread's columns.

    That of column c is element ``first + min(c, count - 1)``; ``count`` is 1 or more. ``pointer`` is of float32 or
    int32.
    """

    def load_columns(pointer, first, count, quarter):
        values = ()
        for column in _columns(n):
            values += (pointer[first + min(column + 2 * quarter, count - 1)],)
        return values

    return load_columns if simulator.ENABLED else _load_columns(n)


def _load_columns(n):
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def load_columns(typingctx, pointer, first, count, quarter):
        def codegen(context, builder, sig, arguments):
            base, first, count, quarter = arguments
            base = builder.gep(_to_global(builder, base), [builder.sext(first, ir.IntType(64))])
            column, last = builder.shl(quarter, quarter.type(1)), builder.sub(count, count.type(1))
            values = []
            for c in _columns(n):
                index = builder.add(column, column.type(c))
                index = builder.select(builder.icmp_signed("<", index, last), index, last)
                values.append(builder.load(builder.gep(base, [builder.sext(index, ir.IntType(64))])))
            return context.make_tuple(builder, sig.return_type, values)

        return types.UniTuple(pointer.dtype, n // 4)(pointer, types.int32, types.int32, types.int32), codegen

    return load_columns


@factory
def make_gather_columns(n):
    """Make ``gather(pointer, indices, limit)``: load an element of float32 for each of a thread's columns.

    A column whose index is negative, or not below ``limit``, has 0. The array has at least one element.
    """

    def gather_columns(pointer, indices, limit):
        values = ()
        for k in range(n // 4):
            valid = (indices[k] >= 0) & (indices[k] < limit)
            value = pointer[indices[k] if valid else np.int32(0)]
            values += (value if valid else np.float32(0),)
        return values

    return gather_columns if simulator.ENABLED else _gather_columns(n)


def _gather_columns(n):
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def gather_columns(typingctx, pointer, indices, limit):
        def codegen(context, builder, sig, arguments):
            base, limit, values = _to_global(builder, arguments[0]), arguments[2], []
            for k in range(n // 4):
                index = builder.extract_value(arguments[1], k)
                valid = builder.icmp_unsigned("<", index, limit)
                index = builder.sext(builder.select(valid, index, index.type(0)), ir.IntType(64))
                value = builder.load(builder.gep(base, [index]))
                values.append(builder.select(valid, value, value.type(0.0)))
            return context.make_tuple(builder, sig.return_type, values)

        floats, integers = types.UniTuple(types.float32, n // 4), types.UniTuple(types.int32, n // 4)
        return floats(pointer, integers, types.int32), codegen

    return gather_columns


def _to_global(builder, pointer, element=None):
    """Return a pointer as one to global memory, so that accesses are not generic; ``element`` changes its type."""
    return builder.addrspacecast(
        pointer if element is None else builder.bitcast(pointer, element.as_pointer()),
        (element or pointer.type.pointee).as_pointer(1),
    )


# Rows of an output of float32: each column of a fragment is in one row of it


def _integers(count, result, emit, *, simulate):
    """Make a function of int32 tuples and integers; ``count`` is that of the first argument, None for an integer."""
    if simulator.ENABLED:
        return simulate
    from numba import types

    first = types.int32 if count is None else types.UniTuple(types.int32, count)
    arguments = [first, *[types.int32] * (simulate.__code__.co_argcount - 1)]
    return tuple_intrinsic(simulate, types.UniTuple(types.int32, result), arguments, emit)


@factory
def make_rows_of_columns(n):
    """Make ``rows(first, count, quarter)``: row ``first + c`` for column c, or -1 from column ``count`` on."""

    def rows_of_columns(first, count, quarter):
        rows = ()
        for column in _columns(n):
            c = column + 2 * quarter
            rows += (np.int32(first + c if c < count else -1),)
        return rows

    def emit(builder, values):
        first, count, quarter = values
        column, rows = builder.shl(quarter, quarter.type(1)), []
        for c in _columns(n):
            index = builder.add(column, column.type(c))
            inside = builder.icmp_signed("<", index, count)
            rows.append(builder.select(inside, builder.add(first, index), first.type(-1)))
        return rows

    return _integers(None, n // 4, emit, simulate=rows_of_columns)


@factory
def make_valid_rows(n):
    """Make ``rows(rows, count, quarter, limit)``: replace rows that are not in [0, limit) by -1.

    So are those from column ``count`` on.
    """

    def valid_rows(rows, count, quarter, limit):
        checked = ()
        for k, column in enumerate(_columns(n)):
            valid = (column + 2 * quarter < count) & (rows[k] >= 0) & (rows[k] < limit)
            checked += (np.int32(rows[k] if valid else -1),)
        return checked

    def emit(builder, values):
        rows, count, quarter, limit = values
        column, checked = builder.shl(quarter, quarter.type(1)), []
        for c, row in zip(_columns(n), rows):
            inside = builder.icmp_signed("<", builder.add(column, column.type(c)), count)
            inside = builder.and_(inside, builder.icmp_unsigned("<", row, limit))
            checked.append(builder.select(inside, row, row.type(-1)))
        return checked

    return _integers(n // 4, n // 4, emit, simulate=valid_rows)


@factory
def make_load_f32_rows(n):
    """Make ``load(pointer, rows, pitch, first)``: load a fragment from rows of float32, zeros for rows of -1.

    Element (r, c) is at ``pointer[r * pitch + first + c]``, of int32; ``first`` includes the thread's first row in the
    fragment, c is 0 or 8.
    """

    def load_f32_rows(pointer, rows, pitch, first):
        values = ()
        for j in range(0, n // 4, 2):
            for step in range(0, 2 * ROW_STEP, ROW_STEP):
                for row in rows[j : j + 2]:
                    index = np.int64(row) * pitch + first + step
                    values += (int_as_float(pointer[index]) if row >= 0 else np.float32(0),)
        return values

    return load_f32_rows if simulator.ENABLED else _access_rows(n, load_f32_rows)


@factory
def make_store_f32_rows(n):
    """Make ``store(pointer, rows, pitch, first, values)``: store a fragment as rows of float32, skipping rows of -1.

    Eight lanes store 32 consecutive bytes. Addresses are as for :func:`make_load_f32_rows`.
    """

    def store_f32_rows(pointer, rows, pitch, first, values):
        for k in range(n // 4):
            for h in range(2):
                if rows[k] >= 0:
                    index = np.int64(rows[k]) * pitch + first + ROW_STEP * h
                    pointer[index] = float_as_int(values[4 * (k // 2) + 2 * h + k % 2])

    return store_f32_rows if simulator.ENABLED else _access_rows(n, store_f32_rows)


def _access_rows(n, simulate):
    """Make the intrinsic of :func:`make_load_f32_rows` or, with a fifth argument, :func:`make_store_f32_rows`."""
    from llvmlite import ir
    from numba import types

    stores, single, second = simulate.__code__.co_argcount == 5, ir.FloatType(), 4 * ROW_STEP
    if stores:
        text = (
            f"{{ .reg .pred p; setp.ge.s32 p, $0, 0; @p st.global.f32 [$1], $2; @p st.global.f32 [$1+{second}], $3; }}"
        )
        function, constraints = (
            ir.FunctionType(ir.VoidType(), [ir.IntType(32), ir.IntType(64), single, single]),
            "r,l,f,f",
        )
    else:
        text = (
            "{ .reg .pred p; setp.ge.s32 p, $2, 0; mov.f32 $0, 0f00000000; mov.f32 $1, 0f00000000; "
            f"@p ld.global.f32 $0, [$3]; @p ld.global.f32 $1, [$3+{second}]; }}"
        )
        pair = ir.LiteralStructType([single, single])
        function, constraints = ir.FunctionType(pair, [ir.IntType(32), ir.IntType(64)]), "=&f,=&f,r,l"
    assembly = ir.InlineAsm(function, text, constraints + ",~{memory}", side_effect=True)

    def codegen(context, builder, sig, arguments):
        pointer, rows, pitch, first = arguments[:4]
        base = builder.gep(_to_global(builder, pointer, single), [builder.sext(first, ir.IntType(64))])
        pitch, loaded = builder.sext(pitch, ir.IntType(64)), [None] * (n // 2)
        for k in range(n // 4):
            row, at = builder.extract_value(rows, k), 4 * (k // 2) + k % 2
            offset = builder.mul(builder.sext(row, ir.IntType(64)), pitch)
            address = builder.ptrtoint(builder.gep(base, [offset]), ir.IntType(64))
            if stores:
                values = [builder.extract_value(arguments[4], i) for i in (at, at + 2)]
                builder.call(assembly, [row, address, *values])
            else:
                values = builder.call(assembly, [row, address])
                loaded[at], loaded[at + 2] = (builder.extract_value(values, i) for i in range(2))
        return context.get_dummy_value() if stores else context.make_tuple(builder, sig.return_type, loaded)

    rows, floats = types.UniTuple(types.int32, n // 4), types.UniTuple(types.float32, n // 2)

    def typing(pointer, *_):
        arguments = pointer, rows, types.int32, types.int32
        signature = types.void(*arguments, floats) if stores else floats(*arguments)
        return signature, codegen

    return make_intrinsic(simulate, 5 if stores else 4, typing)
