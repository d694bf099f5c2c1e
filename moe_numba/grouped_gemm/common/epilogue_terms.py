"""Arithmetic of the epilogue in registers: scales, bias, activation and row weights of a thread's accumulators.

An accumulator belongs to a row of weight, a column of y, and to a row of x. A thread has two rows of weight, and loads
their terms before the main loop, which hides the latency. Values of the rows of x come through shared memory.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint32

from moe_numba.grouped_gemm.common.constants import CONSUMER_WARPS
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.fragments import ROW_STEP, make_broadcast_rows, make_silu_and_mul, make_swigluoai
from moe_numba.ptx.matrix import make_fma_shared
from moe_numba.ptx.memory import load_nc_u16, load_nc_u32x1
from moe_numba.ptx.warpgroup import bar_sync

ALL_CONSUMERS = 1  # named barrier of both consumer warpgroups; each warpgroup's own is 2 + warpgroup


class EpilogueInputs(NamedTuple):
    """What the epilogue reads from global memory, apart from y."""

    x_scale: Any  # float32 pointer, one per row of x
    weight_scale: Any  # float32 pointer, one per row of weight, or one per group
    bias: Any  # uint16 pointer to bfloat16 or float32, one per row of weight
    row_weights: Any  # float32 pointer, one per row of the product
    row_indices: Any  # int32 pointer: rows of x, with ``gather``
    x_rows: Any
    scatter_indices: Any  # int32 pointer: rows of y, with ``scatter``
    y_rows: Any


class RowTerms(NamedTuple):
    """Scales and biases of a thread's two rows of weight."""

    scale_0: Any
    scale_1: Any
    bias_0: Any
    bias_1: Any


@cache
def make_load_row_terms(config, part=0):
    """Make ``terms = load_row_terms(inputs, tile, row, n)``: the terms of rows ``row`` and ``row + 8`` of y's columns.

    ``part`` is 0 for gate and 1 for up. Columns from ``n`` on have no bias.
    """
    by_tensor, by_row, has_bias, is_f32 = (
        config.scaling == "tensor",
        config.scaling == "row",
        bool(config.bias),
        config.bias == "f32",
    )
    parts, interleaved, scaled_x = 1 + config.silu_and_mul, config.interleaved, by_tensor and config.scaled_x

    @cuda.jit(device=True)
    def weight_row(group, column, n):
        first = int64(group) * (parts * n)
        if interleaved:
            return first + 2 * column + part
        return first + part * n + column

    @cuda.jit(device=True)
    def load_bias(inputs, index, valid):
        if is_f32:
            return uint_as_float(load_nc_u32x1(inputs.bias, 2 * index)) if valid else float32(0)
        return uint_as_float(uint32(load_nc_u16(inputs.bias, index) << uint32(16))) if valid else float32(0)

    @cuda.jit(device=True)
    def load_row_terms(inputs, tile, column, n):
        valid = column < n  # of 16 columns either all are valid or none
        scale_0, scale_1 = tile.scale, tile.scale
        bias_0, bias_1 = float32(0), float32(0)
        if by_tensor:
            scale_0 = inputs.weight_scale[tile.group]
            if scaled_x:
                scale_0 = scale_0 * inputs.x_scale[0]
            scale_1 = scale_0
        elif by_row:
            index = weight_row(tile.group, column if valid else int32(0), n)
            scale_0, scale_1 = inputs.weight_scale[index], inputs.weight_scale[index + ROW_STEP]
        if has_bias:
            index = weight_row(tile.group, column, n)
            bias_0 = load_bias(inputs, index, valid)
            bias_1 = load_bias(inputs, index + (2 * ROW_STEP if interleaved else ROW_STEP), valid)
        return RowTerms(scale_0, scale_1, bias_0, bias_1)

    return load_row_terms


@cache
def make_load_terms(config):
    """Make ``terms = load_terms(inputs, tile, warp, lane, n)``: a pair of the thread's :class:`RowTerms`.

    They are those of gate and of up, or equal.
    """
    if not config.has_row_terms:

        @cuda.jit(device=True)
        def load_terms(inputs, tile, warp, lane, n):
            return int32(0)

        return load_terms

    load_first, load_second, silu_and_mul = (
        make_load_row_terms(config),
        make_load_row_terms(config, 1),
        config.silu_and_mul,
    )

    @cuda.jit(device=True)
    def load_terms(inputs, tile, warp, lane, n):
        column = int32(tile.column + 16 * warp + (lane >> 2))
        first = load_first(inputs, tile, column, n)
        return first, load_second(inputs, tile, column, n) if silu_and_mul else first

    return load_terms


@cache
def make_apply_row_terms(n):
    """Make ``acc = apply_row_terms(acc, terms)``: multiply a fragment by the scales of its rows and add the biases."""
    fma, broadcast = make_fma_blocks(n, n), make_broadcast_rows(n)

    @cuda.jit(device=True)
    def apply_row_terms(acc, terms):
        return fma(broadcast(terms.bias_0, terms.bias_1), acc, (terms.scale_0, terms.scale_1))

    return apply_row_terms


@cache
def make_load_row_values(config, layout):
    """Make ``load_row_values(smem, inputs, warp, lane, tile)``: copy values of a tile's rows of x to shared memory.

    They are scales of x, row weights and rows of y, as far as the configuration has them. A thread would need many
    registers for the values of its columns; from shared memory it reads each where it uses it. They are ordered as
    scales of blocks are; see ``SharedMemoryLayout.scale_pitch``. Rows that do not exist have zeros, and row -1 of y.
    All consumer warps must call the function.
    """
    by_row, gather, row_weights, scatter = config.scaling == "row", config.gather, config.row_weights, config.scatter
    subtile_m, m_subtiles, pitch = config.subtile_m, config.m_subtiles, layout.scale_pitch
    x_scale, weight, destination, _ = layout.row_value_offsets
    threads = 32 * getattr(layout, "consumer_warps", CONSUMER_WARPS)

    @cuda.jit(device=True)
    def load_x_scale(inputs, row):
        if gather:
            row = inputs.row_indices[row]
            return inputs.x_scale[row] if row >= 0 and row < inputs.x_rows else float32(0)
        return inputs.x_scale[row]

    @cuda.jit(device=True)
    def load_destination(inputs, row):
        y_row = inputs.scatter_indices[row]
        return y_row if y_row < inputs.y_rows else int32(-1)

    @cuda.jit(device=True)
    def load_row_values(smem, inputs, warp, lane, tile):
        bar_sync(ALL_CONSUMERS, threads)  # all warps have read the values of the previous tile
        for p in range(m_subtiles):
            for c in range(int32(32 * warp + lane), subtile_m, threads):
                row = int32(p * tile.subtile_rows + c)
                valid = c < tile.subtile_rows and row < tile.rows
                at = uint32((4 * p + ((c >> 1) & 3)) * pitch + (c >> 3) * 2 + (c & 1))
                row = int32(tile.row + row)
                if by_row:
                    smem.f32[uint32(x_scale + at)] = load_x_scale(inputs, row) if valid else float32(0)
                if row_weights:
                    smem.f32[uint32(weight + at)] = inputs.row_weights[row] if valid else float32(0)
                if scatter:
                    smem.i32[uint32(destination + at)] = load_destination(inputs, row) if valid else int32(-1)
        bar_sync(ALL_CONSUMERS, threads)

    return load_row_values


@cache
def make_finish(n, config, layout):
    """Make ``acc = finish(acc, smem, values, tile, terms)``: everything but the activation.

    ``values`` is where the thread's values of the subtile's rows of x begin, an offset in shared memory without that of
    the kind of values. The order is: scales, bias, row weights.
    """
    by_row, row_weights, has_row_terms = config.scaling == "row", config.row_weights, config.has_row_terms
    x_scale, weight, _, _ = layout.row_value_offsets
    scale_columns, zeros = make_fma_shared(n), (np.float32(0),) * (n // 2)
    apply_row_terms, scale_group, by_tensor = make_apply_row_terms(n), make_fma_blocks(n, n), config.scale_in_tile

    @cuda.jit(device=True)
    def finish(acc, smem, values, tile, terms):
        if by_row:
            acc = scale_columns(zeros, acc, smem.f32, int32(x_scale + values))
        if has_row_terms:
            acc = apply_row_terms(acc, terms[0])
        elif by_tensor:
            acc = scale_group(zeros, acc, (tile.scale, tile.scale))
        if row_weights:
            acc = scale_columns(zeros, acc, smem.f32, int32(weight + values))
        return acc

    return finish


@cache
def make_finish_gate_up(n, config):
    """Make ``gate, up = finish_gate_up(gate, up, tile, terms)``: fragments with their scales and biases."""
    by_tensor, has_row_terms = config.scale_in_tile, config.has_row_terms
    apply_row_terms, scale_group = make_apply_row_terms(n), make_fma_blocks(n, n)
    zeros = (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def finish_gate_up(gate, up, tile, terms):
        if has_row_terms:
            gate, up = apply_row_terms(gate, terms[0]), apply_row_terms(up, terms[1])
        elif by_tensor:
            gate = scale_group(zeros, gate, (tile.scale, tile.scale))
            up = scale_group(zeros, up, (tile.scale, tile.scale))
        return gate, up

    return finish_gate_up


def make_activate(n, config):
    """Make ``acc = activate(gate, up)``: the activation of fragments."""
    return make_silu_and_mul(n) if config.activation == "silu" else make_swigluoai(n, config.alpha, config.limit)
