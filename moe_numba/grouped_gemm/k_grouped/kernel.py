"""K-grouped GEMM kernel: the gradient of the weights, out[g] = a[rows of g].T @ b[rows of g].

Persistent, warp-specialised CTAs compute the tiles of all groups' outputs. An output is n x k, as the weights are, so
the letters differ from wgmma's: n are columns of a, wgmma's M; k are columns of b, wgmma's N; and a group's rows are
wgmma's K, over which the main loop runs. Both operands are MN-major.

A stage holds 64 rows of 128 columns of a and ``block_k`` columns of b, in TMA boxes of 64 columns. One producer thread
issues the loads; each of two consumer warpgroups multiplies 64 columns of a by all columns of b. The two CTAs of a
cluster compute neighbouring tiles of n in step: each loads its own a, and half of b for both by multicast.

Each stage has two barriers:

- full: the producer arrives and expects the bytes of the whole stage, with what the other CTA multicasts into it;
- empty: each consumer warp arrives when it has read the stage, in both CTAs of a cluster, as both write to it.

The last stage of a group may contain rows of the next group, or rows of no group. Consumer warpgroup 0 overwrites them
with zeros in both operands, because zeros in one would not cancel infinities and NaN in the other. Its four warps then
arrive on a "masked" barrier, on which both warpgroups wait. Warpgroup 0 never waits for warpgroup 1, so it may run
ahead: then its epilogue overlaps the main loop of warpgroup 1.

The producer describes a tile in shared memory, at the index of the tile's first stage, before it arrives on that
stage's full barrier. A group without rows takes a stage for its description alone.
"""

from functools import cache

import numpy as np
from numba import cuda, int32, uint8, uint32, uint64

from moe_numba.grouped_gemm.common.constants import CONSUMER_WARPS
from moe_numba.grouped_gemm.common.pipeline import CLUSTER_MASK, make_release_stage
from moe_numba.grouped_gemm.common.scheduler import Problem, divide, make_group_rows
from moe_numba.grouped_gemm.k_grouped.config import (
    BLOCK_N,
    BLOCK_ROWS,
    BOX_BYTES,
    BOX_COLUMNS,
    STORE_BYTES,
    STORE_ROWS,
    KGroupedLayout,
    check_k_grouped_config,
)
from moe_numba.ptx.accumulators import make_for_each_chunk
from moe_numba.ptx.cluster import barrier_cluster_arrive, barrier_cluster_wait, cluster_ctarank
from moe_numba.ptx.cp_async import bulk_commit_group, make_bulk_wait_group_read
from moe_numba.ptx.fence import fence_proxy_async_shared
from moe_numba.ptx.matrix import st_shared_rows_f32, stmatrix_rows
from moe_numba.ptx.mbarrier import (
    fence_mbarrier_init,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait_parity,
)
from moe_numba.ptx.memory import griddepcontrol_launch_dependents, griddepcontrol_wait, ld_shared_s32x4, st_shared_s32x4
from moe_numba.ptx.pipeline import make_advance
from moe_numba.ptx.tma import (
    createpolicy_evict_last,
    tma_load_2d_hint,
    tma_load_2d_multicast_hint,
    tma_reduce_add_3d,
    tma_store_3d,
)
from moe_numba.ptx.warp import FULL_MASK, uniform, uniform_array
from moe_numba.ptx.warpgroup import elect_sync, make_setmaxnreg_dec, make_setmaxnreg_inc
from moe_numba.ptx.wgmma import make_wgmma_descriptor_mn, make_wgmma_tile, make_wgmma_wait

A_BOXES = BLOCK_N // BOX_COLUMNS
VECTORS_PER_ROW = 8  # 16-byte vectors in a row of a box
MASKING_WARPS = 4  # consumer warpgroup 0


@cache
def make_store_chunks(config):
    """Make ``store_chunks(acc, smem, map_out, buffers, lane, group, n_at, k_at, n, k)``: store a warp's 16 rows.

    A chunk is 128 bytes of each row. A warp writes it to one of its two buffers, which a TMA store reads while the warp
    writes the next chunk to the other one. No other warp uses these buffers, so warps need no barrier. The rows begin
    at row ``n_at`` and column ``k_at`` of the group's n x k outputs; the tensor map clips what lies beyond these.
    """
    columns, block_k, is_float32 = config.store_columns, config.block_k, config.out_dtype == "float32"
    write_rows = st_shared_rows_f32 if is_float32 else stmatrix_rows
    tma_store = tma_reduce_add_3d if config.accumulate else tma_store_3d
    # Chunks alternate between the buffers across tiles too if a tile has an even number of them.
    wait_read = make_bulk_wait_group_read(1 if block_k // columns % 2 == 0 else 0)

    @cuda.jit(device=True)
    def store_chunk(first_value, values, smem, map_out, buffers, lane, group, n_at, k_at, n, k):
        first = int32(2 * first_value)  # column: a thread has half of the accumulators of one
        buffer = int32(buffers + first // columns % 2 * STORE_BYTES)
        if elect_sync(FULL_MASK):  # always the same lane: bulk groups belong to the thread that commits them
            wait_read()  # an earlier store has read this buffer
        cuda.syncwarp()
        if is_float32:  # where the lane stores two accumulators
            row, vector, rest = int32(lane >> 2), int32((lane & 3) >> 1), int32((lane & 1) << 3)
        else:  # which row's vector the lane addresses for stmatrix
            row, vector, rest = int32(lane & 15), int32(lane >> 4), int32(0)
        offset = int32(buffer + row * 128 + ((vector ^ (row & 7)) << 4) + rest)  # swizzled as the map says
        write_rows(smem, offset, values)
        fence_proxy_async_shared()
        cuda.syncwarp()
        if elect_sync(FULL_MASK):
            column = int32(k_at + first)
            if (n_at < n) & (column < k):
                tma_store(map_out, 0, column, n_at, group, smem, buffer)
            bulk_commit_group()

    return make_for_each_chunk(block_k // 2, columns // 2, store_chunk)


@cache
def make_kernel(config):
    """Make the kernel, for any number of CTAs of 384 threads; return it and its dynamic shared memory in bytes."""
    check_k_grouped_config(config)
    layout = KGroupedLayout(config)
    stages, stage_bytes, b_offset, block_k = config.stages, layout.stage_bytes, layout.b_offset, config.block_k
    full, empty, masked, tile_info_offset = layout.full, layout.empty, layout.masked, layout.tile_info_offset
    epilogue_offset, boxes, band_tiles = layout.epilogue_offset, stage_bytes // BOX_BYTES, config.band_tiles
    # Numba removes branches on these two that the configuration does not take.
    cluster, accumulate = config.cluster_size, config.accumulate
    cluster_n, cluster_shift, boxes_per_cta = BLOCK_N * cluster, cluster - 1, layout.b_boxes // cluster
    # setmaxnreg redistributes the 168 registers per thread of the launch: 4 p + 8 c = 12 * 168.
    setmaxnreg_dec, setmaxnreg_inc = make_setmaxnreg_dec(40), make_setmaxnreg_inc(232)
    group_rows, advance = make_group_rows(config.row_layout), make_advance(stages)
    release_stage, descriptor = make_release_stage(cluster), make_wgmma_descriptor_mn(BOX_BYTES)
    wgmma = make_wgmma_tile(block_k, "bf16", accumulate=True, a_major="mn", b_major="mn")
    wait, zeros = make_wgmma_wait(block_k, 0), (np.float32(0),) * (block_k // 2)
    store_chunks, wait_for_stores = make_store_chunks(config), make_bulk_wait_group_read(0)

    # Producer and consumers both count the tiles: counted before they part, the numbers would occupy registers of both.
    @cuda.jit(device=True)
    def count_tiles(groups, n, k):
        n_tiles = divide(int32(n + cluster_n - 1), int32(cluster_n))
        k_tiles = divide(int32(k + block_k - 1), int32(block_k))
        return n_tiles, k_tiles, int32(n_tiles * k_tiles), int32(int32(n_tiles * k_tiles) * groups)

    @cuda.jit
    def k_grouped_gemm(map_a, map_b, map_out, lengths, starts, groups, total_rows, n, k):
        # ---- Shared memory: typed views that begin at the same address ----
        smem = cuda.shared.array(0, uint8, 1024)
        smem_i32 = cuda.shared.array(0, int32, 1024)
        barriers = cuda.shared.array(0, uint64, 1024)
        thread = int32(cuda.threadIdx.x)
        lane, warp = int32(thread & 31), int32(thread >> 5)

        # ---- Barriers; both CTAs of a cluster use them, so both wait until all are initialised ----
        if thread == 0:
            for stage in range(stages):
                mbarrier_init(barriers, full + stage, 1)
                mbarrier_init(barriers, empty + stage, CONSUMER_WARPS * cluster)
                mbarrier_init(barriers, masked + stage, MASKING_WARPS)
            fence_mbarrier_init()
        if cluster == 2:
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()
        else:
            cuda.syncthreads()
        griddepcontrol_wait()

        if warp >= CONSUMER_WARPS:
            # ==== Producer: one thread loads a and b by TMA ====
            setmaxnreg_dec()
            if warp == CONSUMER_WARPS and elect_sync(FULL_MASK):  # elect_sync tells the compiler: one thread only
                n_tiles, k_tiles, tiles_per_group, tiles = count_tiles(groups, n, k)
                policy = createpolicy_evict_last()
                stage, phase = int32(0), uint32(1)  # the first wait for each stage returns at once
                problem = Problem(lengths, starts, groups, total_rows, int32(0))
                tile = int32(cuda.blockIdx.x >> cluster_shift)
                rank = int32(cluster_ctarank()) if cluster == 2 else int32(0)
                while tile < tiles:
                    # Within a group tiles are numbered by bands of tiles of n, within a band by tiles of k, and tiles
                    # of n innermost: concurrent CTAs compute an area of the output about as wide as it is high. The
                    # CTAs of a cluster have the same number, and neighbouring tiles of n.
                    group = divide(tile, tiles_per_group)
                    in_group = int32(tile - group * tiles_per_group)
                    band = divide(in_group, int32(band_tiles * k_tiles))
                    in_band = int32(in_group - band * int32(band_tiles * k_tiles))
                    band_width = int32(min(int32(band_tiles), int32(n_tiles - band * band_tiles)))
                    k_tile = divide(in_band, band_width)
                    n_tile = int32(band * band_tiles + in_band - k_tile * band_width)
                    if cluster == 2:
                        n_tile = int32(2 * n_tile + int32(cluster_ctarank()))
                    first_row, rows = group_rows(problem, group)
                    n_at, k_at = int32(n_tile * BLOCK_N), int32(k_tile * block_k)

                    # Describe the tile to the consumers; the first wait below is then for the same phase again.
                    mbarrier_wait_parity(barriers, empty + stage, phase)
                    st_shared_s32x4(smem_i32, int32(tile_info_offset + 4 * stage), rows, n_at, k_at, group)
                    if rows == 0:
                        mbarrier_arrive(barriers, full + stage)
                        stage, phase = advance(stage, phase)

                    for row in range(0, rows, BLOCK_ROWS):
                        mbarrier_wait_parity(barriers, empty + stage, phase)
                        mbarrier_arrive_expect_tx(barriers, full + stage, stage_bytes)
                        offset, row_at = int32(stage * stage_bytes), int32(first_row + row)
                        for box in range(A_BOXES):
                            to, column = int32(offset + box * BOX_BYTES), int32(n_at + box * BOX_COLUMNS)
                            tma_load_2d_hint(smem, to, map_a, 0, column, row_at, barriers, full + stage, policy)
                        for i in range(boxes_per_cta):  # each CTA of a cluster loads half of b, for both
                            box = int32(rank * boxes_per_cta + i)
                            to, column = int32(offset + b_offset + box * BOX_BYTES), int32(k_at + box * BOX_COLUMNS)
                            if cluster == 2:
                                tma_load_2d_multicast_hint(
                                    smem, to, map_b, 0, column, row_at, barriers, full + stage, CLUSTER_MASK, policy
                                )
                            else:
                                tma_load_2d_hint(smem, to, map_b, 0, column, row_at, barriers, full + stage, policy)
                        stage, phase = advance(stage, phase)
                    tile = int32(tile + int32(cuda.gridDim.x >> cluster_shift))
                griddepcontrol_launch_dependents()
        else:
            # ==== Consumers: two warpgroups multiply and store ====
            setmaxnreg_inc()
            stage, phase = int32(0), uint32(0)
            # The next masked barrier; a tile with a partial stage uses one. Warpgroup 1 must release a stage before
            # warpgroup 0 gets it again, so warpgroup 0 is less than a whole ring of stages ahead. With as many masked
            # barriers as stages it cannot complete a second phase of one on which warpgroup 1 still waits.
            mask, mask_phase = int32(0), uint32(0)
            smem, barriers, warp = uniform_array(smem), uniform_array(barriers), uniform(warp)
            buffers = int32(epilogue_offset + warp * (2 * STORE_BYTES))
            tile = int32(cuda.blockIdx.x >> cluster_shift)
            _, _, _, tiles = count_tiles(groups, n, k)
            while tile < tiles:
                stage, phase = uniform(stage), uint32(uniform(int32(phase)))
                mask, mask_phase = uniform(mask), uint32(uniform(int32(mask_phase)))
                mbarrier_wait_parity(barriers, full + stage, phase)
                rows, n_at, k_at, group = ld_shared_s32x4(smem_i32, int32(tile_info_offset + 4 * stage))
                cuda.syncwarp()  # lane 0 releases the stage for all lanes
                rows, n_at, k_at, group = uniform(rows), uniform(n_at), uniform(k_at), uniform(group)
                if rows == 0:
                    if lane == 0:
                        release_stage(barriers, empty + stage)
                    stage, phase = advance(stage, phase)

                # ---- Main loop over the group's rows: full stages ----
                a_offset, acc = int32((warp >> 2) * BOX_BYTES), zeros
                for _ in range(rows >> 6):
                    mbarrier_wait_parity(barriers, full + stage, phase)
                    offset = int32(stage * stage_bytes)
                    a, b = descriptor(smem, offset + a_offset), descriptor(smem, offset + b_offset)
                    acc = wait(wgmma(acc, a, b))
                    if lane == 0:
                        release_stage(barriers, empty + stage)
                    stage, phase = advance(stage, phase)

                # ---- Last stage: warpgroup 0 first writes zeros to the rows that are not the group's ----
                if (rows & (BLOCK_ROWS - 1)) != 0:
                    mbarrier_wait_parity(barriers, full + stage, phase)
                    offset = int32(stage * stage_bytes)
                    if warp < MASKING_WARPS:
                        # A row is 128 contiguous bytes of each box, whatever the swizzle.
                        zero, rows_to_keep = int32(0), int32(rows & (BLOCK_ROWS - 1))
                        first_vector = rows_to_keep * VECTORS_PER_ROW + int32(32 * warp + lane)
                        for vector in range(first_vector, BLOCK_ROWS * VECTORS_PER_ROW, 32 * MASKING_WARPS):
                            for box in range(boxes):
                                index = int32(((offset + box * BOX_BYTES) >> 2) + 4 * vector)
                                st_shared_s32x4(smem_i32, index, zero, zero, zero, zero)
                        fence_proxy_async_shared()  # wgmma reads the zeros, and then TMA overwrites them
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier_arrive(barriers, masked + mask)
                    # Warpgroup 0 waits, too: each of its warps zeroed a part only.
                    mbarrier_wait_parity(barriers, masked + mask, mask_phase)
                    a, b = descriptor(smem, offset + a_offset), descriptor(smem, offset + b_offset)
                    acc = wait(wgmma(acc, a, b))
                    if lane == 0:
                        release_stage(barriers, empty + stage)
                    stage, phase = advance(stage, phase)
                    mask, mask_phase = advance(mask, mask_phase)

                # ---- Epilogue: a warp stores 16 rows; a group without rows has zeros, which need not be added ----
                if not accumulate or rows > 0:
                    warp_n_at = int32(n_at + warp * STORE_ROWS)
                    store_chunks(acc, smem, map_out, buffers, lane, group, warp_n_at, k_at, n, k)
                tile = int32(tile + int32(cuda.gridDim.x >> cluster_shift))
            if elect_sync(FULL_MASK):
                wait_for_stores()  # they read shared memory, which ends with the CTA
        if cluster == 2:  # the other CTA may still multicast into this one's shared memory
            cuda.syncwarp()
            barrier_cluster_arrive()
            barrier_cluster_wait()

    return k_grouped_gemm, layout.bytes
