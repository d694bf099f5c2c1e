"""Grouped GEMM kernel without Hopper's instructions: ``cp.async``, ``ldmatrix`` and ``mma.sync``, from sm_80 on.

Persistent CTAs compute the tiles of all groups. All threads of a CTA copy rows of x and of weight to a ring of
shared-memory stages, a few 16-byte vectors between the ``mma.sync`` of each step along k. The copies run ahead of the
multiplications by ``stages - 1`` stages and do not stop at the end of a tile. While a warp multiplies the fragments of a
step, it loads those of the next one. A CTA has one barrier per stage.

Shared memory holds a row's vectors in an order that depends on the row: vector v of a row is at position v ^ phase, so
that neither ``cp.async`` nor ``ldmatrix`` has bank conflicts. The tile scheduler is in ``scheduler.py``, the epilogue
in ``epilogue_mma.py``.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.config_mma import COLUMN_GROUP, SCALE_BLOCK, STEP_BYTES, MmaLayout, check_mma_config
from moe_numba.grouped_gemm.epilogue_mma import Output, OutputTile, make_epilogue
from moe_numba.grouped_gemm.scheduler import Problem, TileInfo, make_count_tiles, make_get_banded_tile, make_tile_loop
from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.cp_async import advance, cp_async_16, cp_async_commit_group, make_cp_async_wait_group
from moe_numba.ptx.memory import ld_shared_s32x4
from moe_numba.ptx.mma import make_e4m3_as_f16, make_fma_rows, make_ldmatrix_x4, make_mma
from moe_numba.ptx.warp import uniform_array

NO_ROW = 0xFFFFFFFF  # offset of a row of zeros
F16_SCALE = 65536.0  # e4m3 as float16 are 2**-8 times the numbers, so products are 2**-16 times theirs


class SharedMemory(NamedTuple):
    """Typed views of the dynamic shared memory of a CTA; all begin at the same address."""

    u8: Any
    i32: Any
    f32: Any


class Operands(NamedTuple):
    """x and weight in global memory. A pitch counts 16 bytes, from one row (or group) to the next."""

    x: Any  # uint8 pointer
    weight: Any  # uint8 pointer
    row_indices: Any  # int32 pointer, with gather: the row of x for each row of y
    x_rows: Any
    x_pitch: Any
    weight_pitch: Any
    group_pitch: Any
    k_bytes: Any  # bytes of a row that are elements of it
    n: Any  # columns of y


class Scales(NamedTuple):
    """Scales in global memory: block scales of x and weight, or one scale per group in ``weight``."""

    x: Any  # float32 pointer
    weight: Any  # float32 pointer


class Copy(NamedTuple):
    """The copies of a stage that a thread issues: the same vector of several rows."""

    x: Any  # uint8 pointer: the vector in row 0 of x
    weight: Any  # uint8 pointer: the vector in row 0 of the group's weight
    x_offsets: Any  # local array: the offset of each row from row 0, in units of 16 bytes
    weight_offsets: Any  # local array
    size: Any  # 16, or 0 to write zeros
    x_target: Any  # u8: where the vector of the first row of x goes
    weight_target: Any  # u8


# Copies from global memory


@cuda.jit(device=True)
def weight_phase(row):
    """Swizzle phase of a row of weight, for 8 vectors per row.

    The eight rows of a matrix that ``ldmatrix`` loads differ in bits 0, 3 and 4; see ``make_fragment_offsets``.
    """
    return int32((row >> 2 & 6) | (row & 1))


@cache
def make_find_rows(config, layout):
    """Make ``find_rows(operands, row, tile, x_offsets, weight_offsets)``: locate the rows that a thread copies.

    ``row`` is the first of them in the tile.
    """
    rows_per_pass, gather = layout.rows_per_pass, config.gather
    x_copies, weight_copies = config.block_m // rows_per_pass, config.block_n // rows_per_pass
    silu_and_mul, columns = config.silu_and_mul, config.columns

    @cuda.jit(device=True)
    def find_rows(operands, first, tile, x_offsets, weight_offsets):
        for i in range(x_copies):
            # Rows beyond the tile's last one repeat it; the epilogue does not store their results.
            row = int32(tile.row + min(int32(first + i * rows_per_pass), int32(tile.rows - 1)))
            if gather:
                row = operands.row_indices[row]
                offset = uint32(row * operands.x_pitch)
                x_offsets[i] = offset if row >= 0 and row < operands.x_rows else uint32(NO_ROW)
            else:
                x_offsets[i] = uint32(row * operands.x_pitch)
        for i in range(weight_copies):
            t = int32(first + i * rows_per_pass)
            if silu_and_mul:  # 32 rows of gate and 32 of up alternate, so that a warp computes both of its columns
                column = int32(tile.n_tile * columns + (t >> 6) * COLUMN_GROUP + (t & 31))
                row = int32(min(column, int32(operands.n - 1)) + (operands.n if t & COLUMN_GROUP else int32(0)))
            else:
                row = int32(min(int32(tile.n_tile * columns + t), int32(operands.n - 1)))
            weight_offsets[i] = uint32(row * operands.weight_pitch)

    return find_rows


@cache
def make_issue_copies(config, layout, part=0, parts=1):
    """Make ``issue_copies(smem, copy)``: issue one of ``parts`` equal parts of a stage's copies."""
    rows_per_pass, pitch, gather = layout.rows_per_pass, config.block_k_bytes, config.gather
    x_copies, weight_copies = config.block_m // rows_per_pass, config.block_n // rows_per_pass
    count = x_copies + weight_copies
    first, last = count * part // parts, count * (part + 1) // parts
    x_first, x_last = min(first, x_copies), min(last, x_copies)
    weight_first, weight_last = max(first - x_copies, 0), max(last - x_copies, 0)
    pass_bytes = rows_per_pass * pitch
    flip = 4 << 4 if rows_per_pass == 16 else 0  # every other pass has bit 4 of the row set, and so another phase

    @cuda.jit(device=True)
    def issue_copies(smem, copy):
        for i in range(x_first, x_last):
            offset, size = copy.x_offsets[i], copy.size
            if gather:
                size = size if offset != uint32(NO_ROW) else uint32(0)
            cp_async_16(smem.u8, int32(copy.x_target + i * pass_bytes), copy.x, uint64(offset) * uint64(16), size)
        for i in range(weight_first, weight_last):
            target = int32((copy.weight_target ^ ((i & 1) * flip)) + i * pass_bytes)
            cp_async_16(smem.u8, target, copy.weight, uint64(copy.weight_offsets[i]) * uint64(16), copy.size)

    return issue_copies


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
    """Make ``weight_index, up = find_scales(operands, tile, warp, lane, blocks, rows)``: locate a lane's block scales.

    It writes the rows of ``x_scale`` to the local array ``rows`` (-1: none). It returns the index of the weight's first
    scale, of ``blocks`` along k, and with ``silu_and_mul`` how far behind it the one for up is.
    """
    count, gather, halves = config.warp_m // 8, config.gather, 2 if config.silu_and_mul else 1
    warps_n, warp_m, warp_n, columns = config.warps_n, config.warp_m, config.warp_n // halves, config.columns

    @cuda.jit(device=True)
    def find_scales(operands, tile, warp, lane, blocks, rows):
        first = int32(warp // warps_n * warp_m + (lane >> 2))
        for i in range(count):
            row = int32(tile.row + min(int32(first + 8 * i), int32(tile.rows - 1)))
            if gather:
                row = operands.row_indices[row]
                row = row if row < operands.x_rows else int32(-1)
            rows[i] = row
        column = int32(min(int32(tile.n_tile * columns + warp % warps_n * warp_n), int32(operands.n - 1)))
        n_blocks = int32((operands.n + SCALE_BLOCK - 1) // SCALE_BLOCK)
        return (int64(tile.group) * (halves * n_blocks) + column // SCALE_BLOCK) * blocks, int64(n_blocks) * blocks

    return find_scales


@cache
def make_load_factors(config, i=0):
    """Make ``factors = load_factors(scales, rows, weight_index, up, k_block, blocks)``: a lane's factors of a stage.

    There is one for each of its rows, or two with ``silu_and_mul``: first all for gate, then all for up. The weight's
    scale for up is ``up`` elements behind that for gate.
    """
    rows_per_lane, gather = config.warp_m // 8, config.gather
    row_index, is_up, last = i % rows_per_lane, i >= rows_per_lane, i + 1 == rows_per_lane * (1 + config.silu_and_mul)
    load_more = make_load_factors(config, i + 1) if not last else None

    @cuda.jit(device=True)
    def load_factors(scales, rows, weight_index, up, k_block, blocks):
        row = rows[row_index]
        factor = scales.weight[weight_index + (up if is_up else int64(0)) + k_block]
        if gather:
            factor = factor * scales.x[int64(row) * blocks + k_block] if row >= 0 else float32(0)
        else:
            factor = factor * scales.x[int64(row) * blocks + k_block]
        if last:
            return (factor,)
        return (factor,) + load_more(scales, rows, weight_index, up, k_block, blocks)

    return load_factors


@cache
def make_describe_stage(config, layout):
    """Make ``copy = describe_stage(operands, x_offsets, weight_offsets, base, thread, stage, k_block, active)``.

    It describes a thread's copies to the stage at u8 offset ``stage``; ``base`` is the offset of the group's weight in
    bytes. Copies that are not ``active``, or behind the end of k, write zeros.
    """
    vectors, pitch, weight_offset = layout.vectors, config.block_k_bytes, layout.weight_offset
    phase_shift = 0 if vectors == 8 else 1
    has_tail = config.dtype == "e4m3" and pitch == 128  # k is a multiple of 64 elements

    @cuda.jit(device=True)
    def describe_stage(operands, x_offsets, weight_offsets, base, thread, stage, k_block, active):
        row, vector = int32(uint32(thread) // uint32(vectors)), int32(thread & (vectors - 1))
        begin = int32(k_block * pitch + 16 * vector)
        if has_tail:
            active = active and begin < operands.k_bytes
            begin = begin if active else int32(0)
        x_target = int32(stage + row * pitch + ((vector ^ ((row & 7) >> phase_shift)) << 4))
        to = int32(stage + weight_offset + row * pitch + ((vector ^ (weight_phase(row) >> phase_shift)) << 4))
        x, weight = advance(operands.x, int64(begin)), advance(operands.weight, int64(base + begin))
        return Copy(x, weight, x_offsets, weight_offsets, uint32(16) if active else uint32(0), x_target, to)

    return describe_stage


class Work(NamedTuple):
    """What a CTA computes, the same for all CTAs."""

    problem: Any
    tiles: Any
    n_tiles: Any
    k_blocks: Any


class CopyState(NamedTuple):
    """What a CTA copies next."""

    tile: Any
    k_block: Any
    stage: Any  # u8
    slot: Any  # of the tile's description in shared memory
    weight_base: Any  # offset of the group's weight, bytes


@cache
def make_start_tile(config, layout):
    """Make ``weight_base = start_tile(smem, operands, scales, work, tile, slot, thread, x_offsets, weight_offsets)``.

    It looks up a tile, publishes it in shared memory and locates the rows that the thread copies.
    """
    tile_info, vectors, by_tensor = layout.tile_info_offset, layout.vectors, config.scaling == "tensor"
    get_tile, find_rows = make_get_banded_tile(config, layout), make_find_rows(config, layout)

    @cuda.jit(device=True)
    def start_tile(smem, operands, scales, work, tile, slot, thread, x_offsets, weight_offsets):
        info = get_tile(smem, work.problem, work.n_tiles, tile)
        if thread == 0:
            index = uint32(tile_info + 8 * slot)
            smem.i32[index], smem.i32[index + uint32(1)] = info.row, info.rows
            smem.i32[index + uint32(2)], smem.i32[index + uint32(3)] = info.n_tile, info.group
            smem.f32[index + uint32(4)] = scales.weight[info.group] if by_tensor else float32(1)
        find_rows(operands, int32(uint32(thread) // uint32(vectors)), info, x_offsets, weight_offsets)
        return int64(int64(info.group) * operands.group_pitch * 16)

    return start_tile


@cache
def make_advance_copy(config, layout):
    """Make ``state = advance_copy(smem, operands, scales, work, state, thread, x_offsets, weight_offsets)``."""
    stage_bytes, ring_bytes = layout.stage_bytes, config.stages * layout.stage_bytes
    tile_slots, start_tile, (_, next_tile) = layout.tile_slots, make_start_tile(config, layout), make_tile_loop(1)

    @cuda.jit(device=True)
    def advance_copy(smem, operands, scales, work, state, thread, x_offsets, weight_offsets):
        tile, k_block, stage, slot, base = state
        k_block, stage = int32(k_block + 1), int32(stage + stage_bytes)
        stage = int32(0) if stage == ring_bytes else stage
        if k_block == work.k_blocks:
            k_block, tile, slot = int32(0), next_tile(tile), int32(slot + 1)
            slot = int32(0) if slot == tile_slots else slot
            if tile < work.tiles:
                base = start_tile(smem, operands, scales, work, tile, slot, thread, x_offsets, weight_offsets)
        return CopyState(tile, k_block, stage, slot, base)

    return advance_copy


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
        x_rows,
        x_pitch,
        weight_pitch,
        group_pitch,
    ):
        smem = SharedMemory(
            uniform_array(cuda.shared.array(0, uint8, 128)),
            cuda.shared.array(0, int32, 128),
            cuda.shared.array(0, float32, 128),
        )
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        operands = Operands(x, weight, row_indices, x_rows, x_pitch, weight_pitch, group_pitch, k_bytes, n)
        problem, scales = Problem(lengths, starts, groups, total_rows, capacity), Scales(x_scale, weight_scale)
        n_tiles, k_blocks = int32((n + columns - 1) // columns), int32((k_bytes + pitch - 1) // pitch)
        work = Work(problem, count_tiles(smem, problem, n_tiles), n_tiles, k_blocks)
        output = Output(y, y_scale, n)

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
                weight_index, up = find_scales(operands, info_of_tile, warp, lane, k_blocks, rows)
                factors = load_factors(scales, rows, weight_index, up, int32(0), k_blocks)
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
                    next_factors = load_factors(scales, rows, weight_index, up, next_k_block, k_blocks)
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
            row, count, n_tile, _ = ld_shared_s32x4(smem.i32, int32(info))
            scale = smem.f32[info + uint32(4)] * result_scale
            epilogue(smem, output, warp, lane, d, OutputTile(row, count, int32(n_tile * columns), scale))
            tile, slot = next_tile(tile), int32(slot + 1)
            slot = int32(0) if slot == tile_slots else slot
        wait_for_all()

    return grouped_gemm_mma, layout.bytes
