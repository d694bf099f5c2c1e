"""Grouped GEMM kernel for block scales: y[rows of group g] = x[rows of group g] @ weight[g].T.

Each element of the FP8 product of 128 elements of k must be multiplied by a scale of x, one for each row, and one of
weight, one for 128 rows of weight. With rows of x as wgmma's rows (A), a thread has two rows, so it needs two factors
for each block of columns; in the transposed product of ``wgmma/kernel.py`` it needs one per column.

CTAs are persistent and have 12 warps:

- Warps 0 to 7, two consumer warpgroups, each multiply 64 rows of x by the tile's weights. A warp stores its 16 rows.
- One thread of warp 8 looks up the tiles, describes them to the consumers and issues the TMA loads of weight and x.
- Warps 9 and 10 each write the factors of 64 rows to every stage. If rows of x are gathered, warps 9 to 11 take turns
  instead: each copies all rows and writes all factors of every third k block.

A stage of the ring holds 128 elements of k of the tile's rows of weight, in two halves, and of 128 rows of x, with up
to three factors for each row of x, and the description of the tile that begins with it. The epilogue has buffers of its
own, from which TMA stores y while the warp computes its next tile. Each stage has two mbarriers:

- full: producers arrive (the TMA thread with the number of bytes it loads, and two auxiliary warps or, with gather,
  one), consumers wait.
- empty: lane 0 of each consumer warp arrives, in a cluster at the barriers of both CTAs; producers wait.

Every role goes through the same tiles in the same order and keeps its own ``stage, phase``. A cluster of two CTAs
computes pairs of tiles. If they have the same columns, each CTA loads half of the weights and multicasts it to both.
The CTAs fill their stages in step even where they share nothing or one has no rows; see ``pairs.py``.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.block_scaled.balanced import first_of_cta, first_walk, make_balanced_tiles, next_of_cta
from moe_numba.grouped_gemm.block_scaled.config import (
    BLOCK_M,
    BOX_ROWS,
    FACTOR_WARPS,
    BlockScaledLayout,
    check_block_scaled_config,
)
from moe_numba.grouped_gemm.block_scaled.epilogue import make_store_tile
from moe_numba.grouped_gemm.block_scaled.pairs import make_look_up_tile, pairs_of_group
from moe_numba.grouped_gemm.common.block_scales import make_load_four, make_weight_scales, make_x_scales
from moe_numba.grouped_gemm.common.constants import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, CONSUMER_WARPS, SharedMemory
from moe_numba.grouped_gemm.common.gather import (
    GatherSource,
    index_slot,
    make_copy_rows,
    make_load_row_indices,
    wait_rows,
)
from moe_numba.grouped_gemm.common.pipeline import CLUSTER_MASK, make_release_stage
from moe_numba.grouped_gemm.common.scheduler import Problem, divide, make_count_tiles, make_tile_loop
from moe_numba.ptx.accumulators import make_fma_blocks
from moe_numba.ptx.arithmetic import float_as_int, int_as_float
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.cp_async import make_bulk_wait_group
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_test_wait_parity,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4, st_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_first,
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_3d_hint,
    tma_load_3d_multicast_hint,
)
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile, make_wgmma_wait, wgmma_descriptor
from moe_numba.quantise import FP8_SCALE_BLOCK

BOX_BYTES = BOX_ROWS * BLOCK_K_BYTES
ROWS_PER_LANE = BLOCK_M // 32
bulk_wait = make_bulk_wait_group(0)


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs of 384 threads; return it and its dynamic shared memory in bytes."""
    check_block_scaled_config(config)
    layout = BlockScaledLayout(config)

    # ---- Compile-time choices: Numba drops the branches of an ``if`` with one of these names ----
    stages, stage_bytes, x_offset = config.stages, layout.stage_bytes, layout.x_offset
    full, empty = layout.full, layout.empty
    tiles_offset, tile_info_offset = layout.tiles_offset, layout.tile_info_offset
    factor_offset, stage_factors = layout.factor_offset, layout.stage_factors
    row_index_offset, row_indices_of_warp = layout.row_index_offset, layout.row_indices
    columns, half_rows, half_bytes = config.columns, config.half_rows, config.half_rows * BLOCK_K_BYTES
    cluster_size, pairs = config.cluster_size, config.cluster_size == 2
    gather, silu_and_mul, keep_weight = config.gather, config.silu_and_mul, config.keep_weight
    masked, packed_weight_scale = config.row_layout == "masked", config.packed_weight_scale
    last_aux_warp = CONSUMER_WARPS + (AUX_PRODUCER_WARPS if gather else FACTOR_WARPS)
    arriving_warps = 1 if gather else FACTOR_WARPS  # auxiliary warps that arrive at a stage's full barrier
    # A tile of 256 rows of weight is multiplied in two halves: two accumulators leave registers for one wgmma result.
    halves = config.block_n == 2 * FP8_SCALE_BLOCK
    wgmma_n = config.half_rows if halves else config.block_n
    half_step = half_bytes >> 4  # from a matrix descriptor of the first half to that of the second
    # A tile of 192 columns begins at the start or in the middle of a scale block, so it needs a scale per 64 columns.
    weight_scales, scaled_columns, has_three = config.weight_scales, config.scaled_columns, config.weight_scales == 3
    weight_parts = 2 if silu_and_mul else 1
    tests_early = config.early_test or not halves
    zeros = (np.float32(0),) * (wgmma_n // 2)

    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168. Two accumulators and
    # the addresses of another CTA's barriers need more than 224; a producer that gathers needs more than 40.
    producer_registers, consumer_registers = (40, 232) if config.needs_registers else (56, 224)
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(producer_registers), make_setmaxnreg_inc(consumer_registers)
    if config.balanced:  # tiles are numbered by CTA, and otherwise tiles, or pairs of them, by cluster
        count_tiles, look_up_tile = make_balanced_tiles(config, layout)
        first_tile, next_tile = first_of_cta, next_of_cta
    else:
        first_tile, next_tile = make_tile_loop(cluster_size)
        count_tiles = make_count_tiles(config, layout, pairs_of_group if pairs else None)
        look_up_tile = make_look_up_tile(config, layout)
    advance, release_stage = make_advance(stages), make_release_stage(cluster_size)
    find_weight_scale, _, load_weight_scale = make_weight_scales(packed_weight_scale)
    k_offset, load_x_scale = make_x_scales(config.packed_x_scale)
    load_four_of_x = make_load_four(config.packed_x_scale, config.vector_x_scale)
    load_four_of_weight = make_load_four(packed_weight_scale, config.vector_weight_scale)
    load_row_indices, copy_rows = make_load_row_indices(config, layout), make_copy_rows(config, layout)
    wgmma, wait = make_wgmma_tile(wgmma_n, "e4m3", overwrite=halves), make_wgmma_wait(wgmma_n, 0)
    fma = make_fma_blocks(wgmma_n, scaled_columns)
    store_tile = make_store_tile(config, layout)

    @cuda.jit(device=True)
    def weight_scale_of(info, i, n_blocks, k_blocks, weight_rows):
        """Return the index of the first scale of the tile's ``i``-th block of columns, or of gate (0) and up (1)."""
        # The last columns of the last tile, and a pair's second tile, may lie beyond the weight: clamp.
        if silu_and_mul:  # up lies half the blocks behind gate
            n_block = int32(min(info.n_tile, (n_blocks >> 1) - 1) + (n_blocks >> 1) * i)
        else:
            n_block = int32(min(int32(info.n_tile * columns + i * scaled_columns) >> 7, n_blocks - 1))
        return find_weight_scale(info.group, n_block, n_blocks, k_blocks, weight_rows)

    @cuda.jit(device=True)
    def write_factors(smem, stage, row, scale, a, b, c):
        """Write the factors of a row of x: its scale times the tile's up to three scales of weight."""
        to = int32(factor_offset + stage * stage_factors + 4 * row)
        a, b, c = float_as_int(scale * a), float_as_int(scale * b), float_as_int(scale * c)
        st_shared_s32x4(smem.i32, to, a, b, c, int32(0))

    @cuda.jit(device=True)
    def publish_factors(smem, lane, row, stage, phase, x_0, x_1, a, b, c):
        """Write the factors of two rows to a stage as soon as it is empty, and arrive at its full barrier."""
        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
        write_factors(smem, stage, row, x_0, a, b, c)
        write_factors(smem, stage, int32(row + 32), x_1, a, b, c)
        cuda.syncwarp()
        if lane == 0:
            mbarrier_arrive(smem.barriers, full + stage)
        return advance(stage, phase)

    @cuda.jit
    def block_scaled_gemm(
        map_x,
        map_weight,
        map_y,
        y,
        y_scale,
        lengths,
        starts,
        x_scale,
        weight_scale,
        groups,
        total_rows,
        capacity,
        n,
        k,
        scale_row_stride,
        scale_k_stride,
        scale_group_stride,
        x,
        row_indices,
        x_rows,
        row_bytes,
    ):
        # ---- Shared memory: typed views that all begin at the same address ----
        smem = SharedMemory(
            cuda.shared.array(0, uint8, 1024),
            cuda.shared.array(0, int32, 1024),
            cuda.shared.array(0, float32, 1024),
            cuda.shared.array(0, uint64, 1024),
        )
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)

        # ---- Barriers ----
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(smem.barriers, full + stage, 1 + arriving_warps)  # the TMA thread and auxiliary warps
                mbarrier_init(smem.barriers, empty + stage, CONSUMER_WARPS * cluster_size)
            fence_mbarrier_init()
        if pairs:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        griddepcontrol_wait()

        # ---- Tiles: an exclusive prefix sum over the groups, in shared memory ----
        problem = Problem(lengths, starts, groups, total_rows, capacity)
        k_blocks = int32(int32(k + BLOCK_K_BYTES - 1) >> 7)
        tiles = count_tiles(smem, problem, divide(int32(n + columns - 1), int32(columns)))
        if thread == 0:  # consumer warps have no register left for it
            smem.i32[uint32(tiles_offset)] = tiles
        cuda.syncthreads()

        if warp >= CONSUMER_WARPS:
            # ==== Producer warpgroup ====
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                # ---- TMA: weight, and x unless it is gathered ----
                stage, phase = int32(0), uint32(1)
                evict_last = createpolicy_evict_last()
                weight_policy = evict_last if keep_weight else createpolicy_evict_first()
                tile, walk = first_tile(), first_walk()
                info, shares_weight, walk = look_up_tile(smem, problem, tile, walk)
                while tile < tiles:
                    g, row, rows, _, n_tile = info
                    # Look up the next tile when all stages are in use: the group's size takes a microsecond to arrive.
                    shares, look_up_at = shares_weight, int32(min(stages, k_blocks - 1))
                    tile = next_tile(tile)
                    column = int32(n_tile * columns)
                    rows = rows if column < n else int32(0)  # a pair's second tile may lie beyond the weight
                    two_boxes = rows > BOX_ROWS
                    # TMA loads weight in two halves: those of a tile's rows, or gate and up.
                    second = int32(n + column) if silu_and_mul else int32(column + half_rows)
                    tma_bytes = int32(x_offset)
                    if not gather:
                        tma_bytes = int32(x_offset + 2 * BOX_BYTES) if two_boxes else int32(x_offset + BOX_BYTES)
                    # Describe the tile to the consumers in the slot of its first stage; the full barrier publishes it.
                    mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                    published = uint32(tile_info_offset + 4 * stage)
                    smem.i32[published] = row
                    smem.i32[published + uint32(1)] = rows
                    smem.i32[published + uint32(2)] = column
                    for k_block in range(k_blocks):
                        k_at, offset = int32(k_block * BLOCK_K_BYTES), int32(stage * stage_bytes)
                        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                        mbarrier_arrive_expect_tx(smem.barriers, full + stage, tma_bytes)
                        if pairs and shares:  # each CTA loads one half for both
                            rank = int32(cluster_ctarank())
                            half, to = second if rank else column, int32(offset + rank * half_bytes)
                            tma_load_3d_multicast_hint(
                                *(smem.u8, to, map_weight, 0, k_at, half, g),
                                *(smem.barriers, full + stage, CLUSTER_MASK, weight_policy),
                            )
                        else:
                            to = int32(offset + half_bytes)
                            tma_load_3d_hint(
                                *(smem.u8, offset, map_weight, 0, k_at, column, g),
                                *(smem.barriers, full + stage, weight_policy),
                            )
                            tma_load_3d_hint(
                                *(smem.u8, to, map_weight, 0, k_at, second, g),
                                *(smem.barriers, full + stage, weight_policy),
                            )
                        to = int32(offset + x_offset)
                        if not gather:
                            tma_load_2d_hint(smem.u8, to, map_x, 0, k_at, row, smem.barriers, full + stage, evict_last)
                        if two_boxes and not gather:
                            to, row_1 = int32(to + BOX_BYTES), row + BOX_ROWS
                            tma_load_2d_hint(
                                *(smem.u8, to, map_x, 0, k_at, row_1), *(smem.barriers, full + stage, evict_last)
                            )
                        stage, phase = advance(stage, phase)
                        if k_block == look_up_at:
                            info, shares_weight, walk = look_up_tile(smem, problem, tile, walk)
                griddepcontrol_launch_dependents()

            if (warp > CONSUMER_WARPS) & (warp <= last_aux_warp):
                # ---- Auxiliary warps: the factors of a stage's result ----
                # For each row of x and each block of columns they write the product of the two scales, so that a
                # consumer reads all factors of a row with one load and multiplies none.
                aux_warp = int32(warp - CONSUMER_WARPS - 1)
                n_blocks = int32(((n + 127) >> 7) << 1) if silu_and_mul else int32((n + 127) >> 7)
                weight_rows = int32(n * weight_parts)
                stage, phase = int32(0), uint32(1)
                if not gather:
                    # Each of two warps writes the factors of 64 rows for each stage, two rows per lane. wgmma reads its
                    # operands from the memory that serves as L1 cache, and needs almost all of its bandwidth; a load
                    # from global memory occupies it once for each cache line. Where the scales of a row are contiguous,
                    # the lanes of a load touch 32 lines, so the scales of four stages are loaded at once.
                    zero, one = (float32(0), float32(0), float32(0), float32(0)), int64(1)
                    row = int32(aux_warp * BOX_ROWS + lane)
                    tile, walk = first_tile(), first_walk()
                    info, _, walk = look_up_tile(smem, problem, tile, walk)
                    while tile < tiles:
                        x_0 = int64(info.row) * scale_row_stride
                        if masked:
                            x_0 += info.group * scale_group_stride
                        w_0 = weight_scale_of(info, int32(0), n_blocks, k_blocks, weight_rows)
                        w_1 = weight_scale_of(info, int32(1), n_blocks, k_blocks, weight_rows)
                        w_2 = weight_scale_of(info, int32(2), n_blocks, k_blocks, weight_rows)
                        x_0 += int64(row) * scale_row_stride
                        x_1 = x_0 + int64(32) * scale_row_stride
                        tile = next_tile(tile)
                        valid_0, valid_1 = row < info.rows, row + 32 < info.rows
                        # Look up the next tile in the second round of the loop, or in its only one.
                        look_up_at = int32(min(4, (k_blocks - 1) & -4))
                        for k_block in range(0, k_blocks, 4):
                            # Load while consumers still work on the stages before these.
                            count, at = int32(k_blocks - k_block), k_offset(k_block, scale_k_stride)
                            s, t, b, c = zero, zero, zero, zero
                            if valid_0:
                                s = load_four_of_x(x_scale, x_0 + at, scale_k_stride, count)
                            if valid_1:
                                t = load_four_of_x(x_scale, x_1 + at, scale_k_stride, count)
                            at = int64(k_block >> 2) * weight_rows if packed_weight_scale else int64(k_block)
                            a = load_four_of_weight(weight_scale, w_0 + at, one, count)
                            if weight_scales > 1:
                                b = load_four_of_weight(weight_scale, w_1 + at, one, count)
                            if weight_scales > 2:
                                c = load_four_of_weight(weight_scale, w_2 + at, one, count)
                            stage, phase = publish_factors(smem, lane, row, stage, phase, s[0], t[0], a[0], b[0], c[0])
                            if count > 1:
                                stage, phase = publish_factors(
                                    smem, lane, row, stage, phase, s[1], t[1], a[1], b[1], c[1]
                                )
                            if count > 2:
                                stage, phase = publish_factors(
                                    smem, lane, row, stage, phase, s[2], t[2], a[2], b[2], c[2]
                                )
                            if count > 3:
                                stage, phase = publish_factors(
                                    smem, lane, row, stage, phase, s[3], t[3], a[3], b[3], c[3]
                                )
                            if k_block == look_up_at:
                                info, _, walk = look_up_tile(smem, problem, tile, walk)
                else:
                    # Each of three warps writes the factors of every third k block, and copies its rows of x.
                    skip = int32(aux_warp)  # k blocks, counted across tiles, before this warp's next one
                    indices = int32(row_index_offset + aux_warp * row_indices_of_warp)
                    source = GatherSource(x, row_indices, x_rows, uniform(row_bytes), k)
                    x_scales = cuda.local.array(ROWS_PER_LANE, float32)
                    tile, walk = first_tile(), first_walk()
                    while tile < tiles:
                        info, _, walk = look_up_tile(smem, problem, tile, walk)
                        w_0 = weight_scale_of(info, int32(0), n_blocks, k_blocks, weight_rows)
                        w_1 = weight_scale_of(info, int32(1), n_blocks, k_blocks, weight_rows)
                        w_2 = weight_scale_of(info, int32(2), n_blocks, k_blocks, weight_rows)
                        load_row_indices(smem, indices, lane, source, info)
                        for k_block in range(k_blocks):
                            if skip == 0:
                                # Issue all global loads before waiting for the stage, so that their latency is hidden.
                                b, c = float32(0), float32(0)
                                if weight_scales > 1:
                                    b = load_weight_scale(weight_scale, w_1, k_block, weight_rows)
                                if weight_scales > 2:
                                    c = load_weight_scale(weight_scale, w_2, k_block, weight_rows)
                                a = load_weight_scale(weight_scale, w_0, k_block, weight_rows)
                                offset = k_offset(k_block, scale_k_stride)
                                for i in range(ROWS_PER_LANE):
                                    x_row = smem.i32[uint32(indices + index_slot(int32(lane + 32 * i)))]
                                    index = int64(x_row) * scale_row_stride + offset
                                    x_scales[i] = load_x_scale(x_scale, index, k_block) if x_row >= 0 else float32(0)
                                mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                                copy_rows(smem, indices, lane, stage, k_block, source, info)
                                for i in range(ROWS_PER_LANE):
                                    write_factors(smem, stage, int32(lane + 32 * i), x_scales[i], a, b, c)
                                wait_rows()
                                cuda.syncwarp()
                                if lane == 0:
                                    mbarrier_arrive(smem.barriers, full + stage)
                            skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                            stage, phase = advance(stage, phase)
                        tile = next_tile(tile)
        else:
            # ==== Consumer warpgroups ====
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            # Tell the compiler which values are the same in a warp.
            u8, barriers = uniform_array(smem.u8), uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, uniform_array(smem.f32), barriers)
            warp = uniform(warp)
            tile = first_tile()
            while tile < smem.i32[uint32(tiles_offset)]:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, _ = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                row, rows, column = uniform(row), uniform(rows), uniform(column)
                warpgroup, own_row = int32(warp >> 2), int32(warp * 16)
                if rows > warpgroup * BOX_ROWS:
                    # ---- Main loop over k: 64 rows of x times the tile's weights ----
                    x_start, thread_row = int32(x_offset + warpgroup * BOX_BYTES), int32(own_row + (lane >> 2))
                    acc, acc_1, product, ready = zeros, zeros, zeros, uint32(0)  # acc_1: of the second half
                    x_0, weight_0 = wgmma_descriptor(smem.u8, x_start), wgmma_descriptor(smem.u8, int32(0))
                    for _ in range(k_blocks):
                        if ready == 0:
                            mbarrier_wait_parity(smem.barriers, full + stage, phase)
                        # The factors of the thread's two rows. While wgmma reads shared memory, loads from it are slow:
                        # load them before.
                        factors = int32(factor_offset + stage * stage_factors + 4 * thread_row)
                        a_0, a_1, a_2, _ = ld_shared_s32x4(smem.i32, factors)
                        b_0, b_1, b_2, _ = ld_shared_s32x4(smem.i32, int32(factors + 4 * 8))
                        a = int_as_float(a_0), int_as_float(a_1), int_as_float(a_2)
                        b = int_as_float(b_0), int_as_float(b_1), int_as_float(b_2)
                        step = uint64(uint32(stage) * uint32(stage_bytes >> 4))
                        x_tile, weight_tile = uint64(x_0 + step), uint64(weight_0 + step)
                        if halves:  # both results take the same registers; `wgmma` overwrites the old one
                            product = wait(wgmma(product, x_tile, weight_tile))
                            acc = fma(acc, product, (a[0], b[0]))
                            product = wait(wgmma(product, x_tile, uint64(weight_tile + uint64(half_step))))
                        else:
                            product = wait(wgmma(x_tile, weight_tile))
                        # All lanes have read their factors, which are part of the stage. In a cluster it is released in
                        # both CTAs: either may write the other's.
                        cuda.syncwarp()
                        if lane == 0:
                            release_stage(smem.barriers, empty + stage)
                        stage, phase = advance(stage, phase)
                        if tests_early:
                            # The result arrives during the FFMAs. After the last block of k it is about the first
                            # stage of the next tile, and is not used.
                            ready = mbarrier_test_wait_parity(smem.barriers, full + stage, phase)
                        if halves:
                            acc_1 = fma(acc_1, product, (a[1], b[1]))
                        else:
                            acc = fma(acc, product, (a[0], b[0], a[1], b[1], a[2], b[2]) if has_three else (a[0], b[0]))

                    # ---- Epilogue: the warp's 16 rows ----
                    y_row, y_rows = int32(row + own_row), int32(rows - own_row)
                    store_tile(smem, map_y, y, y_scale, n, warp, lane, acc, acc_1, y_row, y_rows, column)
                else:
                    # ---- No rows for this warpgroup: release the stages, whose empty barriers count all warps ----
                    for _ in range(k_blocks):
                        mbarrier_wait_parity(smem.barriers, full + stage, phase)
                        cuda.syncwarp()
                        if lane == 0:
                            release_stage(smem.barriers, empty + stage)
                        stage, phase = advance(stage, phase)
                tile = next_tile(tile)
            if lane == 0:  # TMA may still read the warp's epilogue buffers
                bulk_wait()
        if pairs:  # the other CTA may still write this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return block_scaled_gemm, layout.bytes
