"""Kernel of ``silu_and_mul``: each thread computes eight adjacent columns of a row, with 16-byte loads and stores."""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import ALPHA
from moe_numba.ptx.arithmetic import LOG2_E, ex2_approx, rcp_approx, uint_as_float
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4

THREADS = 128
VECTOR = 8  # columns of a thread


@cuda.jit(device=True)
def low_half(word):
    """Return the first of two bfloat16 as a float32."""
    return uint_as_float(uint32(word << uint32(16)))


@cuda.jit(device=True)
def high_half(word):
    """Return the second of two bfloat16 as a float32."""
    return uint_as_float(uint32(word & uint32(0xFFFF0000)))


@cuda.jit(device=True)
def silu_and_mul_f32(gate, up):
    """Return silu(gate) * up. Below about -87 silu(gate) becomes zero, because the reciprocal flushes subnormals."""
    return gate * rcp_approx(float32(1) + ex2_approx(gate * float32(-LOG2_E))) * up


@cache
def make_activation(activation, alpha, limit):
    """Make ``activate(gate, up)`` of two float32: "silu", whose ``limit`` may be None, or "swigluoai"."""
    if activation == "silu" and limit is None:
        return silu_and_mul_f32
    most, least, scale = np.float32(limit), np.float32(-limit), np.float32(-LOG2_E * alpha)

    @cuda.jit(device=True)
    def clamped_silu_and_mul(gate, up):
        gate = most if gate > most else gate  # a comparison with NaN is false, so NaN remains
        up = most if up > most else up
        return silu_and_mul_f32(gate, least if up < least else up)

    @cuda.jit(device=True)
    def swigluoai_and_mul(gate, up):
        gate = most if gate > most else gate
        up = most if up > most else up
        up = least if up < least else up
        return gate * rcp_approx(float32(1) + ex2_approx(gate * scale)) * (up + float32(1))

    return clamped_silu_and_mul if activation == "silu" else swigluoai_and_mul


@cache
def make_load_activated(columns, activation, alpha, limit):
    """Make ``load_activated(x, row, column, results, first)``: eight results of a row, from ``column`` on.

    Rows of x have twice as many columns: first those of gate, or with "swigluoai" those of gate and up alternately.
    """
    activate, interleaved = make_activation(activation, alpha, limit), activation == "swigluoai"

    @cuda.jit(device=True)
    def load_interleaved(x, row, column, results, first):
        offset = int64(row) * (2 * columns) + 2 * column
        pairs = load_nc_u32x4(x, offset), load_nc_u32x4(x, offset + VECTOR)
        for i in range(4):
            a, b = uint32(pairs[0][i]), uint32(pairs[1][i])
            results[first + i] = activate(low_half(a), high_half(a))
            results[first + 4 + i] = activate(low_half(b), high_half(b))

    @cuda.jit(device=True)
    def load_stacked(x, row, column, results, first):
        offset = int64(row) * (2 * columns) + column
        gates, ups = load_nc_u32x4(x, offset), load_nc_u32x4(x, offset + columns)
        for i in range(4):
            gate, up = uint32(gates[i]), uint32(ups[i])
            results[first + 2 * i] = activate(low_half(gate), low_half(up))
            results[first + 2 * i + 1] = activate(high_half(gate), high_half(up))

    return load_interleaved if interleaved else load_stacked


@cache
def make_silu_and_mul_kernel(columns, has_valid_rows, activation="silu", alpha=ALPHA, limit=None):
    """Make the kernel for one number of result columns.

    ``has_valid_rows``: skip the rows from ``num_valid_rows`` on. The last arguments are for `make_activation`.
    """
    if columns < 1 or columns % VECTOR:
        raise ValueError(f"columns is {columns}; it must be a multiple of {VECTOR}")
    vectors_per_row, load_activated = columns // VECTOR, make_load_activated(columns, activation, alpha, limit)

    @cuda.jit
    def silu_and_mul(x, num_valid_rows, out, num_vectors):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        vector = uint32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        row = int32(vector // uint32(vectors_per_row))
        computed = vector < uint32(num_vectors)
        if has_valid_rows:
            computed = computed and row < num_valid_rows[0]
        if computed:
            column = int32(vector - uint32(row) * uint32(vectors_per_row)) * VECTOR
            results, words = cuda.local.array(VECTOR, float32), cuda.local.array(4, int32)
            load_activated(x, row, column, results, 0)
            for i in range(4):
                words[i] = int32(cvt_rn_bf16x2_f32(results[2 * i + 1], results[2 * i]))
            st_global_s32x4(out, int64(vector) * VECTOR, words[0], words[1], words[2], words[3])

    return silu_and_mul
