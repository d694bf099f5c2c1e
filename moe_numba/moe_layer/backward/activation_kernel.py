"""Kernel of ``silu_and_mul_backward``: a CTA computes the gradients of an assignment of a token to an expert."""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from moe_numba.moe_layer.silu_and_mul.kernel import VECTOR, high_half, low_half
from moe_numba.ptx.arithmetic import LOG2_E, ex2_approx, rcp_approx
from moe_numba.ptx.conversions import cvt_rn_bf16x2_f32
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, load_nc_u32x4, st_global_s32x4
from moe_numba.ptx.warp import FULL_MASK

THREADS, WARPS, PAIRS = 128, 4, 2 * VECTOR


@cache
def make_derivatives(activation, alpha, limit):
    """Make ``result, by_gate, by_up = derivatives(gate, up)`` of two float32; see ``make_activation``.

    Where gate or up is clamped, its derivative is zero.
    """
    scale = np.float32(-LOG2_E * (alpha if activation == "swigluoai" else 1.0))
    slope, shift = np.float32(alpha if activation == "swigluoai" else 1.0), np.float32(activation == "swigluoai")
    most, least = (np.float32(0),) * 2 if limit is None else (np.float32(limit), np.float32(-limit))
    clamps = limit is not None

    @cuda.jit(device=True)
    def derivatives(gate, up):
        free_gate, free_up = True, True
        if clamps:  # comparisons with NaN are false, so NaN remains
            free_gate, free_up = not gate > most, not (up > most or up < least)
            gate = gate if free_gate else most
            up = most if up > most else up
            up = least if up < least else up
        up = up + shift
        sigmoid = rcp_approx(float32(1) + ex2_approx(gate * scale))
        silu = gate * sigmoid
        by_gate = up * sigmoid * (float32(1) + slope * (gate - silu))
        return silu * up, by_gate if free_gate else float32(0), silu if free_up else float32(0)

    return derivatives


@cache
def make_access(columns, interleaved):
    """Make ``load(x, row, column, gates, ups)`` and ``store(x, row, column, gates, ups)`` of eight gates and ups.

    Rows of x have those of ``columns`` columns: first all gates, or, if ``interleaved``, gates and ups alternately.
    """

    @cuda.jit(device=True)
    def load(x, row, column, gates, ups):
        if interleaved:
            at = int64(row) * (2 * columns) + 2 * column
            a, b = load_nc_u32x4(x, at), load_nc_u32x4(x, at + VECTOR)
            for i in range(4):
                gates[i], ups[i] = low_half(uint32(a[i])), high_half(uint32(a[i]))
                gates[4 + i], ups[4 + i] = low_half(uint32(b[i])), high_half(uint32(b[i]))
        else:
            at = int64(row) * (2 * columns) + column
            unpack(load_nc_u32x4(x, at), gates)
            unpack(load_nc_u32x4(x, at + columns), ups)

    @cuda.jit(device=True)
    def store(x, row, column, gates, ups):
        if interleaved:
            at = int64(row) * (2 * columns) + 2 * column
            pairs = cuda.local.array(PAIRS, float32)
            for i in range(VECTOR):
                pairs[2 * i], pairs[2 * i + 1] = gates[i], ups[i]
            store_eight(x, at, pairs, 0)
            store_eight(x, at + VECTOR, pairs, VECTOR)
        else:
            at = int64(row) * (2 * columns) + column
            store_eight(x, at, gates, 0)
            store_eight(x, at + columns, ups, 0)

    return load, store


@cuda.jit(device=True)
def unpack(words, values):
    """Store the eight bfloat16 of four words as float32."""
    for i in range(4):
        values[2 * i], values[2 * i + 1] = low_half(uint32(words[i])), high_half(uint32(words[i]))


@cuda.jit(device=True)
def store_eight(out, at, values, first):
    """Store eight values, from ``first`` on, as bfloat16."""
    words = cuda.local.array(4, int32)
    for i in range(4):
        words[i] = int32(cvt_rn_bf16x2_f32(values[first + 2 * i + 1], values[first + 2 * i]))
    st_global_s32x4(out, at, words[0], words[1], words[2], words[3])


@cache
def make_kernel(columns, activation, alpha, limit, has_halves, has_bias):
    """Make the kernel for a number of columns of the activation's result.

    ``has_halves`` is whether rows of ``gate_up`` have first all gates; else they are in the activation's order. A
    kernel with ``has_bias`` has six parameters more: it adds an expert's element of ``products``.
    """
    derivatives, interleaved = make_derivatives(activation, alpha, limit), activation == "swigluoai"
    load, (_, store) = make_access(columns, interleaved and not has_halves)[0], make_access(columns, interleaved)
    vectors = columns // VECTOR

    @cuda.jit(device=True)
    def differentiate(gate_up, grad, row, weight, grad_gate_up, weighted, num_rows):
        """Store the gradients of a row, if it exists; return the sum of ``grad * a``, which all threads have."""
        thread, total = int32(cuda.threadIdx.x), float32(0)
        gates, ups = cuda.local.array(VECTOR, float32), cuda.local.array(VECTOR, float32)
        grads = cuda.local.array(VECTOR, float32)
        if 0 <= row and row < num_rows:
            for vector in range(thread, vectors, THREADS):
                column = int32(vector * VECTOR)
                at = int64(row) * columns + column
                load(gate_up, row, column, gates, ups)
                unpack(load_nc_u32x4(grad, at), grads)
                for i in range(VECTOR):
                    result, by_gate, by_up = derivatives(gates[i], ups[i])
                    total += grads[i] * result
                    gates[i], ups[i] = weight * grads[i] * by_gate, weight * grads[i] * by_up
                    grads[i] = weight * result
                store(grad_gate_up, row, column, gates, ups)
                store_eight(weighted, at, grads, 0)
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_xor_sync(FULL_MASK, total, step)
        sums = cuda.shared.array(WARPS, float32)
        if thread & 31 == 0:
            sums[thread >> 5] = total
        cuda.syncthreads()
        return sums[0] + sums[1] + sums[2] + sums[3]

    @cuda.jit
    def silu_and_mul_backward(
        gate_up, grad, inverse_indices, topk_weights, grad_gate_up, weighted, grad_weights, num_rows
    ):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        assignment = int64(cuda.blockIdx.x)
        row, weight = inverse_indices[assignment], topk_weights[assignment]
        total = differentiate(gate_up, grad, row, weight, grad_gate_up, weighted, num_rows)
        if cuda.threadIdx.x == 0:
            grad_weights[assignment] = total

    @cuda.jit
    def silu_and_mul_backward_with_bias(
        gate_up,
        grad,
        inverse_indices,
        topk_weights,
        grad_gate_up,
        weighted,
        grad_weights,
        num_rows,
        topk_ids,
        products,
        topk,
        num_experts,
        token_stride,
        choice_stride,
    ):
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        assignment = int64(cuda.blockIdx.x)
        row, weight = inverse_indices[assignment], topk_weights[assignment]
        total = differentiate(gate_up, grad, row, weight, grad_gate_up, weighted, num_rows)
        if cuda.threadIdx.x == 0:
            if row >= 0:
                token = assignment // topk
                choice = assignment - token * topk
                expert = topk_ids[token * token_stride + choice * choice_stride]
                total += products[token * num_experts + expert]
            grad_weights[assignment] = total

    return silu_and_mul_backward_with_bias if has_bias else silu_and_mul_backward
