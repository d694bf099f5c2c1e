"""Grouped GEMM kernel without Hopper's instructions: ``cp.async``, ``ldmatrix`` and ``mma.sync``, from sm_80 on.

Persistent CTAs compute the tiles of all groups. There are no producer warps: all threads copy to a ring of stages, and
all warps multiply what it holds. The copies run ahead by ``stages - 1`` stages and do not stop at the end of a tile, so
the epilogue of a tile hides the latency of the next one's first loads.

Pipeline
    There are no mbarriers. Each thread commits its copies of a stage as one group, also behind the last tile.
    Let a warp multiply stage i. Meanwhile it copies stage i + ``stages`` - 1 to the place of stage i - 1. Before the
    last step of stage i the thread waits until at most ``stages`` - 2 groups are in flight, so its copies of stage
    i + 1 have arrived. One ``__syncthreads`` then says two things: all threads' copies of stage i + 1 have arrived, and
    all warps have loaded their last fragments of stage i, whose place may be overwritten.

    CTA c computes tiles c, c + gridDim.x and so on. All threads look a tile up when the copies reach it, up to
    ``stages`` tiles ahead, and thread 0 leaves its description for the epilogue, in one of ``stages`` + 1 slots.

Copies
    A stage holds a part of k: 64 or 128 bytes of each row of the tile, in 16-byte vectors. Neighbouring threads copy
    neighbouring vectors of a row by ``cp.async``, so that a warp reads whole sectors. A thread copies the same vector
    of several rows. It locates its rows once per tile and keeps their offsets in registers; from stage to stage only
    the two base pointers and the two targets change. ``cp.async`` needs no registers for the data, and zero-fills what
    lies behind the end of k.

    The same vector of all rows would be in the same banks, because the rows of a stage are 64 or 128 bytes apart. So
    vector v of a row is at position v ^ phase, where the phase of this swizzle depends on the row. ``ldmatrix`` reads
    one vector of eight rows at a time; their phases put them into different banks. The exclusive or permutes the
    vectors that ``cp.async`` writes within their rows, so the writes have no bank conflicts either. Padding, the
    alternative, needs more memory.

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

    The steps of a stage are unrolled, and its rows are a constant number of bytes apart. So a step needs one offset per
    operand, from an exclusive or; the rows are immediates of the ``ldmatrix`` instructions.

Accumulators
    Tensor cores add products of e4m3 with fewer bits than float32 has, and block scales change every 128 elements of
    k. In both cases the products of a stage are summed apart, starting from zero, and then added to the accumulators.

The tile scheduler is in ``common/scheduler.py``. What the epilogue does with the accumulators is in ``epilogue.py``.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.common.block_scales import make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.common.epilogue_terms import EpilogueInputs
from moe_numba.grouped_gemm.common.scheduler import Problem, make_count_tiles, make_get_banded_tile
from moe_numba.grouped_gemm.mma_sync.config import COLUMN_GROUP, STEP_BYTES, MmaLayout, check_mma_config
from moe_numba.grouped_gemm.mma_sync.epilogue import (
    make_find_maxima,
    make_finish_columns,
    make_store_activated,
    make_store_rows,
)
from moe_numba.ptx.accumulators import make_fma
from moe_numba.ptx.cp_async import advance, cp_async_16, cp_async_commit_group, make_cp_async_wait_group
from moe_numba.ptx.memory import ld_shared_s32x4
from moe_numba.ptx.mma import make_e4m3_as_f16, make_fma_rows, make_ldmatrix_x4, make_mma
from moe_numba.ptx.warp import uniform_array
from moe_numba.quantise import FP8_SCALE_BLOCK

F16_SCALE = 65536.0  # e4m3 as float16 are 2**-8 times the numbers, so products are 2**-16 times theirs
NO_ROW = 0xFFFFFFFF  # offset of a row of zeros


class SmemViews(NamedTuple):
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

    x: Any  # float32 pointer, or int32 if packed, as `block_scales.py` says
    weight: Any
    row_stride: Any  # of the block scales of x, in elements
    k_stride: Any
    weight_rows: Any  # of a group, used with packed scales of weight only


class Work(NamedTuple):
    """The tiles of all CTAs, and the stages of a tile."""

    problem: Any
    tiles: Any
    n_tiles: Any
    k_blocks: Any


class CopyState(NamedTuple):
    """The stage that a CTA copies next, which is ``stages`` - 1 ahead of the one that it multiplies."""

    tile: Any
    k_block: Any
    stage: Any  # u8: where the stage begins in the ring
    slot: Any  # of the tile's description in shared memory
    weight_base: Any  # offset of the group's weight, bytes


class Copy(NamedTuple):
    """The copies of a stage that a thread issues: the same vector of several rows."""

    x: Any  # uint8 pointer: the vector in row 0 of x
    weight: Any  # uint8 pointer: the vector in row 0 of the group's weight
    x_offsets: Any  # local array: the offset of each row from row 0, in units of 16 bytes
    weight_offsets: Any  # local array
    size: Any  # 16, or 0 to write zeros
    x_target: Any  # u8: where the vector of the first row of x goes
    weight_target: Any  # u8


# ==== Code that is repeated: for each step of a stage, and for each row of a lane ====


@cache
def make_issue_copies(config, layout, part=0, parts=1):
    """Make ``issue_copies(smem, copy)``: issue one of ``parts`` equal parts of a stage's copies."""
    rows_per_pass, gather = layout.rows_per_pass, config.gather
    x_copies, weight_copies = config.block_m // rows_per_pass, config.block_n // rows_per_pass
    count = x_copies + weight_copies
    first, last = count * part // parts, count * (part + 1) // parts
    x_first, x_last = min(first, x_copies), min(last, x_copies)
    weight_first, weight_last = max(first - x_copies, 0), max(last - x_copies, 0)
    pass_bytes = rows_per_pass * config.block_k_bytes
    # In weight, the phase has bit 4 of the row (see `describe_copy`); with 16 rows per pass it flips from pass to pass.
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
def make_load_fragments(config):
    """Make ``a = load_a(array, x)`` and ``b = load_b(array, weight)``, which load a warp's operands of one step.

    Their second arguments are the lane's offsets in bytes. ``mma.sync`` multiplies parts of 8 rows of weight. Of each
    32 rows, part j (0 to 3) has the rows ``8 c + 2 j + i``, for c from 0 to 3 and i from 0 to 1, as its columns
    ``2 c + i``. Lane c of a quad has columns 2 c and 2 c + 1 of each part: with four parts 8 neighbouring columns of y.
    One ``ldmatrix`` loads two parts, so ``load_b`` issues two for each 32 rows.
    """
    pitch = config.block_k_bytes
    parts = [COLUMN_GROUP * group + first for group in range(config.warp_n // COLUMN_GROUP) for first in (0, 4)]
    load_a = make_ldmatrix_x4(tuple(i * pitch for i in range(0, config.warp_m, 16)))
    return load_a, make_ldmatrix_x4(tuple(row * pitch for row in parts))


@cache
def make_multiply(config):
    """Make ``d = multiply(d, a, b)``: add a step's product to ``d``."""
    m, n = config.warp_m, config.warp_n
    mma = make_mma(config.mma, m, n)
    if config.mma != "f16":
        return mma
    a_odd, a_even = make_e4m3_as_f16(m // 4, True), make_e4m3_as_f16(m // 4, False)
    b_odd, b_even = make_e4m3_as_f16(n // 4, True), make_e4m3_as_f16(n // 4, False)

    @cuda.jit(device=True)
    def multiply(d, a, b):
        return mma(mma(d, a_odd(a), b_odd(b)), a_even(a), b_even(b))

    return multiply


@cache
def make_step(config, layout, step):
    """Make ``d, a, b = multiply_step(smem, d, a, b, x_at, weight_at, copy)``, for each step of a stage but the last.

    It adds the product of the fragments ``a`` and ``b`` to ``d`` and returns the fragments of the next step. ``x_at``
    and ``weight_at`` are the u8 offsets of the lane's fragments in this stage.
    """
    next_step, steps = (step + 1) * STEP_BYTES, config.block_k_bytes // STEP_BYTES
    issue_copies, multiply = make_issue_copies(config, layout, step, steps), make_multiply(config)
    load_a, load_b = make_load_fragments(config)

    @cuda.jit(device=True)
    def multiply_step(smem, d, a, b, x_at, weight_at, copy):
        issue_copies(smem, copy)
        next_a, next_b = load_a(smem.u8, int32(x_at ^ next_step)), load_b(smem.u8, int32(weight_at ^ next_step))
        return multiply(d, a, b), next_a, next_b

    return multiply_step


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


# ==== The kernel ====


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs; return it and its dynamic shared memory in bytes."""
    check_mma_config(config)
    layout = MmaLayout(config)
    stages, stage_bytes, ring_bytes = config.stages, layout.stage_bytes, config.stages * layout.stage_bytes
    pitch, vectors, rows_per_pass = config.block_k_bytes, layout.vectors, layout.rows_per_pass
    x_copies, weight_copies = config.block_m // rows_per_pass, config.block_n // rows_per_pass
    weight_offset, tile_info, tile_slots = layout.weight_offset, layout.tile_info_offset, layout.tile_slots
    row_max, block_m, columns, steps = layout.row_max_offset, config.block_m, config.columns, pitch // STEP_BYTES
    warps_n, warp_m, warp_n, lane_rows = config.warps_n, config.warp_m, config.warp_n, config.warp_m // 8
    phase_shift = 0 if vectors == 8 else 1  # four vectors per row have half as many phases
    weight_parts, warp_columns = (2, warp_n // 2) if config.silu_and_mul else (1, warp_n)
    # Numba removes branches on these that the configuration does not take.
    gather, silu_and_mul, promotes = config.gather, config.silu_and_mul, config.promotes
    by_tensor, by_block, has_epilogue_math = (
        config.scaling == "tensor",
        config.scaling == "block",
        config.has_epilogue_math,
    )

    count_tiles, get_tile = make_count_tiles(config, layout), make_get_banded_tile(config, layout)
    wait_for_next_stage, wait_for_all = make_cp_async_wait_group(stages - 2), make_cp_async_wait_group(0)
    issue_copies, issue_last_copies = (
        make_issue_copies(config, layout),
        make_issue_copies(config, layout, steps - 1, steps),
    )
    (load_a, load_b), multiply, step_0 = (
        make_load_fragments(config),
        make_multiply(config),
        make_step(config, layout, 0),
    )
    step_1, step_2 = (make_step(config, layout, 1), make_step(config, layout, 2)) if steps == 4 else (None, None)
    zeros = (np.float32(0),) * (warp_m * warp_n // 32)
    add, add_scaled = make_fma(warp_m * warp_n // 16), make_fma_rows(warp_m, warp_n, weight_parts)
    find_weight_scales, step_of_scales, _ = make_weight_scales(config.packed_weight_scale)
    load_factors = make_load_factors(config)
    result_scale = np.float32(F16_SCALE if config.mma == "f16" else 1)
    store_rows, finish_columns = make_store_rows(config), make_finish_columns(config)
    find_maxima, store_activated = (
        (make_find_maxima(config), make_store_activated(config)) if silu_and_mul else (None, None)
    )

    @cuda.jit(device=True)
    def start_tile(smem, operands, scales, work, tile, slot, thread, x_offsets, weight_offsets):
        """Publish a tile in shared memory, locate the rows that the thread copies; return the group's weight."""
        info = get_tile(smem, work.problem, work.n_tiles, tile)
        if thread == 0:
            index = uint32(tile_info + 8 * slot)
            smem.i32[index], smem.i32[index + uint32(1)] = info.row, info.rows
            smem.i32[index + uint32(2)], smem.i32[index + uint32(3)] = info.n_tile, info.group
            smem.f32[index + uint32(4)] = scales.weight[info.group] if by_tensor else float32(1)
        first = int32(uint32(thread) // uint32(vectors))
        for i in range(x_copies):
            # Rows beyond the tile's last one repeat it; the epilogue does not store their results.
            row = int32(info.row + min(int32(first + i * rows_per_pass), int32(info.rows - 1)))
            if gather:
                row = operands.row_indices[row]
                offset = uint32(row * operands.x_pitch)
                x_offsets[i] = offset if row >= 0 and row < operands.x_rows else uint32(NO_ROW)
            else:
                x_offsets[i] = uint32(row * operands.x_pitch)
        for i in range(weight_copies):
            t = int32(first + i * rows_per_pass)
            if silu_and_mul:  # 32 rows of gate and 32 of up alternate, so that a warp computes both of its columns
                column = int32(info.n_tile * columns + (t >> 6) * COLUMN_GROUP + (t & 31))
                row = int32(min(column, int32(operands.n - 1)) + (operands.n if t & COLUMN_GROUP else int32(0)))
            else:
                row = int32(min(int32(info.n_tile * columns + t), int32(operands.n - 1)))
            weight_offsets[i] = uint32(row * operands.weight_pitch)
        return int64(int64(info.group) * operands.group_pitch * 16)

    @cuda.jit(device=True)
    def describe_copy(operands, x_offsets, weight_offsets, tiles, ahead, thread):
        """Return a thread's copies of a stage; behind the last tile, and behind the end of k, they write zeros."""
        row, vector = int32(uint32(thread) // uint32(vectors)), int32(thread & (vectors - 1))
        begin = int32(ahead.k_block * pitch + 16 * vector)
        active = ahead.tile < tiles and begin < operands.k_bytes
        begin = begin if active else int32(0)
        # The eight rows of a matrix that ldmatrix loads differ in bits 0 to 2 in x, and in bits 0, 3 and 4 in weight.
        x_phase, weight_phase = int32(row & 7), int32((row >> 2 & 6) | (row & 1))
        target = int32(ahead.stage + row * pitch)
        x_target = int32(target + ((vector ^ (x_phase >> phase_shift)) << 4))
        weight_target = int32(target + weight_offset + ((vector ^ (weight_phase >> phase_shift)) << 4))
        x, weight = advance(operands.x, int64(begin)), advance(operands.weight, int64(ahead.weight_base + begin))
        size = uint32(16) if active else uint32(0)
        return Copy(x, weight, x_offsets, weight_offsets, size, x_target, weight_target)

    @cuda.jit(device=True)
    def advance_copy(smem, operands, scales, work, ahead, thread, x_offsets, weight_offsets):
        """Return the stage that follows: of the same tile, or the first one of the CTA's next tile."""
        tile, k_block, stage, slot, weight_base = ahead
        k_block, stage = int32(k_block + 1), int32(stage + stage_bytes)
        stage = int32(0) if stage == ring_bytes else stage
        if k_block == work.k_blocks:
            k_block, tile, slot = int32(0), int32(tile + int32(cuda.gridDim.x)), int32(slot + 1)
            slot = int32(0) if slot == tile_slots else slot
            if tile < work.tiles:
                weight_base = start_tile(smem, operands, scales, work, tile, slot, thread, x_offsets, weight_offsets)
        return CopyState(tile, k_block, stage, slot, weight_base)

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
        scale_group_stride,  # int64: from one group to the next, beyond ``capacity`` rows; 0 if x is not masked
        x_rows,
        x_pitch,
        weight_pitch,
        group_pitch,
        bias,
        row_weights,
        scatter_indices,
        y_rows,
    ):
        # ---- Shared memory ----
        smem = SmemViews(
            uniform_array(cuda.shared.array(0, uint8, 128)),
            cuda.shared.array(0, int32, 128),
            cuda.shared.array(0, float32, 128),
        )
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)

        # ---- Tiles: an exclusive prefix sum over the groups, in shared memory ----
        operands = Operands(x, weight, row_indices, x_rows, x_pitch, weight_pitch, group_pitch, k_bytes, n)
        scales = Scales(x_scale, weight_scale, scale_row_stride, scale_k_stride, int32(n * weight_parts))
        inputs = EpilogueInputs(x_scale, weight_scale, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows)
        problem = Problem(lengths, starts, groups, total_rows, capacity)
        n_tiles, k_blocks = int32((n + columns - 1) // columns), int32((k_bytes + pitch - 1) // pitch)
        work = Work(problem, count_tiles(smem, problem, n_tiles), n_tiles, k_blocks)

        # ---- Prologue: issue the copies of all stages but one ----
        x_offsets, weight_offsets = cuda.local.array(x_copies, uint32), cuda.local.array(weight_copies, uint32)
        tile, weight_base = int32(cuda.blockIdx.x), int64(0)
        if tile < work.tiles:
            weight_base = start_tile(smem, operands, scales, work, tile, int32(0), thread, x_offsets, weight_offsets)
        ahead = CopyState(tile, int32(0), int32(0), int32(0), weight_base)
        for _ in range(stages - 1):
            issue_copies(smem, describe_copy(operands, x_offsets, weight_offsets, work.tiles, ahead, thread))
            cp_async_commit_group()
            ahead = advance_copy(smem, operands, scales, work, ahead, thread, x_offsets, weight_offsets)
        wait_for_next_stage()
        cuda.syncthreads()

        # ---- Fragments: where a lane's rows for ldmatrix begin in a stage, and those of the first step ----
        # Lane r of each eight addresses row r of a matrix. In x, bit 3 of the lane selects the matrix 8 rows below, and
        # bit 4 the next vector; in weight bit 3 selects the vector, and bit 4 the next part (`make_load_fragments`).
        warp_row, warp_column = warp // warps_n, warp % warps_n
        r = int32(lane & 7)
        phase = int32(r >> phase_shift)  # of the rows of x and of weight alike
        x_row = int32(warp_row * warp_m + (lane & 15))
        weight_row = int32(warp_column * warp_n + (r >> 1) * 8 + (r & 1) + (lane >> 4) * 2)
        x_fragment = int32(x_row * pitch + (((lane >> 4) ^ phase) << 4))
        weight_fragment = int32(weight_offset + weight_row * pitch + (((lane >> 3 & 1) ^ phase) << 4))
        a, b = load_a(smem.u8, x_fragment), load_b(smem.u8, weight_fragment)

        stage, slot = int32(0), int32(0)
        scale_rows = cuda.local.array(lane_rows, int32)
        while tile < work.tiles:
            info = uint32(tile_info + 8 * slot)
            if by_block:
                # ---- Block scales: the rows of x of this lane, and where scales begin ----
                row, rows, n_tile, group = ld_shared_s32x4(smem.i32, int32(info))
                first = int32(warp // warps_n * warp_m + (lane >> 2))
                for i in range(lane_rows):
                    scale_row = int32(row + min(int32(first + 8 * i), int32(rows - 1)))
                    if gather:
                        scale_row = row_indices[scale_row]
                        scale_row = scale_row if scale_row < x_rows else int32(-1)
                    scale_rows[i] = scale_row
                column = int32(min(int32(n_tile * columns + warp % warps_n * warp_columns), int32(n - 1)))
                n_blocks = int32((n + FP8_SCALE_BLOCK - 1) // FP8_SCALE_BLOCK)
                weight_index = find_weight_scales(
                    group, column // FP8_SCALE_BLOCK, weight_parts * n_blocks, k_blocks, scales.weight_rows
                )
                up, x_index = int64(n_blocks) * step_of_scales(k_blocks), group * scale_group_stride
                factors = load_factors(scales, scale_rows, weight_index, up, x_index, int32(0))

            # ---- Main loop over k, a stage at a time; ``a`` and ``b`` are always loaded a step ahead ----
            d = zeros
            for k_block in range(k_blocks):
                copy = describe_copy(operands, x_offsets, weight_offsets, work.tiles, ahead, thread)
                next_stage = int32(stage + stage_bytes)
                next_stage = int32(0) if next_stage == ring_bytes else next_stage
                x_at, weight_at = int32(stage + x_fragment), int32(stage + weight_fragment)
                if by_block:  # a stage has the 128 elements of k of one block
                    next_k_block = int32(min(int32(k_block + 1), int32(k_blocks - 1)))
                    next_factors = load_factors(scales, scale_rows, weight_index, up, x_index, next_k_block)
                product = zeros if promotes else d
                product, a, b = step_0(smem, product, a, b, x_at, weight_at, copy)
                if steps == 4:
                    product, a, b = step_1(smem, product, a, b, x_at, weight_at, copy)
                    product, a, b = step_2(smem, product, a, b, x_at, weight_at, copy)
                # The last step loads fragments of the next stage.
                issue_last_copies(smem, copy)
                cp_async_commit_group()
                wait_for_next_stage()
                cuda.syncthreads()  # all threads' copies have arrived, and all warps have read this stage
                next_a = load_a(smem.u8, int32(next_stage + x_fragment))
                next_b = load_b(smem.u8, int32(next_stage + weight_fragment))
                product = multiply(product, a, b)
                a, b = next_a, next_b
                if by_block:
                    d = add_scaled(d, product, factors)
                    factors = next_factors
                elif promotes:
                    d = add(d, product, float32(1))
                else:
                    d = product
                stage = next_stage
                ahead = advance_copy(smem, operands, scales, work, ahead, thread, x_offsets, weight_offsets)

            # ---- Epilogue: a lane has 8 neighbouring columns of each of its rows, and four lanes have 32 ----
            row, rows, n_tile, group = ld_shared_s32x4(smem.i32, int32(info))
            scale = smem.f32[info + uint32(4)] * result_scale
            column = int32(n_tile * columns)
            if silu_and_mul:
                warp_first = int32(warp // warps_n * warp_m)
                warp_column = int32(warp % warps_n)
                cuda.syncthreads()  # all warps have read the maxima of the previous tile
                find_maxima(smem, int32(row_max + warp_column * block_m + warp_first), lane, d, scale)
                cuda.syncthreads()
                first = int32(warp_first + (lane >> 2))
                y_row, rows_left = int32(row + first), int32(rows - first)
                column = int32(column + warp_column * warp_columns + (lane & 3) * 8)
                offset = int32(row_max + first)
                store_activated(smem, y, y_scale, n, offset, lane, warp_column, y_row, rows_left, column, d, scale)
            elif has_epilogue_math:
                first = int32(warp // warps_n * warp_m + (lane >> 2))
                column = int32(column + warp % warps_n * warp_n + (lane & 3) * 8)
                finish_columns(y, n, inputs, group, scale, int32(row + first), int32(rows - first), column, d)
            else:
                first = int32(warp // warps_n * warp_m + (lane >> 2))
                column, y_pitch = int32(column + warp % warps_n * warp_n), int32(n >> 1)
                index = int64(row + first) * y_pitch + ((column >> 1) + (lane & 3) * 4)
                columns_left = int32(n - column - (lane & 3) * 8)
                store_rows(y, index, y_pitch, int32(rows - first), columns_left, d, scale)
            tile, slot = int32(tile + int32(cuda.gridDim.x)), int32(slot + 1)
            slot = int32(0) if slot == tile_slots else slot
        wait_for_all()  # copies write to shared memory, which ends with the CTA

    return grouped_gemm_mma, layout.bytes
