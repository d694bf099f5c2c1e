"""Grouped GEMM kernel without Hopper's instructions: ``cp.async``, ``ldmatrix`` and ``mma.sync``, from sm_80 on.

Persistent CTAs compute the tiles of all groups. There are no producer warps: all threads copy to a ring of stages
(``copies_mma.py``), and all warps multiply what it holds. The copies run ahead by ``stages - 1`` stages and do not stop
at the end of a tile, so the epilogue of a tile hides the latency of the next one's first loads.

Main loop
    The operands of ``mma.sync`` are in registers. A warp must therefore load them from shared memory by ``ldmatrix``,
    and the warps of a tile load the same rows several times. For an m x n part of the tile a warp loads m + n rows for
    m * n products: the largest part whose accumulators fit beside two sets of fragments, 64 x 64 in bf16, has the
    fewest bytes per ``mma.sync``. With eight warps, two on each of the SM's four schedulers, the tile is 128 x 256; the
    larger the tile, the fewer bytes come from the L2 cache.

    A step multiplies 32 bytes of k, as one ``mma.sync`` does. Before it multiplies the fragments of a step, a warp
    issues the loads of the next step's fragments: their latency is hidden behind the multiplications, although there
    are only two warps on a scheduler. The copies of a stage are issued a few at a time, before each of the steps, since
    they share the path to shared memory with ``ldmatrix``.

    The last step of a stage waits for the next stage's copies, and then at the CTA's only barrier per stage. Behind it
    the copies of all threads are visible to all warps; and no warp still reads the stage that was just multiplied,
    which the next copies overwrite.

    The steps of a stage are unrolled, and its rows are a constant number of bytes apart. So a step needs one offset per
    operand, from an exclusive or; the rows are immediates of the ``ldmatrix`` instructions.

Accumulators
    Tensor cores add products of e4m3 with fewer bits than float32 has, and block scales change every 128 elements of
    k. In both cases the products of a stage are summed apart, starting from zero, and then added to the accumulators.

The tile scheduler is in ``scheduler.py``, the epilogue in ``epilogue_mma.py``.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from moe_numba.grouped_gemm.common.block_scales import make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.common.epilogue_terms import EpilogueInputs
from moe_numba.grouped_gemm.common.scheduler import Problem, TileInfo, make_count_tiles, make_tile_loop
from moe_numba.grouped_gemm.mma_sync.config import COLUMN_GROUP, SCALE_BLOCK, STEP_BYTES, MmaLayout, check_mma_config
from moe_numba.grouped_gemm.mma_sync.copies import (
    CopyState,
    Operands,
    Scales,
    Work,
    make_advance_copy,
    make_describe_stage,
    make_issue_copies,
    make_start_tile,
)
from moe_numba.grouped_gemm.mma_sync.epilogue import EpilogueOperands, OutputTile, make_epilogue
from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.cp_async import cp_async_commit_group, make_cp_async_wait_group
from moe_numba.ptx.memory import ld_shared_s32x4
from moe_numba.ptx.mma import make_e4m3_as_f16, make_fma_rows, make_ldmatrix_x4, make_mma
from moe_numba.ptx.warp import uniform_array

F16_SCALE = 65536.0  # e4m3 as float16 are 2**-8 times the numbers, so products are 2**-16 times theirs


class SharedMemory(NamedTuple):
    """Typed views of the dynamic shared memory of a CTA; all begin at the same address."""

    u8: Any
    i32: Any
    f32: Any


# Fragments from shared memory


@cache
def make_fragment_offsets(config, layout):
    """Make ``x, weight = fragment_offsets(warp, lane)``: a lane's rows for ``ldmatrix``, as offsets in a stage.

    Part j of 8 columns of a warp's tile is made of the rows ``8 c + 2 (j % 4) + i`` of each 32 rows of weight, for c
    from 0 to 3 and i from 0 to 1. A lane's accumulators of four parts are then 8 neighbouring columns of y.
    """
    pitch, weight_offset, warps_n = config.block_k_bytes, layout.weight_offset, config.warps_n
    warp_m, warp_n, shift = config.warp_m, config.warp_n, 0 if layout.vectors == 8 else 1

    @cuda.jit(device=True)
    def fragment_offsets(warp, lane):
        r = int32(lane & 7)
        phase = int32(r >> shift)  # of the rows of x and of weight alike
        warp_row, warp_column = warp // warps_n, warp % warps_n
        x_row = int32(warp_row * warp_m + (lane & 15))
        weight_row = int32(warp_column * warp_n + (r >> 1) * 8 + (r & 1) + (lane >> 4) * 2)
        x = int32(x_row * pitch + (((lane >> 4) ^ phase) << 4))
        weight = int32(weight_offset + weight_row * pitch + (((lane >> 3 & 1) ^ phase) << 4))
        return x, weight

    return fragment_offsets


@cache
def make_load_fragments(config):
    """Make ``x, weight = load_fragments(smem, x, weight)``: load a warp's operands of one step from u8 offsets."""
    pitch = config.block_k_bytes
    load_x = make_ldmatrix_x4(tuple(i * pitch for i in range(0, config.warp_m, 16)))
    parts = [COLUMN_GROUP * group + first for group in range(config.warp_n // COLUMN_GROUP) for first in (0, 4)]
    load_weight = make_ldmatrix_x4(tuple(row * pitch for row in parts))

    @cuda.jit(device=True)
    def load_fragments(smem, x, weight):
        return load_x(smem.u8, x), load_weight(smem.u8, weight)

    return load_fragments


# Main loop


@cache
def make_multiply(config, accumulate):
    """Make ``d = multiply(d, x, weight)``: add a step's product to ``d``, or start from zero without ``accumulate``."""
    m, n = config.warp_m, config.warp_n
    mma, add = make_mma(config.mma, m, n), make_mma(config.mma, m, n, accumulate)
    if config.mma != "f16":
        if accumulate:
            return mma

        @cuda.jit(device=True)
        def multiply(d, x, weight):
            return add(x, weight)

        return multiply

    x_odd, x_even = make_e4m3_as_f16(m // 4, True), make_e4m3_as_f16(m // 4, False)
    weight_odd, weight_even = make_e4m3_as_f16(n // 4, True), make_e4m3_as_f16(n // 4, False)

    @cuda.jit(device=True)
    def multiply(d, x, weight):
        if accumulate:
            d = add(d, x_odd(x), weight_odd(weight))
        else:
            d = add(x_odd(x), weight_odd(weight))
        return mma(d, x_even(x), weight_even(weight))

    return multiply


@cache
def make_steps(config, layout, step=0):
    """Make ``d, x, weight = steps(smem, d, x, weight, now, following, copy)``: the steps of a stage from ``step`` on.

    ``x`` and ``weight`` are the fragments of the step, ``d`` the sum that the products are added to. ``now`` and
    ``following`` are pairs of u8 offsets: the lane's fragments in this stage and in the next one. The function returns
    the fragments of the next stage's first step.
    """
    count = config.block_k_bytes // STEP_BYTES
    last, in_stage = step == count - 1, (step + 1) % count * STEP_BYTES
    load_fragments, issue_copies = make_load_fragments(config), make_issue_copies(config, layout, step, count)
    multiply = make_multiply(config, accumulate=step > 0 or not config.promotes)
    wait_for_next_stage = make_cp_async_wait_group(config.stages - 2)
    more = make_steps(config, layout, step + 1) if not last else None

    @cuda.jit(device=True)
    def steps(smem, d, x, weight, now, following, copy):
        issue_copies(smem, copy)
        if last:
            cp_async_commit_group()
            wait_for_next_stage()
            cuda.syncthreads()  # all threads' copies have arrived, and all warps have read this stage
            now = following
        next_x, next_weight = load_fragments(smem, int32(now[0] ^ in_stage), int32(now[1] ^ in_stage))
        d = multiply(d, x, weight)
        if not last:
            d, next_x, next_weight = more(smem, d, next_x, next_weight, now, following, copy)
        return d, next_x, next_weight

    return steps


# Block scales


@cache
def make_find_scales(config):
    """Make ``weight_index, up, x_index = find_scales(operands, scales, tile, warp, lane, blocks, rows)``.

    It locates a lane's block scales, and writes the rows of ``x_scale`` to the local array ``rows`` (-1: none). It
    returns the index of the weight's first scale, of ``blocks`` along k, with ``silu_and_mul`` how far behind it the
    one for up is, and the index of the scale of row 0 of x.
    """
    count, gather, halves = config.warp_m // 8, config.gather, 2 if config.silu_and_mul else 1
    warps_n, warp_m, warp_n, columns = config.warps_n, config.warp_m, config.warp_n // halves, config.columns
    find_weight, step, _ = make_weight_scales(config.packed_weight_scale)

    @cuda.jit(device=True)
    def find_scales(operands, scales, tile, warp, lane, blocks, rows):
        first = int32(warp // warps_n * warp_m + (lane >> 2))
        for i in range(count):
            row = int32(tile.row + min(int32(first + 8 * i), int32(tile.rows - 1)))
            if gather:
                row = operands.row_indices[row]
                row = row if row < operands.x_rows else int32(-1)
            rows[i] = row
        column = int32(min(int32(tile.n_tile * columns + warp % warps_n * warp_n), int32(operands.n - 1)))
        n_blocks = int32((operands.n + SCALE_BLOCK - 1) // SCALE_BLOCK)
        weight_index = find_weight(tile.group, column // SCALE_BLOCK, halves * n_blocks, blocks, scales.weight_rows)
        return weight_index, int64(n_blocks) * step(blocks), tile.group * scales.group_stride

    return find_scales


@cache
def make_load_factors(config, i=0):
    """Make ``factors = load_factors(scales, rows, weight_index, up, x_index, k_block)``: a lane's factors of a stage.

    There is one for each of its rows, or two with ``silu_and_mul``: first all for gate, then all for up. The weight's
    scale for up is ``up`` elements behind that for gate.
    """
    rows_per_lane, gather = config.warp_m // 8, config.gather
    row_index, is_up, last = i % rows_per_lane, i >= rows_per_lane, i + 1 == rows_per_lane * (1 + config.silu_and_mul)
    load_more = make_load_factors(config, i + 1) if not last else None
    k_offset, load_x = make_x_scales(config.packed_x_scale)
    _, _, load_weight = make_weight_scales(config.packed_weight_scale)

    @cuda.jit(device=True)
    def load_factors(scales, rows, weight_index, up, x_index, k_block):
        row = rows[row_index]
        index = weight_index + (up if is_up else int64(0))
        factor = load_weight(scales.weight, index, k_block, scales.weight_rows)
        index = x_index + int64(row) * scales.row_stride + k_offset(k_block, scales.k_stride)
        if gather:
            factor = factor * load_x(scales.x, index, k_block) if row >= 0 else float32(0)
        else:
            factor = factor * load_x(scales.x, index, k_block)
        if last:
            return (factor,)
        return (factor,) + load_more(scales, rows, weight_index, up, x_index, k_block)

    return load_factors


@cache
def make_mma_kernel(config):
    """Make the kernel, for any number of CTAs; return it and its dynamic shared memory in bytes."""
    check_mma_config(config)
    layout = MmaLayout(config)
    stages, stage_bytes, columns, tile_slots = config.stages, layout.stage_bytes, config.columns, layout.tile_slots
    ring_bytes, tile_info, pitch = stages * stage_bytes, layout.tile_info_offset, config.block_k_bytes
    x_copies, weight_copies = config.block_m // layout.rows_per_pass, config.block_n // layout.rows_per_pass
    count_tiles, (first_tile, next_tile) = make_count_tiles(config, layout), make_tile_loop(1)
    start_tile, describe_stage = make_start_tile(config, layout), make_describe_stage(config, layout)
    issue_copies, advance_copy = make_issue_copies(config, layout), make_advance_copy(config, layout)
    wait_for_next_stage, wait_for_all = make_cp_async_wait_group(stages - 2), make_cp_async_wait_group(0)
    fragment_offsets, load_fragments = make_fragment_offsets(config, layout), make_load_fragments(config)
    steps, epilogue = make_steps(config, layout), make_epilogue(config, layout)
    promotes, by_block, scale_rows = config.promotes, config.scaling == "block", config.warp_m // 8
    zeros = (np.float32(0),) * (config.warp_m * config.warp_n // 32)
    result_scale = np.float32(F16_SCALE if config.mma == "f16" else 1)
    add = make_fma(config.warp_m * config.warp_n // 16)
    add_scaled = make_fma_rows(config.warp_m, config.warp_n, 2 if config.silu_and_mul else 1)
    find_scales, load_factors = make_find_scales(config), make_load_factors(config)
    weight_parts = 2 if config.silu_and_mul else 1

    @cuda.jit
    def grouped_gemm_mma(
        x,
        weight,
        y,
        y_scale,
        lengths,
        starts,
        x_scale,
        weight_scale,
        row_indices,
        groups,
        total_rows,
        capacity,
        n,
        k_bytes,
        scale_row_stride,
        scale_k_stride,
        scale_group_stride,
        x_rows,
        x_pitch,
        weight_pitch,
        group_pitch,
        bias,
        row_weights,
        scatter_indices,
        y_rows,
    ):
        smem = SharedMemory(
            uniform_array(cuda.shared.array(0, uint8, 128)),
            cuda.shared.array(0, int32, 128),
            cuda.shared.array(0, float32, 128),
        )
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        operands = Operands(x, weight, row_indices, x_rows, x_pitch, weight_pitch, group_pitch, k_bytes, n)
        problem, scales = (
            Problem(lengths, starts, groups, total_rows, capacity),
            Scales(
                x_scale, weight_scale, scale_row_stride, scale_k_stride, scale_group_stride, int32(n * weight_parts)
            ),
        )
        n_tiles, k_blocks = int32((n + columns - 1) // columns), int32((k_bytes + pitch - 1) // pitch)
        work = Work(problem, count_tiles(smem, problem, n_tiles), n_tiles, k_blocks)
        inputs = EpilogueInputs(x_scale, weight_scale, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows)
        output = EpilogueOperands(y, y_scale, n, inputs)

        x_offsets, weight_offsets = cuda.local.array(x_copies, uint32), cuda.local.array(weight_copies, uint32)
        tile, base = first_tile(), int64(0)
        if tile < work.tiles:
            base = start_tile(smem, operands, scales, work, tile, int32(0), thread, x_offsets, weight_offsets)
        state = CopyState(tile, int32(0), int32(0), int32(0), base)
        for _ in range(stages - 1):
            active = state.tile < work.tiles
            issue_copies(
                smem,
                describe_stage(
                    operands, x_offsets, weight_offsets, state.weight_base, thread, state.stage, state.k_block, active
                ),
            )
            cp_async_commit_group()
            state = advance_copy(smem, operands, scales, work, state, thread, x_offsets, weight_offsets)
        wait_for_next_stage()
        cuda.syncthreads()

        stage, slot = int32(0), int32(0)
        x_fragment, weight_fragment = fragment_offsets(warp, lane)
        a, b = load_fragments(smem, x_fragment, weight_fragment)
        rows = cuda.local.array(scale_rows, int32)
        while tile < work.tiles:
            info = uint32(tile_info + 8 * slot)
            if by_block:
                row, count, n_tile, group = ld_shared_s32x4(smem.i32, int32(info))
                info_of_tile = TileInfo(group, row, count, count, n_tile)
                weight_index, up, x_index = find_scales(operands, scales, info_of_tile, warp, lane, k_blocks, rows)
                factors = load_factors(scales, rows, weight_index, up, x_index, int32(0))
            d = zeros
            for k_block in range(k_blocks):
                active = state.tile < work.tiles
                copy = describe_stage(
                    operands, x_offsets, weight_offsets, state.weight_base, thread, state.stage, state.k_block, active
                )
                next_stage = int32(stage + stage_bytes)
                next_stage = int32(0) if next_stage == ring_bytes else next_stage
                now = int32(stage + x_fragment), int32(stage + weight_fragment)
                following = int32(next_stage + x_fragment), int32(next_stage + weight_fragment)
                if by_block:
                    next_k_block = int32(min(int32(k_block + 1), int32(k_blocks - 1)))
                    next_factors = load_factors(scales, rows, weight_index, up, x_index, next_k_block)
                    product, a, b = steps(smem, zeros, a, b, now, following, copy)
                    d = add_scaled(d, product, factors)
                    factors = next_factors
                elif promotes:
                    product, a, b = steps(smem, zeros, a, b, now, following, copy)
                    d = add(d, product, float32(1))
                else:
                    d, a, b = steps(smem, d, a, b, now, following, copy)
                stage = next_stage
                state = advance_copy(smem, operands, scales, work, state, thread, x_offsets, weight_offsets)
            row, count, n_tile, group = ld_shared_s32x4(smem.i32, int32(info))
            scale = smem.f32[info + uint32(4)] * result_scale
            epilogue(smem, output, warp, lane, d, OutputTile(row, count, int32(n_tile * columns), scale, group))
            tile, slot = next_tile(tile), int32(slot + 1)
            slot = int32(0) if slot == tile_slots else slot
        wait_for_all()

    return grouped_gemm_mma, layout.bytes
