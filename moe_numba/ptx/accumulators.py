"""Arithmetic on a wgmma's accumulators, the n / 2 floats of a fragment (see ``moe_numba.ptx.wgmma``), in registers.

The FP8 tensor cores add up in fewer bits than float32 has: every few steps a kernel takes what they have, scales it and
adds it to a total of its own. A thread's results lie in n / 4 columns, ``8 j + 2 (l % 4) + i``, and in two rows.
"""

from functools import cache

from moe_numba import simulator
from moe_numba.ptx.intrinsic import SHARED, instruction
from moe_numba.ptx.registers import arithmetic


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
