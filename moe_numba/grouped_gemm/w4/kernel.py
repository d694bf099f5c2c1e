"""Grouped GEMM kernel for MXFP4 weights: persistent, warp-specialised CTAs that decode weights into registers.

The kernel computes the transposed product, y.T = weight @ x.T: rows of weight are wgmma's M, rows of x its N. With few
rows of x per group it is limited by reading weights, so codes pass through shared memory once and stay 4 bits wide:
each thread decodes its operand A in registers. Rows of x are operand B, in shared memory.

Warps
    The first two or four warpgroups are consumers: each multiplies its own 64 rows of weight by all of the tile's rows
    of x. The last warpgroup fills a ring of stages in shared memory. One thread of its first warp issues TMA and bulk
    loads; its three other warps copy gathered rows of x by ``cp.async``, if there are any. These producers need few
    registers, and ``setmaxnreg`` moves theirs to the consumers.

Stages and barriers
    A stage holds one or two weight tiles for each consumer warpgroup, 64 rows by 64 elements of k each
    (``packing.py``), and the same columns of the tile's rows of x. On its full barrier the TMA producer arrives and
    expects the bytes; with gathered rows the warp that copied them arrives as well. On its empty barrier each consumer
    warp arrives when it has read the stage, weights and x.

Tiles
    CTA c computes tiles c, c + gridDim.x and so on. The ring goes on from one tile to the next, so producers load a
    tile while consumers store the one before. Producers look tiles up; the TMA producer describes each to the consumers
    in shared memory, at the index of the tile's first stage, before it arrives on that stage's full barrier.

`make_kernel`, at the end, has the kernel: barriers, producers and the consumers' loop. What consumers do with a tile
differs with wgmma's N and stands above it: main loops over k, stores of activated rows, `make_compute_tile`.
"""

from functools import cache

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32, uint64

from moe_numba.grouped_gemm.common.constants import AUX_PRODUCER_WARPS, BLOCK_K_BYTES, EPILOGUE_BYTES, SharedMemory
from moe_numba.grouped_gemm.common.epilogue_terms import EpilogueInputs, RowTerms, make_apply_row_terms, make_load_terms
from moe_numba.grouped_gemm.common.gather import GatherSource, make_copy_rows, make_load_row_indices, wait_rows
from moe_numba.grouped_gemm.common.outputs import EpilogueOperands, OutputTile
from moe_numba.grouped_gemm.common.pipeline import allow_dependents
from moe_numba.grouped_gemm.common.scheduler import Problem, divide, make_count_tiles, make_get_tile
from moe_numba.grouped_gemm.common.store_tile import make_epilogue
from moe_numba.grouped_gemm.w4.dequantize import decode_scaled_tile, make_load_tile
from moe_numba.grouped_gemm.w4.layout import W4Layout, check_w4_config
from moe_numba.grouped_gemm.w4.packing import RESULT_EXPONENT, TILE_BYTES
from moe_numba.grouped_gemm.w4.weight_tiles import TILE
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.ptx.arithmetic import uint_as_float
from moe_numba.ptx.cp_async import bulk_load_hint
from moe_numba.ptx.fragments import make_select_rows, make_silu_and_mul, make_swigluoai
from moe_numba.ptx.matrix import make_stmatrix_columns
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ld_shared_s32x4,
    load_nc_u16,
    load_nc_u32x1,
    st_global_s32x4,
)
from moe_numba.ptx.mma import make_ldmatrix_x4, make_mma
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import createpolicy_evict_first, createpolicy_evict_last, tma_load_2d_hint
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import bar_sync, elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_tile_rs, make_wgmma_wait, make_wgmma_wait_registers, wgmma_descriptor

STEPS = 4  # wgmmas per weight tile, each multiplies 16 elements of k
REGISTERS = 4 * STEPS  # a thread's registers of A for a weight tile
# Up to 16 rows of x are multiplied by mma.sync instead. On an H200 a wgmma of 64 rows takes 7.5 ns for 8 columns and
# 9.6 ns for 32, with A in registers and four warpgroups; as many mma.sync for 8 columns take 3.7 ns (lesson 09).
MMA_SYNC_ROWS = 16
ACTIVATED_COLUMNS = 32  # columns of y that a warpgroup stores after an activation: half of its 64 rows of weight
ROW_BYTES = 2 * ACTIVATED_COLUMNS
BUFFER_ROWS = EPILOGUE_BYTES // ROW_BYTES  # activated rows of y that a warpgroup stores at once


# ==== Main loops over k, all ``stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_tiles)`` ====
# Weights are scaled as they are decoded, so the tensor cores add up all of k.


@cache
def make_mma_sync_loop(n, config, layout):
    """Make a main loop for up to 16 rows of x, by ``mma.sync``.

    Its registers of A and of the accumulators are those of wgmma. Each warp loads the rows of x as B by ``ldmatrix``:
    lane ``8 i + r`` addresses vector i, and then vector ``i + 4``, of 16 bytes of row r, which the swizzle of TMA has
    put to place ``i ^ r``. A stage has two weight tiles, unless k ends with the first.
    """
    mma, load_rows = make_mma("bf16", 16, n), make_ldmatrix_x4(tuple(range(0, 128 * n, 1024)))
    load_tile, advance, zeros = make_load_tile(config, layout), make_advance(config.stages), (np.float32(0),) * (n // 2)
    stage_bytes, subtile_bytes, full, empty = layout.stage_bytes, layout.subtile_bytes, layout.full, layout.empty
    has_two = n > 8

    @cuda.jit(device=True)
    def multiply(acc, a, b, c):
        """Add the products of a tile: ``b`` has the rows of x for its first 32 elements of k, ``c`` for the others."""
        acc = mma(acc, a[0:4], b[0:2] + b[4:6] if has_two else b[0:2])
        acc = mma(acc, a[4:8], b[2:4] + b[6:8] if has_two else b[2:4])
        acc = mma(acc, a[8:12], c[0:2] + c[4:6] if has_two else c[0:2])
        return mma(acc, a[12:16], c[2:4] + c[6:8] if has_two else c[2:4])

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, left, row = zeros, int32(k_tiles), int32(lane & 7)
        vector = int32(128 * row + ((lane >> 3 ^ row) << 4))
        while left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            first = int32(stage * stage_bytes + vector)
            codes, scales = load_tile(smem, warp, lane, stage, int32(0))
            b, c = load_rows(smem.u8, first), load_rows(smem.u8, int32(first ^ 64))
            if left > 1:  # load the second tile before the first is decoded, so that the latency is hidden
                second = int32(first + subtile_bytes)
                codes_1, scales_1 = load_tile(smem, warp, lane, stage, int32(1))
                b_1, c_1 = load_rows(smem.u8, second), load_rows(smem.u8, int32(second ^ 64))
                acc = multiply(acc, decode_scaled_tile(codes, scales), b, c)
                acc = multiply(acc, decode_scaled_tile(codes_1, scales_1), b_1, c_1)
            else:
                acc = multiply(acc, decode_scaled_tile(codes, scales), b, c)
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(smem.barriers, empty + stage)
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        return stage, phase, acc

    return main_loop


@cache
def make_simple_loop(n, config, layout):
    """Make a main loop with one set of registers of A.

    A warpgroup decodes a tile, multiplies, and waits. With large wgmmas the other warpgroup keeps the tensor cores busy
    while this one decodes, and the accumulators leave no registers for a second set.
    """
    wgmma, wait = make_wgmma_tile_rs(n, "bf16", STEPS), make_wgmma_wait(n, 0)
    wait_registers, load_tile = make_wgmma_wait_registers(REGISTERS, 0), make_load_tile(config, layout)
    stage_bytes, subtile_bytes, stage_tiles = layout.stage_bytes, layout.subtile_bytes, config.stage_tiles
    full, empty, advance, zeros = layout.full, layout.empty, make_advance(config.stages), (np.float32(0),) * (n // 2)

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, left = zeros, int32(k_tiles)
        while left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            for tile in range(min(left, stage_tiles)):
                codes, scales = load_tile(smem, warp, lane, stage, int32(tile))
                a = decode_scaled_tile(codes, scales)
                acc = wgmma(acc, a, wgmma_descriptor(smem.u8, int32(stage * stage_bytes + tile * subtile_bytes)))
                wait_registers(a)
                acc = wait(acc)
            if lane == 0:  # for all lanes: the wait was warp-synchronous, and they read their codes before it
                mbarrier_arrive(smem.barriers, empty + stage)
            stage, phase = advance(stage, phase)
            left = int32(left - stage_tiles)
        return stage, phase, acc

    return main_loop


@cache
def make_overlapped_loop(n, config, layout):
    """Make a main loop with two sets of registers of A: a tile is decoded while the wgmmas of the previous one run.

    Tiles alternate between ``a_0`` and ``a_1``. Before a set is decoded anew, the thread waits for the wgmmas that read
    it; those of the other set may still run. Then it releases the stage that the completed wgmmas read. If a stage has
    two tiles, it does so after the second, in ``a_1``: the wgmmas of ``a_0`` complete first.
    """
    wgmma, wait = make_wgmma_tile_rs(n, "bf16", STEPS), make_wgmma_wait(n, 0)
    wait_tile, wait_both = make_wgmma_wait_registers(REGISTERS, 1), make_wgmma_wait_registers(2 * REGISTERS, 0)
    load_tile, advance, single = make_load_tile(config, layout), make_advance(config.stages), config.stage_tiles == 1
    stage_bytes, subtile_bytes, full, empty = layout.stage_bytes, layout.subtile_bytes, layout.full, layout.empty
    zeros, no_registers = (np.float32(0),) * (n // 2), (np.uint32(0),) * REGISTERS

    @cuda.jit(device=True)
    def release(smem, lane, stage):
        if lane == 0 and stage >= 0:
            mbarrier_arrive(smem.barriers, empty + stage)

    @cuda.jit(device=True)
    def main_loop(smem, warp, lane, stage, phase, k_tiles):
        acc, a_0, a_1 = zeros, no_registers, no_registers
        stage_0, stage_1 = int32(-1), int32(-1)  # to be released when the wgmmas of a_0 and of a_1 have completed
        left = int32(k_tiles)
        while left > 1:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, scales_0 = load_tile(smem, warp, lane, stage, int32(0))
            b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            if not single:  # load the second tile before the first is decoded, so that the latency is hidden
                codes_1, scales_1 = load_tile(smem, warp, lane, stage, int32(1))
            wait_tile(a_0)
            if single:
                release(smem, lane, stage_0)
            a_0 = decode_scaled_tile(codes_0, scales_0)
            acc = wgmma(acc, a_0, b)
            if single:
                stage_0 = stage
                stage, phase = advance(stage, phase)
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                codes_1, scales_1 = load_tile(smem, warp, lane, stage, int32(0))
                b = wgmma_descriptor(smem.u8, int32(stage * stage_bytes))
            else:
                b = uint64(b + uint64(subtile_bytes >> 4))
            wait_tile(a_1)
            release(smem, lane, stage_1)
            a_1 = decode_scaled_tile(codes_1, scales_1)
            acc = wgmma(acc, a_1, b)
            stage_1 = stage
            stage, phase = advance(stage, phase)
            left = int32(left - 2)
        if left > 0:
            mbarrier_wait_parity(smem.barriers, full + stage, phase)
            codes_0, scales_0 = load_tile(smem, warp, lane, stage, int32(0))
            wait_tile(a_0)
            if single:
                release(smem, lane, stage_0)
            a_0 = decode_scaled_tile(codes_0, scales_0)
            acc = wgmma(acc, a_0, wgmma_descriptor(smem.u8, int32(stage * stage_bytes)))
            stage_0 = stage
            stage, phase = advance(stage, phase)
        wait_both(a_0 + a_1)
        acc = wait(acc)
        release(smem, lane, stage_0)
        release(smem, lane, stage_1)
        return stage, phase, acc

    return main_loop


# ==== A tile of a consumer warpgroup: biases, main loop, epilogue ====


@cache
def make_store_activated(n, layout):
    """Make ``store_activated(values, smem, output, warp, lane, tile)``: store the rows of y.

    ``n`` is a multiple of 16, and the thread has n / 4 values, two for each eight rows.
    The warpgroup transposes up to 64 rows through its shared-memory buffer, so that four lanes store the 64 bytes of a
    row. The 16-byte vectors of a row are XORed with half of the row number, so that the eight rows of a ``stmatrix``
    fall into different banks.
    """
    # stmatrix_columns takes a thread's values of eight rows of x for those of one row, and the values of the next
    # eight for those of a second row: it stores twice as many rows.
    epilogue_offset, stmatrix = layout.epilogue_offset, make_stmatrix_columns(2 * ROW_BYTES)

    @cuda.jit(device=True)
    def store_rows(first_value, values, smem, output, warp, lane, tile):
        first, count = int32(4 * first_value), 4 * len(values)  # rows
        warpgroup = int32(warp >> 2)
        buffer = int32(epilogue_offset + warpgroup * EPILOGUE_BYTES)
        bar_sync(int32(2 + warpgroup), 128)  # all warps have read the previous rows
        to = int32(buffer + (lane & 15) * ROW_BYTES + (((warp & 3) ^ (lane >> 1 & 3)) << 4))
        stmatrix(smem.u8, to, values, float32(1))
        bar_sync(int32(2 + warpgroup), 128)
        vector, column = int32(lane & 3), int32(tile.column + warpgroup * ACTIVATED_COLUMNS)
        for j in range(0, count, 32):
            t = int32(j + 8 * (warp & 3) + (lane >> 2))
            source = int32(buffer + t * ROW_BYTES + ((vector ^ (t >> 1 & 3)) << 4))
            a, b, c, d = ld_shared_s32x4(smem.i32, source >> 2)
            if first + t < tile.rows and column < output.n:
                y_index = (int64(tile.row) + (first + t)) * (output.n >> 1) + ((column >> 1) + vector * 4)
                st_global_s32x4(output.y, y_index, a, b, c, d)

    return make_for_each_chunk(n // 4, BUFFER_ROWS // 4, store_rows)


def make_compute_tile(sizes, config, layout):
    """Make ``stage, phase = compute_tile(smem, output, warp, lane, stage, phase, k_tiles, tile)``.

    It multiplies with the smallest wgmma N in ``sizes``, which descend, that holds the tile's rows of x.
    """
    n, is_last = sizes[0], len(sizes) == 1
    next_n, compute_smaller = (0, None) if is_last else (sizes[1], make_compute_tile(sizes[1:], config, layout))
    if n <= MMA_SYNC_ROWS and config.stage_tiles == 2:
        main_loop = make_mma_sync_loop(n, config, layout)
    else:
        main_loop = (make_overlapped_loop if config.overlap else make_simple_loop)(n, config, layout)
    load_terms, epilogue = make_load_terms(config), make_epilogue(n, config, layout)
    activates, interleaved = bool(config.activation), config.activation == "swigluoai"
    has_bias, bias_is_f32 = bool(config.bias), config.bias == "f32"
    padded = -(-n // 16) * 16
    padding, store_activated = (np.float32(0),) * ((padded - n) // 4), make_store_activated(padded, layout)
    apply_row_terms, select_gate, select_up = make_apply_row_terms(n), make_select_rows(n, 0), make_select_rows(n, 1)
    activate = make_swigluoai(n // 2, config.alpha, config.limit) if interleaved else make_silu_and_mul(n // 2)

    @cuda.jit(device=True)
    def load_bias(inputs, index):
        if bias_is_f32:
            return uint_as_float(load_nc_u32x1(inputs.bias, 2 * index))
        return uint_as_float(uint32(load_nc_u16(inputs.bias, index) << uint32(16)))

    @cuda.jit(device=True)
    def compute_tile(smem, output, warp, lane, stage, phase, k_tiles, tile):
        if is_last or tile.subtile_rows > next_n:
            # Biases are loaded before the main loop, which hides their latency.
            if activates:
                # A warp multiplies 16 rows of weight: eight rows of gate, then the eight rows of up that belong to
                # them. So a thread has a gate and its up, and the activation needs no exchange.
                # The biases of a group are in the order of the rows of weight before packing.
                bias_gate, bias_up = float32(0), float32(0)
                if has_bias:
                    column, n_y = int32(tile.column + 8 * warp + (lane >> 2)), output.n
                    if column < n_y:
                        first = int64(tile.group) * (2 * n_y)
                        bias_gate = load_bias(output.inputs, first + (2 * column if interleaved else column))
                        bias_up = load_bias(output.inputs, first + (2 * column + 1 if interleaved else n_y + column))
                terms = RowTerms(tile.scale, tile.scale, bias_gate, bias_up)
            else:
                terms = load_terms(output.inputs, tile, warp, lane, output.n)

            stage, phase, acc = main_loop(smem, warp, lane, stage, phase, k_tiles)

            if activates:
                acc = apply_row_terms(acc, terms)
                values = activate(select_gate(acc), select_up(acc))
                store_activated(values + padding if padded > n else values, smem, output, warp, lane, tile)
            else:
                epilogue(smem, output, warp, lane, acc, acc, tile, terms)
        else:
            stage, phase = compute_smaller(smem, output, warp, lane, stage, phase, k_tiles, tile)
        return stage, phase

    return compute_tile


# ==== The kernel ====


@cuda.jit(device=True)
def x_tiles_of(k_tiles):
    """Return the number of tiles of x that belong to ``k_tiles`` tiles of weight: as many.

    Returning ``k_tiles`` itself changes the machine code of the producer, and records were measured with this one.
    """
    return divide(int32(k_tiles * TILE + (TILE - 1)), TILE)


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs; return it and its dynamic shared memory in bytes.

    A CTA has 128 threads for each consumer warpgroup and 128 for the producers.
    """
    check_w4_config(config)
    layout = W4Layout(config)
    gather, early_weight = config.gather, config.early_weight
    stages, stage_tiles = config.stages, config.stage_tiles
    warpgroups, consumer_warps = config.warpgroups, layout.consumer_warps
    full, empty, tile_info_offset, advance = layout.full, layout.empty, layout.tile_info_offset, make_advance(stages)
    stage_bytes, subtile_bytes, box_rows = layout.stage_bytes, layout.subtile_bytes, config.box_rows
    box_bytes, columns = box_rows * BLOCK_K_BYTES, config.columns
    weight_offset, weight_bytes = layout.weight_offset, layout.weight_bytes
    row_index_offset, indices_per_warp = layout.row_index_offset, layout.row_indices
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(layout.registers[0]), make_setmaxnreg_inc(layout.registers[1])
    count_tiles, get_tile = make_count_tiles(config, layout), make_get_tile(config, layout)
    load_row_indices, copy_rows = make_load_row_indices(config, layout.x_tiles), make_copy_rows(config, layout.x_tiles)
    compute_tile, result_scale = make_compute_tile(config.mma_n, config, layout), float32(2.0**RESULT_EXPONENT)

    @cuda.jit(device=True)
    def count_boxes(info):
        """Return the number of TMA loads that copy a tile's rows of x for one weight tile.

        They copy ``subtile_rows`` rows, as many in each tile of a group: a multiple of 8, of which the tile has the
        first ``rows``. wgmma multiplies what shared memory holds in further rows; the epilogue does not store these.
        """
        return int32(0) if gather else divide(int32(info.subtile_rows + box_rows - 1), box_rows)

    @cuda.jit(device=True)
    def publish_tile(smem, info, stage):
        """Store a tile for the consumers; ``stage`` is the tile's first one, and empty.

        Consumers read it after the stage's full barrier, on which this thread arrives afterwards.
        """
        g, row, rows, subtile_rows, n_tile = info
        to = uint32(tile_info_offset + 4 * stage)
        smem.i32[to] = row
        smem.i32[to + uint32(1)] = int32(rows | (subtile_rows << 16))
        smem.i32[to + uint32(2)] = int32(n_tile * columns)
        smem.i32[to + uint32(3)] = g

    @cuda.jit(device=True)
    def begin_stage(smem, weight, n_tiles, k_tiles, info, k_tile, boxes, stage, policy):
        """Announce the bytes of a stage, weights and rows of x, and copy its weight tiles from ``k_tile`` on."""
        tiles = int32(min(stage_tiles, k_tiles - k_tile))
        x_bytes = int32(x_tiles_of(tiles) * boxes * box_bytes)
        mbarrier_arrive_expect_tx(smem.barriers, full + stage, int32(x_bytes + warpgroups * tiles * TILE_BYTES))
        for w in range(warpgroups):
            # The output's last tile may lie partly beyond the weight: clamp its rows.
            row = int64(info.group) * n_tiles + min(int32(info.n_tile * warpgroups + w), int32(n_tiles - 1))
            to = int32(weight_offset + stage * weight_bytes + w * (stage_tiles * TILE_BYTES))
            index, size = (row * k_tiles + k_tile) * TILE_BYTES, int32(tiles * TILE_BYTES)
            bulk_load_hint(smem.u8, to, weight, index, size, smem.barriers, full + stage, policy)

    @cuda.jit
    def grouped_gemm_w4(
        map_x,
        weight,
        y,
        lengths,
        starts,
        groups,
        total_rows,
        capacity,
        n,
        n_tiles,
        k_tiles,
        x,
        row_indices,
        x_rows,
        row_bytes,
        valid_bytes,
        bias,
        row_weights,
        scatter_indices,
        y_rows,
    ):
        # ---- Shared memory and barriers ----
        smem = SharedMemory(
            cuda.shared.array(0, uint8, 1024),
            cuda.shared.array(0, int32, 1024),
            cuda.shared.array(0, float32, 1024),
            cuda.shared.array(0, uint64, 1024),
        )
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(smem.barriers, full + stage, 1 + gather)
                mbarrier_init(smem.barriers, empty + stage, consumer_warps)
            fence_mbarrier_init()

        # ---- Tiles of all groups; `count_tiles` synchronises the CTA, so all threads see the barriers ----
        if not early_weight:
            griddepcontrol_wait()
        problem = Problem(lengths, starts, groups, total_rows, capacity)
        tiles = count_tiles(smem, problem, divide(int32(n_tiles + warpgroups - 1), warpgroups))
        if early_weight and warp != consumer_warps:  # the TMA producer's warp waits later
            griddepcontrol_wait()

        if warp >= consumer_warps:
            setmaxnreg_dec()
            if warp == consumer_warps and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                # ---- TMA producer: weights, rows of x that are not gathered, and the tiles for the consumers ----
                stage, phase, early = int32(0), uint32(1), int32(0)
                evict_first, evict_last = createpolicy_evict_first(), createpolicy_evict_last()
                if early_weight:
                    # Fill the pipeline with weights while the kernel before still runs. That kernel may compute x, but
                    # the group sizes must be older: written by kernels that had completed when it allowed its
                    # dependents to start. Afterwards ``early`` is the number of stages that have their weights.
                    tile = int32(cuda.blockIdx.x)
                    while tile < tiles and early < stages:
                        info = get_tile(smem, problem, tile)
                        boxes = count_boxes(info)
                        publish_tile(smem, info, early)
                        for k_tile in range(0, min(k_tiles, int32((stages - early) * stage_tiles)), stage_tiles):
                            begin_stage(smem, weight, n_tiles, k_tiles, info, int32(k_tile), boxes, early, evict_first)
                            early = int32(early + 1)
                        tile = int32(tile + int32(cuda.gridDim.x))
                    griddepcontrol_wait()
                tile = int32(cuda.blockIdx.x)
                while tile < tiles:
                    info = get_tile(smem, problem, tile)  # before the wait, which hides its latency
                    # A tile that begins in an early stage is already described, and nothing waits for early stages:
                    # once consumers have released one, which they may if rows are gathered, the parity has flipped, and
                    # the wait would last until they release it again.
                    if early == 0:
                        mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                        publish_tile(smem, info, stage)
                    boxes = count_boxes(info)
                    for k_tile in range(0, k_tiles, stage_tiles):
                        if early > 0:  # the weights are loaded, and only rows of x are missing
                            early = int32(early - 1)
                        else:
                            mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                            allow_dependents(stage, phase)
                            begin_stage(smem, weight, n_tiles, k_tiles, info, int32(k_tile), boxes, stage, evict_first)
                        for i in range(x_tiles_of(int32(min(stage_tiles, k_tiles - k_tile)))):
                            k, to = int32(k_tile * TILE + i * TILE), int32(stage * stage_bytes + i * subtile_bytes)
                            for b in range(boxes):
                                box_row, barriers = int32(info.row + b * box_rows), smem.barriers
                                tma_load_2d_hint(smem.u8, to, map_x, 0, k, box_row, barriers, full + stage, evict_last)
                                to = int32(to + box_bytes)
                        stage, phase = advance(stage, phase)
                    tile = int32(tile + int32(cuda.gridDim.x))
                griddepcontrol_launch_dependents()
            if gather and warp > consumer_warps:
                # ---- Auxiliary producers: each of three warps copies the gathered rows of x for every third stage ----
                aux_warp = warp - consumer_warps - 1
                stage, phase, skip = int32(0), uint32(1), int32(aux_warp)  # skip: stages before this warp's next one
                indices = int32(row_index_offset + aux_warp * indices_per_warp)
                source = GatherSource(x, row_indices, x_rows, uniform(row_bytes), valid_bytes)
                tile = int32(cuda.blockIdx.x)
                while tile < tiles:
                    info = get_tile(smem, problem, tile)
                    load_row_indices(smem, indices, lane, source, info)
                    for k_tile in range(0, k_tiles, stage_tiles):
                        if skip == 0:
                            mbarrier_wait_parity(smem.barriers, empty + stage, phase)
                            for i in range(x_tiles_of(int32(min(stage_tiles, k_tiles - k_tile)))):
                                # `copy_rows` counts the ring in tiles of x, not in stages.
                                to = int32(stage_tiles * stage + i)
                                # This is k_tile + i, written so for the reason in `x_tiles_of`.
                                x_tile = int32(k_tile // stage_tiles * stage_tiles + i)
                                copy_rows(smem, indices, lane, to, x_tile, source, info)
                            wait_rows()
                            cuda.syncwarp()
                            if lane == 0:
                                mbarrier_arrive(smem.barriers, full + stage)
                        skip = int32(skip + AUX_PRODUCER_WARPS - 1) if skip == 0 else int32(skip - 1)
                        stage, phase = advance(stage, phase)
                    tile = int32(tile + int32(cuda.gridDim.x))
        else:
            # ---- Consumers: each warpgroup multiplies 64 rows of weight with all rows of x of a tile ----
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            u8, barriers = uniform_array(smem.u8), uniform_array(smem.barriers)
            smem = SharedMemory(u8, smem.i32, smem.f32, barriers)
            warp = uniform(warp)
            scales = row_weights, row_weights  # scales of rows of x and of weight, which the kernel does not have
            inputs = EpilogueInputs(*scales, bias, row_weights, row_indices, x_rows, scatter_indices, y_rows)
            output = EpilogueOperands(y, y, n, inputs)
            tile = int32(cuda.blockIdx.x)
            while tile < tiles:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                mbarrier_wait_parity(smem.barriers, full + stage, phase)
                row, rows, column, group = ld_shared_s32x4(smem.i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # lane 0 releases the stage for all lanes
                row_count, subtile_rows = uniform(int32(rows & 0xFFFF)), uniform(int32(rows >> 16))
                output_tile = OutputTile(uniform(row), row_count, subtile_rows, column, result_scale, group)
                stage, phase = compute_tile(smem, output, warp, lane, stage, phase, k_tiles, output_tile)
                tile = int32(tile + int32(cuda.gridDim.x))

    return grouped_gemm_w4, layout.bytes
