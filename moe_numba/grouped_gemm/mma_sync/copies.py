"""Copies of the grouped GEMM with ``mma.sync``: all threads copy rows of x and of weight to the ring of stages.

A stage holds a part of k: 64 or 128 bytes of each row of the tile, in 16-byte vectors. Neighbouring threads copy
neighbouring vectors of a row by ``cp.async``, so that a warp reads whole sectors. A thread copies the same vector of
several rows. It locates its rows once per tile and keeps their offsets in registers; from stage to stage only the two
base pointers and the two targets change. ``cp.async`` needs no registers for the data, and zero-fills what lies behind
the end of k.

The same vector of all rows would be in the same banks, because the rows of a stage are 64 or 128 bytes apart. So vector
v of a row is at position v ^ phase, where the phase depends on the row. ``ldmatrix`` reads one vector of eight rows at
a time: their phases differ, so they are in different banks. The exclusive or permutes the vectors that ``cp.async``
writes within their rows, so the writes have no bank conflicts either. Padding, the alternative, needs more memory.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32, uint64

from moe_numba.grouped_gemm.common.scheduler import make_get_banded_tile, make_tile_loop
from moe_numba.grouped_gemm.mma_sync.config import COLUMN_GROUP
from moe_numba.ptx.cp_async import advance, cp_async_16

NO_ROW = 0xFFFFFFFF  # offset of a row of zeros


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

    x: Any  # float32 pointer, or int32 if packed, as `block_scales.py` says
    weight: Any
    row_stride: Any  # of the block scales of x, in elements
    k_stride: Any
    group_stride: Any  # int64: from one group to the next, beyond ``capacity`` rows; 0 if x is not masked
    weight_rows: Any  # of a group, used with packed scales of weight only


class Copy(NamedTuple):
    """The copies of a stage that a thread issues: the same vector of several rows."""

    x: Any  # uint8 pointer: the vector in row 0 of x
    weight: Any  # uint8 pointer: the vector in row 0 of the group's weight
    x_offsets: Any  # local array: the offset of each row from row 0, in units of 16 bytes
    weight_offsets: Any  # local array
    size: Any  # 16, or 0 to write zeros
    x_target: Any  # u8: where the vector of the first row of x goes
    weight_target: Any  # u8


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


@cuda.jit(device=True)
def weight_phase(row):
    """Swizzle phase of a row of weight, for 8 vectors per row; for 4 it is half of that.

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
    # Bit 4 of a row is in its phase; with 16 rows per pass it is set in every other pass.
    flip = (4 if layout.vectors == 8 else 2) << 4 if rows_per_pass == 16 else 0

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


@cache
def make_describe_stage(config, layout):
    """Make ``copy = describe_stage(operands, x_offsets, weight_offsets, base, thread, stage, k_block, active)``.

    It describes a thread's copies to the stage at u8 offset ``stage``; ``base`` is the offset of the group's weight in
    bytes. Copies that are not ``active``, or behind the end of k, write zeros.
    """
    vectors, pitch, weight_offset = layout.vectors, config.block_k_bytes, layout.weight_offset
    phase_shift = 0 if vectors == 8 else 1

    @cuda.jit(device=True)
    def describe_stage(operands, x_offsets, weight_offsets, base, thread, stage, k_block, active):
        row, vector = int32(uint32(thread) // uint32(vectors)), int32(thread & (vectors - 1))
        begin = int32(k_block * pitch + 16 * vector)
        active = active and begin < operands.k_bytes
        begin = begin if active else int32(0)
        x_target = int32(stage + row * pitch + ((vector ^ ((row & 7) >> phase_shift)) << 4))
        to = int32(stage + weight_offset + row * pitch + ((vector ^ (weight_phase(row) >> phase_shift)) << 4))
        x, weight = advance(operands.x, int64(begin)), advance(operands.weight, int64(base + begin))
        return Copy(x, weight, x_offsets, weight_offsets, uint32(16) if active else uint32(0), x_target, to)

    return describe_stage


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
